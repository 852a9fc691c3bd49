//! Products of 8-bit integers, exact in `i32`.
//!
//! They take the path of `f32` products in words of four bytes: a left-hand row of `k` words holds
//! `4 k` elements, and a panel of the right-hand side has `k` rows of `nr` words, each with four
//! elements of one column, then one row with the `i32` sum of each column. A step multiplies a
//! left-hand word, as unsigned bytes, with a right-hand word, as signed ones, and adds the four
//! products to a 32-bit sum.
//!
//! The left-hand side may have a zero point: `sum((a - zero) b) = sum(a b) - zero sum(b)`. Signed
//! left-hand bytes become unsigned by adding 128 to them and to the zero point; tile instructions
//! multiply them as they are. (Jacob et al.,
//! Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
//! 2018, section 2.3.)

use super::tile::{Tile, finish, finish_bytes};
use crate::descriptor::plain;
use crate::epilogue::Fast;
use crate::isa::Isa;
use crate::quantize::Quantize;
use crate::simd::Simd;

/// Elements of a word.
pub const WORD: usize = 4;
/// Adds 128 to each byte of a word by exclusive or, which makes signed bytes unsigned and unsigned
/// ones signed.
pub(crate) const FLIP: i32 = 0x8080_8080_u32 as i32;

/// Elements of the operands of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operands {
    /// `f32`.
    F32 = 0,
    /// Words of `u8` by words of `i8`.
    U8 = 1,
    /// Words of `i8` by words of `i8`.
    I8 = 2,
}

impl Operands {
    /// The kind with this number.
    pub fn from_u32(value: u32) -> Option<Operands> {
        [Operands::F32, Operands::U8, Operands::I8]
            .into_iter()
            .find(|&o| o as u32 == value)
    }
}

/// The part of a descriptor for products of integers; all zero for products of `f32`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Integers {
    /// [`Operands`] as its number.
    pub operands: u32,
    /// 1 when the result stays `i32`, and has no epilogue; otherwise it is rounded to `f32`.
    pub keeps_sums: u32,
    /// Index in `ptrs[OPERANDS..]`, counted from 1, of the left-hand zero point, one byte; 0 when
    /// [`Integers::zero`] holds it.
    pub zero_operand: u32,
    /// Left-hand zero point.
    pub zero: i32,
}

plain!(Integers {
    operands,
    keeps_sums,
    zero_operand,
    zero
});

/// The zero point and form of one product of integers.
#[derive(Clone, Copy)]
pub(crate) struct Resolved {
    pub(crate) is_signed: bool,
    pub(crate) keeps_sums: bool,
    /// Zero point of the bytes in memory, signed or not.
    zero: i32,
}

impl Integers {
    /// True when the numbers are known, and `i32` results are stored without an epilogue.
    pub(crate) fn valid(&self, n_epilogue: u32, quantize: Quantize) -> bool {
        let stores_sums = n_epilogue == 0 && quantize.to == 0;
        Operands::from_u32(self.operands).is_some()
            && quantize.is_valid()
            && (self.keeps_sums == 0 || stores_sums)
    }

    /// `None` for a product of `f32`.
    ///
    /// # Safety
    /// `operands` holds a pointer to the zero point if there is one.
    pub(crate) unsafe fn resolve(&self, operands: *const *mut u8) -> Option<Resolved> {
        let is_signed = match Operands::from_u32(self.operands)? {
            Operands::F32 => return None,
            kind => kind == Operands::I8,
        };
        let zero = match self.zero_operand {
            0 => self.zero,
            i => {
                // SAFETY: by contract.
                let byte = unsafe { *(*operands.add(i as usize - 1)) };
                if is_signed {
                    i32::from(byte as i8)
                } else {
                    i32::from(byte)
                }
            }
        };
        Some(Resolved {
            is_signed,
            keeps_sums: self.keeps_sums != 0,
            zero,
        })
    }
}

impl Resolved {
    /// The byte that stands for zero in memory.
    pub(crate) fn zero_byte(&self) -> u8 {
        self.zero as u8
    }

    /// Changes a left-hand word to unsigned bytes by exclusive or.
    pub(crate) fn flip(&self) -> i32 {
        if self.is_signed { FLIP } else { 0 }
    }

    /// The zero point of the unsigned bytes that are multiplied.
    pub(crate) fn unsigned_zero(&self) -> i32 {
        self.zero + if self.is_signed { 128 } else { 0 }
    }
}

/// Words of a packed `[k, n]` matrix of bytes, `k` a multiple of [`WORD`].
pub fn packed_words(isa: Isa, k: usize, n: usize) -> usize {
    n.div_ceil(isa.nr()) * (k / WORD + 1) * isa.nr()
}

