//! Batches of an epoch for workers in no step with each other.

use super::Training;
use crate::error::{Error, Result};
use crate::train::StepOutputs;
use crate::train::asynchronous::{Gradients, Worker};
use crate::train::data::{Batch, Batches, n_examples};
use gristmill_runtime::device::DeviceName;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{Scope, scope};
use std::time::Instant;

/// The steps of a worker of asynchronous training.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct WorkerReport {
    /// Its device.
    pub device: DeviceName,
    /// Batches whose gradients it has pushed.
    pub n_steps: u64,
    /// Mean staleness of its steps: pushes of other workers between a pull and the push of its gradients.
    pub mean_staleness: f64,
    /// The largest one.
    pub largest_staleness: u64,
}

impl WorkerReport {
    pub(super) fn new(worker: &Worker) -> WorkerReport {
        WorkerReport {
            device: worker.device().clone(),
            n_steps: 0,
            mean_staleness: 0.0,
            largest_staleness: 0,
        }
    }

    fn add(&mut self, staleness: u64) {
        let n = self.n_steps as f64;
        self.mean_staleness = (self.mean_staleness * n + staleness as f64) / (n + 1.0);
        self.largest_staleness = self.largest_staleness.max(staleness);
        self.n_steps += 1;
    }
}

/// A batch on its way to a worker.
struct Task {
    batch: Batch,
    n_examples: usize,
    /// Its number in the epoch, from 1.
    number: u64,
}

/// The result of a worker's batch.
struct Computed {
    worker: usize,
    n_examples: usize,
    number: u64,
    made: Result<Made>,
}

enum Made {
    /// To be pushed.
    Gradients(Gradients),
    /// Already pushed.
    Step(StepOutputs),
}

/// Workers in threads of their own.
struct Team<'t> {
    workers: Vec<Worker<'t>>,
    tasks: Vec<SyncSender<Task>>,
    computed: Receiver<Computed>,
    idle: Vec<usize>,
    /// Numbers of examples for which all workers have code.
    sizes: BTreeSet<usize>,
    /// End of the last step, evaluation or callback.
    begin: Instant,
}

impl<'t> Team<'t> {
    fn start<'s>(scope: &'s Scope<'s, 't>, workers: Vec<Worker<'t>>) -> Team<'t> {
        let (done, computed) = channel();
        let start = |worker: &Worker<'t>| {
            let (tasks, own) = sync_channel(1);
            let (worker, done) = (*worker, done.clone());
            scope.spawn(move || work(worker, &own, &done));
            tasks
        };
        Team {
            tasks: workers.iter().map(start).collect(),
            computed,
            sizes: BTreeSet::new(),
            idle: (0..workers.len()).rev().collect(),
            begin: Instant::now(),
            workers,
        }
    }

    fn is_idle(&self) -> bool {
        self.idle.len() == self.workers.len()
    }

    /// Gives a batch of a number to an idle worker. Before the first one of its size, the code of all workers is generated, so
    /// that no worker pulls long before it pushes.
    fn give(&mut self, batch: Batch, number: u64) -> Result<()> {
        if self.sizes.insert(n_examples(&batch)) {
            let mut workers = self.workers.iter();
            workers.try_for_each(|w| w.executable_for(&batch).map(drop))?;
        }
        let gone = || Error::internal("a worker has ended");
        let worker = self.idle.pop().ok_or_else(gone)?;
        let task = Task {
            n_examples: n_examples(&batch),
            number,
            batch,
        };
        self.tasks[worker].send(task).map_err(|_| gone())
    }
}

/// A worker's life: a pull and gradients for each batch. The training thread pushes them, unless pushes may overlap.
fn work(worker: Worker, tasks: &Receiver<Task>, done: &Sender<Computed>) {
    for task in tasks {
        let compute = || {
            let gradients = worker.compute(&worker.pull()?, task.batch)?;
            Ok(match worker.pushes() {
                true => Made::Step(worker.push(gradients)?),
                false => Made::Gradients(gradients),
            })
        };
        let made = catch_unwind(AssertUnwindSafe(compute));
        let panicked = |_| Err(Error::internal("a worker panicked"));
        let computed = Computed {
            worker: worker.index(),
            n_examples: task.n_examples,
            number: task.number,
            made: made.unwrap_or_else(panicked),
        };
        // Nobody waits any more after an error.
        if done.send(computed).is_err() {
            return;
        }
    }
}

