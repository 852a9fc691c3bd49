//! Register tiles: the innermost loops of matrix products and convolutions.

use super::integer::{self, Plain};
use crate::epilogue::{Fast, Scale};
use crate::isa::Isa;
use crate::simd::{Portable, Simd};

/// Rows of the largest tile of any instruction set.
pub(crate) const MAX_MR: usize = 14;
/// Vectors of a panel's row.
const PANEL: usize = 2;
/// Columns of the largest tile, in the form for few rows.
pub(crate) const MAX_COLS: usize = 128;

/// The left-hand side of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Lhs {
    /// First row, where rows are at a distance of `lda`.
    pub(crate) a: *const f32,
    pub(crate) lda: usize,
    /// Row addresses, where rows lie anywhere: `rows[tap * tap_stride + r]` is the start of `k`
    /// elements.
    pub(crate) rows: *const *const f32,
    pub(crate) tap_stride: usize,
    pub(crate) taps: usize,
    /// Added to each of `rows`.
    pub(crate) offset: usize,
    /// The address among `rows` of nothing but zeros, which add nothing; null where there are none.
    /// Their product with an infinite or NaN weight is NaN or nothing, as the rows of the tile happen to be.
    pub(crate) zeros: *const f32,
    /// State of the tile registers, for tiles of AMX.
    #[cfg(target_arch = "x86_64")]
    pub(crate) registers: *const super::amx::Registers,
}

impl Lhs {
    /// Rows that follow each other at a distance of `lda` elements.
    pub(crate) fn strided(a: *const f32, lda: usize) -> Lhs {
        Lhs {
            a,
            lda,
            rows: std::ptr::null(),
            tap_stride: 0,
            taps: 0,
            offset: 0,
            zeros: std::ptr::null(),
            #[cfg(target_arch = "x86_64")]
            registers: std::ptr::null(),
        }
    }
}

/// One tile: `MR` rows by `NV` vectors of full columns. Elements are words of four bytes.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Rows.
    pub(crate) rows: usize,
    /// Elements to sum over; per tap when rows are indirect.
    pub(crate) k: usize,
    pub(crate) lhs: Lhs,
    /// First of the tile's panels.
    pub(crate) b: *const f32,
    /// Elements between panels, for tiles of several.
    pub(crate) panel_stride: usize,
    pub(crate) c: *mut f32,
    pub(crate) ldc: usize,
    /// Adds to `c` instead of overwriting it.
    pub(crate) accumulate: bool,
    pub(crate) fast: Fast,
    /// Integers: the zero point of the unsigned left-hand bytes.
    pub(crate) zero: i32,
    /// Integers: changes a left-hand word to unsigned bytes by exclusive or.
    pub(crate) flip: i32,
    /// Integers: stores `i32`.
    pub(crate) keeps_sums: bool,
    /// Integers: stores `u8` in place of `f32`, with this zero point. Then `ldc` counts bytes.
    pub(crate) bytes: Option<i32>,
}

/// A compiled tile.
pub(crate) type TileFn = unsafe fn(&Tile);

/// The tiles of one instruction set. Tables are indexed by row count; entry 0 is never called.
pub(crate) struct Tiles {
    pub(crate) nr: usize,
    /// Two vectors wide, rows at a distance of `lda`.
    pub(crate) strided: &'static [TileFn],
    /// Two vectors wide, rows anywhere.
    pub(crate) indirect: &'static [TileFn],
    /// The first vector of a panel alone, for last panels of no more columns: as `strided`, and as
    /// `indirect`. Empty where there are no such tiles.
    pub(crate) halves: [&'static [TileFn]; 2],
    /// For few rows: several panels at once, to keep enough sums in flight and read the right-hand
    /// side as streams.
    pub(crate) wide: &'static [TileFn],
    /// Panels of each of `wide`.
    pub(crate) wide_panels: &'static [usize],
    /// True for tiles of AMX.
    pub(crate) has_registers: bool,
    /// True for tiles that store `u8` where [`Tile::bytes`] says so.
    pub(crate) stores_bytes: bool,
}

impl Tiles {
    pub(crate) fn of(isa: Isa) -> &'static Tiles {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &x86::AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &x86::AVX2,
            _ => &PORTABLE,
        }
    }

    /// Tiles of words of unsigned or signed bytes, for a product of `rows` rows.
    pub(crate) fn of_bytes(
        isa: Isa,
        is_signed: bool,
        rows: usize,
        lhs: &Lhs,
        k: usize,
    ) -> &'static Tiles {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                let tiles = super::amx::tiles_of(is_signed, rows, lhs, k);
                tiles.unwrap_or_else(|| x86::avx512_bytes(is_signed))
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::avx2_bytes(is_signed),
            _ => &PORTABLE_BYTES,
        }
    }
}