/// Packs a `[k, n]` matrix: `rows(i)(j)` has the elements of column `j` in rows `i` to `i + WORD`. `None`
/// when `k` is no multiple of [`WORD`].
pub fn pack_bytes<Row: Fn(usize) -> [i8; WORD]>(
    isa: Isa,
    k: usize,
    n: usize,
    rows: impl Fn(usize) -> Row,
) -> Option<Vec<i32>> {
    if !k.is_multiple_of(WORD) {
        return None;
    }
    let nr = isa.nr();
    let mut out = Vec::with_capacity(packed_words(isa, k, n));
    for first in (0..n).step_by(nr) {
        let n_columns = nr.min(n - first);
        let mut sums = vec![0i32; nr];
        for i in (0..k).step_by(WORD) {
            let row = rows(i);
            for (j, sum) in sums[..n_columns].iter_mut().enumerate() {
                let bytes = row(first + j);
                *sum += bytes.iter().map(|&b| i32::from(b)).sum::<i32>();
                out.push(i32::from_le_bytes(bytes.map(|b| b as u8)));
            }
            out.extend((n_columns..nr).map(|_| 0));
        }
        out.extend(sums);
    }
    Some(out)
}

/// Multiplication of words of bytes.
pub(crate) trait Dot<S: Simd>: Copy {
    /// True for tiles with code that stores bytes from registers. It is much code, so only the most
    /// frequent operands have it.
    const STORES_BYTES: bool;
    /// A left-hand word in every lane, as unsigned bytes.
    fn spread(self, s: S, t: &Tile, word: i32) -> S::I;
    /// `acc + a0 b0 + a1 b1 + a2 b2 + a3 b3`, `a` unsigned and `b` signed.
    fn dot(self, s: S, acc: S::I, a: S::I, b: S::I) -> S::I;
}

/// Multiplication by the instructions of `S` alone.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl<S: Simd> Dot<S> for Plain {
    const STORES_BYTES: bool = false;

    #[inline(always)]
    fn spread(self, s: S, t: &Tile, word: i32) -> S::I {
        s.splat_i(word ^ t.flip)
    }
    #[inline(always)]
    fn dot(self, s: S, acc: S::I, a: S::I, b: S::I) -> S::I {
        s.dot_bytes(acc, a, b)
    }
}

/// Left-hand word `kk` of a row, in every lane, as unsigned bytes.
///
/// # Safety
/// The word is readable.
#[inline(always)]
unsafe fn word<S: Simd, D: Dot<S>>(s: S, d: D, t: &Tile, row: *const f32, kk: usize) -> S::I {
    // SAFETY: by contract; bytes may lie anywhere.
    d.spread(s, t, unsafe {
        row.cast::<i32>().wrapping_add(kk).read_unaligned()
    })
}

