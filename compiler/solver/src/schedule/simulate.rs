//! Simulated execution of a placement: the one measure by which placements are compared.
//!
//! A device runs one task at a time; whenever it is idle and tasks wait, it starts the one whose
//! key is least; a patient one ([`Simulator::set_patient`]) stays idle for a task of lesser key
//! that is about to come when that costs less than coming too late for it. Each ordered pair of
//! devices has a link that moves one tensor at a time: of those that wait the one whose most urgent
//! consumer there has the least key ([`LinkOrder::Urgent`]; TicTac, Hashemi et al. 2019), or the
//! first that came ([`LinkOrder::Fifo`]). A tensor crosses a link once, however many tasks wait
//! there. Devices compute while links transfer. Times are integer nanoseconds.
//!
//! [`Simulator::rerun`] is the delta simulation: after a change of a few devices it takes over all
//! that happened before the change could have shown, and simulates the rest only. Its result equals
//! that of a full run.

use crate::Nanos;
use crate::problem::Problem;
use crate::schedule::timeline::{Timeline, Transfer};
use crate::schedule::times::TransferTimes;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Order in which a link takes waiting tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkOrder {
    /// The one whose most urgent consumer has the least key.
    Urgent,
    /// The first that came.
    Fifo,
}

/// An end of a task or transfer: the time, and the [`Done`] packed.
type Event = Reverse<(Nanos, u64)>;

/// A task or transfer that ended: tasks come before transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Done {
    Task(u32),
    /// Index into the transfers.
    Transfer(u32),
}

impl Done {
    fn pack(self) -> u64 {
        match self {
            Done::Task(t) => u64::from(t),
            Done::Transfer(i) => 1 << 32 | u64::from(i),
        }
    }

    fn unpack(packed: u64) -> Done {
        if packed >> 32 == 0 {
            Done::Task(packed as u32)
        } else {
            Done::Transfer(packed as u32)
        }
    }
}

/// A task or tensor that waits: key, index.
type Waiting = Reverse<(u64, u32)>;

/// A task that will be ready on a device at a known time.
#[derive(Clone, Copy, Debug)]
struct Coming {
    key: u64,
    due: Nanos,
    task: u32,
}

/// Ready tasks that a patient device looks at for one to run before an urgent one comes.
const MOST_LOOKS: usize = 4;

/// A device or link.
#[derive(Clone, Debug, Default)]
struct Queue {
    waiting: BinaryHeap<Waiting>,
    busy: bool,
    /// Listed for the next look.
    listed: bool,
    /// A link in [`Simulator::used_links`].
    used: bool,
}

impl Queue {
    fn clear(&mut self) {
        self.waiting.clear();
        (self.busy, self.listed, self.used) = (false, false, false);
    }
}

/// When a run is given up.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// As soon as the makespan is seen to be this or more.
    pub makespan: Nanos,
    /// As soon as a task starts after its time here; empty for no such times.
    pub latest: &'a [Nanos],
    /// Least time from the start of each task to the end of all on the devices of the run before,
    /// or empty when that is not known: the successors of all changed tasks still take that long.
    pub tails: &'a [Nanos],
}

impl Limits<'_> {
    /// Runs are given up when the makespan is seen to be `makespan` or more.
    pub fn below(makespan: Nanos) -> Limits<'static> {
        Limits {
            makespan,
            latest: &[],
            tails: &[],
        }
    }
}

/// Tables of one problem, for its simulations.
#[derive(Debug)]
struct Known {
    transfers: TransferTimes,
    /// Least time from the start of a task to the end of all, wherever everything is.
    tail: Vec<Nanos>,
    /// Place of each task in the topological order.
    position: Vec<u32>,
}

