//! Products in tiles of shared memory: matrix products and convolutions (as implicit products) of every dtype, with what leads up to the
//! operands and what follows the result computed on the way.
//!
//! Operands are pulled into the tiles and the result's followers are pulled from the accumulators, so views, casts and cheap element-wise
//! ops on either side cost no memory traffic. Floats accumulate in their own dtype with one rounding per step (half types in `f32`),
//! integers in an unsigned type of at least their width, which wraps as they do.

use super::emit::{Emitter, Value};
use super::fusion::{flops, followers};
use crate::codegen::body::Body;
use crate::codegen::phases::{Around, Cover};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller};
use crate::codegen::strided::Strided;
use crate::error::{Error, Result};
use crate::ir::{Layout, Node, NodeId, Op, ValueId};
use gristmill_runtime::DType;

/// Operations per element up to which an operand is computed again in every tile that needs it.
const CHEAP_FLOPS: u32 = 8;
/// Least extent of each side for which a tile is worth its synchronisation.
const LEAST_SIDE: usize = 4;
/// Blocks that keep every GPU of today busy: a smaller tile is taken until there are so many.
const ENOUGH_BLOCKS: usize = 128;

/// Shape of a block's tile: see `contract.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    m: usize,
    n: usize,
    k: usize,
    thread_m: usize,
    thread_n: usize,
}

const TILES: [Tile; 3] = [
    Tile { m: 128, n: 128, k: 8, thread_m: 8, thread_n: 8 },
    Tile { m: 64, n: 64, k: 16, thread_m: 4, thread_n: 4 },
    Tile { m: 32, n: 32, k: 16, thread_m: 4, thread_n: 4 },
];

impl Tile {
    /// Threads of a block.
    pub(super) fn threads(&self) -> usize {
        (self.m / self.thread_m) * (self.n / self.thread_n)
    }
}

/// A product, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
pub(super) struct Contract {
    node: NodeId,
    pub(super) result: ValueId,
    /// Extents of what both operands share outside of the product, of the rows, the columns, and what is summed over.
    n_batch: usize,
    m: usize,
    n: usize,
    k: usize,
    tile: Tile,
    acc: DType,
}

/// What a tile is loaded from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Lhs,
    Rhs,
}

/// The product that a node is, if tiles suit it.
pub(super) fn find(body: &Body, around: &Around, id: NodeId, node: &Node) -> Option<(Cover, Contract)> {
    let (n_batch, m, n, k) = extents(body, node)?;
    let dtype = body.dtype(node.inputs[0]);
    if m < LEAST_SIDE || n < LEAST_SIDE || k < LEAST_SIDE || n_batch == 0 {
        return None;
    }
    let blocks = |t: &&Tile| n_batch * m.div_ceil(t.m) * n.div_ceil(t.n) >= ENOUGH_BLOCKS;
    // The accumulators of the largest tile take all registers when they are 64 bits wide.
    let fitting = &TILES[usize::from(dtype.size_bytes() == 8)..];
    let tile = *fitting.iter().find(blocks).unwrap_or(&TILES[2]);
    let dear = |v: &ValueId| flops(body, around, *v).is_none_or(|f| f > CHEAP_FLOPS);
    let needs = node.inputs.iter().copied().filter(dear).collect();
    let (nodes, result) = followers(body, around, id);
    let contract = Contract { node: id, result, n_batch, m, n, k, tile, acc: accumulator(dtype) };
    Some((Cover { needs, nodes, results: vec![result] }, contract))
}

fn extents(body: &Body, node: &Node) -> Option<(usize, usize, usize, usize)> {
    let (lhs, rhs) = (node.inputs.first()?, node.inputs.get(1)?);
    let out = body.shape(node.outputs[0]);
    match &node.op {
        Op::MatMul => {
            let (batch, sides) = out.split_at(out.len() - 2);
            Some((batch.iter().product(), sides[0], sides[1], *body.shape(*lhs).last()?))
        }
        Op::Conv { groups, layout, .. } => {
            let w = body.shape(*rhs);
            let channels = if *layout == Layout::ChannelsFirst { out[1] } else { *out.last()? };
            let k = w.iter().product::<usize>() / channels.max(1);
            Some((*groups, out.iter().product::<usize>() / channels.max(1), channels / groups, k))
        }
        _ => None,
    }
}

fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        d if d.is_float() => DType::F32,
        d if d.size_bytes() == 8 => DType::U64,
        _ => DType::U32,
    }
}

