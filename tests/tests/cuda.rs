//! The CUDA driver backend, without a GPU: models run through a driver library that is made of the PTX emulator, and that does everything as late as
//! the model of streams and events allows.
//!
//! A process opens one driver, so each test runs in a process of its own: the binary of the command line, or this test again.

use crate::multi_device::{check_all_reduce, check_exports, check_random_graphs, setup};
use crate::process::{Ended, emulated_driver, gristmill_with};
use gristmill::calibrate::{self, Effort};
use gristmill::cost::{DeviceProfile, LinkProfile, Measured};
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::print::PrintOptions;
use gristmill::ir::{GraphBuilder, Op, ReduceKind, ScalarOp, Type};
use gristmill::pipeline::Stage;
use gristmill::place::DeviceSet;
use gristmill::testing::{Rng, Setup, nvrtc_or_left_out, random_tensor};
use gristmill::{Compiled, DType, Tensor, Tuning, onnx, tune};
use gristmill_runtime::cuda::{CudaGpu, Settings};
use gristmill_runtime::driver::{Arrival, Driver, HostMemory, Queue};
use gristmill_runtime::exec::{ExecOptions, Executor, Pool};
use gristmill_runtime::gpu::{GpuArg, GpuCode, Launch};
use gristmill_runtime::program::Kernel;
use gristmill_runtime::{DeviceName, ErrorKind};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Set in the processes that run the body of a test.
const IN_CHILD: &str = "GRISTMILL_TEST_IN_CHILD";

fn with_driver(name: &str, settings: &str, body: impl FnOnce()) {
    with_driver_of("cuda", name, settings, body);
}

/// Runs the body of the test `name` of a module where the driver is the emulated one, of these settings, and no NCCL. Left out without NVRTC.
pub fn with_driver_of(module: &str, name: &str, settings: &str, body: impl FnOnce()) {
    with_libraries(&format!("{module}::{name}"), settings, Path::new(""), body);
}

