//! Integer operations as PTX defines them, generic over width and sign.

use crate::lanes::Lane;

/// An integer type of PTX registers.
pub(crate) trait Integer: Lane {
    /// Twice as wide.
    type Wide: Lane;
    fn multiply_wide(a: Self, b: Self) -> Self::Wide;
    /// Upper half of the product.
    fn multiply_high(a: Self, b: Self) -> Self;
    /// Counts beyond the width give 0.
    fn shift_left(a: Self, count: u32) -> Self;
    /// Counts beyond the width leave the sign only.
    fn shift_right(a: Self, count: u32) -> Self;
    /// All ones for a divisor of 0, as the hardware gives.
    fn divide(a: Self, b: Self) -> Self;
    /// The dividend for a divisor of 0.
    fn remainder(a: Self, b: Self) -> Self;
    /// Sum with carry in and out, as unsigned numbers.
    fn add_carry(a: Self, b: Self, carry: bool) -> (Self, bool);
    /// `a - b - borrow`, and whether it borrows.
    fn subtract_borrow(a: Self, b: Self, borrow: bool) -> (Self, bool);
    /// `length` bits of `a` from `position` on.
    fn extract(a: Self, position: u32, length: u32) -> Self;
    /// Position of the leading bit that differs from the sign, all ones if there is none.
    fn find(a: Self) -> u32;
    /// `|a - b| + c`
    fn absolute_difference(a: Self, b: Self, c: Self) -> Self;
}

macro_rules! integer {
    ($ty:ty, $unsigned:ty, $wide:ty, $huge:ty) => {
        impl Integer for $ty {
            type Wide = $wide;
            #[inline(always)]
            fn multiply_wide(a: $ty, b: $ty) -> $wide {
                (a as $wide).wrapping_mul(b as $wide)
            }
            #[inline(always)]
            fn multiply_high(a: $ty, b: $ty) -> $ty {
                ((a as $huge * b as $huge) >> <$ty>::BITS) as $ty
            }
            #[inline(always)]
            fn shift_left(a: $ty, count: u32) -> $ty {
                if count < <$ty>::BITS {
                    a << (count % <$ty>::BITS)
                } else {
                    0
                }
            }
            #[inline(always)]
            fn shift_right(a: $ty, count: u32) -> $ty {
                let most = <$ty>::BITS - 1;
                let sign = a >> most;
                if count <= most {
                    a >> (count & most)
                } else if <$ty>::MIN == 0 {
                    0
                } else {
                    sign
                }
            }
            #[inline(always)]
            fn divide(a: $ty, b: $ty) -> $ty {
                if b == 0 { !0 } else { a.wrapping_div(b) }
            }
            #[inline(always)]
            fn remainder(a: $ty, b: $ty) -> $ty {
                if b == 0 { a } else { a.wrapping_rem(b) }
            }
            #[inline(always)]
            fn add_carry(a: $ty, b: $ty, carry: bool) -> ($ty, bool) {
                let (sum, first) = (a as $unsigned).overflowing_add(b as $unsigned);
                let (sum, second) = sum.overflowing_add(carry as $unsigned);
                (sum as $ty, first | second)
            }
            #[inline(always)]
            fn subtract_borrow(a: $ty, b: $ty, borrow: bool) -> ($ty, bool) {
                let (rest, first) = (a as $unsigned).overflowing_sub(b as $unsigned);
                let (rest, second) = rest.overflowing_sub(borrow as $unsigned);
                (rest as $ty, first | second)
            }
            #[inline(always)]
            fn extract(a: $ty, position: u32, length: u32) -> $ty {
                let (position, length) = (position & 0xff, length & 0xff);
                let most = <$ty>::BITS - 1;
                let sign_at = (position + length).saturating_sub(1).min(most);
                let negative =
                    <$ty>::MIN != 0 && length != 0 && (a as $unsigned) >> sign_at & 1 != 0;
                let fill: $unsigned = if negative { !0 } else { 0 };
                let shifted = <$unsigned>::shift_right(a as $unsigned, position);
                // Bits beyond the register, and beyond the field, are the fill.
                let have = length.min(<$ty>::BITS.saturating_sub(position));
                let mask = if have > most {
                    !0
                } else {
                    ((1 as $unsigned) << have).wrapping_sub(1)
                };
                (shifted & mask | fill & !mask) as $ty
            }
            #[inline(always)]
            fn find(a: $ty) -> u32 {
                let bits = if <$ty>::MIN != 0 && a >> (<$ty>::BITS - 1) != 0 {
                    !a
                } else {
                    a
                };
                (<$ty>::BITS - 1).wrapping_sub(bits.leading_zeros())
            }
            #[inline(always)]
            fn absolute_difference(a: $ty, b: $ty, c: $ty) -> $ty {
                let difference = if a < b {
                    b.wrapping_sub(a)
                } else {
                    a.wrapping_sub(b)
                };
                difference.wrapping_add(c)
            }
        }
    };
}

integer!(u16, u16, u32, u32);
integer!(i16, u16, i32, i32);
integer!(u32, u32, u64, u64);
integer!(i32, u32, i64, i64);
// Nothing is wider than 64 bits in a register: `mul.wide` stops at 32.
integer!(u64, u64, u64, u128);
integer!(i64, u64, i64, i128);

/// `length` bits of `a` into `b` at `position`.
#[inline(always)]
pub(crate) fn insert32(a: u32, b: u32, position: u32, length: u32) -> u32 {
    insert64(u64::from(a), u64::from(b), position, length) as u32
}

/// `length` bits of `a` into `b` at `position`.
#[inline(always)]
pub(crate) fn insert64(a: u64, b: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let mask = u64::shift_left(low_bits(length), position);
    u64::shift_left(a, position) & mask | b & !mask
}

#[inline(always)]
fn low_bits(length: u32) -> u64 {
    if length > 63 { !0 } else { (1 << length) - 1 }
}

/// Bytes of `b:a` picked by the nibbles of `selector`; a set top bit of a nibble replicates the sign.
#[inline(always)]
pub(crate) fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let mut value = 0;
    for k in 0..4 {
        let nibble = selector >> (4 * k) & 15;
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        let byte = if nibble & 8 != 0 {
            (byte as i8 >> 7) as u8
        } else {
            byte
        };
        value |= u32::from(byte) << (8 * k);
    }
    value
}

/// Any function of three bits, by its truth table.
#[inline(always)]
pub(crate) fn lookup(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut value = 0;
    for k in 0..8 {
        let term = (if k & 4 != 0 { a } else { !a })
            & (if k & 2 != 0 { b } else { !b })
            & (if k & 1 != 0 { c } else { !c });
        value |= term & (table >> k & 1).wrapping_neg();
    }
    value
}
