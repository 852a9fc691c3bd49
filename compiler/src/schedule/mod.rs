//! Scheduling of one partition: order of steps, places of values, memory plan, dependencies.
//!
//! Requires static shapes. The result is a legal serial order together with dependencies that make *every* order which respects them
//! legal: a step that overwrites bytes depends on all that still read their old content.
//!
//! Where a partition sends and receives, its nodes keep their order, which [`crate::partition`] took
//! from one order of the whole graph. So partitions cannot wait for each other in a cycle: every
//! dependency, through reused memory too, points backwards in an order that all of them share. A
//! partition without transfers is reordered when that lowers its peak of live bytes.

mod arena;
pub mod check;
mod order;
mod print;

use crate::error::{Error, ErrorKind, Result};
use crate::ir::{Def, Graph, Node, NodeId, Op, ValueId};
use arena::Block;
use gristmill_runtime::tensor::ALIGN_BYTES;
use std::collections::{BTreeMap, BTreeSet};

/// Requirements of kernels and devices that the graph does not show.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// Sizes in bytes of the buffers that a node needs while it runs, and only then.
    pub scratch: BTreeMap<NodeId, Vec<usize>>,
    /// `(operand, result)` pairs of a node whose kernel may write the result over the operand.
    pub in_place: BTreeMap<NodeId, Vec<(u32, u32)>>,
    /// Most bytes that the arena may have.
    pub limit_bytes: Option<usize>,
    /// True when buffers of sent and received tensors are disjoint from all others, so that no step
    /// waits until a transfer has ended.
    pub is_apart: bool,
}

/// Where a value's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// In the arena, at this offset.
    Arena(usize),
    /// Input `n` of the scheduled graph.
    Input(u32),
    /// Output `n` of the scheduled graph.
    Output(u32),
    /// The constant that this node makes.
    Constant(NodeId),
}

/// The work of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Runs a node.
    Node(NodeId),
    /// Copies a value to an output that no node can write in place: a constant, an input, or a value that is already another output.
    CopyToOutput {
        /// From.
        value: ValueId,
        /// To: index into the graph's outputs.
        output: u32,
    },
}

/// A step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its work.
    pub action: Action,
    /// Earlier steps (indices into [`Schedule::steps`]) that must be done before: sorted, each once.
    pub deps: Vec<u32>,
}

/// The schedule of one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// All nodes but constants, in a legal serial order, then copies.
    pub steps: Vec<Step>,
    /// Place of each value, by its id. The result of `send` and `assign_variable` has the place of the operand.
    pub places: Vec<Place>,
    /// Arena offsets of the buffers of [`Needs::scratch`].
    pub scratch: BTreeMap<NodeId, Vec<usize>>,
    /// Size of the arena.
    pub arena_bytes: usize,
    /// Most bytes alive at a step of this order: no arena can be smaller.
    pub live_bytes: usize,
}

/// Schedules a graph, constants placed outside the arena.
///
/// Errors with `Unsupported` when a shape is symbolic, with `OutOfMemory` when the arena exceeds [`Needs::limit_bytes`].
pub fn schedule(g: &Graph, needs: &Needs) -> Result<Schedule> {
    let sizes = value_sizes(g)?;
    let roots = roots(g);
    let (mut places, copies) = fixed_places(g, &roots);
    let storage = Storage {
        g,
        needs,
        sizes: &sizes,
        roots: &roots,
        places: &places,
    };
    let order = order::choose(&storage);
    let plan = storage.lay_out(&order);
    if let Some(limit) = needs.limit_bytes.filter(|&l| plan.arena_bytes > l) {
        return Err(Error::new(
            ErrorKind::OutOfMemory,
            format!(
                "graph {:?} needs {} bytes for intermediate values, the limit is {limit}",
                g.name, plan.arena_bytes
            ),
        ));
    }
    for (v, place) in places.iter_mut().enumerate() {
        if place.is_none() {
            *place = Some(Place::Arena(plan.offset_of(roots[v])));
        }
    }
    let places: Vec<Place> = places.into_iter().flatten().collect();
    let actions: Vec<Action> = order.into_iter().map(Action::Node).chain(copies).collect();
    let steps = dependencies(g, &actions, &places, &sizes, &plan, needs);
    Ok(Schedule {
        steps,
        places,
        arena_bytes: plan.arena_bytes,
        live_bytes: plan.live_bytes,
        scratch: plan.scratch,
    })
}

