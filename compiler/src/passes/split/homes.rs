//! The server of each value without shards, where several servers hold the variables.
//!
//! The variables of one update are together: a weight, its slots and its averages, which are joined element by element.
//! Groups of such variables are dealt to the servers. Every other value is where the fewest bytes cross.

use super::sharding::{Computation, Plan};
use crate::ir::{Def, Graph, Node, NodeId, Op, OpClass, ValueId};
use crate::options::Deal;
use crate::place::setter::Loads;
use crate::schedule::{Variable, variable_uses};
use std::collections::BTreeMap;

/// The number of the server of each value.
pub(super) struct Homes(Vec<usize>);

impl Homes {
    /// Homes on so many servers.
    pub(super) fn of(g: &Graph, plan: &Plan, n_servers: usize, deal: Deal) -> Homes {
        if n_servers < 2 {
            return Homes(vec![0; g.n_values()]);
        }
        let groups = Groups::of(g);
        let servers = groups.dealt(n_servers, deal);
        let of_group = |group: &Option<usize>| Some(servers[groups.root((*group)?)]);
        let mut homes: Vec<Option<usize>> = groups.of_value.iter().map(of_group).collect();
        let is_whole = |id: NodeId| {
            let mut all = plan.computations_of(id).iter();
            all.any(Computation::is_whole)
        };
        let users = users(g);
        for (id, node) in g.nodes().filter(|(id, _)| is_whole(*id)) {
            let chosen = nearest(g, id, &homes, &users, n_servers);
            for v in &node.outputs {
                homes[v.0 as usize].get_or_insert(chosen);
            }
        }
        // Sums and joined shards are at the first that needs them.
        let first_user = |v: usize| {
            let mut users = users[v].iter();
            users.find_map(|&id| homes[g.node(id).outputs.first()?.0 as usize])
        };
        let all = homes.iter().enumerate();
        Homes(
            all.map(|(v, home)| home.or_else(|| first_user(v)).unwrap_or(0))
                .collect(),
        )
    }

    /// The server of each variable, by container and name.
    pub(super) fn of_variables(&self, g: &Graph) -> BTreeMap<(String, String), usize> {
        let mut found = BTreeMap::new();
        for (_, node) in g.nodes() {
            for ((container, name), _) in variable_uses(node) {
                let key = (container.to_owned(), name.to_owned());
                found.insert(key, self.at(node.outputs[0]));
            }
        }
        found
    }

    pub(super) fn at(&self, v: ValueId) -> usize {
        self.0[v.0 as usize]
    }
}

/// Deals the variables of a graph without a server: by size, to the servers with the fewest bytes so far.
pub(super) fn deal_others(
    g: &Graph,
    homes: &mut BTreeMap<(String, String), usize>,
    n_servers: usize,
    deal: Deal,
) {
    let mut loads = Loads::new(n_servers.max(1));
    let reads = g.nodes().filter_map(|(_, node)| {
        let ((container, name), _) = variable_uses(node).into_iter().next()?;
        let bytes = g.ty(node.outputs[0]).size_bytes().unwrap_or(0);
        Some(((container.to_owned(), name.to_owned()), bytes as u64))
    });
    let (dealt, others): (Vec<_>, Vec<_>) = reads.partition(|(key, _)| homes.contains_key(key));
    for (key, bytes) in dealt {
        loads.add(homes[&key], bytes);
    }
    for (key, bytes) in others {
        homes.insert(key, loads.deal(bytes, deal));
    }
}

/// Consumers of each value.
fn users(g: &Graph) -> Vec<Vec<NodeId>> {
    let mut users = vec![Vec::new(); g.n_values()];
    for (id, node) in g.nodes() {
        for v in &node.inputs {
            users[v.0 as usize].push(id);
        }
    }
    users
}

