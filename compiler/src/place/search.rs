//! The search for a model's placement: its problem, solved, as a placement.

use super::copied_nodes::{self, Settled};
use super::model::{self, ModelProblem};
use super::plan::Planned;
use super::resolve::Resolved;
use super::solved::{self, Solved};
use super::{
    Device, DeviceSet, Joining, Objective, Placed, Placement, Plan, Reason, Request, TimeSources,
};
use super::{objective, placement_cache, shortage};
use crate::cost::{Bytes, CostModel};
use crate::error::{Error, Result};
use crate::ir::{Graph, Op, ValueId};
use gristmill_runtime::device::DeviceKind;
use gristmill_solver::memory::remat::Freedom;
use gristmill_solver::search::portfolio::{self, Algorithm};
use std::cmp::Reverse;
use std::sync::Arc;

/// Tasks that refinement simulates for a model, by task of the model and at most: a small part of a
/// bare problem's budget, since people wait.
pub(super) const REFINE_TASKS: u64 = 300;
pub(super) const MAX_REFINE_TASKS: u64 = 300_000;
/// Nodes that searches for a bound or an optimum look at for a model.
const MODEL_SEARCH_NODES: u64 = 2_000;

/// A graph whose devices are searched for.
pub(super) struct Search<'a> {
    g: &'a Graph,
    request: &'a Request,
    /// Devices that each node may be on.
    pub resolved: Resolved,
    model: ModelProblem,
    /// Names of tasks.
    names: Vec<String>,
    freedom: Freedom,
    options: portfolio::Options,
}

/// The author of a placement.
pub(super) enum Choice {
    /// The search.
    Searched,
    /// A plan of the request.
    Planned(Planned),
    /// A plan in the cache.
    Cached,
}

impl<'a> Search<'a> {
    /// Errors when a predicted time is too long for the placer.
    pub fn new(
        g: &'a Graph,
        request: &'a Request,
        resolved: Resolved,
        costs: &CostModel,
    ) -> Result<Search<'a>> {
        let model = model::problem(g, &resolved, &request.devices, costs)?;
        Ok(Search {
            options: options(request, &model),
            names: solved::names(g, &model.nodes),
            freedom: copied_nodes::freedom(g, &model.nodes, request, &resolved),
            g,
            request,
            resolved,
            model,
        })
    }

    /// A plan matched with the tasks.
    pub fn planned(&self, plan: &Plan) -> Result<Planned> {
        let (model, names) = (&self.model, &self.names);
        solved::planned(
            plan,
            &model.problem,
            &model.nodes,
            names,
            &self.resolved,
            self.request,
            &self.freedom,
        )
    }

    /// The best solution that is found, on the devices of the plan if there is one, with copies of
    /// tasks.
    pub fn solve(&self, planned: Option<&Planned>) -> Result<Settled> {
        let (problem, objective) = (&self.model.problem, self.request.objective);
        let name = |algorithm: Algorithm| match algorithm {
            Algorithm::Single(d) => {
                let device = &self.request.devices.devices[d as usize];
                format!("single {}", device.name)
            }
            other => other.name(),
        };
        let found = objective::solve(problem, objective, planned, &self.options, &name);
        let (solution, stream) =
            found.ok_or_else(|| Error::internal("the portfolio proposes nothing"))?;
        // Copies are for time, or for limits that are not kept without them; a plan says which
        // there are.
        let needs_none = objective != Objective::Latency && solution.score.0 == Bytes::ZERO;
        let settled = match planned {
            Some(planned) => {
                copied_nodes::replay(problem, solution, planned.copies.clone(), &self.freedom)
            }
            None if needs_none => Settled {
                solution,
                copied: None,
                stream,
            },
            None => copied_nodes::settle(problem, solution, &self.freedom),
        };
        Ok(Settled { stream, ..settled })
    }

    /// The cached solution, if there is one that keeps the memory limits; a warning where the
    /// cached plan cannot be used.
    pub fn cached(&self) -> Result<Option<Settled>, String> {
        let entry =
            placement_cache::Entry::of_request(self.request, &self.model.problem, &self.names);
        let Some(entry) = entry else {
            return Ok(None);
        };
        let Some(planned) = entry.find(|plan| self.planned(plan))? else {
            return Ok(None);
        };
        let mut settled = self.solve(Some(&planned)).map_err(|e| entry.ignored(e))?;
        let solution = &mut settled.solution;
        if solution.score.0 > Bytes::ZERO {
            return Err(entry.ignored("no schedule of it was found that keeps the memory limits"));
        }
        solution.algorithm = solution.algorithm.replacen("plan", "kept placement", 1);
        Ok(Some(settled))
    }

    /// The placement of a solution. Errors when it does not keep the memory limits.
    pub fn placement(
        self,
        settled: Settled,
        choice: &Choice,
        warnings: Vec<String>,
    ) -> Result<Placement> {
        let peak_bytes = self.peak_bytes(&settled);
        let solution = &settled.solution;
        if solution.score.0 > Bytes::ZERO {
            return Err(self.out_of_memory(&peak_bytes));
        }
        let devices = &self.request.devices.devices;
        let mut placement = Placement {
            devices: devices.iter().map(|d| d.name.clone()).collect(),
            nodes: self.placed(&settled, choice),
            joining: Joining::default(),
            rivals: Vec::new(),
            copies: copied_nodes::nodes(
                &self.model.problem,
                &settled,
                &self.model.nodes,
                &self.model.values,
            ),
            makespan: solution.timeline.makespan,
            lower_bound: (solution.lower_bound, solution.bound.clone()),
            algorithm: solution.algorithm.clone(),
            peak_bytes,
            candidates: solution.candidates.clone(),
            stream: settled.stream,
            warnings,
            log: self.resolved.log,
            sources: TimeSources::default(),
            solved: None,
        };
        placement.solved = Some(Arc::new(Solved::new(
            self.model.problem,
            settled,
            self.request.objective,
            self.options,
            self.model.nodes,
            self.names,
            self.freedom,
        )));
        Ok(placement)
    }

    fn peak_bytes(&self, settled: &Settled) -> Vec<Bytes> {
        let problem = settled.problem(&self.model.problem);
        let timeline = &settled.solution.timeline;
        let peaks = timeline.peak_bytes(problem);
        match &settled.stream {
            Some(stream) => stream.peak_bytes(peaks, &timeline.resident_bytes(problem)),
            None => peaks,
        }
    }

    /// Device, times and reason of each node.
    fn placed(&self, settled: &Settled, choice: &Choice) -> Vec<Option<Placed>> {
        let timeline = &settled.solution.timeline;
        let mut placed: Vec<Option<Placed>> = vec![None; self.g.n_nodes()];
        for (t, id) in self.model.nodes.iter().enumerate() {
            placed[id.0 as usize] = Some(Placed {
                device: timeline.device[t] as usize,
                start: timeline.start[t],
                end: timeline.end[t],
                reason: self.reason(t, choice),
            });
        }
        placed
    }

    /// The reason for the device of a task: that which narrowed its devices, else the author of the
    /// placement.
    fn reason(&self, task: usize, choice: &Choice) -> Reason {
        let id = self.model.nodes[task];
        match self.resolved.allowed[id.0 as usize].as_ref() {
            Some(allowed) if allowed.reason != Reason::Chosen => allowed.reason.clone(),
            _ => match choice {
                Choice::Planned(planned) => {
                    Reason::Asked(format!("plan {}", planned.tasks[task].1))
                }
                Choice::Cached => Reason::Kept,
                Choice::Searched if self.request.objective != Objective::Latency => {
                    Reason::ChosenFor(self.request.objective)
                }
                Choice::Searched => Reason::Chosen,
            },
        }
    }

    fn out_of_memory(&self, peaks: &[Bytes]) -> Error {
        let (p, set) = (&self.model.problem, &self.request.devices);
        let names = shortage::Names {
            task: &|t| self.names[t].clone(),
            group: &|t| {
                let members = p.members.row(p.group_of[t] as usize);
                let first = &self.names[members[0] as usize];
                (members.len() > 1).then(|| format!("of {} nodes with {first}", members.len()))
            },
            devices: set.devices.iter().map(|d| d.name.to_string()).collect(),
            limit: &|d, new| limit_option(&set.devices[d], new),
            tensors: largest_tensors(self.g),
            other_ways: ", or a smaller batch",
        };
        shortage::error(p, peaks, &names)
    }
}

