//! Messages between tasks and clients: protocol buffers, written by hand. Fields keep their numbers; a new meaning gets a new number.

use crate::{Limits, TaskName};
use bytes::Bytes;
use gristmill_runtime::exec::RemoteEnd;
use gristmill_runtime::program::IoSpec;
use gristmill_runtime::{DType, Error, ErrorKind, Tensor};
use std::fmt;

/// Version of the messages; tasks and clients of one cluster have the same.
pub(crate) const WIRE: u32 = 3;

/// An error on its way: the category, the place in the user's model, and what to try.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Fault {
    /// Name of an [`ErrorKind`]; an unknown one is our bug.
    #[prost(string, tag = "1")]
    pub kind: String,
    /// Path of the node in the user's model.
    #[prost(string, optional, tag = "2")]
    pub node: Option<String>,
    /// The message.
    #[prost(string, tag = "3")]
    pub message: String,
    /// A remedy.
    #[prost(string, optional, tag = "4")]
    pub hint: Option<String>,
    /// True when the error only follows from one of another task.
    #[prost(bool, tag = "5")]
    pub is_derived: bool,
}

/// Names of categories on the wire.
const KINDS: [(&str, ErrorKind); 6] = [
    ("invalid input", ErrorKind::InvalidInput),
    ("unsupported", ErrorKind::Unsupported),
    ("out of memory", ErrorKind::OutOfMemory),
    ("not finite", ErrorKind::NotFinite),
    ("device failed", ErrorKind::DeviceFailed),
    ("internal", ErrorKind::Internal),
];

impl Fault {
    /// An error of a category.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Fault {
        let name = KINDS.iter().find(|(_, k)| *k == kind);
        Fault {
            kind: name.map_or("internal", |(name, _)| name).to_owned(),
            message: message.into(),
            ..Fault::default()
        }
    }

    /// Bad input of a caller or another task.
    pub fn invalid(message: impl Into<String>) -> Fault {
        Fault::new(ErrorKind::InvalidInput, message)
    }

    /// Adds a remedy.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Fault {
        self.hint.get_or_insert(hint.into());
        self
    }

    /// Puts `place` in front of the message.
    pub fn context(mut self, place: impl fmt::Display) -> Fault {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Names the task of the error, unless the message does.
    pub(crate) fn of_task(self, task: &TaskName) -> Fault {
        let name = task.to_string();
        match self.message.contains(&name) {
            true => self,
            false => self.context(name),
        }
    }

    /// The category.
    pub fn category(&self) -> ErrorKind {
        let kind = KINDS.iter().find(|(name, _)| *name == self.kind);
        kind.map_or(ErrorKind::Internal, |(_, kind)| *kind)
    }

    /// The same error as one that follows from an error elsewhere.
    pub(crate) fn derived(mut self) -> Fault {
        self.is_derived = true;
        self
    }
}

impl From<Error> for Fault {
    fn from(e: Error) -> Fault {
        let node = e.node().map(str::to_owned);
        let shown = e.to_string();
        let prefix = node.as_ref().map(|node| format!("in node {node:?}: "));
        let message = prefix.and_then(|p| shown.strip_prefix(&p).map(str::to_owned));
        Fault {
            node,
            ..Fault::new(e.kind(), message.unwrap_or(shown))
        }
    }
}

