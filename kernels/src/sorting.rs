//! Selection of the largest or smallest elements of a line, for every dtype.

use crate::symbols::Symbol;
use crate::{INVALID, OK};
use std::ops::Not;

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

/// The place of an element in ascending order as an integer: equal elements have the same, NaN the greatest.
trait Rank: Copy + Ord + Default + Not<Output = Self> {
    /// A rank with a position, which decides between equal ranks.
    type Placed: Copy + Ord;

    fn at(self, position: u32) -> Self::Placed;
    fn rank(placed: Self::Placed) -> Self;
    fn position(placed: Self::Placed) -> u32;
}

macro_rules! rank {
    ($rank:ty, $placed:ty) => {
        impl Rank for $rank {
            type Placed = $placed;

            fn at(self, position: u32) -> $placed {
                (self as $placed) << 32 | position as $placed
            }

            fn rank(placed: $placed) -> $rank {
                (placed >> 32) as $rank
            }

            fn position(placed: $placed) -> u32 {
                placed as u32
            }
        }
    };
}

rank!(u32, u64);
rank!(u64, u128);

/// Writes the ranks of elements that are so far apart, from an address on.
type Ranks<R> = unsafe fn(first: *const u8, stride: usize, ranks: &mut [R]);

/// # Safety
/// As many elements are readable as there are ranks.
unsafe fn ranks<T: Copy, R>(
    first: *const u8,
    stride: usize,
    ranks: &mut [R],
    of: impl Fn(T) -> R + Copy,
) {
    let first = first.cast::<T>();
    // SAFETY: by contract.
    let at = |i: usize| of(unsafe { *first.add(i) });
    match stride {
        1 => (0..).zip(ranks).for_each(|(i, rank)| *rank = at(i)),
        _ => (0..)
            .zip(ranks)
            .for_each(|(i, rank)| *rank = at(i * stride)),
    }
}

/// The rank of an integer with a sign.
macro_rules! signed {
    ($ty:ty as $rank:ty) => {
        |x: $ty| (x as $rank) ^ (1 << (<$rank>::BITS - 1))
    };
}

/// The rank of a float by its bits, of which those above `$greatest`, the sign aside, are NaN.
macro_rules! float {
    ($bits:ty as $rank:ty, $greatest:expr) => {
        |bits: $bits| {
            let magnitude = (bits & (<$bits>::MAX >> 1)) as $rank;
            let zero: $rank = 1 << (<$rank>::BITS - 1);
            let is_negative = bits > <$bits>::MAX >> 1;
            let rank = if is_negative {
                zero - magnitude
            } else {
                zero + magnitude
            };
            if magnitude > $greatest {
                <$rank>::MAX
            } else {
                rank
            }
        }
    };
}

/// The rank of a float of 8 bits that has one zero, and NaN in the place of the other.
fn one_zero(bits: u8) -> u32 {
    match bits {
        0x80 => u32::MAX,
        _ => float!(u8 as u32, 0x7f)(bits),
    }
}

/// Ranks of elements of at most 32 bits.
fn narrow(dtype: u32) -> Option<Ranks<u32>> {
    macro_rules! table {
        ($($number:literal $ty:ty: $of:expr),*) => {
            match dtype {
                // SAFETY: the caller's promises.
                $($number => Some(|f, s, r| unsafe { ranks::<$ty, u32>(f, s, r, $of) }),)*
                _ => None,
            }
        };
    }
    table!(
        0 u32: float!(u32 as u32, 0x7f80_0000),
        2 u16: float!(u16 as u32, 0x7c00),
        3 u16: float!(u16 as u32, 0x7f80),
        4 u8: float!(u8 as u32, 0x7e),
        5 u8: one_zero,
        6 u8: float!(u8 as u32, 0x7c),
        7 u8: one_zero,
        8 i8: signed!(i8 as u32),
        9 i16: signed!(i16 as u32),
        10 i32: signed!(i32 as u32),
        12 u8: u32::from,
        13 u16: u32::from,
        14 u32: |x| x,
        16 u8: u32::from
    )
}

