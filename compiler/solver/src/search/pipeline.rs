//! Throughput of ordinary problems: samples (micro-batches) follow each other, every one the same,
//! a period apart.
//!
//! Every sample runs like the one before it, a period later: `M` samples take `latency + (M - 1) *
//! period`. No schedule of a placement has a shorter period than the largest load of a resource: of
//! a device, the times of its tasks; of a link, the times of its transfers. That period can always
//! be had, but a longer one may have so much less latency that it is better for `M` samples. A
//! device holds the tensors of all samples in flight on it; for a training step the 1F1B order of
//! PipeDream (Narayanan et al., SOSP 2019) keeps these few.

use crate::memory::repair;
use crate::problem::Problem;
use crate::schedule::timeline::{Timeline, Transfer};
use crate::schedule::{algorithms, ranks};
use crate::search::slices::{self, Goal};
use crate::search::symmetry::{self, Reduced, distinct_devices};
use crate::{Bytes, LinkOrder, Nanos, simulate};

/// A schedule that repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Periodic {
    /// The first sample.
    pub sample: Timeline,
    /// Time from the start of a sample to the start of the next.
    pub period: Nanos,
    /// No placement takes less time for the samples that were asked for.
    pub lower_bound: Nanos,
    /// Most bytes that each device holds at a time, once many samples are under way.
    pub peak_bytes: Vec<Bytes>,
}

impl Periodic {
    /// Time of `n` samples.
    pub fn time(&self, n: u64) -> Nanos {
        if n == 0 {
            Nanos::ZERO
        } else {
            self.sample.makespan + self.period.times(n - 1)
        }
    }

    /// Bytes over the limits of all devices.
    pub fn excess(&self, p: &Problem) -> Bytes {
        let over = |(d, peak): (usize, &Bytes)| {
            p.devices[d]
                .memory
                .map_or(Bytes::ZERO, |m| peak.saturating_sub(m))
        };
        self.peak_bytes.iter().enumerate().map(over).sum()
    }
}

/// Number of samples, and the effort of the search.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Samples that follow each other, at least one.
    pub samples: u64,
    /// Tasks that evaluations of moves may look at.
    pub tasks: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            samples: 16,
            tasks: 10_000_000,
        }
    }
}

/// The schedule that takes least time for `options.samples` samples, of slices and single devices,
/// as they are and with groups moved while the largest load falls; bytes over the memory limits go
/// before time.
pub fn solve(p: &Problem, options: Options) -> Periodic {
    match symmetry::reduced(p, &[]) {
        Some(reduced) => expanded(&reduced, solve_whole(&reduced.problem, options)),
        None => solve_whole(p, options),
    }
}

/// The schedule as the whole problem has it.
fn expanded(reduced: &Reduced, found: Periodic) -> Periodic {
    let n_devices = reduced.n_devices_of_whole;
    let mut peak_bytes = vec![Bytes::ZERO; n_devices];
    for (&d, peak) in reduced.devices.iter().zip(found.peak_bytes) {
        peak_bytes[d] = peak;
    }
    Periodic {
        sample: reduced.expand(found.sample),
        peak_bytes,
        ..found
    }
}

fn solve_whole(p: &Problem, options: Options) -> Periodic {
    let mut starts = slices::cuts(p, Goal::Bottleneck);
    starts.extend(
        distinct_devices(p)
            .into_iter()
            .map(|d| algorithms::single(p, d as usize)),
    );
    let share = options.tasks / starts.len() as u64;
    let lower_bound = lower_bound(p, options.samples);
    let mut best: Option<((Bytes, Nanos), Periodic)> = None;
    let mut offer = |device: &[u32]| {
        for found in periodic(p, device, lower_bound) {
            let key = (found.excess(p), found.time(options.samples));
            if best.as_ref().is_none_or(|b| key < b.0) {
                best = Some((key, found));
            }
        }
    };
    for mut device in starts {
        offer(&device);
        spread(p, &mut device, share);
        offer(&device);
    }
    best.map(|b| b.1)
        .expect("a problem has a device, and so a start")
}

