//! The typed tensor IR: dims and types, the two op tables, graphs, and their text form.

pub mod attr;
pub mod builder;
pub mod constant;
pub mod dim;
pub mod eval;
pub mod graph;
mod infer;
pub mod ops;
pub mod parse;
pub mod print;
pub mod request;
pub mod scalar;
pub mod scope;
mod state;
pub mod types;
pub mod vecprog;
pub mod verify;

pub use builder::GraphBuilder;
pub use constant::ConstData;
pub use dim::{Bindings, Dim};
pub use graph::{Def, Graph, Node, NodeId, Origin, Output, Value, ValueId};
pub use infer::broadcast_shapes;
pub use ops::{
    ClusterKind, Extremum, Layout, Op, OpClass, PadMode, PoolKind, ReduceKind, ScatterKind, Window,
};
pub use request::{AskedBy, DeviceRequest, Requested};
pub use scalar::{Real, ScalarOp};
pub use scope::{DeviceFunction, DeviceScope, NewNode, ScopeToken};
pub use types::{Shape, Type};
#[cfg(test)]
mod tests;
