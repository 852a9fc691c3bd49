//! Lets a classifier from an ONNX file learn something else: its digits, turned by a quarter.
//!
//! `cargo run --release -p gristmill --example fine_tune`, from a clone. The model of `tests/data/digits` knows digits that stand upright. It goes on
//! learning with turned ones, is written to a file again, and that file is run as any other.

use gristmill::ir::Dim;
use gristmill::train::{
    Adam, Dataset, Epoch, FineTuning, Fit, Model, Objective, Pretrained, TensorDataset, Trainer,
    Training, loss,
};
use gristmill::{DType, Options, Result, Tensor};
use std::path::{Path, PathBuf};

const BATCH: usize = 64;
const EPOCHS: u64 = 15;
const SEED: u64 = 1;

fn main() -> Result<()> {
    let tuned = std::env::temp_dir().join("gristmill-turned-digits.onnx");
    let (before, after) = tune(&tuned)?;
    println!(
        "{:.1} % of the turned digits were right, now {:.1} % are: {}",
        100.0 * before,
        100.0 * after,
        tuned.display()
    );
    Ok(())
}

fn data(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/digits");
    folder.join(name)
}

/// Writes a model that has learnt turned digits; the accuracy of the original on those that are held out, and its own.
pub fn tune(tuned: &Path) -> Result<(f64, f64)> {
    let examples = turned(&data("train.npz"))?;
    let held_out = turned(&data("held_out.npz"))?;
    let model = gristmill::onnx::load(data("model.onnx"))?;
    let net = Pretrained::new(&model, &FineTuning::default())?;
    let training = Training {
        seed: SEED,
        ..Training::from(Adam::default())
    };
    let trainer = Trainer::new("turned digits", &training, |m| objective(m, &net))?;
    let fit = Fit {
        epochs: EPOCHS,
        seed: SEED,
        ..Fit::new(&examples, BATCH)
    };
    trainer.fit(&fit, &mut [])?;
    net.save(&trainer, tuned)?;
    let before = accuracy(&data("model.onnx"), &held_out)?;
    Ok((before, accuracy(tuned, &held_out)?))
}

/// Images as `f32`, turned by a quarter, and their digits.
fn turned(path: &Path) -> Result<TensorDataset> {
    let mut tensors = Vec::new();
    for (name, t) in gristmill::read_npz(path)? {
        let t = match name.as_str() {
            "image" => quarter(&t)?,
            _ => t,
        };
        tensors.push((name, t));
    }
    TensorDataset::new(tensors)
}

/// `[n, 1, 8, 8]` with columns as rows, from the last one on.
fn quarter(images: &Tensor) -> Result<Tensor> {
    let pixels = images.to_f64s();
    let from = |i: usize| {
        let (image, row, column) = (i / 64, i / 8 % 8, i % 8);
        pixels[64 * image + 8 * column + (7 - row)]
    };
    let turned: Vec<f64> = (0..pixels.len()).map(from).collect();
    Ok(Tensor::from_f64s(DType::F32, images.shape(), &turned)?)
}

/// The cross-entropy of the model's classes.
fn objective(m: &mut Model, net: &Pretrained) -> Result<Objective> {
    let outputs = m.pretrained(net, &[])?;
    let label = m.input("label", DType::I64, [Dim::from("batch")]);
    let logits = loss::logits(m.builder(), outputs["probabilities"]);
    let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    Ok(Objective::new(loss))
}

/// The part of examples that the model of a file gets right.
fn accuracy(path: &Path, examples: &TensorDataset) -> Result<f64> {
    let model = gristmill::onnx::load(path)?;
    let program = gristmill::compile(&model, &Options::default())?;
    let all: Vec<usize> = (0..examples.len()).collect();
    let tensors = examples.rows(&all, Epoch::default())?;
    let tensor = |name: &str| tensors.iter().find(|(own, _)| own == name).map(|(_, t)| t);
    let (Some(images), Some(labels)) = (tensor("image"), tensor("label")) else {
        return Ok(0.0);
    };
    let outputs = program.run([("image", images.clone())])?;
    let rows = outputs["probabilities"].to_f64s();
    let greatest = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    let guesses = rows.chunks(10).map(|row| greatest(row).unwrap_or(0) as f64);
    let right = guesses.zip(labels.to_f64s()).filter(|(a, b)| a == b);
    Ok(right.count() as f64 / examples.len() as f64)
}
