//! A schedule that grows task by task, as in list scheduling: intervals of each device and link so
//! far, and the earliest start of a task on each device.

use crate::memory::usage::Memory;
use crate::problem::Problem;
use crate::schedule::gaps::Gaps;
use crate::schedule::timeline::{Timeline, Transfer};
use crate::schedule::times::TransferTimes;
use crate::{Bytes, Nanos};
use std::collections::BTreeSet;

const NOWHERE: u32 = u32::MAX;

/// Consumers above which a tensor is given back only when all of them are scheduled.
const LONG_LIST: usize = 64;

/// Insertion policy: a task may or may not start in a gap before tasks that are already scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insertion {
    /// The earliest gap that holds it, on devices and on links.
    Gaps,
    /// After all that is there.
    Append,
}

/// When a new transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sending {
    /// As soon as it can: the destination holds the copy while it waits.
    Early,
    /// As late as its first consumer allows: the source holds the tensor until then.
    Late,
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
    times: TransferTimes,
    insertion: Insertion,
    sending: Sending,
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
    /// Tasks of a group may be on several devices.
    ignores_groups: bool,
    /// Device of each task where that is decided beforehand, else empty.
    planned: Vec<u32>,
    memory: Memory,
    /// Consumers of a tensor that are not scheduled.
    waiting: Vec<u32>,
    /// Tensors given back, by device.
    released: BTreeSet<(u32, u32)>,
}

impl<'p> List<'p> {
    /// Nothing is scheduled.
    pub fn new(p: &'p Problem, insertion: Insertion) -> List<'p> {
        let n = p.n_devices();
        let shortest = (0..p.n_tasks())
            .map(|t| p.least_cost(t))
            .filter(|c| *c > Nanos::ZERO)
            .min();
        List {
            p,
            times: TransferTimes::new(p),
            insertion,
            sending: Sending::Early,
            device: vec![NOWHERE; p.n_tasks()],
            start: vec![Nanos::ZERO; p.n_tasks()],
            end: vec![Nanos::ZERO; p.n_tasks()],
            devices: vec![Gaps::new(shortest.unwrap_or(Nanos(1))); n],
            links: vec![Gaps::new(Nanos(1)); n * n],
            transfers: Vec::new(),
            last_transfer: vec![NOWHERE; p.tensors.len()],
            before: Vec::new(),
            group_device: vec![NOWHERE; p.n_groups()],
            ignores_groups: false,
            planned: Vec::new(),
            memory: Memory::new(p),
            waiting: (0..p.tensors.len())
                .map(|x| p.consumers.row(x).len() as u32)
                .collect(),
            released: BTreeSet::new(),
        }
    }

    /// Nothing is scheduled, but it is decided that each task will run on its device of `planned`,
    /// in gaps where it can.
    pub fn planned(p: &'p Problem, sending: Sending, planned: &[u32]) -> List<'p> {
        List {
            planned: planned.to_vec(),
            sending,
            ..List::new(p, Insertion::Gaps)
        }
    }

    /// Lets each task of a group choose its own device, as if the group could be split.
    pub fn ignore_groups(mut self) -> List<'p> {
        self.ignores_groups = true;
        self
    }

    /// Where a task will run, if that is decided.
    fn home(&self, task: usize) -> Option<usize> {
        let device = match self.planned.get(task) {
            Some(&d) => d,
            None => self.group_device[self.p.group_of[task] as usize],
        };
        (device != NOWHERE).then_some(device as usize)
    }

    /// Devices that are open to a task: that of its plan or group if there is one, else all
    /// feasible ones.
    pub fn open(&self, task: usize) -> impl Iterator<Item = usize> + '_ {
        let home = self.home(task);
        self.p
            .feasible(task)
            .filter(move |&d| home.is_none_or(|h| h == d))
    }

    /// End of a scheduled task.
    pub fn end(&self, task: usize) -> Nanos {
        self.end[task]
    }

    /// Device of a scheduled task.
    pub fn device(&self, task: usize) -> Option<usize> {
        Some(self.device[task] as usize).filter(|_| self.device[task] != NOWHERE)
    }

    /// When `task` would run on `device`. Transfers that it would need are planned, not made. Under
    /// a memory limit it waits until it fits.
    pub fn slot(&self, task: usize, device: usize) -> Slot {
        let (mut ready, mut brought) = (Nanos::ZERO, 0);
        self.arrivals(task, device, |x, arrival, is_new| {
            ready = ready.max(arrival);
            brought += if is_new { self.bytes(x) } else { 0 };
        });
        self.slot_at(task, device, ready, brought)
    }

