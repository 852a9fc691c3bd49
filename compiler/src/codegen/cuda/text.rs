//! CUDA text of dtypes and constants.

use gristmill_runtime::DType;

/// The prelude's type of an element in a register. Half types are structs around their bits.
pub(super) fn element_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool",
        d => d.name(),
    }
}

/// The type of an element in memory.
pub(super) fn memory_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "u8",
        d => d.name(),
    }
}

/// A constant given by the bits of its dtype, zero extended. Negative ones are in parentheses.
pub(super) fn literal(dtype: DType, bits: u64) -> String {
    match dtype {
        DType::F32 => match f32::from_bits(bits as u32) {
            v if v.is_finite() => parenthesised(v.is_sign_negative(), format!("{v:?}f")),
            _ => format!("__uint_as_float({bits:#x}u)"),
        },
        DType::F64 => match f64::from_bits(bits) {
            v if v.is_finite() => parenthesised(v.is_sign_negative(), format!("{v:?}")),
            _ => format!("__longlong_as_double({bits:#x}ll)"),
        },
        d if d.is_narrow_float() => {
            let width = 2 + 2 * d.size_bytes();
            format!("{}{{{bits:#0width$x}}}", d.name())
        }
        DType::Bool => (bits != 0).to_string(),
        d => integer(d, bits),
    }
}

/// An integer given by the bits of its dtype.
fn integer(dtype: DType, bits: u64) -> String {
    match dtype {
        DType::I8 => format!("i8({})", bits as i8),
        DType::I16 => format!("i16({})", bits as i16),
        DType::I32 if bits as i32 == i32::MIN => "(-2147483647 - 1)".to_owned(),
        DType::I32 => signed((bits as i32).into(), ""),
        DType::I64 if bits as i64 == i64::MIN => "(-9223372036854775807ll - 1)".to_owned(),
        DType::I64 => signed(bits as i64, "ll"),
        DType::U8 => format!("u8({bits})"),
        DType::U16 => format!("u16({bits})"),
        DType::U32 => format!("{bits}u"),
        _ => format!("{bits}ull"),
    }
}

fn signed(v: i64, suffix: &str) -> String {
    parenthesised(v < 0, format!("{v}{suffix}"))
}

fn parenthesised(is_negative: bool, text: String) -> String {
    if is_negative {
        format!("({text})")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::vecprog::real_bits;

    #[test]
    fn literals() {
        let text = |d: DType, v: f64| literal(d, real_bits(d, v));
        assert_eq!(text(DType::F32, 0.1), "0.1f");
        assert_eq!(text(DType::F32, 1.0), "1.0f");
        assert_eq!(text(DType::F32, -1e-30), "(-1e-30f)");
        assert_eq!(text(DType::F32, -0.0), "(-0.0f)");
        assert_eq!(
            text(DType::F32, f64::INFINITY),
            "__uint_as_float(0x7f800000u)"
        );
        assert_eq!(
            text(DType::F64, f64::NEG_INFINITY),
            "__longlong_as_double(0xfff0000000000000ll)"
        );
        assert_eq!(text(DType::F64, 0.5), "0.5");
        assert_eq!(text(DType::F16, 1.0), "f16{0x3c00}");
        assert_eq!(text(DType::I8, -3.0), "i8(-3)");
        assert_eq!(text(DType::I32, -2147483648.0), "(-2147483647 - 1)");
        assert_eq!(text(DType::I64, -5.0), "(-5ll)");
        assert_eq!(text(DType::U64, 7.0), "7ull");
        assert_eq!(text(DType::Bool, 1.0), "true");
    }
}
