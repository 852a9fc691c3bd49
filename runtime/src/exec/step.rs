//! Runs single steps.

use super::collective::waits_for_device;
use super::control::{run_if, run_loop};
use super::frame::{Addresses, Frame, PreparedKernel, PreparedStep, SendFromDevice, Span};
use super::launch::Statuses;
use super::memory::Memory;
use super::rendezvous::Rendezvous;
use super::team::{JobFailure, Leader};
use super::transfer::Staging;
use crate::device::DeviceName;
use crate::error::{Error, ErrorKind};
use crate::program::StepId;
use crate::status;
use crate::tensor::ALIGN_BYTES;
use std::cell::UnsafeCell;

/// Why a worker stops early.
pub(crate) enum Stop {
    /// Another worker failed.
    Aborted,
    /// This one did.
    Failed(Error),
}

impl Stop {
    /// As an error, whoever failed.
    pub(crate) fn into_error(self) -> Error {
        match self {
            Stop::Failed(error) => error,
            Stop::Aborted => Error::new(ErrorKind::DeviceFailed, "the run was aborted"),
        }
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

/// Environment of steps beside their frame.
pub(crate) struct Context<'a> {
    pub(crate) device: &'a DeviceName,
    pub(crate) leader: &'a mut Leader,
    pub(crate) scratch: &'a Scratch,
    pub(crate) rendezvous: &'a Rendezvous,
    /// Number of the run, from 1.
    pub(crate) epoch: u64,
    /// Index of the worker.
    pub(crate) worker: usize,
    /// Number of branches and loops around the frame.
    pub(crate) depth: usize,
}

/// Per-thread memory of a team: kernel workspace, and room for an argument list that ends with it.
pub(crate) struct Scratch {
    threads: Vec<ThreadScratch>,
    /// Of one thread, a multiple of the alignment.
    workspace_bytes: usize,
}

struct ThreadScratch {
    /// In the block that is leased for a run.
    workspace: *mut u8,
    args: UnsafeCell<Box<[*mut u8]>>,
}

// SAFETY: element `t` is used by thread `t` of the team only, and a thread runs one range at a time; the pointers are overwritten before use.
unsafe impl Sync for Scratch {}
// SAFETY: as above; nothing is tied to the creating thread.
unsafe impl Send for Scratch {}

impl Scratch {
    /// For `threads` threads and kernels with at most `max_args` arguments; empty when no kernel
    /// wants a workspace.
    pub(crate) fn new(threads: usize, workspace_bytes: usize, max_args: usize) -> Scratch {
        let n = if workspace_bytes == 0 { 0 } else { threads };
        let one = |_| ThreadScratch {
            workspace: std::ptr::null_mut(),
            args: UnsafeCell::new(vec![std::ptr::null_mut(); max_args + 1].into_boxed_slice()),
        };
        Scratch {
            threads: (0..n).map(one).collect(),
            workspace_bytes: workspace_bytes.next_multiple_of(ALIGN_BYTES),
        }
    }

    /// Bytes of the workspaces of all threads.
    pub(crate) fn size_bytes(&self) -> usize {
        self.threads.len().saturating_mul(self.workspace_bytes)
    }

    /// Takes the memory of a run: [`Scratch::size_bytes`] from `first`.
    pub(crate) fn use_memory(&mut self, first: *mut u8) {
        for (thread, own) in self.threads.iter_mut().enumerate() {
            own.workspace = first.wrapping_add(thread * self.workspace_bytes);
        }
    }
}

impl Frame {
    /// Runs all steps in order. Only for partitions without `Recv`.
    pub(crate) fn run_serial(&mut self, context: &mut Context<'_>) -> Result<(), Stop> {
        self.run_others(&[], context)
    }

    /// Runs all steps in order, but for some, which are sorted.
    fn run_others(&mut self, skipped: &[StepId], context: &mut Context<'_>) -> Result<(), Stop> {
        self.statuses.clear(&self.addresses.memory)?;
        let mut skipped = skipped.iter().peekable();
        let is_run = |&i: &usize| skipped.next_if(|step| step.0 as usize == i).is_none();
        let mut others = (0..self.steps.len()).filter(is_run);
        others.try_for_each(|i| self.run_step(i, context))
    }

    /// Runs a sub-program, but for some steps, which are sorted. Waits for the device if any of its launches
    /// can fail.
    pub(crate) fn run_sub_program(
        &mut self,
        skipped: &[StepId],
        context: &mut Context<'_>,
    ) -> Result<(), Stop> {
        context.depth += 1;
        let ran = self.run_others(skipped, context);
        context.depth -= 1;
        ran?;
        let memory = &self.addresses.memory;
        if self.statuses.ask(memory)? {
            memory.driver().map_or(Ok(()), |driver| driver.finish())?;
            self.check_launches(context)?;
        }
        Ok(())
    }

