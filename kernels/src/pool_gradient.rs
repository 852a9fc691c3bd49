//! Gradient of max pooling of images over two or three axes, channels last, in f32.
//!
//! `x: [batch, in_d, in_h, in_w, channels]`, `g: [batch, out_d, out_h, out_w, channels]` and the
//! contiguous `y`, which has the extents of `x`. Each window adds its `g` to its first maximum in row-major
//! order, the first NaN if there is any; a window over padding alone adds nothing. Item `i` is block
//! `i % n_blocks` of the channels of image `i / n_blocks`. An element takes its sums in the order of
//! the windows, so that its bits do not depend on how items are divided.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::window::Window;
use crate::{INVALID, LHS, OK, OUT, RHS, UNSUPPORTED_ISA, pointer};
use std::ops::Range;

/// Channels of an item: a cache line.
const CHANNEL_BLOCK: u32 = 16;

/// The gradient of a max pooling.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxPoolGradDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// Channels of an item.
    pub channel_block: u32,
    /// Geometry of the pooling, and strides of `x`.
    pub window: Window,
    /// Channels.
    pub channels: usize,
    /// Elements of `g` between images.
    pub g_n_stride: usize,
    /// Elements of `g` between depths.
    pub g_d_stride: usize,
    /// Elements of `g` between rows.
    pub g_h_stride: usize,
    /// Elements of `g` between pixels of a row.
    pub g_w_stride: usize,
}

descriptor!(MaxPoolGradDesc {
    isa,
    channel_block,
    window,
    channels,
    g_n_stride,
    g_d_stride,
    g_h_stride,
    g_w_stride
});

impl MaxPoolGradDesc {
    /// A gradient for an instruction set with contiguous `g`.
    pub fn new(isa: Isa, window: Window, channels: usize) -> MaxPoolGradDesc {
        MaxPoolGradDesc {
            isa: isa as u32,
            channel_block: CHANNEL_BLOCK,
            window,
            channels,
            g_n_stride: window.out_d * window.out_h * window.out_w * channels,
            g_d_stride: window.out_h * window.out_w * channels,
            g_h_stride: window.out_w * channels,
            g_w_stride: channels,
        }
    }

    /// Items of the whole gradient.
    pub fn n_items(&self) -> usize {
        self.window.batch * self.n_blocks()
    }

    fn n_blocks(&self) -> usize {
        self.channels.div_ceil(self.channel_block as usize)
    }
}

/// Computes items `begin..end` of a [`MaxPoolGradDesc`]: `ptrs[LHS]` is `x`, `ptrs[RHS]` is `g`,
/// `ptrs[OUT]` is `y`.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_max_pool_grad_f32(
    desc: *const MaxPoolGradDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if !desc.window.valid() || desc.channel_block == 0 {
        return INVALID;
    }
    let (n_blocks, end) = (desc.n_blocks(), end.min(desc.n_items()));
    let mut item = begin;
    while item < end {
        // Neighbouring blocks of an image together read whole lines.
        let number = item / n_blocks;
        let first_item = number * n_blocks;
        let stop = end.min(first_item + n_blocks);
        let channel = |item: usize| (item - first_item) * desc.channel_block as usize;
        let channels = channel(item)..channel(stop).min(desc.channels);
        // SAFETY: the pointers cover the image and these channels.
        unsafe { dispatch(isa, Image::new(desc, ptrs, number, channels)) };
        item = stop;
    }
    OK
}

/// Some channels of an image. The pointers are those of its first pixel and channel.
struct Image<'a> {
    desc: &'a MaxPoolGradDesc,
    x: *const f32,
    g: *const f32,
    y: *mut f32,
    channels: Range<usize>,
}

/// The part of a window that is on the image.
#[derive(Clone, Copy)]
struct Taps {
    /// First pixels of the rows, as elements of `x` and of `y`.
    x: usize,
    y: usize,
    n_depths: usize,
    n_rows: usize,
    n_columns: usize,
    /// The window's pixel of `g`.
    g: usize,
}

