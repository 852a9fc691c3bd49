//! Reports on a model that need no compilation: what is in it, and what stands in the way.

use super::import::declared_type;
use super::load::Model;
use super::proto::{GraphProto, NodeProto};
use super::tensor::{dtype_of, shape_of};
use crate::error::{Error, ErrorKind, Result};
use crate::ir::Type;
use std::collections::{BTreeMap, BTreeSet};

/// A problem that one or more nodes have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Category.
    pub kind: ErrorKind,
    /// What is wrong, and what to try.
    pub message: String,
    /// Paths of the nodes concerned; empty for the model as a whole.
    pub nodes: Vec<String>,
}

impl Problem {
    /// Errors with the same message, whatever the node, as one problem; in order of first appearance.
    pub(super) fn group(errors: &[Error]) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Vec::new();
        for e in errors {
            let node = e.node().map(str::to_owned);
            let text = e.to_string();
            let message = match &node {
                Some(n) => text
                    .strip_prefix(&format!("in node {n:?}: "))
                    .unwrap_or(&text)
                    .to_owned(),
                None => text,
            };
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
        let each = |p: Problem| {
            let more = match p.nodes.len() {
                0 | 1 => String::new(),
                n => format!(" (and {} more nodes)", n - 1),
            };
            let e = Error::new(p.kind, p.message + &more);
            if let Some(first) = p.nodes.first() {
                e.at(first)
            } else {
                e
            }
        };
        Error::join(Problem::group(errors).into_iter().map(each).collect())
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

/// What is in a model.
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
    /// What is in the model.
    pub fn summary(&self) -> Summary {
        let g = self.graph_proto();
        let initialised: BTreeSet<&str> = g.initializer.iter().map(|t| t.name.as_str()).collect();
        let info = |v: &super::proto::ValueInfoProto| InputInfo {
            name: v.name.clone(),
            ty: declared_type(v)
                .ok()
                .map(|(dtype, dims)| Type::new(dtype, dims)),
        };
        let mut op_counts = BTreeMap::new();
        count_ops(&g.node, &mut op_counts);
        self.proto()
            .functions
            .iter()
            .for_each(|f| count_ops(&f.node, &mut op_counts));
        let sizes: Vec<(u64, u64)> = g
            .initializer
            .iter()
            .filter_map(|t| size_of(t).ok())
            .collect();
        let p = self.proto();
        Summary {
            name: g.name.clone(),
            producer: format!("{} {}", p.producer_name, p.producer_version)
                .trim()
                .to_owned(),
            ir_version: p.ir_version,
            opsets: self.opsets.clone(),
            inputs: g
                .input
                .iter()
                .filter(|v| !initialised.contains(v.name.as_str()))
                .map(info)
                .collect(),
            outputs: g.output.iter().map(info).collect(),
            n_parameters: sizes.iter().map(|s| s.0).fold(0, u64::saturating_add),
            parameter_bytes: sizes.iter().map(|s| s.1).fold(0, u64::saturating_add),
            op_counts,
            n_functions: p.functions.len(),
        }
    }
}

fn size_of(t: &super::proto::TensorProto) -> Result<(u64, u64)> {
    let n = shape_of(t)?
        .into_iter()
        .fold(1u64, |n, d| n.saturating_mul(d as u64));
    Ok((
        n,
        n.saturating_mul(dtype_of(t.data_type)?.size_bytes() as u64),
    ))
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
