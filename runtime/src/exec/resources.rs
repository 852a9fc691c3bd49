//! Variables: state kept between runs, in containers for sessions to share.

use super::resident::{At, OnDevice, Place, Value};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::program::{Program, Resident, VariableSpec, replica_of};
#[cfg(feature = "safetensors")]
use crate::safetensors::{self, Notes, Saved};
use crate::sync::{alone, lock, shared};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::fmt;
#[cfg(feature = "safetensors")]
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A set of variables keyed (container, name). Clone the `Arc` to share it between executors.
///
/// Runs of programs with assignments are exclusive, so no update is lost between a read and its
/// assignment. Runs of programs that only read variables overlap. Runs of executors that
/// [overlap](super::ExecOptions::overlaps) exclude all others but each other; as long as there are such executors, all other runs
/// with variables are exclusive.
///
/// A variable may have replicas, one for each further device of a program ([`replica_name`](crate::program::replica_name)). They are not among
/// the names and values, and begin each run with the variable's value.
#[derive(Default)]
pub struct Resources {
    variables: Mutex<BTreeMap<(String, String), Arc<Variable>>>,
    /// Held by runs with variables: by any number of readers, or by one run with assignments.
    run: RwLock<()>,
    /// Held, beside `run`, by overlapping runs, or by one reader.
    overlap: RwLock<()>,
    /// Number of executors whose runs overlap: readers are apart from them.
    n_overlapping: AtomicUsize,
}

/// A variable without its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableState {
    /// The container; empty for the variables of models without one.
    pub container: String,
    /// The name in the container.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape of the value; none before the first assignment.
    pub shape: Option<Vec<usize>>,
}

/// One variable. Its value may have another shape after each run.
pub(crate) struct Variable {
    label: String,
    dtype: DType,
    initial: Mutex<Option<Tensor>>,
    state: RwLock<State>,
    /// Of a replica: its variable, and the number of the value last taken from it.
    original: Option<(Arc<Variable>, AtomicU64)>,
}

/// The values of a variable: at most one of each, and memory for what comes next.
#[derive(Default)]
struct State {
    /// The value after the last successful run; `None` when it was never assigned.
    value: Option<Value>,
    /// The value assigned by a part of the run in progress.
    pending: Option<Value>,
    /// Memory for the next assignment of the part in progress.
    next: Option<Tensor>,
    /// Memory for later assignments.
    spare: Vec<Tensor>,
    /// True when a run ended, or is, in the middle of changing the value.
    is_torn: bool,
}

/// Limit of spare tensors: a run in parts has two beside the value.
const MOST_SPARE: usize = 2;

/// The variables of one run, or of several runs that count as one. [`Transaction::commit`] makes all
/// assignments visible; a drop without it rolls them back. Runs with assignments wait for the end of a
/// transaction. If the transaction may assign, all other runs wait too.
pub struct Transaction<'r> {
    resources: &'r Resources,
    turn: Turn<'r>,
}

/// A hold on the order of runs.
#[expect(dead_code, reason = "held")]
enum Turn<'r> {
    Reading(RwLockReadGuard<'r, ()>, Option<RwLockWriteGuard<'r, ()>>),
    Overlapping(RwLockReadGuard<'r, ()>, RwLockReadGuard<'r, ()>),
    Alone(RwLockWriteGuard<'r, ()>),
}

