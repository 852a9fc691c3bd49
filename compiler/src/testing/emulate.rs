//! Runs placed problems on emulated devices, so that measured times can be compared with simulated
//! ones: the executor and its rendezvous are the real ones, a kernel waits for the duration of its
//! task, and a tensor crosses a link at the rate of the problem.
//!
//! All tensors are kept for the whole run; other memory of tasks (resident bytes, constants, scratch)
//! is not allocated.

use crate::cost::{Bytes, Nanos};
use crate::error::{Error, Result};
use crate::{DType, DeviceName};
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::exec::emulate::{LinkRate, Transport, wait_kernel};
use gristmill_runtime::exec::{ExecOptions, Executor, Pool};
use gristmill_runtime::program::{
    Buffer, BufferId, KernelId, Key, Loc, Partition, Program, Step, StepId, StepKind,
};
use gristmill_runtime::tensor::ALIGN_BYTES;
use gristmill_solver::{Payload, Problem, Timeline, Transfer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A placed problem, ready to run.
pub struct Emulator {
    executor: Executor,
    /// Device of each task.
    device: Vec<u32>,
    /// Partition and step of each task.
    kernels: Vec<(usize, usize)>,
    /// Tensor, source and destination of each key.
    transfers: BTreeMap<Key, (u32, u32, u32)>,
}

impl Emulator {
    /// The tasks on the devices of `timeline`. Each device has its tasks in the order of their starts, each `send` right after its task in the
    /// order of the transfers, each `recv` right before the first task that waits for it, as [`crate::partition`] has them.
    ///
    /// Errors with `InvalidInput` when a tensor that crosses has a host copy time instead of a size, and with `Internal` when the timeline is not one
    /// of the problem.
    pub fn new(p: &Problem, timeline: &Timeline) -> Result<Emulator> {
        let mut builder = Builder::new(p, timeline)?;
        let mut order: Vec<u32> = p.order.clone();
        // Stable: tasks of no length stay in topological order.
        order.sort_by_key(|&t| timeline.start[t as usize]);
        order
            .into_iter()
            .try_for_each(|t| builder.add_task(t as usize))?;
        let Builder {
            parts,
            kernels,
            transfers,
            links,
            ..
        } = builder;
        let partitions: Vec<Partition> = parts.into_values().map(|part| part.partition).collect();
        let options = ExecOptions {
            pool: Arc::new(Pool::new(partitions.len())),
            transport: Transport::Emulated(links),
            ..ExecOptions::default()
        };
        let (inputs, outputs, variables) = (Vec::new(), Vec::new(), Vec::new());
        let program = Program {
            name: "emulated".into(),
            inputs,
            outputs,
            variables,
            partitions,
        };
        let executor = Executor::new(Arc::new(program), &options)?;
        executor.start_profile()?;
        Ok(Emulator {
            executor,
            device: timeline.device.clone(),
            kernels,
            transfers,
        })
    }

    /// The program that is run.
    pub fn program(&self) -> &Program {
        self.executor.program()
    }

    /// Runs once. Times are measured from the call; the makespan is its whole length, the start and end of the run included.
    pub fn run(&self) -> Result<Timeline> {
        let begin = Instant::now();
        self.executor.run(&[])?;
        let end = Instant::now();
        let since = |at: Instant| Nanos(at.saturating_duration_since(begin).as_nanos() as u64);
        let spans = self.executor.step_spans();
        let span = |&(partition, step): &(usize, usize)| spans[partition][step];
        let transfer = |crossing: gristmill_runtime::exec::emulate::Crossing| {
            let (tensor, from, to) = self.transfers[&crossing.key];
            Transfer {
                tensor,
                from,
                to,
                start: since(crossing.start),
                end: since(crossing.end),
            }
        };
        let mut transfers: Vec<Transfer> = self
            .executor
            .crossings()
            .into_iter()
            .map(transfer)
            .collect();
        transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
        Ok(Timeline {
            device: self.device.clone(),
            start: self.kernels.iter().map(|k| since(span(k).0)).collect(),
            end: self.kernels.iter().map(|k| since(span(k).1)).collect(),
            transfers,
            makespan: since(end),
        })
    }
}

/// A partition under construction.
struct PartitionBuilder {
    partition: Partition,
    /// Where each tensor is, and the step that puts it there.
    tensors: BTreeMap<u32, (BufferId, StepId)>,
}

struct Builder<'p> {
    p: &'p Problem,
    timeline: &'p Timeline,
    /// By device.
    parts: BTreeMap<u32, PartitionBuilder>,
    /// Where each tensor goes, in the order of the transfers.
    sent: Vec<Vec<&'p Transfer>>,
    kernels: Vec<(usize, usize)>,
    transfers: BTreeMap<Key, (u32, u32, u32)>,
    links: BTreeMap<(DeviceName, DeviceName), LinkRate>,
}

fn name(device: u32) -> DeviceName {
    DeviceName::local(DeviceKind::Cpu, device)
}

