//! Work that must be done in a stretch of time under every schedule (Fernandez and Bussell, "Bounds
//! on the number of processors and time for multiprocessor optimal schedules", IEEE TC C-22, 1973,
//! theorem 2).
//!
//! If all is to end by `T`, a task starts between its head and `T` less its tail. Of a stretch `[a,
//! b)` it takes at least the part that both the leftmost and the rightmost start leave in it. If
//! `m` devices cannot give that much, `T` is too short: by the missing work divided by `m`, for
//! then the same stretch, longer at its end by the growth of `T`, still misses nothing less. That
//! is repeated until no stretch overflows.

use super::intervals::Leaps;
use super::windows::Windows;
use crate::Nanos;
use crate::problem::Problem;
use std::cmp::Reverse;

/// Begins of stretches times tasks that one pass may look at; beyond it begins are sampled evenly.
const WORK: usize = 2_000_000;

/// Part of this work for a problem whose tasks have one device each.
const FIXED_SHARE: usize = 10;

/// Most passes over all stretches.
const PASSES: usize = 20;

/// Sets of several devices that are looked at apart.
const SETS: usize = 8;

/// A task on some of the devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slack {
    /// Earliest start.
    head: u64,
    /// Least time it takes.
    length: u64,
    /// Least time from its start to the end of all.
    tail: u64,
}

/// Least makespan by the work that falls in stretches: over all devices, and over each set of
/// devices that some tasks cannot leave. `slack` tells when each task can run.
pub(super) fn energetic(p: &Problem, slack: impl Fn(usize) -> Slack, least: Nanos) -> Nanos {
    let mut total = least;
    // A task that fits on no device has no times either.
    let sets = match least.is_finite() {
        true => device_sets(p),
        false => Vec::new(),
    };
    // Without a choice of devices there is no placement to be proven.
    let is_fixed = (0..p.n_tasks()).all(|t| p.feasible(t).count() == 1);
    let work = match is_fixed {
        true => WORK / FIXED_SHARE,
        false => WORK,
    };
    for set in sets {
        let inside = |t: usize| p.feasible(t).all(|d| set[d]);
        let n_devices = set.iter().filter(|d| **d).count() as u64;
        let tasks: Vec<Slack> = (0..p.n_tasks())
            .filter(|&t| p.least_cost(t) > Nanos::ZERO && inside(t))
            .map(&slack)
            .collect();
        total = total.max(Nanos(raise(&tasks, n_devices, total.0, work)));
    }
    total
}

/// When tasks can run by the longest paths.
pub(super) fn of_windows<'a>(p: &'a Problem, w: &'a Windows) -> impl Fn(usize) -> Slack + 'a {
    |t| Slack {
        head: w.least_head(t).0,
        length: p.least_cost(t).0,
        tail: w.least_tail(t).0,
    }
}

/// When tasks can run by the longest paths with leaps.
pub(super) fn of_leaps<'a>(p: &'a Problem, leaps: &'a Leaps) -> impl Fn(usize) -> Slack + 'a {
    move |t| {
        // A task that ends no earlier may take longer than the least, and so begin earlier.
        let most = p
            .costs(t)
            .iter()
            .copied()
            .filter(|c| c.is_finite())
            .max()
            .unwrap_or_default();
        let before = p
            .predecessors(t)
            .map(|q| leaps.ends[q as usize])
            .max()
            .unwrap_or_default();
        let head = leaps.ends[t].saturating_sub(most).max(before);
        Slack {
            head: head.0,
            length: p.least_cost(t).0,
            tail: (p.least_cost(t) + leaps.rests[t]).0,
        }
    }
}

