//! The capability report: how each node of a model would be computed, before any compilation.

use super::check::Problem;
use super::import::{Importer, TrainingNode, Visit, Visited, Weights};
use super::load::{Model, Specialisation};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, Op, OpClass};
use crate::passes::decides_extents;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Treatment of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Treatment {
    /// At import, or by indices alone: nothing is left to compute.
    Folded,
    /// By one op that has vector code or a precompiled kernel.
    Native,
    /// By several such ops.
    Decomposed,
    /// At least in part by generated loops over single elements: right, but slow on large tensors.
    Fallback,
    /// By the host, between parts that are compiled: the data decides extents of the results.
    Host,
    /// Not at all; a problem says why.
    Impossible,
    /// Not decided, because an operand is impossible.
    Undecided,
}

impl Treatment {
    /// All, from nothing to do to nothing that can be done.
    pub const ALL: [Treatment; 7] = {
        use Treatment::*;
        [
            Folded, Native, Decomposed, Fallback, Host, Impossible, Undecided,
        ]
    };

    /// Text name.
    pub fn name(self) -> &'static str {
        match self {
            Treatment::Folded => "folded",
            Treatment::Native => "native",
            Treatment::Decomposed => "decomposed",
            Treatment::Fallback => "fallback",
            Treatment::Host => "host",
            Treatment::Impossible => "impossible",
            Treatment::Undecided => "undecided",
        }
    }
}

/// The nodes of one operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperatorReport {
    /// Number of nodes by treatment.
    pub nodes: BTreeMap<Treatment, usize>,
    /// Fallbacks, such as `matmul of f64: no kernel for f64`, and how often.
    pub loops: BTreeMap<String, usize>,
}

impl OperatorReport {
    fn add(&mut self, treatment: Treatment, made: &[&ComputedNode]) {
        *self.nodes.entry(treatment).or_insert(0) += 1;
        for slow in made.iter().filter_map(|m| m.slow.as_ref()) {
            *self.loops.entry(slow.clone()).or_insert(0) += 1;
        }
    }
}

fn treatment_of(visit: &Visit, made: &[&ComputedNode], bad: &BTreeSet<&str>) -> Treatment {
    match visit.outcome {
        Visited::Failed => Treatment::Impossible,
        Visited::Unreached if bad.contains(visit.path.as_str()) => Treatment::Impossible,
        Visited::Unreached => Treatment::Undecided,
        Visited::Imported => treatment(made),
    }
}

/// Tells why generated loops over single elements compute a node; `None` where something faster
/// does.
pub type WhyLoops = fn(&Graph, &Node) -> Option<String>;

/// Treatments of a model's nodes on the CPU, and the problems of those that cannot be computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// By operator; those of another domain are named `domain::operator`. Bodies of functions and
    /// subgraphs count once per use.
    pub operators: BTreeMap<String, OperatorReport>,
    /// Everything that stands in the way.
    pub problems: Vec<Problem>,
    /// Nodes whose results follow a rule of PyTorch and onnxruntime where the ONNX reference
    /// implementation has another.
    pub notes: Vec<Note>,
    /// Warnings, such as of nodes in their form for training.
    pub warnings: Vec<String>,
}

/// A rule that decides results of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The rule, and the one that it replaces.
    pub rule: &'static str,
    /// Paths of the nodes.
    pub nodes: Vec<String>,
}

impl Model {
    /// The treatment of each node on the CPU, named dims bound as `spec` says. `why_loops` tells why
    /// generated loops compute a node of the graph, where they do.
    ///
    /// Errors when `spec` does not fit the model; problems of nodes are in the report.
    pub fn capabilities(&self, spec: &Specialisation, why_loops: WhyLoops) -> Result<Capabilities> {
        self.capabilities_but(spec, why_loops, &|_| false)
    }

