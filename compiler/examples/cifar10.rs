//! Trains the convolutional network of TensorFlow's CIFAR-10 tutorial: two convolutions with overlapping pools and local response
//! normalisation, two dense layers with weight decay, 1,068,298 parameters, on images cut, flipped and changed in brightness and contrast.
//!
//! `cargo run --release -p gristmill --example cifar10 -- RUN [--data FOLDER] [--epochs 6]` keeps checkpoints and a log for TensorBoard in the
//! folder RUN, and goes on from the newest checkpoint if there is one. FOLDER has the binary files of CIFAR-10
//! (`data_batch_1.bin` to `data_batch_5.bin`, `test_batch.bin`); without it, the program draws images of ten shapes, `--images 12800` to train on.
//!
//! `-- RUN --evaluate [--once]`, in another process meanwhile, evaluates each new checkpoint, by the moving averages of the weights.

use gristmill::ir::{Dim, ValueId};
use gristmill::train::{
    Activation, Callback, Checkpoints, Conv2d, Dataset, EpochReport, Every, FileDataset, Fit,
    FitContext, ImageOp, Init, Lrn, Model, ModelCheckpoint, Objective, Pool2d, Schedule, Sgd,
    Summaries, TensorBoard, TensorDataset, Trainer, Training, Update, Weights, latest_checkpoint,
    loss,
};
use gristmill::{DType, Error, Result, Session, Settings, Tensor};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

const BATCH: usize = 128;
/// Decides the initial values.
pub const SEED: u64 = 1;

fn main() -> Result<()> {
    let args = Args::parse(std::env::args().skip(1))?;
    match args.evaluates {
        true => evaluate(&args),
        false => {
            let (weights, averages) = train(&args)?;
            let (weights, averages) = (100.0 * weights, 100.0 * averages);
            println!("{weights:.2} % of held-out images are right, {averages:.2} % by averages");
            Ok(())
        }
    }
}

/// Arguments of the program.
pub struct Args {
    /// Folder of checkpoints and logs.
    pub run: PathBuf,
    /// Folder of CIFAR-10.
    pub data: Option<PathBuf>,
    /// Passes over all images.
    pub epochs: u64,
    /// Generated images to train on; a fifth as many are held out.
    pub n_images: usize,
    /// Filters of the convolutions.
    pub n_filters: usize,
    /// Evaluates instead.
    pub evaluates: bool,
    /// Evaluates the newest checkpoint only.
    pub once: bool,
}

impl Args {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Args> {
        let usage = "RUN [--data FOLDER] [--epochs 6] [--images 12800] [--evaluate [--once]]";
        let wrong = || Error::invalid(format!("expected {usage}"));
        let run = words.next().filter(|word| !word.starts_with('-'));
        let mut args = Args::new(run.ok_or_else(wrong)?);
        while let Some(flag) = words.next() {
            match flag.as_str() {
                "--evaluate" => args.evaluates = true,
                "--once" => args.once = true,
                "--data" => args.data = Some(words.next().ok_or_else(wrong)?.into()),
                "--epochs" | "--images" => {
                    let number = words.next().and_then(|word| word.parse().ok());
                    let number: u64 = number.ok_or_else(wrong)?;
                    match flag.as_str() {
                        "--epochs" => args.epochs = number,
                        _ => args.n_images = number as usize,
                    }
                    if !(BATCH..=1_000_000).contains(&args.n_images) {
                        return Err(Error::invalid("--images: expected 128 to 1,000,000"));
                    }
                }
                _ => return Err(wrong()),
            }
        }
        Ok(args)
    }

    /// A run in a folder on 12,800 generated images.
    pub fn new(run: impl Into<PathBuf>) -> Args {
        Args {
            run: run.into(),
            data: None,
            epochs: 6,
            n_images: 12_800,
            n_filters: 64,
            evaluates: false,
            once: false,
        }
    }
}

