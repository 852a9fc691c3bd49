//! Reference evaluators, a column of the op table: each defines its op on whole tensors.
//!
//! Floating-point sums and products accumulate in `f64` and round once at the end, so that results are as good as the dtype allows
//! and do not depend on an order; integers wrap. Element-wise ops run their scalar program one primitive at a time, each rounding to
//! its dtype. The type rule has accepted operands and attributes before an evaluator sees them.
//!
//! Errors carry `InvalidInput` for faults that only the data shows (an index out of range, an integer division by zero), and `OutOfMemory`
//! for impossible sizes.

mod erf;
mod map;
pub mod scalar;
pub(crate) mod view;

pub use erf::erf;
pub use map::run_program;

use super::dim::{Bindings, Dim};
use super::ops::Op;
use super::types::{Shape, Type};
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;
use gristmill_runtime::tensor::checked_size_bytes;

/// Evaluation of an op.
#[derive(Clone, Copy)]
pub enum Evaluator {
    /// From operands and attributes alone.
    Tensors(fn(&Call) -> Result<Vec<Tensor>>),
    /// `If`: runs one of two regions.
    Branch,
    /// `Loop`: runs its region a number of times.
    Repeat,
    /// `Scan`: runs its region for each element of sequences.
    Scan,
    /// A cluster or a segment: runs its region once.
    Body,
    /// From operands and attributes alone; the results have as many elements as these decide.
    Selection(fn(&Call) -> Result<Vec<Tensor>>),
    /// Gives a symbol its value.
    Extent,
    /// The operand, its extents checked.
    Shaped,
    /// Reads a variable.
    Read,
    /// Assigns a variable.
    Assign,
    /// Sends to another device.
    Send,
    /// Receives from another device.
    Receive,
    /// A part of a whole that is elsewhere, which the graph before partitioning evaluates.
    Elsewhere,
}

/// One evaluation.
pub struct Call<'a> {
    /// The op; no attribute is symbolic.
    pub op: &'a Op,
    /// Operands, which its type rule has accepted.
    pub inputs: &'a [&'a Tensor],
    /// Shape of the first result.
    pub shape: &'a [usize],
}

/// The extents of a shape under bindings. Errors when one is unknown or negative.
pub(crate) fn concrete(shape: &[Dim], bindings: &Bindings) -> Result<Vec<usize>> {
    let shape = Shape(shape.to_vec()).bind(bindings);
    shape
        .as_static()
        .ok_or_else(|| Error::invalid(format!("shape {shape} is not known, or negative")))
}

/// Evaluates an op that needs nothing but its operands. Its attributes must not be symbolic.
///
/// Errors are internal for ops with regions, state or transfers.
pub fn eval_tensors(op: &Op, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let Evaluator::Tensors(eval) = op.spec().eval else {
        let message = format!("{} cannot be evaluated from its operands alone", op.name());
        return Err(Error::internal(message));
    };
    let shapes = result_shapes(op, inputs)?;
    eval(&Call {
        op,
        inputs,
        shape: &shapes[0],
    })
}

/// Evaluates an op whose operands decide the extents of its results.
pub fn eval_selection(op: &Op, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let Evaluator::Selection(eval) = op.spec().eval else {
        let message = format!("{} does not select elements", op.name());
        return Err(Error::internal(message));
    };
    let ty = |t: &&Tensor| Type::new(t.dtype(), t.shape().iter().copied());
    let types: Vec<Type> = inputs.iter().map(ty).collect();
    (op.spec().infer)(op, &types, &[]).map_err(Error::invalid)?;
    let shape = &[];
    eval(&Call { op, inputs, shape })
}

/// Shapes of the results by the op's type rule. Errors when operands do not fit, or sizes are impossible.
fn result_shapes(op: &Op, inputs: &[&Tensor]) -> Result<Vec<Vec<usize>>> {
    let ty = |t: &&Tensor| Type::new(t.dtype(), t.shape().iter().copied());
    let types: Vec<Type> = inputs.iter().map(ty).collect();
    let types = (op.spec().infer)(op, &types, &[]).map_err(Error::invalid)?;
    types.iter().map(checked_shape).collect()
}

fn checked_shape(ty: &Type) -> Result<Vec<usize>> {
    let shape = concrete(&ty.shape, &Bindings::new())?;
    checked_size_bytes(ty.dtype, &shape)?;
    Ok(shape)
}

impl Call<'_> {
    /// Zeros where the result has no elements.
    pub(super) fn empty(&self) -> Option<Result<Vec<Tensor>>> {
        let zeros = || one(Ok(Tensor::zeros(self.inputs[0].dtype(), self.shape)?));
        self.shape.contains(&0).then(zeros)
    }
}

pub(super) fn one(result: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![result?])
}
