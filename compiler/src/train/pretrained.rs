//! Fine-tuning of models from files.

use super::model::{Model, is_reserved};
use super::trainer::Trainer;
use crate::autodiff::{unreached, without_gradient};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph, Node, Op, Type, ValueId};
use crate::nearest::unknown;
use crate::onnx::variables::{FixedTensor, RUNNING};
use crate::onnx::{self, Converted, Form, Specialisation, Weights};
use crate::passes::{Rebuild, clean};
use crate::rewrite::{self, Phase, rewrite};
use gristmill_runtime::DType;
use regex_lite::Regex;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The trainable parts of a model.
#[derive(Clone, Debug, Default)]
pub struct FineTuning {
    /// A regular expression, searched anywhere in a name: matching `f32` and `f64` initialisers are trainable. Without it all of them are,
    /// except scalars, and tensors of one element with only `Mul` and `Div` as consumers: most exporters make these of numbers in the code.
    pub trainable: Option<String>,
    /// The outputs used by the objective; all of the model's if empty.
    pub outputs: Vec<String>,
    /// Sizes of symbolic dims.
    pub dims: Bindings,
}

/// An ONNX model whose weights are variables of their names, to be put into a [`Model`] by [`Model::pretrained`].
///
/// Trainable weights are the `f32` and `f64` initialisers of the main graph with a floating-point path to an output. Batch normalisation
/// statistics, quantisation scales and values that decide shapes are frozen. Composites such as softmax and layer normalisation may be
/// single ops in the file: they are recognised before differentiation, so their gradients are those of the composite.
///
/// `BatchNormalization` with `training_mode`, as in models exported for training, uses batch statistics in steps and running
/// statistics in evaluations; steps update the running ones. `Dropout` with `training_mode` drops elements in steps only, chosen by the seed of the [`Model`] too.
pub struct Pretrained {
    model: onnx::Model,
    tuning: FineTuning,
    /// The model in steps.
    step: Graph,
    /// The model in evaluations, with the same inputs and outputs.
    evaluation: Graph,
    weights: Vec<Weight>,
    fixed: Vec<FixedTensor>,
}

/// A float initialiser of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its name, also that of the variable.
    pub name: String,
    /// Its type.
    pub ty: Type,
    /// Reason for not being trainable; `None` if it is.
    pub frozen: Option<String>,
    /// True for a running statistic, which steps move without gradient.
    pub is_running: bool,
}

impl Weight {
    fn is_variable(&self) -> bool {
        self.frozen.is_none() || self.is_running
    }
}

impl Pretrained {
    /// A model loaded from a file.
    ///
    /// Errors with `InvalidInput` on a malformed pattern, a pattern without a matching float initialiser, and unknown outputs; and as
    /// [`onnx::Model::graph`] does.
    pub fn new(model: &onnx::Model, tuning: &FineTuning) -> Result<Pretrained> {
        let mut weights = candidates(model, tuning)?;
        let step = loop {
            let spec = specialisation(tuning, &weights, Form::Step);
            let (graph, fixed) = model.graph_with_variables(&spec)?;
            freeze(&mut weights, &fixed, "its values decide shapes");
            let graph = with_outputs(graph, &tuning.outputs)?;
            let unread = unread(&graph, &weights);
            freeze(&mut weights, &unread, "nothing depends on it");
            let unused = unused(&graph, &weights);
            if unused.is_empty() {
                break recognised(graph)?;
            }
            freeze(&mut weights, &unused, "no gradient comes to it");
        };
        let is_random = |(_, node): (_, &Node)| matches!(node.op, Op::RandomBits { .. });
        let differs = weights.iter().any(|w| w.is_running) || step.nodes().any(is_random);
        let evaluation = match differs {
            true => {
                let spec = specialisation(tuning, &weights, Form::Evaluation);
                recognised(with_outputs(model.graph(&spec)?, &tuning.outputs)?)?
            }
            false => step.clone(),
        };
        Ok(Pretrained {
            model: model.clone(),
            tuning: tuning.clone(),
            step,
            evaluation,
            weights,
            fixed: model.fixed_tensors()?,
        })
    }

