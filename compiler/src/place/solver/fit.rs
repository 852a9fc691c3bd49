//! Schedules that keep memory limits: for a placement that is given, and for one that is changed until it fits.

use super::list::{Insertion, List, Sending};
use super::problem::Problem;
use super::timeline::Timeline;
use crate::cost::{Bytes, Nanos};
use std::collections::BTreeSet;

/// What is least about a good schedule: bytes over the limits of all devices, then time.
pub type Key = (Bytes, Nanos);

/// Bytes over the limits, summed over devices, and the makespan.
pub fn key(p: &Problem, timeline: &Timeline) -> Key {
    (excess(p, timeline), timeline.makespan)
}

/// Bytes by which the peaks of all devices pass their limits.
pub fn excess(p: &Problem, timeline: &Timeline) -> Bytes {
    if p.devices.iter().all(|d| d.memory.is_none()) {
        return Bytes::ZERO;
    }
    let peaks = timeline.peak_bytes(p);
    let over = |(peak, device): (&Bytes, &super::problem::Device)| match device.memory {
        Some(limit) => peak.saturating_sub(limit),
        None => Bytes::ZERO,
    };
    peaks.iter().zip(&p.devices).map(over).sum()
}

/// The best schedule of a placement under memory limits, of a few: tasks in `order`, which is topological, each as soon as it fits; transfers early
/// or late.
pub fn schedule(p: &Problem, device: &[u32], order: &[u32]) -> Timeline {
    let run = |sending: Sending| {
        let mut list = List::planned(p, Insertion::Gaps, sending, device);
        for &t in order {
            list.commit(t as usize, device[t as usize] as usize);
        }
        list.timeline()
    };
    let early = run(Sending::Early);
    let key_of = |t: &Timeline| key(p, t);
    if key_of(&early).0 == Bytes::ZERO {
        return early;
    }
    let late = run(Sending::Late);
    if key_of(&late) < key_of(&early) { late } else { early }
}

/// A topological order that goes on with what the last task made ready: little is live at a time.
pub fn depth_first(p: &Problem) -> Vec<u32> {
    let mut waiting: Vec<u32> = (0..p.n_tasks()).map(|t| p.inputs.row(t).len() as u32).collect();
    let mut ready: Vec<u32> = p.order.iter().rev().copied().filter(|&t| waiting[t as usize] == 0).collect();
    let mut order = Vec::with_capacity(p.n_tasks());
    while let Some(t) = ready.pop() {
        order.push(t);
        for c in p.successors(t as usize) {
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                ready.push(c);
            }
        }
    }
    order
}

/// A topological order that keeps little live: of the ready tasks always the one that leaves least behind, results less operands that it is the last
/// to use; ties to the task made ready last.
pub fn least_live(p: &Problem) -> Vec<u32> {
    let mut waiting: Vec<u32> = (0..p.n_tasks()).map(|t| p.inputs.row(t).len() as u32).collect();
    let mut uses: Vec<u32> = (0..p.tensors.len()).map(|x| p.consumers.row(x).len() as u32).collect();
    let bytes = |x: u32| i128::from(p.tensors[x as usize].bytes().0);
    let left = |t: u32, uses: &[u32]| -> i128 {
        let made: i128 = p.outputs.row(t as usize).iter().filter(|&&x| uses[x as usize] > 0).map(|&x| bytes(x)).sum();
        let freed: i128 = p.inputs.row(t as usize).iter().filter(|&&x| uses[x as usize] == 1).map(|&x| bytes(x)).sum();
        made - freed
    };
    let mut at = vec![(0i128, 0u64); p.n_tasks()];
    let mut ready: BTreeSet<(i128, u64, u32)> = BTreeSet::new();
    let mut stamp = u64::MAX;
    let mut enter = |t: u32, uses: &[u32], ready: &mut BTreeSet<_>, at: &mut Vec<(i128, u64)>| {
        stamp -= 1;
        at[t as usize] = (left(t, uses), stamp);
        ready.insert((at[t as usize].0, stamp, t));
    };
    p.order.iter().rev().filter(|&&t| waiting[t as usize] == 0).for_each(|&t| enter(t, &uses, &mut ready, &mut at));
    let mut order = Vec::with_capacity(p.n_tasks());
    while let Some((_, _, t)) = ready.pop_first() {
        order.push(t);
        for &x in p.inputs.row(t as usize) {
            uses[x as usize] -= 1;
            if uses[x as usize] != 1 {
                continue;
            }
            // The one consumer that is left would now free the tensor.
            for &c in p.consumers.row(x as usize) {
                let entry = at[c as usize];
                if ready.remove(&(entry.0, entry.1, c)) {
                    at[c as usize].0 = left(c, &uses);
                    ready.insert((at[c as usize].0, entry.1, c));
                }
            }
        }
        for c in p.successors(t as usize) {
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                enter(c, &uses, &mut ready, &mut at);
            }
        }
    }
    order
}
