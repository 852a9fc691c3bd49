//! Reductions of `f32` through precompiled kernels: by rows along the last axis in memory, by columns along others.
//!
//! Axes are taken in their order in memory, neighbours that are reduced, or kept, together: `[n, c, h, w]` without `n`, `h` and `w` is
//! reduced by rows to `[n, c]`, and that by columns to `[c]`. A reduction by columns of many rows is one by parts, and then one of their
//! results: sums have fewer terms, and threads share the rows.

use super::rejected::Rejected;
use super::rows::Rows;
use super::strided::Strided;
use super::task::{Call, Context, Place, Ptr, Task, pointers, read, result};
use crate::ir::{Node, NodeId, Op, ReduceKind};
use gristmill_kernels::columns::ColumnsDesc;
use gristmill_kernels::rows::{self, ReduceDesc};
use gristmill_kernels::{Isa, calls};
use std::cmp::Reverse;

/// A reduction of `f32` where no axis is empty.
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let Op::Reduce { kind, axes, .. } = &node.op else {
        return Err(Rejected::Empty);
    };
    let shape = cx.body.shape(node.inputs[0]);
    if shape.contains(&0) {
        return Err(Rejected::Empty);
    }
    let first = shape.len() - axes.len();
    let are_last = axes[0] == first;
    let has_rows = |x: &Strided| are_last && Rows::of(x, first, 1).is_ok();
    let is_taken = |x: &Strided| has_rows(x) || column_groups(*kind, x, axes).is_some();
    let x = cx.view(node.inputs[0], is_taken);
    if has_rows(&x) {
        return by_rows(cx, id, node, &x, first);
    }
    let groups = column_groups(*kind, &x, axes).ok_or(Rejected::Strides(0))?;
    by_passes(cx, id, node, &x, &passes(*kind, groups))
}

/// Groups for reductions by columns.
fn column_groups(kind: ReduceKind, x: &Strided, axes: &[usize]) -> Option<Vec<Group>> {
    match kind {
        // Products of `f32` overflow where those of loops, which are of `f64`, do not.
        ReduceKind::Prod => None,
        _ => groups(x, axes),
    }
}

/// A reduction of the axes from `first` on, whose rows are contiguous.
fn by_rows(
    cx: &Context,
    id: NodeId,
    node: &Node,
    x: &Strided,
    first: usize,
) -> Result<Task, Rejected> {
    let Op::Reduce { kind, .. } = node.op else {
        return Err(Rejected::Empty);
    };
    let rows = Rows::of(x, first, 1)?;
    let desc = ReduceDesc {
        rows: rows.dims,
        ..ReduceDesc::new(cx.isa, kernel_kind(kind), rows.n_rows, rows.n_cols)
    };
    Task::single(cx, id, node, row_call(&desc, read(x), result(node)))
}

fn row_call(desc: &ReduceDesc, from: Ptr, to: Ptr) -> Call {
    let ptrs = pointers(from, Ptr::Null, to, false, vec![]);
    let n_rows = desc.n_items();
    let ns = (n_rows * desc.n_cols) as f64 * 0.06 + n_rows as f64 * 10.0;
    Call::new(calls::gm_reduce_f32(desc), ptrs, n_rows, ns)
}

fn kernel_kind(kind: ReduceKind) -> rows::ReduceKind {
    match kind {
        ReduceKind::Sum => rows::ReduceKind::Sum,
        ReduceKind::Mean => rows::ReduceKind::Mean,
        ReduceKind::Max => rows::ReduceKind::Max,
        ReduceKind::Min => rows::ReduceKind::Min,
        ReduceKind::Prod => rows::ReduceKind::Product,
    }
}

/// Axes that are neighbours in memory and reduced, or kept, together.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Group {
    extent: usize,
    is_reduced: bool,
}

/// The axes of `x` in their order in memory. `None` where elements are not contiguous, or kept axes have another order than in the
/// result.
fn groups(x: &Strided, axes: &[usize]) -> Option<Vec<Group>> {
    let order = memory_order(x)?;
    let kept = order.iter().filter(|a| !axes.contains(a));
    if !kept.is_sorted() {
        return None;
    }
    let mut groups: Vec<Group> = Vec::new();
    for axis in order {
        let (extent, is_reduced) = (x.shape[axis], axes.contains(&axis));
        match groups.last_mut() {
            Some(last) if last.is_reduced == is_reduced => last.extent *= extent,
            _ => groups.push(Group { extent, is_reduced }),
        }
    }
    Some(groups)
}

/// The axes of more than one element, outer ones first. `None` where elements are not contiguous.
fn memory_order(x: &Strided) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..x.shape.len()).filter(|&a| x.shape[a] != 1).collect();
    order.sort_by_key(|&a| Reverse(x.strides[a]));
    let mut n_inner = 1;
    for &axis in order.iter().rev() {
        if x.strides[axis] != n_inner as i64 {
            return None;
        }
        n_inner *= x.shape[axis];
    }
    Some(order)
}

