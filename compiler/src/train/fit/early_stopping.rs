//! The end of a training that gets no better.

use super::callback::{Callback, CallbackState, End, EpochReport, FitContext};
use super::monitor::{Monitor, number};
use crate::error::{Error, Result};
use crate::train::metrics::Metrics;
use gristmill_runtime::safetensors::{Notes, Saved};

/// Stops the training when a value no longer improves. However the training ends, the variables then have the weights of the best value.
///
/// The weights are kept in memory and in checkpoints: variables of the model and their averages, without the optimiser's state.
pub struct EarlyStopping {
    monitor: Monitor,
    patience: u64,
    keeps_last: bool,
    best: Option<f64>,
    n_waited: u64,
    weights: Vec<Saved>,
}

impl EarlyStopping {
    /// Stops at the `patience`th value in a row that is no better than the best one.
    pub fn new(monitor: Monitor, patience: u64) -> EarlyStopping {
        EarlyStopping {
            monitor,
            patience,
            keeps_last: false,
            best: None,
            n_waited: 0,
            weights: Vec::new(),
        }
    }

    /// Leaves the weights of the last step in place.
    pub fn keeping_last(self) -> EarlyStopping {
        EarlyStopping {
            keeps_last: true,
            ..self
        }
    }

    /// The best value so far.
    pub fn best(&self) -> Option<f64> {
        self.best
    }

    /// The monitor, and whether it keeps weights.
    fn by(&self) -> String {
        let last = if self.keeps_last {
            ", without weights"
        } else {
            ""
        };
        format!("{}{last}", self.monitor.text())
    }

    fn observe(&mut self, cx: &mut FitContext, value: Option<f64>) -> Result<()> {
        let Some(value) = value else {
            return Ok(());
        };
        if self.monitor.is_better(value, self.best) {
            (self.best, self.n_waited) = (Some(value), 0);
            if !self.keeps_last {
                self.weights = cx.trainer().weights()?;
            }
            return Ok(());
        }
        self.n_waited += 1;
        self.stop_if_over(cx);
        Ok(())
    }

    fn stop_if_over(&self, cx: &mut FitContext) {
        if self.n_waited < self.patience {
            return;
        }
        let (name, n) = (self.monitor.name(), self.n_waited);
        let best = self.best;
        let best = best.map_or_else(String::new, |best| format!("; the best is {best}"));
        cx.stop(format!("{name} did not improve {n} times in a row{best}"));
    }
}

impl Callback for EarlyStopping {
    fn name(&self) -> String {
        "EarlyStopping".to_owned()
    }

    fn train_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        if self.patience == 0 {
            return Err(Error::invalid("patience 0: expected at least 1"));
        }
        if !cx.is_resumed() {
            (self.best, self.n_waited) = (None, 0);
            self.weights.clear();
        }
        self.monitor.check(cx)?;
        self.stop_if_over(cx);
        Ok(())
    }

    fn epoch_end(&mut self, cx: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        self.observe(cx, self.monitor.of_trained(&epoch.trained))
    }

    fn evaluation_end(&mut self, cx: &mut FitContext, held_out: &Metrics) -> Result<()> {
        self.observe(cx, self.monitor.of_held_out(held_out))
    }

    fn train_end(&mut self, cx: &mut FitContext, _end: &End) -> Result<()> {
        // Another callback of this kind may have weights.
        if !self.weights.is_empty() {
            cx.restored.clone_from(&self.weights);
        }
        Ok(())
    }

    fn state(&self) -> CallbackState {
        let mut notes = Notes::new();
        notes.insert("waited".to_owned(), self.n_waited.to_string());
        notes.insert(BY.to_owned(), self.by());
        if let Some(best) = self.best {
            notes.insert("best".to_owned(), best.to_string());
        }
        let named = |saved: &Saved| (key(saved), saved.value.clone());
        CallbackState {
            notes,
            tensors: self.weights.iter().map(named).collect(),
        }
    }

    fn restore(&mut self, state: CallbackState) -> Result<()> {
        if let Some(by) = state.notes.get(BY).filter(|by| **by != self.by()) {
            let own = self.by();
            let e = Error::invalid(format!("it waited for the {by}, and now for the {own}"));
            return Err(e.hint("the same monitor, or a new training"));
        }
        self.best = number(&state.notes, "best")?;
        self.n_waited = number(&state.notes, "waited")?.unwrap_or(0.0) as u64;
        let saved = |(key, value): (String, _)| {
            let (container, name) = key.split_once(SEPARATOR).unwrap_or(("", &key));
            Saved {
                container: container.to_owned(),
                name: name.to_owned(),
                value,
            }
        };
        self.weights = state.tensors.into_iter().map(saved).collect();
        Ok(())
    }
}

/// The note with the monitor.
const BY: &str = "by";

/// Stands between the container and the name of a variable, in neither of which it is likely: the unit separator of ASCII.
const SEPARATOR: char = '\u{1f}';

/// Container and name of a variable in one text.
fn key(saved: &Saved) -> String {
    format!("{}{SEPARATOR}{}", saved.container, saved.name)
}
