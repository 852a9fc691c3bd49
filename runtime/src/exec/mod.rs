//! Runs programs.
//!
//! An [`Executor`] is made once per program and run many times. Making it allocates everything:
//! staging of transfers, and in its pool arenas, workspaces and threads; [`Executor::run_into`]
//! then allocates nothing, unless another run has what it needs.
//!
//! # Threads
//!
//! Each partition has a worker with a team; the thread that calls `run` leads the first one,
//! helpers of the [`Pool`] the others, and its followers help them: `threads / devices - 1` each,
//! less where several runs are in flight. Between runs and between parallel kernels they spin for
//! about 50 us, then yield, then sleep, so an idle executor costs nothing, and a team larger than
//! the machine does not starve it. Executors that share a pool share threads, arenas and
//! workspaces.
//!
//! # Order and failure
//!
//! A step runs when its dependencies are done, lowest id first but sends before all others; a `Recv` also waits for its tensor. The first failure (kernel status, panic,
//! device error) aborts the run on all devices: every wait ends, `run` returns an error that names node and device, and the executor can be
//! run again. Concurrent calls of `run` take turns; [`Lanes`] keep several runs in flight.
//!
//! # Devices with memory of their own
//!
//! Their workers ask a [`Driver`] and do not wait: for kernels in one queue, for copies from and to other partitions in two others, ordered by
//! events where a step depends on a copy. The caller's tensors cross through pinned memory. A run of such a partition ends when its device has
//! finished, failed or not; then the status words of its launches are looked at. A partition's requests are captured when it runs for the second time,
//! and replayed from then on: as a whole, or, where it receives, sends to other devices, or has control flow, piece by piece between
//! these (`segments`), its steps in program order. Not while it is profiled. Its variables stay there (`resident`).
//!
//! All-reduces by a library are asked of the queues that compute, one group of communicators for each executor: lanes take turns on every device in one
//! order, so theirs follow each other everywhere. Since a device that has come to one waits for the others, its worker waits with an eye on the
//! run, and lets go when that is aborted; the next run makes new communicators.
//!
//! # Floating point
//!
//! The executor leaves the IEEE default environment alone: round to nearest even, subnormals kept (neither FTZ nor DAZ), exceptions masked.
//! Kernels must give it back as they found it.

mod caller;
mod collective;
mod control;
pub mod emulate;
mod frame;
mod host;
mod lanes;
mod launch;
mod memory;
mod pool;
mod profile;
mod progress;
mod rendezvous;
mod resident;
mod resources;
mod segments;
mod setup;
mod shortage;
mod step;
mod team;
mod transfer;
mod wait;
mod wire;
mod worker;

use crate::device::DeviceName;
use crate::driver::{Driver, Group};
use crate::error::{Error, ErrorKind};
use crate::perf;
use crate::program::{IoSpec, Program, StepKind, replica_of};
use crate::sync::lock;
use crate::tensor::Tensor;
use caller::Operands;
use emulate::{Courier, Crossing, Transport};
use lanes::Turns;
use memory::Memory;
use pool::{Core, Errand, Helper, Hired};
use profile::Profile;
use rendezvous::Rendezvous;
use resident::Residents;
use resources::Variable;
use setup::{Setup, check_devices};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use wait::{Event, Patience};
use worker::Worker;

pub use host::{HostThreads, Spawning, Task};
pub use lanes::Lanes;
pub use pool::Pool;
pub use progress::Progress;
pub use resources::{Resources, Transaction, VariableState};
pub use wire::{Outgoing, Received, RemoteEnd, Wire};

