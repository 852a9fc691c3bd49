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
//!    ([`check_schedules`]).

use super::Part;
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, ValueId};
use crate::place::Placement;
use crate::schedule::{Action, Schedule, node_deps};
use std::collections::{BTreeMap, BTreeSet};

/// All violations of the invariants, as an `Internal` error.
pub fn check(g: &Graph, placement: &Placement, parts: &[Part]) -> Result<()> {
    let mut problems = Vec::new();
    check_nodes(g, placement, parts, &mut problems);
    let transfers = match_transfers(parts, &mut problems);
    let groups = match_collectives(parts, &mut problems);
    if problems.is_empty() {
        let originals = original_values(g, parts, &transfers);
        check_values(g, parts, &originals, &mut problems);
        check_order(g, parts, &transfers, &groups, &mut problems);
    }
    finish(g, problems)
}

/// Checks that the dependencies of all parts' steps, as scheduled, have no cycle.
pub fn check_schedules(g: &Graph, parts: &[Part], schedules: &[Schedule]) -> Result<()> {
    let mut problems = Vec::new();
    let transfers = match_transfers(parts, &mut problems);
    let mut edges: Edges = Edges::new();
    for (p, schedule) in schedules.iter().enumerate() {
        for (i, step) in schedule.steps.iter().enumerate() {
            edges
                .entry((p, i))
                .or_default()
                .extend(step.deps.iter().map(|&d| (p, d as usize)));
        }
    }
    let step_of = |(p, id): At| {
        schedules[p]
            .steps
            .iter()
            .position(|s| s.action == Action::Node(NodeId(id as u32)))
            .map(|i| (p, i))
    };
    let groups = match_collectives(parts, &mut problems);
    let steps_of = |group: Vec<At>| group.into_iter().filter_map(step_of).collect::<Vec<At>>();
    join(
        &mut edges,
        &groups.into_iter().map(steps_of).collect::<Vec<_>>(),
    );
    for (recv, send) in &transfers {
        match (step_of(*recv), step_of(*send)) {
            (Some(recv), Some(send)) => drop(edges.entry(recv).or_default().insert(send)),
            _ => problems.push(format!(
                "a transfer between parts {} and {} is not scheduled",
                send.0, recv.0
            )),
        }
    }
    if let Err(cycle) = topological(&edges) {
        problems.push(cycle);
    }
    finish(g, problems)
}

fn finish(g: &Graph, problems: Vec<String>) -> Result<()> {
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!(
        "partition of graph {:?} is wrong:\n  {}",
        g.name,
        problems.join("\n  ")
    )))
}

/// Part and node (or step) within it.
type At = (usize, usize);
/// Dependencies of each node or step.
type Edges = BTreeMap<At, BTreeSet<At>>;

fn all_nodes(parts: &[Part]) -> impl Iterator<Item = (At, &crate::ir::Node)> {
    parts.iter().enumerate().flat_map(|(p, part)| {
        part.graph
            .nodes()
            .map(move |(id, n)| ((p, id.0 as usize), n))
    })
}

