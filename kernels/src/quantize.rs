//! Quantisation: storage of `f32` as bytes, by kernels that compute the elements or by one of its own.

use crate::descriptor::{descriptor, plain};
use crate::epilogue::{Rect, load};
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OPERANDS, OUT, RHS, UNSUPPORTED_ISA, pointer};

/// Elements of an item of [`gm_quantize_f32`].
pub const PER_ITEM: usize = 1 << 13;

/// Storage of results: as `f32`, or as 8-bit integers `saturate(round(x / divisor) + zero)`, ties
/// to even, NaN as 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quantize {
    /// 0 for `f32` (or sums of integers), 1 for `u8`, 2 for `i8`.
    pub to: u32,
    /// Zero point.
    pub zero: i32,
    /// Scale.
    pub divisor: f32,
    /// Unused, zero.
    pub reserved: u32,
}

plain!(Quantize {
    to,
    zero,
    divisor,
    reserved
});

impl Quantize {
    /// To `u8`, or to `i8`.
    pub fn bytes(is_signed: bool, divisor: f32, zero: i32) -> Quantize {
        Quantize {
            to: 1 + u32::from(is_signed),
            zero,
            divisor,
            reserved: 0,
        }
    }

    /// True when `to` is known and `zero` is one of its values.
    pub fn is_valid(&self) -> bool {
        let range = match self.to {
            0 => return true,
            1 => 0..=255,
            2 => -128..=127,
            _ => return false,
        };
        range.contains(&self.zero)
    }

    /// Bytes of a stored element.
    pub fn size_bytes(&self) -> usize {
        if self.to == 0 { size_of::<f32>() } else { 1 }
    }
}

/// Stores a rectangle of `f32` elsewhere as 8-bit integers.
pub(crate) struct StoreBytes {
    pub(crate) quantize: Quantize,
    pub(crate) from: Rect,
    pub(crate) to: *mut u8,
    pub(crate) ld: usize,
}

impl Task for StoreBytes {
    type Out = ();

    /// Safety: the rectangle is readable, and as many bytes are writable in rows of `ld` bytes.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        // SAFETY: by contract.
        unsafe {
            match self.quantize.to {
                1 => self.rows::<S, true>(s),
                _ => self.rows::<S, false>(s),
            }
        }
    }
}

impl StoreBytes {
    /// # Safety
    /// As for [`StoreBytes::run`].
    #[inline(always)]
    unsafe fn rows<S: Simd, const UNSIGNED: bool>(&self, s: S) {
        let rounding = Rounding::<S, UNSIGNED>::new(s, self.quantize);
        for r in (0..self.from.rows).step_by(2) {
            let rows = [r, r + 1];
            let is_pair = UNSIGNED && r + 1 < self.from.rows;
            // SAFETY: by contract.
            unsafe {
                let mut j = 0;
                while is_pair && j + 2 * S::LANES <= self.from.cols {
                    let mut bytes = [[s.splat_i(0); 2]; 2];
                    for (bytes, r) in bytes.iter_mut().zip(rows) {
                        let from = self.from.c.add(r * self.from.ldc + j);
                        bytes[0] = rounding.apply(s, s.load(from));
                        bytes[1] = rounding.apply(s, s.load(from.add(S::LANES)));
                    }
                    let places = rows.map(|r| self.to.wrapping_add(r * self.ld + j));
                    s.store_byte_rows(places, bytes);
                    j += 2 * S::LANES;
                }
                while j < self.from.cols {
                    let n = self.from.cols - j;
                    for r in r..(r + 2).min(self.from.rows) {
                        let x = load(s, self.from.c.add(r * self.from.ldc + j), n);
                        s.store_bytes(self.to.add(r * self.ld + j), n, rounding.apply(s, x));
                    }
                    j += S::LANES;
                }
            }
        }
    }
}

