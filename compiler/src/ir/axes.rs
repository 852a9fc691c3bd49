//! Order of axes, a column of the op table: the op below a transpose that stood on its operands.

use super::ops::{Layout, Op};

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
pub(super) fn moved<T: Clone>(values: &[T], perm: &[usize]) -> Vec<T> {
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
    pub(super) fn passed(&self, op: Op) -> Option<Passed> {
        let perm = self.perm.to_vec();
        Some(Passed { op, perm })
    }

    /// The result lacks the axes in `gone`, unless they stay with extent 1.
    pub(super) fn reduced(&self, op: Op, gone: &[usize], keepdims: bool) -> Option<Passed> {
        if keepdims {
            return self.passed(op);
        }
        let perm = without(self.perm, gone);
        Some(Passed { op, perm })
    }
}

/// The op with its attribute `axis` renamed.
pub(super) fn along(t: &Transposed) -> Option<Op> {
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
