//! Algebra on element-wise ops, casts and selects.

use super::{as_shape_of, either, map_like, rules};
use crate::ir::{Op, Real, ReduceKind, ScalarOp, ScalarOp as S};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{Miss, Miss::NoMatch, RuleResult, Terms, are_units, rejected};
use egg::Id;
use gristmill_runtime::DType;

rules! {
    /// `x * 1 -> x`
    "mul-one" Bits at Op::Map(S::Mul) => |t, r| neutral(t, r, 1.0);
    /// `x / 1 -> x`
    "div-one" Bits at Op::Map(S::Div) => |t, r| neutral(t, r, 1.0);
    /// `x ^ 1 -> x`
    "pow-one" Bits at Op::Map(S::Pow) => |t, r| neutral(t, r, 1.0);
    /// `x - 0 -> x`
    "sub-zero" Bits at Op::Map(S::Sub) => |t, r| neutral(t, r, 0.0);
    /// `x + 0 -> x`; a zero keeps its sign instead of becoming `+0`.
    "add-zero" Value at Op::Map(S::Add) => |t, r| neutral(t, r, 0.0).or_else(|_| neutral(t, r, -0.0));
    /// `x * -1 -> -x`
    "mul-minus-one" Bits at Op::Map(S::Mul) => mul_minus_one;
    /// `-(-x) -> x`, `!(!x) -> x`, `~(~x) -> x`
    "double-negation" Bits at Op::Map(S::Neg | S::Not | S::BitNot) => double_negation;
    /// `f(f(x)) -> f(x)` for abs, relu, rounding, sign.
    "idempotent" Bits at Op::Map(S::Abs | S::Relu | S::Floor | S::Ceil | S::Round | S::Trunc | S::Sign) => idempotent;
    /// `|-x| -> |x|`
    "abs-neg" Bits at Op::Map(S::Abs) => abs_neg;
    /// `max(x, x) -> x`, so for min, and, or.
    "same-operands" Bits at Op::Map(S::Max | S::Min | S::And | S::Or | S::BitAnd | S::BitOr) => same_operands;
    /// `a - (-b) -> a + b`
    "sub-neg" Bits at Op::Map(S::Sub) => sub_neg;
    /// `a + (-b) -> a - b`
    "add-neg" Bits at Op::Map(S::Add) => add_neg;
    /// `x - c -> x + (-c)` for a constant; one form for `merge-offsets` and `scale-past-bias`.
    "sub-constant" Bits at Op::Map(S::Sub) => sub_constant;
    /// `x / c -> x * (1 / c)` when `c` is a power of two.
    "div-power-of-two" Bits at Op::Map(S::Div) => div_power_of_two;
    /// `x / c -> x * (1 / c)` for a constant whose reciprocal is a normal number.
    "div-constant" Rounding at Op::Map(S::Div) => div_constant;
    /// `(x * a) * b -> x * (a b)` for constant numbers with a normal product.
    "mul-mul-constant" Rounding at Op::Map(S::Mul) => mul_mul_constant;
    /// `x ^ 2 -> x * x`, `x ^ 3 -> x * x * x`.
    "pow-integer" Rounding at Op::Map(S::Pow) => pow_integer;
    /// `x ^ 0.5 -> sqrt(x)`, `x ^ -0.5 -> rsqrt(x)` where `x` is known not to be negative: they differ at minus infinity and minus zero.
    "pow-half" Rounding at Op::Map(S::Pow) => pow_half;
    /// `1 / x -> recip(x)`, `x ^ -1 -> recip(x)`
    "recip" Bits at Op::Map(S::Div | S::Pow) => recip;
    /// `recip(sqrt(x)) -> rsqrt(x)`
    "rsqrt" Bits at Op::Map(S::Recip) => rsqrt;
    /// `a / sqrt(b) -> a * rsqrt(b)`
    "div-sqrt" Rounding at Op::Map(S::Div) => div_sqrt;
    /// `max(x, 0) -> relu(x)`
    "relu" Bits at Op::Map(S::Max) => relu;
    /// `min(max(x, lo), hi) -> clamp_to(x)`, so for relu and clamp with constant limits, in either order.
    "clamp" Bits at Op::Map(S::Min | S::Max | S::Clamp | S::Relu) => clamp;
    /// Clamping to `[0, inf] -> relu`
    "clamp-relu" Bits at Op::Map(S::ClampTo { .. }) => clamp_relu;
    /// `select(true, a, b) -> a`, `select(false, a, b) -> b`, `select(c, a, a) -> a`
    "select-known" Bits at Op::Map(S::Select) => select_known;
    /// `select(!c, a, b) -> select(c, b, a)`
    "select-not" Bits at Op::Map(S::Select) => select_not;
    /// A cast to the dtype that is there.
    "cast-same" Bits at Op::Map(S::Cast(_)) => cast_same;
    /// Two casts, the first of which loses nothing.
    "cast-cast" Bits at Op::Map(S::Cast(_)) => cast_cast;
    /// The bits of a dtype as the dtype that is there.
    "bit-cast-same" Bits at Op::Map(S::BitCast(_)) => cast_same;
    /// Two bit casts; `bool` between them would lose bits.
    "bit-cast-bit-cast" Bits at Op::Map(S::BitCast(_)) => bit_cast_bit_cast;
    /// `sum(x) * (1 / n) -> mean(x)` where `n` elements are summed; so for `sum(x) / n`.
    "mean" Rounding at Op::Map(S::Mul | S::Div) => mean;
    /// A reduction of no axis, or of axes of extent 1, is a reshape. A sum's zero keeps its sign.
    "reduce-nothing" Value at Op::Reduce { .. } => reduce_nothing;
    /// A reduction of a reduction of the same kind: one over both sets of axes.
    "reduce-reduce" Rounding at Op::Reduce { .. } => reduce_reduce;
}

