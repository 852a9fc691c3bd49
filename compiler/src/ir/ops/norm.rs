//! Softmax and normalisations. Gradients compute means and deviations anew from the operand.

use super::{Extremum, Op, ReduceKind};
use crate::error::Result;
use crate::ir::axes::{Passed, Transposed};
use crate::ir::eval::Call;
use crate::ir::eval::scalar::extreme;
use crate::ir::eval::view::for_each_line;
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, check_axes, check_axis, check_float};
use crate::ir::scalar::ScalarOp;
use crate::ir::types::{Shape, Type};
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{eval, work};
use gristmill_runtime::Tensor;
use std::collections::BTreeMap;

pub(super) fn softmax_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Softmax { axis });
    check_axis(*axis, &args[0])?;
    check_float(&args[0])?;
    Ok(vec![args[0].clone()])
}

pub(super) fn softmax_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Softmax { axis, log });
    let x = c.inputs[0];
    let mut values = x.to_f64s();
    for_each_line(x.shape(), *axis, |offsets| {
        let mut line: Vec<f64> = offsets.iter().map(|&o| values[o]).collect();
        softmax_line(&mut line, *log);
        offsets.iter().zip(line).for_each(|(&o, v)| values[o] = v);
    });
    from_f64s(x, &values)
}

/// Softmax, or its logarithm, of values in place.
pub(super) fn softmax_line(line: &mut [f64], log: bool) {
    let max = line
        .iter()
        .fold(f64::NEG_INFINITY, |m, &v| extreme(m, v, Extremum::Max));
    let sum: f64 = line.iter().map(|v| (v - max).exp()).sum();
    line.iter_mut().for_each(|v| {
        *v = if log {
            *v - max - sum.ln()
        } else {
            (*v - max).exp() / sum
        }
    });
}

pub(super) fn softmax_work(s: &Sizes) -> Count {
    work::count(WorkClass::Reduce, s.n_in().saturating_mul(18))
}

/// `y (g - sum(g y))`; of the logarithm `g - exp(y) sum(g)`.
pub(super) fn softmax_gradient(v: &mut Vjp) -> Result<()> {
    let Op::Softmax { axis, log } = v.op() else {
        return v.refuse("the op is no softmax");
    };
    let (g, y) = (v.g()?, v.y());
    let gradient = if log {
        let sum = v.reduce(ReduceKind::Sum, g, &[axis])?;
        let probabilities = v.map(ScalarOp::Exp, &[y])?;
        let share = v.mul(probabilities, sum)?;
        v.sub(g, share)?
    } else {
        softmax_back(v, g, y, axis)?
    };
    v.give(0, gradient)
}

/// Cotangent of the logits from that of probabilities along an axis.
pub(super) fn softmax_back(v: &mut Vjp, g: ValueId, y: ValueId, axis: usize) -> Result<ValueId> {
    let weighted = v.mul(g, y)?;
    let sum = v.reduce(ReduceKind::Sum, weighted, &[axis])?;
    let centred = v.sub(g, sum)?;
    v.mul(y, centred)
}

pub(super) fn norm_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let (Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. }) = op else {
        return Err("not a norm".into());
    };
    check_axis(*axis, &args[0])?;
    check_float(&args[0])?;
    for t in &args[1..] {
        if t.dtype != args[0].dtype || *t.shape != args[0].shape[*axis..] {
            return Err(format!(
                "scale and offset must be {}{}, got {t}",
                args[0].dtype,
                Shape(args[0].shape[*axis..].to_vec())
            ));
        }
    }
    Ok(vec![args[0].clone()])
}

/// The variance is that of the population.
pub(super) fn layer_norm_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, LayerNorm { epsilon });
    normalised(c, Some(c.inputs[2]), epsilon.0)
}

pub(super) fn rms_norm_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, RmsNorm { epsilon });
    normalised(c, None, epsilon.0)
}

/// The first operand over the deviation of its rows, times the second. With `beta`, the mean is subtracted first.
fn normalised(c: &Call, beta: Option<&Tensor>, epsilon: f64) -> Result<Vec<Tensor>> {
    let x = c.inputs[0];
    let (mut values, gamma) = (x.to_f64s(), c.inputs[1].to_f64s());
    let offset = beta.map(Tensor::to_f64s);
    if gamma.is_empty() {
        return Ok(vec![x.clone()]);
    }
    for row in values.chunks_exact_mut(gamma.len()) {
        let n = row.len() as f64;
        let mean = match offset {
            Some(_) => row.iter().sum::<f64>() / n,
            None => 0.0,
        };
        let mean_square = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        let deviation = (mean_square + epsilon).sqrt();
        for (i, v) in row.iter_mut().enumerate() {
            *v = (*v - mean) / deviation * gamma[i] + offset.as_ref().map_or(0.0, |b| b[i]);
        }
    }
    from_f64s(x, &values)
}

/// Values in the shape of `x`, each rounded once to its dtype.
fn from_f64s(x: &Tensor, values: &[f64]) -> Result<Vec<Tensor>> {
    eval::one(Ok(Tensor::from_f64s(x.dtype(), x.shape(), values)?))
}

pub(super) fn norm_work(s: &Sizes) -> Count {
    work::count(WorkClass::Reduce, s.n_in().saturating_mul(6))
}

/// The normalised axes stay in place.
pub(super) fn norm_axes(t: &Transposed) -> Option<Passed> {
    let (Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. }) = *t.op else {
        return None;
    };
    let stay = (axis..t.perm.len()).all(|i| t.perm[i] == i);
    stay.then(|| t.passed(t.op.clone())).flatten()
}

