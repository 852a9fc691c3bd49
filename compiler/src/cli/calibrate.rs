//! `gristmill calibrate`, and what other verbs take from the cache folder.

use super::load::file_error;
use super::{outln, print_json};
use crate::calibrate::gpus::{self, GpuCalibration};
use crate::calibrate::{self, Calibration, Effort, machine};
use crate::cost::store::{self, load_times, times_path};
use crate::cost::{DeviceProfile, LinkProfile, Measured, WorkClass};
use crate::error::{Error, Result};
use crate::place::DeviceSet;
use crate::{DType, units as format};
use clap::Args;
use gristmill_runtime::cpu;
use gristmill_runtime::device::DeviceKind;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// Arguments of `calibrate`.
#[derive(Args)]
pub struct CalibrateArgs {
    /// What is measured: `cpu:1` for this machine's CPU, `gpu:2` for its first two GPUs and the links to and between them, or both.
    #[arg(long, default_value = "cpu:1", value_name = "LIST")]
    devices: String,
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
    let n_threads = args
        .threads
        .map_or_else(|| cpu::probe().logical_cores, usize::from);
    let set = DeviceSet::parse(&args.devices, n_threads)?;
    let of = |kind| set.devices.iter().filter(move |d| d.name.kind == kind);
    if let Some(d) = of(DeviceKind::Emu).next() {
        return Err(
            Error::invalid(format!("{} is emulated: its rates mean nothing", d.name))
                .hint("cpu:1, gpu:1"),
        );
    }
    let n_gpus = of(DeviceKind::Gpu)
        .map(|d| d.name.index as usize + 1)
        .max()
        .unwrap_or(0);
    let folder = match &args.output {
        Some(_) => PathBuf::new(),
        None => store::folder().ok_or_else(|| {
            Error::invalid("there is no cache folder")
                .hint("-o FILE, or GRISTMILL_CACHE_DIR with a folder")
        })?,
    };
    let (mut report, mut files) = (
        Report {
            json: args.json,
            value: json!({}),
        },
        Vec::new(),
    );
    let cpu = match of(DeviceKind::Cpu).next() {
        Some(_) => {
            let made = calibrate::calibrate(&machine(), n_threads, Effort::default())?;
            report.cpu(&made);
            files.push((calibrate::path(&folder), made.to_text()));
            Some(made)
        }
        None => calibration(),
    };
    let mut whole = cpu
        .as_ref()
        .map(Calibration::target_text)
        .unwrap_or_default();
    if n_gpus > 0 {
        let host = cpu
            .as_ref()
            .map_or_else(|| DeviceProfile::this_cpu(n_threads), |c| c.cpu(n_threads));
        let link = cpu.map_or(LinkProfile::IN_PROCESS, |c| c.link);
        let made = gpus::calibrate(&machine(), n_gpus, &host, link, Effort::default())?;
        report.gpus(&made);
        whole = made.to_text();
        files.push((gpus::path(&folder), whole.clone()));
    }
    match &args.output {
        Some(path) => std::fs::write(path, whole).map_err(|e| file_error(path, e))?,
        None => files
            .iter()
            .try_for_each(|(path, text)| store::replace(path, text))?,
    }
    let written: Vec<&PathBuf> = args
        .output
        .as_ref()
        .map_or_else(|| files.iter().map(|f| &f.0).collect(), |o| vec![o]);
    report.finish(&written);
    Ok(())
}

/// What was measured, for people as it comes, or for machines at the end.
struct Report {
    json: bool,
    value: Value,
}

impl Report {
    fn cpu(&mut self, made: &Calibration) {
        if self.json {
            self.value["one"] = rates_json(&made.one);
            self.value["all"] = rates_json(&made.all);
            self.value["link"] = link_json(&made.link);
            return;
        }
        for p in [&made.one, &made.all] {
            outln!(
                "{} thread{}: {}",
                p.n_threads,
                if p.n_threads == 1 { "" } else { "s" },
                rates(p)
            );
        }
        outln!("link: {}", link(&made.link));
    }

    fn gpus(&mut self, made: &GpuCalibration) {
        if self.json {
            self.value["gpus"] = (0..made.n_gpus())
                .filter_map(|i| gpu_json(made, i))
                .collect();
            return;
        }
        (0..made.n_gpus()).for_each(|i| outln!("GPU {i}: {}", gpu_rates(made, i)));
    }

    fn finish(mut self, files: &[&PathBuf]) {
        let files: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
        if self.json {
            self.value["file"] = json!(files.join(", "));
            return print_json("calibrate", self.value);
        }
        outln!("written to {}", files.join(" and "));
    }
}

fn link(l: &LinkProfile) -> String {
    format!(
        "{} and {:.1} GB/s",
        format::time_ns(l.latency.0),
        l.bytes_per_second as f64 / 1e9
    )
}

fn link_json(l: &LinkProfile) -> Value {
    json!({ "latency_ns": l.latency.0, "bytes_per_second": l.bytes_per_second })
}

/// Measured rates of a GPU and of its links to the host, for people.
pub fn gpu_rates(made: &GpuCalibration, i: usize) -> String {
    let (Some(p), Some([to, from])) = (made.gpu(i), made.host_links(i)) else {
        return String::new();
    };
    let bf16 = p.peak_flops(DType::BF16) * p.efficiency(WorkClass::MatMul, DType::BF16) / 1e9;
    format!(
        "{}, products {bf16:.0} GFLOP/s bf16; from the host {}, to it {}",
        rates(p),
        link(&to),
        link(&from)
    )
}

/// The same for machines.
pub fn gpu_json(made: &GpuCalibration, i: usize) -> Option<Value> {
    let (mut value, [to, from]) = (rates_json(made.gpu(i)?), made.host_links(i)?);
    value["from_host"] = link_json(&to);
    value["to_host"] = link_json(&from);
    Some(value)
}

/// The calibration of this machine, if there is one. Warns about a file that does not fit.
pub fn calibration() -> Option<Calibration> {
    let (found, warning) = calibrate::load(
        &calibrate::path(&store::folder()?),
        &calibrate::name(&machine()),
    );
    warning.iter().for_each(|w| eprintln!("warning: {w}"));
    found
}

/// The calibration of this machine's GPUs, if there is one. Warns about a file that does not fit.
pub fn gpu_calibration() -> Option<GpuCalibration> {
    let (found, warning) = gpus::load(&gpus::path(&store::folder()?), &machine());
    warning.iter().for_each(|w| eprintln!("warning: {w}"));
    found
}

/// Times that were measured on this machine. Warns about a file that does not fit.
pub fn measured() -> Arc<Measured> {
    let Some(folder) = store::folder() else {
        return Arc::default();
    };
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
