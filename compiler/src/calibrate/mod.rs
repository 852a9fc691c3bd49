//! Measured rates of this machine's CPU and GPUs ([`gpus`]): taken once in a few seconds with our own kernels, and kept in the cache folder.
//!
//! The file is a profile as `--target` reads it (`place::Target`): one CPU with one thread, one with all, and the link between logical
//! devices of this process. Its name says which machine and version it is of.

pub mod gpus;
pub mod load;

use crate::compiled::Compiled;
use crate::cost::{Bytes, DeviceProfile, LinkProfile, Nanos, WorkClass, flops_on_cpu, store};
use crate::error::{Error, Result};
use crate::ir::{Graph, GraphBuilder, Layout, Op, ScalarOp, ValueId, Window};
use crate::options::{ConvAlgorithm, Options};
use crate::place::{DeviceSet, RateSource, Target};
use crate::session::{Session, Settings};
use crate::{DType, Tensor};
use gristmill_runtime::cpu;
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::files::MAX_TOML_BYTES;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Rates of this machine's CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Name of the machine and version of the kernels.
    pub name: String,
    /// With one thread.
    pub one: DeviceProfile,
    /// With all threads.
    pub all: DeviceProfile,
    /// Between logical devices of this process.
    pub link: LinkProfile,
}

/// The machine that measurements are of.
pub fn machine() -> String {
    format!(
        "{} ({:?})",
        cpu::probe().model,
        gristmill_kernels::Isa::current()
    )
}

/// The file in a cache folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join("cpu.toml")
}

/// The name that a calibration of a machine has.
pub fn name(machine: &str) -> String {
    format!("{machine}, gristmill {}", env!("CARGO_PKG_VERSION"))
}

/// The calibration that a file holds, if it is of `name`. A file that is corrupt or foreign counts as none, with a warning that names it.
pub fn load(path: &Path, name: &str) -> (Option<Calibration>, Option<String>) {
    let parse = |text: &str| {
        let c = Calibration::parse(text).map_err(|e| e.to_string())?;
        belongs(&c.name, name).map(|()| c)
    };
    match store::load(path, MAX_TOML_BYTES, parse) {
        Ok(found) => (found, None),
        Err(warning) => (None, Some(warning)),
    }
}

/// Errors when a calibration has another name than that of this machine.
fn belongs(found: &str, expected: &str) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("it is of {found:?}, not of {expected:?}"))
}

impl Calibration {
    /// Reads the text of [`Calibration::to_text`].
    pub fn parse(text: &str) -> Result<Calibration> {
        let Target { name, devices: set } = Target::parse(text)?;
        // Files of earlier versions have none, and AVX2 would be assumed.
        if !text.lines().any(|line| line.starts_with("lanes")) {
            return Err(Error::invalid(
                "it has no lanes; gristmill calibrate measures again",
            ));
        }
        match (set.devices.as_slice(), set.links.get(&(0, 1))) {
            ([one, all], Some(&link))
                if set.devices.iter().all(|d| d.name.kind == DeviceKind::Cpu) =>
            {
                Ok(Calibration {
                    name,
                    one: one.profile.clone(),
                    all: all.profile.clone(),
                    link,
                })
            }
            _ => Err(Error::invalid(
                "expected two CPUs, of one thread and of all",
            )),
        }
    }

    /// The profile of a file.
    pub fn to_text(&self) -> String {
        let mut out = format!("format = \"gristmill/profile/1\"\nname = {:?}\n", self.name);
        out += &device_text(&self.one);
        out += &device_text(&self.all);
        out + &link_text("any", "any", &self.link)
    }

    /// The profile of this machine alone, with all threads, as `--target` takes it.
    pub fn target_text(&self) -> String {
        format!(
            "format = \"gristmill/profile/1\"\nname = {:?}\n{}",
            self.name,
            device_text(&self.all)
        )
    }

