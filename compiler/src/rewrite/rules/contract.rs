//! Matrix products, convolutions and attention with the ops around them.

use super::{either, rules};
use crate::ir::{Dim, Layout, Op, Real, ScalarOp as S};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{Miss, Miss::NoMatch, RuleResult, Terms, rejected};
use egg::Id;
use gristmill_runtime::DType;

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

impl Scaled {
    /// A product with a number, under a transpose or not.
    fn of(t: &Terms, id: Id, perm: Option<Vec<usize>>) -> Option<Scaled> {
        t.find_map(id, S::Mul, |ch| {
            let (id, scale) = (ch[0], t.uniform(ch[1])?);
            let perm = perm.clone();
            Some(Scaled { id, perm, scale })
        })
    }

    /// The operand under its transpose.
    fn transposed(&self, t: &mut Terms) -> RuleResult {
        match &self.perm {
            Some(perm) => t.transpose(self.id, perm),
            None => Ok(self.id),
        }
    }
}

/// Ways to see `id` as a scaled tensor, two at most; the last is itself, unscaled.
fn scaled(t: &Terms, id: Id) -> Vec<Scaled> {
    let under = |(perm, y)| Scaled::of(t, y, Some(perm));
    let plain = Scaled {
        id,
        perm: None,
        scale: 1.0,
    };
    let ways = Scaled::of(t, id, None).into_iter();
    let ways = ways.chain(t.transposes_of(id).into_iter().filter_map(under));
    ways.chain([plain]).take(2).collect()
}

/// The mask of scores.
#[derive(Clone, Copy)]
enum Mask {
    None,
    Added(Id),
    /// Scores where the condition holds, else the number.
    Selected(Id, f64),
}

impl Mask {
    /// The mask as a summand of scores of type `dtype`.
    fn summand(self, t: &mut Terms, dtype: DType) -> Result<Option<Id>, Miss> {
        match self {
            Mask::None => Ok(None),
            Mask::Added(mask) => Ok(Some(mask)),
            Mask::Selected(keep, fill) => {
                let (zero, fill) = (t.scalar(dtype, 0.0), t.scalar(dtype, fill));
                t.map(S::Select, &[keep, zero, fill]).map(Some)
            }
        }
    }
}

/// Ways to see `id` as masked scores, which may be scaled products.
fn unmask(t: &Terms, id: Id) -> Vec<(Id, Mask)> {
    let mut ways = vec![(id, Mask::None)];
    t.find(id, |op, ch| {
        ways.extend(masked(t, op, ch));
        None::<()>
    });
    ways
}

