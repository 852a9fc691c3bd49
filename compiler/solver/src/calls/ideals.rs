//! Exhaustive search over nested ideals (Tarnawski et al., arXiv:2006.16423, section 5.1.1): a contiguous part is the difference of two ideals of the
//! forward graph, so a solution is a chain of ideals.

use super::Calls;
use super::load::Part;
use crate::Nanos;
use std::collections::HashMap;

/// Ideals above which nothing is searched.
const MOST_IDEALS: usize = 200_000;
/// A search that has fewer pairs to look at for each ideal does not come to the end.
const PAIRS_PER_IDEAL: u64 = 8;

/// What a chain of parts is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// The largest load of its parts. Each host has one part.
    Largest,
    /// The sum of their times: the latency when they run one after the other. A part may be on hosts, as many as it takes.
    Sum,
}

/// What a search found.
pub(super) struct Search {
    /// A solution below the limit: its value and the device of each unit. It is the best of all when the search is complete.
    pub(super) better: Option<(Nanos, Vec<u32>)>,
    /// Nothing was left out.
    pub(super) complete: bool,
}

/// Searches for a value below `limit`. Looks at `budget` pairs of ideals at most.
pub(super) fn search(calls: &Calls, goal: Goal, limit: Nanos, budget: u64) -> Search {
    let most = MOST_IDEALS.min(usize::try_from(budget / PAIRS_PER_IDEAL).unwrap_or(usize::MAX));
    let Some(ideals) = Ideals::of(calls, &calls.bound_units(), most) else {
        return Search {
            better: None,
            complete: false,
        };
    };
    let n_hosts = if goal == Goal::Sum {
        0
    } else {
        calls.hosts.len()
    };
    let states = (calls.accelerators.len() + 1) * (n_hosts + 1);
    let mut table = Table {
        calls,
        goal,
        n_hosts,
        limit,
        states,
        value: vec![Nanos::INFINITY; ideals.next.len() * states],
        from: vec![(u32::MAX, false); ideals.next.len() * states],
        seen: vec![u32::MAX; ideals.next.len()],
        budget,
        absorbed: most_absorbed(calls),
        least: Nanos::ZERO,
    };
    table.value[0] = Nanos::ZERO;
    let mut part = Part::new(calls);
    for ideal in 0..ideals.next.len() as u32 {
        let own = &table.value[ideal as usize * states..][..states];
        table.least = own.iter().copied().min().unwrap_or_default();
        if !table.least.is_finite() {
            continue;
        }
        if !table.grow(&ideals, ideal, ideal, &mut part) {
            return Search {
                better: None,
                complete: false,
            };
        }
    }
    Search {
        better: table.best(&ideals),
        complete: true,
    }
}

/// All ideals of the forward graph, or of a part of it that lies between two of them, smaller ones first.
pub(super) struct Ideals {
    /// Units that can be added, and the ideal that gives.
    pub(super) next: Vec<Vec<(u32, u32)>>,
    sets: Vec<Vec<u64>>,
    /// Units of each ideal.
    pub(super) size: Vec<u32>,
    /// Accelerator time of the units that are not in it.
    rest: Vec<Nanos>,
}

