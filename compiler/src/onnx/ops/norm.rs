//! Normalisations.

use super::super::import::{Ctx, OpDef, Out, Outs, axes_of, one, product};
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, PoolKind, Real, ReduceKind, ScalarOp, Shape, ValueId, Window};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("LayerNormalization", (2, 3), layer_norm),
    OpDef::new("RMSNormalization", (2, 2), rms_norm),
    // ONNX Runtime's name for it, also in the standard domain.
    OpDef::new("SimplifiedLayerNormalization", (2, 2), rms_norm),
    OpDef::new("InstanceNormalization", (3, 3), instance_norm),
    OpDef::new("GroupNormalization", (3, 3), group_norm),
    OpDef::new("LpNormalization", (1, 1), lp_norm),
    OpDef::new("MeanVarianceNormalization", (1, 1), mean_variance),
    OpDef::new("LRN", (1, 1), local_response),
];

/// A per-channel vector `[c]` shaped to broadcast over `[n, c, ..]` of the given rank.
pub(super) fn per_channel(cx: &mut Ctx, v: ValueId, rank: usize) -> Result<ValueId> {
    let c = cx.shape_of(v).n_elements();
    let mut dims = vec![c];
    dims.resize(rank.saturating_sub(1).max(1), Dim::constant(1));
    cx.reshape(v, dims)
}

/// A scale or offset broadcast to exactly the normalised axes.
fn fitted(cx: &mut Ctx, v: ValueId, dims: &[Dim]) -> Result<ValueId> {
    let shape = cx.shape_of(v);
    let extra = shape.rank().saturating_sub(dims.len());
    let v = if shape[..extra].iter().all(|d| d.is(1)) {
        cx.reshape(v, shape[extra..].to_vec())?
    } else {
        v
    };
    cx.broadcast(v, dims.to_vec())
}

/// Results: the normalised tensor, mean, and 1 / standard deviation (the latter two in `f32`).
fn layer_norm(cx: &mut Ctx) -> Result<Outs> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    stash_type(cx)?;
    let ty = cx.ty(0)?;
    let axis = cx.axis(-1)?;
    let [x, scale] = cx.first()?;
    let dims = ty.shape[axis..].to_vec();
    let gamma = fitted(cx, scale, &dims)?;
    let beta = match cx.opt(2)? {
        Some(b) => fitted(cx, b, &dims)?,
        None => filled(cx, ty.dtype, 0.0, &dims)?,
    };
    let op = Op::LayerNorm {
        axis,
        epsilon: Real(epsilon),
    };
    let mut outs = vec![Out::Value(cx.add(op, &[x, gamma, beta])?)];
    if cx.node.output.iter().skip(1).any(|o| !o.is_empty()) {
        outs.extend(statistics(cx, x, axis, epsilon)?.map(Out::Value));
    }
    Ok(outs)
}

/// Mean and reciprocal standard deviation over the axes from `axis` on.
fn statistics(cx: &mut Ctx, x: ValueId, axis: usize, epsilon: f64) -> Result<[ValueId; 2]> {
    let axes: Vec<usize> = (axis..cx.shape_of(x).rank()).collect();
    let wide = match cx.dtype_of(x) {
        DType::F64 => x,
        _ => cx.cast(x, DType::F32)?,
    };
    let mean = cx.reduce(ReduceKind::Mean, wide, &axes, true)?;
    let centred = cx.sub(wide, mean)?;
    let squares = cx.mul(centred, centred)?;
    let var = cx.reduce(ReduceKind::Mean, squares, &axes, true)?;
    let var = cx.add_real(var, epsilon)?;
    Ok([mean, cx.map(ScalarOp::Rsqrt, &[var])?])
}

/// The dtype of the inner computation: `f32`, which the IR's rules give (half types widen).
fn stash_type(cx: &Ctx) -> Result<()> {
    match cx.i("stash_type", 1)? {
        1 => Ok(()),
        other => Err(Error::unsupported(format!(
            "stash_type {other}; 1 (f32) is supported"
        ))),
    }
}

fn rms_norm(cx: &mut Ctx) -> Result<Outs> {
    let epsilon = Real(cx.f("epsilon", 1e-5f32.into())?);
    stash_type(cx)?;
    let ty = cx.ty(0)?;
    let axis = cx.axis(-1)?;
    let [x, scale] = cx.first()?;
    let gamma = fitted(cx, scale, &ty.shape[axis..])?;
    one(cx.add(Op::RmsNorm { axis, epsilon }, &[x, gamma])?)
}

/// A tensor of one value.
pub(super) fn filled(cx: &mut Ctx, dtype: DType, value: f64, dims: &[Dim]) -> Result<ValueId> {
    let c = cx.scalar(dtype, value);
    cx.broadcast(c, dims.to_vec())
}

/// `(x - mean) / sqrt(var + epsilon)` over the axes from 2 on.
fn normalise_from_2(cx: &mut Ctx, x: ValueId, epsilon: f64) -> Result<ValueId> {
    let ty = cx.type_of(x);
    let last = &ty.shape[2..];
    let ones = filled(cx, ty.dtype, 1.0, last)?;
    let zeros = filled(cx, ty.dtype, 0.0, last)?;
    let op = Op::LayerNorm {
        axis: 2,
        epsilon: Real(epsilon),
    };
    cx.add(op, &[x, ones, zeros])
}

