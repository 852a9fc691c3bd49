//! Time of a step of training: a perceptron, LeNet, the network of the TensorFlow tutorial for CIFAR-10
//! without its normalisation and with it, an LSTM over rows of images, convolutions over videos, and a
//! GPT of four blocks, on random data.
//!
//! `training [MODEL] [--threads T] [--replicas N [--strategy central] [--all-reduce
//! one-device|exchange]] [--write FOLDER]`. With several replicas, as many logical CPUs share the
//! threads and the batch; with `central`, the first one has the weights. Each row: name, median time of
//! a step in ms, time from the model to the end of the first step, and peak memory of the process so
//! far. `benches/peers/training.py` runs it beside PyTorch, in turn. With `--write` graphs of steps and
//! inputs are written instead, for `gristmill bench STEP.ir --set batch=128 --inputs STEP.npz`.

use gristmill::ir::{Dim, ScalarOp, ValueId};
use gristmill::place::DeviceSet;
use gristmill::testing::{Rng, random_tensor};
use gristmill::train::{
    Adam, BatchNorm, Conv2d, Conv3d, Init, Lrn, Model, Objective, Pool2d, Strategy, Trainer,
    Training, loss, step_graph,
};
use gristmill::{AllReduce, DType, Result, Session, Settings, Tensor, write_npz};
use gristmill_runtime::command::times::peak_rss_bytes;
use std::time::Instant;

/// Steps that are timed.
const N_STEPS: usize = 30;

/// A model.
struct Row {
    name: &'static str,
    batch: usize,
    /// Shape of an example: floats, or tokens where there is a label for each.
    shape: &'static [usize],
    has_tokens: bool,
    classes: usize,
    /// From the examples to logits.
    body: fn(&mut Model, ValueId) -> Result<ValueId>,
}

const fn images(
    name: &'static str,
    shape: &'static [usize],
    body: fn(&mut Model, ValueId) -> Result<ValueId>,
) -> Row {
    Row {
        name,
        batch: 128,
        shape,
        has_tokens: false,
        classes: 10,
        body,
    }
}

/// Number of tokens.
const VOCABULARY: usize = 65;
/// Tokens of a sequence.
const LENGTH: usize = 64;
/// Width of the GPT.
const WIDTH: usize = 128;

const ROWS: [Row; 7] = [
    images("mlp", &[784], mlp),
    images("lenet", &[1, 28, 28], lenet),
    images("cifar", &[3, 24, 24], cifar),
    images("cifar_lrn", &[3, 24, 24], cifar_lrn),
    images("lstm", &[28, 28], lstm),
    Row {
        batch: 8,
        ..images("video", &[3, 8, 56, 56], video)
    },
    Row {
        name: "gpt",
        batch: 12,
        shape: &[LENGTH],
        has_tokens: true,
        classes: VOCABULARY,
        body: gpt,
    },
];

