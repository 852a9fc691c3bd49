//! Layouts: convolutions and pools run channels-last, and transposes move towards the results until they cancel.
//!
//! Every rule here makes a term worse by itself (a transpose on the other side of an op); together with
//! `transpose-transpose` they bring the transposes of a whole convolutional network together, where they cancel. Moving
//! transposes the other way is not needed: an operand's transpose moves out, then composes with the one above.

use super::rules;
use crate::ir::{Dim, Layout, Op, ReduceKind};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{Applied, Miss, Miss::NoMatch, Terms, invert, is_identity};
use egg::Id;
use std::ops::Range;

rules! {
    /// A channels-first convolution is a channels-last one between transposes.
    "conv-channels-last" Rounding at Op::Conv { layout: Layout::ChannelsFirst, .. } => conv_channels_last;
    /// A channels-first pool is a channels-last one between transposes.
    "pool-channels-last" Rounding at Op::Pool { layout: Layout::ChannelsFirst, .. } => pool_channels_last;
    /// `f(T(a), b) -> T(f(a, T'(b)))` for element-wise `f`.
    "transpose-out-of-map" Bits at Op::Map(_) => |t, r| out_of_operands(t, r, map_under);
    /// `concat(T(a), b) -> T(concat(a, T'(b)))`
    "transpose-out-of-concat" Bits at Op::Concat { .. } => |t, r| out_of_operands(t, r, concat_under);
    /// `slice(T(x)) -> T(slice(x))`; so for pad and cumulative sums.
    "transpose-out-of-slice" Bits at Op::Slice { .. } | Op::Pad { .. } | Op::CumSum { .. } => |t, r| out_of_first(t, r, axiswise_under);
    /// `reduce(T(x)) -> T(reduce(x))` with the axes renamed; so for argmax and argmin.
    "transpose-out-of-reduce" Rounding at Op::Reduce { .. } | Op::ArgReduce { .. } => |t, r| out_of_first(t, r, reduce_under);
    /// `softmax(T(x)) -> T(softmax(x))` along the renamed axis.
    "transpose-out-of-softmax" Rounding at Op::Softmax { .. } => |t, r| out_of_first(t, r, softmax_under);
    /// `norm(T(x)) -> T(norm(x))` when the normalised axes stay in place.
    "transpose-out-of-norm" Bits at Op::LayerNorm { .. } | Op::RmsNorm { .. } => |t, r| out_of_first(t, r, norm_under);
    /// `broadcast(T(x)) -> T(broadcast(x))`
    "transpose-out-of-broadcast" Bits at Op::Broadcast { .. } => |t, r| out_of_first(t, r, broadcast_under);
    /// `gather(T(x), i) -> T(gather(x, i))` for indices of rank 0 or 1.
    "transpose-out-of-gather" Bits at Op::Gather { .. } => |t, r| out_of_first(t, r, gather_under);
    /// `T(x) w -> T(x w)` for a weight matrix and a transpose that leaves the last axis.
    "transpose-out-of-matmul" Rounding at Op::MatMul => |t, r| out_of_first(t, r, matmul_under);
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

fn conv_channels_last(t: &mut Terms, r: &Root) -> Applied {
    let Op::Conv { window, groups, .. } = r.op else {
        return Err(NoMatch);
    };
    let rank = t.rank(r.class);
    let x = t.transpose(r.args[0], &to_last(rank))?;
    let weights: Vec<usize> = (2..rank).chain([1, 0]).collect();
    let w = t.transpose(r.args[1], &weights)?;
    let op = Op::Conv {
        window: window.clone(),
        groups: *groups,
        layout: Layout::ChannelsLast,
    };
    let y = t.add(op, &[x, w])?;
    t.transpose(y, &invert(&to_last(rank)))
}

fn pool_channels_last(t: &mut Terms, r: &Root) -> Applied {
    let Op::Pool {
        kind,
        size,
        window,
        ceil,
        ..
    } = r.op
    else {
        return Err(NoMatch);
    };
    let rank = t.rank(r.class);
    let x = t.transpose(r.args[0], &to_last(rank))?;
    let op = Op::Pool {
        kind: *kind,
        size: size.clone(),
        window: window.clone(),
        ceil: *ceil,
        layout: Layout::ChannelsLast,
    };
    let y = t.add(op, &[x])?;
    t.transpose(y, &invert(&to_last(rank)))
}

/// The op below a transpose, and the permutation above it.
struct Under {
    op: Op,
    perm: Vec<usize>,
}

/// Moves the transposes of the first operand out; the others stay as they are.
fn out_of_first(
    t: &mut Terms,
    r: &Root,
    under: fn(&Terms, &Root, &[usize], Id) -> Result<Under, Miss>,
) -> Applied {
    let mut result = Err(NoMatch);
    for (perm, x) in transposes(t, r.args[0]) {
        let u = match under(t, r, &perm, x) {
            Ok(u) => u,
            Err(miss) => {
                result = result.or(Err(miss));
                continue;
            }
        };
        let mut args = r.args.to_vec();
        args[0] = x;
        let y = t.add(u.op, &args)?;
        let z = t.transpose(y, &u.perm)?;
        result = Ok(joined(t, result, z));
    }
    result
}

/// Unites an earlier result of the same rule with another.
fn joined(t: &mut Terms, earlier: Applied, new: Id) -> Id {
    if let Some(e) = earlier
        .ok()
        .filter(|e| t.facts(*e).types == t.facts(new).types)
    {
        t.eg.union(e, new);
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
fn out_of_operands(
    t: &mut Terms,
    r: &Root,
    under: fn(&Terms, &Root, &[usize]) -> Result<Op, Miss>,
) -> Applied {
    let rank = t.rank(r.class);
    let mut perms: Vec<Vec<usize>> = Vec::new();
    for &a in r.args.iter().filter(|a| t.rank(**a) == rank) {
        for (perm, _) in transposes(t, a) {
            if !perms.contains(&perm) {
                perms.push(perm);
            }
        }
    }
    perms.truncate(MAX_PERMS);
    let mut result = Err(NoMatch);
    for perm in perms {
        let op = under(t, r, &perm)?;
        let inverse = invert(&perm);
        let args = r
            .args
            .iter()
            .map(|&a| below(t, a, rank, &inverse))
            .collect::<Result<Vec<Id>, Miss>>()?;
        let y = t.add(op, &args)?;
        let z = t.transpose(y, &perm)?;
        result = Ok(joined(t, result, z));
    }
    result
}

/// An operand, extended to `rank` by leading unit axes, under a permutation of the result.
fn below(t: &mut Terms, a: Id, rank: usize, perm: &[usize]) -> Applied {
    let shape = t.ty(a).shape.0.clone();
    if shape.iter().all(|d| d.is(1)) {
        return Ok(a);
    }
    let lead = rank - shape.len();
    let full: Vec<Dim> = std::iter::repeat_n(Dim::constant(1), lead)
        .chain(shape)
        .collect();
    let a = t.reshape(a, full)?;
    t.transpose(a, perm)
}

fn map_under(_: &Terms, r: &Root, _: &[usize]) -> Result<Op, Miss> {
    Ok(r.op.clone())
}

fn concat_under(_: &Terms, r: &Root, perm: &[usize]) -> Result<Op, Miss> {
    let Op::Concat { axis } = r.op else {
        return Err(NoMatch);
    };
    Ok(Op::Concat { axis: perm[*axis] })
}

/// Entry `i` of a per-axis attribute above becomes entry `perm[i]` below.
fn moved<T: Clone>(values: &[T], perm: &[usize]) -> Vec<T> {
    let inverse = invert(perm);
    inverse.iter().map(|&i| values[i].clone()).collect()
}

fn axiswise_under(_: &Terms, r: &Root, perm: &[usize], _: Id) -> Result<Under, Miss> {
    let op = match r.op {
        Op::Slice {
            starts,
            sizes,
            steps,
        } => Op::Slice {
            starts: moved(starts, perm),
            sizes: moved(sizes, perm),
            steps: moved(steps, perm),
        },
        Op::Pad { low, high, mode } => Op::Pad {
            low: moved(low, perm),
            high: moved(high, perm),
            mode: *mode,
        },
        Op::CumSum {
            axis,
            exclusive,
            reverse,
        } => Op::CumSum {
            axis: perm[*axis],
            exclusive: *exclusive,
            reverse: *reverse,
        },
        _ => return Err(NoMatch),
    };
    Ok(Under {
        op,
        perm: perm.to_vec(),
    })
}

/// The permutation that is left when the axes above in `gone` are dropped.
fn without(perm: &[usize], gone: &[usize]) -> Vec<usize> {
    let kept: Vec<usize> = (0..perm.len())
        .filter(|i| !gone.contains(i))
        .map(|i| perm[i])
        .collect();
    kept.iter()
        .map(|p| kept.iter().filter(|q| *q < p).count())
        .collect()
}

fn reduce_under(_: &Terms, r: &Root, perm: &[usize], _: Id) -> Result<Under, Miss> {
    let (op, gone, keepdims) = match r.op {
        Op::Reduce {
            kind,
            axes,
            keepdims,
        } => {
            let mut below: Vec<usize> = axes.iter().map(|&a| perm[a]).collect();
            below.sort_unstable();
            if *kind == ReduceKind::Prod {
                return Err(NoMatch);
            }
            (
                Op::Reduce {
                    kind: *kind,
                    axes: below,
                    keepdims: *keepdims,
                },
                axes.clone(),
                *keepdims,
            )
        }
        Op::ArgReduce {
            kind,
            axis,
            keepdims,
            select_last,
        } => {
            let op = Op::ArgReduce {
                kind: *kind,
                axis: perm[*axis],
                keepdims: *keepdims,
                select_last: *select_last,
            };
            (op, vec![*axis], *keepdims)
        }
        _ => return Err(NoMatch),
    };
    Ok(Under {
        op,
        perm: if keepdims {
            perm.to_vec()
        } else {
            without(perm, &gone)
        },
    })
}

fn softmax_under(_: &Terms, r: &Root, perm: &[usize], _: Id) -> Result<Under, Miss> {
    let Op::Softmax { axis, log } = r.op else {
        return Err(NoMatch);
    };
    Ok(Under {
        op: Op::Softmax {
            axis: perm[*axis],
            log: *log,
        },
        perm: perm.to_vec(),
    })
}

fn norm_under(_: &Terms, r: &Root, perm: &[usize], _: Id) -> Result<Under, Miss> {
    let (Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. }) = r.op else {
        return Err(NoMatch);
    };
    if perm[*axis..]
        .iter()
        .enumerate()
        .any(|(i, p)| *p != axis + i)
    {
        return Err(NoMatch);
    }
    Ok(Under {
        op: r.op.clone(),
        perm: perm.to_vec(),
    })
}

fn broadcast_under(_: &Terms, r: &Root, perm: &[usize], _: Id) -> Result<Under, Miss> {
    let Op::Broadcast { shape } = r.op else {
        return Err(NoMatch);
    };
    let lead = shape.len() - perm.len();
    let perm: Vec<usize> = (0..lead).chain(perm.iter().map(|p| p + lead)).collect();
    Ok(Under {
        op: Op::Broadcast {
            shape: moved(shape, &perm),
        },
        perm,
    })
}

fn gather_under(t: &Terms, r: &Root, perm: &[usize], _: Id) -> Result<Under, Miss> {
    let Op::Gather { axis } = r.op else {
        return Err(NoMatch);
    };
    let perm_above = match t.rank(r.args[1]) {
        0 => without(perm, &[*axis]),
        1 => perm.to_vec(),
        _ => return Err(NoMatch),
    };
    Ok(Under {
        op: Op::Gather { axis: perm[*axis] },
        perm: perm_above,
    })
}

fn matmul_under(t: &Terms, r: &Root, perm: &[usize], _: Id) -> Result<Under, Miss> {
    let last = perm.len() - 1;
    if perm[last] != last || t.rank(r.args[1]) != 2 {
        return Err(NoMatch);
    }
    Ok(Under {
        op: Op::MatMul,
        perm: perm.to_vec(),
    })
}

/// `reshape(T(x))` as `T''(reshape(T'(x)))`, where `T'` only brings axes together that are merged or split together; it is
/// the identity when they are neighbours in `x` already.
fn transpose_out_of_reshape(t: &mut Terms, r: &Root) -> Applied {
    let from = t.ty(r.args[0]).shape.0.clone();
    let to = t.ty(r.class).shape.0.clone();
    let groups = reshape_groups(&from, &to).ok_or(NoMatch)?;
    let mut result = Err(NoMatch);
    for (perm, x) in transposes(t, r.args[0]) {
        let mut groups = groups.clone();
        groups.sort_by_key(|(f, _)| f.clone().map(|i| perm[i]).min().unwrap_or(usize::MAX));
        let inner: Vec<usize> = groups
            .iter()
            .flat_map(|(f, _)| f.clone())
            .map(|i| perm[i])
            .collect();
        let above: Vec<usize> = groups.iter().flat_map(|(_, to)| to.clone()).collect();
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

/// Splits a reshape into independent ones: pairs of ranges of axes with equal products, in order. `None` when an extent is
/// zero or the products cannot be compared.
pub(super) fn reshape_groups(
    from: &[Dim],
    to: &[Dim],
) -> Option<Vec<(Range<usize>, Range<usize>)>> {
    let mut groups = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < from.len() || j < to.len() {
        let (i0, j0) = (i, j);
        let unit = |s: &[Dim], k: usize| s.get(k).is_some_and(|d| d.is(1));
        match (unit(from, i), unit(to, j)) {
            (false, false) => {
                let (mut p, mut q) = (from.get(i)?.clone(), to.get(j)?.clone());
                (i, j) = (i + 1, j + 1);
                while p != q {
                    if q.exact_div(&p).is_some()
                        || p.as_const().zip(q.as_const()).is_some_and(|(p, q)| p < q)
                    {
                        p = p.product(from.get(i)?);
                        i += 1;
                    } else {
                        q = q.product(to.get(j)?);
                        j += 1;
                    }
                }
                if p.is(0) {
                    return None;
                }
            }
            (unit_from, unit_to) => {
                i += usize::from(unit_from);
                j += usize::from(unit_to);
            }
        }
        groups.push((i0..i, j0..j));
    }
    Some(groups)
}

/// Operands of the reshapes in a class.
fn reshaped_from(t: &Terms, id: Id) -> Vec<Id> {
    let mut all = Vec::new();
    t.find(id, |op, ch| {
        if matches!(op, Op::Reshape { .. }) && !t.is_constant(ch[0]) {
            all.push(ch[0]);
        }
        None::<()>
    });
    all.truncate(MAX_PERMS);
    all
}

/// True when a reshape leaves the last axis alone.
fn keeps_last(from: &[Dim], to: &[Dim]) -> bool {
    let last = |g: &(Range<usize>, Range<usize>)| {
        g.0 == (from.len() - 1..from.len()) && g.1 == (to.len() - 1..to.len())
    };
    from.len() > 1
        && to.len() > 1
        && reshape_groups(from, to).is_some_and(|g| g.last().is_some_and(last))
}

fn reshape_out_of_matmul(t: &mut Terms, r: &Root) -> Applied {
    if t.rank(r.args[1]) != 2 {
        return Err(NoMatch);
    }
    let x = reshaped_from(t, r.args[0]);
    let x = x
        .into_iter()
        .find(|x| keeps_last(&t.ty(*x).shape, &t.ty(r.args[0]).shape))
        .ok_or(NoMatch)?;
    let y = t.add(Op::MatMul, &[x, r.args[1]])?;
    let out = t.ty(r.class).shape.0.clone();
    t.reshape(y, out)
}

/// The operands of a product whose right-hand side is one matrix.
fn product(t: &Terms, op: &Op, ch: &[Id]) -> Option<(Id, Id)> {
    (*op == Op::MatMul && t.rank(ch[1]) == 2).then(|| (ch[0], ch[1]))
}

fn reshape_into_matmul(t: &mut Terms, r: &Root) -> Applied {
    let (from, to) = (
        t.ty(r.args[0]).shape.0.clone(),
        t.ty(r.class).shape.0.clone(),
    );
    let (x, w) = t
        .find(r.args[0], |op, ch| product(t, op, ch))
        .ok_or(NoMatch)?;
    if !keeps_last(&from, &to) {
        return Err(NoMatch);
    }
    let depth = t.ty(x).shape[from.len() - 1].clone();
    let shape = to[..to.len() - 1].iter().cloned().chain([depth]).collect();
    let x = t.reshape(x, shape)?;
    t.add(Op::MatMul, &[x, w])
}

fn reshape_out_of_map(t: &mut Terms, r: &Root) -> Applied {
    let out = t.ty(r.class).shape.0.clone();
    let source = |a: &Id| {
        if *t.ty(*a).shape == out {
            reshaped_from(t, *a)
        } else {
            Vec::new()
        }
    };
    let x = *r
        .args
        .iter()
        .flat_map(source)
        .collect::<Vec<_>>()
        .first()
        .ok_or(NoMatch)?;
    let from = t.ty(x).shape.0.clone();
    let last_kept = keeps_last(&from, &out);
    let mut args = Vec::new();
    for &a in r.args {
        let shape = t.ty(a).shape.0.clone();
        let same_source = reshaped_from(t, a)
            .into_iter()
            .find(|s| *t.ty(*s).shape == from);
        args.push(match same_source.filter(|_| shape == out) {
            Some(s) => s,
            None if shape.iter().all(|d| d.is(1)) => t.reshape(a, Vec::new())?,
            None if last_kept && shape[..shape.len() - 1].iter().all(|d| d.is(1)) => {
                t.reshape(a, shape[shape.len() - 1..].to_vec())?
            }
            None => return Err(NoMatch),
        });
    }
    let y = t.add(r.op.clone(), &args)?;
    t.reshape(y, out)
}

fn reshape_into_map(t: &mut Terms, r: &Root) -> Applied {
    let to = t.ty(r.class).shape.0.clone();
    let from = t.ty(r.args[0]).shape.0.clone();
    let cancels = |t: &Terms, a: Id| {
        reshaped_from(t, a)
            .into_iter()
            .find(|x| *t.ty(*x).shape == to)
    };
    let takes = |a: &Id| {
        let is_product =
            || t.find(*a, |op, ch| product(t, op, ch)).is_some() && keeps_last(&from, &to);
        *t.ty(*a).shape == from && (cancels(t, *a).is_some() || is_product())
    };
    let map = |op: &Op, ch: &[Id]| match op {
        Op::Map(_) if ch.iter().any(takes) => Some((op.clone(), ch.to_vec())),
        _ => None,
    };
    let (op, args) = t.find(r.args[0], map).ok_or(NoMatch)?;
    let groups = reshape_groups(&from, &to).ok_or(NoMatch)?;
    let args = args
        .iter()
        .map(|&a| reshape_operand(t, a, &from, &to, &groups))
        .collect::<Result<Vec<Id>, Miss>>()?;
    t.add(op, &args)
}

/// An operand that broadcasts to `from`, reshaped to broadcast to `to`. A constant is repeated where it must be.
fn reshape_operand(
    t: &mut Terms,
    a: Id,
    from: &[Dim],
    to: &[Dim],
    groups: &[(Range<usize>, Range<usize>)],
) -> Applied {
    let own = t.ty(a).shape.0.clone();
    // At least one operand has the whole shape; it gives the result its rank even when all extents are 1.
    if own == from {
        return t.reshape(a, to.to_vec());
    }
    if own.iter().all(|d| d.is(1)) {
        return t.reshape(a, Vec::new());
    }
    let mut full = vec![Dim::constant(1); from.len() - own.len()];
    full.extend(own);
    let mut shape = vec![Dim::constant(1); to.len()];
    let mut wide = full.clone();
    for (f, g) in groups {
        if full[f.clone()].iter().all(|d| d.is(1)) {
            continue;
        }
        if full[f.clone()] != from[f.clone()] {
            if !t.is_constant(a) {
                return Err(NoMatch);
            }
            wide[f.clone()].clone_from_slice(&from[f.clone()]);
        }
        shape[g.clone()].clone_from_slice(&to[g.clone()]);
    }
    let a = t.reshape(a, full)?;
    let a = t.broadcast(a, wide)?;
    t.reshape(a, shape)
}
