//! What a CUDA driver is asked for by a model that runs, call by call: nothing twice, nothing in vain, nothing that waits where it need not.

use crate::cuda::{unchecked, with_driver_of};
use gristmill::cost::Bytes;
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::{Dim, Graph, GraphBuilder, ReduceKind, ScalarOp};
use gristmill::place::Pin;
use gristmill::testing::{Rng, Setup, random_tensor};
use gristmill::train::{Adam, Model, Objective, Trainer, Training, loss};
use gristmill::{DType, ErrorKind, Executable, Tensor};
use gristmill_runtime::DeviceName;
use gristmill_runtime::cuda::{CudaGpu, Settings};
use gristmill_runtime::driver::Driver;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// Calls that allocate.
const ALLOCATING: [&str; 9] = [
    "cuMemAllocFromPoolAsync",
    "cuMemAlloc_v2",
    "cuMemHostAlloc",
    "cuMemPoolCreate",
    "cuStreamCreate",
    "cuEventCreate",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
];

/// What the driver writes down.
struct Log {
    path: PathBuf,
    n_seen: Cell<usize>,
}

impl Log {
    /// The calls since the last look.
    fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        let calls: Vec<String> = text
            .lines()
            .skip(self.n_seen.get())
            .map(str::to_owned)
            .collect();
        self.n_seen.set(self.n_seen.get() + calls.len());
        calls
    }
}

fn count(calls: &[String], name: &str) -> usize {
    calls
        .iter()
        .filter(|c| c.split(' ').next() == Some(name))
        .count()
}

/// Names of calls, each once with its number.
fn counts(calls: &[String]) -> Vec<(&str, usize)> {
    let mut names: Vec<&str> = calls.iter().filter_map(|c| c.split(' ').next()).collect();
    names.sort_unstable();
    names.dedup();
    names
        .into_iter()
        .map(|name| (name, count(calls, name)))
        .collect()
}

/// As [`with_driver_of`], with the log of the calls.
fn logged(name: &str, settings: &str, body: impl FnOnce(&Log)) {
    let folder = tempfile::tempdir().unwrap();
    let settings = [
        settings,
        &format!("log={}", folder.path().join("calls").display()),
    ]
    .join(",");
    with_driver_of("cuda_calls", name, &settings, || {
        // The process that runs the body is told the file by the one that started it.
        let settings = std::env::var("EMULATED_CUDA").unwrap();
        let (_, path) = settings.split_once("log=").unwrap();
        body(&Log {
            path: path.into(),
            n_seen: Cell::new(0),
        });
    });
}

/// Three products in a row, of which the first is wanted beside the last: `/first`, `/second` and `/third`, with weights.
fn three_products(batch: Dim) -> Graph {
    let mut b = GraphBuilder::new("three products");
    let mut rng = Rng(31);
    let mut x = b.input("x", DType::F32, [batch, 24usize.into()]);
    for name in ["first", "second", "third"] {
        b.set_origin(&format!("/{name}"));
        let w = b.constant(random_tensor(&mut rng, DType::F32, &[24, 24], false));
        x = b.matmul(x, w).unwrap();
        x = b.map(ScalarOp::Tanh, &[x]).unwrap();
    }
    b.output("y", x);
    b.finish().unwrap()
}

/// `late` is computed on the GPU while `early`, which is computed there first, goes to the CPU, and what the CPU makes of it comes back.
fn there_and_back() -> Graph {
    let mut b = GraphBuilder::new("there and back");
    let x = b.input("x", DType::F32, [32usize, 32]);
    let product = |b: &mut GraphBuilder, x, origin: &str| {
        b.set_origin(origin);
        let y = b.matmul(x, x).unwrap();
        b.map(ScalarOp::Tanh, &[y]).unwrap()
    };
    let early = b
        .with_device("/gpu:0", |b| Ok(product(b, x, "/early")))
        .unwrap();
    let on_cpu = b
        .with_device("/cpu:0", |b| Ok(product(b, early, "/on_cpu")))
        .unwrap();
    let both = b.with_device("/gpu:0", |b| {
        let late = (0..4).fold(x, |x, i| product(b, x, &format!("/late{i}")));
        b.set_origin("/both");
        let both = b.matmul(late, on_cpu)?;
        b.map(ScalarOp::Tanh, &[both])
    });
    b.output("both", both.unwrap());
    b.finish().unwrap()
}

