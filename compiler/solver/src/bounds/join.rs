//! Windows in which a task with several operands waits for them: those made on its own device were
//! made one after another, the others came over links.
//!
//! A task on `d` whose operands come from `k` producers has each either on `d` or elsewhere.
//! Producers elsewhere cost an arrival, producers on `d` take their turns there. If it starts
//! before the arrival of some producer, that producer is on `d`; so only the sets of the latest
//! arrivals need be tried, and the least of them is a bound. Tails take the same bound with time
//! reversed.

use super::windows::Ways;
use super::windows::Windows;
use crate::Nanos;
use crate::problem::Problem;

/// Producers or consumers of a task beyond which it is left to the longest path.
const MOST: usize = 64;

/// A neighbour of a task: the time at which its result would come from another device, or its
/// duration on the same one.
#[derive(Clone, Copy, Debug)]
struct Neighbour {
    away: Nanos,
    ready: Nanos,
    length: Nanos,
}

/// Windows with turns taken on the device of each task.
pub(super) fn joined(p: &Problem) -> Windows {
    let ways = Ways::new(p);
    let n = p.n_devices();
    let mut w = Windows::empty(p);
    for &t in &p.order {
        let t = t as usize;
        w.set_head(p, &ways, t, Nanos::ZERO);
        for d in p.feasible(t) {
            if let Some(least) = producers(p, &w, t, d).as_mut().and_then(|v| turns(v)) {
                w.head[t * n + d] = w.head[t * n + d].max(least);
            }
        }
    }
    for &t in p.order.iter().rev() {
        let t = t as usize;
        w.set_tail(p, &ways, t, Nanos::ZERO);
        for d in p.feasible(t) {
            if let Some(least) = consumers(p, &w, t, d).as_mut().and_then(|v| turns(v)) {
                w.tail[t * n + d] = w.tail[t * n + d].max(p.cost(t, d) + least);
            }
        }
    }
    w
}

/// `None` when there is nothing to share the device with, or too much.
fn producers(p: &Problem, w: &Windows, t: usize, d: usize) -> Option<Vec<Neighbour>> {
    let inputs = p.inputs.row(t);
    if inputs.len() < 2 || inputs.len() > MOST {
        return None;
    }
    let mut by_task: Vec<(u32, Neighbour)> = Vec::with_capacity(inputs.len());
    for &x in inputs {
        let q = p.tensors[x as usize].producer;
        let elsewhere = p
            .feasible(q as usize)
            .filter(|&e| e != d && p.group_of[q as usize] != p.group_of[t]);
        let arrivals = elsewhere
            .map(|e| w.head(q as usize, e) + p.cost(q as usize, e) + p.transfer(x as usize, e, d));
        let away = arrivals.min().unwrap_or(Nanos::INFINITY);
        by_task.push((
            q,
            Neighbour {
                away,
                ready: w.head(q as usize, d),
                length: p.cost(q as usize, d),
            },
        ));
    }
    Some(merged(by_task))
}

fn consumers(p: &Problem, w: &Windows, t: usize, d: usize) -> Option<Vec<Neighbour>> {
    let uses = || {
        p.outputs
            .row(t)
            .iter()
            .flat_map(|&x| p.consumers.row(x as usize).iter().map(move |&c| (x, c)))
    };
    if !(2..=MOST).contains(&uses().take(MOST + 1).count()) {
        return None;
    }
    let neighbour = |(x, c): (u32, u32)| {
        let elsewhere = p
            .feasible(c as usize)
            .filter(|&e| e != d && p.group_of[c as usize] != p.group_of[t]);
        let ways = elsewhere.map(|e| p.transfer(x as usize, d, e) + w.tail(c as usize, e));
        let away = ways.min().unwrap_or(Nanos::INFINITY);
        let length = p.cost(c as usize, d);
        (
            c,
            Neighbour {
                away,
                ready: w.tail(c as usize, d).saturating_sub(length),
                length,
            },
        )
    };
    Some(merged(uses().map(neighbour).collect()))
}

/// One entry for each task: from elsewhere, all of its tensors must come.
fn merged(mut by_task: Vec<(u32, Neighbour)>) -> Vec<Neighbour> {
    by_task.sort_by_key(|(t, _)| *t);
    let mut merged: Vec<(u32, Neighbour)> = Vec::with_capacity(by_task.len());
    for (t, n) in by_task {
        match merged.last_mut().filter(|(last, _)| *last == t) {
            Some((_, last)) => last.away = last.away.max(n.away),
            None => merged.push((t, n)),
        }
    }
    merged.into_iter().map(|(_, n)| n).collect()
}

/// Least time at which all neighbours are done with, the latest of them taking turns on the device.
/// `None` if none can be.
fn turns(neighbours: &mut [Neighbour]) -> Option<Nanos> {
    neighbours.sort_by_key(|n| std::cmp::Reverse(n.away));
    let mut near: Vec<Neighbour> = Vec::with_capacity(neighbours.len());
    let mut least = None;
    for k in 0..=neighbours.len() {
        let away = neighbours.get(k).map_or(Nanos::ZERO, |n| n.away);
        let one_by_one = near
            .iter()
            .fold(Nanos::ZERO, |now, n| now.max(n.ready) + n.length);
        let total = away.max(one_by_one);
        least = Some(least.map_or(total, |l: Nanos| l.min(total)));
        if one_by_one >= away {
            break;
        }
        let next = neighbours[k];
        near.insert(near.partition_point(|n| n.ready <= next.ready), next);
    }
    least.filter(|l| l.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_producers_take_turns() {
        let n = |away, ready, length| Neighbour {
            away: Nanos(away),
            ready: Nanos(ready),
            length: Nanos(length),
        };
        // All here: 3 + 3 + 3. One away: max(8, 6).
        assert_eq!(
            turns(&mut [n(8, 0, 3), n(20, 0, 3), n(20, 0, 3)]),
            Some(Nanos(8))
        );
        assert_eq!(
            turns(&mut [n(30, 0, 3), n(20, 0, 3), n(20, 0, 3)]),
            Some(Nanos(9))
        );
        assert_eq!(
            turns(&mut [n(30, 5, 3), n(20, 9, 1), n(4, 0, 3)]),
            Some(Nanos(10))
        );
        assert_eq!(turns(&mut [n(u64::MAX, 0, u64::MAX), n(20, 9, 1)]), None);
    }
}
