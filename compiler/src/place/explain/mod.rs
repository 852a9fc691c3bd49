//! Explanation of a placement: reasons and alternatives of each node, the load of devices and
//! links, memory, the critical chain, and other machines for comparison.
//!
//! One implementation for models and bare task graphs: a [`Subject`] is a solved problem with
//! names. [`explain`] analyses it, [`text`] and serde write the result; [`trace`] and [`html`] show
//! the timeline.

mod candidates;
mod chain;
pub mod html;
mod load;
mod stream;
mod text;
pub mod trace;
mod whatif;

pub use candidates::{Alternative, NodeReason};
pub use chain::ChainStep;
pub use load::{DeviceUse, LinkUse, Live};
pub use stream::{Stage, StreamUse};
pub use whatif::{Scaling, WhatIf};

use super::{Objective, Stream, TimeSources};
use gristmill_solver::Problem;
use gristmill_solver::memory::remat::{Copy, Freedom};
use gristmill_solver::schedule::critical_chain::critical_chain;
use gristmill_solver::search::portfolio::{Options, Solution};
use serde::Serialize;
use std::collections::BTreeMap;

/// A solved problem with names.
pub struct Subject<'a> {
    /// Name of the graph.
    pub name: &'a str,
    /// The problem, with copies if there are any.
    pub problem: &'a Problem,
    /// The problem without copies: questions of other machines are about it.
    pub base: &'a Problem,
    /// Rematerialisation and offloading that were allowed; none for a bare problem.
    pub freedom: &'a Freedom,
    /// The copies, which are the last tasks of the problem.
    pub copies: &'a [Copy],
    /// The objective it was solved for.
    pub objective: Objective,
    /// Period and depth of the stream, if it was solved for one.
    pub stream: Option<Stream>,
    /// Its solution, which keeps the memory limits.
    pub solution: &'a Solution,
    /// Names of the devices.
    pub devices: Vec<String>,
    /// Names of the tasks.
    pub tasks: Vec<Label>,
    /// Origins of the predicted times; none of a bare problem, whose file has them.
    pub sources: Option<TimeSources>,
    /// Requests that were released.
    pub downgrades: Vec<String>,
    /// Options of the solution, with which other machines are solved too.
    pub options: Options,
}

/// Name and operation of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// A name that no other task has.
    pub name: String,
    /// Its op, for people.
    pub op: String,
    /// Merged nodes of the model, if there are several.
    pub merged: Vec<String>,
    /// The request or rule that narrowed its devices, if any.
    pub reason: Option<String>,
    /// True for a rematerialised node and for one that keeps an offloaded value.
    pub is_copy: bool,
}

/// All that there is to say about a placement. Times in nanoseconds, sizes in bytes, shares in
/// percent of the makespan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Period and depth of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamUse>,
    /// Every node, by start.
    pub nodes: Vec<NodeReason>,
    /// Requests that were released.
    pub downgrades: Vec<String>,
    /// Every device.
    pub devices: Vec<DeviceUse>,
    /// Every link that is used.
    pub links: Vec<LinkUse>,
    /// The chain that determines the makespan, first step first.
    pub critical_chain: Vec<ChainStep>,
    /// The makespan on other machines; like alternatives of nodes, of placements for latency only.
    pub what_if: Vec<WhatIf>,
    /// The makespan on parts of the machine.
    pub scaling: Option<Scaling>,
}

/// Explains a placement.
pub fn explain(s: &Subject) -> Explanation {
    let chain = critical_chain(s.problem, &s.solution.timeline);
    let is_for_latency = s.objective == Objective::Latency;
    Explanation {
        stream: s.stream.as_ref().map(|stream| stream::stream(s, stream)),
        nodes: candidates::reasons(s),
        downgrades: s.downgrades.clone(),
        devices: load::devices(s),
        links: load::links(s),
        critical_chain: chain::describe(s, &chain),
        what_if: if is_for_latency {
            whatif::what_if(s)
        } else {
            Vec::new()
        },
        scaling: if is_for_latency {
            whatif::scaling(s)
        } else {
            None
        },
    }
}

impl Subject<'_> {
    /// Name of the device of a task.
    fn device_of(&self, task: usize) -> &str {
        &self.devices[self.solution.timeline.device[task] as usize]
    }

    /// Name of the task that makes a tensor.
    fn maker(&self, tensor: u32) -> &str {
        &self.tasks[self.problem.tensors[tensor as usize].producer as usize].name
    }

    /// Percent of the makespan.
    fn share(&self, ns: u64) -> f64 {
        percent(ns, self.solution.timeline.makespan.0)
    }
}

/// Percent with one digit; of nothing, nothing.
fn percent(part: u64, whole: u64) -> f64 {
    (1000.0 * part as f64 / whole.max(1) as f64).round() / 10.0
}

/// The names, those that come again with a number behind: `a`, `a#2`.
pub fn unique_names(names: impl IntoIterator<Item = String>) -> Vec<String> {
    // By name: the number to try for its next use.
    let mut next: BTreeMap<String, u64> = BTreeMap::new();
    let mut unique = |name: String| {
        let Some(&first) = next.get(&name) else {
            next.insert(name.clone(), 2);
            return name;
        };
        let is_free = |i: &u64| !next.contains_key(&format!("{name}#{i}"));
        let number = (first..).find(is_free).unwrap_or(first);
        let free = format!("{name}#{number}");
        next.insert(name, number + 1);
        next.insert(free.clone(), 2);
        free
    };
    names.into_iter().map(&mut unique).collect()
}

#[cfg(test)]
mod tests;
