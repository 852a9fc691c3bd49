//! Composites: activations, softmax, normalisation and attention, as exporters spell them out in primitives.

use super::{either, map_like, norm_axis, rules};
use crate::ir::{Dim, Op, Real, ReduceKind, ScalarOp as S};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{Miss, Miss::NoMatch, RuleResult, Terms, are_units, rejected};
use egg::Id;

rules! {
    /// `1 / (1 + exp(-x)) -> sigmoid(x)`
    "sigmoid" Bits at Op::Map(S::Recip) => sigmoid;
    /// `x * sigmoid(x) -> silu(x)`
    "silu" Rounding at Op::Map(S::Mul) => silu;
    /// `ln(1 + exp(x)) -> softplus(x)`, which does not overflow.
    "softplus" Rounding at Op::Map(S::Log | S::Log1p) => softplus;
    /// `x * tanh(softplus(x)) -> mish(x)`
    "mish" Rounding at Op::Map(S::Mul) => mish;
    /// `clamp(x + 3, 0, 6) / 6 -> hard_sigmoid(x)`
    "hard-sigmoid" Rounding at Op::Map(S::Mul) => hard_sigmoid;
    /// `x * hard_sigmoid(x) -> hard_swish(x)`, so for `x * clamp(x + 3, 0, 6) / 6`.
    "hard-swish" Rounding at Op::Map(S::Mul) => hard_swish;
    /// `x/2 * (1 + erf(x / sqrt 2)) -> gelu(x)`, in any order of the factors; so for the tanh form, whose
    /// cubic may be any nesting of sums, products and powers.
    "gelu" Rounding at Op::Map(S::Mul) => gelu;
    /// `exp(z) / sum(exp(z)) -> softmax(x)` where `z = x - max(x)`
    "softmax" Rounding at Op::Map(S::Div | S::Mul) => softmax;
    /// `ln(softmax(x)) -> log_softmax(x)`, so for `z - ln(sum(exp(z)))`. Where softmax underflows it stays finite.
    "log-softmax" Rounding at Op::Map(S::Log | S::Sub) => log_softmax;
    /// `(x - mean) / sqrt(mean((x - mean)^2) + epsilon) -> layer_norm(x, 1, 0)`
    "layer-norm" Rounding at Op::Map(S::Div | S::Mul) => layer_norm;
    /// `x / sqrt(mean(x^2) + epsilon) -> rms_norm(x, 1)`
    "rms-norm" Rounding at Op::Map(S::Div | S::Mul) => rms_norm;
    /// The scale of a norm that has none.
    "norm-scale" Rounding at Op::Map(S::Mul) => norm_scale;
    /// The offset of a norm that has none.
    "norm-offset" Rounding at Op::Map(S::Add) => norm_offset;
}

fn is_near(value: Option<f64>, expected: f64) -> bool {
    value.is_some_and(|v| (v - expected).abs() <= 1e-4 * expected.abs())
}

/// `x` of `op(x, c)` for a number `c` that fits.
fn with_number(t: &Terms, op: S, id: Id, c: f64) -> Option<Id> {
    let is_other = |ch: &[Id]| is_near(t.uniform(ch[1]), c);
    t.find_map(id, op, |ch| is_other(ch).then_some(ch[0]))
}

/// `x` of `x + c` for a number `c` that fits.
fn plus_number(t: &Terms, id: Id, c: f64) -> Option<Id> {
    with_number(t, S::Add, id, c)
}

/// `x` of `x * c` for a number `c` that fits.
fn times_number(t: &Terms, id: Id, c: f64) -> Option<Id> {
    with_number(t, S::Mul, id, c)
}

/// True when the class is `op(x, y)`.
fn is_map(t: &Terms, id: Id, op: S, x: Id, y: impl Fn(Id) -> bool) -> bool {
    let found = t.find_map(id, op, |ch| (t.same(ch[0], x) && y(ch[1])).then_some(()));
    found.is_some()
}

/// True when the class is `x * x`.
fn is_square(t: &Terms, id: Id, x: Id) -> bool {
    is_map(t, id, S::Mul, x, |y| t.same(y, x))
}

/// `x` of `f(g(x))` for the element-wise `ops` `f`, `g`, outermost first.
fn under_ops(t: &Terms, id: Id, ops: &[S]) -> Option<Id> {
    ops.iter().try_fold(id, |y, op| t.unary(y, *op))
}

