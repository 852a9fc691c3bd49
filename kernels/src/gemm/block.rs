//! A block of the output: walks row panels and column panels, calling tiles.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::integer::Resolved;
use super::tile::{Lhs, MAX_COLS, MAX_MR, Tile, TileFn, Tiles};
use crate::epilogue::{ApplyRest, Epilogue, Fast, Rect};
use crate::isa::Isa;
use crate::quantize::{Quantize, StoreBytes};
use crate::simd::{Simd, Task, dispatch};
use std::ops::Range;

/// Elements of a panel that stay in the second-level cache while row panels pass: 512 KiB.
const PANEL_ELEMENTS: usize = 128 * 1024;
/// Panels of filters are divided from this multiple of [`PANEL_ELEMENTS`] on: gradients of filters
/// have images as windows.
const LARGE_FILTER: usize = 2;

/// One matrix product, computed by blocks.
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
    /// Storage of the output; `c` is the address of bytes when it is in bytes.
    pub(crate) quantize: Quantize,
}

/// Position of a tile in the product.
struct Cell {
    row: usize,
    n_rows: usize,
    /// First row of the block, for which the first entries of a table of rows are.
    first_row: usize,
    panel: usize,
    /// More than 1 only for full panels and at most 4 rows.
    n_panels: usize,
    /// Range of the summed dimension; of taps when rows are indirect.
    k: Range<usize>,
}

