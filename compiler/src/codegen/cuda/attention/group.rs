//! Attention by warp groups on `sm_90a`, for half types and many queries and keys of a depth of up
//! to 128: see `group_attention.cuh`.
//!
//! Operands are copied by tile, so they lie in memory; operands that strides cannot express are
//! stored first. Blocks stay, and go through the tiles of queries. Rates on a real GPU have not
//! been measured: see `benches/NOTES.md` for the expected rates.

use super::super::Arch;
use super::super::candidates::Resources;
use super::super::emit::{Emitter, Value};
use super::super::groups::{self, LEAST_TILES};
use super::super::mapped::{COLUMNS, Mapped};
use super::variant::{Extents, ROWS};
use super::{Attention, BlockPosition, Registers};
use crate::codegen::body::Body;
use crate::codegen::phases::MatchContext;
use crate::codegen::pull::{Emit, Kind, Puller};
use crate::codegen::strided::Strided;
use crate::error::Result;
use crate::ir::{Node, Op, ValueId};

/// Queries, keys and values as the copy engine sees them.
pub(super) type Operands = [Mapped; 3];

/// The operands of an attention that suits warp groups, and the operands that must be stored first.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    node: &Node,
    x: &Extents,
    arch: Arch,
) -> Option<(Operands, Vec<ValueId>)> {
    let n_batch = body.n_elements(node.outputs[0]) / (x.n_queries * x.value_depth);
    if !arch.has_wgmma() || !suits(x, n_batch) {
        return None;
    }
    let mut needs = Vec::new();
    let mut operand = |i: usize| {
        let v = node.inputs[i];
        mapped(body, around.in_memory, v).or_else(|| {
            needs.push(v);
            mapped(body, &|x| x == v || (around.in_memory)(x), v)
        })
    };
    let operands = [operand(0)?, operand(1)?, operand(2)?];
    Some((operands, needs))
}

/// True if there are enough tiles for blocks of warp groups, and their depths fit.
fn suits(x: &Extents, n_batch: usize) -> bool {
    let is_deep = |d: usize| (COLUMNS / 2 + 1..=2 * COLUMNS).contains(&d);
    let n_tiles = n_batch * x.n_queries.div_ceil(ROWS);
    let is_large = n_tiles >= LEAST_TILES && x.n_queries.min(x.n_keys) >= ROWS;
    x.dtype.size_bytes() == 2 && is_large && is_deep(x.depth) && is_deep(x.value_depth)
}

/// The matrices of `v` in memory. A reshape of leading axes alone keeps the matrices and their
/// order.
fn mapped(body: &Body, in_memory: &dyn Fn(ValueId) -> bool, v: ValueId) -> Option<Mapped> {
    let view = Strided::resolve(body, v, in_memory);
    if in_memory(view.base) {
        return Mapped::new(body, &view, view.shape.len() - 1, ROWS);
    }
    let node = body
        .graph
        .def_node(v)
        .filter(|n| matches!(n.op, Op::Reshape { .. }))?;
    let matrix = |v: ValueId| body.shape(v).last_chunk::<2>().copied();
    let same = matrix(node.inputs[0]).is_some_and(|m| Some(m) == matrix(v));
    same.then(|| mapped(body, in_memory, node.inputs[0]))
        .flatten()
}

impl Attention {
    pub(super) fn group_resources(&self) -> Resources {
        groups::resources(self.n_tiles(), self.variant.group_bytes(&self.x), 1)
    }

    /// Writes the kernel's body.
    pub(super) fn by_groups(
        &self,
        stages: usize,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        out: Value,
    ) -> Result<()> {
        let depths = [self.x.depth, self.x.value_depth];
        let [depth, value_depth] = depths.map(|d| self.variant.padded_value_depth(d));
        let instruction = format!("gm_wgmma_{}", self.x.dtype);
        e.line(&format!(
            "typedef gm_group_attention<{instruction}, {depth}, {value_depth}, {stages}> attention;"
        ));
        e.line("extern __shared__ __align__(1024) u8 shared[];");
        e.line("auto tiles = attention::begin(shared);");
        let fetch = |_: &mut Puller<Value>, e: &mut Emitter| {
            self.each_tile(e, |e, here| {
                self.fetch(e, here);
                Ok(())
            })
        };
        let compute = |p: &mut Puller<Value>, e: &mut Emitter| self.compute(p, e, out);
        groups::split(p, e, "attention", fetch, compute)?;
        // One thread of the first warp fetched; the others have waited for it.
        e.line("__syncwarp();");
        e.line("__syncthreads();");
        Ok(())
    }

    /// Code of the computing groups, which take turns.
    fn compute(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        e.line("attention::first_turn();");
        self.each_tile(e, |e, here| {
            self.weigh(p, e, here)?;
            self.store(p, e, here, out)
        })?;
        e.line("attention::last_turn();");
        Ok(())
    }

    /// Asks for the operands' tiles.
    fn fetch(&self, e: &mut Emitter, here: &BlockPosition) {
        let first = e.val(here.first);
        let first = format!("int({}) + first", e.text(first));
        let loads = [("queries", &*first), ("keys", "first"), ("values", "first")];
        for (i, (operand, (name, row))) in self.operands.iter().flatten().zip(loads).enumerate() {
            let lead = e.delinearise(here.batch, &operand.lead);
            let at = operand.coordinates(e, ["column", row], &lead);
            e.open(&format!(
                "const auto {name} = [&](u32 to, u32 barrier, int column, int first)"
            ));
            e.line(&format!("gm_load_tile(to, &map{i}, barrier, false{at});"));
            e.close_with("};");
        }
        let [start, end] = self.keys(e, here);
        e.line(&format!(
            "attention::fetch<ix>(tiles, {start}, {end}, queries, keys, values);"
        ));
    }

    /// Computes the thread's results.
    fn weigh(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &BlockPosition) -> Result<()> {
        let [n, m] = self.registers(Registers::Scores);
        let [start, end] = self.keys(e, here);
        e.open(&format!(
            "const auto score = [&](f32 (&scores)[{n}][{m}], ix k0)"
        ));
        let k0 = e.named(Kind::Index, "k0");
        self.scores(p, e, here, k0)?;
        e.close_with("};");
        e.line("attention own;");
        let power = self.power();
        e.line(&format!(
            "own.run<ix>(tiles, {start}, {end}, score, {power});"
        ));
        e.line("const auto& result = own.result;");
        Ok(())
    }
}
