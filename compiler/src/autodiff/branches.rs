//! Gradients of nodes that choose one of their regions.
//!
//! The gradient is a node on the same condition, whose regions compute the forward part anew and pull the cotangents back:
//! values of unlike types need not cross from one node to the other, and a region that is not chosen does nothing.

use super::activity::{Activity, VariableUses};
use super::free_name;
use super::sweep::Sweep;
use crate::error::Result;
use crate::ir::gradient::{Gradient, gradient_origin, no_gradient};
use crate::ir::{Graph, Node, NodeId, ValueId};

/// Reason of branches that cannot be computed anew.
const STATEFUL: &str = "its branches, which the gradient runs again, read or assign variables";

/// True for a node whose gradient is that of its regions.
pub fn has_branches(node: &Node) -> bool {
    matches!(node.op.spec().gradient, Gradient::Branches)
}

/// The operands that the regions take: those behind the condition.
pub fn captured(node: &Node) -> &[ValueId] {
    node.inputs.get(1..).unwrap_or_default()
}

/// Inputs of a region, which is one of a node's, for the captured operands that a condition holds for.
pub fn formals(node: &Node, region: &Graph, is: impl Fn(ValueId) -> bool) -> Vec<ValueId> {
    let pairs = captured(node).iter().zip(&region.inputs);
    pairs.filter(|(v, _)| is(**v)).map(|(_, &v)| v).collect()
}

/// Appends the node that chooses among the gradients of the regions. Gives the gradients of the needed operands.
pub fn gradients(
    graph: &mut Graph,
    node: &Node,
    cotangents: &[Option<ValueId>],
    needed: &[bool],
) -> Result<Vec<Option<ValueId>>> {
    if !VariableUses::of(node).is_none() {
        return Err(no_gradient(node, STATEFUL));
    }
    let pull = Pull::new(cotangents, needed);
    let regions = node.regions.iter().map(|region| pull.back(region));
    let regions = regions.collect::<Result<Vec<Graph>>>()?;
    let given: Vec<ValueId> = cotangents.iter().flatten().copied().collect();
    let results = choose(graph, node, &given, regions)?;
    Ok(pull.by_operand(node.inputs.len(), &results))
}

/// Appends a node like another, which gives its regions further operands.
fn choose(
    graph: &mut Graph,
    like: &Node,
    further: &[ValueId],
    regions: Vec<Graph>,
) -> Result<Vec<ValueId>> {
    let operands = [&like.inputs, further].concat();
    let origin = gradient_origin(&like.origin);
    let results = graph.add_with_regions(like.op.clone(), &operands, regions, &origin)?;
    let last = NodeId(graph.n_nodes() as u32 - 1);
    graph.node_mut(last).device = like.device.clone();
    Ok(results)
}

/// The part of a node that a gradient is asked of.
struct Pull {
    /// Results that have cotangents.
    given: Vec<usize>,
    /// Captured operands whose gradients are needed.
    wanted: Vec<usize>,
}

impl Pull {
    fn new(cotangents: &[Option<ValueId>], needed: &[bool]) -> Pull {
        let captured = needed.iter().skip(1);
        Pull {
            given: places(cotangents.iter().map(Option::is_some)),
            wanted: places(captured.copied()),
        }
    }

    /// A region that takes the operands of one and cotangents of its results, and gives the gradients of operands.
    fn back(&self, region: &Graph) -> Result<Graph> {
        let outputs = self.given.iter().map(|&i| region.outputs[i].value);
        let results: Vec<ValueId> = outputs.collect();
        let formals: Vec<ValueId> = self.wanted.iter().map(|&i| region.inputs[i]).collect();
        let activity = Activity::new(region, &results, &formals, &[]);
        activity.check_rules(region)?;
        let mut out = region.clone();
        let gradients = pulled_back(&mut out, &activity, &results, &formals)?;
        out.outputs.clear();
        for (i, gradient) in gradients.into_iter().enumerate() {
            out.add_output(&format!("d{i}"), gradient);
        }
        Ok(out)
    }

    /// One for each of a number of operands.
    fn by_operand(&self, n: usize, gradients: &[ValueId]) -> Vec<Option<ValueId>> {
        let mut all = vec![None; n];
        for (&i, &gradient) in self.wanted.iter().zip(gradients) {
            all[i + 1] = Some(gradient);
        }
        all
    }
}

/// The gradients by some inputs of a region, which gets inputs for the cotangents of some results.
pub fn pulled_back(
    region: &mut Graph,
    activity: &Activity,
    results: &[ValueId],
    formals: &[ValueId],
) -> Result<Vec<ValueId>> {
    let seeds = results.iter().map(|&v| (v, add_input(region, "g", v)));
    let seeds: Vec<(ValueId, ValueId)> = seeds.collect();
    let mut sweep = Sweep::new(region, activity);
    sweep.run_from(&seeds)?;
    formals.iter().map(|&v| sweep.gradient(v)).collect()
}

/// Positions at which a condition holds.
fn places(conditions: impl Iterator<Item = bool>) -> Vec<usize> {
    let numbered = conditions.enumerate();
    numbered.filter(|(_, is)| *is).map(|(i, _)| i).collect()
}

/// Adds an input of a region for a value of the type of another, such as its cotangent.
pub fn add_input(region: &mut Graph, name: &str, like: ValueId) -> ValueId {
    let is_taken = |name: &str| region.input_names.iter().any(|n| n == name);
    let name = free_name(name, is_taken);
    let ty = region.ty(like).clone();
    region.add_input(&name, ty)
}