/// The operand other than the one that is `value` everywhere.
fn neutral(t: &mut Terms, r: &Root, value: f64) -> RuleResult {
    let is = |id: Id| {
        t.uniform(id)
            .is_some_and(|u| u.to_bits() == value.to_bits())
    };
    let commutative = matches!(r.op, Op::Map(s) if s.is_commutative());
    let x = if is(r.args[1]) {
        r.args[0]
    } else if commutative && is(r.args[0]) {
        r.args[1]
    } else {
        return Err(NoMatch);
    };
    as_shape_of(t, x, r.class)
}

fn is_float(t: &Terms, id: Id) -> bool {
    t.ty(id).dtype.is_float()
}

/// Uniform value of one operand and the other operand, for a commutative root.
fn with_number(t: &Terms, args: &[Id]) -> Option<(Id, f64)> {
    either(args, |x, c| Some((x, t.uniform(c)?)))
}

fn mul_minus_one(t: &mut Terms, r: &Root) -> RuleResult {
    let (x, _) = with_number(t, r.args)
        .filter(|(_, v)| *v == -1.0)
        .ok_or(NoMatch)?;
    map_like(t, r, S::Neg, x)
}

fn scalar_op(r: &Root) -> ScalarOp {
    match r.op {
        Op::Map(s) => *s,
        _ => unreachable!("the rule's root is an element-wise op"),
    }
}

fn double_negation(t: &mut Terms, r: &Root) -> RuleResult {
    t.unary(r.args[0], scalar_op(r)).ok_or(NoMatch)
}

fn idempotent(t: &mut Terms, r: &Root) -> RuleResult {
    t.unary(r.args[0], scalar_op(r))
        .map(|_| r.args[0])
        .ok_or(NoMatch)
}

fn abs_neg(t: &mut Terms, r: &Root) -> RuleResult {
    let x = t.unary(r.args[0], S::Neg).ok_or(NoMatch)?;
    t.map(S::Abs, &[x])
}

fn same_operands(t: &mut Terms, r: &Root) -> RuleResult {
    if t.same(r.args[0], r.args[1]) {
        Ok(r.args[0])
    } else {
        Err(NoMatch)
    }
}

fn sub_neg(t: &mut Terms, r: &Root) -> RuleResult {
    let b = t.unary(r.args[1], S::Neg).ok_or(NoMatch)?;
    t.map(S::Add, &[r.args[0], b])
}

