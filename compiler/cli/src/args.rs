//! Flags that the compiling verbs share, and how they become a [`Session`] and [`Options`].

use crate::heading;
use crate::objective::Objective;
use crate::output::{self, errln};
use crate::{calibrate, dump, load, parse};
use clap::{Args, Parser, ValueEnum};
use gristmill::Arch;
use gristmill::Source;
use gristmill::TargetCpu;
use gristmill::command_line::ConvAlgorithm;
use gristmill::cost::{Bytes, store};
use gristmill::distribute::ClientOptions;
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
    /// Logical devices, separated by commas: `cpu:2` for two logical CPUs, or names such as `/device:CPU:0`.
    #[arg(long, default_value = "cpu:1", value_name = "LIST", help_heading = heading::DEVICES)]
    pub devices: String,
    /// Compile for the machine described by a profile instead of this machine's devices.
    #[arg(long, value_name = "PROFILE.toml", conflicts_with = "devices", help_heading = heading::DEVICES)]
    pub target: Option<PathBuf>,
    /// Run the nodes whose path matches a regular expression on a device.
    #[arg(long, value_name = "REGEX=DEVICE", help_heading = heading::DEVICES)]
    pub pin: Vec<String>,
    /// Read the device of every node, and the nodes to rematerialise or offload, from a file written by `place --plan-out`.
    #[arg(long, value_name = "FILE", help_heading = heading::DEVICES)]
    pub plan: Option<PathBuf>,
    /// Goal of the placement. `throughput` keeps several runs of the model in flight when callers start them concurrently, as `bench` does.
    #[arg(long, value_enum, default_value = "latency", help_heading = heading::DEVICES)]
    pub objective: Objective,
    /// Number of runs in the stream of `--objective throughput`.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..), help_heading = heading::DEVICES)]
    pub samples: u64,
    /// Policy for nodes that the requested device cannot run.
    #[arg(long, value_enum, default_value = "error", help_heading = heading::DEVICES)]
    pub fallback: FallbackArg,
    /// Print the device of every op, and the requests that could not be met.
    #[arg(long, help_heading = heading::DEVICES)]
    pub log_device_placement: bool,
    /// Memory limit of a device, in bytes or as a share of its memory, e.g. `cpu:0=512MiB` or `gpu:0=40%`.
    #[arg(long, value_name = "DEVICE=SIZE|SHARE%", help_heading = heading::DEVICES)]
    pub mem: Vec<String>,
    /// Sizes of symbolic dims.
    #[command(flatten)]
    pub dims: DimFlags,
    /// Feed an output of the previous run to an input, which becomes a variable, e.g. the cache of a decoder. The first run gets zeros.
    #[arg(long, value_name = "INPUT=OUTPUT", help_heading = heading::INPUTS)]
    pub keep: Vec<String>,
    /// Optimisation level. 0: one kernel per op; 1: simplification and fusion; 2: all rules; 3: all rules with larger limits.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=3), help_heading = heading::COMPILATION)]
    pub opt_level: u8,
    /// Time limit of the search for better code, e.g. `10s` or `250ms`. The best code found until then is used.
    #[arg(long, value_name = "TIME", help_heading = heading::COMPILATION)]
    pub budget: Option<String>,
    /// CPU to generate code for: native, x86-64-v2, x86-64-v3 or x86-64-v4.
    #[arg(long, default_value = "native", value_name = "CPU", help_heading = heading::COMPILATION)]
    pub target_cpu: String,
    /// CPU threads shared by all logical CPU devices. Default: one per core.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = heading::DEVICES)]
    pub threads: Option<u16>,
    /// GPU architecture to generate CUDA code for, e.g. `sm_80` or `sm_90a`. Default: the architecture of each GPU, or `sm_80` without a GPU.
    #[arg(long, value_name = "ARCH", help_heading = heading::GPUS)]
    pub gpu_arch: Option<String>,
    /// Dtype to round the operands of products on GPUs to: f32 (no rounding), tf32, bf16 or f16. Sums are always f32.
    #[arg(long, default_value = "f32", value_name = "DTYPE", help_heading = heading::GPUS)]
    pub precision: String,
    /// Algorithm of convolutions on CPUs. `auto` uses minimal filtering (Winograd), which sums f32 in another order, where it is faster.
    #[arg(long, value_enum, default_value = "auto", help_heading = heading::COMPILATION)]
    pub conv: ConvArg,
    /// Benchmark kernel variants on the GPUs and cache the fastest. Cached winners are always used.
    #[arg(long, help_heading = heading::GPUS)]
    pub tune: bool,
    /// Use only gristmill's own kernels, even where cuBLASLt was measured to be faster.
    #[arg(long, help_heading = heading::GPUS)]
    pub no_libraries: bool,
    /// GPUs to use as `gpu:0`, `gpu:1` and so on, by the driver's numbers. `0,0` makes two logical devices that share a GPU. Default: all GPUs in
    /// the driver's order.
    #[arg(long, value_name = "N,..", value_delimiter = ',', help_heading = heading::GPUS)]
    pub visible_gpus: Vec<u32>,
    /// All-reduce implementation between devices. Default: auto.
    #[arg(long, value_name = "WAY", value_enum, default_value = "auto", hide_default_value = true, help_heading = heading::DEVICES)]
    pub all_reduce: AllReduceArg,
    /// Run the verifier and the independent checkers between stages. Wait for each kernel of a GPU, so that an error names it.
    #[arg(long, help_heading = heading::DIAGNOSTICS)]
    pub verify: bool,
    /// Write the text of every stage into a folder.
    #[arg(long, value_name = "DIR", help_heading = heading::DIAGNOSTICS)]
    pub dump_dir: Option<PathBuf>,
    /// Print details: -v stages and times, -vv rewrites, -vvv kernels, -vvvv everything.
    #[arg(short, long, action = clap::ArgAction::Count, help_heading = heading::DIAGNOSTICS)]
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
    /// Fix a symbolic dim, e.g. `batch=8`.
    #[arg(long, value_name = "DIM=N", help_heading = heading::INPUTS)]
    pub set: Vec<String>,
    /// Declare the sizes of a symbolic dim, ends included, e.g. `batch=1..64`. Other sizes are an error; random inputs and plans use the largest.
    /// `batch=8` is the same as --set batch=8.
    #[arg(long, value_name = "DIM=MIN..MAX", help_heading = heading::INPUTS)]
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
    /// Minimal filtering where it is faster.
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
    /// NCCL, if it is found, joins the devices, and its results are correct up to the order of sums; else the shortest predicted one.
    Auto,
    /// NCCL.
    Nccl,
    /// Within groups of devices with fast links, then between the groups.
    Hierarchical,
    /// One device adds for all.
    OneDevice,
    /// Each device adds a share for all, in the order of the operands.
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

    /// The same in a session on a task of a cluster.
    pub fn open_on(&self, target: &str, client: ClientOptions) -> Result<(Session, Options)> {
        let settings = Settings {
            log_device_placement: self.log_device_placement,
            ..Settings::default()
        };
        let session = Session::open_with(target, &settings, client)?;
        Ok((session, self.options(false)?))
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
                AllReduceArg::Nccl => AllReduce::Nccl,
                AllReduceArg::Hierarchical => AllReduce::Hierarchical,
                AllReduceArg::OneDevice => AllReduce::OneDevice,
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