/// Options of an executor.
#[derive(Clone, Default)]
pub struct ExecOptions {
    /// Threads for kernels, over all devices, and memory of the host. The default is a pool of the
    /// executor's own, with one thread per core that this process may use.
    pub pool: Arc<Pool>,
    /// Where variables live. The default is a fresh set of containers.
    pub resources: Arc<Resources>,
    /// Transport of tensors between devices.
    pub transport: Transport,
    /// Takes tensors to devices of other tasks. Without one, a program that sends or receives such is refused.
    pub wire: Option<Arc<dyn Wire>>,
    /// Devices with their own memory.
    pub drivers: BTreeMap<DeviceName, Arc<dyn Driver>>,
    /// Makes their requests one by one in every run, without captures, to measure the gain of these.
    pub step_by_step: bool,
    /// True for a validated program: further executors of it skip the validation.
    pub is_validated: bool,
    /// Runs with variables overlap with those of other such executors, even if both assign: an update reads and writes each element in one
    /// piece, and one of two updates of an element at the same time may be lost (Niu et al., Hogwild!, NeurIPS 2011). Other runs with variables,
    /// and reads of their values, wait for the end of these. Only for variables on the host with values of the assigned shapes.
    pub overlaps: bool,
}

impl ExecOptions {
    /// The defaults for a validated program, as those of an [`Image`](crate::image::Image) are when it is opened.
    pub fn validated() -> ExecOptions {
        ExecOptions {
            is_validated: true,
            ..ExecOptions::default()
        }
    }
}

/// A program ready to run.
pub struct Executor {
    shared: Arc<Shared>,
    /// Held during a run: room for the helpers that lead the devices after the first.
    turn: Mutex<Vec<Helper>>,
    /// What these do in a run.
    leads: Vec<Arc<dyn Errand>>,
    /// Delivers tensors that cross emulated links, until the executor is dropped.
    courier: Option<Helper>,
    pool: Arc<Pool>,
    resources: Arc<Resources>,
    /// True when the program, or a sub-program, uses variables; and when it assigns some.
    has_state: bool,
    assigns: bool,
    residents: Residents,
    /// The program's replicas of variables.
    replicas: Vec<Arc<Variable>>,
    /// Where runs overlap: the variables that they change.
    overlapping: Option<Vec<Arc<Variable>>>,
}

/// Time of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchTime {
    /// Index of the partition.
    pub partition: usize,
    /// Index of the step there.
    pub step: usize,
    /// Median over series of launches, one right after the other.
    pub time: Duration,
}

/// State shared by the threads of an executor.
struct Shared {
    program: Arc<Program>,
    pool: Arc<Core>,
    threads_per_device: usize,
    /// The same in the current run, which may share threads with others.
    team_size: AtomicUsize,
    rendezvous: Arc<Rendezvous>,
    /// Locked by its leader during a run, by the caller between runs.
    workers: Vec<Mutex<Worker>>,
    patience: Patience,
    /// Number of the current run.
    epoch: AtomicU64,
    /// Workers beside the caller's that have not ended the current run.
    running: AtomicUsize,
    finished: Event,
    /// Of the devices, which other executors of the program use, too; and the number of the current run.
    turns: Option<Arc<Turns>>,
    number: AtomicU64,
    /// Devices that reduce together.
    groups: Vec<Arc<dyn Group>>,
    /// Devices that runs of other programs may not use at the same time.
    devices: Arc<collective::Devices>,
}

/// The replicas among the variables of a program.
fn replicas(program: &Program, resources: &Resources) -> Result<Vec<Arc<Variable>>, Error> {
    let specs = program.variables.iter();
    let specs = specs.filter(|spec| replica_of(&spec.name).is_some());
    specs.map(|spec| resources.declare(spec)).collect()
}

