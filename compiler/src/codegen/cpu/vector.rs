//! Element-wise kernels of `f32` in four lanes.
//!
//! The innermost of the collapsed loops runs over vectors with a scalar remainder that computes bit for bit the same, so that results
//! do not depend on how items are split. Transcendental functions are calls on tiles of [`TILE`] floats in the workspace, which cut
//! the program into stages.

use super::access::{Expression, Leaf, expression};
use super::body::Body;
use super::emit::Emitter;
use super::pull::{Emit, Ix};
use super::strided::{Axis, collapse};
use crate::error::{Error, Result};
use crate::ir::{ScalarOp, ValueId};
use crate::vecprog::{Inst, VecOp, VecProg};
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{Endianness, InstBuilder, MemFlagsData, Value, types};
use gristmill_runtime::DType;

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
    /// Tile of the workspace that holds a register between stages.
    tiles: Vec<Option<usize>>,
    n_tiles: usize,
}

/// Leaf kernels that compute a whole tile.
fn tile_function(op: ScalarOp) -> Option<&'static str> {
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

fn call_of(inst: &Inst) -> Option<&'static str> {
    match inst.op {
        VecOp::Op(op) => tile_function(op),
        _ => None,
    }
}

/// Whether the lanes code has an instruction sequence for it.
fn has_lanes(inst: &Inst, operand: DType) -> bool {
    use ScalarOp::*;
    let VecOp::Op(op) = inst.op else { return inst.dtype == DType::F32 };
    match op {
        Neg | Abs | Sign | Floor | Ceil | Round | Trunc | Sqrt | Add | Sub | Mul | Div | Min | Max | Lt | Le | Gt
        | Ge => operand == DType::F32,
        Eq | Ne => operand == DType::F32,
        And | Or | Xor | Not => true,
        Select => operand == DType::F32,
        _ => tile_function(op).is_some() && operand == DType::F32,
    }
}

/// Whether vector code computes the op alone on operands of these dtypes.
pub(super) fn takes(op: ScalarOp, dtypes: &[DType]) -> bool {
    if dtypes[0] == DType::F32 && tile_function(op).is_some() {
        return true;
    }
    let p = VecProg::of_op(op, dtypes);
    let supported = |i: &Inst| has_lanes(i, i.args.last().map_or(i.dtype, |&a| p.dtype(a)));
    p.dtype(p.outputs[0]) == DType::F32 && p.insts.iter().all(supported)
}

