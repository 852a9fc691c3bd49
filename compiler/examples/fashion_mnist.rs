//! Trains on Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 60,000 images of clothes to learn from, 10,000 that are held out.
//!
//! `cargo run --release -p gristmill --example fashion_mnist [FOLDER] [mlp|lenet] [SEED] [one|mirrored|async|hogwild] [DEVICES]`, where the folder has
//! the four IDX files, compressed or not: `train-images-idx3-ubyte.gz` and so on. Debian's package `dataset-fashion-mnist` brings them to
//! `/usr/share/datasets/fashion-mnist`. On several devices (`cpu:2`), `mirrored` shares each batch, and with `async` and `hogwild` each device takes batches of
//! its own.
//!
//! Logs for TensorBoard and the weights of each epoch go to a new folder in `target/fashion_mnist`. The last weights are then loaded
//! and evaluated, as another program could do.

use gristmill::ir::{Dim, ScalarOp, ValueId};
use gristmill::place::DeviceSet;
use gristmill::train::{
    Adam, Callback, Checkpoints, Conv2d, Dataset, EpochReport, Every, Fit, FitContext, FitReport,
    ImageOp, LearningRateScheduler, Metrics, Model, ModelCheckpoint, Objective, Schedule, Strategy,
    TensorBoard, TensorDataset, Trainer, Training, Updates, latest_checkpoint, loss, read_idx,
};
use gristmill::{DType, Deal, Error, Result, Session, Settings};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Instant, SystemTime};

const BATCH: usize = 64;
const EPOCHS: u64 = 12;
const DATA: &str = "/usr/share/datasets/fashion-mnist";
const RUNS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/fashion_mnist");

/// A network.
#[derive(Clone, Copy)]
pub enum Net {
    /// Dense layers 784-512-256-10.
    Mlp,
    /// Two convolutions, 5 by 5, and dense layers 120-84-10.
    LeNet,
}

impl FromStr for Net {
    type Err = Error;

    fn from_str(name: &str) -> Result<Net> {
        match name {
            "mlp" => Ok(Net::Mlp),
            "lenet" => Ok(Net::LeNet),
            _ => Err(Error::invalid(format!(
                "network {name:?}: expected mlp or lenet"
            ))),
        }
    }
}

/// The devices of a training, and their strategy.
pub struct On {
    devices: DeviceSet,
    strategy: Strategy,
}

impl On {
    /// Devices by their names, and a strategy by its name.
    pub fn parse(devices: &str, strategy: &str) -> Result<On> {
        let strategy = match strategy {
            "one" => Strategy::OneDevice,
            "mirrored" => Strategy::Mirrored {
                devices: Vec::new(),
            },
            "async" | "hogwild" => Strategy::ParameterServer {
                servers: Vec::new(),
                workers: Vec::new(),
                deal: Deal::BySize,
                updates: match strategy {
                    "async" => Updates::Asynchronous,
                    _ => Updates::Hogwild,
                },
            },
            _ => {
                let message =
                    format!("strategy {strategy:?}: expected one, mirrored, async or hogwild");
                return Err(Error::invalid(message));
            }
        };
        let n_threads = std::thread::available_parallelism().map_or(1, Into::into);
        let devices = DeviceSet::parse(devices, n_threads)?;
        Ok(On { devices, strategy })
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let data = PathBuf::from(arguments.next().unwrap_or_else(|| DATA.into()));
    let name = arguments.next().unwrap_or_else(|| "mlp".into());
    let net = name.parse()?;
    let seed = arguments.next().unwrap_or_else(|| "1".into());
    let number = seed.parse();
    let number = number.map_err(|e| Error::invalid(format!("seed {seed:?}: {e}")))?;
    let strategy = arguments.next().unwrap_or_else(|| "one".into());
    let on = arguments.next().unwrap_or_else(|| "cpu:1".into());
    let on = On::parse(&on, &strategy)?;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let run = Path::new(RUNS).join(format!("{name}-{seed}-{}", now.as_secs()));
    println!("tensorboard --logdir {}", run.join("logs").display());
    let begin = Instant::now();
    let report = train(&data, &run, net, number, &on)?;
    for worker in &report.workers {
        let (n, mean, most) = (
            worker.n_steps,
            worker.mean_staleness,
            worker.largest_staleness,
        );
        println!(
            "worker on {}: {n} steps, mean staleness {mean:.2}, at most {most}",
            worker.device
        );
    }
    let seconds = begin.elapsed().as_secs_f64();
    let metrics = evaluate(&data, &run, net)?;
    println!("held out, with the last checkpoint: {metrics}; training took {seconds:.1} s");
    Ok(())
}

/// Trains a network on the images of a folder. Logs and weights go to the folder of the run.
pub fn train(data: &Path, run: &Path, net: Net, seed: u64, on: &On) -> Result<FitReport> {
    let (examples, held_out) = (images(data, "train")?, images(data, "t10k")?);
    let checkpoints = Checkpoints::new(run.join("checkpoints"), EPOCHS as usize)?;
    let mut board = TensorBoard::new(run.join("logs"));
    let mut saved = ModelCheckpoint::newest(checkpoints, Every::Epochs(1)).weights_only();
    let mut rate = LearningRateScheduler::new(decay);
    let fit = Fit {
        epochs: EPOCHS,
        seed,
        held_out: Some(&held_out),
        ..Fit::new(&examples, BATCH)
    };
    let callbacks: &mut [&mut dyn Callback] =
        &mut [&mut board, &mut saved, &mut rate, &mut PrintLr];
    trainer(net, seed, on)?.fit(&fit, callbacks)
}

/// The learning rate of an epoch.
fn decay(epoch: u64) -> f64 {
    match epoch {
        0..3 => 1e-3,
        3..7 => 1e-4,
        _ => 1e-5,
    }
}

/// Prints the learning rate of each epoch, with its metrics.
struct PrintLr;

impl Callback for PrintLr {
    fn name(&self) -> String {
        "PrintLr".to_owned()
    }

    fn epoch_end(&mut self, _: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        let (number, trained, rate) = (epoch.epoch + 1, &epoch.trained, epoch.learning_rate);
        print!("epoch {number}/{EPOCHS}: learning rate {rate}: {trained}");
        if let Some(held_out) = &epoch.held_out {
            print!("; held out: {held_out}");
        }
        println!("; {:.0} images/s", epoch.examples_per_s);
        Ok(())
    }
}

/// The held-out metrics of a network with the last weights of a run.
pub fn evaluate(data: &Path, run: &Path, net: Net) -> Result<Metrics> {
    let folder = run.join("checkpoints");
    let last = latest_checkpoint(&folder)?;
    let last =
        last.ok_or_else(|| Error::invalid(format!("{}: no checkpoint", folder.display())))?;
    let trainer = trainer(net, 0, &On::parse("cpu:1", "one")?)?;
    trainer.load_weights(last)?;
    trainer.evaluate(&images(data, "t10k")?, BATCH)
}

/// Images and classes of one of the two parts.
fn images(folder: &Path, part: &str) -> Result<impl Dataset> {
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

fn trainer(net: Net, seed: u64, on: &On) -> Result<Trainer> {
    let adam = Adam {
        learning_rate: Schedule::Variable(decay(0)),
        ..Adam::default()
    };
    let training = Training {
        seed,
        strategy: on.strategy.clone(),
        ..Training::from(adam)
    };
    let session = Session::new(&Settings {
        devices: on.devices.clone(),
        ..Settings::default()
    })?;
    Trainer::in_session(&session, "fashion", &training, |m| objective(m, net))
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