/// The server to which the fewest bytes of a node's operands and results cross, as far as homes are known.
fn nearest(
    g: &Graph,
    id: NodeId,
    homes: &[Option<usize>],
    users: &[Vec<NodeId>],
    n_servers: usize,
) -> usize {
    let node = g.node(id);
    let bytes = |v: ValueId| g.ty(v).size_bytes().unwrap_or(usize::MAX);
    let mut saved = vec![0_usize; n_servers];
    for &v in &node.inputs {
        if let Some(home) = homes[v.0 as usize] {
            saved[home] = saved[home].saturating_add(bytes(v));
        }
    }
    for &v in &node.outputs {
        for user in &users[v.0 as usize] {
            let first = g.node(*user).outputs.first();
            if let Some(home) = first.and_then(|v| homes[v.0 as usize]) {
                saved[home] = saved[home].saturating_add(bytes(v));
            }
        }
    }
    let most = saved.iter().copied().max().unwrap_or(0);
    saved.iter().position(|&s| s == most).unwrap_or(0)
}

/// Variables that belong together, as a forest of groups.
struct Groups<'g> {
    /// A group nearer to the root, or the group itself, by group.
    parent: Vec<usize>,
    of_variable: BTreeMap<Variable<'g>, usize>,
    /// Bytes of the variables of each group, before groups were joined.
    bytes: Vec<u64>,
    /// The group of variables' values and of the values joined with them.
    of_value: Vec<Option<usize>>,
}

impl<'g> Groups<'g> {
    fn of(g: &'g Graph) -> Groups<'g> {
        let mut groups = Groups {
            parent: Vec::new(),
            of_variable: BTreeMap::new(),
            bytes: Vec::new(),
            of_value: vec![None; g.n_values()],
        };
        for (_, node) in g.nodes() {
            for (variable, _) in variable_uses(node) {
                groups.add(g, node, variable);
            }
        }
        let assigned = g.nodes().filter(|(_, n)| is_assignment(n));
        assigned.for_each(|(_, node)| groups.join_update(g, node));
        groups
    }

    fn add(&mut self, g: &Graph, node: &Node, variable: Variable<'g>) {
        let next = self.parent.len();
        let group = *self.of_variable.entry(variable).or_insert(next);
        if group == next {
            let size = node.outputs.first().and_then(|&v| g.ty(v).size_bytes());
            self.parent.push(next);
            self.bytes.push(size.unwrap_or(0) as u64);
        }
        for v in &node.outputs {
            self.of_value[v.0 as usize] = Some(group);
        }
    }

    fn root(&self, group: usize) -> usize {
        match self.parent[group] {
            parent if parent == group => group,
            parent => self.root(parent),
        }
    }

    /// Joins the variables from which an assigned value is computed element by element.
    fn join_update(&mut self, g: &Graph, assignment: &Node) {
        let Some(group) = self.of_value[assignment.outputs[0].0 as usize] else {
            return;
        };
        let shape = &g.ty(assignment.inputs[0]).shape;
        let mut left = vec![assignment.inputs[0]];
        while let Some(v) = left.pop() {
            if g.ty(v).shape != *shape {
                continue;
            }
            if let Some(other) = self.of_value[v.0 as usize].replace(group) {
                let (a, b) = (self.root(group), self.root(other));
                self.parent[a.max(b)] = a.min(b);
                self.of_value[v.0 as usize] = Some(a.min(b));
                continue;
            }
            if let Def::Node(id, _) = g.value(v).def
                && g.node(id).op.class() == OpClass::Map
            {
                left.extend(&g.node(id).inputs);
            }
        }
    }

    /// The server of each group.
    fn dealt(&self, n_servers: usize, deal: Deal) -> Vec<usize> {
        let mut bytes: BTreeMap<usize, u64> = BTreeMap::new();
        for (group, own) in self.bytes.iter().enumerate() {
            let sum = bytes.entry(self.root(group)).or_default();
            *sum = sum.saturating_add(*own);
        }
        let mut loads = Loads::new(n_servers);
        let mut servers = vec![0; self.parent.len()];
        for (group, bytes) in bytes {
            servers[group] = loads.deal(bytes, deal);
        }
        servers
    }
}

fn is_assignment(node: &Node) -> bool {
    matches!(node.op, Op::AssignVariable { .. })
}
