//! The caller's tensors, for a partition in a device's memory: uploaded before its steps, downloaded after them.

use super::memory::{Block, Memory};
use crate::error::Error;
use crate::program::{Loc, Program};
use crate::tensor::Tensor;
use std::ptr;

/// Copies on the device of those of the caller's tensors that a partition uses.
pub(crate) struct CallerTensors {
    memory: Memory,
    inputs: Vec<Copied>,
    outputs: Vec<Copied>,
}

struct Copied {
    /// Index among the program's inputs or outputs.
    index: usize,
    on_host: *mut u8,
    on_device: Block,
    size_bytes: usize,
}

// SAFETY: the host pointers are set before a run and used during it, while the caller keeps the tensors alive.
unsafe impl Send for CallerTensors {}

impl CallerTensors {
    /// For partition `index` of a valid program.
    pub(crate) fn new(program: &Program, index: usize, memory: &Memory) -> Result<CallerTensors, Error> {
        let buffers = &program.partitions[index].buffers;
        let copied = |wanted: &dyn Fn(Loc) -> Option<u32>| {
            let mut found: Vec<(usize, usize)> =
                buffers.iter().filter_map(|b| Some((wanted(b.loc)? as usize, b.size_bytes()))).collect();
            found.sort_unstable();
            found.dedup();
            let copy = |(index, size_bytes)| {
                Ok(Copied { index, on_host: ptr::null_mut(), on_device: memory.allocate(size_bytes)?, size_bytes })
            };
            found.into_iter().map(copy).collect::<Result<Vec<_>, Error>>()
        };
        let inputs = copied(&|loc| if let Loc::Input(i) = loc { Some(i) } else { None })?;
        let outputs = copied(&|loc| if let Loc::Output(i) = loc { Some(i) } else { None })?;
        Ok(CallerTensors { memory: memory.clone(), inputs, outputs })
    }

    /// Index and device address of each input, then of each output.
    pub(crate) fn addresses(&self) -> [Vec<(usize, *mut u8)>; 2] {
        [&self.inputs, &self.outputs].map(|list| list.iter().map(|c| (c.index, c.on_device.as_ptr())).collect())
    }

    /// Takes the caller's tensors for the next run.
    pub(crate) fn bind(&mut self, inputs: &[Tensor], outputs: &mut [Tensor]) {
        self.inputs.iter_mut().for_each(|c| c.on_host = inputs[c.index].as_ptr().cast_mut());
        self.outputs.iter_mut().for_each(|c| c.on_host = outputs[c.index].as_mut_ptr());
    }

    /// Copies the inputs to the device.
    pub(crate) fn upload(&self) -> Result<(), Error> {
        self.inputs.iter().try_for_each(|c| {
            // SAFETY: `bind` took the pointer from a tensor of the input's size (checked before a run), which the caller keeps alive; the
            // block has that size and no step uses it yet.
            unsafe { self.memory.write(c.on_device.as_ptr(), std::slice::from_raw_parts(c.on_host, c.size_bytes)) }
        })
    }

    /// Copies the outputs back.
    pub(crate) fn download(&self) -> Result<(), Error> {
        self.outputs.iter().try_for_each(|c| {
            // SAFETY: as in `upload`; each output belongs to one partition, so no one else writes the tensor.
            unsafe { self.memory.read(c.on_device.as_ptr(), std::slice::from_raw_parts_mut(c.on_host, c.size_bytes)) }
        })
    }
}
