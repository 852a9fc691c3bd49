//! Histograms of tensors.

use super::proto::HistogramProto;
use gristmill_runtime::{DType, Tensor};

/// A histogram of the finite numbers of a tensor, with eight buckets per power of two on either side of 0, by the numbers as `f32`.
///
/// A bucket has the numbers from the power of two, or an eighth of the way to the next one, up to the next such limit, towards the infinities;
/// numbers of `f64` beyond those of `f32` are in the outermost buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The least number; 0 if there is none.
    pub min: f64,
    /// The greatest number; 0 if there is none.
    pub max: f64,
    /// Number of finite elements.
    pub n: u64,
    /// Their sum.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_of_squares: f64,
    /// Upper limits of buckets, ascending, and how many numbers are between each and the one before. Where a run of empty buckets ends,
    /// an empty one says so.
    pub buckets: Vec<(f64, u64)>,
}

/// Numbers of a tensor for a log.
pub(in crate::train) struct Numbers {
    pub(in crate::train) histogram: Histogram,
    /// The fraction of zeros among all elements.
    pub(in crate::train) sparsity: f64,
    /// Number of NaN and infinite elements.
    pub(in crate::train) n_not_finite: u64,
}

/// Bits of a float without a say in its bucket: all but sign, exponent and three bits of the fraction.
const SHIFT: u32 = 20;
/// Buckets on one side of 0, those of NaN and infinities included.
const N_SIDE: usize = 1 << (31 - SHIFT);
/// The first bucket of NaN and infinities.
const NOT_FINITE: usize = 0xff << (23 - SHIFT);
/// Tables of counts, taken in turn: equal neighbours do not wait for each other.
const N_TABLES: usize = 4;
/// Elements at once: no count of a table overflows.
const CHUNK: usize = 1 << 16;

impl Numbers {
    /// Counts and moments of a tensor.
    pub(in crate::train) fn of(t: &Tensor) -> Numbers {
        let mut counts = Counts::default();
        match t.dtype() {
            DType::F32 => {
                let values = t.as_slice::<f32>();
                counts.add_buckets(values);
                counts.add_moments(values);
            }
            _ => {
                let values = t.to_f64s();
                for part in values.chunks(CHUNK) {
                    let narrowed: Vec<f32> = part.iter().map(|&x| narrow(x)).collect();
                    counts.add_buckets(&narrowed);
                }
                counts.add_moments(&values);
            }
        }
        counts.numbers(t.len() as u64)
    }
}

/// The nearest finite float of a finite number.
fn narrow(x: f64) -> f32 {
    match x.is_finite() {
        true => (x as f32).clamp(f32::MIN, f32::MAX),
        false => x as f32,
    }
}

/// Counts of a tensor in progress.
struct Counts {
    buckets: Vec<u64>,
    n_zeros: u64,
    min: f64,
    max: f64,
    sum: f64,
    sum_of_squares: f64,
}

/// Moments of every eighth number.
struct Lanes {
    sums: [f64; N_LANES],
    squares: [f64; N_LANES],
    min: [f64; N_LANES],
    max: [f64; N_LANES],
    zeros: [u64; N_LANES],
}

const N_LANES: usize = 8;

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes {
            sums: [0.0; N_LANES],
            squares: [0.0; N_LANES],
            min: [f64::INFINITY; N_LANES],
            max: [f64::NEG_INFINITY; N_LANES],
            zeros: [0; N_LANES],
        }
    }
}

impl Lanes {
    #[inline]
    fn add<T: Copy + Into<f64>>(&mut self, numbers: &[T]) {
        for (i, &x) in numbers.iter().enumerate() {
            let x: f64 = x.into();
            let is_finite = x.abs() < f64::INFINITY;
            let own = if is_finite { x } else { 0.0 };
            self.sums[i] += own;
            self.squares[i] += own * own;
            self.min[i] = self.min[i].min(if is_finite { x } else { f64::INFINITY });
            self.max[i] = self.max[i].max(if is_finite { x } else { f64::NEG_INFINITY });
            self.zeros[i] += u64::from(x == 0.0);
        }
    }
}

