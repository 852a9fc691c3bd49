//! Products by warp groups on `sm_90a`, for large matrix products of half types whose operands both lie in memory in runs of 16 bytes: see
//! `wgmma.cuh`. Rates on a real GPU have not been measured.

use super::super::Options;
use super::super::candidates::Resources;
use super::super::emit::{Emitter, Value};
use super::super::mapped::{COLUMNS, Mapped};
use super::epilogue::{self, Slabs};
use super::operand::{Chunks, Side};
use super::tensor::{Instruction, Operands};
use super::{Contract, Place, Sizes};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Node, Op, ValueId};
use gristmill_runtime::gpu::TensorMap;

/// Multiprocessors of an H100 or H200: blocks stay and go through the tiles.
const MULTIPROCESSORS: usize = 132;
/// Tiles of 128 x 128 from which blocks of this size keep the GPU busier than smaller ones.
const LEAST_TILES: usize = 64;
/// Extents of a tile: rows, columns in the wide and in the narrow form, and what is summed over at a time.
const ROWS: usize = 128;
const WIDE: usize = 256;
const NARROW: usize = 128;
const DEPTH: usize = COLUMNS;
/// Stages of the ring.
const STAGES: usize = 4;
/// A producing group and two that multiply.
const THREADS: u64 = 384;
/// Sums of a warp on their way through shared memory, and the ring's barriers: see `gm_group_product`.
const SLABS_BYTES: usize = 8 * 16 * (64 + 4) * 4;
const BARRIERS_BYTES: usize = 2 * STAGES * 8;

/// A product by warp groups.
#[derive(Clone, Debug)]
pub(super) struct Wgmma {
    instruction: Instruction,
    columns: usize,
    /// Blocks that share the columns they load.
    cluster: usize,
    lhs: Operand,
    rhs: Operand,
}

/// An operand that the copy engine brings.
#[derive(Clone, Debug)]
struct Operand {
    along_k: bool,
    mapped: Mapped,
}

impl Operand {
    /// With tiles of `rows` rows or columns along k, 64 otherwise; `None` if the engine does not take it.
    fn new(body: &Body, side: Side, chunks: &Chunks, rows: usize) -> Option<Operand> {
        let (view, along_k) = (chunks.view(), chunks.along_k);
        let rank = view.shape.len();
        let inner = if along_k == (side == Side::Lhs) { rank - 1 } else { rank - 2 };
        let mapped = Mapped::new(body, view, inner, if along_k { rows } else { DEPTH })?;
        Some(Operand { along_k, mapped })
    }
}

impl Wgmma {
    /// For a product whose operands are these, if it is large and the GPU has such instructions.
    pub(super) fn new(body: &Body, options: &Options, node: &Node, operands: &Operands, sizes: Sizes) -> Option<Wgmma> {
        let [lhs, rhs] = operands.copied()?;
        let instruction = operands.instruction;
        let enough = sizes.n_tiles(ROWS, NARROW) >= LEAST_TILES && sizes.k >= DEPTH;
        let fits = options.arch.has_wgmma() && matches!(node.op, Op::MatMul) && instruction.size_bytes() == 2;
        if !enough || !fits {
            return None;
        }
        let columns = if sizes.n_tiles(ROWS, WIDE) >= MULTIPROCESSORS { WIDE } else { NARROW };
        let rows = sizes.m.div_ceil(ROWS);
        // An odd row of tiles leaves half a pair without work.
        let cluster = if rows.is_multiple_of(2) || rows > 8 { 2 } else { 1 };
        let lhs = Operand::new(body, Side::Lhs, lhs, ROWS)?;
        let rhs = Operand::new(body, Side::Rhs, rhs, columns / cluster)?;
        Some(Wgmma { instruction, columns, cluster, lhs, rhs })
    }

    /// Pairs of tiles, or tiles.
    fn n_places(&self, sizes: Sizes) -> usize {
        sizes.n_tiles(ROWS * self.cluster, self.columns)
    }

    pub(super) fn words(&self) -> String {
        let Wgmma { columns, cluster, .. } = self;
        format!("tiles of {ROWS} x {columns} by warp groups, {STAGES} stages, clusters of {cluster}")
    }

    pub(super) fn resources(&self, sizes: Sizes) -> Resources {
        let blocks = (self.n_places(sizes) * self.cluster).min(MULTIPROCESSORS) as u64;
        let ring = STAGES * (ROWS + self.columns) * DEPTH * 2;
        let shared_bytes = (ring + SLABS_BYTES + BARRIERS_BYTES) as u32;
        Resources { blocks, threads: THREADS, shared_bytes, per_multiprocessor: 1, cluster: self.cluster as u32 }
    }