/// The variables that a program with [overlapping](ExecOptions::overlaps) runs changes.
///
/// Errors with `Unsupported` on assignments in branches and loops, and on variables on a device with memory of its own.
fn overlapping(
    program: &Program,
    residents: &mut Residents,
    options: &ExecOptions,
) -> Result<Option<Vec<Arc<Variable>>>, Error> {
    if !options.overlaps || !program.has_state() {
        return Ok(None);
    }
    let steps = program.partitions.iter().flat_map(|p| &p.steps);
    let is_apart = |step: &StepKind| {
        let is_assignment = matches!(step, StepKind::AssignVariable { .. });
        is_assignment || step.sub_programs().iter().any(|p| p.assigns())
    };
    if steps.into_iter().any(|step| is_apart(&step.kind)) {
        let message = "runs overlap, and a variable is assigned in a branch or loop, or with a shape of its own";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    residents.overlap().map(Some)
}

impl Executor {
    /// Makes `program` ready to run.
    ///
    /// Errors: `Internal` with all violations when the program is malformed, `Unsupported` for a device of another machine and for
    /// [overlapping](ExecOptions::overlaps) runs with variables in branches and loops, or on a device with memory of its own,
    /// `OutOfMemory` when a partition needs more than its declared limit or than there is, `InvalidInput` when a variable exists with
    /// another type, or the emulated link of a transfer is missing.
    pub fn new(program: Arc<Program>, options: &ExecOptions) -> Result<Executor, Error> {
        Executor::with_turns(program, options, 1, None)
    }

    /// One of `n_lanes` executors of a program, which share its devices by `turns`.
    pub(crate) fn with_turns(
        program: Arc<Program>,
        options: &ExecOptions,
        n_lanes: usize,
        turns: Option<Arc<Turns>>,
    ) -> Result<Executor, Error> {
        let n_devices = program.partitions.len().max(1);
        let n_threads = options.pool.n_threads();
        let threads_per_device = (n_threads / n_devices).max(1);
        let program = program.divided(threads_per_device)?;
        perf::add(&program)?;
        check_devices(&program, n_threads, n_lanes, options)?;
        if !options.is_validated {
            program.check()?;
        }
        let patience = Patience::for_threads(threads_per_device * n_devices * n_lanes);
        let shared = Arc::new(Shared {
            turns,
            ..Shared::new(program, options, threads_per_device, patience)?
        });
        shared.try_memory()?;
        let mut residents = shared.residents(&options.resources)?;
        let overlapping = overlapping(&shared.program, &mut residents, options)?;
        let leads = Lead::all(&shared);
        options.pool.start(leads.len())?;
        if overlapping.is_some() {
            options.resources.permit_overlap();
        }
        Ok(Executor {
            courier: start_courier(&shared, &options.pool)?,
            turn: Mutex::new(Vec::with_capacity(leads.len())),
            leads,
            pool: options.pool.clone(),
            resources: options.resources.clone(),
            has_state: shared.program.has_state(),
            assigns: shared.program.assigns(),
            residents,
            replicas: replicas(&shared.program, &options.resources)?,
            overlapping,
            shared,
        })
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.shared.program
    }

    /// Sets the variables of the program to its initial values. Those without an initial value keep theirs. Waits for runs with variables.
    pub fn initialise(&self) -> Result<(), Error> {
        self.initialise_if(|| true)
    }

    /// [`Executor::initialise`], if `is_wanted` says so once no other run is in progress.
    pub fn initialise_if(&self, is_wanted: impl FnOnce() -> bool) -> Result<(), Error> {
        self.resources.initialise(&self.shared.program, is_wanted)
    }

    /// True if its runs reduce over devices by a library: one such run after the other has a device, however
    /// long it waits for tensors there.
    pub fn holds_devices(&self) -> bool {
        !self.shared.groups.is_empty()
    }

    /// Threads of each device's kernels.
    pub fn threads_per_device(&self) -> usize {
        self.shared.threads_per_device
    }

    /// Bytes held by the executor over all devices, constants included.
    pub fn peak_bytes(&self) -> usize {
        self.shared
            .program
            .memory_use()
            .iter()
            .map(|(_, m)| m.total_bytes(self.pool.n_threads()))
            .sum()
    }

    /// Starts, or starts again, to measure the time of each step; [`Executor::step_times`] tells. Errors when a device has no room for it.
    pub fn start_profile(&self) -> Result<(), Error> {
        let _turn = lock(&self.turn);
        for worker in &self.shared.workers {
            let frame = &mut lock(worker).frame;
            let driver = frame.addresses.memory.driver().cloned();
            frame.profile = Some(Profile::new(frame.steps.len(), driver.as_deref())?);
        }
        Ok(())
    }

    /// Time of each step in ns, summed over the runs since [`Executor::start_profile`], by partition and step. Steps of
    /// sub-programs count for the step that runs them. Kernels of a GPU are timed by its own events, from where its queue comes to the step to
    /// where it is done with it; copies from and to other partitions by the time to ask for them.
    pub fn step_times(&self) -> Vec<Vec<u64>> {
        self.profiles(|profile| profile.total_ns.clone())
    }

    /// When each step began and ended in the last run, by partition and step; empty unless it was profiled, of no meaning when it failed.
    pub fn step_spans(&self) -> Vec<Vec<(Instant, Instant)>> {
        self.profiles(|profile| profile.last.clone())
    }

    /// A list of each partition's profile; empty without one.
    fn profiles<T>(&self, of: impl Fn(&Profile) -> Vec<T>) -> Vec<Vec<T>> {
        let _turn = lock(&self.turn);
        let workers = self.shared.workers.iter();
        workers
            .map(|w| lock(w).frame.profile.as_ref().map(&of).unwrap_or_default())
            .collect()
    }

    /// Time of each kernel of the devices that have memory of their own, started again and again for at least `at_least`, on the contents
    /// that the last run left in its buffers.
    ///
    /// Errors with the device's message. The next run is not disturbed.
    pub fn time_launches(&self, at_least: Duration) -> Result<Vec<LaunchTime>, Error> {
        let _turn = lock(&self.turn);
        self.shared.place(&self.residents);
        self.residents.spare_next()?;
        let mut times = Vec::new();
        for (partition, worker) in self.shared.workers.iter().enumerate() {
            for (step, time) in lock(worker).frame.time_launches(at_least)? {
                times.push(LaunchTime {
                    partition,
                    step,
                    time,
                });
            }
        }
        Ok(times)
    }

    /// By partition: how many pieces of it its device is asked for at once, each by one request; the whole is one.
    pub fn captured(&self) -> Vec<usize> {
        let _turn = lock(&self.turn);
        self.shared
            .workers
            .iter()
            .map(|w| lock(w).n_captured())
            .collect()
    }

    /// Tensors of the last run over emulated links, in the order of sending.
    pub fn crossings(&self) -> Vec<Crossing> {
        let _turn = lock(&self.turn);
        self.shared
            .rendezvous
            .courier()
            .map(Courier::crossings)
            .unwrap_or_default()
    }

    /// Runs once and returns the outputs in program order.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        let mut outputs = self.new_outputs()?;
        self.run_into(inputs, &mut outputs)?;
        Ok(outputs)
    }

    fn new_outputs(&self) -> Result<Vec<Tensor>, Error> {
        let specs = self.program().outputs.iter();
        specs.map(|o| Tensor::zeros(o.dtype, &o.shape)).collect()
    }

    /// Runs once and writes the outputs into `outputs`, whose contents are undefined after an error.
    /// Assigned variables have their new values after a successful run, and their old ones after a failed run.
    ///
    /// Errors: `InvalidInput` when a count, dtype or shape is not the program's; `OutOfMemory` when
    /// other runs have what there is; otherwise the error of the failing step. Allocates nothing
    /// unless an output or a variable shares its bytes with another tensor, a variable changes its shape, or
    /// another run uses threads or memory of the pool needed by this one.
    pub fn run_into(&self, inputs: &[Tensor], outputs: &mut [Tensor]) -> Result<(), Error> {
        let operands = self.checked(inputs, outputs)?;
        self.run_committed(operands, None)
    }

    /// The same on memory at addresses, in the program's order, for callers that have no tensors.
    ///
    /// Errors: `InvalidInput` when a count is not the program's or an address is not aligned to its
    /// elements; otherwise as [`Executor::run_into`].
    ///
    /// # Safety
    ///
    /// Each address points to as many bytes as the program's input or output of that number has,
    /// elements of `bool` inputs are 0 or 1, and during the run nobody else writes the inputs, or reads or
    /// writes the outputs. Outputs overlap neither each other nor inputs.
    pub unsafe fn run_raw(&self, inputs: &[*const u8], outputs: &[*mut u8]) -> Result<(), Error> {
        let program = self.program();
        check_addresses("input", &program.inputs, inputs.iter().map(|p| p.addr()))?;
        check_addresses("output", &program.outputs, outputs.iter().map(|p| p.addr()))?;
        self.run_committed(Operands::Addresses { inputs, outputs }, None)
    }

    /// A run of the caller's number, or else of the next.
    fn run_committed(&self, operands: Operands, run: Option<u64>) -> Result<(), Error> {
        let begin = || match &self.overlapping {
            Some(changed) => self.resources.begin_overlapping(changed),
            None => Ok(self.resources.begin_as(self.assigns)),
        };
        let transaction = self.has_state.then(begin).transpose()?;
        self.run_within(operands, run)?;
        if let Some(transaction) = transaction {
            transaction.commit_with(&self.replicas);
        }
        Ok(())
    }

    /// Tensors of the program's counts, dtypes and shapes.
    fn checked<'t>(
        &self,
        inputs: &'t [Tensor],
        outputs: &'t mut [Tensor],
    ) -> Result<Operands<'t>, Error> {
        check_tensors("input", &self.program().inputs, inputs)?;
        check_tensors("output", &self.program().outputs, outputs)?;
        Ok(Operands::Tensors { inputs, outputs })
    }

    /// [`Executor::run`] as a part of a transaction on the variables that it uses.
    ///
    /// Errors with `Internal` when it assigns variables in place, which a transaction could not take back, or has replicas of variables.
    pub fn run_in(&self, turn: &Transaction, inputs: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        self.run_part(turn, inputs, None)
    }

    fn run_part(
        &self,
        _: &Transaction,
        inputs: &[Tensor],
        run: Option<u64>,
    ) -> Result<Vec<Tensor>, Error> {
        if self.residents.is_in_place() || !self.replicas.is_empty() {
            let message = "a part of a run assigns variables in place, or has replicas of them";
            return Err(Error::internal(message));
        }
        let mut outputs = self.new_outputs()?;
        self.run_within(self.checked(inputs, &mut outputs)?, run)?;
        Ok(outputs)
    }

    fn run_within(&self, mut operands: Operands, run: Option<u64>) -> Result<(), Error> {
        let mut helpers = lock(&self.turn);
        let run = self.shared.rendezvous.number(run)?;
        self.shared.rendezvous.wait_for_staging(run)?;
        self.replicas.iter().try_for_each(|v| v.sync())?;
        let devices = &self.shared.devices;
        let program = self
            .shared
            .turns
            .as_ref()
            .map_or(Arc::as_ptr(&self.shared).addr(), |t| Arc::as_ptr(t).addr());
        let _entered = (!devices.is_empty()).then(|| collective::RUNS.enter(program, devices));
        // A run that failed may have left one without some of its ranks.
        self.shared
            .groups
            .iter()
            .try_for_each(|group| group.renew())?;
        let ran = self.bind(&mut operands);
        let ran = ran.and_then(|()| self.run_bound(&mut helpers, run));
        self.shared.rendezvous.end_run(run);
        self.residents.end(ran.is_ok(), self.shared.is_changing());
        if ran.is_err() {
            self.shared.return_memory();
        }
        helpers.drain(..).for_each(|h| self.pool.give_back(h));
        ran
    }

    fn bind(&self, operands: &mut Operands) -> Result<(), Error> {
        let workers = &self.shared.workers;
        // A failure before the first step leaves all values whole.
        for worker in workers {
            lock(worker).frame.variables.is_changing = false;
        }
        self.shared.place(&self.residents);
        self.residents.bind(|variable, addresses| {
            for worker in workers {
                lock(worker).frame.variables.places[variable as usize] = addresses;
            }
        })?;
        self.shared.bind(operands)
    }

    /// Runs on tensors that the workers have, and leaves the helpers that it took.
    fn run_bound(&self, helpers: &mut Vec<Helper>, run: u64) -> Result<(), Error> {
        let shared = &self.shared;
        for _ in &self.leads {
            helpers.push(self.pool.helper()?);
        }
        // Lanes compute in turns, each with all threads of a device.
        let shares_threads = shared.threads_per_device > 1 && shared.turns.is_none();
        let in_flight = shares_threads.then(|| shared.pool.begin());
        let n_sharing = in_flight.as_ref().map_or(1, |in_flight| in_flight.n);
        shared
            .team_size
            .store(shared.threads_per_device / n_sharing, Ordering::Relaxed);
        shared.begin_epoch(run);
        for (helper, lead) in helpers.iter().zip(&self.leads) {
            helper.start(lead);
        }
        shared.finish_epoch();
        drop(in_flight);
        shared.rendezvous.take_failure().map_or(Ok(()), Err)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if self.overlapping.is_some() {
            self.resources.end_overlap();
        }
        let courier = self.shared.rendezvous.courier();
        courier.iter().for_each(|c| c.close());
        if let Some(helper) = self.courier.take() {
            self.pool.give_back(helper);
        }
    }
}

