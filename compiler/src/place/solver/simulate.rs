//! Simulated execution of a placement: the one measure by which placements are compared.
//!
//! A device runs one task at a time; whenever it is idle and tasks wait, it starts the one whose key is least; a patient one ([`Simulator::set_patient`])
//! stays idle for a task of lesser key that is about to come when that costs less than coming too late for it. Each ordered pair of devices has a link
//! that moves one tensor at a time: of those that wait the one whose most urgent consumer there has the least key ([`LinkOrder::Urgent`]; TicTac,
//! Hashemi et al. 2019), or the first that came ([`LinkOrder::Fifo`]). A tensor crosses a link once, however many tasks wait there. Devices
//! compute while links transfer. Times are integer nanoseconds.
//!
//! [`Simulator::rerun`] is the delta simulation: after a change of a few devices it takes over all that happened before the change could have shown,
//! and simulates the rest only. Its result equals that of a full run.

use super::problem::Problem;
use super::timeline::{Timeline, Transfer};
use crate::cost::Nanos;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Which of the waiting tensors a link takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkOrder {
    /// The one whose most urgent consumer has the least key.
    Urgent,
    /// The first that came.
    Fifo,
}

/// An end of something: `(time, link or device, what)`.
type Event = Reverse<(Nanos, Done)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Done {
    Task(u32),
    /// Index into the transfers.
    Transfer(u32),
}

/// A tensor that waits for a link: key, tensor.
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

#[derive(Clone, Debug, Default)]
struct Queue<T> {
    waiting: BinaryHeap<T>,
    busy: bool,
    /// Listed for the next look.
    listed: bool,
}

/// Runs simulations of one problem, reusing its memory.
#[derive(Clone, Debug)]
pub struct Simulator<'p> {
    p: &'p Problem,
    links: LinkOrder,
    device: Vec<u32>,
    key: Vec<u64>,
    start: Vec<Nanos>,
    end: Vec<Nanos>,
    transfers: Vec<Transfer>,
    /// When a transfer began to wait for its link.
    queued: Vec<Nanos>,
    makespan: Nanos,
    /// Inputs of each task that are not on its device yet.
    missing: Vec<u32>,
    devices: Vec<Queue<Reverse<(u64, u32)>>>,
    link: Vec<Queue<Waiting>>,
    look: Vec<usize>,
    events: BinaryHeap<Event>,
    /// For each device the last task that saw it as a destination, so that each destination comes once.
    seen: Vec<u32>,
    /// Least time from the start of a task to the end of all.
    tail: Vec<Nanos>,
    n_started: u64,
    is_patient: bool,
    /// Inputs of each task whose arrival is not known yet, and the last known arrival.
    unknown: Vec<u32>,
    due: Vec<Nanos>,
    /// Tasks whose time of readiness is known and not reached, by device.
    coming: Vec<Vec<Coming>>,
    /// Latest starts beyond which a rerun is given up, by task.
    latest: Vec<Nanos>,
}

const NEVER: Nanos = Nanos::INFINITY;