fn options(request: &Request, model: &ModelProblem) -> portfolio::Options {
    let problem = &model.problem;
    let budget = |n: u64| if request.is_brief { 0 } else { n };
    let previous = request.previous.as_ref();
    portfolio::Options {
        preference: preference(&request.devices),
        refine_tasks: budget((REFINE_TASKS * problem.n_tasks() as u64).min(MAX_REFINE_TASKS)),
        bound_nodes: budget(MODEL_SEARCH_NODES),
        search_nodes: budget(MODEL_SEARCH_NODES),
        previous: previous.and_then(|p| p.timeline_on(&model.nodes, &request.devices)),
        ..portfolio::Options::new(problem)
    }
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

/// The option that sets the limit of a device to so many bytes.
fn limit_option(device: &Device, new: Bytes) -> String {
    let name = &device.name;
    match device.memory {
        Some(memory) if new > memory => format!(
            "a GPU with {} bytes for {name}, whose {memory} no --mem makes more",
            new.0
        ),
        _ => format!("--mem {name}={}", new.0),
    }
}

/// The largest tensors of a graph, by names that the user knows: `f32[64, 1000] weights of
/// "/fc/MatMul" (256000 bytes)`.
fn largest_tensors(g: &Graph) -> Vec<String> {
    const NAMED: usize = 3;
    let mut values: Vec<(u64, ValueId)> = (0..g.n_values() as u32)
        .map(ValueId::new)
        .filter_map(|v| Some((g.ty(v).size_bytes()? as u64, v)))
        .collect();
    values.sort_unstable_by_key(|&(size, v)| (Reverse(size), v));
    let label = |(size, v): (u64, ValueId)| {
        let name = tensor_name(g, v)?;
        Some(format!("{} {name} ({size} bytes)", g.ty(v)))
    };
    values.into_iter().filter_map(label).take(NAMED).collect()
}

/// The name that the user knows a value by.
fn tensor_name(g: &Graph, v: ValueId) -> Option<String> {
    if let Some(node) = g.def_node(v) {
        if !matches!(node.op, Op::Constant { .. }) {
            return Some(format!("result of {:?}", node.origin.to_string()));
        }
        let (_, user) = g.nodes().find(|(_, n)| n.inputs.contains(&v))?;
        return Some(format!("weights of {:?}", user.origin.to_string()));
    }
    let input = g.inputs.iter().position(|&i| i == v)?;
    Some(format!("input {:?}", g.input_names[input]))
}
