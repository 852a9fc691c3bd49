//! Products by the multipliers of the threads: exact in the dtype that they accumulate in.
//!
//! Floats accumulate in their own dtype with one rounding per step (half types in `f32`), integers in an unsigned type of at least their
//! width, which wraps as they do.

use super::super::candidates::{Resources, Work, in_parts};
use super::super::emit::{Emitter, Value};
use super::super::text::element_type;
use super::epilogue::Stores;
use super::operand::{At, Side, k_is_inner};
use super::{Contract, Place, Sizes, share};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Node, Op, ValueId};
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
    Tile {
        m: 128,
        n: 128,
        k: 8,
        thread_m: 8,
        thread_n: 8,
    },
    Tile {
        m: 64,
        n: 64,
        k: 8,
        thread_m: 4,
        thread_n: 4,
    },
    Tile {
        m: 32,
        n: 32,
        k: 16,
        thread_m: 4,
        thread_n: 4,
    },
];

/// Neighbouring columns that a thread has.
const RUN: usize = 4;

/// A tile and its accumulator dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Simt {
    tile: Tile,
    pub(super) acc: DType,
    /// Blocks that share a multiprocessor: one multiplies while another waits for its tiles. Where elements of convolutions are takes too many registers.
    per_multiprocessor: u32,
    /// Blocks that share a sum.
    pub(super) n_parts: usize,
}

/// Multiplications of 32 bits in the time of a byte; of 64, half as many.
const PRODUCTS_PER_BYTE: f64 = 8.0;

/// Accumulator dtype of products.
pub(in crate::codegen::cuda) fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        d if d.is_float() => DType::F32,
        d if d.size_bytes() == 8 => DType::U64,
        _ => DType::U32,
    }
}

impl Simt {
    /// For the product `node` of operands of a dtype, with each tile, the one that suits the sizes first.
    pub(super) fn all(node: &Node, dtype: DType, sizes: Sizes) -> Vec<Simt> {
        // The accumulators of the largest tile take all registers when they are 64 bits wide.
        let fitting = &TILES[usize::from(dtype.size_bytes() == 8)..];
        let divisions = sizes.divisions(fitting, |t| [t.m, t.n, t.k]);
        let per_multiprocessor = if matches!(node.op, Op::MatMul) { 2 } else { 1 };
        let of = |(tile, n_parts)| Simt {
            tile,
            acc: accumulator(dtype),
            per_multiprocessor,
            n_parts,
        };
        divisions.into_iter().map(of).collect()
    }

    fn threads(&self) -> usize {
        (self.tile.m / self.tile.thread_m) * (self.tile.n / self.tile.thread_n)
    }

    pub(super) fn words(&self) -> String {
        let Tile { m, n, .. } = self.tile;
        format!("tiles of {m} x {n} by threads{}", in_parts(self.n_parts))
    }

    pub(super) fn work(&self, sizes: Sizes) -> Work {
        let size_bytes = self.acc.size_bytes();
        sizes.work(
            [self.tile.m, self.tile.n],
            self.n_parts,
            size_bytes,
            4.0 * PRODUCTS_PER_BYTE / size_bytes as f64,
        )
    }

    pub(super) fn resources(&self, sizes: Sizes) -> Resources {
        let blocks = sizes.n_tiles(self.tile.m, self.tile.n) * self.n_parts;
        Resources {
            per_multiprocessor: self.per_multiprocessor,
            ..Resources::new(blocks, self.threads())
        }
    }

