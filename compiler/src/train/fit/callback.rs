//! Callbacks of a `fit`, and what they see of it.

use super::Every;
use crate::error::Result;
use crate::train::checkpoint::{Checkpoints, Position};
use crate::train::data::Batch;
use crate::train::metrics::Metrics;
use crate::train::trainer::{StepOutputs, Trainer};
use gristmill_runtime::safetensors::{Notes, Saved};
use gristmill_runtime::{Tensor, files};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Code for [`Trainer::fit`] to call at events. All methods but [`name`](Callback::name) do nothing by default.
///
/// The order of events: `train_begin`; for each epoch `epoch_begin`, `step_begin` and `step_end` of each step, `evaluation_begin` and
/// `evaluation_end` where [`Fit::evaluate`](super::Fit::evaluate) says so, `epoch_end`; `train_end` also after an error. Each event goes to
/// all callbacks in the order of the list. Warnings and checkpoints on request of callbacks follow: after `train_begin`, after
/// `epoch_begin`, after a step and its evaluation, after `epoch_end`, after `train_end`.
///
/// An error ends the training. The variables stay as the last step left them, unless an
/// [`EarlyStopping`](super::EarlyStopping) restores better ones.
pub trait Callback {
    /// Its name in errors, and in checkpoints, which hold its [state](Callback::state).
    fn name(&self) -> String;

    /// Before the first step. A resumed training has its state by now.
    fn train_begin(&mut self, _cx: &mut FitContext) -> Result<()> {
        Ok(())
    }

    /// After the last step, also if an error or a callback ended the training. A callback without a successful `train_begin` has no end.
    fn train_end(&mut self, _cx: &mut FitContext, _end: &End) -> Result<()> {
        Ok(())
    }

    /// Before the first step of an epoch. A resumed epoch begins a second time.
    fn epoch_begin(&mut self, _cx: &mut FitContext) -> Result<()> {
        Ok(())
    }

    /// After an epoch and its evaluation. A stopped epoch has no end.
    fn epoch_end(&mut self, _cx: &mut FitContext, _epoch: &EpochReport) -> Result<()> {
        Ok(())
    }

    /// Before a step on a batch.
    fn step_begin(&mut self, _cx: &mut FitContext, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    /// After a step.
    fn step_end(&mut self, _cx: &mut FitContext, _step: &StepOutputs) -> Result<()> {
        Ok(())
    }

    /// Before an evaluation on the held-out data.
    fn evaluation_begin(&mut self, _cx: &mut FitContext) -> Result<()> {
        Ok(())
    }

    /// After an evaluation on the held-out data.
    fn evaluation_end(&mut self, _cx: &mut FitContext, _held_out: &Metrics) -> Result<()> {
        Ok(())
    }

    /// A [warning](FitContext::warn) to show.
    fn warning(&mut self, _text: &str) {}

    /// The state for a resumed training, such as the best value so far. Checkpoints hold it.
    fn state(&self) -> CallbackState {
        CallbackState::default()
    }

    /// Takes the state of a checkpoint, before `train_begin` of a resumed training: the default state if the checkpoint has none.
    fn restore(&mut self, _state: CallbackState) -> Result<()> {
        Ok(())
    }
}

/// The state of a callback in a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallbackState {
    /// Texts by name.
    pub notes: Notes,
    /// Tensors by name.
    pub tensors: Vec<(String, Tensor)>,
}

/// The end of a training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It has all its epochs or steps.
    Finished,
    /// A callback stopped it, for this reason.
    Stopped(String),
    /// By an error.
    Failed(String),
}

/// A completed epoch.
#[derive(Clone, Debug, PartialEq)]
pub struct EpochReport {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Means over its batches, each before its step.
    pub trained: Metrics,
    /// Means over the held-out data after the epoch; `None` without an evaluation.
    pub held_out: Option<Metrics>,
    /// The learning rate of the last step.
    pub learning_rate: f64,
    /// Steps per second times examples of a step, without evaluations and callbacks between epochs. Those of this process alone.
    pub examples_per_s: f64,
}

