//! The scalar types of PTX that operands and variables have.

/// A fundamental or packed type, as a suffix of an opcode or in a declaration names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    BF16,
    TF32,
    F32,
    F64,
    U16x2,
    S16x2,
    F16x2,
    BF16x2,
    F32x2,
    E4M3,
    E5M2,
    E4M3x2,
    E5M2x2,
}

/// Names as PTX writes them, without the dot.
const NAMES: &[(&str, Type)] = &[
    ("pred", Type::Pred),
    ("b8", Type::B8),
    ("b16", Type::B16),
    ("b32", Type::B32),
    ("b64", Type::B64),
    ("b128", Type::B128),
    ("u8", Type::U8),
    ("u16", Type::U16),
    ("u32", Type::U32),
    ("u64", Type::U64),
    ("s8", Type::S8),
    ("s16", Type::S16),
    ("s32", Type::S32),
    ("s64", Type::S64),
    ("f16", Type::F16),
    ("bf16", Type::BF16),
    ("tf32", Type::TF32),
    ("f32", Type::F32),
    ("f64", Type::F64),
    ("u16x2", Type::U16x2),
    ("s16x2", Type::S16x2),
    ("f16x2", Type::F16x2),
    ("bf16x2", Type::BF16x2),
    ("f32x2", Type::F32x2),
    ("e4m3", Type::E4M3),
    ("e5m2", Type::E5M2),
    ("e4m3x2", Type::E4M3x2),
    ("e5m2x2", Type::E5M2x2),
];

impl Type {
    /// The type that `name` (no leading dot) stands for.
    pub fn parse(name: &str) -> Option<Type> {
        NAMES.iter().find(|(n, _)| *n == name).map(|(_, t)| *t)
    }

    /// As PTX writes it, without the dot.
    pub fn name(self) -> &'static str {
        NAMES
            .iter()
            .find(|(_, t)| *t == self)
            .map_or("?", |(n, _)| *n)
    }

    /// Bytes in memory; predicates have none.
    pub fn size_bytes(self) -> usize {
        use Type::*;
        match self {
            Pred => 0,
            B8 | U8 | S8 | E4M3 | E5M2 => 1,
            B16 | U16 | S16 | F16 | BF16 | E4M3x2 | E5M2x2 => 2,
            B32 | U32 | S32 | TF32 | F32 | U16x2 | S16x2 | F16x2 | BF16x2 => 4,
            B64 | U64 | S64 | F64 | F32x2 => 8,
            B128 => 16,
        }
    }

    /// Registers of 32 lanes x 32 bits that a value occupies; predicates are kept apart.
    pub fn units(self) -> u32 {
        (self.size_bytes() as u32).div_ceil(4)
    }

    pub fn is_signed(self) -> bool {
        matches!(
            self,
            Type::S8 | Type::S16 | Type::S32 | Type::S64 | Type::S16x2
        )
    }
}