/// The same where NCCL is that library; `name` is that of the test with its module.
pub fn with_libraries(name: &str, settings: &str, nccl: &Path, body: impl FnOnce()) {
    if std::env::var_os(IN_CHILD).is_some() {
        return body();
    }
    if nvrtc_or_left_out(&format!("{name}, through the CUDA driver API")).is_none() {
        return;
    }
    let test = std::env::current_exe().expect("a process knows its executable");
    let output = Command::new(test)
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(IN_CHILD, "1")
        .env("GRISTMILL_CUDA", emulated_driver())
        .env("GRISTMILL_NCCL", nccl)
        .env("GRISTMILL_CUBLASLT", emulated_driver())
        .env("EMULATED_CUDA", settings)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .expect("this test can be started again");
    let text = [output.stdout, output.stderr]
        .map(|b| String::from_utf8_lossy(&b).into_owned())
        .concat();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

/// As for emulated devices, but kernels are not waited for one by one.
pub fn unchecked(devices: &str, opt_level: u8) -> Setup {
    let mut setup = setup(devices, opt_level);
    setup.settings.check_kernels = false;
    setup.with(|o| o.check = false)
}

/// A GPU whose kernels are chosen by their times; texts of stages are kept.
pub fn tuned(tuning: Tuning) -> Setup {
    let mut setup = unchecked("gpu:1", 2).with(|o| o.keep_stages = true);
    setup.settings.tuning = tuning;
    setup
}

#[test]
fn random_graphs_on_two_gpus() {
    with_driver("random_graphs_on_two_gpus", "devices=2", || {
        check_random_graphs(21, 200..208, &["/cpu:0", "/gpu:0", "/gpu:1"], &|level| {
            unchecked("cpu:1,gpu:2", level)
        });
    });
}

#[test]
fn random_graphs_where_gpus_do_not_reach_each_other() {
    with_driver(
        "random_graphs_where_gpus_do_not_reach_each_other",
        "devices=2,peers=0",
        || {
            check_random_graphs(22, 208..213, &["/cpu:0", "/gpu:0", "/gpu:1"], &|level| {
                unchecked("cpu:1,gpu:2", level)
            });
        },
    );
}

#[test]
fn random_graphs_on_two_parts_of_one_gpu() {
    with_driver("random_graphs_on_two_parts_of_one_gpu", "devices=1", || {
        let several = |level| {
            let mut setup = unchecked("cpu:1,gpu:2", level);
            setup.settings.gpus = vec![0, 0];
            setup
        };
        check_random_graphs(23, 213..217, &["/cpu:0", "/gpu:0", "/gpu:1"], &several);
    });
}

#[test]
fn all_reduce_over_gpus() {
    with_driver("all_reduce_over_gpus", "devices=4", || {
        check_all_reduce(25, &["/gpu:0", "/gpu:1", "/gpu:2", "/gpu:3"], &|level| {
            unchecked("gpu:4", level)
        });
    });
}

#[test]
fn all_reduce_over_gpus_that_do_not_reach_each_other() {
    with_driver(
        "all_reduce_over_gpus_that_do_not_reach_each_other",
        "devices=2,peers=0",
        || {
            check_all_reduce(26, &["/gpu:1", "/cpu:0", "/gpu:0"], &|level| {
                unchecked("cpu:1,gpu:2", level)
            });
        },
    );
}

#[test]
fn exported_models_on_cpu_and_gpu() {
    with_driver("exported_models_on_cpu_and_gpu", "", || {
        check_exports(
            &mut Rng(24),
            &unchecked("cpu:1,gpu:1", 2),
            &["cpu:0", "gpu:0"],
            &["resnet_script", "rnn_dynamo", "bert_script"],
        );
    });
}

/// Runs `gristmill ARGS` with an emulated driver of these settings; `None` without NVRTC.
fn with_gpus(settings: &str, visible: &str, args: &[&str]) -> Option<Ended> {
    nvrtc_or_left_out("the command line on GPUs")?;
    let dir = tempfile::tempdir().expect("the system has a folder for scratch files");
    let driver = emulated_driver();
    let variables = [
        ("GRISTMILL_CUDA", driver.as_path()),
        ("GRISTMILL_NCCL", Path::new("")),
        ("GRISTMILL_CUBLASLT", driver.as_path()),
        ("EMULATED_CUDA", Path::new(settings)),
        ("CUDA_VISIBLE_DEVICES", Path::new(visible)),
        ("GRISTMILL_CACHE_DIR", dir.path()),
    ];
    Some(gristmill_with(dir.path(), &variables, args))
}

/// The same with this cache folder, and all devices.
fn with_cache(cache: &Path, settings: &str, args: &[&str]) -> Ended {
    let driver = emulated_driver();
    let variables = [
        ("GRISTMILL_CUDA", driver.as_path()),
        ("GRISTMILL_NCCL", Path::new("")),
        ("GRISTMILL_CUBLASLT", driver.as_path()),
        ("EMULATED_CUDA", Path::new(settings)),
        ("CUDA_VISIBLE_DEVICES", Path::new("0,1,2,3")),
        ("GRISTMILL_CACHE_DIR", cache),
    ];
    gristmill_with(cache, &variables, args)
}

fn data(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(path)
        .display()
        .to_string()
}

/// Runs a small model with its test data.
fn run_model(settings: &str, extra: &[&str]) -> Option<Ended> {
    let (model, inputs) = (
        data("models/mlp_script/model.onnx"),
        data("models/mlp_script/test_data_set_0"),
    );
    let args = [
        &["run", &model, "--test-data", &inputs, "--devices", "gpu:1"],
        extra,
    ]
    .concat();
    with_gpus(settings, "0", &args)
}

#[test]
fn the_devices_of_the_driver_are_shown_and_chosen() {
    let Some(all) = with_gpus("devices=3,memory=2147483648", "0,1,2", &["devices"]) else {
        return;
    };
    assert!(
        all.stdout
            .contains("GPU:2  emulated GPU 2  2.00 GiB  compute capability 9.0"),
        "{}",
        all.stdout
    );
    let one = with_gpus("devices=3", "2", &["devices"]).expect("NVRTC is there");
    assert!(
        one.stdout.contains("GPU:0  emulated GPU 2") && !one.stdout.contains("GPU:1"),
        "{}",
        one.stdout
    );
    let none = with_gpus("devices=3", "", &["devices"]).expect("NVRTC is there");
    assert!(
        none.stdout.contains("CUDA_ERROR_NO_DEVICE"),
        "{}",
        none.stdout
    );
}

#[test]
fn a_model_runs_on_a_gpu_from_the_command_line() {
    for extra in [
        &["--verify"] as &[_],
        &["--visible-gpus", "0", "--mem", "gpu:0=40%"],
        &["--tune"],
    ] {
        let Some(ended) = run_model("", extra) else {
            return;
        };
        assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
    }
    let absent = run_model("", &["--visible-gpus", "1"]).expect("NVRTC is there");
    assert!(
        absent.code == Some(3) && absent.stderr.contains("/device:GPU:0 is not there"),
        "{}",
        absent.stderr
    );
    let json = run_model("", &["--precision", "bf16", "--json"])
        .expect("NVRTC is there")
        .stdout;
    assert!(
        json.contains("\"precision\": \"bf16\"") && json.contains("\"max_rel\": "),
        "{json}"
    );
    let beyond = run_model("", &["--mem", "gpu:0=140%"]).expect("NVRTC is there");
    assert!(
        beyond.code == Some(2) && beyond.stderr.contains("140%"),
        "{}",
        beyond.stderr
    );
}

#[test]
fn faults_name_the_kernel_and_a_lost_device_itself() {
    let Some(fault) = run_model("fault=0:2", &["--verify"]) else {
        return;
    };
    let said = &fault.stderr;
    assert_eq!(fault.code, Some(6), "{said}");
    assert!(
        said.contains("in node \"/")
            && said.contains("kernel ")
            && said.contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{said}"
    );
    let lost = run_model("lose=0:1", &[]).expect("NVRTC is there");
    let said = &lost.stderr;
    assert!(
        lost.code == Some(6)
            && said.contains("/device:GPU:0: ")
            && said.contains("emulated GPU 0 was lost"),
        "{said}"
    );
}

#[test]
fn too_little_memory_names_tensors_and_what_may_help() {
    let Some(small) = run_model("memory=3000", &[]) else {
        return;
    };
    let said = &small.stderr;
    assert_eq!(small.code, Some(5), "{said}");
    // No limit is more than the GPU has, so another one is what helps.
    assert!(
        said.contains("a GPU with ") && said.contains("no --mem makes more"),
        "{said}"
    );
    assert!(
        said.contains("largest tensors: f32[32, 32] weights of \"/2/Gemm\" (4096 bytes)"),
        "{said}"
    );
    assert!(said.contains("or a smaller batch"), "{said}");
    let limited = run_model("", &["--mem", "gpu:0=2.5KiB"]).expect("NVRTC is there");
    assert!(
        limited.code == Some(5) && limited.stderr.contains("--mem /device:GPU:0="),
        "{}",
        limited.stderr
    );
}

/// Limits are of what there is; logical devices of one GPU share it.
#[test]
fn limits_are_no_more_than_a_gpu_has() {
    let Some(beyond) = run_model("", &["--mem", "gpu:0=4GiB"]) else {
        return;
    };
    assert_eq!(beyond.code, Some(2), "{}", beyond.stderr);
    assert!(
        beyond
            .stderr
            .contains("limits of 4.00 GiB for /device:GPU:0, whose GPU has 1.00 GiB"),
        "{}",
        beyond.stderr
    );
    let nonsense = run_model("", &["--mem", "gpu:0=4gib"]).expect("NVRTC is there");
    assert!(
        nonsense.code == Some(2) && nonsense.stderr.contains("--mem \"gpu:0=4gib\""),
        "{}",
        nonsense.stderr
    );
    let halves = |extra: &[&str]| {
        let args = [
            &[
                "--devices",
                "gpu:2",
                "--visible-gpus",
                "0,0",
                "--pin",
                ".*=gpu:0",
            ],
            extra,
        ]
        .concat();
        let model = data("models/mlp_script/model.onnx");
        let ended = with_gpus(
            "memory=14000",
            "0",
            &[&["run", model.as_str()], args.as_slice()].concat(),
        );
        ended.expect("NVRTC is there")
    };
    // The model needs more than half, and gets it where it is asked for.
    let (half, most, both) = (
        halves(&[]),
        halves(&["--mem", "gpu:0=80%"]),
        halves(&["--mem", "gpu:*=60%"]),
    );
    assert!(
        half.code == Some(5) && half.stderr.contains("/device:GPU:0 needs "),
        "{}",
        half.stderr
    );
    assert_eq!(most.code, Some(0), "{}", most.stderr);
    assert!(
        both.code == Some(2) && both.stderr.contains("/device:GPU:0 and /device:GPU:1"),
        "{}",
        both.stderr
    );
}

/// Rates and links of the GPUs are measured, kept in the cache folder, shown, and used by placement.
#[test]
fn measured_rates_of_gpus_are_kept_and_used() {
    with_driver(
        "measured_rates_of_gpus_are_kept_and_used",
        "devices=2,delay=0",
        || {
            let effort = Effort {
                each: Duration::ZERO,
                memory_bytes: 1 << 20,
                gpu_memory_bytes: 1 << 20,
                gpu_side: 64,
            };
            let (machine, host) = (calibrate::machine(), DeviceProfile::this_cpu(2));
            let made =
                calibrate::gpus::calibrate(&machine, 2, &host, LinkProfile::IN_PROCESS, effort)
                    .unwrap();
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(calibrate::gpus::path(dir.path()), made.to_text()).unwrap();
            let (read, warning) =
                calibrate::gpus::load(&calibrate::gpus::path(dir.path()), &machine);
            assert_eq!(
                (read.map(|r| r.to_text()), warning),
                (Some(made.to_text()), None)
            );
            let mut set = DeviceSet::parse("cpu:1,gpu:2", 2).unwrap();
            set.look_at_gpus(&[]).unwrap();
            let assumed = set.clone();
            made.apply(&mut set, &[]);
            assert_ne!(set.devices[1].profile, assumed.devices[1].profile);
            assert!(
                set.links
                    .iter()
                    .all(|(pair, link)| assumed.links[pair] != *link),
                "every link was measured: {:?}",
                set.links
            );
            let shown = with_cache(dir.path(), "devices=2", &["devices"]);
            assert!(
                shown.stdout.matches("gpus.toml").count() == 2,
                "{}{}",
                shown.stdout,
                shown.stderr
            );
            let fewer = with_cache(dir.path(), "devices=1", &["devices"]);
            assert!(
                fewer.stdout.contains("calibrate --devices gpu:1")
                    && fewer.stderr.contains("the driver shows 1"),
                "{}",
                fewer.stderr
            );
            let refused = with_cache(dir.path(), "", &["calibrate", "--devices", "emu:1"]);
            assert!(
                refused.code == Some(2) && refused.stderr.contains("is emulated"),
                "{}",
                refused.stderr
            );
        },
    );
}

/// What a GPU computes is timed by its own clock, not by how long it takes to ask for it.
#[test]
fn clusters_are_timed_by_events() {
    with_driver("clusters_are_timed_by_events", "delay=1000000", || {
        let mut b = GraphBuilder::new("g");
        let [x, y] = ["x", "y"].map(|name| b.input(name, DType::F32, [96usize, 96]));
        let z = b.matmul(x, y).unwrap();
        b.output("z", z);
        let compiled = unchecked("gpu:1", 2).compile(&b.finish().unwrap()).unwrap();
        let tensors = vec![Tensor::zeros(DType::F32, &[96, 96]).unwrap(); 2];
        let executable = compiled.for_inputs(&tensors).unwrap();
        executable.run(&tensors).unwrap();
        executable.start_profile().unwrap();
        let started = Instant::now();
        executable.run(&tensors).unwrap();
        let taken = started.elapsed().as_nanos() as u64;
        let kernels: u64 = executable.profile().iter().map(|s| s.ns).sum();
        assert!(
            kernels > taken / 3 && kernels <= taken,
            "kernels take {kernels} ns of {taken}"
        );
        let mut measured = Measured::default();
        assert_eq!(
            compiled.measure(&tensors, 2, &mut measured).unwrap().len(),
            1
        );
        let (_, sample) = measured.samples().next().unwrap();
        assert!(
            sample.count == 2 && sample.min.0 > kernels / 20,
            "{sample:?} against {kernels}"
        );
    });
}

/// The form that the device's clock says is fastest is taken, kept on disk, and taken again without being timed. Here a launch takes as long as it has
/// threads.
#[test]
fn forms_of_kernels_are_chosen_by_timing_them() {
    with_driver(
        "forms_of_kernels_are_chosen_by_timing_them",
        "clock=threads",
        || {
            let mut b = GraphBuilder::new("g");
            let x = b.input("x", DType::F32, [64usize, 600]);
            let y = b.reduce(ReduceKind::Sum, x, &[1], false).unwrap();
            let y = b.map(ScalarOp::Relu, &[y]).unwrap();
            b.output("y", y);
            let graph = b.finish().unwrap();
            let inputs = [random_tensor(&mut Rng(28), DType::F32, &[64, 600], false)];
            let dir = tempfile::tempdir().unwrap();
            let (mut threads, mut outputs) = (Vec::new(), Vec::new());
            for (folder, measures) in [
                (None, false),
                (Some(dir.path()), true),
                (Some(dir.path()), false),
            ] {
                let tuning = Tuning {
                    folder: folder.map(Path::to_owned),
                    measures,
                    ..Tuning::default()
                };
                let compiled = tuned(tuning).compile(&graph).unwrap();
                let executable = compiled.for_inputs(&inputs).unwrap();
                let lowered = &executable.lowered;
                assert!(
                    lowered.report.warnings.is_empty(),
                    "{:?}",
                    lowered.report.warnings
                );
                let Kernel::Gpu(kernel) = &lowered.program.partitions[0].kernels[0] else {
                    panic!("a kernel of a GPU")
                };
                let launch = kernel.launch;
                threads.push(
                    launch
                        .grid
                        .iter()
                        .chain(&launch.block)
                        .map(|&n| u64::from(n))
                        .product::<u64>(),
                );
                outputs.push(executable.run(&inputs).unwrap().into_tensors().remove(0));
                // What is shown is what runs.
                let [choice] = &lowered.report.choices[..] else {
                    panic!("{:?}", lowered.report.choices)
                };
                let tuned = if folder.is_some() {
                    "tuned on emulated GPU 0, driver 13.0"
                } else {
                    "predicted"
                };
                let said = format!("form {} of {}, {tuned}: ", choice.number + 1, choice.n);
                let is_said = choice.to_string().starts_with(&said)
                    && choice.form.contains(" threads per row");
                assert!(
                    (choice.number > 0) == folder.is_some() && is_said,
                    "{choice}"
                );
                let planned = format!(
                    "// {}: grid {} x 1 x 1, block {} x",
                    kernel.name, launch.grid[0], launch.block[0]
                );
                let text = |stage| lowered.text(stage, false).unwrap();
                let listing = text(Stage::Cuda);
                assert!(
                    listing.contains(&said) && listing.contains(&planned),
                    "{said} {planned}: {listing}"
                );
                assert!(
                    text(Stage::Schedule).contains(&said),
                    "{}",
                    text(Stage::Schedule)
                );
                assert_eq!(
                    text(Stage::Ptx).trim_end(),
                    lowered.program.partitions[0].gpu_code[0].ptx.trim_end()
                );
                let table = lowered.report.tuned_text();
                let is_told = table.contains(&format!(
                    "{} of {}: {}",
                    choice.number + 1,
                    choice.n,
                    choice.form
                ));
                assert!(
                    is_told == folder.is_some() && table.is_empty() != is_told,
                    "{table}"
                );
                if folder.is_none() {
                    assert!(!tune::path(dir.path()).exists());
                }
            }
            assert!(
                threads[1] < threads[0] && threads[2] == threads[1],
                "threads of the first form, and of the winner: {threads:?}"
            );
            let kept = std::fs::read_to_string(tune::path(dir.path())).unwrap();
            assert!(
                kept.contains("emulated GPU 0, driver 13.0") && !kept.contains("\"form\":0"),
                "{kept}"
            );
            let expected = interp::run(&graph, &inputs).unwrap();
            for found in &outputs {
                assert!(allclose(&expected[0], found, 0.0, 0.0).scaled_err() < 1e-5);
            }
        },
    );
}

/// Kernels in the bodies of control flow are timed and chosen too.
#[test]
fn forms_in_regions_are_chosen() {
    with_driver("forms_in_regions_are_chosen", "clock=threads", || {
        let mut b = GraphBuilder::new("body");
        let state = b.input("state", DType::F32, [64usize, 600]);
        let mean = b.reduce(ReduceKind::Mean, state, &[1], true).unwrap();
        let next = b.sub(state, mean).unwrap();
        b.output("next", next);
        let body = b.finish().unwrap();
        let mut b = GraphBuilder::new("g");
        let x = b.input("x", DType::F32, [64usize, 600]);
        let scan = Op::Scan {
            carried: 1,
            scanned: 0,
            length: 3usize.into(),
            reverse: false,
        };
        let y = b.add_with_regions(scan, &[x], vec![body]).unwrap()[0];
        b.output("y", y);
        let graph = b.finish().unwrap();
        let inputs = [random_tensor(&mut Rng(29), DType::F32, &[64, 600], false)];
        let dir = tempfile::tempdir().unwrap();
        let expected = interp::run(&graph, &inputs).unwrap();
        for measures in [true, false] {
            let tuning = Tuning {
                folder: Some(dir.path().to_owned()),
                measures,
                ..Tuning::default()
            };
            let compiled = tuned(tuning).compile(&graph).unwrap();
            let executable = compiled.for_inputs(&inputs).unwrap();
            let [choice] = &executable.lowered.report.choices[..] else {
                panic!("one kernel has forms")
            };
            assert!(
                choice.number > 0 && choice.to_string().contains("tuned on emulated GPU 0"),
                "{choice}"
            );
            let listing = executable.lowered.text(Stage::Cuda, false).unwrap();
            assert!(listing.contains(&choice.to_string()), "{choice}: {listing}");
            let found = executable.run(&inputs).unwrap().into_tensors();
            assert!(allclose(&expected[0], &found[0], 0.0, 0.0).scaled_err() < 1e-4);
        }
    });
}

#[test]
fn the_table_of_forms_is_printed() {
    let mut b = GraphBuilder::new("g");
    let [x, y] = [("x", [100usize, 96]), ("y", [96, 200])]
        .map(|(name, shape)| b.input(name, DType::F32, shape));
    let z = b.matmul(x, y).unwrap();
    b.output("z", z);
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("g.ir");
    std::fs::write(&model, b.finish().unwrap().to_text(PrintOptions::FULL)).unwrap();
    let model = model.to_str().unwrap();
    let args = [
        "bench",
        model,
        "--devices",
        "gpu:1",
        "--iters",
        "2",
        "--tune",
    ];
    let Some(ended) = with_gpus("clock=threads", "0", &args) else {
        return;
    };
    let said = &ended.stderr;
    assert!(
        ended.code == Some(0) && said.contains("    chosen   predicted  form\n"),
        "{}{said}",
        ended.stdout
    );
    assert!(
        said.contains(": tiles of ") && said.contains("cuda.rs:"),
        "{said}"
    );
}

#[test]
fn profiles_of_gpus_are_recorded_from_the_command_line() {
    let model = data("models/mlp_script/model.onnx");
    let args = [
        "bench",
        &model,
        "--devices",
        "cpu:1,gpu:1",
        "--iters",
        "2",
        "--profile",
    ];
    let Some(ended) = with_gpus("", "0", &args) else {
        return;
    };
    assert!(
        ended.code == Some(0) && ended.stderr.contains("clusters, 16 runs each, added to"),
        "{}",
        ended.stderr
    );
}

/// The yardstick of products, which goes the way of all products of a library.
#[test]
fn products_of_cublaslt_are_timed() {
    with_driver("products_of_cublaslt_are_timed", "", || {
        let time = gpu(0, None).time_cublaslt(64, &|i| (i % 7) as u16).unwrap();
        assert!(!time.is_zero());
        let full = gpu(0, Some(1 << 20)).time_cublaslt(64, &|_| 0).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::OutOfMemory, "{full}");
    });
}

