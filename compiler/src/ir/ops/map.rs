//! Element-wise ops.
//!
//! Gradients have the shape of the result; [`Vjp::give`] sums them over the broadcast axes of an operand.
//! Where a formula by the result is as good as one by the operand, the rule takes the result, so that the operand need
//! not be kept. Where a term does not count and may be infinite, its operand is replaced, not its value:
//! a second derivative would multiply the infinity by 0.

use super::Op;
use crate::error::{Error, Result};
use crate::ir::axes::Transposed;
use crate::ir::eval::{Call, run_program};
use crate::ir::gradient::Gradient::{self, Rule, Zero};
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, broadcast_shapes};
use crate::ir::scalar::ScalarOp::{self, *};
use crate::ir::types::Type;
use crate::ir::vecprog::VecProg;
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{infer, work};
use gristmill_runtime::{DType, Tensor};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

pub(super) fn map_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let Op::Map(s) = op else {
        return Err("not an element-wise op".into());
    };
    let dtypes: Vec<DType> = args.iter().map(|t| t.dtype).collect();
    let dtype = s.result_dtype(&dtypes)?;
    let mut shape = Vec::new();
    for t in args {
        shape = broadcast_shapes(&shape, &t.shape)?;
    }
    infer::one(dtype, shape)
}

pub(super) fn map_eval(c: &Call) -> Result<Vec<Tensor>> {
    let Op::Map(op) = c.op else {
        return Err(Error::internal("not an element-wise op"));
    };
    let dtypes: Vec<_> = c.inputs.iter().map(|t| t.dtype()).collect();
    run_program(&VecProg::of_op(*op, &dtypes), c.inputs, c.shape)
}

pub(super) fn map_work(s: &Sizes) -> Count {
    let flops = match s.op {
        Op::Map(op) => op.spec().flops.max(1),
        _ => 1,
    };
    work::count(WorkClass::Map, s.n_out().saturating_mul(u64::from(flops)))
}

pub(super) fn map_axes(t: &Transposed) -> Option<Op> {
    Some(t.op.clone())
}

/// Gradient of an element-wise op.
pub(super) fn map_gradient(op: ScalarOp) -> Gradient {
    match op {
        Sign | Floor | Ceil | Round | Trunc => Zero,
        Not | BitNot | IsNan | IsPosInf | IsNegInf => Zero,
        And | Or | Xor | BitAnd | BitOr | BitXor | Shl | Shr => Zero,
        Eq | Ne | Lt | Le | Gt | Ge => Zero,
        BitCast(_) => Gradient::None("the bits of a number have no derivative"),
        Cast(_) => Rule(cast),
        Neg | Abs | Sqrt | Rsqrt | Recip | Exp | Expm1 | Log | Log1p => Rule(unary),
        Sin | Cos | Tan | Asin | Acos | Atan => Rule(unary),
        Sinh | Cosh | Tanh | Asinh | Acosh | Atanh | Erf => Rule(unary),
        Sigmoid | Gelu | GeluTanh | Silu | Softplus | Softsign | Mish => Rule(unary),
        Relu | ThresholdedRelu { .. } | Shrink { .. } | ClampTo { .. } => Rule(gate),
        HardSwish | HardSigmoid { .. } | LeakyRelu { .. } => Rule(piecewise),
        Elu { .. } | Selu { .. } | Celu { .. } => Rule(piecewise),
        Add => Rule(add),
        Sub => Rule(sub),
        Mul => Rule(mul),
        Div => Rule(div),
        Rem => Rule(|v| remainder(v, Trunc)),
        Mod => Rule(|v| remainder(v, Floor)),
        Pow => Rule(pow),
        Min => Rule(|v| extremum(v, Lt)),
        Max => Rule(|v| extremum(v, Gt)),
        Atan2 => Rule(atan2),
        Prelu => Rule(prelu),
        Select => Rule(select),
        Clamp => Rule(clamp),
    }
}

fn scalar_op(v: &Vjp) -> Result<ScalarOp> {
    match v.op() {
        Op::Map(op) => Ok(op),
        _ => v.refuse("a rule of element-wise ops is used for another"),
    }
}

/// Cotangents of floats pass; integers and `bool` have none.
fn cast(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    let dtype = v.ty(v.x(0)).dtype;
    let back = v.cast(g, dtype)?;
    v.give(0, back)
}

