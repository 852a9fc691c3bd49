//! Several machines: the tasks of a cluster, and what goes between them.
//!
//! A [`Server`] is a task. Its *master* divides programs of clients over tasks and runs them; its *worker* compiles parts for masters of any task,
//! and runs them. Tasks exchange text of graphs and tensors, never code. An [`Engine`] does what is not talk.

#![warn(missing_docs)]

mod callables;
mod calls;
mod client;
mod cluster_spec;
mod contents;
mod engine;
mod environment;
mod forms;
mod inbox;
mod lease;
mod limits;
mod links;
mod master;
mod masters;
mod messages;
mod names;
mod outbox;
mod rpc;
mod runs;
mod server;
mod sessions;
mod shutdown;
mod status;
mod steps;
mod turn;
mod worker;

pub use client::{Callable, Client};
pub use cluster_spec::{ClusterSpec, TaskName};
pub use contents::{Constant, Digest, Document, Source};
pub use engine::{Engine, Job, Made, Part, Plan, Share, in_thread};
pub use limits::Limits;
pub use messages::{DeviceInfo, Fault};
pub use names::{global, local};
pub use outbox::PartWire;
pub use server::Server;
pub use status::{RunningTask, TaskState};
pub use turn::{StateUse, Turn};

#[cfg(test)]
mod tests;