/// `x` of `x * f(g(x))`, as for [`under_ops`].
fn times_own(t: &Terms, r: &Root, ops: &[S]) -> Option<Id> {
    either(r.args, |x, y| {
        under_ops(t, y, ops).filter(|z| t.same(x, *z))
    })
}

fn sigmoid(t: &mut Terms, r: &Root) -> RuleResult {
    let e = plus_number(t, r.args[0], 1.0).ok_or(NoMatch)?;
    let x = under_ops(t, e, &[S::Exp, S::Neg]).ok_or(NoMatch)?;
    map_like(t, r, S::Sigmoid, x)
}

fn silu(t: &mut Terms, r: &Root) -> RuleResult {
    let x = times_own(t, r, &[S::Sigmoid]).ok_or(NoMatch)?;
    map_like(t, r, S::Silu, x)
}

fn mish(t: &mut Terms, r: &Root) -> RuleResult {
    let x = times_own(t, r, &[S::Tanh, S::Softplus]).ok_or(NoMatch)?;
    map_like(t, r, S::Mish, x)
}

fn softplus(t: &mut Terms, r: &Root) -> RuleResult {
    let e = if *r.op == Op::Map(S::Log) {
        plus_number(t, r.args[0], 1.0).ok_or(NoMatch)?
    } else {
        r.args[0]
    };
    let x = t.unary(e, S::Exp).ok_or(NoMatch)?;
    map_like(t, r, S::Softplus, x)
}

/// `x` of `clamp(x + 3, 0, 6)`.
fn relu6_of_plus_3(t: &Terms, id: Id) -> Option<Id> {
    let (lo, hi) = (Real(0.0), Real(6.0));
    let y = t.unary(id, S::ClampTo { lo, hi })?;
    plus_number(t, y, 3.0)
}

fn is_sixth(t: &Terms, id: Id) -> bool {
    is_near(t.uniform(id), 1.0 / 6.0)
}

fn hard_sigmoid(t: &mut Terms, r: &Root) -> RuleResult {
    let x = either(r.args, |c, k| {
        relu6_of_plus_3(t, c).filter(|_| is_sixth(t, k))
    });
    let op = S::HardSigmoid {
        alpha: Real(1.0 / 6.0),
        beta: Real(0.5),
    };
    map_like(t, r, op, x.ok_or(NoMatch)?)
}

fn hard_swish(t: &mut Terms, r: &Root) -> RuleResult {
    let of_hard_sigmoid = either(r.args, |x, h| is_hard_sigmoid(t, h, x).then_some(x));
    let spelt_out = || either(r.args, |p, k| times_relu6(t, p).filter(|_| is_sixth(t, k)));
    let x = of_hard_sigmoid.or_else(spelt_out).ok_or(NoMatch)?;
    map_like(t, r, S::HardSwish, x)
}

/// True when the class is the usual hard sigmoid of `x`.
fn is_hard_sigmoid(t: &Terms, id: Id, x: Id) -> bool {
    let of_x = |op: &Op, ch: &[Id]| match op {
        Op::Map(S::HardSigmoid { alpha, beta }) => {
            let is_usual = is_near(Some(alpha.0), 1.0 / 6.0) && beta.0 == 0.5;
            (is_usual && t.same(x, ch[0])).then_some(())
        }
        _ => None,
    };
    t.find(id, of_x).is_some()
}

/// `x` of `x * clamp(x + 3, 0, 6)`.
fn times_relu6(t: &Terms, id: Id) -> Option<Id> {
    t.find_map(id, S::Mul, |ch| {
        relu6_of_plus_3(t, ch[1]).filter(|x| t.same(*x, ch[0]))
    })
}

/// The GELU with the factor `factor = 1 + g(x)`: by the error function or by `tanh`.
fn gelu_factor(t: &Terms, factor: Id, x: Id) -> Option<S> {
    let g = plus_number(t, factor, 1.0)?;
    if let Some(y) = t.unary(g, S::Erf) {
        let scaled = times_number(t, y, std::f64::consts::FRAC_1_SQRT_2)?;
        return t.same(scaled, x).then_some(S::Gelu);
    }
    let mut n_left = CUBIC_READS;
    let [c0, c1, c2, c3] = cubic(t, t.unary(g, S::Tanh)?, x, CUBIC_DEPTH, &mut n_left)?;
    let slope = (2.0 / std::f64::consts::PI).sqrt();
    let is_inner = is_near(Some(c1), slope) && is_near(Some(c3), 0.044715 * slope);
    (is_inner && c0 == 0.0 && c2 == 0.0).then_some(S::GeluTanh)
}

