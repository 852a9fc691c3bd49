//! Compiles one cluster: a kernel per phase, and the plan that calls them.

use super::body::Body;
use super::emit::{Emitter, Ix};
use super::heavy::beats;
use super::phases::{Phase, cut};
use super::pull::Puller;
use super::strided::{Strided, row_major};
use super::task::{Call, Place, Ptr, Task};
use super::thunk::Slot;
use super::vector::{self, Destination, VectorMap};
use super::{PendingKernel, Session, kernel_name};
use crate::codegen::plan::{Arg, KernelPlan, PlanStep};
use crate::error::{Error, Result};
use crate::ir::{Extremum, Graph, Node, NodeId, Op, ScalarOp, ScatterKind, ValueId};
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, StackSlotData, StackSlotKind, Value, types};
use gristmill_runtime::{DType, Tensor, status};
use std::collections::BTreeMap;

/// Estimated time below which a kernel is not worth splitting.
const SERIAL_NS: u64 = 10_000;

/// One cluster being compiled.
pub(super) struct ClusterCompiler<'s, 'o> {
    session: &'s mut Session<'o>,
    outer: &'s Graph,
    id: NodeId,
    body: Body,
    /// Where values are, as far as they are in memory already.
    location: BTreeMap<ValueId, Arg>,
    plan: KernelPlan,
}

/// A piece of a result.
enum Part {
    Copy(Call),
    Map(Box<VectorMap>),
}

/// A kernel's buffers: values read, then values written.
struct Buffers {
    reads: Vec<(ValueId, Arg)>,
    writes: Vec<(ValueId, Arg)>,
}

impl<'s, 'o> ClusterCompiler<'s, 'o> {
    pub(super) fn compile(
        session: &'s mut Session<'o>,
        outer: &'s Graph,
        id: NodeId,
        node: &Node,
    ) -> Result<KernelPlan> {
        let region = node.regions.first().ok_or_else(|| Error::internal("a cluster has no body"))?;
        let body = Body::new(region, &super::fast::has_kernel)?;
        let plan = KernelPlan::default();
        let mut compiler = ClusterCompiler { session, outer, id, body, location: BTreeMap::new(), plan };
        compiler.place_operands()?;
        let session = &compiler.session;
        for phase in cut(&compiler.body, outer, node, session.options, &session.weights) {
            compiler.phase(&phase)?;
        }
        compiler.copy_repeated_results()?;
        Ok(compiler.plan)
    }

    fn place_operands(&mut self) -> Result<()> {
        for (i, &v) in self.body.graph.inputs.iter().enumerate() {
            self.location.insert(v, Arg::Operand(i as u32));
        }
        for (_, node) in self.body.graph.nodes() {
            if let Op::Constant { value } = &node.op
                && value.len() != 1
            {
                self.location.insert(node.outputs[0], Arg::Packed(self.plan.packed.len() as u32));
                self.plan.packed.push(value.tensor()?);
            }
        }
        Ok(())
    }

    /// The buffer that a phase writes `v` to: the first result that it is, or scratch.
    fn destination(&mut self, v: ValueId) -> Arg {
        match self.body.graph.outputs.iter().position(|o| o.value == v) {
            Some(i) => Arg::Result(i as u32),
            None => {
                self.plan.scratch.push(self.body.n_elements(v) * self.body.dtype(v).size_bytes());
                Arg::Scratch(self.plan.scratch.len() as u32 - 1)
            }
        }
    }

    fn phase(&mut self, phase: &Phase) -> Result<()> {
        match phase {
            Phase::Task(task) => self.task(task),
            Phase::Elements(roots) => self.elements(roots),
            Phase::Lines(node) => self.cum_sum(*node),
            Phase::TopK(node) => self.top_k(*node),
            Phase::Scatter(node) => self.scatter(*node),
        }
    }

    /// Values that pulling `roots` loads, in order; the roots themselves are computed.
    fn leaves(&self, roots: &[ValueId]) -> Vec<(ValueId, Arg)> {
        let mut found = BTreeMap::new();
        let mut seen = std::collections::BTreeSet::new();
        let mut todo = roots.to_vec();
        while let Some(v) = todo.pop() {
            if !seen.insert(v) {
                continue;
            }
            if let Some(&arg) = self.location.get(&v) {
                found.insert(v, arg);
            } else if let Some(node) = self.body.graph.def_node(v) {
                todo.extend(&node.inputs);
            }
        }
        found.into_iter().collect()
    }

