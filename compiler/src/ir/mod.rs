//! The typed tensor IR: dims and types, the two op tables, graphs, and their text form.
//!
//! # How to add an op
//!
//! An element-wise op is one entry of [`scalar`], with its expansion or its primitive code. Any other
//! op is usually eight files; `RoiAlign` and `Sample` are examples.
//!
//! 1. `ir/ops/mod.rs`: an entry of the table, with name, attributes, operands, class and columns. The
//!    class decides the kind of cluster and of phase.
//! 2. `ir/ops/FAMILY.rs`: the functions that the entry names, one after the other: type rule
//!    (`_infer`), reference evaluator (`_eval`), arithmetic (`_work`), order of axes (`_axes`) and
//!    gradient (`_gradient`). What several families share is in `infer`, [`eval`], [`work`], [`axes`]
//!    and [`gradient`].
//! 3. `codegen/pull/mod.rs`: the op in the match of ops with code for one element.
//! 4. `codegen/pull/FAMILY.rs`: that code, for the CPU and CUDA.
//! 5. `codegen/testing/cases.rs`: operands, on which both back ends are compared with the evaluator,
//!    under the tolerance of the table.
//! 6. `autodiff/tests/ops.rs`: operands of the gradient; without one, `guide/training.md` says so.
//! 7. `onnx/ops/FAMILY.rs`: a handler.
//! 8. `tests/data/onnx_cases_passing.txt`: cases that pass now.
//!
//! An op whose axes move also joins the root of a `transpose-out-of-*` rule in `rewrite/rules/layout.rs`.
//! A precompiled CPU kernel can follow later. Tests name ops without a case or a rule.

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
pub(crate) mod infer;
#[doc(hidden)]
pub mod ops;
#[doc(hidden)]
pub mod parse;
mod parts;
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
