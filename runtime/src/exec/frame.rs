//! A partition made ready to run: memory allocated, addresses resolved, sub-programs instantiated.

use super::control::{PreparedIf, PreparedLoop};
use super::profile::Profile;
use super::resources::{Resources, Variable};
use crate::error::Error;
use crate::program::{Buffer, BufferId, KernelFn, Key, Loc, Program, Step, StepKind};
use crate::tensor::AlignedBytes;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What instantiation needs to know beside the program.
pub(crate) struct Links<'a> {
    /// Holder of the variables.
    pub(crate) resources: &'a Resources,
    /// Rendezvous slot of every key.
    pub(crate) slots: &'a BTreeMap<Key, usize>,
}

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
    /// Owner of what arena addresses point to.
    _arena: AlignedBytes,
}

// SAFETY: the addresses point into the frame's own arena, into constants held by `program`, or into memory that the caller of a run keeps
// alive for its duration. One thread at a time drives a frame; its kernels share memory with followers as the kernel ABI says.
unsafe impl Send for Frame {}

/// Resolved addresses, apart from the steps so that both can be borrowed at once.
pub(crate) struct Addresses {
    /// One per buffer of the partition.
    pub(crate) buffers: Vec<*mut u8>,
    /// Kernel argument lists, one after the other.
    pub(crate) args: Vec<*mut u8>,
}

/// A step with its operands resolved.
pub(crate) enum Prepared {
    Kernel(PreparedKernel),
    Send { slot: usize, buffer: Span },
    Recv { slot: usize, buffer: Span },
    Copy { src: Span, dst: Span },
    If(Box<PreparedIf>),
    Loop(Box<PreparedLoop>),
    ReadVariable { variable: Arc<Variable>, dst: Span },
    AssignVariable { variable: Arc<Variable>, src: Span },
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
        Span { buffer: id.0 as usize, size_bytes: buffers[id.0 as usize].size_bytes() }
    }
}

impl Frame {
    /// Instantiates partition `partition_idx` of a program that [`Program::validate`] found good.
    pub(crate) fn new(program: &Arc<Program>, partition_idx: usize, links: &Links<'_>) -> Result<Frame, Error> {
        let partition = &program.partitions[partition_idx];
        let arena = AlignedBytes::zeroed(partition.arena_bytes)?;
        let address = |b: &Buffer| match b.loc {
            // SAFETY: validated: the offset lies within the arena.
            Loc::Arena { offset_bytes } => unsafe { arena.as_ptr().add(offset_bytes) },
            Loc::Constant(c) => partition.constants[c as usize].as_ptr().cast_mut(),
            Loc::Input(_) | Loc::Output(_) => std::ptr::null_mut(),
        };
        let bound = |(i, b): (usize, &Buffer)| matches!(b.loc, Loc::Input(_) | Loc::Output(_)).then_some((i, b.loc));
        let mut frame = Frame {
            program: program.clone(),
            partition_idx,
            steps: Vec::with_capacity(partition.steps.len()),
            inputs: vec![std::ptr::null_mut(); program.inputs.len()],
            outputs: vec![std::ptr::null_mut(); program.outputs.len()],
            addresses: Addresses { buffers: partition.buffers.iter().map(address).collect(), args: Vec::new() },
            bound_buffers: partition.buffers.iter().enumerate().filter_map(bound).collect(),
            bound_args: Vec::new(),
            profile: None,
            _arena: arena,
        };
        for step in &partition.steps {
            let prepared = frame.prepare(program, step, links)?;
            frame.steps.push(prepared);
        }
        Ok(frame)
    }

    fn prepare(&mut self, program: &Arc<Program>, step: &Step, links: &Links<'_>) -> Result<Prepared, Error> {
        let partition = &program.partitions[self.partition_idx];
        let span = |id: &BufferId| Span::of(&partition.buffers, *id);
        let variable = |index: &u32| links.resources.declare(&program.variables[*index as usize]);
        Ok(match &step.kind {
            StepKind::Kernel { kernel, args, items, grain, .. } => {
                let kernel = &partition.kernels[kernel.0 as usize];
                let first_arg = self.push_args(args, &partition.buffers);
                Prepared::Kernel(PreparedKernel {
                    entry: kernel.entry.get(),
                    first_arg,
                    n_args: args.len(),
                    items: *items,
                    grain: *grain,
                    has_workspace: kernel.workspace_bytes_per_thread > 0,
                })
            }
            StepKind::Send { key, buffer } => Prepared::Send { slot: links.slots[key], buffer: span(buffer) },
            StepKind::Recv { key, buffer } => Prepared::Recv { slot: links.slots[key], buffer: span(buffer) },
            StepKind::Copy { src, dst } => Prepared::Copy { src: span(src), dst: span(dst) },
            StepKind::If(s) => Prepared::If(Box::new(PreparedIf::new(s, links)?)),
            StepKind::Loop(s) => Prepared::Loop(Box::new(PreparedLoop::new(s, &partition.buffers, links)?)),
            StepKind::ReadVariable { variable: v, dst } => {
                Prepared::ReadVariable { variable: variable(v)?, dst: span(dst) }
            }
            StepKind::AssignVariable { variable: v, src } => {
                Prepared::AssignVariable { variable: variable(v)?, src: span(src) }
            }
        })
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
                Loc::Arena { .. } | Loc::Constant(_) => unreachable!("only inputs and outputs are bound"),
            };
        }
        for &(arg, buffer) in &self.bound_args {
            self.addresses.args[arg] = self.addresses.buffers[buffer];
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
