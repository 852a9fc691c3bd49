//! Reductions of matrices by columns, in f32.
//!
//! `x: [batch, n_rows, n_cols]` and `y: [batch, n_parts, n_cols]` are contiguous: the rows are divided
//! into parts of `part_rows`, of which the last may be shorter. A long reduction is one by parts and
//! then one of their results: sums have fewer terms, and threads share the rows. An item is a block of
//! at most [`BLOCK`] columns of a part.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::rows::{Fold, Largest, ReduceKind, Smallest, Sum};
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OUT, UNSUPPORTED_ISA, pointer};

/// Most columns of an item, a multiple of the lanes of every instruction set: their accumulators stay
/// in the first-level cache.
const BLOCK: usize = 512;

/// Rows that are joined before they are accumulated.
const GROUP: usize = 8;

/// A reduction by columns.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ColumnsDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// The number of a [`ReduceKind`]: `Sum`, `Mean`, `Max` or `Min`.
    pub kind: u32,
    /// Matrices.
    pub batch: usize,
    /// Rows of a matrix.
    pub n_rows: usize,
    /// Columns of a matrix.
    pub n_cols: usize,
    /// Rows of a part.
    pub part_rows: usize,
    /// Divisor of the sums of `Mean`.
    pub n_averaged: usize,
}

descriptor!(ColumnsDesc {
    isa,
    kind,
    batch,
    n_rows,
    n_cols,
    part_rows,
    n_averaged
});

impl ColumnsDesc {
    /// A reduction of the rows of `shape`, `[batch, rows, columns]`, in one part.
    pub fn new(isa: Isa, kind: ReduceKind, shape: [usize; 3]) -> ColumnsDesc {
        let [batch, n_rows, n_cols] = shape;
        ColumnsDesc {
            isa: isa as u32,
            kind: kind as u32,
            batch,
            n_rows,
            n_cols,
            part_rows: n_rows.max(1),
            n_averaged: n_rows,
        }
    }

    /// Parts of a matrix; one that is empty without rows.
    pub fn n_parts(&self) -> usize {
        self.n_rows.div_ceil(self.part_rows).max(1)
    }

    /// Items of the whole reduction.
    pub fn n_items(&self) -> usize {
        self.batch * self.n_parts() * self.n_blocks()
    }

    fn n_blocks(&self) -> usize {
        self.n_cols.div_ceil(BLOCK)
    }

    fn kind(&self) -> Option<ReduceKind> {
        use ReduceKind::{Max, Mean, Min, Sum};
        [Sum, Mean, Max, Min]
            .into_iter()
            .find(|&kind| kind as u32 == self.kind)
    }

    /// The block of an item, `x` and `y` being the matrices.
    fn block(&self, kind: ReduceKind, item: usize, x: *const f32, y: *mut f32) -> Block {
        let (part, block) = (item / self.n_blocks(), item % self.n_blocks());
        let (matrix, part_of_matrix) = (part / self.n_parts(), part % self.n_parts());
        let (row, col) = (part_of_matrix * self.part_rows, block * BLOCK);
        Block {
            kind,
            x: x.wrapping_add((matrix * self.n_rows + row) * self.n_cols + col),
            y: y.wrapping_add(part * self.n_cols + col),
            n_rows: self.part_rows.min(self.n_rows - row),
            n_cols: BLOCK.min(self.n_cols - col),
            row_stride: self.n_cols,
            n_averaged: self.n_averaged as f32,
        }
    }
}

/// Computes items `begin..end` of a [`ColumnsDesc`]: `ptrs[LHS]` is `x`, `ptrs[OUT]` is `y`.
///
/// Without rows the values are those of [`ReduceKind`]. Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_reduce_columns_f32(
    desc: *const ColumnsDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let Some(kind) = desc.kind().filter(|_| desc.part_rows > 0) else {
        return INVALID;
    };
    for item in begin..end.min(desc.n_items()) {
        // SAFETY: the pointers cover the descriptor's operands.
        unsafe {
            let (x, y) = (pointer(ptrs, LHS).cast_const(), pointer(ptrs, OUT));
            dispatch(isa, desc.block(kind, item, x, y));
        }
    }
    OK
}

/// A block of columns of a part.
struct Block {
    kind: ReduceKind,
    x: *const f32,
    y: *mut f32,
    n_rows: usize,
    n_cols: usize,
    row_stride: usize,
    n_averaged: f32,
}

impl Task for Block {
    type Out = ();

    /// Safety: `x` is readable and `y` writable for the block.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        // SAFETY: by contract.
        unsafe {
            match self.kind {
                ReduceKind::Max => self.fold(s, Largest),
                ReduceKind::Min => self.fold(s, Smallest),
                _ => self.fold(s, Sum),
            }
        }
    }
}

