//! Composites: activations, softmax, normalisation and attention, as exporters spell them out in primitives.

use super::{as_shape_of, rules};
use crate::ir::{Dim, Op, Real, ReduceKind, ScalarOp as S};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{Applied, Miss, Miss::NoMatch, Terms, rejected};
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
    /// `x/2 * (1 + erf(x / sqrt 2)) -> gelu(x)`, in any order of the factors; so for the tanh form.
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

type Plain = Option<Id>;

fn is_near(value: Option<f64>, expected: f64) -> bool {
    value.is_some_and(|v| (v - expected).abs() <= 1e-4 * expected.abs())
}

/// `x` of `x + c` for a number `c` that fits.
fn plus_number(t: &Terms, id: Id, c: f64) -> Plain {
    t.find_map(id, S::Add, |ch| {
        is_near(t.uniform(ch[1]), c).then_some(ch[0])
    })
}

/// `x` of `x * c` for a number `c` that fits.
fn times_number(t: &Terms, id: Id, c: f64) -> Plain {
    t.find_map(id, S::Mul, |ch| {
        is_near(t.uniform(ch[1]), c).then_some(ch[0])
    })
}

/// The answer of `f` for the two operands of a commutative root, in either order.
fn either<T>(args: &[Id], f: impl Fn(Id, Id) -> Option<T>) -> Option<T> {
    f(args[0], args[1]).or_else(|| f(args[1], args[0]))
}

fn like(t: &mut Terms, r: &Root, op: S, x: Id) -> Applied {
    let y = t.map(op, &[x])?;
    as_shape_of(t, y, r.class)
}

fn sigmoid(t: &mut Terms, r: &Root) -> Applied {
    let e = plus_number(t, r.args[0], 1.0).ok_or(NoMatch)?;
    let x = t
        .unary(e, S::Exp)
        .and_then(|n| t.unary(n, S::Neg))
        .ok_or(NoMatch)?;
    like(t, r, S::Sigmoid, x)
}

fn silu(t: &mut Terms, r: &Root) -> Applied {
    let matched = either(r.args, |x, s| {
        t.unary(s, S::Sigmoid).filter(|y| t.same(x, *y))
    });
    like(t, r, S::Silu, matched.ok_or(NoMatch)?)
}

fn softplus(t: &mut Terms, r: &Root) -> Applied {
    let e = if *r.op == Op::Map(S::Log) {
        plus_number(t, r.args[0], 1.0)
    } else {
        Some(r.args[0])
    };
    let x = e.and_then(|e| t.unary(e, S::Exp)).ok_or(NoMatch)?;
    like(t, r, S::Softplus, x)
}

fn mish(t: &mut Terms, r: &Root) -> Applied {
    let matched = either(r.args, |x, h| {
        t.unary(h, S::Tanh)
            .and_then(|s| t.unary(s, S::Softplus))
            .filter(|y| t.same(x, *y))
    });
    like(t, r, S::Mish, matched.ok_or(NoMatch)?)
}

/// `x` of `clamp(x + 3, 0, 6)`.
fn relu6_of_plus_3(t: &Terms, id: Id) -> Plain {
    let y = t.unary(
        id,
        S::ClampTo {
            lo: Real(0.0),
            hi: Real(6.0),
        },
    )?;
    plus_number(t, y, 3.0)
}

fn hard_sigmoid(t: &mut Terms, r: &Root) -> Applied {
    let x = either(r.args, |c, k| {
        relu6_of_plus_3(t, c).filter(|_| is_near(t.uniform(k), 1.0 / 6.0))
    });
    like(
        t,
        r,
        S::HardSigmoid {
            alpha: Real(1.0 / 6.0),
            beta: Real(0.5),
        },
        x.ok_or(NoMatch)?,
    )
}

fn hard_swish(t: &mut Terms, r: &Root) -> Applied {
    let is_hard_sigmoid = |x: Id, h: Id| {
        t.find(h, |op, ch| match op {
            Op::Map(S::HardSigmoid { alpha, beta })
                if is_near(Some(alpha.0), 1.0 / 6.0) && beta.0 == 0.5 =>
            {
                t.same(x, ch[0]).then_some(x)
            }
            _ => None,
        })
    };
    let sixth = |p: Id, k: Id| {
        is_near(t.uniform(k), 1.0 / 6.0).then_some(())?;
        t.find_map(p, S::Mul, |ch| {
            relu6_of_plus_3(t, ch[1]).filter(|x| t.same(*x, ch[0]))
        })
    };
    let x = either(r.args, is_hard_sigmoid).or_else(|| either(r.args, sixth));
    like(t, r, S::HardSwish, x.ok_or(NoMatch)?)
}

