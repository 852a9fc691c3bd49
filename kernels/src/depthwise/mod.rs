//! Depthwise convolution of images over two or three axes, in f32 or of 8-bit integers: each channel
//! has its own window.
//!
//! `x: [batch, in_d, in_h, in_w, channels]`, weights `[kernel_d, kernel_h, kernel_w, channels]`
//! (plain, for every instruction set), `y: [batch, out_d, out_h, out_w, channels]` with `ldy`
//! elements between pixels. Item `i` is output row `i % out_h` of depth `i / out_h`, the depths of
//! all images counted on. For the epilogue, a row is an output pixel and a column a channel.
//!
//! For images of bytes ([`crate::gemm::integer`]) strides count bytes, weights are whole numbers in
//! f32, and padding is the zero point.

mod bytes;

pub use bytes::is_exact_in_f32;

use crate::descriptor::descriptor;
use crate::epilogue::{ApplyRest, Epilogue, EpilogueOp, Fast, MAX_BATCH, MAX_EPILOGUE, Rect};
use crate::gemm::integer::Integers;
use crate::gemm::tile::add_epilogue;
use crate::isa::Isa;
use crate::quantize::Quantize;
use crate::simd::{Simd, Task, dispatch};
use crate::window::Window;
use crate::{INVALID, LHS, OK, OPERANDS, OUT, RHS, UNSUPPORTED_ISA, pointer};
use std::ops::Range;

/// Output pixels computed together.
const TILE: usize = 4;

/// A depthwise convolution.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DepthwiseDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// Used entries of `epilogue`.
    pub n_epilogue: u32,
    /// Geometry.
    pub window: Window,
    /// Channels of input and output.
    pub channels: usize,
    /// Elements between output pixels.
    pub ldy: usize,
    /// Applied to `y`.
    pub epilogue: [EpilogueOp; MAX_EPILOGUE],
    /// For images of 8-bit integers.
    pub integers: Integers,
    /// Storage of `y`, for images of 8-bit integers; `ldy` counts stored elements.
    pub quantize: Quantize,
}

descriptor!(DepthwiseDesc {
    isa,
    n_epilogue,
    window,
    channels,
    ldy,
    epilogue,
    integers,
    quantize
});

impl DepthwiseDesc {
    /// A depthwise convolution for an instruction set, with contiguous output.
    pub fn new(isa: Isa, window: Window, channels: usize) -> DepthwiseDesc {
        let epilogue = [EpilogueOp::default(); MAX_EPILOGUE];
        DepthwiseDesc {
            isa: isa as u32,
            n_epilogue: 0,
            window,
            channels,
            ldy: channels,
            epilogue,
            integers: Integers::default(),
            quantize: Quantize::default(),
        }
    }

    /// Bytes for each concurrent call at `ptrs[WORKSPACE]`.
    pub fn workspace_bytes(&self) -> usize {
        match self.is_of_bytes() {
            true => bytes::workspace_bytes(self),
            false => 0,
        }
    }

    fn is_of_bytes(&self) -> bool {
        self.integers.operands != 0
    }

    /// Items of the whole convolution.
    pub fn n_items(&self) -> usize {
        self.window.batch * self.window.out_d * self.window.out_h
    }
}

/// Computes items `begin..end` of a [`DepthwiseDesc`].
///
/// `ptrs[LHS]` is `x`, `ptrs[RHS]` the weights, `ptrs[OUT]` is `y`, `ptrs[WORKSPACE]` this call's own
/// workspace, `ptrs[OPERANDS..]` are the epilogue's operands. Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_depthwise_f32(
    desc: *const DepthwiseDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let stores_valid = desc.integers.valid(desc.n_epilogue, desc.quantize)
        && (desc.is_of_bytes() || desc.quantize.to == 0);
    let epilogue_valid = Epilogue::valid(&desc.epilogue, desc.n_epilogue) && stores_valid;
    if !epilogue_valid || !desc.window.valid() {
        return INVALID;
    }
    // SAFETY: the pointers cover the descriptor's operands.
    unsafe {
        let ops = &desc.epilogue[..desc.n_epilogue as usize];
        let epilogue = Epilogue::resolve(ops, ptrs.add(OPERANDS), [0; MAX_BATCH]);
        let items = begin..end.min(desc.n_items());
        if let Some(integers) = desc.integers.resolve(ptrs.add(OPERANDS)) {
            bytes::run(isa, desc, ptrs, (&epilogue, integers), items);
            return OK;
        }
        for item in items {
            run_row(isa, desc, ptrs, &epilogue, item);
        }
    }
    OK
}

