//! Losses: means over all examples, as scalars of the operands' dtype.

use crate::error::{Error, Result};
use crate::ir::{Dim, GraphBuilder, Op, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::{DType, Tensor};

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
/// out of range, a negative one too, is an error of the run. [`CrossEntropy`] has settings.
pub fn sparse_cross_entropy(
    b: &mut GraphBuilder,
    logits: ValueId,
    labels: ValueId,
) -> Result<ValueId> {
    CrossEntropy::default().build(b, logits, labels)
}

/// [`sparse_cross_entropy`] with settings, as PyTorch's `cross_entropy`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropy {
    /// Part `e` of a row's probability that is spread over all classes (Szegedy et al., arXiv:1512.00567, section 7). With
    /// `p = softmax(logits)`, a row's term is `-(1 - e) * log p[label] - e * mean(log p)`.
    pub label_smoothing: f64,
    /// The label of rows that neither count nor have a gradient, inside or outside of the classes. PyTorch's default is -100. If all
    /// rows are ignored, the mean is NaN, and a training ends with an error. Means over a data set weight a batch by all of its rows.
    pub ignored_label: Option<i64>,
}

impl CrossEntropy {
    /// Adds the mean over the rows. Operands and errors are those of [`sparse_cross_entropy`].
    ///
    /// Errors also with `InvalidInput` when the smoothing is not from 0 to 1.
    pub fn build(&self, b: &mut GraphBuilder, logits: ValueId, labels: ValueId) -> Result<ValueId> {
        let smoothing = self.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::invalid(format!(
                "label smoothing: {smoothing}, expected a number from 0 to 1"
            )));
        }
        let axis = check_labels(b, "cross-entropy", logits, labels)?;
        let labels = as_column(b, labels)?;
        let log = b.add1(Op::Softmax { axis, log: true }, &[logits])?;
        let (labels, is_ignored) = self.without_ignored(b, labels)?;
        let places = without_negative(b, labels)?;
        let mut terms = b.add1(Op::GatherElements { axis }, &[log, places])?;
        if smoothing > 0.0 {
            terms = smoothed(b, terms, log, smoothing)?;
        }
        let mean = match is_ignored {
            None => mean(b, terms)?,
            Some(is_ignored) => mean_without(b, terms, is_ignored)?,
        };
        b.map(ScalarOp::Neg, &[mean])
    }

    /// The labels with 0 for ignored ones, and the mask of these.
    fn without_ignored(
        &self,
        b: &mut GraphBuilder,
        labels: ValueId,
    ) -> Result<(ValueId, Option<ValueId>)> {
        let Some(ignored) = self.ignored_label else {
            return Ok((labels, None));
        };
        let (ignored, zero) = (
            b.constant(Tensor::scalar(ignored)),
            b.scalar(DType::I64, 0.0),
        );
        let is_ignored = b.map(ScalarOp::Eq, &[labels, ignored])?;
        let labels = b.map(ScalarOp::Select, &[is_ignored, zero, labels])?;
        Ok((labels, Some(is_ignored)))
    }
}

/// Logarithms of rows at their labels, with a part from the mean of all classes.
fn smoothed(b: &mut GraphBuilder, picked: ValueId, log: ValueId, part: f64) -> Result<ValueId> {
    let ty = b.operand(log)?;
    let (dtype, axis) = (ty.dtype, ty.rank() - 1);
    let all = b.reduce(ReduceKind::Mean, log, &[axis], true)?;
    let (rest, part) = (b.scalar(dtype, 1.0 - part), b.scalar(dtype, part));
    let (picked, all) = (b.mul(picked, rest)?, b.mul(all, part)?);
    b.add_(picked, all)
}

/// The mean of the elements outside of a mask; NaN when there is none.
fn mean_without(b: &mut GraphBuilder, x: ValueId, mask: ValueId) -> Result<ValueId> {
    let ty = b.operand(x)?;
    let (dtype, axes) = (ty.dtype, (0..ty.rank()).collect::<Vec<_>>());
    let zero = b.scalar(dtype, 0.0);
    let x = b.map(ScalarOp::Select, &[mask, zero, x])?;
    let sum = b.reduce(ReduceKind::Sum, x, &axes, false)?;
    let others = b.map(ScalarOp::Not, &[mask])?;
    // An f32 counts to 2^24 only.
    let others = b.cast(others, DType::I64)?;
    let n = b.reduce(ReduceKind::Sum, others, &axes, false)?;
    let n = b.cast(n, dtype)?;
    b.div(sum, n)
}

