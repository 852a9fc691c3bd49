//! Normalisation by the statistics of a batch.

use super::{Init, Model};
use crate::error::{Error, Result};
use crate::ir::{Dim, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// The examples of a statistic of batch normalisation in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BatchStatistics {
    /// All examples of the batch, whatever the number of devices is (PyTorch's `SyncBatchNorm`).
    #[default]
    Whole,
    /// The examples of a replica, so that forward and backward passes need no sums over devices; moving averages follow the mean over the
    /// replicas (TensorFlow's default under `MirroredStrategy`; Hoffer, Hubara and Soudry, 2017, algorithm 1: ghost batches). With shards, the examples
    /// of a shard. Shares are equal, whatever the speeds of the devices are; a batch without equal shares has common statistics, and so has a value
    /// whose first axis is not that of the batch.
    PerReplica,
}

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
        match self.is_training() {
            true => self.by_batch(x, channels, norm),
            false => {
                let statistics = self.norm_variables(channels, 1, shape.len())?;
                self.normalised(x, statistics, norm.epsilon)
            }
        }
    }

    /// Scale, shift, moving mean and moving variance of channels, along an axis of so many.
    fn norm_variables(
        &mut self,
        channels: usize,
        axis: usize,
        rank: usize,
    ) -> Result<[ValueId; 4]> {
        let all = [
            self.variable("scale", &[channels], Init::Constant(1.0))?,
            self.variable("shift", &[channels], Init::Constant(0.0))?,
            self.untrained("moving_mean", &[channels], Init::Constant(0.0))?,
            self.untrained("moving_variance", &[channels], Init::Constant(1.0))?,
        ];
        let mut along = vec![1; rank];
        along[axis] = channels;
        self.along(all, &along)
    }

    /// By the statistics of the batch, or of each part of it.
    fn by_batch(&mut self, x: ValueId, channels: usize, norm: BatchNorm) -> Result<ValueId> {
        let shape = self.builder().operand(x)?.shape.clone();
        let parts = self.builder().in_parts(x)?;
        let y = parts.unwrap_or(x);
        // Behind an axis of parts.
        let first = usize::from(parts.is_some());
        let (channel, rank) = (first + 1, first + shape.len());
        let [scale, shift, mean, variance] = self.norm_variables(channels, channel, rank)?;
        let axes: Vec<usize> = (first..rank).filter(|&axis| axis != channel).collect();
        let own = self.statistics(y, &axes)?;
        let unbiased = self.unbiased(own[1], y, &axes)?;
        for (name, old, mut new) in [
            ("moving_mean", mean, own[0]),
            ("moving_variance", variance, unbiased),
        ] {
            if parts.is_some() {
                new = self.builder().mean_of_parts(new)?;
            }
            self.follow(name, [old, new], norm.decay)?;
        }
        let y = self.normalised(y, [scale, shift, own[0], own[1]], norm.epsilon)?;
        self.builder().reshape(y, shape.to_vec())
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
        [scale, shift, mean, variance]: [ValueId; 4],
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

    /// Mean and biased variance over some axes.
    fn statistics(&mut self, x: ValueId, axes: &[usize]) -> Result<[ValueId; 2]> {
        let b = self.builder();
        let mean = b.reduce(ReduceKind::Mean, x, axes, true)?;
        let difference = b.sub(x, mean)?;
        let square = b.mul(difference, difference)?;
        Ok([mean, b.reduce(ReduceKind::Mean, square, axes, true)?])
    }

    /// `variance * n / (n - 1)`, where it is over `n` elements along some axes; of one element the variance, which is 0.
    fn unbiased(&mut self, variance: ValueId, x: ValueId, axes: &[usize]) -> Result<ValueId> {
        let b = self.builder();
        let mut shape = b.operand(x)?.shape.to_vec();
        let others = (0..shape.len()).filter(|axis| !axes.contains(axis));
        others.for_each(|axis| shape[axis] = 1.into());
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
