//! Order of axes, a column of the op table: the op below a transpose that stood on its operands.

use super::dim::Dim;
use super::ops::{Layout, Op, ReduceKind};

/// Passage of a transpose of operands through an op.
#[derive(Clone, Copy)]
pub enum Axes {
    /// It stops at the op.
    Fixed,
    /// A transpose of any operand passes to the result; operands of lower rank are extended, and all others get the inverse.
    Aligned(fn(&Transposed) -> Option<Op>),
    /// A transpose of the first operand passes; the other operands stay as they are.
    Leading(fn(&Transposed) -> Option<Passed>),
}

/// An op whose operand is a transpose.
pub struct Transposed<'a> {
    /// The op above the transpose.
    pub op: &'a Op,
    /// Axis `i` above is axis `perm[i]` below.
    pub perm: &'a [usize],
    /// Ranks of the op's operands.
    pub ranks: &'a [usize],
}

/// The op below a transpose, and the permutation above it.
pub struct Passed {
    /// The op on the operand as it was before the transpose.
    pub op: Op,
    /// Permutation of its result.
    pub perm: Vec<usize>,
}

/// The permutation that undoes another.
pub fn invert(perm: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; perm.len()];
    for (i, &p) in perm.iter().enumerate() {
        inverse[p] = i;
    }
    inverse
}

/// The permutation that brings activations of a layout to channels first.
pub fn channels_first(rank: usize, layout: Layout) -> Vec<usize> {
    match layout {
        Layout::ChannelsFirst => (0..rank).collect(),
        Layout::ChannelsLast => [0, rank - 1].into_iter().chain(1..rank - 1).collect(),
    }
}

/// Entry `i` of a per-axis attribute above becomes entry `perm[i]` below.
fn moved<T: Clone>(values: &[T], perm: &[usize]) -> Vec<T> {
    let inverse = invert(perm);
    inverse.iter().map(|&i| values[i].clone()).collect()
}

/// The permutation that is left when the axes above in `gone` are dropped.
fn without(perm: &[usize], gone: &[usize]) -> Vec<usize> {
    let kept: Vec<usize> = (0..perm.len())
        .filter(|i| !gone.contains(i))
        .map(|i| perm[i])
        .collect();
    let rank_of = |p: &usize| kept.iter().filter(|q| *q < p).count();
    kept.iter().map(rank_of).collect()
}

impl Transposed<'_> {
    /// The result has the axes of the operand, in its order.
    fn passed(&self, op: Op) -> Option<Passed> {
        let perm = self.perm.to_vec();
        Some(Passed { op, perm })
    }

    /// The result lacks the axes in `gone`, unless they stay with extent 1.
    fn reduced(&self, op: Op, gone: &[usize], keepdims: bool) -> Option<Passed> {
        if keepdims {
            return self.passed(op);
        }
        let perm = without(self.perm, gone);
        Some(Passed { op, perm })
    }
}

pub(super) fn map(t: &Transposed) -> Option<Op> {
    Some(t.op.clone())
}

pub(super) fn concat(t: &Transposed) -> Option<Op> {
    let Op::Concat { axis } = *t.op else {
        return None;
    };
    let axis = t.perm[axis];
    Some(Op::Concat { axis })
}

pub(super) fn slice(t: &Transposed) -> Option<Passed> {
    let Op::Slice {
        starts,
        sizes,
        steps,
    } = t.op
    else {
        return None;
    };
    t.passed(Op::Slice {
        starts: moved(starts, t.perm),
        sizes: moved(sizes, t.perm),
        steps: moved(steps, t.perm),
    })
}

pub(super) fn pad(t: &Transposed) -> Option<Passed> {
    let Op::Pad { low, high, mode } = t.op else {
        return None;
    };
    t.passed(Op::Pad {
        low: moved(low, t.perm),
        high: moved(high, t.perm),
        mode: *mode,
    })
}

/// The op with its attribute `axis` renamed.
fn along(t: &Transposed) -> Option<Op> {
    let mut op = t.op.clone();
    let (Op::CumSum { axis, .. }
    | Op::Softmax { axis, .. }
    | Op::ArgReduce { axis, .. }
    | Op::Gather { axis }) = &mut op
    else {
        return None;
    };
    *axis = t.perm[*axis];
    Some(op)
}

/// Lines along one axis, which is renamed.
pub(super) fn lines(t: &Transposed) -> Option<Passed> {
    t.passed(along(t)?)
}

/// A product in another order rounds and overflows differently.
pub(super) fn reduce(t: &Transposed) -> Option<Passed> {
    let Op::Reduce {
        kind,
        axes,
        keepdims,
    } = t.op
    else {
        return None;
    };
    if *kind == ReduceKind::Prod {
        return None;
    }
    let mut below: Vec<usize> = axes.iter().map(|&a| t.perm[a]).collect();
    below.sort_unstable();
    let op = Op::Reduce {
        kind: *kind,
        axes: below,
        keepdims: *keepdims,
    };
    t.reduced(op, axes, *keepdims)
}

pub(super) fn arg_reduce(t: &Transposed) -> Option<Passed> {
    let Op::ArgReduce { axis, keepdims, .. } = *t.op else {
        return None;
    };
    t.reduced(along(t)?, &[axis], keepdims)
}

/// The normalised axes stay in place.
pub(super) fn norm(t: &Transposed) -> Option<Passed> {
    let (Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. }) = *t.op else {
        return None;
    };
    let stay = (axis..t.perm.len()).all(|i| t.perm[i] == i);
    stay.then(|| t.passed(t.op.clone())).flatten()
}

/// The axes are renamed.
pub(super) fn standardize(t: &Transposed) -> Option<Passed> {
    let Op::Standardize { axes, epsilon } = t.op else {
        return None;
    };
    let mut axes: Vec<usize> = axes.iter().map(|&a| t.perm[a]).collect();
    axes.sort_unstable();
    let epsilon = *epsilon;
    t.passed(Op::Standardize { axes, epsilon })
}

pub(super) fn broadcast(t: &Transposed) -> Option<Passed> {
    let Op::Broadcast { shape } = t.op else {
        return None;
    };
    let lead = shape.len() - t.perm.len();
    let perm: Vec<usize> = (0..lead).chain(t.perm.iter().map(|p| p + lead)).collect();
    let shape: Vec<Dim> = moved(shape, &perm);
    let op = Op::Broadcast { shape };
    Some(Passed { op, perm })
}

/// Indices of rank 0 drop the axis, those of rank 1 keep it.
pub(super) fn gather(t: &Transposed) -> Option<Passed> {
    let Op::Gather { axis } = *t.op else {
        return None;
    };
    match t.ranks[1] {
        rank @ (0 | 1) => t.reduced(along(t)?, &[axis], rank == 1),
        _ => None,
    }
}

/// By a weight matrix, and a transpose that leaves the last axis.
pub(super) fn matmul(t: &Transposed) -> Option<Passed> {
    let last = t.perm.len() - 1;
    let fits = t.perm[last] == last && t.ranks[1] == 2;
    fits.then(|| t.passed(Op::MatMul)).flatten()
}
