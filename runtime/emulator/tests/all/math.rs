//! CUDA's math functions as NVRTC compiles them, against Rust's in double precision.

use gristmill_emulator::Args;

use super::support::{device, download, line, module, run, upload};

/// A function, its largest error in units of the last place (CUDA C++ Programming Guide, "Mathematical Functions", plus
/// one for rounding), and an absolute error that is let go.
struct Row {
    name: &'static str,
    f: fn(f64) -> f64,
    ulps: f64,
    absolute: f64,
}

const fn row(name: &'static str, f: fn(f64) -> f64, ulps: f64) -> Row {
    Row {
        name,
        f,
        ulps,
        absolute: 0.0,
    }
}

/// Functions in the order of the rows of `math_f32.cu`.
const SINGLE: &[Row] = &[
    row("sinf", f64::sin, 3.0),
    row("cosf", f64::cos, 3.0),
    row("tanf", f64::tan, 5.0),
    row("expf", f64::exp, 3.0),
    row("logf", f64::ln, 2.0),
    row("powf", |x| x.powf(f64::from(1.7f32)), 5.0),
    row("erff", erf, 3.0),
    row("tanhf", f64::tanh, 3.0),
    row("sqrtf", f64::sqrt, 0.51),
    row("rsqrtf", |x| 1.0 / x.sqrt(), 3.0),
    row("division", |x| x / f64::from(x as f32 + 2.0), 0.51),
    row("floorf", f64::floor, 0.0),
    row("ceilf", f64::ceil, 0.0),
    row("rintf", f64::round_ties_even, 0.0),
    row("truncf", f64::trunc, 0.0),
    row("fmodf", |x| x % 3.0, 0.0),
    row("roundf", f64::round, 0.0),
    row("asinf", f64::asin, 5.0),
    row("acosf", f64::acos, 3.0),
    row("atanf", f64::atan, 3.0),
    row("sinhf", f64::sinh, 4.0),
    row("coshf", f64::cosh, 3.0),
    row("log1pf", f64::ln_1p, 2.0),
    row("expm1f", f64::exp_m1, 2.0),
    row("exp2f", f64::exp2, 3.0),
    row("log2f", f64::log2, 2.0),
    row("cbrtf", f64::cbrt, 2.0),
    row("fminf", |x| if x.is_nan() { 1.0 } else { x.min(1.0) }, 0.0),
    row("fmaxf", |x| if x.is_nan() { 0.0 } else { x.max(0.0) }, 0.0),
    row("fabsf", f64::abs, 0.0),
    // Two and floor(1.173 |x|) for `__expf`; results that underflow are flushed.
    Row {
        name: "__expf",
        f: f64::exp,
        ulps: 110.0,
        absolute: 2e-38,
    },
    Row {
        name: "__logf",
        f: f64::ln,
        ulps: 4.0,
        absolute: 4e-7,
    },
    row("__fdividef", |x| x / 3.0, 3.0),
    Row {
        name: "erfcf",
        f: |x| 1.0 - erf(x),
        ulps: 5.0,
        absolute: 1e-12,
    },
    row("atan2f", |x| x.atan2(2.0), 4.0),
    row("copysignf", |x| if x.is_nan() { x } else { -x.abs() }, 0.0),
    row("ldexpf", |x| x * 8.0, 0.51),
    row("hypotf", |x| x.hypot(2.0), 4.0),
    row(
        "remainderf",
        |x| {
            if x.is_infinite() {
                f64::NAN
            } else {
                x - 2.0 * (x / 2.0).round_ties_even()
            }
        },
        0.0,
    ),
    row(
        "fdimf",
        |x| if x.is_nan() { x } else { (x - 1.0).max(0.0) },
        0.51,
    ),
];

/// Arguments of every kind.
const X: &[f32] = &[
    0.5,
    1.0,
    2.0,
    0.1,
    3.3,
    10.0,
    100.0,
    1e6,
    3e9,
    1e-3,
    1e-20,
    -0.5,
    -1.0,
    -3.7,
    -100.0,
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1e-40,
    0.99999,
    7.5,
    -2.5,
    105615.0,
    105616.0,
    88.0,
    -87.0,
    1e38,
    5.5,
    4.0,
    0.25,
];

/// Error function by Simpson's rule; one for arguments beyond 6.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let n = 4000;
    let h = x / f64::from(n);
    let f = |t: f64| (-t * t).exp();
    let inner: f64 = (1..n)
        .map(|k| f(f64::from(k) * h) * if k % 2 == 1 { 4.0 } else { 2.0 })
        .sum();
    std::f64::consts::FRAC_2_SQRT_PI * h / 3.0 * (f(0.0) + inner + f(x))
}

/// Rounded to single precision, with an exponent as large as needed: a result may overflow, as it should.
fn ulp(x: f64) -> f64 {
    let exponent = x.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor();
    (exponent - 23.0).exp2()
}