/// Small values: products in a row magnify neither them nor rounding errors.
fn random(seed: u64, shape: &[usize]) -> Vec<Tensor> {
    let mut rng = Rng(seed);
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| 0.2 * rng.normal() as f32)
        .collect();
    vec![Tensor::from_slice(&values, shape).unwrap()]
}

fn check(graph: &Graph, inputs: &[Tensor], found: &Tensor) {
    let expected = interp::run(graph, inputs).unwrap();
    let c = allclose(&expected[0], found, 0.0, 0.0);
    assert!(c.scaled_err() < 1e-5, "{c}");
}

fn run(graph: &Graph, executable: &Executable, inputs: &[Tensor]) {
    check(
        graph,
        inputs,
        &executable.run(inputs).unwrap().into_tensors()[0],
    );
}

#[test]
fn a_run_is_one_launch_of_a_graph_and_nothing_else() {
    logged(
        "a_run_is_one_launch_of_a_graph_and_nothing_else",
        "delay=0",
        |log| {
            let graph = three_products(5usize.into());
            let compiled = unchecked("gpu:1", 2).compile(&graph).unwrap();
            let inputs = random(1, &[5, 24]);
            let executable = compiled.for_inputs(&inputs).unwrap();
            let made = log.calls();
            assert!(
                count(&made, "cuMemcpyHtoDAsync_v2") >= 3,
                "the weights: {made:?}"
            );
            run(&graph, &executable, &inputs);
            let first = log.calls();
            // One input, one output, by pinned memory; no weight.
            assert_eq!(
                [
                    "cuMemcpyHtoDAsync_v2",
                    "cuMemcpyDtoHAsync_v2",
                    "cuLaunchKernel",
                    "pageable"
                ]
                .map(|c| count(&first, c)),
                [1, 1, 3, 0],
                "{first:?}"
            );
            run(&graph, &executable, &inputs);
            let second = log.calls();
            assert_eq!(
                ["cuStreamBeginCapture_v2", "cuGraphLaunch"].map(|c| count(&second, c)),
                [1, 1],
                "{second:?}"
            );
            let allocated = |calls: &[String]| {
                ALLOCATING
                    .iter()
                    .map(|name| count(calls, name))
                    .sum::<usize>()
            };
            assert_eq!(allocated(&second), 0, "{second:?}");
            for _ in 0..3 {
                run(&graph, &executable, &inputs);
                let later = log.calls();
                assert_eq!(
                    counts(&later),
                    [("cuGraphLaunch", 1), ("cuStreamSynchronize", 3)],
                    "{later:?}"
                );
            }
        },
    );
}

/// A step of momentum: the velocity `v` and the weights `w`, both variables; the output is the mean of the new weights.
fn momentum() -> Graph {
    let mut b = GraphBuilder::new("momentum");
    let gradient = b.input("gradient", DType::F32, [8usize, 16]);
    let start = random(4, &[8, 16]).remove(0);
    let (v, w) = (b.variable("v", start.clone()), b.variable("w", start));
    let (v, w, decay) = (v.unwrap(), w.unwrap(), b.scalar(DType::F32, 0.9));
    let kept = b.map(ScalarOp::Mul, &[v, decay]).unwrap();
    let v = b.add_(kept, gradient).unwrap();
    let w = b.map(ScalarOp::Sub, &[w, v]).unwrap();
    let (_, w) = (b.assign_variable("v", v), b.assign_variable("w", w));
    let mean = b.reduce(ReduceKind::Mean, w.unwrap(), &[0, 1], false);
    b.output("mean", mean.unwrap());
    b.finish().unwrap()
}

/// Copies to the device, from it, and on it.
fn copies(calls: &[String]) -> [usize; 3] {
    [
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoDAsync_v2",
    ]
    .map(|name| count(calls, name))
}

