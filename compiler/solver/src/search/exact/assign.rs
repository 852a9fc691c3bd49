//! The first half of the search: groups are given devices one by one, the group on the longest path
//! first.
//!
//! Each node keeps the devices that are open to each group. A device closes for a group when the
//! longest path through it ends too late, when the device would have too much to do, or hold too
//! much for the whole step. Of devices that nothing tells apart and that are still empty only the
//! first is tried. When every group has one device, [`super::order`] searches the orders.

use super::order::Orders;
use super::tables::Dense;
use super::tables::NEVER;
use super::tables::Tables;
use super::tables::before;
use super::tables::devices;
use super::timed::Full;
use super::timed::Timed;
use crate::bounds::one_machine::{Job, preemptive};
use crate::problem::Problem;
use crate::schedule::ranks;
use crate::schedule::simulate::{LinkOrder, simulate};
use crate::schedule::timeline::Timeline;
use crate::{Nanos, bounds};

/// A search below a limit, and its findings.
pub(super) struct Search<'p> {
    s: Dense<'p>,
    tables: Tables,
    /// First device of those that nothing tells apart from this one.
    twin: Vec<usize>,
    /// Only schedules that end before this are of interest.
    limit: u64,
    best: Option<Timeline>,
    /// No schedule of a branch that was left ends before this.
    open: u64,
    budget: u64,
    /// Nodes that the schedules of one placement may take.
    most_timed: u64,
    jobs: Vec<Vec<Job>>,
    capped: bool,
    /// Bytes that a device holds while it runs some task of a group, resident ones aside; by group
    /// and device.
    footprint: Vec<u128>,
}

/// A placement may take this part of the budget for its schedules.
const TIMED_SHARE: u64 = 16;

/// Result of a search.
pub(super) struct Found {
    /// The best schedule that ends before the limit.
    pub best: Option<Timeline>,
    /// No schedule ends before this; the limit at most.
    pub bound: u64,
    /// Budget that is left.
    pub budget: u64,
}

/// Searches schedules that end before `limit`, looking at `budget` nodes at most.
pub(super) fn search(p: &Problem, limit: u64, budget: u64) -> Found {
    let s = Dense::new(p);
    let mut search = Search {
        tables: Tables::default(),
        twin: twins(p),
        limit: before(limit.min(NEVER), s.unit),
        best: None,
        open: NEVER,
        budget,
        most_timed: (budget / TIMED_SHARE).max(1),
        footprint: footprints(p),
        jobs: vec![Vec::new(); p.n_devices() * p.n_devices()],
        capped: p.is_limited(),
        s,
    };
    let open = search.s.open.clone();
    search.descend(open, 0);
    let bound = bounds::whole(Nanos(search.limit.min(search.open)), search.s.unit).0;
    Found {
        bound,
        best: search.best,
        budget: search.budget,
    }
}

/// First of the devices that may change places with each device.
pub(super) fn twins(p: &Problem) -> Vec<usize> {
    let n = p.n_devices();
    let alike = |a: usize, b: usize| {
        let others = (0..n).filter(|&e| e != a && e != b);
        p.devices[a] == p.devices[b]
            && p.links.get(a, b) == p.links.get(b, a)
            && others.into_iter().all(|e| {
                p.links.get(a, e) == p.links.get(b, e) && p.links.get(e, a) == p.links.get(e, b)
            })
            && (0..p.n_tasks()).all(|t| p.cost(t, a) == p.cost(t, b))
    };
    (0..n)
        .map(|d| (0..d).find(|&e| alike(e, d)).unwrap_or(d))
        .collect()
}

/// Operands, results and scratch of the largest task of each group, by device. A task without
/// duration holds nothing for any time.
fn footprints(p: &Problem) -> Vec<u128> {
    let bytes = |x: &u32| u128::from(p.tensors[*x as usize].bytes().0);
    let of = |t: usize| {
        p.inputs
            .row(t)
            .iter()
            .chain(p.outputs.row(t))
            .map(bytes)
            .sum::<u128>()
            + u128::from(p.scratch[t].0)
    };
    let largest = |g: usize, d: usize| {
        let long = p
            .members
            .row(g)
            .iter()
            .filter(|&&t| p.cost(t as usize, d) > Nanos::ZERO);
        long.map(|&t| of(t as usize)).max().unwrap_or(0)
    };
    (0..p.n_groups())
        .flat_map(|g| (0..p.n_devices()).map(move |d| largest(g, d)))
        .collect()
}