/// Bytes of each value, rounded up to the alignment.
fn value_sizes(g: &Graph) -> Result<Vec<usize>> {
    let size = |v: usize| {
        let ty = g.ty(ValueId::new(v as u32));
        let bytes = ty.size_bytes().ok_or_else(|| {
            let origin = g
                .def_node(ValueId::new(v as u32))
                .map(|n| n.origin.clone())
                .unwrap_or_default();
            Error::unsupported(format!("memory of a value of type {ty} cannot be planned"))
                .at_origin(&origin)
        })?;
        Ok(aligned(bytes))
    };
    (0..g.n_values()).map(size).collect()
}

fn aligned(bytes: usize) -> usize {
    bytes
        .checked_next_multiple_of(ALIGN_BYTES)
        .unwrap_or(usize::MAX)
}

/// The value whose bytes each value is: itself but for results that are their operand.
pub(crate) fn roots(g: &Graph) -> Vec<ValueId> {
    let mut roots: Vec<ValueId> = (0..g.n_values() as u32).map(ValueId::new).collect();
    for (_, node) in g.nodes() {
        if matches!(node.op, Op::Send { .. } | Op::AssignVariable { .. }) {
            roots[node.outputs[0].0 as usize] = roots[node.inputs[0].0 as usize];
        }
    }
    roots
}

/// Places outside the arena, and the copies that outputs need.
fn fixed_places(g: &Graph, roots: &[ValueId]) -> (Vec<Option<Place>>, Vec<Action>) {
    let mut of_root: BTreeMap<ValueId, Place> = g
        .inputs
        .iter()
        .enumerate()
        .map(|(i, &v)| (v, Place::Input(i as u32)))
        .collect();
    for (id, node) in g
        .nodes()
        .filter(|(_, n)| matches!(n.op, Op::Constant { .. }))
    {
        of_root.insert(node.outputs[0], Place::Constant(id));
    }
    let mut copies = Vec::new();
    for (i, o) in g.outputs.iter().enumerate() {
        let root = roots[o.value.0 as usize];
        match of_root.get(&root) {
            Some(_) => copies.push(Action::CopyToOutput {
                value: o.value,
                output: i as u32,
            }),
            None => drop(of_root.insert(root, Place::Output(i as u32))),
        }
    }
    (
        roots.iter().map(|r| of_root.get(r).copied()).collect(),
        copies,
    )
}

/// Values that share bytes over time, and who touches them.
struct Storage<'g> {
    g: &'g Graph,
    needs: &'g Needs,
    sizes: &'g [usize],
    roots: &'g [ValueId],
    places: &'g [Option<Place>],
}

/// Offsets of everything in the arena.
struct Plan {
    blocks: Vec<Block>,
    block_of: BTreeMap<ValueId, usize>,
    scratch: BTreeMap<NodeId, Vec<usize>>,
    arena_bytes: usize,
    live_bytes: usize,
}

impl Plan {
    fn offset_of(&self, root: ValueId) -> usize {
        self.block_of
            .get(&root)
            .map_or(0, |&b| self.blocks[b].offset)
    }
}

