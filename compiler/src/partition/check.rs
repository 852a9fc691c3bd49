//! Independent checker of partitions.
//!
//! Invariants:
//! 1. each node but constants is in exactly one part, that of its device, with the same op and regions, and its operands are the same values
//!    of the whole graph: made there, received, or copied constants (of ranks of all-reduces: their own operand);
//! 2. each key has exactly one `send` and one `recv` of the same type, on the devices that they name; no tensor goes to a device twice;
//! 3. each output is that of the whole graph, in exactly one part; inputs have the right types;
//! 4. every ordering of the whole graph (control edges, uses of a variable) holds across the union of the parts;
//! 5. of each all-reduce by a library every rank is there once, on the device that all name for it, with its own operand, of one type;
//! 6. no cycle: all nodes of the union can run. With schedules, their dependencies included
//!    ([`check_schedules`]);
//! 7. updates in place: all parts are in the memory of the host, and each update comes after all fallible steps of other parts
//!    ([`check_schedules`]; the checker of schedules looks at its own part).

use super::Part;
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, Node, NodeId, Op, OpClass, ValueId};
use crate::place::Placement;
use crate::schedule::{Action, Schedule, may_fail, node_deps, roots};
use std::collections::{BTreeMap, BTreeSet};

/// All violations of the invariants, as an `Internal` error.
pub fn check(g: &Graph, placement: &Placement, parts: &[Part]) -> Result<()> {
    let mut checker = Checker::new(g, parts);
    checker.check_nodes(placement);
    let transfers = checker.match_transfers();
    let groups = checker.match_collectives();
    if checker.problems.is_empty() {
        let originals = original_values(g, parts, &transfers);
        checker.check_operands(&originals);
        checker.check_interfaces(&originals);
        checker.check_order(&transfers, &groups);
    }
    checker.finish()
}

/// Checks the dependencies of all parts' steps, as scheduled: they have no cycle, and order updates in place after all failures.
pub fn check_schedules(g: &Graph, parts: &[Part], schedules: &[Schedule]) -> Result<()> {
    let mut checker = Checker::new(g, parts);
    let transfers = checker.match_transfers();
    let groups = checker.match_collectives();
    let mut edges = step_edges(schedules);
    let steps_of = |group: Vec<At>| {
        let nodes = group.into_iter();
        nodes
            .filter_map(|at| step_of(schedules, at))
            .collect::<Vec<At>>()
    };
    join(
        &mut edges,
        &groups.into_iter().map(steps_of).collect::<Vec<_>>(),
    );
    for (&recv, &send) in &transfers {
        match (step_of(schedules, recv), step_of(schedules, send)) {
            (Some(recv), Some(send)) => drop(edges.entry(recv).or_default().insert(send)),
            _ => checker.problem(format!(
                "a transfer between parts {} and {} is not scheduled",
                send.0, recv.0
            )),
        }
    }
    match topological(&edges) {
        Ok(order) => checker.check_updates(schedules, &edges, &order),
        Err(cycle) => checker.problem(cycle),
    }
    checker.finish()
}

/// The steps of updates in place, each with the name of its variable; `None` for one without a step.
fn updating_steps(parts: &[Part], schedules: &[Schedule]) -> Vec<(Option<At>, String)> {
    let mut found = Vec::new();
    for (p, (part, schedule)) in parts.iter().zip(schedules).enumerate() {
        let roots = roots(&part.graph);
        let step = |resident: u32| {
            let assignment = schedule.residents.get(resident as usize)?.assignment?;
            let assigned = part.graph.node(assignment).inputs[0];
            let Def::Node(id, _) = part.graph.value(roots[assigned.0 as usize]).def else {
                return None;
            };
            step_of(schedules, (p, id.0 as usize))
        };
        let name = |i: u32| format!("{}: variable {i}", part.device);
        found.extend(schedule.in_place.iter().map(|&i| (step(i), name(i))));
    }
    found
}

