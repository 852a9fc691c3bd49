//! Nodes that run more than once, and results that are offloaded on another device: which may,
//! which do, and the graph in which each copy is a node of its own.

use super::pins::{paths, wishes};
use super::resolve::{Allowed, Resolved};
use super::{Placed, Placement, Reason, Request, Stream};
use crate::cost::{Bytes, LinkProfile, Nanos};
use crate::error::{Error, Result};
use crate::ir::{
    ClusterKind, Def, DeviceRequest, Graph, Node, NodeId, Op, OpClass, Origin, ValueId,
};
use crate::passes::Rebuild;
use crate::schedule::variable_uses;
use gristmill_runtime::device::DeviceKind;
use gristmill_solver::memory::remat::{self, Copied, Freedom};
use gristmill_solver::memory::repair;
use gristmill_solver::search::portfolio::Solution;
use gristmill_solver::{Problem, bounds};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A node that runs again, or a result of it that is offloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedNode {
    /// The node.
    pub node: NodeId,
    /// The result that is sent to the device below and from there to the users, instead of being
    /// held until then; none where the node runs again.
    pub parked: Option<ValueId>,
    /// Where, when and why the copy runs.
    pub placed: Placed,
    /// Consumers of the copy's results.
    pub users: Vec<User>,
}

/// A consumer of a copy's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// A node of the graph.
    Node(NodeId),
    /// A copy, by its place among [`Placement::copies`].
    Copy(usize),
}

/// A solution, with the copies that make it better.
pub(super) struct Settled {
    pub solution: Solution,
    pub copied: Option<Copied>,
    /// Period and depth of the stream, if throughput was the objective.
    pub stream: Option<Stream>,
}

impl Settled {
    /// The problem that the solution is one of.
    pub fn problem<'a>(&'a self, base: &'a Problem) -> &'a Problem {
        self.copied.as_ref().map_or(base, |c| &c.problem)
    }
}

/// Tasks simulated in the search for copies, by task of the model and at most.
const COPY_TASKS: u64 = 100;
const MAX_COPY_TASKS: u64 = 300_000;

/// Adds the copies that help: cheap nodes instead of transfers, or, where memory limits are not
/// kept, nodes that run again, or tensors that are offloaded, instead of holding results.
pub(super) fn settle(p: &Problem, solution: Solution, freedom: &Freedom) -> Settled {
    let tasks = (COPY_TASKS * p.n_tasks() as u64).min(MAX_COPY_TASKS);
    let find = if solution.score.0 == Bytes::ZERO {
        remat::replicate
    } else {
        remat::make_room
    };
    let copied = find(p, &solution.timeline, freedom, tasks);
    settled(p, solution, copied, true)
}

/// The solution with the copies of a plan, on the devices that it has.
pub(super) fn replay(
    p: &Problem,
    solution: Solution,
    copies: Vec<remat::Copy>,
    freedom: &Freedom,
) -> Settled {
    let copied = match copies.is_empty() {
        true => None,
        false => remat::replay_copies(p, &solution.timeline, freedom, copies),
    };
    settled(p, solution, copied, false)
}

fn settled(p: &Problem, mut solution: Solution, copied: Option<Copied>, is_found: bool) -> Settled {
    if let Some(c) = &copied {
        // Bounds take it that each task runs once; without transfers they hold for copies too.
        let mut free = p.clone();
        free.links = free.links.map(|_| LinkProfile {
            latency: Nanos::ZERO,
            bytes_per_second: u64::MAX,
        });
        let bound = bounds::quick(&free);
        (solution.lower_bound, solution.bound) =
            (bound.value, format!("{} without transfers", bound.name));
        if is_found {
            let again = if solution.score.0 == Bytes::ZERO {
                "+replicate"
            } else {
                "+recompute"
            };
            let said = [
                (again, c.copies.iter().any(|c| c.parked.is_none())),
                ("+park", c.copies.iter().any(|c| c.parked.is_some())),
            ];
            said.iter()
                .filter(|s| s.1)
                .for_each(|s| solution.algorithm.push_str(s.0));
        }
        solution.score = repair::key(&c.problem, &c.timeline);
        solution.timeline = c.timeline.clone();
        if !solution.moved.is_empty() {
            solution.moved.resize(c.problem.n_groups(), None);
        }
    }
    Settled {
        solution,
        copied,
        stream: None,
    }
}

