//! Flags that the compiling verbs share, and how they become [`Options`].

use super::objective::Objective;
use super::{calibrate, load};
use crate::cost::{Bytes, store};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph};
use crate::options::{AllReduce, DimRange, Options, Precision, Tuning};
use crate::place::{DeviceSet, DeviceSpec, Fallback, Pin, Placement, Plan, Target, gpus};
use crate::target::Arch;
use crate::target::TargetCpu;
use clap::{Args, ValueEnum};
use gristmill_runtime::DeviceName;
use gristmill_runtime::device::DeviceKind;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of every verb that compiles.
#[derive(Args)]
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
    /// Devices of all nodes, and what runs again or is parked, from a file that `place --plan-out` wrote.
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// What devices are chosen for. Of a model's runs, `throughput` keeps several in flight, where they are started side by side, as `bench` does.
    #[arg(long, value_enum, default_value = "latency")]
    pub objective: Objective,
    /// Runs of the stream that `--objective throughput` is for.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    pub samples: u64,
    /// What to do when a requested device cannot run a node.
    #[arg(long, value_enum, default_value = "error")]
    pub fallback: FallbackArg,
    /// Print the device of every op, and the requests that were let go.
    #[arg(long)]
    pub log_device_placement: bool,
    /// Memory limit of a device, in bytes or as a share of what it has, e.g. `cpu:0=512MiB` or `gpu:0=40%`.
    #[arg(long, value_name = "DEVICE=SIZE|SHARE%")]
    pub mem: Vec<String>,
    /// Sizes of symbolic dims.
    #[command(flatten)]
    pub dims: DimFlags,
    /// 0: one kernel per op; 1: simplification and grouping; 2: all rules; 3: as 2 with larger limits.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub opt_level: u8,
    /// Time after which nothing better is searched for, e.g. `10s` or `250ms`: what was found until then counts.
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
    /// What products on GPUs round their operands to: f32 (nothing), tf32, bf16 or f16. Sums are f32 in any case.
    #[arg(long, default_value = "f32", value_name = "DTYPE")]
    pub precision: String,
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

/// Flags that say how large symbolic dims are.
#[derive(Args)]
pub struct DimFlags {
    /// Value of a symbolic dim, e.g. `batch=8`.
    #[arg(long, value_name = "DIM=N")]
    pub set: Vec<String>,
    /// Sizes that a symbolic dim may have, ends included, e.g. `batch=1..64`: a contract that every run is held to. Random inputs and plans take
    /// the greatest. `batch=8` is the same as with --set.
    #[arg(long, value_name = "DIM=MIN..MAX")]
    pub shape: Vec<String>,
}

impl DimFlags {
    /// Values and ranges by dim. A dim may have one of each.
    pub fn parse(&self) -> Result<(Bindings, BTreeMap<String, DimRange>)> {
        let (mut dims, mut ranges) = (Bindings::new(), BTreeMap::new());
        let set = self.set.iter().map(|text| (text, "--set", "DIM=N"));
        for (text, flag, form) in set.chain(
            self.shape
                .iter()
                .map(|text| (text, "--shape", "DIM=MIN..MAX or DIM=N")),
        ) {
            let (dim, value) = split(text, flag, form)?;
            let number = |n: &str| {
                let wrong = || {
                    Error::invalid(format!(
                        "{flag} {text:?}: {n:?} is not a size; expected {form}"
                    ))
                };
                n.parse::<usize>().map_err(|_| wrong())
            };
            let earlier = match value.split_once("..").filter(|_| flag == "--shape") {
                Some((min, max)) => {
                    let range = DimRange {
                        min: number(min)?,
                        max: number(max)?,
                    };
                    ranges.insert(dim.to_owned(), range).is_some()
                }
                None => dims.insert(dim.to_owned(), number(value)?).is_some(),
            };
            if earlier {
                return Err(Error::invalid(format!(
                    "{flag} {text}: {dim:?} is given twice"
                )));
            }
        }
        Ok((dims, ranges))
    }
}

/// `--fallback`.
#[derive(Clone, Copy, ValueEnum)]
pub enum FallbackArg {
    /// Refuse to compile.
    Error,
    /// Place elsewhere and warn.
    Warn,
    /// Place elsewhere.
    Allow,
}

