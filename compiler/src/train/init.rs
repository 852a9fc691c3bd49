//! Initial values of variables.

use super::philox::Draws;
use crate::error::Result;
use gristmill_runtime::{DType, Tensor};

/// Initial values. Random ones depend on the seed, the name of the variable and the place in it alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same everywhere.
    Constant(f64),
    /// Evenly from `low` to below `high`.
    Uniform {
        /// The least value.
        low: f64,
        /// Upper end of the values, exclusive.
        high: f64,
    },
    /// The normal distribution.
    Normal {
        /// Its mean.
        mean: f64,
        /// Its standard deviation.
        deviation: f64,
    },
    /// The normal distribution without values further than two deviations from the mean, as TensorFlow's
    /// `truncated_normal`; the deviation is that before the cut.
    TruncatedNormal {
        /// Its mean.
        mean: f64,
        /// The standard deviation of the whole distribution.
        deviation: f64,
    },
    /// Evenly within `sqrt(6 / (fan_in + fan_out))` (Glorot and Bengio, 2010, equation 16). Keras' default.
    GlorotUniform,
    /// Normally with the deviation `sqrt(2 / fan_in)` (He et al., 2015, equation 10), for layers before ReLU.
    HeNormal,
    /// Evenly within `sqrt(6 / fan_in)`.
    HeUniform,
    /// Evenly within `1 / sqrt(fan_in)`. PyTorch's default of linear and convolutional layers.
    FanIn,
}

impl Init {
    /// Values of a variable. Of weights `[in, out]` the fans are the extents, of filters `[out, in, spatial..]` those times the
    /// spatial extents; of other ranks both are the number of elements.
    pub fn values(&self, dtype: DType, shape: &[usize], seed: u64, name: &str) -> Result<Tensor> {
        // A model may have gigabytes of zeros, which need no memory before they are written.
        if let Init::Constant(0.0) = self {
            return Ok(Tensor::zeros(dtype, shape)?);
        }
        let draws = Draws::new(seed, name, 0);
        let n: usize = shape.iter().product();
        let law = self.law(fans(shape));
        let values: Vec<f64> = (0..n as u64).map(|i| law.value(&draws, i)).collect();
        Ok(Tensor::from_f64s(dtype, shape, &values)?)
    }

    fn law(&self, [fan_in, fan_out]: [f64; 2]) -> Law {
        let within = |bound: f64| Law::Uniform(-bound, bound);
        match *self {
            Init::Constant(x) => Law::Uniform(x, x),
            Init::Uniform { low, high } => Law::Uniform(low, high),
            Init::Normal { mean, deviation } => Law::Normal(mean, deviation, 0.0),
            Init::TruncatedNormal { mean, deviation } => Law::Normal(mean, deviation, BEYOND_TWO),
            Init::GlorotUniform => within((6.0 / (fan_in + fan_out)).sqrt()),
            Init::HeNormal => Law::Normal(0.0, (2.0 / fan_in).sqrt(), 0.0),
            Init::HeUniform => within((6.0 / fan_in).sqrt()),
            Init::FanIn => within(1.0 / fan_in.sqrt()),
        }
    }
}

/// Fan-in of an output and fan-out of an input, in elements.
fn fans(shape: &[usize]) -> [f64; 2] {
    let all = shape.iter().product::<usize>();
    let fans = match *shape {
        [fan_in, fan_out] => [fan_in, fan_out],
        [outputs, inputs, _, ..] => {
            let spatial: usize = shape[2..].iter().product();
            [inputs * spatial, outputs * spatial]
        }
        _ => [all, all],
    };
    fans.map(|fan| fan.max(1) as f64)
}

/// A distribution.
enum Law {
    /// From the first to below the second.
    Uniform(f64, f64),
    /// Mean, standard deviation, and the part of the probability that is cut off on each side.
    Normal(f64, f64, f64),
}

impl Law {
    fn value(&self, draws: &Draws, i: u64) -> f64 {
        match *self {
            Law::Uniform(low, high) => low + (high - low) * draws.uniform(i),
            Law::Normal(mean, deviation, cut) => {
                let p = cut + (1.0 - 2.0 * cut) * draws.open(i);
                mean + deviation * quantile(p)
            }
        }
    }
}

/// Probability of more than two deviations above the mean.
const BEYOND_TWO: f64 = 0.022_750_131_948_179_21;

/// Polynomials, constant term first, by which [`quantile`] divides and is divided.
type Ratio = [[f64; 8]; 2];

