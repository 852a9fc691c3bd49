//! Single-thread speed of the kernels as a fraction of this core's measured multiply-add peak.
//!
//! `cargo run --release -p gristmill-kernels --example speed [filter]`. Best of several runs; f32;
//! one thread; caches warm.

use gristmill_kernels::conv::{ConvDesc, gm_conv_f32, pack_weights};
use gristmill_kernels::depthwise::{DepthwiseDesc, gm_depthwise_f32};
use gristmill_kernels::epilogue::{EpilogueKind, EpilogueOp};
use gristmill_kernels::gemm::{GemmDesc, gm_gemm_f32};
use gristmill_kernels::pack::pack_b;
use gristmill_kernels::rows::{
    NormDesc, NormKind, SoftmaxDesc, SoftmaxKind, gm_norm_f32, gm_softmax_f32,
};
use gristmill_kernels::vmath::FUNCTIONS;
use gristmill_kernels::window::Window;
use gristmill_kernels::{Isa, OK};
use std::hint::black_box;

fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let peak = multiply_add_peak();
    println!(
        "{}: {:.1} GFLOP/s multiply-add peak",
        Isa::current(),
        peak / 1e9
    );
    if filter == "tile" {
        for (m, k, n) in [
            (14, 256, 32),
            (8, 256, 32),
            (12, 256, 32),
            (6, 256, 16),
            (112, 256, 32),
            (112, 64, 32),
        ] {
            let case = Gemm::new(m, n, k, &[]);
            let seconds = best(|| (0..100).for_each(|_| case.run())) / 100.0;
            println!(
                "tile {m} x {k} x {n}: {:.2} of peak",
                2.0 * (m * n * k) as f64 / seconds / peak
            );
        }
    }
    if "gemm".contains(&filter) {
        gemms(peak);
    }
    if "conv".contains(&filter) {
        convolutions(peak);
    }
    if "depthwise".contains(&filter) {
        depthwise(peak);
    }
    if "functions".contains(&filter) {
        functions();
    }
    if "rows".contains(&filter) {
        rows();
    }
}

/// Seconds that this thread has run; other processes on the machine disturb it less than they do
/// the wall clock.
#[cfg(target_os = "linux")]
fn seconds() -> f64 {
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
    }
    const THREAD_CPU_TIME: i32 = 3;
    let mut time = [0; 2];
    // SAFETY: `timespec` is two 64-bit integers on 64-bit Linux.
    unsafe { clock_gettime(THREAD_CPU_TIME, &mut time) };
    time[0] as f64 + time[1] as f64 * 1e-9
}

#[cfg(not(target_os = "linux"))]
fn seconds() -> f64 {
    static START: std::sync::LazyLock<std::time::Instant> =
        std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed().as_secs_f64()
}

/// Seconds of the fastest of several calls, for about 0.15 s.
fn best(mut f: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    let start = seconds();
    let mut calls = 0;
    while calls < 3 || seconds() - start < 0.15 {
        let call = seconds();
        f();
        best = best.min(seconds() - call);
        calls += 1;
    }
    best
}

/// Operations per second of independent multiply-adds in registers.
#[cfg(target_arch = "x86_64")]
fn multiply_add_peak() -> f64 {
    use std::arch::x86_64::*;
    const STEPS: usize = 100_000;
    macro_rules! peak {
        ($name:ident, $features:literal, $n:literal, $set:ident, $fma:ident) => {{
            #[target_feature(enable = $features)]
            fn $name() {
                let factor = black_box($set(0.5));
                let mut acc = [$set(1.0); $n];
                for _ in 0..STEPS {
                    for acc in &mut acc {
                        *acc = $fma(*acc, factor, factor);
                    }
                }
                black_box(acc);
            }
            // SAFETY: the instruction set is the current one, which is available.
            let seconds = best(|| unsafe { $name() });
            (STEPS * $n) as f64 / seconds
        }};
    }
    match Isa::current() {
        Isa::Avx512 => 32.0 * peak!(avx512, "avx512f", 24, _mm512_set1_ps, _mm512_fmadd_ps),
        Isa::Avx2 => 16.0 * peak!(avx2, "avx2,fma", 12, _mm256_set1_ps, _mm256_fmadd_ps),
        Isa::Portable => 8.0 * peak!(sse, "sse2", 12, _mm_set1_ps, mul_add),
    }
}

