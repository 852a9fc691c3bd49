//! Placement: which logical device runs each cluster.
//!
//! [`model`] makes a bare problem of a graph of clusters, [`gristmill_solver`] solves it: every
//! algorithm of a portfolio proposes, one simulator predicts the cost of each proposal, the best is
//! refined, and a lower bound says how far it can be from optimal. Pins and requests hold for every
//! candidate. Constants are not placed: each consumer's device has a copy. [`task_graph`] reads
//! bare problems from files.

#[doc(hidden)]
pub mod check;
mod colocate;
mod conflict;
mod copies;
mod device;
mod emulated;
#[doc(hidden)]
pub mod explain;
mod follow;
#[doc(hidden)]
pub mod gpus;
mod kept;
mod kernels;
mod log;
mod model;
mod objective;
mod pins;
#[doc(hidden)]
pub mod plan;
mod print;
mod replace;
mod resolve;
pub mod setter;
mod shortage;
mod solved;
pub mod target;
pub mod task_graph;

pub use copies::{CopiedNode, User};
pub use device::{Device, DeviceSet};
pub use follow::follow_operands;
pub use gristmill_runtime::device::DeviceSpec;
pub use gristmill_solver::search::portfolio::Candidate;
pub use kernels::Kernels;
pub use objective::{Objective, Stream};
pub use pins::{Fallback, Pin, PinTarget, Request, apply_pins};
pub use plan::Plan;
pub use replace::{Horizon, LEAST_GAIN_PERCENT, Replacement, replace};
pub use solved::Solved;
pub use target::Target;

use crate::cost::{Bytes, CostModel, Nanos};
use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, Op, ValueId};
use copies::Settled;
use gristmill_runtime::device::{DeviceKind, DeviceName};
use gristmill_solver::Problem;
use gristmill_solver::search::portfolio::{self, Algorithm};
use model::ModelProblem;
use plan::Planned;
use std::fmt;
use std::sync::Arc;

/// Why a node is where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A pin, a scope or the graph asked for it: who.
    Asked(String),
    /// The request could not be kept, and the fallback allowed another device.
    Fallback(String),
    /// Another use of the same variable asked for a different device, and counts more: the line
    /// that says so.
    Overridden(String),
    /// No other device can run it.
    OnlyDevice,
    /// It must be with another node: the kind of tie, and the node.
    Colocated(String),
    /// The winning algorithm chose it.
    Chosen,
    /// The same for another objective than latency: which.
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

/// Devices of all nodes, with the prediction that chose them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The device set.
    pub devices: Vec<DeviceName>,
    /// By node; `None` for constants, which are wherever they are used.
    pub nodes: Vec<Option<Placed>>,
    /// Rematerialised and offloaded nodes, beside these.
    pub copies: Vec<CopiedNode>,
    /// Name of the winning algorithm.
    pub algorithm: String,
    /// Predicted time of a step.
    pub makespan: Nanos,
    /// No placement is predicted faster than this, with the name of the bound.
    pub lower_bound: (Nanos, String),
    /// Period and depth of the stream, where the placement is for one.
    pub stream: Option<Stream>,
    /// Predicted most bytes on each device.
    pub peak_bytes: Vec<Bytes>,
    /// The portfolio.
    pub candidates: Vec<Candidate>,
    /// Requests that were released.
    pub warnings: Vec<String>,
    /// Requests that were released quietly, as [`Fallback::Allow`] wants it.
    pub log: Vec<String>,
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
            copies: Vec::new(),
            algorithm: "by hand".into(),
            makespan: Nanos(node_devices.len() as u64),
            lower_bound: (Nanos::ZERO, "none".into()),
            candidates: Vec::new(),
            stream: None,
            warnings: Vec::new(),
            log: Vec::new(),
            solved: None,
        }
    }
}

/// Tasks that refinement simulates for a model, by task of the model and at most: a small part of a
/// bare problem's budget, since people wait.
const REFINE_TASKS: u64 = 300;
const MAX_REFINE_TASKS: u64 = 300_000;
/// Nodes that searches for a bound or an optimum look at for a model.
const MODEL_SEARCH_NODES: u64 = 2_000;

