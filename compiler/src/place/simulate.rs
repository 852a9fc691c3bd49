//! Simulated execution of a placement: the one measure by which algorithms are compared.
//!
//! A device runs one task at a time; of the ready ones that which comes first in the given order. Each ordered pair of devices has a link
//! that moves one tensor at a time, first in, first out; a tensor crosses it once, however many tasks wait there. Devices compute while
//! links transfer. All times are integer nanoseconds.

use super::problem::Problem;
use crate::cost::{Bytes, Nanos};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A tensor on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transfer {
    /// Which tensor of the problem.
    pub tensor: usize,
    /// Source device.
    pub from: usize,
    /// Destination device.
    pub to: usize,
    /// When it enters the link.
    pub start: Nanos,
    /// When it is there.
    pub end: Nanos,
}

/// The simulated timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// Start and end of each task.
    pub tasks: Vec<(Nanos, Nanos)>,
    /// All transfers by start.
    pub transfers: Vec<Transfer>,
    /// End of the last task.
    pub makespan: Nanos,
    /// Most bytes that each device holds at a time: constants, results from start of their task to the last use or departure, copies from
    /// the start of their transfer to the last use.
    pub peak_bytes: Vec<Bytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Done(usize),
    Arrived { tensor: usize, device: usize },
}

struct Simulator<'p> {
    p: &'p Problem,
    device: &'p [usize],
    priority: Vec<usize>,
    /// Inputs of each task that are not on its device yet.
    waiting: Vec<usize>,
    ready: Vec<BTreeSet<(usize, usize)>>,
    busy: Vec<bool>,
    link_free: BTreeMap<(usize, usize), Nanos>,
    events: BinaryHeap<Reverse<(Nanos, Event)>>,
    timeline: Timeline,
}

/// Simulates tasks on `device`, each device preferring tasks that come early in `order`.
///
/// Every task must be on a device where its cost is finite, else the makespan is infinite.
pub fn simulate(p: &Problem, device: &[usize], order: &[usize]) -> Timeline {
    let mut priority = vec![0; p.tasks.len()];
    order.iter().enumerate().for_each(|(i, &t)| priority[t] = i);
    let mut s = Simulator {
        p,
        device,
        priority,
        waiting: p.tasks.iter().map(|t| t.inputs.len()).collect(),
        ready: vec![BTreeSet::new(); p.n_devices],
        busy: vec![false; p.n_devices],
        link_free: BTreeMap::new(),
        events: BinaryHeap::new(),
        timeline: Timeline {
            tasks: vec![(Nanos::ZERO, Nanos::ZERO); p.tasks.len()],
            transfers: Vec::new(),
            makespan: Nanos::ZERO,
            peak_bytes: Vec::new(),
        },
    };
    s.run();
    s.timeline.peak_bytes = peak_bytes(p, device, &s.timeline);
    s.timeline
}

