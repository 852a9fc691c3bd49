//! The worker of one logical device: runs its partition's steps in dependency order.

use super::caller::{CallerTensors, Operands};
use super::frame::{Frame, PreparedStep};
use super::memory::Memory;
use super::pool::Core;
use super::rendezvous::Rendezvous;
use super::segments::Segments;
use super::step::{Context, Scratch, Stop};
use super::team::{Leader, panic_message};
use crate::device::DeviceName;
use crate::driver::{Driver, Replay};
use crate::error::{Error, ErrorKind};
use crate::program::Partition;
use crate::tensor::AlignedBytes;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Arenas and workspaces up to this size stay with their worker: leasing them would take longer
/// than a small program runs.
const KEPT_BYTES: usize = 64 << 10;

/// Everything that one device's leader uses during a run.
pub(crate) struct Worker {
    pub(crate) device: DeviceName,
    pub(crate) index: usize,
    pub(crate) frame: Frame,
    pub(crate) leader: Leader,
    /// True when the leader has use for followers.
    pub(crate) is_parallel: bool,
    pub(crate) scratch: Scratch,
    /// Copies of the caller's tensors, for a device with memory of its own.
    pub(crate) caller: Option<CallerTensors>,
    /// `None` when no step can be held up: then program order is the schedule.
    pub(crate) schedule: Option<Schedule>,
    /// State of captures and replays of the device's requests, by the turn of its variables.
    pub(crate) replays: [ReplayMode; 2],
    /// Bytes of the arena, where it is leased for a run.
    pub(crate) arena_bytes: usize,
    /// Arena and workspaces of the run.
    pub(crate) block: Option<AlignedBytes>,
}

impl Worker {
    /// Leases arena and workspaces for a run, unless it has kept them. Errors when there is no
    /// memory for them.
    pub(crate) fn take_memory(&mut self, pool: &Core) -> Result<(), Error> {
        let size_bytes = self.leased_bytes();
        if self.block.is_some() || size_bytes == 0 && !self.frame.leases_arena() {
            return Ok(());
        }
        let block = pool.lease(size_bytes)?;
        self.frame.use_arena(block.as_ptr());
        let workspaces = block.as_ptr().wrapping_add(self.arena_bytes);
        self.scratch.use_memory(workspaces);
        self.block = Some(block);
        Ok(())
    }

    fn leased_bytes(&self) -> usize {
        self.arena_bytes.saturating_add(self.scratch.size_bytes())
    }

    /// Gives back what [`Worker::take_memory`] leased, unless it is small.
    pub(crate) fn return_memory(&mut self, pool: &Core) {
        if self.leased_bytes() <= KEPT_BYTES {
            return;
        }
        if let Some(block) = self.block.take() {
            pool.return_block(block);
        }
    }

    /// Takes the caller's tensors, which are the program's by count, dtype and shape, for the next run.
    pub(crate) fn bind(&mut self, operands: &mut Operands) {
        if let Some(caller) = &mut self.caller {
            return caller.bind(operands);
        }
        for (i, address) in self.frame.inputs.iter_mut().enumerate() {
            *address = operands.input(i);
        }
        for (i, address) in self.frame.outputs.iter_mut().enumerate() {
            *address = operands.output(i);
        }
        self.frame.bind();
    }

    /// Number of requests for more than one step, in the turn with the most.
    pub(crate) fn n_captured(&self) -> usize {
        let all = self.replays.iter().map(ReplayMode::n_captured);
        all.max().unwrap_or_default()
    }

    /// Runs the partition once. A failure, panics included, aborts the epoch for all workers.
    pub(crate) fn run(&mut self, rendezvous: &Rendezvous, epoch: u64) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_steps(rendezvous, epoch)));
        rendezvous.gauge(self.index).rest();
        match outcome {
            Ok(Ok(()) | Err(Stop::Aborted)) => {}
            Ok(Err(Stop::Failed(error))) => rendezvous.abort(error),
            Err(payload) => {
                let message = format!(
                    "on {}: a worker panicked: {}",
                    self.device,
                    panic_message(&*payload)
                );
                rendezvous.abort(Error::new(ErrorKind::DeviceFailed, message));
            }
        }
    }

    fn run_steps(&mut self, rendezvous: &Rendezvous, epoch: u64) -> Result<(), Stop> {
        let (device, scratch, leader) = (&self.device, &self.scratch, &mut self.leader);
        leader.call_roll();
        let mut context = Context {
            device,
            leader,
            scratch,
            rendezvous,
            epoch,
            worker: self.index,
            depth: 0,
        };
        let (frame, schedule) = (&mut self.frame, &mut self.schedule);
        let Memory::Device(driver) = frame.addresses.memory.clone() else {
            return run_frame(self.index, frame, schedule, &mut context);
        };
        let Some(caller) = &self.caller else {
            unreachable!("a device has copies of the caller's tensors")
        };
        caller.stage();
        let run = DeviceRun {
            driver: &driver,
            caller,
            index: self.index,
        };
        let replay = &mut self.replays[frame.variables.turn];
        let started = run.start(frame, schedule, replay, &mut context);
        run.finish(started, frame, &context)?;
        frame.check_launches(&context)?;
        caller.unstage();
        Ok(())
    }
}

