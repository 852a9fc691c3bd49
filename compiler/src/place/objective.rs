//! Objectives of a placement, and the solution of each.

use super::plan::{self, Planned};
use crate::cost::{Bytes, Nanos};
use gristmill_solver::memory::repair;
use gristmill_solver::search::pipeline::{self, Periodic};
use gristmill_solver::search::portfolio::{self, Algorithm, Options, Solution};
use gristmill_solver::{Problem, bounds};

/// The quantity that a placement minimises or maximises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Objective {
    /// The time of one run.
    #[default]
    Latency,
    /// The time of a stream of runs. They pass through the devices one after the other, as through
    /// the stages of a pipeline.
    Throughput {
        /// Runs of the stream, at least one.
        samples: u64,
    },
    /// The largest memory peak of a device; time breaks ties.
    Memory,
}

/// Period and depth of a stream of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Runs of the stream.
    pub samples: u64,
    /// Time from the start of a run to the start of the next, in the steady state.
    pub period: Nanos,
    /// Time of one run.
    pub latency: Nanos,
    /// Runs in flight.
    pub in_flight: u64,
    /// Lower bound of the predicted time of all runs, over all placements.
    pub lower_bound: Nanos,
}

impl Stream {
    /// Predicted time of all runs.
    pub fn time(&self) -> Nanos {
        self.latency + self.period.times(self.samples.saturating_sub(1))
    }

    /// The stream of a periodic schedule. Runs in flight are the periods of its latency, or fewer if
    /// memory limits require: each run has its own memory, except for constants.
    fn of(p: &Problem, found: &Periodic, samples: u64) -> Stream {
        let latency = found.sample.makespan;
        let wanted = latency
            .0
            .div_ceil(found.period.0.max(1))
            .clamp(1, samples.max(1));
        let resident = found.sample.resident_bytes(p);
        let room = |(d, peak): (usize, &Bytes)| {
            let (limit, own) = (p.devices[d].memory?, peak.saturating_sub(resident[d]));
            (own > Bytes::ZERO).then(|| limit.saturating_sub(resident[d]).0 / own.0)
        };
        let most = found
            .sample
            .peak_bytes(p)
            .iter()
            .enumerate()
            .filter_map(room)
            .min();
        let in_flight = most.map_or(wanted, |most| wanted.min(most.max(1)));
        let period = match in_flight < wanted {
            true => found.period.max(Nanos(latency.0.div_ceil(in_flight))),
            false => found.period,
        };
        Stream {
            samples,
            period,
            latency,
            in_flight,
            lower_bound: found.lower_bound,
        }
    }

    /// Peak memory of devices while runs overlap, given the peak of one run.
    pub(super) fn peak_bytes(&self, peaks: Vec<Bytes>, resident: &[Bytes]) -> Vec<Bytes> {
        let all = |(peak, resident): (Bytes, &Bytes)| {
            let own = peak.saturating_sub(*resident);
            *resident + Bytes(own.0.saturating_mul(self.in_flight))
        };
        peaks.into_iter().zip(resident).map(all).collect()
    }
}

/// Work of the search for the stages of a model's pipeline, in tasks looked at.
const STREAM_TASKS: u64 = 2_000_000;

/// Solves a problem for an objective; devices are those of the plan, if there is one. Of a stream,
/// the timeline is that of its first run.
pub(super) fn solve(
    p: &Problem,
    objective: Objective,
    planned: Option<&Planned>,
    options: &Options,
    name: &dyn Fn(Algorithm) -> String,
) -> Option<(Solution, Option<Stream>)> {
    if objective == Objective::Latency {
        let solution = match planned {
            Some(planned) => plan::solve(p, planned, options, name),
            None => portfolio::solve(p, options, name),
        };
        return solution.map(|s| (s, None));
    }
    let fixed = planned.map(|planned| plan::fixed(p, planned));
    let problem = fixed.as_ref().unwrap_or(p);
    let bound = bounds::best(p, 0);
    let (timeline, algorithm, stream) = match objective {
        Objective::Throughput { samples } => {
            let tasks = if options.refine_tasks > 0 {
                STREAM_TASKS
            } else {
                0
            };
            let mut found = pipeline::solve(
                problem,
                pipeline::Options {
                    samples: samples.max(1),
                    tasks,
                },
            );
            found.lower_bound = pipeline::lower_bound(p, samples.max(1));
            let stream = Stream::of(p, &found, samples.max(1));
            (found.sample, "stages", Some(stream))
        }
        _ => (pipeline::least_memory(problem), "least-memory", None),
    };
    let solution = Solution {
        score: repair::key(p, &timeline),
        timeline,
        algorithm: if planned.is_some() { "plan" } else { algorithm }.to_owned(),
        lower_bound: bound.value,
        bound: bound.name.to_owned(),
        candidates: Vec::new(),
        moved: Vec::new(),
    };
    Some((solution, stream))
}
