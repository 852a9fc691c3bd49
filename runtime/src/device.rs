//! Device names after TensorFlow's grammar: `/job:worker/replica:0/task:1/device:GPU:2`, or in short `/cpu:0`, `gpu:1`.

mod spec;

pub use spec::{DeviceSpec, Merge};

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
    /// All kinds.
    pub const ALL: [DeviceKind; 3] = [DeviceKind::Cpu, DeviceKind::Gpu, DeviceKind::Emu];

    /// True when its buffers are elsewhere than in the host's memory.
    pub fn has_own_memory(self) -> bool {
        self != DeviceKind::Cpu
    }

    /// Upper-case name, as in `/device:CPU:0`.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "CPU",
            DeviceKind::Gpu => "GPU",
            DeviceKind::Emu => "EMU",
        }
    }

    /// The kind of a name in either case.
    pub fn from_name(text: &str) -> Option<DeviceKind> {
        DeviceKind::ALL
            .into_iter()
            .find(|k| k.name().eq_ignore_ascii_case(text))
    }
}

/// The job that stands for this process where a full name is printed.
const LOCAL_JOB: &str = "localhost";

/// A fully named device. An absent job stands for this process.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceName {
    /// Job, e.g. `worker`; `None` is the local process.
    pub job: Option<String>,
    /// Replica of the job.
    pub replica: u32,
    /// Task within the replica.
    pub task: u32,
    /// CPU, GPU or emulator.
    pub kind: DeviceKind,
    /// Index among the devices of its kind in its task.
    pub index: u32,
}

impl DeviceName {
    /// A device of this process.
    pub fn local(kind: DeviceKind, index: u32) -> DeviceName {
        DeviceName {
            job: None,
            replica: 0,
            task: 0,
            kind,
            index,
        }
    }

    /// Parses a [`DeviceSpec`] that names one device: `/job:J/replica:R/task:T/device:GPU:0`, `/device:CPU:0`, `/gpu:1` or `cpu:0`. Absent replica
    /// and task are 0; `/job:localhost` is this process.
    ///
    /// Errors with the offending part and the accepted forms.
    pub fn parse(text: &str) -> Result<DeviceName, Error> {
        let spec = DeviceSpec::parse(text)?;
        let fail = |why: &str| {
            Error::invalid(format!(
                "device {text:?} {why}; expected a form like /device:CPU:0, /gpu:1 or /job:worker/task:0/device:GPU:0"
            ))
        };
        let device_type = spec.device_type.ok_or_else(|| fail("has no device type"))?;
        Ok(DeviceName {
            job: spec.job.filter(|j| j != LOCAL_JOB),
            replica: spec.replica.unwrap_or(0),
            task: spec.task.unwrap_or(0),
            kind: DeviceKind::from_name(&device_type)
                .ok_or_else(|| fail("is of no known type (cpu, gpu, emu)"))?,
            index: spec.index.ok_or_else(|| fail("has no index"))?,
        })
    }

    /// The job; `localhost` for this process.
    pub fn job(&self) -> &str {
        self.job.as_deref().unwrap_or(LOCAL_JOB)
    }

    /// True for a device of this process.
    pub fn is_local(&self) -> bool {
        self.job.is_none() && self.replica == 0 && self.task == 0
    }

    /// The name with all its parts, as placement logs print it: `/job:localhost/replica:0/task:0/device:CPU:0`.
    pub fn full(&self) -> String {
        let DeviceName {
            replica,
            task,
            kind,
            index,
            ..
        } = self;
        format!(
            "/job:{}/replica:{replica}/task:{task}/device:{}:{index}",
            self.job(),
            kind.name()
        )
    }
}

/// The full name; of a device of this process the short one, `/device:CPU:0`.
impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_local() {
            true => write!(f, "/device:{}:{}", self.kind.name(), self.index),
            false => f.write_str(&self.full()),
        }
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
            (
                "/job:worker/task:2/device:gpu:1",
                "/job:worker/replica:0/task:2/device:GPU:1",
            ),
            (
                "/job:localhost/replica:0/task:0/device:CPU:0",
                "/device:CPU:0",
            ),
            (
                "/task:1/cpu:0",
                "/job:localhost/replica:0/task:1/device:CPU:0",
            ),
        ] {
            let name = DeviceName::parse(text).unwrap();
            assert_eq!(name.to_string(), printed);
            assert_eq!(DeviceName::parse(&name.full()).unwrap(), name);
        }
        for bad in [
            "",
            "/",
            "tpu:0",
            "cpu",
            "cpu:x",
            "/job:/cpu:0",
            "cpu:0/gpu:0",
        ] {
            assert!(DeviceName::parse(bad).is_err(), "{bad}");
        }
    }
}