impl Simulator<'_> {
    fn run(&mut self) {
        for t in 0..self.p.tasks.len() {
            if self.waiting[t] == 0 {
                self.ready[self.device[t]].insert((self.priority[t], t));
            }
        }
        (0..self.p.n_devices).for_each(|d| self.start(d, Nanos::ZERO));
        while let Some(Reverse((now, event))) = self.events.pop() {
            self.handle(now, event);
            // What happens at the same instant is known before any device chooses.
            while self.events.peek().is_some_and(|Reverse((t, _))| *t == now) {
                let Some(Reverse((_, event))) = self.events.pop() else { break };
                self.handle(now, event);
            }
            (0..self.p.n_devices).for_each(|d| self.start(d, now));
        }
    }

    fn handle(&mut self, now: Nanos, event: Event) {
        match event {
            Event::Done(task) => {
                let from = self.device[task];
                self.busy[from] = false;
                self.timeline.makespan = self.timeline.makespan.max(now);
                for &tensor in &self.p.tasks[task].outputs {
                    let consumers = &self.p.tensors[tensor].consumers;
                    let destinations: BTreeSet<usize> = consumers.iter().map(|&c| self.device[c]).collect();
                    for to in destinations {
                        if to == from { self.arrive(tensor, to) } else { self.send(tensor, from, to, now) }
                    }
                }
            }
            Event::Arrived { tensor, device } => self.arrive(tensor, device),
        }
    }

    fn send(&mut self, tensor: usize, from: usize, to: usize, now: Nanos) {
        let free = self.link_free.entry((from, to)).or_default();
        let start = now.max(*free);
        let end = start + self.p.link.transfer(self.p.tensors[tensor].bytes);
        *free = end;
        self.timeline.transfers.push(Transfer { tensor, from, to, start, end });
        self.events.push(Reverse((end, Event::Arrived { tensor, device: to })));
    }

    fn arrive(&mut self, tensor: usize, device: usize) {
        let p = self.p;
        for &c in p.tensors[tensor].consumers.iter().filter(|&&c| self.device[c] == device) {
            self.waiting[c] -= 1;
            if self.waiting[c] == 0 {
                self.ready[device].insert((self.priority[c], c));
            }
        }
    }

    fn start(&mut self, device: usize, now: Nanos) {
        if self.busy[device] {
            return;
        }
        if let Some((_, task)) = self.ready[device].pop_first() {
            let end = now + self.p.tasks[task].cost[device];
            self.busy[device] = true;
            self.timeline.tasks[task] = (now, end);
            self.events.push(Reverse((end, Event::Done(task))));
        }
    }
}

/// Peak memory of each device.
fn peak_bytes(p: &Problem, device: &[usize], timeline: &Timeline) -> Vec<Bytes> {
    let mut constants: BTreeSet<(usize, crate::ir::NodeId, Bytes)> = BTreeSet::new();
    let mut changes: Vec<Vec<(Nanos, i128)>> = vec![Vec::new(); p.n_devices];
    let mut hold = |d: usize, from: Nanos, to: Nanos, bytes: Bytes| {
        changes[d].push((from, i128::from(bytes.0)));
        changes[d].push((to, -i128::from(bytes.0)));
    };
    let last_use = |tensor: usize, d: usize| {
        let local = p.tensors[tensor].consumers.iter().filter(|&&c| device[c] == d);
        local.map(|&c| timeline.tasks[c].1).max().unwrap_or_default()
    };
    let mut left: Vec<Nanos> = vec![Nanos::ZERO; p.tensors.len()];
    for t in &timeline.transfers {
        left[t.tensor] = left[t.tensor].max(t.end);
        hold(t.to, t.start, last_use(t.tensor, t.to), p.tensors[t.tensor].bytes);
    }
    for (t, task) in p.tasks.iter().enumerate() {
        let (start, end) = timeline.tasks[t];
        constants.extend(task.constants.iter().map(|&(id, bytes)| (device[t], id, bytes)));
        let mut kept = Bytes::ZERO;
        for &x in &task.outputs {
            hold(device[t], start, end.max(last_use(x, device[t])).max(left[x]), p.tensors[x].bytes);
            kept += p.tensors[x].bytes;
        }
        // Results that nobody waits for are outputs or dead: they live to the end of the task at least.
        hold(device[t], start, end, task.result_bytes.saturating_sub(kept));
    }
    let mut resident = vec![Bytes::ZERO; p.n_devices];
    constants.iter().for_each(|&(d, _, bytes)| resident[d] += bytes);
    changes.into_iter().zip(resident).map(|(changes, resident)| resident + highest(changes)).collect()
}

/// Highest sum of a prefix of changes in time order, releases first.
fn highest(mut changes: Vec<(Nanos, i128)>) -> Bytes {
    changes.sort_unstable();
    let mut held = 0i128;
    let mut peak = 0i128;
    for (_, change) in changes {
        held += change;
        peak = peak.max(held);
    }
    Bytes(u64::try_from(peak).unwrap_or(u64::MAX))
}
