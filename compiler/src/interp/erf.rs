//! The error function in `f64`.

/// Coefficients of W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969), as in
/// his CALERF: numerators (last first) and monic denominators for `|x| <= 0.46875`, up to 4, and beyond.
const NEAR_NUM: [f64; 5] = [
    1.857_777_061_846_031_5e-1,
    3.161_123_743_870_565_6,
    1.138_641_541_510_501_6e2,
    3.774_852_376_853_02e2,
    3.209_377_589_138_469_5e3,
];
const NEAR_DEN: [f64; 4] =
    [2.360_129_095_234_412e1, 2.440_246_379_344_441_7e2, 1.282_616_526_077_372_3e3, 2.844_236_833_439_170_6e3];
const MID_NUM: [f64; 9] = [
    2.153_115_354_744_038_5e-8,
    5.641_884_969_886_700_9e-1,
    8.883_149_794_388_376,
    6.611_919_063_714_163e1,
    2.986_351_381_974_001_3e2,
    8.819_522_212_417_691e2,
    1.712_047_612_634_070_6e3,
    2.051_078_377_826_071_5e3,
    1.230_339_354_797_997_2e3,
];
const MID_DEN: [f64; 8] = [
    1.574_492_611_070_983_5e1,
    1.176_939_508_913_125e2,
    5.371_811_018_620_099e2,
    1.621_389_574_566_690_2e3,
    3.290_799_235_733_459_6e3,
    4.362_619_090_143_247e3,
    3.439_367_674_143_721_6e3,
    1.230_339_354_803_749_4e3,
];
const FAR_NUM: [f64; 6] = [
    1.631_538_713_730_209_8e-2,
    3.053_266_349_612_323_4e-1,
    3.603_448_999_498_044_4e-1,
    1.257_817_261_112_292_5e-1,
    1.608_378_514_874_227_7e-2,
    6.587_491_615_298_378e-4,
];
const FAR_DEN: [f64; 5] = [
    2.568_520_192_289_822,
    1.872_952_849_923_467_3,
    5.279_051_029_514_284e-1,
    6.051_834_131_244_132e-2,
    2.335_204_976_268_691_8e-3,
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
        let tail = (1..200).rev().fold(x, |below, n| x + 0.5 * f64::from(n) / below);
        1.0 - std::f64::consts::FRAC_2_SQRT_PI / 2.0 * (-x * x).exp() / tail
    }

    #[test]
    fn agrees_with_the_series_and_the_continued_fraction() {
        for i in 1..=1400 {
            let x = f64::from(i) * 0.005;
            let (got, expected) = (erf(x), if x < 2.5 { series(x) } else { continued_fraction(x) });
            assert!((got - expected).abs() <= 8.0 * f64::EPSILON * expected, "erf({x}) = {got}, expected {expected}");
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
