//! Cache of placements between processes: a decision of re-placement by measured times holds
//! wherever the same problem comes again.
//!
//! A cached placement is a plan (see [`super::plan`]) in the cache folder. The file is named by a
//! hash of the problem: nodes, tensors, devices, links, limits, and the devices allowed for each
//! node, so that another model, device set or option looks for another file. A comment in it holds
//! the times by which the decision was made; by others the placer decides anew. A file that cannot
//! be used is named in a warning and ignored.

use super::plan::{Plan, Planned};
use super::{DeviceSet, Objective, Placement, Request};
use crate::cost::{Fnv, Nanos, store};
use crate::error::{Error, Result};
use crate::ir::Graph;
use gristmill_runtime::device::DeviceName;
use gristmill_runtime::files::{self, MAX_TEXT_BYTES};
use gristmill_solver::Problem;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Prefix of the line with the hash of the problem and its times.
const TIMES: &str = "# decided by times ";

/// The cached placement of a problem.
pub(super) struct Entry {
    path: PathBuf,
    /// Hash of the problem with its times.
    times: String,
}

impl Entry {
    /// For a request that may take a kept placement: for latency, with a folder, something to
    /// decide, no plan, and no earlier placement to begin from.
    pub fn of_request(request: &Request, p: &Problem, names: &[String]) -> Option<Entry> {
        let DeviceSet { devices, .. } = &request.devices;
        let has_choice = devices.len() > 1
            && request.objective == Objective::Latency
            && request.plan.is_none()
            && request.previous.is_none();
        let folder = request.kept.as_deref().filter(|_| has_choice)?;
        let devices: Vec<&DeviceName> = devices.iter().map(|d| &d.name).collect();
        Some(Entry::of(
            folder,
            p,
            names.iter().map(String::as_str),
            &devices,
        ))
    }

    fn of<'n>(
        folder: &Path,
        p: &Problem,
        names: impl Iterator<Item = &'n str>,
        devices: &[&DeviceName],
    ) -> Entry {
        let mut what = Fnv::default();
        names.for_each(|name| write!(what, "{name:?}").expect("hashing does not fail"));
        devices
            .iter()
            .for_each(|name| write!(what, "{name}").expect("hashing does not fail"));
        let mut times = what;
        write!(times, "{p:?}").expect("hashing does not fail");
        let mut parts = p.parts();
        let mark = |cost: &mut Nanos| {
            *cost = if cost.is_finite() {
                Nanos::ZERO
            } else {
                Nanos::INFINITY
            }
        };
        parts
            .tasks
            .iter_mut()
            .for_each(|t| t.cost.iter_mut().for_each(mark));
        write!(what, "{parts:?}").expect("hashing does not fail");
        let path = folder.join(format!("{:016x}.plan", what.value()));
        Entry {
            path,
            times: format!("{:016x}", times.value()),
        }
    }

    /// The cached plan, as `resolve` reads it: nothing where there is no file, or one of other
    /// times; a warning where it cannot be used.
    pub fn find(
        &self,
        resolve: impl Fn(&Plan) -> Result<Planned>,
    ) -> Result<Option<Planned>, String> {
        let text = match files::read_text(&self.path, MAX_TEXT_BYTES) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(self.ignored(e)),
        };
        let source = self
            .path
            .file_name()
            .unwrap_or_default()
            .display()
            .to_string();
        let plan = Plan::parse(&text, &source).map_err(|e| self.ignored(e))?;
        let times = text.lines().find_map(|l| l.strip_prefix(TIMES));
        let times = times.ok_or_else(|| self.ignored(format!("no line says {TIMES:?}")))?;
        // It is read even if its times are stale, so that a broken file is reported at once.
        let planned = resolve(&plan).map_err(|e| self.ignored(e))?;
        Ok((times == self.times).then_some(planned))
    }

    /// The warning about a file that is not used.
    pub fn ignored(&self, why: impl std::fmt::Display) -> String {
        store::ignored(&self.path, why)
    }
}

impl Placement {
    /// Keeps this placement of `g` in a folder for processes to come, and says in which file.
    ///
    /// Errors for placements by hand, and when the file cannot be written.
    pub fn keep(&self, g: &Graph, folder: &Path) -> Result<PathBuf> {
        let text = self.plan_text(g)?;
        let solved = self
            .solved
            .as_deref()
            .ok_or_else(|| Error::invalid("a placement by hand cannot be kept"))?;
        let devices: Vec<&DeviceName> = self.devices.iter().collect();
        let Entry { path, times } =
            Entry::of(folder, &solved.problem, solved.task_names(), &devices);
        let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
        store::replace(&path, &format!("{first}\n{TIMES}{times}\n{rest}"))?;
        Ok(path)
    }
}
