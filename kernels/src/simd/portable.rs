//! Plain Rust: 4 lanes, left to the compiler's own vectoriser.

use super::Simd;
use std::array::from_fn;

/// The token that every CPU has.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// True when `f32::mul_add` is an instruction of the target.
const HAS_FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

macro_rules! lanes {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = |$i:ident| $body:expr;)*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $out {
            from_fn(|$i| $body)
        })*
    };
}

type F = [f32; 4];
type I = [i32; 4];
type M = [bool; 4];
type D = [f64; 4];

impl Simd for Portable {
    const LANES: usize = 4;
    type F = F;
    type I = I;
    type M = M;
    type D = D;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; 4]
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        [x; 4]
    }
    #[inline(always)]
    fn splat_d(self, x: f64) -> D {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: readable by contract; an f32 array needs no more alignment than its elements.
        unsafe { p.cast::<F>().read() }
    }
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> F {
        let mut out = [0.0; 4];
        for (i, lane) in out.iter_mut().enumerate().take(n) {
            // SAFETY: lanes below `n` are readable by contract.
            *lane = unsafe { *p.add(i) };
        }
        out
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: F) {
        // SAFETY: writable by contract.
        unsafe { p.cast::<F>().write(x) }
    }
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize, x: F) {
        for (i, lane) in x.iter().enumerate().take(n) {
            // SAFETY: lanes below `n` are writable by contract.
            unsafe { *p.add(i) = *lane };
        }
    }
    #[inline(always)]
    fn prefetch(self, _: *const f32) {}

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize, x: I) {
        for (i, lane) in x.into_iter().enumerate().take(n) {
            // SAFETY: lanes below `n` are writable by contract.
            unsafe { *p.add(i) = lane as u8 };
        }
    }

    lanes! {
        fn add(a: F, b: F) -> F = |i| a[i] + b[i];
        fn sub(a: F, b: F) -> F = |i| a[i] - b[i];
        fn mul(a: F, b: F) -> F = |i| a[i] * b[i];
        fn div(a: F, b: F) -> F = |i| a[i] / b[i];
        fn sqrt(a: F) -> F = |i| a[i].sqrt();
        // Without the instruction, the product in f64 is exact, so only a tie of the second
        // rounding can differ.
        fn fma(a: F, b: F, c: F) -> F = |i| if HAS_FMA { a[i].mul_add(b[i], c[i]) } else {
            (f64::from(a[i]) * f64::from(b[i]) + f64::from(c[i])) as f32
        };
        fn mul_acc(a: F, b: F, c: F) -> F = |i| if HAS_FMA { a[i].mul_add(b[i], c[i]) } else {
            a[i] * b[i] + c[i]
        };
        fn max(a: F, b: F) -> F = |i| if a[i] > b[i] { a[i] } else { b[i] };
        fn min(a: F, b: F) -> F = |i| if a[i] < b[i] { a[i] } else { b[i] };
        fn bits(a: F) -> I = |i| a[i].to_bits() as i32;
        fn as_float(a: I) -> F = |i| f32::from_bits(a[i] as u32);
        fn to_float(a: I) -> F = |i| a[i] as f32;
        fn to_int(a: F) -> I = |i| a[i].round_ties_even() as i32;
        fn add_i(a: I, b: I) -> I = |i| a[i].wrapping_add(b[i]);
        fn sub_i(a: I, b: I) -> I = |i| a[i].wrapping_sub(b[i]);
        fn mul_i(a: I, b: I) -> I = |i| a[i].wrapping_mul(b[i]);
        fn dot_bytes(acc: I, a: I, b: I) -> I = |i| {
            let (a, b) = (a[i].to_le_bytes(), b[i].to_le_bytes());
            (0..4).fold(acc[i], |sum, j| sum.wrapping_add(i32::from(a[j]) * i32::from(b[j] as i8)))
        };
        fn and(a: I, b: I) -> I = |i| a[i] & b[i];
        fn or(a: I, b: I) -> I = |i| a[i] | b[i];
        fn xor(a: I, b: I) -> I = |i| a[i] ^ b[i];
        fn shl(a: I, n: u32) -> I = |i| a[i] << n;
        fn sar(a: I, n: u32) -> I = |i| a[i] >> n;
        fn lt(a: F, b: F) -> M = |i| a[i] < b[i];
        fn le(a: F, b: F) -> M = |i| a[i] <= b[i];
        fn eq(a: F, b: F) -> M = |i| a[i] == b[i];
        fn eq_i(a: I, b: I) -> M = |i| a[i] == b[i];
        fn and_m(a: M, b: M) -> M = |i| a[i] & b[i];
        fn or_m(a: M, b: M) -> M = |i| a[i] | b[i];
        fn select(m: M, a: F, b: F) -> F = |i| if m[i] { a[i] } else { b[i] };
        fn widen(a: F) -> D = |i| f64::from(a[i]);
        fn narrow(a: D) -> F = |i| a[i] as f32;
        fn sub_d(a: D, b: D) -> D = |i| a[i] - b[i];
        fn add_d(a: D, b: D) -> D = |i| a[i] + b[i];
        fn div_d(a: D, b: D) -> D = |i| a[i] / b[i];
        fn mul_d(a: D, b: D) -> D = |i| a[i] * b[i];
        fn fma_d(a: D, b: D, c: D) -> D = |i| if HAS_FMA { a[i].mul_add(b[i], c[i]) } else {
            a[i] * b[i] + c[i]
        };
    }

    #[inline(always)]
    fn transpose(self, rows: [F; 16]) -> [F; 16] {
        from_fn(|j| from_fn(|i| if j < 4 { rows[i][j] } else { 0.0 }))
    }
    #[inline(always)]
    fn any(self, m: M) -> bool {
        m[0] | m[1] | m[2] | m[3]
    }
    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        (a[0] + a[2]) + (a[1] + a[3])
    }
    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        a[0].max(a[2]).max(a[1].max(a[3]))
    }
}
