//! Copies a graph node by node while a pass replaces some of them.

use crate::error::Result;
use crate::ir::{Graph, Node, NodeId, Op, Origin, ValueId};

/// A new graph under construction and the map from old values to new ones.
pub struct Rebuild {
    /// The new graph.
    pub graph: Graph,
    values: Vec<Option<ValueId>>,
    nodes: Vec<Option<NodeId>>,
}

impl Rebuild {
    /// Starts a copy of nodes of `old` behind those of `graph`; no value is mapped yet.
    pub fn onto(old: &Graph, graph: Graph) -> Rebuild {
        Rebuild {
            graph,
            values: vec![None; old.n_values()],
            nodes: vec![None; old.n_nodes()],
        }
    }

    /// Starts a copy of `old` with the same name and inputs.
    pub fn new(old: &Graph) -> Rebuild {
        let mut r = Rebuild::onto(old, old.emptied());
        for (&v, name) in old.inputs.iter().zip(&old.input_names) {
            let new = r.graph.add_input(name, old.ty(v).clone());
            r.set(v, new);
        }
        r
    }

    /// Maps old value `v` to `new`.
    pub fn set(&mut self, v: ValueId, new: ValueId) {
        self.values[v.0 as usize] = Some(new);
    }

    /// Maps old values to new ones.
    pub fn set_all(&mut self, old: &[ValueId], new: &[ValueId]) {
        for (&old, &new) in old.iter().zip(new) {
            self.set(old, new);
        }
    }

    /// True when old value `v` was mapped.
    pub fn has(&self, v: ValueId) -> bool {
        self.values[v.0 as usize].is_some()
    }

    /// The new value for an old one. Panics when it was not mapped yet, which a topological walk
    /// excludes.
    pub fn get(&self, v: ValueId) -> ValueId {
        self.values[v.0 as usize].expect("operands are mapped before their users")
    }

    /// The new operands of an old node.
    pub fn inputs(&self, node: &Node) -> Vec<ValueId> {
        node.inputs.iter().map(|&v| self.get(v)).collect()
    }

    /// Copies a node as it is, with its control edges.
    pub fn copy(&mut self, id: NodeId, node: &Node) -> Result<()> {
        let inputs = self.inputs(node);
        let outputs = self.graph.add_copy(node, &inputs)?;
        self.mapped(id, node, &outputs);
        Ok(())
    }

    /// Copies a node whose regions `pass` replaces.
    pub fn copy_with_regions(
        &mut self,
        id: NodeId,
        node: &Node,
        pass: &dyn Fn(&Graph) -> Result<Graph>,
    ) -> Result<()> {
        let mut node = node.clone();
        for region in &mut node.regions {
            *region = pass(region)?;
        }
        self.copy(id, &node)
    }

    /// Adds a node on the device of `like`.
    pub fn add_like(
        &mut self,
        like: &Node,
        op: Op,
        inputs: &[ValueId],
        origin: &Origin,
    ) -> Result<ValueId> {
        let y = self.graph.add1(op, inputs, origin)?;
        let last = NodeId(self.graph.n_nodes() as u32 - 1);
        self.graph.node_mut(last).device = like.device.clone();
        Ok(y)
    }

    /// Declares that the last node added to the new graph stands for old node `id`.
    pub fn mapped(&mut self, id: NodeId, node: &Node, outputs: &[ValueId]) {
        self.set_all(&node.outputs, outputs);
        let last = NodeId(self.graph.n_nodes() as u32 - 1);
        self.nodes[id.0 as usize] = Some(last);
        let control: Vec<NodeId> = node
            .control
            .iter()
            .filter_map(|c| self.nodes[c.0 as usize])
            .collect();
        self.graph.node_mut(last).control = control;
    }

    /// Adds the outputs of `old` and returns the new graph.
    pub fn finish(mut self, old: &Graph) -> Graph {
        for o in &old.outputs {
            let v = self.get(o.value);
            self.graph.add_output(&o.name, v);
        }
        self.graph
    }
}

/// Walks a graph: regions by `pass`, nodes without control edges by `visit`.
pub(super) fn each_node(
    g: &Graph,
    pass: &dyn Fn(&Graph) -> Result<Graph>,
    visit: &mut dyn FnMut(&mut Rebuild, &Graph, NodeId, &Node) -> Result<()>,
) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    let ordered = g.ordered();
    for (id, node) in g.nodes() {
        if !node.regions.is_empty() && !matches!(node.op, Op::Cluster { .. }) {
            r.copy_with_regions(id, node, pass)?;
        } else if ordered[id.0 as usize] || node.outputs.len() != 1 {
            r.copy(id, node)?;
        } else {
            visit(&mut r, g, id, node)?;
        }
    }
    Ok(r.finish(g))
}