fn add_neg(t: &mut Terms, r: &Root) -> RuleResult {
    let found = either(r.args, |a, b| Some((a, t.unary(b, S::Neg)?)));
    let (a, b) = found.ok_or(NoMatch)?;
    t.map(S::Sub, &[a, b])
}

fn sub_constant(t: &mut Terms, r: &Root) -> RuleResult {
    let dtype = t.ty(r.class).dtype;
    if !t.is_constant(r.args[1])
        || t.is_constant(r.args[0])
        || !(dtype.is_float() || dtype.is_signed_int())
    {
        return Err(NoMatch);
    }
    let c = match t.uniform(r.args[1]) {
        Some(c) => number_like(t, r.args[1], -c)?,
        None => t.map(S::Neg, &[r.args[1]])?,
    };
    t.map(S::Add, &[r.args[0], c])
}

/// A number in place of the uniform operand `like`: of rank 0, unless `like` widens the result's shape.
fn number_like(t: &mut Terms, like: Id, value: f64) -> RuleResult {
    let ty = t.ty(like).clone();
    let s = t.scalar(ty.dtype, value);
    if are_units(&ty.shape) {
        t.reshape(s, ty.shape.0)
    } else {
        t.broadcast(s, ty.shape.0)
    }
}

fn is_power_of_two(c: f64) -> bool {
    c.is_normal() && c.to_bits() & ((1 << 52) - 1) == 0 && (1.0 / c).is_normal()
}

fn reciprocal(dtype: DType, c: f64) -> Result<f64, Miss> {
    let (r, normal) = match dtype {
        DType::F32 => (f64::from(1.0 / c as f32), (1.0 / c as f32).is_normal()),
        DType::F64 => (1.0 / c, (1.0 / c).is_normal()),
        _ => return Err(NoMatch),
    };
    if normal {
        Ok(r)
    } else {
        Err(rejected(
            "the reciprocal of the divisor is not a normal number",
        ))
    }
}

fn div_power_of_two(t: &mut Terms, r: &Root) -> RuleResult {
    let dtype = t.ty(r.class).dtype;
    let c = t
        .uniform(r.args[1])
        .filter(|c| is_power_of_two(*c))
        .ok_or(NoMatch)?;
    let c = reciprocal(dtype, c)?;
    let c = number_like(t, r.args[1], c)?;
    t.map(S::Mul, &[r.args[0], c])
}

fn div_constant(t: &mut Terms, r: &Root) -> RuleResult {
    if !t.is_constant(r.args[1]) || t.is_constant(r.args[0]) || !is_float(t, r.class) {
        return Err(NoMatch);
    }
    let c = match t.uniform(r.args[1]) {
        Some(c) if is_power_of_two(c) => return Err(NoMatch),
        Some(c) => {
            let c = reciprocal(t.ty(r.class).dtype, c)?;
            number_like(t, r.args[1], c)?
        }
        None => t.map(S::Recip, &[r.args[1]])?,
    };
    t.map(S::Mul, &[r.args[0], c])
}

fn mul_mul_constant(t: &mut Terms, r: &Root) -> RuleResult {
    if t.ty(r.class).dtype != DType::F32 {
        return Err(NoMatch);
    }
    let (inner, b) = with_number(t, r.args).ok_or(NoMatch)?;
    let (x, a) = t
        .find_map(inner, S::Mul, |ch| with_number(t, ch))
        .ok_or(NoMatch)?;
    let product = a as f32 * b as f32;
    if t.uniform(x).is_some() {
        return Err(NoMatch);
    }
    if !product.is_normal() {
        return Err(rejected(
            "the product of the constants is not a normal number",
        ));
    }
    let c = t.scalar(DType::F32, product.into());
    let y = t.map(S::Mul, &[x, c])?;
    as_shape_of(t, y, r.class)
}

fn exponent(t: &Terms, r: &Root) -> Result<f64, Miss> {
    if t.ty(r.class).shape != t.ty(r.args[0]).shape {
        return Err(NoMatch);
    }
    t.uniform(r.args[1])
        .filter(|_| is_float(t, r.class))
        .ok_or(NoMatch)
}

