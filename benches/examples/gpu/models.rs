//! Whole models: results against the CPU's, and the time of a run.

use super::{Arguments, options};
use gristmill::interp::compare::allclose;
use gristmill::testing::{Rng, random_tensor};
use gristmill::{Error, Result, Tensor, compile, onnx};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Error that is allowed, relative to the scale of a tensor: sums of other orders through many layers.
const TOLERANCE: f64 = 1e-4;
/// Time that is spent on a model's runs.
const SPENT: Duration = Duration::from_secs(3);

/// Every model of a folder; false when one gives wrong results.
pub fn run(folder: &Path, arguments: &Arguments) -> Result<bool> {
    let unreadable = |e: std::io::Error| Error::invalid(format!("--models {}: {e}", folder.display()));
    let mut names: Vec<_> = fs::read_dir(folder).map_err(unreadable)?.filter_map(|e| Some(e.ok()?.path())).collect();
    names.retain(|path| path.join("model.onnx").exists());
    names.sort();
    println!("model\tbatch\tagainst the CPU\tp50\tp99");
    let mut good = true;
    for path in names {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        for batch in [1, 32] {
            match one(&path, batch, arguments) {
                Ok((row, right)) => {
                    println!("{name}\t{batch}\t{row}");
                    good &= right;
                }
                Err(e) => {
                    println!("{name}\t{batch}\t{e}");
                    good = false;
                }
            }
        }
    }
    Ok(good)
}

/// Random inputs; symbolic dims called `batch` have its size, others 1.
fn inputs(compiled: &gristmill::Compiled, batch: usize) -> Vec<Tensor> {
    let rng = &mut Rng(5);
    let tensor = |ty: &gristmill::ir::Type| {
        let extent =
            |d: &gristmill::ir::Dim| d.as_usize().unwrap_or(if d.as_symbol() == Some("batch") { batch } else { 1 });
        let shape: Vec<usize> = ty.shape.iter().map(extent).collect();
        match ty.dtype.is_float() {
            true => random_tensor(rng, ty.dtype, &shape, false),
            // Token ids and masks: every model takes zeros.
            false => Tensor::zeros(ty.dtype, &shape).expect("models have inputs that fit"),
        }
    };
    compiled.inputs().iter().map(|(_, ty)| ty).map(tensor).collect()
}

fn one(path: &Path, batch: usize, arguments: &Arguments) -> Result<(String, bool)> {
    let model = onnx::load(path.join("model.onnx"))?;
    let mut cpu = options("cpu:1", arguments.device)?;
    cpu.threads = None;
    let on_cpu = compile(&model, &cpu)?;
    let tensors = inputs(&on_cpu, batch);
    let expected = on_cpu.for_inputs(&tensors)?.run(&tensors)?;
    let compiled = compile(&model, &options("gpu:1", arguments.device)?)?;
    let executable = compiled.for_inputs(&tensors)?;
    let found = executable.run(&tensors)?;
    let errors = expected.iter().zip(found.iter()).map(|((_, e), (_, f))| {
        let c = allclose(e, f, 0.0, 0.0);
        if c.ok { 0.0 } else { c.scaled_err() }
    });
    let worst = errors.fold(0.0, f64::max);
    let mut outputs = found.into_tensors();
    let (mut times, started) = (Vec::new(), Instant::now());
    while times.len() < 5 || (started.elapsed() < SPENT && !arguments.quick) {
        let begun = Instant::now();
        executable.run_into(&tensors, &mut outputs)?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    let quantile = |q: usize| times[(times.len() * q / 100).min(times.len() - 1)].as_secs_f64() * 1e3;
    let good = worst <= TOLERANCE;
    let verdict = if good { "good" } else { "WRONG" };
    Ok((format!("{verdict} ({worst:.1e})\t{:.3} ms\t{:.3} ms", quantile(50), quantile(99)), good))
}