impl From<Fault> for Error {
    fn from(f: Fault) -> Error {
        let error = Error::new(f.category(), f.message);
        match f.node {
            Some(node) => error.at(node),
            None => error,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(node) = &self.node {
            write!(f, "in node {node:?}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// The reply to every call: what was asked for, or an error. (Errors are in the body, since gRPC cuts long metadata.)
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Reply {
    #[prost(message, optional, tag = "1")]
    pub(crate) fault: Option<Fault>,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) body: Bytes,
    /// True for a sign of life before the reply.
    #[prost(bool, tag = "3")]
    pub(crate) is_beat: bool,
}

impl Reply {
    pub(crate) fn beat() -> Reply {
        Reply {
            is_beat: true,
            ..Reply::default()
        }
    }
}

/// A message without contents.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TaskAddress {
    #[prost(string, tag = "1")]
    pub(crate) job: String,
    #[prost(uint32, tag = "2")]
    pub(crate) task: u32,
    #[prost(string, tag = "3")]
    pub(crate) address: String,
}

/// The first words of a task or client to a task.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Hello {
    #[prost(uint32, tag = "1")]
    pub(crate) wire: u32,
    /// Version of the program.
    #[prost(string, tag = "2")]
    pub(crate) version: String,
    /// The task that speaks; none for a client.
    #[prost(string, optional, tag = "3")]
    pub(crate) from: Option<String>,
    /// The wanted task; a client takes any.
    #[prost(string, optional, tag = "4")]
    pub(crate) to: Option<String>,
    /// Its cluster; a client has none.
    #[prost(message, repeated, tag = "5")]
    pub(crate) cluster: Vec<TaskAddress>,
    /// Its start; 0 for a client.
    #[prost(fixed64, tag = "6")]
    pub(crate) incarnation: u64,
}

/// A task's answer to [`Hello`].
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Welcome {
    #[prost(string, tag = "1")]
    pub(crate) version: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) task: Option<TaskAddress>,
    /// A number that a task draws when it starts.
    #[prost(fixed64, tag = "3")]
    pub(crate) incarnation: u64,
    #[prost(message, repeated, tag = "4")]
    pub(crate) devices: Vec<DeviceInfo>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) cluster: Vec<TaskAddress>,
    /// The session of a client; 0 where none was asked for.
    #[prost(fixed64, tag = "6")]
    pub(crate) session: u64,
}

impl Welcome {
    /// The task that answers.
    pub(crate) fn name(&self) -> TaskName {
        let task = self.task.clone().unwrap_or_default();
        TaskName {
            job: task.job,
            task: task.task,
        }
    }
}

/// The first word of a client on the stream of its session.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Attend {
    #[prost(message, optional, tag = "1")]
    pub(crate) hello: Option<Hello>,
    /// The session whose stream broke; 0 for a new one.
    #[prost(fixed64, tag = "2")]
    pub(crate) session: u64,
}

/// The last word of a client about its session.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Close {
    #[prost(fixed64, tag = "1")]
    pub(crate) session: u64,
}

/// A device of a task.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceInfo {
    /// Its name in its task, such as `/device:CPU:0`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its memory in bytes; 0 if unknown.
    #[prost(uint64, tag = "2")]
    pub memory_bytes: u64,
    /// Its rates, as an engine writes and reads them.
    #[prost(string, tag = "3")]
    pub profile: String,
}

/// The name, dtype and shape of an input or output.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Io {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) dtype: String,
    #[prost(uint64, repeated, tag = "3")]
    pub(crate) shape: Vec<u64>,
}

impl Io {
    pub(crate) fn of(spec: &IoSpec) -> Io {
        Io {
            name: spec.name.clone(),
            dtype: spec.dtype.name().to_owned(),
            shape: spec.shape.iter().map(|&n| n as u64).collect(),
        }
    }

    pub(crate) fn spec(&self) -> Result<IoSpec, Fault> {
        let (dtype, shape) = typed(&self.dtype, &self.shape)?;
        Ok(IoSpec::new(&self.name, dtype, &shape))
    }
}

fn typed(dtype: &str, shape: &[u64]) -> Result<(DType, Vec<usize>), Fault> {
    let known = DType::parse(dtype);
    let known = known.ok_or_else(|| Fault::invalid(format!("there is no dtype {dtype:?}")))?;
    let sizes = shape.iter().map(|&n| usize::try_from(n));
    let sizes: Result<Vec<usize>, _> = sizes.collect();
    let sizes = sizes.map_err(|_| Fault::invalid(format!("shape {shape:?} is too large")))?;
    Ok((known, sizes))
}

/// A tensor of a run: with its bytes if it is small. Others follow in pieces.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Value {
    #[prost(message, optional, tag = "1")]
    pub(crate) io: Option<Io>,
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub(crate) data: Option<Bytes>,
}

