//! Ops that work on memory: cumulative sums line by line, scattered updates one by one.

use super::reduce::beats;
use super::{Emit, Ix, Puller};
use crate::error::{Error, Result};
use crate::ir::{Extremum, Node, Op, ScalarOp, ScatterKind};
use gristmill_runtime::DType;
use std::hash::Hash;

/// A line of a cumulative sum.
struct Line<'n, V> {
    node: &'n Node,
    axis: usize,
    exclusive: bool,
    reverse: bool,
    /// Index of the line's first element.
    start: &'n [Ix<V>],
    /// Buffer of the result.
    out: V,
}

impl<V: Copy> Line<'_, V> {
    /// Index of the element at step `i` of a line of `n`.
    fn index<E: Emit<Value = V>>(&self, e: &mut E, n: i64, i: V) -> Vec<Ix<V>> {
        let mut at = self.start.to_vec();
        at[self.axis] = Ix::V(i);
        if self.reverse {
            let last = e.index(n - 1);
            at[self.axis] = Ix::V(e.index_sub(last, i));
        }
        at
    }
}

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// The running sums of the line at `at` (0 along the axis) of a `CumSum`, written to `out`. Floats
    /// accumulate in `f64`.
    pub(in crate::codegen) fn cum_sum_line<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
        out: V,
    ) -> Result<()> {
        let Op::CumSum {
            axis,
            exclusive,
            reverse,
        } = node.op
        else {
            return Err(wrong_phase(node));
        };
        let line = Line {
            node,
            axis,
            exclusive,
            reverse,
            start: at,
            out,
        };
        let y = node.outputs[0];
        let n = self.body.shape(y)[axis] as i64;
        let zero = e.constant(sum_dtype(self.body.dtype(y)), 0);
        e.for_loop(Ix::C(0), Ix::C(n), 1, &[zero], |e, i, carried| {
            self.scoped(|p| Ok(vec![p.cum_sum_step(e, &line, i, carried[0])?]))
        })?;
        Ok(())
    }

    /// Writes the sum at step `i` of a line, given the sum before; returns the sum after.
    fn cum_sum_step<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        line: &Line<V>,
        i: V,
        sum: V,
    ) -> Result<V> {
        let (x, y) = (line.node.inputs[0], line.node.outputs[0]);
        let (shape, dtype) = (self.body.shape(y), self.body.dtype(y));
        let acc = sum_dtype(dtype);
        let at = line.index(e, shape[line.axis] as i64, i);
        let v = self.value(e, x, &at)?;
        let v = e.convert(v, dtype, acc)?;
        let next = e.scalar_op(ScalarOp::Add, &[acc, acc], &[sum, v])?;
        let shown = e.convert(if line.exclusive { sum } else { next }, acc, dtype)?;
        let linear = e.linearise(&at, shape);
        e.store(dtype, shown, line.out, linear);
        Ok(next)
    }

    /// Joins the update at `at` of a scatter into `out`, which holds the data.
    pub(in crate::codegen) fn scatter_update<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
        out: V,
    ) -> Result<()> {
        let (updates, y) = (node.inputs[2], node.outputs[0]);
        let (shape, dtype) = (self.body.shape(y), self.body.dtype(y));
        let (to, kind) = self.scatter_target(e, node, at)?;
        let linear = e.linearise(&to, shape);
        let new = self.value(e, updates, at)?;
        let old = e.load(dtype, out, linear);
        let joined = join(e, kind, dtype, old, new)?;
        e.store(dtype, joined, out, linear);
        Ok(())
    }

    /// Index in the data that the update at `at` goes to.
    fn scatter_target<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<(Vec<Ix<V>>, ScatterKind)> {
        let (data, indices) = (self.body.shape(node.inputs[0]), node.inputs[1]);
        match &node.op {
            Op::ScatterElements { axis, kind } => {
                let mut to = at.to_vec();
                to[*axis] = self.index(e, indices, at, data[*axis])?;
                Ok((to, *kind))
            }
            Op::ScatterNd { kind } => {
                let Some((&n_indexed, lead)) = self.body.shape(indices).split_last() else {
                    return Err(wrong_phase(node));
                };
                let (index_at, inner) = at.split_at(lead.len());
                let mut to = self.index_tuple(e, indices, index_at, &data[..n_indexed])?;
                to.extend_from_slice(inner);
                Ok((to, *kind))
            }
            _ => Err(wrong_phase(node)),
        }
    }
}

/// Accumulator dtype of running sums.
fn sum_dtype(dtype: DType) -> DType {
    if dtype.is_float() { DType::F64 } else { dtype }
}

fn join<E: Emit>(
    e: &mut E,
    kind: ScatterKind,
    dtype: DType,
    old: E::Value,
    new: E::Value,
) -> Result<E::Value> {
    let extremum = match kind {
        ScatterKind::Set => return Ok(new),
        ScatterKind::Add => return e.scalar_op(ScalarOp::Add, &[dtype, dtype], &[old, new]),
        ScatterKind::Mul => return e.scalar_op(ScalarOp::Mul, &[dtype, dtype], &[old, new]),
        ScatterKind::Max => Extremum::Max,
        ScatterKind::Min => Extremum::Min,
    };
    let better = beats(e, new, old, dtype, extremum)?;
    Ok(e.choose(better, new, old))
}

fn wrong_phase(node: &Node) -> Error {
    Error::internal(format!("{} is in a phase of another kind", node.op.name()))
}
