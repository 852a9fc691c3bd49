//! The bare placement problem: tasks with a cost on each device, tensors between them, groups that stay together.

use super::device::DeviceSet;
use super::resolve::Resolved;
use crate::cost::{Bytes, CostModel, LinkProfile, Nanos};
use crate::ir::{Graph, NodeId, Op};
use crate::schedule::node_deps;
use std::collections::BTreeSet;

/// A tensor, or an ordering edge of no bytes, from one task to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Task that makes it.
    pub producer: usize,
    /// Its size.
    pub bytes: Bytes,
    /// Tasks that wait for it, in order, each once.
    pub consumers: Vec<usize>,
}

/// A node to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The node.
    pub node: NodeId,
    /// Time on each device; infinite where it may not run.
    pub cost: Vec<Nanos>,
    /// Tensors that it waits for, each once.
    pub inputs: Vec<usize>,
    /// Tensors that it makes and others wait for.
    pub outputs: Vec<usize>,
    /// Constants that must be on its device for the whole step.
    pub constants: Vec<(NodeId, Bytes)>,
    /// Bytes of all its results.
    pub result_bytes: Bytes,
    /// Tasks of one group run on one device.
    pub group: Option<usize>,
    /// Only moves data: the simple placer keeps it with its operand.
    pub is_view: bool,
}

/// Tasks in topological order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Tasks.
    pub tasks: Vec<Task>,
    /// Tensors.
    pub tensors: Vec<Tensor>,
    /// Number of devices.
    pub n_devices: usize,
    /// Number of groups.
    pub n_groups: usize,
    /// The link of each ordered pair of devices.
    pub link: LinkProfile,
    /// Memory limit of each device.
    pub memory: Vec<Option<Bytes>>,
}

impl Problem {
    /// The problem of a graph whose nodes (but constants) may be on the given devices.
    pub(super) fn of(g: &Graph, resolved: &Resolved, set: &DeviceSet, costs: &CostModel) -> Problem {
        let memory = set.devices.iter().map(|d| d.memory_limit).collect();
        let mut p = Problem {
            tasks: Vec::new(),
            tensors: Vec::new(),
            n_devices: set.devices.len(),
            n_groups: resolved.n_groups,
            link: set.link,
            memory,
        };
        let mut task_of: Vec<Option<usize>> = vec![None; g.n_nodes()];
        for (id, node) in g.nodes() {
            let Some(allowed) = &resolved.allowed[id.0 as usize] else { continue };
            let mut cost = vec![Nanos::INFINITY; p.n_devices];
            let times = profile_times(g, id, set, costs);
            allowed.devices.iter().for_each(|&d| cost[d] = times[d]);
            let mut constants: Vec<(NodeId, Bytes)> =
                node.inputs.iter().filter_map(|&v| constant(g, v, costs)).collect();
            constants.sort_unstable();
            constants.dedup();
            task_of[id.0 as usize] = Some(p.tasks.len());
            p.tasks.push(Task {
                node: id,
                cost,
                inputs: Vec::new(),
                outputs: Vec::new(),
                constants,
                result_bytes: node.outputs.iter().map(|&v| costs.bytes(g.ty(v))).sum(),
                group: allowed.group,
                is_view: is_view(g, id),
            });
        }
        p.add_tensors(g, &task_of, costs);
        p
    }

    fn add_tensors(&mut self, g: &Graph, task_of: &[Option<usize>], costs: &CostModel) {
        let users = g.users();
        for t in 0..self.tasks.len() {
            for &v in &g.node(self.tasks[t].node).outputs {
                let consumers: BTreeSet<usize> =
                    users[v.0 as usize].iter().filter_map(|(n, _)| task_of[n.0 as usize]).collect();
                self.add_tensor(t, costs.bytes(g.ty(v)), consumers.into_iter().collect());
            }
        }
        for (id, deps) in node_deps(g).iter().enumerate() {
            let Some(t) = task_of[id] else { continue };
            for d in deps.iter().filter_map(|d| task_of[d.0 as usize]) {
                let by_data = self.tasks[t].inputs.iter().any(|&x| self.tensors[x].producer == d);
                if !by_data {
                    self.add_tensor(d, Bytes::ZERO, vec![t]);
                }
            }
        }
    }

    fn add_tensor(&mut self, producer: usize, bytes: Bytes, consumers: Vec<usize>) {
        if consumers.is_empty() {
            return;
        }
        let tensor = self.tensors.len();
        self.tasks[producer].outputs.push(tensor);
        consumers.iter().for_each(|&c| self.tasks[c].inputs.push(tensor));
        self.tensors.push(Tensor { producer, bytes, consumers });
    }

    /// Devices that a task may be on.
    pub fn feasible(&self, task: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_devices).filter(move |&d| self.tasks[task].cost[d].is_finite())
    }

    /// Mean time of a task over its devices.
    fn mean_cost(&self, task: usize) -> Nanos {
        let n = self.feasible(task).count().max(1) as u64;
        Nanos(self.feasible(task).map(|d| self.tasks[task].cost[d]).sum::<Nanos>().0 / n)
    }

    /// Upward rank of each task: the mean time of the longest way from its start to the end, transfers between different devices included
    /// (Topcuoglu et al. 2002, eq. 2).
    pub fn upward_ranks(&self) -> Vec<Nanos> {
        let n = self.n_devices.max(1) as u64;
        let mut ranks = vec![Nanos::ZERO; self.tasks.len()];
        for t in (0..self.tasks.len()).rev() {
            let tail = |&x: &usize| {
                let tensor = &self.tensors[x];
                let comm =
                    Nanos((u128::from(self.link.transfer(tensor.bytes).0) * u128::from(n - 1) / u128::from(n)) as u64);
                tensor.consumers.iter().map(|&c| ranks[c]).max().unwrap_or_default() + comm
            };
            ranks[t] = self.mean_cost(t) + self.tasks[t].outputs.iter().map(tail).max().unwrap_or_default();
        }
        ranks
    }

    /// Tasks by falling upward rank, which is a topological order; topological index breaks ties.
    pub fn by_rank(&self) -> Vec<usize> {
        let ranks = self.upward_ranks();
        let mut order: Vec<usize> = (0..self.tasks.len()).collect();
        order.sort_by_key(|&t| (std::cmp::Reverse(ranks[t]), t));
        order
    }
}

/// Times of a node on all devices, each distinct profile asked once.
fn profile_times(g: &Graph, id: NodeId, set: &DeviceSet, costs: &CostModel) -> Vec<Nanos> {
    let mut times: Vec<Nanos> = Vec::with_capacity(set.devices.len());
    for (d, device) in set.devices.iter().enumerate() {
        let same = set.devices[..d].iter().position(|e| e.profile == device.profile);
        times.push(match same {
            Some(e) => times[e],
            None => costs.node_ns(g, id, &device.profile),
        });
    }
    times
}

fn constant(g: &Graph, v: crate::ir::ValueId, costs: &CostModel) -> Option<(NodeId, Bytes)> {
    match (g.value(v).def, g.constant(v)) {
        (crate::ir::Def::Node(id, _), Some(_)) => Some((id, costs.bytes(g.ty(v)))),
        _ => None,
    }
}

fn is_view(g: &Graph, id: NodeId) -> bool {
    use crate::ir::OpClass;
    let node = g.node(id);
    match &node.op {
        Op::Cluster { .. } => node.regions[0].nodes().all(|(_, n)| matches!(n.op.class(), OpClass::View)),
        op => op.class() == OpClass::View,
    }
}