/// For `h = (x - mean) r` and `t = g gamma`: `r (t - mean(t) - h mean(t h))`, and the sums over rows of `g h` and `g`.
pub(super) fn layer_norm_gradient(v: &mut Vjp) -> Result<()> {
    let Op::LayerNorm { axis, epsilon } = v.op() else {
        return v.refuse("the op is no layer normalisation");
    };
    let (g, x) = (v.g()?, v.x(0));
    let axes: Vec<usize> = (axis..v.ty(x).rank()).collect();
    let centre = mean(v, x, &axes)?;
    let centred = v.sub(x, centre)?;
    let r = scale_of(v, centred, &axes, epsilon.0)?;
    let h = v.mul(centred, r)?;
    if v.needs(0) {
        let t = v.mul(g, v.x(1))?;
        let shift = mean(v, t, &axes)?;
        let shifted = v.sub(t, shift)?;
        let gradient = without_radial(v, shifted, t, h, &axes)?;
        let gradient = v.mul(r, gradient)?;
        v.give(0, gradient)?;
    }
    give_gamma(v, g, h)?;
    v.give(2, g)
}

fn mean(v: &mut Vjp, x: ValueId, axes: &[usize]) -> Result<ValueId> {
    v.reduce(ReduceKind::Mean, x, axes)
}

/// `1 / sqrt(mean(x^2) + epsilon)`.
fn scale_of(v: &mut Vjp, x: ValueId, axes: &[usize], epsilon: f64) -> Result<ValueId> {
    let squared = v.square(x)?;
    let power = mean(v, squared, axes)?;
    let power = v.plus(power, epsilon)?;
    v.map(ScalarOp::Rsqrt, &[power])
}

/// For `h = x r` and `t = g gamma`: `r (t - h mean(t h))`, and the sum over rows of `g h`.
pub(super) fn rms_norm_gradient(v: &mut Vjp) -> Result<()> {
    let Op::RmsNorm { axis, epsilon } = v.op() else {
        return v.refuse("the op is no normalisation by the root of the mean square");
    };
    let (g, x) = (v.g()?, v.x(0));
    let axes: Vec<usize> = (axis..v.ty(x).rank()).collect();
    let r = scale_of(v, x, &axes, epsilon.0)?;
    let h = v.mul(x, r)?;
    if v.needs(0) {
        let t = v.mul(g, v.x(1))?;
        let gradient = without_radial(v, t, t, h, &axes)?;
        let gradient = v.mul(r, gradient)?;
        v.give(0, gradient)?;
    }
    give_gamma(v, g, h)
}

/// `a - h mean(t h)`: the part along `h`, which the normalisation removes, is taken away.
fn without_radial(
    v: &mut Vjp,
    a: ValueId,
    t: ValueId,
    h: ValueId,
    axes: &[usize],
) -> Result<ValueId> {
    let along = v.mul(t, h)?;
    let along = mean(v, along, axes)?;
    let radial = v.mul(h, along)?;
    v.sub(a, radial)
}

fn give_gamma(v: &mut Vjp, g: ValueId, h: ValueId) -> Result<()> {
    if v.needs(1) {
        let product = v.mul(g, h)?;
        v.give(1, product)?;
    }
    Ok(())
}

pub(super) fn standardize_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Standardize { axes });
    check_axes(axes, &args[0])?;
    check_float(&args[0])?;
    Ok(vec![args[0].clone()])
}

pub(super) fn standardize_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Standardize { axes, epsilon });
    let (mut values, shape) = (c.inputs[0].to_f64s(), c.shape);
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for i in 0..values.len() {
        groups.entry(group_of(i, shape, axes)).or_default().push(i);
    }
    for group in groups.values() {
        let mean_of = |f: &dyn Fn(f64) -> f64| {
            let terms = group.iter().map(|&i| f(values[i]));
            terms.sum::<f64>() / group.len() as f64
        };
        let mean = mean_of(&|v| v);
        let variance = mean_of(&|v| (v - mean) * (v - mean));
        let deviation = (variance + epsilon.0).sqrt();
        for &i in group {
            values[i] = (values[i] - mean) / deviation;
        }
    }
    from_f64s(c.inputs[0], &values)
}

/// Position of an element whose indices along `axes` are 0 instead.
fn group_of(mut i: usize, shape: &[usize], axes: &[usize]) -> usize {
    let (mut position, mut stride) = (0, 1);
    for (axis, &extent) in shape.iter().enumerate().rev() {
        if !axes.contains(&axis) {
            position += i % extent * stride;
        }
        i /= extent;
        stride *= extent;
    }
    position
}

/// The axes are renamed.
pub(super) fn standardize_axes(t: &Transposed) -> Option<Passed> {
    let Op::Standardize { axes, epsilon } = t.op else {
        return None;
    };
    let mut axes: Vec<usize> = axes.iter().map(|&a| t.perm[a]).collect();
    axes.sort_unstable();
    let epsilon = *epsilon;
    t.passed(Op::Standardize { axes, epsilon })
}

/// For `h = (x - mean) r`: `r (g - mean(g) - h mean(g h))`.
pub(super) fn standardize_gradient(v: &mut Vjp) -> Result<()> {
    let Op::Standardize { axes, epsilon } = v.op() else {
        return v.refuse("the op is no standardisation");
    };
    let (g, x, h) = (v.g()?, v.x(0), v.y());
    let centre = mean(v, x, &axes)?;
    let centred = v.sub(x, centre)?;
    let r = scale_of(v, centred, &axes, epsilon.0)?;
    let shift = mean(v, g, &axes)?;
    let shifted = v.sub(g, shift)?;
    let gradient = without_radial(v, shifted, g, h, &axes)?;
    let gradient = v.mul(r, gradient)?;
    v.give(0, gradient)
}
