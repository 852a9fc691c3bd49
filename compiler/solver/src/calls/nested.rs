//! Latency by dynamic programming over blocks within blocks.
//!
//! Units that all others come before or after cut a graph into items that run one after the other; an item between two cuts falls into parts that do
//! not touch, and each of these is cut again. For every such part, and every number of accelerators, [`Nested`] finds the least time in which it can
//! run by itself: its items one after the other, each on hosts, divided further, or several of them in one call. Parts side by side share the
//! accelerators so that the slowest is as fast as can be. A call need not end at a cut: what it leaves of the last item, or finds done of the first,
//! is solved like any other part. So calls run side by side where branches are, which chains of calls ([`super::ideals`]) never do.
//!
//! The value is that of a latency with barriers at the cuts, so an upper bound.

use super::Calls;
use super::ideals::Ideals;
use super::latency::Reach;
use super::load::Part;
use crate::Nanos;
use std::collections::HashMap;
use std::rc::Rc;

/// Ideals of a part above which calls end at cuts only: of the whole, and of parts of it.
const MOST_IDEALS: (usize, usize) = (60_000, 400);
/// Units of a part of the whole above which the same holds.
const MOST_UNITS: usize = 40;
/// Parts that are solved; those that come later run in one call or on hosts.
const MOST_PARTS: usize = 20_000;

/// How a part runs with so many accelerators.
#[derive(Clone, Debug)]
enum Plan {
    Hosts(Rc<[u32]>),
    Call(Rc<[u32]>),
    /// One after the other or side by side.
    All(Vec<Rc<Plan>>),
}

/// Least times of a part by accelerators, never rising, and how.
type Times = Rc<[(Nanos, Option<Rc<Plan>>)]>;

/// The best placement with barriers that is found: its time with them, and the device of each unit. `None` when nothing fits. `budget` counts
/// ideals that calls grow over.
pub(super) fn solve(calls: &Calls, budget: u64) -> Option<(Nanos, Vec<u32>)> {
    let units = calls.bound_units();
    let mut nested = Nested {
        calls,
        reach: Reach::new(calls),
        part: Part::new(calls),
        known: HashMap::new(),
        in_set: vec![false; calls.units.len()],
        n_accelerators: calls.accelerators.len(),
        left: budget,
    };
    let times = nested.times(&units, true);
    let (value, plan) = times.last().cloned()?;
    let (mut slices, mut n_calls) = (Vec::new(), 0);
    lay(calls, &*plan?, &mut n_calls, &mut slices);
    Some((value, calls.of_slices(&slices)))
}

/// Gives each call of a plan an accelerator.
fn lay(calls: &Calls, plan: &Plan, n_calls: &mut usize, slices: &mut Vec<(u32, Vec<u32>)>) {
    match plan {
        Plan::Hosts(units) => slices.push((calls.hosts[0], units.to_vec())),
        Plan::Call(units) => {
            slices.push((calls.accelerators[*n_calls], units.to_vec()));
            *n_calls += 1;
        }
        Plan::All(plans) => plans.iter().for_each(|p| lay(calls, p, n_calls, slices)),
    }
}

struct Nested<'c> {
    calls: &'c Calls,
    reach: Reach,
    part: Part<'c>,
    known: HashMap<Vec<u32>, Times>,
    in_set: Vec<bool>,
    n_accelerators: usize,
    left: u64,
}

/// The best call from one place between items to another, with what it leaves of an item at either end.
#[derive(Clone)]
struct Span {
    /// By accelerators.
    value: Vec<Nanos>,
    /// The ideals between which the call is, by accelerators.
    ends: Vec<(u32, u32)>,
}

