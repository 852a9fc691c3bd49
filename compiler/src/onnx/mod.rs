//! The ONNX front end: protobuf to [`Graph`](crate::ir::Graph).
//!
//! [`load`] reads a model; [`Model::graph`] imports it for given dims. Importing walks the nodes in
//! order: each operator has a handler, which adds IR nodes through the graph builder. Values known at
//! import (initialisers, shapes and all arithmetic on them) are not nodes: they are tracked in
//! [`import`] and become constants only where an IR node needs them. `value_info` is never relied
//! on; the IR's own type rules decide.
//!
//! To add an operator: write `fn my_op(cx: &mut Ctx) -> Result<Outs>` in the file of its family
//! under `ops/` and list it in that file's `OPS` with its operand counts. The handler reads
//! operands with [`Ctx::val`](import::Ctx::val) (as an IR value), [`Ctx::dims`](import::Ctx::dims)
//! (integers, possibly symbolic) or [`Ctx::tensor`](import::Ctx::tensor) (a constant), and
//! attributes with `cx.i`, `cx.f`, `cx.s`, `cx.ints`, ... An attribute without a
//! read is an error for the user: read all attributes of the operator, and return
//! `Error::unsupported` for unhandled values. Version differences are decided by `cx.opset`.

mod capability;
mod check;
mod import;
mod inference_form;
mod load;
mod open_inputs;
mod ops;
#[doc(hidden)]
pub mod proto;
mod shape_value;
mod skim;
mod splice;
mod tensor;
mod trial;
pub(crate) mod variables;
mod wire;

pub use capability::{Capabilities, Loops, Note, OperatorReport, SLOW_SHARE, Treatment};
pub use check::{InputInfo, Problem, Summary};
pub use inference_form::Converted;
pub(crate) use load::LeftOpen;
pub use load::{Form, Model, Specialisation, load};
pub use open_inputs::{Declared, Structure, element_name};
pub use splice::Weights;
pub use tensor::{dtype_of, tensor_from_pb};

#[cfg(test)]
mod tests;
