//! Ceilings of the GPU, measured in the same run: a large copy, the link to the host, and cuBLASLt's
//! products.

use gristmill::Result;
use gristmill::testing::Rng;
use gristmill_runtime::cuda::{CudaGpu, Settings};
use std::time::Duration;

/// Bytes of the large copy.
const COPY_BYTES: usize = 1 << 30;
/// Bytes that cross between host and device.
const LINK_BYTES: usize = 256 << 20;

/// Upper bounds of the other rates.
pub struct Ceilings {
    /// Bytes read and written by a copy on the device, in GB/s. Not a number where it was not measured.
    pub copy_gb_s: f64,
    /// TFLOP/s of square bf16 products by cuBLASLt, by their side.
    pub bf16_tflop_s: Vec<(usize, f64)>,
}

impl Ceilings {
    /// None measured.
    pub const NONE: Ceilings = Ceilings {
        copy_gb_s: f64::NAN,
        bf16_tflop_s: Vec::new(),
    };
}

/// Measures and prints them all.
pub fn print(device: u32) -> Result<Ceilings> {
    let gpu = CudaGpu::open(device, Settings::default())?;
    let times = gpu.time_copies(COPY_BYTES, LINK_BYTES)?;
    let row = |name: &str, time: Duration, bytes: usize| {
        let ns = time.as_nanos() as f64;
        println!(
            "ceiling {name}\t{:.3} ms\t{:.1} GB/s",
            ns / 1e6,
            bytes as f64 / ns
        );
    };
    row("copy, read and written", times.on_device, 2 * COPY_BYTES);
    row("host to device", times.to_device, LINK_BYTES);
    row("device to host", times.to_host, LINK_BYTES);
    let copy_gb_s = 2.0 * COPY_BYTES as f64 / times.on_device.as_nanos() as f64;
    let mut ceilings = Ceilings {
        copy_gb_s,
        bf16_tflop_s: Vec::new(),
    };
    for n in [4096usize, 8192] {
        // Power, and so the clock, depends on the operands: random ones, as everywhere here.
        let mut rng = Rng(3);
        let random: Vec<u16> = (0..1 << 16)
            .map(|_| ((rng.normal() as f32).to_bits() >> 16) as u16)
            .collect();
        match gpu.time_cublaslt(n, &|i| random[i.wrapping_mul(2_654_435_761) % random.len()]) {
            Ok(time) => {
                let ns = time.as_nanos() as f64;
                let rate = 2.0 * (n as f64).powi(3) / ns / 1e3;
                println!(
                    "ceiling cuBLASLt bf16 {n}\t{:.3} ms\t{rate:.1} TFLOP/s",
                    ns / 1e6
                );
                ceilings.bf16_tflop_s.push((n, rate));
            }
            Err(why) => println!("ceiling cuBLASLt bf16 {n}\tnot measured: {why}"),
        }
    }
    Ok(ceilings)
}
