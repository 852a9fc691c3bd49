//! Independent checker of timelines: looks at the problem and the answer only, and shares nothing
//! with the solver.
//!
//! A valid timeline: every task on a feasible device for exactly its time there; groups on one
//! device; no two tasks overlap on a device, no two transfers on a link; each tensor crosses to a
//! device at most once, from its producer's device, after its producer's end, for exactly its
//! transfer time, and only where a consumer is; no task starts before all its operands are on its
//! device; the makespan is the last end.

use crate::Nanos;
use crate::problem::Problem;
use crate::schedule::timeline::Timeline;
use std::collections::BTreeMap;

/// Start, end, and the index of a task or transfer.
type Interval = (Nanos, Nanos, usize);

/// All violations.
pub fn check(p: &Problem, t: &Timeline) -> Vec<String> {
    let n = p.n_tasks();
    if t.device.len() != n || t.start.len() != n || t.end.len() != n {
        return vec![format!(
            "{} devices, {} starts and {} ends for {n} tasks",
            t.device.len(),
            t.start.len(),
            t.end.len()
        )];
    }
    if let Some(task) = (0..n).find(|&i| t.device[i] as usize >= p.n_devices()) {
        return vec![format!(
            "task {task} is on device {} of {}",
            t.device[task],
            p.n_devices()
        )];
    }
    let mut wrong = Vec::new();
    check_tasks(p, t, &mut wrong);
    let arrivals = check_transfers(p, t, &mut wrong);
    check_operands(p, t, &arrivals, &mut wrong);
    let last = t.end.iter().copied().max().unwrap_or_default();
    if t.makespan != last {
        wrong.push(format!(
            "makespan {} but the last task ends at {last}",
            t.makespan
        ));
    }
    wrong
}

fn check_tasks(p: &Problem, t: &Timeline, wrong: &mut Vec<String>) {
    let mut group: BTreeMap<u32, u32> = BTreeMap::new();
    let mut busy: BTreeMap<u32, Vec<Interval>> = BTreeMap::new();
    for task in 0..p.n_tasks() {
        let (device, start, end) = (t.device[task], t.start[task], t.end[task]);
        let cost = p.cost(task, device as usize);
        if !cost.is_finite() {
            wrong.push(format!("task {task} cannot run on device {device}"));
        } else if end != start + cost {
            wrong.push(format!(
                "task {task} runs {start}..{end} on device {device}, where it takes {cost}"
            ));
        }
        if *group.entry(p.group_of[task]).or_insert(device) != device {
            wrong.push(format!(
                "task {task} is on device {device}, not with its group"
            ));
        }
        busy.entry(device).or_default().push((start, end, task));
    }
    busy.iter_mut()
        .for_each(|(device, times)| overlaps(&format!("device {device}"), times, wrong));
}

/// Intervals that overlap another. One of no length overlaps those that begin before and end after
/// it.
fn overlaps(what: &str, times: &mut [Interval], wrong: &mut Vec<String>) {
    times.sort_unstable();
    for pair in times.windows(2).filter(|w| w[0].1 > w[1].0) {
        wrong.push(format!(
            "{what} does {} and {} at one time",
            pair[0].2, pair[1].2
        ));
    }
}

/// Checks transfers; gives when each tensor is on each device that it is sent to.
fn check_transfers(
    p: &Problem,
    t: &Timeline,
    wrong: &mut Vec<String>,
) -> BTreeMap<(u32, u32), Nanos> {
    let mut arrivals: BTreeMap<(u32, u32), Nanos> = BTreeMap::new();
    let mut links: BTreeMap<(u32, u32), Vec<Interval>> = BTreeMap::new();
    for x in &t.transfers {
        let tensor = &p.tensors[x.tensor as usize];
        let producer = tensor.producer as usize;
        let name = format!("transfer of tensor {} to device {}", x.tensor, x.to);
        if t.device[producer] != x.from || x.from == x.to {
            wrong.push(format!(
                "{name} comes from device {}, its producer is on {}",
                x.from, t.device[producer]
            ));
        }
        if x.start < t.end[producer] {
            wrong.push(format!("{name} starts before its producer ends"));
        }
        if x.end != x.start + p.transfer(x.tensor as usize, x.from as usize, x.to as usize) {
            wrong.push(format!("{name} takes {}..{}", x.start, x.end));
        }
        if !p
            .consumers
            .row(x.tensor as usize)
            .iter()
            .any(|&c| t.device[c as usize] == x.to)
        {
            wrong.push(format!("{name} is of no use: no consumer is there"));
        }
        if arrivals.insert((x.tensor, x.to), x.end).is_some() {
            wrong.push(format!("{name} is made twice"));
        }
        links
            .entry((x.from, x.to))
            .or_default()
            .push((x.start, x.end, x.tensor as usize));
    }
    links
        .iter_mut()
        .for_each(|((from, to), times)| overlaps(&format!("link {from} -> {to}"), times, wrong));
    arrivals
}

fn check_operands(
    p: &Problem,
    t: &Timeline,
    arrivals: &BTreeMap<(u32, u32), Nanos>,
    wrong: &mut Vec<String>,
) {
    for task in 0..p.n_tasks() {
        for &x in p.inputs.row(task) {
            let producer = p.tensors[x as usize].producer as usize;
            let there = match t.device[producer] == t.device[task] {
                true => Some(t.end[producer]),
                false => arrivals.get(&(x, t.device[task])).copied(),
            };
            if there.is_none_or(|there| there > t.start[task]) {
                wrong.push(format!(
                    "task {task} starts at {} before tensor {x} is on its device",
                    t.start[task]
                ));
            }
        }
    }
}
