//! Partition: a placed graph becomes one graph per device, joined by `send` and `recv`.
//!
//! Requires a placement of all nodes but constants. After: each tensor that crosses to a device has exactly one `send` and one `recv` for that
//! device, however many consumers are there; constants are copied to every device that uses them; graph inputs belong to all devices that use
//! them; each output belongs to the device that makes it (inputs and constants that are outputs, to the first device). A control edge that
//! crosses becomes a transfer, of a tensor that crosses anyway or else of one `bool`.
//!
//! The ranks of an all-reduce by a library become `collective` nodes, which take the operand of their device only; a control edge to one is waited for
//! by all.
//!
//! All partitions list their nodes in one common order, that of the predicted starts: a `send` stands right after the node that makes the
//! tensor, a `recv` right before the first node that needs it, the ranks of an all-reduce side by side, tokens ([`tokens`]) at the end.
//! [`crate::schedule`] relies on this for freedom from deadlock.

pub mod check;
mod collective;
mod print;
mod tokens;

use crate::error::{Error, Result};
use crate::ir::{Def, DeviceRequest, Graph, Node, NodeId, Op, Origin, Type, ValueId};
use crate::place::Placement;
use crate::{DType, Tensor};
use collective::Ranks;
use gristmill_runtime::device::DeviceName;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub use print::to_text;
pub use tokens::add_tokens;

/// The share of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The device.
    pub device: DeviceName,
    /// Its nodes.
    pub graph: Graph,
    /// Index in the whole graph of each input.
    pub inputs: Vec<u32>,
    /// Index in the whole graph of each output.
    pub outputs: Vec<u32>,
    /// The node of the whole graph for each node; `None` for transfers and their tokens.
    pub nodes: Vec<Option<NodeId>>,
    /// True where variables may be changed in place: when an update begins, nothing can fail any more. See [`add_tokens`].
    pub updates_in_place: bool,
}

impl Part {
    /// The only part of a graph that runs on one device.
    pub fn whole(device: DeviceName, graph: Graph) -> Part {
        let (inputs, outputs) = (
            (0..graph.inputs.len() as u32).collect(),
            (0..graph.outputs.len() as u32).collect(),
        );
        let nodes = graph.nodes().map(|(id, _)| Some(id)).collect();
        Part {
            graph,
            inputs,
            outputs,
            nodes,
            updates_in_place: !device.kind.has_own_memory(),
            device,
        }
    }

    /// Adds a node; `old` is its original in the whole graph.
    fn add(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        regions: Vec<Graph>,
        origin: &Origin,
        old: Option<NodeId>,
    ) -> Result<(NodeId, Vec<ValueId>)> {
        let outputs = self.graph.add_with_regions(op, inputs, regions, origin)?;
        let id = NodeId(self.graph.n_nodes() as u32 - 1);
        self.graph.node_mut(id).device = Some(Arc::new(DeviceRequest::from(&self.device)));
        self.nodes.push(old);
        Ok((id, outputs))
    }

    /// Adds a transfer of one `bool`, after given nodes.
    fn send_token(
        &mut self,
        key: String,
        to: &DeviceName,
        after: &[NodeId],
        origin: &Origin,
    ) -> Result<()> {
        let token = Op::constant(Tensor::from_bytes(DType::Bool, &[1], &[1])?);
        let (_, token) = self.add(token, &[], Vec::new(), origin, None)?;
        let to = to.to_string();
        let (send, _) = self.add(Op::Send { key, to }, &token, Vec::new(), origin, None)?;
        self.graph.node_mut(send).control = after.to_vec();
        Ok(())
    }

    /// Adds the other end of [`Part::send_token`].
    fn recv_token(&mut self, key: String, from: &DeviceName, origin: &Origin) -> Result<NodeId> {
        let token = Type::new(DType::Bool, [1usize]);
        let op = Op::Recv {
            key,
            from: from.to_string(),
            dtype: token.dtype,
            shape: token.shape.0,
        };
        Ok(self.add(op, &[], Vec::new(), origin, None)?.0)
    }
}

