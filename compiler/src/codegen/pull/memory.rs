//! Ops that work on memory: cumulative sums line by line, scattered updates one by one.

use super::heavy::beats;
use super::{Emit, Ix, Puller};
use crate::error::{Error, Result};
use crate::ir::{Extremum, Node, Op, ScalarOp, ScatterKind};
use gristmill_runtime::DType;
use std::hash::Hash;

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// The running sums of the line at `at` (0 along the axis) of a `CumSum`, written to `out`. Floats accumulate in `f64`.
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
        let (x, y) = (node.inputs[0], node.outputs[0]);
        let (shape, dtype) = (self.body.shape(y).to_vec(), self.body.dtype(y));
        let acc = if dtype.is_float() { DType::F64 } else { dtype };
        let n = shape[axis] as i64;
        let zero = e.constant(acc, 0);
        e.for_loop(Ix::C(0), Ix::C(n), 1, &[zero], |e, i, carried| {
            self.scoped(|p| {
                let mut at = at.to_vec();
                at[axis] = if reverse {
                    let last = e.index(n - 1);
                    Ix::V(e.index_sub(last, i))
                } else {
                    Ix::V(i)
                };
                let v = p.value(e, x, &at)?;
                let v = e.convert(v, dtype, acc)?;
                let next = e.scalar_op(ScalarOp::Add, &[acc, acc], &[carried[0], v])?;
                let shown = e.convert(if exclusive { carried[0] } else { next }, acc, dtype)?;
                let linear = e.linearise(&at, &shape);
                e.store(dtype, shown, out, linear);
                Ok(vec![next])
            })
        })?;
        Ok(())
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
        let (shape, dtype) = (self.body.shape(y).to_vec(), self.body.dtype(y));
        let (to, kind) = self.scatter_target(e, node, at)?;
        let linear = e.linearise(&to, &shape);
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
        let (data, indices) = (self.body.shape(node.inputs[0]).to_vec(), node.inputs[1]);
        match &node.op {
            Op::ScatterElements { axis, kind } => {
                let mut to = at.to_vec();
                to[*axis] = self.index(e, indices, at, data[*axis])?;
                Ok((to, *kind))
            }
            Op::ScatterNd { kind } => {
                let index_shape = self.body.shape(indices).to_vec();
                let lead = index_shape.len() - 1;
                let mut to = Vec::with_capacity(data.len());
                for (t, &extent) in data.iter().enumerate().take(index_shape[lead]) {
                    let tuple_at: Vec<Ix<V>> = at[..lead]
                        .iter()
                        .copied()
                        .chain([Ix::C(t as i64)])
                        .collect();
                    to.push(self.index(e, indices, &tuple_at, extent)?);
                }
                to.extend_from_slice(&at[lead..]);
                Ok((to, *kind))
            }
            _ => Err(wrong_phase(node)),
        }
    }
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
