//! Primitive element-wise ops as CUDA expressions: an operator of C++ where it has the op's
//! meaning, otherwise a function of the prelude.

use super::emit::{Emitter, Value};
use super::text::element_type;
use crate::error::{Error, Result};
use crate::ir::ScalarOp;
use gristmill_runtime::DType;

impl Emitter {
    /// The expression of one primitive op on elements of dtype `from`, giving `to`.
    pub(super) fn expression(
        &mut self,
        op: ScalarOp,
        from: DType,
        to: DType,
        args: &[Value],
    ) -> Result<String> {
        let text: Vec<String> = args.iter().map(|&a| self.text(a).to_owned()).collect();
        let x = text[0].as_str();
        let y = text.get(1).map_or(x, String::as_str);
        let lacking = || Error::internal(format!("no CUDA code for {op} of {from}"));
        if let ScalarOp::Cast(_) = op {
            return cast(x, from, to);
        }
        if let ScalarOp::BitCast(_) = op {
            return Ok(bit_cast(x, from, to));
        }
        if let (ScalarOp::Select, [c, yes, no]) = (op, &text[..]) {
            return Ok(format!("{c} ? {yes} : {no}"));
        }
        if let Some(sign) = comparison(op) {
            return Ok(format!("{x} {sign} {y}"));
        }
        match from {
            DType::F32 | DType::F64 => float(op, from == DType::F32, x, y).ok_or_else(lacking),
            DType::Bool => truth(op, x, y).ok_or_else(lacking),
            d if d.is_narrow_float() => {
                Err(Error::internal(format!("{op} of {from} was not widened")))
            }
            _ => self.integer(op, from, x, y).ok_or_else(lacking),
        }
    }

    fn integer(&mut self, op: ScalarOp, dtype: DType, x: &str, y: &str) -> Option<String> {
        use ScalarOp::*;
        let ty = element_type(dtype);
        Some(match op {
            Neg | Abs | Sign => format!("gm_{op}({x})"),
            BitNot => format!("{ty}(~{x})"),
            Add | Sub | Mul | Pow | Min | Max | Shl | Shr => format!("gm_{op}({x}, {y})"),
            Div | Rem | Mod => format!("gm_{op}({x}, {y}, {})", self.status()),
            BitAnd => format!("{ty}({x} & {y})"),
            BitOr => format!("{ty}({x} | {y})"),
            BitXor => format!("{ty}({x} ^ {y})"),
            _ => return None,
        })
    }
}

fn comparison(op: ScalarOp) -> Option<&'static str> {
    Some(match op {
        ScalarOp::Eq => "==",
        ScalarOp::Ne => "!=",
        ScalarOp::Lt => "<",
        ScalarOp::Le => "<=",
        ScalarOp::Gt => ">",
        ScalarOp::Ge => ">=",
        _ => return None,
    })
}

fn truth(op: ScalarOp, x: &str, y: &str) -> Option<String> {
    Some(match op {
        ScalarOp::Not => format!("!{x}"),
        ScalarOp::And => format!("{x} && {y}"),
        ScalarOp::Or => format!("{x} || {y}"),
        ScalarOp::Xor => format!("{x} != {y}"),
        _ => return None,
    })
}

fn float(op: ScalarOp, single: bool, x: &str, y: &str) -> Option<String> {
    use ScalarOp::*;
    let name = match op {
        Neg => return Some(format!("-{x}")),
        Add => return Some(format!("{x} + {y}")),
        Sub => return Some(format!("{x} - {y}")),
        Mul => return Some(format!("{x} * {y}")),
        Div => return Some(format!("{x} / {y}")),
        Sign => return Some(format!("gm_sign({x})")),
        Min | Max | Mod => return Some(format!("gm_{op}({x}, {y})")),
        Abs => "fabs",
        Round => "rint",
        Rem => "fmod",
        Floor | Ceil | Trunc | Sqrt | Exp | Expm1 | Log | Log1p | Sin | Cos | Tan | Asin | Acos
        | Atan | Sinh | Cosh | Tanh | Asinh | Acosh | Atanh | Erf | Pow | Atan2 => op.spec().name,
        _ => return None,
    };
    let suffix = if single { "f" } else { "" };
    Some(match op.spec().arity {
        2 => format!("{name}{suffix}({x}, {y})"),
        _ => format!("{name}{suffix}({x})"),
    })
}

fn cast(x: &str, from: DType, to: DType) -> Result<String> {
    let ty = element_type(to);
    Ok(match (from, to) {
        _ if from == to => x.to_owned(),
        (d, DType::F32) if d.is_narrow_float() => format!("gm_f32({x})"),
        (DType::F32 | DType::F64, d) if d.is_narrow_float() => format!("gm_{ty}({x})"),
        _ if from.is_narrow_float() || to.is_narrow_float() => {
            return Err(Error::internal(format!(
                "cast of {from} to {to} was not expanded"
            )));
        }
        (_, DType::Bool) => format!("{x} != {ty}(0)", ty = element_type(from)),
        _ if from.is_float() && !to.is_float() => format!("gm_from_float<{ty}>::of({x})"),
        _ => format!("{ty}({x})"),
    })
}

/// Floats of 8 and 16 bits are structures of their bits.
fn bit_cast(x: &str, from: DType, to: DType) -> String {
    let bits = match from {
        DType::F32 => format!("__float_as_uint({x})"),
        DType::F64 => format!("__double_as_longlong({x})"),
        d if d.is_narrow_float() => format!("{x}.bits"),
        _ => x.to_owned(),
    };
    let ty = element_type(to);
    match to {
        DType::F32 => format!("__uint_as_float({bits})"),
        DType::F64 => format!("__longlong_as_double({bits})"),
        d if d.is_float8() => format!("{ty}{{u8({bits})}}"),
        d if d.is_narrow_float() => format!("{ty}{{u16({bits})}}"),
        _ => format!("{ty}({bits})"),
    }
}
