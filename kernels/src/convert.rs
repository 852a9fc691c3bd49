//! Conversion of arrays between f32 and the 16-bit float formats, rounding to nearest even.

use crate::isa::Isa;
use half::{bf16, f16};

/// `fn(n, src, dst)`: widens `n` 16-bit floats, given as their bits.
pub type WidenFn = unsafe extern "C" fn(n: usize, src: *const u16, dst: *mut f32);
/// `fn(n, src, dst)`: narrows `n` floats to 16-bit ones, given as their bits.
pub type NarrowFn = unsafe extern "C" fn(n: usize, src: *const f32, dst: *mut u16);

/// Widens f16.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` elements; they do not overlap. The CPU has the
/// instruction set of number `ISA`.
pub unsafe extern "C" fn gm_f16_to_f32<const ISA: u32>(n: usize, src: *const u16, dst: *mut f32) {
    // SAFETY: by contract.
    unsafe { widen_f16(Isa::of::<ISA>(), n, src, dst) }
}

/// Narrows to f16; overflow gives infinity, NaN stays NaN.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` elements; they do not overlap. The CPU has the
/// instruction set of number `ISA`.
pub unsafe extern "C" fn gm_f32_to_f16<const ISA: u32>(n: usize, src: *const f32, dst: *mut u16) {
    // SAFETY: by contract.
    unsafe { narrow_f16(Isa::of::<ISA>(), n, src, dst) }
}

/// Widens bf16.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` elements; they do not overlap. The CPU has the
/// instruction set of number `ISA`.
pub unsafe extern "C" fn gm_bf16_to_f32<const ISA: u32>(n: usize, src: *const u16, dst: *mut f32) {
    // SAFETY: by contract.
    unsafe { widen_bf16(Isa::of::<ISA>(), n, src, dst) }
}

/// Narrows to bf16; NaN stays NaN.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` elements; they do not overlap. The CPU has the
/// instruction set of number `ISA`.
pub unsafe extern "C" fn gm_f32_to_bf16<const ISA: u32>(n: usize, src: *const f32, dst: *mut u16) {
    // SAFETY: by contract.
    unsafe { narrow_bf16(Isa::of::<ISA>(), n, src, dst) }
}

#[inline(always)]
fn narrow_bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    // Ties to even: half of the dropped part, less one where the remaining part is even.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could turn a NaN into an infinity.
    if x.is_nan() {
        ((bits >> 16) | 0x40) as u16
    } else {
        rounded as u16
    }
}

/// Functions over whole arrays, compiled for each instruction set and left to the vectoriser.
macro_rules! by_isa {
    ($($name:ident($from:ty, $to:ty) = $element:expr;)*) => {
        $(
            /// # Safety
            /// `src` is readable and `dst` writable for `n` elements; `isa` is available.
            unsafe fn $name(isa: Isa, n: usize, src: *const $from, dst: *mut $to) {
                #[inline(always)]
                unsafe fn each(n: usize, src: *const $from, dst: *mut $to) {
                    for i in 0..n {
                        // SAFETY: below `n`.
                        unsafe { *dst.add(i) = $element(*src.add(i)) };
                    }
                }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
                unsafe fn avx512(n: usize, src: *const $from, dst: *mut $to) {
                    // SAFETY: by contract.
                    unsafe { each(n, src, dst) }
                }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2(n: usize, src: *const $from, dst: *mut $to) {
                    // SAFETY: by contract.
                    unsafe { each(n, src, dst) }
                }
                // SAFETY: by contract.
                unsafe {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 => avx512(n, src, dst),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 => avx2(n, src, dst),
                        _ => each(n, src, dst),
                    }
                }
            }
        )*
    };
}

by_isa! {
    widen_bf16(u16, f32) = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    narrow_bf16(f32, u16) = narrow_bf16_bits;
}

/// # Safety
/// `src` is readable and `dst` writable for `n` elements; `isa` is available.
unsafe fn widen_f16(isa: Isa, n: usize, src: *const u16, dst: *mut f32) {
    // SAFETY: vectors first, the rest one by one, all below `n`.
    unsafe {
        let done = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => x86::widen_f16(n, src, dst),
            _ => 0,
        };
        for i in done..n {
            *dst.add(i) = f16::from_bits(*src.add(i)).to_f32();
        }
    }
}

