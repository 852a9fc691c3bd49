//! Values of variables that the graph knows: a read after an assignment is the value that was assigned, a read after a
//! read is the value that was read, and an assignment that a later one replaces is none.

use super::Rebuild;
use super::indexed;
use crate::error::Result;
use crate::ir::{Def, Graph, Node, NodeId, Op, Type, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Container and name.
type Variable<'g> = (&'g str, &'g str);

/// Replaces reads whose value is known, and drops assignments that nothing sees. So a variable that no region uses is
/// read once at most, before it is assigned once at most.
///
/// Requires: the nodes are in the order in which they use variables, and have no control edges for it yet.
pub fn forward_state(g: &Graph) -> Result<Graph> {
    if !g.has_state() {
        return Ok(g.clone());
    }
    let unseen = unseen_assignments(g);
    let mut r = Rebuild::new(g);
    let mut known: BTreeMap<Variable, (ValueId, &Type)> = BTreeMap::new();
    for (id, node) in g.nodes() {
        match &node.op {
            Op::ReadVariable {
                container, name, ..
            } => {
                let (read, key) = (node.outputs[0], (container.as_str(), name.as_str()));
                match known.get(&key) {
                    Some(&(value, ty)) if ty == g.ty(read) => r.set(read, value),
                    _ => {
                        r.copy(id, node)?;
                        known.insert(key, (r.get(read), g.ty(read)));
                    }
                }
            }
            Op::AssignVariable { container, name } => {
                let value = r.get(node.inputs[0]);
                match unseen.contains(&id) {
                    true => r.set(node.outputs[0], value),
                    false => r.copy(id, node)?,
                }
                let ty = g.ty(node.inputs[0]);
                known.insert((container, name), (value, ty));
            }
            _ => {
                assigned_inside(node, &mut |key| {
                    known.remove(&key);
                });
                r.copy(id, node)?;
            }
        }
    }
    Ok(r.finish(g))
}

/// Puts a check of the indices before each scatter over the old value of a variable whose result is the next one: the scatter cannot
/// fail then, so that it may be done where the value is, after all checks.
pub fn check_scattered(g: &Graph) -> Result<Graph> {
    let updates: BTreeSet<NodeId> = g.nodes().filter_map(|(_, n)| scattered(g, n)).collect();
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        let extents = indexed::scattered_extents(g, node).filter(|_| updates.contains(&id));
        let Some(extents) = extents else {
            r.copy(id, node)?;
            continue;
        };
        let check = Node {
            op: Op::CheckIndices {
                extents: extents.to_vec(),
            },
            ..node.clone()
        };
        let mut inputs = r.inputs(node);
        inputs[1] = r.graph.add_copy(&check, &inputs[1..2])?[0];
        let outputs = r.graph.add_copy(node, &inputs)?;
        r.mapped(id, node, &outputs);
    }
    Ok(r.finish(g))
}

/// The scatter over the old value of a variable that makes what a node assigns to it.
fn scattered(g: &Graph, node: &Node) -> Option<NodeId> {
    let Op::AssignVariable { container, name } = &node.op else {
        return None;
    };
    let Def::Node(id, _) = g.value(node.inputs[0]).def else {
        return None;
    };
    let scatter = g.node(id);
    let indices = g.def_node(*scatter.inputs.get(1)?);
    let is_checked = indices.is_some_and(|n| matches!(n.op, Op::CheckIndices { .. }));
    match &g.def_node(scatter.inputs[0])?.op {
        Op::ReadVariable {
            container: c,
            name: n,
            ..
        } => (!is_checked && (c, n) == (container, name)).then_some(id),
        _ => None,
    }
}

/// Assignments that are followed by another one before any region uses the variable. Reads of other types count, too.
fn unseen_assignments(g: &Graph) -> BTreeSet<NodeId> {
    let mut unseen = BTreeSet::new();
    let mut last: BTreeMap<Variable, (NodeId, &Type)> = BTreeMap::new();
    for (id, node) in g.nodes() {
        match &node.op {
            Op::AssignVariable { container, name } => {
                let own = (id, g.ty(node.inputs[0]));
                let replaced = last.insert((container, name), own);
                unseen.extend(replaced.map(|(id, _)| id));
            }
            Op::ReadVariable {
                container, name, ..
            } => {
                let key = (container.as_str(), name.as_str());
                if last
                    .get(&key)
                    .is_some_and(|(_, ty)| *ty != g.ty(node.outputs[0]))
                {
                    last.remove(&key);
                }
            }
            _ => used_inside(node, &mut |key| {
                last.remove(&key);
            }),
        }
    }
    unseen
}

/// Calls `f` with the variables that regions of a node assign.
fn assigned_inside<'g>(node: &'g Node, f: &mut impl FnMut(Variable<'g>)) {
    for (_, inner) in node.regions.iter().flat_map(Graph::nodes) {
        if let Op::AssignVariable { container, name } = &inner.op {
            f((container, name));
        }
        assigned_inside(inner, f);
    }
}

/// Calls `f` with the variables that regions of a node use.
fn used_inside<'g>(node: &'g Node, f: &mut impl FnMut(Variable<'g>)) {
    for (_, inner) in node.regions.iter().flat_map(Graph::nodes) {
        if let Op::AssignVariable { container, name }
        | Op::ReadVariable {
            container, name, ..
        } = &inner.op
        {
            f((container, name));
        }
        used_inside(inner, f);
    }
}