#[test]
fn variables_stay_on_their_device() {
    logged("variables_stay_on_their_device", "delay=0", |log| {
        let graph = momentum();
        let compiled = unchecked("gpu:1", 2).compile(&graph).unwrap();
        let inputs = random(5, &[8, 16]);
        let executable = compiled.for_inputs(&inputs).unwrap();
        let mut store = interp::Store::new();
        let mut step = || {
            let expected = interp::run_with_state(&graph, &inputs, &mut store).unwrap();
            log.calls();
            let found = executable.run(&inputs).unwrap().into_tensors();
            let close = allclose(&expected[0], &found[0], 0.0, 0.0);
            assert!(close.scaled_err() < 1e-5, "{close}");
            (log.calls(), store.get("", "w").unwrap().clone())
        };
        // The gradient and the initial values, and the mean.
        assert_eq!(copies(&step().0), [3, 1, 0]);
        // Values and new ones have two places, which take turns: requests are captured for either.
        (0..2).for_each(|_| drop(step()));
        for _ in 0..3 {
            // The next run reads new values where they are; the caller's tensors cross within the graph.
            let calls = step().0;
            assert_eq!(
                (copies(&calls), count(&calls, "cuGraphLaunch")),
                ([0, 0, 0], 1)
            );
        }
        let (_, expected) = step();
        let weights = compiled.resources().get("", "w").unwrap().unwrap();
        assert!(allclose(&expected, &weights, 0.0, 0.0).scaled_err() < 1e-5);
        assert_eq!(copies(&log.calls()), [0, 1, 0]);
        // A value that was asked for is still there.
        assert_eq!(copies(&step().0), [0, 0, 0]);
        // Kernels that are started again, to be timed, write no value that counts.
        let times = executable.time_kernels(Duration::ZERO).unwrap();
        assert!(!times.is_empty());
        step();
        compiled.resources().set("", "w", &weights).unwrap();
        log.calls();
        executable.run(&inputs).unwrap();
        assert_eq!(copies(&log.calls()), [1, 0, 0]);
    });
}

/// A hidden layer, a layer of classes, and the cross-entropy of these.
fn classes(m: &mut Model) -> gristmill::Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), 24.into()]);
    let label = m.input("label", DType::I64, [Dim::from("batch")]);
    let x = m.scope("hidden", |m| m.dense(x, 32))?;
    let x = m.builder().map(ScalarOp::Relu, &[x])?;
    let x = m.scope("classes", |m| m.dense(x, 12))?;
    let loss = loss::sparse_cross_entropy(m.builder(), x, label)?;
    Ok(Objective::new(loss))
}

/// All weights after five steps of Adam, and one before the third to fail; `seen` is called after each
/// of the five.
fn trained(setup: &Setup, mut seen: impl FnMut()) -> Vec<Vec<f64>> {
    let training = Training::from(Adam::default());
    let trainer = Trainer::in_session(&setup.session(), "classes", &training, classes).unwrap();
    let x = random(6, &[8, 24]).remove(0);
    let label: Vec<i64> = (0..8).map(|i| i % 12).collect();
    let label = Tensor::from_slice(&label, &[8]).unwrap();
    let beyond = Tensor::from_slice(&[12i64; 8], &[8]).unwrap();
    for i in 0..5 {
        if i == 2 {
            let batch = [("x", x.clone()), ("label", beyond.clone())];
            trainer.step(batch).unwrap_err();
        }
        let batch = [("x", x.clone()), ("label", label.clone())];
        trainer.step(batch).unwrap();
        seen();
    }
    let names = [
        "hidden/weights",
        "hidden/bias",
        "classes/weights",
        "classes/bias",
    ];
    let value = |name| trainer.resources().get("", name).unwrap().unwrap();
    names.map(|name| value(name).to_f64s()).into()
}

/// A parameter and its averages are one kernel's, and nothing is copied between steps.
#[test]
fn a_step_of_training_is_one_request() {
    logged("a_step_of_training_is_one_request", "delay=0", |log| {
        let expected = trained(&Setup::default(), || ());
        let mut calls = Vec::new();
        let found = trained(&unchecked("gpu:1", 2), || calls.push(log.calls()));
        for (expected, found) in expected.iter().zip(&found) {
            let pairs = expected.iter().zip(found);
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-5, "{worst}");
        }
        // 40 with one launch for each parameter, each of its averages, and the sum and the largest element
        // of its gradient.
        assert_eq!(count(&calls[0], "cuLaunchKernel"), 22, "{:#?}", calls[0]);
        for calls in &calls[3..] {
            assert_eq!(copies(calls), [0, 0, 0]);
            assert_eq!(count(calls, "cuGraphLaunch"), 1);
        }
    });
}

/// A call with an argument: `has(call, "cuStreamWaitEvent", "stream=4112")`.
fn has(call: &str, name: &str, argument: &str) -> bool {
    let mut words = call.split(' ');
    words.next() == Some(name) && words.any(|word| word == argument)
}

/// Where the first of these calls is, from `from` on.
fn find(calls: &[String], from: usize, names: &[&str]) -> usize {
    let is_one = |call: &String| names.contains(&call.split(' ').next().unwrap_or_default());
    from + calls[from..]
        .iter()
        .position(is_one)
        .unwrap_or_else(|| panic!("no {names:?} in {calls:#?}"))
}

