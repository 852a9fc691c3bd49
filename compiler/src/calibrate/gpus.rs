//! Measured rates of this machine's GPUs and of the links to and between them, kept beside the
//! CPU's rates.
//!
//! The file is a profile as `--target` reads it: the host's CPU, then the GPUs in the driver's
//! order, and a link for each ordered pair. Its name holds machine, GPUs, driver and version.

use super::{Effort, belongs, conv, device_text, launch_on, link_text, map, softmax};
use crate::cost::flops;
use crate::cost::{Bytes, DeviceProfile, LinkProfile, Nanos, WorkClass, store};
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Graph, ScalarOp};
use crate::options::Options;
use crate::place::gpus::{described, ordinal};
use crate::place::{Device, DeviceSet, RateSource, Target};
use crate::rng::Rng;
use crate::session::{Session, Settings};
use crate::{DType, Tensor};
use gristmill_runtime::cuda::{self, CudaDevice, CudaGpu};
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::files::MAX_TOML_BYTES;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Rates of GPUs and links.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuCalibration {
    /// The CPU, then the GPUs by the driver's numbers.
    target: Target,
}

/// Sizes of the copies that tell latency and bandwidth of a link.
const LINK_BYTES: [usize; 2] = [4, 32 << 20];

/// The file in a cache folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join("gpus.toml")
}

/// The name that a calibration of the first GPUs of a machine has. Errors when the driver shows fewer.
fn name(machine: &str, n_gpus: usize) -> Result<String, String> {
    let found = cuda::probe()?;
    if found.len() < n_gpus {
        return Err(format!(
            "it has {n_gpus} GPUs, the driver shows {}",
            found.len()
        ));
    }
    let names: Vec<&str> = found[..n_gpus].iter().map(|g| g.name.as_str()).collect();
    let (major, minor) = cuda::driver_version()?;
    Ok(format!(
        "{machine}, {}, driver {major}.{minor}, gristmill {}",
        names.join(", "),
        env!("CARGO_PKG_VERSION")
    ))
}

/// The calibration that a file holds, if it is of this machine's GPUs. A file that is corrupt or foreign counts as none, with a warning that names it.
pub fn load(path: &Path, machine: &str) -> (Option<GpuCalibration>, Option<String>) {
    let parse = |text: &str| {
        let c = GpuCalibration::parse(text).map_err(|e| e.to_string())?;
        belongs(&c.target.name, &name(machine, c.n_gpus())?).map(|()| c)
    };
    match store::load(path, MAX_TOML_BYTES, parse) {
        Ok(found) => (found, None),
        Err(warning) => (None, Some(warning)),
    }
}

impl GpuCalibration {
    /// Parses the output of [`GpuCalibration::to_text`].
    pub fn parse(text: &str) -> Result<GpuCalibration> {
        let target = Target::parse(text)?;
        let kinds: Vec<DeviceKind> = target.devices.devices.iter().map(|d| d.name.kind).collect();
        match kinds.split_first() {
            Some((DeviceKind::Cpu, gpus))
                if !gpus.is_empty() && gpus.iter().all(|k| *k == DeviceKind::Gpu) =>
            {
                Ok(GpuCalibration { target })
            }
            _ => Err(Error::invalid("expected a CPU and then GPUs")),
        }
    }

    /// The profile of a file, as `--target` takes it.
    pub fn to_text(&self) -> String {
        let set = &self.target.devices;
        let mut out = format!(
            "format = \"gristmill/profile/1\"\nname = {:?}\n",
            self.target.name
        );
        set.devices
            .iter()
            .for_each(|d| out += &device_text(&d.profile));
        for (&(from, to), link) in &set.links {
            out += &link_text(
                &set.devices[from].name.to_string(),
                &set.devices[to].name.to_string(),
                link,
            );
        }
        out
    }

    /// Number of measured GPUs.
    pub fn n_gpus(&self) -> usize {
        self.target.devices.devices.len() - 1
    }

