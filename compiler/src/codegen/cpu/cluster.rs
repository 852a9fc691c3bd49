//! Compiles one cluster: a kernel per phase, and the plan that calls them.

use super::body::Body;
use super::emit::Emitter;
use super::match_kernels::{has_kernel, is_composite, match_task};
use super::phases::MatchContext;
use super::phases::{Phase, cut};
use super::pull::{Emit, Ix, Puller, inner_iterations};
use super::rejected::{Fallback, Rejected};
use super::strided::{Strided, row_major};
use super::task::{Call, Context, Place, Ptr, Task};
use super::thunk::Slot;
use super::vector::{self, Destination, VectorMap};
use super::{PendingKernel, Session, kernel_name};
use crate::cluster::coverage;
use crate::codegen::placed::Placed;
use crate::codegen::plan::{Arg, KernelPlan, PlanStep};
use crate::cost::{Extents, Work, work};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, Type, ValueId};
use cranelift_codegen::ir::{
    InstBuilder, MemFlagsData, StackSlotData, StackSlotKind, Value, types,
};
use gristmill_runtime::{DType, status};

/// Estimated time below which a kernel is not worth splitting.
const SERIAL_NS: u64 = 10_000;

/// One cluster being compiled.
pub(super) struct ClusterCompiler<'s, 'o> {
    session: &'s mut Session<'o>,
    outer: &'s Graph,
    id: NodeId,
    body: Body,
    placed: Placed,
}

