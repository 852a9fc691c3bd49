//! Random inputs, test data, and what a run tells about its values.

use super::{data, run};
use crate::lists;
use crate::process::gristmill;
use gristmill::onnx::proto::*;
use gristmill::{Tensor, write_npz};
use prost::Message;

/// Two embeddings: a table of 2 rows, and one of 1000.
const EMBEDDINGS: &str = r#"graph "g" {
  %0 = input "types": f32[2, 4]
  %1 = input "type_ids": i64[3, 50]
  %2 = input "words": f32[1000, 4]
  %3 = input "word_ids": i32[3, 50]
  %4: i64[3, 50] = cast(%3) {to = i64}
  %5: f32[3, 50, 4] = gather(%0, %1) {axis = 0}
  %6: f32[3, 50, 4] = gather(%2, %4) {axis = 0}
  %7: f32[3, 50, 4] = add(%5, %6)
  output "y" %7
  output "type_ids" %1
  output "word_ids" %3
}
"#;

#[test]
fn random_indices_are_in_their_tables() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("m.ir"), EMBEDDINGS).unwrap();
    let json = |flags: &[&str]| {
        let args = [&["run", "m.ir", "--json"], flags].concat();
        let ended = gristmill(folder.path(), &args);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        value
    };
    let value = json(&["--seed", "7"]);
    assert_eq!(
        (&value["seed"], &value["random_inputs"][1]),
        (&7.into(), &"type_ids".into())
    );
    let ends = |value: &serde_json::Value, i: usize| {
        let output = &value["outputs"][i];
        (
            output["min"].as_f64().unwrap(),
            output["max"].as_f64().unwrap(),
        )
    };
    assert_eq!(ends(&value, 1), (0.0, 1.0));
    let (low, high) = ends(&value, 2);
    assert!(
        (0.0..100.0).contains(&low) && (900.0..1000.0).contains(&high),
        "{low} {high}"
    );
    let value = json(&["--input-range", "word_ids=5..7"]);
    assert_eq!(ends(&value, 2), (5.0, 7.0));
    for (range, text) in [
        ("nothing=0..1", "type_ids"),
        ("word_ids=0..0.5", "i32"),
        ("word_ids=2..1", "empty"),
        ("word_ids=many", "LOW..HIGH"),
    ] {
        let ended = gristmill(folder.path(), &["run", "m.ir", "--input-range", range]);
        assert_eq!(ended.code, Some(2), "{range}");
        assert!(ended.stderr.contains(text), "{range}: {}", ended.stderr);
    }
}

#[test]
fn a_run_that_fails_on_random_values_says_so() {
    let folder = tempfile::tempdir().unwrap();
    // The index is computed, so that its range is not known.
    let text = EMBEDDINGS
        .replace(
            "%4: i64[3, 50] = cast(%3) {to = i64}",
            "%4: i64[3, 50] = add(%1, %1)",
        )
        .replace("gather(%0, %1)", "gather(%0, %4)");
    std::fs::write(folder.path().join("m.ir"), text).unwrap();
    let ended = gristmill(folder.path(), &["run", "m.ir"]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("out of range"), "{}", ended.stderr);
    assert!(ended.stderr.contains("--inputs") && ended.stderr.contains("--input-range"));
}

#[test]
fn test_data_must_be_a_folder() {
    let (code, _, err) = run(&["run", &data("digits/model.onnx"), "--test-data", "nosuch"]);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("nosuch: not a folder"), "{err}");
}

#[test]
fn values_without_a_number_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let text =
        "graph \"g\" {\n%0 = input \"x\": f32[1000]\n%1: f32[1000] = log(%0)\noutput \"y\" %1\n}\n";
    std::fs::write(folder.path().join("m.ir"), text).unwrap();
    let ended = gristmill(folder.path(), &["run", "m.ir", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let n_nan = value["outputs"][0]["nan"].as_u64().unwrap();
    assert!((300..700).contains(&n_nan), "{value}");
    let ended = gristmill(folder.path(), &["run", "m.ir"]);
    assert!(
        ended.stdout.contains(&format!("  {n_nan} NaN\n")),
        "{}",
        ended.stdout
    );
}

#[test]
fn graphs_are_checked_in_json_too() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("m.ir"), EMBEDDINGS).unwrap();
    let ended = gristmill(folder.path(), &["check", "m.ir", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(value["format"], "gristmill/check/1");
    assert_eq!(
        (&value["nodes"], &value["ops"]["gather"]),
        (&4.into(), &2.into())
    );
}

/// `x + y`, of one dim each.
fn sum(dims: [&str; 2]) -> ModelProto {
    let row = |(name, dim): (&str, &str)| ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(TypeProto {
            value: Some(TypeValue::Tensor(TensorTypeProto {
                elem_type: 1,
                shape: Some(TensorShapeProto {
                    dim: vec![DimensionProto {
                        value: Some(DimensionValue::Param(dim.to_owned())),
                    }],
                }),
            })),
        }),
    };
    let add = NodeProto {
        op_type: "Add".to_owned(),
        input: vec!["x".to_owned(), "y".to_owned()],
        output: vec!["z".to_owned()],
        ..Default::default()
    };
    let graph = GraphProto {
        name: "sum".to_owned(),
        node: vec![add],
        input: ["x", "y"].into_iter().zip(dims).map(row).collect(),
        output: vec![row(("z", dims[0]))],
        ..Default::default()
    };
    ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto {
            domain: String::new(),
            version: 18,
        }],
        ..Default::default()
    }
}