impl Ideals {
    /// Ideals of the graph of `units`, in topological order; `None` when there are more than `most`.
    pub(super) fn of(calls: &Calls, units: &[u32], most: usize) -> Option<Ideals> {
        let mut is_part = vec![false; calls.units.len()];
        units.iter().for_each(|&u| is_part[u as usize] = true);
        let words = calls.units.len().div_ceil(64).max(1);
        let is_ready = |u: u32, set: &[u64]| {
            let has = |v: u32| set[v as usize / 64] >> (v % 64) & 1 == 1;
            is_part[u as usize]
                && calls.units[u as usize]
                    .before
                    .iter()
                    .all(|&v| has(v) || !is_part[v as usize])
        };
        let time = |u: u32| {
            Some(calls.units[u as usize].accelerator)
                .filter(|t| t.is_finite())
                .unwrap_or_default()
        };
        let mut index: HashMap<Vec<u64>, u32> = HashMap::from([(vec![0; words], 0)]);
        let mut ideals = Ideals {
            next: Vec::new(),
            sets: vec![vec![0u64; words]],
            size: vec![0],
            rest: vec![units.iter().map(|&u| time(u)).sum()],
        };
        // Units that can be added to each set.
        let mut ready = vec![
            units
                .iter()
                .copied()
                .filter(|&u| is_ready(u, &ideals.sets[0]))
                .collect::<Vec<u32>>(),
        ];
        // Ideals come in order of size, for each is found from one that has a unit less.
        while ideals.next.len() < ideals.sets.len() {
            let at = ideals.next.len();
            let open = std::mem::take(&mut ready[at]);
            let mut row = Vec::with_capacity(open.len());
            for &u in &open {
                let mut larger = ideals.sets[at].clone();
                larger[u as usize / 64] |= 1 << (u % 64);
                let id = *index
                    .entry(larger.clone())
                    .or_insert(ideals.sets.len() as u32);
                if id as usize == ideals.sets.len() {
                    if id as usize == most {
                        return None;
                    }
                    let fresh = calls.units[u as usize]
                        .after
                        .iter()
                        .copied()
                        .filter(|&v| is_ready(v, &larger));
                    ready.push(
                        open.iter()
                            .copied()
                            .filter(|&v| v != u)
                            .chain(fresh)
                            .collect(),
                    );
                    ideals.rest.push(ideals.rest[at].saturating_sub(time(u)));
                    ideals.size.push(ideals.size[at] + 1);
                    ideals.sets.push(larger);
                }
                row.push((u, id));
            }
            ideals.next.push(row);
        }
        Some(ideals)
    }

    /// For each ideal the units that can be taken from it, and the ideal that gives.
    pub(super) fn previous(&self) -> Vec<Vec<(u32, u32)>> {
        let mut previous = vec![Vec::new(); self.next.len()];
        for (id, next) in self.next.iter().enumerate() {
            next.iter()
                .for_each(|&(unit, larger)| previous[larger as usize].push((unit, id as u32)));
        }
        previous
    }

    /// Those of `units` that are in the larger of two ideals and not in the smaller.
    pub(super) fn difference(&self, units: &[u32], small: u32, large: u32) -> Vec<u32> {
        let has =
            |ideal: u32, u: u32| self.sets[ideal as usize][u as usize / 64] >> (u % 64) & 1 == 1;
        units
            .iter()
            .copied()
            .filter(|&u| has(large, u) && !has(small, u))
            .collect()
    }
}

/// Least largest loads of ideals, by accelerators and hosts used.
struct Table<'c> {
    calls: &'c Calls,
    goal: Goal,
    /// Hosts that are counted.
    n_hosts: usize,
    limit: Nanos,
    states: usize,
    value: Vec<Nanos>,
    /// The ideal before, and whether the difference is on a host.
    from: Vec<(u32, bool)>,
    /// Least value of the ideal that parts grow from.
    least: Nanos,
    /// Ideal from which each was last reached.
    seen: Vec<u32>,
    budget: u64,
    absorbed: Option<(u128, u128)>,
}

