//! Pooling of images.

use super::Model;
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, PoolKind, ReduceKind, ValueId, Window};

/// Windows of a pooling over images `[batch, channels, height, width]`. They overlap where a stride is less than the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool2d {
    /// Extents of a window.
    pub size: [usize; 2],
    /// Steps between windows.
    pub strides: [usize; 2],
    /// Pads the borders by TensorFlow's and Keras' rule `"SAME"`: `ceil(n / stride)` windows along an extent `n`, so the padding is
    /// `max((ceil(n / stride) - 1) * stride + size - n, 0)`, half of it (rounded down) before the first element. PyTorch pads both sides
    /// alike. Otherwise windows lie within the image.
    pub same: bool,
}

impl Pool2d {
    /// Disjoint windows without padding.
    pub fn disjoint(size: [usize; 2]) -> Pool2d {
        Pool2d {
            size,
            strides: size,
            same: false,
        }
    }

    fn window(&self, layer: &str, spatial: [&Dim; 2]) -> Result<Window> {
        let mut window = Window {
            strides: self.strides.to_vec(),
            dilations: vec![1; 2],
            pads_low: vec![0; 2],
            pads_high: vec![0; 2],
        };
        if !self.same {
            return Ok(window);
        }
        for (i, n) in spatial.into_iter().enumerate() {
            let all = same_padding(n, self.size[i], self.strides[i]);
            let Some(all) = all else {
                let [height, width] = spatial;
                return Err(Error::invalid(format!(
                    "{layer}: the image is [{height}, {width}]; `same` with strides {:?} needs known extents above 0",
                    self.strides
                )));
            };
            window.pads_low[i] = all / 2;
            window.pads_high[i] = all - all / 2;
        }
        Ok(window)
    }
}

/// Elements of padding along an extent by the rule `"SAME"`; `None` where it depends on an unknown extent.
fn same_padding(n: &Dim, size: usize, stride: usize) -> Option<usize> {
    if stride == 1 {
        return Some(size.saturating_sub(1));
    }
    let n = n.as_usize().filter(|&n| n > 0)?;
    // A stride of 0 is an error of the op.
    let last = (n.div_ceil(stride.max(1)) - 1) * stride;
    Some(last.saturating_add(size).saturating_sub(n))
}

impl Model {
    /// The largest element of each window of images `[batch, channels, height, width]`. Padding is never the largest.
    ///
    /// The gradient of a window goes to its first largest element.
    pub fn max_pool(&mut self, x: ValueId, pool: Pool2d) -> Result<ValueId> {
        self.pool("max_pool", PoolKind::Max, x, pool)
    }

    /// The mean of each window of images `[batch, channels, height, width]`. Padding is not counted: a window at a border is the mean of its
    /// elements within the image, as in TensorFlow. PyTorch's `AvgPool2d` counts zeros there unless `count_include_pad=False`.
    pub fn avg_pool(&mut self, x: ValueId, pool: Pool2d) -> Result<ValueId> {
        self.pool("avg_pool", PoolKind::Avg, x, pool)
    }

    /// [`max_pool`](Model::max_pool) over disjoint windows of `size` without padding.
    pub fn max_pool2d(&mut self, x: ValueId, size: [usize; 2]) -> Result<ValueId> {
        self.max_pool(x, Pool2d::disjoint(size))
    }

    /// The mean of each channel: `[batch, channels, height, width]` to `[batch, channels]`.
    pub fn global_avg_pool2d(&mut self, x: ValueId) -> Result<ValueId> {
        self.image("global_avg_pool2d", x)?;
        self.builder().reduce(ReduceKind::Mean, x, &[2, 3], false)
    }

    fn pool(&mut self, layer: &str, kind: PoolKind, x: ValueId, pool: Pool2d) -> Result<ValueId> {
        let [_, _, height, width] = self.image(layer, x)?;
        let op = Op::Pool {
            kind,
            size: pool.size.to_vec(),
            window: pool.window(layer, [&height, &width])?,
            ceil: false,
            layout: Layout::ChannelsFirst,
        };
        self.builder().add1(op, &[x])
    }

    /// The extents of the images that a layer takes.
    pub(super) fn image(&mut self, layer: &str, x: ValueId) -> Result<[Dim; 4]> {
        let shape = self.builder().operand(x)?.shape.clone();
        let extents = <[Dim; 4]>::try_from(shape.0.clone());
        extents.map_err(|_| {
            Error::invalid(format!(
                "{layer}: the operand has the shape {shape}, expected [batch, channels, height, width]"
            ))
        })
    }
}
