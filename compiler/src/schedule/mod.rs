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
mod residents;

use crate::error::{Error, ErrorKind, Result};
use crate::ir::{Def, Graph, Node, NodeId, Op, ValueId};
use arena::Block;
use gristmill_runtime::tensor::ALIGN_BYTES;
use residents::Update;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;

pub use residents::Resident;
pub(crate) use residents::{failing, has_updates, may_fail};

/// Requirements of kernels and devices that the graph does not show.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// Sizes in bytes of the buffers that a node needs while it runs, and only then.
    pub scratch: BTreeMap<NodeId, Vec<usize>>,
    /// Buffers of `scratch`, by index, whose bytes stay from one run of the graph (an iteration of a loop) to
    /// the next.
    pub kept: BTreeMap<NodeId, BTreeSet<usize>>,
    /// `(operand, result)` pairs of a node whose kernel may write the result over the operand.
    pub in_place: BTreeMap<NodeId, Vec<(u32, u32)>>,
    /// Most bytes that the arena may have.
    pub limit_bytes: Option<usize>,
    /// True where variables may be used where they are: at the top level of a program, in the memory of the host.
    pub has_residents: bool,
    /// True where they may be changed there: all partitions of the program are in the memory of the host, and late failures are known by
    /// tokens.
    pub updates_in_place: bool,
    /// True when buffers of sent and received tensors are disjoint from all others, so that no step
    /// waits until a transfer has ended.
    pub has_disjoint_transfers: bool,
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
    /// The value of variable `n` of [`Schedule::residents`] before the run.
    Variable(u32),
    /// The value of that variable after the run.
    Assigned(u32),
}

/// The work of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Runs a node.
    Node(NodeId),
    /// Copies a value to an output that no node can write in place: a constant, an input, or a value that is already another output or
    /// a variable's.
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
    /// Variables that are used where they are. Their reads do nothing, nor do assignments of a value that is at its place.
    pub residents: Vec<Resident>,
    /// Indices of the residents whose next value is written over the old one.
    pub in_place: BTreeSet<u32>,
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
    Order::of(g, needs)?.schedule(g, needs)
}

/// The order of a graph's steps, which is fixed for all sizes of its values.
pub struct Order {
    nodes: Vec<NodeId>,
    copies: Vec<Action>,
    /// See [`roots`].
    roots: Vec<ValueId>,
    /// Places outside the arena.
    places: Vec<Option<Place>>,
    /// See [`node_deps`]; updates in place have more.
    deps: Vec<BTreeSet<NodeId>>,
    residents: Vec<Resident>,
    updates: Vec<Update>,
}

impl Order {
    /// Chooses the order by the sizes that values have now.
    ///
    /// Errors with `Unsupported` when a shape is symbolic.
    pub fn of(g: &Graph, needs: &Needs) -> Result<Order> {
        let (sizes, roots, mut deps) = (value_sizes(g)?, roots(g), node_deps(g));
        let residents = match needs.has_residents {
            true => residents::residents(g),
            false => Vec::new(),
        };
        let (places, copies) = fixed_places(g, &residents, &roots);
        let updates = residents::updates(g, needs, &residents, &places, &roots, &mut deps);
        let storage = Storage {
            g,
            needs,
            sizes: &sizes,
            roots: &roots,
            places: &places,
        };
        Ok(Order {
            nodes: order::choose(&storage, &deps),
            copies,
            roots,
            places,
            deps,
            residents,
            updates,
        })
    }

    /// Offsets and dependencies for the sizes that values have now.
    ///
    /// Errors as [`schedule`] does.
    pub fn schedule(&self, g: &Graph, needs: &Needs) -> Result<Schedule> {
        let sizes = value_sizes(g)?;
        let storage = Storage {
            g,
            needs,
            sizes: &sizes,
            roots: &self.roots,
            places: &self.places,
        };
        let plan = storage.lay_out(&self.nodes);
        check_limit(g, needs, &plan)?;
        let places = self.places.iter().zip(&self.roots);
        let places =
            places.map(|(fixed, &root)| fixed.unwrap_or(Place::Arena(plan.offset_of(root))));
        let places: Vec<Place> = places.collect();
        let dependencies = Dependencies {
            g,
            needs,
            sizes: &sizes,
            places: &places,
            plan: &plan,
            of_nodes: &self.deps,
            step_of: vec![None; g.n_nodes()],
            history: arena::History::default(),
        };
        let nodes = self.nodes.iter().copied().map(Action::Node);
        Ok(Schedule {
            steps: dependencies.steps(nodes.chain(self.copies.iter().copied()))?,
            places,
            arena_bytes: plan.arena_bytes,
            live_bytes: plan.live_bytes,
            scratch: plan.scratch,
            residents: self.residents.clone(),
            in_place: {
                let fits = |u: &&Update| u.is_permitted(needs) && u.fits(g, &sizes);
                let permitted = self.updates.iter().filter(fits);
                permitted.map(|u| u.resident).collect()
            },
        })
    }
}

