//! The body of a vector kernel's loop: elements in lanes of four, or one by one.
//!
//! A lane has 32 bits: an `f32`, an `i32`, an integer of 8 bits extended by its sign, or a truth value as a mask. Elements of one byte are read and written by sixteen, which
//! are four groups of lanes; all ops between are on lanes. Conversions are those of the interpreter: floats become integers by truncation,
//! saturate, and a NaN becomes 0; integers wrap.

use super::emit::Emitter;
use super::pull::Emit;
use super::scalar::{float_instruction, int_instruction};
use super::vector::{VectorMap, call_of, tile_function};
use crate::error::{Error, Result};
use crate::ir::ScalarOp;
use crate::ir::vecprog::{Inst, VecOp};
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{Endianness, InstBuilder, MemFlagsData, Type, Value, types};
use gristmill_runtime::DType;

/// Groups of lanes that a vector of bytes fills.
pub(super) const GROUPS: usize = 4;

/// True if elements of a dtype can be in lanes.
pub(super) fn is_lane(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::I32) || is_byte(dtype)
}

/// True if an element in memory is one byte, which a lane holds extended.
pub(super) fn is_byte(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::I8 | DType::Bool)
}

/// True if an instruction has code in lanes, given the dtype of its last operand.
pub(super) fn has_lanes(inst: &Inst, operand: DType) -> bool {
    use ScalarOp::*;
    let VecOp::Op(op) = inst.op else {
        return is_lane(inst.dtype);
    };
    if !is_lane(operand) || !is_lane(inst.dtype) {
        return false;
    }
    match op {
        Cast(_) | BitCast(_) | Select => true,
        And | Or | Xor | Not => operand == DType::Bool,
        Add | Sub | Mul | Neg | Abs | Min | Max => operand != DType::Bool,
        Eq | Ne | Lt | Le | Gt | Ge => operand != DType::Bool,
        Sign | Floor | Ceil | Round | Trunc | Sqrt | Div => operand == DType::F32,
        _ => tile_function(op).is_some() && operand == DType::F32,
    }
}

pub(super) fn memory() -> MemFlagsData {
    MemFlagsData::new().with_notrap()
}

fn little_endian() -> MemFlagsData {
    MemFlagsData::new().with_endianness(Endianness::Little)
}

/// The type of a register; scalar truth values are bytes.
fn lane_type(dtype: DType, vector: bool) -> Type {
    match (dtype, vector) {
        (DType::F32, true) => types::F32X4,
        (DType::F32, false) => types::F32,
        (_, true) => types::I32X4,
        (DType::Bool, false) => types::I8,
        (_, false) => types::I32,
    }
}

/// The body of one stage's loop.
pub(super) struct Lanes<'a> {
    pub(super) map: &'a VectorMap,
    pub(super) stage: usize,
    pub(super) pointers: &'a [Value],
    pub(super) tiles: &'a [Option<Value>],
    pub(super) stored: &'a [usize],
}

/// One iteration: the groups' registers, and bytes that were loaded, whole and as halves of 16-bit lanes.
struct Iteration {
    /// Offset in bytes of a tensor of 4-byte elements.
    at: Value,
    vector: bool,
    groups: Vec<Vec<Option<Value>>>,
    bytes: Vec<[Option<Value>; 3]>,
}

