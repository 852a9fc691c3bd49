//! Primitive element-wise ops on one element, as Cranelift instructions.

use super::emit::{Emitter, clif_type};
use super::pull::Emit;
use crate::error::{Error, Result};
use crate::ir::ScalarOp;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Type, Value, types};
use gristmill_runtime::{DType, status};

impl Emitter<'_> {
    /// A constant given by its bits, zero extended.
    pub(super) fn scalar_constant(&mut self, dtype: DType, bits: u64) -> Value {
        match dtype {
            DType::F32 => self.ins().f32const(f32::from_bits(bits as u32)),
            DType::F64 => self.ins().f64const(f64::from_bits(bits)),
            _ => self
                .ins()
                .iconst(clif_type(dtype), bits as i64 & mask(clif_type(dtype))),
        }
    }

    /// A primitive op on elements of dtype `from`, giving `to`.
    pub(super) fn scalar_primitive(
        &mut self,
        op: ScalarOp,
        from: DType,
        to: DType,
        args: &[Value],
    ) -> Result<Value> {
        if let ScalarOp::Cast(_) = op {
            return self.cast(args[0], from, to);
        }
        if let ScalarOp::BitCast(_) = op {
            return Ok(self.bit_cast(args[0], to));
        }
        if op == ScalarOp::Select {
            return Ok(self.ins().select(args[0], args[1], args[2]));
        }
        if from.is_narrow_float() {
            return Err(Error::internal(format!("{op} of {from} was not widened")));
        }
        if from.is_float() {
            self.float_op(op, from, args)
        } else {
            self.int_op(op, from, args)
        }
    }

    fn float_op(&mut self, op: ScalarOp, dtype: DType, args: &[Value]) -> Result<Value> {
        let x = args[0];
        let y = *args.get(1).unwrap_or(&x);
        if op == ScalarOp::Sign {
            return Ok(self.float_sign(dtype, x));
        }
        if let Some(value) = float_instruction(self, op, x, y) {
            return Ok(value);
        }
        let name = float_function(op, dtype).ok_or_else(|| no_code(op, dtype))?;
        self.call_for(clif_type(dtype), name, args)
    }

    fn float_sign(&mut self, dtype: DType, x: Value) -> Value {
        let (zero, one) = (
            self.constant(dtype, 0),
            self.constant(dtype, crate::ir::vecprog::real_bits(dtype, 1.0)),
        );
        let minus = self.ins().fneg(one);
        let above = self.ins().fcmp(FloatCC::GreaterThan, x, zero);
        let below = self.ins().fcmp(FloatCC::LessThan, x, zero);
        let rest = self.ins().select(below, minus, x);
        self.ins().select(above, one, rest)
    }

    fn int_op(&mut self, op: ScalarOp, dtype: DType, args: &[Value]) -> Result<Value> {
        use ScalarOp::*;
        let x = args[0];
        let y = *args.get(1).unwrap_or(&x);
        let is_signed = dtype.is_signed_int();
        Ok(match op {
            Abs if !is_signed => x,
            Min if !is_signed => self.ins().umin(x, y),
            Max if !is_signed => self.ins().umax(x, y),
            Sign => self.int_sign(dtype, x),
            Not => self.ins().bxor_imm_s(x, 1),
            Div | Rem | Mod => self.int_division(op, dtype, x, y),
            Pow => self.int_pow(dtype, x, y)?,
            Shl | Shr => self.int_shift(op, dtype, x, y),
            _ => {
                let value = int_instruction(self, op, is_signed, x, y);
                value.ok_or_else(|| no_code(op, dtype))?
            }
        })
    }

    fn int_sign(&mut self, dtype: DType, x: Value) -> Value {
        let ty = clif_type(dtype);
        let positive = if dtype.is_signed_int() {
            IntCC::SignedGreaterThan
        } else {
            IntCC::UnsignedGreaterThan
        };
        let (zero, one, minus) = (
            self.ins().iconst(ty, 0),
            self.ins().iconst(ty, 1),
            self.ins().iconst(ty, mask(ty)),
        );
        let above = self.ins().icmp(positive, x, zero);
        let is_zero = self.ins().icmp(IntCC::Equal, x, zero);
        let rest = self.ins().select(is_zero, zero, minus);
        self.ins().select(above, one, rest)
    }

    /// Truncating division and both remainders. Zero divisors fault; the smallest integer divided by -1 wraps.
    fn int_division(&mut self, op: ScalarOp, dtype: DType, x: Value, y: Value) -> Value {
        let ty = clif_type(dtype);
        let zero = self.ins().iconst(ty, 0);
        let by_zero = self.ins().icmp(IntCC::Equal, y, zero);
        self.fault_if(by_zero, status::DIVISION_BY_ZERO);
        if !dtype.is_signed_int() {
            return match op {
                ScalarOp::Div => self.ins().udiv(x, y),
                _ => self.ins().urem(x, y),
            };
        }
        self.signed_division(op, [x, y, zero])
    }

    /// `x` by `y`, which is not zero. A divisor of -1 is replaced by 1, since the machine traps on the one quotient that does not fit.
    fn signed_division(&mut self, op: ScalarOp, [x, y, zero]: [Value; 3]) -> Value {
        let ty = self.b.func.dfg.value_type(x);
        let one = self.ins().iconst(ty, 1);
        let minus = self.ins().iconst(ty, mask(ty));
        let by_minus = self.ins().icmp(IntCC::Equal, y, minus);
        let safe = self.ins().select(by_minus, one, y);
        if op == ScalarOp::Div {
            let quotient = self.ins().sdiv(x, safe);
            let negated = self.ins().ineg(x);
            return self.ins().select(by_minus, negated, quotient);
        }
        let remainder = self.ins().srem(x, safe);
        if op == ScalarOp::Rem {
            return remainder;
        }
        self.floored(remainder, y, zero)
    }

    /// The remainder of a division rounded towards minus infinity, from that of a truncating one.
    fn floored(&mut self, remainder: Value, divisor: Value, zero: Value) -> Value {
        let differ = self.ins().bxor(remainder, divisor);
        let opposite = self.ins().icmp(IntCC::SignedLessThan, differ, zero);
        let inexact = self.ins().icmp(IntCC::NotEqual, remainder, zero);
        let adjust = self.ins().band(opposite, inexact);
        let moved = self.ins().iadd(remainder, divisor);
        self.ins().select(adjust, moved, remainder)
    }

    fn int_pow(&mut self, dtype: DType, x: Value, y: Value) -> Result<Value> {
        // Wrapping arithmetic in 64 bits agrees with the narrower width in its low bits.
        let (wide, name) = match dtype.is_signed_int() {
            true => (DType::I64, "gm_pow_i64"),
            false => (DType::U64, "gm_pow_u64"),
        };
        let (x, y) = (self.cast(x, dtype, wide)?, self.cast(y, dtype, wide)?);
        let power = self.call_for(types::I64, name, &[x, y])?;
        self.cast(power, wide, dtype)
    }

    /// Shifts; a count of the width or more, read as unsigned, leaves only the fill.
    fn int_shift(&mut self, op: ScalarOp, dtype: DType, x: Value, y: Value) -> Value {
        let ty = clif_type(dtype);
        let width = i64::from(ty.bits());
        let limit = self.ins().iconst(ty, width);
        let fits = self.ins().icmp(IntCC::UnsignedLessThan, y, limit);
        let arithmetic = op == ScalarOp::Shr && dtype.is_signed_int();
        let most = self.ins().iconst(ty, width - 1);
        if arithmetic {
            let count = self.ins().select(fits, y, most);
            return self.ins().sshr(x, count);
        }
        let shifted = match op {
            ScalarOp::Shl => self.ins().ishl(x, y),
            _ => self.ins().ushr(x, y),
        };
        let zero = self.ins().iconst(ty, 0);
        self.ins().select(fits, shifted, zero)
    }

    fn cast(&mut self, x: Value, from: DType, to: DType) -> Result<Value> {
        if from == to {
            return Ok(x);
        }
        let is_wide = |dtype| matches!(dtype, DType::F32 | DType::F64);
        Ok(match (from, to) {
            (DType::F32, DType::F64) => self.ins().fpromote(types::F64, x),
            (DType::F64, DType::F32) => self.ins().fdemote(types::F32, x),
            (_, DType::F32) if from.is_narrow_float() => self.widened(x, from)?,
            (_, DType::Bool) => self.is_nonzero(x, from),
            _ if is_wide(from) && to.is_narrow_float() => self.narrowed(x, from, to)?,
            _ if is_wide(from) && !to.is_float() => self.float_to_int(x, to),
            _ if !from.is_float() && is_wide(to) => self.int_to_float(x, from, to),
            _ if !from.is_float() && !to.is_float() => self.resize(x, from, clif_type(to)),
            _ => {
                let message = format!("cast of {from} to {to} was not expanded");
                return Err(Error::internal(message));
            }
        })
    }

    /// Floats of 8 and 16 bits are in registers of integers already.
    fn bit_cast(&mut self, x: Value, to: DType) -> Value {
        if self.b.func.dfg.value_type(x) == clif_type(to) {
            return x;
        }
        self.ins().bitcast(clif_type(to), MemFlagsData::new(), x)
    }

    fn is_nonzero(&mut self, x: Value, dtype: DType) -> Value {
        let zero = self.constant(dtype, 0);
        match dtype.is_float() {
            true => self.ins().fcmp(FloatCC::NotEqual, x, zero),
            false => self.ins().icmp(IntCC::NotEqual, x, zero),
        }
    }

    /// A float of 8 or 16 bits as `f32`.
    fn widened(&mut self, x: Value, from: DType) -> Result<Value> {
        let bits = self.ins().uextend(types::I32, x);
        let name = match from {
            DType::BF16 => {
                let bits = self.ins().ishl_imm_s(bits, 16);
                return Ok(self.ins().bitcast(types::F32, MemFlagsData::new(), bits));
            }
            DType::F16 => "gm_scalar_f16_to_f32",
            _ => float8_function(from).1,
        };
        self.call_for(types::F32, name, &[bits])
    }

    /// An `f32` or `f64` as a float of 8 or 16 bits.
    fn narrowed(&mut self, x: Value, from: DType, to: DType) -> Result<Value> {
        if to.is_float8() {
            let x = self.cast(x, from, DType::F64)?;
            return self.narrow_call(float8_function(to).0, x, types::I8);
        }
        let name = match (from, to) {
            (DType::F32, DType::BF16) => return Ok(self.round_to_bf16(x)),
            (DType::F32, _) => "gm_scalar_f32_to_f16",
            (_, DType::BF16) => "gm_scalar_f64_to_bf16",
            _ => "gm_scalar_f64_to_f16",
        };
        self.narrow_call(name, x, types::I16)
    }

    fn narrow_call(&mut self, name: &'static str, x: Value, to: Type) -> Result<Value> {
        let bits = self.call_for(types::I32, name, &[x])?;
        Ok(self.ins().ireduce(to, bits))
    }

    /// Round to nearest even; NaN keeps its sign and upper bits and becomes quiet.
    fn round_to_bf16(&mut self, x: Value) -> Value {
        let bits = self.ins().bitcast(types::I32, MemFlagsData::new(), x);
        let upper = self.ins().ushr_imm_s(bits, 16);
        let odd = self.ins().band_imm_s(upper, 1);
        let bias = self.ins().iadd_imm_s(odd, 0x7fff);
        let sum = self.ins().iadd(bits, bias);
        let rounded = self.ins().ushr_imm_s(sum, 16);
        let quiet = self.ins().bor_imm_s(upper, 0x40);
        let nan = self.ins().fcmp(FloatCC::Unordered, x, x);
        let bits = self.ins().select(nan, quiet, rounded);
        self.ins().ireduce(types::I16, bits)
    }

    /// Saturates; a NaN becomes 0.
    fn float_to_int(&mut self, x: Value, to: DType) -> Value {
        let ty = clif_type(to);
        match (ty.bits() >= 32, to.is_unsigned_int()) {
            (true, true) => self.ins().fcvt_to_uint_sat(ty, x),
            (true, false) => self.ins().fcvt_to_sint_sat(ty, x),
            (false, _) => self.float_to_small_int(x, to),
        }
    }

    /// The same for integers of 8 and 16 bits.
    fn float_to_small_int(&mut self, x: Value, to: DType) -> Value {
        let (ty, wide) = (clif_type(to), types::I32);
        let (smallest, largest) = match to.is_signed_int() {
            true => (-1i64 << (ty.bits() - 1), (1i64 << (ty.bits() - 1)) - 1),
            false => (0, (1i64 << ty.bits()) - 1),
        };
        let value = self.ins().fcvt_to_sint_sat(wide, x);
        let smallest = self.ins().iconst(wide, smallest & mask(wide));
        let largest = self.ins().iconst(wide, largest);
        let value = self.ins().smax(value, smallest);
        let value = self.ins().smin(value, largest);
        self.ins().ireduce(ty, value)
    }

    fn int_to_float(&mut self, x: Value, from: DType, to: DType) -> Value {
        let ty = clif_type(to);
        if from == DType::U64 {
            return self.ins().fcvt_from_uint(ty, x);
        }
        // Every other integer fits i64 with its sign.
        let wide = self.resize(x, from, types::I64);
        self.ins().fcvt_from_sint(ty, wide)
    }

    /// An integer in another width, wrapping or extended by the source's sign.
    fn resize(&mut self, x: Value, from: DType, to: Type) -> Value {
        let have = clif_type(from);
        match have.bits().cmp(&to.bits()) {
            std::cmp::Ordering::Equal => x,
            std::cmp::Ordering::Greater => self.ins().ireduce(to, x),
            std::cmp::Ordering::Less if from.is_signed_int() => self.ins().sextend(to, x),
            std::cmp::Ordering::Less => self.ins().uextend(to, x),
        }
    }
}

