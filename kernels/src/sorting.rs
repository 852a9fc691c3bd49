//! Selection of the largest or smallest elements of a line, for every dtype.

use crate::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};
use crate::symbols::Symbol;
use crate::{INVALID, OK};
use half::{bf16, f16};
use std::cmp::Ordering;

/// One line to select from. Strides are in elements, for source and results.
#[repr(C)]
pub struct TopKLine {
    /// Number of the dtype, in the order f32 f64 f16 bf16 f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz i8
    /// i16 i32 i64 u8 u16 u32 u64 bool.
    pub dtype: u32,
    /// 1 for the largest, 0 for the smallest.
    pub largest: u32,
    /// Elements of the line.
    pub n: usize,
    /// Selected elements, at most `n`.
    pub k: usize,
    /// Elements between neighbours of the line, and of both results.
    pub stride: usize,
}

/// Ascending order, NaN last.
fn ascending<T: PartialOrd>(a: &T, b: &T) -> Ordering {
    #[allow(clippy::eq_op)]
    let (a_nan, b_nan) = (a != a, b != b);
    a.partial_cmp(b).unwrap_or_else(|| a_nan.cmp(&b_nan))
}

/// # Safety
/// As [`gm_top_k`], with elements of type `T`.
unsafe fn select<T: PartialOrd + Copy>(
    line: &TopKLine,
    src: *const u8,
    values: *mut u8,
    positions: *mut i64,
    order: &mut [u32],
) {
    let (src, values) = (src.cast::<T>(), values.cast::<T>());
    // SAFETY: `i < n`, and the caller vouches for the line.
    let at = |i: u32| unsafe { *src.add(i as usize * line.stride) };
    let before = |&a: &u32, &b: &u32| {
        let by_value = ascending(&at(a), &at(b));
        let by_value = if line.largest == 1 {
            by_value.reverse()
        } else {
            by_value
        };
        // The position decides between equal elements, which makes the in-place sort stable.
        by_value.then(a.cmp(&b))
    };
    if line.k < line.n {
        order.select_nth_unstable_by(line.k, before);
    }
    let chosen = &mut order[..line.k];
    chosen.sort_unstable_by(before);
    for (j, &i) in chosen.iter().enumerate() {
        // SAFETY: `j < k`, and the caller vouches for both results.
        unsafe {
            *values.add(j * line.stride) = at(i);
            *positions.add(j * line.stride) = i64::from(i);
        }
    }
}

/// Writes the `k` largest or smallest elements of a line in order, and their positions; equal
/// elements keep their order.
///
/// `workspace` holds `n` times 4 bytes. Returns `OK`, or `INVALID` for an unknown dtype or `k > n`.
///
/// # Safety
/// `src` is readable for `n` elements of the dtype and `values` and `positions` writable for `k`,
/// all `stride` elements apart; `workspace` is writable for `n` `u32`s.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_top_k(
    line: *const TopKLine,
    src: *const u8,
    values: *mut u8,
    positions: *mut i64,
    workspace: *mut u32,
) -> u32 {
    // SAFETY: by contract.
    let line = unsafe { &*line };
    if line.k > line.n || line.n > u32::MAX as usize {
        return INVALID;
    }
    // SAFETY: by contract; every element is written before it is read.
    let order = unsafe {
        (0..line.n).for_each(|i| *workspace.add(i) = i as u32);
        std::slice::from_raw_parts_mut(workspace, line.n)
    };
    macro_rules! dispatch {
        ($($number:literal $ty:ty),*) => {
            match line.dtype {
                // SAFETY: the dtype's type, and the caller's promises.
                $($number => unsafe { select::<$ty>(line, src, values, positions, order) },)*
                _ => return INVALID,
            }
        };
    }
    dispatch!(
        0 f32, 1 f64, 2 f16, 3 bf16, 4 F8E4M3FN, 5 F8E4M3FNUZ, 6 F8E5M2, 7 F8E5M2FNUZ,
        8 i8, 9 i16, 10 i32, 11 i64, 12 u8, 13 u16, 14 u32, 15 u64, 16 u8
    );
    OK
}

/// The functions of this module by linker name.
pub fn symbols() -> impl Iterator<Item = &'static Symbol> {
    static SYMBOLS: &[Symbol] = &[Symbol {
        name: "gm_top_k",
        address: gm_top_k as *const u8,
    }];
    SYMBOLS.iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_elements_keep_their_order_and_nan_is_greatest() {
        let x = [1.0f32, f32::NAN, 3.0, 1.0, 3.0];
        let check = |largest, expected: [i64; 4]| {
            let line = TopKLine {
                dtype: 0,
                largest,
                n: 5,
                k: 4,
                stride: 1,
            };
            let (mut v, mut p, mut w) = ([0f32; 4], [0i64; 4], [0u32; 5]);
            // SAFETY: all arrays have the extents of the line.
            let status = unsafe {
                gm_top_k(
                    &line,
                    x.as_ptr().cast(),
                    v.as_mut_ptr().cast(),
                    p.as_mut_ptr(),
                    w.as_mut_ptr(),
                )
            };
            assert_eq!((status, p), (OK, expected));
            assert!(
                p.iter()
                    .zip(v)
                    .all(|(&i, v)| v.to_bits() == x[i as usize].to_bits())
            );
        };
        check(1, [1, 2, 4, 0]);
        check(0, [0, 3, 2, 4]);
    }
}
