//! Parts between a fork and a join, solved by themselves.
//!
//! Whatever the schedule, between the end of `u` and the end of `w` all tasks on ways from `u` to
//! `w` run. The best schedule of these tasks alone, all devices and links idle and `u` just done
//! wherever it likes, is a lower bound of that time, often far above the longest path: the tasks
//! either take turns on a device or pay for transfers. A way through the graph that leaps from `u`
//! to `w` in that time is a bound for the whole. Where tasks that all others come before or after
//! cut the graph into blocks, this is the sum of the blocks' best makespans.

use super::windows::Windows;
use crate::Nanos;
use crate::problem::{Parts, Problem, Task, Tensor};
use crate::schedule::algorithms;
use crate::schedule::list::Insertion;
use crate::search::{exact, symmetry};
use std::collections::BTreeSet;

/// Most tasks of a part, its ends included.
const MOST: usize = 64;

/// Parts that are solved for each join: the smallest, and the largest.
const PER_JOIN: usize = 3;

/// Most parts of all joins, the smallest first.
const PARTS: usize = 2_000;

/// Tasks from which a join can be reached, nearest first, with the ways among them.
struct Behind {
    /// The join, then tasks in falling topological position.
    tasks: Vec<u32>,
    /// For each of `tasks` those among them that come before it, and after it.
    ancestors: Vec<u128>,
    descendants: Vec<u128>,
    /// No other task comes before the join.
    whole: bool,
}

/// Tasks on the ways from a task, or from the start of all, to a join, in topological order.
struct Part {
    has_start: bool,
    tasks: Vec<u32>,
}

/// Longest paths with leaps over parts that were solved.
pub(super) struct Leaps {
    /// Least end of each task.
    pub ends: Vec<Nanos>,
    /// Least time from the end of each task to the end of all.
    pub rests: Vec<Nanos>,
}

impl Leaps {
    /// Least makespan by the longest path.
    pub(super) fn longest(&self) -> Nanos {
        self.ends
            .iter()
            .zip(&self.rests)
            .map(|(end, rest)| *end + *rest)
            .max()
            .unwrap_or_default()
    }
}

/// Solves parts with `budget` nodes of search for all of them.
pub(super) fn leaps(p: &Problem, budget: u64) -> Leaps {
    let solved = SolvedParts::new(p, budget);
    let w = Windows::new(p);
    Leaps {
        ends: solved.ends(p, &w),
        rests: solved.rests(p, &w),
    }
}

/// Lower bounds of the times of parts.
struct SolvedParts {
    /// By join: the start of a part, if it has one, and its least time.
    to: Vec<Vec<(Option<u32>, Nanos)>>,
    /// By start: the join of a part, and its least time.
    from: Vec<Vec<(u32, Nanos)>>,
}

impl SolvedParts {
    fn new(p: &Problem, mut budget: u64) -> SolvedParts {
        let mut parts = parts(p);
        parts.sort_by_key(|part| part.tasks.len());
        parts.truncate(PARTS);
        let mut solved = SolvedParts {
            to: vec![Vec::new(); p.n_tasks()],
            from: vec![Vec::new(); p.n_tasks()],
        };
        for (i, part) in parts.iter().enumerate() {
            let share = budget / (parts.len() - i) as u64;
            let Some(&join) = part.tasks.last() else {
                continue;
            };
            let start = part.tasks.first().copied().filter(|_| part.has_start);
            let time = least_time(p, part, share, &mut budget);
            solved.to[join as usize].push((start, time));
            if let Some(start) = start {
                solved.from[start as usize].push((join, time));
            }
        }
        solved
    }

    /// Least end of each task.
    fn ends(&self, p: &Problem, w: &Windows) -> Vec<Nanos> {
        let on = |t: usize, d: usize| w.head(t, d) + p.cost(t, d);
        let least = |t: usize| (0..p.n_devices()).map(|d| on(t, d)).min();
        let mut ends: Vec<Nanos> = (0..p.n_tasks())
            .map(|t| least(t).unwrap_or_default())
            .collect();
        for &t in &p.order {
            let t = t as usize;
            let before = p.predecessors(t).map(|q| ends[q as usize]).max();
            let over = self.to[t]
                .iter()
                .map(|&(u, time)| u.map_or(Nanos::ZERO, |u| ends[u as usize]) + time);
            ends[t] = ends[t]
                .max(before.unwrap_or_default() + p.least_cost(t))
                .max(over.max().unwrap_or_default());
        }
        ends
    }