impl Transaction<'_> {
    /// Makes all assignments visible.
    pub fn commit(self) {
        self.commit_with(&[]);
    }

    /// The same after equal assignments to these replicas and their variables.
    pub(super) fn commit_with(self, replicas: &[Arc<Variable>]) {
        if let Turn::Alone(_) = self.turn {
            self.resources.each(State::commit);
            replicas.iter().for_each(|v| v.mark_synced());
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
    /// The current value of a variable; `None` if the variable does not exist or was never assigned.
    /// Waits for the end of a run with assignments. Errors when the value is on a lost device.
    pub fn get(&self, container: &str, name: &str) -> Result<Option<Tensor>, Error> {
        let _reading = self.begin_as(false);
        let key = (container.to_owned(), name.to_owned());
        let variable = lock(&self.variables).get(&key).cloned();
        variable.map_or(Ok(None), |v| v.committed())
    }

    /// Begins a run with assignments. Waits until no other run is in progress.
    pub fn begin(&self) -> Transaction<'_> {
        let guard = alone(&self.run);
        Transaction {
            resources: self,
            turn: Turn::Alone(guard),
        }
    }

    /// Begins a run, with assignments if `assigns`. A run without them waits only for the end of runs with assignments, unless there are executors
    /// whose runs [overlap](super::ExecOptions::overlaps). The values are not to be asked for meanwhile: such a call may wait for this run.
    pub fn begin_as(&self, assigns: bool) -> Transaction<'_> {
        if assigns {
            return self.begin();
        }
        let reading = shared(&self.run);
        let overlaps = self.n_overlapping.load(Ordering::Acquire) > 0;
        let apart = overlaps.then(|| alone(&self.overlap));
        Transaction {
            resources: self,
            turn: Turn::Reading(reading, apart),
        }
    }

    /// Notes one more executor whose runs overlap, after the end of runs that are not apart from these.
    pub(super) fn permit_overlap(&self) {
        self.n_overlapping.fetch_add(1, Ordering::AcqRel);
        let _alone = alone(&self.run);
    }

    /// Notes one executor less.
    pub(super) fn end_overlap(&self) {
        self.n_overlapping.fetch_sub(1, Ordering::AcqRel);
    }

    /// Begins a run that overlaps with others of its kind, which may change these variables at the same time. Their values stay where
    /// they are: nobody else holds them, and nobody gets hold of them before the end of all such runs.
    pub(super) fn begin_overlapping(
        &self,
        changed: &[Arc<Variable>],
    ) -> Result<Transaction<'_>, Error> {
        loop {
            let turn = Turn::Overlapping(shared(&self.run), shared(&self.overlap));
            if changed.iter().all(|v| v.is_alone_on_host()) {
                return Ok(Transaction {
                    resources: self,
                    turn,
                });
            }
            drop(turn);
            let _alone = alone(&self.run);
            changed.iter().try_for_each(|v| v.bring_alone_to_host())?;
        }
    }

    /// Adds 1 to a variable, a scalar of `i64`, at once, and returns the sum. Overlapping runs go on meanwhile; all others are waited for.
    ///
    /// Errors with `InvalidInput` when there is no such variable with a value.
    pub fn count(&self, container: &str, name: &str) -> Result<i64, Error> {
        let key = (container.to_owned(), name.to_owned());
        let found = lock(&self.variables).get(&key).cloned();
        let found = found.filter(|v| v.dtype == DType::I64);
        let no_count = || Error::invalid(format!("variable {name:?} is not a count"));
        let changed = [found.ok_or_else(no_count)?];
        loop {
            let _overlapping = self.begin_overlapping(&changed)?;
            let state = &mut *alone(&changed[0].state);
            let Some(value) = state.value.as_mut().filter(|v| v.shape().is_empty()) else {
                return Err(no_count());
            };
            // Where readers are not apart, one may have taken it since: it must not be replaced under those who use it.
            if let At::Host(value) = &mut value.at
                && value.is_unique()
            {
                // SAFETY: the tensor has one element of 8 bytes, aligned to them, which runs read in one piece at most.
                let count = unsafe { AtomicI64::from_ptr(value.as_mut_ptr().cast()) };
                return Ok(count.fetch_add(1, Ordering::Relaxed) + 1);
            }
        }
    }

    fn each(&self, f: impl Fn(&mut State)) {
        let variables = lock(&self.variables);
        variables.values().for_each(|v| f(&mut alone(&v.state)));
    }

    /// Sets a variable between runs and declares it if needed. Errors when it exists with another
    /// dtype, and on the name of a replica.
    pub fn set(&self, container: &str, name: &str, value: &Tensor) -> Result<(), Error> {
        refuse_replica(name)?;
        self.set_any(container, name, value)
    }

    /// Sets a replica, which should have its variable's value; for tests.
    #[doc(hidden)]
    pub fn set_any(&self, container: &str, name: &str, value: &Tensor) -> Result<(), Error> {
        let spec = VariableSpec::new(container, name, value.dtype());
        let transaction = self.begin();
        self.declare(&spec)?.assign(value.shape(), |bytes| {
            bytes.copy_from_slice(value.as_bytes());
            Ok(())
        })?;
        transaction.commit();
        Ok(())
    }

    /// Writes the values of all variables to a [safetensors](crate::safetensors) file: a consistent snapshot after the last
    /// successful run. Variables without a value are left out. An error leaves an existing file unchanged.
    #[cfg(feature = "safetensors")]
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.save_with(path, &Notes::new())
    }

    /// [`Resources::save`], with texts by name beside the values.
    #[cfg(feature = "safetensors")]
    pub fn save_with(&self, path: impl AsRef<Path>, notes: &Notes) -> Result<(), Error> {
        safetensors::write(path.as_ref(), &self.values(|_, _| true)?, notes)
    }

    /// A consistent snapshot of all variables with a value; `is_wanted` selects them by container and name.
    #[cfg(feature = "safetensors")]
    pub fn values(&self, is_wanted: impl Fn(&str, &str) -> bool) -> Result<Vec<Saved>, Error> {
        let _reading = self.begin_as(false);
        let variables = lock(&self.variables);
        let mut values = Vec::new();
        let originals = variables.iter().filter(|(_, v)| v.original.is_none());
        let wanted = originals.filter(|((c, n), _)| is_wanted(c, n));
        for ((container, name), variable) in wanted {
            variable.check_whole(&shared(&variable.state))?;
            values.extend(variable.committed()?.map(|value| Saved {
                container: container.clone(),
                name: name.clone(),
                value,
            }));
        }
        Ok(values)
    }

    /// Sets variables to the values of a [safetensors](crate::safetensors) file, declaring them if need be. Others stay as they are.
    /// Errors, and sets none, when the file is damaged, or a variable has another dtype.
    #[cfg(feature = "safetensors")]
    pub fn load(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let contents = safetensors::read(path)?;
        self.restore(contents.variables)
            .map_err(|e| e.context(path.display()))
    }

    /// Sets several variables at once, or none, declaring them if need be. Errors when one has another dtype.
    #[cfg(feature = "safetensors")]
    pub fn restore(&self, values: Vec<Saved>) -> Result<(), Error> {
        let transaction = self.begin();
        for saved in values {
            refuse_replica(&saved.name)?;
            let spec = VariableSpec::new(&saved.container, &saved.name, saved.value.dtype());
            let variable = self.declare(&spec)?;
            alone(&variable.state).assign(Value::new(At::Host(saved.value)));
        }
        transaction.commit();
        Ok(())
    }

    /// Errors with `DeviceFailed` when a replica and its variable have different bits after the same updates, since devices then computed
    /// different results.
    pub fn check_replicas(&self) -> Result<(), Error> {
        let _reading = self.begin_as(false);
        let variables: Vec<Arc<Variable>> = lock(&self.variables).values().cloned().collect();
        variables.iter().try_for_each(|v| v.check_replica())
    }

    /// Container and name of every variable, in order.
    pub fn names(&self) -> Vec<(String, String)> {
        let variables = lock(&self.variables);
        let originals = variables.iter().filter(|(_, v)| v.original.is_none());
        originals.map(|(key, _)| key.clone()).collect()
    }

    /// Every variable without its value, by container and name. Does not wait for runs.
    pub fn states(&self) -> Vec<VariableState> {
        let variables = lock(&self.variables);
        let originals = variables.iter().filter(|(_, v)| v.original.is_none());
        let state = |((container, name), v): (&(String, String), &Arc<Variable>)| VariableState {
            container: container.clone(),
            name: name.clone(),
            dtype: v.dtype,
            shape: shared(&v.state).value.as_ref().map(|v| v.shape().to_vec()),
        };
        originals.map(state).collect()
    }

    /// Sets the variables of a program to its initial values, where it has them. Waits until no other run is
    /// in progress; then asks whether this is still wanted.
    pub(super) fn initialise(
        &self,
        program: &Program,
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<(), Error> {
        let transaction = self.begin();
        if !is_wanted() {
            return Ok(());
        }
        self.initialise_all(program)?;
        transaction.commit();
        Ok(())
    }

    fn initialise_all(&self, program: &Program) -> Result<(), Error> {
        let specs = program.variables.iter();
        for spec in specs.filter(|spec| spec.initial.is_some()) {
            let variable = self.declare(spec)?;
            *alone(&variable.state) = State::of(spec.initial.as_ref());
        }
        let steps = program.partitions.iter().flat_map(|p| &p.steps);
        let mut bodies = steps.flat_map(|step| step.kind.sub_programs());
        bodies.try_for_each(|body| self.initialise_all(body))
    }

    /// Resets every variable of a container to its initial value. Variables without one count as never assigned.
    pub fn reset(&self, container: &str) {
        self.reset_if(&[container], || true);
    }

    /// [`Resources::reset`] of several containers at once, if `is_wanted` says so once no run is in progress.
    pub fn reset_if(&self, containers: &[&str], is_wanted: impl FnOnce() -> bool) {
        let transaction = self.begin();
        if !is_wanted() {
            return;
        }
        let variables = lock(&self.variables);
        let own = variables
            .iter()
            .filter(|(key, _)| containers.contains(&key.0.as_str()));
        own.for_each(|(_, v)| *alone(&v.state) = State::of(lock(&v.initial).as_ref()));
        drop(variables);
        transaction.commit();
    }

    /// The variable of `spec`, created if the container does not hold it.
    pub(crate) fn declare(&self, spec: &VariableSpec) -> Result<Arc<Variable>, Error> {
        let label = format!("variable {:?} of container {:?}", spec.name, spec.container);
        let original = match replica_of(&spec.name) {
            None => None,
            Some(name) => {
                let original = VariableSpec {
                    name: name.to_owned(),
                    ..spec.clone()
                };
                Some((self.declare(&original)?, AtomicU64::new(0)))
            }
        };
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
            original,
        });
        variables.insert(
            (spec.container.clone(), spec.name.clone()),
            variable.clone(),
        );
        Ok(variable)
    }
}