fn pow_integer(t: &mut Terms, r: &Root) -> RuleResult {
    let (x, e) = (r.args[0], exponent(t, r)?);
    let square = if e == 2.0 || e == 3.0 {
        t.map(S::Mul, &[x, x])?
    } else {
        return Err(NoMatch);
    };
    if e == 2.0 {
        Ok(square)
    } else {
        t.map(S::Mul, &[square, x])
    }
}

fn pow_half(t: &mut Terms, r: &Root) -> RuleResult {
    let root = match exponent(t, r)? {
        0.5 => S::Sqrt,
        -0.5 => S::Rsqrt,
        _ => return Err(NoMatch),
    };
    if !never_negative(t, r.args[0], 6) {
        return Err(rejected(
            "the base may be negative: infinity and zero of that sign have other roots than powers",
        ));
    }
    t.map(root, &[r.args[0]])
}

/// True when every element is known to be `+0` or above, or NaN; follows at most `depth` ops.
fn never_negative(t: &Terms, id: Id, depth: usize) -> bool {
    if let Some(c) = t.uniform(id) {
        return c > 0.0 || c.to_bits() == 0;
    }
    let is_known = |op: &Op, ch: &[Id]| {
        let from_operands = depth > 0 && keeps_sign(op);
        gives_natural(t, op, ch)
            || from_operands && ch.iter().all(|&c| never_negative(t, c, depth - 1))
    };
    t.find(id, |op, ch| is_known(op, ch).then_some(()))
        .is_some()
}

/// True for ops whose results are never negative, whatever their operands are.
fn gives_natural(t: &Terms, op: &Op, ch: &[Id]) -> bool {
    match op {
        Op::Map(S::Abs | S::Exp | S::Sigmoid) => true,
        Op::Map(S::Mul) => t.same(ch[0], ch[1]),
        Op::Map(S::Pow) => t.uniform(ch[1]) == Some(2.0),
        _ => false,
    }
}

/// True for ops whose results are not negative when no operand is.
fn keeps_sign(op: &Op) -> bool {
    match op {
        Op::Map(S::Mul | S::Add) => true,
        Op::Reduce { kind, .. } => matches!(kind, ReduceKind::Sum | ReduceKind::Mean),
        Op::Reshape { .. } | Op::Transpose { .. } | Op::Broadcast { .. } => true,
        _ => false,
    }
}

fn recip(t: &mut Terms, r: &Root) -> RuleResult {
    if !is_float(t, r.class) {
        return Err(NoMatch);
    }
    let x = match r.op {
        Op::Map(S::Div) if t.uniform(r.args[0]) == Some(1.0) => r.args[1],
        Op::Map(S::Pow) if t.uniform(r.args[1]) == Some(-1.0) => r.args[0],
        _ => return Err(NoMatch),
    };
    map_like(t, r, S::Recip, x)
}

fn rsqrt(t: &mut Terms, r: &Root) -> RuleResult {
    let x = t.unary(r.args[0], S::Sqrt).ok_or(NoMatch)?;
    t.map(S::Rsqrt, &[x])
}

fn div_sqrt(t: &mut Terms, r: &Root) -> RuleResult {
    let b = t.unary(r.args[1], S::Sqrt).ok_or(NoMatch)?;
    let b = t.map(S::Rsqrt, &[b])?;
    t.map(S::Mul, &[r.args[0], b])
}

fn relu(t: &mut Terms, r: &Root) -> RuleResult {
    let (x, _) = with_number(t, r.args)
        .filter(|(_, c)| c.to_bits() == 0)
        .ok_or(NoMatch)?;
    map_like(t, r, S::Relu, x)
}

/// A term between two limits: operand, lower limit, upper limit.
type Clamped = (Id, f64, f64);

/// Limits of a term that clamps on one side.
fn half_clamp(t: &Terms, id: Id) -> Option<Clamped> {
    let (min, max) = (f64::NEG_INFINITY, f64::INFINITY);
    let number = |op| t.find_map(id, op, |ch| with_number(t, ch));
    let low = number(S::Max).map(|(x, lo)| (x, lo, max));
    let relu = || t.unary(id, S::Relu).map(|x| (x, 0.0, max));
    let high = || number(S::Min).map(|(x, hi)| (x, min, hi));
    low.or_else(relu).or_else(high)
}

