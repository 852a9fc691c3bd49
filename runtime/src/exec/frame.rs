//! A partition made ready to run: memory allocated, addresses resolved, sub-programs instantiated.

use super::control::{PreparedIf, PreparedLoop};
use super::launch::{self, PreparedLaunch, Statuses};
use super::memory::{Block, Memory};
use super::profile::Profile;
use super::rendezvous::Rendezvous;
use super::resources::{Resources, Variable};
use crate::device::DeviceName;
use crate::driver::{Arrival, Event, Group, Loaded, Passed, Queue, Reduction};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::program::{
    Buffer, BufferId, Kernel, KernelFn, Key, Loc, Partition, Program, Step, StepId, StepKind,
};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Environment of an instance beside the program.
#[derive(Clone, Copy)]
pub(crate) struct Links<'a> {
    /// Holder of the variables.
    pub(crate) resources: &'a Resources,
    /// Rendezvous slot of every key.
    pub(crate) slots: &'a BTreeMap<Key, usize>,
    /// Memory of the device.
    pub(crate) memory: &'a Memory,
    /// Where partitions meet.
    pub(crate) rendezvous: &'a Arc<Rendezvous>,
    /// Where the tensor of each slot goes.
    pub(crate) targets: &'a [Memory],
    /// Devices that reduce together.
    pub(crate) groups: &'a Groups,
}

/// Groups by the devices of their ranks.
pub(crate) type Groups = BTreeMap<Vec<DeviceName>, Arc<dyn Group>>;

/// An instance of one partition: of the program's own, or of a sub-program at one place of use.
pub(crate) struct Frame {
    program: Arc<Program>,
    partition_idx: usize,
    /// Steps with their operands resolved, in program order.
    pub(crate) steps: Vec<Prepared>,
    /// Where the program's inputs are; set before [`Frame::bind`].
    pub(crate) inputs: Vec<*mut u8>,
    /// Where the program's outputs are; set before [`Frame::bind`].
    pub(crate) outputs: Vec<*mut u8>,
    pub(crate) addresses: Addresses,
    /// Buffers whose address [`Frame::bind`] sets.
    bound_buffers: Vec<(usize, Loc)>,
    /// Kernel arguments that follow such a buffer: (index into `args`, index into `buffers`).
    bound_args: Vec<(usize, usize)>,
    /// Times of the steps, when the executor profiles.
    pub(crate) profile: Option<Profile>,
    /// Status words of the launches.
    pub(crate) statuses: Statuses,
    /// Event at the end of each step that is a device's copy from or to another partition.
    events: Vec<Option<Arc<dyn Event>>>,
    /// Dependencies of each step that are such copies.
    copies_before: Vec<Vec<u32>>,
    /// The steps that are all-reduces.
    pub(crate) collectives: Vec<usize>,
    /// True for a step with other dependencies: those of a step that receives use the bytes that it writes.
    computes_before: Vec<bool>,
    /// Owners of the memory that addresses of the arena and of constants on the device point to.
    _blocks: Vec<Block>,
}

// SAFETY: the addresses point into the frame's own blocks, into constants held by `program`, or into memory that the caller of a run keeps
// alive for its duration. One thread at a time drives a frame; its kernels share memory with followers as the kernel ABI says.
unsafe impl Send for Frame {}

/// Resolved addresses, apart from the steps so that both can be borrowed at once.
pub(crate) struct Addresses {
    /// One per buffer of the partition.
    pub(crate) buffers: Vec<*mut u8>,
    /// Kernel argument lists, one after the other.
    pub(crate) args: Vec<*mut u8>,
    /// Memory that the addresses belong to.
    pub(crate) memory: Memory,
}

/// A step with its operands resolved.
pub(crate) enum Prepared {
    Kernel(PreparedKernel),
    Launch(PreparedLaunch),
    Send { slot: usize, buffer: Span },
    Recv { slot: usize, buffer: Span },
    SendFromDevice(SendFromDevice),
    RecvOnDevice { slot: usize, buffer: Span },
    Copy { src: Span, dst: Span },
    AllReduce(PreparedAllReduce),
    If(Box<PreparedIf>),
    Loop(Box<PreparedLoop>),
    ReadVariable { variable: Arc<Variable>, dst: Span },
    AssignVariable { variable: Arc<Variable>, src: Span },
}

