//! Work divided by devices.
//!
//! The least time `T` in which work can be divided among devices that differ is a linear program:
//! each group is spread over devices, no device gets more than `T`, and none holds more than its
//! memory. Any weights of its dual give a valid bound: with a price `a_d` for time on device `d`
//! and `b_d` for memory there, each group pays at least `min_d (a_d w_gd + b_d m_g)`, so `T sum_d
//! a_d >= sum_g min_d (..) - sum_d b_d M_d`. Weights are found by search and are whole numbers, so
//! that the bound is exact whatever the search found.

use crate::Nanos;
use crate::problem::Problem;

/// Weights are multiples of one in this many.
const SCALE: u64 = 1 << 16;

/// Evaluations of all weights times groups times devices that the search may cost.
const WORK: usize = 5_000_000;

/// Groups as rows of a table: time on each device and bytes held for the whole step.
struct Work {
    n_devices: usize,
    time: Vec<u64>,
    bytes: Vec<u64>,
    limits: Vec<Option<u64>>,
}

/// Prices of time and memory, by class of devices.
#[derive(Clone)]
struct Prices {
    time: Vec<u64>,
    memory: Vec<u64>,
}

/// Least time in which all work could be divided among the devices, without memory limits.
pub(super) fn area(p: &Problem) -> Nanos {
    best(&Work::new(p, false))
}

/// Least time in which all work could be divided among the devices such that resident bytes fit.
pub(super) fn area_within_memory(p: &Problem) -> Nanos {
    let limited = p.is_limited();
    if limited {
        best(&Work::new(p, true))
    } else {
        Nanos::ZERO
    }
}

impl Work {
    fn new(p: &Problem, memory: bool) -> Work {
        let n = p.n_devices();
        let sum = |g: usize, d: usize| {
            p.members
                .row(g)
                .iter()
                .map(|&t| p.cost(t as usize, d))
                .sum::<Nanos>()
                .0
        };
        let time = (0..p.n_groups())
            .flat_map(|g| (0..n).map(move |d| sum(g, d)))
            .collect();
        let bytes = if memory {
            resident_shares(p)
        } else {
            vec![0; p.n_groups()]
        };
        let limits = p
            .devices
            .iter()
            .map(|d| d.memory.filter(|_| memory).map(|b| b.0))
            .collect();
        Work {
            n_devices: n,
            time,
            bytes,
            limits,
        }
    }

    /// The bound that the prices prove, rounded up: times are whole.
    fn value(&self, class: &[usize], prices: &Prices) -> u64 {
        let weight: u128 = class.iter().map(|&c| u128::from(prices.time[c])).sum();
        let price = |times: &[u64], bytes: u64, d: usize| {
            let time = if times[d] == u64::MAX {
                return u128::MAX;
            } else {
                times[d]
            };
            u128::from(prices.time[class[d]]) * u128::from(time)
                + u128::from(prices.memory[class[d]]) * u128::from(bytes)
        };
        let rows = self.time.chunks_exact(self.n_devices).zip(&self.bytes);
        let least = |(times, &bytes): (&[u64], &u64)| {
            (0..self.n_devices).map(|d| price(times, bytes, d)).min()
        };
        let paid: u128 = rows.filter_map(least).fold(0, u128::saturating_add);
        let held: u128 = (0..self.n_devices)
            .map(|d| u128::from(prices.memory[class[d]]) * u128::from(self.limits[d].unwrap_or(0)))
            .fold(0, u128::saturating_add);
        if weight == 0 {
            0
        } else {
            u64::try_from(paid.saturating_sub(held).div_ceil(weight)).unwrap_or(u64::MAX)
        }
    }