/// A node that no kernel computes, and why.
type Miss = (NodeId, Rejected);

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
        let body = Body::new(node, &has_kernel)?;
        let placed = Placed::new(&body)?;
        let mut compiler = ClusterCompiler {
            session,
            outer,
            id,
            body,
            placed,
        };
        let phases = compiler.phases_with_reports(node)?;
        for phase in phases {
            compiler.phase(&phase)?;
        }
        compiler.copy_repeated_results()?;
        Ok(compiler.placed.plan)
    }

    /// The buffer that a phase writes `v` to.
    fn destination(&mut self, v: ValueId) -> Arg {
        self.placed.destination(&self.body, v)
    }

    /// The phases of the body of `cluster`. Where the kernel of a composite op cannot compute it, the op is written out.
    fn phases_with_reports(&mut self, cluster: &Node) -> Result<Vec<Phase<Task>>> {
        let (phases, misses) = self.phases(cluster);
        if let Some((body, anchor)) = anchor_of(cluster)
            && let Some(why) = written_out(body, anchor)
        {
            // The misses are parts of the composite op.
            let fallback = fallback(body, anchor, why)?;
            self.session.fallbacks.extend(fallback);
            return Ok(phases);
        }
        let mut must_write_out = false;
        for (id, why) in misses {
            let node = self.body.graph.node(id);
            must_write_out |= is_composite(&node.op);
            let fallback = fallback(&self.body.graph, node, why)?;
            self.session.fallbacks.extend(fallback);
        }
        if !must_write_out {
            return Ok(phases);
        }
        self.body = Body::new(cluster, &|_, _| false)?;
        self.placed = Placed::new(&self.body)?;
        Ok(self.phases(cluster).0)
    }

    /// The phases of the body of `cluster`, and the nodes of its anchor that no kernel computes.
    fn phases(&self, cluster: &Node) -> (Vec<Phase<Task>>, Vec<Miss>) {
        let mut misses = Vec::new();
        let phases = cut(&self.body, &mut |around, id, node| {
            if !self.body.anchor.contains(&id) {
                return None;
            }
            match match_task(&self.context(cluster, around), id, node) {
                Ok(task) => {
                    misses.extend(task.apart.clone());
                    Some((task.cover(), task))
                }
                Err(why) => {
                    misses.push((id, why));
                    None
                }
            }
        });
        (phases, misses)
    }

    fn context<'c>(&'c self, cluster: &'c Node, around: &'c MatchContext) -> Context<'c> {
        let options = self.session.options;
        Context {
            body: &self.body,
            outer: self.outer,
            cluster,
            users: around.users,
            in_memory: around.in_memory,
            isa: options.target.isa(),
            n_threads: options.n_threads,
            weights: &self.session.weights,
        }
    }

    fn phase(&mut self, phase: &Phase<Task>) -> Result<()> {
        match phase {
            Phase::Task(task) => self.task(task),
            Phase::Elements(roots) => self.elements(roots),
            Phase::Lines(node) => self.cum_sum(*node),
            Phase::TopK(node) => self.top_k(*node),
            Phase::Scatter(node) => self.scatter(*node),
        }
    }

    fn leaves(&self, roots: &[ValueId]) -> Vec<(ValueId, Arg)> {
        self.placed.leaves(&self.body, roots)
    }

    /// Emits a kernel and appends its step. `f` gets the puller and the addresses of the written buffers.
    fn kernel(
        &mut self,
        what: &str,
        buffers: Buffers,
        (items, grain): (u64, u64),
        workspace_bytes: usize,
        f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Value]) -> Result<()>,
    ) -> Result<()> {
        let name = kernel_name(self.outer, self.id, self.placed.plan.steps.len(), what);
        let body = &self.body;
        let function = self.session.jit.kernel(&name, |e| {
            let stored = buffers
                .reads
                .iter()
                .enumerate()
                .map(|(i, &(v, _))| (v, e.arg(i)))
                .collect();
            let first = buffers.reads.len();
            let outs: Vec<Value> = (0..buffers.writes.len())
                .map(|i| e.arg(first + i))
                .collect();
            f(&mut Puller::new(body, stored), e, &outs)
        })?;
        self.session.kernels.push(PendingKernel {
            name,
            function,
            workspace_bytes,
        });
        let args = buffers
            .reads
            .iter()
            .chain(&buffers.writes)
            .map(|&(_, arg)| arg)
            .collect();
        let n_outputs = buffers.writes.len() as u32;
        let kernel = self.session.kernels.len() - 1;
        self.placed.plan.steps.push(PlanStep {
            kernel,
            args,
            n_outputs,
            items,
            grain,
        });
        self.placed.location.extend(buffers.writes.iter().copied());
        Ok(())
    }

    fn task(&mut self, task: &Task) -> Result<()> {
        let first_temp = self.placed.plan.scratch.len() as u32;
        self.placed.plan.scratch.extend(&task.temps);
        let destination = self.destination(task.result);
        for call in &task.calls {
            self.call(call, first_temp, destination)?;
        }
        self.placed.location.insert(task.result, destination);
        Ok(())
    }

    /// Appends a call of a task kernel. The generated kernel arranges the addresses and passes the items on; kernels of one symbol that
    /// arrange them alike share it.
    fn call(&mut self, call: &Call, first_temp: u32, destination: Arg) -> Result<()> {
        self.session.jit.note(call);
        let mut reads = vec![self.placed.pack(call.descriptor.clone())];
        let (mut writes, mut slots) = (Vec::new(), Vec::new());
        for ptr in &call.ptrs {
            slots.push(match ptr {
                Ptr::Null => Slot::Null,
                Ptr::Workspace => Slot::Workspace,
                Ptr::Read(place, offset) => {
                    reads.push(match place {
                        Place::Value(v) => self.argument(*v)?,
                        Place::Packed(t) => self.placed.pack(t.clone()),
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
        let function = self
            .session
            .thunk(call.symbol, reads.len(), writes.len(), &slots)?;
        let name = kernel_name(
            self.outer,
            self.id,
            self.placed.plan.steps.len(),
            call.symbol,
        );
        let workspace_bytes = call.workspace_bytes;
        self.session.kernels.push(PendingKernel {
            name,
            function,
            workspace_bytes,
        });
        let n_outputs = writes.len() as u32;
        let args = reads.into_iter().chain(writes).collect();
        let grain = if call.cost_ns < 2 * SERIAL_NS || call.items < 2 {
            0
        } else {
            (call.items as u64 * SERIAL_NS / call.cost_ns).max(1)
        };
        let kernel = self.session.kernels.len() - 1;
        self.placed.plan.steps.push(PlanStep {
            kernel,
            args,
            n_outputs,
            items: call.items as u64,
            grain,
        });
        Ok(())
    }

    /// The buffer of a value that is in memory; a constant gets one on demand.
    fn argument(&mut self, v: ValueId) -> Result<Arg> {
        if let Some(&arg) = self.placed.location.get(&v) {
            return Ok(arg);
        }
        let constant = self.body.graph.constant(v);
        let constant = constant
            .ok_or_else(|| Error::internal("a task reads a value that is not in memory"))?
            .tensor()?;
        let arg = self.placed.pack(constant);
        self.placed.location.insert(v, arg);
        Ok(arg)
    }

    fn elements(&mut self, roots: &[ValueId]) -> Result<()> {
        if let Some(map) = self
            .vector_plan(roots, &self.whole(roots[0]))
            .filter(|_| roots.len() > 1)
        {
            let writes = roots.iter().map(|&v| (v, self.destination(v))).collect();
            return self.vector_map(map, writes);
        }
        // What one vector kernel cannot compute together may have a fast path each; later ones load what is done. Results of one
        // node come from one loop.
        let one_node = |v: ValueId| {
            self.body
                .graph
                .def_node(v)
                .is_some_and(|n| n.outputs.len() > 1)
        };
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
        Destination {
            offset: 0,
            strides: row_major(self.body.shape(v)),
        }
    }

    fn vector_plan(&self, roots: &[ValueId], out: &Destination) -> Option<VectorMap> {
        vector::plan(
            &self.body,
            roots,
            &|v| self.placed.location.contains_key(&v),
            out,
        )
    }

    fn vector_map(&mut self, map: VectorMap, writes: Vec<(ValueId, Arg)>) -> Result<()> {
        let shape = self.body.shape(writes[0].0);
        let items = map.n_items();
        self.session.jit.note(&map);
        debug_assert!(items <= shape.iter().product());
        let grain = (SERIAL_NS * 1000).div_ceil(map.cost_ps());
        let split = (
            items as u64,
            if (items as u64) < 2 * grain { 0 } else { grain },
        );
        let reads = map
            .expression
            .leaves
            .iter()
            .map(|l| (l.value, self.placed.location[&l.value]))
            .collect::<Vec<_>>();
        let n_reads = reads.len();
        let workspace = n_reads + writes.len();
        self.kernel(
            "vector",
            Buffers { reads, writes },
            split,
            map.workspace_bytes(),
            |_, e, outs| {
                let leaves: Vec<Value> = (0..n_reads).map(|i| e.arg(i)).collect();
                map.emit(e, &leaves, outs, workspace)
            },
        )
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
        self.placed.location.insert(root, arg);
        Ok(true)
    }

    fn split_parts(&self, v: ValueId, to: Destination, parts: &mut Vec<Part>) -> bool {
        if self.body.n_elements(v) == 0 {
            return true;
        }
        let in_memory = |v: ValueId| self.placed.location.contains_key(&v);
        let view = Strided::resolve(&self.body, v, &in_memory);
        if in_memory(view.base) {
            let call = super::rows::copy(
                self.session.options.target.isa(),
                &self.body,
                &view,
                v,
                &to.strides,
                to.offset,
            );
            return call.map(|c| parts.push(Part::Copy(c))).is_some();
        }
        match self.body.graph.def_node(v).map(|n| (&n.op, &n.inputs)) {
            Some((Op::Concat { axis }, inputs)) => {
                let mut start = 0;
                inputs.iter().all(|&x| {
                    let offset = to.offset + start * to.strides[*axis];
                    start += self.body.shape(x)[*axis] as i64;
                    self.split_parts(
                        x,
                        Destination {
                            offset,
                            strides: to.strides.clone(),
                        },
                        parts,
                    )
                })
            }
            // A whole expression is planned by the caller, with its neighbours.
            _ if parts.is_empty()
                && to.offset == 0
                && to.strides == row_major(self.body.shape(v)) =>
            {
                false
            }
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
    fn store_elements(
        &mut self,
        what: &str,
        pairs: &[(ValueId, ValueId)],
        writes: Vec<(ValueId, Arg)>,
    ) -> Result<()> {
        let sources: Vec<ValueId> = pairs.iter().map(|p| p.0).collect();
        let shape = self.body.shape(sources[0]).to_vec();
        let items: usize = shape.iter().product();
        if items == 0 {
            return Ok(());
        }
        let split = self.split(items as u64, self.cost_ns(&sources));
        let buffers = Buffers {
            reads: self.leaves(&sources),
            writes,
        };
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
            if !seen.insert(v) || self.placed.location.contains_key(&v) {
                flops = flops.saturating_add(times);
                continue;
            }
            let Some(node) = self.body.graph.def_node(v) else {
                continue;
            };
            let (own, inner) = match &node.op {
                Op::Map(s) => (u64::from(s.spec().flops), 1),
                op => (2, inner_iterations(&self.body, op, node) as u64),
            };
            flops = flops.saturating_add(own.saturating_mul(times).saturating_mul(inner));
            todo.extend(
                node.inputs
                    .iter()
                    .map(|&x| (x, times.saturating_mul(inner))),
            );
        }
        1 + flops / 2
    }

    fn split(&self, items: u64, cost_ns: u64) -> (u64, u64) {
        let grain = SERIAL_NS.div_ceil(cost_ns.max(1));
        (items, if items < 2 * grain { 0 } else { grain })
    }

    fn cum_sum(&mut self, id: NodeId) -> Result<()> {
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
        self.kernel(
            "cum_sum",
            Buffers {
                reads: self.leaves(&[x]),
                writes,
            },
            split,
            0,
            |p, e, outs| {
                over_lines(p, e, &shape, axis, |p, e, at| {
                    p.cum_sum_line(e, &node, at, outs[0])
                })
            },
        )
    }

    fn top_k(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let Op::TopK { axis, largest, .. } = node.op else {
            return Err(wrong_phase(&node));
        };
        let x = node.inputs[0];
        let (from, to) = (
            self.body.shape(x).to_vec(),
            self.body.shape(node.outputs[0]).to_vec(),
        );
        let (n, k) = (from[axis], to[axis]);
        let stride: usize = from[axis + 1..].iter().product();
        let lines = to.iter().product::<usize>() / k.max(1);
        let dtype = self.body.dtype(x);
        let split = self.split(lines as u64, 10 * n as u64);
        let writes: Vec<(ValueId, Arg)> = node
            .outputs
            .iter()
            .map(|&v| (v, self.destination(v)))
            .collect();
        let buffers = Buffers {
            reads: self.leaves(&[x]),
            writes,
        };
        let workspace = buffers.reads.len() + buffers.writes.len();
        self.kernel("top_k", buffers, split, n * 4, |p, e, outs| {
            let slot =
                e.b.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, 32, 3));
            let line = e.b.ins().stack_addr(types::I64, slot, 0);
            let head = i64::from(dtype as u32) | i64::from(largest) << 32;
            for (i, word) in [head, n as i64, k as i64, stride as i64]
                .into_iter()
                .enumerate()
            {
                let word = e.iconst(word);
                e.b.ins()
                    .store(MemFlagsData::trusted(), word, line, (i * 8) as i32);
            }
            let base = *p
                .stored
                .get(&x)
                .ok_or_else(|| Error::internal("top_k reads a stored value"))?;
            let order = e.arg(workspace);
            over_lines(p, e, &from, axis, |p, e, at| {
                let (src, dst) = (
                    e.linearise(at, &from),
                    e.linearise(at, p.body.shape(node.outputs[0])),
                );
                let src = element_address(e, base, src, dtype);
                let values = element_address(e, outs[0], dst, dtype);
                let positions = element_address(e, outs[1], dst, DType::I64);
                let failed = e.call(
                    "gm_top_k",
                    &[line, src, values, positions, order],
                    Some(types::I32),
                )?;
                e.fault_if(
                    failed.expect("declared with a result"),
                    status::BAD_DESCRIPTOR,
                );
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
        let buffers = Buffers {
            reads: self.leaves(&[indices, updates]),
            writes,
        };
        // Updates may meet, so they are joined in order by one thread.
        self.kernel("scatter", buffers, (1, 0), 0, |p, e, outs| {
            let shape = p.body.shape(updates).to_vec();
            let n: usize = shape.iter().product();
            e.for_loop(Ix::C(0), Ix::C(n as i64), 1, &[], |e, i, _| {
                let at = e.delinearise(Ix::V(i), &shape);
                p.scoped(|p| p.scatter_update(e, &node, &at, outs[0]))?;
                Ok(vec![])
            })?;
            Ok(())
        })
    }

    /// Results that no phase wrote.
    fn copy_repeated_results(&mut self) -> Result<()> {
        for (v, arg) in self.placed.unwritten(&self.body) {
            let held = self.placed.location.get(&v).copied();
            self.store_elements("copy", &[(v, v)], vec![(v, arg)])?;
            if let Some(held) = held {
                self.placed.location.insert(v, held);
            }
        }
        Ok(())
    }
}

/// The body of a cluster and the op that decides how it loops; `None` for a body without nodes.
fn anchor_of(cluster: &Node) -> Option<(&Graph, &Node)> {
    let (Op::Cluster { anchor, .. }, [body]) = (&cluster.op, &cluster.regions[..]) else {
        return None;
    };
    let mut nodes = body.nodes();
    nodes.nth(*anchor).map(|(_, node)| (body, node))
}

/// Why the anchor of a cluster is written out, if it is a composite op that no kernel takes.
fn written_out(body: &Graph, anchor: &Node) -> Option<Rejected> {
    if !is_composite(&anchor.op) || has_kernel(body, anchor) {
        return None;
    }
    let why = coverage::kernels(body, anchor).err();
    Some(why.map_or(Rejected::Empty, Rejected::Uncovered))
}

/// A record of a node that runs in loops, if it has a kernel for other operands. Errors when that is because a constant cannot be read.
fn fallback(g: &Graph, node: &Node, why: Rejected) -> Result<Option<Fallback>> {
    if let Rejected::Failed(e) = why {
        return Err(e.at_origin(&node.origin));
    }
    let is_fallback = why.is_fallback();
    Ok(is_fallback.then(|| Fallback {
        node: node.origin.to_string(),
        op: node.op.name(),
        why,
        work: work_of(g, node),
    }))
}

fn work_of(g: &Graph, node: &Node) -> Work {
    let types = |values: &[ValueId]| -> Vec<&Type> { values.iter().map(|&v| g.ty(v)).collect() };
    let (operands, results) = (types(&node.inputs), types(&node.outputs));
    work::of_op(&node.op, &operands, &results, &Extents::default())
}

fn wrong_phase(node: &Node) -> Error {
    Error::internal(format!("{} is in a phase of another kind", node.op.name()))
}

fn element_address(e: &mut Emitter, base: Value, at: Ix<Value>, dtype: DType) -> Value {
    let bytes = e.mul(at, dtype.size_bytes() as i64);
    let address = e.add(Ix::V(base), bytes);
    e.val(address)
}

/// Emits `f(index, linear position)` for all items; the innermost axis is a loop of its own, so that its neighbours' index
/// arithmetic is not repeated.
fn over_elements(
    p: &mut Puller<Value>,
    e: &mut Emitter,
    shape: &[usize],
    f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Ix<Value>], Ix<Value>) -> Result<()>,
) -> Result<()> {
    let inner_axis = shape.iter().rposition(|&d| d != 1);
    let Some(inner_axis) = inner_axis else {
        return f(p, e, &vec![Ix::C(0); shape.len()], Ix::C(0));
    };
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