    /// The model in steps on batches in so many parts, each with its own statistics.
    fn step_in(&self, n_parts: usize) -> Result<Cow<'_, Graph>> {
        if n_parts == 1 || !self.weights.iter().any(|w| w.is_running) {
            return Ok(Cow::Borrowed(&self.step));
        }
        let spec = Specialisation {
            n_parts,
            ..specialisation(&self.tuning, &self.weights, Form::Step)
        };
        let graph = self.model.graph_with_variables(&spec)?.0;
        let graph = with_outputs(graph, &self.tuning.outputs)?;
        recognised(graph).map(Cow::Owned)
    }

    /// The float initialisers of the model, in its order.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// Tensors beside the float initialisers that may be weights, and do not learn: floats in `Constant` nodes, quantised integers.
    pub fn fixed(&self) -> &[FixedTensor] {
        &self.fixed
    }

    /// A hash of the nodes of the file: equal for files with different initialisers only.
    pub fn digest(&self) -> u64 {
        self.model.digest_of_nodes()
    }

    /// Names and types of the inputs.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &Type)> {
        let values = self.step.inputs.iter().map(|&v| self.step.ty(v));
        let names = self.step.input_names.iter().map(String::as_str);
        names.zip(values)
    }

    /// Names and types of the outputs.
    pub fn outputs(&self) -> impl Iterator<Item = (&str, &Type)> {
        let outputs = self.step.outputs.iter();
        outputs.map(|o| (o.name.as_str(), self.step.ty(o.value)))
    }

    /// An error for each node without gradient between trainable weights and outputs.
    pub fn without_gradient(&self) -> Vec<Error> {
        let (values, outputs) = ends(&self.step, &self.weights);
        without_gradient(&self.step, &outputs, &values)
    }

    /// Writes the model's file with the values that the variables have now, and `BatchNormalization` and `Dropout` in inference form, so that any
    /// runtime computes what evaluations do: [`onnx::Model::write_for_inference`].
    pub fn save(&self, trainer: &Trainer, path: impl AsRef<Path>) -> Result<Converted> {
        self.model.write_for_inference(&self.values(trainer)?, path)
    }

    /// [`Pretrained::save`] with nodes in training form as they are, for a training that goes on elsewhere: [`onnx::Model::write_with`].
    pub fn save_in_training_form(&self, trainer: &Trainer, path: impl AsRef<Path>) -> Result<()> {
        self.model.write_with(&self.values(trainer)?, path)
    }

    /// The values of the variables.
    fn values(&self, trainer: &Trainer) -> Result<Weights> {
        let mut values = Weights::new();
        for weight in self.weights.iter().filter(|w| w.is_variable()) {
            let value = trainer.value(&weight.name)?;
            let value = value.ok_or_else(|| {
                let message = format!(
                    "variable {:?} has no value yet: run a step first",
                    weight.name
                );
                Error::invalid(message)
            })?;
            values.insert(weight.name.clone(), value);
        }
        Ok(values)
    }
}

/// The trainable weights.
fn learning(weights: &[Weight]) -> impl Iterator<Item = &Weight> {
    weights.iter().filter(|w| w.frozen.is_none())
}

fn freeze(weights: &mut [Weight], names: &BTreeSet<String>, why: &str) {
    let frozen = weights.iter_mut().filter(|w| names.contains(&w.name));
    frozen.for_each(|w| w.frozen = Some(why.to_owned()));
}

/// Trainable and frozen initialisers of a model, by a pattern.
struct Choice<'m> {
    pattern: Option<Regex>,
    /// Operands to keep from gradients, with the reason.
    fixed: BTreeMap<&'m str, &'static str>,
    /// Values that only scale.
    factors: BTreeSet<&'m str>,
}

impl Choice<'_> {
    /// Why an initialiser does not learn; `None` if it may.
    fn frozen(&self, name: &str, ty: &Type) -> Option<String> {
        let is_factor = || ty.shape.n_elements().is(1) && self.factors.contains(name);
        let why = match &self.pattern {
            Some(pattern) if !pattern.is_match(name) => "the pattern does not match",
            _ if is_reserved(name) => "its name is one of the optimiser's variables",
            None if ty.rank() == 0 => "it is a scalar, which only a pattern chooses",
            None if is_factor() => "it is one factor, as a scalar is; only a pattern chooses it",
            _ if !is_trainable(ty) => {
                return Some(format!("it is {}; f32 and f64 are trainable", ty.dtype));
            }
            _ => self.fixed.get(name)?,
        };
        Some(why.to_owned())
    }
}