/// The instruction for an op on floats, scalar or in lanes, if there is one that does all of it.
pub(super) fn float_instruction(
    e: &mut Emitter,
    op: ScalarOp,
    x: Value,
    y: Value,
) -> Option<Value> {
    use ScalarOp::*;
    if let Some(order) = float_comparison(op) {
        return Some(e.ins().fcmp(order, x, y));
    }
    Some(match op {
        Neg => e.ins().fneg(x),
        Abs => e.ins().fabs(x),
        Floor => e.ins().floor(x),
        Ceil => e.ins().ceil(x),
        Round => e.ins().nearest(x),
        Trunc => e.ins().trunc(x),
        Sqrt => e.ins().sqrt(x),
        Add => e.ins().fadd(x, y),
        Sub => e.ins().fsub(x, y),
        Mul => e.ins().fmul(x, y),
        Div => e.ins().fdiv(x, y),
        Min => e.ins().fmin(x, y),
        Max => e.ins().fmax(x, y),
        _ => return None,
    })
}

fn float_comparison(op: ScalarOp) -> Option<FloatCC> {
    Some(match op {
        ScalarOp::Eq => FloatCC::Equal,
        ScalarOp::Ne => FloatCC::NotEqual,
        ScalarOp::Lt => FloatCC::LessThan,
        ScalarOp::Le => FloatCC::LessThanOrEqual,
        ScalarOp::Gt => FloatCC::GreaterThan,
        ScalarOp::Ge => FloatCC::GreaterThanOrEqual,
        _ => return None,
    })
}

