//! Convolutions of 3x3 windows and stride 1 in f32 by Winograd's minimal filtering: fewer products
//! than a direct sum, in another order.
//!
//! An output tile of `m x m` pixels is `A^T ((G g G^T) * (B^T d B)) A` summed over channels, where `d` is
//! its `(m + 2) x (m + 2)` input tile and `g` the filter (Winograd, Arithmetic Complexity of
//! Computations, 1980; Lavin and Gray, arXiv:1509.09308, sections 3 and 4). The transformed filters
//! `G g G^T` are made once ([`pack_winograd`]); for each of the `(m + 2)^2` positions, the sums over
//! channels are one matrix product over the tiles of a block.
//!
//! | tile | products per output and channel | largest error seen, of the output's scale |
//! |---|---|---|
//! | direct | 9 | 1e-7 to 5e-7 |
//! | 2 | 4 | 1e-6 |
//! | 4 | 2.25 | 8e-6 |
//!
//! An element that is not finite makes NaN of all outputs of the tiles that read it, where a direct sum may
//! give infinity, and leaves other outputs as they are.
//!
//! Operands are those of a direct convolution (see [`crate::conv`]) with one group. A dilated image
//! falls apart into phases, each of which is an image of its own. Item `i` is block `i` of the tiles,
//! which are numbered by (image, phase row, phase column, tile row, tile column).

mod form;
mod price;
#[cfg(test)]
mod tests;
mod weights;

pub use price::Priced;
pub use weights::{FilterStrides, pack_winograd, packed_winograd_len};

use crate::descriptor::descriptor;
use crate::epilogue::{ApplyRest, Epilogue, EpilogueOp, MAX_BATCH, MAX_EPILOGUE, Rect};
use crate::gemm::Product;
use crate::gemm::tile::Lhs;
use crate::isa::Isa;
use crate::pack::packed_len;
use crate::quantize::Quantize;
use crate::simd::{Simd, Task, dispatch};
use crate::window::Window;
use crate::{
    INVALID, LHS, OK, OPERANDS, OUT, RHS, TaskCall, UNSUPPORTED_ISA, WORKSPACE, calls, pointer,
};
use form::{Form, Form2, Form4};
use std::marker::PhantomData;
use std::ops::Range;

/// Panels of output channels whose sums are transformed together, so that they stay in the cache.
const PANELS: usize = 4;
/// Bytes of a block's transformed tiles: a part of the second-level cache; more where the weights,
/// which each block reads, are large.
const BLOCK_BYTES: usize = 384 << 10;
/// Least tiles of a block: rows of a full register tile.
const LEAST_BLOCK: usize = 14;

/// A convolution by minimal filtering.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WinogradDesc {
    /// The [`Isa`] that the weights were packed for, as its number.
    pub isa: u32,
    /// Used entries of `epilogue`.
    pub n_epilogue: u32,
    /// Output pixels on a side of a tile: 2 or 4.
    pub tile: usize,
    /// Geometry: 3x3, stride 1, any dilation and padding.
    pub window: Window,
    /// Input channels.
    pub in_channels: usize,
    /// Output channels.
    pub out_channels: usize,
    /// Elements between output pixels.
    pub ldy: usize,
    /// Tiles per item.
    pub tile_block: usize,
    /// Applied to `y`.
    pub epilogue: [EpilogueOp; MAX_EPILOGUE],
}

descriptor!(WinogradDesc {
    isa,
    n_epilogue,
    tile,
    window,
    in_channels,
    out_channels,
    ldy,
    tile_block,
    epilogue,
});

impl WinogradDesc {
    /// A convolution for an instruction set with contiguous output, planned for one thread.
    pub fn new(
        isa: Isa,
        tile: usize,
        window: Window,
        in_channels: usize,
        out_channels: usize,
    ) -> WinogradDesc {
        let mut desc = WinogradDesc {
            isa: isa as u32,
            n_epilogue: 0,
            tile,
            window,
            in_channels,
            out_channels,
            ldy: out_channels,
            tile_block: 1,
            epilogue: [EpilogueOp::default(); MAX_EPILOGUE],
        };
        desc.plan(1);
        desc
    }

    /// True for windows that it computes.
    pub fn takes(window: &Window) -> bool {
        let [h, w] = [window.kernel_h, window.kernel_w];
        window.valid()
            && window.is_flat()
            && [h, w, window.stride_h, window.stride_w] == [3, 3, 1, 1]
    }

