//! One interface over the vector instruction sets. A kernel is written once, generic over [`Simd`],
//! and compiled for each set.
//!
//! A value of a `Simd` type is a token: it exists only where the CPU was found to have the
//! instructions, so arithmetic through it is safe, and only memory access is not. Everything is
//! `inline(always)`, so that the code lands in the `target_feature` function that [`dispatch`]
//! enters; a generic function over `Simd` that is not inlined would call the intrinsics one by one.

/// Wraps intrinsics without memory access: the token proves that the CPU has them.
#[cfg(target_arch = "x86_64")]
macro_rules! compute {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty { $body:expr })*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $out {
            // SAFETY: no memory access; the token exists only where the CPU has these instructions.
            unsafe { $body }
        })*
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

use crate::isa::Isa;

/// Vector arithmetic of one instruction set: f32 and i32 lanes, masks, and pairs of f64 vectors
/// with as many lanes.
pub(crate) trait Simd: Copy + 'static {
    /// Lanes of an f32 vector.
    const LANES: usize;
    /// f32 lanes.
    type F: Copy;
    /// i32 lanes.
    type I: Copy;
    /// A truth value per lane.
    type M: Copy;
    /// f64 lanes, as many as of `F`.
    type D: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn splat_i(self, x: i32) -> Self::I;
    fn splat_d(self, x: f64) -> Self::D;

    /// # Safety
    /// `p` is readable for `LANES` elements.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// Zero beyond lane `n`.
    /// # Safety
    /// `p` is readable for `min(n, LANES)` elements.
    unsafe fn load_n(self, p: *const f32, n: usize) -> Self::F;
    /// # Safety
    /// `p` is writable for `LANES` elements.
    unsafe fn store(self, p: *mut f32, x: Self::F);
    /// # Safety
    /// `p` is writable for `min(n, LANES)` elements.
    unsafe fn store_n(self, p: *mut f32, n: usize, x: Self::F);
    /// Hints a read of the cache line of `p` soon; `p` need not be valid.
    fn prefetch(self, p: *const f32);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b + c`, rounded once or twice, whichever is faster.
    #[inline(always)]
    fn mul_acc(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.fma(a, b, c)
    }
    /// `a > b ? a : b`: the second operand if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`: the second operand if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;

    /// The lanes' bits.
    fn bits(self, a: Self::F) -> Self::I;
    fn as_float(self, a: Self::I) -> Self::F;
    /// Conversion of integer values, rounded to nearest.
    fn to_float(self, a: Self::I) -> Self::F;
    /// Rounded to the nearest, ties to even, for numbers of `i32`.
    fn to_int(self, a: Self::F) -> Self::I;
    /// Stores the lowest byte of each of the first `n` lanes.
    /// # Safety
    /// `p` is writable for `min(n, LANES)` bytes.
    unsafe fn store_bytes(self, p: *mut u8, n: usize, x: Self::I);
    /// Stores numbers from 0 to 255 as bytes: two vectors side by side at each of two places.
    /// # Safety
    /// `2 * LANES` bytes are writable at each.
    #[inline(always)]
    unsafe fn store_byte_rows(self, to: [*mut u8; 2], x: [[Self::I; 2]; 2]) {
        for (to, x) in to.into_iter().zip(x) {
            // SAFETY: by contract.
            unsafe {
                self.store_bytes(to, Self::LANES, x[0]);
                self.store_bytes(to.add(Self::LANES), Self::LANES, x[1]);
            }
        }
    }
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// The low halves of the products.
    fn mul_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// `acc + a0 b0 + a1 b1 + a2 b2 + a3 b3` of the bytes of each lane, `a`'s unsigned and `b`'s
    /// signed; wraps.
    fn dot_bytes(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl(self, a: Self::I, n: u32) -> Self::I;
    /// Shift copying the sign.
    fn sar(self, a: Self::I, n: u32) -> Self::I;

    /// False where either is NaN.
    fn lt(self, a: Self::F, b: Self::F) -> Self::M;
    /// False where either is NaN.
    fn le(self, a: Self::F, b: Self::F) -> Self::M;
    /// False where either is NaN.
    fn eq(self, a: Self::F, b: Self::F) -> Self::M;
    fn eq_i(self, a: Self::I, b: Self::I) -> Self::M;
    /// `m ? a : b`.
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F;
    fn and_m(self, a: Self::M, b: Self::M) -> Self::M;
    fn or_m(self, a: Self::M, b: Self::M) -> Self::M;
    fn any(self, m: Self::M) -> bool;

    fn widen(self, a: Self::F) -> Self::D;
    fn narrow(self, a: Self::D) -> Self::F;
    fn sub_d(self, a: Self::D, b: Self::D) -> Self::D;
    fn add_d(self, a: Self::D, b: Self::D) -> Self::D;
    fn mul_d(self, a: Self::D, b: Self::D) -> Self::D;
    fn div_d(self, a: Self::D, b: Self::D) -> Self::D;
    /// `a * b + c`; one rounding except in the portable form.
    fn fma_d(self, a: Self::D, b: Self::D, c: Self::D) -> Self::D;

    /// Transposes the square of the first `LANES` vectors, bits unchanged.
    fn transpose(self, rows: [Self::F; 16]) -> [Self::F; 16];

    /// Sum of the lanes, by halves.
    fn sum(self, a: Self::F) -> f32;
    /// The sum of the lanes of each of the first `LANES` vectors.
    #[inline(always)]
    fn sums(self, rows: [Self::F; 16]) -> Self::F {
        let mut columns = self.transpose(rows);
        let mut n = Self::LANES;
        while n > 1 {
            n /= 2;
            for i in 0..n {
                columns[i] = self.add(columns[i], columns[i + n]);
            }
        }
        columns[0]
    }
    /// The largest lane, none being NaN.
    fn largest(self, a: Self::F) -> f32;

    /// `x * 2^n`, rounded once, for |n| <= 252 given as float and integer, and 1/2 <= |x| <= 2 or
    /// NaN.
    #[inline(always)]
    fn scale(self, x: Self::F, _: Self::F, n: Self::I) -> Self::F {
        // Two factors, since one alone may be no normal number; the first product is exact.
        let power = |n| self.as_float(self.shl(self.add_i(n, self.splat_i(127)), 23));
        let half = self.sar(n, 1);
        self.mul(self.mul(x, power(half)), power(self.sub_i(n, half)))
    }

    #[inline(always)]
    fn zero(self) -> Self::F {
        self.splat(0.0)
    }
    #[inline(always)]
    fn neg(self, a: Self::F) -> Self::F {
        self.as_float(self.xor(self.bits(a), self.splat_i(i32::MIN)))
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        self.as_float(self.and(self.bits(a), self.splat_i(i32::MAX)))
    }
    /// The magnitude of `a` with the sign of `b`.
    #[inline(always)]
    fn copysign(self, a: Self::F, b: Self::F) -> Self::F {
        let sign = self.and(self.bits(b), self.splat_i(i32::MIN));
        self.as_float(self.or(self.and(self.bits(a), self.splat_i(i32::MAX)), sign))
    }
}

/// Code generic over the instruction set. `run` must be `inline(always)`.
pub(crate) trait Task {
    /// Type of the result.
    type Out;
    /// # Safety
    /// The contract of the implementation, which speaks of its fields.
    unsafe fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// Runs `task` compiled for `isa`.
///
/// # Safety
/// The task's contract holds, and `isa` is available.
#[inline]
pub(crate) unsafe fn dispatch<T: Task>(isa: Isa, task: T) -> T::Out {
    // SAFETY: the caller vouches for the task's contract and for the instructions of `isa`.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::enter(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::enter(task),
            _ => task.run(Portable),
        }
    }
}