/// # Safety
/// As for [`gm_depthwise_f32`], with a valid descriptor.
unsafe fn run_row(
    isa: Isa,
    desc: &DepthwiseDesc,
    ptrs: *const *mut u8,
    epilogue: &Epilogue,
    item: usize,
) {
    let w = &desc.window;
    let first_pixel = item * w.out_w;
    let (n, od, oh) = (
        item / w.out_h / w.out_d,
        item / w.out_h % w.out_d,
        item % w.out_h,
    );
    let depth = (od * w.stride_d).wrapping_sub(w.pad_front);
    let row = (oh * w.stride_h).wrapping_sub(w.pad_top);
    let x = (n * w.x_n_stride)
        .wrapping_add(depth.wrapping_mul(w.x_d_stride))
        .wrapping_add(row.wrapping_mul(w.x_h_stride));
    // SAFETY: the pointers cover the row.
    unsafe {
        let y = pointer(ptrs, OUT).wrapping_add(first_pixel * desc.ldy);
        let x = pointer(ptrs, LHS).wrapping_add(x);
        let operands = (x.cast_const(), pointer(ptrs, RHS).cast_const(), y);
        compute_row(isa, desc, epilogue, [od, oh], first_pixel, operands);
    }
}

/// Computes the output row `[od, oh]` of an image, whose first pixel has number `pixel`. Operands are
/// the input under the first depth and row of the window (perhaps on padding), weights and results.
///
/// # Safety
/// They cover the row.
unsafe fn compute_row(
    isa: Isa,
    desc: &DepthwiseDesc,
    epilogue: &Epilogue,
    [od, oh]: [usize; 2],
    pixel: usize,
    (x, weights, y): (*const f32, *const f32, *mut f32),
) {
    let w = &desc.window;
    let row = Row {
        desc,
        x,
        weights,
        y,
        depths: w.depths_inside(od),
        rows: w.rows_inside(oh),
        fast: epilogue.fast.at(pixel, 0),
    };
    // SAFETY: by contract.
    unsafe {
        dispatch(isa, row);
        if epilogue.has_rest() {
            let rect = Rect {
                c: y,
                ldc: desc.ldy,
                row: pixel,
                col: 0,
                rows: w.out_w,
                cols: desc.channels,
            };
            dispatch(isa, ApplyRest(epilogue, rect));
        }
    }
}

/// One output row.
struct Row<'a> {
    desc: &'a DepthwiseDesc,
    /// The input under the first depth and row of the window, which may be on padding.
    x: *const f32,
    weights: *const f32,
    y: *mut f32,
    /// Depths and rows of the window that are on the image.
    depths: Range<usize>,
    rows: Range<usize>,
    fast: Fast,
}

impl Task for Row<'_> {
    type Out = ();

    /// Safety: the pointers cover the row and the inputs that it depends on.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let mut channel = 0;
        while channel < self.desc.channels {
            let rest = self.desc.channels - channel;
            // SAFETY: at most the rest of the channels.
            unsafe {
                channel += if rest >= 4 * S::LANES {
                    self.strip::<S, 4, false>(s, channel);
                    4 * S::LANES
                } else if rest >= 2 * S::LANES {
                    self.strip::<S, 2, false>(s, channel);
                    2 * S::LANES
                } else {
                    self.strip::<S, 1, true>(s, channel);
                    S::LANES
                };
            }
        }
    }
}