/// Mode in which a device is asked for a run. The first run loads code and finds faults that concern a single request: its requests are made one by one.
pub(crate) enum ReplayMode {
    /// All at once, from the second run on.
    Whole(Progress),
    /// In pieces, from the second run on, which is to come if `is_first`.
    Pieces { segments: Segments, is_first: bool },
    /// One by one.
    Never,
}

/// Progress of requests, which are made one by one at first, then captured, and replayed from then on.
pub(crate) enum Progress {
    NotYet,
    Next,
    Always(Box<dyn Replay>),
}

impl ReplayMode {
    /// For a partition, by the turn of its variables; `in_order` says whether the steps of all may run in
    /// program order. The second turn comes after a run, which has loaded all code.
    pub(crate) fn by_turn(frame: &Frame, in_order: bool, step_by_step: bool) -> [ReplayMode; 2] {
        [0, 1].map(|turn| match step_by_step {
            true => ReplayMode::Never,
            false => ReplayMode::of(frame, in_order, turn),
        })
    }

    fn of(frame: &Frame, in_order: bool, turn: usize) -> ReplayMode {
        let is_apart = frame.addresses.memory.driver().is_some();
        match Some(frame)
            .filter(|_| is_apart && in_order)
            .and_then(Segments::of)
        {
            _ if frame.is_replayable() => ReplayMode::Whole(match turn {
                0 => Progress::NotYet,
                _ => Progress::Next,
            }),
            Some(segments) => ReplayMode::Pieces {
                segments,
                is_first: turn == 0,
            },
            None => ReplayMode::Never,
        }
    }

    /// Number of requests for more than one step.
    pub(crate) fn n_captured(&self) -> usize {
        match self {
            ReplayMode::Whole(Progress::Always(_)) => 1,
            ReplayMode::Pieces { segments, .. } => segments.n_captured(),
            ReplayMode::Whole(_) | ReplayMode::Never => 0,
        }
    }
}

/// All steps, in program order or as tensors arrive.
fn run_frame(
    index: usize,
    frame: &mut Frame,
    schedule: &mut Option<Schedule>,
    context: &mut Context<'_>,
) -> Result<(), Stop> {
    match schedule {
        None => frame.run_serial(context),
        Some(schedule) => schedule.run(index, frame, context),
    }
}

/// A run of a partition on a device.
struct DeviceRun<'a> {
    driver: &'a Arc<dyn Driver>,
    caller: &'a CallerTensors,
    index: usize,
}

