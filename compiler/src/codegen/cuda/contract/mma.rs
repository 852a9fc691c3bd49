//! Products by tensor cores through `mma.sync`, for GPUs from `sm_75` on: see `mma.cuh`.
//!
//! Operands that lie in memory in runs of 16 bytes are copied asynchronously into a ring of tiles;
//! others are pulled element by element and wait in registers. Sums are `f32` (`i32` for bytes of
//! either sign, which wraps as products in their own dtype do); products of half types are exact,
//! so results differ from those of the SIMT variant only by the order of summation and by how the
//! hardware rounds sums. Rates on a real GPU have not been measured.

use super::super::Options;
use super::super::candidates::{Resources, Work, in_parts};
use super::super::emit::{Emitter, Value};
use super::super::text::element_type;
use super::epilogue::{self, Slabs};
use super::operand::Side;
use super::tensor::{Loading, Operands};
use super::{Contract, Place, Sizes, both, share};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Node, Op};
use crate::target::Arch;
use gristmill_runtime::DType;

/// Shape of a block's tile and of a warp's part of it; the depth is in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    m: usize,
    n: usize,
    k_bytes: usize,
    warp_m: usize,
    warp_n: usize,
}

const fn tile(m: usize, n: usize, k_bytes: usize, warp_m: usize, warp_n: usize) -> Tile {
    Tile {
        m,
        n,
        k_bytes,
        warp_m,
        warp_n,
    }
}

/// Largest first. Sums of 64 x 64 per warp leave no registers for operands in flight, so these
/// tiles take copied operands only.
const TILES: [Tile; 5] = [
    tile(128, 256, 64, 64, 64),
    tile(128, 128, 64, 64, 64),
    tile(128, 128, 64, 64, 32),
    tile(64, 64, 128, 32, 32),
    tile(32, 32, 128, 16, 16),
];

impl Tile {
    fn threads(&self) -> usize {
        (self.m / self.warp_m) * (self.n / self.warp_n) * 32
    }

    fn waits_in_registers(&self) -> bool {
        self.warp_m * self.warp_n <= 64 * 32
    }

    /// Bytes of both operands' tiles.
    fn stage_bytes(&self) -> usize {
        (self.m + self.n) * self.k_bytes
    }
}

/// Stages of a ring: as many as let two blocks of the usual tile share a multiprocessor. Without asynchronous copies one stage is filled while
/// the other is multiplied.
fn stages(arch: Arch) -> usize {
    match arch.capability() {
        ..80 => 2,
        86 | 88 | 89 | 120.. => 3,
        _ => 4,
    }
}

/// A product by tensor cores.
#[derive(Clone, Debug)]
pub(super) struct Mma {
    operands: Operands,
    tile: Tile,
    stages: usize,
    /// Blocks that share a sum.
    pub(super) n_parts: usize,
}

/// Multiplications of one byte by another in the time of a byte; of wider operands, as many times less.
const PRODUCTS_PER_BYTE: f64 = 100.0;

/// Opens the function of an operand's elements; gives its parameters: row and column in the tile,
/// and first index along the summed axis.
fn open_loader(e: &mut Emitter, side: Side, loading: &Loading, element: DType) -> [Ix<Value>; 3] {
    let name = side.name();
    let gives = match loading {
        Loading::Copied(_) => "gm_source",
        Loading::Pulled { .. } => element_type(element),
    };
    e.open(&format!(
        "const auto {name} = [&](int row, int column, ix k0) -> {gives}"
    ));
    ["row", "column", "k0"].map(|name| Ix::V(e.named(Kind::Index, name)))
}

/// Returns an address, and whether the element exists there.
fn give_source(
    e: &mut Emitter,
    (address, exists): (String, Option<Value>),
    inside: Option<Value>,
) -> Result<()> {
    let inside = both(e, inside, exists)?;
    let inside = inside.map_or("true".to_owned(), |i| e.text(i).to_owned());
    e.line(&format!("return {{{address}, {inside}}};"));
    Ok(())
}

/// True for convolutions over three axes, whose places in the operand take registers, too.
fn is_spatial(node: &Node) -> bool {
    matches!(&node.op, Op::Conv { window, .. } if window.strides.len() > 2)
}

impl Mma {
    /// One variant per tile that fits the operands, best suited to the sizes first.
    pub(super) fn all(
        options: &Options,
        node: &Node,
        operands: Operands,
        sizes: Sizes,
    ) -> Vec<Mma> {
        let size_bytes = operands.instruction.size_bytes();
        let is_copied = operands.copied().is_some() && options.arch.capability() >= 80;
        let mut fitting = TILES.to_vec();
        fitting.retain(|t| t.waits_in_registers() || is_copied && !is_spatial(node));
        let divisions = sizes.divisions(&fitting, |t| [t.m, t.n, t.k_bytes / size_bytes]);
        let stages = stages(options.arch);
        let of = |(tile, n_parts)| Mma {
            operands: operands.clone(),
            tile,
            stages,
            n_parts,
        };
        divisions.into_iter().map(of).collect()
    }