/// Places the nodes of a graph, usually of clusters.
///
/// Errors, all at once, when a pin finds nothing, a request names a device that is not in the set
/// or that has no kernel for the node, nodes that must be together cannot be, memory limits cannot
/// be kept, or a plan does not fit.
pub fn place(g: &Graph, request: &Request, costs: &CostModel) -> Result<Placement> {
    let resolved = resolve::resolve(g, request)?;
    let ModelProblem {
        problem,
        nodes,
        values,
    } = model::problem(g, &resolved, &request.devices, costs)?;
    let set = &request.devices;
    let budget = |n: u64| if request.is_brief { 0 } else { n };
    let options = portfolio::Options {
        preference: preference(set),
        refine_tasks: budget((REFINE_TASKS * problem.n_tasks() as u64).min(MAX_REFINE_TASKS)),
        bound_nodes: budget(MODEL_SEARCH_NODES),
        search_nodes: budget(MODEL_SEARCH_NODES),
        previous: request
            .previous
            .as_ref()
            .and_then(|p| p.timeline_on(&nodes, set)),
        ..portfolio::Options::new(&problem)
    };
    let name = |algorithm: Algorithm| match algorithm {
        Algorithm::Single(d) => format!("single {}", set.devices[d as usize].name),
        other => other.name(),
    };
    let names = solved::names(g, &nodes);
    let freedom = copies::freedom(g, &nodes, request, &resolved);
    let resolve =
        |plan: &Plan| solved::planned(plan, &problem, &nodes, &names, &resolved, request, &freedom);
    let planned = request.plan.as_ref().map(resolve).transpose()?;
    let solve = |planned: Option<&Planned>| -> Result<Settled> {
        let found = objective::solve(&problem, request.objective, planned, &options, &name);
        let (solution, stream) =
            found.ok_or_else(|| Error::internal("the portfolio proposes nothing"))?;
        // Copies are for time, or for limits that are not kept without them; a plan says which
        // there are.
        let needs_none = request.objective != Objective::Latency && solution.score.0 == Bytes::ZERO;
        let settled = match planned {
            Some(planned) => copies::replay(&problem, solution, planned.copies.clone(), &freedom),
            None if needs_none => Settled {
                solution,
                copied: None,
                stream,
            },
            None => copies::settle(&problem, solution, &freedom),
        };
        Ok(Settled { stream, ..settled })
    };
    let mut warnings = resolved.warnings.clone();
    let kept = match kept::Place::of_request(request, &problem, &names) {
        Some(place) => kept_solution(&place, resolve, solve).unwrap_or_else(|warning| {
            warnings.push(warning);
            None
        }),
        None => None,
    };
    let is_kept = kept.is_some();
    let settled = kept.map_or_else(|| solve(planned.as_ref()), Ok)?;
    let solution = &settled.solution;
    let mut peak_bytes = solution.timeline.peak_bytes(settled.problem(&problem));
    if let Some(stream) = &settled.stream {
        peak_bytes = stream.peak_bytes(
            peak_bytes,
            &solution.timeline.resident_bytes(settled.problem(&problem)),
        );
    }
    if solution.score.0 > Bytes::ZERO {
        return Err(out_of_memory(g, &problem, &peak_bytes, &names, set));
    }
    let timeline = &solution.timeline;
    let reason = |t: usize, id: NodeId| match (
        resolved.allowed[id.0 as usize].as_ref().map(|a| &a.reason),
        &planned,
    ) {
        (None | Some(Reason::Chosen), Some(planned)) => {
            Reason::Asked(format!("plan {}", planned.tasks[t].1))
        }
        (None | Some(Reason::Chosen), None) if is_kept => Reason::Kept,
        (None | Some(Reason::Chosen), None) if request.objective != Objective::Latency => {
            Reason::ChosenFor(request.objective)
        }
        (reason, _) => reason.cloned().unwrap_or(Reason::Chosen),
    };
    let mut placed: Vec<Option<Placed>> = vec![None; g.n_nodes()];
    for (t, &id) in nodes.iter().enumerate() {
        let (device, start, end) = (
            timeline.device[t] as usize,
            timeline.start[t],
            timeline.end[t],
        );
        placed[id.0 as usize] = Some(Placed {
            device,
            start,
            end,
            reason: reason(t, id),
        });
    }
    Ok(Placement {
        devices: set.devices.iter().map(|d| d.name.clone()).collect(),
        nodes: placed,
        copies: copies::nodes(&problem, &settled, &nodes, &values),
        makespan: timeline.makespan,
        lower_bound: (solution.lower_bound, solution.bound.clone()),
        algorithm: solution.algorithm.clone(),
        peak_bytes,
        candidates: solution.candidates.clone(),
        stream: settled.stream,
        warnings,
        log: resolved.log,
        solved: Some(Arc::new(Solved::new(
            problem,
            settled,
            request.objective,
            options,
            nodes,
            names,
            freedom,
        ))),
    })
}