impl DeviceRun<'_> {
    /// Asks the device for the whole run: as one replay where that is possible, but for the first time.
    fn start(
        &self,
        frame: &mut Frame,
        schedule: &mut Option<Schedule>,
        replay: &mut ReplayMode,
        context: &mut Context<'_>,
    ) -> Result<(), Stop> {
        // Times of single steps are wanted.
        if frame.profile.is_some() {
            return self.ask(frame, schedule, context);
        }
        match replay {
            ReplayMode::Never => self.ask(frame, schedule, context),
            ReplayMode::Whole(_) => self.start_whole(frame, schedule, replay, context),
            ReplayMode::Pieces {
                is_first: first @ true,
                ..
            } => {
                *first = false;
                self.ask(frame, schedule, context)
            }
            ReplayMode::Pieces { segments, .. } => self.around(frame, context, |frame, context| {
                segments.run(self.index, frame, &**self.driver, context)
            }),
        }
    }

    fn start_whole(
        &self,
        frame: &mut Frame,
        schedule: &mut Option<Schedule>,
        replay: &mut ReplayMode,
        context: &mut Context<'_>,
    ) -> Result<(), Stop> {
        match replay {
            ReplayMode::Whole(Progress::Always(captured)) => return Ok(captured.start()?),
            ReplayMode::Whole(progress @ Progress::NotYet) => *progress = Progress::Next,
            _ => {
                let mut ask = || self.ask(frame, schedule, context).map_err(Stop::into_error);
                if let Some(captured) = self.driver.capture(true, &mut ask)? {
                    captured.start()?;
                    *replay = ReplayMode::Whole(Progress::Always(captured));
                    return Ok(());
                }
                // A capture that failed once is not tried again.
                *replay = ReplayMode::Never;
            }
        }
        self.ask(frame, schedule, context)
    }

    /// Waits for the device, whatever became of the requests: copies of this run use memory that the next one does.
    fn finish(
        &self,
        started: Result<(), Stop>,
        frame: &mut Frame,
        context: &Context<'_>,
    ) -> Result<(), Stop> {
        let on_device = |e: Error| e.context(format!("on {}", context.device));
        // In a collective the device waits for others, which may never come once this or another worker has failed.
        let is_over = || started.is_err() || context.rendezvous.is_aborted();
        let settled = match frame.settle(&is_over) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Stop::Aborted),
            Err(e) => Err(Stop::Failed(on_device(e))),
        };
        let started = started.and(settled);
        let finished = self.driver.finish();
        let finished = finished.map_err(|e| on_device(frame.explain_fault(e)));
        if let Some(profile) = &mut frame.profile {
            if started.is_err() || finished.is_err() {
                profile.forget()
            } else {
                profile.settle().map_err(on_device)?
            }
        }
        match (started, finished) {
            // The request that noticed a fault is not to blame for it.
            (Err(Stop::Failed(_)), Err(fault)) if !self.driver.waits_for_kernels() => {
                Err(fault.into())
            }
            (started, finished) => started.and(finished.map_err(Stop::from)),
        }
    }

    fn ask(
        &self,
        frame: &mut Frame,
        schedule: &mut Option<Schedule>,
        context: &mut Context<'_>,
    ) -> Result<(), Stop> {
        self.around(frame, context, |frame, context| {
            run_frame(self.index, frame, schedule, context)
        })
    }

    /// Uploads the caller's inputs, runs the steps, and downloads the outputs.
    fn around(
        &self,
        frame: &mut Frame,
        context: &mut Context<'_>,
        steps: impl FnOnce(&mut Frame, &mut Context<'_>) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let on_device =
            |e: Error, context: &Context<'_>| e.context(format!("on {}", context.device));
        self.caller.upload().map_err(|e| on_device(e, context))?;
        steps(frame, context)?;
        frame
            .statuses
            .ask(&frame.addresses.memory)
            .map_err(|e| on_device(e, context))?;
        self.caller.download().map_err(|e| on_device(e, context))?;
        Ok(())
    }
}

/// Dependency counters of a partition that receives.
///
/// A step is ready when its dependencies are done and, for a `Recv`, its tensor is there. Of the ready steps a `Send` runs next, since another device may
/// wait for it and it takes little time; else the one with the lowest id, so the order is the program's except where a tensor is late. All memory
/// is allocated once.
pub(crate) struct Schedule {
    n_deps: Vec<u32>,
    /// Dependencies not yet done.
    pending: Vec<u32>,
    /// Dependents of step `i`: `dependents[first_dependent[i]..first_dependent[i + 1]]`.
    first_dependent: Vec<u32>,
    dependents: Vec<u32>,
    /// Bit set of ready steps.
    ready: Vec<u64>,
    /// No word of `ready` before this one has a bit set.
    lowest_word: usize,
    /// `Send` steps that are ready; these are not in `ready`.
    ready_sends: Vec<u32>,
    /// `Recv` steps whose dependencies are done and whose tensor has not been seen.
    waiting: Vec<u32>,
}

impl Schedule {
    /// The schedule of a partition, if it needs one.
    pub(crate) fn new(partition: &Partition) -> Option<Schedule> {
        let n = partition.steps.len();
        let receives =
            |s: &&crate::program::Step| matches!(s.kind, crate::program::StepKind::Recv { .. });
        let n_recv = partition.steps.iter().filter(receives).count();
        if n_recv == 0 {
            return None;
        }
        let sends =
            |s: &&crate::program::Step| matches!(s.kind, crate::program::StepKind::Send { .. });
        let n_send = partition.steps.iter().filter(sends).count();
        let mut lists = vec![Vec::new(); n];
        for (i, step) in partition.steps.iter().enumerate() {
            step.deps
                .iter()
                .for_each(|d| lists[d.0 as usize].push(i as u32));
        }
        let mut first_dependent = vec![0];
        first_dependent.extend(lists.iter().scan(0, |sum, l| {
            *sum += l.len() as u32;
            Some(*sum)
        }));
        Some(Schedule {
            n_deps: partition
                .steps
                .iter()
                .map(|s| s.deps.len() as u32)
                .collect(),
            pending: vec![0; n],
            first_dependent,
            dependents: lists.concat(),
            ready: vec![0; n.div_ceil(64)],
            lowest_word: 0,
            ready_sends: Vec::with_capacity(n_send),
            waiting: Vec::with_capacity(n_recv),
        })
    }

