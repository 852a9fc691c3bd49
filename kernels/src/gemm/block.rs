//! A block of the output: walks row panels and column panels, calling tiles.

use super::integer::Resolved;
use super::tile::{Lhs, MAX_COLS, MAX_MR, Tile, Tiles};
use crate::epilogue::{ApplyRest, Epilogue, Fast, Quantize, Rect, Scale, StoreBytes};
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use std::ops::Range;

/// Elements of a panel that stay in the second-level cache while row panels pass: 512 KiB.
const PANEL_ELEMENTS: usize = 128 * 1024;

/// One matrix product whose blocks are computed piecewise.
pub(crate) struct Product<'a> {
    pub(crate) isa: Isa,
    /// Columns of the output.
    pub(crate) n: usize,
    /// Elements to sum over; per tap when rows are indirect.
    pub(crate) k: usize,
    /// Row 0 of the left-hand side; the block's first row if rows are indirect.
    pub(crate) lhs: Lhs,
    pub(crate) b: *const f32,
    pub(crate) c: *mut f32,
    pub(crate) ldc: usize,
    /// Adds to `c` instead of overwriting it.
    pub(crate) accumulate: bool,
    pub(crate) epilogue: &'a Epilogue,
    /// Column of the epilogue's operands that column 0 of `c` belongs to.
    pub(crate) epilogue_col: usize,
    /// For words of bytes instead of `f32`.
    pub(crate) integers: Option<Resolved>,
    /// How the output is stored; when as bytes, `c` is their address.
    pub(crate) quantize: Quantize,
}

#[repr(align(64))]
struct Scratch([f32; MAX_MR * MAX_COLS]);

