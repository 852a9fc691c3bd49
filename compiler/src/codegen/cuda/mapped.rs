//! Matrices in memory as the bulk copy engine sees them: operands of products and attention by warp groups.

use super::emit::{Emitter, Value};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix};
use crate::codegen::strided::Strided;
use crate::ir::ValueId;
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

impl Mapped {
    /// In tiles of `rows` x [`COLUMNS`], rows along axis `inner` of the view; `None` if the engine does not take it.
    pub(super) fn new(body: &Body, view: &Strided, inner: usize, rows: usize) -> Option<Mapped> {
        let dtype = body.dtype(view.base);
        let size_bytes = dtype.size_bytes();
        let buffer_bytes = body.n_elements(view.base) * size_bytes;
        let rank = view.shape.len();
        let outer = 2 * rank - 3 - inner;
        let axes: Vec<usize> = (0..rank - 2)
            .rev()
            .filter(|&a| view.shape[a] != 1 && view.strides[a] != 0)
            .collect();
        let outer_axes = || std::iter::once(outer).chain(axes.iter().copied());
        let stride_bytes = |a: usize| {
            u64::try_from(view.strides[a])
                .ok()
                .map(|s| s * size_bytes as u64)
        };
        let map = TensorMap {
            buffer: 0,
            dtype,
            offset_bytes: u64::try_from(view.offset).ok()? * size_bytes as u64,
            sizes: std::iter::once(inner)
                .chain(outer_axes())
                .map(|a| view.shape[a] as u64)
                .collect(),
            strides_bytes: outer_axes().map(stride_bytes).collect::<Option<_>>()?,
            tile: [COLUMNS as u32, rows as u32]
                .into_iter()
                .chain(axes.iter().map(|_| 1))
                .collect(),
            swizzle: Swizzle::B128,
        };
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
