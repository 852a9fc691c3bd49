//! Compiles one cluster: a kernel per phase, and the plan of their calls.

use super::body::Body;
use super::emit::Emitter;
use super::jit::{Kernel, Variants};
use super::kernels::{has_kernel, match_task};
use super::lines::over_elements;
use super::loops::Loops;
use super::phases::{MatchContext, Phase, cut};
use super::pull::{Emit, Puller, inner_iterations};
use super::rejected::{Fallback, Rejected};
use super::strided::{Strided, row_major};
use super::task::{Call, Context, Place, Ptr, Task};
use super::thunk::Slot;
use super::vector::{self, Destination, VectorMap};
use super::{GraphCompiler, kernel_name};
use crate::cluster::coverage::{self, is_composite};
use crate::cluster::ranges::extreme;
use crate::codegen::placed::Placed;
use crate::codegen::plan::{Arg, KernelPlan, PlanStep};
use crate::cost::{Extents, Work, work};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, Type, ValueId};
use cranelift_codegen::ir::Value;
use gristmill_kernels::Blocked;
use gristmill_runtime::Tensor;
use gristmill_runtime::program::{Blocks, CpuKernel, SERIAL_NS, grain};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// One cluster being compiled.
pub(super) struct ClusterCompiler<'s, 'o> {
    pub(super) graph_compiler: &'s mut GraphCompiler<'o>,
    outer: &'s Graph,
    id: NodeId,
    pub(super) body: Body,
    placed: Placed,
}

/// A node without a kernel, and the reason.
type Miss = (NodeId, Rejected);

/// A piece of a result.
enum Part {
    Copy(Call),
    Map(Box<VectorMap>),
}

/// A kernel's buffers: values read, then values written.
pub(super) struct Buffers {
    pub(super) reads: Vec<(ValueId, Arg)>,
    pub(super) writes: Vec<(ValueId, Arg)>,
}

impl<'s, 'o> ClusterCompiler<'s, 'o> {
    pub(super) fn compile(
        graph_compiler: &'s mut GraphCompiler<'o>,
        outer: &'s Graph,
        id: NodeId,
        node: &Node,
    ) -> Result<KernelPlan> {
        let body = Body::new(node, &has_kernel)?;
        let mut compiler = ClusterCompiler {
            placed: Placed::new(&body)?,
            graph_compiler,
            outer,
            id,
            body,
        };
        let phases = compiler.phases_with_reports(node)?;
        for phase in phases {
            compiler.phase(&phase)?;
        }
        compiler.copy_repeated_results()?;
        let mut plan = compiler.placed.plan;
        if plan.steps.len() > 1 && !plan.begins_with_copy {
            // Another step may read the operand again.
            plan.in_place.clear();
        }
        Ok(plan)
    }