impl Product<'_> {
    /// Computes `rows` of the panels `panels`.
    ///
    /// # Safety
    /// Operands are readable and the output is writable there; `isa` is available.
    pub(crate) unsafe fn block(&self, rows: Range<usize>, panels: Range<usize>) {
        if rows.is_empty() || panels.is_empty() {
            return;
        }
        let tiles = match &self.integers {
            Some(i) => Tiles::of_bytes(self.isa, i.is_signed),
            None => Tiles::of(self.isa),
        };
        let m = rows.len();
        // SAFETY: the caller's contract covers the whole block.
        unsafe {
            if self.lhs.taps == 0 && m < tiles.wide.len() {
                return self.few_rows(tiles, rows, panels);
            }
            let mr = self.max_rows(tiles);
            let n_row_panels = m.div_ceil(mr);
            for k in self.k_blocks(tiles) {
                for panel in panels.clone() {
                    for p in 0..n_row_panels {
                        let row = rows.start + p * m / n_row_panels;
                        let end = rows.start + (p + 1) * m / n_row_panels;
                        self.tile(tiles, row, end - row, rows.start, panel, 1, k.clone());
                    }
                }
            }
        }
    }

    /// # Safety
    /// As for [`Product::block`].
    unsafe fn few_rows(&self, tiles: &Tiles, rows: Range<usize>, panels: Range<usize>) {
        let n_full = (self.n / tiles.nr).min(panels.end);
        for k in self.k_blocks(tiles) {
            let mut panel = panels.start;
            while panel < panels.end {
                let wide = tiles.wide_panels[rows.len()];
                let n_panels = if panel + wide <= n_full { wide } else { 1 };
                // SAFETY: the caller's contract covers the whole block.
                unsafe {
                    self.tile(
                        tiles,
                        rows.start,
                        rows.len(),
                        rows.start,
                        panel,
                        n_panels,
                        k.clone(),
                    )
                };
                panel += n_panels;
            }
        }
    }

    /// Rows per tile. Rows a power of two apart share their sets of the first-level cache, which has 12 ways on the CPUs with AVX-512
    /// that this was measured on: no more than 12 of them.
    fn max_rows(&self, tiles: &Tiles) -> usize {
        if self.lhs.taps > 0 {
            return tiles.indirect.len() - 1;
        }
        let most = tiles.strided.len() - 1;
        if self.lhs.lda.is_multiple_of(512) {
            most.min(12)
        } else {
            most
        }
    }

    /// Ranges of the summed dimension: one, unless a panel is too large for the cache. Where what is stored is not the sum, it is one.
    fn k_blocks(&self, tiles: &Tiles) -> impl Iterator<Item = Range<usize>> + use<> {
        let k = self.k;
        let is_whole = self.lhs.taps > 0 || self.integers.is_some() || self.quantize.to != 0;
        let n_blocks = if is_whole {
            1
        } else {
            (k * tiles.nr).div_ceil(PANEL_ELEMENTS).max(1)
        };
        (0..n_blocks).map(move |i| i * k / n_blocks..(i + 1) * k / n_blocks)
    }

    /// # Safety
    /// As for [`Product::block`]; `n_panels` is 1, or the panels are full and there are at most 4 rows.
    #[allow(clippy::too_many_arguments)]
    #[inline]
    unsafe fn tile(
        &self,
        tiles: &Tiles,
        row: usize,
        mr: usize,
        first_row: usize,
        panel: usize,
        n_panels: usize,
        k: Range<usize>,
    ) {
        let col = panel * tiles.nr;
        let cols = (self.n - col).min(n_panels * tiles.nr);
        let (first, last) = (k.start == 0, k.end == self.k);
        let full = cols == n_panels * tiles.nr;
        let n_words = self.k * self.lhs.taps.max(1);
        // Panels of bytes end with the sums of their columns.
        let panel_stride = (n_words + usize::from(self.integers.is_some())) * tiles.nr;
        let mut lhs = self.lhs;
        if lhs.taps > 0 {
            lhs.rows = lhs.rows.wrapping_add(row - first_row);
        } else {
            lhs.a = lhs.a.wrapping_add(row * lhs.lda + k.start);
        }
        let table = match (lhs.taps > 0, n_panels > 1) {
            (true, _) => tiles.indirect,
            (_, true) => tiles.wide,
            _ => tiles.strided,
        };
        let mut scratch = std::mem::MaybeUninit::<Scratch>::uninit();
        let (c, ldc) = match self.quantize.to {
            0 => (self.c.wrapping_add(row * self.ldc + col), self.ldc),
            // SAFETY: only the address of the field is taken.
            _ => (
                unsafe { &raw mut (*scratch.as_mut_ptr()).0 }.cast(),
                n_panels * tiles.nr,
            ),
        };
        let fast = if last {
            self.epilogue.fast.at(row, self.epilogue_col + col)
        } else {
            Fast::NONE
        };
        let b = self
            .b
            .wrapping_add(panel * panel_stride + k.start * tiles.nr);
        let accumulate = self.accumulate || !first;
        let (zero, flip, keeps_sums) = self.integers.map_or((0, 0, false), |i| {
            (i.unsigned_zero(), i.flip(), i.keeps_sums)
        });
        let tile = Tile {
            k: k.len(),
            lhs,
            b,
            panel_stride,
            c,
            ldc,
            accumulate,
            fast,
            zero,
            flip,
            keeps_sums,
        };
        let rect = Rect {
            c,
            ldc,
            row,
            col: self.epilogue_col + col,
            rows: mr,
            cols,
        };
        // SAFETY: the tile lies in the block, whose operands and output the caller vouches for.
        unsafe {
            if full {
                table[mr](&tile);
            } else {
                self.ragged(table[mr], tile, rect);
            }
            if last && self.epilogue.has_rest() {
                dispatch(self.isa, ApplyRest(self.epilogue, rect));
            }
            if self.quantize.to != 0 {
                let to = self.c.cast::<u8>().wrapping_add(row * self.ldc + col);
                dispatch(
                    self.isa,
                    StoreBytes {
                        quantize: self.quantize,
                        from: rect,
                        to,
                        ld: self.ldc,
                    },
                );
            }
        }
    }

    /// A tile with fewer columns than its panel: computed beside the output, then copied.
    ///
    /// # Safety
    /// As for [`Product::block`].
    #[cold]
    #[inline(never)]
    unsafe fn ragged(&self, kernel: super::tile::TileFn, tile: Tile, rect: Rect) {
        let mut scratch = std::mem::MaybeUninit::<Scratch>::uninit();
        // SAFETY: only the address of the field is taken.
        let sums: *mut f32 = unsafe { &raw mut (*scratch.as_mut_ptr()).0 }.cast();
        let ld = self.isa.nr();
        let whole = Tile {
            c: sums,
            ldc: ld,
            accumulate: false,
            fast: Fast::NONE,
            ..tile
        };
        // SAFETY: the scratch tile has room for the largest tile, and the kernel fills what `Ragged` reads.
        unsafe {
            kernel(&whole);
            dispatch(
                self.isa,
                Ragged {
                    sums,
                    ld,
                    tile: &tile,
                    rect,
                },
            );
        }
    }
}

/// Moves a tile's valid columns to the output, doing what [`Tile`] asks on the way.
struct Ragged<'a> {
    sums: *const f32,
    ld: usize,
    tile: &'a Tile,
    rect: Rect,
}

impl Task for Ragged<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let (t, fast) = (self.tile, &self.tile.fast);
        for r in 0..self.rect.rows {
            let mut j = 0;
            while j < self.rect.cols {
                let n = self.rect.cols - j;
                // SAFETY: only the valid columns of output and operands are accessed.
                unsafe {
                    let c = t.c.add(r * t.ldc + j);
                    let mut x = s.load(self.sums.add(r * self.ld + j));
                    if t.accumulate {
                        x = s.add(x, s.load_n(c, n));
                    }
                    if !matches!(fast.scale, Scale::One) {
                        x = s.mul(x, fast.scale.at(s, j, n));
                    }
                    if !fast.bias.is_null() {
                        x = s.add(x, s.load_n(fast.bias.add(j), n));
                    }
                    if !fast.residual.is_null() {
                        x = s.add(
                            x,
                            s.load_n(
                                fast.residual.offset(r as isize * fast.residual_ld).add(j),
                                n,
                            ),
                        );
                    }
                    if fast.clamp {
                        x = s.min(s.splat(fast.hi), s.max(s.splat(fast.lo), x));
                    }
                    s.store_n(c, n, x);
                }
                j += S::LANES;
            }
        }
    }
}
