//! Models from files whose weights go on learning.

use super::model::Model;
use crate::autodiff::{unreached, without_gradient};
use crate::error::{Error, Result};
use crate::ir::{Bindings, ConstData, Graph, Op, Type, ValueId};
use crate::nearest::unknown;
use crate::onnx::{self, Specialisation, Weights};
use crate::passes::{Rebuild, clean};
use crate::rewrite::{self, Phase, rewrite};
use gristmill_runtime::DType;
use gristmill_runtime::exec::Resources;
use regex_lite::Regex;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Which parts of a model learn.
#[derive(Clone, Debug, Default)]
pub struct FineTuning {
    /// A regular expression that is looked for anywhere in a name: initialisers of `f32` and `f64` learn where it matches. Without it all of
    /// them do but scalars, which most exporters make of numbers in the code.
    pub trainable: Option<String>,
    /// The outputs that the objective uses; all of the model's if empty.
    pub outputs: Vec<String>,
    /// Sizes of symbolic dims.
    pub dims: Bindings,
}

/// An ONNX model whose weights are variables of their names, to be put into a [`Model`] by [`Model::pretrained`].
///
/// Weights that learn are `f32` or `f64` initialisers of the main graph which outputs depend on through floating-point values. Statistics of
/// batch normalisation, scales of quantisation, and values that shapes depend on stay as they are. Composites such as softmax and layer
/// normalisation that the file has in single ops are recognised before they are differentiated, so that their gradients are those of the
/// composite.
pub struct Pretrained {
    model: onnx::Model,
    graph: Graph,
    weights: Vec<Weight>,
}

/// A float initialiser of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its name, also that of the variable.
    pub name: String,
    /// Its type.
    pub ty: Type,
    /// Why it does not learn; `None` if it does.
    pub frozen: Option<String>,
}

impl Pretrained {
    /// A model loaded from a file.
    ///
    /// Errors with `InvalidInput` on a pattern that is none, or matches no float initialiser, and on outputs that are not there; as
    /// [`onnx::Model::graph`] does.
    pub fn new(model: &onnx::Model, tuning: &FineTuning) -> Result<Pretrained> {
        let mut weights = candidates(model, tuning)?;
        let graph = loop {
            let spec = Specialisation {
                dims: tuning.dims.clone(),
                variables: learning(&weights).map(|w| w.name.clone()).collect(),
                ..Specialisation::default()
            };
            let (graph, fixed) = model.graph_with_variables(&spec)?;
            freeze(&mut weights, &fixed, "its values decide shapes");
            let graph = with_outputs(graph, &tuning.outputs)?;
            let unused = unused(&graph);
            let names: BTreeSet<String> = learning(&weights).map(|w| w.name.clone()).collect();
            let read: BTreeSet<String> = reads(&graph).into_keys().collect();
            let unread: BTreeSet<String> = names.difference(&read).cloned().collect();
            freeze(&mut weights, &unread, "nothing depends on it");
            if unused.is_empty() {
                break graph;
            }
            freeze(&mut weights, &unused, "no gradient comes to it");
        };
        Ok(Pretrained {
            model: model.clone(),
            graph: recognised(&graph)?,
            weights,
        })
    }

    /// The float initialisers of the model, in its order.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// Names and types of the inputs.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &Type)> {
        let values = self.graph.inputs.iter().map(|&v| self.graph.ty(v));
        let names = self.graph.input_names.iter().map(String::as_str);
        names.zip(values)
    }

    /// Names and types of the outputs.
    pub fn outputs(&self) -> impl Iterator<Item = (&str, &Type)> {
        let outputs = self.graph.outputs.iter();
        outputs.map(|o| (o.name.as_str(), self.graph.ty(o.value)))
    }

    /// An error for each node between weights that learn and outputs that has no gradient.
    pub fn without_gradient(&self) -> Vec<Error> {
        let (values, outputs) = ends(&self.graph);
        without_gradient(&self.graph, &outputs, &values)
    }

    /// Writes the model's file with the values that the variables have now: [`onnx::Model::write_with`].
    pub fn save(&self, resources: &Resources, path: impl AsRef<Path>) -> Result<()> {
        let mut values = Weights::new();
        for weight in learning(&self.weights) {
            let value = resources.get("", &weight.name)?;
            let value = value.ok_or_else(|| {
                let message = format!("variable {:?} has no value: nothing has run", weight.name);
                Error::invalid(message)
            })?;
            values.insert(weight.name.clone(), value);
        }
        self.model.write_with(&values, path)
    }
}

