//! `gristmill devices`: what this machine has.

use super::calibrate::{calibration, gpu_calibration, gpu_json, gpu_rates, rates, rates_json};
use super::{outln, print_json};
use crate::calibrate::{self, gpus};
use crate::codegen::cuda::nvrtc;
use crate::cost::{DeviceProfile, store};
use crate::error::Result;
use crate::place::gpus::described;
use crate::units as format;
use clap::Args;
use gristmill_runtime::{cpu, cuda};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Arguments of `devices`.
#[derive(Args)]
pub struct DevicesArgs {
    /// Logical devices to show, as `--devices` of the compiling verbs.
    #[arg(long, default_value = "cpu:1", value_name = "LIST")]
    devices: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn devices(args: &DevicesArgs) -> Result<()> {
    let cpu = cpu::probe();
    let logical = crate::place::DeviceSet::parse(&args.devices, cpu.logical_cores)?;
    let found = cuda::probe();
    let compiler = nvrtc::get();
    let calibration = calibration();
    let profile = match &calibration {
        Some(c) => c.cpu(cpu.logical_cores),
        None => DeviceProfile::this_cpu(cpu.logical_cores),
    };
    let measured = |path: fn(&Path) -> PathBuf| {
        store::folder().map(|folder| format!("measured: {}", path(&folder).display()))
    };
    let source = calibration.as_ref().and_then(|_| measured(calibrate::path));
    let source = source.unwrap_or_else(|| "assumed; `gristmill calibrate` measures".to_owned());
    let gpu_calibration = found.as_ref().ok().and_then(|_| gpu_calibration());
    if args.json {
        let gpus = match &found {
            Ok(list) => json!(list.iter().enumerate().map(|(i, g)| json!({ "name": g.name, "memory_bytes": g.memory_bytes, "compute_capability": [g.compute_capability.0, g.compute_capability.1],
                "measured": gpu_calibration.as_ref().and_then(|c| gpu_json(c, i)) })).collect::<Vec<_>>()),
            Err(_) => json!([]),
        };
        print_json(
            "devices",
            json!({ "cpu": { "model": cpu.model, "cores": cpu.logical_cores, "features": cpu.features, "memory_bytes": cpu.total_memory_bytes, "available_bytes": cpu.available_memory_bytes },
            "rates": rates_json(&profile), "rates_from": source, "gpus": gpus, "cuda": cuda::probe().err(), "nvrtc": nvrtc_json(&compiler), "nccl": nccl_json(), "logical": logical.devices.iter().map(|d| d.name.to_string()).collect::<Vec<_>>() }),
        );
        return Ok(());
    }
    outln!("physical");
    outln!(
        "  CPU  {}  {} cores  {} ({} free)",
        cpu.model,
        cpu.logical_cores,
        memory(cpu.total_memory_bytes),
        memory(cpu.available_memory_bytes)
    );
    outln!("       features {}", cpu.features.join(" "));
    outln!("       {} ({source})", rates(&profile));
    match &found {
        Ok(list) => list.iter().enumerate().for_each(|(i, g)| {
            outln!(
                "  GPU:{i}  {}  {}  compute capability {}.{}",
                g.name,
                format::size(g.memory_bytes as u64),
                g.compute_capability.0,
                g.compute_capability.1
            );
            match gpu_calibration.as_ref().filter(|c| i < c.n_gpus()) {
                Some(c) => outln!(
                    "       {} ({})",
                    gpu_rates(c, i),
                    measured(gpus::path).unwrap_or_default()
                ),
                None => outln!(
                    "       {} (assumed; `gristmill calibrate --devices gpu:{}` measures)",
                    rates(&described(g)),
                    i + 1
                ),
            }
        }),
        Err(why) => outln!("  GPU  none: {why}"),
    }
    match &compiler {
        Ok(n) => {
            let (major, minor) = n.version();
            let archs: Vec<String> = n.archs().iter().map(|a| format!("sm_{a}")).collect();
            outln!(
                "  CUDA compiler  NVRTC {major}.{minor} for {}\n       {}",
                archs.join(" "),
                n.place()
            );
        }
        Err(why) => outln!("  CUDA compiler  none: {why}"),
    }
    match cuda::nccl_version() {
        Ok((major, minor, patch)) => outln!("  all-reduce  NCCL {major}.{minor}.{patch}"),
        Err(why) => outln!("  all-reduce  by exchange: {why}"),
    }
    outln!(
        "  EMU  a PTX emulator on this CPU{}",
        if compiler.is_ok() {
            ""
        } else {
            ", which needs the CUDA compiler"
        }
    );
    outln!("logical");
    logical.devices.iter().for_each(|d| outln!("  {}", d.name));
    Ok(())
}

fn nvrtc_json(compiler: &Result<&nvrtc::Nvrtc>) -> serde_json::Value {
    match compiler {
        Ok(n) => {
            json!({ "version": [n.version().0, n.version().1], "library": n.place(), "archs": n.archs() })
        }
        Err(why) => json!({ "error": why.to_string() }),
    }
}

fn nccl_json() -> serde_json::Value {
    match cuda::nccl_version() {
        Ok((major, minor, patch)) => json!({ "version": [major, minor, patch] }),
        Err(why) => json!({ "error": why }),
    }
}

fn memory(bytes: Option<u64>) -> String {
    bytes.map_or("unknown memory".to_owned(), format::size)
}