/// The order that a graph has for all sizes of its values, once it is chosen.
#[derive(Default)]
pub struct KeptOrder(OnceLock<Order>);

impl KeptOrder {
    /// The schedule of the graph for the sizes that values have now.
    ///
    /// Errors as [`schedule`] does.
    pub fn schedule(&self, g: &Graph, needs: &Needs) -> Result<Schedule> {
        if let Some(order) = self.0.get() {
            return order.schedule(g, needs);
        }
        let made = Order::of(g, needs)?;
        self.0.get_or_init(|| made).schedule(g, needs)
    }
}

fn check_limit(g: &Graph, needs: &Needs, plan: &Plan) -> Result<()> {
    let Some(limit) = needs.limit_bytes.filter(|&l| plan.arena_bytes > l) else {
        return Ok(());
    };
    let message = format!(
        "graph {:?} needs {} bytes for intermediate values, the limit is {limit}",
        g.name, plan.arena_bytes
    );
    Err(Error::new(ErrorKind::OutOfMemory, message))
}

/// Exact bytes of each value. Blocks of the arena are these sizes rounded up, which say nothing about equality.
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
        Ok(bytes)
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
fn fixed_places(
    g: &Graph,
    residents: &[Resident],
    roots: &[ValueId],
) -> (Vec<Option<Place>>, Vec<Action>) {
    let inputs = (0..).zip(&g.inputs).map(|(i, &v)| (v, Place::Input(i)));
    let mut of_root: BTreeMap<ValueId, Place> = inputs.collect();
    for (id, node) in g.nodes() {
        if matches!(node.op, Op::Constant { .. }) {
            of_root.insert(node.outputs[0], Place::Constant(id));
        }
    }
    residents::fix_places(g, residents, roots, &mut of_root);
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
#[derive(Default)]
struct Plan {
    blocks: Vec<Block>,
    block_of: BTreeMap<ValueId, usize>,
    scratch: BTreeMap<NodeId, Vec<usize>>,
    arena_bytes: usize,
    live_bytes: usize,
}

impl Plan {
    /// Adds a block that is in use during steps `start..=end`; returns its index.
    fn add(&mut self, size: usize, start: usize, end: usize) -> usize {
        self.blocks.push(Block {
            size,
            start,
            end,
            offset: 0,
        });
        self.blocks.len() - 1
    }

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

    /// Exact bytes of a value.
    fn size(&self, v: ValueId) -> usize {
        self.sizes[v.0 as usize]
    }

    /// Bytes of a value's block in the arena.
    fn block_bytes(&self, v: ValueId) -> usize {
        aligned(self.size(v))
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

    /// Memory plan of an order: blocks with the interval of steps in which they are in use, then their
    /// offsets.
    fn lay_out(&self, order: &[NodeId]) -> Plan {
        let mut plan = self.value_blocks(order);
        let n_values = plan.blocks.len();
        for (step, id) in order.iter().enumerate() {
            let kept = self.needs.kept.get(id);
            let sizes = self.needs.scratch.get(id).into_iter().flatten();
            for (i, &size) in sizes.enumerate() {
                let (start, end) = match kept.is_some_and(|kept| kept.contains(&i)) {
                    true => (0, order.len() - 1),
                    false => (step, step),
                };
                plan.add(aligned(size), start, end);
            }
        }
        plan.arena_bytes = arena::assign_offsets(&mut plan.blocks);
        plan.live_bytes = arena::peak_live(&plan.blocks);
        let mut offsets = plan.blocks[n_values..].iter().map(|b| b.offset);
        for id in order {
            if let Some(sizes) = self.needs.scratch.get(id) {
                let own = offsets.by_ref().take(sizes.len()).collect();
                plan.scratch.insert(*id, own);
            }
        }
        plan
    }

    /// The blocks of all values in the arena, without offsets.
    fn value_blocks(&self, order: &[NodeId]) -> Plan {
        let last_use = self.last_uses(order);
        let crossing = self.disjoint_roots();
        let mut plan = Plan::default();
        for (step, &id) in order.iter().enumerate() {
            for (i, &v) in self.g.node(id).outputs.iter().enumerate() {
                if self.arena_root(v) != Some(v) {
                    continue;
                }
                let end = last_use.get(&v).copied().unwrap_or(step);
                let block = if crossing.contains(&v) {
                    plan.add(self.block_bytes(v), 0, order.len() - 1)
                } else if let Some(block) = self.overwritten(id, i, step, &last_use, &plan) {
                    plan.blocks[block].end = end;
                    block
                } else {
                    plan.add(self.block_bytes(v), step, end)
                };
                plan.block_of.insert(v, block);
            }
        }
        plan
    }

    /// Roots in the arena that are sent or received, where [`Needs::has_disjoint_transfers`] makes them disjoint
    /// from all others.
    fn disjoint_roots(&self) -> BTreeSet<ValueId> {
        let is_transfer = |op: &Op| matches!(op, Op::Send { .. } | Op::Recv { .. });
        let nodes = self
            .g
            .nodes()
            .filter(|(_, node)| self.needs.has_disjoint_transfers && is_transfer(&node.op));
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

    /// The block of an operand that result `i` may overwrite: of exactly the same size, and last used here.
    fn overwritten(
        &self,
        id: NodeId,
        i: usize,
        step: usize,
        last: &BTreeMap<ValueId, usize>,
        plan: &Plan,
    ) -> Option<usize> {
        let node = self.g.node(id);
        let n_reads = |root: ValueId| {
            let roots = node.inputs.iter().map(|&v| self.arena_root(v));
            roots.filter(|&r| r == Some(root)).count()
        };
        // A result that took the block already extends it.
        let is_taken = |block: usize| {
            let mut others = node.outputs[..i].iter();
            others.any(|o| plan.block_of.get(o) == Some(&block))
        };
        let pairs = self.needs.in_place.get(&id)?.iter();
        let operands = pairs.filter(|(_, result)| *result as usize == i);
        let mut roots = operands.filter_map(|(x, _)| self.arena_root(node.inputs[*x as usize]));
        roots.find_map(|operand| {
            let dies = last.get(&operand) == Some(&step)
                && n_reads(operand) == 1
                && self.size(operand) == self.size(node.outputs[i]);
            let block = *plan.block_of.get(&operand)?;
            (dies && plan.blocks[block].end == step && !is_taken(block)).then_some(block)
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

/// Dependencies of steps, memory reuse included, found in the order of the steps.
struct Dependencies<'s> {
    g: &'s Graph,
    needs: &'s Needs,
    sizes: &'s [usize],
    places: &'s [Place],
    plan: &'s Plan,
    /// See [`node_deps`].
    of_nodes: &'s [BTreeSet<NodeId>],
    /// Steps of the nodes so far.
    step_of: Vec<Option<u32>>,
    history: arena::History,
}

impl Dependencies<'_> {
    fn steps(mut self, actions: impl Iterator<Item = Action>) -> Result<Vec<Step>> {
        let mut barriers = Barriers::default();
        let mut steps = Vec::new();
        for (step, action) in (0..).zip(actions) {
            let mut deps = match action {
                Action::Node(id) => self.of_node(id, step)?,
                Action::CopyToOutput { value, .. } => self.of_copy(value),
            };
            deps.remove(&step);
            barriers.pass(step, is_collective(self.g, action), &mut deps);
            steps.push(Step {
                action,
                deps: deps.into_iter().collect(),
            });
        }
        Ok(steps)
    }

    fn of_node(&mut self, id: NodeId, step: u32) -> Result<BTreeSet<u32>> {
        let node = self.g.node(id);
        let before = self.of_nodes[id.0 as usize].iter();
        let late = || Error::internal("a step waits for a later one").at_origin(&node.origin);
        let before = before.map(|d| self.step_of[d.0 as usize].ok_or_else(late));
        let mut deps = before.collect::<Result<BTreeSet<u32>>>()?;
        for &v in &node.inputs {
            if let Some(bytes) = self.bytes(v) {
                self.history.read(bytes, step, &mut deps);
            }
        }
        let writes = !matches!(node.op, Op::Send { .. } | Op::AssignVariable { .. });
        for &v in node.outputs.iter().filter(|_| writes) {
            if let Some(bytes) = self.bytes(v) {
                self.history.write(bytes, step, &mut deps);
            }
        }
        let sizes = self.needs.scratch.get(&id).into_iter().flatten();
        let offsets = self.plan.scratch.get(&id).into_iter().flatten();
        for (&size, &at) in sizes.zip(offsets) {
            self.history.write(at..at + aligned(size), step, &mut deps);
        }
        self.step_of[id.0 as usize] = Some(step);
        Ok(deps)
    }

    fn of_copy(&self, value: ValueId) -> BTreeSet<u32> {
        match self.g.value(value).def {
            Def::Node(d, _) => self.step_of[d.0 as usize].into_iter().collect(),
            Def::Input(_) => BTreeSet::new(),
        }
    }

    /// Bytes of a value in the arena.
    fn bytes(&self, v: ValueId) -> Option<Range<usize>> {
        match self.places[v.0 as usize] {
            Place::Arena(offset) => Some(offset..offset + aligned(self.sizes[v.0 as usize])),
            _ => None,
        }
    }
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
        for dep in &*deps {
            self.ends.remove(dep);
        }
        self.ends.insert(step);
        if is_collective {
            self.last = Some(step);
        }
    }
}

#[cfg(test)]
mod tests;
