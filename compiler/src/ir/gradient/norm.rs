//! Gradients of softmax and of normalisations. Means and deviations are computed anew from the operand.

use super::super::graph::ValueId;
use super::super::ops::{Op, ReduceKind};
use super::super::scalar::ScalarOp;
use super::Vjp;
use crate::error::Result;

/// `y (g - sum(g y))`; of the logarithm `g - exp(y) sum(g)`.
pub fn softmax(v: &mut Vjp) -> Result<()> {
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

/// For `h = (x - mean) r` and `t = g gamma`: `r (t - mean(t) - h mean(t h))`, and the sums over rows of `g h` and `g`.
pub fn layer_norm(v: &mut Vjp) -> Result<()> {
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

/// For `h = (x - mean) r`: `r (g - mean(g) - h mean(g h))`.
pub fn standardize(v: &mut Vjp) -> Result<()> {
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

/// For `h = x r` and `t = g gamma`: `r (t - h mean(t h))`, and the sum over rows of `g h`.
pub fn rms_norm(v: &mut Vjp) -> Result<()> {
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