impl<'p> Simulator<'p> {
    /// A simulator without a run.
    pub fn new(p: &'p Problem, links: LinkOrder) -> Simulator<'p> {
        let n = p.n_devices();
        Simulator {
            p,
            links,
            device: Vec::new(),
            key: Vec::new(),
            start: vec![NEVER; p.n_tasks()],
            end: vec![NEVER; p.n_tasks()],
            transfers: Vec::new(),
            queued: Vec::new(),
            makespan: Nanos::ZERO,
            missing: Vec::new(),
            devices: vec![Queue::default(); n],
            link: vec![Queue::default(); n * n],
            look: Vec::new(),
            events: BinaryHeap::new(),
            seen: vec![u32::MAX; n],
            tail: super::ranks::least_tails(p),
            n_started: 0,
            is_patient: false,
            unknown: Vec::new(),
            due: Vec::new(),
            coming: vec![Vec::new(); n],
            latest: Vec::new(),
        }
    }

    /// Simulates tasks on `device`, each device preferring small keys (ties: small index). Every task must be on a feasible device.
    ///
    /// `None` as soon as the makespan is seen to be `limit` or more.
    pub fn run(&mut self, device: &[u32], key: &[u64], limit: Nanos) -> Option<Nanos> {
        self.device.clear();
        self.device.extend_from_slice(device);
        self.key.clear();
        self.key.extend_from_slice(key);
        self.clear_from(Nanos::ZERO);
        for t in 0..self.p.n_tasks() {
            if self.missing[t] == 0 {
                self.make_ready(t as u32);
            }
        }
        self.go(Nanos::ZERO, limit)
    }

    /// The run just made, from the start, with other devices or keys for some tasks: those of all tasks but `changed` are as in the last run.
    ///
    /// `None` as soon as the makespan is seen to be `limit` or more. A run that ended so cannot be rerun: [`Self::run`] or [`Self::restore`] first.
    pub fn rerun(&mut self, device: &[u32], key: &[u64], changed: &[u32], limit: Nanos) -> Option<Nanos> {
        let shown = changed.iter().map(|&t| self.first_sign(t as usize)).min().unwrap_or(NEVER);
        for &t in changed {
            self.device[t as usize] = device[t as usize];
            self.key[t as usize] = key[t as usize];
        }
        debug_assert_eq!(self.device, device);
        if shown == NEVER {
            return Some(self.makespan).filter(|m| *m < limit);
        }
        self.clear_from(shown);
        self.resume(shown);
        self.go(shown, limit)
    }

    /// The last complete run.
    pub fn timeline(&self) -> Timeline {
        let mut transfers = self.transfers.clone();
        transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
        Timeline {
            device: self.device.clone(),
            start: self.start.clone(),
            end: self.end.clone(),
            transfers,
            makespan: self.makespan,
        }
    }

    /// Whether devices wait for urgent tasks that are about to come, from the next run on.
    pub fn set_patient(&mut self, is_patient: bool) {
        self.is_patient = is_patient;
    }

    /// Gives up reruns in which a task starts after its time in `latest`; an empty list gives up none.
    pub fn set_latest(&mut self, latest: &[Nanos]) {
        self.latest.clear();
        self.latest.extend_from_slice(latest);
    }

    /// Start and end of a task in the last run.
    pub fn times(&self, task: usize) -> (Nanos, Nanos) {
        (self.start[task], self.end[task])
    }

    /// Tasks that the last run started itself: what a rerun took over is not counted.
    pub fn n_started(&self) -> u64 {
        self.n_started
    }

    /// Transfers of the last run.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    /// Takes over the state of another simulator of the same problem.
    pub fn restore(&mut self, from: &Simulator<'p>) {
        self.device.clone_from(&from.device);
        self.key.clone_from(&from.key);
        self.start.clone_from(&from.start);
        self.end.clone_from(&from.end);
        self.transfers.clone_from(&from.transfers);
        self.queued.clone_from(&from.queued);
        self.makespan = from.makespan;
        self.is_patient = from.is_patient;
    }

    /// Before this time nothing can differ when `task` runs elsewhere: its operands leave for its device when they are made, and are known to come
    /// when their making begins.
    fn first_sign(&self, task: usize) -> Nanos {
        let known = if self.is_patient { &self.start } else { &self.end };
        self.p.predecessors(task).map(|q| known[q as usize]).min().unwrap_or(Nanos::ZERO)
    }

    /// Forgets what started at `now` or later, and all that waits.
    fn clear_from(&mut self, now: Nanos) {
        let p = self.p;
        self.events.clear();
        self.look.clear();
        for queue in &mut self.devices {
            queue.waiting.clear();
            (queue.busy, queue.listed) = (false, false);
        }
        for queue in &mut self.link {
            queue.waiting.clear();
            (queue.busy, queue.listed) = (false, false);
        }
        self.missing.clear();
        self.missing.extend((0..p.n_tasks()).map(|t| p.inputs.row(t).len() as u32));
        if self.is_patient {
            self.unknown.clone_from(&self.missing);
            self.due.clear();
            self.due.resize(p.n_tasks(), Nanos::ZERO);
            self.coming.iter_mut().for_each(Vec::clear);
        }
        self.makespan = Nanos::ZERO;
        self.n_started = 0;
        self.seen.fill(u32::MAX);
        if now == Nanos::ZERO {
            self.start.fill(NEVER);
            self.end.fill(NEVER);
            self.transfers.clear();
            self.queued.clear();
        }
    }

    /// Sets up what had happened before `now`: nothing that happens at `now` itself is done.
    fn resume(&mut self, now: Nanos) {
        let p = self.p;
        let mut kept = 0;
        for i in 0..self.transfers.len() {
            let (t, queued) = (self.transfers[i], self.queued[i]);
            let source = p.tensors[t.tensor as usize].producer as usize;
            if self.start[source] == NEVER || self.end[source] >= now {
                continue;
            }
            if t.start >= now {
                let key = self.link_key(t.tensor, t.to, queued);
                self.link[t.from as usize * p.n_devices() + t.to as usize].waiting.push(Reverse((key, t.tensor)));
                continue;
            }
            self.transfers[kept] = t;
            self.queued[kept] = queued;
            self.announce(t.tensor, t.to, t.end);
            if t.end >= now {
                self.link[t.from as usize * p.n_devices() + t.to as usize].busy = true;
                self.events.push(Reverse((t.end, Done::Transfer(kept as u32))));
            } else {
                self.count_arrival(t.tensor, t.to, false);
            }
            kept += 1;
        }
        self.transfers.truncate(kept);
        self.queued.truncate(kept);
        for t in 0..p.n_tasks() {
            if self.start[t] >= now {
                (self.start[t], self.end[t]) = (NEVER, NEVER);
                continue;
            }
            p.outputs.row(t).iter().for_each(|&x| self.announce(x, self.device[t], self.end[t]));
            if self.end[t] >= now {
                self.devices[self.device[t] as usize].busy = true;
                self.events.push(Reverse((self.end[t], Done::Task(t as u32))));
            } else {
                self.makespan = self.makespan.max(self.end[t]);
                p.outputs.row(t).iter().for_each(|&x| self.count_arrival(x, self.device[t], false));
            }
        }
        let missing = &self.missing;
        self.coming.iter_mut().for_each(|d| d.retain(|c| missing[c.task as usize] > 0));
        for t in 0..p.n_tasks() {
            if self.missing[t] == 0 && self.start[t] == NEVER {
                self.make_ready(t as u32);
            }
        }
        for l in 0..self.link.len() {
            self.list(p.n_devices() + l);
        }
    }

    fn go(&mut self, now: Nanos, limit: Nanos) -> Option<Nanos> {
        self.start_listed(now, limit)?;
        while let Some(Reverse((now, done))) = self.events.pop() {
            self.finish(now, done);
            // All that ends at this instant is known before any device or link chooses.
            while self.events.peek().is_some_and(|Reverse((t, _))| *t == now) {
                let Some(Reverse((_, done))) = self.events.pop() else { break };
                self.finish(now, done);
            }
            self.start_listed(now, limit)?;
        }
        Some(self.makespan).filter(|m| *m < limit)
    }

    fn finish(&mut self, now: Nanos, done: Done) {
        let p = self.p;
        match done {
            Done::Task(task) => {
                let from = self.device[task as usize];
                self.devices[from as usize].busy = false;
                self.list(from as usize);
                self.makespan = self.makespan.max(now);
                for &x in p.outputs.row(task as usize) {
                    self.deliver(x, from, now);
                }
            }
            Done::Transfer(i) => {
                let t = self.transfers[i as usize];
                let link = t.from as usize * p.n_devices() + t.to as usize;
                self.link[link].busy = false;
                self.list(p.n_devices() + link);
                self.count_arrival(t.tensor, t.to, true);
            }
        }
    }

    /// Hands a new tensor to local tasks and puts it on the links to all other devices where it is needed.
    fn deliver(&mut self, x: u32, from: u32, now: Nanos) {
        let p = self.p;
        self.count_arrival(x, from, true);
        for &c in p.consumers.row(x as usize) {
            let to = self.device[c as usize];
            if to != from && self.seen[to as usize] != x {
                self.seen[to as usize] = x;
                let key = self.link_key(x, to, now);
                let link = from as usize * p.n_devices() + to as usize;
                self.link[link].waiting.push(Reverse((key, x)));
                self.list(p.n_devices() + link);
            }
        }
    }

    fn link_key(&self, x: u32, to: u32, now: Nanos) -> u64 {
        match self.links {
            LinkOrder::Fifo => now.0,
            LinkOrder::Urgent => {
                let there = self.p.consumers.row(x as usize).iter().filter(|&&c| self.device[c as usize] == to);
                there.map(|&c| self.key[c as usize]).min().unwrap_or(u64::MAX)
            }
        }
    }

    fn count_arrival(&mut self, x: u32, device: u32, wake: bool) {
        for &c in self.p.consumers.row(x as usize) {
            if self.device[c as usize] == device {
                self.missing[c as usize] -= 1;
                if wake && self.missing[c as usize] == 0 {
                    self.make_ready(c);
                }
            }
        }
    }

    /// It is known when a tensor will be on a device.
    fn announce(&mut self, x: u32, device: u32, at: Nanos) {
        if !self.is_patient {
            return;
        }
        for &c in self.p.consumers.row(x as usize) {
            let task = c as usize;
            if self.device[task] == device {
                self.unknown[task] -= 1;
                self.due[task] = self.due[task].max(at);
                if self.unknown[task] == 0 {
                    self.coming[device as usize].push(Coming { key: self.key[task], due: self.due[task], task: c });
                }
            }
        }
    }

    fn make_ready(&mut self, task: u32) {
        let d = self.device[task as usize] as usize;
        if self.is_patient {
            self.coming[d].retain(|c| c.task != task);
        }
        self.devices[d].waiting.push(Reverse((self.key[task as usize], task)));
        self.list(d);
    }

    /// Marks a device, or after all devices a link, for a look at the end of this instant.
    fn list(&mut self, resource: usize) {
        let n = self.p.n_devices();
        let listed =
            if resource < n { &mut self.devices[resource].listed } else { &mut self.link[resource - n].listed };
        if !std::mem::replace(listed, true) {
            self.look.push(resource);
        }
    }

    fn start_listed(&mut self, now: Nanos, limit: Nanos) -> Option<()> {
        let n = self.p.n_devices();
        // In a fixed order: what one starts another may wait for.
        self.look.sort_unstable_by(|a, b| b.cmp(a));
        while let Some(resource) = self.look.pop() {
            if resource < n {
                self.devices[resource].listed = false;
                self.start_task(resource, now, limit)?;
            } else {
                self.link[resource - n].listed = false;
                self.start_transfer(resource - n, now);
            }
        }
        Some(())
    }

    fn start_task(&mut self, device: usize, now: Nanos, limit: Nanos) -> Option<()> {
        if self.devices[device].busy {
            return Some(());
        }
        if let Some(task) = self.choose(device, now) {
            let end = now + self.p.cost(task as usize, device);
            if now + self.tail[task as usize] >= limit || end >= limit {
                return None;
            }
            if self.latest.get(task as usize).is_some_and(|l| now > *l) {
                return None;
            }
            self.devices[device].busy = true;
            self.n_started += 1;
            self.start[task as usize] = now;
            self.end[task as usize] = end;
            self.events.push(Reverse((end, Done::Task(task))));
            self.p.outputs.row(task as usize).iter().for_each(|&x| self.announce(x, device as u32, end));
        }
        Some(())
    }

    /// The task that an idle device starts now, if any.
    fn choose(&mut self, device: usize, now: Nanos) -> Option<u32> {
        if !self.is_patient || self.coming[device].is_empty() {
            return self.devices[device].waiting.pop().map(|Reverse((_, task))| task);
        }
        let mut passed: [Option<(u64, u32)>; MOST_LOOKS] = [None; MOST_LOOKS];
        let mut chosen = None;
        for slot in &mut passed {
            let Some(Reverse((key, task))) = self.devices[device].waiting.pop() else { break };
            if self.may_go(device, task, key, now) {
                chosen = Some(task);
                break;
            }
            *slot = Some((key, task));
        }
        self.devices[device].waiting.extend(passed.into_iter().flatten().map(Reverse));
        chosen
    }

    /// False when a more urgent task comes while this one would run, sooner than this one would have half done with it.
    fn may_go(&self, device: usize, task: u32, key: u64, now: Nanos) -> bool {
        let end = now + self.p.cost(task as usize, device);
        let is_hindered = |c: &Coming| c.key < key && c.due < end && c.due.0 - now.0.min(c.due.0) <= end.0 - c.due.0;
        !self.coming[device].iter().any(is_hindered)
    }

    fn start_transfer(&mut self, link: usize, now: Nanos) {
        if self.link[link].busy {
            return;
        }
        if let Some(Reverse((key, x))) = self.link[link].waiting.pop() {
            let (from, to) = (link / self.p.n_devices(), link % self.p.n_devices());
            let end = now + self.p.transfer(x as usize, from, to);
            self.link[link].busy = true;
            self.events.push(Reverse((end, Done::Transfer(self.transfers.len() as u32))));
            self.transfers.push(Transfer { tensor: x, from: from as u32, to: to as u32, start: now, end });
            self.announce(x, to as u32, end);
            self.queued.push(Nanos(if self.links == LinkOrder::Fifo { key } else { 0 }));
        }
    }
}

/// The timeline of one placement, from the start.
pub fn simulate(p: &Problem, device: &[u32], key: &[u64], links: LinkOrder) -> Timeline {
    let mut simulator = Simulator::new(p, links);
    simulator.run(device, key, Nanos::INFINITY);
    simulator.timeline()
}
