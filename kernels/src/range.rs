//! Ranges: the smallest and the largest of all elements of a tensor, found by several threads.
//!
//! Kernels that compute the elements note those of each tile while it is hot, as the
//! [`EpilogueKind::Range`](crate::epilogue::EpilogueKind::Range) of an epilogue; [`gm_range_f32`]
//! reads elements that are in memory. Both go on from what is noted, which one call, of
//! [`RangeDesc::start`], makes the range of no elements.

use crate::descriptor::descriptor;
use crate::epilogue::Rect;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{LHS, OK, OPERANDS, OUT, UNSUPPORTED_ISA, pointer};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Elements of an item of [`gm_range_f32`].
pub const PER_ITEM: usize = 1 << 14;

/// Where the smallest and the largest element are noted: NaN if any is.
#[derive(Clone, Copy)]
pub(crate) struct Extremes {
    pub(crate) smallest: *mut f32,
    pub(crate) largest: *mut f32,
}

impl Extremes {
    /// Joins the smallest and the largest of some elements to those of others.
    ///
    /// # Safety
    /// Both numbers are writable; other threads access them by this function alone.
    pub(crate) unsafe fn note(self, [smallest, largest]: [f32; 2]) {
        // SAFETY: by contract.
        unsafe {
            join(self.smallest, smallest, |x, known| x < known);
            join(self.largest, largest, |x, known| x > known);
        }
    }
}

/// Replaces a number by `x` if that is beyond it, or NaN.
///
/// # Safety
/// As for [`Extremes::note`].
unsafe fn join(at: *mut f32, x: f32, is_beyond: impl Fn(f32, f32) -> bool) {
    // SAFETY: by contract; a float is aligned as its bits are.
    let noted = unsafe { AtomicU32::from_ptr(at.cast()) };
    let mut bits = noted.load(Relaxed);
    loop {
        let known = f32::from_bits(bits);
        if known.is_nan() || !(x.is_nan() || is_beyond(x, known)) {
            return;
        }
        match noted.compare_exchange_weak(bits, x.to_bits(), Relaxed, Relaxed) {
            Ok(_) => return,
            Err(now) => bits = now,
        }
    }
}

/// Lanes of the widest vectors.
const MAX_LANES: usize = 16;

/// The extremes of elements seen so far, by lane; NaN among the largest where one was.
#[repr(C, align(64))]
pub(crate) struct Seen {
    smallest: [f32; MAX_LANES],
    largest: [f32; MAX_LANES],
}

impl Seen {
    /// Of no elements.
    pub(crate) const NONE: Seen = Seen {
        smallest: [f32::INFINITY; MAX_LANES],
        largest: [f32::NEG_INFINITY; MAX_LANES],
    };

    /// The smallest and the largest; NaN if any is. Zeros are positive, whichever of them come together.
    pub(crate) fn extremes(&self) -> [f32; 2] {
        let none = [f32::INFINITY, f32::NEG_INFINITY];
        let by_lane = self.smallest.iter().zip(&self.largest);
        let all = by_lane.fold(none, |[smallest, largest], (&low, &high)| {
            match largest.is_nan() || high.is_nan() {
                true => [f32::NAN; 2],
                false => [smallest.min(low), largest.max(high)],
            }
        });
        all.map(|x| x + 0.0)
    }

    /// Adds an element to the first lane.
    fn add(&mut self, x: f32) {
        self.smallest[0] = self.smallest[0].min(x);
        if x.is_nan() || x > self.largest[0] {
            self.largest[0] = x;
        }
    }
}

/// Adds the elements of a rectangle to those seen.
pub(crate) struct See<'s>(pub(crate) &'s mut Seen, pub(crate) Rect);

impl Task for See<'_> {
    type Out = ();

    /// Safety: the rectangle is readable.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let See(seen, rect) = self;
        if rect.cols < S::LANES {
            for i in 0..rect.rows * rect.cols {
                let (r, j) = (i / rect.cols, i % rect.cols);
                // SAFETY: an element of the rectangle.
                seen.add(unsafe { *rect.c.add(r * rect.ldc + j) });
            }
            return;
        }
        // SAFETY: lanes are at most `MAX_LANES`; vectors of elements of a row of the rectangle.
        unsafe {
            let mut by_lane = [
                [seen.smallest.as_ptr(), seen.largest.as_ptr()].map(|lanes| s.load(lanes)),
                [s.splat(f32::INFINITY), s.splat(f32::NEG_INFINITY)],
            ];
            for r in 0..rect.rows {
                see_row(s, &mut by_lane, rect.c.add(r * rect.ldc), rect.cols);
            }
            let [[low, high], [other_low, other_high]] = by_lane;
            s.store(seen.smallest.as_mut_ptr(), s.min(low, other_low));
            s.store(seen.largest.as_mut_ptr(), larger(s, other_high, high));
        }
    }
}

/// Adds the elements of a row, at least a vector of them, to the extremes of lanes.
///
/// # Safety
/// `row` is readable for `n` elements.
#[inline(always)]
unsafe fn see_row<S: Simd>(s: S, by_lane: &mut [[S::F; 2]; 2], row: *const f32, n: usize) {
    let mut j = 0;
    // SAFETY: elements of the row.
    unsafe {
        while j + 2 * S::LANES <= n {
            by_lane[0] = with(s, by_lane[0], s.load(row.add(j)));
            by_lane[1] = with(s, by_lane[1], s.load(row.add(j + S::LANES)));
            j += 2 * S::LANES;
        }
        if j + S::LANES <= n {
            by_lane[0] = with(s, by_lane[0], s.load(row.add(j)));
            j += S::LANES;
        }
        if j < n {
            // Elements before the last vector are seen again.
            by_lane[1] = with(s, by_lane[1], s.load(row.add(n - S::LANES)));
        }
    }
}