impl Default for Counts {
    fn default() -> Counts {
        Counts {
            buckets: vec![0; 2 * N_SIDE],
            n_zeros: 0,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            sum: 0.0,
            sum_of_squares: 0.0,
        }
    }
}

impl Counts {
    fn add_buckets(&mut self, values: &[f32]) {
        let mut tables = vec![[0u32; 2 * N_SIDE]; N_TABLES];
        for chunk in values.chunks(CHUNK) {
            let (fours, rest) = chunk.as_chunks::<N_TABLES>();
            for four in fours {
                for (table, x) in tables.iter_mut().zip(four) {
                    table[(x.to_bits() >> SHIFT) as usize] += 1;
                }
            }
            for x in rest {
                tables[0][(x.to_bits() >> SHIFT) as usize] += 1;
            }
            for table in &mut tables {
                for (sum, n) in self.buckets.iter_mut().zip(table) {
                    *sum += u64::from(std::mem::take(n));
                }
            }
        }
    }

    fn add_moments<T: Copy + Into<f64>>(&mut self, values: &[T]) {
        let mut lanes = Lanes::default();
        let (eights, rest) = values.as_chunks::<N_LANES>();
        eights.iter().for_each(|eight| lanes.add(eight));
        lanes.add(rest);
        self.sum += lanes.sums.iter().sum::<f64>();
        self.sum_of_squares += lanes.squares.iter().sum::<f64>();
        self.min = lanes.min.into_iter().fold(self.min, f64::min);
        self.max = lanes.max.into_iter().fold(self.max, f64::max);
        self.n_zeros += lanes.zeros.iter().sum::<u64>();
    }

    fn numbers(self, n: u64) -> Numbers {
        let sides = self.buckets.chunks(N_SIDE);
        let strange = sides.flat_map(|side| &side[NOT_FINITE..]);
        let n_not_finite: u64 = strange.sum();
        let n_finite = n - n_not_finite;
        let is_empty = n_finite == 0;
        Numbers {
            sparsity: self.n_zeros as f64 / n.max(1) as f64,
            n_not_finite,
            histogram: Histogram {
                min: if is_empty { 0.0 } else { self.min },
                max: if is_empty { 0.0 } else { self.max },
                n: n_finite,
                sum: self.sum,
                sum_of_squares: self.sum_of_squares,
                buckets: self.limits(),
            },
        }
    }

    /// The buckets with numbers, ascending, and the ends of empty runs.
    fn limits(&self) -> Vec<(f64, u64)> {
        let (positive, negative) = self.buckets.split_at(N_SIDE);
        let below = (0..NOT_FINITE)
            .rev()
            .map(|i| (-limit(i + 1), -limit(i), negative[i]));
        let above = (0..NOT_FINITE).map(|i| (limit(i), limit(i + 1), positive[i]));
        let mut limits: Vec<(f64, u64)> = Vec::new();
        for (low, high, n) in below.chain(above).filter(|(.., n)| *n > 0) {
            if limits.last().is_some_and(|(last, _)| *last < low) {
                limits.push((low, 0));
            }
            limits.push((high, n));
        }
        limits
    }
}

/// The lower limit of bucket `i` above 0.
fn limit(i: usize) -> f64 {
    match i {
        NOT_FINITE => f32::MAX.into(),
        i => f32::from_bits((i as u32) << SHIFT).into(),
    }
}

impl Histogram {
    pub(super) fn to_proto(&self) -> HistogramProto {
        HistogramProto {
            min: self.min,
            max: self.max,
            num: self.n as f64,
            sum: self.sum,
            sum_squares: self.sum_of_squares,
            bucket_limit: self.buckets.iter().map(|(limit, _)| *limit).collect(),
            bucket: self.buckets.iter().map(|(_, n)| *n as f64).collect(),
        }
    }