#[test]
fn the_work_of_further_shapes_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let check = |model: ModelProto, flags: &[&str]| {
        std::fs::write(folder.path().join("m.onnx"), model.encode_to_vec()).unwrap();
        let words = ["check", "m.onnx"].iter().chain(flags).copied();
        let ended = gristmill(folder.path(), &words.collect::<Vec<_>>());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout
    };
    let checked = |dims, flags: &[&str]| check(sum(dims), flags);
    let out = checked(["n", "n"], &[]);
    let expected = "shapes: kernels are chosen once for all sizes of n\n";
    assert!(out.contains(expected), "{out}");
    // Sizes at which one of them is broadcast are compiled alone.
    let out = checked(["n", "m"], &[]);
    let expected = "shapes: kernels are chosen once for all sizes of m, n\n";
    assert!(out.contains(expected), "{out}");
    // The rank of the result is known for given sizes only.
    let squeezed = || {
        let mut model = sum(["n", "m"]);
        let graph = model.graph.as_mut().unwrap();
        graph.input = vec![lists::info("x", lists::tensor(Some(&["n", "m"])))];
        graph.node = vec![lists::node("Squeeze", &["x"], "z")];
        model
    };
    let out = check(squeezed(), &[]);
    let expected = "shapes: compiled anew for each set of sizes of m, n: ";
    assert!(out.contains(expected), "{out}");
    let out = checked(["n", "m"], &["--set", "n=1"]);
    assert!(out.contains("for all sizes of m\n"), "{out}");
    let out = checked(["n", "m"], &["--set", "n=4", "--set", "m=1"]);
    assert!(!out.contains("shapes:"), "{out}");
    let json: serde_json::Value = serde_json::from_str(&check(squeezed(), &["--json"])).unwrap();
    let shapes = &json["shapes"];
    assert_eq!(shapes["compiled_once"], false);
    assert_eq!(shapes["symbols"], serde_json::json!(["m", "n"]));
    assert!(shapes["reason"].as_str().unwrap().contains("the rank"));
}

#[test]
fn symbolic_models_are_shown_without_sizes() {
    let model = data("digits/model.onnx");
    let (code, out, err) = run(&["dump", &model, "--stage", "graph"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("f32[batch, 10]"), "{out}");
    let (code, _, err) = run(&["dump", &model, "--stage", "clusters"]);
    assert!(code == 2 && err.contains("--set batch=1"), "{err}");
    let (code, out, err) = run(&["inspect", &model, "--set", "batch=3"]);
    assert!(
        code == 0 && out.contains("output probabilities: f32[3, 10]"),
        "{out}{err}"
    );
    let (code, _, err) = run(&["inspect", &model, "--set", "bach=3"]);
    assert!(code == 2 && err.contains("did you mean \"batch\""), "{err}");
}

#[test]
fn an_index_out_of_range_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("m.ir"), EMBEDDINGS).unwrap();
    let mut ids = [0i64; 150];
    ids[51] = 2;
    let ids = Tensor::from_slice(&ids, &[3, 50]).unwrap();
    ids.to_npy(folder.join("ids.npy")).unwrap();
    for verb in ["run", "bench"] {
        let ended = gristmill(folder, &[verb, "m.ir", "--input", "type_ids=ids.npy"]);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        let expected = "an index is out of range for its axis: input \"type_ids\" has 2 at [1, 1], expected -2 to 1";
        assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    }
}