/// The instruction for an op on integers, scalar or in lanes, if there is one that does all of it. `is_signed` decides comparisons.
pub(super) fn int_instruction(
    e: &mut Emitter,
    op: ScalarOp,
    is_signed: bool,
    x: Value,
    y: Value,
) -> Option<Value> {
    use ScalarOp::*;
    if let Some(order) = int_comparison(op, is_signed) {
        return Some(e.ins().icmp(order, x, y));
    }
    Some(match op {
        Neg => e.ins().ineg(x),
        Abs => e.ins().iabs(x),
        BitNot => e.ins().bnot(x),
        Add => e.ins().iadd(x, y),
        Sub => e.ins().isub(x, y),
        Mul => e.ins().imul(x, y),
        Min => e.ins().smin(x, y),
        Max => e.ins().smax(x, y),
        And | BitAnd => e.ins().band(x, y),
        Or | BitOr => e.ins().bor(x, y),
        Xor | BitXor => e.ins().bxor(x, y),
        _ => return None,
    })
}

fn int_comparison(op: ScalarOp, is_signed: bool) -> Option<IntCC> {
    let signed = match op {
        ScalarOp::Eq => IntCC::Equal,
        ScalarOp::Ne => IntCC::NotEqual,
        ScalarOp::Lt => IntCC::SignedLessThan,
        ScalarOp::Le => IntCC::SignedLessThanOrEqual,
        ScalarOp::Gt => IntCC::SignedGreaterThan,
        ScalarOp::Ge => IntCC::SignedGreaterThanOrEqual,
        _ => return None,
    };
    Some(if is_signed { signed } else { signed.unsigned() })
}

