//! Models whose inputs and outputs are sequences, optional values, or tensors of no declared rank.

use crate::process::gristmill;
use gristmill::onnx::proto::*;
use gristmill::onnx::{Model, Structure};
use gristmill::testing::Setup;
use gristmill::{Compiled, ErrorKind, Options, Tensor, compile};
use prost::Message;
use std::collections::BTreeMap;

/// An `f32` tensor type; extents are numbers and names.
pub fn tensor(dims: Option<&[&str]>) -> TypeProto {
    let extent = |text: &str| match text.parse() {
        Ok(n) => DimensionValue::Value(n),
        Err(_) => DimensionValue::Param(text.to_owned()),
    };
    let dim = |text: &&str| DimensionProto {
        value: Some(extent(text)),
    };
    let shape = dims.map(|dims| TensorShapeProto {
        dim: dims.iter().map(dim).collect(),
    });
    let value = Some(TypeValue::Tensor(TensorTypeProto {
        elem_type: 1,
        shape,
    }));
    TypeProto { value }
}

fn holding(make: fn(Box<ElementTypeProto>) -> TypeValue, element: TypeProto) -> TypeProto {
    let elem_type = Some(Box::new(element));
    TypeProto {
        value: Some(make(Box::new(ElementTypeProto { elem_type }))),
    }
}

pub fn info(name: &str, ty: TypeProto) -> ValueInfoProto {
    ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(ty),
    }
}

pub fn node(op_type: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: op_type.to_owned(),
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.to_owned()],
        ..Default::default()
    }
}

/// `y` is the sequence `x` and, at its end, the negated `r`; `n` is the length of `x`; `has` tells
/// whether `o` is there.
fn proto() -> ModelProto {
    let graph = GraphProto {
        name: "lists".to_owned(),
        node: vec![
            node("Neg", &["r"], "s"),
            node("SequenceInsert", &["x", "s"], "y"),
            node("SequenceLength", &["x"], "n"),
            node("OptionalHasElement", &["o"], "has"),
        ],
        input: vec![
            info("x", holding(TypeValue::Sequence, tensor(Some(&["N"])))),
            info("o", holding(TypeValue::Optional, tensor(Some(&["N"])))),
            info("r", tensor(None)),
        ],
        output: vec![
            info("y", holding(TypeValue::Sequence, tensor(None))),
            info("n", tensor(Some(&[]))),
            info("has", tensor(Some(&[]))),
        ],
        ..Default::default()
    };
    let standard = OperatorSetIdProto {
        domain: String::new(),
        version: 18,
    };
    ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import: vec![standard],
        ..Default::default()
    }
}

fn compiled(dims: &[(&str, usize)]) -> Compiled {
    let dims = dims.iter().map(|&(name, n)| (name.to_owned(), n));
    let setup = Setup::with_threads(1).with(|o| o.dims = dims.collect());
    setup.compile(&Model::from_proto(proto()).unwrap()).unwrap()
}

fn row(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, &[values.len()]).unwrap()
}

#[test]
fn each_run_decides_how_many_tensors_there_are() {
    let compiled = compiled(&[]);
    let matrix = Tensor::from_slice(&[1.0f32, 2.0], &[2, 1]).unwrap();
    let negated = Tensor::from_slice(&[-1.0f32, -2.0], &[2, 1]).unwrap();
    // Lengths and ranks grow, shrink and come back; elements of one sequence have other extents.
    for n in [3, 1, 3, 2] {
        let elements: Vec<Tensor> = (1..=n).map(|k| row(&vec![k as f32; k])).collect();
        let mut inputs = vec![("r".to_owned(), matrix.clone())];
        for (i, element) in elements.iter().enumerate() {
            inputs.push((format!("x[{i}]"), element.clone()));
        }
        if n == 2 {
            inputs.push(("o".to_owned(), row(&[0.0])));
        }
        let outputs = compiled.run(inputs).unwrap();
        let mut expected: Vec<&Tensor> = elements.iter().collect();
        expected.push(&negated);
        assert_eq!(outputs.elements("y"), expected);
        assert_eq!(outputs["n"].as_slice::<i64>(), [n as i64]);
        assert_eq!(outputs["has"].to_f64s(), [f64::from(u8::from(n == 2))]);
    }
    let outputs = compiled.run([("x[0]", row(&[5.0])), ("r", Tensor::scalar(2.0f32))]);
    assert_eq!(outputs.unwrap()["y[1]"], Tensor::scalar(-2.0f32));
    assert_eq!(compiled.specialisations(), 4);
    assert_eq!(compiled.output_names(), ["y", "n", "has"]);
}