impl Shared {
    fn new(
        program: Arc<Program>,
        options: &ExecOptions,
        threads: usize,
        patience: Patience,
    ) -> Result<Shared, Error> {
        let setup = Setup::new(&program, options, patience)?;
        let workers = (0..program.partitions.len())
            .map(|index| Ok(Mutex::new(setup.worker(index)?)))
            .collect::<Result<Vec<_>, Error>>()?;
        // Uploads of constants may still be in flight; their errors belong to the constructor.
        setup
            .memories
            .iter()
            .filter_map(Memory::driver)
            .try_for_each(|driver| driver.finish())?;
        let devices = collective::Devices::of(&program, &setup.groups, options);
        Ok(Shared {
            rendezvous: setup.rendezvous,
            workers,
            patience,
            pool: options.pool.core().clone(),
            threads_per_device: threads,
            team_size: AtomicUsize::new(threads),
            epoch: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            finished: Event::default(),
            turns: None,
            number: AtomicU64::new(0),
            devices: Arc::new(devices),
            groups: setup.groups.into_values().collect(),
            program,
        })
    }

    /// Gives the workers the operands of a run, and leases its memory, which they return when they
    /// end.
    fn bind(&self, operands: &mut Operands) -> Result<(), Error> {
        for (index, worker) in self.workers.iter().enumerate() {
            let mut worker = lock(worker);
            worker.bind(operands);
            let taken = worker.take_memory(&self.pool);
            taken.map_err(|e| shortage::explain(e, &self.program, index))?;
        }
        Ok(())
    }