/// The weights that learn.
fn learning(weights: &[Weight]) -> impl Iterator<Item = &Weight> {
    weights.iter().filter(|w| w.frozen.is_none())
}

fn freeze(weights: &mut [Weight], names: &BTreeSet<String>, why: &str) {
    let frozen = weights.iter_mut().filter(|w| names.contains(&w.name));
    frozen.for_each(|w| w.frozen = Some(why.to_owned()));
}

/// The float initialisers, of which some are frozen by what the model says of them.
fn candidates(model: &onnx::Model, tuning: &FineTuning) -> Result<Vec<Weight>> {
    let pattern = tuning.trainable.as_deref().map(compiled).transpose()?;
    let fixed = model.fixed_operands();
    let mut weights = Vec::new();
    for (name, ty) in model.initialisers()? {
        if !ty.dtype.is_float() {
            continue;
        }
        let frozen = match &pattern {
            Some(pattern) if !pattern.is_match(&name) => Some("the pattern does not match".into()),
            None if ty.rank() == 0 => Some("it is a scalar, which only a pattern chooses".into()),
            _ if !matches!(ty.dtype, DType::F32 | DType::F64) => {
                Some(format!("it is {}; f32 and f64 learn", ty.dtype))
            }
            _ => fixed.get(name.as_str()).map(|&why| why.to_owned()),
        };
        weights.push(Weight { name, ty, frozen });
    }
    let matches = |pattern: &Regex| weights.iter().any(|w| pattern.is_match(&w.name));
    match &pattern {
        Some(p) if !matches(p) => Err(Error::invalid(format!(
            "the pattern {:?} matches none of the {} float initialisers",
            tuning.trainable.as_deref().unwrap_or_default(),
            weights.len()
        ))
        .hint("`gristmill check --train` lists them")),
        _ => Ok(weights),
    }
}

fn compiled(pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|e| Error::invalid(format!("pattern {pattern:?}: {e}")))
}

/// The graph with these outputs only; with all if none is named.
fn with_outputs(mut graph: Graph, names: &[String]) -> Result<Graph> {
    let known = || graph.outputs.iter().map(|o| o.name.as_str());
    if let Some(name) = names.iter().find(|&name| known().all(|k| k != name)) {
        return Err(Error::invalid(unknown("output", name, known())));
    }
    if !names.is_empty() {
        graph.outputs.retain(|o| names.contains(&o.name));
    }
    clean(&graph)
}

/// The reads of variables.
fn reads(graph: &Graph) -> BTreeMap<String, ValueId> {
    let read = |(_, node): (_, &crate::ir::Node)| match &node.op {
        Op::ReadVariable { name, .. } => Some((name.clone(), node.outputs[0])),
        _ => None,
    };
    graph.nodes().filter_map(read).collect()
}

/// The variables that no output depends on through floating-point values.
fn unused(graph: &Graph) -> BTreeSet<String> {
    let reads = reads(graph);
    let (values, outputs) = ends(graph);
    let unreached = unreached(graph, &outputs, &values);
    let is_unreached = |(name, v): (String, ValueId)| unreached.contains(&v).then_some(name);
    reads.into_iter().filter_map(is_unreached).collect()
}

/// The reads of variables, and the outputs.
fn ends(graph: &Graph) -> (Vec<ValueId>, Vec<ValueId>) {
    let values = reads(graph).into_values().collect();
    let outputs = graph.outputs.iter().map(|o| o.value).collect();
    (values, outputs)
}

