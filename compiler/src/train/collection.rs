//! Collections: values of parts of a model, to be found by scope. Terms of the loss, averages to show.

use super::Init;
use super::model::{Model, Variable};
use super::names::Names;
use crate::error::{Error, Result};
use crate::ir::{ScalarOp, ValueId};
use gristmill_runtime::DType;

/// True for the path of a scope and for paths below it. All paths are below the empty scope.
pub(super) fn is_within(path: &str, scope: &str) -> bool {
    let rest = path.strip_prefix(scope);
    scope.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Model {
    /// Adds a value to a collection, with the open scopes.
    ///
    /// Errors with `InvalidInput` when it is no value of this model.
    pub fn collect(&mut self, collection: &str, value: ValueId) -> Result<()> {
        self.builder().operand(value)?;
        let at = self.node_scope();
        let own = self.collections.entry(collection.to_owned());
        own.or_default().push((at, value));
        Ok(())
    }

    /// The values of a collection from within a scope, or from anywhere if it is empty, in their order. None if there is no such
    /// collection.
    pub fn collection(&self, collection: &str, scope: &str) -> Vec<ValueId> {
        let all = self.collections.get(collection).into_iter().flatten();
        let within = all.filter(|(at, _)| is_within(at, scope));
        within.map(|&(_, value)| value).collect()
    }

    /// The values of a collection as `SCOPE/activations`, with a number behind it where a scope has several.
    pub(super) fn tagged(&self, collection: &str) -> Vec<(String, ValueId)> {
        let all = self.collections.get(collection).into_iter().flatten();
        let mut names = Names::default();
        let tag = |(scope, value): &(String, ValueId)| {
            let wanted = format!("{scope}/activations");
            (names.unique(wanted.trim_start_matches('/')), *value)
        };
        all.map(tag).collect()
    }

    /// The variables whose names are within a scope, or all if it is empty, in the order in which they were made.
    pub fn variables_within<'m>(&'m self, scope: &'m str) -> impl Iterator<Item = &'m Variable> {
        let all = self.variables().iter();
        all.filter(move |v| is_within(&v.name, scope))
    }

    /// The moving average of a value of floats over batches, which starts at the value of the first of a training, and at 0 if it is added later: `a -= (1 - decay) * (a - x)`. Evaluations give the
    /// average as steps left it, 0 before the first. The variable `name` has it, `f32`.
    ///
    /// Errors with `InvalidInput` on a decay that is not from 0 to below 1, on values of no known extents, and as
    /// [`variable`](Model::variable) does.
    pub fn moving_average(&mut self, name: &str, x: ValueId, decay: f64) -> Result<ValueId> {
        let ty = self.builder().operand(x)?;
        let shape = ty.static_shape().filter(|_| ty.dtype.is_float());
        let (Some(shape), true) = (shape, (0.0..1.0).contains(&decay)) else {
            let message = format!(
                "moving average of {ty} with decay {decay}: expected floats of known extents, and 0 to below 1"
            );
            return Err(Error::invalid(message));
        };
        let old = self.untrained(name, &shape, Init::Constant(0.0))?;
        if !self.is_training() {
            return Ok(old);
        }
        let b = self.builder();
        let (step, zero) = (b.batches_done()?, b.scalar(DType::I64, 0.0));
        let is_first = b.map(ScalarOp::Eq, &[step, zero])?;
        let x = b.cast(x, DType::F32)?;
        let old = b.map(ScalarOp::Select, &[is_first, x, old])?;
        let difference = b.sub(old, x)?;
        let part = b.scalar(DType::F32, 1.0 - decay);
        let part = b.mul(difference, part)?;
        let moved = b.sub(old, part)?;
        self.assign(name, moved)
    }
}