impl Search<'_> {
    fn descend(&mut self, mut open: Vec<u64>, bound: u64) {
        if bound >= self.limit {
            return;
        }
        if self.budget == 0 {
            self.open = self.open.min(bound);
            return;
        }
        self.budget -= 1;
        let Some(bound) = self.close(&mut open).map(|b| b.max(bound)) else {
            return;
        };
        let Some(group) = self.choose(&open) else {
            return self.leaf(&open, bound);
        };
        let empty = self.empty_devices(&open);
        let mut branches: Vec<(u64, usize)> = devices(open[group])
            .filter(|&d| !self.has_empty_twin(d, empty))
            .map(|d| (self.tables.through(&self.s, group, d), d))
            .collect();
        branches.sort_unstable();
        for (through, d) in branches {
            let mut child = open.clone();
            child[group] = 1 << d;
            self.descend(child, bound.max(through));
        }
    }

    /// Closes devices until nothing changes. The lower bound of the remaining assignments, or
    /// `None` if there are none.
    fn close(&mut self, open: &mut [u64]) -> Option<u64> {
        loop {
            self.tables.fill(&self.s, open);
            let mut changed = false;
            let mut bound = 0;
            for (g, open) in open.iter_mut().enumerate() {
                let mut least = NEVER;
                for d in devices(*open) {
                    let through = self.tables.through(&self.s, g, d);
                    least = least.min(through);
                    if through >= self.limit {
                        *open &= !(1 << d);
                        changed = true;
                    }
                }
                bound = bound.max(least);
            }
            if bound >= self.limit {
                return None;
            }
            if changed {
                continue;
            }
            bound = bound.max(self.loads(open));
            if bound >= self.limit {
                return None;
            }
            if !self.close_full(open)? {
                return Some(bound);
            }
        }
    }

    /// Least makespan by the loads of devices and links.
    fn loads(&mut self, open: &[u64]) -> u64 {
        let links = self.tables.links(&self.s, open, &mut self.jobs);
        if links >= self.limit {
            return links;
        }
        let shared = self.tables.shared_work(&self.s, open);
        if shared >= self.limit {
            return shared;
        }
        let n = self.s.n_devices;
        self.tables.device_jobs(&self.s, open, &mut self.jobs[..n]);
        let busiest = self.jobs[..n]
            .iter_mut()
            .map(|jobs| preemptive(jobs).0)
            .max()
            .unwrap_or(0);
        busiest.max(links).max(shared)
    }

    fn work(&self, group: usize, device: usize) -> u64 {
        self.s
            .p
            .members
            .row(group)
            .iter()
            .map(|&t| self.s.cost(t as usize, device))
            .sum()
    }

    /// Closes devices that a group would fill too much, with work or memory. `None` when a group
    /// has none left, else whether any closed.
    fn close_full(&mut self, open: &mut [u64]) -> Option<bool> {
        let n = self.s.n_devices;
        let held = self.capped.then(|| self.held(open));
        let mut changed = false;
        let fullest = |jobs: &[Job]| {
            let work: Nanos = jobs.iter().map(|j| j.length).sum();
            let head = jobs.iter().map(|j| j.head).min().unwrap_or_default();
            let rest = jobs.iter().map(|j| j.rest).min().unwrap_or_default();
            (head.0, work.0, rest.0)
        };
        let load: Vec<(u64, u64, u64)> = self.jobs[..n].iter().map(|jobs| fullest(jobs)).collect();
        for (g, bits) in open
            .iter_mut()
            .enumerate()
            .filter(|(_, bits)| bits.count_ones() > 1)
        {
            for d in devices(*bits) {
                let (mut head, work, mut rest) = load[d];
                for &t in self.s.p.members.row(g) {
                    let i = t as usize * n + d;
                    head = head.min(self.tables.head[i]);
                    rest = rest.min(self.tables.tail[i] - self.s.cost[i]);
                }
                let late = work > 0 && head + work + self.work(g, d) + rest >= self.limit;
                if late || held.as_ref().is_some_and(|held| self.too_big(held, g, d)) {
                    *bits &= !(1 << d);
                    changed = true;
                }
            }
            if *bits == 0 {
                return None;
            }
        }
        if held.as_ref().is_some_and(|held| self.is_over(held, open)) {
            return None;
        }
        Some(changed)
    }

    /// Bytes that groups with one device left hold there for the whole step; shared constants left
    /// out.
    fn held(&self, open: &[u64]) -> Vec<u128> {
        let mut held = vec![0; self.s.n_devices];
        for (g, bits) in open
            .iter()
            .enumerate()
            .filter(|(_, bits)| bits.count_ones() == 1)
        {
            held[bits.trailing_zeros() as usize] += self.s.resident[g];
        }
        held
    }

    /// True if a device cannot hold its resident bytes, or run beside them a group that must be
    /// there.
    fn is_over(&self, held: &[u128], open: &[u64]) -> bool {
        let n = self.s.n_devices;
        let limit = |d: usize| {
            self.s.p.devices[d]
                .memory
                .map_or(u128::MAX, |m| u128::from(m.0))
        };
        let runs = open
            .iter()
            .enumerate()
            .filter(|(_, bits)| bits.count_ones() == 1);
        let lacks = |(g, bits): (usize, &u64)| {
            let d = bits.trailing_zeros() as usize;
            held[d] + self.footprint[g * n + d] > limit(d)
        };
        held.iter().enumerate().any(|(d, held)| *held > limit(d)) || runs.into_iter().any(lacks)
    }

    fn too_big(&self, held: &[u128], group: usize, device: usize) -> bool {
        let limit = self.s.p.devices[device].memory;
        limit.is_some_and(|m| {
            held[device]
                + self.s.resident[group]
                + self.footprint[group * self.s.n_devices + device]
                > u128::from(m.0)
        })
    }

    /// The open group whose longest path is longest; of equal ones that which loses most by its
    /// second device.
    fn choose(&self, open: &[u64]) -> Option<usize> {
        let undecided = (0..open.len()).filter(|&g| open[g].count_ones() > 1);
        let weight = |g: &usize| {
            let (mut first, mut second) = (NEVER, NEVER);
            for through in devices(open[*g]).map(|d| self.tables.through(&self.s, *g, d)) {
                (first, second) = if through < first {
                    (through, first)
                } else {
                    (first, second.min(through))
                };
            }
            (first, second, std::cmp::Reverse(*g))
        };
        undecided.max_by_key(weight)
    }

    /// Devices that no group is bound to.
    fn empty_devices(&self, open: &[u64]) -> u64 {
        let bound = open
            .iter()
            .filter(|bits| bits.count_ones() == 1)
            .fold(0, |all, bits| all | bits);
        !bound
    }

    fn has_empty_twin(&self, d: usize, empty: u64) -> bool {
        let is_empty = |e: usize| empty >> e & 1 == 1;
        is_empty(d) && (0..d).any(|e| self.twin[e] == self.twin[d] && is_empty(e))
    }

    fn leaf(&mut self, open: &[u64], bound: u64) {
        let p = self.s.p;
        let device: Vec<u32> = p
            .group_of
            .iter()
            .map(|&g| open[g as usize].trailing_zeros())
            .collect();
        let keys = ranks::keys_of(p, &ranks::placed_tails(p, &device));
        let quick = simulate(p, &device, &keys, LinkOrder::Urgent);
        let timed = if self.capped {
            Timed::new(&self.s, &device)
        } else {
            None
        };
        if timed.is_none() || bounds::fits(p, &quick) {
            let at_best = quick.makespan.0 <= bound;
            self.offer(quick);
            if at_best || bound >= self.limit {
                return;
            }
        }
        let outcome = match timed {
            Some(Err(Full)) => return,
            Some(Ok(timed)) => {
                let mut share = self.budget.min(self.most_timed);
                self.budget -= share;
                let outcome = timed.search(self.limit, &mut share);
                self.budget += share;
                outcome
            }
            None => Orders::new(&self.s, &device).search(self.limit, &mut self.budget),
        };
        self.open = self.open.min(outcome.open.unwrap_or(NEVER));
        if let Some(best) = outcome.best {
            self.offer(best);
        }
    }

    /// Takes a schedule that is better than all before. One that needs too much memory proves
    /// nothing but that its branch is not below it.
    fn offer(&mut self, found: Timeline) {
        if found.makespan.0 >= self.limit {
            return;
        }
        if self.capped && !bounds::fits(self.s.p, &found) {
            self.open = self.open.min(found.makespan.0);
            return;
        }
        self.limit = before(found.makespan.0, self.s.unit);
        self.best = Some(found);
    }
}
