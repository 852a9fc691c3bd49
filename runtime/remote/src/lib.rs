//! Several machines: the tasks of a cluster, and what goes between them.
//!
//! A [`Server`] is a task. Its *master* divides programs of clients over tasks and runs them; its *worker* compiles parts for masters of any task,
//! and runs them. Tasks exchange text of graphs and tensors, never code. An [`Engine`] does what is not talk.

#![warn(missing_docs)]

mod callables;
mod calls;
mod certificates;
mod client;
mod cluster_spec;
mod connections;
mod contents;
mod engine;
mod environment;
mod forms;
mod inbox;
mod keys;
mod lease;
mod limits;
mod links;
mod liveness;
mod master;
mod masters;
mod messages;
mod names;
mod network;
mod outbox;
mod pieces;
mod progress;
mod rpc;
mod runs;
mod server;
mod sessions;
mod shutdown;
mod status;
mod steps;
mod turn;
mod worker;

pub use certificates::{MadeKeys, make_keys};
pub use client::{Callable, Client, ClientOptions, OnStall};
pub use cluster_spec::{ClusterSpec, TaskName};
pub use contents::{Constant, Digest, Document, Source};
pub use engine::{Engine, Job, Made, Part, Plan, Share, Wanted, in_thread, in_thread_within};
pub use keys::Keys;
pub use limits::Limits;
pub use messages::{DeviceInfo, Fault};
pub use names::{global, local};
pub use network::Credentials;
pub use outbox::PartWire;
pub use server::{Server, ServerOptions};
pub use status::{RunningTask, TaskState};
pub use turn::{StateUse, Turn};

#[cfg(test)]
mod tests;
