//! Parts between a fork and a join, solved by themselves.
//!
//! Whatever the schedule, between the end of `u` and the end of `w` all tasks on ways from `u` to `w` run. The best schedule of these tasks alone, all
//! devices and links idle and `u` just done wherever it likes, is a lower bound of that time, often far above the longest way: the tasks either take
//! turns on a device or pay for transfers. A way through the graph that leaps from `u` to `w` in that time is a bound for the whole. Where
//! tasks that all others come before or after cut the graph into blocks, this is the sum of the blocks' best makespans.

use super::super::problem::{Parts, Problem, Task, Tensor};
use super::super::{algorithms, exact, list::Insertion};
use super::windows::Windows;
use crate::cost::Nanos;
use std::collections::BTreeSet;

/// Most tasks of a part, its ends included.
const MOST: usize = 64;

/// Parts that are solved for each join.
const PER_JOIN: usize = 3;

/// Least budget of a part; when less is left nothing more is solved.
const LEAST_BUDGET: u64 = 50;

/// Tasks from which a join can be reached, nearest first, with the ways among them.
struct Behind {
    /// The join, then tasks in falling topological position.
    tasks: Vec<u32>,
    /// For each of `tasks` those among them that come before it.
    ancestors: Vec<u128>,
    /// No other task comes before the join.
    whole: bool,
}

/// Longest way with leaps over parts that were solved.
pub(super) fn longest_way(p: &Problem, mut budget: u64) -> Nanos {
    let w = Windows::new(p);
    let ends_on = |t: usize| (0..p.n_devices()).map(move |d| (t, d));
    let least_end = |t: usize| ends_on(t).map(|(t, d)| w.head(t, d) + p.cost(t, d)).min().unwrap_or_default();
    let mut ends: Vec<Nanos> = (0..p.n_tasks()).map(least_end).collect();
    let mut position = vec![0u32; p.n_tasks()];
    p.order.iter().enumerate().for_each(|(i, &t)| position[t as usize] = i as u32);
    let joins = p.order.iter().filter(|&&t| is_join(p, t)).count() as u64;
    let share = (budget / (joins * PER_JOIN as u64).max(1)).max(LEAST_BUDGET);
    for &t in &p.order {
        let t = t as usize;
        let before = p.predecessors(t).map(|q| ends[q as usize]).max().unwrap_or_default();
        ends[t] = ends[t].max(before + p.least_cost(t));
        if !is_join(p, t as u32) || budget < share {
            continue;
        }
        let behind = Behind::new(p, &position, t as u32);
        for start in behind.starts(p) {
            let from = start.map_or(Nanos::ZERO, |u| ends[behind.tasks[u] as usize]);
            let part = behind.between(start);
            ends[t] = ends[t].max(leap(p, &part, start.is_some(), from, ends[t], share, &mut budget));
        }
    }
    ends.into_iter().max().unwrap_or_default()
}

/// End of the last task of `part` when its first one ends at `from`; `known` if that is not more.
fn leap(p: &Problem, part: &[u32], has_start: bool, from: Nanos, known: Nanos, share: u64, budget: &mut u64) -> Nanos {
    if budget.checked_sub(share).is_none() {
        return known;
    }
    let alone = cut_out(p, part, has_start);
    let quick = algorithms::heft(&alone, Insertion::Gaps).makespan.min(algorithms::etf(&alone).makespan);
    if from + quick <= known {
        return known;
    }
    let longest = super::windows::critical_path(&alone, &super::join::joined(&alone));
    if longest >= quick {
        return known.max(from + quick);
    }
    *budget -= share;
    known.max(from + exact::narrow(&alone, longest, quick, share).lower_bound)
}