/// `--all-reduce`.
#[derive(Clone, Copy, ValueEnum)]
pub enum AllReduceArg {
    /// NCCL, where it is found and gives what it should but for the order of a sum.
    Auto,
    /// The GPUs themselves, in the order of the operands.
    Exchange,
}

impl CompileArgs {
    /// Prints to stderr what `--log-device-placement` asks for.
    pub fn log_placement(&self, placement: &Placement, clusters: &Graph) {
        if self.log_device_placement {
            eprint!("{}", placement.device_log(clusters));
        }
    }

    /// The devices of `--target`, or of `--devices` on this machine.
    fn device_set(&self, threads: usize) -> Result<DeviceSet> {
        let Some(path) = &self.target else {
            let mut set = DeviceSet::parse(&self.devices, threads)?;
            self.limits(&mut set)?;
            calibrate::calibration()
                .iter()
                .for_each(|c| c.apply(&mut set));
            set.look_at_gpus(&self.visible_gpus)?;
            if set.devices.iter().any(|d| d.name.kind == DeviceKind::Gpu) {
                calibrate::gpu_calibration()
                    .iter()
                    .for_each(|c| c.apply(&mut set, &self.visible_gpus));
            }
            return Ok(set);
        };
        let mut target =
            Target::parse(&load::text(path)?).map_err(|e| e.context(path.display()))?;
        self.limits(&mut target.devices)?;
        Ok(target.devices)
    }

    fn limits(&self, devices: &mut DeviceSet) -> Result<()> {
        self.mem.iter().try_for_each(|mem| self.limit(mem, devices))
    }

    /// Bytes that one `--mem` gives each device that it is for.
    fn limit(&self, mem: &str, devices: &mut DeviceSet) -> Result<()> {
        let (spec, size) = split(mem, "--mem", "DEVICE=SIZE or DEVICE=SHARE%")?;
        let Some(share) = size.strip_suffix('%') else {
            let size = parse_size(size).map_err(|e| e.context(format!("--mem {mem:?}")))?;
            return devices.limit_memory(spec, Bytes(size as u64));
        };
        let share = share
            .trim()
            .parse::<f64>()
            .ok()
            .filter(|s| *s > 0.0 && *s <= 100.0)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "--mem {mem:?}: {size:?} is not a share; expected more than 0% and at most 100%"
                ))
            })?;
        let names: Vec<DeviceName> = devices.devices.iter().map(|d| d.name.clone()).collect();
        let fitting = devices.matching(&DeviceSpec::parse(spec)?);
        for name in fitting.iter().map(|&d| &names[d]) {
            let total = gpus::total_memory(name, &self.visible_gpus)?;
            devices.limit_memory(
                &name.to_string(),
                Bytes((total as f64 * share / 100.0) as u64),
            )?;
        }
        // It says which devices there are when none fits.
        if fitting.is_empty() {
            devices.limit_memory(spec, Bytes::ZERO)
        } else {
            Ok(())
        }
    }

    /// The plan that `--plan` names.
    pub fn plan(&self) -> Result<Option<Plan>> {
        let read = |path: &PathBuf| Plan::parse(&load::text(path)?, &path.display().to_string());
        self.plan.as_ref().map(read).transpose()
    }

    /// The options that the flags say.
    pub fn options(&self) -> Result<Options> {
        let threads = self
            .threads
            .map_or_else(gristmill_runtime::cpu::n_cores, usize::from);
        let mut options = Options {
            devices: self.device_set(threads)?,
            measured: calibrate::measured(),
            kept: store::folder().map(|folder| store::placements_path(&folder)),
            objective: self.objective.of_model(self.samples),
            fallback: match self.fallback {
                FallbackArg::Error => Fallback::Error,
                FallbackArg::Warn => Fallback::Warn,
                FallbackArg::Allow => Fallback::Allow,
            },
            opt_level: self.opt_level,
            budget: self.budget.as_deref().map(parse_time).transpose()?,
            threads: Some(threads),
            target_cpu: TargetCpu::parse(&self.target_cpu)?,
            gpu_arch: self.gpu_arch.as_deref().map(Arch::parse).transpose()?,
            gpus: self.visible_gpus.clone(),
            precision: parse_precision(&self.precision)?,
            all_reduce: match self.all_reduce {
                AllReduceArg::Auto => AllReduce::Auto,
                AllReduceArg::Exchange => AllReduce::Exchange,
            },
            tuning: Tuning {
                folder: store::folder(),
                measures: self.tune,
                libraries: !self.no_libraries,
            },
            keep_stages: self.dump_dir.is_some(),
            ..Options::default()
        };
        options.check |= self.verify;
        options.pins = self
            .pin
            .iter()
            .map(|p| Pin::parse(p))
            .collect::<Result<_>>()?;
        options.plan = self.plan()?;
        (options.dims, options.ranges) = self.dims.parse()?;
        Ok(options)
    }
}

