//! Other machines for comparison: the same graph on a machine with a device less, other links, no
//! memory limits, or on some of the devices only.

use super::Subject;
use crate::cost::{Bytes, LinkProfile, Nanos};
use crate::place::copied_nodes;
use gristmill_solver::search::portfolio::{self, Algorithm, Options};
use gristmill_solver::{Payload, Problem, Timeline};
use serde::Serialize;

/// Parts of the work of the answer itself that each question may take.
const EFFORT: u64 = 8;
/// Gain, in percent, under which more devices are said not to help.
const GAIN: f64 = 1.0;

/// A question and its answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// `without /gpu:1`.
    pub what: String,
    /// Predicted makespan; none where nothing can be placed so.
    pub makespan_ns: Option<u64>,
    /// Change of the makespan, in percent.
    pub change_percent: Option<f64>,
    /// Why there is none.
    pub why_not: Option<String>,
}

/// Predicted makespans on the first devices of an order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scaling {
    /// Devices: those that something cannot do without, then the busiest first.
    pub devices: Vec<String>,
    /// Number of devices, predicted makespan.
    pub makespan_ns: Vec<(usize, u64)>,
    /// Least number of these after which more gain under 1 %.
    pub enough: usize,
}

/// All questions.
pub(super) fn what_if(s: &Subject) -> Vec<WhatIf> {
    let p = s.base;
    let mut answers: Vec<WhatIf> = Vec::new();
    if p.n_devices() > 1 {
        let mut known: Vec<(usize, WhatIf)> = Vec::new();
        for d in 0..p.n_devices() {
            let what = format!("without {}", s.devices[d]);
            let alike = known
                .iter()
                .find(|(e, _)| are_alike(p, *e, d))
                .map(|(_, answer)| answer.clone());
            let answer = alike.unwrap_or_else(|| without(s, d));
            known.push((d, answer.clone()));
            answers.push(WhatIf { what, ..answer });
        }
        for (what, numerator, denominator) in
            [("links twice as fast", 2, 1), ("links half as fast", 1, 2)]
        {
            let other = with_links(p, numerator, denominator);
            answers.push(answer(s, what, best(s, &other)));
        }
    }
    if p.is_limited() {
        let mut other = p.clone();
        other.devices.iter_mut().for_each(|d| d.memory = None);
        answers.push(answer(s, "without memory limits", best(s, &other)));
    }
    answers
}

/// Makespan by number of devices.
pub(super) fn scaling(s: &Subject) -> Option<Scaling> {
    let (n, makespan) = (s.base.n_devices(), s.solution.timeline.makespan);
    if n < 2 || s.base.n_tasks() == 0 {
        return None;
    }
    let order = by_load(s);
    let mut rows: Vec<(usize, u64)> = Vec::new();
    for k in counts(n) {
        let time = if k == n {
            Some(makespan.0)
        } else {
            on_some(s, &order[..k])
        };
        // Fewer devices are a subset of more, so an answer for them holds here too.
        let before = rows.last().map_or(u64::MAX, |r| r.1);
        rows.extend(time.map(|ns| (k, ns.min(before))));
    }
    let least = rows.last()?.1;
    let helps = |ns: u64| 100.0 * (ns - least.min(ns)) as f64 > GAIN * ns as f64;
    let enough = rows.iter().find(|r| !helps(r.1)).map_or(n, |r| r.0);
    let devices = order.iter().map(|&d| s.devices[d].clone()).collect();
    Some(Scaling {
        devices,
        makespan_ns: rows,
        enough,
    })
}

/// Devices that some task cannot do without, then the others, each by falling load.
fn by_load(s: &Subject) -> Vec<usize> {
    let (p, t) = (s.base, &s.solution.timeline);
    let mut busy = vec![Nanos::ZERO; p.n_devices()];
    let mut needed = vec![false; p.n_devices()];
    for task in 0..p.n_tasks() {
        let device = t.device[task] as usize;
        busy[device] += p.cost(task, device);
        if p.feasible(task).nth(1).is_none() {
            needed[p.first_device(task)] = true;
        }
    }
    let mut order: Vec<usize> = (0..p.n_devices()).collect();
    order.sort_by_key(|&d| (!needed[d], std::cmp::Reverse(busy[d]), d));
    order
}