/// Errors on the name of a replica.
fn refuse_replica(name: &str) -> Result<(), Error> {
    match replica_of(name) {
        None => Ok(()),
        Some(variable) => Err(Error::invalid(format!(
            "variable {name:?}: devices that train together keep replicas of {variable:?} under such names; use another name"
        ))),
    }
}

impl State {
    fn of(initial: Option<&Tensor>) -> State {
        State {
            value: initial.map(|t| Value::new(At::Host(t.clone()))),
            ..State::default()
        }
    }

    fn commit(&mut self) {
        if let Some(assigned) = self.pending.take() {
            let old = self.value.replace(assigned);
            self.recycle(old);
            self.is_torn = false;
        }
    }

    fn roll_back(&mut self) {
        let assigned = self.pending.take();
        self.recycle(assigned);
    }

    /// Takes the value assigned by a part of a run, or by a call between runs.
    fn assign(&mut self, value: Value) {
        let old = self.pending.replace(value);
        self.recycle(old);
    }

    fn recycle(&mut self, unused: Option<Value>) {
        if let Some(At::Host(tensor)) = unused.map(|value| value.at) {
            self.keep(tensor);
        }
    }

    fn keep(&mut self, unused: Tensor) {
        if self.spare.len() < MOST_SPARE {
            self.spare.push(unused);
        }
    }

