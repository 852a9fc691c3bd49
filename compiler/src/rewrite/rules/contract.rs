//! Matrix products, convolutions and attention with the ops around them.

use super::rules;
use crate::ir::{Dim, Layout, Op, Real, ScalarOp as S};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{Applied, Miss, Miss::NoMatch, Terms, rejected};
use egg::Id;

rules! {
    /// `softmax(scale * q k^T + mask) v -> attention(q, k, v, mask)`; the scale may be on the scores, on `q`, on `k`, or on both.
    /// A mask by selection becomes one by addition, under which a hidden score that is NaN or infinite makes its row NaN.
    "attention" Rounding at Op::MatMul => attention;
    /// `conv(x, w) * s -> conv(x, w s)` for constants: batch normalisation folds into the weights. So for a matrix product.
    "scale-into-weights" Rounding at Op::Map(S::Mul) => scale_into_weights;
    /// `(y + b) * s -> y * s + b s` for constants, so that the scale can reach the weights of `y` or another scale.
    "scale-past-bias" Rounding at Op::Map(S::Mul) => scale_past_bias;
    /// `(y * a) * b -> y * (a b)` for constant tensors `a`, `b`.
    "merge-factors" Rounding at Op::Map(S::Mul) => merge_factors;
    /// `(y + a) + b -> y + (a + b)` for constants `a`, `b`.
    "merge-offsets" Rounding at Op::Map(S::Add | S::Sub) => merge_offsets;
}

/// An attention operand without its scale.
struct Scaled {
    id: Id,
    /// A transpose between the scale and the product.
    perm: Option<Vec<usize>>,
    scale: f64,
}

/// Ways to see `id` as a scaled tensor; the last is itself, unscaled.
fn scaled(t: &Terms, id: Id) -> Vec<Scaled> {
    let number = |id: Id| t.find_map(id, S::Mul, |ch| t.uniform(ch[1]).map(|s| (ch[0], s)));
    let mut ways: Vec<Scaled> = number(id)
        .map(|(x, scale)| Scaled {
            id: x,
            perm: None,
            scale,
        })
        .into_iter()
        .collect();
    for (perm, y) in t.transposes_of(id) {
        ways.extend(number(y).map(|(x, scale)| Scaled {
            id: x,
            perm: Some(perm),
            scale,
        }));
    }
    ways.push(Scaled {
        id,
        perm: None,
        scale: 1.0,
    });
    ways.truncate(2);
    ways
}

/// The mask of scores.
#[derive(Clone, Copy)]
enum Mask {
    None,
    Added(Id),
    /// Scores where the condition holds, else the number.
    Selected(Id, f64),
}

/// Ways to see `id` as masked scores, which may be scaled products.
fn unmask(t: &Terms, id: Id) -> Vec<(Id, Mask)> {
    let mut ways = vec![(id, Mask::None)];
    t.find(id, |op, ch| {
        match op {
            Op::Map(S::Add) => {
                ways.extend([(ch[0], Mask::Added(ch[1])), (ch[1], Mask::Added(ch[0]))])
            }
            Op::Map(S::Select) => {
                let fill = t.uniform(ch[2]).filter(|f| *f <= LEAST_FILL);
                ways.extend(fill.map(|f| (ch[1], Mask::Selected(ch[0], f))));
            }
            _ => {}
        }
        None::<()>
    });
    ways
}

/// A number this low, added to a score, leaves nothing of it; so replacing the score and adding to it give the same.
const LEAST_FILL: f64 = -1e30;

fn attention(t: &mut Terms, r: &Root) -> Applied {
    let last = t.rank(r.class) - 1;
    let soft = |op: &Op, ch: &[Id]| match op {
        Op::Softmax { axis, log: false } if *axis == last => Some(ch[0]),
        _ => None,
    };
    let guarded = |t: &Terms| t.find_map(r.args[0], S::Select, |ch| t.find(ch[2], soft));
    let scores = match t.find(r.args[0], soft) {
        Some(s) => s,
        None if guarded(t).is_some() => {
            return Err(rejected(
                "rows without any finite score are replaced after the softmax",
            ));
        }
        None => return Err(NoMatch),
    };
    let matmul = |op: &Op, ch: &[Id]| (*op == Op::MatMul).then(|| (ch[0], ch[1]));
    for (s, mask) in unmask(t, scores) {
        for way in scaled(t, s).into_iter().filter(|w| w.perm.is_none()) {
            if let Some((q, kt)) = t.find(way.id, matmul) {
                return build_attention(t, r, q, kt, way.scale, mask);
            }
        }
    }
    Err(rejected(
        "the softmax's operand is not a scaled, masked product",
    ))
}

fn build_attention(t: &mut Terms, r: &Root, q: Id, kt: Id, scale: f64, mask: Mask) -> Applied {
    let rank = t.rank(kt);
    if rank < 2 || t.rank(q) != rank {
        return Err(rejected("q and k have different ranks"));
    }
    let mut swap: Vec<usize> = (0..rank).collect();
    swap.swap(rank - 2, rank - 1);
    let (q, k) = (scaled(t, q).swap_remove(0), scaled(t, kt).swap_remove(0));
    let scale = scale * q.scale * k.scale;
    let q = match &q.perm {
        Some(p) => t.transpose(q.id, p)?,
        None => q.id,
    };
    let k_above = match &k.perm {
        Some(p) => t.transpose(k.id, p)?,
        None => k.id,
    };
    let k = t.transpose(k_above, &swap)?;
    let mask = match mask {
        Mask::None => None,
        Mask::Added(m) => Some(m),
        Mask::Selected(keep, fill) => {
            let dtype = t.ty(r.class).dtype;
            let (zero, fill) = (t.scalar(dtype, 0.0), t.scalar(dtype, fill));
            Some(t.map(S::Select, &[keep, zero, fill])?)
        }
    };
    let operands: Vec<Id> = [q, k, r.args[1]].into_iter().chain(mask).collect();
    t.add(
        Op::Attention {
            scale: Real(scale),
            causal: false,
        },
        &operands,
    )
}

