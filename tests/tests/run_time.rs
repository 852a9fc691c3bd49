//! Models whose extents only a run shows: a detector from PyTorch, and random graphs behind a
//! selection.

use super::multi_device::setup;
use crate::process::gristmill;
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::{
    Dim, Graph, GraphBuilder, Op, Origin, ReduceKind, ScalarOp, Shape, Type, ValueId,
};
use gristmill::testing::{
    RandomOptions, Rng, nvrtc_or_left_out, random_graph, random_tensor, with_symbols,
};
use gristmill::{DType, Tensor};
use std::path::PathBuf;

fn detector() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/detector")
}

/// Detects in all images with these flags.
fn detect(flags: &[&str]) {
    for image in 0..3 {
        let data = format!("test_data_set_{image}");
        let args = ["run", "model.onnx", "--test-data", &data];
        let ended = gristmill(&detector(), &[&args[..], flags].concat());
        let (code, said) = (ended.code, ended.stderr);
        assert_eq!(code, Some(0), "{flags:?} image {image}: {said}");
    }
}

#[test]
fn a_detector_agrees_with_pytorch() {
    detect(&["--threads", "1"]);
    detect(&["--threads", "2", "--opt-level", "0"]);
    detect(&["--devices", "cpu:2"]);
}

#[test]
fn a_detector_agrees_with_pytorch_on_emulated_gpus() {
    if nvrtc_or_left_out("a detector on emulated GPUs").is_some() {
        detect(&["--devices", "emu:1"]);
        detect(&["--devices", "cpu:1,emu:1"]);
    }
}

#[test]
fn reports_tell_of_segments() {
    let check = gristmill(&detector(), &["check", "model.onnx"]).stdout;
    assert!(check.contains("extents: the data decides some"), "{check}");
    let dump = ["dump", "model.onnx", "--stage", "segments"];
    let text = gristmill(&detector(), &dump).stdout;
    assert!(
        text.contains("non_max_suppression") && text.contains("segment"),
        "{text}"
    );
    let clusters = ["dump", "model.onnx", "--stage", "clusters"];
    let text = gristmill(&detector(), &clusters).stdout;
    assert!(text.contains("// segment 0\ngraph"), "{text}");
    let bench = ["bench", "model.onnx", "--iters", "2"];
    let text = gristmill(&detector(), &bench).stdout;
    assert!(
        text.contains("segments: the data decides extents"),
        "{text}"
    );
    let place = gristmill(&detector(), &["place", "model.onnx"]).stdout;
    assert!(
        place.contains("segment 0") && place.contains("placed during a run"),
        "{place}"
    );
    let pin = [
        "place",
        "model.onnx",
        "--devices",
        "cpu:1,emu:1",
        "--pin",
        "/NonZero=/device:EMU:0",
    ];
    let pinned = gristmill(&detector(), &pin);
    assert_eq!(pinned.code, Some(3), "{}{}", pinned.stdout, pinned.stderr);
    assert!(
        pinned.stderr.contains("computed by the host"),
        "{}",
        pinned.stderr
    );
    let profile = gristmill(&detector(), &["bench", "model.onnx", "--profile"]);
    assert_eq!(profile.code, Some(3), "{}", profile.stderr);
    assert!(
        profile.stderr.contains("no one program"),
        "{}",
        profile.stderr
    );
}

const SIZE: usize = 23;

