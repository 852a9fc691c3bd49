//! Rates of the emulator on one thread: thread-instructions per second, by kernel. Prints a table; under `cargo test` runs
//! each kernel once, small.

use std::time::Instant;

use gristmill_emulator::{Args, Checks, Device, LaunchConfig, Limits, Module};

/// Launches of which the fastest counts.
const LAUNCHES: usize = 7;

struct Bench {
    name: &'static str,
    module: &'static str,
    kernel: &'static str,
    config: LaunchConfig,
    args: fn(&Device, u32) -> Args,
}

fn main() {
    let is_bench = std::env::args().any(|a| a == "--bench");
    let size = if is_bench { 256 } else { 64 };
    println!(
        "{:<44}{:>12}{:>14}{:>16}",
        "kernel", "time ms", "G instr/s", "races on, times"
    );
    for bench in benches(size) {
        let path = format!(
            "{}/tests/data/{}.ptx",
            env!("CARGO_MANIFEST_DIR"),
            bench.module
        );
        let module = Module::parse(&std::fs::read_to_string(path).expect("committed PTX"))
            .expect("NVRTC's own text");
        let device = Device::new(Limits {
            host_threads: 1,
            ..Limits::default()
        });
        let args = (bench.args)(&device, size);
        let run = |races| {
            let start = Instant::now();
            let checks = Checks { races };
            let stats = device
                .launch(&module, bench.kernel, &bench.config, args.bytes(), &checks)
                .expect("a good kernel");
            (start.elapsed().as_secs_f64(), stats.thread_instructions)
        };
        let launches = if is_bench { LAUNCHES } else { 1 };
        let best = |races| {
            (0..launches)
                .map(|_| run(races))
                .min_by(|a, b| a.0.total_cmp(&b.0))
                .expect("one launch")
        };
        let ((seconds, count), (checked, _)) = (best(false), best(true));
        let rate = count as f64 / seconds / 1e9;
        println!(
            "{:<44}{:>12.2}{rate:>14.2}{:>16.2}",
            bench.name,
            seconds * 1e3,
            checked / seconds
        );
    }
}

fn line(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        ..LaunchConfig::default()
    }
}

fn buffer(device: &Device, bytes: u32) -> u64 {
    let address = device.alloc(bytes as usize).expect("the device has room");
    device
        .fill(address, 0, bytes as usize)
        .expect("the buffer is that long");
    address
}

fn benches(n: u32) -> Vec<Bench> {
    let square = |tile: u32, threads: u32| LaunchConfig {
        grid: [n / tile, n / tile, 1],
        ..line(1, threads)
    };
    vec![
        Bench {
            name: "multiply_add_chain f32, straight-line",
            module: "elementwise",
            kernel: "multiply_add_chain",
            config: line(n / 16, 256),
            args: |d, n| Args::new().u64(buffer(d, n * 16 * 4)).u32(n * 16).u32(64),
        },
        Bench {
            name: "gelu_of_sum f32, 16-byte accesses",
            module: "elementwise",
            kernel: "gelu_of_sum",
            config: line(n / 4, 256),
            args: |d, n| {
                let bytes = n * n * 4;
                Args::new()
                    .u64(buffer(d, bytes))
                    .u64(buffer(d, bytes))
                    .u64(buffer(d, bytes))
                    .u32(n * n)
            },
        },
        Bench {
            name: "softmax f32, rows of 1000",
            module: "softmax",
            kernel: "softmax",
            config: line(n, 128),
            args: |d, n| {
                Args::new()
                    .u64(buffer(d, n * 4000))
                    .u64(buffer(d, n * 4000))
                    .u32(1000)
            },
        },
        Bench {
            name: "sgemm f32, shared memory, square",
            module: "sgemm",
            kernel: "sgemm",
            config: square(64, 256),
            args: |d, n| {
                let c = || buffer(d, n * n * 4);
                Args::new().u64(c()).u64(c()).u64(c()).u32(n).u32(n).u32(n)
            },
        },
        Bench {
            name: "mma_gemm bf16, cp.async and mma.sync, square",
            module: "mma_gemm",
            kernel: "mma_gemm",
            config: square(64, 128),
            args: |d, n| {
                let c = || buffer(d, n * n * 4);
                Args::new().u64(c()).u64(c()).u64(c()).u32(n).u32(n).u32(n)
            },
        },
    ]
}