/// The graph with composites where the file has their single ops.
fn recognised(graph: &Graph) -> Result<Graph> {
    let options = rewrite::Options {
        phases: vec![Phase::Simplify, Phase::Recognise],
        ..rewrite::Options::level(1)
    };
    clean(&rewrite(graph, &options)?.0)
}

impl Model {
    /// The nodes of a model from a file, with its weights as variables, whose names have no scopes before them. Inputs that are not given
    /// are inputs of this graph. Gives the outputs by name.
    ///
    /// Errors when a given input is not there or has another type, and as [`Model::variable`] does.
    pub fn pretrained(
        &mut self,
        net: &Pretrained,
        given: &[(&str, ValueId)],
    ) -> Result<BTreeMap<String, ValueId>> {
        let inputs = self.inputs_of(net, given)?;
        let mut variables = Vec::new();
        for (_, node) in net.graph.nodes() {
            if let Op::ReadVariable {
                name,
                initial: Some(initial),
                ..
            } = &node.op
            {
                let read = node.outputs[0];
                let value = self.variable_of(name, net.graph.ty(read), initial)?;
                variables.push((read, value));
            }
        }
        let mut r = Rebuild::onto(&net.graph, self.builder().graph().clone());
        for (old, new) in inputs.into_iter().chain(variables) {
            r.set(old, new);
        }
        for (id, node) in net.graph.nodes() {
            if !node.outputs.iter().any(|&v| r.has(v)) {
                r.copy(id, node)?;
            }
        }
        let outputs = net.graph.outputs.iter();
        let outputs = outputs.map(|o| (o.name.clone(), r.get(o.value)));
        let outputs: Vec<(String, ValueId)> = outputs.collect();
        let b = self.builder();
        *b.graph_mut() = r.graph;
        let own = outputs.into_iter().map(|(name, v)| (name, b.adopted(v)));
        Ok(own.collect())
    }

    /// The inputs of a model from a file, and the values for them.
    fn inputs_of(
        &mut self,
        net: &Pretrained,
        given: &[(&str, ValueId)],
    ) -> Result<Vec<(ValueId, ValueId)>> {
        let known = || net.inputs().map(|(name, _)| name);
        if let Some((name, _)) = given.iter().find(|(name, _)| known().all(|k| k != *name)) {
            return Err(Error::invalid(unknown("input", name, known())));
        }
        let mut values = Vec::new();
        for ((name, ty), &old) in net.inputs().zip(&net.graph.inputs) {
            let value = match given.iter().find(|(own, _)| *own == name) {
                Some(&(_, value)) => value,
                None => self.input(name, ty.dtype, ty.shape.0.clone()),
            };
            let got = self.builder().operand(value)?;
            if got != ty {
                let message = format!("input {name:?} is {got}, expected {ty}");
                return Err(Error::invalid(message));
            }
            values.push((old, value));
        }
        Ok(values)
    }

