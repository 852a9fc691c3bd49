//! Values of a step for inspection: collected ones, and gradients. Nothing is assigned.

use super::collection::is_within;
use super::data::Batch;
use super::trainer::Trainer;
use crate::compiled::{Compiled, Outputs};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, Op, Output, ValueId};
use crate::options::Options;
use crate::passes::{Rebuild, forward_state, prune};
use crate::place::PinTarget;
use std::collections::BTreeSet;

/// Values of the graph of a step, by tag.
#[derive(Clone, Debug, Default)]
pub(super) struct StepValues {
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

impl StepValues {
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
}

/// True for a tag within any of the scopes, or if there is none.
pub(super) fn is_within_any(tag: &str, scopes: &[String]) -> bool {
    scopes.is_empty() || scopes.iter().any(|scope| is_within(tag, scope))
}

impl Trainer {
    /// Tags of the chosen values.
    pub(super) fn step_tags(&self, activations: bool, gradients: bool) -> Vec<String> {
        let outputs = self.step_values().outputs(activations, gradients, &[]);
        outputs.into_iter().map(|output| output.name).collect()
    }

    /// The program of the chosen values; `None` when no value is chosen.
    ///
    /// Errors with `Unsupported` when a branch or a loop depends on an assignment.
    pub(super) fn inspection(
        &self,
        activations: bool,
        gradients: bool,
        scopes: &[String],
    ) -> Result<Option<Inspection>> {
        let outputs = self.step_values().outputs(activations, gradients, scopes);
        if outputs.is_empty() {
            return Ok(None);
        }
        let mut graph = self.graph()?.clone();
        graph.outputs = outputs;
        let graph = without_effects(&graph)?;
        let program = self.program();
        let options = options_for(&graph, &program.options);
        let program = program.session().undeclared((&graph).into(), &options)?;
        program.compile_static()?;
        Ok(Some(Inspection(program)))
    }
}

/// The options of a step for a part of its graph: pins of other nodes mean nothing here, and neither does a plan.
fn options_for(g: &Graph, options: &Options) -> Options {
    let paths: BTreeSet<&str> = g.nodes().map(|(_, n)| n.origin.as_str()).collect();
    let mut options = options.clone();
    options.plan = None;
    options.pins.retain(|pin| {
        let has_target = match &pin.target {
            PinTarget::Device(_) => true,
            PinTarget::With(path) => paths.contains(&**path),
        };
        has_target && paths.iter().any(|path| pin.pattern.is_match(path))
    });
    options
}

/// The graph without checks and assignments: a read behind an assignment has its value.
fn without_effects(g: &Graph) -> Result<Graph> {
    let g = &forward_state(g)?;
    let mut r = Rebuild::new(g);
    let mut assigned: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (id, node) in g.nodes() {
        check_regions(node, &assigned)?;
        match &node.op {
            Op::AssignVariable { container, name } => {
                assigned.insert((container, name));
                let value = r.get(node.inputs[0]);
                r.set(node.outputs[0], value);
            }
            Op::CheckFinite => {
                let value = r.get(node.inputs[0]);
                r.set(node.outputs[0], value);
            }
            _ => r.copy(id, node)?,
        }
    }
    prune(&r.finish(g))
}

/// Errors when a branch or a loop assigns a variable, or reads one that was assigned before.
fn check_regions(node: &Node, assigned: &BTreeSet<(&str, &str)>) -> Result<()> {
    let is_old = |region: &Graph| {
        let mut used = region.variables().into_keys();
        used.any(|(container, name)| assigned.contains(&(&*container, &*name)))
    };
    let mut regions = node.regions.iter();
    match regions.find(|region| region.assigns() || is_old(region)) {
        None => Ok(()),
        Some(_) => {
            let message = "activations and gradients cannot be shown: this branch or loop depends on assigned variables";
            let e = Error::unsupported(message).at_origin(&node.origin);
            Err(e.hint("Summaries { activations: false, gradients: false, .. } shows weights"))
        }
    }
}
