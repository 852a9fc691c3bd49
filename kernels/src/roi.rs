//! Regions of interest in f32: averages and maxima of bilinear samples.
//!
//! `x: [images, channels, height, width]` with any strides, `y: [regions, channels, rows, columns]`
//! contiguous. Positions are computed in f32, once for all channels of an item; samples are joined in
//! f64, the rows' outermost, so that results do not depend on the instruction set. Item `i` is a block
//! of [`BLOCK`] channels of a region: block `i % n_blocks` of region `i / n_blocks`.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OPERANDS, OUT, OUT_OF_RANGE, RHS, UNSUPPORTED_ISA, WORKSPACE};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Channels of an item.
pub const BLOCK: usize = 64;

/// Lanes of a vector, at most.
const MOST_LANES: usize = 16;

/// Samples of a bin along one axis that tables have room for where the region decides their number.
const ADAPTIVE_ROOM: usize = 32;
/// Entries of a table, at most. Samples beyond the table are computed where they are used.
const MOST_ENTRIES: usize = 4096;

/// The function of the samples of a bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RoiKind {
    /// The largest weighted pixel, NaN if any is; 0 of none.
    Max = 1,
    /// The mean of the samples; 0 of none.
    Average = 2,
}

/// Bins of regions.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoiAlignDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// A [`RoiKind`] as its number.
    pub kind: u32,
    /// Factor of the corners of regions.
    pub scale: f32,
    /// 1 where coordinates are those of pixels' corners; 0 where they are those of pixels' middles,
    /// and regions are a pixel large at least.
    pub half_pixel: u32,
    /// Samples of a bin along an axis; 0 for as many as it has pixels, rounded up.
    pub sampling: usize,
    /// More samples than these along an axis are an error.
    pub max_samples: usize,
    /// Bytes of the image number of a region: 4 or 8, signed.
    pub index_bytes: usize,
    /// Number of regions.
    pub regions: usize,
    /// Number of images.
    pub images: usize,
    /// Channels of images.
    pub channels: usize,
    /// Height and width of images.
    pub plane: [usize; 2],
    /// Rows and columns of bins.
    pub bins: [usize; 2],
    /// Elements between neighbours of `x` along each axis.
    pub x_strides: [isize; 4],
}

descriptor!(RoiAlignDesc {
    isa,
    kind,
    scale,
    half_pixel,
    sampling,
    max_samples,
    index_bytes,
    regions,
    images,
    channels,
    plane,
    bins,
    x_strides
});

impl RoiAlignDesc {
    /// Items of all regions.
    pub fn n_items(&self) -> usize {
        self.regions * self.n_blocks()
    }

    /// Bytes of memory that a concurrent call needs.
    pub fn workspace_bytes(&self) -> usize {
        (self.room(0) + self.room(1)) * size_of::<Neighbours>()
    }

    fn n_blocks(&self) -> usize {
        self.channels.div_ceil(BLOCK)
    }

    /// Entries of the table of an axis.
    fn room(&self, axis: usize) -> usize {
        let of_bin = match self.sampling {
            0 => ADAPTIVE_ROOM,
            n => n,
        };
        self.bins[axis].saturating_mul(of_bin).min(MOST_ENTRIES)
    }

    fn is_valid(&self) -> bool {
        let is_empty = self.plane.contains(&0) || self.bins.contains(&0);
        (1..=2).contains(&self.kind) && matches!(self.index_bytes, 4 | 8) && !is_empty
    }
}

/// A position between two pixels along one axis.
#[derive(Clone, Copy)]
#[repr(C)]
struct Neighbours {
    /// Both pixels, as offsets in elements.
    offsets: [isize; 2],
    weights: [f32; 2],
    is_inside: bool,
}

/// Samples of a region's bins along one axis.
struct Samples {
    start: f32,
    /// Extent of a bin.
    bin: f32,
    /// Number of samples of a bin.
    n: usize,
    /// Pixels of the image.
    extent: usize,
    /// Elements between pixels.
    stride: isize,
}

