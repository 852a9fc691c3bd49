//! PTX's approximate functions: closer to the exact value than the hardware's, by a margin that tests state.
//!
//! Each is a polynomial in `f64` without branches, so that a loop over lanes becomes vector code.

/// Adding and subtracting it rounds a small `f64` to an integer.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// Sends subnormal numbers to a zero of the same sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        f32::from_bits(x.to_bits() & 0x8000_0000)
    } else {
        x
    }
}

/// The NaN that single-precision instructions produce.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    // On integers: of a float's NaN, the compiler may choose the bits.
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 {
        0x7fff_ffff
    } else {
        bits
    })
}

/// `2^x`
#[inline(always)]
pub(crate) fn ex2(x: f32) -> f32 {
    canonical(exp2(f64::from(x)) as f32)
}

/// `2^x` of a clamped argument, relative error about 1e-10.
#[inline(always)]
fn exp2(x: f64) -> f64 {
    let x = if x > 300.0 { 300.0 } else { x };
    let x = if x < -300.0 { -300.0 } else { x };
    let shifted = x + ROUND;
    let f = (x - (shifted - ROUND)) * std::f64::consts::LN_2;
    let mut sum = 1.0 / 40320.0;
    for k in [
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        sum = sum * f + k;
    }
    // The low bits of `shifted` are the integer; NaN stays in `sum`.
    sum * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)
}

/// Logarithm to base 2.
#[inline(always)]
pub(crate) fn lg2(x: f32) -> f32 {
    let wide = f64::from(x);
    // Split so that the fraction lies between sqrt(1/2) and sqrt(2).
    let bits = wide.to_bits().wrapping_sub(0x3fe6_a09e_667f_3bcd);
    let exponent = (bits as i64 >> 52) as i32;
    let m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff).wrapping_add(0x3fe6_a09e_667f_3bcd));
    let s = (m - 1.0) / (m + 1.0);
    let q = s * s;
    let mut sum = 1.0 / 13.0;
    for k in [1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        sum = sum * q + k;
    }
    let value = (f64::from(exponent) + sum * s * (2.0 * std::f64::consts::LOG2_E)) as f32;
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    let value = if x == f32::INFINITY { x } else { value };
    canonical(if x < 0.0 || x.is_nan() {
        f32::NAN
    } else {
        value
    })
}

/// Sine (`quarter` 0) or cosine (`quarter` 1).
#[inline(always)]
fn sine(x: f32, quarter: i64) -> f32 {
    let wide = f64::from(x);
    let turns = wide * std::f64::consts::FRAC_2_PI;
    let shifted = turns + ROUND;
    let k = shifted - ROUND;
    // pi/2 in two parts: 33 bits, and the rest.
    let r = (wide - k * 1.570_796_326_734_125_6) - k * 6.077_100_506_506_192e-11;
    let q = r * r;
    let odd =
        r * (1.0 + q * (-1.0 / 6.0 + q * (1.0 / 120.0 + q * (-1.0 / 5040.0 + q / 362_880.0))));
    let even = 1.0
        + q * (-0.5
            + q * (1.0 / 24.0 + q * (-1.0 / 720.0 + q * (1.0 / 40320.0 - q / 3_628_800.0))));
    let phase = (shifted.to_bits() as i64).wrapping_add(quarter);
    let value = if phase & 1 == 0 { odd } else { even };
    let value = if phase & 2 == 0 { value } else { -value };
    // Beyond 2^40 nothing is left of the fraction; any value between -1 and 1 will do.
    let value = if turns.abs() > 1e12 { 0.0 } else { value };
    canonical(if x.is_finite() {
        value as f32
    } else {
        f32::NAN
    })
}

#[inline(always)]
pub(crate) fn sin(x: f32) -> f32 {
    sine(x, 0)
}

#[inline(always)]
pub(crate) fn cos(x: f32) -> f32 {
    sine(x, 1)
}

#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let wide = f64::from(x);
    let e = exp2(wide * (2.0 * std::f64::consts::LOG2_E));
    let small = wide - wide * wide * wide * (1.0 / 3.0);
    let value = if wide.abs() < 1e-3 {
        small
    } else {
        1.0 - 2.0 / (e + 1.0)
    };
    canonical(value as f32)
}

#[inline(always)]
pub(crate) fn rcp(x: f32) -> f32 {
    canonical(1.0 / x)
}

#[inline(always)]
pub(crate) fn sqrt(x: f32) -> f32 {
    canonical(x.sqrt())
}

#[inline(always)]
pub(crate) fn rsqrt(x: f32) -> f32 {
    canonical((1.0 / f64::from(x).sqrt()) as f32)
}

/// `rcp.approx.ftz.f64`: the upper word of `1 / x`, from the upper word of `x`.
#[inline(always)]
pub(crate) fn rcp_f64(x: f64) -> f64 {
    upper_word(1.0 / upper_word(x))
}

/// `rsqrt.approx.ftz.f64`: the upper word of `1 / sqrt(x)`.
#[inline(always)]
pub(crate) fn rsqrt_f64(x: f64) -> f64 {
    upper_word(1.0 / upper_word(x).sqrt())
}

/// Clears the lower word, and flushes subnormal numbers.
#[inline(always)]
fn upper_word(x: f64) -> f64 {
    let bits = x.to_bits() & 0xffff_ffff_0000_0000;
    let sign = 0x8000_0000_0000_0000;
    if x.is_nan() {
        f64::from_bits(0x7fff_ffff_0000_0000)
    } else {
        f64::from_bits(if x.abs() < f64::MIN_POSITIVE {
            bits & sign
        } else {
            bits
        })
    }
}
