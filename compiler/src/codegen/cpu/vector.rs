//! Element-wise kernels of `f32`, `i32`, 8-bit integers and truth values in four lanes ([`lanes`](super::lanes)).
//!
//! The innermost of the collapsed loops runs over vectors with a scalar remainder that computes bit for bit the same, so that results
//! do not depend on how items are split. Transcendental functions are calls on tiles of [`TILE`] floats in the workspace, which cut
//! the program into stages.

use super::access::{Expression, expression_in};
use super::body::Body;
use super::emit::{Emitter, Run};
use super::lanes::{GROUPS, Lanes, has_lanes, is_byte, is_lane, memory};
use super::loops::Loops;
use super::pull::{Emit, Ix};
use super::strided::{Axis, collapse, reshaped_strides};
use crate::error::{Error, Result};
use crate::ir::vecprog::{Inst, Reg, VecOp, VecProg};
use crate::ir::{ScalarOp, ValueId};
use cranelift_codegen::ir::{InstBuilder, Type, Value, types};
use gristmill_runtime::DType;
use std::fmt;

/// Floats of a tile: 1 KiB, which amortises the call and avoids stalls between narrow stores and wide loads.
const TILE: usize = 256;

/// Most instructions of a program whose loop computes several groups of lanes at a time: the overhead of a loop counts beside few.
const MOST_UNROLLED: usize = 16;
/// Elements of a row from which the single ones at its end do not count.
const LONG: usize = 512;

/// Layout of a result in its buffer: from element `offset` on, with a stride per axis.
pub(super) struct Destination {
    pub(super) offset: i64,
    pub(super) strides: Vec<i64>,
}

impl Destination {
    /// The place of a result of shape `from` for the same elements of shape `to`, when strides can express it.
    pub(super) fn reshaped(&self, from: &[usize], to: &[usize]) -> Option<Destination> {
        Some(Destination {
            offset: self.offset,
            strides: reshaped_strides(from, &self.strides, to)?,
        })
    }
}

/// A planned kernel.
pub(super) struct VectorMap {
    pub(super) expression: Expression,
    /// Loops, outermost first, without the innermost; strides are those of the leaves, then of the outputs.
    outer: Vec<Axis>,
    inner: Axis,
    out_offset: i64,
    stages: Vec<usize>,
    /// True for leaves, then outputs, whose elements have one byte; the others have 4.
    bytes: Vec<bool>,
    /// Tile of the workspace that holds a register between stages.
    tiles: Vec<Option<usize>>,
    pub(super) n_tiles: usize,
}

/// The plan as text: loops with the strides of leaves and outputs, then the program by stages.
impl fmt::Display for VectorMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for axis in &self.outer {
            writeln!(f, "loop {} strides {:?}", axis.extent, axis.strides)?;
        }
        let inner = &self.inner;
        writeln!(f, "vectors {} strides {:?}", inner.extent, inner.strides)?;
        for (i, leaf) in self.expression.leaves.iter().enumerate() {
            writeln!(f, "leaf {i} from element {}", leaf.offset)?;
        }
        writeln!(f, "output from element {}", self.out_offset)?;
        writeln!(f, "stages {:?} tiles {:?}", self.stages, self.tiles)?;
        write!(f, "{}", self.expression.program)
    }
}

/// Leaf kernels that compute a whole tile.
pub(super) fn tile_function(op: ScalarOp) -> Option<&'static str> {
    use ScalarOp::*;
    Some(match op {
        Exp => "gm_vexp_f32",
        Expm1 => "gm_vexpm1_f32",
        Log => "gm_vlog_f32",
        Log1p => "gm_vlog1p_f32",
        Tanh => "gm_vtanh_f32",
        Erf => "gm_verf_f32",
        Sigmoid => "gm_vsigmoid_f32",
        Silu => "gm_vsilu_f32",
        Gelu => "gm_vgelu_f32",
        GeluTanh => "gm_vgelu_tanh_f32",
        Softplus => "gm_vsoftplus_f32",
        Mish => "gm_vmish_f32",
        Sin => "gm_vsin_f32",
        Cos => "gm_vcos_f32",
        Tan => "gm_vtan_f32",
        Asin => "gm_vasin_f32",
        Acos => "gm_vacos_f32",
        Atan => "gm_vatan_f32",
        Sinh => "gm_vsinh_f32",
        Cosh => "gm_vcosh_f32",
        Asinh => "gm_vasinh_f32",
        Acosh => "gm_vacosh_f32",
        Atanh => "gm_vatanh_f32",
        Pow => "gm_vpow_f32",
        _ => return None,
    })
}

