//! Plans: text files with the device of each node, to read, compare, change and replay.
//!
//! The first line is `plan/1`; `#` begins a comment line. Every node has a line `node = device`. A
//! copy has a name of its own, and says its kind and its consumers, nodes or other copies, which
//! take its results instead of the node's own:
//!
//! ```text
//! /a = /device:EMU:0
//! "/a (copy)" = /device:EMU:1 runs /a for /b, /c
//! "/a (parked)" = /device:CPU:0 parks /a for /d
//! ```
//!
//! A node `runs` again; of one that `parks`, a result goes to the device and back (`parks result 1
//! of /a` where it has several). Names that hold spaces, quotes, `#`, `,` or `=` are JSON strings.

mod copy_lines;

use super::explain::Subject;
use crate::cost::Nanos;
use crate::error::{Error, Result};
use crate::nearest::nearest;
use copy_lines::CopyLine;
use gristmill_solver::Problem;
use gristmill_solver::memory::remat::{Copy, Freedom};
use gristmill_solver::search::portfolio::{self, Algorithm, Options, Solution};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// First line of every plan.
const FORMAT: &str = "plan/1";
/// Most nodes listed in an error.
const N_NAMED: usize = 5;

/// A parsed plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Its source, for messages.
    source: String,
    lines: Vec<Line>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    number: usize,
    node: String,
    device: String,
    copy: Option<CopyLine>,
}

/// The names of a problem, for plans.
pub struct Names<'a> {
    /// By task, each once.
    pub tasks: &'a [String],
    /// By device.
    pub devices: &'a [String],
    /// The device of a text.
    pub find: &'a dyn Fn(&str) -> Option<usize>,
    /// The request or rule behind the allowed devices of a task.
    pub reason: &'a dyn Fn(usize) -> String,
    /// The allowed copies.
    pub freedom: &'a Freedom,
}

/// A plan matched with a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Device of each task, and its line.
    pub tasks: Vec<(usize, String)>,
    /// The copies; users of other copies come first.
    pub copies: Vec<Copy>,
}

