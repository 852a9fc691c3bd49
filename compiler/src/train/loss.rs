//! Losses: means over all examples, as scalars of the operands' dtype.

use crate::error::{Error, Result};
use crate::ir::{Dim, GraphBuilder, Op, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// A label beyond every number of classes: 2^62.
const BEYOND: f64 = 4_611_686_018_427_387_904.0;

/// The operand of the softmax over the last axis, or its logarithm, that gives a value; the value itself if none does. Exported classifiers often
/// end in one, while [`sparse_cross_entropy`] takes what comes before it.
pub fn logits(b: &GraphBuilder, output: ValueId) -> ValueId {
    logits_along(b, output, b.ty(output).rank().saturating_sub(1))
}

/// [`logits`] with the classes along another axis.
pub fn logits_along(b: &GraphBuilder, output: ValueId, classes: usize) -> ValueId {
    let Some(node) = b.graph().def_node(output) else {
        return output;
    };
    match &node.op {
        Op::Softmax { axis, .. } if *axis == classes => node.inputs[0],
        _ => output,
    }
}

/// The operand of the final sigmoid of a value, for [`binary_cross_entropy`]; the value itself if none does.
pub fn sigmoid_logits(b: &GraphBuilder, output: ValueId) -> ValueId {
    match b.graph().def_node(output) {
        Some(node) if node.op == Op::Map(ScalarOp::Sigmoid) => node.inputs[0],
        _ => output,
    }
}

/// The mean over all but the last axis of `-log softmax(logits)[label]`. Logits `[.., classes]`, labels integers `[..]`; a label
/// out of range, a negative one too, is an error of the run.
pub fn sparse_cross_entropy(
    b: &mut GraphBuilder,
    logits: ValueId,
    labels: ValueId,
) -> Result<ValueId> {
    let shape = b.operand(logits)?.shape.0.clone();
    let given = b.operand(labels)?;
    let Some(axis) = shape.len().checked_sub(1) else {
        return Err(Error::invalid(
            "cross-entropy: logits are a scalar, expected an axis of classes",
        ));
    };
    if given.shape.0 != shape[..axis] || given.dtype.is_float() {
        let logits = b.operand(logits)?;
        return Err(Error::invalid(format!(
            "cross-entropy: labels are {given} for logits {logits}, expected one integer per row"
        )));
    }
    let log = b.add1(Op::Softmax { axis, log: true }, &[logits])?;
    let mut column: Vec<Dim> = shape[..axis].to_vec();
    column.push(1.into());
    let labels = b.cast(labels, DType::I64)?;
    // A gather would count negative ones from the end.
    let (zero, none) = (b.scalar(DType::I64, 0.0), b.scalar(DType::I64, BEYOND));
    let is_negative = b.map(ScalarOp::Lt, &[labels, zero])?;
    let labels = b.map(ScalarOp::Select, &[is_negative, none, labels])?;
    let places = b.reshape(labels, column)?;
    let picked = b.add1(Op::GatherElements { axis }, &[log, places])?;
    let mean = mean(b, picked)?;
    b.map(ScalarOp::Neg, &[mean])
}

/// The mean of `(x - y)^2`.
pub fn mean_squared_error(b: &mut GraphBuilder, x: ValueId, y: ValueId) -> Result<ValueId> {
    let difference = b.sub(x, y)?;
    let square = b.mul(difference, difference)?;
    mean(b, square)
}

/// The mean of `|x - y|`.
pub fn mean_absolute_error(b: &mut GraphBuilder, x: ValueId, y: ValueId) -> Result<ValueId> {
    let difference = b.sub(x, y)?;
    let distance = b.map(ScalarOp::Abs, &[difference])?;
    mean(b, distance)
}

/// The mean of `max(x, 0) - x * y + log(1 + exp(-|x|))`: the cross-entropy of `sigmoid(x)` with the probabilities `y`.
pub fn binary_cross_entropy(b: &mut GraphBuilder, logits: ValueId, y: ValueId) -> Result<ValueId> {
    let positive = b.map(ScalarOp::Relu, &[logits])?;
    let product = b.mul(logits, y)?;
    let size = b.map(ScalarOp::Abs, &[logits])?;
    let opposite = b.map(ScalarOp::Neg, &[size])?;
    let rest = b.map(ScalarOp::Softplus, &[opposite])?;
    let sum = b.sub(positive, product)?;
    let sum = b.add_(sum, rest)?;
    mean(b, sum)
}

/// The fraction of rows with their largest element at the label: `f32`, operands as those of [`sparse_cross_entropy`].
pub fn accuracy(b: &mut GraphBuilder, logits: ValueId, labels: ValueId) -> Result<ValueId> {
    let axis = b.operand(logits)?.rank().saturating_sub(1);
    let guess = Op::ArgReduce {
        kind: crate::ir::Extremum::Max,
        axis,
        keepdims: false,
        select_last: false,
    };
    let guess = b.add1(guess, &[logits])?;
    let labels = b.cast(labels, DType::I64)?;
    let right = b.map(ScalarOp::Eq, &[guess, labels])?;
    let right = b.cast(right, DType::F32)?;
    mean(b, right)
}

/// The mean of all elements.
fn mean(b: &mut GraphBuilder, x: ValueId) -> Result<ValueId> {
    let axes: Vec<usize> = (0..b.operand(x)?.rank()).collect();
    b.reduce(ReduceKind::Mean, x, &axes, false)
}

/// The sum of terms, from left to right.
///
/// Errors with `InvalidInput` when there is none, and as additions do.
pub fn add_n(b: &mut GraphBuilder, terms: &[ValueId]) -> Result<ValueId> {
    let Some((&first, rest)) = terms.split_first() else {
        return Err(Error::invalid("a sum of no terms"));
    };
    let mut sum = first;
    for &term in rest {
        sum = b.add_(sum, term)?;
    }
    Ok(sum)
}

/// Half the sum of squares (TensorFlow `l2_loss`), whose gradient by `x` is `x`: times a factor, the decay of one variable as a term of the loss.
pub fn l2(b: &mut GraphBuilder, x: ValueId) -> Result<ValueId> {
    let ty = b.operand(x)?;
    let (dtype, axes) = (ty.dtype, (0..ty.rank()).collect::<Vec<_>>());
    let square = b.mul(x, x)?;
    let sum = b.reduce(ReduceKind::Sum, square, &axes, false)?;
    let half = b.scalar(dtype, 0.5);
    b.mul(sum, half)
}
