//! All-reduces by NCCL, without a GPU: the emulated driver library is an NCCL as well, which completes nothing before all ranks have come.

use crate::cuda::{unchecked, with_libraries};
use crate::multi_device::setup;
use crate::process::{Ended, emulated_driver, gristmill_with};
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::{Dim, Graph, GraphBuilder, Op, ReduceKind, ScalarOp, ValueId};
use gristmill::place::Objective;
use gristmill::testing::{Rng, Setup, nvrtc_or_left_out, random_tensor};
use gristmill::train::{self, Model, Sgd, Strategy, Trainer, Training, loss};
use gristmill::{AllReduce, Compiled, DType, ErrorKind, Executable, Tensor};
use gristmill_runtime::cuda::{CudaGpu, Settings, nccl_version};
use gristmill_runtime::driver::{Driver, Group, Reduce, Reduction};
use gristmill_runtime::program::StepKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Elements of the least tensor that is left to NCCL, if they are of `f32`.
const LARGE: usize = 16_384;

fn with_nccl(name: &str, settings: &str, body: impl FnOnce()) {
    with_libraries(&format!("nccl::{name}"), settings, &emulated_driver(), body);
}

fn gpus(n: usize) -> Vec<String> {
    (0..n).map(|i| format!("/gpu:{i}")).collect()
}

/// What each device makes of its input, reduced, and something made of that.
fn towers(kind: ReduceKind, dtype: DType, shape: &[usize], devices: &[String]) -> Graph {
    let mut b = GraphBuilder::new("towers");
    b.set_origin("/tower");
    let tower = |(i, device): (usize, &String)| {
        let x = b.input(&format!("x{i}"), dtype, shape.iter().copied());
        b.with_device(device.as_str(), |b| b.map(ScalarOp::Neg, &[x]))
            .unwrap()
    };
    let operands: Vec<_> = devices.iter().enumerate().map(tower).collect();
    b.set_origin("/all");
    let results = b.all_reduce(kind, &operands).unwrap();
    b.set_origin("/after");
    for (i, (&y, device)) in results.iter().zip(devices).enumerate() {
        let y = b
            .with_device(device.as_str(), |b| b.map(ScalarOp::Abs, &[y]))
            .unwrap();
        b.output(&format!("y{i}"), y);
    }
    b.finish().unwrap()
}

fn executable(graph: &Graph, tensors: &[Tensor], setup: &Setup) -> (Compiled, Arc<Executable>) {
    let compiled = setup.compile(graph).unwrap();
    let executable = compiled.for_inputs(tensors).unwrap();
    (compiled, executable)
}

/// A setup that waits for each launch, and checks all stages, if it `checks`.
fn checked(devices: &str, opt_level: u8, checks: bool) -> Setup {
    match checks {
        true => setup(devices, opt_level),
        false => unchecked(devices, opt_level),
    }
}

/// Two logical GPUs by the driver's numbers.
fn on_gpus(gpus: [u32; 2]) -> Setup {
    let mut setup = unchecked("gpu:2", 2);
    setup.settings.gpus = gpus.to_vec();
    setup
}

/// Steps that are a rank of an all-reduce by NCCL.
fn n_collectives(executable: &Executable) -> usize {
    let steps = executable
        .lowered
        .program
        .partitions
        .iter()
        .flat_map(|p| &p.steps);
    steps
        .filter(|s| matches!(s.kind, StepKind::AllReduce(_)))
        .count()
}

fn random_inputs(rng: &mut Rng, g: &Graph) -> Vec<Tensor> {
    let tensor =
        |&v: &ValueId| random_tensor(rng, g.ty(v).dtype, &g.ty(v).static_shape().unwrap(), false);
    g.inputs.iter().map(tensor).collect()
}

/// Whether NCCL gives what the interpreter gives, but for the order of a sum.
fn is_for_nccl(kind: ReduceKind, dtype: DType, n: usize) -> bool {
    use DType::*;
    match kind {
        ReduceKind::Mean => matches!(dtype, F32 | F64),
        ReduceKind::Sum | ReduceKind::Prod if matches!(dtype, F16 | BF16) => n == 2,
        ReduceKind::Sum | ReduceKind::Prod => !matches!(dtype, I16 | U16),
        ReduceKind::Max | ReduceKind::Min => matches!(dtype, I8 | U8 | I32 | U32 | I64 | U64),
    }
}

