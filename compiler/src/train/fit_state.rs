//! The state of a `fit` in checkpoints.

use super::fit::CallbackState;
use super::metrics::Metrics;
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;
use gristmill_runtime::safetensors::{Contents, Notes, Saved};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Display;

/// The state of a `fit` between two steps, besides variables and position.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct FitState {
    /// Batches of a whole epoch.
    pub(super) n_per_epoch: u64,
    /// Means over the batches of the epoch so far.
    pub(super) trained: Metrics,
    /// The learning rate of the last step.
    pub(super) learning_rate: f64,
    /// States of callbacks by name.
    pub(super) callbacks: BTreeMap<String, CallbackState>,
}

/// The note of a checkpoint with the state, in JSON.
pub(super) const NOTE: &str = "fit";
/// The container of callbacks' tensors: `CALLBACK/NUMBER`.
pub(super) const CONTAINER: &str = "gristmill fit";

/// The state as the note has it. Real numbers are texts, which keep every bit.
#[derive(Serialize, Deserialize)]
struct Note {
    n_per_epoch: u64,
    n_examples: u64,
    sums: Vec<(String, String)>,
    learning_rate: String,
    callbacks: BTreeMap<String, CallbackNote>,
}

#[derive(Serialize, Deserialize)]
struct CallbackNote {
    notes: Notes,
    /// Names of its tensors in their order.
    tensors: Vec<String>,
}

impl FitState {
    /// The state as a note.
    pub(super) fn note(&self) -> Result<String> {
        let sums = self.trained.sums().iter();
        let callback = |(name, state): (&String, &CallbackState)| {
            let tensors = state.tensors.iter().map(|(name, _)| name.clone());
            let note = CallbackNote {
                notes: state.notes.clone(),
                tensors: tensors.collect(),
            };
            (name.clone(), note)
        };
        let note = Note {
            n_per_epoch: self.n_per_epoch,
            n_examples: self.trained.n_examples(),
            sums: sums.map(|(n, sum)| (n.clone(), sum.to_string())).collect(),
            learning_rate: self.learning_rate.to_string(),
            callbacks: self.callbacks.iter().map(callback).collect(),
        };
        serde_json::to_string(&note).map_err(|e| Error::internal(format!("note {NOTE:?}: {e}")))
    }

    /// The callbacks' tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Saved> {
        let numbered = |(callback, state): (&String, &CallbackState)| {
            let tensors = state.tensors.iter().enumerate();
            let saved = tensors.map(|(i, (_, value))| Saved {
                container: CONTAINER.to_owned(),
                name: format!("{callback}/{i}"),
                value: value.clone(),
            });
            saved.collect::<Vec<_>>()
        };
        self.callbacks.iter().flat_map(numbered)
    }

    /// The state of a file; the default one of a file without. Takes the callbacks' tensors from its variables.
    pub(super) fn of(contents: &mut Contents) -> Result<FitState> {
        let Some(text) = contents.notes.get(NOTE) else {
            return Ok(FitState::default());
        };
        let note: Note = serde_json::from_str(text).map_err(wrong)?;
        let variables = std::mem::take(&mut contents.variables).into_iter();
        let (own, rest) = variables.partition::<Vec<Saved>, _>(|s| s.container == CONTAINER);
        contents.variables = rest;
        let mut own = own.into_iter().map(|s| (s.name, s.value)).collect();
        let callback = |(name, note): (String, CallbackNote)| {
            let state = note.state(&name, &mut own)?;
            Ok((name, state))
        };
        let callbacks = note.callbacks.into_iter().map(callback);
        let sums = note.sums.iter();
        let sums = sums.map(|(name, sum)| Ok((name.clone(), real(sum)?)));
        Ok(FitState {
            n_per_epoch: note.n_per_epoch,
            callbacks: callbacks.collect::<Result<_>>()?,
            trained: Metrics::of_sums(sums.collect::<Result<_>>()?, note.n_examples),
            learning_rate: real(&note.learning_rate)?,
        })
    }
}

impl CallbackNote {
    /// The state, with its tensors out of those of all callbacks.
    fn state(self, callback: &str, all: &mut BTreeMap<String, Tensor>) -> Result<CallbackState> {
        let tensor = |(i, name): (usize, String)| {
            let value = all.remove(&format!("{callback}/{i}"));
            let lacks = || wrong(format!("{callback} lacks its tensor {name:?}"));
            Ok((name.clone(), value.ok_or_else(lacks)?))
        };
        let tensors = self.tensors.into_iter().enumerate().map(tensor);
        Ok(CallbackState {
            tensors: tensors.collect::<Result<_>>()?,
            notes: self.notes,
        })
    }
}

fn real(text: &str) -> Result<f64> {
    text.parse().map_err(wrong::<std::num::ParseFloatError>)
}

fn wrong<E: Display>(e: E) -> Error {
    Error::invalid(format!("note {NOTE:?}: {e}"))
}
