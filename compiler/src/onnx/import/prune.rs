//! Drops nodes whose results nothing uses: importing leaves those that shape folding made superfluous.

use crate::error::Result;
use crate::ir::{Graph, ValueId};
use std::collections::HashMap;

/// The graph without unused nodes. Inputs stay.
pub(super) fn prune(g: &Graph) -> Result<Graph> {
    let mut live = vec![false; g.n_values()];
    g.outputs
        .iter()
        .for_each(|o| live[o.value.0 as usize] = true);
    for (_, node) in g.nodes().rev() {
        if node.outputs.iter().any(|v| live[v.0 as usize]) {
            node.inputs.iter().for_each(|v| live[v.0 as usize] = true);
        }
    }
    let mut out = Graph::new(&g.name);
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for (&v, name) in g.inputs.iter().zip(&g.input_names) {
        map.insert(v, out.add_input(name, g.ty(v).clone()));
    }
    for (_, node) in g
        .nodes()
        .filter(|(_, n)| n.outputs.iter().any(|v| live[v.0 as usize]))
    {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let outputs = out.add_copy(node, &inputs)?;
        map.extend(node.outputs.iter().copied().zip(outputs));
    }
    g.outputs
        .iter()
        .for_each(|o| out.add_output(&o.name, map[&o.value]));
    Ok(out)
}
