//! Progress of the run under way, for whoever waits for it.

use super::Executor;
use super::wire::RemoteEnd;
use crate::device::DeviceName;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A worker's place in its partition. Only the worker writes; lines of memory are not shared with others.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Gauge {
    /// Number of steps begun, over all runs, those of branches and loops included.
    n_begun: AtomicU64,
    /// The step under way, counted from 1; 0 between steps.
    step: AtomicUsize,
}

impl Gauge {
    /// Notes the begin of a step: of the partition, or of a branch or loop in one, at this depth.
    pub(crate) fn begin(&self, step: usize, depth: usize) {
        // One writer: no two changes at once.
        let n = self.n_begun.load(Ordering::Relaxed);
        self.n_begun.store(n + 1, Ordering::Relaxed);
        if depth == 0 {
            self.step.store(step + 1, Ordering::Relaxed);
        }
    }

    /// Notes a wait between steps.
    pub(crate) fn rest(&self) {
        self.step.store(0, Ordering::Relaxed);
    }
}

/// The run under way, as seen from another thread: parts of it may be older than others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// A number that grows with each step and each piece of a tensor from another task, over all runs.
    pub count: u64,
    /// Steps under way, each with its device and its [origin](crate::program::Step::origin).
    pub steps: Vec<(DeviceName, String)>,
    /// Tensors from other tasks for which the run waits, now or later.
    pub awaited: Vec<RemoteEnd>,
    /// True while tensors of this run or the one before are with the wire.
    pub is_sending: bool,
}

impl Executor {
    /// The progress of the run under way, or between runs. Never waits for a run.
    pub fn progress(&self) -> Progress {
        let rendezvous = &self.shared.rendezvous;
        let (n_pieces, awaited) = rendezvous.arrivals_of_run();
        let mut count = n_pieces;
        let mut steps = Vec::new();
        for (worker, partition) in self.shared.program.partitions.iter().enumerate() {
            let gauge = rendezvous.gauge(worker);
            count += gauge.n_begun.load(Ordering::Relaxed);
            let step = gauge.step.load(Ordering::Relaxed).checked_sub(1);
            if let Some(step) = step.and_then(|i| partition.steps.get(i)) {
                steps.push((partition.device.clone(), step.origin.clone()));
            }
        }
        Progress {
            count,
            steps,
            awaited,
            is_sending: rendezvous.remote.is_lent(),
        }
    }
}
