//! The messages of an event file, written by hand: those of TensorFlow's `event.proto`, `summary.proto` and `graph.proto` that a log of
//! training has. Fields that nothing here reads are left out; protobuf skips them.

use prost::Message;
use prost::bytes::Bytes;
use std::collections::BTreeMap;

/// One record of a file.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    /// The step.
    #[prost(int64, tag = "2")]
    pub step: i64,
    /// The contents.
    #[prost(oneof = "Payload", tags = "3, 4, 5, 7")]
    pub payload: Option<Payload>,
}

/// Contents of a record.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Payload {
    /// First in each file: the version of the format.
    #[prost(string, tag = "3")]
    FileVersion(String),
    /// A [`GraphDef`].
    #[prost(bytes = "bytes", tag = "4")]
    Graph(Bytes),
    /// Numbers.
    #[prost(message, tag = "5")]
    Summary(Summary),
    /// The beginning of a process: readers forget earlier records from this step on.
    #[prost(message, tag = "7")]
    Session(SessionLog),
}

/// Numbers of a step by tag.
#[derive(Clone, PartialEq, Message)]
pub struct Summary {
    /// The numbers.
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<SummaryValue>,
}

/// A number, or a histogram.
#[derive(Clone, PartialEq, Message)]
pub struct SummaryValue {
    /// Its name.
    #[prost(string, tag = "1")]
    pub tag: String,
    /// The value.
    #[prost(oneof = "Number", tags = "2, 5")]
    pub number: Option<Number>,
}

/// The value of a tag.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Number {
    /// A number.
    #[prost(float, tag = "2")]
    Scalar(f32),
    /// A histogram.
    #[prost(message, tag = "5")]
    Histogram(HistogramProto),
}

/// A histogram. Bucket `i` has the numbers between limits `i - 1` and `i`.
#[derive(Clone, PartialEq, Message)]
pub struct HistogramProto {
    /// The least number.
    #[prost(double, tag = "1")]
    pub min: f64,
    /// The greatest number.
    #[prost(double, tag = "2")]
    pub max: f64,
    /// Their count.
    #[prost(double, tag = "3")]
    pub num: f64,
    /// Their sum.
    #[prost(double, tag = "4")]
    pub sum: f64,
    /// The sum of their squares.
    #[prost(double, tag = "5")]
    pub sum_squares: f64,
    /// Upper ends of the buckets, ascending.
    #[prost(double, repeated, tag = "6")]
    pub bucket_limit: Vec<f64>,
    /// Numbers in each.
    #[prost(double, repeated, tag = "7")]
    pub bucket: Vec<f64>,
}

/// The beginning or end of a process.
#[derive(Clone, PartialEq, Message)]
pub struct SessionLog {
    /// 1 for a beginning.
    #[prost(int32, tag = "1")]
    pub status: i32,
    /// A text: which training begins or goes on.
    #[prost(string, tag = "3")]
    pub msg: String,
}

/// A graph.
#[derive(Clone, PartialEq, Message)]
pub struct GraphDef {
    /// Nodes with unique names.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeDef>,
    /// The version of the format.
    #[prost(message, optional, tag = "4")]
    pub versions: Option<VersionDef>,
}

/// A version.
#[derive(Clone, PartialEq, Message)]
pub struct VersionDef {
    /// That of the writer.
    #[prost(int32, tag = "1")]
    pub producer: i32,
}

/// A node.
#[derive(Clone, PartialEq, Message)]
pub struct NodeDef {
    /// Scopes and a name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The op.
    #[prost(string, tag = "2")]
    pub op: String,
    /// Operands: `NODE`, `NODE:RESULT`, or `^NODE` for one to wait for.
    #[prost(string, repeated, tag = "3")]
    pub input: Vec<String>,
    /// The device, or the request for one.
    #[prost(string, tag = "4")]
    pub device: String,
    /// Attributes by name.
    #[prost(btree_map = "string, message", tag = "5")]
    pub attr: BTreeMap<String, AttrValue>,
}

/// The value of an attribute.
#[derive(Clone, PartialEq, Message)]
pub struct AttrValue {
    /// The value.
    #[prost(oneof = "Attr", tags = "1, 2")]
    pub value: Option<Attr>,
}

/// Kinds of attributes.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Attr {
    /// Several values.
    #[prost(message, tag = "1")]
    List(ShapeList),
    /// A text.
    #[prost(bytes = "bytes", tag = "2")]
    Text(Bytes),
}

/// Shapes of results.
#[derive(Clone, PartialEq, Message)]
pub struct ShapeList {
    /// One per result.
    #[prost(message, repeated, tag = "7")]
    pub shape: Vec<ShapeProto>,
}

/// A shape.
#[derive(Clone, PartialEq, Message)]
pub struct ShapeProto {
    /// The axes.
    #[prost(message, repeated, tag = "2")]
    pub dim: Vec<DimProto>,
}

/// An axis.
#[derive(Clone, PartialEq, Message)]
pub struct DimProto {
    /// The extent; -1 where it is a symbol.
    #[prost(int64, tag = "1")]
    pub size: i64,
    /// The symbol.
    #[prost(string, tag = "2")]
    pub name: String,
}