/// The first `NV` vectors of a panel.
///
/// # Safety
/// `t` describes readable operands and a writable output for `MR` rows and `NV * LANES` columns.
#[inline(always)]
unsafe fn strided<S: Simd, const MR: usize, const NV: usize>(s: S, t: &Tile) {
    let mut acc = [[s.zero(); NV]; MR];
    let (a, lda, mut b) = (t.lhs.a, t.lhs.lda, t.b);
    // SAFETY: `k` elements of each row and `k` rows of the panel are readable; prefetches need no
    // validity.
    unsafe {
        for kk in 0..t.k {
            let mut bv = [s.zero(); NV];
            for (v, bv) in bv.iter_mut().enumerate() {
                *bv = s.load(b.add(v * S::LANES));
                s.prefetch(b.wrapping_add((PANEL * 8 + v) * S::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = s.splat(*a.add(r * lda + kk));
                for (acc, &bv) in acc.iter_mut().zip(&bv) {
                    *acc = s.mul_acc(x, bv, *acc);
                }
            }
            b = b.add(PANEL * S::LANES);
        }
        finish::<S, MR, NV>(s, t, acc);
    }
}

/// Rows anywhere. A tap with zeros in all rows is left out: most of them, maybe, for a dilated window on a
/// small image.
///
/// # Safety
/// As for [`strided`], with `taps * MR` row addresses.
#[inline(always)]
unsafe fn indirect<S: Simd, const MR: usize, const NV: usize>(s: S, t: &Tile) {
    let mut acc = [[s.zero(); NV]; MR];
    let mut b = t.b;
    // SAFETY: `k` elements of each row of each tap and `taps * k` rows of the panel are readable.
    unsafe {
        for tap in 0..t.lhs.taps {
            let table = t.lhs.rows.add(tap * t.lhs.tap_stride);
            if *table == t.lhs.zeros && (1..MR).all(|r| *table.add(r) == t.lhs.zeros) {
                b = b.add(t.k * PANEL * S::LANES);
                continue;
            }
            let rows: [*const f32; MR] = std::array::from_fn(|r| (*table.add(r)).add(t.lhs.offset));
            for kk in 0..t.k {
                let mut bv = [s.zero(); NV];
                for (v, bv) in bv.iter_mut().enumerate() {
                    *bv = s.load(b.add(v * S::LANES));
                    s.prefetch(b.wrapping_add((PANEL * 8 + v) * S::LANES));
                }
                for (row, acc) in rows.iter().zip(acc.iter_mut()) {
                    let x = s.splat(*row.add(kk));
                    for (acc, &bv) in acc.iter_mut().zip(&bv) {
                        *acc = s.mul_acc(x, bv, *acc);
                    }
                }
                b = b.add(PANEL * S::LANES);
            }
        }
        finish::<S, MR, NV>(s, t, acc);
    }
}

/// # Safety
/// As for [`strided`]; vector `v` comes from panel `v / 2`.
#[inline(always)]
unsafe fn wide<S: Simd, const MR: usize, const NV: usize>(s: S, t: &Tile) {
    let mut acc = [[s.zero(); NV]; MR];
    let (a, lda) = (t.lhs.a, t.lhs.lda);
    // SAFETY: `k` elements of each row and `k` rows of each panel are readable; prefetches need no
    // validity.
    unsafe {
        for kk in 0..t.k {
            let x: [S::F; MR] = std::array::from_fn(|r| s.splat(*a.add(r * lda + kk)));
            for v in 0..NV {
                let b =
                    t.b.add((v / 2) * t.panel_stride + (2 * kk + v % 2) * S::LANES);
                let bv = s.load(b);
                s.prefetch(b.wrapping_add(16 * S::LANES));
                for (acc, &x) in acc.iter_mut().zip(&x) {
                    acc[v] = s.mul_acc(x, bv, acc[v]);
                }
            }
        }
        finish::<S, MR, NV>(s, t, acc);
    }
}

/// Adds, clamps and stores the sums. Each step is a branch over the whole tile, so that the common
/// ones cost one comparison.
///
/// # Safety
/// The output and the operands of `t.fast` cover the tile.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    t: &Tile,
    mut acc: [[S::F; NV]; MR],
) {
    // SAFETY: the caller's promise covers every address formed here.
    unsafe {
        if t.accumulate {
            for (r, row) in acc.iter_mut().enumerate() {
                for (v, x) in row.iter_mut().enumerate() {
                    *x = s.add(*x, s.load(t.c.add(r * t.ldc + v * S::LANES)));
                }
            }
        }
        add_epilogue(s, &t.fast, &mut acc);
        for (r, row) in acc.iter().enumerate() {
            for (v, &x) in row.iter().enumerate() {
                s.store(t.c.add(r * t.ldc + v * S::LANES), x);
            }
        }
    }
}

/// Applies the epilogue, clamps, and stores bytes. `NV` is even.
///
/// # Safety
/// As for [`finish`].
#[inline(always)]
pub(super) unsafe fn finish_bytes<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    t: &Tile,
    zero: i32,
    mut acc: [[S::F; NV]; MR],
) {
    const { assert!(NV.is_multiple_of(2)) };
    // NaN becomes `lo`, which is byte 0.
    let (lo, hi) = (s.splat(-zero as f32), s.splat((255 - zero) as f32));
    let (zero, to) = (s.splat_i(zero), t.c.cast::<u8>());
    // SAFETY: the caller's promise covers every address formed here.
    unsafe {
        add_epilogue(s, &t.fast, &mut acc);
        let mut bytes = [[zero; NV]; MR];
        for (bytes, row) in bytes.iter_mut().zip(&acc) {
            for (byte, &x) in bytes.iter_mut().zip(row) {
                *byte = s.add_i(s.to_int(s.min(hi, s.max(x, lo))), zero);
            }
        }
        for r in (0..MR).step_by(2) {
            // A row without a second one is stored twice.
            let other = (r + 1).min(MR - 1);
            for v in (0..NV).step_by(2) {
                let places = [r, other].map(|r| to.wrapping_add(r * t.ldc + v * S::LANES));
                let rows = [
                    [bytes[r][v], bytes[r][v + 1]],
                    [bytes[other][v], bytes[other][v + 1]],
                ];
                s.store_byte_rows(places, rows);
            }
        }
    }
}