/// Coefficients of a polynomial of degree three at most, the constant one first.
type Cubic = [f64; 4];

/// Levels of terms below a [`cubic`]: `a * (x * (1 + b * (x * x)))` has five, and a factor of 1 may be
/// one more.
const CUBIC_DEPTH: usize = 6;
/// Reads of classes for a [`cubic`], of which each may have several equal forms.
const CUBIC_READS: usize = 1000;

/// The class as a polynomial in `x`, however its products and sums are nested. `None` after `n_left`
/// reads, too.
fn cubic(t: &Terms, id: Id, x: Id, depth: usize, n_left: &mut usize) -> Option<Cubic> {
    if t.same(id, x) {
        return Some([0.0, 1.0, 0.0, 0.0]);
    }
    if let Some(c) = t.uniform(id) {
        return Some([c, 0.0, 0.0, 0.0]);
    }
    let below = depth.checked_sub(1)?;
    *n_left = n_left.checked_sub(1)?;
    t.find(id, |op, ch| {
        let mut part = |i: usize| cubic(t, ch[i], x, below, n_left);
        match op {
            Op::Map(S::Add) => Some(sum_of_cubics(part(0)?, part(1)?)),
            Op::Map(S::Mul) => product_of_cubics(part(0)?, part(1)?),
            Op::Map(S::Pow) => power_of_cubic(part(0)?, t.uniform(ch[1])?),
            _ => None,
        }
    })
}

fn sum_of_cubics(a: Cubic, b: Cubic) -> Cubic {
    std::array::from_fn(|i| a[i] + b[i])
}

/// `None` when the product has a higher degree.
fn product_of_cubics(a: Cubic, b: Cubic) -> Option<Cubic> {
    let mut product = [0.0; 4];
    for (i, a) in a.iter().enumerate().filter(|(_, a)| **a != 0.0) {
        for (j, b) in b.iter().enumerate().filter(|(_, b)| **b != 0.0) {
            *product.get_mut(i + j)? += a * b;
        }
    }
    Some(product)
}

/// The square or the cube.
fn power_of_cubic(a: Cubic, exponent: f64) -> Option<Cubic> {
    let square = product_of_cubics(a, a);
    match exponent {
        2.0 => square,
        3.0 => product_of_cubics(square?, a),
        _ => None,
    }
}

fn gelu(t: &mut Terms, r: &Root) -> RuleResult {
    let found = either(r.args, |a, b| gelu_of(t, a, b));
    let (op, x) = found.ok_or(NoMatch)?;
    map_like(t, r, op, x)
}

/// The GELU that the product `a * b` is, and its operand.
fn gelu_of(t: &Terms, a: Id, b: Id) -> Option<(S, Id)> {
    let with = |factor: Id, x: Id| gelu_factor(t, factor, x).map(|op| (op, x));
    // (x / 2) * factor
    if let Some(found) = times_number(t, a, 0.5).and_then(|x| with(b, x)) {
        return Some(found);
    }
    // (x * factor) * 0.5
    if is_near(t.uniform(b), 0.5) {
        return t.find_map(a, S::Mul, |ch| with(ch[1], ch[0]));
    }
    // x * (0.5 * factor)
    with(times_number(t, b, 0.5)?, a)
}

/// Operand and axes of a reduction that keeps its axes.
fn reduced(t: &Terms, id: Id, kind: ReduceKind) -> Option<(Id, Vec<usize>)> {
    t.find(id, |op, ch| match op {
        Op::Reduce {
            kind: k,
            axes,
            keepdims: true,
        } if *k == kind => Some((ch[0], axes.clone())),
        _ => None,
    })
}

/// `x` and axis of `x - max(x)`.
fn less_its_max(t: &Terms, z: Id) -> Option<(Id, usize)> {
    t.find_map(z, S::Sub, |ch| {
        let (x, axes) = reduced(t, ch[1], ReduceKind::Max)?;
        (t.same(x, ch[0]) && axes.len() == 1).then(|| (x, axes[0]))
    })
}