/// `add_one`: `[in, out]`, one float per thread.
const ADD_ONE: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry add_one(.param .u64 from, .param .u64 to) {
    .reg .f32 %f<3>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f2, %f1, 0f3F800000;
    st.global.f32 [%rd5], %f2;
    ret;
}
";

const N: usize = 32;

fn gpu(ordinal: u32, limit_bytes: Option<usize>) -> CudaGpu {
    CudaGpu::open(
        ordinal,
        Settings {
            limit_bytes,
            checks: false,
        },
    )
    .unwrap()
}

fn floats(memory: &dyn HostMemory) -> Vec<f32> {
    // SAFETY: so many bytes are there. They are looked at while no copy is under way, or to show that none was done.
    let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.size_bytes()) };
    bytes
        .chunks_exact(4)
        .map(|c| f32::from_ne_bytes([c[0], c[1], c[2], c[3]]))
        .collect()
}

/// Work is done when someone waits for it, no sooner; so what follows from events holds, and what follows from luck does not.
#[test]
fn what_is_asked_is_done_when_it_is_waited_for() {
    with_driver(
        "what_is_asked_is_done_when_it_is_waited_for",
        "delay=1000000",
        || {
            let gpu = gpu(0, None);
            let code = GpuCode {
                arch: "sm_80".into(),
                ptx: ADD_ONE.into(),
                cubin: b"\x7fELF of another GPU".to_vec(),
            };
            let code = gpu.load(&code).unwrap();
            let launch = Launch {
                grid: [1; 3],
                block: [N as u32, 1, 1],
                shared_bytes: 0,
            };
            let [a, b] = [gpu.allocate(4 * N).unwrap(), gpu.allocate(4 * N).unwrap()];
            let (out, event) = (gpu.pin(4 * N).unwrap(), gpu.event().unwrap());
            let arrived = Arc::new(AtomicBool::new(false));
            let flag = arrived.clone();
            let arrival: Arrival = Box::new(move || flag.store(true, Ordering::SeqCst));
            gpu.write(a, &[0; 4 * N]).unwrap();
            code.launch("add_one", &launch, &[a, b].map(GpuArg::Address))
                .unwrap();
            // SAFETY: the bytes and the call live until the device has finished, and are only looked at before that.
            unsafe { gpu.send(b, &*out, &*event, Some(&arrival)).unwrap() };
            // Later work goes into the same buffer; the copy came before.
            gpu.wait(Queue::Compute, &*event).unwrap();
            code.launch("add_one", &launch, &[b, b].map(GpuArg::Address))
                .unwrap();
            assert_eq!(
                (floats(&*out), arrived.load(Ordering::SeqCst)),
                (vec![0.0; N], false),
                "nothing was waited for"
            );
            gpu.finish().unwrap();
            assert_eq!(
                (floats(&*out), arrived.load(Ordering::SeqCst)),
                (vec![1.0; N], true)
            );
            let mut now = [0; 4 * N];
            gpu.read(b, &mut now).unwrap();
            assert_eq!(now[..4], 2f32.to_ne_bytes());
            assert!(
                code.launch("absent", &launch, &[a, b].map(GpuArg::Address))
                    .unwrap_err()
                    .to_string()
                    .contains("no kernel \"absent\"")
            );
        },
    );
}

