//! Softmax and its logarithm.

use super::{Fold, Largest, RowDim, fold, lanes_below, n_rows, row_dims, row_offsets};
use crate::attention::BlockRow;
use crate::descriptor::descriptor;
use crate::epilogue::MAX_BATCH;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OUT, RHS, UNSUPPORTED_ISA, pointer, vmath};

/// The function of each row `t = x * scale + mask` that a [`SoftmaxDesc`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SoftmaxKind {
    /// `e^t / sum e^t`
    Softmax = 1,
    /// `t - ln(sum e^t)`
    LogSoftmax = 2,
}

/// A softmax of rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// A [`SoftmaxKind`] as its number.
    pub kind: u32,
    /// Factor of `x`.
    pub scale: f32,
    /// Nonzero if column `j` counts only where `j <= i + causal_offset`, `i` being the row's index
    /// along the last dimension of `rows`.
    pub causal: u32,
    /// See `causal`.
    pub causal_offset: isize,
    /// Elements of a row.
    pub n_cols: usize,
    /// Extents and strides of the rows.
    pub rows: [RowDim; MAX_BATCH],
}

descriptor!(SoftmaxDesc {
    isa,
    kind,
    scale,
    causal,
    causal_offset,
    n_cols,
    rows
});

impl SoftmaxDesc {
    /// A softmax of the rows of a contiguous matrix, for an instruction set.
    pub fn new(isa: Isa, kind: SoftmaxKind, n_rows: usize, n_cols: usize) -> SoftmaxDesc {
        SoftmaxDesc {
            isa: isa as u32,
            kind: kind as u32,
            scale: 1.0,
            causal: 0,
            causal_offset: 0,
            n_cols,
            rows: row_dims(n_rows, n_cols, n_cols),
        }
    }

    /// Rows.
    pub fn n_items(&self) -> usize {
        n_rows(&self.rows)
    }
}

/// Computes items `begin..end` of a [`SoftmaxDesc`].
///
/// `ptrs[LHS]` is `x`, `ptrs[OUT]` is `y`, `ptrs[RHS]` is the mask to add, with unit column stride,
/// or null. A row that is masked throughout with minus infinity becomes NaN, as arithmetic has it;
/// columns beyond the causal limit become 0 (softmax) or minus infinity. Exponentials that are no
/// normal numbers count as 0. Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_softmax_f32(
    desc: *const SoftmaxDesc,
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
        let visible = if desc.causal == 0 {
            desc.n_cols
        } else {
            causal_cols(desc, at.last)
        };
        // SAFETY: the pointers cover the row.
        unsafe {
            let mask = pointer(ptrs, RHS).cast_const();
            let row = Row {
                x: pointer(ptrs, LHS).cast_const().wrapping_offset(at.x),
                y: pointer(ptrs, OUT).wrapping_offset(at.y),
                mask: if mask.is_null() {
                    mask
                } else {
                    mask.wrapping_offset(at.mask)
                },
                n: visible,
                n_cols: desc.n_cols,
                scale: desc.scale,
                is_log: desc.kind == SoftmaxKind::LogSoftmax as u32,
            };
            dispatch(isa, row);
        }
    }
    OK
}

/// Columns that row `i` sees.
fn causal_cols(desc: &SoftmaxDesc, i: usize) -> usize {
    let end = i as isize + desc.causal_offset + 1;
    (end.max(0) as usize).min(desc.n_cols)
}

struct Row {
    x: *const f32,
    y: *mut f32,
    mask: *const f32,
    /// Columns that count.
    n: usize,
    n_cols: usize,
    scale: f32,
    is_log: bool,
}

impl Task for Row {
    type Out = ();

    /// Safety: the pointers cover the row; the mask may be null.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        // SAFETY: at most `n_cols` elements of each.
        unsafe {
            let source = if self.scale == 1.0 && self.mask.is_null() {
                self.x
            } else {
                self.scale_and_mask(s);
                self.y.cast_const()
            };
            let largest = fold(s, source, self.n, Largest);
            let sum = self.exponentials(s, source, largest);
            if self.is_log {
                let shift = s.splat(largest + sum.ln());
                self.for_each(s, source, |x| s.sub(x, shift));
            } else {
                let factor = s.splat(1.0 / sum);
                self.for_each(s, self.y, |x| s.mul(x, factor));
            }
            let hidden = if self.is_log { f32::NEG_INFINITY } else { 0.0 };
            for j in self.n..self.n_cols {
                *self.y.add(j) = hidden;
            }
        }
    }
}

