//! Runs the rules of one phase until nothing changes or a limit is met.
//!
//! An iteration visits all e-classes by id and applies every rule whose root fits, at once; congruence is restored after
//! each iteration. Limits are numbers of e-nodes and iterations, so results do not depend on the machine; a deadline is for those who ask for it.

use super::lang::Sym;
use super::report::{PhaseReport, StopReason};
use super::terms::{Applied, Miss, Terms};
use crate::deadline::Deadline;
use crate::ir::Op;
use egg::Id;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Permitted difference between the result of a rule and the term that it replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exactness {
    /// The same bits, NaN and infinities included.
    Bits,
    /// Equal numbers; the sign of a zero may differ.
    Value,
    /// Rounded differently, within the tolerance of the ops involved. NaN and infinite inputs give NaN and infinite
    /// results as before, except where an intermediate result overflows or underflows.
    Rounding,
}

/// The matched term: the op at the root, its class and its operands.
pub(crate) struct Root<'a> {
    pub op: &'a Op,
    pub class: Id,
    pub args: &'a [Id],
}

/// A named, directed rule.
pub(crate) struct Rule {
    pub name: &'static str,
    pub doc: &'static str,
    pub exactness: Exactness,
    /// Ops at which the rule may fire.
    pub root: fn(&Op) -> bool,
    pub apply: fn(&mut Terms, &Root) -> Applied,
}

/// Limits of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most iterations of a phase.
    pub iterations: usize,
    /// Most e-nodes; `None` is eight per node of the graph and five thousand.
    pub nodes: Option<usize>,
    /// Graphs of more nodes are rewritten in pieces of at most so many.
    pub chunk: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            iterations: 8,
            nodes: None,
            chunk: 6000,
        }
    }
}

/// Upper bounds of one phase.
pub(crate) struct PhaseLimits {
    pub iterations: usize,
    pub nodes: usize,
    pub deadline: Deadline,
}

/// The number of e-nodes during a pass.
///
/// Counting them takes a walk over all classes. Until congruence is restored, though, classes are only added, one e-node with each, or
/// joined; so the size of the hash table tells how many came since the last count.
struct NodeCount {
    counted: usize,
    table_size: usize,
}

impl NodeCount {
    /// Counts the e-nodes of a graph whose congruence is restored.
    fn new(terms: &Terms) -> NodeCount {
        NodeCount {
            counted: terms.eg.total_number_of_nodes(),
            table_size: terms.eg.total_size(),
        }
    }

    fn get(&self, terms: &Terms) -> usize {
        self.counted + (terms.eg.total_size() - self.table_size)
    }
}

/// Applies `rules` until saturation or a limit.
pub(crate) fn run_phase(
    terms: &mut Terms,
    name: &'static str,
    rules: &[&Rule],
    limits: &PhaseLimits,
) -> PhaseReport {
    let mut report = PhaseReport::new(name);
    let mut by_op: Vec<Vec<usize>> = Vec::new();
    report.stop = StopReason::Iterations;
    for _ in 0..limits.iterations {
        report.iterations += 1;
        let changed = pass(terms, rules, &mut by_op, limits, &mut report);
        terms.eg.rebuild();
        match changed {
            Ok(true) => {}
            Ok(false) => {
                report.stop = StopReason::Saturated;
                break;
            }
            Err(stop) => {
                report.stop = stop;
                break;
            }
        }
    }
    report.e_nodes = terms.eg.total_number_of_nodes();
    report.e_classes = terms.eg.number_of_classes();
    report
}

/// One iteration; true when something changed, an error when a limit was met.
fn pass(
    terms: &mut Terms,
    rules: &[&Rule],
    by_op: &mut Vec<Vec<usize>>,
    limits: &PhaseLimits,
    report: &mut PhaseReport,
) -> Result<bool, StopReason> {
    let mut ids: Vec<Id> = terms.eg.classes().map(|c| c.id).collect();
    ids.sort_unstable();
    let n_nodes = NodeCount::new(terms);
    let mut changed = false;
    for id in ids {
        // The class may have been merged into another since the list was made; that one is visited under its own id.
        if terms.eg.find(id) != id {
            continue;
        }
        if limits.deadline.has_passed() {
            return Err(StopReason::Time);
        }
        let nodes: Vec<_> = terms.eg[id].nodes.clone();
        for node in nodes {
            let Sym::Op(op) = node.sym else { continue };
            while by_op.len() < terms.eg.analysis.n_ops() {
                let op = &terms
                    .eg
                    .analysis
                    .op(super::lang::OpId(by_op.len() as u32))
                    .op;
                by_op.push(
                    rules
                        .iter()
                        .enumerate()
                        .filter(|(_, r)| (r.root)(op))
                        .map(|(i, _)| i)
                        .collect(),
                );
            }
            let placed: Arc<_> = terms.eg.analysis.op(op).clone();
            for &i in &by_op[op.0 as usize] {
                if n_nodes.get(terms) > limits.nodes {
                    return Err(StopReason::Nodes);
                }
                terms.origin = terms.facts(id).origin;
                terms.device = placed.device.clone();
                let class = terms.eg.find(id);
                let root = Root {
                    op: &placed.op,
                    class,
                    args: &node.children,
                };
                let outcome = (rules[i].apply)(terms, &root)
                    .and_then(|to| join(terms, class, to, rules[i].name));
                changed |= outcome.is_ok();
                report.record(
                    rules[i].name,
                    outcome,
                    &terms.origins[terms.facts(id).origin as usize],
                );
            }
        }
    }
    debug_assert_eq!(n_nodes.get(terms), terms.eg.total_number_of_nodes());
    Ok(changed)
}

/// Makes two classes equal.
fn join(terms: &mut Terms, a: Id, b: Id, rule: &str) -> Result<(), Miss> {
    if terms.same(a, b) {
        return Err(Miss::NoEffect);
    }
    if terms.facts(a).types != terms.facts(b).types {
        let why = format!("the result has type {}, not {}", terms.ty(b), terms.ty(a));
        debug_assert!(
            terms.ty(a).static_shape().is_none(),
            "unsound rule {rule}: {why}"
        );
        return Err(Miss::Rejected(why.into()));
    }
    terms.eg.union(a, b);
    Ok(())
}

/// Counts by name, in order of names.
pub(crate) type Counts = BTreeMap<&'static str, u64>;
