//! Peak memory of a process that compiles a model and runs it: at most 1.3 times the weights, the activations and 50 MiB.

use crate::lists;
use crate::process::{Start, gristmill, start};
use gristmill::ir::{Dim, Graph, GraphBuilder};
use gristmill::onnx::Model;
use gristmill::onnx::proto::*;
use gristmill::testing::Setup;
use gristmill::{Compiled, DType, Options, Tensor, compile};
use prost::Message;

const MIB: usize = 1 << 20;

/// An `f32` weight of small numbers.
fn weight(name: &str, dims: [usize; 2]) -> TensorProto {
    let values =
        (0..dims[0] * dims[1]).flat_map(|i| ((i % 251) as f32 * 1e-3 - 0.125).to_le_bytes());
    TensorProto {
        name: name.to_owned(),
        data_type: 1,
        dims: dims.map(|d| d as i64).to_vec(),
        raw_data: values.collect::<Vec<u8>>().into(),
        ..Default::default()
    }
}

fn node(op_type: &str, inputs: [&str; 2], output: &str) -> NodeProto {
    NodeProto {
        op_type: op_type.to_owned(),
        input: inputs
            .iter()
            .filter(|i| !i.is_empty())
            .map(|i| i.to_string())
            .collect(),
        output: vec![output.to_owned()],
        ..Default::default()
    }
}

fn row(name: &str, n: i64) -> ValueInfoProto {
    let dim = |n| DimensionProto {
        value: Some(DimensionValue::Value(n)),
    };
    let shape = TensorShapeProto {
        dim: vec![dim(1), dim(n)],
    };
    let tensor = TensorTypeProto {
        elem_type: 1,
        shape: Some(shape),
    };
    ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(TypeProto {
            value: Some(TypeValue::Tensor(tensor)),
        }),
    }
}

/// Weights as they lie, transposed, scaled, of products that are merged, and read by two layers.
fn model() -> ModelProto {
    let graph = GraphProto {
        name: "weights".to_owned(),
        node: vec![
            node("MatMul", ["x", "wide"], "h"),
            node("Transpose", ["tall", ""], "turned"),
            node("MatMul", ["h", "turned"], "y"),
            node("MatMul", ["y", "q"], "yq"),
            node("MatMul", ["y", "k"], "yk"),
            node("Mul", ["yq", "yk"], "z"),
            node("Mul", ["wide", "scale"], "scaled"),
            node("MatMul", ["z", "scaled"], "u"),
            node("MatMul", ["z", "wide"], "v"),
            node("Add", ["u", "v"], "out"),
        ],
        initializer: vec![
            weight("wide", [1024, 6144]),
            weight("tall", [1024, 6144]),
            weight("q", [1024, 1024]),
            weight("k", [1024, 1024]),
            weight("scale", [1, 1]),
        ],
        input: vec![row("x", 1024)],
        output: vec![row("out", 6144)],
        ..Default::default()
    };
    let opset_import = vec![OperatorSetIdProto {
        domain: String::new(),
        version: 18,
    }];
    ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import,
        ..Default::default()
    }
}

#[test]
#[cfg(target_os = "linux")]
fn weights_are_in_memory_once() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = model().encode_to_vec();
    // `scaled` is a weight that the file does not have.
    let weights = bytes.len() + 24 * MIB;
    std::fs::write(folder.path().join("model.onnx"), bytes).unwrap();
    let ended = gristmill(
        folder.path(),
        &[
            "bench",
            "model.onnx",
            "--iters",
            "1",
            "--threads",
            "1",
            "--json",
        ],
    );
    assert_eq!(ended.code, Some(0), "{}: {}", ended.status, ended.stderr);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let peak = report["peak_rss_bytes"].as_u64().unwrap() as usize;
    let limit = weights * 13 / 10 + 50 * MIB;
    assert!(
        peak <= limit,
        "{} MiB, limit {} MiB",
        peak / MIB,
        limit / MIB
    );
}