impl Row {
    /// `y = x * scale + mask`.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn scale_and_mask<S: Simd>(&self, s: S) {
        let scale = s.splat(self.scale);
        let mut i = 0;
        while i < self.n {
            let rest = self.n - i;
            // SAFETY: at most `rest` elements.
            unsafe {
                let mut t = s.mul(s.load_n(self.x.add(i), rest), scale);
                if !self.mask.is_null() {
                    t = s.add(t, s.load_n(self.mask.add(i), rest));
                }
                s.store_n(self.y.add(i), rest, t);
            }
            i += S::LANES;
        }
    }

    /// Sum of `e^(t - largest)`; the terms go to `y`, unless the logarithm is wanted.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn exponentials<S: Simd>(&self, s: S, t: *const f32, largest: f32) -> f32 {
        let (shift, mut sum) = (s.splat(largest), s.zero());
        let mut i = 0;
        while i < self.n {
            let rest = self.n - i;
            // SAFETY: at most `rest` elements.
            unsafe {
                let e = vmath::exp_weight(s, s.sub(s.load_n(t.add(i), rest), shift));
                let e = if rest < S::LANES {
                    s.select(lanes_below(s, rest), e, s.zero())
                } else {
                    e
                };
                sum = s.add(sum, e);
                if !self.is_log {
                    s.store_n(self.y.add(i), rest, e);
                }
            }
            i += S::LANES;
        }
        s.sum(sum)
    }

    /// # Safety
    /// As for `run`; `f` only computes.
    #[inline(always)]
    unsafe fn for_each<S: Simd>(&self, s: S, t: *const f32, f: impl Fn(S::F) -> S::F) {
        let mut i = 0;
        while i < self.n {
            let rest = self.n - i;
            // SAFETY: at most `rest` elements.
            unsafe { s.store_n(self.y.add(i), rest, f(s.load_n(t.add(i), rest))) };
            i += S::LANES;
        }
    }
}

/// One row's part of a softmax over blocks: scores become exponentials relative to the largest
/// score so far, and the earlier sum and output are rescaled to it.
///
/// # Safety
/// The pointers cover the row, except a null mask; `isa` is available.
pub(crate) unsafe fn softmax_block(isa: Isa, row: BlockRow) {
    // SAFETY: by contract.
    unsafe { dispatch(isa, row) }
}

impl Task for BlockRow {
    type Out = ();

    /// Safety: the pointers cover the row; the mask may be null.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        // SAFETY: by contract; as many vectors as the row has.
        unsafe {
            match self.n.div_ceil(S::LANES) {
                1 => self.in_registers::<S, 1>(s),
                2 => self.in_registers::<S, 2>(s),
                3 => self.in_registers::<S, 3>(s),
                4 => self.in_registers::<S, 4>(s),
                5 => self.in_registers::<S, 5>(s),
                6 => self.in_registers::<S, 6>(s),
                7 => self.in_registers::<S, 7>(s),
                8 => self.in_registers::<S, 8>(s),
                // More vectors are more than the registers of older instruction sets.
                n if S::LANES < 16 => self.in_passes(s, n),
                9 => self.in_registers::<S, 9>(s),
                10 => self.in_registers::<S, 10>(s),
                11 => self.in_registers::<S, 11>(s),
                12 => self.in_registers::<S, 12>(s),
                13 => self.in_registers::<S, 13>(s),
                14 => self.in_registers::<S, 14>(s),
                15 => self.in_registers::<S, 15>(s),
                16 => self.in_registers::<S, 16>(s),
                n => self.in_passes(s, n),
            }
        }
    }
}

