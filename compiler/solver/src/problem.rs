//! The bare placement problem: tasks with a time on each device, tensors between them, groups that
//! stay together, links, memory limits.
//!
//! The compiler makes one from a graph of clusters or from a task-graph file. Tasks, tensors,
//! groups and devices are dense indices.

use crate::rows::Rows;
use crate::{Bytes, LinkProfile, Nanos};

/// A device, as the solver sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Most bytes that it may hold at a time.
    pub memory: Option<Bytes>,
    /// True for host memory, false for an accelerator: a tensor with a host copy time pays it once
    /// for each accelerator at an end of its way.
    pub is_host: bool,
}

/// Duration of a tensor's transfer over a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Latency and bandwidth of the link.
    Bytes(Bytes),
    /// One copy between an accelerator and its host, whatever the link; between two accelerators
    /// two copies.
    HostCopy(Nanos),
}

/// A tensor, or an ordering edge of no bytes, from one task to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Task that makes it.
    pub producer: u32,
    /// Cost of a transfer.
    pub payload: Payload,
}

impl Tensor {
    /// Its size in memory; zero for a tensor with a host copy time, as its size is unknown.
    pub fn bytes(&self) -> Bytes {
        match self.payload {
            Payload::Bytes(bytes) => bytes,
            Payload::HostCopy(_) => Bytes::ZERO,
        }
    }
}

/// The link of each ordered pair of devices; equal links share a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Links {
    n_devices: usize,
    class: Vec<u32>,
    classes: Vec<LinkProfile>,
}

impl Links {
    /// The same link between all devices.
    pub fn uniform(n_devices: usize, link: LinkProfile) -> Links {
        Links {
            n_devices,
            class: vec![0; n_devices * n_devices],
            classes: vec![link],
        }
    }

    /// Sets the link from one device to another.
    pub fn set(&mut self, from: usize, to: usize, link: LinkProfile) {
        let known = self.classes.iter().position(|c| *c == link);
        let class = known.unwrap_or_else(|| {
            self.classes.push(link);
            self.classes.len() - 1
        });
        self.class[from * self.n_devices + to] = class as u32;
    }

    /// Each distinct link with the number of ordered pairs of different devices that it joins.
    pub fn count_classes(&self) -> Vec<(LinkProfile, usize)> {
        let mut counts: Vec<(LinkProfile, usize)> = self.classes.iter().map(|c| (*c, 0)).collect();
        let apart = |i: &usize| i / self.n_devices != i % self.n_devices;
        (0..self.class.len())
            .filter(apart)
            .for_each(|i| counts[self.class[i] as usize].1 += 1);
        counts
    }

    /// The same pairs of devices with other links.
    pub fn map(&self, change: impl Fn(LinkProfile) -> LinkProfile) -> Links {
        Links {
            classes: self.classes.iter().map(|c| change(*c)).collect(),
            ..self.clone()
        }
    }

    /// The link from one device to another.
    pub fn get(&self, from: usize, to: usize) -> LinkProfile {
        self.classes[self.class[from * self.n_devices + to] as usize]
    }
}

/// Why tasks do not make a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// These tasks wait for each other in a cycle.
    Cycle(Vec<u32>),
    /// No device can run this task.
    NoDevice(u32),
    /// These tasks must be on one device, but none can run all of them.
    Group(Vec<u32>),
}

/// A task as it is put into a problem.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Task {
    /// Time on each device; infinite where it may not run.
    pub cost: Vec<Nanos>,
    /// Bytes that its device holds for the whole step on its account.
    pub resident: Bytes,
    /// Constants that its device holds for the whole step, each once for all tasks that use it
    /// there: indices into [`Parts::constants`].
    pub constants: Vec<u32>,
    /// Bytes of results that no task waits for, held while it runs.
    pub scratch: Bytes,
    /// Tasks of the same group run on one device.
    pub group: Option<u32>,
    /// It only moves data: the simple placer keeps it with its operand.
    pub is_view: bool,
}

/// All that a problem is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// The devices.
    pub devices: Vec<Device>,
    /// Their links.
    pub links: Links,
    /// The tasks, in any order.
    pub tasks: Vec<Task>,
    /// Tensors with the tasks that wait for them, each once.
    pub tensors: Vec<(Tensor, Vec<u32>)>,
    /// Sizes of the shared constants.
    pub constants: Vec<Bytes>,
}

/// A checked placement problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The devices.
    pub devices: Vec<Device>,
    /// Their links.
    pub links: Links,
    /// Tensors; those that nobody waits for are kept for their memory.
    pub tensors: Vec<Tensor>,
    /// Tasks that wait for a tensor.
    pub consumers: Rows,
    /// Tensors that a task waits for.
    pub inputs: Rows,
    /// Tensors that a task makes.
    pub outputs: Rows,
    /// Tasks of a group, in topological order.
    pub members: Rows,
    /// Group of each task; a task without a group has one of its own.
    pub group_of: Vec<u32>,
    /// Tasks in a topological order.
    pub order: Vec<u32>,
    /// Bytes held for the whole step by the device of a task.
    pub resident: Vec<Bytes>,
    /// Shared constants of each task.
    pub constants_of: Rows,
    /// Their sizes.
    pub constants: Vec<Bytes>,
    /// Results that no task waits for.
    pub scratch: Vec<Bytes>,
    /// Tasks that only move data.
    pub is_view: Vec<bool>,
    cost: Vec<Nanos>,
}

