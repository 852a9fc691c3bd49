//! Problems folded at their groups: all tasks of a group as one task.
//!
//! The backward part of a training step mirrors its forward part in time: a result made early is
//! needed late, on the same device. So a good placement of the whole is one of half the problem, in
//! which a task takes the time of all tasks of its group, in the order of their first ones, and
//! tensors sent back count as sent forth. The folded problem is smaller, and its moves are whole.

use crate::Nanos;
use crate::problem::{Parts, Problem, Task, Tensor};
use crate::schedule::list::Insertion;
use crate::schedule::simulate::{LinkOrder, simulate};
use crate::schedule::timeline::Timeline;
use crate::schedule::{algorithms, baechi, ranks};
use crate::search::refine::{Budget, refine};
use std::collections::BTreeSet;

/// Folding pays when groups are at most so many in a hundred tasks.
const MOST_PERCENT: usize = 75;

/// A problem of which each task stands for some of another one.
pub struct Folded {
    /// The smaller problem.
    pub problem: Problem,
    /// Its task for each task of the other.
    pub task_of: Vec<u32>,
}

/// A task for each group and its followers.
///
/// `None` when that leaves most tasks alone, or when memory is limited: the folded problem does not
/// see results that are kept from the first task of a group to its last.
pub fn folded(p: &Problem) -> Option<Folded> {
    if p.n_groups() == p.n_tasks() || p.is_limited() {
        return None;
    }
    let (task_of, n) = sheets(p);
    if n * 100 > p.n_tasks() * MOST_PERCENT {
        return None;
    }
    let mut tasks = vec![
        Task {
            cost: vec![Nanos::ZERO; p.n_devices()],
            ..Task::default()
        };
        n
    ];
    for t in 0..p.n_tasks() {
        let sums = tasks[task_of[t] as usize].cost.iter_mut();
        for (sum, own) in sums.zip(p.costs(t)) {
            *sum += *own;
        }
    }
    let parts = Parts {
        devices: p.devices.clone(),
        links: p.links.clone(),
        tasks,
        tensors: folded_tensors(p, &task_of),
        constants: Vec::new(),
    };
    Some(Folded {
        problem: Problem::new(parts).ok()?,
        task_of,
    })
}

/// Tensors between tasks of the folded problem. One that is sent back goes from the task that comes
/// first, in reversed time.
fn folded_tensors(p: &Problem, task_of: &[u32]) -> Vec<(Tensor, Vec<u32>)> {
    let mut tensors: Vec<(Tensor, Vec<u32>)> = Vec::new();
    for (i, &x) in p.tensors.iter().enumerate() {
        let from = task_of[x.producer as usize];
        let uses = p.consumers.row(i).iter().map(|&c| task_of[c as usize]);
        let uses: BTreeSet<u32> = uses.filter(|&u| u != from).collect();
        let (later, earlier): (Vec<u32>, Vec<u32>) = uses.into_iter().partition(|&u| u > from);
        let tensor = |producer: u32| Tensor { producer, ..x };
        if !later.is_empty() {
            tensors.push((tensor(from), later));
        }
        tensors.extend(earlier.into_iter().map(|u| (tensor(u), vec![from])));
    }
    tensors
}

/// For each task the number of its sheet, in topological order of the first task of each; and how
/// many there are. A sheet is a group, with the tasks behind the first task of any group that are
/// alone in theirs and use results of the sheet's first half.
fn sheets(p: &Problem) -> (Vec<u32>, usize) {
    let is_first = |t: u32| p.members.row(p.group_of[t as usize] as usize)[0] == t;
    let alone = |t: u32| p.members.row(p.group_of[t as usize] as usize).len() == 1;
    let mut place = vec![0u32; p.n_tasks()];
    p.order
        .iter()
        .enumerate()
        .for_each(|(i, &t)| place[t as usize] = i as u32);
    let mut is_back = vec![false; p.n_tasks()];
    let mut sheet_of_group = vec![u32::MAX; p.n_groups()];
    let mut n = 0;
    for &t in &p.order {
        let group = p.group_of[t as usize] as usize;
        is_back[t as usize] =
            !is_first(t) || p.predecessors(t as usize).any(|q| is_back[q as usize]);
        if sheet_of_group[group] != u32::MAX {
            continue;
        }
        let kept = p
            .predecessors(t as usize)
            .filter(|&q| is_back[t as usize] && alone(t) && !is_back[q as usize]);
        let same = kept.filter(|&q| p.feasible(q as usize).eq(p.feasible(t as usize)));
        let beside = same
            .max_by_key(|&q| place[q as usize])
            .map(|q| sheet_of_group[p.group_of[q as usize] as usize]);
        sheet_of_group[group] = beside.unwrap_or_else(|| {
            n += 1;
            n - 1
        });
    }
    (
        p.group_of
            .iter()
            .map(|&g| sheet_of_group[g as usize])
            .collect(),
        n as usize,
    )
}

/// The placement that is best for the folded problem, of a few list schedules refined with a budget
/// of simulated tasks.
pub fn place(p: &Problem, budget: Budget) -> Option<Timeline> {
    let Folded {
        problem: folded,
        task_of,
    } = folded(p)?;
    let mut starts = vec![
        algorithms::heft(&folded, Insertion::Gaps),
        algorithms::etf(&folded),
        algorithms::greedy(&folded),
        algorithms::peft(&folded),
    ];
    starts.extend(baechi::m_sct(&folded));
    starts.sort_by_key(|t| t.makespan);
    starts.dedup_by(|a, b| a.device == b.device);
    starts.truncate(STARTS);
    let short = Budget {
        tasks: budget.tasks / (2 * STARTS as u64),
        ..budget
    };
    let long = Budget {
        tasks: budget.tasks / 2,
        seed: budget.seed.wrapping_add(1),
        ..budget
    };
    let brief = |s: &Timeline| refine(&folded, s, Nanos::ZERO, short);
    let best = starts.iter().map(brief).min_by_key(|t| t.makespan)?;
    let best = refine(&folded, &best, Nanos::ZERO, long);
    Some(unfolded(p, &task_of, &best))
}

/// The whole on the devices of the folded timeline: the first tasks of its tasks in their order,
/// the others in the reverse of it, or each device as longest remaining ways have it.
fn unfolded(p: &Problem, task_of: &[u32], folded: &Timeline) -> Timeline {
    let device: Vec<u32> = task_of.iter().map(|&f| folded.device[f as usize]).collect();
    let mut is_first = vec![false; p.n_tasks()];
    let mut seen = vec![false; folded.device.len()];
    for &t in &p.order {
        is_first[t as usize] = !std::mem::replace(&mut seen[task_of[t as usize] as usize], true);
    }
    let mut order = p.order.clone();
    order.sort_by_key(|&t| {
        let f = task_of[t as usize] as usize;
        if is_first[t as usize] {
            folded.start[f]
        } else {
            folded.makespan + folded.makespan.saturating_sub(folded.end[f])
        }
    });
    let keys = [
        ranks::keys_of_order(&order),
        ranks::keys_of(p, &ranks::placed_tails(p, &device)),
    ];
    let runs = keys.map(|keys| simulate(p, &device, &keys, LinkOrder::Urgent));
    runs.into_iter()
        .min_by_key(|t| t.makespan)
        .unwrap_or_default()
}

/// List schedules of the folded problem that are refined.
const STARTS: usize = 3;
