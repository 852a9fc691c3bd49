//! Variables of a session: their values and types.

use crate::error::{Error, Result};
use crate::ir::state::have_common_values;
use crate::ir::{Graph, Type};
use gristmill_runtime::exec::Resources;
use gristmill_runtime::safetensors::label;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Type and first user of each variable, by container and name.
type Known = BTreeMap<(String, String), (Type, String)>;

#[derive(Default)]
pub(crate) struct Variables {
    pub(super) values: Arc<Resources>,
    known: Mutex<Known>,
}

impl Variables {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Errors with `InvalidInput` when an earlier model of the session has a variable of this one with another type.
    pub(crate) fn check(&self, g: &Graph) -> Result<()> {
        check(&self.lock(), g)
    }

    /// Notes the variables of a model. Errors as [`Variables::check`], noting none.
    pub(crate) fn declare(&self, g: &Graph) -> Result<()> {
        let mut known = self.lock();
        check(&known, g)?;
        for (key, ty) in g.variables() {
            let (known, _) = known
                .entry(key)
                .or_insert_with(|| (ty.clone(), g.name.clone()));
            // An extent that a model fixes is fixed for the next ones.
            let extents = known.shape.0.iter_mut().zip(ty.shape.iter());
            let open = extents.filter(|(known, _)| known.as_const().is_none());
            open.for_each(|(known, own)| *known = own.clone());
        }
        Ok(())
    }
}

fn check(known: &Known, g: &Graph) -> Result<()> {
    for (key, ty) in g.variables() {
        let Some((other, user)) = known.get(&key) else {
            continue;
        };
        if !have_common_values(&ty, other) {
            let (label, name) = (label(&key.0, &key.1), &g.name);
            let message = format!(
                "variable {label:?} of {name:?} is {ty}, but the session has it as {other} from {user:?}"
            );
            return Err(Error::invalid(message)
                .hint("Options::container keeps the variables of models apart"));
        }
    }
    Ok(())
}