/// # Safety
/// As for the strided tile of `f32`.
#[inline(always)]
pub(super) unsafe fn strided<S: Simd, D: Dot<S>, const MR: usize, const NV: usize>(
    s: S,
    d: D,
    t: &Tile,
) {
    let (a, lda, mut b) = (t.lhs.a, t.lhs.lda, t.b);
    // SAFETY: `k` words of each row and `k` rows of the panel are readable; prefetches need no
    // validity.
    unsafe {
        let mut acc = [zero_parts::<S, NV>(s, t); MR];
        for kk in 0..t.k {
            let mut bv = [s.splat_i(0); NV];
            for (v, bv) in bv.iter_mut().enumerate() {
                *bv = s.bits(s.load(b.add(v * S::LANES)));
            }
            (0..NV).for_each(|v| s.prefetch(b.wrapping_add((NV * 8 + v) * S::LANES)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = word(s, d, t, a.add(r * lda), kk);
                for (acc, &bv) in acc.iter_mut().zip(&bv) {
                    *acc = d.dot(s, *acc, x, bv);
                }
            }
            b = b.add(NV * S::LANES);
        }
        store::<S, D, MR, NV>(s, t, acc);
    }
}

/// # Safety
/// As for the indirect tile of `f32`.
#[inline(always)]
pub(super) unsafe fn indirect<S: Simd, D: Dot<S>, const MR: usize, const NV: usize>(
    s: S,
    d: D,
    t: &Tile,
) {
    let mut b = t.b;
    // SAFETY: `k` words of each row of each tap and `taps * k` rows of the panel are readable.
    unsafe {
        let mut acc = [zero_parts::<S, NV>(s, t); MR];
        for tap in 0..t.lhs.taps {
            let table = t.lhs.rows.add(tap * t.lhs.tap_stride);
            let rows: [*const f32; MR] = std::array::from_fn(|r| (*table.add(r)).add(t.lhs.offset));
            for kk in 0..t.k {
                let mut bv = [s.splat_i(0); NV];
                for (v, bv) in bv.iter_mut().enumerate() {
                    *bv = s.bits(s.load(b.add(v * S::LANES)));
                }
                (0..NV).for_each(|v| s.prefetch(b.wrapping_add((NV * 8 + v) * S::LANES)));
                for (&row, acc) in rows.iter().zip(acc.iter_mut()) {
                    let x = word(s, d, t, row, kk);
                    for (acc, &bv) in acc.iter_mut().zip(&bv) {
                        *acc = d.dot(s, *acc, x, bv);
                    }
                }
                b = b.add(NV * S::LANES);
            }
        }
        store::<S, D, MR, NV>(s, t, acc);
    }
}

/// # Safety
/// As for the tile of `f32` for few rows.
#[inline(always)]
pub(super) unsafe fn wide<S: Simd, D: Dot<S>, const MR: usize, const NV: usize>(
    s: S,
    d: D,
    t: &Tile,
) {
    // SAFETY: `k` words of each row and `k` rows of each panel are readable; prefetches need no
    // validity.
    unsafe {
        let mut acc = [zero_parts::<S, NV>(s, t); MR];
        for kk in 0..t.k {
            let mut x = [s.splat_i(0); MR];
            for (r, x) in x.iter_mut().enumerate() {
                *x = word(s, d, t, t.lhs.a.add(r * t.lhs.lda), kk);
            }
            for v in 0..NV {
                let b =
                    t.b.add((v / 2) * t.panel_stride + (2 * kk + v % 2) * S::LANES);
                let bv = s.bits(s.load(b));
                s.prefetch(b.wrapping_add(16 * S::LANES));
                for (acc, &x) in acc.iter_mut().zip(&x) {
                    acc[v] = d.dot(s, acc[v], x, bv);
                }
            }
        }
        store::<S, D, MR, NV>(s, t, acc);
    }
}

/// The zero point's part of the sums of each column, with which sums of products begin.
///
/// # Safety
/// The panels end with their columns' sums.
#[inline(always)]
unsafe fn zero_parts<S: Simd, const NV: usize>(s: S, t: &Tile) -> [S::I; NV] {
    let zero = s.splat_i(t.zero.wrapping_neg());
    let mut parts = [zero; NV];
    for (v, part) in parts.iter_mut().enumerate() {
        let vector = 2 * t.k * t.lhs.taps.max(1) + v % 2;
        let sums =
            t.b.wrapping_add((v / 2) * t.panel_stride + vector * S::LANES);
        // SAFETY: by contract.
        *part = s.mul_i(zero, s.bits(unsafe { s.load(sums) }));
    }
    parts
}

/// Adds the zero point's part to the sums, then stores them as [`store`] does.
///
/// # Safety
/// As for `finish`; the panels end with their columns' sums.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn end<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    t: &Tile,
    mut acc: [[S::I; NV]; MR],
) {
    // SAFETY: by contract.
    unsafe {
        let parts = zero_parts::<S, NV>(s, t);
        for row in acc.iter_mut() {
            for (x, &part) in row.iter_mut().zip(&parts) {
                *x = s.add_i(*x, part);
            }
        }
        store::<S, Plain, MR, NV>(s, t, acc);
    }
}

/// Stores sums as `i32`, or finishes in `f32` or `u8`.
///
/// # Safety
/// As for `finish`.
#[inline(always)]
unsafe fn store<S: Simd, D: Dot<S>, const MR: usize, const NV: usize>(
    s: S,
    t: &Tile,
    acc: [[S::I; NV]; MR],
) {
    // SAFETY: by contract.
    unsafe {
        // Loops, since closures of `array::map` are functions of their own, without the
        // instructions of this one.
        let mut out = [[s.zero(); NV]; MR];
        for (out, sums) in out.iter_mut().zip(&acc) {
            for (out, &x) in out.iter_mut().zip(sums) {
                *out = if t.keeps_sums {
                    s.as_float(x)
                } else {
                    s.to_float(x)
                };
            }
        }
        debug_assert!(t.bytes.is_none() || D::STORES_BYTES && !t.accumulate);
        if let Some(zero) = t.bytes.filter(|_| D::STORES_BYTES) {
            finish_bytes(s, t, zero, out);
        } else if t.keeps_sums {
            let fast = Fast::NONE;
            finish(s, &Tile { fast, ..*t }, out);
        } else {
            finish(s, t, out);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
