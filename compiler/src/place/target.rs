//! Device profiles as files: rates and limits of a machine, present or not, so that a plan for it
//! can be made anywhere.
//!
//! ```toml
//! format = "gristmill/profile/1"
//! name = "one host, eight GPUs"
//!
//! [[device]]
//! kind = "gpu"
//! count = 8                            # /device:GPU:0 to /device:GPU:7; 1 if left out
//! memory_bytes = 80_000_000_000        # no limit if left out
//! memory_bytes_per_second = 3.35e12
//! cache_bytes = 50_000_000
//! cache_bytes_per_second = 5.5e12
//! launch_ns = 3_000
//! # lanes = 16                         # of CPUs: `f32` elements of a vector; 8 if left out
//! flops_per_second = { f32 = 6.7e13, f16 = 9.9e14 }
//! efficiency = { matmul = 0.7, map = 0.3, matmul_f32 = 0.8 }
//!
//! [[link]]                             # later links go before earlier ones
//! from = "any"                         # a kind, one device such as "gpu:0", or "any"
//! to = "any"
//! latency_ns = 8_000
//! bytes_per_second = 5.5e10
//! ```
//!
//! Peaks count a fused multiply-add as two operations. An efficiency is the share of the peak that
//! kernels of a class reach, for one dtype (`matmul_f32`) or all. Nothing is guessed about links:
//! each ordered pair of devices needs one. Unknown keys are errors.

use super::device::{Device, DeviceSet, RateSource};
use super::kernels::Kernels;
use crate::cost::{Bytes, DeviceProfile, LinkProfile, Nanos, WorkClass};
use crate::error::{Error, Result};
use crate::nearest::nearest;
use gristmill_runtime::DType;
use gristmill_runtime::device::{DeviceKind, DeviceName, DeviceSpec};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::Spanned;

/// The format that [`Target::parse`] reads.
pub const FORMAT: &str = "gristmill/profile/1";

/// A machine to plan for.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The name that its author gave it.
    pub name: String,
    /// Its devices and links.
    pub devices: DeviceSet,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: Spanned<String>,
    name: String,
    device: Vec<Spanned<DeviceTable>>,
    #[serde(default)]
    link: Vec<LinkTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceTable {
    kind: Spanned<String>,
    #[serde(default)]
    count: Option<Spanned<u32>>,
    #[serde(default)]
    threads: Option<Spanned<usize>>,
    #[serde(default)]
    lanes: Option<Spanned<usize>>,
    #[serde(default)]
    memory_bytes: Option<u64>,
    memory_bytes_per_second: Spanned<f64>,
    cache_bytes: u64,
    cache_bytes_per_second: Spanned<f64>,
    launch_ns: u64,
    flops_per_second: BTreeMap<Spanned<String>, Spanned<f64>>,
    #[serde(default)]
    efficiency: BTreeMap<Spanned<String>, Spanned<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkTable {
    from: Spanned<String>,
    to: Spanned<String>,
    latency_ns: u64,
    bytes_per_second: Spanned<f64>,
}

/// Most devices of one table.
const MAX_COUNT: u32 = 1024;
/// Rates beyond this are slips of the pen.
const MAX_RATE: f64 = 1e18;

impl Target {
    /// Reads a profile. Devices have all kernels, whether or not there is a code generator: a plan
    /// can be made, not always run.
    ///
    /// Errors with the line: text that is not TOML, unknown or missing keys, rates that are not
    /// positive, unknown kinds, dtypes and classes, pairs of devices without a link.
    pub fn parse(text: &str) -> Result<Target> {
        let reader = Reader { text };
        let file: File = toml::from_str(text).map_err(|e| {
            let at = e.span().map_or(String::new(), |s| {
                format!("line {}: ", reader.line(s.start))
            });
            Error::invalid(format!("{at}{}", e.message().replace('\n', "; ")))
        })?;
        if file.format.get_ref() != FORMAT {
            return Err(reader.error(
                &file.format,
                format!("format {:?}, expected {FORMAT:?}", file.format.get_ref()),
            ));
        }
        let mut devices = Vec::new();
        for table in &file.device {
            reader.devices(table, &mut devices)?;
        }
        if devices.is_empty() {
            return Err(Error::invalid("no [[device]]"));
        }
        let links = reader.links(&file.link, &devices)?;
        Ok(Target {
            name: file.name,
            devices: DeviceSet {
                devices,
                link: LinkProfile::IN_PROCESS,
                links,
            },
        })
    }
}

/// Turns tables into devices; knows where in the text they are.
struct Reader<'t> {
    text: &'t str,
}

