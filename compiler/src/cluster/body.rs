//! Writes the clustered graph: one `cluster` node with a closed body per kernel, in topological order.

use super::{Kernel, legal, stored_by};
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, Node, NodeId, Op, Origin, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A top-level node of the clustered graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Unit {
    /// A kernel, by index.
    Kernel(usize),
    /// A node that no kernel computes.
    Node(NodeId),
}

struct Builder<'g> {
    g: &'g Graph,
    kernels: &'g [Kernel],
    /// The kernel that stores the results of each node.
    stored_by: Vec<Option<usize>>,
    out: Graph,
    values: BTreeMap<ValueId, ValueId>,
    made: BTreeMap<Unit, NodeId>,
}

/// The clustered graph of some kernels, whose operands are stored by a kernel or computed by none;
/// and its node that computes each node of `g`, none for what is in bodies alone. Of several kernels
/// that compute a node, it is the one that stores it, or else the first.
///
/// Errors are internal: kernels that wait for each other, or read a value that nothing stores.
pub fn build(g: &Graph, kernels: &[Kernel]) -> Result<(Graph, Vec<Option<NodeId>>)> {
    let mut b = Builder {
        g,
        kernels,
        stored_by: stored_by(g, kernels),
        out: g.emptied(),
        values: BTreeMap::new(),
        made: BTreeMap::new(),
    };
    b.inputs();
    let exported = b.exported();
    for unit in b.order()? {
        b.emit(unit, &exported)?;
    }
    b.outputs()?;
    let owners = b.owners();
    Ok((b.out, owners))
}

