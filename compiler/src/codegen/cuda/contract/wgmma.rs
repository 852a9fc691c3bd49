//! Products by warp groups on `sm_90a`, for large matrix products and channels-last convolutions of
//! half types whose operands both lie in memory in runs of 16 bytes: see `wgmma.cuh`.

use super::super::Options;
use super::super::candidates::{MULTIPROCESSORS, Resources, Work};
use super::super::emit::{Emitter, Value};
use super::super::groups::{self, BARRIER_BYTES, LEAST_TILES};
use super::super::mapped::{COLUMNS, Mapped};
use super::epilogue::{self, Slabs};
use super::operand::{Chunks, Side};
use super::pixels::Implicit;
use super::tensor::{Instruction, Operands};
use super::{Contract, Place, Sizes};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Node, Op, ValueId};
use gristmill_runtime::gpu::TensorMap;

/// Extents of a tile: rows, columns of the wide variant and of the narrower ones, and depth of a step.
const ROWS: usize = 128;
const WIDE: usize = 256;
const NARROW: usize = 128;
const NARROWEST: usize = 64;
const DEPTH: usize = COLUMNS;
/// Columns of a tile and stages of the ring, per variant. For each width, the first is taken by
/// prediction.
const RINGS: [(usize, usize); 4] = [(WIDE, 4), (NARROW, 4), (NARROW, 6), (NARROWEST, 6)];
/// Sums of warps on their way through shared memory: see `gm_group_product`.
const SLABS_BYTES: usize = 8 * 16 * (64 + 4) * 4;
/// Multiplications in the time of a byte.
const PRODUCTS_PER_BYTE: f64 = 100.0;

/// A product by warp groups.
#[derive(Clone, Debug)]
pub(super) struct Wgmma {
    instruction: Instruction,
    columns: usize,
    stages: usize,
    /// Blocks that share the columns they load.
    cluster: usize,
    lhs: Lhs,
    rhs: Operand,
}

/// The left-hand side: rows of a matrix, or pixels.
#[derive(Clone, Debug)]
enum Lhs {
    Matrix(Operand),
    Pixels(Implicit),
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
        let inner = if along_k == (side == Side::Lhs) {
            rank - 1
        } else {
            rank - 2
        };
        let mapped = Mapped::new(body, view, inner, if along_k { rows } else { DEPTH })?;
        Some(Operand { along_k, mapped })
    }
}

/// Columns, stages and blocks of a cluster of all variants, best predicted first.
fn shapes(sizes: Sizes) -> Vec<(usize, usize, usize)> {
    // At most a ninth of wide tiles' columns may be outside, where narrow ones have none there.
    let is_full = sizes.n.next_multiple_of(WIDE) * 8 <= sizes.n.next_multiple_of(NARROW) * 9;
    let is_wide = is_full && sizes.n_tiles(ROWS, WIDE) >= MULTIPROCESSORS;
    let columns = match sizes.n {
        ..=NARROWEST => NARROWEST,
        _ if is_wide => WIDE,
        _ => NARROW,
    };
    let rows = sizes.m.div_ceil(ROWS);
    // An odd row of tiles leaves half a pair without work.
    let is_paired = rows.is_multiple_of(2) || rows > 8;
    let cluster = if is_paired && columns > NARROWEST {
        2
    } else {
        1
    };
    let clusters = [cluster, 3 - cluster].into_iter().filter(|&c| c <= rows);
    let all = clusters.flat_map(|c| RINGS.map(|(columns, stages)| (columns, stages, c)));
    // Half of the narrowest tile is less than the engine brings at a time across the summed axis.
    let mut all: Vec<_> = all.filter(|t| t.0 > NARROWEST || t.2 == 1).collect();
    all.sort_by_key(|&(own, _, c)| (c != cluster, own != columns));
    all
}

