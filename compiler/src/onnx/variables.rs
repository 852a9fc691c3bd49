//! Initialisers as variables: models whose weights change.

use super::import::{Importer, Weights};
use super::load::{Model, Specialisation, domain};
use super::proto::{GraphProto, NodeProto, TensorProto};
use super::tensor::{dtype_of, shape_of};
use crate::cost::Fnv;
use crate::error::Result;
use crate::ir::{Graph, Type};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

/// Why an operand of a node is not what a gradient should move.
const STATISTICS: &str = "statistics of a batch normalisation";
pub(crate) const RUNNING: &str = "running statistics, which steps move without gradient";
const QUANTIZATION: &str = "a parameter of a quantisation";
const QUANTIZED: &str = "it is quantised";
const IN_NODE: &str = "it is in a Constant node, not an initialiser";

/// A tensor of a model that may be a weight and that no training moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedTensor {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: Type,
    /// Why it does not learn.
    pub why: &'static str,
}

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

    /// Values that only `Mul` and `Div` take.
    pub(crate) fn factors(&self) -> BTreeSet<&str> {
        let scales = |(node, _): &Use| is(node, &["Mul", "Div"]);
        let uses = self.uses().into_iter();
        let scaling = uses.filter(|(_, uses)| uses.iter().all(scales));
        let mut factors: BTreeSet<&str> = scaling.map(|(name, _)| name).collect();
        for output in &self.graph.output {
            factors.remove(output.name.as_str());
        }
        factors
    }

    /// The uses of values of the main graph and its subgraphs as operands. Those of copies by `Identity` count for the original.
    fn uses(&self) -> BTreeMap<&str, Vec<Use<'_>>> {
        let mut uses: BTreeMap<&str, Vec<Use>> = BTreeMap::new();
        let mut copies = BTreeMap::new();
        visit(&self.graph, &mut |node| {
            if let Some((from, to)) = copy(node) {
                copies.insert(to, from);
                return;
            }
            for (i, name) in node.input.iter().enumerate() {
                let original = original(name, &copies);
                uses.entry(original).or_default().push((node, i));
            }
        });
        uses
    }

    /// Tensors that may be weights and that no training moves: floats in `Constant` nodes, and quantised integers.
    pub(crate) fn fixed_tensors(&self) -> Result<Vec<FixedTensor>> {
        let uses = self.uses();
        let used_as = |name: &str, is_weight: &dyn Fn(&Use) -> bool| {
            let uses = uses.get(name);
            uses.is_some_and(|uses| uses.iter().any(is_weight))
        };
        let mut fixed = Vec::new();
        let mut note = |name: &str, ty: Type, why| {
            let name = name.to_owned();
            fixed.push(FixedTensor { name, ty, why });
        };
        for t in &self.graph.initializer {
            let Ok(dtype) = dtype_of(t.data_type) else {
                continue;
            };
            if dtype.is_int() && used_as(&t.name, &is_quantised) {
                note(&t.name, Type::new(dtype, shape_of(t)?), QUANTIZED);
            }
        }
        let mut constants = Vec::new();
        visit(&self.graph, &mut |node| constants.extend(constant(node)));
        for (name, t) in constants {
            let Ok(dtype) = dtype_of(t.data_type) else {
                continue;
            };
            let shape = shape_of(t)?;
            let has_elements = shape.iter().product::<usize>() > 1;
            if dtype.is_int() && used_as(name, &is_quantised) {
                note(name, Type::new(dtype, shape), QUANTIZED);
            } else if dtype.is_float() && has_elements && used_as(name, &is_weight) {
                note(name, Type::new(dtype, shape), IN_NODE);
            }
        }
        Ok(fixed)
    }

    /// A hash of the nodes: equal for files that differ in initialisers alone.
    pub(crate) fn digest_of_nodes(&self) -> u64 {
        let functions = self.proto.functions.iter().flat_map(|f| &f.node);
        let nodes = self.graph.node.iter().chain(functions);
        let hash = Fnv::default();
        nodes
            .fold(hash, |hash, node| hash.with(&node.encode_to_vec()))
            .value()
    }

    /// Initialisers that ops take as operands which no gradient should move, with the reason.
    pub(crate) fn fixed_operands(&self) -> BTreeMap<&str, &'static str> {
        let mut fixed = BTreeMap::new();
        let mut copies = BTreeMap::new();
        visit(&self.graph, &mut |node| {
            if let Some((from, to)) = copy(node) {
                copies.insert(to, from);
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

/// A node, and the position of an operand.
type Use<'g> = (&'g NodeProto, usize);

/// True for a node of the standard operator set with one of these operators.
fn is(node: &NodeProto, operators: &[&str]) -> bool {
    domain(&node.domain).is_empty() && operators.contains(&node.op_type.as_str())
}

/// Operand and result of an `Identity`.
fn copy(node: &NodeProto) -> Option<(&str, &str)> {
    match (&*node.op_type, &node.input[..], &node.output[..]) {
        ("Identity", [from], [to]) => Some((from, to)),
        _ => None,
    }
}

/// Name and value of a `Constant`.
fn constant(node: &NodeProto) -> Option<(&str, &TensorProto)> {
    let [name] = &node.output[..] else {
        return None;
    };
    let tensors = node.attribute.iter().filter_map(|a| a.t.as_ref());
    let tensor = tensors.last().filter(|_| node.op_type == "Constant")?;
    Some((name, tensor))
}

/// True for an operand whose values a gradient could move: not sizes, bounds or statistics.
fn is_weight(&(node, i): &Use) -> bool {
    let is_setting = i > 0 && is(node, &["Resize", "Upsample", "Pad", "Clip", "Dropout"]);
    !is_setting && !is(node, &["Range", "ConstantOfShape"]) && fixed_operand(node, i).is_none()
}

/// True for integers that stand for floats.
fn is_quantised(&(node, i): &Use) -> bool {
    match node.op_type.as_str() {
        "DequantizeLinear" => i == 0,
        "MatMulInteger" | "ConvInteger" | "QLinearConv" | "QLinearMatMul" => i % 3 == 0 || i == 1,
        _ => false,
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
