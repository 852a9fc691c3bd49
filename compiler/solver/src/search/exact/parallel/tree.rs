//! The tree of schedules of jobs on identical devices, in order of their starts.
//!
//! A node is a partial schedule; a branch starts one more job, at the earliest time at which all it
//! waits for has ended and a device is idle. Starts never fall along a branch, and of jobs that
//! start together the one of lower index comes first, so that each schedule comes once. Left out
//! are
//!
//! * nodes whose longest path or remaining work ends too late;
//! * branches that leave a device idle for so long that some other job fits in before: moving it there makes no job later. So no optimal
//!   schedule of least total start time is lost;
//! * nodes with the same jobs started as in an earlier one, in which nothing was later: neither
//!   device nor job, nor the sum of all starts. Any completion of the later node completes the
//!   earlier one, with a total of starts that is no greater.
//!
//! (Sprecher, Kolisch and Drexl, "Semi-active, active and non-delay schedules for the
//! resource-constrained project scheduling problem", EJOR 80, 1995; Demeulemeester and Herroelen,
//! Management Science 38, 1992, for the left shift and the cutset rule.)

use super::graph::Jobs;
use super::list::Starts;
use std::collections::HashMap;

/// Most jobs: as many as bits in a set.
pub(super) const MOST: usize = 128;

/// Partial schedules that are remembered.
const REMEMBERED: usize = 400_000;

/// Partial schedules that are remembered for one set of jobs.
const PER_SET: usize = 24;

/// Bounds of the makespan after a search.
pub(super) struct Searched {
    /// The best schedule below the limit.
    pub best: Option<Starts>,
    /// All of the tree was searched.
    pub complete: bool,
    /// Nodes left of the budget.
    pub budget: u64,
}

struct Tree<'a> {
    jobs: &'a Jobs,
    limit: u64,
    target: u64,
    budget: u64,
    spent: bool,
    started: u128,
    start: Vec<u64>,
    end: Vec<u64>,
    /// Jobs not started that each job waits for.
    waiting: Vec<u32>,
    /// Earliest start of each job in the node.
    earliest: Vec<u64>,
    /// Jobs by falling rest, the time from their end to the end of all.
    by_rest: Vec<u32>,
    seen: HashMap<u128, Vec<Box<[u64]>>>,
    n_seen: usize,
    best: Option<Starts>,
}

/// Where a branch stands: times when devices become idle, rising; start and index of the last job;
/// sum of starts.
#[derive(Clone)]
struct Frontier {
    idle: Vec<u64>,
    last: (u64, u32),
    total: u64,
}

/// Searches schedules that end before `limit`; stops at one that ends by `target`.
pub(super) fn search(jobs: &Jobs, limit: u64, target: u64, budget: u64) -> Searched {
    let n = jobs.n();
    let mut by_rest: Vec<u32> = (0..n as u32).collect();
    by_rest.sort_by_key(|&j| std::cmp::Reverse(jobs.tail[j as usize] - jobs.length[j as usize]));
    let mut tree = Tree {
        jobs,
        limit,
        target,
        budget,
        spent: false,
        started: 0,
        start: vec![0; n],
        end: vec![0; n],
        waiting: jobs.before.iter().map(|b| b.len() as u32).collect(),
        earliest: vec![0; n],
        by_rest,
        seen: HashMap::new(),
        n_seen: 0,
        best: None,
    };
    tree.descend(&Frontier {
        idle: vec![0; jobs.n_devices],
        last: (0, 0),
        total: 0,
    });
    Searched {
        best: tree.best,
        complete: !tree.spent,
        budget: tree.budget,
    }
}