    /// Devices with equal columns get one price: the bound is concave in the prices and does not
    /// change when such devices change places.
    fn classes(&self) -> Vec<usize> {
        let column = |d: usize| self.time.iter().skip(d).step_by(self.n_devices);
        let same = |a: usize, b: usize| self.limits[a] == self.limits[b] && column(a).eq(column(b));
        let mut firsts: Vec<usize> = Vec::new();
        let mut class = Vec::new();
        for d in 0..self.n_devices {
            let known = firsts.iter().position(|&f| same(f, d));
            class.push(known.unwrap_or_else(|| {
                firsts.push(d);
                firsts.len() - 1
            }));
        }
        class
    }
}

/// Resident bytes of each group. A constant that several groups share counts for each with its
/// share: a device that has one of them holds all of it.
fn resident_shares(p: &Problem) -> Vec<u64> {
    let mut pairs: Vec<(u32, u32)> = Vec::new();
    for t in 0..p.n_tasks() {
        pairs.extend(p.constants_of.row(t).iter().map(|&c| (c, p.group_of[t])));
    }
    pairs.sort_unstable();
    pairs.dedup();
    let mut users = vec![0u64; p.constants.len()];
    pairs.iter().for_each(|&(c, _)| users[c as usize] += 1);
    let mut bytes = vec![0u64; p.n_groups()];
    for t in 0..p.n_tasks() {
        let sum = &mut bytes[p.group_of[t] as usize];
        *sum = sum.saturating_add(p.resident[t].0);
    }
    for (c, g) in pairs {
        let sum = &mut bytes[g as usize];
        *sum = sum.saturating_add(p.constants[c as usize].0 / users[c as usize]);
    }
    bytes
}

fn best(work: &Work) -> Nanos {
    if work.time.is_empty() {
        return Nanos::ZERO;
    }
    let class = work.classes();
    let n_classes = class.iter().max().map_or(0, |c| c + 1);
    let mut evaluations = (WORK / work.time.len()).clamp(8, 2_000);
    let mut value = |prices: &Prices| {
        evaluations = evaluations.saturating_sub(1);
        (evaluations > 0).then(|| work.value(&class, prices))
    };
    let no_memory = vec![0; n_classes];
    let mut starts = vec![Prices {
        time: vec![SCALE; n_classes],
        memory: no_memory.clone(),
    }];
    for c in (0..n_classes).filter(|_| n_classes > 1) {
        let time = (0..n_classes)
            .map(|k| if k == c { SCALE } else { 0 })
            .collect();
        starts.push(Prices {
            time,
            memory: no_memory.clone(),
        });
    }
    let tried = starts.into_iter().filter_map(|s| Some((value(&s)?, s)));
    let Some((mut least, mut prices)) = tried.max_by_key(|(v, _)| *v) else {
        return Nanos::ZERO;
    };
    // One price only scales both sides.
    let is_settled = n_classes == 1 && work.limits.iter().all(Option::is_none);
    let mut step = if is_settled { 0 } else { SCALE / 2 };
    while step > 0 {
        match improve(&mut value, &mut prices, least, step, &work.limits, &class) {
            Some(better) if better > least => least = better,
            Some(_) => step /= 2,
            None => break,
        }
    }
    Nanos(least)
}

/// One pass over all prices, each moved by `step` either way where that proves more; `None` when no
/// evaluations are left.
fn improve(
    value: &mut impl FnMut(&Prices) -> Option<u64>,
    prices: &mut Prices,
    mut least: u64,
    step: u64,
    limits: &[Option<u64>],
    class: &[usize],
) -> Option<u64> {
    for c in 0..prices.time.len() {
        let limited = class
            .iter()
            .zip(limits)
            .any(|(&k, l)| k == c && l.is_some());
        for memory in [false, true].into_iter().take(1 + usize::from(limited)) {
            for up in [true, false] {
                let mut tried = prices.clone();
                let price = if memory {
                    &mut tried.memory[c]
                } else {
                    &mut tried.time[c]
                };
                *price = if up {
                    *price + step
                } else {
                    price.saturating_sub(step)
                };
                let v = value(&tried)?;
                if v > least {
                    (least, *prices) = (v, tried);
                }
            }
        }
    }
    Some(least)
}
