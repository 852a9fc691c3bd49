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

/// The elements of a line in the order that is asked for.
struct Elements<'a, T> {
    line: &'a TopKLine,
    first: *const T,
}

impl<T: PartialOrd + Copy> Elements<'_, T> {
    fn at(&self, i: u32) -> T {
        // SAFETY: `i < n`, and the line is readable: the promises of `gm_top_k`'s caller.
        unsafe { *self.first.add(i as usize * self.line.stride) }
    }

    /// Order of two elements by their positions: that of selection. The position decides between equal
    /// elements, which makes unstable sorts stable.
    fn order(&self, a: u32, b: u32) -> Ordering {
        let by_value = ascending(&self.at(a), &self.at(b));
        let by_value = if self.line.largest == 1 {
            by_value.reverse()
        } else {
            by_value
        };
        by_value.then(a.cmp(&b))
    }

    /// False only for an element that comes after `bound`, or is its equal.
    fn may_precede(&self, x: T, bound: T) -> bool {
        // True where one is NaN.
        if self.line.largest == 1 {
            !matches!(
                x.partial_cmp(&bound),
                Some(Ordering::Less | Ordering::Equal)
            )
        } else {
            !matches!(
                x.partial_cmp(&bound),
                Some(Ordering::Greater | Ordering::Equal)
            )
        }
    }

    /// Moves the first `k` of some elements, in their order, to the front; gives the last of these.
    fn first_of(&self, candidates: &mut [u32]) -> u32 {
        let last = self.line.k - 1;
        *candidates
            .select_nth_unstable_by(last, |&a, &b| self.order(a, b))
            .1
    }

    /// Positions of the first `k` elements, at the front of `order`, which has room for those of all.
    ///
    /// Elements are compared with the last of the best `k` so far, and collected where they precede it:
    /// `k log(n / k)` of them in a random line.
    fn select(&self, order: &mut [u32]) {
        let TopKLine { n, k, .. } = *self.line;
        let room = (4 * k).max(LEAST_ROOM).min(n);
        let (candidates, n) = (&mut order[..room], n as u32);
        (0..).zip(candidates.iter_mut()).for_each(|(i, c)| *c = i);
        let mut bound = self.first_of(candidates);
        let mut len = k;
        for start in (room as u32..n).step_by(RUN as usize) {
            let run = start..start.saturating_add(RUN).min(n);
            let limit = self.at(bound);
            let may_precede = |any: bool, i: u32| any | self.may_precede(self.at(i), limit);
            if !run.clone().fold(false, may_precede) {
                continue;
            }
            for i in run {
                if self.order(i, bound).is_lt() {
                    candidates[len] = i;
                    len += 1;
                }
                if len == room {
                    bound = self.first_of(candidates);
                    len = k;
                }
            }
        }
        self.first_of(&mut candidates[..len]);
    }
}

/// Candidates that are collected at least before the worst are dropped.
const LEAST_ROOM: usize = 256;
/// Elements that are compared at once.
const RUN: u32 = 64;

/// # Safety
/// As [`gm_top_k`], with elements of type `T`.
unsafe fn select<T: PartialOrd + Copy>(
    line: &TopKLine,
    src: *const u8,
    values: *mut u8,
    positions: *mut i64,
    order: &mut [u32],
) {
    let first = src.cast::<T>();
    let elements = Elements { line, first };
    if line.k > 0 {
        elements.select(order);
    }
    let chosen = &mut order[..line.k];
    chosen.sort_unstable_by(|&a, &b| elements.order(a, b));
    for (j, &i) in chosen.iter().enumerate() {
        // SAFETY: `j < k`, and the caller vouches for both results.
        unsafe {
            *values.cast::<T>().add(j * line.stride) = elements.at(i);
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
    // SAFETY: by contract; any bytes are numbers, and they are written before they are read.
    let order = unsafe {
        let room = line.n.min(4 * line.k + LEAST_ROOM);
        std::ptr::write_bytes(workspace, 0, room);
        std::slice::from_raw_parts_mut(workspace, room)
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

    /// Long lines with many equal elements, NaN, in any order, against a stable sort.
    #[test]
    fn long_lines_are_selected_as_by_a_stable_sort() {
        let mut rng = crate::testing::Rng(51);
        for round in 0..200 {
            let n = 1 + rng.below(3000);
            let k = rng.pick(&[0, 1, 2, 10, 100, 1000]).min(n);
            let (largest, stride) = (rng.below(2) as u32, 1 + rng.below(2));
            let values = rng.pick(&[2, 50, 1 << 20]);
            let mut x: Vec<f32> = (0..n).map(|_| rng.below(values) as f32).collect();
            match rng.below(4) {
                0 => x.sort_by(f32::total_cmp),
                1 => x.sort_by(|a, b| b.total_cmp(a)),
                2 => (0..n).step_by(7).for_each(|i| x[i] = f32::NAN),
                _ => {}
            }
            let mut want: Vec<i64> = (0..n as i64).collect();
            want.sort_by(|&a, &b| {
                let order = ascending(&x[a as usize], &x[b as usize]);
                if largest == 1 { order.reverse() } else { order }
            });
            let spaced: Vec<f32> = x.iter().flat_map(|&x| vec![x; stride]).collect();
            let line = TopKLine {
                dtype: 0,
                largest,
                n,
                k,
                stride,
            };
            let (mut v, mut p) = (vec![0f32; k * stride], vec![0i64; k * stride]);
            let mut w = vec![7u32; n];
            // SAFETY: all arrays have the extents of the line.
            let status = unsafe {
                let (v, p) = (v.as_mut_ptr().cast(), p.as_mut_ptr());
                gm_top_k(&line, spaced.as_ptr().cast(), v, p, w.as_mut_ptr())
            };
            let got: Vec<i64> = p.iter().copied().step_by(stride).collect();
            assert_eq!(
                (status, &got[..]),
                (OK, &want[..k]),
                "round {round}: {n} {k}"
            );
        }
    }
}
