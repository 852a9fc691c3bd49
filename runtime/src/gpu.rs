//! Kernels for GPUs as plain data, made by a compiler and launched by a device, real or emulated.
//!
//! A kernel takes one value per entry of [`GpuKernel::params`]: a 64-bit address, or a tensor map. Buffers are dense and aligned as the module
//! doc of [`crate::program`] says. The status word is a `u32` that is 0 before the launch; a kernel that fails leaves a code of [`crate::status`]
//! there, the greatest of those that its threads met, and its outputs have no meaning then. Any number of blocks in `x` computes the same:
//! kernels go through their items in strides of the whole grid; where blocks form clusters, any multiple of a cluster's blocks.

use crate::dtype::DType;

/// The code of one or more kernels for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuCode {
    /// Target architecture: `sm_90a`.
    pub arch: String,
    /// PTX, as text.
    pub ptx: String,
    /// Machine code.
    pub cubin: Vec<u8>,
}

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuKernel {
    /// Name in dumps and profiles; unique in a program.
    pub name: String,
    /// Index of its code in the list beside the kernels.
    pub code: usize,
    /// Entry point there.
    pub entry: String,
    /// Threads that run it.
    pub launch: Launch,
    /// Parameters, in order.
    pub params: Vec<GpuParam>,
}

/// Threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block in bytes, beyond the static part that the code declares.
    pub shared_bytes: u32,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuParam {
    /// The address of a buffer: an index into the arguments of the step that launches the kernel.
    Buffer(u32),
    /// The address of the status word.
    Status,
    /// A tensor map: a `__grid_constant__` parameter of [`TENSOR_MAP_BYTES`] bytes, aligned to 64.
    TensorMap(Box<TensorMap>),
}

/// A tensor in a buffer, and the tile of it that one bulk copy moves, as `cuTensorMapEncodeTiled`
/// and `cuTensorMapEncodeIm2col` take them: axes are innermost first, elements along the innermost
/// side by side. Elements of a tile outside of the tensor read as zero and are not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Index into the arguments of the step that launches the kernel.
    pub buffer: u32,
    /// Type of the elements.
    pub dtype: DType,
    /// Where in the buffer the tensor begins, in bytes; a multiple of 16.
    pub offset_bytes: u64,
    /// Elements along each of 1 to 5 axes.
    pub sizes: Vec<u64>,
    /// Bytes from one index to the next, for all axes but the innermost; multiples of 16.
    pub strides_bytes: Vec<u64>,
    /// Elements of the tile along each axis: at most 256, and along the innermost a multiple of 16
    /// bytes, no wider than the swizzle. In im2col mode channels and up to 1024 pixels.
    pub tile: Vec<u32>,
    /// Order of the tile's 16-byte chunks in shared memory.
    pub swizzle: Swizzle,
    /// im2col mode: which pixels a tile has.
    pub pixels: Option<Pixels>,
}

/// Pixels of a tensor of channels, one to three spatial axes and images that the tiles of a
/// convolution are made of, in im2col mode.
///
/// The corners bound a box along the spatial axes. A tile begins at a pixel of the box and goes on
/// in steps along the innermost axis, from its end to the box's next row, and from the last row to
/// the next image. A copy adds an offset along each spatial axis to every pixel: the place of an
/// element of the filter. Lists are innermost first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pixels {
    /// First pixel of the box along each spatial axis: minus the padding.
    pub lower: Vec<i32>,
    /// Last pixel of the box, counted from the tensor's last: the padding less what a filter spans.
    pub upper: Vec<i32>,
    /// Steps between pixels: the strides of a convolution, 1 to 8.
    pub steps: Vec<u32>,
}

impl Pixels {
    /// Bits of a corner, and of the places that copies add, by the number of spatial axes: the
    /// hardware has 16 for all of them.
    const BITS: [u32; 3] = [16, 8, 5];

    /// Largest place that a copy adds to a pixel along an axis, of so many spatial ones.
    pub fn max_offset(n_spatial: usize) -> Option<u32> {
        let bits = Pixels::BITS.get(n_spatial.checked_sub(1)?)?;
        Some((1 << bits) - 1)
    }

    /// First pixel of the box along each spatial axis, and the one past its last; of a tensor of such sizes.
    pub fn ranges(&self, sizes: &[u64]) -> Vec<(i64, i64)> {
        let bounds = self.lower.iter().zip(&self.upper).zip(sizes.iter().skip(1));
        bounds
            .map(|((&low, &up), &size)| (low.into(), size as i64 + i64::from(up)))
            .collect()
    }

