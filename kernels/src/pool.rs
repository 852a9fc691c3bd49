//! Pooling of NHWC images in f32.
//!
//! `x: [batch, in_h, in_w, channels]`, `y: [batch, out_h, out_w, channels]` with `ldy` elements
//! between pixels. Item `i` is output row `i % out_h` of image `i / out_h`. The output's size is
//! given: the caller chooses how it is rounded. Global pooling is a window as large as the image.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::rows::{Fold, Largest};
use crate::simd::{Simd, Task, dispatch};
use crate::window::Window;
use crate::{INVALID, LHS, OK, OUT, UNSUPPORTED_ISA, pointer};

/// The function of each window that a [`PoolDesc`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum PoolKind {
    /// The largest, NaN if any is; minus infinity if the window holds padding only. Of zeros of
    /// both signs the first counts.
    Max = 1,
    /// The mean of the pixels on the image; NaN if there are none.
    AverageValid = 2,
    /// The mean over window positions inside the padded image (ONNX `count_include_pad`), padding
    /// being zero.
    AveragePadded = 3,
}

/// A pooling.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// A [`PoolKind`] as its number.
    pub kind: u32,
    /// Geometry.
    pub window: Window,
    /// Channels of input and output.
    pub channels: usize,
    /// Elements between output pixels.
    pub ldy: usize,
    /// Padding below and to the right: it counts for `AveragePadded`, and windows reaching beyond
    /// it (rounding up) do not.
    pub pad_bottom: usize,
    /// See `pad_bottom`.
    pub pad_right: usize,
}

descriptor!(PoolDesc {
    isa,
    kind,
    window,
    channels,
    ldy,
    pad_bottom,
    pad_right
});

impl PoolDesc {
    /// A pooling for an instruction set with contiguous output.
    pub fn new(isa: Isa, kind: PoolKind, window: Window, channels: usize) -> PoolDesc {
        let isa = isa as u32;
        PoolDesc {
            isa,
            kind: kind as u32,
            window,
            channels,
            ldy: channels,
            pad_bottom: 0,
            pad_right: 0,
        }
    }

    /// Items of the whole pooling.
    pub fn n_items(&self) -> usize {
        self.window.batch * self.window.out_h
    }

    /// Divisor of the sum of the window at (oh, ow), which has `n_inside` pixels on the image.
    fn divisor(&self, oh: usize, ow: usize, n_inside: usize) -> f32 {
        if self.kind == PoolKind::AverageValid as u32 {
            return n_inside as f32;
        }
        let w = &self.window;
        let count = |out: usize, stride: usize, dilation: usize, kernel: usize, size: usize| {
            (0..kernel)
                .filter(|i| out * stride + i * dilation < size)
                .count()
        };
        let height = w.pad_top + w.in_h + self.pad_bottom;
        let width = w.pad_left + w.in_w + self.pad_right;
        let rows = count(oh, w.stride_h, w.dilation_h, w.kernel_h, height);
        let cols = count(ow, w.stride_w, w.dilation_w, w.kernel_w, width);
        (rows * cols) as f32
    }
}

/// Computes items `begin..end` of a [`PoolDesc`]: `ptrs[LHS]` is `x`, `ptrs[OUT]` is `y`.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_pool_f32(
    desc: *const PoolDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if !(1..=3).contains(&desc.kind) || !desc.window.valid() {
        return INVALID;
    }
    for item in begin..end.min(desc.n_items()) {
        let (n, oh) = (item / desc.window.out_h, item % desc.window.out_h);
        for ow in 0..desc.window.out_w {
            // SAFETY: the pointers cover the descriptor's operands.
            unsafe {
                let x = pointer(ptrs, LHS)
                    .cast_const()
                    .wrapping_add(n * desc.window.x_n_stride);
                let y = pointer(ptrs, OUT).wrapping_add((item * desc.window.out_w + ow) * desc.ldy);
                dispatch(isa, Pixel { desc, x, y, oh, ow });
            }
        }
    }
    OK
}

/// One output pixel.
struct Pixel<'a> {
    desc: &'a PoolDesc,
    x: *const f32,
    y: *mut f32,
    oh: usize,
    ow: usize,
}

impl Task for Pixel<'_> {
    type Out = ();

    /// Safety: the pointers cover the pixel's window and channels.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let is_max = self.desc.kind == PoolKind::Max as u32;
        let mut channel = 0;
        while channel < self.desc.channels {
            let n = self.desc.channels - channel;
            // SAFETY: at most `n` channels from `channel` on.
            unsafe {
                let (result, n_inside) = if is_max {
                    self.max(s, channel, n)
                } else {
                    self.sum(s, channel, n)
                };
                let result = if is_max {
                    result
                } else {
                    let divisor = self.desc.divisor(self.oh, self.ow, n_inside);
                    s.div(result, s.splat(divisor))
                };
                s.store_n(self.y.add(channel), n, result);
            }
            channel += S::LANES;
        }
    }
}

