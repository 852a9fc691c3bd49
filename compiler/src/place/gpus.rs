//! GPUs of this machine as logical devices: index, memory and profile.

use super::device::DeviceSet;
use super::emulated;
use crate::cost::{Bytes, DeviceProfile, LinkProfile, Nanos};
use crate::error::{Error, Result};
use crate::ir::Requested;
use crate::target::Arch;
use gristmill_runtime::DeviceName;
use gristmill_runtime::cuda::{self, CudaDevice};
use gristmill_runtime::device::DeviceKind;
use std::collections::{BTreeMap, BTreeSet};

/// Between the host and a GPU, or two GPUs, before anything was measured: PCIe of the fourth
/// generation.
const ASSUMED_LINK: LinkProfile = LinkProfile {
    latency: Nanos(10_000),
    bytes_per_second: 24_000_000_000,
};
/// Rates of a GPU whose driver does not tell them: multiprocessors, their clock, and bytes per
/// second of its memory.
const ASSUMED: (f64, f64, f64) = (108.0, 1.4e9, 1.5e12);

/// The driver's number of a GPU: `gpus` names those of `/device:GPU:0` and so on; they are numbered
/// as the driver does when it is empty.
///
/// Errors with `InvalidInput` when the list is too short.
pub fn ordinal(device: &DeviceName, gpus: &[u32]) -> Result<u32> {
    if gpus.is_empty() {
        return Ok(device.index);
    }
    gpus.get(device.index as usize).copied().ok_or_else(|| {
        let message = format!(
            "{device} is not among the {} visible GPUs, {gpus:?}",
            gpus.len()
        );
        Error::invalid(message)
            .hint("--visible-gpus with one number for each; a number may be there more than once")
    })
}

/// The GPU behind a logical device. Errors with `Unsupported` when it is not there.
fn find(device: &DeviceName, gpus: &[u32]) -> Result<CudaDevice> {
    let absent = |why: String| {
        let hint = match emulated::IS_BUILT_IN {
            true => "--devices emu:1, which runs CUDA kernels on the CPU, or `gristmill devices`",
            false => "--devices cpu:1; `gristmill devices` lists the devices of this machine",
        };
        Error::unsupported(format!("{device} is not there: {why}")).hint(hint)
    };
    let ordinal = ordinal(device, gpus)?;
    let found = cuda::probe().map_err(absent)?;
    let n = found.len();
    found
        .into_iter()
        .nth(ordinal as usize)
        .ok_or_else(|| absent(format!("the CUDA driver shows {n} devices")))
}

/// Name of a GPU's product. Errors with `Unsupported` when it is not there.
pub fn product(device: &DeviceName, gpus: &[u32]) -> Result<String> {
    Ok(find(device, gpus)?.name)
}

/// Bytes of memory that a device has: of a CPU, this machine's. Errors when it is not there or does
/// not tell.
pub fn total_memory(device: &DeviceName, gpus: &[u32]) -> Result<u64> {
    match device.kind {
        DeviceKind::Gpu => Ok(find(device, gpus)?.memory_bytes as u64),
        DeviceKind::Emu => emulated::memory_bytes(),
        DeviceKind::Cpu => gristmill_runtime::cpu::probe()
            .total_memory_bytes
            .ok_or_else(|| {
                Error::unsupported("this system does not tell how much memory it has")
                    .hint("a limit in bytes, 4GiB")
            }),
    }
}

/// The architecture that machine code for each GPU of a set is made for: `asked`, or else the GPU's
/// own.
pub fn archs(set: &DeviceSet, gpus: &[u32], asked: Option<Arch>) -> BTreeMap<DeviceName, Arch> {
    let own = |name: &DeviceName| {
        let (major, minor) = find(name, gpus).ok()?.compute_capability;
        Some(Arch::of_device(major, minor))
    };
    let names = set.devices.iter().map(|d| &d.name);
    let gpus = names.filter(|name| name.kind == DeviceKind::Gpu);
    gpus.map(|name| {
        (
            name.clone(),
            asked.or_else(|| own(name)).unwrap_or(Arch::COMMON),
        )
    })
    .collect()
}

/// Errors with `Unsupported` when a device is a GPU that is not there.
pub fn check_presence(device: &DeviceName, gpus: &[u32]) -> Result<()> {
    if device.kind == DeviceKind::Gpu {
        find(device, gpus).map(drop)
    } else {
        Ok(())
    }
}

/// True when NCCL is there and joins these places: each is one GPU of the set, and no two are parts
/// of one GPU.
pub fn nccl_joins(places: &[Requested], set: &DeviceSet, gpus: &[u32]) -> bool {
    let ordinals = places.iter().map(|place| only_gpu(place, set, gpus));
    let distinct: Option<BTreeSet<u32>> = ordinals.collect();
    places.len() > 1
        && distinct.is_some_and(|gpus| gpus.len() == places.len())
        && cuda::nccl_version().is_ok()
}

/// The driver's number of the only device that fits a request, if that is a GPU.
fn only_gpu(place: &Requested, set: &DeviceSet, gpus: &[u32]) -> Option<u32> {
    let asked = place.as_ref().filter(|asked| asked.groups.is_empty())?;
    let [only] = set.matching(&asked.spec)[..] else {
        return None;
    };
    let name = &set.devices[only].name;
    let is_gpu = name.kind == DeviceKind::Gpu;
    is_gpu.then(|| ordinal(name, gpus).ok())?
}