    /// A variable of a type, whose name has no scopes before it.
    fn variable_of(&mut self, name: &str, ty: &Type, initial: &ConstData) -> Result<ValueId> {
        let shape = ty.static_shape().unwrap_or_default();
        self.named_variable(name.to_owned(), &shape, true, |_| Ok(initial.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::{
        GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorTypeProto,
        TypeProto, TypeValue, ValueInfoProto,
    };

    fn node(op_type: &str, input: &[&str], output: &str) -> NodeProto {
        NodeProto {
            op_type: op_type.to_owned(),
            input: input.iter().map(|&name| name.to_owned()).collect(),
            output: vec![output.to_owned()],
            ..NodeProto::default()
        }
    }

    fn tensor(name: &str, dims: &[i64]) -> TensorProto {
        let n = dims.iter().product::<i64>() as usize;
        TensorProto {
            name: name.to_owned(),
            data_type: 1,
            dims: dims.to_vec(),
            float_data: vec![1.0; n],
            ..TensorProto::default()
        }
    }

    /// A convolution, a batch normalisation, a resize, a factor that is a scalar, and a result that no float depends on.
    fn model() -> onnx::Model {
        let graph = GraphProto {
            node: vec![
                node("Conv", &["x", "filters"], "c"),
                node(
                    "BatchNormalization",
                    &["c", "scale", "offset", "mean", "var"],
                    "n",
                ),
                node("Resize", &["n", "", "scales"], "r"),
                node("Mul", &["r", "factor"], "y"),
                node("Add", &["x", "shift"], "s"),
                node("ArgMax", &["s"], "z"),
            ],
            initializer: vec![
                tensor("filters", &[1, 1, 1, 1]),
                tensor("scale", &[1]),
                tensor("offset", &[1]),
                tensor("mean", &[1]),
                tensor("var", &[1]),
                tensor("scales", &[4]),
                tensor("factor", &[]),
                tensor("shift", &[1]),
                tensor("alone", &[1]),
            ],
            input: vec![ValueInfoProto {
                name: "x".to_owned(),
                r#type: Some(TypeProto {
                    value: Some(TypeValue::Tensor(TensorTypeProto {
                        elem_type: 1,
                        shape: Some(shape(&[1, 1, 2, 2])),
                    })),
                }),
            }],
            output: vec![named("y"), named("z")],
            ..GraphProto::default()
        };
        onnx::Model::from_proto(ModelProto {
            graph: Some(graph),
            opset_import: vec![OperatorSetIdProto {
                domain: String::new(),
                version: 18,
            }],
            ..ModelProto::default()
        })
        .unwrap()
    }

    fn named(name: &str) -> ValueInfoProto {
        ValueInfoProto {
            name: name.to_owned(),
            r#type: None,
        }
    }

    fn shape(dims: &[i64]) -> crate::onnx::proto::TensorShapeProto {
        use crate::onnx::proto::{DimensionProto, DimensionValue, TensorShapeProto};
        let dim = |&n: &i64| DimensionProto {
            value: Some(DimensionValue::Value(n)),
        };
        TensorShapeProto {
            dim: dims.iter().map(dim).collect(),
        }
    }

    fn frozen(tuning: &FineTuning) -> Vec<(String, String)> {
        let net = Pretrained::new(&model(), tuning).unwrap();
        let reason = |w: &Weight| (w.name.clone(), w.frozen.clone().unwrap_or_default());
        net.weights().iter().map(reason).collect()
    }

    #[test]
    fn weights_learn_unless_a_reason_is_given() {
        let reasons = frozen(&FineTuning::default());
        let reason = |name: &str| {
            let found = reasons.iter().find(|(own, _)| own == name);
            found.unwrap().1.as_str()
        };
        for name in ["filters", "scale", "offset"] {
            assert_eq!(reason(name), "", "{name}");
        }
        for name in ["mean", "var"] {
            assert_eq!(reason(name), "statistics of a batch normalisation");
        }
        assert_eq!(reason("scales"), "its values decide shapes");
        assert_eq!(reason("shift"), "no gradient comes to it");
        assert_eq!(reason("alone"), "nothing depends on it");
        assert_eq!(
            reason("factor"),
            "it is a scalar, which only a pattern chooses"
        );
    }

    #[test]
    fn a_pattern_chooses_scalars_and_no_statistics() {
        let reasons = frozen(&FineTuning {
            trainable: Some("factor|mean".to_owned()),
            outputs: vec!["y".to_owned()],
            ..FineTuning::default()
        });
        let learning = reasons.iter().filter(|(_, why)| why.is_empty());
        assert_eq!(
            learning.map(|(name, _)| name).collect::<Vec<_>>(),
            ["factor"]
        );
        let error = Pretrained::new(
            &model(),
            &FineTuning {
                outputs: vec!["w".to_owned()],
                ..FineTuning::default()
            },
        );
        let message = error.err().unwrap().to_string();
        assert!(message.contains("output"), "{message}");
    }
}