    /// The value as the run in progress sees it.
    fn current(&self) -> Option<&Value> {
        self.pending.as_ref().or(self.value.as_ref())
    }

    /// The same, to be moved.
    fn current_mut(&mut self) -> Option<&mut Value> {
        self.pending.as_mut().or(self.value.as_mut())
    }

    /// Brings the current value to where a device's partition reads it, unless it is there.
    fn load(&mut self, place: &Place) -> Result<(), Error> {
        if self.current().is_none_or(|value| place.value.holds(value)) {
            return Ok(());
        }
        self.vacate(&place.value, None)?;
        let Some(value) = self.current_mut() else {
            return Ok(());
        };
        match place.next.as_ref().filter(|next| next.holds(value)) {
            Some(next) => place.value.copy(next),
            None => place.value.take(value),
        }
    }

    /// Leaves nothing where a device's partition is going to assign.
    fn spare_next(&mut self, place: &Place) -> Result<(), Error> {
        let next = place.next.as_ref();
        next.map_or(Ok(()), |next| self.vacate(next, Some(&place.value)))
    }

    /// Moves what is in memory of a device that is about to be written: to `refuge` on the device where that is possible, and to the
    /// host otherwise.
    fn vacate(&mut self, at: &Arc<OnDevice>, refuge: Option<&Arc<OnDevice>>) -> Result<(), Error> {
        let is_taken = |slot: &Option<Value>, place| slot.as_ref().is_some_and(|v| v.is_at(place));
        for is_pending in [false, true] {
            let [slot, other] = match is_pending {
                false => [&self.value, &self.pending],
                true => [&self.pending, &self.value],
            };
            if !is_taken(slot, at) {
                continue;
            }
            let refuge = refuge.filter(|place| !is_taken(other, place) && place.fits(at));
            let slot = match is_pending {
                false => &mut self.value,
                true => &mut self.pending,
            };
            if let Some(value) = slot {
                match refuge {
                    Some(place) => value.move_to(place)?,
                    None => value.on_host().map(|_| ())?,
                }
            }
        }
        at.clear();
        Ok(())
    }

