//! Lines of plans that are copies: nodes that run again, and results that are offloaded.

use super::{Line, Names, Plan, name, quoted};
use crate::error::{Error, Result};
use crate::nearest::nearest;
use gristmill_solver::Problem;
use gristmill_solver::memory::remat::Copy;
use std::collections::BTreeMap;

/// The line of a copy behind name and device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CopyLine {
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

impl CopyLine {
    /// `runs NODE for USER, ...`, `parks NODE for USER, ...`, `parks result N of NODE for USER,
    /// ...`; `None` of an empty text.
    pub fn parse(text: &str) -> Result<Option<CopyLine>, String> {
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
                    return Ok(Some(CopyLine {
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
    again: &'a CopyLine,
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
            .filter_map(|line| Some((line, line.copy.as_ref()?)));
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

    fn copy<'l>(&self, line: &'l Line, again: &'l CopyLine) -> Result<Found<'l>> {
        let (plan, names) = (self.plan, self.names);
        if self.index.contains_key(line.node.as_str()) {
            let node = &line.node;
            let why = format!("{node:?} is the name of a node; a copy needs one of its own");
            return Err(plan.wrong(line.number, why));
        }
        let task = plan.task(line, &again.node, names, self.index)?;
        let device = plan.device(line, names)?;
        let parked = match again.parked {
            None => self.expect_rerun(&again.node, task, device).map(|()| None),
            Some(number) => self
                .expect_parking(&again.node, task, device)
                .and_then(|()| self.parked_result(&again.node, task, number))
                .map(Some),
        };
        Ok(Found {
            line,
            again,
            task,
            parked: parked.map_err(|why| plan.wrong(line.number, why))?,
            device: device as u32,
        })
    }

    /// The reason why a task does not run again on a device, as an error.
    fn expect_rerun(&self, node: &str, task: usize, device: usize) -> Result<(), String> {
        let Names {
            devices, freedom, ..
        } = self.names;
        if !freedom.may_copy.get(task).copied().unwrap_or(false) {
            let why =
                "only nodes do whose effect is their results alone, and of which nothing is asked";
            return Err(format!("{node} does not run again: {why}"));
        }
        if self.problem.cost(task, device).is_finite() {
            return Ok(());
        }
        let open = self.problem.feasible(task).map(|d| devices[d].as_str());
        let (at, open) = (&devices[device], open.collect::<Vec<_>>().join(", "));
        Err(format!("{node} cannot be on {at}; it can be on {open}"))
    }

    /// The reason why results of a task are not parked on a device, as an error.
    fn expect_parking(&self, node: &str, task: usize, device: usize) -> Result<(), String> {
        let Names {
            devices, freedom, ..
        } = self.names;
        let own = self.home[task] as usize;
        if freedom.parking(device).is_some() && freedom.parking(own).is_none() {
            return Ok(());
        }
        let why = "tensors of devices with memory of their own are parked on CPUs";
        let (own, at) = (&devices[own], &devices[device]);
        Err(format!(
            "{node} is on {own} and is not parked on {at}: {why}"
        ))
    }

    /// The tensor that is parked: the result of that number, which only a single one goes without.
    fn parked_result(&self, node: &str, task: usize, number: Parked) -> Result<u32, String> {
        let made = self.problem.outputs.row(task);
        let n = made.len();
        match number {
            None if n == 1 => Ok(made[0]),
            Some(i) if i < n => Ok(made[i]),
            None => Err(format!(
                "{node} has {n} results that are used; expected `parks result N of {node}`"
            )),
            Some(i) => Err(format!("{node} has no result {i} that is used; it has {n}")),
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
        let p = self.problem;
        let wrong = |why: String| self.plan.wrong(f.line.number, why);
        let results: Vec<u32> = match f.parked {
            None => p.outputs.row(f.task).to_vec(),
            Some(x) => vec![x],
        };
        let mut users = Vec::new();
        for name in &f.again.users {
            let (user, task) = match place.get(name.as_str()) {
                Some(&i) => {
                    let task = Some(found[i].task).filter(|_| found[i].parked.is_none());
                    (p.n_tasks() + i, task)
                }
                None => {
                    let task = self.index.get(name.as_str()).copied();
                    let task = task.ok_or_else(|| self.no_user(f.line, name, place))?;
                    (task, Some(task))
                }
            };
            let uses = |x: &u32, t: usize| p.consumers.row(*x as usize).contains(&(t as u32));
            let used = results.iter().filter(|x| task.is_some_and(|t| uses(x, t)));
            let used: Vec<u32> = used.copied().collect();
            if used.is_empty() {
                let maker = &f.again.node;
                return Err(wrong(format!("{name} does not take what {maker} makes")));
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

    /// The error of a user that is neither a task nor a copy.
    fn no_user(&self, line: &Line, name: &str, place: &BTreeMap<&str, usize>) -> Error {
        let tasks = self.names.tasks.iter().map(String::as_str);
        let near = nearest(name, tasks.chain(place.keys().copied()), 3);
        let why = format!("there is no node or copy {name:?}");
        let error = self.plan.wrong(line.number, why);
        if near.is_empty() {
            error
        } else {
            error.hint(near.join(", "))
        }
    }
}
