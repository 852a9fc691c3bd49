//! The second half of the search: devices are chosen, the order of work on each device and each
//! link is open.
//!
//! Tasks and transfers start as soon as the arcs between them allow: those of the graph, and those
//! chosen so far between two that share a device or link. If nothing then overlaps, that schedule
//! is the best under these arcs. Else two that overlap are taken, and each of them goes first in
//! one branch. An order that would end too late is excluded at once (Carlier and Pinson, "An
//! algorithm for solving the job-shop problem", Management Science 35, 1989, section 3: immediate
//! selection).

use super::tables::Dense;
use super::tables::before;
use crate::Nanos;
use crate::bounds::one_machine::{Job, preemptive};
use crate::schedule::timeline::{Timeline, Transfer};

/// Tasks first, then transfers.
#[derive(Debug)]
pub(super) struct Orders {
    n_tasks: usize,
    device: Vec<u32>,
    /// Tensor, source and destination of each transfer.
    transfers: Vec<(u32, u32, u32)>,
    length: Vec<u64>,
    /// Operations of each device and link that has several.
    shared: Vec<Vec<u32>>,
    next: Vec<Vec<u32>>,
    n_before: Vec<u32>,
    head: Vec<u64>,
    tail: Vec<u64>,
    sequence: Vec<u32>,
    /// All ends are multiples of this.
    unit: u64,
}

/// Result of the search of orders.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// The best schedule below the limit.
    pub best: Option<Timeline>,
    /// Branches left because the budget was spent are not below this.
    pub open: Option<u64>,
}

/// Two operations on one resource, and the least makespans with either first.
struct Conflict {
    pair: (u32, u32),
    forward: u64,
    backward: u64,
}

impl Orders {
    /// The graph of tasks on their devices and the transfers between them.
    pub fn new(s: &Dense, device: &[u32]) -> Orders {
        let (p, n) = (s.p, s.p.n_tasks());
        let mut o = Orders {
            n_tasks: n,
            device: device.to_vec(),
            transfers: Vec::new(),
            length: (0..n).map(|t| s.cost(t, device[t] as usize)).collect(),
            shared: vec![Vec::new(); s.n_devices * (s.n_devices + 1)],
            next: vec![Vec::new(); n],
            n_before: Vec::new(),
            head: Vec::new(),
            tail: Vec::new(),
            sequence: Vec::new(),
            unit: s.unit,
        };
        (0..n).for_each(|t| o.shared[device[t] as usize].push(t as u32));
        for x in 0..p.tensors.len() {
            let producer = p.tensors[x].producer;
            let from = device[producer as usize];
            let first = o.transfers.len();
            for &c in p.consumers.row(x) {
                let to = device[c as usize];
                if to == from {
                    o.next[producer as usize].push(c);
                    continue;
                }
                let known = o.transfers[first..]
                    .iter()
                    .position(|t| t.2 == to)
                    .map(|i| first + i);
                let i = known.unwrap_or_else(|| o.add_transfer(s, x as u32, from, to));
                o.next[n + i].push(c);
            }
        }
        o.shared.retain(|ops| ops.len() > 1);
        o
    }

    fn add_transfer(&mut self, s: &Dense, x: u32, from: u32, to: u32) -> usize {
        let i = self.transfers.len();
        let op = (self.n_tasks + i) as u32;
        self.transfers.push((x, from, to));
        self.length
            .push(s.transfer(x as usize, from as usize, to as usize));
        self.next.push(Vec::new());
        self.next[s.p.tensors[x as usize].producer as usize].push(op);
        self.shared[s.n_devices * (1 + from as usize) + to as usize].push(op);
        i
    }

    /// Searches orders for schedules that end before `limit`; each node takes one from `budget`.
    pub fn search(&mut self, mut limit: u64, budget: &mut u64) -> Outcome {
        let mut outcome = Outcome::default();
        self.descend(0, &mut limit, budget, &mut outcome);
        outcome
    }

    fn descend(&mut self, bound: u64, limit: &mut u64, budget: &mut u64, outcome: &mut Outcome) {
        if bound >= *limit {
            return;
        }
        if *budget == 0 {
            outcome.open = Some(outcome.open.map_or(bound, |open| open.min(bound)));
            return;
        }
        *budget -= 1;
        let mut added = Vec::new();
        if let Some(conflict) = self.settle(bound, *limit, &mut added) {
            match conflict {
                Ok(Conflict {
                    pair: (i, j),
                    forward,
                    backward,
                }) => {
                    let mut branches = [(forward, i, j), (backward, j, i)];
                    branches.sort_unstable();
                    for (bound, i, j) in branches {
                        self.next[i as usize].push(j);
                        self.descend(bound, limit, budget, outcome);
                        self.next[i as usize].pop();
                    }
                }
                Err(makespan) => {
                    *limit = before(makespan, self.unit);
                    outcome.best = Some(self.timeline(makespan));
                }
            }
        }
        // Arcs come off in the reverse of the order in which they went on.
        while let Some(i) = added.pop() {
            self.next[i as usize].pop();
        }
    }