/// A contraction with constant weights in the class: op, x, weights.
fn weighted(t: &Terms, id: Id) -> Option<(Op, Id, Id)> {
    t.find(id, |op, ch| match op {
        Op::Conv { .. } if t.is_constant(ch[1]) => Some((op.clone(), ch[0], ch[1])),
        Op::MatMul if t.is_constant(ch[1]) && t.rank(ch[1]) == 2 => {
            Some((op.clone(), ch[0], ch[1]))
        }
        _ => None,
    })
}

/// The axis of the result, and of the weights, that holds the output channels.
fn channel_axes(op: &Op, rank: usize, weight_rank: usize) -> (usize, usize) {
    match op {
        Op::Conv {
            layout: Layout::ChannelsFirst,
            ..
        } => (1, 0),
        _ => (rank - 1, weight_rank - 1),
    }
}

/// `s`, broadcast along the channels of a result only, as a factor of the weights.
fn as_weight_factor(t: &mut Terms, s: Id, op: &Op, rank: usize, w: Id) -> Applied {
    let (channel, weight_channel) = channel_axes(op, rank, t.rank(w));
    let own = t.ty(s).shape.0.clone();
    if own.len() > rank {
        return Err(NoMatch);
    }
    let lead = rank - own.len();
    if (0..own.len()).any(|i| i + lead != channel && !own[i].is(1)) {
        return Err(rejected("the factor is not constant over a channel"));
    }
    let extent = if channel < lead {
        Dim::constant(1)
    } else {
        own[channel - lead].clone()
    };
    let mut shape = vec![Dim::constant(1); t.rank(w)];
    shape[weight_channel] = extent;
    t.reshape(s, shape)
}

fn constant_factor(t: &Terms, r: &Root) -> Option<(Id, Id)> {
    let one = |y: Id, s: Id| (t.is_constant(s) && !t.is_constant(y)).then_some((y, s));
    one(r.args[0], r.args[1]).or_else(|| one(r.args[1], r.args[0]))
}

fn scale_into_weights(t: &mut Terms, r: &Root) -> Applied {
    let (y, s) = constant_factor(t, r).ok_or(NoMatch)?;
    let (op, x, w) = weighted(t, y).ok_or(NoMatch)?;
    if t.ty(y).shape != t.ty(r.class).shape {
        return Err(NoMatch);
    }
    let factor = as_weight_factor(t, s, &op, t.rank(r.class), w)?;
    let w = t.map(S::Mul, &[w, factor])?;
    t.add(op, &[x, w])
}

fn scale_past_bias(t: &mut Terms, r: &Root) -> Applied {
    let (y, s) = constant_factor(t, r).ok_or(NoMatch)?;
    let (product, b) = inner_constant(t, y, S::Add).ok_or(NoMatch)?;
    let factor_below = inner_constant(t, product, S::Mul).is_some();
    // Otherwise only channel parameters: after adding one large number, the scale would magnify the
    // rounding error.
    if weighted(t, product).is_none() && !factor_below && t.uniform(b).is_some() {
        return Err(NoMatch);
    }
    if t.ty(product).shape != t.ty(r.class).shape {
        return Err(NoMatch);
    }
    let product = t.map(S::Mul, &[product, s])?;
    let b = t.map(S::Mul, &[b, s])?;
    t.map(S::Add, &[product, b])
}

fn merge_offsets(t: &mut Terms, r: &Root) -> Applied {
    let float = t.ty(r.class).dtype.is_float();
    let outer = if *r.op == Op::Map(S::Sub) {
        t.is_constant(r.args[1]).then_some((r.args[0], r.args[1]))
    } else {
        constant_factor(t, r)
    };
    let (y, b) = outer.filter(|_| float).ok_or(NoMatch)?;
    let (x, a) = inner_constant(t, y, S::Add).ok_or(NoMatch)?;
    let offset = t.map(
        if *r.op == Op::Map(S::Sub) {
            S::Sub
        } else {
            S::Add
        },
        &[a, b],
    )?;
    same_shape(t, t.map_shape(&[x, offset]), r)?;
    t.map(S::Add, &[x, offset])
}

/// `x` and `a` of `x + a`, or `x * a`, for a constant `a` and a variable `x`.
fn inner_constant(t: &Terms, y: Id, op: S) -> Option<(Id, Id)> {
    t.find_map(y, op, |ch| {
        (t.is_constant(ch[1]) && !t.is_constant(ch[0])).then(|| (ch[0], ch[1]))
    })
}

fn merge_factors(t: &mut Terms, r: &Root) -> Applied {
    let (y, b) = constant_factor(t, r)
        .filter(|_| t.ty(r.class).dtype.is_float())
        .ok_or(NoMatch)?;
    let (x, a) = inner_constant(t, y, S::Mul).ok_or(NoMatch)?;
    if t.uniform(a).is_some() && t.uniform(b).is_some() {
        return Err(NoMatch);
    }
    let factor = t.map(S::Mul, &[a, b])?;
    same_shape(t, t.map_shape(&[x, factor]), r)?;
    t.map(S::Mul, &[x, factor])
}

fn same_shape(t: &Terms, shape: Option<Vec<Dim>>, r: &Root) -> Result<(), Miss> {
    if shape.as_deref() == Some(&*t.ty(r.class).shape) {
        Ok(())
    } else {
        Err(NoMatch)
    }
}