/// The part of an output row's windows that is on the image, along one axis.
#[derive(Clone, Copy)]
struct Reach {
    /// Position of the row along the axis, and of the windows' first pixel on the image.
    out: usize,
    first: usize,
    n: usize,
    /// The end of the reached pixels.
    end: usize,
}

impl Reach {
    /// Windows at `out` with these taps on an image behind a padding; `None` without any.
    #[inline(always)]
    fn new(out: usize, taps: Range<usize>, axis: [usize; 3]) -> Option<Reach> {
        let [stride, dilation, pad] = axis;
        if taps.is_empty() {
            return None;
        }
        let first = out * stride + taps.start * dilation - pad;
        Some(Reach {
            out,
            first,
            n: taps.len(),
            end: first + (taps.len() - 1) * dilation + 1,
        })
    }
}

impl Task for Image<'_> {
    type Out = ();

    /// Safety: the pointers cover the image and its channels.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let w = &self.desc.window;
        // Rows of all depths.
        let mut n_cleared = 0;
        for od in 0..w.out_d {
            let axis = [w.stride_d, w.dilation_d, w.pad_front];
            let Some(depths) = Reach::new(od, w.depths_inside(od), axis) else {
                continue;
            };
            for oh in 0..w.out_h {
                let axis = [w.stride_h, w.dilation_h, w.pad_top];
                let Some(rows) = Reach::new(oh, w.rows_inside(oh), axis) else {
                    continue;
                };
                let end = (depths.end - 1) * w.in_h + rows.end;
                // SAFETY: the depths and rows are on the image.
                unsafe {
                    // A row is cleared when the first window reaches it, while it is in a cache.
                    self.clear(n_cleared..end);
                    n_cleared = n_cleared.max(end);
                    self.row(s, depths, rows);
                }
            }
        }
        // SAFETY: as above.
        unsafe { self.clear(n_cleared..w.in_d * w.in_h) };
    }
}

