//! Device sets: the logical devices of a request.

use super::conflict;
use super::kernels::Kernels;
use crate::cost::{Bytes, DeviceProfile, LinkProfile};
use crate::error::{Error, Result};
use gristmill_kernels::Isa;
use gristmill_runtime::device::{DeviceKind, DeviceName, DeviceSpec};
use std::collections::BTreeMap;

/// The origin of a device's rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RateSource {
    /// Typical of the kind of device, or reported by its driver.
    #[default]
    Assumed,
    /// Measured by `gristmill calibrate`.
    Calibrated,
    /// Written in a target file.
    Target,
}

/// A logical device.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its name.
    pub name: DeviceName,
    /// Rates and capacities for predictions of costs.
    pub profile: DeviceProfile,
    /// Origin of these rates.
    pub rates: RateSource,
    /// Memory limit in bytes.
    pub memory_limit: Option<Bytes>,
    /// Bytes of physical memory, shared by the logical devices of one GPU; `None` if unknown.
    pub memory: Option<Bytes>,
    /// The ops with a kernel on it.
    pub kernels: Kernels,
}

/// The logical devices of a request, in order of preference among equals.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSet {
    /// The devices.
    pub devices: Vec<Device>,
    /// The link between each ordered pair of devices without an entry in [`DeviceSet::links`].
    pub link: LinkProfile,
    /// Other links, by index of source and destination.
    pub links: BTreeMap<(usize, usize), LinkProfile>,
}

impl Device {
    /// True for a CPU with the assumed rates of this machine's CPU, neither measured nor given.
    pub(crate) fn has_assumed_rates(&self) -> bool {
        self.name.kind == DeviceKind::Cpu
            && self.profile == DeviceProfile::this_cpu(self.profile.n_threads)
    }
}

impl Default for DeviceSet {
    fn default() -> DeviceSet {
        DeviceSet::of(&[DeviceName::local(DeviceKind::Cpu, 0)], 1)
    }
}

impl DeviceSet {
    /// The device with the most arithmetic per second in `f32`, the first of equals.
    pub fn fastest(&self) -> Option<&Device> {
        let faster = |a: &Device, b: &Device| b.profile.flops_f32 > a.profile.flops_f32;
        let devices = self.devices.iter();
        devices.reduce(|a, b| if faster(a, b) { b } else { a })
    }

    /// CPUs with an even share of `n_threads` threads, each at least one.
    pub fn of(names: &[DeviceName], n_threads: usize) -> DeviceSet {
        let n_cpus = names
            .iter()
            .filter(|n| n.kind == DeviceKind::Cpu)
            .count()
            .max(1);
        let device = |name: &DeviceName| Device {
            name: name.clone(),
            profile: match name.kind {
                DeviceKind::Emu => DeviceProfile::emulator(n_threads),
                DeviceKind::Cpu => DeviceProfile::this_cpu(n_threads / n_cpus),
                kind => DeviceProfile {
                    kind,
                    lanes: 1,
                    ..DeviceProfile::this_cpu(n_threads / n_cpus)
                },
            },
            rates: RateSource::Assumed,
            memory_limit: None,
            memory: None,
            kernels: Kernels::all(),
        };
        DeviceSet {
            devices: names.iter().map(device).collect(),
            link: LinkProfile::IN_PROCESS,
            links: BTreeMap::new(),
        }
    }

    /// Replaces assumed rates by those of CPUs with an instruction set.
    pub(crate) fn assume_cpus(&mut self, isa: Isa) {
        for device in self.devices.iter_mut().filter(|d| d.has_assumed_rates()) {
            device.profile = DeviceProfile::cpu(isa, device.profile.n_threads);
        }
    }

