//! Equality saturation over the tensor DAG, with egg: Graph -> e-graph -> phases of rules -> cheapest DAG -> Graph.
//!
//! Rules are named, directed and grouped by family in [`rules`]; each names its effect on
//! floating-point results ([`Exactness`]). There is no associativity and no bare commutativity. A phase ends by saturation or by a limit on e-nodes
//! and iterations, and by time only where a [`Deadline`] is set. Extraction prices whole DAGs by predicted time ([`Pricing`]).

mod chunks;
mod convert;
mod cost;
mod deadline;
mod descent;
mod extract;
mod lang;
mod report;
mod rules;
mod run;
mod terms;

pub use cost::{Pricing, Work};
pub(crate) use deadline::Deadline;
pub use report::{PhaseReport, Report, StopReason};
pub use rules::{Phase, RuleInfo, rule_list};
pub use run::{Exactness, Limits};
pub use terms::Miss;

use crate::error::Result;
use crate::ir::Graph;
use std::collections::BTreeMap;

/// Phases, limits and prices of rewriting.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// 0: not at all. 1: simplify and recognise. 2 and above: also layouts. Fusion is a phase of its
    /// own, run by clustering after products are merged and constants folded.
    pub opt_level: u8,
    /// Limits of each phase.
    pub limits: Limits,
    /// Phases to run, in order.
    pub phases: Vec<Phase>,
    /// The target's predicted times.
    pub pricing: Pricing,
    /// Time at which saturation stops even before a limit is met.
    pub deadline: Deadline,
}

impl Options {
    /// The defaults of an optimisation level.
    pub fn level(opt_level: u8) -> Options {
        let phases = Phase::ALL
            .iter()
            .copied()
            .filter(|p| p.min_level() <= opt_level)
            .collect();
        Options {
            opt_level,
            limits: Limits::default(),
            phases,
            pricing: Pricing::default(),
            deadline: Deadline::default(),
        }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options::level(3)
    }
}

/// Rewrites a graph and, each on its own, the regions of its nodes. Inputs, outputs and their types stay.
///
/// Errors are internal: a verified graph can always be rewritten.
pub fn rewrite(g: &Graph, options: &Options) -> Result<(Graph, Report)> {
    if options.opt_level == 0 {
        let report = Report {
            skipped: Some("optimisation level 0".into()),
            ..Report::default()
        };
        Ok((g.clone(), report))
    } else if g.n_nodes() > options.limits.chunk {
        rewrite_chunks(g, options)
    } else {
        rewrite_whole(g, options)
    }
}

fn rewrite_chunks(g: &Graph, options: &Options) -> Result<(Graph, Report)> {
    let mut report = Report::default();
    let mut chunks = chunks::split(g, options.limits.chunk)?;
    for chunk in &mut chunks {
        let (new, part) = rewrite_whole(&chunk.graph, options)?;
        chunk.graph = new;
        report.add(part);
    }
    Ok((chunks::join(g, &chunks)?, report))
}

fn rewrite_whole(g: &Graph, options: &Options) -> Result<(Graph, Report)> {
    let mut report = Report::default();
    let regions = rewrite_regions(g, options, &mut report)?;
    let mut ins = convert::insert(g)?;
    report.before = chosen(&ins, options)?.map_or_else(Work::default, |(_, work)| work);
    saturate(&mut ins, g.n_nodes(), options, &mut report);
    let Some((choice, work)) = chosen(&ins, options)? else {
        let n = ins.terms.eg.number_of_classes();
        report.skipped = Some(format!("{n} e-classes are too many for extraction"));
        return Ok((g.clone(), report));
    };
    report.after = work;
    let out = convert::emit(g, &ins, &choice, &regions)?;
    let verified = || crate::ir::verify::verify(&out);
    debug_assert!(verified().is_ok(), "{:?}", verified());
    Ok((out, report))
}

/// The cheapest graph and its work. `None` when the e-graph is too large.
fn chosen(
    ins: &convert::RootedTerms,
    options: &Options,
) -> Result<Option<(extract::Choice, Work)>> {
    let Some(choice) = extract::extract(&ins.terms, ins.root, &options.pricing) else {
        return Ok(None);
    };
    let work = choice.work(&ins.terms, ins.root, &options.pricing)?;
    Ok(Some((choice, work)))
}

/// Runs the phases.
fn saturate(
    ins: &mut convert::RootedTerms,
    n_nodes: usize,
    options: &Options,
    report: &mut Report,
) {
    for phase in &options.phases {
        let limits = run::PhaseLimits {
            iterations: options.limits.iterations.min(phase.max_iterations()),
            nodes: options.limits.nodes.unwrap_or(8 * n_nodes + 5000),
            deadline: options.deadline,
        };
        let terms = &mut ins.terms;
        let ran = run::run_phase(terms, phase.name(), &phase.rules(), &limits);
        report.phases.push(ran);
    }
    report.drop_fired_misses();
}

/// Rewritten regions by node number, for nodes that have any. Clusters keep their bodies.
fn rewrite_regions(
    g: &Graph,
    options: &Options,
    report: &mut Report,
) -> Result<BTreeMap<u32, Vec<Graph>>> {
    let mut all = BTreeMap::new();
    for (id, node) in g.nodes() {
        if node.regions.is_empty() || node.op.class() == crate::ir::OpClass::Cluster {
            continue;
        }
        let mut regions = Vec::new();
        for (i, r) in node.regions.iter().enumerate() {
            let (new, inner) = rewrite(r, options)?;
            report.regions.push((format!("{}/{i}", node.origin), inner));
            regions.push(new);
        }
        all.insert(id.0, regions);
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