/// Plans the kernel of `roots`, whose elements go where `out` says; `None` when the generic code must do it.
pub(super) fn plan(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
    out: &Destination,
) -> Option<VectorMap> {
    if roots.iter().any(|&v| body.dtype(v) != DType::F32) {
        return None;
    }
    let e = expression(body, roots, in_memory, &|op, dtype| dtype == DType::F32 && tile_function(op).is_some())?;
    let p = &e.program;
    let supported = |i: &Inst| has_lanes(i, i.args.last().map_or(i.dtype, |&a| p.dtype(a)));
    if !p.insts.iter().all(supported) {
        return None;
    }
    let shape = body.shape(roots[0]);
    let strides = e.all_strides(&out.strides);
    let mut outer = collapse(shape, &strides.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let inner = outer.pop().unwrap_or_else(|| Axis { extent: 1, strides: vec![1; strides.len()] });
    if inner.strides.iter().any(|&s| s != 0 && s != 1) {
        return None;
    }
    let stages = stages(&p.insts);
    let mut map = VectorMap { expression: e, outer, inner, out_offset: out.offset, stages, tiles: vec![], n_tiles: 0 };
    map.place_tiles();
    Some(map)
}

/// The stage in which each instruction runs; a call runs at the end of its stage. Inputs and constants run in every stage.
fn stages(insts: &[Inst]) -> Vec<usize> {
    let mut stages: Vec<usize> = Vec::with_capacity(insts.len());
    for inst in insts {
        let after = |r: &crate::vecprog::Reg| {
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
        insts.iter().map(|i| if call_of(i).is_some() { 400 } else { 60 }).sum::<u64>() + 100
    }

    fn insts(&self) -> &[Inst] {
        &self.expression.program.insts
    }

    fn is_free(&self, r: usize) -> bool {
        matches!(self.insts()[r].op, VecOp::Input(_) | VecOp::Const(_))
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
                needed[a] |= (is_call && !in_place) || (!self.is_free(a) && self.stages[a] < self.stages[i]);
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
    pub(super) fn emit(&self, e: &mut Emitter, leaves: &[Value], outputs: &[Value], workspace: usize) -> Result<()> {
        let bases: Vec<Value> = (leaves.iter().zip(&self.expression.leaves))
            .map(|(&base, Leaf { offset, .. })| (base, *offset))
            .chain(outputs.iter().map(|&base| (base, self.out_offset)))
            .map(|(base, offset)| if offset == 0 { base } else { e.b.ins().iadd_imm_s(base, offset * 4) })
            .collect();
        let tiles = if self.n_tiles > 0 { Some(e.arg(workspace)) } else { None };
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
            let pointers: Vec<Value> = (0..bases.len()).map(|t| self.row_pointer(e, bases[t], t, &at, col)).collect();
            let row = Row { map: self, pointers: &pointers, tiles };
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

    fn row_pointer(&self, e: &mut Emitter, base: Value, tensor: usize, at: &[Ix<Value>], col: Value) -> Value {
        let mut offset = e.mul(Ix::V(col), self.inner.strides[tensor]);
        for (&i, axis) in at.iter().zip(&self.outer) {
            let step = e.mul(i, axis.strides[tensor]);
            offset = e.add(offset, step);
        }
        let bytes = e.mul(offset, 4);
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
            Some(start) if self.map.inner.strides[tensor] == 1 => {
                let bytes = e.b.ins().ishl_imm_s(start, 2);
                e.b.ins().iadd(self.pointers[tensor], bytes)
            }
            _ => self.pointers[tensor],
        }
    }

    fn tile(&self, e: &mut Emitter, r: usize) -> Result<Value> {
        let n = self.map.tiles[r].ok_or_else(|| Error::internal("a register between stages has no tile"))?;
        let base = self.tiles.ok_or_else(|| Error::internal("a kernel with tiles has no workspace"))?;
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
                let call_operand = (map.insts().iter().zip(&map.stages))
                    .any(|(i, &s)| s == stage && call_of(i).is_some() && i.args.iter().any(|a| a.0 as usize == r));
                let here = if map.is_free(r) { call_operand } else { map.stages[r] == stage };
                here && map.tiles[r].is_some() || self.result_here(r, stage, outputs)
            })
            .collect()
    }

    /// Whether a result register is written in this stage: its own, or the stage after the call that makes it.
    fn result_here(&self, r: usize, stage: usize, outputs: &[crate::vecprog::Reg]) -> bool {
        let is_output = outputs.iter().any(|o| o.0 as usize == r);
        is_output && if self.map.is_free(r) { stage == 0 } else { self.map.stages[r] == stage }
    }

    /// The loops of one stage over `m` elements from `start` on: vectors, then single elements.
    fn stage(&self, e: &mut Emitter, stage: usize, m: Value, start: Option<Value>) -> Result<()> {
        let stored = self.stored(stage);
        if stored.is_empty() {
            return Ok(());
        }
        let pointers: Vec<Value> = (0..self.pointers.len()).map(|t| self.pointer(e, t, start)).collect();
        let mut tiles = vec![None; self.map.insts().len()];
        for (r, tile) in tiles.iter_mut().enumerate().filter(|(r, _)| self.map.tiles[*r].is_some()) {
            *tile = Some(self.tile(e, r)?);
        }
        let lanes = Lanes { map: self.map, stage, pointers: &pointers, tiles: &tiles, stored: &stored };
        let bytes = e.b.ins().ishl_imm_s(m, 2);
        let whole = e.b.ins().band_imm_s(bytes, !15);
        let fixed = lanes.fixed(e, true);
        e.for_loop(Ix::C(0), Ix::V(whole), 16, &[], |e, at, _| {
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
            let Some(name) = call_of(inst).filter(|_| self.map.stages[r] == stage) else { continue };
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
    fn copy_results(&self, e: &mut Emitter, r: usize, tile: Value, m: Value, start: Value) -> Result<()> {
        let outputs = self.map.expression.program.outputs.clone();
        for (i, _) in outputs.iter().enumerate().filter(|(_, o)| o.0 as usize == r) {
            let to = self.pointer(e, self.map.expression.leaves.len() + i, Some(start));
            let bytes = e.b.ins().ishl_imm_s(m, 2);
            let whole = e.b.ins().band_imm_s(bytes, !15);
            for (ty, from, end, step) in [(types::F32X4, Ix::C(0), whole, 16), (types::F32, Ix::V(whole), bytes, 4)] {
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

fn memory() -> MemFlagsData {
    MemFlagsData::new().with_notrap()
}

/// The body of one stage's loop.
struct Lanes<'a> {
    map: &'a VectorMap,
    stage: usize,
    pointers: &'a [Value],
    tiles: &'a [Option<Value>],
    stored: &'a [usize],
}

impl Lanes<'_> {
    /// Constants and broadcast inputs, which the loop does not change.
    fn fixed(&self, e: &mut Emitter, vector: bool) -> Vec<Option<Value>> {
        let splat = |e: &mut Emitter, v: Value| if vector { e.b.ins().splat(types::F32X4, v) } else { v };
        (self.map.insts().iter())
            .map(|inst| match inst.op {
                VecOp::Const(bits) => {
                    let c = e.constant(DType::F32, bits);
                    Some(splat(e, c))
                }
                VecOp::Input(n) if self.map.inner.strides[n as usize] == 0 => {
                    let v = e.b.ins().load(types::F32, memory(), self.pointers[n as usize], 0);
                    Some(splat(e, v))
                }
                _ => None,
            })
            .collect()
    }

    /// Computes and stores what the stage owes at byte offset `at`.
    fn body(&self, e: &mut Emitter, at: Value, vector: bool, fixed: &[Option<Value>]) -> Result<()> {
        let mut registers: Vec<Option<Value>> = fixed.to_vec();
        for &r in self.stored {
            let mut value = self.register(e, r, at, vector, &mut registers)?;
            if self.map.insts()[r].dtype == DType::Bool && !vector {
                // Truth values between stages are lane masks.
                let wide = e.b.ins().uextend(types::I32, value);
                value = e.b.ins().ineg(wide);
            }
            let results = self.map.expression.program.outputs.iter().enumerate();
            let is_call = call_of(&self.map.insts()[r]).is_some();
            let mut sinks: Vec<Value> = self.tiles[r].into_iter().collect();
            if !is_call {
                let first = self.map.expression.leaves.len();
                sinks.extend(results.filter(|(_, o)| o.0 as usize == r).map(|(i, _)| self.pointers[first + i]));
            }
            for sink in sinks {
                let address = e.b.ins().iadd(sink, at);
                e.b.ins().store(memory(), value, address, 0);
            }
        }
        Ok(())
    }

    fn register(
        &self,
        e: &mut Emitter,
        r: usize,
        at: Value,
        vector: bool,
        registers: &mut Vec<Option<Value>>,
    ) -> Result<Value> {
        if let Some(v) = registers[r] {
            return Ok(v);
        }
        let inst = &self.map.insts()[r];
        let ty = if vector { types::F32X4 } else { types::F32 };
        let earlier = call_of(inst).is_some() || (!self.map.is_free(r) && self.map.stages[r] < self.stage);
        let value = match inst.op {
            VecOp::Input(n) => {
                let address = e.b.ins().iadd(self.pointers[n as usize], at);
                e.b.ins().load(ty, memory(), address, 0)
            }
            _ if earlier => {
                let tile = self.tiles[r].ok_or_else(|| Error::internal("a register between stages has no tile"))?;
                let address = e.b.ins().iadd(tile, at);
                match (inst.dtype, vector) {
                    (DType::Bool, true) => e.b.ins().load(types::I32X4, memory(), address, 0),
                    (DType::Bool, false) => {
                        let mask = e.b.ins().load(types::I32, memory(), address, 0);
                        e.b.ins().icmp_imm_s(IntCC::NotEqual, mask, 0)
                    }
                    _ => e.b.ins().load(ty, memory(), address, 0),
                }
            }
            VecOp::Op(op) => {
                let mut args = Vec::with_capacity(inst.args.len());
                for a in &inst.args {
                    args.push(self.register(e, a.0 as usize, at, vector, registers)?);
                }
                let constant = |i: usize| matches!(self.map.insts()[inst.args[i].0 as usize].op, VecOp::Const(_));
                lane_op(e, op, &args, vector, inst.args.len() > 1 && constant(1))?
            }
            VecOp::Const(_) => return Err(Error::internal("a constant is fixed before the loop")),
        };
        registers[r] = Some(value);
        Ok(value)
    }
}

/// One op on four lanes or on one; truth values are lane masks or a byte.
fn lane_op(e: &mut Emitter, op: ScalarOp, args: &[Value], vector: bool, constant_rhs: bool) -> Result<Value> {
    use ScalarOp::*;
    let x = args[0];
    let y = *args.get(1).unwrap_or(&x);
    Ok(match op {
        Neg => e.b.ins().fneg(x),
        Abs => e.b.ins().fabs(x),
        Sign => {
            let (zero, one) = (lane_constant(e, 0.0, vector), lane_constant(e, 1.0, vector));
            let minus = e.b.ins().fneg(one);
            let above = e.b.ins().fcmp(FloatCC::GreaterThan, x, zero);
            let below = e.b.ins().fcmp(FloatCC::LessThan, x, zero);
            let rest = choose(e, below, minus, x, vector);
            choose(e, above, one, rest, vector)
        }
        Floor => e.b.ins().floor(x),
        Ceil => e.b.ins().ceil(x),
        Round => e.b.ins().nearest(x),
        Trunc => e.b.ins().trunc(x),
        Sqrt => e.b.ins().sqrt(x),
        Add => e.b.ins().fadd(x, y),
        Sub => e.b.ins().fsub(x, y),
        Mul => e.b.ins().fmul(x, y),
        Div => e.b.ins().fdiv(x, y),
        // Against a constant one machine instruction does: a NaN in `x` fails the comparison and stays.
        Max if constant_rhs => {
            let less = e.b.ins().fcmp(FloatCC::LessThan, x, y);
            choose(e, less, y, x, vector)
        }
        Min if constant_rhs => {
            let greater = e.b.ins().fcmp(FloatCC::LessThan, y, x);
            choose(e, greater, y, x, vector)
        }
        Max => e.b.ins().fmax(x, y),
        Min => e.b.ins().fmin(x, y),
        Eq => e.b.ins().fcmp(FloatCC::Equal, x, y),
        Ne => e.b.ins().fcmp(FloatCC::NotEqual, x, y),
        Lt => e.b.ins().fcmp(FloatCC::LessThan, x, y),
        Le => e.b.ins().fcmp(FloatCC::LessThanOrEqual, x, y),
        Gt => e.b.ins().fcmp(FloatCC::GreaterThan, x, y),
        Ge => e.b.ins().fcmp(FloatCC::GreaterThanOrEqual, x, y),
        And => e.b.ins().band(x, y),
        Or => e.b.ins().bor(x, y),
        Xor => e.b.ins().bxor(x, y),
        Not if vector => e.b.ins().bnot(x),
        Not => e.b.ins().icmp_imm_s(IntCC::Equal, x, 0),
        Select => choose(e, x, y, args[2], vector),
        _ => return Err(Error::internal(format!("{op} has no lane code"))),
    })
}

fn lane_constant(e: &mut Emitter, v: f32, vector: bool) -> Value {
    let c = e.b.ins().f32const(v);
    if vector { e.b.ins().splat(types::F32X4, c) } else { c }
}

fn choose(e: &mut Emitter, condition: Value, yes: Value, no: Value, vector: bool) -> Value {
    if !vector {
        return e.b.ins().select(condition, yes, no);
    }
    let bits = MemFlagsData::new().with_endianness(Endianness::Little);
    let mask = e.b.ins().bitcast(types::F32X4, bits, condition);
    e.b.ins().bitselect(mask, yes, no)
}
