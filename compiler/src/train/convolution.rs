//! Convolutions over one, two and three axes.

use super::{Init, Model};
use crate::error::{Error, Result};
use crate::ir::{Layout, Op, ValueId, Window};

/// Settings of a convolution over `N` axes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conv<const N: usize> {
    /// Number of results per place.
    pub filters: usize,
    /// Extents of a filter.
    pub size: [usize; N],
    /// Steps between places.
    pub strides: [usize; N],
    /// Zeros around the image: `size - 1` along each axis whatever the strides, `size / 2` of them
    /// after the last element. With strides of 1 the result is as large as the image. For odd sizes
    /// this is PyTorch's `padding=size // 2`; with strides above 1, Keras' `"same"`
    /// ([`Pool::same`](super::Pool::same)) may pad less, and so read other places.
    pub same: bool,
    /// Adds a number to each result.
    pub has_bias: bool,
    /// Initial filters.
    pub init: Init,
}

/// Settings of a convolution over sequences.
pub type Conv1d = Conv<1>;
/// Settings of a convolution over images.
pub type Conv2d = Conv<2>;
/// Settings of a convolution over videos or volumes.
pub type Conv3d = Conv<3>;

impl<const N: usize> Conv<N> {
    /// Filters of a size over a padded image by steps of 1, with bias.
    pub fn same(filters: usize, size: usize) -> Conv<N> {
        Conv {
            filters,
            size: [size; N],
            strides: [1; N],
            same: true,
            has_bias: true,
            init: Init::GlorotUniform,
        }
    }

    fn window(&self) -> Window {
        let pads = self.size.map(|n| {
            if self.same {
                (n.saturating_sub(1), n / 2)
            } else {
                (0, 0)
            }
        });
        Window {
            strides: self.strides.to_vec(),
            dilations: vec![1; N],
            pads_low: pads.iter().map(|(all, high)| all - high).collect(),
            pads_high: pads.iter().map(|(_, high)| *high).collect(),
        }
    }
}

/// Names of the axes of images of which so many are spatial.
pub(super) fn axes(n: usize) -> String {
    let spatial = match n {
        0..=3 => ["depth", "height", "width"][3 - n..].join(", "),
        _ => format!("{n} spatial axes"),
    };
    match n {
        0 => "[batch, channels]".to_owned(),
        1 => "[batch, channels, length]".to_owned(),
        _ => format!("[batch, channels, {spatial}]"),
    }
}

impl Model {
    /// A convolution of sequences `[batch, channels, length]`. Variables `weights` `[filters, channels,
    /// length]` and `bias`.
    pub fn conv1d(&mut self, x: ValueId, conv: Conv1d) -> Result<ValueId> {
        self.conv("conv1d", x, conv)
    }

    /// A convolution of images `[batch, channels, height, width]`. Variables `weights` `[filters,
    /// channels, height, width]` and `bias`.
    pub fn conv2d(&mut self, x: ValueId, conv: Conv2d) -> Result<ValueId> {
        self.conv("conv2d", x, conv)
    }

    /// A convolution of videos or volumes `[batch, channels, depth, height, width]`. Variables `weights`
    /// `[filters, channels, depth, height, width]` and `bias`.
    pub fn conv3d(&mut self, x: ValueId, conv: Conv3d) -> Result<ValueId> {
        self.conv("conv3d", x, conv)
    }

    fn conv<const N: usize>(&mut self, layer: &str, x: ValueId, conv: Conv<N>) -> Result<ValueId> {
        let shape = self.image::<N>(layer, x)?;
        let Some(channels) = shape[1].as_usize() else {
            return Err(Error::invalid(format!(
                "{layer}: the operand has the shape {shape}, expected known channels"
            )));
        };
        if conv.size.contains(&0) {
            let size = conv.size;
            let message = format!("{layer}: filters of {size:?}, expected extents above 0");
            return Err(Error::invalid(message));
        }
        let of_filters = [&[conv.filters, channels], &conv.size[..]].concat();
        let filters = self.variable("weights", &of_filters, conv.init)?;
        let op = Op::Conv {
            window: conv.window(),
            groups: 1,
            layout: Layout::ChannelsFirst,
        };
        let y = self.builder().add1(op, &[x, filters])?;
        if !conv.has_bias {
            return Ok(y);
        }
        let bias = self.variable("bias", &[conv.filters], Init::Constant(0.0))?;
        let mut along = vec![conv.filters];
        along.resize(N + 1, 1);
        let bias = self.builder().reshape(bias, along)?;
        self.builder().add_(y, bias)
    }
}