impl<'p> Builder<'p> {
    fn new(p: &'p Problem, timeline: &'p Timeline) -> Result<Builder<'p>> {
        if timeline.device.len() != p.n_tasks() || timeline.start.len() != p.n_tasks() {
            return Err(Error::internal(format!(
                "a timeline of {} tasks, expected {}",
                timeline.start.len(),
                p.n_tasks()
            )));
        }
        let part = |&number: &u32| {
            let (buffers, constants, steps, kernels) =
                (Vec::new(), Vec::new(), Vec::new(), vec![wait_kernel()]);
            let (device, arena_bytes, gpu_code, memory_limit) = (name(number), 0, Vec::new(), None);
            let partition = Partition {
                device,
                arena_bytes,
                buffers,
                constants,
                kernels,
                gpu_code,
                steps,
                memory_limit,
            };
            (
                number,
                PartitionBuilder {
                    partition,
                    tensors: BTreeMap::new(),
                },
            )
        };
        let mut sent = vec![Vec::new(); p.n_tasks()];
        timeline
            .transfers
            .iter()
            .for_each(|t| sent[p.tensors[t.tensor as usize].producer as usize].push(t));
        Ok(Builder {
            p,
            timeline,
            parts: timeline.device.iter().map(part).collect(),
            sent,
            kernels: vec![(0, 0); p.n_tasks()],
            transfers: BTreeMap::new(),
            links: BTreeMap::new(),
        })
    }

    fn add_task(&mut self, task: usize) -> Result<()> {
        let p = self.p;
        let d = self.timeline.device[task];
        for &x in p.inputs.row(task) {
            self.receive(x, d);
        }
        let partition_idx = self.parts.range(..d).count();
        let part = self
            .parts
            .get_mut(&d)
            .expect("every device in use has a part");
        let mut args: Vec<BufferId> = p
            .inputs
            .row(task)
            .iter()
            .map(|x| part.tensors[x].0)
            .collect();
        let deps = p
            .inputs
            .row(task)
            .iter()
            .map(|x| part.tensors[x].1)
            .collect();
        let step = StepId(part.partition.steps.len() as u32);
        for &x in p.outputs.row(task) {
            let buffer = part.add_buffer(x, p.tensors[x as usize].bytes());
            part.tensors.insert(x, (buffer, step));
            args.push(buffer);
        }
        let n_outputs = p.outputs.row(task).len() as u32;
        let items = p.cost(task, d as usize).0;
        let kind = StepKind::Kernel {
            kernel: KernelId(0),
            args,
            n_outputs,
            items,
            grain: 0,
        };
        part.partition.steps.push(Step {
            kind,
            origin: format!("task {task}"),
            deps,
        });
        self.kernels[task] = (partition_idx, step.0 as usize);
        let sent = std::mem::take(&mut self.sent[task]);
        sent.into_iter()
            .try_for_each(|transfer| self.send(transfer))
    }

    /// Makes sure that a tensor is on a device.
    fn receive(&mut self, x: u32, d: u32) {
        let part = self
            .parts
            .get_mut(&d)
            .expect("every device in use has a part");
        if part.tensors.contains_key(&x) {
            return;
        }
        let tensor = &self.p.tensors[x as usize];
        let buffer = part.add_buffer(x, tensor.bytes());
        let kind = StepKind::Recv {
            key: key(x, self.timeline.device[tensor.producer as usize], d),
            buffer,
        };
        part.tensors
            .insert(x, (buffer, StepId(part.partition.steps.len() as u32)));
        part.partition.steps.push(Step {
            kind,
            origin: format!("task {}", tensor.producer),
            deps: Vec::new(),
        });
    }

    fn send(&mut self, transfer: &Transfer) -> Result<()> {
        let Transfer {
            tensor: x,
            from,
            to,
            ..
        } = *transfer;
        let tensor = &self.p.tensors[x as usize];
        if let Payload::HostCopy(_) = tensor.payload {
            let message = format!(
                "tensor {x} crosses with a host copy time; an emulated link needs its size in bytes"
            );
            return Err(Error::invalid(message));
        }
        let found = self
            .parts
            .get_mut(&from)
            .and_then(|part| part.tensors.get(&x).copied().map(|at| (part, at)));
        let (part, (buffer, made)) = found.ok_or_else(|| {
            Error::internal(format!(
                "tensor {x} is not made on device {from}, which sends it"
            ))
        })?;
        let link = self.p.links.get(from as usize, to as usize);
        let rate = LinkRate {
            latency_ns: link.latency.0,
            bytes_per_second: link.bytes_per_second.max(1),
        };
        self.links.insert((name(from), name(to)), rate);
        self.transfers.insert(key(x, from, to), (x, from, to));
        let kind = StepKind::Send {
            key: key(x, from, to),
            buffer,
        };
        part.partition.steps.push(Step {
            kind,
            origin: format!("task {}", tensor.producer),
            deps: vec![made],
        });
        Ok(())
    }
}

impl PartitionBuilder {
    fn add_buffer(&mut self, x: u32, size: Bytes) -> BufferId {
        let id = BufferId(self.partition.buffers.len() as u32);
        let (loc, shape) = (
            Loc::Arena {
                offset_bytes: self.partition.arena_bytes,
            },
            vec![size.0 as usize],
        );
        self.partition.buffers.push(Buffer {
            name: format!("v{x}"),
            dtype: DType::U8,
            shape,
            loc,
        });
        // A sum that does not fit is found by the validation of the program.
        let padded = (size.0 as usize)
            .checked_next_multiple_of(ALIGN_BYTES)
            .unwrap_or(usize::MAX);
        self.partition.arena_bytes = self.partition.arena_bytes.saturating_add(padded);
        id
    }
}

fn key(tensor: u32, from: u32, to: u32) -> Key {
    Key {
        source: name(from),
        destination: name(to),
        tensor: format!("v{tensor}"),
    }
}
