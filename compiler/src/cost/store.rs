//! Files under the user's cache folder: measurements of this machine, kept from one process to the
//! next.
//!
//! The folder is `$GRISTMILL_CACHE_DIR`, otherwise `gristmill` under `$XDG_CACHE_HOME` or
//! `$HOME/.cache`. An empty `GRISTMILL_CACHE_DIR` turns the cache off. Files are replaced as a
//! whole, so a reader never sees half of one; processes that add to a file do so one after the
//! other. A file that cannot be read, or comes from another version, is named in a warning and
//! counts as absent.

use super::Nanos;
use super::measured::{MAX_RECENT, Measured, ProfileKey, Sample};
use crate::error::{Error, Result};
use gristmill_runtime::files::{self, MAX_TEXT_BYTES};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The format of the file of measured times. It changes with the code generator, since times of
/// other kernels do not apply.
pub const TIMES_FORMAT: &str = concat!(
    "gristmill/times/2 of ",
    env!("CARGO_PKG_VERSION"),
    " codegen 2"
);

/// Most clusters that are kept; the file stays below about 60 MiB.
const MAX_SAMPLES: usize = 200_000;

/// The cache folder, if there is one.
pub fn folder() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name);
    if let Some(own) = var("GRISTMILL_CACHE_DIR") {
        return (!own.is_empty()).then(|| PathBuf::from(own));
    }
    let absolute = |dir: std::ffi::OsString| Some(PathBuf::from(dir)).filter(|d| d.is_absolute());
    let base = var("XDG_CACHE_HOME").and_then(absolute);
    base.or_else(|| Some(var("HOME").and_then(absolute)?.join(".cache")))
        .map(|b| b.join("gristmill"))
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimesFile {
    format: String,
    /// The CPU that the times are of.
    machine: String,
    times: Vec<Row>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// Hexadecimal [`ProfileKey`].
    profile: String,
    /// Hexadecimal signature.
    cluster: String,
    class: String,
    analytic_ns: u64,
    count: u64,
    sum_ns: u64,
    min_ns: u64,
    recent_ns: Vec<u64>,
}

/// The file of measured times in a cache folder.
pub fn times_path(folder: &Path) -> PathBuf {
    folder.join("times.json")
}

/// The folder of kept placements in a cache folder.
pub fn placements_path(folder: &Path) -> PathBuf {
    folder.join("placements")
}

/// Measured times of `machine`. A missing file is empty; one that is corrupt or foreign is empty with a warning that names it.
pub fn load_times(path: &Path, machine: &str) -> (Measured, Option<String>) {
    load(path, MAX_TEXT_BYTES, |text| parse_times(text, machine)).map_or_else(
        |warning| (Measured::default(), Some(warning)),
        |m| (m.unwrap_or_default(), None),
    )
}

/// Reads a file of the cache folder. `None` when it is missing; the error is a warning that names it.
pub(crate) fn load<T, E: std::fmt::Display>(
    path: &Path,
    limit_bytes: u64,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, String> {
    let text = match files::read_text(path, limit_bytes) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ignored(path, e)),
    };
    parse(&text).map(Some).map_err(|why| ignored(path, why))
}

/// The warning about a file that is not used.
pub(crate) fn ignored(path: &Path, why: impl std::fmt::Display) -> String {
    format!(
        "{}: {why}; the file is ignored (delete it, or measure again)",
        path.display()
    )
}

fn parse_times(text: &str, machine: &str) -> Result<Measured, String> {
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
    let found = value["format"].as_str().unwrap_or("none");
    if found != TIMES_FORMAT {
        return Err(format!("format {found:?}, expected {TIMES_FORMAT:?}"));
    }
    let file: TimesFile = serde_json::from_value(value).map_err(|e| e.to_string())?;
    if file.machine != machine {
        return Err(format!("it is of another machine, {:?}", file.machine));
    }
    let mut measured = Measured::default();
    measured.extend(
        file.times
            .into_iter()
            .map(Row::sample)
            .collect::<Result<Vec<_>, _>>()?,
    );
    Ok(measured)
}

impl Row {
    fn sample(self) -> Result<((ProfileKey, u64), Sample), String> {
        let hash =
            |text: &str| u64::from_str_radix(text, 16).map_err(|e| format!("hash {text:?}: {e}"));
        let key = (ProfileKey(hash(&self.profile)?), hash(&self.cluster)?);
        let n = self.recent_ns.len();
        if self.count == 0
            || n == 0
            || n > MAX_RECENT
            || n as u64 > self.count
            || self.min_ns > self.sum_ns / self.count
        {
            return Err(format!(
                "the times of cluster {} contradict each other",
                self.cluster
            ));
        }
        let sample = Sample {
            class: self.class,
            analytic: Nanos(self.analytic_ns),
            count: self.count,
            sum: Nanos(self.sum_ns),
            min: Nanos(self.min_ns),
            recent: self.recent_ns.into_iter().map(Nanos).collect(),
        };
        Ok((key, sample))
    }
}

/// Adds measured times to those in a file, and returns both together. Other processes that do the same wait for each other, so that no time is
/// lost. The warning is that of [`load_times`].
pub fn add_times(path: &Path, machine: &str, new: &Measured) -> Result<(Measured, Option<String>)> {
    let _lock = lock(path)?;
    let (mut all, warning) = load_times(path, machine);
    all.merge(new);
    save_times(path, machine, &all)?;
    Ok((all, warning))
}

/// Writes measured times of `machine`. Errors name the file.
pub fn save_times(path: &Path, machine: &str, measured: &Measured) -> Result<()> {
    let row = |((profile, cluster), s): (&(ProfileKey, u64), &Sample)| Row {
        profile: format!("{:016x}", profile.0),
        cluster: format!("{cluster:016x}"),
        class: s.class.clone(),
        analytic_ns: s.analytic.0,
        count: s.count,
        sum_ns: s.sum.0,
        min_ns: s.min.0,
        recent_ns: s.recent.iter().map(|t| t.0).collect(),
    };
    let times = measured.samples().take(MAX_SAMPLES).map(row).collect();
    let file = TimesFile {
        format: TIMES_FORMAT.to_owned(),
        machine: machine.to_owned(),
        times,
    };
    let text =
        serde_json::to_string(&file).map_err(|e| Error::internal(format!("writing times: {e}")))?;
    replace(path, &text)
}

/// Writes a file so that readers see the old or the new one, never a part.
pub fn replace(path: &Path, text: &str) -> Result<()> {
    create_folder(path)
        .and_then(|()| files::replace_entry(path, |file| file.write_all(text.as_bytes())))
        .map_err(|e| not_written(path, e))
}

/// Takes the lock of a file of the cache folder; see [`files::lock`].
pub(crate) fn lock(path: &Path) -> Result<File> {
    create_folder(path)
        .and_then(|()| files::lock(path))
        .map_err(|e| not_written(path, e))
}

fn create_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty());
    folder.map_or(Ok(()), std::fs::create_dir_all)
}

fn not_written(path: &Path, e: io::Error) -> Error {
    Error::invalid(format!("{}: {e}", path.display()))
        .hint("GRISTMILL_CACHE_DIR with a folder that can be written, or empty for no cache")
}
