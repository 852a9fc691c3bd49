//! Memory of devices over time while a schedule grows: list scheduling waits until a task and its
//! copies fit.
//!
//! Counted, as in [`crate::schedule::timeline::Timeline::peak_bytes`], are resident bytes and
//! constants for the whole step, a result from the start of its task, and a copy from the start of
//! its transfer. While the last use of either is not scheduled yet it is held for good; once it is
//! known that no unscheduled task can come for it, it is released at the end of its last use. So no
//! schedule that fits here is over a limit.

use crate::problem::Problem;
use crate::{Bytes, Nanos};

/// Bytes that one device holds over time, as steps.
#[derive(Clone, Debug, Default)]
struct Held {
    limit: Option<u64>,
    /// For the whole step: resident bytes and constants.
    lasting: u128,
    /// `(from, level)`: the level beside the lasting bytes from then on. Levels never fall below
    /// zero.
    steps: Vec<(Nanos, i128)>,
    /// Highest level up to and with each step.
    highest: Vec<i128>,
}

impl Held {
    /// Adds to the level from `from` on. Times are mostly near the end, so little moves.
    fn add(&mut self, from: Nanos, bytes: i128) {
        let at = self.steps.partition_point(|s| s.0 < from);
        if self.steps.get(at).is_none_or(|s| s.0 != from) {
            let before = if at == 0 { 0 } else { self.steps[at - 1].1 };
            self.steps.insert(at, (from, before));
            self.highest.insert(at, 0);
        }
        self.steps[at..].iter_mut().for_each(|s| s.1 += bytes);
        for i in at..self.steps.len() {
            let before = if i == 0 { 0 } else { self.highest[i - 1] };
            self.highest[i] = before.max(self.steps[i].1);
        }
    }

    /// Bytes over the limit that stay when `lasting` bytes and `more` at the end of all that is
    /// known are added.
    fn excess(&self, lasting: u128, more: u128) -> u128 {
        let Some(limit) = self.limit else { return 0 };
        let end = self.steps.last().map_or(0, |s| s.1).max(0) as u128 + more;
        let peak = self.highest.last().copied().unwrap_or(0).max(0) as u128;
        (self.lasting + lasting + end.max(peak)).saturating_sub(u128::from(limit))
    }

    /// First time, at `from` or later, from which `more` bytes fit for good beside `lasting` new
    /// ones; `from` where they never do.
    fn fits(&self, from: Nanos, lasting: u128, more: u128) -> Nanos {
        let Some(limit) = self.limit else { return from };
        let Some(room) = u128::from(limit).checked_sub(self.lasting + lasting + more) else {
            return from;
        };
        let blocked = self
            .steps
            .iter()
            .rposition(|s| s.0 > from && s.1.max(0) as u128 > room);
        let at = self.steps.partition_point(|s| s.0 <= from);
        let now = at > 0 && self.steps[at - 1].1.max(0) as u128 > room;
        let last = blocked.or(if now { Some(at - 1) } else { None });
        last.and_then(|i| self.steps.get(i + 1))
            .map_or(from, |s| s.0.max(from))
    }
}

/// The memory of all devices.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    /// False when no device has a limit: then nothing is kept.
    pub(crate) limited: bool,
    devices: Vec<Held>,
    /// Devices that hold a constant, by constant.
    constants: Vec<Vec<u32>>,
}

impl Memory {
    /// Nothing is held.
    pub(crate) fn new(p: &Problem) -> Memory {
        let held = |d: &crate::problem::Device| Held {
            limit: d.memory.map(|m| m.0),
            ..Held::default()
        };
        Memory {
            limited: p.devices.iter().any(|d| d.memory.is_some()),
            devices: p.devices.iter().map(held).collect(),
            constants: vec![Vec::new(); p.constants.len()],
        }
    }

    /// Constants of `task` that `device` does not hold yet, in bytes.
    pub(crate) fn missing_constants(&self, p: &Problem, task: usize, device: usize) -> u128 {
        let missing = |c: &&u32| !self.constants[**c as usize].contains(&(device as u32));
        p.constants_of
            .row(task)
            .iter()
            .filter(missing)
            .map(|&c| u128::from(p.constants[c as usize].0))
            .sum()
    }

    /// Holds `bytes` and the constants of `task` on `device` for the whole step.
    pub(crate) fn settle(&mut self, p: &Problem, task: usize, device: usize, bytes: u128) {
        self.devices[device].lasting += bytes + self.missing_constants(p, task, device);
        for &c in p.constants_of.row(task) {
            if !self.constants[c as usize].contains(&(device as u32)) {
                self.constants[c as usize].push(device as u32);
            }
        }
    }

    /// Holds bytes from a time on.
    pub(crate) fn hold(&mut self, device: usize, from: Nanos, bytes: Bytes) {
        if bytes > Bytes::ZERO {
            self.devices[device].add(from, i128::from(bytes.0));
        }
    }

    /// Releases bytes at a time.
    pub(crate) fn release(&mut self, device: usize, at: Nanos, bytes: Bytes) {
        if bytes > Bytes::ZERO {
            self.devices[device].add(at, -i128::from(bytes.0));
        }
    }

    /// Bytes over the limit of `device`, even after all that is known to be given back, with
    /// `lasting` and `more` bytes added.
    pub(crate) fn excess(&self, device: usize, lasting: u128, more: u128) -> Bytes {
        Bytes(u64::try_from(self.devices[device].excess(lasting, more)).unwrap_or(u64::MAX))
    }

    /// When `more` bytes fit on `device`, at `from` or later; `from` where they never do.
    pub(crate) fn fits(&self, device: usize, from: Nanos, lasting: u128, more: u128) -> Nanos {
        self.devices[device].fits(from, lasting, more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_waits_for_what_is_given_back() {
        let mut held = Held {
            limit: Some(10),
            ..Held::default()
        };
        held.add(Nanos(0), 6);
        held.add(Nanos(5), 3);
        held.add(Nanos(8), -6);
        assert_eq!(held.fits(Nanos(0), 0, 1), Nanos(0));
        assert_eq!(held.fits(Nanos(0), 0, 2), Nanos(8));
        assert_eq!(held.fits(Nanos(6), 0, 7), Nanos(8));
        assert_eq!(held.fits(Nanos(9), 0, 7), Nanos(9));
        assert_eq!(held.excess(0, 7), 0);
        assert_eq!(held.excess(0, 8), 1);
        // What is held for the whole step must fit beside the peak of the past as well.
        assert_eq!(held.excess(2, 0), 1);
    }

    #[test]
    fn fits_agrees_with_a_plain_scan() {
        let mut state = 3u64;
        let mut next = |n: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..300 {
            let mut held = Held {
                limit: Some(20),
                ..Held::default()
            };
            let mut level = [0i128; 40];
            for _ in 0..12 {
                let (from, to, bytes) = (next(30), 1 + next(9), next(7) as i128);
                held.add(Nanos(from), bytes);
                held.add(Nanos(from + to), -bytes);
                level[from as usize..(from + to) as usize]
                    .iter_mut()
                    .for_each(|l| *l += bytes);
            }
            let (from, more) = (next(30), next(20));
            let fits = |t: usize| level[t..].iter().all(|l| l + more as i128 <= 20);
            let expected = (from as usize..40).find(|&t| fits(t)).unwrap_or(40);
            assert_eq!(
                held.fits(Nanos(from), 0, u128::from(more)).0 as usize,
                expected
            );
            let peak = *level.iter().max().unwrap();
            assert_eq!(held.highest.last().copied().unwrap_or(0), peak);
        }
    }
}
