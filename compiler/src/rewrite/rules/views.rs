//! Views: identities and compositions.

use super::{as_shape_of, rules};
use crate::ir::{Dim, Op};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{
    Miss, Miss::NoMatch, RuleResult, Terms, are_units, compose, is_identity, is_reshape, rejected,
};
use egg::Id;

rules! {
    /// A view that changes nothing.
    "identity-view" Bits at Op::Reshape { .. } | Op::Transpose { .. } | Op::Broadcast { .. } | Op::Slice { .. } | Op::Pad { .. } => identity_view;
    /// A concatenation of one part; empty parts are dropped.
    "concat-of-one" Bits at Op::Concat { .. } => concat_of_one;
    /// Two transposes: one.
    "transpose-transpose" Bits at Op::Transpose { .. } => transpose_transpose;
    /// Two reshapes: one.
    "reshape-reshape" Bits at Op::Reshape { .. } => reshape_reshape;
    /// A reshape that puts reduced axes back: the reduction keeps them.
    "reduce-keepdims" Bits at Op::Reshape { .. } => reduce_keepdims;
    /// Two broadcasts: one.
    "broadcast-broadcast" Bits at Op::Broadcast { .. } => broadcast_broadcast;
    /// A transpose that only moves axes of extent 1 is a reshape.
    "transpose-of-units" Bits at Op::Transpose { .. } => transpose_of_units;
    /// A broadcast that only adds axes of extent 1 is a reshape.
    "broadcast-to-reshape" Bits at Op::Broadcast { .. } => broadcast_to_reshape;
    /// A broadcast operand that the element-wise op would broadcast by itself.
    "map-of-broadcast" Bits at Op::Map(_) => map_of_broadcast;
    /// A slice of a slice.
    "slice-slice" Bits at Op::Slice { .. } => slice_slice;
    /// A slice that lies within one part of a concatenation.
    "slice-of-concat" Bits at Op::Slice { .. } => slice_of_concat;
    /// Adjacent slices of one tensor, joined again.
    "concat-of-slices" Bits at Op::Concat { .. } => concat_of_slices;
    /// A gather at one constant position is a slice.
    "gather-constant" Bits at Op::Gather { .. } => gather_constant;
}

fn identity_view(t: &mut Terms, r: &Root) -> RuleResult {
    let keeps_type = t.ty(r.args[0]) == t.ty(r.class);
    let is_same = match r.op {
        Op::Transpose { perm } => is_identity(perm),
        Op::Slice { starts, steps, .. } => {
            starts.iter().all(|s| s.is(0)) && are_ones(steps) && keeps_type
        }
        _ => keeps_type,
    };
    is_same.then_some(r.args[0]).ok_or(NoMatch)
}

fn are_ones(steps: &[i64]) -> bool {
    steps.iter().all(|s| *s == 1)
}

fn concat_of_one(t: &mut Terms, r: &Root) -> RuleResult {
    let Op::Concat { axis } = *r.op else {
        return Err(NoMatch);
    };
    let is_empty = |p: &Id| t.ty(*p).shape[axis].is(0);
    let parts = r.args.iter().copied().filter(|p| !is_empty(p));
    match parts.collect::<Vec<Id>>()[..] {
        [] => Ok(r.args[0]),
        [one] => Ok(one),
        ref all if all.len() < r.args.len() => t.add(r.op.clone(), all),
        _ => Err(NoMatch),
    }
}

fn transpose_transpose(t: &mut Terms, r: &Root) -> RuleResult {
    let Op::Transpose { perm } = r.op else {
        return Err(NoMatch);
    };
    let mut result = Err(NoMatch);
    for (q, x) in t.transposes_of(r.args[0]) {
        let y = match compose(&q, perm) {
            perm if is_identity(&perm) => x,
            perm => t.add(Op::Transpose { perm }, &[x])?,
        };
        if let Ok(earlier) = result {
            t.eg.union(earlier, y);
        }
        result = Ok(y);
    }
    result
}

fn reshape_reshape(t: &mut Terms, r: &Root) -> RuleResult {
    let x = t.operand_of(r.args[0], is_reshape).ok_or(NoMatch)?;
    t.reshape(x, t.shape(r.class))
}