/// The GELU with the factor `factor = 1 + g(x)`: by the error function or by `tanh`.
fn gelu_factor(t: &Terms, factor: Id, x: Id) -> Option<S> {
    let g = plus_number(t, factor, 1.0)?;
    if let Some(y) = t.unary(g, S::Erf) {
        let scaled = times_number(t, y, std::f64::consts::FRAC_1_SQRT_2);
        return scaled.filter(|z| t.same(*z, x)).map(|_| S::Gelu);
    }
    let inner = t.unary(g, S::Tanh)?;
    let sum = times_number(t, inner, (2.0 / std::f64::consts::PI).sqrt())?;
    t.find_map(sum, S::Add, |ch| {
        let cube = times_number(t, ch[1], 0.044715)?;
        (t.same(ch[0], x) && is_cube(t, cube, x)).then_some(S::GeluTanh)
    })
}

fn is_cube(t: &Terms, id: Id, x: Id) -> bool {
    let square = |id: Id| {
        t.find_map(id, S::Mul, |ch| {
            (t.same(ch[0], x) && t.same(ch[1], x)).then_some(())
        })
        .is_some()
    };
    let power = t.find_map(id, S::Pow, |ch| {
        (t.same(ch[0], x) && is_near(t.uniform(ch[1]), 3.0)).then_some(())
    });
    power.is_some()
        || t.find_map(id, S::Mul, |ch| {
            (t.same(ch[0], x) && square(ch[1])).then_some(())
        })
        .is_some()
}

