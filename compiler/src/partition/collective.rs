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
            return Err(
                Error::internal(format!("rank {rank} of an all-reduce is there twice"))
                    .at_origin(&node.origin),
            );
        }
    }
    let whole = |(group, ranks): (usize, BTreeMap<usize, usize>)| {
        let names = ranks
            .values()
            .map(|&d| placement.devices[d].to_string())
            .collect();
        (group, names)
    };
    let ranks: Ranks = found.into_iter().map(whole).collect();
    for (_, node) in g.nodes() {
        if let Op::AllReduceRank { group, .. } = node.op
            && ranks
                .get(&group)
                .is_none_or(|devices| devices.len() != node.inputs.len())
        {
            let message = format!(
                "not all {} ranks of an all-reduce are there",
                node.inputs.len()
            );
            return Err(Error::internal(message).at_origin(&node.origin));
        }
    }
    Ok(ranks)
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
    let group_of = |id: NodeId| {
        if let Op::AllReduceRank { group, .. } = g.node(id).op {
            Some(group)
        } else {
            None
        }
    };
    if !order.iter().any(|&id| group_of(id).is_some()) {
        return Ok(order);
    }
    // A unit is a node or a whole group, numbered by the place of its last node.
    let last: BTreeMap<usize, usize> = order
        .iter()
        .enumerate()
        .filter_map(|(i, &id)| Some((group_of(id)?, i)))
        .collect();
    let mut units: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
    let mut unit_of = vec![None; g.n_nodes()];
    for (i, &id) in order.iter().enumerate() {
        let unit = group_of(id).map_or(i, |group| last[&group]);
        units.entry(unit).or_default().push(id);
        unit_of[id.0 as usize] = Some(unit);
    }
    let mut needs: BTreeMap<usize, BTreeSet<usize>> =
        units.keys().map(|&u| (u, BTreeSet::new())).collect();
    let mut users: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (id, deps) in node_deps(g).iter().enumerate() {
        let Some(unit) = unit_of[id] else { continue };
        for before in deps
            .iter()
            .filter_map(|d| unit_of[d.0 as usize])
            .filter(|&b| b != unit)
        {
            if needs.entry(unit).or_default().insert(before) {
                users.entry(before).or_default().push(unit);
            }
        }
    }
    let mut ready: BTreeSet<usize> = needs
        .iter()
        .filter(|(_, n)| n.is_empty())
        .map(|(&u, _)| u)
        .collect();
    let mut joined = Vec::with_capacity(order.len());
    while let Some(unit) = ready.pop_first() {
        joined.append(units.get_mut(&unit).unwrap_or(&mut Vec::new()));
        for &user in users.get(&unit).into_iter().flatten() {
            let left = needs.entry(user).or_default();
            left.remove(&unit);
            if left.is_empty() {
                ready.insert(user);
            }
        }
    }
    if joined.len() == order.len() {
        Ok(joined)
    } else {
        Err(Error::internal(
            "all-reduces wait for each other in a cycle",
        ))
    }
}