fn scaled(cx: &mut Ctx, x: ValueId, scale: ValueId, offset: ValueId) -> Result<ValueId> {
    let rank = cx.shape_of(x).rank();
    let scale = per_channel(cx, scale, rank)?;
    let offset = per_channel(cx, offset, rank)?;
    let y = cx.mul(x, scale)?;
    cx.add_(y, offset)
}

fn at_least_rank(shape: &Shape, rank: usize) -> Result<()> {
    if shape.rank() >= rank {
        return Ok(());
    }
    let message = format!("expected rank {rank} or more, got {shape}");
    Err(Error::invalid(message))
}

fn instance_norm(cx: &mut Ctx) -> Result<Outs> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    let args = cx.vals()?;
    let shape = cx.shape_of(args[0]);
    at_least_rank(&shape, 3)?;
    let y = normalise_from_2(cx, args[0], epsilon)?;
    one(scaled(cx, y, args[1], args[2])?)
}

/// Scale and offset are per group before version 21, per channel since.
fn group_norm(cx: &mut Ctx) -> Result<Outs> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    stash_type(cx)?;
    let groups = Dim::constant(cx.i("num_groups", 0)?);
    let args = cx.vals()?;
    let shape = cx.shape_of(args[0]);
    at_least_rank(&shape, 2)?;
    let channels = &shape[1];
    let per_group = channels.exact_div(&groups).ok_or_else(|| {
        Error::invalid(format!(
            "{channels} channels do not divide into {groups} groups"
        ))
    })?;
    let grouped = [&[shape[0].clone(), groups, per_group], &shape[2..]].concat();
    let grouped = cx.reshape(args[0], grouped)?;
    let mut y = normalise_from_2(cx, grouped, epsilon)?;
    if cx.opset < 21 {
        y = scaled(cx, y, args[1], args[2])?;
        return one(cx.reshape(y, shape.0)?);
    }
    y = cx.reshape(y, shape.0)?;
    one(scaled(cx, y, args[1], args[2])?)
}

/// `x / |x|_p` along an axis; a norm of 0 gives 0.
fn lp_norm(cx: &mut Ctx) -> Result<Outs> {
    let axis = cx.axis(-1)?;
    let p = cx.i("p", 2)?;
    let x = cx.val(0)?;
    let norm = norm_along(cx, x, axis, p)?;
    let zero = cx.scalar_like(x, 0.0);
    let empty = cx.eq(norm, zero)?;
    let q = cx.div(x, norm)?;
    one(cx.select(empty, zero, q)?)
}

/// `|x|_p` along an axis.
fn norm_along(cx: &mut Ctx, x: ValueId, axis: usize, p: i64) -> Result<ValueId> {
    let powers = match p {
        1 => cx.abs(x)?,
        2 => cx.mul(x, x)?,
        _ => return Err(Error::invalid(format!("p must be 1 or 2, is {p}"))),
    };
    let sum = cx.reduce(ReduceKind::Sum, powers, &[axis], true)?;
    if p == 1 { Ok(sum) } else { cx.sqrt(sum) }
}

/// `(x - mean) / (sqrt(mean(x^2) - mean^2) + 1e-9)`, the variance computed from the centred values.
fn mean_variance(cx: &mut Ctx) -> Result<Outs> {
    let axes = axes_of(&cx.ints("axes")?.unwrap_or(vec![0, 2, 3]), cx.ty(0)?.rank())?;
    let x = cx.val(0)?;
    let mean = cx.reduce(ReduceKind::Mean, x, &axes, true)?;
    let centred = cx.sub(x, mean)?;
    let squares = cx.mul(centred, centred)?;
    let var = cx.reduce(ReduceKind::Mean, squares, &axes, true)?;
    let std = cx.sqrt(var)?;
    let std = cx.add_real(std, 1e-9)?;
    one(cx.div(centred, std)?)
}

/// `x / (bias + alpha / size * sum of squares over size channels)^beta`; the sum is average pooling
/// over channels.
fn local_response(cx: &mut Ctx) -> Result<Outs> {
    let (alpha, beta, bias) = (
        cx.f("alpha", 1e-4f32.into())?,
        cx.f("beta", 0.75)?,
        cx.f("bias", 1.0)?,
    );
    let size = usize::try_from(cx.i("size", 0)?).ok();
    let size = size.filter(|s| (1..=1 << 20).contains(s));
    let size = size.ok_or_else(|| Error::invalid("size is out of range"))?;
    let x = cx.val(0)?;
    let squares = cx.mul(x, x)?;
    let mean = mean_over_channels(cx, squares, size)?;
    let t = cx.mul_real(mean, alpha)?;
    let t = cx.add_real(t, bias)?;
    let t = cx.with_real(ScalarOp::Pow, t, beta)?;
    one(cx.div(x, t)?)
}

/// The mean over `size` channels around each one, zeros beyond the first and the last.
fn mean_over_channels(cx: &mut Ctx, x: ValueId, size: usize) -> Result<ValueId> {
    let shape = cx.shape_of(x);
    at_least_rank(&shape, 2)?;
    let rest = product(&shape[2..]);
    let plane = cx.reshape(x, [&shape[0], &1.into(), &shape[1], &rest])?;
    let window = Window {
        strides: vec![1, 1],
        dilations: vec![1, 1],
        pads_low: vec![(size - 1) / 2, 0],
        pads_high: vec![size / 2, 0],
    };
    let pool = Op::Pool {
        kind: PoolKind::AvgIncludePad,
        size: vec![size, 1],
        window,
        ceil: false,
        layout: Layout::ChannelsFirst,
    };
    let mean = cx.add(pool, &[plane])?;
    cx.reshape(mean, shape.0)
}
