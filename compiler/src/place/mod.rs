//! Placement: which logical device runs each cluster.
//!
//! Every algorithm of a small portfolio proposes a device per node, one simulator predicts what that costs, and the least makespan wins; among
//! equals that on fewer devices. Pins and requests hold for every candidate. Constants are not placed: each consumer's device has a copy.

pub mod algorithms;
pub mod check;
mod colocate;
mod conflict;
mod device;
mod kernels;
mod log;
mod pins;
mod print;
pub mod problem;
mod resolve;
pub mod setter;
pub mod simulate;
pub mod solver;
pub mod task_graph;

pub use device::{Device, DeviceSet};
pub use gristmill_runtime::device::DeviceSpec;
pub use kernels::{Kernels, lacks_kernels};
pub use pins::{Fallback, Pin, PinTarget, Request, apply_pins};

use crate::cost::{Bytes, CostModel, Nanos};
use crate::error::{Error, ErrorKind, Result};
use crate::ir::{Graph, NodeId};
use gristmill_runtime::device::{DeviceKind, DeviceName};
use problem::Problem;
use simulate::Timeline;
use std::collections::BTreeSet;
use std::fmt;

/// Why a node is where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A pin, a scope or the graph asked for it: who.
    Asked(String),
    /// What was asked could not be had, and the fallback allowed another device.
    Fallback(String),
    /// Another use of the same variable asked for a different device, and counts more: the line that says so.
    Overridden(String),
    /// No other device can run it.
    OnlyDevice,
    /// It must be with another node: through what, and which.
    Colocated(String),
    /// The winning algorithm chose it.
    Chosen,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Asked(who) => f.write_str(who),
            Reason::Fallback(wish) => write!(f, "fallback from {wish}"),
            Reason::Overridden(line) => f.write_str(line),
            Reason::OnlyDevice => f.write_str("only device"),
            Reason::Colocated(why) => write!(f, "colocated: {why}"),
            Reason::Chosen => f.write_str("least makespan"),
        }
    }
}

/// Where and when a node is predicted to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Index into [`Placement::devices`].
    pub device: usize,
    /// Predicted start.
    pub start: Nanos,
    /// Predicted end.
    pub end: Nanos,
    /// Why there.
    pub reason: Reason,
}

/// A member of the portfolio and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the algorithm.
    pub algorithm: String,
    /// Predicted time of a step.
    pub makespan: Nanos,
    /// Devices that it uses.
    pub n_devices: usize,
    /// False when a device would hold more than its limit.
    pub fits_memory: bool,
}

/// Devices of all nodes, with the prediction that chose them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The device set.
    pub devices: Vec<DeviceName>,
    /// By node; `None` for constants, which are wherever they are used.
    pub nodes: Vec<Option<Placed>>,
    /// Name of the winning algorithm.
    pub algorithm: String,
    /// Predicted time of a step.
    pub makespan: Nanos,
    /// Predicted most bytes on each device.
    pub peak_bytes: Vec<Bytes>,
    /// The portfolio.
    pub candidates: Vec<Candidate>,
    /// Requests that were let go.
    pub warnings: Vec<String>,
    /// Requests that were let go quietly, as [`Fallback::Allow`] wants it.
    pub log: Vec<String>,
}

impl Placement {
    /// Device index of a node; `None` for constants.
    pub fn device_of(&self, id: NodeId) -> Option<usize> {
        self.nodes[id.0 as usize].as_ref().map(|p| p.device)
    }

    /// A placement by hand, without prediction: nodes start in graph order.
    pub fn by_hand(devices: Vec<DeviceName>, node_devices: &[Option<usize>]) -> Placement {
        let placed = |(i, d): (usize, &Option<usize>)| {
            d.map(|device| Placed { device, start: Nanos(i as u64), end: Nanos(i as u64 + 1), reason: Reason::Chosen })
        };
        Placement {
            peak_bytes: vec![Bytes::ZERO; devices.len()],
            devices,
            nodes: node_devices.iter().enumerate().map(placed).collect(),
            algorithm: "by hand".into(),
            makespan: Nanos(node_devices.len() as u64),
            candidates: Vec::new(),
            warnings: Vec::new(),
            log: Vec::new(),
        }
    }
}

