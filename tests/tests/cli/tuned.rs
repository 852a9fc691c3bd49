//! `train` with models in training form, weights that cannot learn, and files in each other's way.

use crate::process::{Ended, Start, gristmill, start};
use gristmill::onnx::proto::*;
use gristmill::{DType, Tensor, write_npz};
use prost::Message;
use std::fs;
use std::path::Path;

fn node(op_type: &str, input: &[&str], output: &[&str]) -> NodeProto {
    NodeProto {
        op_type: op_type.to_owned(),
        input: input.iter().map(|&name| name.to_owned()).collect(),
        output: output.iter().map(|&name| name.to_owned()).collect(),
        ..NodeProto::default()
    }
}

fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let n: i64 = dims.iter().product();
    TensorProto {
        name: name.to_owned(),
        data_type: 1,
        dims: dims.to_vec(),
        float_data: (0..n).map(|i| 1.5 + (1.7 * i as f32).sin()).collect(),
        ..TensorProto::default()
    }
}

fn value(name: &str, columns: i64) -> ValueInfoProto {
    let dims = [
        DimensionValue::Param("N".to_owned()),
        DimensionValue::Value(columns),
    ];
    let dim = dims.map(|value| DimensionProto { value: Some(value) });
    let tensor = TensorTypeProto {
        elem_type: 1,
        shape: Some(TensorShapeProto { dim: dim.to_vec() }),
    };
    ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(TypeProto {
            value: Some(TypeValue::Tensor(tensor)),
        }),
    }
}

/// Writes `m.onnx`, from `x: f32[N, 4]` to `y: f32[N, 3]`, and examples in `data.npz`.
fn write(folder: &Path, node: Vec<NodeProto>, initializer: Vec<TensorProto>) {
    let graph = GraphProto {
        name: "m".to_owned(),
        node,
        initializer,
        input: vec![value("x", 4)],
        output: vec![value("y", 3)],
        ..GraphProto::default()
    };
    let model = ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto {
            domain: String::new(),
            version: 18,
        }],
        ..ModelProto::default()
    };
    fs::write(folder.join("m.onnx"), model.encode_to_vec()).unwrap();
    examples(folder, "data.npz", 0.0);
}

/// Forty rows whose class is that of the greatest of three numbers.
fn examples(folder: &Path, name: &str, shift: f32) {
    let x: Vec<f32> = (0..160).map(|i| (2.3 * i as f32).sin() + shift).collect();
    let greatest = |row: &[f32]| (0..3).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    let label: Vec<i64> = x.chunks(4).map(|row| greatest(row) as i64).collect();
    save(folder, name, &x, Tensor::from_slice(&label, &[40]).unwrap());
    Tensor::from_slice(&label, &[40])
        .unwrap()
        .to_npy(folder.join("label.npy"))
        .unwrap();
}

fn save(folder: &Path, name: &str, x: &[f32], label: Tensor) {
    let x = Tensor::from_slice(x, &[40, 4]).unwrap();
    x.to_npy(folder.join("x.npy")).unwrap();
    write_npz(folder.join(name), [("x", &x), ("label", &label)]).unwrap();
}

/// A linear layer with an operator in front of it.
fn perceptron(folder: &Path, activation: &str) {
    write(
        folder,
        vec![
            node(activation, &["x"], &["a"]),
            node("MatMul", &["a", "w"], &["y"]),
        ],
        vec![floats("w", &[4, 3])],
    );
}

fn train(folder: &Path, more: &[&str]) -> Ended {
    let args = ["train", "m.onnx", "--batch", "16", "--threads", "1"];
    let files = ["--data", "data.npz", "-o", "out.onnx"];
    let files = if more.contains(&"-o") {
        &files[..2]
    } else {
        &files
    };
    gristmill(folder, &[&args[..], files, more].concat())
}

/// The error of a command line that is refused.
fn refused(folder: &Path, more: &[&str]) -> String {
    let ended = train(folder, more);
    assert_eq!(ended.code, Some(2), "{more:?}: {}", ended.stderr);
    assert!(ended.stdout.is_empty(), "{}", ended.stdout);
    ended.stderr
}

