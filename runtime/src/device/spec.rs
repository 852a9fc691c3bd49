//! Partly named devices, after TensorFlow's grammar: a user's request, how two of them merge, and which devices fit.

use super::{DeviceKind, DeviceName};
use crate::error::Error;
use std::fmt;

/// A partly named device: fields that are absent fit anything.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct DeviceSpec {
    /// Job; `localhost` is this process.
    pub job: Option<String>,
    /// Replica of the job.
    pub replica: Option<u32>,
    /// Task within the replica.
    pub task: Option<u32>,
    /// Type in upper case, e.g. `GPU`. It may be one that gristmill has no device of.
    pub device_type: Option<String>,
    /// Index among the devices of the type.
    pub index: Option<u32>,
}

/// Rule of [`DeviceSpec::merge`] for types and indices that differ. Jobs, replicas and tasks that differ are always an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Refuse.
    Hard,
    /// A type that differs clears type and index; an index that differs clears the index.
    Soft,
}

impl DeviceSpec {
    /// Reads `""`, `/`, or parts in any order, of one attribute the last winning: `/job:NAME`, `/replica:N`, `/task:N`, `/device:TYPE[:N]`, the
    /// short forms `/cpu:N`, `/gpu` and, without the slash, `gpu:0`. `*` leaves a field open. Case of the type does not matter.
    ///
    /// Errors with the part that cannot be read; two different types are an error, while the last index of one type wins.
    pub fn parse(text: &str) -> Result<DeviceSpec, Error> {
        let mut spec = DeviceSpec::default();
        for part in text.split('/').filter(|p| !p.is_empty()) {
            spec.read_part(part, text)?;
        }
        Ok(spec)
    }

    fn read_part(&mut self, part: &str, text: &str) -> Result<(), Error> {
        let fields: Vec<&str> = part.split(':').collect();
        match fields.as_slice() {
            ["job", job] => self.job = name(job, "a job", text)?,
            ["replica", n] => self.replica = number(n, text)?,
            ["task", n] => self.task = number(n, text)?,
            ["device", rest @ ..] if (1..=2).contains(&rest.len()) => {
                self.read_device(rest, text)?
            }
            [kind] | [kind, _] if DeviceKind::from_name(kind).is_some() => {
                self.read_device(&fields, text)?
            }
            [a @ ("job" | "replica" | "task" | "device"), ..] => {
                return Err(malformed(text, part, &format!("{a}:..")));
            }
            [attribute, ..] => {
                return Err(Error::invalid(format!(
                    "Unknown attribute: '{attribute}' in '{text}'"
                )));
            }
            [] => unreachable!("a split has at least one field"),
        }
        Ok(())
    }

    /// `TYPE` or `TYPE:INDEX`.
    fn read_device(&mut self, fields: &[&str], text: &str) -> Result<(), Error> {
        let device_type = name(fields[0], "a device type", text)?.map(|t| t.to_ascii_uppercase());
        if let (Some(old), Some(new)) = (&self.device_type, &device_type)
            && old != new
        {
            return Err(Error::invalid(format!(
                "Cannot specify multiple device types: {text}"
            )));
        }
        self.device_type = device_type;
        self.index = fields.get(1).map_or(Ok(None), |n| number(n, text))?;
        Ok(())
    }

    /// The specification that fits this device alone, with all fields.
    pub fn only(name: &DeviceName) -> DeviceSpec {
        DeviceSpec {
            job: Some(name.job().to_owned()),
            replica: Some(name.replica),
            task: Some(name.task),
            device_type: Some(name.kind.name().to_owned()),
            index: Some(name.index),
        }
    }

    /// True when the device has all fields that are given.
    pub fn fits(&self, name: &DeviceName) -> bool {
        self.job.as_deref().is_none_or(|j| j == name.job())
            && self.replica.is_none_or(|r| r == name.replica)
            && self.task.is_none_or(|t| t == name.task)
            && self
                .device_type
                .as_deref()
                .is_none_or(|t| t == name.kind.name())
            && self.index.is_none_or(|i| i == name.index)
    }

    /// True when no field is given.
    pub fn is_open(&self) -> bool {
        *self == DeviceSpec::default()
    }

