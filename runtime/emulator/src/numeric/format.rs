//! Layouts of floating-point formats, and the 16-bit types.

use super::exact::{Number, Rounding};

/// A binary floating-point format of at most 64 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    pub fraction_bits: u32,
    pub exponent_bits: u32,
    /// Largest finite number.
    pub largest: u64,
    /// `None` where the format has no infinity (e4m3).
    pub infinity: Option<u64>,
    /// The NaN that operations produce.
    pub nan: u64,
}

impl Format {
    pub const F64: Format = Format::ieee(52, 11, 0x7ff8_0000_0000_0000);
    pub const F32: Format = Format::ieee(23, 8, 0x7fff_ffff);
    pub const TF32: Format = Format::ieee(10, 8, 0x3ffff);
    pub const F16: Format = Format::ieee(10, 5, 0x7fff);
    pub const BF16: Format = Format::ieee(7, 8, 0x7fff);
    pub const E5M2: Format = Format::ieee(2, 5, 0x7f);
    pub const E4M3: Format = Format {
        fraction_bits: 3,
        exponent_bits: 4,
        largest: 0x7e,
        infinity: None,
        nan: 0x7f,
    };

    const fn ieee(fraction_bits: u32, exponent_bits: u32, nan: u64) -> Format {
        let infinity = ((1 << exponent_bits) - 1) << fraction_bits;
        Format {
            fraction_bits,
            exponent_bits,
            largest: infinity - 1,
            infinity: Some(infinity),
            nan,
        }
    }

    /// Exponent of the last place of the smallest numbers.
    pub fn last_exponent(self) -> i32 {
        2 - (1 << (self.exponent_bits - 1)) - self.fraction_bits as i32
    }

    pub fn signed(self, negative: bool, bits: u64) -> u64 {
        bits | u64::from(negative) << (self.fraction_bits + self.exponent_bits)
    }

    /// Result for a number beyond the largest one.
    pub fn overflow(self, negative: bool, rounding: Rounding, saturate: bool) -> u64 {
        let stays_finite = match rounding {
            Rounding::Nearest | Rounding::NearestAway => false,
            Rounding::Zero => true,
            Rounding::Down => !negative,
            Rounding::Up => negative,
        };
        let bits = if saturate || stays_finite {
            self.largest
        } else {
            self.infinity.unwrap_or(self.nan)
        };
        self.signed(negative, bits)
    }

    /// The value of `bits`; every format but `F64` fits exactly.
    pub fn to_f64(self, bits: u64) -> f64 {
        let negative = bits >> (self.fraction_bits + self.exponent_bits) & 1 != 0;
        let body = bits & ((1 << (self.fraction_bits + self.exponent_bits)) - 1);
        let (field, fraction) = (
            body >> self.fraction_bits,
            body & ((1 << self.fraction_bits) - 1),
        );
        let magnitude = if Some(body) == self.infinity {
            f64::INFINITY
        } else if body > self.largest {
            return f64::NAN;
        } else {
            let whole = if field == 0 {
                fraction
            } else {
                fraction | 1 << self.fraction_bits
            };
            whole as f64 * power_of_two(self.last_exponent() + (field.max(1) as i32 - 1))
        };
        if negative { -magnitude } else { magnitude }
    }
}

/// `2^exponent`, exact for -1022 to 1023, and in two steps below.
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    if exponent < -1022 {
        return f64::MIN_POSITIVE * power_of_two(exponent + 1022);
    }
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// IEEE half precision, by its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct F16(pub u16);

/// The upper half of an `f32`, by its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bf16(pub u16);

/// A 16-bit float: PTX's half-precision instructions are generic over it.
pub(crate) trait Half: Copy + Default + Send + Sync + 'static {
    const FORMAT: Format;
    fn from_bits(bits: u16) -> Self;
    fn bits(self) -> u16;
    fn to_f32(self) -> f32;
    /// To nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Half for F16 {
    const FORMAT: Format = Format::F16;
    #[inline(always)]
    fn from_bits(bits: u16) -> F16 {
        F16(bits)
    }
    #[inline(always)]
    fn bits(self) -> u16 {
        self.0
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let (sign, body) = (u32::from(self.0 & 0x8000) << 16, u32::from(self.0 & 0x7fff));
        // Shift into place; the multiplication moves the exponent's bias and makes subnormal numbers normal.
        let scaled = f32::from_bits(body << 13) * f32::from_bits(0x7780_0000);
        let special = f32::from_bits(body << 13 | 0x7f80_0000);
        let magnitude = if body >= 0x7c00 { special } else { scaled };
        f32::from_bits(magnitude.to_bits() | sign)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> F16 {
        let bits = x.to_bits();
        let (sign, body) = ((bits >> 16 & 0x8000) as u16, bits & 0x7fff_ffff);
        // Adding 2^(13 - 14) * .. lets the FPU round subnormal results; see Giesen, "float->half variants".
        let subnormal = (f32::from_bits(body) + 0.5)
            .to_bits()
            .wrapping_sub(0x3f00_0000);
        let odd = body >> 13 & 1;
        let normal = body.wrapping_add(0xc800_0fff).wrapping_add(odd) >> 13;
        let large = if body > 0x7f80_0000 { 0x7fff } else { 0x7c00 };
        let half = if body >= 0x4780_0000 {
            large
        } else if body < 0x3880_0000 {
            subnormal
        } else {
            normal
        };
        // A NaN is the canonical one, without sign.
        F16(half as u16 | if body > 0x7f80_0000 { 0 } else { sign })
    }
}

impl Half for Bf16 {
    const FORMAT: Format = Format::BF16;
    #[inline(always)]
    fn from_bits(bits: u16) -> Bf16 {
        Bf16(bits)
    }
    #[inline(always)]
    fn bits(self) -> u16 {
        self.0
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        Bf16(if x.is_nan() { 0x7fff } else { rounded as u16 })
    }
}

/// `a * b + c` rounded once.
pub(crate) fn half_fma<H: Half>(a: H, b: H, c: H) -> H {
    // The product of two 11-bit fractions is exact in f64; the sum may not be, so it is rounded to odd, which keeps
    // the information that the second rounding needs (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
    let product = f64::from(a.to_f32()) * f64::from(b.to_f32());
    let c = f64::from(c.to_f32());
    let sum = product + c;
    if !sum.is_finite() {
        return H::from_f32(sum as f32);
    }
    let back = sum - product;
    let error = (product - (sum - back)) + (c - back);
    let mut bits = sum.to_bits();
    if error != 0.0 && bits & 1 == 0 {
        bits = if (error > 0.0) == (sum > 0.0) {
            bits + 1
        } else {
            bits - 1
        };
    }
    let rounded = Number::from_f64(f64::from_bits(bits)).round(H::FORMAT, Rounding::Nearest, false);
    H::from_bits(rounded as u16)
}
