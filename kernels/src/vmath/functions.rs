//! The functions themselves.

use crate::simd::Simd;

/// Adding this to a float below 2^22 leaves the nearest integer in the low bits.
const ROUND: f32 = 12_582_912.0;

/// Coefficients of `(e^r - 1 - r) / r^2` over |r| <= ln(2) / 2.
const EXP: [f32; 5] = [
    0.5,
    0.166_665_18,
    0.041_666_21,
    0.008_368_952,
    0.001_395_036_2,
];
/// Coefficients of `(2^r - 1) / r` over |r| <= 1 / 2.
const EXP2: [f32; 6] = [
    std::f32::consts::LN_2,
    0.240_226_5,
    0.055_503_27,
    0.009_618_008,
    0.001_340_044_3,
    0.000_154_752_02,
];
/// Coefficients of `(ln(1 + f) - f + f^2 / 2) / f^3` over sqrt(1/2) <= 1 + f < sqrt(2).
const LOG: [f32; 9] = [
    0.333_333_1,
    -0.249_999_87,
    0.200_022_27,
    -0.166_692_47,
    0.142_186_5,
    -0.123_844_17,
    0.118_731_01,
    -0.117_894_56,
    0.069_146_77,
];
/// Coefficients of `log2(1 + f) / f` over the same range.
const LOG2: [f64; 15] = [
    1.442_695_040_889_432_1,
    -0.721_347_520_427_769_8,
    0.480_898_346_523_493_67,
    -0.360_673_765_119_352_8,
    0.288_539_078_374_344_06,
    -0.240_448_792_779_375_34,
    0.206_094_934_945_281_92,
    -0.180_347_946_286_839_42,
    0.160_431_050_402_522_28,
    -0.144_172_372_254_563_92,
    0.129_112_991_192_157_33,
    -0.119_200_762_882_431_59,
    0.125_938_712_942_480_1,
    -0.125_040_780_988_710_52,
    0.064_973_094_221_555_8,
];
/// Coefficients of `(sin(r) - r) / r^3` in `r^2`, over |r| <= pi / 4.
const SIN: [f32; 4] = [
    -0.166_666_67,
    0.008_333_329,
    -0.000_198_393_3,
    2.718_274_6e-6,
];
/// Coefficients of `(cos(r) - 1 + r^2 / 2) / r^4` in `r^2`, over the same range.
const COS: [f32; 3] = [0.041_666_646, -0.001_388_736_5, 2.443_823_7e-5];
/// Coefficients of `erf(x) / x - 1` in `x^2`, up to `ERF_SPLIT`.
const ERF_SMALL: [f32; 6] = [
    0.128_379_15,
    -0.376_124_98,
    0.112_818_32,
    -0.026_766_632,
    0.004_992_572_6,
    -0.000_598_512_2,
];
/// Coefficients of `-ln(erfc(t)) / t - 1` from `ERF_SPLIT` to 4, beyond which erf rounds to 1.
const ERF_LARGE: [f32; 7] = [
    0.128_652_41,
    0.635_135_4,
    0.106_263_19,
    -0.023_784_718,
    0.003_653_166_1,
    -0.000_325_436_24,
    1.149_421e-5,
];
const ERF_SPLIT: f32 = 0.9277;
/// Coefficients of `-log2(P(-t))`, P being the normal distribution function, over 0 <= t <= 6; beyond
/// it grows. Weighted by what an error does to `t P(-t)`: 2.1e-8 at most.
const NORMAL_TAIL: [f32; 9] = [
    0.999_999_94,
    1.151_107_8,
    0.459_186_76,
    0.052_563_976,
    -0.007_166_204,
    0.000_219_017_85,
    0.000_150_982_87,
    -3.175_392_3e-5,
    2.183_366e-6,
];

#[inline(always)]
fn poly<S: Simd, const N: usize>(s: S, x: S::F, coefficients: [f32; N]) -> S::F {
    let mut sum = s.splat(coefficients[N - 1]);
    for i in (0..N - 1).rev() {
        sum = s.fma(sum, x, s.splat(coefficients[i]));
    }
    sum
}

/// The nearest integer to `a * b`, as float and integer; |a * b| < 2^22.
#[inline(always)]
fn round_product<S: Simd>(s: S, a: S::F, b: S::F) -> (S::F, S::I) {
    let shifted = s.fma(a, b, s.splat(ROUND));
    (
        s.sub(shifted, s.splat(ROUND)),
        s.sub_i(s.bits(shifted), s.splat_i(ROUND.to_bits() as i32)),
    )
}

