//! Operators of domain `com.microsoft` that ONNX Runtime's optimiser puts in place of common
//! patterns.

use super::super::import::{Ctx, OpDef, Out, Outs, moved_axis, one};
use super::contract::{biased_conv, matmul_of};
use super::norm::filled;
use super::recurrent::dynamic_quantize_lstm;
use crate::error::{Error, Result};
use crate::ir::{Op, Real, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Gelu", (1, 1), gelu),
    OpDef::new("BiasGelu", (2, 2), gelu),
    OpDef::new("FastGelu", (1, 2), fast_gelu),
    OpDef::new("QuickGelu", (1, 1), quick_gelu),
    OpDef::new("FusedMatMul", (2, 2), fused_matmul),
    OpDef::new("FusedConv", (2, 4), fused_conv),
    OpDef::new("DynamicQuantizeLSTM", (12, 12), dynamic_quantize_lstm),
    OpDef::new("SkipLayerNormalization", (3, 5), skip_layer_norm),
    OpDef::new("SkipSimplifiedLayerNormalization", (3, 4), skip_rms_norm),
];

/// The sum of operand 0 and the optional operand 1.
fn biased(cx: &mut Ctx) -> Result<ValueId> {
    let x = cx.val(0)?;
    match cx.opt(1)? {
        Some(bias) => cx.add_(x, bias),
        None => Ok(x),
    }
}

fn gelu(cx: &mut Ctx) -> Result<Outs> {
    let x = biased(cx)?;
    one(cx.map(ScalarOp::Gelu, &[x])?)
}

fn fast_gelu(cx: &mut Ctx) -> Result<Outs> {
    let x = biased(cx)?;
    one(cx.map(ScalarOp::GeluTanh, &[x])?)
}

/// `x * sigmoid(alpha x)`.
fn quick_gelu(cx: &mut Ctx) -> Result<Outs> {
    let alpha = cx.f("alpha", 1.702f32.into())?;
    let x = cx.val(0)?;
    let t = cx.mul_real(x, alpha)?;
    let s = cx.sigmoid(t)?;
    one(cx.mul(x, s)?)
}

/// `alpha a b`, the last two axes of either operand swapped where asked.
fn fused_matmul(cx: &mut Ctx) -> Result<Outs> {
    let alpha = cx.f("alpha", 1.0)?;
    if cx.flag("transBatchA", false)? || cx.flag("transBatchB", false)? {
        return Err(Error::unsupported(
            "transposed batch axes are not supported",
        ));
    }
    let a = swapped(cx, 0, "transA")?;
    let b = swapped(cx, 1, "transB")?;
    let y = matmul_of(cx, a, b)?;
    one(match alpha {
        1.0 => y,
        _ => cx.mul_real(y, alpha)?,
    })
}

/// Operand `i`, its last two axes swapped when the attribute says so.
fn swapped(cx: &mut Ctx, i: usize, attribute: &'static str) -> Result<ValueId> {
    let swap = cx.flag(attribute, false)?;
    let x = cx.val(i)?;
    let rank = cx.shape_of(x).rank();
    if !swap || rank < 2 {
        return Ok(x);
    }
    cx.transpose(x, &moved_axis(rank, rank - 2, rank - 1))
}

/// A convolution with a bias, to which operand 3 is added where it is given, and an activation.
fn fused_conv(cx: &mut Ctx) -> Result<Outs> {
    let mut y = biased_conv(cx)?;
    if let Some(addend) = cx.opt(3)? {
        let (shape, given) = (cx.shape_of(y), cx.shape_of(addend));
        if given != shape {
            let message =
                format!("operand 3 is {given}, expected the shape of the result, {shape}");
            return Err(Error::invalid(message));
        }
        y = cx.add_(y, addend)?;
    }
    one(match activation(cx)? {
        Some(op) => cx.map(op, &[y])?,
        None => y,
    })
}