impl DeviceSet {
    /// Takes rates and memory of GPUs from their driver, and links to them as assumed for PCIe.
    /// Logical devices of one GPU that have no limit share evenly the memory that the others leave.
    ///
    /// Errors with `Unsupported` when one is not there, with `InvalidInput` when limits are more
    /// than a GPU has.
    pub fn look_at_gpus(&mut self, gpus: &[u32]) -> Result<()> {
        for i in 0..self.devices.len() {
            let device = &mut self.devices[i];
            if device.name.kind != DeviceKind::Gpu {
                continue;
            }
            let found = find(&device.name, gpus)?;
            device.memory = Some(Bytes(found.memory_bytes as u64));
            device.profile = described(&found);
            for other in (0..self.devices.len()).filter(|&o| o != i) {
                self.links.entry((i, other)).or_insert(ASSUMED_LINK);
                self.links.entry((other, i)).or_insert(ASSUMED_LINK);
            }
        }
        self.share_memory(gpus)
    }

    fn share_memory(&mut self, gpus: &[u32]) -> Result<()> {
        let mut of_gpu: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (i, device) in self
            .devices
            .iter()
            .enumerate()
            .filter(|(_, d)| d.name.kind == DeviceKind::Gpu)
        {
            of_gpu
                .entry(ordinal(&device.name, gpus)?)
                .or_default()
                .push(i);
        }
        for sharers in of_gpu.values() {
            let total = self.devices[sharers[0]].memory.unwrap_or_default();
            let limits = sharers.iter().filter_map(|&i| self.devices[i].memory_limit);
            let (limited, n_open) = (
                limits.clone().sum::<Bytes>(),
                sharers.len() - limits.count(),
            );
            if limited > total || (n_open > 0 && limited == total) {
                let names: Vec<String> = sharers
                    .iter()
                    .map(|&i| self.devices[i].name.to_string())
                    .collect();
                let message = format!(
                    "limits of {limited} for {}, whose GPU has {total}",
                    names.join(" and ")
                );
                return Err(
                    Error::invalid(message).hint("--mem with less, or with shares: gpu:0=40%")
                );
            }
            let share = Bytes(total.saturating_sub(limited).0 / n_open.max(1) as u64);
            for &i in sharers {
                self.devices[i].memory_limit.get_or_insert(share);
            }
        }
        Ok(())
    }
}

/// Profile of a GPU by the figures of its driver.
pub fn described(device: &CudaDevice) -> DeviceProfile {
    let or = |stated: f64, assumed: f64| if stated > 0.0 { stated } else { assumed };
    let multiprocessors = or(f64::from(device.multiprocessors), ASSUMED.0);
    let clock = or(f64::from(device.clock_khz) * 1e3, ASSUMED.1);
    // Two transfers per cycle.
    let memory =
        f64::from(device.memory_clock_khz) * 1e3 * 2.0 * f64::from(device.memory_bus_bits) / 8.0;
    let memory_bandwidth = or(memory, ASSUMED.2);
    let lanes = if matches!(device.compute_capability, (7, _) | (8, 0)) {
        64.0
    } else {
        128.0
    };
    DeviceProfile {
        kind: DeviceKind::Gpu,
        flops_f32: multiprocessors * lanes * 2.0 * clock,
        memory_bandwidth,
        cache_bandwidth: memory_bandwidth * 2.0,
        cache_bytes: Bytes(u64::from(device.cache_bytes)),
        launch: Nanos(3_000),
        n_threads: 1,
        lanes: 1,
        peaks: BTreeMap::new(),
        efficiencies: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logical_gpus_are_numbered_as_the_list_says() {
        let gpu = |index| DeviceName::local(DeviceKind::Gpu, index);
        assert_eq!(ordinal(&gpu(3), &[]).unwrap(), 3);
        assert_eq!(ordinal(&gpu(1), &[2, 0]).unwrap(), 0);
        let e = ordinal(&gpu(2), &[0, 0]).unwrap_err().to_string();
        assert!(
            e.contains("/device:GPU:2") && e.contains("--visible-gpus"),
            "{e}"
        );
    }

    #[test]
    fn rates_follow_from_what_the_driver_says() {
        let h200 = CudaDevice {
            name: "NVIDIA H200".into(),
            memory_bytes: 150 << 30,
            compute_capability: (9, 0),
            multiprocessors: 132,
            clock_khz: 1_980_000,
            memory_clock_khz: 3_201_000,
            memory_bus_bits: 6144,
            cache_bytes: 60 << 20,
            has_pools: true,
        };
        let p = described(&h200);
        assert!(
            (p.flops_f32 / 66.9e12 - 1.0).abs() < 0.01,
            "{}",
            p.flops_f32
        );
        assert!(
            (p.memory_bandwidth / 4.9e12 - 1.0).abs() < 0.01,
            "{}",
            p.memory_bandwidth
        );
        let silent = CudaDevice {
            multiprocessors: 0,
            clock_khz: 0,
            memory_clock_khz: 0,
            ..h200
        };
        assert!(
            described(&silent).flops_f32 > 1e13 && described(&silent).memory_bandwidth == ASSUMED.2
        );
    }
}
