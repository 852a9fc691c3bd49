//! Element types of tensors, and the Rust types that stand for them.

use half::{bf16, f16};
use std::fmt;

/// A Rust type that can be a tensor element: plain data without padding. `bool` is one byte, 0 or 1.
pub trait Element: Copy + Send + Sync + PartialEq + fmt::Debug + Default + 'static {
    /// The dtype that this type stands for.
    const DTYPE: DType;
}

/// Declares the dtypes once: variant, text name, Rust type.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $ty:ty),* $(,)?) => {
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

        $(impl Element for $ty { const DTYPE: DType = DType::$variant; })*
    };
}

dtypes! {
    /// IEEE 754 binary32.
    F32 "f32" f32,
    /// IEEE 754 binary64.
    F64 "f64" f64,
    /// IEEE 754 binary16.
    F16 "f16" f16,
    /// bfloat16: the upper half of binary32.
    BF16 "bf16" bf16,
    /// Signed 8-bit.
    I8 "i8" i8,
    /// Signed 16-bit.
    I16 "i16" i16,
    /// Signed 32-bit.
    I32 "i32" i32,
    /// Signed 64-bit.
    I64 "i64" i64,
    /// Unsigned 8-bit.
    U8 "u8" u8,
    /// Unsigned 16-bit.
    U16 "u16" u16,
    /// Unsigned 32-bit.
    U32 "u32" u32,
    /// Unsigned 64-bit.
    U64 "u64" u64,
    /// Truth value in one byte.
    Bool "bool" bool,
}

impl DType {
    /// `f16`, `bf16`, `f32`, `f64`.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
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
