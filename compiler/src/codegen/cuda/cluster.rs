//! Generates one cluster: a kernel per phase, and the plan of their launches.
//!
//! Results without a kernel of their own ([`super::contract`], [`super::rows`]) are computed by
//! pulling their elements: a thread computes one result element, or one line, in strides of the
//! whole grid.

use super::bundle::{self, Bundle, Piece};
use super::candidates::{Candidate, Candidates, Chooser, Resources};
use super::emit::{Emitter, Value};
use super::lines::{self, Lines};
use super::map::{self, Map};
use super::source::{Parameters, Source, source};
use super::transposed::{self, Transposed};
use super::{GraphCompiler, Options, attention, contract, rows, skinny, windows};
use crate::codegen::access::Expression;
use crate::codegen::body::Body;
use crate::codegen::kernel_forms::{Choice, Preferred, Why};
use crate::codegen::phases::{Cover, MatchContext, Phase, Selection, cut, wrong_phase};
use crate::codegen::placed::Placed;
use crate::codegen::plan::{Arg, KernelPlan};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller, beats};
use crate::error::{Error, Result};
use crate::ir::{Extremum, Graph, Node, NodeId, Op, ValueId, Window};
use crate::target::Arch;
use gristmill_runtime::DType;
use gristmill_runtime::gpu::{Launch, TensorMap};
use std::collections::BTreeMap;

/// Threads of a block.
pub(super) const BLOCK: usize = 256;
/// Most blocks of a grid, so that an index that runs past the items by one stride still fits 32 bits.
pub(super) const MAX_BLOCKS: u64 = 1 << 20;
/// Most kernels of a cluster with a choice each, of which a form changes one: more are as predicted.
const MOST_CHOICES: usize = 4;
/// Positions below this are indexed in 32 bits.
const NARROW: usize = 1 << 30;

/// One cluster being compiled.
pub(super) struct ClusterCompiler<'s> {
    graph_compiler: &'s mut GraphCompiler,
    outer: &'s Graph,
    id: NodeId,
    body: Body,
    placed: Placed,
    /// Kernels so far.
    pieces: Vec<Piece>,
    /// The choice of the next one.
    choice: Option<Choice>,
    chooser: Chooser,
    why: Why,
}

/// True if one task computes a composite op: it is not expanded.
fn keeps(graph: &Graph, node: &Node, arch: Arch) -> bool {
    // Poolings go by elements in either layout.
    matches!(node.op, Op::Pool { .. } | Op::MaxPoolGrad { .. })
        || rows::keeps(graph, node)
        || attention::keeps(graph, node, arch)
}

/// The kernel, in all variants, that computes a node by other means than single elements.
fn find(
    body: &Body,
    around: &MatchContext,
    options: &Options,
    id: NodeId,
    node: &Node,
) -> Option<(Cover, Candidates)> {
    rows::find(body, around, id, node)
        .or_else(|| attention::find(body, around, id, node, options.arch))
        .or_else(|| skinny::find(body, around, id, node))
        .or_else(|| contract::find(body, around, options, id, node))
        .or_else(|| windows::find(body, around, id, node))
}

/// A kernel's parameters and their values in its body: operands in memory, then buffers beside them.
struct Declared {
    parameters: Parameters,
    stored: BTreeMap<ValueId, Value>,
    outs: Vec<Value>,
}

/// Scratch memory that one kernel writes for a later one to read.
#[derive(Clone, Copy)]
struct Partial {
    dtype: DType,
    arg: Arg,
}

/// A kernel's buffers: values and partial results read, then values or partial results written; and values read that it gets as tensor maps too.
#[derive(Default)]
struct Buffers {
    reads: Vec<(ValueId, Arg)>,
    joins: Option<Partial>,
    writes: Vec<(ValueId, Arg)>,
    splits: Option<Partial>,
    maps: Vec<(ValueId, TensorMap)>,
}

