//! Initialisers as variables: models whose weights change.

use super::import::{Importer, Weights};
use super::load::{Model, Specialisation, domain};
use super::proto::{GraphProto, NodeProto};
use super::tensor::{dtype_of, shape_of};
use crate::error::Result;
use crate::ir::{Graph, Type};
use std::collections::{BTreeMap, BTreeSet};

/// Why an operand of a node is not what a gradient should move.
const STATISTICS: &str = "statistics of a batch normalisation";
pub(crate) const RUNNING: &str = "running statistics, which steps move without gradient";
const QUANTIZATION: &str = "a parameter of a quantisation";

impl Model {
    /// Initialisers of the main graph with their types, those of unsupported element types left out.
    pub fn initialisers(&self) -> Result<Vec<(String, Type)>> {
        let mut named = Vec::new();
        for t in &self.graph.initializer {
            if let Ok(dtype) = dtype_of(t.data_type) {
                named.push((t.name.clone(), Type::new(dtype, shape_of(t)?)));
            }
        }
        Ok(named)
    }

    /// [`Model::graph`], and the variables of `spec` that it has as constants: their values decide shapes or other things that are fixed at
    /// import.
    pub(crate) fn graph_with_variables(
        &self,
        spec: &Specialisation,
    ) -> Result<(Graph, BTreeSet<String>)> {
        let mut spec = spec.clone();
        let mut fixed = BTreeSet::new();
        loop {
            let imported = Importer::run(self, &spec, Weights::Skip)?;
            let needed: Vec<&String> = imported.needs.intersection(&spec.variables).collect();
            if imported.errors.is_empty() || needed.is_empty() {
                return Ok((self.graph(&spec)?, fixed));
            }
            fixed.extend(needed.into_iter().cloned());
            spec.variables.retain(|name| !fixed.contains(name));
        }
    }

    /// Initialisers that ops take as operands which no gradient should move, with the reason.
    pub(crate) fn fixed_operands(&self) -> BTreeMap<&str, &'static str> {
        let mut fixed = BTreeMap::new();
        let mut copies = BTreeMap::new();
        visit(&self.graph, &mut |node| {
            if let ("Identity", [from], [to]) = (&*node.op_type, &node.input[..], &node.output[..])
            {
                copies.insert(to.as_str(), from.as_str());
            }
            for (i, name) in node.input.iter().enumerate() {
                if let Some(why) = fixed_operand(node, i) {
                    fixed.insert(original(name, &copies), why);
                }
            }
        });
        fixed
    }
}

/// The name of the value that a value is a copy of, by `Identity`.
fn original<'n>(mut name: &'n str, copies: &BTreeMap<&'n str, &'n str>) -> &'n str {
    // Copies come behind their originals.
    for _ in 0..copies.len() {
        match copies.get(name) {
            Some(from) => name = from,
            None => break,
        }
    }
    name
}

/// Calls `see` with the nodes of a graph, those of subgraphs too.
fn visit<'g>(g: &'g GraphProto, see: &mut dyn FnMut(&'g NodeProto)) {
    for node in &g.node {
        see(node);
        for a in &node.attribute {
            a.g.iter()
                .chain(&a.graphs)
                .for_each(|inner| visit(inner, see));
        }
    }
}

fn is_training(node: &NodeProto) -> bool {
    let mut attributes = node.attribute.iter();
    attributes.any(|a| a.name == "training_mode" && a.i != 0)
}

fn fixed_operand(node: &NodeProto, i: usize) -> Option<&'static str> {
    if !domain(&node.domain).is_empty() {
        return None;
    }
    match (node.op_type.as_str(), i) {
        ("BatchNormalization", 3 | 4) if is_training(node) => Some(RUNNING),
        ("BatchNormalization", 3 | 4) => Some(STATISTICS),
        ("QuantizeLinear" | "DequantizeLinear", _) => Some(QUANTIZATION),
        (op, _) if op.starts_with("QLinear") => Some(QUANTIZATION),
        _ => None,
    }
}