/// No placement takes less time for `samples` samples: the longest path through one, each task
/// where it is fastest, and a period for each of the others, which is at least the mean work of a
/// device and the work of each group.
pub fn lower_bound(p: &Problem, samples: u64) -> Nanos {
    let all: u128 = (0..p.n_tasks())
        .map(|t| u128::from(p.least_cost(t).0))
        .sum();
    let mean = Nanos(u64::try_from(all.div_ceil(p.n_devices() as u128)).unwrap_or(u64::MAX));
    let group = |g: usize| {
        let on = |d: usize| {
            p.members
                .row(g)
                .iter()
                .map(|&t| p.cost(t as usize, d))
                .sum::<Nanos>()
        };
        (0..p.n_devices()).map(on).min().unwrap_or_default()
    };
    let period = (0..p.n_groups()).map(group).fold(mean, Nanos::max);
    let way = ranks::least_tails(p).into_iter().max().unwrap_or_default();
    way.max(period) + period.times(samples.saturating_sub(1))
}

/// Loads of devices, then of links.
fn loads(p: &Problem, device: &[u32]) -> Vec<Nanos> {
    let mut loads = Loads::new(p);
    loads.measure(p, device);
    loads.of
}

/// Loads of devices, then of links.
struct Loads {
    of: Vec<Nanos>,
    /// Resources that have a load.
    loaded: Vec<u32>,
    /// By device the tensor that was seen there last.
    seen: Vec<u32>,
}

impl Loads {
    fn new(p: &Problem) -> Loads {
        let n = p.n_devices();
        Loads {
            of: vec![Nanos::ZERO; n + n * n],
            loaded: Vec::new(),
            seen: vec![u32::MAX; n],
        }
    }

    fn measure(&mut self, p: &Problem, device: &[u32]) {
        let n = p.n_devices();
        for r in self.loaded.drain(..) {
            self.of[r as usize] = Nanos::ZERO;
        }
        self.seen.fill(u32::MAX);
        for (t, &d) in device.iter().enumerate() {
            self.add(d as usize, p.cost(t, d as usize));
        }
        for (x, tensor) in p.tensors.iter().enumerate() {
            let from = device[tensor.producer as usize] as usize;
            for &c in p.consumers.row(x) {
                let to = device[c as usize] as usize;
                if to != from && self.seen[to] != x as u32 {
                    self.seen[to] = x as u32;
                    self.add(n + from * n + to, p.transfer(x, from, to));
                }
            }
        }
    }

    fn add(&mut self, resource: usize, load: Nanos) {
        if load > Nanos::ZERO {
            if self.of[resource] == Nanos::ZERO {
                self.loaded.push(resource as u32);
            }
            self.of[resource] += load;
        }
    }

    /// Loads of a placement above zero, largest first.
    fn sorted(&mut self, p: &Problem, device: &[u32]) -> Vec<Nanos> {
        self.measure(p, device);
        let mut sorted: Vec<Nanos> = self.loaded.iter().map(|&r| self.of[r as usize]).collect();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        sorted
    }

    fn least_loaded_device(&mut self, p: &Problem, device: &[u32]) -> Option<u32> {
        self.measure(p, device);
        (0..p.n_devices() as u32).min_by_key(|&d| self.of[d as usize])
    }
}

/// Moves groups of the busiest device, or of the ends of the busiest link, to other devices as long
/// as the loads, largest first, fall.
fn spread(p: &Problem, device: &mut [u32], budget: u64) {
    let mut loads = Loads::new(p);
    let mut best = loads.sorted(p, device);
    let cost = (p.n_tasks() + p.consumers.n_items()) as u64;
    let mut left = budget / cost.max(1);
    let mut group = 0;
    let mut quiet = 0;
    while quiet < p.n_groups() && left > 0 {
        let members = p.members.row(group);
        let old = device[members[0] as usize];
        quiet += 1;
        for d in neighbours(p, device, members, &mut loads) {
            if left == 0 || !p.cost(members[0] as usize, d as usize).is_finite() {
                continue;
            }
            left -= 1;
            members.iter().for_each(|&t| device[t as usize] = d);
            let moved = loads.sorted(p, device);
            if moved < best {
                (best, quiet) = (moved, 0);
                break;
            }
            members.iter().for_each(|&t| device[t as usize] = old);
        }
        group = (group + 1) % p.n_groups();
    }
}

