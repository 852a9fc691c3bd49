//! Canonical kernels against plain Rust.

use gristmill_emulator::{Args, LaunchConfig};

use super::support::{Random, device, download, line, module, relative_error, run, upload};

#[test]
fn element_wise_with_vectors_and_a_remainder() {
    let (device, module) = (device(), module("elementwise"));
    let n = 4099;
    let mut random = Random(1);
    let (a, b) = (random.floats(n), random.floats(n));
    let out = device.alloc(n * 4).unwrap();
    let args = Args::new()
        .u64(upload(&device, &a))
        .u64(upload(&device, &b))
        .u64(out)
        .u32(n as u32);
    run(&device, &module, "gelu_of_sum", &line(3, 128), &args);
    let erf = |x: f64| 1.0 - erfc(x);
    let gelu = |x: f64| 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
    let expected: Vec<f64> = a
        .iter()
        .zip(&b)
        .map(|(x, y)| gelu(f64::from(x + y)))
        .collect();
    let error = relative_error(&download(&device, out, n), &expected);
    assert!(error < 2e-7, "{error}");
}

/// Complementary error function, by the continued-fraction fit of Numerical Recipes (1.2e-7), made exact enough by
/// integrating numerically instead: Simpson's rule on 2000 intervals.
fn erfc(x: f64) -> f64 {
    let n = 2000;
    let h = x / f64::from(n);
    let f = |t: f64| (-t * t).exp();
    let inner: f64 = (1..n)
        .map(|k| f(f64::from(k) * h) * if k % 2 == 1 { 4.0 } else { 2.0 })
        .sum();
    1.0 - std::f64::consts::FRAC_2_SQRT_PI * h / 3.0 * (f(0.0) + inner + f(x))
}

#[test]
fn bf16_rounds_to_nearest() {
    let (device, module) = (device(), module("elementwise"));
    let n = 1000;
    let mut random = Random(2);
    let a: Vec<u16> = (0..n)
        .map(|_| (random.float().to_bits() >> 16) as u16)
        .collect();
    let out = device.alloc(n * 2).unwrap();
    let args = Args::new()
        .u64(upload(&device, &a))
        .u64(out)
        .f32(1.37)
        .u32(n as u32);
    run(&device, &module, "scale_bf16", &line(8, 128), &args);
    let round = |x: f32| ((x.to_bits() + 0x7fff + (x.to_bits() >> 16 & 1)) >> 16) as u16;
    let expected: Vec<u16> = a
        .iter()
        .map(|h| round(f32::from_bits(u32::from(*h) << 16) * 1.37))
        .collect();
    assert_eq!(download::<u16>(&device, out, n), expected);
}

#[test]
fn softmax_with_shuffles_and_shared_memory() {
    let (device, module) = (device(), module("softmax"));
    let (rows, columns) = (37, 1003);
    let x: Vec<f32> = Random(3)
        .floats(rows * columns)
        .iter()
        .map(|x| x * 9.0)
        .collect();
    let out = device.alloc(x.len() * 4).unwrap();
    let args = Args::new()
        .u64(upload(&device, &x))
        .u64(out)
        .u32(columns as u32);
    run(&device, &module, "softmax", &line(rows as u32, 128), &args);
    let mut expected = Vec::new();
    for row in x.chunks(columns) {
        let most = row.iter().fold(f32::MIN, |m, x| m.max(*x));
        let powers: Vec<f64> = row.iter().map(|x| f64::from(x - most).exp()).collect();
        let sum: f64 = powers.iter().sum();
        expected.extend(powers.iter().map(|p| p / sum));
    }
    let error = relative_error(&download(&device, out, x.len()), &expected);
    assert!(error < 5e-7, "{error}");
}

#[test]
fn tiled_products_of_ragged_shapes() {
    let (device, module) = (device(), module("sgemm"));
    for (m, n, k) in [(64, 64, 16), (65, 130, 33), (1, 1, 1), (128, 64, 64)] {
        let mut random = Random((m * n * k) as u64);
        let (a, b) = (random.floats(m * k), random.floats(k * n));
        let c = device.alloc(m * n * 4).unwrap();
        let args = Args::new()
            .u64(upload(&device, &a))
            .u64(upload(&device, &b))
            .u64(c);
        let args = args.u32(m as u32).u32(n as u32).u32(k as u32);
        let grid = [n.div_ceil(64) as u32, m.div_ceil(64) as u32, 1];
        let config = LaunchConfig {
            grid,
            block: [256, 1, 1],
            ..LaunchConfig::default()
        };
        run(&device, &module, "sgemm", &config, &args);
        let error = relative_error(&download(&device, c, m * n), &product(&a, &b, m, n, k));
        assert!(error < 1e-6, "{m} x {n} x {k}: {error}");
    }
}

/// Row-major product in double precision.
pub fn product(a: &[f32], b: &[f32], m: usize, n: usize, k: usize) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for q in 0..k {
            for j in 0..n {
                c[i * n + j] += f64::from(a[i * k + q]) * f64::from(b[q * n + j]);
            }
        }
    }
    c
}

#[test]
fn histograms_by_atomics() {
    let (device, module) = (device(), module("histogram"));
    let n = 10_000;
    let mut random = Random(5);
    let keys: Vec<u32> = (0..n).map(|_| random.bits() as u32).collect();
    let weights: Vec<f32> = keys.iter().map(|k| (k % 7) as f32).collect();
    let (counts, sums) = (upload(&device, &[0u32; 64]), upload(&device, &[0f32; 64]));
    let args = Args::new()
        .u64(upload(&device, &keys))
        .u64(upload(&device, &weights))
        .u64(counts)
        .u64(sums)
        .u32(n);
    run(&device, &module, "histogram", &line(7, 128), &args);
    let (mut expected, mut expected_sums) = (vec![0u32; 64], vec![0f32; 64]);
    for (key, weight) in keys.iter().zip(&weights) {
        expected[(key % 64) as usize] += 1;
        expected_sums[(key % 64) as usize] += weight;
    }
    assert_eq!(download::<u32>(&device, counts, 64), expected);
    // The sums are of small whole numbers, so their order makes no difference.
    assert_eq!(download::<f32>(&device, sums, 64), expected_sums);
}
