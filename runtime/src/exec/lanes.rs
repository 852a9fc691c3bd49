//! Several runs of one program in flight.
//!
//! Each lane is an executor of its own. Where devices are stages of a pipeline, the lanes take
//! turns on every device in the order in which their runs began: a device computes for one run at a
//! time, while another device may be at the run after it or before it. So variables, whose users
//! are all on one device, see the runs one after the other. Callers of a program for one CPU run
//! side by side, without turns.

use super::wait::{Event, Patience};
use super::{ExecOptions, Executor, Transaction};
use crate::error::{Error, ErrorKind};
use crate::program::Program;
use crate::sync::{lock, wait_on};
use crate::tensor::Tensor;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Executors of one program that run side by side.
///
/// Any number of threads may call [`Lanes::run_into`]; a call that finds no free lane waits for one, without order among those that wait.
pub struct Lanes {
    first: Arc<Executor>,
    free: Mutex<Free>,
    freed: Condvar,
    program: Arc<Program>,
    options: ExecOptions,
    limit: usize,
}

struct Free {
    /// With their numbers, in the order in which they were made.
    lanes: Vec<Lane>,
    /// Number of lanes, those in use included.
    n: usize,
}

type Lane = (usize, Arc<Executor>);

impl Free {
    /// The free lane that was made first.
    fn pop(&mut self) -> Option<Lane> {
        let numbers = self.lanes.iter().map(|&(number, _)| number).enumerate();
        let (at, _) = numbers.min_by_key(|&(_, number)| number)?;
        Some(self.lanes.swap_remove(at))
    }
}

impl Lanes {
    /// Makes `program` ready for `n` runs in flight, one at least, whose devices are stages: each
    /// computes for one run at a time.
    ///
    /// Errors: as those of [`Executor::new`]; the limit of a device is for all lanes together. With tensors from or to other tasks, several
    /// runs in flight are `Unsupported`.
    pub fn new(program: Arc<Program>, options: &ExecOptions, n: usize) -> Result<Lanes, Error> {
        let n = n.max(1);
        let turns = (n > 1).then(|| Arc::new(Turns::new(program.partitions.len())));
        let lane = |_| Executor::with_turns(program.clone(), options, n, turns.clone());
        let lanes = (0..n).map(lane).collect::<Result<Vec<_>, Error>>()?;
        if n > 1 && lanes[0].has_remote_ends() {
            let message =
                format!("{n} runs in flight over several tasks: one at a time is possible");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let lanes = lanes.into_iter().map(Arc::new).collect();
        Ok(Lanes::of(program, options, lanes, n))
    }

    /// Makes `program` ready for as many runs in flight as there are callers, up to `limit`, which
    /// share the threads of the pool. Lanes after the first are made when they are needed.
    ///
    /// There is one lane only where runs could disturb each other, or have memory of their own on a
    /// device: with more devices than one, on a device with memory of its own, with tensors from or to other tasks, and where the program
    /// assigns variables, unless its runs [overlap](ExecOptions::overlaps).
    /// Errors: as those of [`Executor::new`].
    pub fn concurrent(
        program: Arc<Program>,
        options: &ExecOptions,
        limit: usize,
    ) -> Result<Lanes, Error> {
        let first = Arc::new(Executor::new(program, options)?);
        let program = first.shared.program.clone();
        let n_threads = options.pool.n_threads();
        let is_alone = (program.assigns() && !options.overlaps)
            || program.partitions.len() != 1
            || program.partitions[0].device.kind.has_own_memory()
            || first.has_remote_ends();
        let limit = if is_alone { 1 } else { limit.max(1) };
        // A declared limit of the device's memory is for all runs in flight.
        let has_room = |n: &usize| super::check_devices(&program, n_threads, *n, options).is_ok();
        let limit = (1..=limit).rev().find(has_room).unwrap_or(1);
        Ok(Lanes::of(program, options, vec![first], limit))
    }

    fn of(
        program: Arc<Program>,
        options: &ExecOptions,
        lanes: Vec<Arc<Executor>>,
        limit: usize,
    ) -> Lanes {
        let n = lanes.len();
        Lanes {
            first: lanes[0].clone(),
            free: Mutex::new(Free {
                lanes: lanes.into_iter().enumerate().collect(),
                n,
            }),
            freed: Condvar::new(),
            program,
            options: ExecOptions {
                is_validated: true,
                ..options.clone()
            },
            limit,
        }
    }

    /// Number of runs that can be in flight.
    pub fn n_lanes(&self) -> usize {
        self.limit
    }

    /// The first lane, for profiles and lists of steps, of which one is enough. A caller that is
    /// alone runs on it.
    pub fn first(&self) -> &Executor {
        &self.first
    }

    /// Runs once on a free lane and returns the outputs in program order.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        self.on_free(|lane| lane.run(inputs))
    }

    /// Runs once on a free lane as a part of a transaction, as [`Executor::run_in`] does.
    pub fn run_in(
        &self,
        transaction: &Transaction,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, Error> {
        self.on_free(|lane| lane.run_in(transaction, inputs))
    }

    /// Runs once on a free lane, as [`Executor::run_into`] does.
    pub fn run_into(&self, inputs: &[Tensor], outputs: &mut [Tensor]) -> Result<(), Error> {
        self.on_free(|lane| lane.run_into(inputs, outputs))
    }

    fn on_free<T>(&self, run: impl FnOnce(&Executor) -> T) -> T {
        let taken = LaneGuard {
            lanes: self,
            lane: Some(self.take()),
        };
        let Some((_, executor)) = &taken.lane else {
            unreachable!("it is there until the drop")
        };
        run(executor)
    }

    /// A free lane, a new one, or the one that is free next.
    fn take(&self) -> Lane {
        let mut free = lock(&self.free);
        loop {
            if let Some(lane) = free.pop() {
                return lane;
            }
            if free.n < self.limit {
                let number = free.n;
                free.n += 1;
                drop(free);
                let made = Executor::new(self.program.clone(), &self.options);
                if let Ok(lane) = made {
                    return (number, Arc::new(lane));
                }
                // There is no room for another one, but those that are there will be free again.
                free = lock(&self.free);
                free.n -= 1;
                if let Some(lane) = free.pop() {
                    return lane;
                }
            }
            free = wait_on(&self.freed, free);
        }
    }
}

/// A lane in use; it is free again when this is dropped.
struct LaneGuard<'a> {
    lanes: &'a Lanes,
    /// Always there until the drop.
    lane: Option<Lane>,
}

impl Drop for LaneGuard<'_> {
    fn drop(&mut self) {
        lock(&self.lanes.free).lanes.extend(self.lane.take());
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
