//! Variables of a session: their values and types.

use crate::error::{Error, Result};
use crate::ir::state::have_common_values;
use crate::ir::{Graph, Type};
use gristmill_runtime::exec::Resources;
use gristmill_runtime::safetensors::label;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Default)]
pub(crate) struct Variables {
    pub(super) values: Arc<Resources>,
    /// Type and first user of each variable, by container and name.
    known: Mutex<BTreeMap<(String, String), (Type, String)>>,
}

impl Variables {
    /// Notes the variables of a model.
    ///
    /// Errors with `InvalidInput`, noting none, when an earlier model of the session has one with another type.
    pub(crate) fn declare(&self, g: &Graph) -> Result<()> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let own = g.variables();
        for (key, ty) in &own {
            let Some((other, user)) = known
                .get(key)
                .filter(|(other, _)| !have_common_values(ty, other))
            else {
                continue;
            };
            let label = label(&key.0, &key.1);
            let message = format!(
                "variable {label:?} of {:?} is {ty}, but the session has it as {other} from {user:?}",
                g.name
            );
            return Err(Error::invalid(message)
                .hint("Options::container keeps the variables of models apart"));
        }
        for (key, ty) in own {
            if let Entry::Vacant(new) = known.entry(key) {
                new.insert((ty, g.name.clone()));
            }
        }
        Ok(())
    }
}