impl Tree<'_> {
    fn descend(&mut self, at: &Frontier) {
        if self.spent || self.limit <= self.target {
            return;
        }
        if self.started.count_ones() as usize == self.jobs.n() {
            let makespan = at.idle.last().copied().unwrap_or(0);
            if makespan < self.limit {
                self.limit = makespan;
                self.best = Some(Starts {
                    start: self.start.clone(),
                    makespan,
                });
            }
            return;
        }
        if self.budget == 0 {
            self.spent = true;
            return;
        }
        self.budget -= 1;
        let now = at.last.0.max(at.idle[0]);
        if !self.can_end(at, now) || self.dominated(at, now) {
            return;
        }
        for (start, j) in self.branches(at) {
            self.begin(at, start, j);
        }
    }

    /// Starts `j` and goes on from there.
    fn begin(&mut self, at: &Frontier, start: u64, j: u32) {
        let (jobs, i) = (self.jobs, j as usize);
        let end = start + jobs.length[i];
        let mut next = at.clone();
        next.idle.remove(0);
        next.idle
            .insert(next.idle.partition_point(|&t| t <= end), end);
        next.last = (start, j);
        next.total += start;
        self.started |= 1 << j;
        (self.start[i], self.end[i]) = (start, end);
        jobs.after[i]
            .iter()
            .for_each(|&k| self.waiting[k as usize] -= 1);
        self.descend(&next);
        jobs.after[i]
            .iter()
            .for_each(|&k| self.waiting[k as usize] += 1);
        self.started &= !(1 << j);
    }

    fn has_started(&self, j: u32) -> bool {
        self.started >> j & 1 == 1
    }

    /// When all that a job waits for has ended; jobs that it waits for have started.
    fn ready(&self, j: usize) -> u64 {
        self.jobs.before[j]
            .iter()
            .map(|&i| self.end[i as usize])
            .max()
            .unwrap_or(0)
    }

    /// Jobs that may start next, with their starts, the most urgent first.
    fn branches(&self, at: &Frontier) -> Vec<(u64, u32)> {
        let jobs = self.jobs;
        let open =
            (0..jobs.n() as u32).filter(|&j| !self.has_started(j) && self.waiting[j as usize] == 0);
        let mut found: Vec<(u64, u32)> = open
            .map(|j| (self.ready(j as usize).max(at.idle[0]), j))
            .collect();
        let fits = found
            .iter()
            .map(|&(start, j)| start + jobs.length[j as usize])
            .min()
            .unwrap_or(0);
        found.retain(|&(start, j)| start < fits && (start, j) >= at.last);
        let urgency =
            |&(start, j): &(u64, u32)| (std::cmp::Reverse(start + jobs.tail[j as usize]), start, j);
        found.sort_by_key(urgency);
        found
    }

    /// False if the longest path or the remaining work ends at the limit or later.
    fn can_end(&mut self, at: &Frontier, now: u64) -> bool {
        let jobs = self.jobs;
        for j in 0..jobs.n() {
            if self.started >> j & 1 == 1 {
                continue;
            }
            let mut earliest = now.max(jobs.head[j]);
            for &i in &jobs.before[j] {
                let i = i as usize;
                let end = if self.started >> i & 1 == 1 {
                    self.end[i]
                } else {
                    self.earliest[i] + jobs.length[i]
                };
                earliest = earliest.max(end);
            }
            if earliest + jobs.tail[j] >= self.limit {
                return false;
            }
            self.earliest[j] = earliest;
        }
        let mut work = 0;
        for &j in &self.by_rest {
            if self.has_started(j) {
                continue;
            }
            let i = j as usize;
            work += jobs.length[i];
            let until = self.limit - 1 - (jobs.tail[i] - jobs.length[i]);
            let room: u64 = at
                .idle
                .iter()
                .map(|&t| until.saturating_sub(t.max(now)))
                .sum();
            if work > room {
                return false;
            }
        }
        true
    }

    /// True if an earlier node was at least as good in everything; remembers this one if not.
    fn dominated(&mut self, at: &Frontier, now: u64) -> bool {
        let mut state: Vec<u64> = at.idle.iter().map(|&t| t.max(now)).collect();
        state.push(at.total);
        for j in 0..self.jobs.n() {
            if self.started >> j & 1 == 0
                && self.jobs.before[j].iter().any(|&i| self.has_started(i))
            {
                let started = self.jobs.before[j].iter().filter(|&&i| self.has_started(i));
                state.push(
                    started
                        .map(|&i| self.end[i as usize])
                        .max()
                        .unwrap_or(0)
                        .max(now),
                );
            }
        }
        let known = self.seen.entry(self.started).or_default();
        let covers = |a: &[u64], b: &[u64]| a.iter().zip(b).all(|(a, b)| a <= b);
        if known.iter().any(|k| covers(k, &state)) {
            return true;
        }
        if known.len() < PER_SET && self.n_seen < REMEMBERED {
            known.push(state.into_boxed_slice());
            self.n_seen += 1;
        }
        false
    }
}
