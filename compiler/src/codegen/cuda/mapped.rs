//! Matrices in memory as the bulk copy engine sees them: operands of products and attention by warp groups.

use super::emit::{Emitter, Value};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix};
use crate::codegen::strided::Strided;
use crate::ir::ValueId;
use gristmill_runtime::DType;
use gristmill_runtime::gpu::{Swizzle, TensorMap};

/// Columns of a tile: 128 bytes of half types, which is as wide as the widest permutation of chunks.
pub(super) const COLUMNS: usize = 64;
/// Bytes that the engine reads at a time.
const CHUNK_BYTES: usize = 16;

/// A matrix, or many: the last two axes of a view.
#[derive(Clone, Debug)]
pub(super) struct Mapped {
    pub(super) base: ValueId,
    pub(super) map: TensorMap,
    /// Extents of the leading axes.
    pub(super) lead: Vec<usize>,
    /// Leading axes that the map has, innermost first.
    axes: Vec<usize>,
}

/// The map of a view in tiles of so many elements along such axes, innermost first.
pub(super) fn tensor_map(
    view: &Strided,
    dtype: DType,
    axes: &[usize],
    tile: Vec<u32>,
) -> Option<TensorMap> {
    let bytes = |n: i64| Some(u64::try_from(n).ok()? * dtype.size_bytes() as u64);
    let strides = axes[1..].iter().map(|&a| bytes(view.strides[a]));
    Some(TensorMap {
        buffer: 0,
        dtype,
        offset_bytes: bytes(view.offset)?,
        sizes: axes.iter().map(|&a| view.shape[a] as u64).collect(),
        strides_bytes: strides.collect::<Option<_>>()?,
        tile,
        swizzle: Swizzle::B128,
        pixels: None,
    })
}

impl Mapped {
    /// In tiles of `rows` x [`COLUMNS`], rows along axis `inner` of the view; `None` if the engine does not take it.
    pub(super) fn new(body: &Body, view: &Strided, inner: usize, rows: usize) -> Option<Mapped> {
        let dtype = body.dtype(view.base);
        let buffer_bytes = body.n_elements(view.base) * dtype.size_bytes();
        let rank = view.shape.len();
        let moves = |a: &usize| view.shape[*a] != 1 && view.strides[*a] != 0;
        let axes: Vec<usize> = (0..rank - 2).rev().filter(moves).collect();
        // `inner` is one of the last two axes, and this the other.
        let outer = 2 * rank - 3 - inner;
        let all = [&[inner, outer], &axes[..]].concat();
        let mut tile = vec![1; all.len()];
        tile[..2].copy_from_slice(&[COLUMNS as u32, rows as u32]);
        let map = tensor_map(view, dtype, &all, tile)?;
        // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
        let lies = view.strides[inner] == 1 && buffer_bytes.is_multiple_of(CHUNK_BYTES);
        let fits = lies && map.problem(buffer_bytes as u64).is_none();
        fits.then(|| Mapped {
            base: view.base,
            map,
            lead: view.shape[..rank - 2].to_vec(),
            axes,
        })
    }

    /// Coordinates of a tile as text, each after a comma: `column` and `row`, then those of the leading axes from their indices.
    pub(super) fn coordinates(
        &self,
        e: &mut Emitter,
        [column, row]: [&str; 2],
        lead: &[Ix<Value>],
    ) -> String {
        let mut text = format!(", {column}, {row}");
        for &axis in &self.axes {
            let i = e.val(lead[axis]);
            text += &format!(", int({})", e.text(i));
        }
        text
    }
}
