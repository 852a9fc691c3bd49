//! Refinement: local search on the critical chain, every trial measured by re-simulation.
//!
//! A trial moves groups of tasks to another device: one group of the critical chain, a run of the
//! chain between two transfers, or a connected cluster around it. It is simulated from the first
//! event that it can change ([`Simulator::rerun`]) and given up as soon as it cannot be taken. Late
//! acceptance (Burke and Bykov 2017) decides: a trial is taken when it is no worse than the current
//! placement or than the one some steps ago. The budget is counted in simulated tasks, so that the
//! answer is the same on every machine. Small problems ([`SMALL`]) leave time to look away from the
//! critical chain now and then, and to accept worse placements for longer.

use crate::memory::repair::{self, Key};
use crate::problem::Problem;
use crate::rng::Rng;
use crate::schedule::ranks;
use crate::schedule::simulate::{Limits, LinkOrder, Simulator};
use crate::schedule::timeline::{Timeline, Transfer};
use crate::{Bytes, Nanos};
use std::time::Instant;

/// Length and seed of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Tasks whose simulation may be begun, over all trials.
    pub tasks: u64,
    /// Seed of the search.
    pub seed: u64,
    /// Time after which it ends, if there is one.
    pub deadline: Option<Instant>,
}

impl Budget {
    /// So many tasks, with the first seed and no deadline.
    pub fn of(tasks: u64) -> Budget {
        Budget {
            tasks,
            seed: 1,
            deadline: None,
        }
    }

    pub(crate) fn is_late(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// The last move of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The step of the search that made it, from 1.
    pub step: u64,
    /// Where the group was before.
    pub from: u32,
}

/// Record of a search from its start to the best placement.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Moves {
    /// The last move of each group, if it moved.
    pub last: Vec<Option<Move>>,
    /// Steps of the searches so far.
    pub steps: u64,
}

/// Tasks of a small problem.
pub(crate) const SMALL: usize = 100;

/// One of so many moves of a small problem is of any group, and one of so many changes of order of
/// any task.
const ANY_MOVE: usize = 10;
const ANY_ORDER: usize = 5;

/// Runs of the whole that the budget has for each entry of the history of accepted values.
fn history_runs(p: &Problem) -> i64 {
    if p.n_tasks() <= SMALL { 10 } else { 400 }
}

/// Cost of the peaks of a run, in simulations of as many tasks.
const PEAKS: i64 = 1;

struct Search<'p> {
    p: &'p Problem,
    /// The current placement, simulated.
    base: Simulator<'p>,
    trial: Simulator<'p>,
    device: Vec<u32>,
    key: Vec<u64>,
    score: Key,
    best: (Key, Timeline),
    /// Moves that led to the current placement, and to the best.
    moves: Moves,
    best_moves: Vec<Option<Move>>,
    rng: Rng,
    left: i64,
    budget: Budget,
    chain: Vec<u32>,
    limited: bool,
    lower_bound: Nanos,
    latest: Vec<Nanos>,
    /// Longest paths from tasks to the end on the current devices.
    tails: Vec<Nanos>,
}

/// The best placement found near `start` within a budget; never worse than `start`. Stops when
/// `lower_bound` is reached.
pub fn refine(p: &Problem, start: &Timeline, lower_bound: Nanos, budget: Budget) -> Timeline {
    refine_logged(p, start, lower_bound, budget, &mut Moves::default())
}

/// [`refine`], which appends its record to the one of earlier searches from the same placement.
pub fn refine_logged(
    p: &Problem,
    start: &Timeline,
    lower_bound: Nanos,
    budget: Budget,
    moves: &mut Moves,
) -> Timeline {
    if p.n_devices() < 2 || p.n_tasks() == 0 {
        return start.clone();
    }
    let mut search = Search::new(p, start, lower_bound, budget);
    search.moves = std::mem::take(moves);
    search.moves.last.resize(p.n_groups(), None);
    search.best_moves.clone_from(&search.moves.last);
    search.run();
    *moves = Moves {
        last: search.best_moves,
        steps: search.moves.steps,
    };
    search.best.1
}

