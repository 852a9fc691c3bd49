//! Runs over several logical devices give what one device gives, wherever nodes are put.

use crate::over_processes::{n_over_processes, over_processes};
use gristmill::Executable;
use gristmill::cost::{Bytes, LinkProfile, Nanos};
use gristmill::distribute::Spread;
use gristmill::interp;
use gristmill::interp::compare::allclose;
use gristmill::ir::{
    AskedBy, DeviceRequest, Graph, GraphBuilder, Node, NodeId, Op, OpClass, ReduceKind, ScalarOp,
};
use gristmill::onnx;
use gristmill::place::{Objective, Pin, Placement, Plan};
use gristmill::testing::{
    RandomOptions, Rng, Setup, nvrtc_or_left_out, random_graph, random_tensor,
};
use gristmill::{DType, ErrorKind, Outputs, Source, Tensor};
use gristmill_runtime::device::DeviceKind;
use std::path::Path;

pub fn setup(devices: &str, opt_level: u8) -> Setup {
    let mut setup = Setup::on(devices, 2);
    setup.settings.check_kernels = true;
    setup.with(|o| (o.opt_level, o.check) = (opt_level, true))
}

/// Runs a model a few times and counts the tensors that cross between devices.
pub fn run(
    source: impl Into<Source>,
    inputs: &[(String, Tensor)],
    setup: &Setup,
) -> gristmill::Result<(Outputs, usize)> {
    let compiled = setup.compile(source)?;
    let tensors = compiled.bind(inputs.iter().map(|(n, t)| (n, t.clone())))?;
    let executable = compiled.for_inputs(&tensors)?;
    let first = executable.run(&tensors)?;
    // A GPU is asked for its work one by one, then by a graph that is captured, then by one that is there.
    for _ in 0..if setup
        .settings
        .devices
        .devices
        .iter()
        .any(|d| d.name.kind == DeviceKind::Gpu)
    {
        3
    } else {
        1
    } {
        assert_eq!(first, executable.run(&tensors)?, "a later run differs");
    }
    check_spread(&executable, &tensors, &first, setup);
    let sends = |g: &Graph| {
        g.nodes()
            .filter(|(_, n)| matches!(n.op, Op::Send { .. }))
            .count()
    };
    let n_transfers = executable
        .lowered
        .partitions
        .iter()
        .map(|p| sends(&p.graph))
        .sum();
    Ok((first, n_transfers))
}

/// The same program with a task for each device, in this process and over processes, has the same bits,
/// unless its devices reduce by a library.
fn check_spread(executable: &Executable, tensors: &[Tensor], expected: &Outputs, setup: &Setup) {
    let lowered = &executable.lowered;
    let is_collective = |n: &Node| matches!(n.op, Op::Collective { .. });
    let has_collective = |g: &Graph| g.nodes().any(|(_, n)| is_collective(n));
    let mut graphs = lowered.partitions.iter().map(|part| &part.graph);
    // Elsewhere weights are released once they are packed, and cannot be sent.
    let has_weights = setup.options.check || setup.options.keep_stages;
    if lowered.partitions.len() < 2 || graphs.any(has_collective) || !has_weights {
        return;
    }
    let here = Spread::of(lowered, &setup.settings, &setup.options).unwrap();
    check_runs(&here, tensors, expected);
    over_processes(lowered, setup, |spread| {
        check_runs(spread, tensors, expected)
    });
}

fn check_runs(spread: &Spread, tensors: &[Tensor], expected: &Outputs) {
    for run in 0..2 {
        let found = spread.run(tensors).unwrap();
        assert_eq!(expected.iter().count(), found.len());
        for ((name, expected), found) in expected.iter().zip(&found) {
            let same = expected.as_bytes() == found.as_bytes();
            assert!(same, "run {run} over tasks: {name}: {expected} and {found}");
        }
    }
}