fn check_kinds_and_dtypes(n: usize) {
    use DType::*;
    use ReduceKind::*;
    let mut rng = Rng(30);
    for dtype in [F32, F64, F16, BF16, I8, U8, I16, I32, U32, I64, U64] {
        for kind in [Sum, Prod, Max, Min, Mean] {
            let len = 4 * LARGE / dtype.size_bytes();
            let shape = rng.pick(&[vec![len], vec![3, len / 3 + 1]]);
            let graph = towers(kind, dtype, &shape, &gpus(n));
            let tensors = random_inputs(&mut rng, &graph);
            let level = rng.pick(&[0, 1, 2]);
            let several = checked(&format!("gpu:{n}"), level, rng.one_in(3));
            let (_compiled, executable) = executable(&graph, &tensors, &several);
            let what = format!("{kind:?} of {n} {dtype}{shape:?} at level {level}");
            let expected_ranks = if is_for_nccl(kind, dtype, n) { n } else { 0 };
            assert_eq!(n_collectives(&executable), expected_ranks, "{what}");
            let expected = interp::run(&graph, &tensors).unwrap();
            for _ in 0..3 {
                let found = executable
                    .run(&tensors)
                    .unwrap_or_else(|e| panic!("{what}: {e}"))
                    .into_tensors();
                // The order of a sum changes rounding; between two there is none.
                let rtol = if !dtype.is_float() || matches!(kind, Max | Min) {
                    0.0
                } else {
                    f64::from(n as u32 > 2) * 1e-6
                };
                let rtol = if matches!(dtype, F16 | BF16) && n > 2 {
                    1.0 / 256.0
                } else {
                    rtol
                };
                for (e, f) in expected.iter().zip(&found) {
                    let c = allclose(e, f, 0.0, 0.0);
                    assert!(c.ok || c.scaled_err() <= rtol, "{what}: {c}");
                    assert_eq!(f, &found[0], "{what}: devices differ");
                }
            }
        }
    }
}

#[test]
fn all_kinds_and_dtypes_over_two_gpus() {
    with_nccl("all_kinds_and_dtypes_over_two_gpus", "devices=2", || {
        check_kinds_and_dtypes(2)
    });
}

#[test]
fn all_kinds_and_dtypes_over_four_gpus() {
    with_nccl("all_kinds_and_dtypes_over_four_gpus", "devices=4", || {
        check_kinds_and_dtypes(4)
    });
}

/// A graph of nodes on random devices, of values that come from anywhere, and of all-reduces over random GPUs, some of which need nothing of each other.
fn random_reductions(rng: &mut Rng, n: usize, devices: &[String]) -> Graph {
    let mut b = GraphBuilder::new("reductions");
    let mut values: Vec<ValueId> = (0..3)
        .map(|i| b.input(&format!("x{i}"), DType::F32, [2usize, LARGE / 2]))
        .collect();
    for i in 0..n {
        b.set_origin(&format!("/{i}"));
        let pick = |rng: &mut Rng, values: &[ValueId]| {
            values[values.len() - 1 - rng.below(values.len().min(8))]
        };
        if rng.one_in(3) {
            let mut gpus: Vec<&String> = devices.iter().filter(|d| d.contains("gpu")).collect();
            let first = rng.below(gpus.len());
            gpus.rotate_left(first);
            gpus.truncate(2 + rng.below(gpus.len() - 1));
            let operand = |device: &&String| {
                let v = pick(rng, &values);
                b.with_device(device.as_str(), |b| b.map(ScalarOp::Tanh, &[v]))
                    .unwrap()
            };
            let operands: Vec<ValueId> = gpus.iter().map(operand).collect();
            let kind = rng.pick(&[ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Prod]);
            values.extend(b.all_reduce(kind, &operands).unwrap());
        } else {
            let (x, y) = (pick(rng, &values), pick(rng, &values));
            let op = rng.pick(&[ScalarOp::Add, ScalarOp::Sub, ScalarOp::Max]);
            let device = rng.pick(devices);
            values.push(
                b.with_device(device.as_str(), |b| b.map(op, &[x, y]))
                    .unwrap(),
            );
        }
    }
    // Some results of all-reduces are nobody's.
    let outputs: Vec<ValueId> = values.iter().rev().step_by(2).copied().collect();
    outputs
        .into_iter()
        .enumerate()
        .for_each(|(i, v)| b.output(&format!("y{i}"), v));
    b.finish().unwrap()
}