impl Builder<'_> {
    fn owners(&self) -> Vec<Option<NodeId>> {
        let stored = self.g.nodes().map(|(id, _)| self.made(self.unit(id)));
        let mut owners: Vec<Option<NodeId>> = stored.collect();
        for (i, kernel) in self.kernels.iter().enumerate() {
            for member in &kernel.members {
                let owner = &mut owners[member.0 as usize];
                *owner = owner.or(self.made(Unit::Kernel(i)));
            }
        }
        owners
    }

    /// The node that a unit became.
    fn made(&self, unit: Unit) -> Option<NodeId> {
        self.made.get(&unit).copied()
    }

    fn inputs(&mut self) {
        for (&v, name) in self.g.inputs.iter().zip(&self.g.input_names) {
            let new = self.out.add_input(name, self.g.ty(v).clone());
            self.values.insert(v, new);
        }
    }

    fn outputs(&mut self) -> Result<()> {
        for o in &self.g.outputs {
            let v = self.get(o.value)?;
            self.out.add_output(&o.name, v);
        }
        Ok(())
    }

    /// The unit that stores the results of a node, if one does.
    fn unit(&self, id: NodeId) -> Unit {
        self.stored_by[id.0 as usize].map_or(Unit::Node(id), Unit::Kernel)
    }

    fn members(&self, kernel: usize) -> impl Iterator<Item = (NodeId, &Node)> {
        let members = self.kernels[kernel].members.iter();
        members.map(|&id| (id, self.g.node(id)))
    }

    /// Operands of a kernel that it does not compute, in order of first use. Inlined scalars are not among them.
    fn operands(&self, kernel: usize) -> Vec<ValueId> {
        let mut seen = BTreeSet::new();
        let read = self.members(kernel).flat_map(|(_, n)| &n.inputs);
        read.copied()
            .filter(|&v| !self.is_inside(kernel, v) && seen.insert(v))
            .collect()
    }

    fn is_inside(&self, kernel: usize, v: ValueId) -> bool {
        let kernel = &self.kernels[kernel];
        let is_computed = matches!(self.g.value(v).def, Def::Node(d, _) if kernel.computes(d));
        is_computed || self.is_inlined(v)
    }

    /// Constants of one element live inside the bodies that use them.
    fn is_inlined(&self, v: ValueId) -> bool {
        self.g.constant(v).is_some_and(|t| t.len() == 1)
    }

    /// Nodes that stay at top level: constants, control flow, state, transfers.
    fn top_level(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let nodes = self.g.nodes();
        nodes.filter(|(_, n)| legal::kind_of(&n.op).is_none())
    }

    /// Values that another unit, or the outside, reads, and those that another unit waits for.
    fn exported(&self) -> BTreeSet<ValueId> {
        let mut values: BTreeSet<ValueId> = self.g.outputs.iter().map(|o| o.value).collect();
        for kernel in 0..self.kernels.len() {
            values.extend(self.operands(kernel));
        }
        for (_, node) in self.top_level() {
            values.extend(&node.inputs);
        }
        values.extend(self.g.awaited());
        values
    }

    /// Units in topological order; of the ready ones the one with the earliest last member comes first.
    fn order(&self) -> Result<Vec<Unit>> {
        let kernels = (0..self.kernels.len()).map(Unit::Kernel);
        let nodes = self.top_level().map(|(id, _)| Unit::Node(id));
        let units: BTreeSet<Unit> = kernels.chain(nodes).collect();
        let mut n_waits: BTreeMap<Unit, usize> = BTreeMap::new();
        let mut users: BTreeMap<Unit, Vec<Unit>> = BTreeMap::new();
        for &unit in &units {
            let dependencies = self.dependencies(unit, &units);
            n_waits.insert(unit, dependencies.len());
            for d in dependencies {
                users.entry(d).or_default().push(unit);
            }
        }
        let order = self.released(n_waits, &users);
        if order.len() < units.len() {
            return Err(Error::internal("kernels wait for each other"));
        }
        Ok(order)
    }

    /// Units in the order in which nothing that they wait for is left (Kahn's algorithm).
    fn released(
        &self,
        mut n_waits: BTreeMap<Unit, usize>,
        users: &BTreeMap<Unit, Vec<Unit>>,
    ) -> Vec<Unit> {
        let first = n_waits.iter().filter(|(_, n)| **n == 0);
        let mut ready: BTreeSet<_> = first.map(|(&u, _)| (self.last_member(u), u)).collect();
        let mut order = Vec::new();
        while let Some((_, unit)) = ready.pop_first() {
            order.push(unit);
            for &user in users.get(&unit).into_iter().flatten() {
                let n = n_waits.get_mut(&user).expect("every unit waits");
                *n -= 1;
                if *n == 0 {
                    ready.insert((self.last_member(user), user));
                }
            }
        }
        order
    }

    fn last_member(&self, unit: Unit) -> NodeId {
        match unit {
            Unit::Kernel(kernel) => {
                let members = &self.kernels[kernel].members;
                *members.last().expect("a kernel has members")
            }
            Unit::Node(id) => id,
        }
    }

    /// The units that must run before another. Values that no unit computes need no wait.
    fn dependencies(&self, unit: Unit, units: &BTreeSet<Unit>) -> BTreeSet<Unit> {
        let needs = match unit {
            Unit::Kernel(kernel) => self.operands(kernel),
            Unit::Node(id) => self.g.node(id).inputs.clone(),
        };
        let defining = needs.iter().filter_map(|&v| match self.g.value(v).def {
            Def::Node(d, _) => Some(self.unit(d)),
            Def::Input(_) => None,
        });
        let mut all: BTreeSet<Unit> = defining.collect();
        all.extend(self.control_dependencies(unit).intersection(units));
        all.remove(&unit);
        all
    }

    /// Units that must run before one although it reads nothing of theirs. Kernels of several nodes have none.
    fn control_dependencies(&self, unit: Unit) -> BTreeSet<Unit> {
        let nodes = match unit {
            Unit::Node(id) => vec![id],
            Unit::Kernel(kernel) => self.kernels[kernel].members.clone(),
        };
        let control = nodes.iter().flat_map(|&id| &self.g.node(id).control);
        control.map(|&c| self.unit(c)).collect()
    }

    fn emit(&mut self, unit: Unit, exported: &BTreeSet<ValueId>) -> Result<()> {
        let made = match unit {
            Unit::Node(id) => self.copy(id)?,
            Unit::Kernel(kernel) => Some(self.emit_kernel(kernel, exported)?),
        };
        if let Some(id) = made {
            let earlier = self.control_dependencies(unit);
            let control = earlier.iter().filter_map(|&u| self.made(u));
            self.out.node_mut(id).control = control.collect();
            self.made.insert(unit, id);
        }
        Ok(())
    }

    fn get(&self, v: ValueId) -> Result<ValueId> {
        self.values.get(&v).copied().ok_or_else(|| {
            Error::internal(format!(
                "a cluster reads value {} which no cluster computes",
                v.0
            ))
        })
    }

    fn get_all(&self, values: &[ValueId]) -> Result<Vec<ValueId>> {
        values.iter().map(|&v| self.get(v)).collect()
    }

    fn last_node(&self) -> NodeId {
        NodeId(self.out.n_nodes() as u32 - 1)
    }

    /// Copies a top-level node; regions of control flow are clustered when they are compiled. A constant that lives in the
    /// bodies of its users alone gives none.
    fn copy(&mut self, id: NodeId) -> Result<Option<NodeId>> {
        let node = self.g.node(id);
        if matches!(node.op, Op::Constant { .. }) && !self.is_read_outside_bodies(node.outputs[0]) {
            return Ok(None);
        }
        let inputs = self.get_all(&node.inputs)?;
        let outputs = self.out.add_copy(node, &inputs)?;
        self.values
            .extend(node.outputs.iter().copied().zip(outputs));
        Ok(Some(self.last_node()))
    }

    fn is_read_outside_bodies(&self, v: ValueId) -> bool {
        !self.is_inlined(v)
            || self.g.outputs.iter().any(|o| o.value == v)
            || self.top_level().any(|(_, node)| node.inputs.contains(&v))
    }

    fn emit_kernel(&mut self, kernel: usize, exported: &BTreeSet<ValueId>) -> Result<NodeId> {
        let k = &self.kernels[kernel];
        let operands = self.operands(kernel);
        let results = k.roots.iter().flat_map(|&root| &self.g.node(root).outputs);
        let results: Vec<ValueId> = results.copied().filter(|v| exported.contains(v)).collect();
        let last = k
            .roots
            .last()
            .ok_or_else(|| Error::internal("a kernel stores nothing"))?;
        let body = Body::of(self.g, k, &operands, &results)?;
        let op = Op::Cluster {
            kind: k.kind,
            anchor: body.nodes[&k.anchor].0 as usize,
            root: body.nodes[last].0 as usize,
        };
        let anchor = self.g.node(k.anchor);
        let inputs = self.get_all(&operands)?;
        let outputs = self
            .out
            .add_with_regions(op, &inputs, vec![body.graph], &anchor.origin)?;
        let id = self.last_node();
        self.out.node_mut(id).device = anchor.device.clone();
        self.values.extend(results.into_iter().zip(outputs));
        Ok(id)
    }
}