impl Lanes<'_> {
    /// Constants and broadcast inputs, which the loop does not change.
    pub(super) fn fixed(&self, e: &mut Emitter, vector: bool) -> Vec<Option<Value>> {
        (self.map.insts().iter())
            .map(|inst| match inst.op {
                VecOp::Const(bits) => {
                    let c = constant(e, inst.dtype, bits);
                    Some(splat(e, c, inst.dtype, vector))
                }
                VecOp::Input(n) if self.map.is_broadcast(n as usize) => {
                    let v = self.element(e, n as usize, inst.dtype, None);
                    Some(splat(e, v, inst.dtype, vector))
                }
                _ => None,
            })
            .collect()
    }

    /// Computes and stores the stage's registers at byte offset `at` of tensors of 4-byte elements.
    pub(super) fn body(
        &self,
        e: &mut Emitter,
        at: Value,
        vector: bool,
        fixed: &[Option<Value>],
    ) -> Result<()> {
        let n_groups = if vector { self.map.n_groups() } else { 1 };
        let mut iteration = Iteration {
            at,
            vector,
            groups: vec![fixed.to_vec(); n_groups],
            bytes: vec![[None; 3]; fixed.len()],
        };
        // Results that lie over operands may not be stored before these are read.
        let reads_first = self.map.n_tiles == 0;
        let mut computed = Vec::with_capacity(self.stored.len());
        for &r in self.stored {
            let mut values = Vec::with_capacity(n_groups);
            for group in 0..n_groups {
                values.push(self.register(e, r, group, &mut iteration)?);
            }
            match reads_first {
                true => computed.push((r, values)),
                false => self.store(e, r, &values, &iteration),
            }
        }
        for (r, values) in computed {
            self.store(e, r, &values, &iteration);
        }
        Ok(())
    }

    /// Stores a register to its tile and to the results that it is.
    fn store(&self, e: &mut Emitter, r: usize, values: &[Value], iteration: &Iteration) {
        let (dtype, at) = (self.map.insts()[r].dtype, iteration.at);
        if let Some(tile) = self.tiles[r] {
            store_tile(e, tile, values, dtype, iteration);
        }
        if call_of(&self.map.insts()[r]).is_some() {
            return;
        }
        let first = self.map.expression.leaves.len();
        for i in self.map.outputs_of(r) {
            let sink = self.pointers[first + i];
            if is_byte(dtype) {
                let bytes = narrow(e, values, dtype, iteration.vector);
                let address = byte_address(e, sink, at);
                e.ins().store(memory(), bytes, address, 0);
                continue;
            }
            for (group, &value) in values.iter().enumerate() {
                store_group(e, sink, at, group, value);
            }
        }
    }

    fn register(
        &self,
        e: &mut Emitter,
        r: usize,
        group: usize,
        iteration: &mut Iteration,
    ) -> Result<Value> {
        if let Some(v) = iteration.groups[group][r] {
            return Ok(v);
        }
        let inst = &self.map.insts()[r];
        let value = match inst.op {
            VecOp::Input(n) => self.input(e, r, n as usize, group, iteration),
            _ if call_of(inst).is_some() || self.map.is_earlier(r, self.stage) => {
                self.read_tile(e, r, group, iteration)?
            }
            VecOp::Op(op) => self.computed(e, inst, op, group, iteration)?,
            VecOp::Const(_) => return Err(Error::internal("a constant is fixed before the loop")),
        };
        iteration.groups[group][r] = Some(value);
        Ok(value)
    }

    /// Input `n`, which is register `r` and changes in the loop.
    fn input(
        &self,
        e: &mut Emitter,
        r: usize,
        n: usize,
        group: usize,
        iteration: &mut Iteration,
    ) -> Value {
        let (dtype, vector) = (self.map.insts()[r].dtype, iteration.vector);
        match (is_byte(dtype), vector) {
            (true, true) => self.bytes(e, r, n, group, iteration),
            (true, false) => self.element(e, n, dtype, Some(iteration.at)),
            (false, _) => {
                let ty = lane_type(dtype, vector);
                load_group(e, ty, self.pointers[n], iteration.at, group)
            }
        }
    }

    /// A register that an earlier stage or a call left in its tile.
    fn read_tile(
        &self,
        e: &mut Emitter,
        r: usize,
        group: usize,
        iteration: &Iteration,
    ) -> Result<Value> {
        let tile = self.tiles[r];
        let tile = tile.ok_or_else(|| Error::internal("a register between stages has no tile"))?;
        let (dtype, at) = (self.map.insts()[r].dtype, iteration.at);
        if dtype == DType::Bool && !iteration.vector {
            let mask = load_group(e, types::I32, tile, at, group);
            return Ok(e.ins().icmp_imm_s(IntCC::NotEqual, mask, 0));
        }
        let ty = lane_type(dtype, iteration.vector);
        Ok(load_group(e, ty, tile, at, group))
    }

    fn computed(
        &self,
        e: &mut Emitter,
        inst: &Inst,
        op: ScalarOp,
        group: usize,
        iteration: &mut Iteration,
    ) -> Result<Value> {
        let mut args = Vec::with_capacity(inst.args.len());
        for a in &inst.args {
            args.push(self.register(e, a.0 as usize, group, iteration)?);
        }
        let operand = |i: usize| &self.map.insts()[inst.args[i].0 as usize];
        let lanes = LaneOp {
            vector: iteration.vector,
            from: operand(inst.args.len() - 1).dtype,
            to: inst.dtype,
            constant_rhs: inst.args.len() > 1 && matches!(operand(1).op, VecOp::Const(_)),
        };
        lanes.emit(e, op, &args)
    }

    /// One element of input `n`: at an offset, or its only one.
    fn element(&self, e: &mut Emitter, n: usize, dtype: DType, at: Option<Value>) -> Value {
        let base = self.pointers[n];
        if !is_byte(dtype) {
            let address = at.map_or(base, |at| e.ins().iadd(base, at));
            let ty = lane_type(dtype, false);
            return e.ins().load(ty, memory(), address, 0);
        }
        let address = at.map_or(base, |at| byte_address(e, base, at));
        let byte = e.ins().load(types::I8, memory(), address, 0);
        match dtype {
            DType::Bool => byte,
            DType::I8 => e.ins().sextend(types::I32, byte),
            _ => e.ins().uextend(types::I32, byte),
        }
    }

    /// The lanes of one group of input `n`, which is register `r`, out of sixteen bytes.
    fn bytes(
        &self,
        e: &mut Emitter,
        r: usize,
        n: usize,
        group: usize,
        iteration: &mut Iteration,
    ) -> Value {
        let dtype = self.map.insts()[r].dtype;
        let whole = *iteration.bytes[r][2].get_or_insert_with(|| {
            let address = byte_address(e, self.pointers[n], iteration.at);
            e.ins().load(types::I8X16, memory(), address, 0)
        });
        let half = *iteration.bytes[r][group / 2]
            .get_or_insert_with(|| widen(e, whole, dtype, group / 2 == 1));
        let lanes = widen(e, half, dtype, group % 2 == 1);
        if dtype != DType::Bool {
            return lanes;
        }
        let zero = lane_integer(e, 0, true);
        e.ins().icmp(IntCC::NotEqual, lanes, zero)
    }
}

