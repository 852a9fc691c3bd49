//! Single-thread speed of the kernels as a fraction of this core's measured multiply-add peak.
//!
//! `cargo run --release -p gristmill-kernels --example speed [filter]`. Best of several runs; f32; one thread; caches warm.

use gristmill_kernels::epilogue::{EpilogueKind, EpilogueOp};
use gristmill_kernels::gemm::{GemmDesc, gm_gemm_f32};
use gristmill_kernels::pack::pack_b;
use gristmill_kernels::{Isa, OK};
use std::hint::black_box;
use std::time::Instant;

fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let peak = multiply_add_peak();
    println!("{}: {:.1} GFLOP/s multiply-add peak", Isa::current(), peak / 1e9);
    if "gemm".contains(&filter) {
        gemms(peak);
    }
}

/// Seconds of the fastest of several calls, for about 0.15 s.
fn best(mut f: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    let start = Instant::now();
    let mut calls = 0;
    while calls < 3 || start.elapsed().as_secs_f64() < 0.15 {
        let call = Instant::now();
        f();
        best = best.min(call.elapsed().as_secs_f64());
        calls += 1;
    }
    best
}

/// Operations per second of a 14 x 32 tile whose operands stay in the first-level cache.
fn multiply_add_peak() -> f64 {
    let (m, n, k) = (14, Isa::current().nr(), 256);
    let case = Gemm::new(m, n, k, &[]);
    let repeats = 200;
    2.0 * (m * n * k * repeats) as f64 / best(|| (0..repeats).for_each(|_| case.run()))
}

struct Gemm {
    desc: GemmDesc,
    buffers: Vec<Vec<f32>>,
}

/// A vector that starts at a multiple of 64 bytes would need an own allocator; panels of this one are at worst split over two lines.
fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 17) as f32 * 0.125 - 1.0).collect()
}

impl Gemm {
    fn new(m: usize, n: usize, k: usize, epilogue: &[EpilogueKind]) -> Gemm {
        let mut desc = GemmDesc::new(m, n, k);
        desc.plan(1);
        let mut buffers =
            vec![ramp(m * k), pack_b(Isa::current(), k, n, &ramp(k * n), n, 1), vec![0.0; m * n], Vec::new()];
        for (i, &kind) in epilogue.iter().enumerate() {
            assert!(desc.push_epilogue(match kind {
                EpilogueKind::Add => EpilogueOp::row_vec(kind, i as u32),
                _ => EpilogueOp::unary(kind, 0.2, 0.5),
            }));
            buffers.push(ramp(n));
        }
        Gemm { desc, buffers }
    }

    fn run(&self) {
        let ptrs: Vec<*mut u8> = self.buffers.iter().map(|buffer| buffer.as_ptr() as *mut u8).collect();
        // SAFETY: the buffers have the sizes that the descriptor describes; nothing else uses them now.
        let status = unsafe { gm_gemm_f32(&self.desc, ptrs.as_ptr(), 0, self.desc.n_items()) };
        assert_eq!(status, OK);
        black_box(&self.buffers[2]);
    }
}

fn gemms(peak: f64) {
    let shapes = [
        (512, 512, 512),
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (3136, 64, 64),
        (196, 576, 64),
        (128, 768, 768),
        (128, 768, 3072),
        (128, 3072, 768),
        (16, 768, 3072),
        (4, 768, 3072),
        (1, 768, 3072),
    ];
    for (m, k, n) in shapes {
        for (name, epilogue) in [
            ("", &[][..]),
            ("bias relu", &[EpilogueKind::Add, EpilogueKind::Relu]),
            ("bias hardswish", &[EpilogueKind::Add, EpilogueKind::HardSwish]),
        ] {
            let case = Gemm::new(m, n, k, epilogue);
            let seconds = best(|| case.run());
            let flops = 2.0 * (m * n * k) as f64 / seconds;
            let gb = (k * n * 4) as f64 / seconds / 1e9;
            println!(
                "gemm {m} x {k} x {n} {name}: {:.1} us, {:.1} GFLOP/s, {:.2} of peak, {gb:.0} GB/s of b",
                seconds * 1e6,
                flops / 1e9,
                flops / peak
            );
        }
    }
}