/// A send beside which its device computes on.
pub(crate) struct SendFromDevice {
    pub(crate) slot: usize,
    pub(crate) buffer: Span,
    /// Where it goes.
    pub(crate) target: Memory,
    /// Tells a receiver on the host.
    pub(crate) arrival: Option<Arrival>,
}

/// A rank of an all-reduce.
pub(crate) struct PreparedAllReduce {
    pub(crate) group: Arc<dyn Group>,
    pub(crate) rank: usize,
    pub(crate) reduction: Reduction,
    pub(crate) dtype: DType,
    pub(crate) src: Span,
    pub(crate) dst: Span,
}

pub(crate) struct PreparedKernel {
    pub(crate) entry: KernelFn,
    /// Range in [`Addresses::args`].
    pub(crate) first_arg: usize,
    pub(crate) n_args: usize,
    pub(crate) items: u64,
    pub(crate) grain: u64,
    pub(crate) has_workspace: bool,
}

/// A buffer and its size.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) buffer: usize,
    pub(crate) size_bytes: usize,
}

impl Span {
    pub(crate) fn of(buffers: &[Buffer], id: BufferId) -> Span {
        Span {
            buffer: id.0 as usize,
            size_bytes: buffers[id.0 as usize].size_bytes(),
        }
    }
}

impl Frame {
    /// Instantiates partition `partition_idx` of a program that [`Program::validate`] found good.
    pub(crate) fn new(
        program: &Arc<Program>,
        partition_idx: usize,
        links: &Links<'_>,
    ) -> Result<Frame, Error> {
        let partition = &program.partitions[partition_idx];
        let arena = links.memory.allocate(partition.arena_bytes)?;
        let (constants, mut blocks) = place_constants(partition, links.memory)?;
        let address = |b: &Buffer| match b.loc {
            Loc::Arena { offset_bytes } => arena.as_ptr().wrapping_add(offset_bytes),
            Loc::Constant(c) => constants[c as usize],
            Loc::Input(_) | Loc::Output(_) => std::ptr::null_mut(),
        };
        let bound = |(i, b): (usize, &Buffer)| {
            matches!(b.loc, Loc::Input(_) | Loc::Output(_)).then_some((i, b.loc))
        };
        let mut frame = Frame {
            program: program.clone(),
            partition_idx,
            steps: Vec::with_capacity(partition.steps.len()),
            inputs: vec![std::ptr::null_mut(); program.inputs.len()],
            outputs: vec![std::ptr::null_mut(); program.outputs.len()],
            addresses: Addresses {
                buffers: partition.buffers.iter().map(address).collect(),
                args: Vec::new(),
                memory: links.memory.clone(),
            },
            bound_buffers: partition
                .buffers
                .iter()
                .enumerate()
                .filter_map(bound)
                .collect(),
            bound_args: Vec::new(),
            profile: None,
            statuses: Statuses::default(),
            events: Vec::with_capacity(partition.steps.len()),
            copies_before: Vec::with_capacity(partition.steps.len()),
            collectives: Vec::new(),
            computes_before: Vec::with_capacity(partition.steps.len()),
            _blocks: Vec::new(),
        };
        blocks.push(arena);
        frame._blocks = blocks;
        let code = match links.memory {
            Memory::Host => Vec::new(),
            Memory::Device(driver) => launch::load(&**driver, &partition.gpu_code)?,
        };
        for step in &partition.steps {
            let prepared = frame.prepare(program, step, links, &code)?;
            let is_copy = |d: &&StepId| frame.events[d.0 as usize].is_some();
            let copies: Vec<u32> = step.deps.iter().filter(is_copy).map(|d| d.0).collect();
            frame.computes_before.push(copies.len() < step.deps.len());
            frame.copies_before.push(copies);
            frame.events.push(match (&prepared, links.memory) {
                (Prepared::SendFromDevice(send), _) => links.rendezvous.sent(send.slot),
                (Prepared::RecvOnDevice { .. }, Memory::Device(driver)) => Some(driver.event()?),
                _ => None,
            });
            if let Prepared::AllReduce(_) = prepared {
                frame.collectives.push(frame.steps.len());
            }
            frame.steps.push(prepared);
        }
        frame.statuses.allocate(links.memory)?;
        Ok(frame)
    }

