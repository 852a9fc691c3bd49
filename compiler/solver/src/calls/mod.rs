//! The "call" semantics of the dnn-partitioning problems (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
//! NeurIPS 2020, arXiv:2006.16423, sections 3 to 5): an accelerator runs its whole part of the graph as one call.
//!
//! A call begins when all that it needs from outside is ready in host memory. It copies each such tensor in once, runs its tasks one after the other,
//! copies each result that is needed outside out once, and only then anything of it is ready; nothing overlaps. From accelerator to accelerator a
//! tensor goes through the host, so it is paid for on both sides. Hosts pay for no copies. The constants of a call must fit on its accelerator;
//! hosts have no limit.
//!
//! - [`load`]: throughput of a stream of samples, the largest load of a device. Parts are contiguous: differences of nested ideals of the forward
//!   graph, every backward task with the forward tasks of its group (section 5.1).
//! - [`latency`]: time of one sample. One call for each accelerator, contiguous; tasks on hosts run as soon as they are ready, on as many hosts as
//!   that takes: the published program ignores the number of hosts.
//!
//! Accelerators are alike, and so are hosts.

mod contract;
mod ideals;
pub mod latency;
pub mod load;
mod nested;
#[cfg(test)]
mod tests;

use crate::problem::{Payload, Problem};
use crate::{Bytes, Nanos};

/// Why a problem has no call semantics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsuited {
    /// No device is an accelerator, that is, not of kind `cpu`.
    NoAccelerator,
    /// This task takes different times on two devices of the same kind, accelerator or host.
    Unlike(u32),
    /// The constants of this task's group fit on no accelerator, and no host can run it.
    NoDevice(u32),
}

/// A part of a graph that is never divided: tasks of a group, and what lies between them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Unit {
    /// Time of all its tasks on an accelerator; infinite where one cannot run there.
    accelerator: Nanos,
    /// On a host.
    host: Nanos,
    /// Resident bytes.
    bytes: u128,
    /// Tensors that it makes or uses and that other units make or use.
    tensors: Vec<u32>,
    /// Units that come before it in every contiguous order.
    before: Vec<u32>,
    /// Units that come after it.
    after: Vec<u32>,
    /// It costs nothing anywhere and nothing comes before it: it goes with the first that needs it.
    is_free: bool,
}

/// A tensor between units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Unit that makes it.
    producer: u32,
    /// Other units that use it, each once.
    consumers: Vec<u32>,
    /// Time of one copy between an accelerator and its host.
    copy: Nanos,
}

/// A problem under call semantics.
#[derive(Clone, Debug)]
pub struct Calls {
    units: Vec<Unit>,
    copied: Vec<Copied>,
    /// Unit of each task.
    unit_of: Vec<u32>,
    /// Accelerators and hosts, as devices of the problem.
    accelerators: Vec<u32>,
    hosts: Vec<u32>,
    memory: u128,
    /// Tasks in topological order.
    order: Vec<u32>,
    tasks: Vec<CallTask>,
}

/// A task as the order in time sees it.
#[derive(Clone, Debug)]
struct CallTask {
    /// Tasks that it waits for.
    inputs: Vec<u32>,
    accelerator: Nanos,
    host: Nanos,
    /// One copy of all its results.
    copy: Nanos,
}

/// A solved problem: devices of the tasks, the value, and what is known about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// Device of each task.
    pub device: Vec<u32>,
    /// The largest load of a device, or the latency.
    pub value: Nanos,
    /// No solution of its class is better.
    pub lower_bound: Nanos,
    /// Which bound that is: `ideals` for exhaustive search over nested ideals.
    pub bound: &'static str,
}

