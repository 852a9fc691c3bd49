//! A partition made ready to run: memory allocated, addresses resolved, sub-programs instantiated.

use super::control::{PreparedIf, PreparedLoop};
use super::launch::{self, PreparedLaunch, Statuses};
use super::memory::{Block, Memory};
use super::profile::Profile;
use super::rendezvous::Rendezvous;
use super::resources::{Resources, Variable};
use crate::device::DeviceName;
use crate::driver::{Arrival, DeviceCode, Event, Group, PassedEvent, Queue, Reduction};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::program::{
    AllReduce, Buffer, BufferId, Kernel, KernelFn, Key, Loc, Partition, Program, Step, StepId,
    StepKind,
};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
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
    pub(crate) steps: Vec<PreparedStep>,
    /// Where the program's inputs are; set before [`Frame::bind`].
    pub(crate) inputs: Vec<*mut u8>,
    /// Where the program's outputs are; set before [`Frame::bind`].
    pub(crate) outputs: Vec<*mut u8>,
    pub(crate) variables: Variables,
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
    /// Buffers in an arena that is leased for a run, with their offsets, and the kernel arguments
    /// that follow them.
    leased_buffers: Vec<(usize, usize)>,
    leased_args: Vec<(usize, usize)>,
    /// Where the arena of the last run was.
    arena: *mut u8,
    /// Owners of the memory that addresses of the arena and of constants on the device point to.
    _blocks: Vec<Block>,
}

// SAFETY: the addresses point into the frame's own blocks, into constants held by `program`, or into memory that the caller of a run keeps
// alive for its duration. One thread at a time drives a frame; its kernels share memory with followers as the kernel ABI says.
unsafe impl Send for Frame {}

/// The program's variables that are used where they are.
pub(crate) struct Variables {
    /// Where the value of each is, and its next value; set before [`Frame::bind`].
    pub(crate) places: Vec<[*mut u8; 2]>,
    /// Turn of these places, 0 or 1, on a device where they alternate.
    pub(crate) turn: usize,
    /// True for steps that change a variable where it is.
    pub(crate) changes: Vec<bool>,
    /// True when such a step has begun in the last run.
    pub(crate) is_changing: bool,
}

impl Variables {
    fn of(program: &Program, partition: &Partition) -> Variables {
        let steps = partition.steps.iter();
        Variables {
            places: vec![[std::ptr::null_mut(); 2]; program.variables.len()],
            turn: 0,
            changes: steps.map(|s| changes(program, partition, s)).collect(),
            is_changing: false,
        }
    }
}

/// True for a step that changes a variable where it is.
fn changes(program: &Program, partition: &Partition, step: &Step) -> bool {
    let mut written = step.kind.accesses().1.into_iter();
    written.any(|id| match partition.buffers[id.0 as usize].loc {
        Loc::Assigned(i) => program.variables[i as usize].in_place,
        _ => false,
    })
}

/// Resolved addresses, apart from the steps so that both can be borrowed at once.
pub(crate) struct Addresses {
    /// One per buffer of the partition.
    pub(crate) buffers: Vec<*mut u8>,
    /// Kernel argument lists, one after the other.
    pub(crate) args: Vec<*mut u8>,
    /// Memory that the addresses belong to.
    pub(crate) memory: Memory,
}

impl Addresses {
    /// Allocates the arena, unless it is leased for each run, and places the constants. The second
    /// value owns the memory of both.
    fn allocate(
        partition: &Partition,
        memory: &Memory,
        arena: Arena,
    ) -> Result<(Addresses, Vec<Block>), Error> {
        let (constants, mut blocks) = place_constants(partition, memory)?;
        let own = match arena {
            Arena::Own => Some(memory.allocate(partition.arena_bytes)?),
            Arena::Leased => None,
        };
        let base = own.as_ref().map_or(std::ptr::null_mut(), Block::as_ptr);
        let address = |b: &Buffer| match b.loc {
            Loc::Arena { offset_bytes } => base.wrapping_add(offset_bytes),
            Loc::Constant(c) => constants[c as usize],
            Loc::Input(_) | Loc::Output(_) | Loc::Variable(_) | Loc::Assigned(_) => {
                std::ptr::null_mut()
            }
        };
        let addresses = Addresses {
            buffers: partition.buffers.iter().map(address).collect(),
            args: Vec::new(),
            memory: memory.clone(),
        };
        blocks.extend(own);
        Ok((addresses, blocks))
    }
}