fn masked(t: &Terms, op: &Op, ch: &[Id]) -> Vec<(Id, Mask)> {
    match op {
        Op::Map(S::Add) => vec![(ch[0], Mask::Added(ch[1])), (ch[1], Mask::Added(ch[0]))],
        Op::Map(S::Select) => {
            let fill = t.uniform(ch[2]).filter(|f| *f <= MAX_FILL);
            let mask = fill.map(|f| (ch[1], Mask::Selected(ch[0], f)));
            mask.into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// A number this low, added to a score, leaves nothing of it; so replacing the score and adding to it give the same.
const MAX_FILL: f64 = -1e30;

fn attention(t: &mut Terms, r: &Root) -> RuleResult {
    let scores = softmax_operand(t, r)?;
    for (id, mask) in unmask(t, scores) {
        for way in scaled(t, id).into_iter().filter(|w| w.perm.is_none()) {
            if let Some((q, kt)) = product(t, way.id) {
                let scores = Scores {
                    q,
                    kt,
                    scale: way.scale,
                    mask,
                };
                return build_attention(t, r, scores);
            }
        }
    }
    Err(rejected(
        "the softmax's operand is not a scaled, masked product",
    ))
}

/// The operand of the softmax over keys that a product reads.
fn softmax_operand(t: &Terms, r: &Root) -> RuleResult {
    let last = t.rank(r.class) - 1;
    let soft = |op: &Op, ch: &[Id]| match op {
        Op::Softmax { axis, log: false } if *axis == last => Some(ch[0]),
        _ => None,
    };
    if let Some(scores) = t.find(r.args[0], soft) {
        return Ok(scores);
    }
    let guarded = t.find_map(r.args[0], S::Select, |ch| t.find(ch[2], soft));
    let why = "rows without any finite score are replaced after the softmax";
    Err(guarded.map_or(NoMatch, |_| rejected(why)))
}

fn product(t: &Terms, id: Id) -> Option<(Id, Id)> {
    t.find(id, |op, ch| (*op == Op::MatMul).then(|| (ch[0], ch[1])))
}

/// `scale * q kt`, masked.
struct Scores {
    q: Id,
    kt: Id,
    scale: f64,
    mask: Mask,
}

fn build_attention(t: &mut Terms, r: &Root, scores: Scores) -> RuleResult {
    let rank = t.rank(scores.kt);
    if rank < 2 || t.rank(scores.q) != rank {
        return Err(rejected("q and k have different ranks"));
    }
    let q = scaled(t, scores.q).swap_remove(0);
    let kt = scaled(t, scores.kt).swap_remove(0);
    let scale = Real(scores.scale * q.scale * kt.scale);
    let q = q.transposed(t)?;
    let kt = kt.transposed(t)?;
    let k = t.transpose(kt, &swap_of_last(rank))?;
    let dtype = t.ty(r.class).dtype;
    let mask = scores.mask.summand(t, dtype)?;
    let operands: Vec<Id> = [q, k, r.args[1]].into_iter().chain(mask).collect();
    let causal = false;
    t.add(Op::Attention { scale, causal }, &operands)
}

/// The permutation that swaps the last two axes.
fn swap_of_last(rank: usize) -> Vec<usize> {
    (0..rank - 2).chain([rank - 1, rank - 2]).collect()
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
fn as_weight_factor(t: &mut Terms, s: Id, op: &Op, rank: usize, w: Id) -> RuleResult {
    let (channel, weight_channel) = channel_axes(op, rank, t.rank(w));
    let own = t.shape(s);
    let lead = rank.checked_sub(own.len()).ok_or(NoMatch)?;
    let is_other = |i: usize| i + lead != channel && !own[i].is(1);
    if (0..own.len()).any(is_other) {
        return Err(rejected("the factor is not constant over a channel"));
    }
    let mut shape = vec![Dim::constant(1); t.rank(w)];
    if channel >= lead {
        shape[weight_channel] = own[channel - lead].clone();
    }
    t.reshape(s, shape)
}

/// `(x, c)` when `x` is variable and `c` constant.
fn with_constant(t: &Terms, x: Id, c: Id) -> Option<(Id, Id)> {
    (t.is_constant(c) && !t.is_constant(x)).then_some((x, c))
}

fn constant_factor(t: &Terms, r: &Root) -> Option<(Id, Id)> {
    either(r.args, |x, c| with_constant(t, x, c))
}

fn scale_into_weights(t: &mut Terms, r: &Root) -> RuleResult {
    let (y, s) = constant_factor(t, r).ok_or(NoMatch)?;
    let (op, x, w) = weighted(t, y).ok_or(NoMatch)?;
    if t.ty(y).shape != t.ty(r.class).shape {
        return Err(NoMatch);
    }
    let factor = as_weight_factor(t, s, &op, t.rank(r.class), w)?;
    let w = t.map(S::Mul, &[w, factor])?;
    t.add(op, &[x, w])
}

fn scale_past_bias(t: &mut Terms, r: &Root) -> RuleResult {
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

fn merge_offsets(t: &mut Terms, r: &Root) -> RuleResult {
    let is_difference = *r.op == Op::Map(S::Sub);
    let outer = if is_difference {
        t.is_constant(r.args[1]).then_some((r.args[0], r.args[1]))
    } else {
        constant_factor(t, r)
    };
    let (y, b) = outer.filter(|_| is_float(t, r)).ok_or(NoMatch)?;
    let (x, a) = inner_constant(t, y, S::Add).ok_or(NoMatch)?;
    let op = if is_difference { S::Sub } else { S::Add };
    let offset = t.map(op, &[a, b])?;
    same_shape(t, t.map_shape(&[x, offset]), r)?;
    t.map(S::Add, &[x, offset])
}

fn is_float(t: &Terms, r: &Root) -> bool {
    t.ty(r.class).dtype.is_float()
}

/// `x` and `a` of `x + a`, or `x * a`, for a constant `a` and a variable `x`.
fn inner_constant(t: &Terms, y: Id, op: S) -> Option<(Id, Id)> {
    t.find_map(y, op, |ch| with_constant(t, ch[0], ch[1]))
}

fn merge_factors(t: &mut Terms, r: &Root) -> RuleResult {
    let outer = constant_factor(t, r).filter(|_| is_float(t, r));
    let (y, b) = outer.ok_or(NoMatch)?;
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