/// Ranks of elements of 64 bits.
fn wide(dtype: u32) -> Option<Ranks<u64>> {
    match dtype {
        // SAFETY: the caller's promises.
        1 => Some(|f, s, r| unsafe { ranks(f, s, r, float!(u64 as u64, 0x7ff0_0000_0000_0000)) }),
        // SAFETY: the caller's promises.
        11 => Some(|f, s, r| unsafe { ranks(f, s, r, signed!(i64 as u64)) }),
        // SAFETY: the caller's promises.
        15 => Some(|f, s, r| unsafe { ranks(f, s, r, |x: u64| x) }),
        _ => None,
    }
}

/// Bytes of an element.
fn size_of_dtype(dtype: u32) -> usize {
    match dtype {
        1 | 11 | 15 => 8,
        0 | 10 | 14 => 4,
        2 | 3 | 9 | 13 => 2,
        _ => 1,
    }
}

/// The elements of a line by their ranks in the order that is asked for.
struct Elements<'a, R> {
    line: &'a TopKLine,
    first: *const u8,
    ranks: Ranks<R>,
}

impl<R: Rank> Elements<'_, R> {
    /// Writes the ranks from a position on; the first in the order that is asked for has the least.
    fn write(&self, start: usize, to: &mut [R]) {
        let TopKLine { dtype, stride, .. } = *self.line;
        let first = self
            .first
            .wrapping_add(start * stride * size_of_dtype(dtype));
        // SAFETY: the line is readable: a promise of `gm_top_k`'s caller; `to` ends where it does.
        unsafe { (self.ranks)(first, stride, to) };
        if self.line.largest == 1 {
            to.iter_mut().for_each(|rank| *rank = !*rank);
        }
    }

    /// Calls `f` with the ranks of neighbours and the position of the first of these, until all from `start` to `end` were there.
    fn runs(&self, start: usize, end: usize, mut f: impl FnMut(u32, &[R])) {
        let mut ranks = [R::default(); RUN];
        for start in (start..end).step_by(RUN) {
            let ranks = &mut ranks[..RUN.min(end - start)];
            self.write(start, ranks);
            f(start as u32, ranks);
        }
    }

    /// Moves the first `k` of some elements, in any order, to the front; gives the last of these.
    fn first_of(&self, candidates: &mut [R::Placed]) -> R::Placed {
        *candidates.select_nth_unstable(self.line.k - 1).1
    }

    /// The first `k` elements, in any order, at the front of `candidates`, which has room for `room`.
    ///
    /// Elements are compared with the last of the best `k` so far, and collected where they precede it: `k log(n / k)` of them in a
    /// random line. Equal ones come later than it, and so do not.
    fn select(&self, candidates: &mut [R::Placed]) {
        let TopKLine { n, k, .. } = *self.line;
        let room = candidates.len();
        self.runs(0, room, |start, ranks| {
            let places = candidates[start as usize..].iter_mut();
            (start..)
                .zip(places)
                .zip(ranks)
                .for_each(|((i, c), r)| *c = r.at(i));
        });
        let mut bound = self.first_of(candidates);
        let mut len = k;
        self.runs(room, n, |start, ranks| {
            let limit = R::rank(bound);
            if !ranks.iter().fold(false, |any, &rank| any | (rank < limit)) {
                return;
            }
            for (i, &rank) in (start..).zip(ranks) {
                if rank < R::rank(bound) {
                    candidates[len] = rank.at(i);
                    len += 1;
                }
                if len == room {
                    bound = self.first_of(candidates);
                    len = k;
                }
            }
        });
        self.first_of(&mut candidates[..len]);
    }

    /// # Safety
    /// As [`gm_top_k`], with elements that have these ranks.
    unsafe fn write_first(&self, values: *mut u8, positions: *mut i64, workspace: *mut u8) {
        let TopKLine {
            dtype, k, stride, ..
        } = *self.line;
        if k == 0 {
            return;
        }
        let room = room(self.line.n, k);
        // SAFETY: by contract; any bytes are numbers, and they are written before they are read.
        let candidates = unsafe {
            std::ptr::write_bytes(workspace, 0, room * size_of::<R::Placed>());
            std::slice::from_raw_parts_mut(workspace.cast::<R::Placed>(), room)
        };
        self.select(candidates);
        let chosen = &mut candidates[..k];
        chosen.sort_unstable();
        let size = size_of_dtype(dtype);
        for (j, &placed) in chosen.iter().enumerate() {
            let i = R::position(placed);
            // SAFETY: `j < k` and `i < n`, and the caller vouches for the line and both results.
            unsafe {
                let from = self.first.add(i as usize * stride * size);
                from.copy_to_nonoverlapping(values.add(j * stride * size), size);
                *positions.add(j * stride) = i64::from(i);
            }
        }
    }
}