    /// The open device where a task would end first, `look` added to its end in parts of a
    /// nanosecond, of which it has `per_ns`; of equal ones the first. Excess over memory limits
    /// goes before. `room` is room to work in.
    pub fn soonest(
        &self,
        task: usize,
        per_ns: u128,
        look: impl Fn(usize) -> u128,
        room: &mut Vec<(u128, usize)>,
    ) -> usize {
        room.clear();
        let key = |end: Nanos, d: usize| u128::from(end.0) * per_ns + look(d);
        // Links and devices that are idle when they are needed give the least possible end.
        room.extend(
            self.open(task)
                .map(|d| (key(self.least_ready(task, d) + self.p.cost(task, d), d), d)),
        );
        if let [(_, only)] = room[..] {
            return only;
        }
        room.sort_unstable();
        let mut best: Option<(Bytes, u128, usize)> = None;
        for &(least, d) in room.iter() {
            if best.is_some_and(|b| !self.memory.limited && (b.1, b.2) < (least, d)) {
                break;
            }
            let found = (self.excess(task, d), key(self.slot(task, d).end, d), d);
            best = Some(best.map_or(found, |b| b.min(found)));
        }
        best.expect("a group is on a device that all its tasks can run on")
            .2
    }

    /// When the operands of a task would be on a device if links were idle.
    fn least_ready(&self, task: usize, device: usize) -> Nanos {
        let mut ready = Nanos::ZERO;
        for &x in self.p.inputs.row(task) {
            let producer = self.p.tensors[x as usize].producer as usize;
            let (source, made) = (self.device[producer] as usize, self.end[producer]);
            let way = if source == device {
                Nanos::ZERO
            } else {
                self.times.get(self.p, x as usize, source, device)
            };
            ready = ready.max(made + way);
        }
        ready
    }

    /// The slot of a task whose operands are there at `ready`; `brought` bytes of them are not held
    /// yet.
    fn slot_at(&self, task: usize, device: usize, ready: Nanos, brought: u128) -> Slot {
        let cost = self.p.cost(task, device);
        let fits = match self.memory.limited {
            true => {
                let more = brought + self.made_bytes(task);
                self.memory
                    .fits(device, ready, self.lasting_bytes(task, device), more)
            }
            false => ready,
        };
        let start = match self.insertion {
            Insertion::Gaps => self.devices[device].earliest(fits, cost),
            Insertion::Append => self.devices[device].last().max(fits),
        };
        Slot {
            ready,
            start,
            end: start + cost,
        }
    }

    /// Calls `f(tensor, arrival, whether its transfer is new)` for each operand.
    fn arrivals(&self, task: usize, device: usize, mut f: impl FnMut(u32, Nanos, bool)) {
        // Of several new transfers over one link each comes after the one before it.
        let mut taken: [(u32, Nanos); 8] = [(NOWHERE, Nanos::ZERO); 8];
        let (mut n_taken, mut more) = (0, Vec::new());
        let mut brought = 0;
        let lasting = if self.memory.limited {
            self.lasting_bytes(task, device)
        } else {
            0
        };
        for &x in self.p.inputs.row(task) {
            let producer = self.p.tensors[x as usize].producer as usize;
            let (source, made) = (self.device[producer] as usize, self.end[producer]);
            if source == device {
                f(x, made, false);
                continue;
            }
            if let Some(there) = self.arrival(x, device) {
                f(x, there, false);
                continue;
            }
            let length = self.times.get(self.p, x as usize, source, device);
            let known = taken[..n_taken]
                .iter_mut()
                .chain(more.iter_mut())
                .find(|t| t.0 == source as u32);
            let from = known.as_ref().map_or(made, |t| made.max(t.1));
            brought += self.bytes(x);
            let start = self.transfer_start(x, device, from, length, (lasting, brought));
            if let Some(t) = known {
                t.1 = start + length;
            } else if n_taken < taken.len() {
                taken[n_taken] = (source as u32, start + length);
                n_taken += 1;
            } else {
                more.push((source as u32, start + length));
            }
            f(x, start + length, true);
        }
    }

