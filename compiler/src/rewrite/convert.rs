//! Graph to e-graph, and the extracted e-nodes back to a graph.

use super::extract::Choice;
use super::lang::{ENode, OpId, Sym};
use super::terms::{Miss, Terms};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, OpClass, ValueId};
use egg::Id;
use std::collections::BTreeMap;

/// A graph inserted into an e-graph.
pub(crate) struct RootedTerms {
    pub terms: Terms,
    pub root: Id,
}

/// Inserts a graph. Nodes that cannot be shared or rewritten (regions, state, transfers, control edges) become opaque.
pub(crate) fn insert(g: &Graph) -> Result<RootedTerms> {
    let mut inserter = Inserter::new(g);
    inserter.add_inputs();
    for (n, node) in g.nodes() {
        inserter.add_node(n, node)?;
    }
    let root = inserter.add_roots();
    inserter.terms.eg.rebuild();
    Ok(RootedTerms {
        terms: inserter.terms,
        root,
    })
}

/// An e-graph under construction.
struct Inserter<'g> {
    g: &'g Graph,
    terms: Terms,
    is_opaque: Vec<bool>,
    /// Class of each value.
    values: Vec<Option<Id>>,
    /// Class of each node.
    nodes: Vec<Id>,
    /// Classes of nodes that run even when nothing uses their results.
    effects: Vec<Id>,
}

impl Inserter<'_> {
    fn new(g: &Graph) -> Inserter<'_> {
        Inserter {
            g,
            terms: Terms::new(),
            is_opaque: opaque_nodes(g),
            values: vec![None; g.n_values()],
            nodes: Vec::with_capacity(g.n_nodes()),
            effects: Vec::new(),
        }
    }

    fn add_inputs(&mut self) {
        for (i, &v) in self.g.inputs.iter().enumerate() {
            self.add_value(v, Sym::Input(i as u32), &[]);
        }
    }

    fn add_value(&mut self, v: ValueId, sym: Sym, children: &[Id]) {
        let types = vec![self.g.ty(v).clone()];
        let class = self.terms.add_symbol(sym, children, types);
        self.values[v.0 as usize] = Some(class);
    }

    fn add_node(&mut self, n: NodeId, node: &Node) -> Result<()> {
        self.terms.origins.push(node.origin.clone());
        self.terms.origin = self.terms.origins.len() as u32 - 1;
        self.terms.device = node.device.clone();
        let operands: Vec<Id> = node.inputs.iter().map(|&v| self.class(v)).collect();
        let class = if self.is_opaque[n.0 as usize] {
            self.add_opaque(n, node, operands)
        } else {
            let added = self.terms.add(node.op.clone(), &operands);
            added.map_err(|miss| misfit(node, miss))?
        };
        if has_effect(node) {
            self.effects.push(class);
        }
        self.nodes.push(class);
        self.add_results(node, class);
        Ok(())
    }

    fn add_opaque(&mut self, n: NodeId, node: &Node, operands: Vec<Id>) -> Id {
        let mut children = operands;
        let control = node.control.iter();
        children.extend(control.map(|c| self.nodes[c.0 as usize]));
        let types = node.outputs.iter().map(|&v| self.g.ty(v).clone());
        let types = types.collect();
        self.terms.add_symbol(Sym::Opaque(n.0), &children, types)
    }

    /// A single result is the node's class; each of several is a projection of it.
    fn add_results(&mut self, node: &Node, class: Id) {
        if let [v] = node.outputs[..] {
            self.values[v.0 as usize] = Some(class);
            return;
        }
        for (i, &v) in node.outputs.iter().enumerate() {
            self.add_value(v, Sym::Proj(i as u32), &[class]);
        }
    }

    fn add_roots(&mut self) -> Id {
        let outputs = self.g.outputs.iter().map(|o| self.class(o.value));
        let mut roots: Vec<Id> = outputs.collect();
        roots.append(&mut self.effects);
        self.terms.add_symbol(Sym::Roots, &roots, Vec::new())
    }

    fn class(&self, v: ValueId) -> Id {
        self.values[v.0 as usize].expect("nodes are in topological order")
    }
}

fn misfit(node: &Node, miss: Miss) -> Error {
    Error::internal(format!("cannot enter the e-graph: {miss:?}"))
        .context(node.op.name())
        .at_origin(&node.origin)
}

/// True for nodes that must run even when nothing uses their results.
fn has_effect(node: &Node) -> bool {
    let is_effect = matches!(node.op.class(), OpClass::State | OpClass::Transfer);
    let mut inner = node.regions.iter().flat_map(Graph::nodes);
    is_effect || inner.any(|(_, n)| has_effect(n))
}