impl Contract {
    /// Blocks that have a tile each.
    pub(super) fn n_tiles(&self) -> usize {
        self.n_batch * self.m.div_ceil(self.tile.m) * self.n.div_ceil(self.tile.n)
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> usize {
        self.tile.threads()
    }

    /// Writes the kernel's body; the result goes to `out`.
    pub(super) fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let Tile { m, n, k, thread_m, thread_n } = self.tile;
        let ty = super::text::element_type(self.acc);
        e.line(&format!("__shared__ __align__(16) {ty} lhs[{k} * gm_pitch<{m}>()];"));
        e.line(&format!("__shared__ __align__(16) {ty} rhs[{k} * gm_pitch<{n}>()];"));
        let n_tiles = self.n_tiles().to_string();
        e.counted(["ix(blockIdx.x)", &n_tiles, "ix(gridDim.x)"], |e, tile| {
            let (rest, column) = e.div_rem(Ix::V(tile), self.n.div_ceil(n));
            let (batch, row) = e.div_rem(rest, self.m.div_ceil(m));
            let (m0, n0) = (e.mul(row, m as i64), e.mul(column, n as i64));
            e.line(&format!("{ty} acc[{thread_m}][{thread_n}] = {{}};"));
            e.counted(["0", &self.k.to_string(), &k.to_string()], |e, k0| {
                self.load(p, e, Side::Lhs, batch, m0, k0)?;
                self.load(p, e, Side::Rhs, batch, n0, k0)?;
                e.line("__syncthreads();");
                e.line(&format!("gm_multiply<{m}, {n}, {k}, {thread_m}, {thread_n}>(lhs, rhs, acc);"));
                e.line("__syncthreads();");
                Ok(())
            })?;
            self.epilogue(p, e, batch, m0, n0, out)
        })
    }

    /// All threads of the block load the tile of one operand; what is outside of the operand is zero.
    fn load(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        side: Side,
        batch: Ix<Value>,
        first: Ix<Value>,
        k0: Value,
    ) -> Result<()> {
        let (name, extent, width) = match side {
            Side::Lhs => ("lhs", self.m, self.tile.m),
            Side::Rhs => ("rhs", self.n, self.tile.n),
        };
        let depth = self.tile.k;
        let k_is_inner = self.k_is_inner(p, side);
        let (items, threads) = ((width * depth).to_string(), self.tile.threads().to_string());
        e.line("#pragma unroll");
        e.counted(["ix(threadIdx.x)", &items, &threads], |e, i| {
            // Neighbouring threads read neighbouring elements.
            let (outer, inner) = e.div_rem(Ix::V(i), if k_is_inner { depth } else { width });
            let (along, deep) = if k_is_inner { (outer, inner) } else { (inner, outer) };
            let (at, k) = (e.add(first, along), e.add(Ix::V(k0), deep));
            let within = self.within(e, [(at, extent, width), (k, self.k, depth)])?;
            let pull = |p: &mut Puller<Value>, e: &mut Emitter| {
                p.scoped(|p| Ok(vec![self.operand(p, e, side, batch, at, k)?]))
            };
            let value = match within {
                None => pull(p, e)?,
                Some(inside) => {
                    let zero = |_: &mut Puller<Value>, e: &mut Emitter| Ok(vec![e.constant(self.acc, 0)]);
                    e.branch(inside, &[Kind::Element(self.acc)], p, pull, zero)?
                }
            };
            let (deep, along) = (e.val(deep), e.val(along));
            let to = format!("{name}[{} * gm_pitch<{width}>() + {}]", e.text(deep), e.text(along));
            e.line(&format!("{to} = {};", e.text(value[0])));
            Ok(())
        })
    }

    /// Whether positions lie within their extents; `None` when whole tiles fit exactly.
    fn within(&self, e: &mut Emitter, positions: [(Ix<Value>, usize, usize); 2]) -> Result<Option<Value>> {
        let mut inside = None;
        for (at, extent, _) in positions.into_iter().filter(|(_, extent, tile)| extent % tile != 0) {
            let (at, limit) = (e.val(at), e.index(extent as i64));
            let here = e.index_compare(Order::Less, at, limit);
            inside = Some(match inside {
                None => here,
                Some(other) => e.both(other, here)?,
            });
        }
        Ok(inside)
    }

    /// Whether an operand's elements lie side by side along what is summed over.
    fn k_is_inner(&self, p: &Puller<Value>, side: Side) -> bool {
        let node = p.body.graph.node(self.node);
        let mut v = node.inputs[usize::from(side == Side::Rhs)];
        // Element-wise ops leave elements where they are.
        while let Some(Node { op: Op::Map(_), inputs, .. }) =
            p.body.graph.def_node(v).filter(|_| !p.stored.contains_key(&v))
        {
            let Some(&same) = inputs.iter().find(|x| p.body.shape(**x) == p.body.shape(v)) else { break };
            v = same;
        }
        let view = Strided::resolve(p.body, v, &|v| p.stored.contains_key(&v));
        let rank = view.strides.len();
        match (&node.op, side) {
            (Op::MatMul, Side::Lhs) => view.strides[rank - 2] != 1,
            (Op::MatMul, Side::Rhs) => view.strides[rank - 2] == 1,
            (Op::Conv { layout, .. }, Side::Lhs) => *layout == Layout::ChannelsLast,
            (Op::Conv { layout, .. }, Side::Rhs) => *layout == Layout::ChannelsFirst,
            _ => true,
        }
    }

