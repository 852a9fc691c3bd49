//! Losses.

use super::super::import::{Ctx, OpDef, Out, Outs};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, ReduceKind, ScalarOp, ValueId};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("NegativeLogLikelihoodLoss", (2, 3), negative_log_likelihood),
    OpDef::new("SoftmaxCrossEntropyLoss", (2, 3), softmax_cross_entropy),
];

fn negative_log_likelihood<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let x = cx.val(0)?;
    Ok(vec![Out::Value(loss(cx, x)?)])
}

/// Second result: the logarithms of the probabilities.
fn softmax_cross_entropy<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let x = cx.val(0)?;
    let log_prob = cx.add(Op::Softmax { axis: 1, log: true }, &[x])?;
    Ok(vec![Out::Value(loss(cx, log_prob)?), Out::Value(log_prob)])
}

/// `-x[n, target[n, ..], ..] * weight[target[n, ..]]`, 0 where the target is `ignore_index`, reduced as asked; for `x`
/// of shape `[n, classes, ..]`. The mean is over the weights of the targets.
fn loss(cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<ValueId> {
    let ignore = cx.opt_i("ignore_index")?;
    let reduction = cx.name("reduction", "mean", &["none", "sum", "mean"])?;
    let (target, weight) = (cx.val(1)?, cx.opt(2)?);
    let (shape, dtype) = (cx.shape_of(target), cx.dtype_of(x));
    if shape.rank() == 0 || cx.shape_of(x).rank() != shape.rank() + 1 {
        return Err(Error::invalid(format!(
            "target {shape} does not fit input {}",
            cx.shape_of(x)
        )));
    }
    let zero = cx.b().scalar(dtype, 0.0);
    let (ignored, class) = match ignore {
        None => (None, target),
        Some(i) => {
            let index = cx.dtype_of(target);
            let i = cx.i64s(&[i], &[])?;
            let i = cx.b().cast(i, index)?;
            let hit = cx.map(ScalarOp::Eq, &[target, i])?;
            let first = cx.b().scalar(index, 0.0);
            (Some(hit), cx.map(ScalarOp::Select, &[hit, first, target])?)
        }
    };
    let mut at = shape.0.clone();
    at.insert(1, Dim::constant(1));
    let indices = cx.b().reshape(class, at)?;
    let picked = cx.add(Op::GatherElements { axis: 1 }, &[x, indices])?;
    let picked = cx.b().reshape(picked, shape.0.clone())?;
    let mut each = cx.map(ScalarOp::Neg, &[picked])?;
    let mut weights = None;
    if let Some(w) = weight {
        let w = cx.add(Op::Gather { axis: 0 }, &[w, class])?;
        each = cx.b().mul(each, w)?;
        weights = Some(w);
    }
    if let Some(hit) = ignored {
        each = cx.map(ScalarOp::Select, &[hit, zero, each])?;
        let w = weights.unwrap_or(cx.b().scalar(dtype, 1.0));
        weights = Some(cx.map(ScalarOp::Select, &[hit, zero, w])?);
    }
    let axes: Vec<usize> = (0..shape.rank()).collect();
    match (reduction, weights) {
        ("sum", _) => cx.reduce(ReduceKind::Sum, each, &axes, false),
        ("mean", None) => cx.reduce(ReduceKind::Mean, each, &axes, false),
        ("mean", Some(w)) => {
            let total = cx.reduce(ReduceKind::Sum, each, &axes, false)?;
            let w = cx.reduce(ReduceKind::Sum, w, &axes, false)?;
            cx.b().div(total, w)
        }
        _ => Ok(each),
    }
}