/// Tasks that may run more than once, and devices that keep tensors of others. Only host memory is
/// offered for offloading: a tensor in flight takes no room there of the device that it belongs to.
pub(super) fn freedom(
    g: &Graph,
    nodes: &[NodeId],
    request: &Request,
    resolved: &Resolved,
) -> Freedom {
    let parking = |d: &super::Device| {
        // A tensor is read and written.
        let bytes_per_second = (d.profile.memory_bandwidth / 2.0).max(1.0) as u64;
        let keeps = d.name.kind == DeviceKind::Cpu;
        keeps.then_some(LinkProfile {
            latency: d.profile.launch,
            bytes_per_second,
        })
    };
    Freedom {
        may_copy: may_copy(g, nodes, request, resolved),
        is_held: nodes
            .iter()
            .map(|&id| !variable_uses(g.node(id)).is_empty())
            .collect(),
        parking: request.devices.devices.iter().map(parking).collect(),
    }
}

/// Tasks that may be rematerialised: their only effect is their results, no request names them, and
/// no ordering edge touches them.
fn may_copy(g: &Graph, nodes: &[NodeId], request: &Request, resolved: &Resolved) -> Vec<bool> {
    let ordered = ordering_nodes(g);
    let wishes: Vec<_> = g.nodes().map(|(_, n)| wishes(n, &request.pins)).collect();
    let groups = wishes.iter().flatten().flat_map(|(_, w)| w.groups.keys());
    let named: BTreeSet<String> = groups.map(|group| group.to_string()).collect();
    let is_named = |node: &Node| paths(node).iter().any(|path| named.contains(*path));
    let is_free =
        |a: &Allowed| a.group.is_none() && matches!(a.reason, Reason::Chosen | Reason::OnlyDevice);
    let may = |id: &NodeId| {
        let (node, i) = (g.node(*id), id.0 as usize);
        let has_no_request = wishes[i].is_empty() && !is_named(node);
        let has_no_order = node.control.is_empty() && !ordered.contains(id);
        let allowed = resolved.allowed[i].as_ref();
        is_pure(node) && has_no_request && has_no_order && allowed.is_some_and(is_free)
    };
    nodes.iter().map(may).collect()
}

/// Nodes that others are ordered by.
fn ordering_nodes(g: &Graph) -> BTreeSet<NodeId> {
    let mut ordering = BTreeSet::new();
    for (_, node) in g.nodes() {
        ordering.extend(node.control.iter().copied());
        for (i, &v) in node.inputs.iter().enumerate() {
            if let Def::Node(id, _) = g.value(v).def
                && node.only_orders(i)
            {
                ordering.insert(id);
            }
        }
    }
    ordering
}

/// Results depend on operands alone, and nothing else does on the node; in its regions too.
fn is_pure(node: &Node) -> bool {
    !matches!(node.op.class(), OpClass::State | OpClass::Transfer)
        && variable_uses(node).is_empty()
        && node
            .regions
            .iter()
            .all(|r| r.nodes().all(|(_, n)| is_pure(n)))
}

/// The copies of a solved problem as nodes.
pub(super) fn nodes(
    p: &Problem,
    settled: &Settled,
    nodes: &[NodeId],
    values: &[Option<ValueId>],
) -> Vec<CopiedNode> {
    let Some(copied) = &settled.copied else {
        return Vec::new();
    };
    let t = &copied.timeline;
    let user = |&u: &u32| match nodes.get(u as usize) {
        Some(&id) => User::Node(id),
        None => User::Copy(u as usize - nodes.len()),
    };
    let node = |(i, copy): (usize, &remat::Copy)| {
        let at = nodes.len() + i;
        CopiedNode {
            node: nodes[copy.task as usize],
            parked: copy.parked.and_then(|x| values[x as usize]),
            placed: Placed {
                device: copy.device as usize,
                start: t.start[at],
                end: t.end[at],
                reason: Reason::Copy(saving(p, copied, at, copy)),
            },
            users: copy.users.iter().map(user).collect(),
        }
    };
    copied.copies.iter().enumerate().map(node).collect()
}

/// The cost of a copy, which is the task `at`, against that of having none.
fn saving(p: &Problem, copied: &Copied, at: usize, copy: &remat::Copy) -> String {
    let (task, device) = (copy.task as usize, copy.device as usize);
    let home = copied.timeline.device[task] as usize;
    if let Some(x) = copy.parked {
        let (x, bytes) = (x as usize, p.tensors[x as usize].bytes());
        let way = p.transfer(x, home, device) + p.transfer(x, device, home);
        return format!("parked: {way} there and back instead of holding {bytes} until then");
    }
    let cost = copied.problem.cost(at, device);
    if home == device {
        return format!("a copy: {cost} again instead of holding the results until then");
    }
    let results = p.outputs.row(task).iter();
    let sent: Nanos = results.map(|&x| p.transfer(x as usize, home, device)).sum();
    format!("a copy: {cost} there instead of {sent} of transfers")
}

