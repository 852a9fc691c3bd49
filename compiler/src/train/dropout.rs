//! Dropout.

use super::model::Model;
use crate::error::Result;
use crate::ir::ValueId;
use crate::ir::random::key;

impl Model {
    /// In training, [`GraphBuilder::dropout`](crate::ir::GraphBuilder::dropout); otherwise `x` itself.
    ///
    /// The elements are chosen by the seed of the model, the open scopes, the number of dropouts before in the model, and the number of
    /// batches so far: each step, or micro-batch, has a mask of its own, the same on all devices and after a state was loaded.
    ///
    /// Errors with `InvalidInput` when the rate is not from 0 to below 1 and when `x` is not of floats.
    pub fn dropout(&mut self, x: ValueId, rate: f64) -> Result<ValueId> {
        if !self.is_training() || rate == 0.0 {
            self.builder().check_dropout(x, rate)?;
            return Ok(x);
        }
        let seed = self.next_dropout();
        let [y, _] = self.builder().dropout(x, rate, seed)?;
        Ok(y)
    }

    /// The seed of the next dropout's own bits.
    pub(super) fn next_dropout(&mut self) -> u64 {
        let number = self.n_dropouts;
        self.n_dropouts += 1;
        // A zero byte keeps the name apart from those of variables, which seed initial values.
        let name = format!("{}\0{number}", self.path("dropout"));
        key(self.seed, &name)
    }
}