    /// First violation of the rules for tensors of such sizes.
    pub fn problem(&self, sizes: &[u64]) -> Option<String> {
        let n = [self.lower.len(), self.upper.len(), self.steps.len()];
        let n_spatial = sizes.len().saturating_sub(2);
        let Some(bits) = n_spatial.checked_sub(1).and_then(|i| Pixels::BITS.get(i)) else {
            return Some(format!(
                "{} axes in im2col mode; 3 to 5 are possible",
                sizes.len()
            ));
        };
        if n != [n_spatial; 3] {
            return Some(format!(
                "{n:?} corners and steps of {n_spatial} spatial axes"
            ));
        }
        let most = 1 << (bits - 1);
        let mut corners = self.lower.iter().chain(&self.upper);
        if let Some(corner) = corners.find(|c| !(-most..most).contains(*c)) {
            return Some(format!(
                "a corner of {corner}; {} to {} are possible",
                -most,
                most - 1
            ));
        }
        if let Some(step) = self.steps.iter().find(|s| !(1..=8).contains(*s)) {
            return Some(format!("a step of {step} pixels; 1 to 8 are possible"));
        }
        let is_empty = |&(low, end): &(i64, i64)| low >= end;
        let empty = self.ranges(sizes).into_iter().find(is_empty)?;
        Some(format!("no pixels from {} to before {}", empty.0, empty.1))
    }
}

/// Permutation of a tile's 16-byte chunks in shared memory, by the width of the pattern in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swizzle {
    /// In order.
    #[default]
    None,
    /// 32 bytes.
    B32,
    /// 64 bytes.
    B64,
    /// 128 bytes.
    B128,
}

impl Swizzle {
    /// Width of the pattern in bytes; `None` without one.
    pub fn width_bytes(self) -> Option<u64> {
        match self {
            Swizzle::None => None,
            Swizzle::B32 => Some(32),
            Swizzle::B64 => Some(64),
            Swizzle::B128 => Some(128),
        }
    }
}

/// Bytes of an encoded tensor map.
pub const TENSOR_MAP_BYTES: usize = 128;

/// A tensor map as a device wants it: opaque, and good for one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct EncodedTensorMap(pub [u8; TENSOR_MAP_BYTES]);

/// The value of a parameter in one launch, in the order of [`GpuKernel::params`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuArg {
    /// An address of the device.
    Address(u64),
    /// A tensor map, by value.
    TensorMap(EncodedTensorMap),
}

/// Most elements of a tile along one axis, most pixels of one in im2col mode, and most elements of
/// a tensor along an axis.
const MAX_TILE: u32 = 256;
const MAX_PIXELS: u32 = 1024;
const MAX_SIZE: u64 = 1 << 32;
const MAX_STRIDE_BYTES: u64 = 1 << 40;
/// Addresses and strides of tensors that are copied by tile are multiples of this.
const CHUNK_BYTES: u64 = 16;

impl TensorMap {
    /// First violation of the map's rules for a buffer of this size.
    pub fn problem(&self, buffer_bytes: u64) -> Option<String> {
        let TensorMap {
            sizes,
            strides_bytes,
            tile,
            ..
        } = self;
        let axes = sizes.len();
        let sides = if self.pixels.is_some() { 2 } else { axes };
        if !(1..=5).contains(&axes) || strides_bytes.len() != axes - 1 || tile.len() != sides {
            let n = (strides_bytes.len(), tile.len());
            return Some(format!(
                "{axes} sizes, {} strides and {} sides of a tile; 1 to 5 axes are possible",
                n.0, n.1
            ));
        }
        let of_pixels = || self.pixels.as_ref()?.problem(sizes);
        let problem = self.extent_problem().or_else(of_pixels);
        if let Some(problem) = problem.or_else(|| self.side_problem()) {
            return Some(problem);
        }
        let inner = u64::from(tile[0]) * self.dtype.size_bytes() as u64;
        if !inner.is_multiple_of(CHUNK_BYTES)
            || self.swizzle.width_bytes().is_some_and(|w| inner > w)
        {
            let swizzle = self.swizzle;
            return Some(format!(
                "a tile of {inner} bytes along the innermost axis with a swizzle of {swizzle:?}"
            ));
        }
        if !self.offset_bytes.is_multiple_of(CHUNK_BYTES) {
            return Some(format!(
                "offset {} is not a multiple of {CHUNK_BYTES} bytes",
                self.offset_bytes
            ));
        }
        let end = self.end_bytes();
        (end > u128::from(buffer_bytes))
            .then(|| format!("ends at byte {end} of a buffer of {buffer_bytes}"))
    }

    /// First violation among sizes and strides.
    fn extent_problem(&self) -> Option<String> {
        if let Some(size) = self.sizes.iter().find(|s| !(1..=MAX_SIZE).contains(*s)) {
            return Some(format!("size {size}; 1 to {MAX_SIZE} are possible"));
        }
        let good_stride = |s: &u64| s.is_multiple_of(CHUNK_BYTES) && *s < MAX_STRIDE_BYTES;
        let stride = self.strides_bytes.iter().find(|s| !good_stride(s))?;
        Some(format!(
            "stride {stride} is not a multiple of {CHUNK_BYTES} bytes, or not below {MAX_STRIDE_BYTES}"
        ))
    }

