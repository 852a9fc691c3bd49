//! Several machines: the tasks of a cluster, and what goes between them.

#![warn(missing_docs)]

mod cluster_spec;
mod forms;

pub use cluster_spec::{ClusterSpec, TaskName};