impl Block {
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn fold<S: Simd, T: Fold>(&self, s: S, f: T) {
        let mut acc = [T::EMPTY; BLOCK];
        let grouped = self.n_rows - self.n_rows % GROUP;
        // SAFETY: rows of the block, and as many accumulators as it has columns at most.
        unsafe {
            for row in (0..grouped).step_by(GROUP) {
                self.group(s, f, row, &mut acc);
            }
            for row in grouped..self.n_rows {
                self.row(s, f, row, &mut acc);
            }
            self.store(s, &acc);
        }
    }

    /// Accumulates [`GROUP`] rows, which are joined by halves: their loads and joins do not wait for
    /// the accumulators.
    ///
    /// # Safety
    /// As for `run`; the rows from `row` on are rows of the block.
    #[inline(always)]
    unsafe fn group<S: Simd, T: Fold>(&self, s: S, f: T, row: usize, acc: &mut [f32; BLOCK]) {
        let mut x = self.x.wrapping_add(row * self.row_stride);
        let mut col = 0;
        while col < self.n_cols {
            let mut rows = [s.zero(); GROUP];
            for (r, vector) in rows.iter_mut().enumerate() {
                // SAFETY: a row of the block, from this column on.
                *vector = unsafe { self.load(s, x.wrapping_add(r * self.row_stride), col) };
            }
            for half in [4, 2, 1] {
                for r in 0..half {
                    rows[r] = f.step(s, rows[r], rows[r + half]);
                }
            }
            // SAFETY: a whole vector of the block of accumulators.
            unsafe { accumulate(s, f, rows[0], acc.as_mut_ptr().add(col)) };
            x = x.wrapping_add(S::LANES);
            col += S::LANES;
        }
    }

    /// Accumulates one row.
    ///
    /// # Safety
    /// As for `group`.
    #[inline(always)]
    unsafe fn row<S: Simd, T: Fold>(&self, s: S, f: T, row: usize, acc: &mut [f32; BLOCK]) {
        let x = self.x.wrapping_add(row * self.row_stride);
        for col in (0..self.n_cols).step_by(S::LANES) {
            // SAFETY: a row of the block, and a whole vector of the block of accumulators.
            unsafe {
                let vector = self.load(s, x.wrapping_add(col), col);
                accumulate(s, f, vector, acc.as_mut_ptr().add(col));
            }
        }
    }

    /// The vector at `x`, in column `col`; lanes beyond the block are 0.
    ///
    /// # Safety
    /// `x` is readable up to the end of the block's row.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, x: *const f32, col: usize) -> S::F {
        let n = self.n_cols - col;
        // SAFETY: by contract.
        unsafe {
            match n >= S::LANES {
                true => s.load(x),
                false => s.load_n(x, n),
            }
        }
    }

    /// Stores the results.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, acc: &[f32; BLOCK]) {
        for col in (0..self.n_cols).step_by(S::LANES) {
            // SAFETY: columns of the block.
            unsafe {
                let mut result = s.load(acc.as_ptr().add(col));
                if self.kind == ReduceKind::Mean {
                    result = s.div(result, s.splat(self.n_averaged));
                }
                s.store_n(self.y.add(col), self.n_cols - col, result);
            }
        }
    }
}

