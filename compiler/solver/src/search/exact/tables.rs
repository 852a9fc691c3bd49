//! Earliest starts and least remaining times under partial decisions: each group may still go to
//! some devices.

use crate::bounds::one_machine::{Job, preemptive};
use crate::problem::Problem;
use crate::{Nanos, bounds};

/// A time that no schedule reaches; sums of a few of them do not overflow.
pub(super) const NEVER: u64 = u64::MAX / 16;

/// The problem in the form that the search reads: dense, with times as plain numbers.
#[derive(Debug)]
pub(super) struct Dense<'p> {
    pub p: &'p Problem,
    pub n_devices: usize,
    /// Time of each task on each device; [`NEVER`] where it may not run.
    pub cost: Vec<u64>,
    /// Time of each tensor between each pair of devices.
    transfer: Vec<u64>,
    /// Devices that each group may be on, as bits.
    pub open: Vec<u64>,
    /// Bytes that each group holds for the whole step.
    pub resident: Vec<u128>,
    /// All times of some best schedule are multiples of this.
    pub unit: u64,
}

/// Earliest start and least time from there to the end of all, by task and device.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables {
    pub head: Vec<u64>,
    pub tail: Vec<u64>,
}

impl<'p> Dense<'p> {
    pub fn new(p: &'p Problem) -> Dense<'p> {
        let n = p.n_devices();
        let finite = |ns: Nanos| ns.0.min(NEVER);
        let pairs = |x: usize| (0..n * n).map(move |ab| finite(p.transfer(x, ab / n, ab % n)));
        let members = |g: usize| p.members.row(g).iter().map(|&t| t as usize);
        let open = |g: usize| {
            members(g)
                .next()
                .map_or(0, |t| p.feasible(t).fold(0, |bits, d| bits | 1 << d))
        };
        let resident = |g: usize| members(g).map(|t| u128::from(p.resident[t].0)).sum();
        Dense {
            p,
            n_devices: n,
            cost: (0..p.n_tasks())
                .flat_map(|t| p.costs(t).iter().map(|&c| finite(c)))
                .collect(),
            transfer: (0..p.tensors.len()).flat_map(pairs).collect(),
            open: (0..p.n_groups()).map(open).collect(),
            resident: (0..p.n_groups()).map(resident).collect(),
            unit: bounds::unit(p),
        }
    }

    pub fn cost(&self, task: usize, device: usize) -> u64 {
        self.cost[task * self.n_devices + device]
    }

    pub fn transfer(&self, tensor: usize, from: usize, to: usize) -> u64 {
        self.transfer[(tensor * self.n_devices + from) * self.n_devices + to]
    }
}

/// Just past the last multiple of `unit` below a makespan: a task that ends before the makespan
/// ends before this, if all ends are multiples.
pub(super) fn before(makespan: u64, unit: u64) -> u64 {
    makespan.saturating_sub(1) / unit * unit + makespan.min(1)
}

/// Devices in a set of bits.
pub(super) fn devices(bits: u64) -> impl Iterator<Item = usize> {
    let mut left = bits;
    std::iter::from_fn(move || {
        let d = left.trailing_zeros() as usize;
        left &= left.checked_sub(1)?;
        Some(d)
    })
}

impl Tables {
    /// Fills both tables for the devices that are open to each group.
    pub fn fill(&mut self, s: &Dense, open: &[u64]) {
        let size = s.p.n_tasks() * s.n_devices;
        self.head.clear();
        self.head.resize(size, NEVER);
        self.tail.clear();
        self.tail.resize(size, NEVER);
        for &t in &s.p.order {
            self.fill_head(s, open, t as usize);
        }
        for &t in s.p.order.iter().rev() {
            self.fill_tail(s, open, t as usize);
        }
    }

    fn fill_head(&mut self, s: &Dense, open: &[u64], t: usize) {
        let (n, group) = (s.n_devices, s.p.group_of[t] as usize);
        for d in devices(open[group]) {
            let mut head = 0;
            for &x in s.p.inputs.row(t) {
                let x = x as usize;
                let q = s.p.tensors[x].producer as usize;
                let from = s.p.group_of[q] as usize;
                let sources = if from == group { 1 << d } else { open[from] };
                let arrival = |e: usize| self.head[q * n + e] + s.cost(q, e) + s.transfer(x, e, d);
                head = head.max(devices(sources).map(arrival).min().unwrap_or(NEVER));
            }
            self.head[t * n + d] = head.min(NEVER);
        }
    }

    fn fill_tail(&mut self, s: &Dense, open: &[u64], t: usize) {
        let (n, group) = (s.n_devices, s.p.group_of[t] as usize);
        for d in devices(open[group]) {
            let mut rest = 0;
            for &x in s.p.outputs.row(t) {
                for &c in s.p.consumers.row(x as usize) {
                    let c = c as usize;
                    let to = s.p.group_of[c] as usize;
                    let ends = if to == group { 1 << d } else { open[to] };
                    let way = |e: usize| s.transfer(x as usize, d, e) + self.tail[c * n + e];
                    rest = rest.max(devices(ends).map(way).min().unwrap_or(NEVER));
                }
            }
            self.tail[t * n + d] = (s.cost(t, d) + rest).min(NEVER);
        }
    }