    pub(super) fn maps(&self) -> Vec<(ValueId, TensorMap)> {
        [&self.lhs, &self.rhs].map(|o| (o.mapped.base, o.mapped.map.clone())).into()
    }

    /// The prelude's type of the product.
    fn product(&self) -> String {
        let Wgmma { instruction, columns, cluster, lhs, rhs } = self;
        let (name, lhs, rhs) = (instruction.name, lhs.along_k, rhs.along_k);
        format!("gm_group_product<gm_wgmma_{name}, {columns}, {STAGES}, {lhs}, {rhs}, {cluster}>")
    }

    pub(super) fn emit(&self, c: &Contract, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let steps = c.sizes.k.div_ceil(DEPTH);
        e.line(&format!("typedef {} product;", self.product()));
        e.line("extern __shared__ __align__(1024) u8 shared[];");
        e.line("auto ring = product::begin(shared);");
        e.open("if (product::group() < 0)");
        e.line("gm_fewer_registers();");
        e.open("if (threadIdx.x == 0)");
        self.tiles(c, e, |e, at| {
            self.fetch(c, p, e, Side::Lhs, at);
            self.fetch(c, p, e, Side::Rhs, at);
            e.line(&format!("product::fetch(ring, {steps}, lhs, rhs);"));
            Ok(())
        })?;
        e.close();
        e.close_with("} else {");
        e.indent();
        e.line("gm_more_registers();");
        self.tiles(c, e, |e, [batch, row, column]| {
            e.line("product sums;");
            e.line(&format!("sums.run(ring, {steps});"));
            // The last tile of an odd row of tiles may lie outside as a whole.
            let tile = [ROWS * self.cluster, self.columns];
            let place = Place { part: Ix::C(0), batch, row, column };
            epilogue::staged(c, p, e, place, Slabs { acc: self.instruction.acc, columns: COLUMNS, tile }, out)
        })?;
        e.close();
        e.line("product::end();");
        Ok(())
    }

    /// A loop over the tiles of a block; `f` gets the batch and the tile's first row and column.
    fn tiles(
        &self,
        c: &Contract,
        e: &mut Emitter,
        f: impl FnOnce(&mut Emitter, [Ix<Value>; 3]) -> Result<()>,
    ) -> Result<()> {
        let cluster = self.cluster;
        let (rows, columns) = (c.sizes.m.div_ceil(ROWS * cluster), c.sizes.n.div_ceil(self.columns));
        let [first, step] = ["blockIdx", "gridDim"].map(|v| match cluster {
            1 => format!("ix({v}.x)"),
            n => format!("ix({v}.x / {n})"),
        });
        e.counted([&first, &self.n_places(c.sizes).to_string(), &step], |e, place| {
            let (batch, place) = e.div_rem(Ix::V(place), rows * columns);
            let place = e.val(place);
            let place = format!("const auto place = gm_raster<ix>({}, {rows}, {columns});", e.text(place));
            e.line(&place);
            let row = format!("(place.row * {cluster} + product::block_row()) * {ROWS}");
            let m0 = e.define(Kind::Index, &row);
            let n0 = e.define(Kind::Index, &format!("place.column * {}", self.columns));
            f(e, [batch, Ix::V(m0), Ix::V(n0)])
        })
    }

    /// Writes the function that asks for a tile of an operand.
    fn fetch(&self, c: &Contract, p: &Puller<Value>, e: &mut Emitter, side: Side, [batch, m0, n0]: [Ix<Value>; 3]) {
        let (operand, start, map) = match side {
            Side::Lhs => (&self.lhs, m0, "map0"),
            Side::Rhs => (&self.rhs, n0, "map1"),
        };
        let name = side.name();
        e.open(&format!("const auto {name} = [&](u32 to, u32 barrier, bool shares, int first, int k0)"));
        let node = p.body.graph.node(c.node);
        let out = p.body.shape(node.outputs[0]);
        let index = e.delinearise(batch, &out[..out.len() - 2]);
        // Leading axes of an operand are the last of the result's.
        let skip = out.len() - p.body.shape(side.operand(node)).len();
        let start = e.val(start);
        let along = format!("int({}) + first", e.text(start));
        let at = if operand.along_k { ["k0", &along] } else { [&along, "k0"] };
        let at = operand.mapped.coordinates(e, at, &index[skip..]);
        e.line(&format!("gm_load_tile(to, &{map}, barrier, shares{at});"));
        e.close_with("};");
    }
}
