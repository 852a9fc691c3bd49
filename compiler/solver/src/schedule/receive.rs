//! When transfers go: as soon as they can, or as late as their first use allows where that lowers
//! the peak of the destination and raises no other.
//!
//! Tasks stay where they are in time, so the makespan does too: only slack is used, as TensorFlow's
//! white paper does with receives (Abadi et al. 2015, 5.2), and only where it saves memory.

use crate::problem::Problem;
use crate::schedule::timeline::Timeline;
use crate::{Bytes, Nanos};

/// Single transfers that are tried.
const MOST_TRIES: usize = 48;
/// Tasks and transfers above which nothing is tried.
const LARGE: usize = 20_000;

/// The timeline with transfers delayed where that saves memory: no task moves, no peak is higher.
/// Links keep their order.
pub fn delay(p: &Problem, timeline: Timeline) -> Timeline {
    if timeline.transfers.is_empty() || p.n_tasks() + timeline.transfers.len() > LARGE {
        return timeline;
    }
    let mut delay = Delay {
        p,
        peaks: timeline.peak_bytes(p),
        timeline,
    };
    for d in 0..p.n_devices() as u32 {
        delay.attempt(|t| t.to == d);
    }
    let mut heavy: Vec<(Bytes, u32, u32)> = delay
        .timeline
        .transfers
        .iter()
        .map(|t| (p.tensors[t.tensor as usize].bytes(), t.tensor, t.to))
        .collect();
    heavy.sort_by_key(|h| (std::cmp::Reverse(h.0), h.1, h.2));
    for (_, tensor, to) in heavy.into_iter().take(MOST_TRIES) {
        delay.attempt(|t| (t.tensor, t.to) == (tensor, to));
    }
    delay
        .timeline
        .transfers
        .sort_by_key(|t| (t.start, t.tensor, t.to));
    delay.timeline
}

struct Delay<'p> {
    p: &'p Problem,
    timeline: Timeline,
    peaks: Vec<Bytes>,
}

impl Delay<'_> {
    /// Delays the transfers that are meant, if some peak is lower then and none is higher.
    fn attempt(&mut self, is_meant: impl Fn(&crate::Transfer) -> bool) {
        let old = self.timeline.transfers.clone();
        if !self.push_back(is_meant) {
            return;
        }
        let peaks = self.timeline.peak_bytes(self.p);
        let is_lower =
            peaks.iter().zip(&self.peaks).all(|(new, old)| new <= old) && peaks != self.peaks;
        if is_lower {
            self.peaks = peaks;
        } else {
            self.timeline.transfers = old;
        }
    }

    /// Moves transfers to the latest time before their first use and the next transfer of their
    /// link. False when none moves.
    fn push_back(&mut self, is_meant: impl Fn(&crate::Transfer) -> bool) -> bool {
        let n = self.p.n_devices();
        // The next transfer of each link, from the end of time backwards.
        let mut next = vec![Nanos::INFINITY; n * n];
        let mut order: Vec<usize> = (0..self.timeline.transfers.len()).collect();
        order.sort_by_key(|&i| {
            (
                self.timeline.transfers[i].start,
                self.timeline.transfers[i].end,
            )
        });
        let mut has_moved = false;
        for i in order.into_iter().rev() {
            let t = self.timeline.transfers[i];
            let next = &mut next[t.from as usize * n + t.to as usize];
            let length = t.end.saturating_sub(t.start);
            if is_meant(&t) {
                let latest = self
                    .first_use(t.tensor, t.to)
                    .min(*next)
                    .saturating_sub(length);
                let start = t.start.max(latest);
                has_moved |= start > t.start;
                (
                    self.timeline.transfers[i].start,
                    self.timeline.transfers[i].end,
                ) = (start, start + length);
            }
            *next = self.timeline.transfers[i].start;
        }
        has_moved
    }

    fn first_use(&self, tensor: u32, device: u32) -> Nanos {
        let t = &self.timeline;
        let local = self
            .p
            .consumers
            .row(tensor as usize)
            .iter()
            .filter(|&&c| t.device[c as usize] == device);
        local
            .map(|&c| t.start[c as usize])
            .min()
            .unwrap_or_default()
    }
}
