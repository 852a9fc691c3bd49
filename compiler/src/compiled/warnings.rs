//! Warnings of all compilations of a model.

use super::Compiled;

impl Compiled {
    /// Warnings of the compilations so far, each once: nodes of the model in their form for training,
    /// requests for devices that could not be met ([`Fallback::Warn`](crate::place::Fallback::Warn)),
    /// slow fallbacks, files of the cache that do not fit. Shapes that a run compiles may add further ones.
    pub fn warnings(&self) -> Vec<String> {
        self.common.warnings().clone()
    }

    /// Warnings about the model itself, which no report of a compilation has.
    #[doc(hidden)]
    pub fn model_warnings(&self) -> &[String] {
        &self.model_warnings
    }
}
