//! `gristmill calibrate`, and what other verbs take from the cache folder.

use super::load::file_error;
use super::{outln, print_json};
use crate::calibrate::{self, Calibration, Effort};
use crate::cost::store::{self, load_times, times_path};
use crate::cost::{DeviceProfile, Measured, WorkClass};
use crate::error::{Error, Result};
use crate::{DType, units as format};
use clap::Args;
use gristmill_runtime::cpu;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// Arguments of `calibrate`.
#[derive(Args)]
pub struct CalibrateArgs {
    /// Write the profile here, as `--target` takes it, and leave the cache alone.
    #[arg(short, long, value_name = "PROFILE.toml")]
    output: Option<PathBuf>,
    /// Threads to measure with; one per core by default.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn calibrate(args: &CalibrateArgs) -> Result<()> {
    let n_threads = args.threads.map_or_else(|| cpu::probe().logical_cores, usize::from);
    let path = match &args.output {
        Some(path) => path.clone(),
        None => calibrate::path(&store::folder().ok_or_else(|| {
            Error::invalid("there is no cache folder").hint("-o FILE, or GRISTMILL_CACHE_DIR with a folder")
        })?),
    };
    let made = calibrate::calibrate(&machine(), n_threads, Effort::default())?;
    match &args.output {
        Some(path) => std::fs::write(path, made.target_text()).map_err(|e| file_error(path, e))?,
        None => store::replace(&path, &made.to_text())?,
    }
    if args.json {
        let link = json!({ "latency_ns": made.link.latency.0, "bytes_per_second": made.link.bytes_per_second });
        let rates = json!({ "file": path.display().to_string(), "one": rates_json(&made.one), "all": rates_json(&made.all), "link": link });
        print_json("calibrate", rates);
        return Ok(());
    }
    for p in [&made.one, &made.all] {
        outln!("{} thread{}: {}", p.n_threads, if p.n_threads == 1 { "" } else { "s" }, rates(p));
    }
    let gbs = made.link.bytes_per_second as f64 / 1e9;
    outln!("link: {} and {gbs:.1} GB/s", format::time_ns(made.link.latency.0));
    outln!("written to {}", path.display());
    Ok(())
}

/// The machine that measurements are of.
pub fn machine() -> String {
    format!("{} ({:?})", cpu::probe().model, gristmill_kernels::Isa::current())
}

/// The calibration of this machine, if there is one. Warns about a file that does not fit.
pub fn calibration() -> Option<Calibration> {
    let (found, warning) = calibrate::load(&calibrate::path(&store::folder()?), &calibrate::name(&machine()));
    warning.iter().for_each(|w| eprintln!("warning: {w}"));
    found
}

/// Times that were measured on this machine. Warns about a file that does not fit.
pub fn measured() -> Arc<Measured> {
    let Some(folder) = store::folder() else { return Arc::default() };
    let (measured, warning) = load_times(&times_path(&folder), &machine());
    warning.iter().for_each(|w| eprintln!("warning: {w}"));
    Arc::new(measured)
}

/// Rates for people.
pub fn rates(p: &DeviceProfile) -> String {
    let share = |class| p.peak_flops(DType::F32) * p.efficiency(class, DType::F32) / 1e9;
    format!(
        "products {:.0} GFLOP/s f32, convolutions {:.0}, memory {:.1} GB/s, cache {:.0} GB/s, launch {}",
        share(WorkClass::MatMul),
        share(WorkClass::Conv),
        p.memory_bandwidth / 1e9,
        p.cache_bandwidth / 1e9,
        format::time_ns(p.launch.0)
    )
}

/// Rates for machines.
pub fn rates_json(p: &DeviceProfile) -> Value {
    let share = |class| p.efficiency(class, DType::F32);
    json!({ "threads": p.n_threads, "flops_f32": p.flops_f32, "memory_bytes_per_second": p.memory_bandwidth,
        "cache_bytes_per_second": p.cache_bandwidth, "cache_bytes": p.cache_bytes.0, "launch_ns": p.launch.0,
        "efficiency_f32": WorkClass::NAMES.iter().map(|(c, n)| ((*n).to_owned(), json!(share(*c)))).collect::<serde_json::Map<_, _>>() })
}