/// Numerator and denominator of a quotient, also when written with a reciprocal.
fn quotient(t: &Terms, r: &Root) -> Vec<(Id, Id)> {
    if *r.op == Op::Map(S::Div) {
        return vec![(r.args[0], r.args[1])];
    }
    let by = |a: Id, b: Id| t.unary(b, S::Recip).map(|d| (a, d));
    [by(r.args[0], r.args[1]), by(r.args[1], r.args[0])]
        .into_iter()
        .flatten()
        .collect()
}

fn softmax(t: &mut Terms, r: &Root) -> RuleResult {
    for (e, s) in quotient(t, r) {
        let Some((z, sum_axis)) = exp_and_axis(t, e, s) else {
            continue;
        };
        let shifted = less_its_max(t, z);
        let (x, axis) = shifted.ok_or_else(|| rejected("the maximum is not subtracted first"))?;
        if axis == sum_axis {
            return t.add(Op::Softmax { axis, log: false }, &[x]);
        }
    }
    Err(NoMatch)
}

/// `z` and axis of `e = exp(z)` and `s = sum(e)` along one axis.
fn exp_and_axis(t: &Terms, e: Id, s: Id) -> Option<(Id, usize)> {
    let (summed, axes) = reduced(t, s, ReduceKind::Sum)?;
    let z = t.unary(e, S::Exp).filter(|_| t.same(summed, e))?;
    let [axis] = axes[..] else { return None };
    Some((z, axis))
}

fn log_softmax(t: &mut Terms, r: &Root) -> RuleResult {
    let found = if *r.op == Op::Map(S::Log) {
        t.find(r.args[0], |op, ch| match op {
            Op::Softmax { axis, log: false } => Some((ch[0], *axis)),
            _ => None,
        })
    } else {
        less_log_of_sum(t, r.args[0], r.args[1])
    };
    let (x, axis) = found.ok_or(NoMatch)?;
    t.add(Op::Softmax { axis, log: true }, &[x])
}

/// `x` and axis of `z - ln(sum(exp(z)))` where `z = x - max(x)`.
fn less_log_of_sum(t: &Terms, z: Id, log: Id) -> Option<(Id, usize)> {
    let sum = t.unary(log, S::Log)?;
    let (e, axes) = reduced(t, sum, ReduceKind::Sum)?;
    t.unary(e, S::Exp).filter(|y| t.same(*y, z))?;
    less_its_max(t, z).filter(|(_, axis)| axes == [*axis])
}

/// Operands `(x, v)` of `x / sqrt(v + epsilon)` in its spellings, and epsilon.
fn over_deviation(t: &Terms, r: &Root) -> Vec<(Id, Id, f64)> {
    let with_epsilon = |x: Id, root: Option<Id>| {
        let (v, epsilon) = t.find_map(root?, S::Add, |ch| Some((ch[0], t.uniform(ch[1])?)))?;
        Some((x, v, epsilon))
    };
    let (a, b) = (r.args[0], r.args[1]);
    if *r.op == Op::Map(S::Div) {
        return with_epsilon(a, t.unary(b, S::Sqrt)).into_iter().collect();
    }
    [(a, b), (b, a)]
        .into_iter()
        .filter_map(|(x, d)| with_epsilon(x, t.unary(d, S::Rsqrt)))
        .collect()
}

/// Axes of `v` when it is the mean of the squares of `d`.
fn mean_of_squares(t: &Terms, v: Id, d: Id) -> Option<Vec<usize>> {
    let (square, axes) = reduced(t, v, ReduceKind::Mean)?;
    let is_two = |e: Id| t.uniform(e) == Some(2.0);
    let is_power = || is_map(t, square, S::Pow, d, is_two);
    (is_square(t, square, d) || is_power()).then_some(axes)
}

/// First of the axes when they are the last of the tensor.
fn trailing(t: &Terms, x: Id, axes: &[usize]) -> Result<usize, Miss> {
    let first = t.rank(x) - axes.len();
    if axes.iter().enumerate().all(|(i, a)| *a == first + i) && !axes.is_empty() {
        Ok(first)
    } else {
        Err(rejected("the normalised axes are not the last ones"))
    }
}