    /// Rates of `n_threads` threads: in proportion between one and all; more than all are no faster.
    pub fn cpu(&self, n_threads: usize) -> DeviceProfile {
        let (one, all) = (&self.one, &self.all);
        let ends = if n_threads <= one.n_threads { one } else { all };
        let share = match all.n_threads > one.n_threads {
            true => {
                (n_threads.clamp(one.n_threads, all.n_threads) - one.n_threads) as f64
                    / (all.n_threads - one.n_threads) as f64
            }
            false => 0.0,
        };
        let between = |rate: fn(&DeviceProfile) -> f64| rate(one) + (rate(all) - rate(one)) * share;
        DeviceProfile {
            flops_f32: between(|p| p.flops_f32),
            memory_bandwidth: between(|p| p.memory_bandwidth),
            cache_bandwidth: between(|p| p.cache_bandwidth),
            cache_bytes: Bytes(1 << 20).times(n_threads.max(1) as u64),
            n_threads: n_threads.max(1),
            ..ends.clone()
        }
    }

    /// Puts measured rates in the place of assumed ones.
    pub fn apply(&self, set: &mut DeviceSet) {
        for d in set
            .devices
            .iter_mut()
            .filter(|d| d.name.kind == DeviceKind::Cpu)
        {
            d.profile = self.cpu(d.profile.n_threads);
            d.rates = RateSource::Calibrated;
        }
        set.link = self.link;
    }
}

/// A profile as a table of a file.
fn device_text(p: &DeviceProfile) -> String {
    let shares = p.efficiencies.iter().map(|((class, dtype), share)| {
        let class = class.name();
        format!(
            "{class}{} = {share:?}",
            dtype.map_or(String::new(), |d| format!("_{}", d.name()))
        )
    });
    let lanes = match p.kind {
        DeviceKind::Cpu => format!("lanes = {}\n", p.lanes),
        _ => String::new(),
    };
    let peaks = p
        .peaks
        .iter()
        .map(|(dtype, peak)| format!(", {} = {peak:?}", dtype.name()));
    format!(
        "\n[[device]]\nkind = \"{}\"\nthreads = {}\n{lanes}memory_bytes_per_second = {:?}\ncache_bytes = {}\ncache_bytes_per_second = {:?}\n\
         launch_ns = {}\nflops_per_second = {{ f32 = {:?}{} }}\nefficiency = {{ {} }}\n",
        p.kind.name().to_lowercase(),
        p.n_threads,
        p.memory_bandwidth,
        p.cache_bytes.0,
        p.cache_bandwidth,
        p.launch.0,
        p.flops_f32,
        peaks.collect::<String>(),
        shares.collect::<Vec<_>>().join(", ")
    )
}

/// A link as a table of a file.
fn link_text(from: &str, to: &str, link: &LinkProfile) -> String {
    format!(
        "\n[[link]]\nfrom = {from:?}\nto = {to:?}\nlatency_ns = {}\nbytes_per_second = {:?}\n",
        link.latency.0, link.bytes_per_second as f64
    )
}

/// Time and sizes of the measurements, which repeat their runs; the least time counts.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Time of each measurement, at least three runs.
    pub each: Duration,
    /// Bytes of the tensor that does not fit into caches.
    pub memory_bytes: usize,
    /// The same of a GPU.
    pub gpu_memory_bytes: usize,
    /// Rows, columns and depth of a GPU's product; the sizes of its other kernels follow from that.
    pub gpu_side: usize,
}

impl Default for Effort {
    fn default() -> Effort {
        Effort {
            each: Duration::from_millis(150),
            memory_bytes: 64 << 20,
            gpu_memory_bytes: 1 << 30,
            gpu_side: 4096,
        }
    }
}

/// Measures this machine's CPU.
pub fn calibrate(machine: &str, n_threads: usize, effort: Effort) -> Result<Calibration> {
    let one = rates_of_cpu(1, effort)?;
    let all = if n_threads > 1 {
        rates_of_cpu(n_threads, effort)?
    } else {
        one.clone()
    };
    Ok(Calibration {
        name: name(machine),
        link: link(one.launch, effort)?,
        one,
        all,
    })
}

