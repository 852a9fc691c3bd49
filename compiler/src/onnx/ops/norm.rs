//! Normalisations.

use super::super::import::{Ctx, OpDef, Out, Outs, axes_of, axis_of, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, PoolKind, Real, ReduceKind, ScalarOp, Shape, ValueId, Window};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("BatchNormalization", (5, 5), batch_norm),
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
pub(super) fn per_channel(cx: &mut Ctx<'_, '_>, v: ValueId, rank: usize) -> Result<ValueId> {
    let c = cx.shape_of(v).n_elements();
    let mut dims = vec![c];
    dims.resize(rank.saturating_sub(1).max(1), Dim::constant(1));
    cx.b().reshape(v, dims)
}

fn batch_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    cx.ignore(&["momentum"]);
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    let training = if cx.opset < 7 {
        !cx.flag("is_test", false)?
    } else {
        cx.flag("training_mode", false)?
    };
    if training {
        return Err(
            Error::unsupported("training_mode is not supported").hint("export for inference")
        );
    }
    if cx.opset < 9 && !cx.flag("spatial", true)? {
        return Err(Error::unsupported("spatial = 0 is not supported"));
    }
    let args = cx.vals()?;
    let (x, rank) = (args[0], cx.shape_of(args[0]).rank());
    let dtype = cx.dtype_of(x);
    let wide = if dtype.is_narrow_float() {
        DType::F32
    } else {
        dtype
    };
    let mut wides = Vec::new();
    for &a in &args[1..] {
        wides.push(cx.b().cast(a, wide)?);
    }
    let [scale, offset, mean, var] = [wides[0], wides[1], wides[2], wides[3]];
    // `x * factor + rest`: both vectors fold to constants.
    let var = cx.with_real(ScalarOp::Add, var, epsilon)?;
    let inv = cx.map(ScalarOp::Rsqrt, &[var])?;
    let factor = cx.map(ScalarOp::Mul, &[scale, inv])?;
    let moved = cx.map(ScalarOp::Mul, &[mean, factor])?;
    let rest = cx.map(ScalarOp::Sub, &[offset, moved])?;
    let (factor, rest) = (per_channel(cx, factor, rank)?, per_channel(cx, rest, rank)?);
    let x = cx.b().cast(x, wide)?;
    let y = cx.map(ScalarOp::Mul, &[x, factor])?;
    let y = cx.map(ScalarOp::Add, &[y, rest])?;
    one(cx.b().cast(y, dtype)?)
}

/// A scale or offset broadcast to exactly the normalised axes.
fn fitted(cx: &mut Ctx<'_, '_>, v: ValueId, dims: &[Dim]) -> Result<ValueId> {
    let shape = cx.shape_of(v);
    let extra = shape.rank().saturating_sub(dims.len());
    let v = if shape[..extra].iter().all(|d| d.is(1)) {
        cx.b().reshape(v, shape[extra..].to_vec())?
    } else {
        v
    };
    cx.b().broadcast(v, dims.to_vec())
}

/// Results: the normalised tensor, mean, and 1 / standard deviation (the latter two in `f32`).
fn layer_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    stash_type(cx)?;
    let ty = cx.ty(0)?;
    let axis = axis_of(cx.i("axis", -1)?, ty.rank())?;
    let (x, scale) = (cx.val(0)?, cx.val(1)?);
    let dims = ty.shape[axis..].to_vec();
    let gamma = fitted(cx, scale, &dims)?;
    let beta = match cx.opt(2)? {
        Some(b) => fitted(cx, b, &dims)?,
        None => filled(cx, ty.dtype, 0.0, &dims)?,
    };
    let y = cx.add(
        Op::LayerNorm {
            axis,
            epsilon: Real(epsilon),
        },
        &[x, gamma, beta],
    )?;
    let mut outs = vec![Out::Value(y)];
    if cx.node.output.iter().skip(1).any(|o| !o.is_empty()) {
        let axes: Vec<usize> = (axis..ty.rank()).collect();
        let wide = if ty.dtype == DType::F64 {
            x
        } else {
            cx.b().cast(x, DType::F32)?
        };
        let mean = cx.reduce(ReduceKind::Mean, wide, &axes, true)?;
        let centred = cx.map(ScalarOp::Sub, &[wide, mean])?;
        let squares = cx.map(ScalarOp::Mul, &[centred, centred])?;
        let var = cx.reduce(ReduceKind::Mean, squares, &axes, true)?;
        let var = cx.with_real(ScalarOp::Add, var, epsilon)?;
        outs.extend([
            Out::Value(mean),
            Out::Value(cx.map(ScalarOp::Rsqrt, &[var])?),
        ]);
    }
    Ok(outs)
}