fn clamp(t: &mut Terms, r: &Root) -> RuleResult {
    if !is_float(t, r.class) {
        return Err(NoMatch);
    }
    let (x, lo, hi) = limits(t, r).ok_or(NoMatch)?;
    if lo > hi {
        return Err(rejected("the lower limit is above the upper one"));
    }
    let (lo, hi) = (Real(lo), Real(hi));
    map_like(t, r, S::ClampTo { lo, hi }, x)
}

/// Limits of a term that clamps on both sides.
fn limits(t: &Terms, r: &Root) -> Option<Clamped> {
    match scalar_op(r) {
        S::Clamp => Some((r.args[0], t.uniform(r.args[1])?, t.uniform(r.args[2])?)),
        S::Relu => upper_below(t, r.args[0]).map(|(x, hi)| (x, 0.0, hi)),
        S::Min => {
            let (inner, hi) = with_number(t, r.args)?;
            let (x, lo, _) = half_clamp(t, inner)?;
            lo.is_finite().then_some((x, lo, hi))
        }
        _ => {
            let (inner, lo) = with_number(t, r.args)?;
            upper_below(t, inner).map(|(x, hi)| (x, lo, hi))
        }
    }
}

/// Operand and limit of a term that clamps from above.
fn upper_below(t: &Terms, id: Id) -> Option<(Id, f64)> {
    let (x, _, hi) = half_clamp(t, id)?;
    hi.is_finite().then_some((x, hi))
}

fn clamp_relu(t: &mut Terms, r: &Root) -> RuleResult {
    match scalar_op(r) {
        S::ClampTo { lo, hi } if lo.0.to_bits() == 0 && hi.0 == f64::INFINITY => {
            t.map(S::Relu, &[r.args[0]])
        }
        _ => Err(NoMatch),
    }
}

fn select_known(t: &mut Terms, r: &Root) -> RuleResult {
    let x = match t.uniform(r.args[0]) {
        Some(c) => r.args[if c != 0.0 { 1 } else { 2 }],
        None if t.same(r.args[1], r.args[2]) => r.args[1],
        None => return Err(NoMatch),
    };
    as_shape_of(t, x, r.class)
}

fn select_not(t: &mut Terms, r: &Root) -> RuleResult {
    let c = t.unary(r.args[0], S::Not).ok_or(NoMatch)?;
    t.map(S::Select, &[c, r.args[2], r.args[1]])
}

fn cast_same(t: &mut Terms, r: &Root) -> RuleResult {
    if t.ty(r.args[0]).dtype == t.ty(r.class).dtype {
        Ok(r.args[0])
    } else {
        Err(NoMatch)
    }
}

fn cast_cast(t: &mut Terms, r: &Root) -> RuleResult {
    let to = t.ty(r.class).dtype;
    let between = t.ty(r.args[0]).dtype;
    let is_cast = |op: &Op| matches!(op, Op::Map(S::Cast(_)));
    let x = t.operand_of(r.args[0], is_cast).ok_or(NoMatch)?;
    let from = t.ty(x).dtype;
    if !holds(between, from) {
        return Err(rejected("the inner cast loses something"));
    }
    converted(t, x, S::Cast(to))
}

/// `x` by a conversion; `x` itself when that is to its own dtype.
fn converted(t: &mut Terms, x: Id, conversion: S) -> RuleResult {
    match conversion.result_dtype(&[t.ty(x).dtype]) {
        Ok(to) if to == t.ty(x).dtype => Ok(x),
        _ => t.map(conversion, &[x]),
    }
}

fn bit_cast_bit_cast(t: &mut Terms, r: &Root) -> RuleResult {
    let is_bit_cast = |op: &Op| matches!(op, Op::Map(S::BitCast(_)));
    let x = t.operand_of(r.args[0], is_bit_cast).ok_or(NoMatch)?;
    let (from, to) = (t.ty(x).dtype, t.ty(r.class).dtype);
    if t.ty(r.args[0]).dtype == DType::Bool && from != DType::Bool {
        return Err(rejected("the inner bit cast loses something"));
    }
    converted(t, x, S::BitCast(to))
}