fn rates_of_cpu(n_threads: usize, effort: Effort) -> Result<DeviceProfile> {
    let assumed = DeviceProfile::this_cpu(n_threads);
    let session = session("cpu:1", n_threads)?;
    let options = Options {
        // The gain of minimal filtering depends on the convolution.
        conv: ConvAlgorithm::Direct,
        ..Options::default()
    };
    let seconds = |g: Graph| least_seconds(&session.compile(&g, &options)?, effort);
    let launch = launch_on(&session, effort)?;
    let rate = |g: Graph, amount: f64| -> Result<f64> {
        Ok(amount / (seconds(g)? - launch.0 as f64 / 1e9).max(1e-9))
    };
    let product = matmul()?;
    let flops_f32 = rate(product.clone(), flops_on_cpu(&product))?
        / assumed.efficiency(WorkClass::MatMul, DType::F32);
    let mut profile = DeviceProfile {
        flops_f32,
        memory_bandwidth: rate(
            map(effort.memory_bytes / 4, ScalarOp::Neg)?,
            2.0 * effort.memory_bytes as f64,
        )?,
        cache_bandwidth: rate(map(1 << 15, ScalarOp::Neg)?, 2.0 * f64::from(4 << 15))?,
        launch,
        ..assumed
    };
    for (class, g) in [
        (WorkClass::Conv, conv(1, 56, 64)?),
        (WorkClass::Map, map(1 << 15, ScalarOp::Exp)?),
        (WorkClass::Reduce, softmax(128, 256)?),
    ] {
        let share = rate(g.clone(), flops_on_cpu(&g))? / flops_f32;
        profile
            .efficiencies
            .insert((class, Some(DType::F32)), share.clamp(1e-4, 1.0));
    }
    Ok(profile)
}

/// Least time of a run, in seconds.
fn least_seconds(compiled: &Compiled, effort: Effort) -> Result<f64> {
    let types = compiled
        .inputs()
        .iter()
        .map(|(_, t)| (t.dtype, t.static_shape().unwrap_or_default()));
    let inputs = types
        .map(|(dtype, shape)| Tensor::zeros(dtype, &shape))
        .collect::<Result<Vec<_>, _>>()?;
    let executable = compiled.for_inputs(&inputs)?;
    let mut outputs = executable.run(&inputs)?.into_tensors();
    let (started, mut least, mut runs) = (Instant::now(), Duration::MAX, 0);
    while runs < 3 || started.elapsed() < effort.each {
        let run = Instant::now();
        executable.run_into(&inputs, &mut outputs)?;
        (least, runs) = (least.min(run.elapsed()), runs + 1);
    }
    Ok(least.as_secs_f64())
}

fn session(devices: &str, n_threads: usize) -> Result<Session> {
    Session::new(&Settings {
        threads: Some(n_threads),
        devices: DeviceSet::parse(devices, n_threads)?,
        ..Settings::default()
    })
}

/// Options for kernels as they are written.
fn as_written() -> Options {
    Options {
        opt_level: 0,
        ..Options::default()
    }
}

/// Time to start a kernel: a chain of kernels that have nothing to do.
fn launch_on(session: &Session, effort: Effort) -> Result<Nanos> {
    const KERNELS: usize = 64;
    let options = as_written();
    let chain = |n: usize| {
        graph(16, |b, mut x| {
            for _ in 0..n {
                x = b.map(ScalarOp::Exp, &[x])?;
            }
            Ok(x)
        })
    };
    let long = least_seconds(&session.compile(&chain(KERNELS + 1)?, &options)?, effort)?;
    let short = least_seconds(&session.compile(&chain(1)?, &options)?, effort)?;
    Ok(Nanos::from_seconds(
        ((long - short) / KERNELS as f64).max(1e-9),
    ))
}

/// The link between two logical devices: tensors that go back and forth, small ones for the latency, large ones for the bandwidth.
fn link(launch: Nanos, effort: Effort) -> Result<LinkProfile> {
    const HOPS: usize = 8;
    const LARGE: usize = 1 << 20;
    let (two, one) = (session("cpu:2", 2)?, session("cpu:1", 1)?);
    let hops = |n: usize, apart: bool| {
        let g = graph(n, |b, mut x| {
            for hop in 0..=HOPS {
                let device = if apart && hop % 2 == 1 {
                    "/cpu:1"
                } else {
                    "/cpu:0"
                };
                x = b.with_device(device, |b| b.map(ScalarOp::Neg, &[x]))?;
            }
            Ok(x)
        })?;
        let session = if apart { &two } else { &one };
        least_seconds(&session.compile(&g, &as_written())?, effort)
    };
    let per_hop = |n: usize| -> Result<f64> {
        Ok((hops(n, true)? - hops(n, false)?).max(1e-9) / HOPS as f64)
    };
    let (small, large) = (per_hop(1)?, per_hop(LARGE)?);
    let latency = Nanos::from_seconds(small).0.max(launch.0.min(100));
    let bandwidth = (4 * LARGE) as f64 / (large - small).max(1e-7);
    Ok(LinkProfile {
        latency: Nanos(latency),
        bytes_per_second: bandwidth as u64,
    })
}