/// Changes of the images to train on.
pub const DISTORTIONS: [ImageOp; 5] = [
    ImageOp::RandomCrop {
        height: 24,
        width: 24,
        padding: 0,
    },
    ImageOp::RandomFlip,
    ImageOp::RandomBrightness { delta: 63.0 },
    ImageOp::RandomContrast {
        low: 0.2,
        high: 1.8,
    },
    ImageOp::Standardize,
];

/// Trains, and gives the accuracies on held-out images: by the weights, and by their averages.
pub fn train(args: &Args) -> Result<(f64, f64)> {
    let (images, held_out) = data(args)?;
    let images = images.images("image", DISTORTIONS);
    let trainer = trainer(args, (images.len() / BATCH) as u64)?;
    let checkpoints = Checkpoints::new(args.run.join("checkpoints"), 3)?;
    let fit = Fit {
        epochs: args.epochs,
        held_out: Some(&held_out),
        weights: Weights::Averages,
        drops_last: true,
        resumed: checkpoints.resume(&trainer)?,
        ..Fit::new(&images, BATCH)
    };
    let mut board =
        TensorBoard::new(args.run.join("logs")).summaries(Summaries::new(Every::Steps(100)));
    let mut saved = ModelCheckpoint::newest(checkpoints, Every::Epochs(1));
    trainer.fit(&fit, &mut [&mut Progress, &mut board, &mut saved])?;
    let accuracy = |weights| {
        let means = trainer.evaluate_with(weights, &held_out, BATCH)?;
        Ok::<f64, Error>(means.get("accuracy").unwrap_or(0.0))
    };
    Ok((accuracy(Weights::Current)?, accuracy(Weights::Averages)?))
}

/// Evaluates checkpoints as a training writes them.
pub fn evaluate(args: &Args) -> Result<()> {
    let (_, held_out) = data(args)?;
    let trainer = trainer(args, 1)?;
    let mut last = None;
    loop {
        let folder = args.run.join("checkpoints");
        // The training may not have begun yet.
        let newest = match folder.exists() {
            true => latest_checkpoint(folder)?,
            false => None,
        };
        if newest != last
            && let Some(path) = &newest
        {
            trainer.load_weights(path)?;
            let means = trainer.evaluate_with(Weights::Averages, &held_out, BATCH)?;
            println!("{}: {means}", path.display());
        }
        if args.once {
            return match newest {
                Some(_) => Ok(()),
                None => Err(Error::invalid(format!(
                    "{}: no checkpoint",
                    args.run.display()
                ))),
            };
        }
        last = newest;
        sleep(Duration::from_secs(1));
    }
}

/// Prints a line per epoch.
struct Progress;

impl Callback for Progress {
    fn name(&self) -> String {
        "Progress".to_owned()
    }

    fn epoch_end(&mut self, _: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        let (number, speed) = (epoch.epoch + 1, epoch.examples_per_s);
        let held_out = epoch.held_out.as_ref().map(|means| means.to_string());
        println!(
            "epoch {number}: {}; held out: {}; {speed:.0} images/s",
            epoch.trained,
            held_out.unwrap_or_default()
        );
        Ok(())
    }
}

/// The network with the tutorial's optimiser.
pub fn trainer(args: &Args, steps_per_epoch: u64) -> Result<Trainer> {
    trainer_in(&Session::new(&Settings::default())?, args, steps_per_epoch)
}

/// The same in a session.
pub fn trainer_in(session: &Session, args: &Args, steps_per_epoch: u64) -> Result<Trainer> {
    let training = Training {
        seed: SEED,
        ..Training::from(update(steps_per_epoch))
    };
    let n_filters = args.n_filters;
    Trainer::in_session(session, "cifar10", &training, |m| network(m, n_filters))
}

