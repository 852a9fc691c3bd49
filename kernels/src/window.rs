//! The geometry that convolutions and pooling share.

use crate::descriptor::plain;
use std::ops::Range;

/// Geometry of a kernel window that moves over NHWC images. Sizes are in pixels, strides of `x` in
/// elements; the channel stride is 1.
///
/// Output pixel (oh, ow) sees input pixels (oh * stride_h + i * dilation_h - pad_top, ow * stride_w
/// + j * dilation_w - pad_left). Bottom and right padding follow from the output's size.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Images.
    pub batch: usize,
    /// Input rows.
    pub in_h: usize,
    /// Input columns.
    pub in_w: usize,
    /// Output rows.
    pub out_h: usize,
    /// Output columns.
    pub out_w: usize,
    /// Window rows.
    pub kernel_h: usize,
    /// Window columns.
    pub kernel_w: usize,
    /// Input rows between output rows.
    pub stride_h: usize,
    /// Input columns between output columns.
    pub stride_w: usize,
    /// Input rows between window rows.
    pub dilation_h: usize,
    /// Input columns between window columns.
    pub dilation_w: usize,
    /// Rows of padding above.
    pub pad_top: usize,
    /// Columns of padding to the left.
    pub pad_left: usize,
    /// Input elements between images.
    pub x_n_stride: usize,
    /// Input elements between rows.
    pub x_h_stride: usize,
    /// Input elements between pixels of a row.
    pub x_w_stride: usize,
}

plain!(Window {
    batch,
    in_h,
    in_w,
    out_h,
    out_w,
    kernel_h,
    kernel_w,
    stride_h,
    stride_w,
    dilation_h,
    dilation_w,
    pad_top,
    pad_left,
    x_n_stride,
    x_h_stride,
    x_w_stride,
});

impl Window {
    /// A `kernel_h x kernel_w` window over contiguous images `[batch, in_h, in_w, channels]`,
    /// stride and dilation 1, no padding.
    pub fn new(
        batch: usize,
        in_h: usize,
        in_w: usize,
        channels: usize,
        kernel_h: usize,
        kernel_w: usize,
    ) -> Window {
        Window {
            batch,
            in_h,
            in_w,
            out_h: (in_h + 1).saturating_sub(kernel_h),
            out_w: (in_w + 1).saturating_sub(kernel_w),
            kernel_h,
            kernel_w,
            stride_h: 1,
            stride_w: 1,
            dilation_h: 1,
            dilation_w: 1,
            pad_top: 0,
            pad_left: 0,
            x_n_stride: in_h * in_w * channels,
            x_h_stride: in_w * channels,
            x_w_stride: channels,
        }
    }

    /// The same with strides, dilations (rows, columns) and pads (top, left, bottom, right); the
    /// output's size follows, rounded down.
    #[must_use]
    pub fn with(mut self, stride: [usize; 2], dilation: [usize; 2], pads: [usize; 4]) -> Window {
        let out = |size: usize, window: usize, stride: usize, dilation: usize, pad: usize| {
            let reach = dilation * (window - 1) + 1;
            (size + pad)
                .checked_sub(reach)
                .map_or(0, |rest| rest / stride + 1)
        };
        [self.stride_h, self.stride_w] = stride;
        [self.dilation_h, self.dilation_w] = dilation;
        (self.pad_top, self.pad_left) = (pads[0], pads[1]);
        let (pad_h, pad_w) = (pads[0] + pads[2], pads[1] + pads[3]);
        self.out_h = out(self.in_h, self.kernel_h, stride[0], dilation[0], pad_h);
        self.out_w = out(self.in_w, self.kernel_w, stride[1], dilation[1], pad_w);
        self
    }

    /// Output pixels of all images.
    pub fn n_pixels(&self) -> usize {
        self.batch * self.out_h * self.out_w
    }

    /// True when the kernels can run it.
    pub(crate) fn valid(&self) -> bool {
        [
            self.stride_h,
            self.stride_w,
            self.dilation_h,
            self.dilation_w,
            self.kernel_h,
            self.kernel_w,
        ]
        .into_iter()
        .all(|x| x > 0)
    }

    /// The input row that window row `i` of output row `oh` falls on, if not on padding.
    #[inline]
    pub(crate) fn input_row(&self, oh: usize, i: usize) -> Option<usize> {
        (oh * self.stride_h + i * self.dilation_h)
            .checked_sub(self.pad_top)
            .filter(|&ih| ih < self.in_h)
    }

    /// The window columns that fall on the image for output column `ow`.
    #[inline]
    pub(crate) fn taps_inside(&self, ow: usize) -> Range<usize> {
        let start = ow * self.stride_w;
        let step = self.dilation_w.max(1);
        inside(start, step, self.pad_left, self.in_w, self.kernel_w)
    }

    /// The window rows that fall on the image for output row `oh`.
    #[inline]
    pub(crate) fn rows_inside(&self, oh: usize) -> Range<usize> {
        let start = oh * self.stride_h;
        let step = self.dilation_h.max(1);
        inside(start, step, self.pad_top, self.in_h, self.kernel_h)
    }

    /// The output columns for which window column `j` falls on the image.
    #[inline]
    pub(crate) fn columns_inside(&self, j: usize) -> (usize, usize) {
        let shift = j * self.dilation_w;
        let first = self.pad_left.saturating_sub(shift).div_ceil(self.stride_w);
        let end = (self.in_w + self.pad_left)
            .saturating_sub(shift)
            .div_ceil(self.stride_w);
        (first.min(self.out_w), end.min(self.out_w))
    }

    /// The output columns for which the whole window row falls on the image; empty ranges have
    /// their end at or before their start.
    #[inline]
    pub(crate) fn columns_all_inside(&self) -> (usize, usize) {
        (
            self.columns_inside(0).0,
            self.columns_inside(self.kernel_w - 1).1,
        )
    }
}

/// The positions of a window of `n`, from `start` on in steps of `step`, that are on an image of
/// `size` behind a padding of `pad`.
#[inline]
fn inside(start: usize, step: usize, pad: usize, size: usize, n: usize) -> Range<usize> {
    let first = pad.saturating_sub(start).div_ceil(step);
    let end = (size + pad).saturating_sub(start).div_ceil(step).min(n);
    first..end.max(first)
}