const CENTRAL: Ratio = [
    [
        3.387_132_872_796_366_5,
        133.141_667_891_784_38,
        1_971.590_950_306_551_3,
        13_731.693_765_509_46,
        45_921.953_931_549_87,
        67_265.770_927_008_7,
        33_430.575_583_588_13,
        2_509.080_928_730_122_7,
    ],
    [
        1.0,
        42.313_330_701_600_91,
        687.187_007_492_057_9,
        5_394.196_021_424_751,
        21_213.794_301_586_597,
        39_307.895_800_092_71,
        28_729.085_735_721_943,
        5_226.495_278_852_854,
    ],
];
const MIDDLE: Ratio = [
    [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        0.241_780_725_177_450_6,
        0.022_723_844_989_269_184,
        7.745_450_142_783_414e-4,
    ],
    [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        0.689_767_334_985_1,
        0.148_103_976_427_480_08,
        0.015_198_666_563_616_457,
        5.475_938_084_995_345e-4,
        1.050_750_071_644_416_9e-9,
    ],
];
const TAIL: Ratio = [
    [
        6.657_904_643_501_103,
        5.463_784_911_164_114,
        1.784_826_539_917_291_3,
        0.296_560_571_828_504_87,
        0.026_532_189_526_576_124,
        1.242_660_947_388_078_4e-3,
        2.711_555_568_743_487_6e-5,
        2.010_334_399_292_288_1e-7,
    ],
    [
        1.0,
        0.599_832_206_555_888,
        0.136_929_880_922_735_8,
        0.014_875_361_290_850_615,
        7.868_691_311_456_133e-4,
        1.846_318_317_510_054_7e-5,
        1.421_511_758_316_446e-7,
        2.044_263_103_389_939_8e-15,
    ],
];

fn ratio([above, below]: &Ratio, x: f64) -> f64 {
    let polynomial = |terms: &[f64; 8]| terms.iter().rev().fold(0.0, |sum, term| sum * x + term);
    polynomial(above) / polynomial(below)
}

/// The value below which a standard normal number is with probability `p`, from 0 to 1 (Wichura, "Algorithm AS 241", 1988, PPND16).
fn quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        return q * ratio(&CENTRAL, 0.180_625 - q * q);
    }
    let r = (-p.min(1.0 - p).ln()).sqrt();
    let size = match r <= 5.0 {
        true => ratio(&MIDDLE, r - 1.6),
        false => ratio(&TAIL, r - 5.0),
    };
    size.copysign(q)
}

#[cfg(test)]
mod tests {
    use super::super::philox::permutation;
    use super::*;

    #[test]
    fn quantiles_are_those_of_tables() {
        let cases = [
            (0.5, 0.0),
            (0.6, 0.253_347_103_135_799_8),
            (0.975, 1.959_963_984_540_054),
            (1e-10, -6.361_340_902_404_056),
            (1e-200, -30.205_594_179_579_634),
        ];
        for (p, x) in cases {
            assert!(
                (quantile(p) - x).abs() < 1e-13 * x.abs().max(1.0),
                "{p}: {} {x}",
                quantile(p)
            );
        }
        assert!((quantile(1.0 - BEYOND_TWO) - 2.0).abs() < 1e-13);
    }

    /// Mean and standard deviation, and the largest distance from 0.
    fn moments(init: Init, shape: &[usize]) -> [f64; 3] {
        let values = init
            .values(DType::F64, shape, 7, "layer/weights")
            .unwrap()
            .to_f64s();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let square = values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
        [
            mean,
            square.sqrt(),
            values.iter().fold(0.0, |m, x| x.abs().max(m)),
        ]
    }

    #[test]
    fn distributions_have_their_moments_and_bounds() {
        let shape = [200, 300];
        let close = |got: f64, want: f64| assert!((got - want).abs() < 0.02, "{got} {want}");
        let [mean, deviation, _] = moments(
            Init::Normal {
                mean: 0.5,
                deviation: 2.0,
            },
            &shape,
        );
        close(mean, 0.5);
        close(deviation, 2.0);
        let [mean, deviation, most] = moments(
            Init::TruncatedNormal {
                mean: 0.0,
                deviation: 1.0,
            },
            &shape,
        );
        close(mean, 0.0);
        close(deviation, 0.8796);
        assert!(most <= 2.0);
        let bound = (6.0f64 / 500.0).sqrt();
        let [mean, deviation, most] = moments(Init::GlorotUniform, &shape);
        close(mean, 0.0);
        close(deviation, bound / 3f64.sqrt());
        assert!(most <= bound);
        let [_, deviation, _] = moments(Init::HeNormal, &[64, 32, 3, 3]);
        close(deviation, (2.0f64 / 288.0).sqrt());
        assert!(moments(Init::FanIn, &[64, 32, 3, 3])[2] <= 1.0 / 288f64.sqrt());
        assert!(
            moments(Init::HeUniform, &[400])
                .iter()
                .all(|x| x.is_finite())
        );
        assert_eq!(moments(Init::Constant(0.25), &[3, 3]), [0.25, 0.0, 0.25]);
    }

    #[test]
    fn values_depend_on_seed_and_name() {
        let values = |seed, name| {
            Init::GlorotUniform
                .values(DType::F32, &[4, 4], seed, name)
                .unwrap()
        };
        assert_eq!(values(1, "a"), values(1, "a"));
        assert_ne!(values(1, "a"), values(2, "a"));
        assert_ne!(values(1, "a"), values(1, "b"));
    }

    #[test]
    fn permutations_hold_each_number_once() {
        for n in [0, 1, 2, 100] {
            let mut order = permutation(n, 3, 5);
            assert_eq!(order == permutation(n, 3, 6), n < 2);
            order.sort_unstable();
            assert!(order.into_iter().eq(0..n));
        }
    }
}