    fn run(
        &mut self,
        worker: usize,
        frame: &mut Frame,
        context: &mut Context<'_>,
    ) -> Result<(), Stop> {
        frame.statuses.clear(&frame.addresses.memory)?;
        self.start(frame);
        let mut left = frame.steps.len();
        // Read before looking for arrivals: one that comes in between changes the count again, so none is missed.
        let mut seen = context.rendezvous.arrivals(worker);
        self.admit_arrived(frame, context);
        while left > 0 {
            let arrivals = context.rendezvous.arrivals(worker);
            if arrivals != seen {
                seen = arrivals;
                self.admit_arrived(frame, context);
            }
            let Some(step) = self.take_send().or_else(|| self.take_lowest()) else {
                if context.rendezvous.is_aborted() {
                    return Err(Stop::Aborted);
                }
                let driver = frame.addresses.memory.driver().map(|driver| &**driver);
                let waited = context.rendezvous.wait_for_arrival(worker, seen, driver);
                waited.map_err(|e| e.context(format!("on {}", context.device)))?;
                continue;
            };
            frame.run_step(step, context)?;
            left -= 1;
            self.release_dependents(step, frame, context);
        }
        Ok(())
    }

    fn start(&mut self, frame: &Frame) {
        self.pending.copy_from_slice(&self.n_deps);
        self.ready.fill(0);
        self.ready_sends.clear();
        self.waiting.clear();
        for step in 0..self.pending.len() {
            if self.pending[step] == 0 {
                match frame.steps[step] {
                    PreparedStep::Recv { .. } | PreparedStep::RecvOnDevice { .. } => {
                        self.waiting.push(step as u32)
                    }
                    _ => self.set_ready(step, frame),
                }
            }
        }
        self.lowest_word = 0;
    }

    fn set_ready(&mut self, step: usize, frame: &Frame) {
        if let PreparedStep::Send { .. }
        | PreparedStep::Lend { .. }
        | PreparedStep::SendFromDevice(_) = frame.steps[step]
        {
            self.ready_sends.push(step as u32);
            return;
        }
        self.ready[step / 64] |= 1 << (step % 64);
        self.lowest_word = self.lowest_word.min(step / 64);
    }

    /// The ready `Send` with the lowest id: of a few.
    fn take_send(&mut self) -> Option<usize> {
        let first = (0..self.ready_sends.len()).min_by_key(|&i| self.ready_sends[i])?;
        Some(self.ready_sends.swap_remove(first) as usize)
    }

    fn take_lowest(&mut self) -> Option<usize> {
        while let Some(word) = self.ready.get_mut(self.lowest_word) {
            if *word != 0 {
                let bit = word.trailing_zeros() as usize;
                *word &= *word - 1;
                return Some(self.lowest_word * 64 + bit);
            }
            self.lowest_word += 1;
        }
        None
    }

    fn admit_arrived(&mut self, frame: &Frame, context: &Context<'_>) {
        let mut i = 0;
        while let Some(&step) = self.waiting.get(i) {
            if has_arrived(frame, step as usize, context) {
                self.waiting.swap_remove(i);
                self.set_ready(step as usize, frame);
            } else {
                i += 1;
            }
        }
    }

    fn release_dependents(&mut self, step: usize, frame: &Frame, context: &Context<'_>) {
        for at in self.first_dependent[step]..self.first_dependent[step + 1] {
            let next = self.dependents[at as usize] as usize;
            self.pending[next] -= 1;
            if self.pending[next] > 0 {
                continue;
            }
            if has_arrived(frame, next, context) {
                self.set_ready(next, frame)
            } else {
                self.waiting.push(next as u32)
            }
        }
    }
}

/// True for a `Recv` whose tensor is there, and for every other step.
fn has_arrived(frame: &Frame, step: usize, context: &Context<'_>) -> bool {
    match frame.steps[step] {
        PreparedStep::Recv { slot, .. } | PreparedStep::RecvOnDevice { slot, .. } => {
            context.rendezvous.has_arrived(slot, context.epoch)
        }
        _ => true,
    }
}
