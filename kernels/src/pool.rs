//! Pooling of images over two or three axes, channels last, in f32.
//!
//! `x: [batch, in_d, in_h, in_w, channels]`, `y: [batch, out_d, out_h, out_w, channels]` with `ldy`
//! elements between pixels. Item `i` is output row `i % out_h` of depth `i / out_h`, the depths of
//! all images counted on. The output's size is given: the caller chooses how it is rounded. Global
//! pooling is a window as large as the image.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::rows::{Fold, Largest};
use crate::simd::{Simd, Task, dispatch};
use crate::window::Window;
use crate::{INVALID, LHS, OK, OUT, UNSUPPORTED_ISA, pointer};
use std::ops::Range;

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
    /// Padding behind, below and to the right: it counts for `AveragePadded`, and windows reaching
    /// beyond it (rounding up) do not.
    pub pad_back: usize,
    /// See `pad_back`.
    pub pad_bottom: usize,
    /// See `pad_back`.
    pub pad_right: usize,
}

descriptor!(PoolDesc {
    isa,
    kind,
    window,
    channels,
    ldy,
    pad_back,
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
            pad_back: 0,
            pad_bottom: 0,
            pad_right: 0,
        }
    }

    /// Items of the whole pooling.
    pub fn n_items(&self) -> usize {
        self.window.batch * self.window.out_d * self.window.out_h
    }

    /// Depths times rows of the windows of an output row inside the padded image.
    fn n_padded_rows(&self, [od, oh]: [usize; 2]) -> usize {
        let w = &self.window;
        let depth = w.pad_front + w.in_d + self.pad_back;
        let height = w.pad_top + w.in_h + self.pad_bottom;
        n_before(depth, od * w.stride_d, w.dilation_d, w.kernel_d)
            * n_before(height, oh * w.stride_h, w.dilation_h, w.kernel_h)
    }

    /// Columns of the window at output column `ow` inside the padded image.
    fn n_padded_columns(&self, ow: usize) -> usize {
        let w = &self.window;
        let width = w.pad_left + w.in_w + self.pad_right;
        n_before(width, ow * w.stride_w, w.dilation_w, w.kernel_w)
    }
}

/// Positions before `end`, of `n` from `start` on in steps of `step`.
fn n_before(end: usize, start: usize, step: usize, n: usize) -> usize {
    (0..n).filter(|i| start + i * step < end).count()
}

/// Computes items `begin..end` of a [`PoolDesc`]: `ptrs[LHS]` is `x`, `ptrs[OUT]` is `y`.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
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
    // SAFETY: the pointers cover the descriptor's operands.
    unsafe {
        let rows = Rows {
            desc,
            x: pointer(ptrs, LHS).cast_const(),
            y: pointer(ptrs, OUT),
            items: begin..end.min(desc.n_items()),
        };
        dispatch(isa, rows);
    }
    OK
}

/// Output rows.
struct Rows<'a> {
    desc: &'a PoolDesc,
    x: *const f32,
    y: *mut f32,
    items: Range<usize>,
}

impl Task for Rows<'_> {
    type Out = ();

    /// Safety: the pointers cover the descriptor's operands.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let w = &self.desc.window;
        for item in self.items.clone() {
            let row = Row::new(self.desc, self.x, item);
            for ow in 0..w.out_w {
                let y = (item * w.out_w + ow) * self.desc.ldy;
                let pixel = Pixel::new(self.desc, &row, ow, self.y.wrapping_add(y));
                // SAFETY: by contract.
                unsafe { pixel.run(s) };
            }
        }
    }
}

/// One output row.
struct Row {
    /// The first element of the input under the windows' first depth and row on the image.
    x: *const f32,
    /// Depths and rows of the windows that are on the image.
    n_depths: usize,
    n_rows: usize,
    /// Depths times rows which count for the divisor.
    n_counted: usize,
}

