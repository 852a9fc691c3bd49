//! One value per row.

use super::{
    Fold, Largest, RowDim, Smallest, Sum, SumSquares, fold, n_rows, row_dims, row_offsets,
};
use crate::descriptor::descriptor;
use crate::epilogue::MAX_BATCH;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OUT, UNSUPPORTED_ISA, pointer};
use std::ops::Range;

/// The function of each row that a [`ReduceDesc`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ReduceKind {
    /// Sum; 0 of an empty row.
    Sum = 1,
    /// Mean; NaN of an empty row.
    Mean = 2,
    /// Largest, NaN if any is; minus infinity of an empty row.
    Max = 3,
    /// Smallest, NaN if any is; infinity of an empty row.
    Min = 4,
    /// Sum of squares.
    SumSquares = 5,
    /// Sum of absolute values.
    SumAbs = 6,
    /// Square root of the sum of squares.
    Norm = 7,
    /// Mean squared distance from the mean, divided by the number of elements.
    Variance = 8,
    /// Product; 1 of an empty row.
    Product = 9,
}

impl ReduceKind {
    /// Every kind.
    pub const ALL: [ReduceKind; 9] = {
        use ReduceKind as K;
        [
            K::Sum,
            K::Mean,
            K::Max,
            K::Min,
            K::SumSquares,
            K::SumAbs,
            K::Norm,
            K::Variance,
            K::Product,
        ]
    };
}

/// A reduction of rows. Row `i`'s value is written where `y_stride`s put it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReduceDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// A [`ReduceKind`] as its number.
    pub kind: u32,
    /// Elements of a row.
    pub n_cols: usize,
    /// Extents and strides of the rows.
    pub rows: [RowDim; MAX_BATCH],
}

descriptor!(ReduceDesc {
    isa,
    kind,
    n_cols,
    rows
});

impl ReduceDesc {
    /// A reduction of the rows of a contiguous matrix, for an instruction set.
    pub fn new(isa: Isa, kind: ReduceKind, n_rows: usize, n_cols: usize) -> ReduceDesc {
        ReduceDesc {
            isa: isa as u32,
            kind: kind as u32,
            n_cols,
            rows: row_dims(n_rows, n_cols, 1),
        }
    }

    /// Rows.
    pub fn n_items(&self) -> usize {
        n_rows(&self.rows)
    }
}

#[derive(Clone, Copy)]
struct SumAbs;

impl Fold for SumAbs {
    const EMPTY: f32 = 0.0;
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.add(acc, s.abs(x))
    }
    #[inline(always)]
    fn join(self, a: f32, b: f32) -> f32 {
        a + b
    }
}

#[derive(Clone, Copy)]
struct Product;

impl Fold for Product {
    const EMPTY: f32 = 1.0;
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.mul(acc, x)
    }
    #[inline(always)]
    fn join(self, a: f32, b: f32) -> f32 {
        a * b
    }
}

/// Computes items `begin..end` of a [`ReduceDesc`]: `ptrs[LHS]` is `x`, `ptrs[OUT]` is `y`.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_reduce_f32(
    desc: *const ReduceDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let Some(kind) = ReduceKind::ALL
        .into_iter()
        .find(|&kind| kind as u32 == desc.kind)
    else {
        return INVALID;
    };
    // SAFETY: the pointers cover the rows and their values.
    unsafe {
        let rows = Rows {
            desc,
            kind,
            x: pointer(ptrs, LHS).cast_const(),
            y: pointer(ptrs, OUT),
            items: begin..end.min(desc.n_items()),
        };
        dispatch(isa, rows);
    }
    OK
}

/// Some rows of an input, and their values.
struct Rows<'a> {
    desc: &'a ReduceDesc,
    kind: ReduceKind,
    x: *const f32,
    y: *mut f32,
    items: Range<usize>,
}

impl Task for Rows<'_> {
    type Out = ();

    /// Safety: the pointers cover the rows and their values.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let Rows { desc, kind, .. } = self;
        let last = &desc.rows[MAX_BATCH - 1];
        let mut item = self.items.start;
        // Places are found once for all rows along the last dimension: rows may have few elements.
        while item < self.items.end {
            let at = row_offsets(&desc.rows, item);
            let n_rows = (last.extent - at.last).min(self.items.end - item);
            for i in 0..n_rows as isize {
                let x = self.x.wrapping_offset(at.x + i * last.x_stride);
                let y = self.y.wrapping_offset(at.y + i * last.y_stride);
                let n = desc.n_cols;
                // SAFETY: by contract.
                unsafe { *y = Row { kind, x, n }.run(s) };
            }
            item += n_rows;
        }
    }
}

struct Row {
    kind: ReduceKind,
    x: *const f32,
    n: usize,
}

impl Task for Row {
    type Out = f32;

    /// Safety: `x` is readable for `n` elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) -> f32 {
        let Row { kind, x, n } = self;
        // SAFETY: by contract.
        unsafe {
            match kind {
                ReduceKind::Sum => fold(s, x, n, Sum),
                ReduceKind::Mean => fold(s, x, n, Sum) / n as f32,
                ReduceKind::Max => fold(s, x, n, Largest),
                ReduceKind::Min => fold(s, x, n, Smallest),
                ReduceKind::SumSquares => fold(s, x, n, SumSquares(0.0)),
                ReduceKind::SumAbs => fold(s, x, n, SumAbs),
                ReduceKind::Norm => fold(s, x, n, SumSquares(0.0)).sqrt(),
                ReduceKind::Variance => {
                    let mean = fold(s, x, n, Sum) / n as f32;
                    fold(s, x, n, SumSquares(mean)) / n as f32
                }
                ReduceKind::Product => fold(s, x, n, Product),
            }
        }
    }
}