impl Reader<'_> {
    fn line(&self, offset: usize) -> usize {
        1 + self
            .text
            .as_bytes()
            .iter()
            .take(offset)
            .filter(|b| **b == b'\n')
            .count()
    }

    fn error<T>(&self, at: &Spanned<T>, message: impl std::fmt::Display) -> Error {
        Error::invalid(format!("line {}: {message}", self.line(at.span().start)))
    }

    fn rate(&self, what: &str, value: &Spanned<f64>) -> Result<f64> {
        let v = *value.get_ref();
        if (1.0..=MAX_RATE).contains(&v) {
            Ok(v)
        } else {
            Err(self.error(value, format!("{what} = {v}, expected 1 to {MAX_RATE:e}")))
        }
    }

    /// Appends the devices of one table.
    fn devices(&self, table: &Spanned<DeviceTable>, devices: &mut Vec<Device>) -> Result<()> {
        let t = table.get_ref();
        let kind = self.kind(&t.kind)?;
        let count = t.count.as_ref().map_or(1, |c| *c.get_ref());
        if let Some(c) = t
            .count
            .as_ref()
            .filter(|_| !(1..=MAX_COUNT).contains(&count))
        {
            return Err(self.error(c, format!("count = {count}, expected 1 to {MAX_COUNT}")));
        }
        let profile = self.profile(kind, table)?;
        let first = devices.iter().filter(|d| d.name.kind == kind).count() as u32;
        devices.extend((first..first + count).map(|i| Device {
            name: DeviceName::local(kind, i),
            profile: profile.clone(),
            rates: RateSource::Target,
            memory_limit: t.memory_bytes.map(Bytes),
            memory: None,
            kernels: Kernels::all(),
        }));
        Ok(())
    }

    fn kind(&self, text: &Spanned<String>) -> Result<DeviceKind> {
        DeviceKind::from_name(text.get_ref()).ok_or_else(|| {
            self.error(
                text,
                format!(
                    "unknown kind of device {:?}; known: cpu, gpu, emu",
                    text.get_ref()
                ),
            )
        })
    }

    fn profile(&self, kind: DeviceKind, table: &Spanned<DeviceTable>) -> Result<DeviceProfile> {
        let t = table.get_ref();
        let n_threads = t.threads.as_ref().map_or(1, |n| *n.get_ref());
        if let Some(n) = t
            .threads
            .as_ref()
            .filter(|_| !(1..=1024).contains(&n_threads))
        {
            return Err(self.error(n, format!("threads = {n_threads}, expected 1 to 1024")));
        }
        let mut peaks = BTreeMap::new();
        for (name, value) in &t.flops_per_second {
            let known = || DType::ALL.iter().map(|d| d.name());
            let dtype =
                DType::parse(name.get_ref()).ok_or_else(|| self.unknown("dtype", name, known()))?;
            peaks.insert(dtype, self.rate(name.get_ref(), value)?);
        }
        let flops_f32 = peaks.remove(&DType::F32);
        Ok(DeviceProfile {
            kind,
            flops_f32: flops_f32.ok_or_else(|| self.error(table, "flops_per_second needs f32"))?,
            memory_bandwidth: self.rate("memory_bytes_per_second", &t.memory_bytes_per_second)?,
            cache_bandwidth: self.rate("cache_bytes_per_second", &t.cache_bytes_per_second)?,
            cache_bytes: Bytes(t.cache_bytes),
            launch: Nanos(t.launch_ns),
            n_threads,
            lanes: self.lanes(kind, t.lanes.as_ref())?,
            peaks,
            efficiencies: self.efficiencies(&t.efficiency)?,
        })
    }

    /// Lanes of a CPU's vectors; those of AVX2 where the profile does not say.
    fn lanes(&self, kind: DeviceKind, stated: Option<&Spanned<usize>>) -> Result<usize> {
        match stated {
            None if kind == DeviceKind::Cpu => Ok(8),
            None => Ok(1),
            Some(n) if kind != DeviceKind::Cpu => Err(self.error(n, "lanes are of CPUs")),
            Some(n) if (1..=1024).contains(n.get_ref()) => Ok(*n.get_ref()),
            Some(n) => {
                let message = format!("lanes = {}, expected 1 to 1024", n.get_ref());
                Err(self.error(n, message))
            }
        }
    }

    fn efficiencies(
        &self,
        stated: &BTreeMap<Spanned<String>, Spanned<f64>>,
    ) -> Result<BTreeMap<(WorkClass, Option<DType>), f64>> {
        let mut shares = BTreeMap::new();
        for (name, value) in stated {
            let class_of = |text: &str| {
                WorkClass::NAMES
                    .iter()
                    .find(|(_, n)| *n == text)
                    .map(|(class, _)| *class)
            };
            let typed = name.get_ref().rsplit_once('_');
            let key = match (
                class_of(name.get_ref()),
                typed.map(|(c, d)| (class_of(c), DType::parse(d))),
            ) {
                (Some(class), _) => (class, None),
                (None, Some((Some(class), Some(dtype)))) => (class, Some(dtype)),
                _ => {
                    return Err(self.unknown(
                        "class",
                        name,
                        WorkClass::NAMES.iter().map(|(_, n)| *n),
                    ));
                }
            };
            let share = *value.get_ref();
            if !(share > 0.0 && share <= 1.0) {
                return Err(self.error(
                    value,
                    format!(
                        "{} = {share}, expected more than 0 and at most 1",
                        name.get_ref()
                    ),
                ));
            }
            shares.insert(key, share);
        }
        Ok(shares)
    }

    fn unknown<'a>(
        &self,
        what: &str,
        name: &Spanned<String>,
        known: impl Iterator<Item = &'a str>,
    ) -> Error {
        let known: Vec<&str> = known.collect();
        let error = self.error(
            name,
            format!(
                "unknown {what} {:?}; known: {}",
                name.get_ref(),
                known.join(", ")
            ),
        );
        match nearest(name.get_ref(), known.iter().copied(), 1).first() {
            Some(near) => error.hint(*near),
            None => error,
        }
    }

    /// The link of each ordered pair.
    fn links(
        &self,
        tables: &[LinkTable],
        devices: &[Device],
    ) -> Result<BTreeMap<(usize, usize), LinkProfile>> {
        let mut links = BTreeMap::new();
        for t in tables {
            let bytes_per_second = self.rate("bytes_per_second", &t.bytes_per_second)? as u64;
            let link = LinkProfile {
                latency: Nanos(t.latency_ns),
                bytes_per_second,
            };
            let (from, to) = (self.ends(&t.from, devices)?, self.ends(&t.to, devices)?);
            let pairs = from
                .iter()
                .flat_map(|&f| to.iter().map(move |&t| (f, t)))
                .filter(|(f, t)| f != t);
            links.extend(pairs.map(|pair| (pair, link)));
        }
        let pairs = (0..devices.len()).flat_map(|f| (0..devices.len()).map(move |t| (f, t)));
        match pairs
            .filter(|(f, t)| f != t)
            .find(|pair| !links.contains_key(pair))
        {
            None => Ok(links),
            Some((f, t)) => Err(Error::invalid(format!(
                "no link from {} to {}",
                devices[f].name, devices[t].name
            ))
            .hint("[[link]] with from = \"any\" and to = \"any\"")),
        }
    }

    /// Devices that one end of a link names.
    fn ends(&self, end: &Spanned<String>, devices: &[Device]) -> Result<Vec<usize>> {
        let text = end.get_ref();
        let fits: Vec<usize> = match (text.as_str(), DeviceKind::from_name(text)) {
            ("any", _) => (0..devices.len()).collect(),
            (_, Some(kind)) => (0..devices.len())
                .filter(|&d| devices[d].name.kind == kind)
                .collect(),
            _ => {
                let spec = DeviceSpec::parse(text).map_err(|e| self.error(end, e))?;
                (0..devices.len())
                    .filter(|&d| spec.fits(&devices[d].name))
                    .collect()
            }
        };
        match fits.is_empty() {
            true => Err(self.error(end, format!("{text:?} names no device of this profile"))),
            false => Ok(fits),
        }
    }
}

#[cfg(test)]
mod tests;