/// Splits a graph by its placement. Devices with nothing to do get no part; there is always at least one.
///
/// Copies of nodes must be nodes of their own: see [`Placement::expand`].
pub fn partition(g: &Graph, placement: &Placement) -> Result<Vec<Part>> {
    if !placement.copies.is_empty() {
        return Err(Error::internal(
            "a placement with copies came to the partitioner",
        ));
    }
    let order = common_order(g, placement)?;
    let mut used: BTreeSet<usize> = order
        .iter()
        .filter_map(|&id| placement.device_of(id))
        .collect();
    let first = *used.first().unwrap_or(&0);
    used.insert(first);
    if used.iter().any(|&d| d >= placement.devices.len()) {
        return Err(Error::internal(format!(
            "the placement names device {used:?} of {}",
            placement.devices.len()
        )));
    }
    let mut s = Splitter::new(g, placement, &used, first);
    s.ranks = collective::ranks(g, placement)?;
    for id in order {
        s.emit(id)?;
    }
    s.add_outputs()?;
    Ok(s.parts.into_values().collect())
}

/// Nodes but constants by predicted start; in the graph's own order when only one device is used.
fn common_order(g: &Graph, placement: &Placement) -> Result<Vec<NodeId>> {
    let mut order: Vec<(u64, NodeId)> = Vec::new();
    for (id, node) in g
        .nodes()
        .filter(|(_, n)| !matches!(n.op, Op::Constant { .. }))
    {
        let placed = placement.nodes.get(id.0 as usize).and_then(Option::as_ref);
        let placed = placed.ok_or_else(|| {
            Error::internal(format!("{} was not placed", node.op.name())).at_origin(&node.origin)
        })?;
        order.push((placed.start.0, id));
    }
    let devices = placement.nodes.iter().flatten().map(|p| p.device);
    let devices: BTreeSet<usize> = devices.collect();
    if devices.len() > 1 {
        order.sort_unstable();
    }
    collective::side_by_side(g, order.into_iter().map(|(_, id)| id).collect())
}

/// Where a tensor of the whole graph is on one device.
type Values = BTreeMap<ValueId, ValueId>;

struct Splitter<'g> {
    g: &'g Graph,
    placement: &'g Placement,
    parts: BTreeMap<usize, Part>,
    /// By device: values that are there.
    values: BTreeMap<usize, Values>,
    /// New id of each node, on its device.
    new_ids: Vec<Option<NodeId>>,
    /// Devices but its own on which each value is needed.
    wanted: BTreeMap<ValueId, BTreeSet<usize>>,
    /// Devices that wait for the end of a node but need none of its results.
    signals: BTreeMap<NodeId, BTreeSet<usize>>,
    /// `recv` nodes by source node and device, the first one each.
    received: BTreeMap<(NodeId, usize), NodeId>,
    /// Device of inputs and constants that are outputs.
    first: usize,
    /// Devices of the ranks of each all-reduce.
    ranks: Ranks,
}

