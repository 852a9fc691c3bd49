//! Trains on Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 60,000 images of clothes to learn from, 10,000 that are held out.
//!
//! `cargo run --release -p gristmill --example fashion_mnist FOLDER [mlp|lenet] [SEED]`, where the folder has the four IDX files, compressed or not:
//! `train-images-idx3-ubyte.gz` and so on. Debian's package `dataset-fashion-mnist` brings them to `/usr/share/datasets/fashion-mnist`.

use gristmill::ir::{Dim, ScalarOp, ValueId};
use gristmill::train::{
    Adam, Callback, Conv2d, Dataset, EpochReport, Fit, FitContext, ImageOp, Model, Objective,
    Schedule, TensorDataset, Trainer, Training, Update, WeightDecay, loss, read_idx,
};
use gristmill::{DType, Result};
use std::path::{Path, PathBuf};
use std::time::Instant;

const BATCH: usize = 128;
const EPOCHS: u64 = 5;

/// A network.
#[derive(Clone, Copy, PartialEq)]
enum Net {
    /// Dense layers 784-512-256-10.
    Mlp,
    /// Two convolutions, 5 by 5, and dense layers 120-84-10.
    LeNet,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map(PathBuf::from);
    let folder = folder.unwrap_or("/usr/share/datasets/fashion-mnist".into());
    let net = match arguments.next().as_deref() {
        Some("lenet") => Net::LeNet,
        _ => Net::Mlp,
    };
    let seed = arguments.next().and_then(|text| text.parse().ok());
    let begin = Instant::now();
    let accuracy = train(&folder, net, seed.unwrap_or(1))?;
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "{:.2} % of the held-out images are right, after {seconds:.1} s",
        100.0 * accuracy
    );
    Ok(())
}

fn train(folder: &Path, net: Net, seed: u64) -> Result<f64> {
    let (examples, held_out) = (data(folder, "train")?, data(folder, "t10k")?);
    let n_steps = EPOCHS * examples.len().div_ceil(BATCH) as u64;
    let adam = Adam {
        learning_rate: Schedule::cosine(2e-3, n_steps).warmed_up(100),
        ..Adam::default()
    };
    let training = Training {
        seed,
        ..Training::from(Update {
            weight_decay: WeightDecay::Decoupled(0.01),
            ..adam.into()
        })
    };
    let trainer = Trainer::new("fashion", &training, |m| objective(m, net))?;
    let fit = Fit {
        epochs: EPOCHS,
        seed,
        held_out: Some(&held_out),
        ..Fit::new(&examples, BATCH)
    };
    trainer.fit(&fit, &mut [&mut Print])?;
    let metrics = trainer.evaluate(&held_out, 1000)?;
    Ok(metrics.get("accuracy").unwrap_or(0.0))
}

/// Prints a line for each epoch.
struct Print;

impl Callback for Print {
    fn name(&self) -> String {
        "Print".to_owned()
    }

    fn epoch_end(&mut self, _: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        let (number, trained) = (epoch.epoch + 1, &epoch.trained);
        let held_out = epoch.held_out.as_ref();
        let held_out = held_out.map_or_else(String::new, |m| format!("; held out: {m}"));
        let rate = epoch.examples_per_s;
        println!("epoch {number}/{EPOCHS}: {trained}{held_out}; {rate:.0} images/s");
        Ok(())
    }
}

/// Images and classes of one of the two parts.
fn data(folder: &Path, part: &str) -> Result<impl Dataset> {
    let read = |name: &str| {
        let plain = folder.join(format!("{part}-{name}"));
        match plain.exists() {
            true => read_idx(plain),
            false => read_idx(plain.with_extension("gz")),
        }
    };
    let (images, labels) = (read("images-idx3-ubyte")?, read("labels-idx1-ubyte")?);
    let data = TensorDataset::new([("image", images), ("label", labels)])?;
    // Pixels of mean 0 and deviation 1.
    let normalize = ImageOp::Normalize {
        mean: vec![0.286 * 255.0],
        deviation: vec![0.353 * 255.0],
    };
    Ok(data.images("image", [normalize]))
}

fn objective(m: &mut Model, net: Net) -> Result<Objective> {
    let shape = [Dim::from("batch"), 1.into(), 28.into(), 28.into()];
    let image = m.input("image", DType::F32, shape);
    let label = m.input("label", DType::U8, [Dim::from("batch")]);
    let (x, widths) = match net {
        Net::Mlp => (image, [512, 256]),
        Net::LeNet => (convolved(m, image)?, [120, 84]),
    };
    let mut x = m.flatten(x)?;
    for (name, width) in ["hidden1", "hidden2"].into_iter().zip(widths) {
        x = m.scope(name, |m| m.dense(x, width))?;
        x = m.builder().map(ScalarOp::Relu, &[x])?;
    }
    let logits = m.scope("classes", |m| m.dense(x, 10))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    let accuracy = loss::accuracy(m.builder(), logits, label)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}

fn convolved(m: &mut Model, image: ValueId) -> Result<ValueId> {
    let mut x = image;
    for (name, filters) in [("conv1", 16), ("conv2", 32)] {
        x = m.scope(name, |m| m.conv2d(x, Conv2d::same(filters, 5)))?;
        x = m.builder().map(ScalarOp::Relu, &[x])?;
        x = m.max_pool2d(x, [2, 2])?;
    }
    Ok(x)
}
