//! The four 8-bit floats of ONNX. `e4m3fn` and `e5m2` are those of the OCP 8-bit Floating Point
//! Specification (OFP8, revision 1.0), which GPUs compute with; the `fnuz` forms (Noune et al.,
//! "8-bit numerical formats for deep neural networks") have one more binade of small numbers, a
//! single zero and no infinity.
//!
//! Conversion to them rounds to nearest, ties to even, and saturates: beyond the largest number,
//! and at an infinity, the result is the largest number, as CUDA's `satfinite` and ONNX's
//! `saturate` say. NaN stays NaN, in the one form that a format has or CUDA gives.

use crate::symbols::Symbol;

/// Parameters of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Bits of the fraction.
    pub fraction_bits: u32,
    /// Subtracted from the exponent field.
    pub bias: i32,
    /// Code of the largest number.
    pub largest: u8,
    /// Code of the NaN that conversions give.
    pub nan: u8,
    /// Code of infinity, if there is one.
    pub infinity: Option<u8>,
}

impl Format {
    /// True when there is a negative zero; without one, its code is that of NaN.
    pub const fn has_negative_zero(self) -> bool {
        self.nan != 0x80
    }

    /// The magnitude beyond which numbers overflow, and true if it overflows itself: half a step
    /// beyond the largest number, a tie that goes to the largest number where its fraction is even.
    pub const fn overflow(self) -> (f64, bool) {
        let (most, below) = (self.decode(self.largest), self.decode(self.largest - 1));
        ((most + (most - below) / 2.0) as f64, self.largest & 1 == 1)
    }

    /// The value of a code.
    pub const fn decode(self, code: u8) -> f32 {
        let (negative, body) = (code & 0x80 != 0, code & 0x7f);
        let infinite = matches!(self.infinity, Some(infinity) if infinity == body);
        if !infinite && body > self.largest || code == 0x80 && !self.has_negative_zero() {
            return f32::NAN;
        }
        let (field, fraction) = (
            (body >> self.fraction_bits) as i32,
            body as u32 & ((1 << self.fraction_bits) - 1),
        );
        let whole = if field == 0 {
            fraction
        } else {
            fraction | 1 << self.fraction_bits
        };
        let exponent = (if field == 0 { 1 } else { field }) - self.bias - self.fraction_bits as i32;
        let magnitude = if infinite {
            f32::INFINITY
        } else {
            whole as f32 * f32::from_bits(((exponent + 127) as u32) << 23)
        };
        if negative { -magnitude } else { magnitude }
    }

    /// The code of the number nearest to `x`, ties to even; that of the largest number for all
    /// beyond it.
    pub fn encode(self, x: f64) -> u8 {
        if x.is_nan() {
            return self.nan;
        }
        let magnitude = x.abs();
        let least_exponent = 1 - self.bias;
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(least_exponent);
        // Codes of a binade count its steps, so a carry out of the fraction is the next binade's
        // first code.
        let step = f64::from_bits(((exponent - self.fraction_bits as i32 + 1023) as u64) << 52);
        let below = (i64::from(exponent - least_exponent)) << self.fraction_bits;
        let steps = (magnitude / step).round_ties_even();
        let body = if magnitude.is_finite() && exponent < 32 {
            below + steps as i64
        } else {
            i64::MAX
        };
        let body = body.min(self.largest.into()) as u8;
        let is_negative = x.is_sign_negative() && (body != 0 || self.has_negative_zero());
        body | if is_negative { 0x80 } else { 0 }
    }
}

macro_rules! float8 {
    ($($(#[$doc:meta])* $name:ident $from:ident $into:ident $format:expr;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Default)]
            #[repr(transparent)]
            pub struct $name(u8);

            impl $name {
                /// Meaning of the codes.
                pub const FORMAT: Format = $format;
                /// Minus infinity, or the smallest number of a format without infinities.
                pub const LEAST: $name = $name(0x80 | match $name::FORMAT.infinity {
                    Some(code) => code,
                    None => $name::FORMAT.largest,
                });
                /// Infinity, or the largest number of a format without infinities.
                pub const GREATEST: $name = $name($name::LEAST.0 & 0x7f);

                /// The number with this code.
                pub const fn from_bits(code: u8) -> $name {
                    $name(code)
                }

                /// The code.
                pub const fn to_bits(self) -> u8 {
                    self.0
                }

                /// The value; exact.
                pub const fn to_f32(self) -> f32 {
                    $name::FORMAT.decode(self.0)
                }

                /// The value; exact.
                pub fn to_f64(self) -> f64 {
                    self.to_f32().into()
                }

                /// To nearest, ties to even, saturating.
                pub fn from_f64(x: f64) -> $name {
                    $name($name::FORMAT.encode(x))
                }
            }

            impl PartialEq for $name {
                fn eq(&self, other: &$name) -> bool {
                    self.to_f32() == other.to_f32()
                }
            }

            impl PartialOrd for $name {
                fn partial_cmp(&self, other: &$name) -> Option<std::cmp::Ordering> {
                    self.to_f32().partial_cmp(&other.to_f32())
                }
            }

            impl From<$name> for f64 {
                fn from(x: $name) -> f64 {
                    x.to_f64()
                }
            }

            impl std::fmt::Debug for $name {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    self.to_f32().fmt(f)
                }
            }

            #[doc = concat!("The value of a code of [`", stringify!($name), "`], in the low bits.")]
            pub extern "C" fn $into(code: u32) -> f32 {
                $name(code as u8).to_f32()
            }

            #[doc = concat!("The code of the nearest [`", stringify!($name), "`], saturating.")]
            pub extern "C" fn $from(x: f64) -> u32 {
                $name::from_f64(x).0.into()
            }
        )*

        /// The scalar conversions by linker name.
        pub(crate) const SYMBOLS: &[Symbol] = &[$(
            Symbol { name: stringify!($into), address: $into as *const u8 },
            Symbol { name: stringify!($from), address: $from as *const u8 },
        )*];
    };
}