impl Nested<'_> {
    /// Least times of units that are all there is between two ideals.
    fn times(&mut self, units: &[u32], is_whole: bool) -> Times {
        if let Some(times) = self.known.get(units) {
            return times.clone();
        }
        let parts = self.parts(units);
        let times: Times = match parts.len() {
            0 => vec![(Nanos::ZERO, Some(Rc::new(Plan::All(Vec::new())))); self.n_accelerators + 1]
                .into(),
            1 => self.series(units, is_whole),
            _ => self.side_by_side(units, &parts, is_whole),
        };
        self.known.insert(units.to_vec(), times.clone());
        times
    }

    /// Units in parts that no tensor or edge joins.
    fn parts(&mut self, units: &[u32]) -> Vec<Vec<u32>> {
        units.iter().for_each(|&u| self.in_set[u as usize] = true);
        let mut parts = Vec::new();
        for &first in units {
            if !std::mem::take(&mut self.in_set[first as usize]) {
                continue;
            }
            let mut part = vec![first];
            let mut next = 0;
            while next < part.len() {
                let unit = &self.calls.units[part[next] as usize];
                for &v in unit.before.iter().chain(&unit.after) {
                    if std::mem::take(&mut self.in_set[v as usize]) {
                        part.push(v);
                    }
                }
                next += 1;
            }
            part.sort_unstable();
            parts.push(part);
        }
        parts
    }

    /// Everything in one call.
    fn call(&mut self, units: &[u32]) -> Nanos {
        units.iter().for_each(|&u| self.part.add(u));
        let load = self.part.on_accelerator();
        units.iter().rev().for_each(|&u| self.part.remove(u));
        load
    }

    /// Parts that run side by side, or all of them in one call.
    fn side_by_side(&mut self, units: &[u32], parts: &[Vec<u32>], is_whole: bool) -> Times {
        let all: Vec<Times> = parts
            .iter()
            .map(|part| self.times(part, is_whole))
            .collect();
        let shares = share(&all, self.n_accelerators);
        let load = self.call(units);
        let call = Rc::new(Plan::Call(units.into()));
        let of = |k: usize| {
            let value = shares.last().map_or(Nanos::ZERO, |s| s[k].0);
            match k > 0 && load < value {
                true => (load, Some(call.clone())),
                false => (value, value.is_finite().then(|| shared(&all, &shares, k))),
            }
        };
        (0..=self.n_accelerators).map(of).collect()
    }

    /// Items between cuts, of units that hang together.
    fn items(&self, units: &[u32]) -> Vec<Vec<u32>> {
        let is_cut = |u: u32| {
            units
                .iter()
                .all(|&v| self.reach.is_after(u, v) || self.reach.is_after(v, u))
        };
        let cuts: Vec<u32> = units.iter().copied().filter(|&u| is_cut(u)).collect();
        let mut items: Vec<Vec<u32>> = vec![Vec::new(); 2 * cuts.len() + 1];
        for &u in units {
            let before = cuts.partition_point(|&c| c < u);
            let at = if cuts.get(before) == Some(&u) {
                2 * before + 1
            } else {
                2 * before
            };
            items[at].push(u);
        }
        items.retain(|item| !item.is_empty());
        items
    }

    /// Items one after the other.
    fn series(&mut self, units: &[u32], is_whole: bool) -> Times {
        let items = self.items(units);
        let may_divide = is_whole || units.len() <= MOST_UNITS;
        let most_ideals = if is_whole {
            MOST_IDEALS.0
        } else {
            MOST_IDEALS.1
        };
        let is_open = may_divide && self.known.len() < MOST_PARTS && self.left > 0;
        let ideals = is_open
            .then(|| Ideals::of(self.calls, units, most_ideals))
            .flatten();
        let (n, most) = (items.len(), self.n_accelerators);
        let mut spans: Vec<Option<Span>> = vec![None; (n + 1) * (n + 1)];
        match &ideals {
            Some(ideals) => self.grow_spans(units, &items, ideals, &mut spans),
            None => self.plain_spans(&items, &mut spans),
        }
        let single = |item: &Vec<u32>| (item.len() > 1 && n > 1).then(|| self.times(item, false));
        let single: Vec<Option<Times>> = items.iter().map(single).collect();
        let hosts: Vec<Nanos> = items.iter().map(|item| self.hosts(item)).collect();
        let step = |i: usize, j: usize, m: usize| {
            let call = spans[i * (n + 1) + j]
                .as_ref()
                .map_or(Nanos::INFINITY, |s| s.value[m]);
            let alone = || single[i].as_ref().map_or(hosts[i], |times| times[m].0);
            if i + 1 == j { call.min(alone()) } else { call }
        };
        let chain = Chain::new(n, most, step);
        let mut plan = |k: usize| {
            let mut plans = Vec::new();
            for ((i, j), m, value) in chain.steps(k) {
                let span = spans[i * (n + 1) + j]
                    .as_ref()
                    .filter(|s| s.value[m] == value);
                plans.extend(match (span, &single[i]) {
                    (Some(span), _) => {
                        Some(self.span_plan(&items, ideals.as_ref(), (i, j), span.ends[m], m))
                    }
                    (None, Some(times)) => times[m].1.clone(),
                    (None, None) => Some(Rc::new(Plan::Hosts(items[i].clone().into()))),
                });
            }
            Rc::new(Plan::All(plans))
        };
        let of = |k: usize| (chain.value(k), chain.value(k).is_finite().then(|| plan(k)));
        (0..=most).map(of).collect()
    }

    /// Time of units on as many hosts as it takes.
    fn hosts(&mut self, units: &[u32]) -> Nanos {
        units.iter().for_each(|&u| self.part.add(u));
        let runs = self.part.on_host().is_finite();
        let time = if runs {
            self.part.on_many_hosts()
        } else {
            Nanos::INFINITY
        };
        units.iter().rev().for_each(|&u| self.part.remove(u));
        time
    }

    /// Calls that begin and end at cuts.
    fn plain_spans(&mut self, items: &[Vec<u32>], spans: &mut [Option<Span>]) {
        let n = items.len();
        for i in 0..n {
            let mut units: Vec<u32> = Vec::new();
            for j in i + 1..=n {
                units.extend(&items[j - 1]);
                items[j - 1].iter().for_each(|&u| self.part.add(u));
                let load = self.part.on_accelerator();
                let value = (0..=self.n_accelerators)
                    .map(|m| if m == 0 { Nanos::INFINITY } else { load })
                    .collect();
                spans[i * (n + 1) + j] = Some(Span {
                    value,
                    ends: vec![(0, 0); self.n_accelerators + 1],
                });
                if !self.part.may_grow_on_accelerator(Nanos::INFINITY) {
                    break;
                }
            }
            units.iter().rev().for_each(|&u| self.part.remove(u));
        }
    }

    /// Calls that begin or end at a cut and have an ideal as their other end.
    fn grow_spans(
        &mut self,
        units: &[u32],
        items: &[Vec<u32>],
        ideals: &Ideals,
        spans: &mut [Option<Span>],
    ) {
        let (n, places) = (items.len(), places(items, ideals));
        let size = |id: u32| ideals.size[id as usize];
        for is_up in [true, false] {
            let previous = if is_up { Vec::new() } else { ideals.previous() };
            let next = if is_up { &ideals.next } else { &previous };
            // Times of what is left to the place at which the item of an ideal ends, or was done from where it begins.
            let mut sides: Vec<Option<Vec<Nanos>>> = vec![None; ideals.next.len()];
            for i in 0..=n {
                let mut found = Vec::new();
                self.reach_ideals(
                    next,
                    places[i],
                    &mut vec![false; ideals.next.len()],
                    &mut found,
                );
                for (id, load) in found {
                    let j = match is_up {
                        true => places.partition_point(|&p| size(p) < size(id)),
                        false => places.partition_point(|&p| size(p) <= size(id)) - 1,
                    };
                    let (small, large) = if is_up {
                        (id, places[j])
                    } else {
                        (places[j], id)
                    };
                    let side = sides[id as usize]
                        .get_or_insert_with(|| self.side(units, ideals, small, large));
                    let (at, ends) = if is_up {
                        (i * (n + 1) + j, (places[i], id))
                    } else {
                        (j * (n + 1) + i, (id, places[i]))
                    };
                    spans[at]
                        .get_or_insert_with(|| Span::new(self.n_accelerators))
                        .offer(load, side, ends);
                }
            }
        }
    }

    /// Least times of what lies between two ideals.
    fn side(&mut self, units: &[u32], ideals: &Ideals, small: u32, large: u32) -> Vec<Nanos> {
        let all = self.times_of_parts(&ideals.difference(units, small, large));
        let none = vec![Nanos::ZERO; self.n_accelerators + 1];
        share(&all, self.n_accelerators)
            .last()
            .map_or(none, |s| s.iter().map(|s| s.0).collect())
    }

    /// Ideals that a call can reach from one, with its load.
    fn reach_ideals(
        &mut self,
        next: &[Vec<(u32, u32)>],
        at: u32,
        seen: &mut [bool],
        found: &mut Vec<(u32, Nanos)>,
    ) {
        for &(unit, id) in &next[at as usize] {
            if std::mem::replace(&mut seen[id as usize], true) || self.left == 0 {
                continue;
            }
            self.left -= 1;
            self.part.add(unit);
            if self.part.may_grow_on_accelerator(Nanos::INFINITY) {
                found.push((id, self.part.on_accelerator()));
                self.reach_ideals(next, id, seen, found);
            }
            self.part.remove(unit);
        }
    }

    /// The call between two ideals, and what lies between it and the places `i` and `j`.
    fn span_plan(
        &mut self,
        items: &[Vec<u32>],
        ideals: Option<&Ideals>,
        (i, j): (usize, usize),
        (small, large): (u32, u32),
        m: usize,
    ) -> Rc<Plan> {
        let Some(ideals) = ideals else {
            return Rc::new(Plan::Call(items[i..j].concat().into()));
        };
        let units: Vec<u32> = items.concat();
        let places = places(items, ideals);
        let inside = ideals.difference(&units, small, large);
        let before = ideals.difference(&units, places[i], small);
        let after = ideals.difference(&units, large, places[j]);
        let side = |s: &mut Self, units: &[u32]| {
            let all = s.times_of_parts(units);
            shared(&all, &share(&all, s.n_accelerators), m - 1)
        };
        Rc::new(Plan::All(vec![
            side(self, &before),
            Rc::new(Plan::Call(inside.into())),
            side(self, &after),
        ]))
    }

    /// Times of the parts of some units.
    fn times_of_parts(&mut self, units: &[u32]) -> Vec<Times> {
        self.parts(units)
            .iter()
            .map(|part| self.times(part, false))
            .collect()
    }
}