/// Scale, bias, residual and clamp, each if it is there.
///
/// # Safety
/// The operands cover the tile.
#[inline(always)]
pub(crate) unsafe fn add_epilogue<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    fast: &Fast,
    acc: &mut [[S::F; NV]; MR],
) {
    // SAFETY: by contract.
    unsafe {
        if !matches!(fast.scale, Scale::One) {
            for v in 0..NV {
                let scale = fast.scale.at(s, v * S::LANES, S::LANES);
                for row in acc.iter_mut() {
                    row[v] = s.mul(row[v], scale);
                }
            }
        }
        if !fast.bias.is_null() {
            for v in 0..NV {
                let bias = s.load(fast.bias.add(v * S::LANES));
                for row in acc.iter_mut() {
                    row[v] = s.add(row[v], bias);
                }
            }
        }
        if !fast.residual.is_null() {
            for (r, row) in acc.iter_mut().enumerate() {
                let residual = fast.residual.offset(r as isize * fast.residual_ld);
                for (v, x) in row.iter_mut().enumerate() {
                    *x = s.add(*x, s.load(residual.add(v * S::LANES)));
                }
            }
        }
        if fast.clamp {
            let (lo, hi) = (s.splat(fast.lo), s.splat(fast.hi));
            for row in acc.iter_mut() {
                for x in row.iter_mut() {
                    *x = s.min(hi, s.max(lo, *x));
                }
            }
        }
    }
}

