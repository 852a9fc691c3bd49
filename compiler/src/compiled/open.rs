//! Models with open inputs: a compiled model for each structure of these.

use super::executable::held_by_graph;
use super::{Common, Compiled, Outputs};
use crate::error::Result;
use crate::onnx::{Model, Structure};
use crate::options::Options;
use crate::session::cache::{Key, Specialisations};
use gristmill_runtime::Tensor;
use std::sync::Arc;

/// A model whose runs decide how many tensors, or of which ranks, some inputs have.
pub(super) struct Open {
    model: Arc<Model>,
    /// The structure as far as options decide it.
    known: Structure,
    options: Options,
    forms: Specialisations<Compiled>,
    common: Arc<Common>,
}

/// A model as options close it.
pub(super) enum Closed {
    /// Names and types of all inputs are known.
    Model(Arc<Model>),
    /// Runs decide some.
    Open(Box<Open>),
}

impl Closed {
    /// The model with sizes of `options` as numbers of tensors; these are taken out.
    pub(super) fn of(
        model: &Arc<Model>,
        options: &mut Options,
        common: &Arc<Common>,
    ) -> Result<Closed> {
        let known = model.structure_by(&mut options.dims)?;
        let mut open = model.open_inputs()?.into_iter().peekable();
        if open.peek().is_none() {
            return Ok(Closed::Model(model.clone()));
        }
        if open.all(|input| known.contains_key(&input.name)) {
            return Ok(Closed::Model(Arc::new(model.closed(&known)?)));
        }
        Ok(Closed::Open(Open::new(model, known, options, common)))
    }
}

impl Open {
    fn new(
        model: &Arc<Model>,
        known: Structure,
        options: &Options,
        common: &Arc<Common>,
    ) -> Box<Open> {
        Box::new(Open {
            model: model.clone(),
            known,
            options: options.clone(),
            forms: Specialisations::new(common.session.caches()),
            common: common.clone(),
        })
    }

    /// The results for inputs by name, compiled for their structure.
    pub(super) fn run(&self, inputs: Vec<(String, Tensor)>) -> Result<Outputs> {
        self.form(&self.structure(&inputs)?)?.run(inputs)
    }

    fn structure(&self, inputs: &[(String, Tensor)]) -> Result<Structure> {
        let ranks = inputs.iter().map(|(n, t)| (n.as_str(), t.shape().len()));
        self.model.structure_of(&self.known, ranks)
    }

    /// The model for a structure.
    fn form(&self, structure: &Structure) -> Result<Arc<Compiled>> {
        let key = key(structure);
        let n_nodes = self.model.graph_proto().node.len();
        let make = || Ok((self.compiled(structure)?, held_by_graph(n_nodes)));
        self.forms.get_or_make(key, make, |_, _| {})
    }

    fn compiled(&self, structure: &Structure) -> Result<Compiled> {
        let closed = Arc::new(self.model.closed(structure)?);
        Compiled::of(closed.into(), &self.options, &self.common)
    }

    pub(super) fn output_names(&self) -> Vec<String> {
        let outputs = self.model.graph_proto().output.iter();
        outputs.map(|output| output.name.clone()).collect()
    }

    /// The forms that were made so far.
    pub(super) fn forms(&self) -> Vec<Arc<Compiled>> {
        self.forms.values()
    }
}

fn key(structure: &Structure) -> Key {
    (structure.values().cloned().collect(), Vec::new())
}
