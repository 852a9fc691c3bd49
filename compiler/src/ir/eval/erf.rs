//! The error function in `f64`.

/// Coefficients of W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969), as in
/// his CALERF: numerators (last first) and monic denominators for `|x| <= 0.46875`, up to 4, and beyond.
const NEAR_NUM: [f64; 5] = [
    0.18577770618460315,
    3.1611237438705655,
    113.86415415105016,
    377.485237685302,
    3209.3775891384694,
];
const NEAR_DEN: [f64; 4] = [
    23.60129095234412,
    244.02463793444417,
    1282.6165260773723,
    2844.236833439171,
];
const MID_NUM: [f64; 9] = [
    2.1531153547440383e-08,
    0.5641884969886701,
    8.883149794388377,
    66.11919063714163,
    298.6351381974001,
    881.952221241769,
    1712.0476126340707,
    2051.0783778260716,
    1230.3393547979972,
];
const MID_DEN: [f64; 8] = [
    15.744926110709835,
    117.6939508913125,
    537.1811018620099,
    1621.3895745666903,
    3290.7992357334597,
    4362.619090143247,
    3439.3676741437216,
    1230.3393548037493,
];
const FAR_NUM: [f64; 6] = [
    0.016315387137302097,
    0.30532663496123236,
    0.36034489994980445,
    0.12578172611122926,
    0.01608378514874228,
    0.0006587491615298378,
];
const FAR_DEN: [f64; 5] = [
    2.568520192289822,
    1.8729528499234673,
    0.5279051029514285,
    0.06051834131244132,
    0.0023352049762686918,
];

/// `2 / sqrt(pi) * integral of e^(-t^2) from 0 to x`, within 4 units in the last place. NaN gives NaN.
pub fn erf(x: f64) -> f64 {
    let y = x.abs();
    if y.is_nan() {
        return x;
    }
    if y <= 0.46875 {
        return x * ratio(&NEAR_NUM, &NEAR_DEN, y * y);
    }
    let tail = if y > 6.0 {
        0.0
    } else if y <= 4.0 {
        exp_minus_square(y) * ratio(&MID_NUM, &MID_DEN, y)
    } else {
        let z = 1.0 / (y * y);
        let series = z * ratio(&FAR_NUM, &FAR_DEN, z);
        exp_minus_square(y) * (std::f64::consts::FRAC_2_SQRT_PI / 2.0 - series) / y
    };
    ((0.5 - tail) + 0.5).copysign(x)
}

/// `num(z) / den(z)` by Horner's rule, highest power first; `den` is monic, its leading 1 not stored.
fn ratio(num: &[f64], den: &[f64], z: f64) -> f64 {
    num.iter().fold(0.0, |sum, c| sum * z + c) / den.iter().fold(1.0, |sum, c| sum * z + c)
}

/// `e^(-y^2)`, the square split so that its rounding does not show.
fn exp_minus_square(y: f64) -> f64 {
    let high = (y * 16.0).trunc() / 16.0;
    (-high * high).exp() * (-(y - high) * (y + high)).exp()
}

#[cfg(test)]
mod tests {
    use super::erf;

    /// `2 / sqrt(pi) * e^(-x^2) * sum of 2^n x^(2n+1) / (2n+1)!!`: every term is positive, so nothing cancels.
    fn series(x: f64) -> f64 {
        let square = x * x;
        let low = x.mul_add(x, -square);
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > sum.abs() * 1e-18 {
            n += 1.0;
            term *= 2.0 * square / (2.0 * n + 1.0);
            sum += term;
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-square).exp() * (1.0 - low) * sum
    }

    /// `1 - e^(-x^2) / sqrt(pi) / (x + (1/2)/(x + 1/(x + (3/2)/(x + ..))))`, good for large `x`.
    fn continued_fraction(x: f64) -> f64 {
        let tail = (1..200)
            .rev()
            .fold(x, |below, n| x + 0.5 * f64::from(n) / below);
        1.0 - std::f64::consts::FRAC_2_SQRT_PI / 2.0 * (-x * x).exp() / tail
    }

    #[test]
    fn agrees_with_the_series_and_the_continued_fraction() {
        for i in 1..=1400 {
            let x = f64::from(i) * 0.005;
            let (got, expected) = (
                erf(x),
                if x < 2.5 {
                    series(x)
                } else {
                    continued_fraction(x)
                },
            );
            assert!(
                (got - expected).abs() <= 8.0 * f64::EPSILON * expected,
                "erf({x}) = {got}, expected {expected}"
            );
            assert_eq!(erf(-x), -got);
        }
    }

    #[test]
    fn known_and_special_values() {
        assert!((erf(1.0) - 0.842_700_792_949_714_9).abs() < 2e-16);
        assert!((erf(0.5) - 0.520_499_877_813_046_5).abs() < 2e-16);
        assert_eq!(erf(0.0).to_bits(), 0);
        assert_eq!(erf(-0.0).to_bits(), (-0.0f64).to_bits());
        assert_eq!(erf(f64::INFINITY), 1.0);
        assert_eq!(erf(f64::NEG_INFINITY), -1.0);
        assert_eq!(erf(7.0), 1.0);
        assert!(erf(f64::NAN).is_nan());
        assert_eq!(erf(1e-300), 1e-300 * std::f64::consts::FRAC_2_SQRT_PI);
    }
}