/// Runs simulations of one problem, reusing its memory.
#[derive(Clone, Debug)]
pub struct Simulator<'p> {
    p: &'p Problem,
    links: LinkOrder,
    known: Arc<Known>,
    key: Vec<u64>,
    /// The last run; its transfers in the order in which they began.
    run: Timeline,
    /// Tasks in the order in which they started.
    sequence: Vec<u32>,
    /// When a transfer began to wait for its link.
    queued: Vec<Nanos>,
    /// Inputs of each task that are not on its device yet.
    missing: Vec<u32>,
    devices: Vec<Queue>,
    link: Vec<Queue>,
    /// Links that this run has used.
    used_links: Vec<u32>,
    look: Vec<usize>,
    events: BinaryHeap<Event>,
    /// Destinations of the tensor at hand: for each device the tensor that saw it last, and its
    /// least key there.
    seen: Vec<(u32, u64)>,
    destinations: Vec<u32>,
    n_started: u64,
    is_patient: bool,
    /// Inputs of each task whose arrival is not known yet, and the last known arrival.
    unknown: Vec<u32>,
    due: Vec<Nanos>,
    /// Tasks whose time of readiness is known and not reached, by device.
    coming: Vec<Vec<Coming>>,
    /// Tasks after this place of the topological order have only unchanged tasks behind them.
    last_changed: u32,
}

const NEVER: Nanos = Nanos::INFINITY;

