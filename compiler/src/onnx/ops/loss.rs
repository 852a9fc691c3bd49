//! Losses.

use super::super::import::{Ctx, OpDef, Out, Outs};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, ReduceKind, ValueId};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("NegativeLogLikelihoodLoss", (2, 3), negative_log_likelihood),
    OpDef::new("SoftmaxCrossEntropyLoss", (2, 3), softmax_cross_entropy),
];

fn negative_log_likelihood(cx: &mut Ctx) -> Result<Outs> {
    let x = cx.val(0)?;
    Ok(vec![Out::Value(loss(cx, x)?)])
}

/// Second result: the logarithms of the probabilities.
fn softmax_cross_entropy(cx: &mut Ctx) -> Result<Outs> {
    let x = cx.val(0)?;
    let log_prob = cx.add(Op::Softmax { axis: 1, log: true }, &[x])?;
    Ok(vec![Out::Value(loss(cx, log_prob)?), Out::Value(log_prob)])
}

/// `-x[n, target[n, ..], ..] * weight[target[n, ..]]`, 0 where the target is `ignore_index`,
/// reduced as asked; for `x` of shape `[n, classes, ..]`. The mean is over the weights of the
/// targets.
fn loss(cx: &mut Ctx, x: ValueId) -> Result<ValueId> {
    let reduction = cx.name("reduction", "mean", &["none", "sum", "mean"])?;
    let (target, weight) = (cx.val(1)?, cx.opt(2)?);
    let (ignored, class) = classes(cx, target)?;
    let mut each = negated_at(cx, x, class)?;
    let mut weights = None;
    if let Some(w) = weight {
        let w = cx.gather(w, class, 0)?;
        each = cx.mul(each, w)?;
        weights = Some(w);
    }
    if let Some(hit) = ignored {
        let dtype = cx.dtype_of(x);
        let zero = cx.scalar(dtype, 0.0);
        each = cx.select(hit, zero, each)?;
        let w = weights.unwrap_or(cx.scalar(dtype, 1.0));
        weights = Some(cx.select(hit, zero, w)?);
    }
    reduced(cx, reduction, each, weights)
}

/// Targets that are ignored, and all targets with class 0 for those.
fn classes(cx: &mut Ctx, target: ValueId) -> Result<(Option<ValueId>, ValueId)> {
    let Some(ignore) = cx.opt_i("ignore_index")? else {
        return Ok((None, target));
    };
    let index = cx.dtype_of(target);
    let ignore = cx.i64s(&[ignore], &[])?;
    let ignore = cx.cast(ignore, index)?;
    let hit = cx.eq(target, ignore)?;
    let first = cx.scalar(index, 0.0);
    Ok((Some(hit), cx.select(hit, first, target)?))
}

/// `-x[n, class[n, ..], ..]`.
fn negated_at(cx: &mut Ctx, x: ValueId, class: ValueId) -> Result<ValueId> {
    let (sx, shape) = (cx.shape_of(x), cx.shape_of(class));
    if shape.rank() == 0 || sx.rank() != shape.rank() + 1 {
        let message = format!("target {shape} does not fit input {sx}");
        return Err(Error::invalid(message));
    }
    let mut at = shape.0.clone();
    at.insert(1, Dim::constant(1));
    let indices = cx.reshape(class, at)?;
    let picked = cx.add(Op::GatherElements { axis: 1 }, &[x, indices])?;
    let picked = cx.reshape(picked, shape.0)?;
    cx.neg(picked)
}

fn reduced(
    cx: &mut Ctx,
    reduction: &str,
    each: ValueId,
    weights: Option<ValueId>,
) -> Result<ValueId> {
    let axes: Vec<usize> = (0..cx.shape_of(each).rank()).collect();
    match (reduction, weights) {
        ("sum", _) => cx.reduce(ReduceKind::Sum, each, &axes, false),
        ("mean", None) => cx.reduce(ReduceKind::Mean, each, &axes, false),
        ("mean", Some(w)) => {
            let total = cx.reduce(ReduceKind::Sum, each, &axes, false)?;
            let w = cx.reduce(ReduceKind::Sum, w, &axes, false)?;
            cx.div(total, w)
        }
        _ => Ok(each),
    }
}