macro_rules! table {
    ($f:ident: $($mr:literal),*) => { &[$f::<1> as TileFn, $($f::<$mr>),*] };
}

unsafe fn portable_strided<const MR: usize>(t: &Tile) {
    // SAFETY: the caller's contract is that of the tile.
    unsafe { strided::<Portable, MR, 2>(Portable, t) }
}
unsafe fn portable_indirect<const MR: usize>(t: &Tile) {
    // SAFETY: the caller's contract is that of the tile.
    unsafe { indirect::<Portable, MR, 2>(Portable, t) }
}
unsafe fn portable_wide<const MR: usize>(t: &Tile) {
    // SAFETY: the caller's contract is that of the tile.
    unsafe { wide::<Portable, MR, 4>(Portable, t) }
}
unsafe fn portable_strided_bytes<const MR: usize>(t: &Tile) {
    // SAFETY: the caller's contract is that of the tile.
    unsafe { integer::strided::<Portable, Plain, MR, 2>(Portable, Plain, t) }
}
unsafe fn portable_indirect_bytes<const MR: usize>(t: &Tile) {
    // SAFETY: the caller's contract is that of the tile.
    unsafe { integer::indirect::<Portable, Plain, MR, 2>(Portable, Plain, t) }
}

static PORTABLE: Tiles = Tiles {
    nr: 8,
    strided: table!(portable_strided: 1, 2, 3, 4),
    indirect: table!(portable_indirect: 1, 2, 3, 4),
    halves: [&[], &[]],
    wide: table!(portable_wide: 1, 2),
    wide_panels: &[0, 2, 2],
    has_registers: false,
    stores_bytes: false,
};

/// Both signed and unsigned: [`Plain`] reads the sign from the tile.
static PORTABLE_BYTES: Tiles = Tiles {
    nr: 8,
    strided: table!(portable_strided_bytes: 1, 2, 3, 4),
    indirect: table!(portable_indirect_bytes: 1, 2, 3, 4),
    halves: [&[], &[]],
    wide: &[],
    wide_panels: &[],
    has_registers: false,
    stores_bytes: false,
};

/// The most special instructions for bytes in use.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) enum ForBytes {
    /// None, as on older CPUs.
    Plain,
    /// Sums of four products.
    Vnni,
    /// Tiles.
    Amx,
}

#[cfg(test)]
thread_local! {
    /// Leaves out instructions, to test the code of other CPUs.
    pub(crate) static FOR_BYTES: std::cell::Cell<ForBytes> = const { std::cell::Cell::new(ForBytes::Amx) };
}

