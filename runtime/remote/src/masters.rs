//! The masters that have parts on a task, each with a lease.
//!
//! A master keeps a stream of orders open as long as it has parts; one without a stream for the time of the lease is gone, and so are its
//! parts.

use crate::messages::Fault;
use crate::worker::locked;
use crate::{Limits, TaskName};
use gristmill_runtime::ErrorKind;
use std::collections::HashMap;
use std::sync::Mutex;
use tokio::time::Instant;

/// Masters by their incarnation.
#[derive(Default)]
pub(crate) struct Masters(Mutex<HashMap<u64, Master>>);

struct Master {
    /// Once it has greeted.
    name: Option<TaskName>,
    /// Open streams; more than one when the end of a broken one is noticed late.
    n_streams: usize,
    /// The last sign of life before there was no stream.
    left: Instant,
}

impl Masters {
    fn with(&self, incarnation: u64, act: impl FnOnce(&mut Master)) {
        let absent = || Master {
            name: None,
            n_streams: 0,
            left: Instant::now(),
        };
        act(locked(&self.0).entry(incarnation).or_insert_with(absent));
    }

    /// Notes a sign of life.
    pub(crate) fn note(&self, incarnation: u64) {
        self.with(incarnation, |master| master.left = Instant::now());
    }

    /// Notes a stream of a master. Gives earlier starts of the same task, which are gone. Errors while one of these has a stream.
    pub(crate) fn enter(&self, name: &TaskName, incarnation: u64) -> Result<Vec<u64>, Fault> {
        let mut masters = locked(&self.0);
        let is_earlier = |(of, master): &(&u64, &Master)| {
            **of != incarnation && master.name.as_ref() == Some(name)
        };
        let earlier = masters.iter().filter(is_earlier);
        let earlier: Vec<(u64, bool)> = earlier.map(|(of, m)| (*of, m.n_streams > 0)).collect();
        if let Some((other, _)) = earlier.iter().find(|(_, is_there)| *is_there) {
            let message = format!(
                "{name} is connected already, as incarnation {other:016x}, and incarnation {incarnation:016x} wants its place"
            );
            return Err(Fault::new(ErrorKind::DeviceFailed, message)
                .with_hint("one task has one server; try again if it was restarted a moment ago"));
        }
        let gone: Vec<u64> = earlier.into_iter().map(|(of, _)| of).collect();
        masters.retain(|of, _| !gone.contains(of));
        drop(masters);
        self.with(incarnation, |master| {
            master.name = Some(name.clone());
            master.n_streams += 1;
        });
        Ok(gone)
    }

    /// Notes the end of a stream.
    pub(crate) fn leave(&self, incarnation: u64) {
        self.with(incarnation, |master| {
            master.n_streams = master.n_streams.saturating_sub(1);
            master.left = Instant::now();
        });
    }

    /// Forgets masters without a stream for the time of the lease.
    pub(crate) fn take_expired(&self, limits: &Limits) -> Vec<u64> {
        let mut masters = locked(&self.0);
        let is_over = |m: &Master| m.n_streams == 0 && m.left.elapsed() >= limits.lease;
        let over = masters.iter().filter(|(_, master)| is_over(master));
        let over: Vec<u64> = over.map(|(of, _)| *of).collect();
        masters.retain(|of, _| !over.contains(of));
        over
    }
}
