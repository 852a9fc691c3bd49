//! Variables: state that outlives a run, in containers that sessions can share.

use crate::dtype::DType;
use crate::error::Error;
use crate::program::VariableSpec;
use crate::sync::lock;
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// A set of variables keyed (container, name). Clone the `Arc` to share it between executors. Runs
/// of programs that use variables come one after the other, so that what one reads and then assigns
/// no other has assigned meanwhile.
#[derive(Default)]
pub struct Resources {
    variables: Mutex<BTreeMap<(String, String), Arc<Variable>>>,
    /// Held by a run that uses variables.
    pub(crate) run: Mutex<()>,
}

/// One variable. Memory is allocated when it is declared.
pub(crate) struct Variable {
    label: String,
    dtype: DType,
    shape: Vec<usize>,
    initial: Option<Tensor>,
    state: Mutex<State>,
}

struct State {
    assigned: bool,
    value: Tensor,
}

impl fmt::Debug for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl Resources {
    /// The current value of a variable, `None` if there is no such variable or it was never assigned.
    pub fn get(&self, container: &str, name: &str) -> Option<Tensor> {
        let variable = lock(&self.variables)
            .get(&(container.to_owned(), name.to_owned()))?
            .clone();
        let state = lock(&variable.state);
        state.assigned.then(|| state.value.clone())
    }

    /// Sets a variable, declaring it if need be. Errors when it exists with another dtype or shape.
    pub fn set(&self, container: &str, name: &str, value: &Tensor) -> Result<(), Error> {
        let spec = VariableSpec {
            container: container.to_owned(),
            name: name.to_owned(),
            dtype: value.dtype(),
            shape: value.shape().to_vec(),
            initial: None,
        };
        self.declare(&spec)?.assign(|bytes| {
            bytes.copy_from_slice(value.as_bytes());
            Ok(())
        })
    }

    /// Container and name of every variable, in order.
    pub fn names(&self) -> Vec<(String, String)> {
        lock(&self.variables).keys().cloned().collect()
    }

    /// Puts every variable of a container back to its initial value; those without one count as never assigned.
    pub fn reset(&self, container: &str) -> Result<(), Error> {
        let all: Vec<_> = lock(&self.variables)
            .iter()
            .filter(|(k, _)| k.0 == container)
            .map(|(_, v)| v.clone())
            .collect();
        all.iter().try_for_each(|v| {
            *lock(&v.state) = State::new(v.dtype, &v.shape, v.initial.as_ref())?;
            Ok(())
        })
    }

    /// The variable of `spec`, created if the container does not hold it.
    pub(crate) fn declare(&self, spec: &VariableSpec) -> Result<Arc<Variable>, Error> {
        let label = format!("variable {:?} of container {:?}", spec.name, spec.container);
        let mut variables = lock(&self.variables);
        if let Some(old) = variables.get(&(spec.container.clone(), spec.name.clone())) {
            if old.dtype != spec.dtype || old.shape != spec.shape {
                return Err(Error::invalid(format!(
                    "{label} is {}{:?}, expected {}{:?}; use another container or name",
                    old.dtype, old.shape, spec.dtype, spec.shape
                )));
            }
            return Ok(old.clone());
        }
        let state = Mutex::new(State::new(spec.dtype, &spec.shape, spec.initial.as_ref())?);
        let (dtype, shape, initial) = (spec.dtype, spec.shape.clone(), spec.initial.clone());
        let variable = Arc::new(Variable {
            label,
            dtype,
            shape,
            initial,
            state,
        });
        variables.insert(
            (spec.container.clone(), spec.name.clone()),
            variable.clone(),
        );
        Ok(variable)
    }
}

impl State {
    fn new(dtype: DType, shape: &[usize], initial: Option<&Tensor>) -> Result<State, Error> {
        let mut value = Tensor::zeros(dtype, shape)?;
        let Some(initial) = initial else {
            return Ok(State {
                assigned: false,
                value,
            });
        };
        if initial.dtype() != dtype || initial.shape() != shape {
            let message = format!(
                "initial value is {}{:?}, expected {dtype}{shape:?}",
                initial.dtype(),
                initial.shape()
            );
            return Err(Error::internal(message));
        }
        value.as_bytes_mut().copy_from_slice(initial.as_bytes());
        Ok(State {
            assigned: true,
            value,
        })
    }
}

impl Variable {
    /// Gives the value's bytes to `take`. Errors when it was never assigned.
    pub(crate) fn read(&self, take: impl FnOnce(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
        let state = lock(&self.state);
        if !state.assigned {
            return Err(Error::invalid(format!(
                "{} is read before it was assigned",
                self.label
            )));
        }
        take(state.value.as_bytes())
    }

    /// Sets the value by `fill`, which writes its bytes; after an error it counts as never assigned.
    pub(crate) fn assign(
        &self,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = lock(&self.state);
        state.assigned = false;
        fill(state.value.as_bytes_mut())?;
        state.assigned = true;
        Ok(())
    }
}
