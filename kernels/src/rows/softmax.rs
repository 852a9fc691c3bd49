//! Softmax and its logarithm.

use super::{Fold, Largest, RowDim, fold, lanes_below, n_rows, row_dims, row_offsets};
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

/// Queries' scores for one block of keys, with each query's running maximum and sum: scores become
/// exponentials relative to the largest score so far, and the earlier sum and output are rescaled
/// to it.
pub(crate) struct BlockRows {
    pub(crate) n_rows: usize,
    /// Keys of the block.
    pub(crate) n: usize,
    /// Keys that the first query sees, and how many more each next one does; limited to the block.
    /// The others' weights are 0.
    pub(crate) n_seen: [isize; 2],
    /// Scores, which exponentials replace, and the distance of rows.
    pub(crate) scores: *mut f32,
    pub(crate) score_ld: usize,
    /// Null if there is none.
    pub(crate) mask: *const f32,
    pub(crate) mask_ld: isize,
    pub(crate) scale: f32,
    /// Largest score so far of each query.
    pub(crate) largest: *mut f32,
    pub(crate) sums: *mut f32,
    /// The output so far, `n_out` elements of each query.
    pub(crate) out: *mut f32,
    pub(crate) out_ld: usize,
    pub(crate) n_out: usize,
}

impl Task for BlockRows {
    type Out = ();

    /// Safety: the pointers cover the rows; the mask may be null.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        // Powers of two need one multiplication fewer, and no mask to be added in other units. A
        // factor of at most 1 keeps finite scores finite.
        let factor = self.scale * std::f32::consts::LOG2_E;
        let is_power = self.mask.is_null() && factor > 0.0 && factor <= 1.0;
        for i in 0..self.n_rows {
            let scores = self.scores.wrapping_add(i * self.score_ld);
            let seen = self.n_seen[0] + i as isize * self.n_seen[1];
            let n = seen.clamp(0, self.n as isize) as usize;
            // SAFETY: rows that the caller promised.
            unsafe {
                std::ptr::write_bytes(scores.add(n), 0, self.n - n);
                if n == 0 {
                    continue;
                }
                let row = BlockRow {
                    scores,
                    n,
                    mask: self.mask.wrapping_offset(i as isize * self.mask_ld),
                    scale: if is_power { factor } else { self.scale },
                    largest: self.largest.add(i),
                    sum: self.sums.add(i),
                    out: self.out.add(i * self.out_ld),
                    n_out: self.n_out,
                };
                match (is_power, self.mask.is_null()) {
                    (true, _) => row.weigh::<S, POWER>(s),
                    (_, true) => row.weigh::<S, SCALED>(s),
                    _ => row.weigh::<S, MASKED>(s),
                }
            }
        }
    }
}

/// Vectors of scores in flight: enough to hide the latency of an exponential, and few enough for
/// the compiler to unroll.
const GROUP: usize = 4;

/// Scores as they are; `scale` has the factor of the exponent of 2.
const POWER: u8 = 0;
/// Scores times `scale`; exponents of e, as of [`MASKED`].
const SCALED: u8 = 1;
/// Scores times `scale`, and the mask.
const MASKED: u8 = 2;

/// One row of [`BlockRows`]. Functions are generic over the form of scores.
struct BlockRow {
    scores: *mut f32,
    n: usize,
    mask: *const f32,
    scale: f32,
    largest: *mut f32,
    sum: *mut f32,
    out: *mut f32,
    n_out: usize,
}

impl BlockRow {
    /// # Safety
    /// The pointers cover the row.
    #[inline(always)]
    unsafe fn weigh<S: Simd, const FORM: u8>(&self, s: S) {
        // SAFETY: by contract.
        unsafe {
            // A NaN is not the largest, but its exponential is in the sum.
            let largest = Largest.join(*self.largest, self.most::<S, FORM>(s));
            if largest == f32::NEG_INFINITY && !self.has_nan::<S, FORM>(s) {
                // Weights of 0 instead of the NaN of infinities' difference.
                return std::ptr::write_bytes(self.scores, 0, self.n);
            }
            let sum = self.weights::<S, FORM>(s, largest);
            self.join::<S, FORM>(s, largest, sum);
        }
    }

    /// Vector `v` of the scores, scaled and masked. All lanes of a partial vector that are beyond the
    /// row are minus infinity.
    ///
    /// # Safety
    /// As for `weigh`; the row has lanes of the vector.
    #[inline(always)]
    unsafe fn score<S: Simd, const FORM: u8>(&self, s: S, v: usize, is_partial: bool) -> S::F {
        let at = v * S::LANES;
        let rest = self.n - at;
        // SAFETY: by contract.
        unsafe {
            let load = |x: *const f32| match is_partial {
                true => s.load_n(x.add(at), rest),
                false => s.load(x.add(at)),
            };
            let mut t = load(self.scores);
            if FORM != POWER {
                t = s.mul(t, s.splat(self.scale));
            }
            if FORM == MASKED {
                t = s.add(t, load(self.mask));
            }
            match is_partial {
                true => s.select(lanes_below(s, rest), t, s.splat(f32::NEG_INFINITY)),
                false => t,
            }
        }
    }