#[test]
fn a_number_of_tensors_that_is_set_holds() {
    let empty = compiled(&[("x", 0)]);
    let outputs = empty.run([("r", row(&[1.0]))]).unwrap();
    assert_eq!(outputs.elements("y"), [&row(&[-1.0])]);
    let e = empty.run([("r", row(&[1.0])), ("x[0]", row(&[1.0]))]);
    assert_eq!(e.unwrap_err().kind(), ErrorKind::InvalidInput);
    // With ranks everything is known, and so are the inputs.
    let model = Model::from_proto(proto()).unwrap();
    let ranks = [("x", vec![1, 1]), ("o", vec![]), ("r", vec![2])];
    let structure: Structure = ranks.map(|(name, r)| (name.to_owned(), r)).into();
    let closed = model.closed(&structure).unwrap();
    let closed = compile(&closed, &Options::default()).unwrap();
    let names: Vec<&str> = closed.inputs().iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names, ["x[0]", "x[1]", "r"]);
}

#[test]
fn lists_that_are_not_given_are_errors() {
    let compiled = compiled(&[]);
    let refused = |inputs: &[(&str, Tensor)]| {
        let e = compiled.run(inputs.iter().cloned());
        e.unwrap_err().to_string()
    };
    let (one, r) = (row(&[1.0]), ("r", row(&[1.0])));
    let e = refused(std::slice::from_ref(&r));
    assert!(e.contains("input \"x\" is a sequence"), "{e}");
    let e = refused(&[("x[0]", one.clone())]);
    assert!(e.contains("input \"r\" is a tensor of any rank"), "{e}");
    let e = refused(&[r.clone(), ("x[0]", one.clone()), ("x[2]", one.clone())]);
    assert!(e.contains("x[2]"), "{e}");
    let e = refused(&[r.clone(), ("x[0]", Tensor::scalar(1.0f32))]);
    assert!(e.contains("expected a tensor of rank 1"), "{e}");
    let e = refused(&[r, ("x", one)]);
    assert!(e.contains("input \"x\" is a sequence"), "{e}");
    let e = compiled.run_ordered(&[]).unwrap_err().to_string();
    assert!(e.contains("input \"x\" is a sequence"), "{e}");
}

#[test]
fn the_command_line_takes_elements_by_name() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("m.onnx"), proto().encode_to_vec()).unwrap();
    for n in 1..=2 {
        let path = folder.path().join(format!("{n}.npy"));
        row(&vec![n as f32; n]).to_npy(path).unwrap();
    }
    let run = |words: &[&str]| gristmill(folder.path(), words);
    let given = ["--input", "x[0]=1.npy", "--input", "r=2.npy"];
    let ended = run(&[&["run", "m.onnx"], &given[..]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("y[0]: f32[1]"), "{}", ended.stdout);
    assert!(ended.stdout.contains("y[1]: f32[2]"), "{}", ended.stdout);
    let set = ["--set", "x=2", "--set", "o=0", "--set", "x[0]_0=3"];
    let set = [&set[..], &["--set", "x[1]_0=4", "--input", "r=2.npy"]].concat();
    let ended = run(&[&["run", "m.onnx"], &set[..]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("y[1]: f32[4]"), "{}", ended.stdout);
    let ended = run(&["run", "m.onnx", "--input", "r=2.npy"]);
    assert_eq!(ended.code, Some(2), "{}", ended.stdout);
    assert!(ended.stderr.contains("--set x=1"), "{}", ended.stderr);
    let ended = run(&["check", "m.onnx", "--set", "x=0"]);
    let line = "input \"x\" is a sequence, here 0 tensors";
    assert!(ended.stdout.contains(line), "{}", ended.stdout);
    let ended = run(&["check", "m.onnx", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let open: BTreeMap<String, usize> =
        serde_json::from_value(report["open_inputs"].clone()).unwrap();
    assert_eq!(open["x"], 2);
    let ended = run(&["dump", "m.onnx", "--stage", "graph"]);
    assert_eq!(ended.code, Some(2), "{}", ended.stdout);
}