/// The activation that the attributes `activation` and `activation_params` say.
fn activation(cx: &mut Ctx) -> Result<Option<ScalarOp>> {
    if cx.s("activation", "")?.is_empty() {
        cx.ignore(&["activation_params"]);
        return Ok(None);
    }
    let known = [
        ("Relu", 0),
        ("Tanh", 0),
        ("Sigmoid", 0),
        ("LeakyRelu", 1),
        ("Clip", 2),
        ("HardSigmoid", 2),
    ];
    let name = cx.name("activation", "", &known.map(|(name, _)| name))?;
    let n_params = known.iter().find(|(known, _)| *known == name);
    let n_params = n_params.expect("the name is one of the choices").1;
    let params = cx.floats("activation_params")?.unwrap_or_default();
    let n = params.len();
    if n != n_params {
        let message = format!("activation {name:?} takes {n_params} activation_params, got {n}");
        return Err(Error::invalid(message));
    }
    let [a, b] = [0, 1].map(|i| Real(params.get(i).copied().unwrap_or_default()));
    Ok(Some(match name {
        "Relu" => ScalarOp::Relu,
        "Tanh" => ScalarOp::Tanh,
        "Sigmoid" => ScalarOp::Sigmoid,
        "LeakyRelu" => ScalarOp::LeakyRelu { alpha: a },
        "Clip" => ScalarOp::ClampTo { lo: a, hi: b },
        _ => ScalarOp::HardSigmoid { alpha: a, beta: b },
    }))
}

/// The sum of operands 0 and 1 and, where given, the bias at operand `bias`.
fn skip_sum(cx: &mut Ctx, bias: usize) -> Result<ValueId> {
    let [x, skip] = cx.first()?;
    let sum = cx.add_(x, skip)?;
    match cx.opt(bias)? {
        Some(b) => cx.add_(sum, b),
        None => Ok(sum),
    }
}

/// Results of a normalisation with a skip connection: `y`, mean and inverse deviation (in `f32`),
/// and the sum.
fn skip_results(
    cx: &mut Ctx,
    y: ValueId,
    sum: ValueId,
    epsilon: f64,
    centre: bool,
) -> Result<Outs> {
    let axis = cx.shape_of(sum).rank() - 1;
    let wide = cx.cast(sum, DType::F32)?;
    let mean = cx.reduce(ReduceKind::Mean, wide, &[axis], true)?;
    let centred = if centre { cx.sub(wide, mean)? } else { wide };
    let squares = cx.mul(centred, centred)?;
    let var = cx.reduce(ReduceKind::Mean, squares, &[axis], true)?;
    let var = cx.add_real(var, epsilon)?;
    let inverse = cx.map(ScalarOp::Rsqrt, &[var])?;
    Ok([y, mean, inverse, sum]
        .into_iter()
        .map(Out::Value)
        .collect())
}

fn last_axis(cx: &mut Ctx, x: ValueId) -> Result<usize> {
    let rank = cx.shape_of(x).rank();
    rank.checked_sub(1)
        .ok_or_else(|| Error::invalid("expected rank 1 or more, got a scalar"))
}

fn skip_layer_norm(cx: &mut Ctx) -> Result<Outs> {
    let epsilon = cx.f("epsilon", 1e-12f32.into())?;
    let sum = skip_sum(cx, 4)?;
    let (axis, dtype, gamma) = (last_axis(cx, sum)?, cx.dtype_of(sum), cx.val(2)?);
    let beta = match cx.opt(3)? {
        Some(b) => b,
        None => {
            let shape = cx.shape_of(gamma);
            filled(cx, dtype, 0.0, &shape)?
        }
    };
    let op = Op::LayerNorm {
        axis,
        epsilon: Real(epsilon),
    };
    let y = cx.add(op, &[sum, gamma, beta])?;
    skip_results(cx, y, sum, epsilon, true)
}

fn skip_rms_norm(cx: &mut Ctx) -> Result<Outs> {
    let epsilon = cx.f("epsilon", 1e-12f32.into())?;
    let sum = skip_sum(cx, 3)?;
    let op = Op::RmsNorm {
        axis: last_axis(cx, sum)?,
        epsilon: Real(epsilon),
    };
    let gamma = cx.val(2)?;
    let y = cx.add(op, &[sum, gamma])?;
    skip_results(cx, y, sum, epsilon, false)
}
