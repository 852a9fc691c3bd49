//! Branch and bound: schedules with a proof that none is shorter.
//!
//! The proof holds for every valid schedule as [`crate::bounds`] describes them, those with idle
//! times and late transfers included: under any order of work on devices and links, starting
//! everything as early as possible ends no later, and all orders are searched or excluded. Where
//! devices have memory limits starting early may need more memory than waiting: then schedules are
//! built in order of time, and their memory is counted ([`timed`]).
//!
//! Budgets count nodes of the search, so that results do not depend on the machine.

mod assign;
mod order;
mod series;
mod tables;
mod timed;

#[cfg(test)]
mod tests;

use crate::problem::Problem;
use crate::schedule::timeline::Timeline;
use crate::{Nanos, bounds};

pub use series::series;

/// Most tasks, and most transfers, of a problem that is searched.
const MOST_TASKS: usize = 128;
/// Most devices of a problem that is searched; sets of devices are kept in 64 bits.
pub(crate) const MOST_DEVICES: usize = 32;

/// Outcome of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// A valid schedule shorter than the incumbent.
    pub timeline: Option<Timeline>,
    /// No valid schedule is shorter; infinite when none keeps the memory limits.
    pub lower_bound: Nanos,
    /// The timeline, or else the incumbent, is proven to be optimal, or no schedule to be there.
    pub complete: bool,
}

/// Searches for a schedule shorter than `incumbent`, or a proof that there is none. `known` is a
/// lower bound to start from.
///
/// Looks at `budget` nodes at most; problems too large for a search are left as they are. An
/// incumbent over its memory limits counts for nothing.
pub fn solve(p: &Problem, incumbent: &Timeline, known: Nanos, budget: u64) -> Proof {
    let limit = if bounds::fits(p, incumbent) {
        incumbent.makespan
    } else {
        Nanos::INFINITY
    };
    if known >= limit || budget == 0 {
        return Proof {
            timeline: None,
            lower_bound: known.min(limit),
            complete: known >= limit,
        };
    }
    if p.n_tasks() > MOST_TASKS || p.n_devices() > MOST_DEVICES {
        return Proof {
            timeline: None,
            lower_bound: known,
            complete: false,
        };
    }
    narrow(p, known, limit, budget).0
}

/// Searches below the limit with half of the budget; if that proves nothing, searches for a weaker
/// proof: that no schedule ends before some earlier time. Returns the rest of the budget as well.
pub(crate) fn narrow(p: &Problem, known: Nanos, limit: Nanos, mut budget: u64) -> (Proof, u64) {
    let unit = bounds::unit(p);
    let half = |n: u64| n / 2 / unit * unit;
    let (mut best, mut low, mut high) = (None, bounds::whole(known, unit).0, limit.0);
    let mut ask = |before: u64, share: u64, low: &mut u64, high: &mut u64| {
        let found = assign::search(p, before, share);
        *low = found.bound.max(*low);
        if let Some(better) = found.best {
            *high = better.makespan.0;
            best = Some(better);
        }
        share - found.budget
    };
    budget -= ask(limit.0, budget / 2, &mut low, &mut high);
    let share = (budget / 8).max(1);
    let mut step = if limit.is_finite() {
        half(high.saturating_sub(low))
    } else {
        0
    };
    while low < high && step > 0 && budget >= share {
        let before = low;
        budget -= ask((low + step).min(high), share, &mut low, &mut high);
        if low == before {
            step = half(step);
        }
    }
    let lower_bound = if low >= tables::NEVER && best.is_none() {
        Nanos::INFINITY
    } else {
        Nanos(low.min(high))
    };
    let complete = low >= high || !lower_bound.is_finite();
    (
        Proof {
            timeline: best,
            lower_bound,
            complete,
        },
        budget,
    )
}