    /// Chooses `tile_block` so that a block stays in the cache, and `n_threads` threads are busy.
    pub fn plan(&mut self, n_threads: usize) {
        let n_tiles = self.n_tiles().max(1);
        let bytes = size_of::<f32>() * self.n_positions() * (self.lda() + self.ldm());
        let most = (BLOCK_BYTES + self.n_weights() / 2) / bytes.max(1);
        let shares = n_threads.min(n_tiles.div_ceil(LEAST_BLOCK));
        let n_blocks = n_tiles.div_ceil(most.max(LEAST_BLOCK + 2));
        let n_blocks = n_blocks.next_multiple_of(shares);
        self.tile_block = n_tiles.div_ceil(n_blocks);
    }

    /// Tiles of all images and phases.
    pub fn n_tiles(&self) -> usize {
        Grid::of(self).n_tiles()
    }

    /// Items of the whole convolution.
    pub fn n_items(&self) -> usize {
        self.n_tiles().div_ceil(self.tile_block.max(1))
    }

    /// Bytes that each concurrent call needs at `ptrs[WORKSPACE]`.
    pub fn workspace_bytes(&self) -> usize {
        self.n_positions() * self.tile_block * (self.lda() + self.ldm()) * size_of::<f32>()
    }

    /// Multiply-adds of the products, those of tiles beyond the image included.
    pub fn multiply_adds(&self) -> usize {
        self.n_tiles() * self.n_weights()
    }

    /// Elements of the transformed filters.
    pub fn n_weights(&self) -> usize {
        self.n_positions() * self.in_channels * self.out_channels
    }

    /// Elements of the transformed tiles and sums.
    pub fn n_transformed(&self) -> usize {
        self.n_positions() * self.n_tiles() * (self.in_channels + self.out_channels)
    }

    /// The call of the function of its tile.
    pub fn call(&self) -> TaskCall<'_> {
        match self.tile {
            2 => calls::gm_winograd2_f32(self),
            _ => calls::gm_winograd4_f32(self),
        }
    }

    /// Positions of an input tile.
    fn n_positions(&self) -> usize {
        (self.tile + 2) * (self.tile + 2)
    }

    /// Elements between the transformed tiles of a position.
    fn lda(&self) -> usize {
        spread(self.in_channels.next_multiple_of(16))
    }

    /// Elements between the sums of tiles at a position.
    fn ldm(&self) -> usize {
        let nr = Isa::from_u32(self.isa).map_or(1, Isa::nr);
        spread(self.out_channels.next_multiple_of(nr).min(PANELS * nr))
    }

    pub(crate) fn is_valid(&self) -> bool {
        WinogradDesc::takes(&self.window)
            && [2, 4].contains(&self.tile)
            && self.tile_block > 0
            && Epilogue::valid(&self.epilogue, self.n_epilogue)
    }
}

/// A distance that is no multiple of those at which rows compete for the same sets of the cache.
fn spread(n: usize) -> usize {
    n + if n.is_multiple_of(64) { 16 } else { 0 }
}

/// Numbers of tiles along each dimension.
struct Grid {
    batch: usize,
    phases: [usize; 2],
    tiles: [usize; 2],
}

/// A tile of the output: an image, and its first pixel.
struct Place {
    image: usize,
    y: usize,
    x: usize,
}

impl Grid {
    fn of(desc: &WinogradDesc) -> Grid {
        let w = &desc.window;
        let phases = [w.dilation_h.max(1), w.dilation_w.max(1)];
        let n = |out: usize, phases: usize| out.div_ceil(phases).div_ceil(desc.tile.max(1));
        Grid {
            batch: w.batch,
            phases,
            tiles: [n(w.out_h, phases[0]), n(w.out_w, phases[1])],
        }
    }

    fn n_tiles(&self) -> usize {
        let all = [self.phases, self.tiles];
        self.batch * all.as_flattened().iter().product::<usize>()
    }

    fn place(&self, tile: usize, size: usize) -> Place {
        let ([ph, pw], [th, tw]) = (self.phases, self.tiles);
        let (rest, x) = (tile / tw, tile % tw);
        let (rest, y) = (rest / th, rest % th);
        let (rest, px) = (rest / pw, rest % pw);
        Place {
            image: rest / ph,
            y: y * size * ph + rest % ph,
            x: x * size * pw + px,
        }
    }
}