/// [`Quantize`] in vectors, to unsigned or signed bytes.
struct Rounding<S: Simd, const UNSIGNED: bool> {
    /// Range of the quotient before `zero` is added. Whole numbers, so that clamping before
    /// rounding is the same as after.
    lo: S::F,
    hi: S::F,
    /// The quotient of NaN, whose result is 0.
    nan: S::F,
    divisor: S::F,
    divides: bool,
    /// One over the divisor, where the product is near enough to the quotient.
    inverse: Option<S::F>,
    zero: S::I,
}

/// Quotients that are as far from a whole number, or less, are rounded to the same one when they are
/// computed by the inverse: the products of at most 383 differ by less than `383 * 3 * 2^-24`, some
/// 7e-5.
const FAR_FROM_TIES: f32 = 0.4998;

impl<S: Simd, const UNSIGNED: bool> Rounding<S, UNSIGNED> {
    #[inline(always)]
    fn new(s: S, quantize: Quantize) -> Rounding<S, UNSIGNED> {
        let zero = quantize.zero;
        let (lo, hi) = if UNSIGNED { (0, 255) } else { (-128, 127) };
        let divides = quantize.divisor != 1.0;
        let has_inverse = |divisor: f32| divisor.is_normal() && (1.0 / divisor).is_normal();
        Rounding {
            lo: s.splat((lo - zero) as f32),
            hi: s.splat((hi - zero) as f32),
            nan: s.splat(-zero as f32),
            divisor: s.splat(quantize.divisor),
            divides,
            inverse: Some(quantize.divisor)
                .filter(|&divisor| divides && has_inverse(divisor))
                .map(|divisor| s.splat(1.0 / divisor)),
            zero: s.splat_i(zero),
        }
    }

    #[inline(always)]
    fn apply(&self, s: S, x: S::F) -> S::I {
        if !self.divides {
            return self.rounded(s, x);
        }
        // A division takes as long as all else together; where its rounding may matter is rare.
        if let Some(inverse) = self.inverse {
            let quotient = self.clamped(s, s.mul(x, inverse));
            let whole = s.to_int(quotient);
            let distance = s.abs(s.sub(quotient, s.to_float(whole)));
            if !s.any(s.lt(s.splat(FAR_FROM_TIES), distance)) {
                return s.add_i(whole, self.zero);
            }
        }
        self.rounded(s, s.div(x, self.divisor))
    }

    #[inline(always)]
    fn rounded(&self, s: S, x: S::F) -> S::I {
        s.add_i(s.to_int(self.clamped(s, x)), self.zero)
    }

    #[inline(always)]
    fn clamped(&self, s: S, x: S::F) -> S::F {
        // The lower end of NaN, which is 0 in unsigned bytes.
        let clamped = s.min(self.hi, s.max(x, self.lo));
        match UNSIGNED {
            true => clamped,
            false => s.select(s.eq(x, x), clamped, self.nan),
        }
    }
}

/// Bytes of contiguous elements, by a divisor and a zero point in memory:
/// `saturate(round(x / divisor) + zero)`. Item `i` is the elements from `i * `[`PER_ITEM`] on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// 1 for `u8`, 2 for `i8`, as in [`Quantize`].
    pub to: u32,
    /// Elements.
    pub n: usize,
}

descriptor!(QuantizeDesc { isa, to, n });

impl QuantizeDesc {
    /// For an instruction set, to `u8` or to `i8`, of so many elements.
    pub fn new(isa: Isa, is_signed: bool, n: usize) -> QuantizeDesc {
        QuantizeDesc {
            isa: isa as u32,
            to: Quantize::bytes(is_signed, 1.0, 0).to,
            n,
        }
    }

    /// Items of the whole tensor.
    pub fn n_items(&self) -> usize {
        self.n.div_ceil(PER_ITEM)
    }
}

