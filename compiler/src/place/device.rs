//! Device sets and device specifications, after TensorFlow's grammar.

use crate::cost::{Bytes, DeviceProfile, LinkProfile};
use crate::error::{Error, Result};
use crate::nearest::nearest;
use gristmill_runtime::device::{DeviceKind, DeviceName};
use std::fmt;

const KINDS: [(&str, DeviceKind); 3] = [("CPU", DeviceKind::Cpu), ("GPU", DeviceKind::Gpu), ("EMU", DeviceKind::Emu)];

fn kind_of(text: &str) -> Option<DeviceKind> {
    KINDS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(text)).map(|(_, kind)| kind)
}

/// Why nothing can run on a kind of device, if so.
pub fn lacks_kernels(kind: DeviceKind) -> Option<String> {
    (kind != DeviceKind::Cpu).then(|| format!("no code generator for {} yet", kind.name()))
}

/// A logical device.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its name.
    pub name: DeviceName,
    /// What it can do.
    pub profile: DeviceProfile,
    /// Most bytes that it may hold at a time.
    pub memory_limit: Option<Bytes>,
}

/// The logical devices of a request, in order of preference among equals.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSet {
    /// The devices.
    pub devices: Vec<Device>,
    /// The link between each ordered pair of them.
    pub link: LinkProfile,
}

impl Default for DeviceSet {
    fn default() -> DeviceSet {
        DeviceSet::of(&[DeviceName::local(DeviceKind::Cpu, 0)], 1)
    }
}

impl DeviceSet {
    /// Devices that share `n_threads` threads evenly, each at least one.
    pub fn of(names: &[DeviceName], n_threads: usize) -> DeviceSet {
        let n_cpus = names.iter().filter(|n| n.kind == DeviceKind::Cpu).count().max(1);
        let device = |name: &DeviceName| Device {
            name: name.clone(),
            profile: DeviceProfile { kind: name.kind, ..DeviceProfile::this_cpu(n_threads / n_cpus) },
            memory_limit: None,
        };
        DeviceSet { devices: names.iter().map(device).collect(), link: LinkProfile::IN_PROCESS }
    }

    /// Reads `cpu:2,emu:1` (counts of each kind), `/device:CPU:0,/device:CPU:1` (single devices), or a mixture; empty is one CPU.
    ///
    /// Errors with the part that cannot be read, a kind that does not exist, or a device named twice.
    pub fn parse(text: &str, n_threads: usize) -> Result<DeviceSet> {
        let mut names: Vec<DeviceName> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            for name in devices_of(part, text)? {
                if names.contains(&name) {
                    return Err(Error::invalid(format!("--devices {text:?}: {name} is named twice")));
                }
                names.push(name);
            }
        }
        match names.is_empty() {
            true if text.trim().is_empty() => Ok(DeviceSet::of(&[DeviceName::local(DeviceKind::Cpu, 0)], n_threads)),
            true => Err(Error::invalid(format!("--devices {text:?} names no device"))),
            false => Ok(DeviceSet::of(&names, n_threads)),
        }
    }

    /// Sets the memory limit of a device. Errors when the set does not have it.
    pub fn limit_memory(&mut self, spec: &str, limit: Bytes) -> Result<()> {
        let parsed = DeviceSpec::parse(spec)?;
        let matching = self.matching(&parsed);
        matching.iter().for_each(|&d| self.devices[d].memory_limit = Some(limit));
        if matching.is_empty() { Err(self.unknown(&parsed)) } else { Ok(()) }
    }

    /// Indices of the devices that a specification fits.
    pub fn matching(&self, spec: &DeviceSpec) -> Vec<usize> {
        (0..self.devices.len()).filter(|&d| spec.fits(&self.devices[d].name)).collect()
    }

    /// The error for a specification that fits no device.
    pub fn unknown(&self, spec: &DeviceSpec) -> Error {
        let names: Vec<String> = self.devices.iter().map(|d| d.name.to_string()).collect();
        let near = nearest(&spec.to_string(), names.iter().map(String::as_str), 1);
        let hint = near.first().map_or("--devices with the device in it".to_owned(), |n| {
            format!("{n}, or --devices with the device in it")
        });
        Error::invalid(format!("device {spec} is not in the set; available: {}", names.join(", "))).hint(hint)
    }
}