    /// Emits a kernel and appends its step. `f` gets the puller and the addresses of the written buffers.
    fn kernel(
        &mut self,
        what: &str,
        buffers: Buffers,
        (items, grain): (u64, u64),
        workspace_bytes: usize,
        f: impl FnOnce(&mut Puller, &mut Emitter, &[Value]) -> Result<()>,
    ) -> Result<()> {
        let name = kernel_name(self.outer, self.id, self.plan.steps.len(), what);
        let body = &self.body;
        let function = self.session.jit.kernel(&name, |e| {
            let stored = buffers.reads.iter().enumerate().map(|(i, &(v, _))| (v, e.arg(i))).collect();
            let first = buffers.reads.len();
            let outs: Vec<Value> = (0..buffers.writes.len()).map(|i| e.arg(first + i)).collect();
            f(&mut Puller::new(body, stored), e, &outs)
        })?;
        self.session.kernels.push(PendingKernel { name, function, workspace_bytes });
        let args = buffers.reads.iter().chain(&buffers.writes).map(|&(_, arg)| arg).collect();
        let n_outputs = buffers.writes.len() as u32;
        let kernel = self.session.kernels.len() - 1;
        self.plan.steps.push(PlanStep { kernel, args, n_outputs, items, grain });
        self.location.extend(buffers.writes.iter().copied());
        Ok(())
    }

    fn task(&mut self, task: &Task) -> Result<()> {
        let first_temp = self.plan.scratch.len() as u32;
        self.plan.scratch.extend(&task.temps);
        let destination = self.destination(task.result);
        for call in &task.calls {
            self.call(call, first_temp, destination)?;
        }
        self.location.insert(task.result, destination);
        Ok(())
    }

    /// Appends a call of a task kernel. The generated kernel arranges the addresses and passes the items on; kernels of one symbol that
    /// arrange them alike share it.
    fn call(&mut self, call: &Call, first_temp: u32, destination: Arg) -> Result<()> {
        let mut reads = vec![self.pack(call.descriptor.clone())];
        let (mut writes, mut slots) = (Vec::new(), Vec::new());
        for ptr in &call.ptrs {
            slots.push(match ptr {
                Ptr::Null => Slot::Null,
                Ptr::Workspace => Slot::Workspace,
                Ptr::Read(place, offset) => {
                    reads.push(match place {
                        Place::Value(v) => self.argument(*v)?,
                        Place::Packed(t) => self.pack(t.clone()),
                        Place::Temp(i) => Arg::Scratch(first_temp + *i as u32),
                    });
                    Slot::Read(reads.len() - 1, *offset)
                }
                Ptr::Write(place, offset) => {
                    writes.push(match place {
                        Place::Temp(i) => Arg::Scratch(first_temp + *i as u32),
                        _ => destination,
                    });
                    Slot::Write(writes.len() - 1, *offset)
                }
            });
        }
        let function = self.session.thunk(call.symbol, reads.len(), writes.len(), &slots)?;
        let name = kernel_name(self.outer, self.id, self.plan.steps.len(), call.symbol);
        let workspace_bytes = call.workspace_bytes;
        self.session.kernels.push(PendingKernel { name, function, workspace_bytes });
        let n_outputs = writes.len() as u32;
        let args = reads.into_iter().chain(writes).collect();
        let grain = if call.cost_ns < 2 * SERIAL_NS || call.items < 2 {
            0
        } else {
            (call.items as u64 * SERIAL_NS / call.cost_ns).max(1)
        };
        let kernel = self.session.kernels.len() - 1;
        self.plan.steps.push(PlanStep { kernel, args, n_outputs, items: call.items as u64, grain });
        Ok(())
    }

    fn pack(&mut self, t: Tensor) -> Arg {
        self.plan.packed.push(t);
        Arg::Packed(self.plan.packed.len() as u32 - 1)
    }

    /// The buffer of a value that is in memory; a constant gets one on demand.
    fn argument(&mut self, v: ValueId) -> Result<Arg> {
        if let Some(&arg) = self.location.get(&v) {
            return Ok(arg);
        }
        let constant = self.body.graph.constant(v);
        let constant =
            constant.ok_or_else(|| Error::internal("a task reads a value that is not in memory"))?.tensor()?;
        let arg = self.pack(constant);
        self.location.insert(v, arg);
        Ok(arg)
    }

