//! Depthwise convolutions of 8-bit integers: a block of output rows at a time, whose input rows
//! become `f32` in the workspace, centred on the zero point.
//!
//! Weights are whole numbers in `f32`. Sums are exact while they stay within `2^24`, which the
//! caller vouches for, so that they are those of integers.

use super::{DepthwiseDesc, compute_row};
use crate::epilogue::{Epilogue, Rect};
use crate::gemm::integer::Resolved;
use crate::isa::Isa;
use crate::quantize::{Quantize, StoreBytes};
use crate::simd::{Simd, Task, dispatch};
use crate::window::Window;
use crate::{LHS, OUT, RHS, WORKSPACE, pointer};
use std::ops::Range;

/// Bytes of the input rows of a block, at most, where a block has several rows: a part of the
/// second-level cache.
const BLOCK_BYTES: usize = 128 << 10;

/// The most that a partial sum of whole numbers in `f32` may be, so that all are exact.
const EXACT: i64 = 1 << 24;

/// True when sums of products of as many as `n` centred bytes by these weights are exact in `f32`.
pub fn is_exact_in_f32(weights: &[i32], n: usize) -> bool {
    let largest = weights.iter().map(|w| i64::from(w.unsigned_abs())).max();
    let terms = i64::try_from(n).unwrap_or(i64::MAX);
    let most = largest.unwrap_or(0).saturating_mul(i64::from(u8::MAX));
    most.saturating_mul(terms) <= EXACT
}

/// Sizes of a block's parts of the workspace, in elements.
struct Layout {
    /// Output rows of a block.
    rows: usize,
    /// A converted input row.
    row: usize,
    /// Converted input rows of a window depth.
    span: usize,
    /// All of them.
    input: usize,
}

impl Layout {
    fn of(desc: &DepthwiseDesc) -> Layout {
        let w = &desc.window;
        let row = w.in_w * desc.channels;
        let window_rows = (w.kernel_h.max(1) - 1) * w.dilation_h + 1;
        // Depths between those of the window have places too.
        let depths = (w.kernel_d.max(1) - 1) * w.dilation_d + 1;
        let fitting = BLOCK_BYTES / size_of::<f32>() / (row * depths).max(1);
        let more = fitting.saturating_sub(window_rows) / w.stride_h.max(1);
        let rows = (1 + more).min(w.out_h.max(1));
        let span = (rows - 1) * w.stride_h + window_rows;
        Layout {
            rows,
            row,
            span,
            input: depths * span * row,
        }
    }
}

/// Bytes for each concurrent call at `ptrs[WORKSPACE]`: input rows, and a row of sums.
pub(super) fn workspace_bytes(desc: &DepthwiseDesc) -> usize {
    let sums = desc.window.out_w * desc.channels;
    (Layout::of(desc).input + sums) * size_of::<f32>()
}

/// Computes some items, which are output rows.
///
/// # Safety
/// As for `gm_depthwise_f32`, with a valid descriptor of bytes.
pub(super) unsafe fn run(
    isa: Isa,
    desc: &DepthwiseDesc,
    ptrs: *const *mut u8,
    (epilogue, integers): (&Epilogue, Resolved),
    items: Range<usize>,
) {
    let (w, layout) = (&desc.window, Layout::of(desc));
    // SAFETY: the workspace is there, by contract.
    let workspace: *mut f32 = unsafe { (*ptrs.add(WORKSPACE)).cast() };
    let converted = DepthwiseDesc {
        window: Window {
            x_w_stride: desc.channels,
            x_h_stride: layout.row,
            x_d_stride: layout.span * layout.row,
            ..*w
        },
        ldy: desc.channels,
        ..*desc
    };
    let mut item = items.start;
    while item < items.end {
        let block = Block::new(desc, &layout, item..items.end);
        // SAFETY: the pointers and the workspace cover the block.
        unsafe {
            block.convert(isa, pointer(ptrs, LHS).cast(), workspace, integers);
            for oh in block.output_rows.clone() {
                let (sums, weights) = (workspace.add(layout.input), pointer(ptrs, RHS));
                let x = workspace.wrapping_add(block.below(oh));
                let (place, pixel) = ([block.od, oh], item * w.out_w);
                compute_row(isa, &converted, epilogue, place, pixel, (x, weights, sums));
                let to = *ptrs.add(OUT);
                store(isa, desc, integers.keeps_sums, sums, to, pixel);
                item += 1;
            }
        }
    }
}

/// Some output rows of one depth.
struct Block<'a> {
    desc: &'a DepthwiseDesc,
    layout: &'a Layout,
    image: usize,
    od: usize,
    output_rows: Range<usize>,
}