    /// Declares the variables that the program uses where they are; frames on devices get their places.
    fn residents(&self, resources: &Resources) -> Result<Residents, Error> {
        let memory_of = |i: usize| lock(&self.workers[i]).frame.addresses.memory.clone();
        let residents = Residents::of(&self.program, resources, &memory_of)
            .map_err(|(partition, e)| shortage::explain(e, &self.program, partition))?;
        self.place(&residents);
        Ok(residents)
    }

    /// Tells the frames of devices where variables are in the next run.
    fn place(&self, residents: &Residents) {
        let turn = residents.turn();
        let mut partitions = BTreeSet::new();
        residents.place(|partition, variable, addresses| {
            let variables = &mut lock(&self.workers[partition]).frame.variables;
            variables.places[variable as usize] = addresses;
            if !addresses[1].is_null() {
                variables.turn = turn;
            }
            partitions.insert(partition);
        });
        for partition in partitions {
            lock(&self.workers[partition]).frame.bind();
        }
    }

    /// Leases the memory of a run and gives it back: errors belong to the constructor.
    fn try_memory(&self) -> Result<(), Error> {
        for (index, worker) in self.workers.iter().enumerate() {
            let taken = lock(worker).take_memory(&self.pool);
            taken.map_err(|e| shortage::explain(e, &self.program, index))?;
        }
        self.return_memory();
        Ok(())
    }