impl Plan {
    /// Reads a plan; `source` names it in messages.
    ///
    /// Reports all errors at once with line numbers: malformed lines and duplicate nodes.
    pub fn parse(text: &str, source: &str) -> Result<Plan> {
        let mut lines = text.lines().enumerate().map(|(i, l)| (i + 1, l.trim()));
        let first = lines.next().map_or("", |l| l.1);
        if first != FORMAT {
            let shown: String = first.chars().take(40).collect();
            return Err(Error::invalid(format!(
                "{source}, line 1: {shown:?}; expected {FORMAT:?}"
            ))
            .hint("--plan-out FILE, which writes plans"));
        }
        let mut plan = Plan {
            source: source.to_owned(),
            lines: Vec::new(),
        };
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let mut errors = Vec::new();
        for (number, line) in lines.filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
            match entry(line) {
                Ok((node, device, copy)) => {
                    if let Some(before) = seen.insert(node.clone(), number) {
                        errors.push(plan.wrong(
                            number,
                            format!("node {node:?} comes twice; first in line {before}"),
                        ));
                    }
                    plan.lines.push(Line {
                        number,
                        node,
                        device,
                        copy,
                    });
                }
                Err(why) => errors.push(plan.wrong(number, why)),
            }
        }
        if errors.is_empty() {
            Ok(plan)
        } else {
            Err(Error::join(errors))
        }
    }

    fn wrong(&self, number: usize, why: impl std::fmt::Display) -> Error {
        Error::invalid(format!("{}, line {number}: {why}", self.source))
    }

    /// True if it has a line for each of these nodes, and for no other.
    pub(crate) fn names_all_of(&self, nodes: &[String]) -> bool {
        let lines = self.lines.iter().filter(|l| l.copy.is_none());
        let named: BTreeSet<&str> = lines.map(|l| l.node.as_str()).collect();
        named == nodes.iter().map(String::as_str).collect()
    }

    /// The device of every task of a problem, and its copies.
    ///
    /// Reports all errors at once with line numbers: unknown nodes and devices, forbidden devices,
    /// groups on several devices, nodes without a line, and impossible copies.
    pub fn resolve(&self, p: &Problem, names: &Names) -> Result<Planned> {
        let tasks = names.tasks.iter().map(String::as_str);
        let index: BTreeMap<&str, usize> = tasks.zip(0..).collect();
        let line_of = self.line_of(p, names, &index)?;
        let home: Vec<u32> = line_of.iter().map(|(d, _)| *d as u32).collect();
        let reader = copy_lines::Reader {
            plan: self,
            problem: p,
            names,
            index: &index,
            home: &home,
        };
        let author = |line: &Line| format!("{}, line {}", self.source, line.number);
        Ok(Planned {
            copies: reader.copies()?,
            tasks: line_of.into_iter().map(|(d, l)| (d, author(l))).collect(),
        })
    }

    /// Device and line of every task.
    fn line_of(
        &self,
        p: &Problem,
        names: &Names,
        index: &BTreeMap<&str, usize>,
    ) -> Result<Vec<(usize, &Line)>> {
        let mut line_of: Vec<Option<(usize, &Line)>> = vec![None; p.n_tasks()];
        let mut errors = Vec::new();
        for line in self.lines.iter().filter(|l| l.copy.is_none()) {
            match self.read(line, p, names, index) {
                Ok((task, device)) => line_of[task] = Some((device, line)),
                Err(e) => errors.push(e),
            }
        }
        if errors.is_empty() {
            errors.extend(self.missing(&line_of, names));
            errors.extend(self.torn(p, &line_of, names));
        }
        if errors.is_empty() {
            Ok(line_of.into_iter().flatten().collect())
        } else {
            Err(Error::join(errors))
        }
    }

    fn read(
        &self,
        line: &Line,
        p: &Problem,
        names: &Names,
        index: &BTreeMap<&str, usize>,
    ) -> Result<(usize, usize)> {
        let task = self.task(line, &line.node, names, index)?;
        let device = self.device(line, names)?;
        if p.cost(task, device).is_finite() {
            return Ok((task, device));
        }
        let open: Vec<&str> = p
            .feasible(task)
            .map(|d| names.devices[d].as_str())
            .collect();
        let (node, at) = (&line.node, &names.devices[device]);
        let why = format!(
            "{node} cannot be on {at}: {}; it can be on {}",
            (names.reason)(task),
            open.join(", ")
        );
        Err(self.wrong(line.number, why))
    }

    fn task(
        &self,
        line: &Line,
        node: &str,
        names: &Names,
        index: &BTreeMap<&str, usize>,
    ) -> Result<usize> {
        index.get(node).copied().ok_or_else(|| {
            let near = nearest(node, names.tasks.iter().map(String::as_str), 3);
            let error = self.wrong(line.number, format!("there is no node {node:?} to place"));
            if near.is_empty() {
                error
            } else {
                error.hint(near.join(", "))
            }
        })
    }

    fn device(&self, line: &Line, names: &Names) -> Result<usize> {
        (names.find)(&line.device).ok_or_else(|| {
            let known = names.devices.join(", ");
            let near = nearest(&line.device, names.devices.iter().map(String::as_str), 1);
            let why = format!("there is no device {:?}; available: {known}", line.device);
            self.wrong(line.number, why)
                .hint(near.first().map_or(known.as_str(), |n| n))
        })
    }

    fn missing(&self, line_of: &[Option<(usize, &Line)>], names: &Names) -> Option<Error> {
        let missing: Vec<usize> = (0..line_of.len())
            .filter(|&t| line_of[t].is_none())
            .collect();
        let shown: Vec<&str> = missing
            .iter()
            .take(N_NAMED)
            .map(|&t| names.tasks[t].as_str())
            .collect();
        let more = missing.len() - shown.len();
        let more = if more == 0 {
            String::new()
        } else {
            format!(" and {more} more")
        };
        let message = format!(
            "{}: no line for {}{more}; expected one for every node",
            self.source,
            shown.join(", ")
        );
        (!missing.is_empty())
            .then(|| Error::invalid(message).hint("a plan of the same graph and options"))
    }

    fn torn(&self, p: &Problem, line_of: &[Option<(usize, &Line)>], names: &Names) -> Vec<Error> {
        let mut errors = Vec::new();
        for group in 0..p.n_groups() {
            let mut said = p
                .members
                .row(group)
                .iter()
                .filter_map(|&t| line_of[t as usize]);
            let Some((device, first)) = said.next() else {
                continue;
            };
            if let Some((other, line)) = said.find(|(d, _)| *d != device) {
                errors.push(self.wrong(
                    line.number,
                    format!(
                        "{} is on {}, but line {} puts {} on {}; they must be together",
                        line.node,
                        names.devices[other],
                        first.number,
                        first.node,
                        names.devices[device]
                    ),
                ));
            }
        }
        errors
    }
}

