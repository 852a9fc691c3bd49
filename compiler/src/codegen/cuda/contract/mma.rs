//! Products by tensor cores through `mma.sync`, for GPUs from `sm_75` on: see `mma.cuh`.
//!
//! Operands that lie in memory in runs of 16 bytes are copied asynchronously into a ring of tiles; others are pulled element by element and
//! wait in registers. Sums are `f32` (`i32` for bytes); products of half types are exact, so results differ from those of the SIMT form only by
//! the order of summation and by how the hardware rounds sums. Rates on a real GPU have not been measured.

use super::super::Options;
use super::super::arch::Arch;
use super::super::cluster::Resources;
use super::super::emit::{Emitter, Value};
use super::super::fusion::flops;
use super::super::text::element_type;
use super::epilogue::{self, Vectors};
use super::operand::{At, Chunks, Side, k_is_inner, narrowed};
use super::{CHEAP_FLOPS, Contract, ENOUGH_BLOCKS, Sizes, both, within};
use crate::codegen::body::Body;
use crate::codegen::phases::Around;
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Node, ValueId};
use gristmill_runtime::DType;

/// Multiplications from which an operand that would be pulled in every tile is rather stored first, so that tiles are copied.
const MANY_PRODUCTS: usize = 1 << 29;

/// An instruction, by the dtypes of its operands in memory and of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    name: &'static str,
    element: DType,
    acc: DType,
}

/// The instruction for the product of two values, if the architecture has one, and the values that must be in memory for it.
fn instruction(body: &Body, around: &Around, options: &Options, node: &Node) -> Option<(Instruction, Vec<ValueId>)> {
    let own = body.dtype(node.inputs[0]);
    let narrow: Vec<(DType, ValueId)> =
        node.inputs.iter().map(|&v| narrowed(body, around.in_memory, v).unwrap_or((own, v))).collect();
    let element = narrow[0].0;
    if narrow[1].0 != element {
        return None;
    }
    let capability = options.arch.capability();
    let name = match (element, own) {
        (DType::F16, _) if capability >= 75 => "f16",
        (DType::BF16, _) if capability >= 80 => "bf16",
        (DType::F32, DType::F32) if options.tf32 && capability >= 80 => "tf32",
        (DType::I8, DType::I8 | DType::I32) if capability >= 80 => "i8",
        _ => return None,
    };
    let acc = if element.is_float() { DType::F32 } else { DType::I32 };
    Some((Instruction { name, element, acc }, narrow.into_iter().map(|n| n.1).collect()))
}

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
    Tile { m, n, k_bytes, warp_m, warp_n }
}

/// Largest first. The sums of 64 x 64 per warp leave no registers to wait in, so those tiles are for copied operands.
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

/// How an operand gets into its tile.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Loading {
    Copied(Chunks),
    Pulled { along_k: bool },
}

impl Loading {
    fn along_k(&self) -> bool {
        match self {
            Loading::Copied(chunks) => chunks.along_k,
            Loading::Pulled { along_k } => *along_k,
        }
    }

    fn verb(&self) -> &'static str {
        match self {
            Loading::Copied(_) => "copied",
            Loading::Pulled { .. } => "pulled",
        }
    }
}

/// A product by tensor cores.
#[derive(Clone, Debug)]
pub(super) struct Mma {
    instruction: Instruction,
    tile: Tile,
    stages: usize,
    lhs: Loading,
    rhs: Loading,
}

