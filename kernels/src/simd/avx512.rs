//! AVX-512: 16 lanes, masked memory access.

use super::{Simd, Task};
use std::arch::x86_64::*;

/// Token of AVX-512 F, VL, BW and DQ.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU has AVX-512 F, VL, BW and DQ.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

/// # Safety
/// As for [`super::dispatch`].
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn enter<T: Task>(task: T) -> T::Out {
    // SAFETY: this function's own features, and the caller's word for the task.
    unsafe { task.run(Avx512::new()) }
}

#[inline(always)]
fn lanes_mask(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1u16 << n) - 1 }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    type F = __m512;
    type I = __m512i;
    type M = __mmask16;
    type D = (__m512d, __m512d);

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: readable by contract.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> __m512 {
        // SAFETY: masked-out lanes are not accessed; the others are readable by contract.
        unsafe { _mm512_maskz_loadu_ps(lanes_mask(n), p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: __m512) {
        // SAFETY: writable by contract.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize, x: __m512) {
        // SAFETY: masked-out lanes are not accessed; the others are writable by contract.
        unsafe { _mm512_mask_storeu_ps(p, lanes_mask(n), x) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize, x: __m512i) {
        // Narrowed in a register: narrowing stores take some 80 cycles on AMD.
        // SAFETY: masked-out lanes are not accessed; the others are writable by contract.
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(x);
            if n >= 16 {
                _mm_storeu_si128(p.cast(), bytes);
            } else {
                _mm_mask_storeu_epi8(p.cast(), lanes_mask(n), bytes);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_byte_rows(self, to: [*mut u8; 2], x: [[__m512i; 2]; 2]) {
        // SAFETY: writable by contract.
        unsafe {
            let upper = _mm512_packs_epi32(x[0][0], x[0][1]);
            let lower = _mm512_packs_epi32(x[1][0], x[1][1]);
            let bytes = _mm512_packus_epi16(upper, lower);
            // Words of four bytes in a quarter: first and second vector of the one row, then of the other.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let rows = _mm512_permutexvar_epi32(order, bytes);
            _mm256_storeu_si256(to[0].cast(), _mm512_castsi512_si256(rows));
            _mm256_storeu_si256(to[1].cast(), _mm512_extracti64x4_epi64::<1>(rows));
        }
    }
    #[inline(always)]
    fn and_m(self, a: __mmask16, b: __mmask16) -> __mmask16 {
        a & b
    }
    #[inline(always)]
    fn or_m(self, a: __mmask16, b: __mmask16) -> __mmask16 {
        a | b
    }
    #[inline(always)]
    fn any(self, m: __mmask16) -> bool {
        m != 0
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: a hint; every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn transpose(self, rows: [__m512; 16]) -> [__m512; 16] {
        // SAFETY: no memory access; the token exists only where the CPU has these instructions.
        unsafe { transpose(rows) }
    }

    #[inline(always)]
    fn sums(self, rows: [__m512; 16]) -> __m512 {
        // SAFETY: no memory access; the token exists only where the CPU has these instructions.
        unsafe { sums(rows) }
    }

    #[inline(always)]
    fn scale(self, x: __m512, n: __m512, _: __m512i) -> __m512 {
        // SAFETY: no memory access; the token exists only where the CPU has these instructions.
        unsafe { _mm512_scalef_ps(x, n) }
    }

    compute! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn splat_i(x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn splat_d(x: f64) -> Self::D { (_mm512_set1_pd(x), _mm512_set1_pd(x)) }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn sqrt(a: __m512) -> __m512 { _mm512_sqrt_ps(a) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn bits(a: __m512) -> __m512i { _mm512_castps_si512(a) }
        fn as_float(a: __m512i) -> __m512 { _mm512_castsi512_ps(a) }
        fn to_float(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn to_int(a: __m512) -> __m512i { _mm512_cvtps_epi32(a) }
        fn add_i(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn sub_i(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn mul_i(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        fn dot_bytes(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
            // Bytes as halves of 16 bits: odd ones by a shift, even ones by a mask or two shifts.
            // Pairs of products are exact in 32 bits.
            {
                let even = _mm512_madd_epi16(
                    _mm512_and_si512(a, _mm512_set1_epi16(255)),
                    _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(b)),
                );
                let odd = _mm512_madd_epi16(_mm512_srli_epi16::<8>(a), _mm512_srai_epi16::<8>(b));
                _mm512_add_epi32(acc, _mm512_add_epi32(even, odd))
            }
        }
        fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn xor(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn shl(a: __m512i, n: u32) -> __m512i { _mm512_sllv_epi32(a, _mm512_set1_epi32(n as i32)) }
        fn sar(a: __m512i, n: u32) -> __m512i { _mm512_srav_epi32(a, _mm512_set1_epi32(n as i32)) }
        fn lt(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
        fn le(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b) }
        fn eq(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
        fn eq_i(a: __m512i, b: __m512i) -> __mmask16 { _mm512_cmpeq_epi32_mask(a, b) }
        fn select(m: __mmask16, a: __m512, b: __m512) -> __m512 { _mm512_mask_blend_ps(m, b, a) }
        fn widen(a: __m512) -> Self::D {
            {
                let (low, high) = (_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
                (_mm512_cvtps_pd(low), _mm512_cvtps_pd(high))
            }
        }
        fn narrow(a: Self::D) -> __m512 {
            {
                let low = _mm512_castps256_ps512(_mm512_cvtpd_ps(a.0));
                _mm512_insertf32x8::<1>(low, _mm512_cvtpd_ps(a.1))
            }
        }
        fn sub_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm512_sub_pd(a.0, b.0), _mm512_sub_pd(a.1, b.1))
        }
        fn add_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm512_add_pd(a.0, b.0), _mm512_add_pd(a.1, b.1))
        }
        fn div_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm512_div_pd(a.0, b.0), _mm512_div_pd(a.1, b.1))
        }
        fn mul_d(a: Self::D, b: Self::D) -> Self::D {
            (_mm512_mul_pd(a.0, b.0), _mm512_mul_pd(a.1, b.1))
        }
        fn fma_d(a: Self::D, b: Self::D, c: Self::D) -> Self::D {
            (_mm512_fmadd_pd(a.0, b.0, c.0), _mm512_fmadd_pd(a.1, b.1, c.1))
        }
        fn sum(a: __m512) -> f32 { _mm512_reduce_add_ps(a) }
        fn largest(a: __m512) -> f32 { _mm512_reduce_max_ps(a) }
    }
}

/// Pairs, then quadruples within 128-bit parts, then the parts themselves.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose(r: [__m512; 16]) -> [__m512; 16] {
    let mut quads = r;
    for i in (0..16).step_by(4) {
        let low = [
            _mm512_unpacklo_ps(r[i], r[i + 1]),
            _mm512_unpacklo_ps(r[i + 2], r[i + 3]),
        ]
        .map(|x| _mm512_castps_pd(x));
        let high = [
            _mm512_unpackhi_ps(r[i], r[i + 1]),
            _mm512_unpackhi_ps(r[i + 2], r[i + 3]),
        ]
        .map(|x| _mm512_castps_pd(x));
        // Vector `i + c` holds column `4 p + c` of rows `i..i + 4` in part `p`.
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low[0], low[1]));
        quads[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low[0], low[1]));
        quads[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high[0], high[1]));
        quads[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high[0], high[1]));
    }
    let mut out = r;
    for c in 0..4 {
        let even_top = _mm512_shuffle_f32x4::<0x88>(quads[c], quads[4 + c]);
        let odd_top = _mm512_shuffle_f32x4::<0xdd>(quads[c], quads[4 + c]);
        let even_bottom = _mm512_shuffle_f32x4::<0x88>(quads[8 + c], quads[12 + c]);
        let odd_bottom = _mm512_shuffle_f32x4::<0xdd>(quads[8 + c], quads[12 + c]);
        out[c] = _mm512_shuffle_f32x4::<0x88>(even_top, even_bottom);
        out[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd_top, odd_bottom);
        out[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even_top, even_bottom);
        out[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd_top, odd_bottom);
    }
    out
}

/// Sums of lanes, halving at each step the vectors and the lanes that a row has in them.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn sums(r: [__m512; 16]) -> __m512 {
    let singles = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let pairs = |a, b| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    };
    let quads = |a, b| {
        let even = _mm512_shuffle_f32x4::<0x88>(a, b);
        _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(a, b))
    };
    // Part `p` of vector `i` holds sums of part `p` of rows `4 i..4 i + 4`.
    let four = [0, 4, 8, 12].map(|i| pairs(singles(r[i], r[i + 1]), singles(r[i + 2], r[i + 3])));
    quads(quads(four[0], four[1]), quads(four[2], four[3]))
}