impl<'g> Splitter<'g> {
    fn new(
        g: &'g Graph,
        placement: &'g Placement,
        used: &BTreeSet<usize>,
        first: usize,
    ) -> Splitter<'g> {
        let part = |&d: &usize| {
            let graph = g.emptied();
            (
                d,
                Part {
                    device: placement.devices[d].clone(),
                    graph,
                    inputs: Vec::new(),
                    outputs: Vec::new(),
                    nodes: Vec::new(),
                    updates_in_place: false,
                },
            )
        };
        let mut s = Splitter {
            g,
            placement,
            parts: used.iter().map(part).collect(),
            values: used.iter().map(|&d| (d, Values::new())).collect(),
            new_ids: vec![None; g.n_nodes()],
            wanted: BTreeMap::new(),
            signals: BTreeMap::new(),
            received: BTreeMap::new(),
            first,
            ranks: Ranks::new(),
        };
        s.find_crossings();
        s.add_inputs();
        s
    }

    fn part(&mut self, d: usize) -> &mut Part {
        self.parts
            .get_mut(&d)
            .expect("every device in use has a part")
    }

    /// Declares that `new` is value `v` on device `d`.
    fn set(&mut self, d: usize, v: ValueId, new: ValueId) {
        self.values
            .get_mut(&d)
            .expect("every device in use has values")
            .insert(v, new);
    }

    fn device(&self, id: NodeId) -> Option<usize> {
        self.placement.device_of(id)
    }

    /// Device that makes a value; `None` for inputs and constants, which are everywhere.
    fn source(&self, v: ValueId) -> Option<usize> {
        match self.g.value(v).def {
            Def::Node(id, _) => self.device(id),
            Def::Input(_) => None,
        }
    }

    fn find_crossings(&mut self) {
        for (id, node) in self.g.nodes() {
            let Some(d) = self.device(id) else { continue };
            for (i, &v) in node.inputs.iter().enumerate() {
                if !node.only_orders(i) && self.source(v).is_some_and(|s| s != d) {
                    self.wanted.entry(v).or_default().insert(d);
                }
            }
        }
        for (id, node) in self.g.nodes() {
            let Some(d) = self.device(id) else { continue };
            for &c in &node.control {
                let crosses = self.device(c).is_some_and(|s| s != d);
                let has_tensor = self.crossing_result(c, d).is_some();
                if crosses && !has_tensor {
                    self.signals.entry(c).or_default().insert(d);
                }
            }
        }
    }

    /// A result of node `c` that device `d` receives.
    fn crossing_result(&self, c: NodeId, d: usize) -> Option<ValueId> {
        let mut results = self.g.node(c).outputs.iter().copied();
        results.find(|v| self.wanted.get(v).is_some_and(|w| w.contains(&d)))
    }

    fn add_inputs(&mut self) {
        let g = self.g;
        let users = self.devices_of_values();
        for (i, (&v, name)) in (0..).zip(g.inputs.iter().zip(&g.input_names)) {
            for &d in &users[v.0 as usize] {
                let part = self.part(d);
                part.inputs.push(i);
                let new = part.graph.add_input(name, g.ty(v).clone());
                self.set(d, v, new);
            }
        }
    }

    /// Devices that use each value.
    fn devices_of_values(&self) -> Vec<BTreeSet<usize>> {
        let mut users: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.g.n_values()];
        for (id, node) in self.g.nodes() {
            let needed = (0..node.inputs.len()).filter(|&i| !node.only_orders(i));
            needed.for_each(|i| users[node.inputs[i].0 as usize].extend(self.device(id)));
        }
        for o in &self.g.outputs {
            users[o.value.0 as usize].insert(self.first);
        }
        users
    }

    /// Adds a node to a device's graph; `old` is the node that it stands for.
    fn add(
        &mut self,
        d: usize,
        op: Op,
        inputs: &[ValueId],
        regions: Vec<Graph>,
        origin: &Origin,
        old: Option<NodeId>,
    ) -> Result<(NodeId, Vec<ValueId>)> {
        self.part(d).add(op, inputs, regions, origin, old)
    }

    fn add_control(&mut self, d: usize, id: NodeId, before: NodeId) {
        let control = &mut self.part(d).graph.node_mut(id).control;
        if !control.contains(&before) {
            control.push(before);
        }
    }

    fn emit(&mut self, id: NodeId) -> Result<()> {
        let node = self.g.node(id);
        let d = self
            .device(id)
            .ok_or_else(|| Error::internal("a node without device is in the order"))?;
        let needed = (0..node.inputs.len()).filter(|&i| !node.only_orders(i));
        let inputs = needed
            .map(|i| self.get(node.inputs[i], d))
            .collect::<Result<Vec<_>>>()?;
        let control = node
            .control
            .iter()
            .filter_map(|&c| self.after(c, d).transpose())
            .collect::<Result<Vec<_>>>()?;
        let op = collective::in_part(&node.op, &self.ranks).unwrap_or_else(|| node.op.clone());
        let (new, outputs) =
            self.add(d, op, &inputs, node.regions.clone(), &node.origin, Some(id))?;
        control
            .into_iter()
            .for_each(|c| self.add_control(d, new, c));
        self.new_ids[id.0 as usize] = Some(new);
        for (&v, &new) in node.outputs.iter().zip(&outputs) {
            self.set(d, v, new);
        }
        self.send_results(id, node, d)
    }

    fn send_results(&mut self, id: NodeId, node: &Node, d: usize) -> Result<()> {
        for &v in &node.outputs {
            for to in self.wanted.get(&v).cloned().unwrap_or_default() {
                let operand = self.get(v, d)?;
                let op = self.send_op(value_key(v), to);
                self.add(d, op, &[operand], Vec::new(), &node.origin, None)?;
            }
        }
        for to in self.signals.get(&id).cloned().unwrap_or_default() {
            let own = self.new_ids[id.0 as usize].expect("the node was just added");
            let placement = self.placement;
            let to = &placement.devices[to];
            self.part(d)
                .send_token(signal_key(id), to, &[own], &node.origin)?;
        }
        Ok(())
    }

    fn send_op(&self, key: String, to: usize) -> Op {
        let to = self.placement.devices[to].to_string();
        Op::Send { key, to }
    }

    fn recv(
        &mut self,
        from_node: NodeId,
        key: String,
        ty: &Type,
        d: usize,
    ) -> Result<(NodeId, ValueId)> {
        let from = self
            .device(from_node)
            .ok_or_else(|| Error::internal("a constant does not need to be received"))?;
        let from = self.placement.devices[from].to_string();
        let op = Op::Recv {
            key,
            from,
            dtype: ty.dtype,
            shape: ty.shape.0.clone(),
        };
        let origin = self.g.node(from_node).origin.clone();
        let (id, outputs) = self.add(d, op, &[], Vec::new(), &origin, None)?;
        self.received.entry((from_node, d)).or_insert(id);
        Ok((id, outputs[0]))
    }

    /// A value on device `d`: there already, a constant to copy, or a tensor to receive.
    fn get(&mut self, v: ValueId, d: usize) -> Result<ValueId> {
        if let Some(&new) = self.values[&d].get(&v) {
            return Ok(new);
        }
        let Def::Node(source, _) = self.g.value(v).def else {
            return Err(Error::internal(format!(
                "input {} is not on the device that uses it",
                v.0
            )));
        };
        let node = self.g.node(source);
        let new = if matches!(node.op, Op::Constant { .. }) {
            self.add(
                d,
                node.op.clone(),
                &[],
                Vec::new(),
                &node.origin,
                Some(source),
            )?
            .1[0]
        } else if self.new_ids[source.0 as usize].is_some() {
            self.recv(source, value_key(v), self.g.ty(v), d)?.1
        } else {
            return Err(
                Error::internal("the placement starts a node before its operand is made")
                    .at_origin(&node.origin),
            );
        };
        self.set(d, v, new);
        Ok(new)
    }

    /// The node of device `d` after which `c` has run; `None` for constants.
    fn after(&mut self, c: NodeId, d: usize) -> Result<Option<NodeId>> {
        let Some(source) = self.device(c) else {
            return Ok(None);
        };
        if self.new_ids[c.0 as usize].is_none() {
            let error = Error::internal(
                "the placement starts a node before one that its control edge names",
            );
            return Err(error.at_origin(&self.g.node(c).origin));
        }
        if source == d {
            return Ok(self.new_ids[c.0 as usize]);
        }
        if let Some(&recv) = self.received.get(&(c, d)) {
            return Ok(Some(recv));
        }
        match self.crossing_result(c, d) {
            Some(v) => {
                self.get(v, d)?;
                Ok(self.received.get(&(c, d)).copied())
            }
            None => {
                let (from, g) = (&self.placement.devices[source], self.g);
                let origin = &g.node(c).origin;
                let recv = self.part(d).recv_token(signal_key(c), from, origin)?;
                self.received.insert((c, d), recv);
                Ok(Some(recv))
            }
        }
    }

    fn add_outputs(&mut self) -> Result<()> {
        for (i, o) in self.g.outputs.iter().enumerate() {
            let d = self.source(o.value).unwrap_or(self.first);
            let v = self.get(o.value, d)?;
            let part = self.part(d);
            part.graph.add_output(&o.name, v);
            part.outputs.push(i as u32);
        }
        Ok(())
    }
}

/// Name of the transfers of a value; unique per graph.
fn value_key(v: ValueId) -> String {
    format!("v{}", v.0)
}

/// Name of the transfers that only say that a node has run.
fn signal_key(id: NodeId) -> String {
    format!("after #{}", id.0)
}

#[cfg(test)]
mod tests;
