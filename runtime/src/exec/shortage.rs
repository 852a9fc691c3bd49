//! Message for a device whose memory does not suffice: the need, the largest tensors, and possible remedies.

use crate::error::{Error, ErrorKind};
use crate::program::{BufferId, Loc, Partition, Program, StepKind};
use std::collections::BTreeMap;

/// Number of tensors that are named.
const NAMED: usize = 4;

/// An error of allocation for partition `index`, with that partition's need. Other errors stay as they are.
pub(crate) fn explain(error: Error, program: &Program, index: usize) -> Error {
    match error.kind() {
        ErrorKind::OutOfMemory => {
            let partition = &program.partitions[index];
            describe(
                &format!("on {}: {error}", partition.device),
                program,
                partition,
            )
        }
        _ => error,
    }
}

/// The error `message` with the plan's peak and the largest tensors.
pub(crate) fn describe(message: &str, program: &Program, partition: &Partition) -> Error {
    let need = partition.memory_use(&program.variables);
    let peak = format!(
        "the plan's peak is {} bytes: {} of constants, {} of intermediate results, {} of tensors that come and go",
        need.total_bytes(1),
        need.constant_bytes,
        need.arena_bytes,
        need.transfer_bytes
    );
    let largest = largest(program, partition).join(", ");
    let help = "a smaller batch, more with --mem, or more devices may help";
    let message = match largest.is_empty() {
        true => format!("{message}; {peak}; {help}"),
        false => format!("{message}; {peak}; largest are {largest}; {help}"),
    };
    Error::new(ErrorKind::OutOfMemory, message)
}

/// The largest tensors, one for each place in memory, by their names in the user's model.
fn largest(program: &Program, partition: &Partition) -> Vec<String> {
    let mut of_place: BTreeMap<Loc, usize> = BTreeMap::new();
    for (i, buffer) in partition.buffers.iter().enumerate() {
        let entry = of_place.entry(buffer.loc).or_insert(i);
        if partition.buffers[*entry].size_bytes() < buffer.size_bytes() {
            *entry = i;
        }
    }
    let mut found: Vec<usize> = of_place.into_values().collect();
    found.sort_by_key(|&i| (std::cmp::Reverse(partition.buffers[i].size_bytes()), i));
    found.truncate(NAMED);
    found
        .into_iter()
        .map(|i| label(program, partition, i))
        .collect()
}

/// `f32[64, 1000] of "/fc/MatMul" (256000 bytes)`.
fn label(program: &Program, partition: &Partition, index: usize) -> String {
    let buffer = &partition.buffers[index];
    let interface = |list: &[crate::program::IoSpec], i: u32| {
        list.get(i as usize).map(|spec| spec.name.clone())
    };
    let id = BufferId(index as u32);
    let name = match buffer.loc {
        Loc::Input(i) => interface(&program.inputs, i).map(|name| format!("input {name:?}")),
        Loc::Output(i) => interface(&program.outputs, i).map(|name| format!("output {name:?}")),
        Loc::Arena { .. } => user(partition, id, true).map(|node| format!("result of {node:?}")),
        Loc::Variable(i) | Loc::Assigned(i) => {
            let variable = program.variables.get(i as usize);
            variable.map(|v| format!("variable {:?}", v.name))
        }
        Loc::Constant(_) => user(partition, id, false).map(|node| format!("weights of {node:?}")),
    };
    let name = name.unwrap_or_else(|| buffer.name.clone());
    format!(
        "{}{:?} {name} ({} bytes)",
        buffer.dtype,
        buffer.shape,
        buffer.size_bytes()
    )
}

/// Path of the first node whose step writes a buffer, or reads it.
fn user(partition: &Partition, id: BufferId, writes: bool) -> Option<&str> {
    let uses = |kind: &StepKind| match kind {
        StepKind::Kernel {
            args, n_outputs, ..
        } => {
            let n_inputs = args.len().saturating_sub(*n_outputs as usize);
            if writes {
                args[n_inputs..].contains(&id)
            } else {
                args.contains(&id)
            }
        }
        StepKind::Recv { buffer, .. } => writes && *buffer == id,
        StepKind::AllReduce(s) => id == if writes { s.dst } else { s.src },
        StepKind::Copy { src, dst } => {
            if writes {
                *dst == id
            } else {
                *src == id
            }
        }
        _ => false,
    };
    partition
        .steps
        .iter()
        .find(|step| uses(&step.kind))
        .map(|step| step.origin.as_str())
}
