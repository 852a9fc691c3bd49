//! Identical devices and free links: `P | prec | Cmax` of scheduling theory.
//!
//! Strong lower bounds, strong schedules, and a tree search between them, forwards and backwards in
//! turn: one of the two directions is often far easier.

mod graph;
mod list;
#[cfg(test)]
mod tests;
mod tree;

use super::Proof;
use crate::Nanos;
use crate::problem::Problem;
use crate::schedule::timeline::{Timeline, Transfer};
use graph::Jobs;
use list::Starts;

pub(crate) use graph::applies;

/// Tries of the search for good schedules, for one in so many nodes of the budget.
const NODES_PER_TRY: u64 = 25;

/// Percentage of the budget that the tree gets; a node of the other searches costs more.
const TREE_SHARE: u64 = 60;

/// Nodes of the first search in each direction; each next one has more.
const FIRST_NODES: u64 = 2_000;

/// Searches a problem to which [`applies`] holds, for a schedule before `limit`.
pub(super) fn solve(p: &Problem, known: Nanos, limit: Nanos, budget: u64) -> Proof {
    let (mut jobs, tasks, unit) = graph::from_problem(p);
    if jobs.n() == 0 {
        return Proof {
            timeline: None,
            lower_bound: known,
            complete: known >= limit,
        };
    }
    let mut low = jobs.sharpen().max(known.0.div_ceil(unit));
    let found = list::improve(&jobs, low, budget / NODES_PER_TRY);
    let mut best = Some(found).filter(|f| f.makespan.saturating_mul(unit) < limit.0);
    let mut high = best.as_ref().map_or(limit.0.div_ceil(unit), |b| b.makespan);
    if low < high && jobs.n() <= tree::MOST {
        let found = both_ways(&jobs, low, high, budget.saturating_mul(TREE_SHARE) / 100);
        if let Some(better) = found.0 {
            high = better.makespan;
            best = Some(better);
        }
        low = if found.1 { high } else { low };
    }
    let lower_bound = Nanos(low.min(high).saturating_mul(unit)).min(limit);
    let timeline = best.map(|b| timeline(p, &tasks, &b, unit));
    Proof {
        timeline,
        lower_bound,
        complete: low >= high,
    }
}

/// Searches forwards and backwards with growing budgets. The best schedule before `high`, and
/// whether nothing is left.
fn both_ways(jobs: &Jobs, low: u64, mut high: u64, mut budget: u64) -> (Option<Starts>, bool) {
    let back = jobs.reversed();
    let (mut best, mut share) = (None, FIRST_NODES);
    while budget > 0 {
        for backwards in [false, true] {
            let share = share.min(budget);
            let found = tree::search(if backwards { &back } else { jobs }, high, low, share);
            budget -= share - found.budget;
            if let Some(better) = found.best {
                high = better.makespan;
                best = Some(if backwards {
                    mirrored(jobs, &better)
                } else {
                    better
                });
            }
            if found.complete || high <= low {
                return (best, true);
            }
        }
        share *= 4;
    }
    (best, false)
}

/// A schedule with time running the other way.
fn mirrored(jobs: &Jobs, back: &Starts) -> Starts {
    let n = jobs.n();
    let start = (0..n)
        .map(|j| back.makespan - back.start[n - 1 - j] - jobs.length[j])
        .collect();
    Starts {
        start,
        makespan: back.makespan,
    }
}

/// Gives jobs to devices in order of their starts, and tasks of no time to the device of their
/// latest predecessor.
fn timeline(p: &Problem, tasks: &[u32], starts: &Starts, unit: u64) -> Timeline {
    let n = p.n_tasks();
    let mut t = Timeline {
        device: vec![0; n],
        start: vec![Nanos::ZERO; n],
        end: vec![Nanos::ZERO; n],
        transfers: Vec::new(),
        makespan: Nanos(starts.makespan * unit),
    };
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&j| (starts.start[j], j));
    let mut idle = vec![Nanos::ZERO; p.n_devices()];
    for j in order {
        let (task, start) = (tasks[j] as usize, Nanos(starts.start[j] * unit));
        let device = (0..idle.len()).find(|&d| idle[d] <= start);
        let device = device.expect("no more jobs run at a time than there are devices");
        let end = start + p.cost(task, device);
        idle[device] = end;
        (t.device[task], t.start[task], t.end[task]) = (device as u32, start, end);
    }
    for &task in p
        .order
        .iter()
        .filter(|&&task| p.cost(task as usize, 0) == Nanos::ZERO)
    {
        let last = p
            .predecessors(task as usize)
            .max_by_key(|&q| t.end[q as usize]);
        if let Some(last) = last {
            let (device, end) = (t.device[last as usize], t.end[last as usize]);
            (
                t.device[task as usize],
                t.start[task as usize],
                t.end[task as usize],
            ) = (device, end, end);
        }
    }
    add_transfers(p, &mut t);
    t
}

/// Transfers that take no time, at the end of their producers.
fn add_transfers(p: &Problem, t: &mut Timeline) {
    for x in 0..p.tensors.len() {
        let producer = p.tensors[x].producer as usize;
        let (from, end) = (t.device[producer], t.end[producer]);
        let mut to: Vec<u32> = p
            .consumers
            .row(x)
            .iter()
            .map(|&c| t.device[c as usize])
            .filter(|&d| d != from)
            .collect();
        to.sort_unstable();
        to.dedup();
        t.transfers.extend(to.into_iter().map(|to| Transfer {
            tensor: x as u32,
            from,
            to,
            start: end,
            end,
        }));
    }
    t.transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
}