fn check_random_reductions(seed: u64, n_gpus: usize, n_graphs: usize) {
    let mut rng = Rng(seed);
    let mut n_ranks = 0;
    for at in 0..n_graphs {
        let devices = [vec!["/cpu:0".to_owned()], gpus(n_gpus)].concat();
        let n_nodes = 6 + rng.below(20);
        let graph = random_reductions(&mut rng, n_nodes, &devices);
        let tensors = random_inputs(&mut rng, &graph);
        let level = rng.pick(&[0, 1, 2]);
        // Half of them wait for each launch, and have all stages checked.
        let several = checked(&format!("cpu:1,gpu:{n_gpus}"), level, at % 2 == 0);
        let what = format!("graph {at} at level {level}\n{graph}");
        let expected = interp::run(&graph, &tensors).unwrap();
        let (_compiled, executable) = executable(&graph, &tensors, &several);
        n_ranks += n_collectives(&executable);
        for _ in 0..3 {
            let found = executable
                .run(&tensors)
                .unwrap_or_else(|e| panic!("{e}\n{what}"));
            for (e, (name, f)) in expected.iter().zip(found.iter()) {
                let c = allclose(e, f, 0.0, 0.0);
                assert!(c.ok || c.scaled_err() <= 1e-5, "{name}: {c}\n{what}");
            }
        }
    }
    assert!(
        n_ranks > 4 * n_graphs,
        "only {n_ranks} ranks of all-reduces in {n_graphs} graphs"
    );
}

#[test]
fn random_reductions_over_three_gpus() {
    with_nccl("random_reductions_over_three_gpus", "devices=3", || {
        check_random_reductions(31, 3, 24)
    });
}

#[test]
fn random_reductions_over_gpus_that_do_not_reach_each_other() {
    let name = "random_reductions_over_gpus_that_do_not_reach_each_other";
    with_nccl(name, "devices=2,peers=0,delay=0", || {
        check_random_reductions(32, 2, 10)
    });
}

/// A perceptron whose first weights are large enough for NCCL.
fn perceptron(m: &mut Model) -> gristmill::Result<train::Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), 64.into()]);
    let y = m.input("y", DType::I64, [Dim::from("batch")]);
    let x = m.scope("first", |m| m.dense(x, 300))?;
    let x = m.builder().map(ScalarOp::Tanh, &[x])?;
    let logits = m.scope("second", |m| m.dense(x, 5))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(train::Objective::new(loss))
}

fn losses(setup: &Setup, strategy: Strategy) -> (Trainer, Vec<f64>) {
    let training = Training {
        strategy,
        options: setup.options.clone(),
        ..Training::from(Sgd::default())
    };
    let trainer = Trainer::in_session(&setup.session(), "p", &training, perceptron).unwrap();
    let mut rng = Rng(8);
    let step = |_| {
        let x = random_tensor(&mut rng, DType::F32, &[9, 64], false);
        let y = Tensor::from_slice(&[0i64, 1, 2, 3, 4, 0, 1, 2, 3], &[9]).unwrap();
        trainer.step([("x", x), ("y", y)]).unwrap().loss
    };
    let losses = (0..6).map(step).collect();
    (trainer, losses)
}

#[test]
fn replicas_on_gpus_add_gradients_by_nccl() {
    with_nccl(
        "replicas_on_gpus_add_gradients_by_nccl",
        "devices=2",
        || {
            let (_, expected) = losses(&Setup::default(), Strategy::OneDevice);
            let mirrored = Strategy::Mirrored {
                devices: Vec::new(),
            };
            let (trainer, found) = losses(&unchecked("gpu:2", 2), mirrored);
            for (a, b) in expected.iter().zip(&found) {
                assert!((a - b).abs() < 1e-4, "{expected:?} {found:?}");
            }
            trainer.resources().check_replicas().unwrap();
            let x = Tensor::zeros(DType::F32, &[9, 64]).unwrap();
            let y = Tensor::zeros(DType::I64, &[9]).unwrap();
            let batch = vec![("x".to_owned(), x), ("y".to_owned(), y)];
            let executable = trainer.executable_for(&batch).unwrap().unwrap();
            assert_eq!(n_collectives(&executable), 2);
        },
    );
}