    /// Adds all forced arcs. `None` if no order ends before `limit`, else the conflict to branch
    /// on, or the makespan when there is none.
    fn settle(
        &mut self,
        bound: u64,
        limit: u64,
        added: &mut Vec<u32>,
    ) -> Option<Result<Conflict, u64>> {
        loop {
            let longest = self.times()?.max(bound);
            if longest >= limit || self.busiest() >= limit {
                return None;
            }
            let n_added = added.len();
            let mut worst: Option<(u64, Conflict)> = None;
            for r in 0..self.shared.len() {
                for k in 0..self.shared[r].len() {
                    for l in 0..k {
                        let (i, j) = (self.shared[r][k], self.shared[r][l]);
                        let (forward, backward) =
                            (self.with(i, j).max(longest), self.with(j, i).max(longest));
                        match (forward >= limit, backward >= limit) {
                            (true, true) => return None,
                            (true, false) => self.force(j, i, added),
                            (false, true) => self.force(i, j, added),
                            (false, false) if self.overlap(i, j) => {
                                // The pair whose worse order costs most decides most.
                                let weight = forward + backward;
                                if worst.as_ref().is_none_or(|w| weight > w.0) {
                                    worst = Some((
                                        weight,
                                        Conflict {
                                            pair: (i, j),
                                            forward,
                                            backward,
                                        },
                                    ));
                                }
                            }
                            (false, false) => {}
                        }
                    }
                }
            }
            if added.len() == n_added {
                return Some(worst.map(|w| w.1).ok_or(longest));
            }
        }
    }

    /// Adds an arc unless the times already keep it.
    fn force(&mut self, i: u32, j: u32, added: &mut Vec<u32>) {
        if self.head[j as usize] < self.head[i as usize] + self.length[i as usize]
            || self.overlap(i, j)
        {
            self.next[i as usize].push(j);
            added.push(i);
        }
    }

    /// Least makespan with `i` before `j`, as far as these two tell.
    fn with(&self, i: u32, j: u32) -> u64 {
        let (i, j) = (i as usize, j as usize);
        (self.head[i] + self.length[i]).max(self.head[j]) + self.tail[j]
    }

    fn overlap(&self, i: u32, j: u32) -> bool {
        let (i, j) = (i as usize, j as usize);
        let (a, b) = (
            (self.head[i], self.head[i] + self.length[i]),
            (self.head[j], self.head[j] + self.length[j]),
        );
        a.0 < b.1 && b.0 < a.1
    }

    /// Longest paths to and from each operation; the longest of all, or `None` if arcs form a
    /// cycle.
    fn times(&mut self) -> Option<u64> {
        let n = self.length.len();
        self.n_before.clear();
        self.n_before.resize(n, 0);
        for next in &self.next {
            next.iter().for_each(|&j| self.n_before[j as usize] += 1);
        }
        self.head.clear();
        self.head.resize(n, 0);
        self.tail.clear();
        self.tail.resize(n, 0);
        self.sequence.clear();
        self.sequence
            .extend((0..n as u32).filter(|&i| self.n_before[i as usize] == 0));
        let (mut at, mut longest) = (0, 0);
        while at < self.sequence.len() {
            let i = self.sequence[at] as usize;
            let end = self.head[i] + self.length[i];
            longest = longest.max(end);
            for &j in &self.next[i] {
                self.head[j as usize] = self.head[j as usize].max(end);
                self.n_before[j as usize] -= 1;
                if self.n_before[j as usize] == 0 {
                    self.sequence.push(j);
                }
            }
            at += 1;
        }
        for &i in self.sequence.iter().rev() {
            let rest = self.next[i as usize]
                .iter()
                .map(|&j| self.tail[j as usize])
                .max()
                .unwrap_or(0);
            self.tail[i as usize] = self.length[i as usize] + rest;
        }
        (at == n).then_some(longest)
    }

    /// The device or link that needs longest, if it could be interrupted.
    fn busiest(&self) -> u64 {
        let job = |&i: &u32| {
            let (head, tail, length) = (
                self.head[i as usize],
                self.tail[i as usize],
                self.length[i as usize],
            );
            Job {
                head: Nanos(head),
                length: Nanos(length),
                rest: Nanos(tail - length),
            }
        };
        self.shared
            .iter()
            .map(|ops| preemptive(&mut ops.iter().map(job).collect::<Vec<_>>()).0)
            .max()
            .unwrap_or(0)
    }

    fn timeline(&self, makespan: u64) -> Timeline {
        let n = self.n_tasks;
        let span = |i: usize| (Nanos(self.head[i]), Nanos(self.head[i] + self.length[i]));
        let transfer = |(i, &(tensor, from, to)): (usize, &(u32, u32, u32))| {
            let (start, end) = span(n + i);
            Transfer {
                tensor,
                from,
                to,
                start,
                end,
            }
        };
        let mut transfers: Vec<Transfer> =
            self.transfers.iter().enumerate().map(transfer).collect();
        transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
        Timeline {
            device: self.device.clone(),
            start: (0..n).map(|t| span(t).0).collect(),
            end: (0..n).map(|t| span(t).1).collect(),
            transfers,
            makespan: Nanos(makespan),
        }
    }
}