impl<'a> Image<'a> {
    /// # Safety
    /// The pointers cover the descriptor's operands, and it has this image and these channels.
    unsafe fn new(
        desc: &'a MaxPoolGradDesc,
        ptrs: *const *mut u8,
        number: usize,
        channels: Range<usize>,
    ) -> Image<'a> {
        let w = &desc.window;
        // SAFETY: by contract.
        let (x, g, y) = unsafe { (pointer(ptrs, LHS), pointer(ptrs, RHS), pointer(ptrs, OUT)) };
        Image {
            desc,
            x: x.wrapping_add(number * w.x_n_stride),
            g: g.wrapping_add(number * desc.g_n_stride),
            y: y.wrapping_add(number * w.in_d * w.in_h * w.in_w * desc.channels),
            channels,
        }
    }

    /// Zeros in rows of `y`.
    ///
    /// # Safety
    /// The rows are on the image, which the pointers cover.
    #[inline(always)]
    unsafe fn clear(&self, rows: Range<usize>) {
        let n_columns = self.desc.window.in_w;
        let pixels = rows.start * n_columns..rows.end * n_columns;
        let (all, n) = (self.desc.channels, self.channels.len());
        if n == all && !pixels.is_empty() {
            // SAFETY: all channels of the pixels, by contract.
            unsafe {
                self.y
                    .add(pixels.start * all)
                    .write_bytes(0, pixels.len() * all)
            };
            return;
        }
        for pixel in pixels {
            let y = self.y.wrapping_add(pixel * all + self.channels.start);
            // SAFETY: channels of a pixel on the image.
            unsafe { y.write_bytes(0, n) };
        }
    }

    /// Adds `g` of an output row, whose windows have these depths and rows on the image.
    ///
    /// # Safety
    /// As for `run`, and the depths and rows are on the image.
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, s: S, depths: Reach, rows: Reach) {
        let (d, w) = (self.desc, &self.desc.window);
        let reach = (w.kernel_w - 1) * w.dilation_w;
        for ow in 0..w.out_w {
            let start = ow * w.stride_w;
            // Windows inside of the image need no division.
            let (first_column, n_columns) =
                if start >= w.pad_left && start - w.pad_left + reach < w.in_w {
                    (start - w.pad_left, w.kernel_w)
                } else {
                    let columns = w.taps_inside(ow);
                    if columns.is_empty() {
                        continue;
                    }
                    let first = start + columns.start * w.dilation_w - w.pad_left;
                    (first, columns.len())
                };
            let taps = Taps {
                x: depths.first * w.x_d_stride
                    + rows.first * w.x_h_stride
                    + first_column * w.x_w_stride,
                y: ((depths.first * w.in_h + rows.first) * w.in_w + first_column) * d.channels,
                n_depths: depths.n,
                n_rows: rows.n,
                n_columns,
                g: depths.out * d.g_d_stride + rows.out * d.g_h_stride + ow * d.g_w_stride,
            };
            // SAFETY: the taps are on the image.
            unsafe { self.window(s, taps) };
        }
    }

    /// # Safety
    /// As for `run`, and the taps are on the image.
    #[inline(always)]
    unsafe fn window<S: Simd>(&self, s: S, taps: Taps) {
        let mut channel = self.channels.start;
        // SAFETY: vectors of channels that there are.
        unsafe {
            while self.channels.end - channel >= 4 * S::LANES {
                self.vectors::<S, 4>(s, taps, channel);
                channel += 4 * S::LANES;
            }
            while channel < self.channels.end {
                self.vectors::<S, 1>(s, taps, channel);
                channel += S::LANES;
            }
        }
    }

    /// Adds `V` vectors of `g`; one alone may be partial.
    ///
    /// # Safety
    /// As for `window`, with these channels.
    #[inline(always)]
    unsafe fn vectors<S: Simd, const V: usize>(&self, s: S, taps: Taps, channel: usize) {
        let (d, w) = (self.desc, &self.desc.window);
        let n = self.channels.end - channel;
        // SAFETY: the taps and channels are on the image.
        unsafe {
            let first = self.first_maxima::<S, V>(s, taps, channel);
            let g = load::<S, V>(s, self.g.add(taps.g + channel), n);
            let mut number = 0;
            for depth in 0..taps.n_depths {
                for i in 0..taps.n_rows {
                    let down = depth * w.dilation_d * w.in_h + i * w.dilation_h;
                    let row = self.y.add(taps.y + down * w.in_w * d.channels + channel);
                    for j in 0..taps.n_columns {
                        let y = row.add(j * w.dilation_w * d.channels);
                        let mut sum = load::<S, V>(s, y, n);
                        for v in 0..V {
                            let is_here = s.eq_i(first[v], s.splat_i(number));
                            sum[v] = s.add(sum[v], s.select(is_here, g[v], s.zero()));
                        }
                        store(s, y, n, sum);
                        number += 1;
                    }
                }
            }
        }
    }

    /// Numbers of the first maxima among the taps.
    ///
    /// # Safety
    /// As for `vectors`.
    #[inline(always)]
    unsafe fn first_maxima<S: Simd, const V: usize>(
        &self,
        s: S,
        taps: Taps,
        channel: usize,
    ) -> [S::I; V] {
        let w = &self.desc.window;
        let n = self.channels.end - channel;
        let x = self.x.wrapping_add(taps.x + channel);
        // SAFETY: the taps and channels are on the image.
        let mut largest = unsafe { load::<S, V>(s, x, n) };
        // Numbers as the bits of floats, since those can be selected.
        let mut first = [s.zero(); V];
        let mut number = 0;
        for depth in 0..taps.n_depths {
            for i in 0..taps.n_rows {
                let down = depth * w.dilation_d * w.x_d_stride + i * w.dilation_h * w.x_h_stride;
                let row = x.wrapping_add(down);
                for j in 0..taps.n_columns {
                    // SAFETY: as above.
                    let x = unsafe { load::<S, V>(s, row.add(j * w.dilation_w * w.x_w_stride), n) };
                    let own = s.as_float(s.splat_i(number));
                    for v in 0..V {
                        (largest[v], first[v]) = larger(s, [largest[v], first[v]], [x[v], own]);
                    }
                    number += 1;
                }
            }
        }
        first.map(|number| s.bits(number))
    }
}