/// The dtype of the inner computation: `f32`, which the IR's rules give (half types widen).
fn stash_type(cx: &Ctx<'_, '_>) -> Result<()> {
    match cx.i("stash_type", 1)? {
        1 => Ok(()),
        other => Err(Error::unsupported(format!(
            "stash_type {other}; 1 (f32) is supported"
        ))),
    }
}

fn rms_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    stash_type(cx)?;
    let ty = cx.ty(0)?;
    let axis = axis_of(cx.i("axis", -1)?, ty.rank())?;
    let (x, scale) = (cx.val(0)?, cx.val(1)?);
    let gamma = fitted(cx, scale, &ty.shape[axis..])?;
    one(cx.add(
        Op::RmsNorm {
            axis,
            epsilon: Real(epsilon),
        },
        &[x, gamma],
    )?)
}

/// A tensor of one value.
pub(super) fn filled(
    cx: &mut Ctx<'_, '_>,
    dtype: DType,
    value: f64,
    dims: &[Dim],
) -> Result<ValueId> {
    let c = cx.b().scalar(dtype, value);
    cx.b().broadcast(c, dims.to_vec())
}

/// `(x - mean) / sqrt(var + epsilon)` over the last axis of `[n, groups, rest]`.
fn normalise_last(cx: &mut Ctx<'_, '_>, x: ValueId, epsilon: f64) -> Result<ValueId> {
    let ty = cx.type_of(x);
    let last = ty.shape[2..].to_vec();
    let (ones, zeros) = (
        filled(cx, ty.dtype, 1.0, &last)?,
        filled(cx, ty.dtype, 0.0, &last)?,
    );
    cx.add(
        Op::LayerNorm {
            axis: 2,
            epsilon: Real(epsilon),
        },
        &[x, ones, zeros],
    )
}

fn scaled(cx: &mut Ctx<'_, '_>, x: ValueId, scale: ValueId, offset: ValueId) -> Result<ValueId> {
    let rank = cx.shape_of(x).rank();
    let (scale, offset) = (
        per_channel(cx, scale, rank)?,
        per_channel(cx, offset, rank)?,
    );
    let y = cx.map(ScalarOp::Mul, &[x, scale])?;
    cx.map(ScalarOp::Add, &[y, offset])
}

fn at_least_rank(shape: &Shape, rank: usize) -> Result<()> {
    if shape.rank() >= rank {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "expected rank {rank} or more, got {shape}"
    )))
}

fn instance_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    let args = cx.vals()?;
    let shape = cx.shape_of(args[0]);
    at_least_rank(&shape, 3)?;
    let rest = shape[2..]
        .iter()
        .fold(Dim::constant(1), |n, d| n.product(d));
    let flat = cx
        .b()
        .reshape(args[0], [shape[0].clone(), shape[1].clone(), rest])?;
    let y = normalise_last(cx, flat, epsilon)?;
    let y = cx.b().reshape(y, shape.0)?;
    one(scaled(cx, y, args[1], args[2])?)
}