    /// An element of an operand, in the accumulator's dtype.
    fn operand(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        side: Side,
        batch: Ix<Value>,
        at: Ix<Value>,
        k: Ix<Value>,
    ) -> Result<Value> {
        let node = p.body.graph.node(self.node).clone();
        let dtype = p.body.dtype(node.inputs[0]);
        let value = match (&node.op, side) {
            (Op::MatMul, _) => {
                let out = p.body.shape(node.outputs[0]).to_vec();
                let lead = e.delinearise(batch, &out[..out.len() - 2]);
                let (v, pair) = match side {
                    Side::Lhs => (node.inputs[0], [at, k]),
                    Side::Rhs => (node.inputs[1], [k, at]),
                };
                let own = p.body.shape(v);
                let skip = lead.len() + 2 - own.len();
                let fixed = own.iter().zip(&lead[skip..]).map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i });
                let index: Vec<Ix<Value>> = fixed.chain(pair).collect();
                p.value(e, v, &index)?
            }
            (Op::Conv { .. }, Side::Lhs) => p.conv_input(e, &node, batch, at, k)?,
            (Op::Conv { .. }, Side::Rhs) => p.conv_weight(e, &node, batch, k, at)?,
            _ => return Err(Error::internal(format!("{} is no product", node.op.name()))),
        };
        e.convert(value, dtype, self.acc)
    }

    /// Each thread computes what follows the product from its accumulators, and stores it.
    fn epilogue(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        batch: Ix<Value>,
        m0: Ix<Value>,
        n0: Ix<Value>,
        out: Value,
    ) -> Result<()> {
        let Tile { m, n, thread_m, thread_n, .. } = self.tile;
        let per_row = n / thread_n;
        e.line("#pragma unroll");
        e.open(&format!("for (int i = 0; i < {thread_m}; ++i)"));
        e.line("#pragma unroll");
        e.open(&format!("for (int j = 0; j < {thread_n}; ++j)"));
        let row = e.define(Kind::Index, &format!("gm_of_tile<{m}, {thread_m}>(threadIdx.x / {per_row}, i)"));
        let column = e.define(Kind::Index, &format!("gm_of_tile<{n}, {thread_n}>(threadIdx.x % {per_row}, j)"));
        let (row, column) = (e.add(m0, Ix::V(row)), e.add(n0, Ix::V(column)));
        let inside = self.within(e, [(row, self.m, m), (column, self.n, n)])?;
        if let Some(inside) = inside {
            let condition = format!("if ({})", e.text(inside));
            e.open(&condition);
        }
        p.scoped(|p| {
            let node = p.body.graph.node(self.node).clone();
            let product = node.outputs[0];
            let at = result_index(p.body, e, &node, batch, row, column);
            let sum = e.named(Kind::Element(self.acc), "acc[i][j]");
            let sum = e.convert(sum, self.acc, p.body.dtype(product))?;
            p.remember(product, &at, sum);
            let value = p.value(e, self.result, &at)?;
            let linear = e.linearise(&at, p.body.shape(self.result));
            e.store(p.body.dtype(self.result), value, out, linear);
            Ok::<(), Error>(())
        })?;
        (0..2 + usize::from(inside.is_some())).for_each(|_| e.close());
        Ok(())
    }
}

/// Index in the result of an element of the product.
fn result_index(
    body: &Body,
    e: &mut Emitter,
    node: &Node,
    batch: Ix<Value>,
    row: Ix<Value>,
    column: Ix<Value>,
) -> Vec<Ix<Value>> {
    let out = body.shape(node.outputs[0]);
    let Op::Conv { groups, layout, .. } = &node.op else {
        let mut at = e.delinearise(batch, &out[..out.len() - 2]);
        at.extend([row, column]);
        return at;
    };
    let channels = if *layout == Layout::ChannelsFirst { out[1] } else { out[out.len() - 1] };
    let first = e.mul(batch, (channels / groups) as i64);
    let channel = e.add(first, column);
    match layout {
        Layout::ChannelsFirst => {
            let positions: Vec<usize> = [out[0]].iter().chain(&out[2..]).copied().collect();
            let mut at = e.delinearise(row, &positions);
            at.insert(1, channel);
            at
        }
        Layout::ChannelsLast => {
            let mut at = e.delinearise(row, &out[..out.len() - 1]);
            at.push(channel);
            at
        }
    }
}