impl Buffers {
    fn new(reads: Vec<(ValueId, Arg)>, writes: Vec<(ValueId, Arg)>) -> Buffers {
        Buffers {
            reads,
            writes,
            ..Buffers::default()
        }
    }

    /// Declares the parameters of a kernel.
    fn declare(&self, body: &Body, e: &mut Emitter) -> Result<Declared> {
        let mut parameters = Parameters::default();
        let mut stored = BTreeMap::new();
        for &(v, _) in &self.reads {
            let name = parameters.read(body.dtype(v));
            stored.insert(v, e.named(Kind::Index, name));
        }
        let mut names: Vec<String> = Vec::new();
        names.extend(self.joins.map(|j| parameters.read(j.dtype)));
        let written = self.writes.iter().map(|w| body.dtype(w.0));
        let written = written.chain(self.splits.map(|s| s.dtype));
        names.extend(written.map(|dtype| parameters.write(dtype)));
        for (v, map) in &self.maps {
            let buffer = self.reads.iter().position(|r| r.0 == *v);
            let buffer = buffer
                .ok_or_else(|| Error::internal("a tensor map of a value that is not read"))?;
            parameters.map(TensorMap {
                buffer: buffer as u32,
                ..map.clone()
            });
        }
        let outs = names.into_iter().map(|name| e.named(Kind::Index, name));
        Ok(Declared {
            parameters,
            stored,
            outs: outs.collect(),
        })
    }

    /// Buffers that are only read, and those that are written, in the order of the parameters.
    fn args(&self) -> [Vec<Arg>; 2] {
        let joins = self.joins.map(|j| j.arg);
        let reads = self.reads.iter().map(|r| r.1).chain(joins);
        let splits = self.splits.map(|s| s.arg);
        let writes = self.writes.iter().map(|w| w.1).chain(splits);
        [reads.collect(), writes.collect()]
    }
}

impl<'s> ClusterCompiler<'s> {
    /// The plan of cluster `node` of `outer`; its kernels go into the graph.
    pub(super) fn compile(
        graph_compiler: &'s mut GraphCompiler,
        outer: &'s Graph,
        (id, node): (NodeId, &Node),
        Preferred { form, why, .. }: Preferred,
    ) -> Result<KernelPlan> {
        let options = graph_compiler.options;
        let body = Body::new(node, &|graph, node| keeps(graph, node, options.arch))?;
        let placed = Placed::new(&body)?;
        let chooser = Chooser::new(form);
        let mut compiler = ClusterCompiler {
            graph_compiler,
            outer,
            id,
            body,
            placed,
            pieces: Vec::new(),
            choice: None,
            chooser,
            why,
        };
        let body = &compiler.body;
        for phase in cut(body, &mut |around, id, node| {
            find(body, around, &options, id, node)
        }) {
            compiler.phase(&phase)?;
        }
        compiler.launch();
        compiler.copy_repeated_results()?;
        compiler.launch();
        let n = u8::try_from(compiler.chooser.n)
            .ok()
            .filter(|_| compiler.chooser.n_kernels <= MOST_CHOICES);
        let n = n.unwrap_or(1);
        compiler.graph_compiler.forms.entry(id).or_default().n = n;
        Ok(compiler.placed.plan)
    }

    /// Name of the next kernel.
    fn name(&self, what: &str) -> String {
        let number = self.placed.plan.steps.len() + self.pieces.len();
        self.graph_compiler.name(self.outer, self.id, number, what)
    }

    fn phase(&mut self, phase: &Phase<Candidates>) -> Result<()> {
        match phase {
            Phase::Task(candidates) => self.task(candidates),
            Phase::Elements(roots) => self.elements(roots),
            Phase::Lines(node) => self.cum_sum(*node),
            Phase::TopK(node) => self.top_k(*node),
            Phase::Scatter(node) => self.scatter(*node),
        }
    }

    fn destinations(&mut self, values: &[ValueId]) -> Vec<(ValueId, Arg)> {
        values.iter().map(|&v| (v, self.destination(v))).collect()
    }