    pub(super) fn of_proto(proto: &HistogramProto) -> Histogram {
        let counts = proto.bucket.iter().map(|n| *n as u64);
        Histogram {
            min: proto.min,
            max: proto.max,
            n: proto.num as u64,
            sum: proto.sum,
            sum_of_squares: proto.sum_squares,
            buckets: proto.bucket_limit.iter().copied().zip(counts).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32]) -> Numbers {
        Numbers::of(&Tensor::from_slice(values, &[values.len()]).unwrap())
    }

    #[test]
    fn buckets_are_eighths_of_powers_of_two() {
        let found = of(&[1.0, 1.1249, 1.125, -1.0, -1.2, 3.0, 0.0, -0.0]);
        let h = &found.histogram;
        assert_eq!((h.min, h.max, h.n), (-1.2000000476837158, 3.0, 8));
        assert_eq!(found.sparsity, 0.25);
        let smallest = f64::from(f32::from_bits(1 << SHIFT));
        let buckets = [
            (-1.125, 1),
            (-1.0, 1),
            (-smallest, 0),
            (-0.0, 1),
            (smallest, 1),
            (1.0, 0),
            (1.125, 2),
            (1.25, 1),
            (3.0, 0),
            (3.25, 1),
        ];
        assert_eq!(h.buckets, buckets);
    }

    #[test]
    fn every_number_is_in_its_bucket() {
        let mut x = 0x9e37_79b9u32;
        let mut values: Vec<f32> = Vec::new();
        for _ in 0..200_003 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            values.push(f32::from_bits(x));
        }
        let found = of(&values);
        let finite: Vec<f64> = values
            .iter()
            .filter(|x| x.is_finite())
            .map(|&x| x.into())
            .collect();
        assert_eq!(found.n_not_finite, (values.len() - finite.len()) as u64);
        assert_eq!(found.histogram.n, finite.len() as u64);
        let buckets = &found.histogram.buckets;
        let mut low = f64::NEG_INFINITY;
        for &(high, n) in buckets {
            // Towards the infinities, the nearer limit belongs to the bucket.
            let is_in = |x: &&f64| match **x < 0.0 || high <= 0.0 {
                true => low < **x && **x <= high,
                false => low <= **x && (**x < high || high == f64::from(f32::MAX)),
            };
            let expected = finite.iter().filter(is_in).count() as u64;
            assert_eq!(n, expected, "{low} to {high}");
            low = high;
        }
        assert_eq!(
            buckets.iter().map(|(_, n)| n).sum::<u64>(),
            found.histogram.n
        );
        let squares: f64 = finite.iter().map(|x| x * x).sum();
        assert!((found.histogram.sum_of_squares / squares - 1.0).abs() < 1e-12);
    }

    #[test]
    fn numbers_beyond_floats_are_in_the_last_buckets() {
        let t = Tensor::from_slice(&[1e300f64, -1e300, f64::NAN, 2.0], &[4]).unwrap();
        let found = Numbers::of(&t);
        assert_eq!(found.n_not_finite, 1);
        let h = &found.histogram;
        assert_eq!((h.min, h.max, h.sum), (-1e300, 1e300, 2.0));
        assert_eq!(h.buckets.first().map(|b| b.1), Some(1));
        assert_eq!(h.buckets.last(), Some(&(f32::MAX.into(), 1)));
        let small = Tensor::from_slice(&[1e-60f64, 0.0, -2e-60, 1.0], &[4]).unwrap();
        let found = Numbers::of(&small);
        assert_eq!((found.sparsity, found.histogram.min), (0.25, -2e-60));
        let counts = Tensor::from_slice(&[16_777_217i64, 3], &[2]).unwrap();
        assert_eq!(Numbers::of(&counts).histogram.max, 16_777_217.0);
        let nothing = of(&[f32::NAN]);
        assert_eq!((nothing.histogram.min, nothing.histogram.n), (0.0, 0));
        assert!(nothing.histogram.buckets.is_empty());
    }
}
