//! Elementary functions against `f64`, over their ranges and at special values.

use super::*;
use crate::testing::Rng;

const SPECIAL: [f32; 30] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    3.0,
    -3.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    1e-45,
    -1e-45,
    1e-40,
    f32::MAX,
    f32::MIN,
    88.722_84,
    88.73,
    -87.34,
    -103.9,
    -104.5,
    16_777_216.0,
    16_777_215.0,
    -8_388_607.5,
    1e6,
    2.5,
    -2.5,
];

/// Arguments over the whole line: special ones, every exponent, and densely where functions bend.
fn arguments() -> Vec<f32> {
    let mut rng = Rng(7);
    let mut out = SPECIAL.to_vec();
    out.extend((0..60_000).map(|_| f32::from_bits(rng.next() as u32)));
    for scale in [0.01, 1.0, 4.0, 20.0, 110.0, 1e5] {
        out.extend((0..20_000).map(|_| rng.unit() * scale));
    }
    out.extend((0..20_000).map(|_| 1.0 + rng.unit() * 0.5));
    out
}

/// Units of the last place of f32 at `x`.
fn ulp(x: f64) -> f64 {
    let x = x
        .abs()
        .clamp(f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
    2f64.powi(x.log2().floor() as i32 - 23)
}

/// Error in units of the last place, or None if NaN or infinities disagree.
fn error(got: f32, want: f64) -> Option<f64> {
    let rounded = want as f32;
    if got.is_nan() || want.is_nan() {
        return (got.is_nan() && want.is_nan()).then_some(0.0);
    }
    if got == rounded {
        return Some(if rounded.is_finite() {
            (f64::from(got) - want).abs() / ulp(want)
        } else {
            0.0
        });
    }
    // One of them may just have overflowed.
    let got = if got.is_infinite() {
        f64::from(f32::MAX).copysign(f64::from(got)) * (1.0 + 2f64.powi(-24))
    } else {
        f64::from(got)
    };
    Some((got - want).abs() / ulp(want))
}

fn apply(function: &Function, isa: Isa, x: &[f32]) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len()];
    // SAFETY: both arrays have `len` elements.
    unsafe { function.kernel(isa)(x.len(), x.as_ptr(), y.as_mut_ptr()) };
    y
}

#[test]
fn functions_keep_their_error_bounds() {
    let x = arguments();
    let mut failures = String::new();
    for function in FUNCTIONS {
        for isa in Isa::available() {
            let mut worst = (0.0, 0.0f32, 0.0f32, 0.0);
            for (&x, y) in x.iter().zip(apply(function, isa, &x)) {
                let want = (function.reference)(f64::from(x));
                let allowed = function.max_abs * f64::from(x).abs().max(1.0);
                let error = error(y, want).unwrap_or(f64::INFINITY);
                let tolerated = (f64::from(y) - want).abs() <= allowed;
                if !tolerated && error > worst.0 {
                    worst = (error, x, y, want);
                }
            }
            if worst.0 > function.max_ulp {
                failures += &format!(
                    "{} {isa}: {:.2} ulp at {:?}: got {:?}, want {:?}\n",
                    function.symbol, worst.0, worst.1, worst.2, worst.3
                );
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn odd_functions_keep_the_sign_of_zero() {
    for function in FUNCTIONS {
        if (function.reference)(0.0) == 0.0 {
            for isa in Isa::available() {
                let y = apply(function, isa, &[0.0, -0.0, 0.0, -0.0, 0.0]);
                // Softplus-like functions do not pass here: f(0) != 0.
                let want = (function.reference)(-0.0);
                assert_eq!(
                    y[1].is_sign_negative(),
                    want.is_sign_negative(),
                    "{} {isa}: {y:?}",
                    function.symbol
                );
            }
        }
    }
}

#[test]
fn every_length_is_written_and_no_more() {
    for isa in Isa::available() {
        for n in 0..70 {
            let x = vec![0.25f32; n];
            let mut y = vec![7.0f32; n + 3];
            // SAFETY: `x` has `n` elements, `y` more.
            unsafe { FUNCTIONS[0].kernel(isa)(n, x.as_ptr(), y.as_mut_ptr()) };
            assert!(
                y[..n].iter().all(|&y| (y - 1.284_025_4).abs() < 1e-6),
                "{isa} {n}"
            );
            assert_eq!(y[n..], [7.0; 3], "{isa} {n}");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn wide_instruction_sets_agree_bit_for_bit() {
    if !Isa::Avx512.is_available() {
        eprintln!("skipped: this CPU has no AVX-512");
        return;
    }
    let x = arguments();
    for function in FUNCTIONS {
        let bits = |isa| {
            apply(function, isa, &x)
                .into_iter()
                .map(f32::to_bits)
                .collect::<Vec<_>>()
        };
        let nan = |bits: &u32| f32::from_bits(*bits).is_nan();
        let (wide, narrow) = (bits(Isa::Avx512), bits(Isa::Avx2));
        let differ = wide
            .iter()
            .zip(&narrow)
            .zip(&x)
            .find(|((a, b), _)| a != b && !(nan(a) && nan(b)));
        assert!(differ.is_none(), "{}: {differ:?}", function.symbol);
    }
}

#[test]
fn pow_agrees_with_f64() {
    let mut rng = Rng(8);
    let mut pairs: Vec<(f32, f32)> = SPECIAL
        .iter()
        .flat_map(|&a| SPECIAL.iter().map(move |&b| (a, b)))
        .collect();
    for _ in 0..100_000 {
        pairs.push((rng.unit() * 4.0, rng.unit() * 60.0));
        pairs.push((rng.unit() * 50.0, (rng.below(41) as f32) - 20.0));
        pairs.push((f32::from_bits(rng.next() as u32), rng.unit() * 3.0));
        pairs.push((1.0 + rng.unit() * 1e-3, rng.unit() * 1e5));
    }
    let a: Vec<f32> = pairs.iter().map(|pair| pair.0).collect();
    let b: Vec<f32> = pairs.iter().map(|pair| pair.1).collect();
    for isa in Isa::available() {
        let mut y = vec![0f32; a.len()];
        // SAFETY: all arrays have the same length; the instruction set is available.
        unsafe {
            dispatch(
                isa,
                PowArray {
                    n: a.len(),
                    a: a.as_ptr(),
                    b: b.as_ptr(),
                    y: y.as_mut_ptr(),
                },
            )
        };
        for ((&a, &b), &y) in a.iter().zip(&b).zip(&y) {
            let want = f64::from(a).powf(f64::from(b));
            assert!(
                error(y, want).is_some_and(|error| error <= 1.1),
                "{isa}: {a:?}^{b:?}: got {y:?}, want {want:?}"
            );
            assert!(
                y.is_nan() || want as f32 != 0.0 || y.is_sign_negative() == want.is_sign_negative(),
                "{isa}: sign of {a:?}^{b:?}"
            );
        }
    }
}
