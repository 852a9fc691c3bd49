//! Products of bytes by the tile instructions of x86 CPUs (AMX): 32 rows by 32 columns at a time.
//!
//! A tile register has 16 rows of 64 bytes. One instruction multiplies 16 rows of 16 words by 16
//! words of 16 columns, 16,384 products of bytes, in 16 cycles: eight times as many as vectors do.
//! (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.) Panels of the
//! right-hand side, rows of 32 words, are two such tiles side by side as they are; left-hand rows
//! that lie anywhere are gathered step by step. The summed words are divided into equal steps of at
//! most 16, so that one configuration of the registers serves all; sums are stored and finished by
//! AVX-512.
//!
//! The instructions are written as assembly, since the compiler's own are not stable; it uses no
//! tile registers itself. A block of tiles configures them (which takes as long as six steps) where
//! the shape changes, and releases them at its end: other users of the thread find them unused, as
//! the calling convention says.

use super::integer::end;
use super::tile::{Lhs, Tile, TileFn, Tiles};
use crate::simd::{Avx512, Simd};
use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _mm512_mask_storeu_epi32, _mm512_maskz_loadu_epi32};
use std::cell::Cell;
use std::sync::atomic::{AtomicU8, Ordering};

/// Rows of a register.
const ROWS: usize = 16;
/// Words of a register's row.
const WORDS: usize = 16;
/// Rows of a tile of the output: two registers.
pub(super) const MAX_ROWS: usize = 2 * ROWS;
/// Columns of a panel.
pub(super) const NR: usize = 32;
/// Steps of fewer words fill so little of a register that vectors are faster.
const LEAST_STEP: usize = 8;
/// The same of sums of fewer words, and of products with fewer rows.
const LEAST_WORDS: usize = 24;
const LEAST_ROWS: usize = 12;

static UNSIGNED: [TileFn; MAX_ROWS + 1] = [tile::<false>; MAX_ROWS + 1];
static SIGNED: [TileFn; MAX_ROWS + 1] = [tile::<true>; MAX_ROWS + 1];

/// Tiles of unsigned and of signed bytes.
static TILES: [Tiles; 2] = [tiles(&UNSIGNED), tiles(&SIGNED)];

const fn tiles(by_rows: &'static [TileFn]) -> Tiles {
    Tiles {
        nr: NR,
        strided: by_rows,
        indirect: by_rows,
        halves: [&[], &[]],
        wide: &[],
        wide_panels: &[],
        has_registers: true,
        stores_bytes: false,
    }
}

/// The tiles of a product of `rows` rows; `None` where vectors are faster, or this CPU has no such
/// instructions.
pub(super) fn tiles_of(
    is_signed: bool,
    rows: usize,
    lhs: &Lhs,
    k: usize,
) -> Option<&'static Tiles> {
    let is_long =
        k * lhs.taps.max(1) >= LEAST_WORDS && Steps::of(k, lhs.taps).words() >= LEAST_STEP;
    let is_worth = rows >= LEAST_ROWS && is_long;
    (is_worth && is_available()).then(|| &TILES[usize::from(is_signed)])
}

/// Division of the summed words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Steps {
    /// Taps of a step; 1 where rows are at even distances.
    taps: usize,
    /// Words of each.
    words_per_tap: usize,
}

impl Steps {
    /// Equal steps of at most [`WORDS`] words.
    fn of(k: usize, taps: usize) -> Steps {
        let divisor = |n: usize, most: usize| {
            let divides = |&d: &usize| n.is_multiple_of(d);
            (1..=most.min(n)).rev().find(divides).unwrap_or(1)
        };
        if k == 0 || k > WORDS || taps == 0 {
            return Steps {
                taps: 1,
                words_per_tap: if k == 0 { 0 } else { divisor(k, WORDS) },
            };
        }
        Steps {
            taps: divisor(taps, WORDS / k),
            words_per_tap: k,
        }
    }

    fn words(self) -> usize {
        self.taps * self.words_per_tap
    }
}