impl Samples {
    /// Samples between two coordinates along an axis; `None` if they are too many.
    fn of(desc: &RoiAlignDesc, axis: usize, [from, to]: [f32; 2]) -> Option<Samples> {
        let offset = if desc.half_pixel == 1 { 0.5 } else { 0.0 };
        let (start, end) = (from * desc.scale - offset, to * desc.scale - offset);
        let mut extent = end - start;
        if desc.half_pixel == 0 && extent < 1.0 {
            extent = 1.0;
        }
        let bin = extent / desc.bins[axis] as f32;
        let n = match desc.sampling {
            0 if bin.ceil() > desc.max_samples as f32 => return None,
            // NaN and negative extents have no samples.
            0 => bin.ceil() as usize,
            n => n,
        };
        Some(Samples {
            start,
            bin,
            n,
            extent: desc.plane[axis],
            stride: desc.x_strides[2 + axis],
        })
    }

    /// Neighbours of sample `i` of a bin. Outside of the image, and for NaN, they are pixels too.
    fn neighbours(&self, bin: usize, i: usize) -> Neighbours {
        let within = (i as f32 + 0.5) * self.bin / self.n as f32;
        let at = self.start + bin as f32 * self.bin + within;
        let is_inside = at >= -1.0 && at <= self.extent as f32;
        let last = self.extent - 1;
        let at = if is_inside { at } else { 0.0 };
        let at = at.max(0.0).min(last as f32);
        let rest = at - at.floor();
        // Rounding may put the last pixel of an enormous image beyond its end.
        let low = (at.floor() as usize).min(last);
        let high = (low + 1).min(last);
        Neighbours {
            offsets: [low as isize * self.stride, high as isize * self.stride],
            weights: [1.0 - rest, rest],
            is_inside,
        }
    }
}

/// Samples of one axis with the neighbours of the first ones.
struct Axis<'a> {
    samples: Samples,
    table: &'a [Neighbours],
}

impl<'a> Axis<'a> {
    fn new(samples: Samples, n_bins: usize, room: &'a mut [MaybeUninit<Neighbours>]) -> Axis<'a> {
        let n = room.len().min(n_bins.saturating_mul(samples.n));
        for (i, entry) in room[..n].iter_mut().enumerate() {
            entry.write(samples.neighbours(i / samples.n, i % samples.n));
        }
        // SAFETY: the loop has written the first `n` entries.
        let table = unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), n) };
        Axis { samples, table }
    }

    /// Neighbours of sample `i` of a bin.
    #[inline(always)]
    fn at(&self, bin: usize, i: usize) -> Neighbours {
        match self.table.get(bin * self.samples.n + i) {
            Some(neighbours) => *neighbours,
            None => self.samples.neighbours(bin, i),
        }
    }
}

/// A way to join numbers, lane by lane.
trait Join<S: Simd> {
    /// Numbers being joined.
    type Joined: Copy;
    /// Identity of joining.
    fn start(s: S) -> Self::Joined;
    fn zero(s: S) -> Self::Joined;
    fn join(s: S, a: Self::Joined, b: Self::Joined) -> Self::Joined;
    fn weighted(s: S, weight: f32, pixels: S::F) -> Self::Joined;
    /// The value of a bin of `n` joined samples.
    fn pooled(s: S, joined: Self::Joined, n: usize) -> S::F;
}

struct Sum;

impl<S: Simd> Join<S> for Sum {
    type Joined = S::D;

    #[inline(always)]
    fn start(s: S) -> S::D {
        s.splat_d(0.0)
    }

    #[inline(always)]
    fn zero(s: S) -> S::D {
        s.splat_d(0.0)
    }

    #[inline(always)]
    fn join(s: S, a: S::D, b: S::D) -> S::D {
        s.add_d(a, b)
    }

    #[inline(always)]
    fn weighted(s: S, weight: f32, pixels: S::F) -> S::D {
        s.mul_d(s.splat_d(f64::from(weight)), s.widen(pixels))
    }

