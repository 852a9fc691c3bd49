//! Products in tiles of shared memory: matrix products and convolutions (as implicit products) of
//! every dtype, with prologues of the operands and epilogues of the result fused.
//!
//! Operands are loaded or pulled into the tiles and the epilogue is computed from the accumulators,
//! so views, casts and cheap element-wise ops on either side cost no memory traffic. Three main
//! loops: threads that multiply ([`simt`]), for every dtype, in its own precision; and tensor cores
//! ([`mma`], [`wgmma`]), for operands of half types and bytes, and for `f32` when `tf32` is asked
//! for.

mod epilogue;
mod library;
mod mma;
mod operand;
mod pixels;
mod simt;
mod tensor;
mod wgmma;

use super::Options;
use super::candidates::{Candidate, Candidates, Partials, Resources, Work};
use super::emit::{Emitter, Value};
use super::fusion::{FusedNode, stored_before};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};

use crate::error::Result;
use crate::ir::{Layout, Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;
use gristmill_runtime::gpu::TensorMap;
pub(super) use library::Library;
use mma::Mma;
pub(super) use operand::matrix_index;
use operand::{At, Side};
use simt::Simt;
pub(super) use simt::accumulator;
use tensor::Operands;
use wgmma::Wgmma;

/// Operations per element up to which an operand is computed again in every tile that needs it.
const CHEAP_FLOPS: u32 = 8;
/// Smallest extent of each side for which a tile is worth its synchronisation.
const LEAST_SIDE: usize = 4;
/// Blocks that keep every GPU of today busy: a smaller tile is taken until there are so many.
const ENOUGH_BLOCKS: usize = 128;
/// Smallest depth of a block's share of a sum: joining shares takes about as long as computing one.
const LEAST_DEPTH: usize = 512;

/// A product, and the element-wise ops after it.
#[derive(Clone, Debug)]
struct Contract {
    node: FusedNode,
    sizes: Sizes,
    variant: Variant,
}

/// Main loop of a variant.
#[derive(Clone, Debug)]
enum Variant {
    Simt(Simt),
    Mma(Mma),
    Wgmma(Box<Wgmma>),
}

/// Extents of a product: batches, rows, columns and the summed axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    n_batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

impl Sizes {
    /// Extents of a matrix product or convolution.
    fn of(body: &Body, node: &Node) -> Option<Sizes> {
        let (lhs, rhs) = (node.inputs.first()?, node.inputs.get(1)?);
        let out = body.shape(node.outputs[0]);
        match &node.op {
            Op::MatMul => {
                let (batch, &[m, n]) = out.split_last_chunk::<2>()?;
                Some(Sizes {
                    n_batch: batch.iter().product(),
                    m,
                    n,
                    k: *body.shape(*lhs).last()?,
                })
            }
            Op::Conv { groups, layout, .. } => {
                let channels = n_channels(out, *layout);
                let per_channel = |n: usize| n / channels.max(1);
                Some(Sizes {
                    n_batch: *groups,
                    m: per_channel(out.iter().product()),
                    n: channels / groups,
                    k: per_channel(body.n_elements(*rhs)),
                })
            }
            _ => None,
        }
    }

    /// Multiplications of elements.
    fn n_products(&self) -> usize {
        [self.m, self.n, self.k]
            .into_iter()
            .fold(self.n_batch, usize::saturating_mul)
    }

    /// Blocks that have a tile of `m` x `n` each.
    fn n_tiles(&self, m: usize, n: usize) -> usize {
        self.n_batch * self.m.div_ceil(m) * self.n.div_ceil(n)
    }

    /// Blocks that share the sums of such a tile, which are `depth` deep, where there are few tiles and much to sum up.
    fn n_parts(&self, [m, n, depth]: [usize; 3]) -> usize {
        let most = (ENOUGH_BLOCKS / self.n_tiles(m, n))
            .min(self.k / LEAST_DEPTH)
            .max(1);
        let steps = self.k.div_ceil(depth);
        steps.div_ceil(steps.div_ceil(most))
    }

    /// Numbers of blocks that may share the sums as well: half and twice as many.
    fn other_parts(&self, tile: [usize; 3]) -> Vec<usize> {
        let (n_parts, steps) = (self.n_parts(tile), self.k.div_ceil(tile[2]));
        let is_deep = self.k / (2 * n_parts) >= LEAST_DEPTH / 2;
        let is_idle = self.n_tiles(tile[0], tile[1]) * n_parts < ENOUGH_BLOCKS;
        let half = Some(n_parts / 2).filter(|&n| n > 0);
        let twice = (is_deep && is_idle).then_some(2 * n_parts);
        let numbers = half.into_iter().chain(twice);
        numbers.map(|n| steps.div_ceil(steps.div_ceil(n))).collect()
    }

    /// Work of tiles, given the multiplications in the time of a byte and the size of an element.
    fn work(
        &self,
        tile: [usize; 2],
        n_parts: usize,
        size_bytes: usize,
        products_per_byte: f64,
    ) -> Work {
        let [m, n] = tile;
        let n_tiles = self.n_tiles(m, n);
        let of_tiles = |per_tile: usize| (n_tiles * per_tile) as f64 * self.k as f64;
        let partial = if n_parts > 1 {
            n_parts * n_tiles * m * n * 4
        } else {
            0
        };
        Work {
            n_tiles: n_tiles * n_parts,
            bytes: of_tiles(m + n) * size_bytes as f64,
            n_products: of_tiles(m * n),
            products_per_byte,
            partial_bytes: partial as f64,
        }
    }

    /// Tiles with numbers of blocks that share their sums: the tile that suits the sizes best (the
    /// first to keep the GPU busy, else the last), the other tiles, and the best with other numbers.
    fn divisions<T: Copy + PartialEq>(
        &self,
        tiles: &[T],
        extents: impl Fn(&T) -> [usize; 3],
    ) -> Vec<(T, usize)> {
        let Some(best) = tiles
            .iter()
            .find(|t| self.fills(extents(t)))
            .or(tiles.last())
        else {
            return Vec::new();
        };
        let others = tiles.iter().filter(|t| *t != best);
        let all = std::iter::once(best).chain(others);
        let all = all.map(|t| (*t, self.n_parts(extents(t))));
        let more = self
            .other_parts(extents(best))
            .into_iter()
            .map(|n| (*best, n));
        all.chain(more).collect()
    }

    /// True if such tiles give nearly every multiprocessor a block.
    fn fills(&self, tile: [usize; 3]) -> bool {
        self.n_tiles(tile[0], tile[1]) * self.n_parts(tile) * 8 >= ENOUGH_BLOCKS * 7
    }
}

/// The product of a node, if tiles suit it.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    options: &Options,
    id: NodeId,
    node: &Node,
) -> Option<(Cover, Candidates)> {
    let sizes = Sizes::of(body, node)?;
    let sides = [sizes.m, sizes.n, sizes.k];
    if sides.iter().any(|&n| n < LEAST_SIDE) || sizes.n_batch == 0 {
        return None;
    }
    let (variants, needs) = match Operands::find(body, around, options, node, sizes) {
        Some((operands, needs)) => {
            let wgmma = Wgmma::all(body, options, node, &operands, sizes).into_iter();
            let mma = Mma::all(options, node, operands, sizes).into_iter();
            let wgmma = wgmma.map(|w| Variant::Wgmma(Box::new(w)));
            let all = wgmma.chain(mma.map(Variant::Mma));
            (all.collect::<Vec<_>>(), needs)
        }
        None => {
            let operands = node.inputs.iter().map(|&v| (v, CHEAP_FLOPS));
            let all = Simt::all(node, body.dtype(node.inputs[0]), sizes).into_iter();
            let needs = stored_before(body, around, operands);
            (all.map(Variant::Simt).collect(), needs)
        }
    };
    let (node, cover) = FusedNode::find(body, around, id, needs);
    let all = variants.into_iter().map(|variant| Contract {
        node,
        sizes,
        variant,
    });
    Some((cover, Candidates::new(all)?))
}

