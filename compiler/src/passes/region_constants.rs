//! Constants that regions take as operands become constants of the regions, so that code generation
//! packs a weight of a recurrent net once, while compiling, and not in every step of the loop.

use super::Rebuild;
use crate::error::Result;
use crate::ir::{ConstData, Graph, Node, Op, OpClass, Origin};

/// Replaces operands of control flow that every run of a region sees unchanged, where they are
/// constants.
pub fn constants_into_regions(g: &Graph) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        if node.op.class() != OpClass::Control {
            r.copy(id, node)?;
            continue;
        }
        let first = first_invariant(&node.op);
        let constant = |i: usize| match i >= first {
            true => r.graph.constant(r.get(node.inputs[i])).cloned(),
            false => None,
        };
        let constants: Vec<Option<ConstData>> = (0..node.inputs.len()).map(constant).collect();
        let inputs = r.inputs(node).into_iter().zip(&constants);
        let inputs: Vec<_> = inputs
            .filter(|(_, c)| c.is_none())
            .map(|(v, _)| v)
            .collect();
        let new = with_constants(node, &constants)?;
        let outputs = r.graph.add_copy(&new, &inputs)?;
        r.mapped(id, node, &outputs);
    }
    Ok(r.finish(g))
}

/// The first operand that no iteration changes.
fn first_invariant(op: &Op) -> usize {
    match op {
        Op::If => 1,
        Op::Loop { carried, .. } => 2 + carried,
        Op::Scan {
            carried, scanned, ..
        } => carried + scanned,
        _ => usize::MAX,
    }
}

/// The node whose regions have these constants, by operand, in the place of inputs.
fn with_constants(node: &Node, constants: &[Option<ConstData>]) -> Result<Node> {
    // The condition of a branch is no input of its regions.
    let skipped = usize::from(matches!(node.op, Op::If));
    let mut new = node.clone();
    for region in &mut new.regions {
        let filled = filled(region, &constants[skipped..], &node.origin)?;
        *region = constants_into_regions(&filled)?;
    }
    Ok(new)
}

/// A region with constants in the place of some inputs.
fn filled(region: &Graph, constants: &[Option<ConstData>], origin: &Origin) -> Result<Graph> {
    let mut r = Rebuild::onto(region, Graph::new(&region.name));
    let inputs = region.inputs.iter().zip(&region.input_names);
    for ((&v, name), constant) in inputs.zip(constants) {
        let new = match constant {
            Some(value) => r.graph.add_constant(value.clone(), origin),
            None => r.graph.add_input(name, region.ty(v).clone()),
        };
        r.set(v, new);
    }
    for (id, node) in region.nodes() {
        r.copy(id, node)?;
    }
    Ok(r.finish(region))
}