    #[inline(always)]
    fn pooled(s: S, joined: S::D, n: usize) -> S::F {
        s.narrow(s.div_d(joined, s.splat_d(n.max(1) as f64)))
    }
}

/// Products are rounded at once, which leaves the order of exact ones.
struct Largest;

impl<S: Simd> Join<S> for Largest {
    type Joined = S::F;

    #[inline(always)]
    fn start(s: S) -> S::F {
        s.splat(f32::NEG_INFINITY)
    }

    #[inline(always)]
    fn zero(s: S) -> S::F {
        s.zero()
    }

    /// NaN if either is; of zeros of both signs the positive one.
    #[inline(always)]
    fn join(s: S, a: S::F, b: S::F) -> S::F {
        let of_equals = s.as_float(s.and(s.bits(a), s.bits(b)));
        // The second operand if either is NaN.
        let largest = s.select(s.eq(a, b), of_equals, s.max(a, b));
        s.select(s.eq(a, a), largest, a)
    }

    #[inline(always)]
    fn weighted(s: S, weight: f32, pixels: S::F) -> S::F {
        s.mul(s.splat(weight), pixels)
    }

    #[inline(always)]
    fn pooled(s: S, joined: S::F, n: usize) -> S::F {
        if n == 0 { s.zero() } else { joined }
    }
}

/// Channels of one region.
struct Region<'a> {
    desc: &'a RoiAlignDesc,
    axes: [Axis<'a>; 2],
    /// The image's first element.
    x: *const f32,
    /// The region's first result.
    y: *mut f32,
    channels: Range<usize>,
}

impl Task for Region<'_> {
    type Out = ();

    /// # Safety
    /// The image and the region's results are those of a valid descriptor.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let is_max = self.desc.kind == RoiKind::Max as u32;
        // SAFETY: by contract.
        unsafe {
            match (is_max, self.desc.x_strides[1] == 1) {
                (false, true) => self.dense::<S, Sum>(s),
                (false, false) => self.spaced::<S, Sum>(s),
                (true, true) => self.dense::<S, Largest>(s),
                (true, false) => self.spaced::<S, Largest>(s),
            }
        }
    }
}