impl Value {
    /// Tensors without names, with the bytes of the small ones as long as all of them are a message.
    pub(crate) fn of_all(tensors: &[Tensor], limits: &Limits) -> Vec<Value> {
        let mut room = limits.message_bytes / 2;
        let value = |tensor: &Tensor| {
            let size = tensor.size_bytes();
            let is_small = size <= limits.inline_bytes.min(room);
            room -= if is_small { size } else { 0 };
            Value {
                io: Some(Io {
                    name: String::new(),
                    dtype: tensor.dtype().name().to_owned(),
                    shape: tensor.shape().iter().map(|&n| n as u64).collect(),
                }),
                data: is_small.then(|| Bytes::copy_from_slice(tensor.as_bytes())),
            }
        };
        tensors.iter().map(value).collect()
    }

    pub(crate) fn spec(&self) -> Result<IoSpec, Fault> {
        let io = self.io.as_ref();
        io.ok_or_else(|| Fault::invalid("a tensor without a type"))?
            .spec()
    }

    /// The tensor, if its bytes are here.
    pub(crate) fn tensor(&self) -> Result<Option<Tensor>, Fault> {
        let Some(data) = &self.data else {
            return Ok(None);
        };
        let spec = self.spec()?;
        Ok(Some(Tensor::from_bytes(spec.dtype, &spec.shape, data)?))
    }
}

/// A text or constant.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Content {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) sha256: Bytes,
    #[prost(uint64, tag = "2")]
    pub(crate) size_bytes: u64,
}

/// A text with the constants beside it.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Contents {
    #[prost(message, optional, tag = "1")]
    pub(crate) text: Option<Content>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) constants: Vec<Content>,
}

/// A task's answer to an offer of [`Contents`]: the digests of those it lacks.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Missing {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub(crate) sha256: Vec<Bytes>,
}

/// Bytes of contents. Those of one follow each other.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Chunk {
    /// The text or constant, in its first chunk.
    #[prost(message, optional, tag = "1")]
    pub(crate) content: Option<Content>,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) data: Bytes,
}

/// A client's program, which the task has.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Prepare {
    #[prost(message, optional, tag = "1")]
    pub(crate) program: Option<Contents>,
    #[prost(fixed64, tag = "2")]
    pub(crate) session: u64,
}

/// A program that a task can run.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Prepared {
    #[prost(message, repeated, tag = "2")]
    pub(crate) inputs: Vec<Io>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) outputs: Vec<Io>,
    /// Device of each node.
    #[prost(string, tag = "4")]
    pub(crate) placement: String,
    #[prost(string, repeated, tag = "5")]
    pub(crate) warnings: Vec<String>,
}

/// A client's run of a program, or its last word about it.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Call {
    /// SHA-256 of the program's text.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) program: Bytes,
    #[prost(message, repeated, tag = "2")]
    pub(crate) feeds: Vec<Value>,
    #[prost(fixed64, tag = "3")]
    pub(crate) session: u64,
    /// Longest time of the run, its waits for others included.
    #[prost(uint64, tag = "4")]
    pub(crate) timeout_ms: u64,
}

/// A message of a client's run: first the call, then pieces of its inputs.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CallPart {
    #[prost(message, optional, tag = "1")]
    pub(crate) call: Option<Call>,
    #[prost(message, optional, tag = "2")]
    pub(crate) piece: Option<Piece>,
}

/// The results of a [`Call`] or a [`Step`].
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Results {
    #[prost(message, repeated, tag = "1")]
    pub(crate) fetches: Vec<Value>,
}

/// An answer to a client's run: words about its stalls, then an error or the results, then pieces of these.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ResultPart {
    #[prost(message, optional, tag = "1")]
    pub(crate) fault: Option<Fault>,
    #[prost(message, optional, tag = "2")]
    pub(crate) results: Option<Results>,
    #[prost(message, optional, tag = "3")]
    pub(crate) piece: Option<Piece>,
    #[prost(string, optional, tag = "4")]
    pub(crate) stall: Option<String>,
}

/// The name of a callable in all tasks: who made it, and its number there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Message)]
pub(crate) struct CallableId {
    /// Incarnation of the master.
    #[prost(fixed64, tag = "1")]
    pub(crate) master: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) number: u64,
}

