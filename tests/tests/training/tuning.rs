//! Fine-tuning: weights of ONNX files as variables, and files with the new ones.

#[path = "../../../compiler/examples/fine_tune.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod fine_tune;

use gristmill::ir::ValueId;
use gristmill::onnx::{self, load, tensor_from_pb};
use gristmill::train::{
    Adam, FineTuning, Model, Objective, Pretrained, Sgd, Trainer, Training, Update, loss,
};
use gristmill::{DType, Options, Outputs, Result, Tensor, compile, read_npz};
use std::fs::{read, read_dir};
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

/// Folders of exports with their test data.
fn exports() -> Vec<PathBuf> {
    let entries = read_dir(data("models")).unwrap();
    let mut folders: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    folders
}

/// The inputs of an export by name.
fn inputs(folder: &Path, net: &Pretrained) -> Vec<(String, Tensor)> {
    let input = |(i, (name, _)): (usize, (&str, _))| {
        let path = folder.join(format!("test_data_set_0/input_{i}.pb"));
        (
            name.to_owned(),
            tensor_from_pb(&read(path).unwrap()).unwrap().1,
        )
    };
    net.inputs().enumerate().map(input).collect()
}

pub(super) fn training(update: impl Into<Update>) -> Training {
    Training::from(update)
}

/// The squares of an output, to become small.
pub(super) fn small(m: &mut Model, net: &Pretrained) -> Result<Objective> {
    let outputs = m.pretrained(net, &[])?;
    let y = *outputs.values().next().unwrap();
    let zero = m.builder().scalar(DType::F32, 0.0);
    let loss = loss::mean_squared_error(m.builder(), y, zero)?;
    Ok(Objective::new(loss).metric("y", y))
}

/// Results of a file.
fn outputs_of(path: &Path, inputs: &[(String, Tensor)]) -> Outputs {
    let compiled = compile(&load(path).unwrap(), &Options::default()).unwrap();
    compiled.run(inputs.iter().cloned()).unwrap()
}

fn greatest_difference(a: &Tensor, b: &Tensor) -> f64 {
    let pairs = a.to_f64s().into_iter().zip(b.to_f64s());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn exports_learn_and_are_written_again() {
    let folder = tempfile::tempdir().unwrap();
    for export in exports() {
        let name = export.file_name().unwrap().to_str().unwrap().to_owned();
        let model = load(export.join("model.onnx")).unwrap();
        let net = Pretrained::new(&model, &FineTuning::default()).unwrap();
        assert!(
            net.weights().iter().filter(|w| w.frozen.is_none()).count() > 3,
            "{name}"
        );
        let sgd = Sgd {
            learning_rate: 1e-3.into(),
            ..Sgd::default()
        };
        let trainer = Trainer::new(&name, &training(sgd), |m| small(m, &net)).unwrap();
        let inputs = inputs(&export, &net);
        let before = outputs_of(&export.join("model.onnx"), &inputs);
        let losses: Vec<f64> = (0..3)
            .map(|_| trainer.step(inputs.clone()).unwrap().loss)
            .collect();
        assert!(
            losses[2] < losses[1] && losses[1] < losses[0],
            "{name}: {losses:?}"
        );
        let evaluated = trainer.evaluate_batch(inputs.clone()).unwrap();
        let path = folder.path().join("tuned.onnx");
        net.save(&trainer, &path).unwrap();
        let after = outputs_of(&path, &inputs);
        let (_, y) = after.iter().next().unwrap();
        let (_, old) = before.iter().next().unwrap();
        let near = greatest_difference(y, &evaluated["y"]);
        let moved = greatest_difference(y, old);
        assert!(
            near < 1e-5 && moved > 4.0 * near,
            "{name}: {near} near, {moved} moved"
        );
    }
}

#[test]
fn a_file_with_no_new_weights_is_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("same.onnx");
    for export in exports() {
        let original = export.join("model.onnx");
        let model = load(&original).unwrap();
        model.write_with(&onnx::Weights::new(), &path).unwrap();
        assert!(
            read(&path).unwrap() == read(&original).unwrap(),
            "{}",
            export.display()
        );
    }
}

/// The digits, pixels as `f32`.
fn digits() -> Vec<(String, Tensor)> {
    let mut tensors = read_npz(data("digits/train.npz")).unwrap();
    for (_, t) in tensors.iter_mut().filter(|(name, _)| name == "image") {
        *t = Tensor::from_f64s(DType::F32, t.shape(), &t.to_f64s()).unwrap();
    }
    tensors
}

/// The digits' classifier by its logits.
fn classifier(m: &mut Model, net: &Pretrained) -> Result<Objective> {
    let probabilities = m.pretrained(net, &[])?["probabilities"];
    let logits = loss::logits(m.builder(), probabilities);
    assert_ne!(logits, probabilities);
    let batch = m.builder().ty(logits).shape[0].clone();
    let label: ValueId = m.input("label", DType::I64, [batch]);
    let accuracy = loss::accuracy(m.builder(), logits, label)?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}

#[test]
fn a_pattern_chooses_what_learns() {
    let model = load(data("digits/model.onnx")).unwrap();
    let tuning = |pattern: &str| FineTuning {
        trainable: Some(pattern.to_owned()),
        ..FineTuning::default()
    };
    let all = Pretrained::new(&model, &FineTuning::default()).unwrap();
    let names: Vec<String> = all.weights().iter().map(|w| w.name.clone()).collect();
    let last = names.iter().rev().take(2).cloned().collect::<Vec<_>>();
    let pattern = format!("^({}|{})$", regex_of(&last[0]), regex_of(&last[1]));
    let net = Pretrained::new(&model, &tuning(&pattern)).unwrap();
    let adam = Adam::default();
    let trainer = Trainer::new("head", &training(adam), |m| classifier(m, &net)).unwrap();
    let mut learning = last.clone();
    learning.sort();
    let mut variables = trainer.variables().to_vec();
    variables.sort();
    assert_eq!(variables, learning);
    let error = Pretrained::new(&model, &tuning("nothing like it"))
        .err()
        .unwrap();
    assert!(error.to_string().contains("matches none of the"), "{error}");
    let error = Pretrained::new(&model, &tuning("(")).err().unwrap();
    assert!(error.to_string().contains("pattern"), "{error}");
}

fn regex_of(name: &str) -> String {
    name.replace('.', "\\.")
}

#[test]
fn the_file_that_was_learnt_is_better() {
    let model = load(data("digits/model.onnx")).unwrap();
    let net = Pretrained::new(&model, &FineTuning::default()).unwrap();
    let trainer = Trainer::new("digits", &training(Adam::default()), |m| {
        classifier(m, &net)
    });
    let trainer = trainer.unwrap();
    let batch = digits();
    let first = trainer.step(batch.clone()).unwrap();
    for _ in 0..20 {
        trainer.step(batch.clone()).unwrap();
    }
    let last = trainer.step(batch).unwrap();
    assert!(last.loss < 0.7 * first.loss, "{} {}", first.loss, last.loss);
}

#[test]
fn turned_digits_are_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let (before, after) = fine_tune::tune(&folder.path().join("turned.onnx")).unwrap();
    assert!(before < 0.6 && after > 0.95, "{before} {after}");
}