    /// The buffer that `v` is written to, which holds it under its other shapes as well; one of these may be a result.
    fn destination(&mut self, v: ValueId) -> Arg {
        let shapes = self.other_shapes(v);
        let result = |v: ValueId| self.body.graph.outputs.iter().position(|o| o.value == v);
        let first = if result(v).is_some() {
            None
        } else {
            shapes.iter().copied().find(|&w| result(w).is_some())
        };
        let shared: Vec<ValueId> = shapes
            .into_iter()
            .filter(|&w| Some(w) == first || result(w).is_none())
            .collect();
        let arg = self.placed.destination(&self.body, first.unwrap_or(v));
        self.placed
            .location
            .extend(shared.into_iter().map(|w| (w, arg)));
        arg
    }

    /// Values that are reshapes of `v`, directly or through other reshapes.
    fn other_shapes(&self, v: ValueId) -> Vec<ValueId> {
        let reshapes = |x: ValueId| {
            let nodes = self.body.graph.nodes().map(|(_, n)| n);
            nodes
                .filter(move |n| matches!(n.op, Op::Reshape { .. }) && n.inputs[0] == x)
                .map(|n| n.outputs[0])
        };
        let mut found: Vec<ValueId> = reshapes(v).collect();
        let mut next = 0;
        while let Some(&w) = found.get(next) {
            found.extend(reshapes(w));
            next += 1;
        }
        found
    }

    /// Writes a kernel whose threads share `items`, and appends its step. `f` gets the number of the item and the written buffers.
    fn kernel(
        &mut self,
        what: &str,
        buffers: Buffers,
        items: usize,
        f: impl FnOnce(&mut Puller<Value>, &mut Emitter, Value, &[Value]) -> Result<()>,
    ) -> Result<()> {
        let resources = Resources::new(items.div_ceil(BLOCK), BLOCK);
        self.blocks(what, buffers, items, resources, |p, e, outs| {
            let first = "ix(blockIdx.x) * ix(blockDim.x) + ix(threadIdx.x)";
            let end = e.index(items as i64);
            let end = e.text(end).to_owned();
            e.counted(
                [first, &end, "ix(gridDim.x) * ix(blockDim.x)"],
                |e, item| f(p, e, item, outs),
            )
        })
    }

