//! Times of `fit` with its callbacks, and of the input pipeline.
//!
//! `fit loop [THREADS] [ROUNDS]`: epochs of LeNet over 60,000 images, in turn: the plain loop of `step`; `fit` with a log for TensorBoard and a
//! checkpoint per epoch; the same with histograms of gradients and weights each 100 steps. Medians, and ratios to the plain loop.
//! `fit pipeline THREADS`: images per second of crops, flips, brightness, contrast and standardisation alone.
//! `fit cifar THREADS`: images per second of the network of the example `cifar10` with that pipeline.
//! `benches/peers/pipeline.py` runs the last two beside PyTorch's `DataLoader`, in turn.

#[path = "../../compiler/examples/cifar10.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod cifar10;

use gristmill::ir::{Dim, ScalarOp};
use gristmill::testing::{Rng, random_tensor};
use gristmill::train::{
    Adam, Callback, Checkpoints, Conv2d, Dataset, Every, Fit, Loading, Model, ModelCheckpoint,
    Objective, Summaries, TensorBoard, TensorDataset, Trainer, Training, loss,
};
use gristmill::{DType, Error, Result, Session, Settings, Tensor};
use std::path::Path;
use std::time::Instant;

const BATCH: usize = 128;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| match words.get(i).map(|w| w.parse()) {
        None => Ok(default),
        Some(Ok(n)) => Ok(n),
        Some(Err(_)) => Err(Error::invalid("expected a number")),
    };
    let threads = number(1, 1)?;
    match words.first().map(String::as_str) {
        Some("loop") => loops(threads, number(2, 5)?),
        Some("pipeline") => pipeline(threads),
        Some("cifar") => cifar(threads),
        _ => Err(Error::invalid("expected loop, pipeline or cifar")),
    }
}

fn lenet(m: &mut Model) -> Result<Objective> {
    let batch = || Dim::from("batch");
    let mut x = m.input("x", DType::F32, [batch(), 1.into(), 28.into(), 28.into()]);
    let label = m.input("label", DType::I64, [batch()]);
    for (i, n) in [6, 16].into_iter().enumerate() {
        x = m.scope(&format!("conv{i}"), |m| m.conv2d(x, Conv2d::same(n, 5)))?;
        x = m.builder().map(ScalarOp::Relu, &[x])?;
        x = m.max_pool2d(x, [2, 2])?;
    }
    x = m.flatten(x)?;
    for (i, n) in [120, 84].into_iter().enumerate() {
        x = m.scope(&format!("dense{i}"), |m| m.dense(x, n))?;
        x = m.builder().map(ScalarOp::Relu, &[x])?;
        m.scope(&format!("dense{i}"), |m| m.collect("summaries", x))?;
    }
    let logits = m.scope("logits", |m| m.dense(x, 10))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    Ok(Objective::new(loss))
}

fn trainer(threads: usize) -> Result<Trainer> {
    let session = Session::new(&Settings {
        threads: Some(threads),
        ..Settings::default()
    })?;
    Trainer::in_session(&session, "lenet", &Training::from(Adam::default()), lenet)
}

fn loops(threads: usize, rounds: usize) -> Result<()> {
    let n = 60_000;
    let x = random_tensor(&mut Rng(1), DType::F32, &[n, 1, 28, 28], false);
    let label: Vec<i64> = (0..n as i64).map(|i| i % 10).collect();
    let label = Tensor::from_slice(&label, &[n])?;
    let data = TensorDataset::new([("x", x), ("label", label)])?;
    let folder = std::env::temp_dir().join(format!("gristmill-fit-{}", std::process::id()));
    let trainers = [trainer(threads)?, trainer(threads)?, trainer(threads)?];
    let mut times = [const { Vec::new() }; 3];
    for round in 0..=rounds as u64 {
        for (kind, trainer) in trainers.iter().enumerate() {
            let at = folder.join(format!("{kind}-{round}"));
            let begin = Instant::now();
            match kind {
                0 => plain(trainer, &data, round)?,
                kind => with_callbacks(trainer, &data, round, &at, kind == 2)?,
            }
            // The first round compiles.
            if round > 0 {
                times[kind].push(begin.elapsed().as_secs_f64());
            }
        }
    }
    std::fs::remove_dir_all(&folder).map_err(|e| Error::invalid(e.to_string()))?;
    let medians = times.map(|mut t| {
        t.sort_unstable_by(f64::total_cmp);
        t[t.len() / 2]
    });
    for (name, time) in ["plain loop", "fit", "fit with histograms"]
        .iter()
        .zip(medians)
    {
        println!("{name}: {time:.3} s an epoch, {:.3}", time / medians[0]);
    }
    Ok(())
}

fn plain(trainer: &Trainer, data: &TensorDataset, seed: u64) -> Result<()> {
    for batch in data.shuffled(BATCH, seed, 0) {
        trainer.step(batch?)?;
    }
    Ok(())
}

fn with_callbacks(
    trainer: &Trainer,
    data: &TensorDataset,
    seed: u64,
    folder: &Path,
    histograms: bool,
) -> Result<()> {
    let mut board = TensorBoard::new(folder.join("logs"));
    if histograms {
        board = board.summaries(Summaries::new(Every::Steps(100)));
    }
    let checkpoints = Checkpoints::new(folder.join("checkpoints"), 3)?;
    let mut saved = ModelCheckpoint::newest(checkpoints, Every::Epochs(1));
    let callbacks: &mut [&mut dyn Callback] = &mut [&mut board, &mut saved];
    let fit = Fit {
        seed,
        ..Fit::new(data, BATCH)
    };
    trainer.fit(&fit, callbacks).map(drop)
}

/// Drawn images, changed as the tutorial changes them.
fn images() -> Result<impl Dataset> {
    Ok(cifar10::shapes(12_800, 1)?.images("image", cifar10::DISTORTIONS))
}

fn loading(threads: usize) -> Loading {
    Loading {
        threads,
        ..Loading::default()
    }
}

fn pipeline(threads: usize) -> Result<()> {
    let data = images()?;
    let empty = Trainer::new("empty", &Training::from(Adam::default()), |m| {
        let image = [Dim::from("batch"), 3.into(), 24.into(), 24.into()];
        m.input("image", DType::F32, image);
        m.input("label", DType::U8, [Dim::from("batch")]);
        let w = m.variable("w", &[], gristmill::train::Init::Constant(1.0))?;
        let loss = m.builder().mul(w, w)?;
        Ok(Objective::new(loss))
    })?;
    speed(&empty, &data, threads)
}

fn cifar(threads: usize) -> Result<()> {
    let args = cifar10::Args::new("unused");
    let session = Session::new(&Settings {
        threads: Some(threads),
        ..Settings::default()
    })?;
    let trainer = cifar10::trainer_in(&session, &args, 100)?;
    speed(&trainer, &images()?, threads)
}

/// Images per second of an epoch after the first.
fn speed(trainer: &Trainer, data: &dyn Dataset, threads: usize) -> Result<()> {
    let fit = Fit {
        epochs: 2,
        drops_last: true,
        loading: loading(threads),
        ..Fit::new(data, BATCH)
    };
    let report = trainer.fit(&fit, &mut [])?;
    let last = report.epochs.last().map_or(0.0, |e| e.examples_per_s);
    println!("{last:.0} images/s");
    Ok(())
}
