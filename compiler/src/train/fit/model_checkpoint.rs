//! Checkpoints and weights during a training.

use super::Every;
use super::callback::{Callback, CallbackState, EpochReport, FitContext, Target};
use super::monitor::{Monitor, number};
use crate::error::{Error, Result};
use crate::train::checkpoint::Checkpoints;
use crate::train::metrics::Metrics;
use crate::train::trainer::StepOutputs;
use gristmill_runtime::safetensors::{self, Notes};
use std::path::PathBuf;

/// Saves checkpoints during a training: at times, or when a value is better than before.
pub struct ModelCheckpoint {
    target: Wanted,
    weights_alone: bool,
}

enum Wanted {
    /// The newest, in a folder.
    Newest { folder: Checkpoints, every: Every },
    /// The best, in a file.
    Best {
        monitor: Monitor,
        path: PathBuf,
        best: Option<f64>,
    },
}

impl ModelCheckpoint {
    /// Saves at times in a folder, which keeps the newest files.
    pub fn newest(folder: Checkpoints, every: Every) -> ModelCheckpoint {
        ModelCheckpoint {
            target: Wanted::Newest { folder, every },
            weights_alone: false,
        }
    }

    /// Saves in one file, which is replaced atomically, whenever the value is better than all before. A resumed training
    /// keeps a file with a better value. [`Checkpoints::resume_from`] continues from the file. Unfinished files of killed processes in its
    /// folder are removed.
    pub fn best(monitor: Monitor, path: impl Into<PathBuf>) -> ModelCheckpoint {
        ModelCheckpoint {
            target: Wanted::Best {
                monitor,
                path: path.into(),
                best: None,
            },
            weights_alone: false,
        }
    }

    /// Saves the model's variables and their averages alone, for [`Trainer::load_weights`](crate::train::Trainer::load_weights); no
    /// training goes on from such a file.
    pub fn weights_only(self) -> ModelCheckpoint {
        ModelCheckpoint {
            weights_alone: true,
            ..self
        }
    }

    /// The value of the saved file, for the best one.
    pub fn best_value(&self) -> Option<f64> {
        match &self.target {
            Wanted::Newest { .. } => None,
            Wanted::Best { best, .. } => *best,
        }
    }

    fn save_newest(&self, cx: &mut FitContext, is_time: impl Fn(Every) -> bool) {
        if let Wanted::Newest { folder, every } = &self.target
            && is_time(*every)
        {
            let folder = Target::Folder(folder.clone());
            cx.save(folder, self.weights_alone, Notes::new());
        }
    }

    fn observe(&mut self, cx: &mut FitContext, value: impl Fn(&Monitor) -> Option<f64>) {
        let Wanted::Best {
            monitor,
            path,
            best,
        } = &mut self.target
        else {
            return;
        };
        let Some(value) = value(monitor).filter(|&value| monitor.is_better(value, *best)) else {
            return;
        };
        *best = Some(value);
        let notes = [(BY, monitor.text()), (BEST, value.to_string())];
        let notes = notes.map(|(name, text)| (name.to_owned(), text));
        cx.save(Target::File(path.clone()), self.weights_alone, notes.into());
    }
}

/// Notes of a file of the best: what it is the best by, and the value.
const BY: &str = "best by";
const BEST: &str = "best";

impl Callback for ModelCheckpoint {
    fn name(&self) -> String {
        "ModelCheckpoint".to_owned()
    }

    fn train_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        match &mut self.target {
            Wanted::Newest { folder, every } => {
                every.check("save")?;
                match cx.is_resumed() {
                    true => Ok(()),
                    false => folder.check_unused().map_err(|e| e.hint(ANOTHER)),
                }
            }
            Wanted::Best {
                monitor,
                path,
                best,
            } => {
                monitor.check(cx)?;
                cx.remove_unfinished_beside(path);
                if !path.exists() {
                    // A file that is gone is not the best one any more.
                    *best = None;
                    return Ok(());
                }
                let shown = path.display();
                if !cx.is_resumed() {
                    let e = Error::invalid(format!("{shown} is the best of an earlier training"));
                    return Err(e.hint(ANOTHER));
                }
                let contents = match safetensors::read(path) {
                    Ok(contents) => contents,
                    Err(e) => {
                        cx.warn(format!("{e}; the next best value replaces it"));
                        *best = None;
                        return Ok(());
                    }
                };
                let by = contents.notes.get(BY).map(String::as_str);
                if by != Some(&monitor.text()) {
                    let has = by.map_or_else(String::new, |by| format!(": it has the {by}"));
                    let own = monitor.text();
                    let message = format!("{shown} is no file of the {own}{has}");
                    return Err(Error::invalid(message).hint("another file"));
                }
                *best = number(&contents.notes, BEST)?;
                Ok(())
            }
        }
    }

    fn step_end(&mut self, cx: &mut FitContext, _step: &StepOutputs) -> Result<()> {
        let step = cx.step();
        self.save_newest(cx, |every| every.is_step(step));
        Ok(())
    }

    fn epoch_end(&mut self, cx: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        let n_epochs = cx.epoch() + 1;
        self.save_newest(cx, |every| every.is_epoch(n_epochs));
        self.observe(cx, |monitor| monitor.of_trained(&epoch.trained));
        Ok(())
    }

    fn evaluation_end(&mut self, cx: &mut FitContext, held_out: &Metrics) -> Result<()> {
        self.observe(cx, |monitor| monitor.of_held_out(held_out));
        Ok(())
    }

    fn state(&self) -> CallbackState {
        let best = self
            .best_value()
            .map(|best| (BEST.to_owned(), best.to_string()));
        CallbackState {
            notes: best.into_iter().collect(),
            tensors: Vec::new(),
        }
    }

    fn restore(&mut self, state: CallbackState) -> Result<()> {
        if let Wanted::Best { best, .. } = &mut self.target {
            *best = number(&state.notes, BEST)?;
        }
        Ok(())
    }
}

const ANOTHER: &str = "Fit::resumed continues it; another path begins a new one";
