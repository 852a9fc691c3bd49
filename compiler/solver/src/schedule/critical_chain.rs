//! The critical chain: back from the end, the cause of each step's start.

use crate::Nanos;
use crate::problem::Problem;
use crate::schedule::timeline::Timeline;
use std::collections::{BTreeMap, BTreeSet};

/// A task, or a transfer by its index in the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// A task.
    Task(u32),
    /// A transfer.
    Transfer(u32),
}

/// Why a step of the chain did not start earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It starts at 0.
    Nothing,
    /// Its operand was being made.
    Operand,
    /// Its operand was on its way.
    Transfer,
    /// Its device or link was busy with the step before.
    Busy,
    /// It waited for memory, or for its turn, after the step before had ended.
    Held,
}

/// The chain, its first step first.
pub struct Chain {
    /// Each step, and why it did not start earlier.
    pub steps: Vec<(Step, Wait)>,
}

impl Chain {
    /// Tasks of the chain, in order.
    pub fn tasks(&self) -> impl Iterator<Item = u32> + '_ {
        self.steps.iter().filter_map(|(s, _)| {
            if let Step::Task(t) = s {
                Some(*t)
            } else {
                None
            }
        })
    }

    /// Transfers of the chain, in order.
    pub fn transfers(&self) -> impl Iterator<Item = u32> + '_ {
        self.steps.iter().filter_map(|(s, _)| {
            if let Step::Transfer(i) = s {
                Some(*i)
            } else {
                None
            }
        })
    }
}

/// Steps by resource and end.
struct Ends<'a> {
    p: &'a Problem,
    t: &'a Timeline,
    devices: Vec<Vec<(Nanos, u32)>>,
    links: BTreeMap<(u32, u32), Vec<(Nanos, u32)>>,
    arrival: BTreeMap<(u32, u32), u32>,
}

/// The chain of causes of the timeline's end.
pub fn critical_chain(p: &Problem, t: &Timeline) -> Chain {
    let ends = Ends::new(p, t);
    let last = (0..p.n_tasks() as u32).max_by_key(|&i| (t.end[i as usize], std::cmp::Reverse(i)));
    let mut current = last.map(Step::Task);
    let mut seen: BTreeSet<Step> = BTreeSet::new();
    let mut steps = Vec::new();
    // Steps of no length could wait for each other in a cycle.
    while let Some(step) = current.filter(|step| seen.insert(*step)) {
        let (before, wait) = ends.cause(step);
        steps.push((step, wait));
        current = before;
    }
    steps.reverse();
    Chain { steps }
}

impl<'a> Ends<'a> {
    fn new(p: &'a Problem, t: &'a Timeline) -> Ends<'a> {
        let mut devices = vec![Vec::new(); p.n_devices()];
        (0..p.n_tasks()).for_each(|i| devices[t.device[i] as usize].push((t.end[i], i as u32)));
        let mut links: BTreeMap<(u32, u32), Vec<(Nanos, u32)>> = BTreeMap::new();
        let mut arrival = BTreeMap::new();
        for (i, x) in t.transfers.iter().enumerate() {
            links
                .entry((x.from, x.to))
                .or_default()
                .push((x.end, i as u32));
            arrival.insert((x.tensor, x.to), i as u32);
        }
        devices.iter_mut().for_each(|d| d.sort_unstable());
        links.values_mut().for_each(|l| l.sort_unstable());
        Ends {
            p,
            t,
            devices,
            links,
            arrival,
        }
    }

    fn cause(&self, step: Step) -> (Option<Step>, Wait) {
        match step {
            Step::Task(i) => self.cause_of_task(i as usize, self.t.start[i as usize]),
            Step::Transfer(i) => self.cause_of_transfer(i),
        }
    }

    /// The operand that came last, if the task started when it was there; else the step before on
    /// its device.
    fn cause_of_task(&self, task: usize, start: Nanos) -> (Option<Step>, Wait) {
        let (p, t) = (self.p, self.t);
        if start == Nanos::ZERO {
            return (None, Wait::Nothing);
        }
        let device = t.device[task];
        let operand = |&x: &u32| {
            let maker = p.tensors[x as usize].producer;
            match self.arrival.get(&(x, device)) {
                Some(&i) if t.device[maker as usize] != device => (
                    t.transfers[i as usize].end,
                    Step::Transfer(i),
                    Wait::Transfer,
                ),
                _ => (t.end[maker as usize], Step::Task(maker), Wait::Operand),
            }
        };
        let latest = p
            .inputs
            .row(task)
            .iter()
            .map(operand)
            .max_by_key(|o| (o.0, std::cmp::Reverse(o.1)));
        let before = ended(&self.devices[device as usize], start, |i| {
            i as usize != task && t.start[i as usize] < start
        });
        let before = before.map(|(end, i)| (end, Step::Task(i), Wait::Busy));
        self.pick(start, latest, before)
    }

    fn cause_of_transfer(&self, i: u32) -> (Option<Step>, Wait) {
        let t = self.t;
        let x = t.transfers[i as usize];
        let maker = self.p.tensors[x.tensor as usize].producer;
        let operand = Some((t.end[maker as usize], Step::Task(maker), Wait::Operand));
        let earlier = |j: u32| j != i && t.transfers[j as usize].start < x.start;
        let before = self
            .links
            .get(&(x.from, x.to))
            .and_then(|l| ended(l, x.start, earlier));
        self.pick(
            x.start,
            operand,
            before.map(|(end, j)| (end, Step::Transfer(j), Wait::Busy)),
        )
    }

    /// Of the operand and the step before on the same device or link the one that ended last,
    /// operands first.
    fn pick(
        &self,
        start: Nanos,
        operand: Option<(Nanos, Step, Wait)>,
        before: Option<(Nanos, Step, Wait)>,
    ) -> (Option<Step>, Wait) {
        let latest = match (operand, before) {
            (Some(o), Some(b)) => Some(if b.0 > o.0 { b } else { o }),
            (o, b) => o.or(b),
        };
        match latest {
            None => (None, Wait::Held),
            Some((end, step, wait)) => (Some(step), if end == start { wait } else { Wait::Held }),
        }
    }
}

/// The last of the sorted steps that ended by `start` and fits.
fn ended(steps: &[(Nanos, u32)], start: Nanos, fits: impl Fn(u32) -> bool) -> Option<(Nanos, u32)> {
    let n = steps.partition_point(|e| e.0 <= start);
    steps[..n].iter().rev().find(|e| fits(e.1)).copied()
}