    fn elements(&mut self, roots: &[ValueId]) -> Result<()> {
        if let Some(map) = self.vector_plan(roots, &self.whole(roots[0])).filter(|_| roots.len() > 1) {
            let writes = roots.iter().map(|&v| (v, self.destination(v))).collect();
            return self.vector_map(map, writes);
        }
        // What one vector kernel cannot compute together may have a fast path each; later ones load what is done. Results of one
        // node come from one loop.
        let one_node = |v: ValueId| self.body.graph.def_node(v).is_some_and(|n| n.outputs.len() > 1);
        if roots.len() > 1 && roots.iter().all(|&v| one_node(v)) {
            let writes = roots.iter().map(|&v| (v, self.destination(v))).collect();
            let pairs: Vec<(ValueId, ValueId)> = roots.iter().map(|&v| (v, v)).collect();
            return self.store_elements("map", &pairs, writes);
        }
        roots.iter().try_for_each(|&root| self.one_value(root))
    }

    fn one_value(&mut self, root: ValueId) -> Result<()> {
        let arg = self.destination(root);
        if self.parts(root, root, arg)? {
            return Ok(());
        }
        match self.vector_plan(&[root], &self.whole(root)) {
            Some(map) => self.vector_map(map, vec![(root, arg)]),
            None => self.store_elements("map", &[(root, root)], vec![(root, arg)]),
        }
    }

    fn whole(&self, v: ValueId) -> Destination {
        Destination { offset: 0, strides: row_major(self.body.shape(v)) }
    }

    fn vector_plan(&self, roots: &[ValueId], out: &Destination) -> Option<VectorMap> {
        vector::plan(&self.body, roots, &|v| self.location.contains_key(&v), out)
    }

    fn vector_map(&mut self, map: VectorMap, writes: Vec<(ValueId, Arg)>) -> Result<()> {
        let shape = self.body.shape(writes[0].0);
        let items = map.n_items();
        debug_assert!(items <= shape.iter().product());
        let grain = (SERIAL_NS * 1000).div_ceil(map.cost_ps());
        let split = (items as u64, if (items as u64) < 2 * grain { 0 } else { grain });
        let reads = map.expression.leaves.iter().map(|l| (l.value, self.location[&l.value])).collect::<Vec<_>>();
        let n_reads = reads.len();
        let workspace = n_reads + writes.len();
        self.kernel("vector", Buffers { reads, writes }, split, map.workspace_bytes(), |_, e, outs| {
            let leaves: Vec<Value> = (0..n_reads).map(|i| e.arg(i)).collect();
            map.emit(e, &leaves, outs, workspace)
        })
    }

    /// Computes `v`, a view or a join of views and expressions, into the buffer of `root` at `arg` with copies and vector kernels. False,
    /// and nothing done, when they cannot.
    fn parts(&mut self, v: ValueId, root: ValueId, arg: Arg) -> Result<bool> {
        let mut parts = Vec::new();
        if !self.split_parts(v, self.whole(root), &mut parts) {
            return Ok(false);
        }
        for part in parts {
            match part {
                Part::Copy(call) => self.call(&call, 0, arg)?,
                Part::Map(map) => self.vector_map(*map, vec![(root, arg)])?,
            }
        }
        self.location.insert(root, arg);
        Ok(true)
    }

    fn split_parts(&self, v: ValueId, to: Destination, parts: &mut Vec<Part>) -> bool {
        if self.body.n_elements(v) == 0 {
            return true;
        }
        let in_memory = |v: ValueId| self.location.contains_key(&v);
        let view = Strided::resolve(&self.body, v, &in_memory);
        if in_memory(view.base) {
            let call =
                super::rows::copy(self.session.options.target.isa(), &self.body, &view, v, &to.strides, to.offset);
            return call.map(|c| parts.push(Part::Copy(c))).is_some();
        }
        match self.body.graph.def_node(v).map(|n| (&n.op, &n.inputs)) {
            Some((Op::Concat { axis }, inputs)) => {
                let mut start = 0;
                inputs.iter().all(|&x| {
                    let offset = to.offset + start * to.strides[*axis];
                    start += self.body.shape(x)[*axis] as i64;
                    self.split_parts(x, Destination { offset, strides: to.strides.clone() }, parts)
                })
            }
            // A whole expression is planned by the caller, with its neighbours.
            _ if parts.is_empty() && to.offset == 0 && to.strides == row_major(self.body.shape(v)) => false,
            _ => match self.vector_plan(&[v], &to) {
                Some(map) => {
                    parts.push(Part::Map(Box::new(map)));
                    true
                }
                None => false,
            },
        }
    }

