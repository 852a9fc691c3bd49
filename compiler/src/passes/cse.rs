//! Dead code and common subexpressions.

use super::Rebuild;
use crate::error::Result;
use crate::ir::{Graph, Node, Op, OpClass, Requested, ValueId};
use std::collections::HashMap;

/// True for nodes that must stay even when their results are not used, or that differ although they
/// look the same.
pub(super) fn has_effect(node: &Node) -> bool {
    matches!(node.op.class(), OpClass::State | OpClass::Transfer)
        || node
            .regions
            .iter()
            .any(|r| r.nodes().any(|(_, n)| has_effect(n)))
}

/// Drops nodes whose results are not used and for which no other node waits. Nodes with effects and their operands stay.
pub fn dce(g: &Graph) -> Result<Graph> {
    let mut live = vec![false; g.n_values()];
    g.outputs
        .iter()
        .for_each(|o| live[o.value.0 as usize] = true);
    let mut keep = vec![false; g.n_nodes()];
    for (id, node) in g.nodes().rev() {
        let is_used = node.outputs.iter().any(|v| live[v.0 as usize]);
        if keep[id.0 as usize] || has_effect(node) || is_used {
            keep[id.0 as usize] = true;
            node.control.iter().for_each(|c| keep[c.0 as usize] = true);
            node.inputs.iter().for_each(|v| live[v.0 as usize] = true);
        }
    }
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes().filter(|(id, _)| keep[id.0 as usize]) {
        r.copy(id, node)?;
    }
    Ok(r.finish(g))
}

/// Merges nodes of the same op, attributes, operands and device; nodes with regions, effects or
/// control edges are left alone.
pub fn cse(g: &Graph) -> Result<Graph> {
    type Key = (Op, Vec<ValueId>, Requested);
    // The data behind the lock of a constant's file has no part in its equality.
    #[allow(clippy::mutable_key_type)]
    let mut seen: HashMap<Key, Vec<ValueId>> = HashMap::new();
    let mut r = Rebuild::new(g);
    let ordered = g.ordered();
    for (id, node) in g.nodes() {
        if has_effect(node) || !node.regions.is_empty() || ordered[id.0 as usize] {
            r.copy(id, node)?;
            continue;
        }
        let key = (node.op.clone(), r.inputs(node), node.device.clone());
        match seen.get(&key) {
            Some(found) => r.set_all(&node.outputs, found),
            None => {
                r.copy(id, node)?;
                let results = node.outputs.iter().map(|&v| r.get(v));
                seen.insert(key, results.collect());
            }
        }
    }
    Ok(r.finish(g))
}