/// Channels of a convolution's result of this shape.
fn n_channels(out: &[usize], layout: Layout) -> usize {
    match layout {
        Layout::ChannelsFirst => out[1],
        Layout::ChannelsLast => out[out.len() - 1],
    }
}

impl Contract {
    /// Blocks to share a sum.
    fn n_parts(&self) -> usize {
        match &self.variant {
            Variant::Simt(simt) => simt.n_parts,
            Variant::Mma(mma) => mma.n_parts,
            Variant::Wgmma(_) => 1,
        }
    }

    /// Extents of partial sums: parts, batches, rows, columns.
    fn partial_shape(&self) -> [usize; 4] {
        let Sizes { n_batch, m, n, .. } = self.sizes;
        [self.n_parts(), n_batch, m, n]
    }

    /// Place of an element of an operand's tile, the tile being of a place in the result, and the
    /// condition that it lies in the operand (`None`: always).
    fn in_tile(
        &self,
        e: &mut Emitter,
        (side, place): (Side, Place),
        [m, n, depth]: [usize; 3],
        position: [Ix<Value>; 3],
    ) -> Result<(At, Option<Value>)> {
        let (extent, width) = match side {
            Side::Lhs => (self.sizes.m, m),
            Side::Rhs => (self.sizes.n, n),
        };
        let at = At::in_tile(e, (side, place), position);
        let inside = within(e, [(at.along, extent, width), (at.k, self.sizes.k, depth)])?;
        Ok((at, inside))
    }