/// The axis of classes. Errors on labels that are not one integer per row.
fn check_labels(b: &GraphBuilder, what: &str, logits: ValueId, labels: ValueId) -> Result<usize> {
    let (logits, labels) = (b.operand(logits)?, b.operand(labels)?);
    let Some(axis) = logits.rank().checked_sub(1) else {
        return Err(Error::invalid(format!(
            "{what}: logits are a scalar, expected an axis of classes"
        )));
    };
    match labels.shape.0 == logits.shape.0[..axis] && !labels.dtype.is_float() {
        true => Ok(axis),
        false => Err(Error::invalid(format!(
            "{what}: labels are {labels} for logits {logits}, expected one integer per row"
        ))),
    }
}

/// Labels as `i64` with a last axis of 1.
fn as_column(b: &mut GraphBuilder, labels: ValueId) -> Result<ValueId> {
    let mut shape: Vec<Dim> = b.operand(labels)?.shape.0.clone();
    shape.push(1.into());
    let labels = b.cast(labels, DType::I64)?;
    b.reshape(labels, shape)
}

/// The labels with negative ones out of range: a gather would count them from the end.
fn without_negative(b: &mut GraphBuilder, labels: ValueId) -> Result<ValueId> {
    let (zero, none) = (b.scalar(DType::I64, 0.0), b.scalar(DType::I64, BEYOND));
    let is_negative = b.map(ScalarOp::Lt, &[labels, zero])?;
    b.map(ScalarOp::Select, &[is_negative, none, labels])
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

/// The mean of `d^2 / 2` where `|d| <= delta`, and `delta * (|d| - delta / 2)` elsewhere, with `d = x - y` (Huber, 1964). As PyTorch's
/// and Keras' Huber losses; PyTorch's smooth L1 loss is this mean divided by `delta`.
///
/// Errors with `InvalidInput` unless `delta` is finite and above 0.
pub fn huber(b: &mut GraphBuilder, x: ValueId, y: ValueId, delta: f64) -> Result<ValueId> {
    let dtype = b.operand(x)?.dtype;
    let smallest = if dtype == DType::F64 {
        f64::MIN_POSITIVE
    } else {
        f32::MIN_POSITIVE.into()
    };
    if !(delta.is_finite() && delta >= smallest) {
        return Err(Error::invalid(format!(
            "Huber loss: delta is {delta}, expected a finite number above 0"
        )));
    }
    let difference = b.sub(x, y)?;
    let distance = b.map(ScalarOp::Abs, &[difference])?;
    let dtype = b.operand(distance)?.dtype;
    let (delta, half) = (b.scalar(dtype, delta), b.scalar(dtype, 0.5));
    // `c * (|d| - c / 2)` with `c = min(|d|, delta)` is both cases.
    let clipped = b.map(ScalarOp::Min, &[distance, delta])?;
    let half = b.mul(clipped, half)?;
    let rest = b.sub(distance, half)?;
    let term = b.mul(clipped, rest)?;
    mean(b, term)
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
///
/// All rows count, ignored ones of a [`CrossEntropy`] too: a row with a label outside of the classes, such as -100, counts as wrong.
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

/// The fraction of rows with their label among the `k` largest elements: `f32`, operands as those of [`sparse_cross_entropy`]. Of equal
/// elements, the first ones count as larger. Rows count as in [`accuracy`].
///
/// Errors with `InvalidInput` when `k` is 0 or above the number of classes.
pub fn top_k_accuracy(
    b: &mut GraphBuilder,
    logits: ValueId,
    labels: ValueId,
    k: usize,
) -> Result<ValueId> {
    let axis = check_labels(b, "top-k accuracy", logits, labels)?;
    let classes = &b.operand(logits)?.shape.0[axis];
    if k == 0 || classes.as_usize().is_some_and(|n| k > n) {
        return Err(Error::invalid(format!(
            "top-k accuracy: k is {k}, expected a number from 1 to the {classes} classes"
        )));
    }
    let top = Op::TopK {
        k: k.into(),
        axis,
        largest: true,
    };
    let guesses = b.add(top, &[logits])?[1];
    let labels = as_column(b, labels)?;
    let right = b.map(ScalarOp::Eq, &[guesses, labels])?;
    let right = b.cast(right, DType::F32)?;
    let right = b.reduce(ReduceKind::Sum, right, &[axis], false)?;
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
