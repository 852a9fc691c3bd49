//! Replaces symbols by values throughout a graph and its regions.

use super::Rebuild;
use crate::error::Result;
use crate::ir::{Bindings, Graph, Type};

/// The graph with bound symbols replaced in input types and attributes; all other types follow from
/// the type rules.
///
/// Requires: nothing. After: no bound symbol is left. Errors when the values contradict a type
/// rule, naming the node.
pub fn specialise(g: &Graph, bindings: &Bindings) -> Result<Graph> {
    let mut r = Rebuild::onto(g, Graph::new(&g.name));
    for (&v, name) in g.inputs.iter().zip(&g.input_names) {
        let Type { dtype, shape } = g.ty(v);
        let shape = shape.bind(bindings);
        let ty = Type {
            dtype: *dtype,
            shape,
        };
        let new = r.graph.add_input(name, ty);
        r.set(v, new);
    }
    for (id, node) in g.nodes() {
        let mut bound = node.clone();
        bound.op = node.op.bind(bindings);
        for region in &mut bound.regions {
            *region = specialise(region, bindings)?;
        }
        r.copy(id, &bound)?;
    }
    Ok(r.finish(g))
}