impl Storage<'_> {
    /// The root of a value when its bytes are in the arena.
    fn arena_root(&self, v: ValueId) -> Option<ValueId> {
        self.places[v.0 as usize]
            .is_none()
            .then(|| self.roots[v.0 as usize])
    }

    fn size(&self, v: ValueId) -> usize {
        self.sizes[v.0 as usize]
    }

    fn scratch_bytes(&self, id: NodeId) -> usize {
        self.needs
            .scratch
            .get(&id)
            .into_iter()
            .flatten()
            .map(|&b| aligned(b))
            .sum()
    }

    /// Memory plan of an order: blocks with the interval of steps in which they are in use, then their offsets.
    fn lay_out(&self, order: &[NodeId]) -> Plan {
        let last_use = self.last_uses(order);
        let crossing = if self.needs.is_apart {
            self.crossing()
        } else {
            BTreeSet::new()
        };
        let mut plan = Plan {
            blocks: Vec::new(),
            block_of: BTreeMap::new(),
            scratch: BTreeMap::new(),
            arena_bytes: 0,
            live_bytes: 0,
        };
        for (step, &id) in order.iter().enumerate() {
            for (i, &v) in self.g.node(id).outputs.iter().enumerate() {
                let Some(root) = self.arena_root(v).filter(|&r| r == v) else {
                    continue;
                };
                if crossing.contains(&root) {
                    let (start, end) = (0, order.len() - 1);
                    plan.blocks.push(Block {
                        size: self.size(v),
                        start,
                        end,
                        offset: 0,
                    });
                    plan.block_of.insert(root, plan.blocks.len() - 1);
                    continue;
                }
                let end = last_use.get(&root).copied().unwrap_or(step);
                let block = match self.overwritten(id, i, step, &last_use, &plan) {
                    Some(block) => {
                        plan.blocks[block].end = end;
                        block
                    }
                    None => {
                        plan.blocks.push(Block {
                            size: self.size(v),
                            start: step,
                            end,
                            offset: 0,
                        });
                        plan.blocks.len() - 1
                    }
                };
                plan.block_of.insert(root, block);
            }
        }
        let n_values = plan.blocks.len();
        for (step, id) in order.iter().enumerate() {
            for &size in self.needs.scratch.get(id).into_iter().flatten() {
                plan.blocks.push(Block {
                    size: aligned(size),
                    start: step,
                    end: step,
                    offset: 0,
                });
            }
        }
        plan.arena_bytes = arena::assign_offsets(&mut plan.blocks);
        plan.live_bytes = arena::peak_live(&plan.blocks);
        let mut offsets = plan.blocks[n_values..].iter().map(|b| b.offset);
        for id in order {
            if let Some(sizes) = self.needs.scratch.get(id) {
                plan.scratch
                    .insert(*id, offsets.by_ref().take(sizes.len()).collect());
            }
        }
        plan
    }

    /// Roots in the arena that are sent or received.
    fn crossing(&self) -> BTreeSet<ValueId> {
        let nodes = self
            .g
            .nodes()
            .filter(|(_, node)| matches!(node.op, Op::Send { .. } | Op::Recv { .. }));
        nodes
            .flat_map(|(_, node)| &node.outputs)
            .filter_map(|&v| self.arena_root(v))
            .collect()
    }

    /// Last step that touches each root in the arena.
    fn last_uses(&self, order: &[NodeId]) -> BTreeMap<ValueId, usize> {
        let mut last = BTreeMap::new();
        for (step, &id) in order.iter().enumerate() {
            let node = self.g.node(id);
            for root in node
                .inputs
                .iter()
                .chain(&node.outputs)
                .filter_map(|&v| self.arena_root(v))
            {
                last.insert(root, step);
            }
        }
        last
    }

    /// The block of an operand that result `i` may overwrite: of the same size, and last used here.
    fn overwritten(
        &self,
        id: NodeId,
        i: usize,
        step: usize,
        last: &BTreeMap<ValueId, usize>,
        plan: &Plan,
    ) -> Option<usize> {
        let node = self.g.node(id);
        let pairs = self.needs.in_place.get(&id)?;
        let candidates = pairs
            .iter()
            .filter(|(_, result)| *result as usize == i)
            .map(|(operand, _)| node.inputs[*operand as usize]);
        candidates
            .filter_map(|v| self.arena_root(v))
            .find_map(|operand| {
                let reads = node
                    .inputs
                    .iter()
                    .filter(|&&v| self.arena_root(v) == Some(operand))
                    .count();
                let dies = last.get(&operand) == Some(&step)
                    && reads == 1
                    && self.size(operand) == self.size(node.outputs[i]);
                let block = *plan.block_of.get(&operand)?;
                // A result that took the block already extends it.
                (dies
                    && plan.blocks[block].end == step
                    && !node.outputs[..i]
                        .iter()
                        .any(|o| plan.block_of.get(o) == Some(&block)))
                .then_some(block)
            })
    }
}

/// Dependencies of each node apart from memory: producers of its operands, control edges, and
/// earlier uses of the same variable, of which only reads may pass each other. Constants are there
/// from the start, so they have no dependencies and are none.
pub(crate) fn node_deps(g: &Graph) -> Vec<BTreeSet<NodeId>> {
    let mut deps: Vec<BTreeSet<NodeId>> = vec![BTreeSet::new(); g.n_nodes()];
    let mut variables: BTreeMap<Variable, Accesses> = BTreeMap::new();
    let is_step = |n: &Node| !matches!(n.op, Op::Constant { .. });
    for (id, node) in g.nodes().filter(|(_, n)| is_step(n)) {
        let own = &mut deps[id.0 as usize];
        own.extend(node.control.iter().copied());
        own.extend(node.inputs.iter().filter_map(|&v| match g.value(v).def {
            Def::Node(d, _) => Some(d),
            Def::Input(_) => None,
        }));
        for (variable, is_write) in variable_uses(node) {
            let uses = variables.entry(variable).or_default();
            own.extend(uses.write);
            if is_write {
                own.append(&mut std::mem::take(&mut uses.reads));
                uses.write = Some(id);
            } else {
                uses.reads.insert(id);
            }
        }
        own.retain(|&d| d != id && is_step(g.node(d)));
    }
    deps
}

