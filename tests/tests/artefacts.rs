//! Executables and shared libraries give the bits of what runs where it was compiled: the exports of small models, and random graphs.

use crate::images::{dims_of, exports, inputs_of};
use crate::process::{gristmill, kit};
use gristmill::testing::{RandomOptions, random_graph};
use gristmill::{Compiled, Options, Tensor, onnx};
use gristmill_runtime::npy;
use std::path::Path;
use std::process::Command;

/// Runs a program in a folder, which must end well.
fn run(folder: &Path, program: &str, words: &[String]) {
    let output = Command::new(folder.join(program))
        .current_dir(folder)
        .args(words)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {said}");
}

/// The program that runs any library.
fn build_bits(folder: &Path) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/data/c/bits.c");
    let words = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-o", "bits"];
    let mut cc = Command::new("cc");
    cc.current_dir(folder).args(words).args([source, "-ldl"]);
    assert!(cc.status().unwrap().success());
}

/// A model beside its compiled form.
struct Case<'c> {
    folder: &'c Path,
    model: &'c Path,
    compiled: &'c Compiled,
    inputs: &'c [Tensor],
    expected: Vec<(String, Tensor)>,
    /// The file of the state after one run.
    saved: Vec<u8>,
}

impl<'c> Case<'c> {
    fn new(
        folder: &'c Path,
        model: &'c Path,
        compiled: &'c Compiled,
        inputs: &'c [Tensor],
    ) -> Case<'c> {
        let outputs = compiled.run_ordered(inputs).unwrap();
        let expected = outputs.iter().map(|(name, t)| (name.to_owned(), t.clone()));
        let file = folder.join("expected.safetensors");
        compiled.resources().save(&file).unwrap();
        Case {
            saved: std::fs::read(file).unwrap(),
            folder,
            model,
            compiled,
            inputs,
            expected: expected.collect(),
        }
    }

    /// Compiles it to a file.
    fn write(&self, output: &str) {
        let dims = dims_of(self.compiled, self.inputs).into_iter();
        let dims: Vec<String> = dims.map(|(dim, n)| format!("{dim}={}", n[0])).collect();
        let set = dims.iter().flat_map(|dim| ["--set", dim]);
        let model = self.model.to_str().unwrap();
        // The library plans by the prices of one thread unless it is told.
        let words = [
            "compile",
            model,
            "-o",
            output,
            "--kit",
            kit(),
            "--threads=1",
        ];
        let words: Vec<&str> = words.into_iter().chain(set).collect();
        let ended = gristmill(self.folder, &words);
        assert_eq!(ended.code, Some(0), "{words:?}: {}", ended.stderr);
    }

    fn check_executable(&self, threads: usize) {
        let path = self.folder.join("in.npz");
        let names = self.compiled.inputs().iter().map(|(name, _)| name.as_str());
        npy::write_npz(&path, names.zip(self.inputs)).unwrap();
        let threads = threads.to_string();
        let words = ["--inputs", "in.npz", "--outputs", "out.npz", "--threads"];
        let mut words: Vec<String> = words.map(str::to_owned).into_iter().collect();
        words.push(threads);
        let has_state = !self.compiled.resources().names().is_empty();
        if has_state {
            words.extend(["--save-state", "state.safetensors"].map(str::to_owned));
        }
        run(self.folder, "model", &words);
        if has_state {
            let saved = std::fs::read(self.folder.join("state.safetensors")).unwrap();
            assert!(saved == self.saved, "the state of {:?}", self.model);
        }
        let got = npy::read_npz(self.folder.join("out.npz")).unwrap();
        let got: Vec<_> = got.iter().map(|(name, t)| (name, t)).collect();
        assert_eq!(got.len(), self.expected.len());
        for ((name, t), (expected_name, expected)) in got.into_iter().zip(&self.expected) {
            assert_eq!((name, t.shape()), (expected_name, expected.shape()));
            assert!(t.as_bytes() == expected.as_bytes(), "{:?}", self.model);
        }
    }

    fn check_library(&self, threads: usize) {
        let mut words = ["./libmodel.so".into(), "model".into(), threads.to_string()].to_vec();
        for (i, t) in self.inputs.iter().enumerate() {
            let file = format!("in{i}");
            std::fs::write(self.folder.join(&file), t.as_bytes()).unwrap();
            words.extend(["-i".into(), file]);
        }
        for (i, (_, t)) in self.expected.iter().enumerate() {
            words.extend(["-o".into(), format!("out{i}"), t.size_bytes().to_string()]);
        }
        run(self.folder, "bits", &words);
        for (i, (_, t)) in self.expected.iter().enumerate() {
            let got = std::fs::read(self.folder.join(format!("out{i}"))).unwrap();
            assert!(got == t.as_bytes(), "{:?}", self.model);
        }
    }

    fn check(&self) {
        self.write("model");
        self.write("libmodel.so");
        for threads in [1, 2] {
            self.check_executable(threads);
            self.check_library(threads);
        }
    }
}

#[test]
fn exports_give_the_bits_of_the_compiler() {
    let dir = tempfile::tempdir().unwrap();
    build_bits(dir.path());
    let folders = exports();
    assert!(folders.len() > 10);
    for folder in folders {
        let path = folder.join("model.onnx");
        let model = onnx::load(&path).unwrap();
        let compiled = gristmill::compile(&model, &Options::default()).unwrap();
        let inputs = inputs_of(&folder, &model, &compiled);
        Case::new(dir.path(), &path, &compiled, &inputs).check();
    }
}

#[test]
fn random_graphs_give_the_bits_of_the_compiler() {
    let dir = tempfile::tempdir().unwrap();
    build_bits(dir.path());
    for seed in 900..945 {
        let sizes = RandomOptions {
            n_nodes: 4 + seed as usize % 16,
            allow_empty_axes: seed % 5 == 0,
            n_variables: seed as usize % 3,
            initial_values: true,
            ..RandomOptions::default()
        };
        let (graph, inputs) = random_graph(seed, &sizes);
        let path = dir.path().join(format!("{seed}.ir"));
        std::fs::write(&path, graph.to_string()).unwrap();
        let compiled = gristmill::compile(&graph, &Options::default()).unwrap();
        Case::new(dir.path(), &path, &compiled, &inputs).check();
    }
}