    /// Writes a kernel of so many blocks of so many threads, whose indices reach `items`, and appends its step. `f` gets the partial results that are
    /// read, if any, then the written buffers.
    fn blocks(
        &mut self,
        what: &str,
        buffers: Buffers,
        items: usize,
        resources: Resources,
        f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Value]) -> Result<()>,
    ) -> Result<()> {
        let wide = items >= NARROW || needs_wide_indices(&self.body);
        let mut e = Emitter::new(wide);
        let declared = buffers.declare(&self.body, &mut e)?;
        let mut p = Puller::new(&self.body, declared.stored);
        f(&mut p, &mut e, &declared.outs)?;
        self.pieces.push(Piece {
            what: what.to_owned(),
            name: self.name(what),
            choice: self.choice.take(),
            wide,
            resources,
            parameters: declared.parameters,
            body: e.finish(),
            buffers: buffers.args(),
        });
        self.placed.note_written(buffers.writes);
        Ok(())
    }

    /// Adds the kernels so far to the plan, together where they do not wait for each other.
    fn launch(&mut self) {
        for pieces in bundle::launches(std::mem::take(&mut self.pieces)) {
            let bundled = (pieces.len() > 1).then(|| self.name("bundle"));
            for mut choice in pieces.iter().filter_map(|p| p.choice.clone()) {
                choice.kernel = bundled.clone().unwrap_or(choice.kernel);
                self.graph_compiler.chosen(self.id, choice);
            }
            let step = match <[Piece; 1]>::try_from(pieces) {
                Ok([piece]) => {
                    let entry = format!("gm_{}", piece.what);
                    let step = piece.step(self.graph_compiler.kernels.len());
                    let Piece {
                        wide,
                        parameters,
                        body,
                        ..
                    } = piece;
                    let source = source(&entry, &piece.resources, wide, &parameters, "", body);
                    self.launched(piece.name, entry, source, &piece.resources);
                    step
                }
                Err(pieces) => {
                    let bundle = Bundle::new("gm_bundle", &pieces);
                    let step = bundle.step(self.graph_compiler.kernels.len());
                    let (name, entry) = (bundled.unwrap_or_default(), "gm_bundle".to_owned());
                    self.launched(name, entry, bundle.source, &bundle.resources);
                    step
                }
            };
            self.placed.plan.steps.push(step);
        }
    }

    fn launched(&mut self, name: String, entry: String, source: Source, resources: &Resources) {
        let launch = Launch {
            grid: [resources.blocks.clamp(1, MAX_BLOCKS) as u32, 1, 1],
            block: [resources.threads as u32, 1, 1],
            shared_bytes: resources.shared_bytes,
        };
        self.graph_compiler.kernel(name, entry, source, launch);
    }

    /// Appends one variant of a kernel. It writes a result or, where several blocks share one,
    /// partial results, which a second kernel joins with one thread per result.
    fn task(&mut self, candidates: &Candidates) -> Result<()> {
        let (variant, number, n) = self.chooser.next(candidates);
        if n > 1 {
            let choice = Choice {
                kernel: self.name(variant.name()),
                number,
                n,
                form: variant.words(),
                why: self.why.clone(),
            };
            self.choice = Some(choice);
        }
        let Buffers { reads, writes, .. } = self.buffers(variant.result());
        let Some((dtype, n)) = variant.partial(&self.body) else {
            return self.variant(variant, Buffers::new(reads, writes), 0);
        };
        let partial = Some(self.partial(dtype, n));
        let splits = Buffers {
            splits: partial,
            ..Buffers::new(reads.clone(), Vec::new())
        };
        self.variant(variant, splits, n)?;
        let joins = Buffers {
            joins: partial,
            ..Buffers::new(reads, writes)
        };
        let name = format!("{}_join", variant.name());
        self.kernel(&name, joins, variant.n_results(), |p, e, item, buffers| {
            variant.join(p, e, item, [buffers[0], buffers[1]])
        })
    }

    /// The first kernel of a variant.
    fn variant(&mut self, variant: &dyn Candidate, buffers: Buffers, items: usize) -> Result<()> {
        let maps = variant.maps();
        let buffers = Buffers { maps, ..buffers };
        let resources = variant.resources();
        self.blocks(variant.name(), buffers, items, resources, |p, e, outs| {
            variant.emit(p, e, outs[0])
        })
    }

    /// The buffers of a kernel that computes `result` at once.
    fn buffers(&mut self, result: ValueId) -> Buffers {
        let reads = self.placed.leaves(&self.body, &[result]);
        Buffers::new(reads, self.destinations(&[result]))
    }

    /// Scratch memory for `n` elements.
    fn partial(&mut self, dtype: DType, n: usize) -> Partial {
        self.placed.plan.scratch.push(n * dtype.size_bytes());
        Partial {
            dtype,
            arg: Arg::Scratch(self.placed.plan.scratch.len() as u32 - 1),
        }
    }

    /// Stores the elements of `roots`, all of one shape.
    fn elements(&mut self, roots: &[ValueId]) -> Result<()> {
        let mut roots = roots.to_vec();
        roots.retain(|v| !self.placed.location.contains_key(v));
        let Some(&first) = roots.first() else {
            return Ok(());
        };
        let writes = self.destinations(&roots);
        let in_memory = |v: ValueId| self.placed.location.contains_key(&v);
        if let Some(map) = map::plan(&self.body, &roots, &in_memory) {
            return self.vectors(&map, writes);
        }
        if let Some(turned) = transposed::plan(&self.body, &roots, &in_memory) {
            return self.turned(&turned, writes);
        }
        let what = match self.body.graph.def_node(first).map(|n| &n.op) {
            None | Some(Op::Map(_)) => "map",
            Some(op) => op.name(),
        };
        let what = what.to_owned();
        self.store_elements(&what, &roots, writes)
    }

    /// Stores results a vector at a time.
    fn vectors(&mut self, map: &Map, writes: Vec<(ValueId, Arg)>) -> Result<()> {
        let written: Vec<ValueId> = writes.iter().map(|w| w.0).collect();
        let buffers = Buffers::new(self.reads(&map.expression), writes);
        self.kernel("map", buffers, map.n_items(), |p, e, item, outs| {
            let (leaves, outs) = buffers_of(p, &map.expression, &written, outs);
            map.emit(e, item, &leaves, &outs)
        })
    }

    /// Stores results a tile at a time.
    fn turned(&mut self, turned: &Transposed, writes: Vec<(ValueId, Arg)>) -> Result<()> {
        let written: Vec<ValueId> = writes.iter().map(|w| w.0).collect();
        let buffers = Buffers::new(self.reads(&turned.expression), writes);
        let resources = Resources::new(turned.n_blocks(), transposed::BLOCK);
        self.blocks("turned", buffers, 0, resources, |p, e, outs| {
            let (leaves, outs) = buffers_of(p, &turned.expression, &written, outs);
            turned.emit(e, &leaves, &outs)
        })
    }

    /// Distinct values loaded by an expression.
    fn reads(&self, expression: &Expression) -> Vec<(ValueId, Arg)> {
        let mut reads: Vec<(ValueId, Arg)> = Vec::new();
        for leaf in &expression.leaves {
            if reads.iter().all(|(v, _)| *v != leaf.value) {
                reads.push((leaf.value, self.placed.location[&leaf.value]));
            }
        }
        reads
    }

    /// Stores the elements of each source at the same index of its buffer among `writes`.
    fn store_elements(
        &mut self,
        what: &str,
        sources: &[ValueId],
        writes: Vec<(ValueId, Arg)>,
    ) -> Result<()> {
        let shape = self.body.shape(sources[0]).to_vec();
        let items = shape.iter().product();
        if items == 0 {
            return Ok(());
        }
        let buffers = Buffers::new(self.placed.leaves(&self.body, sources), writes);
        self.kernel(what, buffers, items, |p, e, item, outs| {
            let at = e.delinearise(Ix::V(item), &shape);
            for (&v, &out) in sources.iter().zip(outs) {
                let value = p.value(e, v, &at)?;
                e.store(p.body.dtype(v), value, out, Ix::V(item));
            }
            Ok(())
        })
    }

    /// A block per line, if lines suit it.
    fn lines(&mut self, node: &Node) -> Option<Result<()>> {
        let lines = Lines::find(&self.body, node)?;
        let reads = self.placed.leaves(&self.body, &node.inputs[..1]);
        let buffers = Buffers::new(reads, self.destinations(&node.outputs));
        let resources = Resources::new(lines.n_blocks(), lines::BLOCK);
        Some(self.blocks("lines", buffers, 0, resources, |p, e, outs| {
            lines.emit(p, e, outs)
        }))
    }

    /// A thread per line.
    fn cum_sum(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        if let Some(done) = self.lines(&node) {
            return done;
        }
        let Op::CumSum { axis, .. } = node.op else {
            return Err(wrong_phase(&node));
        };
        let mut lines = self.body.shape(node.outputs[0]).to_vec();
        lines[axis] = 1;
        let n_lines = lines.iter().product();
        let reads = self.placed.leaves(&self.body, &node.inputs[..1]);
        let buffers = Buffers::new(reads, self.destinations(&node.outputs));
        self.kernel("cum_sum", buffers, n_lines, |p, e, item, outs| {
            let at = e.delinearise(Ix::V(item), &lines);
            p.cum_sum_line(e, &node, &at, outs[0])
        })
    }

    /// A thread per element: its rank is the number of elements before it.
    fn top_k(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        if let Some(done) = self.lines(&node) {
            return done;
        }
        let selection = Selection::of(&self.body, &node)?;
        let n_items = selection.from.iter().product();
        let reads = self.placed.leaves(&self.body, &[selection.x]);
        let buffers = Buffers::new(reads, self.destinations(&node.outputs));
        self.kernel("top_k", buffers, n_items, |p, e, item, outs| {
            selection.emit(p, e, item, [outs[0], outs[1]])
        })
    }

    /// A copy, then a thread for all updates that may hit the same element: updates that differ
    /// only in the axes that indices select.
    fn scatter(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let y = node.outputs[0];
        let writes = self.destinations(&[y]);
        self.store_elements("copy", &node.inputs[..1], writes.clone())?;
        let updates = Updates::new(&self.body, &node);
        let n_threads: usize = updates.disjoint.iter().product();
        if n_threads * updates.n_ordered() == 0 {
            return Ok(());
        }
        let reads = self.placed.leaves(&self.body, &node.inputs[1..3]);
        let buffers = Buffers::new(reads, writes);
        self.kernel("scatter", buffers, n_threads, |p, e, item, outs| {
            updates.emit(p, e, item, outs[0])
        })
    }

    /// Results not written by any phase.
    fn copy_repeated_results(&mut self) -> Result<()> {
        for (v, arg) in self.placed.unwritten(&self.body) {
            self.store_elements("copy", &[v], vec![(v, arg)])?;
        }
        Ok(())
    }
}

