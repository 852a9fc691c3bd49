//! Primitive element-wise ops on single elements of each dtype.
//!
//! Transcendental functions of `f32` are computed in `f64` and rounded once. Where the op table leaves a choice:
//! `min` and `max` order -0 below +0; shift counts are read as unsigned, so a negative one is "the width or more";
//! `mod` by a float gives a zero the sign of the divisor.

use super::erf::erf;
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Extremum, ScalarOp};
use gristmill_runtime::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};
use gristmill_runtime::half::{bf16, f16};
use gristmill_runtime::{DType, Element, Tensor};

/// Any element without loss: casts go through it.
#[derive(Clone, Copy, Debug)]
pub enum Wide {
    /// From a floating-point dtype.
    Float(f64),
    /// From an integer dtype or `bool`.
    Int(i128),
}

/// An element type with the primitive ops on it. `None` stands for an op outside the dtype's domain; narrow floats have
/// none, because programs widen them first.
pub trait Scalar: Element + PartialOrd {
    /// Identity of `max`: minus infinity or the least number, false.
    const LEAST: Self;
    /// Identity of `min`: infinity or the greatest number, true.
    const GREATEST: Self;

    /// The value, exactly.
    fn to_wide(self) -> Wide;
    /// Conversion as [`ScalarOp::Cast`] documents it.
    fn from_wide(wide: Wide) -> Self;
    /// The one-operand op.
    fn unary(op: ScalarOp) -> Option<fn(Self) -> Self>;
    /// The two-operand op whose result has the operands' dtype. Division by an integer zero must have been excluded.
    fn binary(op: ScalarOp) -> Option<fn(Self, Self) -> Self>;

    /// True for NaN.
    #[allow(clippy::eq_op)]
    fn is_nan(self) -> bool {
        self != self
    }
}

/// The better of two by `<`; NaN is best.
pub fn extreme<T: Scalar>(a: T, b: T, kind: Extremum) -> T {
    if beats(b, a, kind) { b } else { a }
}

/// True when `a` is strictly better than `b`; NaN is better than everything else.
pub fn beats<T: Scalar>(a: T, b: T, kind: Extremum) -> bool {
    if a.is_nan() || b.is_nan() {
        return a.is_nan() && !b.is_nan();
    }
    match kind {
        Extremum::Max => a > b,
        Extremum::Min => a < b,
    }
}

/// The comparison, for any dtype.
pub fn comparison<T: Scalar>(op: ScalarOp) -> Option<fn(T, T) -> bool> {
    Some(match op {
        ScalarOp::Eq => |a, b| a == b,
        ScalarOp::Ne => |a, b| a != b,
        ScalarOp::Lt => |a, b| a < b,
        ScalarOp::Le => |a, b| a <= b,
        ScalarOp::Gt => |a, b| a > b,
        ScalarOp::Ge => |a, b| a >= b,
        _ => return None,
    })
}

/// Evaluates one primitive op on elements given as the bits of their dtype, zero extended (as in
/// [`VecOp::Const`](crate::ir::vecprog::VecOp::Const)). Errors when the dtypes do not fit and for an integer division by 0.
pub fn eval(op: ScalarOp, args: &[(DType, u64)]) -> Result<(DType, u64)> {
    let dtypes: Vec<DType> = args.iter().map(|a| a.0).collect();
    op.result_dtype(&dtypes)
        .map_err(|m| Error::invalid(m).context(op))?;
    let tensors: Vec<Tensor> = args.iter().map(|&(d, bits)| from_bits(d, bits)).collect();
    let result = super::map::primitive(op, &tensors.iter().collect::<Vec<_>>())?;
    Ok((result.dtype(), to_bits(&result)))
}

/// The tensor of rank 0 with the given bits.
pub fn from_bits(dtype: DType, bits: u64) -> Tensor {
    Tensor::from_bytes(dtype, &[], &bits.to_le_bytes()[..dtype.size_bytes()])
        .expect("one element fits rank 0")
}

/// The bits of a one-element tensor, zero extended.
fn to_bits(t: &Tensor) -> u64 {
    let mut bytes = [0; 8];
    bytes[..t.dtype().size_bytes()].copy_from_slice(t.as_bytes());
    u64::from_le_bytes(bytes)
}

/// The tensor of rank 0 with a real value converted as `Cast` would.
pub fn real(dtype: DType, value: f64) -> Tensor {
    from_bits(dtype, real_bits(dtype, value))
}