/// The larger of two elements with its number; `a` unless `b` beats it.
#[inline(always)]
fn larger<S: Simd>(s: S, a: [S::F; 2], b: [S::F; 2]) -> (S::F, S::F) {
    let stays = s.le(b[0], a[0]);
    // Nothing beats NaN.
    let is_number = s.eq(a[0], a[0]);
    let of = |i: usize| s.select(stays, a[i], s.select(is_number, b[i], a[i]));
    (of(0), of(1))
}

/// # Safety
/// `p` is readable for `V` vectors, or for `n` elements of one.
#[inline(always)]
unsafe fn load<S: Simd, const V: usize>(s: S, p: *const f32, n: usize) -> [S::F; V] {
    let mut vectors = [s.zero(); V];
    for (v, vector) in vectors.iter_mut().enumerate() {
        // SAFETY: by contract.
        *vector = unsafe {
            match V {
                1 => s.load_n(p, n),
                _ => s.load(p.add(v * S::LANES)),
            }
        };
    }
    vectors
}

/// # Safety
/// `p` is writable for `V` vectors, or for `n` elements of one.
#[inline(always)]
unsafe fn store<S: Simd, const V: usize>(s: S, p: *mut f32, n: usize, vectors: [S::F; V]) {
    for (v, vector) in vectors.into_iter().enumerate() {
        // SAFETY: by contract.
        unsafe {
            match V {
                1 => s.store_n(p, n, vector),
                _ => s.store(p.add(v * S::LANES), vector),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::tests::{deep_window, window};
    use crate::testing::Rng;

    /// Offsets of a window's taps on the image, in `x` and in a contiguous image.
    fn taps(d: &MaxPoolGradDesc, [n, od, oh, ow]: [usize; 4]) -> Vec<(usize, usize)> {
        let w = &d.window;
        let at = |tap: usize| {
            let [i, j] = [tap / w.kernel_w % w.kernel_h, tap % w.kernel_w];
            let id = w.input_depth(od, tap / w.kernel_w / w.kernel_h)?;
            let ih = w.input_row(oh, i)?;
            let iw = (ow * w.stride_w + j * w.dilation_w).checked_sub(w.pad_left)?;
            let x = n * w.x_n_stride + id * w.x_d_stride + ih * w.x_h_stride + iw * w.x_w_stride;
            let y = ((n * w.in_d + id) * w.in_h + ih) * w.in_w + iw;
            (iw < w.in_w).then_some((x, y * d.channels))
        };
        (0..w.n_taps()).filter_map(at).collect()
    }

    fn reference(d: &MaxPoolGradDesc, x: &[f32], g: &[f32]) -> Vec<f32> {
        let w = &d.window;
        let mut y = vec![0.0; w.batch * w.in_d * w.in_h * w.in_w * d.channels];
        for pixel in 0..w.n_pixels() {
            let (plane, oh, ow) = (
                pixel / (w.out_h * w.out_w),
                pixel / w.out_w % w.out_h,
                pixel % w.out_w,
            );
            let (n, od) = (plane / w.out_d, plane % w.out_d);
            for c in 0..d.channels {
                let better = |a: f32, b: f32| a > b || (a.is_nan() && !b.is_nan());
                let mut best: Option<(usize, usize)> = None;
                for tap in taps(d, [n, od, oh, ow]) {
                    if best.is_none_or(|b| better(x[tap.0 + c], x[b.0 + c])) {
                        best = Some(tap);
                    }
                }
                if let Some((_, to)) = best {
                    let from = n * d.g_n_stride
                        + od * d.g_d_stride
                        + oh * d.g_h_stride
                        + ow * d.g_w_stride;
                    y[to + c] += g[from + c];
                }
            }
        }
        y
    }

    /// A pooling with rounding up: windows may reach beyond the padding.
    fn geometry(rng: &mut Rng, channels: usize) -> MaxPoolGradDesc {
        let mut window = match rng.below(2) {
            0 => window(rng, channels),
            _ => deep_window(rng, channels),
        };
        window.out_d += rng.below(2);
        window.out_h += rng.below(2);
        window.out_w += rng.below(2);
        let mut d = MaxPoolGradDesc::new(Isa::current(), window, channels);
        if rng.below(3) == 0 {
            d.g_w_stride += 2;
            d.g_h_stride = window.out_w * d.g_w_stride + 5;
            d.g_d_stride = window.out_h * d.g_h_stride + 7;
            d.g_n_stride = window.out_d * d.g_d_stride + 3;
        }
        d.channel_block = rng.pick(&[1, 8, 16, 64]);
        d
    }

    /// Few distinct values, so that there are ties.
    fn images(rng: &mut Rng, n: usize) -> Vec<f32> {
        const VALUES: [f32; 8] = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
        ];
        match rng.below(3) {
            0 => rng.vec(n),
            1 => (0..n).map(|_| rng.pick(&VALUES)).collect(),
            _ => (0..n).map(|_| rng.pick(&VALUES[3..])).collect(),
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        let canonical = |x: f32| if x.is_nan() { f32::NAN } else { x };
        values.iter().map(|&x| canonical(x).to_bits()).collect()
    }

    #[test]
    fn gradients_are_those_of_the_reference() {
        let mut rng = Rng(37);
        for isa in Isa::available() {
            for _ in 0..400 {
                let channels = rng.pick(&[1, 3, 8, 16, 17, 33, 64, 129]);
                let mut d = geometry(&mut rng, channels);
                d.isa = isa as u32;
                let x = images(&mut rng, d.window.batch * d.window.x_n_stride);
                let mut g = rng.vec(d.window.batch * d.g_n_stride);
                if rng.below(4) == 0 && !g.is_empty() {
                    (g[0], g[channels / 2]) = (f32::NAN, f32::INFINITY);
                }
                let want = reference(&d, &x, &g);
                let mut y = vec![5f32; want.len()];
                let ptrs = [
                    x.as_ptr() as *mut u8,
                    g.as_ptr() as *mut u8,
                    y.as_mut_ptr().cast(),
                ];
                let mut begin = 0;
                while begin < d.n_items() {
                    let end = begin + 1 + rng.below(d.n_items());
                    // SAFETY: the buffers have the sizes that the descriptor describes.
                    let status = unsafe { gm_max_pool_grad_f32(&d, ptrs.as_ptr(), begin, end) };
                    assert_eq!(status, OK);
                    begin = end;
                }
                assert_eq!(bits(&y), bits(&want), "{isa} {d:?}");
            }
        }
    }

    #[test]
    fn an_item_writes_its_own_channels() {
        let window = Window::new(2, 4, 4, 20, 2, 2).with([2, 2], [1, 1], [0; 4]);
        let d = MaxPoolGradDesc::new(Isa::current(), window, 20);
        let (x, g) = (vec![1f32; 2 * 16 * 20], vec![1f32; 2 * 4 * 20]);
        let mut y = vec![5f32; x.len()];
        let ptrs = [
            x.as_ptr() as *mut u8,
            g.as_ptr() as *mut u8,
            y.as_mut_ptr().cast(),
        ];
        assert_eq!(d.n_items(), 4);
        // SAFETY: the buffers have the sizes that the descriptor describes.
        assert_eq!(unsafe { gm_max_pool_grad_f32(&d, ptrs.as_ptr(), 1, 3) }, OK);
        for (i, &y) in y.iter().enumerate() {
            let (image, channel) = (i / 320, i % 20);
            let is_written = (image == 0) == (channel >= 16);
            assert_eq!(y == 5.0, !is_written, "element {i}");
        }
    }
}