impl Problem {
    /// Checks and indexes the parts. The devices of a group are narrowed to those on which all its
    /// tasks can run.
    pub fn new(parts: Parts) -> Result<Problem, Refused> {
        let (n, n_devices) = (parts.tasks.len(), parts.devices.len());
        let tensors = parts.tensors.iter().zip(0u32..);
        let waits: Vec<(u32, u32)> = tensors
            .flat_map(|((_, consumers), x)| consumers.iter().map(move |&c| (x, c)))
            .collect();
        let made = parts.tensors.iter().map(|(t, _)| t.producer).zip(0u32..);
        let tasks = parts.tasks.iter().zip(0u32..);
        let uses = tasks.flat_map(|(task, t)| task.constants.iter().map(move |&c| (t, c)));
        let (group_of, n_groups) = dense_groups(&parts.tasks);
        let costs = parts.tasks.iter().flat_map(|t| t.cost.iter().copied());
        let mut p = Problem {
            consumers: Rows::from_pairs(parts.tensors.len(), waits.iter().copied()),
            inputs: Rows::from_pairs(n, waits.iter().map(|&(x, c)| (c, x))),
            outputs: Rows::from_pairs(n, made),
            members: Rows::default(),
            order: Vec::new(),
            resident: parts.tasks.iter().map(|t| t.resident).collect(),
            constants_of: Rows::from_pairs(n, uses),
            constants: parts.constants,
            scratch: parts.tasks.iter().map(|t| t.scratch).collect(),
            is_view: parts.tasks.iter().map(|t| t.is_view).collect(),
            cost: costs.collect(),
            tensors: parts.tensors.into_iter().map(|(t, _)| t).collect(),
            devices: parts.devices,
            links: parts.links,
            group_of,
        };
        debug_assert_eq!(p.cost.len(), n * n_devices);
        p.order = p.topological_order()?;
        let members = p.order.iter().map(|&t| (p.group_of[t as usize], t));
        p.members = Rows::from_pairs(n_groups, members);
        p.narrow_groups()?;
        Ok(p)
    }

    /// True if a device has a memory limit.
    pub fn is_limited(&self) -> bool {
        self.devices.iter().any(|d| d.memory.is_some())
    }

    /// The parts of the problem, groups as narrow as they are.
    pub fn parts(&self) -> Parts {
        let task = |t: usize| Task {
            cost: self.costs(t).to_vec(),
            resident: self.resident[t],
            constants: self.constants_of.row(t).to_vec(),
            scratch: self.scratch[t],
            group: Some(self.group_of[t]).filter(|&g| self.members.row(g as usize).len() > 1),
            is_view: self.is_view[t],
        };
        let tensors = self
            .tensors
            .iter()
            .enumerate()
            .map(|(x, t)| (*t, self.consumers.row(x).to_vec()));
        Parts {
            devices: self.devices.clone(),
            links: self.links.clone(),
            tasks: (0..self.n_tasks()).map(task).collect(),
            tensors: tensors.collect(),
            constants: self.constants.clone(),
        }
    }

    /// Number of tasks.
    pub fn n_tasks(&self) -> usize {
        self.group_of.len()
    }

    /// Number of devices.
    pub fn n_devices(&self) -> usize {
        self.devices.len()
    }

    /// Number of groups.
    pub fn n_groups(&self) -> usize {
        self.group_of
            .iter()
            .map(|&g| g as usize + 1)
            .max()
            .unwrap_or(0)
    }

    /// Time of a task on a device; infinite where it may not run.
    pub fn cost(&self, task: usize, device: usize) -> Nanos {
        self.cost[task * self.devices.len() + device]
    }

    /// Times of a task on all devices.
    pub fn costs(&self, task: usize) -> &[Nanos] {
        &self.cost[task * self.devices.len()..][..self.devices.len()]
    }