impl BlockRow {
    /// Vector `v` of the scores, scaled and masked. All lanes of a partial vector that are beyond the
    /// row are minus infinity.
    ///
    /// # Safety
    /// As for `run`; the row has lanes of the vector.
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, s: S, v: usize, is_partial: bool) -> S::F {
        let (at, scale) = (v * S::LANES, s.splat(self.scale));
        let rest = self.n - at;
        // SAFETY: by contract.
        unsafe {
            let x = self.scores.add(at).cast_const();
            let x = if is_partial {
                s.load_n(x, rest)
            } else {
                s.load(x)
            };
            let mut t = s.mul(x, scale);
            if !self.mask.is_null() {
                let mask = self.mask.add(at);
                let mask = if is_partial {
                    s.load_n(mask, rest)
                } else {
                    s.load(mask)
                };
                t = s.add(t, mask);
            }
            match is_partial {
                true => s.select(lanes_below(s, rest), t, s.splat(f32::NEG_INFINITY)),
                false => t,
            }
        }
    }

    /// The row, of `V` vectors of which the last may be partial, without a second pass over memory.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn in_registers<S: Simd, const V: usize>(&self, s: S) {
        let is_partial = self.n < V * S::LANES;
        // SAFETY: by contract.
        unsafe {
            let mut t = [s.zero(); V];
            let mut most = [s.splat(f32::NEG_INFINITY); 2];
            for (v, t) in t.iter_mut().enumerate() {
                *t = self.score(s, v, v == V - 1 && is_partial);
                most[v % 2] = s.max(*t, most[v % 2]);
            }
            // A NaN is not the largest, but its exponential is in the sum.
            let largest = Largest.join(*self.largest, s.largest(s.max(most[0], most[1])));
            if largest == f32::NEG_INFINITY && !t.iter().any(|&t| has_nan(s, t)) {
                return self.weightless();
            }
            let sum = self.weights(s, t, largest);
            self.join(s, largest, sum);
        }
    }

    /// Stores the exponentials of the scores `t`, less the largest; their sum.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn weights<S: Simd, const V: usize>(&self, s: S, t: [S::F; V], largest: f32) -> f32 {
        let (shift, mut sums) = (s.splat(largest), [s.zero(); 2]);
        for (v, t) in t.into_iter().enumerate() {
            let e = vmath::exp_weight(s, s.sub(t, shift));
            let rest = self.n - v * S::LANES;
            // SAFETY: by contract.
            unsafe {
                let to = self.scores.add(v * S::LANES);
                if v == V - 1 && rest < S::LANES {
                    // Minus infinity less itself is no number.
                    let seen = s.select(lanes_below(s, rest), e, s.zero());
                    sums[v % 2] = s.add(sums[v % 2], seen);
                    s.store_n(to, rest, e);
                } else {
                    sums[v % 2] = s.add(sums[v % 2], e);
                    s.store(to, e);
                }
            }
        }
        s.sum(s.add(sums[0], sums[1]))
    }

    /// The same for any number of vectors.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn in_passes<S: Simd>(&self, s: S, n_vectors: usize) {
        // SAFETY: by contract.
        unsafe {
            for v in 0..n_vectors {
                let is_partial = self.n < (v + 1) * S::LANES;
                let t = self.score(s, v, is_partial);
                s.store_n(self.scores.add(v * S::LANES), self.n - v * S::LANES, t);
            }
            let scores = self.row(self.scores, self.n);
            let largest = Largest.join(*self.largest, fold(s, self.scores, self.n, Largest));
            if largest == f32::NEG_INFINITY {
                return self.weightless();
            }
            let sum = scores.exponentials(s, self.scores, largest);
            self.join(s, largest, sum);
        }
    }

    /// Weights of 0 where all scores so far are minus infinity, instead of the NaN of their
    /// difference.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn weightless(&self) {
        // SAFETY: by contract.
        unsafe { std::ptr::write_bytes(self.scores, 0, self.n) }
    }

    /// Rescales the earlier sum and output to `largest`, and adds `sum` of this block.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn join<S: Simd>(&self, s: S, largest: f32, sum: f32) {
        // SAFETY: by contract.
        unsafe {
            let before = *self.largest;
            if before != largest {
                let shrink = (before - largest).exp();
                *self.sum *= shrink;
                let out = self.row(self.out, self.n_out);
                out.for_each(s, self.out, |x| s.mul(x, s.splat(shrink)));
            }
            *self.sum += sum;
            *self.largest = largest;
        }
    }

    fn row(&self, x: *mut f32, n: usize) -> Row {
        Row {
            x,
            y: x,
            mask: std::ptr::null(),
            n,
            n_cols: n,
            scale: 1.0,
            is_log: false,
        }
    }
}

/// True when a lane is NaN.
#[inline(always)]
fn has_nan<S: Simd>(s: S, x: S::F) -> bool {
    let ordered = s.select(s.eq(x, x), s.zero(), s.splat(1.0));
    s.sum(ordered) > 0.0
}
