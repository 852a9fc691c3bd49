//! Models whose extents depend on sizes of inputs or on data, beside onnxruntime: `tests/data/extents`.

use super::multi_device::setup;
use crate::process::gristmill;
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::Graph;
use gristmill::ir::print::PrintOptions;
use gristmill::testing::nvrtc_or_left_out;
use gristmill::{Compiled, DType, DimRange, Tensor, onnx};
use std::path::{Path, PathBuf};

/// A model, and the inputs and results of its runs.
pub struct Case {
    pub name: String,
    pub model: onnx::Model,
    runs: Vec<[Vec<(String, Tensor)>; 2]>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/extents")
}

fn cases() -> Vec<Case> {
    cases_in(&folder())
}

/// The models of a folder.
pub fn cases_in(folder: &Path) -> Vec<Case> {
    let entries = std::fs::read_dir(folder).expect("the models are in the repository");
    let mut folders: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    folders.retain(|f| f.is_dir());
    folders.sort();
    let case = |f: PathBuf| {
        let run = |i: usize| f.join(format!("test_data_set_{i}"));
        let runs = (0..).map(run).take_while(|run| run.exists());
        let name = f.file_name().expect("a folder").to_string_lossy();
        Case {
            name: name.into_owned(),
            model: onnx::load(f.join("model.onnx")).unwrap(),
            runs: runs
                .map(|r| ["input", "output"].map(|kind| tensors(&r, kind)))
                .collect(),
        }
    };
    folders.into_iter().map(case).collect()
}

fn tensors(folder: &Path, kind: &str) -> Vec<(String, Tensor)> {
    let file = |i: usize| folder.join(format!("{kind}_{i}.pb"));
    let files = (0..).map(file).take_while(|file| file.exists());
    let read = |file: PathBuf| onnx::tensor_from_pb(&std::fs::read(file).unwrap()).unwrap();
    files.map(read).collect()
}

impl Case {
    /// All runs of one compiled model, there and back: sizes grow, shrink and repeat.
    pub fn check(&self, model: &Compiled, form: &str) {
        for [inputs, expected] in self.runs.iter().chain(self.runs.iter().rev()) {
            let outputs = model.run(inputs.iter().cloned());
            let outputs = outputs.unwrap_or_else(|e| panic!("{} {form}: {e}", self.name));
            for (name, expected) in expected {
                let c = allclose(expected, &outputs[name], 1e-5, 1e-5);
                assert!(c.ok, "{} {form}, output {name}: {c}", self.name);
            }
        }
    }

    fn check_on(&self, devices: &str, opt_level: u8) {
        let model = setup(devices, opt_level).compile(&self.model);
        let form = format!("at level {opt_level} on {devices}");
        self.check(
            &model.unwrap_or_else(|e| panic!("{} {form}: {e}", self.name)),
            &form,
        );
    }
}

#[test]
fn models_agree_with_onnxruntime_at_every_size() {
    let cases = cases();
    assert!(cases.len() > 25, "{} models", cases.len());
    for case in cases {
        for (devices, opt_level) in [("cpu:1", 2), ("cpu:1", 0), ("cpu:2", 2)] {
            case.check_on(devices, opt_level);
        }
    }
}

#[test]
fn models_agree_with_onnxruntime_on_emulated_gpus() {
    if nvrtc_or_left_out("extents on emulated GPUs").is_some() {
        cases().iter().for_each(|case| case.check_on("emu:1", 2));
    }
}

#[test]
fn the_text_of_a_graph_over_symbols_is_the_same_model() {
    let mut n_graphs = 0;
    for case in cases() {
        // Some models have a graph for given sizes or contents only.
        let Ok(graph) = case.model.graph(&onnx::Specialisation::default()) else {
            continue;
        };
        let text = graph.to_text(PrintOptions::of(true));
        // Of models whose operands broadcast at some sizes, the graph over symbols is for all others.
        let broadcasts = [
            "add_weights_of_a_size",
            "expand_to_a_size",
            "shape_of_a_sum",
        ]
        .contains(&case.name.as_str());
        // An extent whose text is a summary is not read back.
        if broadcasts || text.contains(" terms over ") {
            continue;
        }
        n_graphs += 1;
        let parsed = Graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(
            parsed.to_text(PrintOptions::of(true)),
            text,
            "{}",
            case.name
        );
        let model = setup("cpu:1", 2).compile(&parsed).unwrap();
        case.check(&model, "from text");
    }
    assert!(n_graphs > 15, "{n_graphs} graphs");
}

#[test]
fn check_and_dump_take_what_run_takes() {
    for case in cases() {
        let folder = folder().join(&case.name);
        for args in [
            &["check", "model.onnx"][..],
            &["dump", "model.onnx", "--stage", "graph"],
        ] {
            let ended = gristmill(&folder, args);
            let (code, said) = (ended.code, ended.stderr);
            assert_eq!(code, Some(0), "{} {args:?}: {said}", case.name);
        }
    }
}

/// Within its declared range a size simplifies the graph; the text of that says so, and no run leaves it.
#[test]
fn declared_ranges_are_kept_by_texts_and_runs() {
    let case = cases()
        .into_iter()
        .find(|c| c.name == "slice_beyond_the_end");
    let model = case.expect("it is there").model;
    let range = DimRange { min: 8, max: 64 };
    let spec = onnx::Specialisation {
        ranges: [("N".to_owned(), range)].into(),
        ..onnx::Specialisation::default()
    };
    let text = model.graph(&spec).unwrap().to_string();
    assert!(text.contains("range \"N\" = 8..64"), "{text}");
    assert!(!text.contains("min("), "{text}");
    let graph = Graph::parse(&text).unwrap();
    assert_eq!(graph.to_string(), text);
    let with_range = setup("cpu:1", 2).with(|o| o.ranges = spec.ranges.clone());
    for model in [
        setup("cpu:1", 2).compile(&graph).unwrap(),
        with_range.compile(&model).unwrap(),
    ] {
        let run = |n: usize| model.run([("x", Tensor::zeros(DType::F32, &[n]).unwrap())]);
        assert_eq!(run(9).unwrap()["s"].as_slice::<i64>(), [5]);
        let error = run(3).unwrap_err().to_string();
        assert!(
            error.contains("dim \"N\" is 3, outside of its declared range 8..64"),
            "{error}"
        );
    }
    let x = [Tensor::zeros(DType::F32, &[3]).unwrap()];
    let error = interp::run(&graph, &x).unwrap_err().to_string();
    assert!(error.contains("outside of its declared range"), "{error}");
}

#[test]
fn bench_names_inputs_whose_contents_are_in_the_code() {
    let folder = folder().join("step_of_a_slice");
    let args = [
        "bench",
        "model.onnx",
        "--test-data",
        "test_data_set_0",
        "--iters",
        "1",
    ];
    let said = gristmill(&folder, &args).stdout;
    let expected =
        "the contents of \"st\" decide shapes, and are a part of the code: 1 specialisation";
    assert!(said.contains(expected), "{said}");
}
