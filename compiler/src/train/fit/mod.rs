//! Training over epochs: [`Trainer::fit`].

mod asynchronous;
mod callback;
mod early_stopping;
mod json_lines;
mod model_checkpoint;
mod monitor;
mod scheduler;
mod tensor_board;

pub use asynchronous::WorkerReport;
pub use callback::{Callback, CallbackState, End, EpochReport, FitContext};
pub use early_stopping::EarlyStopping;
pub use json_lines::JsonLines;
pub use model_checkpoint::ModelCheckpoint;
pub use monitor::Monitor;
pub use scheduler::LearningRateScheduler;
pub use tensor_board::{Summaries, TensorBoard};

use super::checkpoint::{Position, Resumed, Snapshot};
use super::data::{Batch, Batches, Dataset, Loader, Loading, n_examples};
use super::fit_state::FitState;
use super::metrics::Metrics;
use super::trainer::{StepOutputs, Trainer, Weights, no_batch};
use crate::error::{Error, ErrorKind, Result};
use callback::{Save, Target};
use std::collections::BTreeMap;
use std::iter;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The data and the length of a training by [`Trainer::fit`].
///
/// Batches, steps and metrics are those of the whole training, whatever devices compute them.
#[derive(Clone)]
pub struct Fit<'d> {
    /// Examples to train on.
    pub data: &'d dyn Dataset,
    /// Examples per step.
    pub batch_size: usize,
    /// Passes over all examples, those before a resumed checkpoint included.
    pub epochs: u64,
    /// Trains for this many steps instead of `epochs`, those before a resumed checkpoint included. An incomplete epoch has no end.
    pub steps: Option<u64>,
    /// Seed of the order of examples.
    pub seed: u64,
    /// Leaves an incomplete last batch of an epoch out, as models with a fixed batch always do.
    pub drops_last: bool,
    /// Threads and memory for the loading of batches.
    pub loading: Loading,
    /// Examples to evaluate on.
    pub held_out: Option<&'d dyn Dataset>,
    /// When to evaluate.
    pub evaluate: Every,
    /// Values of the variables in evaluations.
    pub weights: Weights,
    /// A checkpoint to go on from, as [`Checkpoints::resume`](super::Checkpoints::resume) has loaded it.
    pub resumed: Option<Resumed>,
}

/// Times of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    /// At the end of each `n`th epoch.
    Epochs(u64),
    /// After each `n`th step.
    Steps(u64),
}

impl Every {
    /// Errors on a period of 0.
    pub(super) fn check(self, what: &str) -> Result<()> {
        let (n, unit) = match self {
            Every::Epochs(n) => (n, "epochs"),
            Every::Steps(n) => (n, "steps"),
        };
        match n {
            0 => Err(Error::invalid(format!(
                "{what} every 0 {unit}: expected at least 1"
            ))),
            _ => Ok(()),
        }
    }

    /// True for the end of an epoch, after `n` epochs.
    fn is_epoch(self, n: u64) -> bool {
        matches!(self, Every::Epochs(period) if n.is_multiple_of(period))
    }

    /// True after `n` steps.
    fn is_step(self, n: u64) -> bool {
        matches!(self, Every::Steps(period) if n.is_multiple_of(period))
    }
}

