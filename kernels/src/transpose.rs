//! Transposition of 32-bit elements, a square of registers at a time.

use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};

/// A transposition: `dst[j * dst_stride + i] = src[i * src_stride + j]` for `rows` values of `i`
/// and `cols` of `j`. Elements are 32-bit patterns of any type.
#[derive(Clone, Copy)]
pub(crate) struct Transpose {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) src: *const f32,
    pub(crate) src_stride: isize,
    pub(crate) dst: *mut f32,
    pub(crate) dst_stride: isize,
}

/// # Safety
/// `src` is readable and `dst` writable where [`Transpose`] says; they do not overlap; `isa` is
/// available.
pub(crate) unsafe fn transpose(isa: Isa, transpose: Transpose) {
    // SAFETY: by contract.
    unsafe { dispatch(isa, transpose) }
}

impl Task for Transpose {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let mut i = 0;
        while i < self.rows {
            let mut j = 0;
            while j < self.cols {
                let (rows, cols) = ((self.rows - i).min(S::LANES), (self.cols - j).min(S::LANES));
                let src = self
                    .src
                    .wrapping_offset(i as isize * self.src_stride)
                    .wrapping_add(j);
                let dst = self
                    .dst
                    .wrapping_offset(j as isize * self.dst_stride)
                    .wrapping_add(i);
                // SAFETY: a rectangle inside the whole.
                unsafe {
                    let part = Transpose {
                        rows,
                        cols,
                        src,
                        dst,
                        ..self
                    };
                    square(s, part)
                };
                j += S::LANES;
            }
            i += S::LANES;
        }
    }
}

/// # Safety
/// As for [`transpose`], with at most `LANES` rows and columns.
#[inline(always)]
unsafe fn square<S: Simd>(s: S, t: Transpose) {
    let mut block = [s.zero(); 16];
    // SAFETY: rows and columns beyond the rectangle are not accessed.
    unsafe {
        if t.rows == S::LANES && t.cols == S::LANES {
            for (i, row) in block.iter_mut().enumerate().take(S::LANES) {
                *row = s.load(t.src.offset(i as isize * t.src_stride));
            }
            let block = s.transpose(block);
            for (j, &col) in block.iter().enumerate().take(S::LANES) {
                s.store(t.dst.offset(j as isize * t.dst_stride), col);
            }
        } else {
            for i in 0..t.rows {
                let src = t.src.offset(i as isize * t.src_stride).cast::<u32>();
                for j in 0..t.cols {
                    let dst = t.dst.offset(j as isize * t.dst_stride).cast::<u32>();
                    *dst.add(i) = *src.add(j);
                }
            }
        }
    }
}

/// Transposes a matrix of 32-bit elements: `dst[j * dst_stride + i] = src[i * src_stride + j]`.
///
/// # Safety
/// `src` is readable for `rows` rows of `cols` elements, `dst` writable for `cols` rows of `rows`;
/// they do not overlap. The CPU has the instruction set of number `ISA`.
pub unsafe extern "C" fn gm_transpose_f32<const ISA: u32>(
    rows: usize,
    cols: usize,
    src: *const f32,
    src_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    let (src_stride, dst_stride) = (src_stride as isize, dst_stride as isize);
    // SAFETY: by contract.
    unsafe {
        transpose(
            Isa::of::<ISA>(),
            Transpose {
                rows,
                cols,
                src,
                src_stride,
                dst,
                dst_stride,
            },
        )
    }
}

/// The type of [`gm_transpose_f32`].
pub type TransposeFn = unsafe extern "C" fn(usize, usize, *const f32, usize, *mut f32, usize);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn every_size_is_transposed_bit_for_bit() {
        let mut rng = Rng(51);
        for isa in Isa::available() {
            for rows in [0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 64] {
                for cols in [0, 1, 3, 8, 15, 16, 31, 32, 50] {
                    let (src_stride, dst_stride) = (cols + rng.below(3), rows + rng.below(3));
                    let src: Vec<u32> = (0..rows * src_stride + 1)
                        .map(|_| rng.next() as u32)
                        .collect();
                    let mut dst = vec![7u32; cols * dst_stride + 1];
                    let mut want = dst.clone();
                    for i in 0..rows {
                        for j in 0..cols {
                            want[j * dst_stride + i] = src[i * src_stride + j];
                        }
                    }
                    let t = Transpose {
                        rows,
                        cols,
                        src: src.as_ptr().cast(),
                        src_stride: src_stride as isize,
                        dst: dst.as_mut_ptr().cast(),
                        dst_stride: dst_stride as isize,
                    };
                    // SAFETY: the buffers have the sizes that the strides ask for.
                    unsafe { transpose(isa, t) };
                    assert_eq!(dst, want, "{isa} {rows} x {cols}");
                }
            }
        }
    }
}