fn reduce_keepdims(t: &mut Terms, r: &Root) -> RuleResult {
    let reduce = |op: &Op, ch: &[Id]| match op {
        Op::Reduce {
            kind,
            axes,
            keepdims: false,
        } => Some((*kind, axes.clone(), ch[0])),
        _ => None,
    };
    let (kind, axes, x) = t.find(r.args[0], reduce).ok_or(NoMatch)?;
    if t.shape(r.class) != with_units(t.shape(x), &axes) {
        return Err(NoMatch);
    }
    let op = Op::Reduce {
        kind,
        axes,
        keepdims: true,
    };
    t.add(op, &[x])
}

/// A shape with the extent 1 along some axes.
fn with_units(mut shape: Vec<Dim>, axes: &[usize]) -> Vec<Dim> {
    for &axis in axes {
        shape[axis] = Dim::constant(1);
    }
    shape
}

fn is_broadcast(op: &Op) -> bool {
    matches!(op, Op::Broadcast { .. })
}

fn broadcast_broadcast(t: &mut Terms, r: &Root) -> RuleResult {
    let x = t.operand_of(r.args[0], is_broadcast).ok_or(NoMatch)?;
    as_shape_of(t, x, r.class)
}

fn transpose_of_units(t: &mut Terms, r: &Root) -> RuleResult {
    let Op::Transpose { perm } = r.op else {
        return Err(NoMatch);
    };
    let shape = &t.ty(r.args[0]).shape;
    if !perm.iter().filter(|&&p| !shape[p].is(1)).is_sorted() {
        return Err(NoMatch);
    }
    t.reshape(r.args[0], t.shape(r.class))
}

fn broadcast_to_reshape(t: &mut Terms, r: &Root) -> RuleResult {
    let (from, to) = (&t.ty(r.args[0]).shape, &t.ty(r.class).shape);
    let lead = to.rank() - from.rank();
    if !are_units(&to[..lead]) || to[lead..] != from[..] {
        return Err(NoMatch);
    }
    t.reshape(r.args[0], t.shape(r.class))
}

fn map_of_broadcast(t: &mut Terms, r: &Root) -> RuleResult {
    let out = t.shape(r.class);
    let mut args = r.args.to_vec();
    for i in 0..args.len() {
        let Some(x) = t.operand_of(args[i], is_broadcast) else {
            continue;
        };
        let old = std::mem::replace(&mut args[i], x);
        if t.map_shape(&args).ok_or(NoMatch)? != out {
            args[i] = old;
        }
    }
    if args == r.args {
        return Err(NoMatch);
    }
    t.add(r.op.clone(), &args)
}

fn slice_slice(t: &mut Terms, r: &Root) -> RuleResult {
    let mut op = r.op.clone();
    let Op::Slice { starts, steps, .. } = &mut op else {
        return Err(NoMatch);
    };
    let below = |op: &Op, ch: &[Id]| match op {
        Op::Slice { starts, steps, .. } => Some((starts.clone(), steps.clone(), ch[0])),
        _ => None,
    };
    let (starts_below, steps_below, x) = t.find(r.args[0], below).ok_or(NoMatch)?;
    for (axis, start) in starts_below.into_iter().enumerate() {
        starts[axis] = start + starts[axis].scale(steps_below[axis]);
        steps[axis] *= steps_below[axis];
    }
    t.add(op, &[x])
}

/// The one axis along which a slice of unit step is not whole.
fn sliced_axis(t: &Terms, r: &Root) -> Option<usize> {
    let Op::Slice {
        starts,
        sizes,
        steps,
    } = r.op
    else {
        return None;
    };
    let shape = &t.ty(r.args[0]).shape;
    let is_cut = |i: &usize| !starts[*i].is(0) || sizes[*i] != shape[*i];
    let mut cut = (0..shape.rank()).filter(is_cut);
    let axis = cut.next()?;
    (cut.next().is_none() && are_ones(steps)).then_some(axis)
}

fn slice_of_concat(t: &mut Terms, r: &Root) -> RuleResult {
    let axis = sliced_axis(t, r).ok_or(NoMatch)?;
    let mut op = r.op.clone();
    let Op::Slice { starts, sizes, .. } = &mut op else {
        return Err(NoMatch);
    };
    let parts = |op: &Op, ch: &[Id]| (*op == Op::Concat { axis }).then(|| ch.to_vec());
    for part in t.find(r.args[0], parts).ok_or(NoMatch)? {
        let shape = &t.ty(part).shape;
        if is_within(&starts[axis], &sizes[axis], &shape[axis]) {
            return if **shape == **sizes {
                Ok(part)
            } else {
                t.add(op, &[part])
            };
        }
        starts[axis] = starts[axis].clone() - shape[axis].clone();
    }
    Err(NoMatch)
}

