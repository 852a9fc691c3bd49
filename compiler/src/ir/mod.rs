//! The typed tensor IR: dims and types, the two op tables, graphs, and their text form.

#[doc(hidden)]
pub mod attr;
#[doc(hidden)]
pub mod axes;
#[doc(hidden)]
pub mod builder;
#[doc(hidden)]
pub mod constant;
#[doc(hidden)]
pub mod dim;
#[doc(hidden)]
pub mod eval;
#[doc(hidden)]
pub mod graph;
mod infer;
#[doc(hidden)]
pub mod ops;
#[doc(hidden)]
pub mod parse;
#[doc(hidden)]
pub mod print;
#[doc(hidden)]
pub mod request;
#[doc(hidden)]
pub mod scalar;
#[doc(hidden)]
pub mod scope;
mod state;
#[doc(hidden)]
pub mod types;
#[doc(hidden)]
pub mod vecprog;
#[doc(hidden)]
pub mod verify;
#[doc(hidden)]
pub mod work;

pub use builder::GraphBuilder;
pub use constant::ConstData;
pub use dim::{Bindings, Dim};
pub use graph::{Def, Graph, Node, NodeId, Origin, Output, Value, ValueId};
pub use infer::broadcast_shapes;
pub use ops::{
    ClusterKind, Extremum, Layout, Op, OpClass, PadMode, PoolKind, Reads, ReduceKind, ScatterKind,
    Window,
};
pub use request::{AskedBy, DeviceRequest, Requested};
pub use scalar::{Real, ScalarOp};
pub use scope::{DeviceFunction, DeviceScope, NewNode, ScopeToken};
pub use types::{Shape, Type};
pub use work::WorkClass;
#[cfg(test)]
mod tests;