    /// Unshared memory of a shape. After the first assignment two pieces of it are used in turn.
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
    /// Its name and container, for messages.
    pub(super) fn label(&self) -> &str {
        &self.label
    }

    /// Takes an initial value, where it has none; the value, where it was never assigned.
    fn begin_with(&self, initial: Option<&Tensor>) {
        let mut own = lock(&self.initial);
        if let (None, Some(initial)) = (&*own, initial) {
            *own = Some(initial.clone());
            let value = || Value::new(At::Host(initial.clone()));
            alone(&self.state).value.get_or_insert_with(value);
        }
    }

    /// Gives a replica its variable's value, if it has another one; within a transaction.
    pub(super) fn sync(&self) -> Result<(), Error> {
        let Some((original, number)) = &self.original else {
            return Ok(());
        };
        let newest = original.number();
        if newest == 0 || newest == number.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(value) = original.committed()? {
            let state = &mut *alone(&self.state);
            state.roll_back();
            state.value = Some(Value::new(At::Host(value)));
            state.is_torn = false;
        }
        number.store(newest, Ordering::Relaxed);
        Ok(())
    }

    /// Notes equal assignments to a replica and its variable.
    fn mark_synced(&self) {
        if let Some((original, number)) = &self.original {
            number.store(original.number(), Ordering::Relaxed);
        }
    }

    /// Errors when a replica with its variable's newest value has other bits.
    fn check_replica(&self) -> Result<(), Error> {
        let Some((original, number)) = &self.original else {
            return Ok(());
        };
        if original.number() != number.load(Ordering::Relaxed) {
            return Ok(());
        }
        let values = [self.committed()?, original.committed()?];
        if let [Some(own), Some(other)] = &values
            && own.as_bytes() == other.as_bytes()
        {
            return Ok(());
        }
        let message = format!(
            "{} differs from its replica, {}, after the same updates",
            original.label, self.label
        );
        Err(Error::new(ErrorKind::DeviceFailed, message))
    }

    /// The number of the value; 0 for none.
    fn number(&self) -> u64 {
        shared(&self.state).value.as_ref().map_or(0, |v| v.number)
    }

    /// The value after the last successful run, and between runs.
    fn committed(&self) -> Result<Option<Tensor>, Error> {
        if let Some(At::Host(tensor)) = shared(&self.state).value.as_ref().map(|v| &v.at) {
            return Ok(Some(tensor.clone()));
        }
        let state = &mut *alone(&self.state);
        let value = state.value.as_mut();
        value.map(|v| v.on_host().cloned()).transpose()
    }

    /// Brings the current value to the host, where it is on a device.
    fn settle(&self) -> Result<(), Error> {
        let is_away = |value: &Value| matches!(value.at, At::Device(_));
        if !shared(&self.state).current().is_some_and(is_away) {
            return Ok(());
        }
        let state = &mut *alone(&self.state);
        state
            .current_mut()
            .map_or(Ok(()), |value| value.on_host().map(|_| ()))
    }

    /// True if the value is nowhere else than in memory of the host that nobody shares. Without a value, too: a run says so.
    fn is_alone_on_host(&self) -> bool {
        match alone(&self.state).value.as_mut().map(|v| &mut v.at) {
            Some(At::Host(value)) => value.is_unique(),
            Some(At::Device(_)) => false,
            None => true,
        }
    }

    /// Brings the value to memory of the host that nobody shares.
    fn bring_alone_to_host(&self) -> Result<(), Error> {
        let state = &mut *alone(&self.state);
        state.value.as_mut().map_or(Ok(()), Value::on_host_alone)
    }