/// A master's order to compile a part.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Register {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
    /// The part, which the task has.
    #[prost(message, optional, tag = "2")]
    pub(crate) part: Option<Contents>,
    /// Index among the program's outputs of each output of the part.
    #[prost(uint32, repeated, tag = "3")]
    pub(crate) outputs: Vec<u32>,
}

/// The transfers of a part.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Registered {
    #[prost(message, repeated, tag = "1")]
    pub(crate) outgoing: Vec<End>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) incoming: Vec<End>,
    #[prost(string, repeated, tag = "3")]
    pub(crate) warnings: Vec<String>,
    #[prost(bool, tag = "4")]
    pub(crate) has_variables: bool,
    #[prost(bool, tag = "5")]
    pub(crate) assigns: bool,
    /// The start of the task that has the part.
    #[prost(fixed64, tag = "6")]
    pub(crate) incarnation: u64,
    /// The part's variables.
    #[prost(message, repeated, tag = "7")]
    pub(crate) variables: Vec<VariableInfo>,
    /// True if runs of the part hold devices which other runs wait for.
    #[prost(bool, tag = "8")]
    pub(crate) holds_devices: bool,
}

/// An end of a transfer, with names of devices in the task that has it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Message)]
pub(crate) struct End {
    #[prost(string, tag = "1")]
    pub(crate) source: String,
    #[prost(string, tag = "2")]
    pub(crate) destination: String,
    #[prost(string, tag = "3")]
    pub(crate) tensor: String,
    #[prost(uint64, tag = "4")]
    pub(crate) size_bytes: u64,
}

impl End {
    pub(crate) fn of(end: &RemoteEnd) -> End {
        End {
            source: end.key.source.to_string(),
            destination: end.key.destination.to_string(),
            tensor: end.key.tensor.clone(),
            size_bytes: end.size_bytes as u64,
        }
    }
}

/// A master's order to run a part once.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Step {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
    #[prost(uint64, tag = "2")]
    pub(crate) run: u64,
    #[prost(message, repeated, tag = "3")]
    pub(crate) feeds: Vec<Value>,
    /// True if it takes the turn of the run as well.
    #[prost(bool, tag = "4")]
    pub(crate) takes_turn: bool,
}

/// A master's order to take the turn of a run, or to commit the run in its turn.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct TurnOrder {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
    #[prost(uint64, tag = "2")]
    pub(crate) run: u64,
    #[prost(bool, tag = "3")]
    pub(crate) is_commit: bool,
}

/// A message on a master's stream to a task. It orders one thing, or is a sign of life; the first is a
/// greeting.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Order {
    #[prost(message, optional, tag = "1")]
    pub(crate) hello: Option<Hello>,
    #[prost(message, optional, tag = "2")]
    pub(crate) step: Option<Step>,
    #[prost(message, optional, tag = "3")]
    pub(crate) abort: Option<Abort>,
    #[prost(message, optional, tag = "4")]
    pub(crate) turn: Option<TurnOrder>,
    #[prost(message, optional, tag = "6")]
    pub(crate) register: Option<Register>,
    #[prost(message, optional, tag = "7")]
    pub(crate) release: Option<Release>,
    #[prost(message, optional, tag = "8")]
    pub(crate) initialise: Option<Initialise>,
    #[prost(message, optional, tag = "9")]
    pub(crate) locate: Option<Locate>,
    /// Number of the order on its stream, from 1 on.
    #[prost(uint64, tag = "5")]
    pub(crate) number: u64,
}

/// A message on a task's stream to a master: the end of a step or of a turn order, an output lost on the way
/// after it, or, without a program, a refusal of the stream, a word of leave, or a sign of life.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Report {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
    #[prost(uint64, tag = "2")]
    pub(crate) run: u64,
    #[prost(message, optional, tag = "3")]
    pub(crate) fault: Option<Fault>,
    #[prost(message, optional, tag = "4")]
    pub(crate) results: Option<Results>,
    /// Number of the order that has ended; 0 for an output lost on the way.
    #[prost(uint64, tag = "5")]
    pub(crate) number: u64,
    #[prost(message, optional, tag = "6")]
    pub(crate) registered: Option<Registered>,
    /// True when the task takes no more orders that begin something.
    #[prost(bool, tag = "7")]
    pub(crate) is_leaving: bool,
    #[prost(message, optional, tag = "8")]
    pub(crate) place: Option<Place>,
}