    /// When a transfer of `x` to `device` can start, at `from` or later, so that `brought` bytes
    /// fit there beside `lasting` new ones.
    fn transfer_start(
        &self,
        x: u32,
        device: usize,
        from: Nanos,
        length: Nanos,
        (lasting, brought): (u128, u128),
    ) -> Nanos {
        let source = self.device[self.p.tensors[x as usize].producer as usize] as usize;
        let link = &self.links[source * self.p.n_devices() + device];
        let fits = if self.memory.limited {
            self.memory.fits(device, from, lasting, brought)
        } else {
            from
        };
        match self.insertion {
            Insertion::Gaps => link.earliest(fits, length),
            Insertion::Append => link.last().max(fits),
        }
    }

    fn bytes(&self, x: u32) -> u128 {
        u128::from(self.p.tensors[x as usize].bytes().0)
    }

    /// Bytes that a task takes while it runs: its results and its scratch.
    fn made_bytes(&self, task: usize) -> u128 {
        let results: u128 = self
            .p
            .outputs
            .row(task)
            .iter()
            .map(|&x| self.bytes(x))
            .sum();
        results + u128::from(self.p.scratch[task].0)
    }

    fn arrival(&self, x: u32, device: usize) -> Option<Nanos> {
        self.copies(x)
            .find(|t| t.to as usize == device)
            .map(|t| t.end)
    }

    /// Transfers of a tensor, the last first.
    fn copies(&self, x: u32) -> impl Iterator<Item = &Transfer> {
        let next = |i: u32| (i != NOWHERE).then_some(i);
        let chain = std::iter::successors(next(self.last_transfer[x as usize]), move |&i| {
            next(self.before[i as usize])
        });
        chain.map(|i| &self.transfers[i as usize])
    }

    /// Runs `task` on `device`, with the transfers that it needs.
    pub fn commit(&mut self, task: usize, device: usize) -> Slot {
        let (mut ready, mut brought) = (Nanos::ZERO, 0);
        let mut new = Vec::new();
        self.arrivals(task, device, |x, arrival, is_new| {
            ready = ready.max(arrival);
            if is_new {
                brought += self.bytes(x);
                new.push((x, arrival));
            }
        });
        let slot = self.slot_at(task, device, ready, brought);
        let first_new = self.transfers.len();
        self.send(&new, device, slot.start);
        self.devices[device].take(slot.start, self.p.cost(task, device));
        (self.device[task], self.start[task], self.end[task]) =
            (device as u32, slot.start, slot.end);
        if self.memory.limited {
            self.hold(task, device, first_new);
        }
        if !self.ignores_groups {
            self.group_device[self.p.group_of[task] as usize] = device as u32;
        }
        if self.memory.limited {
            self.release_unneeded(task);
        }
        slot
    }

    /// Makes the transfers of tensors that can be on `device` at the given times, for a task that
    /// starts at `deadline`.
    fn send(&mut self, new: &[(u32, Nanos)], device: usize, deadline: Nanos) {
        // From the last to the first: each must end before the one after it on its link begins.
        let mut begun: Vec<(u32, Nanos)> = Vec::new();
        for &(x, arrival) in new.iter().rev() {
            let source = self.device[self.p.tensors[x as usize].producer as usize];
            let length = self.times.get(self.p, x as usize, source as usize, device);
            let early = Nanos(arrival.0 - length.0);
            let link = &mut self.links[source as usize * self.p.n_devices() + device];
            let next = begun
                .iter()
                .rev()
                .find(|b| b.0 == source)
                .map_or(deadline, |b| b.1);
            let late = if self.sending == Sending::Late {
                link.latest(early, next, length)
            } else {
                None
            };
            let start = late.unwrap_or(early);
            link.take(start, length);
            begun.push((source, start));
            self.before.push(self.last_transfer[x as usize]);
            self.last_transfer[x as usize] = self.transfers.len() as u32;
            let (to, end) = (device as u32, start + length);
            self.transfers.push(Transfer {
                tensor: x,
                from: source,
                to,
                start,
                end,
            });
        }
    }

    /// Holds the operands that came with a task, and its results.
    fn hold(&mut self, task: usize, device: usize, first_new: usize) {
        let p = self.p;
        self.memory
            .settle(p, task, device, self.lasting_group(task));
        for t in &self.transfers[first_new..] {
            self.memory
                .hold(device, t.start, p.tensors[t.tensor as usize].bytes());
        }
        let (start, end) = (self.start[task], self.end[task]);
        for &x in p.outputs.row(task) {
            let bytes = p.tensors[x as usize].bytes();
            self.memory.hold(device, start, bytes);
            if p.consumers.row(x as usize).is_empty() {
                self.memory.release(device, end, bytes);
            }
        }
        self.memory.hold(device, start, p.scratch[task]);
        self.memory.release(device, end, p.scratch[task]);
    }

