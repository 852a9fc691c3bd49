//! Throughput of a stream of samples: the largest load of a device, as small as can be.
//!
//! Upper bounds come from slices of topological orders (the slicing of Archer et al., arXiv:2311.03703), the proof from all nested ideals
//! ([`super::ideals`]) where there are not too many, else from [`fractional`].

use super::Calls;
use super::Solution;
use super::ideals;
use crate::Nanos;

/// What a search may do.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Topological orders that are sliced.
    pub orders: usize,
    /// Pairs of ideals that are looked at.
    pub pairs: u64,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget {
            orders: 8,
            pairs: 20_000_000,
        }
    }
}

/// The smallest largest load that is found, contiguous. `None` when nothing that fits is found.
pub fn solve(calls: &Calls, budget: Budget) -> Option<Solution> {
    let mut best: Option<(Nanos, Vec<u32>)> = None;
    for seed in 0..budget.orders as u64 {
        let order = order(calls, seed);
        if let Some(found) = slice(calls, &order)
            && best.as_ref().is_none_or(|b| found.0 < b.0)
        {
            best = Some(found);
        }
    }
    let bound = fractional(calls);
    let known = best.as_ref().map_or(Nanos::INFINITY, |b| b.0);
    let (mut lower_bound, mut name) = (bound, "fractional");
    if known > bound {
        let search = ideals::search(calls, ideals::Goal::Largest, known, budget.pairs);
        best = search.better.or(best);
        if search.complete {
            (lower_bound, name) = (best.as_ref().map_or(Nanos::INFINITY, |b| b.0), "ideals");
        }
    }
    let (value, of_unit) = best?;
    debug_assert_eq!(calls.largest_load(&of_unit), Some(value));
    Some(Solution {
        device: calls.devices(&of_unit),
        value,
        lower_bound,
        bound: name,
    })
}

/// What a set of units costs as a call, kept up to date as units come and go.
#[derive(Clone, Debug)]
pub(super) struct Part<'c> {
    calls: &'c Calls,
    /// Units of each tensor, its producer included, that are inside.
    ends: Vec<u32>,
    pub(super) accelerator: Nanos,
    pub(super) host: Nanos,
    pub(super) bytes: u128,
    pub(super) copies: Nanos,
    /// Units that an accelerator or a host cannot run.
    strangers: [u32; 2],
    /// When each unit inside would end if hosts ran the part, as many as it takes.
    ends_at: Vec<Option<Nanos>>,
    /// The latest of these, after each unit that came.
    latest: Vec<Nanos>,
}