impl Calls {
    /// The units of a problem. `backward` tells which tasks are of the backward pass.
    pub fn new(p: &Problem, backward: &[bool]) -> Result<Calls, Unsuited> {
        let of =
            |is_host: bool| (0..p.n_devices()).filter(move |&d| p.devices[d].is_host == is_host);
        let (accelerators, hosts): (Vec<usize>, Vec<usize>) =
            (of(false).collect(), of(true).collect());
        let Some(&first) = accelerators.first() else {
            return Err(Unsuited::NoAccelerator);
        };
        for t in 0..p.n_tasks() {
            let alike = |devices: &[usize]| {
                devices
                    .windows(2)
                    .all(|w| p.cost(t, w[0]) == p.cost(t, w[1]))
            };
            if !alike(&accelerators) || !alike(&hosts) {
                return Err(Unsuited::Unlike(t as u32));
            }
        }
        let memory = accelerators
            .iter()
            .filter_map(|&d| p.devices[d].memory)
            .min();
        let memory = memory.map_or(u128::MAX, |m| u128::from(m.0));
        let fits_anyway = p
            .resident
            .iter()
            .chain(&p.constants)
            .map(|b| u128::from(b.0))
            .sum::<u128>()
            <= memory;
        let contracted = contract::contract(p, backward, fits_anyway);
        let mut calls = Calls {
            units: vec![Unit::default(); contracted.n_units],
            copied: Vec::new(),
            unit_of: contracted.unit_of,
            accelerators: accelerators.iter().map(|&d| d as u32).collect(),
            hosts: hosts.iter().map(|&d| d as u32).collect(),
            order: p.order.clone(),
            tasks: Vec::new(),
            memory: if fits_anyway { u128::MAX } else { memory },
        };
        calls.weigh(p, first, hosts.first().copied());
        calls.connect(p, first, hosts.first().copied());
        for (from, to) in contracted.edges {
            calls.units[from as usize].after.push(to);
            calls.units[to as usize].before.push(from);
        }
        calls.free_sources();
        let lost = |t: &u32| {
            let unit = &calls.units[calls.unit_of[*t as usize] as usize];
            (!unit.accelerator.is_finite() || unit.bytes > calls.memory) && !unit.host.is_finite()
        };
        match (0..p.n_tasks() as u32).find(lost) {
            Some(t) => Err(Unsuited::NoDevice(t)),
            None => Ok(calls),
        }
    }

    /// Times and constants of units.
    fn weigh(&mut self, p: &Problem, accelerator: usize, host: Option<usize>) {
        for t in 0..p.n_tasks() {
            let unit = &mut self.units[self.unit_of[t] as usize];
            unit.accelerator += p.cost(t, accelerator);
            unit.host += host.map_or(Nanos::INFINITY, |d| p.cost(t, d));
            unit.bytes += u128::from(p.resident[t].0);
            let constants = p
                .constants_of
                .row(t)
                .iter()
                .map(|&c| u128::from(p.constants[c as usize].0));
            unit.bytes += constants.sum::<u128>();
        }
    }

    /// Tensors between units.
    fn connect(&mut self, p: &Problem, accelerator: usize, host: Option<usize>) {
        let other = host
            .or(self.accelerators.get(1).map(|&d| d as usize))
            .unwrap_or(accelerator);
        let copy = |x: usize| match p.tensors[x].payload {
            Payload::HostCopy(time) => time,
            Payload::Bytes(Bytes(_)) => p.transfer(x, accelerator, other),
        };
        let task = |t: usize| CallTask {
            inputs: p.predecessors(t).collect(),
            accelerator: p.cost(t, accelerator),
            host: host.map_or(Nanos::INFINITY, |d| p.cost(t, d)),
            copy: p.outputs.row(t).iter().map(|&x| copy(x as usize)).sum(),
        };
        self.tasks = (0..p.n_tasks()).map(task).collect();
        for (x, tensor) in p.tensors.iter().enumerate() {
            let producer = self.unit_of[tensor.producer as usize];
            let mut consumers: Vec<u32> = p
                .consumers
                .row(x)
                .iter()
                .map(|&c| self.unit_of[c as usize])
                .collect();
            consumers.sort_unstable();
            consumers.dedup();
            consumers.retain(|&c| c != producer);
            if consumers.is_empty() {
                continue;
            }
            let index = self.copied.len() as u32;
            consumers
                .iter()
                .chain([&producer])
                .for_each(|&u| self.units[u as usize].tensors.push(index));
            self.copied.push(Copied {
                producer,
                consumers,
                copy: copy(x),
            });
        }
    }

