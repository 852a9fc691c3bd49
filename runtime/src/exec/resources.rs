//! Variables: state that outlives a run, in containers that sessions can share.

use crate::dtype::DType;
use crate::error::Error;
use crate::program::VariableSpec;
use crate::sync::{alone, lock, shared};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A set of variables keyed (container, name). Clone the `Arc` to share it between executors. A run
/// of a program that assigns variables is alone, so that what it reads and then assigns no other has
/// assigned meanwhile; those of programs that only read variables are side by side.
#[derive(Default)]
pub struct Resources {
    variables: Mutex<BTreeMap<(String, String), Arc<Variable>>>,
    /// Held by runs that use variables: by any number that read, or by one that assigns.
    run: RwLock<()>,
}

/// One variable. Its value may have another shape after each run.
pub(crate) struct Variable {
    label: String,
    dtype: DType,
    initial: Mutex<Option<Tensor>>,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    /// The value after the last run that ended well; `None` when it was never assigned.
    value: Option<Tensor>,
    /// The value assigned by the run in progress.
    pending: Option<Tensor>,
    /// Memory for the next assignment.
    spare: Option<Tensor>,
}

/// The variables for a run, or for several that count as one: assignments hold once it is committed,
/// and not at all when it is dropped before. Runs that assign wait for its end, and all others too if
/// it may assign.
pub struct Transaction<'r> {
    resources: &'r Resources,
    turn: Turn<'r>,
}

/// A hold on the order of runs.
enum Turn<'r> {
    Reading(#[expect(dead_code, reason = "held")] RwLockReadGuard<'r, ()>),
    Alone(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'r, ()>),
}

impl Transaction<'_> {
    /// Lets all assignments hold.
    pub fn commit(self) {
        if let Turn::Alone(_) = self.turn {
            self.resources.each(State::commit);
        }
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if let Turn::Alone(_) = self.turn {
            self.resources.each(State::roll_back);
        }
    }
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
        let state = shared(&variable.state);
        state.value.clone()
    }

    /// Begins a run that may assign, when no other is in progress any more.
    pub fn begin(&self) -> Transaction<'_> {
        let guard = alone(&self.run);
        Transaction {
            resources: self,
            turn: Turn::Alone(guard),
        }
    }

    /// The same for a run that may assign only if so is said; without, when none that may is in progress any more.
    pub fn begin_as(&self, assigns: bool) -> Transaction<'_> {
        if assigns {
            return self.begin();
        }
        Transaction {
            resources: self,
            turn: Turn::Reading(shared(&self.run)),
        }
    }

    fn each(&self, f: impl Fn(&mut State)) {
        let variables = lock(&self.variables);
        variables.values().for_each(|v| f(&mut alone(&v.state)));
    }

    /// Sets a variable between runs, declaring it if need be. Errors when it exists with another
    /// dtype.
    pub fn set(&self, container: &str, name: &str, value: &Tensor) -> Result<(), Error> {
        let spec = VariableSpec {
            container: container.to_owned(),
            name: name.to_owned(),
            dtype: value.dtype(),
            initial: None,
        };
        let transaction = self.begin();
        self.declare(&spec)?.assign(value.shape(), |bytes| {
            bytes.copy_from_slice(value.as_bytes());
            Ok(())
        })?;
        transaction.commit();
        Ok(())
    }

    /// Container and name of every variable, in order.
    pub fn names(&self) -> Vec<(String, String)> {
        lock(&self.variables).keys().cloned().collect()
    }

    /// Puts every variable of a container back to its initial value; those without one count as never assigned.
    pub fn reset(&self, container: &str) {
        let transaction = self.begin();
        let variables = lock(&self.variables);
        let own = variables.iter().filter(|(key, _)| key.0 == container);
        own.for_each(|(_, v)| *alone(&v.state) = State::of(lock(&v.initial).as_ref()));
        drop(variables);
        transaction.commit();
    }

    /// The variable of `spec`, created if the container does not hold it.
    pub(crate) fn declare(&self, spec: &VariableSpec) -> Result<Arc<Variable>, Error> {
        let label = format!("variable {:?} of container {:?}", spec.name, spec.container);
        let mut variables = lock(&self.variables);
        if let Some(old) = variables.get(&(spec.container.clone(), spec.name.clone())) {
            if old.dtype != spec.dtype {
                return Err(Error::invalid(format!(
                    "{label} is {}, expected {}; use another container or name",
                    old.dtype, spec.dtype
                )));
            }
            old.begin_with(spec.initial.as_ref());
            return Ok(old.clone());
        }
        let (dtype, initial) = (spec.dtype, spec.initial.clone());
        let state = RwLock::new(State::of(initial.as_ref()));
        let variable = Arc::new(Variable {
            label,
            dtype,
            initial: Mutex::new(initial),
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
    fn of(initial: Option<&Tensor>) -> State {
        State {
            value: initial.cloned(),
            ..State::default()
        }
    }

    fn commit(&mut self) {
        if let Some(assigned) = self.pending.take() {
            self.spare = self.value.replace(assigned).or(self.spare.take());
        }
    }

    fn roll_back(&mut self) {
        self.spare = self.pending.take().or(self.spare.take());
    }

    /// Memory of a shape. After the first assignment there are two pieces of it, used in turn.
    fn room(&mut self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        let old = self.pending.take().or_else(|| self.spare.take());
        if let Some(old) = old.filter(|t| t.shape() == shape) {
            return Ok(old);
        }
        if self.value.is_none() {
            self.spare = Some(Tensor::zeros(dtype, shape)?);
        }
        Tensor::zeros(dtype, shape)
    }
}

impl Variable {
    /// Takes an initial value, where it has none; the value, where it was never assigned.
    fn begin_with(&self, initial: Option<&Tensor>) {
        let mut own = lock(&self.initial);
        if let (None, Some(initial)) = (&*own, initial) {
            *own = Some(initial.clone());
            alone(&self.state).value.get_or_insert(initial.clone());
        }
    }

    /// Gives the value's bytes to `take`. Errors when it was never assigned, or has another shape.
    pub(crate) fn read(
        &self,
        shape: &[usize],
        take: impl FnOnce(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let state = shared(&self.state);
        let Some(value) = state.pending.as_ref().or(state.value.as_ref()) else {
            return Err(Error::invalid(format!(
                "{} is read before it was assigned",
                self.label
            )));
        };
        if value.shape() != shape {
            return Err(Error::invalid(format!(
                "{} has the shape {:?}, and is read as {shape:?}",
                self.label,
                value.shape()
            )));
        }
        take(value.as_bytes())
    }

    /// Sets the value, from the end of the run on, by `fill`, which writes its bytes.
    pub(crate) fn assign(
        &self,
        shape: &[usize],
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = alone(&self.state);
        let mut value = state.room(self.dtype, shape)?;
        fill(value.as_bytes_mut())?;
        state.pending = Some(value);
        Ok(())
    }
}
