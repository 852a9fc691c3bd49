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
    /// At least in part by generated loops over single elements that take 1 % of the predicted time or more.
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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OperatorReport {
    /// Number of nodes by treatment.
    pub nodes: BTreeMap<Treatment, usize>,
    /// Fallbacks, such as `matmul of f64: no kernel for f64`, and how often.
    pub loops: BTreeMap<String, usize>,
    /// Share of the loops in the predicted time of the model, from 0 to 1; `None` where no time was
    /// predicted.
    pub share: Option<f64>,
}

/// Share of the predicted time from which on the loops of an operator are slow.
pub const SLOW_SHARE: f64 = 0.01;

impl OperatorReport {
    /// Adds a node, whose loops count where they are slow.
    fn add(&mut self, treatment: Treatment, made: &[&ComputedNode]) {
        *self.nodes.entry(treatment).or_insert(0) += 1;
        if !self.is_slow() {
            return;
        }
        for slow in made.iter().filter_map(|m| m.slow.as_ref()) {
            *self.loops.entry(slow.clone()).or_insert(0) += 1;
        }
    }

    fn is_slow(&self) -> bool {
        self.share.is_none_or(|share| share >= SLOW_SHARE)
    }
}

fn treatment_of(
    visit: &Visit,
    made: &[&ComputedNode],
    bad: &BTreeSet<&str>,
    is_slow: bool,
) -> Treatment {
    match visit.outcome {
        Visited::Failed => Treatment::Impossible,
        Visited::Unreached if bad.contains(visit.path.as_str()) => Treatment::Impossible,
        Visited::Unreached => Treatment::Undecided,
        Visited::Imported => treatment(made, is_slow),
    }
}

/// Knowledge of the loops over single elements that are generated where nothing faster computes a node.
#[derive(Clone, Copy)]
pub struct Loops<'a> {
    /// Tells why there are loops for a node; `None` where something faster computes it.
    pub why: fn(&Graph, &Node) -> Option<String>,
    /// Share of the loops of the model's node at a path in the predicted time of the model, if that is known.
    pub share: Option<&'a dyn Fn(&str) -> f64>,
}

/// Treatments of a model's nodes on the CPU, and the problems of those that cannot be computed.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// The treatment of each node on the CPU, named dims bound as `spec` says. Loops with a share below
    /// [`SLOW_SHARE`] of the time are as good as native code.
    ///
    /// Errors when `spec` does not fit the model; problems of nodes are in the report.
    pub fn capabilities(&self, spec: &Specialisation, loops: Loops) -> Result<Capabilities> {
        self.capabilities_but(spec, loops, &|_| false)
    }

    /// [`Model::capabilities`]; nodes with an error for which `is_open` holds are undecided.
    #[doc(hidden)]
    pub fn capabilities_but(
        &self,
        spec: &Specialisation,
        loops: Loops,
        is_open: &dyn Fn(&Error) -> bool,
    ) -> Result<Capabilities> {
        let imported = Importer::run(self, spec, Weights::Skip)?;
        let mut made: BTreeMap<&str, Vec<ComputedNode>> = BTreeMap::new();
        let graph = imported.graph.as_ref().unwrap_or(&imported.draft);
        collect(graph, loops, &mut made);
        let (open, errors): (Vec<Error>, Vec<Error>) =
            imported.errors.into_iter().partition(is_open);
        let bad: BTreeSet<&str> = errors.iter().filter_map(|e| e.node()).collect();
        let open: BTreeSet<&str> = open.iter().filter_map(|e| e.node()).collect();
        let visits = imported.visits.iter().map(|v| (v, made_by(v, &made)));
        let visits: Vec<(&Visit, Vec<&ComputedNode>)> = visits.collect();
        let mut operators = with_shares(&visits, loops);
        for (visit, made) in &visits {
            let report = operators.entry(visit.operator.clone()).or_default();
            let treatment = match open.contains(visit.path.as_str()) {
                true => Treatment::Undecided,
                false => treatment_of(visit, made, &bad, report.is_slow()),
            };
            report.add(treatment, made);
        }
        Ok(Capabilities {
            operators,
            problems: Problem::group(&errors),
            notes: notes(&imported.visits),
            warnings: TrainingNode::warnings(&imported.visits),
        })
    }
}

/// The share of the loops of each operator, if shares are known, without its nodes.
fn with_shares(
    visits: &[(&Visit, Vec<&ComputedNode>)],
    loops: Loops,
) -> BTreeMap<String, OperatorReport> {
    let mut operators: BTreeMap<String, OperatorReport> = BTreeMap::new();
    if loops.share.is_none() {
        return operators;
    }
    for (visit, made) in visits {
        let report = operators.entry(visit.operator.clone()).or_default();
        let share: f64 = made.iter().map(|m| m.share).sum();
        report.share = Some(report.share.unwrap_or(0.0) + share);
    }
    operators
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
    /// Share of the loops of all nodes of this origin, in the first of them.
    share: f64,
    /// True when its results give symbols their values.
    decides_extents: bool,
}

/// The IR nodes by origin, regions included, but those that only rename elements.
fn collect<'g>(g: &'g Graph, loops: Loops, made: &mut BTreeMap<&'g str, Vec<ComputedNode>>) {
    for (_, node) in g.nodes() {
        for region in &node.regions {
            collect(region, loops, made);
        }
        let is_view = node.op.class() == OpClass::View
            && !matches!(node.op, Op::Pad { .. } | Op::Concat { .. });
        if !is_view && !matches!(node.op, Op::Constant { .. }) {
            let of_origin = made.entry(node.origin.as_str()).or_default();
            let share = loops.share.filter(|_| of_origin.is_empty());
            of_origin.push(ComputedNode {
                slow: slow(g, node, loops),
                share: share.map_or(0.0, |share| share(node.origin.as_str())),
                decides_extents: decides_extents(node),
            });
        }
    }
}

/// Op, dtype and reason of a node that loops compute.
fn slow(g: &Graph, node: &Node, loops: Loops) -> Option<String> {
    let of = node
        .inputs
        .first()
        .or(node.outputs.first())
        .map(|&v| g.ty(v).dtype)?;
    let why = (loops.why)(g, node)?;
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

fn treatment(made: &[&ComputedNode], is_slow: bool) -> Treatment {
    match made {
        [] => Treatment::Folded,
        all if all.iter().any(|m| m.decides_extents) => Treatment::Host,
        all if is_slow && all.iter().any(|m| m.slow.is_some()) => Treatment::Fallback,
        [_] => Treatment::Native,
        _ => Treatment::Decomposed,
    }
}