/// Container and name of a variable.
pub(crate) type Variable<'g> = (&'g str, &'g str);

/// The last write of a variable, and the reads since.
#[derive(Default)]
struct Accesses {
    write: Option<NodeId>,
    reads: BTreeSet<NodeId>,
}

/// Variables that a node uses, in its regions too, and whether it writes them.
pub(crate) fn variable_uses(node: &Node) -> Vec<(Variable<'_>, bool)> {
    match &node.op {
        Op::ReadVariable {
            container, name, ..
        } => vec![((container, name), false)],
        Op::AssignVariable { container, name } => vec![((container, name), true)],
        _ => node
            .regions
            .iter()
            .flat_map(|r| r.nodes().flat_map(|(_, n)| variable_uses(n)))
            .collect(),
    }
}

/// Steps with all their dependencies, memory reuse included.
fn dependencies(
    g: &Graph,
    actions: &[Action],
    places: &[Place],
    sizes: &[usize],
    plan: &Plan,
    needs: &Needs,
) -> Vec<Step> {
    let mut step_of: Vec<Option<u32>> = vec![None; g.n_nodes()];
    let data = node_deps(g);
    let mut history = arena::History::default();
    let bytes = |v: &ValueId| match places[v.0 as usize] {
        Place::Arena(offset) => Some(offset..offset + sizes[v.0 as usize]),
        _ => None,
    };
    let mut barriers = Barriers::default();
    let mut steps = Vec::new();
    for (step, action) in actions.iter().enumerate() {
        let mut deps: BTreeSet<u32> = BTreeSet::new();
        match action {
            Action::Node(id) => {
                let node = g.node(*id);
                deps.extend(
                    data[id.0 as usize]
                        .iter()
                        .filter_map(|d| step_of[d.0 as usize]),
                );
                node.inputs
                    .iter()
                    .filter_map(bytes)
                    .for_each(|range| history.read(range, step as u32, &mut deps));
                if !matches!(node.op, Op::Send { .. } | Op::AssignVariable { .. }) {
                    node.outputs
                        .iter()
                        .filter_map(bytes)
                        .for_each(|range| history.write(range, step as u32, &mut deps));
                }
                let scratch = needs
                    .scratch
                    .get(id)
                    .into_iter()
                    .flatten()
                    .zip(plan.scratch.get(id).into_iter().flatten());
                scratch.for_each(|(&size, &at)| {
                    history.write(at..at + aligned(size), step as u32, &mut deps)
                });
                step_of[id.0 as usize] = Some(step as u32);
            }
            Action::CopyToOutput { value, .. } => {
                if let Def::Node(d, _) = g.value(*value).def {
                    deps.extend(step_of[d.0 as usize]);
                }
            }
        }
        deps.remove(&(step as u32));
        barriers.pass(step as u32, is_collective(g, *action), &mut deps);
        steps.push(Step {
            action: *action,
            deps: deps.into_iter().collect(),
        });
    }
    steps
}

/// True when a step waits on its device for other devices.
pub(crate) fn is_collective(g: &Graph, action: Action) -> bool {
    matches!(action, Action::Node(id) if matches!(g.node(id).op, Op::Collective { .. }))
}

/// Keeps every step on its side of every collective.
///
/// A device that has reached a collective does nothing else until all its ranks have reached it. So
/// every step that one of the ranks still depends on must be enqueued before, on every device, and
/// no step before may depend on one that another device runs after it. Partitions list their nodes
/// in one common order in which the ranks of a collective are adjacent. If no step passes a
/// collective, all steps before it, on all devices, are enqueued before it and depend on none behind
/// it, so all ranks reach it. The order of collectives is the same on all devices, too.
#[derive(Default)]
struct Barriers {
    last: Option<u32>,
    /// Steps since the last collective that no later one depends on.
    ends: BTreeSet<u32>,
}

impl Barriers {
    /// Adds the dependencies of the next step that its own do not imply.
    fn pass(&mut self, step: u32, is_collective: bool, deps: &mut BTreeSet<u32>) {
        if is_collective {
            deps.append(&mut self.ends);
        }
        if let Some(last) = self.last.filter(|&last| deps.iter().all(|&d| d < last)) {
            deps.insert(last);
        }
        self.ends.retain(|end| !deps.contains(end));
        self.ends.insert(step);
        if is_collective {
            self.last = Some(step);
        }
    }
}

#[cfg(test)]
mod tests;
