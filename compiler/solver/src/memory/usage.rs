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

/// Steps in a chunk; a full one is halved.
const CHUNK: usize = 256;

/// Adjoining steps of a level.
#[derive(Clone, Debug)]
struct Chunk {
    /// Level before its first step, and highest level up to then.
    before: i128,
    highest_before: i128,
    /// `(from, level)`: the level from then on, beside `before`.
    steps: Vec<(Nanos, i128)>,
    /// Highest level of its steps, beside `before`.
    highest: i128,
}

impl Chunk {
    fn new(steps: Vec<(Nanos, i128)>) -> Chunk {
        let mut chunk = Chunk {
            before: 0,
            highest_before: 0,
            steps,
            highest: 0,
        };
        chunk.refresh();
        chunk
    }

    fn refresh(&mut self) {
        let levels = self.steps.iter().map(|s| s.1);
        self.highest = levels.max().unwrap_or(i128::MIN / 2);
    }

    /// Level behind its last step, and highest level up to then.
    fn after(&self) -> (i128, i128) {
        let last = self.steps.last().map_or(0, |s| s.1);
        let highest = self.highest_before.max(self.before + self.highest);
        (self.before + last, highest)
    }

    /// Adds to the level from `from` on, in this chunk only.
    fn add(&mut self, from: Nanos, bytes: i128) {
        let at = self.steps.partition_point(|s| s.0 < from);
        if self.steps.get(at).is_none_or(|s| s.0 != from) {
            let before = if at == 0 { 0 } else { self.steps[at - 1].1 };
            self.steps.insert(at, (from, before));
        }
        self.steps[at..].iter_mut().for_each(|s| s.1 += bytes);
        self.refresh();
    }

    /// Cuts off its second half.
    fn split(&mut self) -> Chunk {
        let first = self.steps[CHUNK / 2 - 1].1;
        let mut rest = self.steps.split_off(CHUNK / 2);
        rest.iter_mut().for_each(|s| s.1 -= first);
        self.refresh();
        Chunk::new(rest)
    }
}

/// Bytes that one device holds over time, as steps. Chunked, so that a change in the middle moves
/// little.
#[derive(Clone, Debug, Default)]
struct Held {
    limit: Option<u64>,
    /// For the whole step: resident bytes and constants.
    lasting: u128,
    /// The level beside the lasting bytes. It never falls below zero.
    chunks: Vec<Chunk>,
}

impl Held {
    /// Adds to the level from `from` on. Times are mostly near the end, so few chunks change.
    fn add(&mut self, from: Nanos, bytes: i128) {
        if self.chunks.is_empty() {
            self.chunks.push(Chunk::new(Vec::new()));
        }
        let at = self.chunk_of(from).min(self.chunks.len() - 1);
        self.chunks[at].add(from, bytes);
        if self.chunks[at].steps.len() >= CHUNK {
            let rest = self.chunks[at].split();
            self.chunks.insert(at + 1, rest);
        }
        for i in at + 1..self.chunks.len() {
            let (before, highest) = self.chunks[i - 1].after();
            (self.chunks[i].before, self.chunks[i].highest_before) = (before, highest);
        }
    }

    /// Index of the first chunk that ends at `from` or later.
    fn chunk_of(&self, from: Nanos) -> usize {
        self.chunks
            .partition_point(|c| c.steps.last().is_some_and(|s| s.0 < from))
    }

    /// Level behind the last step, and the highest level of all.
    fn end(&self) -> (i128, i128) {
        self.chunks.last().map_or((0, 0), Chunk::after)
    }

    /// Bytes over the limit that stay when `lasting` bytes and `more` at the end of all that is
    /// known are added.
    fn excess(&self, lasting: u128, more: u128) -> u128 {
        let Some(limit) = self.limit else { return 0 };
        let (end, peak) = self.end();
        let (end, peak) = (end.max(0) as u128 + more, peak.max(0) as u128);
        (self.lasting + lasting + end.max(peak)).saturating_sub(u128::from(limit))
    }

    /// First time, at `from` or later, from which `more` bytes fit for good beside `lasting` new
    /// ones; `from` where they never do.
    fn fits(&self, from: Nanos, lasting: u128, more: u128) -> Nanos {
        let Some(limit) = self.limit else { return from };
        let Some(room) = u128::from(limit).checked_sub(self.lasting + lasting + more) else {
            return from;
        };
        match self.end_of_last_above(from, room as i128) {
            Some(end) => end.max(from),
            None => from,
        }
    }

    /// End of the last time, at `from` or later, at which the level is above `room`; `None` where
    /// there is no such time, or no end of it.
    fn end_of_last_above(&self, from: Nanos, room: i128) -> Option<Nanos> {
        let first = self.chunk_of(from).saturating_sub(1);
        let is_chunk_above = |c: &Chunk| c.before + c.highest > room;
        let at = first + self.chunks[first..].iter().rposition(is_chunk_above)?;
        let chunk = &self.chunks[at];
        let is_above = |s: &(Nanos, i128)| chunk.before + s.1 > room;
        let last = chunk.steps.iter().rposition(is_above)?;
        let next = chunk.steps.get(last + 1);
        let next = next.or_else(|| self.chunks.get(at + 1)?.steps.first());
        next.map(|s| s.0)
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
            limited: p.is_limited(),
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
    use crate::rng::Rng;

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
        let mut rng = Rng(3);
        let mut next = |n| rng.below(n);
        // Steps of a single chunk, and of many.
        let small = [(30, 12, 20); 300];
        for (horizon, n_held, limit) in small.into_iter().chain([(5_000, 4_000, 40); 20]) {
            let mut held = Held {
                limit: Some(limit),
                ..Held::default()
            };
            let mut level = vec![0i128; horizon + 10];
            for _ in 0..n_held {
                let (from, length, bytes) = (next(horizon), 1 + next(9), next(7) as i128);
                held.add(Nanos(from as u64), bytes);
                held.add(Nanos((from + length) as u64), -bytes);
                level[from..from + length]
                    .iter_mut()
                    .for_each(|l| *l += bytes);
            }
            assert!(held.chunks.iter().all(|c| c.steps.len() < CHUNK));
            assert_eq!(held.end(), (0, *level.iter().max().unwrap()));
            for _ in 0..n_held / 10 {
                let (from, more) = (next(horizon), next(limit as usize));
                let is_full = |t: &usize| level[*t] + more as i128 > limit as i128;
                let expected = (from..level.len()).rfind(is_full).map_or(from, |t| t + 1);
                let found = held.fits(Nanos(from as u64), 0, more as u128);
                assert_eq!(found.0 as usize, expected);
            }
        }
    }
}
