//! Placement: which logical device runs each cluster.
//!
//! [`model`] makes a bare problem of a graph of clusters, [`gristmill_solver`] solves it: every
//! algorithm of a portfolio proposes, one simulator predicts the cost of each proposal, the best is
//! refined, and a lower bound limits its distance from the optimum. Pins and requests hold for every
//! candidate. Constants are not placed: each consumer's device has a copy. [`task_graph`] reads
//! bare problems from files.

#[doc(hidden)]
pub mod check;
pub mod collectives;
mod colocate;
mod conflict;
mod copied_nodes;
mod device;
#[doc(hidden)]
pub mod emulated;
#[doc(hidden)]
pub mod explain;
#[doc(hidden)]
pub mod gpus;
pub(crate) mod groups;
mod kernels;
mod log;
mod model;
mod objective;
mod operand_devices;
mod pins;
mod placement_cache;
#[doc(hidden)]
pub mod plan;
mod print;
mod replace;
mod resolve;
mod rivals;
mod search;
pub mod setter;
mod shortage;
mod solved;
mod sources;
pub mod target;
pub mod task_graph;

pub use copied_nodes::{CopiedNode, User};
pub use device::{Device, DeviceSet, RateSource};
pub use gristmill_runtime::device::DeviceSpec;
pub use gristmill_solver::search::portfolio::Candidate;
pub use kernels::Kernels;
pub use objective::{Objective, Stream};
pub use operand_devices::follow_operands;
pub use pins::{Fallback, Pin, PinTarget, Request, apply_pins};
pub use plan::Plan;
pub use replace::{Horizon, LEAST_GAIN_PERCENT, Replacement, replace};
pub use rivals::{Joining, Rival};
pub use solved::Solved;
pub use sources::TimeSources;
pub use target::Target;

use crate::cost::{Bytes, CostModel, Nanos};
use crate::error::Result;
use crate::ir::{Graph, NodeId, Op};
use gristmill_runtime::device::DeviceName;
use search::{Choice, Search};
use std::fmt;
use std::sync::Arc;

/// Reason for the device of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A pin, a scope or the graph requested it: the author.
    Asked(String),
    /// The request could not be met, and the fallback allowed another device.
    Fallback(String),
    /// Another use of the same variable requested a different device and takes precedence: its log
    /// line.
    Overridden(String),
    /// No other device can run it.
    OnlyDevice,
    /// It must be on the device of another node: the kind of tie, and the node.
    Colocated(String),
    /// The winning algorithm chose it.
    Chosen,
    /// The winning algorithm chose it for this objective, which is not latency.
    ChosenFor(Objective),
    /// An earlier process decided so by measured times.
    Kept,
    /// It is rematerialised or offloaded: the saving.
    Copy(String),
}

impl Reason {
    /// True if only the placer narrowed the devices.
    fn is_choice(&self) -> bool {
        matches!(
            self,
            Reason::Chosen | Reason::ChosenFor(_) | Reason::Kept | Reason::OnlyDevice
        )
    }
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
            Reason::ChosenFor(Objective::Memory) => f.write_str("least highest peak of memory"),
            Reason::ChosenFor(_) => f.write_str("least time of all runs"),
            Reason::Kept => f.write_str("kept since it was decided by measured times"),
            Reason::Copy(why) => f.write_str(why),
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

/// Devices of all nodes, with the prediction behind the choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The device set.
    pub devices: Vec<DeviceName>,
    /// By node; `None` for constants, which every consumer's device holds.
    pub nodes: Vec<Option<Placed>>,
    /// The placed kernels.
    pub joining: Joining,
    /// The placements of all tried sets of kernels, this one included, if there were several.
    pub rivals: Vec<Rival>,
    /// Rematerialised and offloaded nodes, beside these.
    pub copies: Vec<CopiedNode>,
    /// Name of the winning algorithm.
    pub algorithm: String,
    /// Predicted time of a step.
    pub makespan: Nanos,
    /// Lower bound of the predicted time over all placements of the tried kernels, with the name of
    /// the bound.
    pub lower_bound: (Nanos, String),
    /// Period and depth of the stream, for [`Objective::Throughput`].
    pub stream: Option<Stream>,
    /// Predicted memory peak of each device.
    pub peak_bytes: Vec<Bytes>,
    /// The portfolio.
    pub candidates: Vec<Candidate>,
    /// Requests that could not be met.
    pub warnings: Vec<String>,
    /// Requests that could not be met, without a warning, under [`Fallback::Allow`].
    pub log: Vec<String>,
    /// Origins of the predicted times.
    pub sources: TimeSources,
    /// The problem and its solution, for explanations; none of a placement by hand.
    pub solved: Option<Arc<Solved>>,
}

impl Placement {
    /// Device index of a node; `None` for constants.
    pub fn device_of(&self, id: NodeId) -> Option<usize> {
        self.nodes[id.0 as usize].as_ref().map(|p| p.device)
    }

    /// A placement by hand, without prediction: nodes start in graph order.
    pub fn by_hand(devices: Vec<DeviceName>, node_devices: &[Option<usize>]) -> Placement {
        let placed = |(i, d): (usize, &Option<usize>)| {
            d.map(|device| Placed {
                device,
                start: Nanos(i as u64),
                end: Nanos(i as u64 + 1),
                reason: Reason::Chosen,
            })
        };
        Placement {
            peak_bytes: vec![Bytes::ZERO; devices.len()],
            devices,
            nodes: node_devices.iter().enumerate().map(placed).collect(),
            joining: Joining::default(),
            rivals: Vec::new(),
            copies: Vec::new(),
            algorithm: "by hand".into(),
            makespan: Nanos(node_devices.len() as u64),
            lower_bound: (Nanos::ZERO, "none".into()),
            candidates: Vec::new(),
            stream: None,
            warnings: Vec::new(),
            log: Vec::new(),
            sources: TimeSources::default(),
            solved: None,
        }
    }
}

/// Places the nodes of a graph, usually of clusters.
///
/// Reports all errors at once: a pin without a matching node, a request for an unknown device or for
/// one without a kernel for the node, contradicting colocations, memory limits too small, or a plan
/// for another graph.
pub fn place(g: &Graph, request: &Request, costs: &CostModel) -> Result<Placement> {
    let resolved = resolve::resolve(g, request)?;
    let search = Search::new(g, request, resolved, costs)?;
    let planned = request.plan.as_ref().map(|plan| search.planned(plan));
    let planned = planned.transpose()?;
    let mut warnings = search.resolved.warnings.clone();
    let cached = search.cached().unwrap_or_else(|warning| {
        warnings.push(warning);
        None
    });
    let (settled, choice) = match (cached, planned) {
        (Some(settled), _) => (settled, Choice::Cached),
        (None, Some(planned)) => (search.solve(Some(&planned))?, Choice::Planned(planned)),
        (None, None) => (search.solve(None)?, Choice::Searched),
    };
    let placement = search.placement(settled, &choice, warnings)?;
    Ok(placement.with_sources(g, &request.devices, costs))
}

/// Names of the nodes of a graph in plans.
pub(crate) fn names(g: &Graph) -> Vec<String> {
    let nodes = g
        .nodes()
        .filter(|(_, n)| !matches!(n.op, Op::Constant { .. }));
    let ids: Vec<NodeId> = nodes.map(|(id, _)| id).collect();
    solved::names(g, &ids)
}

#[cfg(test)]
mod tests;