/// The shape that the registers of this thread have: rows and words of a step.
#[derive(Default)]
pub(crate) struct Registers(Cell<(usize, usize)>);

impl Drop for Registers {
    fn drop(&mut self) {
        if self.0.get() != (0, 0) {
            // SAFETY: they have been configured, so the instruction is there.
            unsafe { asm!("tilerelease", options(nostack)) };
        }
    }
}

impl Registers {
    /// Gives the registers a shape.
    ///
    /// # Safety
    /// The instructions are available.
    #[inline(always)]
    unsafe fn shape(&self, rows: usize, words: usize) {
        if self.0.replace((rows, words)) != (rows, words) {
            let config = config(rows, words);
            // SAFETY: the shape is valid.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack)) };
        }
    }
}

/// True when this CPU has the instructions and the system lets this process use them.
fn is_available() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);
    if !super::tile::takes_amx() {
        return false;
    }
    match STATE.load(Ordering::Relaxed) {
        UNKNOWN => {
            let found = has_instructions() && is_permitted();
            STATE.store(if found { YES } else { NO }, Ordering::Relaxed);
            found
        }
        state => state == YES,
    }
}

/// AMX-TILE and AMX-INT8, and a system that keeps the registers.
fn has_instructions() -> bool {
    // Bits 24 and 25 of leaf 7; bits 17 and 18 of the state that the system keeps.
    const OF_CPU: u32 = 0b11 << 24;
    const OF_SYSTEM: u32 = 0b11 << 17;
    if !is_x86_feature_detected!("xsave") || __cpuid_count(0, 0).eax < 7 {
        return false;
    }
    let kept: u32;
    // SAFETY: `xgetbv` is there with `xsave` that the system has enabled, which detection includes.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") kept, out("edx") _, options(nomem, nostack));
    }
    __cpuid_count(7, 0).edx & OF_CPU == OF_CPU && kept & OF_SYSTEM == OF_SYSTEM
}

/// Asks Linux for the registers, which a process must do once; their state is large.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let status: i64;
    // SAFETY: a system call that reads and writes no memory of this process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => status,
            in("rdi") REQUEST,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    status == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Shapes of the registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0 to 3 are sums (two by two), 4 and 5 left-hand rows, 6 and 7 columns of the panel.
fn config(rows: usize, words: usize) -> Config {
    let (mut row_bytes, mut n_rows) = ([0; 16], [0; 16]);
    let (upper, lower) = (rows.min(ROWS), rows.saturating_sub(ROWS).max(1));
    let sums = (WORDS * 4) as u16;
    let shapes = [
        (upper, sums),
        (upper, sums),
        (lower, sums),
        (lower, sums),
        (upper, 4 * words as u16),
        (lower, 4 * words as u16),
        (words, sums),
        (words, sums),
    ];
    for (i, (rows, bytes)) in shapes.into_iter().enumerate() {
        (n_rows[i], row_bytes[i]) = (rows as u8, bytes);
    }
    Config {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes,
        rows: n_rows,
    }
}

/// The left-hand words of a step.
#[repr(C, align(64))]
struct Gathered([[i32; WORDS]; MAX_ROWS]);

/// Sums of a tile.
#[repr(C, align(64))]
struct Sums([[i32; NR]; MAX_ROWS]);

/// A tile of up to 32 rows by a panel.
///
/// # Safety
/// As for the tiles of `f32`; the instructions are available, and AVX-512.
unsafe fn tile<const SIGNED: bool>(t: &Tile) {
    // SAFETY: by contract.
    unsafe { compiled::<SIGNED>(t) }
}

