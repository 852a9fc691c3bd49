//! Reports on a model that need no compilation: its contents and its problems.

use super::import::declared_type;
use super::load::Model;
use super::proto::{GraphProto, NodeProto, TensorProto, ValueInfoProto};
use super::tensor::{dtype_of, shape_of};
use crate::error::{Error, ErrorKind, Result};
use crate::ir::Type;
use std::collections::{BTreeMap, BTreeSet};

/// A problem that one or more nodes have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Category.
    pub kind: ErrorKind,
    /// The problem, and one thing to try.
    pub message: String,
    /// Paths of the nodes concerned; empty for the model as a whole.
    pub nodes: Vec<String>,
}

impl Problem {
    /// Errors with the same message, whatever the node, as one problem; in order of first
    /// appearance.
    pub(super) fn group(errors: &[Error]) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Vec::new();
        for e in errors {
            let (node, message) = (e.node().map(str::to_owned), message_of(e));
            match problems.iter_mut().find(|p| p.message == message) {
                Some(p) => p.nodes.extend(node),
                None => problems.push(Problem {
                    kind: e.kind(),
                    message,
                    nodes: node.into_iter().collect(),
                }),
            }
        }
        problems
    }

    /// The problems as one error; nodes with the same problem are counted after the first.
    pub(super) fn joined(errors: &[Error]) -> Error {
        let problems = Problem::group(errors).into_iter();
        Error::join(problems.map(Problem::into_error).collect())
    }

    fn into_error(self) -> Error {
        let more = match self.nodes.len() {
            0 | 1 => String::new(),
            2 => " (and 1 more node)".to_owned(),
            n => format!(" (and {} more nodes)", n - 1),
        };
        let e = Error::new(self.kind, self.message + &more);
        match self.nodes.first() {
            Some(first) => e.at(first),
            None => e,
        }
    }
}

/// The text of an error without its node.
fn message_of(e: &Error) -> String {
    let text = e.to_string();
    let place = e.node().map(|n| format!("in node {n:?}: "));
    let message = place.and_then(|p| text.strip_prefix(&p).map(str::to_owned));
    message.unwrap_or(text)
}

fn info_of(v: &ValueInfoProto) -> InputInfo {
    let declared = declared_type(v).ok();
    InputInfo {
        name: v.name.clone(),
        ty: declared.map(|(dtype, dims)| Type::new(dtype, dims)),
    }
}

/// An input or output of a model as declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputInfo {
    /// Name.
    pub name: String,
    /// Type, when dtype and rank are declared.
    pub ty: Option<Type>,
}

/// Facts about a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Name of the graph.
    pub name: String,
    /// Exporter and its version.
    pub producer: String,
    /// Version of the file format.
    pub ir_version: i64,
    /// Versions of operator sets by domain.
    pub opsets: BTreeMap<String, i64>,
    /// Inputs that a run takes.
    pub inputs: Vec<InputInfo>,
    /// Results.
    pub outputs: Vec<InputInfo>,
    /// Elements of all initialisers.
    pub n_parameters: u64,
    /// Bytes of all initialisers.
    pub parameter_bytes: u64,
    /// Nodes by operator, subgraphs and functions included.
    pub op_counts: BTreeMap<String, usize>,
    /// Functions of the model.
    pub n_functions: usize,
}

impl Model {
    /// Facts about the model, without importing it.
    pub fn summary(&self) -> Summary {
        let (p, g) = (self.proto(), self.graph_proto());
        let initialised: BTreeSet<&str> = g.initializer.iter().map(|t| t.name.as_str()).collect();
        let is_free = |v: &&ValueInfoProto| !initialised.contains(v.name.as_str());
        let producer = format!("{} {}", p.producer_name, p.producer_version);
        let mut op_counts = BTreeMap::new();
        count_ops(&g.node, &mut op_counts);
        for f in &p.functions {
            count_ops(&f.node, &mut op_counts);
        }
        let (n_parameters, parameter_bytes) = total_size(&g.initializer);
        Summary {
            name: g.name.clone(),
            producer: producer.trim().to_owned(),
            ir_version: p.ir_version,
            opsets: self.opsets.clone(),
            inputs: g.input.iter().filter(is_free).map(info_of).collect(),
            outputs: g.output.iter().map(info_of).collect(),
            n_parameters,
            parameter_bytes,
            op_counts,
            n_functions: p.functions.len(),
        }
    }
}

/// Elements and bytes of all tensors whose sizes are possible.
fn total_size(tensors: &[TensorProto]) -> (u64, u64) {
    let (mut elements, mut bytes) = (0u64, 0u64);
    for (n, width) in tensors.iter().filter_map(|t| size_of(t).ok()) {
        elements = elements.saturating_add(n);
        bytes = bytes.saturating_add(n.saturating_mul(width));
    }
    (elements, bytes)
}

/// Number of elements, and bytes of each.
fn size_of(t: &TensorProto) -> Result<(u64, u64)> {
    let extents = shape_of(t)?.into_iter().map(|d| d as u64);
    let n = extents.fold(1, u64::saturating_mul);
    Ok((n, dtype_of(t.data_type)?.size_bytes() as u64))
}

/// The operator of a node, with its domain unless it is a standard one.
pub(super) fn operator_name(n: &NodeProto) -> String {
    match n.domain.as_str() {
        "" | "ai.onnx" => n.op_type.clone(),
        d => format!("{d}::{}", n.op_type),
    }
}

fn count_ops(nodes: &[NodeProto], counts: &mut BTreeMap<String, usize>) {
    for n in nodes {
        *counts.entry(operator_name(n)).or_insert(0) += 1;
        let graphs = n.attribute.iter().flat_map(|a| a.g.iter().chain(&a.graphs));
        graphs.for_each(|g: &GraphProto| count_ops(&g.node, counts));
    }
}