/// `node = device`, and the rest of the line for a copy.
fn entry(line: &str) -> Result<(String, String, Option<CopyLine>), String> {
    let (node, rest) = name(line)?;
    let rest = rest
        .trim_start()
        .strip_prefix('=')
        .ok_or("expected `node = device`")?;
    let (device, rest) = name(rest.trim_start())?;
    Ok((node, device, CopyLine::parse(rest.trim())?))
}

/// A plain name or a JSON string at the start of a text, and the rest.
fn name(text: &str) -> Result<(String, &str), String> {
    if text.starts_with('"') {
        let mut read = serde_json::Deserializer::from_str(text).into_iter::<String>();
        let name = read
            .next()
            .and_then(|n| n.ok())
            .ok_or_else(|| format!("{text:?} does not begin with a string"))?;
        return Ok((name, &text[read.byte_offset()..]));
    }
    let end = text.find(|c: char| !is_plain(c)).unwrap_or(text.len());
    if end == 0 {
        Err("expected `node = device`".to_owned())
    } else {
        Ok((text[..end].to_owned(), &text[end..]))
    }
}

fn is_plain(c: char) -> bool {
    !c.is_whitespace() && !c.is_control() && !['"', '#', '=', ','].contains(&c)
}

fn quoted(name: &str) -> String {
    let is_free = !name.is_empty() && name.chars().all(is_plain);
    if is_free {
        name.to_owned()
    } else {
        serde_json::Value::from(name).to_string()
    }
}

/// The text of a plan: graph, devices and predicted makespan as comments, then a line for each task
/// and copy, by name; `copies` is the rest of the lines of copies, which are the last tasks.
fn write(
    graph: &str,
    tasks: &[String],
    devices: &[String],
    device_of: &[u32],
    makespan: Nanos,
    copies: &[String],
) -> String {
    let all: Vec<String> = devices.iter().map(|d| quoted(d)).collect();
    let mut out = format!(
        "{FORMAT}\n# graph {graph:?}\n# devices {}\n",
        all.join(", ")
    );
    let more = std::iter::repeat_n("", tasks.len() - copies.len())
        .chain(copies.iter().map(String::as_str));
    let mut lines: Vec<(&String, &str, &str)> = tasks
        .iter()
        .zip(device_of)
        .zip(more)
        .map(|((t, &d), more)| (t, devices[d as usize].as_str(), more))
        .collect();
    lines.sort_unstable();
    writeln!(out, "# predicted makespan {makespan} ({} ns)", makespan.0)
        .expect("writing to a String does not fail");
    for (task, device, more) in lines {
        writeln!(out, "{} = {}{more}", quoted(task), quoted(device))
            .expect("writing to a String does not fail");
    }
    out
}

/// The plan of a solved problem, as text.
pub fn of(s: &Subject) -> String {
    let names: Vec<String> = s.tasks.iter().map(|t| t.name.clone()).collect();
    let t = &s.solution.timeline;
    let copies: Vec<String> = s
        .copies
        .iter()
        .map(|copy| copy_lines::text(s.base, copy, &names))
        .collect();
    write(s.name, &names, &s.devices, &t.device, t.makespan, &copies)
}

/// Solves a problem whose devices are planned: only orders are searched. The bound is that of the
/// problem without the plan.
pub fn solve(
    p: &Problem,
    planned: &Planned,
    options: &Options,
    name: &dyn Fn(Algorithm) -> String,
) -> Option<Solution> {
    let mut solution = portfolio::solve(&fixed(p, planned), options, name)?;
    let bound = portfolio::lower_bound(p, options);
    (solution.lower_bound, solution.bound) = (bound.value, bound.name.into());
    solution.algorithm = "plan".to_owned();
    solution.candidates.clear();
    solution.moved.clear();
    Some(solution)
}

/// The problem in which every task can be on its planned device only.
pub(super) fn fixed(p: &Problem, planned: &Planned) -> Problem {
    let mut fixed = p.clone();
    planned
        .tasks
        .iter()
        .enumerate()
        .for_each(|(t, (device, _))| fixed.restrict(t, |d| d == *device));
    fixed
}

#[cfg(test)]
mod tests;