fn opaque_nodes(g: &Graph) -> Vec<bool> {
    let mut is_opaque = vec![false; g.n_nodes()];
    for (n, node) in g.nodes() {
        is_opaque[n.0 as usize] |= stays_as_it_is(node);
        for earlier in &node.control {
            is_opaque[earlier.0 as usize] = true;
        }
    }
    is_opaque
}

fn stays_as_it_is(node: &Node) -> bool {
    use OpClass::{Cluster, Control, State, Transfer};
    let is_fixed = matches!(node.op.class(), Control | State | Transfer | Cluster);
    is_fixed || !node.regions.is_empty() || !node.control.is_empty()
}

/// Builds the graph of the chosen e-nodes. `regions` holds the rewritten regions of the source graph's nodes.
pub(crate) fn emit(
    g: &Graph,
    ins: &RootedTerms,
    choice: &Choice,
    regions: &BTreeMap<u32, Vec<Graph>>,
) -> Result<Graph> {
    let mut emitter = Emitter::new(g, &ins.terms, regions);
    for (class, node) in choice.topological(&ins.terms, ins.root)? {
        let values = emitter.emit(class, node)?;
        emitter.values.insert(class, values);
    }
    let root = choice.node(&ins.terms, ins.root);
    Ok(emitter.finish(&root.children))
}

/// The graph of the chosen e-nodes under construction.
struct Emitter<'a> {
    g: &'a Graph,
    terms: &'a Terms,
    regions: &'a BTreeMap<u32, Vec<Graph>>,
    out: Graph,
    /// Results of each class.
    values: BTreeMap<Id, Vec<ValueId>>,
    /// Node of each class that has one.
    nodes: BTreeMap<Id, NodeId>,
}

impl<'a> Emitter<'a> {
    fn new(g: &'a Graph, terms: &'a Terms, regions: &'a BTreeMap<u32, Vec<Graph>>) -> Self {
        let mut out = g.emptied();
        for (&v, name) in g.inputs.iter().zip(&g.input_names) {
            out.add_input(name, g.ty(v).clone());
        }
        Emitter {
            g,
            terms,
            regions,
            out,
            values: BTreeMap::new(),
            nodes: BTreeMap::new(),
        }
    }

    fn emit(&mut self, class: Id, node: &ENode) -> Result<Vec<ValueId>> {
        match node.sym {
            Sym::Input(i) => Ok(vec![self.out.inputs[i as usize]]),
            Sym::Proj(i) => Ok(vec![self.results(node.children[0])[i as usize]]),
            Sym::Roots => Ok(Vec::new()),
            Sym::Op(op) => self.emit_op(class, op, &node.children),
            Sym::Opaque(n) => self.emit_opaque(class, n, &node.children),
        }
    }

    fn emit_op(&mut self, class: Id, op: OpId, children: &[Id]) -> Result<Vec<ValueId>> {
        let terms = self.terms;
        let placed = terms.eg.analysis.op(op);
        let origin = &terms.origins[terms.facts(class).origin as usize];
        let operands = self.operands(children);
        let values = self.out.add(placed.op.clone(), &operands, origin)?;
        self.last_node(class).device = placed.device.clone();
        Ok(values)
    }

    /// Copies node `n` of the source graph. Its children are operands, then earlier nodes.
    fn emit_opaque(&mut self, class: Id, n: u32, children: &[Id]) -> Result<Vec<ValueId>> {
        let source = self.g.node(NodeId(n));
        let (operands, earlier) = children.split_at(source.inputs.len());
        let operands = self.operands(operands);
        let regions = self.regions.get(&n).unwrap_or(&source.regions).clone();
        let op = source.op.clone();
        let values = self
            .out
            .add_with_regions(op, &operands, regions, &source.origin)?;
        let control = earlier.iter().map(|c| self.nodes[&self.terms.eg.find(*c)]);
        let control = control.collect();
        let node = self.last_node(class);
        node.device = source.device.clone();
        node.control = control;
        Ok(values)
    }

    /// The node just added, as the one of `class`.
    fn last_node(&mut self, class: Id) -> &mut Node {
        let id = NodeId(self.out.n_nodes() as u32 - 1);
        self.nodes.insert(class, id);
        self.out.node_mut(id)
    }

    fn results(&self, class: Id) -> &[ValueId] {
        &self.values[&self.terms.eg.find(class)]
    }

    fn operands(&self, classes: &[Id]) -> Vec<ValueId> {
        classes.iter().map(|c| self.results(*c)[0]).collect()
    }

    fn finish(mut self, roots: &[Id]) -> Graph {
        for (output, &root) in self.g.outputs.iter().zip(roots) {
            let value = self.results(root)[0];
            self.out.add_output(&output.name, value);
        }
        self.out
    }
}