impl<'d> Fit<'d> {
    /// One epoch of batches of a size, in the order of seed 0, without evaluation.
    pub fn new(data: &'d dyn Dataset, batch_size: usize) -> Fit<'d> {
        Fit {
            data,
            batch_size,
            epochs: 1,
            steps: None,
            seed: 0,
            drops_last: false,
            loading: Loading::default(),
            held_out: None,
            evaluate: Every::Epochs(1),
            weights: Weights::Current,
            resumed: None,
        }
    }

    /// The position to begin at. Errors when the checkpoint is of other data, or has more epochs or steps.
    fn position(&self) -> Result<Position> {
        let start = Position {
            n_examples: self.data.len() as u64,
            batch_size: self.batch_size as u64,
            seed: self.seed,
            epoch: 0,
            n_batches: 0,
        };
        let Some(resumed) = &self.resumed else {
            return Ok(start);
        };
        let at = resumed.position;
        let of = |p: &Position| {
            let (n, size, seed) = (p.n_examples, p.batch_size, p.seed);
            format!("{n} examples, batch size {size} and seed {seed}")
        };
        let path = resumed.path.display();
        let start = Position {
            epoch: at.epoch,
            n_batches: at.n_batches,
            ..start
        };
        if start != at {
            let (before, now) = (of(&at), of(&start));
            let message = format!("{path}: it was saved with {before}; this training has {now}");
            return Err(Error::invalid(message));
        }
        Ok(start)
    }
}

impl Fit<'_> {
    /// The state to begin with. Errors when a setting does not fit.
    fn context<'t>(&self, trainer: &'t Trainer, drops_last: bool) -> Result<FitContext<'t>> {
        self.evaluate.check("evaluate")?;
        let position = self.position()?;
        let (n, size) = (position.n_examples, position.batch_size);
        let n_per_epoch = match drops_last {
            true => n / size,
            false => n.div_ceil(size),
        };
        if n_per_epoch == 0 {
            return Err(no_batch(n as usize, self.batch_size).context("an epoch"));
        }
        if let Some(data) = self.held_out {
            let size = trainer.evaluation_size(self.batch_size);
            let checked = trainer.check_held_out(data, size);
            checked.map_err(|e| e.context("held-out data"))?;
            trainer.check_weights(self.weights)?;
        }
        let all_epochs = n_per_epoch.saturating_mul(self.epochs);
        let n_steps = self.steps.unwrap_or(all_epochs);
        self.check_resumed(trainer, n_per_epoch, n_steps)?;
        let resumed = self.resumed.as_ref();
        Ok(FitContext {
            trainer,
            position,
            n_per_epoch,
            n_steps,
            n_under_way: 0,
            has_held_out: self.held_out.is_some(),
            evaluate: self.evaluate,
            is_resumed: resumed.is_some(),
            checkpoint: resumed.map(|r| r.path.clone()),
            stop: None,
            warnings: Vec::new(),
            saves: Vec::new(),
            has_begun: false,
            time: Duration::ZERO,
            n_timed: 0,
            restored: Vec::new(),
        })
    }

    /// Errors when the checkpoint to go on from does not fit the trainer or the length.
    fn check_resumed(&self, trainer: &Trainer, n_per_epoch: u64, n_steps: u64) -> Result<()> {
        let Some(resumed) = &self.resumed else {
            return Ok(());
        };
        let (path, at) = (resumed.path.display(), resumed.position);
        let (has, expected) = (trainer.n_steps()?, resumed.n_steps);
        if has != expected {
            let message = format!("{path} is of step {expected}, and the trainer is at step {has}");
            let e = Error::invalid(message);
            return Err(e.hint("Checkpoints::resume with this trainer, right before fit"));
        }
        let before = resumed.state.n_per_epoch;
        if ![0, n_per_epoch].contains(&before) {
            return Err(Error::invalid(format!(
                "{path}: its epochs have {before} batches, those of this training {n_per_epoch}"
            )));
        }
        let done = at.epoch.saturating_mul(n_per_epoch);
        let done = done.saturating_add(at.n_batches);
        match done > n_steps {
            true => Err(Error::invalid(format!(
                "{path}: it has {done} steps, more than the {n_steps} asked for"
            ))),
            false => Ok(()),
        }
    }
}

/// A training that has ended without an error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FitReport {
    /// The epochs of this process.
    pub epochs: Vec<EpochReport>,
    /// Steps of the whole training, those before a resumed checkpoint included.
    pub n_steps: u64,
    /// The reason for which a callback stopped it.
    pub stopped: Option<String>,
    /// The newest checkpoint of this training, or the one that it went on from.
    pub checkpoint: Option<PathBuf>,
    /// Warnings of callbacks.
    pub warnings: Vec<String>,
    /// The steps of each worker in this process, if training is asynchronous.
    pub workers: Vec<WorkerReport>,
}

