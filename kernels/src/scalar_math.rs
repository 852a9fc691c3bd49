//! Scalar mathematics for generated code: one element per call, where no vector path applies.
//!
//! All take and give plain floats, except the half-precision conversions, which carry the bits in
//! the low half of a `u32`. Those of `f32` compute in `f64` and round once.
//!
//! Circular functions are those of the crate `libm`: in a static binary, the C library's have 230 KB of
//! tables and of variants by level of instructions.

use crate::symbols::Symbol;
use half::{bf16, f16};

/// Error function, to within a few ulps in `f64`.
///
/// Below 2.5 the series `erf x = 2/sqrt(pi) e^(-x^2) sum 2^n x^(2n+1) / (2n+1)!!` (Abramowitz and
/// Stegun, 7.1.6; all terms of one sign), beyond it the continued fraction of `erfc` (7.1.14).
pub fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() {
        return x;
    }
    let value = if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term > sum * 1e-17 {
            n += 1.0;
            term *= 2.0 * a * a / (2.0 * n + 1.0);
            sum += term;
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-a * a).exp() * sum
    } else if a < 6.0 {
        // erfc x = e^(-x^2)/sqrt(pi) * 1/(x + (1/2)/(x + 1/(x + (3/2)/(x + ...)))), evaluated from
        // the far end.
        let tail = (1..=60).rev().fold(a, |t, i| a + 0.5 * f64::from(i) / t);
        1.0 - (-a * a).exp() / (tail * std::f64::consts::PI.sqrt())
    } else {
        1.0
    };
    value.copysign(x)
}

/// Remainder with the sign of the divisor (Python `%`), zeros included.
fn floored_mod(x: f64, y: f64) -> f64 {
    let r = x % y;
    match r == 0.0 {
        true => r.copysign(y),
        false if (r < 0.0) != (y < 0.0) => r + y,
        false => r,
    }
}

macro_rules! float_functions {
    ($($name32:ident $name64:ident ($($arg:ident),+) $doc:literal $e32:expr, $e64:expr;)*) => {
        $(
            #[doc = concat!($doc, " in `f32`.")]
            pub extern "C" fn $name32($($arg: f32),+) -> f32 { $e32 }
            #[doc = concat!($doc, " in `f64`.")]
            pub extern "C" fn $name64($($arg: f64),+) -> f64 { $e64 }
        )*
        const FLOAT_SYMBOLS: &[Symbol] = &[$(
            Symbol { name: stringify!($name32), address: $name32 as *const u8 },
            Symbol { name: stringify!($name64), address: $name64 as *const u8 },
        )*];
    };
}

