//! The typed tensor IR: dims and types, the two op tables, graphs, and their text form.
//!
//! # How to add an op
//!
//! An element-wise op is one entry of [`scalar`], with its expansion or its primitive code. Any other
//! op is seven edits; `RoiAlign` is an example of the first six.
//!
//! 1. An entry of the table in [`ops`]: name, attributes, operands, class, and the columns. The class
//!    decides the kind of cluster and of phase. [`work`] has arithmetic and [`axes`] transpositions
//!    that entries share; an op whose axes move also joins the root of a `transpose-out-of-*` rule.
//! 2. A type rule in `infer`, unless an existing one fits.
//! 3. A reference evaluator in [`eval`].
//! 4. Code for one element in `codegen::pull`, which the CPU and CUDA share. The compiler lists the
//!    match. A precompiled kernel is a row of `cluster::coverage`, and can follow later.
//! 5. A handler in `onnx::ops`.
//! 6. Operands in `codegen::testing::cases`, from which both back ends are compared with the
//!    evaluator, under the tolerance of the table.
//! 7. A rule in [`gradient`], with a case in `autodiff::tests::ops`, or the reason why there is none.
//!
//! Missing cases and rules are named by tests, a missing evaluator, arithmetic or lowering by the
//! compiler.

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
pub mod gradient;
#[doc(hidden)]
pub mod graph;
mod infer;
#[doc(hidden)]
pub mod ops;
#[doc(hidden)]
pub mod parse;
#[doc(hidden)]
pub mod print;
/// Random numbers in a graph.
pub mod random;
#[doc(hidden)]
pub mod request;
#[doc(hidden)]
pub mod scalar;
#[doc(hidden)]
pub mod scope;
pub(crate) mod state;
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
pub use dim::{Bindings, Dim, DimRange, MAX_DIM_SIZE, Ranges};
pub use graph::{Def, Graph, Node, NodeId, Origin, Output, Value, ValueId};
pub use infer::broadcast_shapes;
pub use ops::{
    ClusterKind, Extremum, Layout, Op, OpClass, PadMode, PoolKind, Reads, ReduceKind, ScatterKind,
    Window,
};
pub use request::{AskedBy, DeviceRequest, Requested};
pub use scalar::{Real, ScalarOp};
pub use scope::{DeviceFunction, DeviceScope, NewNode, ScopeToken};
pub use types::{Shape, Type, symbols_of};
pub use work::WorkClass;
#[cfg(test)]
mod tests;