/// All outputs agree: exactly when `rtol` is 0, else within `rtol` of the tensor's scale.
pub fn assert_same(expected: &Outputs, found: &Outputs, rtol: f64, what: &str) {
    assert_eq!(expected.iter().count(), found.iter().count(), "{what}");
    for ((name, e), (_, f)) in expected.iter().zip(found.iter()) {
        let c = allclose(e, f, 0.0, 0.0);
        assert!(c.ok || c.scaled_err() <= rtol, "{what}: {name}: {c}");
    }
}

/// `y` is used early and late, and between these much memory is needed.
fn early_and_late() -> Graph {
    let mut b = GraphBuilder::new("early and late");
    let x = b.input("x", DType::F32, [1024usize, 4]);
    let w = b.input("w", DType::F32, [4usize, 256]);
    b.set_origin("/y");
    let y = b.matmul(x, w).unwrap();
    b.set_origin("/narrow");
    let narrow = b.reduce(ReduceKind::Max, y, &[1], true).unwrap();
    b.set_origin("/wide");
    let wide = b.mul(x, narrow).unwrap();
    let wide = b.matmul(wide, w).unwrap();
    b.set_origin("/soft");
    let soft = b
        .add1(
            Op::Softmax {
                axis: 1,
                log: false,
            },
            &[wide],
        )
        .unwrap();
    b.set_origin("/sum");
    let sum = b.reduce(ReduceKind::Max, soft, &[0], true).unwrap();
    b.set_origin("/late");
    let late = b.mul(y, sum).unwrap();
    let late = b.reduce(ReduceKind::Sum, late, &[1], false).unwrap();
    b.output("late", late);
    b.finish().unwrap()
}

/// A device without room for a tensor has it on the host for a while; what comes out is what the interpreter computes.
#[test]
fn tensors_are_parked_on_the_host() {
    if nvrtc_or_left_out("parking tensors of an emulated GPU").is_none() {
        return;
    }
    let graph = early_and_late();
    let mut rng = Rng(5);
    let mut tensor = |shape: [usize; 2]| {
        let values: Vec<f32> = (0..shape[0] * shape[1])
            .map(|_| rng.normal() as f32)
            .collect();
        Tensor::from_slice(&values, &shape).unwrap()
    };
    let tensors = [tensor([1024, 4]), tensor([4, 256])];
    let mut limited = setup("cpu:1,emu:1", 2);
    limited.options.pins = vec![Pin::parse(".*=emu:0").unwrap()];
    let lowered = |setup: &Setup| setup.compile(&graph).unwrap().for_inputs(&tensors).unwrap();
    let emu = |placement: &Placement| {
        placement
            .devices
            .iter()
            .position(|d| d.kind == DeviceKind::Emu)
            .unwrap()
    };
    let free = lowered(&limited);
    assert!(free.lowered.placement.copies.is_empty());
    // Half a MiB less than what is live at a time: one of the three tensors of a MiB has to go.
    let peak = free.lowered.placement.peak_bytes[emu(&free.lowered.placement)];
    limited
        .settings
        .devices
        .limit_memory("emu", Bytes(peak.0 - (1 << 19)))
        .unwrap();
    let parked = lowered(&limited);
    let placement = &parked.lowered.placement;
    assert!(
        placement.copies.iter().any(|c| c.parked.is_some()),
        "{}",
        placement.to_text(&parked.lowered.clusters)
    );
    let expected = interp::run(&graph, &tensors).unwrap();
    let is_right = |found: &Outputs| {
        let c = allclose(&expected[0], &found["late"], 0.0, 0.0);
        assert!(c.scaled_err() <= 1e-5, "{c}");
    };
    (0..3).for_each(|_| is_right(&parked.run(&tensors).unwrap()));
    // So does the plan of it.
    let text = placement.plan_text(&parked.lowered.clusters).unwrap();
    assert!(text.contains("parks "), "{text}");
    limited.options.plan = Some(Plan::parse(&text, "parked.plan").unwrap());
    let planned = lowered(&limited);
    assert_eq!(planned.lowered.placement.copies, placement.copies);
    is_right(&planned.run(&tensors).unwrap());
}