float_functions! {
    gm_exp_f32 gm_exp_f64(x) "`e^x`" f64::from(x).exp() as f32, x.exp();
    gm_expm1_f32 gm_expm1_f64(x) "`e^x - 1`" f64::from(x).exp_m1() as f32, x.exp_m1();
    gm_log_f32 gm_log_f64(x) "Natural logarithm" f64::from(x).ln() as f32, x.ln();
    gm_log1p_f32 gm_log1p_f64(x) "`ln(1 + x)`" f64::from(x).ln_1p() as f32, x.ln_1p();
    gm_sin_f32 gm_sin_f64(x) "Sine" libm::sin(x.into()) as f32, libm::sin(x);
    gm_cos_f32 gm_cos_f64(x) "Cosine" libm::cos(x.into()) as f32, libm::cos(x);
    gm_tan_f32 gm_tan_f64(x) "Tangent" libm::tan(x.into()) as f32, libm::tan(x);
    gm_asin_f32 gm_asin_f64(x) "Inverse sine" libm::asin(x.into()) as f32, libm::asin(x);
    gm_acos_f32 gm_acos_f64(x) "Inverse cosine" libm::acos(x.into()) as f32, libm::acos(x);
    gm_atan_f32 gm_atan_f64(x) "Inverse tangent" libm::atan(x.into()) as f32, libm::atan(x);
    gm_sinh_f32 gm_sinh_f64(x) "Hyperbolic sine" f64::from(x).sinh() as f32, x.sinh();
    gm_cosh_f32 gm_cosh_f64(x) "Hyperbolic cosine" f64::from(x).cosh() as f32, x.cosh();
    gm_tanh_f32 gm_tanh_f64(x) "Hyperbolic tangent" f64::from(x).tanh() as f32, x.tanh();
    gm_asinh_f32 gm_asinh_f64(x) "Inverse hyperbolic sine" f64::from(x).asinh() as f32, x.asinh();
    gm_acosh_f32 gm_acosh_f64(x) "Inverse hyperbolic cosine" f64::from(x).acosh() as f32, x.acosh();
    gm_atanh_f32 gm_atanh_f64(x) "Inverse hyperbolic tangent"
        f64::from(x).atanh() as f32, x.atanh();
    gm_erf_f32 gm_erf_f64(x) "Error function" erf(f64::from(x)) as f32, erf(x);
    gm_pow_f32 gm_pow_f64(x, y) "`x^y`" f64::from(x).powf(y.into()) as f32, x.powf(y);
    gm_rem_f32 gm_rem_f64(x, y) "Remainder with the sign of the dividend" x % y, x % y;
    gm_mod_f32 gm_mod_f64(x, y) "Remainder with the sign of the divisor"
        floored_mod(x.into(), y.into()) as f32, floored_mod(x, y);
    gm_atan2_f32 gm_atan2_f64(y, x) "Angle of the point (x, y)"
        libm::atan2(y.into(), x.into()) as f32, libm::atan2(y, x);
}

/// Wrapping `x^y`; a negative exponent gives the truncated quotient.
pub extern "C" fn gm_pow_i64(x: i64, y: i64) -> i64 {
    match (x, y) {
        (1, _) => 1,
        (-1, _) => {
            if y & 1 == 0 {
                1
            } else {
                -1
            }
        }
        (_, y) if y < 0 => 0,
        _ => gm_pow_u64(x as u64, y as u64) as i64,
    }
}