impl Wgmma {
    /// Variants for a product of these operands, best predicted first. Empty when it is small or
    /// the GPU lacks the instructions.
    pub(super) fn all(
        body: &Body,
        options: &Options,
        node: &Node,
        operands: &Operands,
        sizes: Sizes,
    ) -> Vec<Wgmma> {
        let is_large = sizes.n_tiles(ROWS, NARROW) >= LEAST_TILES && sizes.k >= DEPTH;
        let is_half = operands.instruction.size_bytes() == 2;
        let is_known = match node.op {
            Op::MatMul => options.arch.has_wgmma(),
            _ => Implicit::suits(options, node),
        };
        if !is_large || !is_known || !is_half {
            return Vec::new();
        }
        let shapes = shapes(sizes).into_iter();
        shapes
            .filter_map(|shape| Wgmma::new(body, node, operands, shape))
            .collect()
    }

    fn new(
        body: &Body,
        node: &Node,
        operands: &Operands,
        (columns, stages, cluster): (usize, usize, usize),
    ) -> Option<Wgmma> {
        let [lhs, rhs] = operands.copied()?;
        let lhs = match node.op {
            Op::MatMul => Lhs::Matrix(Operand::new(body, Side::Lhs, lhs, ROWS)?),
            _ => Lhs::Pixels(Implicit::new(body, node, lhs, ROWS)?),
        };
        let rhs = Operand::new(body, Side::Rhs, rhs, columns / cluster)?;
        Some(Wgmma {
            instruction: operands.instruction,
            columns,
            stages,
            cluster,
            lhs,
            rhs,
        })
    }

    /// Pairs of tiles, or tiles.
    fn n_places(&self, sizes: Sizes) -> usize {
        sizes.n_tiles(ROWS * self.cluster, self.columns)
    }

    pub(super) fn words(&self) -> String {
        let Wgmma {
            columns,
            stages,
            cluster,
            ..
        } = self;
        format!(
            "tiles of {ROWS} x {columns} by warp groups, {stages} stages, clusters of {cluster}"
        )
    }

    pub(super) fn work(&self, sizes: Sizes) -> Work {
        let pair = [ROWS * self.cluster, self.columns];
        // Channels may end within a tile.
        let k = self.steps(sizes) * DEPTH;
        let sizes = Sizes { k, ..sizes };
        let work = sizes.work(pair, 1, self.instruction.size_bytes(), PRODUCTS_PER_BYTE);
        Work {
            n_tiles: work.n_tiles * self.cluster,
            ..work
        }
    }

    pub(super) fn resources(&self, sizes: Sizes) -> Resources {
        let ring = self.stages * ((ROWS + self.columns) * DEPTH * 2 + 2 * BARRIER_BYTES);
        groups::resources(
            self.n_places(sizes) * self.cluster,
            ring + SLABS_BYTES,
            self.cluster,
        )
    }

    pub(super) fn maps(&self) -> Vec<(ValueId, TensorMap)> {
        let of = |o: &Operand| (o.mapped.base, o.mapped.map.clone());
        let lhs = match &self.lhs {
            Lhs::Matrix(lhs) => of(lhs),
            Lhs::Pixels(pixels) => pixels.map(),
        };
        vec![lhs, of(&self.rhs)]
    }

    /// Steps of the sum.
    fn steps(&self, sizes: Sizes) -> usize {
        match &self.lhs {
            Lhs::Matrix(_) => sizes.k.div_ceil(DEPTH),
            Lhs::Pixels(pixels) => pixels.steps(),
        }
    }

    /// The prelude's type of the product.
    fn product(&self) -> String {
        let Wgmma {
            instruction,
            columns,
            stages,
            cluster,
            lhs,
            rhs,
        } = self;
        let lhs = match lhs {
            Lhs::Matrix(lhs) => lhs.along_k,
            Lhs::Pixels(_) => true,
        };
        let (name, rhs) = (instruction.name, rhs.along_k);
        format!("gm_group_product<gm_wgmma_{name}, {columns}, {stages}, {lhs}, {rhs}, {cluster}>")
    }

