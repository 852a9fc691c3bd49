//! `gristmill run`: compile for this machine and run once.

use super::args::CompileArgs;
use super::load::{self, InputFlags};
use super::{dump, outln, print_json};
use crate::compiled::{Compiled, Outputs, Source, compile};
use crate::error::{Error, ErrorKind, Result};
use crate::interp::compare::{Comparison, allclose};
use crate::options::{Options, Precision};
use crate::units as format;
use crate::{DType, Tensor};
use clap::Args;
use gristmill_runtime::npy;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments of `run`.
#[derive(Args)]
pub struct RunArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    #[command(flatten)]
    compile: CompileArgs,
    /// Inputs by name from a NumPy archive.
    #[arg(long, value_name = "FILE.npz")]
    inputs: Option<PathBuf>,
    /// One input from a NumPy file.
    #[arg(long, value_name = "NAME=FILE.npy")]
    input: Vec<String>,
    /// Inputs `input_N.pb` and expected outputs `output_N.pb` of an ONNX test-data directory; results are compared.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["inputs", "input"])]
    test_data: Option<PathBuf>,
    /// Class labels (integers) to compare with the arg-max of the first output over its last axis; prints the accuracy.
    #[arg(long, value_name = "FILE.npy")]
    labels: Option<PathBuf>,
    /// Write the outputs to a NumPy archive.
    #[arg(long, value_name = "FILE.npz")]
    outputs: Option<PathBuf>,
    /// Seed of random inputs.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Largest allowed relative difference from expected outputs.
    #[arg(long, default_value_t = 1e-3)]
    rtol: f64,
    /// Largest allowed absolute difference; by default 1e-5 of the greatest expected magnitude of each output.
    #[arg(long)]
    atol: Option<f64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &RunArgs) -> Result<()> {
    let started = Instant::now();
    let source = load::model(&args.model)?;
    let options = args.compile.options()?;
    let compiled = compile(source.clone(), &options)?;
    let inputs = gather_inputs(args, &compiled)?;
    let executable = compiled.for_inputs(&inputs)?;
    let compile_ns = started.elapsed().as_nanos() as u64;
    executable.lowered.report.print_warnings();
    args.compile
        .log_placement(&executable.lowered.placement, &executable.lowered.clusters);
    if let Some(dir) = &args.compile.dump_dir {
        dump::write_all(&executable.lowered, dir)?;
    }
    if args.compile.verbose > 0 {
        eprint!("{}", executable.lowered.report.text(args.compile.verbose));
    }
    let started = Instant::now();
    let outputs = executable.run(&inputs)?;
    let run_ns = started.elapsed().as_nanos() as u64;
    if let Some(path) = &args.outputs {
        npy::write_npz(path, outputs.iter())?;
    }
    let accuracy = args
        .labels
        .as_ref()
        .map(|path| accuracy(&outputs, path))
        .transpose()?;
    let changes = if options.precision == Precision::F32 {
        Vec::new()
    } else {
        changes(source, &options, &inputs, &outputs)?
    };
    if args.json {
        print_json(
            "run",
            json!({ "compile_ns": compile_ns, "run_ns": run_ns, "outputs": outputs.iter().map(summary_json).collect::<Vec<_>>(), "accuracy": accuracy.map(|(r, n)| r as f64 / n.max(1) as f64),
                "precision": options.precision.to_string(), "changes": changes.iter().map(change_json).collect::<Vec<_>>() }),
        );
    } else {
        outputs
            .iter()
            .for_each(|(name, t)| outln!("{}", summary(name, t)));
        if let Some((right, total)) = accuracy {
            outln!(
                "accuracy {:.2} % ({right} of {total})",
                100.0 * right as f64 / total.max(1) as f64
            );
        }
        outln!(
            "compiled in {}, ran in {}",
            format::time_ns(compile_ns),
            format::time_ns(run_ns)
        );
    }
    for (name, change) in &changes {
        eprintln!(
            "{name}: {} instead of the model's precision: {change}",
            options.precision
        );
    }
    compare_with_expected(args, &outputs)
}

/// How far the results of a lower precision are from those of the model's own, by output.
fn changes(
    source: Source,
    options: &Options,
    inputs: &[Tensor],
    outputs: &Outputs,
) -> Result<Vec<(String, Comparison)>> {
    let exact = Options {
        precision: Precision::F32,
        ..options.clone()
    };
    let exact = compile(source, &exact)?.for_inputs(inputs)?.run(inputs)?;
    let change = |((name, want), (_, got)): ((&str, &Tensor), (&str, &Tensor))| {
        (
            name.to_owned(),
            allclose(want, got, f64::INFINITY, f64::INFINITY),
        )
    };
    Ok(exact.iter().zip(outputs.iter()).map(change).collect())
}

fn change_json((name, c): &(String, Comparison)) -> serde_json::Value {
    json!({ "name": name, "max_abs": c.max_abs_err, "max_rel": c.max_rel_err, "max_abs_of_scale": c.scaled_err() })
}

