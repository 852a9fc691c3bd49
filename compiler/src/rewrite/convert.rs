//! Graph to e-graph, and the extracted e-nodes back to a graph.

use super::extract::Choice;
use super::lang::{ENode, Sym};
use super::terms::{Miss, Terms};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, OpClass, ValueId};
use egg::Id;
use std::collections::BTreeMap;

/// A graph inserted into an e-graph.
pub(crate) struct Inserted {
    pub terms: Terms,
    pub root: Id,
}

/// Inserts a graph. Nodes that cannot be shared or rewritten (regions, state, transfers, control edges) become opaque.
pub(crate) fn insert(g: &Graph) -> Result<Inserted> {
    let mut terms = Terms::new();
    let opaque = opaque_nodes(g);
    let mut ids: Vec<Option<Id>> = vec![None; g.n_values()];
    for (i, &v) in g.inputs.iter().enumerate() {
        ids[v.0 as usize] =
            Some(terms.add_symbol(Sym::Input(i as u32), &[], vec![g.ty(v).clone()]));
    }
    let mut classes: Vec<Id> = Vec::with_capacity(g.n_nodes());
    let mut effects = Vec::new();
    for (n, node) in g.nodes() {
        terms.origins.push(node.origin.clone());
        terms.origin = terms.origins.len() as u32 - 1;
        terms.device = node.device.clone();
        let mut children: Vec<Id> = node
            .inputs
            .iter()
            .map(|v| ids[v.0 as usize].expect("nodes are in topological order"))
            .collect();
        let types: Vec<_> = node.outputs.iter().map(|v| g.ty(*v).clone()).collect();
        let class = if opaque[n.0 as usize] {
            children.extend(node.control.iter().map(|c| classes[c.0 as usize]));
            terms.add_symbol(Sym::Opaque(n.0), &children, types.clone())
        } else {
            terms
                .add(node.op.clone(), &children)
                .map_err(|m| misfit(node, m))?
        };
        if has_effect(node) {
            effects.push(class);
        }
        classes.push(class);
        for (i, v) in node.outputs.iter().enumerate() {
            let id = if types.len() == 1 {
                class
            } else {
                terms.add_symbol(Sym::Proj(i as u32), &[class], vec![types[i].clone()])
            };
            ids[v.0 as usize] = Some(id);
        }
    }
    let mut roots: Vec<Id> = g
        .outputs
        .iter()
        .map(|o| ids[o.value.0 as usize].expect("outputs are defined"))
        .collect();
    roots.extend(effects);
    let root = terms.add_symbol(Sym::Roots, &roots, Vec::new());
    terms.eg.rebuild();
    Ok(Inserted { terms, root })
}

fn misfit(node: &Node, miss: Miss) -> Error {
    Error::internal(format!("cannot enter the e-graph: {miss:?}"))
        .context(node.op.name())
        .at_origin(&node.origin)
}

/// True for nodes that must run even when nothing uses their results.
fn has_effect(node: &Node) -> bool {
    matches!(node.op.class(), OpClass::State | OpClass::Transfer)
        || node
            .regions
            .iter()
            .any(|r| r.nodes().any(|(_, n)| has_effect(n)))
}

fn opaque_nodes(g: &Graph) -> Vec<bool> {
    let mut opaque = vec![false; g.n_nodes()];
    for (n, node) in g.nodes() {
        let kept = matches!(
            node.op.class(),
            OpClass::Control | OpClass::State | OpClass::Transfer | OpClass::Cluster
        );
        if kept || !node.regions.is_empty() || !node.control.is_empty() {
            opaque[n.0 as usize] = true;
        }
        for c in &node.control {
            opaque[c.0 as usize] = true;
        }
    }
    opaque
}

/// Builds the graph of the chosen e-nodes. `regions` holds the rewritten regions of the source graph's nodes.
pub(crate) fn emit(
    g: &Graph,
    ins: &Inserted,
    choice: &Choice,
    regions: &BTreeMap<u32, Vec<Graph>>,
) -> Result<Graph> {
    let mut out = Graph::new(&g.name);
    for (&v, name) in g.inputs.iter().zip(&g.input_names) {
        out.add_input(name, g.ty(v).clone());
    }
    let mut made: BTreeMap<Id, Vec<ValueId>> = BTreeMap::new();
    let mut node_of: BTreeMap<Id, NodeId> = BTreeMap::new();
    let terms = &ins.terms;
    for (class, node) in choice.topological(terms, ins.root)? {
        let operands = |ids: &[Id]| -> Vec<ValueId> {
            ids.iter().map(|c| made[&terms.eg.find(*c)][0]).collect()
        };
        let origin = &terms.origins[terms.facts(class).origin as usize];
        let values = match node.sym {
            Sym::Input(i) => vec![out.inputs[i as usize]],
            Sym::Proj(i) => vec![made[&terms.eg.find(node.children[0])][i as usize]],
            Sym::Roots => Vec::new(),
            Sym::Op(id) => {
                let placed = terms.eg.analysis.op(id);
                let values = out.add(placed.op.clone(), &operands(&node.children), origin)?;
                let id = NodeId(out.n_nodes() as u32 - 1);
                out.node_mut(id).device = placed.device.clone();
                node_of.insert(class, id);
                values
            }
            Sym::Opaque(n) => {
                let (id, values) = emit_opaque(
                    &mut out,
                    g.node(NodeId(n)),
                    node,
                    &operands,
                    regions.get(&n),
                )?;
                out.node_mut(id).control = node.children[g.node(NodeId(n)).inputs.len()..]
                    .iter()
                    .map(|c| node_of[&terms.eg.find(*c)])
                    .collect();
                node_of.insert(class, id);
                values
            }
        };
        made.insert(class, values);
    }
    let roots = &choice.node(terms, ins.root).children;
    for (o, id) in g.outputs.iter().zip(roots.iter()) {
        out.add_output(&o.name, made[&terms.eg.find(*id)][0]);
    }
    Ok(out)
}

fn emit_opaque(
    out: &mut Graph,
    source: &Node,
    node: &ENode,
    operands: &dyn Fn(&[Id]) -> Vec<ValueId>,
    regions: Option<&Vec<Graph>>,
) -> Result<(NodeId, Vec<ValueId>)> {
    let inputs = operands(&node.children[..source.inputs.len()]);
    let regions = regions.unwrap_or(&source.regions).clone();
    let values = out.add_with_regions(source.op.clone(), &inputs, regions, &source.origin)?;
    let id = NodeId(out.n_nodes() as u32 - 1);
    out.node_mut(id).device = source.device.clone();
    Ok((id, values))
}