impl Span {
    fn new(n_accelerators: usize) -> Span {
        Span {
            value: vec![Nanos::INFINITY; n_accelerators + 1],
            ends: vec![(0, 0); n_accelerators + 1],
        }
    }

    /// Takes a call and the times of what it leaves where they are better.
    fn offer(&mut self, load: Nanos, side: &[Nanos], ends: (u32, u32)) {
        for (m, side) in side.iter().enumerate().take(self.value.len() - 1) {
            if load + *side < self.value[m + 1] {
                (self.value[m + 1], self.ends[m + 1]) = (load + *side, ends);
            }
        }
    }
}

/// Least times of the first items by accelerators; how the last step was made: from where, with how many accelerators.
struct Chain {
    best: Vec<Vec<(Nanos, (usize, usize))>>,
}

impl Chain {
    /// Of `n` items and `k` accelerators; `step` tells the time from one place between items to another with so many of them.
    fn new(n: usize, k: usize, step: impl Fn(usize, usize, usize) -> Nanos) -> Chain {
        let mut best = vec![vec![(Nanos::INFINITY, (0, 0)); k + 1]; n + 1];
        best[0].fill((Nanos::ZERO, (0, 0)));
        for (i, j) in (1..=n).flat_map(|j| (0..j).map(move |i| (i, j))) {
            for m in 0..=k {
                let time = step(i, j, m);
                for all in m..=k {
                    let value = best[i][all - m].0 + time;
                    if value < best[j][all].0 {
                        best[j][all] = (value, (i, m));
                    }
                }
            }
        }
        Chain { best }
    }