impl Trainer {
    /// Trains over epochs, with evaluations, and calls the callbacks at their events.
    ///
    /// Errors, and trains nothing, when a setting does not fit the data or the checkpoint; ends with the error of a step, a callback or a
    /// file. The variables then are as the last step left them, unless an [`EarlyStopping`] restores better ones. The error names the
    /// newest checkpoint.
    pub fn fit(&self, fit: &Fit, callbacks: &mut [&mut dyn Callback]) -> Result<FitReport> {
        let mut training = Training::new(self, fit, callbacks)?;
        let mut ended = training.run();
        let end = match &ended {
            Ok(()) => match &training.cx.stop {
                Some(reason) => End::Stopped(reason.clone()),
                None => End::Finished,
            },
            Err(e) => End::Failed(e.to_string()),
        };
        for i in 0..training.n_begun {
            let result = training.call(i, "train_end", |c, cx| c.train_end(cx, &end));
            ended = and(ended, result);
        }
        ended = and(ended, training.settle());
        ended = and(ended, training.restore_best());
        ended.map_err(|e| training.with_checkpoint(e))?;
        Ok(training.report())
    }
}

/// The first error, with the second.
fn and(first: Result<()>, second: Result<()>) -> Result<()> {
    match (first, second) {
        (Err(first), Err(second)) => Err(first.addition(second)),
        (first, second) => first.and(second),
    }
}

/// A training in progress.
struct Training<'f, 'c, 'd> {
    fit: &'f Fit<'d>,
    callbacks: &'f mut [&'c mut dyn Callback],
    /// Names of the callbacks, made unique.
    names: Vec<String>,
    cx: FitContext<'f>,
    drops_last: bool,
    loader: Arc<Loader>,
    /// Callbacks whose training has begun.
    n_begun: usize,
    /// The epoch so far.
    trained: Metrics,
    learning_rate: f64,
    epochs: Vec<EpochReport>,
    warnings: Vec<String>,
    workers: Vec<WorkerReport>,
    /// True after an error with batches under way, which a checkpoint would leave out.
    has_lost_batches: bool,
}