/// `2^n` for -126 <= n <= 127.
#[inline(always)]
fn power_of_two<S: Simd>(s: S, n: S::I) -> S::F {
    s.as_float(s.shl(s.add_i(n, s.splat_i(127)), 23))
}

/// NaN stays, since it is the second operand of both.
#[inline(always)]
fn clamp<S: Simd>(s: S, x: S::F, lo: f32, hi: f32) -> S::F {
    s.min(s.splat(hi), s.max(s.splat(lo), x))
}

/// `x - n ln(2)` with `n` the nearest integer to `x / ln(2)`, and `n` as float and integer.
#[inline(always)]
fn reduce_exp<S: Simd>(s: S, x: S::F) -> (S::F, S::F, S::I) {
    let (n, n_int) = round_product(s, x, s.splat(std::f32::consts::LOG2_E));
    let r = s.fma(n, s.splat(-0.693_145_75), x);
    (s.fma(n, s.splat(-1.428_606_8e-6), r), n, n_int)
}

#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Beyond these the result is 0 or infinite anyhow.
    let (r, n, n_int) = reduce_exp(s, clamp(s, x, -104.0, 89.0));
    let p = s.add(s.splat(1.0), s.fma(s.mul(r, r), poly(s, r, EXP), r));
    s.scale(p, n, n_int)
}

/// Least `x` whose exponential is normal: `-126 ln(2)`.
const LEAST_NORMAL_EXP: f32 = -87.336_54;

/// `e^x` for `x <= 0`, with 0 in place of subnormal results: products with these take far longer
/// than others on some CPUs, and a mask of -100 makes many weights so.
#[inline(always)]
pub(crate) fn exp_weight<S: Simd>(s: S, x: S::F) -> S::F {
    let least = s.splat(LEAST_NORMAL_EXP);
    let is_subnormal = s.lt(x, least);
    let (r, _, n) = reduce_exp(s, s.max(least, x));
    let p = s.add(s.splat(1.0), s.fma(s.mul(r, r), poly(s, r, EXP), r));
    s.select(is_subnormal, s.zero(), s.mul(p, power_of_two(s, n)))
}

/// `2^x` for `x <= 0`, with 0 in place of subnormal results.
#[inline(always)]
pub(crate) fn exp2_weight<S: Simd>(s: S, x: S::F) -> S::F {
    let least = s.splat(-126.0);
    let is_subnormal = s.lt(x, least);
    let x = s.max(least, x);
    let (n, n_int) = round_product(s, x, s.splat(1.0));
    let r = s.sub(x, n);
    let p = s.fma(r, poly(s, r, EXP2), s.splat(1.0));
    s.select(is_subnormal, s.zero(), s.mul(p, power_of_two(s, n_int)))
}

#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    let x = clamp(s, x, -151.0, 129.0);
    let (n, n_int) = round_product(s, x, s.splat(1.0));
    exp2_reduced(s, s.sub(x, n), n, n_int)
}

/// `2^(r + n)` for |r| <= 1 / 2.
#[inline(always)]
fn exp2_reduced<S: Simd>(s: S, r: S::F, n: S::F, n_int: S::I) -> S::F {
    s.scale(s.fma(r, poly(s, r, EXP2), s.splat(1.0)), n, n_int)
}

#[inline(always)]
pub(crate) fn expm1<S: Simd>(s: S, x: S::F) -> S::F {
    let (r, _, n) = reduce_exp(s, clamp(s, x, -18.0, 89.0));
    let p = s.fma(s.mul(r, r), poly(s, r, EXP), r);
    // Half the power keeps 2^128 finite on the way; doubling is exact.
    let t = power_of_two(s, s.sub_i(n, s.splat_i(1)));
    let y = s.fma(p, t, s.sub(t, s.splat(0.5)));
    let y = s.add(y, y);
    // The sum above loses the sign of zero.
    s.select(s.eq(x, s.zero()), x, y)
}

