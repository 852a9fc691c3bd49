//! Steps of a loop's body whose results stay as the first iteration wrote them.

use super::hazards::overlap;
use super::{BufferId, Loc, Partition, Program, Step, StepId, StepKind};

/// The steps of a body, in order, which need to run in the first iteration alone: kernels of constants and of the last `n_args` inputs,
/// the same in all iterations, where no other step writes any byte of their results.
pub fn invariant_steps(body: &Program, n_args: usize) -> Vec<StepId> {
    let [partition] = &body.partitions[..] else {
        return Vec::new();
    };
    let first_arg = body.inputs.len().saturating_sub(n_args);
    let steps = partition.steps.iter().enumerate();
    let invariant = steps.filter(|(i, step)| {
        reads_the_same(partition, step, first_arg) && writes_alone(body, partition, *i)
    });
    invariant.map(|(i, _)| StepId(i as u32)).collect()
}

/// True for a kernel whose operands are the same in all iterations.
fn reads_the_same(partition: &Partition, step: &Step, first_arg: usize) -> bool {
    let is_same = |id: &BufferId| match partition.buffers[id.0 as usize].loc {
        Loc::Constant(_) => true,
        Loc::Input(i) => i as usize >= first_arg,
        _ => false,
    };
    matches!(step.kind, StepKind::Kernel { .. }) && step.kind.accesses().0.iter().all(is_same)
}

/// True for a step which writes to the arena only, and no byte of another step.
fn writes_alone(body: &Program, partition: &Partition, step: usize) -> bool {
    let buffer = |id: &BufferId| &partition.buffers[id.0 as usize];
    let own = partition.steps[step].kind.accesses().1;
    let mut others = partition.steps.iter().enumerate();
    own.iter()
        .all(|id| matches!(buffer(id).loc, Loc::Arena { .. }))
        && others.all(|(i, other)| {
            let written = other.kind.accesses().1;
            let is_apart = |id: &BufferId| {
                let mut own = own.iter();
                own.all(|mine| overlap(&body.variables, buffer(mine), buffer(id)).is_none())
            };
            i == step || written.iter().all(is_apart)
        })
}