fn gather_inputs(args: &RunArgs, compiled: &Compiled) -> Result<Vec<Tensor>> {
    let Some(dir) = &args.test_data else {
        let flags = InputFlags {
            npz: args.inputs.as_deref(),
            npy: &args.input,
            seed: args.seed,
        };
        let (inputs, random) = load::inputs(compiled, &flags)?;
        if !random.is_empty() {
            eprintln!(
                "random inputs (--seed {}): {}",
                args.seed,
                random.join(", ")
            );
        }
        return Ok(inputs);
    };
    let mut given = load::test_data(dir, "input")?;
    // Names in the files may be missing; then they stand for the inputs in order.
    for ((name, _), (declared, _)) in given.iter_mut().zip(compiled.inputs()) {
        if name.is_empty() {
            name.clone_from(declared);
        }
    }
    compiled.bind(given).map_err(|e| e.context(dir.display()))
}

fn compare_with_expected(args: &RunArgs, outputs: &Outputs) -> Result<()> {
    let Some(dir) = &args.test_data else {
        return Ok(());
    };
    let expected = load::test_data(dir, "output")?;
    if expected.is_empty() {
        return Err(Error::invalid(format!(
            "{}: there is no output_0.pb to compare with",
            dir.display()
        )));
    }
    let mut failed = Vec::new();
    for (i, (name, want)) in expected.iter().enumerate() {
        let got = outputs
            .get(name)
            .or_else(|| outputs.iter().nth(i).map(|(_, t)| t));
        let got = got.ok_or_else(|| {
            Error::invalid(format!(
                "expected output {name:?} is not an output of the model"
            ))
        })?;
        let scale = allclose(want, got, args.rtol, 0.0).max_abs_expected;
        let c = allclose(
            want,
            got,
            args.rtol,
            args.atol.unwrap_or((1e-5 * scale).max(1e-7)),
        );
        if !args.json {
            outln!("{name}: {c}");
        }
        if !c.ok {
            failed.push(name.as_str());
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "outputs differ from the expected ones: {}",
                failed.join(", ")
            ),
        ))
    }
}

/// Right answers and total: arg-max over the last axis of the first output against labels.
fn accuracy(outputs: &Outputs, path: &std::path::Path) -> Result<(usize, usize)> {
    let labels = Tensor::from_npy(path)?.to_f64s();
    let (name, scores) = outputs
        .iter()
        .next()
        .ok_or_else(|| Error::invalid("the model has no output to compare with labels"))?;
    let classes = scores.shape().last().copied().unwrap_or(0);
    if classes == 0 || scores.len() / classes != labels.len() {
        return Err(Error::invalid(format!(
            "{}: {} labels do not fit output {name:?} of shape {:?}",
            path.display(),
            labels.len(),
            scores.shape()
        )));
    }
    let values = scores.to_f64s();
    let best = |row: &[f64]| {
        row.iter()
            .enumerate()
            .fold(
                (0, f64::NEG_INFINITY),
                |b, (i, &v)| if v > b.1 { (i, v) } else { b },
            )
            .0
    };
    let right = values
        .chunks(classes)
        .zip(&labels)
        .filter(|(row, label)| best(row) as f64 == **label)
        .count();
    Ok((right, labels.len()))
}

fn statistics(t: &Tensor) -> (f64, f64, f64) {
    let v = t.to_f64s();
    let (min, max) = v
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &x| {
            (a.min(x), b.max(x))
        });
    (min, v.iter().sum::<f64>() / v.len() as f64, max)
}

/// `name: f32[2, 3]  min -1.2  mean 0.1  max 3.4  [0.1, 0.2, ..]`.
fn summary(name: &str, t: &Tensor) -> String {
    let mut text = format!("{name}: {}{:?}", t.dtype(), t.shape());
    if t.is_empty() {
        return text;
    }
    let (min, mean, max) = statistics(t);
    let first: Vec<String> = t
        .to_f64s()
        .iter()
        .take(6)
        .map(|v| number(*v, t.dtype()))
        .collect();
    let dots = if t.len() > 6 { ", .." } else { "" };
    text.push_str(&format!(
        "  min {}  mean {mean:.6}  max {}  [{}{dots}]",
        number(min, t.dtype()),
        number(max, t.dtype()),
        first.join(", ")
    ));
    text
}

fn number(v: f64, dtype: DType) -> String {
    if dtype.is_float() {
        format!("{v:.6}")
    } else {
        format!("{v}")
    }
}

fn summary_json((name, t): (&str, &Tensor)) -> serde_json::Value {
    let (min, mean, max) = statistics(t);
    let first: Vec<f64> = t.to_f64s().into_iter().take(6).collect();
    json!({ "name": name, "dtype": t.dtype().name(), "shape": t.shape(), "min": min, "mean": mean, "max": max, "first": first })
}