float8! {
    /// 4 bits of exponent, 3 of fraction, no infinity: up to 448 in steps of 2^-9 and more.
    F8E4M3FN gm_scalar_f64_to_f8e4m3fn gm_scalar_f8e4m3fn_to_f32
        Format { fraction_bits: 3, bias: 7, largest: 0x7e, nan: 0x7f, infinity: None };
    /// As [`F8E4M3FN`] with one zero and half of its values: up to 240.
    F8E4M3FNUZ gm_scalar_f64_to_f8e4m3fnuz gm_scalar_f8e4m3fnuz_to_f32
        Format { fraction_bits: 3, bias: 8, largest: 0x7f, nan: 0x80, infinity: None };
    /// 5 bits of exponent, 2 of fraction, with infinities: up to 57344 in steps of 2^-16 and more.
    /// The upper half of an `f16`.
    F8E5M2 gm_scalar_f64_to_f8e5m2 gm_scalar_f8e5m2_to_f32
        Format { fraction_bits: 2, bias: 15, largest: 0x7b, nan: 0x7f, infinity: Some(0x7c) };
    /// As [`F8E5M2`] with one zero and no infinity, up to 57344.
    F8E5M2FNUZ gm_scalar_f64_to_f8e5m2fnuz gm_scalar_f8e5m2fnuz_to_f32
        Format { fraction_bits: 2, bias: 16, largest: 0x7f, nan: 0x80, infinity: None };
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Format; 4] = [
        F8E4M3FN::FORMAT,
        F8E4M3FNUZ::FORMAT,
        F8E5M2::FORMAT,
        F8E5M2FNUZ::FORMAT,
    ];

    /// Values of non-negative finite codes, ascending.
    fn numbers(f: Format) -> Vec<f64> {
        (0..=f.largest).map(|code| f.decode(code).into()).collect()
    }

    #[test]
    fn limits_are_those_of_the_formats() {
        let limits = ALL.map(|f| {
            (
                f.decode(f.largest),
                f.decode(1),
                f.decode(1 << f.fraction_bits),
            )
        });
        let two = |n: i32| 2f32.powi(n);
        assert_eq!(limits[0], (448.0, two(-9), two(-6)));
        assert_eq!(limits[1], (240.0, two(-10), two(-7)));
        assert_eq!(limits[2], (57344.0, two(-16), two(-14)));
        assert_eq!(limits[3], (57344.0, two(-17), two(-15)));
        let n_nan = ALL.map(|f| (0..=255).filter(|&code| f.decode(code).is_nan()).count());
        assert_eq!(n_nan, [2, 1, 6, 1]);
        assert_eq!(F8E5M2::from_bits(0xfc).to_f32(), f32::NEG_INFINITY);
    }

    #[test]
    fn e5m2_is_the_upper_half_of_f16() {
        for code in 0..=255u8 {
            let (ours, half) = (
                F8E5M2::from_bits(code).to_f32(),
                half::f16::from_bits(u16::from(code) << 8).to_f32(),
            );
            assert!(
                ours.to_bits() == half.to_bits() || ours.is_nan() && half.is_nan(),
                "{code:#x}: {ours} {half}"
            );
        }
    }

    #[test]
    fn codes_round_trip_and_ascend() {
        for f in ALL {
            let numbers = numbers(f);
            assert!(numbers.windows(2).all(|w| w[0] < w[1]), "{f:?}");
            for (code, &v) in numbers.iter().enumerate() {
                assert_eq!(f.encode(v), code as u8, "{f:?} {v}");
                let negative = if v == 0.0 && !f.has_negative_zero() {
                    0
                } else {
                    0x80 | code as u8
                };
                assert_eq!(f.encode(-v), negative, "{f:?} {v}");
            }
        }
    }

    #[test]
    fn rounds_to_nearest_even_and_saturates() {
        for f in ALL {
            let numbers = numbers(f);
            for (code, w) in numbers.windows(2).enumerate() {
                let (middle, even) = ((w[0] + w[1]) / 2.0, (code + code % 2) as u8);
                assert_eq!(f.encode(middle), even, "{f:?}: tie {middle}");
                assert_eq!(
                    f.encode(middle.next_down()),
                    code as u8,
                    "{f:?}: below {middle}"
                );
                assert_eq!(
                    f.encode(middle.next_up()),
                    code as u8 + 1,
                    "{f:?}: above {middle}"
                );
            }
            let most = *numbers.last().unwrap();
            for x in [most * 1.01, most * 4.0, 1e300, f64::INFINITY] {
                assert_eq!(
                    (f.encode(x), f.encode(-x)),
                    (f.largest, 0x80 | f.largest),
                    "{f:?}: {x}"
                );
            }
            let (from, inclusive) = f.overflow();
            assert_eq!(
                (from, inclusive),
                (
                    most + (most - numbers[numbers.len() - 2]) / 2.0,
                    f.largest % 2 == 1
                )
            );
            assert!(f.decode(f.encode(f64::NAN)).is_nan());
            assert_eq!(f.encode(f64::from_bits(1)), 0);
        }
    }
}
