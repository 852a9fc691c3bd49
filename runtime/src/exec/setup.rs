//! From a program to the workers of its executor: rendezvous slots, staging, and memory.

use super::caller::CallerTensors;
use super::collective;
use super::emulate::Courier;
use super::frame::{Arena, Frame, Groups, Links};
use super::memory::Memory;
use super::rendezvous::{Receiver, Rendezvous, SlotSpec};
use super::step::Scratch;
use super::team::Leader;
use super::transfer::Staging;
use super::wait::Patience;
use super::wire::{Remote, RemoteEnd};
use super::worker::{ReplayMode, Schedule, Worker};
use super::{ExecOptions, shortage};
use crate::device::{DeviceKind, DeviceName};
use crate::error::{Error, ErrorKind};
use crate::program::{Key, Program, StepKind};
use crate::tensor::ALIGN_BYTES;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The use of a slot.
struct End {
    receiver: Receiver,
    /// The receiving partition, or the one with a tensor for another task.
    partition: usize,
    size_bytes: usize,
}

/// The transfers of a program, each with a rendezvous slot.
struct Keys {
    slots: BTreeMap<Key, usize>,
    /// By slot.
    ends: Vec<End>,
    outgoing: Vec<RemoteEnd>,
    /// With their slots.
    incoming: Vec<(RemoteEnd, usize)>,
}

fn number_keys(program: &Program) -> Keys {
    let mut keys = Keys {
        slots: BTreeMap::new(),
        ends: Vec::new(),
        outgoing: Vec::new(),
        incoming: Vec::new(),
    };
    for (worker, partition) in program.partitions.iter().enumerate() {
        for step in &partition.steps {
            let (key, buffer, is_received) = match &step.kind {
                StepKind::Recv { key, buffer } => (key, buffer, true),
                StepKind::Send { key, buffer } if program.is_remote(&key.destination) => {
                    (key, buffer, false)
                }
                _ => continue,
            };
            let size_bytes = partition.buffers[buffer.0 as usize].size_bytes();
            let slot = keys.ends.len();
            let end = RemoteEnd {
                key: key.clone(),
                size_bytes,
            };
            let receiver = match is_received {
                true => Receiver::Worker(worker),
                false => Receiver::Wire(keys.outgoing.len()),
            };
            match is_received {
                true if program.is_remote(&key.source) => keys.incoming.push((end, slot)),
                true => {}
                false => keys.outgoing.push(end),
            }
            keys.slots.insert(key.clone(), slot);
            keys.ends.push(End {
                receiver,
                partition: worker,
                size_bytes,
            });
        }
    }
    keys
}

/// Parts from which the workers of an executor are made.
pub(super) struct Setup<'a> {
    program: &'a Arc<Program>,
    options: &'a ExecOptions,
    patience: Patience,
    /// Memory of each partition.
    pub(super) memories: Vec<Memory>,
    slots: BTreeMap<Key, usize>,
    /// Memory at the end of the way of each slot's tensor.
    targets: Vec<Memory>,
    pub(super) rendezvous: Arc<Rendezvous>,
    pub(super) groups: Groups,
    /// True when devices may run their steps in program order.
    in_order: bool,
}