/// Smooth ops of one operand: the cotangent times a factor, or divided by one.
fn unary(v: &mut Vjp) -> Result<()> {
    let (op, g) = (scalar_op(v)?, v.g()?);
    let (x, y) = (v.x(0), v.y());
    let gradient = match op {
        Neg => v.neg(g)?,
        Sqrt => {
            let doubled = v.times(y, 2.0)?;
            v.div(g, doubled)?
        }
        Log => v.div(g, x)?,
        Log1p | Atan | Atanh => {
            let divisor = divisor(v, op, x)?;
            v.div(g, divisor)?
        }
        _ => {
            let factor = factor(v, op, x, y)?;
            v.mul(g, factor)?
        }
    };
    v.give(0, gradient)
}

fn divisor(v: &mut Vjp, op: ScalarOp, x: ValueId) -> Result<ValueId> {
    if op == Log1p {
        return v.plus(x, 1.0);
    }
    let squared = v.square(x)?;
    match op {
        Atan => v.plus(squared, 1.0),
        _ => v.minus_from(1.0, squared),
    }
}

/// The derivative of an op at `x`, where it is `y`.
fn factor(v: &mut Vjp, op: ScalarOp, x: ValueId, y: ValueId) -> Result<ValueId> {
    match op {
        Abs => v.map(Sign, &[x]),
        Exp => Ok(y),
        Expm1 => v.plus(y, 1.0),
        Rsqrt => {
            let squared = v.square(y)?;
            let cubed = v.mul(squared, y)?;
            v.times(cubed, -0.5)
        }
        Recip => {
            let squared = v.square(y)?;
            v.neg(squared)
        }
        Sin | Cos | Tan | Asin | Acos => trigonometric(v, op, x, y),
        Sinh | Cosh | Tanh | Asinh | Acosh => hyperbolic(v, op, x, y),
        _ => activation(v, op, x, y),
    }
}

fn trigonometric(v: &mut Vjp, op: ScalarOp, x: ValueId, y: ValueId) -> Result<ValueId> {
    match op {
        Sin => v.map(Cos, &[x]),
        Cos => {
            let sine = v.map(Sin, &[x])?;
            v.neg(sine)
        }
        Tan => {
            let squared = v.square(y)?;
            v.plus(squared, 1.0)
        }
        _ => {
            let squared = v.square(x)?;
            let rest = v.minus_from(1.0, squared)?;
            let slope = v.map(Rsqrt, &[rest])?;
            if op == Acos { v.neg(slope) } else { Ok(slope) }
        }
    }
}

fn hyperbolic(v: &mut Vjp, op: ScalarOp, x: ValueId, y: ValueId) -> Result<ValueId> {
    match op {
        Sinh => v.map(Cosh, &[x]),
        Cosh => v.map(Sinh, &[x]),
        Tanh => one_minus_square(v, y),
        Asinh => {
            let squared = v.square(x)?;
            let sum = v.plus(squared, 1.0)?;
            v.map(Rsqrt, &[sum])
        }
        _ => {
            let (below, above) = (v.plus(x, -1.0)?, v.plus(x, 1.0)?);
            let product = v.mul(below, above)?;
            v.map(Rsqrt, &[product])
        }
    }
}

fn one_minus_square(v: &mut Vjp, y: ValueId) -> Result<ValueId> {
    let squared = v.square(y)?;
    v.minus_from(1.0, squared)
}

fn activation(v: &mut Vjp, op: ScalarOp, x: ValueId, y: ValueId) -> Result<ValueId> {
    match op {
        Erf => gaussian(v, x, -1.0, 2.0 / PI.sqrt()),
        Sigmoid => {
            let rest = v.minus_from(1.0, y)?;
            v.mul(y, rest)
        }
        Softplus => v.map(Sigmoid, &[x]),
        Softsign => {
            let magnitude = v.map(Abs, &[y])?;
            let rest = v.minus_from(1.0, magnitude)?;
            v.square(rest)
        }
        Silu => silu(v, x, y),
        Mish => mish(v, x),
        Gelu => gelu(v, x),
        GeluTanh => gelu_tanh(v, x),
        _ => v.refuse("the op is not in the table of derivatives"),
    }
}

