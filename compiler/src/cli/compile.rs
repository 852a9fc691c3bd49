//! `gristmill compile`: compile ahead of time, to a file.

use super::args::{CompileArgs, DimFlags};
use super::output::{errln, outln};
use super::{load, parse, print_json};
use crate::aot::{self, Extra, Sizes, Written};
use crate::error::{Error, Result};
use crate::ir::Bindings;
use crate::options::Options;
use crate::units::{plural, size, time_ns};
use clap::Args;
use gristmill_runtime::command::given::dims_text;
use serde_json::json;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `compile`.
#[derive(Args)]
pub struct CompileVerbArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    /// The image to write, e.g. `model.gmx`: `run`, `bench`, `inspect` and `check` take it in the place of a model.
    #[arg(short, long, value_name = "OUT.gmx")]
    output: PathBuf,
    /// Name of the model in the image.
    #[arg(long)]
    name: Option<String>,
    /// Leave the names of nodes, values and kernels out of the image: errors of a run and profilers then have none.
    #[arg(long)]
    no_names: bool,
    /// Let rates, times and placements that were measured on this machine decide as well; the image then differs from machine to machine.
    #[arg(long)]
    measured: bool,
    /// Sizes may be lists here: `--shape batch=1,8,32` makes a variant for each.
    #[command(flatten)]
    compile: CompileArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn compile(args: &CompileVerbArgs) -> Result<()> {
    check_output(&args.output)?;
    let flags = &args.compile;
    let looks_inside = flags.verbose > 0 || flags.dump_dir.is_some() || flags.log_device_placement;
    if looks_inside {
        let message = "-v, --dump-dir and --log-device-placement are for run, bench and dump";
        return Err(Error::invalid(message));
    }
    let started = Instant::now();
    let (flags, sizes) = lists(&args.compile)?;
    let options = options(args, &flags)?;
    let source = load::model(&args.model)?;
    let extra = Extra {
        name: args.name.as_deref(),
        is_nameless: args.no_names,
        progress: &progress,
    };
    let written = aot::write_with(source, &options, &sizes, &args.output, &extra)?;
    let time = started.elapsed().as_nanos() as u64;
    if args.json {
        print_json("compile", to_json(&written, time));
    } else {
        print(&args.output, &written, time);
    }
    Ok(())
}

/// Errors for files that are not written yet, before anything is compiled.
fn check_output(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|e| e == "gmx") {
        return Ok(());
    }
    let message = format!("{}: images are the one kind of output", path.display());
    Err(Error::unsupported(message).hint("-o MODEL.gmx"))
}

fn options(args: &CompileVerbArgs, flags: &CompileArgs) -> Result<Options> {
    let options = match args.measured {
        true => flags.options()?,
        false => flags.reproducible_options()?,
    };
    match options.ranges.first_key_value() {
        None => Ok(options),
        Some((dim, range)) => {
            let message =
                format!("--shape {dim}={range}: an image has code for sizes, not for ranges");
            Err(Error::unsupported(message).hint(format!("--shape {dim}=1,8,32")))
        }
    }
}

/// The flags without lists of sizes, and the lists.
fn lists(args: &CompileArgs) -> Result<(CompileArgs, Sizes)> {
    let (lists, single): (Vec<String>, Vec<String>) = args
        .dims
        .shape
        .iter()
        .cloned()
        .partition(|s| s.contains(','));
    let mut sizes = Sizes::new();
    for text in &lists {
        let (dim, list) = parse::pair(text, "--shape", "DIM=N,N,..")?;
        let of = |n: &str| parse::dim_size(n).map_err(|e| e.context(format!("--shape {text:?}")));
        let mut list: Vec<usize> = list.split(',').map(of).collect::<Result<_>>()?;
        list.sort_unstable();
        list.dedup();
        if sizes.insert(dim.to_owned(), list).is_some() {
            return Err(Error::invalid(format!("--shape: {dim:?} is given twice")));
        }
    }
    let dims = DimFlags {
        set: args.dims.set.clone(),
        shape: single,
    };
    let flags = CompileArgs {
        dims,
        ..args.clone()
    };
    Ok((flags, sizes))
}

/// Says on a terminal which of several variants is compiled.
fn progress(i: usize, n: usize, dims: &Bindings) {
    if n > 1 && std::io::stderr().is_terminal() {
        errln!(
            "variant {} of {n}: {}",
            i + 1,
            dims_text(dims.clone().into_iter().collect::<Vec<_>>().iter())
        );
    }
}

fn print(path: &Path, written: &Written, time: u64) {
    let n = plural(written.about.variants.len(), "variant");
    let (bytes, time) = (size(written.bytes() as u64), time_ns(time));
    outln!("{}: {bytes}, {n}, in {time}", path.display());
}

fn to_json(written: &Written, time: u64) -> serde_json::Value {
    let variants = written.about.variants.iter();
    let variants = variants.map(|v| v.dims.iter().cloned().collect::<Bindings>());
    json!({
        "bytes": written.bytes(),
        "variants": variants.collect::<Vec<_>>(),
        "compile_ns": time,
    })
}