/// One kernel call: `[batch, rows, columns]` to `[batch, parts, columns]`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pass {
    kind: ReduceKind,
    shape: [usize; 3],
    part_rows: usize,
    /// Divisor of a mean.
    n_averaged: usize,
}

impl Pass {
    fn columns(&self, isa: Isa) -> ColumnsDesc {
        ColumnsDesc {
            part_rows: self.part_rows,
            n_averaged: self.n_averaged,
            ..ColumnsDesc::new(isa, kernel_kind(self.kind), self.shape)
        }
    }

    fn n_results(&self) -> usize {
        let [batch, rows, cols] = self.shape;
        batch * rows.div_ceil(self.part_rows) * cols
    }

    fn size_bytes(&self) -> usize {
        self.n_results() * size_of::<f32>()
    }

    fn call(&self, isa: Isa, from: Ptr, to: Ptr) -> Call {
        let [batch, rows, cols] = self.shape;
        if cols == 1 && self.part_rows == rows {
            let kind = kernel_kind(self.kind);
            return row_call(&ReduceDesc::new(isa, kind, batch, rows), from, to);
        }
        let desc = self.columns(isa);
        let ptrs = pointers(from, Ptr::Null, to, false, vec![]);
        let (items, ns) = (desc.n_items(), (batch * rows * cols) as f64 * 0.06);
        Call::new(calls::gm_reduce_columns_f32(&desc), ptrs, items, ns)
    }
}

/// The passes that reduce groups of axes, those of the largest extent first. Means are means of means of as many elements.
fn passes(kind: ReduceKind, mut groups: Vec<Group>) -> Vec<Pass> {
    let mut passes = Vec::new();
    let extent = |groups: &[Group]| groups.iter().map(|g| g.extent).product();
    loop {
        let reduced = (0..groups.len()).filter(|&i| groups[i].is_reduced);
        let Some(largest) = reduced.max_by_key(|&i| groups[i].extent) else {
            break;
        };
        let (batch, cols) = (extent(&groups[..largest]), extent(&groups[largest + 1..]));
        push_passes(&mut passes, kind, [batch, groups[largest].extent, cols]);
        groups.remove(largest);
    }
    if passes.is_empty() {
        push_passes(&mut passes, kind, [1, 1, extent(&groups)]);
    }
    passes
}

/// The passes of one reduction, by parts as long as there are many rows.
fn push_passes(passes: &mut Vec<Pass>, kind: ReduceKind, shape: [usize; 3]) {
    let [batch, n_averaged, cols] = shape;
    let mut rows = n_averaged;
    loop {
        let part_rows = part_rows(rows, cols);
        let kind = match kind {
            // The parts have different numbers of rows.
            ReduceKind::Mean if part_rows < rows => ReduceKind::Sum,
            kind => kind,
        };
        passes.push(Pass {
            kind,
            shape: [batch, rows, cols],
            part_rows,
            n_averaged,
        });
        if part_rows == rows {
            return;
        }
        rows = rows.div_ceil(part_rows);
    }
}

/// Rows of a part.
fn part_rows(rows: usize, cols: usize) -> usize {
    let most = (PART_ELEMENTS / cols).clamp(MIN_PART_ROWS, MAX_PART_ROWS);
    if cols == 1 || rows <= 2 * most {
        return rows;
    }
    rows.div_ceil(rows.div_ceil(most))
}

/// Elements of a part: 128 KiB, some microseconds.
const PART_ELEMENTS: usize = 32 << 10;
/// Rows of a part, that there be few results.
const MIN_PART_ROWS: usize = 64;
/// Rows of a part, that rounding errors stay small.
const MAX_PART_ROWS: usize = 1024;

