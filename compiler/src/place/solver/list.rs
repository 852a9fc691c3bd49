//! A schedule that grows task by task, as list scheduling makes it: what each device and link does so far, and when a task could run where.

use super::gaps::Gaps;
use super::problem::Problem;
use super::timeline::{Timeline, Transfer};
use crate::cost::{Bytes, Nanos};

const NOWHERE: u32 = u32::MAX;

/// Whether a task may start in a gap before what is already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insertion {
    /// The earliest gap that holds it, on devices and on links.
    Gaps,
    /// After all that is there.
    Append,
}

/// When a task would run on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// When all its operands are there.
    pub ready: Nanos,
    /// Its start.
    pub start: Nanos,
    /// Its end.
    pub end: Nanos,
}

/// A partial schedule. Tasks are committed after all they wait for.
#[derive(Clone, Debug)]
pub struct List<'p> {
    p: &'p Problem,
    insertion: Insertion,
    device: Vec<u32>,
    start: Vec<Nanos>,
    end: Vec<Nanos>,
    devices: Vec<Gaps>,
    links: Vec<Gaps>,
    transfers: Vec<Transfer>,
    /// Transfers of a tensor, as a chain: the last one, and before each the one before it.
    last_transfer: Vec<u32>,
    before: Vec<u32>,
    group_device: Vec<u32>,
    memory: Memory,
}

/// What devices hold, as list scheduling can know it: constants and resident bytes for good, results until all their consumers have run.
#[derive(Clone, Debug)]
struct Memory {
    limited: bool,
    held: Vec<u128>,
    /// Consumers of a tensor that have not run.
    waiting: Vec<u32>,
    /// Constants that a device holds, by constant: devices.
    constants: Vec<Vec<u32>>,
}

impl<'p> List<'p> {
    /// Nothing is scheduled.
    pub fn new(p: &'p Problem, insertion: Insertion) -> List<'p> {
        let n = p.n_devices();
        let shortest = (0..p.n_tasks()).map(|t| p.least_cost(t)).filter(|c| *c > Nanos::ZERO).min();
        let limited = p.devices.iter().any(|d| d.memory.is_some());
        List {
            p,
            insertion,
            device: vec![NOWHERE; p.n_tasks()],
            start: vec![Nanos::ZERO; p.n_tasks()],
            end: vec![Nanos::ZERO; p.n_tasks()],
            devices: vec![Gaps::new(shortest.unwrap_or(Nanos(1))); n],
            links: vec![Gaps::new(Nanos(1)); n * n],
            transfers: Vec::new(),
            last_transfer: vec![NOWHERE; p.tensors.len()],
            before: Vec::new(),
            group_device: vec![NOWHERE; p.n_groups()],
            memory: Memory {
                limited,
                held: vec![0; n],
                waiting: (0..p.tensors.len()).map(|x| p.consumers.row(x).len() as u32).collect(),
                constants: vec![Vec::new(); p.constants.len()],
            },
        }
    }

    /// Devices that are open to a task: that of its group if one of the group is scheduled, else all feasible ones.
    pub fn open(&self, task: usize) -> impl Iterator<Item = usize> + '_ {
        let fixed = self.group_device[self.p.group_of[task] as usize];
        self.p.feasible(task).filter(move |&d| fixed == NOWHERE || d == fixed as usize)
    }

    /// End of a scheduled task.
    pub fn end(&self, task: usize) -> Nanos {
        self.end[task]
    }

    /// Device of a scheduled task.
    pub fn device(&self, task: usize) -> Option<usize> {
        Some(self.device[task] as usize).filter(|_| self.device[task] != NOWHERE)
    }

    /// When `task` would run on `device`. Transfers that it would need are planned, not made.
    pub fn slot(&self, task: usize, device: usize) -> Slot {
        let mut ready = Nanos::ZERO;
        self.arrivals(task, device, |_, arrival, _| ready = ready.max(arrival));
        self.slot_at(task, device, ready)
    }

    fn slot_at(&self, task: usize, device: usize, ready: Nanos) -> Slot {
        let cost = self.p.cost(task, device);
        let start = match self.insertion {
            Insertion::Gaps => self.devices[device].earliest(ready, cost),
            Insertion::Append => self.devices[device].last().max(ready),
        };
        Slot { ready, start, end: start + cost }
    }

    /// Calls `f(tensor, arrival, start of a new transfer)` for each operand.
    fn arrivals(&self, task: usize, device: usize, mut f: impl FnMut(u32, Nanos, Option<Nanos>)) {
        // Of several new transfers over one link each comes after the one before it.
        let mut taken: [(u32, Nanos); 8] = [(NOWHERE, Nanos::ZERO); 8];
        let mut n_taken = 0;
        for &x in self.p.inputs.row(task) {
            let producer = self.p.tensors[x as usize].producer as usize;
            let (source, made) = (self.device[producer] as usize, self.end[producer]);
            if source == device {
                f(x, made, None);
                continue;
            }
            if let Some(there) = self.arrival(x, device) {
                f(x, there, None);
                continue;
            }
            let length = self.p.transfer(x as usize, source, device);
            let before = taken[..n_taken].iter().position(|t| t.0 == source as u32);
            let from = before.map_or(made, |i| made.max(taken[i].1));
            let link = &self.links[source * self.p.n_devices() + device];
            let start = match self.insertion {
                Insertion::Gaps => link.earliest(from, length),
                Insertion::Append => link.last().max(from),
            };
            match before {
                Some(i) => taken[i].1 = start + length,
                None if n_taken < taken.len() => {
                    taken[n_taken] = (source as u32, start + length);
                    n_taken += 1;
                }
                None => {}
            }
            f(x, start + length, Some(start));
        }
    }

