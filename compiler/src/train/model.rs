//! A graph under construction with variables named by scopes, and layers with their own variables.

use super::{Init, accumulation};
use crate::error::{Error, Result};
use crate::ir::{ConstData, DeviceScope, Dim, Graph, GraphBuilder, Shape, ValueId};
use gristmill_runtime::DType;
use std::collections::BTreeMap;

/// A graph with variables.
///
/// Scopes give names to variables and node paths: a variable `weights` within [`scope`](Model::scope) `dense` within `head` is
/// `head/dense/weights`. Names are unique; [`reusing`](Model::reusing) finds existing variables.
pub struct Model {
    builder: GraphBuilder,
    scopes: Vec<Scope>,
    pub(super) seed: u64,
    /// Dropouts so far.
    pub(super) n_dropouts: usize,
    is_training: bool,
    reuses: bool,
    variables: Vec<Variable>,
    /// Values by collection, each with the scopes that were open.
    pub(super) collections: BTreeMap<String, Vec<(String, ValueId)>>,
}

/// An open scope.
struct Scope {
    name: String,
    /// False where it gives names to nodes alone.
    names_variables: bool,
}

/// A variable of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name, scopes included.
    pub name: String,
    /// Its value.
    pub value: ValueId,
    /// True when steps move it by its gradient; the layer itself moves the others.
    pub is_trained: bool,
}

impl Model {
    /// An empty graph. The seed decides initial values and dropout masks; `is_training` selects the form of layers such as dropout.
    pub fn new(name: &str, seed: u64, is_training: bool) -> Model {
        Model {
            builder: GraphBuilder::new(name),
            scopes: Vec::new(),
            seed,
            n_dropouts: 0,
            is_training,
            reuses: false,
            variables: Vec::new(),
            collections: BTreeMap::new(),
        }
    }

    /// True for the graph of a training step, false for evaluation.
    pub fn is_training(&self) -> bool {
        self.is_training
    }

    /// The graph under construction, for ops of all kinds.
    pub fn builder(&mut self) -> &mut GraphBuilder {
        &mut self.builder
    }

    /// An input of a run.
    pub fn input<D: Into<Dim>>(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl IntoIterator<Item = D>,
    ) -> ValueId {
        self.builder.input(name, dtype, shape)
    }

    /// Puts the names of the variables and nodes of `build` below `name`.
    pub fn scope<T>(
        &mut self,
        name: &str,
        build: impl FnOnce(&mut Model) -> Result<T>,
    ) -> Result<T> {
        self.within(name, true, build)
    }

    /// Puts the names of the nodes of `build` below `name`, and leaves names of variables alone: each tower with shared variables
    /// ([`reusing`](Model::reusing)) has its own name scope.
    pub fn name_scope<T>(
        &mut self,
        name: &str,
        build: impl FnOnce(&mut Model) -> Result<T>,
    ) -> Result<T> {
        self.within(name, false, build)
    }

    /// Puts the nodes and variables of `build` on a device: a text such as `"/gpu:1"`, or a
    /// [`DeviceScope`]. See [`GraphBuilder::with_device`].
    ///
    /// Errors when the text cannot be read, or scopes were left open inside.
    #[track_caller]
    pub fn with_device<T, S>(
        &mut self,
        scope: S,
        build: impl FnOnce(&mut Model) -> Result<T>,
    ) -> Result<T>
    where
        S: TryInto<DeviceScope>,
        Error: From<S::Error>,
    {
        let token = self.builder.enter_device(scope)?;
        let made = build(self);
        self.builder.leave(token, made)
    }

    fn within<T>(
        &mut self,
        name: &str,
        names_variables: bool,
        build: impl FnOnce(&mut Model) -> Result<T>,
    ) -> Result<T> {
        self.scopes.push(Scope {
            name: name.to_owned(),
            names_variables,
        });
        self.set_origin();
        let made = build(self);
        self.scopes.pop();
        self.set_origin();
        made
    }

    /// Reuses existing variables of the same names and types within `build`. A new variable is an error.
    pub fn reusing<T>(&mut self, build: impl FnOnce(&mut Model) -> Result<T>) -> Result<T> {
        let before = std::mem::replace(&mut self.reuses, true);
        let made = build(self);
        self.reuses = before;
        made
    }

    fn set_origin(&mut self) {
        let path = format!("/{}", self.node_scope());
        self.builder.set_origin(&path);
    }

    /// The open scopes as they name nodes.
    pub(super) fn node_scope(&self) -> String {
        let names = self.scopes.iter().map(|s| s.name.as_str());
        names.collect::<Vec<_>>().join("/")
    }

    /// A variable's name in the open scopes.
    pub(super) fn path(&self, name: &str) -> String {
        let scopes = self.scopes.iter().filter(|s| s.names_variables);
        let parts = scopes.map(|s| s.name.as_str()).chain([name]);
        parts.collect::<Vec<_>>().join("/")
    }

