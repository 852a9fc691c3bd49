//! Bilinear samples of images in f32, for sampling grids and deformable convolutions.
//!
//! `x: [images, channels, height, width]` with any strides, `y: [images, channels, taps, points]`
//! contiguous. An item is a block of channels of one group of positions, and all samples of a channel
//! or a part of them. It copies their planes into the workspace with a border of zeros, so that every
//! neighbour of a sample is in memory; then, some samples at a time, it computes positions and weights
//! once for all channels of the block. Products and sums are rounded one by one, so that results do not
//! depend on the instruction set.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OPERANDS, OUT, RHS, UNSUPPORTED_ISA, WORKSPACE};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Samples whose positions are held at a time.
const CHUNK: usize = 256;
/// Channels of an item, at most.
const MOST_CHANNELS: usize = 16;
/// Elements of the copied planes of an item, unless one plane alone is larger: half of a usual
/// second-level cache.
const MOST_ELEMENTS: usize = 1 << 16;

/// Items below which samples are divided among several, for more threads.
const WANTED_ITEMS: usize = 16;
/// Items that copy the same planes, at most.
const MOST_PARTS: usize = 4;

/// Samples of images.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// 1 where samples are multiplied by a mask.
    pub is_masked: u32,
    /// Number of images.
    pub images: usize,
    /// Channels of images.
    pub channels: usize,
    /// Groups of channels with positions of their own.
    pub groups: usize,
    /// Height and width of images.
    pub plane: [usize; 2],
    /// Rows of points with their positions one after the other.
    pub taps: usize,
    /// Points of a tap.
    pub points: usize,
    /// Elements between neighbours of `x` along each axis.
    pub x_strides: [isize; 4],
}

descriptor!(SampleDesc {
    isa,
    is_masked,
    images,
    channels,
    groups,
    plane,
    taps,
    points,
    x_strides
});

impl SampleDesc {
    /// Items of all images.
    pub fn n_items(&self) -> usize {
        self.images * self.groups * self.n_blocks() * self.n_parts()
    }

    /// Bytes of memory that a concurrent call needs.
    pub fn workspace_bytes(&self) -> usize {
        self.block() * self.pitch() * size_of::<f32>()
    }

    /// Elements of `y`.
    pub fn n_samples(&self) -> usize {
        self.images * self.channels * self.taps * self.points
    }

    /// Chunks of a tap.
    fn n_chunks(&self) -> usize {
        self.points.div_ceil(CHUNK)
    }

    fn channels_per_group(&self) -> usize {
        self.channels / self.groups
    }

    /// Elements of a copied row: the pixels between two zeros.
    fn row(&self) -> usize {
        self.plane[1] + 2
    }

    /// Elements of a copied plane: the pixels between two rows of zeros, and a third one.
    fn pitch(&self) -> usize {
        (self.plane[0] + 3) * self.row()
    }

    /// Channels of an item.
    fn block(&self) -> usize {
        let most = (MOST_ELEMENTS / self.pitch()).clamp(1, MOST_CHANNELS);
        most.min(self.channels_per_group().max(1))
    }

    /// Items of a group of an image.
    fn n_blocks(&self) -> usize {
        self.channels_per_group().div_ceil(self.block())
    }

    /// Parts of the chunks, each an item, where there are few items without.
    fn n_parts(&self) -> usize {
        let items = self.images * self.groups * self.n_blocks();
        let chunks = self.taps * self.n_chunks();
        let parts = WANTED_ITEMS.div_ceil(items.max(1)).min(MOST_PARTS);
        let parts = parts.clamp(1, chunks.max(1));
        chunks.div_ceil(chunks.div_ceil(parts).max(1)).max(1)
    }

    fn is_valid(&self) -> bool {
        self.groups > 0
            && self.is_masked <= 1
            && self.channels.is_multiple_of(self.groups)
            && [self.plane[0], self.plane[1], self.taps, self.points]
                .iter()
                .all(|n| *n > 0)
    }
}

/// The pixel above and left of a sample, as a position in a copied plane, and the weights of its four
/// neighbours.
#[derive(Clone, Copy)]
struct Sample {
    at: usize,
    weights: [f32; 4],
}

/// The operands of a call.
struct Operands<'a> {
    desc: &'a SampleDesc,
    x: *const f32,
    positions: *const f32,
    mask: *const f32,
    y: *mut f32,
    planes: *mut f32,
}

/// Channels of a group of an image.
struct Item<'a> {
    operands: &'a Operands<'a>,
    image: usize,
    group: usize,
    channels: Range<usize>,
    /// Chunks of all taps.
    chunks: Range<usize>,
}