impl Row {
    /// The row of an item, `x` being the images.
    #[inline(always)]
    fn new(desc: &PoolDesc, x: *const f32, item: usize) -> Row {
        let w = &desc.window;
        let (image, oh) = (item / w.out_h, item % w.out_h);
        let (n, od) = (image / w.out_d, image % w.out_d);
        let (depths, rows) = (w.depths_inside(od), w.rows_inside(oh));
        let id = (od * w.stride_d + depths.start * w.dilation_d).wrapping_sub(w.pad_front);
        let ih = (oh * w.stride_h + rows.start * w.dilation_h).wrapping_sub(w.pad_top);
        let first = (n * w.x_n_stride)
            .wrapping_add(id.wrapping_mul(w.x_d_stride))
            .wrapping_add(ih.wrapping_mul(w.x_h_stride));
        Row {
            x: x.wrapping_add(first),
            n_depths: depths.len(),
            n_rows: rows.len(),
            n_counted: match desc.kind == PoolKind::AveragePadded as u32 {
                true => desc.n_padded_rows([od, oh]),
                false => depths.len() * rows.len(),
            },
        }
    }
}

/// One output pixel.
struct Pixel<'a> {
    desc: &'a PoolDesc,
    /// The first element of the window that is on the image.
    x: *const f32,
    y: *mut f32,
    /// Depths and rows of the window, and elements of each row, on the image.
    n_depths: usize,
    n_rows: usize,
    n_taps: usize,
    divisor: f32,
}

impl<'a> Pixel<'a> {
    /// Column `ow` of an output row, the pixel being `y`.
    #[inline(always)]
    fn new(desc: &'a PoolDesc, row: &Row, ow: usize, y: *mut f32) -> Pixel<'a> {
        let w = &desc.window;
        let (start, reach) = (ow * w.stride_w, (w.kernel_w - 1) * w.dilation_w);
        let is_inside = start >= w.pad_left && start - w.pad_left + reach < w.in_w;
        // Windows inside of the image need no division.
        let taps = match is_inside {
            true => 0..w.kernel_w,
            false => w.taps_inside(ow),
        };
        let iw = (start + taps.start * w.dilation_w).wrapping_sub(w.pad_left);
        let n_columns = match desc.kind == PoolKind::AveragePadded as u32 {
            true => desc.n_padded_columns(ow),
            false => taps.len(),
        };
        Pixel {
            desc,
            x: row.x.wrapping_add(iw.wrapping_mul(w.x_w_stride)),
            y,
            n_depths: row.n_depths,
            n_rows: row.n_rows,
            n_taps: taps.len(),
            divisor: (row.n_counted * n_columns) as f32,
        }
    }

    /// # Safety
    /// The pointers cover the pixel's window and channels.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let mut channel = 0;
        // Several vectors at a time read whole lines of each tap, and their sums do not wait for each
        // other.
        // SAFETY: vectors of channels that there are.
        unsafe {
            while self.has::<S>(channel, 8) {
                self.vectors::<S, 8>(s, channel);
                channel += 8 * S::LANES;
            }
            while self.has::<S>(channel, 2) {
                self.vectors::<S, 2>(s, channel);
                channel += 2 * S::LANES;
            }
            while channel < self.desc.channels {
                self.vectors::<S, 1>(s, channel);
                channel += S::LANES;
            }
        }
    }

    /// True when there are `n` whole vectors of channels from `channel` on.
    #[inline(always)]
    fn has<S: Simd>(&self, channel: usize, n: usize) -> bool {
        self.desc.channels - channel >= n * S::LANES
    }

    /// The results of `V` vectors of channels; one alone may be partial.
    ///
    /// # Safety
    /// As for `run`, with these channels.
    #[inline(always)]
    unsafe fn vectors<S: Simd, const V: usize>(&self, s: S, channel: usize) {
        let n = self.desc.channels - channel;
        // SAFETY: by contract.
        unsafe {
            let results = if self.desc.kind == PoolKind::Max as u32 {
                self.max::<S, V>(s, channel)
            } else {
                self.mean::<S, V>(s, channel)
            };
            for (v, result) in results.into_iter().enumerate() {
                let y = self.y.add(channel + v * S::LANES);
                match V {
                    1 => s.store_n(y, n, result),
                    _ => s.store(y, result),
                }
            }
        }
    }

