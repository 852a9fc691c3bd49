//! Flags that the compiling verbs share, and how they become a [`Session`] and [`Options`].

use crate::objective::Objective;
use crate::output::{self, errln};
use crate::{calibrate, dump, load, parse};
use clap::{Args, Parser, ValueEnum};
use gristmill::Arch;
use gristmill::Source;
use gristmill::TargetCpu;
use gristmill::command_line::ConvAlgorithm;
use gristmill::cost::{Bytes, store};
use gristmill::ir::{Bindings, Graph};
use gristmill::pipeline::Lowered;
use gristmill::place::{DeviceSet, DeviceSpec, Fallback, Pin, Placement, Plan, Target, gpus};
use gristmill::{AllReduce, DimRange, Options};
use gristmill::{Error, Result};
use gristmill::{Session, Settings, Tuning};
use gristmill_runtime::cpu::n_cores;
use gristmill_runtime::device::DeviceKind;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Threads that prices assume in options that are the same on every machine.
const ASSUMED_THREADS: usize = 4;

/// Flags of every verb that compiles.
#[derive(Args, Clone)]
pub struct CompileArgs {
    /// Logical devices: `cpu:2` for two logical CPUs, or names such as `/device:CPU:0`, separated by commas.
    #[arg(long, default_value = "cpu:1", value_name = "LIST")]
    pub devices: String,
    /// The machine that a profile describes, present or not, instead of this one's devices.
    #[arg(long, value_name = "PROFILE.toml", conflicts_with = "devices")]
    pub target: Option<PathBuf>,
    /// Run the nodes whose path matches the regular expression on a device.
    #[arg(long, value_name = "REGEX=DEVICE")]
    pub pin: Vec<String>,
    /// Devices of all nodes, and the nodes that are rematerialised or offloaded, from a file that `place --plan-out` wrote.
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// The aim of the placement. `throughput` keeps several runs of a model in flight, where they are started side by side, as `bench` does.
    #[arg(long, value_enum, default_value = "latency")]
    pub objective: Objective,
    /// Runs of the stream that `--objective throughput` is for.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    pub samples: u64,
    /// Treatment of nodes that the requested device cannot run.
    #[arg(long, value_enum, default_value = "error")]
    pub fallback: FallbackArg,
    /// Print the device of every op, and the requests that were let go.
    #[arg(long)]
    pub log_device_placement: bool,
    /// Memory limit of a device, in bytes or as a share of its own, e.g. `cpu:0=512MiB` or `gpu:0=40%`.
    #[arg(long, value_name = "DEVICE=SIZE|SHARE%")]
    pub mem: Vec<String>,
    /// Sizes of symbolic dims.
    #[command(flatten)]
    pub dims: DimFlags,
    /// An input that takes what an output gave in the run before, zeros at first: a variable of the input's name, as the cache of a decoder.
    #[arg(long, value_name = "INPUT=OUTPUT")]
    pub keep: Vec<String>,
    /// 0: one kernel per op; 1: simplification and grouping; 2: all rules; 3: as 2 with larger limits.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub opt_level: u8,
    /// Time limit of the search for better code, e.g. `10s` or `250ms`: the best until then counts.
    #[arg(long, value_name = "TIME")]
    pub budget: Option<String>,
    /// The CPU that code is made for: native, x86-64-v2, x86-64-v3 or x86-64-v4.
    #[arg(long, default_value = "native", value_name = "CPU")]
    pub target_cpu: String,
    /// CPU threads over all logical CPU devices; one per core by default.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// GPUs that CUDA code is made for: `sm_80`, `sm_90a`. By default each GPU's own, `sm_80` without one.
    #[arg(long, value_name = "ARCH")]
    pub gpu_arch: Option<String>,
    /// Operands of products on GPUs are rounded to this dtype: f32 (not at all), tf32, bf16 or f16. Sums are f32 in any case.
    #[arg(long, default_value = "f32", value_name = "DTYPE")]
    pub precision: String,
    /// Algorithm of convolutions on CPUs. `auto` takes minimal filtering (Winograd), which is f32 with another order of sums, where it is faster.
    #[arg(long, value_enum, default_value = "auto")]
    pub conv: ConvArg,
    /// Time the forms that kernels can have on their GPUs, and keep the fastest in the cache folder. Those of earlier times count in any case.
    #[arg(long)]
    pub tune: bool,
    /// Run kernels of gristmill's own only, even where cuBLASLt was faster when they were timed.
    #[arg(long)]
    pub no_libraries: bool,
    /// The GPUs, by the driver's numbers, that `gpu:0` and so on are, e.g. `1` or `0,0`: the latter are two logical devices that share a GPU. All
    /// in the driver's order by default.
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub visible_gpus: Vec<u32>,
    /// Who reduces over GPUs.
    #[arg(long, value_enum, default_value = "auto")]
    pub all_reduce: AllReduceArg,
    /// Run the verifier and the independent checkers between stages; wait for each kernel of a GPU, so that a fault names it.
    #[arg(long)]
    pub verify: bool,
    /// Write the text of every stage into a directory.
    #[arg(long, value_name = "DIR")]
    pub dump_dir: Option<PathBuf>,
    /// Say more: stages and times; rewrites; kernels; everything.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The flags as they are when none is given.
#[derive(Parser)]
struct Unset {
    #[command(flatten)]
    args: CompileArgs,
}

/// Flags that say how large symbolic dims are.
#[derive(Args, Clone)]
pub struct DimFlags {
    /// Value of a symbolic dim, e.g. `batch=8`.
    #[arg(long, value_name = "DIM=N")]
    pub set: Vec<String>,
    /// Sizes that a symbolic dim may have, ends included, e.g. `batch=1..64`: a contract that every run is held to. Random inputs and plans take
    /// the greatest. `batch=8` is the same as with --set.
    #[arg(long, value_name = "DIM=MIN..MAX")]
    pub shape: Vec<String>,
}

const SET_FORM: &str = "DIM=N";
const SHAPE_FORM: &str = "DIM=MIN..MAX or DIM=N";

impl DimFlags {
    /// Values and ranges by dim. A dim may have one of each.
    pub fn parse(&self) -> Result<(Bindings, BTreeMap<String, DimRange>)> {
        let (mut sizes, mut ranges) = (DimFlags::sizes(&self.set)?, BTreeMap::new());
        for text in &self.shape {
            let (dim, value) = parse::pair(text, "--shape", SHAPE_FORM)?;
            let inserted = match value.split_once("..") {
                Some(ends) => insert_once(&mut ranges, dim, parse::dim_range(ends)),
                None => insert_once(&mut sizes, dim, parse::dim_size(value)),
            };
            inserted.map_err(|e| wrong("--shape", text, e))?;
        }
        Ok((sizes, ranges))
    }