    fn prepare(
        &mut self,
        program: &Arc<Program>,
        step: &Step,
        links: &Links<'_>,
        code: &[Arc<dyn Loaded>],
    ) -> Result<Prepared, Error> {
        let partition = &program.partitions[self.partition_idx];
        let span = |id: &BufferId| Span::of(&partition.buffers, *id);
        let variable = |index: &u32| links.resources.declare(&program.variables[*index as usize]);
        Ok(match &step.kind {
            StepKind::Kernel {
                kernel,
                args,
                items,
                grain,
                ..
            } => {
                let first_arg = self.push_args(args, &partition.buffers);
                let kernel = match &partition.kernels[kernel.0 as usize] {
                    Kernel::Cpu(kernel) => kernel,
                    Kernel::Gpu(kernel) => {
                        return Ok(Prepared::Launch(PreparedLaunch::new(
                            kernel,
                            code,
                            first_arg,
                            &mut self.statuses,
                        )));
                    }
                    Kernel::Product(product) => {
                        let made = PreparedLaunch::of_product(product, links.memory, first_arg);
                        return made.map(Prepared::Launch).map_err(|e| e.at(&step.origin));
                    }
                };
                Prepared::Kernel(PreparedKernel {
                    entry: kernel.entry.get(),
                    first_arg,
                    n_args: args.len(),
                    items: *items,
                    grain: *grain,
                    has_workspace: kernel.workspace_bytes_per_thread > 0,
                })
            }
            StepKind::Send { key, buffer } => prepare_send(links, links.slots[key], span(buffer)),
            StepKind::Recv { key, buffer } => match links.memory {
                Memory::Host => Prepared::Recv {
                    slot: links.slots[key],
                    buffer: span(buffer),
                },
                Memory::Device(_) => Prepared::RecvOnDevice {
                    slot: links.slots[key],
                    buffer: span(buffer),
                },
            },
            StepKind::Copy { src, dst } => Prepared::Copy {
                src: span(src),
                dst: span(dst),
            },
            StepKind::AllReduce(s) => Prepared::AllReduce(PreparedAllReduce {
                group: links.groups[&s.devices].clone(),
                rank: s.rank as usize,
                reduction: s.kind,
                dtype: partition.buffers[s.src.0 as usize].dtype,
                src: span(&s.src),
                dst: span(&s.dst),
            }),
            StepKind::If(s) => Prepared::If(Box::new(PreparedIf::new(s, links)?)),
            StepKind::Loop(s) => {
                Prepared::Loop(Box::new(PreparedLoop::new(s, &partition.buffers, links)?))
            }
            StepKind::ReadVariable { variable: v, dst } => Prepared::ReadVariable {
                variable: variable(v)?,
                dst: span(dst),
            },
            StepKind::AssignVariable { variable: v, src } => Prepared::AssignVariable {
                variable: variable(v)?,
                src: span(src),
            },
        })
    }

    /// Takes the device's copies of the caller's tensors, which stay where they are, by index: inputs and outputs.
    pub(crate) fn use_copies(&mut self, [inputs, outputs]: [Vec<(usize, *mut u8)>; 2]) {
        inputs
            .into_iter()
            .for_each(|(i, address)| self.inputs[i] = address);
        outputs
            .into_iter()
            .for_each(|(i, address)| self.outputs[i] = address);
        self.bind();
    }

    fn push_args(&mut self, args: &[BufferId], buffers: &[Buffer]) -> usize {
        let first = self.addresses.args.len();
        for id in args {
            let buffer = id.0 as usize;
            if matches!(buffers[buffer].loc, Loc::Input(_) | Loc::Output(_)) {
                self.bound_args.push((self.addresses.args.len(), buffer));
            }
            self.addresses.args.push(self.addresses.buffers[buffer]);
        }
        first
    }

    /// Takes over the addresses in `inputs` and `outputs`.
    pub(crate) fn bind(&mut self) {
        for &(buffer, loc) in &self.bound_buffers {
            self.addresses.buffers[buffer] = match loc {
                Loc::Input(i) => self.inputs[i as usize],
                Loc::Output(i) => self.outputs[i as usize],
                Loc::Arena { .. } | Loc::Constant(_) => {
                    unreachable!("only inputs and outputs are bound")
                }
            };
        }
        for &(arg, buffer) in &self.bound_args {
            self.addresses.args[arg] = self.addresses.buffers[buffer];
        }
    }

