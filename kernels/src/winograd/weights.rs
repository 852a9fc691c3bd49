//! Transformed filters, in panels.

use super::form::{Form, Form2, Form4};
use crate::isa::Isa;
use crate::pack::packed_len;
use crate::simd::{Simd, Task, dispatch};
use std::marker::PhantomData;

/// Elements of the packed weights of a convolution.
pub fn packed_winograd_len(isa: Isa, tile: usize, [input, output]: [usize; 2]) -> usize {
    (tile + 2) * (tile + 2) * packed_len(isa, input, output)
}

/// Filters in memory: element strides of the two axes of the window, of the input and of the output
/// channel.
#[derive(Clone, Copy, Debug)]
pub struct FilterStrides {
    /// Between rows and columns of the window.
    pub taps: [isize; 2],
    /// Between input channels.
    pub input: isize,
    /// Between output channels.
    pub output: isize,
}

/// Transforms and packs the filters of a convolution by tiles of `tile` pixels, from their first
/// element on: for each position of an input tile the panels of an `[in_channels, out_channels]`
/// matrix.
///
/// Computed in f64, rounded once. `packed` has [`packed_winograd_len`] elements, and is zero before. Panics
/// when `weights` or `packed` is too short, or there is no such tile.
pub fn pack_winograd(
    isa: Isa,
    tile: usize,
    [in_channels, out_channels]: [usize; 2],
    weights: &[f32],
    strides: FilterStrides,
    packed: &mut [f32],
) {
    assert!([2, 4].contains(&tile), "no tiles of {tile} pixels");
    let reach = |n: usize, stride: isize| n.saturating_sub(1) as isize * stride;
    let last = reach(3, strides.taps[0])
        + reach(3, strides.taps[1])
        + reach(in_channels, strides.input)
        + reach(out_channels, strides.output);
    let is_covered = usize::try_from(last).is_ok_and(|last| last < weights.len());
    assert!(is_covered, "too few weights");
    let n = packed_winograd_len(isa, tile, [in_channels, out_channels]);
    assert!(packed.len() >= n, "too little room for {n} elements");
    let pack = Pack {
        isa,
        in_channels,
        out_channels,
        weights,
        strides,
        packed,
    };
    // SAFETY: all indices are within the bounds that were checked; `isa` packs for itself only where it
    // is available, else the portable form does.
    unsafe {
        match tile {
            2 => run::<2, 4, Form2>(pack),
            _ => run::<4, 6, Form4>(pack),
        }
    }
}

/// # Safety
/// As for [`pack_winograd`].
unsafe fn run<const M: usize, const A: usize, F: Form<M, A>>(pack: Pack) {
    let own = Isa::usable(pack.isa as u32).unwrap_or(Isa::Portable);
    let task = Filters::<M, A, F> {
        pack,
        form: PhantomData,
    };
    // SAFETY: by contract.
    unsafe { dispatch(own, task) }
}

struct Pack<'a> {
    isa: Isa,
    in_channels: usize,
    out_channels: usize,
    weights: &'a [f32],
    strides: FilterStrides,
    packed: &'a mut [f32],
}

struct Filters<'a, const M: usize, const A: usize, F> {
    pack: Pack<'a>,
    form: PhantomData<F>,
}

impl<const M: usize, const A: usize, F: Form<M, A>> Task for Filters<'_, M, A, F> {
    type Out = ();

    /// Safety: the filters are covered by the weights.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let pack = self.pack;
        let step = packed_len(pack.isa, pack.in_channels, pack.out_channels);
        // Each position is written as a stream: panels outermost, input channels innermost.
        for output in (0..pack.out_channels).step_by(S::LANES) {
            for input in 0..pack.in_channels {
                let filters = pack.filters::<S>(input, output);
                let first = pack.place(input, output);
                let to = &mut pack.packed[first..];
                // SAFETY: by contract.
                unsafe { transformed::<S, M, A, F>(s, &filters, to, step) };
            }
        }
    }
}

/// Stores the transforms of filters, `step` elements from position to position.
///
/// Loops, not closures, which would not be compiled for the instruction set.
///
/// # Safety
/// As for [`pack_winograd`].
#[inline(always)]
unsafe fn transformed<S: Simd, const M: usize, const A: usize, F: Form<M, A>>(
    s: S,
    filters: &[[f32; 16]; 9],
    to: &mut [f32],
    step: usize,
) {
    let mut taps = [s.splat_d(0.0); 9];
    for (tap, lanes) in taps.iter_mut().zip(filters) {
        // SAFETY: a buffer of 16 elements.
        *tap = s.widen(unsafe { s.load(lanes.as_ptr()) });
    }
    for a in 0..A {
        let mut row = [s.splat_d(0.0); 3];
        for (c, x) in row.iter_mut().enumerate() {
            *x = combined(s, F::FILTER[a], [taps[c], taps[3 + c], taps[6 + c]]);
        }
        for b in 0..A {
            let product = s.narrow(combined(s, F::FILTER[b], row));
            let at = (a * A + b) * step;
            // SAFETY: a slice of `LANES` elements.
            unsafe { s.store(to[at..at + S::LANES].as_mut_ptr(), product) };
        }
    }
}

/// The sum of products with three factors, each product and each sum rounded, so that every machine packs the same bits.
#[inline(always)]
fn combined<S: Simd>(s: S, factors: [f64; 3], x: [S::D; 3]) -> S::D {
    let one = s.splat_d(1.0);
    let mut sum = s.mul_d(s.splat_d(factors[0]), x[0]);
    for i in 1..3 {
        let product = s.mul_d(s.splat_d(factors[i]), x[i]);
        sum = s.fma_d(product, one, sum);
    }
    sum
}

impl Pack<'_> {
    /// The nine taps of the filters of `LANES` output channels, 0 beyond the last.
    #[inline(always)]
    fn filters<S: Simd>(&self, input: usize, output: usize) -> [[f32; 16]; 9] {
        let mut taps = [[0.0; 16]; 9];
        let n = (self.out_channels - output).min(S::LANES);
        let first = input as isize * self.strides.input + output as isize * self.strides.output;
        for (tap, lanes) in taps.iter_mut().enumerate() {
            let (r, c) = ((tap / 3) as isize, (tap % 3) as isize);
            let at = first + r * self.strides.taps[0] + c * self.strides.taps[1];
            for (i, lane) in lanes[..n].iter_mut().enumerate() {
                *lane = self.weights[(at + i as isize * self.strides.output) as usize];
            }
        }
        taps
    }

    /// Index of an element in the panels of the first position.
    #[inline(always)]
    fn place(&self, input: usize, output: usize) -> usize {
        let (nr, k) = (self.isa.nr(), self.in_channels);
        output / nr * k * nr + input * nr + output % nr
    }
}
