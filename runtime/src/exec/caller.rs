//! The caller's tensors, for a partition in a device's memory: uploaded before its steps, downloaded after them.
//!
//! They cross through pinned memory that is allocated once, so that a device copies from and to the same addresses in every run.

use super::memory::{Block, Memory};
use super::transfer::bytes_of;
use crate::driver::{Driver, Event, HostMemory, Queue};
use crate::error::Error;
use crate::program::{Loc, Program};
use crate::tensor::Tensor;
use std::ptr;
use std::sync::Arc;

/// The memory of a run's inputs and outputs, in the program's order.
pub(crate) enum Operands<'a> {
    /// Tensors, checked against the program.
    Tensors {
        inputs: &'a [Tensor],
        outputs: &'a mut [Tensor],
    },
    /// Addresses that the caller vouches for.
    Addresses {
        inputs: &'a [*const u8],
        outputs: &'a [*mut u8],
    },
}

impl Operands<'_> {
    /// Address of input `i`, which is only read: validated, and promised by the makers of kernels.
    pub(crate) fn input(&self, i: usize) -> *mut u8 {
        match self {
            Operands::Tensors { inputs, .. } => inputs[i].as_ptr().cast_mut(),
            Operands::Addresses { inputs, .. } => inputs[i].cast_mut(),
        }
    }

    /// Address of output `i`.
    pub(crate) fn output(&mut self, i: usize) -> *mut u8 {
        match self {
            Operands::Tensors { outputs, .. } => outputs[i].as_mut_ptr(),
            Operands::Addresses { outputs, .. } => outputs[i],
        }
    }
}

/// Copies on the device of those of the caller's tensors that a partition uses.
pub(crate) struct CallerTensors {
    driver: Arc<dyn Driver>,
    inputs: Vec<TensorCopy>,
    outputs: Vec<TensorCopy>,
}

struct TensorCopy {
    /// Index among the program's inputs or outputs.
    index: usize,
    on_host: *mut u8,
    pinned: Box<dyn HostMemory>,
    on_device: Block,
    copied: Arc<dyn Event>,
}

// SAFETY: the host pointers are set before a run and used during it, while the caller keeps the tensors alive.
unsafe impl Send for CallerTensors {}

impl CallerTensors {
    /// For partition `index` of a valid program, in the memory of a device.
    pub(crate) fn new(
        program: &Program,
        index: usize,
        driver: &Arc<dyn Driver>,
    ) -> Result<CallerTensors, Error> {
        let buffers = &program.partitions[index].buffers;
        let memory = Memory::Device(driver.clone());
        let copied = |wanted: &dyn Fn(Loc) -> Option<u32>| {
            let mut found: Vec<(usize, usize)> = buffers
                .iter()
                .filter_map(|b| Some((wanted(b.loc)? as usize, b.size_bytes())))
                .collect();
            found.sort_unstable();
            found.dedup();
            let copy = |(index, size_bytes)| {
                let (pinned, on_device) = (driver.pin(size_bytes)?, memory.allocate(size_bytes)?);
                Ok(TensorCopy {
                    index,
                    on_host: ptr::null_mut(),
                    pinned,
                    on_device,
                    copied: driver.event()?,
                })
            };
            found
                .into_iter()
                .map(copy)
                .collect::<Result<Vec<_>, Error>>()
        };
        let inputs = copied(&|loc| {
            if let Loc::Input(i) = loc {
                Some(i)
            } else {
                None
            }
        })?;
        let outputs = copied(&|loc| {
            if let Loc::Output(i) = loc {
                Some(i)
            } else {
                None
            }
        })?;
        Ok(CallerTensors {
            driver: driver.clone(),
            inputs,
            outputs,
        })
    }

    /// Index and device address of each input, then of each output.
    pub(crate) fn addresses(&self) -> [Vec<(usize, *mut u8)>; 2] {
        [&self.inputs, &self.outputs].map(|list| {
            list.iter()
                .map(|c| (c.index, c.on_device.as_ptr()))
                .collect()
        })
    }

    /// Takes the caller's tensors for the next run.
    pub(crate) fn bind(&mut self, operands: &mut Operands) {
        for c in &mut self.inputs {
            c.on_host = operands.input(c.index);
        }
        for c in &mut self.outputs {
            c.on_host = operands.output(c.index);
        }
    }

    /// Copies the inputs into pinned memory. The device has finished its last run.
    pub(crate) fn stage(&self) {
        for c in &self.inputs {
            // SAFETY: `bind` took the pointer from a tensor of the input's size (checked before a run), which the caller keeps alive; no copy
            // is under way.
            unsafe {
                ptr::copy_nonoverlapping(c.on_host, c.pinned.as_ptr(), c.pinned.size_bytes())
            };
        }
    }

    /// Enqueues the inputs' copies to the device; the queue that computes waits for them.
    pub(crate) fn upload(&self) -> Result<(), Error> {
        self.inputs.iter().try_for_each(|c| {
            // SAFETY: the pinned memory lives as long as this, which outlives its runs, and is only changed between them.
            unsafe {
                self.driver
                    .receive(&*c.pinned, c.on_device.as_ptr().addr() as u64, &*c.copied)?
            };
            self.driver.wait(Queue::Compute, &*c.copied)
        })
    }

    /// Asks for the outputs' copies into pinned memory.
    pub(crate) fn download(&self) -> Result<(), Error> {
        self.outputs.iter().try_for_each(|c| {
            // SAFETY: as in `upload`; it is looked at when the device has finished.
            unsafe {
                self.driver.send(
                    c.on_device.as_ptr().addr() as u64,
                    &*c.pinned,
                    &*c.copied,
                    None,
                )
            }
        })
    }

    /// Copies the outputs to the caller's tensors. The device has finished since [`CallerTensors::download`].
    pub(crate) fn unstage(&self) {
        for c in &self.outputs {
            // SAFETY: no copy is under way. The tensor has the output's size; each output belongs to one partition, so no one else writes it.
            unsafe {
                ptr::copy_nonoverlapping(
                    bytes_of(&*c.pinned).as_ptr(),
                    c.on_host,
                    c.pinned.size_bytes(),
                )
            };
        }
    }
}
