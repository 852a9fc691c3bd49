//! Warnings of all compilations of a model.

use super::{Common, Compiled};
use std::sync::{MutexGuard, PoisonError};

impl Compiled {
    /// Warnings of the compilations so far, each once: nodes of the model in their form for training,
    /// requests for devices that could not be met ([`Fallback::Warn`](crate::place::Fallback::Warn)),
    /// slow fallbacks, files of the cache that do not fit. Shapes that a run compiles may add further ones.
    pub fn warnings(&self) -> Vec<String> {
        self.common.warnings().clone()
    }

    /// Warnings about the model itself, which no report of a compilation has.
    pub(crate) fn model_warnings(&self) -> &[String] {
        &self.model_warnings
    }
}

impl Common {
    /// Adds the warnings that are new.
    pub(super) fn add_warnings(&self, new: &[String]) {
        let mut warnings = self.warnings();
        for warning in new {
            if !warnings.contains(warning) {
                warnings.push(warning.clone());
            }
        }
    }

    pub(crate) fn warnings(&self) -> MutexGuard<'_, Vec<String>> {
        let warnings = self.warnings.lock();
        warnings.unwrap_or_else(PoisonError::into_inner)
    }
}
