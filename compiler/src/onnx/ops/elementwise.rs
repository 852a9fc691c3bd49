//! Element-wise operators: arithmetic, comparison, logic, activations, casts.

use super::super::import::{Ctx, OpDef, Out, Outs, axis_of, one};
use super::super::tensor::dtype_of;
use super::MANY;
use crate::error::{Error, Result};
use crate::ir::{Dim, Real, ScalarOp, Shape, ValueId};
use gristmill_runtime::{DType, Tensor};

macro_rules! maps {
    ($($name:literal $arity:literal $op:expr;)*) => {
        /// Operators without attributes that are one scalar op.
        const PLAIN: &[(&str, ScalarOp)] = &[$(($name, $op)),*];
        const PLAIN_DEFS: &[OpDef] = &[$(OpDef::new($name, ($arity, $arity), plain)),*];
    };
}

maps! {
    "Neg" 1 ScalarOp::Neg;
    "Abs" 1 ScalarOp::Abs;
    "Sign" 1 ScalarOp::Sign;
    "Floor" 1 ScalarOp::Floor;
    "Ceil" 1 ScalarOp::Ceil;
    "Round" 1 ScalarOp::Round;
    "Sqrt" 1 ScalarOp::Sqrt;
    "Reciprocal" 1 ScalarOp::Recip;
    "Exp" 1 ScalarOp::Exp;
    "Log" 1 ScalarOp::Log;
    "Sin" 1 ScalarOp::Sin;
    "Cos" 1 ScalarOp::Cos;
    "Tan" 1 ScalarOp::Tan;
    "Asin" 1 ScalarOp::Asin;
    "Acos" 1 ScalarOp::Acos;
    "Atan" 1 ScalarOp::Atan;
    "Sinh" 1 ScalarOp::Sinh;
    "Cosh" 1 ScalarOp::Cosh;
    "Tanh" 1 ScalarOp::Tanh;
    "Asinh" 1 ScalarOp::Asinh;
    "Acosh" 1 ScalarOp::Acosh;
    "Atanh" 1 ScalarOp::Atanh;
    "Erf" 1 ScalarOp::Erf;
    "Not" 1 ScalarOp::Not;
    "BitwiseNot" 1 ScalarOp::BitNot;
    "IsNaN" 1 ScalarOp::IsNan;
    "Relu" 1 ScalarOp::Relu;
    "Sigmoid" 1 ScalarOp::Sigmoid;
    "Softplus" 1 ScalarOp::Softplus;
    "Softsign" 1 ScalarOp::Softsign;
    "Mish" 1 ScalarOp::Mish;
    "HardSwish" 1 ScalarOp::HardSwish;
    "Add" 2 ScalarOp::Add;
    "Sub" 2 ScalarOp::Sub;
    "Mul" 2 ScalarOp::Mul;
    "Div" 2 ScalarOp::Div;
    "And" 2 ScalarOp::And;
    "Or" 2 ScalarOp::Or;
    "Xor" 2 ScalarOp::Xor;
    "BitwiseAnd" 2 ScalarOp::BitAnd;
    "BitwiseOr" 2 ScalarOp::BitOr;
    "BitwiseXor" 2 ScalarOp::BitXor;
    "Equal" 2 ScalarOp::Eq;
    "Less" 2 ScalarOp::Lt;
    "LessOrEqual" 2 ScalarOp::Le;
    "Greater" 2 ScalarOp::Gt;
    "GreaterOrEqual" 2 ScalarOp::Ge;
}

/// Operators without attributes that are one scalar op.
pub(super) const PLAIN_OPS: &[OpDef] = PLAIN_DEFS;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Where", (3, 3), select),
    OpDef::new("Max", (1, MANY), max),
    OpDef::new("Min", (1, MANY), min),
    OpDef::new("Mean", (1, MANY), mean),
    OpDef::new("Pow", (2, 2), pow),
    OpDef::new("Mod", (2, 2), modulo),
    OpDef::new("BitShift", (2, 2), shift),
    OpDef::new("IsInf", (1, 1), is_inf),
    OpDef::new("Cast", (1, 1), cast),
    OpDef::new("CastLike", (2, 2), cast_like),
    OpDef::new("BitCast", (1, 1), bit_cast),
    OpDef::new("Clip", (1, 3), clip),
    OpDef::new("PRelu", (2, 2), prelu),
    OpDef::new("LeakyRelu", (1, 1), leaky_relu),
    OpDef::new("ThresholdedRelu", (1, 1), thresholded_relu),
    OpDef::new("Elu", (1, 1), elu),
    OpDef::new("Selu", (1, 1), selu),
    OpDef::new("Celu", (1, 1), celu),
    OpDef::new("HardSigmoid", (1, 1), hard_sigmoid),
    OpDef::new("Shrink", (1, 1), shrink),
    OpDef::new("Gelu", (1, 1), gelu),
    OpDef::new("Swish", (1, 1), swish),
    OpDef::new("SwiGLU", (2, 2), swiglu),
];