/// Multiply-add of the portable form.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
fn mul_add(
    a: std::arch::x86_64::__m128,
    b: std::arch::x86_64::__m128,
    c: std::arch::x86_64::__m128,
) -> std::arch::x86_64::__m128 {
    std::arch::x86_64::_mm_add_ps(std::arch::x86_64::_mm_mul_ps(a, b), c)
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_add_peak() -> f64 {
    f64::NAN
}

struct Gemm {
    desc: GemmDesc,
    buffers: Vec<Aligned>,
}

/// 64-byte aligned floats, as kernels want them.
struct Aligned {
    start: usize,
    data: Vec<f32>,
}

impl Aligned {
    fn from(values: &[f32]) -> Aligned {
        let mut data = vec![0f32; values.len() + 16];
        let start = data.as_ptr().align_offset(64);
        data[start..start + values.len()].copy_from_slice(values);
        Aligned { start, data }
    }

    fn ptr(&self) -> *mut u8 {
        self.data[self.start..].as_ptr() as *mut u8
    }
}

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 17) as f32 * 0.125 - 1.0).collect()
}

fn ramp(n: usize) -> Aligned {
    Aligned::from(&values(n))
}

impl Gemm {
    fn new(m: usize, n: usize, k: usize, epilogue: &[EpilogueKind]) -> Gemm {
        let mut desc = GemmDesc::new(Isa::current(), m, n, k);
        desc.plan(1);
        let b = Aligned::from(&pack_b(Isa::current(), k, n, &values(k * n), n, 1));
        let mut buffers = vec![ramp(m * k), b, ramp(m * n), ramp(0)];
        for (i, &kind) in epilogue.iter().enumerate() {
            let op = match kind {
                EpilogueKind::Add => EpilogueOp::row_vec(kind, i as u32),
                _ => EpilogueOp::unary(kind, 0.2, 0.5),
            };
            assert!(op.append_to(&mut desc.epilogue, &mut desc.n_epilogue));
            buffers.push(ramp(n));
        }
        Gemm { desc, buffers }
    }