    /// First violation among the sides of a tile.
    fn side_problem(&self) -> Option<String> {
        let mut most = [MAX_TILE; 5];
        if self.pixels.is_some() {
            most[1] = MAX_PIXELS;
        }
        let mut sides = self.tile.iter().zip(most);
        let (side, most) = sides.find(|(side, most)| !(1..=*most).contains(*side))?;
        Some(format!("a tile of {side}; 1 to {most} are possible"))
    }

    /// Steps along each axis: 1 but for the pixels of a map in im2col mode.
    pub fn steps(&self) -> Vec<u32> {
        let mut steps = vec![1; self.sizes.len()];
        let pixels = self.pixels.iter().flat_map(|p| &p.steps);
        let spatial = steps.iter_mut().skip(1).zip(pixels);
        spatial.for_each(|(step, own)| *step = *own);
        steps
    }

    /// One past the last byte of the last element.
    fn end_bytes(&self) -> u128 {
        let element = self.dtype.size_bytes() as u128;
        let outer: u128 = self.sizes[1..]
            .iter()
            .zip(&self.strides_bytes)
            .map(|(n, s)| u128::from(n - 1) * u128::from(*s))
            .sum();
        u128::from(self.offset_bytes) + outer + u128::from(self.sizes[0]) * element
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 x 24 halves out of rows of 40, from the third row on, in tiles of 16 x 64.
    fn map() -> TensorMap {
        TensorMap {
            buffer: 0,
            dtype: DType::BF16,
            offset_bytes: 160,
            sizes: vec![24, 100],
            strides_bytes: vec![80],
            tile: vec![64, 16],
            swizzle: Swizzle::B128,
            pixels: None,
        }
    }

    /// 3 images of 20 x 10 pixels of 64 halves, in tiles of 128 pixels of a 3 x 3 filter that is
    /// padded by 1 and goes on by 2.
    fn image_map() -> TensorMap {
        TensorMap {
            buffer: 0,
            dtype: DType::F16,
            offset_bytes: 0,
            sizes: vec![64, 10, 20, 3],
            strides_bytes: vec![128, 1280, 25600],
            tile: vec![64, 128],
            swizzle: Swizzle::B128,
            pixels: Some(Pixels {
                lower: vec![-1, -1],
                upper: vec![-1, -1],
                steps: vec![2, 2],
            }),
        }
    }

    #[test]
    fn maps_in_im2col_mode_that_the_hardware_does_not_take() {
        let end = 3 * 25600;
        assert_eq!(image_map().problem(end), None);
        assert_eq!(
            (image_map().steps(), map().steps()),
            (vec![1, 2, 2, 1], vec![1, 1])
        );
        let check = |change: fn(&mut Pixels, &mut TensorMap), expected: &str| {
            let mut m = image_map();
            let mut pixels = m.pixels.clone().unwrap_or_default();
            change(&mut pixels, &mut m);
            m.pixels = Some(pixels);
            let problem = m.problem(end).unwrap_or_default();
            assert!(problem.contains(expected), "{problem}");
        };
        check(|p, _| p.lower[1] = -129, "a corner of -129; -128 to 127");
        check(|p, _| p.steps[0] = 9, "a step of 9");
        check(|p, _| p.upper[0] = -11, "no pixels from -1 to before -1");
        check(
            |p, _| p.steps.truncate(1),
            "[2, 2, 1] corners and steps of 2",
        );
        check(|_, m| m.tile[1] = 1025, "a tile of 1025; 1 to 1024");
        check(|_, m| m.tile.extend([1, 1]), "4 sides of a tile");
        check(
            |_, m| (m.sizes, m.strides_bytes) = (vec![64, 3], vec![128]),
            "2 axes in im2col mode",
        );
        assert_eq!(
            [0, 1, 2, 3, 4].map(Pixels::max_offset),
            [None, Some(65535), Some(255), Some(31), None]
        );
    }

    #[test]
    fn tensor_maps_that_the_hardware_does_not_take() {
        let end = 160 + 99 * 80 + 48;
        assert_eq!(map().problem(end), None);
        let check = |change: fn(&mut TensorMap), expected: &str| {
            let mut m = map();
            change(&mut m);
            let problem = m.problem(end).unwrap_or_default();
            assert!(problem.contains(expected), "{problem}");
        };
        check(|m| m.sizes[1] += 1, "ends at byte");
        check(|m| m.sizes[0] = 0, "size 0");
        check(|m| m.sizes.push(1), "3 sizes, 1 strides");
        check(|m| m.strides_bytes[0] = 72, "stride 72");
        check(|m| m.tile[1] = 257, "a tile of 257");
        check(|m| m.tile[0] = 72, "a tile of 144 bytes");
        check(|m| m.tile[0] = 4, "a tile of 8 bytes");
        check(|m| m.offset_bytes = 8, "offset 8");
    }
}
