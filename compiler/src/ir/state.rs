//! Order of state: reads and assignments of one variable as control edges.
//!
//! A graph lists its nodes in an order in which they can run, and variables are read and assigned in that order. Passes may
//! reorder nodes as far as operands and control edges let them, so these edges must say so before the first pass runs.

use super::constant::ConstData;
use super::graph::{Graph, Node, NodeId};
use super::ops::Op;
use super::{OpClass, Origin, Type};
use crate::error::Error;
use gristmill_runtime::program::replica_of;
use std::collections::BTreeMap;

/// Container and name of a variable.
type Variable = (String, String);

/// Use of a variable by a node, by itself or in its regions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Access {
    Reads,
    Assigns,
}

/// The last uses of a variable so far.
#[derive(Default)]
struct LastUses {
    assignment: Option<NodeId>,
    /// Reads since the assignment.
    reads: Vec<NodeId>,
}

impl LastUses {
    /// Nodes that a new use must follow, which becomes the last one.
    fn follow(&mut self, id: NodeId, access: Access) -> Vec<NodeId> {
        if access == Access::Reads {
            self.reads.push(id);
            return self.assignment.into_iter().collect();
        }
        let assignment = self.assignment.replace(id);
        let reads = std::mem::take(&mut self.reads);
        if reads.is_empty() {
            assignment.into_iter().collect()
        } else {
            reads
        }
    }
}

impl Graph {
    /// Adds control edges between nodes that use one variable, of which one assigns it, in regions too. Doing it again
    /// changes nothing.
    ///
    /// After: along control edges, every read follows the assignment before it in the list of nodes, and every assignment
    /// follows the reads and the assignment before it.
    pub fn order_state(&mut self) {
        let mut uses: BTreeMap<Variable, LastUses> = BTreeMap::new();
        for id in (0..self.n_nodes() as u32).map(NodeId) {
            let node = self.node_mut(id);
            node.regions.iter_mut().for_each(Graph::order_state);
            let mut accesses = BTreeMap::new();
            collect_accesses(node, &mut accesses);
            for (variable, access) in accesses {
                let earlier = uses.entry(variable).or_default().follow(id, access);
                node.follow(earlier);
            }
        }
    }
}

impl Node {
    fn follow(&mut self, earlier: Vec<NodeId>) {
        for id in earlier {
            if !self.control.contains(&id) {
                self.control.push(id);
            }
        }
        self.control.sort_unstable();
    }
}

/// Type of a variable where a node uses it.
struct Use<'g> {
    ty: &'g Type,
    initial: Option<&'g ConstData>,
    origin: &'g Origin,
}

impl Graph {
    /// True when a node, in regions too, uses a variable.
    pub fn has_state(&self) -> bool {
        let uses = |node: &Node| {
            node.op.class() == OpClass::State || node.regions.iter().any(Graph::has_state)
        };
        self.nodes().any(|(_, node)| uses(node))
    }

    /// True when a node, in regions too, assigns a variable.
    pub fn assigns(&self) -> bool {
        let assigns = |node: &Node| {
            matches!(node.op, Op::AssignVariable { .. }) || node.regions.iter().any(Graph::assigns)
        };
        self.nodes().any(|(_, node)| assigns(node))
    }

    /// The variables by container and name, with the types of their first uses.
    pub fn variables(&self) -> BTreeMap<Variable, Type> {
        let mut first = BTreeMap::new();
        for (variable, used) in uses(self) {
            first.entry(variable).or_insert_with(|| used.ty.clone());
        }
        first
    }

    /// Moves the variables without a container into one, in regions too.
    pub(crate) fn set_container(&mut self, to: &str) {
        for id in 0..self.n_nodes() as u32 {
            let node = self.node_mut(NodeId(id));
            node.regions.iter_mut().for_each(|r| r.set_container(to));
            if let Op::ReadVariable { container, .. } | Op::AssignVariable { container, .. } =
                &mut node.op
                && container.is_empty()
            {
                *container = to.to_owned();
            }
        }
    }

    /// Errors, naming both nodes, when a variable is used with types that cannot meet, or with two
    /// initial values, and on the name of a replica. Extents with symbols may differ: the variable has another one after a run.
    pub fn check_state(&self) -> Result<(), Error> {
        let mut first: BTreeMap<Variable, Use> = BTreeMap::new();
        for (variable, own) in uses(self) {
            if replica_of(&variable.1).is_some() {
                let message = format!(
                    "variable {:?}: devices that train together keep replicas under such names",
                    variable.1
                );
                return Err(Error::invalid(message)
                    .hint("another last part of the name")
                    .at_origin(own.origin));
            }
            match first.get_mut(&variable) {
                Some(other) => other.meet(own, &variable)?,
                None => drop(first.insert(variable, own)),
            }
        }
        Ok(())
    }
}

