//! Normalisation by the statistics of a batch.

use super::{Init, Model};
use crate::error::{Error, Result};
use crate::ir::{Dim, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Batch normalisation (Ioffe and Szegedy, 2015, algorithms 1 and 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    /// Part of a moving average that a step keeps: 1 less PyTorch's `momentum`; Keras' `momentum`.
    pub decay: f64,
    /// Added to the variance.
    pub epsilon: f64,
}

impl Default for BatchNorm {
    /// Decay 0.9, epsilon 1e-5.
    fn default() -> BatchNorm {
        BatchNorm {
            decay: 0.9,
            epsilon: 1e-5,
        }
    }
}

impl Model {
    /// Each channel of `[batch, channels, ..]` less its mean and divided by its deviation, times `scale`, plus `shift`.
    ///
    /// In training these are the statistics of the batch, and `moving_mean` and `moving_variance` follow them, the latter the unbiased one
    /// as in PyTorch; otherwise they are these.
    pub fn batch_norm(&mut self, x: ValueId, norm: BatchNorm) -> Result<ValueId> {
        let shape = self.builder().operand(x)?.shape.clone();
        let Some(channels) = shape.get(1).and_then(Dim::as_usize) else {
            return Err(Error::invalid(format!(
                "batch_norm: the operand has the shape {shape}, expected [batch, channels, ..] with known channels"
            )));
        };
        let scale = self.variable("scale", &[channels], Init::Constant(1.0))?;
        let shift = self.variable("shift", &[channels], Init::Constant(0.0))?;
        let mean = self.untrained("moving_mean", &[channels], Init::Constant(0.0))?;
        let variance = self.untrained("moving_variance", &[channels], Init::Constant(1.0))?;
        let mut along = vec![1; shape.len()];
        along[1] = channels;
        let [scale, shift, mean, variance] = self.along([scale, shift, mean, variance], &along)?;
        if !self.is_training() {
            return self.normalised(x, [mean, variance, scale, shift], norm.epsilon);
        }
        let [own_mean, own_variance] = self.statistics(x)?;
        let unbiased = self.unbiased(own_variance, x)?;
        self.follow("moving_mean", [mean, own_mean], norm.decay)?;
        self.follow("moving_variance", [variance, unbiased], norm.decay)?;
        self.normalised(x, [own_mean, own_variance, scale, shift], norm.epsilon)
    }

    fn along(&mut self, values: [ValueId; 4], shape: &[usize]) -> Result<[ValueId; 4]> {
        let mut values = values;
        for v in &mut values {
            *v = self.builder().reshape(*v, shape.iter().copied())?;
        }
        Ok(values)
    }

    /// `(x - mean) * rsqrt(variance + epsilon) * scale + shift`.
    fn normalised(
        &mut self,
        x: ValueId,
        [mean, variance, scale, shift]: [ValueId; 4],
        epsilon: f64,
    ) -> Result<ValueId> {
        let b = self.builder();
        let epsilon = b.scalar(DType::F32, epsilon);
        let variance = b.add_(variance, epsilon)?;
        let root = b.map(ScalarOp::Rsqrt, &[variance])?;
        let factor = b.mul(root, scale)?;
        let difference = b.sub(x, mean)?;
        let product = b.mul(difference, factor)?;
        b.add_(product, shift)
    }

    /// Mean and biased variance of each channel.
    fn statistics(&mut self, x: ValueId) -> Result<[ValueId; 2]> {
        let b = self.builder();
        let axes: Vec<usize> = (0..b.operand(x)?.rank())
            .filter(|&axis| axis != 1)
            .collect();
        let mean = b.reduce(ReduceKind::Mean, x, &axes, true)?;
        let difference = b.sub(x, mean)?;
        let square = b.mul(difference, difference)?;
        Ok([mean, b.reduce(ReduceKind::Mean, square, &axes, true)?])
    }

    /// `variance * n / (n - 1)`, where `n` elements are of a channel; of one element the variance, which is 0.
    fn unbiased(&mut self, variance: ValueId, x: ValueId) -> Result<ValueId> {
        let b = self.builder();
        let mut shape = b.operand(x)?.shape.to_vec();
        shape[1] = 1.into();
        let one = b.scalar(DType::F32, 1.0);
        let ones = b.broadcast(one, shape)?;
        let axes: Vec<usize> = (0..b.operand(ones)?.rank()).collect();
        let n = b.reduce(ReduceKind::Sum, ones, &axes, false)?;
        let less = b.sub(n, one)?;
        let less = b.max(less, one)?;
        let factor = b.div(n, less)?;
        b.mul(variance, factor)
    }

    /// Assigns a moving average, of the variable's shape `[channels]`.
    fn follow(&mut self, name: &str, [old, new]: [ValueId; 2], decay: f64) -> Result<()> {
        let b = self.builder();
        let (kept, entering) = (
            b.scalar(DType::F32, decay),
            b.scalar(DType::F32, 1.0 - decay),
        );
        let (kept, entering) = (b.mul(old, kept)?, b.mul(new, entering)?);
        let moved = b.add_(kept, entering)?;
        let n = b.operand(moved)?.shape.n_elements();
        let moved = b.reshape(moved, [n])?;
        self.assign(name, moved)?;
        Ok(())
    }
}