/// Places the nodes of a graph, usually of clusters.
///
/// Errors, all at once, when a pin finds nothing, a request names a device that is not in the set or that has no kernel for the node, nodes that
/// must be together cannot be, or memory limits cannot be kept.
pub fn place(g: &Graph, request: &Request, costs: &CostModel) -> Result<Placement> {
    let resolved = resolve::resolve(g, request)?;
    let allowed = &resolved.allowed;
    let problem = Problem::of(g, &resolved, &request.devices, costs);
    let (candidates, best) = run_portfolio(&problem, &request.devices);
    let Some((device, timeline, algorithm)) = best else {
        return Err(out_of_memory(&candidates, &problem, &request.devices));
    };
    let mut nodes: Vec<Option<Placed>> = vec![None; g.n_nodes()];
    for (t, task) in problem.tasks.iter().enumerate() {
        let (start, end) = timeline.tasks[t];
        let reason = allowed[task.node.0 as usize].as_ref().map_or(Reason::Chosen, |a| a.reason.clone());
        nodes[task.node.0 as usize] = Some(Placed { device: device[t], start, end, reason });
    }
    Ok(Placement {
        devices: request.devices.devices.iter().map(|d| d.name.clone()).collect(),
        nodes,
        algorithm,
        makespan: timeline.makespan,
        peak_bytes: timeline.peak_bytes,
        candidates: candidates.into_iter().map(|(c, _)| c).collect(),
        warnings: resolved.warnings,
        log: resolved.log,
    })
}

type Solution = (Vec<usize>, Timeline, String);

/// All algorithms, simulated; and the best one that keeps the memory limits.
fn run_portfolio(p: &Problem, set: &DeviceSet) -> (Vec<(Candidate, Vec<Bytes>)>, Option<Solution>) {
    let mut proposals: Vec<(String, Vec<usize>)> = Vec::new();
    for (d, device) in set.devices.iter().enumerate().filter(|(_, d)| d.kernels.lacks_all().is_none()) {
        proposals.push((format!("single {}", device.name), algorithms::single(p, d)));
    }
    if proposals.len() > 1 {
        proposals.push(("simple".into(), algorithms::simple(p, &preference(set))));
        proposals.push(("heft".into(), algorithms::heft(p)));
    }
    if p.memory.iter().any(Option::is_some) {
        proposals.extend([100, 90, 75, 50].map(|percent| (format!("fill {percent}%"), algorithms::fill(p, percent))));
    }
    let order = p.by_rank();
    let mut candidates = Vec::new();
    let mut best: Option<((Nanos, usize), Solution)> = None;
    for (algorithm, device) in proposals {
        let timeline = simulate::simulate(p, &device, &order);
        let n_devices = device.iter().collect::<BTreeSet<_>>().len();
        let fits_memory =
            p.memory.iter().zip(&timeline.peak_bytes).all(|(limit, peak)| limit.is_none_or(|l| *peak <= l));
        let key = (timeline.makespan, n_devices);
        let candidate = Candidate { algorithm: algorithm.clone(), makespan: timeline.makespan, n_devices, fits_memory };
        candidates.push((candidate, timeline.peak_bytes.clone()));
        if fits_memory && best.as_ref().is_none_or(|(k, _)| key < *k) {
            best = Some((key, (device, timeline, algorithm)));
        }
    }
    (candidates, best.map(|(_, solution)| solution))
}

/// Devices as TensorFlow sorts them: GPUs before CPUs, then by name.
fn preference(set: &DeviceSet) -> Vec<usize> {
    let mut order: Vec<usize> = (0..set.devices.len()).collect();
    let rank = |kind: DeviceKind| match kind {
        DeviceKind::Gpu => 0,
        DeviceKind::Emu => 1,
        DeviceKind::Cpu => 2,
    };
    order.sort_by_key(|&d| (rank(set.devices[d].name.kind), set.devices[d].name.clone()));
    order
}

fn out_of_memory(candidates: &[(Candidate, Vec<Bytes>)], p: &Problem, set: &DeviceSet) -> Error {
    let excess = |peaks: &[Bytes]| -> Bytes {
        p.memory.iter().zip(peaks).map(|(limit, peak)| limit.map_or(Bytes::ZERO, |l| peak.saturating_sub(l))).sum()
    };
    let Some((least, peaks)) = candidates.iter().min_by_key(|(_, peaks)| excess(peaks)) else {
        return Error::unsupported("no device of the set has a code generator");
    };
    let over = set.devices.iter().zip(peaks).filter(|(d, peak)| d.memory_limit.is_some_and(|l| **peak > l));
    let lines: Vec<String> = over
        .map(|(d, peak)| format!("{} needs {peak} of {}", d.name, d.memory_limit.unwrap_or(Bytes::INFINITY)))
        .collect();
    Error::new(
        ErrorKind::OutOfMemory,
        format!(
            "no placement found that keeps the memory limits; nearest is {}: {}",
            least.algorithm,
            lines.join(", ")
        ),
    )
    .hint("more devices, or a higher --mem")
}

#[cfg(test)]
mod tests;