impl Region<'_> {
    /// Channels that are neighbours in memory: bin by bin.
    ///
    /// # Safety
    /// As [`Region::run`].
    #[inline(always)]
    unsafe fn dense<S: Simd, J: Join<S>>(&self, s: S) {
        let Range { start, end } = self.channels;
        for block in (start..end).step_by(BLOCK) {
            let end = end.min(block + BLOCK);
            for bin in 0..self.desc.bins[0] * self.desc.bins[1] {
                for channel in (block..end).step_by(S::LANES) {
                    let n = S::LANES.min(end - channel);
                    // SAFETY: the channels exist.
                    unsafe { self.bin::<S, J, true>(s, bin, channel..channel + n) };
                }
            }
        }
    }

    /// Channels in planes: a few planes after the other.
    ///
    /// # Safety
    /// As [`Region::run`].
    #[inline(always)]
    unsafe fn spaced<S: Simd, J: Join<S>>(&self, s: S) {
        let Range { start, end } = self.channels;
        for channel in (start..end).step_by(S::LANES) {
            let n = S::LANES.min(end - channel);
            for bin in 0..self.desc.bins[0] * self.desc.bins[1] {
                // SAFETY: the channels exist.
                unsafe { self.bin::<S, J, false>(s, bin, channel..channel + n) };
            }
        }
    }

    /// Computes a bin of at most as many channels as there are lanes.
    ///
    /// # Safety
    /// As [`Region::run`], and the channels exist; `DENSE` where they are neighbours.
    #[inline(always)]
    unsafe fn bin<S: Simd, J: Join<S>, const DENSE: bool>(
        &self,
        s: S,
        bin: usize,
        channels: Range<usize>,
    ) {
        let [rows, columns] = &self.axes;
        let n = rows.samples.n * columns.samples.n;
        let (row, column) = (bin / self.desc.bins[1], bin % self.desc.bins[1]);
        let mut joined = J::start(s);
        for i in 0..rows.samples.n {
            let along_rows = rows.at(row, i);
            for j in 0..columns.samples.n {
                let along = [along_rows, columns.at(column, j)];
                // SAFETY: by contract.
                let sample = unsafe { self.sample::<S, J, DENSE>(s, &along, &channels) };
                joined = J::join(s, joined, sample);
            }
        }
        // SAFETY: by contract.
        unsafe { self.store(s, J::pooled(s, joined, n), bin, channels) };
    }

    /// # Safety
    /// As [`Region::bin`].
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, value: S::F, bin: usize, channels: Range<usize>) {
        let mut lanes = [0.0; MOST_LANES];
        // SAFETY: no instruction set has more lanes.
        unsafe { s.store(lanes.as_mut_ptr(), value) };
        let n_bins = self.desc.bins[0] * self.desc.bins[1];
        for (value, channel) in lanes.into_iter().zip(channels) {
            // SAFETY: the channel exists, and so does the bin.
            unsafe { *self.y.add(channel * n_bins + bin) = value };
        }
    }

    /// The joined weighted neighbours of a position in each channel; 0 outside.
    ///
    /// # Safety
    /// As [`Region::bin`].
    #[inline(always)]
    unsafe fn sample<S: Simd, J: Join<S>, const DENSE: bool>(
        &self,
        s: S,
        [rows, columns]: &[Neighbours; 2],
        channels: &Range<usize>,
    ) -> J::Joined {
        if !(rows.is_inside && columns.is_inside) {
            return J::zero(s);
        }
        let mut joined = J::zero(s);
        for corner in 0..4 {
            let (row, column) = (corner / 2, corner % 2);
            let offset = rows.offsets[row] + columns.offsets[column];
            // SAFETY: the position is on the image.
            let pixels = unsafe { self.pixels::<S, DENSE>(s, offset, channels) };
            let weight = rows.weights[row] * columns.weights[column];
            let term = J::weighted(s, weight, pixels);
            joined = match corner {
                0 => term,
                _ => J::join(s, joined, term),
            };
        }
        joined
    }

    /// The pixels at an offset in each channel.
    ///
    /// # Safety
    /// As [`Region::bin`], and the offset is that of a pixel.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const DENSE: bool>(
        &self,
        s: S,
        offset: isize,
        channels: &Range<usize>,
    ) -> S::F {
        let stride = if DENSE { 1 } else { self.desc.x_strides[1] };
        let first = offset + channels.start as isize * stride;
        let (first, n) = (self.x.wrapping_offset(first), channels.len());
        // SAFETY: by contract; the array has as many elements as any instruction set has lanes.
        unsafe {
            if DENSE && n == S::LANES {
                return s.load(first);
            }
            if DENSE {
                return s.load_n(first, n);
            }
            let mut lanes = [0.0; MOST_LANES];
            for (l, lane) in lanes[..n].iter_mut().enumerate() {
                *lane = *first.offset(l as isize * stride);
            }
            s.load(lanes.as_ptr())
        }
    }
}

/// The operands of a call.
struct Operands<'a> {
    desc: &'a RoiAlignDesc,
    ptrs: *const *mut u8,
}