/// Owner of a frame's arena.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arena {
    /// The frame.
    Own,
    /// The pool: [`Frame::use_arena`] tells where it is for a run.
    Leased,
}

/// A step with its operands resolved.
pub(crate) enum PreparedStep {
    Kernel(PreparedKernel),
    Launch(PreparedLaunch),
    Send {
        slot: usize,
        buffer: Span,
    },
    /// A send of an unassigned variable to another task.
    Lend {
        slot: usize,
        variable: Arc<Variable>,
        shape: Vec<usize>,
    },
    Recv {
        slot: usize,
        buffer: Span,
    },
    SendFromDevice(SendFromDevice),
    RecvOnDevice {
        slot: usize,
        buffer: Span,
    },
    Copy {
        src: Span,
        dst: Span,
    },
    AllReduce(PreparedAllReduce),
    If(Box<PreparedIf>),
    Loop(Box<PreparedLoop>),
    ReadVariable {
        variable: Arc<Variable>,
        dst: Span,
        shape: Vec<usize>,
    },
    AssignVariable {
        variable: Arc<Variable>,
        src: Span,
        shape: Vec<usize>,
    },
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
    pub(crate) args: Range<usize>,
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
        arena: Arena,
    ) -> Result<Frame, Error> {
        let partition = &program.partitions[partition_idx];
        let (addresses, blocks) = Addresses::allocate(partition, links.memory, arena)?;
        let leased_buffers = match arena {
            Arena::Own => Vec::new(),
            Arena::Leased => arena_buffers(&partition.buffers),
        };
        let n_steps = partition.steps.len();
        let mut frame = Frame {
            program: program.clone(),
            partition_idx,
            steps: Vec::with_capacity(n_steps),
            inputs: vec![std::ptr::null_mut(); program.inputs.len()],
            outputs: vec![std::ptr::null_mut(); program.outputs.len()],
            variables: Variables::of(program, partition),
            addresses,
            bound_buffers: bound_buffers(&partition.buffers),
            bound_args: Vec::new(),
            profile: None,
            statuses: Statuses::default(),
            events: Vec::with_capacity(n_steps),
            copies_before: Vec::with_capacity(n_steps),
            collectives: Vec::new(),
            computes_before: Vec::with_capacity(n_steps),
            leased_buffers,
            leased_args: Vec::new(),
            arena: std::ptr::null_mut(),
            _blocks: blocks,
        };
        let source = StepSource::new(program, partition, links)?;
        for step in &partition.steps {
            frame.add_step(&source, step)?;
        }
        if arena == Arena::Own {
            frame.leased_args.clear();
        }
        frame.statuses.allocate(links.memory)?;
        Ok(frame)
    }

    fn add_step(&mut self, source: &StepSource<'_>, step: &Step) -> Result<(), Error> {
        let prepared = self.prepare(source, step)?;
        let is_copy = |d: &&StepId| self.events[d.0 as usize].is_some();
        let copies: Vec<u32> = step.deps.iter().filter(is_copy).map(|d| d.0).collect();
        self.computes_before.push(copies.len() < step.deps.len());
        self.copies_before.push(copies);
        self.events.push(source.end_of_copy(&prepared)?);
        if let PreparedStep::AllReduce(_) = prepared {
            self.collectives.push(self.steps.len());
        }
        self.steps.push(prepared);
        Ok(())
    }

    fn prepare(&mut self, source: &StepSource<'_>, step: &Step) -> Result<PreparedStep, Error> {
        Ok(match &step.kind {
            StepKind::Kernel {
                kernel,
                args,
                items,
                grain,
                ..
            } => {
                let kernel = &source.partition.kernels[kernel.0 as usize];
                self.prepare_kernel(source, kernel, args, [*items, *grain])
                    .map_err(|e| e.at(&step.origin))?
            }
            StepKind::Send { key, buffer } => source.send(key, *buffer)?,
            StepKind::Recv { key, buffer } => source.recv(key, *buffer),
            StepKind::Copy { src, dst } => PreparedStep::Copy {
                src: source.span(*src),
                dst: source.span(*dst),
            },
            StepKind::AllReduce(s) => PreparedStep::AllReduce(source.all_reduce(s)),
            StepKind::If(s) => PreparedStep::If(Box::new(PreparedIf::new(s, source.links)?)),
            StepKind::Loop(s) => {
                let prepared = PreparedLoop::new(s, &source.partition.buffers, source.links)?;
                PreparedStep::Loop(Box::new(prepared))
            }
            StepKind::ReadVariable { variable, dst } => PreparedStep::ReadVariable {
                variable: source.variable(*variable)?,
                dst: source.span(*dst),
                shape: source.shape(*dst),
            },
            StepKind::AssignVariable { variable, src } => PreparedStep::AssignVariable {
                variable: source.variable(*variable)?,
                src: source.span(*src),
                shape: source.shape(*src),
            },
        })
    }

    fn prepare_kernel(
        &mut self,
        source: &StepSource<'_>,
        kernel: &Kernel,
        args: &[BufferId],
        [items, grain]: [u64; 2],
    ) -> Result<PreparedStep, Error> {
        let first_arg = self.push_args(args, &source.partition.buffers);
        Ok(match kernel {
            Kernel::Cpu(kernel) => PreparedStep::Kernel(PreparedKernel {
                entry: kernel.function.entry()?,
                args: first_arg..first_arg + args.len(),
                items,
                grain,
                has_workspace: kernel.workspace_bytes_per_thread > 0,
            }),
            Kernel::Gpu(kernel) => {
                let statuses = &mut self.statuses;
                let launch = PreparedLaunch::new(kernel, &source.code, first_arg, statuses);
                PreparedStep::Launch(launch)
            }
            Kernel::Product(product) => {
                let memory = source.links.memory;
                PreparedStep::Launch(PreparedLaunch::of_product(product, memory, first_arg)?)
            }
        })
    }

    /// Takes the device's copies of the caller's tensors, which stay where they are, by index: inputs and outputs.
    pub(crate) fn use_copies(&mut self, [inputs, outputs]: [Vec<(usize, *mut u8)>; 2]) {
        for (i, address) in inputs {
            self.inputs[i] = address;
        }
        for (i, address) in outputs {
            self.outputs[i] = address;
        }
        self.bind();
    }

    fn push_args(&mut self, args: &[BufferId], buffers: &[Buffer]) -> usize {
        let first = self.addresses.args.len();
        for id in args {
            let buffer = id.0 as usize;
            match buffers[buffer].loc {
                Loc::Input(_) | Loc::Output(_) | Loc::Variable(_) | Loc::Assigned(_) => {
                    self.bound_args.push((self.addresses.args.len(), buffer));
                }
                Loc::Arena { .. } => self.leased_args.push((self.addresses.args.len(), buffer)),
                Loc::Constant(_) => {}
            }
            self.addresses.args.push(self.addresses.buffers[buffer]);
        }
        first
    }

    /// Takes over the addresses in `inputs`, `outputs` and `variables`.
    pub(crate) fn bind(&mut self) {
        for &(buffer, loc) in &self.bound_buffers {
            self.addresses.buffers[buffer] = match loc {
                Loc::Input(i) => self.inputs[i as usize],
                Loc::Output(i) => self.outputs[i as usize],
                Loc::Variable(i) => self.variables.places[i as usize][0],
                Loc::Assigned(i) => self.variables.places[i as usize][1],
                Loc::Arena { .. } | Loc::Constant(_) => {
                    unreachable!("the frame knows where these are")
                }
            };
        }
        for &(arg, buffer) in &self.bound_args {
            self.addresses.args[arg] = self.addresses.buffers[buffer];
        }
    }

    /// True when a buffer, of size zero perhaps, is in an arena that is leased.
    pub(crate) fn leases_arena(&self) -> bool {
        !self.leased_buffers.is_empty()
    }

    /// Takes the arena of a run.
    pub(crate) fn use_arena(&mut self, arena: *mut u8) {
        if arena == self.arena {
            return;
        }
        self.arena = arena;
        for &(buffer, offset_bytes) in &self.leased_buffers {
            self.addresses.buffers[buffer] = arena.wrapping_add(offset_bytes);
        }
        for &(arg, buffer) in &self.leased_args {
            self.addresses.args[arg] = self.addresses.buffers[buffer];
        }
    }

    /// The queue that a step is asked of waits for the copies that the step depends on.
    pub(crate) fn wait_for_copies(&self, step: usize) -> Result<(), Error> {
        let Memory::Device(driver) = &self.addresses.memory else {
            return Ok(());
        };
        let queue = match self.steps[step] {
            PreparedStep::SendFromDevice(_) => Queue::Out,
            PreparedStep::RecvOnDevice { .. } => Queue::In,
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
        self.events[step].as_deref().unwrap_or(&PassedEvent)
    }

    /// True when all its requests can be replayed as one: kernels, copies, and sends to the host.
    pub(crate) fn is_replayable(&self) -> bool {
        self.steps.iter().all(|step| match step {
            PreparedStep::Launch(_) | PreparedStep::Copy { .. } => true,
            PreparedStep::SendFromDevice(send) => send.arrival.is_some(),
            _ => false,
        })
    }

    /// A fault that the device noticed when all had been asked for: it says which kernels may be to blame.
    pub(crate) fn explain_fault(&self, error: Error) -> Error {
        let launches: Vec<usize> = (0..self.steps.len())
            .filter(|&i| matches!(self.steps[i], PreparedStep::Launch(_)))
            .collect();
        let name = |&i: &usize| match &self.steps[i] {
            PreparedStep::Launch(launch) => {
                format!("{} (node {:?})", launch.entry(), self.origin(i))
            }
            _ => String::new(),
        };
        match launches.as_slice() {
            _ if error.kind() != ErrorKind::DeviceFailed => error,
            [] => error,
            [only] => error
                .context(format!("kernel {}", name(only)))
                .at(self.origin(*only)),
            [first, .., last] => error.context(format!(
                "one of {} kernels, from {} to {}; --verify waits for each and finds the one",
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

    /// True when a kernel, here or in a sub-program, may be split over threads.
    pub(crate) fn is_parallel(&self) -> bool {
        self.steps.iter().any(|step| match step {
            PreparedStep::Kernel(k) => k.grain > 0 && k.items > k.grain,
            PreparedStep::If(s) => s.branches.iter().any(Frame::is_parallel),
            PreparedStep::Loop(s) => s.body.is_parallel(),
            _ => false,
        })
    }

    /// The most arguments of any kernel, here and in sub-programs.
    pub(crate) fn max_args(&self) -> usize {
        let own = |s: &PreparedStep| match s {
            PreparedStep::Kernel(k) => k.args.len(),
            PreparedStep::If(s) => s.branches.iter().map(Frame::max_args).max().unwrap_or(0),
            PreparedStep::Loop(s) => s.body.max_args(),
            _ => 0,
        };
        self.steps.iter().map(own).max().unwrap_or(0)
    }
}

/// The partition and environment that a frame's steps are prepared from.
struct StepSource<'a> {
    program: &'a Program,
    partition: &'a Partition,
    links: &'a Links<'a>,
    /// Loaded [`Partition::gpu_code`]; empty on the host.
    code: Vec<Arc<dyn DeviceCode>>,
}

impl<'a> StepSource<'a> {
    fn new(
        program: &'a Program,
        partition: &'a Partition,
        links: &'a Links<'a>,
    ) -> Result<StepSource<'a>, Error> {
        let code = match links.memory {
            Memory::Host => Vec::new(),
            Memory::Device(driver) => launch::load(&**driver, &partition.gpu_code)?,
        };
        Ok(StepSource {
            program,
            partition,
            links,
            code,
        })
    }

    fn span(&self, id: BufferId) -> Span {
        Span::of(&self.partition.buffers, id)
    }

    fn shape(&self, id: BufferId) -> Vec<usize> {
        self.partition.buffers[id.0 as usize].shape.clone()
    }

    fn variable(&self, index: u32) -> Result<Arc<Variable>, Error> {
        let spec = &self.program.variables[index as usize];
        self.links.resources.declare(spec)
    }

    /// Over emulated links a device sends through its host.
    fn send(&self, key: &Key, id: BufferId) -> Result<PreparedStep, Error> {
        let (links, slot, buffer) = (self.links, self.links.slots[key], self.span(id));
        let is_emulated = links.rendezvous.courier().is_some();
        let is_here = matches!(links.memory, Memory::Host);
        if is_here
            && !is_emulated
            && links.rendezvous.lends(slot)
            && let Some(variable) = self.unassigned(id)
        {
            return Ok(PreparedStep::Lend {
                slot,
                variable: self.variable(variable)?,
                shape: self.shape(id),
            });
        }
        if is_here || is_emulated {
            return Ok(PreparedStep::Send { slot, buffer });
        }
        let target = links.targets[slot].clone();
        let rendezvous = links.rendezvous.clone();
        let arrived = move || rendezvous.deliver(slot, rendezvous.epoch());
        let arrival: Option<Arrival> = target
            .driver()
            .is_none()
            .then(|| Box::new(arrived) as Arrival);
        Ok(PreparedStep::SendFromDevice(SendFromDevice {
            slot,
            buffer,
            target,
            arrival,
        }))
    }

    /// The variable whose place a buffer is, where the program assigns it nowhere.
    fn unassigned(&self, id: BufferId) -> Option<u32> {
        match self.partition.buffers[id.0 as usize].loc {
            Loc::Variable(variable) if !self.program.may_assign(variable) => Some(variable),
            _ => None,
        }
    }

    fn recv(&self, key: &Key, buffer: BufferId) -> PreparedStep {
        let (slot, buffer) = (self.links.slots[key], self.span(buffer));
        match self.links.memory {
            Memory::Host => PreparedStep::Recv { slot, buffer },
            Memory::Device(_) => PreparedStep::RecvOnDevice { slot, buffer },
        }
    }

    fn all_reduce(&self, s: &AllReduce) -> PreparedAllReduce {
        PreparedAllReduce {
            group: self.links.groups[&s.devices].clone(),
            rank: s.rank as usize,
            reduction: s.kind,
            dtype: self.partition.buffers[s.src.0 as usize].dtype,
            src: self.span(s.src),
            dst: self.span(s.dst),
        }
    }

    /// Event that marks the end of a step that is a device's copy.
    fn end_of_copy(&self, step: &PreparedStep) -> Result<Option<Arc<dyn Event>>, Error> {
        Ok(match (step, self.links.memory) {
            (PreparedStep::SendFromDevice(send), _) => self.links.rendezvous.sent(send.slot),
            (PreparedStep::RecvOnDevice { .. }, Memory::Device(driver)) => Some(driver.event()?),
            _ => None,
        })
    }
}

/// Buffers at inputs, outputs and variables, whose addresses each run decides.
fn bound_buffers(buffers: &[Buffer]) -> Vec<(usize, Loc)> {
    let bound = |(i, b): (usize, &Buffer)| match b.loc {
        Loc::Input(_) | Loc::Output(_) | Loc::Variable(_) | Loc::Assigned(_) => Some((i, b.loc)),
        Loc::Arena { .. } | Loc::Constant(_) => None,
    };
    buffers.iter().enumerate().filter_map(bound).collect()
}

/// Buffers in the arena, with their offsets.
fn arena_buffers(buffers: &[Buffer]) -> Vec<(usize, usize)> {
    let in_arena = |(i, b): (usize, &Buffer)| match b.loc {
        Loc::Arena { offset_bytes } => Some((i, offset_bytes)),
        _ => None,
    };
    buffers.iter().enumerate().filter_map(in_arena).collect()
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
