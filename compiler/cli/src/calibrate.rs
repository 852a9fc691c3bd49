//! `gristmill calibrate`, and the measurements in the cache folder that other verbs use.

use crate::heading;
use crate::output::{self, outln};
use crate::{args, load, print_json};
use clap::Args;
use gristmill::DType;
use gristmill::calibrate::gpus::{self, GpuCalibration};
use gristmill::calibrate::load::{Ticks, check_idle, consistent};
use gristmill::calibrate::{self, Calibration, Effort, machine};
use gristmill::cost::store::{self, load_times, times_path};
use gristmill::cost::{DeviceProfile, LinkProfile, Measured, WorkClass};
use gristmill::place::DeviceSet;
use gristmill::{Error, Result};
use gristmill_runtime::cpu;
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::units::{plural, time_ns};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `calibrate`.
#[derive(Args)]
pub struct CalibrateArgs {
    /// Devices to measure: `cpu:1` for this machine's CPU, `gpu:2` for its first two GPUs and their links, or both.
    #[arg(long, default_value = "cpu:1", value_name = "LIST", help_heading = heading::DEVICES)]
    devices: String,
    /// Write the profile to this file, for `--target`, instead of to the cache.
    #[arg(short, long, value_name = "PROFILE.toml", help_heading = heading::OUTPUT)]
    output: Option<PathBuf>,
    /// Threads to measure with. Default: one per core.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = heading::DEVICES)]
    threads: Option<u16>,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// Runs the verb.
pub fn calibrate(args: &CalibrateArgs) -> Result<()> {
    // A missing folder is an error before anything is measured.
    let folder = cache_folder(args)?;
    let mut report = Report::new(args.json);
    let (made, known) = measure(args, &mut report)?;
    let written = match &args.output {
        Some(path) => {
            load::write(path, &made.target_text(known))?;
            vec![path.clone()]
        }
        None => made.keep(&folder)?,
    };
    report.finish(&written);
    Ok(())
}

/// Measures the devices of the flags. Returns the CPU's calibration as well, of now or of earlier.
fn measure(args: &CalibrateArgs, report: &mut Report) -> Result<(Made, Option<Calibration>)> {
    let n_threads = args.threads.map_or_else(cpu::n_cores, usize::from);
    let set = args::devices(&args.devices, n_threads)?;
    let n_gpus = n_gpus(&set)?;
    let mut made = Made::default();
    if set.devices.iter().any(|d| d.name.kind == DeviceKind::Cpu) {
        let cpu = consistent(|| {
            let before = Ticks::now();
            let cpu = calibrate::calibrate(&machine(), n_threads, Effort::default())?;
            check_idle(before).map(|()| cpu)
        })?;
        report.cpu(&cpu);
        made.cpu = Some(cpu);
    }
    let known = made.cpu.clone().or_else(calibration);
    if n_gpus > 0 {
        let gpus = calibrate_gpus(n_gpus, n_threads, known.as_ref())?;
        report.gpus(&gpus);
        made.gpus = Some(gpus);
    }
    Ok((made, known))
}

/// The cache folder, unless a file is written instead.
fn cache_folder(args: &CalibrateArgs) -> Result<PathBuf> {
    let folder = match &args.output {
        Some(_) => Some(PathBuf::new()),
        None => store::folder(),
    };
    folder.ok_or_else(|| {
        Error::invalid("there is no cache folder")
            .hint("-o FILE, or GRISTMILL_CACHE_DIR with a folder")
    })
}

/// Number of GPUs to measure: those up to the last that is named. Errors for emulated ones.
fn n_gpus(set: &DeviceSet) -> Result<usize> {
    let mut n = 0;
    for device in &set.devices {
        match device.name.kind {
            DeviceKind::Cpu => {}
            DeviceKind::Gpu => n = n.max(device.name.index as usize + 1),
            DeviceKind::Emu => {
                let message = format!("{} is emulated: its rates mean nothing", device.name);
                return Err(Error::invalid(message).hint("cpu:1, gpu:1"));
            }
        }
    }
    Ok(n)
}

/// Measures GPUs, and their links to a host with the rates of `cpu`, or with assumed ones.
fn calibrate_gpus(n: usize, n_threads: usize, cpu: Option<&Calibration>) -> Result<GpuCalibration> {
    let (host, link) = match cpu {
        Some(c) => (c.cpu(n_threads), c.link),
        None => (DeviceProfile::this_cpu(n_threads), LinkProfile::IN_PROCESS),
    };
    gpus::calibrate(&machine(), n, &host, link, Effort::default())
}

/// Calibrations made now.
#[derive(Default)]
struct Made {
    cpu: Option<Calibration>,
    gpus: Option<GpuCalibration>,
}

impl Made {
    /// A profile for `--target`: of the GPUs and their host, or else of the CPU, measured now or known from earlier.
    fn target_text(&self, known: Option<Calibration>) -> String {
        match &self.gpus {
            Some(gpus) => gpus.to_text(),
            None => known.map(|c| c.target_text()).unwrap_or_default(),
        }
    }