/// The form of a product, if there are tensor cores for it, and what must be in memory before.
pub(super) fn find(
    body: &Body,
    around: &Around,
    options: &Options,
    node: &Node,
    sizes: Sizes,
) -> Option<(Mma, Vec<ValueId>)> {
    let (instruction, operands) = instruction(body, around, options, node)?;
    let element = instruction.element;
    let many = sizes.n_batch * sizes.m * sizes.n * sizes.k >= MANY_PRODUCTS;
    let mut needs = Vec::new();
    for (side, &v) in Side::BOTH.into_iter().zip(&operands) {
        let dear = flops(body, around, v).is_none_or(|f| f > CHEAP_FLOPS);
        let lies = |v: ValueId| (around.in_memory)(v);
        let would_lie = |x: ValueId| lies(x) || x == v;
        let copied = |lies: &dyn Fn(ValueId) -> bool| {
            Chunks::find(body, lies, node, side, element).is_some_and(|c| suits(&c, element))
        };
        if dear || many && !copied(&lies) && copied(&would_lie) {
            needs.push(v);
        }
    }
    let lies = |v: ValueId| (around.in_memory)(v) || needs.contains(&v);
    let [lhs, rhs] = Side::BOTH.map(|side| match Chunks::find(body, &lies, node, side, element) {
        Some(chunks) if suits(&chunks, element) => Loading::Copied(chunks),
        _ => Loading::Pulled { along_k: element.size_bytes() != 2 || k_is_inner(body, &lies, node, side) },
    });
    let copied = matches!((&lhs, &rhs), (Loading::Copied(_), Loading::Copied(_)));
    let has_copies = options.arch.capability() >= 80;
    let mut tiles = TILES.iter().filter(|t| t.waits_in_registers() || copied && has_copies);
    let tile = *tiles.find(|t| sizes.n_tiles(t.m, t.n) >= ENOUGH_BLOCKS).unwrap_or(&TILES[4]);
    Some((Mma { instruction, tile, stages: stages(options.arch), lhs, rhs }, needs))
}

/// Only 16-bit elements can be transposed on their way out of a tile.
fn suits(chunks: &Chunks, element: DType) -> bool {
    chunks.along_k || element.size_bytes() == 2
}

impl Mma {
    fn k(&self) -> usize {
        self.tile.k_bytes / self.instruction.element.size_bytes()
    }

    pub(super) fn resources(&self, sizes: Sizes) -> Resources {
        let blocks = sizes.n_tiles(self.tile.m, self.tile.n) as u64;
        let shared_bytes = (self.stages * self.tile.stage_bytes()) as u32;
        Resources { blocks, threads: self.tile.threads() as u64, shared_bytes }
    }

    /// The prelude's type of the product.
    fn product(&self) -> String {
        let Tile { m, n, warp_m, warp_n, .. } = self.tile;
        let (name, k, stages) = (self.instruction.name, self.k(), self.stages);
        let (lhs, rhs) = (self.lhs.along_k(), self.rhs.along_k());
        format!("gm_block_product<gm_mma_{name}, {m}, {n}, {k}, {warp_m}, {warp_n}, {stages}, {lhs}, {rhs}>")
    }

    pub(super) fn emit(&self, c: &Contract, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let Sizes { m, n, k, .. } = c.sizes;
        e.line(&format!("typedef {} product;", self.product()));
        e.line("extern __shared__ __align__(128) u8 shared[];");
        let n_tiles = c.sizes.n_tiles(self.tile.m, self.tile.n).to_string();
        e.counted(["ix(blockIdx.x)", &n_tiles, "ix(gridDim.x)"], |e, tile| {
            let (rows, columns) = (m.div_ceil(self.tile.m), n.div_ceil(self.tile.n));
            let (batch, within_batch) = e.div_rem(Ix::V(tile), rows * columns);
            let within_batch = e.val(within_batch);
            let place = format!("const auto place = gm_raster<ix>({}, {rows}, {columns});", e.text(within_batch));
            e.line(&place);
            let m0 = e.define(Kind::Index, &format!("place.row * {}", self.tile.m));
            let n0 = e.define(Kind::Index, &format!("place.column * {}", self.tile.n));
            self.load(c, p, e, Side::Lhs, [batch, Ix::V(m0)])?;
            self.load(c, p, e, Side::Rhs, [batch, Ix::V(n0)])?;
            e.line("product sums;");
            let loaders =
                format!("product::{}_lhs<ix>(lhs), product::{}_rhs<ix>(rhs)", self.lhs.verb(), self.rhs.verb());
            e.line(&format!("sums.run(gm_shared(shared), ix(0), {}, {loaders});", k.div_ceil(self.k())));
            self.epilogue(c, p, e, [batch, Ix::V(m0), Ix::V(n0)], out)?;
            e.line("__syncthreads();");
            Ok(())
        })
    }