macro_rules! float_scalar {
    ($($t:ident),*) => { $(
        impl Scalar for $t {
            const LEAST: $t = $t::NEG_INFINITY;
            const GREATEST: $t = $t::INFINITY;

            fn to_wide(self) -> Wide {
                Wide::Float(self.into())
            }

            fn from_wide(wide: Wide) -> $t {
                match wide {
                    Wide::Float(v) => v as $t,
                    Wide::Int(v) => v as $t,
                }
            }

            fn unary(op: ScalarOp) -> Option<fn($t) -> $t> {
                macro_rules! via_f64 {
                    ($f:path) => { |x| $f(f64::from(x)) as $t };
                }
                Some(match op {
                    ScalarOp::Neg => |x| -x,
                    ScalarOp::Abs => $t::abs,
                    ScalarOp::Sign => |x| if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x },
                    ScalarOp::Floor => $t::floor,
                    ScalarOp::Ceil => $t::ceil,
                    ScalarOp::Round => $t::round_ties_even,
                    ScalarOp::Trunc => $t::trunc,
                    ScalarOp::Sqrt => $t::sqrt,
                    ScalarOp::Exp => via_f64!(f64::exp),
                    ScalarOp::Expm1 => via_f64!(f64::exp_m1),
                    ScalarOp::Log => via_f64!(f64::ln),
                    ScalarOp::Log1p => via_f64!(f64::ln_1p),
                    ScalarOp::Sin => via_f64!(f64::sin),
                    ScalarOp::Cos => via_f64!(f64::cos),
                    ScalarOp::Tan => via_f64!(f64::tan),
                    ScalarOp::Asin => via_f64!(f64::asin),
                    ScalarOp::Acos => via_f64!(f64::acos),
                    ScalarOp::Atan => via_f64!(f64::atan),
                    ScalarOp::Sinh => via_f64!(f64::sinh),
                    ScalarOp::Cosh => via_f64!(f64::cosh),
                    ScalarOp::Tanh => via_f64!(f64::tanh),
                    ScalarOp::Asinh => via_f64!(f64::asinh),
                    ScalarOp::Acosh => via_f64!(f64::acosh),
                    ScalarOp::Atanh => via_f64!(f64::atanh),
                    ScalarOp::Erf => via_f64!(erf),
                    _ => return None,
                })
            }

            fn binary(op: ScalarOp) -> Option<fn($t, $t) -> $t> {
                Some(match op {
                    ScalarOp::Add => |a, b| a + b,
                    ScalarOp::Sub => |a, b| a - b,
                    ScalarOp::Mul => |a, b| a * b,
                    ScalarOp::Div => |a, b| a / b,
                    ScalarOp::Rem => |a, b| a % b,
                    ScalarOp::Mod => |a, b| {
                        let r = a % b;
                        match r == 0.0 {
                            true => r.copysign(b),
                            false if (r < 0.0) != (b < 0.0) => r + b,
                            false => r,
                        }
                    },
                    ScalarOp::Pow => |a, b| f64::from(a).powf(b.into()) as $t,
                    ScalarOp::Min => |a, b| {
                        let b_wins = b.is_nan() || b < a || (a == b && b.is_sign_negative());
                        if b_wins && !a.is_nan() { b } else { a }
                    },
                    ScalarOp::Max => |a, b| {
                        let b_wins = b.is_nan() || b > a || (a == b && b.is_sign_positive());
                        if b_wins && !a.is_nan() { b } else { a }
                    },
                    ScalarOp::Atan2 => |a, b| f64::from(a).atan2(b.into()) as $t,
                    _ => return None,
                })
            }
        }
    )* };
}
float_scalar!(f32, f64);

macro_rules! narrow_scalar {
    ($($t:ident $least:ident $greatest:ident),* $(,)?) => { $(
        impl Scalar for $t {
            const LEAST: $t = $t::$least;
            const GREATEST: $t = $t::$greatest;

            fn to_wide(self) -> Wide {
                Wide::Float(self.into())
            }
            fn from_wide(wide: Wide) -> $t {
                match wide {
                    Wide::Float(v) => $t::from_f64(v),
                    Wide::Int(v) => $t::from_f64(v as f64),
                }
            }
            fn unary(_: ScalarOp) -> Option<fn($t) -> $t> {
                None
            }
            fn binary(_: ScalarOp) -> Option<fn($t, $t) -> $t> {
                None
            }
        }
    )* };
}
narrow_scalar! {
    f16 NEG_INFINITY INFINITY,
    bf16 NEG_INFINITY INFINITY,
    F8E4M3FN LEAST GREATEST,
    F8E4M3FNUZ LEAST GREATEST,
    F8E5M2 LEAST GREATEST,
    F8E5M2FNUZ LEAST GREATEST,
}

impl Scalar for bool {
    const LEAST: bool = false;
    const GREATEST: bool = true;

