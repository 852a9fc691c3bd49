//! Time of a run on a session's own threads, and on a rayon pool of the host program.
//!
//! `cargo run --release -p gristmill-benches --example host_pool -- MODEL.onnx [DIM=N ..]`: medians of runs in turn, in microseconds.

use gristmill::testing::{Rng, random_tensor};
use gristmill::{Compiled, Error, Options, Result, Session, Settings, Tensor, onnx};
use std::sync::Arc;
use std::time::Instant;

/// Rounds in turn, after three that do not count.
const N_ROUNDS: usize = 60;

fn main() {
    if let Err(e) = run() {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn run() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let path = words.next();
    let path = path.ok_or_else(|| Error::invalid("host_pool MODEL.onnx [DIM=N ..]"))?;
    let dim = |word: String| {
        let (name, size) = word.split_once('=')?;
        Some((name.to_owned(), size.parse().ok()?))
    };
    let options = Options {
        dims: words.filter_map(dim).collect(),
        ..Options::default()
    };
    let pool = rayon::ThreadPoolBuilder::new().build();
    let pool = pool.map_err(|e| Error::invalid(e.to_string()))?;
    let model = onnx::load(&path)?;
    let settings = [Settings::default(), Settings::rayon(&Arc::new(pool))];
    let [own, host] = settings.map(|s| Session::new(&s)?.compile(&model, &options));
    let models = [own?, host?];
    let inputs = inputs(&models[0])?;
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..N_ROUNDS + 3 {
        for (model, times) in models.iter().zip(&mut times) {
            let started = Instant::now();
            model.run_ordered(&inputs)?;
            if round >= 3 {
                times.push(started.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    let [own, host] = times.map(median);
    println!("{path}\town {own:.0}\trayon {host:.0}\t{:.2}", host / own);
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Random inputs; integers are zeros.
fn inputs(model: &Compiled) -> Result<Vec<Tensor>> {
    let mut rng = Rng(1);
    let inputs = model.inputs().iter().map(|(name, ty)| {
        let shape = ty.static_shape();
        let shape = shape.ok_or_else(|| Error::invalid(format!("no size for {name}: {ty}")))?;
        match ty.dtype.is_float() {
            true => Ok(random_tensor(&mut rng, ty.dtype, &shape, false)),
            false => Ok(Tensor::zeros(ty.dtype, &shape)?),
        }
    });
    inputs.collect()
}