/// Other devices with which tasks exchange tensors, and the least loaded device.
fn neighbours(p: &Problem, device: &[u32], members: &[u32], loads: &mut Loads) -> Vec<u32> {
    let around = members
        .iter()
        .flat_map(|&t| p.predecessors(t as usize).chain(p.successors(t as usize)));
    let mut found: Vec<u32> = around.map(|t| device[t as usize]).collect();
    found.extend(loads.least_loaded_device(p, device));
    found.sort_unstable();
    found.dedup();
    found.retain(|&d| d != device[members[0] as usize]);
    found
}

/// Schedules of a placement: with its shortest period, and with some longer ones.
pub fn periodic(p: &Problem, device: &[u32], lower_bound: Nanos) -> Vec<Periodic> {
    let least = loads(p, device).into_iter().max().unwrap_or_default();
    let keys = ranks::keys_of(p, &ranks::placed_tails(p, device));
    let simulated = simulate(p, device, &keys, LinkOrder::Urgent);
    let mut found = Vec::new();
    for percent in STRETCHES {
        let period = Nanos((u128::from(least.0) * percent / 100) as u64);
        let samples = [true, false].map(|in_gaps| Wheel::new(p, &simulated, period, in_gaps).run());
        let Some(sample) = samples.into_iter().flatten().min_by_key(|s| s.makespan) else {
            continue;
        };
        let peak_bytes = folded_peaks(p, &sample, period);
        found.push(Periodic {
            sample,
            period,
            lower_bound,
            peak_bytes,
        });
    }
    found
}

/// Periods that are tried, in percent of the shortest.
const STRETCHES: [u128; 6] = [100, 102, 105, 110, 125, 150];

/// Resources round a wheel of one period: work that runs at a time runs at every period after it.
struct Wheel<'a> {
    p: &'a Problem,
    /// The order in which tasks and transfers come.
    like: &'a Timeline,
    period: u64,
    /// Tasks take the first gap; else each comes on its resource right after the one before it,
    /// round the wheel.
    in_gaps: bool,
    /// By resource: start on the wheel and length; in gaps in order of start, else in the order in
    /// which they came.
    taken: Vec<Vec<(u64, u64)>>,
}

impl<'a> Wheel<'a> {
    fn new(p: &'a Problem, like: &'a Timeline, period: Nanos, in_gaps: bool) -> Wheel<'a> {
        let n = p.n_devices();
        Wheel {
            p,
            like,
            period: period.0,
            in_gaps,
            taken: vec![Vec::new(); n + n * n],
        }
    }

    /// The first sample. `None` when gaps are too short.
    fn run(mut self) -> Option<Timeline> {
        let p = self.p;
        let mut order: Vec<u32> = p.order.clone();
        order.sort_by_key(|&t| (self.like.start[t as usize], self.like.end[t as usize]));
        let mut out = Timeline {
            device: self.like.device.clone(),
            start: vec![Nanos::ZERO; p.n_tasks()],
            end: vec![Nanos::ZERO; p.n_tasks()],
            ..Timeline::default()
        };
        for t in topological(p, &order) {
            let t = t as usize;
            let d = out.device[t] as usize;
            let mut ready = Nanos::ZERO;
            for &x in p.inputs.row(t) {
                ready = ready.max(self.bring(x, d, &mut out)?);
            }
            let cost = p.cost(t, d);
            out.start[t] = self.take(d, ready, cost)?;
            out.end[t] = out.start[t] + cost;
            out.makespan = out.makespan.max(out.end[t]);
        }
        out.sort_transfers();
        Some(out)
    }

    /// The time at which a tensor is on a device, with a transfer if there is none yet.
    fn bring(&mut self, x: u32, device: usize, out: &mut Timeline) -> Option<Nanos> {
        let (n, producer) = (self.p.n_devices(), self.p.tensors[x as usize].producer);
        let (from, made) = (
            out.device[producer as usize] as usize,
            out.end[producer as usize],
        );
        if from == device {
            return Some(made);
        }
        let (to, mut known) = (device as u32, out.transfers.iter().rev());
        if let Some(known) = known.find(|s| s.tensor == x && s.to == to) {
            return Some(known.end);
        }
        let length = self.p.transfer(x as usize, from, device);
        let start = self.take(n + from * n + device, made, length)?;
        let end = start + length;
        out.transfers.push(Transfer {
            tensor: x,
            from: from as u32,
            to,
            start,
            end,
        });
        Some(end)
    }

    /// Takes `length` on a resource at `ready` or later.
    fn take(&mut self, resource: usize, ready: Nanos, length: Nanos) -> Option<Nanos> {
        let (ready, length, period) = (ready.0, length.0, self.period);
        if period == 0 {
            return Some(Nanos(ready));
        }
        let taken = &mut self.taken[resource];
        if !self.in_gaps {
            // The place is fixed by the predecessors; the turn of the wheel is the first that is
            // late enough.
            let place = taken
                .last()
                .map_or(ready % period, |l| (l.0 + l.1) % period);
            taken.push((place, length));
            return Some(Nanos(ready + (place + period - ready % period) % period));
        }
        let wait = first_gap(taken, ready % period, length, period)?;
        let start = ready + wait;
        let at = taken.partition_point(|t| *t < (start % period, length));
        taken.insert(at, (start % period, length));
        Some(Nanos(start))
    }
}