/// Fallible steps, each with the name of its op. Reads of residents cannot fail: their variables are checked before the run.
fn failing_steps(parts: &[Part], schedules: &[Schedule]) -> Vec<(At, &'static str)> {
    let mut found = Vec::new();
    for (p, (part, schedule)) in parts.iter().zip(schedules).enumerate() {
        let is_resident = |id: NodeId| {
            let mut residents = schedule.residents.iter();
            residents.any(|r| r.reads.contains(&id) || r.assignment == Some(id))
        };
        for (i, step) in schedule.steps.iter().enumerate() {
            let Action::Node(id) = step.action else {
                continue;
            };
            let node = part.graph.node(id);
            let is_transfer = node.op.class() == OpClass::Transfer;
            if may_fail(&part.graph, node) && !is_transfer && !is_resident(id) {
                found.push(((p, i), node.op.name()));
            }
        }
    }
    found
}

/// Part and node (or step) within it.
type At = (usize, usize);
/// Dependencies of each node or step.
type Edges = BTreeMap<At, BTreeSet<At>>;
/// By part: the value of the whole graph for each value; `None` for tokens.
type Originals = Vec<Vec<Option<ValueId>>>;

fn step_edges(schedules: &[Schedule]) -> Edges {
    let mut edges = Edges::new();
    for (p, schedule) in schedules.iter().enumerate() {
        for (i, step) in schedule.steps.iter().enumerate() {
            let deps = step.deps.iter().map(|&d| (p, d as usize));
            edges.insert((p, i), deps.collect());
        }
    }
    edges
}

/// Part and step of a node.
fn step_of(schedules: &[Schedule], (p, id): At) -> Option<At> {
    let action = Action::Node(NodeId(id as u32));
    let mut steps = schedules[p].steps.iter();
    Some((p, steps.position(|s| s.action == action)?))
}

fn all_nodes(parts: &[Part]) -> impl Iterator<Item = (At, &Node)> {
    parts.iter().enumerate().flat_map(|(p, part)| {
        part.graph
            .nodes()
            .map(move |(id, n)| ((p, id.0 as usize), n))
    })
}

/// True when a node of a part has the op of the node that it stands for.
fn is_of(whole: &Op, node: &Node, part: &Part) -> bool {
    match (whole, &node.op) {
        (
            Op::AllReduceRank { kind, group, rank },
            Op::Collective {
                kind: k,
                key,
                rank: r,
                devices,
            },
        ) => {
            let here = devices
                .get(*rank)
                .is_some_and(|name| *name == part.device.to_string());
            here && (kind, rank) == (k, r) && *key == super::collective::key(*group)
        }
        (whole, op) => whole == op,
    }
}

/// Ranks of an all-reduce, and the first node that was found.
type Members<'g> = (Vec<(usize, At)>, &'g Node);

/// Parts under check.
struct Checker<'a> {
    g: &'a Graph,
    parts: &'a [Part],
    problems: Vec<String>,
}

