//! Latency of one sample: calls that wait for each other, with tasks on hosts in between.
//!
//! Solutions come from chains of calls, one after the other, of which the best is found by exhaustive search over nested ideals or by slices of some
//! orders, and from blocks within blocks ([`nested`]), whose calls run side by side as well; then clusters of units move, and at last single ones
//! while the latency falls, which lets calls and hosts run side by side. The bound is [`path_bound`].

use super::CallTask;
use super::Calls;
use super::Solution;
use super::ideals;
use super::ideals::Goal;
use super::load::Part;
use super::load::order;
use super::nested;
use crate::rng::Rng;
use crate::{Nanos, Rows};

/// What a search may do.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Topological orders that are sliced.
    pub orders: usize,
    /// Pairs of ideals that are looked at, for chains of calls and again for blocks within blocks.
    pub pairs: u64,
    /// Tasks that evaluations of moves may look at, in all walks, and in the descent after them.
    pub tasks: u64,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget {
            orders: 8,
            pairs: 500_000,
            tasks: 20_000_000,
        }
    }
}

/// The least latency that is found. `None` when nothing that fits is found.
pub fn solve(calls: &Calls, budget: Budget) -> Option<Solution> {
    let mut best: Option<(Nanos, Vec<u32>)> = None;
    let mut chained = Nanos::INFINITY;
    for seed in 0..budget.orders as u64 {
        if let Some((sum, of_unit)) = slice(calls, &order(calls, seed)) {
            chained = chained.min(sum);
            keep_better(calls, &mut best, of_unit);
        }
    }
    let search = ideals::search(calls, Goal::Sum, chained, budget.pairs);
    if let Some((_, of_unit)) = search.better {
        keep_better(calls, &mut best, of_unit);
    }
    if let Some((_, of_unit)) = nested::solve(calls, budget.pairs) {
        keep_better(calls, &mut best, of_unit);
    }
    let (_, mut of_unit) = best?;
    let lower_bound = path_bound(calls);
    if evaluate(calls, &of_unit)? > lower_bound {
        let walk = |(seed, &part): (usize, &u128)| {
            let mut walked = of_unit.clone();
            let value = wander(
                calls,
                &mut walked,
                budget.tasks / WALKS.len() as u64,
                part,
                seed as u64,
            );
            (value, walked)
        };
        of_unit = WALKS.iter().enumerate().map(walk).min()?.1;
    }
    let value = improve(calls, &mut of_unit, budget.tasks)?;
    Some(Solution {
        device: calls.devices(&of_unit),
        value,
        lower_bound,
        bound: "path",
    })
}

fn keep_better(calls: &Calls, best: &mut Option<(Nanos, Vec<u32>)>, of_unit: Vec<u32>) {
    if let Some(value) = evaluate(calls, &of_unit)
        && best.as_ref().is_none_or(|b| value < b.0)
    {
        *best = Some((value, of_unit));
    }
}

/// The latency when units run on `of_unit`, devices of the problem. `None` when calls wait for each other, an accelerator is over its memory, or a unit
/// is where it cannot run.
pub fn evaluate(calls: &Calls, of_unit: &[u32]) -> Option<Nanos> {
    Evaluator::new(calls).run(of_unit)
}

/// Evaluates placements of the same units, reusing its memory. Blocks are accelerators, by device, and then the tasks, those on hosts.
struct Evaluator<'c> {
    calls: &'c Calls,
    is_host: Vec<bool>,
    /// Tasks that wait for each task.
    consumers: Rows,
    /// Time and bytes of each device's part.
    parts: Vec<(Nanos, u128)>,
    /// The last tensor that was seen on each device.
    seen: Vec<u32>,
    /// Tasks of each device, as a chain: the first, and after each the next.
    first: Vec<u32>,
    next: Vec<u32>,
    waiting: Vec<u32>,
    start: Vec<Nanos>,
    ready: Vec<usize>,
}

const NONE: u32 = u32::MAX;