fn is_trainable(ty: &Type) -> bool {
    matches!(ty.dtype, DType::F32 | DType::F64)
}

/// The float initialisers, of which some are frozen by what the model says of them.
fn candidates(model: &onnx::Model, tuning: &FineTuning) -> Result<Vec<Weight>> {
    let choice = Choice {
        pattern: tuning.trainable.as_deref().map(compiled).transpose()?,
        fixed: model.fixed_operands(),
        factors: model.factors(),
    };
    let mut weights = Vec::new();
    for (name, ty) in model.initialisers()? {
        if !ty.dtype.is_float() {
            continue;
        }
        let is_running = choice.fixed.get(name.as_str()) == Some(&RUNNING);
        weights.push(Weight {
            frozen: choice.frozen(&name, &ty),
            is_running: is_running && is_trainable(&ty),
            name,
            ty,
        });
    }
    let matches = |pattern: &Regex| weights.iter().any(|w| pattern.is_match(&w.name));
    match &choice.pattern {
        Some(p) if !matches(p) => Err(Error::invalid(format!(
            "the pattern {:?} matches none of the {} float initialisers",
            p.as_str(),
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

/// The weights without a floating-point path to an output.
fn unused(graph: &Graph, weights: &[Weight]) -> BTreeSet<String> {
    let (values, outputs) = ends(graph, weights);
    let unreached = unreached(graph, &outputs, &values);
    let is_unreached = |(name, v): (String, ValueId)| unreached.contains(&v).then_some(name);
    reads(graph).into_iter().filter_map(is_unreached).collect()
}

/// The weights without a consumer in a graph.
fn unread(graph: &Graph, weights: &[Weight]) -> BTreeSet<String> {
    let read = reads(graph);
    let unread = learning(weights).filter(|w| !read.contains_key(&w.name));
    unread.map(|w| w.name.clone()).collect()
}

/// The reads of the trainable weights, and the outputs.
fn ends(graph: &Graph, weights: &[Weight]) -> (Vec<ValueId>, Vec<ValueId>) {
    let reads = reads(graph);
    let values = learning(weights).filter_map(|w| reads.get(&w.name).copied());
    let outputs = graph.outputs.iter().map(|o| o.value);
    (values.collect(), outputs.collect())
}

fn specialisation(tuning: &FineTuning, weights: &[Weight], form: Form) -> Specialisation {
    let variables = weights.iter().filter(|w| w.is_variable());
    Specialisation {
        dims: tuning.dims.clone(),
        variables: variables.map(|w| w.name.clone()).collect(),
        form,
        ..Specialisation::default()
    }
}

/// A node of a model from a file, with random bits of a model's own.
fn seeded(node: &Node, salt: u64) -> Cow<'_, Node> {
    let mut op = node.op.clone();
    let Op::RandomBits { seed, .. } = &mut op else {
        return Cow::Borrowed(node);
    };
    *seed ^= salt;
    Cow::Owned(Node { op, ..node.clone() })
}

/// The graph with composites where the file has their single ops.
fn recognised(mut graph: Graph) -> Result<Graph> {
    graph.order_state();
    let options = rewrite::Options {
        phases: vec![Phase::Simplify, Phase::Recognise],
        ..rewrite::Options::level(1)
    };
    clean(&rewrite(&graph, &options)?.0)
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
        let graph = match self.is_training() {
            true => net.step_in(self.builder().n_parts())?,
            false => Cow::Borrowed(&net.evaluation),
        };
        let graph = &*graph;
        let inputs = self.inputs_of(net, graph, given)?;
        let reads = reads(graph);
        let mut variables = Vec::new();
        for weight in net.weights.iter().filter(|w| w.is_variable()) {
            if let Some(&read) = reads.get(&weight.name) {
                variables.push((read, self.variable_of(weight, graph, read)?));
            }
        }
        self.copied(graph, inputs.into_iter().chain(variables))
    }

    /// Puts a graph into this one, with values for some of its own, and gives its outputs.
    fn copied(
        &mut self,
        graph: &Graph,
        given: impl Iterator<Item = (ValueId, ValueId)>,
    ) -> Result<BTreeMap<String, ValueId>> {
        let salt = self.next_dropout();
        let mut r = Rebuild::onto(graph, self.builder().graph().clone());
        given.for_each(|(old, new)| r.set(old, new));
        for (id, node) in graph.nodes() {
            if !node.outputs.iter().any(|&v| r.has(v)) {
                r.copy(id, &seeded(node, salt))?;
            }
        }
        let outputs = graph.outputs.iter();
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
        graph: &Graph,
        given: &[(&str, ValueId)],
    ) -> Result<Vec<(ValueId, ValueId)>> {
        let known = || net.inputs().map(|(name, _)| name);
        if let Some((name, _)) = given.iter().find(|(name, _)| known().all(|k| k != *name)) {
            return Err(Error::invalid(unknown("input", name, known())));
        }
        let mut values = Vec::new();
        for ((name, ty), &old) in net.inputs().zip(&graph.inputs) {
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

    /// The variable of a weight that a value is the read of; its name has no scopes before it.
    fn variable_of(&mut self, weight: &Weight, graph: &Graph, read: ValueId) -> Result<ValueId> {
        let op = graph.def_node(read).map(|node| &node.op);
        let Some(Op::ReadVariable {
            initial: Some(initial),
            ..
        }) = op
        else {
            let message = format!("weight {:?} has no initial value", weight.name);
            return Err(Error::internal(message));
        };
        let shape = graph.ty(read).static_shape().unwrap_or_default();
        let learns = weight.frozen.is_none();
        self.named_variable(weight.name.clone(), &shape, learns, |_| Ok(initial.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BatchStatistics, Objective, Sgd, Strategy, Trainer, Training, loss};
    use super::*;
    use crate::Tensor;
    use crate::onnx::proto::{
        AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
        TensorTypeProto, TypeProto, TypeValue, ValueInfoProto,
    };
    use crate::testing::Setup;

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

    fn proto(
        node: Vec<NodeProto>,
        initializer: Vec<TensorProto>,
        input: ValueInfoProto,
        output: Vec<ValueInfoProto>,
    ) -> onnx::Model {
        let graph = GraphProto {
            node,
            initializer,
            input: vec![input],
            output,
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

    /// An input `x` of floats.
    fn input(dims: &[i64]) -> ValueInfoProto {
        ValueInfoProto {
            name: "x".to_owned(),
            r#type: Some(TypeProto {
                value: Some(TypeValue::Tensor(TensorTypeProto {
                    elem_type: 1,
                    shape: Some(shape(dims)),
                })),
            }),
        }
    }

    /// A convolution, a batch normalisation, a resize, a factor that is a scalar, and a result that no float depends on.
    fn model() -> onnx::Model {
        proto(
            vec![
                node("Conv", &["x", "filters"], "c"),
                node("Identity", &["var"], "variance"),
                node(
                    "BatchNormalization",
                    &["c", "scale", "offset", "mean", "variance"],
                    "n",
                ),
                node("Resize", &["n", "", "scales"], "r"),
                node("Mul", &["r", "factor"], "y"),
                node("Add", &["x", "shift"], "s"),
                node("ArgMax", &["s"], "z"),
            ],
            vec![
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
            input(&[1, 1, 2, 2]),
            vec![named("y"), named("z")],
        )
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

    /// The form for training, with a momentum of 0.75.
    fn training_attributes() -> Vec<AttributeProto> {
        let attribute = |name: &str, r#type, i, f| AttributeProto {
            name: name.to_owned(),
            r#type,
            i,
            f,
            ..AttributeProto::default()
        };
        vec![
            attribute("training_mode", 2, 1, 0.0),
            attribute("momentum", 1, 0, 0.75),
        ]
    }

    /// A batch normalisation in its form for training, and its mean over the batch.
    fn training_model() -> onnx::Model {
        let mut normalisation = node(
            "BatchNormalization",
            &["x", "scale", "offset", "mean", "var"],
            "y",
        );
        normalisation.attribute = training_attributes();
        normalisation
            .output
            .extend(["m".to_owned(), "v".to_owned()]);
        let names = ["scale", "offset", "mean", "var"];
        proto(
            vec![normalisation],
            names.iter().map(|name| tensor(name, &[1])).collect(),
            input(&[4, 1]),
            vec![named("y")],
        )
    }

    /// `x` times a factor of one element, normalised twice by the same statistics.
    fn shared_model() -> onnx::Model {
        let norm = |x: &str, y: &str| {
            let mut node = node(
                "BatchNormalization",
                &[x, "scale", "offset", "mean", "var"],
                y,
            );
            node.attribute = training_attributes();
            node.output
                .extend([format!("{y}_mean"), format!("{y}_var")]);
            node
        };
        let names = ["scale", "offset", "mean", "var", "factor"];
        proto(
            vec![
                norm("x", "a"),
                node("Mul", &["x", "factor"], "scaled"),
                norm("scaled", "b"),
                node("Add", &["a", "b"], "y"),
            ],
            names.iter().map(|name| tensor(name, &[1])).collect(),
            input(&[4, 1]),
            vec![named("y")],
        )
    }

    /// PyTorch's two uses of one module: the second moves the statistics from where the first left them.
    #[test]
    fn shared_statistics_move_once_for_each_use() {
        let net = Pretrained::new(&shared_model(), &FineTuning::default()).unwrap();
        let factor = net.weights().iter().find(|w| w.name == "factor").unwrap();
        let why = factor.frozen.as_deref().unwrap();
        assert_eq!(
            why,
            "it is one factor, as a scalar is; only a pattern chooses it"
        );
        let training = Training::from(Sgd::default());
        let trainer = Trainer::new("shared", &training, |m| {
            let y = m.pretrained(&net, &[])?["y"];
            let zero = m.builder().scalar(DType::F32, 0.0);
            let loss = loss::mean_absolute_error(m.builder(), y, zero)?;
            Ok(Objective::new(loss))
        })
        .unwrap();
        let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 7.0], &[4, 1]).unwrap();
        trainer.step([("x", x)]).unwrap();
        let value = |name: &str| {
            let value = trainer.resources().get("", name).unwrap();
            value.unwrap().to_f64s()[0]
        };
        // From 1 towards 4 and towards 5, each by a quarter, twice.
        assert_eq!(value("mean"), (1.0 * 0.75 + 4.0 * 0.25) * 0.75 + 4.0 * 0.25);
        assert_eq!(value("var"), (1.0 * 0.75 + 5.0 * 0.25) * 0.75 + 5.0 * 0.25);
    }

    #[test]
    fn running_statistics_move_in_steps_and_count_in_evaluations() {
        let model = training_model();
        let net = Pretrained::new(&model, &FineTuning::default()).unwrap();
        let sgd = Sgd {
            learning_rate: 0.0.into(),
            ..Sgd::default()
        };
        let training = Training::from(sgd);
        let trainer = Trainer::new("norm", &training, |m| {
            let y = m.pretrained(&net, &[])?["y"];
            let zero = m.builder().scalar(DType::F32, 0.0);
            let loss = loss::mean_absolute_error(m.builder(), y, zero)?;
            Ok(Objective::new(loss).metric("y", y))
        })
        .unwrap();
        assert_eq!(trainer.variables(), ["scale", "offset"]);
        let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 7.0], &[4, 1]).unwrap();
        let evaluate = || trainer.evaluate_batch([("x", x.clone())]).unwrap()["y"].to_f64s()[0];
        // (1 - 1) / sqrt(1 + 1e-5) + 1
        assert!((evaluate() - 1.0).abs() < 1e-5);
        let y = trainer.step([("x", x.clone())]).unwrap().metrics["y"].to_f64s()[0];
        // (1 - 4) / sqrt(5) + 1
        assert!((y - (1.0 - 3.0 / 5f64.sqrt())).abs() < 1e-5, "{y}");
        let value = |name: &str| {
            trainer
                .resources()
                .get("", name)
                .unwrap()
                .unwrap()
                .to_f64s()[0]
        };
        assert_eq!((value("mean"), value("var")), (1.75, 2.0));
        let y = evaluate();
        assert!((y - (1.0 - 0.75 / 2f64.sqrt())).abs() < 1e-5, "{y}");
    }

    #[test]
    fn running_statistics_follow_the_mean_of_the_replicas() {
        let model = training_model();
        let net = Pretrained::new(&model, &FineTuning::default()).unwrap();
        let setup = Setup::on("cpu:2", 2);
        let sgd = Sgd {
            learning_rate: 0.0.into(),
            ..Sgd::default()
        };
        let training = Training {
            strategy: Strategy::Mirrored {
                devices: Vec::new(),
            },
            statistics: BatchStatistics::PerReplica,
            ..Training::from(sgd)
        };
        let trainer = Trainer::in_session(&setup.session(), "norm", &training, |m| {
            let y = m.pretrained(&net, &[])?["y"];
            let zero = m.builder().scalar(DType::F32, 0.0);
            let loss = loss::mean_absolute_error(m.builder(), y, zero)?;
            Ok(Objective::new(loss).metric("y", y))
        })
        .unwrap();
        let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 9.0], &[4, 1]).unwrap();
        let y = trainer.step([("x", x)]).unwrap().metrics["y"].to_f64s();
        // (1 - 2) / sqrt(1) + 1 and (5 - 7) / sqrt(4) + 1, and so on.
        let expected = [0.0, 2.0, 0.0, 2.0];
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
        assert!(y.iter().zip(&expected).all(near), "{y:?}");
        let value = |name: &str| trainer.value(name).unwrap().unwrap().to_f64s()[0];
        assert_eq!((value("mean"), value("var")), (1.875, 1.375));
    }

    /// `w * dropout(x)` with its mask, at a rate of a quarter, and the results of another node of the same name.
    fn model_with_dropout() -> onnx::Model {
        let dropout = |y: &str, mask: &str| {
            let mut node = node("Dropout", &["x", "rate", "training"], y);
            node.name = "dropout".to_owned();
            node.output.push(mask.to_owned());
            node
        };
        let known = |name: &str, data_type, raw_data: Vec<u8>| TensorProto {
            dims: Vec::new(),
            data_type,
            name: name.to_owned(),
            raw_data: raw_data.into(),
            ..TensorProto::default()
        };
        let rate = 0.25f32.to_le_bytes().to_vec();
        let product = node("Mul", &["dropped", "w"], "y");
        proto(
            vec![dropout("dropped", "mask"), dropout("", "other"), product],
            vec![
                tensor("w", &[1]),
                known("rate", 1, rate),
                known("training", 9, vec![1]),
            ],
            input(&[4000]),
            vec![named("y"), named("mask"), named("other")],
        )
    }

    /// The results of two steps, and those of an evaluation.
    fn dropped(net: &Pretrained, seed: u64) -> [Vec<f64>; 3] {
        let training = Training {
            seed,
            ..Training::from(Sgd::default())
        };
        let trainer = Trainer::new("dropout", &training, |m| {
            let outputs = m.pretrained(net, &[])?;
            let (y, mask) = (outputs["y"], outputs["mask"]);
            let b = m.builder();
            let kept = b.cast(mask, DType::F32)?;
            let whole = b.mul(y, kept)?;
            let zero = b.scalar(DType::F32, 0.0);
            let loss = loss::mean_absolute_error(b, y, zero)?;
            let loss = b.mul(loss, zero)?;
            let other = outputs["other"];
            Ok(Objective::new(loss)
                .metric("y", whole)
                .metric("other", other))
        })
        .unwrap();
        let x = || [("x", Tensor::from_slice(&[1f32; 4000], &[4000]).unwrap())];
        let step = || {
            let metrics = trainer.step(x()).unwrap().metrics;
            let y = metrics["y"].to_f64s();
            let kept = metrics["other"].to_f64s();
            let n_alike = y
                .iter()
                .zip(kept)
                .filter(|(y, k)| (**y > 0.0) == (*k > 0.0));
            // 9/16 and 1/16 of all by chance.
            assert!((2350..2650).contains(&n_alike.count()));
            y
        };
        let steps = [step(), step()];
        let evaluation = trainer.evaluate_batch(x()).unwrap()["y"].to_f64s();
        let [first, second] = steps;
        [first, second, evaluation]
    }

    #[test]
    fn dropout_is_for_steps_and_follows_the_seed() {
        let model = model_with_dropout();
        // A factor of one element learns when it is chosen.
        let tuning = FineTuning {
            trainable: Some("^w$".to_owned()),
            ..FineTuning::default()
        };
        let net = Pretrained::new(&model, &tuning).unwrap();
        let [first, second, evaluation] = dropped(&net, 1);
        assert!(evaluation.iter().all(|&y| y == 1.0));
        for step in [&first, &second] {
            let is_mask = |y: &f64| *y == 0.0 || (y - 4.0 / 3.0).abs() < 1e-6;
            assert!(step.iter().all(is_mask));
            let n_kept = step.iter().filter(|&&y| y > 0.0).count();
            assert!((2900..3100).contains(&n_kept), "{n_kept}");
        }
        assert!(first != second, "each step has a mask of its own");
        assert!(dropped(&net, 1)[0] == first);
        assert!(dropped(&net, 2)[0] != first);
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
