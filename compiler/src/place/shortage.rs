//! The error when no placement keeps the memory limits: the device that is short, and the cheapest
//! remedy.

use gristmill_solver::memory::repair;

use crate::cost::{Bytes, Nanos};
use crate::error::{Error, ErrorKind};
use gristmill_solver::memory::repair::Unfit;
use gristmill_solver::search::exact;
use gristmill_solver::search::portfolio::{self, Algorithm, Options};
use gristmill_solver::{Problem, Timeline};

/// Names of tasks, groups and devices for the message.
pub struct Names<'a> {
    /// A task.
    pub task: &'a dyn Fn(usize) -> String,
    /// The group of a task, if it has one.
    pub group: &'a dyn Fn(usize) -> Option<String>,
    /// All devices.
    pub devices: Vec<String>,
    /// The option that sets the limit of a device to so many bytes.
    pub limit: &'a dyn Fn(usize, Bytes) -> String,
    /// The largest tensors, where tasks have them.
    pub tensors: Vec<String>,
    /// Other remedies.
    pub other_ways: &'a str,
}

/// New limits of some devices.
type Raises = Vec<(usize, Bytes)>;

/// Problems of more tasks are not placed again to find a cheaper way out.
const SMALL: usize = 3_000;
/// Devices whose limit is tried alone.
const MOST_TRIES: usize = 8;

/// The error of a problem none of whose placements found keeps the limits; the nearest one needs
/// `peaks`.
pub fn error(p: &Problem, peaks: &[Bytes], names: &Names) -> Error {
    let nearest = over(p, peaks);
    let lines: Vec<String> = nearest
        .iter()
        .map(|&(d, peak)| format!("{} needs {peak} of {}", names.devices[d], limit(p, d)))
        .collect();
    let unfit = repair::unfit(p);
    let why = match &unfit {
        Some(why) => proof(p, why, names),
        None if none_fits(p) => "a search of all schedules shows that none does".to_owned(),
        None => "that none does is not proven".to_owned(),
    };
    let tensors = match names.tensors.is_empty() {
        true => String::new(),
        false => format!("; largest tensors: {}", names.tensors.join(", ")),
    };
    let message = format!(
        "no placement found that keeps the memory limits; nearest: {}; {why}{tensors}",
        lines.join(", ")
    );
    // A task that is too large alone fits on no device like these.
    let or = match unfit {
        Some(Unfit::Task { .. }) => "",
        _ => ", or one more device",
    };
    let hint = format!(
        "{}{or}{}",
        cheapest_raise(p, nearest, names),
        names.other_ways
    );
    Error::new(ErrorKind::OutOfMemory, message).hint(hint)
}

fn limit(p: &Problem, device: usize) -> Bytes {
    p.devices[device].memory.unwrap_or(Bytes::INFINITY)
}

/// The limits to raise, with the least memory that is known to be enough.
fn cheapest_raise(p: &Problem, nearest: Raises, names: &Names) -> String {
    let cost = |raises: &Raises| -> Bytes {
        let more = raises
            .iter()
            .map(|&(d, new)| new.saturating_sub(limit(p, d)));
        more.sum()
    };
    let ways = std::iter::once(nearest).chain(alone(p));
    let cheapest = ways
        .min_by_key(|way| (cost(way), way.len()))
        .unwrap_or_default();
    let raised: Vec<String> = cheapest
        .iter()
        .map(|&(d, new)| (names.limit)(d, new))
        .collect();
    format!("{} ({} more)", raised.join(" and "), cost(&cheapest))
}

/// Devices whose peaks are over their limits.
fn over(p: &Problem, peaks: &[Bytes]) -> Raises {
    let is_over = |(d, peak): &(usize, Bytes)| p.devices[*d].memory.is_some_and(|m| *peak > m);
    peaks.iter().copied().enumerate().filter(is_over).collect()
}

/// Memory that one device needs if only its limit is raised.
fn alone(p: &Problem) -> Vec<Raises> {
    let limited: Vec<usize> = (0..p.n_devices())
        .filter(|&d| p.devices[d].memory.is_some())
        .collect();
    if p.n_tasks() > SMALL || limited.len() < 2 {
        return Vec::new();
    }
    let enough = |d: usize| {
        let mut free = p.clone();
        free.devices[d].memory = None;
        let timeline = quick(&free)?;
        let peak = timeline.peak_bytes(p)[d];
        let is_way = repair::excess(&free, &timeline) == Bytes::ZERO
            && p.devices[d].memory.is_some_and(|m| peak > m);
        is_way.then(|| vec![(d, peak)])
    };
    limited
        .into_iter()
        .take(MOST_TRIES)
        .filter_map(enough)
        .collect()
}

fn quick(p: &Problem) -> Option<Timeline> {
    let refine_tasks = 50 * p.n_tasks() as u64;
    let options = Options {
        refine_tasks,
        bound_nodes: 0,
        search_nodes: 0,
        ..Options::new(p)
    };
    portfolio::solve(p, &options, &Algorithm::name).map(|s| s.timeline)
}

/// True if a search of the usual length shows that no schedule keeps the limits.
fn none_fits(p: &Problem) -> bool {
    let budget = Options::new(p).search_nodes;
    quick(p).is_some_and(|t| {
        !exact::solve(p, &t, Nanos::ZERO, budget)
            .lower_bound
            .is_finite()
    })
}

fn proof(p: &Problem, why: &Unfit, names: &Names) -> String {
    let name = |task: u32| (names.task)(task as usize);
    match *why {
        Unfit::Task { task, needs, most } => {
            let t = task as usize;
            let largest = p
                .feasible(t)
                .max_by_key(|&d| (p.devices[d].memory, std::cmp::Reverse(d)));
            let device = largest.map_or("", |d| &names.devices[d]);
            let group = p.members.row(p.group_of[t] as usize);
            let resident: Bytes = group.iter().map(|&t| p.resident[t as usize]).sum();
            let held = match (names.group)(t) {
                Some(group) => {
                    format!(", {resident} of it what group {group} holds for the whole step")
                }
                None if resident > Bytes::ZERO => format!(", {resident} of it for the whole step"),
                None => String::new(),
            };
            let over = needs.saturating_sub(most);
            format!(
                "{} alone needs {needs} while it runs{held}: {over} more than {device} has, the largest device that it can be on",
                name(task)
            )
        }
        Unfit::Together { task, needs, most } => {
            let over = needs.saturating_sub(most);
            format!(
                "while {} runs, {needs} are live on all devices together: {over} more than the {most} that they have",
                name(task)
            )
        }
    }
}