#[test]
fn what_is_captured_is_done_again() {
    with_driver("what_is_captured_is_done_again", "delay=1000000", || {
        let gpu = gpu(0, None);
        let code = GpuCode {
            arch: "sm_80".into(),
            ptx: ADD_ONE.into(),
            cubin: Vec::new(),
        };
        let code = gpu.load(&code).unwrap();
        let launch = Launch {
            grid: [1; 3],
            block: [N as u32, 1, 1],
            shared_bytes: 0,
        };
        let a = gpu.allocate(4 * N).unwrap();
        let (input, output) = (gpu.pin(4 * N).unwrap(), gpu.pin(4 * N).unwrap());
        let [came, went] = [gpu.event().unwrap(), gpu.event().unwrap()];
        let mut ask = || {
            // SAFETY: the bytes live until the device has finished, and change only before and after.
            unsafe { gpu.receive(&*input, a, &*came)? };
            gpu.wait(Queue::Compute, &*came)?;
            code.launch("add_one", &launch, &[a, a].map(GpuArg::Address))?;
            // SAFETY: as above.
            unsafe { gpu.send(a, &*output, &*went, None) }
        };
        let replay = gpu
            .capture(true, &mut ask)
            .unwrap()
            .expect("nothing here cannot be captured");
        gpu.finish().unwrap();
        assert_eq!(floats(&*output), [0.0; N], "capturing does nothing");
        for x in [3.0f32, 5.0] {
            let bytes: Vec<u8> = [x; N].iter().flat_map(|x| x.to_ne_bytes()).collect();
            // SAFETY: as many bytes are there, and the device has finished.
            unsafe {
                input
                    .as_ptr()
                    .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
            };
            replay.start().unwrap();
            gpu.finish().unwrap();
            assert_eq!(floats(&*output), [x + 1.0; N]);
        }
        // What waits for the device cannot be captured: the caller asks for it step by step.
        assert!(gpu.capture(true, &mut || gpu.finish()).unwrap().is_none());
        gpu.finish().unwrap();
    });
}

