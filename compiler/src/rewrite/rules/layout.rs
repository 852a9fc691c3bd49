//! Layouts: convolutions and pools run channels-last, and transposes move towards the results until they cancel.
//!
//! Every rule here makes a term worse by itself (a transpose on the other side of an op); together with
//! `transpose-transpose` they bring the transposes of a whole convolutional network together, where they cancel. Moving
//! transposes the other way is not needed: an operand's transpose moves out, then composes with the one above.

use super::rules;
use crate::ir::axes::{Axes, Transposed, invert};
use crate::ir::{Dim, Layout, Op};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{
    Miss, Miss::NoMatch, RuleResult, Terms, are_units, is_identity, is_reshape,
};
use egg::Id;
use std::ops::Range;

rules! {
    /// A channels-first convolution is a channels-last one between transposes.
    "conv-channels-last" Rounding at Op::Conv { layout: Layout::ChannelsFirst, .. } => conv_channels_last;
    /// A channels-first pool is a channels-last one between transposes.
    "pool-channels-last" Rounding at Op::Pool { layout: Layout::ChannelsFirst, .. } => pool_channels_last;
    /// So for the gradient of max pooling.
    "max-pool-grad-channels-last" Rounding at Op::MaxPoolGrad { layout: Layout::ChannelsFirst, .. } => pool_channels_last;
    /// `f(T(a), b) -> T(f(a, T'(b)))` for element-wise `f`.
    "transpose-out-of-map" Bits at Op::Map(_) => out_of_operands;
    /// `concat(T(a), b) -> T(concat(a, T'(b)))`
    "transpose-out-of-concat" Bits at Op::Concat { .. } => out_of_operands;
    /// `slice(T(x)) -> T(slice(x))`; so for pad and cumulative sums.
    "transpose-out-of-slice" Bits at Op::Slice { .. } | Op::Pad { .. } | Op::CumSum { .. } => out_of_first;
    /// `reduce(T(x)) -> T(reduce(x))` with the axes renamed; so for argmax and argmin.
    "transpose-out-of-reduce" Rounding at Op::Reduce { .. } | Op::ArgReduce { .. } => out_of_first;
    /// `softmax(T(x)) -> T(softmax(x))` along the renamed axis.
    "transpose-out-of-softmax" Rounding at Op::Softmax { .. } => out_of_first;
    /// `norm(T(x)) -> T(norm(x))` when the normalised axes stay in place.
    "transpose-out-of-norm" Bits at Op::LayerNorm { .. } | Op::RmsNorm { .. } => out_of_first;
    /// `layer_norm(T(x), 1, 0) -> T(standardize(x))` when the normalised axes do not stay in place.
    "transpose-out-of-plain-norm" Rounding at Op::LayerNorm { .. } => out_of_plain_norm;
    /// `standardize(T(x)) -> T(standardize(x))` over the renamed axes.
    "transpose-out-of-standardize" Rounding at Op::Standardize { .. } => out_of_first;
    /// `broadcast(T(x)) -> T(broadcast(x))`
    "transpose-out-of-broadcast" Bits at Op::Broadcast { .. } => out_of_first;
    /// `gather(T(x), i) -> T(gather(x, i))` for indices of rank 0 or 1.
    "transpose-out-of-gather" Bits at Op::Gather { .. } => out_of_first;
    /// `T(x) w -> T(x w)` for a weight matrix and a transpose that leaves the last axis.
    "transpose-out-of-matmul" Rounding at Op::MatMul => out_of_first;
    /// `reshape(T(x)) -> T(reshape(x))`: axes that are merged or split together move together.
    "transpose-out-of-reshape" Bits at Op::Reshape { .. } => transpose_out_of_reshape;
    /// `R(x) w -> R'(x w)` for a weight matrix and a reshape of the other axes; transposes on both sides may then meet.
    "reshape-out-of-matmul" Rounding at Op::MatMul => reshape_out_of_matmul;
    /// `f(R(x), b) -> R(f(x, b))` for element-wise `f` when `b` varies along the last axis only, or is reshaped likewise.
    "reshape-out-of-map" Bits at Op::Map(_) => reshape_out_of_map;
    /// `R(f(R'(x), b)) -> f(x, R(b))` for element-wise `f` when `R` undoes `R'`, or can move into a product.
    "reshape-into-map" Bits at Op::Reshape { .. } => reshape_into_map;
    /// `R(x w) -> R'(x) w` for a weight matrix and a reshape of the other axes: readers of the reshaped product can then follow on its tiles.
    "reshape-into-matmul" Rounding at Op::Reshape { .. } => reshape_into_matmul;
}

