//! The critical chain: back from the end, what each step waited for.

use super::Subject;
use crate::cost::Nanos;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A task, or a transfer by its index in the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Task(u32),
    Transfer(u32),
}

/// Why a step of the chain did not start earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
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

/// A link of the chain, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChainStep {
    /// `task` or `transfer`.
    pub kind: &'static str,
    /// Task, or maker of the tensor.
    pub name: String,
    /// Device, or source and destination of a transfer.
    pub place: String,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// Why it did not start earlier.
    pub waited_for: String,
}

/// The chain, its first step first.
pub(super) struct Chain {
    steps: Vec<(Step, Wait)>,
}

impl Chain {
    /// Tasks of the chain, in order.
    pub fn tasks(&self) -> impl Iterator<Item = u32> + '_ {
        self.steps.iter().filter_map(|(s, _)| if let Step::Task(t) = s { Some(*t) } else { None })
    }

    /// Transfers of the chain, in order.
    pub fn transfers(&self) -> impl Iterator<Item = u32> + '_ {
        self.steps.iter().filter_map(|(s, _)| if let Step::Transfer(i) = s { Some(*i) } else { None })
    }
}

/// Steps by what they occupy and when they end.
struct Ends<'a> {
    s: &'a Subject<'a>,
    devices: Vec<Vec<(Nanos, u32)>>,
    links: BTreeMap<(u32, u32), Vec<(Nanos, u32)>>,
    arrival: BTreeMap<(u32, u32), u32>,
}

/// What the end of the timeline waited for.
pub(super) fn critical_chain(s: &Subject) -> Chain {
    let t = &s.solution.timeline;
    let ends = Ends::new(s);
    let last = (0..s.problem.n_tasks() as u32).max_by_key(|&i| (t.end[i as usize], std::cmp::Reverse(i)));
    let mut current = last.map(Step::Task);
    let mut seen: BTreeSet<Step> = BTreeSet::new();
    let mut steps = Vec::new();
    // Steps of no length could wait for each other in a ring.
    while let Some(step) = current.filter(|step| seen.insert(*step)) {
        let (before, wait) = ends.cause(step);
        steps.push((step, wait));
        current = before;
    }
    steps.reverse();
    Chain { steps }
}

/// The chain in words.
pub(super) fn describe(s: &Subject, chain: &Chain) -> Vec<ChainStep> {
    let t = &s.solution.timeline;
    let name = |step: Step| match step {
        Step::Task(i) => s.tasks[i as usize].name.clone(),
        Step::Transfer(i) => s.maker(t.transfers[i as usize].tensor).to_owned(),
    };
    let mut before: Option<Step> = None;
    let mut out = Vec::with_capacity(chain.steps.len());
    for &(step, wait) in &chain.steps {
        let (kind, place, start, end) = match step {
            Step::Task(i) => {
                let i = i as usize;
                ("task", s.device_of(i).to_owned(), t.start[i], t.end[i])
            }
            Step::Transfer(i) => {
                let x = t.transfers[i as usize];
                let place = format!("{} -> {}", s.devices[x.from as usize], s.devices[x.to as usize]);
                ("transfer", place, x.start, x.end)
            }
        };
        let earlier = before.map(name).unwrap_or_default();
        let waited_for = match wait {
            Wait::Nothing => "nothing".to_owned(),
            Wait::Operand => format!("operand {earlier}"),
            Wait::Transfer => format!("transfer of {earlier}"),
            Wait::Busy if kind == "task" => format!("{place}, busy with {earlier}"),
            Wait::Busy => format!("the link, busy with {earlier}"),
            Wait::Held => format!("its turn or memory, after {earlier}"),
        };
        out.push(ChainStep { kind, name: name(step), place, start_ns: start.0, end_ns: end.0, waited_for });
        before = Some(step);
    }
    out
}

impl<'a> Ends<'a> {
    fn new(s: &'a Subject<'a>) -> Ends<'a> {
        let t = &s.solution.timeline;
        let mut devices = vec![Vec::new(); s.problem.n_devices()];
        (0..s.problem.n_tasks()).for_each(|i| devices[t.device[i] as usize].push((t.end[i], i as u32)));
        let mut links: BTreeMap<(u32, u32), Vec<(Nanos, u32)>> = BTreeMap::new();
        let mut arrival = BTreeMap::new();
        for (i, x) in t.transfers.iter().enumerate() {
            links.entry((x.from, x.to)).or_default().push((x.end, i as u32));
            arrival.insert((x.tensor, x.to), i as u32);
        }
        devices.iter_mut().for_each(|d| d.sort_unstable());
        links.values_mut().for_each(|l| l.sort_unstable());
        Ends { s, devices, links, arrival }
    }

    fn cause(&self, step: Step) -> (Option<Step>, Wait) {
        let t = &self.s.solution.timeline;
        match step {
            Step::Task(i) => self.cause_of_task(i as usize, t.start[i as usize]),
            Step::Transfer(i) => self.cause_of_transfer(i),
        }
    }

    /// The operand that came last, if the task started when it was there; else what its device did before.
    fn cause_of_task(&self, task: usize, start: Nanos) -> (Option<Step>, Wait) {
        let (p, t) = (self.s.problem, &self.s.solution.timeline);
        if start == Nanos::ZERO {
            return (None, Wait::Nothing);
        }
        let device = t.device[task];
        let operand = |&x: &u32| {
            let maker = p.tensors[x as usize].producer;
            match self.arrival.get(&(x, device)) {
                Some(&i) if t.device[maker as usize] != device => {
                    (t.transfers[i as usize].end, Step::Transfer(i), Wait::Transfer)
                }
                _ => (t.end[maker as usize], Step::Task(maker), Wait::Operand),
            }
        };
        let latest = p.inputs.row(task).iter().map(operand).max_by_key(|o| (o.0, std::cmp::Reverse(o.1)));
        let before =
            ended(&self.devices[device as usize], start, |i| i as usize != task && t.start[i as usize] < start);
        let before = before.map(|(end, i)| (end, Step::Task(i), Wait::Busy));
        self.pick(start, latest, before)
    }

    fn cause_of_transfer(&self, i: u32) -> (Option<Step>, Wait) {
        let t = &self.s.solution.timeline;
        let x = t.transfers[i as usize];
        let maker = self.s.problem.tensors[x.tensor as usize].producer;
        let operand = Some((t.end[maker as usize], Step::Task(maker), Wait::Operand));
        let earlier = |j: u32| j != i && t.transfers[j as usize].start < x.start;
        let before = self.links.get(&(x.from, x.to)).and_then(|l| ended(l, x.start, earlier));
        self.pick(x.start, operand, before.map(|(end, j)| (end, Step::Transfer(j), Wait::Busy)))
    }

    /// Of the operand and the step before on the same device or link the one that ended last, operands first.
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