#[test]
fn a_device_without_pools_has_memory_all_the_same() {
    with_driver(
        "a_device_without_pools_has_memory_all_the_same",
        "devices=2,memory=8000000,pools=0",
        || {
            let [one, other] = [gpu(0, None), gpu(1, Some(4096))];
            let a = one.allocate(5_000_000).unwrap();
            assert_eq!(
                one.allocate(5_000_000).unwrap_err().kind(),
                ErrorKind::OutOfMemory
            );
            one.free(a);
            let a = one.allocate(5_000_000).unwrap();
            let b = other.allocate(4096).unwrap();
            assert!(
                other
                    .allocate(1)
                    .unwrap_err()
                    .to_string()
                    .contains("the limit is 4096")
            );
            // Memory of either device is copied to and from, the other's too.
            one.write(a, &[7; 4096]).unwrap();
            let event = one.event().unwrap();
            one.push(a, other.peer().unwrap(), b, 4096, &*event)
                .unwrap();
            other.wait(Queue::Compute, &*event).unwrap();
            let mut back = [0; 4096];
            other.read(b, &mut back).unwrap();
            assert_eq!(back, [7; 4096]);
            check_random_graphs(27, 217..229, &["/cpu:0", "/gpu:0", "/gpu:0"], &|level| {
                unchecked("cpu:1,gpu:1", level)
            });
        },
    );
}