impl<'c> Evaluator<'c> {
    fn new(calls: &'c Calls) -> Evaluator<'c> {
        let n = calls.tasks.len();
        let n_devices = calls
            .accelerators
            .iter()
            .chain(&calls.hosts)
            .map(|&d| d as usize + 1)
            .max()
            .unwrap_or(0);
        let inputs =
            |(t, task): (usize, &'c CallTask)| task.inputs.iter().map(move |&q| (q, t as u32));
        Evaluator {
            calls,
            is_host: (0..n_devices as u32)
                .map(|d| calls.hosts.contains(&d))
                .collect(),
            consumers: Rows::from_pairs(n, calls.tasks.iter().enumerate().flat_map(inputs)),
            parts: Vec::new(),
            seen: Vec::new(),
            first: Vec::new(),
            next: vec![NONE; n],
            waiting: Vec::new(),
            start: Vec::new(),
            ready: Vec::new(),
        }
    }

    fn run(&mut self, of_unit: &[u32]) -> Option<Nanos> {
        self.weigh(of_unit);
        let over = |&d: &u32| self.parts[d as usize].1 > self.calls.memory;
        if self.parts.iter().any(|part| !part.0.is_finite())
            || self.calls.accelerators.iter().any(over)
        {
            return None;
        }
        self.finish(of_unit)
    }

    /// What each device has to do and to hold.
    fn weigh(&mut self, of_unit: &[u32]) {
        let calls = self.calls;
        self.parts.clear();
        self.parts.resize(self.is_host.len(), (Nanos::ZERO, 0));
        for (unit, &d) in calls.units.iter().zip(of_unit) {
            let part = &mut self.parts[d as usize];
            part.0 += if self.is_host[d as usize] {
                unit.host
            } else {
                unit.accelerator
            };
            part.1 += unit.bytes;
        }
        self.seen.clear();
        self.seen.resize(self.is_host.len(), NONE);
        for (x, copied) in calls.copied.iter().enumerate() {
            let home = of_unit[copied.producer as usize] as usize;
            self.seen[home] = x as u32;
            let mut crosses = false;
            // It crosses the border of each accelerator that has an end of it, unless that one has them all.
            for &c in &copied.consumers {
                let d = of_unit[c as usize] as usize;
                if self.seen[d] != x as u32 {
                    self.seen[d] = x as u32;
                    crosses = true;
                    self.parts[d].0 += if self.is_host[d] {
                        Nanos::ZERO
                    } else {
                        copied.copy
                    };
                }
            }
            self.parts[home].0 += if crosses && !self.is_host[home] {
                copied.copy
            } else {
                Nanos::ZERO
            };
        }
    }

    /// Runs calls and host tasks as soon as they are ready: the end of the last.
    fn finish(&mut self, of_unit: &[u32]) -> Option<Nanos> {
        let (calls, n_parts) = (self.calls, self.parts.len());
        let is_host = &self.is_host;
        let block = |t: u32| {
            let d = of_unit[calls.unit_of[t as usize] as usize] as usize;
            if is_host[d] { n_parts + t as usize } else { d }
        };
        self.waiting.clear();
        self.waiting.resize(n_parts + calls.tasks.len(), 0);
        self.start.clear();
        self.start.resize(n_parts + calls.tasks.len(), Nanos::ZERO);
        self.first.clear();
        self.first.resize(n_parts, NONE);
        let mut n_left = 0;
        for t in 0..calls.tasks.len() as u32 {
            let to = block(t);
            if to < n_parts {
                n_left += usize::from(self.first[to] == NONE);
                self.next[t as usize] = std::mem::replace(&mut self.first[to], t);
            } else {
                n_left += 1;
            }
            self.waiting[to] += calls.tasks[t as usize]
                .inputs
                .iter()
                .filter(|&&q| block(q) != to)
                .count() as u32;
        }
        self.ready.clear();
        let used = |b: &usize| {
            if *b < n_parts {
                self.first[*b] != NONE
            } else {
                block((*b - n_parts) as u32) == *b
            }
        };
        self.ready.extend(
            (0..self.waiting.len())
                .filter(|&b| self.waiting[b] == 0)
                .filter(used),
        );
        let mut last = Nanos::ZERO;
        while let Some(b) = self.ready.pop() {
            n_left -= 1;
            let (time, mut t) = match b < n_parts {
                true => (self.parts[b].0, self.first[b]),
                false => (calls.tasks[b - n_parts].host, (b - n_parts) as u32),
            };
            let end = self.start[b] + time;
            last = last.max(end);
            while t != NONE {
                for &c in self.consumers.row(t as usize) {
                    let c = block(c);
                    if c != b {
                        self.start[c] = self.start[c].max(end);
                        self.waiting[c] -= 1;
                        if self.waiting[c] == 0 {
                            self.ready.push(c);
                        }
                    }
                }
                t = if b < n_parts {
                    self.next[t as usize]
                } else {
                    NONE
                };
            }
        }
        (n_left == 0).then_some(last)
    }
}

/// Walks from the best placement, each of which accepts at first what is worse by this part of it: how rough the way is differs by problem.
const WALKS: [u128; 4] = [60, 100, 200, 400];

/// Steps of a walk for each unit: small problems need no more.
const MOST_STEPS: u64 = 100;

/// Moves connected clusters of units from device to device, at first also where the latency rises a little, by less and less (threshold accepting,
/// Dueck and Scheuer 1990). The best that was seen is left in `of_unit`; returns its latency.
fn wander(calls: &Calls, of_unit: &mut Vec<u32>, budget: u64, part: u128, seed: u64) -> Nanos {
    let mut evaluator = Evaluator::new(calls);
    let Some(mut value) = evaluator.run(of_unit) else {
        return Nanos::INFINITY;
    };
    let mut best = (value, of_unit.clone());
    let affordable = budget / (calls.order.len() + calls.copied.len()).max(1) as u64;
    let steps = affordable.min(MOST_STEPS * calls.units.len() as u64);
    let mut rng = Rng(seed);
    for step in 0..steps {
        let left = u128::from(steps - step) * 1000 / u128::from(steps);
        let threshold = Nanos((u128::from(best.0.0) * left * left / (part * 1_000_000)) as u64);
        let Some((cluster, to)) = cluster(calls, of_unit, &mut rng) else {
            continue;
        };
        let from = of_unit[cluster[0] as usize];
        cluster.iter().for_each(|&u| of_unit[u as usize] = to);
        match evaluator.run(of_unit).filter(|v| *v <= value + threshold) {
            Some(found) => value = found,
            None => cluster.iter().for_each(|&u| of_unit[u as usize] = from),
        }
        if value < best.0 {
            best = (value, of_unit.clone());
        }
    }
    *of_unit = best.1;
    best.0
}

/// Units to move together, and where.
fn cluster(calls: &Calls, of_unit: &[u32], rng: &mut Rng) -> Option<(Vec<u32>, u32)> {
    let first = border(calls, of_unit, rng);
    let from = of_unit[first];
    let (size, way) = (1usize << rng.below(6), rng.below(3));
    let around = |u: u32, way: usize| {
        let unit = &calls.units[u as usize];
        let before = unit.before.iter().filter(move |_| way != 1);
        before
            .chain(unit.after.iter().filter(move |_| way != 0))
            .copied()
    };
    let mut homes: Vec<u32> = around(first as u32, 2)
        .map(|v| of_unit[v as usize])
        .filter(|d| *d != from)
        .collect();
    homes.extend(calls.hosts.first());
    homes.push(rng.pick(&calls.accelerators));
    let to = rng.pick(&homes);
    let mut cluster = vec![first as u32];
    let mut next = 0;
    while next < cluster.len() && cluster.len() < size {
        for v in around(cluster[next], way) {
            if of_unit[v as usize] == from && cluster.len() < size && !cluster.contains(&v) {
                cluster.push(v);
            }
        }
        next += 1;
    }
    (to != from).then_some((cluster, to))
}

/// A unit, mostly one that has neighbours on other devices: moving others seldom helps.
fn border(calls: &Calls, of_unit: &[u32], rng: &mut Rng) -> usize {
    let is_inner = |u: usize| {
        let unit = &calls.units[u];
        unit.before
            .iter()
            .chain(&unit.after)
            .all(|&v| of_unit[v as usize] == of_unit[u])
    };
    let mut unit = rng.below(calls.units.len());
    let mut tries = if rng.one_in(8) { 0 } else { 16 };
    while tries > 0 && is_inner(unit) {
        unit = rng.below(calls.units.len());
        tries -= 1;
    }
    unit
}

/// Moves units, one at a time, to where neighbours are or to a host, as long as the latency falls.
fn improve(calls: &Calls, of_unit: &mut [u32], budget: u64) -> Option<Nanos> {
    let mut evaluator = Evaluator::new(calls);
    let mut value = evaluator.run(of_unit)?;
    let cost = (calls.order.len() + calls.copied.len()) as u64;
    let mut left = budget / cost.max(1);
    let mut quiet = 0;
    let mut u = 0;
    while quiet < calls.units.len() && left > 0 {
        let unit = &calls.units[u];
        let neighbours = unit
            .before
            .iter()
            .chain(&unit.after)
            .map(|&v| of_unit[v as usize]);
        let idle = calls.accelerators.iter().find(|d| !of_unit.contains(d));
        let mut homes: Vec<u32> = neighbours
            .chain(calls.hosts.first().copied())
            .chain(idle.copied())
            .collect();
        homes.sort_unstable();
        homes.dedup();
        quiet += 1;
        for home in homes {
            let old = of_unit[u];
            if home == old || left == 0 {
                continue;
            }
            left -= 1;
            of_unit[u] = home;
            match evaluator.run(of_unit).filter(|v| *v < value) {
                Some(better) => (value, quiet) = (better, 0),
                None => of_unit[u] = old,
            }
        }
        u = (u + 1) % calls.units.len();
    }
    Some(value)
}

/// The best chain of slices of an order: a slice is on an accelerator, or on as many hosts as it takes.
fn slice(calls: &Calls, order: &[u32]) -> Option<(Nanos, Vec<u32>)> {
    let n = order.len();
    let states = calls.accelerators.len() + 1;
    let mut best = vec![Nanos::INFINITY; (n + 1) * states];
    let mut from = vec![(usize::MAX, false); (n + 1) * states];
    best[0] = Nanos::ZERO;
    for first in 0..n {
        let mut part = Part::new(calls);
        for end in first + 1..=n {
            part.add(order[end - 1]);
            for a in 0..states {
                let here = best[first * states + a];
                let mut relax = |to: usize, load: Nanos, on_host: bool| {
                    if here + load < best[end * states + to] {
                        best[end * states + to] = here + load;
                        from[end * states + to] = (first, on_host);
                    }
                };
                if a + 1 < states {
                    relax(a + 1, part.on_accelerator(), false);
                }
                relax(a, part.on_many_hosts(), true);
            }
        }
    }
    let mut a = (0..states).min_by_key(|&a| best[n * states + a])?;
    let value = best[n * states + a];
    if !value.is_finite() {
        return None;
    }
    let (mut end, mut slices) = (n, Vec::new());
    while end > 0 {
        let (first, on_host) = from[end * states + a];
        let device = if on_host {
            calls.hosts[0]
        } else {
            calls.accelerators[a - 1]
        };
        slices.push((device, order[first..end].to_vec()));
        a -= usize::from(!on_host);
        end = first;
    }
    slices.reverse();
    Some((value, calls.of_slices(&slices)))
}

/// A lower bound of the latency of every solution, from paths.
///
/// Blocks, calls or host tasks, that have different tasks of a path run one after the other. A call that has tasks `i..=j` of a path has all units
/// that lie between them, by contiguity, and runs them serially; it copies out what it has made for units that come after task `j + 1`, for
/// they cannot be in it, and copies in what units before task `i` have made for it; what it must have fits on the accelerator. The best
/// division of a path under these rules is a shortest way over its tasks. The bound is the best over some paths.
pub fn path_bound(calls: &Calls) -> Nanos {
    let reach = Reach::new(calls);
    let least = |t: usize| calls.tasks[t].accelerator.min(calls.tasks[t].host);
    let bytes = |t: usize| calls.units[calls.unit_of[t] as usize].bytes;
    let weights: [&dyn Fn(usize) -> Nanos; 4] = [
        &least,
        &|t| least(t) + calls.tasks[t].copy,
        &|t| Nanos(bytes(t).min(1 << 40) as u64) + least(t),
        &|t| calls.tasks[t].host.min(Nanos(1 << 60)),
    ];
    weights
        .iter()
        .map(|weight| division(calls, &reach, &longest_path(calls, weight)))
        .max()
        .unwrap_or_default()
}

/// The tasks of a path of most weight.
fn longest_path(calls: &Calls, weight: &dyn Fn(usize) -> Nanos) -> Vec<u32> {
    let mut head = vec![(Nanos::ZERO, u32::MAX); calls.order.len()];
    for &t in &calls.order {
        let inputs = calls.tasks[t as usize]
            .inputs
            .iter()
            .map(|&q| (head[q as usize].0, q));
        let (before, q) = inputs.max().unwrap_or((Nanos::ZERO, u32::MAX));
        head[t as usize] = (before + weight(t as usize), q);
    }
    let last = calls
        .order
        .iter()
        .copied()
        .max_by_key(|&t| head[t as usize].0);
    let before = |t: &u32| Some(head[*t as usize].1).filter(|q| *q != u32::MAX);
    let mut path: Vec<u32> = std::iter::successors(last, before).collect();
    path.reverse();
    path
}

/// Which units come after which.
pub(super) struct Reach {
    words: usize,
    /// Units after each one, itself included, as bits.
    after: Vec<u64>,
}

impl Reach {
    pub(super) fn new(calls: &Calls) -> Reach {
        let n = calls.units.len();
        let words = n.div_ceil(64);
        let mut after = vec![0u64; n * words];
        for u in (0..n).rev() {
            after[u * words + u / 64] |= 1 << (u % 64);
            for &v in &calls.units[u].after {
                for w in 0..words {
                    after[u * words + w] |= after[v as usize * words + w];
                }
            }
        }
        Reach { words, after }
    }

    pub(super) fn is_after(&self, later: u32, earlier: u32) -> bool {
        self.after[earlier as usize * self.words + later as usize / 64] >> (later % 64) & 1 == 1
    }
}

/// The least time of a path of tasks over its divisions into blocks.
fn division(calls: &Calls, reach: &Reach, path: &[u32]) -> Nanos {
    let n = path.len();
    let states = calls.accelerators.len() + 1;
    let unit = |i: usize| path.get(i).map(|&t| calls.unit_of[t as usize]);
    let mut best = vec![Nanos::INFINITY; (n + 1) * states];
    best[..states].fill(Nanos::ZERO);
    for first in 0..n {
        let own = calls.tasks[path[first] as usize].host;
        for a in 0..states {
            let to = (first + 1) * states + a;
            best[to] = best[to].min(best[first * states + a] + own);
        }
        let before = first.checked_sub(1).and_then(unit);
        if before == unit(first) {
            // A unit is whole: no call begins within one.
            continue;
        }
        let mut block = Block::new(calls, reach, before);
        for end in first + 1..=n {
            block.extend(
                calls.unit_of[path[first] as usize],
                calls.unit_of[path[end - 1] as usize],
            );
            if block.bytes > calls.memory || !block.time.is_finite() {
                break;
            }
            if unit(end) == unit(end - 1) {
                continue;
            }
            let load = block.time + block.copies_in + block.copies_out(unit(end));
            for a in 1..states {
                let to = end * states + a;
                best[to] = best[to].min(best[first * states + a - 1] + load);
            }
        }
    }
    best[n * states..].iter().copied().min().unwrap_or_default()
}

/// What a call that has some tasks of a path must have and do at least.
struct Block<'c> {
    calls: &'c Calls,
    reach: &'c Reach,
    before: Option<u32>,
    is_inside: Vec<bool>,
    inside: Vec<u32>,
    time: Nanos,
    bytes: u128,
    /// Copies of what the unit before it on the path, and those before that, make for it.
    copies_in: Nanos,
    is_in: Vec<bool>,
}

impl<'c> Block<'c> {
    fn new(calls: &'c Calls, reach: &'c Reach, before: Option<u32>) -> Block<'c> {
        Block {
            calls,
            reach,
            before,
            is_inside: vec![false; calls.units.len()],
            inside: Vec::new(),
            time: Nanos::ZERO,
            bytes: 0,
            copies_in: Nanos::ZERO,
            is_in: vec![false; calls.copied.len()],
        }
    }