/// # Safety
/// As for [`tile`].
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn compiled<const SIGNED: bool>(t: &Tile) {
    let steps = Steps::of(t.k, t.lhs.taps);
    let mut sums = std::mem::MaybeUninit::<Sums>::uninit();
    // SAFETY: the registers' shapes cover the rows of the tile, the words of a step and a panel's
    // columns, which the caller vouches for; all sums of the tile's rows are stored.
    unsafe {
        (*t.lhs.registers).shape(t.rows, steps.words());
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack),
        );
        if t.lhs.taps == 0 {
            strided::<SIGNED>(t, steps);
        } else {
            indirect::<SIGNED>(t, steps);
        }
        store(t.rows, sums.as_mut_ptr().cast());
        finish::<SIGNED>(t, sums.as_ptr().cast());
    }
}

/// # Safety
/// As for [`tile`], with configured registers.
#[inline(always)]
unsafe fn strided<const SIGNED: bool>(t: &Tile, steps: Steps) {
    let words = steps.words();
    let (mut a, mut b) = (t.lhs.a, t.b);
    for _ in 0..t.k.checked_div(words).unwrap_or(0) {
        // SAFETY: by contract.
        unsafe { multiply::<SIGNED>(t.rows, a, t.lhs.lda, b) };
        a = a.wrapping_add(words);
        b = b.wrapping_add(words * NR);
    }
}

/// # Safety
/// As for [`tile`], with configured registers.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn indirect<const SIGNED: bool>(t: &Tile, steps: Steps) {
    let mut buffers = std::mem::MaybeUninit::<[Gathered; 2]>::uninit();
    let buffers: *mut Gathered = buffers.as_mut_ptr().cast();
    let words = steps.words_per_tap.max(1);
    let (mut b, mut n_steps) = (t.b, 0);
    for tap in (0..t.lhs.taps).step_by(steps.taps) {
        for first in (0..t.k).step_by(words) {
            // Two buffers, so that the words of one step are written while those of the other are
            // read.
            let buffer: *mut i32 = buffers.wrapping_add(n_steps % 2).cast();
            // SAFETY: each row of each tap has `k` words, by contract, and the buffer those of a
            // step.
            unsafe {
                for i in 0..steps.taps {
                    gather(t, tap + i, first, words, buffer.add(i * words));
                }
                multiply::<SIGNED>(t.rows, buffer.cast(), WORDS, b);
            }
            b = b.wrapping_add(steps.words() * NR);
            n_steps += 1;
        }
    }
}

/// Copies some words of a tap of each row to the rows of a buffer.
///
/// # Safety
/// They are readable and writable.
#[inline(always)]
unsafe fn gather(t: &Tile, tap: usize, first: usize, words: usize, to: *mut i32) {
    let table = t.lhs.rows.wrapping_add(tap * t.lhs.tap_stride);
    let mask = ((1u32 << words) - 1) as u16;
    for r in 0..t.rows {
        // SAFETY: by contract, as far as the mask goes.
        unsafe {
            let row = (*table.add(r)).add(t.lhs.offset + first).cast();
            let x = _mm512_maskz_loadu_epi32(mask, row);
            _mm512_mask_storeu_epi32(to.add(r * WORDS), mask, x);
        }
    }
}

/// Adds the products of a step to the sums: rows at a distance of `lda` words by rows of a panel.
///
/// # Safety
/// The operands are readable as far as the registers' shapes say.
#[inline(always)]
unsafe fn multiply<const SIGNED: bool>(rows: usize, a: *const f32, lda: usize, b: *const f32) {
    macro_rules! upper {
        ($dot:literal) => {
            asm!(
                "tileloadd tmm4, [{a} + {lda}]",
                "tileloadd tmm6, [{b} + {ldb}]",
                concat!($dot, " tmm0, tmm4, tmm6"),
                "tileloadd tmm7, [{b} + {ldb} + 64]",
                concat!($dot, " tmm1, tmm4, tmm7"),
                a = in(reg) a,
                lda = in(reg) 4 * lda,
                b = in(reg) b,
                ldb = in(reg) 4 * NR,
                options(nostack),
            )
        };
    }
    macro_rules! both {
        ($dot:literal) => {
            asm!(
                "tileloadd tmm4, [{a} + {lda}]",
                "tileloadd tmm6, [{b} + {ldb}]",
                concat!($dot, " tmm0, tmm4, tmm6"),
                "tileloadd tmm7, [{b} + {ldb} + 64]",
                concat!($dot, " tmm1, tmm4, tmm7"),
                "tileloadd tmm5, [{lower} + {lda}]",
                concat!($dot, " tmm2, tmm5, tmm6"),
                concat!($dot, " tmm3, tmm5, tmm7"),
                a = in(reg) a,
                lower = in(reg) a.wrapping_add(ROWS * lda),
                lda = in(reg) 4 * lda,
                b = in(reg) b,
                ldb = in(reg) 4 * NR,
                options(nostack),
            )
        };
    }
    // SAFETY: by contract.
    unsafe {
        match (SIGNED, rows > ROWS) {
            (false, false) => upper!("tdpbusd"),
            (false, true) => both!("tdpbusd"),
            (true, false) => upper!("tdpbssd"),
            (true, true) => both!("tdpbssd"),
        }
    }
}

