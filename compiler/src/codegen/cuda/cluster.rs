//! Generates one cluster: a kernel per phase, and the plan that launches them.
//!
//! Results without a kernel of their own ([`super::contract`], [`super::rows`]) are computed by
//! pulling their elements: a thread computes one result element, or one line, in strides of the
//! whole grid.

use super::candidates::{Candidates, Chooser, Resources};
use super::emit::{Emitter, Value};
use super::lines::{self, Lines};
use super::map::{self, Map};
use super::source::{Parameters, source};
use super::turned::{self, Turned};
use super::{Options, Session, attention, contract, rows, skinny};
use crate::codegen::access::Expression;
use crate::codegen::body::Body;
use crate::codegen::forms::{Choice, Preferred, Why};
use crate::codegen::phases::{Cover, MatchContext, Phase, cut};
use crate::codegen::placed::Placed;
use crate::codegen::plan::{Arg, KernelPlan, PlanStep};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller, beats};
use crate::error::{Error, Result};
use crate::ir::{Extremum, Graph, Node, NodeId, Op, ValueId, Window};
use crate::target::Arch;
use gristmill_runtime::DType;
use gristmill_runtime::gpu::{Launch, TensorMap};

/// Threads of a block.
const BLOCK: usize = 256;
/// Most blocks of a grid, so that an index that runs past the items by one stride still fits 32 bits.
const MAX_BLOCKS: u64 = 1 << 20;
/// Positions below this are indexed in 32 bits.
const NARROW: usize = 1 << 30;

/// One cluster being compiled.
pub(super) struct ClusterCompiler<'s> {
    session: &'s mut Session,
    outer: &'s Graph,
    id: NodeId,
    body: Body,
    placed: Placed,
    forms: Chooser,
    why: Why,
}