/// Computes items `begin..end` of a [`WinogradDesc`] of tiles of 2 pixels.
///
/// `ptrs[LHS]` is `x`, `ptrs[RHS]` the weights of [`pack_winograd`], `ptrs[OUT]` is `y`,
/// `ptrs[WORKSPACE]` this call's own workspace, `ptrs[OPERANDS..]` are the epilogue's operands. Returns
/// `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`,
/// or uses the workspace.
pub unsafe extern "C" fn gm_winograd2_f32(
    desc: *const WinogradDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: by contract; the descriptor is valid.
    unsafe { run::<2, 4, Form2>(&*desc, ptrs, begin, end) }
}

/// The same for tiles of 4 pixels.
///
/// # Safety
/// As for [`gm_winograd2_f32`].
pub unsafe extern "C" fn gm_winograd4_f32(
    desc: *const WinogradDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: by contract; the descriptor is valid.
    unsafe { run::<4, 6, Form4>(&*desc, ptrs, begin, end) }
}

/// # Safety
/// As for [`gm_winograd2_f32`].
unsafe fn run<const M: usize, const A: usize, F: Form<M, A>>(
    desc: &WinogradDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if !desc.is_valid() || desc.tile != M {
        return INVALID;
    }
    let ops = &desc.epilogue[..desc.n_epilogue as usize];
    // SAFETY: the pointers cover the descriptor's operands.
    unsafe {
        let convolution = Convolution {
            isa,
            desc,
            grid: Grid::of(desc),
            x: pointer(ptrs, LHS).cast_const(),
            weights: pointer(ptrs, RHS).cast_const(),
            y: pointer(ptrs, OUT),
            workspace: pointer(ptrs, WORKSPACE),
            epilogue: Epilogue::resolve(ops, ptrs.add(OPERANDS), [0; MAX_BATCH]),
        };
        let n_tiles = desc.n_tiles();
        for item in begin..end.min(desc.n_items()) {
            let first = item * desc.tile_block;
            let tiles = first..(first + desc.tile_block).min(n_tiles);
            convolution.block::<M, A, F>(tiles);
        }
    }
    OK
}

struct Convolution<'a> {
    isa: Isa,
    desc: &'a WinogradDesc,
    grid: Grid,
    x: *const f32,
    weights: *const f32,
    y: *mut f32,
    /// Transformed tiles by position, then sums by position.
    workspace: *mut f32,
    epilogue: Epilogue,
}

impl Convolution<'_> {
    /// Computes the outputs of a block of tiles.
    ///
    /// # Safety
    /// As for [`gm_winograd2_f32`].
    unsafe fn block<const M: usize, const A: usize, F: Form<M, A>>(&self, tiles: Range<usize>) {
        let d = self.desc;
        let n_panels = d.out_channels.div_ceil(self.isa.nr());
        // SAFETY: by contract; the workspace is as large as `workspace_bytes` counts.
        unsafe {
            let input = Input::<M, A, F> {
                of: self,
                tiles: tiles.clone(),
                form: PhantomData,
            };
            dispatch(self.isa, input);
            for panel in (0..n_panels).step_by(PANELS) {
                let panels = panel..(panel + PANELS).min(n_panels);
                for position in 0..A * A {
                    self.product(position, tiles.len(), panels.clone());
                }
                let output = Output::<M, A, F> {
                    of: self,
                    tiles: tiles.clone(),
                    channels: self.channels(panels),
                    form: PhantomData,
                };
                dispatch(self.isa, output);
            }
        }
    }

    fn channels(&self, panels: Range<usize>) -> Range<usize> {
        let nr = self.isa.nr();
        panels.start * nr..(panels.end * nr).min(self.desc.out_channels)
    }

    /// Transformed tiles at a position.
    fn tiles_at(&self, position: usize) -> *mut f32 {
        let n = position * self.desc.tile_block * self.desc.lda();
        self.workspace.wrapping_add(n)
    }

    /// Sums of some channels at a position.
    fn sums_at(&self, position: usize) -> *mut f32 {
        let n = position * self.desc.tile_block * self.desc.ldm();
        self.tiles_at(self.desc.n_positions()).wrapping_add(n)
    }

    /// The sums over input channels of `n_tiles` tiles at a position, for the channels of `panels`.
    ///
    /// # Safety
    /// As for [`gm_winograd2_f32`].
    unsafe fn product(&self, position: usize, n_tiles: usize, panels: Range<usize>) {
        let (d, k) = (self.desc, self.desc.in_channels);
        // SAFETY: no ops, so no operands.
        let epilogue = unsafe { Epilogue::resolve(&[], std::ptr::null(), [0; MAX_BATCH]) };
        let matrix = packed_len(self.isa, k, d.out_channels);
        let first = position * matrix + panels.start * k * self.isa.nr();
        let product = Product {
            isa: self.isa,
            n: self.channels(panels.clone()).len(),
            k,
            lhs: Lhs::strided(self.tiles_at(position), d.lda()),
            b: self.weights.wrapping_add(first),
            c: self.sums_at(position),
            ldc: d.ldm(),
            accumulate: false,
            epilogue: &epilogue,
            epilogue_col: 0,
            integers: None,
            quantize: Quantize::default(),
        };
        // SAFETY: by contract.
        unsafe { product.block(0..n_tiles, 0..panels.len()) }
    }
}