/// Gradient descent, with averages of the weights.
pub fn update(steps_per_epoch: u64) -> Update {
    let sgd = Sgd {
        // A tenth after 350 epochs.
        learning_rate: Schedule::staircase(0.1, 0.1, 350 * steps_per_epoch),
        ..Sgd::default()
    };
    Update {
        average: Some(0.9999),
        average_warms_up: true,
        ..sgd.into()
    }
}

/// The network, its loss with the decay of weights, and the accuracy.
pub fn network(m: &mut Model, n_filters: usize) -> Result<Objective> {
    let image = [Dim::from("batch"), 3.into(), 24.into(), 24.into()];
    let image = m.input("image", DType::F32, image);
    let label = m.input("label", DType::U8, [Dim::from("batch")]);
    let (total, accuracy) = tower(m, image, label, n_filters, "")?;
    let average = m.moving_average("total_loss/average", total, 0.9)?;
    let objective = Objective::new(total).metric("accuracy", accuracy);
    Ok(objective.metric("average_loss", average))
}

/// The loss with the decay of weights, and the accuracy, by values of a name scope.
pub fn tower(
    m: &mut Model,
    image: ValueId,
    label: ValueId,
    n_filters: usize,
    scope: &str,
) -> Result<(ValueId, ValueId)> {
    let x = m.scope("conv1", |m| convolution(m, image, n_filters, 0.0))?;
    let x = m.max_pool(x, OVERLAPPING)?;
    let x = m.local_response_norm(x, LRN)?;
    let x = m.scope("conv2", |m| convolution(m, x, n_filters, 0.1))?;
    let x = m.local_response_norm(x, LRN)?;
    let x = m.max_pool(x, OVERLAPPING)?;
    let x = m.flatten(x)?;
    let x = m.scope("local3", |m| decayed(m, x, 384))?;
    let x = m.scope("local4", |m| decayed(m, x, 192))?;
    let logits = m.scope("softmax_linear", |m| m.dense(x, 10))?;
    let accuracy = loss::accuracy(m.builder(), logits, label)?;
    let own = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    m.collect("losses", own)?;
    let losses = m.collection("losses", scope);
    Ok((loss::add_n(m.builder(), &losses)?, accuracy))
}

/// Windows of 3 x 3 with steps of 2.
const OVERLAPPING: Pool2d = Pool2d {
    size: [3, 3],
    strides: [2, 2],
    same: true,
};

const LRN: Lrn = Lrn {
    size: 9,
    alpha: 0.001 / 9.0,
    beta: 0.75,
    bias: 1.0,
};

fn convolution(m: &mut Model, x: ValueId, filters: usize, bias: f64) -> Result<ValueId> {
    let conv = Conv2d {
        has_bias: false,
        init: Init::TruncatedNormal {
            mean: 0.0,
            deviation: 0.05,
        },
        ..Conv2d::same(filters, 5)
    };
    let x = m.conv2d(x, conv)?;
    let bias = m.variable("bias", &[filters, 1, 1], Init::Constant(bias))?;
    let x = m.builder().add_(x, bias)?;
    let x = m.activation(x, Activation::Relu)?;
    m.collect("summaries", x)?;
    Ok(x)
}

/// A dense layer whose weights decay.
fn decayed(m: &mut Model, x: ValueId, units: usize) -> Result<ValueId> {
    let shape = m.builder().ty(x).shape.clone();
    let inputs = shape.last().and_then(Dim::as_usize).unwrap_or(0);
    let init = Init::TruncatedNormal {
        mean: 0.0,
        deviation: 0.04,
    };
    let weights = m.variable("weights", &[inputs, units], init)?;
    let bias = m.variable("bias", &[units], Init::Constant(0.1))?;
    let b = m.builder();
    let decay = loss::l2(b, weights)?;
    let factor = b.scalar(DType::F32, 0.004);
    let decay = b.mul(decay, factor)?;
    let x = b.matmul(x, weights)?;
    let x = b.add_(x, bias)?;
    m.collect("losses", decay)?;
    let x = m.activation(x, Activation::Relu)?;
    m.collect("summaries", x)?;
    Ok(x)
}