/// A buffer and the dtype of its elements.
type Typed = (Value, DType);

/// Buffers of an expression's leaves and of its results.
fn buffers_of(
    p: &Puller<Value>,
    expression: &Expression,
    written: &[ValueId],
    outs: &[Value],
) -> (Vec<Typed>, Vec<Typed>) {
    let leaves = expression
        .leaves
        .iter()
        .map(|l| (p.stored[&l.value], p.body.dtype(l.value)))
        .collect();
    (
        leaves,
        written
            .iter()
            .zip(outs)
            .map(|(&v, &out)| (out, p.body.dtype(v)))
            .collect(),
    )
}

/// The updates of a scatter.
struct Updates<'n> {
    node: &'n Node,
    /// Extents along the axes that tell disjoint updates apart; 1 along the others.
    disjoint: Vec<usize>,
    /// Extents along the axes whose updates may hit the same element; 1 along the others.
    ordered: Vec<usize>,
}

impl<'n> Updates<'n> {
    fn new(body: &Body, node: &'n Node) -> Updates<'n> {
        let n_index_axes = body.shape(node.inputs[1]).len();
        let may_hit = |axis: usize| match node.op {
            Op::ScatterElements { axis: along, .. } => axis == along,
            _ => axis + 1 < n_index_axes,
        };
        let shape = body.shape(node.inputs[2]);
        let [disjoint, ordered] = [false, true].map(|hits| {
            let extents = shape.iter().enumerate();
            let own = extents.map(|(axis, &n)| if may_hit(axis) == hits { n } else { 1 });
            own.collect()
        });
        Updates {
            node,
            disjoint,
            ordered,
        }
    }

    /// Updates of a thread.
    fn n_ordered(&self) -> usize {
        self.ordered.iter().product()
    }

    /// Writes the code of the updates of thread number `item`, in order.
    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, item: Value, out: Value) -> Result<()> {
        let fixed = e.delinearise(Ix::V(item), &self.disjoint);
        let end = Ix::C(self.n_ordered() as i64);
        e.for_loop(Ix::C(0), end, 1, &[], |e, i, _| {
            let moving = e.delinearise(Ix::V(i), &self.ordered);
            let both = fixed.iter().zip(&moving);
            let at: Vec<Ix<Value>> = both.map(|(&a, &b)| e.add(a, b)).collect();
            p.scoped(|p| p.scatter_update(e, self.node, &at, out))?;
            Ok(vec![])
        })?;
        Ok(())
    }
}