    /// Errors when a failed run has changed a part of the value.
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
    fn checked<'s>(&self, state: &'s State, shape: &[usize]) -> Result<&'s Value, Error> {
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
        self.settle()?;
        let state = shared(&self.state);
        take(self.checked(&state, shape)?.here()?.as_bytes())
    }

    /// The value itself, which is on the host. Errors as [`Variable::read`].
    pub(crate) fn lend(&self, shape: &[usize]) -> Result<Tensor, Error> {
        let state = shared(&self.state);
        Ok(self.checked(&state, shape)?.here()?.clone())
    }

    /// Sets the value, from the end of the run on, by `fill`, which writes its bytes.
    pub(crate) fn assign(
        &self,
        shape: &[usize],
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = alone(&self.state);
        state.roll_back();
        let mut value = state.room(self.dtype, shape)?;
        fill(value.as_bytes_mut())?;
        state.assign(Value::new(At::Host(value)));
        Ok(())
    }

    /// Addresses of the values that a part of a run reads and is going to assign.
    pub(super) fn bind(&self, resident: &Resident, in_place: bool) -> Result<[*mut u8; 2], Error> {
        if resident.read.is_some() {
            self.settle()?;
        }
        let Some(assigned) = &resident.assigned else {
            let Some(read) = &resident.read else {
                return Ok([ptr::null_mut(); 2]);
            };
            let state = shared(&self.state);
            let value = self.checked(&state, read)?.here()?;
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
        let value = match (&resident.read, state.current()) {
            (Some(_), Some(value)) => value.here()?.as_ptr().cast_mut(),
            _ => ptr::null_mut(),
        };
        Ok([value, assigned])
    }

    /// Address of the value of a run that [overlaps](super::ExecOptions::overlaps) with others, and will [overwrite](Variable::overwrite) it.
    pub(super) fn bind_beside(&self, resident: &Resident) -> Result<*mut u8, Error> {
        let state = shared(&self.state);
        let mut address = ptr::null_mut();
        for shape in resident.assigned.iter().chain(&resident.read) {
            address = self.checked(&state, shape)?.here()?.as_ptr().cast_mut();
        }
        Ok(address)
    }

    /// Ends such a run with the value that it assigns.
    pub(super) fn overwrite(&self, assigned: &Tensor) {
        let state = &mut *alone(&self.state);
        if let Some(value) = &mut state.value
            && let At::Host(old) = &mut value.at
        {
            // SAFETY: the binding has checked that both have one shape. Other runs may read and write the old value meanwhile, by addresses.
            unsafe {
                ptr::copy_nonoverlapping(assigned.as_ptr(), old.as_mut_ptr(), old.size_bytes());
            }
            value.number = Value::fresh();
        }
    }

    /// Zeros of its type.
    pub(super) fn zeros(&self, shape: &[usize]) -> Result<Tensor, Error> {
        Tensor::zeros(self.dtype, shape)
    }

    /// Brings the value that a part of a run reads into memory of a device, and leaves nothing where it is going to assign.
    pub(super) fn bind_on_device(&self, resident: &Resident, place: &Place) -> Result<(), Error> {
        let state = &mut *alone(&self.state);
        if let Some(read) = &resident.read {
            self.checked(state, read)?;
            state.load(place)?;
        }
        state.spare_next(place)
    }

    /// Leaves nothing where a program assigns on a device.
    pub(super) fn spare_next(&self, place: &Place) -> Result<(), Error> {
        alone(&self.state).spare_next(place)
    }

    /// Ends a part of a run: with what it assigned if it ended `well`.
    pub(super) fn end(&self, well: bool) {
        let state = &mut *alone(&self.state);
        match state.next.take() {
            Some(next) if well => state.assign(Value::new(At::Host(next))),
            Some(next) => state.keep(next),
            None => {}
        }
    }

    /// The same for what a part of a run that ended well assigned on a device.
    pub(super) fn end_on_device(&self, next: &Arc<OnDevice>) {
        alone(&self.state).assign(next.filled());
    }

    /// Gives the value, which a run has changed where it is, a number of its own.
    pub(super) fn renumber(&self) {
        if let Some(value) = &mut alone(&self.state).value {
            value.number = Value::fresh();
        }
    }

    /// Marks the value as partly changed by a failed run.
    pub(super) fn tear(&self) {
        alone(&self.state).is_torn = true;
    }
}

impl State {
    /// The address of the value, for an update in place. Other holders of the tensor keep the old value.
    fn bind_in_place(&mut self) -> Result<[*mut u8; 2], Error> {
        let value = self.value.as_mut();
        let none = || Error::internal("a variable without a value is changed");
        let value = value.ok_or_else(none)?;
        value.on_host_alone()?;
        match &mut value.at {
            At::Host(value) => Ok([value.as_mut_ptr(); 2]),
            At::Device(_) => Err(Error::internal("a value is on a device")),
        }
    }
}