/// The smallest and the largest of each lane, with those of a vector.
#[inline(always)]
fn with<S: Simd>(s: S, [smallest, largest]: [S::F; 2], x: S::F) -> [S::F; 2] {
    [s.min(x, smallest), larger(s, x, largest)]
}

/// The larger lanes; NaN where either is.
#[inline(always)]
fn larger<S: Simd>(s: S, x: S::F, known: S::F) -> S::F {
    // The second operand where either is NaN.
    s.select(s.eq(x, x), s.max(x, known), x)
}

/// The range of contiguous elements. Item `i` is the elements from `i * `[`PER_ITEM`] on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RangeDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// 1 for the call that comes first: one item, which notes the range of no elements, infinity
    /// and minus infinity.
    pub starts: u32,
    /// Elements.
    pub n: usize,
}

descriptor!(RangeDesc { isa, starts, n });

impl RangeDesc {
    /// The range of `n` elements, for an instruction set.
    pub fn new(isa: Isa, n: usize) -> RangeDesc {
        RangeDesc {
            isa: isa as u32,
            starts: 0,
            n,
        }
    }

    /// The call before the others.
    pub fn start(isa: Isa) -> RangeDesc {
        RangeDesc {
            starts: 1,
            ..RangeDesc::new(isa, 0)
        }
    }

    /// Items of the whole tensor.
    pub fn n_items(&self) -> usize {
        match self.starts {
            0 => self.n.div_ceil(PER_ITEM),
            _ => 1,
        }
    }
}

/// Computes items `begin..end` of a [`RangeDesc`].
///
/// `ptrs[LHS]` is `x`, `ptrs[OUT]` where the smallest element is noted and `ptrs[OPERANDS]` where the
/// largest is, all `f32`. Returns `OK` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; other threads access the results by this function
/// alone.
pub unsafe extern "C" fn gm_range_f32(
    desc: *const RangeDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    // SAFETY: the pointers cover the operands.
    unsafe {
        let noted = Extremes {
            smallest: pointer(ptrs, OUT),
            largest: pointer(ptrs, OPERANDS),
        };
        let (first, last) = (begin * PER_ITEM, (end * PER_ITEM).min(desc.n));
        if desc.starts != 0 && begin < end {
            *noted.smallest = f32::INFINITY;
            *noted.largest = f32::NEG_INFINITY;
        } else if first < last {
            let x = pointer(ptrs, LHS).add(first);
            let mut seen = Seen::NONE;
            dispatch(isa, See(&mut seen, Rect::row(x, last - first)));
            noted.note(seen.extremes());
        }
    }
    OK
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    /// The range of `x`, items of the second half first.
    fn range(isa: Isa, x: &[f32]) -> [f32; 2] {
        let mut noted = [7.0, 7.0];
        let [smallest, largest] = noted.each_mut().map(|y| std::ptr::from_mut(y).cast());
        let x_address = x.as_ptr().cast_mut().cast();
        let nothing = std::ptr::null_mut();
        let ptrs = [x_address, nothing, smallest, nothing, largest];
        let desc = RangeDesc::new(isa, x.len());
        let split = desc.n_items() / 2;
        let start = RangeDesc::start(isa);
        let calls = [
            (&start, 0, 1),
            (&desc, split, desc.n_items()),
            (&desc, 0, split),
        ];
        for (desc, begin, end) in calls {
            // SAFETY: the buffers have the sizes that the descriptors describe.
            let status = unsafe { gm_range_f32(desc, ptrs.as_ptr(), begin, end) };
            assert_eq!(status, OK);
        }
        noted
    }

    #[test]
    fn ranges_are_those_of_single_elements() {
        let mut rng = Rng(78);
        for isa in Isa::available() {
            assert_eq!(range(isa, &[]), [f32::INFINITY, f32::NEG_INFINITY]);
            for n in [
                1,
                3,
                4,
                15,
                16,
                17,
                33,
                64,
                1000,
                PER_ITEM + 5,
                3 * PER_ITEM,
            ] {
                let mut x = rng.vec(n);
                x.iter_mut().for_each(|x| *x += rng.pick(&[-2.0, 0.0, 2.0]));
                let least = x.iter().copied().fold(f32::INFINITY, f32::min);
                let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(range(isa, &x), [least, most], "{isa} {n}");
                x[rng.below(n)] = f32::NAN;
                assert!(range(isa, &x).iter().all(|x| x.is_nan()), "{isa} {n}");
                x.fill(f32::NEG_INFINITY);
                assert_eq!(range(isa, &x), [f32::NEG_INFINITY; 2]);
            }
        }
    }

    #[test]
    fn the_sign_of_a_zero_does_not_depend_on_the_order() {
        let mut rng = Rng(79);
        for isa in Isa::available() {
            let zeros = (0..2 * PER_ITEM + 9).map(|_| rng.pick(&[0.0, -0.0]));
            let found = range(isa, &zeros.collect::<Vec<f32>>());
            assert_eq!(found.map(f32::to_bits), [0, 0]);
        }
    }
}