fn check_nodes(g: &Graph, placement: &Placement, parts: &[Part], problems: &mut Vec<String>) {
    let mut seen = vec![0usize; g.n_nodes()];
    for ((p, id), node) in all_nodes(parts) {
        let part = &parts[p];
        let helper = matches!(
            node.op,
            Op::Send { .. } | Op::Recv { .. } | Op::Constant { .. }
        );
        match part.nodes.get(id).copied().flatten() {
            None if helper => {}
            None => problems.push(format!(
                "{}: node {id} ({}) stands for none",
                part.device,
                node.op.name()
            )),
            Some(old) => {
                seen[old.0 as usize] += 1;
                let whole = g.node(old);
                if !is_of(&whole.op, node, part) || whole.regions != node.regions {
                    problems.push(format!(
                        "{}: node {id} is not node {} of the whole graph",
                        part.device, old.0
                    ));
                }
                if placement
                    .device_of(old)
                    .is_some_and(|d| placement.devices[d] != part.device)
                {
                    problems.push(format!(
                        "node {} is on {} against its placement",
                        old.0, part.device
                    ));
                }
            }
        }
    }
    for (id, node) in g
        .nodes()
        .filter(|(_, n)| !matches!(n.op, Op::Constant { .. }))
    {
        if seen[id.0 as usize] != 1 {
            problems.push(format!(
                "node {} ({}) is in {} parts",
                id.0,
                node.op.name(),
                seen[id.0 as usize]
            ));
        }
    }
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

/// The nodes of each all-reduce by a library, by rank.
fn match_collectives(parts: &[Part], problems: &mut Vec<String>) -> Vec<Vec<At>> {
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
        let same = matches!(&first.op, Op::Collective { kind: k, devices: d, .. } if (k, d) == (kind, devices));
        if !same || ty(first_at.0, first) != ty(at.0, node) {
            problems.push(format!(
                "{}: {key} is not the same on all devices",
                parts[at.0].device
            ));
        }
        members.push((*rank, at));
    }
    let mut groups = Vec::new();
    for (key, (mut members, first)) in found {
        members.sort_unstable();
        let Op::Collective { devices, .. } = &first.op else {
            continue;
        };
        let ranks = members
            .iter()
            .map(|(rank, at)| (*rank, parts[at.0].device.to_string()));
        if !ranks.eq(devices.iter().cloned().enumerate()) {
            problems.push(format!("{key}: its ranks are not those of {devices:?}"));
        }
        groups.push(members.into_iter().map(|(_, at)| at).collect());
    }
    groups
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

/// The `send` of each `recv`.
fn match_transfers(parts: &[Part], problems: &mut Vec<String>) -> BTreeMap<At, At> {
    let mut sends: BTreeMap<(String, String, String), At> = BTreeMap::new();
    let mut sent: BTreeSet<(usize, ValueId, String)> = BTreeSet::new();
    for (at, node) in all_nodes(parts) {
        let Op::Send { key, to } = &node.op else {
            continue;
        };
        let part = &parts[at.0];
        if sends
            .insert((part.device.to_string(), to.clone(), key.clone()), at)
            .is_some()
        {
            problems.push(format!(
                "{}: key {key:?} is sent twice to {to}",
                part.device
            ));
        }
        let is_token = part.graph.constant(node.inputs[0]).is_some();
        if !is_token && !sent.insert((at.0, node.inputs[0], to.clone())) {
            problems.push(format!(
                "{}: value {} is sent twice to {to}",
                part.device, node.inputs[0].0
            ));
        }
    }
    let mut transfers = BTreeMap::new();
    for (at, node) in all_nodes(parts) {
        let Op::Recv { key, from, .. } = &node.op else {
            continue;
        };
        let device = parts[at.0].device.to_string();
        let Some(send) = sends.remove(&(from.clone(), device.clone(), key.clone())) else {
            problems.push(format!(
                "{device}: key {key:?} of {from} is received but not sent, or received twice"
            ));
            continue;
        };
        let sender = &parts[send.0].graph;
        let operand = sender.node(NodeId(send.1 as u32)).inputs[0];
        if sender.ty(operand) != parts[at.0].graph.ty(node.outputs[0]) {
            problems.push(format!(
                "key {key:?} is sent and received with different types"
            ));
        }
        transfers.insert(at, send);
    }
    problems.extend(
        sends
            .keys()
            .map(|(from, to, key)| format!("{from}: key {key:?} is sent to {to} but not received")),
    );
    transfers
}

/// The value of the whole graph for each value of each part; `None` for tokens.
fn original_values(
    g: &Graph,
    parts: &[Part],
    transfers: &BTreeMap<At, At>,
) -> Vec<Vec<Option<ValueId>>> {
    let mut originals: Vec<Vec<Option<ValueId>>> = parts
        .iter()
        .map(|p| vec![None; p.graph.n_values()])
        .collect();
    for (p, part) in parts.iter().enumerate() {
        for (&v, &i) in part.graph.inputs.iter().zip(&part.inputs) {
            originals[p][v.0 as usize] = g.inputs.get(i as usize).copied();
        }
        for (id, node) in part.graph.nodes() {
            let Some(old) = part.nodes[id.0 as usize] else {
                continue;
            };
            for (new, &old) in node.outputs.iter().zip(&g.node(old).outputs) {
                originals[p][new.0 as usize] = Some(old);
            }
        }
    }
    for (recv, send) in transfers {
        let operand = parts[send.0].graph.node(NodeId(send.1 as u32)).inputs[0];
        let result = parts[recv.0].graph.node(NodeId(recv.1 as u32)).outputs[0];
        originals[recv.0][result.0 as usize] = originals[send.0][operand.0 as usize];
    }
    originals
}

fn check_values(
    g: &Graph,
    parts: &[Part],
    originals: &[Vec<Option<ValueId>>],
    problems: &mut Vec<String>,
) {
    for ((p, id), node) in all_nodes(parts) {
        let Some(old) = parts[p].nodes[id] else {
            continue;
        };
        let found: Vec<Option<ValueId>> = node
            .inputs
            .iter()
            .map(|v| originals[p][v.0 as usize])
            .collect();
        let whole = g.node(old);
        let needed = (0..whole.inputs.len()).filter(|&i| !whole.only_orders(i));
        if !found.into_iter().eq(needed.map(|i| Some(whole.inputs[i]))) {
            problems.push(format!(
                "{}: node {id} has other operands than node {}",
                parts[p].device, old.0
            ));
        }
    }
    let mut made = vec![0usize; g.outputs.len()];
    for (p, part) in parts.iter().enumerate() {
        let types = part
            .graph
            .inputs
            .iter()
            .zip(&part.inputs)
            .all(|(&v, &i)| part.graph.ty(v) == g.ty(g.inputs[i as usize]));
        if part.outputs.len() != part.graph.outputs.len()
            || part.inputs.len() != part.graph.inputs.len()
            || !types
        {
            problems.push(format!(
                "{}: inputs or outputs do not fit the whole graph",
                part.device
            ));
        }
        for (o, &i) in part.graph.outputs.iter().zip(&part.outputs) {
            let whole = &g.outputs[i as usize];
            made[i as usize] += 1;
            if originals[p][o.value.0 as usize] != Some(whole.value) || o.name != whole.name {
                problems.push(format!(
                    "{}: output {:?} is not that of the whole graph",
                    part.device, o.name
                ));
            }
        }
    }
    problems.extend(
        made.iter()
            .enumerate()
            .filter(|(_, n)| **n != 1)
            .map(|(i, n)| format!("output {i} is in {n} parts")),
    );
}

fn check_order(
    g: &Graph,
    parts: &[Part],
    transfers: &BTreeMap<At, At>,
    groups: &[Vec<At>],
    problems: &mut Vec<String>,
) {
    let mut edges = Edges::new();
    let mut new_of: BTreeMap<NodeId, At> = BTreeMap::new();
    for (p, part) in parts.iter().enumerate() {
        for (id, deps) in node_deps(&part.graph).into_iter().enumerate() {
            edges.insert(
                (p, id),
                deps.into_iter().map(|d| (p, d.0 as usize)).collect(),
            );
            if let Some(old) = part.nodes[id] {
                new_of.insert(old, (p, id));
            }
        }
    }
    transfers
        .iter()
        .for_each(|(recv, send)| edges.entry(*recv).or_default().extend([*send]));
    join(&mut edges, groups);
    let order = match topological(&edges) {
        Ok(order) => order,
        Err(cycle) => return problems.push(cycle),
    };
    let before = ancestors(&edges, &order);
    for (id, deps) in node_deps(g).iter().enumerate() {
        for d in deps {
            let (from, to) = (new_of[d], new_of[&NodeId(id as u32)]);
            if !before[&to].contains(&from) {
                problems.push(format!("nothing makes node {id} come after node {}", d.0));
            }
        }
    }
}

/// An order in which everything comes after its dependencies, or the nodes in or behind a cycle.
fn topological(edges: &Edges) -> Result<Vec<At>, String> {
    let mut waiting: BTreeMap<At, usize> =
        edges.iter().map(|(&at, deps)| (at, deps.len())).collect();
    let mut users: BTreeMap<At, Vec<At>> = BTreeMap::new();
    for (&at, deps) in edges {
        for &d in deps {
            waiting.entry(d).or_insert(0);
            users.entry(d).or_default().push(at);
        }
    }
    let mut ready: BTreeSet<At> = waiting
        .iter()
        .filter(|(_, n)| **n == 0)
        .map(|(&at, _)| at)
        .collect();
    let mut order = Vec::new();
    while let Some(at) = ready.pop_first() {
        order.push(at);
        for user in users.get(&at).into_iter().flatten() {
            let n = waiting
                .get_mut(user)
                .expect("every node of an edge is counted");
            *n -= 1;
            if *n == 0 {
                ready.insert(*user);
            }
        }
    }
    let stuck: Vec<String> = waiting
        .iter()
        .filter(|(_, n)| **n > 0)
        .map(|((p, i), _)| format!("{p}/{i}"))
        .collect();
    if stuck.is_empty() {
        Ok(order)
    } else {
        Err(format!(
            "parts wait for each other in a cycle: {}",
            stuck.join(" ")
        ))
    }
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
