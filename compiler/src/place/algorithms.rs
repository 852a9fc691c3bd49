//! The portfolio: each algorithm maps a problem to a device per task.

use super::problem::Problem;
use crate::cost::{Bytes, Nanos};
use crate::ir::NodeId;
use std::collections::{BTreeMap, BTreeSet};

/// Everything on `device`; tasks that may not run there go to the first device where they may.
pub fn single(p: &Problem, device: usize) -> Vec<usize> {
    let home = |t: usize| if p.tasks[t].cost[device].is_finite() { device } else { first(p, t) };
    (0..p.tasks.len()).map(home).collect()
}

/// First device of a task, by index. Every task has one.
fn first(p: &Problem, task: usize) -> usize {
    p.feasible(task).next().expect("infeasible tasks are refused when the problem is made")
}

/// TensorFlow's simple placer: requested device, else the first of `preference`; a task that only moves data stays with its operand; a task
/// without operands whose consumers are all on one device joins them.
pub fn simple(p: &Problem, preference: &[usize]) -> Vec<usize> {
    let mut device: Vec<usize> = Vec::with_capacity(p.tasks.len());
    let mut of_group: Vec<Option<usize>> = vec![None; p.n_groups];
    for (t, task) in p.tasks.iter().enumerate() {
        let with_operand = task.inputs.first().filter(|_| task.is_view).map(|&x| device[p.tensors[x].producer]);
        let grouped = task.group.and_then(|group| of_group[group]);
        let preferred = || preference.iter().copied().find(|&d| task.cost[d].is_finite());
        let chosen = grouped.or(with_operand.filter(|&d| task.cost[d].is_finite())).or_else(preferred);
        let chosen = chosen.unwrap_or_else(|| first(p, t));
        task.group.into_iter().for_each(|group| of_group[group] = Some(chosen));
        device.push(chosen);
    }
    for (t, task) in p.tasks.iter().enumerate() {
        let mut homes = task.outputs.iter().flat_map(|&x| &p.tensors[x].consumers).map(|&c| device[c]);
        let is_source = task.inputs.is_empty() && task.outputs.len() == 1 && task.group.is_none();
        if let Some(home) = homes.next().filter(|&h| is_source && task.cost[h].is_finite())
            && homes.all(|h| h == home)
        {
            device[t] = home;
        }
    }
    device
}

/// Fills devices one after another in topological order, each until its constants and the largest working set so far (operands and results of a
/// task) take `percent` of its memory limit (m-TOPO of Baechi, arXiv:2301.08695). Finds a split when no single device can hold the model.
pub fn fill(p: &Problem, percent: u64) -> Vec<usize> {
    let mut held: Vec<(Bytes, Bytes)> = vec![(Bytes::ZERO, Bytes::ZERO); p.n_devices];
    let mut copied: BTreeSet<(usize, NodeId)> = BTreeSet::new();
    let mut of_group: Vec<Option<usize>> = vec![None; p.n_groups];
    let mut current = 0;
    let mut device = Vec::with_capacity(p.tasks.len());
    for (t, task) in p.tasks.iter().enumerate() {
        let working = task.result_bytes + task.inputs.iter().map(|&x| p.tensors[x].bytes).sum();
        let after = |d: usize| {
            let new = task.constants.iter().filter(|(id, _)| !copied.contains(&(d, *id))).map(|c| c.1);
            (held[d].0 + new.sum(), held[d].1.max(working))
        };
        let has_room = |d: usize| {
            let (constants, working) = after(d);
            p.memory[d]
                .is_none_or(|limit| (constants + working).0 as u128 * 100 <= u128::from(limit.0) * u128::from(percent))
        };
        let grouped = task.group.and_then(|group| of_group[group]);
        let next = (current..p.n_devices).find(|&d| task.cost[d].is_finite() && has_room(d));
        let chosen = grouped.or(next).unwrap_or_else(|| first(p, t));
        held[chosen] = after(chosen);
        copied.extend(task.constants.iter().map(|(id, _)| (chosen, *id)));
        task.group.into_iter().for_each(|group| of_group[group] = Some(chosen));
        current = next.unwrap_or(current);
        device.push(chosen);
    }
    device
}

