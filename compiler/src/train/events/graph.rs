//! A graph as TensorBoard draws it.

use super::proto::{
    Attr, AttrValue, DimProto, GraphDef, NodeDef, ShapeList, ShapeProto, VersionDef,
};
use crate::ir::{Def, Dim, Graph, Node, NodeId, Op, Shape, ValueId};
use crate::train::names::Names;
use std::collections::BTreeMap;

/// The graph with a node per op, named by its scope and op; inputs, and variables with their own names, are nodes too.
pub(in crate::train) fn graph_def(g: &Graph) -> GraphDef {
    let drawing = Drawing::new(g);
    let inputs = drawing.inputs.iter().zip(&g.inputs);
    let inputs = inputs.map(|(name, &v)| drawing.single(name, "Placeholder", Vec::new(), v));
    let nodes = g.nodes().map(|(id, node)| drawing.node(id, node));
    let outputs = drawing.outputs.iter().zip(&g.outputs);
    let outputs = outputs.map(|(name, o)| {
        let operand = vec![drawing.value(o.value)];
        drawing.single(name, "Identity", operand, o.value)
    });
    GraphDef {
        node: inputs.chain(nodes).chain(outputs).collect(),
        // The least version that readers of today still take without conversions.
        versions: Some(VersionDef { producer: 22 }),
    }
}

/// A graph with a unique name for each node.
struct Drawing<'g> {
    graph: &'g Graph,
    inputs: Vec<String>,
    nodes: Vec<String>,
    outputs: Vec<String>,
}

impl<'g> Drawing<'g> {
    fn new(graph: &'g Graph) -> Drawing<'g> {
        let mut taken = Names::default();
        let mut names = |name: &str| taken.unique(&plain(name));
        let inputs = graph.input_names.iter();
        let inputs = inputs.map(|name| names(name)).collect();
        let nodes = graph.nodes();
        let nodes = nodes.map(|(_, node)| names(&node_name(node)));
        let nodes = nodes.collect();
        let outputs = graph.outputs.iter();
        let outputs = outputs.map(|o| names(&format!("outputs/{}", o.name)));
        Drawing {
            outputs: outputs.collect(),
            graph,
            inputs,
            nodes,
        }
    }

    /// A value as an operand.
    fn value(&self, v: ValueId) -> String {
        match self.graph.value(v).def {
            Def::Input(i) => self.inputs[i as usize].clone(),
            Def::Node(NodeId(n), 0) => self.nodes[n as usize].clone(),
            Def::Node(NodeId(n), i) => format!("{}:{i}", self.nodes[n as usize]),
        }
    }

    /// A node for a value that no op of the graph has.
    fn single(&self, name: &str, op: &str, input: Vec<String>, v: ValueId) -> NodeDef {
        NodeDef {
            name: name.to_owned(),
            op: op.to_owned(),
            input,
            device: String::new(),
            attr: attributes(self.graph, &[v]),
        }
    }

    fn node(&self, NodeId(id): NodeId, node: &Node) -> NodeDef {
        let operands = node.inputs.iter().map(|&v| self.value(v));
        let earlier = node.control.iter();
        let earlier = earlier.map(|c| format!("^{}", self.nodes[c.0 as usize]));
        let device = node.device.as_ref().map(|request| request.spec.to_string());
        NodeDef {
            name: self.nodes[id as usize].clone(),
            op: op_name(node).to_owned(),
            input: operands.chain(earlier).collect(),
            device: device.unwrap_or_default(),
            attr: attributes(self.graph, &node.outputs),
        }
    }
}

/// A name without the characters that stand for results and waiting in operands, and others that no node of TensorFlow has.
fn plain(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.-/>".contains(c);
    let plain = |c: char| if is_plain(c) { c } else { '_' };
    name.chars().map(plain).collect()
}

/// The op as TensorFlow calls it, where readers draw it in a form of its own.
fn op_name(node: &Node) -> &str {
    match node.op {
        Op::Constant { .. } => "Const",
        _ => node.op.name(),
    }
}

fn node_name(node: &Node) -> String {
    match &node.op {
        Op::ReadVariable { name, .. } => name.clone(),
        Op::AssignVariable { name, .. } => format!("{name}/assign"),
        _ => {
            let scope = scope(node.origin.as_str());
            let name = op_name(node);
            match scope.is_empty() {
                true => name.to_owned(),
                false => format!("{scope}/{name}"),
            }
        }
    }
}

/// The scope of an origin: those of gradients are below `gradients`.
fn scope(origin: &str) -> String {
    let inner = origin
        .strip_prefix("grad(")
        .and_then(|o| o.strip_suffix(')'));
    match inner {
        Some(inner) => format!("gradients/{}", scope(inner)),
        None => origin.trim_matches('/').to_owned(),
    }
    .trim_end_matches('/')
    .to_owned()
}

/// Dtype and shapes of results.
fn attributes(g: &Graph, results: &[ValueId]) -> BTreeMap<String, AttrValue> {
    let shapes = results.iter().map(|&v| shape(&g.ty(v).shape));
    let shapes = ShapeList {
        shape: shapes.collect(),
    };
    let mut attributes = BTreeMap::new();
    let mut add = |name: &str, value: Attr| {
        let value = Some(value);
        attributes.insert(name.to_owned(), AttrValue { value });
    };
    add("_output_shapes", Attr::List(shapes));
    if let Some(&first) = results.first() {
        let dtype = g.ty(first).dtype.to_string();
        add("dtype", Attr::Text(dtype.into_bytes().into()));
    }
    attributes
}

fn shape(shape: &Shape) -> ShapeProto {
    let one = |dim: &Dim| match dim.as_usize() {
        Some(n) => DimProto {
            size: n as i64,
            name: String::new(),
        },
        None => DimProto {
            size: -1,
            name: dim.to_string(),
        },
    };
    ShapeProto {
        dim: shape.iter().map(one).collect(),
    }
}
