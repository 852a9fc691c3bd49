//! The placement problem of a graph of clusters.

use super::device::DeviceSet;
use super::resolve::Resolved;
use super::task_graph::MOST_NS;
use crate::cost::{Bytes, CostModel, Nanos};
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, Node, NodeId, Op, OpClass, ValueId};
use crate::schedule::node_deps;
use gristmill_runtime::device::DeviceKind;
use gristmill_solver::{Device, Links, Parts, Payload, Problem, Refused, Task, Tensor};
use std::collections::{BTreeMap, BTreeSet};

/// A problem whose tasks are the nodes of a graph, constants left out.
pub struct ModelProblem {
    /// The problem.
    pub problem: Problem,
    /// Node of each task.
    pub nodes: Vec<NodeId>,
    /// Value that each tensor is; none for ordering edges.
    pub values: Vec<Option<ValueId>>,
}

/// The problem of a graph whose nodes (but constants) may be on the given devices.
///
/// Errors on times that are too long, and on graphs that [`super::resolve`] and the verifier should
/// have refused.
pub(super) fn problem(
    g: &Graph,
    resolved: &Resolved,
    set: &DeviceSet,
    costs: &CostModel,
) -> Result<ModelProblem> {
    let nodes: Vec<NodeId> = g
        .nodes()
        .map(|(id, _)| id)
        .filter(|id| resolved.allowed[id.0 as usize].is_some())
        .collect();
    let mut task_of: Vec<Option<u32>> = vec![None; g.n_nodes()];
    for (t, id) in nodes.iter().enumerate() {
        task_of[id.0 as usize] = Some(t as u32);
    }
    let users = g.users();
    let mut constants = Constants::default();
    let mut tasks = Vec::with_capacity(nodes.len());
    for &id in &nodes {
        let is_awaited = |v: &ValueId| {
            let mut users = users[v.0 as usize].iter();
            users.any(|(n, _)| task_of[n.0 as usize].is_some())
        };
        let unused = g.node(id).outputs.iter().filter(|v| !is_awaited(v));
        let allowed = resolved.allowed[id.0 as usize].as_ref();
        tasks.push(Task {
            cost: task_times(g, id, resolved, set, costs)?,
            constants: constants.of(g, id, costs),
            scratch: unused.map(|&v| costs.bytes(g.ty(v))).sum(),
            group: allowed.and_then(|a| a.group).map(|group| group as u32),
            is_view: is_view(g, id),
            ..Task::default()
        });
    }
    let (values, tensors) = tensors(g, &nodes, &task_of, costs).into_iter().unzip();
    let parts = Parts {
        devices: set.devices.iter().map(solver_device).collect(),
        links: links(set),
        tensors,
        tasks,
        constants: constants.bytes,
    };
    let problem = Problem::new(parts).map_err(|refused| refusal(g, &nodes, refused))?;
    Ok(ModelProblem {
        problem,
        nodes,
        values,
    })
}

/// Times of a node on all devices, infinite where it may not be.
///
/// Errors when a time is longer than sums over many nodes have room for.
fn task_times(
    g: &Graph,
    id: NodeId,
    resolved: &Resolved,
    set: &DeviceSet,
    costs: &CostModel,
) -> Result<Vec<Nanos>> {
    let mut times = match g.node(id).op {
        Op::AllReduceRank { group, rank, .. } => {
            vec![ring_time(g, (id, group, rank), resolved, set, costs); set.devices.len()]
        }
        _ => profile_times(g, id, set, costs),
    };
    let allowed = resolved.allowed[id.0 as usize].as_ref();
    for (d, time) in times.iter_mut().enumerate() {
        if !allowed.is_some_and(|a| a.devices.contains(&d)) {
            *time = Nanos::INFINITY;
        } else if time.0 > MOST_NS {
            let device = &set.devices[d].name;
            let message = format!(
                "its predicted time on {device} is more than {MOST_NS} ns, about five hours"
            );
            return Err(Error::invalid(message)
                .at(&g.node(id).origin)
                .hint("other rates in the profile of that device"));
        }
    }
    Ok(times)
}

fn solver_device(device: &super::Device) -> Device {
    Device {
        memory: device.memory_limit,
        is_host: device.name.kind == DeviceKind::Cpu,
    }
}

fn links(set: &DeviceSet) -> Links {
    let mut links = Links::uniform(set.devices.len(), set.link);
    for (&(from, to), &link) in &set.links {
        links.set(from, to, link);
    }
    links
}

/// Constants that tasks use, each once.
#[derive(Default)]
struct Constants {
    index: BTreeMap<NodeId, u32>,
    bytes: Vec<Bytes>,
}

impl Constants {
    fn of(&mut self, g: &Graph, id: NodeId, costs: &CostModel) -> Vec<u32> {
        let mut used: Vec<u32> = Vec::new();
        self.of_regions(g.node(id), costs, &mut used);
        for &v in &g.node(id).inputs {
            let (Def::Node(constant, _), Some(_)) = (g.value(v).def, g.constant(v)) else {
                continue;
            };
            let index = *self.index.entry(constant).or_insert_with(|| {
                self.bytes.push(costs.bytes(g.ty(v)));
                self.bytes.len() as u32 - 1
            });
            used.push(index);
        }
        used.sort_unstable();
        used.dedup();
        used
    }

