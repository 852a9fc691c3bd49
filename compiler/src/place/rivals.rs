//! Placements of one model with different kernels, of which the best is taken.

use super::{Objective, Placement, Reason};
use crate::cost::{Bytes, Nanos};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// The extent to which ops are joined and fused to kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Joining {
    /// As for a single device.
    #[default]
    Joined,
    /// Products of one operand are separate.
    Separate,
    /// Moreover, no op that reads several results is fused with what makes them.
    Lines,
    /// Only ops that a first placement, op by op, puts on the same device.
    ByDevice,
    /// The same, and none that waits for another device meanwhile.
    ByTime,
}

impl fmt::Display for Joining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Joining::Joined => "joined as for one device",
            Joining::Separate => "products separate",
            Joining::Lines => "lines of ops separate",
            Joining::ByDevice => "joined on each device",
            Joining::ByTime => "joined between waits",
        })
    }
}

/// The placement of one choice of kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rival {
    /// The kernels.
    pub kernels: Joining,
    /// Predicted time of a run.
    pub makespan_ns: u64,
    /// No placement of these kernels is predicted faster.
    pub lower_bound_ns: u64,
    /// Name of that bound.
    bound: String,
    /// The same of all runs, where they are a stream.
    #[serde(skip)]
    stream_bound: Option<Nanos>,
}

impl Placement {
    pub(crate) fn rival(&self, kernels: Joining) -> Rival {
        Rival {
            kernels,
            makespan_ns: self.makespan.0,
            lower_bound_ns: self.lower_bound.0.0,
            bound: self.lower_bound.1.clone(),
            stream_bound: self.stream.map(|s| s.lower_bound),
        }
    }

    /// True if an earlier process decided it by measured times.
    pub(crate) fn is_cached(&self) -> bool {
        let mut placed = self.nodes.iter().flatten();
        placed.any(|p| p.reason == Reason::Kept)
    }

    /// Less is better, for the objective that it was solved for.
    pub(crate) fn score(&self) -> (Bytes, Nanos) {
        let objective = self.solved.as_ref().map(|s| s.objective);
        match (&self.stream, objective) {
            (Some(stream), _) => (Bytes::ZERO, stream.time()),
            (None, Some(Objective::Memory)) => {
                let peak = self.peak_bytes.iter().copied().max();
                (peak.unwrap_or_default(), self.makespan)
            }
            (None, _) => (Bytes::ZERO, self.makespan),
        }
    }

    /// The best of several placements with different kernels. Its lower bounds hold for all of them.
    pub(crate) fn among(mut self, joining: Joining, rivals: Vec<Rival>) -> Placement {
        self.joining = joining;
        let weakest = rivals.iter().min_by_key(|r| r.lower_bound_ns);
        let weakest = weakest.filter(|r| r.lower_bound_ns < self.lower_bound.0.0);
        if let Some((least, name)) = weakest.map(|r| (Nanos(r.lower_bound_ns), r.bound.clone())) {
            self.lower_bound = (least, name);
            if let Some(solved) = &mut self.solved {
                Arc::make_mut(solved).solution.lower_bound = least;
            }
        }
        let of_streams = rivals.iter().filter_map(|r| r.stream_bound).min();
        if let (Some(stream), Some(least)) = (&mut self.stream, of_streams) {
            stream.lower_bound = stream.lower_bound.min(least);
        }
        if rivals.len() > 1 {
            self.rivals = rivals;
        }
        self
    }
}