    fn value(&self, k: usize) -> Nanos {
        self.best.last().map_or(Nanos::INFINITY, |b| b[k].0)
    }

    /// Steps with `k` accelerators, in order: places, accelerators and time.
    fn steps(&self, mut k: usize) -> Vec<((usize, usize), usize, Nanos)> {
        let (mut j, mut steps) = (self.best.len() - 1, Vec::new());
        while j > 0 {
            let (value, (i, m)) = self.best[j][k];
            steps.push(((i, j), m, value.saturating_sub(self.best[i][k - m].0)));
            (j, k) = (i, k - m);
        }
        steps.reverse();
        steps
    }
}

/// Ideals of the first items.
fn places(items: &[Vec<u32>], ideals: &Ideals) -> Vec<u32> {
    let mut at = 0u32;
    let mut places = vec![0];
    for item in items {
        for &u in item {
            let step = ideals.next[at as usize]
                .iter()
                .find(|n| n.0 == u)
                .map(|n| n.1);
            at = step.unwrap_or(at);
        }
        places.push(at);
    }
    places
}

/// Least of the greatest time of the first parts, by accelerators, and how many of them the last of these parts has.
fn share(all: &[Times], n_accelerators: usize) -> Vec<Vec<(Nanos, usize)>> {
    let mut shares: Vec<Vec<(Nanos, usize)>> = Vec::with_capacity(all.len());
    for times in all {
        let row = (0..=n_accelerators).map(|k| match shares.last() {
            None => (times[k].0, k),
            Some(before) => (0..=k)
                .map(|own| (before[k - own].0.max(times[own].0), own))
                .min()
                .unwrap_or_default(),
        });
        let row = row.collect();
        shares.push(row);
    }
    shares
}

/// Parts side by side with `k` accelerators, divided as [`share`] says.
fn shared(all: &[Times], shares: &[Vec<(Nanos, usize)>], mut k: usize) -> Rc<Plan> {
    let mut plans = Vec::with_capacity(all.len());
    for (times, shares) in all.iter().zip(shares).rev() {
        let own = shares[k].1;
        plans.extend(times[own].1.clone());
        k -= own;
    }
    Rc::new(Plan::All(plans))
}