    /// The specification without type and index, to which soft placement falls back.
    pub fn relaxed(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: None,
            index: None,
            ..self.clone()
        }
    }

    /// Each field that is absent is taken from `outer`, as for a scope inside another.
    pub fn fill(self, outer: &DeviceSpec) -> DeviceSpec {
        DeviceSpec {
            job: self.job.or_else(|| outer.job.clone()),
            replica: self.replica.or(outer.replica),
            task: self.task.or(outer.task),
            device_type: self.device_type.or_else(|| outer.device_type.clone()),
            index: self.index.or(outer.index),
        }
    }

    /// True when no field that both have differs.
    pub fn is_compatible(&self, other: &DeviceSpec) -> bool {
        self.merge(other, Merge::Hard).is_ok()
    }

    /// The specification that fits both (TensorFlow's `DeviceNameUtils::MergeDevNames`).
    ///
    /// Errors with `Cannot merge devices with incompatible jobs|replicas|tasks|types|ids: 'x' and 'y'`; types and ids only when `mode` is hard.
    pub fn merge(&self, other: &DeviceSpec, mode: Merge) -> Result<DeviceSpec, Error> {
        let fail = |what: &str| {
            Error::invalid(format!(
                "Cannot merge devices with incompatible {what}: '{self}' and '{other}'"
            ))
        };
        let mut merged = self.clone();
        merged.job = both(&self.job, &other.job).map_err(|()| fail("jobs"))?;
        merged.replica = both(&self.replica, &other.replica).map_err(|()| fail("replicas"))?;
        merged.task = both(&self.task, &other.task).map_err(|()| fail("tasks"))?;
        match both(&self.device_type, &other.device_type) {
            Ok(device_type) => merged.device_type = device_type,
            Err(()) if mode == Merge::Hard => return Err(fail("types")),
            Err(()) => return Ok(merged.relaxed()),
        }
        match both(&self.index, &other.index) {
            Ok(index) => merged.index = index,
            Err(()) if mode == Merge::Hard => return Err(fail("ids")),
            Err(()) => merged.index = None,
        }
        Ok(merged)
    }
}

/// The value that either has. Errors when both have one and they differ.
fn both<T: PartialEq + Clone>(a: &Option<T>, b: &Option<T>) -> Result<Option<T>, ()> {
    match (a, b) {
        (Some(x), Some(y)) if x != y => Err(()),
        _ => Ok(a.clone().or_else(|| b.clone())),
    }
}

fn malformed(text: &str, found: &str, expected: &str) -> Error {
    Error::invalid(format!(
        "device '{text}': expected {expected}, got '{found}'; whole names are like /job:worker/replica:0/task:1/device:GPU:0, /gpu:1 or cpu"
    ))
}

/// A letter, then letters, digits and `_`; `*` is open.
fn name(word: &str, what: &str, text: &str) -> Result<Option<String>, Error> {
    let is_name = word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    match word {
        "*" => Ok(None),
        _ if is_name => Ok(Some(word.to_owned())),
        _ => Err(malformed(
            text,
            word,
            &format!("{what} (a letter, then letters, digits or _)"),
        )),
    }
}

/// Decimal digits; `*` is open.
fn number(word: &str, text: &str) -> Result<Option<u32>, Error> {
    let is_number = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    match word.parse() {
        _ if word == "*" => Ok(None),
        Ok(n) if is_number => Ok(Some(n)),
        _ => Err(malformed(text, word, "a number")),
    }
}

/// The short specification of a device: of one of this process, type and index, which fit devices of other processes too.
impl From<&DeviceName> for DeviceSpec {
    fn from(name: &DeviceName) -> DeviceSpec {
        let device = DeviceSpec {
            device_type: Some(name.kind.name().to_owned()),
            index: Some(name.index),
            ..DeviceSpec::default()
        };
        if name.is_local() {
            device
        } else {
            DeviceSpec::only(name)
        }
    }
}

/// `/job:j/replica:r/task:t/device:T:i`, absent parts left out, `:*` for a type without index. The open specification is empty.
impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(replica) = self.replica {
            write!(f, "/replica:{replica}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        match (self.device_type.as_deref(), self.index) {
            (None, None) => Ok(()),
            (Some(device_type), None) => write!(f, "/device:{device_type}:*"),
            (device_type, Some(index)) => {
                write!(f, "/device:{}:{index}", device_type.unwrap_or("*"))
            }
        }
    }
}

#[cfg(test)]
mod tests;
