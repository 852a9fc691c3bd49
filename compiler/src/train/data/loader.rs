//! Batches that are ready before they are needed.

use super::{Batch, Batches, load};
use crate::error::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::mpsc::sync_channel;

/// Threads and memory for the loading of batches. Neither number has an effect on the batches or their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loading {
    /// Threads, each with a batch at a time. With 0, the training thread loads each batch when it needs it.
    pub threads: usize,
    /// Most batches in memory besides the one of the step.
    pub ahead: usize,
}

impl Default for Loading {
    /// One thread, two batches ahead.
    fn default() -> Loading {
        Loading {
            threads: 1,
            ahead: 2,
        }
    }
}

/// Loads batches.
pub struct Loader {
    pool: Option<ThreadPool>,
    n_ahead: usize,
}

impl Loader {
    /// Starts the threads.
    pub fn new(loading: Loading) -> Result<Loader> {
        let pool = match loading.threads.min(loading.ahead) {
            0 => None,
            n => {
                let builder = ThreadPoolBuilder::new().num_threads(n);
                let builder = builder.thread_name(|i| format!("loader {i}"));
                let failed = |e| Error::internal(format!("cannot start {n} loading threads: {e}"));
                Some(builder.build().map_err(failed)?)
            }
        };
        let n_ahead = loading.ahead;
        Ok(Loader { pool, n_ahead })
    }

    /// Calls a function with each batch in order, until it breaks or one fails.
    pub fn each(
        &self,
        mut batches: Batches,
        mut f: impl FnMut(Batch) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let Some(pool) = &self.pool else {
            for batch in batches {
                if f(batch?)?.is_break() {
                    break;
                }
            }
            return Ok(());
        };
        let (data, epoch) = (batches.data, batches.epoch);
        pool.in_place_scope(|scope| {
            let mut ahead = VecDeque::with_capacity(self.n_ahead);
            loop {
                while ahead.len() < self.n_ahead
                    && let Some(places) = batches.next_places()
                {
                    let (ready, batch) = sync_channel(1);
                    // Nobody waits any more after an error or an early end.
                    scope.spawn(move |_| drop(ready.send(load(data, &places, epoch))));
                    ahead.push_back(batch);
                }
                let Some(batch) = ahead.pop_front() else {
                    return Ok(());
                };
                // A thread that panics sends nothing; the scope passes its panic on.
                let Ok(batch) = batch.recv() else {
                    return Ok(());
                };
                if f(batch?)?.is_break() {
                    return Ok(());
                }
            }
        })
    }
}