fn by_passes(
    cx: &Context,
    id: NodeId,
    node: &Node,
    x: &Strided,
    passes: &[Pass],
) -> Result<Task, Rejected> {
    let last = passes.len() - 1;
    let mut calls = passes.iter().enumerate().map(|(i, pass)| {
        let from = match i {
            0 => read(x),
            i => Ptr::Read(Place::Temp(i - 1), 0),
        };
        let to = match i == last {
            true => result(node),
            false => Ptr::Write(Place::Temp(i), 0),
        };
        pass.call(cx.isa, from, to)
    });
    let first = calls.next().ok_or(Rejected::Empty)?;
    let mut task = Task::single(cx, id, node, first)?;
    task.calls.extend(calls);
    task.temps = passes[..last].iter().map(Pass::size_bytes).collect();
    Ok(task)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codegen::cpu::tests::harness::{check, steps};
    use crate::codegen::testing::Rng;
    use crate::ir::{Graph, GraphBuilder, ValueId};
    use gristmill_runtime::DType;

    fn view(shape: &[usize], strides: &[i64]) -> Strided {
        Strided {
            base: ValueId::new(0),
            offset: 0,
            shape: shape.into(),
            strides: strides.into(),
        }
    }

    fn shapes(kind: ReduceKind, x: &Strided, axes: &[usize]) -> Vec<[usize; 3]> {
        let passes = passes(kind, groups(x, axes).unwrap());
        passes.iter().map(|pass| pass.shape).collect()
    }

    #[test]
    fn axes_between_kept_ones_are_reduced_one_after_the_other() {
        let images = view(&[2, 3, 4, 5], &[60, 20, 5, 1]);
        let by_channel = shapes(ReduceKind::Sum, &images, &[0, 2, 3]);
        assert_eq!(by_channel, [[6, 20, 1], [1, 2, 3]]);
        let channels_last = view(&[2, 3, 4, 5], &[60, 1, 15, 3]);
        let by_channel = shapes(ReduceKind::Sum, &channels_last, &[0, 2, 3]);
        assert_eq!(by_channel, [[1, 40, 3]]);
        assert_eq!(
            shapes(ReduceKind::Max, &view(&[1, 5], &[5, 1]), &[0]),
            [[1, 1, 5]]
        );
    }

    #[test]
    fn views_that_kernels_cannot_take() {
        assert_eq!(groups(&view(&[4, 5], &[10, 1]), &[0]), None);
        assert_eq!(groups(&view(&[4, 5], &[0, 1]), &[0]), None);
        assert_eq!(groups(&view(&[2, 4, 5], &[20, 1, 4]), &[0]), None);
    }

    #[test]
    fn many_rows_are_reduced_by_parts() {
        let x = view(&[100_000, 10], &[10, 1]);
        let passes = passes(ReduceKind::Mean, groups(&x, &[0]).unwrap());
        let kinds: Vec<ReduceKind> = passes.iter().map(|pass| pass.kind).collect();
        assert_eq!(kinds, [ReduceKind::Sum, ReduceKind::Mean]);
        assert_eq!(passes[1].n_averaged, 100_000);
        assert_eq!(passes[0].n_results(), passes[1].shape[1] * 10);
        assert!(
            passes
                .iter()
                .all(|pass| pass.part_rows <= 2 * MAX_PART_ROWS)
        );
    }

    /// A reduction of a permuted operand.
    fn reduction(kind: ReduceKind, shape: &[usize], perm: &[usize], axes: &[usize]) -> Graph {
        let mut b = GraphBuilder::new("reduction");
        let x = b.input("x", DType::F32, shape.iter().copied());
        let x = b.transpose(x, perm).unwrap();
        let y = b.reduce(kind, x, axes, false).unwrap();
        b.output("y", y);
        b.finish().unwrap()
    }

    #[test]
    fn random_axes_agree_with_the_interpreter() {
        let rng = &mut Rng(21);
        for i in 0..60 {
            let rank = 1 + rng.below(4);
            let shape: Vec<usize> = (0..rank).map(|_| 1 + rng.below(19)).collect();
            let mut perm: Vec<usize> = (0..rank).collect();
            if i % 2 == 1 {
                perm.rotate_left(rng.below(rank));
            }
            let mut axes: Vec<usize> = (0..rank).filter(|_| rng.below(2) == 0).collect();
            if axes.is_empty() {
                axes.push(rng.below(rank));
            }
            use ReduceKind::{Max, Mean, Min, Sum};
            let kind = [Sum, Mean, Max, Min][rng.below(4)];
            let x = rng.tensor(DType::F32, &shape, -1.0, 1.0);
            check(&reduction(kind, &shape, &perm, &axes), &[x], 1e-5, rng);
        }
    }

    #[test]
    fn long_columns_are_reduced_by_parts() {
        let rng = &mut Rng(22);
        for (shape, axes) in [
            (vec![9000, 7], vec![0]),
            (vec![3, 2500, 40], vec![1]),
            (vec![40, 6, 900], vec![0, 2]),
            (vec![700, 1100], vec![0]),
        ] {
            let perm: Vec<usize> = (0..shape.len()).collect();
            for kind in [ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Max] {
                let g = reduction(kind, &shape, &perm, &axes);
                let x = rng.tensor(DType::F32, &shape, 0.0, 1.0);
                check(&g, &[x], 1e-5, rng);
                assert_eq!(steps(&g).len(), 2, "{shape:?}");
            }
        }
    }

    #[test]
    fn channels_of_a_transposed_view_are_reduced_where_they_lie() {
        let g = reduction(ReduceKind::Sum, &[2, 5, 5, 8], &[0, 3, 1, 2], &[0, 2, 3]);
        assert_eq!(steps(&g), ["test_0_0_gm_reduce_columns_f32"]);
        let g = reduction(ReduceKind::Mean, &[2, 5, 5, 8], &[0, 3, 1, 2], &[2, 3]);
        assert_eq!(steps(&g), ["test_0_0_gm_reduce_columns_f32"]);
    }
}