/// A top-k by ranks: each element counts the elements of its line that come before it.
impl Selection {
    /// Writes the code of element number `item`.
    fn emit(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        outs: [Value; 2],
    ) -> Result<()> {
        let mut at = e.delinearise(Ix::V(item), &self.from);
        let own = p.value(e, self.x, &at)?;
        let position = e.val(at[self.axis]);
        let rank = self.rank(p, e, &at, [own, position])?;
        let k = e.index(self.to[self.axis] as i64);
        let is_chosen = e.index_compare(Order::Less, rank, k);
        at[self.axis] = Ix::V(rank);
        let store = |_: &mut Puller<Value>, e: &mut Emitter| {
            let linear = e.linearise(&at, &self.to);
            e.store(self.dtype, own, outs[0], linear);
            let position = e.index_to_i64(position);
            e.store(DType::I64, position, outs[1], linear);
            Ok(vec![])
        };
        e.branch(is_chosen, &[], p, store, |_, _| Ok(vec![]))?;
        Ok(())
    }

    /// Number of elements that come before the element `own` at `position` of its line.
    fn rank(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        own: [Value; 2],
    ) -> Result<Value> {
        let zero = e.index(0);
        let end = Ix::C(self.from[self.axis] as i64);
        let rank = e.for_loop(Ix::C(0), end, 1, &[zero], |e, j, carried| {
            let mut other_at = at.to_vec();
            other_at[self.axis] = Ix::V(j);
            let other = p.scoped(|p| p.value(e, self.x, &other_at))?;
            let comes_before = self.comes_before(e, [other, j], own)?;
            let one = e.truth_to_index(comes_before);
            Ok(vec![e.index_add(carried[0], one)])
        })?;
        Ok(rank[0])
    }

