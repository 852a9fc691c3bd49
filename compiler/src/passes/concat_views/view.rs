//! Symbolic views: pieces of values, and a concatenation of pieces under a shape.

use crate::ir::{Dim, Op, ValueId};

/// Along each axis, `sizes` elements from `starts` in `steps`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cut {
    pub(super) starts: Vec<Dim>,
    pub(super) sizes: Vec<Dim>,
    pub(super) steps: Vec<i64>,
}

impl Cut {
    /// All of a shape.
    fn all(shape: &[Dim]) -> Cut {
        Cut {
            starts: vec![Dim::constant(0); shape.len()],
            sizes: shape.to_vec(),
            steps: vec![1; shape.len()],
        }
    }

    /// True along an axis of this extent that it leaves whole.
    fn is_whole(&self, axis: usize, extent: &Dim) -> bool {
        self.steps[axis] == 1 && self.sizes[axis] == *extent && self.starts[axis].is(0)
    }

    fn is_all(&self, shape: &[Dim]) -> bool {
        let mut axes = shape.iter().enumerate();
        axes.all(|(axis, extent)| self.is_whole(axis, extent))
    }

    /// First element and number of elements along an axis, where they are neighbours.
    fn range(&self, axis: usize) -> Option<(i64, i64)> {
        let (start, size) = (self.starts[axis].as_const()?, self.sizes[axis].as_const()?);
        (self.steps[axis] == 1 && size > 0).then_some((start, size))
    }

    fn set(&mut self, axis: usize, start: i64, size: i64) {
        self.starts[axis] = Dim::constant(start);
        self.sizes[axis] = Dim::constant(size);
        self.steps[axis] = 1;
    }

    /// Takes its axis `from` from axis `at` of another one.
    fn take(&mut self, axis: usize, from: &Cut, at: usize) {
        self.starts[axis] = from.starts[at].clone();
        self.sizes[axis] = from.sizes[at].clone();
        self.steps[axis] = from.steps[at];
    }

    fn op(self) -> Op {
        Op::Slice {
            starts: self.starts,
            sizes: self.sizes,
            steps: self.steps,
        }
    }
}

/// A reshape as axes that stay in front and behind, and a group of axes between them.
pub(super) struct Regroup {
    pub(super) front: usize,
    back: usize,
    pub(super) from: Vec<i64>,
    pub(super) to: Vec<i64>,
}

impl Regroup {
    /// `None` when extents of the group are symbolic or 0.
    pub(super) fn of(from: &[Dim], to: &[Dim]) -> Option<Regroup> {
        let front = from.iter().zip(to).take_while(|(a, b)| a == b).count();
        let rest = from[front..].iter().rev().zip(to[front..].iter().rev());
        let back = rest.take_while(|(a, b)| a == b).count();
        let group = |shape: &[Dim]| -> Option<Vec<i64>> {
            let group = shape[front..shape.len() - back].iter();
            group.map(|d| d.as_const().filter(|&n| n > 0)).collect()
        };
        let (from, to) = (group(from)?, group(to)?);
        let is_same = from.iter().product::<i64>() == to.iter().product::<i64>();
        is_same.then_some(Regroup {
            front,
            back,
            from,
            to,
        })
    }

    /// The cut of the operand, of shape `from`, whose reshape is a cut of the result.
    fn operand_cut(&self, cut: &Cut, from: &[Dim]) -> Option<Cut> {
        let mut made = Cut::all(from);
        for axis in 0..self.front {
            made.take(axis, cut, axis);
        }
        for i in 1..=self.back {
            made.take(from.len() - i, cut, cut.sizes.len() - i);
        }
        let is_cut = |&t: &usize| !cut.is_whole(self.front + t, &Dim::constant(self.to[t]));
        let Some(t) = (0..self.to.len()).find(is_cut) else {
            return Some(made);
        };
        let ((f, inner_from), (first, inner_to)) = (outermost(&self.from), outermost(&self.to));
        if t != first || (t + 1..self.to.len()).any(|t| is_cut(&t)) {
            return None;
        }
        let (start, size) = cut.range(self.front + t)?;
        let (start, size) = (start * inner_to, size * inner_to);
        let is_even = start % inner_from == 0 && size % inner_from == 0;
        let is_there = f < self.from.len();
        (is_even && is_there).then(|| {
            made.set(self.front + f, start / inner_from, size / inner_from);
            made
        })
    }