/// What crosses between CPU and GPU crosses beside what is computed: nothing stands between a copy and the next kernels that do not need it.
#[test]
fn tensors_cross_while_kernels_run() {
    logged("tensors_cross_while_kernels_run", "", |log| {
        let graph = there_and_back();
        let compiled = unchecked("cpu:1,gpu:1", 2).compile(&graph).unwrap();
        let inputs = random(2, &[32, 32]);
        let executable = compiled.for_inputs(&inputs).unwrap();
        let (mut n_captured, mut steady) = (0, Vec::new());
        for n in 0..5 {
            log.calls();
            run(&graph, &executable, &inputs);
            let calls = log.calls();
            n_captured += count(&calls, "cuStreamBeginCapture_v2");
            let sent = find(&calls, 0, &["cuMemcpyDtoHAsync_v2"]);
            // The second run asks for kernels in a capture, on another stream: the launch counts.
            let starts: &[&str] = if n == 0 {
                &["cuLaunchKernel"]
            } else {
                &["cuGraphLaunch"]
            };
            let late = find(&calls, sent, starts);
            let compute = calls[late]
                .split(' ')
                .find(|word| word.starts_with("stream="))
                .unwrap();
            let holds_up = |call: &&String| {
                call.contains("Synchronize") || has(call, "cuStreamWaitEvent", compute)
            };
            // What is computed next does not wait for the copy.
            assert_eq!(
                calls[sent..late].iter().find(holds_up),
                None,
                "run {n}: {calls:#?}"
            );
            // What comes back is copied as soon as it is there: not after what was asked for before. The device waits for it right before
            // the kernel that needs it.
            let came = calls
                .iter()
                .rposition(|c| c.starts_with("cuMemcpyHtoDAsync_v2"))
                .unwrap();
            let inward = calls[came]
                .split(' ')
                .find(|word| word.starts_with("stream="))
                .unwrap();
            assert!(
                !calls[late..came]
                    .iter()
                    .any(|c| has(c, "cuStreamWaitEvent", inward)),
                "run {n}: {calls:#?}"
            );
            let needs = find(&calls, came, &["cuLaunchKernel"]);
            assert_eq!(
                calls[late..needs].iter().filter(holds_up).count(),
                1,
                "run {n}: {calls:#?}"
            );
            assert_eq!(count(&calls, "pageable"), 0, "run {n}: {calls:#?}");
            if n >= 2 {
                let mut counts: Vec<(String, usize)> = counts(&calls)
                    .into_iter()
                    .map(|(name, n)| (name.to_owned(), n))
                    .collect();
                // How often the device is looked after is a matter of time.
                counts.retain(|(name, _)| name != "cuStreamQuery");
                steady.push(counts);
                assert_eq!(
                    ALLOCATING.map(|name| count(&calls, name)),
                    [0; 9],
                    "{calls:#?}"
                );
                assert_eq!(count(&calls, "cuGraphLaunch"), n_captured);
            }
        }
        assert!(
            n_captured > 0 && steady.iter().all(|counts| *counts == steady[0]),
            "{steady:#?}"
        );
    });
}

/// Tensors that cross keep their memory for themselves only where there is enough.
#[test]
fn a_limit_goes_before_copies_beside_kernels() {
    with_driver_of(
        "cuda_calls",
        "a_limit_goes_before_copies_beside_kernels",
        "",
        || {
            let graph = there_and_back();
            let inputs = random(2, &[32, 32]);
            let gpu = DeviceName::parse("gpu:0").unwrap();
            let of_gpu = |executable: &Executable| {
                let program = &executable.lowered.program;
                program
                    .memory_use()
                    .iter()
                    .find(|(device, _)| *device == gpu)
                    .unwrap()
                    .1
                    .total_bytes(1)
            };
            let mut setup = unchecked("cpu:1,gpu:1", 2);
            let mut needs = Vec::new();
            for less in [None, Some(0), Some(1)] {
                if let Some(less) = less {
                    let limit = Bytes((needs[0] - less) as u64);
                    let devices = &mut setup.settings.devices;
                    devices.limit_memory("gpu:0", limit).unwrap();
                }
                let compiled = setup.compile(&graph).unwrap();
                let executable = compiled.for_inputs(&inputs).unwrap();
                (0..3).for_each(|_| run(&graph, &executable, &inputs));
                needs.push(of_gpu(&executable));
            }
            assert!(needs[1] == needs[0] && needs[2] < needs[0], "{needs:?}");
        },
    );
}

