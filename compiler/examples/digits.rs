//! Trains a small convolutional network on handwritten digits, from Rust alone.
//!
//! `cargo run --release -p gristmill --example digits`, from a clone: 1,437 images to learn from and 360 that are held out, 8 x 8 pixels
//! of 0 to 16 each (`tests/data/digits`).

use gristmill::ir::{Dim, ScalarOp};
use gristmill::train::{
    Adam, BatchNorm, Callback, Conv2d, Dataset, EpochReport, Fit, FitContext, Model, Objective,
    Schedule, TensorDataset, Trainer, Training, Update, WeightDecay, loss,
};
use gristmill::{DType, Result, Tensor};
use std::path::Path;
use std::time::Instant;

const BATCH: usize = 64;
const EPOCHS: u64 = 20;
const SEED: u64 = 1;

fn main() -> Result<()> {
    let begin = Instant::now();
    let accuracy = train(&mut |epoch, loss| println!("epoch {epoch}: loss {loss:.4}"))?;
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "{:.1} % of the held-out digits are right, after {seconds:.1} s",
        100.0 * accuracy
    );
    Ok(())
}

/// Trains, tells the mean loss of each epoch, and gives the accuracy on the images that are held out.
pub fn train(tell: &mut dyn FnMut(u64, f64)) -> Result<f64> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/digits");
    let examples = data(&folder.join("train.npz"))?;
    let held_out = data(&folder.join("held_out.npz"))?;
    let n_batches = examples.len().div_ceil(BATCH);
    let trainer = trainer(n_batches as u64)?;
    let fit = Fit {
        epochs: EPOCHS,
        seed: SEED,
        ..Fit::new(&examples, BATCH)
    };
    trainer.fit(&fit, &mut [&mut Told(tell)])?;
    let metrics = trainer.evaluate(&held_out, BATCH)?;
    Ok(metrics.get("accuracy").unwrap_or(0.0))
}

/// Tells the mean loss of each epoch.
struct Told<'a>(&'a mut dyn FnMut(u64, f64));

impl Callback for Told<'_> {
    fn name(&self) -> String {
        "Told".to_owned()
    }

    fn epoch_end(&mut self, _: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        (self.0)(epoch.epoch, epoch.trained.loss());
        Ok(())
    }
}

/// Images as `f32`, and their digits.
fn data(path: &Path) -> Result<TensorDataset> {
    let mut tensors = Vec::new();
    for (name, t) in gristmill::read_npz(path)? {
        let is_image = t.dtype() == DType::U8;
        let t = match is_image {
            true => Tensor::from_f64s(DType::F32, t.shape(), &t.to_f64s())?,
            false => t,
        };
        tensors.push((name, t));
    }
    TensorDataset::new(tensors)
}

fn trainer(steps_per_epoch: u64) -> Result<Trainer> {
    let adam = Adam {
        learning_rate: Schedule::cosine(3e-3, EPOCHS * steps_per_epoch).warmed_up(20),
        ..Adam::default()
    };
    let training = Training {
        seed: SEED,
        ..Training::from(Update {
            weight_decay: WeightDecay::Decoupled(0.01),
            ..adam.into()
        })
    };
    Trainer::new("digits", &training, digits)
}

fn digits(m: &mut Model) -> Result<Objective> {
    let image = [Dim::from("batch"), 1.into(), 8.into(), 8.into()];
    let image = m.input("image", DType::F32, image);
    let label = m.input("label", DType::I64, [Dim::from("batch")]);
    let scale = m.builder().scalar(DType::F32, 1.0 / 16.0);
    let mut x = m.builder().mul(image, scale)?;
    for (name, filters, is_pooled) in [
        ("conv1", 16, false),
        ("conv2", 32, true),
        ("conv3", 64, true),
    ] {
        x = m.scope(name, |m| {
            let conv = Conv2d {
                has_bias: false,
                ..Conv2d::same(filters, 3)
            };
            let x = m.conv2d(x, conv)?;
            let x = m.batch_norm(x, BatchNorm::default())?;
            m.builder().map(ScalarOp::Relu, &[x])
        })?;
        if is_pooled {
            x = m.max_pool2d(x, [2, 2])?;
        }
    }
    let x = m.flatten(x)?;
    let x = m.scope("hidden", |m| m.dense(x, 64))?;
    let x = m.builder().map(ScalarOp::Relu, &[x])?;
    let logits = m.scope("digit", |m| m.dense(x, 10))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    let accuracy = loss::accuracy(m.builder(), logits, label)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}