/// Computes items `begin..end` of a [`QuantizeDesc`].
///
/// `ptrs[LHS]` is `x`, `ptrs[RHS]` the divisor, `ptrs[OPERANDS]` the zero point, all `f32`, and
/// `ptrs[OUT]` the bytes. Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' bytes.
pub unsafe extern "C" fn gm_quantize_f32(
    desc: *const QuantizeDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let (first, last) = (begin * PER_ITEM, (end * PER_ITEM).min(desc.n));
    if first >= last {
        return OK;
    }
    // SAFETY: the pointers cover the operands.
    unsafe {
        let (divisor, zero) = (*pointer(ptrs, RHS), *pointer(ptrs, OPERANDS));
        let x = pointer(ptrs, LHS).add(first);
        let to = (*ptrs.add(OUT)).add(first);
        let quantize = Quantize {
            to: desc.to,
            zero: zero as i32,
            divisor,
            reserved: 0,
        };
        let is_signed = match desc.to {
            1 => false,
            2 => true,
            _ => return INVALID,
        };
        if quantize.zero as f32 == zero && quantize.is_valid() {
            let narrow = StoreBytes {
                quantize,
                from: Rect::row(x, last - first),
                to,
                ld: 0,
            };
            dispatch(isa, narrow);
        } else {
            by_element(x, to, last - first, is_signed, (divisor, zero));
        }
    }
    OK
}

/// Bytes by a zero point that is none of them.
///
/// # Safety
/// `n` elements are readable, and as many bytes writable.
unsafe fn by_element(
    x: *const f32,
    to: *mut u8,
    n: usize,
    is_signed: bool,
    (divisor, zero): (f32, f32),
) {
    for i in 0..n {
        // SAFETY: by contract.
        unsafe {
            let y = (*x.add(i) / divisor).round_ties_even() + zero;
            *to.add(i) = if is_signed { y as i8 as u8 } else { y as u8 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    /// The bytes of [`gm_quantize_f32`], a byte that it must not write after them.
    fn quantized(isa: Isa, is_signed: bool, x: &[f32], divisor: f32, zero: f32) -> Vec<u8> {
        let desc = QuantizeDesc::new(isa, is_signed, x.len());
        let mut y = vec![77; x.len() + 1];
        let address = |x: &f32| std::ptr::from_ref(x).cast_mut().cast::<u8>();
        let ptrs = [
            x.as_ptr().cast_mut().cast(),
            address(&divisor),
            y.as_mut_ptr(),
            std::ptr::null_mut(),
            address(&zero),
        ];
        let split = desc.n_items() / 2;
        for (begin, end) in [(split, desc.n_items()), (0, split)] {
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_quantize_f32(&desc, ptrs.as_ptr(), begin, end) };
            assert_eq!(status, OK);
        }
        assert_eq!(y.pop(), Some(77));
        y
    }

    #[test]
    fn quotients_are_rounded_and_shifted() {
        let mut rng = Rng(77);
        for isa in Isa::available() {
            for n in [1, 7, 16, 33, 127, PER_ITEM, 2 * PER_ITEM + 77] {
                for is_signed in [false, true] {
                    let zero = [0.0, 3.0, 128.0, -7.0, 0.5, f32::NAN, 1e9][rng.below(7)];
                    let divisor = [1.0, 0.01, 3e-39, 0.0, f32::INFINITY, f32::NAN][rng.below(6)];
                    let mut x = rng.vec(n);
                    for (i, x) in x.iter_mut().enumerate() {
                        // Ties, numbers beside them, and numbers beyond the range.
                        *x = match i % 4 {
                            0 => (*x * 200.0).round() * divisor / 2.0,
                            1 => *x * 200.0 * divisor,
                            _ => *x,
                        };
                    }
                    x[rng.below(n)] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][rng.below(3)];
                    let want = x.iter().map(|x| {
                        let y = (x / divisor).round_ties_even() + zero;
                        if is_signed { y as i8 as u8 } else { y as u8 }
                    });
                    let want: Vec<u8> = want.collect();
                    let got = quantized(isa, is_signed, &x, divisor, zero);
                    assert!(got == want, "{isa} {n} {is_signed} {divisor} {zero}");
                }
            }
        }
    }
}
