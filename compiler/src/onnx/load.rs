//! Reading a model: file or bytes to [`Model`], with checks that need no import.

use super::check::Problem;
use super::import::{Importer, TrainingNode, Weights, declared_type};
use super::proto::{FunctionProto, GraphProto, ModelProto, OperatorSetIdProto};
use super::skim::skim;
use super::tensor::External;
use crate::error::{Error, Result};
use crate::ir::{Graph, Ranges, Type};
use crate::passes::has_run_time_extents;
use gristmill_runtime::Tensor;
use gristmill_runtime::files::{self, Kind};
use prost::Message;
use prost::bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Versions of the standard operator set that are taken: up to that of ONNX 1.23. Below 6 only
/// operators that have not changed since are taken.
pub(super) const OPSETS: std::ops::RangeInclusive<i64> = 1..=28;

/// Versions of operator sets by domain; the standard domain is the empty string.
pub(super) type Opsets = BTreeMap<String, i64>;

/// An ONNX model as read, not yet imported.
#[derive(Clone)]
pub struct Model {
    pub(super) proto: ModelProto,
    pub(super) graph: GraphProto,
    pub(super) external: External,
    pub(super) opsets: Opsets,
    /// Functions by domain, name and overload.
    pub(super) functions: BTreeMap<(String, String, String), usize>,
}

/// Decisions about a model that are left to runs.
#[derive(Default)]
pub(crate) struct LeftOpen {
    /// Names of the inputs whose contents decide shapes.
    pub(crate) values: BTreeSet<String>,
    /// True when a run decides extents of the model.
    pub(crate) has_extents: bool,
    /// Warnings of the import.
    pub(crate) warnings: Vec<String>,
}

/// Inputs with their types, and names of outputs.
pub type Interface = (Vec<(String, Type)>, Vec<String>);

/// Facts about the inputs that are known when a model is imported.
#[derive(Clone, Debug, Default)]
pub struct Specialisation {
    /// Values of named dims.
    pub dims: BTreeMap<String, usize>,
    /// Ranges of named dims: the imported graph is right for sizes within them only.
    pub ranges: Ranges,
    /// Shapes of inputs by name.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// Values of inputs by name, for inputs that determine shapes. The imported graph is right for
    /// these values only.
    pub values: BTreeMap<String, Tensor>,
    /// Initialisers of the main graph that become variables of their names, whose initial values are
    /// the file's.
    pub variables: BTreeSet<String>,
    /// The form of nodes with `training_mode`.
    pub form: Form,
    /// Seed of `Dropout` with `training_mode`, outside of training.
    pub seed: u64,
    /// In a step of training: equal parts of the batch with statistics of their own, if more than 1.
    pub n_parts: usize,
}

/// The form that `BatchNormalization` and `Dropout` with `training_mode` take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// As the standard says: statistics are those of the batch, and elements are dropped, chosen by [`Specialisation::seed`]. The graph
    /// assigns nothing.
    #[default]
    Inference,
    /// A step of training: statistics are those of the batch, and the running ones, where they are variables, move towards them. As the
    /// standard says, the running variance follows the biased one. Elements are dropped by the number of the step.
    Step,
    /// An evaluation in between: statistics are the running ones, and nothing is dropped.
    Evaluation,
}

/// Reads a model file, but not its large weights: the file stays open, and each is read when code
/// is generated for its use. Bytes that change in the meantime change the weights. External data is
/// looked for in its folder.
///
/// Errors with `InvalidInput` when the file is not a model, `Unsupported` when its operator sets
/// are not taken.
pub fn load(path: impl AsRef<Path>) -> Result<Model> {
    let path = path.as_ref();
    let read = || -> Result<Model> {
        let io = |e: std::io::Error| Error::invalid(e.to_string());
        let file = files::open(path).map_err(io)?;
        let n_bytes = file.metadata().map_err(io)?.len();
        Model::decode(skim(file, n_bytes)?.into(), External::beside(path))
    };
    read().map_err(|e| {
        let e = match Kind::of(path) {
            Some(kind) => of_other_kind(kind),
            None => e,
        };
        e.context(format!("cannot load {}", path.display()))
    })
}

/// The error for a file that holds something else.
fn of_other_kind(kind: Kind) -> Error {
    let hint = kind.hint().unwrap_or("export the model to ONNX");
    Error::invalid(format!("it is {kind}, not an ONNX model")).hint(hint)
}