impl Placement {
    /// The graph in which each copy is a node, in the order of the predicted starts, and its
    /// placement, which has no copies. `g` is the graph that was placed.
    ///
    /// The order keeps a memory limit where a node runs again late: the partition of a single
    /// device is run in the order of its graph.
    pub fn expand(&self, g: &Graph) -> Result<(Graph, Placement)> {
        let mut r = Rebuild::new(g);
        let mut nodes: Vec<Option<Placed>> = Vec::new();
        let mut made: Vec<Vec<ValueId>> = vec![Vec::new(); self.copies.len()];
        for (id, copy) in self.order(g) {
            let node = g.node(id);
            let user = copy.map_or(User::Node(id), User::Copy);
            let outputs =
                match copy.and_then(|i| self.copies[i].parked.map(|v| (&self.copies[i], v))) {
                    Some((copy, v)) => vec![self.park(g, &mut r, copy, v)?],
                    None => {
                        let inputs = self.operands(g, &r, &made, node, user)?;
                        r.graph.add_copy(node, &inputs)?
                    }
                };
            match copy {
                None => r.mapped(id, node, &outputs),
                Some(i) => made[i] = outputs,
            }
            nodes.push(copy.map_or_else(
                || self.nodes[id.0 as usize].clone(),
                |i| Some(self.copies[i].placed.clone()),
            ));
        }
        let placement = Placement {
            nodes,
            copies: Vec::new(),
            solved: None,
            ..self.clone()
        };
        Ok((r.finish(g), placement))
    }

    /// Nodes, and copies by their index, by predicted start; constants first. A node without
    /// duration comes before nodes that start at the same time; ties keep the order of the graph.
    fn order(&self, g: &Graph) -> Vec<(NodeId, Option<usize>)> {
        let times = |placed: Option<&Placed>| placed.map(|p| (p.start, p.end));
        let own = g
            .nodes()
            .map(|(id, _)| (times(self.nodes[id.0 as usize].as_ref()), id, None));
        let copied = self
            .copies
            .iter()
            .enumerate()
            .map(|(i, c)| (times(Some(&c.placed)), c.node, Some(i)));
        let mut order: Vec<_> = own.chain(copied).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, id, copy)| (id, copy)).collect()
    }

    /// Adds the node that keeps an offloaded value on its device, and returns its result.
    fn park(&self, g: &Graph, r: &mut Rebuild, copy: &CopiedNode, v: ValueId) -> Result<ValueId> {
        let (node, ty) = (g.node(copy.node), g.ty(v).clone());
        let mut region = Graph::new("");
        let x = region.add_input("a0", ty.clone());
        // Pins find nodes by their paths; this one has none.
        let y = region.add1(
            Op::Reshape {
                shape: ty.shape.0.clone(),
            },
            &[x],
            &Origin::default(),
        )?;
        region.add_output("r0", y);
        let op = Op::Cluster {
            kind: ClusterKind::Map,
            anchor: 0,
            root: 0,
        };
        let made = r
            .graph
            .add_with_regions(op, &[r.get(v)], vec![region], &node.origin)?;
        // A request made of the node does not hold for its copy.
        let id = NodeId(r.graph.n_nodes() as u32 - 1);
        r.graph.node_mut(id).device = Some(Arc::new(DeviceRequest::from(
            &self.devices[copy.placed.device],
        )));
        Ok(made[0])
    }

    /// Operands of a user: results of the copies that are for it, and of the nodes themselves.
    fn operands(
        &self,
        g: &Graph,
        r: &Rebuild,
        made: &[Vec<ValueId>],
        node: &Node,
        user: User,
    ) -> Result<Vec<ValueId>> {
        let operand = |&v: &ValueId| {
            let Def::Node(maker, result) = g.value(v).def else {
                return Ok(r.get(v));
            };
            let of = |parked: Option<ValueId>| {
                let serves = |c: &CopiedNode| {
                    c.node == maker && c.parked == parked && c.users.contains(&user)
                };
                self.copies
                    .iter()
                    .position(serves)
                    .map(|copy| (copy, if parked.is_some() { 0 } else { result }))
            };
            let Some((copy, result)) = of(Some(v)).or_else(|| of(None)) else {
                return Ok(r.get(v));
            };
            let made = made[copy].get(result as usize).copied();
            made.ok_or_else(|| {
                Error::internal("a copy comes after its user").at_origin(&node.origin)
            })
        };
        node.inputs.iter().map(operand).collect()
    }
}