    /// Constants in the regions of control flow.
    fn of_regions(&mut self, node: &Node, costs: &CostModel, used: &mut Vec<u32>) {
        if node.op.class() != OpClass::Control {
            return;
        }
        for region in &node.regions {
            for (_, inner) in region.nodes() {
                if let Op::Constant { .. } = inner.op {
                    used.push(self.bytes.len() as u32);
                    self.bytes.push(costs.bytes(region.ty(inner.outputs[0])));
                }
                self.of_regions(inner, costs, used);
            }
        }
    }
}

/// A tensor, the tasks that wait for it, and the value that it is.
type Sent = (Option<ValueId>, (Tensor, Vec<u32>));

/// Time of one rank of an all-reduce in a ring: `2 (n - 1)` steps, each of which sends an `n`th of
/// the tensor over every link of the ring.
///
/// The device computes nothing meanwhile, so this is time of its own and not that of transfers.
fn ring_time(
    g: &Graph,
    (id, group, rank): (NodeId, usize, usize),
    resolved: &Resolved,
    set: &DeviceSet,
    costs: &CostModel,
) -> Nanos {
    let node = g.node(id);
    let device_of = |wanted: usize| {
        let is_it = |n: &crate::ir::Node| matches!(n.op, Op::AllReduceRank { group: h, rank: r, .. } if (h, r) == (group, wanted));
        let found = g.nodes().find(|(_, n)| is_it(n))?.0;
        resolved.allowed[found.0 as usize]
            .as_ref()?
            .devices
            .first()
            .copied()
    };
    let n = node.inputs.len();
    let link = device_of(rank)
        .zip(device_of((rank + 1) % n))
        .and_then(|ends| set.links.get(&ends))
        .unwrap_or(&set.link);
    let share = Bytes(costs.bytes(g.ty(node.inputs[0])).0.div_ceil(n as u64));
    link.transfer(share).times(2 * (n as u64 - 1))
}

/// Results that other tasks wait for, and ordering edges of no bytes.
fn tensors(g: &Graph, nodes: &[NodeId], task_of: &[Option<u32>], costs: &CostModel) -> Vec<Sent> {
    let users = g.users();
    let mut tensors: Vec<Sent> = Vec::new();
    let mut by_data: BTreeSet<(u32, u32)> = BTreeSet::new();
    for (t, &id) in nodes.iter().enumerate() {
        for &v in &g.node(id).outputs {
            let needing = users[v.0 as usize]
                .iter()
                .filter(|(n, i)| !g.node(*n).only_orders(*i));
            let consumers: BTreeSet<u32> =
                needing.filter_map(|(n, _)| task_of[n.0 as usize]).collect();
            by_data.extend(consumers.iter().map(|&c| (t as u32, c)));
            if !consumers.is_empty() {
                let tensor = Tensor {
                    producer: t as u32,
                    payload: Payload::Bytes(costs.bytes(g.ty(v))),
                };
                tensors.push((Some(v), (tensor, consumers.into_iter().collect())));
            }
        }
    }
    for (id, deps) in node_deps(g).iter().enumerate() {
        let Some(t) = task_of[id] else { continue };
        let before = deps
            .iter()
            .filter_map(|d| task_of[d.0 as usize])
            .filter(|&d| !by_data.contains(&(d, t)));
        let order = |d| {
            (
                None,
                (
                    Tensor {
                        producer: d,
                        payload: Payload::Bytes(Bytes::ZERO),
                    },
                    vec![t],
                ),
            )
        };
        tensors.extend(before.map(order));
    }
    tensors
}

fn refusal(g: &Graph, nodes: &[NodeId], refused: Refused) -> Error {
    let path = |t: &u32| g.node(nodes[*t as usize]).origin.to_string();
    match refused {
        Refused::Group(tasks) => {
            let paths: Vec<String> = tasks.iter().map(path).collect();
            Error::internal(format!(
                "nodes without a common device came to the placer as a group: {}",
                paths.join(", ")
            ))
        }
        Refused::NoDevice(task) => {
            Error::internal("a node without a device came to the placer").at(path(&task))
        }
        Refused::Cycle(tasks) => Error::internal(format!(
            "dependency cycle: {}",
            tasks.iter().map(path).collect::<Vec<_>>().join(" -> ")
        )),
    }
}

/// Times of a node on all devices, each distinct profile asked once.
fn profile_times(g: &Graph, id: NodeId, set: &DeviceSet, costs: &CostModel) -> Vec<Nanos> {
    let mut times: Vec<Nanos> = Vec::with_capacity(set.devices.len());
    for (d, device) in set.devices.iter().enumerate() {
        let same = set.devices[..d]
            .iter()
            .position(|e| e.profile == device.profile);
        times.push(match same {
            Some(e) => times[e],
            None => costs.node_ns(g, id, &device.profile),
        });
    }
    times
}

fn is_view(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match &node.op {
        Op::Cluster { .. } => node.regions[0]
            .nodes()
            .all(|(_, n)| matches!(n.op.class(), OpClass::View)),
        op => op.class() == OpClass::View,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::ir::{GraphBuilder, ScalarOp};

    #[test]
    fn a_cycle_is_named() {
        let mut b = GraphBuilder::new("two");
        let x = b.input("x", DType::F32, [4usize]);
        let y = b.map(ScalarOp::Neg, &[x]).unwrap();
        let z = b.map(ScalarOp::Exp, &[y]).unwrap();
        b.output("z", z);
        let g = b.finish().unwrap();
        let nodes: Vec<NodeId> = g.nodes().map(|(id, _)| id).collect();
        let text = refusal(&g, &nodes, Refused::Cycle(vec![0, 1])).to_string();
        assert!(text.contains("dependency cycle: "), "{text}");
    }
}