    /// The queue that a step is asked of waits for the copies that the step depends on.
    pub(crate) fn wait_for_copies(&self, step: usize) -> Result<(), Error> {
        let Memory::Device(driver) = &self.addresses.memory else {
            return Ok(());
        };
        let queue = match self.steps[step] {
            Prepared::SendFromDevice(_) => Queue::Out,
            Prepared::RecvOnDevice { .. } => Queue::In,
            _ => Queue::Compute,
        };
        if queue == Queue::In && self.computes_before[step] {
            driver.receive_after_computing()?;
        }
        let events = self.copies_before[step]
            .iter()
            .filter_map(|&d| self.events[d as usize].as_ref());
        events
            .into_iter()
            .try_for_each(|event| driver.wait(queue, &**event))
    }

    /// Event at the end of a step that is a device's copy.
    pub(crate) fn event(&self, step: usize) -> &dyn Event {
        self.events[step].as_deref().unwrap_or(&Passed)
    }

    /// True when all its requests can be replayed as one: kernels, copies, and sends to the host.
    pub(crate) fn is_replayable(&self) -> bool {
        self.steps.iter().all(|step| match step {
            Prepared::Launch(_) | Prepared::Copy { .. } => true,
            Prepared::SendFromDevice(send) => send.arrival.is_some(),
            _ => false,
        })
    }

    /// A fault that the device noticed when all had been asked for: it says which kernels may be to blame.
    pub(crate) fn explain_fault(&self, error: Error) -> Error {
        let launches: Vec<usize> = (0..self.steps.len())
            .filter(|&i| matches!(self.steps[i], Prepared::Launch(_)))
            .collect();
        let name = |&i: &usize| match &self.steps[i] {
            Prepared::Launch(launch) => format!("{} (node {:?})", launch.entry(), self.origin(i)),
            _ => String::new(),
        };
        match launches.as_slice() {
            _ if error.kind() != ErrorKind::DeviceFailed => error,
            [] => error,
            [only] => error.context(format!("kernel {}", name(only))).at(self.origin(*only)),
            [first, .., last] => error.context(format!(
                "one of {} kernels, from {} to {}; with --verify each is waited for, which tells which one",
                launches.len(),
                name(first),
                name(last)
            )),
        }
    }

    /// Node path of a step, for errors.
    pub(crate) fn origin(&self, step: usize) -> &str {
        &self.program.partitions[self.partition_idx].steps[step].origin
    }

    /// The most arguments of any kernel, here and in sub-programs.
    pub(crate) fn max_args(&self) -> usize {
        let own = |s: &Prepared| match s {
            Prepared::Kernel(k) => k.n_args,
            Prepared::If(s) => s.branches.iter().map(Frame::max_args).max().unwrap_or(0),
            Prepared::Loop(s) => s.body.max_args(),
            _ => 0,
        };
        self.steps.iter().map(own).max().unwrap_or(0)
    }
}

/// Over emulated links a device sends through its host.
fn prepare_send(links: &Links<'_>, slot: usize, buffer: Span) -> Prepared {
    if matches!(links.memory, Memory::Host) || links.rendezvous.courier().is_some() {
        return Prepared::Send { slot, buffer };
    }
    let target = links.targets[slot].clone();
    let rendezvous = links.rendezvous.clone();
    let arrived = move || rendezvous.deliver(slot, rendezvous.epoch());
    let arrival: Option<Arrival> = target
        .driver()
        .is_none()
        .then(|| Box::new(arrived) as Arrival);
    Prepared::SendFromDevice(SendFromDevice {
        slot,
        buffer,
        target,
        arrival,
    })
}

/// Addresses of the constants: on the host where they are, on a device those of copies, which the blocks own.
fn place_constants(
    partition: &Partition,
    memory: &Memory,
) -> Result<(Vec<*mut u8>, Vec<Block>), Error> {
    if matches!(memory, Memory::Host) {
        return Ok((
            partition
                .constants
                .iter()
                .map(|c| c.as_ptr().cast_mut())
                .collect(),
            Vec::new(),
        ));
    }
    let upload = |c: &Tensor| {
        let block = memory.allocate(c.size_bytes())?;
        // SAFETY: the block is new and has the constant's size.
        unsafe { memory.write(block.as_ptr(), c.as_bytes())? };
        Ok(block)
    };
    let blocks: Vec<Block> = partition
        .constants
        .iter()
        .map(upload)
        .collect::<Result<_, Error>>()?;
    Ok((blocks.iter().map(Block::as_ptr).collect(), blocks))
}