/// Between GPUs that reach each other tensors cross straight, otherwise through pinned memory of the host.
#[test]
fn gpus_that_reach_each_other_copy_straight() {
    logged(
        "gpus_that_reach_each_other_copy_straight",
        "devices=2",
        |log| {
            assert_eq!(
                crossing(log),
                [
                    ("cuMemcpyPeerAsync", 1),
                    ("cuMemcpyDtoHAsync_v2", 1),
                    ("cuMemcpyHtoDAsync_v2", 1)
                ]
            );
        },
    );
}

#[test]
fn gpus_that_do_not_reach_each_other_copy_through_the_host() {
    logged(
        "gpus_that_do_not_reach_each_other_copy_through_the_host",
        "devices=2,peers=0",
        |log| {
            assert_eq!(
                crossing(log),
                [
                    ("cuMemcpyPeerAsync", 0),
                    ("cuMemcpyDtoHAsync_v2", 2),
                    ("cuMemcpyHtoDAsync_v2", 2)
                ]
            );
        },
    );
}

/// Copies of a run in which one tensor crosses from GPU to GPU, beside those of its input and its output.
fn crossing(log: &Log) -> [(&'static str, usize); 3] {
    let graph = three_products(4usize.into());
    let mut setup = unchecked("gpu:2", 2);
    setup.options.pins = ["/first=gpu:0", "/(second|third)=gpu:1"]
        .map(|pin| Pin::parse(pin).unwrap())
        .into();
    let compiled = setup.compile(&graph).unwrap();
    let inputs = random(3, &[4, 24]);
    let executable = compiled.for_inputs(&inputs).unwrap();
    log.calls();
    run(&graph, &executable, &inputs);
    let calls = log.calls();
    assert_eq!(count(&calls, "pageable"), 0);
    [
        "cuMemcpyPeerAsync",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
    ]
    .map(|name| (name, count(&calls, name)))
}

/// A driver that cannot capture is asked once, for each piece that it would be; what is asked step by step is right.
#[test]
fn a_driver_that_cannot_capture_is_asked_once() {
    logged(
        "a_driver_that_cannot_capture_is_asked_once",
        "graphs=0",
        |log| {
            let whole = (three_products(5usize.into()), "gpu:1", [5, 24]);
            let pieces = (there_and_back(), "cpu:1,gpu:1", [32, 32]);
            for (graph, devices, shape) in [whole, pieces] {
                let compiled = unchecked(devices, 2).compile(&graph).unwrap();
                let inputs = random(4, &shape);
                let executable = compiled.for_inputs(&inputs).unwrap();
                log.calls();
                let captures = || {
                    run(&graph, &executable, &inputs);
                    let calls = log.calls();
                    assert_eq!(count(&calls, "cuGraphLaunch"), 0);
                    assert!(count(&calls, "cuLaunchKernel") >= 3, "{calls:#?}");
                    count(&calls, "cuStreamBeginCapture_v2")
                };
                assert_eq!(
                    [captures(), captures(), captures(), captures()],
                    [0, 1, 0, 0],
                    "on {devices}"
                );
            }
        },
    );
}

/// Each batch is compiled and captured for itself, once, whatever comes between.
#[test]
fn other_shapes_have_graphs_of_their_own() {
    logged("other_shapes_have_graphs_of_their_own", "", |log| {
        let graph = three_products(Dim::from("batch"));
        let compiled = unchecked("gpu:1", 2).compile(&graph).unwrap();
        let mut captures = Vec::new();
        for batch in [3, 7, 3, 7, 3, 7, 1, 3] {
            log.calls();
            let inputs = random(batch as u64, &[batch, 24]);
            run(&graph, &compiled.for_inputs(&inputs).unwrap(), &inputs);
            captures.push(count(&log.calls(), "cuStreamBeginCapture_v2"));
        }
        assert_eq!(
            (captures, compiled.specialisations()),
            (vec![0, 0, 1, 1, 0, 0, 0, 0], 3)
        );
    });
}

/// Threads run one model with shapes of their own: while one captures, the others compile, allocate, launch and wait.
#[test]
fn threads_do_not_get_into_each_others_graphs() {
    with_driver_of(
        "cuda_calls",
        "threads_do_not_get_into_each_others_graphs",
        "delay=0",
        || {
            let graph = three_products(Dim::from("batch"));
            for round in 0..4u64 {
                let compiled = unchecked("gpu:1", 2).compile(&graph).unwrap();
                let runs = |thread: usize| {
                    for i in 0..6 {
                        let batch = 1 + thread + 4 * (i / 3);
                        let inputs = random(round * 100 + thread as u64, &[batch, 24]);
                        run(&graph, &compiled.for_inputs(&inputs).unwrap(), &inputs);
                    }
                };
                thread::scope(|scope| {
                    (0..4).for_each(|thread| drop(scope.spawn(move || runs(thread))))
                });
            }
        },
    );
}

/// What `body` gives, which must not take long: what hangs is not waited for.
fn in_time<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (give, take) = mpsc::channel();
    thread::spawn(move || give.send(body()));
    take.recv_timeout(Duration::from_secs(60))
        .expect("it hangs, or it panicked")
}

