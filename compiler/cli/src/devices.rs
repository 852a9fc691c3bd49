//! `gristmill devices`: physical devices of this machine, and logical ones.

use crate::calibrate::{calibration, gpu_calibration, gpu_json, gpu_rates, rates, rates_json};
use crate::cluster::TrustArgs;
use crate::heading;
use crate::output::outln;
use crate::variables::tasks_json;
use crate::{args, print_json};
use clap::Args;
use gristmill::calibrate;
use gristmill::calibrate::gpus::{self, GpuCalibration};
use gristmill::codegen::cuda::nvrtc::{self, Nvrtc};
use gristmill::cost::{DeviceProfile, store};
use gristmill::distribute::TaskState;
use gristmill::place::DeviceSet;
use gristmill::place::emulated;
use gristmill::place::gpus::described;
use gristmill::{Result, Session, Settings};
use gristmill_runtime::cpu::{self, CpuFacts};
use gristmill_runtime::cuda::{self, CudaDevice};
use gristmill_runtime::units::size;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Arguments of `devices`.
#[derive(Args)]
pub struct DevicesArgs {
    /// Logical devices to show, as in `--devices` of the compiling verbs.
    #[arg(long, default_value = "cpu:1", value_name = "LIST", help_heading = heading::DEVICES)]
    devices: String,
    /// List the devices of all tasks of a cluster, given the address of one, in place of this machine's.
    #[arg(long, value_name = "grpc://HOST:PORT", conflicts_with = "devices", help_heading = heading::DEVICES)]
    session: Option<String>,
    #[command(flatten)]
    trust: TrustArgs,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// Runs the verb.
pub fn devices(args: &DevicesArgs) -> Result<()> {
    if let Some(target) = &args.session {
        return of_cluster(target, args);
    }
    args.trust.needs_session()?;
    let machine = Machine::probe(args)?;
    if args.json {
        print_json("devices", machine.json());
    } else {
        machine.print();
    }
    Ok(())
}

/// The devices of all tasks, with their names in the cluster.
fn of_cluster(target: &str, args: &DevicesArgs) -> Result<()> {
    let credentials = args.trust.of_client()?;
    let session = Session::open_with(target, &Settings::default(), &credentials)?;
    let tasks = session.cluster_tasks()?;
    if args.json {
        let tasks = tasks.iter().map(|task| tasks_json(task, task_json(task)));
        print_json("devices", json!({ "tasks": tasks.collect::<Vec<_>>() }));
        return Ok(());
    }
    for task in &tasks {
        match &task.state {
            Err(e) => outln!("{}  {}  {e}", task.name, task.address),
            Ok(running) => {
                let incarnation = running.incarnation;
                outln!(
                    "{}  {}  incarnation {incarnation:016x}",
                    task.name,
                    task.address
                );
                for device in &running.devices {
                    // Memory of the host is not told.
                    let bytes = Some(device.memory_bytes).filter(|bytes| *bytes > 0);
                    let bytes = bytes.map_or(String::new(), |n| format!("  {}", size(n)));
                    outln!("  {}{bytes}", full_name(task, &device.name));
                }
            }
        }
    }
    Ok(())
}

/// A device of a task as `--pin` takes it.
fn full_name(task: &TaskState, device: &str) -> String {
    format!("{}{device}", task.name)
}

fn task_json(task: &TaskState) -> Value {
    let running = task.state.as_ref().ok();
    let devices = running.into_iter().flat_map(|running| &running.devices);
    let devices = devices.map(|device| {
        json!({
            "name": full_name(task, &device.name),
            "memory_bytes": Some(device.memory_bytes).filter(|bytes| *bytes > 0),
        })
    });
    json!({
        "incarnation": running.map(|running| format!("{:016x}", running.incarnation)),
        "devices": devices.collect::<Vec<_>>(),
    })
}

/// Everything that is known of this machine.
struct Machine {
    cpu: CpuFacts,
    /// Rates of the CPU, and where they come from.
    profile: DeviceProfile,
    source: String,
    /// The error says why there is none.
    gpus: Result<Vec<CudaDevice>, String>,
    gpu_calibration: Option<GpuCalibration>,
    compiler: Result<&'static Nvrtc>,
    logical: DeviceSet,
}

impl Machine {
    fn probe(args: &DevicesArgs) -> Result<Machine> {
        let cpu = cpu::probe();
        let logical = args::devices(&args.devices, cpu.logical_cores)?;
        let calibration = calibration();
        let source = match &calibration {
            Some(_) => measured(calibrate::path),
            None => "assumed; `gristmill calibrate` measures".to_owned(),
        };
        let gpus = cuda::probe();
        Ok(Machine {
            profile: match &calibration {
                Some(c) => c.cpu(cpu.logical_cores),
                None => DeviceProfile::this_cpu(cpu.logical_cores),
            },
            source,
            gpu_calibration: gpus.as_ref().ok().and_then(|_| gpu_calibration()),
            gpus,
            compiler: nvrtc::get(),
            logical,
            cpu,
        })
    }