/// Wrapping `x^y`.
pub extern "C" fn gm_pow_u64(x: u64, y: u64) -> u64 {
    let (mut base, mut exponent, mut power) = (x, y, 1u64);
    while exponent > 0 {
        if exponent & 1 == 1 {
            power = power.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        exponent >>= 1;
    }
    power
}

/// `f16` bits to `f32`.
pub extern "C" fn gm_scalar_f16_to_f32(x: u32) -> f32 {
    f16::from_bits(x as u16).to_f32()
}

/// `f32` to `f16` bits, rounded to nearest even.
pub extern "C" fn gm_scalar_f32_to_f16(x: f32) -> u32 {
    u32::from(f16::from_f32(x).to_bits())
}

/// `f64` to `f16` bits, rounded once.
pub extern "C" fn gm_scalar_f64_to_f16(x: f64) -> u32 {
    u32::from(f16::from_f64(x).to_bits())
}

/// `f64` to `bf16` bits, rounded once.
pub extern "C" fn gm_scalar_f64_to_bf16(x: f64) -> u32 {
    u32::from(bf16::from_f64(x).to_bits())
}

const OTHER_SYMBOLS: &[Symbol] = &[
    Symbol {
        name: "gm_pow_i64",
        address: gm_pow_i64 as *const u8,
    },
    Symbol {
        name: "gm_pow_u64",
        address: gm_pow_u64 as *const u8,
    },
    Symbol {
        name: "gm_scalar_f16_to_f32",
        address: gm_scalar_f16_to_f32 as *const u8,
    },
    Symbol {
        name: "gm_scalar_f32_to_f16",
        address: gm_scalar_f32_to_f16 as *const u8,
    },
    Symbol {
        name: "gm_scalar_f64_to_f16",
        address: gm_scalar_f64_to_f16 as *const u8,
    },
    Symbol {
        name: "gm_scalar_f64_to_bf16",
        address: gm_scalar_f64_to_bf16 as *const u8,
    },
];

/// The functions of this module by linker name.
pub fn symbols() -> impl Iterator<Item = &'static Symbol> {
    FLOAT_SYMBOLS
        .iter()
        .chain(OTHER_SYMBOLS)
        .chain(crate::float8::SYMBOLS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_matches_tabulated_values() {
        // Abramowitz and Stegun, table 7.1, and mpmath beyond it.
        let table = [
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (3.0, 0.999_977_909_503_001_4),
            (5.0, 0.999_999_999_998_462_5),
        ];
        for (x, y) in table {
            assert!(
                (erf(x) - y).abs() < 4e-16,
                "erf {x} is off by {:e}",
                erf(x) - y
            );
            assert_eq!(erf(-x), -erf(x));
        }
        assert_eq!(erf(1e-300), 1e-300 * std::f64::consts::FRAC_2_SQRT_PI);
        assert!((erf(2.5 - 1e-12) - erf(2.5)).abs() < 1e-14);
        assert!(erf(f64::NAN).is_nan());
        assert_eq!(erf(f64::INFINITY), 1.0);
    }

    #[test]
    fn integer_powers_wrap_and_truncate() {
        assert_eq!(gm_pow_i64(-2, 3), -8);
        assert_eq!(gm_pow_i64(2, -1), 0);
        assert_eq!(gm_pow_i64(-1, -3), -1);
        assert_eq!(gm_pow_i64(3, 0), 1);
        assert_eq!(gm_pow_u64(2, 64), 0);
    }

    /// Distance in units of the last place.
    fn distance(a: f64, b: f64) -> f64 {
        if a == b || a.is_nan() && b.is_nan() {
            return 0.0;
        }
        let unit = f64::from_bits(b.abs().to_bits() + 1) - b.abs();
        (a - b).abs() / unit
    }

    /// Angles and ratios of all magnitudes, and special ones.
    fn arguments() -> Vec<f64> {
        let special = [0.0, 1.0, 0.5, 1e-310, f64::INFINITY, f64::NAN];
        let quarters = (1..8).map(|i| f64::from(i) * std::f64::consts::FRAC_PI_2);
        let magnitudes = (-300..300).map(|e| 1.0123456789 * 10f64.powi(e));
        let small = (0..1000).map(|i| f64::from(i) * 0.0137);
        let all = special.into_iter().chain(quarters).chain(magnitudes);
        all.chain(small).flat_map(|x| [x, -x]).collect()
    }

    type Unary = extern "C" fn(f64) -> f64;

    type Case = (&'static str, Unary, fn(f64) -> f64);

    const CIRCULAR: [Case; 6] = [
        ("sin", gm_sin_f64, f64::sin),
        ("cos", gm_cos_f64, f64::cos),
        ("tan", gm_tan_f64, f64::tan),
        ("asin", gm_asin_f64, f64::asin),
        ("acos", gm_acos_f64, f64::acos),
        ("atan", gm_atan_f64, f64::atan),
    ];

    #[test]
    fn circular_functions_agree_with_the_standard_library() {
        for x in arguments() {
            for (name, ours, other) in CIRCULAR {
                let (found, want) = (ours(x), other(x));
                assert!(
                    distance(found, want) <= 2.0,
                    "{name} {x:e}: {found:e}, {want:e}"
                );
                let same_sign =
                    found.is_nan() || found.is_sign_negative() == want.is_sign_negative();
                assert!(same_sign, "{name} {x:e}");
            }
            for y in arguments()
                .into_iter()
                .step_by(37)
                .chain([0.0, -0.0, f64::INFINITY])
            {
                let (found, want) = (gm_atan2_f64(y, x), y.atan2(x));
                assert!(
                    distance(found, want) <= 2.0,
                    "atan2 {y:e} {x:e}: {found:e}, {want:e}"
                );
            }
        }
    }
}