pub(super) fn call_of(inst: &Inst) -> Option<&'static str> {
    match inst.op {
        VecOp::Op(op) => tile_function(op),
        _ => None,
    }
}

/// True if vector code computes the op alone on operands of these dtypes.
pub(super) fn takes(op: ScalarOp, dtypes: &[DType]) -> bool {
    if is_tile_call(op, dtypes[0]) {
        return true;
    }
    let p = VecProg::of_op(op, dtypes);
    is_lane(p.dtype(p.outputs[0])) && is_supported(&p)
}

/// True for an op on floats that a precompiled function computes on tiles.
fn is_tile_call(op: ScalarOp, dtype: DType) -> bool {
    dtype == DType::F32 && tile_function(op).is_some()
}

fn is_supported(p: &VecProg) -> bool {
    p.insts.iter().all(|inst| {
        let operand = inst.args.last().map_or(inst.dtype, |&a| p.dtype(a));
        has_lanes(inst, operand)
    })
}

/// Plans the kernel of `roots`, laid out as `out` in their buffers, in a loop for each axis, or in finer ones where reshapes
/// need these; `None` when the generic code must do it.
pub(super) fn plan(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
    out: &Destination,
) -> Option<VectorMap> {
    let by_axes = Loops::over(body.shape(roots[0]));
    plan_in(body, roots, in_memory, out, &by_axes).or_else(|| {
        let finer = Loops::refined(body, roots[0], in_memory)?;
        plan_in(body, roots, in_memory, out, &finer)
    })
}

/// Plans the kernel in given loops.
pub(super) fn plan_in(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
    out: &Destination,
    loops: &Loops,
) -> Option<VectorMap> {
    if roots.iter().any(|&v| !is_lane(body.dtype(v))) {
        return None;
    }
    let expression = expression_in(body, roots, in_memory, &is_tile_call, loops)?;
    if !is_supported(&expression.program) {
        return None;
    }
    let strides = expression.all_strides(&loops.strides(&out.strides));
    let (outer, inner) = collapsed(&loops.extents, &strides);
    if inner.strides.iter().any(|&s| s != 0 && s != 1) {
        return None;
    }
    let leaves = expression.leaves.iter().map(|l| l.value);
    let tensors = leaves.chain(roots.iter().copied());
    let mut map = VectorMap {
        stages: stages(&expression.program.insts),
        bytes: tensors.map(|v| is_byte(body.dtype(v))).collect(),
        expression,
        outer,
        inner,
        out_offset: out.offset,
        tiles: Vec::new(),
        n_tiles: 0,
    };
    map.place_tiles();
    Some(map)
}

/// The loops with as many joined as the tensors' strides allow: all but the innermost, and that one.
fn collapsed(extents: &[usize], strides: &[Vec<i64>]) -> (Vec<Axis>, Axis) {
    let tensors: Vec<&[i64]> = strides.iter().map(Vec::as_slice).collect();
    let mut outer = collapse(extents, &tensors);
    let inner = outer.pop().unwrap_or_else(|| Axis {
        extent: 1,
        strides: vec![1; strides.len()],
    });
    (outer, inner)
}

/// The stage in which each instruction runs; a call runs at the end of its stage. Inputs and constants run in every stage.
fn stages(insts: &[Inst]) -> Vec<usize> {
    let mut stages: Vec<usize> = Vec::with_capacity(insts.len());
    for inst in insts {
        let after = |r: &Reg| {
            let i = r.0 as usize;
            stages[i] + usize::from(call_of(&insts[i]).is_some())
        };
        stages.push(inst.args.iter().map(after).max().unwrap_or(0));
    }
    stages
}

impl VectorMap {
    /// Elements of each result.
    pub(super) fn n_items(&self) -> usize {
        self.outer.iter().map(|a| a.extent).product::<usize>() * self.inner.extent
    }

