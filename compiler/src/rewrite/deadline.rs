//! The end of searches for a better program, as `--budget` sets it.

use std::time::{Duration, Instant};

/// A point in time after which nothing more is searched for; never, by default.
///
/// Limits of searches are numbers, so that results are the same on every machine; a deadline gives that up for a known time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// So much time from now; never for `None`, and for more than the clock can count.
    pub fn after(budget: Option<Duration>) -> Deadline {
        Deadline(budget.and_then(|b| Instant::now().checked_add(b)))
    }

    /// True when it is over.
    pub fn has_passed(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }
}