/// True when `size` elements from `start` on are known to lie within an extent.
fn is_within(start: &Dim, size: &Dim, extent: &Dim) -> bool {
    let rest = extent.clone() - start.clone() - size.clone();
    let bounds = start.as_const().zip(rest.as_const());
    bounds.is_some_and(|(start, rest)| start >= 0 && rest >= 0)
}

/// A slice of unit steps.
struct UnitSlice {
    source: Id,
    starts: Vec<Dim>,
    sizes: Vec<Dim>,
}

impl UnitSlice {
    fn of(op: &Op, ch: &[Id]) -> Option<UnitSlice> {
        match op {
            Op::Slice {
                starts,
                sizes,
                steps,
            } if are_ones(steps) => Some(UnitSlice {
                source: ch[0],
                starts: starts.clone(),
                sizes: sizes.clone(),
            }),
            _ => None,
        }
    }

    fn end(&self, axis: usize) -> Dim {
        self.starts[axis].clone() + self.sizes[axis].clone()
    }

    /// True when both begin at the same place along all other axes.
    fn is_beside(&self, other: &UnitSlice, axis: usize) -> bool {
        (0..self.starts.len()).all(|i| i == axis || self.starts[i] == other.starts[i])
    }

    /// The slice itself, or its source when it is whole.
    fn add(self, t: &mut Terms) -> RuleResult {
        if self.starts.iter().all(|s| s.is(0)) && *t.ty(self.source).shape == self.sizes {
            return Ok(self.source);
        }
        let op = Op::Slice {
            steps: vec![1; self.sizes.len()],
            starts: self.starts,
            sizes: self.sizes,
        };
        t.add(op, &[self.source])
    }
}

fn concat_of_slices(t: &mut Terms, r: &Root) -> RuleResult {
    let Op::Concat { axis } = *r.op else {
        return Err(NoMatch);
    };
    let (&first, others) = r.args.split_first().ok_or(NoMatch)?;
    let mut joined = t.find(first, UnitSlice::of).ok_or(NoMatch)?;
    let mut end = joined.end(axis);
    for &part in others {
        let adjoins = |s: &UnitSlice| t.same(s.source, joined.source) && s.starts[axis] == end;
        let slice = |op: &Op, ch: &[Id]| UnitSlice::of(op, ch).filter(adjoins);
        let next = t.find(part, slice).ok_or(NoMatch)?;
        if !next.is_beside(&joined, axis) {
            return Err(NoMatch);
        }
        end = next.end(axis);
    }
    joined.sizes = t.shape(r.class);
    joined.add(t)
}

fn gather_constant(t: &mut Terms, r: &Root) -> RuleResult {
    let Op::Gather { axis } = *r.op else {
        return Err(NoMatch);
    };
    if !are_units(&t.ty(r.args[1]).shape) {
        return Err(NoMatch);
    }
    let index = t.uniform(r.args[1]).ok_or(NoMatch)? as i64;
    let mut sizes = t.shape(r.args[0]);
    let mut starts = vec![Dim::constant(0); sizes.len()];
    starts[axis] = position(index, &sizes[axis])?;
    sizes[axis] = 1.into();
    let op = Op::Slice {
        steps: vec![1; sizes.len()],
        starts,
        sizes,
    };
    let slice = t.add(op, &[r.args[0]])?;
    t.reshape(slice, t.shape(r.class))
}

/// The position of an index, which may count from the end. Rejected unless it is known to be in
/// range: an index out of range must stay a run-time error.
fn position(index: i64, extent: &Dim) -> Result<Dim, Miss> {
    let start = if index < 0 {
        extent.clone() + index.into()
    } else {
        index.into()
    };
    let known = start.as_const().zip(extent.as_const());
    if known.is_some_and(|(s, n)| 0 <= s && s < n) {
        Ok(start)
    } else {
        Err(rejected("the index is not known to be in range"))
    }
}