    /// Leaves, each with an output that may be the same bytes: every element of the leaf is read once, before the same
    /// element of the output is written. Pairs that exclude each other may both be there.
    pub(super) fn in_place(&self) -> Vec<(usize, usize)> {
        let leaves = &self.expression.leaves;
        let n_outputs = self.expression.program.outputs.len();
        // A later stage may read a leaf again.
        if self.n_tiles > 0 && n_outputs > 1 {
            return Vec::new();
        }
        let is_read_once = |value| leaves.iter().filter(|l| l.value == value).count() == 1;
        let axes = || self.outer.iter().chain([&self.inner]);
        let runs_alike = |leaf: usize, out: usize| {
            axes().all(|axis| axis.extent == 1 || axis.strides[leaf] == axis.strides[out])
        };
        let pairs = (0..leaves.len()).flat_map(|leaf| (0..n_outputs).map(move |out| (leaf, out)));
        let fits = |&(leaf, out): &(usize, usize)| {
            let tensor = leaves.len() + out;
            leaves[leaf].offset == self.out_offset
                && self.bytes[leaf] == self.bytes[tensor]
                && is_read_once(leaves[leaf].value)
                && runs_alike(leaf, tensor)
        };
        pairs.filter(fits).collect()
    }

    /// Bytes of workspace per thread.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.n_tiles * TILE * 4
    }

    /// Rough picoseconds per element.
    pub(super) fn cost_ps(&self) -> u64 {
        let cost = |inst| if call_of(inst).is_some() { 400 } else { 60 };
        100 + self.insts().iter().map(cost).sum::<u64>()
    }

    pub(super) fn insts(&self) -> &[Inst] {
        &self.expression.program.insts
    }

    fn is_free(&self, r: usize) -> bool {
        matches!(self.insts()[r].op, VecOp::Input(_) | VecOp::Const(_))
    }

    /// True if input `n` is one element for the whole of the innermost loop.
    pub(super) fn is_broadcast(&self, n: usize) -> bool {
        self.inner.strides[n] == 0
    }

    /// Groups of four lanes that an iteration computes.
    pub(super) fn n_groups(&self) -> usize {
        let mut tensors = self.bytes.iter().zip(&self.inner.strides);
        let has_streamed_bytes = tensors.any(|(&is_byte, &stride)| is_byte && stride == 1);
        let is_whole = self.inner.extent.is_multiple_of(4 * GROUPS);
        let is_long = self.inner.extent >= LONG || is_whole && self.inner.extent >= 16 * GROUPS;
        let unrolls = is_long && self.insts().len() <= MOST_UNROLLED;
        if has_streamed_bytes || unrolls {
            GROUPS
        } else {
            1
        }
    }

    /// True if a stage before `stage` computed register `r`.
    pub(super) fn is_earlier(&self, r: usize, stage: usize) -> bool {
        !self.is_free(r) && self.stages[r] < stage
    }

    /// Bytes of an element of a leaf or output.
    fn size_bytes(&self, tensor: usize) -> i64 {
        if self.bytes[tensor] { 1 } else { 4 }
    }

    /// Registers that outlive their stage, and operands and results of calls, get tiles; contiguous inputs are read where they are.
    fn place_tiles(&mut self) {
        let n = self.insts().len();
        let mut needed = vec![false; n];
        for i in 0..n {
            let is_call = call_of(&self.insts()[i]).is_some();
            needed[i] |= is_call;
            for a in self.insts()[i].args.clone() {
                let a = a.0 as usize;
                let in_place = self.contiguous_input(a).is_some();
                needed[a] |= (is_call && !in_place) || self.is_earlier(a, self.stages[i]);
            }
        }
        self.tiles = vec![None; n];
        for (tile, _) in self
            .tiles
            .iter_mut()
            .zip(needed)
            .filter(|(_, needed)| *needed)
        {
            *tile = Some(self.n_tiles);
            self.n_tiles += 1;
        }
    }

    /// The leaf that a register reads, when neighbours in the loop are neighbours in memory.
    fn contiguous_input(&self, r: usize) -> Option<usize> {
        match self.insts()[r].op {
            VecOp::Input(n) if self.inner.strides[n as usize] == 1 => Some(n as usize),
            _ => None,
        }
    }

    /// Emits the whole kernel. `leaves` and `outputs` are base addresses.
    pub(super) fn emit(
        &self,
        e: &mut Emitter,
        leaves: &[Value],
        outputs: &[Value],
        workspace: usize,
    ) -> Result<()> {
        let bases = self.bases(e, leaves, outputs);
        let tiles = (self.n_tiles > 0).then(|| e.arg(workspace));
        let extents: Vec<usize> = self.outer.iter().map(|a| a.extent).collect();
        e.rows(self.inner.extent, |e, run| {
            let at = e.delinearise(Ix::V(run.row), &extents);
            let mut pointers = Vec::with_capacity(bases.len());
            for (t, &base) in bases.iter().enumerate() {
                pointers.push(self.row_pointer(e, base, t, &at, run.col));
            }
            let row = Row {
                map: self,
                pointers: &pointers,
                tiles,
            };
            row.emit(e, run)
        })
    }

    /// Address of the first element of each leaf, then of each output.
    fn bases(&self, e: &mut Emitter, leaves: &[Value], outputs: &[Value]) -> Vec<Value> {
        let leaf_offsets = self.expression.leaves.iter().map(|leaf| leaf.offset);
        let offsets = leaf_offsets.chain(outputs.iter().map(|_| self.out_offset));
        let mut bases = Vec::with_capacity(leaves.len() + outputs.len());
        for (&base, offset) in leaves.iter().chain(outputs).zip(offsets) {
            bases.push(match offset * self.size_bytes(bases.len()) {
                0 => base,
                bytes => e.ins().iadd_imm_s(base, bytes),
            });
        }
        bases
    }

    /// True if the loops of `stage` write register `r` to its tile. Free registers are written when a call of the stage reads them.
    fn is_tiled_in(&self, r: usize, stage: usize) -> bool {
        if self.tiles[r].is_none() || !self.is_free(r) {
            return self.tiles[r].is_some() && self.stages[r] == stage;
        }
        let mut insts = self.insts().iter().zip(&self.stages);
        insts.any(|(inst, &at)| {
            let reads = || inst.args.iter().any(|a| a.0 as usize == r);
            at == stage && call_of(inst).is_some() && reads()
        })
    }

    /// True if the loops of `stage` write register `r` to a result.
    fn is_result_of(&self, r: usize, stage: usize) -> bool {
        let own = if self.is_free(r) { 0 } else { self.stages[r] };
        own == stage && self.outputs_of(r).next().is_some()
    }

    /// Numbers of the outputs that register `r` is.
    pub(super) fn outputs_of(&self, r: usize) -> impl Iterator<Item = usize> {
        let outputs = self.expression.program.outputs.iter().enumerate();
        outputs
            .filter(move |(_, o)| o.0 as usize == r)
            .map(|(i, _)| i)
    }

    fn last_stage(&self) -> usize {
        self.stages.iter().copied().max().unwrap_or(0)
    }

    fn row_pointer(
        &self,
        e: &mut Emitter,
        base: Value,
        tensor: usize,
        at: &[Ix<Value>],
        col: Value,
    ) -> Value {
        let mut offset = e.mul(Ix::V(col), self.inner.strides[tensor]);
        for (&i, axis) in at.iter().zip(&self.outer) {
            let step = e.mul(i, axis.strides[tensor]);
            offset = e.add(offset, step);
        }
        let bytes = e.mul(offset, self.size_bytes(tensor));
        let address = e.add(Ix::V(base), bytes);
        e.val(address)
    }
}