/// Delay after `place` of the first gap of `length` between taken intervals, in order of start, on
/// a wheel of one period.
fn first_gap(taken: &[(u64, u64)], place: u64, length: u64, period: u64) -> Option<u64> {
    let Some(&last) = taken.last() else {
        return (length <= period).then_some(0);
    };
    let n = taken.len();
    let next = taken.partition_point(|t| t.0 <= place);
    // The last interval before `place` may have begun in the turn before.
    let before = if next > 0 {
        taken[next - 1].0 + taken[next - 1].1
    } else {
        (last.0 + last.1).saturating_sub(period)
    };
    let mut from = place.max(before);
    for i in next..=next + n {
        let (start, taken_length) = (taken[i % n].0 + period * (i / n) as u64, taken[i % n].1);
        if start >= from + length {
            return (from < place + period).then(|| from - place);
        }
        from = from.max(start + taken_length);
    }
    None
}

/// The tasks in an order that is as near to `wish` as dependences allow.
pub(crate) fn topological(p: &Problem, wish: &[u32]) -> Vec<u32> {
    let mut place = vec![0u32; p.n_tasks()];
    wish.iter()
        .enumerate()
        .for_each(|(i, &t)| place[t as usize] = i as u32);
    let mut waiting: Vec<u32> = (0..p.n_tasks())
        .map(|t| p.inputs.row(t).len() as u32)
        .collect();
    let sources = wish
        .iter()
        .filter(|&&t| waiting[t as usize] == 0)
        .map(|&t| (place[t as usize], t));
    let mut ready: std::collections::BTreeSet<(u32, u32)> = sources.collect();
    let mut order = Vec::with_capacity(p.n_tasks());
    while let Some((_, t)) = ready.pop_first() {
        order.push(t);
        for c in p.successors(t as usize) {
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                ready.insert((place[c as usize], c));
            }
        }
    }
    order
}