/// What makes NCCL unfit, or is asked for, leaves it to the devices; so does a library that is too old, or none.
#[test]
fn what_nccl_does_not_do_is_exchanged() {
    with_nccl("what_nccl_does_not_do_is_exchanged", "devices=2", || {
        assert_eq!(nccl_version(), Ok((2, 28, 9)));
        let mut rng = Rng(33);
        let sum = |n: usize, devices: &[&str]| {
            let devices: Vec<String> = devices.iter().map(|d| d.to_string()).collect();
            towers(ReduceKind::Sum, DType::F32, &[n], &devices)
        };
        let two = ["/gpu:0", "/gpu:1"];
        let cases = [
            ("two GPUs", sum(LARGE, &two), unchecked("gpu:2", 2), 2),
            (
                "a small tensor",
                sum(LARGE - 1, &two),
                unchecked("gpu:2", 2),
                0,
            ),
            (
                "one GPU twice",
                sum(LARGE, &["/gpu:0", "/gpu:1", "/gpu:0"]),
                unchecked("gpu:2", 2),
                0,
            ),
            (
                "a CPU",
                sum(LARGE, &["/gpu:0", "/cpu:0"]),
                unchecked("cpu:1,gpu:2", 2),
                0,
            ),
            ("two parts of one GPU", sum(LARGE, &two), on_gpus([1, 1]), 0),
            (
                "GPUs in another order",
                sum(LARGE, &two),
                on_gpus([1, 0]),
                2,
            ),
            (
                "as asked",
                sum(LARGE, &two),
                unchecked("gpu:2", 2).with(|o| o.all_reduce = AllReduce::Exchange),
                0,
            ),
        ];
        for (what, graph, setup, n) in cases {
            let tensors = random_inputs(&mut rng, &graph);
            let (_compiled, executable) = executable(&graph, &tensors, &setup);
            assert_eq!(n_collectives(&executable), n, "{what}");
            let (expected, found) = (
                interp::run(&graph, &tensors).unwrap(),
                executable.run(&tensors).unwrap(),
            );
            for (e, f) in expected.iter().zip(found.into_tensors()) {
                let c = allclose(e, &f, 0.0, 0.0);
                assert!(c.ok || c.scaled_err() < 1e-6, "{what}: {c}");
            }
        }
    });
}

/// Without a library, or with one that is too old.
fn check_exchanged(why: &str) {
    assert_eq!(nccl_version(), Err(why.to_owned()));
    let graph = towers(ReduceKind::Sum, DType::F32, &[LARGE], &gpus(2));
    let tensors = random_inputs(&mut Rng(34), &graph);
    let (_compiled, executable) = executable(&graph, &tensors, &unchecked("gpu:2", 2));
    assert_eq!(n_collectives(&executable), 0);
    executable.run(&tensors).unwrap();
}

#[test]
fn without_nccl_devices_exchange() {
    with_libraries(
        "nccl::without_nccl_devices_exchange",
        "devices=2",
        Path::new(""),
        || {
            check_exchanged("GRISTMILL_NCCL is empty, so NCCL is not used");
        },
    );
}

#[test]
fn with_an_old_nccl_devices_exchange() {
    with_nccl(
        "with_an_old_nccl_devices_exchange",
        "devices=2,nccl=21300",
        || {
            check_exchanged("NCCL 2.13.0 was found; 2.14 or later is needed");
        },
    );
}

/// Far above what an abort takes, and far below what a hang is.
const SOON: Duration = Duration::from_secs(20);

/// A GPU is lost: the run ends with an error that names it, and so does the next one.
fn check_lost() {
    let graph = towers(ReduceKind::Sum, DType::F32, &[LARGE], &gpus(3));
    let tensors = random_inputs(&mut Rng(35), &graph);
    let (_compiled, executable) = executable(&graph, &tensors, &unchecked("gpu:3", 0));
    assert_eq!(n_collectives(&executable), 3);
    for _ in 0..2 {
        let started = Instant::now();
        let e = executable.run(&tensors).expect_err("a device is lost");
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        let text = e.to_string();
        assert_eq!(e.kind(), ErrorKind::DeviceFailed, "{text}");
        assert!(text.contains("emulated GPU 1 was lost"), "{text}");
    }
}