/// Whatever devices are chosen for, the results are those of one device; of a stream also where several runs are under way.
#[test]
fn objectives_change_where_and_not_what() {
    let mut most_in_flight = 0;
    for seed in 0..25 {
        let sizes = RandomOptions {
            n_nodes: 6 + seed as usize % 20,
            ..RandomOptions::default()
        };
        let (graph, tensors) = random_graph(seed, &sizes);
        let inputs: Vec<(String, Tensor)> = graph
            .input_names
            .iter()
            .cloned()
            .zip(tensors.clone())
            .collect();
        let (expected, _) = run(&graph, &inputs, &setup("cpu:1", 2)).unwrap();
        let what = format!("seed {seed}\n{graph}");
        for objective in [Objective::Throughput { samples: 8 }, Objective::Memory] {
            let mut several = setup(&format!("cpu:{}", 2 + seed % 2), 2);
            // Links without latency, so that small nodes are worth sending.
            several.settings.devices.link = LinkProfile {
                latency: Nanos(0),
                bytes_per_second: 1_000_000_000_000,
            };
            several.options.objective = objective;
            let executable = several
                .compile(&graph)
                .unwrap()
                .for_inputs(&tensors)
                .unwrap();
            most_in_flight = most_in_flight.max(executable.n_in_flight());
            let repeat = || {
                (0..3).for_each(|_| {
                    assert_same(&expected, &executable.run(&tensors).unwrap(), 1e-5, &what)
                })
            };
            std::thread::scope(|s| (0..3).for_each(|_| drop(s.spawn(repeat))));
        }
    }
    assert!(most_in_flight > 1, "no graph was placed as stages");
}

#[test]
fn random_graphs_on_random_devices() {
    let mut rng = Rng(11);
    let mut n_transfers = 0;
    for seed in 0..60 {
        let sizes = RandomOptions {
            n_nodes: 4 + seed as usize % 20,
            allow_empty_axes: seed % 4 == 0,
            n_variables: (seed % 3) as usize,
            ..RandomOptions::default()
        };
        let (graph, tensors) = random_graph(seed, &sizes);
        let inputs: Vec<(String, Tensor)> =
            graph.input_names.iter().cloned().zip(tensors).collect();
        let n_devices = 2 + rng.below(2);
        let mut placed = graph.clone();
        for id in stateless(&graph) {
            // Some nodes are left to the placer, some of these together.
            let mut asked = DeviceRequest::default();
            if !rng.one_in(3) {
                asked =
                    DeviceRequest::parse(&format!("/device:CPU:{}", rng.below(n_devices))).unwrap();
            } else if rng.one_in(2) {
                asked
                    .groups
                    .insert(format!("g{}", rng.below(2)).into(), AskedBy::default());
            }
            placed.node_mut(id).device = asked.into_requested();
        }
        for opt_level in [0, 2] {
            let what = format!("seed {seed} at level {opt_level}\n{placed}");
            let (expected, _) = run(&graph, &inputs, &setup("cpu:1", opt_level))
                .unwrap_or_else(|e| panic!("{e}\n{what}"));
            let several = setup(&format!("cpu:{n_devices}"), opt_level);
            let (found, n) =
                run(&placed, &inputs, &several).unwrap_or_else(|e| panic!("{e}\n{what}"));
            assert_same(
                &expected,
                &found,
                if opt_level == 0 { 0.0 } else { 1e-5 },
                &what,
            );
            n_transfers += n;
        }
    }
    assert!(
        n_transfers > 200,
        "only {n_transfers} tensors crossed between devices"
    );
    let n = n_over_processes();
    assert!(n > 50, "only {n} programs ran over processes");
}

fn read_pb(path: &Path) -> (String, Tensor) {
    onnx::tensor_from_pb(&std::fs::read(path).unwrap()).unwrap()
}