impl Pixel<'_> {
    #[inline(always)]
    fn address(&self, ih: usize, j: usize, channel: usize) -> *const f32 {
        let w = &self.desc.window;
        let iw = self.ow * w.stride_w + j * w.dilation_w - w.pad_left;
        self.x
            .wrapping_add(ih * w.x_h_stride + iw * w.x_w_stride + channel)
    }

    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn max<S: Simd>(&self, s: S, channel: usize, n: usize) -> (S::F, usize) {
        let mut acc = s.splat(f32::NEG_INFINITY);
        for i in 0..self.desc.window.kernel_h {
            let Some(ih) = self.desc.window.input_row(self.oh, i) else {
                continue;
            };
            for j in self.desc.window.taps_inside(self.ow) {
                // SAFETY: the tap is on the image.
                acc = Largest.step(s, acc, unsafe { s.load_n(self.address(ih, j, channel), n) });
            }
        }
        (acc, 0)
    }

    /// Sums by rows, which bounds the rounding error of large windows.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn sum<S: Simd>(&self, s: S, channel: usize, n: usize) -> (S::F, usize) {
        let (mut acc, mut n_inside) = (s.zero(), 0);
        for i in 0..self.desc.window.kernel_h {
            let Some(ih) = self.desc.window.input_row(self.oh, i) else {
                continue;
            };
            let mut row = s.zero();
            for j in self.desc.window.taps_inside(self.ow) {
                // SAFETY: the tap is on the image.
                row = s.add(row, unsafe { s.load_n(self.address(ih, j, channel), n) });
            }
            n_inside += self.desc.window.taps_inside(self.ow).len();
            acc = s.add(acc, row);
        }
        (acc, n_inside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::tests::{input, pixels, window};
    use crate::testing::{Rng, assert_close};

    fn reference(d: &PoolDesc, x: &[f32]) -> Vec<f64> {
        let w = &d.window;
        let mut out = Vec::new();
        for (n, oh, ow) in pixels(*w) {
            for c in 0..d.channels {
                let taps =
                    || (0..w.kernel_h * w.kernel_w).map(|tap| (tap / w.kernel_w, tap % w.kernel_w));
                let inside: Vec<f64> = taps()
                    .filter_map(|(i, j)| input(w, x, n, [oh, ow, i, j], c))
                    .collect();
                let padded = taps().filter(|(i, j)| {
                    oh * w.stride_h + i * w.dilation_h < w.pad_top + w.in_h + d.pad_bottom
                        && ow * w.stride_w + j * w.dilation_w < w.pad_left + w.in_w + d.pad_right
                });
                let sum: f64 = inside.iter().sum();
                out.push(match d.kind {
                    1 => inside.iter().copied().fold(f64::NEG_INFINITY, |a, x| {
                        if x > a || x.is_nan() { x } else { a }
                    }),
                    2 => sum / inside.len() as f64,
                    _ => sum / padded.count() as f64,
                });
            }
            out.extend((d.channels..d.ldy).map(|_| 5.0));
        }
        out
    }

    #[test]
    fn pooling_agrees_with_the_reference() {
        let mut rng = Rng(31);
        for isa in Isa::available() {
            for _ in 0..400 {
                let channels = rng.pick(&[1, 3, 8, 16, 17, 33]);
                let mut window = window(&mut rng, channels);
                // Rounding up: one more column and row than fit, as long as they begin on the
                // padded image.
                let (bottom, right) = (rng.below(2), rng.below(2));
                (window.out_h, window.out_w) =
                    (window.out_h + rng.below(2), window.out_w + rng.below(2));
                let kind = rng.pick(&[
                    PoolKind::Max,
                    PoolKind::AverageValid,
                    PoolKind::AveragePadded,
                ]);
                let mut d = PoolDesc::new(Isa::current(), kind, window, channels);
                (d.isa, d.pad_bottom, d.pad_right) = (isa as u32, bottom, right);
                d.ldy += rng.pick(&[0, 3]);
                let mut x = rng.vec(window.batch * window.x_n_stride);
                if rng.below(2) == 0 {
                    const SPECIAL: [f32; 5] =
                        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
                    (0..x.len())
                        .step_by(3)
                        .for_each(|i| x[i] = rng.pick(&SPECIAL));
                }
                let mut y = vec![5f32; window.n_pixels() * d.ldy];
                let ptrs = [
                    x.as_ptr() as *mut u8,
                    std::ptr::null_mut(),
                    y.as_mut_ptr().cast(),
                ];
                // SAFETY: the buffers have the sizes that the descriptor describes.
                let status = unsafe { gm_pool_f32(&d, ptrs.as_ptr(), 0, d.n_items()) };
                assert_eq!(status, OK);
                let want = reference(&d, &x);
                assert_close(&y, &want, 1e-6, &format!("{isa} {d:?}"));
                let sign_differs = |(y, w): (&f32, &f64)| {
                    *w == 0.0 && y.is_sign_negative() != w.is_sign_negative()
                };
                let zeros = y
                    .iter()
                    .zip(&want)
                    .filter(|&pair| sign_differs(pair))
                    .count();
                assert!(
                    kind != PoolKind::Max || zeros == 0,
                    "{isa} {d:?}: a zero of the wrong sign"
                );
            }
        }
    }
}