#[test]
fn a_gpu_that_is_lost_before_an_all_reduce_ends_the_run() {
    with_nccl(
        "a_gpu_that_is_lost_before_an_all_reduce_ends_the_run",
        "devices=3,lose=1:1",
        check_lost,
    );
}

#[test]
fn a_gpu_that_is_lost_in_an_all_reduce_ends_the_run() {
    with_nccl(
        "a_gpu_that_is_lost_in_an_all_reduce_ends_the_run",
        "devices=3,lose=1:2",
        check_lost,
    );
}

#[test]
fn a_gpu_that_is_lost_after_an_all_reduce_ends_the_run() {
    with_nccl(
        "a_gpu_that_is_lost_after_an_all_reduce_ends_the_run",
        "devices=3,lose=1:3",
        check_lost,
    );
}

/// GPU 0 comes to the all-reduce of `n` elements at once, GPU 1 only with what the CPU looks up at `i`.
fn looked_up(n: Dim) -> Graph {
    let mut b = GraphBuilder::new("looked up");
    let x = b.input("x", DType::F32, [n.clone()]);
    let table = b.input("table", DType::F32, [Dim::constant(3), n]);
    let i = b.input("i", DType::I64, [] as [usize; 0]);
    b.set_origin("/look");
    let looked = b
        .with_device("/cpu:0", |b| b.add1(Op::Gather { axis: 0 }, &[table, i]))
        .unwrap();
    b.set_origin("/tower");
    let first = b
        .with_device("/gpu:0", |b| b.map(ScalarOp::Neg, &[x]))
        .unwrap();
    let second = b
        .with_device("/gpu:1", |b| b.map(ScalarOp::Abs, &[looked]))
        .unwrap();
    b.set_origin("/all");
    let sums = b.all_reduce(ReduceKind::Sum, &[first, second]).unwrap();
    sums.iter()
        .enumerate()
        .for_each(|(i, &y)| b.output(&format!("y{i}"), y));
    b.finish().unwrap()
}

fn looked_up_in(rng: &mut Rng, n: usize) -> [Tensor; 3] {
    let mut tensor = |shape: &[usize]| random_tensor(rng, DType::F32, shape, false);
    [tensor(&[n]), tensor(&[3, n]), index(1)]
}

fn index(i: i64) -> Tensor {
    Tensor::from_slice(&[i], &[]).unwrap()
}

/// A fault elsewhere ends the run while a GPU waits in an all-reduce; the next run is right, in new communicators.
#[test]
fn a_run_after_a_fault_is_right() {
    with_nccl("a_run_after_a_fault_is_right", "devices=2", || {
        let graph = looked_up(LARGE.into());
        let mut tensors = looked_up_in(&mut Rng(36), LARGE);
        let expected = interp::run(&graph, &tensors).unwrap();
        let several = unchecked("cpu:1,gpu:2", 2);
        let (_compiled, executable) = executable(&graph, &tensors, &several);
        assert_eq!(n_collectives(&executable), 2);
        for _ in 0..4 {
            assert_eq!(executable.run(&tensors).unwrap().into_tensors(), expected);
            tensors[2] = index(5);
            let started = Instant::now();
            let e = executable
                .run(&tensors)
                .expect_err("the index is out of range")
                .to_string();
            assert!(e.contains("/look") && started.elapsed() < SOON, "{e}");
            tensors[2] = index(1);
        }
    });
}

/// Runs each of `executables` with its tensors, and indices that are good or bad, by threads that start all of them at once.
fn check_at_once(graph: &Graph, executables: &[(Arc<Executable>, [Tensor; 3])]) {
    thread::scope(|scope| {
        for t in 0..6 {
            let (executable, [x, table, _]) = &executables[t % executables.len()];
            scope.spawn(move || {
                for run in 0..6 {
                    let inputs = [x.clone(), table.clone(), index((t + run) as i64 % 4)];
                    match (executable.run(&inputs), interp::run(graph, &inputs)) {
                        (Ok(found), Ok(expected)) => assert_eq!(found.into_tensors(), expected),
                        (Err(e), Err(_)) => assert!(e.to_string().contains("/look"), "{e}"),
                        (found, expected) => panic!("{:?} {:?}", found.err(), expected.err()),
                    }
                }
            });
        }
    });
}

