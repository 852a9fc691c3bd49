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

/// A tensor in a buffer, and the tile of it that one bulk copy moves, as `cuTensorMapEncodeTiled` takes them: axes are innermost first, and the
/// innermost has stride 1. Elements of a tile outside of the tensor read as zero and are not written.
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
    /// Elements of the tile along each axis: at most 256, and along the innermost a multiple of 16 bytes, no wider than the swizzle.
    pub tile: Vec<u32>,
    /// Order of the tile's 16-byte chunks in shared memory.
    pub swizzle: Swizzle,
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

/// Most elements of a tile along one axis, and of a tensor.
const MAX_TILE: u32 = 256;
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
        if !(1..=5).contains(&axes) || strides_bytes.len() != axes - 1 || tile.len() != axes {
            let n = (strides_bytes.len(), tile.len());
            return Some(format!(
                "{axes} sizes, {} strides and {} sides of a tile; 1 to 5 axes are possible",
                n.0, n.1
            ));
        }
        if let Some(size) = sizes.iter().find(|s| !(1..=MAX_SIZE).contains(*s)) {
            return Some(format!("size {size}; 1 to {MAX_SIZE} are possible"));
        }
        let good_stride = |s: &u64| s.is_multiple_of(CHUNK_BYTES) && *s < MAX_STRIDE_BYTES;
        if let Some(stride) = strides_bytes.iter().find(|s| !good_stride(s)) {
            return Some(format!(
                "stride {stride} is not a multiple of {CHUNK_BYTES} bytes, or not below {MAX_STRIDE_BYTES}"
            ));
        }
        if let Some(side) = tile.iter().find(|t| !(1..=MAX_TILE).contains(*t)) {
            return Some(format!("a tile of {side}; 1 to {MAX_TILE} are possible"));
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
        }
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