/// More alternatives than this for one operand are not followed.
const MAX_PERMS: usize = 3;

/// From channels-first to channels-last.
fn to_last(rank: usize) -> Vec<usize> {
    std::iter::once(0).chain(2..rank).chain([1]).collect()
}

fn conv_channels_last(t: &mut Terms, r: &Root) -> RuleResult {
    let mut op = r.op.clone();
    let Op::Conv { layout, .. } = &mut op else {
        return Err(NoMatch);
    };
    *layout = Layout::ChannelsLast;
    let rank = t.rank(r.class);
    let x = t.transpose(r.args[0], &to_last(rank))?;
    let weights: Vec<usize> = (2..rank).chain([1, 0]).collect();
    let w = t.transpose(r.args[1], &weights)?;
    with_channels_first(t, op, &[x, w])
}

fn pool_channels_last(t: &mut Terms, r: &Root) -> RuleResult {
    let mut op = r.op.clone();
    let (Op::Pool { layout, .. } | Op::MaxPoolGrad { layout, .. }) = &mut op else {
        return Err(NoMatch);
    };
    *layout = Layout::ChannelsLast;
    let perm = to_last(t.rank(r.class));
    let args = each(r.args, |a| t.transpose(a, &perm))?;
    with_channels_first(t, op, &args)
}

/// The result of a channels-last op, transposed to channels first.
fn with_channels_first(t: &mut Terms, op: Op, args: &[Id]) -> RuleResult {
    let y = t.add(op, args)?;
    t.transpose(y, &invert(&to_last(t.rank(y))))
}

/// Moves the transposes of the first operand out; the others stay as they are.
fn out_of_first(t: &mut Terms, r: &Root) -> RuleResult {
    let Axes::Leading(pass) = r.op.spec().axes else {
        return Err(NoMatch);
    };
    let ranks: Vec<usize> = r.args.iter().map(|&a| t.rank(a)).collect();
    let mut result = Err(NoMatch);
    for (perm, x) in transposes(t, r.args[0]) {
        let Some(passed) = pass(&transposed(r, &perm, &ranks)) else {
            continue;
        };
        let mut args = r.args.to_vec();
        args[0] = x;
        let y = t.add(passed.op, &args)?;
        let z = t.transpose(y, &passed.perm)?;
        result = Ok(joined(t, result, z));
    }
    result
}

/// Standardisation as a layer normalisation without scale and offset, over axes that need not be the last.
fn out_of_plain_norm(t: &mut Terms, r: &Root) -> RuleResult {
    let &Op::LayerNorm { axis, epsilon } = r.op else {
        return Err(NoMatch);
    };
    if !is_plain(t, r) {
        return Err(NoMatch);
    }
    let mut result = Err(NoMatch);
    for (perm, x) in transposes(t, r.args[0]) {
        let axes = sorted(&perm[axis..]);
        if axes.iter().copied().eq(axis..perm.len()) {
            continue;
        }
        let y = t.add(Op::Standardize { axes, epsilon }, &[x])?;
        let z = t.transpose(y, &perm)?;
        result = Ok(joined(t, result, z));
    }
    result
}

/// True for a norm of scale 1 and offset 0.
fn is_plain(t: &Terms, r: &Root) -> bool {
    t.uniform(r.args[1]) == Some(1.0) && t.uniform(r.args[2]) == Some(0.0)
}

fn sorted(axes: &[usize]) -> Vec<usize> {
    let mut axes = axes.to_vec();
    axes.sort_unstable();
    axes
}

fn transposed<'a>(r: &'a Root, perm: &'a [usize], ranks: &'a [usize]) -> Transposed<'a> {
    Transposed {
        op: r.op,
        perm,
        ranks,
    }
}