    /// Takes in all that lies between `first` and `last`.
    fn extend(&mut self, first: u32, last: u32) {
        let mut stack = vec![last];
        while let Some(u) = stack.pop() {
            if self.is_inside[u as usize] || !self.reach.is_after(u, first) {
                continue;
            }
            self.is_inside[u as usize] = true;
            self.inside.push(u);
            let unit = &self.calls.units[u as usize];
            self.time += unit.accelerator;
            self.bytes += unit.bytes;
            for &x in &unit.tensors {
                let producer = self.calls.copied[x as usize].producer;
                let comes = producer != u
                    && self
                        .before
                        .is_some_and(|b| self.reach.is_after(b, producer));
                if comes && !std::mem::replace(&mut self.is_in[x as usize], true) {
                    self.copies_in += self.calls.copied[x as usize].copy;
                }
            }
            stack.extend(&unit.before);
        }
    }

    /// Copies of what it makes for the next unit of the path, and for those after that.
    fn copies_out(&self, next: Option<u32>) -> Nanos {
        let Some(next) = next else { return Nanos::ZERO };
        let own = self.inside.iter().flat_map(|&u| {
            let tensors = self.calls.units[u as usize]
                .tensors
                .iter()
                .map(|&x| &self.calls.copied[x as usize]);
            tensors.filter(move |c| c.producer == u)
        });
        own.filter(|c| c.consumers.iter().any(|&v| self.reach.is_after(v, next)))
            .map(|c| c.copy)
            .sum()
    }
}