impl<'a> Block<'a> {
    /// The first of some items, as many as a block has.
    fn new(desc: &'a DepthwiseDesc, layout: &'a Layout, items: Range<usize>) -> Block<'a> {
        let w = &desc.window;
        let (image_depth, oh) = (items.start / w.out_h, items.start % w.out_h);
        let n_rows = layout.rows.min(w.out_h - oh).min(items.len());
        Block {
            desc,
            layout,
            image: image_depth / w.out_d,
            od: image_depth % w.out_d,
            output_rows: oh..oh + n_rows,
        }
    }

    /// Position of the converted input under output row `oh`, perhaps before the first one.
    fn below(&self, oh: usize) -> usize {
        let w = &self.desc.window;
        let rows = (oh * w.stride_h).wrapping_sub(w.pad_top + self.first_row());
        rows.wrapping_mul(self.layout.row)
    }

    /// The first converted input row.
    fn first_row(&self) -> usize {
        let w = &self.desc.window;
        (self.output_rows.start * w.stride_h).saturating_sub(w.pad_top)
    }

    /// Converts the input rows of the block.
    ///
    /// # Safety
    /// `x` covers the input, the workspace has the layout's size.
    unsafe fn convert(&self, isa: Isa, x: *const u8, workspace: *mut f32, integers: Resolved) {
        let w = &self.desc.window;
        let last = (self.output_rows.end - 1) * w.stride_h + (w.kernel_h - 1) * w.dilation_h;
        let rows = self.first_row()..(last + 1).saturating_sub(w.pad_top).min(w.in_h);
        for d in w.depths_inside(self.od) {
            let Some(depth) = w.input_depth(self.od, d) else {
                continue;
            };
            let image = self.image * w.x_n_stride + depth * w.x_d_stride;
            for (i, ih) in rows.clone().enumerate() {
                let to = (d * w.dilation_d * self.layout.span + i) * self.layout.row;
                let task = Centre {
                    from: x.wrapping_add(image + ih * w.x_h_stride),
                    step: w.x_w_stride,
                    to: workspace.wrapping_add(to),
                    pixels: w.in_w,
                    channels: self.desc.channels,
                    integers,
                };
                // SAFETY: the row is readable, and its place writable.
                unsafe { dispatch(isa, task) };
            }
        }
    }
}

/// Bytes of a row minus the zero point, as `f32`.
struct Centre {
    from: *const u8,
    /// Bytes between pixels.
    step: usize,
    to: *mut f32,
    pixels: usize,
    channels: usize,
    integers: Resolved,
}

impl Task for Centre {
    type Out = ();

    /// Safety: the row is readable, and so many elements are writable.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, _: S) {
        let (flip, zero) = (
            self.integers.flip() as u8,
            self.integers.unsigned_zero() as f32,
        );
        let (n, length) = match self.step == self.channels {
            true => (1, self.pixels * self.channels),
            false => (self.pixels, self.channels),
        };
        for i in 0..n {
            // SAFETY: by contract. The compiler makes vectors of this loop.
            unsafe {
                let from = std::slice::from_raw_parts(self.from.add(i * self.step), length);
                let to = std::slice::from_raw_parts_mut(self.to.add(i * length), length);
                for (to, &x) in to.iter_mut().zip(from) {
                    *to = f32::from(x ^ flip) - zero;
                }
            }
        }
    }
}

/// Stores a row of results: as bytes, as `f32`, or sums as `i32`.
///
/// # Safety
/// `to` is the output, `pixel` the row's first pixel.
unsafe fn store(
    isa: Isa,
    desc: &DepthwiseDesc,
    keeps_sums: bool,
    sums: *mut f32,
    to: *mut u8,
    pixel: usize,
) {
    let Quantize { to: kind, .. } = desc.quantize;
    let rect = Rect {
        c: sums,
        ldc: desc.channels,
        row: pixel,
        col: 0,
        rows: desc.window.out_w,
        cols: desc.channels,
    };
    let to = to.wrapping_add(pixel * desc.ldy * desc.quantize.size_bytes());
    // SAFETY: by contract.
    unsafe {
        if kind != 0 {
            let narrow = StoreBytes {
                quantize: desc.quantize,
                from: rect,
                to,
                ld: desc.ldy,
            };
            dispatch(isa, narrow);
        } else {
            let words = StoreWords {
                from: rect,
                to: to.cast(),
                ld: desc.ldy,
                as_integers: keeps_sums,
            };
            dispatch(isa, words);
        }
    }
}