/// # Safety
/// `src` is readable and `dst` writable for `n` elements; `isa` is available.
unsafe fn narrow_f16(isa: Isa, n: usize, src: *const f32, dst: *mut u16) {
    // SAFETY: vectors first, the rest one by one, all below `n`.
    unsafe {
        let done = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => x86::narrow_f16(n, src, dst),
            _ => 0,
        };
        for i in done..n {
            *dst.add(i) = f16::from_f32(*src.add(i)).to_bits();
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Converts whole vectors and returns how many elements that were. Eight lanes: the
    /// conversion's throughput is the memory's.
    ///
    /// # Safety
    /// `src` is readable and `dst` writable for `n` elements; the CPU has F16C.
    #[target_feature(enable = "avx,f16c")]
    pub(super) unsafe fn widen_f16(n: usize, src: *const u16, dst: *mut f32) -> usize {
        let n = n - n % 8;
        for i in (0..n).step_by(8) {
            // SAFETY: whole vectors below `n`.
            unsafe {
                _mm256_storeu_ps(
                    dst.add(i),
                    _mm256_cvtph_ps(_mm_loadu_si128(src.add(i).cast())),
                )
            };
        }
        n
    }

    /// As [`widen_f16`], the other way.
    ///
    /// # Safety
    /// As for [`widen_f16`].
    #[target_feature(enable = "avx,f16c")]
    pub(super) unsafe fn narrow_f16(n: usize, src: *const f32, dst: *mut u16) -> usize {
        let n = n - n % 8;
        for i in (0..n).step_by(8) {
            // SAFETY: whole vectors below `n`.
            unsafe {
                let half =
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(src.add(i)));
                _mm_storeu_si128(dst.add(i).cast(), half);
            }
        }
        n
    }
}

/// For generated code's tests and folding: one value through bf16 and back.
pub fn round_to_bf16(x: f32) -> f32 {
    bf16::from_bits(narrow_bf16_bits(x)).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    fn bits_agree(a: u16, b: u16, is_nan: bool) -> bool {
        a == b || is_nan
    }

    #[test]
    fn every_16_bit_pattern_is_widened_exactly_and_back() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for isa in Isa::available() {
            let mut wide = vec![0f32; all.len()];
            let mut back = vec![0u16; all.len()];
            // SAFETY: all arrays have the same length.
            unsafe {
                widen_f16(isa, all.len(), all.as_ptr(), wide.as_mut_ptr());
                narrow_f16(isa, all.len(), wide.as_ptr(), back.as_mut_ptr());
            }
            for (i, &bits) in all.iter().enumerate() {
                let want = f16::from_bits(bits);
                assert!(
                    wide[i] == want.to_f32() || (wide[i].is_nan() && want.is_nan()),
                    "{isa} {bits:#x}"
                );
                assert!(
                    bits_agree(
                        back[i],
                        bits,
                        want.is_nan() && f16::from_bits(back[i]).is_nan()
                    ),
                    "{isa} {bits:#x}"
                );
            }
            // SAFETY: as above.
            unsafe {
                widen_bf16(isa, all.len(), all.as_ptr(), wide.as_mut_ptr());
                narrow_bf16(isa, all.len(), wide.as_ptr(), back.as_mut_ptr());
            }
            for (i, &bits) in all.iter().enumerate() {
                let want = bf16::from_bits(bits);
                assert!(
                    wide[i] == want.to_f32() || (wide[i].is_nan() && want.is_nan()),
                    "{isa} {bits:#x}"
                );
                assert!(
                    bits_agree(
                        back[i],
                        bits,
                        want.is_nan() && bf16::from_bits(back[i]).is_nan()
                    ),
                    "{isa} {bits:#x}"
                );
            }
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even() {
        let mut rng = Rng(71);
        let x: Vec<f32> = (0..200_003)
            .map(|i| {
                if i % 2 == 0 {
                    f32::from_bits(rng.next() as u32)
                } else {
                    f32::from_bits((rng.next() as u32) & 0xffff_f000)
                }
            })
            .collect();
        for isa in Isa::available() {
            let mut half = vec![0u16; x.len()];
            let mut brain = vec![0u16; x.len()];
            // SAFETY: all arrays have the same length.
            unsafe {
                narrow_f16(isa, x.len(), x.as_ptr(), half.as_mut_ptr());
                narrow_bf16(isa, x.len(), x.as_ptr(), brain.as_mut_ptr());
            }
            for (i, &x) in x.iter().enumerate() {
                let (want_half, want_brain) = (f16::from_f32(x), bf16::from_f32(x));
                assert!(
                    bits_agree(
                        half[i],
                        want_half.to_bits(),
                        x.is_nan() && f16::from_bits(half[i]).is_nan()
                    ),
                    "{isa} {x:?}"
                );
                assert!(
                    bits_agree(
                        brain[i],
                        want_brain.to_bits(),
                        x.is_nan() && bf16::from_bits(brain[i]).is_nan()
                    ),
                    "{isa} {x:?}"
                );
            }
        }
    }
}
