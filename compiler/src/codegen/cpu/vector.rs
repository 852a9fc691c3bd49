//! Element-wise kernels of `f32`, `i32`, 8-bit integers and truth values in four lanes ([`lanes`](super::lanes)).
//!
//! The innermost of the collapsed loops runs over vectors with a scalar remainder that computes bit for bit the same, so that results
//! do not depend on how items are split. Transcendental functions are calls on tiles of [`TILE`] floats in the workspace, which cut
//! the program into stages.

use super::access::{Expression, Leaf, expression};
use super::body::Body;
use super::emit::Emitter;
use super::lanes::{GROUPS, Lanes, has_lanes, is_byte, is_lane, memory};
use super::pull::{Emit, Ix};
use super::strided::{Axis, collapse};
use crate::error::{Error, Result};
use crate::ir::vecprog::{Inst, VecOp, VecProg};
use crate::ir::{ScalarOp, ValueId};
use cranelift_codegen::ir::{InstBuilder, Value, types};
use gristmill_runtime::DType;
use std::fmt;

/// Floats of a tile: 1 KiB, which amortises the call and avoids stalls between narrow stores and wide loads.
const TILE: usize = 256;

/// Where the elements of a result go: from element `offset` of its buffer on, with a stride per axis.
pub(super) struct Destination {
    pub(super) offset: i64,
    pub(super) strides: Vec<i64>,
}