    /// Values by dim, from texts of `--set`.
    pub fn sizes(set: &[String]) -> Result<Bindings> {
        let mut sizes = Bindings::new();
        for text in set {
            let (dim, size) = parse::pair(text, "--set", SET_FORM)?;
            let inserted = insert_once(&mut sizes, dim, parse::dim_size(size));
            inserted.map_err(|e| wrong("--set", text, e))?;
        }
        Ok(sizes)
    }
}

fn insert_once<T>(map: &mut BTreeMap<String, T>, dim: &str, value: Result<T>) -> Result<()> {
    match map.insert(dim.to_owned(), value?) {
        Some(_) => Err(Error::invalid(format!("{dim:?} is given twice"))),
        None => Ok(()),
    }
}

fn wrong(flag: &str, text: &str, e: Error) -> Error {
    e.context(format!("{flag} {text:?}"))
}

/// `--fallback`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FallbackArg {
    /// Refuse to compile.
    Error,
    /// Place elsewhere and warn.
    Warn,
    /// Place elsewhere.
    Allow,
}

impl FallbackArg {
    fn of_model(self) -> Fallback {
        match self {
            FallbackArg::Error => Fallback::Error,
            FallbackArg::Warn => Fallback::Warn,
            FallbackArg::Allow => Fallback::Allow,
        }
    }
}

/// `--conv`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ConvArg {
    /// By minimal filtering where that is faster.
    Auto,
    /// Direct sums.
    Direct,
}

impl ConvArg {
    fn of_model(self) -> ConvAlgorithm {
        match self {
            ConvArg::Auto => ConvAlgorithm::Auto,
            ConvArg::Direct => ConvAlgorithm::Direct,
        }
    }
}

/// `--all-reduce`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AllReduceArg {
    /// NCCL, where it is found and its results are right but for the order of a sum.
    Auto,
    /// The GPUs themselves, in the order of the operands.
    Exchange,
}

impl CompileArgs {
    /// Prints warnings of compilation, and on request its stages and the device of every op; writes the texts of the stages.
    pub fn report(&self, lowered: &Lowered) -> Result<()> {
        output::warnings(&lowered.report.warnings);
        self.log_placement(&lowered.placement, &lowered.clusters);
        if let Some(folder) = &self.dump_dir {
            dump::write_all(lowered, folder)?;
        }
        if self.verbose > 0 {
            errln!("{}", lowered.report.text(self.verbose).trim_end());
        }
        Ok(())
    }