/// All uses of variables, in regions too.
fn uses(g: &Graph) -> Vec<(Variable, Use<'_>)> {
    let mut found = Vec::new();
    for (_, node) in g.nodes() {
        let used = match &node.op {
            Op::ReadVariable {
                container,
                name,
                initial,
                ..
            } => Some((container, name, initial.as_ref())),
            Op::AssignVariable { container, name } => Some((container, name, None)),
            _ => None,
        };
        if let Some((container, name, initial)) = used {
            let own = Use {
                ty: g.ty(node.outputs[0]),
                initial,
                origin: &node.origin,
            };
            found.push(((container.clone(), name.clone()), own));
        }
        found.extend(node.regions.iter().flat_map(uses));
    }
    found
}

impl<'g> Use<'g> {
    fn meet(&mut self, other: Use<'g>, (container, name): &Variable) -> Result<(), Error> {
        let label = format!("variable {name:?} of container {container:?}");
        let (a, b) = (self.ty, other.ty);
        if !have_common_values(a, b) {
            let message = format!(
                "{label} is {b} here, and {a} in node {:?}",
                self.origin.as_str()
            );
            return Err(Error::invalid(message).at_origin(other.origin));
        }
        match (self.initial, other.initial) {
            (Some(a), Some(b)) if a != b => {
                let first = self.origin.as_str();
                let message = format!("{label} has another initial value in node {first:?}");
                Err(Error::invalid(message).at_origin(other.origin))
            }
            (None, Some(initial)) => {
                self.initial = Some(initial);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// True when a tensor can have both types.
pub(crate) fn have_common_values(a: &Type, b: &Type) -> bool {
    let extents = a.shape.iter().zip(b.shape.iter());
    let mut constants = extents.filter_map(|(a, b)| Some((a.as_const()?, b.as_const()?)));
    a.dtype == b.dtype && a.rank() == b.rank() && constants.all(|(a, b)| a == b)
}

/// Adds the variables that a node uses. An assignment counts more than a read.
fn collect_accesses(node: &Node, accesses: &mut BTreeMap<Variable, Access>) {
    let used = match &node.op {
        Op::ReadVariable {
            container, name, ..
        } => Some((container, name, Access::Reads)),
        Op::AssignVariable { container, name } => Some((container, name, Access::Assigns)),
        _ => None,
    };
    if let Some((container, name, access)) = used {
        let variable = (container.clone(), name.clone());
        let strongest = accesses.entry(variable).or_insert(access);
        *strongest = access.max(*strongest);
    }
    for (_, inner) in node.regions.iter().flat_map(Graph::nodes) {
        collect_accesses(inner, accesses);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Control edges of each node after ordering, as text.
    fn edges(text: &str) -> String {
        let mut g = Graph::parse(text).unwrap();
        g.order_state();
        let once = g.clone();
        g.order_state();
        assert_eq!(once.to_string(), g.to_string(), "ordering is idempotent");
        let edges = g.nodes().map(|(id, n)| {
            format!(
                "{}:{:?}",
                id.0,
                n.control.iter().map(|c| c.0).collect::<Vec<_>>()
            )
        });
        edges.collect::<Vec<_>>().join(" ")
    }

    const READ: &str =
        r#"read_variable() {container = "", name = "v", dtype = f32, shape = []} @ "/r""#;
    const ASSIGN: &str = r#"assign_variable(%0) {container = "", name = "v"} @ "/a""#;

    fn graph(nodes: &[&str]) -> String {
        let mut text = "graph \"g\" {\n  %0 = input \"x\": f32[]\n".to_owned();
        for (i, node) in nodes.iter().enumerate() {
            text += &format!("  %{}: f32[] = {node}\n", i + 1);
        }
        text + &format!("  output \"y\" %{}\n}}\n", nodes.len())
    }

    #[test]
    fn reads_and_assignments_follow_each_other() {
        assert_eq!(edges(&graph(&[ASSIGN, READ])), "0:[] 1:[0]");
        assert_eq!(
            edges(&graph(&[READ, READ, ASSIGN, ASSIGN, READ])),
            "0:[] 1:[] 2:[0, 1] 3:[2] 4:[3]"
        );
    }

    #[test]
    fn other_variables_are_free() {
        let other = READ.replace("\"v\"", "\"w\"");
        assert_eq!(edges(&graph(&[ASSIGN, &other, READ])), "0:[] 1:[] 2:[0]");
        let container = READ.replace("container = \"\"", "container = \"c\"");
        assert_eq!(edges(&graph(&[ASSIGN, &container])), "0:[] 1:[]");
    }
}
