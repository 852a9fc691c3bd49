//! Drops nodes with unused results: importing leaves those behind that shape folding made
//! superfluous.

use crate::error::Result;
use crate::ir::{Graph, Node, NodeId, Op, OpClass, ValueId, symbols_of};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The graph without unused nodes, and without control edges. Inputs, assignments and the nodes behind sizes of symbols stay.
pub fn prune(g: &Graph) -> Result<Graph> {
    let live = live_values(g);
    let mut out = g.emptied();
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for (&v, name) in g.inputs.iter().zip(&g.input_names) {
        map.insert(v, out.add_input(name, g.ty(v).clone()));
    }
    for (_, node) in g.nodes().filter(|(_, n)| is_live(n, &live)) {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let outputs = out.add_copy(node, &inputs)?;
        map.extend(node.outputs.iter().copied().zip(outputs));
    }
    for o in &g.outputs {
        out.add_output(&o.name, map[&o.value]);
    }
    Ok(out)
}

/// Flags of the values that outputs, and the symbols of their nodes, are computed from.
fn live_values(g: &Graph) -> Vec<bool> {
    let mut live = vec![false; g.n_values()];
    for o in &g.outputs {
        live[o.value.0 as usize] = true;
    }
    let sources = symbol_sources(g);
    // An input may be an output.
    let mut symbols = symbols_of(g.outputs.iter().map(|o| g.ty(o.value)));
    for (id, node) in g.nodes().rev() {
        let is_source = |symbol: &String| sources.get(symbol) == Some(&id);
        if let Some(first) = node
            .outputs
            .first()
            .filter(|_| symbols.iter().any(is_source))
        {
            live[first.0 as usize] = true;
        }
        if is_live(node, &live) {
            node.inputs.iter().for_each(|v| live[v.0 as usize] = true);
            node.visit_symbols(g, &mut |s| {
                symbols.insert(s.to_owned());
            });
        }
    }
    live
}

/// The node that gives each symbol its value, which no input has: the first that has it.
fn symbol_sources(g: &Graph) -> BTreeMap<String, NodeId> {
    let known: BTreeSet<String> = g.symbols().into_iter().collect();
    let mut sources = BTreeMap::new();
    for (id, node) in g.nodes().filter(|(_, n)| n.op.class() == OpClass::Control) {
        let mut add = |symbol: &str| {
            if !known.contains(symbol) {
                sources.entry(symbol.to_owned()).or_insert(id);
            }
        };
        node.visit_symbols(g, &mut add);
        if let Op::Extent { symbol } = &node.op {
            add(symbol);
        }
    }
    sources
}

/// True for a node that something uses, and for one that assigns a variable.
fn is_live(node: &Node, live: &[bool]) -> bool {
    matches!(node.op, Op::AssignVariable { .. }) || node.outputs.iter().any(|v| live[v.0 as usize])
}
