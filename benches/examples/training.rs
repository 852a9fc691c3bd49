//! Time of a step of training: a perceptron, LeNet and the network of the TensorFlow tutorial for CIFAR-10 without its
//! normalisation, on random data.
//!
//! `training [MODEL] [--threads T]`. Each row: name, median time of a step in ms, time from the model to the end of the first
//! step, and peak memory of the process. `benches/peers/training.py` runs it beside PyTorch, in turn.

use gristmill::ir::{Dim, ScalarOp, ValueId};
use gristmill::testing::{Rng, random_tensor};
use gristmill::train::{Adam, Conv2d, Model, Objective, Trainer, Training, loss};
use gristmill::{DType, Options, Result, Tensor};
use std::time::Instant;

/// Steps that are timed.
const N_STEPS: usize = 30;

/// Name, batch, shape of an example, and the body.
type Row = (
    &'static str,
    usize,
    &'static [usize],
    fn(&mut Model, ValueId) -> Result<ValueId>,
);

const ROWS: [Row; 3] = [
    ("mlp", 128, &[784], mlp),
    ("lenet", 128, &[1, 28, 28], lenet),
    ("cifar", 128, &[3, 24, 24], cifar),
];

fn main() {
    if let Err(e) = run() {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn run() -> Result<()> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let threads = match words.iter().position(|w| w == "--threads") {
        Some(at) => words.drain(at..).nth(1).and_then(|n| n.parse().ok()),
        None => Some(1),
    };
    let wanted = |row: &&Row| words.first().is_none_or(|name| name == row.0);
    ROWS.iter()
        .filter(wanted)
        .try_for_each(|row| time(row, threads))
}

fn time(row: &Row, threads: Option<usize>) -> Result<()> {
    let (name, batch, shape, body) = *row;
    let begin = Instant::now();
    let training = Training {
        seed: 0,
        update: Adam::default().into(),
        options: Options {
            threads,
            ..Options::default()
        },
    };
    let trainer = Trainer::new(name, &training, |m| {
        let dims = [Dim::from("batch")]
            .into_iter()
            .chain(shape.iter().map(|&n| n.into()));
        let x = m.input("x", DType::F32, dims);
        let label = m.input("label", DType::I64, [Dim::from("batch")]);
        let logits = body(m, x)?;
        Ok(Objective::new(loss::sparse_cross_entropy(
            m.builder(),
            logits,
            label,
        )?))
    })?;
    let x = random_tensor(&mut Rng(1), DType::F32, &[&[batch], shape].concat(), false);
    let labels: Vec<i64> = (0..batch as i64).map(|i| i % 10).collect();
    let label = Tensor::from_slice(&labels, &[batch])?;
    let step = || trainer.step([("x", x.clone()), ("label", label.clone())]);
    step()?;
    let first = begin.elapsed().as_secs_f64();
    (0..3).try_for_each(|_| step().map(drop))?;
    let mut times = Vec::new();
    for _ in 0..N_STEPS {
        let begin = Instant::now();
        step()?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_unstable_by(f64::total_cmp);
    println!(
        "{name}\t{:.3} ms\tfirst step after {first:.2} s",
        times[times.len() / 2]
    );
    Ok(())
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
