//! Several runs of one program in flight.
//!
//! Each lane is an executor of its own, with arenas, staging and threads. On every device the lanes take turns in the order in which their runs
//! began: a device computes for one run at a time, while another device may be at the run after it or before it. So a program whose devices
//! are stages of a pipeline is run as one, and variables, whose users are all on one device, see the runs one after the other.

use super::wait::{Event, Patience};
use super::{ExecOptions, Executor};
use crate::error::Error;
use crate::program::Program;
use crate::sync::{lock, wait_on};
use crate::tensor::Tensor;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Executors of one program that run side by side.
///
/// Any number of threads may call [`Lanes::run_into`]; a call that finds no free lane waits for one, without order among those that wait.
pub struct Lanes {
    lanes: Vec<Executor>,
    free: Mutex<Vec<usize>>,
    freed: Condvar,
}

impl Lanes {
    /// Makes `program` ready for `n` runs in flight, one at least.
    ///
    /// Errors: as those of [`Executor::new`]; the limit of a device is for all lanes together.
    pub fn new(program: Arc<Program>, options: &ExecOptions, n: usize) -> Result<Lanes, Error> {
        let n = n.max(1);
        let turns = (n > 1).then(|| Arc::new(Turns::new(program.partitions.len())));
        let lane = |_| Executor::with_turns(program.clone(), options, n, turns.clone());
        let lanes = (0..n).map(lane).collect::<Result<Vec<_>, Error>>()?;
        Ok(Lanes {
            lanes,
            free: Mutex::new((0..n).rev().collect()),
            freed: Condvar::new(),
        })
    }

    /// Number of runs that can be in flight.
    pub fn n_lanes(&self) -> usize {
        self.lanes.len()
    }

    /// The first lane, for profiles and lists of steps, of which one is enough. Its runs take their turns among the others.
    pub fn first(&self) -> &Executor {
        &self.lanes[0]
    }

    /// Runs once on a free lane and returns the outputs in program order.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        self.on_free(|lane| lane.run(inputs))
    }

    /// Runs once on a free lane, as [`Executor::run_into`] does.
    pub fn run_into(&self, inputs: &[Tensor], outputs: &mut [Tensor]) -> Result<(), Error> {
        self.on_free(|lane| lane.run_into(inputs, outputs))
    }

    fn on_free<T>(&self, run: impl FnOnce(&Executor) -> T) -> T {
        let mut free = lock(&self.free);
        let lane = loop {
            match free.pop() {
                Some(lane) => break lane,
                None => free = wait_on(&self.freed, free),
            }
        };
        drop(free);
        let taken = LaneGuard { lanes: self, lane };
        run(&self.lanes[taken.lane])
    }
}

/// A lane in use; it is free again when this is dropped.
struct LaneGuard<'a> {
    lanes: &'a Lanes,
    lane: usize,
}

impl Drop for LaneGuard<'_> {
    fn drop(&mut self) {
        lock(&self.lanes.free).push(self.lane);
        self.lanes.freed.notify_one();
    }
}

/// The order in which runs use devices: each run draws a number, and on every device the numbers come one after the other.
///
/// A run that has drawn a number uses every device once, whatever happens to it, so no number is waited for in vain: the run with the least number
/// waits for nobody.
pub(crate) struct Turns {
    next: AtomicU64,
    /// By partition: the number whose turn it is.
    now: Vec<(AtomicU64, Event)>,
}

impl Turns {
    fn new(n_partitions: usize) -> Turns {
        Turns {
            next: AtomicU64::new(0),
            now: (0..n_partitions).map(|_| Default::default()).collect(),
        }
    }

    /// The number of a run that begins.
    pub(crate) fn draw(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for the turn of a number on a partition's device; the next one has it when the result is dropped.
    pub(crate) fn wait(&self, partition: usize, number: u64, patience: Patience) -> Turn<'_> {
        let (now, event) = &self.now[partition];
        event.wait_until(patience, || now.load(Ordering::Acquire) == number);
        Turn {
            turns: self,
            partition,
        }
    }
}

/// The turn of a run on a device.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    partition: usize,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let (now, event) = &self.turns.now[self.partition];
        now.fetch_add(1, Ordering::Release);
        event.notify();
    }
}