    /// Writes them to the cache folder. Returns their files.
    fn keep(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut written = Vec::new();
        if let Some(cpu) = &self.cpu {
            written.push(calibrate::path(folder));
            store::replace(&calibrate::path(folder), &cpu.to_text())?;
        }
        if let Some(gpus) = &self.gpus {
            written.push(gpus::path(folder));
            store::replace(&gpus::path(folder), &gpus.to_text())?;
        }
        Ok(written)
    }
}

/// Rates, for people as they are measured, or for machines at the end.
struct Report {
    json: bool,
    value: Value,
}

impl Report {
    fn new(json: bool) -> Report {
        Report {
            json,
            value: json!({}),
        }
    }

    fn cpu(&mut self, made: &Calibration) {
        if self.json {
            self.value["one"] = rates_json(&made.one);
            self.value["all"] = rates_json(&made.all);
            self.value["link"] = link_json(&made.link);
            return;
        }
        for p in [&made.one, &made.all] {
            outln!("{}: {}", plural(p.n_threads, "thread"), rates(p));
        }
        outln!("link: {}", link(&made.link));
    }

    fn gpus(&mut self, made: &GpuCalibration) {
        let all = 0..made.n_gpus();
        if self.json {
            self.value["gpus"] = all.filter_map(|i| gpu_json(made, i)).collect();
        } else {
            all.for_each(|i| outln!("GPU {i}: {}", gpu_rates(made, i)));
        }
    }

    fn finish(mut self, files: &[PathBuf]) {
        let files: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
        if self.json {
            self.value["file"] = json!(files.join(", "));
            print_json("calibrate", self.value);
        } else {
            outln!("written to {}", files.join(" and "));
        }
    }
}

fn link(l: &LinkProfile) -> String {
    format!(
        "{} and {:.1} GB/s",
        time_ns(l.latency.0),
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
    warning.iter().for_each(output::warning);
    found
}

/// The calibration of this machine's GPUs, if there is one. Warns about a file that does not fit.
pub fn gpu_calibration() -> Option<GpuCalibration> {
    let (found, warning) = gpus::load(&gpus::path(&store::folder()?), &machine());
    warning.iter().for_each(output::warning);
    found
}

/// Times that were measured on this machine. Warns about a file that does not fit.
pub fn measured() -> Arc<Measured> {
    let Some(folder) = store::folder() else {
        return Arc::default();
    };
    let (measured, warning) = load_times(&times_path(&folder), &machine());
    warning.iter().for_each(output::warning);
    Arc::new(measured)
}

/// Rates for people.
pub fn rates(p: &DeviceProfile) -> String {
    let [products, convolutions] = [WorkClass::MatMul, WorkClass::Conv].map(|c| gflops(p, c));
    let [memory, cache] = [p.memory_bandwidth, p.cache_bandwidth].map(|rate| rate / 1e9);
    let launch = time_ns(p.launch.0);
    format!(
        "products {products:.0} GFLOP/s f32, convolutions {convolutions:.0}, \
         memory {memory:.1} GB/s, cache {cache:.0} GB/s, launch {launch}"
    )
}

/// Rate that kernels of a class reach in `f32`.
fn gflops(p: &DeviceProfile, class: WorkClass) -> f64 {
    p.peak_flops(DType::F32) * p.efficiency(class, DType::F32) / 1e9
}

/// The same for machines.
pub fn rates_json(p: &DeviceProfile) -> Value {
    let mut efficiency = serde_json::Map::new();
    for (class, name) in WorkClass::NAMES {
        efficiency.insert(name.to_owned(), json!(p.efficiency(class, DType::F32)));
    }
    json!({
        "threads": p.n_threads,
        "flops_f32": p.flops_f32,
        "memory_bytes_per_second": p.memory_bandwidth,
        "cache_bytes_per_second": p.cache_bandwidth,
        "cache_bytes": p.cache_bytes.0,
        "launch_ns": p.launch.0,
        "efficiency_f32": efficiency,
    })
}