/// Stores a register to its tile; truth values are masks there.
fn store_tile(e: &mut Emitter, tile: Value, values: &[Value], dtype: DType, iteration: &Iteration) {
    for (group, &value) in values.iter().enumerate() {
        let value = match iteration.vector {
            true => value,
            false => lane_of_truth(e, value, dtype),
        };
        store_group(e, tile, iteration.at, group, value);
    }
}

/// Loads a group of lanes at byte offset `at` of a tensor of 4-byte elements.
fn load_group(e: &mut Emitter, ty: Type, base: Value, at: Value, group: usize) -> Value {
    let address = e.ins().iadd(base, at);
    e.load_lanes(ty, address, 16 * group as i32)
}

/// Stores a group of lanes there.
fn store_group(e: &mut Emitter, base: Value, at: Value, group: usize, value: Value) {
    let address = e.ins().iadd(base, at);
    e.ins().store(memory(), value, address, 16 * group as i32);
}

/// Address of the byte beside the 4-byte element at offset `at`.
fn byte_address(e: &mut Emitter, base: Value, at: Value) -> Value {
    let index = e.ins().ushr_imm_s(at, 2);
    e.ins().iadd(base, index)
}

/// Half of the lanes of a vector in twice their width.
fn widen(e: &mut Emitter, v: Value, dtype: DType, high: bool) -> Value {
    match (dtype == DType::I8, high) {
        (true, false) => e.ins().swiden_low(v),
        (true, true) => e.ins().swiden_high(v),
        (false, false) => e.ins().uwiden_low(v),
        (false, true) => e.ins().uwiden_high(v),
    }
}

/// Elements of one byte: sixteen out of four groups of lanes, or one.
fn narrow(e: &mut Emitter, values: &[Value], dtype: DType, vector: bool) -> Value {
    if !vector {
        return if dtype == DType::Bool {
            values[0]
        } else {
            e.ins().ireduce(types::I8, values[0])
        };
    }
    let mut lanes = values.to_vec();
    if dtype == DType::Bool {
        let one = lane_integer(e, 1, true);
        lanes.iter_mut().for_each(|v| *v = e.ins().band(*v, one));
    }
    let (low, high) = (
        e.ins().snarrow(lanes[0], lanes[1]),
        e.ins().snarrow(lanes[2], lanes[3]),
    );
    // Lanes are in the dtype's range, so that nothing saturates.
    if dtype == DType::I8 {
        e.ins().snarrow(low, high)
    } else {
        e.ins().unarrow(low, high)
    }
}

