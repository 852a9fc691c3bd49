//! Device names after TensorFlow's grammar: `/job:worker/replica:0/task:1/device:GPU:2`, or in short `/cpu:0`, `gpu:1`.

use crate::error::Error;
use std::fmt;

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    /// Cores of this machine.
    Cpu,
    /// A CUDA device.
    Gpu,
    /// The PTX emulator.
    Emu,
}

impl DeviceKind {
    /// Upper-case name, as in `/device:CPU:0`.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "CPU",
            DeviceKind::Gpu => "GPU",
            DeviceKind::Emu => "EMU",
        }
    }

    fn parse(text: &str) -> Option<DeviceKind> {
        [DeviceKind::Cpu, DeviceKind::Gpu, DeviceKind::Emu].into_iter().find(|k| k.name().eq_ignore_ascii_case(text))
    }
}

/// A fully named device. Absent job and task stand for this process.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceName {
    /// Job, e.g. `worker`; `None` is the local process.
    pub job: Option<String>,
    /// Task within the job.
    pub task: u32,
    /// CPU, GPU or emulator.
    pub kind: DeviceKind,
    /// Index among the devices of its kind in its task.
    pub index: u32,
}

impl DeviceName {
    /// A device of this process.
    pub fn local(kind: DeviceKind, index: u32) -> DeviceName {
        DeviceName { job: None, task: 0, kind, index }
    }

    /// Parses `/job:J/task:T/device:GPU:0`, `/device:CPU:0`, `/gpu:1` or `cpu:0`; replica is accepted when it is 0.
    ///
    /// Errors with the offending part and the accepted forms.
    pub fn parse(text: &str) -> Result<DeviceName, Error> {
        let fail = |part: &str| {
            Error::invalid(format!(
                "device {text:?}: cannot read {part:?}; expected a form like /device:CPU:0, /gpu:1 or /job:worker/task:0/device:GPU:0"
            ))
        };
        let mut name = DeviceName::local(DeviceKind::Cpu, 0);
        let mut seen_device = false;
        for part in text.trim_start_matches('/').split('/') {
            let fields: Vec<&str> = part.split(':').collect();
            let number = |s: &str| s.parse::<u32>().map_err(|_| fail(part));
            match fields.as_slice() {
                ["job", job] if !job.is_empty() => name.job = Some((*job).to_owned()),
                ["replica", "0"] => {}
                ["task", task] => name.task = number(task)?,
                ["device", kind, index] | [kind, index] => {
                    name.kind = DeviceKind::parse(kind).ok_or_else(|| fail(part))?;
                    name.index = number(index)?;
                    if std::mem::replace(&mut seen_device, true) {
                        return Err(fail(part));
                    }
                }
                _ => return Err(fail(part)),
            }
        }
        if seen_device { Ok(name) } else { Err(fail(text)) }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}/task:{}", self.task)?;
        }
        write!(f, "/device:{}:{}", self.kind.name(), self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_parse_and_print() {
        for (text, printed) in [
            ("cpu:0", "/device:CPU:0"),
            ("/gpu:1", "/device:GPU:1"),
            ("/device:EMU:3", "/device:EMU:3"),
            ("/job:worker/replica:0/task:2/device:gpu:1", "/job:worker/task:2/device:GPU:1"),
        ] {
            assert_eq!(DeviceName::parse(text).unwrap().to_string(), printed);
        }
        for bad in ["", "/", "tpu:0", "cpu", "cpu:x", "/job:/cpu:0", "cpu:0/gpu:0"] {
            assert!(DeviceName::parse(bad).is_err(), "{bad}");
        }
    }
}
