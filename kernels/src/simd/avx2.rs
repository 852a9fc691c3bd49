//! AVX2 and FMA: 8 lanes.

use super::{Simd, Task};
use std::arch::x86_64::*;

/// Token of AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

/// # Safety
/// As for [`super::dispatch`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn enter<T: Task>(task: T) -> T::Out {
    // SAFETY: this function's own features, and the caller's word for the task.
    unsafe { task.run(Avx2::new()) }
}

/// Eight set lanes, then eight clear ones: a load at `8 - n` has the first `n` set.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

impl Avx2 {
    #[inline(always)]
    fn lanes_mask(self, n: usize) -> __m256i {
        // SAFETY: the offset is at most 8, and 16 entries are there.
        unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8 - n.min(8)).cast()) }
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    type F = __m256;
    type I = __m256i;
    type M = __m256;
    type D = (__m256d, __m256d);

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: readable by contract.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> __m256 {
        // SAFETY: masked-out lanes are not accessed; the others are readable by contract.
        unsafe { _mm256_maskload_ps(p, self.lanes_mask(n)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: __m256) {
        // SAFETY: writable by contract.
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize, x: __m256) {
        // SAFETY: masked-out lanes are not accessed; the others are writable by contract.
        unsafe { _mm256_maskstore_ps(p, self.lanes_mask(n), x) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize, x: __m256i) {
        // SAFETY: the lowest bytes of four lanes go to the start of each half; at most 8 bytes,
        // which are writable by contract, are stored.
        unsafe {
            let lowest = _mm256_shuffle_epi8(x, _mm256_set1_epi32(0x0c08_0400));
            let low = _mm_cvtsi128_si32(_mm256_castsi256_si128(lowest)) as u32;
            let high = _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(lowest)) as u32;
            let bytes = (u64::from(low) | u64::from(high) << 32).to_le_bytes();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, n.min(8));
        }
    }
    #[inline(always)]
    unsafe fn store_byte_rows(self, to: [*mut u8; 2], x: [[__m256i; 2]; 2]) {
        // SAFETY: writable by contract.
        unsafe {
            let upper = _mm256_packs_epi32(x[0][0], x[0][1]);
            let lower = _mm256_packs_epi32(x[1][0], x[1][1]);
            let bytes = _mm256_packus_epi16(upper, lower);
            // Words of four bytes in a half: first and second vector of the one row, then of the other.
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let rows = _mm256_permutevar8x32_epi32(bytes, order);
            _mm_storeu_si128(to[0].cast(), _mm256_castsi256_si128(rows));
            _mm_storeu_si128(to[1].cast(), _mm256_extracti128_si256::<1>(rows));
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: a hint; every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn transpose(self, rows: [__m256; 16]) -> [__m256; 16] {
        // SAFETY: no memory access; the token exists only where the CPU has these instructions.
        unsafe { transpose(rows) }
    }

    compute! {
        fn splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn splat_i(x: i32) -> __m256i { _mm256_set1_epi32(x) }
        fn splat_d(x: f64) -> Self::D { (_mm256_set1_pd(x), _mm256_set1_pd(x)) }
        fn add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fn sqrt(a: __m256) -> __m256 { _mm256_sqrt_ps(a) }
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        fn min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        fn bits(a: __m256) -> __m256i { _mm256_castps_si256(a) }
        fn as_float(a: __m256i) -> __m256 { _mm256_castsi256_ps(a) }
        fn to_float(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        fn to_int(a: __m256) -> __m256i { _mm256_cvtps_epi32(a) }
        fn add_i(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn sub_i(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        fn mul_i(a: __m256i, b: __m256i) -> __m256i { _mm256_mullo_epi32(a, b) }
        fn dot_bytes(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
            // As for AVX-512.
            {
                let even = _mm256_madd_epi16(
                    _mm256_and_si256(a, _mm256_set1_epi16(255)),
                    _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b)),
                );
                let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(a), _mm256_srai_epi16::<8>(b));
                _mm256_add_epi32(acc, _mm256_add_epi32(even, odd))
            }
        }
        fn and(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn xor(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        fn shl(a: __m256i, n: u32) -> __m256i { _mm256_sllv_epi32(a, _mm256_set1_epi32(n as i32)) }
        fn sar(a: __m256i, n: u32) -> __m256i { _mm256_srav_epi32(a, _mm256_set1_epi32(n as i32)) }
        fn lt(a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) }
        fn le(a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_LE_OQ>(a, b) }
        fn eq(a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b) }
        fn eq_i(a: __m256i, b: __m256i) -> __m256 { _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)) }
        fn select(m: __m256, a: __m256, b: __m256) -> __m256 { _mm256_blendv_ps(b, a, m) }
        fn and_m(a: __m256, b: __m256) -> __m256 { _mm256_and_ps(a, b) }
        fn or_m(a: __m256, b: __m256) -> __m256 { _mm256_or_ps(a, b) }
        fn any(m: __m256) -> bool { _mm256_movemask_ps(m) != 0 }
        fn widen(a: __m256) -> Self::D {
            {
                let (low, high) = (_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                (_mm256_cvtps_pd(low), _mm256_cvtps_pd(high))
            }
        }
        fn narrow(a: Self::D) -> __m256 {
            _mm256_set_m128(_mm256_cvtpd_ps(a.1), _mm256_cvtpd_ps(a.0))
        }
        fn sub_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm256_sub_pd(a.0, b.0), _mm256_sub_pd(a.1, b.1))
        }
        fn add_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm256_add_pd(a.0, b.0), _mm256_add_pd(a.1, b.1))
        }
        fn div_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm256_div_pd(a.0, b.0), _mm256_div_pd(a.1, b.1))
        }
        fn mul_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm256_mul_pd(a.0, b.0), _mm256_mul_pd(a.1, b.1))
        }
        fn fma_d(a: Self::D, b: Self::D, c: Self::D) -> Self::D {
            (_mm256_fmadd_pd(a.0, b.0, c.0), _mm256_fmadd_pd(a.1, b.1, c.1))
        }
        fn sum(a: __m256) -> f32 {
            {
                let half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
                _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
            }
        }
        fn largest(a: __m256) -> f32 {
            {
                let half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
                _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
            }
        }
    }
}

/// Pairs, then quadruples within 128-bit halves, then the halves themselves.
///
/// # Safety
/// The CPU has AVX.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn transpose(r: [__m256; 16]) -> [__m256; 16] {
    let mut quads = r;
    for i in [0, 4] {
        let low = [
            _mm256_unpacklo_ps(r[i], r[i + 1]),
            _mm256_unpacklo_ps(r[i + 2], r[i + 3]),
        ];
        let high = [
            _mm256_unpackhi_ps(r[i], r[i + 1]),
            _mm256_unpackhi_ps(r[i + 2], r[i + 3]),
        ];
        quads[i] = _mm256_shuffle_ps::<0x44>(low[0], low[1]);
        quads[i + 1] = _mm256_shuffle_ps::<0xee>(low[0], low[1]);
        quads[i + 2] = _mm256_shuffle_ps::<0x44>(high[0], high[1]);
        quads[i + 3] = _mm256_shuffle_ps::<0xee>(high[0], high[1]);
    }
    let mut out = r;
    for c in 0..4 {
        out[c] = _mm256_permute2f128_ps::<0x20>(quads[c], quads[4 + c]);
        out[4 + c] = _mm256_permute2f128_ps::<0x31>(quads[c], quads[4 + c]);
    }
    out
}
