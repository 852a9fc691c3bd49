//! Correctness and speed of gristmill's kernels on this machine's GPU.
//!
//! `gpu [--device N] [--quick] [--models FOLDER | --sweep [--out FILE] [--resume FILE] [--peers FILE]]`.
//! One program, which can be built elsewhere and copied: it needs the CUDA driver and NVRTC, and prints
//! a table of
//!
//! - every family of kernels on the GPU against the interpreter and against the PTX emulator, on the
//!   same inputs;
//! - its rates on large inputs beside those of a large copy on the device and, where it is found, of
//!   cuBLASLt in the same run;
//! - partitions on the CPU and the GPU: captured pieces against the same step by step, and a stream
//!   of runs against one after the other;
//! - whole models: each `NAME/model.onnx` of the folder, on random inputs, against the CPU and timed,
//!   as they are and with products in `bf16`.
//!
//! `--sweep` takes every form of the families' kernels instead (the `sweep` module): which is fastest,
//! and by how much the predicted one is slower. `--out` keeps the rows, `--resume` names those of a
//! run that was cut short, `--peers` those of `benches/peers/gpu.py`.
//!
//! `--quick` leaves the large inputs out, for an emulated GPU. `benches/peers/gpu.py` prints the same
//! rows for PyTorch.

mod ceilings;
mod checks;
mod families;
mod models;
mod partitions;
mod sweep;

use ceilings::Ceilings;
use gristmill::place::DeviceSet;
use gristmill::testing::Setup;
use gristmill::{Result, Settings};
use gristmill_runtime::cuda;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of the command line.
struct Arguments {
    device: u32,
    quick: bool,
    models: Option<PathBuf>,
    sweep: bool,
    files: sweep::Files,
}

fn arguments() -> std::result::Result<Arguments, String> {
    let mut read = Arguments {
        device: 0,
        quick: false,
        models: None,
        sweep: false,
        files: sweep::Files::default(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--device" => read.device = value()?.parse().map_err(|e| format!("--device: {e}"))?,
            "--models" => read.models = Some(value()?.into()),
            "--quick" => read.quick = true,
            "--sweep" => read.sweep = true,
            "--out" => read.files.out = Some(value()?.into()),
            "--resume" => read.files.resume = Some(value()?.into()),
            "--peers" => read.files.peers = Some(value()?.into()),
            _ => {
                return Err(format!(
                    "unknown argument {word:?}; known: --device N, --quick, --models FOLDER, \
                     --sweep, --out FILE, --resume FILE, --peers FILE"
                ));
            }
        }
    }
    let files = &read.files;
    let has_files = files.out.is_some() || files.resume.is_some() || files.peers.is_some();
    if has_files && !read.sweep {
        return Err("--out, --resume and --peers need --sweep".to_owned());
    }
    if read.sweep && read.models.is_some() {
        return Err("--models is no part of --sweep".to_owned());
    }
    Ok(read)
}

/// A setup for runs on devices named as `--devices` does; GPUs are those of the command line.
fn setup(devices: &str, device: u32) -> Result<Setup> {
    let mut devices = DeviceSet::parse(devices, 1)?;
    devices.look_at_gpus(&[device])?;
    let mut setup = Setup::default().with(|o| o.check = false);
    setup.settings = Settings {
        devices,
        gpus: vec![device],
        check_kernels: false,
        ..Settings::default()
    };
    Ok(setup)
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let devices = match cuda::probe() {
        Ok(devices) => devices,
        Err(why) => {
            println!("no GPU: {why}; nothing was measured");
            return ExitCode::from(3);
        }
    };
    match run(&arguments, &devices) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(4),
        Err(e) => {
            eprintln!("{e}");
            ExitCode::from(e.kind().exit_code())
        }
    }
}

/// False when something is wrong with a result.
fn run(arguments: &Arguments, devices: &[cuda::CudaDevice]) -> Result<bool> {
    let Some(device) = devices.get(arguments.device as usize) else {
        return Err(gristmill::Error::invalid(format!(
            "--device {}: there are {}",
            arguments.device,
            devices.len()
        )));
    };
    let (major, minor) = device.compute_capability;
    println!(
        "device\t{} (compute capability {major}.{minor}, {} bytes)",
        device.name, device.memory_bytes
    );
    match cuda::driver_version() {
        Ok((major, minor)) => println!("driver\tCUDA {major}.{minor}"),
        Err(why) => println!("driver\t{why}"),
    }
    let nvrtc = gristmill::testing::nvrtc()?;
    println!(
        "NVRTC\t{}.{} at {}",
        nvrtc.version().0,
        nvrtc.version().1,
        nvrtc.place()
    );
    let ceilings = if arguments.quick {
        println!("ceilings\tleft out (--quick)");
        Ceilings::NONE
    } else {
        ceilings::print(arguments.device)?
    };
    if arguments.sweep {
        return sweep::run(arguments, &ceilings);
    }
    let mut good = checks::run(arguments, &ceilings)?;
    good &= partitions::run(arguments)?;
    match &arguments.models {
        Some(folder) => good &= models::run(folder, arguments)?,
        None => println!("models\tnone (--models)"),
    }
    Ok(good)
}