    /// Writes the function that says where an operand's tile comes from.
    fn load(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        side: Side,
        [batch, first]: [Ix<Value>; 2],
    ) -> Result<()> {
        let (loading, extent, tile) = match side {
            Side::Lhs => (&self.lhs, c.sizes.m, self.tile.m),
            Side::Rhs => (&self.rhs, c.sizes.n, self.tile.n),
        };
        let element = self.instruction.element;
        let gives = match loading {
            Loading::Copied(_) => "gm_source",
            Loading::Pulled { .. } => element_type(element),
        };
        e.open(&format!("const auto {} = [&](int row, int column, ix k0) -> {gives}", side.name()));
        p.scoped(|p| {
            let [row, column, k0] = ["row", "column", "k0"].map(|name| Ix::V(e.named(Kind::Index, name)));
            let (along, deep) = if loading.along_k() { (row, column) } else { (column, row) };
            let at = At { batch, along: e.add(first, along), k: e.add(k0, deep) };
            let inside = within(e, [(at.along, extent, tile), (at.k, c.sizes.k, self.k())])?;
            match loading {
                Loading::Copied(chunks) => {
                    let node = p.body.graph.node(c.node).clone();
                    let (address, there) = chunks.source(p, e, &node, side, at)?;
                    let inside = both(e, inside, there)?;
                    let inside = inside.map_or("true".to_owned(), |i| e.text(i).to_owned());
                    e.line(&format!("return {{{address}, {inside}}};"));
                }
                Loading::Pulled { .. } => {
                    if let Some(inside) = inside {
                        let zero = e.constant(element, 0);
                        let line = format!("if (!{}) return {};", e.text(inside), e.text(zero));
                        e.line(&line);
                    }
                    let value = c.element(p, e, side, at, element)?;
                    let line = format!("return {};", e.text(value));
                    e.line(&line);
                }
            }
            Ok::<(), crate::error::Error>(())
        })?;
        e.close_with("};");
        Ok(())
    }

    /// What follows the product, from sums that go through shared memory so that threads get them side by side.
    fn epilogue(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        [batch, m0, n0]: [Ix<Value>; 3],
        out: Value,
    ) -> Result<()> {
        let Tile { m, n, warp_n, .. } = self.tile;
        let acc = self.instruction.acc;
        let vectors = Vectors::find(p.body, c, &|v| p.stored.contains_key(&v));
        let width = vectors.as_ref().map_or(1, |v| v.width);
        let (slab_row, slab_column) = match epilogue::columns_are_inner(p.body, c) {
            true => (format!("v / {}", warp_n / width), format!("v % {} * {width}", warp_n / width)),
            false => ("v % 16".to_owned(), "v / 16".to_owned()),
        };
        e.line("const auto slab = product::slab(shared);");
        e.line("#pragma unroll");
        e.open("for (int i = 0; i < product::slabs; ++i)");
        e.line("sums.put(slab, i);");
        e.open(&format!("for (int v = threadIdx.x % 32; v < {}; v += 32)", 16 * warp_n / width));
        e.line(&format!("const int slab_row = {slab_row}, slab_column = {slab_column};"));
        let row = e.named(Kind::Index, "ix(product::warp_row() + i * 16 + slab_row)");
        let column = e.named(Kind::Index, "ix(product::warp_column() + slab_column)");
        let (row, column) = (e.add(m0, Ix::V(row)), e.add(n0, Ix::V(column)));
        let inside = within(e, [(row, c.sizes.m, m), (column, c.sizes.n, n)])?;
        if let Some(inside) = inside {
            let condition = format!("if ({})", e.text(inside));
            e.open(&condition);
        }
        let sum = "slab[slab_row * product::slab_pitch + slab_column]";
        match vectors {
            Some(vectors) => {
                e.line(&format!("const auto sum = gm_read<{width}>(&{sum});"));
                vectors.emit(c, p, e, [batch, row, column], ("sum.v", acc), out)?;
            }
            None => epilogue::element(c, p, e, [batch, row, column], (sum, acc), out)?,
        }
        (0..2 + usize::from(inside.is_some())).for_each(|_| e.close());
        Ok(())
    }
}