/// Accumulates a vector in memory.
///
/// # Safety
/// `acc` is readable and writable for a vector.
#[inline(always)]
unsafe fn accumulate<S: Simd, T: Fold>(s: S, f: T, x: S::F, acc: *mut f32) {
    // SAFETY: by contract.
    unsafe { s.store(acc, f.step(s, s.load(acc), x)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close};

    const KINDS: [ReduceKind; 4] = [
        ReduceKind::Sum,
        ReduceKind::Mean,
        ReduceKind::Max,
        ReduceKind::Min,
    ];

    /// All items, the later half first.
    fn run(desc: &ColumnsDesc, x: &[f32]) -> Vec<f32> {
        let mut y = vec![5.0; desc.batch * desc.n_parts() * desc.n_cols];
        let ptrs = [
            x.as_ptr() as *mut u8,
            std::ptr::null_mut(),
            y.as_mut_ptr().cast(),
        ];
        let n = desc.n_items();
        for (begin, end) in [(n / 2, n), (0, n / 2)] {
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_reduce_columns_f32(desc, ptrs.as_ptr(), begin, end) };
            assert_eq!(status, OK);
        }
        y
    }

    fn reduced(kind: ReduceKind, column: &[f64], n_averaged: usize) -> f64 {
        let extreme = |identity: f64, beats: fn(f64, f64) -> bool| {
            let better = |a: f64, x: f64| beats(x, a) || x.is_nan() && !a.is_nan();
            column
                .iter()
                .fold(identity, |a, &x| if better(a, x) { x } else { a })
        };
        match kind {
            ReduceKind::Max => extreme(f64::NEG_INFINITY, |x, a| x > a),
            ReduceKind::Min => extreme(f64::INFINITY, |x, a| x < a),
            ReduceKind::Mean => column.iter().sum::<f64>() / n_averaged as f64,
            _ => column.iter().sum(),
        }
    }

    /// Values by plain loops, in `f64`.
    fn reference(desc: &ColumnsDesc, kind: ReduceKind, x: &[f32]) -> Vec<f64> {
        let mut y = Vec::new();
        for item in 0..desc.batch * desc.n_parts() {
            let (matrix, part) = (item / desc.n_parts(), item % desc.n_parts());
            let begin = part * desc.part_rows;
            let rows = begin..desc.n_rows.min(begin + desc.part_rows);
            for col in 0..desc.n_cols {
                let at = |row| (matrix * desc.n_rows + row) * desc.n_cols + col;
                let column: Vec<f64> = rows.clone().map(|row| f64::from(x[at(row)])).collect();
                y.push(reduced(kind, &column, desc.n_averaged));
            }
        }
        y
    }

    fn random_desc(rng: &mut Rng, isa: Isa, kind: ReduceKind) -> ColumnsDesc {
        let n_rows = rng.pick(&[0, 1, 2, 7, 8, 9, 16, 31, 100, 515]);
        let n_cols = rng.pick(&[0, 1, 3, 8, 15, 16, 17, 33, 100, 511, 512, 513, 1030]);
        let mut desc = ColumnsDesc::new(isa, kind, [rng.below(4), n_rows, n_cols]);
        if rng.below(2) == 0 {
            desc.part_rows = 1 + rng.below(n_rows + 1);
            desc.n_averaged = 1 + rng.below(9);
        }
        desc
    }

    #[test]
    fn reductions_by_columns_agree_with_the_reference() {
        const SPECIAL: [f32; 5] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
        let mut rng = Rng(44);
        for isa in Isa::available() {
            for i in 0..300 {
                let kind = KINDS[i % KINDS.len()];
                let desc = random_desc(&mut rng, isa, kind);
                let mut x = rng.vec(desc.batch * desc.n_rows * desc.n_cols);
                if rng.below(2) == 0 {
                    let planted = (0..x.len()).step_by(37);
                    planted.for_each(|i| x[i] = rng.pick(&SPECIAL));
                }
                let want = reference(&desc, kind, &x);
                let n_summed = match kind {
                    ReduceKind::Mean => desc.n_rows as f64 / desc.n_averaged as f64,
                    _ => desc.n_rows as f64,
                };
                // Sums cancel: their error goes with the sum of magnitudes.
                let tolerance = 1e-6 + 3e-8 * n_summed;
                assert_close(
                    &run(&desc, &x),
                    &want,
                    tolerance,
                    &format!("{isa} {desc:?}"),
                );
            }
        }
    }

    #[test]
    fn extremes_propagate_nan_from_every_row() {
        for isa in Isa::available() {
            for (kind, nan) in [ReduceKind::Max, ReduceKind::Min]
                .into_iter()
                .flat_map(|kind| (0..21).map(move |nan| (kind, nan)))
            {
                let mut x: Vec<f32> = (0..63).map(|i| i as f32).collect();
                x[3 * nan + 1] = f32::NAN;
                let y = run(&ColumnsDesc::new(isa, kind, [1, 21, 3]), &x);
                let are_nan: Vec<bool> = y.iter().map(|y| y.is_nan()).collect();
                assert_eq!(are_nan, [false, true, false], "{isa} {kind:?} {nan}");
            }
        }
    }

    #[test]
    fn long_sums_stay_accurate() {
        for isa in Isa::available() {
            let desc = ColumnsDesc::new(isa, ReduceKind::Sum, [1, 2048, 2]);
            let y = run(&desc, &[0.1; 4096]);
            assert_close(
                &y,
                &[f64::from(0.1f32) * 2048.0; 2],
                3e-6,
                &format!("{isa}"),
            );
        }
    }

    #[test]
    fn other_kinds_and_empty_parts_are_invalid() {
        let call = |desc: &ColumnsDesc| {
            // SAFETY: an invalid descriptor is refused before the addresses are read.
            unsafe { gm_reduce_columns_f32(desc, [std::ptr::null_mut(); 3].as_ptr(), 0, 1) }
        };
        let product = ColumnsDesc::new(Isa::Portable, ReduceKind::Product, [1, 1, 1]);
        assert_eq!(call(&product), INVALID);
        let mut desc = ColumnsDesc::new(Isa::Portable, ReduceKind::Sum, [1, 1, 1]);
        desc.part_rows = 0;
        assert_eq!(call(&desc), INVALID);
    }
}