impl<'p> Search<'p> {
    fn new(p: &'p Problem, start: &Timeline, lower_bound: Nanos, budget: Budget) -> Search<'p> {
        let limited = p.is_limited();
        let base = Simulator::new(p, LinkOrder::Urgent);
        let trial = base.clone();
        let score = repair::key(p, start);
        let mut search = Search {
            p,
            base,
            trial,
            device: start.device.clone(),
            key: Vec::new(),
            score,
            best: (score, start.clone()),
            moves: Moves::default(),
            best_moves: Vec::new(),
            rng: Rng(budget.seed),
            left: i64::try_from(budget.tasks).unwrap_or(i64::MAX),
            budget,
            chain: Vec::new(),
            limited,
            lower_bound,
            latest: Vec::new(),
            tails: Vec::new(),
        };
        let mut order: Vec<u32> = p.order.clone();
        order.sort_by_key(|&t| start.start[t as usize]);
        let own = ranks::keys_of_order(&order);
        let tails = search.tail_keys();
        // Of the ways to run the start the best: patient or not, in the order of its own timeline
        // or longest remaining way first.
        let mut best: Option<(Key, &Vec<u64>)> = None;
        for (is_patient, keys) in [(false, &own), (false, &tails), (true, &own), (true, &tails)] {
            search.base.set_patient(is_patient);
            let score = search.rebase(keys.clone());
            if best.is_none_or(|b| score < b.0) {
                best = Some((score, keys));
                search.trial.restore(&search.base);
            }
        }
        std::mem::swap(&mut search.base, &mut search.trial);
        if let Some((score, keys)) = best {
            (search.score, search.key) = (score, keys.clone());
        }
        search.keep();
        search.settle();
        search
    }

    fn tail_keys(&self) -> Vec<u64> {
        ranks::keys_of(self.p, &ranks::placed_tails(self.p, &self.device))
    }

    /// Simulates the current devices under other keys.
    fn rebase(&mut self, key: Vec<u64>) -> Key {
        self.key = key;
        self.left -= self.p.n_tasks() as i64;
        let makespan = self
            .base
            .run(&self.device, &self.key, Nanos::INFINITY)
            .unwrap_or(Nanos::INFINITY);
        self.score = (self.excess(), makespan);
        self.score
    }

    fn excess(&mut self) -> Bytes {
        if !self.limited {
            return Bytes::ZERO;
        }
        self.left -= PEAKS * self.p.n_tasks() as i64;
        repair::excess(self.p, self.base.last_run())
    }

    /// Finds the chain and the tails of a new current placement.
    fn settle(&mut self) {
        self.chain = self.critical_chain();
        self.base.placed_tails(&mut self.tails);
    }

    fn keep(&mut self) -> bool {
        let better = self.score < self.best.0;
        if better {
            self.best = (self.score, self.base.timeline());
            self.best_moves.clone_from(&self.moves.last);
        }
        better
    }

    fn run(&mut self) {
        let n_history =
            usize::try_from(self.left / (history_runs(self.p) * self.p.n_tasks() as i64))
                .unwrap_or(0)
                .clamp(8, 1000);
        let mut history = vec![self.score; n_history];
        let mut step = 0usize;
        while self.left > 0
            && self.best.0 > (Bytes::ZERO, self.lower_bound)
            && !self.budget.is_late()
        {
            self.left -= 16;
            step += 1;
            self.moves.steps += 1;
            let bar = history[step % n_history].max(self.score);
            let taken = match self.rng.below(4) {
                0 => self.reorder(bar),
                _ => self
                    .propose()
                    .is_some_and(|(groups, to)| self.attempt(&groups, to, bar)),
            };
            if taken {
                self.settle();
                if self.keep() {
                    self.try_tails();
                }
            }
            history[step % n_history] = self.score.min(history[step % n_history]);
        }
    }

    /// After an improvement: the order by the new placement's own remaining ways, if it is better.
    fn try_tails(&mut self) {
        let (old_key, old_score) = (self.key.clone(), self.score);
        self.trial.restore(&self.base);
        let keys = self.tail_keys();
        if self.rebase(keys) > old_score {
            std::mem::swap(&mut self.base, &mut self.trial);
            (self.key, self.score) = (old_key, old_score);
        }
        self.keep();
        self.settle();
    }

    /// Moves groups to a device if the result is no worse than `bar`.
    fn attempt(&mut self, groups: &[u32], to: usize, bar: Key) -> bool {
        let p = self.p;
        let tasks = groups
            .iter()
            .flat_map(|&g| p.members.row(g as usize).iter().copied());
        let changed: Vec<u32> = tasks
            .filter(|&t| self.device[t as usize] != to as u32)
            .collect();
        if changed.is_empty() {
            return false;
        }
        let old: Vec<u32> = changed.iter().map(|&t| self.device[t as usize]).collect();
        changed
            .iter()
            .for_each(|&t| self.device[t as usize] = to as u32);
        let taken = self.measure(&changed, bar);
        for (&t, from) in changed.iter().zip(old) {
            match taken {
                true => {
                    self.moves.last[p.group_of[t as usize] as usize] = Some(Move {
                        step: self.moves.steps,
                        from,
                    })
                }
                false => self.device[t as usize] = from,
            }
        }
        taken
    }

    /// Lets a task of the chain that waited for its device go before the one that it waited for, or
    /// lets a neighbour of the chain wait.
    fn reorder(&mut self, bar: Key) -> bool {
        if self.chain.len() < 2 {
            return false;
        }
        if self.is_away(ANY_ORDER) {
            let (task, other) = (
                self.rng.below(self.p.n_tasks()),
                self.rng.below(self.p.n_tasks()),
            );
            let key = if self.rng.one_in(2) {
                self.key[other].saturating_sub(1)
            } else {
                self.key[other] + 1
            };
            return self.rekey(task, key, bar);
        }
        let at = 1 + self.rng.below(self.chain.len() - 1);
        let (before, task) = (self.chain[at - 1] as usize, self.chain[at] as usize);
        let (moved, key) = match self.rng.below(2) {
            0 => (task, self.key[before].saturating_sub(1)),
            _ => (before, self.key[task] + 1),
        };
        self.rekey(moved, key, bar)
    }

    /// True for one of `n` moves, where the problem is small.
    fn is_away(&mut self, n: usize) -> bool {
        self.p.n_tasks() <= SMALL && self.rng.one_in(n)
    }

    /// Gives a task another key if the result is no worse than `bar`.
    fn rekey(&mut self, moved: usize, key: u64, bar: Key) -> bool {
        let old = std::mem::replace(&mut self.key[moved], key);
        let taken = old != key && self.measure(&[moved as u32], bar);
        if !taken {
            self.key[moved] = old;
        }
        taken
    }

    /// Simulates with changed devices or keys of some tasks; takes the result if it is no worse
    /// than `bar`.
    fn measure(&mut self, changed: &[u32], bar: Key) -> bool {
        let p = self.p;
        self.trial.restore(&self.base);
        let mut latest = std::mem::take(&mut self.latest);
        latest.clear();
        latest.resize(p.n_tasks(), Nanos::INFINITY);
        if bar.0 == Bytes::ZERO && self.rng.one_in(2) {
            let slack = bar.1.saturating_sub(self.score.1);
            self.chain
                .iter()
                .for_each(|&t| latest[t as usize] = self.base.times(t as usize).0 + slack);
            changed
                .iter()
                .for_each(|&t| latest[t as usize] = Nanos::INFINITY);
        }
        // One that is over its memory may take longer.
        let makespan = if bar.0 > Bytes::ZERO {
            Nanos::INFINITY
        } else {
            bar.1 + Nanos(1)
        };
        let limits = Limits {
            makespan,
            latest: &latest,
            tails: &self.tails,
        };
        let makespan = self.trial.rerun(&self.device, &self.key, changed, &limits);
        self.latest = latest;
        self.left -= (self.trial.n_started() + p.n_tasks() as u64 / 16) as i64;
        if makespan.is_some() && self.limited {
            self.left -= PEAKS * p.n_tasks() as i64;
        }
        let excess = |m| (repair::excess(p, self.trial.last_run()), m);
        let score = makespan.map(excess).filter(|s| *s <= bar);
        if let Some(score) = score {
            std::mem::swap(&mut self.base, &mut self.trial);
            self.score = score;
        }
        score.is_some()
    }

    /// Groups to move, and where.
    fn propose(&mut self) -> Option<(Vec<u32>, usize)> {
        let p = self.p;
        if self.chain.is_empty() {
            return None;
        }
        if self.is_away(ANY_MOVE) {
            return self.propose_any();
        }
        let home = |s: &Search, i: usize| s.device[s.chain[i] as usize];
        let mut at = self.rng.below(self.chain.len());
        let mut across = None;
        if self.rng.one_in(2) {
            // The next place where the chain changes devices: one side joins the other.
            let next = (at + 1..self.chain.len())
                .chain(1..at + 1)
                .find(|&i| home(self, i) != home(self, i - 1));
            if let Some(i) = next {
                let joins = self.rng.below(2);
                at = i - joins;
                across = Some(home(self, i - 1 + joins) as usize);
            }
        }
        let task = self.chain[at] as usize;
        let groups = match self.rng.below(4) {
            0 => vec![p.group_of[task]],
            1 => self.run_of_chain(at),
            _ => self.cluster(task),
        };
        let from = self.device[task] as usize;
        let near: Vec<usize> = groups
            .iter()
            .flat_map(|&g| self.neighbours(g))
            .filter(|&d| d != from)
            .collect();
        let to = match across {
            Some(to) if !self.rng.one_in(4) => to,
            _ if near.is_empty() || self.rng.one_in(4) => self.rng.below(p.n_devices()),
            _ => self.rng.pick(&near),
        };
        let groups = self.that_can(groups, to);
        if groups.is_empty() || to == from {
            None
        } else {
            Some((groups, to))
        }
    }

    /// Any group, or a cluster around it, to any device.
    fn propose_any(&mut self) -> Option<(Vec<u32>, usize)> {
        let group = self.rng.below(self.p.n_groups()) as u32;
        let task = self.p.members.row(group as usize)[0] as usize;
        let groups = if self.rng.one_in(2) {
            vec![group]
        } else {
            self.cluster(task)
        };
        let to = self.rng.below(self.p.n_devices());
        let groups = self.that_can(groups, to);
        if groups.is_empty() {
            None
        } else {
            Some((groups, to))
        }
    }

    /// The groups that can be on a device.
    fn that_can(&self, mut groups: Vec<u32>, to: usize) -> Vec<u32> {
        groups.retain(|&g| {
            self.p
                .cost(self.p.members.row(g as usize)[0] as usize, to)
                .is_finite()
        });
        groups
    }

    /// Devices of the tasks around a group.
    fn neighbours(&self, group: u32) -> Vec<usize> {
        let p = self.p;
        let around = |&t: &u32| p.predecessors(t as usize).chain(p.successors(t as usize));
        p.members
            .row(group as usize)
            .iter()
            .flat_map(around)
            .map(|t| self.device[t as usize] as usize)
            .collect()
    }

    /// A part of the run of chain tasks on one device around `at`.
    fn run_of_chain(&mut self, at: usize) -> Vec<u32> {
        let home = |i: usize| self.device[self.chain[i] as usize];
        let own = home(at);
        let mut first = (0..=at)
            .rev()
            .take_while(|&i| home(i) == own)
            .last()
            .unwrap_or(at);
        let mut last = (at..self.chain.len())
            .take_while(|&i| home(i) == own)
            .last()
            .unwrap_or(at);
        match self.rng.below(3) {
            0 => first = at,
            1 => last = at,
            _ => {}
        }
        let mut groups: Vec<u32> = (first..=last)
            .map(|i| self.p.group_of[self.chain[i] as usize])
            .collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// A connected cluster of groups on the device of `task`, grown along edges at random.
    fn cluster(&mut self, task: usize) -> Vec<u32> {
        let p = self.p;
        let most = 2usize << self.rng.below(5);
        let own = self.device[task];
        let mut groups = vec![p.group_of[task]];
        let mut next = 0;
        while next < groups.len() && groups.len() < most {
            for &t in p.members.row(groups[next] as usize) {
                for q in p.predecessors(t as usize).chain(p.successors(t as usize)) {
                    let group = p.group_of[q as usize];
                    if self.device[q as usize] == own
                        && !groups.contains(&group)
                        && groups.len() < most
                        && !self.rng.one_in(3)
                    {
                        groups.push(group);
                    }
                }
            }
            next += 1;
        }
        groups
    }

    /// Tasks whose delay would delay the end, from the last to the first: each started when the one
    /// before it let it.
    fn critical_chain(&self) -> Vec<u32> {
        let p = self.p;
        let mut causes = Causes {
            on_device: vec![Vec::new(); p.n_devices()],
            last: vec![NONE; p.tensors.len()],
            before: Vec::new(),
        };
        for &t in self.base.sequence() {
            causes.on_device[self.device[t as usize] as usize].push(t);
        }
        for (i, t) in self.base.last_run().transfers.iter().enumerate() {
            causes.before.push(std::mem::replace(
                &mut causes.last[t.tensor as usize],
                i as u32,
            ));
        }
        let last = (0..p.n_tasks() as u32)
            .max_by_key(|&t| (self.base.times(t as usize).1, std::cmp::Reverse(t)));
        let mut chain: Vec<u32> = last.into_iter().collect();
        let mut current = last;
        while let Some(t) = current {
            current = self.cause(t, &causes);
            chain.extend(current);
            if chain.len() > 2 * p.n_tasks() {
                break;
            }
        }
        chain.reverse();
        chain
    }

    /// The task whose end let `t` start: the maker of its last operand, through a transfer or not,
    /// else the one before it on its device.
    fn cause(&self, t: u32, causes: &Causes) -> Option<u32> {
        let p = self.p;
        let start = self.base.times(t as usize).0;
        if start == Nanos::ZERO {
            return None;
        }
        let d = self.device[t as usize];
        let local = p
            .predecessors(t as usize)
            .find(|&q| self.device[q as usize] == d && self.base.times(q as usize).1 == start);
        let through = || {
            let came =
                |x: &&u32| causes.arrival(&self.base.last_run().transfers, **x, d) == Some(start);
            p.inputs
                .row(t as usize)
                .iter()
                .find(came)
                .map(|&x| p.tensors[x as usize].producer)
        };
        let before = || {
            let tasks = &causes.on_device[d as usize];
            let from = tasks.partition_point(|&q| self.base.times(q as usize).1 < start);
            let ended = tasks[from..]
                .iter()
                .take_while(|&&q| self.base.times(q as usize).1 == start);
            ended
                .copied()
                .find(|&q| q != t && self.base.times(q as usize).0 < start)
        };
        local.or_else(through).or_else(before)
    }
}

const NONE: u32 = u32::MAX;

/// Causes of waiting of the current run, by device and tensor.
struct Causes {
    /// Tasks in order of their starts, and so of their ends.
    on_device: Vec<Vec<u32>>,
    /// Transfers of a tensor, as a chain: the last one, and before each the one before it.
    last: Vec<u32>,
    before: Vec<u32>,
}

impl Causes {
    /// When a tensor came to a device over a link.
    fn arrival(&self, transfers: &[Transfer], tensor: u32, device: u32) -> Option<Nanos> {
        let next = |i: u32| (i != NONE).then_some(i);
        let chain = std::iter::successors(next(self.last[tensor as usize]), |&i| {
            next(self.before[i as usize])
        });
        chain
            .map(|i| &transfers[i as usize])
            .find(|t| t.to == device)
            .map(|t| t.end)
    }
}
