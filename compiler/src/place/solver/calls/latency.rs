//! Latency of one sample: calls that wait for each other, with tasks on hosts in between.
//!
//! Solutions come from chains of calls, one after the other, of which the best is found by exhaustive search over nested ideals or by slices of some
//! orders; then single units move while the latency falls, which lets calls and hosts run side by side. The bound is [`path_bound`].

use super::ideals::{self, Goal};
use super::load::{Part, order};
use super::{Calls, Solution};
use crate::cost::Nanos;

/// What a search may do.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Topological orders that are sliced.
    pub orders: usize,
    /// Pairs of ideals that are looked at.
    pub pairs: u64,
    /// Tasks that evaluations of moves may look at.
    pub tasks: u64,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { orders: 8, pairs: 10_000_000, tasks: 10_000_000 }
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
    let (_, mut of_unit) = best?;
    let value = improve(calls, &mut of_unit, budget.tasks)?;
    Some(Solution { device: calls.devices(&of_unit), value, lower_bound: path_bound(calls), bound: "path" })
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
    let n_devices = of_unit.iter().chain(&calls.accelerators).map(|&d| d as usize + 1).max()?;
    let is_host = |d: u32| calls.hosts.contains(&d);
    let mut parts: Vec<(Nanos, u128)> = vec![(Nanos::ZERO, 0); n_devices];
    for (unit, &d) in calls.units.iter().zip(of_unit) {
        parts[d as usize].0 += if is_host(d) { unit.host } else { unit.accelerator };
        parts[d as usize].1 += unit.bytes;
    }
    for x in 0..calls.copied.len() as u32 {
        let copied = &calls.copied[x as usize];
        let mut there: Vec<u32> =
            copied.consumers.iter().chain([&copied.producer]).map(|&u| of_unit[u as usize]).collect();
        there.sort_unstable();
        there.dedup();
        // It crosses the border of each accelerator that has an end of it, unless that one has them all.
        if there.len() > 1 {
            there.iter().filter(|&&d| !is_host(d)).for_each(|&d| parts[d as usize].0 += copied.copy);
        }
    }
    let over = |d: &&u32| parts[**d as usize].1 > calls.memory;
    if parts.iter().any(|part| !part.0.is_finite()) || calls.accelerators.iter().find(over).is_some() {
        return None;
    }
    finish(calls, of_unit, &parts)
}

/// Runs calls and host tasks as soon as they are ready: the end of the last.
fn finish(calls: &Calls, of_unit: &[u32], parts: &[(Nanos, u128)]) -> Option<Nanos> {
    let n = calls.order.len();
    // Blocks: an accelerator is one, every task on a host is one.
    let block = |t: u32| {
        let d = of_unit[calls.unit_of[t as usize] as usize];
        if calls.hosts.contains(&d) { parts.len() + t as usize } else { d as usize }
    };
    let mut waiting = vec![0u32; parts.len() + n];
    let mut after: Vec<Vec<u32>> = vec![Vec::new(); parts.len() + n];
    let mut is_used = vec![false; parts.len() + n];
    for t in 0..n as u32 {
        let to = block(t);
        is_used[to] = true;
        for &q in &calls.tasks[t as usize].inputs {
            let from = block(q);
            if from != to {
                after[from].push(to as u32);
                waiting[to] += 1;
            }
        }
    }
    let mut ready: Vec<usize> = (0..waiting.len()).filter(|&b| is_used[b] && waiting[b] == 0).collect();
    let mut start = vec![Nanos::ZERO; waiting.len()];
    let (mut n_done, mut last) = (0, Nanos::ZERO);
    while let Some(b) = ready.pop() {
        n_done += 1;
        let time = if b < parts.len() { parts[b].0 } else { calls.tasks[b - parts.len()].host };
        let end = start[b] + time;
        last = last.max(end);
        for &c in &after[b] {
            start[c as usize] = start[c as usize].max(end);
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                ready.push(c as usize);
            }
        }
    }
    (n_done == is_used.iter().filter(|u| **u).count()).then_some(last)
}

/// Moves units, one at a time, to where neighbours are or to a host, as long as the latency falls.
fn improve(calls: &Calls, of_unit: &mut [u32], budget: u64) -> Option<Nanos> {
    let mut value = evaluate(calls, of_unit)?;
    let cost = (calls.order.len() + calls.copied.len()) as u64;
    let mut left = budget / cost.max(1);
    let mut quiet = 0;
    let mut u = 0;
    while quiet < calls.units.len() && left > 0 {
        let unit = &calls.units[u];
        let neighbours = unit.before.iter().chain(&unit.after).map(|&v| of_unit[v as usize]);
        let idle = calls.accelerators.iter().find(|d| !of_unit.contains(d));
        let mut homes: Vec<u32> = neighbours.chain(calls.hosts.first().copied()).chain(idle.copied()).collect();
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
            match evaluate(calls, of_unit).filter(|v| *v < value) {
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
        let device = if on_host { calls.hosts[0] } else { calls.accelerators[a - 1] };
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
    let weights: [&dyn Fn(usize) -> Nanos; 4] =
        [&least, &|t| least(t) + calls.tasks[t].copy, &|t| Nanos(bytes(t).min(1 << 40) as u64) + least(t), &|t| {
            calls.tasks[t].host.min(Nanos(1 << 60))
        }];
    weights.iter().map(|weight| division(calls, &reach, &longest_path(calls, weight))).max().unwrap_or_default()
}

/// The tasks of a path of most weight.
fn longest_path(calls: &Calls, weight: &dyn Fn(usize) -> Nanos) -> Vec<u32> {
    let mut head = vec![(Nanos::ZERO, u32::MAX); calls.order.len()];
    for &t in &calls.order {
        let inputs = calls.tasks[t as usize].inputs.iter().map(|&q| (head[q as usize].0, q));
        let (before, q) = inputs.max().unwrap_or((Nanos::ZERO, u32::MAX));
        head[t as usize] = (before + weight(t as usize), q);
    }
    let last = calls.order.iter().copied().max_by_key(|&t| head[t as usize].0);
    let before = |t: &u32| Some(head[*t as usize].1).filter(|q| *q != u32::MAX);
    let mut path: Vec<u32> = std::iter::successors(last, before).collect();
    path.reverse();
    path
}

/// Which units come after which.
struct Reach {
    words: usize,
    /// Units after each one, itself included, as bits.
    after: Vec<u64>,
}

impl Reach {
    fn new(calls: &Calls) -> Reach {
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

    fn is_after(&self, later: u32, earlier: u32) -> bool {
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
            block.extend(calls.unit_of[path[first] as usize], calls.unit_of[path[end - 1] as usize]);
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
                let comes = producer != u && self.before.is_some_and(|b| self.reach.is_after(b, producer));
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
            let tensors = self.calls.units[u as usize].tensors.iter().map(|&x| &self.calls.copied[x as usize]);
            tensors.filter(move |c| c.producer == u)
        });
        own.filter(|c| c.consumers.iter().any(|&v| self.reach.is_after(v, next))).map(|c| c.copy).sum()
    }
}