    /// Accumulator dtype.
    fn acc(&self) -> DType {
        match &self.variant {
            Variant::Simt(simt) => simt.acc,
            Variant::Mma(mma) => mma.acc(),
            Variant::Wgmma(_) => DType::F32,
        }
    }

    /// Index in the result of an element of the product, given by batch, row and column.
    fn result_index(
        &self,
        body: &Body,
        e: &mut Emitter,
        [batch, row, column]: [Ix<Value>; 3],
    ) -> Vec<Ix<Value>> {
        let node = self.node.of(body);
        let out = body.shape(node.outputs[0]);
        let Op::Conv { groups, layout, .. } = &node.op else {
            let mut at = e.delinearise(batch, &out[..out.len() - 2]);
            at.extend([row, column]);
            return at;
        };
        let first = e.mul(batch, (n_channels(out, *layout) / groups) as i64);
        let channel = e.add(first, column);
        let (axis, mut positions) = match layout {
            Layout::ChannelsFirst => (1, out.to_vec()),
            Layout::ChannelsLast => (out.len() - 1, out.to_vec()),
        };
        positions.remove(axis);
        let mut at = e.delinearise(row, &positions);
        at.insert(axis, channel);
        at
    }

    /// Stores the epilogue of a sum.
    fn store(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: [Ix<Value>; 3],
        sum: Value,
        out: Value,
    ) -> Result<()> {
        let at = self.result_index(p.body, e, at);
        self.node.store(p, e, &at, sum, out)
    }
}

impl Candidate for Contract {
    fn name(&self) -> &'static str {
        "contract"
    }

    fn words(&self) -> String {
        match &self.variant {
            Variant::Simt(simt) => simt.words(),
            Variant::Mma(mma) => mma.words(),
            Variant::Wgmma(wgmma) => wgmma.words(),
        }
    }

    fn result(&self) -> ValueId {
        self.node.result
    }

    fn resources(&self) -> Resources {
        match &self.variant {
            Variant::Simt(simt) => simt.resources(self.sizes),
            Variant::Mma(mma) => mma.resources(self.sizes),
            Variant::Wgmma(wgmma) => wgmma.resources(self.sizes),
        }
    }

    fn work(&self) -> Work {
        match &self.variant {
            Variant::Simt(simt) => simt.work(self.sizes),
            Variant::Mma(mma) => mma.work(self.sizes),
            Variant::Wgmma(wgmma) => wgmma.work(self.sizes),
        }
    }

    fn maps(&self) -> Vec<(ValueId, TensorMap)> {
        match &self.variant {
            Variant::Wgmma(wgmma) => wgmma.maps(),
            Variant::Simt(_) | Variant::Mma(_) => Vec::new(),
        }
    }

    fn partial(&self, _: &Body) -> Option<(DType, usize)> {
        (self.n_parts() > 1).then(|| (self.acc(), self.partial_shape().iter().product()))
    }

    /// Elements of the product.
    fn n_results(&self) -> usize {
        self.sizes.n_batch * self.sizes.m * self.sizes.n
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        match &self.variant {
            Variant::Simt(simt) => simt.emit(self, p, e, out),
            Variant::Mma(mma) => mma.emit(self, p, e, out),
            Variant::Wgmma(wgmma) => wgmma.emit(self, p, e, out),
        }
    }

    /// Adds partial sums.
    fn join(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        [partial, out]: [Value; 2],
    ) -> Result<()> {
        let [n_parts, n_batch, m, n] = self.partial_shape();
        let partials = Partials {
            n_parts,
            n_elements: n_batch * m * n,
            dtype: self.acc(),
            op: ScalarOp::Add,
            identity: 0,
        };
        let sum = partials.join(e, partial, item)?;
        let at = e.delinearise(Ix::V(item), &[n_batch, m, n]);
        self.store(p, e, [at[0], at[1], at[2]], sum, out)
    }
}

