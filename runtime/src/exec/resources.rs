//! Variables: state that outlives a run, in containers that sessions can share.

use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::program::{Program, Resident, VariableSpec};
#[cfg(feature = "safetensors")]
use crate::safetensors::{self, Saved};
use crate::sync::{alone, lock, shared};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::fmt;
#[cfg(feature = "safetensors")]
use std::path::Path;
use std::ptr;
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

/// The tensors of a variable: at most one of each, the spare ones for what comes next.
#[derive(Default)]
struct State {
    /// The value after the last run that ended well; `None` when it was never assigned.
    value: Option<Tensor>,
    /// The value that a part of the run in progress has assigned.
    pending: Option<Tensor>,
    /// The value that the part in progress is going to assign.
    next: Option<Tensor>,
    /// Memory for later assignments.
    spare: Vec<Tensor>,
    /// True when a run ended, or is, in the middle of changing the value.
    is_torn: bool,
}

/// The most spare tensors that are kept: a run in parts has two beside the value.
const MOST_SPARE: usize = 2;

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
    /// Waits for the end of a run that assigns variables.
    pub fn get(&self, container: &str, name: &str) -> Option<Tensor> {
        let _reading = self.begin_as(false);
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
        let spec = VariableSpec::new(container, name, value.dtype());
        let transaction = self.begin();
        self.declare(&spec)?.assign(value.shape(), |bytes| {
            bytes.copy_from_slice(value.as_bytes());
            Ok(())
        })?;
        transaction.commit();
        Ok(())
    }

    /// Writes the values of all variables to a [safetensors](crate::safetensors) file: those after the last run that ended well,
    /// all of the same moment. Variables that were never assigned are not in it. An error leaves the file as it was.
    #[cfg(feature = "safetensors")]
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        safetensors::write(path.as_ref(), &self.values()?)
    }

    /// Values of all variables that have one.
    #[cfg(feature = "safetensors")]
    fn values(&self) -> Result<Vec<Saved>, Error> {
        let _reading = self.begin_as(false);
        let variables = lock(&self.variables);
        let mut values = Vec::new();
        for ((container, name), variable) in variables.iter() {
            let state = shared(&variable.state);
            variable.check_whole(&state)?;
            values.extend(state.value.iter().map(|value| Saved {
                container: container.clone(),
                name: name.clone(),
                value: value.clone(),
            }));
        }
        Ok(values)
    }

    /// Sets variables to the values of a [safetensors](crate::safetensors) file, declaring them if need be. Others stay as they are.
    /// Errors, and sets none, when the file is damaged, or a variable has another dtype.
    #[cfg(feature = "safetensors")]
    pub fn load(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let values = safetensors::read(path)?;
        self.restore(values).map_err(|e| e.context(path.display()))
    }

    /// Sets several variables at once, or none.
    #[cfg(feature = "safetensors")]
    pub(crate) fn restore(&self, values: Vec<Saved>) -> Result<(), Error> {
        let transaction = self.begin();
        for saved in values {
            let spec = VariableSpec::new(&saved.container, &saved.name, saved.value.dtype());
            let variable = self.declare(&spec)?;
            let unused = alone(&variable.state).pending.replace(saved.value);
            alone(&variable.state).keep(unused);
        }
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
            let old = self.value.replace(assigned);
            self.keep(old);
            self.is_torn = false;
        }
    }

    fn roll_back(&mut self) {
        let assigned = self.pending.take();
        self.keep(assigned);
    }

    fn keep(&mut self, unused: Option<Tensor>) {
        let room = MOST_SPARE - self.spare.len().min(MOST_SPARE);
        self.spare.extend(unused.into_iter().take(room));
    }

    /// The value as the run in progress sees it.
    fn current(&self) -> Option<&Tensor> {
        self.pending.as_ref().or(self.value.as_ref())
    }

    /// Memory of a shape that no one else holds. After the first assignment there are two pieces of it, used in turn.
    fn room(&mut self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        self.spare
            .retain_mut(|old| old.shape() == shape && old.is_unique());
        if let Some(old) = self.spare.pop() {
            return Ok(old);
        }
        if self.value.is_none() {
            self.spare.push(Tensor::zeros(dtype, shape)?);
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

    /// Errors when a run that failed has changed a part of the value.
    fn check_whole(&self, state: &State) -> Result<(), Error> {
        if !state.is_torn {
            return Ok(());
        }
        let message = format!(
            "{} is half changed by a run that failed; set it, or reset its container",
            self.label
        );
        Err(Error::new(ErrorKind::DeviceFailed, message))
    }

    /// The value of a shape. Errors when it was never assigned, or has another shape.
    fn checked<'s>(&self, state: &'s State, shape: &[usize]) -> Result<&'s Tensor, Error> {
        self.check_whole(state)?;
        let Some(value) = state.current() else {
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
        Ok(value)
    }

    /// Gives the value's bytes to `take`. Errors when it was never assigned, or has another shape.
    pub(crate) fn read(
        &self,
        shape: &[usize],
        take: impl FnOnce(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let state = shared(&self.state);
        take(self.checked(&state, shape)?.as_bytes())
    }

    /// Sets the value, from the end of the run on, by `fill`, which writes its bytes.
    pub(crate) fn assign(
        &self,
        shape: &[usize],
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = alone(&self.state);
        let assigned = state.pending.take();
        state.keep(assigned);
        let mut value = state.room(self.dtype, shape)?;
        fill(value.as_bytes_mut())?;
        state.pending = Some(value);
        Ok(())
    }

    /// Addresses of the value that a part of a run reads, and of the one that it is going to assign.
    fn bind(&self, resident: &Resident, in_place: bool) -> Result<[*mut u8; 2], Error> {
        let Some(assigned) = &resident.assigned else {
            let Some(read) = &resident.read else {
                return Ok([ptr::null_mut(); 2]);
            };
            let state = shared(&self.state);
            let value = self.checked(&state, read)?;
            return Ok([value.as_ptr().cast_mut(), ptr::null_mut()]);
        };
        let mut state = alone(&self.state);
        if let Some(read) = &resident.read {
            self.checked(&state, read)?;
        }
        if in_place {
            return state.bind_in_place();
        }
        let room = state.room(self.dtype, assigned)?;
        let assigned = state.next.insert(room).as_mut_ptr();
        let value = state.current();
        let value = value.map_or(ptr::null_mut(), |t| t.as_ptr().cast_mut());
        Ok([value, assigned])
    }

    /// Ends a part of a run: with what it assigned if it ended `well`.
    fn end(&self, well: bool) {
        let state = &mut *alone(&self.state);
        let Some(next) = state.next.take() else {
            return;
        };
        let unused = match well {
            true => state.pending.replace(next),
            false => Some(next),
        };
        state.keep(unused);
    }
}

impl State {
    /// The address of the value, which is about to be changed where it is. Those who hold the tensor keep it as it was.
    fn bind_in_place(&mut self) -> Result<[*mut u8; 2], Error> {
        let Some(value) = &mut self.value else {
            return Err(Error::internal("a variable without a value is changed"));
        };
        if !value.is_unique() {
            *value = Tensor::from_bytes(value.dtype(), value.shape(), value.as_bytes())?;
        }
        Ok([value.as_mut_ptr(); 2])
    }
}

/// Variables that a program uses where they are.
pub(crate) struct Residents(Vec<Place>);

struct Place {
    variable: Arc<Variable>,
    resident: Resident,
    in_place: bool,
}

impl Residents {
    /// The residents of a validated program, declared where need be.
    pub(crate) fn of(program: &Program, resources: &Resources) -> Result<Residents, Error> {
        let place = |resident: Resident| {
            let spec = &program.variables[resident.variable as usize];
            Ok(Place {
                variable: resources.declare(spec)?,
                in_place: spec.in_place,
                resident,
            })
        };
        let all = program.residents().into_iter().map(place);
        Ok(Residents(all.collect::<Result<_, Error>>()?))
    }

    /// Calls `take` with the number of each and the addresses of its value and of the next one, for a run that
    /// holds a transaction. They stay until [`Residents::end`], which follows.
    pub(crate) fn bind(&self, mut take: impl FnMut(u32, [*mut u8; 2])) -> Result<(), Error> {
        self.0.iter().try_for_each(|place| {
            let addresses = place.variable.bind(&place.resident, place.in_place)?;
            take(place.resident.variable, addresses);
            Ok(())
        })
    }

    /// True when some are changed where they are, which cannot be taken back.
    pub(crate) fn is_in_place(&self) -> bool {
        self.0.iter().any(|place| place.in_place)
    }

    /// Ends what [`Residents::bind`] began. `is_changing` after a failure if values were being changed where they are.
    pub(crate) fn end(&self, well: bool, is_changing: bool) {
        for place in &self.0 {
            if place.resident.assigned.is_none() {
                continue;
            }
            place.variable.end(well);
            if !well && is_changing && place.in_place {
                alone(&place.variable.state).is_torn = true;
            }
        }
    }
}