fn plain(cx: &mut Ctx) -> Result<Outs> {
    let name = cx.node.op_type.as_str();
    let op = PLAIN
        .iter()
        .find(|(n, _)| *n == name)
        .expect("the handler is used for listed operators only")
        .1;
    let mut args = cx.vals()?;
    if cx.opset < 7 && args.len() == 2 {
        args[1] = aligned(cx, args[0], args[1])?;
    }
    one(cx.map(op, &args)?)
}

/// Before version 7: with `broadcast`, the axes of `y` are those of `x` from `axis` on (default:
/// the last ones).
fn aligned(cx: &mut Ctx, x: ValueId, y: ValueId) -> Result<ValueId> {
    let axis = cx.opt_i("axis")?;
    let (from, mut dims) = (cx.shape_of(x), cx.shape_of(y).0);
    if !cx.flag("broadcast", false)? {
        return match from.0 == dims {
            true => Ok(y),
            false => Err(Error::invalid(format!(
                "shapes {from} and {} differ without broadcast",
                Shape(dims)
            ))),
        };
    }
    let Some(axis) = axis else { return Ok(y) };
    let axis = axis_of(axis, from.rank())?;
    let trailing = from.rank().saturating_sub(axis + dims.len());
    dims.extend(vec![Dim::constant(1); trailing]);
    cx.reshape(y, dims)
}