    /// The buffer for `v`, written by a phase.
    pub(super) fn destination(&mut self, v: ValueId) -> Arg {
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
            self.graph_compiler.fallbacks.extend(fallback);
            return Ok(phases);
        }
        let mut must_write_out = false;
        for (id, why) in misses {
            let node = self.body.graph.node(id);
            must_write_out |= is_composite(&node.op);
            let fallback = fallback(&self.body.graph, node, why)?;
            self.graph_compiler.fallbacks.extend(fallback);
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
        let phases = cut(&self.body, &mut |context, id, node| {
            let is_extreme = extreme(&self.body.graph, node).is_some();
            if !is_extreme && !self.body.anchor.contains(&id) {
                return None;
            }
            match match_task(&self.context(cluster, context), id, node) {
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

    fn context<'c>(&'c self, cluster: &'c Node, phase: &'c MatchContext) -> Context<'c> {
        let options = self.graph_compiler.options;
        Context {
            body: &self.body,
            outer: self.outer,
            cluster,
            users: phase.users,
            in_memory: phase.in_memory,
            isa: options.target.isa(),
            constants: &self.graph_compiler.constants,
            conv: options.conv,
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

    pub(super) fn leaves(&self, roots: &[ValueId]) -> Vec<(ValueId, Arg)> {
        self.placed.leaves(&self.body, roots)
    }

    /// Emits a kernel and appends its step. `f` gets the puller and the addresses of the written buffers.
    pub(super) fn kernel(
        &mut self,
        purpose: &str,
        buffers: Buffers,
        split: (u64, u64),
        workspace_bytes: usize,
        variants: Variants,
        f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Value]) -> Result<()>,
    ) -> Result<()> {
        let Buffers { reads, writes } = buffers;
        let (name, body) = (self.kernel_name(purpose), &self.body);
        let kernel = self.graph_compiler.jit.kernel(&name, variants, |e| {
            let stored = reads.iter().enumerate().map(|(i, &(v, _))| (v, e.arg(i)));
            let stored = stored.collect();
            let outs = reads.len()..reads.len() + writes.len();
            let outs: Vec<Value> = outs.map(|i| e.arg(i)).collect();
            f(&mut Puller::new(body, stored), e, &outs)
        })?;
        let (items, grain) = split;
        let constants = self.constants_of(&kernel)?;
        let buffers = reads.iter().chain(&writes).map(|&(_, arg)| arg);
        let function = kernel.function;
        self.placed.plan.steps.push(PlanStep {
            kernel: self.graph_compiler.add_kernel(CpuKernel {
                name,
                function,
                workspace_bytes_per_thread: workspace_bytes,
                blocks: None,
            }),
            args: constants.into_iter().chain(buffers).collect(),
            n_outputs: writes.len() as u32,
            items,
            grain,
        });
        self.placed.note_written(writes);
        Ok(())
    }

    /// The buffer of a function's constants, if it has an argument for them.
    fn constants_of(&mut self, kernel: &Kernel) -> Result<Option<Arg>> {
        let tensor = kernel.constants.as_deref().map(constants_tensor);
        Ok(tensor.transpose()?.map(|tensor| self.placed.pack(tensor)))
    }

    /// Name of the next step's kernel.
    fn kernel_name(&self, purpose: &str) -> String {
        let n_steps = self.placed.plan.steps.len();
        kernel_name(self.outer, self.id, n_steps, purpose)
    }

    fn task(&mut self, task: &Task) -> Result<()> {
        let first_temp = self.placed.plan.scratch.len() as u32;
        self.placed.plan.scratch.extend(&task.temps);
        let places = task.results.iter().map(|&v| (v, self.destination(v)));
        let places: BTreeMap<ValueId, Arg> = places.collect();
        for call in &task.calls {
            self.call(call, first_temp, &|v| places.get(&v).copied())?;
        }
        self.placed.location.extend(places);
        Ok(())
    }

    /// Appends a call of a task kernel. The generated kernel arranges the addresses and passes the items on; kernels of one symbol that
    /// arrange them alike share it.
    fn call(
        &mut self,
        call: &Call,
        first_temp: u32,
        place_of: &dyn Fn(ValueId) -> Option<Arg>,
    ) -> Result<()> {
        self.graph_compiler.jit.note(call);
        let mut reads = vec![self.placed.pack(call.descriptor.clone())];
        let (mut writes, mut slots) = (Vec::new(), Vec::new());
        for ptr in &call.ptrs {
            slots.push(match ptr {
                Ptr::Null => Slot::Null,
                Ptr::Workspace => Slot::Workspace,
                Ptr::Read(place, offset) => {
                    reads.push(self.read(place, first_temp)?);
                    Slot::Read(reads.len() - 1, *offset)
                }
                Ptr::Write(place, offset) => {
                    writes.push(match place {
                        Place::Temp(i) => Arg::Scratch(first_temp + *i as u32),
                        Place::Value(v) => place_of(*v).ok_or_else(|| wrongly_written(call))?,
                        Place::Packed(_) => return Err(wrongly_written(call)),
                    });
                    Slot::Write(writes.len() - 1, *offset)
                }
            });
        }
        let (symbol, n_outputs) = (call.symbol, writes.len());
        let thunk = self
            .graph_compiler
            .thunk(symbol, reads.len(), n_outputs, &slots)?;
        let constants = self.constants_of(&thunk)?;
        let blocks = Blocked::of_symbol(symbol).map(|kind| Blocks {
            kind,
            descriptor: u32::from(constants.is_some()),
            cost_ns: call.cost_ns,
        });
        let kernel = CpuKernel {
            name: self.kernel_name(symbol),
            function: thunk.function,
            workspace_bytes_per_thread: call.workspace_bytes,
            blocks,
        };
        let items = call.items as u64;
        self.placed.plan.steps.push(PlanStep {
            kernel: self.graph_compiler.add_kernel(kernel),
            args: constants.into_iter().chain(reads).chain(writes).collect(),
            n_outputs: n_outputs as u32,
            items,
            grain: grain(items, call.cost_ns),
        });
        Ok(())
    }

    /// The buffer read by a call.
    fn read(&mut self, place: &Place, first_temp: u32) -> Result<Arg> {
        Ok(match place {
            Place::Value(v) => self.argument(*v)?,
            Place::Packed(constant) => self.placed.pack(constant.clone()),
            Place::Temp(i) => Arg::Scratch(first_temp + *i as u32),
        })
    }

    /// The buffer of a value that is in memory; a constant gets one on demand.
    fn argument(&mut self, v: ValueId) -> Result<Arg> {
        if let Some(&arg) = self.placed.location.get(&v) {
            return Ok(arg);
        }
        let constant = self.body.graph.constant(v);
        let constant = constant
            .ok_or_else(|| Error::internal("a task reads a value that is not in memory"))?;
        let arg = self
            .placed
            .pack(self.graph_compiler.options.constants.plain(constant)?);
        self.placed.location.insert(v, arg);
        Ok(arg)
    }

    fn elements(&mut self, roots: &[ValueId]) -> Result<()> {
        let together = match roots {
            [_] => None,
            _ => self.vector_plan(roots, &self.whole(roots[0])),
        };
        if let Some(map) = together {
            let writes = roots.iter().map(|&v| (v, self.destination(v))).collect();
            return self.vector_map(map, writes);
        }
        // Results of one node, and single elements, come from one loop. Other roots may have a fast path
        // each; later ones load those before them.
        let is_together = |v: ValueId| self.has_siblings(v) || self.body.n_elements(v) == 1;
        if roots.len() > 1 && roots.iter().all(|&v| is_together(v)) {
            let writes = roots.iter().map(|&v| (v, self.destination(v))).collect();
            return self.store_elements("map", roots, writes);
        }
        roots.iter().try_for_each(|&root| self.one_value(root))
    }

    /// True for a result of a node that has several.
    fn has_siblings(&self, v: ValueId) -> bool {
        let node = self.body.graph.def_node(v);
        node.is_some_and(|n| n.outputs.len() > 1)
    }

    fn one_value(&mut self, root: ValueId) -> Result<()> {
        let arg = self.destination(root);
        self.one_value_in(root, arg)
    }

    fn one_value_in(&mut self, root: ValueId, arg: Arg) -> Result<()> {
        if self.parts(root, root, arg)? {
            return Ok(());
        }
        if let Some(map) = self.vector_plan(&[root], &self.whole(root)) {
            return self.vector_map(map, vec![(root, arg)]);
        }
        let joined = self.concatenation_below(root);
        let unmoved = joined.filter(|&v| self.body.shape(v) == self.body.shape(root));
        if let Some(maps) = unmoved.and_then(|v| self.maps_of_operands(root, v)) {
            return maps.into_iter().try_for_each(|map| {
                self.vector_variant(map, vec![(root, arg)], Variants::OfParts)
            });
        }
        match joined.filter(|&v| v != root) {
            Some(joined) => {
                self.one_value(joined)?;
                self.one_value_in(root, arg)
            }
            None => self.store_elements("map", &[root], vec![(root, arg)]),
        }
    }

    /// A kernel for each operand of the concatenation `joined` that the element-wise expression `root` reads.
    fn maps_of_operands(&self, root: ValueId, joined: ValueId) -> Option<Vec<VectorMap>> {
        let node = self.body.graph.def_node(joined)?;
        let Op::Concat { axis } = node.op else {
            return None;
        };
        let mut start = 0;
        let parts = node.inputs.iter().map(|&x| {
            let first = start;
            start += self.body.shape(x)[axis];
            first..start
        });
        let filled = parts.filter(|part| !part.is_empty());
        filled.map(|part| self.part_map(root, axis, part)).collect()
    }

    /// The kernel of the part of `root` that a range along an axis is.
    fn part_map(&self, root: ValueId, axis: usize, part: Range<usize>) -> Option<VectorMap> {
        let mut to = self.whole(root);
        to.offset += part.start as i64 * to.strides[axis];
        let loops = Loops::over_part(self.body.shape(root), axis, part);
        let in_memory = |v: ValueId| self.in_memory(v);
        vector::plan_in(&self.body, &[root], &in_memory, &to, &loops)
    }

    fn in_memory(&self, v: ValueId) -> bool {
        self.placed.location.contains_key(&v)
    }

    /// The first concatenation that `v` is computed from by element-wise ops of one shape, and reshapes.
    fn concatenation_below(&self, v: ValueId) -> Option<ValueId> {
        let node = self.body.graph.def_node(v)?;
        if self.in_memory(v) || self.body.n_elements(v) == 0 {
            return None;
        }
        let same_shape = |x: &&ValueId| self.body.shape(**x) == self.body.shape(v);
        match &node.op {
            Op::Map(_) => {
                let mut operands = node.inputs.iter().filter(same_shape);
                operands.find_map(|&x| self.concatenation_below(x))
            }
            Op::Reshape { .. } => self.concatenation_below(node.inputs[0]),
            Op::Concat { .. } => Some(v),
            _ => None,
        }
    }

    fn whole(&self, v: ValueId) -> Destination {
        Destination {
            offset: 0,
            strides: row_major(self.body.shape(v)),
        }
    }

    fn vector_plan(&self, roots: &[ValueId], out: &Destination) -> Option<VectorMap> {
        let in_memory = |v: ValueId| self.in_memory(v);
        vector::plan(&self.body, roots, &in_memory, out)
    }

    /// Permits that the result of a scatter, the whole of a cluster, is written over its data, unless another operand is the same.
    pub(super) fn permit_scatter_in_place(
        &mut self,
        data: ValueId,
        result: Arg,
        others: &[(ValueId, Arg)],
    ) {
        let from = self.placed.location.get(&data).copied();
        // Of no elements nothing is copied, and the first step is the one that checks the indices.
        let is_whole = self.body.graph.n_nodes() == 1 && self.body.n_elements(data) > 0;
        let is_apart = others.iter().all(|&(_, arg)| Some(arg) != from);
        if let (Some(Arg::Operand(from)), Arg::Result(to)) = (from, result)
            && is_whole
            && is_apart
        {
            self.placed.plan.in_place.push((from, to));
            self.placed.plan.begins_with_copy = true;
        }
    }

    fn vector_map(&mut self, map: VectorMap, writes: Vec<(ValueId, Arg)>) -> Result<()> {
        self.vector_variant(map, writes, Variants::OfPrograms)
    }

    fn vector_variant(
        &mut self,
        map: VectorMap,
        writes: Vec<(ValueId, Arg)>,
        variants: Variants,
    ) -> Result<()> {
        self.graph_compiler.jit.note(&map);
        let items = map.n_items() as u64;
        debug_assert!(items as usize <= self.body.n_elements(writes[0].0));
        let grain = (SERIAL_NS * 1000).div_ceil(map.cost_ps());
        let split = (items, if items < 2 * grain { 0 } else { grain });
        let leaves = map.expression.leaves.iter();
        let reads: Vec<(ValueId, Arg)> = leaves
            .map(|l| (l.value, self.placed.location[&l.value]))
            .collect();
        for (leaf, out) in map.in_place() {
            if let (Arg::Operand(operand), Arg::Result(result)) = (reads[leaf].1, writes[out].1) {
                self.placed.plan.in_place.push((operand, result));
            }
        }
        let n_reads = reads.len();
        let workspace = n_reads + writes.len();
        let (buffers, bytes) = (Buffers { reads, writes }, map.workspace_bytes());
        self.kernel("vector", buffers, split, bytes, variants, |_, e, outs| {
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
                Part::Copy(call) => self.call(&call, 0, &|_| Some(arg))?,
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
        let in_memory = |v: ValueId| self.in_memory(v);
        let view = Strided::resolve(&self.body, v, &in_memory);
        if in_memory(view.base) {
            let isa = self.graph_compiler.options.target.isa();
            let call = Call::copy(isa, &self.body, &view, v, &to.strides, to.offset);
            return call.map(|c| parts.push(Part::Copy(c))).is_some();
        }
        let node = self.body.graph.def_node(v);
        match node.map(|n| (&n.op, &n.inputs[..])) {
            Some((Op::Concat { axis }, operands)) => {
                return self.split_operands(operands, *axis, to, parts);
            }
            Some((Op::Reshape { .. }, &[x])) if self.is_concat(x) => {
                let to = to.reshaped(self.body.shape(v), self.body.shape(x));
                return to.is_some_and(|to| self.split_parts(x, to, parts));
            }
            _ => {}
        }
        // A whole expression is planned by the caller, with its neighbours.
        let is_whole = to.offset == 0 && to.strides == row_major(self.body.shape(v));
        if parts.is_empty() && is_whole {
            return false;
        }
        let map = self.vector_plan(&[v], &to);
        map.map(|map| parts.push(Part::Map(Box::new(map))))
            .is_some()
    }

    fn is_concat(&self, v: ValueId) -> bool {
        let node = self.body.graph.def_node(v);
        node.is_some_and(|n| matches!(n.op, Op::Concat { .. }))
    }

    /// The parts of a concatenation, operand by operand.
    fn split_operands(
        &self,
        operands: &[ValueId],
        axis: usize,
        to: Destination,
        parts: &mut Vec<Part>,
    ) -> bool {
        let mut start = 0;
        operands.iter().all(|&x| {
            let part = Destination {
                offset: to.offset + start * to.strides[axis],
                strides: to.strides.clone(),
            };
            start += self.body.shape(x)[axis] as i64;
            self.split_parts(x, part, parts)
        })
    }

    /// Stores the elements of each source at the same index of its buffer among `writes`.
    pub(super) fn store_elements(
        &mut self,
        purpose: &str,
        sources: &[ValueId],
        writes: Vec<(ValueId, Arg)>,
    ) -> Result<()> {
        let shape = self.body.shape(sources[0]).to_vec();
        let items: usize = shape.iter().product();
        if items == 0 {
            self.placed.note_written(writes);
            return Ok(());
        }
        let split = self.split(items as u64, self.cost_ns(sources));
        let reads = self.leaves(sources);
        let buffers = Buffers { reads, writes };
        let variants = Variants::OfPrograms;
        self.kernel(purpose, buffers, split, 0, variants, |p, e, outs| {
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
    pub(super) fn cost_ns(&self, roots: &[ValueId]) -> u64 {
        let mut seen = BTreeSet::new();
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
            let inner = times.saturating_mul(inner);
            flops = flops.saturating_add(own.saturating_mul(inner));
            todo.extend(node.inputs.iter().map(|&x| (x, inner)));
        }
        1 + flops / 2
    }

    /// Items of a kernel, and items of a piece for a thread; 0 when it is not worth splitting.
    pub(super) fn split(&self, items: u64, cost_ns: u64) -> (u64, u64) {
        let grain = SERIAL_NS.div_ceil(cost_ns.max(1));
        (items, if items < 2 * grain { 0 } else { grain })
    }

    /// Results not written by any phase.
    fn copy_repeated_results(&mut self) -> Result<()> {
        for (v, arg) in self.placed.unwritten(&self.body) {
            self.store_elements("copy", &[v], vec![(v, arg)])?;
        }
        Ok(())
    }
}

/// The constants of a kernel: never empty, so that the buffer has an address.
fn constants_tensor(constants: &[i64]) -> Result<Tensor> {
    let constants = match constants.is_empty() {
        true => &[0],
        false => constants,
    };
    Ok(Tensor::from_slice(constants, &[constants.len()])?)
}

/// The body of a cluster and its anchor, which decides the loops; `None` for a body without nodes.
fn anchor_of(cluster: &Node) -> Option<(&Graph, &Node)> {
    let (Op::Cluster { anchor, .. }, [body]) = (&cluster.op, &cluster.regions[..]) else {
        return None;
    };
    let mut nodes = body.nodes();
    nodes.nth(*anchor).map(|(_, node)| (body, node))
}

/// The reason to write out the anchor of a cluster, if it is a composite op that no kernel takes.
fn written_out(body: &Graph, anchor: &Node) -> Option<Rejected> {
    if !is_composite(&anchor.op) || has_kernel(body, anchor) {
        return None;
    }
    let why = coverage::kernels(body, anchor).err();
    Some(why.map_or(Rejected::Empty, Rejected::Uncovered))
}

/// The error of a call that writes what is no result of its task.
fn wrongly_written(call: &Call) -> Error {
    Error::internal(format!("{} writes what its task does not", call.symbol))
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
