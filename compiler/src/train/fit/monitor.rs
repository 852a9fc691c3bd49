//! A value that callbacks wait for.

use super::Every;
use super::callback::FitContext;
use crate::error::{Error, Result};
use crate::train::metrics::Metrics;
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::safetensors::Notes;

/// Prefix of the names of values on held-out data.
const HELD_OUT: &str = "held_out/";

/// A loss or metric whose best value counts: `loss` over an epoch's batches, or `held_out/loss` of an evaluation. NaN is never better.
#[derive(Clone, Debug, PartialEq)]
pub struct Monitor {
    name: String,
    is_highest: bool,
    /// Improvements by less do not count.
    min_delta: f64,
}

impl Monitor {
    /// The lower, the better, as for `held_out/loss`.
    pub fn lowest(name: &str) -> Monitor {
        Monitor {
            name: name.to_owned(),
            is_highest: false,
            min_delta: 0.0,
        }
    }

    /// The higher, the better, as for `held_out/accuracy`.
    pub fn highest(name: &str) -> Monitor {
        Monitor {
            is_highest: true,
            ..Monitor::lowest(name)
        }
    }

    /// Ignores improvements of `delta` or less.
    pub fn min_delta(self, delta: f64) -> Monitor {
        Monitor {
            min_delta: delta,
            ..self
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True for a value on held-out data.
    fn is_held_out(&self) -> bool {
        self.name.starts_with(HELD_OUT)
    }

    /// The name, with what is best.
    pub(super) fn text(&self) -> String {
        let (name, best) = (
            &self.name,
            if self.is_highest { "highest" } else { "lowest" },
        );
        format!("{best} {name}")
    }

    /// The value among the means of an epoch's batches.
    pub(super) fn of_trained(&self, trained: &Metrics) -> Option<f64> {
        match self.is_held_out() {
            true => None,
            false => trained.get(&self.name),
        }
    }

    /// The value among those of an evaluation.
    pub(super) fn of_held_out(&self, held_out: &Metrics) -> Option<f64> {
        held_out.get(self.name.strip_prefix(HELD_OUT)?)
    }

    /// True when a value is better than the best so far.
    pub(super) fn is_better(&self, value: f64, best: Option<f64>) -> bool {
        let Some(best) = best else {
            return !value.is_nan();
        };
        match self.is_highest {
            true => value > best + self.min_delta,
            false => value < best - self.min_delta,
        }
    }

    /// Errors when the training does not give the value.
    pub(super) fn check(&self, cx: &FitContext) -> Result<()> {
        if self.min_delta.is_nan() || self.min_delta < 0.0 {
            let delta = self.min_delta;
            return Err(Error::invalid(format!(
                "least improvement {delta}: expected 0 or more"
            )));
        }
        if self.is_held_out() && !cx.has_held_out() {
            let e = Error::invalid(format!("{:?} needs held-out data", self.name));
            return Err(e.hint("Fit { held_out: Some(&data), .. }"));
        }
        let own = cx.trainer().metric_names();
        let trained = own.iter().filter(|name| cx.trainer().is_step_metric(name));
        let mut known: Vec<String> = trained.cloned().collect();
        if cx.has_held_out() {
            known.extend(own.iter().map(|name| format!("{HELD_OUT}{name}")));
        }
        if !known.contains(&self.name) {
            let known = known.iter().map(String::as_str);
            return Err(Error::invalid(unknown("metric", &self.name, known)));
        }
        self.check_time(cx)
    }

    /// Errors when the value comes first after the training's end.
    fn check_time(&self, cx: &FitContext) -> Result<()> {
        let (has, when) = match (self.is_held_out(), cx.evaluate()) {
            (true, Every::Steps(n)) => (cx.n_steps() >= n, format!("{n} steps")),
            (true, Every::Epochs(n)) => (cx.n_epochs() >= n, format!("{n} epochs")),
            (false, _) => (cx.n_epochs() > 0, "an epoch".to_owned()),
        };
        match has || cx.step() >= cx.n_steps() {
            true => Ok(()),
            false => {
                let (name, n) = (&self.name, cx.n_steps());
                Err(Error::invalid(format!(
                    "{name:?} is first known after {when}, and the training has {n} steps"
                )))
            }
        }
    }
}

/// A number of a note.
pub(super) fn number(notes: &Notes, name: &str) -> Result<Option<f64>> {
    let Some(text) = notes.get(name) else {
        return Ok(None);
    };
    let wrong = |_| Error::invalid(format!("{name} is {text:?}, expected a number"));
    text.parse().map(Some).map_err(wrong)
}
