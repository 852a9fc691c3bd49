//! The geometry that convolutions and pooling share.

use crate::descriptor::plain;
use std::ops::Range;

/// Geometry of a kernel window over images `[batch, depth, rows, columns, channels]`, depths being
/// planes of pixels. Sizes are in pixels, strides of `x` in elements; the channel stride is 1.
///
/// Output pixel (od, oh, ow) sees input pixels (od * stride_d + d * dilation_d - pad_front, oh *
/// stride_h + i * dilation_h - pad_top, ow * stride_w + j * dilation_w - pad_left). Padding behind,
/// below and to the right follows from the output's size. NHWC images have one depth, and so have
/// their output and window ([`Window::is_flat`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Images.
    pub batch: usize,
    /// Input depths.
    pub in_d: usize,
    /// Input rows.
    pub in_h: usize,
    /// Input columns.
    pub in_w: usize,
    /// Output depths.
    pub out_d: usize,
    /// Output rows.
    pub out_h: usize,
    /// Output columns.
    pub out_w: usize,
    /// Window depths.
    pub kernel_d: usize,
    /// Window rows.
    pub kernel_h: usize,
    /// Window columns.
    pub kernel_w: usize,
    /// Input depths between output depths.
    pub stride_d: usize,
    /// Input rows between output rows.
    pub stride_h: usize,
    /// Input columns between output columns.
    pub stride_w: usize,
    /// Input depths between window depths.
    pub dilation_d: usize,
    /// Input rows between window rows.
    pub dilation_h: usize,
    /// Input columns between window columns.
    pub dilation_w: usize,
    /// Depths of padding in front.
    pub pad_front: usize,
    /// Rows of padding above.
    pub pad_top: usize,
    /// Columns of padding to the left.
    pub pad_left: usize,
    /// Input elements between images.
    pub x_n_stride: usize,
    /// Input elements between depths of an image.
    pub x_d_stride: usize,
    /// Input elements between rows.
    pub x_h_stride: usize,
    /// Input elements between pixels of a row.
    pub x_w_stride: usize,
}

