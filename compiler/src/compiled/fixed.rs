//! The program of a model of fixed shapes, without anything that runs it.

use super::{Compiled, InputShapes};
use crate::error::{Error, Result};
use crate::ir::Type;
use crate::passes::indexed::indexed_extents;
use gristmill_runtime::program::Program;
use std::collections::BTreeMap;
use std::sync::Arc;

impl Compiled {
    /// The program of a model whose shapes are all known, and the extents that its inputs index.
    ///
    /// Errors with the dims that have no size, or with the reason why the program is known during a run only.
    pub(crate) fn static_program(&self) -> Result<(Arc<Program>, Vec<Option<u64>>)> {
        if self.open.is_some() {
            let message = "the structure of the inputs is known during a run only";
            return Err(Error::unsupported(message)
                .hint("if an input is a list, --set NAME=N gives its length"));
        }
        if !self.is_whole() {
            let message = "the data decides extents of this model, and a program has fixed sizes";
            return Err(Error::unsupported(message).hint("gristmill run compiles it as it runs"));
        }
        if let Some(name) = self.value_inputs.first() {
            let message = format!("the contents of input {name:?} decide shapes");
            return Err(Error::unsupported(message));
        }
        let shape = |(name, ty): &(String, Type)| {
            ty.static_shape().ok_or_else(|| {
                let open = ty.shape.iter().find(|d| d.as_const().is_none());
                let dim = open.map_or("DIM".to_owned(), ToString::to_string);
                let message = format!("input {name:?} has type {ty}: a program has fixed sizes");
                let hint = format!("--set {dim}=1, or --shape {dim}=1,8,32 for several");
                Error::invalid(message).hint(hint)
            })
        };
        let inputs = InputShapes {
            shapes: self.inputs.iter().map(shape).collect::<Result<_>>()?,
            values: BTreeMap::new(),
        };
        let indexed = indexed_extents(&self.graph(&inputs)?);
        Ok((self.lowered(&inputs)?.program, indexed))
    }
}