/// The error of a model that goes from GPU to CPU and back, when the GPU breaks in one of its first runs.
fn broken(runs: usize) -> gristmill::Error {
    in_time(move || {
        let graph = there_and_back();
        let compiled = unchecked("cpu:1,gpu:1", 2).compile(&graph).unwrap();
        let inputs = random(5, &[32, 32]);
        let executable = compiled.for_inputs(&inputs).unwrap();
        let failed = (0..runs)
            .find_map(|_| executable.run(&inputs).err())
            .expect("the GPU breaks");
        // It stays broken, and says so at once.
        assert_eq!(
            executable.run(&inputs).unwrap_err().kind(),
            ErrorKind::DeviceFailed
        );
        failed
    })
}

/// Both partitions wait for what the other is to send after the GPU was lost: only the device itself can tell.
#[test]
fn a_gpu_that_is_lost_ends_a_run_in_which_all_wait() {
    with_driver_of(
        "cuda_calls",
        "a_gpu_that_is_lost_ends_a_run_in_which_all_wait",
        "lose=0:1",
        || {
            let e = broken(1);
            assert_eq!(e.kind(), ErrorKind::DeviceFailed);
            assert!(
                e.to_string().contains("/device:GPU:0: ")
                    && e.to_string().contains("emulated GPU 0 was lost"),
                "{e}"
            );
        },
    );
}

#[test]
fn a_gpu_that_is_lost_in_a_later_run_ends_it() {
    with_driver_of(
        "cuda_calls",
        "a_gpu_that_is_lost_in_a_later_run_ends_it",
        "lose=0:14",
        || {
            assert!(broken(5).to_string().contains("emulated GPU 0 was lost"));
        },
    );
}

/// A fault that is noticed late, here by a partition that waits for a tensor, is not blamed on the step that noticed it.
#[test]
fn a_late_fault_names_all_kernels_that_may_be_to_blame() {
    with_driver_of(
        "cuda_calls",
        "a_late_fault_names_all_kernels_that_may_be_to_blame",
        "fault=0:1",
        || {
            let e = broken(1).to_string();
            assert!(
                e.contains("one of 5 kernels, from ")
                    && e.contains("/early")
                    && e.contains("/both"),
                "{e}"
            );
            assert!(e.contains("--verify") && !e.starts_with("in node"), "{e}");
        },
    );
}

/// A device that is gone has no memory to give; that is not why.
#[test]
fn a_lost_gpu_is_not_out_of_memory() {
    with_driver_of(
        "cuda_calls",
        "a_lost_gpu_is_not_out_of_memory",
        "lose=0:1",
        || {
            let graph = three_products(Dim::from("batch"));
            let compiled = unchecked("gpu:1", 2).compile(&graph).unwrap();
            let [one, other] = [random(7, &[2, 24]), random(7, &[3, 24])];
            assert!(compiled.for_inputs(&one).unwrap().run(&one).is_err());
            let e = compiled
                .for_inputs(&other)
                .err()
                .expect("nothing can be allocated any more");
            assert!(
                e.kind() == ErrorKind::DeviceFailed && e.to_string().contains("was lost"),
                "{e}"
            );
            let gpu: Arc<dyn Driver> = match CudaGpu::open(0, Settings::default()) {
                Ok(gpu) => Arc::new(gpu),
                Err(e) => return assert!(e.to_string().contains("was lost"), "{e}"),
            };
            assert!(
                gpu.allocate(1)
                    .unwrap_err()
                    .to_string()
                    .contains("was lost")
            );
        },
    );
}