/// `x = 2^e (1 + f)` with sqrt(1/2) <= 1 + f < sqrt(2), for positive finite `x`.
#[inline(always)]
fn split<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    let denormal = s.lt(x, s.splat(f32::MIN_POSITIVE));
    let x = s.select(denormal, s.mul(x, s.splat(16_777_216.0)), x);
    // Subtracting sqrt(1/2)'s bits carries into the exponent exactly where the mantissa is beyond
    // sqrt(2).
    let root = s.splat_i(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32);
    let shifted = s.sub_i(s.bits(x), root);
    let e = s.to_float(s.sar(shifted, 23));
    let m = s.as_float(s.add_i(s.and(shifted, s.splat_i(0x007f_ffff)), root));
    (
        s.select(denormal, s.sub(e, s.splat(24.0)), e),
        s.sub(m, s.splat(1.0)),
    )
}

/// Replaces the logarithm `y` of `x` by C99's result where `x` is zero, negative, infinite or NaN.
#[inline(always)]
fn log_special<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
    let y = s.select(s.lt(x, s.splat(f32::INFINITY)), y, x);
    let y = s.select(s.lt(x, s.zero()), s.splat(f32::NAN), y);
    s.select(s.eq(x, s.zero()), s.splat(f32::NEG_INFINITY), y)
}

/// `ln(1 + f) - f`.
#[inline(always)]
fn log_tail<S: Simd>(s: S, f: S::F) -> S::F {
    let square = s.mul(f, f);
    s.fma(
        s.mul(square, f),
        poly(s, f, LOG),
        s.mul(square, s.splat(-0.5)),
    )
}

#[inline(always)]
pub(crate) fn log<S: Simd>(s: S, x: S::F) -> S::F {
    let (e, f) = split(s, x);
    let y = s.add(f, s.fma(e, s.splat(1.428_606_8e-6), log_tail(s, f)));
    log_special(s, x, s.fma(e, s.splat(0.693_145_75), y))
}

#[inline(always)]
pub(crate) fn log2<S: Simd>(s: S, x: S::F) -> S::F {
    log_special(s, x, s.narrow(log2_wide(s, x)))
}

/// `log2(x)` in f64, for positive finite `x`.
#[inline(always)]
fn log2_wide<S: Simd>(s: S, x: S::F) -> S::D {
    let (e, f) = split(s, x);
    let f = s.widen(f);
    let mut sum = s.splat_d(LOG2[14]);
    for i in (0..14).rev() {
        sum = s.fma_d(sum, f, s.splat_d(LOG2[i]));
    }
    s.fma_d(sum, f, s.widen(e))
}

#[inline(always)]
pub(crate) fn log1p<S: Simd>(s: S, x: S::F) -> S::F {
    let u = s.add(x, s.splat(1.0));
    // Rounding error of `u`: the difference to the smaller addend is exact.
    let from_one = s.sub(x, s.sub(u, s.splat(1.0)));
    let from_x = s.sub(s.splat(1.0), s.sub(u, x));
    let lost = s.select(s.lt(x, s.splat(1.0)), from_one, from_x);
    let (e, f) = split(s, u);
    let tail = s.add(log_tail(s, f), s.div(lost, u));
    let y = s.add(f, s.fma(e, s.splat(1.428_606_8e-6), tail));
    let y = log_special(s, u, s.fma(e, s.splat(0.693_145_75), y));
    s.select(s.eq(x, s.zero()), x, y)
}

#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    // Beyond 9 the result rounds to 1.
    let t = s.min(s.splat(10.0), s.abs(x));
    let e = expm1(s, s.add(t, t));
    s.copysign(s.div(e, s.add(e, s.splat(2.0))), x)
}

#[inline(always)]
pub(crate) fn erf<S: Simd>(s: S, x: S::F) -> S::F {
    let t = s.min(s.splat(4.0), s.abs(x));
    let small = s.fma(t, poly(s, s.mul(t, t), ERF_SMALL), t);
    let exponent = s.fma(t, poly(s, t, ERF_LARGE), t);
    let large = s.sub(s.splat(1.0), exp(s, s.neg(exponent)));
    s.copysign(s.select(s.lt(t, s.splat(ERF_SPLIT)), small, large), x)
}

/// `e^-|x|` and `1 + e^-|x|`.
#[inline(always)]
fn exp_neg_abs<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    let e = exp(s, s.neg(s.abs(x)));
    (e, s.add(s.splat(1.0), e))
}

#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let (e, sum) = exp_neg_abs(s, x);
    s.div(s.select(s.lt(x, s.zero()), e, s.splat(1.0)), sum)
}

/// As the product says, minus infinity gives NaN.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    s.mul(x, sigmoid(s, x))
}