    fn to_wide(self) -> Wide {
        Wide::Int(self.into())
    }
    fn from_wide(wide: Wide) -> bool {
        match wide {
            Wide::Float(v) => v != 0.0,
            Wide::Int(v) => v != 0,
        }
    }
    fn unary(op: ScalarOp) -> Option<fn(bool) -> bool> {
        (op == ScalarOp::Not).then_some(|x| !x)
    }
    fn binary(op: ScalarOp) -> Option<fn(bool, bool) -> bool> {
        Some(match op {
            ScalarOp::And => |a, b| a & b,
            ScalarOp::Or => |a, b| a | b,
            ScalarOp::Xor => |a, b| a ^ b,
            _ => return None,
        })
    }
}

macro_rules! int_scalar {
    ($($t:ident $unary:ident $binary:ident),* $(,)?) => { $(
        impl Scalar for $t {
            const LEAST: $t = $t::MIN;
            const GREATEST: $t = $t::MAX;

            fn to_wide(self) -> Wide {
                Wide::Int(self.into())
            }
            fn from_wide(wide: Wide) -> $t {
                match wide {
                    Wide::Float(v) => v as $t,
                    Wide::Int(v) => v as $t,
                }
            }
            fn unary(op: ScalarOp) -> Option<fn($t) -> $t> {
                Some(match op {
                    ScalarOp::Neg => $t::wrapping_neg,
                    ScalarOp::BitNot => |x| !x,
                    op => return $unary!($t, op),
                })
            }
            fn binary(op: ScalarOp) -> Option<fn($t, $t) -> $t> {
                Some(match op {
                    ScalarOp::Add => $t::wrapping_add,
                    ScalarOp::Sub => $t::wrapping_sub,
                    ScalarOp::Mul => $t::wrapping_mul,
                    ScalarOp::Div => $t::wrapping_div,
                    ScalarOp::Rem => $t::wrapping_rem,
                    ScalarOp::Min => |a, b| a.min(b),
                    ScalarOp::Max => |a, b| a.max(b),
                    ScalarOp::BitAnd => |a, b| a & b,
                    ScalarOp::BitOr => |a, b| a | b,
                    ScalarOp::BitXor => |a, b| a ^ b,
                    ScalarOp::Shl => |a, n| u32::try_from(n).ok().and_then(|n| a.checked_shl(n)).unwrap_or(0),
                    op => return $binary!($t, op),
                })
            }
        }
    )* };
}

macro_rules! signed_unary {
    ($t:ident, $op:expr) => {
        match $op {
            ScalarOp::Abs => Some($t::wrapping_abs),
            ScalarOp::Sign => Some($t::signum),
            _ => None,
        }
    };
}

macro_rules! unsigned_unary {
    ($t:ident, $op:expr) => {
        match $op {
            ScalarOp::Abs => Some(|x| x),
            ScalarOp::Sign => Some(|x| x.min(1)),
            _ => None,
        }
    };
}

macro_rules! signed_binary {
    ($t:ident, $op:expr) => {
        Some(match $op {
            ScalarOp::Mod => |a, b| {
                let r = a.wrapping_rem(b);
                if r != 0 && (r < 0) != (b < 0) {
                    r + b
                } else {
                    r
                }
            },
            ScalarOp::Pow => |a, n| match (a, n) {
                (_, 0..) => pow(a, n as u64, $t::wrapping_mul),
                (1, _) => 1,
                (-1, _) => 1 - 2 * (n & 1),
                _ => 0,
            },
            ScalarOp::Shr => |a, n| a >> u32::try_from(n).unwrap_or(u32::MAX).min($t::BITS - 1),
            _ => return None,
        })
    };
}

macro_rules! unsigned_binary {
    ($t:ident, $op:expr) => {
        Some(match $op {
            ScalarOp::Mod => $t::wrapping_rem,
            ScalarOp::Pow => |a, n| pow(a, n.into(), $t::wrapping_mul),
            ScalarOp::Shr => |a, n| {
                u32::try_from(n)
                    .ok()
                    .and_then(|n| a.checked_shr(n))
                    .unwrap_or(0)
            },
            _ => return None,
        })
    };
}

int_scalar! {
    i8 signed_unary signed_binary,
    i16 signed_unary signed_binary,
    i32 signed_unary signed_binary,
    i64 signed_unary signed_binary,
    u8 unsigned_unary unsigned_binary,
    u16 unsigned_unary unsigned_binary,
    u32 unsigned_unary unsigned_binary,
    u64 unsigned_unary unsigned_binary,
}

/// `base^exponent` by repeated squaring.
fn pow<T: Copy + From<bool>>(mut base: T, mut exponent: u64, mul: fn(T, T) -> T) -> T {
    let mut result = T::from(true);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = mul(result, base);
        }
        base = mul(base, base);
        exponent >>= 1;
    }
    result
}