/// The cached solution of a problem, if there is one that keeps the memory limits; a warning where
/// the cached plan cannot be used.
fn kept_solution(
    place: &kept::Place,
    resolve: impl Fn(&Plan) -> Result<Planned>,
    solve: impl Fn(Option<&Planned>) -> Result<Settled>,
) -> Result<Option<Settled>, String> {
    let Some(planned) = place.find(resolve)? else {
        return Ok(None);
    };
    let mut settled = solve(Some(&planned)).map_err(|e| place.ignored(e))?;
    if settled.solution.score.0 > Bytes::ZERO {
        return Err(place.ignored("no schedule of it was found that keeps the memory limits"));
    }
    settled.solution.algorithm = settled
        .solution
        .algorithm
        .replacen("plan", "kept placement", 1);
    Ok(Some(settled))
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

fn out_of_memory(
    g: &Graph,
    p: &Problem,
    peaks: &[Bytes],
    names: &[String],
    set: &DeviceSet,
) -> Error {
    let names = shortage::Names {
        task: &|t| names[t].clone(),
        group: &|t| {
            let members = p.members.row(p.group_of[t] as usize);
            (members.len() > 1).then(|| {
                format!(
                    "of {} nodes with {}",
                    members.len(),
                    names[members[0] as usize]
                )
            })
        },
        devices: set.devices.iter().map(|d| d.name.to_string()).collect(),
        limit: &|d, new| match &set.devices[d] {
            Device {
                name,
                memory: Some(memory),
                ..
            } if new > *memory => {
                format!(
                    "a GPU with {} bytes for {name}, whose {memory} no --mem makes more",
                    new.0
                )
            }
            Device { name, .. } => format!("--mem {name}={}", new.0),
        },
        tensors: largest_tensors(g),
        other_ways: ", or a smaller batch",
    };
    shortage::error(p, peaks, &names)
}

/// The largest tensors of a graph, by names that the user knows: `f32[64, 1000] weights of
/// "/fc/MatMul" (256000 bytes)`.
fn largest_tensors(g: &Graph) -> Vec<String> {
    const NAMED: usize = 3;
    let mut values: Vec<(u64, ValueId)> = (0..g.n_values() as u32)
        .map(ValueId::new)
        .filter_map(|v| Some((g.ty(v).size_bytes()? as u64, v)))
        .collect();
    values.sort_unstable_by_key(|&(size, v)| (std::cmp::Reverse(size), v));
    let user = |v: ValueId| {
        g.nodes()
            .find(|(_, n)| n.inputs.contains(&v))
            .map(|(_, n)| n.origin.to_string())
    };
    let label = |(size, v): (u64, ValueId)| {
        let name = match (g.def_node(v), g.inputs.iter().position(|&i| i == v)) {
            (None, Some(i)) => format!("input {:?}", g.input_names[i]),
            (Some(n), _) if matches!(n.op, Op::Constant { .. }) => {
                format!("weights of {:?}", user(v)?)
            }
            (Some(n), _) => format!("result of {:?}", n.origin.to_string()),
            (None, None) => return None,
        };
        Some(format!("{} {name} ({size} bytes)", g.ty(v)))
    };
    values.into_iter().filter_map(label).take(NAMED).collect()
}

#[cfg(test)]
mod tests;