    /// Stores the elements of each source at the same index of its destination's buffer.
    fn store_elements(&mut self, what: &str, pairs: &[(ValueId, ValueId)], writes: Vec<(ValueId, Arg)>) -> Result<()> {
        let sources: Vec<ValueId> = pairs.iter().map(|p| p.0).collect();
        let shape = self.body.shape(sources[0]).to_vec();
        let items: usize = shape.iter().product();
        if items == 0 {
            return Ok(());
        }
        let split = self.split(items as u64, self.cost_ns(&sources));
        let buffers = Buffers { reads: self.leaves(&sources), writes };
        self.kernel(what, buffers, split, 0, |p, e, outs| {
            over_elements(p, e, &shape, |p, e, at, linear| {
                for (&v, &out) in sources.iter().zip(outs) {
                    let value = p.value(e, v, at)?;
                    e.store(p.body.dtype(v), value, out, linear);
                }
                Ok(())
            })
        })
    }

    /// Rough time per element of pulling `roots`.
    fn cost_ns(&self, roots: &[ValueId]) -> u64 {
        let mut seen = std::collections::BTreeSet::new();
        let mut todo: Vec<(ValueId, u64)> = roots.iter().map(|&v| (v, 1)).collect();
        let mut flops = 0u64;
        while let Some((v, times)) = todo.pop() {
            if !seen.insert(v) || self.location.contains_key(&v) {
                flops = flops.saturating_add(times);
                continue;
            }
            let Some(node) = self.body.graph.def_node(v) else { continue };
            let (own, inner) = match &node.op {
                Op::Map(s) => (u64::from(s.spec().flops), 1),
                op => (2, inner_iterations(&self.body, op, node) as u64),
            };
            flops = flops.saturating_add(own.saturating_mul(times).saturating_mul(inner));
            todo.extend(node.inputs.iter().map(|&x| (x, times.saturating_mul(inner))));
        }
        1 + flops / 2
    }

    fn split(&self, items: u64, cost_ns: u64) -> (u64, u64) {
        let grain = SERIAL_NS.div_ceil(cost_ns.max(1));
        (items, if items < 2 * grain { 0 } else { grain })
    }

    fn cum_sum(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let Op::CumSum { axis, exclusive, reverse } = node.op else { return Err(wrong_phase(&node)) };
        let (x, y) = (node.inputs[0], node.outputs[0]);
        let (shape, dtype) = (self.body.shape(y).to_vec(), self.body.dtype(y));
        let acc = match dtype {
            d if d.is_float() => DType::F64,
            d => d,
        };
        let n = shape[axis];
        let lines = (shape.iter().product::<usize>() / n.max(1)) as u64;
        let split = self.split(lines, self.cost_ns(&[x]) * n as u64);
        let writes = vec![(y, self.destination(y))];
        self.kernel("cum_sum", Buffers { reads: self.leaves(&[x]), writes }, split, 0, |p, e, outs| {
            over_lines(p, e, &shape, axis, |p, e, at| {
                let zero = e.constant(acc, 0);
                e.for_loop(Ix::C(0), Ix::C(n as i64), 1, &[zero], |e, i, carried| {
                    p.scoped(|p| {
                        let mut at = at.to_vec();
                        at[axis] = if reverse {
                            let last = e.iconst(n as i64 - 1);
                            Ix::V(e.b.ins().isub(last, i))
                        } else {
                            Ix::V(i)
                        };
                        let v = p.value(e, x, &at)?;
                        let v = e.convert(v, dtype, acc)?;
                        let next = e.scalar_op(ScalarOp::Add, &[acc, acc], &[carried[0], v])?;
                        let shown = e.convert(if exclusive { carried[0] } else { next }, acc, dtype)?;
                        let linear = e.linearise(&at, &shape);
                        e.store(dtype, shown, outs[0], linear);
                        Ok(vec![next])
                    })
                })?;
                Ok(())
            })
        })
    }

