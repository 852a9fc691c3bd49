//! Steps of a loop's body whose results stay as the first iteration wrote them.

use super::{BufferId, Kernel, Loc, Partition, Program, Step, StepId, StepKind};
use std::collections::BTreeSet;
use std::ops::Range;

/// The steps of a body, in order, which need to run in the first iteration alone: CPU kernels of constants
/// and of the last `n_args` inputs, the same in all iterations, where no other step writes any byte of their
/// results.
pub fn invariant_steps(body: &Program, n_args: usize) -> Vec<StepId> {
    let [partition] = &body.partitions[..] else {
        return Vec::new();
    };
    let first_arg = body.inputs.len().saturating_sub(n_args);
    let overwritten = overwritten(partition);
    let steps = (0..).map(StepId).zip(&partition.steps);
    let invariant = steps.filter(|(id, step)| {
        reads_the_same(partition, step, first_arg)
            && writes_to_arena(partition, step)
            && !overwritten.contains(id)
    });
    invariant.map(|(id, _)| id).collect()
}

/// True for a kernel whose operands are the same in all iterations.
fn reads_the_same(partition: &Partition, step: &Step, first_arg: usize) -> bool {
    let is_same = |id: &BufferId| match partition.buffers[id.0 as usize].loc {
        Loc::Constant(_) => true,
        Loc::Input(i) => i as usize >= first_arg,
        _ => false,
    };
    let StepKind::Kernel { kernel, .. } = &step.kind else {
        return false;
    };
    let is_of_cpu = matches!(partition.kernels[kernel.0 as usize], Kernel::Cpu(_));
    is_of_cpu && step.kind.accesses().0.iter().all(is_same)
}

fn writes_to_arena(partition: &Partition, step: &Step) -> bool {
    let written = step.kind.accesses().1;
    written
        .iter()
        .all(|id| arena_bytes(partition, id).is_some())
}

/// Bytes of a buffer in the arena; `None` for one elsewhere.
fn arena_bytes(partition: &Partition, id: &BufferId) -> Option<Range<usize>> {
    let buffer = &partition.buffers[id.0 as usize];
    match buffer.loc {
        Loc::Arena { offset_bytes } => {
            Some(offset_bytes..offset_bytes.saturating_add(buffer.size_bytes()))
        }
        _ => None,
    }
}

/// Steps with a byte in the arena that is written a second time, found in one sweep over the written bytes.
fn overwritten(partition: &Partition) -> BTreeSet<StepId> {
    let mut written: Vec<(usize, usize, StepId)> = Vec::new();
    for (id, step) in (0..).map(StepId).zip(&partition.steps) {
        let buffers = step.kind.accesses().1;
        let bytes = buffers.iter().filter_map(|b| arena_bytes(partition, b));
        let filled = bytes.filter(|bytes| !bytes.is_empty());
        written.extend(filled.map(|bytes| (bytes.start, bytes.end, id)));
    }
    written.sort_unstable();
    let mut found = BTreeSet::new();
    // The end of all bytes so far, and the step that writes up to it.
    let mut furthest: Option<(usize, StepId)> = None;
    for (start, end, id) in written {
        if let Some((_, other)) = furthest.filter(|&(to, _)| start < to) {
            found.extend([id, other]);
        }
        furthest = furthest.max(Some((end, id)));
    }
    found
}