/// A tile that a block computes: its share in the sums, its place.
#[derive(Clone, Copy)]
struct Place {
    part: Ix<Value>,
    batch: Ix<Value>,
    /// First row and column.
    row: Ix<Value>,
    column: Ix<Value>,
}

impl Place {
    /// Batch, row and column.
    fn at(&self) -> [Ix<Value>; 3] {
        [self.batch, self.row, self.column]
    }

    /// The place so many rows and columns further.
    fn moved(self, e: &mut Emitter, [rows, columns]: [Value; 2]) -> Place {
        Place {
            row: e.add(self.row, Ix::V(rows)),
            column: e.add(self.column, Ix::V(columns)),
            ..self
        }
    }

    /// Runs `f` where the place lies inside the product; rows and columns come in such tiles.
    fn guarded(
        &self,
        e: &mut Emitter,
        sizes: Sizes,
        tile: [usize; 2],
        f: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<()> {
        let (row, column) = (
            (self.row, sizes.m, tile[0]),
            (self.column, sizes.n, tile[1]),
        );
        let inside = within(e, [row, column])?;
        e.guarded(&[inside], f)
    }
}

/// Start of a block's share of the summed axis, and its number of tiles, as text: all of them, or
/// the share `part` of `n_parts`.
fn share(
    e: &mut Emitter,
    part: Ix<Value>,
    n_parts: usize,
    (k, depth): (usize, usize),
) -> [String; 2] {
    let steps = k.div_ceil(depth);
    if n_parts == 1 {
        return ["ix(0)".to_owned(), steps.to_string()];
    }
    let each = steps.div_ceil(n_parts);
    let first = e.mul(part, each as i64);
    let first = e.position(first);
    let left = e.define(Kind::Index, &format!("{steps} - {first}"));
    let start = e.define(Kind::Index, &format!("{first} * {depth}"));
    let count = format!("int(gm_min(ix({each}), {}))", e.text(left));
    [e.text(start).to_owned(), count]
}

/// Condition that positions lie within their extents, each with the length of its tiles; `None`
/// when whole tiles fit exactly.
fn within<const N: usize>(
    e: &mut Emitter,
    positions: [(Ix<Value>, usize, usize); N],
) -> Result<Option<Value>> {
    let mut inside = None;
    for (at, extent, tile) in positions {
        let own = e.below(at, extent, tile);
        inside = both(e, inside, own)?;
    }
    Ok(inside)
}

/// Conjunction of two conditions; `None` always holds.
fn both(e: &mut Emitter, a: Option<Value>, b: Option<Value>) -> Result<Option<Value>> {
    match (a, b) {
        (Some(a), Some(b)) => e.both(a, b).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}

/// `offset + sum(at[i] * strides[i])`, with all products before the sums.
fn element_position(e: &mut Emitter, offset: i64, at: &[Ix<Value>], strides: &[i64]) -> Ix<Value> {
    let indexed = at.iter().zip(strides);
    let steps: Vec<Ix<Value>> = indexed.map(|(&i, &s)| e.mul(i, s)).collect();
    steps
        .into_iter()
        .fold(Ix::C(offset), |sum, step| e.add(sum, step))
}
