//! Kernels that loop over elements or over lines along an axis in generic code: running sums, the largest elements, scatter.

use super::cluster::{Buffers, ClusterCompiler};
use super::emit::Emitter;
use super::jit::Variants;
use super::phases::{Selection, wrong_phase};
use super::pull::{Emit, Ix, Puller};
use crate::codegen::plan::Arg;
use crate::error::{Error, Result};
use crate::ir::{NodeId, Op, ValueId};
use cranelift_codegen::ir::{InstBuilder, Value};
use gristmill_runtime::DType;

impl Selection {
    /// Bytes that the kernel works in.
    fn workspace_bytes(&self) -> usize {
        let (n, k) = (self.from[self.axis], self.to[self.axis]);
        gristmill_kernels::sorting::workspace_bytes(n, k, self.dtype.size_bytes())
    }

    fn n_lines(&self) -> u64 {
        let n_selected: usize = self.to.iter().product();
        (n_selected / self.to[self.axis].max(1)) as u64
    }

    /// The description of a line that the kernel reads, on the stack: dtype and order, extents, and stride.
    fn descriptor(&self, e: &mut Emitter) -> Value {
        let line = e.stack_array(4);
        let stride: usize = self.from[self.axis + 1..].iter().product();
        let head = i64::from(self.dtype as u32) | i64::from(self.largest) << 32;
        let (n, k) = (self.from[self.axis], self.to[self.axis]);
        let words = [head, n as i64, k as i64, stride as i64];
        for (i, word) in words.into_iter().enumerate() {
            let word = e.iconst(word);
            e.store_word(word, line, i);
        }
        line
    }

    /// Addresses of the first elements of a line of the operand, the values and the positions.
    fn addresses(
        &self,
        e: &mut Emitter,
        line: &[Ix<Value>],
        [operand, values, positions]: [Value; 3],
    ) -> [Value; 3] {
        let from = e.linearise(line, &self.from);
        let to = e.linearise(line, &self.to);
        [
            element_address(e, operand, from, self.dtype),
            element_address(e, values, to, self.dtype),
            element_address(e, positions, to, DType::I64),
        ]
    }
}

impl ClusterCompiler<'_, '_> {
    pub(super) fn cum_sum(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let Op::CumSum { axis, .. } = node.op else {
            return Err(wrong_phase(&node));
        };
        let (x, y) = (node.inputs[0], node.outputs[0]);
        let shape = self.body.shape(y).to_vec();
        let n = shape[axis];
        let lines = (shape.iter().product::<usize>() / n.max(1)) as u64;
        let split = self.split(lines, self.cost_ns(&[x]) * n as u64);
        let writes = vec![(y, self.destination(y))];
        let reads = self.leaves(&[x]);
        let buffers = Buffers { reads, writes };
        self.kernel(
            "cum_sum",
            buffers,
            split,
            0,
            Variants::OfPrograms,
            |p, e, outs| {
                over_lines(p, e, &shape, axis, |p, e, at| {
                    p.cum_sum_line(e, &node, at, outs[0])
                })
            },
        )
    }

    pub(super) fn top_k(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let selection = Selection::of(&self.body, &node)?;
        let x = selection.x;
        let n = selection.from[selection.axis];
        let split = self.split(selection.n_lines(), 10 * n as u64);
        let results = node.outputs.iter();
        let writes: Vec<(ValueId, Arg)> = results.map(|&v| (v, self.destination(v))).collect();
        let reads = self.leaves(&[x]);
        let workspace = reads.len() + writes.len();
        let buffers = Buffers { reads, writes };
        let bytes = selection.workspace_bytes();
        self.kernel(
            "top_k",
            buffers,
            split,
            bytes,
            Variants::OfPrograms,
            |p, e, outs| {
                let line = selection.descriptor(e);
                let base = p.stored.get(&x).copied();
                let base = base.ok_or_else(|| Error::internal("top_k reads a stored value"))?;
                let order = e.arg(workspace);
                over_lines(p, e, &selection.from, selection.axis, |_, e, at| {
                    let [src, values, positions] =
                        selection.addresses(e, at, [base, outs[0], outs[1]]);
                    e.call_task("gm_top_k", &[line, src, values, positions, order])
                })
            },
        )
    }

    pub(super) fn scatter(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let (data, indices, updates) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let y = node.outputs[0];
        let writes = vec![(y, self.destination(y))];
        let reads = self.leaves(&[indices, updates]);
        self.permit_scatter_in_place(data, writes[0].1, &reads);
        self.store_elements("copy", &[data], writes.clone())?;
        let buffers = Buffers { reads, writes };
        // Updates may meet, so they are joined in order by one thread.
        self.kernel(
            "scatter",
            buffers,
            (1, 0),
            0,
            Variants::OfPrograms,
            |p, e, outs| {
                let shape = p.body.shape(updates).to_vec();
                let n: usize = shape.iter().product();
                e.for_loop(Ix::C(0), Ix::C(n as i64), 1, &[], |e, i, _| {
                    let at = e.delinearise(Ix::V(i), &shape);
                    p.scoped(|p| p.scatter_update(e, &node, &at, outs[0]))?;
                    Ok(vec![])
                })?;
                Ok(())
            },
        )
    }
}

fn element_address(e: &mut Emitter, base: Value, at: Ix<Value>, dtype: DType) -> Value {
    let bytes = e.mul(at, dtype.size_bytes() as i64);
    let address = e.add(Ix::V(base), bytes);
    e.val(address)
}

/// Emits `f(index, linear position)` for all items; the innermost axis is a loop of its own, so that its neighbours' index
/// arithmetic is not repeated.
pub(super) fn over_elements(
    p: &mut Puller<Value>,
    e: &mut Emitter,
    shape: &[usize],
    f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Ix<Value>], Ix<Value>) -> Result<()>,
) -> Result<()> {
    let inner_axis = shape.iter().rposition(|&d| d != 1);
    let Some(inner_axis) = inner_axis else {
        return f(p, e, &vec![Ix::C(0); shape.len()], Ix::C(0));
    };
    e.rows(shape[inner_axis], |e, run| {
        let col_end = e.ins().iadd(run.col, run.n);
        let mut at = e.delinearise(Ix::V(run.row), &shape[..inner_axis]);
        at.resize(shape.len(), Ix::C(0));
        let row_start = e.ins().isub(run.first, run.col);
        p.scoped(|p| {
            e.for_loop(Ix::V(run.col), Ix::V(col_end), 1, &[], |e, j, _| {
                p.scoped(|p| {
                    at[inner_axis] = Ix::V(j);
                    let linear = e.add(Ix::V(row_start), Ix::V(j));
                    f(p, e, &at, linear)?;
                    Ok(vec![])
                })
            })
        })?;
        Ok(())
    })
}

/// Emits `f(index)` for all items, which are the lines along `axis`; the index is 0 there.
fn over_lines(
    p: &mut Puller<Value>,
    e: &mut Emitter,
    shape: &[usize],
    axis: usize,
    f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Ix<Value>]) -> Result<()>,
) -> Result<()> {
    let mut lines = shape.to_vec();
    lines[axis] = 1;
    let (begin, end) = (e.begin, e.end);
    e.for_loop(Ix::V(begin), Ix::V(end), 1, &[], |e, i, _| {
        let at = e.delinearise(Ix::V(i), &lines);
        p.scoped(|p| f(p, e, &at))?;
        Ok(vec![])
    })?;
    Ok(())
}