/// What the plan says is needed is enough, to the byte.
#[test]
fn a_limit_of_what_is_needed_is_enough() {
    with_driver("a_limit_of_what_is_needed_is_enough", "", || {
        for name in ["mlp_script", "rnn_dynamo", "bert_script"] {
            let model = onnx::load(data(&format!("models/{name}/model.onnx"))).unwrap();
            let tensors = |c: &Compiled| -> Vec<Tensor> {
                let zeros = |(_, t): &(String, Type)| {
                    Tensor::zeros(t.dtype, &t.static_shape().unwrap()).unwrap()
                };
                c.inputs().iter().map(zeros).collect()
            };
            let free = unchecked("gpu:1", 2).compile(&model).unwrap();
            let executable = free.for_inputs(&tensors(&free)).unwrap();
            let need = executable.lowered.program.memory_use()[0].1.total_bytes(1);
            // Placement has a limit of its own opinion: the driver's is what is tried here.
            let gpu = Arc::new(gpu(0, Some(need))) as Arc<dyn Driver>;
            let drivers = [(DeviceName::parse("gpu:0").unwrap(), gpu)].into();
            let options = ExecOptions {
                pool: Arc::new(Pool::new(1)),
                drivers,
                ..ExecOptions::default()
            };
            let executor = Executor::new(executable.lowered.program.clone(), &options)
                .unwrap_or_else(|e| panic!("{name}: {e}"));
            executor.run(&tensors(&free)).unwrap();
        }
    });
}

