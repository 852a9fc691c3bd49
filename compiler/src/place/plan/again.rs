//! Lines of plans that are copies: nodes that run again, and results that are offloaded.

use super::{Line, Names, Plan, name, quoted};
use crate::error::{Error, Result};
use crate::nearest::nearest;
use gristmill_solver::Problem;
use gristmill_solver::memory::remat::Copy;
use std::collections::BTreeMap;

/// The line of a copy behind name and device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Again {
    /// The node that runs again, or whose result is offloaded.
    node: String,
    /// The offloaded result, if the copy offloads.
    parked: Option<Parked>,
    /// Nodes and copies that take it.
    users: Vec<String>,
}

/// A result that is offloaded: its number where one is given.
type Parked = Option<usize>;

/// The forms accepted behind a device.
const EXPECTED: &str = "expected nothing, `runs NODE for USER, ...` or `parks NODE for USER, ...`";

impl Again {
    /// `runs NODE for USER, ...`, `parks NODE for USER, ...`, `parks result N of NODE for USER,
    /// ...`; `None` of an empty text.
    pub fn parse(text: &str) -> Result<Option<Again>, String> {
        if text.is_empty() {
            return Ok(None);
        }
        let wrong =
            || format!("{text:?} after the device; {EXPECTED} (names with spaces need quotes)");
        let (verb, rest) = word(text).ok_or_else(wrong)?;
        let (parked, (node, rest)) = match verb {
            "runs" => (None, name(rest)?),
            "parks" => {
                let numbered = rest.strip_prefix("result ").and_then(|r| word(r));
                match numbered
                    .and_then(|(n, r)| Some((n.parse::<usize>().ok()?, r.strip_prefix("of ")?)))
                {
                    Some((number, rest)) => (Some(Some(number)), name(rest.trim_start())?),
                    None => (Some(None), name(rest)?),
                }
            }
            _ => return Err(wrong()),
        };
        let (_, mut rest) = word(rest.trim_start())
            .filter(|(w, _)| *w == "for")
            .ok_or_else(wrong)?;
        let mut users = Vec::new();
        loop {
            let (user, more) = name(rest.trim_start()).map_err(|_| wrong())?;
            users.push(user);
            match (more.trim_start().strip_prefix(','), more.trim()) {
                (Some(more), _) => rest = more,
                (None, "") => {
                    return Ok(Some(Again {
                        node,
                        parked,
                        users,
                    }));
                }
                _ => return Err(wrong()),
            }
        }
    }
}

/// The first word of a text, and the rest.
fn word(text: &str) -> Option<(&str, &str)> {
    let (word, rest) = text.split_once(char::is_whitespace)?;
    Some((word, rest.trim_start()))
}

/// The line of a copy behind name and device; names are those of all tasks, copies last.
pub(super) fn text(p: &Problem, copy: &Copy, names: &[String]) -> String {
    let node = quoted(&names[copy.task as usize]);
    let made = p.outputs.row(copy.task as usize);
    let what = match copy.parked {
        None => format!("runs {node}"),
        Some(_) if made.len() == 1 => format!("parks {node}"),
        Some(x) => format!(
            "parks result {} of {node}",
            made.iter().position(|m| *m == x).unwrap_or_default()
        ),
    };
    let users: Vec<String> = copy
        .users
        .iter()
        .map(|&u| quoted(&names[u as usize]))
        .collect();
    format!(" {what} for {}", users.join(", "))
}

/// A copy of a plan whose users are still names.
struct Found<'a> {
    line: &'a Line,
    again: &'a Again,
    task: usize,
    parked: Option<u32>,
    device: u32,
}

/// Names and tasks that the copies of a plan refer to.
pub(super) struct Reader<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The problem that it is for.
    pub problem: &'a Problem,
    /// The names of that.
    pub names: &'a Names<'a>,
    /// Tasks by name.
    pub index: &'a BTreeMap<&'a str, usize>,
    /// Device of each task.
    pub home: &'a [u32],
}