impl Operands<'_> {
    /// # Safety
    /// There is an address `i`.
    unsafe fn address(&self, i: usize) -> *mut u8 {
        // SAFETY: by contract.
        unsafe { *self.ptrs.add(i) }
    }

    /// The image of a region; negative ones count from the end. `None` if there is no such image.
    ///
    /// # Safety
    /// The operands are those of the descriptor, and the region is one of them.
    unsafe fn image(&self, region: usize) -> Option<usize> {
        // SAFETY: by contract.
        let i = unsafe {
            let images = self.address(OPERANDS);
            match self.desc.index_bytes {
                4 => i64::from(*images.cast::<i32>().add(region)),
                _ => *images.cast::<i64>().add(region),
            }
        };
        let n = self.desc.images as i64;
        let i = if i < 0 { i.wrapping_add(n) } else { i };
        (0..n).contains(&i).then_some(i as usize)
    }

    /// The samples of a region along both axes; `None` if they are too many.
    ///
    /// # Safety
    /// As [`Operands::image`]; nothing else uses the workspace.
    unsafe fn axes(&self, region: usize) -> Option<[Axis<'_>; 2]> {
        let desc = self.desc;
        let (rows, columns) = (desc.room(0), desc.room(1));
        // SAFETY: by contract; memory of any bytes is uninitialised entries.
        let ([left, top, right, bottom], room) = unsafe {
            let corners = self.address(RHS).cast::<[f32; 4]>().add(region);
            let room = self.address(WORKSPACE).cast();
            let room = std::slice::from_raw_parts_mut(room, rows + columns);
            (*corners, room)
        };
        let (of_rows, of_columns) = room.split_at_mut(rows);
        let along_rows = Samples::of(desc, 0, [top, bottom])?;
        let along_columns = Samples::of(desc, 1, [left, right])?;
        Some([
            Axis::new(along_rows, desc.bins[0], of_rows),
            Axis::new(along_columns, desc.bins[1], of_columns),
        ])
    }

    /// Computes blocks of channels of a region; `None` if its image or number of samples is out of range.
    ///
    /// # Safety
    /// As [`Operands::axes`]; nothing else uses these results, and `isa` is available.
    unsafe fn compute(&self, isa: Isa, region: usize, blocks: Range<usize>) -> Option<()> {
        let desc = self.desc;
        let n_results = desc.channels * desc.bins[0] * desc.bins[1];
        // SAFETY: by contract.
        unsafe {
            let image = self.image(region)? as isize;
            let x = self.address(LHS).cast::<f32>().cast_const();
            let task = Region {
                desc,
                axes: self.axes(region)?,
                x: x.wrapping_offset(image * desc.x_strides[0]),
                y: self.address(OUT).cast::<f32>().add(region * n_results),
                channels: blocks.start * BLOCK..desc.channels.min(blocks.end * BLOCK),
            };
            dispatch(isa, task);
        }
        Some(())
    }
}