    /// Rates of a GPU by the driver's number.
    pub fn gpu(&self, ordinal: usize) -> Option<&DeviceProfile> {
        self.target
            .devices
            .devices
            .get(ordinal + 1)
            .map(|d| &d.profile)
    }

    /// The links from the host to a GPU and back.
    pub fn host_links(&self, ordinal: usize) -> Option<[LinkProfile; 2]> {
        let link = |from, to| self.target.devices.links.get(&(from, to)).copied();
        Some([link(0, ordinal + 1)?, link(ordinal + 1, 0)?])
    }

    /// Puts measured rates in the place of assumed ones. `gpus` are the driver's numbers of `/device:GPU:0` and so on, as in
    /// [`Settings::gpus`].
    pub fn apply(&self, set: &mut DeviceSet, gpus: &[u32]) {
        let own = |d: &Device| self.own_device(d, gpus);
        let measured: Vec<Option<usize>> = set.devices.iter().map(own).collect();
        for (device, own) in set.devices.iter_mut().zip(&measured) {
            if let Some(own @ 1..) = *own {
                device.profile = self.target.devices.devices[own].profile.clone();
                device.rates = RateSource::Calibrated;
            }
        }
        for (i, from) in measured.iter().enumerate() {
            for (j, to) in measured.iter().enumerate().filter(|(j, _)| *j != i) {
                if let Some(link) = from.zip(*to).and_then(|(from, to)| self.link(from, to)) {
                    set.links.insert((i, j), link);
                }
            }
        }
    }

    /// Index of the measured device that a logical device is on.
    fn own_device(&self, device: &Device, gpus: &[u32]) -> Option<usize> {
        match device.name.kind {
            DeviceKind::Cpu => Some(0),
            DeviceKind::Gpu => {
                let own = ordinal(&device.name, gpus).ok()? as usize + 1;
                (own <= self.n_gpus()).then_some(own)
            }
            DeviceKind::Emu => None,
        }
    }

    /// Link between logical devices on measured ones; none between logical CPUs.
    fn link(&self, from: usize, to: usize) -> Option<LinkProfile> {
        let devices = &self.target.devices;
        if from != to {
            return Some(devices.links[&(from, to)]);
        }
        // Copies within a GPU read and write each byte.
        let profile = &devices.devices[from].profile;
        (from > 0).then_some(LinkProfile {
            latency: profile.launch,
            bytes_per_second: (profile.memory_bandwidth / 2.0) as u64,
        })
    }
}

/// Measures the first `n_gpus` GPUs of this machine, each product once, and all links. `host` has
/// the rates of the CPU, and `host_link` those of the link between logical CPUs.
///
/// Errors with `Unsupported` when a GPU is not there or nothing compiles for it.
pub fn calibrate(
    machine: &str,
    n_gpus: usize,
    host: &DeviceProfile,
    host_link: LinkProfile,
    effort: Effort,
) -> Result<GpuCalibration> {
    let name = name(machine, n_gpus).map_err(Error::unsupported)?;
    let found = cuda::probe().map_err(Error::unsupported)?;
    let mut of_product: BTreeMap<&str, DeviceProfile> = BTreeMap::new();
    for (i, gpu) in found[..n_gpus].iter().enumerate() {
        if !of_product.contains_key(gpu.name.as_str()) {
            of_product.insert(&gpu.name, profile(i as u32, gpu, effort)?);
        }
    }
    let mut devices = DeviceSet::parse(&format!("cpu:1,gpu:{n_gpus}"), host.n_threads)?;
    devices.devices[0].profile = host.clone();
    for (device, gpu) in devices.devices[1..].iter_mut().zip(&found) {
        device.profile = of_product[gpu.name.as_str()].clone();
    }
    devices.links = links(n_gpus, host_link)?;
    Ok(GpuCalibration {
        target: Target { name, devices },
    })
}