#[test]
fn limits_are_hard_and_memory_comes_back() {
    with_driver(
        "limits_are_hard_and_memory_comes_back",
        "devices=2,memory=1000000",
        || {
            let [small, all] = [gpu(0, Some(4096)), gpu(1, None)];
            let a = small.allocate(4096).unwrap();
            let e = small.allocate(1).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::OutOfMemory);
            assert!(
                e.to_string()
                    .contains("4096 are in use here, the limit is 4096"),
                "{e}"
            );
            small.free(a);
            assert!(small.allocate(4096).is_ok());
            let b = all.allocate(900_000).unwrap();
            assert_eq!(
                all.allocate(900_000).unwrap_err().kind(),
                ErrorKind::OutOfMemory
            );
            // Memory that is given back late is there when it is asked for.
            all.free(b);
            assert!(all.allocate(900_000).is_ok());
        },
    );
}

#[test]
fn large_copies_cross_piece_by_piece() {
    with_driver(
        "large_copies_cross_piece_by_piece",
        "memory=100000000",
        || {
            let gpu = gpu(0, None);
            let bytes: Vec<u8> = (0..11_000_001u32)
                .map(|i| (i.wrapping_mul(2654435761) >> 24) as u8)
                .collect();
            let a = gpu.allocate(bytes.len()).unwrap();
            let mut back = vec![0; bytes.len()];
            for _ in 0..2 {
                gpu.write(a, &bytes).unwrap();
                back.fill(0);
                gpu.read(a, &mut back).unwrap();
                assert!(back == bytes);
            }
        },
    );
}

/// PTX that a driver does not take: its compiler's words, and the version that is needed where that is the reason.
#[test]
fn code_that_the_driver_does_not_take_says_why() {
    with_driver(
        "code_that_the_driver_does_not_take_says_why",
        "driver=12040",
        || {
            let gpu = gpu(0, None);
            let load = |ptx: String| {
                let code = GpuCode {
                    arch: "sm_90a".into(),
                    ptx,
                    cubin: Vec::new(),
                };
                gpu.load(&code).err().expect("it is no PTX")
            };
            let e = load(
                "// Cuda compilation tools, release 13.0, V13.0.88\n.version 9.0\nnonsense".into(),
            );
            assert_eq!(e.kind(), ErrorKind::Unsupported);
            let text = e.to_string();
            assert!(
                text.contains("CUDA_ERROR_INVALID_PTX")
                    && text.contains("a driver for CUDA 13.0 or later"),
                "{text}"
            );
            assert!(
                text.contains("for CUDA 12.4") && text.contains("line 3"),
                "{text}"
            );
            assert!(
                !load("// Cuda compilation tools, release 12.1, V12.1\nnonsense".into())
                    .to_string()
                    .contains("or later")
            );
        },
    );
}
