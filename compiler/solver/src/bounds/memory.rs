//! Consequences of memory limits: more than one device is needed, and so a tensor crosses.

use super::windows::Windows;
use crate::problem::Problem;
use crate::{Bytes, Nanos};

/// Least makespan when some connected part of the graph holds more for the whole step than any of
/// its devices may: one of its tensors crosses, and the longest path over the cheapest crossing is
/// a bound.
pub(super) fn forced_crossing(p: &Problem, w: &Windows) -> Nanos {
    if p.devices.iter().any(|d| d.memory.is_none()) {
        return Nanos::ZERO;
    }
    let part = parts(p);
    let n_parts = part.iter().max().map_or(0, |m| m + 1);
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); n_parts];
    part.iter()
        .enumerate()
        .for_each(|(t, &c)| members[c].push(t as u32));
    let bound = |tasks: &Vec<u32>| {
        if fits_somewhere(p, tasks) {
            Nanos::ZERO
        } else {
            cheapest_crossing(p, w, tasks)
        }
    };
    members.iter().map(bound).max().unwrap_or_default()
}

/// Connected part of each task; groups connect as tensors do, for neither end of such a tie can
/// leave alone.
fn parts(p: &Problem) -> Vec<usize> {
    let mut part = vec![usize::MAX; p.n_tasks()];
    let mut n_parts = 0;
    let mut open = Vec::new();
    for t in 0..p.n_tasks() {
        if part[t] != usize::MAX {
            continue;
        }
        part[t] = n_parts;
        open.push(t as u32);
        while let Some(u) = open.pop() {
            let group = p
                .members
                .row(p.group_of[u as usize] as usize)
                .iter()
                .copied();
            for v in p
                .successors(u as usize)
                .chain(p.predecessors(u as usize))
                .chain(group)
            {
                if part[v as usize] == usize::MAX {
                    part[v as usize] = n_parts;
                    open.push(v);
                }
            }
        }
        n_parts += 1;
    }
    part
}

/// True when one device may run and hold all of these tasks.
fn fits_somewhere(p: &Problem, tasks: &[u32]) -> bool {
    let mut constants: Vec<u32> = tasks
        .iter()
        .flat_map(|&t| p.constants_of.row(t as usize).iter().copied())
        .collect();
    constants.sort_unstable();
    constants.dedup();
    let own: Bytes = tasks.iter().map(|&t| p.resident[t as usize]).sum();
    let held = own + constants.iter().map(|&c| p.constants[c as usize]).sum();
    let can = |d: usize| tasks.iter().all(|&t| p.cost(t as usize, d).is_finite());
    (0..p.n_devices()).any(|d| p.devices[d].memory.is_none_or(|m| held <= m) && can(d))
}

/// Least over all tensors of these tasks and pairs of devices of the way through the producer, the
/// link and the consumer. A part with no tensor that may cross has no schedule.
fn cheapest_crossing(p: &Problem, w: &Windows, tasks: &[u32]) -> Nanos {
    let mut least = Nanos::INFINITY;
    for &t in tasks {
        let t = t as usize;
        for &x in p.outputs.row(t) {
            for &c in p.consumers.row(x as usize) {
                if p.group_of[c as usize] == p.group_of[t] {
                    continue;
                }
                for from in p.feasible(t) {
                    let made = w.head(t, from) + p.cost(t, from);
                    for to in p.feasible(c as usize).filter(|&to| to != from) {
                        least = least
                            .min(made + p.transfer(x as usize, from, to) + w.tail(c as usize, to));
                    }
                }
            }
        }
    }
    least
}