/// The links between the host (0) and the GPUs (from 1 on).
fn links(n_gpus: usize, host: LinkProfile) -> Result<BTreeMap<(usize, usize), LinkProfile>> {
    let open = |i: usize| CudaGpu::open(i as u32, cuda::Settings::default());
    let gpus = (0..n_gpus).map(open).collect::<Result<Vec<_>, _>>()?;
    let mut links = BTreeMap::new();
    for (i, gpu) in gpus.iter().enumerate() {
        let [small, large] = LINK_BYTES.map(|n| gpu.time_link(n));
        let (small, large) = (small?, large?);
        let [to_gpu, to_host] =
            [0, 1].map(|way| through_host(link([small[way], large[way]]), host));
        links.insert((0, i + 1), to_gpu);
        links.insert((i + 1, 0), to_host);
    }
    for (i, from) in gpus.iter().enumerate() {
        for (j, to) in gpus.iter().enumerate().filter(|(j, _)| *j != i) {
            let between = match straight(from, to)? {
                // The receiving device's worker is woken up.
                Some(l) => LinkProfile {
                    latency: l.latency + host.latency,
                    ..l
                },
                None => in_turn(links[&(i + 1, 0)], links[&(0, j + 1)]),
            };
            links.insert((i + 1, j + 1), between);
        }
    }
    Ok(links)
}

/// The link from one GPU to another without the host, if there is one.
fn straight(from: &CudaGpu, to: &CudaGpu) -> Result<Option<LinkProfile>> {
    let [small, large] = LINK_BYTES.map(|n| from.time_push(to, n));
    let times = small?.zip(large?);
    Ok(times.map(|(small, large)| link([small, large])))
}

/// The link whose copies of [`LINK_BYTES`] take so long.
fn link([small, large]: [Duration; 2]) -> LinkProfile {
    let seconds = large.saturating_sub(small).as_secs_f64().max(1e-9);
    let bytes_per_second = (((LINK_BYTES[1] - LINK_BYTES[0]) as f64 / seconds) as u64).max(1);
    LinkProfile {
        latency: Nanos(small.as_nanos() as u64),
        bytes_per_second,
    }
}

/// Transfers to or from a GPU are also copied once by the host, whose own link counts two copies,
/// and wake up a worker.
fn through_host(gpu: LinkProfile, host: LinkProfile) -> LinkProfile {
    let copy = LinkProfile {
        bytes_per_second: host.bytes_per_second.saturating_mul(2),
        ..host
    };
    in_turn(gpu, copy)
}

/// Over one link and then over another.
fn in_turn(a: LinkProfile, b: LinkProfile) -> LinkProfile {
    let seconds = 1.0 / a.bytes_per_second.max(1) as f64 + 1.0 / b.bytes_per_second.max(1) as f64;
    LinkProfile {
        latency: a.latency + b.latency,
        bytes_per_second: ((1.0 / seconds) as u64).max(1),
    }
}

/// Times of copies on a GPU, of as many bytes as it has room for: others may use it.
fn time_copies(ordinal: u32, most_bytes: usize) -> Result<(usize, cuda::CopyTimes)> {
    const LEAST_BYTES: usize = 1 << 20;
    let gpu = CudaGpu::open(ordinal, cuda::Settings::default())?;
    let mut size_bytes = most_bytes;
    loop {
        match gpu.time_copies(size_bytes, 4) {
            Err(e)
                if e.kind() == gristmill_runtime::ErrorKind::OutOfMemory
                    && size_bytes > LEAST_BYTES =>
            {
                size_bytes /= 2
            }
            times => return Ok((size_bytes, times?)),
        }
    }
}