/// Most bytes on each device when samples follow each other for ever.
fn folded_peaks(p: &Problem, sample: &Timeline, period: Nanos) -> Vec<Bytes> {
    let mut base: Vec<i128> = sample
        .resident_bytes(p)
        .iter()
        .map(|b| i128::from(b.0))
        .collect();
    let mut changes: Vec<Vec<(u64, i128)>> = vec![Vec::new(); p.n_devices()];
    for (d, from, to, bytes) in sample.holds(p) {
        let (length, period, bytes) = (to.0 - from.0, period.0.max(1), i128::from(bytes.0));
        base[d as usize] += bytes * i128::from(length / period);
        let (first, rest) = (from.0 % period, length % period);
        let changes = &mut changes[d as usize];
        if rest > 0 {
            let last = (first + rest) % period;
            base[d as usize] += if first + rest > period { bytes } else { 0 };
            changes.push((first, bytes));
            changes.push((last, if first + rest == period { 0 } else { -bytes }));
        }
    }
    let peak = |(base, mut changes): (i128, Vec<(u64, i128)>)| {
        changes.sort_unstable();
        let (mut held, mut most) = (base, base);
        for (_, change) in changes {
            held += change;
            most = most.max(held);
        }
        Bytes(u64::try_from(most).unwrap_or(u64::MAX))
    };
    base.into_iter().zip(changes).map(peak).collect()
}

/// The schedule of one sample with the smallest peak that is found, then the least makespan: the
/// limit of all devices is bisected between one that is proven too small and one that was seen to
/// be enough.
pub fn least_memory(p: &Problem) -> Timeline {
    match symmetry::reduced(p, &[]) {
        Some(reduced) => reduced.expand(least_memory_of_whole(&reduced.problem)),
        None => least_memory_of_whole(p),
    }
}

fn least_memory_of_whole(p: &Problem) -> Timeline {
    let own = |limit: Bytes| {
        let mut limited = p.clone();
        limited
            .devices
            .iter_mut()
            .for_each(|d| d.memory = Some(d.memory.map_or(limit, |m| m.min(limit))));
        limited
    };
    let highest = |t: &Timeline| t.peak_bytes(p).into_iter().max().unwrap_or_default();
    let better = |a: &Timeline, b: &Timeline| {
        (repair::excess(p, a), highest(a)) < (repair::excess(p, b), highest(b))
    };
    let mut best = repair::schedule(p, &algorithms::single(p, 0), &repair::least_live(p));
    let (mut low, mut high) = (0, highest(&best).0);
    for _ in 0..HALVINGS {
        if low + 1 >= high {
            break;
        }
        let middle = low + (high - low) / 2;
        let limited = own(Bytes(middle));
        let tried = if repair::unfit(&limited).is_some() {
            None
        } else {
            slices::place(&limited)
        };
        match tried {
            Some(found) if repair::excess(&limited, &found) == Bytes::ZERO => {
                high = highest(&found).0;
                best = found;
            }
            other => {
                best = other.filter(|o| better(o, &best)).unwrap_or(best);
                low = middle;
            }
        }
    }
    best
}