#[test]
fn files_of_another_kind_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("m.ir"), NEGATION).unwrap();
    let x = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
    x.to_npy(folder.join("x.npy")).unwrap();
    write_npz(folder.join("x.npz"), [("x", &x)]).unwrap();
    let model = include_bytes!("../../data/digits/model.onnx");
    std::fs::write(folder.join("cut.onnx"), &model[..model.len() / 2]).unwrap();
    std::fs::write(folder.join("empty.onnx"), "").unwrap();
    std::fs::write(
        folder.join("lfs.onnx"),
        "version https://git-lfs.github.com/spec/v1\n",
    )
    .unwrap();
    std::fs::copy(folder.join("x.npz"), folder.join("zip.onnx")).unwrap();
    let error = |args: &[&str]| {
        let ended = gristmill(folder, args);
        assert_eq!((ended.code, &*ended.stdout), (Some(2), ""), "{args:?}");
        ended.stderr.trim_end().to_owned()
    };
    let errors = [
        error(&["run", "m.ir", "--input", "x=x.npz"]),
        error(&["run", "m.ir", "--inputs", "x.npy"]),
        error(&["run", "m.ir", "--inputs", "x.npz", "--outputs", "y.npy"]),
        error(&["run", "cut.onnx"]),
        error(&["check", "empty.onnx"]),
        error(&["check", "lfs.onnx"]),
        error(&["check", "zip.onnx"]),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r"
    error: x.npz: it is a zip archive, as .npz and .pt files are, expected one NumPy array (.npy) (try: --inputs x.npz)
    error: x.npy: it is one NumPy array (.npy), expected an archive of arrays (.npz) (try: an archive of named arrays, or --input NAME=x.npy)
    error: --outputs y.npy: outputs are written as an archive of arrays, not as one array (try: --outputs y.npz)
    error: cannot load cut.onnx: not an ONNX model, or a truncated one: the part at byte 29 has 40491 bytes, 20234 are left (try: download or export it again)
    error: cannot load empty.onnx: it is an empty file, not an ONNX model (try: download or write it again)
    error: cannot load lfs.onnx: it is a Git LFS pointer to a file that was not fetched, not an ONNX model (try: git lfs pull)
    error: cannot load zip.onnx: it is a zip archive, as .npz and .pt files are, not an ONNX model (try: export the model to ONNX)
    ");
    assert!(!folder.join("y.npy").exists());
}

/// One input and one output.
const NEGATION: &str = r#"graph "g" {
  %0 = input "x": f32[2]
  %1: f32[2] = neg(%0)
  output "y" %1
}
"#;

#[test]
fn outputs_are_compared_with_an_archive() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("m.ir"), NEGATION).unwrap();
    let tensor = |values: [f32; 2]| Tensor::from_slice(&values, &[2]).unwrap();
    tensor([1.0, 2.0]).to_npy(folder.join("x.npy")).unwrap();
    let write = |file: &str, name: &str, values: [f32; 2]| {
        write_npz(folder.join(file), [(name, &tensor(values))]).unwrap();
    };
    write("right.npz", "y", [-1.0, -2.0]);
    write("wrong.npz", "y", [-1.0, -2.5]);
    write("other.npz", "z", [-1.0, -2.0]);
    write_npz(folder.join("none.npz"), []).unwrap();
    let run = |model: &str, file: &str, more: &[&str]| {
        let args = ["run", model, "--input", "x=x.npy", "--expect", file];
        gristmill(folder, &[&args[..], more].concat())
    };
    let compiled = gristmill(folder, &["compile", "m.ir", "-o", "m.gmx"]);
    assert_eq!(compiled.code, Some(0), "{}", compiled.stderr);
    for model in ["m.ir", "m.gmx"] {
        let right = run(model, "right.npz", &[]);
        assert_eq!(right.code, Some(0), "{}", right.stderr);
        assert!(right.stdout.contains("\ny: "), "{}", right.stdout);
        let wrong = run(model, "wrong.npz", &[]);
        assert_eq!(wrong.code, Some(4), "{}", wrong.stderr);
        let message = "outputs differ from the expected ones: y";
        assert!(wrong.stderr.contains(message), "{}", wrong.stderr);
        let within = run(model, "wrong.npz", &["--rtol", "0.5"]);
        assert_eq!(within.code, Some(0), "{}", within.stderr);
        let other = run(model, "other.npz", &[]);
        assert_eq!(other.code, Some(2));
        let message = "--expect: unknown output \"z\"; known: y";
        assert!(other.stderr.contains(message), "{}", other.stderr);
        assert_eq!(run(model, "none.npz", &[]).code, Some(2));
    }
    let ended = run("m.ir", "right.npz", &["--outputs", "right.npz"]);
    let message = "refusing to overwrite the file of --expect";
    assert!(ended.stderr.contains(message), "{}", ended.stderr);
}
