//! Resident variables: read in place, and updated in place where safe.

use super::{Needs, Place, fixed_places, node_deps, roots};
use crate::ir::{Def, Graph, Node, NodeId, Op, OpClass, ScalarOp, ValueId};
use crate::passes::indexed::scattered_extents;
use std::collections::{BTreeMap, BTreeSet};

/// A variable that is read, and then assigned once at most, by nodes of the graph itself. So its reads are its value
/// at the begin of the run, and what it is assigned is its value from the end of the run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Its container.
    pub container: String,
    /// Its name there.
    pub name: String,
    /// The nodes that read it.
    pub reads: Vec<NodeId>,
    /// The node that assigns it.
    pub assignment: Option<NodeId>,
}

/// The variables of a graph that are used so, in the order of their names.
pub(crate) fn residents(g: &Graph) -> Vec<Resident> {
    let mut found: BTreeMap<(String, String), Option<Resident>> = BTreeMap::new();
    for (id, node) in g.nodes() {
        let own = node.op.class() == OpClass::State;
        for ((container, name), _) in super::variable_uses(node) {
            let key = (container.to_owned(), name.to_owned());
            let entry = found.entry(key).or_insert_with(|| {
                Some(Resident {
                    container: container.to_owned(),
                    name: name.to_owned(),
                    reads: Vec::new(),
                    assignment: None,
                })
            });
            let follows = |r: &Resident| own && r.takes(g, node);
            match entry.as_mut().filter(|r| follows(r)) {
                Some(resident) => resident.add(id, node),
                None => *entry = None,
            }
        }
    }
    found.into_values().flatten().collect()
}

impl Resident {
    /// True when a node may be a further use.
    fn takes(&self, g: &Graph, node: &Node) -> bool {
        let first = self.reads.first().map(|&id| g.ty(g.node(id).outputs[0]));
        let is_alike = !matches!(node.op, Op::ReadVariable { .. })
            || first.is_none_or(|ty| ty == g.ty(node.outputs[0]));
        self.assignment.is_none() && is_alike
    }

    fn add(&mut self, id: NodeId, node: &Node) {
        match node.op {
            Op::AssignVariable { .. } => self.assignment = Some(id),
            _ => self.reads.push(id),
        }
    }
}

/// Fixes the places of values of variables. An assigned value that is at a fixed place already is copied from there.
pub(super) fn fix_places(
    g: &Graph,
    residents: &[Resident],
    roots: &[ValueId],
    of_root: &mut BTreeMap<ValueId, Place>,
) {
    for (i, resident) in (0..).zip(residents) {
        for &read in &resident.reads {
            of_root.insert(g.node(read).outputs[0], Place::Variable(i));
        }
    }
    for (i, resident) in (0..).zip(residents) {
        if let Some(id) = resident.assignment {
            let root = roots[g.node(id).inputs[0].0 as usize];
            of_root.entry(root).or_insert(Place::Assigned(i));
        }
    }
}

/// A variable whose new value a kernel may write over the old one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Update {
    /// Index of the resident.
    pub(super) resident: u32,
    /// The node of the kernel, and the numbers of the operand and of the result.
    pub(super) node: NodeId,
    pub(super) pair: (u32, u32),
}

impl Update {
    /// The kernel that makes the value that a variable is assigned, if the value is where the variable's next value is, and the
    /// kernel reads the old one.
    fn of(
        g: &Graph,
        places: &[Option<Place>],
        roots: &[ValueId],
        i: u32,
        id: NodeId,
    ) -> Option<Update> {
        let root = roots[g.node(id).inputs[0].0 as usize];
        let Def::Node(node, result) = g.value(root).def else {
            return None;
        };
        let at = |v: ValueId| places[v.0 as usize];
        let inputs = &g.node(node).inputs;
        let is_old = |v: &ValueId| at(*v) == Some(Place::Variable(i));
        let operand = inputs.iter().position(is_old)?;
        let is_alone = inputs.iter().filter(|v| is_old(v)).count() == 1;
        let is_next = at(root) == Some(Place::Assigned(i));
        (is_alone && is_next).then_some(Update {
            resident: i,
            node,
            pair: (operand as u32, result),
        })
    }

    /// True if the new value has exactly the old one's bytes. `sizes` are those that values have now.
    pub(super) fn fits(&self, g: &Graph, sizes: &[usize]) -> bool {
        let node = g.node(self.node);
        let size = |v: ValueId| sizes[v.0 as usize];
        size(node.inputs[self.pair.0 as usize]) == size(node.outputs[self.pair.1 as usize])
    }