    fn k(&self) -> usize {
        self.tile.k_bytes / self.operands.instruction.size_bytes()
    }

    pub(super) fn acc(&self) -> DType {
        self.operands.instruction.acc
    }

    pub(super) fn words(&self) -> String {
        let Tile {
            m,
            n,
            warp_m,
            warp_n,
            ..
        } = self.tile;
        let (parts, stages) = (in_parts(self.n_parts), self.stages);
        format!(
            "tiles of {m} x {n} by mma.sync, {warp_m} x {warp_n} per warp, {stages} stages{parts}"
        )
    }

    pub(super) fn work(&self, sizes: Sizes) -> Work {
        let size_bytes = self.operands.instruction.size_bytes();
        sizes.work(
            [self.tile.m, self.tile.n],
            self.n_parts,
            size_bytes,
            PRODUCTS_PER_BYTE / size_bytes as f64,
        )
    }

    pub(super) fn resources(&self, sizes: Sizes) -> Resources {
        let blocks = (sizes.n_tiles(self.tile.m, self.tile.n) * self.n_parts) as u64;
        let shared_bytes = (self.stages * self.tile.stage_bytes()) as u32;
        Resources {
            blocks,
            threads: self.tile.threads() as u64,
            shared_bytes,
            per_multiprocessor: 1,
            ..Resources::default()
        }
    }

    /// The prelude's type of the product.
    fn product(&self) -> String {
        let Tile {
            m,
            n,
            warp_m,
            warp_n,
            ..
        } = self.tile;
        let (name, k, stages) = (self.operands.instruction.name, self.k(), self.stages);
        let (lhs, rhs) = (self.operands.lhs.along_k(), self.operands.rhs.along_k());
        format!(
            "gm_block_product<gm_mma_{name}, {m}, {n}, {k}, {warp_m}, {warp_n}, {stages}, {lhs}, {rhs}>"
        )
    }

    pub(super) fn emit(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        out: Value,
    ) -> Result<()> {
        let Sizes { n_batch, m, n, .. } = c.sizes;
        e.line(&format!("typedef {} product;", self.product()));
        e.line("extern __shared__ __align__(128) u8 shared[];");
        let (rows, columns) = (m.div_ceil(self.tile.m), n.div_ceil(self.tile.n));
        let shape = [c.n_parts(), n_batch, rows * columns];
        e.by_block(shape.iter().product(), |e, tile| {
            let at = e.delinearise(Ix::V(tile), &shape);
            let within_batch = e.position(at[2]);
            e.line(&format!(
                "const auto place = gm_raster<ix>({within_batch}, {rows}, {columns});"
            ));
            let row = e.define(Kind::Index, &format!("place.row * {}", self.tile.m));
            let column = e.define(Kind::Index, &format!("place.column * {}", self.tile.n));
            let place = Place {
                part: at[0],
                batch: at[1],
                row: Ix::V(row),
                column: Ix::V(column),
            };
            self.sum(c, p, e, place)?;
            let slabs = Slabs {
                columns: self.tile.warp_n,
                tile: [self.tile.m, self.tile.n],
            };
            epilogue::staged(c, p, e, place, slabs, out)?;
            e.line("__syncthreads();");
            Ok(())
        })
    }

    /// Computes the sums of a tile.
    fn sum(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        place: Place,
    ) -> Result<()> {
        let [first, steps] = share(e, place.part, c.n_parts(), (c.sizes.k, self.k()));
        self.load(c, p, e, Side::Lhs, place)?;
        self.load(c, p, e, Side::Rhs, place)?;
        let [lhs, rhs] = [self.operands.lhs.verb(), self.operands.rhs.verb()];
        let loaders = format!("product::{lhs}_lhs<ix>(lhs), product::{rhs}_rhs<ix>(rhs)");
        e.line("product sums;");
        e.line(&format!(
            "sums.run(gm_shared(shared), {first}, {steps}, {loaders});"
        ));
        Ok(())
    }

    /// Writes the function that gives the source of an element of an operand's tile.
    fn load(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        side: Side,
        place: Place,
    ) -> Result<()> {
        let loading = match side {
            Side::Lhs => &self.operands.lhs,
            Side::Rhs => &self.operands.rhs,
        };
        let element = self.operands.instruction.element(side);
        let [row, column, k0] = open_loader(e, side, loading, element);
        let position = match loading.along_k() {
            true => [row, column, k0],
            false => [column, row, k0],
        };
        let tile = [self.tile.m, self.tile.n, self.k()];
        let (at, inside) = c.in_tile(e, (side, place), tile, position)?;
        match loading {
            Loading::Copied(chunks) => {
                let operand = (c.node.of(p.body), side);
                let source = p.scoped(|p| chunks.source(p, e, operand, at))?;
                give_source(e, source, inside)?;
            }
            Loading::Pulled { .. } => c.give_element(p, e, (side, element), at, inside)?,
        }
        e.close_with("};");
        Ok(())
    }
}