impl<'a> Checker<'a> {
    fn new(g: &'a Graph, parts: &'a [Part]) -> Checker<'a> {
        Checker {
            g,
            parts,
            problems: Vec::new(),
        }
    }

    fn problem(&mut self, text: String) {
        self.problems.push(text);
    }

    fn finish(self) -> Result<()> {
        if self.problems.is_empty() {
            return Ok(());
        }
        Err(Error::internal(format!(
            "partition of graph {:?} is wrong:\n  {}",
            self.g.name,
            self.problems.join("\n  ")
        )))
    }

    fn check_nodes(&mut self, placement: &Placement) {
        let mut n_parts = vec![0usize; self.g.n_nodes()];
        for (at, node) in all_nodes(self.parts) {
            let part = &self.parts[at.0];
            let is_added = matches!(
                node.op,
                Op::Send { .. } | Op::Recv { .. } | Op::Constant { .. }
            );
            match part.nodes.get(at.1).copied().flatten() {
                None if is_added => {}
                None => self.problem(format!(
                    "{}: node {} ({}) stands for none",
                    part.device,
                    at.1,
                    node.op.name()
                )),
                Some(old) => {
                    n_parts[old.0 as usize] += 1;
                    self.check_node(placement, at, node, old);
                }
            }
        }
        for ((id, node), n) in self.g.nodes().zip(n_parts) {
            if n != 1 && !matches!(node.op, Op::Constant { .. }) {
                self.problem(format!(
                    "node {} ({}) is in {n} parts",
                    id.0,
                    node.op.name()
                ));
            }
        }
    }

    /// Checks a node of a part against node `old` of the whole graph.
    fn check_node(&mut self, placement: &Placement, at: At, node: &Node, old: NodeId) {
        let part = &self.parts[at.0];
        let whole = self.g.node(old);
        if !is_of(&whole.op, node, part) || whole.regions != node.regions {
            self.problem(format!(
                "{}: node {} is not node {} of the whole graph",
                part.device, at.1, old.0
            ));
        }
        let placed = placement.device_of(old).map(|d| &placement.devices[d]);
        if placed.is_some_and(|device| *device != part.device) {
            self.problem(format!(
                "node {} is on {} against its placement",
                old.0, part.device
            ));
        }
    }

    /// The nodes of each all-reduce by a library, by rank.
    fn match_collectives(&mut self) -> Vec<Vec<At>> {
        let parts = self.parts;
        let mut found: BTreeMap<&str, Members<'_>> = BTreeMap::new();
        for (at, node) in all_nodes(parts) {
            let Op::Collective {
                kind,
                key,
                rank,
                devices,
            } = &node.op
            else {
                continue;
            };
            let (members, first) = found.entry(key).or_insert_with(|| (Vec::new(), node));
            let ty = |p: usize, node: &Node| parts[p].graph.ty(node.inputs[0]).clone();
            let first_at = members.first().map_or(at, |m| m.1);
            let is_same = matches!(&first.op, Op::Collective { kind: k, devices: d, .. } if (k, d) == (kind, devices));
            if !is_same || ty(first_at.0, first) != ty(at.0, node) {
                self.problem(format!(
                    "{}: {key} is not the same on all devices",
                    parts[at.0].device
                ));
            }
            members.push((*rank, at));
        }
        let members = found.into_iter();
        members
            .filter_map(|(key, members)| self.ranks_in_order(key, members))
            .collect()
    }

    /// The nodes of one all-reduce by rank, checked against its devices.
    fn ranks_in_order(&mut self, key: &str, (mut members, first): Members) -> Option<Vec<At>> {
        members.sort_unstable();
        let Op::Collective { devices, .. } = &first.op else {
            return None;
        };
        let ranks = members
            .iter()
            .map(|(rank, at)| (*rank, self.parts[at.0].device.to_string()));
        if !ranks.eq(devices.iter().cloned().enumerate()) {
            self.problem(format!("{key}: its ranks are not those of {devices:?}"));
        }
        Some(members.into_iter().map(|(_, at)| at).collect())
    }

    /// The `send` of each `recv`.
    fn match_transfers(&mut self) -> BTreeMap<At, At> {
        let parts = self.parts;
        let mut sends = self.sends();
        let mut transfers = BTreeMap::new();
        for (at, node) in all_nodes(parts) {
            let Op::Recv { key, from, .. } = &node.op else {
                continue;
            };
            let device = parts[at.0].device.to_string();
            let Some(send) = sends.remove(&(from.clone(), device.clone(), key.clone())) else {
                self.problem(format!(
                    "{device}: key {key:?} of {from} is received but not sent, or received twice"
                ));
                continue;
            };
            let sender = &parts[send.0].graph;
            let operand = sender.node(NodeId(send.1 as u32)).inputs[0];
            if sender.ty(operand) != parts[at.0].graph.ty(node.outputs[0]) {
                self.problem(format!(
                    "key {key:?} is sent and received with different types"
                ));
            }
            transfers.insert(at, send);
        }
        for (from, to, key) in sends.keys() {
            self.problem(format!(
                "{from}: key {key:?} is sent to {to} but not received"
            ));
        }
        transfers
    }

    /// Each `send` by source, destination and key.
    fn sends(&mut self) -> BTreeMap<(String, String, String), At> {
        let mut sends = BTreeMap::new();
        let mut sent: BTreeSet<(usize, ValueId, &str)> = BTreeSet::new();
        for (at, node) in all_nodes(self.parts) {
            let Op::Send { key, to } = &node.op else {
                continue;
            };
            let part = &self.parts[at.0];
            let (device, operand) = (part.device.to_string(), node.inputs[0]);
            let transfer = (device.clone(), to.clone(), key.clone());
            if sends.insert(transfer, at).is_some() {
                self.problem(format!("{device}: key {key:?} is sent twice to {to}"));
            }
            let is_token = part.graph.constant(operand).is_some();
            if !is_token && !sent.insert((at.0, operand, to.as_str())) {
                self.problem(format!(
                    "{device}: value {} is sent twice to {to}",
                    operand.0
                ));
            }
        }
        sends
    }

    fn check_operands(&mut self, originals: &Originals) {
        for ((p, id), node) in all_nodes(self.parts) {
            let Some(old) = self.parts[p].nodes[id] else {
                continue;
            };
            let whole = self.g.node(old);
            let found = node.inputs.iter().map(|v| originals[p][v.0 as usize]);
            let needed = (0..whole.inputs.len()).filter(|&i| !whole.only_orders(i));
            if !found.eq(needed.map(|i| Some(whole.inputs[i]))) {
                self.problem(format!(
                    "{}: node {id} has other operands than node {}",
                    self.parts[p].device, old.0
                ));
            }
        }
    }

    /// Checks inputs and outputs of the parts.
    fn check_interfaces(&mut self, originals: &Originals) {
        let g = self.g;
        let mut n_parts = vec![0usize; g.outputs.len()];
        for (part, originals) in self.parts.iter().zip(originals) {
            if !has_right_interface(part, g) {
                self.problem(format!(
                    "{}: inputs or outputs do not fit the whole graph",
                    part.device
                ));
            }
            for (o, &i) in part.graph.outputs.iter().zip(&part.outputs) {
                let whole = &g.outputs[i as usize];
                n_parts[i as usize] += 1;
                if originals[o.value.0 as usize] != Some(whole.value) || o.name != whole.name {
                    self.problem(format!(
                        "{}: output {:?} is not that of the whole graph",
                        part.device, o.name
                    ));
                }
            }
        }
        for (i, n) in n_parts.into_iter().enumerate().filter(|(_, n)| *n != 1) {
            self.problem(format!("output {i} is in {n} parts"));
        }
    }

    fn check_order(&mut self, transfers: &BTreeMap<At, At>, groups: &[Vec<At>]) {
        let (mut edges, new_of) = self.node_edges();
        for (recv, send) in transfers {
            edges.entry(*recv).or_default().insert(*send);
        }
        join(&mut edges, groups);
        let order = match topological(&edges) {
            Ok(order) => order,
            Err(cycle) => return self.problem(cycle),
        };
        let before = ancestors(&edges, &order);
        for (id, deps) in node_deps(self.g).iter().enumerate() {
            for d in deps {
                let (from, to) = (new_of[d], new_of[&NodeId(id as u32)]);
                if !before[&to].contains(&from) {
                    self.problem(format!("nothing makes node {id} come after node {}", d.0));
                }
            }
        }
    }

    /// Checks for each update in place its order after all fallible steps of other parts. `order` is one of all steps.
    fn check_updates(&mut self, schedules: &[Schedule], edges: &Edges, order: &[At]) {
        let parts = self.parts;
        let updates = updating_steps(parts, schedules);
        if parts.len() < 2 || updates.is_empty() {
            return;
        }
        for part in parts.iter().filter(|p| p.device.kind.has_own_memory()) {
            self.problem(format!(
                "variables are changed in place beside {}, whose kernels fail at any time",
                part.device
            ));
        }
        for (_, update) in updates.iter().filter(|(at, _)| at.is_none()) {
            self.problem(format!("{update} is changed in place by no step"));
        }
        for (at, op) in failing_steps(parts, schedules) {
            let after = descendants(edges, order, at);
            let early = |&&(step, _): &&(Option<At>, String)| {
                step.is_some_and(|step| step.0 != at.0 && !after.contains(&step))
            };
            for (_, update) in updates.iter().filter(early) {
                self.problem(format!(
                    "{update} is changed in place before what may fail on {} ({op})",
                    parts[at.0].device
                ));
            }
        }
    }

    /// Dependencies within the parts, and the node of a part for each of the whole graph.
    fn node_edges(&self) -> (Edges, BTreeMap<NodeId, At>) {
        let (mut edges, mut new_of) = (Edges::new(), BTreeMap::new());
        for (p, part) in self.parts.iter().enumerate() {
            for (id, deps) in node_deps(&part.graph).into_iter().enumerate() {
                let deps = deps.into_iter().map(|d| (p, d.0 as usize));
                edges.insert((p, id), deps.collect());
                if let Some(old) = part.nodes[id] {
                    new_of.insert(old, (p, id));
                }
            }
        }
        (edges, new_of)
    }
}