    fn run(&self) {
        let ptrs: Vec<*mut u8> = self.buffers.iter().map(Aligned::ptr).collect();
        // SAFETY: the buffers have the sizes that the descriptor describes; nothing else uses them
        // now.
        let status = unsafe { gm_gemm_f32(&self.desc, ptrs.as_ptr(), 0, self.desc.n_items()) };
        assert_eq!(status, OK);
        black_box(&self.buffers[2].data);
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
            (
                "bias hardswish",
                &[EpilogueKind::Add, EpilogueKind::HardSwish],
            ),
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

/// ResNet-50's convolutions at batch 1: (input side, input channels, output channels, kernel,
/// stride, occurrences).
const RESNET50: [(usize, usize, usize, usize, usize, usize); 22] = [
    (224, 3, 64, 7, 2, 1),
    (56, 64, 64, 1, 1, 1),
    (56, 64, 64, 3, 1, 3),
    (56, 64, 256, 1, 1, 4),
    (56, 256, 64, 1, 1, 2),
    (56, 256, 128, 1, 1, 1),
    (56, 128, 128, 3, 2, 1),
    (56, 256, 512, 1, 2, 1),
    (28, 128, 512, 1, 1, 4),
    (28, 512, 128, 1, 1, 3),
    (28, 128, 128, 3, 1, 3),
    (28, 512, 256, 1, 1, 1),
    (28, 256, 256, 3, 2, 1),
    (28, 512, 1024, 1, 2, 1),
    (14, 256, 1024, 1, 1, 6),
    (14, 1024, 256, 1, 1, 5),
    (14, 256, 256, 3, 1, 5),
    (14, 1024, 512, 1, 1, 1),
    (14, 512, 512, 3, 2, 1),
    (14, 1024, 2048, 1, 2, 1),
    (7, 512, 512, 3, 1, 2),
    (7, 512, 2048, 1, 1, 3),
];

fn convolutions(peak: f64) {
    let (mut total_seconds, mut total_flops) = (0.0, 0.0);
    for (side, cin, cout, kernel, stride, times) in RESNET50 {
        let pad = kernel / 2;
        let window =
            Window::new(1, side, side, cin, kernel, kernel).with([stride; 2], [1; 2], [pad; 4]);
        let mut desc = ConvDesc::new(Isa::current(), window, 1, cin, cout);
        let bias_relu = [
            EpilogueOp::row_vec(EpilogueKind::Add, 0),
            EpilogueOp::unary(EpilogueKind::Relu, 0.0, 0.0),
        ];
        assert!(
            bias_relu
                .into_iter()
                .all(|op| op.append_to(&mut desc.epilogue, &mut desc.n_epilogue))
        );
        let weights = Aligned::from(&pack_weights(
            Isa::current(),
            1,
            cout,
            cin,
            kernel * kernel,
            &values(cout * cin * kernel * kernel),
        ));
        let x = ramp(side * side * cin);
        let (y, bias) = (ramp(window.n_pixels() * cout), ramp(cout));
        let workspace = ramp(desc.workspace_bytes() / 4);
        let ptrs = [x.ptr(), weights.ptr(), y.ptr(), workspace.ptr(), bias.ptr()];
        let seconds = best(|| {
            // SAFETY: the buffers have the sizes that the descriptor describes; nothing else uses
            // them now.
            let status = unsafe { gm_conv_f32(&desc, ptrs.as_ptr(), 0, desc.n_items()) };
            assert_eq!(status, OK);
        });
        black_box(&y.data);
        let flops = 2.0 * (window.n_pixels() * cin * cout * kernel * kernel) as f64;
        total_seconds += seconds * times as f64;
        total_flops += flops * times as f64;
        println!(
            "conv {side} {cin} -> {cout} {kernel}x{kernel} / {stride}: {:.0} us, {:.2} of peak",
            seconds * 1e6,
            flops / seconds / peak
        );
    }
    println!(
        "conv ResNet-50: {:.2} ms, {:.2} of peak",
        total_seconds * 1e3,
        total_flops / total_seconds / peak
    );
}

/// MobileNetV2's depthwise layers: (side, channels, stride).
fn depthwise(peak: f64) {
    for (side, channels, stride) in [
        (112, 32, 1),
        (112, 96, 2),
        (56, 144, 1),
        (28, 192, 1),
        (14, 576, 1),
        (7, 960, 1),
    ] {
        let window = Window::new(1, side, side, channels, 3, 3).with([stride; 2], [1; 2], [1; 4]);
        let mut desc = DepthwiseDesc::new(Isa::current(), window, channels);
        let ops = [
            EpilogueOp::row_vec(EpilogueKind::Add, 0),
            EpilogueOp::unary(EpilogueKind::Clamp, 0.0, 6.0),
        ];
        assert!(
            ops.into_iter()
                .all(|op| op.append_to(&mut desc.epilogue, &mut desc.n_epilogue))
        );
        let (x, weights, bias) = (
            ramp(side * side * channels),
            ramp(9 * channels),
            ramp(channels),
        );
        let y = ramp(window.n_pixels() * channels);
        let ptrs = [
            x.ptr(),
            weights.ptr(),
            y.ptr(),
            std::ptr::null_mut(),
            bias.ptr(),
        ];
        let seconds = best(|| {
            // SAFETY: the buffers have the sizes that the descriptor describes; nothing else uses
            // them now.
            let status = unsafe { gm_depthwise_f32(&desc, ptrs.as_ptr(), 0, desc.n_items()) };
            assert_eq!(status, OK);
        });
        let flops = 18.0 * (window.n_pixels() * channels) as f64;
        let gb = 4.0 * ((window.n_pixels() + side * side) * channels) as f64 / seconds / 1e9;
        println!(
            "depthwise {side} x {channels} / {stride}: {:.0} us, {:.2} of peak, {gb:.0} GB/s",
            seconds * 1e6,
            flops / seconds / peak
        );
    }
}

fn functions() {
    let (x, y) = (ramp(1024), ramp(1024));
    for function in FUNCTIONS {
        let seconds = best(|| {
            for _ in 0..100 {
                // SAFETY: both arrays have 1024 elements.
                unsafe { function.kernel(Isa::current())(1024, x.ptr().cast(), y.ptr().cast()) };
            }
        });
        println!(
            "{}: {:.0} ns per 1000 elements",
            function.symbol,
            seconds * 1e9 / 102.4
        );
    }
}

fn rows() {
    let (n_rows, n_cols) = (128, 768);
    let (x, y) = (ramp(n_rows * n_cols), ramp(n_rows * n_cols));
    let ptrs: [*mut u8; 5] = [
        x.ptr(),
        std::ptr::null_mut(),
        y.ptr(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
    ];
    let softmax = SoftmaxDesc::new(Isa::current(), SoftmaxKind::Softmax, n_rows, n_cols);
    let norm = NormDesc::new(Isa::current(), NormKind::Layer, n_rows, n_cols, 1e-5);
    let seconds = best(|| {
        // SAFETY: the buffers have the sizes that the descriptors describe.
        let status = unsafe { gm_softmax_f32(&softmax, ptrs.as_ptr(), 0, n_rows) };
        assert_eq!(status, OK);
    });
    println!(
        "softmax {n_rows} x {n_cols}: {:.1} us, {:.0} ns per 1000",
        seconds * 1e6,
        seconds * 1e12 / (n_rows * n_cols) as f64
    );
    // SAFETY: as above.
    let seconds = best(|| assert_eq!(unsafe { gm_norm_f32(&norm, ptrs.as_ptr(), 0, n_rows) }, OK));
    println!(
        "layer norm {n_rows} x {n_cols}: {:.1} us, {:.0} ns per 1000",
        seconds * 1e6,
        seconds * 1e12 / (n_rows * n_cols) as f64
    );
}