/// The body of a cluster under construction.
struct Body<'g> {
    g: &'g Graph,
    graph: Graph,
    values: BTreeMap<ValueId, ValueId>,
    nodes: BTreeMap<NodeId, NodeId>,
}

impl<'g> Body<'g> {
    fn of(
        g: &'g Graph,
        kernel: &Kernel,
        operands: &[ValueId],
        results: &[ValueId],
    ) -> Result<Body<'g>> {
        let mut body = Body::new(g, operands);
        for &id in &kernel.members {
            body.add(id)?;
        }
        body.finish(results);
        Ok(body)
    }

    fn new(g: &'g Graph, operands: &[ValueId]) -> Body<'g> {
        let mut graph = Graph::new("body");
        let mut values = BTreeMap::new();
        for (i, &v) in operands.iter().enumerate() {
            let new = graph.add_input(&format!("a{i}"), g.ty(v).clone());
            values.insert(v, new);
        }
        Body {
            g,
            graph,
            values,
            nodes: BTreeMap::new(),
        }
    }

    fn add(&mut self, id: NodeId) -> Result<()> {
        let node = self.g.node(id);
        let inputs: Vec<ValueId> = node.inputs.iter().map(|&v| self.operand(v)).collect();
        let outputs = self.graph.add_copy(node, &inputs)?;
        self.values
            .extend(node.outputs.iter().copied().zip(outputs));
        let last = NodeId(self.graph.n_nodes() as u32 - 1);
        self.nodes.insert(id, last);
        Ok(())
    }

    /// A value inside; a constant of one element is added when it is first read.
    fn operand(&mut self, v: ValueId) -> ValueId {
        if let (Some(t), false) = (self.g.single(v), self.values.contains_key(&v)) {
            let constant = self.graph.add_constant(t.clone(), &Origin::default());
            self.values.insert(v, constant);
        }
        self.values[&v]
    }

    fn finish(&mut self, results: &[ValueId]) {
        for (i, v) in results.iter().enumerate() {
            self.graph.add_output(&format!("r{i}"), self.values[v]);
        }
    }
}
