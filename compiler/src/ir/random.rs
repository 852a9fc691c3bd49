//! Random numbers in a graph: seeds of names, the stream of a step, dropout.

use super::{GraphBuilder, Op, ScalarOp, Type, ValueId};
use crate::error::{Error, Result};
use gristmill_runtime::{DType, Tensor};

/// The variable with the number of completed training steps.
pub const STEP: &str = "optimizer/step";

/// The seed of a name's own numbers.
pub fn key(seed: u64, name: &str) -> u64 {
    seed ^ fnv1a(name)
}

/// A hash of a name that stays the same from version to version (Fowler, Noll and Vo, 64 bits, "1a").
fn fnv1a(name: &str) -> u64 {
    let start = 0xCBF2_9CE4_8422_2325u64;
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
    name.bytes().fold(start, step)
}

impl GraphBuilder {
    /// The number of completed training steps, `i64`: the variable [`STEP`], which is 0 at first.
    pub fn steps_done(&mut self) -> Result<ValueId> {
        self.variable(STEP, Tensor::from_slice(&[0i64], &[])?)
    }

    /// The number of batches in all training steps so far, `i64`: [`steps_done`](GraphBuilder::steps_done), unless a step takes several.
    pub(crate) fn batches_done(&mut self) -> Result<ValueId> {
        match self.batches_done {
            Some(done) => Ok(done),
            None => self.steps_done(),
        }
    }

    /// Sets the number of batches.
    pub(crate) fn set_batches_done(&mut self, done: Option<ValueId>) {
        self.batches_done = done;
    }

    /// Each element of floats with probability `1 - rate` divided by it, and else 0 (Srivastava et al., 2014, section 10); and where
    /// it is kept, `bool`. The elements are chosen by the seed, their positions and the number of batches so far, which is
    /// [`steps_done`](GraphBuilder::steps_done) but for steps in micro-batches.
    ///
    /// Errors with `InvalidInput` when the rate is not from 0 to below 1 and when `x` is not of floats.
    pub fn dropout(&mut self, x: ValueId, rate: f64, seed: u64) -> Result<[ValueId; 2]> {
        self.check_dropout(x, rate)?;
        let step = self.batches_done()?;
        self.dropout_at(x, rate, seed, step)
    }

    /// [`dropout`](GraphBuilder::dropout) with `step`, an `i64` without axes, in the place of the number of steps.
    pub(crate) fn dropout_at(
        &mut self,
        x: ValueId,
        rate: f64,
        seed: u64,
        step: ValueId,
    ) -> Result<[ValueId; 2]> {
        let ty = self.check_dropout(x, rate)?;
        let shape = ty.shape.to_vec();
        let bits = self.add1(
            Op::RandomBits {
                seed,
                first: 0,
                shape,
            },
            &[step],
        )?;
        let threshold = (rate * 2f64.powi(32)).round().min(f64::from(u32::MAX));
        let threshold = self.scalar(DType::U32, threshold);
        let is_kept = self.map(ScalarOp::Ge, &[bits, threshold])?;
        let factor = self.scalar(ty.dtype, 1.0 / (1.0 - rate));
        let zero = self.scalar(ty.dtype, 0.0);
        let scaled = self.mul(x, factor)?;
        let y = self.map(ScalarOp::Select, &[is_kept, scaled, zero])?;
        Ok([y, is_kept])
    }

    /// The type of dropout's operand. Errors as [`dropout`](GraphBuilder::dropout) does.
    pub(crate) fn check_dropout(&self, x: ValueId, rate: f64) -> Result<Type> {
        let ty = self.operand(x)?.clone();
        if !(0.0..1.0).contains(&rate) {
            let message = format!("dropout: the rate is {rate}, expected 0 to below 1");
            return Err(Error::invalid(message));
        }
        if !ty.dtype.is_float() {
            let message = format!("dropout: the operand is {ty}, expected floats");
            return Err(Error::invalid(message));
        }
        Ok(ty)
    }
}
