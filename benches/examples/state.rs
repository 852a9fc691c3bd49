//! Updates of variables beside the machine's copy rate: a counter, a moving average of weights, and
//! Adam's step, over `N` parameters of `f32`.
//!
//! `state [N] [--threads T]`, N being 10 million unless it is given. Each row: median time of a run,
//! bytes that it must read and write (each byte once), and the time beside copying as many bytes
//! with `memcpy` on as many threads, in turn.

use gristmill::ir::{Graph, GraphBuilder, ScalarOp, ValueId};
use gristmill::{Compiled, DType, Options, Result, Session, Settings, Tensor};
use std::time::Instant;

/// Rounds in turn.
const N_ROUNDS: usize = 15;

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
    let n = words.first().and_then(|n| n.parse().ok());
    let n = n.unwrap_or(10_000_000);
    println!(
        "{:<10}{:>10}{:>10}{:>12}",
        "update", "ms", "MB", "of copying"
    );
    row("counter", &counter()?, 1, 8, threads)?;
    row("average", &average(n)?, n, 12 * n, threads)?;
    row("adam", &adam(n)?, n, 28 * n, threads)
}

fn row(name: &str, graph: &Graph, n: usize, bytes: usize, threads: Option<usize>) -> Result<()> {
    let session = Session::new(&Settings {
        threads,
        ..Settings::default()
    })?;
    let model = session.compile(graph, &Options::default())?;
    let gradient = Tensor::from_vec(vec![0.25f32; n], &[n])?;
    step(&model, &gradient)?;
    step(&model, &gradient)?;
    let (from, mut to) = (vec![1u8; bytes / 2], vec![0u8; bytes / 2]);
    let (mut updates, mut copies) = (Vec::new(), Vec::new());
    for _ in 0..N_ROUNDS {
        let start = Instant::now();
        step(&model, &gradient)?;
        updates.push(start.elapsed().as_secs_f64() * 1e3);
        let start = Instant::now();
        copy(&from, &mut to, threads.unwrap_or(2));
        copies.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let (update, copy) = (median(updates), median(copies));
    let megabytes = bytes as f64 * 1e-6;
    println!(
        "{name:<10}{update:>10.3}{megabytes:>10.1}{:>12.2}",
        update / copy
    );
    Ok(())
}

fn step(model: &Compiled, gradient: &Tensor) -> Result<()> {
    model.run([("g", gradient.clone())]).map(drop)
}

fn copy(from: &[u8], to: &mut [u8], threads: usize) {
    let share = from.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let mut shares = from.chunks(share).zip(to.chunks_mut(share));
        let first = shares.next();
        for (from, to) in shares {
            scope.spawn(|| to.copy_from_slice(from));
        }
        if let Some((from, to)) = first {
            to.copy_from_slice(from);
        }
    });
    std::hint::black_box(to);
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn counter() -> Result<Graph> {
    let mut b = GraphBuilder::new("counter");
    let g = b.input("g", DType::F32, [1]);
    let old = b.variable("count", Tensor::zeros(DType::F32, &[1])?)?;
    let new = b.add_(old, g)?;
    let new = b.assign_variable("count", new)?;
    b.output("count", new);
    b.finish()
}

/// The number of steps, for a result.
fn steps(b: &mut GraphBuilder) -> Result<ValueId> {
    let old = b.variable("steps", Tensor::zeros(DType::F32, &[])?)?;
    let one = b.scalar(DType::F32, 1.0);
    let new = b.add_(old, one)?;
    b.assign_variable("steps", new)
}

/// `s += 0.01 * (g - s)`.
fn average(n: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("average");
    let g = b.input("g", DType::F32, [n]);
    let s = b.variable("s", Tensor::zeros(DType::F32, &[n])?)?;
    let difference = b.map(ScalarOp::Sub, &[g, s])?;
    let new = moved(&mut b, s, difference, 0.01)?;
    b.assign_variable("s", new)?;
    let steps = steps(&mut b)?;
    b.output("steps", steps);
    b.finish()
}

/// `x + factor * y`.
fn moved(b: &mut GraphBuilder, x: ValueId, y: ValueId, factor: f64) -> Result<ValueId> {
    let factor = b.scalar(DType::F32, factor);
    let scaled = b.map(ScalarOp::Mul, &[y, factor])?;
    b.add_(x, scaled)
}

/// Adam's step without bias correction, whose factors are scalars.
fn adam(n: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("adam");
    let g = b.input("g", DType::F32, [n]);
    let zeros = || Tensor::zeros(DType::F32, &[n]);
    let (w, m, v) = (
        b.variable("w", zeros()?)?,
        b.variable("m", zeros()?)?,
        b.variable("v", zeros()?)?,
    );
    let difference = b.map(ScalarOp::Sub, &[g, m])?;
    let m = moved(&mut b, m, difference, 0.1)?;
    let square = b.map(ScalarOp::Mul, &[g, g])?;
    let difference = b.map(ScalarOp::Sub, &[square, v])?;
    let v = moved(&mut b, v, difference, 0.001)?;
    let root = b.map(ScalarOp::Sqrt, &[v])?;
    let epsilon = b.scalar(DType::F32, 1e-8);
    let root = b.add_(root, epsilon)?;
    let direction = b.map(ScalarOp::Div, &[m, root])?;
    let w = moved(&mut b, w, direction, -0.001)?;
    for (name, value) in [("w", w), ("m", m), ("v", v)] {
        b.assign_variable(name, value)?;
    }
    let steps = steps(&mut b)?;
    b.output("steps", steps);
    b.finish()
}
