//! What a placement of a model came from: the problem, its solution, and the names of nodes in plans and explanations.

use super::explain::{Label, Subject, unique_names};
use super::plan::{self, Names, Planned};
use super::resolve::Resolved;
use super::solver::portfolio::{Options, Solution};
use super::solver::{Problem, Timeline, Transfer};
use super::{DeviceSet, Placement, Reason, Request};
use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId};
use gristmill_runtime::device::{DeviceName, DeviceSpec};

/// A solved problem of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solved {
    /// The problem, without the plan if there was one.
    pub problem: Problem,
    /// Its solution.
    pub solution: Solution,
    /// How it was solved.
    pub options: Options,
    /// Node of each task.
    pub nodes: Vec<NodeId>,
    /// Name of each task: the path of the node, or op and number; what comes again has a number behind.
    pub names: Vec<String>,
}

/// Names of tasks, each once.
pub(super) fn names(g: &Graph, nodes: &[NodeId]) -> Vec<String> {
    let name = |&id: &NodeId| match g.node(id).origin.as_str() {
        "" => format!("{}#{}", g.node(id).op.name(), id.0),
        path => path.to_owned(),
    };
    unique_names(nodes.iter().map(name))
}

/// What the plan of a request says, if it has one.
pub(super) fn planned(
    problem: &Problem,
    nodes: &[NodeId],
    tasks: &[String],
    resolved: &Resolved,
    request: &Request,
) -> Result<Option<Planned>> {
    let Some(plan) = &request.plan else { return Ok(None) };
    let set = &request.devices;
    let devices: Vec<String> = set.devices.iter().map(|d| d.name.to_string()).collect();
    let find = |text: &str| match set.matching(&DeviceSpec::parse(text).ok()?)[..] {
        [device] => Some(device),
        _ => None,
    };
    let reason = |task: usize| match &resolved.allowed[nodes[task].0 as usize] {
        Some(allowed) if allowed.reason != Reason::Chosen => allowed.reason.to_string(),
        _ => "no kernel".to_owned(),
    };
    plan.resolve(problem, &Names { tasks, devices: &devices, find: &find, reason: &reason }).map(Some)
}

impl Placement {
    /// Where and when these nodes ran, on the devices of a set; nothing where a device is gone, or a node was not placed.
    pub(super) fn timeline_on(&self, nodes: &[NodeId], set: &DeviceSet) -> Option<Timeline> {
        let place = |name: &DeviceName| set.devices.iter().position(|d| d.name == *name).map(|d| d as u32);
        let index: Vec<Option<u32>> = self.devices.iter().map(place).collect();
        let mut timeline = Timeline { makespan: self.makespan, ..Timeline::default() };
        for id in nodes {
            let placed = self.nodes.get(id.0 as usize)?.as_ref()?;
            timeline.device.push(index[placed.device]?);
            timeline.start.push(placed.start);
            timeline.end.push(placed.end);
        }
        // Tensors have the same numbers in all problems of one graph.
        if let Some(solved) = self.solved.as_deref().filter(|s| s.nodes == nodes) {
            let moved =
                |t: &Transfer| Some(Transfer { from: index[t.from as usize]?, to: index[t.to as usize]?, ..*t });
            timeline.transfers = solved.solution.timeline.transfers.iter().filter_map(moved).collect();
        }
        Some(timeline)
    }

    /// What explanations are about; `g` is the graph that was placed.
    ///
    /// Errors for placements by hand, which have no prediction.
    pub fn subject<'a>(&'a self, g: &'a Graph) -> Result<Subject<'a>> {
        let solved = self.solved.as_deref().ok_or_else(|| Error::invalid("a placement by hand has no explanation"))?;
        let label = |(&id, name): (&NodeId, &String)| {
            let reason = self.nodes[id.0 as usize].as_ref().map(|p| &p.reason);
            let node = g.node(id);
            let attrs: Vec<String> = node.op.attrs().into_iter().map(|(_, v)| v).collect();
            Label {
                name: name.clone(),
                op: format!("{} {}", node.op.name(), attrs.join(" ")).trim().to_owned(),
                reason: reason.filter(|r| !matches!(r, Reason::Chosen | Reason::OnlyDevice)).map(Reason::to_string),
            }
        };
        Ok(Subject {
            name: &g.name,
            problem: &solved.problem,
            solution: &solved.solution,
            devices: self.devices.iter().map(|d| d.to_string()).collect(),
            tasks: solved.nodes.iter().zip(&solved.names).map(label).collect(),
            downgrades: self.warnings.iter().chain(&self.log).cloned().collect(),
            options: solved.options.clone(),
        })
    }

    /// The plan that replays this placement, as the text of a file.
    ///
    /// Errors for placements by hand.
    pub fn plan_text(&self, g: &Graph) -> Result<String> {
        Ok(plan::of(&self.subject(g)?))
    }
}
