//! Replaces dims throughout a graph and its regions.

use super::Rebuild;
use crate::error::Result;
use crate::ir::{Bindings, Dim, Graph, Type};

/// The graph with bound symbols replaced in input types and attributes; all other types follow from
/// the type rules.
///
/// Requires: nothing. After: no bound symbol is left. Errors when the values contradict a type
/// rule, naming the node.
pub fn specialise(g: &Graph, bindings: &Bindings) -> Result<Graph> {
    map_dims(g, &|dim| dim.bind(bindings))
}

/// The graph with each dim of input types and attributes replaced by what `f` gives for it.
///
/// Errors when that contradicts a type rule, naming the node.
pub fn map_dims(g: &Graph, f: &dyn Fn(&Dim) -> Dim) -> Result<Graph> {
    let mut r = Rebuild::onto(g, Graph::new(&g.name));
    for (&v, name) in g.inputs.iter().zip(&g.input_names) {
        let Type { dtype, shape } = g.ty(v);
        let ty = Type {
            dtype: *dtype,
            shape: shape.iter().map(f).collect(),
        };
        let new = r.graph.add_input(name, ty);
        r.set(v, new);
    }
    for (id, node) in g.nodes() {
        let mut mapped = node.clone();
        mapped.op = node.op.map_dims(f);
        for region in &mut mapped.regions {
            *region = map_dims(region, f)?;
        }
        r.copy(id, &mapped)?;
    }
    Ok(r.finish(g))
}