impl<'p> Simulator<'p> {
    /// A simulator without a run.
    pub fn new(p: &'p Problem, links: LinkOrder) -> Simulator<'p> {
        let (n, n_tasks) = (p.n_devices(), p.n_tasks());
        let mut position = vec![0; n_tasks];
        p.order
            .iter()
            .enumerate()
            .for_each(|(i, &t)| position[t as usize] = i as u32);
        let known = Known {
            transfers: TransferTimes::new(p),
            tail: crate::schedule::ranks::least_tails(p),
            position,
        };
        Simulator {
            p,
            links,
            known: Arc::new(known),
            key: Vec::new(),
            run: Timeline {
                start: vec![NEVER; n_tasks],
                end: vec![NEVER; n_tasks],
                ..Timeline::default()
            },
            sequence: Vec::new(),
            queued: Vec::new(),
            missing: vec![0; n_tasks],
            devices: vec![Queue::default(); n],
            link: vec![Queue::default(); n * n],
            used_links: Vec::new(),
            look: Vec::new(),
            events: BinaryHeap::new(),
            seen: vec![(u32::MAX, 0); n],
            destinations: Vec::new(),
            n_started: 0,
            is_patient: false,
            unknown: Vec::new(),
            due: Vec::new(),
            coming: vec![Vec::new(); n],
            last_changed: u32::MAX,
        }
    }

    /// Simulates tasks on `device`, each device preferring small keys (ties: small index). Every
    /// task must be on a feasible device.
    ///
    /// `None` as soon as the makespan is seen to be `limit` or more.
    pub fn run(&mut self, device: &[u32], key: &[u64], limit: Nanos) -> Option<Nanos> {
        self.run.device.clear();
        self.run.device.extend_from_slice(device);
        self.key.clear();
        self.key.extend_from_slice(key);
        self.sequence.clone_from(&self.p.order);
        self.run.transfers.clear();
        self.queued.clear();
        self.last_changed = u32::MAX;
        self.go_on(Nanos::ZERO, &Limits::below(limit))
    }

    /// The run just made, from the start, with other devices or keys for some tasks: those of all
    /// tasks but `changed` are as in the last run.
    ///
    /// `None` as soon as the run passes a limit. A run that ended so cannot be rerun: [`Self::run`]
    /// or [`Self::restore`] first.
    pub fn rerun(
        &mut self,
        device: &[u32],
        key: &[u64],
        changed: &[u32],
        limits: &Limits,
    ) -> Option<Nanos> {
        let shown = changed
            .iter()
            .map(|&t| self.first_sign(t as usize))
            .min()
            .unwrap_or(NEVER);
        self.last_changed = 0;
        for &t in changed {
            let t = t as usize;
            if self.run.device[t] != device[t] {
                self.last_changed = self.last_changed.max(self.known.position[t]);
            }
            self.run.device[t] = device[t];
            self.key[t] = key[t];
        }
        debug_assert_eq!(self.run.device, device);
        if shown == NEVER {
            return Some(self.run.makespan).filter(|m| *m < limits.makespan);
        }
        self.go_on(shown, limits)
    }

    /// The last complete run.
    pub fn timeline(&self) -> Timeline {
        let mut timeline = self.run.clone();
        timeline.sort_transfers();
        timeline
    }

    /// Fills `tails` with [`crate::schedule::ranks::placed_tails`] of the devices of the last run.
    pub fn placed_tails(&self, tails: &mut Vec<Nanos>) {
        let p = self.p;
        tails.clear();
        tails.resize(p.n_tasks(), Nanos::ZERO);
        for &t in p.order.iter().rev() {
            let from = self.run.device[t as usize] as usize;
            let mut rest = Nanos::ZERO;
            for &x in p.outputs.row(t as usize) {
                for &c in p.consumers.row(x as usize) {
                    let to = self.run.device[c as usize] as usize;
                    rest = rest
                        .max(self.known.transfers.get(p, x as usize, from, to) + tails[c as usize]);
                }
            }
            tails[t as usize] = p.cost(t as usize, from) + rest;
        }
    }

    /// The last complete run; its transfers come in the order in which they began, those of one
    /// instant in no certain order.
    pub fn last_run(&self) -> &Timeline {
        &self.run
    }

    /// Tasks of the last complete run in the order in which they started.
    pub fn sequence(&self) -> &[u32] {
        &self.sequence
    }

    /// Lets devices wait for urgent tasks that are about to come, or not, from the next run on.
    pub fn set_patient(&mut self, is_patient: bool) {
        self.is_patient = is_patient;
    }

    /// Start and end of a task in the last run.
    pub fn times(&self, task: usize) -> (Nanos, Nanos) {
        (self.run.start[task], self.run.end[task])
    }

    /// Tasks that the last run started itself, without the prefix that a rerun took over.
    pub fn n_started(&self) -> u64 {
        self.n_started
    }

    /// Takes over the state of another simulator of the same problem.
    pub fn restore(&mut self, from: &Simulator<'p>) {
        self.run.clone_from(&from.run);
        self.key.clone_from(&from.key);
        self.sequence.clone_from(&from.sequence);
        self.queued.clone_from(&from.queued);
        self.is_patient = from.is_patient;
    }

    /// Before this time nothing can differ when `task` runs elsewhere: its operands leave for its
    /// device when they are made, and are known to come when their making begins.
    fn first_sign(&self, task: usize) -> Nanos {
        let known = if self.is_patient {
            &self.run.start
        } else {
            &self.run.end
        };
        self.p
            .predecessors(task)
            .map(|q| known[q as usize])
            .min()
            .unwrap_or(Nanos::ZERO)
    }

    /// Empties all queues.
    fn clear(&mut self) {
        self.events.clear();
        self.look.clear();
        self.devices.iter_mut().for_each(Queue::clear);
        for l in self.used_links.drain(..) {
            self.link[l as usize].clear();
        }
        self.coming.iter_mut().for_each(Vec::clear);
        if self.is_patient {
            self.unknown.resize(self.p.n_tasks(), 0);
            self.due.resize(self.p.n_tasks(), Nanos::ZERO);
        }
        self.seen.fill((u32::MAX, 0));
        self.run.makespan = Nanos::ZERO;
        self.n_started = 0;
    }

    /// Keeps the tasks that started before `now` and simulates the rest.
    fn go_on(&mut self, now: Nanos, limits: &Limits) -> Option<Nanos> {
        self.clear();
        let kept = if now == Nanos::ZERO {
            0
        } else {
            self.started_before(now)
        };
        let again: Vec<u32> = self.sequence.drain(kept..).collect();
        for &t in &again {
            (self.run.start[t as usize], self.run.end[t as usize]) = (NEVER, NEVER);
        }
        again
            .iter()
            .for_each(|&t| self.await_inputs(t as usize, now));
        self.resume_transfers(now);
        self.resume_tasks(now);
        for t in again {
            let task = t as usize;
            if self.missing[task] == 0 {
                self.make_ready(t);
            } else if self.is_patient && self.unknown[task] == 0 {
                let coming = self.coming(task);
                self.coming[self.run.device[task] as usize].push(coming);
            }
        }
        self.go(now, limits)
    }

    /// Number of tasks that started before `now`.
    fn started_before(&self, now: Nanos) -> usize {
        self.sequence
            .partition_point(|&t| self.run.start[t as usize] < now)
    }

    /// Counts the inputs of a task that will start at `now` or later, but for those that come over
    /// links.
    fn await_inputs(&mut self, task: usize, now: Nanos) {
        let p = self.p;
        let inputs = p.inputs.row(task);
        let (mut missing, mut unknown, mut due) =
            (inputs.len() as u32, inputs.len() as u32, Nanos::ZERO);
        for &x in inputs {
            let q = p.tensors[x as usize].producer as usize;
            let end = self.run.end[q];
            if end != NEVER && self.run.device[q] == self.run.device[task] {
                missing -= u32::from(end < now);
                unknown -= 1;
                due = due.max(end);
            }
        }
        self.missing[task] = missing;
        if self.is_patient {
            (self.unknown[task], self.due[task]) = (unknown, due);
        }
    }

    /// Keeps the transfers that began before `now`. Other tensors made before `now` wait; one made
    /// at `now` or later is sent when it is made.
    fn resume_transfers(&mut self, now: Nanos) {
        let p = self.p;
        let kept = self.run.transfers.partition_point(|t| t.start < now);
        for i in kept..self.run.transfers.len() {
            let (t, queued) = (self.run.transfers[i], self.queued[i]);
            if self.run.end[p.tensors[t.tensor as usize].producer as usize] < now {
                let key = self.link_key(t.tensor, t.to, queued);
                let link = t.from as usize * p.n_devices() + t.to as usize;
                self.use_link(link).waiting.push(Reverse((key, t.tensor)));
                self.list(p.n_devices() + link);
            }
        }
        self.run.transfers.truncate(kept);
        self.queued.truncate(kept);
        for i in 0..kept {
            let t = self.run.transfers[i];
            let has_come = t.end < now;
            if !has_come {
                let link = t.from as usize * p.n_devices() + t.to as usize;
                self.use_link(link).busy = true;
                self.events
                    .push(Reverse((t.end, Done::Transfer(i as u32).pack())));
            }
            for &c in p.consumers.row(t.tensor as usize) {
                let c = c as usize;
                if self.run.device[c] == t.to && self.run.start[c] == NEVER {
                    self.missing[c] -= u32::from(has_come);
                    if self.is_patient {
                        self.unknown[c] -= 1;
                        self.due[c] = self.due[c].max(t.end);
                    }
                }
            }
        }
    }

    /// Lets tasks that started before `now` end.
    fn resume_tasks(&mut self, now: Nanos) {
        for &t in &self.sequence {
            let end = self.run.end[t as usize];
            if end >= now {
                self.devices[self.run.device[t as usize] as usize].busy = true;
                self.events.push(Reverse((end, Done::Task(t).pack())));
            } else {
                self.run.makespan = self.run.makespan.max(end);
            }
        }
    }

    fn go(&mut self, now: Nanos, limits: &Limits) -> Option<Nanos> {
        self.start_listed(now, limits)?;
        while let Some(Reverse((now, done))) = self.events.pop() {
            self.finish(now, Done::unpack(done));
            // All that ends at this instant is known before any device or link chooses.
            while self.events.peek().is_some_and(|Reverse((t, _))| *t == now) {
                let Some(Reverse((_, done))) = self.events.pop() else {
                    break;
                };
                self.finish(now, Done::unpack(done));
            }
            self.start_listed(now, limits)?;
        }
        Some(self.run.makespan).filter(|m| *m < limits.makespan)
    }

    fn finish(&mut self, now: Nanos, done: Done) {
        let p = self.p;
        match done {
            Done::Task(task) => {
                let from = self.run.device[task as usize];
                self.devices[from as usize].busy = false;
                self.list(from as usize);
                self.run.makespan = self.run.makespan.max(now);
                for &x in p.outputs.row(task as usize) {
                    self.deliver(x, from, now);
                }
            }
            Done::Transfer(i) => {
                let t = self.run.transfers[i as usize];
                let link = t.from as usize * p.n_devices() + t.to as usize;
                self.link[link].busy = false;
                self.list(p.n_devices() + link);
                for &c in p.consumers.row(t.tensor as usize) {
                    if self.run.device[c as usize] == t.to {
                        self.arrive(c);
                    }
                }
            }
        }
    }

    /// Hands a new tensor to local tasks and puts it on the links to all other devices where it is
    /// needed.
    fn deliver(&mut self, x: u32, from: u32, now: Nanos) {
        let p = self.p;
        self.destinations.clear();
        for &c in p.consumers.row(x as usize) {
            let (to, key) = (self.run.device[c as usize], self.key[c as usize]);
            if to == from {
                self.arrive(c);
                continue;
            }
            let seen = &mut self.seen[to as usize];
            if seen.0 == x {
                seen.1 = seen.1.min(key);
            } else {
                *seen = (x, key);
                self.destinations.push(to);
            }
        }
        for i in 0..self.destinations.len() {
            let to = self.destinations[i];
            let key = if self.links == LinkOrder::Fifo {
                now.0
            } else {
                self.seen[to as usize].1
            };
            let link = from as usize * p.n_devices() + to as usize;
            self.use_link(link).waiting.push(Reverse((key, x)));
            self.list(p.n_devices() + link);
        }
    }

    fn use_link(&mut self, link: usize) -> &mut Queue {
        let queue = &mut self.link[link];
        if !queue.used {
            queue.used = true;
            self.used_links.push(link as u32);
        }
        queue
    }

    fn link_key(&self, x: u32, to: u32, queued: Nanos) -> u64 {
        match self.links {
            LinkOrder::Fifo => queued.0,
            LinkOrder::Urgent => {
                let there = self
                    .p
                    .consumers
                    .row(x as usize)
                    .iter()
                    .filter(|&&c| self.run.device[c as usize] == to);
                there
                    .map(|&c| self.key[c as usize])
                    .min()
                    .unwrap_or(u64::MAX)
            }
        }
    }

    /// One more input of a task is there.
    fn arrive(&mut self, task: u32) {
        self.missing[task as usize] -= 1;
        if self.missing[task as usize] == 0 {
            if self.is_patient {
                self.coming[self.run.device[task as usize] as usize].retain(|c| c.task != task);
            }
            self.make_ready(task);
        }
    }

    /// It is known when a tensor will be on a device.
    fn announce(&mut self, x: u32, device: u32, at: Nanos) {
        if !self.is_patient {
            return;
        }
        for &c in self.p.consumers.row(x as usize) {
            let task = c as usize;
            if self.run.device[task] == device {
                self.unknown[task] -= 1;
                self.due[task] = self.due[task].max(at);
                if self.unknown[task] == 0 {
                    let coming = self.coming(task);
                    self.coming[device as usize].push(coming);
                }
            }
        }
    }

    fn coming(&self, task: usize) -> Coming {
        Coming {
            key: self.key[task],
            due: self.due[task],
            task: task as u32,
        }
    }

    fn make_ready(&mut self, task: u32) {
        let d = self.run.device[task as usize] as usize;
        self.devices[d]
            .waiting
            .push(Reverse((self.key[task as usize], task)));
        self.list(d);
    }

    /// Marks a device, or after all devices a link, for a look at the end of this instant.
    fn list(&mut self, resource: usize) {
        let n = self.p.n_devices();
        let listed = if resource < n {
            &mut self.devices[resource].listed
        } else {
            &mut self.link[resource - n].listed
        };
        if !std::mem::replace(listed, true) {
            self.look.push(resource);
        }
    }

    fn start_listed(&mut self, now: Nanos, limits: &Limits) -> Option<()> {
        let n = self.p.n_devices();
        // In a fixed order: a task that starts may be one that another waits for.
        self.look.sort_unstable_by(|a, b| b.cmp(a));
        while let Some(resource) = self.look.pop() {
            if resource < n {
                self.devices[resource].listed = false;
                self.start_task(resource, now, limits)?;
            } else {
                self.link[resource - n].listed = false;
                self.start_transfer(resource - n, now);
            }
        }
        Some(())
    }

    fn start_task(&mut self, device: usize, now: Nanos, limits: &Limits) -> Option<()> {
        if self.devices[device].busy {
            return Some(());
        }
        if let Some(task) = self.choose(device, now) {
            let t = task as usize;
            let end = now + self.p.cost(t, device);
            if now + self.tail(t, limits) >= limits.makespan || end >= limits.makespan {
                return None;
            }
            if limits.latest.get(t).is_some_and(|l| now > *l) {
                return None;
            }
            self.devices[device].busy = true;
            self.n_started += 1;
            (self.run.start[t], self.run.end[t]) = (now, end);
            self.sequence.push(task);
            self.events.push(Reverse((end, Done::Task(task).pack())));
            self.p
                .outputs
                .row(t)
                .iter()
                .for_each(|&x| self.announce(x, device as u32, end));
        }
        Some(())
    }

    /// Least time from the start of a task to the end of all.
    fn tail(&self, task: usize, limits: &Limits) -> Nanos {
        let known = limits
            .tails
            .get(task)
            .filter(|_| self.known.position[task] > self.last_changed);
        known.copied().unwrap_or(self.known.tail[task])
    }

    /// The task that an idle device starts now, if any.
    fn choose(&mut self, device: usize, now: Nanos) -> Option<u32> {
        if !self.is_patient || self.coming[device].is_empty() {
            return self.devices[device]
                .waiting
                .pop()
                .map(|Reverse((_, task))| task);
        }
        let mut passed: [Option<(u64, u32)>; MOST_LOOKS] = [None; MOST_LOOKS];
        let mut chosen = None;
        for slot in &mut passed {
            let Some(Reverse((key, task))) = self.devices[device].waiting.pop() else {
                break;
            };
            if self.may_go(device, task, key, now) {
                chosen = Some(task);
                break;
            }
            *slot = Some((key, task));
        }
        self.devices[device]
            .waiting
            .extend(passed.into_iter().flatten().map(Reverse));
        chosen
    }

    /// False when a more urgent task comes while this one would run, sooner than this one would
    /// have half done with it.
    fn may_go(&self, device: usize, task: u32, key: u64, now: Nanos) -> bool {
        let end = now + self.p.cost(task as usize, device);
        let is_hindered = |c: &Coming| {
            c.key < key && c.due < end && c.due.0 - now.0.min(c.due.0) <= end.0 - c.due.0
        };
        !self.coming[device].iter().any(is_hindered)
    }

    fn start_transfer(&mut self, link: usize, now: Nanos) {
        if self.link[link].busy {
            return;
        }
        if let Some(Reverse((key, x))) = self.link[link].waiting.pop() {
            let (from, to) = (link / self.p.n_devices(), link % self.p.n_devices());
            let end = now + self.known.transfers.get(self.p, x as usize, from, to);
            self.link[link].busy = true;
            self.events.push(Reverse((
                end,
                Done::Transfer(self.run.transfers.len() as u32).pack(),
            )));
            self.run.transfers.push(Transfer {
                tensor: x,
                from: from as u32,
                to: to as u32,
                start: now,
                end,
            });
            self.announce(x, to as u32, end);
            self.queued.push(Nanos(if self.links == LinkOrder::Fifo {
                key
            } else {
                0
            }));
        }
    }
}

/// The timeline of one placement, from the start.
pub fn simulate(p: &Problem, device: &[u32], key: &[u64], links: LinkOrder) -> Timeline {
    let mut simulator = Simulator::new(p, links);
    simulator.run(device, key, Nanos::INFINITY);
    simulator.timeline()
}
