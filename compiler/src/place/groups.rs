//! Groups of nodes that kernels stay within, so that the placer can have the groups apart.

use super::{Placed, Placement};
use crate::cost::Nanos;
use crate::ir::{AskedBy, Def, Graph, Node, NodeId, OpClass, ValueId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Name of a group of [`DeviceRequest::groups`](crate::ir::DeviceRequest::groups).
pub type Group = Arc<str>;

/// Start of the names of the groups that keep ops of different devices apart. Groups, not devices:
/// a request that the model or a pin makes stays as it is.
const PREFIX: &str = "//first placement on ";

/// A group for each line of ops without a join, by node: an op that reads results of several others
/// begins a line, unless all that one of them does is to join others.
pub fn lines(g: &Graph) -> Vec<Option<Group>> {
    let mut groups: Vec<Option<Group>> = vec![None; g.n_nodes()];
    let mut only_joins = vec![false; g.n_nodes()];
    for (id, node) in g.nodes() {
        let makers: BTreeSet<NodeId> = node.inputs.iter().filter_map(|&v| maker(g, v)).collect();
        let joined = makers.iter().find(|m| only_joins[m.0 as usize]);
        let is_map = matches!(node.op.class(), OpClass::Map | OpClass::View);
        let (i, before) = (id.0 as usize, joined.or(makers.first()));
        only_joins[i] = is_map && (makers.len() > 1 || joined.is_some());
        groups[i] = match before {
            Some(before) if makers.len() == 1 || is_map && joined.is_some() => {
                groups[before.0 as usize].clone()
            }
            Some(_) => Some(format!("{PREFIX}{i}").into()),
            None => None,
        };
    }
    groups
}

/// The node that computes a value, unless it is a constant.
fn maker(g: &Graph, v: ValueId) -> Option<NodeId> {
    match g.value(v).def {
        Def::Node(maker, _) if g.constant(v).is_none() => Some(maker),
        _ => None,
    }
}

/// A group for each device of a placement, by node.
pub fn by_device(placed: &Placement) -> Vec<Option<Group>> {
    let groups = placed.nodes.iter().map(|node| {
        let device = &placed.devices[node.as_ref()?.device];
        Some(format!("{PREFIX}{device}").into())
    });
    groups.collect()
}

/// A group for each time that a device of a placement is busy without a pause, by node. An op after
/// a pause waits for another device: fused with one before, it would make that one wait as well.
pub fn by_busy_time(placed: &Placement) -> Vec<Option<Group>> {
    let nodes = placed.nodes.iter().enumerate();
    let mut order: Vec<(usize, &Placed)> =
        nodes.filter_map(|(i, n)| Some((i, n.as_ref()?))).collect();
    order.sort_by_key(|(i, n)| (n.device, n.start, *i));
    let mut groups = vec![None; placed.nodes.len()];
    let mut n_groups = 0;
    let mut busy: Option<(usize, Nanos)> = None;
    for (i, node) in order {
        let until = match busy {
            Some((device, until)) if device == node.device && node.start <= until => until,
            _ => {
                n_groups += 1;
                node.start
            }
        };
        busy = Some((node.device, until.max(node.end)));
        groups[i] = Some(format!("{PREFIX}{n_groups}").into());
    }
    groups
}

/// The graph with its nodes in groups.
pub fn grouped(g: &Graph, groups: &[Option<Group>]) -> Graph {
    let mut grouped = g.clone();
    for (id, group) in ids(g).zip(groups) {
        if let Some(group) = group {
            enter(grouped.node_mut(id), group);
        }
    }
    grouped
}

fn ids(g: &Graph) -> impl Iterator<Item = NodeId> + use<> {
    (0..g.n_nodes() as u32).map(NodeId)
}

/// Puts a node into a group.
fn enter(node: &mut Node, group: &Group) {
    let mut request = node.device.as_deref().cloned().unwrap_or_default();
    request.groups.insert(group.clone(), AskedBy::default());
    node.device = request.into_requested();
}

/// Takes nodes out of the groups of first placements, in bodies of kernels too.
pub fn leave(g: &mut Graph) {
    for id in ids(g) {
        let node = g.node_mut(id);
        if let Some(mut request) = node.device.as_deref().cloned() {
            request.groups.retain(|group, _| !group.starts_with(PREFIX));
            node.device = request.into_requested();
        }
        node.regions.iter_mut().for_each(leave);
    }
}

impl Placement {
    /// True if several devices have nodes.
    pub(crate) fn is_spread(&self) -> bool {
        let mut devices = self.nodes.iter().flatten().map(|p| p.device);
        let first = devices.next();
        devices.any(|d| Some(d) != first)
    }
}
