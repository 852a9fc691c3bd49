//! Replaces symbols by values throughout a graph and its regions.

use super::Rebuild;
use crate::error::Result;
use crate::ir::{Bindings, Graph, Type};

/// The graph with bound symbols replaced in input types and attributes; all other types follow from the type rules.
///
/// Requires: nothing. After: no bound symbol is left. Errors when the values contradict a type rule, naming the node.
pub fn specialise(g: &Graph, bindings: &Bindings) -> Result<Graph> {
    let mut bound_inputs = Graph::new(&g.name);
    for (&v, name) in g.inputs.iter().zip(&g.input_names) {
        let ty = g.ty(v);
        bound_inputs.add_input(
            name,
            Type {
                dtype: ty.dtype,
                shape: ty.shape.bind(bindings),
            },
        );
    }
    let mut r = Rebuild::new(g);
    r.graph = bound_inputs;
    for (id, node) in g.nodes() {
        let inputs = r.inputs(node);
        let regions = node
            .regions
            .iter()
            .map(|region| specialise(region, bindings))
            .collect::<Result<Vec<_>>>()?;
        let outputs =
            r.graph
                .add_with_regions(node.op.bind(bindings), &inputs, regions, &node.origin)?;
        r.mapped(id, node, &outputs);
        let last = r
            .graph
            .nodes()
            .next_back()
            .expect("a node was just added")
            .0;
        r.graph.node_mut(last).device = node.device.clone();
    }
    Ok(r.finish(g))
}