/// A scalar register as lanes hold it: truth values become masks.
fn lane_of_truth(e: &mut Emitter, value: Value, dtype: DType) -> Value {
    if dtype != DType::Bool {
        return value;
    }
    let wide = e.ins().uextend(types::I32, value);
    e.ins().ineg(wide)
}

fn splat(e: &mut Emitter, value: Value, dtype: DType, vector: bool) -> Value {
    if !vector {
        return value;
    }
    let lane = lane_of_truth(e, value, dtype);
    e.ins().splat(lane_type(dtype, true), lane)
}

/// A scalar constant as a register holds it.
fn constant(e: &mut Emitter, dtype: DType, bits: u64) -> Value {
    match dtype {
        DType::U8 => e.constant(DType::I32, u64::from(bits as u8)),
        DType::I8 => e.constant(DType::I32, u64::from(bits as i8 as i32 as u32)),
        _ => e.constant(dtype, bits),
    }
}

fn lane_constant(e: &mut Emitter, v: f32, vector: bool) -> Value {
    let c = e.ins().f32const(v);
    if vector {
        e.ins().splat(types::F32X4, c)
    } else {
        c
    }
}

fn lane_integer(e: &mut Emitter, v: u32, vector: bool) -> Value {
    let c = e.ins().iconst(types::I32, i64::from(v));
    if vector {
        e.ins().splat(types::I32X4, c)
    } else {
        c
    }
}

/// One op on four lanes or on one; truth values are lane masks or a byte.
struct LaneOp {
    vector: bool,
    /// Dtype of the last operand.
    from: DType,
    to: DType,
    constant_rhs: bool,
}

impl LaneOp {
    fn emit(&self, e: &mut Emitter, op: ScalarOp, args: &[Value]) -> Result<Value> {
        match op {
            ScalarOp::Cast(_) => self.cast(e, args[0]),
            ScalarOp::BitCast(_) => Ok(self.bit_cast(e, args[0])),
            ScalarOp::Select => Ok(choose(e, args[0], args[1], args[2], self.vector)),
            _ if self.from == DType::Bool => self.truth(e, op, args),
            _ if self.from == DType::F32 => self.float(e, op, args),
            _ => self.integer(e, op, args),
        }
    }

    fn truth(&self, e: &mut Emitter, op: ScalarOp, args: &[Value]) -> Result<Value> {
        Ok(match op {
            ScalarOp::And => e.ins().band(args[0], args[1]),
            ScalarOp::Or => e.ins().bor(args[0], args[1]),
            ScalarOp::Xor => e.ins().bxor(args[0], args[1]),
            ScalarOp::Not if self.vector => e.ins().bnot(args[0]),
            ScalarOp::Not => e.ins().icmp_imm_s(IntCC::Equal, args[0], 0),
            _ => return Err(no_code(op)),
        })
    }

    fn float(&self, e: &mut Emitter, op: ScalarOp, args: &[Value]) -> Result<Value> {
        let x = args[0];
        let y = *args.get(1).unwrap_or(&x);
        match op {
            ScalarOp::Sign => Ok(self.float_sign(e, x)),
            ScalarOp::Max if self.constant_rhs => Ok(at_least(e, x, y, self.vector)),
            ScalarOp::Min if self.constant_rhs => Ok(at_most(e, x, y, self.vector)),
            _ => float_instruction(e, op, x, y).ok_or_else(|| no_code(op)),
        }
    }

    fn float_sign(&self, e: &mut Emitter, x: Value) -> Value {
        let vector = self.vector;
        let zero = lane_constant(e, 0.0, vector);
        let one = lane_constant(e, 1.0, vector);
        let minus = e.ins().fneg(one);
        let above = e.ins().fcmp(FloatCC::GreaterThan, x, zero);
        let below = e.ins().fcmp(FloatCC::LessThan, x, zero);
        let rest = choose(e, below, minus, x, vector);
        choose(e, above, one, rest, vector)
    }

    /// Lanes hold integers extended by their sign, so that order is that of signed lanes.
    fn integer(&self, e: &mut Emitter, op: ScalarOp, args: &[Value]) -> Result<Value> {
        use ScalarOp::*;
        let x = args[0];
        let y = *args.get(1).unwrap_or(&x);
        let result = int_instruction(e, op, true, x, y).ok_or_else(|| no_code(op))?;
        Ok(match op {
            Neg | Abs | Add | Sub | Mul => self.wrapped(e, result),
            _ => result,
        })
    }