/// Splits at the last `=`, since regular expressions may hold one.
fn split<'a>(text: &'a str, flag: &str, form: &str) -> Result<(&'a str, &'a str)> {
    text.rsplit_once('=')
        .filter(|(a, b)| !a.is_empty() && !b.is_empty())
        .ok_or_else(|| Error::invalid(format!("{flag} {text:?}: expected {form}")))
}

/// Far more than any device has, and few enough to be exact as a floating-point number.
const MOST_BYTES: f64 = (1u64 << 52) as f64;

/// `512MiB`, `1.5GiB`, `1000000`.
fn parse_size(text: &str) -> Result<usize> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: Option<usize> = match unit.trim() {
        "" | "B" => Some(1),
        "KiB" | "K" => Some(1 << 10),
        "MiB" | "M" => Some(1 << 20),
        "GiB" | "G" => Some(1 << 30),
        _ => None,
    };
    let whole = || {
        number
            .parse::<usize>()
            .ok()
            .zip(factor)
            .and_then(|(n, f)| n.checked_mul(f))
    };
    // Parts of a unit, down to whole bytes.
    let broken = || {
        let bytes = number.parse::<f64>().ok()? * factor.filter(|&f| f > 1)? as f64;
        (bytes < MOST_BYTES).then_some(bytes as usize)
    };
    whole().or_else(broken).ok_or_else(|| {
        Error::invalid(format!(
            "size {text:?}: expected a form like 512MiB, 1.5GiB or a number of bytes"
        ))
    })
}

fn parse_precision(text: &str) -> Result<Precision> {
    let found = Precision::NAMES.iter().find(|(name, _)| *name == text);
    let names = || Precision::NAMES.map(|(name, _)| name).join(", ");
    found
        .map(|(_, p)| *p)
        .ok_or_else(|| Error::invalid(format!("--precision {text:?}: expected one of {}", names())))
}

/// `10s`, `1.5s`, `250ms`, `2m`.
fn parse_time(text: &str) -> Result<Duration> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        "m" | "min" => Some(60.0),
        _ => None,
    };
    let time = number
        .parse::<f64>()
        .ok()
        .zip(seconds)
        .and_then(|(n, s)| Duration::try_from_secs_f64(n * s).ok());
    time.ok_or_else(|| {
        Error::invalid(format!(
            "--budget {text:?}: expected a time like 10s, 250ms or 2m"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_pairs() {
        assert_eq!(parse_size("4GiB").unwrap(), 4 << 30);
        assert_eq!(parse_size("1.5KiB").unwrap(), 1536);
        assert!(
            [
                "1.5",
                "1.2.3GiB",
                ".",
                "1e3GiB",
                "-1GiB",
                "1.5B",
                "9999999999.5GiB"
            ]
            .iter()
            .all(|t| parse_size(t).is_err())
        );
        assert!(
            parse_size("40%").is_err()
                && parse_size("").is_err()
                && parse_size("99999999999999GiB").is_err()
        );
        assert_eq!(parse_time("1.5s").unwrap(), Duration::from_millis(1500));
        assert_eq!(parse_time("250ms").unwrap(), Duration::from_millis(250));
        for wrong in ["", "s", "10", "10 s", "-1s", "1e99s", "1.2.3s", "10h"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
        assert_eq!(split("a=b=cpu:0", "--pin", "").unwrap(), ("a=b", "cpu:0"));
        assert!(split("cpu:0", "--pin", "").is_err());
    }
}
