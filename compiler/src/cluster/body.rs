//! Writes the clustered graph: one `cluster` node with a closed body per group, in topological order.

use super::group::Grouping;
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, Node, NodeId, Op, Origin, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// What becomes one top-level node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Unit {
    Group(usize),
    Node(NodeId),
}

struct Builder<'g> {
    g: &'g Graph,
    grouping: &'g Grouping,
    out: Graph,
    values: BTreeMap<ValueId, ValueId>,
    made: BTreeMap<Unit, NodeId>,
}

/// The clustered graph.
pub fn build(g: &Graph, grouping: &Grouping) -> Result<Graph> {
    let mut b = Builder {
        g,
        grouping,
        out: Graph::new(&g.name),
        values: BTreeMap::new(),
        made: BTreeMap::new(),
    };
    for (&v, name) in g.inputs.iter().zip(&g.input_names) {
        let new = b.out.add_input(name, g.ty(v).clone());
        b.values.insert(v, new);
    }
    let exported = b.exported();
    for unit in b.order()? {
        match unit {
            Unit::Node(id) => b.copy(id)?,
            Unit::Group(group) => b.emit(group, &exported)?,
        }
        b.order_last(unit);
    }
    for o in &g.outputs {
        let v = b.get(o.value)?;
        b.out.add_output(&o.name, v);
    }
    Ok(b.out)
}