/// True when every value of `small` is a value of `large`, so that `small -> large -> c` is `small -> c` for every `c`.
fn holds(large: DType, small: DType) -> bool {
    let int_bits = |d: DType| 8 * d.size_bytes() as u32 - u32::from(d.is_signed_int());
    match (small, large) {
        (a, b) if a == b => true,
        (DType::Bool, b) => b != DType::Bool,
        (a, b) if a.is_float() && b.is_float() => {
            b == DType::F64 || b == DType::F32 && a.is_narrow_float()
        }
        (a, b) if a.is_int() && b.is_float() => {
            int_bits(a) <= mantissa(b) && b != DType::F16 && !b.is_float8()
        }
        (a, b) if a.is_int() && b.is_int() => {
            int_bits(a) <= int_bits(b) && (!a.is_signed_int() || b.is_signed_int())
        }
        _ => false,
    }
}

/// Bits of the significand of a float, the hidden one included; 8 for the narrowest.
fn mantissa(float: DType) -> u32 {
    match float {
        DType::F64 => 53,
        DType::F32 => 24,
        DType::F16 => 11,
        _ => 8,
    }
}

fn mean(t: &mut Terms, r: &Root) -> RuleResult {
    let (sum, count) = quotient(t, r).ok_or(NoMatch)?;
    let (x, axes, keepdims) = t.find(sum, sum_over).ok_or(NoMatch)?;
    let n = n_summed(t, x, &axes)?;
    if !is_float(t, x) || (count - n).abs() > n * 1e-6 || n == 0.0 {
        return Err(NoMatch);
    }
    let op = Op::Reduce {
        kind: ReduceKind::Mean,
        axes,
        keepdims,
    };
    let y = t.add(op, &[x])?;
    as_shape_of(t, y, r.class)
}

/// Dividend and divisor of a division by a number, also as a product with its reciprocal.
fn quotient(t: &Terms, r: &Root) -> Option<(Id, f64)> {
    if *r.op == Op::Map(S::Div) {
        return Some((r.args[0], t.uniform(r.args[1])?));
    }
    with_number(t, r.args).map(|(x, c)| (x, 1.0 / c))
}

/// Operand and attributes of a sum.
fn sum_over(op: &Op, ch: &[Id]) -> Option<(Id, Vec<usize>, bool)> {
    match op {
        Op::Reduce {
            kind: ReduceKind::Sum,
            axes,
            keepdims,
        } => Some((ch[0], axes.clone(), *keepdims)),
        _ => None,
    }
}

fn n_summed(t: &Terms, x: Id, axes: &[usize]) -> Result<f64, Miss> {
    let shape = &t.ty(x).shape;
    let n: Option<usize> = axes.iter().map(|&a| shape[a].as_usize()).product();
    let why = "the number of summed elements is not a constant";
    n.map(|n| n as f64).ok_or_else(|| rejected(why))
}

fn reduce_nothing(t: &mut Terms, r: &Root) -> RuleResult {
    let Op::Reduce { axes, .. } = r.op else {
        return Err(NoMatch);
    };
    let shape = &t.ty(r.args[0]).shape;
    if axes.iter().any(|&a| !shape[a].is(1)) {
        return Err(NoMatch);
    }
    t.reshape(r.args[0], t.shape(r.class))
}

fn reduce_reduce(t: &mut Terms, r: &Root) -> RuleResult {
    let mut op = r.op.clone();
    let Op::Reduce {
        kind,
        axes,
        keepdims,
    } = &mut op
    else {
        return Err(NoMatch);
    };
    if *kind == ReduceKind::Prod {
        return Err(NoMatch);
    }
    let inner = |op: &Op, ch: &[Id]| match op {
        Op::Reduce {
            kind: k,
            axes: below,
            keepdims: keep,
        } if k == kind && keep == keepdims => Some((below.clone(), ch[0])),
        _ => None,
    };
    let (below, x) = t.find(r.args[0], inner).ok_or(NoMatch)?;
    let is_left = |a: &usize| *keepdims || !below.contains(a);
    let left: Vec<usize> = (0..t.rank(x)).filter(is_left).collect();
    *axes = axes.iter().map(|&a| left[a]).chain(below).collect();
    axes.sort_unstable();
    axes.dedup();
    t.add(op, &[x])
}