/// Transforms the input of a block of tiles.
struct Input<'a, const M: usize, const A: usize, F> {
    of: &'a Convolution<'a>,
    tiles: Range<usize>,
    form: PhantomData<F>,
}

impl<const M: usize, const A: usize, F: Form<M, A>> Task for Input<'_, M, A, F> {
    type Out = ();

    /// Safety: as for [`gm_winograd2_f32`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        for (i, tile) in self.tiles.clone().enumerate() {
            let corner = Corner::of(self.of, tile);
            let mut channel = 0;
            while channel < self.of.desc.in_channels {
                // SAFETY: by contract.
                unsafe {
                    match corner.is_inside::<A>(&self.of.desc.window) {
                        true => self.tile::<S, true>(s, i, &corner, channel),
                        false => self.tile::<S, false>(s, i, &corner, channel),
                    }
                }
                channel += S::LANES;
            }
        }
    }
}

impl<const M: usize, const A: usize, F: Form<M, A>> Input<'_, M, A, F> {
    /// # Safety
    /// As for `run`; the tile is inside of the image if `INSIDE`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const INSIDE: bool>(
        &self,
        s: S,
        i: usize,
        corner: &Corner,
        channel: usize,
    ) {
        let d = self.of.desc;
        let (n, w) = (d.in_channels - channel, &d.window);
        let mut columns = [[s.zero(); A]; A];
        // SAFETY: pixels on the image, and this block's part of the workspace.
        unsafe {
            for (c, transformed) in columns.iter_mut().enumerate() {
                let mut column = [s.zero(); A];
                for (r, x) in column.iter_mut().enumerate() {
                    if INSIDE || corner.has(w, r, c) {
                        let from = corner.pixel(w, r, c).wrapping_add(channel);
                        *x = match n >= S::LANES {
                            true => s.load(from),
                            false => s.load_n(from, n),
                        };
                    }
                }
                *transformed = F::input(s, column);
            }
            for r in 0..A {
                let row = F::input(s, row_of(&columns, r));
                for (c, x) in row.into_iter().enumerate() {
                    let to = self.of.tiles_at(r * A + c);
                    s.store_n(to.add(i * d.lda() + channel), n, x);
                }
            }
        }
    }
}

/// The first pixel of an input tile, which may be beside the image.
struct Corner {
    first: *const f32,
    y: isize,
    x: isize,
}

impl Corner {
    fn of(convolution: &Convolution, tile: usize) -> Corner {
        let d = convolution.desc;
        let (w, place) = (&d.window, convolution.grid.place(tile, d.tile));
        let y = place.y as isize - w.pad_top as isize;
        let x = place.x as isize - w.pad_left as isize;
        let image = convolution.x.wrapping_add(place.image * w.x_n_stride);
        let pixel = y * w.x_h_stride as isize + x * w.x_w_stride as isize;
        Corner {
            first: image.wrapping_offset(pixel),
            y,
            x,
        }
    }

    #[inline(always)]
    fn is_inside<const A: usize>(&self, w: &Window) -> bool {
        self.y >= 0 && self.x >= 0 && self.has(w, A - 1, A - 1)
    }

    /// True when pixel (r, c) of the tile is on the image.
    #[inline(always)]
    fn has(&self, w: &Window, r: usize, c: usize) -> bool {
        let y = self.y + (r * w.dilation_h) as isize;
        let x = self.x + (c * w.dilation_w) as isize;
        (0..w.in_h as isize).contains(&y) && (0..w.in_w as isize).contains(&x)
    }

