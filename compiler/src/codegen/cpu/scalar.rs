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
            DType::F32 => self.b.ins().f32const(f32::from_bits(bits as u32)),
            DType::F64 => self.b.ins().f64const(f64::from_bits(bits)),
            _ => self
                .b
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
        if op == ScalarOp::Select {
            return Ok(self.b.ins().select(args[0], args[1], args[2]));
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
        use ScalarOp::*;
        let x = args[0];
        let y = *args.get(1).unwrap_or(&x);
        Ok(match op {
            Neg => self.b.ins().fneg(x),
            Abs => self.b.ins().fabs(x),
            Sign => self.float_sign(dtype, x),
            Floor => self.b.ins().floor(x),
            Ceil => self.b.ins().ceil(x),
            Round => self.b.ins().nearest(x),
            Trunc => self.b.ins().trunc(x),
            Sqrt => self.b.ins().sqrt(x),
            Add => self.b.ins().fadd(x, y),
            Sub => self.b.ins().fsub(x, y),
            Mul => self.b.ins().fmul(x, y),
            Div => self.b.ins().fdiv(x, y),
            Min => self.b.ins().fmin(x, y),
            Max => self.b.ins().fmax(x, y),
            Eq => self.b.ins().fcmp(FloatCC::Equal, x, y),
            Ne => self.b.ins().fcmp(FloatCC::NotEqual, x, y),
            Lt => self.b.ins().fcmp(FloatCC::LessThan, x, y),
            Le => self.b.ins().fcmp(FloatCC::LessThanOrEqual, x, y),
            Gt => self.b.ins().fcmp(FloatCC::GreaterThan, x, y),
            Ge => self.b.ins().fcmp(FloatCC::GreaterThanOrEqual, x, y),
            _ => {
                let name = float_function(op, dtype)
                    .ok_or_else(|| Error::internal(format!("no code for {op} of {dtype}")))?;
                self.call(name, args, Some(clif_type(dtype)))?
                    .expect("declared with a result")
            }
        })
    }

    fn float_sign(&mut self, dtype: DType, x: Value) -> Value {
        let (zero, one) = (
            self.constant(dtype, 0),
            self.constant(dtype, crate::ir::vecprog::real_bits(dtype, 1.0)),
        );
        let minus = self.b.ins().fneg(one);
        let above = self.b.ins().fcmp(FloatCC::GreaterThan, x, zero);
        let below = self.b.ins().fcmp(FloatCC::LessThan, x, zero);
        let rest = self.b.ins().select(below, minus, x);
        self.b.ins().select(above, one, rest)
    }

    fn int_op(&mut self, op: ScalarOp, dtype: DType, args: &[Value]) -> Result<Value> {
        use ScalarOp::*;
        let x = args[0];
        let y = *args.get(1).unwrap_or(&x);
        let signed = dtype.is_signed_int();
        let cc = |s: IntCC, u: IntCC| if signed { s } else { u };
        Ok(match op {
            Neg => self.b.ins().ineg(x),
            Abs if signed => self.b.ins().iabs(x),
            Abs => x,
            Sign => self.int_sign(dtype, x),
            Not => self.b.ins().bxor_imm_s(x, 1),
            BitNot => self.b.ins().bnot(x),
            Add => self.b.ins().iadd(x, y),
            Sub => self.b.ins().isub(x, y),
            Mul => self.b.ins().imul(x, y),
            Div | Rem | Mod => self.int_division(op, dtype, x, y),
            Pow => self.int_pow(dtype, x, y)?,
            Min if signed => self.b.ins().smin(x, y),
            Min => self.b.ins().umin(x, y),
            Max if signed => self.b.ins().smax(x, y),
            Max => self.b.ins().umax(x, y),
            And | BitAnd => self.b.ins().band(x, y),
            Or | BitOr => self.b.ins().bor(x, y),
            Xor | BitXor => self.b.ins().bxor(x, y),
            Shl | Shr => self.int_shift(op, dtype, x, y),
            Eq => self.b.ins().icmp(IntCC::Equal, x, y),
            Ne => self.b.ins().icmp(IntCC::NotEqual, x, y),
            Lt => self
                .b
                .ins()
                .icmp(cc(IntCC::SignedLessThan, IntCC::UnsignedLessThan), x, y),
            Le => self.b.ins().icmp(
                cc(IntCC::SignedLessThanOrEqual, IntCC::UnsignedLessThanOrEqual),
                x,
                y,
            ),
            Gt => self.b.ins().icmp(
                cc(IntCC::SignedGreaterThan, IntCC::UnsignedGreaterThan),
                x,
                y,
            ),
            Ge => self.b.ins().icmp(
                cc(
                    IntCC::SignedGreaterThanOrEqual,
                    IntCC::UnsignedGreaterThanOrEqual,
                ),
                x,
                y,
            ),
            _ => return Err(Error::internal(format!("no code for {op} of {dtype}"))),
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
            self.b.ins().iconst(ty, 0),
            self.b.ins().iconst(ty, 1),
            self.b.ins().iconst(ty, mask(ty)),
        );
        let above = self.b.ins().icmp(positive, x, zero);
        let is_zero = self.b.ins().icmp(IntCC::Equal, x, zero);
        let rest = self.b.ins().select(is_zero, zero, minus);
        self.b.ins().select(above, one, rest)
    }

    /// Truncating division and both remainders. Zero divisors fault; the least integer divided by -1 wraps.
    fn int_division(&mut self, op: ScalarOp, dtype: DType, x: Value, y: Value) -> Value {
        let ty = clif_type(dtype);
        let zero = self.b.ins().iconst(ty, 0);
        let by_zero = self.b.ins().icmp(IntCC::Equal, y, zero);
        self.fault_if(by_zero, status::DIVISION_BY_ZERO);
        if !dtype.is_signed_int() {
            return match op {
                ScalarOp::Div => self.b.ins().udiv(x, y),
                _ => self.b.ins().urem(x, y),
            };
        }
        // A divisor of -1 is replaced by 1, since the machine traps on the one quotient that does not fit.
        let (one, minus) = (
            self.b.ins().iconst(ty, 1),
            self.b.ins().iconst(ty, mask(ty)),
        );
        let by_minus = self.b.ins().icmp(IntCC::Equal, y, minus);
        let safe = self.b.ins().select(by_minus, one, y);
        if op == ScalarOp::Div {
            let quotient = self.b.ins().sdiv(x, safe);
            let negated = self.b.ins().ineg(x);
            return self.b.ins().select(by_minus, negated, quotient);
        }
        let rem = self.b.ins().srem(x, safe);
        if op == ScalarOp::Rem {
            return rem;
        }
        let differ = self.b.ins().bxor(rem, y);
        let opposite = self.b.ins().icmp(IntCC::SignedLessThan, differ, zero);
        let inexact = self.b.ins().icmp(IntCC::NotEqual, rem, zero);
        let adjust = self.b.ins().band(opposite, inexact);
        let moved = self.b.ins().iadd(rem, y);
        self.b.ins().select(adjust, moved, rem)
    }

    fn int_pow(&mut self, dtype: DType, x: Value, y: Value) -> Result<Value> {
        // Wrapping arithmetic in 64 bits agrees with the narrower width in its low bits.
        let wide = if dtype.is_signed_int() {
            DType::I64
        } else {
            DType::U64
        };
        let name = if dtype.is_signed_int() {
            "gm_pow_i64"
        } else {
            "gm_pow_u64"
        };
        let (x, y) = (self.cast(x, dtype, wide)?, self.cast(y, dtype, wide)?);
        let power = self
            .call(name, &[x, y], Some(types::I64))?
            .expect("declared with a result");
        self.cast(power, wide, dtype)
    }

    /// Shifts; a count of the width or more, read as unsigned, leaves only the fill.
    fn int_shift(&mut self, op: ScalarOp, dtype: DType, x: Value, y: Value) -> Value {
        let ty = clif_type(dtype);
        let width = i64::from(ty.bits());
        let limit = self.b.ins().iconst(ty, width);
        let fits = self.b.ins().icmp(IntCC::UnsignedLessThan, y, limit);
        let arithmetic = op == ScalarOp::Shr && dtype.is_signed_int();
        let most = self.b.ins().iconst(ty, width - 1);
        if arithmetic {
            let count = self.b.ins().select(fits, y, most);
            return self.b.ins().sshr(x, count);
        }
        let shifted = match op {
            ScalarOp::Shl => self.b.ins().ishl(x, y),
            _ => self.b.ins().ushr(x, y),
        };
        let zero = self.b.ins().iconst(ty, 0);
        self.b.ins().select(fits, shifted, zero)
    }

    fn cast(&mut self, x: Value, from: DType, to: DType) -> Result<Value> {
        if from == to {
            return Ok(x);
        }
        Ok(match (from, to) {
            (DType::F16, DType::F32) => {
                let bits = self.b.ins().uextend(types::I32, x);
                self.call("gm_scalar_f16_to_f32", &[bits], Some(types::F32))?
                    .expect("declared with a result")
            }
            (DType::BF16, DType::F32) => {
                let bits = self.b.ins().uextend(types::I32, x);
                let bits = self.b.ins().ishl_imm_s(bits, 16);
                self.b.ins().bitcast(types::F32, MemFlagsData::new(), bits)
            }
            (d, DType::F32) if d.is_float8() => {
                let bits = self.b.ins().uextend(types::I32, x);
                self.call(float8_function(d).1, &[bits], Some(types::F32))?
                    .expect("declared with a result")
            }
            (DType::F32 | DType::F64, d) if d.is_float8() => {
                let x = self.cast(x, from, DType::F64)?;
                self.narrow_call(float8_function(d).0, x, types::I8)?
            }
            (DType::F32, DType::BF16) => self.round_to_bf16(x),
            (DType::F32, DType::F16) => self.narrow_call("gm_scalar_f32_to_f16", x, types::I16)?,
            (DType::F64, DType::F16) => self.narrow_call("gm_scalar_f64_to_f16", x, types::I16)?,
            (DType::F64, DType::BF16) => {
                self.narrow_call("gm_scalar_f64_to_bf16", x, types::I16)?
            }
            (DType::F32, DType::F64) => self.b.ins().fpromote(types::F64, x),
            (DType::F64, DType::F32) => self.b.ins().fdemote(types::F32, x),
            (_, DType::Bool) if from.is_float() => {
                let zero = self.constant(from, 0);
                self.b.ins().fcmp(FloatCC::NotEqual, x, zero)
            }
            (_, DType::Bool) => {
                let zero = self.constant(from, 0);
                self.b.ins().icmp(IntCC::NotEqual, x, zero)
            }
            (DType::F32 | DType::F64, _) if !to.is_float() => self.float_to_int(x, to),
            (_, DType::F32 | DType::F64) if !from.is_float() => self.int_to_float(x, from, to),
            _ if !from.is_float() && !to.is_float() => self.resize(x, from, clif_type(to)),
            _ => {
                return Err(Error::internal(format!(
                    "cast of {from} to {to} was not expanded"
                )));
            }
        })
    }

    fn narrow_call(&mut self, name: &'static str, x: Value, to: Type) -> Result<Value> {
        let bits = self
            .call(name, &[x], Some(types::I32))?
            .expect("declared with a result");
        Ok(self.b.ins().ireduce(to, bits))
    }

    /// Round to nearest even; NaN keeps its sign and upper bits and becomes quiet.
    fn round_to_bf16(&mut self, x: Value) -> Value {
        let bits = self.b.ins().bitcast(types::I32, MemFlagsData::new(), x);
        let upper = self.b.ins().ushr_imm_s(bits, 16);
        let odd = self.b.ins().band_imm_s(upper, 1);
        let bias = self.b.ins().iadd_imm_s(odd, 0x7fff);
        let sum = self.b.ins().iadd(bits, bias);
        let rounded = self.b.ins().ushr_imm_s(sum, 16);
        let quiet = self.b.ins().bor_imm_s(upper, 0x40);
        let nan = self.b.ins().fcmp(FloatCC::Unordered, x, x);
        let bits = self.b.ins().select(nan, quiet, rounded);
        self.b.ins().ireduce(types::I16, bits)
    }

    fn float_to_int(&mut self, x: Value, to: DType) -> Value {
        let ty = clif_type(to);
        let wide = if ty.bits() < 32 { types::I32 } else { ty };
        if ty.bits() >= 32 && to.is_unsigned_int() {
            return self.b.ins().fcvt_to_uint_sat(wide, x);
        }
        let v = self.b.ins().fcvt_to_sint_sat(wide, x);
        if ty.bits() >= 32 {
            return v;
        }
        let (lo, hi) = match to.is_signed_int() {
            true => (-1i64 << (ty.bits() - 1), (1i64 << (ty.bits() - 1)) - 1),
            false => (0, (1i64 << ty.bits()) - 1),
        };
        let (lo, hi) = (
            self.b.ins().iconst(wide, lo & mask(wide)),
            self.b.ins().iconst(wide, hi),
        );
        let v = self.b.ins().smax(v, lo);
        let v = self.b.ins().smin(v, hi);
        self.b.ins().ireduce(ty, v)
    }

    fn int_to_float(&mut self, x: Value, from: DType, to: DType) -> Value {
        let ty = clif_type(to);
        if from == DType::U64 {
            return self.b.ins().fcvt_from_uint(ty, x);
        }
        // Every other integer fits i64 with its sign.
        let wide = self.resize(x, from, types::I64);
        self.b.ins().fcvt_from_sint(ty, wide)
    }

    /// An integer in another width, wrapping or extended by the source's sign.
    fn resize(&mut self, x: Value, from: DType, to: Type) -> Value {
        let have = clif_type(from);
        match have.bits().cmp(&to.bits()) {
            std::cmp::Ordering::Equal => x,
            std::cmp::Ordering::Greater => self.b.ins().ireduce(to, x),
            std::cmp::Ordering::Less if from.is_signed_int() => self.b.ins().sextend(to, x),
            std::cmp::Ordering::Less => self.b.ins().uextend(to, x),
        }
    }
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