impl Reader<'_> {
    /// The copies, those that use others before these.
    pub fn copies(&self) -> Result<Vec<Copy>> {
        let lines = self
            .plan
            .lines
            .iter()
            .filter_map(|line| Some((line, line.again.as_ref()?)));
        let (mut found, mut errors) = (Vec::new(), Vec::new());
        for (line, again) in lines {
            match self.copy(line, again) {
                Ok(copy) => found.push(copy),
                Err(e) => errors.push(e),
            }
        }
        if !errors.is_empty() {
            return Err(Error::join(errors));
        }
        let found = self.ordered(found)?;
        let place: BTreeMap<&str, usize> = found
            .iter()
            .enumerate()
            .map(|(i, f)| (f.line.node.as_str(), i))
            .collect();
        let mut copies = Vec::new();
        let mut taken: BTreeMap<(usize, u32), usize> = BTreeMap::new();
        for f in &found {
            match self.users(f, &place, &found, &mut taken) {
                Ok(users) => copies.push(Copy {
                    task: f.task as u32,
                    parked: f.parked,
                    device: f.device,
                    users,
                }),
                Err(e) => errors.push(e),
            }
        }
        if errors.is_empty() {
            Ok(copies)
        } else {
            Err(Error::join(errors))
        }
    }

    fn copy<'l>(&self, line: &'l Line, again: &'l Again) -> Result<Found<'l>> {
        let Reader {
            plan,
            problem: p,
            names,
            index,
            home,
        } = *self;
        let wrong = |why: String| Err(plan.wrong(line.number, why));
        if index.contains_key(line.node.as_str()) {
            return wrong(format!(
                "{:?} is the name of a node; a copy needs one of its own",
                line.node
            ));
        }
        let task = plan.task(line, &again.node, names, index)?;
        let device = plan.device(line, names)?;
        let (node, at) = (&again.node, &names.devices[device]);
        let Some(number) = again.parked else {
            if !names.freedom.may_copy.get(task).copied().unwrap_or(false) {
                let why = "only nodes do whose effect is their results alone, and of which nothing is asked";
                return wrong(format!("{node} does not run again: {why}"));
            }
            if !p.cost(task, device).is_finite() {
                let open: Vec<&str> = p
                    .feasible(task)
                    .map(|d| names.devices[d].as_str())
                    .collect();
                return wrong(format!(
                    "{node} cannot be on {at}; it can be on {}",
                    open.join(", ")
                ));
            }
            return Ok(Found {
                line,
                again,
                task,
                parked: None,
                device: device as u32,
            });
        };
        let own = home[task] as usize;
        if names.freedom.parking(device).is_none() || names.freedom.parking(own).is_some() {
            let why = "tensors of devices with memory of their own are parked on CPUs";
            return wrong(format!(
                "{node} is on {} and is not parked on {at}: {why}",
                names.devices[own]
            ));
        }
        let made = p.outputs.row(task);
        match (number, made.len()) {
            (None, 1) => Ok(Found {
                line,
                again,
                task,
                parked: Some(made[0]),
                device: device as u32,
            }),
            (Some(i), n) if i < n => Ok(Found {
                line,
                again,
                task,
                parked: Some(made[i]),
                device: device as u32,
            }),
            (None, n) => wrong(format!(
                "{node} has {n} results that are used; expected `parks result N of {node}`"
            )),
            (Some(i), n) => wrong(format!("{node} has no result {i} that is used; it has {n}")),
        }
    }

    /// Copies that use others before these. Errors where they use each other in a cycle.
    fn ordered<'l>(&self, mut waiting: Vec<Found<'l>>) -> Result<Vec<Found<'l>>> {
        let mut ordered: Vec<Found> = Vec::new();
        while !waiting.is_empty() {
            let is_ready = |f: &Found| {
                let waits = |other: &&Found| {
                    other.line.number != f.line.number && f.again.users.contains(&other.line.node)
                };
                !f.again.users.contains(&f.line.node) && !waiting.iter().any(|other| waits(&other))
            };
            let Some(next) = waiting.iter().position(is_ready) else {
                let first = waiting[0].line;
                return Err(self.plan.wrong(
                    first.number,
                    format!("{} and its users are copies of each other", first.node),
                ));
            };
            ordered.push(waiting.remove(next));
        }
        Ok(ordered)
    }

    /// The users of a copy as tasks; `taken` says which operands come from copies already, and from
    /// which line.
    fn users(
        &self,
        f: &Found,
        place: &BTreeMap<&str, usize>,
        found: &[Found],
        taken: &mut BTreeMap<(usize, u32), usize>,
    ) -> Result<Vec<u32>> {
        let Reader {
            problem: p,
            names,
            index,
            ..
        } = *self;
        let wrong = |why: String| self.plan.wrong(f.line.number, why);
        let results: Vec<u32> = f
            .parked
            .map_or_else(|| p.outputs.row(f.task).to_vec(), |x| vec![x]);
        let mut users = Vec::new();
        for name in &f.again.users {
            let copy = place.get(name.as_str()).copied();
            let (user, task) = match (copy, index.get(name.as_str())) {
                (Some(i), _) if found[i].parked.is_some() => (p.n_tasks() + i, None),
                (Some(i), _) => (p.n_tasks() + i, Some(found[i].task)),
                (None, Some(&task)) => (task, Some(task)),
                (None, None) => {
                    let known = names
                        .tasks
                        .iter()
                        .map(String::as_str)
                        .chain(place.keys().copied());
                    let near = nearest(name, known, 3);
                    let error = wrong(format!("there is no node or copy {name:?}"));
                    return Err(if near.is_empty() {
                        error
                    } else {
                        error.hint(near.join(", "))
                    });
                }
            };
            let used = results.iter().filter(|&&x| {
                task.is_some_and(|t| p.consumers.row(x as usize).contains(&(t as u32)))
            });
            let used: Vec<u32> = used.copied().collect();
            if used.is_empty() {
                return Err(wrong(format!(
                    "{name} does not take what {} makes",
                    f.again.node
                )));
            }
            for x in used {
                if let Some(line) = taken.insert((user, x), f.line.number) {
                    return Err(wrong(format!(
                        "{name} takes that already from the copy in line {line}"
                    )));
                }
            }
            users.push(user as u32);
        }
        users.sort_unstable();
        Ok(users)
    }
}