/// HEFT (Topcuoglu, Hariri, Wu 2002): tasks by falling upward rank, each to the device where it finishes earliest, in the earliest gap that
/// holds it. Transfers are made once per tensor and destination over first-in-first-out links.
pub fn heft(p: &Problem) -> Vec<usize> {
    let mut s = Heft {
        p,
        device: vec![usize::MAX; p.tasks.len()],
        end: vec![Nanos::ZERO; p.tasks.len()],
        busy: vec![Vec::new(); p.n_devices],
        arrived: BTreeMap::new(),
        link_free: BTreeMap::new(),
    };
    let mut of_group: Vec<Option<usize>> = vec![None; p.n_groups];
    for t in p.by_rank() {
        let task = &p.tasks[t];
        let grouped = task.group.and_then(|group| of_group[group]);
        let candidates: Vec<usize> = grouped.map_or_else(|| p.feasible(t).collect(), |d| vec![d]);
        let best =
            candidates.into_iter().min_by_key(|&d| (s.start(t, d) + task.cost[d], d)).unwrap_or_else(|| first(p, t));
        s.commit(t, best);
        task.group.into_iter().for_each(|group| of_group[group] = Some(best));
    }
    s.device
}

struct Heft<'p> {
    p: &'p Problem,
    device: Vec<usize>,
    end: Vec<Nanos>,
    /// Intervals in which each device works, sorted.
    busy: Vec<Vec<(Nanos, Nanos)>>,
    /// When a tensor is on a device that did not make it.
    arrived: BTreeMap<(usize, usize), Nanos>,
    link_free: BTreeMap<(usize, usize), Nanos>,
}

impl Heft<'_> {
    /// Arrivals of the inputs of a task on a device, in the order in which links would carry them: `(tensor, source, arrival, is new)`.
    fn arrivals(&self, t: usize, d: usize) -> Vec<(usize, usize, Nanos, bool)> {
        let mut free: BTreeMap<usize, Nanos> = BTreeMap::new();
        let mut inputs: Vec<usize> = self.p.tasks[t].inputs.clone();
        inputs.sort_by_key(|&x| (self.end[self.p.tensors[x].producer], x));
        let mut arrivals = Vec::with_capacity(inputs.len());
        for x in inputs {
            let tensor = &self.p.tensors[x];
            let source = self.device[tensor.producer];
            if source == d {
                arrivals.push((x, source, self.end[tensor.producer], false));
            } else if let Some(&at) = self.arrived.get(&(x, d)) {
                arrivals.push((x, source, at, false));
            } else {
                let link = self.link_free.get(&(source, d)).copied().unwrap_or_default();
                let free = free.entry(source).or_insert(link);
                *free = self.end[tensor.producer].max(*free) + self.p.link.transfer(tensor.bytes);
                arrivals.push((x, source, *free, true));
            }
        }
        arrivals
    }

    /// Earliest start of a task on a device, gaps between earlier tasks included.
    fn start(&self, t: usize, d: usize) -> Nanos {
        let ready = self.arrivals(t, d).iter().map(|a| a.2).max().unwrap_or_default();
        let cost = self.p.tasks[t].cost[d];
        let mut start = ready;
        let from = self.busy[d].partition_point(|b| b.1 <= ready);
        for &(begin, end) in &self.busy[d][from..] {
            if start + cost <= begin {
                break;
            }
            start = start.max(end);
        }
        start
    }

    fn commit(&mut self, t: usize, d: usize) {
        let start = self.start(t, d);
        for (x, source, at, is_new) in self.arrivals(t, d) {
            if is_new {
                self.arrived.insert((x, d), at);
                self.link_free.insert((source, d), at);
            }
        }
        let end = start + self.p.tasks[t].cost[d];
        let at = self.busy[d].partition_point(|b| b.0 < start);
        self.busy[d].insert(at, (start, end));
        self.device[t] = d;
        self.end[t] = end;
    }
}