fn check(row: &Row, x: f64, found: f64, ulp: f64) -> Option<String> {
    let expected = (row.f)(x);
    let same = found.is_nan() && expected.is_nan()
        || found == expected
        || (found - expected).abs() <= row.ulps * ulp + row.absolute
        // Beyond the largest float.
        || found.is_infinite() && expected.abs() > f64::from(f32::MAX) && found.signum() == expected.signum();
    (!same).then(|| format!("{}({x:e}) = {found:e}, expected {expected:e}", row.name))
}

#[test]
fn single_precision_functions() {
    let (device, module) = (device(), module("math_f32"));
    let n = X.len();
    let rows = 56;
    let out = device.alloc(rows * n * 4).unwrap();
    let args = Args::new().u64(upload(&device, X)).u64(out).u32(n as u32);
    run(&device, &module, "math_f32", &line(1, 32), &args);
    let found: Vec<f32> = download(&device, out, rows * n);
    let mut wrong = Vec::new();
    for (k, row) in SINGLE.iter().enumerate() {
        for (i, x) in X.iter().enumerate() {
            let expected = (row.f)(f64::from(*x));
            wrong.extend(check(
                row,
                f64::from(*x),
                f64::from(found[k * n + i]),
                ulp(expected),
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn directed_rounding_brackets_the_exact_result() {
    let (device, module) = (device(), module("math_f32"));
    let n = X.len();
    let out = device.alloc(56 * n * 4).unwrap();
    let args = Args::new().u64(upload(&device, X)).u64(out).u32(n as u32);
    run(&device, &module, "math_f32", &line(1, 32), &args);
    let found: Vec<f32> = download(&device, out, 56 * n);
    for (i, x) in X.iter().enumerate().filter(|(_, x)| x.is_finite()) {
        let (wide, tenth) = (f64::from(*x), f64::from(0.1f32));
        let at = |row: usize| f64::from(found[row * n + i]);
        // Sums and products of floats are exact in double precision for these exponents, or off by far less than an ulp.
        let below = |found: f64, exact: f64| found <= exact && exact - found < 1.01 * ulp(exact);
        assert!(
            below(at(50), wide + tenth),
            "{x:e} + 0.1 rounded down: {:e}",
            at(50)
        );
        assert!(
            below(-at(51), -(wide * tenth)),
            "{x:e} * 0.1 rounded up: {:e}",
            at(51)
        );
        assert!(
            below(at(52).abs(), (wide / 3.0).abs()),
            "{x:e} / 3 rounded to zero: {:e}",
            at(52)
        );
    }
}

const DOUBLE: &[Row] = &[
    row("sin", f64::sin, 3.0),
    row("cos", f64::cos, 3.0),
    row("tan", f64::tan, 3.0),
    row("exp", f64::exp, 2.0),
    row("log", f64::ln, 2.0),
    row("pow", |x| x.powf(2.5), 3.0),
    Row {
        name: "erf",
        f: erf,
        ulps: 0.0,
        absolute: 1e-12,
    },
    row("tanh", f64::tanh, 3.0),
    row("sqrt", f64::sqrt, 0.0),
    row("rsqrt", |x| 1.0 / x.sqrt(), 2.0),
    row("division", |x| x / 3.0, 0.0),
    row("floor", f64::floor, 0.0),
    row("ceil", f64::ceil, 0.0),
    row("rint", f64::round_ties_even, 0.0),
    row("trunc", f64::trunc, 0.0),
    row("fmod", |x| x % 3.0, 0.0),
    row("round", f64::round, 0.0),
    row("asin", f64::asin, 3.0),
    row("acos", f64::acos, 3.0),
    row("atan", f64::atan, 3.0),
    row("sinh", f64::sinh, 3.0),
    row("cosh", f64::cosh, 2.0),
    row("log1p", f64::ln_1p, 2.0),
    row("expm1", f64::exp_m1, 2.0),
    row("exp2", f64::exp2, 2.0),
    row("log2", f64::log2, 2.0),
    row("cbrt", f64::cbrt, 2.0),
    row("fmin", |x| if x.is_nan() { 1.0 } else { x.min(1.0) }, 0.0),
    row("fmax", |x| if x.is_nan() { 0.0 } else { x.max(0.0) }, 0.0),
    row("fabs", f64::abs, 0.0),
];

#[test]
fn double_precision_functions_and_calls() {
    let (device, module) = (device(), module("math_f64"));
    let x: Vec<f64> = X.iter().map(|x| f64::from(*x)).collect();
    let n = x.len();
    let rows = 38;
    let out = device.alloc(rows * n * 8).unwrap();
    let args = Args::new().u64(upload(&device, &x)).u64(out).u32(n as u32);
    run(&device, &module, "math_f64", &line(1, 32), &args);
    let found: Vec<f64> = download(&device, out, rows * n);
    let mut wrong = Vec::new();
    for (k, row) in DOUBLE.iter().enumerate() {
        for (i, x) in x.iter().enumerate() {
            let expected = (row.f)(*x).abs().max(f64::MIN_POSITIVE);
            wrong.extend(check(row, *x, found[k * n + i], expected * f64::EPSILON));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
