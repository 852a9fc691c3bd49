//! A model with symbolic dims in many shapes: the time to make its executable, the first run of
//! each, later runs, and the memory that is resident.
//!
//! `shapes MODEL [--threads N] [--specialise] SHAPE ...`, each SHAPE like `batch=1,seq=128`. Prints
//! one row per shape, in the given order. With `--specialise` every shape is also compiled by
//! itself, with its dims fixed, and run in turn; the ratio of medians is printed.

use gristmill::ir::{Bindings, Type};
use gristmill::{Compiled, DType, Error, Options, Session, Settings, Tensor, onnx};
use std::collections::BTreeMap;
use std::time::Instant;

/// Runs of each shape after the first.
const N_RUNS: usize = 15;

fn main() {
    if let Err(e) = run() {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn run() -> Result<(), Error> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let threads = flag_value(&mut words, "--threads")?;
    let is_compared = take(&mut words, "--specialise");
    let [model, shapes @ ..] = words.as_slice() else {
        let usage = "usage: shapes MODEL [--threads N] [--specialise] batch=1,seq=128 ...";
        return Err(Error::invalid(usage));
    };
    let model = onnx::load(model)?;
    let settings = Settings {
        threads,
        ..Settings::default()
    };
    let compiled = Session::new(&settings)?.compile(&model, &Options::default())?;
    println!(
        "{:<24}{:>12}{:>12}{:>12}{:>12}{:>12}{:>10}",
        "shape", "made ms", "first ms", "least ms", "p50 ms", "of alone", "MiB"
    );
    for shape in shapes {
        let dims = parse(shape)?;
        let alone = match is_compared {
            true => Some(compiled_alone(&model, &settings, &dims)?),
            false => None,
        };
        let times = times(&compiled, alone.as_ref(), &dims)?;
        drop(alone);
        let [least, p50] = [0, N_RUNS / 2].map(|i| times.later[i]);
        let alone = times
            .alone
            .get(N_RUNS / 2)
            .map_or(f64::NAN, |alone| p50 / alone);
        let (made, first, resident) = (times.made, times.first, resident_mib());
        println!(
            "{shape:<24}{made:>12.2}{first:>12.2}{least:>12.2}{p50:>12.2}{alone:>12.3}{resident:>10}"
        );
    }
    Ok(())
}

fn compiled_alone(
    model: &onnx::Model,
    settings: &Settings,
    dims: &Bindings,
) -> Result<Compiled, Error> {
    let options = Options {
        dims: dims.clone(),
        ..Options::default()
    };
    Session::new(settings)?.compile(model, &options)
}

/// Milliseconds to make an executable, of its first run, and of later ones in ascending order; and
/// of the runs, in turn with these, of a model that is compiled for these dims only.
struct Times {
    made: f64,
    first: f64,
    later: Vec<f64>,
    alone: Vec<f64>,
}

fn times(compiled: &Compiled, alone: Option<&Compiled>, dims: &Bindings) -> Result<Times, Error> {
    let inputs = inputs(compiled.inputs(), dims)?;
    let timed = |model: &Compiled| -> Result<f64, Error> {
        let started = Instant::now();
        model.run(inputs.clone())?;
        Ok(started.elapsed().as_secs_f64() * 1e3)
    };
    let started = Instant::now();
    compiled.for_inputs(&compiled.bind(inputs.clone())?)?;
    let made = started.elapsed().as_secs_f64() * 1e3;
    let first = timed(compiled)?;
    alone.map(&timed).transpose()?;
    let mut times = Times {
        made,
        first,
        later: Vec::new(),
        alone: Vec::new(),
    };
    for _ in 0..N_RUNS {
        times.later.push(timed(compiled)?);
        times.alone.extend(alone.map(&timed).transpose()?);
    }
    times.later.sort_by(f64::total_cmp);
    times.alone.sort_by(f64::total_cmp);
    Ok(times)
}

/// Ones of integers, which are good indices and masks, and small numbers of floats.
fn inputs(types: &[(String, Type)], dims: &Bindings) -> Result<BTreeMap<String, Tensor>, Error> {
    let input = |(name, ty): &(String, Type)| {
        let shape = ty.shape.bind(dims).as_static();
        let shape = shape.ok_or_else(|| Error::invalid(format!("{name}: {ty} needs more dims")))?;
        let n = shape.iter().product();
        let tensor = match ty.dtype {
            DType::F32 => {
                let values: Vec<f32> = (0..n).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
                Tensor::from_slice(&values, &shape)
            }
            DType::I64 => Tensor::from_slice(&vec![1i64; n], &shape),
            other => return Err(Error::unsupported(format!("{name}: inputs of {other}"))),
        };
        Ok((name.clone(), tensor?))
    };
    types.iter().map(input).collect()
}

fn parse(shape: &str) -> Result<Bindings, Error> {
    let dim = |text: &str| {
        let (name, size) = text.split_once('=')?;
        Some((name.to_owned(), size.parse().ok()?))
    };
    let dims: Option<Bindings> = shape.split(',').map(dim).collect();
    dims.ok_or_else(|| Error::invalid(format!("{shape:?} is no list of dims")))
}

fn take(words: &mut Vec<String>, flag: &str) -> bool {
    let at = words.iter().position(|w| w == flag);
    at.inspect(|&at| drop(words.remove(at))).is_some()
}

fn flag_value(words: &mut Vec<String>, flag: &str) -> Result<Option<usize>, Error> {
    let Some(at) = words.iter().position(|w| w == flag) else {
        return Ok(None);
    };
    words.remove(at);
    let value = (at < words.len()).then(|| words.remove(at));
    let number = value.and_then(|v| v.parse().ok());
    number
        .map(Some)
        .ok_or_else(|| Error::invalid(format!("{flag} takes a number")))
}

/// Resident memory of this process; 0 where the system does not tell.
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}