impl Row<'_> {
    /// The input under row `i` of window depth `d`.
    #[inline(always)]
    fn input(&self, d: usize, i: usize) -> *const f32 {
        let w = &self.desc.window;
        let depth = d * w.dilation_d * w.x_d_stride;
        self.x.wrapping_add(depth + i * w.dilation_h * w.x_h_stride)
    }

    /// The whole row by `V` vectors of channels.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn strip<S: Simd, const V: usize, const MASKED: bool>(&self, s: S, channel: usize) {
        let (inside, inside_end) = self.desc.window.columns_all_inside();
        // The last tile may overlap the one before, unless it would add a residual that the output
        // replaced.
        let may_overlap = self.fast.residual.is_null() && inside + TILE <= inside_end;
        let mut ow = 0;
        // SAFETY: tiles lie inside the row; those of several pixels only where the whole window is
        // inside the image.
        unsafe {
            while ow < self.desc.window.out_w {
                let is_inside = ow >= inside && ow < inside_end;
                if is_inside && (ow + TILE <= inside_end || may_overlap) {
                    let start = ow.min(inside_end - TILE);
                    // Two vectors of four pixels are as many sums as the smallest register file
                    // takes.
                    if V == 4 {
                        self.tile::<S, TILE, 2, MASKED>(s, start, channel);
                        self.tile::<S, TILE, 2, MASKED>(s, start, channel + 2 * S::LANES);
                    } else {
                        self.tile::<S, TILE, V, MASKED>(s, start, channel);
                    }
                    ow = start + TILE;
                } else {
                    self.tile::<S, 1, V, MASKED>(s, ow, channel);
                    ow += 1;
                }
            }
        }
    }

    /// `P` pixels from `ow` on by `V` vectors of channels; a masked tile has one, perhaps partial.
    /// With one pixel, window columns beyond the image are skipped.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const P: usize, const V: usize, const MASKED: bool>(
        &self,
        s: S,
        ow: usize,
        channel: usize,
    ) {
        let n = self.desc.channels - channel;
        // SAFETY: by contract; masks keep channels in range.
        unsafe {
            let w = &self.desc.window;
            let is_dense = P > 1 && w.stride_w == 1 && w.dilation_w == 1;
            let mut sums = match w.kernel_w {
                3 if is_dense => self.sliding::<S, P, V, MASKED, 3>(s, ow, channel),
                5 if is_dense => self.sliding::<S, P, V, MASKED, 5>(s, ow, channel),
                7 if is_dense => self.sliding::<S, P, V, MASKED, 7>(s, ow, channel),
                _ => self.sums::<S, P, V, MASKED>(s, ow, channel),
            };
            let y = self.y.add(ow * self.desc.ldy + channel);
            if !MASKED {
                // By steps of the epilogue, so that sums stay in registers.
                add_epilogue(s, &self.fast.at(ow, channel), &mut sums);
            }
            for (p, sums) in sums.iter().enumerate() {
                for (v, &sum) in sums.iter().enumerate() {
                    let y = y.add(p * self.desc.ldy + v * S::LANES);
                    if MASKED {
                        s.store_n(y, n, self.fast.apply(s, sum, ow + p, channel, n));
                    } else {
                        s.store(y, sum);
                    }
                }
            }
        }
    }

    /// Sums of products of a tile of several neighbouring pixels under a window of `K` columns: each
    /// element of the input is read once. The sums are those of [`Row::sums`], to the bit.
    ///
    /// # Safety
    /// As for `run`; stride and dilation along the row are 1.
    #[inline(always)]
    unsafe fn sliding<
        S: Simd,
        const P: usize,
        const V: usize,
        const MASKED: bool,
        const K: usize,
    >(
        &self,
        s: S,
        ow: usize,
        channel: usize,
    ) -> [[S::F; V]; P] {
        let (w, channels) = (&self.desc.window, self.desc.channels);
        let n = channels - channel;
        let column = (ow - w.pad_left) * w.x_w_stride + channel;
        let mut acc = [[s.zero(); V]; P];
        for d in self.depths.clone() {
            for i in self.rows.clone() {
                let tap = (d * w.kernel_h + i) * K;
                for v in 0..V {
                    // SAFETY: depths, rows and columns of the window are on the image, and masks keep
                    // channels in range.
                    unsafe {
                        let x = self.input(d, i).add(column + v * S::LANES);
                        let weights = self.weights.add(tap * channels + channel + v * S::LANES);
                        self.slide::<S, P, V, MASKED, K>(s, x, weights, n, v, &mut acc);
                    }
                }
            }
        }
        acc
    }

    /// Adds the products of vector `v` of a window row to the sums of neighbouring pixels.
    ///
    /// # Safety
    /// As for [`Row::sliding`]; `x` and `weights` are those of the window row.
    #[inline(always)]
    unsafe fn slide<S: Simd, const P: usize, const V: usize, const MASKED: bool, const K: usize>(
        &self,
        s: S,
        x: *const f32,
        weights: *const f32,
        n: usize,
        v: usize,
        acc: &mut [[S::F; V]; P],
    ) {
        let (w, channels) = (&self.desc.window, self.desc.channels);
        // SAFETY: by contract.
        unsafe {
            let mut row = [s.zero(); K];
            for (j, weight) in row.iter_mut().enumerate() {
                *weight = load::<S, MASKED>(s, weights.add(j * channels), n);
            }
            for c in 0..P + K - 1 {
                let x = load::<S, MASKED>(s, x.add(c * w.x_w_stride), n);
                for (p, acc) in acc.iter_mut().enumerate() {
                    if p <= c && c - p < K {
                        acc[v] = s.mul_acc(x, row[c - p], acc[v]);
                    }
                }
            }
        }
    }

    /// Sums of products of a tile.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn sums<S: Simd, const P: usize, const V: usize, const MASKED: bool>(
        &self,
        s: S,
        ow: usize,
        channel: usize,
    ) -> [[S::F; V]; P] {
        let w = &self.desc.window;
        let n = self.desc.channels - channel;
        // Window columns on the image: all of them for tiles of several pixels.
        let taps = if P == 1 {
            w.taps_inside(ow)
        } else {
            0..w.kernel_w
        };
        let mut acc = [[s.zero(); V]; P];
        if taps.is_empty() {
            return acc;
        }
        let first_column = ow * w.stride_w + taps.start * w.dilation_w;
        let column = (first_column - w.pad_left) * w.x_w_stride + channel;
        for d in self.depths.clone() {
            for i in self.rows.clone() {
                let tap = (d * w.kernel_h + i) * w.kernel_w + taps.start;
                // SAFETY: `depths`, `rows` and `taps` keep to the image, and masks keep channels in range.
                unsafe {
                    let x = self.input(d, i).add(column);
                    let weights = self.weights.add(tap * self.desc.channels + channel);
                    self.add_row::<S, P, V, MASKED>(s, x, weights, n, taps.len(), &mut acc);
                }
            }
        }
        acc
    }

    /// Adds the products of `n_taps` taps of a window row to the sums of a tile.
    ///
    /// # Safety
    /// As for [`Row::sums`]; `x` and `weights` are those of the first of the taps.
    #[inline(always)]
    unsafe fn add_row<S: Simd, const P: usize, const V: usize, const MASKED: bool>(
        &self,
        s: S,
        mut x: *const f32,
        mut weights: *const f32,
        n: usize,
        n_taps: usize,
        acc: &mut [[S::F; V]; P],
    ) {
        let w = &self.desc.window;
        let (pixel_step, tap_step) = (w.stride_w * w.x_w_stride, w.dilation_w * w.x_w_stride);
        // SAFETY: by contract.
        unsafe {
            for _ in 0..n_taps {
                for v in 0..V {
                    let weight = load::<S, MASKED>(s, weights.add(v * S::LANES), n);
                    for (p, acc) in acc.iter_mut().enumerate() {
                        let x = load::<S, MASKED>(s, x.add(p * pixel_step + v * S::LANES), n);
                        acc[v] = s.mul_acc(x, weight, acc[v]);
                    }
                }
                x = x.wrapping_add(tap_step);
                weights = weights.wrapping_add(self.desc.channels);
            }
        }
    }
}