/// A planned kernel.
pub(super) struct VectorMap {
    pub(super) expression: Expression,
    /// Loops, outermost first, without the innermost; strides are those of the leaves, then of the outputs.
    outer: Vec<Axis>,
    inner: Axis,
    out_offset: i64,
    stages: Vec<usize>,
    /// Whether an element of each leaf, then of each output, is one byte; else it has 4.
    bytes: Vec<bool>,
    /// Tile of the workspace that holds a register between stages.
    tiles: Vec<Option<usize>>,
    n_tiles: usize,
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

/// Whether vector code computes the op alone on operands of these dtypes.
pub(super) fn takes(op: ScalarOp, dtypes: &[DType]) -> bool {
    if dtypes[0] == DType::F32 && tile_function(op).is_some() {
        return true;
    }
    let p = VecProg::of_op(op, dtypes);
    let supported = |i: &Inst| has_lanes(i, i.args.last().map_or(i.dtype, |&a| p.dtype(a)));
    is_lane(p.dtype(p.outputs[0])) && p.insts.iter().all(supported)
}

/// Plans the kernel of `roots`, whose elements go where `out` says; `None` when the generic code must do it.
pub(super) fn plan(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
    out: &Destination,
) -> Option<VectorMap> {
    if roots.iter().any(|&v| !is_lane(body.dtype(v))) {
        return None;
    }
    let e = expression(body, roots, in_memory, &|op, dtype| {
        dtype == DType::F32 && tile_function(op).is_some()
    })?;
    let p = &e.program;
    let supported = |i: &Inst| has_lanes(i, i.args.last().map_or(i.dtype, |&a| p.dtype(a)));
    if !p.insts.iter().all(supported) {
        return None;
    }
    let shape = body.shape(roots[0]);
    let strides = e.all_strides(&out.strides);
    let mut outer = collapse(
        shape,
        &strides.iter().map(Vec::as_slice).collect::<Vec<_>>(),
    );
    let inner = outer.pop().unwrap_or_else(|| Axis {
        extent: 1,
        strides: vec![1; strides.len()],
    });
    if inner.strides.iter().any(|&s| s != 0 && s != 1) {
        return None;
    }
    let stages = stages(&p.insts);
    let bytes = e
        .leaves
        .iter()
        .map(|l| l.value)
        .chain(roots.iter().copied())
        .map(|v| is_byte(body.dtype(v)))
        .collect();
    let (tiles, n_tiles) = (vec![], 0);
    let mut map = VectorMap {
        expression: e,
        outer,
        inner,
        out_offset: out.offset,
        stages,
        bytes,
        tiles,
        n_tiles,
    };
    map.place_tiles();
    Some(map)
}

/// The stage in which each instruction runs; a call runs at the end of its stage. Inputs and constants run in every stage.
fn stages(insts: &[Inst]) -> Vec<usize> {
    let mut stages: Vec<usize> = Vec::with_capacity(insts.len());
    for inst in insts {
        let after = |r: &crate::ir::vecprog::Reg| {
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

    /// Bytes of workspace per thread.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.n_tiles * TILE * 4
    }

    /// Rough picoseconds per element.
    pub(super) fn cost_ps(&self) -> u64 {
        let insts = &self.expression.program.insts;
        insts
            .iter()
            .map(|i| if call_of(i).is_some() { 400 } else { 60 })
            .sum::<u64>()
            + 100
    }

    pub(super) fn insts(&self) -> &[Inst] {
        &self.expression.program.insts
    }

    fn is_free(&self, r: usize) -> bool {
        matches!(self.insts()[r].op, VecOp::Input(_) | VecOp::Const(_))
    }

    /// Whether input `n` is one element for the whole of the innermost loop.
    pub(super) fn is_broadcast(&self, n: usize) -> bool {
        self.inner.strides[n] == 0
    }

    /// Groups of four lanes that an iteration computes.
    pub(super) fn n_groups(&self) -> usize {
        let streamed = self
            .bytes
            .iter()
            .zip(&self.inner.strides)
            .any(|(&byte, &stride)| byte && stride == 1);
        if streamed { GROUPS } else { 1 }
    }

    /// Whether a stage before `stage` computed register `r`.
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
        self.tiles = needed
            .into_iter()
            .map(|needed| {
                needed.then(|| {
                    self.n_tiles += 1;
                    self.n_tiles - 1
                })
            })
            .collect();
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
        let bases: Vec<Value> = (leaves.iter().zip(&self.expression.leaves))
            .map(|(&base, Leaf { offset, .. })| (base, *offset))
            .chain(outputs.iter().map(|&base| (base, self.out_offset)))
            .enumerate()
            .map(|(t, (base, offset))| match offset * self.size_bytes(t) {
                0 => base,
                bytes => e.b.ins().iadd_imm_s(base, bytes),
            })
            .collect();
        let tiles = if self.n_tiles > 0 {
            Some(e.arg(workspace))
        } else {
            None
        };
        let extents: Vec<usize> = self.outer.iter().map(|a| a.extent).collect();
        let (begin, end, width) = (e.begin, e.end, self.inner.extent);
        let (row, col) = e.div_rem(Ix::V(begin), width);
        let (row, col) = (e.val(row), e.val(col));
        e.while_less(begin, end, &[row, col], |e, i, carried| {
            let (row, col) = (carried[0], carried[1]);
            let full = e.iconst(width as i64);
            let (in_row, in_range) = (e.b.ins().isub(full, col), e.b.ins().isub(end, i));
            let n = e.b.ins().umin(in_row, in_range);
            let at = e.delinearise(Ix::V(row), &extents);
            let pointers: Vec<Value> = (0..bases.len())
                .map(|t| self.row_pointer(e, bases[t], t, &at, col))
                .collect();
            let row = Row {
                map: self,
                pointers: &pointers,
                tiles,
            };
            if self.n_tiles == 0 {
                row.stage(e, 0, n, None)?;
            } else {
                e.for_loop(Ix::C(0), Ix::V(n), TILE as i64, &[], |e, start, _| {
                    let (rest, most) = (e.b.ins().isub(n, start), e.iconst(TILE as i64));
                    let m = e.b.ins().umin(rest, most);
                    for stage in 0..=self.last_stage() {
                        row.stage(e, stage, m, Some(start))?;
                        row.calls(e, stage, m, start)?;
                    }
                    Ok(vec![])
                })?;
            }
            let next = e.b.ins().iadd(i, n);
            let (row, zero) = (e.b.ins().iadd_imm_s(carried[0], 1), e.iconst(0));
            Ok((next, vec![row, zero]))
        })
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

/// One run of the innermost loop.
struct Row<'a> {
    map: &'a VectorMap,
    /// Addresses of the leaves and outputs at the first element.
    pointers: &'a [Value],
    /// Address of the workspace.
    tiles: Option<Value>,
}

impl Row<'_> {
    /// Address of a tensor's element `start`, or of its only element.
    fn pointer(&self, e: &mut Emitter, tensor: usize, start: Option<Value>) -> Value {
        match start {
            Some(start) if self.map.inner.strides[tensor] == 1 && self.map.bytes[tensor] => {
                e.b.ins().iadd(self.pointers[tensor], start)
            }
            Some(start) if self.map.inner.strides[tensor] == 1 => {
                let bytes = e.b.ins().ishl_imm_s(start, 2);
                e.b.ins().iadd(self.pointers[tensor], bytes)
            }
            _ => self.pointers[tensor],
        }
    }

    fn tile(&self, e: &mut Emitter, r: usize) -> Result<Value> {
        let n = self.map.tiles[r]
            .ok_or_else(|| Error::internal("a register between stages has no tile"))?;
        let base = self
            .tiles
            .ok_or_else(|| Error::internal("a kernel with tiles has no workspace"))?;
        Ok(e.b.ins().iadd_imm_s(base, (n * TILE * 4) as i64))
    }

    /// What a stage must leave in memory: registers with tiles, and results. A call's result is both written by the call.
    fn stored(&self, stage: usize) -> Vec<usize> {
        let map = self.map;
        let outputs = &map.expression.program.outputs;
        (0..map.insts().len())
            .filter(|&r| call_of(&map.insts()[r]).is_none())
            .filter(|&r| {
                // Free registers are stored where they are wanted: as call operands of this stage, or as results at the end.
                let call_operand = (map.insts().iter().zip(&map.stages)).any(|(i, &s)| {
                    s == stage && call_of(i).is_some() && i.args.iter().any(|a| a.0 as usize == r)
                });
                let here = if map.is_free(r) {
                    call_operand
                } else {
                    map.stages[r] == stage
                };
                here && map.tiles[r].is_some() || self.result_here(r, stage, outputs)
            })
            .collect()
    }

    /// Whether a result register is written in this stage: its own, or the stage after the call that makes it.
    fn result_here(&self, r: usize, stage: usize, outputs: &[crate::ir::vecprog::Reg]) -> bool {
        let is_output = outputs.iter().any(|o| o.0 as usize == r);
        is_output
            && if self.map.is_free(r) {
                stage == 0
            } else {
                self.map.stages[r] == stage
            }
    }

    /// The loops of one stage over `m` elements from `start` on: vectors, then single elements.
    fn stage(&self, e: &mut Emitter, stage: usize, m: Value, start: Option<Value>) -> Result<()> {
        let stored = self.stored(stage);
        if stored.is_empty() {
            return Ok(());
        }
        let pointers: Vec<Value> = (0..self.pointers.len())
            .map(|t| self.pointer(e, t, start))
            .collect();
        let mut tiles = vec![None; self.map.insts().len()];
        for (r, tile) in tiles
            .iter_mut()
            .enumerate()
            .filter(|(r, _)| self.map.tiles[*r].is_some())
        {
            *tile = Some(self.tile(e, r)?);
        }
        let lanes = Lanes {
            map: self.map,
            stage,
            pointers: &pointers,
            tiles: &tiles,
            stored: &stored,
        };
        let bytes = e.b.ins().ishl_imm_s(m, 2);
        let step = 16 * self.map.n_groups() as i64;
        let whole = e.b.ins().band_imm_s(bytes, -step);
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
        let outputs = self.map.expression.program.outputs.clone();
        for (i, _) in outputs
            .iter()
            .enumerate()
            .filter(|(_, o)| o.0 as usize == r)
        {
            let to = self.pointer(e, self.map.expression.leaves.len() + i, Some(start));
            let bytes = e.b.ins().ishl_imm_s(m, 2);
            let whole = e.b.ins().band_imm_s(bytes, !15);
            for (ty, from, end, step) in [
                (types::F32X4, Ix::C(0), whole, 16),
                (types::F32, Ix::V(whole), bytes, 4),
            ] {
                e.for_loop(from, Ix::V(end), step, &[], |e, at, _| {
                    let (source, sink) = (e.b.ins().iadd(tile, at), e.b.ins().iadd(to, at));
                    let v = e.b.ins().load(ty, memory(), source, 0);
                    e.b.ins().store(memory(), v, sink, 0);
                    Ok(vec![])
                })?;
            }
        }
        Ok(())
    }
}
