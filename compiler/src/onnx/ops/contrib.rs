//! Operators of domain `com.microsoft` that ONNX Runtime's optimiser puts in place of common patterns.

use super::super::import::{Ctx, OpDef, Out, Outs, one};
use super::contract::matmul_of;
use crate::error::{Error, Result};
use crate::ir::{Op, Real, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Gelu", (1, 1), gelu),
    OpDef::new("BiasGelu", (2, 2), gelu),
    OpDef::new("FastGelu", (1, 2), fast_gelu),
    OpDef::new("QuickGelu", (1, 1), quick_gelu),
    OpDef::new("FusedMatMul", (2, 2), fused_matmul),
    OpDef::new("SkipLayerNormalization", (3, 5), skip_layer_norm),
    OpDef::new("SkipSimplifiedLayerNormalization", (3, 4), skip_rms_norm),
];

/// The sum of operand 0 and the optional operand 1.
fn biased(cx: &mut Ctx<'_, '_>) -> Result<ValueId> {
    let x = cx.val(0)?;
    match cx.opt(1)? {
        Some(bias) => cx.b().add_(x, bias),
        None => Ok(x),
    }
}

fn gelu<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let x = biased(cx)?;
    one(cx.map(ScalarOp::Gelu, &[x])?)
}

fn fast_gelu<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let x = biased(cx)?;
    one(cx.map(ScalarOp::GeluTanh, &[x])?)
}

/// `x * sigmoid(alpha x)`.
fn quick_gelu<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let alpha = cx.f("alpha", 1.702f32.into())?;
    let x = cx.val(0)?;
    let t = cx.with_real(ScalarOp::Mul, x, alpha)?;
    let s = cx.map(ScalarOp::Sigmoid, &[t])?;
    one(cx.b().mul(x, s)?)
}

/// `alpha a b`, the last two axes of either operand swapped where asked.
fn fused_matmul<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let alpha = cx.f("alpha", 1.0)?;
    let swaps = [cx.flag("transA", false)?, cx.flag("transB", false)?];
    if cx.flag("transBatchA", false)? || cx.flag("transBatchB", false)? {
        return Err(Error::unsupported(
            "transposed batch axes are not supported",
        ));
    }
    let mut args = [cx.val(0)?, cx.val(1)?];
    for (arg, _) in args.iter_mut().zip(swaps).filter(|(_, swap)| *swap) {
        let rank = cx.shape_of(*arg).rank();
        if rank >= 2 {
            let mut perm: Vec<usize> = (0..rank).collect();
            perm.swap(rank - 2, rank - 1);
            *arg = cx.b().transpose(*arg, &perm)?;
        }
    }
    let y = matmul_of(cx, args[0], args[1])?;
    one(if alpha == 1.0 {
        y
    } else {
        cx.with_real(ScalarOp::Mul, y, alpha)?
    })
}

/// The sum of operands 0 and 1 and, where given, the bias at operand `bias`.
fn skip_sum(cx: &mut Ctx<'_, '_>, bias: usize) -> Result<ValueId> {
    let (x, skip) = (cx.val(0)?, cx.val(1)?);
    let sum = cx.b().add_(x, skip)?;
    match cx.opt(bias)? {
        Some(b) => cx.b().add_(sum, b),
        None => Ok(sum),
    }
}

/// Results of a normalisation with a skip connection: `y`, mean and inverse deviation (in `f32`), and the sum.
fn skip_results<'m>(
    cx: &mut Ctx<'_, 'm>,
    y: ValueId,
    sum: ValueId,
    epsilon: f64,
    centre: bool,
) -> Result<Outs<'m>> {
    let axis = cx.shape_of(sum).rank() - 1;
    let wide = cx.b().cast(sum, DType::F32)?;
    let mean = cx.reduce(ReduceKind::Mean, wide, &[axis], true)?;
    let centred = if centre {
        cx.b().sub(wide, mean)?
    } else {
        wide
    };
    let squares = cx.b().mul(centred, centred)?;
    let var = cx.reduce(ReduceKind::Mean, squares, &[axis], true)?;
    let var = cx.with_real(ScalarOp::Add, var, epsilon)?;
    let inverse = cx.map(ScalarOp::Rsqrt, &[var])?;
    Ok([y, mean, inverse, sum]
        .into_iter()
        .map(Out::Value)
        .collect())
}

fn last_axis(cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<usize> {
    let rank = cx.shape_of(x).rank();
    rank.checked_sub(1)
        .ok_or_else(|| Error::invalid("expected rank 1 or more, got a scalar"))
}

fn skip_layer_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let epsilon = cx.f("epsilon", 1e-12f32.into())?;
    let sum = skip_sum(cx, 4)?;
    let (axis, dtype, gamma) = (last_axis(cx, sum)?, cx.dtype_of(sum), cx.val(2)?);
    let beta = match cx.opt(3)? {
        Some(b) => b,
        None => {
            let (zero, shape) = (cx.b().scalar(dtype, 0.0), cx.shape_of(gamma));
            cx.b().broadcast(zero, shape.0)?
        }
    };
    let y = cx.add(
        Op::LayerNorm {
            axis,
            epsilon: Real(epsilon),
        },
        &[sum, gamma, beta],
    )?;
    skip_results(cx, y, sum, epsilon, true)
}

fn skip_rms_norm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let epsilon = cx.f("epsilon", 1e-12f32.into())?;
    let sum = skip_sum(cx, 3)?;
    let (axis, gamma) = (last_axis(cx, sum)?, cx.val(2)?);
    let y = cx.add(
        Op::RmsNorm {
            axis,
            epsilon: Real(epsilon),
        },
        &[sum, gamma],
    )?;
    skip_results(cx, y, sum, epsilon, false)
}
