//! Every form of every family's kernels, checked small and timed large: `--sweep`.
//!
//! Rows are tab-separated and written at once, so that a run which is cut short has them:
//!
//! - `form`: family, cluster and form, time, description;
//! - `family`: name, time of the fastest form of each cluster, rate, share of the ceiling, ratio to the
//!   predicted forms and to the peer, numbers of the fastest forms.

use super::ceilings::Ceilings;
use super::checks::{inputs, rate};
use super::families::{ALL, Family};
use super::{Arguments, setup};
use gristmill::testing::Rng;
use gristmill::tune::{FormTime, each_form};
use gristmill::{Error, Result};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Files of a sweep.
#[derive(Default)]
pub struct Files {
    /// Where rows are appended.
    pub out: Option<PathBuf>,
    /// Rows of an earlier run, whose families are not repeated.
    pub resume: Option<PathBuf>,
    /// Rows of `benches/peers/gpu.py`.
    pub peers: Option<PathBuf>,
}

/// Every family; false when a form fails or gives wrong results.
pub fn run(arguments: &Arguments, ceilings: &Ceilings) -> Result<bool> {
    let files = &arguments.files;
    let mut table = Table::open(files.out.as_deref())?;
    let done = finished(files.resume.as_deref())?;
    let peers = peers(files.peers.as_deref())?;
    let mut good = true;
    for family in ALL {
        if let Some(rows) = done.get(family.name) {
            // The file has them already where it is the same.
            if files.out != files.resume {
                rows.iter().try_for_each(|row| table.row(row))?;
            }
            continue;
        }
        let small = forms(family, 1, arguments.device, &mut |_| Ok(()))?;
        good &= small.iter().all(|form| form.ns.is_ok());
        for form in &small {
            if arguments.quick || form.ns.is_err() {
                table.row(&form_row(family, form, false))?;
            }
        }
        if arguments.quick {
            table.row(&format!("family\t{}\tleft out", family.name))?;
            continue;
        }
        let mut show = |form: &FormTime| table.row(&form_row(family, form, true));
        let large = forms(family, family.large, arguments.device, &mut show)?;
        good &= large.iter().all(|form| form.ns.is_ok());
        let peer = peers.get(family.name).copied();
        table.row(&family_row(family, &Best::of(&large), peer, ceilings)?)?;
    }
    Ok(good)
}

/// The forms of a family's graph of a scale.
fn forms(
    family: &Family,
    scale: usize,
    device: u32,
    show: &mut dyn FnMut(&FormTime) -> Result<()>,
) -> Result<Vec<FormTime>> {
    let (graph, _) = (family.make)(scale)?;
    let setup = setup("gpu:1", device)?;
    let (mut all, mut shown) = (Vec::new(), Ok(()));
    let operands = |g: &gristmill::ir::Graph| inputs(g, &mut Rng(7));
    each_form(graph, setup.config(), &operands, &mut |form| {
        if shown.is_ok() {
            shown = show(&form);
        }
        all.push(form);
    })?;
    shown.map(|()| all)
}

/// A form with its time, or how its check on small inputs ended.
fn form_row(family: &Family, form: &FormTime, is_timed: bool) -> String {
    let time = match &form.ns {
        Ok(_) if !is_timed => "good".to_owned(),
        Ok(ns) => format!("{:.4} ms", *ns as f64 / 1e6),
        Err(e) => format!("WRONG: {}", e.to_string().replace(['\t', '\n'], " ")),
    };
    let number = format!("{}: {} of {}", form.cluster, form.form + 1, form.n);
    format!("form\t{}\t{number}\t{time}\t{}", family.name, form.words)
}