fn main() {
    if let Err(e) = run() {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn run() -> Result<()> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let threads = flag(&mut words, "--threads").map_or(Some(1), |n| n.parse().ok());
    let replicas = flag(&mut words, "--replicas");
    let n_replicas = replicas.and_then(|n| n.parse().ok()).unwrap_or(1);
    let way = match flag(&mut words, "--all-reduce").as_deref() {
        Some("one-device") => AllReduce::OneDevice,
        Some("exchange") => AllReduce::Exchange,
        _ => AllReduce::Auto,
    };
    let is_central = flag(&mut words, "--strategy").is_some_and(|name| name == "central");
    let devices = Vec::new;
    let strategy = match (n_replicas, is_central) {
        (1, _) => Strategy::OneDevice,
        (_, false) => Strategy::Mirrored { devices: devices() },
        (_, true) => Strategy::CentralStorage {
            central: None,
            devices: devices(),
        },
    };
    let folder = flag(&mut words, "--write");
    let wanted = |row: &&Row| words.first().is_none_or(|name| name == row.name);
    let mut rows = ROWS.iter().filter(wanted);
    match folder {
        Some(folder) => rows.try_for_each(|row| write(row, &folder)),
        None => rows.try_for_each(|row| time(row, threads, n_replicas, &strategy, way)),
    }
}

/// Takes a flag and its value out of the arguments.
fn flag(words: &mut Vec<String>, name: &str) -> Option<String> {
    let at = words.iter().position(|w| w == name)?;
    words.drain(at..(at + 2).min(words.len())).nth(1)
}

fn training() -> Training {
    Training::from(Adam::default())
}

/// Writes the graph of a step, and inputs of a batch.
fn write(row: &Row, folder: &str) -> Result<()> {
    let path = |end: &str| format!("{folder}/{}.{end}", row.name);
    let graph = step_graph(row.name, &training(), |m| row.objective(m))?;
    let io = |e: std::io::Error| gristmill::Error::invalid(e.to_string());
    std::fs::write(path("ir"), graph.to_string()).map_err(io)?;
    let (x, label) = row.batch()?;
    write_npz(path("npz"), [("x", &x), ("label", &label)])?;
    Ok(())
}

fn time(
    row: &Row,
    threads: Option<usize>,
    n_replicas: usize,
    strategy: &Strategy,
    way: AllReduce,
) -> Result<()> {
    let name = row.name;
    let begin = Instant::now();
    let devices = DeviceSet::parse(&format!("cpu:{n_replicas}"), threads.unwrap_or(1))?;
    let session = Session::new(&Settings {
        threads,
        devices,
        ..Settings::default()
    })?;
    let mut training = Training {
        strategy: strategy.clone(),
        ..training()
    };
    training.options.all_reduce = way;
    let trainer = Trainer::in_session(&session, name, &training, |m| row.objective(m))?;
    let (x, label) = row.batch()?;
    let step = || trainer.step([("x", x.clone()), ("label", label.clone())]);
    step()?;
    let first = begin.elapsed().as_secs_f64();
    (0..3).try_for_each(|_| step().map(drop))?;
    let mut times = Vec::with_capacity(N_STEPS);
    for _ in 0..N_STEPS {
        let begin = Instant::now();
        step()?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_unstable_by(f64::total_cmp);
    let peak = peak_rss_bytes().unwrap_or_default() >> 20;
    let batch = [("x", x.clone()), ("label", label.clone())];
    let batch = batch.map(|(name, t)| (name.to_owned(), t)).to_vec();
    let planned = trainer.program().plan(&[x, label])?;
    println!(
        "{name}\t{:.3} ms\tfirst step after {first:.2} s\tpeak {peak} MiB\tpredicted {:.3} ms",
        times[times.len() / 2],
        planned.placement.makespan.0 as f64 / 1e6,
    );
    if let Some(executable) = trainer.executable_for(&batch)? {
        let passes = executable.lowered.report.passes.iter();
        let passes: Vec<String> = passes
            .map(|(pass, ns)| format!("{} {:.0}", pass.name(), *ns as f64 / 1e6))
            .collect();
        println!("\tcompilation (ms): {}", passes.join(", "));
    }
    Ok(())
}

impl Row {
    fn objective(&self, m: &mut Model) -> Result<Objective> {
        let (x, label) = self.inputs(m);
        let logits = (self.body)(m, x)?;
        let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
        Ok(Objective::new(loss))
    }

    fn inputs(&self, m: &mut Model) -> (ValueId, ValueId) {
        let batch = || [Dim::from("batch")].into_iter();
        let dims = batch().chain(self.shape.iter().map(|&n| n.into()));
        match self.has_tokens {
            true => {
                let dims: Vec<Dim> = dims.collect();
                let x = m.input("x", DType::I64, dims.clone());
                (x, m.input("label", DType::I64, dims))
            }
            false => {
                let x = m.input("x", DType::F32, dims);
                (x, m.input("label", DType::I64, batch()))
            }
        }
    }

    /// Random examples and labels.
    fn batch(&self) -> Result<(Tensor, Tensor)> {
        let shape = [&[self.batch], self.shape].concat();
        let classes = |n: usize| (0..n).map(|i| (i % self.classes) as i64);
        let classes = |shape: &[usize]| {
            let all: Vec<i64> = classes(shape.iter().product()).collect();
            Tensor::from_slice(&all, shape)
        };
        Ok(match self.has_tokens {
            true => (classes(&shape)?, classes(&shape)?),
            false => {
                let x = random_tensor(&mut Rng(1), DType::F32, &shape, false);
                (x, classes(&[self.batch])?)
            }
        })
    }
}

fn relu(m: &mut Model, x: ValueId) -> Result<ValueId> {
    m.builder().map(ScalarOp::Relu, &[x])
}

fn layers(m: &mut Model, mut x: ValueId, units: &[usize]) -> Result<ValueId> {
    for (i, &n) in units.iter().enumerate() {
        x = m.scope(&format!("dense{i}"), |m| m.dense(x, n))?;
        if i + 1 < units.len() {
            x = relu(m, x)?;
        }
    }
    Ok(x)
}

fn mlp(m: &mut Model, x: ValueId) -> Result<ValueId> {
    layers(m, x, &[512, 256, 10])
}

/// Two convolutions with pooling, and dense layers.
fn pooled(m: &mut Model, mut x: ValueId, filters: [usize; 2], units: &[usize]) -> Result<ValueId> {
    for (i, n) in filters.into_iter().enumerate() {
        x = m.scope(&format!("conv{i}"), |m| m.conv2d(x, Conv2d::same(n, 5)))?;
        x = relu(m, x)?;
        x = m.max_pool2d(x, [2, 2])?;
    }
    let x = m.flatten(x)?;
    layers(m, x, units)
}

fn lenet(m: &mut Model, x: ValueId) -> Result<ValueId> {
    pooled(m, x, [6, 16], &[120, 84, 10])
}

fn cifar(m: &mut Model, x: ValueId) -> Result<ValueId> {
    pooled(m, x, [64, 64], &[384, 192, 10])
}

/// With overlapping pools and local response normalisation.
fn cifar_lrn(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let pool = Pool2d {
        size: [3, 3],
        strides: [2, 2],
        same: true,
    };
    let lrn = Lrn {
        size: 9,
        alpha: 0.001 / 9.0,
        beta: 0.75,
        bias: 1.0,
    };
    let x = m.scope("conv0", |m| m.conv2d(x, Conv2d::same(64, 5)))?;
    let x = relu(m, x)?;
    let x = m.max_pool(x, pool)?;
    let x = m.local_response_norm(x, lrn)?;
    let x = m.scope("conv1", |m| m.conv2d(x, Conv2d::same(64, 5)))?;
    let x = relu(m, x)?;
    let x = m.local_response_norm(x, lrn)?;
    let x = m.max_pool(x, pool)?;
    let x = m.flatten(x)?;
    layers(m, x, &[384, 192, 10])
}

/// Three convolutions over time and place with normalisation, of which the last two halve all extents,
/// and the mean of each channel.
fn video(m: &mut Model, mut x: ValueId) -> Result<ValueId> {
    for (i, (filters, stride)) in [(16, 1), (32, 2), (64, 2)].into_iter().enumerate() {
        let conv = Conv3d {
            strides: [stride; 3],
            has_bias: false,
            ..Conv3d::same(filters, 3)
        };
        x = m.scope(&format!("block{i}"), |m| {
            let x = m.conv3d(x, conv)?;
            let x = m.batch_norm(x, BatchNorm::default())?;
            relu(m, x)
        })?;
        if i == 0 {
            x = m.max_pool3d(x, [1, 2, 2])?;
        }
    }
    let x = m.global_avg_pool3d(x)?;
    layers(m, x, &[10])
}

/// The rows of an image as a sequence.
fn lstm(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let [_, last] = m.scope("lstm", |m| m.lstm(x, 128))?;
    m.scope("dense", |m| m.dense(last, 10))
}

/// The GPT that nanoGPT's readme has for a CPU.
fn gpt(m: &mut Model, tokens: ValueId) -> Result<ValueId> {
    let init = Init::Normal {
        mean: 0.0,
        deviation: 0.02,
    };
    let mut x = m.scope("tokens", |m| m.embedding(tokens, [VOCABULARY, WIDTH], init))?;
    let places = m.variable("places", &[LENGTH, WIDTH], init)?;
    x = m.builder().add_(x, places)?;
    for i in 0..4 {
        x = m.scope(&format!("block{i}"), |m| block(m, x))?;
    }
    x = m.scope("norm", |m| m.layer_norm(x))?;
    m.scope("head", |m| m.dense(x, VOCABULARY))
}

fn block(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let normed = m.scope("norm0", |m| m.layer_norm(x))?;
    let seen = m.scope("attention", |m| m.self_attention(normed, 4, true))?;
    let x = m.builder().add_(x, seen)?;
    let normed = m.scope("norm1", |m| m.layer_norm(x))?;
    let wide = m.scope("up", |m| m.dense(normed, 4 * WIDTH))?;
    let wide = m.builder().map(ScalarOp::Gelu, &[wide])?;
    let narrow = m.scope("down", |m| m.dense(wide, WIDTH))?;
    m.builder().add_(x, narrow)
}
