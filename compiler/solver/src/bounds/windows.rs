//! When each task can start at the earliest, and how long it takes from there to the end of all, by
//! device.
//!
//! Both tables relax the problem: each operand is made on whichever device lets it arrive first,
//! apart from the others. A transfer is paid where it cannot be avoided: when the devices that are
//! open to both ends are disjoint, when staying means a slower device, or between groups.

use crate::Nanos;
use crate::problem::Problem;

/// Earliest starts and least remaining times by task and device; infinite where a task may not run.
///
/// For every valid schedule that has task `t` on device `d`: `t` starts at `head(t, d)` or later,
/// and the end of all comes `tail(t, d)` or more after its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    n_devices: usize,
    pub(super) head: Vec<Nanos>,
    pub(super) tail: Vec<Nanos>,
}

impl Windows {
    /// Longest paths through the graph. O(tensors x consumers x devices), times devices where links
    /// differ.
    pub fn new(p: &Problem) -> Windows {
        let ways = Ways::new(p);
        let mut w = Windows::empty(p);
        for &t in &p.order {
            w.set_head(p, &ways, t as usize, Nanos::ZERO);
        }
        for &t in p.order.iter().rev() {
            w.set_tail(p, &ways, t as usize, Nanos::ZERO);
        }
        w
    }

    /// Tables of no knowledge but feasibility.
    pub(super) fn empty(p: &Problem) -> Windows {
        let n = p.n_tasks() * p.n_devices();
        Windows {
            n_devices: p.n_devices(),
            head: vec![Nanos::ZERO; n],
            tail: vec![Nanos::ZERO; n],
        }
    }

    /// Earliest start of a task on a device.
    pub fn head(&self, task: usize, device: usize) -> Nanos {
        self.head[task * self.n_devices + device]
    }

    /// Least time from the start of a task on a device to the end of all.
    pub fn tail(&self, task: usize, device: usize) -> Nanos {
        self.tail[task * self.n_devices + device]
    }

    /// Earliest start wherever it runs.
    pub fn least_head(&self, task: usize) -> Nanos {
        self.head[task * self.n_devices..][..self.n_devices]
            .iter()
            .copied()
            .min()
            .unwrap_or_default()
    }

    /// Least time from the start of a task to the end of all, wherever it runs.
    pub fn least_tail(&self, task: usize) -> Nanos {
        self.tail[task * self.n_devices..][..self.n_devices]
            .iter()
            .copied()
            .min()
            .unwrap_or_default()
    }

    /// Least makespan with a task on a device, by its longest path.
    pub fn through(&self, task: usize, device: usize) -> Nanos {
        self.head(task, device) + self.tail(task, device)
    }

    /// Sets the head of a task from those of its predecessors, at least `least`.
    pub(super) fn set_head(&mut self, p: &Problem, ways: &Ways, t: usize, least: Nanos) {
        let n = self.n_devices;
        let start = |d: usize| {
            if p.cost(t, d).is_finite() {
                least
            } else {
                Nanos::INFINITY
            }
        };
        let mut heads: Vec<Nanos> = (0..n).map(start).collect();
        for &x in p.inputs.row(t) {
            let q = p.tensors[x as usize].producer as usize;
            let ends = |d: usize| self.head[q * n + d] + p.cost(q, d);
            let soonest = (0..n).map(ends).min().unwrap_or_default();
            for (d, head) in heads.iter_mut().enumerate() {
                let arrival = if p.group_of[q] == p.group_of[t] {
                    ends(d)
                } else {
                    ends(d).min(ways.shortest(p, x as usize, soonest, d, ends, |x, from| {
                        p.transfer(x, from, d)
                    }))
                };
                *head = (*head).max(arrival);
            }
        }
        self.head[t * n..][..n].copy_from_slice(&heads);
    }

    /// Sets the tail of a task from those of its successors, at least `least` more than its own
    /// time.
    pub(super) fn set_tail(&mut self, p: &Problem, ways: &Ways, t: usize, least: Nanos) {
        let n = self.n_devices;
        let mut rest = vec![least; n];
        for &x in p.outputs.row(t) {
            for &c in p.consumers.row(x as usize) {
                let c = c as usize;
                let tails = |d: usize| self.tail[c * n + d];
                let shortest = (0..n).map(tails).min().unwrap_or_default();
                for (d, rest) in rest.iter_mut().enumerate() {
                    let way = if p.group_of[c] == p.group_of[t] {
                        tails(d)
                    } else {
                        tails(d).min(ways.shortest(p, x as usize, shortest, d, tails, |x, to| {
                            p.transfer(x, d, to)
                        }))
                    };
                    *rest = (*rest).max(way);
                }
            }
        }
        (0..n).for_each(|d| self.tail[t * n + d] = p.cost(t, d) + rest[d]);
    }
}

/// Properties of the links that make the tables cheaper to fill.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ways {
    /// A tensor takes the same time between any two devices.
    uniform: bool,
}

impl Ways {
    pub(super) fn new(p: &Problem) -> Ways {
        Ways {
            uniform: p.n_devices() > 1 && uniform_links(p),
        }
    }

    /// Least of `of(other) + transfer` over other devices; `least` is the least of `of` over all
    /// devices.
    fn shortest(
        self,
        p: &Problem,
        x: usize,
        least: Nanos,
        device: usize,
        of: impl Fn(usize) -> Nanos,
        transfer: impl Fn(usize, usize) -> Nanos,
    ) -> Nanos {
        if self.uniform {
            // Where `device` itself has the least, that is the way to stay and shorter than this.
            return least + transfer(x, usize::from(device == 0));
        }
        let others = (0..p.n_devices()).filter(|&d| d != device);
        others
            .map(|d| of(d) + transfer(x, d))
            .min()
            .unwrap_or(Nanos::INFINITY)
    }
}

/// True when any tensor takes the same time between any two devices.
fn uniform_links(p: &Problem) -> bool {
    let n = p.n_devices();
    let alike = p.devices.windows(2).all(|d| d[0].is_host == d[1].is_host);
    let mut pairs = (0..n).flat_map(|a| (0..n).filter(move |&b| b != a).map(move |b| (a, b)));
    let Some((a, b)) = pairs.next() else {
        return true;
    };
    let first = p.links.get(a, b);
    alike && pairs.all(|(a, b)| p.links.get(a, b) == first)
}

/// Critical path: the longest path, each task of a group on the device that is best for the group.
pub(super) fn critical_path(p: &Problem, w: &Windows) -> Nanos {
    let on = |g: usize, d: usize| {
        p.members
            .row(g)
            .iter()
            .map(|&t| w.through(t as usize, d))
            .max()
            .unwrap_or_default()
    };
    let least = |g: usize| {
        (0..p.n_devices())
            .map(|d| on(g, d))
            .min()
            .unwrap_or_default()
    };
    (0..p.n_groups()).map(least).max().unwrap_or_default()
}