    fn top_k(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let Op::TopK { axis, largest, .. } = node.op else { return Err(wrong_phase(&node)) };
        let x = node.inputs[0];
        let (from, to) = (self.body.shape(x).to_vec(), self.body.shape(node.outputs[0]).to_vec());
        let (n, k) = (from[axis], to[axis]);
        let stride: usize = from[axis + 1..].iter().product();
        let lines = to.iter().product::<usize>() / k.max(1);
        let dtype = self.body.dtype(x);
        let split = self.split(lines as u64, 10 * n as u64);
        let writes: Vec<(ValueId, Arg)> = node.outputs.iter().map(|&v| (v, self.destination(v))).collect();
        let buffers = Buffers { reads: self.leaves(&[x]), writes };
        let workspace = buffers.reads.len() + buffers.writes.len();
        self.kernel("top_k", buffers, split, n * 4, |p, e, outs| {
            let slot = e.b.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, 32, 3));
            let line = e.b.ins().stack_addr(types::I64, slot, 0);
            let head = i64::from(dtype as u32) | i64::from(largest) << 32;
            for (i, word) in [head, n as i64, k as i64, stride as i64].into_iter().enumerate() {
                let word = e.iconst(word);
                e.b.ins().store(MemFlagsData::trusted(), word, line, (i * 8) as i32);
            }
            let base = *p.stored.get(&x).ok_or_else(|| Error::internal("top_k reads a stored value"))?;
            let order = e.arg(workspace);
            over_lines(p, e, &from, axis, |p, e, at| {
                let (src, dst) = (e.linearise(at, &from), e.linearise(at, p.body.shape(node.outputs[0])));
                let src = element_address(e, base, src, dtype);
                let values = element_address(e, outs[0], dst, dtype);
                let positions = element_address(e, outs[1], dst, DType::I64);
                let failed = e.call("gm_top_k", &[line, src, values, positions, order], Some(types::I32))?;
                e.fault_if(failed.expect("declared with a result"), status::BAD_DESCRIPTOR);
                Ok(())
            })
        })
    }

    fn scatter(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let (data, indices, updates) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let y = node.outputs[0];
        let writes = vec![(y, self.destination(y))];
        self.store_elements("copy", &[(data, y)], writes.clone())?;
        let buffers = Buffers { reads: self.leaves(&[indices, updates]), writes };
        // Updates may meet, so they are joined in order by one thread.
        self.kernel("scatter", buffers, (1, 0), 0, |p, e, outs| {
            let (shape, update_shape) = (p.body.shape(y).to_vec(), p.body.shape(updates).to_vec());
            let n: usize = update_shape.iter().product();
            e.for_loop(Ix::C(0), Ix::C(n as i64), 1, &[], |e, i, _| {
                p.scoped(|p| {
                    let at = e.delinearise(Ix::V(i), &update_shape);
                    let (to, kind) = scatter_target(p, e, &node, &at)?;
                    let linear = e.linearise(&to, &shape);
                    let new = p.value(e, updates, &at)?;
                    let dtype = p.body.dtype(y);
                    let old = e.load(dtype, outs[0], linear);
                    let joined = join(e, kind, dtype, old, new)?;
                    e.store(dtype, joined, outs[0], linear);
                    Ok(vec![])
                })
            })?;
            Ok(())
        })
    }

    /// Results that no phase wrote: operands handed through, constants, and second names of a value.
    fn copy_repeated_results(&mut self) -> Result<()> {
        for (i, output) in self.body.graph.outputs.clone().iter().enumerate() {
            let arg = Arg::Result(i as u32);
            let written = self.plan.steps.iter().any(|s| s.args.contains(&arg));
            if !written && self.body.n_elements(output.value) > 0 {
                let held = self.location.get(&output.value).copied();
                self.store_elements("copy", &[(output.value, output.value)], vec![(output.value, arg)])?;
                if let Some(held) = held {
                    self.location.insert(output.value, held);
                }
            }
        }
        Ok(())
    }
}

fn wrong_phase(node: &Node) -> Error {
    Error::internal(format!("{} is in a phase of another kind", node.op.name()))
}

/// How often an op with an inner loop pulls its operands for one element.
fn inner_iterations(body: &Body, op: &Op, node: &Node) -> usize {
    let n = |i: usize| body.n_elements(node.inputs[i]);
    let out = body.n_elements(node.outputs[0]).max(1);
    match op {
        Op::Reduce { .. } | Op::ArgReduce { .. } => n(0) / out,
        Op::MatMul => body.shape(node.inputs[0]).last().copied().unwrap_or(1),
        Op::Conv { .. } | Op::ConvTranspose { .. } => n(1) / body.shape(node.inputs[1])[0].max(1),
        Op::Pool { size, .. } | Op::MaxPoolIndices { size, .. } => size.iter().product(),
        _ => 1,
    }
    .max(1)
}

