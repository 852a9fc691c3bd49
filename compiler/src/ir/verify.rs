//! The verifier. It collects every violation; one is always our bug, reported as such.
//!
//! Invariants, for a graph and all its regions:
//! 1. every id is in range, and a node's operands are defined before it (topological order);
//! 2. result types are those of the op's type rule;
//! 3. inputs are listed once, in order, and as many as their names; input and output names are unique;
//! 4. control edges point to earlier nodes;
//! 5. regions are present exactly where the op has them (checked by the type rule);
//! 6. static extents are not negative and no tensor's byte size overflows.

use super::graph::{Def, Graph, Node, NodeId};
use super::types::Type;
use crate::error::{Error, Result};
use std::collections::BTreeSet;

/// All violations of the graph's invariants, as an `Internal` error.
pub fn verify(g: &Graph) -> Result<()> {
    let mut problems = Vec::new();
    check_graph(g, "", &mut problems);
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!(
        "graph {:?} is malformed:\n  {}",
        g.name,
        problems.join("\n  ")
    )))
}

fn check_graph(g: &Graph, path: &str, problems: &mut Vec<String>) {
    check_interface(g, path, problems);
    for (id, node) in g.nodes() {
        let at = format!("{path}#{} {}", id.0, node.op.name());
        check_node(g, id, node, &at, problems);
        for (i, r) in node.regions.iter().enumerate() {
            check_graph(r, &format!("{at}/region {i}/"), problems);
        }
    }
}

fn check_interface(g: &Graph, path: &str, problems: &mut Vec<String>) {
    if g.inputs.len() != g.input_names.len() {
        problems.push(format!(
            "{path}{} inputs have {} names",
            g.inputs.len(),
            g.input_names.len()
        ));
    }
    for (i, &v) in g.inputs.iter().enumerate() {
        if v.0 as usize >= g.n_values() || g.value(v).def != Def::Input(i as u32) {
            problems.push(format!("{path}input {i} is not defined as such"));
        }
    }
    let mut names = BTreeSet::new();
    for n in g.input_names.iter().filter(|n| !names.insert(n.as_str())) {
        problems.push(format!("{path}input name {n:?} is used twice"));
    }
    let mut names = BTreeSet::new();
    for o in &g.outputs {
        if !names.insert(o.name.as_str()) {
            problems.push(format!("{path}output name {:?} is used twice", o.name));
        }
        if o.value.0 as usize >= g.n_values() {
            problems.push(format!(
                "{path}output {:?} names a value that is not there",
                o.name
            ));
        }
    }
}

fn check_node(g: &Graph, id: NodeId, node: &Node, at: &str, problems: &mut Vec<String>) {
    for (i, v) in node.inputs.iter().enumerate() {
        let defined_before = v.0 as usize <= g.n_values()
            && match g.value(*v).def {
                Def::Input(_) => true,
                Def::Node(d, _) => d < id,
            };
        if !defined_before {
            problems.push(format!("{at}: operand {i} is not defined before it"));
            return;
        }
    }
    if let Some(c) = node.control.iter().find(|c| **c >= id) {
        problems.push(format!(
            "{at}: control edge to #{} which is not earlier",
            c.0
        ));
    }
    let spec = node.op.spec();
    if node.inputs.len() < spec.arity.0 || node.inputs.len() > spec.arity.1 {
        problems.push(format!(
            "{at}: {} operands, expected {} to {}",
            node.inputs.len(),
            spec.arity.0,
            spec.arity.1
        ));
        return;
    }
    let types: Vec<Type> = node.inputs.iter().map(|&v| g.ty(v).clone()).collect();
    let found: Vec<Type> = node.outputs.iter().map(|&v| g.ty(v).clone()).collect();
    match (spec.infer)(&node.op, &types, &node.regions) {
        Err(m) => problems.push(format!("{at}: {m}")),
        Ok(expected) if expected != found => problems.push(format!(
            "{at}: result types {found:?}, the type rule gives {expected:?}"
        )),
        Ok(_) => {}
    }
    for t in &found {
        let bad = t.shape.iter().any(|d| d.as_const().is_some_and(|c| c < 0))
            || t.size_bytes().is_some_and(|b| b > isize::MAX as usize / 2);
        if bad && !t.shape.iter().any(|d| d.is(0)) {
            problems.push(format!("{at}: {t} is not a possible tensor"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Op, Origin, ScalarOp};
    use gristmill_runtime::DType;

    #[test]
    fn all_violations_are_collected() {
        let mut g = Graph::new("bad");
        let x = g.add_input("x", Type::new(DType::F32, [2usize]));
        let y = g
            .add1(Op::Map(ScalarOp::Exp), &[x], &Origin::default())
            .unwrap();
        let z = g
            .add1(Op::Map(ScalarOp::Neg), &[y], &Origin::default())
            .unwrap();
        g.add_output("o", z);
        assert!(verify(&g).is_ok());
        g.add_output("o", z);
        g.node_mut(NodeId(0)).inputs[0] = z;
        g.node_mut(NodeId(1)).op = Op::Map(ScalarOp::Not);
        g.node_mut(NodeId(1)).control.push(NodeId(1));
        insta::assert_snapshot!(verify(&g).unwrap_err(), @r#"
        graph "bad" is malformed:
          output name "o" is used twice
          #0 exp: operand 0 is not defined before it
          #1 not: control edge to #1 which is not earlier
          #1 not: operand dtype f32 is not supported; expected bool
        "#);
    }
}