/// True when the inputs of a part have the types of the whole graph, and all inputs and outputs of its
/// graph are named.
fn has_right_interface(part: &Part, g: &Graph) -> bool {
    let mut inputs = part.graph.inputs.iter().zip(&part.inputs);
    part.outputs.len() == part.graph.outputs.len()
        && part.inputs.len() == part.graph.inputs.len()
        && inputs.all(|(&v, &i)| part.graph.ty(v) == g.ty(g.inputs[i as usize]))
}

fn original_values(g: &Graph, parts: &[Part], transfers: &BTreeMap<At, At>) -> Originals {
    let mut originals: Originals = parts.iter().map(|part| own_originals(g, part)).collect();
    for (recv, send) in transfers {
        let operand = parts[send.0].graph.node(NodeId(send.1 as u32)).inputs[0];
        let result = parts[recv.0].graph.node(NodeId(recv.1 as u32)).outputs[0];
        originals[recv.0][result.0 as usize] = originals[send.0][operand.0 as usize];
    }
    originals
}

/// The values of the whole graph that a part has from its inputs and nodes.
fn own_originals(g: &Graph, part: &Part) -> Vec<Option<ValueId>> {
    let mut originals = vec![None; part.graph.n_values()];
    for (&v, &i) in part.graph.inputs.iter().zip(&part.inputs) {
        originals[v.0 as usize] = g.inputs.get(i as usize).copied();
    }
    for (id, node) in part.graph.nodes() {
        let Some(old) = part.nodes[id.0 as usize] else {
            continue;
        };
        for (new, &old) in node.outputs.iter().zip(&g.node(old).outputs) {
            originals[new.0 as usize] = Some(old);
        }
    }
    originals
}