/// `scale * exp(rate * x^2)`.
fn gaussian(v: &mut Vjp, x: ValueId, rate: f64, scale: f64) -> Result<ValueId> {
    let squared = v.square(x)?;
    let exponent = v.times(squared, rate)?;
    let bell = v.map(Exp, &[exponent])?;
    v.times(bell, scale)
}

/// `s + y (1 - s)` for `s = sigmoid(x)`.
fn silu(v: &mut Vjp, x: ValueId, y: ValueId) -> Result<ValueId> {
    let s = v.map(Sigmoid, &[x])?;
    let rest = v.minus_from(1.0, s)?;
    let bend = v.mul(y, rest)?;
    v.add(s, bend)
}

/// `t + x (1 - t^2) sigmoid(x)` for `t = tanh(softplus(x))`.
fn mish(v: &mut Vjp, x: ValueId) -> Result<ValueId> {
    let s = v.map(Sigmoid, &[x])?;
    let soft = v.map(Softplus, &[x])?;
    let t = v.map(Tanh, &[soft])?;
    let slope = one_minus_square(v, t)?;
    let bend = v.mul(slope, s)?;
    let bend = v.mul(x, bend)?;
    v.add(t, bend)
}

/// `Phi(x) + x phi(x)` for the normal distribution `Phi` and its density `phi`.
fn gelu(v: &mut Vjp, x: ValueId) -> Result<ValueId> {
    let scaled = v.times(x, FRAC_1_SQRT_2)?;
    let e = v.map(Erf, &[scaled])?;
    let e = v.plus(e, 1.0)?;
    let distribution = v.times(e, 0.5)?;
    let density = gaussian(v, x, -0.5, 1.0 / (2.0 * PI).sqrt())?;
    let bend = v.mul(x, density)?;
    v.add(distribution, bend)
}

/// `(1 + t)/2 + x/2 (1 - t^2) c (1 + 3 a x^2)` for `t = tanh(c x (1 + a x^2))`.
fn gelu_tanh(v: &mut Vjp, x: ValueId) -> Result<ValueId> {
    let (a, c) = (0.044715, (2.0 / PI).sqrt());
    let squared = v.square(x)?;
    let inner = v.times(squared, a)?;
    let inner = v.plus(inner, 1.0)?;
    let inner = v.mul(x, inner)?;
    let inner = v.times(inner, c)?;
    let t = v.map(Tanh, &[inner])?;
    let flat = v.plus(t, 1.0)?;
    let flat = v.times(flat, 0.5)?;
    let rate = v.times(squared, 3.0 * a)?;
    let rate = v.plus(rate, 1.0)?;
    let rate = v.times(rate, 0.5 * c)?;
    let slope = one_minus_square(v, t)?;
    let bend = v.mul(slope, rate)?;
    let bend = v.mul(x, bend)?;
    v.add(flat, bend)
}

/// Ops of slope 1 in one region and 0 elsewhere.
fn gate(v: &mut Vjp) -> Result<()> {
    let (op, g) = (scalar_op(v)?, v.g()?);
    let is_open = open_region(v, op)?;
    let gradient = v.keep(is_open, g)?;
    v.give(0, gradient)
}

fn open_region(v: &mut Vjp, op: ScalarOp) -> Result<ValueId> {
    let x = v.x(0);
    match op {
        Relu => v.with_number(Gt, v.y(), 0.0),
        ThresholdedRelu { alpha } => v.with_number(Gt, x, alpha.0),
        Shrink { lo, .. } => {
            let (low, high) = (v.with_number(Lt, x, lo.0)?, v.with_number(Gt, x, -lo.0)?);
            v.map(Or, &[low, high])
        }
        ClampTo { lo, hi } => {
            let (low, high) = (v.real(x, lo.0)?, v.real(x, hi.0)?);
            both(v, (Ge, x, low), (Le, x, high))
        }
        _ => v.refuse("the op is no gate"),
    }
}

