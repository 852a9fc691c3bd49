//! Pooling over one, two and three axes.

use super::Model;
use super::convolution::axes;
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, PoolKind, ReduceKind, Shape, ValueId, Window};

/// Windows of a pooling over the `N` last axes of `[batch, channels, ..]`. They overlap where a stride
/// is less than the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool<const N: usize> {
    /// Extents of a window.
    pub size: [usize; N],
    /// Steps between windows.
    pub strides: [usize; N],
    /// Pads the borders by TensorFlow's and Keras' rule `"SAME"`: `ceil(n / stride)` windows along an
    /// extent `n`, so the padding is `max((ceil(n / stride) - 1) * stride + size - n, 0)`, half of it
    /// (rounded down) before the first element. PyTorch pads both sides alike. Otherwise windows lie
    /// within the image.
    pub same: bool,
}

/// Windows of a pooling over sequences `[batch, channels, length]`.
pub type Pool1d = Pool<1>;
/// Windows of a pooling over images `[batch, channels, height, width]`.
pub type Pool2d = Pool<2>;
/// Windows of a pooling over videos or volumes `[batch, channels, depth, height, width]`.
pub type Pool3d = Pool<3>;

impl<const N: usize> Pool<N> {
    /// Disjoint windows without padding.
    pub fn disjoint(size: [usize; N]) -> Pool<N> {
        Pool {
            size,
            strides: size,
            same: false,
        }
    }

    fn window(&self, layer: &str, spatial: &[Dim]) -> Result<Window> {
        let mut window = Window {
            strides: self.strides.to_vec(),
            dilations: vec![1; N],
            pads_low: vec![0; N],
            pads_high: vec![0; N],
        };
        if !self.same {
            return Ok(window);
        }
        for (i, n) in spatial.iter().enumerate() {
            let all = same_padding(n, self.size[i], self.strides[i]);
            let Some(all) = all else {
                let image: Vec<String> = spatial.iter().map(Dim::to_string).collect();
                let (image, strides) = (image.join(", "), self.strides);
                return Err(Error::invalid(format!(
                    "{layer}: the image is [{image}]; `same` with strides {strides:?} needs known extents above 0"
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
    /// The largest element of each window over the `N` last axes of `[batch, channels, ..]`. Padding is
    /// never the largest.
    ///
    /// The gradient of a window goes to its first largest element.
    pub fn max_pool<const N: usize>(&mut self, x: ValueId, pool: Pool<N>) -> Result<ValueId> {
        self.pool("max_pool", PoolKind::Max, x, pool)
    }

    /// The mean of each window over the `N` last axes of `[batch, channels, ..]`. Padding is not
    /// counted: a window at a border is the mean of its elements within the image, as in TensorFlow.
    /// PyTorch's `AvgPool2d` counts zeros there unless `count_include_pad=False`.
    pub fn avg_pool<const N: usize>(&mut self, x: ValueId, pool: Pool<N>) -> Result<ValueId> {
        self.pool("avg_pool", PoolKind::Avg, x, pool)
    }

    /// [`max_pool`](Model::max_pool) over disjoint windows of images without padding.
    pub fn max_pool2d(&mut self, x: ValueId, size: [usize; 2]) -> Result<ValueId> {
        self.max_pool(x, Pool::disjoint(size))
    }

    /// [`max_pool`](Model::max_pool) over disjoint windows of videos or volumes without padding.
    pub fn max_pool3d(&mut self, x: ValueId, size: [usize; 3]) -> Result<ValueId> {
        self.max_pool(x, Pool::disjoint(size))
    }

    /// The mean of each channel: `[batch, channels, length]` to `[batch, channels]`.
    pub fn global_avg_pool1d(&mut self, x: ValueId) -> Result<ValueId> {
        self.image::<1>("global_avg_pool1d", x)?;
        self.builder().reduce(ReduceKind::Mean, x, &[2], false)
    }

    /// The mean of each channel: `[batch, channels, height, width]` to `[batch, channels]`.
    pub fn global_avg_pool2d(&mut self, x: ValueId) -> Result<ValueId> {
        self.image::<2>("global_avg_pool2d", x)?;
        self.builder().reduce(ReduceKind::Mean, x, &[2, 3], false)
    }

    /// The mean of each channel: `[batch, channels, depth, height, width]` to `[batch, channels]`.
    pub fn global_avg_pool3d(&mut self, x: ValueId) -> Result<ValueId> {
        self.image::<3>("global_avg_pool3d", x)?;
        self.builder()
            .reduce(ReduceKind::Mean, x, &[2, 3, 4], false)
    }

    fn pool<const N: usize>(
        &mut self,
        layer: &str,
        kind: PoolKind,
        x: ValueId,
        pool: Pool<N>,
    ) -> Result<ValueId> {
        let shape = self.image::<N>(layer, x)?;
        let op = Op::Pool {
            kind,
            size: pool.size.to_vec(),
            window: pool.window(layer, &shape[2..])?,
            ceil: false,
            layout: Layout::ChannelsFirst,
        };
        self.builder().add1(op, &[x])
    }

    /// The extents of the images with `N` axes beside batch and channels that a layer takes.
    pub(super) fn image<const N: usize>(&mut self, layer: &str, x: ValueId) -> Result<Shape> {
        let shape = self.builder().operand(x)?.shape.clone();
        if shape.rank() == N + 2 {
            return Ok(shape);
        }
        let axes = axes(N);
        Err(Error::invalid(format!(
            "{layer}: the operand has the shape {shape}, expected {axes}"
        )))
    }
}
