//! Batch normalisation, by given statistics or by those of the batch.

use super::super::import::{Ctx, OpDef, Out, Outs, TrainingNode};
use super::super::load::Form;
use super::norm::per_channel;
use crate::error::{Error, Result};
use crate::ir::{ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[OpDef::new("BatchNormalization", (5, 5), batch_norm)];

fn batch_norm(cx: &mut Ctx) -> Result<Outs> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    let momentum = cx.f("momentum", 0.9f32.into())?;
    let is_training = is_training(cx)?;
    if is_training && cx.form() != Form::Evaluation {
        return by_batch(cx, epsilon, momentum);
    }
    let args = cx.vals()?;
    let wide = wide(cx.dtype_of(args[0]));
    let y = normalised(cx, &args, wide, epsilon)?;
    let mut outs = vec![Out::Value(y)];
    if is_training {
        // The statistics as they are.
        outs.extend([Out::Same(cx.v(3)?), Out::Same(cx.v(4)?)]);
    }
    Ok(outs)
}

fn wide(dtype: DType) -> DType {
    match dtype.is_narrow_float() {
        true => DType::F32,
        false => dtype,
    }
}

/// True for a node in its form for training.
fn is_training(cx: &mut Ctx) -> Result<bool> {
    let is_training = match cx.opset < 7 {
        true => !cx.flag("is_test", false)?,
        false => cx.flag("training_mode", false)?,
    };
    if cx.opset < 9 && !cx.flag("spatial", true)? {
        return Err(Error::unsupported("spatial = 0 is not supported"));
    }
    if is_training {
        cx.note_training(TrainingNode::BatchNorm);
    }
    Ok(is_training)
}

/// `x * factor + rest` for x, scale, offset, mean, variance.
fn normalised(cx: &mut Ctx, args: &[ValueId], wide: DType, epsilon: f64) -> Result<ValueId> {
    let (x, dtype) = (args[0], cx.dtype_of(args[0]));
    let rank = cx.shape_of(x).rank();
    let (factor, rest) = batch_factors(cx, &args[1..], wide, epsilon)?;
    let (factor, rest) = (per_channel(cx, factor, rank)?, per_channel(cx, rest, rank)?);
    let x = cx.cast(x, wide)?;
    let y = cx.mul(x, factor)?;
    let y = cx.add_(y, rest)?;
    cx.cast(y, dtype)
}

/// Vectors of `x * factor + rest`, which fold to constants; `args`: scale, offset, mean, variance.
fn batch_factors(
    cx: &mut Ctx,
    args: &[ValueId],
    wide: DType,
    epsilon: f64,
) -> Result<(ValueId, ValueId)> {
    let mut wides = Vec::new();
    for &a in args {
        wides.push(cx.cast(a, wide)?);
    }
    let [scale, offset, mean, var] = [wides[0], wides[1], wides[2], wides[3]];
    let var = cx.add_real(var, epsilon)?;
    let inv = cx.map(ScalarOp::Rsqrt, &[var])?;
    let factor = cx.mul(scale, inv)?;
    let moved = cx.mul(mean, factor)?;
    Ok((factor, cx.sub(offset, moved)?))
}

/// By the mean and the biased variance of the batch. The results for the running statistics move towards them; a step of training assigns
/// them to its variables.
fn by_batch(cx: &mut Ctx, epsilon: f64, momentum: f64) -> Result<Outs> {
    let args = cx.vals()?;
    let shape = cx.shape_of(args[0]);
    let rank = shape.rank();
    if rank < 2 {
        return Err(Error::invalid(format!(
            "the operand has {rank} axes, expected [batch, channels, ..]"
        )));
    }
    let dtype = cx.dtype_of(args[0]);
    let x = cx.cast(args[0], wide(dtype))?;
    let parts = match cx.form() {
        Form::Step => cx.b().in_parts(x)?,
        Form::Inference | Form::Evaluation => None,
    };
    let (x, first) = (parts.unwrap_or(x), usize::from(parts.is_some()));
    let axes: Vec<usize> = (first..rank + first)
        .filter(|&axis| axis != first + 1)
        .collect();
    let [mean, centred, var] = moments(cx, x, &axes)?;
    let y = scaled(cx, [centred, var, args[1], args[2]], epsilon)?;
    let y = cx.cast(y, dtype)?;
    let y = cx.reshape(y, shape.to_vec())?;
    let [mean, var] = match parts {
        None => [mean, var],
        Some(_) => [cx.b().mean_of_parts(mean)?, cx.b().mean_of_parts(var)?],
    };
    let mean = follow(cx, 3, mean, momentum)?;
    let var = follow(cx, 4, var, momentum)?;
    Ok([y, mean, var].map(Out::Value).into())
}

/// The mean, the differences from it, and the mean of their squares.
fn moments(cx: &mut Ctx, x: ValueId, axes: &[usize]) -> Result<[ValueId; 3]> {
    let mean = cx.reduce(ReduceKind::Mean, x, axes, true)?;
    let centred = cx.sub(x, mean)?;
    let squares = cx.mul(centred, centred)?;
    Ok([
        mean,
        centred,
        cx.reduce(ReduceKind::Mean, squares, axes, true)?,
    ])
}

/// `centred / sqrt(variance + epsilon) * scale + offset`.
fn scaled(
    cx: &mut Ctx,
    [centred, var, scale, offset]: [ValueId; 4],
    epsilon: f64,
) -> Result<ValueId> {
    let rank = cx.shape_of(centred).rank();
    let wide = cx.dtype_of(centred);
    let (scale, offset) = (cx.cast(scale, wide)?, cx.cast(offset, wide)?);
    let (scale, offset) = (
        per_channel(cx, scale, rank)?,
        per_channel(cx, offset, rank)?,
    );
    let var = cx.add_real(var, epsilon)?;
    let inv = cx.map(ScalarOp::Rsqrt, &[var])?;
    let factor = cx.mul(inv, scale)?;
    let y = cx.mul(centred, factor)?;
    cx.add_(y, offset)
}

/// Operand `i`, a running statistic, after a step: `momentum` of it, and the rest of the batch's own. Where several nodes share a statistic, each
/// moves it from where the one before left it.
fn follow(cx: &mut Ctx, i: usize, own: ValueId, momentum: f64) -> Result<ValueId> {
    let running = cx.latest(i)?;
    let ty = cx.type_of(running);
    let own = cx.reshape(own, ty.shape.0.clone())?;
    let own = cx.cast(own, ty.dtype)?;
    let (kept, entering) = (
        cx.mul_real(running, momentum)?,
        cx.mul_real(own, 1.0 - momentum)?,
    );
    let moved = cx.add_(kept, entering)?;
    match cx.form() {
        Form::Step => cx.assign(i, moved),
        Form::Inference | Form::Evaluation => Ok(moved),
    }
}