    /// Least time from the end of each task to the end of all.
    fn rests(&self, p: &Problem, w: &Windows) -> Vec<Nanos> {
        let on = |t: usize, d: usize| w.tail(t, d).saturating_sub(p.cost(t, d));
        let least = |t: usize| (0..p.n_devices()).map(|d| on(t, d)).min();
        let mut rests: Vec<Nanos> = (0..p.n_tasks())
            .map(|t| least(t).unwrap_or_default())
            .collect();
        for &t in p.order.iter().rev() {
            let t = t as usize;
            let after = p
                .successors(t)
                .map(|c| p.least_cost(c as usize) + rests[c as usize]);
            let after = after.max().unwrap_or_default();
            let over = self.from[t]
                .iter()
                .map(|&(join, time)| time + rests[join as usize]);
            rests[t] = rests[t].max(after).max(over.max().unwrap_or_default());
        }
        rests
    }
}

/// Lower bound of the time from the end of the start of a part to the end of its join.
fn least_time(p: &Problem, part: &Part, share: u64, budget: &mut u64) -> Nanos {
    let mut alone = cut_out(p, &part.tasks, part.has_start);
    if let Some(reduced) = symmetry::reduced(&alone, &[]) {
        alone = reduced.problem;
    }
    let longest = super::windows::critical_path(&alone, &super::join::joined(&alone));
    let quick = algorithms::heft(&alone, Insertion::Gaps)
        .makespan
        .min(algorithms::etf(&alone).makespan);
    if longest >= quick || share == 0 {
        return longest.min(quick);
    }
    if alone.n_devices() > exact::MOST_DEVICES {
        return longest;
    }
    let (proof, left) = exact::narrow(&alone, longest, quick, share);
    *budget -= share - left;
    proof.lower_bound
}

/// Parts that no task cuts in two: those that one does are no longer than their halves one after
/// the other.
fn parts(p: &Problem) -> Vec<Part> {
    let mut position = vec![0u32; p.n_tasks()];
    p.order
        .iter()
        .enumerate()
        .for_each(|(i, &t)| position[t as usize] = i as u32);
    let joins = p.order.iter().copied().filter(|&t| is_join(p, t));
    joins
        .flat_map(|t| Behind::new(p, &position, t).parts())
        .collect()
}

/// The problem of these tasks alone, in topological order; the first takes no time if it is the
/// start.
pub(crate) fn cut_out(p: &Problem, part: &[u32], has_start: bool) -> Problem {
    let places = places(part);
    let place = |t: u32| {
        places
            .binary_search_by_key(&t, |&(u, _)| u)
            .ok()
            .map(|k| places[k].1 as usize)
    };
    let cost = |i: usize, d: usize| {
        let cost = p.cost(part[i] as usize, d);
        if has_start && i == 0 && cost.is_finite() {
            Nanos::ZERO
        } else {
            cost
        }
    };
    let task = |i: usize| Task {
        cost: (0..p.n_devices()).map(|d| cost(i, d)).collect(),
        group: Some(p.group_of[part[i] as usize]),
        ..Task::default()
    };
    let tensor = |&x: &u32| {
        let x = x as usize;
        let producer = place(p.tensors[x].producer)? as u32;
        let consumers = p
            .consumers
            .row(x)
            .iter()
            .filter_map(|&c| Some(place(c)? as u32))
            .collect();
        Some((
            Tensor {
                producer,
                ..p.tensors[x]
            },
            consumers,
        ))
    };
    let tensors = tensors_of(p, part).iter().filter_map(tensor).collect();
    let mut devices = p.devices.clone();
    devices.iter_mut().for_each(|d| d.memory = None);
    let tasks = (0..part.len()).map(task).collect();
    let parts = Parts {
        devices,
        links: p.links.clone(),
        tasks,
        tensors,
        constants: Vec::new(),
    };
    Problem::new(parts)
        .expect("a part of a problem has no ring, and its groups have the devices that they had")
}

