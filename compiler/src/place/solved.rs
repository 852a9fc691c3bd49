//! Origin of a model's placement: the problem, its solution, and the names of nodes in plans and
//! explanations.

use super::copied_nodes::Settled;
use super::explain::{Label, Subject, unique_names};
use super::plan::{self, Names, Plan, Planned};
use super::resolve::Resolved;
use super::{DeviceSet, Objective, Placement, Reason, Request};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op};
use gristmill_runtime::device::{DeviceName, DeviceSpec};
use gristmill_solver::memory::remat::{Copy, Freedom};
use gristmill_solver::search::portfolio::{Options, Solution};
use gristmill_solver::{Problem, Timeline, Transfer};

/// A solved problem of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solved {
    /// The problem, without the plan if there was one, and without copies.
    pub problem: Problem,
    /// The problem with copies, if there are any.
    pub copied: Option<Problem>,
    /// The copies, which are its last tasks.
    pub copies: Vec<Copy>,
    /// The objective it was solved for.
    pub objective: Objective,
    /// Rematerialisation and offloading that were allowed.
    pub freedom: Freedom,
    /// Its solution.
    pub solution: Solution,
    /// Options of the solution.
    pub options: Options,
    /// Node of each task.
    pub nodes: Vec<NodeId>,
    /// Name of each task: the path of the node, or op and number; repeated names have a number
    /// behind. Those of copies come last.
    pub names: Vec<String>,
}

impl Solved {
    pub(super) fn new(
        problem: Problem,
        settled: Settled,
        objective: Objective,
        options: Options,
        nodes: Vec<NodeId>,
        mut names: Vec<String>,
        freedom: Freedom,
    ) -> Solved {
        let Settled {
            solution, copied, ..
        } = settled;
        let (copied, copies) = copied.map_or((None, Vec::new()), |c| (Some(c.problem), c.copies));
        names.truncate(nodes.len());
        for copy in &copies {
            let what = if copy.parked.is_some() {
                "parked"
            } else {
                "copy"
            };
            names.push(format!("{} ({what})", names[copy.task as usize]));
        }
        let names = unique_names(names);
        Solved {
            problem,
            copied,
            copies,
            objective,
            freedom,
            solution,
            options,
            nodes,
            names,
        }
    }
}

impl Solved {
    /// Names of the tasks that are no copies.
    pub(super) fn task_names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().take(self.nodes.len()).map(String::as_str)
    }
}

/// Names of tasks, each once.
pub(super) fn names(g: &Graph, nodes: &[NodeId]) -> Vec<String> {
    let name = |&id: &NodeId| match g.node(id).origin.as_str() {
        "" => format!("{}#{}", g.node(id).op.name(), id.0),
        path => path.to_owned(),
    };
    unique_names(nodes.iter().map(name))
}

/// A plan matched with the nodes of a request.
pub(super) fn planned(
    plan: &Plan,
    problem: &Problem,
    nodes: &[NodeId],
    tasks: &[String],
    resolved: &Resolved,
    request: &Request,
    freedom: &Freedom,
) -> Result<Planned> {
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
    plan.resolve(
        problem,
        &Names {
            tasks,
            devices: &devices,
            find: &find,
            reason: &reason,
            freedom,
        },
    )
}

/// Nodes of the model merged into a cluster, in order; none for the kernel of a single node.
fn merged(cluster: &Node) -> Vec<String> {
    if !matches!(cluster.op, Op::Cluster { .. }) {
        return Vec::new();
    }
    let inner = cluster.regions.iter().flat_map(Graph::nodes);
    let mut names: Vec<&str> = Vec::new();
    for (_, node) in inner {
        let name = node.origin.as_str();
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    match names.len() {
        1 => Vec::new(),
        _ => names.into_iter().map(str::to_owned).collect(),
    }
}

impl Placement {
    /// Where and when these nodes ran, on the devices of a set; nothing where a device is gone, or
    /// a node was not placed.
    pub(super) fn timeline_on(&self, nodes: &[NodeId], set: &DeviceSet) -> Option<Timeline> {
        let place = |name: &DeviceName| {
            set.devices
                .iter()
                .position(|d| d.name == *name)
                .map(|d| d as u32)
        };
        let index: Vec<Option<u32>> = self.devices.iter().map(place).collect();
        let mut timeline = Timeline {
            makespan: self.makespan,
            ..Timeline::default()
        };
        for id in nodes {
            let placed = self.nodes.get(id.0 as usize)?.as_ref()?;
            timeline.device.push(index[placed.device]?);
            timeline.start.push(placed.start);
            timeline.end.push(placed.end);
        }
        // Tensors have the same numbers in all problems of one graph.
        if let Some(solved) = self.solved.as_deref().filter(|s| s.nodes == nodes) {
            let n = solved.problem.tensors.len();
            for t in solved
                .solution
                .timeline
                .transfers
                .iter()
                .filter(|t| (t.tensor as usize) < n)
            {
                let (from, to) = (index[t.from as usize]?, index[t.to as usize]?);
                timeline.transfers.push(Transfer { from, to, ..*t });
            }
        }
        Some(timeline)
    }

    /// The subject of explanations; `g` is the graph that was placed.
    ///
    /// Errors for placements by hand, which have no prediction.
    pub fn subject<'a>(&'a self, g: &'a Graph) -> Result<Subject<'a>> {
        let solved = self
            .solved
            .as_deref()
            .ok_or_else(|| Error::invalid("a placement by hand has no explanation"))?;
        let n = solved.nodes.len();
        let label = |(i, name): (usize, &String)| {
            let copy = i.checked_sub(n).and_then(|i| self.copies.get(i));
            let id = copy.map_or_else(|| solved.nodes[i], |c| c.node);
            let placed = copy
                .map(|c| &c.placed)
                .or(self.nodes[id.0 as usize].as_ref());
            let reason = placed.map(|p| &p.reason);
            let node = g.node(id);
            let op = match copy.is_some_and(|c| c.parked.is_some()) {
                true => "kept for another device".to_owned(),
                false => node.op.label(),
            };
            Label {
                name: name.clone(),
                op,
                merged: merged(node),
                reason: reason.filter(|r| !r.is_choice()).map(Reason::to_string),
                is_copy: copy.is_some(),
            }
        };
        Ok(Subject {
            name: &g.name,
            problem: solved.copied.as_ref().unwrap_or(&solved.problem),
            base: &solved.problem,
            freedom: &solved.freedom,
            copies: &solved.copies,
            solution: &solved.solution,
            objective: solved.objective,
            stream: self.stream,
            devices: self.devices.iter().map(|d| d.to_string()).collect(),
            tasks: solved.names.iter().enumerate().map(label).collect(),
            sources: Some(self.sources),
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