/// A tensor of one number in the shape of the axes of `x` from `axis` on.
fn filled(t: &mut Terms, x: Id, axis: usize, value: f64) -> RuleResult {
    let ty = t.ty(x).clone();
    let number = t.scalar(ty.dtype, value);
    t.broadcast(number, ty.shape[axis..].to_vec())
}

fn layer_norm(t: &mut Terms, r: &Root) -> RuleResult {
    for (d, v, epsilon) in over_deviation(t, r) {
        let Some((x, axes)) = less_its_mean(t, v, d) else {
            continue;
        };
        let axis = trailing(t, x, &axes)?;
        let (one, zero) = (filled(t, x, axis, 1.0)?, filled(t, x, axis, 0.0)?);
        let epsilon = Real(epsilon);
        return t.add(Op::LayerNorm { axis, epsilon }, &[x, one, zero]);
    }
    Err(NoMatch)
}

/// `x` and axes of `d = x - mean(x)`, where `v` is the mean of the squares of `d` along the same axes.
fn less_its_mean(t: &Terms, v: Id, d: Id) -> Option<(Id, Vec<usize>)> {
    let axes = mean_of_squares(t, v, d)?;
    let x = t.find_map(d, S::Sub, |ch| {
        let (x, mean_axes) = reduced(t, ch[1], ReduceKind::Mean)?;
        (t.same(x, ch[0]) && mean_axes == axes).then_some(x)
    })?;
    Some((x, axes))
}

fn rms_norm(t: &mut Terms, r: &Root) -> RuleResult {
    for (x, v, epsilon) in over_deviation(t, r) {
        let Some(axes) = mean_of_squares(t, v, x) else {
            continue;
        };
        let axis = trailing(t, x, &axes)?;
        let one = filled(t, x, axis, 1.0)?;
        let epsilon = Real(epsilon);
        return t.add(Op::RmsNorm { axis, epsilon }, &[x, one]);
    }
    Err(NoMatch)
}

/// A factor or summand in the shape that a norm takes, when it varies along the normalised axes only.
fn parameter(t: &mut Terms, id: Id, shape: &[Dim]) -> RuleResult {
    let own = t.shape(id);
    let lead = own.len().saturating_sub(shape.len());
    if !are_units(&own[..lead]) {
        return Err(NoMatch);
    }
    let x = t.reshape(id, own[lead..].to_vec())?;
    t.broadcast(x, shape.to_vec())
}

/// A norm in the class.
struct Norm {
    op: Op,
    axis: usize,
    args: Vec<Id>,
}

impl Norm {
    fn of(op: &Op, ch: &[Id]) -> Option<Norm> {
        let axis = norm_axis(op)?;
        let (op, args) = (op.clone(), ch.to_vec());
        Some(Norm { op, axis, args })
    }

    fn has_scale(&self, t: &Terms) -> bool {
        t.uniform(self.args[1]) != Some(1.0)
    }

    fn has_offset(&self, t: &Terms) -> bool {
        let offset = self.args.get(2);
        offset.is_some_and(|b| t.uniform(*b) != Some(0.0))
    }

    /// The norm in the class `n` with another scale (operand 1) or offset (operand 2).
    fn with(mut self, t: &mut Terms, n: Id, operand: usize, value: Id) -> RuleResult {
        let shape = t.ty(n).shape[self.axis..].to_vec();
        self.args[operand] = parameter(t, value, &shape)?;
        t.add(self.op, &self.args)
    }
}

fn norm_scale(t: &mut Terms, r: &Root) -> RuleResult {
    let is_plain = |n: &Norm| !n.has_scale(t) && !n.has_offset(t);
    let found = either(r.args, |n, g| {
        let norm = t.find(n, |op, ch| Norm::of(op, ch).filter(is_plain))?;
        Some((norm, n, g))
    });
    let (norm, n, scale) = found.ok_or(NoMatch)?;
    norm.with(t, n, 1, scale)
}

fn norm_offset(t: &mut Terms, r: &Root) -> RuleResult {
    let is_bare = |n: &Norm| n.args.len() > 2 && !n.has_offset(t);
    let found = either(r.args, |n, b| {
        let norm = t.find(n, |op, ch| Norm::of(op, ch).filter(is_bare))?;
        Some((norm, n, b))
    });
    let (norm, n, offset) = found.ok_or(NoMatch)?;
    norm.with(t, n, 2, offset)
}