/// All counts up to 8, then doubled ones, and the last.
fn counts(n: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(16), |k| Some(k * 2)).take_while(|&k| k < n);
    let mut counts: Vec<usize> = (1..=n.min(8)).chain(doubled).collect();
    if counts.last() != Some(&n) {
        counts.push(n);
    }
    counts
}

fn on_some(s: &Subject, devices: &[usize]) -> Option<u64> {
    let part = s.base.only(devices).ok()?;
    best_on(s, &part, devices, None).map(|m| m.0)
}

fn without(s: &Subject, device: usize) -> WhatIf {
    let t = &s.solution.timeline;
    if !t.device.contains(&(device as u32)) {
        return answer(s, "", Some(t.makespan));
    }
    let others: Vec<usize> = (0..s.base.n_devices()).filter(|&d| d != device).collect();
    match s.base.only(&others) {
        Ok(part) => answer(s, "", best_on(s, &part, &others, None)),
        Err(task) => WhatIf {
            why_not: Some(format!("{} can run nowhere else", s.tasks[task].name)),
            ..answer(s, "", None)
        },
    }
}

fn answer(s: &Subject, what: &str, makespan: Option<Nanos>) -> WhatIf {
    let now = s.solution.timeline.makespan.0;
    let change = |m: Nanos| (1000.0 * (m.0 as f64 - now as f64) / now.max(1) as f64).round() / 10.0;
    WhatIf {
        what: what.to_owned(),
        makespan_ns: makespan.map(|m| m.0),
        change_percent: makespan.map(change),
        why_not: makespan
            .is_none()
            .then(|| "no placement found that keeps the memory limits".to_owned()),
    }
}

/// Rates times, and latencies divided by, `numerator / denominator`.
fn with_links(p: &Problem, numerator: u64, denominator: u64) -> Problem {
    let slower = |ns: Nanos| Nanos(ns.times(denominator).0 / numerator);
    let mut other = p.clone();
    other.links = p.links.map(|l| LinkProfile {
        latency: slower(l.latency),
        bytes_per_second: (l.bytes_per_second.saturating_mul(numerator) / denominator).max(1),
    });
    for tensor in &mut other.tensors {
        if let Payload::HostCopy(time) = tensor.payload {
            tensor.payload = Payload::HostCopy(slower(time));
        }
    }
    other
}

/// The best makespan found on some devices with an eighth of the work, no worse than that of
/// `previous`.
fn best_on(
    s: &Subject,
    part: &Problem,
    devices: &[usize],
    previous: Option<Timeline>,
) -> Option<Nanos> {
    let place = |d: &usize| devices.iter().position(|e| e == d);
    let options = Options {
        refine_tasks: s.options.refine_tasks / EFFORT,
        search_nodes: s.options.search_nodes / EFFORT,
        bound_nodes: 0,
        preference: s.options.preference.iter().filter_map(place).collect(),
        previous,
        ..s.options.clone()
    };
    let solution = portfolio::solve(part, &options, &Algorithm::name)?;
    let found = copied_nodes::settle(part, solution, &s.freedom.only(devices)).solution;
    (found.score.0 == Bytes::ZERO).then_some(found.timeline.makespan)
}

/// The same on all devices of another machine, no worse than the placement as it is.
fn best(s: &Subject, p: &Problem) -> Option<Nanos> {
    let all: Vec<usize> = (0..p.n_devices()).collect();
    best_on(s, p, &all, Some(s.solution.timeline.clone()))
}

/// True if exchanging two devices changes nothing.
fn are_alike(p: &Problem, a: usize, b: usize) -> bool {
    let others = (0..p.n_devices()).filter(|&d| d != a && d != b);
    p.devices[a] == p.devices[b]
        && (0..p.n_tasks()).all(|t| p.cost(t, a) == p.cost(t, b))
        && p.links.get(a, b) == p.links.get(b, a)
        && others.into_iter().all(|d| {
            p.links.get(a, d) == p.links.get(b, d) && p.links.get(d, a) == p.links.get(d, b)
        })
}