/// All devices, then the sets of feasible devices of single tasks. A device that is alone in its
/// set is one machine, for which stretches give no less than Carlier's preemptive schedules do.
fn device_sets(p: &Problem) -> Vec<Vec<bool>> {
    let mut sets = vec![vec![true; p.n_devices()]];
    let mut n_several = 1;
    for g in 0..p.n_groups() {
        let Some(&t) = p.members.row(g).first() else {
            continue;
        };
        let costs = p.costs(t as usize);
        let same = |set: &Vec<bool>| set.iter().zip(costs).all(|(&s, c)| s == c.is_finite());
        let is_several = costs.iter().filter(|c| c.is_finite()).count() > 1;
        if (n_several < SETS || !is_several) && !sets.iter().any(same) {
            sets.push(costs.iter().map(|c| c.is_finite()).collect());
            n_several += usize::from(is_several);
        }
    }
    sets
}

/// Least end of all, `total` or later, at which no stretch has more work than `n_devices` can do.
/// `work` bounds begins times tasks of a pass.
fn raise(tasks: &[Slack], n_devices: u64, mut total: u64, work: usize) -> u64 {
    let mut begins: Vec<u64> = tasks
        .iter()
        .flat_map(|t| [t.head, total.saturating_sub(t.tail)])
        .collect();
    begins.sort_unstable();
    begins.dedup();
    let step = (begins.len() * tasks.len()).div_ceil(work.max(1)).max(1);
    let mut stretches = Stretches::new(tasks);
    for _ in 0..PASSES {
        let before = total;
        for &begin in begins.iter().step_by(step) {
            let excess = stretches.overflow(n_devices, total, begin);
            total += excess.div_ceil(n_devices.max(1));
        }
        if total == before {
            break;
        }
    }
    total
}

/// Tasks in the orders in which their forced work begins and stops to grow with the end of a
/// stretch.
struct Stretches {
    by_tail: Vec<Slack>,
    /// By the time from their ends to the end of all.
    by_rest: Vec<Slack>,
    /// Room for the tasks that may begin before a stretch, which are merged into these orders.
    from: Vec<u64>,
    until: Vec<u64>,
}

impl Stretches {
    fn new(tasks: &[Slack]) -> Stretches {
        let (mut by_tail, mut by_rest) = (tasks.to_vec(), tasks.to_vec());
        by_tail.sort_unstable_by_key(|t| Reverse(t.tail));
        by_rest.sort_unstable_by_key(|t| Reverse(t.tail - t.length));
        Stretches {
            by_tail,
            by_rest,
            from: Vec::new(),
            until: Vec::new(),
        }
    }

    /// Most work that a stretch from `begin` misses when all ends by `total`.
    fn overflow(&mut self, n_devices: u64, total: u64, begin: u64) -> u64 {
        self.straddle(total, begin);
        // A task that starts at `begin` or later at the earliest is forced as a whole, from its
        // latest start to its latest end. All ends of the stretch at which the slope changes come
        // in order from four lists.
        let mut from = self
            .by_tail
            .iter()
            .filter(|t| t.head >= begin)
            .map(|t| total - t.tail)
            .peekable();
        let mut until = self
            .by_rest
            .iter()
            .filter(|t| t.head >= begin)
            .map(|t| total - (t.tail - t.length))
            .peekable();
        let (mut more_from, mut more_until) = (
            self.from.iter().copied().peekable(),
            self.until.iter().copied().peekable(),
        );
        let (mut at, mut slope, mut work, mut most) = (begin, 0i64, 0i128, 0i128);
        let next = |a: Option<&u64>, b: Option<&u64>| {
            a.copied()
                .unwrap_or(u64::MAX)
                .min(b.copied().unwrap_or(u64::MAX))
        };
        loop {
            let (rise, fall) = (
                next(from.peek(), more_from.peek()),
                next(until.peek(), more_until.peek()),
            );
            let end = rise.min(fall);
            if end == u64::MAX {
                return u64::try_from(most).unwrap_or(u64::MAX);
            }
            work += i128::from(slope - n_devices as i64) * i128::from(end - at);
            most = most.max(work);
            at = end;
            if rise <= fall {
                slope += 1;
                if from.next_if_eq(&rise).is_none() {
                    more_from.next();
                }
            } else {
                slope -= 1;
                if until.next_if_eq(&fall).is_none() {
                    more_until.next();
                }
            }
        }
    }