/// Rates of a GPU.
fn profile(ordinal: u32, gpu: &CudaDevice, effort: Effort) -> Result<DeviceProfile> {
    let assumed = described(gpu);
    let bench = Bench::new(ordinal, effort)?;
    let side = effort.gpu_side;
    let (copied_bytes, copies) = time_copies(ordinal, effort.gpu_memory_bytes)?;
    let in_cache = (gpu.cache_bytes as usize / 8).max(64 << 10) / 4;
    let share = assumed.efficiency(WorkClass::MatMul, DType::F32);
    let flops_f32 = bench.flops_rate(product(DType::F32, side)?)? / share;
    let mut profile = DeviceProfile {
        flops_f32,
        memory_bandwidth: 2.0 * copied_bytes as f64 / copies.on_device.as_secs_f64().max(1e-9),
        cache_bandwidth: bench.rate(&map(in_cache, ScalarOp::Neg)?, 8.0 * in_cache as f64)?,
        cache_bytes: Bytes(u64::from(gpu.cache_bytes)),
        launch: launch_on(&bench.session, effort)?,
        ..assumed
    };
    for half in [DType::BF16, DType::F16] {
        let peak = bench.flops_rate(product(half, side)?)? / share;
        profile.peaks.insert(half, peak);
    }
    for (class, g) in class_graphs(side)? {
        let share = bench.flops_rate(g)? / flops_f32;
        let key = (class, Some(DType::F32));
        profile.efficiencies.insert(key, share.clamp(1e-4, 1.0));
    }
    Ok(profile)
}

/// A GPU whose rates are measured.
struct Bench {
    session: Session,
    effort: Effort,
}

impl Bench {
    fn new(ordinal: u32, effort: Effort) -> Result<Bench> {
        let mut devices = DeviceSet::parse("gpu:1", 1)?;
        devices.look_at_gpus(&[ordinal])?;
        let session = Session::new(&Settings {
            devices,
            gpus: vec![ordinal],
            check_kernels: false,
            ..Settings::default()
        })?;
        Ok(Bench { session, effort })
    }

    /// Such an amount of work of a graph, per second.
    fn rate(&self, g: &Graph, amount: f64) -> Result<f64> {
        Ok(amount / kernel_seconds(g, &self.session, self.effort)?)
    }

    /// Operations of a graph per second.
    fn flops_rate(&self, g: Graph) -> Result<f64> {
        self.rate(&g, flops(&g))
    }
}

/// Graphs for the efficiencies of classes other than products.
fn class_graphs(side: usize) -> Result<[(WorkClass, Graph); 3]> {
    let (images, extent) = ((side / 512).max(1), (side / 64).clamp(4, 56));
    let channels = (side / 64).clamp(8, 64);
    Ok([
        (WorkClass::Conv, conv(images, extent, channels)?),
        (WorkClass::Map, map(side * side / 16, ScalarOp::Exp)?),
        (WorkClass::Reduce, softmax(side / 8, side / 4)?),
    ])
}

/// The product of two square matrices.
fn product(dtype: DType, side: usize) -> Result<Graph> {
    let mut b = crate::ir::GraphBuilder::new("calibration");
    let [x, y] = ["x", "y"].map(|name| b.input(name, dtype, [side, side]));
    let product = b.matmul(x, y)?;
    b.output("product", product);
    b.finish()
}

/// Time of all kernels of a graph, one right after the other, on random operands: power, and so the clock, depends on them.
fn kernel_seconds(g: &Graph, session: &Session, effort: Effort) -> Result<f64> {
    let compiled = session.compile(g, &Options::default())?;
    let mut rng = Rng(1);
    let inputs = compiled
        .inputs()
        .iter()
        .map(|(_, t)| random(&mut rng, t.dtype, &t.static_shape().unwrap_or_default()));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let executable = compiled.for_inputs(&inputs)?;
    executable.run(&inputs)?;
    let ns: u64 = executable
        .time_kernels(effort.each)?
        .iter()
        .map(|k| k.ns)
        .sum();
    Ok(ns.max(1) as f64 / 1e9)
}