/// `x P(x)`, P being the normal distribution function: one exponential of a polynomial gives both
/// tails, where the error function needs two forms.
#[inline(always)]
pub(crate) fn gelu<S: Simd>(s: S, x: S::F) -> S::F {
    let (one, most) = (s.splat(1.0), s.splat(126.0));
    let tail = poly(s, s.min(s.splat(16.0), s.abs(x)), NORMAL_TAIL);
    let exponent = s.min(most, tail);
    let (n, n_int) = round_product(s, exponent, one);
    let p = s.fma(s.sub(n, exponent), poly(s, s.sub(n, exponent), EXP2), one);
    let p = s.mul(p, power_of_two(s, s.sub_i(s.splat_i(0), n_int)));
    let p = s.select(s.lt(most, tail), s.zero(), p);
    s.mul(x, s.select(s.lt(x, s.zero()), p, s.sub(one, p)))
}

/// Through the sigmoid, which needs no difference: `1 + tanh(u) = 2 sigmoid(2 u)`.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    // 2 sqrt(2 / pi), and that times 0.044715.
    let u = s.mul(
        x,
        s.fma(s.mul(x, x), s.splat(0.071_354_814), s.splat(1.595_769)),
    );
    s.mul(x, sigmoid(s, u))
}

#[inline(always)]
pub(crate) fn softplus<S: Simd>(s: S, x: S::F) -> S::F {
    let positive = s.max(s.zero(), x);
    s.add(positive, log1p(s, exp(s, s.neg(s.abs(x)))))
}

/// `tanh(ln(1 + u)) = (u^2 + 2 u) / (u^2 + 2 u + 2)` with `u = e^x`.
#[inline(always)]
pub(crate) fn mish<S: Simd>(s: S, x: S::F) -> S::F {
    // Beyond 20 the quotient rounds to 1.
    let u = exp(s, s.min(s.splat(20.0), x));
    let n = s.mul(u, s.add(u, s.splat(2.0)));
    s.mul(x, s.div(n, s.add(n, s.splat(2.0))))
}

/// Largest angle whose quadrant number is exact below.
const MAX_ANGLE: f32 = 1e6;

/// Reduces an angle in f64, where two products leave 2^-60; `(r, quadrant)`.
#[inline(always)]
fn reduce_angle<S: Simd>(s: S, x: S::F) -> (S::F, S::I) {
    let (n, quadrant) = round_product(s, x, s.splat(std::f32::consts::FRAC_2_PI));
    let n = s.widen(s.neg(n));
    // The first constant has 33 bits, so that its product with `n` is exact even without a fused
    // multiply-add.
    let r = s.fma_d(n, s.splat_d(1.570_796_326_734_125_6), s.widen(x));
    (
        s.narrow(s.fma_d(n, s.splat_d(6.077_100_506_506_192e-11), r)),
        quadrant,
    )
}

/// Sine of `x` plus a number of quarter turns.
#[inline(always)]
fn sin_plus<S: Simd>(s: S, x: S::F, quarters: i32) -> S::F {
    let (r, quadrant) = reduce_angle(s, x);
    let quadrant = s.add_i(quadrant, s.splat_i(quarters));
    let z = s.mul(r, r);
    let sine = s.fma(s.mul(r, z), poly(s, z, SIN), r);
    let cosine = s.fma(
        s.mul(z, z),
        poly(s, z, COS),
        s.fma(z, s.splat(-0.5), s.splat(1.0)),
    );
    let even = s.eq_i(s.and(quadrant, s.splat_i(1)), s.splat_i(0));
    let sign = s.shl(s.and(quadrant, s.splat_i(2)), 30);
    s.as_float(s.xor(s.bits(s.select(even, sine, cosine)), sign))
}

#[inline(always)]
pub(crate) fn sin<S: Simd>(s: S, x: S::F) -> S::F {
    let y = s.select(s.eq(x, s.zero()), x, sin_plus(s, x, 0));
    large_angles(s, x, y, libm::sin)
}

#[inline(always)]
pub(crate) fn cos<S: Simd>(s: S, x: S::F) -> S::F {
    large_angles(s, x, sin_plus(s, x, 1), libm::cos)
}

/// `y`, or where the angle is too large for the reduction, `f(x)`.
#[inline(always)]
fn large_angles<S: Simd>(s: S, x: S::F, y: S::F, f: fn(f64) -> f64) -> S::F {
    let is_large = s.lt(s.splat(MAX_ANGLE), s.abs(x));
    if s.any(is_large) {
        s.select(is_large, by_lane(s, x, f), y)
    } else {
        y
    }
}

