//! The state of a `fit` in checkpoints.

use super::fit::CallbackState;
use super::metrics::Metrics;
use crate::error::{Error, Result};
use gristmill_runtime::safetensors::{Contents, Notes, Saved};
use std::collections::BTreeMap;

/// The state of a `fit` between two steps, besides variables and position.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct FitState {
    /// Means over the batches of the epoch so far.
    pub(super) trained: Metrics,
    /// The learning rate of the last step.
    pub(super) learning_rate: f64,
    /// States of callbacks by name.
    pub(super) callbacks: BTreeMap<String, CallbackState>,
}

/// The container of callbacks' tensors, whose names are `CALLBACK/TENSOR`.
const CALLBACKS: &str = "callbacks";
/// Notes of a callback: `callback/CALLBACK/NOTE`.
const CALLBACK: &str = "callback/";
/// Sums over the examples of an epoch so far: `trained/METRIC`.
const TRAINED: &str = "trained/";
/// Number of these examples.
const N_TRAINED: &str = "trained examples";
/// The learning rate of the last step.
const RATE: &str = "learning rate";

impl FitState {
    pub(super) fn notes(&self) -> Notes {
        let mut notes = Notes::new();
        for (name, sum) in self.trained.sums() {
            notes.insert(format!("{TRAINED}{name}"), sum.to_string());
        }
        notes.insert(N_TRAINED.to_owned(), self.trained.n_examples().to_string());
        notes.insert(RATE.to_owned(), self.learning_rate.to_string());
        for (callback, state) in &self.callbacks {
            // A callback of whose state only tensors are left is one, too.
            notes.insert(format!("{CALLBACK}{callback}/"), String::new());
            let own = state.notes.iter();
            let own = own.map(|(n, text)| (format!("{CALLBACK}{callback}/{n}"), text.clone()));
            notes.extend(own);
        }
        notes
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = Saved> {
        let all = self.callbacks.iter();
        let all = all.flat_map(|(callback, s)| s.tensors.iter().map(move |t| (callback, t)));
        all.map(|(callback, (name, value))| Saved {
            container: CALLBACKS.to_owned(),
            name: format!("{callback}/{name}"),
            value: value.clone(),
        })
    }

    /// The state of a file. Takes the callbacks' tensors from its variables.
    pub(super) fn of(contents: &mut Contents) -> Result<FitState> {
        let mut state = FitState::of_notes(&contents.notes)?;
        let variables = std::mem::take(&mut contents.variables).into_iter();
        let (own, variables) = variables.partition::<Vec<Saved>, _>(|s| s.container == CALLBACKS);
        contents.variables = variables;
        own.into_iter().for_each(|saved| state.take(saved));
        Ok(state)
    }

    fn of_notes(notes: &Notes) -> Result<FitState> {
        let mut state = FitState::default();
        let mut sums = Vec::new();
        for (name, text) in notes {
            if let Some(metric) = name.strip_prefix(TRAINED) {
                sums.push((metric.to_owned(), number(name, text)?));
            }
            let note = name.strip_prefix(CALLBACK).and_then(|n| n.rsplit_once('/'));
            if let Some((callback, note)) = note {
                let own = state.callbacks.entry(callback.to_owned()).or_default();
                if !note.is_empty() {
                    own.notes.insert(note.to_owned(), text.clone());
                }
            }
        }
        let of = |name: &str| notes.get(name).map_or(Ok(0.0), |text| number(name, text));
        state.trained = Metrics::of_sums(sums, of(N_TRAINED)? as u64);
        state.learning_rate = of(RATE)?;
        Ok(state)
    }

    /// Takes a tensor of a callback.
    fn take(&mut self, saved: Saved) {
        let mut known = self.callbacks.iter_mut();
        let own = known.find_map(|(callback, state)| {
            let rest = saved.name.strip_prefix(callback.as_str())?;
            Some((rest.strip_prefix('/')?.to_owned(), state))
        });
        if let Some((name, state)) = own {
            state.tensors.push((name, saved.value));
        }
    }
}

fn number(name: &str, text: &str) -> Result<f64> {
    let wrong = |_| Error::invalid(format!("note {name:?} is {text:?}, expected a number"));
    text.parse().map_err(wrong)
}