    /// # Safety
    /// As for `vectors`.
    #[inline(always)]
    unsafe fn max<S: Simd, const V: usize>(&self, s: S, channel: usize) -> [S::F; V] {
        let mut acc = [s.splat(f32::NEG_INFINITY); V];
        for d in 0..self.n_depths {
            for i in 0..self.n_rows {
                let step = |v: usize, x| acc[v] = Largest.step(s, acc[v], x);
                // SAFETY: the row is on the image.
                unsafe { self.row::<S, V>(s, [d, i], channel, step) };
            }
        }
        acc
    }

    /// Sums by rows, which bounds the rounding error of large windows.
    ///
    /// # Safety
    /// As for `vectors`.
    #[inline(always)]
    unsafe fn mean<S: Simd, const V: usize>(&self, s: S, channel: usize) -> [S::F; V] {
        let mut acc = [s.zero(); V];
        for d in 0..self.n_depths {
            for i in 0..self.n_rows {
                let mut row = [s.zero(); V];
                let step = |v: usize, x| row[v] = s.add(row[v], x);
                // SAFETY: the row is on the image.
                unsafe { self.row::<S, V>(s, [d, i], channel, step) };
                for (acc, row) in acc.iter_mut().zip(row) {
                    *acc = s.add(*acc, row);
                }
            }
        }
        acc.map(|sum| s.div(sum, s.splat(self.divisor)))
    }

    /// Calls `step` with each vector of row `i` of depth `d`.
    ///
    /// # Safety
    /// As for `vectors`; `d` is less than `n_depths` and `i` less than `n_rows`.
    #[inline(always)]
    unsafe fn row<S: Simd, const V: usize>(
        &self,
        s: S,
        [d, i]: [usize; 2],
        channel: usize,
        mut step: impl FnMut(usize, S::F),
    ) {
        let w = &self.desc.window;
        let row = d * w.dilation_d * w.x_d_stride + i * w.dilation_h * w.x_h_stride;
        let mut x = self.x.wrapping_add(row + channel);
        for _ in 0..self.n_taps {
            for v in 0..V {
                // SAFETY: the element is on the image.
                step(v, unsafe {
                    match V {
                        1 => s.load_n(x, self.desc.channels - channel),
                        _ => s.load(x.wrapping_add(v * S::LANES)),
                    }
                });
            }
            x = x.wrapping_add(w.dilation_w * w.x_w_stride);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::tests::{deep_window, input, pixels, taps, window};
    use crate::testing::{Rng, assert_close};

    fn reference(d: &PoolDesc, x: &[f32]) -> Vec<f64> {
        let w = &d.window;
        let mut out = Vec::new();
        for place in pixels(*w) {
            let (_, [od, oh, ow]) = place;
            for c in 0..d.channels {
                let inside: Vec<f64> = taps(*w)
                    .filter_map(|tap| input(w, x, place, tap, c))
                    .collect();
                let padded = taps(*w).filter(|[depth, i, j]| {
                    od * w.stride_d + depth * w.dilation_d < w.pad_front + w.in_d + d.pad_back
                        && oh * w.stride_h + i * w.dilation_h < w.pad_top + w.in_h + d.pad_bottom
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
            for round in 0..500 {
                let channels = rng.pick(&[1, 3, 8, 16, 17, 33, 129]);
                let random = [window, window, deep_window][round % 3];
                let mut window = random(&mut rng, channels);
                // Rounding up: one more column, row and depth than fit, as long as they begin on the
                // padded image.
                let (bottom, right) = (rng.below(2), rng.below(2));
                let mut back = 0;
                if round % 3 == 2 {
                    back = rng.below(2);
                    window.out_d += rng.below(2);
                }
                (window.out_h, window.out_w) =
                    (window.out_h + rng.below(2), window.out_w + rng.below(2));
                let kind = rng.pick(&[
                    PoolKind::Max,
                    PoolKind::AverageValid,
                    PoolKind::AveragePadded,
                ]);
                let mut d = PoolDesc::new(Isa::current(), kind, window, channels);
                d.isa = isa as u32;
                [d.pad_back, d.pad_bottom, d.pad_right] = [back, bottom, right];
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