fn random(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let size = dtype.size_bytes();
    let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * size);
    for _ in 0..shape.iter().product::<usize>() {
        bytes.extend(&real_bits(dtype, rng.normal()).to_le_bytes()[..size]);
    }
    Ok(Tensor::from_bytes(dtype, shape, &bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two GPUs with rates that differ.
    fn calibration() -> GpuCalibration {
        let mut devices = DeviceSet::parse("cpu:1,gpu:2", 4).unwrap();
        for (i, d) in devices.devices.iter_mut().enumerate() {
            d.profile.flops_f32 = 1e12 * (i + 1) as f64;
            d.profile.memory_bandwidth = 2e12;
            d.profile.launch = Nanos(1_500);
            d.profile.peaks = if i == 0 {
                BTreeMap::new()
            } else {
                [(DType::BF16, 4e13)].into()
            };
            d.profile.efficiencies = [((WorkClass::Map, Some(DType::F32)), 0.25)].into();
        }
        let pairs = (0..3)
            .flat_map(|a| (0..3).map(move |b| (a, b)))
            .filter(|(a, b)| a != b);
        let link = |(a, b)| LinkProfile {
            latency: Nanos(1_000 * a + b),
            bytes_per_second: 1_000_000_000 * (3 * a + b),
        };
        devices.links = pairs
            .map(|(a, b)| ((a, b), link((a as u64, b as u64))))
            .collect();
        GpuCalibration {
            target: Target {
                name: "a machine".into(),
                devices,
            },
        }
    }

    #[test]
    fn a_calibration_survives_in_a_file() {
        let c = calibration();
        let read = GpuCalibration::parse(&c.to_text()).unwrap();
        assert_eq!(read.to_text(), c.to_text());
        assert_eq!(
            (read.gpu(1), read.gpu(2), read.host_links(1)),
            (c.gpu(1), None, c.host_links(1))
        );
        let dir = tempfile::tempdir().unwrap();
        let file = path(dir.path());
        assert_eq!(load(&file, "m"), (None, None));
        let text = c.to_text();
        let cpu_alone = &text[..text.match_indices("\n[[").nth(1).unwrap().0];
        store::replace(&file, cpu_alone).unwrap();
        let (none, warning) = load(&file, "m");
        assert!(none.is_none() && warning.unwrap().contains("expected a CPU and then GPUs"));
    }

    #[test]
    fn measured_rates_go_to_the_devices_that_they_are_of() {
        let c = calibration();
        let mut set = DeviceSet::parse("gpu:3,cpu:2,emu:1", 4).unwrap();
        let before = set.clone();
        // The third is the second again.
        c.apply(&mut set, &[1, 0, 1]);
        let flops: Vec<f64> = set.devices[..3]
            .iter()
            .map(|d| d.profile.flops_f32)
            .collect();
        assert_eq!(flops, [3e12, 2e12, 3e12]);
        assert_eq!(
            set.devices[3..],
            before.devices[3..],
            "the CPU's rates are measured by themselves"
        );
        let link = |from, to| set.links.get(&(from, to)).copied();
        assert_eq!(link(0, 1), c.target.devices.links.get(&(2, 1)).copied());
        assert_eq!(
            link(0, 2),
            Some(LinkProfile {
                latency: Nanos(1_500),
                bytes_per_second: 1_000_000_000_000
            })
        );
        assert_eq!(
            [link(1, 4).unwrap(), link(4, 1).unwrap()],
            [c.host_links(0).unwrap()[1], c.host_links(0).unwrap()[0]]
        );
        assert_eq!((link(3, 4), link(0, 5)), (None, None));
    }

    #[test]
    fn links_follow_from_two_copies() {
        let l = link([Duration::from_micros(9), Duration::from_micros(1009)]);
        assert_eq!(
            (l.latency, l.bytes_per_second),
            (Nanos(9_000), (LINK_BYTES[1] - 4) as u64 * 1000)
        );
        let slow = through_host(
            l,
            LinkProfile {
                latency: Nanos(2_000),
                bytes_per_second: l.bytes_per_second / 2,
            },
        );
        assert_eq!(
            (slow.latency, slow.bytes_per_second / 1000),
            (Nanos(11_000), l.bytes_per_second / 2000)
        );
    }
}