    /// Gives back operands of a task that no task can come for any more.
    fn release_unneeded(&mut self, task: usize) {
        for &x in self.p.inputs.row(task) {
            let consumers = self.p.consumers.row(x as usize);
            self.waiting[x as usize] -= 1;
            // A long list is looked through once only, at its end.
            if self.waiting[x as usize] > 0 && consumers.len() > LONG_LIST {
                continue;
            }
            for d in 0..self.p.n_devices() {
                if self.holds(x, d) && !self.is_needed(x, d) {
                    self.memory
                        .release(d, self.last_use(x, d), self.p.tensors[x as usize].bytes());
                    self.released.insert((x, d as u32));
                }
            }
        }
    }

    fn holds(&self, x: u32, device: usize) -> bool {
        let source = self.device[self.p.tensors[x as usize].producer as usize] as usize;
        (source == device || self.arrival(x, device).is_some())
            && !self.released.contains(&(x, device as u32))
    }

    /// True if an unscheduled task could use `x` on `device`, or have it sent from there.
    fn is_needed(&self, x: u32, device: usize) -> bool {
        let source = self.device[self.p.tensors[x as usize].producer as usize] as usize;
        let comes = |c: usize| match self.home(c) {
            Some(home) if home == device => true,
            Some(home) => source == device && self.arrival(x, home).is_none(),
            None => source == device || self.p.cost(c, device).is_finite(),
        };
        self.p
            .consumers
            .row(x as usize)
            .iter()
            .any(|&c| self.device[c as usize] == NOWHERE && comes(c as usize))
    }

    /// End of the last use of `x` on `device`: by tasks, and by transfers from there.
    fn last_use(&self, x: u32, device: usize) -> Nanos {
        let producer = self.p.tensors[x as usize].producer as usize;
        let made = if self.device[producer] as usize == device {
            self.end[producer]
        } else {
            Nanos::ZERO
        };
        let local = self
            .p
            .consumers
            .row(x as usize)
            .iter()
            .filter(|&&c| self.device[c as usize] == device as u32);
        let uses = local.map(|&c| self.end[c as usize]);
        let sent = self
            .copies(x)
            .filter(|t| t.from as usize == device)
            .map(|t| t.end);
        uses.chain(sent).fold(made, Nanos::max)
    }

    /// Bytes that a device would hold for good when `task` came to it: with the first task of a
    /// group all of the group's.
    fn lasting_bytes(&self, task: usize, device: usize) -> u128 {
        self.lasting_group(task) + self.memory.missing_constants(self.p, task, device)
    }

    fn lasting_group(&self, task: usize) -> u128 {
        let group = self.p.group_of[task] as usize;
        let own = [task as u32];
        let all: &[u32] = match self.group_device[group] {
            _ if self.ignores_groups => &own,
            NOWHERE => self.p.members.row(group),
            _ => &[],
        };
        all.iter()
            .map(|&t| u128::from(self.p.resident[t as usize].0))
            .sum()
    }

    /// Bytes by which a device would be over its limit when `task` came to it, however long it
    /// waited.
    pub fn excess(&self, task: usize, device: usize) -> Bytes {
        if self.p.devices[device].memory.is_none() {
            return Bytes::ZERO;
        }
        let is_new = |x: &&u32| {
            let producer = self.p.tensors[**x as usize].producer as usize;
            self.device[producer] as usize != device && self.arrival(**x, device).is_none()
        };
        let copies: u128 = self
            .p
            .inputs
            .row(task)
            .iter()
            .filter(is_new)
            .map(|&x| self.bytes(x))
            .sum();
        self.memory.excess(
            device,
            self.lasting_bytes(task, device),
            copies + self.made_bytes(task),
        )
    }

    /// The finished schedule.
    pub fn timeline(self) -> Timeline {
        let mut transfers = self.transfers;
        transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
        let makespan = self.end.iter().copied().max().unwrap_or_default();
        Timeline {
            device: self.device,
            start: self.start,
            end: self.end,
            transfers,
            makespan,
        }
    }
}
