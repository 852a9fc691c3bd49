//! Resident variables: used in place, on the host or in memory of a device, and kept there between runs.
//!
//! A device's partition has fixed memory for each of them, so that its requests can be captured: for
//! the value that a run reads, and for the one that it assigns. Where all values keep their shapes, the
//! two take turns: the next run reads what this one assigns where it is, and its requests are captured
//! for either turn. Otherwise it begins with a copy on the device from the second to the first. A value
//! crosses to the host when someone there asks for it, and from there when the host, or another device,
//! has assigned it.

use super::memory::{Block, Memory};
use super::resources::{Resources, Variable};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::program::{Program, Resident};
use crate::sync::lock;
use crate::tensor::Tensor;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A value of a variable.
pub(super) struct Value {
    /// Differs from that of every other value of the process.
    pub(super) number: u64,
    pub(super) at: At,
}

/// The place of a value.
pub(super) enum At {
    Host(Tensor),
    Device(Arc<OnDevice>),
}

impl Value {
    pub(super) fn new(at: At) -> Value {
        Value {
            number: Value::fresh(),
            at,
        }
    }

    /// A number for another value.
    pub(super) fn fresh() -> u64 {
        static LAST: AtomicU64 = AtomicU64::new(0);
        LAST.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn shape(&self) -> &[usize] {
        match &self.at {
            At::Host(tensor) => tensor.shape(),
            At::Device(place) => &place.shape,
        }
    }

    pub(super) fn is_at(&self, place: &Arc<OnDevice>) -> bool {
        matches!(&self.at, At::Device(own) if Arc::ptr_eq(own, place))
    }

    /// The tensor of a value that is on the host.
    pub(super) fn here(&self) -> Result<&Tensor, Error> {
        match &self.at {
            At::Host(tensor) => Ok(tensor),
            At::Device(_) => Err(Error::internal("a variable's value is on a device")),
        }
    }

    /// Brings the value to the host.
    pub(super) fn on_host(&mut self) -> Result<&Tensor, Error> {
        if let At::Device(place) = &self.at {
            self.at = At::Host(place.read()?);
        }
        self.here()
    }

    /// Brings the value to unshared memory of the host.
    pub(super) fn on_host_alone(&mut self) -> Result<(), Error> {
        self.on_host()?;
        if let At::Host(value) = &mut self.at
            && !value.is_unique()
        {
            *value = Tensor::from_bytes(value.dtype(), value.shape(), value.as_bytes())?;
        }
        Ok(())
    }

    /// Moves a value that is on a device to another place there.
    pub(super) fn move_to(&mut self, place: &Arc<OnDevice>) -> Result<(), Error> {
        if !place.holds(self) {
            place.take(self)?;
        }
        self.at = At::Device(place.clone());
        Ok(())
    }
}

/// Memory of a device for values of a variable.
pub(super) struct OnDevice {
    memory: Memory,
    block: Block,
    dtype: DType,
    shape: Vec<usize>,
    /// Number of the value that it holds, 0 for none. Changed under the lock of the variable's state.
    number: AtomicU64,
}

impl OnDevice {
    fn new(memory: &Memory, dtype: DType, shape: &[usize]) -> Result<Arc<OnDevice>, Error> {
        let size_bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        Ok(Arc::new(OnDevice {
            block: memory.allocate(size_bytes)?,
            memory: memory.clone(),
            dtype,
            shape: shape.to_vec(),
            number: AtomicU64::new(0),
        }))
    }

    fn size_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_bytes()
    }

    /// True when both are in the same memory.
    fn is_beside(&self, other: &OnDevice) -> bool {
        match (self.memory.driver(), other.memory.driver()) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }

    /// True when a value of the other place can be moved here.
    pub(super) fn fits(&self, other: &OnDevice) -> bool {
        self.is_beside(other) && self.shape == other.shape
    }

    pub(super) fn holds(&self, value: &Value) -> bool {
        self.number.load(Ordering::Relaxed) == value.number
    }

    /// Forgets the value that it holds.
    pub(super) fn clear(&self) {
        self.number.store(0, Ordering::Relaxed);
    }

    /// The value that a run has left here.
    pub(super) fn filled(self: &Arc<OnDevice>) -> Value {
        let value = Value::new(At::Device(self.clone()));
        self.number.store(value.number, Ordering::Relaxed);
        value
    }