/// # Safety
/// `sums` has room for the tile's rows, [`NR`] words apart.
#[inline(always)]
unsafe fn store(rows: usize, sums: *mut i32) {
    // SAFETY: by contract.
    unsafe {
        asm!(
            "tilestored [{sums} + {ld}], tmm0",
            "tilestored [{sums} + {ld} + 64], tmm1",
            sums = in(reg) sums,
            ld = in(reg) 4 * NR,
            options(nostack),
        );
        if rows > ROWS {
            asm!(
                "tilestored [{sums} + {ld}], tmm2",
                "tilestored [{sums} + {ld} + 64], tmm3",
                sums = in(reg) sums.wrapping_add(ROWS * NR),
                ld = in(reg) 4 * NR,
                options(nostack),
            );
        }
    }
}

/// Subtracts zero points, applies the epilogue and stores.
///
/// # Safety
/// As for [`tile`], with the sums of its rows.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn finish<const SIGNED: bool>(t: &Tile, sums: *const i32) {
    // Signed bytes are multiplied as they are, without 128 added.
    let zero = t.zero - if SIGNED { 128 } else { 0 };
    let mut row = 0;
    while row < t.rows {
        let part = Tile {
            c: t.c.wrapping_add(row * t.ldc),
            fast: t.fast.at(row, 0),
            zero,
            ..*t
        };
        let sums = sums.wrapping_add(row * NR);
        // SAFETY: by contract.
        unsafe {
            row += match t.rows - row {
                4.. => rows::<4>(&part, sums),
                2.. => rows::<2>(&part, sums),
                _ => rows::<1>(&part, sums),
            };
        }
    }
}

/// The number of rows.
///
/// # Safety
/// As for [`finish`], of so many rows.
#[inline(always)]
unsafe fn rows<const MR: usize>(t: &Tile, sums: *const i32) -> usize {
    // SAFETY: AVX-512 is available.
    let s = unsafe { Avx512::new() };
    let mut acc = [[s.splat_i(0); 2]; MR];
    // SAFETY: by contract.
    unsafe {
        for (r, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = s.bits(s.load(sums.add(r * NR + v * Avx512::LANES).cast()));
            }
        }
        end(s, t, acc);
    }
    MR
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_divide_the_words() {
        let cases = [
            ((16, 0), (1, 16)),
            ((24, 0), (1, 12)),
            ((17, 0), (1, 1)),
            ((144, 0), (1, 16)),
            ((16, 9), (1, 16)),
            ((40, 9), (1, 10)),
            ((3, 3), (3, 3)),
            ((7, 7), (1, 7)),
            ((1, 9), (9, 1)),
            ((2, 49), (7, 2)),
            ((0, 9), (1, 0)),
        ];
        for ((k, taps), (taps_of_step, words_per_tap)) in cases {
            let expected = Steps {
                taps: taps_of_step,
                words_per_tap,
            };
            assert_eq!(Steps::of(k, taps), expected, "{k} words of {taps} taps");
        }
    }
}