    /// The largest score that is a number, or minus infinity.
    ///
    /// # Safety
    /// As for `weigh`.
    #[inline(always)]
    unsafe fn most<S: Simd, const FORM: u8>(&self, s: S) -> f32 {
        let mut most = [s.splat(f32::NEG_INFINITY); GROUP];
        let (n_full, mut v) = (self.n / S::LANES, 0);
        // SAFETY: by contract; whole groups of vectors, then whole vectors, then a partial one.
        unsafe {
            while v + GROUP <= n_full {
                for (i, most) in most.iter_mut().enumerate() {
                    *most = s.max(self.score::<S, FORM>(s, v + i, false), *most);
                }
                v += GROUP;
            }
            while v < n_full {
                most[0] = s.max(self.score::<S, FORM>(s, v, false), most[0]);
                v += 1;
            }
            if v * S::LANES < self.n {
                most[1] = s.max(self.score::<S, FORM>(s, v, true), most[1]);
            }
        }
        let [a, b, c, d] = most;
        s.largest(s.max(s.max(a, b), s.max(c, d)))
    }

    /// # Safety
    /// As for `weigh`.
    #[inline(always)]
    unsafe fn has_nan<S: Simd, const FORM: u8>(&self, s: S) -> bool {
        // SAFETY: by contract.
        (0..self.n.div_ceil(S::LANES)).any(|v| unsafe {
            let t = self.score::<S, FORM>(s, v, self.n < (v + 1) * S::LANES);
            has_nan(s, t)
        })
    }

    /// The exponentials of vector `v` of the scores less the largest.
    ///
    /// # Safety
    /// As for `score`.
    #[inline(always)]
    unsafe fn weight<S: Simd, const FORM: u8>(
        &self,
        s: S,
        v: usize,
        is_partial: bool,
        shift: S::F,
    ) -> S::F {
        // SAFETY: by contract.
        let t = unsafe { self.score::<S, FORM>(s, v, is_partial) };
        // Subtracted before it is scaled: the exponent of the largest is 0, however large that is.
        let d = s.sub(t, shift);
        match FORM {
            POWER => vmath::exp2_weight(s, s.mul(d, s.splat(self.scale))),
            _ => vmath::exp_weight(s, d),
        }
    }

    /// Stores the exponentials of whole vector `v`, and returns them.
    ///
    /// # Safety
    /// As for `score`.
    #[inline(always)]
    unsafe fn store_weight<S: Simd, const FORM: u8>(&self, s: S, v: usize, shift: S::F) -> S::F {
        // SAFETY: by contract.
        unsafe {
            let e = self.weight::<S, FORM>(s, v, false, shift);
            s.store(self.scores.add(v * S::LANES), e);
            e
        }
    }

    /// Stores the exponentials of the scores less the largest; their sum.
    ///
    /// # Safety
    /// As for `weigh`.
    #[inline(always)]
    unsafe fn weights<S: Simd, const FORM: u8>(&self, s: S, largest: f32) -> f32 {
        let shift = s.splat(largest);
        let mut sums = [s.zero(); GROUP];
        let (n_full, mut v) = (self.n / S::LANES, 0);
        // SAFETY: by contract, as for `most`.
        unsafe {
            while v + GROUP <= n_full {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = s.add(*sum, self.store_weight::<S, FORM>(s, v + i, shift));
                }
                v += GROUP;
            }
            while v < n_full {
                sums[0] = s.add(sums[0], self.store_weight::<S, FORM>(s, v, shift));
                v += 1;
            }
            let rest = self.n - v * S::LANES;
            if rest > 0 {
                let e = self.weight::<S, FORM>(s, v, true, shift);
                // Minus infinity less itself is no number.
                sums[1] = s.add(sums[1], s.select(lanes_below(s, rest), e, s.zero()));
                s.store_n(self.scores.add(v * S::LANES), rest, e);
            }
        }
        let [a, b, c, d] = sums;
        s.sum(s.add(s.add(a, b), s.add(c, d)))
    }

    /// Rescales the earlier sum and output to `largest`, and adds `sum` of this block.
    ///
    /// # Safety
    /// As for `weigh`.
    #[inline(always)]
    unsafe fn join<S: Simd, const FORM: u8>(&self, s: S, largest: f32, sum: f32) {
        // SAFETY: by contract.
        unsafe {
            let before = *self.largest;
            // Before the first number all is 0 or NaN, or not yet written.
            if before != largest && before != f32::NEG_INFINITY {
                let shrink = match FORM {
                    POWER => ((before - largest) * self.scale).exp2(),
                    _ => (before - largest).exp(),
                };
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
