//! Reasons for the device of each node, and the predicted makespan if only it, with its group, were
//! elsewhere.

use super::Subject;
use crate::cost::{Bytes, Nanos};
use crate::place::Objective;
use gristmill_solver::Timeline;
use gristmill_solver::memory::repair;
use gristmill_solver::search::singles::{Singles, looked_at};
use serde::Serialize;

/// Where a node is, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeReason {
    /// Its name.
    pub name: String,
    /// Its op, for people.
    pub op: String,
    /// Merged nodes of the model, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub merged: Vec<String>,
    /// Its device.
    pub device: String,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// Why it is there.
    pub reason: String,
    /// First node of its colocation group, if it has one and is not that itself: the alternatives
    /// are listed there.
    pub group: Option<String>,
    /// All devices that it may be on, its own among them; empty when there is only one, and of
    /// large problems off the critical chain.
    pub alternatives: Vec<Alternative>,
}

/// A node, with its group, on one of its devices, everything else left where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alternative {
    /// The device.
    pub device: String,
    /// When its operands are all there.
    pub ready_ns: u64,
    /// Time of the transfers that bring them.
    pub transfer_ns: u64,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// Makespan of everything.
    pub makespan_ns: u64,
    /// Bytes over the memory limits.
    pub excess_bytes: u64,
}

/// Reasons of all nodes, by start. Tables are made for the nodes of the critical chain, and of
/// small problems for all others.
pub(super) fn reasons(s: &Subject) -> Vec<NodeReason> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let mut order: Vec<u32> = (0..p.n_tasks() as u32).collect();
    order.sort_by_key(|&i| (t.start[i as usize], i));
    let mut singles = Singles::new(p, t);
    let mut of_group: Vec<Option<Vec<Alternative>>> = vec![None; p.n_groups()];
    let tables = if s.objective == Objective::Latency {
        looked_at(p, t)
    } else {
        Vec::new()
    };
    for group in tables {
        of_group[group as usize] = Some(of(s, &mut singles, group as usize));
    }
    let mut reasons = Vec::with_capacity(order.len());
    for &task in &order {
        let i = task as usize;
        let group = p.group_of[i] as usize;
        let first = p.members.row(group)[0];
        let alternatives = if first == task {
            of_group[group].take().unwrap_or_default()
        } else {
            Vec::new()
        };
        reasons.push(NodeReason {
            name: s.tasks[i].name.clone(),
            op: s.tasks[i].op.clone(),
            merged: s.tasks[i].merged.clone(),
            device: s.device_of(i).to_owned(),
            start_ns: t.start[i].0,
            end_ns: t.end[i].0,
            reason: reason(s, i),
            group: (first != task).then(|| s.tasks[first as usize].name.clone()),
            alternatives,
        });
    }
    reasons
}

/// The request or rule that narrowed the devices of a task; where it left a choice, also who made
/// it.
fn reason(s: &Subject, task: usize) -> String {
    let p = s.problem;
    let has_choice = p.feasible(task).nth(1).is_some();
    let chosen = match s
        .solution
        .moved
        .get(p.group_of[task] as usize)
        .copied()
        .flatten()
    {
        Some(m) => format!(
            "moved from {} by refinement step {}",
            s.devices[m.from as usize], m.step
        ),
        None => format!("chosen by {}", s.solution.algorithm),
    };
    match (&s.tasks[task].reason, has_choice) {
        (Some(why), false) => why.clone(),
        (Some(why), true) => format!("{why}; {chosen}"),
        (None, true) => chosen,
        (None, false) if p.n_devices() == 1 => "only device".to_owned(),
        (None, false) => "only device that can run it".to_owned(),
    }
}

/// The table of a group: each device that it may be on.
fn of(s: &Subject, singles: &mut Singles, group: usize) -> Vec<Alternative> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let first = p.members.row(group)[0] as usize;
    let mut table = Vec::new();
    for to in p.feasible(first) {
        if to == t.device[first] as usize {
            table.push(row(s, t, first, s.solution.score.0));
        } else if let Some(moved) = singles.moved(group, to, Nanos::INFINITY) {
            let run = moved.last_run();
            table.push(row(s, run, first, repair::excess(p, run)));
        }
    }
    table
}

fn row(s: &Subject, t: &Timeline, task: usize, excess: Bytes) -> Alternative {
    let (p, device) = (s.problem, t.device[task]);
    let inputs = p.inputs.row(task);
    let brought = t
        .transfers
        .iter()
        .filter(|x| x.to == device && inputs.contains(&x.tensor));
    let local = p
        .predecessors(task)
        .filter(|&q| t.device[q as usize] == device)
        .map(|q| t.end[q as usize]);
    let ready = brought
        .clone()
        .map(|x| x.end)
        .chain(local)
        .max()
        .unwrap_or_default();
    Alternative {
        device: s.devices[device as usize].clone(),
        ready_ns: ready.0,
        transfer_ns: brought
            .map(|x| x.end.saturating_sub(x.start))
            .sum::<Nanos>()
            .0,
        start_ns: t.start[task].0,
        end_ns: t.end[task].0,
        makespan_ns: t.makespan.0,
        excess_bytes: excess.0,
    }
}