/// Pins for a random half of the model's node paths, on all devices in turn.
fn random_pins(rng: &mut Rng, model: &onnx::Model, devices: &[&str]) -> Vec<Pin> {
    let graph = model.graph(&onnx::Specialisation::default()).unwrap();
    let mut paths: Vec<String> = graph
        .nodes()
        .map(|(_, n)| n.origin.to_string())
        .filter(|p| !p.is_empty())
        .collect();
    paths.sort();
    paths.dedup();
    paths.retain(|_| rng.one_in(2));
    let escape = |p: &str| {
        p.chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() {
                    c.to_string()
                } else {
                    format!("\\x{{{:x}}}", c as u32)
                }
            })
            .collect::<String>()
    };
    paths
        .iter()
        .zip(devices.iter().cycle())
        .map(|(p, device)| Pin::parse(&format!("^{}$={device}", escape(p))).unwrap())
        .collect()
}

/// Runs each export with random halves of its nodes pinned to `devices`, those of `several`, and compares with one CPU.
pub fn check_exports(rng: &mut Rng, several: &Setup, devices: &[&str], names: &[&str]) {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
    for name in names {
        let dir = models.join(name);
        let model = onnx::load(dir.join("model.onnx")).unwrap();
        let data = dir.join("test_data_set_0");
        let declared = setup("cpu:1", 2).compile(&model).unwrap();
        let tensor = |i: usize| read_pb(&data.join(format!("input_{i}.pb"))).1;
        let named = declared
            .inputs()
            .iter()
            .enumerate()
            .map(|(i, (n, _))| (n.clone(), tensor(i)));
        let inputs: Vec<(String, Tensor)> = named.collect();
        let (expected, none) = run(&model, &inputs, &setup("cpu:1", 2)).unwrap();
        assert_eq!(none, 0);
        let pins = random_pins(rng, &model, devices);
        let several = several.clone().with(|o| o.pins = pins);
        let (found, n_transfers) =
            run(&model, &inputs, &several).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(n_transfers > 0, "{name}: nothing crossed between devices");
        assert_same(&expected, &found, 1e-5, name);
    }
}

#[test]
fn exported_models_on_random_devices() {
    let names = [
        "mlp_script",
        "resnet_script",
        "bert_script",
        "gpt2_dynamo",
        "swin_script",
        "unet_dynamo",
        "mobilenet_script",
        "llama_dynamo",
        "vit_dynamo",
        "rnn_dynamo",
    ];
    check_exports(
        &mut Rng(12),
        &setup("cpu:3", 2),
        &["cpu:0", "cpu:1", "cpu:2"],
        &names,
    );
}

#[test]
fn exported_models_on_cpu_and_emulated_gpu() {
    if nvrtc_or_left_out("models on a CPU and an emulated GPU").is_some() {
        let names = [
            "resnet_script",
            "bert_script",
            "gpt2_dynamo",
            "unet_dynamo",
            "rnn_dynamo",
        ];
        check_exports(
            &mut Rng(13),
            &setup("cpu:1,emu:1", 2),
            &["cpu:0", "emu:0"],
            &names,
        );
    }
}

/// Every dtype and op of the generator of random graphs, on a CPU and two emulated GPUs.
#[test]
fn random_graphs_on_emulated_gpus() {
    if nvrtc_or_left_out("random graphs on emulated GPUs").is_some() {
        check_random_graphs(14, 100..116, &["/cpu:0", "/emu:0", "/emu:1"], &|level| {
            setup("cpu:1,emu:2", level)
        });
    }
}

/// Nodes that may be on any device: those that use one variable must be together.
fn stateless(g: &Graph) -> Vec<NodeId> {
    let is_free = |n: &Node| n.op.class() != OpClass::State && n.regions.is_empty();
    let free = g.nodes().filter(|(_, n)| is_free(n));
    free.map(|(id, _)| id).collect()
}

