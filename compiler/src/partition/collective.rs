//! All-reduces by a library: their ranks on their devices, and side by side in the common order.

use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, Op};
use crate::place::Placement;
use crate::schedule::node_deps;
use std::collections::{BTreeMap, BTreeSet};

/// Devices of the ranks of each all-reduce.
pub(super) type Ranks = BTreeMap<usize, Vec<String>>;

/// Devices by rank of each group.
///
/// Errors when a rank is missing, or when two are on one device, as a user's plan may ask for.
pub(super) fn ranks(g: &Graph, placement: &Placement) -> Result<Ranks> {
    let found = devices_by_rank(g, placement)?;
    let names = |devices: BTreeMap<usize, usize>| {
        let devices = devices.values();
        devices
            .map(|&d| placement.devices[d].to_string())
            .collect::<Vec<_>>()
    };
    let ranks: Ranks = found.into_iter().map(|(k, v)| (k, names(v))).collect();
    for (_, node) in g.nodes() {
        let Op::AllReduceRank { group, .. } = node.op else {
            continue;
        };
        let n = node.inputs.len();
        if ranks.get(&group).is_none_or(|devices| devices.len() != n) {
            let message = format!("not all {n} ranks of an all-reduce are there");
            return Err(Error::internal(message).at_origin(&node.origin));
        }
    }
    Ok(ranks)
}

/// Device of each rank of each group.
fn devices_by_rank(
    g: &Graph,
    placement: &Placement,
) -> Result<BTreeMap<usize, BTreeMap<usize, usize>>> {
    let mut found: BTreeMap<usize, BTreeMap<usize, usize>> = BTreeMap::new();
    for (id, node) in g.nodes() {
        let (Op::AllReduceRank { group, rank, .. }, Some(d)) = (&node.op, placement.device_of(id))
        else {
            continue;
        };
        let ranks = found.entry(*group).or_default();
        if let Some((other, _)) = ranks.iter().find(|&(_, &e)| e == d) {
            let message = format!(
                "ranks {other} and {rank} of an all-reduce by a library are both on {}",
                placement.devices[d]
            );
            return Err(Error::invalid(message)
                .hint("Options::all_reduce = Exchange")
                .at_origin(&node.origin));
        }
        if ranks.insert(*rank, d).is_some() || *rank >= node.inputs.len() {
            let message = format!("rank {rank} of an all-reduce is there twice");
            return Err(Error::internal(message).at_origin(&node.origin));
        }
    }
    Ok(found)
}

/// The op of a rank in the graph of its device; none for other ops.
pub(super) fn in_part(op: &Op, ranks: &Ranks) -> Option<Op> {
    let Op::AllReduceRank { kind, group, rank } = *op else {
        return None;
    };
    Some(Op::Collective {
        kind,
        key: key(group),
        rank,
        devices: ranks.get(&group)?.clone(),
    })
}

/// Name of an all-reduce; unique per graph.
pub(super) fn key(group: usize) -> String {
    format!("all-reduce {group}")
}

/// The order with the ranks of each all-reduce made adjacent, where the last of them was. Other
/// nodes keep their place unless they depend on a rank that moved.
pub(super) fn side_by_side(g: &Graph, order: Vec<NodeId>) -> Result<Vec<NodeId>> {
    if !order.iter().any(|&id| group_of(g, id).is_some()) {
        return Ok(order);
    }
    let mut units = Units::new(g, &order);
    let mut waiting = units.dependencies(g);
    let mut users: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (&unit, before) in &waiting {
        for &b in before {
            users.entry(b).or_default().push(unit);
        }
    }
    let is_ready = |(&unit, before): (&usize, &BTreeSet<usize>)| before.is_empty().then_some(unit);
    let mut ready: BTreeSet<usize> = waiting.iter().filter_map(is_ready).collect();
    let mut joined = Vec::with_capacity(order.len());
    while let Some(unit) = ready.pop_first() {
        joined.extend(units.nodes.remove(&unit).into_iter().flatten());
        for &user in users.get(&unit).into_iter().flatten() {
            let left = waiting.entry(user).or_default();
            left.remove(&unit);
            if left.is_empty() {
                ready.insert(user);
            }
        }
    }
    if joined.len() == order.len() {
        return Ok(joined);
    }
    let message = "all-reduces wait for each other in a cycle";
    Err(Error::internal(message))
}

/// The all-reduce that a node is a rank of.
fn group_of(g: &Graph, id: NodeId) -> Option<usize> {
    match g.node(id).op {
        Op::AllReduceRank { group, .. } => Some(group),
        _ => None,
    }
}

/// Nodes of an order, with the ranks of an all-reduce as one unit. A unit has the position of its
/// last node as its number.
struct Units {
    nodes: BTreeMap<usize, Vec<NodeId>>,
    of_node: Vec<Option<usize>>,
}

impl Units {
    fn new(g: &Graph, order: &[NodeId]) -> Units {
        let positions = order.iter().enumerate();
        let last: BTreeMap<usize, usize> = positions
            .filter_map(|(i, &id)| Some((group_of(g, id)?, i)))
            .collect();
        let mut units = Units {
            nodes: BTreeMap::new(),
            of_node: vec![None; g.n_nodes()],
        };
        for (i, &id) in order.iter().enumerate() {
            let unit = group_of(g, id).map_or(i, |group| last[&group]);
            units.nodes.entry(unit).or_default().push(id);
            units.of_node[id.0 as usize] = Some(unit);
        }
        units
    }

    /// Units that come before each unit.
    fn dependencies(&self, g: &Graph) -> BTreeMap<usize, BTreeSet<usize>> {
        let none = self.nodes.keys().map(|&unit| (unit, BTreeSet::new()));
        let mut found: BTreeMap<usize, BTreeSet<usize>> = none.collect();
        for (deps, unit) in node_deps(g).iter().zip(&self.of_node) {
            let Some(unit) = *unit else { continue };
            let before = deps.iter().filter_map(|d| self.of_node[d.0 as usize]);
            let own = found.entry(unit).or_default();
            own.extend(before.filter(|&b| b != unit));
        }
        found
    }
}