    /// Errors when one of the frame's launches has failed, naming its node. The device has finished since it was asked for the statuses.
    pub(crate) fn check_launches(&self, context: &Context<'_>) -> Result<(), Stop> {
        let Some((word, error)) = self.statuses.failure() else {
            return Ok(());
        };
        let is_it = |step: &PreparedStep| matches!(step, PreparedStep::Launch(launch) if launch.status() == Some(word));
        let step = self
            .steps
            .iter()
            .position(is_it)
            .expect("every status word belongs to a launch");
        Err(Stop::Failed(
            error
                .context(format!("on {}", context.device))
                .at(self.origin(step)),
        ))
    }

    /// Runs step `i`, whose dependencies are done (and whose tensor has arrived, for a `Recv`).
    pub(crate) fn run_step(&mut self, i: usize, context: &mut Context<'_>) -> Result<(), Stop> {
        if context.rendezvous.is_aborted() {
            return Err(Stop::Aborted);
        }
        let gauge = context.rendezvous.gauge(context.worker);
        gauge.begin(i, context.depth);
        let on_device =
            |error: Error| Stop::Failed(error.context(format!("on {}", context.device)));
        if waits_for_device(&self.steps[i])
            && !self
                .settle(&|| context.rendezvous.is_aborted())
                .map_err(on_device)?
        {
            return Err(Stop::Aborted);
        }
        let waited = self.wait_for_copies(i).map_err(on_device);
        let result = waited.and_then(|()| self.run_timed(i, context));
        match result {
            Err(Stop::Failed(error)) => Err(Stop::Failed(error.at(self.origin(i)))),
            other => other,
        }
    }

    fn run_timed(&mut self, i: usize, context: &mut Context<'_>) -> Result<(), Stop> {
        let Some(profile) = &self.profile else {
            return self.start_step(i, context);
        };
        let computes = !matches!(
            self.steps[i],
            PreparedStep::SendFromDevice(_) | PreparedStep::RecvOnDevice { .. }
        );
        let started = profile.begin(i, computes)?;
        self.start_step(i, context)?;
        self.profile
            .as_mut()
            .map_or(Ok(()), |profile| Ok(profile.end(i, started, computes)?))
    }

    /// Starts step `i`, whose dependencies are done.
    pub(crate) fn start_step(&mut self, i: usize, context: &mut Context<'_>) -> Result<(), Stop> {
        self.variables.is_changing |= self.variables.changes[i];
        let is_copy = matches!(
            self.steps[i],
            PreparedStep::SendFromDevice(_) | PreparedStep::RecvOnDevice { .. }
        );
        if is_copy {
            return Ok(self
                .start_copy(i, context)
                .map_err(|e| e.context(format!("on {}", context.device)))?);
        }
        run(&mut self.steps[i], &self.addresses, &self.statuses, context)
    }