/// Stores a rectangle of `f32` elsewhere, as it is or as integers.
struct StoreWords {
    from: Rect,
    to: *mut f32,
    ld: usize,
    as_integers: bool,
}

impl Task for StoreWords {
    type Out = ();

    /// Safety: the rectangle is readable, and as many words are writable in rows of `ld` words.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        for r in 0..self.from.rows {
            let mut j = 0;
            while j < self.from.cols {
                let n = self.from.cols - j;
                // SAFETY: by contract.
                unsafe {
                    let x = s.load_n(self.from.c.add(r * self.from.ldc + j), n);
                    let x = match self.as_integers {
                        true => s.as_float(s.to_int(x)),
                        false => x,
                    };
                    s.store_n(self.to.add(r * self.ld + j), n, x);
                }
                j += S::LANES;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::conv::tests::{deep_window, pixels, taps, window};
    use crate::depthwise::{DepthwiseDesc, gm_depthwise_f32};
    use crate::gemm::integer::tests::{
        Rest, UNTOUCHED, bytes, integers, operands, rest, stored, value,
    };
    use crate::testing::Rng;
    use crate::window::Window;
    use crate::{Isa, OK};

    fn convolution(rng: &mut Rng, isa: Isa, window: fn(&mut Rng, usize) -> Window) {
        let channels = rng.pick(&[1, 3, 4, 8, 15, 16, 17, 33, 70]);
        let window = window(rng, channels);
        let (is_signed, rest) = (rng.below(2) == 0, rest(rng));
        let mut desc = DepthwiseDesc::new(isa, window, channels);
        let zero;
        (desc.integers, zero) = integers(rng, is_signed, rest);
        if rest != Rest::Sums {
            let mut ops = rest.ops();
            assert!(ops.all(|op| op.append_to(&mut desc.epilogue, &mut desc.n_epilogue)));
        }
        if let Rest::Quantized(q, _) = rest {
            desc.quantize = q;
        }
        desc.ldy += rng.pick(&[0, 3]);
        let x = bytes(rng, window.batch * window.x_n_stride);
        let n_weights = window.n_taps() * channels;
        let weights: Vec<f32> = (0..n_weights)
            .map(|_| rng.below(511) as f32 - 255.0)
            .collect();
        let ops = operands(rng, channels, rest);
        let y_bytes = desc.quantize.size_bytes();
        let mut y = vec![UNTOUCHED; window.n_pixels() * desc.ldy * y_bytes];
        let mut want = y.clone();
        for (pixel, (image, [od, oh, ow])) in pixels(window).enumerate() {
            for c in 0..channels {
                let mut sum = 0;
                for (tap, [d, i, j]) in taps(window).enumerate() {
                    let place = window.input_depth(od, d).zip(window.input_row(oh, i));
                    let iw = ow * window.stride_w + j * window.dilation_w;
                    let iw = iw
                        .checked_sub(window.pad_left)
                        .filter(|&iw| iw < window.in_w);
                    let Some(((id, ih), iw)) = place.zip(iw) else {
                        continue;
                    };
                    let depth = image * window.x_n_stride + id * window.x_d_stride;
                    let at = depth + ih * window.x_h_stride + iw * window.x_w_stride + c;
                    let centred = value(x[at], is_signed) - value(zero, is_signed);
                    sum += centred * weights[tap * channels + c] as i32;
                }
                let at = (pixel * desc.ldy + c) * y_bytes;
                want[at..at + y_bytes].copy_from_slice(&stored(sum, c, rest, &ops));
            }
        }
        let mut workspace = vec![f32::NAN; desc.workspace_bytes() / size_of::<f32>()];
        let ptrs: [*mut u8; 7] = [
            x.as_ptr().cast_mut(),
            weights.as_ptr() as *mut u8,
            y.as_mut_ptr(),
            workspace.as_mut_ptr().cast(),
            ops[0].as_ptr() as *mut u8,
            ops[1].as_ptr() as *mut u8,
            (&raw const zero).cast_mut(),
        ];
        let split = desc.n_items() / 3;
        for (begin, end) in [(split, desc.n_items()), (0, split)] {
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_depthwise_f32(&desc, ptrs.as_ptr(), begin, end) };
            assert_eq!(status, OK);
        }
        assert!(y == want, "{isa} {rest:?} {desc:?}");
    }

    #[test]
    fn depthwise_convolutions_of_bytes_are_exact() {
        let mut rng = Rng(22);
        for isa in Isa::available() {
            (0..150).for_each(|_| convolution(&mut rng, isa, window));
            (0..80).for_each(|_| convolution(&mut rng, isa, deep_window));
        }
    }
}