/// A graph of one vector input.
fn graph(
    n: usize,
    body: impl FnOnce(&mut GraphBuilder, ValueId) -> Result<ValueId>,
) -> Result<Graph> {
    let mut b = GraphBuilder::new("calibration");
    let x = b.input("x", DType::F32, [n]);
    let y = body(&mut b, x)?;
    b.output("y", y);
    b.finish()
}

fn map(n: usize, op: ScalarOp) -> Result<Graph> {
    graph(n, |b, x| b.map(op, &[x]))
}

/// A product with weights.
fn matmul() -> Result<Graph> {
    let mut b = GraphBuilder::new("calibration");
    let x = b.input("x", DType::F32, [384usize, 768]);
    let w = b.constant(Tensor::zeros(DType::F32, &[768, 768])?);
    let y = b.matmul(x, w)?;
    b.output("y", y);
    b.finish()
}

/// A convolution of 3 x 3 over `n` images of `side` x `side` with as many channels before as after.
fn conv(n: usize, side: usize, channels: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("calibration");
    let x = b.input("x", DType::F32, [n, side, side, channels]);
    let w = b.constant(Tensor::zeros(DType::F32, &[3, 3, channels, channels])?);
    let window = Window {
        strides: vec![1; 2],
        dilations: vec![1; 2],
        pads_low: vec![1; 2],
        pads_high: vec![1; 2],
    };
    let y = b.add1(
        Op::Conv {
            window,
            groups: 1,
            layout: Layout::ChannelsLast,
        },
        &[x, w],
    )?;
    b.output("y", y);
    b.finish()
}

fn softmax(rows: usize, columns: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("calibration");
    let x = b.input("x", DType::F32, [rows, columns]);
    let y = b.add1(
        Op::Softmax {
            axis: 1,
            log: false,
        },
        &[x],
    )?;
    b.output("y", y);
    b.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quick() -> Calibration {
        calibrate(
            "a machine",
            2,
            Effort {
                each: Duration::ZERO,
                memory_bytes: 1 << 20,
                ..Effort::default()
            },
        )
        .unwrap()
    }

    #[test]
    fn a_calibration_survives_in_a_file() {
        let c = quick();
        assert_eq!(Calibration::parse(&c.to_text()).unwrap(), c);
        let dir = tempfile::tempdir().unwrap();
        let file = path(dir.path());
        assert_eq!(load(&file, &c.name), (None, None));
        store::replace(&file, &c.to_text()).unwrap();
        assert_eq!(load(&file, &c.name), (Some(c.clone()), None));
        let target = Target::parse(&c.target_text()).unwrap();
        assert_eq!(target.devices.devices[0].profile, c.all);
    }

    #[test]
    fn files_that_do_not_fit_are_named_and_ignored() {
        let c = quick();
        let dir = tempfile::tempdir().unwrap();
        let file = path(dir.path());
        let text = c.to_text();
        for (text, name) in [
            (text.clone(), "another"),
            (text.replace("latency_ns", "latency_us"), c.name.as_str()),
            (text.replace("\nlanes", "\n# lanes"), c.name.as_str()),
            (text[..text.len() / 2].to_owned(), c.name.as_str()),
            (c.target_text(), c.name.as_str()),
        ] {
            store::replace(&file, &text).unwrap();
            let (none, warning) = load(&file, name);
            assert_eq!(none, None);
            assert!(
                warning
                    .expect("a warning")
                    .starts_with(&file.display().to_string())
            );
        }
    }

    #[test]
    fn rates_lie_between_one_thread_and_all() {
        let mut c = quick();
        (c.one.flops_f32, c.all.flops_f32, c.all.n_threads) = (10e9, 40e9, 4);
        let flops: Vec<f64> = [1, 2, 3, 4, 8].map(|n| c.cpu(n).flops_f32).to_vec();
        assert_eq!(flops, [10e9, 20e9, 30e9, 40e9, 40e9]);
        let mut set = DeviceSet::parse("cpu:2", 4).unwrap();
        c.apply(&mut set);
        assert_eq!((set.devices[1].profile.flops_f32, set.link), (20e9, c.link));
    }
}