/// Images to train on, and held-out ones, of which the middle counts.
fn data(args: &Args) -> Result<(Box<dyn Dataset>, Box<dyn Dataset>)> {
    let (images, held_out): (Box<dyn Dataset>, Box<dyn Dataset>) = match &args.data {
        Some(folder) => {
            let files = (1..=5).map(|i| folder.join(format!("data_batch_{i}.bin")));
            let held_out = FileDataset::cifar10([folder.join("test_batch.bin")])?;
            (Box::new(FileDataset::cifar10(files)?), Box::new(held_out))
        }
        None => {
            let held_out = shapes(args.n_images / 5, 2)?;
            (Box::new(shapes(args.n_images, 1)?), Box::new(held_out))
        }
    };
    let middle = ImageOp::CenterCrop {
        height: 24,
        width: 24,
    };
    let held_out = held_out.images("image", [middle, ImageOp::Standardize]);
    Ok((images, Box::new(held_out)))
}

/// Images of 32 x 32 pixels of ten shapes, in random colours, places, sizes and noise.
pub fn shapes(n: usize, seed: u64) -> Result<TensorDataset> {
    let mut random = Random(seed);
    let mut images = Vec::with_capacity(n * 3 * 32 * 32);
    for i in 0..n {
        draw(i % 10, &mut random, &mut images);
    }
    let labels: Vec<u8> = (0..n).map(|i| (i % 10) as u8).collect();
    let images = Tensor::from_slice(&images, &[n, 3, 32, 32])?;
    TensorDataset::new([
        ("image", images),
        ("label", Tensor::from_slice(&labels, &[n])?),
    ])
}

fn draw(class: usize, random: &mut Random, image: &mut Vec<u8>) {
    let (x, y, radius) = (
        random.within(13.0, 19.0),
        random.within(13.0, 19.0),
        random.within(6.0, 9.0),
    );
    let mut colours = || [0; 3].map(|_| random.within(30.0, 225.0));
    let (back, mut front) = (colours(), colours());
    // One channel at least shows the shape.
    let channel = random.within(0.0, 3.0) as usize;
    front[channel] = if back[channel] < 128.0 { 220.0 } else { 35.0 };
    for channel in 0..3 {
        for i in 0..32 * 32 {
            let (u, v) = (
                ((i % 32) as f64 - x) / radius,
                ((i / 32) as f64 - y) / radius,
            );
            let colour = if is_inside(class, u, v) {
                front[channel]
            } else {
                back[channel]
            };
            image.push((colour + random.within(-25.0, 25.0)).clamp(0.0, 255.0) as u8);
        }
    }
}

/// True for a point of a shape around the origin.
fn is_inside(class: usize, u: f64, v: f64) -> bool {
    let (square, far) = (u * u + v * v, u.abs().max(v.abs()));
    let stripe = |x: f64| (x * 2.5 + 10.25).rem_euclid(2.0) < 1.0;
    match class {
        0 => square < 1.0,
        1 => far < 0.9,
        2 => u.abs() + v.abs() < 1.1,
        3 => (0.35..1.0).contains(&square),
        4 => far < 1.0 && (u.abs() < 0.3 || v.abs() < 0.3),
        5 => far < 1.0 && (u.abs() - v.abs()).abs() < 0.3,
        6 => v.abs() < 0.9 && u.abs() < (v + 0.9) / 1.8,
        7 => far < 0.95 && stripe(v),
        8 => far < 0.95 && stripe(u),
        _ => (0.6..0.95).contains(&far),
    }
}

/// Random numbers of a seed (Steele et al., 2014: SplitMix64).
struct Random(u64);

impl Random {
    fn within(&mut self, low: f64, high: f64) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let part = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        low + (high - low) * part
    }
}