    /// Tasks that may be under way at `begin`: the part that cannot have run before is forced.
    fn straddle(&mut self, total: u64, begin: u64) {
        self.from.clear();
        self.until.clear();
        for t in self
            .by_tail
            .iter()
            .filter(|t| t.head < begin && t.head + t.length > begin)
        {
            let from = (total - t.tail).max(begin);
            self.from.push(from);
            self.until.push(from + t.head + t.length - begin);
        }
        self.until.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::{Device, LinkProfile, Links, Parts, Task};

    /// The most work that a stretch misses, by its definition.
    fn plain(tasks: &[Slack], n_devices: u64, total: u64, begin: u64) -> u64 {
        let forced = |t: &Slack, end: u64| {
            let left = (t.head + t.length).saturating_sub(begin);
            left.min(end.saturating_sub(total - t.tail))
                .min(t.length)
                .min(end - begin)
        };
        let missed = |end: u64| {
            tasks
                .iter()
                .map(|t| forced(t, end))
                .sum::<u64>()
                .saturating_sub(n_devices * (end - begin))
        };
        (begin..=total).map(missed).max().unwrap_or(0)
    }

    #[test]
    fn stretches_agree_with_the_definition() {
        let mut rng = Rng(5);
        let mut next = |n| rng.number(n);
        let mut n_missed = 0;
        for _ in 0..600 {
            let mut task = |_| {
                let (head, length) = (next(20), 1 + next(9));
                Slack {
                    head,
                    length,
                    tail: length + next(20),
                }
            };
            let tasks: Vec<Slack> = (0..12).map(&mut task).collect();
            let least = tasks.iter().map(|t| t.head + t.tail).max().unwrap();
            let (total, begin, n_devices) = (least + next(6), next(30), 1 + next(4));
            let expected = plain(&tasks, n_devices, total, begin.min(total));
            assert_eq!(
                Stretches::new(&tasks).overflow(n_devices, total, begin.min(total)),
                expected
            );
            n_missed += usize::from(expected > 0);
        }
        assert!(n_missed > 50, "{n_missed}");
    }

    #[test]
    fn every_device_with_tasks_of_its_own_counts() {
        let n = SETS + 4;
        let cost = |t: usize, d: usize| {
            if d == t.min(n - 1) {
                Nanos(5)
            } else {
                Nanos::INFINITY
            }
        };
        let task = |t: usize| Task {
            cost: (0..n).map(|d| cost(t, d)).collect(),
            ..Task::default()
        };
        let device = Device {
            memory: None,
            is_host: false,
        };
        let link = LinkProfile {
            latency: Nanos(1),
            bytes_per_second: 1,
        };
        let p = Problem::new(Parts {
            devices: vec![device; n],
            links: Links::uniform(n, link),
            tasks: (0..n + 1).map(task).collect(),
            tensors: Vec::new(),
            constants: Vec::new(),
        })
        .expect("each task has a device");
        let w = Windows::new(&p);
        assert_eq!(energetic(&p, of_windows(&p, &w), Nanos(5)), Nanos(10));
    }

    #[test]
    fn a_crowded_middle_raises_the_end() {
        // One task of 4, then five of 4 that are free, then one of 4, on two devices: the five need
        // 12 where the longest path gives them 4.
        let slack = |head, length, tail| Slack { head, length, tail };
        let mut tasks = vec![slack(0, 4, 12), slack(8, 4, 4)];
        tasks.extend([slack(4, 4, 8); 5]);
        assert_eq!(raise(&tasks, 2, 14, usize::MAX), 18);
        assert_eq!(raise(&tasks, 5, 12, usize::MAX), 12);
        assert_eq!(raise(&tasks, 5, 20, usize::MAX), 20);
    }
}