/// Unites an earlier result of the same rule with another.
fn joined(t: &mut Terms, earlier: RuleResult, new: Id) -> Id {
    if let Ok(earlier) = earlier
        && t.facts(earlier).types == t.facts(new).types
    {
        t.eg.union(earlier, new);
    }
    new
}

/// Transposes in a class that constant folding will not remove: permutation and operand.
fn transposes(t: &Terms, id: Id) -> Vec<(Vec<usize>, Id)> {
    if t.is_constant(id) {
        return Vec::new();
    }
    let mut all = t.transposes_of(id);
    all.retain(|(p, x)| !is_identity(p) && !t.same(*x, id));
    all.truncate(MAX_PERMS);
    all
}

/// Moves transposes of any operand out; the other operands get the inverse.
fn out_of_operands(t: &mut Terms, r: &Root) -> RuleResult {
    let Axes::Aligned(pass) = r.op.spec().axes else {
        return Err(NoMatch);
    };
    let rank = t.rank(r.class);
    let mut result = Err(NoMatch);
    for perm in perms_of_operands(t, r) {
        let op = pass(&transposed(r, &perm, &[])).ok_or(NoMatch)?;
        let inverse = invert(&perm);
        let args = each(r.args, |a| below(t, a, rank, &inverse))?;
        let y = t.add(op, &args)?;
        let z = t.transpose(y, &perm)?;
        result = Ok(joined(t, result, z));
    }
    result
}

/// Distinct permutations of the operands that have the rank of the result.
fn perms_of_operands(t: &Terms, r: &Root) -> Vec<Vec<usize>> {
    let rank = t.rank(r.class);
    let whole = r.args.iter().filter(|a| t.rank(**a) == rank);
    let mut perms: Vec<Vec<usize>> = Vec::new();
    for (perm, _) in whole.flat_map(|&a| transposes(t, a)) {
        if !perms.contains(&perm) {
            perms.push(perm);
        }
    }
    perms.truncate(MAX_PERMS);
    perms
}

fn each(args: &[Id], mut f: impl FnMut(Id) -> RuleResult) -> Result<Vec<Id>, Miss> {
    args.iter().map(|&a| f(a)).collect()
}

/// An operand, extended to `rank` by leading unit axes, under a permutation of the result.
fn below(t: &mut Terms, a: Id, rank: usize, perm: &[usize]) -> RuleResult {
    let shape = t.shape(a);
    if are_units(&shape) {
        return Ok(a);
    }
    let a = t.reshape(a, extended(&shape, rank))?;
    t.transpose(a, perm)
}

/// A shape with leading unit axes, up to `rank`.
fn extended(shape: &[Dim], rank: usize) -> Vec<Dim> {
    let mut full = vec![Dim::constant(1); rank - shape.len()];
    full.extend_from_slice(shape);
    full
}

/// `reshape(T(x))` as `T''(reshape(T'(x)))`, where `T'` only brings axes together that are merged or split together; it is
/// the identity when they are neighbours in `x` already.
fn transpose_out_of_reshape(t: &mut Terms, r: &Root) -> RuleResult {
    let (from, to) = (t.shape(r.args[0]), t.shape(r.class));
    let groups = reshape_groups(&from, &to).ok_or(NoMatch)?;
    let mut result = Err(NoMatch);
    for (perm, x) in transposes(t, r.args[0]) {
        let (inner, above) = grouped(&groups, &perm);
        if inner == perm {
            continue;
        }
        let y = t.transpose(x, &inner)?;
        let y = t.reshape(y, above.iter().map(|&a| to[a].clone()).collect())?;
        let z = t.transpose(y, &invert(&above))?;
        result = Ok(joined(t, result, z));
    }
    result
}

/// `perm` with the axes of each group side by side, groups in the order of their first axes below;
/// and the permutation of the reshaped axes that follows from it.
fn grouped(groups: &[AxisGroup], perm: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let below = |f: &Range<usize>| perm[f.clone()].iter().copied();
    let mut groups = groups.to_vec();
    groups.sort_by_key(|(f, _)| below(f).min().unwrap_or(usize::MAX));
    let inner = groups.iter().flat_map(|(f, _)| below(f)).collect();
    let above = groups.into_iter().flat_map(|(_, to)| to).collect();
    (inner, above)
}