    /// True when the last run changed variables where they are.
    fn is_changing(&self) -> bool {
        self.workers
            .iter()
            .any(|w| lock(w).frame.variables.is_changing)
    }

    fn return_memory(&self) {
        for worker in &self.workers {
            lock(worker).return_memory(&self.pool);
        }
    }

    fn begin_epoch(&self, epoch: u64) {
        self.rendezvous.begin_epoch(epoch);
        self.running
            .store(self.workers.len().saturating_sub(1), Ordering::Relaxed);
        self.number.store(
            self.turns.as_ref().map_or(0, |t| t.draw()),
            Ordering::Relaxed,
        );
        self.epoch.store(epoch, Ordering::Release);
    }

    /// Runs the first worker on this thread, and waits for those that helpers run.
    fn finish_epoch(&self) {
        if !self.workers.is_empty() {
            self.run_worker(0);
        }
        // Tensors of the caller's are in use until every worker has ended, failed or not.
        self.finished
            .wait_until(self.patience, || self.running.load(Ordering::Acquire) == 0);
    }

    /// Runs a worker once, in its turn on its device.
    fn run_worker(&self, index: usize) {
        let epoch = self.epoch.load(Ordering::Acquire);
        let number = self.number.load(Ordering::Relaxed);
        let _turn = self
            .turns
            .as_ref()
            .map(|t| t.wait(index, number, self.patience));
        let mut worker = lock(&self.workers[index]);
        let followers = self.hire(&worker);
        worker.leader.set_size(1 + followers.n);
        worker.run(&self.rendezvous, epoch);
        worker.return_memory(&self.pool);
    }