/// An associative op over any number of operands.
pub(super) fn variadic(cx: &mut Ctx, op: ScalarOp) -> Result<Outs> {
    if cx.n_inputs() == 1 {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let args = cx.vals()?;
    let mut acc = args[0];
    for &a in &args[1..] {
        acc = cx.map(op, &[acc, a])?;
    }
    one(acc)
}

fn max(cx: &mut Ctx) -> Result<Outs> {
    variadic(cx, ScalarOp::Max)
}

fn min(cx: &mut Ctx) -> Result<Outs> {
    variadic(cx, ScalarOp::Min)
}

fn mean(cx: &mut Ctx) -> Result<Outs> {
    let n = cx.n_inputs();
    let args = cx.vals()?;
    let mut acc = args[0];
    for &a in &args[1..] {
        acc = cx.add_(acc, a)?;
    }
    one(cx.with_real(ScalarOp::Div, acc, n as f64)?)
}

fn select(cx: &mut Ctx) -> Result<Outs> {
    let args = cx.vals()?;
    one(cx.map(ScalarOp::Select, &args)?)
}

/// The result has the dtype of the base; mixed dtypes compute in a dtype that holds both.
fn pow(cx: &mut Ctx) -> Result<Outs> {
    let [x, mut y] = cx.first()?;
    if cx.opset < 7 {
        y = aligned(cx, x, y)?;
    }
    let (dx, dy) = (cx.dtype_of(x), cx.dtype_of(y));
    if dx == dy {
        return one(cx.map(ScalarOp::Pow, &[x, y])?);
    }
    let wide = power_dtype(dx, dy);
    let (x, y) = (cx.cast(x, wide)?, cx.cast(y, wide)?);
    let r = cx.map(ScalarOp::Pow, &[x, y])?;
    one(cx.cast(r, dx)?)
}

/// A dtype that holds a base and an exponent of different dtypes.
fn power_dtype(base: DType, exponent: DType) -> DType {
    let is_wide = base == DType::F64 || exponent == DType::F64;
    match (base.is_float(), exponent.is_float()) {
        (true, false) => base,
        (false, false) => DType::I64,
        (false, true) if base.size_bytes() > 2 || is_wide => DType::F64,
        (true, true) if is_wide => DType::F64,
        _ => DType::F32,
    }
}

fn modulo(cx: &mut Ctx) -> Result<Outs> {
    let fmod = cx.flag("fmod", false)?;
    let args = cx.vals()?;
    if !fmod && cx.opset < 28 && cx.dtype_of(args[0]).is_float() {
        return Err(Error::invalid("floating-point operands need fmod = 1"));
    }
    one(cx.map(if fmod { ScalarOp::Rem } else { ScalarOp::Mod }, &args)?)
}

fn shift(cx: &mut Ctx) -> Result<Outs> {
    let directions = &[("LEFT", ScalarOp::Shl), ("RIGHT", ScalarOp::Shr)];
    let op = cx.choice("direction", "", directions)?;
    let args = cx.vals()?;
    one(cx.map(op, &args)?)
}

fn is_inf(cx: &mut Ctx) -> Result<Outs> {
    let below = cx.flag("detect_negative", true)?;
    let above = cx.flag("detect_positive", true)?;
    let x = cx.val(0)?;
    one(match (below, above) {
        (true, true) => {
            let x = cx.abs(x)?;
            cx.map(ScalarOp::IsPosInf, &[x])?
        }
        (true, false) => cx.map(ScalarOp::IsNegInf, &[x])?,
        (false, true) => cx.map(ScalarOp::IsPosInf, &[x])?,
        (false, false) => {
            let shape = cx.shape_of(x);
            let no = cx.scalar(DType::Bool, 0.0);
            cx.broadcast(no, shape.0)?
        }
    })
}

fn convert(cx: &mut Ctx, to: DType) -> Result<Outs> {
    cx.ignore(&["round_mode"]); // For the power-of-two scales of float8e8m0, which are refused.
    let saturates = cx.i("saturate", 1)? != 0;
    if cx.ty(0)?.dtype == to {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let x = cx.val(0)?;
    one(narrowed(cx, x, to, saturates)?)
}

/// `x` as `to`. Casts to floats of 8 bits saturate; where the model asks for it, elements that
/// would have to are infinite or, in formats without infinities, NaN.
pub(super) fn narrowed(cx: &mut Ctx, x: ValueId, to: DType, saturates: bool) -> Result<ValueId> {
    let mut y = cx.cast(x, to)?;
    let Some(format) = to.float8().filter(|_| !saturates) else {
        return Ok(y);
    };
    let (limit, inclusive) = format.overflow();
    let [above, below] = match inclusive {
        true => [ScalarOp::Ge, ScalarOp::Le],
        false => [ScalarOp::Gt, ScalarOp::Lt],
    };
    let [plus, minus] = match format.infinity {
        Some(code) => [code, code | 0x80],
        None => [format.nan; 2],
    };
    let wide = match cx.dtype_of(x) {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let x = cx.cast(x, wide)?;
    for (op, limit, code) in [(above, limit, plus), (below, -limit, minus)] {
        let is_beyond = cx.with_real(op, x, limit)?;
        let special = Tensor::from_bytes(to, &[], &[code])?;
        let special = cx.b().constant(special);
        y = cx.select(is_beyond, special, y)?;
    }
    Ok(y)
}

fn cast(cx: &mut Ctx) -> Result<Outs> {
    let to = dtype_of(cx.i("to", 0)? as i32)?;
    convert(cx, to)
}

fn cast_like(cx: &mut Ctx) -> Result<Outs> {
    let to = cx.ty(1)?.dtype;
    convert(cx, to)
}

fn bit_cast(cx: &mut Ctx) -> Result<Outs> {
    let to = dtype_of(cx.i("to", 0)? as i32)?;
    if cx.ty(0)?.dtype == to {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let x = cx.val(0)?;
    one(cx.map(ScalarOp::BitCast(to), &[x])?)
}

/// Limits are attributes before version 11, operands since.
fn clip(cx: &mut Ctx) -> Result<Outs> {
    let x = cx.val(0)?;
    let (lo, hi) = if cx.opset < 11 {
        (cx.opt_f("min")?, cx.opt_f("max")?)
    } else if cx.dtype_of(x).is_float() && is_constant(cx, 1) && is_constant(cx, 2) {
        (constant_limit(cx, 1)?, constant_limit(cx, 2)?)
    } else {
        return clip_values(cx, x);
    };
    one(match (lo.map(Real), hi.map(Real)) {
        (None, None) => return Ok(vec![Out::Same(cx.v(0)?)]),
        (Some(Real(0.0)), None) => cx.map(ScalarOp::Relu, &[x])?,
        (Some(lo), None) => cx.with_real(ScalarOp::Max, x, lo.0)?,
        (None, Some(hi)) => cx.with_real(ScalarOp::Min, x, hi.0)?,
        (Some(lo), Some(hi)) => cx.map(ScalarOp::ClampTo { lo, hi }, &[x])?,
    })
}

/// True for an operand that is a constant or absent.
fn is_constant(cx: &mut Ctx, i: usize) -> bool {
    !cx.has(i) || cx.constant(i).is_ok_and(|c| c.is_some())
}

fn constant_limit(cx: &mut Ctx, i: usize) -> Result<Option<f64>> {
    cx.has(i).then(|| cx.real_in(i, 0.0)).transpose()
}

fn clip_values(cx: &mut Ctx, x: ValueId) -> Result<Outs> {
    let mut r = x;
    for (i, op) in [(1, ScalarOp::Max), (2, ScalarOp::Min)] {
        if let Some(limit) = cx.opt(i)? {
            let limit = cx.reshape(limit, Vec::<Dim>::new())?;
            r = cx.map(op, &[r, limit])?;
        }
    }
    one(r)
}

/// Before version 7 the slope is one number or one per channel; since, it broadcasts.
fn prelu(cx: &mut Ctx) -> Result<Outs> {
    let [x, mut slope] = cx.first()?;
    if cx.opset < 7 && !cx.shape_of(slope).n_elements().is(1) {
        let rank = cx.shape_of(x).rank();
        slope = super::norm::per_channel(cx, slope, rank)?;
    }
    one(cx.map(ScalarOp::Prelu, &[x, slope])?)
}

fn with_alpha(cx: &mut Ctx, default: f64, op: fn(Real) -> ScalarOp) -> Result<Outs> {
    let alpha = cx.f("alpha", default)?;
    let x = cx.val(0)?;
    one(cx.map(op(Real(alpha)), &[x])?)
}

fn leaky_relu(cx: &mut Ctx) -> Result<Outs> {
    with_alpha(cx, 0.01f32.into(), |alpha| ScalarOp::LeakyRelu { alpha })
}

fn thresholded_relu(cx: &mut Ctx) -> Result<Outs> {
    with_alpha(cx, 1.0, |alpha| ScalarOp::ThresholdedRelu { alpha })
}

fn elu(cx: &mut Ctx) -> Result<Outs> {
    with_alpha(cx, 1.0, |alpha| ScalarOp::Elu { alpha })
}

fn celu(cx: &mut Ctx) -> Result<Outs> {
    with_alpha(cx, 1.0, |alpha| ScalarOp::Celu { alpha })
}

fn selu(cx: &mut Ctx) -> Result<Outs> {
    let alpha = cx.f("alpha", f64::from(1.673_263_2_f32))?;
    let gamma = cx.f("gamma", f64::from(1.050_701_f32))?;
    let x = cx.val(0)?;
    one(cx.map(
        ScalarOp::Selu {
            alpha: Real(alpha),
            gamma: Real(gamma),
        },
        &[x],
    )?)
}

fn hard_sigmoid(cx: &mut Ctx) -> Result<Outs> {
    let (alpha, beta) = (cx.f("alpha", 0.2f32.into())?, cx.f("beta", 0.5)?);
    let x = cx.val(0)?;
    one(cx.map(
        ScalarOp::HardSigmoid {
            alpha: Real(alpha),
            beta: Real(beta),
        },
        &[x],
    )?)
}

/// `x + bias` below `-lambd`, `x - bias` above `lambd`, 0 in between.
fn shrink(cx: &mut Ctx) -> Result<Outs> {
    let (bias, lambd) = (cx.f("bias", 0.0)?, cx.f("lambd", 0.5)?);
    let x = cx.val(0)?;
    let dtype = cx.dtype_of(x);
    let wide = if dtype.is_float() {
        x
    } else {
        cx.cast(x, DType::F64)?
    };
    let r = cx.map(
        ScalarOp::Shrink {
            lo: Real(-lambd),
            hi: Real(bias),
        },
        &[wide],
    )?;
    one(cx.cast(r, dtype)?)
}

fn gelu(cx: &mut Ctx) -> Result<Outs> {
    let forms = &[("none", ScalarOp::Gelu), ("tanh", ScalarOp::GeluTanh)];
    let op = cx.choice("approximate", "none", forms)?;
    let x = cx.val(0)?;
    one(cx.map(op, &[x])?)
}

/// `x * sigmoid(alpha x)`.
fn swish(cx: &mut Ctx) -> Result<Outs> {
    one(swish_of(cx)?)
}

fn swish_of(cx: &mut Ctx) -> Result<ValueId> {
    let alpha = cx.f("alpha", 1.0)?;
    let x = cx.val(0)?;
    if alpha == 1.0 {
        return cx.map(ScalarOp::Silu, &[x]);
    }
    let t = cx.mul_real(x, alpha)?;
    let s = cx.sigmoid(t)?;
    cx.mul(x, s)
}

/// `swish(a) * b` (Shazeer, arXiv:2002.05202).
fn swiglu(cx: &mut Ctx) -> Result<Outs> {
    let (gate, x) = (swish_of(cx)?, cx.val(1)?);
    one(cx.mul(gate, x)?)
}
