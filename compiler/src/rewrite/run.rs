//! Runs the rules of one phase until nothing changes or a limit is met.
//!
//! An iteration visits all e-classes by id and applies every rule whose root fits, at once; congruence is restored after
//! each iteration. Limits are numbers of e-nodes and iterations, so results do not depend on the machine; a deadline is for those who ask for it.

use super::deadline::Deadline;
use super::lang::{OpId, PlacedOp, Sym, Tables};
use super::report::{PhaseReport, StopReason};
use super::terms::{Miss, RuleResult, Terms};
use crate::ir::Op;
use egg::Id;
use std::collections::BTreeMap;
use std::rc::Rc;

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
    pub apply: fn(&mut Terms, &Root) -> RuleResult,
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
    let mut phase = RunningPhase {
        terms,
        rules: RuleIndex::new(rules),
        limits,
        report: PhaseReport::new(name),
    };
    phase.report.stop = phase.run();
    let mut report = phase.report;
    report.e_nodes = terms.eg.total_number_of_nodes();
    report.e_classes = terms.eg.number_of_classes();
    report
}

/// Rules by the interned ops at which they may fire.
struct RuleIndex<'r> {
    rules: &'r [&'r Rule],
    by_op: Vec<Rc<[&'r Rule]>>,
}

impl<'r> RuleIndex<'r> {
    fn new(rules: &'r [&'r Rule]) -> RuleIndex<'r> {
        RuleIndex {
            rules,
            by_op: Vec::new(),
        }
    }

    /// Rules for an op. Ops are interned while rules run, so the index grows with them.
    fn at(&mut self, ops: &Tables, id: OpId) -> Rc<[&'r Rule]> {
        while self.by_op.len() < ops.n_ops() {
            let op = &ops.op(OpId(self.by_op.len() as u32)).op;
            let fitting = self.rules.iter().copied().filter(|r| (r.root)(op));
            self.by_op.push(fitting.collect());
        }
        self.by_op[id.0 as usize].clone()
    }
}

/// A phase while it runs.
struct RunningPhase<'a> {
    terms: &'a mut Terms,
    rules: RuleIndex<'a>,
    limits: &'a PhaseLimits,
    report: PhaseReport,
}

impl RunningPhase<'_> {
    fn run(&mut self) -> StopReason {
        for _ in 0..self.limits.iterations {
            self.report.iterations += 1;
            let changed = self.pass();
            self.terms.eg.rebuild();
            match changed {
                Ok(true) => {}
                Ok(false) => return StopReason::Saturated,
                Err(stop) => return stop,
            }
        }
        StopReason::Iterations
    }

    /// One iteration; true when something changed, an error when a limit was met.
    fn pass(&mut self) -> Result<bool, StopReason> {
        let mut ids: Vec<Id> = self.terms.eg.classes().map(|c| c.id).collect();
        ids.sort_unstable();
        let n_nodes = NodeCount::new(self.terms);
        let mut changed = false;
        for id in ids {
            // A class that was merged into another since the list was made is visited under the
            // other's id.
            if self.terms.eg.find(id) == id {
                changed |= self.visit(id, &n_nodes)?;
            }
        }
        debug_assert_eq!(
            n_nodes.get(self.terms),
            self.terms.eg.total_number_of_nodes()
        );
        Ok(changed)
    }

    /// Applies the rules at the nodes of a class.
    fn visit(&mut self, id: Id, n_nodes: &NodeCount) -> Result<bool, StopReason> {
        if self.limits.deadline.has_passed() {
            return Err(StopReason::Time);
        }
        let mut changed = false;
        for node in self.terms.eg[id].nodes.clone() {
            let Sym::Op(op) = node.sym else { continue };
            let placed = self.terms.eg.analysis.op(op).clone();
            for rule in self.rules.at(&self.terms.eg.analysis, op).iter() {
                if n_nodes.get(self.terms) > self.limits.nodes {
                    return Err(StopReason::Nodes);
                }
                changed |= self.apply(rule, id, &placed, &node.children);
            }
        }
        Ok(changed)
    }

    /// Applies a rule at an e-node of class `id`; true when two classes became equal.
    fn apply(&mut self, rule: &Rule, id: Id, placed: &PlacedOp, args: &[Id]) -> bool {
        let terms = &mut *self.terms;
        terms.origin = terms.facts(id).origin;
        terms.device = placed.device.clone();
        let class = terms.eg.find(id);
        let root = Root {
            op: &placed.op,
            class,
            args,
        };
        let outcome = (rule.apply)(terms, &root).and_then(|to| join(terms, class, to, rule.name));
        let changed = outcome.is_ok();
        let origin = &terms.origins[terms.facts(id).origin as usize];
        self.report.record(rule.name, outcome, origin);
        changed
    }
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
