//! Small floats and directed rounding by means other than the emulator's: enumeration, and errors of sums.

/// Rounding modes.
#[derive(Clone, Copy, PartialEq)]
pub enum Mode {
    Nearest,
    Zero,
    Down,
    Up,
}

/// What `a + b` lacks when it is rounded to double precision (Knuth).
fn error_of_sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return 0.0;
    }
    let back = sum - a;
    (a - (sum - back)) + (b - back)
}

/// `a + b` in single precision, rounded in a mode.
pub fn round_sum(a: f64, b: f64, mode: Mode) -> f32 {
    let (sum, error) = (a + b, error_of_sum(a, b));
    if sum == 0.0 && error == 0.0 {
        // An exact zero is negative if both operands are, or when rounding down if they differ in sign.
        let negative = [a, b].map(f64::is_sign_negative);
        let below = negative == [true; 2] || negative[0] != negative[1] && mode == Mode::Down;
        return if below { -0.0 } else { 0.0 };
    }
    rounded_single(sum, error, mode)
}

/// `x` in single precision, rounded in a mode.
pub fn round_single(x: f64, mode: Mode) -> f32 {
    rounded_single(x, 0.0, mode)
}

/// `sum` and a little more.
pub fn rounded_single(sum: f64, error: f64, mode: Mode) -> f32 {
    let near = sum as f32;
    if sum.is_infinite() || sum.is_nan() {
        return near;
    }
    let wide = f64::from(near);
    let (too_large, too_small) = (
        wide > sum || wide == sum && error < 0.0,
        wide < sum || wide == sum && error > 0.0,
    );
    let negative = sum < 0.0;
    match mode {
        Mode::Nearest => near,
        Mode::Down | Mode::Zero if too_large && (mode == Mode::Down || !negative) => {
            near.next_down()
        }
        Mode::Up | Mode::Zero if too_small && (mode == Mode::Up || negative) => near.next_up(),
        _ => near,
    }
}

/// The value of IEEE-like bits.
pub fn value(bits: u64, exponent_bits: u32, fraction_bits: u32) -> f64 {
    let fraction = bits & ((1 << fraction_bits) - 1);
    let exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    let negative = bits >> (fraction_bits + exponent_bits) & 1 != 0;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let scale = |e: i32| f64::from(e - fraction_bits as i32).exp2();
    let magnitude = if exponent == (1 << exponent_bits) - 1 {
        if fraction == 0 {
            f64::INFINITY
        } else {
            f64::NAN
        }
    } else if exponent == 0 {
        fraction as f64 * scale(1 - bias)
    } else {
        (fraction | 1 << fraction_bits) as f64 * scale(exponent as i32 - bias)
    };
    if negative { -magnitude } else { magnitude }
}

/// Nearest (or next, by mode) of the formats' numbers, found by bisection over their bits; NaN is all ones but the sign.
pub fn small_float(x: f64, exponent_bits: u32, fraction_bits: u32, mode: Mode) -> u64 {
    rounded(x, 0.0, exponent_bits, fraction_bits, mode)
}

/// `a + b` rounded to nearest.
pub fn small_sum(a: f64, b: f64, exponent_bits: u32, fraction_bits: u32) -> u64 {
    rounded(
        a + b,
        error_of_sum(a, b),
        exponent_bits,
        fraction_bits,
        Mode::Nearest,
    )
}

fn rounded(x: f64, error: f64, exponent_bits: u32, fraction_bits: u32, mode: Mode) -> u64 {
    let bits = exponent_bits + fraction_bits;
    if x.is_nan() {
        return (1 << bits) - 1;
    }
    let sign = u64::from(x.is_sign_negative()) << bits;
    let (x, error) = if sign != 0 { (-x, -error) } else { (x, error) };
    let of = |bits: u64| value(bits, exponent_bits, fraction_bits);
    let infinity = ((1u64 << exponent_bits) - 1) << fraction_bits;
    // The largest number that is not above the exact value.
    let not_above = |b: u64| of(b) < x || of(b) == x && error >= 0.0;
    let (mut low, mut high) = (0, infinity);
    if !not_above(0) {
        return sign;
    }
    while high - low > 1 {
        let middle = (low + high) / 2;
        if not_above(middle) {
            low = middle
        } else {
            high = middle
        }
    }
    if x.is_infinite() {
        return sign | infinity;
    }
    if of(low) == x && error == 0.0 {
        return sign | low;
    }
    let up = match mode {
        Mode::Zero => false,
        Mode::Down => sign != 0,
        Mode::Up => sign == 0,
        Mode::Nearest => {
            // Beyond the largest number, as if the next one existed.
            let next = if high == infinity {
                2.0 * of(infinity - 1) - of(infinity - 2)
            } else {
                of(high)
            };
            let half = (of(low) + next) / 2.0;
            x > half || x == half && (error > 0.0 || error == 0.0 && low & 1 == 1)
        }
    };
    sign | if up { high } else { low }
}

/// Nearest number of an 8-bit format, clamped to the largest.
pub fn fp8(x: f64, exponent_bits: u32, fraction_bits: u32) -> u64 {
    if x.is_nan() {
        return 0x7f;
    }
    let largest = if exponent_bits == 4 { 0x7e } else { 0x7b };
    let sign = u64::from(x.is_sign_negative()) << 7;
    let of = |b: u64| fp8_value(b, exponent_bits, fraction_bits);
    let x = x.abs().min(of(largest));
    let distance = |b: &u64| (of(*b) - x).abs();
    let nearest = (0..=largest).min_by(|a, b| {
        distance(a)
            .total_cmp(&distance(b))
            .then((a & 1).cmp(&(b & 1)))
    });
    sign | nearest.expect("a number")
}

/// The value of an 8-bit float; e4m3 has no infinity.
pub fn fp8_value(bits: u64, exponent_bits: u32, fraction_bits: u32) -> f64 {
    if exponent_bits == 4 && bits & 0x78 == 0x78 && bits & 7 != 7 {
        let magnitude = f64::from(8 + (bits & 7) as u32) * 32.0;
        return if bits & 0x80 != 0 {
            -magnitude
        } else {
            magnitude
        };
    }
    value(bits, exponent_bits, fraction_bits)
}
