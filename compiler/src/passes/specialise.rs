//! Replaces dims throughout a graph and its regions.

use super::Rebuild;
use crate::error::{Error, Result};
use crate::ir::{Bindings, Dim, Graph, Node, NodeId, Type};

/// The graph with bound symbols replaced in input types and attributes; all other types follow from
/// the type rules.
///
/// Requires: nothing. After: no bound symbol is left. Errors when the values contradict a type
/// rule, naming the node.
pub fn specialise(g: &Graph, bindings: &Bindings) -> Result<Graph> {
    g.check_ranges(bindings)?;
    let mut bound = map_dims(g, &|dim| dim.bind(bindings))?;
    bound.ranges.retain(|dim, _| !bindings.contains_key(dim));
    Ok(bound)
}

/// A node of `g`, in which values have the types of these sizes already, with bound symbols replaced
/// in its attributes and regions.
///
/// Errors when the values contradict a type rule, naming the node.
pub fn specialise_node(g: &Graph, node: &Node, bindings: &Bindings) -> Result<Node> {
    let regions = node.regions.iter().map(|r| specialise(r, bindings));
    let bound = Node {
        op: node.op.map_dims(&|dim| dim.bind(bindings)),
        inputs: node.inputs.clone(),
        outputs: node.outputs.clone(),
        regions: regions.collect::<Result<_>>()?,
        origin: node.origin.clone(),
        device: node.device.clone(),
        control: node.control.clone(),
    };
    let types = g.infer(&bound.op, &bound.inputs, &bound.regions);
    let types = types.map_err(|e| Error::invalid(e).at_origin(&node.origin))?;
    if !types.iter().eq(bound.outputs.iter().map(|&v| g.ty(v))) {
        let message = "results of these sizes have other types than those of the symbols";
        return Err(Error::internal(message).at_origin(&node.origin));
    }
    Ok(bound)
}

/// The graph with each dim of input types and attributes replaced by what `f` gives for it.
///
/// Errors when that contradicts a type rule, naming the node.
pub fn map_dims(g: &Graph, f: &dyn Fn(&Dim) -> Dim) -> Result<Graph> {
    let mut r = Rebuild::onto(g, g.emptied());
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
        let regions = node.regions.iter().map(|region| map_dims(region, f));
        let (op, regions) = (node.op.map_dims(f), regions.collect::<Result<_>>()?);
        let inputs = r.inputs(node);
        let outputs = r
            .graph
            .add_with_regions(op, &inputs, regions, &node.origin)?;
        r.mapped(id, node, &outputs);
        let last = NodeId(r.graph.n_nodes() as u32 - 1);
        r.graph.node_mut(last).device.clone_from(&node.device);
    }
    Ok(r.finish(g))
}
