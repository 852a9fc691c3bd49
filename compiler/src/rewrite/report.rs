//! Fired rules, sizes and predicted times of rewriting, for the compile report.

use super::cost::Work;
use super::run::Counts;
use super::terms::Miss;
use crate::ir::Origin;
use crate::units::plural;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Why a phase stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopReason {
    /// No rule changed anything.
    Saturated,
    /// The iteration limit was met.
    Iterations,
    /// The node limit was met.
    Nodes,
    /// The time was over.
    Time,
}

/// Outcome of one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseReport {
    /// Name of the phase.
    pub name: &'static str,
    /// Iterations run.
    pub iterations: usize,
    /// E-nodes afterwards.
    pub e_nodes: usize,
    /// E-classes afterwards.
    pub e_classes: usize,
    /// Why it stopped.
    pub stop: StopReason,
    /// Times each rule fired.
    pub fired: BTreeMap<&'static str, u64>,
    /// Terms that had the form of a rule but failed a condition: (rule, reason) -> origins, each once.
    pub missed: BTreeMap<(&'static str, String), Vec<String>>,
    /// Where rules fired that were rejected somewhere: (rule, origin).
    pub(crate) fired_at: BTreeSet<(&'static str, Origin)>,
}

/// At most this many origins are listed for one reason.
const MAX_ORIGINS: usize = 4;

impl PhaseReport {
    pub(crate) fn new(name: &'static str) -> PhaseReport {
        PhaseReport {
            name,
            iterations: 0,
            e_nodes: 0,
            e_classes: 0,
            stop: StopReason::Saturated,
            fired: Counts::new(),
            missed: BTreeMap::new(),
            fired_at: BTreeSet::new(),
        }
    }

    pub(crate) fn record(
        &mut self,
        rule: &'static str,
        outcome: Result<(), Miss>,
        origin: &Origin,
    ) {
        match outcome {
            Ok(()) => {
                *self.fired.entry(rule).or_insert(0) += 1;
                self.fired_at.insert((rule, origin.clone()));
            }
            Err(Miss::Rejected(why)) => {
                let origins = self.missed.entry((rule, why.into_owned())).or_default();
                if origins.len() < MAX_ORIGINS && !origins.iter().any(|o| o == origin.as_str()) {
                    origins.push(origin.as_str().to_owned());
                }
            }
            Err(Miss::NoMatch | Miss::NoEffect) => {}
        }
    }
}

impl PhaseReport {
    /// Adds the same phase of another piece of the graph.
    fn add(&mut self, piece: PhaseReport) {
        self.iterations = self.iterations.max(piece.iterations);
        self.e_nodes += piece.e_nodes;
        self.e_classes += piece.e_classes;
        self.stop = self.stop.max(piece.stop);
        for (rule, n) in piece.fired {
            *self.fired.entry(rule).or_insert(0) += n;
        }
        for (miss, origins) in piece.missed {
            let all = self.missed.entry(miss).or_default();
            let room = MAX_ORIGINS.saturating_sub(all.len());
            all.extend(origins.into_iter().take(room));
        }
    }
}

/// Outcome of rewriting a graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// One entry per phase, of the graph itself.
    pub phases: Vec<PhaseReport>,
    /// Kernels, bytes and predicted time before, at op granularity.
    pub before: Work,
    /// The same afterwards.
    pub after: Work,
    /// Why the graph was left as it was, if so.
    pub skipped: Option<String>,
    /// Reports of regions: (node origin and region number, report).
    pub regions: Vec<(String, Report)>,
}

impl Report {
    /// Drops misses where the rule fired after all, in the same phase or another.
    pub(crate) fn drop_fired_misses(&mut self) {
        let fired: BTreeSet<_> = self
            .phases
            .iter_mut()
            .flat_map(|p| std::mem::take(&mut p.fired_at))
            .collect();
        for phase in &mut self.phases {
            for ((rule, _), origins) in &mut phase.missed {
                origins.retain(|o| !fired.contains(&(*rule, Origin::new(o))));
            }
            phase.missed.retain(|_, origins| !origins.is_empty());
        }
    }

    /// True when a phase ran out of time, in a region or outside.
    pub fn ran_out_of_time(&self) -> bool {
        self.phases.iter().any(|p| p.stop == StopReason::Time)
            || self.regions.iter().any(|(_, r)| r.ran_out_of_time())
    }

    /// Adds the report of another piece of the same graph.
    pub(crate) fn add(&mut self, piece: Report) {
        for new in piece.phases {
            match self.phases.iter_mut().find(|p| p.name == new.name) {
                Some(old) => old.add(new),
                None => self.phases.push(new),
            }
        }
        self.before += piece.before;
        self.after += piece.after;
        self.skipped = self.skipped.take().or(piece.skipped);
        self.regions.extend(piece.regions);
    }

    /// Times a rule fired, regions included.
    pub fn fired(&self, rule: &str) -> u64 {
        let own: u64 = self.phases.iter().filter_map(|p| p.fired.get(rule)).sum();
        own + self.regions.iter().map(|(_, r)| r.fired(rule)).sum::<u64>()
    }
}

impl fmt::Display for PhaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stop = match self.stop {
            StopReason::Saturated => "saturated",
            StopReason::Iterations => "iteration limit",
            StopReason::Nodes => "node limit",
            StopReason::Time => "out of time",
        };
        let PhaseReport {
            name,
            iterations,
            e_nodes,
            e_classes,
            ..
        } = self;
        writeln!(
            f,
            "{name}: {iterations} iterations, {e_nodes} e-nodes, {e_classes} e-classes, {stop}"
        )?;
        for (rule, n) in &self.fired {
            writeln!(f, "  {rule}: {n}")?;
        }
        for ((rule, why), origins) in &self.missed {
            writeln!(f, "  missed {rule}: {why} (at {})", origins.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.skipped {
            return writeln!(f, "rewrite: skipped: {why}");
        }
        for p in &self.phases {
            write!(f, "{p}")?;
        }
        for (label, w) in [("before", &self.before), ("after", &self.after)] {
            writeln!(
                f,
                "{label} rewriting: {} not fused yet, {} moved, predicted {}",
                plural(w.kernels as usize, "op"),
                w.bytes,
                w.time.nanos()
            )?;
        }
        for (at, r) in &self.regions {
            write!(f, "region {at}:\n{r}")?;
        }
        Ok(())
    }
}