fn family_row(
    family: &Family,
    best: &Best,
    peer: Option<f64>,
    ceilings: &Ceilings,
) -> Result<String> {
    let (_, work) = (family.make)(family.large)?;
    let [time, rate, share] = rate(family, &work, best.ns, ceilings);
    let to_predicted = best.ns / best.predicted_ns;
    let to_peer = peer.map_or(String::new(), |ms| format!("{:.2}", best.ns / 1e6 / ms));
    let forms = best.forms.join(" ");
    Ok(format!(
        "family\t{}\t{time}\t{rate}\t{share}\t{to_predicted:.2}\t{to_peer}\t{forms}",
        family.name
    ))
}

/// The fastest forms of a family's clusters.
struct Best {
    ns: f64,
    predicted_ns: f64,
    /// `CLUSTER: FORM`, by number from 1.
    forms: Vec<String>,
}

impl Best {
    fn of(forms: &[FormTime]) -> Best {
        let mut clusters: BTreeMap<usize, Vec<(u64, u8)>> = BTreeMap::new();
        for form in forms {
            let times = clusters.entry(form.cluster).or_default();
            times.extend(form.ns.as_ref().ok().map(|&ns| (ns, form.form)));
        }
        let mut best = Best {
            ns: 0.0,
            predicted_ns: 0.0,
            forms: Vec::new(),
        };
        for (cluster, times) in clusters {
            let predicted = times.iter().find(|(_, form)| *form == 0);
            best.predicted_ns += predicted.map_or(f64::NAN, |&(ns, _)| ns as f64);
            match times.iter().min() {
                Some(&(ns, form)) => {
                    best.ns += ns as f64;
                    best.forms.push(format!("{cluster}: {}", form + 1));
                }
                None => best.ns = f64::NAN,
            }
        }
        best
    }
}

/// The rows, on the standard output and in a file.
struct Table(Option<File>);

impl Table {
    fn open(out: Option<&Path>) -> Result<Table> {
        let open = |path: &Path| {
            let file = OpenOptions::new().create(true).append(true).open(path);
            file.map_err(|e| Error::invalid(format!("--out {}: {e}", path.display())))
        };
        Ok(Table(out.map(open).transpose()?))
    }

    fn row(&mut self, row: &str) -> Result<()> {
        let failed = |e: std::io::Error| Error::invalid(format!("a row cannot be written: {e}"));
        writeln!(std::io::stdout(), "{row}").map_err(failed)?;
        match &mut self.0 {
            Some(file) => writeln!(file, "{row}").map_err(failed),
            None => Ok(()),
        }
    }
}

fn read(flag: &str, path: Option<&Path>) -> Result<String> {
    let Some(path) = path else {
        return Ok(String::new());
    };
    let text = std::fs::read_to_string(path);
    text.map_err(|e| Error::invalid(format!("{flag} {}: {e}", path.display())))
}

/// Rows of the families that an earlier run has ended, by family.
fn finished(path: Option<&Path>) -> Result<BTreeMap<String, Vec<String>>> {
    let (mut done, mut open) = (BTreeMap::new(), Vec::new());
    for row in read("--resume", path)?.lines() {
        open.push(row.to_owned());
        if let Some(rest) = row.strip_prefix("family\t") {
            let name = rest.split('\t').next().unwrap_or_default();
            let mut rows = std::mem::take(&mut open);
            // Rows of a family that was cut short, and begun again since.
            rows.retain(|row| row.split('\t').nth(1) == Some(name));
            done.insert(name.to_owned(), rows);
        }
    }
    Ok(done)
}

/// The least time of each of the peers' rows, in ms.
fn peers(path: Option<&Path>) -> Result<BTreeMap<String, f64>> {
    let mut least: BTreeMap<String, f64> = BTreeMap::new();
    for row in read("--peers", path)?.lines() {
        if let [name, _, time, ..] = row.split('\t').collect::<Vec<_>>()[..]
            && let Some(ms) = time.strip_suffix(" ms").and_then(|ms| ms.parse().ok())
        {
            let known = least.entry(name.to_owned()).or_insert(f64::INFINITY);
            *known = known.min(ms);
        }
    }
    Ok(least)
}