/// Ten products, each by a weight of 8 MiB that no other is equal to.
fn ten_products() -> ModelProto {
    let mut model = model();
    let graph = model.graph.as_mut().expect("a model has a graph");
    (graph.node, graph.initializer) = (Vec::new(), Vec::new());
    graph.output = vec![row("x10", 1024)];
    for i in 0..10 {
        let dims = [[1024, 2048], [2048, 1024]][i % 2];
        let mut weight = weight(&format!("w{i}"), dims);
        let mut bytes = weight.raw_data.to_vec();
        bytes.rotate_left(4 * (i + 1));
        weight.raw_data = bytes.into();
        graph.initializer.push(weight);
        let x = [String::from("x"), format!("x{i}")][usize::from(i > 0)].clone();
        let inputs = [&x[..], &format!("w{i}")];
        graph
            .node
            .push(node("MatMul", inputs, &format!("x{}", i + 1)));
    }
    model
}

/// Two weights of the ten are less than a limit that all of them exceed.
#[test]
#[cfg(target_os = "linux")]
fn an_image_is_compiled_in_the_memory_of_its_largest_weight() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = ten_products().encode_to_vec();
    std::fs::write(folder.path().join("model.onnx"), bytes).unwrap();
    let limit = (2 * 8 + 48) << 10;
    let how = Start {
        folder: folder.path(),
        // Of memory that is allocated or mapped without a file.
        shell: &format!("ulimit -d {limit}"),
        ..Start::default()
    };
    let words = ["compile", "model.onnx", "-o", "model.gmx", "--threads", "1"];
    let ended = start(how, &words);
    assert_eq!(ended.code, Some(0), "{}: {}", ended.status, ended.stderr);
    let size = std::fs::metadata(folder.path().join("model.gmx"))
        .unwrap()
        .len();
    assert!(size as usize > 80 * MIB, "{size} bytes");
}

/// `x w` with `x: [batch, 256]` and 256 KiB of weights.
fn product_of_any_batch() -> Graph {
    let mut b = GraphBuilder::new("product");
    let x = b.input("x", DType::F32, [Dim::from("batch"), 256.into()]);
    let w = b.constant(Tensor::zeros(DType::F32, &[256, 256]).unwrap());
    let y = b.matmul(x, w).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

fn run_batches(compiled: &Compiled, batches: std::ops::RangeInclusive<usize>) {
    for batch in batches {
        let x = Tensor::zeros(DType::F32, &[batch, 256]).unwrap();
        let outputs = compiled.run([("x", x)]).unwrap();
        assert_eq!(outputs["y"].shape(), [batch, 256]);
    }
}

#[test]
fn all_shapes_have_the_weights_once() {
    let compiled = compile(&product_of_any_batch(), &Options::default()).unwrap();
    run_batches(&compiled, 1..=1);
    let one = compiled.session().held_bytes() as usize;
    assert!(one >= MIB / 4, "{one} bytes");
    run_batches(&compiled, 2..=9);
    let nine = compiled.session().held_bytes() as usize;
    assert!(nine > one && nine < MIB / 2, "{one} and {nine} bytes");
    assert_eq!(
        (compiled.specialisations(), compiled.session().evictions()),
        (9, 0)
    );
}

#[test]
fn code_for_many_shapes_is_bounded() {
    let unbounded = compile(&product_of_any_batch(), &Options::default()).unwrap();
    run_batches(&unbounded, 1..=1);
    let one = unbounded.session().held_bytes();
    run_batches(&unbounded, 2..=8);
    let mut setup = Setup::default();
    setup.settings.specialisation_bytes = one + (unbounded.session().held_bytes() - one) / 2;
    let compiled = setup.compile(&product_of_any_batch()).unwrap();
    run_batches(&compiled, 1..=8);
    assert!((2..=6).contains(&compiled.specialisations()));
    assert_eq!(
        compiled.specialisations() + compiled.session().evictions(),
        8
    );
    assert!(compiled.session().held_bytes() <= setup.settings.specialisation_bytes);
    let last = Tensor::zeros(DType::F32, &[8, 256]).unwrap();
    let executable = compiled.for_inputs(&[last]).unwrap();
    let warnings = &executable.lowered.report.warnings;
    let is_told = warnings
        .iter()
        .any(|w| w.contains("Settings::specialisation_bytes"));
    assert!(is_told, "{warnings:?}");
}

/// A model of these nodes with an input of a type.
fn model_of(nodes: Vec<NodeProto>, input: TypeProto, outputs: &[&str]) -> Model {
    let graph = GraphProto {
        name: "sizes".to_owned(),
        node: nodes,
        input: vec![lists::info("x", input)],
        output: outputs
            .iter()
            .map(|y| lists::info(y, TypeProto::default()))
            .collect(),
        ..Default::default()
    };
    let standard = OperatorSetIdProto {
        domain: String::new(),
        version: 18,
    };
    let proto = ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import: vec![standard],
        ..Default::default()
    };
    Model::from_proto(proto).unwrap()
}