/// Tensors that go from one of these tasks to another, in the order in which [`cut_out`] numbers
/// them.
pub(crate) fn tensors_of(p: &Problem, part: &[u32]) -> Vec<u32> {
    let places = places(part);
    let is_inside = |t: &u32| places.binary_search_by_key(t, |&(u, _)| u).is_ok();
    let is_used = |x: &u32| p.consumers.row(*x as usize).iter().any(is_inside);
    part.iter()
        .flat_map(|&t| p.outputs.row(t as usize).iter().copied().filter(is_used))
        .collect()
}

/// Tasks with their indices, by task.
fn places(part: &[u32]) -> Vec<(u32, u32)> {
    let mut places: Vec<(u32, u32)> = part
        .iter()
        .enumerate()
        .map(|(i, &t)| (t, i as u32))
        .collect();
    places.sort_unstable();
    places
}

/// True for a task with several predecessors.
fn is_join(p: &Problem, t: u32) -> bool {
    let mut before = p.predecessors(t as usize);
    before
        .next()
        .is_some_and(|first| before.any(|q| q != first))
}

impl Behind {
    fn new(p: &Problem, position: &[u32], join: u32) -> Behind {
        let mut tasks = Vec::new();
        let mut open = BTreeSet::from([(position[join as usize], join)]);
        while tasks.len() < MOST {
            let Some((_, t)) = open.pop_last() else { break };
            tasks.push(t);
            open.extend(
                p.predecessors(t as usize)
                    .map(|q| (position[q as usize], q)),
            );
        }
        let mut behind = Behind {
            ancestors: vec![0; tasks.len()],
            descendants: vec![0; tasks.len()],
            whole: open.is_empty(),
            tasks,
        };
        for i in (0..behind.tasks.len()).rev() {
            for q in p.predecessors(behind.tasks[i] as usize) {
                if let Some(k) = behind.tasks.iter().position(|&t| t == q) {
                    behind.ancestors[i] |= behind.ancestors[k] | 1 << k;
                }
            }
        }
        for i in 0..behind.tasks.len() {
            let descendants = (0..i).filter(|&k| behind.ancestors[k] >> i & 1 == 1);
            behind.descendants[i] = descendants.fold(0, |bits, k| bits | 1 << k);
        }
        behind
    }

    /// Parts that end at the join and that no task cuts in two: the smallest, and the largest
    /// others.
    fn parts(&self) -> Vec<Part> {
        let all = (1..self.tasks.len())
            .map(Some)
            .chain(self.whole.then_some(None));
        let mut sets: Vec<(u32, bool, u128)> = Vec::new();
        for start in all {
            let set = self.between(start);
            if set.count_ones() > 3 && !self.is_cut(set, start) {
                sets.push((set.count_ones(), start.is_some(), set));
            }
        }
        sets.sort_unstable();
        sets.dedup();
        let n = sets.len();
        let chosen = sets
            .into_iter()
            .enumerate()
            .filter(|(i, _)| *i == 0 || i + PER_JOIN > n)
            .map(|(_, s)| s);
        let tasks = |set: u128| {
            (0..self.tasks.len())
                .rev()
                .filter(move |i| set >> i & 1 == 1)
                .map(|i| self.tasks[i])
        };
        chosen
            .map(|(_, has_start, set)| Part {
                has_start,
                tasks: tasks(set).collect(),
            })
            .collect()
    }

    /// Tasks on ways from the start to the join, as bits.
    fn between(&self, start: Option<usize>) -> u128 {
        let all = if self.tasks.len() == 128 {
            u128::MAX
        } else {
            (1 << self.tasks.len()) - 1
        };
        match start {
            Some(u) => self.descendants[u] & (self.ancestors[0] | 1) | 1 << u,
            None => all,
        }
    }

    /// True when some task, not the start nor the join, comes before or after each other one.
    fn is_cut(&self, set: u128, start: Option<usize>) -> bool {
        let near = |i: usize| (self.ancestors[i] | self.descendants[i] | 1 << i) & set;
        (1..self.tasks.len()).any(|i| set >> i & 1 == 1 && start != Some(i) && near(i) == set)
    }
}
