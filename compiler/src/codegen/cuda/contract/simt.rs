//! Products by the multipliers of the threads: exact in the dtype that they accumulate in.
//!
//! Floats accumulate in their own dtype with one rounding per step (half types in `f32`), integers in an unsigned type of at least their
//! width, which wraps as they do.

use super::super::cluster::Resources;
use super::super::emit::{Emitter, Value};
use super::super::text::element_type;
use super::epilogue;
use super::operand::{At, Side, k_is_inner};
use super::{Contract, ENOUGH_BLOCKS, Sizes, within};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use gristmill_runtime::DType;

/// Shape of a block's tile: see `contract.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
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

/// A tile, and what it is summed up in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Simt {
    tile: Tile,
    acc: DType,
}

/// What products of a dtype accumulate in.
pub(in crate::codegen::cuda) fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        d if d.is_float() => DType::F32,
        d if d.size_bytes() == 8 => DType::U64,
        _ => DType::U32,
    }
}

impl Simt {
    /// For operands of a dtype.
    pub(super) fn new(dtype: DType, sizes: Sizes) -> Simt {
        // The accumulators of the largest tile take all registers when they are 64 bits wide.
        let fitting = &TILES[usize::from(dtype.size_bytes() == 8)..];
        let tile = *fitting.iter().find(|t| sizes.n_tiles(t.m, t.n) >= ENOUGH_BLOCKS).unwrap_or(&TILES[2]);
        Simt { tile, acc: accumulator(dtype) }
    }

    fn threads(&self) -> usize {
        (self.tile.m / self.tile.thread_m) * (self.tile.n / self.tile.thread_n)
    }

    pub(super) fn resources(&self, sizes: Sizes) -> Resources {
        let blocks = sizes.n_tiles(self.tile.m, self.tile.n) as u64;
        Resources { blocks, threads: self.threads() as u64, ..Resources::default() }
    }

    pub(super) fn emit(&self, c: &Contract, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let Tile { m, n, k, thread_m, thread_n } = self.tile;
        let ty = element_type(self.acc);
        e.line(&format!("__shared__ __align__(16) {ty} lhs[{k} * gm_pitch<{m}>()];"));
        e.line(&format!("__shared__ __align__(16) {ty} rhs[{k} * gm_pitch<{n}>()];"));
        let n_tiles = c.sizes.n_tiles(m, n).to_string();
        e.counted(["ix(blockIdx.x)", &n_tiles, "ix(gridDim.x)"], |e, tile| {
            let (rest, column) = e.div_rem(Ix::V(tile), c.sizes.n.div_ceil(n));
            let (batch, row) = e.div_rem(rest, c.sizes.m.div_ceil(m));
            let (m0, n0) = (e.mul(row, m as i64), e.mul(column, n as i64));
            e.line(&format!("{ty} acc[{thread_m}][{thread_n}] = {{}};"));
            e.counted(["0", &c.sizes.k.to_string(), &k.to_string()], |e, k0| {
                self.load(c, p, e, Side::Lhs, At { batch, along: m0, k: Ix::V(k0) })?;
                self.load(c, p, e, Side::Rhs, At { batch, along: n0, k: Ix::V(k0) })?;
                e.line("__syncthreads();");
                e.line(&format!("gm_multiply<{m}, {n}, {k}, {thread_m}, {thread_n}>(lhs, rhs, acc);"));
                e.line("__syncthreads();");
                Ok(())
            })?;
            self.epilogue(c, p, e, At { batch, along: m0, k: n0 }, out)
        })
    }

    /// All threads of the block load the tile of one operand that begins at `first`; what is outside of the operand is zero.
    fn load(&self, c: &Contract, p: &mut Puller<Value>, e: &mut Emitter, side: Side, first: At) -> Result<()> {
        let (extent, width) = match side {
            Side::Lhs => (c.sizes.m, self.tile.m),
            Side::Rhs => (c.sizes.n, self.tile.n),
        };
        let depth = self.tile.k;
        let node = p.body.graph.node(c.node);
        let k_is_inner = k_is_inner(p.body, &|v| p.stored.contains_key(&v), node, side);
        let (items, threads) = ((width * depth).to_string(), self.threads().to_string());
        e.line("#pragma unroll");
        e.counted(["ix(threadIdx.x)", &items, &threads], |e, i| {
            // Neighbouring threads read neighbouring elements.
            let (outer, inner) = e.div_rem(Ix::V(i), if k_is_inner { depth } else { width });
            let (along, deep) = if k_is_inner { (outer, inner) } else { (inner, outer) };
            let at = At { batch: first.batch, along: e.add(first.along, along), k: e.add(first.k, deep) };
            let within = within(e, [(at.along, extent, width), (at.k, c.sizes.k, depth)])?;
            let pull =
                |p: &mut Puller<Value>, e: &mut Emitter| p.scoped(|p| Ok(vec![c.element(p, e, side, at, self.acc)?]));
            let value = match within {
                None => pull(p, e)?,
                Some(inside) => {
                    let zero = |_: &mut Puller<Value>, e: &mut Emitter| Ok(vec![e.constant(self.acc, 0)]);
                    e.branch(inside, &[Kind::Element(self.acc)], p, pull, zero)?
                }
            };
            let (deep, along) = (e.val(deep), e.val(along));
            let to = format!("{}[{} * gm_pitch<{width}>() + {}]", side.name(), e.text(deep), e.text(along));
            e.line(&format!("{to} = {};", e.text(value[0])));
            Ok(())
        })
    }

    /// Each thread computes what follows the product from its accumulators, and stores it.
    fn epilogue(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        At { batch, along: m0, k: n0 }: At,
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
        let inside = within(e, [(row, c.sizes.m, m), (column, c.sizes.n, n)])?;
        if let Some(inside) = inside {
            let condition = format!("if ({})", e.text(inside));
            e.open(&condition);
        }
        epilogue::element(c, p, e, [batch, row, column], ("acc[i][j]", self.acc), out)?;
        (0..2 + usize::from(inside.is_some())).for_each(|_| e.close());
        Ok(())
    }
}
