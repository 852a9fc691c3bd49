//! Memory figures of a program, for reports and limits.

use super::{Kernel, Loc, Partition, Program, StepKind, VariableSpec};
use crate::device::DeviceName;
use crate::gpu::GpuParam;
use crate::tensor::ALIGN_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Bytes that one device needs to run its partition, apart from the caller's inputs and outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// The partition's arena and those of its sub-programs.
    pub arena_bytes: usize,
    /// Variables that are used where they are: their values, and the new ones that are not written over the old ones. A device with
    /// memory of its own has room for both, even if only one is used.
    pub variable_bytes: usize,
    /// Constants, sub-programs' included; one that is shared counts once.
    pub constant_bytes: usize,
    /// Staging of the tensors it receives, and on the host of those that it sends to devices with memory of their own, second copies of values
    /// carried by loops, and for a device with memory of its own copies of the caller's inputs and outputs, and status words of its launches.
    pub transfer_bytes: usize,
    /// Kernel workspace of one thread.
    pub workspace_bytes_per_thread: usize,
}

impl MemoryUse {
    /// Sum, for a team of `threads`.
    pub fn total_bytes(&self, threads: usize) -> usize {
        let workspace = self.workspace_bytes_per_thread.saturating_mul(threads);
        let parts = [
            self.arena_bytes,
            self.variable_bytes,
            self.constant_bytes,
            self.transfer_bytes,
        ];
        parts.iter().fold(workspace, |a, &b| a.saturating_add(b))
    }
}

impl Program {
    /// Memory use of each device, in partition order.
    pub fn memory_use(&self) -> Vec<(DeviceName, MemoryUse)> {
        self.partitions
            .iter()
            .map(|p| (p.device.clone(), p.memory_use(&self.variables)))
            .collect()
    }
}

impl Partition {
    /// Bytes of the variables that are used where they are.
    fn variable_bytes(&self, variables: &[VariableSpec]) -> usize {
        let is_in_place = |i: u32| variables.get(i as usize).is_some_and(|v| v.in_place);
        let own = self.buffers.iter().filter(|b| match b.loc {
            Loc::Variable(_) => true,
            Loc::Assigned(i) => !is_in_place(i),
            _ => false,
        });
        let mut by_place: BTreeMap<Loc, usize> = own.map(|b| (b.loc, b.size_bytes())).collect();
        if self.device.kind.has_own_memory() {
            by_place
                .values_mut()
                .for_each(|bytes| *bytes = (*bytes).max(1));
            for (loc, bytes) in by_place.clone() {
                if let Loc::Assigned(i) = loc {
                    by_place.entry(Loc::Variable(i)).or_insert(bytes);
                }
            }
        }
        by_place
            .values()
            .fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    /// Memory use of this partition's device, for the program's variables.
    pub fn memory_use(&self, variables: &[VariableSpec]) -> MemoryUse {
        let mut total = MemoryUse {
            variable_bytes: self.variable_bytes(variables),
            ..MemoryUse::default()
        };
        add(self, &mut total, &mut BTreeSet::new());
        if self.device.kind.has_own_memory() {
            let locations: BTreeMap<Loc, usize> = self
                .buffers
                .iter()
                .map(|b| (b.loc, b.size_bytes()))
                .collect();
            let of_caller = locations
                .iter()
                .filter(|(loc, _)| matches!(loc, Loc::Input(_) | Loc::Output(_)));
            total.transfer_bytes = of_caller.fold(total.transfer_bytes, |sum, (_, size)| {
                sum.saturating_add((*size).max(1))
            });
        }
        total
    }

    /// Size of a buffer rounded up to the alignment, 0 for an id out of range.
    pub(crate) fn padded_bytes(&self, id: super::BufferId) -> usize {
        let bytes = self
            .buffers
            .get(id.0 as usize)
            .map_or(0, |b| b.size_bytes());
        bytes
            .checked_next_multiple_of(ALIGN_BYTES)
            .unwrap_or(usize::MAX)
    }
}

impl StepKind {
    /// The sub-programs that the step runs.
    pub fn sub_programs(&self) -> Vec<&Arc<Program>> {
        match self {
            StepKind::If(i) => vec![&i.then_branch, &i.else_branch],
            StepKind::Loop(l) => vec![&l.body],
            _ => Vec::new(),
        }
    }
}

/// A word that says how a launch ended, and one to set it back.
const STATUS_BYTES: usize = 2 * size_of::<u32>();

/// Iteration number and conditions of a loop.
pub(crate) const LOOP_BYTES: usize = 3 * ALIGN_BYTES;

fn status_bytes(kernel: &Kernel) -> usize {
    match kernel {
        Kernel::Gpu(k) if k.params.contains(&GpuParam::Status) => STATUS_BYTES,
        _ => 0,
    }
}

fn add(p: &Partition, total: &mut MemoryUse, seen: &mut BTreeSet<usize>) {
    // A device with memory of its own has a copy of every constant for each use of a sub-program, and no place is empty there.
    let is_apart = p.device.kind.has_own_memory();
    let least = usize::from(is_apart);
    total.arena_bytes = total.arena_bytes.saturating_add(p.arena_bytes.max(least));
    for c in &p.constants {
        if is_apart || seen.insert(c.as_ptr() as usize) {
            total.constant_bytes += c.size_bytes().max(least);
        }
    }
    for k in &p.kernels {
        total.workspace_bytes_per_thread = total
            .workspace_bytes_per_thread
            .max(k.workspace_bytes_per_thread());
    }
    for step in &p.steps {
        let staged = match &step.kind {
            // Between the host and a device with memory of its own a tensor is on its way in the host's.
            StepKind::Recv { key, buffer } if !is_apart || key.source.kind.has_own_memory() => {
                p.padded_bytes(*buffer)
            }
            StepKind::Send { key, buffer }
                if !is_apart && key.destination.kind.has_own_memory() =>
            {
                p.padded_bytes(*buffer)
            }
            StepKind::Kernel { kernel, .. } => {
                p.kernels.get(kernel.0 as usize).map_or(0, status_bytes)
            }
            StepKind::Loop(l) => {
                let cells = if is_apart { LOOP_BYTES } else { 0 };
                let spare = |sum: usize, c: &super::Carried| {
                    sum.saturating_add(p.padded_bytes(c.result).max(least))
                };
                l.carried.iter().fold(cells, spare)
            }
            _ => 0,
        };
        total.transfer_bytes = total.transfer_bytes.saturating_add(staged);
        for sub in step.kind.sub_programs() {
            sub.partitions.iter().for_each(|p| add(p, total, seen));
        }
    }
}