    /// Copies a value of the same shape here. From another memory it comes through the host, where it stays then.
    pub(super) fn take(&self, value: &mut Value) -> Result<(), Error> {
        if let At::Device(from) = &value.at
            && self.is_beside(from)
        {
            return self.copy(from);
        }
        self.clear();
        let bytes = value.on_host()?.as_bytes();
        // SAFETY: the place has the value's size; the caller holds the lock of the variable's state, and no run uses the place.
        unsafe { self.memory.write(self.block.as_ptr(), bytes)? };
        self.number.store(value.number, Ordering::Relaxed);
        Ok(())
    }

    /// Copies what another place in the same memory holds, which has the same size.
    pub(super) fn copy(&self, from: &OnDevice) -> Result<(), Error> {
        self.clear();
        let (source, target) = (from.block.as_ptr(), self.block.as_ptr());
        // SAFETY: both places have the value's size; the caller holds the lock of the variable's state, and no run writes them.
        unsafe { self.memory.copy(source, target, self.size_bytes())? };
        let number = from.number.load(Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        Ok(())
    }

    fn read(&self) -> Result<Tensor, Error> {
        let mut tensor = Tensor::zeros(self.dtype, &self.shape)?;
        // SAFETY: the place has the tensor's size, and no run writes it while the variable's state is locked.
        unsafe {
            self.memory
                .read(self.block.as_ptr(), tensor.as_bytes_mut())?
        };
        Ok(tensor)
    }
}

/// Memory of a device for a resident variable.
#[derive(Clone)]
pub(super) struct Place {
    /// Memory of the current value, or of the previous one if the run only assigns.
    pub(super) value: Arc<OnDevice>,
    /// Memory of the assigned value.
    pub(super) next: Option<Arc<OnDevice>>,
}

impl Place {
    fn new(memory: &Memory, dtype: DType, resident: &Resident) -> Result<Place, Error> {
        let assigned = resident.assigned.as_ref();
        let shape = resident.read.as_ref().or(assigned);
        let shape = shape.map_or(&[][..], Vec::as_slice);
        let next = assigned.map(|shape| OnDevice::new(memory, dtype, shape));
        Ok(Place {
            value: OnDevice::new(memory, dtype, shape)?,
            next: next.transpose()?,
        })
    }

    /// True where either memory can hold either value.
    fn may_turn(&self) -> bool {
        let next = self.next.as_ref();
        next.is_none_or(|next| next.fits(&self.value))
    }

    /// The same memory, with value and assigned value in each other's place in every other turn.
    fn at(&self, turn: usize) -> Place {
        match &self.next {
            Some(next) if turn == 1 => Place {
                value: next.clone(),
                next: Some(self.value.clone()),
            },
            _ => self.clone(),
        }
    }

    /// Addresses of the value and of the assigned one.
    fn addresses(&self) -> [*mut u8; 2] {
        let next = self.next.as_ref();
        let next = next.map_or(std::ptr::null_mut(), |next| next.block.as_ptr());
        [self.value.block.as_ptr(), next]
    }
}

/// The resident variables of a program.
pub(crate) struct Residents {
    uses: Vec<Use>,
    /// True where the next run reads what this one assigns where it is.
    takes_turns: bool,
    /// The turn of the next run, 0 or 1, and the one that frames have addresses for.
    turn: AtomicUsize,
    placed: AtomicUsize,
}

/// Frames have no addresses yet.
const NO_TURN: usize = usize::MAX;

struct Use {
    variable: Arc<Variable>,
    resident: Resident,
    in_place: bool,
    /// On a device with memory of its own.
    place: Option<Place>,
    /// Where runs overlap, and it is not changed in place: memory of this program's for the assigned value, to be copied over the old one at
    /// the end of a run.
    beside: Option<Mutex<Tensor>>,
}

impl Residents {
    /// The residents of a validated program, declared where need be, and with memory where the device of their partition has its own.
    /// The error comes with the number of the partition.
    pub(crate) fn of(
        program: &Program,
        resources: &Resources,
        memory_of: &dyn Fn(usize) -> Memory,
    ) -> Result<Residents, (usize, Error)> {
        let one = |resident: Resident| {
            let spec = &program.variables[resident.variable as usize];
            let memory = memory_of(resident.partition);
            let variable = resources.declare(spec)?;
            let place = memory
                .driver()
                .map(|_| Place::new(&memory, spec.dtype, &resident));
            Ok(Use {
                variable,
                in_place: spec.in_place,
                beside: None,
                place: place.transpose()?,
                resident,
            })
        };
        let all = program.residents().into_iter().map(|resident| {
            let partition = resident.partition;
            one(resident).map_err(|e| (partition, e))
        });
        let uses = all.collect::<Result<Vec<Use>, _>>()?;
        let places = || uses.iter().filter_map(|one| one.place.as_ref());
        Ok(Residents {
            takes_turns: places().any(|p| p.next.is_some()) && places().all(Place::may_turn),
            uses,
            turn: AtomicUsize::new(0),
            placed: AtomicUsize::new(NO_TURN),
        })
    }