/// Axes before and after a reshape that have equal products.
type AxisGroup = (Range<usize>, Range<usize>);

/// Splits a reshape into independent ones: pairs of ranges of axes with equal products, in order. `None` when an extent is
/// zero or the products cannot be compared.
fn reshape_groups(from: &[Dim], to: &[Dim]) -> Option<Vec<AxisGroup>> {
    let mut groups = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < from.len() || j < to.len() {
        let (n, m) = first_group(&from[i..], &to[j..])?;
        groups.push((i..i + n, j..j + m));
        (i, j) = (i + n, j + m);
    }
    Some(groups)
}

/// Number of axes of the first group. Unit axes are groups of their own.
fn first_group(from: &[Dim], to: &[Dim]) -> Option<(usize, usize)> {
    let unit = |shape: &[Dim]| shape.first().is_some_and(|d| d.is(1));
    let (unit_from, unit_to) = (unit(from), unit(to));
    if unit_from || unit_to {
        return Some((usize::from(unit_from), usize::from(unit_to)));
    }
    let (mut p, mut q) = (from.first()?.clone(), to.first()?.clone());
    let (mut n, mut m) = (1, 1);
    while p != q {
        if is_smaller(&p, &q) {
            p = p.product(from.get(n)?);
            n += 1;
        } else {
            q = q.product(to.get(m)?);
            m += 1;
        }
    }
    (!p.is(0)).then_some((n, m))
}

/// True when `q` is the larger number or a multiple of `p`.
fn is_smaller(p: &Dim, q: &Dim) -> bool {
    let numbers = p.as_const().zip(q.as_const());
    q.exact_div(p).is_some() || numbers.is_some_and(|(p, q)| p < q)
}

/// Operands of the reshapes in a class.
fn reshaped_from(t: &Terms, id: Id) -> Vec<Id> {
    let mut all = t.operands_of(id, is_reshape);
    all.retain(|x| !t.is_constant(*x));
    all.truncate(MAX_PERMS);
    all
}

/// The operand of a reshape in a class that has a certain shape.
fn reshaped_from_shape(t: &Terms, id: Id, shape: &[Dim]) -> Option<Id> {
    let mut sources = reshaped_from(t, id).into_iter();
    sources.find(|x| *t.ty(*x).shape == *shape)
}

/// True when a reshape leaves the last axis alone.
fn keeps_last(from: &[Dim], to: &[Dim]) -> bool {
    if from.len() < 2 || to.len() < 2 {
        return false;
    }
    let last = (from.len() - 1..from.len(), to.len() - 1..to.len());
    reshape_groups(from, to).is_some_and(|groups| groups.last() == Some(&last))
}

fn reshape_out_of_matmul(t: &mut Terms, r: &Root) -> RuleResult {
    if t.rank(r.args[1]) != 2 {
        return Err(NoMatch);
    }
    let to = &t.ty(r.args[0]).shape;
    let mut sources = reshaped_from(t, r.args[0]).into_iter();
    let x = sources.find(|x| keeps_last(&t.ty(*x).shape, to));
    let y = t.add(Op::MatMul, &[x.ok_or(NoMatch)?, r.args[1]])?;
    t.reshape(y, t.shape(r.class))
}

/// The operands of a product whose right-hand side is one matrix.
fn product(t: &Terms, id: Id) -> Option<(Id, Id)> {
    t.find(id, |op, ch| {
        (*op == Op::MatMul && t.rank(ch[1]) == 2).then(|| (ch[0], ch[1]))
    })
}

fn reshape_into_matmul(t: &mut Terms, r: &Root) -> RuleResult {
    let (from, to) = (t.shape(r.args[0]), t.shape(r.class));
    let (x, w) = product(t, r.args[0]).ok_or(NoMatch)?;
    if !keeps_last(&from, &to) {
        return Err(NoMatch);
    }
    let depth = t.ty(x).shape[from.len() - 1].clone();
    let shape = to[..to.len() - 1].iter().cloned().chain([depth]).collect();
    let x = t.reshape(x, shape)?;
    t.add(Op::MatMul, &[x, w])
}