    /// Least makespan with a group on a device, by its longest path.
    pub fn through(&self, s: &Dense, group: usize, device: usize) -> u64 {
        let ways =
            s.p.members
                .row(group)
                .iter()
                .map(|&t| t as usize * s.n_devices + device);
        ways.map(|i| self.head[i] + self.tail[i]).max().unwrap_or(0)
    }

    /// Jobs of each device by the tasks that have one device left.
    pub fn device_jobs(&self, s: &Dense, open: &[u64], jobs: &mut [Vec<Job>]) {
        jobs.iter_mut().for_each(Vec::clear);
        for t in 0..s.p.n_tasks() {
            let open = open[s.p.group_of[t] as usize];
            if open.count_ones() == 1 {
                let d = open.trailing_zeros() as usize;
                jobs[d].push(self.job(s, t, d));
            }
        }
    }

    fn job(&self, s: &Dense, t: usize, d: usize) -> Job {
        let (i, length) = (t * s.n_devices + d, s.cost(t, d));
        Job {
            head: Nanos(self.head[i]),
            length: Nanos(length),
            rest: Nanos(self.tail[i] - length),
        }
    }

    /// Least makespan by the links: tensors between groups that have one device each left.
    pub fn links(&self, s: &Dense, open: &[u64], jobs: &mut [Vec<Job>]) -> u64 {
        let n = s.n_devices;
        jobs.iter_mut().for_each(Vec::clear);
        let mut all_rests = [None; 64];
        let rests = &mut all_rests[..n];
        for x in 0..s.p.tensors.len() {
            let q = s.p.tensors[x].producer as usize;
            let from = open[s.p.group_of[q] as usize];
            if from.count_ones() != 1 {
                continue;
            }
            let from = from.trailing_zeros() as usize;
            let head = Nanos(self.head[q * n + from] + s.cost(q, from));
            rests.fill(None);
            for &c in s.p.consumers.row(x) {
                let to = open[s.p.group_of[c as usize] as usize];
                if to.count_ones() == 1 && to != 1 << from {
                    let to = to.trailing_zeros() as usize;
                    rests[to] = rests[to].max(Some(self.tail[c as usize * n + to]));
                }
            }
            for (to, rest) in rests
                .iter()
                .enumerate()
                .filter_map(|(to, rest)| Some((to, (*rest)?)))
            {
                let length = Nanos(s.transfer(x, from, to));
                jobs[from * n + to].push(Job {
                    head,
                    length,
                    rest: Nanos(rest),
                });
            }
        }
        jobs.iter_mut()
            .filter(|j| j.len() > 1)
            .map(|j| preemptive(j).0)
            .max()
            .unwrap_or(0)
    }

    /// Least makespan by work that may still go to several devices. A set of tasks keeps a device
    /// from the earliest head of any of them there, and until the least rest before the end; the
    /// time between, on all devices together, must hold the work. The sets are those of the latest
    /// heads and those of the longest rests.
    pub fn shared_work(&self, s: &Dense, open: &[u64]) -> u64 {
        let n = s.n_devices;
        let mut tasks: Vec<(u64, u64, u32)> = Vec::with_capacity(s.p.n_tasks());
        for t in 0..s.p.n_tasks() {
            let on = || devices(open[s.p.group_of[t] as usize]).map(|d| t * n + d);
            let head = on().map(|i| self.head[i]).min().unwrap_or(0);
            let rest = on().map(|i| self.tail[i] - s.cost[i]).min().unwrap_or(0);
            tasks.push((head, rest, t as u32));
        }
        tasks.sort_unstable_by_key(|t| std::cmp::Reverse(t.0));
        let by_head = self.fill_up(s, open, &tasks);
        tasks.sort_unstable_by_key(|t| std::cmp::Reverse(t.1));
        by_head.max(self.fill_up(s, open, &tasks))
    }

    /// Greatest bound of the sets of first tasks.
    fn fill_up(&self, s: &Dense, open: &[u64], tasks: &[(u64, u64, u32)]) -> u64 {
        let n = s.n_devices;
        let (mut heads, mut rests) = ([NEVER; 64], [NEVER; 64]);
        let (mut work, mut bound) = (0, 0);
        let mut lost = [0; 64];
        for &(_, _, t) in tasks {
            let t = t as usize;
            let mut least = NEVER;
            for d in devices(open[s.p.group_of[t] as usize]) {
                let i = t * n + d;
                heads[d] = self.head[i].min(heads[d]);
                rests[d] = (self.tail[i] - s.cost[i]).min(rests[d]);
                least = least.min(s.cost[i]);
            }
            work += least;
            (0..n).for_each(|d| lost[d] = heads[d].saturating_add(rests[d]).min(NEVER));
            bound = bound.max(level(&mut lost[..n], work));
        }
        bound
    }
}

/// Least time in which the free time of the devices holds `work`.
fn level(lost: &mut [u64], work: u64) -> u64 {
    lost.sort_unstable();
    let (mut sum, mut used) = (0, 0);
    for &l in lost.iter() {
        if used > 0 && l * used >= sum + work {
            break;
        }
        (sum, used) = (sum + l, used + 1);
    }
    (sum + work).div_ceil(used.max(1))
}