fn gelu(t: &mut Terms, r: &Root) -> Applied {
    let found = either(r.args, |a, b| {
        // (x / 2) * factor
        if let Some(found) =
            times_number(t, a, 0.5).and_then(|x| gelu_factor(t, b, x).map(|op| (op, x)))
        {
            return Some(found);
        }
        // (x * factor) * 0.5
        if is_near(t.uniform(b), 0.5) {
            return t.find_map(a, S::Mul, |ch| {
                gelu_factor(t, ch[1], ch[0]).map(|op| (op, ch[0]))
            });
        }
        // x * (0.5 * factor)
        times_number(t, b, 0.5)
            .and_then(|f| gelu_factor(t, f, a))
            .map(|op| (op, a))
    });
    let (op, x) = found.ok_or(NoMatch)?;
    like(t, r, op, x)
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

fn softmax(t: &mut Terms, r: &Root) -> Applied {
    for (e, s) in quotient(t, r) {
        let Some((summed, axes)) = reduced(t, s, ReduceKind::Sum) else {
            continue;
        };
        let Some(z) = t.unary(e, S::Exp).filter(|_| t.same(summed, e)) else {
            continue;
        };
        let [axis] = axes.as_slice() else { continue };
        let (x, max_axis) =
            less_its_max(t, z).ok_or_else(|| rejected("the maximum is not subtracted first"))?;
        if *axis == max_axis {
            return t.add(
                Op::Softmax {
                    axis: *axis,
                    log: false,
                },
                &[x],
            );
        }
    }
    Err(NoMatch)
}

fn log_softmax(t: &mut Terms, r: &Root) -> Applied {
    if *r.op == Op::Map(S::Log) {
        let soft = |op: &Op, ch: &[Id]| match op {
            Op::Softmax { axis, log: false } => Some((*axis, ch[0])),
            _ => None,
        };
        let (axis, x) = t.find(r.args[0], soft).ok_or(NoMatch)?;
        return t.add(Op::Softmax { axis, log: true }, &[x]);
    }
    let sum = t.unary(r.args[1], S::Log).ok_or(NoMatch)?;
    let (e, axes) = reduced(t, sum, ReduceKind::Sum).ok_or(NoMatch)?;
    t.unary(e, S::Exp)
        .filter(|z| t.same(*z, r.args[0]))
        .ok_or(NoMatch)?;
    let (x, axis) = less_its_max(t, r.args[0]).ok_or(NoMatch)?;
    if axes == [axis] {
        t.add(Op::Softmax { axis, log: true }, &[x])
    } else {
        Err(NoMatch)
    }
}

/// Operands `(x, v)` of `x / sqrt(v + epsilon)` in its spellings, and epsilon.
fn over_deviation(t: &Terms, r: &Root) -> Vec<(Id, Id, f64)> {
    let with_epsilon = |d: Id| t.find_map(d, S::Add, |ch| t.uniform(ch[1]).map(|e| (ch[0], e)));
    let mut found = Vec::new();
    if *r.op == Op::Map(S::Div) {
        found.extend(
            t.unary(r.args[1], S::Sqrt)
                .and_then(with_epsilon)
                .map(|(v, e)| (r.args[0], v, e)),
        );
        return found;
    }
    for (x, d) in [(r.args[0], r.args[1]), (r.args[1], r.args[0])] {
        found.extend(
            t.unary(d, S::Rsqrt)
                .and_then(with_epsilon)
                .map(|(v, e)| (x, v, e)),
        );
    }
    found
}

/// True when `v` is the mean of the squares of `d`; gives the axes.
fn mean_of_squares(t: &Terms, v: Id, d: Id) -> Option<Vec<usize>> {
    let (square, axes) = reduced(t, v, ReduceKind::Mean)?;
    let product = t.find_map(square, S::Mul, |ch| {
        (t.same(ch[0], d) && t.same(ch[1], d)).then_some(())
    });
    let power = || {
        t.find_map(square, S::Pow, |ch| {
            (t.same(ch[0], d) && t.uniform(ch[1]) == Some(2.0)).then_some(())
        })
    };
    product.or_else(power).map(|()| axes)
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
fn filled(t: &mut Terms, x: Id, axis: usize, value: f64) -> Applied {
    let ty = t.ty(x).clone();
    let number = t.scalar(ty.dtype, value);
    t.broadcast(number, ty.shape[axis..].to_vec())
}

fn layer_norm(t: &mut Terms, r: &Root) -> Applied {
    for (d, v, epsilon) in over_deviation(t, r) {
        let Some(axes) = mean_of_squares(t, v, d) else {
            continue;
        };
        let centred = t.find_map(d, S::Sub, |ch| {
            let (x, mean_axes) = reduced(t, ch[1], ReduceKind::Mean)?;
            (t.same(x, ch[0]) && mean_axes == axes).then_some(x)
        });
        let Some(x) = centred else { continue };
        let axis = trailing(t, x, &axes)?;
        let (one, zero) = (filled(t, x, axis, 1.0)?, filled(t, x, axis, 0.0)?);
        return t.add(
            Op::LayerNorm {
                axis,
                epsilon: Real(epsilon),
            },
            &[x, one, zero],
        );
    }
    Err(NoMatch)
}

fn rms_norm(t: &mut Terms, r: &Root) -> Applied {
    for (x, v, epsilon) in over_deviation(t, r) {
        let Some(axes) = mean_of_squares(t, v, x) else {
            continue;
        };
        let axis = trailing(t, x, &axes)?;
        let one = filled(t, x, axis, 1.0)?;
        return t.add(
            Op::RmsNorm {
                axis,
                epsilon: Real(epsilon),
            },
            &[x, one],
        );
    }
    Err(NoMatch)
}

/// A factor or summand in the shape that a norm takes, when it varies along the normalised axes only.
fn parameter(t: &mut Terms, id: Id, shape: &[Dim]) -> Applied {
    let own = t.ty(id).shape.0.clone();
    let lead = own.len().saturating_sub(shape.len());
    if !own[..lead].iter().all(|d| d.is(1)) {
        return Err(NoMatch);
    }
    let x = t.reshape(id, own[lead..].to_vec())?;
    t.broadcast(x, shape.to_vec())
}

/// A norm in the class: op and operands.
fn norm_in(t: &Terms, id: Id) -> Option<(Op, usize, Vec<Id>)> {
    t.find(id, |op, ch| match op {
        Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => {
            let plain = t.uniform(ch[1]) == Some(1.0)
                && ch.get(2).is_none_or(|b| t.uniform(*b) == Some(0.0));
            plain.then(|| (op.clone(), *axis, ch.to_vec()))
        }
        _ => None,
    })
}

fn norm_scale(t: &mut Terms, r: &Root) -> Applied {
    for (n, g) in [(r.args[0], r.args[1]), (r.args[1], r.args[0])] {
        let Some((op, axis, mut args)) = norm_in(t, n) else {
            continue;
        };
        let shape = t.ty(n).shape[axis..].to_vec();
        args[1] = parameter(t, g, &shape)?;
        return t.add(op, &args);
    }
    Err(NoMatch)
}

fn norm_offset(t: &mut Terms, r: &Root) -> Applied {
    let without_offset = |op: &Op, ch: &[Id]| match op {
        Op::LayerNorm { axis, .. } => {
            (t.uniform(ch[2]) == Some(0.0)).then(|| (op.clone(), *axis, ch.to_vec()))
        }
        _ => None,
    };
    for (n, b) in [(r.args[0], r.args[1]), (r.args[1], r.args[0])] {
        let Some((op, axis, mut args)) = t.find(n, without_offset) else {
            continue;
        };
        let shape = t.ty(n).shape[axis..].to_vec();
        args[2] = parameter(t, b, &shape)?;
        return t.add(op, &args);
    }
    Err(NoMatch)
}