    fn arrival(&self, x: u32, device: usize) -> Option<Nanos> {
        let mut i = self.last_transfer[x as usize];
        while i != NOWHERE {
            let t = &self.transfers[i as usize];
            if t.to as usize == device {
                return Some(t.end);
            }
            i = self.before[i as usize];
        }
        None
    }

    /// Runs `task` on `device`, with the transfers that it needs.
    pub fn commit(&mut self, task: usize, device: usize) -> Slot {
        let mut ready = Nanos::ZERO;
        for i in 0..self.p.inputs.row(task).len() {
            ready = ready.max(self.bring(self.p.inputs.row(task)[i], device));
        }
        let slot = self.slot_at(task, device, ready);
        self.devices[device].take(slot.start, self.p.cost(task, device));
        (self.device[task], self.start[task], self.end[task]) = (device as u32, slot.start, slot.end);
        if self.memory.limited {
            self.hold(task, device);
        }
        self.group_device[self.p.group_of[task] as usize] = device as u32;
        slot
    }

    /// When a tensor is on a device, sent there if need be.
    fn bring(&mut self, x: u32, device: usize) -> Nanos {
        let producer = self.p.tensors[x as usize].producer as usize;
        let (source, made) = (self.device[producer] as usize, self.end[producer]);
        if source == device {
            return made;
        }
        if let Some(there) = self.arrival(x, device) {
            return there;
        }
        let length = self.p.transfer(x as usize, source, device);
        let link = &mut self.links[source * self.p.n_devices() + device];
        let start = match self.insertion {
            Insertion::Gaps => link.earliest(made, length),
            Insertion::Append => link.last().max(made),
        };
        link.take(start, length);
        let transfer = Transfer { tensor: x, from: source as u32, to: device as u32, start, end: start + length };
        self.before.push(self.last_transfer[x as usize]);
        self.last_transfer[x as usize] = self.transfers.len() as u32;
        self.transfers.push(transfer);
        if self.memory.limited {
            self.memory.held[device] += u128::from(self.p.tensors[x as usize].bytes().0);
        }
        start + length
    }

    fn hold(&mut self, task: usize, device: usize) {
        let p = self.p;
        self.memory.held[device] += self.lasting_bytes(task, device);
        for &c in p.constants_of.row(task) {
            if !self.memory.constants[c as usize].contains(&(device as u32)) {
                self.memory.constants[c as usize].push(device as u32);
            }
        }
        for &x in p.outputs.row(task) {
            if self.memory.waiting[x as usize] > 0 {
                self.memory.held[device] += u128::from(p.tensors[x as usize].bytes().0);
            }
        }
        for &x in p.inputs.row(task) {
            let tensor = &p.tensors[x as usize];
            self.memory.waiting[x as usize] -= 1;
            let all = self.memory.waiting[x as usize] == 0;
            let local = |c: &&u32| self.device[**c as usize] == device as u32 && **c as usize != task;
            let last_here = !p.consumers.row(x as usize).iter().any(|c| self.device[*c as usize] == NOWHERE);
            let source = self.device[tensor.producer as usize] as usize;
            if all && last_here {
                // Every copy goes with the last consumer.
                let bytes = u128::from(tensor.bytes().0);
                self.memory.held[source] = self.memory.held[source].saturating_sub(bytes);
                let mut i = self.last_transfer[x as usize];
                while i != NOWHERE {
                    let to = self.transfers[i as usize].to as usize;
                    self.memory.held[to] = self.memory.held[to].saturating_sub(bytes);
                    i = self.before[i as usize];
                }
            }
            let _ = local;
        }
    }

    /// Bytes that a device would hold for good when `task` came to it: with the first task of a group all of the group's.
    fn lasting_bytes(&self, task: usize, device: usize) -> u128 {
        let p = self.p;
        let group = p.group_of[task] as usize;
        let own: &[u32] = if self.group_device[group] == NOWHERE { p.members.row(group) } else { &[] };
        let resident: u128 = own.iter().map(|&t| u128::from(p.resident[t as usize].0)).sum();
        let missing =
            p.constants_of.row(task).iter().filter(|&&c| !self.memory.constants[c as usize].contains(&(device as u32)));
        resident + missing.map(|&c| u128::from(p.constants[c as usize].0)).sum::<u128>()
    }

    /// Bytes by which a device would pass its limit when `task` came to it.
    pub fn excess(&self, task: usize, device: usize) -> Bytes {
        let Some(limit) = self.p.devices[device].memory else { return Bytes::ZERO };
        let p = self.p;
        let bytes = |x: &u32| u128::from(p.tensors[*x as usize].bytes().0);
        let comes = |x: &&u32| {
            self.device[p.tensors[**x as usize].producer as usize] as usize != device
                && self.arrival(**x, device).is_none()
        };
        let inputs: u128 = p.inputs.row(task).iter().filter(comes).map(bytes).sum();
        let outputs: u128 = p.outputs.row(task).iter().map(bytes).sum();
        let after = self.memory.held[device]
            + self.lasting_bytes(task, device)
            + inputs
            + outputs
            + u128::from(p.scratch[task].0);
        Bytes(u64::try_from(after.saturating_sub(u128::from(limit.0))).unwrap_or(u64::MAX))
    }

    /// The finished schedule.
    pub fn timeline(self) -> Timeline {
        let mut transfers = self.transfers;
        transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
        let makespan = self.end.iter().copied().max().unwrap_or_default();
        Timeline { device: self.device, start: self.start, end: self.end, transfers, makespan }
    }
}