    pub(super) fn emit(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        out: Value,
    ) -> Result<()> {
        e.line(&format!("typedef {} product;", self.product()));
        e.line("extern __shared__ __align__(1024) u8 shared[];");
        e.line("auto ring = product::begin(shared);");
        let fetch = |p: &mut Puller<Value>, e: &mut Emitter| self.fetch_all(c, p, e);
        let multiply = |p: &mut Puller<Value>, e: &mut Emitter| self.multiply(c, p, e, out);
        groups::split(p, e, "product", fetch, multiply)?;
        e.line("product::end();");
        Ok(())
    }

    /// Code of the fetching thread.
    fn fetch_all(&self, c: &Contract, p: &mut Puller<Value>, e: &mut Emitter) -> Result<()> {
        let steps = self.steps(c.sizes);
        self.tiles(c, e, |e, place| {
            match &self.lhs {
                Lhs::Matrix(lhs) => {
                    fetch(c, p, e, (Side::Lhs, lhs), place);
                    fetch(c, p, e, (Side::Rhs, &self.rhs), place);
                }
                Lhs::Pixels(pixels) => {
                    pixels.fetch_pixels(c, e, place);
                    pixels.fetch_filter(e, place, (&self.rhs.mapped, self.rhs.along_k));
                }
            }
            e.line(&format!("product::fetch(ring, {steps}, lhs, rhs);"));
            Ok(())
        })
    }

    /// Code of the multiplying groups.
    fn multiply(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        out: Value,
    ) -> Result<()> {
        let steps = self.steps(c.sizes);
        self.tiles(c, e, |e, place| {
            e.line("product sums;");
            e.line(&format!("sums.run(ring, {steps});"));
            let slabs = Slabs {
                columns: COLUMNS,
                // The last tile of an odd row of tiles may lie outside as a whole.
                tile: [ROWS * self.cluster, self.columns],
            };
            epilogue::staged(c, p, e, place, slabs, out)
        })
    }

    /// A loop over the tiles of a block; `f` gets the place of each.
    fn tiles(
        &self,
        c: &Contract,
        e: &mut Emitter,
        f: impl FnOnce(&mut Emitter, Place) -> Result<()>,
    ) -> Result<()> {
        let cluster = self.cluster;
        let rows = c.sizes.m.div_ceil(ROWS * cluster);
        let columns = c.sizes.n.div_ceil(self.columns);
        let [first, step] = ["blockIdx", "gridDim"].map(|v| match cluster {
            1 => format!("ix({v}.x)"),
            n => format!("ix({v}.x / {n})"),
        });
        let end = self.n_places(c.sizes).to_string();
        e.counted([&first, &end, &step], |e, place| {
            let (batch, place) = e.div_rem(Ix::V(place), rows * columns);
            let place = e.position(place);
            e.line(&format!(
                "const auto place = gm_raster<ix>({place}, {rows}, {columns});"
            ));
            let row = format!("(place.row * {cluster} + product::block_row()) * {ROWS}");
            let column = format!("place.column * {}", self.columns);
            let place = Place {
                part: Ix::C(0),
                batch,
                row: Ix::V(e.define(Kind::Index, &row)),
                column: Ix::V(e.define(Kind::Index, &column)),
            };
            f(e, place)
        })
    }
}

/// Writes the function of the fetching thread for a tile of a matrix product's operand.
fn fetch(
    c: &Contract,
    p: &Puller<Value>,
    e: &mut Emitter,
    (side, operand): (Side, &Operand),
    place: Place,
) {
    let (start, map) = match side {
        Side::Lhs => (place.row, "map0"),
        Side::Rhs => (place.column, "map1"),
    };
    groups::open_fetch(e, side.name());
    let node = c.node.of(p.body);
    let out = p.body.shape(node.outputs[0]);
    let index = e.delinearise(place.batch, &out[..out.len() - 2]);
    // Leading axes of an operand are the last of the result's.
    let skip = out.len() - p.body.shape(side.operand(node)).len();
    let along = format!("int({}) + first", e.position(start));
    let at = if operand.along_k {
        ["k0", &along]
    } else {
        [&along, "k0"]
    };
    let at = operand.mapped.coordinates(e, at, &index[skip..]);
    e.line(&format!("gm_load_tile(to, &{map}, barrier, shares{at});"));
    e.close_with("};");
}