/// Puts the nodes of random graphs on random ones of three devices, and compares with one CPU.
pub fn check_random_graphs(
    seed: u64,
    graphs: std::ops::Range<u64>,
    devices: &[&str; 3],
    several: &dyn Fn(u8) -> Setup,
) {
    let mut rng = Rng(seed);
    let (mut n_transfers, n_graphs) = (0, graphs.clone().count());
    for seed in graphs {
        let (graph, tensors) = random_graph(
            seed,
            &RandomOptions {
                n_nodes: 12,
                n_variables: (seed % 3) as usize,
                ..RandomOptions::default()
            },
        );
        let inputs: Vec<(String, Tensor)> =
            graph.input_names.iter().cloned().zip(tensors).collect();
        let mut placed = graph.clone();
        for id in stateless(&graph) {
            let device = devices[rng.below(3)];
            placed.node_mut(id).device = DeviceRequest::parse(device).unwrap().into_requested();
        }
        for opt_level in [0, 2] {
            let what = format!("seed {seed} at level {opt_level}\n{placed}");
            let (expected, _) = run(&graph, &inputs, &setup("cpu:1", opt_level))
                .unwrap_or_else(|e| panic!("{e}\n{what}"));
            let (found, n) = run(&placed, &inputs, &several(opt_level))
                .unwrap_or_else(|e| panic!("{e}\n{what}"));
            assert_same(&expected, &found, 1e-5, &what);
            n_transfers += n;
        }
    }
    assert!(
        n_transfers > 3 * n_graphs,
        "only {n_transfers} tensors crossed between devices"
    );
}

/// Towers on all of `devices` whose results are reduced: every tower gets the same bits, which for `f32` are those of a sum in the order of the towers.
pub fn check_all_reduce(seed: u64, devices: &[&str], several: &dyn Fn(u8) -> Setup) {
    use ReduceKind::{Max, Mean, Min, Prod, Sum};
    let mut rng = Rng(seed);
    // Of two places on, 16 384 elements of `f32` are reduced in shares.
    let cases = [
        (Sum, DType::F32, vec![20_001]),
        (Mean, DType::F32, vec![129, 131]),
        (Sum, DType::BF16, vec![33_001]),
        (Max, DType::F32, vec![16_385]),
        (Sum, DType::I64, vec![3, 2_801]),
        (Min, DType::I32, vec![17]),
        (Prod, DType::F16, vec![5, 1]),
        (Sum, DType::F32, vec![]),
        (Mean, DType::F32, vec![0, 3]),
    ];
    for (kind, dtype, shape) in cases {
        let mut b = GraphBuilder::new("towers");
        let tower = |(i, device): (usize, &&str)| {
            let x = b.input(&format!("x{i}"), dtype, shape.iter().copied());
            b.with_device(*device, |b| b.map(ScalarOp::Neg, &[x]))
                .unwrap()
        };
        let operands: Vec<_> = devices.iter().enumerate().map(tower).collect();
        let results = b.all_reduce(kind, &operands).unwrap();
        for (i, (&y, device)) in results.iter().zip(devices).enumerate() {
            let y = b
                .with_device(*device, |b| b.map(ScalarOp::Abs, &[y]))
                .unwrap();
            b.output(&format!("y{i}"), y);
        }
        let graph = b.finish().unwrap();
        let tensors: Vec<Tensor> = devices
            .iter()
            .map(|_| random_tensor(&mut rng, dtype, &shape, false))
            .collect();
        let inputs: Vec<(String, Tensor)> = graph
            .input_names
            .iter()
            .cloned()
            .zip(tensors.iter().cloned())
            .collect();
        let expected = interp::run(&graph, &tensors).unwrap();
        let level = rng.pick(&[0, 1, 2]);
        let what = format!("{kind:?} of {dtype}{shape:?} on {devices:?} at level {level}");
        let (found, n_transfers) =
            run(&graph, &inputs, &several(level)).unwrap_or_else(|e| panic!("{what}: {e}"));
        let found = found.into_tensors();
        let rtol = if dtype.size_bytes() == 2 {
            1.0 / 256.0
        } else {
            1e-6
        };
        for (f, e) in found.iter().zip(&expected) {
            let c = allclose(e, f, 0.0, 0.0);
            assert!(c.ok || c.scaled_err() <= rtol, "{what}: {c}");
            assert_eq!(f, &found[0], "{what}: towers differ");
        }
        if (kind, dtype) == (Sum, DType::F32) {
            let sum = |i: usize| {
                tensors
                    .iter()
                    .map(|t| -t.as_slice::<f32>()[i])
                    .reduce(|a, b| a + b)
                    .unwrap()
                    .abs()
            };
            let in_order: Vec<f32> = (0..found[0].len()).map(sum).collect();
            assert_eq!(found[0].as_slice::<f32>(), in_order, "{what}");
        }
        assert!(
            n_transfers >= devices.len(),
            "{what}: {n_transfers} tensors crossed"
        );
    }
}