/// A master's order to give up a run.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Abort {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
    #[prost(uint64, tag = "2")]
    pub(crate) run: u64,
    #[prost(message, optional, tag = "3")]
    pub(crate) cause: Option<Fault>,
}

/// A master's order to forget a part.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Release {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
}

/// A master's order to set the variables of a part to their initial values.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Initialise {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
}

/// A master's question where the run of a part is.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct Locate {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
}

/// The place of a part's run.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Place {
    /// A number that grows as the run gets on.
    #[prost(uint64, tag = "1")]
    pub(crate) count: u64,
    /// The predicate of a sentence about the task, for people.
    #[prost(string, tag = "2")]
    pub(crate) text: String,
}

/// A question for the state of a task, or of all tasks.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Look {
    /// Containers to reset before.
    #[prost(string, repeated, tag = "1")]
    pub(crate) reset: Vec<String>,
    /// The session of the client that asks.
    #[prost(fixed64, tag = "2")]
    pub(crate) session: u64,
}

/// A variable of a task.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VariableInfo {
    #[prost(string, tag = "1")]
    pub(crate) container: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(string, tag = "3")]
    pub(crate) dtype: String,
    #[prost(bool, tag = "4")]
    pub(crate) has_value: bool,
    #[prost(uint64, repeated, tag = "5")]
    pub(crate) shape: Vec<u64>,
}

/// The state of a task, or the reason for its silence.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TaskStatus {
    #[prost(message, optional, tag = "1")]
    pub(crate) task: Option<TaskAddress>,
    #[prost(message, optional, tag = "2")]
    pub(crate) fault: Option<Fault>,
    #[prost(message, optional, tag = "3")]
    pub(crate) welcome: Option<Welcome>,
    #[prost(message, repeated, tag = "4")]
    pub(crate) variables: Vec<VariableInfo>,
}

/// The state of all tasks of a cluster.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TaskStatuses {
    #[prost(message, repeated, tag = "1")]
    pub(crate) tasks: Vec<TaskStatus>,
}

/// The first piece of a tensor on a stream: which it is. One of the three.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub(crate) struct Opening {
    #[prost(message, optional, tag = "1")]
    pub(crate) callable: Option<CallableId>,
    /// An end of a part, with names as the receiver has them.
    #[prost(message, optional, tag = "2")]
    pub(crate) end: Option<End>,
    /// An input of a part, by its index.
    #[prost(uint32, optional, tag = "3")]
    pub(crate) feed: Option<u32>,
    /// An output of a program, by its index there.
    #[prost(uint32, optional, tag = "4")]
    pub(crate) fetch: Option<u32>,
}

impl Opening {
    fn of(callable: CallableId) -> Opening {
        Opening {
            callable: Some(callable),
            ..Opening::default()
        }
    }

    pub(crate) fn of_end(callable: CallableId, end: End) -> Opening {
        Opening {
            end: Some(end),
            ..Opening::of(callable)
        }
    }

    pub(crate) fn of_feed(callable: CallableId, feed: usize) -> Opening {
        Opening {
            feed: Some(feed as u32),
            ..Opening::of(callable)
        }
    }

    pub(crate) fn of_fetch(callable: CallableId, fetch: u32) -> Opening {
        Opening {
            fetch: Some(fetch),
            ..Opening::of(callable)
        }
    }
}

/// Bytes of a tensor on a stream: from one task to another, or between a client and its task.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Piece {
    /// Number of the tensor on this stream.
    #[prost(uint32, tag = "1")]
    pub(crate) number: u32,
    /// The meaning of the number, the first time.
    #[prost(message, optional, tag = "2")]
    pub(crate) opening: Option<Opening>,
    #[prost(uint64, tag = "3")]
    pub(crate) run: u64,
    #[prost(uint64, tag = "4")]
    pub(crate) offset: u64,
    #[prost(bytes = "bytes", tag = "5")]
    pub(crate) data: Bytes,
}