/// Runs a model at many shapes within the memory that ten of them take.
fn check_many_shapes(what: &str, model: &Model, shapes: &[Vec<usize>]) {
    let compiled = |specialisation_bytes: u64| {
        let mut setup = Setup::with_threads(1);
        setup.settings.specialisation_bytes = specialisation_bytes;
        setup.compile(model).unwrap()
    };
    let run = |compiled: &Compiled, shape: &[usize]| {
        let x = Tensor::zeros(DType::F32, shape).unwrap();
        compiled.run([("x", x)]).unwrap();
    };
    let unbounded = compiled(u64::MAX);
    shapes[..10].iter().for_each(|shape| run(&unbounded, shape));
    let limit = unbounded.session().held_bytes();
    assert!(limit > 0, "{what}");
    let compiled = compiled(limit);
    for shape in shapes {
        run(&compiled, shape);
        let held = compiled.session().held_bytes();
        assert!(
            held <= limit,
            "{what} at {shape:?}: {held} of {limit} bytes"
        );
    }
    assert!(compiled.session().evictions() > 0, "{what}");
}

#[test]
fn all_caches_of_a_model_are_bounded_together() {
    let node = |op: &str, y: &str| lists::node(op, &["x"], y);
    let counted = || vec![node("NonZero", "nz"), lists::node("Shape", &["nz"], "n")];
    let vectors: Vec<Vec<usize>> = (1..=200).map(|n| vec![n]).collect();
    let of = |dims: &[&str]| lists::tensor(Some(dims));

    let plain = model_of(vec![node("Neg", "y")], of(&["N"]), &["y"]);
    check_many_shapes("plain", &plain, &vectors);

    let nodes = [counted(), vec![node("Neg", "y")]].concat();
    let segmented = model_of(nodes, of(&["N"]), &["n", "y"]);
    check_many_shapes("in segments", &segmented, &vectors);

    // Each run decides the rank.
    let ranks = |n: usize| [vec![1; n % 3], vec![n]].concat();
    let open = model_of(vec![node("Neg", "y")], lists::tensor(None), &["y"]);
    let shapes: Vec<Vec<usize>> = (1..=200).map(ranks).collect();
    check_many_shapes("open", &open, &shapes);

    // Sizes decide the rank of a result, so that the segments are for one set of sizes.
    let nodes = [counted(), vec![node("Squeeze", "y")]].concat();
    let cut = model_of(nodes, of(&["N", "M"]), &["n", "y"]);
    let shapes: Vec<Vec<usize>> = (1..=200).map(|n| vec![1, n]).collect();
    check_many_shapes("cut for given sizes", &cut, &shapes);
}