    /// Devices that a task may be on. Every task has one.
    pub fn feasible(&self, task: usize) -> impl Iterator<Item = usize> + '_ {
        self.costs(task)
            .iter()
            .enumerate()
            .filter(|(_, c)| c.is_finite())
            .map(|(d, _)| d)
    }

    /// First device of a task.
    pub fn first_device(&self, task: usize) -> usize {
        self.feasible(task)
            .next()
            .expect("a task without a device is refused when the problem is made")
    }

    /// Least time of a task over its devices.
    pub fn least_cost(&self, task: usize) -> Nanos {
        self.costs(task)
            .iter()
            .copied()
            .min()
            .unwrap_or(Nanos::INFINITY)
    }

    /// Time of a tensor over the idle link between two devices; nothing between a device and
    /// itself.
    pub fn transfer(&self, tensor: usize, from: usize, to: usize) -> Nanos {
        if from == to {
            return Nanos::ZERO;
        }
        match self.tensors[tensor].payload {
            Payload::Bytes(bytes) => self.links.get(from, to).transfer(bytes),
            Payload::HostCopy(time) => time.times(
                u64::from(!self.devices[from].is_host) + u64::from(!self.devices[to].is_host),
            ),
        }
    }

    /// Tasks that wait for results of `task`; one that waits for two of them comes twice.
    pub fn successors(&self, task: usize) -> impl Iterator<Item = u32> + '_ {
        self.outputs
            .row(task)
            .iter()
            .flat_map(|&x| self.consumers.row(x as usize).iter().copied())
    }

    /// Tasks whose results `task` waits for.
    pub fn predecessors(&self, task: usize) -> impl Iterator<Item = u32> + '_ {
        self.inputs
            .row(task)
            .iter()
            .map(|&x| self.tensors[x as usize].producer)
    }

    /// The problem with these devices alone, numbered in this order. Errors with the first task
    /// that none of them can run.
    pub fn only(&self, devices: &[usize]) -> Result<Problem, usize> {
        let n = self.devices.len();
        let lost = |t: &usize| devices.iter().all(|&d| !self.cost(*t, d).is_finite());
        if let Some(task) = (0..self.n_tasks()).find(lost) {
            return Err(task);
        }
        let pairs = devices
            .iter()
            .flat_map(|&a| devices.iter().map(move |&b| a * n + b));
        let class = pairs.map(|ab| self.links.class[ab]).collect();
        let links = Links {
            n_devices: devices.len(),
            class,
            classes: self.links.classes.clone(),
        };
        let cost = (0..self.n_tasks())
            .flat_map(|t| devices.iter().map(move |&d| self.cost(t, d)))
            .collect();
        Ok(Problem {
            devices: devices.iter().map(|&d| self.devices[d].clone()).collect(),
            links,
            cost,
            ..self.clone()
        })
    }

    /// Lets a task run on these devices only.
    pub fn restrict(&mut self, task: usize, allowed: impl Fn(usize) -> bool) {
        let n = self.devices.len();
        for d in (0..n).filter(|&d| !allowed(d)) {
            self.cost[task * n + d] = Nanos::INFINITY;
        }
    }

    /// Kahn's algorithm, first task first.
    fn topological_order(&self) -> Result<Vec<u32>, Refused> {
        let n = self.n_tasks();
        let mut waiting: Vec<u32> = (0..n).map(|t| self.inputs.row(t).len() as u32).collect();
        let mut order: Vec<u32> = (0..n as u32)
            .filter(|&t| waiting[t as usize] == 0)
            .collect();
        let mut next = 0;
        while next < order.len() {
            for c in self.successors(order[next] as usize) {
                waiting[c as usize] -= 1;
                if waiting[c as usize] == 0 {
                    order.push(c);
                }
            }
            next += 1;
        }
        if order.len() == n {
            Ok(order)
        } else {
            Err(Refused::Cycle(self.ring(&waiting)))
        }
    }

    /// A cycle among the tasks that still wait: go back along tasks that wait until one comes
    /// again.
    fn ring(&self, waiting: &[u32]) -> Vec<u32> {
        let stuck = |t: u32| waiting[t as usize] > 0;
        let mut way: Vec<u32> = (0..waiting.len() as u32)
            .find(|&t| stuck(t))
            .into_iter()
            .collect();
        let mut at: Vec<usize> = vec![usize::MAX; waiting.len()];
        while let Some(&t) = way.last() {
            if at[t as usize] != usize::MAX {
                let mut ring = way.split_off(at[t as usize]);
                ring.pop();
                ring.reverse();
                return ring;
            }
            at[t as usize] = way.len() - 1;
            way.extend(self.predecessors(t as usize).find(|&q| stuck(q)));
        }
        Vec::new()
    }

    fn narrow_groups(&mut self) -> Result<(), Refused> {
        let n = self.devices.len();
        for group in 0..self.n_groups() {
            let members: Vec<u32> = self.members.row(group).to_vec();
            if let Some(&t) = members
                .iter()
                .find(|&&t| self.costs(t as usize).iter().all(|c| !c.is_finite()))
            {
                return Err(Refused::NoDevice(t));
            }
            let common: Vec<bool> = (0..n)
                .map(|d| {
                    members
                        .iter()
                        .all(|&t| self.cost(t as usize, d).is_finite())
                })
                .collect();
            if !common.contains(&true) {
                return Err(Refused::Group(members));
            }
            members
                .iter()
                .for_each(|&t| self.restrict(t as usize, |d| common[d]));
        }
        Ok(())
    }
}

/// Groups renumbered without holes in order of their first task; a task without one gets its own.
fn dense_groups(tasks: &[Task]) -> (Vec<u32>, usize) {
    let mut dense = std::collections::BTreeMap::new();
    let mut n = 0u32;
    let mut fresh = || {
        n += 1;
        n - 1
    };
    let of = |t: &Task| match t.group {
        Some(group) => *dense.entry(group).or_insert_with(&mut fresh),
        None => fresh(),
    };
    let groups = tasks.iter().map(of).collect();
    (groups, n as usize)
}