    /// [`CompileArgs::report`] for a part of a model.
    pub fn report_segment(&self, number: usize, lowered: &Lowered) -> Result<()> {
        if self.verbose > 0 || self.log_device_placement {
            errln!("segment {number}");
        }
        let folder = self.dump_dir.as_ref();
        let part = CompileArgs {
            dump_dir: folder.map(|folder| folder.join(format!("segment-{number}"))),
            ..self.clone()
        };
        part.report(lowered)
    }

    /// Prints the device of every op where `--log-device-placement` asks for it.
    pub fn log_placement(&self, placement: &Placement, clusters: &Graph) {
        if self.log_device_placement {
            errln!("{}", placement.device_log(clusters).trim_end());
        }
    }

    /// Flags that say how a model is compiled, of those that are given: nothing that was compiled already can follow them.
    pub fn given_for_compilation(&self) -> Vec<&'static str> {
        let unset = Unset::parse_from(["gristmill"]).args;
        let given = [
            ("--devices", self.devices != unset.devices),
            ("--target", self.target.is_some()),
            ("--pin", !self.pin.is_empty()),
            ("--plan", self.plan.is_some()),
            ("--objective", self.objective != unset.objective),
            ("--samples", self.samples != unset.samples),
            ("--fallback", self.fallback != unset.fallback),
            ("--log-device-placement", self.log_device_placement),
            ("--mem", !self.mem.is_empty()),
            ("--keep", !self.keep.is_empty()),
            ("--opt-level", self.opt_level != unset.opt_level),
            ("--budget", self.budget.is_some()),
            ("--target-cpu", self.target_cpu != unset.target_cpu),
            ("--gpu-arch", self.gpu_arch.is_some()),
            ("--precision", self.precision != unset.precision),
            ("--conv", self.conv != unset.conv),
            ("--tune", self.tune),
            ("--no-libraries", self.no_libraries),
            ("--visible-gpus", !self.visible_gpus.is_empty()),
            ("--all-reduce", self.all_reduce != unset.all_reduce),
            ("--verify", self.verify),
            ("--dump-dir", self.dump_dir.is_some()),
            ("--verbose", self.verbose > 0),
        ];
        let given = given.into_iter().filter(|(_, is_given)| *is_given);
        given.map(|(flag, _)| flag).collect()
    }

    /// The session and the options that the flags describe, with the measurements of this machine.
    pub fn open(&self) -> Result<(Session, Options)> {
        self.open_with(true)
    }

    /// The model of a file, with the state that flags ask for.
    pub fn source(&self, model: &Path) -> Result<Source> {
        let pair = |flag: &String| {
            let (input, output) = parse::pair(flag, "--keep", "INPUT=OUTPUT")?;
            Ok((input.to_owned(), output.to_owned()))
        };
        let pairs = self.keep.iter().map(pair).collect::<Result<Vec<_>>>()?;
        // Lists of sizes, which `compile` takes, are no business of state: it has one size.
        load::model(model)?.keeping(&pairs, &DimFlags::sizes(&self.dims.set)?)
    }

    /// The same without measurements: equal flags give equal settings and options on every machine.
    pub fn open_reproducibly(&self) -> Result<(Session, Options)> {
        self.open_with(false)
    }

    fn open_with(&self, is_measured: bool) -> Result<(Session, Options)> {
        let settings = self.settings(is_measured)?;
        let options = self.options(is_measured)?;
        self.warn_of_useless_flags(&settings.devices);
        Ok((Session::new(&settings)?, options))
    }

    fn settings(&self, is_measured: bool) -> Result<Settings> {
        let usual = || match is_measured {
            true => n_cores(),
            false => ASSUMED_THREADS,
        };
        let threads = self.threads.map_or_else(usual, usize::from);
        let folder = is_measured.then(store::folder).flatten();
        Ok(Settings {
            devices: self.device_set(threads, is_measured)?,
            gpus: self.visible_gpus.clone(),
            threads: Some(threads),
            kept: folder.as_deref().map(store::placements_path),
            tuning: Tuning {
                folder,
                measures: self.tune,
                libraries: !self.no_libraries,
            },
            check_kernels: Settings::default().check_kernels || self.verify,
            ..Settings::default()
        })
    }

    fn options(&self, is_measured: bool) -> Result<Options> {
        let mut options = Options {
            objective: self.objective.of_model(self.samples),
            fallback: self.fallback.of_model(),
            opt_level: self.opt_level,
            conv: self.conv.of_model(),
            budget: self.parsed_budget()?,
            target_cpu: TargetCpu::parse(&self.target_cpu)?,
            pins: self
                .pin
                .iter()
                .map(|p| Pin::parse(p))
                .collect::<Result<_>>()?,
            plan: self.plan()?,
            keep_stages: self.dump_dir.is_some(),
            gpu_arch: self.gpu_arch.as_deref().map(Arch::parse).transpose()?,
            precision: parse::precision(&self.precision)?,
            all_reduce: match self.all_reduce {
                AllReduceArg::Auto => AllReduce::Auto,
                AllReduceArg::Exchange => AllReduce::Exchange,
            },
            ..Options::default()
        };
        options.check |= self.verify;
        if is_measured {
            options.measured = calibrate::measured();
        }
        (options.dims, options.ranges) = self.dims.parse()?;
        Ok(options)
    }

    /// Says which flags are for GPUs where there is none.
    fn warn_of_useless_flags(&self, devices: &DeviceSet) {
        let has_gpu = devices
            .devices
            .iter()
            .any(|d| d.name.kind == DeviceKind::Gpu);
        let given = [
            ("--tune", self.tune),
            ("--visible-gpus", !self.visible_gpus.is_empty()),
        ];
        for (flag, _) in given.iter().filter(|(_, is_given)| *is_given && !has_gpu) {
            output::warning(format_args!("{flag} changes nothing: no device is a GPU"));
        }
    }

    /// The time of `--budget`.
    pub fn parsed_budget(&self) -> Result<Option<Duration>> {
        let budget = self.budget.as_deref().map(parse::time).transpose();
        budget.map_err(|e| e.context("--budget"))
    }

    /// The plan that `--plan` names.
    pub fn plan(&self) -> Result<Option<Plan>> {
        let read = |path: &PathBuf| Plan::parse(&load::text(path)?, &path.display().to_string());
        self.plan.as_ref().map(read).transpose()
    }

    /// The devices of `--target`, or of `--devices` on this machine.
    fn device_set(&self, threads: usize, is_measured: bool) -> Result<DeviceSet> {
        let Some(path) = &self.target else {
            return self.present_devices(threads, is_measured);
        };
        let parsed = Target::parse(&load::toml(path)?);
        let mut devices = parsed.map_err(|e| e.context(path.display()))?.devices;
        self.limit(&mut devices)?;
        Ok(devices)
    }

    fn present_devices(&self, threads: usize, is_measured: bool) -> Result<DeviceSet> {
        let mut set = devices(&self.devices, threads)?;
        self.limit(&mut set)?;
        if !is_measured {
            return Ok(set);
        }
        if let Some(calibration) = calibrate::calibration() {
            calibration.apply(&mut set);
        }
        set.look_at_gpus(&self.visible_gpus)?;
        let has_gpu = set.devices.iter().any(|d| d.name.kind == DeviceKind::Gpu);
        if let Some(calibration) = has_gpu.then(calibrate::gpu_calibration).flatten() {
            calibration.apply(&mut set, &self.visible_gpus);
        }
        Ok(set)
    }

    /// Sets the memory limits of `--mem`.
    fn limit(&self, devices: &mut DeviceSet) -> Result<()> {
        for mem in &self.mem {
            let (spec, size) = parse::pair(mem, "--mem", "DEVICE=SIZE or DEVICE=SHARE%")?;
            let limited = match parse::share(size) {
                Some(share) => share.and_then(|share| self.limit_share(devices, spec, share)),
                None => parse::bytes(size).and_then(|n| devices.limit_memory(spec, Bytes(n))),
            };
            limited.map_err(|e| e.context(format!("--mem {mem:?}")))?;
        }
        Ok(())
    }

    /// Limits each matching device to a share of the memory that it has.
    fn limit_share(&self, devices: &mut DeviceSet, spec: &str, share: f64) -> Result<()> {
        let matching = devices.matching(&DeviceSpec::parse(spec)?);
        if matching.is_empty() {
            // It says which devices there are.
            return devices.limit_memory(spec, Bytes::ZERO);
        }
        for d in matching {
            let device = &mut devices.devices[d];
            let total = gpus::total_memory(&device.name, &self.visible_gpus)?;
            device.memory_limit = Some(Bytes((total as f64 * share) as u64));
        }
        Ok(())
    }
}

/// The devices that `--devices` names. Errors when it names none.
pub fn devices(text: &str, threads: usize) -> Result<DeviceSet> {
    if text.trim().is_empty() {
        return Err(Error::invalid("--devices \"\" names no device").hint("cpu:1"));
    }
    DeviceSet::parse(text, threads)
}