/// The devices that one part of `--devices` names.
fn devices_of(part: &str, whole: &str) -> Result<Vec<DeviceName>> {
    let fail = |why: String| {
        Error::invalid(format!("--devices {whole:?}: {why}"))
            .hint("cpu:2 for two CPUs, or /device:CPU:0 for one of them")
    };
    if part.contains('/') {
        return Ok(vec![DeviceName::parse(part)?]);
    }
    let (kind, count) = part.split_once(':').unwrap_or((part, "1"));
    let kind = kind_of(kind).ok_or_else(|| fail(format!("unknown kind of device {kind:?}; known: cpu, gpu, emu")))?;
    match count.parse::<u32>() {
        Ok(0) => Err(fail(format!("{part:?} is zero devices"))),
        Ok(n) if n <= 1024 => Ok((0..n).map(|i| DeviceName::local(kind, i)).collect()),
        _ => Err(fail(format!("{count:?} is not a number of devices up to 1024"))),
    }
}

/// A partly named device: fields that are absent fit anything.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct DeviceSpec {
    /// Job.
    pub job: Option<String>,
    /// Task within the job.
    pub task: Option<u32>,
    /// Kind.
    pub kind: Option<DeviceKind>,
    /// Index among the devices of the kind.
    pub index: Option<u32>,
}

impl DeviceSpec {
    /// Reads `""`, `/`, or parts in any order, the last of a kind winning: `/job:NAME`, `/replica:0`, `/task:N`, `/device:KIND[:N]`, `/cpu:N`,
    /// `gpu`; `*` leaves a field open. Case of the kind does not matter.
    pub fn parse(text: &str) -> Result<DeviceSpec> {
        let fail = |why: &str| {
            Error::invalid(format!("device {text:?}: {why}"))
                .hint("a form like /device:CPU:0, /gpu:1, cpu or /job:worker/task:0/device:GPU:0")
        };
        let mut spec = DeviceSpec::default();
        for part in text.split('/').filter(|p| !p.is_empty()) {
            let fields: Vec<&str> = part.split(':').collect();
            let number = |s: &str| match s {
                "*" => Ok(None),
                _ => s.parse::<u32>().map(Some).map_err(|_| fail(&format!("{s:?} is not a number"))),
            };
            match fields.as_slice() {
                ["job", job] if !job.is_empty() => spec.job = (*job != "*").then(|| (*job).to_owned()),
                ["replica", "0" | "*"] => {}
                ["task", n] => spec.task = number(n)?,
                ["device", rest @ ..] | rest if (1..=2).contains(&rest.len()) => {
                    spec.kind = match rest[0] {
                        "*" => None,
                        kind => Some(
                            kind_of(kind)
                                .ok_or_else(|| fail(&format!("unknown kind {kind:?}; known: cpu, gpu, emu")))?,
                        ),
                    };
                    spec.index = rest.get(1).map_or(Ok(None), |n| number(n))?;
                }
                _ => return Err(fail(&format!("cannot read {part:?}"))),
            }
        }
        Ok(spec)
    }

    /// Whether a device is one of those meant.
    pub fn fits(&self, name: &DeviceName) -> bool {
        self.job.as_ref().is_none_or(|j| Some(j) == name.job.as_ref())
            && self.task.is_none_or(|t| t == name.task)
            && self.kind.is_none_or(|k| k == name.kind)
            && self.index.is_none_or(|i| i == name.index)
    }

    /// The specification without kind and index, to which soft placement falls back.
    pub fn relaxed(&self) -> DeviceSpec {
        DeviceSpec { kind: None, index: None, ..self.clone() }
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        let index = self.index.map_or("*".to_owned(), |i| i.to_string());
        write!(f, "/device:{}:{index}", self.kind.map_or("*", DeviceKind::name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        DeviceSet::parse(text, 2).unwrap().devices.iter().map(|d| d.name.to_string()).collect()
    }

    #[test]
    fn sets_are_counts_or_names() {
        assert_eq!(names(""), ["/device:CPU:0"]);
        assert_eq!(names("cpu:2,emu:1"), ["/device:CPU:0", "/device:CPU:1", "/device:EMU:0"]);
        assert_eq!(names("/device:GPU:3, /cpu:1"), ["/device:GPU:3", "/device:CPU:1"]);
        assert_eq!(DeviceSet::parse("cpu:2", 4).unwrap().devices[0].profile.n_threads, 2);
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

    #[test]
    fn specs_follow_tensorflow() {
        for (text, printed) in [
            ("", "/device:*:*"),
            ("/gpu:*", "/device:GPU:*"),
            ("cpu", "/device:CPU:*"),
            ("/job:ps/task:1", "/job:ps/task:1/device:*:*"),
            ("/device:gpu:0/device:CPU:1", "/device:CPU:1"),
        ] {
            assert_eq!(DeviceSpec::parse(text).unwrap().to_string(), printed);
        }
        for bad in ["/device:TPU:0", "/task:x", "a:b:c", "/job:"] {
            assert!(DeviceSpec::parse(bad).is_err(), "{bad}");
        }
    }
}