/// A random graph whose axes of one symbol are selections from longer ones, by a mask: the graph,
/// its inputs, and those of the graph without selections.
fn behind_selections(seed: u64) -> Option<(Graph, Graph, Vec<Tensor>, Vec<Tensor>)> {
    let sizes = RandomOptions {
        n_nodes: 3 + seed as usize % 16,
        large_extents: vec![SIZE],
        ..RandomOptions::default()
    };
    let (graph, given) = random_graph(seed, &sizes);
    let inner = with_symbols(&graph, &[(SIZE, "a")]).ok()?;
    if inner.symbols().is_empty() || inner.outputs.is_empty() {
        return None;
    }
    let (mut rng, mut outer) = (Rng(seed), Graph::new("selected"));
    let longest = SIZE + rng.below(20);
    let (keep, mask) = mask(&mut rng, longest);
    let mut inputs = vec![mask];
    let mask = outer.add_input("mask", Type::new(DType::Bool, [longest]));
    let places = selected(&mut outer, mask).ok()?;
    let mut values: Vec<Option<ValueId>> = vec![None; inner.n_values()];
    for (i, (&v, given)) in inner.inputs.iter().zip(&given).enumerate() {
        let ty = inner.ty(v);
        let axes: Vec<usize> = (0..ty.rank())
            .filter(|&k| ty.shape[k] == Dim::from("a"))
            .collect();
        let long: Vec<usize> = (0..ty.rank())
            .map(|k| {
                if axes.contains(&k) {
                    longest
                } else {
                    given.shape()[k]
                }
            })
            .collect();
        let (mut x, tensor) = match axes.is_empty() {
            true => (outer.add_input(&format!("x{i}"), ty.clone()), given.clone()),
            false => {
                let tensor = stretched(given, &long, &keep, &axes);
                let ty = Type {
                    dtype: ty.dtype,
                    shape: Shape::of(&long),
                };
                (outer.add_input(&format!("x{i}"), ty), tensor)
            }
        };
        inputs.push(tensor);
        for axis in axes {
            x = outer
                .add1(Op::Gather { axis }, &[x, places], &Origin::default())
                .ok()?;
        }
        values[v.0 as usize] = Some(x);
    }
    for (_, node) in inner.nodes() {
        let args: Option<Vec<ValueId>> = node.inputs.iter().map(|v| values[v.0 as usize]).collect();
        let results = outer.add_copy(node, &args?).ok()?;
        for (v, new) in node.outputs.iter().zip(results) {
            values[v.0 as usize] = Some(new);
        }
    }
    for o in &inner.outputs {
        outer.add_output(&o.name, values[o.value.0 as usize]?);
    }
    Some((outer, graph, inputs, given))
}

/// Positions that are kept, `SIZE` of them, and the mask for it.
fn mask(rng: &mut Rng, longest: usize) -> (Vec<usize>, Tensor) {
    let mut flags = vec![false; longest];
    let mut left = SIZE;
    while left > 0 {
        let at = rng.below(longest);
        left -= usize::from(!flags[at]);
        flags[at] = true;
    }
    let keep = (0..longest).filter(|&i| flags[i]).collect();
    (keep, Tensor::from_slice(&flags, &[longest]).unwrap())
}

fn selected(g: &mut Graph, mask: ValueId) -> gristmill::Result<ValueId> {
    let count = Dim::from("a");
    let op = Op::NonZero {
        count: count.clone(),
    };
    let places = g.add1(op, &[mask], &Origin::default())?;
    let shape = vec![count];
    g.add1(Op::Reshape { shape }, &[places], &Origin::default())
}

/// A tensor of a larger shape that has the elements of `x` where all positions along `axes` are
/// kept, and its first one elsewhere.
fn stretched(x: &Tensor, shape: &[usize], keep: &[usize], axes: &[usize]) -> Tensor {
    let size = x.dtype().size_bytes();
    let n: usize = shape.iter().product();
    let mut bytes = Vec::with_capacity(n * size);
    for i in 0..n {
        let (mut rest, mut from, mut stride) = (i, Some(0), 1);
        for axis in (0..shape.len()).rev() {
            let at = rest % shape[axis];
            rest /= shape[axis];
            let at = match axes.contains(&axis) {
                true => keep.iter().position(|&k| k == at),
                false => Some(at),
            };
            from = from.zip(at).map(|(from, at)| from + at * stride);
            stride *= x.shape()[axis];
        }
        let from = from.unwrap_or(0);
        bytes.extend_from_slice(&x.as_bytes()[from * size..][..size]);
    }
    Tensor::from_bytes(x.dtype(), shape, &bytes).unwrap()
}