    /// Followers for a worker's run, if it has use for them.
    fn hire(&self, worker: &Worker) -> Hired<'_> {
        let team_size = self.team_size.load(Ordering::Relaxed);
        let n = if worker.is_parallel {
            team_size.saturating_sub(1)
        } else {
            0
        };
        self.pool.hire(worker.leader.team(), n)
    }
}

/// The run of a worker after the first.
struct Lead {
    shared: Arc<Shared>,
    index: usize,
}

impl Lead {
    fn all(shared: &Arc<Shared>) -> Vec<Arc<dyn Errand>> {
        let lead = |index| {
            let shared = shared.clone();
            Arc::new(Lead { shared, index }) as Arc<dyn Errand>
        };
        (1..shared.workers.len()).map(lead).collect()
    }
}

impl Errand for Lead {
    fn run(&self) {
        self.shared.run_worker(self.index);
        if self.shared.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.finished.notify();
        }
    }
}

/// The delivery of tensors that cross emulated links; it ends when the courier is closed.
struct Delivery(Arc<Shared>);

impl Errand for Delivery {
    fn run(&self) {
        let rendezvous = &self.0.rendezvous;
        if let Some(courier) = rendezvous.courier() {
            courier.run(|slot, epoch| rendezvous.deliver(slot, epoch));
        }
    }
}

fn start_courier(shared: &Arc<Shared>, pool: &Pool) -> Result<Option<Helper>, Error> {
    if shared.rendezvous.courier().is_none() {
        return Ok(None);
    }
    let helper = pool.helper()?;
    let delivery: Arc<dyn Errand> = Arc::new(Delivery(shared.clone()));
    helper.start(&delivery);
    Ok(Some(helper))
}

/// Errors unless there is an address for each input or output, aligned to its elements. Empty ones may be anywhere.
fn check_addresses(
    what: &str,
    specs: &[IoSpec],
    addresses: impl ExactSizeIterator<Item = usize>,
) -> Result<(), Error> {
    if specs.len() != addresses.len() {
        let (want, got) = (specs.len(), addresses.len());
        return Err(Error::invalid(format!(
            "expected {want} {what}s, got {got}"
        )));
    }
    for (spec, address) in specs.iter().zip(addresses) {
        let (name, size) = (&spec.name, spec.dtype.size_bytes());
        let is_empty = spec.shape.contains(&0);
        if !is_empty && (address == 0 || !address.is_multiple_of(size)) {
            let message =
                format!("{what} {name:?} is at {address:#x}, expected a multiple of {size}");
            return Err(Error::invalid(message));
        }
    }
    Ok(())
}

fn check_tensors(what: &str, specs: &[IoSpec], tensors: &[Tensor]) -> Result<(), Error> {
    if specs.len() != tensors.len() {
        let names: Vec<&str> = specs.iter().map(|s| s.name.as_str()).collect();
        let message = format!(
            "expected {} {what}s {names:?}, got {}",
            specs.len(),
            tensors.len()
        );
        return Err(Error::invalid(message));
    }
    for (spec, tensor) in specs.iter().zip(tensors) {
        if spec.dtype != tensor.dtype() || spec.shape != tensor.shape() {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            let expected = format!("{}{:?}", spec.dtype, spec.shape);
            return Err(Error::invalid(format!(
                "{what} {:?}: expected {expected}, got {dtype}{shape:?}",
                spec.name
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