    /// The axis of the result that joins what `axis` of the operand does, and the elements on either side per step.
    fn joined_axis(&self, axis: usize) -> Option<(usize, i64, i64)> {
        let Some(i) = axis.checked_sub(self.front) else {
            return Some((axis, 1, 1));
        };
        if i >= self.from.len() {
            return Some((axis - self.from.len() + self.to.len(), 1, 1));
        }
        let ((f, inner_from), (t, inner_to)) = (outermost(&self.from), outermost(&self.to));
        let is_outermost = i == f && t < self.to.len();
        is_outermost.then_some((self.front + t, inner_from, inner_to))
    }
}

/// The first axis of more than one element, and the elements behind it per step.
pub(super) fn outermost(extents: &[i64]) -> (usize, i64) {
    let axis = extents.iter().position(|&n| n != 1).unwrap_or(0);
    let inner = extents.iter().skip(axis + 1).product();
    (axis, inner)
}

/// True when a transpose changes the order of elements in memory.
fn moves(shape: &[Dim], perm: &[usize]) -> bool {
    let wide: Vec<usize> = perm.iter().copied().filter(|&a| !shape[a].is(1)).collect();
    !wide.is_sorted()
}

fn permuted(shape: &[Dim], perm: &[usize]) -> Vec<Dim> {
    perm.iter().map(|&a| shape[a].clone()).collect()
}

/// A value through views.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) base: ValueId,
    pub(super) ops: Vec<Op>,
    /// Shapes of the base and of the result of each op.
    shapes: Vec<Vec<Dim>>,
}

impl Piece {
    pub(super) fn new(base: ValueId, shape: Vec<Dim>) -> Piece {
        Piece {
            base,
            ops: vec![],
            shapes: vec![shape],
        }
    }

    pub(super) fn shape(&self) -> &[Dim] {
        self.shapes.last().expect("there is one of the base")
    }

    fn push(&mut self, op: Op, shape: Vec<Dim>) {
        self.ops.push(op);
        self.shapes.push(shape);
    }

    /// Takes a reshape off the end.
    fn pop_reshape(&mut self) {
        if let Some(Op::Reshape { .. }) = self.ops.last() {
            self.ops.pop();
            self.shapes.pop();
        }
    }

    fn reshape(&mut self, shape: Vec<Dim>) {
        self.pop_reshape();
        if shape != self.shape() {
            let op = Op::Reshape {
                shape: shape.clone(),
            };
            self.push(op, shape);
        }
    }

    fn transpose(&mut self, perm: &[usize]) {
        let shape = permuted(self.shape(), perm);
        if !moves(self.shape(), perm) {
            return self.reshape(shape);
        }
        let perm = perm.to_vec();
        self.push(Op::Transpose { perm }, shape);
    }

    fn slice(&mut self, cut: Cut) {
        if cut.is_all(self.shape()) {
            return;
        }
        let sizes = cut.sizes.clone();
        match self.before_reshape(&cut) {
            Some(earlier) => {
                self.pop_reshape();
                self.slice(earlier);
                self.reshape(sizes);
            }
            None => self.push(cut.op(), sizes),
        }
    }

    /// The cut in front of the reshape at the end.
    fn before_reshape(&self, cut: &Cut) -> Option<Cut> {
        let [.., Op::Reshape { .. }] = self.ops[..] else {
            return None;
        };
        let [.., from, to] = &self.shapes[..] else {
            return None;
        };
        Regroup::of(from, to)?.operand_cut(cut, from)
    }
}

/// `reshape(concat(pieces))`.
#[derive(Clone, Debug)]
pub(super) struct Joined {
    pub(super) axis: usize,
    pub(super) pieces: Vec<Piece>,
    /// The shape, where it is not the one of the concatenation.
    pub(super) outer: Option<Vec<Dim>>,
    /// True when elements change their order.
    pub(super) is_moved: bool,
}

impl Joined {
    pub(super) fn new(pieces: Vec<Piece>, axis: usize) -> Joined {
        Joined {
            axis,
            pieces,
            outer: None,
            is_moved: false,
        }
    }

    /// The view under one more op; `None` when it has no such form.
    pub(super) fn under(&self, op: &Op, shape: &[Dim]) -> Option<Joined> {
        let mut made = self.clone();
        match op {
            Op::Reshape { .. } => made.reshape(shape.to_vec()),
            Op::Transpose { perm } => made.transpose(perm)?,
            Op::Slice {
                starts,
                sizes,
                steps,
            } => made.slice(Cut {
                starts: starts.clone(),
                sizes: sizes.clone(),
                steps: steps.clone(),
            })?,
            _ => return None,
        }
        Some(made)
    }

    /// Shape of the concatenation.
    pub(super) fn shape(&self) -> Vec<Dim> {
        let mut shape = self.pieces[0].shape().to_vec();
        for piece in &self.pieces[1..] {
            shape[self.axis] = shape[self.axis].clone() + piece.shape()[self.axis].clone();
        }
        shape
    }