plain!(Window {
    batch,
    in_d,
    in_h,
    in_w,
    out_d,
    out_h,
    out_w,
    kernel_d,
    kernel_h,
    kernel_w,
    stride_d,
    stride_h,
    stride_w,
    dilation_d,
    dilation_h,
    dilation_w,
    pad_front,
    pad_top,
    pad_left,
    x_n_stride,
    x_d_stride,
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
            in_d: 1,
            in_h,
            in_w,
            out_d: 1,
            out_h: (in_h + 1).saturating_sub(kernel_h),
            out_w: (in_w + 1).saturating_sub(kernel_w),
            kernel_d: 1,
            kernel_h,
            kernel_w,
            stride_d: 1,
            stride_h: 1,
            stride_w: 1,
            dilation_d: 1,
            dilation_h: 1,
            dilation_w: 1,
            pad_front: 0,
            pad_top: 0,
            pad_left: 0,
            x_n_stride: in_h * in_w * channels,
            x_d_stride: in_h * in_w * channels,
            x_h_stride: in_w * channels,
            x_w_stride: channels,
        }
    }

    /// The same with strides, dilations (rows, columns) and pads (top, left, bottom, right); the
    /// output's size follows, rounded down.
    #[must_use]
    pub fn with(mut self, stride: [usize; 2], dilation: [usize; 2], pads: [usize; 4]) -> Window {
        [self.stride_h, self.stride_w] = stride;
        [self.dilation_h, self.dilation_w] = dilation;
        (self.pad_top, self.pad_left) = (pads[0], pads[1]);
        let (pad_h, pad_w) = (pads[0] + pads[2], pads[1] + pads[3]);
        self.out_h = n_places(self.in_h + pad_h, self.kernel_h, stride[0], dilation[0]);
        self.out_w = n_places(self.in_w + pad_w, self.kernel_w, stride[1], dilation[1]);
        self
    }

    /// The same `kernel_d` deep over images of `in_d` depths, each with the strides of an image before,
    /// with pads in front and behind; the output's depth follows, rounded down.
    #[must_use]
    pub fn with_depth(
        mut self,
        [in_d, kernel_d]: [usize; 2],
        [stride, dilation]: [usize; 2],
        [front, back]: [usize; 2],
    ) -> Window {
        (self.in_d, self.kernel_d, self.pad_front) = (in_d, kernel_d, front);
        (self.stride_d, self.dilation_d) = (stride, dilation);
        self.out_d = n_places(in_d + front + back, kernel_d, stride, dilation);
        self.x_d_stride = self.x_n_stride;
        self.x_n_stride = in_d * self.x_d_stride;
        self
    }

    /// Output pixels of all images.
    pub fn n_pixels(&self) -> usize {
        self.batch * self.out_d * self.out_h * self.out_w
    }

    /// Input pixels under an output pixel, padding included.
    pub fn n_taps(&self) -> usize {
        self.kernel_d * self.kernel_h * self.kernel_w
    }

    /// True for one depth of images, output and window, which kernels of two axes need.
    pub fn is_flat(&self) -> bool {
        [self.in_d, self.out_d, self.kernel_d] == [1; 3] && self.pad_front == 0
    }

    /// True when the kernels can run it.
    pub(crate) fn valid(&self) -> bool {
        [
            self.stride_d,
            self.stride_h,
            self.stride_w,
            self.dilation_d,
            self.dilation_h,
            self.dilation_w,
            self.kernel_d,
            self.kernel_h,
            self.kernel_w,
        ]
        .into_iter()
        .all(|x| x > 0)
    }

    /// The input depth under window depth `d` of output depth `od`, if not on padding.
    #[inline]
    pub(crate) fn input_depth(&self, od: usize, d: usize) -> Option<usize> {
        (od * self.stride_d + d * self.dilation_d)
            .checked_sub(self.pad_front)
            .filter(|&id| id < self.in_d)
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

    /// The window depths that fall on the image for output depth `od`.
    #[inline]
    pub(crate) fn depths_inside(&self, od: usize) -> Range<usize> {
        let start = od * self.stride_d;
        let step = self.dilation_d.max(1);
        inside(start, step, self.pad_front, self.in_d, self.kernel_d)
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

/// Places of a window of `n` positions, `dilation` apart, in steps of `stride` over `size`.
fn n_places(size: usize, n: usize, stride: usize, dilation: usize) -> usize {
    let reach = dilation * (n - 1) + 1;
    size.checked_sub(reach).map_or(0, |rest| rest / stride + 1)
}

/// The positions of a window of `n`, from `start` on in steps of `step`, that are on an image of
/// `size` behind a padding of `pad`.
#[inline]
fn inside(start: usize, step: usize, pad: usize, size: usize, n: usize) -> Range<usize> {
    let first = pad.saturating_sub(start).div_ceil(step);
    let end = (size + pad).saturating_sub(start).div_ceil(step).min(n);
    first..end.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::winograd::{WinogradDesc, gm_winograd4_f32};
    use crate::{INVALID, Isa};

    #[test]
    fn depth_is_refused_by_minimal_filtering() {
        let flat = Window::new(1, 4, 4, 1, 3, 3);
        assert!(flat.is_flat() && flat.with_depth([1, 1], [1, 1], [0; 2]).is_flat());
        let isa = Isa::current();
        let null = [std::ptr::null_mut::<u8>(); 5];
        let ptrs = null.as_ptr();
        for (sizes, pads) in [
            ([2, 1], [0; 2]),
            ([2, 2], [0; 2]),
            ([1, 2], [1, 0]),
            ([1, 1], [1, 0]),
        ] {
            let mut w = flat.with_depth(sizes, [1, 1], pads);
            assert!(!w.is_flat(), "{w:?}");
            if sizes == [1, 1] {
                // The one output depth is on padding.
                w.out_d = 1;
            }
            assert!(!WinogradDesc::takes(&w));
            let winograd = WinogradDesc::new(isa, 4, w, 1, 1);
            // SAFETY: a refused descriptor reads nothing else.
            let status = unsafe { gm_winograd4_f32(&winograd, ptrs, 0, 1) };
            assert_eq!(status, INVALID, "{w:?}");
        }
    }
}