/// Runs of one model take turns, or, where several are in flight, follow each other on every device in one order; models take turns, too.
#[test]
fn runs_of_several_models_at_once_do_not_mix() {
    with_nccl(
        "runs_of_several_models_at_once_do_not_mix",
        "devices=2",
        || {
            let graph = looked_up(LARGE.into());
            let tensors = looked_up_in(&mut Rng(37), LARGE);
            let with = |objective| {
                let several = unchecked("cpu:1,gpu:2", 2).with(|o| o.objective = objective);
                let (compiled, executable) = executable(&graph, &tensors, &several);
                assert_eq!(n_collectives(&executable), 2);
                (compiled, executable)
            };
            let [one, many] = [Objective::Latency, Objective::Throughput { samples: 8 }].map(with);
            assert!(many.1.n_in_flight() > 1, "one run in flight");
            check_at_once(&graph, &[(many.1.clone(), tensors.clone())]);
            check_at_once(
                &graph,
                &[
                    (one.1.clone(), tensors.clone()),
                    (many.1.clone(), tensors.clone()),
                ],
            );
        },
    );
}

/// The executors of one model share the streams of its GPUs: with all-reduces by NCCL in two shapes, and none in a third.
#[test]
fn shapes_of_one_model_at_once_do_not_mix() {
    with_nccl(
        "shapes_of_one_model_at_once_do_not_mix",
        "devices=2",
        || {
            let graph = looked_up(Dim::symbol("n"));
            let compiled = unchecked("cpu:1,gpu:2", 2).compile(&graph).unwrap();
            let mut rng = Rng(38);
            let shapes = [(LARGE, 2), (LARGE + 7, 2), (40, 0)].map(|(n, expected)| {
                let tensors = looked_up_in(&mut rng, n);
                let executable = compiled.for_inputs(&tensors).unwrap();
                assert_eq!(n_collectives(&executable), expected);
                (executable, tensors)
            });
            check_at_once(&graph, &shapes);
        },
    );
}

fn opened(n: u32) -> Vec<CudaGpu> {
    (0..n)
        .map(|i| CudaGpu::open(i, Settings::default()).unwrap())
        .collect()
}

fn group_of(gpus: &[CudaGpu]) -> Arc<dyn Group> {
    gpus[0]
        .group(&gpus.iter().map(|g| g.peer().unwrap()).collect::<Vec<_>>())
        .unwrap()
}

/// Each rank's answer to an all-reduce of its own size, asked by threads of their own.
fn ask(
    group: &Arc<dyn Group>,
    gpus: &[CudaGpu],
    sizes: &[usize],
    is_over: &AtomicBool,
) -> Vec<Result<bool, String>> {
    let of_rank = |(rank, &n_elements): (usize, &usize)| {
        let [from, to] = [0, 1].map(|_| gpus[rank].allocate(4 * LARGE).unwrap());
        let reduce = Reduce {
            reduction: Reduction::Sum,
            dtype: DType::F32,
            from,
            to,
            n_elements,
        };
        let is_over = || is_over.load(Ordering::SeqCst);
        let asked = group
            .all_reduce(rank, &reduce, &is_over)
            .and_then(|asked| Ok(asked && group.settle(rank, &is_over)?));
        asked.map_err(|e| e.to_string())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|rank| scope.spawn(move || of_rank(rank)))
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("nothing panics"))
            .collect()
    })
}