    fn set_outer(&mut self, shape: Vec<Dim>) {
        self.outer = (shape != self.shape()).then_some(shape);
    }

    fn reshape(&mut self, shape: Vec<Dim>) {
        let is_pushed = self.outer.is_none() && self.reshape_pieces(&shape).is_some();
        if !is_pushed {
            self.set_outer(shape);
        }
    }

    /// Reshapes the pieces so that their concatenation has the given shape; `None`, and nothing done, when none has.
    fn reshape_pieces(&mut self, shape: &[Dim]) -> Option<()> {
        let regroup = Regroup::of(&self.shape(), shape)?;
        let (axis, n_from, n_to) = regroup.joined_axis(self.axis)?;
        let reshaped = |piece: &Piece| {
            let extent = piece.shape()[self.axis].scale(n_from);
            let mut shape = shape.to_vec();
            shape[axis] = extent.exact_div(&Dim::constant(n_to))?;
            Some(shape)
        };
        let shapes: Option<Vec<_>> = self.pieces.iter().map(reshaped).collect();
        for (piece, shape) in self.pieces.iter_mut().zip(shapes?) {
            piece.reshape(shape);
        }
        self.axis = axis;
        Some(())
    }

    fn transpose(&mut self, perm: &[usize]) -> Option<()> {
        if self.outer.is_some() {
            return None;
        }
        self.is_moved |= moves(&self.shape(), perm);
        self.axis = perm.iter().position(|&a| a == self.axis)?;
        for piece in &mut self.pieces {
            piece.transpose(perm);
        }
        Some(())
    }

    fn slice(&mut self, cut: Cut) -> Option<()> {
        let (shape, sizes) = (self.shape(), cut.sizes.clone());
        let cut = match &self.outer {
            Some(outer) => Regroup::of(&shape, outer)?.operand_cut(&cut, &shape)?,
            None => cut,
        };
        if cut.is_whole(self.axis, &shape[self.axis]) {
            self.slice_each(&cut);
        } else {
            self.slice_across(&cut)?;
        }
        self.set_outer(sizes);
        Some(())
    }

    /// A cut that leaves the joined axis whole.
    fn slice_each(&mut self, cut: &Cut) {
        for piece in &mut self.pieces {
            let mut own = cut.clone();
            own.sizes[self.axis] = piece.shape()[self.axis].clone();
            piece.slice(own);
        }
    }

    /// A cut through the joined axis.
    fn slice_across(&mut self, cut: &Cut) -> Option<()> {
        let (start, size) = cut.range(self.axis)?;
        let (mut first, mut kept) = (0, Vec::new());
        for piece in &self.pieces {
            let extent = piece.shape()[self.axis].as_const()?;
            let (low, high) = (start.max(first), (start + size).min(first + extent));
            if low < high {
                let (mut own, mut piece) = (cut.clone(), piece.clone());
                own.set(self.axis, low - first, high - low);
                piece.slice(own);
                kept.push(piece);
            }
            first += extent;
        }
        self.pieces = kept;
        (!self.pieces.is_empty()).then_some(())
    }

    /// The same elements of the one axis that the outer shape merges others to, in the order of the pieces, with extents of
    /// the merged axes and the permutation that puts the joined one first. `None` when it merges none.
    pub(super) fn in_order(&self) -> Option<(Joined, Reorder)> {
        let (shape, outer) = (self.shape(), self.outer.as_ref()?);
        let regroup = Regroup::of(&shape, outer)?;
        let at = self.axis.checked_sub(regroup.front)?;
        let n = regroup.from.len();
        if regroup.to.len() != 1 || at >= n {
            return None;
        }
        let front = regroup.front;
        let perm: Vec<usize> = [at]
            .into_iter()
            .chain((0..n).filter(|&i| i != at))
            .collect();
        let inner = perm.iter().map(|i| front + i);
        let whole: Vec<usize> = (0..front)
            .chain(inner)
            .chain(front + n..shape.len())
            .collect();
        let mut made = self.clone();
        made.outer = None;
        made.transpose(&whole)?;
        made.reshape(outer.clone());
        let reorder = Reorder {
            axis: front,
            extents: regroup.from,
            perm,
        };
        made.outer.is_none().then_some((made, reorder))
    }
}

/// A permutation of the elements of an axis: split to `extents`, transposed and merged.
#[derive(Clone, Debug)]
pub(super) struct Reorder {
    pub(super) axis: usize,
    pub(super) extents: Vec<i64>,
    pub(super) perm: Vec<usize>,
}