/// For rare functions and arguments.
#[inline(always)]
fn by_lane<S: Simd>(s: S, x: S::F, f: fn(f64) -> f64) -> S::F {
    let mut lanes = [0f32; 16];
    // SAFETY: no instruction set has more than 16 lanes.
    unsafe {
        s.store(lanes.as_mut_ptr(), x);
        map_lanes(&mut lanes[..S::LANES], f);
        s.load(lanes.as_ptr())
    }
}

#[inline(never)]
fn map_lanes(lanes: &mut [f32], f: fn(f64) -> f64) {
    for lane in lanes {
        *lane = f(f64::from(*lane)) as f32;
    }
}

macro_rules! by_lane {
    ($($name:ident = $f:expr),*) => {
        $(#[inline(always)]
        pub(crate) fn $name<S: Simd>(s: S, x: S::F) -> S::F {
            by_lane(s, x, $f)
        })*
    };
}
by_lane! {
    tan = libm::tan, asin = libm::asin, acos = libm::acos, atan = libm::atan,
    sinh = f64::sinh, cosh = f64::cosh, asinh = f64::asinh, acosh = f64::acosh, atanh = f64::atanh
}

#[inline(always)]
pub(crate) fn sqrt<S: Simd>(s: S, x: S::F) -> S::F {
    s.sqrt(x)
}

#[inline(always)]
pub(crate) fn rsqrt<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(s.splat(1.0), s.sqrt(x))
}

#[inline(always)]
pub(crate) fn reciprocal<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(s.splat(1.0), x)
}

/// `a^b`, as C99's `powf`: the logarithm has f64's precision, since the power multiplies its error
/// by up to 128.
#[inline(always)]
pub(crate) fn pow<S: Simd>(s: S, a: S::F, b: S::F) -> S::F {
    let (infinity, one) = (s.splat(f32::INFINITY), s.splat(1.0));
    let base = s.abs(a);
    // log2 of 0 and infinity, as infinities; NaN stays.
    let finite = s.and_m(s.lt(s.zero(), base), s.lt(base, infinity));
    let edge = s.select(s.eq(base, s.zero()), s.neg(infinity), base);
    let log = log2_wide(s, s.select(finite, base, one));
    let power = s.mul_d(log, s.widen(b));
    let edge_power = s.mul(edge, b);
    let rough = clamp(
        s,
        s.select(finite, s.narrow(power), edge_power),
        -152.0,
        130.0,
    );
    let (n, n_int) = round_product(s, rough, one);
    // Where the power was clamped the remainder is meaningless, but its sign is right.
    let r = s.narrow(s.sub_d(power, s.widen(n)));
    let r = s.select(finite, r, s.add(edge_power, s.zero()));
    let y = exp2_reduced(s, clamp(s, r, -0.5, 0.5), n, n_int);
    let y = pow_sign(s, a, b, y);
    let unit_base = s.and_m(s.eq(base, one), s.eq(s.abs(b), infinity));
    let is_one = s.or_m(s.or_m(s.eq(a, one), s.eq(b, s.zero())), unit_base);
    s.select(is_one, one, y)
}

/// Gives `y = |a|^b` the sign, or NaN, that a negative `a` brings.
#[inline(always)]
fn pow_sign<S: Simd>(s: S, a: S::F, b: S::F, y: S::F) -> S::F {
    // From 2^24 on every float is an even integer; below, halving keeps the rounding trick in
    // range.
    let magnitude = s.abs(b);
    let is_large = s.le(s.splat(16_777_216.0), magnitude);
    let b = s.select(is_large, s.zero(), b);
    let (half, _) = round_product(s, b, s.splat(0.25));
    // The remainder of `b` by 4, exact: |rest| <= 2.
    let rest = s.fma(half, s.splat(-4.0), b);
    let (whole, whole_int) = round_product(s, rest, s.splat(1.0));
    let is_integer = s.eq(whole, rest);
    let sign = s.and(s.and(s.bits(a), s.splat_i(i32::MIN)), s.shl(whole_int, 31));
    let signed = s.as_float(s.xor(s.bits(y), sign));
    // Negative, finite, nonzero bases have no real power that is not an integer.
    let negative = s.and_m(s.lt(a, s.zero()), s.lt(s.splat(f32::NEG_INFINITY), a));
    s.select(is_integer, signed, s.select(negative, s.splat(f32::NAN), y))
}