    /// Finds units that are free, and takes them from the way of others.
    fn free_sources(&mut self) {
        for u in 0..self.units.len() {
            let unit = &self.units[u];
            let idle = unit.accelerator == Nanos::ZERO && unit.host == Nanos::ZERO;
            let light = unit.bytes == 0 || self.memory == u128::MAX;
            let copies = unit
                .tensors
                .iter()
                .any(|&x| self.copied[x as usize].copy > Nanos::ZERO);
            if idle && light && !copies && unit.before.is_empty() {
                self.units[u].is_free = true;
                for v in self.units[u].after.clone() {
                    self.units[v as usize].before.retain(|&w| w as usize != u);
                }
            }
        }
    }

    /// Units that are not free, in topological order.
    fn bound_units(&self) -> Vec<u32> {
        (0..self.units.len() as u32)
            .filter(|&u| !self.units[u as usize].is_free)
            .collect()
    }

    /// Device of each unit from slices in order; a free unit goes with the first slice that needs it.
    fn of_slices(&self, slices: &[(u32, Vec<u32>)]) -> Vec<u32> {
        let mut of_unit = vec![u32::MAX; self.units.len()];
        for (device, units) in slices {
            units.iter().for_each(|&u| of_unit[u as usize] = *device);
        }
        for u in (0..self.units.len())
            .rev()
            .filter(|&u| self.units[u].is_free)
        {
            let needs = |s: &&(u32, Vec<u32>)| s.1.iter().any(|v| self.units[u].after.contains(v));
            of_unit[u] = slices
                .iter()
                .find(needs)
                .map_or(self.accelerators[0], |s| s.0);
        }
        of_unit
    }

    /// Copies that a call makes of a tensor, in and out; `inside` tells which units are in the call.
    fn copy_time(&self, x: u32, inside: impl Fn(u32) -> bool) -> Nanos {
        let copied = &self.copied[x as usize];
        let made_inside = inside(copied.producer);
        let crosses = copied.consumers.iter().any(|&c| inside(c) != made_inside);
        if crosses { copied.copy } else { Nanos::ZERO }
    }

    /// Devices of tasks from those of units.
    fn devices(&self, of_unit: &[u32]) -> Vec<u32> {
        self.unit_of.iter().map(|&u| of_unit[u as usize]).collect()
    }

    /// The largest load of a device when units run on `of_unit`, devices of the problem: an accelerator pays for its copies, a host does not. `None` when
    /// an accelerator is over its memory or a unit is where it cannot run.
    pub(crate) fn largest_load(&self, of_unit: &[u32]) -> Option<Nanos> {
        let n = self
            .accelerators
            .iter()
            .chain(&self.hosts)
            .map(|&d| d as usize + 1)
            .max()?;
        let (mut load, mut bytes) = (vec![Nanos::ZERO; n], vec![0u128; n]);
        for (u, unit) in self.units.iter().enumerate() {
            let d = of_unit[u] as usize;
            load[d] += if self.hosts.contains(&(d as u32)) {
                unit.host
            } else {
                unit.accelerator
            };
            bytes[d] += unit.bytes;
        }
        for x in 0..self.copied.len() as u32 {
            for &d in &self.accelerators {
                load[d as usize] += self.copy_time(x, |u| of_unit[u as usize] == d);
            }
        }
        let fits = self
            .accelerators
            .iter()
            .all(|&d| bytes[d as usize] <= self.memory);
        let most = load.into_iter().max()?;
        (fits && most.is_finite()).then_some(most)
    }
}
