//! Tensor maps of `cuTensorMapEncodeTiled` and `cuTensorMapEncodeIm2col`, in an encoding of the
//! emulator's own.

use crate::fault::{Fault, FaultKind, Result};
pub use gristmill_runtime::gpu::TENSOR_MAP_BYTES;
use gristmill_runtime::gpu::{Pixels, Swizzle};

/// First bytes of an encoding, so that anything else is recognised.
const MAGIC: u64 = 0x7061_6d5f_6c75_6d65;

/// Element types of tensors that are copied by tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorElement {
    /// `CU_TENSOR_MAP_DATA_TYPE_UINT8`
    U8,
    /// `.._UINT16`
    U16,
    /// `.._UINT32`
    U32,
    /// `.._INT32`
    S32,
    /// `.._UINT64`
    U64,
    /// `.._INT64`
    S64,
    /// `.._FLOAT16`
    F16,
    /// `.._BFLOAT16`
    Bf16,
    /// `.._FLOAT32`
    F32,
    /// `.._FLOAT64`
    F64,
}

const ELEMENTS: [TensorElement; 10] = [
    TensorElement::U8,
    TensorElement::U16,
    TensorElement::U32,
    TensorElement::S32,
    TensorElement::U64,
    TensorElement::S64,
    TensorElement::F16,
    TensorElement::Bf16,
    TensorElement::F32,
    TensorElement::F64,
];

impl TensorElement {
    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            TensorElement::U8 => 1,
            TensorElement::U16 | TensorElement::F16 | TensorElement::Bf16 => 2,
            TensorElement::U32 | TensorElement::S32 | TensorElement::F32 => 4,
            TensorElement::U64 | TensorElement::S64 | TensorElement::F64 => 8,
        }
    }
}

/// Width of a swizzle's pattern in bytes; 16 without one.
pub(crate) fn width(swizzle: Swizzle) -> u64 {
    swizzle.width_bytes().unwrap_or(16)
}

/// Where the byte of a shared address really is.
pub(crate) fn permuted(swizzle: Swizzle, address: u64) -> u64 {
    address ^ (address >> 3 & (width(swizzle) - 16))
}

/// A tensor in global memory and the tile that is copied of it; axes are innermost first, as CUDA has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Type of the elements.
    pub element: TensorElement,
    /// Address of the tensor on the device.
    pub address: u64,
    /// Elements along each of 1 to 5 axes.
    pub sizes: Vec<u64>,
    /// Bytes from one index to the next, for all axes but the innermost.
    pub strides_bytes: Vec<u64>,
    /// Elements of the tile along each axis; in im2col mode channels and pixels.
    pub tile: Vec<u32>,
    /// Permutation in shared memory.
    pub swizzle: Swizzle,
    /// Elements outside the tensor are NaN instead of zero.
    pub fills_with_nan: bool,
    /// im2col mode: the pixels of a tile.
    pub pixels: Option<Pixels>,
}

/// Encodes a map for [`Device::launch`](crate::Device::launch), as a parameter of 128 bytes aligned to 64.
///
/// Makes the checks of `cuTensorMapEncodeTiled`, and errors with [`FaultKind::InvalidCall`]: the
/// address and strides are multiples of 16, sizes at most 2^32, tiles at most 256 along each axis,
/// the innermost side of a tile a multiple of 16 bytes and no wider than the swizzle. In im2col
/// mode those of `cuTensorMapEncodeIm2col`: up to 1024 pixels, of 3 to 5 axes, and see [`Pixels`].
/// Element strides in the other mode and interleaved layouts are refused.
pub fn encode_tensor_map(map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES]> {
    map.check()?;
    let mut bytes = Vec::with_capacity(TENSOR_MAP_BYTES);
    bytes.extend(MAGIC.to_le_bytes());
    bytes.extend(map.address.to_le_bytes());
    let element = ELEMENTS.iter().position(|e| *e == map.element).unwrap_or(0) as u8;
    bytes.extend([
        map.sizes.len() as u8,
        element,
        (width(map.swizzle) / 16) as u8,
        u8::from(map.fills_with_nan) | u8::from(map.pixels.is_some()) << 1,
    ]);
    for axis in 0..5 {
        let size = map.sizes.get(axis).map_or(0, |s| (s - 1) as u32);
        bytes.extend(size.to_le_bytes());
        bytes.extend((map.tile.get(axis).copied().unwrap_or(1) as u16).to_le_bytes());
        bytes.extend(
            map.strides_bytes
                .get(axis)
                .copied()
                .unwrap_or(0)
                .to_le_bytes(),
        );
    }
    for axis in 0..map.pixels.as_ref().map_or(0, |p| p.steps.len()) {
        let pixels = map.pixels.clone().unwrap_or_default();
        for corner in [&pixels.lower, &pixels.upper] {
            bytes.extend((corner[axis] as i16).to_le_bytes());
        }
        bytes.push(pixels.steps[axis] as u8);
    }
    let mut encoded = [0; TENSOR_MAP_BYTES];
    encoded[..bytes.len()].copy_from_slice(&bytes);
    Ok(encoded)
}