    /// True if an element at a position comes before the `own`: of equal ones, the earlier.
    fn comes_before(
        &self,
        e: &mut Emitter,
        [other, j]: [Value; 2],
        [own, position]: [Value; 2],
    ) -> Result<Value> {
        let (first, second) = match self.largest {
            true => (other, own),
            false => (own, other),
        };
        let before = beats(e, first, second, self.dtype, Extremum::Max)?;
        let after = beats(e, second, first, self.dtype, Extremum::Max)?;
        let earlier = e.index_compare(Order::Less, j, position);
        let not_after = e.negated(after)?;
        let tied = e.both(earlier, not_after)?;
        e.either(before, tied)
    }
}

/// True if some position in a body may not fit 32 bits.
fn needs_wide_indices(body: &Body) -> bool {
    let mut values = (0..body.graph.n_values() as u32).map(ValueId::new);
    values.any(|v| body.n_elements(v) >= NARROW)
        || body.graph.nodes().any(|(_, n)| reaches_far(body, n))
}

/// True if the windows of a node may reach positions that do not fit 32 bits.
fn reaches_far(body: &Body, node: &Node) -> bool {
    let (window, taps) = match &node.op {
        Op::Conv { window, .. } | Op::ConvTranspose { window, .. } => {
            (window, body.shape(node.inputs[1]))
        }
        Op::Pool { window, size, .. }
        | Op::MaxPoolIndices { window, size, .. }
        | Op::MaxPoolGrad { window, size, .. } => (window, &size[..]),
        _ => return false,
    };
    let shapes = [body.shape(node.inputs[0]), body.shape(node.outputs[0])];
    let reaches = |shape: &[usize]| reach(window, shape, taps) >= NARROW;
    shapes.into_iter().any(reaches)
}

/// Upper bound of the positions that a window visits in values of such a shape.
fn reach(w: &Window, shape: &[usize], taps: &[usize]) -> usize {
    let largest = |extents: &[usize]| extents.iter().max().copied().unwrap_or(0);
    let along = |d: usize| {
        let padded = largest(shape).saturating_add(w.pads_low[d] + w.pads_high[d]);
        let last = padded.saturating_mul(w.strides[d]);
        last.saturating_add(largest(taps) * w.dilations[d])
    };
    (0..w.strides.len()).map(along).max().unwrap_or(0)
}