impl Task for Item<'_> {
    type Out = ();

    /// # Safety
    /// The operands are those of a valid descriptor, and the channels are in the group.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, _: S) {
        let desc = self.operands.desc;
        // SAFETY: by contract.
        unsafe {
            for (i, channel) in self.channels.clone().enumerate() {
                self.copy_plane(i, channel);
            }
            for chunk in self.chunks.clone() {
                let (tap, start) = (chunk / desc.n_chunks(), chunk % desc.n_chunks() * CHUNK);
                self.chunk(tap, start..desc.points.min(start + CHUNK));
            }
        }
    }
}

impl Item<'_> {
    /// Copies the plane of a channel between zeros, to place `i` of the workspace.
    ///
    /// # Safety
    /// As [`Item::run`].
    #[inline(always)]
    unsafe fn copy_plane(&self, i: usize, channel: usize) {
        let Operands {
            desc, x, planes, ..
        } = *self.operands;
        let [height, width] = desc.plane;
        let [image_stride, channel_stride, row_stride, column_stride] = desc.x_strides;
        let first = self.image as isize * image_stride + channel as isize * channel_stride;
        // SAFETY: the workspace has a pitch for each channel of an item, and the image has the pixels.
        unsafe {
            let to = planes.add(i * desc.pitch());
            to.write_bytes(0, desc.pitch());
            for row in 0..height {
                let from = x.wrapping_offset(first + row as isize * row_stride);
                let to = to.add((row + 1) * desc.row() + 1);
                for column in 0..width {
                    *to.add(column) = *from.wrapping_offset(column as isize * column_stride);
                }
            }
        }
    }

    /// Samples of some points of a tap, for each channel.
    ///
    /// # Safety
    /// As [`Item::run`]; the planes are copied, and at most [`CHUNK`] points exist.
    #[inline(always)]
    unsafe fn chunk(&self, tap: usize, points: Range<usize>) {
        let Operands {
            desc,
            y,
            planes,
            mask,
            ..
        } = *self.operands;
        let row = desc.row();
        let mut unset = [const { MaybeUninit::<Sample>::uninit() }; CHUNK];
        let of_group = (self.image * desc.groups + self.group) * desc.taps + tap;
        for (entry, point) in unset.iter_mut().zip(points.clone()) {
            // SAFETY: the tap and the point exist.
            entry.write(unsafe { self.sample(of_group, point) });
        }
        for (i, channel) in self.channels.clone().enumerate() {
            // SAFETY: the loop above has written as many samples as there are points; every position is
            // at least two rows before the end of a plane; results and mask have these points.
            unsafe {
                let samples =
                    std::slice::from_raw_parts(unset.as_ptr().cast::<Sample>(), points.len());
                let plane = planes.add(i * desc.pitch()).cast_const();
                let results = (self.image * desc.channels + channel) * desc.taps + tap;
                let y = y.add(results * desc.points + points.start);
                for (k, sample) in samples.iter().enumerate() {
                    *y.add(k) = sample.value(plane, row);
                }
                if desc.is_masked == 1 {
                    let mask = mask.add(of_group * desc.points + points.start);
                    for k in 0..points.len() {
                        *y.add(k) *= *mask.add(k);
                    }
                }
            }
        }
    }

    /// The sample at a point; `tap` counts those of all groups and images.
    ///
    /// # Safety
    /// As [`Item::run`]; the tap and the point exist.
    #[inline(always)]
    unsafe fn sample(&self, tap: usize, point: usize) -> Sample {
        let desc = self.operands.desc;
        let (mut low, mut rest, mut is_inside) = ([0; 2], [0.0; 2], true);
        for d in 0..2 {
            let positions = self
                .operands
                .positions
                .wrapping_add((tap * 2 + d) * desc.points);
            // SAFETY: there are two positions for each tap and point.
            let at = unsafe { *positions.add(point) };
            // False for NaN.
            is_inside &= at > -1.0 && at < desc.plane[d] as f32;
            rest[d] = at - at.floor();
            low[d] = at.floor() as isize;
            // The extent of an enormous image may be rounded up above.
            is_inside &= low[d] < desc.plane[d] as isize;
        }
        if !is_inside {
            let zeros = (desc.plane[0] + 1) * desc.row();
            return Sample {
                at: zeros,
                weights: [0.0; 4],
            };
        }
        let [down, right] = rest;
        let [y, x] = low.map(|at| (at + 1) as usize);
        Sample {
            at: y * desc.row() + x,
            weights: [
                (1.0 - down) * (1.0 - right),
                (1.0 - down) * right,
                down * (1.0 - right),
                down * right,
            ],
        }
    }
}