/// A run of the innermost loop.
struct Row<'a> {
    map: &'a VectorMap,
    /// Addresses of the leaves and outputs at the first element.
    pointers: &'a [Value],
    /// Address of the workspace.
    tiles: Option<Value>,
}

impl Row<'_> {
    /// All stages: at once, or tile by tile.
    fn emit(&self, e: &mut Emitter, run: &Run) -> Result<()> {
        if self.map.n_tiles == 0 {
            return self.stage(e, 0, run.n, None);
        }
        e.for_loop(Ix::C(0), Ix::V(run.n), TILE as i64, &[], |e, start, _| {
            let (rest, most) = (e.ins().isub(run.n, start), e.iconst(TILE as i64));
            let m = e.ins().umin(rest, most);
            for stage in 0..=self.map.last_stage() {
                self.stage(e, stage, m, Some(start))?;
                self.calls(e, stage, m, start)?;
            }
            Ok(vec![])
        })?;
        Ok(())
    }

    /// Address of a tensor's element `start`, or of its only element.
    fn pointer(&self, e: &mut Emitter, tensor: usize, start: Option<Value>) -> Value {
        match start {
            Some(start) if self.map.inner.strides[tensor] == 1 && self.map.bytes[tensor] => {
                e.ins().iadd(self.pointers[tensor], start)
            }
            Some(start) if self.map.inner.strides[tensor] == 1 => {
                let bytes = e.ins().ishl_imm_s(start, 2);
                e.ins().iadd(self.pointers[tensor], bytes)
            }
            _ => self.pointers[tensor],
        }
    }

    fn tile(&self, e: &mut Emitter, r: usize) -> Result<Value> {
        let (Some(n), Some(base)) = (self.map.tiles[r], self.tiles) else {
            return Err(Error::internal("a register between stages has no tile"));
        };
        Ok(e.ins().iadd_imm_s(base, (n * TILE * 4) as i64))
    }

    /// Registers that the loops of a stage write: to tiles, and to results. A call's result is written by the call.
    fn stored(&self, stage: usize) -> Vec<usize> {
        let map = self.map;
        (0..map.insts().len())
            .filter(|&r| call_of(&map.insts()[r]).is_none())
            .filter(|&r| map.is_tiled_in(r, stage) || map.is_result_of(r, stage))
            .collect()
    }

    /// The loops of one stage over `m` elements from `start` on: vectors, then single elements.
    fn stage(&self, e: &mut Emitter, stage: usize, m: Value, start: Option<Value>) -> Result<()> {
        let stored = self.stored(stage);
        if stored.is_empty() {
            return Ok(());
        }
        let tensors = 0..self.pointers.len();
        let pointers: Vec<Value> = tensors.map(|t| self.pointer(e, t, start)).collect();
        let tiles = self.tile_addresses(e)?;
        let lanes = Lanes {
            map: self.map,
            stage,
            pointers: &pointers,
            tiles: &tiles,
            stored: &stored,
        };
        let bytes = e.ins().ishl_imm_s(m, 2);
        let step = 16 * self.map.n_groups() as i64;
        let whole = e.ins().band_imm_s(bytes, -step);
        let fixed = lanes.fixed(e, true);
        e.for_loop(Ix::C(0), Ix::V(whole), step, &[], |e, at, _| {
            lanes.body(e, at, true, &fixed)?;
            Ok(vec![])
        })?;
        let fixed = lanes.fixed(e, false);
        e.for_loop(Ix::V(whole), Ix::V(bytes), 4, &[], |e, at, _| {
            lanes.body(e, at, false, &fixed)?;
            Ok(vec![])
        })?;
        Ok(())
    }

    /// Addresses of the registers' tiles.
    fn tile_addresses(&self, e: &mut Emitter) -> Result<Vec<Option<Value>>> {
        let tiles = self.map.tiles.iter().enumerate();
        tiles
            .map(|(r, tile)| tile.map(|_| self.tile(e, r)).transpose())
            .collect()
    }

    /// The calls at the end of a stage.
    fn calls(&self, e: &mut Emitter, stage: usize, m: Value, start: Value) -> Result<()> {
        for (r, inst) in self.map.insts().iter().enumerate() {
            let Some(name) = call_of(inst).filter(|_| self.map.stages[r] == stage) else {
                continue;
            };
            let mut args = vec![m];
            for a in &inst.args {
                args.push(match self.map.contiguous_input(a.0 as usize) {
                    Some(leaf) => self.pointer(e, leaf, Some(start)),
                    None => self.tile(e, a.0 as usize)?,
                });
            }
            let to = self.tile(e, r)?;
            args.push(to);
            e.call(name, &args, None)?;
            self.copy_results(e, r, to, m, start)?;
        }
        Ok(())
    }

    /// Copies a call's tile to the results that it is.
    fn copy_results(
        &self,
        e: &mut Emitter,
        r: usize,
        tile: Value,
        m: Value,
        start: Value,
    ) -> Result<()> {
        let first = self.map.expression.leaves.len();
        for i in self.map.outputs_of(r) {
            let to = self.pointer(e, first + i, Some(start));
            let bytes = e.ins().ishl_imm_s(m, 2);
            let whole = e.ins().band_imm_s(bytes, !15);
            copy(e, types::F32X4, [tile, to], Ix::C(0), whole)?;
            copy(e, types::F32, [tile, to], Ix::V(whole), bytes)?;
        }
        Ok(())
    }
}

/// Copies the bytes from offset `begin` to `end`, as registers of type `ty`.
fn copy(
    e: &mut Emitter,
    ty: Type,
    [source, sink]: [Value; 2],
    begin: Ix<Value>,
    end: Value,
) -> Result<()> {
    let step = i64::from(ty.bytes());
    e.for_loop(begin, Ix::V(end), step, &[], |e, at, _| {
        let (source, sink) = (e.ins().iadd(source, at), e.ins().iadd(sink, at));
        let value = e.ins().load(ty, memory(), source, 0);
        e.ins().store(memory(), value, sink, 0);
        Ok(vec![])
    })?;
    Ok(())
}