fn reshape_out_of_map(t: &mut Terms, r: &Root) -> RuleResult {
    let out = t.shape(r.class);
    let whole = r.args.iter().filter(|a| *t.ty(**a).shape == out);
    let source = whole.flat_map(|a| reshaped_from(t, *a)).next();
    let from = t.shape(source.ok_or(NoMatch)?);
    let args = each(r.args, |a| below_reshape(t, a, &from, &out))?;
    let y = t.add(r.op.clone(), &args)?;
    t.reshape(y, out)
}

/// The operand of an element-wise op below the reshape of its result.
fn below_reshape(t: &mut Terms, a: Id, from: &[Dim], out: &[Dim]) -> RuleResult {
    let shape = t.shape(a);
    if shape == out
        && let Some(source) = reshaped_from_shape(t, a, from)
    {
        return Ok(source);
    }
    match shape.split_last() {
        Some((last, others)) if are_units(others) => {
            if last.is(1) {
                t.reshape(a, Vec::new())
            } else if keeps_last(from, out) {
                t.reshape(a, vec![last.clone()])
            } else {
                Err(NoMatch)
            }
        }
        Some(_) => Err(NoMatch),
        None => t.reshape(a, Vec::new()),
    }
}

fn reshape_into_map(t: &mut Terms, r: &Root) -> RuleResult {
    let (from, to) = (t.shape(r.args[0]), t.shape(r.class));
    let groups = reshape_groups(&from, &to).ok_or(NoMatch)?;
    let reshape = Reshape { from, to, groups };
    let map = |op: &Op, ch: &[Id]| match op {
        Op::Map(_) if ch.iter().any(|a| reshape.vanishes(t, *a)) => Some((op.clone(), ch.to_vec())),
        _ => None,
    };
    let (op, args) = t.find(r.args[0], map).ok_or(NoMatch)?;
    let args = each(&args, |a| reshape.of_operand(t, a))?;
    t.add(op, &args)
}

/// A reshape on its way to the operands of an element-wise op.
struct Reshape {
    from: Vec<Dim>,
    to: Vec<Dim>,
    groups: Vec<AxisGroup>,
}

impl Reshape {
    /// True when an operand has the whole shape and another reshape of it cancels this one, or a
    /// product takes it.
    fn vanishes(&self, t: &Terms, a: Id) -> bool {
        let is_product = || product(t, a).is_some() && keeps_last(&self.from, &self.to);
        *t.ty(a).shape == self.from
            && (reshaped_from_shape(t, a, &self.to).is_some() || is_product())
    }

    /// An operand that broadcasts to `from`, reshaped to broadcast to `to`. A constant is repeated where it must be.
    fn of_operand(&self, t: &mut Terms, a: Id) -> RuleResult {
        let own = t.shape(a);
        // At least one operand has the whole shape; it gives the result its rank even when all extents are 1.
        if own == self.from {
            return t.reshape(a, self.to.clone());
        }
        if are_units(&own) {
            return t.reshape(a, Vec::new());
        }
        let full = extended(&own, self.from.len());
        let (wide, shape) = self.widened(&full);
        if wide != full && !t.is_constant(a) {
            return Err(NoMatch);
        }
        let a = t.reshape(a, full)?;
        let a = t.broadcast(a, wide)?;
        t.reshape(a, shape)
    }

    /// A shape that broadcasts to `from`, repeated within each group of axes that it varies along;
    /// and the reshaped one.
    fn widened(&self, full: &[Dim]) -> (Vec<Dim>, Vec<Dim>) {
        let mut wide = full.to_vec();
        let mut shape = vec![Dim::constant(1); self.to.len()];
        let varies = |f: &Range<usize>| !are_units(&full[f.clone()]);
        for (f, g) in self.groups.iter().filter(|(f, _)| varies(f)) {
            wide[f.clone()].clone_from_slice(&self.from[f.clone()]);
            shape[g.clone()].clone_from_slice(&self.to[g.clone()]);
        }
        (wide, shape)
    }
}