/// Ops of one operand, defined by cases.
fn piecewise(v: &mut Vjp) -> Result<()> {
    let (op, g) = (scalar_op(v)?, v.g()?);
    let (x, y) = (v.x(0), v.y());
    let gradient = match op {
        HardSwish => hard_swish(v, x, g)?,
        HardSigmoid { alpha, .. } => {
            let scaled = v.times(g, alpha.0)?;
            let (zero, one) = (v.real(y, 0.0)?, v.real(y, 1.0)?);
            let inside = both(v, (Gt, y, zero), (Lt, y, one))?;
            v.keep(inside, scaled)?
        }
        LeakyRelu { alpha } => {
            let below = v.times(g, alpha.0)?;
            let is_above = v.with_number(Gt, x, 0.0)?;
            v.select(is_above, g, below)?
        }
        _ => exponential_unit(v, op, x, y, g)?,
    };
    v.give(0, gradient)
}

/// 0 up to -3, `g` from 3 on, `g (x/3 + 1/2)` in between.
fn hard_swish(v: &mut Vjp, x: ValueId, g: ValueId) -> Result<ValueId> {
    let slope = v.times(x, 1.0 / 3.0)?;
    let slope = v.plus(slope, 0.5)?;
    let middle = v.mul(g, slope)?;
    let is_low = v.with_number(Le, x, -3.0)?;
    let is_high = v.with_number(Ge, x, 3.0)?;
    let upper = v.select(is_high, g, middle)?;
    v.drop_where(is_low, upper)
}

/// By the result, in which no exponential of a large operand is left.
fn exponential_unit(
    v: &mut Vjp,
    op: ScalarOp,
    x: ValueId,
    y: ValueId,
    g: ValueId,
) -> Result<ValueId> {
    let (above, slope) = match op {
        Selu { alpha, gamma } => (v.times(g, gamma.0)?, v.plus(y, alpha.0 * gamma.0)?),
        Celu { alpha } => {
            let scaled = v.times(y, 1.0 / alpha.0)?;
            (g, v.plus(scaled, 1.0)?)
        }
        Elu { alpha } => (g, v.plus(y, alpha.0)?),
        _ => return v.refuse("the op is not an exponential unit"),
    };
    let below = v.mul(g, slope)?;
    let is_above = v.with_number(Gt, x, 0.0)?;
    v.select(is_above, above, below)
}

fn add(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    v.give(0, g)?;
    v.give(1, g)
}

fn sub(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    v.give(0, g)?;
    if v.needs(1) {
        let negative = v.neg(g)?;
        v.give(1, negative)?;
    }
    Ok(())
}

fn mul(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    for i in v.needed() {
        let product = v.mul(g, v.x(1 - i))?;
        v.give(i, product)?;
    }
    Ok(())
}

fn div(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    let quotient = v.div(g, v.x(1))?;
    v.give(0, quotient)?;
    if v.needs(1) {
        let product = v.mul(quotient, v.y())?;
        let negative = v.neg(product)?;
        v.give(1, negative)?;
    }
    Ok(())
}

/// `rounding(a / b)` says how often `b` was taken away.
fn remainder(v: &mut Vjp, rounding: ScalarOp) -> Result<()> {
    let g = v.g()?;
    v.give(0, g)?;
    if v.needs(1) {
        let quotient = v.div(v.x(0), v.x(1))?;
        let times = v.map(rounding, &[quotient])?;
        let product = v.mul(g, times)?;
        let negative = v.neg(product)?;
        v.give(1, negative)?;
    }
    Ok(())
}

fn pow(v: &mut Vjp) -> Result<()> {
    if v.needs(0) {
        pow_base(v)?;
    }
    if v.needs(1) {
        pow_exponent(v)?;
    }
    Ok(())
}

/// `g b a^(b - 1)`, and 0 where `b` is 0.
fn pow_base(v: &mut Vjp) -> Result<()> {
    let (g, a, b) = (v.g()?, v.x(0), v.x(1));
    let is_constant = v.with_number(Eq, b, 0.0)?;
    let safe = v.replace(is_constant, 1.0, b)?;
    let reduced = v.plus(safe, -1.0)?;
    let power = v.map(Pow, &[a, reduced])?;
    let slope = v.mul(b, power)?;
    let gradient = v.mul(g, slope)?;
    let gradient = v.drop_where(is_constant, gradient)?;
    v.give(0, gradient)
}