    /// An integer of 32 bits brought into the range of the result's dtype, modulo its width.
    fn wrapped(&self, e: &mut Emitter, x: Value) -> Value {
        match self.to {
            DType::U8 => {
                let low = lane_integer(e, 0xff, self.vector);
                e.ins().band(x, low)
            }
            DType::I8 => {
                let top = e.ins().ishl_imm_s(x, 24);
                e.ins().sshr_imm_s(top, 24)
            }
            _ => x,
        }
    }

    fn cast(&self, e: &mut Emitter, x: Value) -> Result<Value> {
        let vector = self.vector;
        Ok(match (self.from, self.to) {
            (from, to) if from == to => x,
            (DType::F32, DType::Bool) => {
                let zero = lane_constant(e, 0.0, vector);
                e.ins().fcmp(FloatCC::NotEqual, x, zero)
            }
            (_, DType::Bool) => {
                let zero = lane_integer(e, 0, vector);
                e.ins().icmp(IntCC::NotEqual, x, zero)
            }
            (DType::Bool, to) => {
                let bit = self.bit_of_truth(e, x);
                match to {
                    DType::F32 => e.ins().fcvt_from_sint(lane_type(to, vector), bit),
                    _ => bit,
                }
            }
            (_, DType::F32) => e.ins().fcvt_from_sint(lane_type(DType::F32, vector), x),
            (DType::F32, DType::I32) => e.ins().fcvt_to_sint_sat(lane_type(DType::I32, vector), x),
            (DType::F32, to) => saturated(e, x, to, vector),
            _ => self.wrapped(e, x),
        })
    }

    /// Programs have bits of `f32` as `i32` and back: bytes are cast.
    fn bit_cast(&self, e: &mut Emitter, x: Value) -> Value {
        let ty = lane_type(self.to, self.vector);
        e.ins().bitcast(ty, little_endian(), x)
    }

    /// A truth value as the integer 0 or 1.
    fn bit_of_truth(&self, e: &mut Emitter, x: Value) -> Value {
        let one = lane_integer(e, 1, self.vector);
        match self.vector {
            true => e.ins().band(x, one),
            false => e.ins().uextend(types::I32, x),
        }
    }
}

/// A float as an integer of 8 bits: the nearest in range, towards zero, and 0 for NaN.
fn saturated(e: &mut Emitter, x: Value, to: DType, vector: bool) -> Value {
    let (smallest, largest) = match to {
        DType::U8 => (0.0, 255.0),
        _ => (-128.0, 127.0),
    };
    let smallest = lane_constant(e, smallest, vector);
    let largest = lane_constant(e, largest, vector);
    let x = if to == DType::U8 {
        // A NaN is not above 0.
        let is_above = e.ins().fcmp(FloatCC::LessThan, smallest, x);
        choose(e, is_above, x, smallest, vector)
    } else {
        let zero = lane_constant(e, 0.0, vector);
        let is_number = e.ins().fcmp(FloatCC::Equal, x, x);
        let x = choose(e, is_number, x, zero, vector);
        at_least(e, x, smallest, vector)
    };
    let x = at_most(e, x, largest, vector);
    match vector && cfg!(target_arch = "x86_64") {
        // In range: the machine's own conversion does.
        true => e.ins().x86_cvtt2dq(types::I32X4, x),
        false => e.ins().fcvt_to_sint_sat(lane_type(DType::I32, vector), x),
    }
}

/// Against a constant one machine instruction does: a NaN in `x` fails the comparison and stays.
fn at_least(e: &mut Emitter, x: Value, y: Value, vector: bool) -> Value {
    let less = e.ins().fcmp(FloatCC::LessThan, x, y);
    choose(e, less, y, x, vector)
}

/// As [`at_least`].
fn at_most(e: &mut Emitter, x: Value, y: Value, vector: bool) -> Value {
    let greater = e.ins().fcmp(FloatCC::LessThan, y, x);
    choose(e, greater, y, x, vector)
}

fn no_code(op: ScalarOp) -> Error {
    Error::internal(format!("{op} has no lane code"))
}

fn choose(e: &mut Emitter, condition: Value, yes: Value, no: Value, vector: bool) -> Value {
    if !vector {
        return e.ins().select(condition, yes, no);
    }
    match e.b.func.dfg.value_type(yes) {
        types::F32X4 => {
            let mask = e.ins().bitcast(types::F32X4, little_endian(), condition);
            e.ins().bitselect(mask, yes, no)
        }
        _ => e.ins().bitselect(condition, yes, no),
    }
}