fn no_code(op: ScalarOp, dtype: DType) -> Error {
    Error::internal(format!("no code for {op} of {dtype}"))
}

/// All ones in the width of an integer type: constants must not have bits beyond it.
fn mask(ty: Type) -> i64 {
    if ty.bits() >= 64 {
        -1
    } else {
        (1i64 << ty.bits()) - 1
    }
}

/// Linker names of the conversions to (from `f64`) and from (to `f32`) a float of 8 bits.
fn float8_function(dtype: DType) -> (&'static str, &'static str) {
    match dtype {
        DType::F8E4M3FN => ("gm_scalar_f64_to_f8e4m3fn", "gm_scalar_f8e4m3fn_to_f32"),
        DType::F8E4M3FNUZ => ("gm_scalar_f64_to_f8e4m3fnuz", "gm_scalar_f8e4m3fnuz_to_f32"),
        DType::F8E5M2 => ("gm_scalar_f64_to_f8e5m2", "gm_scalar_f8e5m2_to_f32"),
        _ => ("gm_scalar_f64_to_f8e5m2fnuz", "gm_scalar_f8e5m2fnuz_to_f32"),
    }
}

macro_rules! float_functions {
    ($($op:ident $name32:literal $name64:literal,)*) => {
        /// Linker name of the precompiled function for an op that Cranelift has no instruction for.
        fn float_function(op: ScalarOp, dtype: DType) -> Option<&'static str> {
            match op {
                $(ScalarOp::$op => Some(if dtype == DType::F32 { $name32 } else { $name64 }),)*
                _ => None,
            }
        }
    };
}

