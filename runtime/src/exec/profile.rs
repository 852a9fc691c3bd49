//! Times of the steps of one partition: by the host's clock, and for a device's kernels by its own.

use crate::driver::{Driver, Stamps};
use crate::error::Error;
use std::time::Instant;

/// Sums over runs, and the last run.
pub(crate) struct Profile {
    /// Time spent in each step so far, in ns.
    pub(crate) total_ns: Vec<u64>,
    /// Start and end of each step when it last ran; of a device, when it was asked for it.
    pub(crate) last: Vec<(Instant, Instant)>,
    /// Two stamps for each step, where a device computes while its host goes on.
    stamps: Option<Box<dyn Stamps>>,
    /// Steps of this run that were stamped.
    stamped: Vec<usize>,
}

impl Profile {
    /// Of steps that have not run, on a device if there is a driver.
    pub(crate) fn new(n_steps: usize, driver: Option<&dyn Driver>) -> Result<Profile, Error> {
        let (now, stamps) = (
            Instant::now(),
            driver.map(|d| d.stamps(2 * n_steps)).transpose()?.flatten(),
        );
        let stamped = Vec::with_capacity(n_steps);
        Ok(Profile {
            total_ns: vec![0; n_steps],
            last: vec![(now, now); n_steps],
            stamps,
            stamped,
        })
    }

    /// Step `i` begins; `computes` when it is for the queue that computes.
    pub(crate) fn begin(&self, i: usize, computes: bool) -> Result<Instant, Error> {
        if let (Some(stamps), true) = (&self.stamps, computes) {
            stamps.stamp(2 * i)?;
        }
        Ok(Instant::now())
    }

    /// Step `i`, which began at `start`, has run, or been asked for.
    pub(crate) fn end(&mut self, i: usize, start: Instant, computes: bool) -> Result<(), Error> {
        let end = Instant::now();
        self.last[i] = (start, end);
        match &self.stamps {
            Some(stamps) if computes => {
                stamps.stamp(2 * i + 1)?;
                self.stamped.push(i);
            }
            _ => self.total_ns[i] += end.duration_since(start).as_nanos() as u64,
        }
        Ok(())
    }

    /// Adds the times of this run by the device's clock. The device has finished.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        let Some(stamps) = &self.stamps else {
            return Ok(());
        };
        for i in self.stamped.drain(..) {
            self.total_ns[i] += stamps.between(2 * i, 2 * i + 1)?.as_nanos() as u64;
        }
        Ok(())
    }

    /// Forgets the stamps of a run that failed.
    pub(crate) fn forget(&mut self) {
        self.stamped.clear();
    }
}
