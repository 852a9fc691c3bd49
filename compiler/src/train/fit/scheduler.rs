//! Learning rates by epoch.

use super::callback::{Callback, FitContext};
use crate::error::Result;

/// Sets the learning rate at the beginning of each epoch, as Keras' callback of this name does. The optimiser's schedule is
/// [`Schedule::Variable`](crate::train::Schedule::Variable).
pub struct LearningRateScheduler<F> {
    rate: F,
}

impl<F: FnMut(u64) -> f64> LearningRateScheduler<F> {
    /// The rate as a function of the epoch, from 0.
    pub fn new(rate: F) -> LearningRateScheduler<F> {
        LearningRateScheduler { rate }
    }
}

impl<F: FnMut(u64) -> f64> Callback for LearningRateScheduler<F> {
    fn name(&self) -> String {
        "LearningRateScheduler".to_owned()
    }

    fn train_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        cx.trainer().check_settable()
    }

    fn epoch_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        match cx.position().n_batches {
            0 => cx.set_learning_rate((self.rate)(cx.epoch())),
            // An epoch that is resumed has its rate.
            _ => Ok(()),
        }
    }
}