/// True unless a test leaves the tile instructions out.
#[cfg(target_arch = "x86_64")]
pub(super) fn takes_amx() -> bool {
    #[cfg(test)]
    return FOR_BYTES.get() == ForBytes::Amx;
    #[cfg(not(test))]
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::integer::{self, Dot, FLIP, Plain};
    use super::*;
    use crate::simd::{Avx2, Avx512};
    use std::arch::x86_64::{__m256i, __m512i, _mm256_dpbusd_avx_epi32, _mm512_dpbusd_epi32};

    /// Compiles generic tiles for one instruction set.
    macro_rules! compile {
        ($features:literal: $($name:ident = $tile:ident<$simd:ident, $nv:literal>;)*) => {
            $(#[target_feature(enable = $features)]
            unsafe fn $name<const MR: usize>(t: &Tile) {
                // SAFETY: this function's features are those of the token; the tile's contract is
                // the caller's.
                unsafe { $tile::<$simd, MR, $nv>($simd::new(), t) }
            })*
        };
    }

    /// The same for words of bytes.
    macro_rules! compile_bytes {
        ($features:literal: $($name:ident = $tile:ident<$simd:ident, $nv:literal>, $dot:expr;)*) => {
            $(#[target_feature(enable = $features)]
            unsafe fn $name<const MR: usize>(t: &Tile) {
                // SAFETY: this function's features are those of both tokens; the tile's contract is
                // the caller's.
                unsafe { integer::$tile::<$simd, _, MR, $nv>($simd::new(), $dot, t) }
            })*
        };
    }

    /// `vpdpbusd`, for signed or unsigned left-hand bytes. Used only in functions that enable it:
    /// AVX-512 VNNI for 16 lanes, AVX-VNNI for 8.
    #[derive(Clone, Copy)]
    struct Vnni<const SIGNED: bool>;

    macro_rules! vnni {
        ($($simd:ident: $ty:ident = $dot:ident;)*) => {
            $(impl<const SIGNED: bool> Dot<$simd> for Vnni<SIGNED> {
                const STORES_BYTES: bool = !SIGNED;

                #[inline(always)]
                fn spread(self, s: $simd, _: &Tile, word: i32) -> $ty {
                    let x = s.splat_i(word);
                    if SIGNED { s.xor(x, s.splat_i(FLIP)) } else { x }
                }
                #[inline(always)]
                fn dot(self, _: $simd, acc: $ty, a: $ty, b: $ty) -> $ty {
                    // SAFETY: no memory access; its users have the instruction.
                    unsafe { $dot(acc, a, b) }
                }
            })*
        };
    }

    vnni! {
        Avx512: __m512i = _mm512_dpbusd_epi32;
        Avx2: __m256i = _mm256_dpbusd_avx_epi32;
    }

    compile! { "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma":
        avx512_strided = strided<Avx512, 2>;
        avx512_indirect = indirect<Avx512, 2>;
        avx512_half_strided = strided<Avx512, 1>;
        avx512_half_indirect = indirect<Avx512, 1>;
        avx512_wide = wide<Avx512, 8>;
        avx512_wide6 = wide<Avx512, 6>;
    }

    compile! { "avx2,fma":
        avx2_strided = strided<Avx2, 2>;
        avx2_indirect = indirect<Avx2, 2>;
        avx2_half_strided = strided<Avx2, 1>;
        avx2_half_indirect = indirect<Avx2, 1>;
        avx2_wide = wide<Avx2, 8>;
        avx2_wide4 = wide<Avx2, 4>;
    }

    compile_bytes! { "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma":
        avx512_strided_bytes = strided<Avx512, 2>, Plain;
        avx512_indirect_bytes = indirect<Avx512, 2>, Plain;
    }

    compile_bytes! { "avx512vnni,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma":
        vnni512_strided_u8 = strided<Avx512, 2>, Vnni::<false>;
        vnni512_indirect_u8 = indirect<Avx512, 2>, Vnni::<false>;
        vnni512_wide_u8 = wide<Avx512, 8>, Vnni::<false>;
        vnni512_strided_i8 = strided<Avx512, 2>, Vnni::<true>;
        vnni512_indirect_i8 = indirect<Avx512, 2>, Vnni::<true>;
        vnni512_wide_i8 = wide<Avx512, 8>, Vnni::<true>;
    }

    compile_bytes! { "avx2,fma":
        avx2_strided_bytes = strided<Avx2, 2>, Plain;
        avx2_indirect_bytes = indirect<Avx2, 2>, Plain;
    }

    compile_bytes! { "avxvnni,avx2,fma":
        vnni256_strided_u8 = strided<Avx2, 2>, Vnni::<false>;
        vnni256_indirect_u8 = indirect<Avx2, 2>, Vnni::<false>;
        vnni256_strided_i8 = strided<Avx2, 2>, Vnni::<true>;
        vnni256_indirect_i8 = indirect<Avx2, 2>, Vnni::<true>;
    }

    pub(super) static AVX512: Tiles = Tiles {
        nr: 32,
        strided: table!(avx512_strided: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
        indirect: table!(avx512_indirect: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        halves: [
            table!(avx512_half_strided: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
            table!(avx512_half_indirect: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        ],
        wide: &[
            avx512_wide::<1> as TileFn,
            avx512_wide::<1>,
            avx512_wide::<2>,
            avx512_wide::<3>,
            avx512_wide6::<4>,
        ],
        wide_panels: &[0, 4, 4, 4, 3],
        has_registers: false,
        stores_bytes: false,
    };

    pub(super) static AVX2: Tiles = Tiles {
        nr: 16,
        strided: table!(avx2_strided: 1, 2, 3, 4, 5, 6),
        indirect: table!(avx2_indirect: 1, 2, 3, 4, 5, 6),
        halves: [
            table!(avx2_half_strided: 1, 2, 3, 4, 5, 6),
            table!(avx2_half_indirect: 1, 2, 3, 4, 5, 6),
        ],
        wide: &[
            avx2_wide::<1> as TileFn,
            avx2_wide::<1>,
            avx2_wide4::<2>,
            avx2_wide4::<3>,
        ],
        wide_panels: &[0, 4, 2, 2],
        has_registers: false,
        stores_bytes: false,
    };

    /// Eight rows by two vectors are enough sums to hide the instruction's latency. The most frequent
    /// operands have twelve: products of few terms have many tiles, each with a cost of its own.
    macro_rules! bytes512 {
        ($dot:ty, [$($mr:literal),*], $strided:ident, $indirect:ident $(, $wide:ident)?) => {
            Tiles {
                nr: 32,
                strided: table!($strided: $($mr),*),
                indirect: table!($indirect: $($mr),*),
                halves: [&[], &[]],
                wide: &[$($wide::<1> as TileFn, $wide::<1>, $wide::<2>)?],
                wide_panels: &[0, 4, 4],
                has_registers: false,
                stores_bytes: <$dot as Dot<Avx512>>::STORES_BYTES,
            }
        };
    }

    macro_rules! bytes256 {
        ($dot:ty, $strided:ident, $indirect:ident) => {
            Tiles {
                nr: 16,
                strided: table!($strided: 1, 2, 3, 4, 5, 6),
                indirect: table!($indirect: 1, 2, 3, 4, 5, 6),
                halves: [&[], &[]],
                wide: &[],
                wide_panels: &[],
                has_registers: false,
                stores_bytes: <$dot as Dot<Avx2>>::STORES_BYTES,
            }
        };
    }

    static BYTES512: Tiles = bytes512!(
        Plain,
        [1, 2, 3, 4, 5, 6, 7, 8],
        avx512_strided_bytes,
        avx512_indirect_bytes
    );
    static BYTES256: Tiles = bytes256!(Plain, avx2_strided_bytes, avx2_indirect_bytes);
    /// Unsigned and signed.
    static VNNI512: [Tiles; 2] = [
        bytes512!(
            Vnni<false>,
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
            vnni512_strided_u8,
            vnni512_indirect_u8,
            vnni512_wide_u8
        ),
        bytes512!(
            Vnni<true>,
            [1, 2, 3, 4, 5, 6, 7, 8],
            vnni512_strided_i8,
            vnni512_indirect_i8,
            vnni512_wide_i8
        ),
    ];
    static VNNI256: [Tiles; 2] = [
        bytes256!(Vnni<false>, vnni256_strided_u8, vnni256_indirect_u8),
        bytes256!(Vnni<true>, vnni256_strided_i8, vnni256_indirect_i8),
    ];

    pub(super) fn avx512_bytes(is_signed: bool) -> &'static Tiles {
        let has_instruction = is_x86_feature_detected!("avx512vnni") && !is_plain();
        if has_instruction {
            &VNNI512[usize::from(is_signed)]
        } else {
            &BYTES512
        }
    }

    pub(super) fn avx2_bytes(is_signed: bool) -> &'static Tiles {
        let has_instruction = is_x86_feature_detected!("avxvnni") && !is_plain();
        if has_instruction {
            &VNNI256[usize::from(is_signed)]
        } else {
            &BYTES256
        }
    }

    #[cfg(not(test))]
    fn is_plain() -> bool {
        false
    }

    #[cfg(test)]
    fn is_plain() -> bool {
        super::FOR_BYTES.get() == super::ForBytes::Plain
    }
}