impl Sample {
    /// The weighted sum of the neighbours in a plane with rows of so many elements.
    ///
    /// # Safety
    /// The neighbours are in the plane.
    #[inline(always)]
    unsafe fn value(&self, plane: *const f32, row: usize) -> f32 {
        // SAFETY: by contract.
        let neighbours = unsafe {
            let above = plane.add(self.at);
            let below = above.add(row);
            [*above, *above.add(1), *below, *below.add(1)]
        };
        let [a, b, c, d] = self.weights;
        a * neighbours[0] + b * neighbours[1] + c * neighbours[2] + d * neighbours[3]
    }
}

/// Computes items `begin..end` of a [`SampleDesc`]: `ptrs[LHS]` is `x`, `ptrs[RHS]` the positions
/// `[images, groups, taps, 2, points]` in pixels (down, then right), `ptrs[OUT]` is `y`, and
/// `ptrs[OPERANDS]` the mask `[images, groups, taps, points]` if there is one.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands and workspace; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_sample_f32(
    desc: *const SampleDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if !desc.is_valid() {
        return INVALID;
    }
    let address = |i: usize| {
        // SAFETY: by contract.
        unsafe { crate::pointer(ptrs, i) }
    };
    let operands = Operands {
        desc,
        x: address(LHS),
        positions: address(RHS),
        mask: match desc.is_masked {
            1 => address(OPERANDS),
            _ => std::ptr::null(),
        },
        y: address(OUT),
        planes: address(WORKSPACE),
    };
    for item in begin..end.min(desc.n_items()) {
        let (item, part) = (item / desc.n_parts(), item % desc.n_parts());
        let (of_group, block) = (item / desc.n_blocks(), item % desc.n_blocks());
        let n_chunks = desc.taps * desc.n_chunks();
        let of_part = n_chunks.div_ceil(desc.n_parts());
        let (image, group) = (of_group / desc.groups, of_group % desc.groups);
        let per_group = desc.channels_per_group();
        let first = block * desc.block();
        let channels = first..per_group.min(first + desc.block());
        let item = Item {
            operands: &operands,
            image,
            group,
            channels: group * per_group + channels.start..group * per_group + channels.end,
            chunks: part * of_part..n_chunks.min((part + 1) * of_part),
        };
        // SAFETY: by contract; the CPU has the instruction set.
        unsafe { dispatch(isa, item) };
    }
    OK
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    /// A call with its operands.
    struct Case {
        desc: SampleDesc,
        x: Vec<f32>,
        positions: Vec<f32>,
        mask: Vec<f32>,
    }

    impl Case {
        fn random(rng: &mut Rng) -> Case {
            let (images, groups) = (2, rng.pick(&[1, 2]));
            let channels = groups * rng.pick(&[1, 3, 17]);
            let plane = [1 + rng.below(9), 1 + rng.below(9)];
            let [c, height, width] = [channels, plane[0], plane[1]].map(|n| n as isize);
            let strides = [
                [c * height * width, height * width, width, 1],
                [c * height * width, 1, width * c, c],
            ];
            let desc = SampleDesc {
                isa: rng.pick(&Isa::ALL).or_portable() as u32,
                is_masked: rng.below(2) as u32,
                images,
                channels,
                groups,
                plane,
                taps: 1 + rng.below(9),
                points: rng.pick(&[1, 7, 40, 256, 257, 600]),
                x_strides: rng.pick(&strides),
            };
            let n_samples = images * groups * desc.taps * desc.points;
            let mut x = rng.vec(images * channels * plane[0] * plane[1]);
            let n = x.len();
            (0..rng.below(3)).for_each(|_| x[rng.below(n)] = rng.pick(&[f32::NAN, f32::INFINITY]));
            let place = |rng: &mut Rng, i: usize| {
                let extent = plane[i / desc.points % 2] as f32;
                (rng.vec(1)[0] * 0.75 + 0.5) * extent
            };
            let mut positions: Vec<f32> = (0..2 * n_samples).map(|i| place(rng, i)).collect();
            positions.iter_mut().step_by(3).for_each(|p| *p = p.round());
            let odd = [0.5, f32::NAN, f32::INFINITY, -3e9, 3e38];
            (0..rng.below(4)).for_each(|_| positions[rng.below(n_samples)] = rng.pick(&odd));
            let mask = rng.vec(n_samples);
            Case {
                desc,
                x,
                positions,
                mask,
            }
        }

        /// The status and the results of a call for each range of items between neighbouring `cuts`.
        fn run(&self, cuts: &[usize]) -> (u32, Vec<f32>) {
            let mut y = vec![7.0f32; self.desc.n_samples()];
            let mut workspace = vec![f32::NAN; self.desc.workspace_bytes() / 4];
            let mut ptrs = [std::ptr::null_mut(); 5];
            ptrs[LHS] = self.x.as_ptr().cast_mut().cast();
            ptrs[RHS] = self.positions.as_ptr().cast_mut().cast();
            ptrs[OUT] = y.as_mut_ptr().cast();
            ptrs[WORKSPACE] = workspace.as_mut_ptr().cast();
            ptrs[OPERANDS] = self.mask.as_ptr().cast_mut().cast();
            let mut status = OK;
            for cut in cuts.windows(2) {
                // SAFETY: all arrays have the extents of the descriptor.
                status =
                    status.max(unsafe { gm_sample_f32(&self.desc, ptrs.as_ptr(), cut[0], cut[1]) });
            }
            (status, y)
        }

        fn expected(&self, i: usize) -> f32 {
            let desc = &self.desc;
            let (point, tap) = (i % desc.points, i / desc.points % desc.taps);
            let (channel, image) = (
                i / desc.points / desc.taps % desc.channels,
                i / desc.points / desc.taps / desc.channels,
            );
            let group = channel / (desc.channels / desc.groups);
            let row = (image * desc.groups + group) * desc.taps + tap;
            let along = |d: usize| {
                let at = self.positions[(2 * row + d) * desc.points + point];
                let rest = at - at.floor();
                [(at.floor(), 1.0 - rest), (at.floor() + 1.0, rest)]
            };
            let [image_stride, channel_stride, row_stride, column_stride] = desc.x_strides;
            let mut sum = 0.0;
            // A pixel outside: without weight even where the next one is not finite.
            let [rows, columns] = [along(0), along(1)];
            let is_outside = [rows, columns]
                .iter()
                .any(|n| n[0].0 == -1.0 && n[1].1 == 0.0);
            for (y, wy) in rows.into_iter().filter(|_| !is_outside) {
                for (x, wx) in columns {
                    let is_row = (0.0..desc.plane[0] as f32).contains(&y);
                    if is_row && (0.0..desc.plane[1] as f32).contains(&x) {
                        let at = image as isize * image_stride + channel as isize * channel_stride;
                        let at = at + y as isize * row_stride + x as isize * column_stride;
                        sum += wy * wx * self.x[at as usize];
                    }
                }
            }
            match desc.is_masked {
                1 => sum * self.mask[row * desc.points + point],
                _ => sum,
            }
        }
    }

    #[test]
    fn samples_are_those_of_a_plain_loop_bit_for_bit() {
        let mut rng = Rng(54);
        for round in 0..300 {
            let case = Case::random(&mut rng);
            let n = case.desc.n_items();
            let mut cuts = [0, rng.below(n + 1), n];
            cuts.sort_unstable();
            let (status, got) = case.run(&cuts);
            assert_eq!(status, OK);
            for (i, got) in got.into_iter().enumerate() {
                let want = case.expected(i);
                let same = got == want || got.is_nan() && want.is_nan();
                assert!(same, "round {round}: {:?} {i}: {got}, {want}", case.desc);
            }
        }
    }

    #[test]
    fn large_planes_have_an_item_for_each_channel() {
        let desc = Case::random(&mut Rng(55)).desc;
        let large = SampleDesc {
            plane: [300, 300],
            channels: 6,
            groups: 2,
            ..desc
        };
        assert_eq!((large.block(), large.n_blocks()), (1, 3));
        let small = SampleDesc {
            plane: [7, 7],
            channels: 64,
            groups: 1,
            ..desc
        };
        assert_eq!((small.block(), small.n_blocks()), (16, 4));
    }

    #[test]
    fn descriptors_that_contradict_themselves_are_refused() {
        let with = |change: fn(&mut SampleDesc)| {
            let mut case = Case::random(&mut Rng(56));
            let y = case.run(&[0, 0]);
            assert_eq!(y.0, OK);
            change(&mut case.desc);
            // SAFETY: an invalid descriptor reads no operand.
            unsafe { gm_sample_f32(&case.desc, [std::ptr::null_mut(); 5].as_ptr(), 0, 1) }
        };
        assert_eq!(with(|d| d.isa = 0), UNSUPPORTED_ISA);
        assert_eq!(with(|d| d.groups = 0), INVALID);
        assert_eq!(with(|d| d.is_masked = 2), INVALID);
        assert_eq!(with(|d| d.plane[1] = 0), INVALID);
        assert_eq!(with(|d| d.points = 0), INVALID);
    }
}