    /// Variables on a device, with their memory as the next run uses it.
    fn placed(&self) -> impl Iterator<Item = (&Use, Place)> {
        let turn = self.turn.load(Ordering::Relaxed);
        let uses = self.uses.iter();
        uses.filter_map(move |one| Some((one, one.place.as_ref()?.at(turn))))
    }

    /// The turn of the next run.
    pub(crate) fn turn(&self) -> usize {
        self.turn.load(Ordering::Relaxed)
    }

    /// Calls `take` with partition, number and addresses of each on a device: those of its value and of the
    /// next one in the next run. Not at all where they are those of the last call.
    pub(crate) fn place(&self, mut take: impl FnMut(usize, u32, [*mut u8; 2])) {
        let turn = self.turn();
        if self.placed.swap(turn, Ordering::Relaxed) == turn {
            return;
        }
        for (one, place) in self.placed() {
            let Resident {
                partition,
                variable,
                ..
            } = one.resident;
            take(partition, variable, place.addresses());
        }
    }

    /// Calls `take` with the number of each that is on the host and the addresses of its value and of the next one, for a run that
    /// holds a transaction. They stay until [`Residents::end`], which follows.
    pub(crate) fn bind(&self, mut take: impl FnMut(u32, [*mut u8; 2])) -> Result<(), Error> {
        self.placed()
            .try_for_each(|(one, place)| one.variable.bind_on_device(&one.resident, &place))?;
        let on_host = self.uses.iter().filter(|one| one.place.is_none());
        for one in on_host {
            let addresses = match &one.beside {
                Some(beside) => {
                    let assigned = lock(beside).as_mut_ptr();
                    [one.variable.bind_beside(&one.resident)?, assigned]
                }
                None => one.variable.bind(&one.resident, one.in_place)?,
            };
            take(one.resident.variable, addresses);
        }
        Ok(())
    }

    /// Leaves nothing where the program assigns on devices, so that its kernels may be started again.
    pub(crate) fn spare_next(&self) -> Result<(), Error> {
        self.placed()
            .try_for_each(|(one, place)| one.variable.spare_next(&place))
    }

    /// True when some are changed where they are, which cannot be taken back.
    pub(crate) fn is_in_place(&self) -> bool {
        self.uses.iter().any(|one| one.in_place)
    }

    /// Prepares for overlapping runs, and returns the variables changed by them. Errors with `Unsupported` on one on a device with memory of
    /// its own.
    pub(crate) fn overlap(&mut self) -> Result<Vec<Arc<Variable>>, Error> {
        let mut changed = Vec::new();
        for one in &mut self.uses {
            if one.place.is_some() {
                let label = one.variable.label();
                let message =
                    format!("runs overlap, and {label} is on a device with memory of its own");
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
            let Some(assigned) = &one.resident.assigned else {
                continue;
            };
            changed.push(one.variable.clone());
            if !one.in_place {
                one.beside = Some(Mutex::new(one.variable.zeros(assigned)?));
            }
        }
        Ok(changed)
    }

    /// Ends what [`Residents::bind`] began. `is_changing` after a failure if values were being changed where they are.
    pub(crate) fn end(&self, well: bool, is_changing: bool) {
        let turn = self.turn();
        let assigned = |one: &&Use| one.resident.assigned.is_some();
        for one in self.uses.iter().filter(assigned) {
            if let Some(beside) = &one.beside {
                if well {
                    one.variable.overwrite(&lock(beside));
                }
                continue;
            }
            let next = one.place.as_ref().and_then(|place| place.at(turn).next);
            match next {
                Some(next) if well => one.variable.end_on_device(&next),
                Some(_) => {}
                None => one.variable.end(well),
            }
            if one.in_place && (well || is_changing) {
                one.variable.renumber();
            }
            if !well && is_changing && one.in_place {
                one.variable.tear();
            }
        }
        if well && self.takes_turns {
            self.turn.store(1 - turn, Ordering::Relaxed);
        }
    }
}
