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
        for v in &node.inputs {
            last[v.0 as usize] = id.0 as usize;
        }
    }
    for output in &g.outputs {
        last[output.value.0 as usize] = usize::MAX;
    }
    last
}

fn ranges(g: &Graph, last_use: &[usize], max_nodes: usize) -> Vec<Range<usize>> {
    let n = g.n_nodes();
    let cuts = Cuts::of(g, last_use);
    let mut ranges = Vec::new();
    let mut start = 0;
    while start < n {
        let end = if start + max_nodes >= n {
            n
        } else {
            cuts.best(start, max_nodes)
        };
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// Places for a cut, by the node behind it.
struct Cuts {
    /// Values that live across each cut.
    n_alive: Vec<i64>,
    /// Control edges across each cut.
    n_crossing: Vec<i64>,
    n_nodes: usize,
}

impl Cuts {
    fn of(g: &Graph, last_use: &[usize]) -> Cuts {
        let n = g.n_nodes();
        let (mut alive, mut crossing) = (vec![0; n + 2], vec![0; n + 2]);
        for (id, node) in g.nodes() {
            let at = id.0 as usize;
            for v in node.outputs.iter().filter(|_| !is_constant(node)) {
                let last = last_use[v.0 as usize].min(n).max(at);
                add_span(&mut alive, at, last);
            }
            for earlier in &node.control {
                add_span(&mut crossing, earlier.0 as usize, at);
            }
        }
        Cuts {
            n_alive: running_sums(alive),
            n_crossing: running_sums(crossing),
            n_nodes: n,
        }
    }

    /// End of a piece that begins at `start`: of the cuts that no control edge crosses, the one with
    /// the fewest live values.
    fn best(&self, start: usize, max_nodes: usize) -> usize {
        let (first, last) = (start + (max_nodes / 2).max(1), start + max_nodes);
        let is_allowed = |&i: &usize| self.n_crossing[i] == 0;
        let window = (first..=last).filter(is_allowed);
        let best = window.min_by_key(|&i| self.n_alive[i]);
        best.or_else(|| (last..self.n_nodes).find(is_allowed))
            .unwrap_or(self.n_nodes)
    }
}

/// Counts a span from node `first` to node `last` at the cuts between them, as differences of
/// neighbouring cuts.
fn add_span(differences: &mut [i64], first: usize, last: usize) {
    differences[first + 1] += 1;
    differences[last + 1] -= 1;
}

fn running_sums(mut differences: Vec<i64>) -> Vec<i64> {
    for i in 1..differences.len() {
        differences[i] += differences[i - 1];
    }
    differences
}

/// Nodes `range` of `g`, with copies of the constants that they read.
fn chunk(g: &Graph, last_use: &[usize], range: Range<usize>) -> Result<Chunk> {
    let (inputs, constants) = outer_operands(g, &range);
    let nodes = range.clone().map(|i| NodeId(i as u32));
    let mut copy = with_inputs(g, &inputs);
    for id in constants.into_iter().chain(nodes.clone()) {
        copy.copy(id, g.node(id))?;
    }
    let results = nodes.flat_map(|id| &g.node(id).outputs).copied();
    let is_read_behind = |v: &ValueId| last_use[v.0 as usize] >= range.end;
    let outputs: Vec<ValueId> = results.filter(is_read_behind).collect();
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

/// Operands that nodes outside of `range` define: variable ones in order of first use, and the nodes
/// of constants.
fn outer_operands(g: &Graph, range: &Range<usize>) -> (Vec<ValueId>, BTreeSet<NodeId>) {
    let mut inputs = Vec::new();
    let mut constants = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let nodes = range.clone().map(|i| g.node(NodeId(i as u32)));
    for &v in nodes.flat_map(|n| &n.inputs) {
        match g.value(v).def {
            Def::Node(id, _) if range.contains(&(id.0 as usize)) => {}
            Def::Node(id, _) if is_constant(g.node(id)) => {
                constants.insert(id);
            }
            _ if seen.insert(v) => inputs.push(v),
            _ => {}
        }
    }
    (inputs, constants)
}

/// A copy of nodes of `g` that begins with an input for each of `values`.
fn with_inputs(g: &Graph, values: &[ValueId]) -> Rebuild {
    let mut copy = Rebuild::onto(g, g.emptied());
    for &v in values {
        let name = format!("v{}", v.0);
        let new = copy.graph.add_input(&name, g.ty(v).clone());
        copy.set(v, new);
    }
    copy
}

/// The graph that the rewritten pieces make together.
pub(crate) fn join(g: &Graph, chunks: &[Chunk]) -> Result<Graph> {
    let mut whole = Rebuild::new(g);
    for chunk in chunks {
        append(&mut whole, chunk)?;
    }
    Ok(whole.finish(g))
}

/// Copies a piece behind the earlier ones.
fn append(whole: &mut Rebuild, chunk: &Chunk) -> Result<()> {
    let values: Vec<ValueId> = chunk.inputs.iter().map(|&v| whole.get(v)).collect();
    let mut part = Rebuild::onto(&chunk.graph, std::mem::take(&mut whole.graph));
    part.set_all(&chunk.graph.inputs, &values);
    for (id, node) in chunk.graph.nodes() {
        part.copy(id, node)?;
    }
    for (&v, output) in chunk.outputs.iter().zip(&chunk.graph.outputs) {
        whole.set(v, part.get(output.value));
    }
    whole.graph = part.graph;
    Ok(())
}