    fn json(&self) -> Value {
        let cpu = &self.cpu;
        let gpus = self.gpus.iter().flatten().enumerate();
        let logical = self.logical.devices.iter().map(|d| d.name.to_string());
        json!({
            "cpu": {
                "model": cpu.model,
                "cores": cpu.logical_cores,
                "features": cpu.features,
                "memory_bytes": cpu.total_memory_bytes,
                "available_bytes": cpu.available_memory_bytes,
            },
            "rates": rates_json(&self.profile),
            "rates_from": self.source,
            "gpus": gpus.map(|(i, gpu)| self.gpu_json(i, gpu)).collect::<Vec<_>>(),
            "cuda": self.gpus.as_ref().err(),
            "nvrtc": nvrtc_json(&self.compiler),
            "nccl": nccl_json(),
            "logical": logical.collect::<Vec<_>>(),
        })
    }

    fn gpu_json(&self, i: usize, gpu: &CudaDevice) -> Value {
        let measured = self.gpu_calibration.as_ref().and_then(|c| gpu_json(c, i));
        let (major, minor) = gpu.compute_capability;
        json!({
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "compute_capability": [major, minor],
            "measured": measured,
        })
    }

    fn print(&self) {
        outln!("physical");
        self.print_cpu();
        match &self.gpus {
            Ok(list) => list
                .iter()
                .enumerate()
                .for_each(|(i, gpu)| self.print_gpu(i, gpu)),
            Err(why) => outln!("  GPU  none: {why}"),
        }
        self.print_compiler();
        match cuda::nccl_version() {
            Ok((major, minor, patch)) => outln!("  all-reduce  NCCL {major}.{minor}.{patch}"),
            Err(why) => outln!("  all-reduce  by exchange: {why}"),
        }
        let needs = match &self.compiler {
            Ok(_) => "",
            Err(_) => ", which needs the CUDA compiler",
        };
        match emulated::IS_BUILT_IN {
            true => outln!("  EMU  a PTX emulator on this CPU{needs}"),
            false => outln!("  EMU  none: built without the feature `emulator`"),
        }
        outln!("logical");
        for device in &self.logical.devices {
            outln!("  {}", device.name);
        }
    }

    fn print_cpu(&self) {
        let cpu = &self.cpu;
        let [total, free] = [cpu.total_memory_bytes, cpu.available_memory_bytes].map(memory);
        let (model, n_cores) = (&cpu.model, cpu.logical_cores);
        outln!("  CPU  {model}  {n_cores} cores  {total} ({free} free)");
        outln!("       features {}", cpu.features.join(" "));
        outln!("       {} ({})", rates(&self.profile), self.source);
    }

    fn print_gpu(&self, i: usize, gpu: &CudaDevice) {
        let (name, memory) = (&gpu.name, size(gpu.memory_bytes as u64));
        let (major, minor) = gpu.compute_capability;
        outln!("  GPU:{i}  {name}  {memory}  compute capability {major}.{minor}");
        let calibration = self.gpu_calibration.as_ref().filter(|c| i < c.n_gpus());
        match calibration {
            Some(c) => outln!("       {} ({})", gpu_rates(c, i), measured(gpus::path)),
            None => outln!(
                "       {} (assumed; `gristmill calibrate --devices gpu:{}` measures)",
                rates(&described(gpu)),
                i + 1
            ),
        }
    }

    fn print_compiler(&self) {
        let nvrtc = match &self.compiler {
            Ok(nvrtc) => nvrtc,
            Err(why) => return outln!("  CUDA compiler  none: {why}"),
        };
        let (major, minor) = nvrtc.version();
        let archs: Vec<String> = nvrtc.archs().iter().map(|a| format!("sm_{a}")).collect();
        let archs = archs.join(" ");
        outln!("  CUDA compiler  NVRTC {major}.{minor} for {archs}");
        outln!("       {}", nvrtc.place());
    }
}

/// The file of the cache folder that rates come from.
fn measured(path: fn(&Path) -> PathBuf) -> String {
    let folder = store::folder().unwrap_or_default();
    format!("measured: {}", path(&folder).display())
}

fn nvrtc_json(compiler: &Result<&Nvrtc>) -> Value {
    match compiler {
        Ok(n) => {
            json!({ "version": [n.version().0, n.version().1], "library": n.place(), "archs": n.archs() })
        }
        Err(why) => json!({ "error": why.to_string() }),
    }
}

fn nccl_json() -> Value {
    match cuda::nccl_version() {
        Ok((major, minor, patch)) => json!({ "version": [major, minor, patch] }),
        Err(why) => json!({ "error": why }),
    }
}

fn memory(bytes: Option<u64>) -> String {
    bytes.map_or("unknown memory".to_owned(), size)
}
