//! Normalisation over neighbouring channels.

use super::Model;
use crate::error::{Error, Result};
use crate::ir::{Layout, Op, ScalarOp, ValueId, Window};
use gristmill_runtime::{DType, Tensor};

/// Local response normalisation: `x / (bias + alpha * sum(x^2))^beta`, the sum over `size` neighbouring channels (Krizhevsky et al., 2012,
/// section 3.3).
///
/// As TensorFlow's `local_response_normalization`, whose `depth_radius` `r` is a size of `2 * r + 1`. PyTorch's `LocalResponseNorm` divides
/// `alpha` by the size: its `alpha` is `size` times this one, and its `k` is `bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lrn {
    /// Number of channels in a sum: `size / 2` before the own one, the rest after it. Channels beyond the ends count as zeros.
    pub size: usize,
    /// Factor of the sum.
    pub alpha: f64,
    /// Exponent of the divisor.
    pub beta: f64,
    /// Added to the scaled sum.
    pub bias: f64,
}

impl Default for Lrn {
    /// The values of the paper: 5 channels, alpha 1e-4, beta 0.75, bias 2.
    fn default() -> Lrn {
        Lrn {
            size: 5,
            alpha: 1e-4,
            beta: 0.75,
            bias: 2.0,
        }
    }
}

impl Lrn {
    fn check(&self) -> Result<()> {
        let Lrn { alpha, bias, .. } = *self;
        let is_number = alpha.is_finite() && self.beta.is_finite() && bias.is_finite();
        match self.size > 0 && is_number && alpha >= 0.0 && bias > 0.0 {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "local_response_norm: size {}, alpha {alpha}, beta {}, bias {bias}; expected finite numbers, size and bias above 0, alpha 0 or more",
                self.size, self.beta
            ))),
        }
    }

    /// Filters of one pixel: `alpha` for each pair of neighbouring channels, 0 for others.
    fn band(&self, dtype: DType, channels: usize) -> Result<Tensor> {
        let (before, after) = (self.size / 2, (self.size - 1) / 2);
        let element = |i: usize| {
            let (own, other) = (i / channels, i % channels);
            let is_near = own.saturating_sub(before) <= other && other <= own.saturating_add(after);
            if is_near { self.alpha } else { 0.0 }
        };
        let values: Vec<f64> = (0..channels * channels).map(element).collect();
        let shape = [channels, channels, 1, 1];
        Ok(Tensor::from_f64s(dtype, &shape, &values)?)
    }
}

impl Model {
    /// Images `[batch, channels, height, width]` of floats, divided by the size of their neighbouring channels. The number of channels must be
    /// known.
    pub fn local_response_norm(&mut self, x: ValueId, lrn: Lrn) -> Result<ValueId> {
        lrn.check()?;
        let channels = self.image::<2>("local_response_norm", x)?[1].clone();
        let b = self.builder();
        let ty = b.operand(x)?.clone();
        let known = channels.as_usize().filter(|_| ty.dtype.is_float());
        let Some(channels) = known else {
            return Err(Error::invalid(format!(
                "local_response_norm: the operand is {ty}, expected floats and known channels"
            )));
        };
        // A product with a band matrix: its gradient is another one, and needs no change of layout.
        let band = b.constant(lrn.band(ty.dtype, channels)?);
        let square = b.mul(x, x)?;
        let sum = b.add1(pointwise(), &[square, band])?;
        let bias = b.scalar(ty.dtype, lrn.bias);
        let sum = b.add_(sum, bias)?;
        if lrn.beta == 0.75 {
            // Two roots cost much less than a power.
            let half = b.map(ScalarOp::Rsqrt, &[sum])?;
            let root = b.map(ScalarOp::Sqrt, &[sum])?;
            let quarter = b.map(ScalarOp::Rsqrt, &[root])?;
            let factor = b.mul(half, quarter)?;
            return b.mul(x, factor);
        }
        let exponent = b.scalar(ty.dtype, -lrn.beta);
        let factor = b.map(ScalarOp::Pow, &[sum, exponent])?;
        b.mul(x, factor)
    }
}

/// A convolution of single pixels.
fn pointwise() -> Op {
    Op::Conv {
        window: Window {
            strides: vec![1; 2],
            dilations: vec![1; 2],
            pads_low: vec![0; 2],
            pads_high: vec![0; 2],
        },
        groups: 1,
        layout: Layout::ChannelsFirst,
    }
}