    /// True if the kernel's plan permits it.
    pub(super) fn is_permitted(&self, needs: &Needs) -> bool {
        let pairs = needs.in_place.get(&self.node);
        needs.updates_in_place && pairs.is_some_and(|pairs| pairs.contains(&self.pair))
    }
}

/// The updates of a graph, each after all other readers of the old value and after all that can fail: dependencies
/// that say so are added. Variables whose old value is needed later have none.
pub(super) fn updates(
    g: &Graph,
    needs: &Needs,
    residents: &[Resident],
    places: &[Option<Place>],
    roots: &[ValueId],
    deps: &mut [BTreeSet<NodeId>],
) -> Vec<Update> {
    first_updates(usize::MAX, g, needs, residents, places, roots, deps)
}

/// The first ones of these, so many at most.
fn first_updates(
    most: usize,
    g: &Graph,
    needs: &Needs,
    residents: &[Resident],
    places: &[Option<Place>],
    roots: &[ValueId],
    deps: &mut [BTreeSet<NodeId>],
) -> Vec<Update> {
    if !needs.updates_in_place {
        return Vec::new();
    }
    let mut found: Vec<Update> = Vec::new();
    let mut barrier = Barrier::of(&fallible(g, residents), deps);
    let mut readers = readers(g, places, residents.len());
    let is_shown = shown(g, places, residents.len());
    for (i, resident) in (0..).zip(residents) {
        if found.len() == most {
            break;
        }
        let update = resident
            .assignment
            .and_then(|id| Update::of(g, places, roots, i, id));
        let Some(update) = update.filter(|u| u.is_permitted(needs)) else {
            continue;
        };
        let mut before = std::mem::take(&mut readers[i as usize]);
        before.remove(&update.node);
        if !is_shown[i as usize] && barrier.has_room(update.node, &before, deps) {
            // One set of all, which is built faster than a set grows.
            let own = &mut deps[update.node.0 as usize];
            let all = own.iter().chain(&before).chain(&barrier.last).copied();
            *own = all.collect();
            found.push(update);
        }
    }
    found
}

/// The fallible nodes of a graph: updates in place come after them.
struct Barrier {
    /// By node: true for fallible nodes and all before them. No update is among these, so waits of updates do not change it.
    is_before: Vec<bool>,
    /// Fallible nodes that are not before others.
    last: Vec<NodeId>,
    /// Nodes below this one wait for earlier ones alone.
    floor: NodeId,
    /// By node: the number of the last search that came to it.
    seen: Vec<u32>,
    n_searches: u32,
}

impl Barrier {
    fn of(fallible: &BTreeSet<NodeId>, deps: &[BTreeSet<NodeId>]) -> Barrier {
        let mut is_before = vec![false; deps.len()];
        let before = |id: &NodeId| deps[id.0 as usize].iter().copied();
        let mut left: Vec<NodeId> = fallible.iter().flat_map(before).collect();
        while let Some(id) = left.pop() {
            if !std::mem::replace(&mut is_before[id.0 as usize], true) {
                left.extend(&deps[id.0 as usize]);
            }
        }
        let is_last = |id: &&NodeId| !is_before[id.0 as usize];
        let last: Vec<NodeId> = fallible.iter().filter(is_last).copied().collect();
        last.iter().for_each(|id| is_before[id.0 as usize] = true);
        let waits_back = |(d, id): (&BTreeSet<NodeId>, u32)| d.last().is_none_or(|d| d.0 < id);
        let floor = deps.iter().zip(0..).position(|dep| !waits_back(dep));
        Barrier {
            is_before,
            last,
            floor: NodeId(floor.unwrap_or(deps.len()) as u32),
            seen: vec![0; deps.len()],
            n_searches: 0,
        }
    }

    /// True when a node can come after the barrier and some other nodes: none of these waits for it. It is an update then, and waits
    /// for them.
    fn has_room(
        &mut self,
        update: NodeId,
        before: &BTreeSet<NodeId>,
        deps: &[BTreeSet<NodeId>],
    ) -> bool {
        if self.is_before[update.0 as usize] {
            return false;
        }
        let floor = self.floor.min(update);
        self.n_searches += 1;
        let mut left: Vec<NodeId> = before.iter().copied().collect();
        while let Some(id) = left.pop() {
            if id == update {
                return false;
            }
            let seen = &mut self.seen[id.0 as usize];
            let is_new = std::mem::replace(seen, self.n_searches) != self.n_searches;
            if id >= floor && !self.is_before[id.0 as usize] && is_new {
                left.extend(&deps[id.0 as usize]);
            }
        }
        self.floor = floor;
        true
    }
}

