//! Kernels over rows: the last axis, contiguous, of tensors whose other axes have any strides.
//!
//! A descriptor gives the other axes as up to [`MAX_BATCH`] dimensions; item `i` is row `i`, the
//! last dimension varying fastest. In-place use (`y` is `x`, with equal strides) is allowed.

mod norm;
mod reduce;
mod softmax;
#[cfg(test)]
mod tests;

pub use norm::{NormDesc, NormKind, gm_norm_f32};
pub use reduce::{ReduceDesc, ReduceKind, gm_reduce_f32};
pub(crate) use softmax::BlockRows;
pub use softmax::{SoftmaxDesc, SoftmaxKind, gm_softmax_f32};

use crate::descriptor::plain;
use crate::epilogue::MAX_BATCH;
use crate::gemm::{batch_index, batch_offset};
use crate::simd::Simd;

/// One dimension that rows are counted along. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowDim {
    /// Rows along it.
    pub extent: usize,
    /// Input.
    pub x_stride: isize,
    /// Output.
    pub y_stride: isize,
    /// Softmax's mask; 0 broadcasts. Unused elsewhere.
    pub mask_stride: isize,
}

plain!(RowDim {
    extent,
    x_stride,
    y_stride,
    mask_stride
});

impl Default for RowDim {
    fn default() -> RowDim {
        RowDim {
            extent: 1,
            x_stride: 0,
            y_stride: 0,
            mask_stride: 0,
        }
    }
}

/// `n` rows at distances of `x_stride` and `y_stride` elements.
pub fn row_dims(n: usize, x_stride: usize, y_stride: usize) -> [RowDim; MAX_BATCH] {
    let mut rows = [RowDim::default(); MAX_BATCH];
    rows[MAX_BATCH - 1] = RowDim {
        extent: n,
        x_stride: x_stride as isize,
        y_stride: y_stride as isize,
        mask_stride: 0,
    };
    rows
}

fn n_rows(rows: &[RowDim; MAX_BATCH]) -> usize {
    rows.iter().map(|dim| dim.extent).product()
}

/// Offsets of a row in its operands.
struct RowOffsets {
    x: isize,
    y: isize,
    mask: isize,
    /// Index along the last dimension.
    last: usize,
}

fn row_offsets(rows: &[RowDim; MAX_BATCH], item: usize) -> RowOffsets {
    let idx = batch_index(item, rows.map(|dim| dim.extent));
    RowOffsets {
        x: batch_offset(idx, rows.map(|dim| dim.x_stride)),
        y: batch_offset(idx, rows.map(|dim| dim.y_stride)),
        mask: batch_offset(idx, rows.map(|dim| dim.mask_stride)),
        last: idx[MAX_BATCH - 1],
    }
}

/// An associative combination of a row's elements, four vectors at a time.
pub(crate) trait Fold: Copy {
    /// Identity of the combination.
    const EMPTY: f32;
    /// Accumulates elements.
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F;
    /// Joins partial results.
    fn join(self, a: f32, b: f32) -> f32;
}

/// Elements between joins, which bounds the rounding error of long sums.
const FOLD_BLOCK: usize = 8192;

/// # Safety
/// `x` is readable for `n` elements.
#[inline(always)]
unsafe fn fold<S: Simd, T: Fold>(s: S, x: *const f32, n: usize, f: T) -> f32 {
    let mut total = T::EMPTY;
    let mut start = 0;
    while start < n {
        let end = n.min(start + FOLD_BLOCK);
        // SAFETY: a part of the row.
        total = f.join(total, unsafe {
            fold_block(s, x.add(start), end - start, f)
        });
        start = end;
    }
    total
}

/// # Safety
/// As for [`fold`].
#[inline(always)]
unsafe fn fold_block<S: Simd, T: Fold>(s: S, x: *const f32, n: usize, f: T) -> f32 {
    let mut acc = [s.splat(T::EMPTY); 4];
    let mut lanes = [0f32; 64];
    let mut i = 0;
    // SAFETY: whole groups of vectors, then whole vectors, then masked lanes, all inside the row.
    unsafe {
        while i + 4 * S::LANES <= n {
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = f.step(s, *acc, s.load(x.add(i + v * S::LANES)));
            }
            i += 4 * S::LANES;
        }
        while i < n {
            let stepped = f.step(s, acc[0], s.load_n(x.add(i), n - i));
            acc[0] = s.select(lanes_below(s, n - i), stepped, acc[0]);
            i += S::LANES;
        }
        // Short rows have no sums in the other vectors.
        let n_vectors = if n < 4 * S::LANES { 1 } else { 4 };
        for (v, &acc) in acc[..n_vectors].iter().enumerate() {
            s.store(lanes.as_mut_ptr().add(v * S::LANES), acc);
        }
        if n_vectors == 1 {
            return join_lanes(&mut lanes[..S::LANES], f);
        }
    }
    join_lanes(&mut lanes[..4 * S::LANES], f)
}

/// Joins by halves.
#[inline(always)]
fn join_lanes<T: Fold>(lanes: &mut [f32], f: T) -> f32 {
    let mut n = lanes.len();
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] = f.join(lanes[i], lanes[i + n]);
        }
    }
    lanes[0]
}

/// The first `n` lanes.
#[inline(always)]
fn lanes_below<S: Simd>(s: S, n: usize) -> S::M {
    const IOTA: [f32; 16] = [
        0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
    ];
    // SAFETY: no instruction set has more than 16 lanes.
    s.lt(unsafe { s.load(IOTA.as_ptr()) }, s.splat(n.min(16) as f32))
}

/// Sum of the elements.
#[derive(Clone, Copy)]
pub(crate) struct Sum;

impl Fold for Sum {
    const EMPTY: f32 = 0.0;
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.add(acc, x)
    }
    #[inline(always)]
    fn join(self, a: f32, b: f32) -> f32 {
        a + b
    }
}

/// Sum of squared distances from a centre.
#[derive(Clone, Copy)]
struct SumSquares(f32);

impl Fold for SumSquares {
    const EMPTY: f32 = 0.0;
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        let d = s.sub(x, s.splat(self.0));
        s.fma(d, d, acc)
    }
    #[inline(always)]
    fn join(self, a: f32, b: f32) -> f32 {
        a + b
    }
}

/// The largest; NaN if any is.
#[derive(Clone, Copy)]
pub(crate) struct Largest;

impl Fold for Largest {
    const EMPTY: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        // `max` keeps a NaN of its second operand only.
        s.select(s.eq(x, x), s.max(x, acc), x)
    }
    #[inline(always)]
    fn join(self, a: f32, b: f32) -> f32 {
        if a > b || a.is_nan() { a } else { b }
    }
}

/// The smallest; NaN if any is.
#[derive(Clone, Copy)]
pub(crate) struct Smallest;

impl Fold for Smallest {
    const EMPTY: f32 = f32::INFINITY;
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.select(s.eq(x, x), s.min(x, acc), x)
    }
    #[inline(always)]
    fn join(self, a: f32, b: f32) -> f32 {
        if a < b || a.is_nan() { a } else { b }
    }
}