impl Training<'_, '_, '_> {
    /// Gives each batch to an idle worker, and pushes gradients in the order in which they come. Callbacks, evaluations
    /// and files come between pushes; before an evaluation and a checkpoint, all batches under way are pushed. Workers
    /// with overlapping pushes push by themselves, also beside callbacks, and steps may be reported out of order.
    pub(super) fn steps_of_workers(&mut self, batches: Batches) -> Result<()> {
        let trainer = self.cx.trainer;
        scope(|scope| {
            let mut team = Team::start(scope, trainer.workers());
            let ended = self.share(&mut team, batches);
            // A checkpoint has a position up to which all batches were pushed.
            self.has_lost_batches |= ended.is_err() && self.cx.n_under_way > 0;
            self.cx.n_under_way = 0;
            ended
        })
    }

    fn share(&mut self, team: &mut Team, batches: Batches) -> Result<()> {
        let loader = self.loader.clone();
        loader.each(batches, |batch| {
            self.push_ready(team)?;
            if self.is_left_out(n_examples(&batch)) || self.cx.stop.is_some() {
                return Ok(ControlFlow::Break(()));
            }
            self.begin_step(&batch)?;
            let number = self.cx.position.n_batches + self.cx.n_under_way + 1;
            team.give(batch, number)?;
            self.cx.n_under_way += 1;
            self.make_room(team)?;
            let is_over = self.cx.stop.is_some() || self.n_given() >= self.cx.n_steps;
            Ok(match is_over {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            })
        })?;
        self.push_all(team)
    }

    /// Steps of the whole training, those under way included.
    fn n_given(&self) -> u64 {
        self.cx.step() + self.cx.n_under_way
    }

    /// Pushes until a worker is idle, and until all are where the next batch has to wait.
    fn make_room(&mut self, team: &mut Team) -> Result<()> {
        if team.idle.is_empty() {
            self.push(team)?;
        }
        let evaluates = self.fit.evaluate.is_step(self.n_given());
        if evaluates || !self.cx.saves.is_empty() || self.cx.stop.is_some() {
            self.push_all(team)?;
        }
        Ok(())
    }

    /// Pushes the gradients that are there.
    fn push_ready(&mut self, team: &mut Team) -> Result<()> {
        while let Ok(computed) = team.computed.try_recv() {
            self.push_computed(team, computed)?;
        }
        match self.cx.saves.is_empty() {
            true => Ok(()),
            false => self.push_all(team),
        }
    }

    fn push_all(&mut self, team: &mut Team) -> Result<()> {
        while !team.is_idle() {
            self.push(team)?;
        }
        Ok(())
    }

    /// Waits for the gradients of a batch, and makes a step of them.
    fn push(&mut self, team: &mut Team) -> Result<()> {
        let computed = team.computed.recv();
        let computed = computed.map_err(|_| Error::internal("no worker is left"))?;
        self.push_computed(team, computed)
    }

    fn push_computed(&mut self, team: &mut Team, computed: Computed) -> Result<()> {
        let worker = team.workers[computed.worker];
        let step = computed.made.and_then(|made| match made {
            Made::Gradients(gradients) => worker.push(gradients),
            Made::Step(step) => Ok(step),
        });
        let step = step.map_err(|e| self.of_batch(e, computed.number))?;
        team.idle.push(computed.worker);
        self.cx.n_under_way -= 1;
        self.workers[computed.worker].add(step.staleness);
        self.end_step(&step, computed.n_examples)?;
        self.cx.time += team.begin.elapsed();
        self.evaluate_after_step()?;
        if self.cx.saves.is_empty() || team.is_idle() {
            self.settle()?;
        }
        team.begin = Instant::now();
        Ok(())
    }
}