impl<'f, 'c, 'd> Training<'f, 'c, 'd> {
    fn new(
        trainer: &'f Trainer,
        fit: &'f Fit<'d>,
        callbacks: &'f mut [&'c mut dyn Callback],
    ) -> Result<Training<'f, 'c, 'd>> {
        let drops_last = trainer.check_step_batch(fit.batch_size)? || fit.drops_last;
        let resumed = fit.resumed.as_ref();
        let state = resumed.map_or_else(FitState::default, |r| r.state.clone());
        Ok(Training {
            names: unique(callbacks.iter().map(|c| c.name())),
            callbacks,
            cx: fit.context(trainer, drops_last)?,
            drops_last,
            loader: Arc::new(Loader::new(fit.loading)?),
            n_begun: 0,
            trained: state.trained,
            learning_rate: state.learning_rate,
            epochs: Vec::new(),
            warnings: Vec::new(),
            workers: trainer.workers().iter().map(WorkerReport::new).collect(),
            has_lost_batches: false,
            fit,
        })
    }

    fn report(self) -> FitReport {
        FitReport {
            epochs: self.epochs,
            n_steps: self.cx.step(),
            stopped: self.cx.stop,
            checkpoint: self.cx.checkpoint,
            warnings: self.warnings,
            workers: self.workers,
        }
    }

    fn run(&mut self) -> Result<()> {
        self.restore()?;
        for i in 0..self.callbacks.len() {
            self.call(i, "train_begin", |c, cx| c.train_begin(cx))?;
            self.n_begun += 1;
        }
        self.settle()?;
        while !self.is_over() {
            self.epoch()?;
        }
        Ok(())
    }

    /// An epoch whose last step is done still has its end.
    fn is_over(&self) -> bool {
        let is_done = self.cx.step() >= self.cx.n_steps && !self.cx.is_at_end();
        self.cx.stop.is_some() || is_done
    }

    /// Gives the variables the values of [`EarlyStopping`], after all files were written. A training that failed before its first step
    /// changes nothing.
    fn restore_best(&mut self) -> Result<()> {
        let best = std::mem::take(&mut self.cx.restored);
        match self.cx.has_begun || self.n_begun == self.callbacks.len() {
            true => Ok(self.cx.trainer.resources().restore(best)?),
            false => Ok(()),
        }
    }

    /// Gives the callbacks the states of the checkpoint.
    fn restore(&mut self) -> Result<()> {
        let Some(resumed) = &self.fit.resumed else {
            return Ok(());
        };
        let mut states = resumed.state.callbacks.clone();
        let path = resumed.path.display();
        for (callback, name) in self.callbacks.iter_mut().zip(&self.names) {
            let restored = callback.restore(states.remove(name).unwrap_or_default());
            restored.map_err(|e| e.context(format!("{path}: callback {name}")))?;
        }
        for name in states.keys() {
            let warning = format!("{path}: this training has no callback {name} to take its state");
            self.cx.warn(warning);
        }
        Ok(())
    }

    /// The rest of an epoch.
    fn epoch(&mut self) -> Result<()> {
        (self.cx.time, self.cx.n_timed) = (Duration::ZERO, 0);
        self.event("epoch_begin", |c, cx| c.epoch_begin(cx))?;
        self.settle()?;
        if self.cx.stop.is_some() {
            return Ok(());
        }
        let batches = self.cx.position.rest(self.fit.data)?;
        match self.workers.is_empty() {
            true => self.steps(batches)?,
            false => self.steps_of_workers(batches)?,
        }
        if !self.cx.is_at_end() {
            return Ok(());
        }
        match self.cx.stop {
            Some(_) => Ok(()),
            None => self.end_epoch(),
        }
    }

    /// A step on each batch.
    fn steps(&mut self, batches: Batches) -> Result<()> {
        let loader = self.loader.clone();
        let mut begin = Instant::now();
        loader.each(batches, |batch| {
            let n = n_examples(&batch);
            if self.is_left_out(n) {
                return Ok(ControlFlow::Break(()));
            }
            self.begin_step(&batch)?;
            let step = self.cx.trainer.step(batch);
            let step = step.map_err(|e| self.of_batch(e, self.cx.position.n_batches + 1))?;
            self.end_step(&step, n)?;
            self.cx.time += begin.elapsed();
            self.evaluate_after_step()?;
            self.settle()?;
            begin = Instant::now();
            let is_over = self.cx.stop.is_some() || self.cx.step() >= self.cx.n_steps;
            Ok(match is_over {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            })
        })
    }

    /// True for an incomplete last batch that is not trained on.
    fn is_left_out(&self, n: usize) -> bool {
        self.drops_last && n != self.fit.batch_size
    }

    fn begin_step(&mut self, batch: &Batch) -> Result<()> {
        self.cx.has_begun = true;
        self.event("step_begin", |c, cx| c.step_begin(cx, batch))
    }

    fn evaluate_after_step(&mut self) -> Result<()> {
        if self.fit.evaluate.is_step(self.cx.step()) {
            self.evaluate()?;
        }
        Ok(())
    }

    /// Counts a step on `n` examples.
    fn end_step(&mut self, step: &StepOutputs, n: usize) -> Result<()> {
        self.cx.n_timed += n;
        self.cx.position.n_batches += 1;
        self.learning_rate = step.learning_rate;
        let metrics = self.cx.trainer.metrics_of(&step.metrics);
        let loss = iter::once(("loss", step.loss));
        self.trained.add(n, loss.chain(metrics));
        self.event("step_end", |c, cx| c.step_end(cx, step))
    }

    fn end_epoch(&mut self) -> Result<()> {
        let finite = self.cx.trainer.check_finite();
        finite.map_err(|e| e.hint(LOWER))?;
        let n_epochs = self.cx.epoch() + 1;
        let held_out = match self.fit.evaluate.is_epoch(n_epochs) {
            true => self.evaluate()?,
            false => None,
        };
        let epoch = EpochReport {
            epoch: self.cx.epoch(),
            trained: std::mem::take(&mut self.trained),
            held_out,
            learning_rate: self.learning_rate,
            examples_per_s: self.cx.n_timed as f64 / self.cx.time.as_secs_f64().max(1e-9),
        };
        self.event("epoch_end", |c, cx| c.epoch_end(cx, &epoch))?;
        self.epochs.push(epoch);
        self.cx.position.next_epoch();
        self.settle()
    }

    /// Means over the held-out data, with their events.
    fn evaluate(&mut self) -> Result<Option<Metrics>> {
        let Some(data) = self.fit.held_out else {
            return Ok(None);
        };
        self.event("evaluation_begin", |c, cx| c.evaluation_begin(cx))?;
        let weights = self.fit.weights;
        let size = self.cx.trainer.evaluation_size(self.fit.batch_size);
        let means = self
            .cx
            .trainer
            .evaluate_by(&self.loader, weights, data, size);
        let means = means.map_err(|e| e.context("held-out data"))?;
        self.event("evaluation_end", |c, cx| c.evaluation_end(cx, &means))?;
        Ok(Some(means))
    }

    /// Calls all callbacks.
    fn event(
        &mut self,
        event: &str,
        f: impl Fn(&mut dyn Callback, &mut FitContext) -> Result<()>,
    ) -> Result<()> {
        (0..self.callbacks.len()).try_for_each(|i| self.call(i, event, &f))
    }

    fn call(
        &mut self,
        i: usize,
        event: &str,
        f: impl Fn(&mut dyn Callback, &mut FitContext) -> Result<()>,
    ) -> Result<()> {
        let result = f(&mut *self.callbacks[i], &mut self.cx);
        result.map_err(|e| e.context(format!("callback {}, {event}", self.names[i])))
    }

    /// Hands warnings on, and saves what callbacks have asked for.
    fn settle(&mut self) -> Result<()> {
        for warning in std::mem::take(&mut self.cx.warnings) {
            self.callbacks.iter_mut().for_each(|c| c.warning(&warning));
            self.warnings.push(warning);
        }
        // A checkpoint with the best value comes after the file with it: a crash between them loses nothing.
        let mut saves = std::mem::take(&mut self.cx.saves);
        // Weights alone have no position in the data.
        saves.retain(|save| save.weights_alone || !self.has_lost_batches);
        saves.sort_by_key(|save| matches!(save.target, Target::Folder(_)));
        saves.into_iter().try_for_each(|save| self.save(save))
    }

    fn save(&mut self, save: Save) -> Result<()> {
        let state = FitState {
            n_per_epoch: self.cx.n_per_epoch,
            trained: self.trained.clone(),
            learning_rate: self.learning_rate,
            callbacks: self.states(),
        };
        let snapshot = Snapshot {
            trainer: self.cx.trainer,
            position: &self.cx.position,
            state: &state,
            weights_alone: save.weights_alone,
        };
        match save.target {
            Target::File(path) => snapshot.write(save.notes, &path)?,
            Target::Folder(folder) => {
                let path = folder.add(&snapshot)?;
                if !save.weights_alone {
                    self.cx.checkpoint = Some(path);
                }
            }
        }
        Ok(())
    }

    fn states(&self) -> BTreeMap<String, CallbackState> {
        let states = self.names.iter().zip(self.callbacks.iter());
        let states = states.map(|(name, callback)| (name.clone(), callback.state()));
        let has_state = |(_, state): &(String, CallbackState)| *state != CallbackState::default();
        states.filter(has_state).collect()
    }

    /// The error of a step on a batch of this number in its epoch: with the number if loss or gradients are not finite.
    fn of_batch(&self, e: Error, batch: u64) -> Error {
        if e.kind() != ErrorKind::NotFinite {
            return e;
        }
        let epoch = self.cx.epoch() + 1;
        let message = format!("batch {batch} of epoch {epoch} changes nothing: {e}");
        let e = Error::new(ErrorKind::NotFinite, message);
        e.hint(LOWER)
    }

    /// The error of a training that has begun, with its newest checkpoint.
    fn with_checkpoint(&self, e: Error) -> Error {
        match &self.cx.checkpoint {
            Some(path) if self.cx.has_begun => {
                e.addition(format!("the last checkpoint is {}", path.display()))
            }
            _ => e,
        }
    }
}

const LOWER: &str = "a lower learning rate, clipping of gradients by their norm, or a check of the data for extreme values and batches of ignored labels";

/// Names, with numbers behind those that others have too.
fn unique(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut unique: Vec<String> = Vec::new();
    for name in names {
        let numbered = (2..).map(|i| format!("{name} {i}"));
        let mut free = iter::once(name.clone()).chain(numbered);
        let is_free = |candidate: &String| !unique.contains(candidate);
        let name = free.find(is_free).unwrap_or(name);
        unique.push(name);
    }
    unique
}
