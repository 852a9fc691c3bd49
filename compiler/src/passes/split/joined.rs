//! Nodes that each device computes for the whole batch, of shards that are joined.

use super::Sharding;
use super::sharding::Plan;
use crate::ir::{Graph, NodeId, ValueId};
use gristmill_runtime::units::size;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Names of ops that a note has at most.
const N_NAMED: usize = 4;

/// A note of the ops without shares in a division, and of the bytes of their operands' shards. `None` if there are none.
pub(super) fn note(g: &Graph, plan: &Plan) -> Option<String> {
    let mut ops: BTreeMap<(&str, String), usize> = BTreeMap::new();
    let mut joined = BTreeSet::new();
    for (id, node) in g.nodes() {
        let own = joined_for(g, plan, id);
        if !own.is_empty() {
            *ops.entry((node.op.name(), node.origin.to_string()))
                .or_default() += 1;
            joined.extend(own);
        }
    }
    let bytes = |v| g.ty(v).size_bytes().unwrap_or(0);
    let bytes: usize = joined.into_iter().map(bytes).sum();
    let n: usize = ops.values().sum();
    let mut text = format!(
        "{n} op{} computed for the whole batch, of shards of {} that are joined:",
        if n == 1 { " is" } else { "s are" },
        size(bytes as u64)
    );
    for ((op, origin), _) in ops.iter().take(N_NAMED) {
        let _ = write!(text, " {op} at {origin},");
    }
    match ops.len() {
        0 => None,
        n if n > N_NAMED => Some(text + " .."),
        _ => Some(text.trim_end_matches(',').to_owned()),
    }
}

/// The operands of a whole node that are made in shards.
fn joined_for(g: &Graph, plan: &Plan, id: NodeId) -> Vec<ValueId> {
    let operands = plan.computations_of(id).iter().flat_map(|computed| {
        let all = g.node(id).inputs.iter().zip(&computed.operands);
        all.filter(|(_, sharding)| **sharding == Sharding::Replicated)
    });
    let is_shard = |v| matches!(plan.sharding(v), Sharding::Shard(_));
    operands.map(|(&v, _)| v).filter(|v| is_shard(*v)).collect()
}