#[test]
fn all_reduce_on_cpus_and_emulated_gpus() {
    check_all_reduce(16, &["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"], &|level| {
        setup("cpu:4", level)
    });
    check_all_reduce(17, &["/cpu:1", "/cpu:0", "/cpu:1"], &|level| {
        setup("cpu:2", level)
    });
    if nvrtc_or_left_out("all-reduce on emulated GPUs").is_some() {
        check_all_reduce(18, &["/emu:0", "/emu:1", "/emu:2", "/emu:3"], &|level| {
            setup("emu:4", level)
        });
        check_all_reduce(19, &["/cpu:0", "/emu:0"], &|level| {
            setup("cpu:1,emu:1", level)
        });
    }
}

#[test]
fn devices_and_pins_that_cannot_be_had_are_refused() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models/mlp_script/model.onnx");
    let model = onnx::load(dir).unwrap();
    let error = |setup: &Setup| {
        setup
            .compile(&model)
            .err()
            .expect("the request cannot be had")
    };
    let mut absent = setup("gpu:1", 2);
    absent.settings.gpus = vec![1000];
    let gpu = error(&absent);
    assert_eq!(gpu.kind(), ErrorKind::Unsupported);
    assert!(
        gpu.to_string().contains("/device:GPU:0 is not there: "),
        "{gpu}"
    );
    let pinned = |pin: &str| setup("cpu:2", 2).with(|o| o.pins = vec![Pin::parse(pin).unwrap()]);
    let nothing = error(&pinned("/no/such/node=cpu:1"));
    assert_eq!(nothing.kind(), ErrorKind::InvalidInput);
    assert!(
        nothing.to_string().contains("finds none of the model's"),
        "{nothing}"
    );
    let elsewhere = error(&pinned(".*=cpu:2"));
    assert_eq!(elsewhere.kind(), ErrorKind::InvalidInput);
    assert!(
        elsewhere
            .to_string()
            .contains("/device:CPU:2 is not in the set"),
        "{elsewhere}"
    );
}

/// Random graphs, half of whose nodes are pinned anywhere, so that cheap nodes run again on devices that need their results.
#[test]
fn nodes_that_run_again_change_no_result() {
    let mut rng = Rng(15);
    let mut n_copies = 0;
    for seed in 200..240 {
        let (graph, tensors) = random_graph(
            seed,
            &RandomOptions {
                n_nodes: 16,
                ..RandomOptions::default()
            },
        );
        let mut placed = graph.clone();
        for id in (0..graph.n_nodes() as u32).map(NodeId) {
            if rng.one_in(2) {
                continue;
            }
            let device = format!("/device:CPU:{}", rng.below(3));
            placed.node_mut(id).device = DeviceRequest::parse(&device).unwrap().into_requested();
        }
        let alone = setup("cpu:1", 0)
            .compile(&graph)
            .unwrap()
            .for_inputs(&tensors)
            .unwrap();
        let apart = setup("cpu:3", 0)
            .compile(&placed)
            .unwrap()
            .for_inputs(&tensors)
            .unwrap();
        assert_same(
            &alone.run(&tensors).unwrap(),
            &apart.run(&tensors).unwrap(),
            0.0,
            &format!("seed {seed}\n{placed}"),
        );
        n_copies += apart.lowered.placement.copies.len();
    }
    assert!(n_copies > 10, "only {n_copies} nodes ran again");
}