    /// [`Model::capabilities`]; nodes with an error for which `is_open` holds are undecided.
    #[doc(hidden)]
    pub fn capabilities_but(
        &self,
        spec: &Specialisation,
        why_loops: WhyLoops,
        is_open: &dyn Fn(&Error) -> bool,
    ) -> Result<Capabilities> {
        let imported = Importer::run(self, spec, Weights::Skip)?;
        let mut made: BTreeMap<&str, Vec<ComputedNode>> = BTreeMap::new();
        let graph = imported.graph.as_ref().unwrap_or(&imported.draft);
        collect(graph, why_loops, &mut made);
        let (open, errors): (Vec<Error>, Vec<Error>) =
            imported.errors.into_iter().partition(is_open);
        let bad: BTreeSet<&str> = errors.iter().filter_map(|e| e.node()).collect();
        let open: BTreeSet<&str> = open.iter().filter_map(|e| e.node()).collect();
        let mut operators: BTreeMap<String, OperatorReport> = BTreeMap::new();
        for visit in &imported.visits {
            let made = made_by(visit, &made);
            let report = operators.entry(visit.operator.clone()).or_default();
            let treatment = match open.contains(visit.path.as_str()) {
                true => Treatment::Undecided,
                false => treatment_of(visit, &made, &bad),
            };
            report.add(treatment, &made);
        }
        Ok(Capabilities {
            operators,
            problems: Problem::group(&errors),
            notes: notes(&imported.visits),
            warnings: TrainingNode::warnings(&imported.visits),
        })
    }
}

/// The rules that nodes follow, in order of first appearance.
fn notes(visits: &[Visit]) -> Vec<Note> {
    let mut notes: Vec<Note> = Vec::new();
    for visit in visits {
        for &rule in &visit.rules {
            let at = notes.iter().position(|n| n.rule == rule);
            let at = at.unwrap_or_else(|| {
                let nodes = Vec::new();
                notes.push(Note { rule, nodes });
                notes.len() - 1
            });
            if notes[at].nodes.last() != Some(&visit.path) {
                notes[at].nodes.push(visit.path.clone());
            }
        }
    }
    notes
}

/// An IR node that computes something.
struct ComputedNode {
    /// Op and dtype, when it is computed by loops over single elements.
    slow: Option<String>,
    /// True when its results give symbols their values.
    decides_extents: bool,
}

/// The IR nodes by origin, regions included, but those that only rename elements.
fn collect<'g>(g: &'g Graph, why_loops: WhyLoops, made: &mut BTreeMap<&'g str, Vec<ComputedNode>>) {
    for (_, node) in g.nodes() {
        for region in &node.regions {
            collect(region, why_loops, made);
        }
        let is_view = node.op.class() == OpClass::View
            && !matches!(node.op, Op::Pad { .. } | Op::Concat { .. });
        if !is_view && !matches!(node.op, Op::Constant { .. }) {
            made.entry(node.origin.as_str())
                .or_default()
                .push(ComputedNode {
                    slow: slow(g, node, why_loops),
                    decides_extents: decides_extents(node),
                });
        }
    }
}

/// Op, dtype and reason of a node that loops compute.
fn slow(g: &Graph, node: &Node, why_loops: WhyLoops) -> Option<String> {
    let of = node
        .inputs
        .first()
        .or(node.outputs.first())
        .map(|&v| g.ty(v).dtype)?;
    let why = why_loops(g, node)?;
    Some(format!("{} of {of}: {why}", node.op.name()))
}

/// The IR nodes that a node became; those of a call, and of a node with subgraphs, are those of its
/// inner nodes too.
fn made_by<'m>(
    visit: &Visit,
    made: &'m BTreeMap<&str, Vec<ComputedNode>>,
) -> Vec<&'m ComputedNode> {
    let inner = format!("{}/", visit.path);
    let mut found: Vec<&ComputedNode> = made
        .get(visit.path.as_str())
        .into_iter()
        .flatten()
        .collect();
    let inside = made
        .range::<str, _>((Bound::Included(inner.as_str()), Bound::Unbounded))
        .take_while(|(path, _)| path.starts_with(&inner));
    inside.for_each(|(_, m)| found.extend(m));
    found
}

fn treatment(made: &[&ComputedNode]) -> Treatment {
    match made {
        [] => Treatment::Folded,
        all if all.iter().any(|m| m.decides_extents) => Treatment::Host,
        all if all.iter().any(|m| m.slow.is_some()) => Treatment::Fallback,
        [_] => Treatment::Native,
        _ => Treatment::Decomposed,
    }
}