    #[inline(always)]
    fn pixel(&self, w: &Window, r: usize, c: usize) -> *const f32 {
        let n = r * w.dilation_h * w.x_h_stride + c * w.dilation_w * w.x_w_stride;
        self.first.wrapping_add(n)
    }
}

/// Transforms the sums of some channels of a block of tiles, and applies the epilogue.
struct Output<'a, const M: usize, const A: usize, F> {
    of: &'a Convolution<'a>,
    tiles: Range<usize>,
    channels: Range<usize>,
    form: PhantomData<F>,
}

impl<const M: usize, const A: usize, F: Form<M, A>> Task for Output<'_, M, A, F> {
    type Out = ();

    /// Safety: as for [`gm_winograd2_f32`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        for (i, tile) in self.tiles.clone().enumerate() {
            let place = self.of.grid.place(tile, M);
            let mut channel = self.channels.start;
            while channel < self.channels.end {
                // SAFETY: by contract.
                unsafe { self.tile(s, i, &place, channel) };
                channel += S::LANES;
            }
            if self.of.epilogue.has_rest() {
                // SAFETY: by contract.
                unsafe { self.rest(s, &place) };
            }
        }
    }
}

impl<const M: usize, const A: usize, F: Form<M, A>> Output<'_, M, A, F> {
    /// Number of the output pixel (r, c) of a tile; `None` where it is beyond the image.
    #[inline(always)]
    fn pixel(&self, place: &Place, r: usize, c: usize) -> Option<usize> {
        let w = &self.of.desc.window;
        let (y, x) = (place.y + r * w.dilation_h, place.x + c * w.dilation_w);
        let is_there = y < w.out_h && x < w.out_w;
        is_there.then(|| (place.image * w.out_h + y) * w.out_w + x)
    }

    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn tile<S: Simd>(&self, s: S, i: usize, place: &Place, channel: usize) {
        let d = self.of.desc;
        let at = i * d.ldm() + channel - self.channels.start;
        let mut columns = [[s.zero(); M]; A];
        // SAFETY: this block's part of the workspace, whose rows have whole vectors.
        unsafe {
            for (c, column) in columns.iter_mut().enumerate() {
                let mut sums = [s.zero(); A];
                for (r, x) in sums.iter_mut().enumerate() {
                    *x = s.load(self.of.sums_at(r * A + c).add(at));
                }
                *column = F::output(s, sums);
            }
        }
        for r in 0..M {
            let row = F::output(s, row_of(&columns, r));
            for (c, x) in row.into_iter().enumerate() {
                if let Some(pixel) = self.pixel(place, r, c) {
                    // SAFETY: an output pixel, and operands for it.
                    unsafe { self.store(s, pixel, channel, x) };
                }
            }
        }
    }

    /// # Safety
    /// The pixel is one of the output.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, pixel: usize, channel: usize, x: S::F) {
        let n = self.channels.end - channel;
        let to = self.of.y.wrapping_add(pixel * self.of.desc.ldy + channel);
        // SAFETY: by contract.
        unsafe {
            let x = self.of.epilogue.fast.apply(s, x, pixel, channel, n);
            match n >= S::LANES {
                true => s.store(to, x),
                false => s.store_n(to, n, x),
            }
        }
    }

    /// Applies the rest of the epilogue to a tile's pixels.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn rest<S: Simd>(&self, s: S, place: &Place) {
        let d = self.of.desc;
        for (r, c) in (0..M).flat_map(|r| (0..M).map(move |c| (r, c))) {
            let Some(pixel) = self.pixel(place, r, c) else {
                continue;
            };
            let rect = Rect {
                c: self.of.y.wrapping_add(pixel * d.ldy + self.channels.start),
                ldc: d.ldy,
                row: pixel,
                col: self.channels.start,
                rows: 1,
                cols: self.channels.len(),
            };
            // SAFETY: an output pixel, and operands for it.
            unsafe { ApplyRest(&self.of.epilogue, rect).run(s) };
        }
    }
}

/// Row `r` of a matrix of columns.
#[inline(always)]
fn row_of<T: Copy, const M: usize, const A: usize>(columns: &[[T; M]; A], r: usize) -> [T; A] {
    let mut row = [columns[0][r]; A];
    for (x, column) in row.iter_mut().zip(columns) {
        *x = column[r];
    }
    row
}