    pub(super) fn emit(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        out: Value,
    ) -> Result<()> {
        let Tile { m, n, .. } = self.tile;
        let (ty, product) = (element_type(self.acc), self.product(c, p));
        e.line(&format!("typedef {product} product;"));
        e.line(&format!(
            "__shared__ __align__(16) {ty} shared[2 * product::stage_size];"
        ));
        let (rows, columns) = (c.sizes.m.div_ceil(m), c.sizes.n.div_ceil(n));
        let shape = [c.n_parts(), c.sizes.n_batch, rows, columns];
        e.by_block(shape.iter().product(), |e, tile| {
            let at = e.delinearise(Ix::V(tile), &shape);
            let (row, column) = (e.mul(at[2], m as i64), e.mul(at[3], n as i64));
            let place = Place {
                part: at[0],
                batch: at[1],
                row,
                column,
            };
            let [first, steps] = share(e, place.part, c.n_parts(), (c.sizes.k, self.tile.k));
            self.load(c, p, e, Side::Lhs, place)?;
            self.load(c, p, e, Side::Rhs, place)?;
            e.line("product sums;");
            let rows = rows_of_tile(e, (place.row, c.sizes.m, m));
            let columns = rows_of_tile(e, (place.column, c.sizes.n, n));
            e.line(&format!(
                "sums.run(shared, {first}, {steps}, lhs, rhs, {rows}, {columns});"
            ));
            self.epilogue(c, p, e, place, out)
        })
    }

    /// The prelude's type of the product.
    fn product(&self, c: &Contract, p: &Puller<Value>) -> String {
        let Tile {
            m,
            n,
            k,
            thread_m,
            thread_n,
        } = self.tile;
        let (node, ty) = (c.node.of(p.body), element_type(self.acc));
        let in_memory = |v: ValueId| p.stored.contains_key(&v);
        let [lhs, rhs] = Side::BOTH.map(|side| k_is_inner(p.body, &in_memory, node, side));
        format!("gm_thread_product<{ty}, {m}, {n}, {k}, {thread_m}, {thread_n}, {lhs}, {rhs}>")
    }

    /// Writes the function that gives an element of an operand's tile, zero past the end of the sum.
    fn load(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        side: Side,
        place: Place,
    ) -> Result<()> {
        let (name, ty) = (side.name(), element_type(self.acc));
        e.open(&format!(
            "const auto {name} = [&](int along, int deep, ix k0) -> {ty}"
        ));
        let position = ["along", "deep", "k0"].map(|name| Ix::V(e.named(Kind::Index, name)));
        let at = At::in_tile(e, (side, place), position);
        let inside = e.below(at.k, c.sizes.k, self.tile.k);
        c.give_element(p, e, (side, self.acc), at, inside)?;
        e.close_with("};");
        Ok(())
    }

    /// Each thread stores the epilogue of its accumulators, in runs of up to four columns.
    fn epilogue(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        place: Place,
        out: Value,
    ) -> Result<()> {
        let Tile {
            m,
            n,
            thread_m,
            thread_n,
            ..
        } = self.tile;
        let per_row = n / thread_n;
        let stores = Stores::find(p.body, c, &|v| p.stored.contains_key(&v), RUN);
        let width = stores.width();
        e.line("#pragma unroll");
        e.open(&format!("for (int i = 0; i < {thread_m}; ++i)"));
        e.line("#pragma unroll");
        e.open(&format!("for (int j = 0; j < {thread_n}; j += {width})"));
        let row = format!("gm_of_tile<{m}, {thread_m}>(threadIdx.x / {per_row}, i)");
        let column = format!("gm_of_tile<{n}, {thread_n}>(threadIdx.x % {per_row}, j)");
        let own = [row, column].map(|position| e.define(Kind::Index, &position));
        let place = place.moved(e, own);
        let sum = match width {
            1 => "sums.acc[i][j]",
            _ => "sums.acc[i][j + k]",
        };
        place.guarded(e, c.sizes, [m, n], |e| {
            stores.emit(c, p, e, place, sum, out)
        })?;
        (0..2).for_each(|_| e.close());
        Ok(())
    }
}

/// Rows (or columns) of a tile in the product, as the prelude takes them: `first` is the tile's first
/// of `extent`, `width` their number.
fn rows_of_tile(e: &mut Emitter, (first, extent, width): (Ix<Value>, usize, usize)) -> String {
    if extent.is_multiple_of(width) {
        return "gm_all_rows()".to_owned();
    }
    format!("int(gm_min(ix({width}), {extent} - {}))", e.position(first))
}