/// A training as its callbacks see it.
pub struct FitContext<'f> {
    pub(super) trainer: &'f Trainer,
    pub(super) position: Position,
    pub(super) n_per_epoch: u64,
    pub(super) n_steps: u64,
    /// Batches that asynchronous workers have, which are no steps yet.
    pub(super) n_under_way: u64,
    pub(super) has_held_out: bool,
    pub(super) evaluate: Every,
    pub(super) is_resumed: bool,
    pub(super) checkpoint: Option<PathBuf>,
    pub(super) stop: Option<String>,
    pub(super) warnings: Vec<String>,
    pub(super) saves: Vec<Save>,
    /// True from the first step of this process on.
    pub(super) has_begun: bool,
    /// Time of the epoch's steps in this process, and their examples.
    pub(super) time: Duration,
    pub(super) n_timed: usize,
    /// Values for the variables at the very end.
    pub(super) restored: Vec<Saved>,
}

/// A file on request of a callback.
pub(super) struct Save {
    pub(super) target: Target,
    pub(super) weights_alone: bool,
    pub(super) notes: Notes,
}

/// Where a checkpoint is saved.
pub(super) enum Target {
    /// In a folder, by its number of steps.
    Folder(Checkpoints),
    /// In one file, which is replaced.
    File(PathBuf),
}

impl<'f> FitContext<'f> {
    /// The model in training, with its variables.
    pub fn trainer(&self) -> &'f Trainer {
        self.trainer
    }

    /// The epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.position.epoch
    }

    /// Completed steps of this training, those before a resumed checkpoint included.
    pub fn step(&self) -> u64 {
        let whole = self.position.epoch.saturating_mul(self.n_per_epoch);
        whole.saturating_add(self.position.n_batches)
    }

    /// Steps of the whole training, unless a callback stops it earlier.
    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }

    /// The position in the data.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// True for a resumed training.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// True with held-out data.
    pub fn has_held_out(&self) -> bool {
        self.has_held_out
    }

    /// When the held-out data are evaluated.
    pub fn evaluate(&self) -> Every {
        self.evaluate
    }

    /// The newest checkpoint of this training, or the resumed one.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.checkpoint.as_deref()
    }

    /// Ends the training after the step in progress and its evaluation, for a reason to show. The epoch then has no end. Asynchronous
    /// workers push the batches under way first.
    pub fn stop(&mut self, reason: impl Into<String>) {
        self.stop.get_or_insert(reason.into());
    }

    /// Sets the rate of the next steps. Errors as [`Trainer::set_learning_rate`] does.
    pub fn set_learning_rate(&self, rate: f64) -> Result<()> {
        self.trainer.set_learning_rate(rate)
    }

    /// Adds a warning: to [`FitReport::warnings`](super::FitReport::warnings), and to the callbacks.
    pub fn warn(&mut self, text: impl Into<String>) {
        self.warnings.push(text.into());
    }

    /// Removes what killed processes have left beside a file that is to be replaced.
    pub(super) fn remove_unfinished_beside(&mut self, path: &Path) {
        if let Err(e) = files::remove_unfinished_beside(path) {
            let path = path.display();
            self.warn(format!("{path}: {e}; unfinished files beside it stay"));
        }
    }

    /// Saves a checkpoint in a folder once all callbacks have seen this event, or this step and its evaluation. Not after an error with
    /// batches under way at asynchronous workers: it would leave them out.
    pub fn save_checkpoint(&mut self, checkpoints: &Checkpoints) {
        self.save(Target::Folder(checkpoints.clone()), false, Notes::new());
    }

    /// True between the last step of an epoch and its end.
    pub(super) fn is_at_end(&self) -> bool {
        self.position.n_batches == self.n_per_epoch
    }

    /// The number of the step that begins; with asynchronous workers, that of its batch.
    pub(super) fn next_step(&self) -> u64 {
        self.step() + self.n_under_way + 1
    }

    /// True before a step after which something happens.
    pub(super) fn is_next(&self, every: Every) -> bool {
        let n = self.next_step();
        let per_epoch = self.n_per_epoch;
        match every {
            Every::Steps(_) => every.is_step(n),
            Every::Epochs(_) => n.is_multiple_of(per_epoch) && every.is_epoch(n / per_epoch),
        }
    }

    /// Number of whole epochs of the training.
    pub(super) fn n_epochs(&self) -> u64 {
        self.n_steps / self.n_per_epoch.max(1)
    }

    pub(super) fn save(&mut self, target: Target, weights_alone: bool, notes: Notes) {
        self.saves.push(Save {
            target,
            weights_alone,
            notes,
        });
    }
}