fn element_address(e: &mut Emitter, base: Value, at: Ix, dtype: DType) -> Value {
    let bytes = e.mul(at, dtype.size_bytes() as i64);
    let address = e.add(Ix::V(base), bytes);
    e.val(address)
}

/// Emits `f(index, linear position)` for all items; the innermost axis is a loop of its own, so that its neighbours' index
/// arithmetic is not repeated.
fn over_elements(
    p: &mut Puller,
    e: &mut Emitter,
    shape: &[usize],
    f: impl FnOnce(&mut Puller, &mut Emitter, &[Ix], Ix) -> Result<()>,
) -> Result<()> {
    let inner_axis = shape.iter().rposition(|&d| d != 1);
    let Some(inner_axis) = inner_axis else { return f(p, e, &vec![Ix::C(0); shape.len()], Ix::C(0)) };
    let inner = shape[inner_axis];
    let (first_row, first_col) = e.div_rem(Ix::V(e.begin), inner);
    let (first_row, first_col) = (e.val(first_row), e.val(first_col));
    let (begin, end) = (e.begin, e.end);
    // Rows: carried are the row number and the column to begin at.
    e.while_less(begin, end, &[first_row, first_col], |e, i, carried| {
        let (row, col) = (carried[0], carried[1]);
        let width = e.iconst(inner as i64);
        let in_row = e.b.ins().isub(width, col);
        let in_range = e.b.ins().isub(end, i);
        let n = e.b.ins().umin(in_row, in_range);
        let col_end = e.b.ins().iadd(col, n);
        let mut at = e.delinearise(Ix::V(row), &shape[..inner_axis]);
        at.resize(shape.len(), Ix::C(0));
        let row_start = e.b.ins().isub(i, col);
        p.scoped(|p| {
            e.for_loop(Ix::V(col), Ix::V(col_end), 1, &[], |e, j, _| {
                p.scoped(|p| {
                    at[inner_axis] = Ix::V(j);
                    let linear = e.add(Ix::V(row_start), Ix::V(j));
                    f(p, e, &at, linear)?;
                    Ok(vec![])
                })
            })
        })?;
        let next = e.b.ins().iadd(i, n);
        let (row, zero) = (e.b.ins().iadd_imm_s(row, 1), e.iconst(0));
        Ok((next, vec![row, zero]))
    })
}

/// Emits `f(index)` for all items, which are the lines along `axis`; the index is 0 there.
fn over_lines(
    p: &mut Puller,
    e: &mut Emitter,
    shape: &[usize],
    axis: usize,
    f: impl FnOnce(&mut Puller, &mut Emitter, &[Ix]) -> Result<()>,
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

/// Index in the data that the update at `at` goes to.
fn scatter_target(p: &mut Puller, e: &mut Emitter, node: &Node, at: &[Ix]) -> Result<(Vec<Ix>, ScatterKind)> {
    let (data, indices) = (p.body.shape(node.inputs[0]).to_vec(), node.inputs[1]);
    match &node.op {
        Op::ScatterElements { axis, kind } => {
            let mut to = at.to_vec();
            to[*axis] = p.index(e, indices, at, data[*axis])?;
            Ok((to, *kind))
        }
        Op::ScatterNd { kind } => {
            let index_shape = p.body.shape(indices).to_vec();
            let lead = index_shape.len() - 1;
            let mut to = Vec::with_capacity(data.len());
            for (t, &extent) in data.iter().enumerate().take(index_shape[lead]) {
                let tuple_at: Vec<Ix> = at[..lead].iter().copied().chain([Ix::C(t as i64)]).collect();
                to.push(p.index(e, indices, &tuple_at, extent)?);
            }
            to.extend_from_slice(&at[lead..]);
            Ok((to, *kind))
        }
        _ => Err(wrong_phase(node)),
    }
}

fn join(e: &mut Emitter, kind: ScatterKind, dtype: DType, old: Value, new: Value) -> Result<Value> {
    let extremum = match kind {
        ScatterKind::Set => return Ok(new),
        ScatterKind::Add => return e.scalar_op(ScalarOp::Add, &[dtype, dtype], &[old, new]),
        ScatterKind::Mul => return e.scalar_op(ScalarOp::Mul, &[dtype, dtype], &[old, new]),
        ScatterKind::Max => Extremum::Max,
        ScatterKind::Min => Extremum::Min,
    };
    let better = beats(e, new, old, dtype, extremum)?;
    Ok(e.b.ins().select(better, new, old))
}