impl TensorMap {
    fn check(&self) -> Result<()> {
        let problem = self.shape_problem().or_else(|| self.tile_problem());
        problem.map_or(Ok(()), |problem| {
            Err(Fault::new(
                FaultKind::InvalidCall,
                format!("tensor map: {problem}"),
            ))
        })
    }

    fn shape_problem(&self) -> Option<String> {
        let axes = self.sizes.len();
        let mut strides = self.strides_bytes.iter();
        if !(1..=5).contains(&axes) {
            Some(format!("{axes} axes; 1 to 5 are possible"))
        } else if self.tile.len() != self.pixels.as_ref().map_or(axes, |_| 2)
            || self.strides_bytes.len() != axes - 1
        {
            Some(format!(
                "{axes} sizes, {} strides and {} sides of a tile",
                self.strides_bytes.len(),
                self.tile.len()
            ))
        } else if !self.address.is_multiple_of(16) {
            Some(format!(
                "address {:#x} is not a multiple of 16",
                self.address
            ))
        } else if let Some(size) = self.sizes.iter().find(|s| !(1..=1 << 32).contains(*s)) {
            Some(format!("size {size}; 1 to 2^32 are possible"))
        } else {
            let stride = strides.find(|s| !s.is_multiple_of(16) || **s >= 1 << 40)?;
            Some(format!(
                "stride {stride} is not a multiple of 16, or not below 2^40"
            ))
        }
    }

    fn tile_problem(&self) -> Option<String> {
        if let Some(problem) = self.pixels.as_ref().and_then(|p| p.problem(&self.sizes)) {
            return Some(problem);
        }
        let most = |axis: usize| match self.pixels {
            Some(_) if axis == 1 => 1024,
            _ => 256,
        };
        let mut sides = self.tile.iter().enumerate();
        if let Some((axis, side)) = sides.find(|(axis, t)| !(1..=most(*axis)).contains(*t)) {
            return Some(format!(
                "a tile of {side}; 1 to {} are possible",
                most(axis)
            ));
        }
        let inner = u64::from(self.tile[0]) * self.element.size_bytes() as u64;
        let width = width(self.swizzle);
        if !inner.is_multiple_of(16) {
            Some(format!(
                "the innermost side of the tile has {inner} bytes, not a multiple of 16"
            ))
        } else if self.swizzle != Swizzle::None && inner > width {
            Some(format!(
                "the innermost side of the tile has {inner} bytes, more than the swizzle's {width}"
            ))
        } else {
            None
        }
    }

    /// Reads an encoding; `None` if it is none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<TensorMap> {
        let word = |at: usize| Some(u64::from_le_bytes(number(bytes, at)?));
        if word(0)? != MAGIC {
            return None;
        }
        let axes = usize::from(bytes[16]);
        let swizzles = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];
        let mut map = TensorMap {
            element: *ELEMENTS.get(usize::from(bytes[17]))?,
            address: word(8)?,
            sizes: vec![],
            strides_bytes: vec![],
            tile: vec![],
            swizzle: *swizzles
                .iter()
                .find(|s| width(**s) / 16 == u64::from(bytes[18]))?,
            fills_with_nan: bytes[19] & 1 != 0,
            pixels: match bytes[19] & 2 {
                0 => None,
                _ => Some(decoded_pixels(bytes, axes.saturating_sub(2))?),
            },
        };
        for axis in 0..axes.min(5) {
            let at = 20 + 14 * axis;
            map.sizes
                .push(1 + u64::from(u32::from_le_bytes(number(bytes, at)?)));
            if axis < 2 || map.pixels.is_none() {
                map.tile
                    .push(u16::from_le_bytes(number(bytes, at + 4)?).into());
            }
            if axis + 1 < axes {
                map.strides_bytes.push(word(at + 6)?);
            }
        }
        map.check().is_ok().then_some(map)
    }

    /// Bytes of a whole tile.
    pub(crate) fn tile_bytes(&self) -> u64 {
        self.tile.iter().map(|t| u64::from(*t)).product::<u64>() * self.element.size_bytes() as u64
    }
}

/// Bytes of a number in an encoding.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Pixels of an encoding in im2col mode, behind the five axes.
fn decoded_pixels(bytes: &[u8], n_spatial: usize) -> Option<Pixels> {
    let mut pixels = Pixels::default();
    for at in (0..n_spatial).map(|axis| 20 + 14 * 5 + 5 * axis) {
        let [lower, upper] = [at, at + 2].map(|at| number(bytes, at).map(i16::from_le_bytes));
        pixels.lower.push(lower?.into());
        pixels.upper.push(upper?.into());
        pixels.steps.push(u32::from(*bytes.get(at + 4)?));
    }
    Some(pixels)
}