impl<'a> Setup<'a> {
    pub(super) fn new(
        program: &'a Arc<Program>,
        options: &'a ExecOptions,
        patience: Patience,
    ) -> Result<Setup<'a>, Error> {
        let Keys {
            slots,
            ends,
            outgoing,
            incoming,
        } = number_keys(program);
        let mut remote = Remote::new(options.wire.clone(), outgoing, incoming)?;
        remote.lends = !options.overlaps;
        let sizes: Vec<usize> = ends.iter().map(|end| end.size_bytes).collect();
        let courier = Courier::new(&slots, &sizes, &options.transport)?;
        let partitions = program.partitions.iter();
        let memories: Vec<Memory> = partitions.map(|p| memory_of(&p.device, options)).collect();
        let (specs, targets) = stage(program, &slots, &ends, &memories, courier.is_some())?;
        let rendezvous =
            Rendezvous::new(program.partitions.len(), specs, patience, courier, remote);
        Ok(Setup {
            program,
            options,
            patience,
            memories,
            slots,
            targets,
            rendezvous: Arc::new(rendezvous),
            groups: collective::groups(program, options)?,
            in_order: program.runs_in_order(),
        })
    }

    /// Of a worker, with the threads of its pool.
    fn leader(&self) -> Leader {
        Leader::new(self.patience).with_host(self.options.pool.core().host())
    }

    /// The worker of a partition. Errors of allocation name the need of the partition.
    pub(super) fn worker(&self, index: usize) -> Result<Worker, Error> {
        let explain = |e: Error| shortage::explain(e, self.program, index);
        let memory = &self.memories[index];
        let arena = match memory {
            Memory::Host => Arena::Leased,
            Memory::Device(_) => Arena::Own,
        };
        let links = Links {
            resources: &self.options.resources,
            slots: &self.slots,
            memory,
            rendezvous: &self.rendezvous,
            targets: &self.targets,
            groups: &self.groups,
        };
        let mut frame = Frame::new(self.program, index, &links, arena).map_err(explain)?;
        let caller = memory
            .driver()
            .map(|driver| CallerTensors::new(self.program, index, driver))
            .transpose()
            .map_err(explain)?;
        caller.iter().for_each(|c| frame.use_copies(c.addresses()));
        let workspace_bytes = self.program.memory_use()[index]
            .1
            .workspace_bytes_per_thread;
        let partition = &self.program.partitions[index];
        Ok(Worker {
            device: partition.device.clone(),
            index,
            leader: self.leader(),
            scratch: Scratch::new(
                self.options.pool.n_threads(),
                workspace_bytes,
                frame.max_args(),
            ),
            arena_bytes: match arena {
                Arena::Leased => partition.arena_bytes.next_multiple_of(ALIGN_BYTES),
                Arena::Own => 0,
            },
            block: None,
            is_parallel: frame.is_parallel(),
            caller,
            schedule: Schedule::new(partition),
            replays: ReplayMode::by_turn(&frame, self.in_order, self.options.step_by_step),
            frame,
        })
    }
}

/// Allocates the staging of each crossing tensor, and tells the memory at the end of its way. Emulated links join memories of the host.
fn stage(
    program: &Program,
    slots: &BTreeMap<Key, usize>,
    ends: &[End],
    memories: &[Memory],
    is_emulated: bool,
) -> Result<(Vec<SlotSpec>, Vec<Memory>), Error> {
    let mut sources = vec![Memory::Host; ends.len()];
    for (partition, memory) in program
        .partitions
        .iter()
        .zip(memories)
        .filter(|_| !is_emulated)
    {
        let sent = slots
            .iter()
            .filter(|(key, _)| key.source == partition.device);
        sent.for_each(|(_, &slot)| sources[slot] = memory.clone());
    }
    let targets: Vec<Memory> = ends
        .iter()
        .map(|end| match end.receiver {
            Receiver::Worker(worker) => memories[worker].clone(),
            Receiver::Wire(_) => Memory::Host,
        })
        .collect();
    let spec = |(slot, end): (usize, &End)| {
        let target = if is_emulated {
            &Memory::Host
        } else {
            &targets[slot]
        };
        let staging = Staging::new(end.size_bytes, &sources[slot], target);
        Ok(SlotSpec {
            receiver: end.receiver,
            staging: staging.map_err(|e| shortage::explain(e, program, end.partition))?,
        })
    };
    let specs = ends
        .iter()
        .enumerate()
        .map(spec)
        .collect::<Result<_, Error>>()?;
    Ok((specs, targets))
}

/// The memory of a device, after [`check_devices`].
fn memory_of(device: &DeviceName, options: &ExecOptions) -> Memory {
    options
        .drivers
        .get(device)
        .map_or(Memory::Host, |driver| Memory::Device(driver.clone()))
}

pub(super) fn check_devices(
    program: &Program,
    threads: usize,
    n_lanes: usize,
    options: &ExecOptions,
) -> Result<(), Error> {
    for (partition, (device, memory)) in program.partitions.iter().zip(program.memory_use()) {
        let is_here = device.is_local()
            && (device.kind == DeviceKind::Cpu) != options.drivers.contains_key(&device);
        if !is_here {
            let message =
                format!("{device} cannot run programs here; place the model on other devices");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        // Constants of the host are the program's, and variables the session's; a device has those of each lane.
        let shared = match device.kind.has_own_memory() {
            true => 0,
            false => memory.constant_bytes.saturating_add(memory.variable_bytes),
        };
        let own = memory.total_bytes(threads).saturating_sub(shared);
        let need = own.saturating_mul(n_lanes).saturating_add(shared);
        if let Some(limit) = partition.memory_limit.filter(|&limit| need > limit) {
            let runs = if n_lanes > 1 {
                format!(" for {n_lanes} runs in flight")
            } else {
                String::new()
            };
            let message = format!("{device} needs {need} bytes{runs}, its limit is {limit} bytes");
            return Err(shortage::describe(&message, program, partition));
        }
    }
    Ok(())
}
