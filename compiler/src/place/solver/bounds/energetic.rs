//! Work that must be done in a stretch of time whatever the schedule (Fernandez and Bussell, "Bounds on the number of processors and time for
//! multiprocessor optimal schedules", IEEE TC C-22, 1973, theorem 2).
//!
//! If all is to end by `T`, a task starts between its head and `T` less its tail. Of a stretch `[a, b)` it takes at least what both the leftmost
//! and the rightmost start leave in it. If `m` devices cannot give that much, `T` is too short: by the missing work divided by `m`, for then the
//! same stretch, longer at its end by what `T` grew, still misses nothing less. That is repeated until no stretch overflows.

use super::super::problem::Problem;
use super::windows::Windows;
use crate::cost::Nanos;

/// Begins of stretches times tasks that one pass may look at; beyond it begins are sampled evenly.
const WORK: usize = 2_000_000;

/// Most passes over all stretches.
const PASSES: usize = 20;

/// Sets of devices that are looked at apart.
const SETS: usize = 8;

/// A task on some of the devices.
#[derive(Clone, Copy, Debug)]
pub struct Slack {
    /// Earliest start.
    pub head: u64,
    /// Least time it takes.
    pub length: u64,
    /// Least time from its start to the end of all.
    pub tail: u64,
}

/// Least makespan by the work that falls in stretches: over all devices, and over each set of devices that some tasks cannot leave.
pub(super) fn energetic(p: &Problem, w: &Windows, least: Nanos) -> Nanos {
    let mut total = least;
    for set in device_sets(p) {
        let inside = |t: usize| p.feasible(t).all(|d| set[d]);
        let n_devices = set.iter().filter(|d| **d).count() as u64;
        let slack = |t: usize| Slack { head: w.least_head(t).0, length: p.least_cost(t).0, tail: w.least_tail(t).0 };
        let tasks: Vec<Slack> =
            (0..p.n_tasks()).filter(|&t| p.least_cost(t) > Nanos::ZERO && inside(t)).map(slack).collect();
        total = total.max(Nanos(raise(&tasks, n_devices, total.0, WORK)));
    }
    total
}

/// All devices, then the sets of feasible devices of single tasks.
fn device_sets(p: &Problem) -> Vec<Vec<bool>> {
    let mut sets = vec![vec![true; p.n_devices()]];
    for g in 0..p.n_groups() {
        let Some(&t) = p.members.row(g).first() else { continue };
        let costs = p.costs(t as usize);
        let same = |set: &Vec<bool>| set.iter().zip(costs).all(|(&s, c)| s == c.is_finite());
        if sets.len() < SETS && !sets.iter().any(same) {
            sets.push(costs.iter().map(|c| c.is_finite()).collect());
        }
    }
    sets
}

/// Least end of all, `total` or later, at which no stretch has more work than `n_devices` can do. `work` bounds begins times tasks of a pass.
pub fn raise(tasks: &[Slack], n_devices: u64, mut total: u64, work: usize) -> u64 {
    let mut begins: Vec<u64> = tasks.iter().flat_map(|t| [t.head, total.saturating_sub(t.tail)]).collect();
    begins.sort_unstable();
    begins.dedup();
    let step = (begins.len() * tasks.len()).div_ceil(work.max(1)).max(1);
    let mut bends = Vec::new();
    for _ in 0..PASSES {
        let excess = begins.iter().step_by(step).map(|&a| overflow(tasks, n_devices, total, a, &mut bends)).max();
        match excess.filter(|e| *e > 0) {
            Some(excess) => total += excess.div_ceil(n_devices.max(1)),
            None => break,
        }
    }
    total
}

/// Most work that a stretch from `begin` misses. `bends` is room for the ends at which the forced work of a task begins and stops to grow.
fn overflow(tasks: &[Slack], n_devices: u64, total: u64, begin: u64, bends: &mut Vec<(u64, i64)>) -> u64 {
    bends.clear();
    for t in tasks {
        let forced = (t.head + t.length).saturating_sub(begin).min(t.length);
        if forced > 0 {
            let from = total.saturating_sub(t.tail).max(begin);
            bends.push((from, 1));
            bends.push((from + forced, -1));
        }
    }
    bends.sort_unstable();
    let (mut at, mut slope, mut work, mut most) = (begin, 0i64, 0i128, 0i128);
    for &(end, bend) in bends.iter() {
        work += i128::from(slope - n_devices as i64) * i128::from(end - at);
        most = most.max(work);
        (at, slope) = (end, slope + bend);
    }
    u64::try_from(most).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowded_middle_raises_the_end() {
        // One task of 4, then five of 4 that are free, then one of 4, on two devices: the five need 12 where the longest way gives them 4.
        let slack = |head, length, tail| Slack { head, length, tail };
        let mut tasks = vec![slack(0, 4, 12), slack(8, 4, 4)];
        tasks.extend([slack(4, 4, 8); 5]);
        assert_eq!(raise(&tasks, 2, 14, usize::MAX), 18);
        assert_eq!(raise(&tasks, 5, 12, usize::MAX), 12);
        assert_eq!(raise(&tasks, 5, 20, usize::MAX), 20);
    }
}