impl Model {
    /// A model from the bytes of its file. External data is refused.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Model> {
        Model::decode(bytes.into(), External::none())
    }

    fn decode(bytes: Bytes, external: External) -> Result<Model> {
        let proto = ModelProto::decode(bytes)
            .map_err(|e| Error::invalid(format!("not an ONNX model: {e}")))?;
        Model::of(proto, external)
    }

    /// A model from its message.
    pub fn from_proto(proto: ModelProto) -> Result<Model> {
        Model::of(proto, External::none())
    }

    fn of(mut proto: ModelProto, external: External) -> Result<Model> {
        let graph = proto
            .graph
            .take()
            .ok_or_else(|| Error::invalid("not an ONNX model: it has no graph"))?;
        let opsets = opsets_of(&proto.opset_import)?;
        if opsets.is_empty() {
            return Err(Error::invalid("the model imports no operator set"));
        }
        let mut functions = BTreeMap::new();
        for (i, f) in proto.functions.iter().enumerate() {
            let key = (
                domain(&f.domain).to_owned(),
                f.name.clone(),
                f.overload.clone(),
            );
            if functions.insert(key, i).is_some() {
                return Err(Error::invalid(format!(
                    "function {:?} is defined twice",
                    f.name
                )));
            }
        }
        Ok(Model {
            proto,
            graph,
            external,
            opsets,
            functions,
        })
    }

    /// The model's message without its graph, which is [`Model::graph_proto`].
    pub fn proto(&self) -> &ModelProto {
        &self.proto
    }

    /// The main graph's message.
    pub fn graph_proto(&self) -> &GraphProto {
        &self.graph
    }

    pub(super) fn function(
        &self,
        domain: &str,
        name: &str,
        overload: &str,
    ) -> Option<&FunctionProto> {
        let key = (domain.to_owned(), name.to_owned(), overload.to_owned());
        self.functions.get(&key).map(|&i| &self.proto.functions[i])
    }

    /// Imports the model. Named dims that `spec` leaves open become symbols.
    ///
    /// Errors list all problems found: `InvalidInput` for a malformed model, `Unsupported` for one
    /// that is not taken.
    pub fn graph(&self, spec: &Specialisation) -> Result<Graph> {
        let imported = Importer::run(self, spec, Weights::Read)?;
        match imported.graph {
            Some(graph) if imported.errors.is_empty() => Ok(graph),
            _ => Err(Problem::joined(&imported.errors)),
        }
    }

    /// Names of the inputs whose values, not given by `spec`, determine shapes or other things
    /// fixed at import.
    pub fn required_values(&self, spec: &Specialisation) -> Result<BTreeSet<String>> {
        Ok(Importer::run(self, spec, Weights::Skip)?.needs)
    }

    /// The decisions that are left to runs, and warnings. Where the model cannot be imported without sizes, these are of some that were
    /// tried.
    pub(crate) fn left_open(&self, spec: &Specialisation) -> Result<LeftOpen> {
        let imported = Importer::run(self, spec, Weights::Skip)?;
        if !imported.errors.is_empty() {
            let trial = self.trial(spec)?;
            return Ok(LeftOpen {
                values: trial.values,
                has_extents: false,
                warnings: trial.warnings,
            });
        }
        let graph = imported.graph.as_ref();
        Ok(LeftOpen {
            values: imported.needs,
            has_extents: graph.is_some_and(has_run_time_extents),
            warnings: TrainingNode::warnings(&imported.visits),
        })
    }

    /// Names and types of the inputs that a run takes, dims bound as `spec` says, and names of the
    /// outputs.
    pub fn interface(&self, spec: &Specialisation) -> Result<Interface> {
        let initialised: BTreeSet<&str> = self
            .graph
            .initializer
            .iter()
            .map(|t| t.name.as_str())
            .collect();
        let free = self
            .graph
            .input
            .iter()
            .filter(|v| !initialised.contains(v.name.as_str()));
        let typed = free.map(|v| {
            let (dtype, dims) = declared_type(v)?;
            let shape = dims.iter().map(|d| d.bind(&spec.dims)).collect();
            Ok((v.name.clone(), Type { dtype, shape }))
        });
        Ok((
            typed.collect::<Result<_>>()?,
            self.graph.output.iter().map(|o| o.name.clone()).collect(),
        ))
    }

    /// Everything that stands in the way of importing the model, grouped. Empty when
    /// [`Model::graph`] succeeds.
    pub fn check(&self, spec: &Specialisation) -> Result<Vec<Problem>> {
        let imported = Importer::run(self, spec, Weights::Skip)?;
        Ok(Problem::group(&imported.errors))
    }
}

/// Domain of standard operators in its short form.
pub(super) fn domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Versions by domain, checked.
pub(super) fn opsets_of(imports: &[OperatorSetIdProto]) -> Result<Opsets> {
    let mut opsets = Opsets::new();
    for o in imports {
        if domain(&o.domain).is_empty() && !OPSETS.contains(&o.version) {
            return Err(Error::unsupported(format!(
                "operator set {} of the standard domain; {} to {} are supported",
                o.version,
                OPSETS.start(),
                OPSETS.end()
            ))
            .hint("export the model with opset 20"));
        }
        opsets.insert(domain(&o.domain).to_owned(), o.version);
    }
    Ok(opsets)
}
