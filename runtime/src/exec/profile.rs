//! Times of the steps of one partition.

use std::time::Instant;

/// Sums over runs, and the last run.
pub(crate) struct Profile {
    /// Time spent in each step so far, in ns.
    pub(crate) total_ns: Vec<u64>,
    /// Start and end of each step when it last ran.
    pub(crate) last: Vec<(Instant, Instant)>,
}

impl Profile {
    /// Of steps that have not run.
    pub(crate) fn new(n_steps: usize) -> Profile {
        let now = Instant::now();
        Profile { total_ns: vec![0; n_steps], last: vec![(now, now); n_steps] }
    }

    /// Step `i` ran.
    pub(crate) fn record(&mut self, i: usize, start: Instant, end: Instant) {
        self.total_ns[i] += end.duration_since(start).as_nanos() as u64;
        self.last[i] = (start, end);
    }
}