    /// Reads `cpu:2,emu:1` (counts of each kind), `/device:CPU:0,/device:CPU:1` (single devices),
    /// or a mixture; empty is one CPU.
    ///
    /// Errors with the malformed part, an unknown kind, or a device named twice.
    pub fn parse(text: &str, n_threads: usize) -> Result<DeviceSet> {
        let mut names: Vec<DeviceName> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            for name in devices_of(part, text)? {
                if names.contains(&name) {
                    return Err(Error::invalid(format!(
                        "--devices {text:?}: {name} is named twice"
                    )));
                }
                names.push(name);
            }
        }
        match names.is_empty() {
            true if text.trim().is_empty() => Ok(DeviceSet::of(
                &[DeviceName::local(DeviceKind::Cpu, 0)],
                n_threads,
            )),
            true => Err(Error::invalid(format!(
                "--devices {text:?} names no device"
            ))),
            false => Ok(DeviceSet::of(&names, n_threads)),
        }
    }

    /// Sets the memory limit of a device. Errors for a device outside of the set.
    pub fn limit_memory(&mut self, spec: &str, limit: Bytes) -> Result<()> {
        let parsed = DeviceSpec::parse(spec)?;
        let matching = self.matching(&parsed);
        matching
            .iter()
            .for_each(|&d| self.devices[d].memory_limit = Some(limit));
        if matching.is_empty() {
            Err(self.unknown(&parsed))
        } else {
            Ok(())
        }
    }

    /// Indices of the devices of a specification.
    pub fn matching(&self, spec: &DeviceSpec) -> Vec<usize> {
        (0..self.devices.len())
            .filter(|&d| spec.fits(&self.devices[d].name))
            .collect()
    }

    /// The error for a specification without a device.
    pub fn unknown(&self, spec: &DeviceSpec) -> Error {
        conflict::unknown(&format!("device {spec} is not in the set:"), spec, self)
    }
}

/// The devices of one part of `--devices`.
fn devices_of(part: &str, whole: &str) -> Result<Vec<DeviceName>> {
    let fail = |why: String| {
        Error::invalid(format!("--devices {whole:?}: {why}"))
            .hint("cpu:2 for two CPUs, or /device:CPU:0 for one of them")
    };
    if part.contains('/') {
        return Ok(vec![DeviceName::parse(part)?]);
    }
    let (kind, count) = part.split_once(':').unwrap_or((part, "1"));
    let kind = DeviceKind::from_name(kind).ok_or_else(|| {
        fail(format!(
            "unknown kind of device {kind:?}; known: cpu, gpu, emu"
        ))
    })?;
    match count.parse::<u32>() {
        Ok(0) => Err(fail(format!("{part:?} is zero devices"))),
        Ok(n) if n <= 1024 => Ok((0..n).map(|i| DeviceName::local(kind, i)).collect()),
        _ => Err(fail(format!(
            "{count:?} is not a number of devices up to 1024"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        DeviceSet::parse(text, 2)
            .unwrap()
            .devices
            .iter()
            .map(|d| d.name.to_string())
            .collect()
    }

    #[test]
    fn sets_are_counts_or_names() {
        assert_eq!(names(""), ["/device:CPU:0"]);
        assert_eq!(
            names("cpu:2,emu:1"),
            ["/device:CPU:0", "/device:CPU:1", "/device:EMU:0"]
        );
        assert_eq!(
            names("/device:GPU:3, /cpu:1"),
            ["/device:GPU:3", "/device:CPU:1"]
        );
        assert_eq!(
            DeviceSet::parse("cpu:2", 4).unwrap().devices[0]
                .profile
                .n_threads,
            2
        );
    }

    #[test]
    fn bad_sets_say_what_is_wrong() {
        let errors: Vec<String> = ["tpu:1", "cpu:0", "cpu:x", "cpu:2,/cpu:1", ","]
            .map(|t| DeviceSet::parse(t, 1).unwrap_err().to_string())
            .into();
        insta::assert_snapshot!(errors.join("\n"), @r#"
        --devices "tpu:1": unknown kind of device "tpu"; known: cpu, gpu, emu (try: cpu:2 for two CPUs, or /device:CPU:0 for one of them)
        --devices "cpu:0": "cpu:0" is zero devices (try: cpu:2 for two CPUs, or /device:CPU:0 for one of them)
        --devices "cpu:x": "x" is not a number of devices up to 1024 (try: cpu:2 for two CPUs, or /device:CPU:0 for one of them)
        --devices "cpu:2,/cpu:1": /device:CPU:1 is named twice
        --devices "," names no device
        "#);
    }
}