/// Candidates that are collected at least before the worst are dropped.
const LEAST_ROOM: usize = 256;
/// Elements that are compared at once.
const RUN: usize = 64;

/// Candidates that there is room for.
fn room(n: usize, k: usize) -> usize {
    n.min(4 * k + LEAST_ROOM)
}

/// Bytes of the workspace to select `k` of `n` elements of so many bytes.
pub fn workspace_bytes(n: usize, k: usize, element_bytes: usize) -> usize {
    let placed = match element_bytes {
        8 => size_of::<<u64 as Rank>::Placed>(),
        _ => size_of::<<u32 as Rank>::Placed>(),
    };
    room(n, k) * placed
}

/// Writes the `k` largest or smallest elements of a line in order, and their positions; equal
/// elements keep their order.
///
/// Returns `OK`, or `INVALID` for an unknown dtype or `k > n`.
///
/// # Safety
/// `src` is readable for `n` elements of the dtype and `values` and `positions` writable for `k`,
/// all `stride` elements apart; `workspace` is aligned to 16 bytes and writable for as many as
/// [`workspace_bytes`].
pub unsafe extern "C" fn gm_top_k(
    line: *const TopKLine,
    src: *const u8,
    values: *mut u8,
    positions: *mut i64,
    workspace: *mut u8,
) -> u32 {
    // SAFETY: by contract.
    let line = unsafe { &*line };
    if line.k > line.n || line.n > u32::MAX as usize {
        return INVALID;
    }
    let first = src;
    if let Some(ranks) = narrow(line.dtype) {
        // SAFETY: by contract.
        unsafe { Elements { line, first, ranks }.write_first(values, positions, workspace) };
    } else if let Some(ranks) = wide(line.dtype) {
        // SAFETY: by contract.
        unsafe { Elements { line, first, ranks }.write_first(values, positions, workspace) };
    } else {
        return INVALID;
    }
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
    use crate::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};
    use half::{bf16, f16};
    use std::cmp::Ordering;

    /// Ascending order, NaN last.
    fn ascending<T: PartialOrd>(a: &T, b: &T) -> Ordering {
        #[allow(clippy::eq_op)]
        let (a_nan, b_nan) = (a != a, b != b);
        a.partial_cmp(b).unwrap_or_else(|| a_nan.cmp(&b_nan))
    }

    /// A workspace of so many bytes, and a little more.
    fn workspace(n: usize, k: usize, element_bytes: usize) -> Vec<u128> {
        vec![7; workspace_bytes(n, k, element_bytes) / 16 + 1]
    }

    /// Sorts elements of a dtype both ways, beside a stable sort by comparison.
    fn check_sorted<T: PartialOrd + Copy>(dtype: u32, elements: &[T]) {
        let n = elements.len();
        for largest in [0, 1] {
            let mut want: Vec<i64> = (0..n as i64).collect();
            want.sort_by(|&a, &b| {
                let order = ascending(&elements[a as usize], &elements[b as usize]);
                if largest == 1 { order.reverse() } else { order }
            });
            let (k, stride) = (n, 1);
            let line = TopKLine {
                dtype,
                largest,
                n,
                k,
                stride,
            };
            let (mut v, mut p) = (elements.to_vec(), vec![0i64; n]);
            let mut w = workspace(n, n, size_of::<T>());
            // SAFETY: all arrays have the extents of the line.
            let status = unsafe {
                let (x, v) = (elements.as_ptr().cast(), v.as_mut_ptr().cast());
                gm_top_k(&line, x, v, p.as_mut_ptr(), w.as_mut_ptr().cast())
            };
            assert!((status, &p) == (OK, &want), "dtype {dtype}, {largest}");
            let bytes = |t: &T| {
                // SAFETY: numbers without padding.
                unsafe { std::slice::from_raw_parts((&raw const *t).cast::<u8>(), size_of::<T>()) }
            };
            let own = p.iter().zip(&v);
            let is_own = |(&i, v): (&i64, &T)| bytes(v) == bytes(&elements[i as usize]);
            assert!(own.into_iter().all(is_own), "dtype {dtype}, {largest}");
        }
    }

    /// All numbers of 8 and 16 bits, and many of more with those at the ends.
    #[test]
    fn every_dtype_is_sorted_as_by_comparison() {
        let bytes: Vec<u8> = (0..=u8::MAX).chain(0..=u8::MAX).collect();
        let words: Vec<u16> = (0..=u16::MAX).rev().collect();
        let mut rng = crate::testing::Rng(52);
        let ends = [
            0,
            1,
            1 << 31,
            0x7f80_0000,
            0x7f80_0001,
            0xff80_0000,
            0xffc0_0000,
            u32::MAX,
        ];
        let mut random = |_| match rng.below(4) {
            0 => rng.pick(&ends),
            _ => rng.below(1 << 32) as u32,
        };
        let singles: Vec<u32> = (0..3000).map(&mut random).collect();
        let doubles: Vec<u64> = (0..3000)
            .map(|i| match i % 3 {
                0 => u64::from(random(i)) << 32 | u64::from(random(i)),
                1 => u64::from(random(i)),
                _ => f64::from(f32::from_bits(random(i))).to_bits(),
            })
            .collect();
        macro_rules! check {
            ($($number:literal $from:ident $of:expr),*) => {
                $(check_sorted($number, &$from.iter().map(|&x| $of(x)).collect::<Vec<_>>());)*
            };
        }
        check!(
            0 singles f32::from_bits, 1 doubles f64::from_bits, 2 words f16::from_bits, 3 words bf16::from_bits,
            4 bytes F8E4M3FN::from_bits, 5 bytes F8E4M3FNUZ::from_bits, 6 bytes F8E5M2::from_bits, 7 bytes F8E5M2FNUZ::from_bits,
            8 bytes (|x| x as i8), 9 words (|x| x as i16), 10 singles (|x| x as i32), 11 doubles (|x| x as i64),
            12 bytes u8::from, 13 words u16::from, 14 singles u32::from, 15 doubles u64::from, 16 bytes u8::from
        );
    }

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
            let (mut v, mut p, mut w) = ([0f32; 4], [0i64; 4], workspace(5, 4, 4));
            // SAFETY: all arrays have the extents of the line.
            let status = unsafe {
                gm_top_k(
                    &line,
                    x.as_ptr().cast(),
                    v.as_mut_ptr().cast(),
                    p.as_mut_ptr(),
                    w.as_mut_ptr().cast(),
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
            let mut w = workspace(n, k, 4);
            // SAFETY: all arrays have the extents of the line.
            let status = unsafe {
                let (v, p) = (v.as_mut_ptr().cast(), p.as_mut_ptr());
                gm_top_k(&line, spaced.as_ptr().cast(), v, p, w.as_mut_ptr().cast())
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