/// The nodes that read the value of each of `n` residents.
fn readers(g: &Graph, places: &[Option<Place>], n: usize) -> Vec<BTreeSet<NodeId>> {
    let mut readers = vec![BTreeSet::new(); n];
    for (id, node) in g.nodes() {
        for v in &node.inputs {
            if let Some(Place::Variable(i)) = places[v.0 as usize] {
                readers[i as usize].insert(id);
            }
        }
    }
    readers
}

/// True for each of `n` residents whose value is a result of the graph.
fn shown(g: &Graph, places: &[Option<Place>], n: usize) -> Vec<bool> {
    let mut shown = vec![false; n];
    for output in &g.outputs {
        if let Some(Place::Variable(i)) = places[output.value.0 as usize] {
            shown[i as usize] = true;
        }
    }
    shown
}

/// True for the graph of a part with variables that may be updated in place if all kernels permit it.
pub(crate) fn has_updates(g: &Graph) -> bool {
    let pairs = |node: &Node| {
        let operands = 0..node.inputs.len() as u32;
        let results = 0..node.outputs.len() as u32;
        let pairs = operands.flat_map(|x| results.clone().map(move |y| (x, y)));
        pairs.collect()
    };
    let needs = Needs {
        updates_in_place: true,
        in_place: g.nodes().map(|(id, n)| (id, pairs(n))).collect(),
        ..Needs::default()
    };
    let (residents, roots, mut deps) = (residents(g), roots(g), node_deps(g));
    let (places, _) = fixed_places(g, &residents, &roots);
    let found = first_updates(1, g, &needs, &residents, &places, &roots, &mut deps);
    !found.is_empty()
}

/// Nodes of a part that may fail by themselves in a run. A transfer between parts in the memory of the host cannot.
pub(crate) fn failing(g: &Graph) -> BTreeSet<NodeId> {
    let mut found = fallible(g, &residents(g));
    found.retain(|&id| g.node(id).op.class() != OpClass::Transfer);
    found
}

/// Nodes that may fail in a run.
fn fallible(g: &Graph, residents: &[Resident]) -> BTreeSet<NodeId> {
    let in_place = residents
        .iter()
        .flat_map(|r| r.reads.iter().chain(&r.assignment));
    let in_place: BTreeSet<NodeId> = in_place.copied().collect();
    let nodes = g
        .nodes()
        .filter(|(id, n)| may_fail(g, n) && !in_place.contains(id));
    nodes.map(|(id, _)| id).collect()
}

/// True for a node that may fail in a run: by an index out of range, a division of integers, a number of iterations,
/// a transfer, or a variable without a value.
pub(crate) fn may_fail(g: &Graph, node: &Node) -> bool {
    match (&node.op, node.op.class()) {
        (Op::Map(ScalarOp::Div | ScalarOp::Rem | ScalarOp::Mod), _) => {
            !g.ty(node.inputs[0]).dtype.is_float()
        }
        (Op::RoiAlign { .. }, _) => true,
        (Op::Cluster { .. }, _) => node.regions.iter().any(|region| {
            let fails = |n: &Node| may_fail(region, n) && !has_checked_indices(g, node, region, n);
            region.nodes().any(|(_, n)| fails(n))
        }),
        (Op::If, _) => {
            let inner = |r: &Graph| r.nodes().any(|(_, n)| may_fail(r, n));
            node.regions.iter().any(inner)
        }
        (_, class) => matches!(
            class,
            OpClass::Gather
                | OpClass::Scatter
                | OpClass::Control
                | OpClass::State
                | OpClass::Transfer
        ),
    }
}

/// True for a scatter in the region of a cluster whose indices another cluster has checked.
fn has_checked_indices(g: &Graph, cluster: &Node, region: &Graph, scatter: &Node) -> bool {
    let Some(extents) = scattered_extents(region, scatter) else {
        return false;
    };
    let Def::Input(i) = region.value(scatter.inputs[1]).def else {
        return false;
    };
    let checks = |op: &Op| matches!(op, Op::CheckIndices { extents: own } if own == extents);
    made_by(g, cluster.inputs[i as usize]).is_some_and(|node| checks(&node.op))
}

/// The node that makes a value, within its cluster.
fn made_by(g: &Graph, v: ValueId) -> Option<&Node> {
    let Def::Node(id, result) = g.value(v).def else {
        return None;
    };
    let node = g.node(id);
    match (&node.op, node.regions.first()) {
        (Op::Cluster { .. }, Some(region)) => {
            region.def_node(region.outputs[result as usize].value)
        }
        _ => Some(node),
    }
}