fn check_random(seed: u64, devices: &str, opt_level: u8) -> usize {
    let Some((selected, graph, inputs, given)) = behind_selections(seed) else {
        return 0;
    };
    let what = format!("seed {seed}, level {opt_level} on {devices}\n{selected}");
    let Ok(expected) = interp::run(&graph, &given) else {
        return 0;
    };
    let interpreted = interp::run(&selected, &inputs).unwrap_or_else(|e| panic!("{e}\n{what}"));
    let model = setup(devices, opt_level).compile(&selected);
    let model = model.unwrap_or_else(|e| panic!("{e}\n{what}"));
    let found = model
        .run_ordered(&inputs)
        .unwrap_or_else(|e| panic!("{e}\n{what}"));
    for ((e, i), f) in expected.iter().zip(&interpreted).zip(found.into_tensors()) {
        assert_eq!(e, i, "{what}");
        let c = allclose(e, &f, 0.0, 0.0);
        assert!(c.ok || c.scaled_err() <= 1e-4, "{c}\n{what}");
    }
    1
}

#[test]
fn random_graphs_behind_selections() {
    let levels = [2, 0, 1, 3].into_iter().cycle();
    let counts = (0..120)
        .zip(levels)
        .map(|(seed, level)| check_random(seed, "cpu:1", level));
    let n: usize = counts.sum();
    assert!(n > 40, "{n} graphs");
}

#[test]
fn random_graphs_behind_selections_on_emulated_gpus() {
    if nvrtc_or_left_out("random graphs behind selections on emulated GPUs").is_none() {
        return;
    }
    for (seed, devices) in (200..220).zip(["emu:1", "cpu:1,emu:1"].into_iter().cycle()) {
        check_random(seed, devices, 2);
    }
}

/// `x[mask]` doubled, built in Rust.
#[test]
fn a_graph_built_in_rust_may_leave_extents_to_its_run() {
    let mut b = GraphBuilder::new("kept");
    let x = b.input("x", DType::F32, [Dim::from("n")]);
    let zero = b.scalar(DType::F32, 0.0);
    let mask = b.map(ScalarOp::Gt, &[x, zero]).unwrap();
    let places = b.non_zero(mask, "kept").unwrap();
    let places = b.reshape(places, ["kept"]).unwrap();
    let y = b.add1(Op::Gather { axis: 0 }, &[x, places]).unwrap();
    let y = b.add_(y, y).unwrap();
    b.output("y", y);
    let model = setup("cpu:1", 2).compile(&b.finish().unwrap()).unwrap();
    let mut rng = Rng(5);
    for n in [0, 1, 7, 1000] {
        let x = random_tensor(&mut rng, DType::F32, &[n], false);
        let kept = x
            .as_slice::<f32>()
            .iter()
            .filter(|v| **v > 0.0)
            .map(|v| v + v);
        let kept: Vec<f32> = kept.collect();
        let results = model.run([("x", x.clone())]).unwrap();
        assert_eq!(results["y"].as_slice::<f32>(), kept);
    }
    assert!(model.specialisations() > 0 && model.n_segments() == 2);
}

#[test]
fn callers_run_a_model_in_segments_at_the_same_time() {
    let mut b = GraphBuilder::new("kept");
    let x = b.input("x", DType::F32, [64usize, 8]);
    let zero = b.scalar(DType::F32, 0.0);
    let rows = b.reduce(ReduceKind::Sum, x, &[1], false).unwrap();
    let mask = b.map(ScalarOp::Gt, &[rows, zero]).unwrap();
    let places = b.non_zero(mask, "kept").unwrap();
    let places = b.reshape(places, ["kept"]).unwrap();
    let kept = b.add1(Op::Gather { axis: 0 }, &[x, places]).unwrap();
    let y = b.map(ScalarOp::Exp, &[kept]).unwrap();
    b.output("y", y);
    let graph = b.finish().unwrap();
    let model = setup("cpu:1", 2).compile(&graph).unwrap();
    std::thread::scope(|scope| {
        for caller in 0..4 {
            let (graph, model) = (&graph, &model);
            scope.spawn(move || {
                let mut rng = Rng(caller);
                for _ in 0..20 {
                    let x = [random_tensor(&mut rng, DType::F32, &[64, 8], false)];
                    let expected = interp::run(graph, &x).unwrap();
                    let found = model.run_ordered(&x).unwrap().into_tensors();
                    let c = allclose(&expected[0], &found[0], 1e-5, 1e-5);
                    assert!(c.ok, "{c}");
                }
            });
        }
    });
}