float_functions! {
    Exp "gm_exp_f32" "gm_exp_f64",
    Expm1 "gm_expm1_f32" "gm_expm1_f64",
    Log "gm_log_f32" "gm_log_f64",
    Log1p "gm_log1p_f32" "gm_log1p_f64",
    Sin "gm_sin_f32" "gm_sin_f64",
    Cos "gm_cos_f32" "gm_cos_f64",
    Tan "gm_tan_f32" "gm_tan_f64",
    Asin "gm_asin_f32" "gm_asin_f64",
    Acos "gm_acos_f32" "gm_acos_f64",
    Atan "gm_atan_f32" "gm_atan_f64",
    Sinh "gm_sinh_f32" "gm_sinh_f64",
    Cosh "gm_cosh_f32" "gm_cosh_f64",
    Tanh "gm_tanh_f32" "gm_tanh_f64",
    Asinh "gm_asinh_f32" "gm_asinh_f64",
    Acosh "gm_acosh_f32" "gm_acosh_f64",
    Atanh "gm_atanh_f32" "gm_atanh_f64",
    Erf "gm_erf_f32" "gm_erf_f64",
    Pow "gm_pow_f32" "gm_pow_f64",
    Rem "gm_rem_f32" "gm_rem_f64",
    Mod "gm_mod_f32" "gm_mod_f64",
    Atan2 "gm_atan2_f32" "gm_atan2_f64",
}