/// The emulated NCCL is strict: ranks that ask for different things break their devices, and one that never comes keeps the others.
#[test]
fn groups_complete_together_or_not_at_all() {
    with_nccl(
        "groups_complete_together_or_not_at_all",
        "devices=3",
        || {
            let gpus = opened(3);
            let never = AtomicBool::new(false);
            let group = group_of(&gpus[..2]);
            assert_eq!(
                ask(&group, &gpus, &[LARGE, LARGE], &never),
                [Ok(true), Ok(true)]
            );
            // The second rank does not come: the first waits until it is over.
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                let waiting = scope.spawn(|| ask(&group, &gpus, &[LARGE], &over));
                thread::sleep(Duration::from_millis(50));
                assert!(!waiting.is_finished());
                over.store(true, Ordering::SeqCst);
                assert_eq!(waiting.join().expect("nothing panics"), [Ok(false)]);
            });
            gpus[0].finish().unwrap();
            assert!(
                ask(&group, &gpus, &[LARGE], &never)[0].is_err(),
                "it has to be renewed"
            );
            group.renew().unwrap();
            assert_eq!(
                ask(&group, &gpus, &[LARGE, LARGE], &never),
                [Ok(true), Ok(true)]
            );
            let same = group_of(&gpus[..1]);
            assert_eq!(ask(&same, &gpus, &[LARGE], &never), [Ok(true)]);
            let twice = [gpus[2].peer().unwrap(), gpus[2].peer().unwrap()];
            let e = gpus[2]
                .group(&twice)
                .err()
                .expect("one GPU has one rank")
                .to_string();
            assert!(
                e.contains("emulated GPU 2") && e.contains("invalid usage"),
                "{e}"
            );
            // The last, since it breaks the devices.
            let differ = ask(&group, &gpus, &[LARGE, LARGE / 2], &over_soon());
            assert!(
                differ.iter().any(|r| r
                    .as_ref()
                    .is_err_and(|e| e.contains("of a collective does"))),
                "{differ:?}"
            );
        },
    );
}

/// Set after a while.
fn over_soon() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(500));
        set.store(true, Ordering::SeqCst);
    });
    flag
}

/// Runs `gristmill ARGS` with two emulated GPUs and this NCCL.
fn command_line(nccl: &Path, args: &[&str]) -> Option<Ended> {
    nvrtc_or_left_out("NCCL from the command line")?;
    let dir = tempfile::tempdir().expect("the system has a folder for scratch files");
    let graph = towers(ReduceKind::Mean, DType::F32, &[LARGE], &gpus(2))
        .to_text(gristmill::ir::print::PrintOptions::FULL);
    std::fs::write(dir.path().join("towers.ir"), graph).expect("the folder can be written to");
    let driver = emulated_driver();
    let variables = [
        ("GRISTMILL_CUDA", driver.as_path()),
        ("GRISTMILL_NCCL", nccl),
        ("EMULATED_CUDA", Path::new("devices=2")),
        ("CUDA_VISIBLE_DEVICES", Path::new("0,1")),
        ("GRISTMILL_CACHE_DIR", dir.path()),
    ];
    Some(gristmill_with(dir.path(), &variables, args))
}

#[test]
fn stages_and_devices_show_nccl() {
    let nccl = emulated_driver();
    let dump = |nccl: &Path, stage: &str, more: &[&str]| {
        let args = [
            &["dump", "towers.ir", "--devices", "gpu:2", "--stage", stage],
            more,
        ]
        .concat();
        command_line(nccl, &args).map(|ended| ended.stdout + &ended.stderr)
    };
    let Some(schedule) = dump(&nccl, "schedule", &[]) else {
        return;
    };
    assert!(
        schedule.contains("\"all-reduce 0\" rank 1 of 2"),
        "{schedule}"
    );
    let placed = dump(&nccl, "placed", &[]).expect("NVRTC is there");
    assert!(placed.contains("all_reduce_rank"), "{placed}");
    for exchanged in [
        dump(Path::new(""), "placed", &[]),
        dump(&nccl, "placed", &["--all-reduce", "exchange"]),
    ] {
        let exchanged = exchanged.expect("NVRTC is there");
        assert!(
            !exchanged.contains("all_reduce_rank") && exchanged.contains("/device:GPU:1"),
            "{exchanged}"
        );
    }
    let devices = |nccl: &Path| {
        command_line(nccl, &["devices"])
            .expect("NVRTC is there")
            .stdout
    };
    assert!(devices(&nccl).contains("NCCL 2.28.9"), "{}", devices(&nccl));
    assert!(
        devices(Path::new("")).contains("GRISTMILL_NCCL is empty"),
        "{}",
        devices(Path::new(""))
    );
    let json = command_line(&nccl, &["devices", "--json"])
        .expect("NVRTC is there")
        .stdout;
    assert!(json.contains("\"nccl\""), "{json}");
}