/// `g y ln a`, and 0 where `a` is 0 and `b` is not negative.
fn pow_exponent(v: &mut Vjp) -> Result<()> {
    let (g, a, b) = (v.g()?, v.x(0), v.x(1));
    let (no_base, is_up) = (v.with_number(Eq, a, 0.0)?, v.with_number(Ge, b, 0.0)?);
    let is_flat = v.map(And, &[no_base, is_up])?;
    let safe = v.replace(is_flat, 1.0, a)?;
    let logarithm = v.map(Log, &[safe])?;
    let slope = v.mul(v.y(), logarithm)?;
    let gradient = v.mul(g, slope)?;
    let gradient = v.drop_where(is_flat, gradient)?;
    v.give(1, gradient)
}

/// The winner gets `g`; equal operands get half of it each.
fn extremum(v: &mut Vjp, wins: ScalarOp) -> Result<()> {
    let g = v.g()?;
    let is_tie = v.map(Eq, &[v.x(0), v.x(1)])?;
    let half = v.times(g, 0.5)?;
    let shared = v.keep(is_tie, half)?;
    for i in v.needed() {
        let is_winner = v.map(wins, &[v.x(i), v.x(1 - i)])?;
        let gradient = v.select(is_winner, g, shared)?;
        v.give(i, gradient)?;
    }
    Ok(())
}

/// `g x / r^2` and `-g y / r^2`, 0 at the origin.
fn atan2(v: &mut Vjp) -> Result<()> {
    let (g, y, x) = (v.g()?, v.x(0), v.x(1));
    let (xx, yy) = (v.square(x)?, v.square(y)?);
    let norm = v.add(xx, yy)?;
    let is_origin = v.with_number(Eq, norm, 0.0)?;
    let norm = v.replace(is_origin, 1.0, norm)?;
    let share = v.div(g, norm)?;
    let along = v.mul(share, x)?;
    v.give(0, along)?;
    let across = v.mul(share, y)?;
    let across = v.neg(across)?;
    v.give(1, across)
}

fn prelu(v: &mut Vjp) -> Result<()> {
    let (g, x, slope) = (v.g()?, v.x(0), v.x(1));
    let is_above = v.with_number(Gt, x, 0.0)?;
    if v.needs(0) {
        let below = v.mul(g, slope)?;
        let gradient = v.select(is_above, g, below)?;
        v.give(0, gradient)?;
    }
    if v.needs(1) {
        let product = v.mul(g, x)?;
        let gradient = v.drop_where(is_above, product)?;
        v.give(1, gradient)?;
    }
    Ok(())
}

fn select(v: &mut Vjp) -> Result<()> {
    let (g, condition) = (v.g()?, v.x(0));
    if v.needs(1) {
        let gradient = v.keep(condition, g)?;
        v.give(1, gradient)?;
    }
    if v.needs(2) {
        let gradient = v.drop_where(condition, g)?;
        v.give(2, gradient)?;
    }
    Ok(())
}

/// `min(max(x, low), high)`: the borders belong to `x`, and `low` counts where it is not above `high`. One operand gets
/// the cotangent, whatever the order of the three.
fn clamp(v: &mut Vjp) -> Result<()> {
    let (g, x, low, high) = (v.g()?, v.x(0), v.x(1), v.x(2));
    if v.needs(0) {
        let inside = both(v, (Ge, x, low), (Le, x, high))?;
        let gradient = v.keep(inside, g)?;
        v.give(0, gradient)?;
    }
    if v.needs(1) {
        let is_low = both(v, (Lt, x, low), (Le, low, high))?;
        let gradient = v.keep(is_low, g)?;
        v.give(1, gradient)?;
    }
    if v.needs(2) {
        let (over, crossed) = (v.map(Gt, &[x, high])?, v.map(Gt, &[low, high])?);
        let is_high = v.map(Or, &[over, crossed])?;
        let gradient = v.keep(is_high, g)?;
        v.give(2, gradient)?;
    }
    Ok(())
}

type Comparison = (ScalarOp, ValueId, ValueId);

/// Two comparisons at once.
fn both(v: &mut Vjp, one: Comparison, other: Comparison) -> Result<ValueId> {
    let one = v.map(one.0, &[one.1, one.2])?;
    let other = v.map(other.0, &[other.1, other.2])?;
    v.map(And, &[one, other])
}