/// # Safety
/// `p` is readable for a vector, or for `n` elements if masked.
#[inline(always)]
unsafe fn load<S: Simd, const MASKED: bool>(s: S, p: *const f32, n: usize) -> S::F {
    // SAFETY: by contract.
    unsafe { if MASKED { s.load_n(p, n) } else { s.load(p) } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::tests::{deep_window, input, pixels, taps, window};
    use crate::epilogue::EpilogueKind;
    use crate::testing::{Rng, assert_close};

    #[test]
    fn depthwise_convolutions_agree_with_the_reference() {
        let mut rng = Rng(21);
        for isa in Isa::available() {
            for round in 0..400 {
                let channels = rng.pick(&[1, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 70]);
                let random = [window, window, deep_window][round % 3];
                let window = random(&mut rng, channels);
                let mut d = DepthwiseDesc::new(isa, window, channels);
                d.ldy += rng.pick(&[0, 2]);
                let with_epilogue = rng.below(2) == 0;
                if with_epilogue {
                    assert!(
                        EpilogueOp::unary(EpilogueKind::MulScalar, 1.5, 0.0)
                            .append_to(&mut d.epilogue, &mut d.n_epilogue)
                    );
                    assert!(
                        EpilogueOp::row_vec(EpilogueKind::Add, 0)
                            .append_to(&mut d.epilogue, &mut d.n_epilogue)
                    );
                    assert!(
                        EpilogueOp::tensor(EpilogueKind::Add, 1, channels as isize)
                            .append_to(&mut d.epilogue, &mut d.n_epilogue)
                    );
                    assert!(
                        EpilogueOp::unary(EpilogueKind::Clamp, -0.5, 0.75)
                            .append_to(&mut d.epilogue, &mut d.n_epilogue)
                    );
                    assert!(
                        EpilogueOp::row_vec(EpilogueKind::Mul, 0)
                            .append_to(&mut d.epilogue, &mut d.n_epilogue)
                    );
                }
                let x = rng.vec(window.batch * window.x_n_stride);
                let weights = rng.vec(window.n_taps() * channels);
                let (bias, residual) = (rng.vec(channels), rng.vec(window.n_pixels() * channels));
                let mut want = Vec::new();
                for (pixel, place) in pixels(window).enumerate() {
                    for c in 0..channels {
                        let mut sum = 0.0;
                        for (number, tap) in taps(window).enumerate() {
                            let x = input(&window, &x, place, tap, c).unwrap_or(0.0);
                            sum += x * f64::from(weights[number * channels + c]);
                        }
                        if with_epilogue {
                            sum *= 1.5;
                            sum += f64::from(bias[c]) + f64::from(residual[pixel * channels + c]);
                            sum = sum.clamp(-0.5, 0.75) * f64::from(bias[c]);
                        }
                        want.push(sum);
                    }
                    want.extend((channels..d.ldy).map(|_| 5.0));
                }
                let mut y = vec![5f32; window.n_pixels() * d.ldy];
                let ptrs = [
                    x.as_ptr() as *mut u8,
                    weights.as_ptr() as *mut u8,
                    y.as_mut_ptr().cast(),
                    std::ptr::null_mut(),
                    bias.as_ptr() as *mut u8,
                    residual.as_ptr() as *mut u8,
                ];
                // SAFETY: the buffers have the sizes that the descriptor describes.
                let status = unsafe { gm_depthwise_f32(&d, ptrs.as_ptr(), 0, d.n_items()) };
                assert_eq!(status, OK);
                assert_close(&y, &want, 1e-5, &format!("{isa} round {round} {d:?}"));
            }
        }
    }
}