/// A linear layer, a batch normalisation and a dropout in training form.
fn normalised(folder: &Path) {
    let mut norm = node(
        "BatchNormalization",
        &["a", "scale", "offset", "mean", "var"],
        &["n", "moved_mean", "moved_var"],
    );
    norm.attribute = vec![AttributeProto {
        name: "training_mode".to_owned(),
        r#type: attribute_type::INT,
        i: 1,
        ..AttributeProto::default()
    }];
    let constant = |name: &str, data_type, raw: &[u8]| TensorProto {
        name: name.to_owned(),
        data_type,
        raw_data: raw.to_vec().into(),
        ..TensorProto::default()
    };
    write(
        folder,
        vec![
            node("MatMul", &["x", "w"], &["a"]),
            norm,
            node("Dropout", &["n", "ratio", "training"], &["y"]),
        ],
        vec![
            floats("w", &[4, 3]),
            floats("scale", &[3]),
            floats("offset", &[3]),
            floats("mean", &[3]),
            floats("var", &[3]),
            constant("ratio", 1, &0.25f32.to_le_bytes()),
            constant("training", 9, &[1]),
        ],
    );
}

#[test]
fn a_model_in_training_form_is_written_for_inference() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    normalised(folder);
    let more = ["--eval", "data.npz", "--epochs", "3", "--lr", "0.05"];
    let ended = train(folder, &more);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let said = "out.onnx: 1 BatchNormalization node, 1 Dropout node written in inference form";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    let held_out = ended.stdout.lines().nth(2).unwrap();
    let accuracy = held_out.split("held out: ").nth(1).unwrap();
    let accuracy = accuracy.split("accuracy 0.").nth(1).unwrap();
    let accuracy = format!("accuracy {}.{} %", &accuracy[..2], &accuracy[2..4]);
    let args = [
        "run",
        "out.onnx",
        "--input",
        "x=x.npy",
        "--labels",
        "label.npy",
    ];
    let ended = gristmill(folder, &args);
    assert!(
        ended.stdout.contains(&accuracy),
        "{accuracy}: {}{}",
        ended.stdout,
        ended.stderr
    );
    let json = train(folder, &[&more[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["converted_to_inference"]["Dropout"], 1);

    let ended = train(folder, &["--keep-training-form"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let ended = gristmill(folder, &args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let warnings = [
        "1 batch norm takes statistics of the batch, as in training: node ",
        "1 dropout drops random elements, as in training: node ",
    ];
    for warning in warnings {
        assert_eq!(ended.stderr.matches(warning).count(), 1, "{}", ended.stderr);
    }
    let mut verbs = vec![vec!["check", "out.onnx"]];
    verbs.push(vec!["compile", "out.onnx", "-o", "out.gmx", "--set", "N=2"]);
    for verb in verbs {
        let ended = gristmill(folder, &verb);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        for warning in warnings {
            assert_eq!(ended.stderr.matches(warning).count(), 1, "{}", ended.stderr);
        }
    }
    let check = gristmill(folder, &["check", "out.onnx", "--train"]);
    assert_eq!((check.code, &*check.stderr), (Some(0), ""));
}

#[test]
fn weights_that_cannot_learn_are_mentioned() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let attribute = |name: &str, r#type, i, t| AttributeProto {
        name: name.to_owned(),
        r#type,
        i,
        t,
        ..AttributeProto::default()
    };
    let mut constant = node("Constant", &[], &["w"]);
    constant.attribute = vec![attribute(
        "value",
        attribute_type::TENSOR,
        0,
        Some(floats("", &[4, 3])),
    )];
    let mut cast = node("Cast", &["half"], &["b"]);
    cast.attribute = vec![attribute("to", attribute_type::INT, 1, None)];
    let half = TensorProto {
        name: "half".to_owned(),
        data_type: 10,
        dims: vec![3],
        raw_data: vec![0; 6].into(),
        ..TensorProto::default()
    };
    let product = || vec![constant.clone(), node("MatMul", &["x", "w"], &["p"])];
    let mut nodes = product();
    nodes.extend([
        cast,
        node("Add", &["p", "b"], &["s"]),
        node("Add", &["s", "c"], &["y"]),
    ]);
    write(folder, nodes, vec![half, floats("c", &[3])]);
    let ended = train(folder, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for warning in [
        "warning: half: f16[3] is not trainable: it is f16; f32 and f64 are trainable",
        "warning: w: f32[4, 3] is not trainable: it is in a Constant node, not an initialiser",
    ] {
        assert!(ended.stderr.contains(warning), "{}", ended.stderr);
    }
    let (nodes, last) = (product(), node("Identity", &["p"], &["y"]));
    write(folder, [nodes, vec![last]].concat(), Vec::new());
    let error = refused(folder, &[]);
    let why = "the model has no float initialisers; possible weights are in nodes or quantised (1 tensor)";
    assert!(error.contains(why), "{error}");
}

/// All epochs without a reader of results, and then the checkpoints of other trainings.
#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_does_not_end_the_training() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    perceptron(folder, "Relu");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let how = Start {
        folder,
        stdout: Some(std::os::fd::OwnedFd::from(writer).into()),
        ..Start::default()
    };
    let args = [
        "train", "m.onnx", "--data", "data.npz", "-o", "out.onnx", "--epochs", "3",
    ];
    let ended = start(how, &args);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert!(folder.join("out.onnx").exists());
}

#[test]
fn checkpoints_of_another_training_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    perceptron(folder, "Relu");
    let kept = ["--checkpoint-dir", "kept"];
    let ended = train(folder, &kept);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let resume = [&kept[..], &["--resume", "--epochs", "2"]].concat();
    let check = |more: &[&str], expected: &str| {
        let error = refused(folder, &[&resume[..], more].concat());
        let whole = format!("a checkpoint of another training: {expected}");
        assert!(error.contains(&whole), "{expected}: {error}");
    };
    check(
        &["--optimizer", "adamw"],
        "optimizer was adam, here it is adamw",
    );
    examples(folder, "data.npz", 0.25);
    check(&[], "data was ");
    perceptron(folder, "Tanh");
    check(&[], "model was ");
    perceptron(folder, "Relu");
    let ended = train(folder, &[&resume[..], &["--lr", "0.1"]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = train(folder, &resume);
    let said =
        "out.onnx: saved from kept/step-000000000006.safetensors: all epochs were done already";
    assert!(ended.stdout.starts_with(said), "{}", ended.stdout);
    let error = refused(folder, &["--resume"]);
    let why = "--resume: out.onnx.checkpoints has no checkpoint";
    assert!(error.contains(why), "{error}");
    assert!(!folder.join("out.onnx.checkpoints").exists());
}

#[test]
fn files_that_are_read_are_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    perceptron(folder, "Relu");
    let before = fs::read(folder.join("data.npz")).unwrap();
    fs::copy(folder.join("data.npz"), folder.join("eval.npz")).unwrap();
    for (args, expected) in [
        (
            &["-o", "data.npz"][..],
            "refusing to overwrite the file of --data",
        ),
        (&["-o", "./m.onnx"], "refusing to overwrite the input model"),
        (
            &["-o", "eval.npz", "--eval", "eval.npz"],
            "refusing to overwrite the file of --eval",
        ),
        (&["-o", "."], "-o: .: is a directory"),
    ] {
        let error = refused(folder, args);
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert!(fs::read(folder.join("data.npz")).unwrap() == before);
    for flag in ["--save-state", "--outputs"] {
        let args = ["run", "m.onnx", "--inputs", "data.npz", flag, "data.npz"];
        let ended = gristmill(folder, &args);
        assert_eq!(ended.code, Some(2));
        let expected = format!("{flag} data.npz: refusing to overwrite the file of --inputs");
        assert!(ended.stderr.contains(&expected), "{}", ended.stderr);
    }
}

#[test]
fn rates_and_labels_out_of_range_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    perceptron(folder, "Relu");
    for rate in ["nan", "-1", "inf"] {
        let error = refused(folder, &["--lr", rate]);
        let number = rate.replace("nan", "NaN");
        let expected =
            format!("error: learning rate: {number}: expected a finite number, 0 or more");
        assert!(error.starts_with(&expected), "{error}");
    }
    let x = [0.5; 160];
    let labels = |dtype, label: f64| Tensor::from_f64s(dtype, &[40], &[label; 40]).unwrap();
    save(folder, "data.npz", &x, labels(DType::F64, 2.0));
    let ended = train(folder, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("label: values of f64 are taken as i64"),
        "{}",
        ended.stderr
    );
    let check = |labels: Tensor, more: &[&str], expected: &str| {
        save(folder, "data.npz", &x, labels);
        let error = refused(folder, more);
        assert!(error.contains(expected), "{expected}: {error}");
    };
    check(
        labels(DType::F64, 0.5),
        &[],
        "has f64, expected i64, which does not have 0.5",
    );
    let one_hot: Vec<f64> = (0..120).map(|i| f64::from(u8::from(i % 3 == 1))).collect();
    let one_hot = Tensor::from_f64s(DType::F32, &[40, 3], &one_hot).unwrap();
    check(
        one_hot,
        &[],
        "\"label\" is one-hot, f32[40, 3]: expected the number of a class",
    );
    let probabilities = Tensor::from_f64s(DType::F32, &[40, 3], &[1.5; 120]).unwrap();
    check(
        probabilities,
        &["--loss", "binary-cross-entropy"],
        "is 1.5, expected a probability from 0 to 1",
    );
    let ended = gristmill(folder, &["train", "--help"]);
    assert!(
        ended.stdout.contains("--keep-checkpoints"),
        "{}",
        ended.stdout
    );
    assert!(!ended.stdout.contains("--keep <"), "{}", ended.stdout);
}