/// The problem of these tasks alone, in topological order; the first takes no time if it is the start.
pub(in super::super) fn cut_out(p: &Problem, part: &[u32], has_start: bool) -> Problem {
    let place = |t: u32| part.iter().position(|&u| u == t);
    let cost = |i: usize, d: usize| {
        let cost = p.cost(part[i] as usize, d);
        if has_start && i == 0 && cost.is_finite() { Nanos::ZERO } else { cost }
    };
    let task = |i: usize| Task {
        cost: (0..p.n_devices()).map(|d| cost(i, d)).collect(),
        group: Some(p.group_of[part[i] as usize]),
        ..Task::default()
    };
    let mut tensors = Vec::new();
    for (i, &t) in part.iter().enumerate() {
        for &x in p.outputs.row(t as usize) {
            let consumers: Vec<u32> =
                p.consumers.row(x as usize).iter().filter_map(|&c| Some(place(c)? as u32)).collect();
            if !consumers.is_empty() {
                tensors.push((Tensor { producer: i as u32, ..p.tensors[x as usize] }, consumers));
            }
        }
    }
    let mut devices = p.devices.clone();
    devices.iter_mut().for_each(|d| d.memory = None);
    let tasks = (0..part.len()).map(task).collect();
    let parts = Parts { devices, links: p.links.clone(), tasks, tensors, constants: Vec::new() };
    Problem::new(parts).expect("a part of a problem has no ring, and its groups have the devices that they had")
}

fn is_join(p: &Problem, t: u32) -> bool {
    let mut before = p.predecessors(t as usize);
    before.next().is_some_and(|first| before.any(|q| q != first))
}

impl Behind {
    fn new(p: &Problem, position: &[u32], join: u32) -> Behind {
        let mut tasks = Vec::new();
        let mut open = BTreeSet::from([(position[join as usize], join)]);
        while tasks.len() < MOST {
            let Some((_, t)) = open.pop_last() else { break };
            tasks.push(t);
            open.extend(p.predecessors(t as usize).map(|q| (position[q as usize], q)));
        }
        let mut ancestors = vec![0u128; tasks.len()];
        for i in (0..tasks.len()).rev() {
            for q in p.predecessors(tasks[i] as usize) {
                if let Some(k) = tasks.iter().position(|&t| t == q) {
                    ancestors[i] |= ancestors[k] | 1 << k;
                }
            }
        }
        Behind { tasks, ancestors, whole: open.is_empty() }
    }

    /// Where parts that end at the join may start, `None` for the start of all: those with most work beside their longest way.
    fn starts(&self, p: &Problem) -> Vec<Option<usize>> {
        let all = (1..self.tasks.len()).map(Some).chain(self.whole.then_some(None));
        let mut weighed: Vec<(Nanos, usize, Option<usize>)> = Vec::new();
        for start in all {
            let part = self.between(start);
            if part.len() > 3 {
                let beside = self.beside(p, &part, start.is_some());
                weighed.push((beside, usize::MAX - part.len(), start));
            }
        }
        weighed.retain(|w| w.0 > Nanos::ZERO);
        weighed.sort_unstable_by_key(|w| std::cmp::Reverse((w.0, w.1, w.2)));
        // The start farthest back holds all others of its kind; smaller parts are solved where it is too hard.
        weighed.truncate(PER_JOIN);
        weighed.into_iter().map(|w| w.2).collect()
    }

    /// Tasks on ways from the start to the join, in topological order.
    fn between(&self, start: Option<usize>) -> Vec<u32> {
        let is_between = |i: &usize| start.is_none_or(|u| *i == u || self.ancestors[*i] >> u & 1 == 1);
        (0..self.tasks.len()).rev().filter(is_between).map(|i| self.tasks[i]).collect()
    }

    /// Work of the part less its longest way.
    fn beside(&self, p: &Problem, part: &[u32], has_start: bool) -> Nanos {
        let mut ends = vec![Nanos::ZERO; part.len()];
        let mut work = Nanos::ZERO;
        for (i, &t) in part.iter().enumerate().skip(usize::from(has_start)) {
            let before = p.predecessors(t as usize).filter_map(|q| part[..i].iter().position(|&u| u == q));
            ends[i] = before.map(|k| ends[k]).max().unwrap_or_default() + p.least_cost(t as usize);
            work += p.least_cost(t as usize);
        }
        work.saturating_sub(ends.into_iter().max().unwrap_or_default())
    }
}