impl<'c> Part<'c> {
    pub(super) fn new(calls: &'c Calls) -> Part<'c> {
        let zero = Nanos::ZERO;
        let ends = vec![0; calls.copied.len()];
        let ends_at = vec![None; calls.units.len()];
        let (strangers, latest) = ([0; 2], Vec::new());
        Part {
            calls,
            ends,
            accelerator: zero,
            host: zero,
            bytes: 0,
            copies: zero,
            strangers,
            ends_at,
            latest,
        }
    }

    /// Adds a unit, of which nothing that comes after it is inside.
    pub(super) fn add(&mut self, unit: u32) {
        let u = &self.calls.units[unit as usize];
        for (time, sum, strangers) in self.times(u.accelerator, u.host) {
            if time.is_finite() {
                *sum += time
            } else {
                *strangers += 1
            }
        }
        self.bytes += u.bytes;
        let before = u
            .before
            .iter()
            .filter_map(|&v| self.ends_at[v as usize])
            .max()
            .unwrap_or_default();
        self.ends_at[unit as usize] = Some(before + u.host);
        self.latest.push(self.on_many_hosts().max(before + u.host));
        u.tensors.iter().for_each(|&x| self.end(x, 1));
    }

    /// Removes the unit that came last.
    pub(super) fn remove(&mut self, unit: u32) {
        let u = &self.calls.units[unit as usize];
        for (time, sum, strangers) in self.times(u.accelerator, u.host) {
            if time.is_finite() {
                sum.0 -= time.0
            } else {
                *strangers -= 1
            }
        }
        self.bytes -= u.bytes;
        self.ends_at[unit as usize] = None;
        self.latest.pop();
        u.tensors.iter().for_each(|&x| self.end(x, -1));
    }

    fn times(&mut self, accelerator: Nanos, host: Nanos) -> [(Nanos, &mut Nanos, &mut u32); 2] {
        let [a, h] = &mut self.strangers;
        [
            (accelerator, &mut self.accelerator, a),
            (host, &mut self.host, h),
        ]
    }

    /// A tensor is copied once when some but not all of its ends are inside: in when it is made outside, out when it is made here.
    fn end(&mut self, x: u32, by: i32) {
        let copied = &self.calls.copied[x as usize];
        let all = copied.consumers.len() as u32 + 1;
        let crosses = |ends: u32| ends > 0 && ends < all;
        let before = self.ends[x as usize];
        let after = before.wrapping_add_signed(by);
        self.ends[x as usize] = after;
        match (crosses(before), crosses(after)) {
            (false, true) => self.copies += copied.copy,
            (true, false) => self.copies.0 -= copied.copy.0,
            _ => {}
        }
    }

    /// Load of an accelerator that has this part; infinite when it cannot.
    pub(super) fn on_accelerator(&self) -> Nanos {
        let fits = self.strangers[0] == 0 && self.bytes <= self.calls.memory;
        if fits {
            self.accelerator + self.copies
        } else {
            Nanos::INFINITY
        }
    }

    /// Load of a host.
    pub(super) fn on_host(&self) -> Nanos {
        let runs = self.strangers[1] == 0 && !self.calls.hosts.is_empty();
        if runs { self.host } else { Nanos::INFINITY }
    }

    /// How long hosts take for it, as many as it takes.
    pub(super) fn on_many_hosts(&self) -> Nanos {
        self.latest.last().copied().unwrap_or_default()
    }

    /// Whether a part that holds this one and more could have a load below `limit`: copies may vanish, the rest only grows.
    pub(super) fn may_grow(&self, limit: Nanos) -> bool {
        self.may_grow_on_accelerator(limit) || self.on_host() < limit
    }

    /// The same for accelerators only.
    pub(super) fn may_grow_on_accelerator(&self, limit: Nanos) -> bool {
        self.strangers[0] == 0 && self.bytes <= self.calls.memory && self.accelerator < limit
    }
}

/// A topological order of the units. Seed 0 goes deep, 1 goes broad, others choose at random among what is ready, mostly deep.
pub(super) fn order(calls: &Calls, seed: u64) -> Vec<u32> {
    let n = calls.units.len();
    let mut waiting: Vec<usize> = calls.units.iter().map(|u| u.before.len()).collect();
    let is_source = |u: &u32| waiting[*u as usize] == 0 && !calls.units[*u as usize].is_free;
    let mut ready: Vec<u32> = (0..n as u32).rev().filter(is_source).collect();
    let mut state = seed;
    let mut dice = |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let mut order = Vec::with_capacity(n);
    while !ready.is_empty() {
        let last = ready.len() - 1;
        let at = match seed {
            0 => last,
            1 => 0,
            _ if dice(4) == 0 => dice(ready.len() as u64) as usize,
            _ => last,
        };
        let u = ready.remove(at);
        order.push(u);
        for &v in &calls.units[u as usize].after {
            waiting[v as usize] -= 1;
            if waiting[v as usize] == 0 {
                ready.push(v);
            }
        }
    }
    order
}

/// The best slices of an order: the value and the device of each unit.
fn slice(calls: &Calls, order: &[u32]) -> Option<(Nanos, Vec<u32>)> {
    let (n, n_hosts) = (order.len(), calls.hosts.len());
    let states = (calls.accelerators.len() + 1) * (n_hosts + 1);
    let state = |accelerators: usize, hosts: usize| accelerators * (n_hosts + 1) + hosts;
    let mut best = vec![Nanos::INFINITY; (n + 1) * states];
    // Where the last slice begins, and whether it is on a host.
    let mut from = vec![(usize::MAX, false); (n + 1) * states];
    best[0] = Nanos::ZERO;
    for first in 0..n {
        let mut part = Part::new(calls);
        let least = best[first * states..][..states].iter().min().copied()?;
        if !least.is_finite() {
            continue;
        }
        for end in first + 1..=n {
            part.add(order[end - 1]);
            let (accelerator, host) = (part.on_accelerator(), part.on_host());
            if !part.may_grow(Nanos::INFINITY) {
                break;
            }
            for a in 0..=calls.accelerators.len() {
                for h in 0..=n_hosts {
                    let here = best[first * states + state(a, h)];
                    let mut relax = |to: usize, load: Nanos, on_host: bool| {
                        let value = here.max(load);
                        if value < best[end * states + to] {
                            best[end * states + to] = value;
                            from[end * states + to] = (first, on_host);
                        }
                    };
                    if a < calls.accelerators.len() {
                        relax(state(a + 1, h), accelerator, false);
                    }
                    if h < n_hosts {
                        relax(state(a, h + 1), host, true);
                    }
                }
            }
        }
    }
    let last = (0..states).min_by_key(|&s| best[n * states + s])?;
    let value = best[n * states + last];
    if !value.is_finite() {
        return None;
    }
    let (mut end, mut a, mut h) = (n, last / (n_hosts + 1), last % (n_hosts + 1));
    let mut slices = Vec::new();
    while end > 0 {
        let (first, on_host) = from[end * states + state(a, h)];
        let device = if on_host {
            calls.hosts[h - 1]
        } else {
            calls.accelerators[a - 1]
        };
        slices.push((device, order[first..end].to_vec()));
        *(if on_host { &mut h } else { &mut a }) -= 1;
        end = first;
    }
    slices.reverse();
    Some((value, calls.of_slices(&slices)))
}

/// Least largest load without copies, contiguity and memory, work divided as one likes: hosts take first what they are best at. A unit that no device
/// can do in that time counts as a whole.
pub fn fractional(calls: &Calls) -> Nanos {
    let mut units: Vec<(u128, u128)> = Vec::new();
    let finite = |n: Nanos| {
        if n.is_finite() {
            u128::from(n.0)
        } else {
            u128::MAX
        }
    };
    units.extend(
        calls
            .units
            .iter()
            .map(|u| (finite(u.accelerator), finite(u.host))),
    );
    // By what an accelerator gains for each unit of host time, most first. Work for hosts only goes before all.
    units.sort_by(|a, b| compare(*b, *a));
    let enough = |limit: u128| {
        let mut room = limit * calls.hosts.len() as u128;
        let mut left = 0u128;
        for &(accelerator, host) in &units {
            if accelerator.min(host) > limit {
                return false;
            }
            if host > limit {
                left += accelerator;
            } else if host <= room {
                room -= host;
            } else if accelerator == u128::MAX {
                return false;
            } else {
                // Rounded down: less is left than there would be.
                left += accelerator * (host - room) / host;
                room = 0;
            }
        }
        left <= limit * calls.accelerators.len() as u128
    };
    let (mut low, mut high) = (0u128, 1u128 << 63);
    while low < high {
        let middle = (low + high) / 2;
        if enough(middle) {
            high = middle
        } else {
            low = middle + 1
        }
    }
    Nanos(low as u64)
}

/// Compares accelerator time for each unit of host time.
fn compare(a: (u128, u128), b: (u128, u128)) -> std::cmp::Ordering {
    let only = |x: (u128, u128)| x.0 == u128::MAX;
    let key = |x: (u128, u128)| if x.1 == u128::MAX { (0, 1) } else { x };
    let ((a0, a1), (b0, b1)) = (key(a), key(b));
    only(a)
        .cmp(&only(b))
        .then_with(|| match (only(a), only(b)) {
            (false, false) => (a0 * b1).cmp(&(b0 * a1)),
            _ => std::cmp::Ordering::Equal,
        })
}
