//! The messages of `onnx.proto` that importing needs, written by hand; field numbers are those of
//! ONNX 1.23.
//!
//! `raw_data` is [`Bytes`], so decoding from a mapped file copies no weights. Fields that nothing
//! reads are left out; protobuf skips them. Nesting is bounded by prost's recursion limit of 100
//! messages.

use prost::Message;
use prost::bytes::Bytes;

/// A model file.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    /// Version of the file format.
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    /// Name of the exporter.
    #[prost(string, tag = "2")]
    pub producer_name: String,
    /// Version of the exporter.
    #[prost(string, tag = "3")]
    pub producer_version: String,
    /// The graph.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// Operator sets that the graph uses.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Functions of the model.
    #[prost(message, repeated, tag = "25")]
    pub functions: Vec<FunctionProto>,
}

/// An operator set and its version.
#[derive(Clone, PartialEq, Message)]
pub struct OperatorSetIdProto {
    /// Domain; empty for the standard operators.
    #[prost(string, tag = "1")]
    pub domain: String,
    /// Version.
    #[prost(int64, tag = "2")]
    pub version: i64,
}

/// A graph.
#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    /// Nodes, in topological order.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    /// Name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Named constants.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    /// Inputs; may repeat the names of initialisers.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// Results.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// Types of inner values: hints.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
    /// Sparse constants.
    #[prost(message, repeated, tag = "15")]
    pub sparse_initializer: Vec<SparseTensorProto>,
}

/// A node.
#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    /// Operands; an empty name is an absent optional operand.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Results; an empty name is an unused one.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// Name, may be empty.
    #[prost(string, tag = "3")]
    pub name: String,
    /// Operator.
    #[prost(string, tag = "4")]
    pub op_type: String,
    /// Attributes.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
    /// Domain of the operator.
    #[prost(string, tag = "7")]
    pub domain: String,
    /// Tells functions of one name apart.
    #[prost(string, tag = "8")]
    pub overload: String,
}

/// An attribute.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// A float.
    #[prost(float, tag = "2")]
    pub f: f32,
    /// An integer.
    #[prost(int64, tag = "3")]
    pub i: i64,
    /// A string.
    #[prost(bytes = "bytes", tag = "4")]
    pub s: Bytes,
    /// A tensor.
    #[prost(message, optional, tag = "5")]
    pub t: Option<TensorProto>,
    /// A graph.
    #[prost(message, optional, tag = "6")]
    pub g: Option<GraphProto>,
    /// Floats.
    #[prost(float, repeated, tag = "7")]
    pub floats: Vec<f32>,
    /// Integers.
    #[prost(int64, repeated, tag = "8")]
    pub ints: Vec<i64>,
    /// Strings.
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub strings: Vec<Bytes>,
    /// Tensors.
    #[prost(message, repeated, tag = "10")]
    pub tensors: Vec<TensorProto>,
    /// Graphs.
    #[prost(message, repeated, tag = "11")]
    pub graphs: Vec<GraphProto>,
    /// The field that holds the value: see [`attribute_type`].
    #[prost(int32, tag = "20")]
    pub r#type: i32,
    /// Inside functions: the attribute of the caller that gives the value.
    #[prost(string, tag = "21")]
    pub ref_attr_name: String,
    /// A sparse tensor.
    #[prost(message, optional, tag = "22")]
    pub sparse_tensor: Option<SparseTensorProto>,
}

/// Values of [`AttributeProto::type`](AttributeProto).
pub mod attribute_type {
    #![allow(missing_docs)]
    pub const FLOAT: i32 = 1;
    pub const INT: i32 = 2;
    pub const STRING: i32 = 3;
    pub const TENSOR: i32 = 4;
    pub const GRAPH: i32 = 5;
    pub const FLOATS: i32 = 6;
    pub const INTS: i32 = 7;
    pub const STRINGS: i32 = 8;
    pub const SPARSE_TENSOR: i32 = 11;

    /// The type's name in messages.
    pub fn name(t: i32) -> &'static str {
        match t {
            FLOAT => "float",
            INT => "int",
            STRING => "string",
            TENSOR => "tensor",
            GRAPH => "graph",
            FLOATS => "floats",
            INTS => "ints",
            STRINGS => "strings",
            SPARSE_TENSOR => "sparse tensor",
            _ => "something else",
        }
    }
}

/// A tensor.
#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    /// Extents.
    #[prost(int64, repeated, tag = "1")]
    pub dims: Vec<i64>,
    /// Element type; see `tensor.rs`.
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    /// f32 elements.
    #[prost(float, repeated, tag = "4")]
    pub float_data: Vec<f32>,
    /// Elements of 32 bits or fewer that are not f32.
    #[prost(int32, repeated, tag = "5")]
    pub int32_data: Vec<i32>,
    /// Strings.
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub string_data: Vec<Bytes>,
    /// i64 elements.
    #[prost(int64, repeated, tag = "7")]
    pub int64_data: Vec<i64>,
    /// Name.
    #[prost(string, tag = "8")]
    pub name: String,
    /// Elements as little-endian bytes.
    #[prost(bytes = "bytes", tag = "9")]
    pub raw_data: Bytes,
    /// f64 elements.
    #[prost(double, repeated, tag = "10")]
    pub double_data: Vec<f64>,
    /// u32 and u64 elements.
    #[prost(uint64, repeated, tag = "11")]
    pub uint64_data: Vec<u64>,
    /// Where the bytes are when not here: keys `location`, `offset`, `length`.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// 1 when the bytes are in another file.
    #[prost(int32, tag = "14")]
    pub data_location: i32,
}

