//! Dropout.

use super::model::Model;
use super::philox::key;
use super::update::STEP;
use crate::error::{Error, Result};
use crate::ir::{Op, ScalarOp, ValueId};
use gristmill_runtime::{DType, Tensor};

impl Model {
    /// In training, each element of floats with probability `1 - rate` divided by it, and else 0 (Srivastava et al., 2014, section 10);
    /// otherwise `x` itself.
    ///
    /// The elements are chosen by the seed of the model, the open scopes, the number of dropouts before in the model, and the number of
    /// steps that are done: each step has a mask of its own, the same on all devices and after a state was loaded.
    ///
    /// Errors with `InvalidInput` when the rate is not from 0 to below 1 and when `x` is not of floats.
    pub fn dropout(&mut self, x: ValueId, rate: f64) -> Result<ValueId> {
        let ty = self.builder().operand(x)?.clone();
        if !(0.0..1.0).contains(&rate) {
            let message = format!("dropout: the rate is {rate}, expected 0 to below 1");
            return Err(Error::invalid(message));
        }
        if !ty.dtype.is_float() {
            let message = format!("dropout: the operand is {ty}, expected floats");
            return Err(Error::invalid(message));
        }
        if !self.is_training() || rate == 0.0 {
            return Ok(x);
        }
        let seed = self.next_dropout();
        let step = self.builder().variable(STEP, first_step()?)?;
        let shape = ty.shape.to_vec();
        let b = self.builder();
        let bits = b.add1(Op::RandomBits { seed, shape }, &[step])?;
        let threshold = (rate * 2f64.powi(32)).round().min(f64::from(u32::MAX));
        let threshold = b.scalar(DType::U32, threshold);
        let is_kept = b.map(ScalarOp::Ge, &[bits, threshold])?;
        let (factor, zero) = (
            b.scalar(ty.dtype, 1.0 / (1.0 - rate)),
            b.scalar(ty.dtype, 0.0),
        );
        let scaled = b.mul(x, factor)?;
        b.map(ScalarOp::Select, &[is_kept, scaled, zero])
    }

    /// The seed of the next dropout's own bits.
    fn next_dropout(&mut self) -> u64 {
        let number = self.n_dropouts;
        self.n_dropouts += 1;
        // A zero byte keeps the name apart from those of variables, which seed initial values.
        let name = format!("{}\0{number}", self.path("dropout"));
        key(self.seed, &name)
    }
}

/// The number of steps before the first one.
pub(super) fn first_step() -> Result<Tensor> {
    Ok(Tensor::from_slice(&[0i64], &[])?)
}