/// Scale and offset are per group before version 21, per channel since.
fn group_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let epsilon = cx.f("epsilon", 1e-5f32.into())?;
    stash_type(cx)?;
    let groups = Dim::constant(cx.i("num_groups", 0)?);
    let args = cx.vals()?;
    let shape = cx.shape_of(args[0]);
    at_least_rank(&shape, 2)?;
    let per_group = shape[1].exact_div(&groups);
    let per_group = per_group.ok_or_else(|| {
        Error::invalid(format!(
            "{} channels do not divide into {groups} groups",
            shape[1]
        ))
    })?;
    let rest = shape[2..].iter().fold(per_group, |n, d| n.product(d));
    let grouped = cx.b().reshape(args[0], [shape[0].clone(), groups, rest])?;
    let y = normalise_last(cx, grouped, epsilon)?;
    if cx.opset < 21 {
        let y = scaled(cx, y, args[1], args[2])?;
        return one(cx.b().reshape(y, shape.0)?);
    }
    let y = cx.b().reshape(y, shape.0)?;
    one(scaled(cx, y, args[1], args[2])?)
}

/// `x / |x|_p` along an axis; a norm of 0 gives 0.
fn lp_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let axis = axis_of(cx.i("axis", -1)?, cx.ty(0)?.rank())?;
    let p = cx.i("p", 2)?;
    let x = cx.val(0)?;
    let norm = match p {
        1 => {
            let size = cx.map(ScalarOp::Abs, &[x])?;
            cx.reduce(ReduceKind::Sum, size, &[axis], true)?
        }
        2 => {
            let squares = cx.map(ScalarOp::Mul, &[x, x])?;
            let sum = cx.reduce(ReduceKind::Sum, squares, &[axis], true)?;
            cx.map(ScalarOp::Sqrt, &[sum])?
        }
        _ => return Err(Error::invalid(format!("p must be 1 or 2, is {p}"))),
    };
    let dtype = cx.dtype_of(x);
    let zero = cx.b().scalar(dtype, 0.0);
    let empty = cx.map(ScalarOp::Eq, &[norm, zero])?;
    let q = cx.map(ScalarOp::Div, &[x, norm])?;
    one(cx.map(ScalarOp::Select, &[empty, zero, q])?)
}

/// `(x - mean) / (sqrt(mean(x^2) - mean^2) + 1e-9)`, the variance computed from the centred values.
fn mean_variance<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let axes = axes_of(&cx.ints("axes")?.unwrap_or(vec![0, 2, 3]), cx.ty(0)?.rank())?;
    let x = cx.val(0)?;
    let mean = cx.reduce(ReduceKind::Mean, x, &axes, true)?;
    let centred = cx.map(ScalarOp::Sub, &[x, mean])?;
    let squares = cx.map(ScalarOp::Mul, &[centred, centred])?;
    let var = cx.reduce(ReduceKind::Mean, squares, &axes, true)?;
    let std = cx.map(ScalarOp::Sqrt, &[var])?;
    let std = cx.with_real(ScalarOp::Add, std, 1e-9)?;
    one(cx.map(ScalarOp::Div, &[centred, std])?)
}

/// `x / (bias + alpha / size * sum of squares over size channels)^beta`; the sum is average pooling over channels.
fn local_response<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (alpha, beta, bias) = (
        cx.f("alpha", 1e-4f32.into())?,
        cx.f("beta", 0.75)?,
        cx.f("bias", 1.0)?,
    );
    let size = usize::try_from(cx.i("size", 0)?)
        .ok()
        .filter(|s| (1..=1 << 20).contains(s));
    let size = size.ok_or_else(|| Error::invalid("size is out of range"))?;
    let x = cx.val(0)?;
    let shape = cx.shape_of(x);
    at_least_rank(&shape, 2)?;
    let rest = shape[2..]
        .iter()
        .fold(Dim::constant(1), |n, d| n.product(d));
    let squares = cx.map(ScalarOp::Mul, &[x, x])?;
    let plane = cx.b().reshape(
        squares,
        [shape[0].clone(), Dim::constant(1), shape[1].clone(), rest],
    )?;
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
    let mean = cx.b().reshape(mean, shape.0)?;
    let t = cx.with_real(ScalarOp::Mul, mean, alpha)?;
    let t = cx.with_real(ScalarOp::Add, t, bias)?;
    let t = cx.with_real(ScalarOp::Pow, t, beta)?;
    one(cx.map(ScalarOp::Div, &[x, t])?)
}