/// A key and its value.
#[derive(Clone, PartialEq, Message)]
pub struct StringStringEntryProto {
    /// Key.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// A sparse tensor in coordinate form.
#[derive(Clone, PartialEq, Message)]
pub struct SparseTensorProto {
    /// The elements that are not zero, `[nnz]`.
    #[prost(message, optional, tag = "1")]
    pub values: Option<TensorProto>,
    /// Their positions: linear `[nnz]` or `[nnz, rank]`.
    #[prost(message, optional, tag = "2")]
    pub indices: Option<TensorProto>,
    /// Extents of the dense tensor.
    #[prost(int64, repeated, tag = "3")]
    pub dims: Vec<i64>,
}

/// Name and type of a value.
#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
}

/// Type of a value.
#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    /// The type.
    #[prost(oneof = "TypeValue", tags = "1, 4, 5, 8, 9")]
    pub value: Option<TypeValue>,
}

/// The alternatives of [`TypeProto`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum TypeValue {
    /// A dense tensor.
    #[prost(message, tag = "1")]
    Tensor(TensorTypeProto),
    /// A sequence.
    #[prost(message, boxed, tag = "4")]
    Sequence(Box<ElementTypeProto>),
    /// A map.
    #[prost(message, tag = "5")]
    Map(OpaqueTypeProto),
    /// A sparse tensor.
    #[prost(message, tag = "8")]
    SparseTensor(OpaqueTypeProto),
    /// An optional value.
    #[prost(message, boxed, tag = "9")]
    Optional(Box<ElementTypeProto>),
}

/// Type of a sequence or of an optional value.
#[derive(Clone, PartialEq, Message)]
pub struct ElementTypeProto {
    /// Type of each element.
    #[prost(message, optional, boxed, tag = "1")]
    pub elem_type: Option<Box<TypeProto>>,
}

/// A sequence of tensors.
#[derive(Clone, PartialEq, Message)]
pub struct SequenceProto {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The elements, where these are tensors.
    #[prost(message, repeated, tag = "3")]
    pub tensor_values: Vec<TensorProto>,
}

/// An optional value.
#[derive(Clone, PartialEq, Message)]
pub struct OptionalProto {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The element, where it is a tensor.
    #[prost(message, optional, tag = "3")]
    pub tensor_value: Option<TensorProto>,
    /// The element, where it is a sequence.
    #[prost(message, optional, tag = "5")]
    pub sequence_value: Option<SequenceProto>,
}

/// A type that is only recognised, in order to refuse it by name.
#[derive(Clone, PartialEq, Message)]
pub struct OpaqueTypeProto {}

/// Type of a dense tensor.
#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    /// Element type.
    #[prost(int32, tag = "1")]
    pub elem_type: i32,
    /// Shape; absent when even the rank is unknown.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// A shape.
#[derive(Clone, PartialEq, Message)]
pub struct TensorShapeProto {
    /// Extents.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// An extent.
#[derive(Clone, PartialEq, Message)]
pub struct DimensionProto {
    /// A number, a name, or nothing.
    #[prost(oneof = "DimensionValue", tags = "1, 2")]
    pub value: Option<DimensionValue>,
}

/// The alternatives of [`DimensionProto`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum DimensionValue {
    /// A number.
    #[prost(int64, tag = "1")]
    Value(i64),
    /// A name.
    #[prost(string, tag = "2")]
    Param(String),
}

/// A function of the model.
#[derive(Clone, PartialEq, Message)]
pub struct FunctionProto {
    /// Name: the `op_type` of nodes that call it.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Formal operands.
    #[prost(string, repeated, tag = "4")]
    pub input: Vec<String>,
    /// Formal results.
    #[prost(string, repeated, tag = "5")]
    pub output: Vec<String>,
    /// Attributes without a default.
    #[prost(string, repeated, tag = "6")]
    pub attribute: Vec<String>,
    /// The body.
    #[prost(message, repeated, tag = "7")]
    pub node: Vec<NodeProto>,
    /// Operator sets that the body uses.
    #[prost(message, repeated, tag = "9")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Domain: that of nodes that call it.
    #[prost(string, tag = "10")]
    pub domain: String,
    /// Attributes with their defaults.
    #[prost(message, repeated, tag = "11")]
    pub attribute_proto: Vec<AttributeProto>,
    /// Tells functions of one name apart.
    #[prost(string, tag = "13")]
    pub overload: String,
}