impl Builder<'_> {
    fn unit(&self, id: NodeId) -> Unit {
        self.grouping.home[id.0 as usize].map_or(Unit::Node(id), Unit::Group)
    }

    fn members(&self, group: usize) -> impl Iterator<Item = (NodeId, &Node)> {
        self.grouping.groups[group]
            .members
            .iter()
            .map(|&id| (id, self.g.node(id)))
    }

    /// Operands of a group that are not computed inside, in order of first use. Inlined scalars are not among them.
    fn operands(&self, group: usize) -> Vec<ValueId> {
        let members = &self.grouping.groups[group].members;
        let mut seen = BTreeSet::new();
        let inside = |v: ValueId| {
            matches!(self.g.value(v).def, Def::Node(d, _) if members.contains(&d))
                || self.is_inlined(v)
        };
        self.members(group)
            .flat_map(|(_, n)| n.inputs.iter().copied())
            .filter(|&v| !inside(v) && seen.insert(v))
            .collect()
    }

    /// Constants of one element live inside the bodies that use them.
    fn is_inlined(&self, v: ValueId) -> bool {
        self.g.constant(v).is_some_and(|t| t.len() == 1)
    }

    /// Nodes that stay at top level and are not constants.
    fn top_level(&self) -> impl Iterator<Item = NodeId> {
        let is_top = |(id, n): &(NodeId, &Node)| {
            super::legal::kind_of(&n.op).is_none() && self.grouping.home[id.0 as usize].is_none()
        };
        self.g.nodes().filter(is_top).map(|(id, _)| id)
    }

    /// Values that some unit other than their own, or the outside, reads.
    fn exported(&self) -> BTreeSet<ValueId> {
        let mut values: BTreeSet<ValueId> = self.g.outputs.iter().map(|o| o.value).collect();
        for group in 0..self.grouping.groups.len() {
            values.extend(self.operands(group));
        }
        for id in self.top_level() {
            values.extend(self.g.node(id).inputs.iter().copied());
        }
        values
    }

    fn needs(&self, unit: Unit) -> Vec<ValueId> {
        match unit {
            Unit::Group(group) => self.operands(group),
            Unit::Node(id) => self.g.node(id).inputs.clone(),
        }
    }

    /// Units in topological order; among the ready ones that with the least last member comes first.
    fn order(&self) -> Result<Vec<Unit>> {
        let units: BTreeSet<Unit> = (0..self.grouping.groups.len())
            .map(Unit::Group)
            .chain(self.top_level().map(Unit::Node))
            .collect();
        let mut waiting: BTreeMap<Unit, usize> = BTreeMap::new();
        let mut users: BTreeMap<Unit, Vec<Unit>> = BTreeMap::new();
        for &unit in &units {
            let mut deps: BTreeSet<Unit> = self
                .needs(unit)
                .iter()
                .filter_map(|&v| self.defining_unit(v))
                .collect();
            // What no unit computes is not run, so there is nothing to wait for.
            deps.extend(self.control_deps(unit).intersection(&units));
            deps.remove(&unit);
            waiting.insert(unit, deps.len());
            deps.iter()
                .for_each(|d| users.entry(*d).or_default().push(unit));
        }
        let rank = |u: Unit| match u {
            Unit::Group(group) => (
                *self.grouping.groups[group]
                    .members
                    .last()
                    .expect("a group has members"),
                u,
            ),
            Unit::Node(id) => (id, u),
        };
        let mut ready: BTreeSet<(NodeId, Unit)> = waiting
            .iter()
            .filter(|(_, n)| **n == 0)
            .map(|(u, _)| rank(*u))
            .collect();
        let mut order = Vec::new();
        while let Some((_, unit)) = ready.pop_first() {
            order.push(unit);
            for user in users.get(&unit).into_iter().flatten() {
                let n = waiting.get_mut(user).expect("every unit waits");
                *n -= 1;
                if *n == 0 {
                    ready.insert(rank(*user));
                }
            }
        }
        if order.len() == units.len() {
            Ok(order)
        } else {
            Err(Error::internal("the grouping is not convex"))
        }
    }

    fn defining_unit(&self, v: ValueId) -> Option<Unit> {
        match self.g.value(v).def {
            Def::Node(d, _) => Some(self.unit(d)),
            Def::Input(_) => None,
        }
    }

    /// Units that must run before one although it reads nothing of theirs. Groups of several nodes have none.
    fn control_deps(&self, unit: Unit) -> BTreeSet<Unit> {
        let of = |id: NodeId| self.g.node(id).control.iter().map(|&c| self.unit(c));
        match unit {
            Unit::Node(id) => of(id).collect(),
            Unit::Group(group) => self.grouping.groups[group]
                .members
                .iter()
                .flat_map(|&id| of(id))
                .collect(),
        }
    }

    /// Notes which node the unit became, if it did, and gives it the unit's control edges.
    fn order_last(&mut self, unit: Unit) {
        let last = NodeId((self.out.n_nodes() as u32).saturating_sub(1));
        if self.out.n_nodes() == self.made.len() {
            return;
        }
        let control = self
            .control_deps(unit)
            .iter()
            .filter_map(|u| self.made.get(u).copied())
            .collect();
        self.out.node_mut(last).control = control;
        self.made.insert(unit, last);
    }

    fn get(&self, v: ValueId) -> Result<ValueId> {
        self.values.get(&v).copied().ok_or_else(|| {
            Error::internal(format!(
                "a cluster reads value {} which no cluster computes",
                v.0
            ))
        })
    }

    /// Top-level nodes: constants, control flow (whose regions are clustered when they are compiled), state.
    fn copy(&mut self, id: NodeId) -> Result<()> {
        let node = self.g.node(id);
        let is_used = |v: &ValueId| {
            !self.is_inlined(*v)
                || self.g.outputs.iter().any(|o| o.value == *v)
                || self.read_at_top_level(*v)
        };
        if matches!(node.op, Op::Constant { .. }) && !node.outputs.iter().any(is_used) {
            return Ok(());
        }
        let inputs = node
            .inputs
            .iter()
            .map(|&v| self.get(v))
            .collect::<Result<Vec<_>>>()?;
        let outputs = self.out.add_copy(node, &inputs)?;
        self.values
            .extend(node.outputs.iter().copied().zip(outputs));
        Ok(())
    }

    fn read_at_top_level(&self, v: ValueId) -> bool {
        self.top_level()
            .any(|id| self.g.node(id).inputs.contains(&v))
    }

    fn emit(&mut self, group: usize, exported: &BTreeSet<ValueId>) -> Result<()> {
        let operands = self.operands(group);
        let anchor = self.g.node(self.grouping.groups[group].anchor);
        let kind = self.grouping.groups[group].kind;
        let mut body = Graph::new("body");
        let mut inner: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        for (i, &v) in operands.iter().enumerate() {
            let new = body.add_input(&format!("a{i}"), self.g.ty(v).clone());
            inner.insert(v, new);
        }
        let mut results = Vec::new();
        for (id, node) in self.members(group) {
            let mut inputs = Vec::new();
            for v in &node.inputs {
                if let Some(t) = self.g.single(*v) {
                    inner
                        .entry(*v)
                        .or_insert_with(|| body.add_constant(t.clone(), &Origin::default()));
                }
                inputs.push(inner[v]);
            }
            let outputs = body.add_copy(node, &inputs)?;
            inner.extend(node.outputs.iter().copied().zip(outputs));
            if self.grouping.home[id.0 as usize] == Some(group) {
                results.extend(
                    node.outputs
                        .iter()
                        .copied()
                        .filter(|v| exported.contains(v)),
                );
            }
        }
        results
            .iter()
            .enumerate()
            .for_each(|(i, v)| body.add_output(&format!("r{i}"), inner[v]));
        let inputs = operands
            .iter()
            .map(|&v| self.get(v))
            .collect::<Result<Vec<_>>>()?;
        let origin = self.origin(group);
        let outputs =
            self.out
                .add_with_regions(Op::Cluster { kind }, &inputs, vec![body], &origin)?;
        let last = NodeId(self.out.n_nodes() as u32 - 1);
        self.out.node_mut(last).device = anchor.device.clone();
        self.values.extend(results.into_iter().zip(outputs));
        Ok(())
    }

    /// The anchor's origin; for element-wise groups that of the last member.
    fn origin(&self, group: usize) -> Origin {
        let group = &self.grouping.groups[group];
        self.g.node(group.anchor).origin.clone()
    }
}
