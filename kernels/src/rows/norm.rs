//! Layer and root-mean-square normalisation.

use super::{RowDim, Sum, SumSquares, fold, n_rows, row_dims, row_offsets};
use crate::descriptor::descriptor;
use crate::epilogue::MAX_BATCH;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OPERANDS, OUT, RHS, UNSUPPORTED_ISA, pointer};

/// The function of each row that a [`NormDesc`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NormKind {
    /// `(x - mean) / sqrt(variance + eps) * gamma + beta`
    Layer = 1,
    /// `x / sqrt(mean of squares + eps) * gamma + beta`
    Rms = 2,
}

/// A normalisation of rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// A [`NormKind`] as its number.
    pub kind: u32,
    /// Added to the variance.
    pub eps: f32,
    /// Unused, zero.
    pub reserved: u32,
    /// Elements of a row.
    pub n_cols: usize,
    /// Extents and strides of the rows.
    pub rows: [RowDim; MAX_BATCH],
}

descriptor!(NormDesc {
    isa,
    kind,
    eps,
    reserved,
    n_cols,
    rows
});

impl NormDesc {
    /// A normalisation of the rows of a contiguous matrix, for an instruction set.
    pub fn new(isa: Isa, kind: NormKind, n_rows: usize, n_cols: usize, eps: f32) -> NormDesc {
        let rows = row_dims(n_rows, n_cols, n_cols);
        NormDesc {
            isa: isa as u32,
            kind: kind as u32,
            eps,
            reserved: 0,
            n_cols,
            rows,
        }
    }

    /// Rows.
    pub fn n_items(&self) -> usize {
        n_rows(&self.rows)
    }
}

/// Computes items `begin..end` of a [`NormDesc`].
///
/// `ptrs[LHS]` is `x`, `ptrs[OUT]` is `y`; `ptrs[RHS]` is `gamma` and `ptrs[OPERANDS]` is `beta`,
/// one value per column each, either may be null. Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_norm_f32(
    desc: *const NormDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if !(1..=2).contains(&desc.kind) {
        return INVALID;
    }
    for item in begin..end.min(desc.n_items()) {
        let at = row_offsets(&desc.rows, item);
        // SAFETY: the pointers cover the row.
        unsafe {
            let row = Row {
                desc,
                x: pointer(ptrs, LHS).cast_const().wrapping_offset(at.x),
                y: pointer(ptrs, OUT).wrapping_offset(at.y),
                gamma: pointer(ptrs, RHS),
                beta: pointer(ptrs, OPERANDS),
            };
            dispatch(isa, row);
        }
    }
    OK
}

struct Row<'a> {
    desc: &'a NormDesc,
    x: *const f32,
    y: *mut f32,
    gamma: *const f32,
    beta: *const f32,
}

impl Task for Row<'_> {
    type Out = ();

    /// Safety: the pointers cover the row; `gamma` and `beta` may be null.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let n = self.desc.n_cols;
        // SAFETY: at most `n` elements of each.
        unsafe {
            let is_layer = self.desc.kind == NormKind::Layer as u32;
            let centre = if is_layer {
                fold(s, self.x, n, Sum) / n as f32
            } else {
                0.0
            };
            let variance = fold(s, self.x, n, SumSquares(centre)) / n as f32;
            let factor = s.splat(1.0 / (variance + self.desc.eps).sqrt());
            let centre = s.splat(centre);
            let mut i = 0;
            while i < n {
                let rest = n - i;
                let mut y = s.mul(s.sub(s.load_n(self.x.add(i), rest), centre), factor);
                if !self.gamma.is_null() {
                    y = s.mul(y, s.load_n(self.gamma.add(i), rest));
                }
                if !self.beta.is_null() {
                    y = s.add(y, s.load_n(self.beta.add(i), rest));
                }
                s.store_n(self.y.add(i), rest, y);
                i += S::LANES;
            }
        }
    }
}