impl Table<'_> {
    /// Relaxes all ideals above `first` whose difference to it can be a part, depth first from `at`. False when the budget is spent.
    fn grow(&mut self, ideals: &Ideals, first: u32, at: u32, part: &mut Part) -> bool {
        for &(unit, id) in &ideals.next[at as usize] {
            if std::mem::replace(&mut self.seen[id as usize], first) == first {
                continue;
            }
            if self.budget == 0 {
                return false;
            }
            self.budget -= 1;
            part.add(unit);
            if self.may_grow(part) {
                self.relax(ideals, first, id, part);
                if !self.grow(ideals, first, id, part) {
                    return false;
                }
            }
            part.remove(unit);
        }
        true
    }

    /// Whether a larger part could be of use.
    fn may_grow(&self, part: &Part) -> bool {
        match self.goal {
            Goal::Largest => part.may_grow(self.limit),
            Goal::Sum => {
                let left = self.limit.saturating_sub(self.least);
                part.may_grow_on_accelerator(left) || part.on_many_hosts() < left
            }
        }
    }

    fn relax(&mut self, ideals: &Ideals, first: u32, to: u32, part: &Part) {
        let on_host = if self.goal == Goal::Sum {
            part.on_many_hosts()
        } else {
            part.on_host()
        };
        let loads = [(part.on_accelerator(), false), (on_host, true)];
        // A sum begins at the least value of where the part begins.
        let before = if self.goal == Goal::Sum {
            self.least
        } else {
            Nanos::ZERO
        };
        for (load, on_host) in loads.into_iter().filter(|l| before + l.0 < self.limit) {
            let step = match (on_host, self.goal) {
                (false, _) => self.n_hosts + 1,
                (true, Goal::Largest) => 1,
                (true, Goal::Sum) => 0,
            };
            for state in 0..self.states {
                let here = self.value[first as usize * self.states + state];
                let is_full = step == 1 && on_host && state % (self.n_hosts + 1) == self.n_hosts;
                if !here.is_finite() || is_full || state + step >= self.states {
                    continue;
                }
                let entry = to as usize * self.states + state + step;
                let value = if self.goal == Goal::Sum {
                    here + load
                } else {
                    here.max(load)
                };
                let can_finish = || {
                    self.goal == Goal::Sum
                        || self.can_finish(ideals.rest[to as usize], state + step)
                };
                if value < self.value[entry] && value < self.limit && can_finish() {
                    (self.value[entry], self.from[entry]) = (value, (first, on_host));
                }
            }
        }
    }

    /// Whether the devices that are left could do the rest below the limit if copies were free.
    fn can_finish(&self, rest: Nanos, state: usize) -> bool {
        let n_hosts = self.n_hosts;
        let (accelerators, hosts) = (state / (n_hosts + 1), state % (n_hosts + 1));
        let Some((gain, per)) = self.absorbed else {
            return true;
        };
        let limit = u128::from(self.limit.0);
        let left = limit * (self.calls.accelerators.len() - accelerators) as u128;
        let on_hosts = (limit * (n_hosts - hosts) as u128 * gain).div_ceil(per);
        u128::from(rest.0) <= left + on_hosts
    }

    fn best(&self, ideals: &Ideals) -> Option<(Nanos, Vec<u32>)> {
        let full = ideals.next.len() - 1;
        let mut state = (0..self.states).min_by_key(|&s| self.value[full * self.states + s])?;
        let value = self.value[full * self.states + state];
        if !value.is_finite() {
            return None;
        }
        let mut slices = Vec::new();
        let mut at = full as u32;
        while at != 0 {
            let (before, on_host) = self.from[at as usize * self.states + state];
            let (a, h) = (state / (self.n_hosts + 1), state % (self.n_hosts + 1));
            let (device, step) = match (on_host, self.goal) {
                (false, _) => (self.calls.accelerators[a - 1], self.n_hosts + 1),
                (true, Goal::Largest) => (self.calls.hosts[h - 1], 1),
                (true, Goal::Sum) => (self.calls.hosts[0], 0),
            };
            slices.push((device, ideals.between(before, at)));
            state -= step;
            at = before;
        }
        slices.reverse();
        Some((value, self.calls.of_slices(&slices)))
    }
}

impl Ideals {
    /// Units of the larger of two nested ideals that are not in the smaller.
    fn between(&self, small: u32, large: u32) -> Vec<u32> {
        let mut parent = HashMap::from([(small, (small, 0))]);
        let mut stack = vec![small];
        while let Some(at) = stack.pop() {
            if at == large {
                break;
            }
            for &(unit, id) in self.next[at as usize].iter().filter(|n| n.1 <= large) {
                parent.entry(id).or_insert_with(|| {
                    stack.push(id);
                    (at, unit)
                });
            }
        }
        let mut units = Vec::new();
        let mut at = large;
        while at != small {
            let (before, unit) = parent[&at];
            units.push(unit);
            at = before;
        }
        units
    }
}

/// The most accelerator time that a host takes over in how much of its own time; `None` when there is no limit to that.
fn most_absorbed(calls: &Calls) -> Option<(u128, u128)> {
    let mut most = (0u128, 1u128);
    for u in calls
        .units
        .iter()
        .filter(|u| u.host.is_finite() && u.accelerator.is_finite())
    {
        let ratio = (u128::from(u.accelerator.0), u128::from(u.host.0));
        if ratio.1 == 0 && ratio.0 > 0 {
            return None;
        }
        if ratio.0 * most.1 > most.0 * ratio.1 {
            most = ratio;
        }
    }
    Some(most)
}