    /// Asks the device for a copy from or to another partition.
    fn start_copy(&self, i: usize, context: &Context<'_>) -> Result<(), Error> {
        let Memory::Device(driver) = &self.addresses.memory else {
            return Ok(());
        };
        let address = |buffer: &Span| self.addresses.buffers[buffer.buffer].addr() as u64;
        match &self.steps[i] {
            PreparedStep::SendFromDevice(SendFromDevice {
                slot,
                buffer,
                target,
                arrival,
            }) => {
                // SAFETY: the buffer has the staging's size (checked by `send_from_device`); steps that write it wait for the copy's event, and
                // the worker waits for the device before the run ends.
                let ask = |staging: &Staging| unsafe {
                    staging.send(&**driver, target, address(buffer), arrival.as_ref())
                };
                context.rendezvous.send_from_device(
                    *slot,
                    buffer.size_bytes,
                    target.driver().is_some(),
                    ask,
                )
            }
            PreparedStep::RecvOnDevice { slot, buffer } => {
                // SAFETY: sizes are equal (checked when it was sent); steps that use the buffer wait for the event, and the worker waits for the
                // device before the run ends.
                let ask = |staging: &Staging| unsafe {
                    staging.receive(&**driver, address(buffer), self.event(i))
                };
                context.rendezvous.receive_on_device(*slot, ask)
            }
            _ => Ok(()),
        }
    }
}

fn run(
    step: &mut PreparedStep,
    addresses: &Addresses,
    statuses: &Statuses,
    context: &mut Context<'_>,
) -> Result<(), Stop> {
    match step {
        PreparedStep::Launch(launch) => launch
            .start(addresses, statuses)
            .map_err(|e| e.context(format!("on {}", context.device)))?,
        PreparedStep::AllReduce(s) => s.start(addresses, context)?,
        PreparedStep::Kernel(kernel) => run_kernel(kernel, addresses, context)?,
        PreparedStep::If(s) => run_if(s, addresses, context)?,
        PreparedStep::Loop(s) => run_loop(s, addresses, context)?,
        _ => move_tensor(step, addresses, context)
            .map_err(|e| e.context(format!("on {}", context.device)))?,
    }
    Ok(())
}

/// Runs a step that only moves bytes: from or to the rendezvous, a variable or another buffer.
fn move_tensor(
    step: &PreparedStep,
    addresses: &Addresses,
    context: &Context<'_>,
) -> Result<(), Error> {
    let memory = &addresses.memory;
    let address = |span: &Span| addresses.buffers[span.buffer];
    // SAFETY: steps that touch overlapping memory are ordered by their dependencies (validated), and this worker runs one at a time,
    // so no one else uses these buffers now; a copy's operands are the same bytes or apart, and `copy` allows even overlap.
    unsafe {
        match step {
            PreparedStep::Send { slot, buffer } => {
                let fill = |staging: &mut [u8]| memory.read(address(buffer), staging);
                context
                    .rendezvous
                    .send(*slot, context.epoch, buffer.size_bytes, fill)
            }
            PreparedStep::Lend {
                slot,
                variable,
                shape,
            } => {
                let value = variable.lend(shape)?;
                context.rendezvous.lend(*slot, context.epoch, value)
            }
            PreparedStep::Recv { slot, buffer } => {
                let take = |staged: &[u8]| memory.write(address(buffer), staged);
                context.rendezvous.receive(*slot, take)
            }
            PreparedStep::Copy { src, dst } => {
                memory.copy(address(src), address(dst), dst.size_bytes)
            }
            PreparedStep::ReadVariable {
                variable,
                dst,
                shape,
            } => variable.read(shape, |value| memory.write(address(dst), value)),
            PreparedStep::AssignVariable {
                variable,
                src,
                shape,
            } => variable.assign(shape, |value| memory.read(address(src), value)),
            PreparedStep::Kernel(_)
            | PreparedStep::Launch(_)
            | PreparedStep::AllReduce(_)
            | PreparedStep::If(_)
            | PreparedStep::Loop(_)
            | PreparedStep::SendFromDevice(_)
            | PreparedStep::RecvOnDevice { .. } => unreachable!("`run` and `start_copy` do these"),
        }
    }
}

/// The argument list of a kernel, shareable between the threads that run it.
struct Args(*const *mut u8);
// SAFETY: the list is only read while the kernel runs; the kernel ABI governs the use of its pointers.
unsafe impl Sync for Args {}

fn run_kernel(
    kernel: &PreparedKernel,
    addresses: &Addresses,
    context: &mut Context<'_>,
) -> Result<(), Stop> {
    let args = Args(addresses.args[kernel.args.clone()].as_ptr());
    let (args, entry, n_args) = (&args, kernel.entry, kernel.args.len());
    let scratch = context.scratch;
    let run_range = |begin: u64, end: u64, thread: usize| {
        let list = if kernel.has_workspace {
            scratch.args_with_workspace(args, n_args, thread)
        } else {
            args.0
        };
        // SAFETY: the entry's maker vouched for the kernel with the buffers of this step ([`Function`](crate::text::Function)), and buffers were validated.
        unsafe { entry(list, begin, end) }
    };
    let error = match context.leader.run(kernel.items, kernel.grain, &run_range) {
        Ok(()) => return Ok(()),
        Err(JobFailure::Status(code)) => {
            status::to_error(code).expect("a failed job has a non-zero status")
        }
        Err(JobFailure::Panic(message)) => Error::new(
            ErrorKind::DeviceFailed,
            format!("a worker panicked: {message}"),
        ),
    };
    Err(Stop::Failed(
        error.context(format!("on {}", context.device)),
    ))
}

impl Scratch {
    fn args_with_workspace(&self, args: &Args, n_args: usize, thread: usize) -> *const *mut u8 {
        let own = &self.threads[thread];
        // SAFETY: only this thread uses its element (see `Sync`); the list was sized for the kernel with the most arguments plus one, and
        // `args` holds `n_args` pointers.
        unsafe {
            let list = &mut *own.args.get();
            list[..n_args].copy_from_slice(std::slice::from_raw_parts(args.0, n_args));
            list[n_args] = own.workspace;
            list.as_ptr()
        }
    }
}
