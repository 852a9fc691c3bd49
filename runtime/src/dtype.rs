//! Element types of tensors, and the Rust types that stand for them.

use gristmill_kernels::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, Format};
use half::{bf16, f16};
use std::fmt;

/// A Rust type that can be a tensor element: plain data without padding. `bool` is one byte, 0 or 1.
pub trait Element: Copy + Send + Sync + PartialEq + fmt::Debug + Default + 'static {
    /// The dtype that this type stands for.
    const DTYPE: DType;

    /// The value; 64-bit integers round, `bool` is 0 or 1.
    fn to_f64(self) -> f64;

    /// The nearest value, rounded once: integers truncate and saturate, NaN gives them 0; for `bool`, whether it is not 0.
    fn from_f64(v: f64) -> Self;
}

/// Conversions of numbers that `as` converts.
macro_rules! primitive {
    () => {
        fn to_f64(self) -> f64 {
            self as f64
        }
        fn from_f64(v: f64) -> Self {
            v as Self
        }
    };
}

/// Conversions of types with methods for it.
macro_rules! narrow {
    () => {
        fn to_f64(self) -> f64 {
            Self::to_f64(self)
        }
        fn from_f64(v: f64) -> Self {
            Self::from_f64(v)
        }
    };
}

/// Conversions of `bool`.
macro_rules! truth {
    () => {
        fn to_f64(self) -> f64 {
            f64::from(u8::from(self))
        }
        fn from_f64(v: f64) -> Self {
            v != 0.0
        }
    };
}

/// Declares the dtypes once: variant, text name, Rust type, how it is converted.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $ty:ty as $number:ident),* $(,)?) => {
        /// Element type of a tensor. Text names are those of the IR (`f32`, `i64`, `bool`, ...).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum DType { $($(#[$doc])* $variant),* }

        impl DType {
            /// All dtypes in declaration order.
            pub const ALL: &'static [DType] = &[$(DType::$variant),*];

            /// The text name, as the IR prints it.
            pub fn name(self) -> &'static str {
                match self { $(DType::$variant => $name),* }
            }

            /// Parses a text name.
            pub fn parse(name: &str) -> Option<DType> {
                match name { $($name => Some(DType::$variant),)* _ => None }
            }

            /// Bytes of one element.
            pub fn size_bytes(self) -> usize {
                match self { $(DType::$variant => size_of::<$ty>()),* }
            }
        }

        $(impl Element for $ty {
            const DTYPE: DType = DType::$variant;
            $number!();
        })*
    };
}

dtypes! {
    /// IEEE 754 binary32.
    F32 "f32" f32 as primitive,
    /// IEEE 754 binary64.
    F64 "f64" f64 as primitive,
    /// IEEE 754 binary16.
    F16 "f16" f16 as narrow,
    /// bfloat16: the upper half of binary32.
    BF16 "bf16" bf16 as narrow,
    /// 8-bit float of 4 exponent and 3 fraction bits without infinity (OFP8).
    F8E4M3FN "f8e4m3fn" F8E4M3FN as narrow,
    /// As `f8e4m3fn` with one zero.
    F8E4M3FNUZ "f8e4m3fnuz" F8E4M3FNUZ as narrow,
    /// 8-bit float of 5 exponent and 2 fraction bits (OFP8).
    F8E5M2 "f8e5m2" F8E5M2 as narrow,
    /// As `f8e5m2` with one zero and no infinity.
    F8E5M2FNUZ "f8e5m2fnuz" F8E5M2FNUZ as narrow,
    /// Signed 8-bit.
    I8 "i8" i8 as primitive,
    /// Signed 16-bit.
    I16 "i16" i16 as primitive,
    /// Signed 32-bit.
    I32 "i32" i32 as primitive,
    /// Signed 64-bit.
    I64 "i64" i64 as primitive,
    /// Unsigned 8-bit.
    U8 "u8" u8 as primitive,
    /// Unsigned 16-bit.
    U16 "u16" u16 as primitive,
    /// Unsigned 32-bit.
    U32 "u32" u32 as primitive,
    /// Unsigned 64-bit.
    U64 "u64" u64 as primitive,
    /// Truth value in one byte.
    Bool "bool" bool as truth,
}

impl DType {
    /// Any floating-point dtype.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64) || self.is_narrow_float()
    }

    /// A float of 16 or 8 bits: storage, which is computed with in `f32` and rounded once.
    pub fn is_narrow_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16) || self.is_float8()
    }

    /// A float of 8 bits.
    pub fn is_float8(self) -> bool {
        self.float8().is_some()
    }

    /// Format of a float of 8 bits; `None` for other types.
    pub fn float8(self) -> Option<Format> {
        match self {
            DType::F8E4M3FN => Some(F8E4M3FN::FORMAT),
            DType::F8E4M3FNUZ => Some(F8E4M3FNUZ::FORMAT),
            DType::F8E5M2 => Some(F8E5M2::FORMAT),
            DType::F8E5M2FNUZ => Some(F8E5M2FNUZ::FORMAT),
            _ => None,
        }
    }

    /// Signed or unsigned integer; `bool` is not one.
    pub fn is_int(self) -> bool {
        !self.is_float() && self != DType::Bool
    }

    /// Signed integer.
    pub fn is_signed_int(self) -> bool {
        matches!(self, DType::I8 | DType::I16 | DType::I32 | DType::I64)
    }

    /// Unsigned integer.
    pub fn is_unsigned_int(self) -> bool {
        self.is_int() && !self.is_signed_int()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Runs an expression with a type alias bound to the Rust type of a dtype: `with_dtype!(t.dtype(), T => f::<T>(t))`.
#[macro_export]
macro_rules! with_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::DType::F16 => {
                type $T = $crate::half::f16;
                $body
            }
            $crate::DType::BF16 => {
                type $T = $crate::half::bf16;
                $body
            }
            $crate::DType::F8E4M3FN => {
                type $T = $crate::float8::F8E4M3FN;
                $body
            }
            $crate::DType::F8E4M3FNUZ => {
                type $T = $crate::float8::F8E4M3FNUZ;
                $body
            }
            $crate::DType::F8E5M2 => {
                type $T = $crate::float8::F8E5M2;
                $body
            }
            $crate::DType::F8E5M2FNUZ => {
                type $T = $crate::float8::F8E5M2FNUZ;
                $body
            }
            $crate::DType::I8 => {
                type $T = i8;
                $body
            }
            $crate::DType::I16 => {
                type $T = i16;
                $body
            }
            $crate::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::DType::U8 => {
                type $T = u8;
                $body
            }
            $crate::DType::U16 => {
                type $T = u16;
                $body
            }
            $crate::DType::U32 => {
                type $T = u32;
                $body
            }
            $crate::DType::U64 => {
                type $T = u64;
                $body
            }
            $crate::DType::Bool => {
                type $T = bool;
                $body
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for &d in DType::ALL {
            assert_eq!(DType::parse(d.name()), Some(d));
        }
        assert_eq!(DType::parse("f8"), None);
    }
}