/// Computes items `begin..end` of a [`RoiAlignDesc`]: `ptrs[LHS]` is `x`, `ptrs[RHS]` the regions'
/// corners `[regions, 4]` (left, top, right, bottom), `ptrs[OUT]` is `y`, and `ptrs[OPERANDS]` holds
/// the regions' images.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`, or `OUT_OF_RANGE` where a region has no such image, or
/// too many samples.
///
/// # Safety
/// The pointers cover the descriptor's operands and workspace; no other thread writes these items' part
/// of `y`.
pub unsafe extern "C" fn gm_roi_align(
    desc: *const RoiAlignDesc,
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
    let (operands, n_blocks) = (Operands { desc, ptrs }, desc.n_blocks());
    let (mut item, end) = (begin, end.min(desc.n_items()));
    while item < end {
        let (region, first) = (item / n_blocks, item % n_blocks);
        let blocks = first..n_blocks.min(first + end - item);
        item += blocks.len();
        // SAFETY: by contract; the CPU has the instruction set.
        if unsafe { operands.compute(isa, region, blocks) }.is_none() {
            return OUT_OF_RANGE;
        }
    }
    OK
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Descriptor;
    use crate::testing::Rng;

    /// A call with its operands.
    struct Case {
        desc: RoiAlignDesc,
        x: Vec<f32>,
        corners: Vec<f32>,
        images: Vec<i64>,
    }

    impl Case {
        fn random(rng: &mut Rng) -> Case {
            let (images, channels, regions) = (2, rng.pick(&[1, 3, 5, 16, 37, 64, 150]), 3);
            let plane = [1 + rng.below(9), 1 + rng.below(9)];
            let [height, width] = plane.map(|n| n as isize);
            let c = channels as isize;
            let strides = [
                [c * height * width, height * width, width, 1],
                [c * height * width, 1, width * c, c],
            ];
            let desc = RoiAlignDesc {
                isa: rng.pick(&Isa::ALL).or_portable() as u32,
                kind: rng.pick(&[RoiKind::Max, RoiKind::Average]) as u32,
                scale: rng.pick(&[1.0, 0.25, 0.3]),
                half_pixel: rng.below(2) as u32,
                sampling: rng.below(4),
                max_samples: 1 << 14,
                index_bytes: rng.pick(&[4, 8]),
                regions,
                images,
                channels,
                plane,
                bins: [1 + rng.below(3), 1 + rng.below(8)],
                x_strides: rng.pick(&strides),
            };
            let n = images * channels * plane[0] * plane[1];
            let mut x = rng.vec(n);
            (0..rng.below(3)).for_each(|_| x[rng.below(n)] = rng.pick(&[f32::NAN, -0.0]));
            let reach = rng.pick(&[10.0, 60.0, 500.0]);
            let corners = (0..4 * regions).map(|_| rng.unit() * reach);
            let mut corners: Vec<f32> = corners.collect();
            // An infinite extent has too many samples where the region decides.
            let infinite = [f32::NAN, f32::NEG_INFINITY][desc.sampling.min(1)];
            corners[0] = rng.pick(&[corners[0], f32::NAN, infinite]);
            let images = (0..regions).map(|_| rng.below(4) as i64 - 2).collect();
            Case {
                desc,
                x,
                corners,
                images,
            }
        }

        /// The status and the results of a call for each range of items between neighbouring `cuts`.
        fn run(&self, cuts: &[usize]) -> (u32, Vec<f32>) {
            let desc = &self.desc;
            let n = desc.regions * desc.channels * desc.bins[0] * desc.bins[1];
            let mut y = vec![7.0f32; n];
            let narrow: Vec<i32> = self.images.iter().map(|&i| i as i32).collect();
            let images = match desc.index_bytes {
                4 => narrow.as_ptr().cast::<u8>(),
                _ => self.images.as_ptr().cast(),
            };
            let mut workspace = vec![0xa5a5_a5a5_a5a5_a5a5u64; desc.workspace_bytes() / 8];
            let mut ptrs = [std::ptr::null_mut(); 5];
            ptrs[LHS] = self.x.as_ptr().cast_mut().cast();
            ptrs[RHS] = self.corners.as_ptr().cast_mut().cast();
            ptrs[OUT] = y.as_mut_ptr().cast();
            ptrs[WORKSPACE] = workspace.as_mut_ptr().cast();
            ptrs[OPERANDS] = images.cast_mut();
            let mut status = OK;
            for cut in cuts.windows(2) {
                // SAFETY: all arrays have the extents of the descriptor.
                status = status.max(unsafe { gm_roi_align(desc, ptrs.as_ptr(), cut[0], cut[1]) });
            }
            (status, y)
        }

        /// Positions of the pixels of sample `i`, and their weights; `None` outside.
        fn position(
            &self,
            region: usize,
            axis: usize,
            at: [usize; 3],
        ) -> Option<[(usize, f32); 2]> {
            let [bin, i, n] = at;
            let (extent, size) = (self.desc.plane[axis], self.bin(region, axis));
            let shift = if self.desc.half_pixel == 1 { 0.5 } else { 0.0 };
            let start = self.corners[4 * region + 1 - axis] * self.desc.scale - shift;
            let at = (start + bin as f32 * size) + ((i as f32 + 0.5) * size) / n as f32;
            if at.is_nan() || at < -1.0 || at > extent as f32 {
                return None;
            }
            let at = at.clamp(0.0, (extent - 1) as f32);
            let (low, rest) = (at as usize, at - at.floor());
            Some([(low, 1.0 - rest), ((low + 1).min(extent - 1), rest)])
        }

        fn bin(&self, region: usize, axis: usize) -> f32 {
            let shift = if self.desc.half_pixel == 1 { 0.5 } else { 0.0 };
            let corner = |i: usize| self.corners[4 * region + i] * self.desc.scale - shift;
            let extent = corner(3 - axis) - corner(1 - axis);
            let is_short = self.desc.half_pixel == 0 && extent < 1.0;
            (if is_short { 1.0 } else { extent }) / self.desc.bins[axis] as f32
        }

        fn n_samples(&self, region: usize, axis: usize) -> usize {
            match self.desc.sampling {
                0 => self.bin(region, axis).ceil() as usize,
                n => n,
            }
        }

        /// The terms of each sample of a bin of a channel, or a zero.
        fn samples(&self, region: usize, channel: usize, bin: [usize; 2]) -> Vec<Vec<f64>> {
            let n = [0, 1].map(|axis| self.n_samples(region, axis));
            let image = self.images[region].rem_euclid(2) as isize;
            let [of_image, of_channel, of_row, of_column] = self.desc.x_strides;
            let first = image * of_image + channel as isize * of_channel;
            let mut all = Vec::new();
            for i in 0..n[0] * n[1] {
                let rows = self.position(region, 0, [bin[0], i / n[1], n[0]]);
                let columns = self.position(region, 1, [bin[1], i % n[1], n[1]]);
                let mut terms = Vec::new();
                for (row, a) in rows.into_iter().flatten() {
                    for (column, b) in columns.into_iter().flatten() {
                        let at = row as isize * of_row + column as isize * of_column;
                        let pixel = f64::from(self.x[(first + at) as usize]);
                        terms.push(f64::from(a * b) * pixel);
                    }
                }
                all.push(if terms.is_empty() { vec![0.0] } else { terms });
            }
            all
        }

        fn expected(&self, at: usize) -> f32 {
            let [rows, columns] = self.desc.bins;
            let (plane, bin) = (at / (rows * columns), at % (rows * columns));
            let (region, channel) = (plane / self.desc.channels, plane % self.desc.channels);
            let samples = self.samples(region, channel, [bin / columns, bin % columns]);
            if samples.is_empty() {
                return 0.0;
            }
            if self.desc.kind == RoiKind::Average as u32 {
                let sums = samples
                    .iter()
                    .map(|s| s[1..].iter().fold(s[0], |a, b| a + b));
                return (sums.fold(0.0, |a, b| a + b) / samples.len() as f64) as f32;
            }
            let larger = |a: f64, b: &f64| if a > *b || a.is_nan() { a } else { *b };
            samples.iter().flatten().fold(f64::NEG_INFINITY, larger) as f32
        }
    }

    #[test]
    fn bins_are_those_of_a_plain_loop_bit_for_bit() {
        let mut rng = Rng(52);
        for round in 0..300 {
            let case = Case::random(&mut rng);
            let n = case.desc.n_items();
            let mut cuts = [0, rng.below(n + 1), rng.below(n + 1), n];
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

    fn with(change: impl FnOnce(&mut Case)) -> u32 {
        let mut case = Case::random(&mut Rng(53));
        case.corners.fill(1.0);
        change(&mut case);
        let n = case.desc.n_items();
        case.run(&[0, n]).0
    }

    #[test]
    fn images_and_samples_out_of_range_are_reported() {
        assert_eq!(with(|_| {}), OK);
        assert_eq!(with(|case| case.images[2] = 2), OUT_OF_RANGE);
        assert_eq!(with(|case| case.images[2] = -3), OUT_OF_RANGE);
        let enormous = |case: &mut Case| {
            case.desc.sampling = 0;
            case.corners[7] = 1e9;
        };
        assert_eq!(with(enormous), OUT_OF_RANGE);
    }

    #[test]
    fn descriptors_that_contradict_themselves_are_refused() {
        assert_eq!(with(|case| case.desc.isa = 0), UNSUPPORTED_ISA);
        assert_eq!(with(|case| case.desc.kind = 3), INVALID);
        assert_eq!(with(|case| case.desc.index_bytes = 2), INVALID);
        assert_eq!(with(|case| case.desc.plane[1] = 0), INVALID);
        let desc = Case::random(&mut Rng(53)).desc;
        assert_eq!(desc.bytes().len(), size_of::<RoiAlignDesc>());
    }
}