/// True if one task computes a composite op, so that it is not expanded.
fn keeps(graph: &Graph, node: &Node, arch: Arch) -> bool {
    // Poolings go by elements in either layout.
    matches!(node.op, Op::Pool { .. })
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

impl<'s> ClusterCompiler<'s> {
    /// The plan of cluster `node` of `outer`; its kernels go into the session.
    pub(super) fn compile(
        session: &'s mut Session,
        outer: &'s Graph,
        (id, node): (NodeId, &Node),
        Preferred { form, why, .. }: Preferred,
    ) -> Result<KernelPlan> {
        let options = session.options;
        let body = Body::new(node, &|graph, node| keeps(graph, node, options.arch))?;
        let placed = Placed::new(&body)?;
        let forms = Chooser::new(form);
        let mut compiler = ClusterCompiler {
            session,
            outer,
            id,
            body,
            placed,
            forms,
            why,
        };
        let body = &compiler.body;
        for phase in cut(body, &mut |around, id, node| {
            find(body, around, &options, id, node)
        }) {
            compiler.phase(&phase)?;
        }
        compiler.copy_repeated_results()?;
        compiler.session.forms.entry(id).or_default().n = compiler.forms.n as u8;
        Ok(compiler.placed.plan)
    }

    /// Name of the next kernel.
    fn name(&self, what: &str) -> String {
        self.session
            .name(self.outer, self.id, self.placed.plan.steps.len(), what)
    }

    fn phase(&mut self, phase: &Phase<Candidates>) -> Result<()> {
        match phase {
            Phase::Task(candidates) => self.form(candidates),
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
        let mut parameters = Parameters::default();
        let body = &self.body;
        let stored = (buffers.reads.iter())
            .map(|&(v, _)| (v, e.named(Kind::Index, parameters.read(body.dtype(v)))))
            .collect();
        let mut outs: Vec<Value> = buffers
            .joins
            .iter()
            .map(|j| e.named(Kind::Index, parameters.read(j.dtype)))
            .collect();
        let written = buffers
            .writes
            .iter()
            .map(|&(v, _)| body.dtype(v))
            .chain(buffers.splits.map(|s| s.dtype));
        outs.extend(written.map(|dtype| e.named(Kind::Index, parameters.write(dtype))));
        for (v, map) in buffers.maps {
            let buffer = buffers.reads.iter().position(|r| r.0 == v);
            let buffer = buffer
                .ok_or_else(|| Error::internal("a tensor map of a value that is not read"))?
                as u32;
            parameters.map(TensorMap { buffer, ..map });
        }
        f(&mut Puller::new(body, stored), &mut e, &outs)?;
        let entry = format!("gm_{what}");
        let source = source(&entry, &resources, wide, &parameters, e.finish());
        let Resources {
            blocks,
            threads,
            shared_bytes,
            ..
        } = resources;
        let grid = [blocks.clamp(1, MAX_BLOCKS) as u32, 1, 1];
        let launch = Launch {
            grid,
            block: [threads as u32, 1, 1],
            shared_bytes,
        };
        let name = self.name(what);
        let kernel = self.session.kernel(name, entry, source, launch);
        let reads = buffers
            .reads
            .iter()
            .map(|r| r.1)
            .chain(buffers.joins.map(|j| j.arg));
        let writes = buffers
            .writes
            .iter()
            .map(|w| w.1)
            .chain(buffers.splits.map(|s| s.arg));
        let args = reads.chain(writes).collect();
        let n_outputs = (buffers.writes.len() + usize::from(buffers.splits.is_some())) as u32;
        self.placed.plan.steps.push(PlanStep {
            kernel,
            args,
            n_outputs,
            items: 1,
            grain: 0,
        });
        self.placed.location.extend(buffers.writes.iter().copied());
        Ok(())
    }

    /// Appends one variant of a kernel. It writes a result or, where several blocks share one,
    /// partial results, which a second kernel joins with one thread per result.
    fn form(&mut self, candidates: &Candidates) -> Result<()> {
        let (form, number, n) = self.forms.next(candidates);
        let name = self.name(form.name());
        if n > 1 {
            self.session.chosen(
                self.id,
                Choice {
                    kernel: name,
                    number,
                    n,
                    form: form.words(),
                    why: self.why.clone(),
                },
            );
        }
        let Buffers { reads, writes, .. } = self.buffers(form.result());
        let (what, resources, maps) = (form.name(), form.resources(), form.maps());
        let Some((dtype, n)) = form.partial(&self.body) else {
            let buffers = Buffers {
                reads,
                writes,
                maps,
                ..Buffers::default()
            };
            return self.blocks(what, buffers, 0, resources, |p, e, outs| {
                form.emit(p, e, outs[0])
            });
        };
        let partial = self.partial(dtype, n);
        let splits = Buffers {
            reads: reads.clone(),
            splits: Some(partial),
            maps,
            ..Buffers::default()
        };
        self.blocks(what, splits, n, resources, |p, e, outs| {
            form.emit(p, e, outs[0])
        })?;
        let joins = Buffers {
            reads,
            joins: Some(partial),
            writes,
            ..Buffers::default()
        };
        self.kernel(
            &format!("{what}_join"),
            joins,
            form.n_results(),
            |p, e, item, buffers| form.join(p, e, item, [buffers[0], buffers[1]]),
        )
    }

    /// The buffers of a kernel that computes `result` at once.
    fn buffers(&mut self, result: ValueId) -> Buffers {
        let reads = self.placed.leaves(&self.body, &[result]);
        Buffers {
            reads,
            writes: self.destinations(&[result]),
            ..Buffers::default()
        }
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
        let missing: Vec<ValueId> = roots
            .iter()
            .copied()
            .filter(|v| !self.placed.location.contains_key(v))
            .collect();
        let (&first, roots) = match missing.first() {
            Some(first) => (first, &missing[..]),
            None => return Ok(()),
        };
        let writes = self.destinations(roots);
        let in_memory = |v: ValueId| self.placed.location.contains_key(&v);
        if let Some(map) = map::plan(&self.body, roots, &in_memory) {
            return self.vectors(&map, writes);
        }
        if let Some(turned) = turned::plan(&self.body, roots, &in_memory) {
            return self.turned(&turned, writes);
        }
        let node = self.body.graph.def_node(first);
        let what = node
            .filter(|n| !matches!(n.op, Op::Map(_)))
            .map_or("map", |n| n.op.name())
            .to_owned();
        let pairs: Vec<(ValueId, ValueId)> = roots.iter().map(|&v| (v, v)).collect();
        self.store_elements(&what, &pairs, writes)
    }

    /// Stores results a vector at a time.
    fn vectors(&mut self, map: &Map, writes: Vec<(ValueId, Arg)>) -> Result<()> {
        let reads = self.reads(&map.expression);
        let written: Vec<ValueId> = writes.iter().map(|w| w.0).collect();
        self.kernel(
            "map",
            Buffers {
                reads,
                writes,
                ..Buffers::default()
            },
            map.n_items(),
            |p, e, item, outs| {
                let (leaves, outs) = buffers_of(p, &map.expression, &written, outs);
                map.emit(e, item, &leaves, &outs)
            },
        )
    }

    /// Stores results a tile at a time.
    fn turned(&mut self, turned: &Turned, writes: Vec<(ValueId, Arg)>) -> Result<()> {
        let reads = self.reads(&turned.expression);
        let written: Vec<ValueId> = writes.iter().map(|w| w.0).collect();
        let resources = Resources::new(turned.n_blocks(), turned::BLOCK);
        self.blocks(
            "turned",
            Buffers {
                reads,
                writes,
                ..Buffers::default()
            },
            0,
            resources,
            |p, e, outs| {
                let (leaves, outs) = buffers_of(p, &turned.expression, &written, outs);
                turned.emit(e, &leaves, &outs)
            },
        )
    }

    /// Distinct values that an expression loads.
    fn reads(&self, expression: &Expression) -> Vec<(ValueId, Arg)> {
        let mut reads: Vec<(ValueId, Arg)> = Vec::new();
        for leaf in &expression.leaves {
            if reads.iter().all(|(v, _)| *v != leaf.value) {
                reads.push((leaf.value, self.placed.location[&leaf.value]));
            }
        }
        reads
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
        let items = shape.iter().product();
        if items == 0 {
            return Ok(());
        }
        let reads = self.placed.leaves(&self.body, &sources);
        self.kernel(
            what,
            Buffers {
                reads,
                writes,
                ..Buffers::default()
            },
            items,
            |p, e, item, outs| {
                let at = e.delinearise(Ix::V(item), &shape);
                for (&v, &out) in sources.iter().zip(outs) {
                    let value = p.value(e, v, &at)?;
                    e.store(p.body.dtype(v), value, out, Ix::V(item));
                }
                Ok(())
            },
        )
    }

    /// A block per line, if lines suit it.
    fn lines(&mut self, node: &Node) -> Option<Result<()>> {
        let lines = Lines::find(&self.body, node)?;
        let reads = self.placed.leaves(&self.body, &node.inputs[..1]);
        let writes = self.destinations(&node.outputs);
        let resources = Resources::new(lines.n_blocks(), lines::BLOCK);
        let buffers = Buffers {
            reads,
            writes,
            ..Buffers::default()
        };
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
        let reads = self.placed.leaves(&self.body, &node.inputs[..1]);
        let writes = self.destinations(&node.outputs);
        self.kernel(
            "cum_sum",
            Buffers {
                reads,
                writes,
                ..Buffers::default()
            },
            lines.iter().product(),
            |p, e, item, outs| {
                let at = e.delinearise(Ix::V(item), &lines);
                p.cum_sum_line(e, &node, &at, outs[0])
            },
        )
    }

    /// A thread per element: its rank is the number of elements that come before it.
    fn top_k(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        if let Some(done) = self.lines(&node) {
            return done;
        }
        let Op::TopK { axis, largest, .. } = node.op else {
            return Err(wrong_phase(&node));
        };
        let x = node.inputs[0];
        let (from, to) = (
            self.body.shape(x).to_vec(),
            self.body.shape(node.outputs[0]).to_vec(),
        );
        let dtype = self.body.dtype(x);
        let reads = self.placed.leaves(&self.body, &[x]);
        let writes = self.destinations(&node.outputs);
        self.kernel(
            "top_k",
            Buffers {
                reads,
                writes,
                ..Buffers::default()
            },
            from.iter().product(),
            |p, e, item, outs| {
                let mut at = e.delinearise(Ix::V(item), &from);
                let own = p.value(e, x, &at)?;
                let position = e.val(at[axis]);
                let zero = e.index(0);
                let rank = e.for_loop(
                    Ix::C(0),
                    Ix::C(from[axis] as i64),
                    1,
                    &[zero],
                    |e, j, carried| {
                        p.scoped(|p| {
                            let mut other_at = at.clone();
                            other_at[axis] = Ix::V(j);
                            let other = p.value(e, x, &other_at)?;
                            let (first, second) = if largest { (other, own) } else { (own, other) };
                            let before = beats(e, first, second, dtype, Extremum::Max)?;
                            let after = beats(e, second, first, dtype, Extremum::Max)?;
                            let (earlier, not_after) =
                                (e.index_compare(Order::Less, j, position), e.negated(after)?);
                            let tied = e.both(earlier, not_after)?;
                            let counts = e.either(before, tied)?;
                            let one = e.truth_to_index(counts);
                            Ok(vec![e.index_add(carried[0], one)])
                        })
                    },
                )?[0];
                let k = e.index(to[axis] as i64);
                let chosen = e.index_compare(Order::Less, rank, k);
                at[axis] = Ix::V(rank);
                let store = |_: &mut Puller<Value>, e: &mut Emitter| {
                    let linear = e.linearise(&at, &to);
                    e.store(dtype, own, outs[0], linear);
                    let position = e.index_to_i64(position);
                    e.store(DType::I64, position, outs[1], linear);
                    Ok(vec![])
                };
                e.branch(chosen, &[], p, store, |_, _| Ok(vec![]))?;
                Ok(())
            },
        )
    }

    /// A copy, then a thread for all updates that may hit the same element: updates that differ
    /// only in the axes that indices select.
    fn scatter(&mut self, id: NodeId) -> Result<()> {
        let node = self.body.graph.node(id).clone();
        let (data, indices, updates) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let y = node.outputs[0];
        let writes = self.destinations(&[y]);
        self.store_elements("copy", &[(data, y)], writes.clone())?;
        let shape = self.body.shape(updates).to_vec();
        let meets = |axis: usize| match node.op {
            Op::ScatterElements { axis: along, .. } => axis == along,
            _ => axis + 1 < self.body.shape(indices).len(),
        };
        let (mut apart, mut in_order) = (shape.clone(), shape.clone());
        (0..shape.len()).for_each(|axis| {
            *(if meets(axis) {
                &mut apart[axis]
            } else {
                &mut in_order[axis]
            }) = 1
        });
        if shape.contains(&0) {
            return Ok(());
        }
        let reads = self.placed.leaves(&self.body, &[indices, updates]);
        self.kernel(
            "scatter",
            Buffers {
                reads,
                writes,
                ..Buffers::default()
            },
            apart.iter().product(),
            |p, e, item, outs| {
                let fixed = e.delinearise(Ix::V(item), &apart);
                let n: usize = in_order.iter().product();
                e.for_loop(Ix::C(0), Ix::C(n as i64), 1, &[], |e, i, _| {
                    let moving = e.delinearise(Ix::V(i), &in_order);
                    let at: Vec<Ix<Value>> = fixed
                        .iter()
                        .zip(&moving)
                        .map(|(&a, &b)| e.add(a, b))
                        .collect();
                    p.scoped(|p| p.scatter_update(e, &node, &at, outs[0]))?;
                    Ok(vec![])
                })?;
                Ok(())
            },
        )
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

fn wrong_phase(node: &Node) -> Error {
    Error::internal(format!("{} is in a phase of another kind", node.op.name()))
}

/// True if some position in a body may not fit 32 bits.
fn needs_wide_indices(body: &Body) -> bool {
    let large_value =
        (0..body.graph.n_values() as u32).any(|v| body.n_elements(ValueId::new(v)) >= NARROW);
    let reach = |w: &Window, spatial: &[usize], taps: &[usize]| {
        (0..w.strides.len()).any(|d| {
            let extent = spatial
                .iter()
                .max()
                .copied()
                .unwrap_or(0)
                .saturating_add(w.pads_low[d] + w.pads_high[d]);
            extent
                .saturating_mul(w.strides[d])
                .saturating_add(taps.iter().max().map_or(0, |t| t * w.dilations[d]))
                >= NARROW
        })
    };
    let far_window = |n: &Node| {
        let shapes = || (body.shape(n.inputs[0]), body.shape(n.outputs[0]));
        match &n.op {
            Op::Conv { window, .. } | Op::ConvTranspose { window, .. } => {
                reach(window, shapes().0, body.shape(n.inputs[1]))
                    || reach(window, shapes().1, body.shape(n.inputs[1]))
            }
            Op::Pool { window, size, .. } | Op::MaxPoolIndices { window, size, .. } => {
                reach(window, shapes().0, size) || reach(window, shapes().1, size)
            }
            _ => false,
        }
    };
    large_value || body.graph.nodes().any(|(_, n)| far_window(n))
}