    /// A trainable `f32` variable with a name in the open scopes: its value.
    ///
    /// Errors when the variable exists already; within [`reusing`](Model::reusing), when it does not exist or has another shape.
    pub fn variable(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ValueId> {
        self.any_variable(name, shape, init, true)
    }

    /// The same for a variable without gradient: its layer assigns it.
    pub fn untrained(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ValueId> {
        self.any_variable(name, shape, init, false)
    }

    fn any_variable(
        &mut self,
        name: &str,
        shape: &[usize],
        init: Init,
        is_trained: bool,
    ) -> Result<ValueId> {
        let (name, seed) = (self.path(name), self.seed);
        let values = |name: &str| Ok(init.values(DType::F32, shape, seed, name)?.into());
        self.named_variable(name, shape, is_trained, values)
    }

    /// A variable of a name with all scopes, with the initial value that `values` gives by its name.
    pub(super) fn named_variable(
        &mut self,
        name: String,
        shape: &[usize],
        is_trained: bool,
        values: impl FnOnce(&str) -> Result<ConstData>,
    ) -> Result<ValueId> {
        if is_reserved(&name) {
            let message =
                format!("variable {name:?}: training has variables of its own in this folder");
            return Err(Error::invalid(message).hint("another name for the outermost scope"));
        }
        let found = self.variables.iter().find(|own| own.name == name);
        match (found.map(|own| own.value), self.reuses) {
            (Some(v), true) => self.checked(&name, v, shape),
            (None, false) => {
                let initial = values(&name)?;
                let value = self.builder.variable(&name, initial)?;
                self.variables.push(Variable {
                    name,
                    value,
                    is_trained,
                });
                Ok(value)
            }
            (Some(_), false) => Err(Error::invalid(format!(
                "variable {name:?} exists already; reuse it inside Model::reusing"
            ))),
            (None, true) => Err(Error::invalid(format!(
                "variable {name:?} does not exist, so Model::reusing cannot reuse it"
            ))),
        }
    }

    /// Assigns a variable of a name in the open scopes.
    pub fn assign(&mut self, name: &str, value: ValueId) -> Result<ValueId> {
        let name = self.path(name);
        self.builder.assign_variable(&name, value)
    }

    fn checked(&self, path: &str, v: ValueId, shape: &[usize]) -> Result<ValueId> {
        let ty = self.builder.operand(v)?;
        match ty.static_shape().is_some_and(|own| own == shape) {
            true => Ok(v),
            false => Err(Error::invalid(format!(
                "variable {path:?} is {ty} and cannot be reused with shape {shape:?}"
            ))),
        }
    }

    /// The variables so far, in order of creation.
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// `x * weights + bias` over the last axis: `[.., in]` to `[.., units]`. Variables `weights` `[in, units]` and `bias`.
    pub fn dense(&mut self, x: ValueId, units: usize) -> Result<ValueId> {
        let shape = self.builder.operand(x)?.shape.clone();
        let inputs = last_extent("dense", &shape)?;
        let weights = self.variable("weights", &[inputs, units], Init::GlorotUniform)?;
        let bias = self.variable("bias", &[units], Init::Constant(0.0))?;
        let product = self.builder.matmul(x, weights)?;
        self.builder.add_(product, bias)
    }

    /// All axes but the first as one: `[batch, ..]` to `[batch, n]`.
    pub fn flatten(&mut self, x: ValueId) -> Result<ValueId> {
        let shape = self.builder.operand(x)?.shape.clone();
        let Some((batch, rest)) = shape.split_first() else {
            return Err(Error::invalid(
                "flatten: the operand is a scalar, expected [batch, ..]",
            ));
        };
        let one = Dim::from(1);
        let n = rest.iter().fold(one, |n, d| n.product(d));
        self.builder.reshape(x, [batch.clone(), n])
    }

    /// The graph without a loss, verified: for a program that predicts or generates. [`Session::compile`](crate::Session::compile) in the session of a
    /// [`Trainer`](super::Trainer), and with its [`Options::container`](crate::Options::container), gives its variables the trained values, now and
    /// after later steps.
    ///
    /// Errors as [`GraphBuilder::finish`] does.
    pub fn finish(self) -> Result<Graph> {
        self.builder.finish()
    }

    /// The builder, with the variables.
    pub(super) fn into_parts(self) -> (GraphBuilder, Vec<Variable>) {
        (self.builder, self.variables)
    }
}

/// True for names in the folders of training's own variables.
pub(super) fn is_reserved(name: &str) -> bool {
    let folders = ["optimizer/", "average/", accumulation::FOLDER];
    folders.iter().any(|folder| name.starts_with(folder))
}

/// The last extent of an operand of a layer.
pub(super) fn last_extent(layer: &str, shape: &Shape) -> Result<usize> {
    let extent = shape.last().and_then(Dim::as_usize);
    extent.ok_or_else(|| {
        Error::invalid(format!(
            "{layer}: the operand has the shape {shape}, expected a last axis of known extent"
        ))
    })
}