/// Gives each member of a group the dependencies of all: none ends before all have begun.
fn join(edges: &mut Edges, groups: &[Vec<At>]) {
    for group in groups {
        let all: BTreeSet<At> = group
            .iter()
            .filter_map(|at| edges.get(at))
            .flatten()
            .copied()
            .collect();
        group
            .iter()
            .for_each(|at| drop(edges.insert(*at, all.clone())));
    }
}

/// An order in which everything comes after its dependencies, or the nodes in or behind a cycle.
fn topological(edges: &Edges) -> Result<Vec<At>, String> {
    let deps = edges.iter();
    let mut waiting: BTreeMap<At, usize> = deps.map(|(&at, deps)| (at, deps.len())).collect();
    let mut users: BTreeMap<At, Vec<At>> = BTreeMap::new();
    for (&at, deps) in edges {
        for &d in deps {
            waiting.entry(d).or_insert(0);
            users.entry(d).or_default().push(at);
        }
    }
    let is_ready = |(&at, &n): (&At, &usize)| (n == 0).then_some(at);
    let mut ready: BTreeSet<At> = waiting.iter().filter_map(is_ready).collect();
    let mut order = Vec::new();
    while let Some(at) = ready.pop_first() {
        order.push(at);
        waiting.remove(&at);
        for user in users.get(&at).into_iter().flatten() {
            let n = waiting
                .get_mut(user)
                .expect("a node waits until its dependencies have run");
            *n -= 1;
            if *n == 0 {
                ready.insert(*user);
            }
        }
    }
    if waiting.is_empty() {
        return Ok(order);
    }
    let stuck: Vec<String> = waiting.keys().map(|(p, i)| format!("{p}/{i}")).collect();
    Err(format!(
        "parts wait for each other in a cycle: {}",
        stuck.join(" ")
    ))
}

/// A step and all its descendants.
fn descendants(edges: &Edges, order: &[At], of: At) -> BTreeSet<At> {
    let mut after = BTreeSet::from([of]);
    for at in order {
        let mut deps = edges.get(at).into_iter().flatten();
        if deps.any(|d| after.contains(d)) {
            after.insert(*at);
        }
    }
    after
}

fn ancestors(edges: &Edges, order: &[At]) -> BTreeMap<At, BTreeSet<At>> {
    let mut before: BTreeMap<At, BTreeSet<At>> = BTreeMap::new();
    for at in order {
        let mut own: BTreeSet<At> = BTreeSet::new();
        for d in edges.get(at).into_iter().flatten() {
            own.insert(*d);
            own.extend(&before[d]);
        }
        before.insert(*at, own);
    }
    before
}