/// Steps of [`least_memory`]: to a thousandth of one device's need.
const HALVINGS: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check;
    use crate::problem::{Parts, Task};
    use crate::rng::Rng;
    use crate::samples::{Shape, random};

    /// `n` samples of a problem as one; what is resident counts once.
    fn unrolled(p: &Problem, n: usize) -> Problem {
        let task = |i: usize| {
            let (sample, t) = (i / p.n_tasks(), i % p.n_tasks());
            let resident = if sample == 0 {
                p.resident[t]
            } else {
                Bytes::ZERO
            };
            let constants = p.constants_of.row(t).to_vec();
            let (scratch, group) = (p.scratch[t], Some(p.group_of[t]));
            Task {
                cost: p.costs(t).to_vec(),
                resident,
                constants,
                scratch,
                group,
                is_view: false,
            }
        };
        let tensor = |i: usize| {
            let (sample, x) = (
                (i / p.tensors.len() * p.n_tasks()) as u32,
                i % p.tensors.len(),
            );
            let mut tensor = p.tensors[x];
            tensor.producer += sample;
            (
                tensor,
                p.consumers.row(x).iter().map(|&c| c + sample).collect(),
            )
        };
        let parts = Parts {
            devices: p.devices.clone(),
            links: p.links.clone(),
            tasks: (0..n * p.n_tasks()).map(task).collect(),
            tensors: (0..n * p.tensors.len()).map(tensor).collect(),
            constants: p.constants.clone(),
        };
        Problem::new(parts).expect("copies of a problem")
    }

    /// The timeline of `n` samples.
    fn repeated(p: &Problem, s: &Periodic, n: usize) -> Timeline {
        let mut all = Timeline {
            makespan: s.time(n as u64),
            ..Timeline::default()
        };
        for i in 0..n {
            let shift = s.period.times(i as u64);
            all.device.extend(&s.sample.device);
            all.start.extend(s.sample.start.iter().map(|&t| t + shift));
            all.end.extend(s.sample.end.iter().map(|&t| t + shift));
            let tensor = |x: u32| x + (i * p.tensors.len()) as u32;
            let moved = |t: &Transfer| Transfer {
                tensor: tensor(t.tensor),
                start: t.start + shift,
                end: t.end + shift,
                ..*t
            };
            all.transfers.extend(s.sample.transfers.iter().map(moved));
        }
        all.transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
        all
    }

    #[test]
    fn samples_follow_each_other_without_conflict() {
        let mut rng = Rng(21);
        for i in 0..120 {
            let shape = Shape {
                constrained: i % 2 == 0,
                ..Shape::small(2 + rng.below(9), 1 + rng.below(3))
            };
            let p = random(&mut rng, shape);
            let n = 12;
            let found = solve(
                &p,
                Options {
                    samples: n,
                    tasks: 20_000,
                },
            );
            assert!(found.lower_bound <= found.time(n));
            let long = unrolled(&p, n as usize);
            let timeline = repeated(&p, &found, n as usize);
            assert_eq!(check(&long, &timeline), Vec::<String>::new());
            // Once the first sample is gone before the last comes, as many are under way as ever
            // will be.
            let peaks = timeline.peak_bytes(&long);
            assert!(
                peaks
                    .iter()
                    .zip(&found.peak_bytes)
                    .all(|(seen, told)| seen <= told),
                "{peaks:?}"
            );
            if found.period.times(n - 2) > found.sample.makespan {
                assert_eq!(peaks, found.peak_bytes);
            }
        }
    }

    #[test]
    fn the_shortest_period_is_always_had() {
        let mut rng = Rng(22);
        for _ in 0..100 {
            let shape = Shape {
                constrained: true,
                ..Shape::small(10, 3)
            };
            let p = random(&mut rng, shape);
            let device: Vec<u32> = (0..10).map(|t| p.first_device(t) as u32).collect();
            let most = loads(&p, &device).into_iter().max();
            assert_eq!(
                periodic(&p, &device, Nanos::ZERO).first().map(|s| s.period),
                most
            );
        }
    }

    #[test]
    fn gaps_on_a_wheel_agree_with_a_plain_search() {
        let mut rng = Rng(23);
        for _ in 0..2_000 {
            let period = 5 + rng.number(20);
            let (mut wheel, mut taken) = (vec![false; period as usize], Vec::new());
            for _ in 0..rng.number(6) {
                let (place, length) = (rng.number(period), 1 + rng.number(5));
                let slots = || (0..length).map(|i| ((place + i) % period) as usize);
                if length <= period && slots().all(|i| !wheel[i]) {
                    slots().for_each(|i| wheel[i] = true);
                    taken.push((place, length));
                }
            }
            taken.sort_unstable();
            let (place, length) = (rng.number(period), 1 + rng.number(6));
            let free =
                |wait: &u64| (0..length).all(|i| !wheel[((place + wait + i) % period) as usize]);
            let expected = if length <= period {
                (0..period).find(free)
            } else {
                None
            };
            assert_eq!(
                first_gap(&taken, place, length, period),
                expected,
                "{taken:?} {place} {length} {period}"
            );
        }
    }

    #[test]
    fn the_least_memory_is_no_more_than_one_device_needs() {
        let mut rng = Rng(24);
        for _ in 0..60 {
            let p = random(&mut rng, Shape::small(9, 3));
            let alone = repair::schedule(&p, &[0; 9], &repair::least_live(&p));
            let found = least_memory(&p);
            assert_eq!(check(&p, &found), Vec::<String>::new());
            assert!(found.peak_bytes(&p).iter().max() <= alone.peak_bytes(&p).iter().max());
        }
    }
}
