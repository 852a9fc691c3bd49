//! Whole models: results against the CPU's, and the time of a run.

use super::{Arguments, setup};
use gristmill::interp::compare::allclose;
use gristmill::ir::{Dim, Type};
use gristmill::testing::{Rng, random_tensor};
use gristmill::{Compiled, Error, Precision, Result, Tensor, onnx};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Precision of products, and the error that is allowed, relative to the scale of a tensor: sums of other orders, or rounding, through many layers.
const PRECISIONS: [(Precision, f64); 2] = [(Precision::F32, 1e-4), (Precision::Bf16, 5e-2)];
/// Sizes of a symbolic batch.
const BATCHES: [usize; 2] = [1, 32];
/// Time that is spent on a model's runs.
const SPENT: Duration = Duration::from_secs(3);

/// Every model of a folder; false when one gives wrong results, or there is none.
pub fn run(folder: &Path, arguments: &Arguments) -> Result<bool> {
    let unreadable =
        |e: std::io::Error| Error::invalid(format!("--models {}: {e}", folder.display()));
    let mut paths: Vec<_> = fs::read_dir(folder)
        .map_err(unreadable)?
        .filter_map(|e| Some(e.ok()?.path()))
        .collect();
    paths.retain(|path| path.join("model.onnx").exists());
    paths.sort();
    if paths.is_empty() {
        return Err(Error::invalid(format!(
            "--models {}: there is no NAME/model.onnx",
            folder.display()
        )));
    }
    println!("model\tbatch\tproducts\tagainst the CPU\tp50\tp99");
    let mut good = true;
    for path in paths {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        good &= all_batches(&name, &path, arguments).unwrap_or_else(|e| {
            println!("{name}\t{e}");
            false
        });
    }
    Ok(good)
}

/// Batch 1 and 32 of a model whose batch is a symbol; otherwise the one that it has.
fn all_batches(name: &str, path: &Path, arguments: &Arguments) -> Result<bool> {
    let model = onnx::load(path.join("model.onnx"))?;
    let mut cpu = setup("cpu:1", arguments.device)?;
    cpu.settings.threads = None;
    let on_cpu = cpu.compile(&model)?;
    let types: Vec<&Type> = on_cpu.inputs().iter().map(|(_, ty)| ty).collect();
    let symbol = types
        .first()
        .and_then(|ty| ty.shape.first())
        .and_then(Dim::as_symbol);
    let mut good = true;
    for batch in if symbol.is_some() {
        &BATCHES[..]
    } else {
        &BATCHES[..1]
    } {
        let tensors = inputs(&on_cpu, symbol, *batch)?;
        let rows = tensors
            .first()
            .and_then(|t| t.shape().first())
            .copied()
            .unwrap_or(1);
        let expected = on_cpu.for_inputs(&tensors)?.run(&tensors)?.into_tensors();
        for (precision, tolerance) in PRECISIONS {
            let on_gpu = setup("gpu:1", arguments.device)?.with(|o| o.precision = precision);
            let compiled = on_gpu.compile(&model)?;
            let (row, right) = one(&compiled, &tensors, &expected, tolerance, arguments)?;
            println!("{name}\t{rows}\t{precision}\t{row}");
            good &= right;
        }
    }
    Ok(good)
}

/// Random inputs; the symbol of the batch has its size. Errors when another dim is a symbol, for
/// there is no size for it.
fn inputs(compiled: &Compiled, symbol: Option<&str>, batch: usize) -> Result<Vec<Tensor>> {
    let rng = &mut Rng(5);
    let mut tensor = |(name, ty): &(String, Type)| {
        let extent = |d: &Dim| match (d.as_usize(), d.as_symbol()) {
            (Some(n), _) => Ok(n),
            (None, s) if s == symbol => Ok(batch),
            _ => Err(Error::invalid(format!(
                "input {name:?} is {ty}: only the batch may be a symbol here"
            ))),
        };
        let shape: Vec<usize> = ty.shape.iter().map(extent).collect::<Result<_>>()?;
        match ty.dtype.is_float() {
            true => Ok(random_tensor(rng, ty.dtype, &shape, false)),
            // Token ids, and masks that leave nothing out: every model takes ones.
            false => Ok(Tensor::from_f64s(
                ty.dtype,
                &shape,
                &vec![1.0; shape.iter().product()],
            )?),
        }
    };
    compiled.inputs().iter().map(&mut tensor).collect()
}

fn one(
    compiled: &Compiled,
    tensors: &[Tensor],
    expected: &[Tensor],
    tolerance: f64,
    arguments: &Arguments,
) -> Result<(String, bool)> {
    let executable = compiled.for_inputs(tensors)?;
    let mut outputs = executable.run(tensors)?.into_tensors();
    let (mut times, started) = (Vec::new(), Instant::now());
    while times.len() < 5 || (started.elapsed() < SPENT && !arguments.quick) {
        let begun = Instant::now();
        executable.run_into(tensors, &mut outputs)?;
        times.push(begun.elapsed());
    }
    // Results of the last run: by then it is launched as a graph.
    let errors = expected.iter().zip(&outputs).map(|(e, f)| {
        let c = allclose(e, f, 0.0, 0.0);
        if c.ok { 0.0 } else { c.scaled_err() }
    });
    let worst = errors.fold(0.0, f64::max);
    times.sort_unstable();
    let quantile =
        |q: usize| times[(times.len() * q / 100).min(times.len() - 1)].as_secs_f64() * 1e3;
    let good = worst <= tolerance;
    let verdict = if good { "good" } else { "WRONG" };
    Ok((
        format!(
            "{verdict} ({worst:.1e})\t{:.3} ms\t{:.3} ms",
            quantile(50),
            quantile(99)
        ),
        good,
    ))
}