#[cfg(target_arch = "x86_64")]
const _: () = assert!(amx::MAX_ROWS * amx::NR <= MAX_MR * MAX_COLS);

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
            Some(i) => Tiles::of_bytes(self.isa, i.is_signed, rows.len(), &self.lhs, self.k),
            None => Tiles::of(self.isa),
        };
        let m = rows.len();
        // SAFETY: the caller's contract covers the whole block.
        unsafe {
            if self.lhs.taps == 0 && m < tiles.wide.len() {
                return self.few_rows(tiles, rows, panels);
            }
            #[cfg(target_arch = "x86_64")]
            if tiles.has_registers {
                return self.by_registers(tiles, rows, panels);
            }
            let mr = self.max_rows(tiles);
            let n_row_panels = m.div_ceil(mr);
            for k in self.k_blocks(tiles) {
                for panel in panels.clone() {
                    for p in 0..n_row_panels {
                        let (start, end) = (p * m / n_row_panels, (p + 1) * m / n_row_panels);
                        let cell = Cell {
                            row: rows.start + start,
                            n_rows: end - start,
                            first_row: rows.start,
                            panel,
                            n_panels: 1,
                            k: k.clone(),
                        };
                        self.tile(tiles, &cell);
                    }
                }
            }
        }
    }

    /// Computes tiles of 32 rows and what is left, the panels of some after each other.
    ///
    /// # Safety
    /// As for [`Product::block`]; the tiles are those of AMX.
    #[cfg(target_arch = "x86_64")]
    unsafe fn by_registers(&self, tiles: &Tiles, rows: Range<usize>, panels: Range<usize>) {
        let registers = amx::Registers::default();
        let product = Product {
            lhs: Lhs {
                registers: &registers,
                ..self.lhs
            },
            ..*self
        };
        let panel_elements = self.k * self.lhs.taps.max(1) * tiles.nr;
        let n_panels = (PANEL_ELEMENTS / panel_elements.max(1)).max(1);
        for first in panels.clone().step_by(n_panels) {
            for row in rows.clone().step_by(amx::MAX_ROWS) {
                for panel in first..(first + n_panels).min(panels.end) {
                    let cell = Cell {
                        row,
                        n_rows: (rows.end - row).min(amx::MAX_ROWS),
                        first_row: rows.start,
                        panel,
                        n_panels: 1,
                        k: 0..self.depth(),
                    };
                    // SAFETY: the caller's contract covers the whole block.
                    unsafe { product.tile(tiles, &cell) };
                }
            }
        }
    }

    /// Computes fewer rows than a tile has, several panels at a time.
    ///
    /// # Safety
    /// As for [`Product::block`].
    unsafe fn few_rows(&self, tiles: &Tiles, rows: Range<usize>, panels: Range<usize>) {
        let n_full = (self.n / tiles.nr).min(panels.end);
        for k in self.k_blocks(tiles) {
            let mut panel = panels.start;
            while panel < panels.end {
                let wide = tiles.wide_panels[rows.len()];
                let cell = Cell {
                    row: rows.start,
                    n_rows: rows.len(),
                    first_row: rows.start,
                    panel,
                    n_panels: if panel + wide <= n_full { wide } else { 1 },
                    k: k.clone(),
                };
                // SAFETY: the caller's contract covers the whole block.
                unsafe { self.tile(tiles, &cell) };
                panel += cell.n_panels;
            }
        }
    }

    /// Rows per tile. Rows at distances of a power of two share their sets of the first-level
    /// cache, which has 12 ways on the CPUs with AVX-512 that this was measured on: no more than 12
    /// of them.
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

    /// Ranges of the summed dimension, or of taps: several if a panel is too large for the cache,
    /// and the sums are stored as they are.
    fn k_blocks(&self, tiles: &Tiles) -> impl Iterator<Item = Range<usize>> + use<> {
        let (n, elements) = (self.depth(), self.k * self.lhs.taps.max(1) * tiles.nr);
        let is_whole = self.integers.is_some() || self.quantize.to != 0;
        let is_small = self.lhs.taps > 0 && elements <= LARGE_FILTER * PANEL_ELEMENTS;
        let n_blocks = if is_whole || is_small {
            1
        } else {
            elements.div_ceil(PANEL_ELEMENTS).clamp(1, n.max(1))
        };
        (0..n_blocks).map(move |i| i * n / n_blocks..(i + 1) * n / n_blocks)
    }

    /// Length of the dimension divided by [`Product::k_blocks`].
    #[inline(always)]
    fn depth(&self) -> usize {
        match self.lhs.taps {
            0 => self.k,
            taps => taps,
        }
    }

    /// # Safety
    /// As for [`Product::block`].
    #[inline]
    unsafe fn tile(&self, tiles: &Tiles, cell: &Cell) {
        let col = cell.panel * tiles.nr;
        let width = cell.n_panels * tiles.nr;
        let is_last = cell.k.end == self.depth();
        let mut scratch = std::mem::MaybeUninit::<Scratch>::uninit();
        let (c, ldc) = if self.quantize.to == 0 {
            (self.c.wrapping_add(cell.row * self.ldc + col), self.ldc)
        } else {
            // Sums of bytes are computed beside the output, then narrowed.
            let sums = scratch.as_mut_ptr();
            // SAFETY: only the address of the field is taken.
            let sums = unsafe { &raw mut (*sums).0 };
            (sums.cast(), width)
        };
        let rect = Rect {
            c,
            ldc,
            row: cell.row,
            col: self.epilogue_col + col,
            rows: cell.n_rows,
            cols: (self.n - col).min(width),
        };
        let mut tile = self.describe(tiles, cell, &rect);
        let half = self.half(tiles, cell, rect.cols);
        let is_whole = rect.cols == half.map_or(width, |_| tiles.nr / 2);
        let kernel = half.unwrap_or_else(|| self.kernel(tiles, cell));
        let stores_bytes = is_whole && tiles.stores_bytes && self.stores_bytes();
        if stores_bytes {
            tile.bytes = Some(self.quantize.zero);
            tile.c = self.bytes_at(cell.row, col).cast();
            tile.ldc = self.ldc;
        }
        // SAFETY: the tile lies in the block, whose operands and output the caller vouches for.
        unsafe {
            if is_whole {
                kernel(&tile);
            } else {
                self.ragged(kernel, tile, rect);
            }
            if !stores_bytes {
                self.rest(rect, is_last, self.bytes_at(cell.row, col));
            }
        }
    }

    /// The output where it is of bytes.
    #[inline(always)]
    fn bytes_at(&self, row: usize, col: usize) -> *mut u8 {
        self.c.cast::<u8>().wrapping_add(row * self.ldc + col)
    }

    /// All after the tile's own part of the epilogue: the rest of it, and bytes.
    ///
    /// # Safety
    /// As for [`Product::block`]; `bytes` is the output of `rect` where it is of bytes.
    #[inline(always)]
    unsafe fn rest(&self, rect: Rect, is_last: bool, bytes: *mut u8) {
        // SAFETY: by contract.
        unsafe {
            if is_last && self.epilogue.has_rest() {
                dispatch(self.isa, ApplyRest(self.epilogue, rect));
            }
            if self.quantize.to != 0 {
                let narrow = StoreBytes {
                    quantize: self.quantize,
                    from: rect,
                    to: bytes,
                    ld: self.ldc,
                };
                dispatch(self.isa, narrow);
            }
        }
    }

    /// True when whole tiles of integers store `u8` from their registers.
    #[inline(always)]
    fn stores_bytes(&self) -> bool {
        let is_plain = self.quantize.to == 1 && self.quantize.divisor == 1.0;
        is_plain && self.integers.is_some() && !self.epilogue.has_rest()
    }

    /// The tile of the first vector of a panel, where that has all columns and there is such a tile.
    #[inline(always)]
    fn half(&self, tiles: &Tiles, cell: &Cell, cols: usize) -> Option<TileFn> {
        if cols > tiles.nr / 2 {
            return None;
        }
        let table = tiles.halves[usize::from(self.lhs.taps > 0)];
        table.get(cell.n_rows).copied()
    }

    #[inline(always)]
    fn kernel(&self, tiles: &Tiles, cell: &Cell) -> TileFn {
        let table = match (self.lhs.taps > 0, cell.n_panels > 1) {
            (true, _) => tiles.indirect,
            (_, true) => tiles.wide,
            _ => tiles.strided,
        };
        table[cell.n_rows]
    }

    /// The operands of a tile whose sums go to `rect`.
    #[inline(always)]
    fn describe(&self, tiles: &Tiles, cell: &Cell, rect: &Rect) -> Tile {
        let n_words = self.k * self.lhs.taps.max(1);
        // Panels of bytes end with the sums of their columns.
        let panel_stride = (n_words + usize::from(self.integers.is_some())) * tiles.nr;
        let mut lhs = self.lhs;
        let (k, first) = if lhs.taps > 0 {
            let tap = cell.k.start * lhs.tap_stride;
            lhs.rows = lhs.rows.wrapping_add(tap + cell.row - cell.first_row);
            lhs.taps = cell.k.len();
            (self.k, cell.k.start * self.k)
        } else {
            lhs.a = lhs.a.wrapping_add(cell.row * lhs.lda + cell.k.start);
            (cell.k.len(), cell.k.start)
        };
        let fast = if cell.k.end == self.depth() {
            self.epilogue.fast.at(cell.row, rect.col)
        } else {
            Fast::NONE
        };
        let panel = self.b.wrapping_add(cell.panel * panel_stride);
        let integers = self.integers.as_ref();
        Tile {
            rows: cell.n_rows,
            k,
            lhs,
            b: panel.wrapping_add(first * tiles.nr),
            panel_stride,
            c: rect.c,
            ldc: rect.ldc,
            accumulate: self.accumulate || cell.k.start > 0,
            fast,
            zero: integers.map_or(0, Resolved::unsigned_zero),
            flip: integers.map_or(0, Resolved::flip),
            keeps_sums: integers.is_some_and(|i| i.keeps_sums),
            bytes: None,
        }
    }

    /// A tile with fewer columns than its panel: computed beside the output, then copied.
    ///
    /// # Safety
    /// As for [`Product::block`].
    #[cold]
    #[inline(never)]
    unsafe fn ragged(&self, kernel: TileFn, tile: Tile, rect: Rect) {
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
        // SAFETY: the scratch tile has room for the largest tile, and the kernel fills the part
        // that `Ragged` reads.
        unsafe {
            kernel(&whole);
            let tile = &tile;
            dispatch(
                self.isa,
                Ragged {
                    sums,
                    ld,
                    tile,
                    rect,
                },
            );
        }
    }
}

/// Moves a tile's valid columns to the output, with the part of the epilogue that [`Tile`] holds.
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
                    s.store_n(c, n, fast.apply(s, x, r, j, n));
                }
                j += S::LANES;
            }
        }
    }
}
