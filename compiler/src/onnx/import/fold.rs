//! Folding of constants while importing.

use super::FOLD_LIMIT_BYTES;
use crate::error::Result;
use crate::interp::{WorkBudget, run_within};
use crate::ir::constant::DEFER_BYTES;
use crate::ir::{Def, Graph, NodeId, ValueId};
use gristmill_runtime::Tensor;
use std::collections::{BTreeSet, HashMap};

/// Work of one fold, in units of [`WorkBudget`]: some tenths of a second.
const FOLD_WORK: u64 = 1 << 24;
/// Work of all folds of a model: some seconds.
const TOTAL_WORK: u64 = 1 << 28;

/// The budget of one import. A value that takes more, such as that of a long loop, is computed when
/// the model runs.
pub(super) fn budget() -> WorkBudget {
    WorkBudget::new(FOLD_WORK, TOTAL_WORK)
}

/// The value of `id` when it is computed from constants alone, every tensor on the way is small,
/// and `budget` suffices.
pub(super) fn constant_value(
    g: &Graph,
    id: ValueId,
    budget: &mut WorkBudget,
) -> Result<Option<Tensor>> {
    if let Some(c) = g.constant(id) {
        return Ok(c.in_memory().cloned());
    }
    let Some(nodes) = constant_slice(g, id) else {
        return Ok(None);
    };
    // Large weights stay in their file: ops on them are for the folding pass.
    let is_large = g.ty(id).size_bytes().is_none_or(|b| b >= DEFER_BYTES);
    if is_large && nodes.iter().any(|&n| is_deferred(g, n)) {
        return Ok(None);
    }
    let part = part_of(g, &nodes, id)?;
    Ok(run_within(&part, &[], budget)?.and_then(|mut results| results.pop()))
}

/// True for a constant whose elements are not in memory.
fn is_deferred(g: &Graph, n: NodeId) -> bool {
    let constant = g.constant(g.node(n).outputs[0]);
    constant.is_some_and(|c| c.in_memory().is_none())
}

/// These nodes as a graph without inputs that gives `id`.
fn part_of(g: &Graph, nodes: &BTreeSet<NodeId>, id: ValueId) -> Result<Graph> {
    let mut part = Graph::new("fold");
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for &n in nodes {
        let node = g.node(n);
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let outputs = part.add_copy(node, &inputs)?;
        map.extend(node.outputs.iter().copied().zip(outputs));
    }
    part.add_output("value", map[&id]);
    Ok(part)
}

/// The nodes that `id` is computed from, in order; `None` when an input or a large tensor is among
/// them.
fn constant_slice(g: &Graph, id: ValueId) -> Option<BTreeSet<NodeId>> {
    let mut nodes = BTreeSet::new();
    let mut open = vec![id];
    let mut bytes = 0usize;
    while let Some(v) = open.pop() {
        let Def::Node(n, _) = g.value(v).def else {
            return None;
        };
        if !nodes.insert(n) {
            continue;
        }
        for &out in &g.node(n).outputs {
            bytes = bytes.saturating_add(g.ty(out).size_bytes()?);
        }
        if bytes > FOLD_LIMIT_BYTES || nodes.len() > 4096 {
            return None;
        }
        open.extend(&g.node(n).inputs);
    }
    Some(nodes)
}
