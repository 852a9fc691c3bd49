//! Values of a step for inspection: what a model has collected, and gradients. Nothing is assigned.

use super::collection::is_within;
use super::data::Batch;
use super::trainer::Trainer;
use crate::compiled::{Compiled, Outputs};
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, NodeId, Op, Output, ValueId};
use crate::passes::{Rebuild, forward_state};

/// Values of the graph of a step, by tag.
#[derive(Clone, Debug, Default)]
pub(super) struct Inspected {
    /// Values of the collection [`SUMMARIES`].
    pub(super) activations: Vec<(String, ValueId)>,
    /// Gradients of variables.
    pub(super) gradients: Vec<(String, ValueId)>,
}

/// The collection of values to show.
pub(super) const SUMMARIES: &str = "summaries";

/// The program of some values of a step.
pub(super) struct Inspection(Compiled);

impl Inspection {
    /// The values for a batch, or its first micro-batch, by tag.
    pub(super) fn run(&self, trainer: &Trainer, batch: &Batch) -> Result<Outputs> {
        self.0.run(trainer.first_micro_batch(batch)?)
    }
}

impl Inspected {
    /// The values within any of the scopes, or all if there is none.
    fn outputs(&self, activations: bool, gradients: bool, scopes: &[String]) -> Vec<Output> {
        let activations = self.activations.iter().filter(|_| activations);
        let gradients = self.gradients.iter().filter(|_| gradients);
        let chosen = activations.chain(gradients);
        let chosen = chosen.filter(|(tag, _)| is_within_any(tag, scopes));
        let output = |(tag, value): &(String, ValueId)| Output {
            name: tag.clone(),
            value: *value,
        };
        chosen.map(output).collect()
    }

    /// True when something is within a scope.
    pub(super) fn has_scope(&self, scope: &str) -> bool {
        let all = self.activations.iter().chain(&self.gradients);
        all.into_iter().any(|(tag, _)| is_within(tag, scope))
    }
}

/// True for a tag within any of the scopes, or if there is none.
pub(super) fn is_within_any(tag: &str, scopes: &[String]) -> bool {
    scopes.is_empty() || scopes.iter().any(|scope| is_within(tag, scope))
}

impl Trainer {
    /// The program of the chosen values; `None` when no value is chosen.
    pub(super) fn inspection(
        &self,
        activations: bool,
        gradients: bool,
        scopes: &[String],
    ) -> Result<Option<Inspection>> {
        let outputs = self.inspected().outputs(activations, gradients, scopes);
        if outputs.is_empty() {
            return Ok(None);
        }
        let mut graph = self.graph()?.clone();
        graph.outputs = outputs;
        let graph = without_effects(&graph)?;
        let program = self.program();
        let session = program.session();
        let program = session.undeclared((&graph).into(), &program.options)?;
        Ok(Some(Inspection(program)))
    }
}

/// The graph without checks and assignments: a read behind an assignment has its value.
///
/// Errors with `Unsupported` when a value depends on an assignment within a loop or a branch.
fn without_effects(g: &Graph) -> Result<Graph> {
    let g = &forward_state(g)?;
    let needed = needed(g);
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes().filter(|(id, _)| needed[id.0 as usize]) {
        if node.regions.iter().any(Graph::assigns) {
            let message = "it assigns a variable, and its results are to be shown without";
            return Err(Error::unsupported(message).at_origin(&node.origin));
        }
        match node.op {
            Op::AssignVariable { .. } | Op::CheckFinite => {
                let value = r.get(node.inputs[0]);
                r.set(node.outputs[0], value);
            }
            _ => r.copy(id, node)?,
        }
    }
    Ok(r.finish(g))
}

/// The nodes behind the outputs, and those with the sizes of symbols.
fn needed(g: &Graph) -> Vec<bool> {
    let mut needed = vec![false; g.n_nodes()];
    let need = |v: ValueId, needed: &mut [bool]| {
        if let Def::Node(NodeId(n), _) = g.value(v).def {
            needed[n as usize] = true;
        }
    };
    let outputs = g.outputs.iter();
    outputs.for_each(|output| need(output.value, &mut needed));
    for (NodeId(id), node) in g.nodes().rev() {
        needed[id as usize] |= matches!(node.op, Op::Extent { .. });
        if needed[id as usize] {
            node.inputs.iter().for_each(|&v| need(v, &mut needed));
        }
    }
    needed
}
