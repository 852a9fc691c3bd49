//! Large graphs are rewritten piece by piece, since extraction keeps a bitset of the e-graph for every e-class.
//!
//! A piece is a run of nodes in topological order. It ends where few values are alive, so that few terms are cut, and never
//! inside the span of a control edge. Pieces saturate one after the other; no rule matches across a cut.

use crate::error::Result;
use crate::ir::{Def, Graph, Node, NodeId, Op, ValueId};
use crate::passes::Rebuild;
use std::collections::BTreeSet;
use std::ops::Range;

/// A piece of a graph as a graph of its own.
pub(crate) struct Chunk {
    pub graph: Graph,
    /// Values of the whole graph that the inputs stand for.
    pub inputs: Vec<ValueId>,
    /// Values of the whole graph that the outputs stand for.
    pub outputs: Vec<ValueId>,
}

/// Cuts `g` into pieces of half of `max_nodes` to `max_nodes` nodes; of more where control edges leave no place for a cut.
pub(crate) fn split(g: &Graph, max_nodes: usize) -> Result<Vec<Chunk>> {
    let last_use = last_uses(g);
    ranges(g, &last_use, max_nodes)
        .into_iter()
        .map(|r| chunk(g, &last_use, r))
        .collect()
}

fn is_constant(node: &Node) -> bool {
    matches!(node.op, Op::Constant { .. })
}

/// The last node that reads each value; `usize::MAX` for results of the graph.
fn last_uses(g: &Graph) -> Vec<usize> {
    let mut last = vec![0; g.n_values()];
    for (id, node) in g.nodes() {
        node.inputs
            .iter()
            .for_each(|v| last[v.0 as usize] = id.0 as usize);
    }
    g.outputs
        .iter()
        .for_each(|o| last[o.value.0 as usize] = usize::MAX);
    last
}

fn ranges(g: &Graph, last_use: &[usize], max_nodes: usize) -> Vec<Range<usize>> {
    let n = g.n_nodes();
    // Values that live across a cut before node `i`, and whether a control edge crosses it, as differences.
    let (mut alive, mut crossing) = (vec![0i64; n + 2], vec![0i64; n + 2]);
    for (id, node) in g.nodes() {
        let at = id.0 as usize;
        for v in node.outputs.iter().filter(|_| !is_constant(node)) {
            alive[at + 1] += 1;
            alive[(last_use[v.0 as usize].min(n)).max(at) + 1] -= 1;
        }
        for c in &node.control {
            crossing[c.0 as usize + 1] += 1;
            crossing[at + 1] -= 1;
        }
    }
    for i in 1..=n {
        (alive[i], crossing[i]) = (alive[i] + alive[i - 1], crossing[i] + crossing[i - 1]);
    }
    let mut ranges = Vec::new();
    let mut start = 0;
    while start < n {
        let window = start + (max_nodes / 2).max(1)..=start + max_nodes;
        let best = window
            .clone()
            .filter(|&i| i < n && crossing[i] == 0)
            .min_by_key(|&i| alive[i]);
        let later = || (*window.end()..n).find(|&i| crossing[i] == 0);
        let end = if start + max_nodes >= n {
            n
        } else {
            best.or_else(later).unwrap_or(n)
        };
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// Nodes `range` of `g`, with copies of the constants that they read.
fn chunk(g: &Graph, last_use: &[usize], range: Range<usize>) -> Result<Chunk> {
    let inside = |id: NodeId| range.contains(&(id.0 as usize));
    let nodes = || {
        range
            .clone()
            .map(|i| (NodeId(i as u32), g.node(NodeId(i as u32))))
    };
    let mut part = Graph::new(&g.name);
    let mut inputs: Vec<ValueId> = Vec::new();
    let mut constants = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for &v in nodes().flat_map(|(_, n)| &n.inputs) {
        match g.value(v).def {
            Def::Node(id, _) if is_constant(g.node(id)) => {
                constants.insert(id);
            }
            Def::Node(id, _) if inside(id) => {}
            _ if seen.insert(v) => inputs.push(v),
            _ => {}
        }
    }
    let new_inputs: Vec<ValueId> = inputs
        .iter()
        .map(|&v| part.add_input(&format!("v{}", v.0), g.ty(v).clone()))
        .collect();
    let mut copy = Rebuild::onto(g, part);
    inputs
        .iter()
        .zip(new_inputs)
        .for_each(|(&old, new)| copy.set(old, new));
    for id in constants.into_iter().filter(|&id| !inside(id)) {
        copy.copy(id, g.node(id))?;
    }
    for (id, node) in nodes() {
        copy.copy(id, node)?;
    }
    let leaves = |v: &ValueId| last_use[v.0 as usize] >= range.end;
    let outputs: Vec<ValueId> = nodes()
        .flat_map(|(_, n)| &n.outputs)
        .copied()
        .filter(leaves)
        .collect();
    for &v in &outputs {
        let new = copy.get(v);
        copy.graph.add_output(&format!("v{}", v.0), new);
    }
    Ok(Chunk {
        graph: copy.graph,
        inputs,
        outputs,
    })
}

/// The graph that the rewritten pieces make together.
pub(crate) fn join(g: &Graph, chunks: &[Chunk]) -> Result<Graph> {
    let mut whole = Rebuild::new(g);
    for chunk in chunks {
        let values = chunk
            .inputs
            .iter()
            .map(|&v| whole.get(v))
            .collect::<Vec<_>>();
        let mut part = Rebuild::onto(&chunk.graph, std::mem::take(&mut whole.graph));
        chunk
            .graph
            .inputs
            .iter()
            .zip(values)
            .for_each(|(&v, new)| part.set(v, new));
        for (id, node) in chunk.graph.nodes() {
            part.copy(id, node)?;
        }
        for (&v, o) in chunk.outputs.iter().zip(&chunk.graph.outputs) {
            whole.set(v, part.get(o.value));
        }
        whole.graph = part.graph;
    }
    Ok(whole.finish(g))
}
