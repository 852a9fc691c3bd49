//! The second half of the search where memory is short: devices are chosen, and schedules are built
//! in order of time.
//!
//! At each instant some of the tasks and transfers that could start do, the others wait until
//! something ends. Some best schedule is of this kind: one in which nothing can start earlier while
//! all else stays, for a start waits for an operand, its device or link, or memory, and each of
//! them comes when something ends. Three rules cut branches, each in favour of one that was looked
//! at before: an operation that was passed over must not start before another took its place or
//! memory there; operations that start at one instant do so in one order; and a state is left when
//! the same had been started no later before.

use super::order::Outcome;
use super::tables::Dense;
use super::tables::before;
use crate::Nanos;
use crate::problem::Problem;
use crate::schedule::timeline::{Timeline, Transfer};
use std::collections::HashMap;

/// Tasks and transfers that a search can tell apart.
const MOST_OPS: usize = 128;
/// States kept to compare with.
const MOST_STATES: usize = 200_000;

/// A set of operations.
type Set = u128;

/// A task or a transfer.
#[derive(Debug, Default)]
struct Op {
    /// Task, or tensor with source and destination.
    what: What,
    length: u64,
    /// Its device or link.
    resource: usize,
    /// Operations that it waits for.
    after: Set,
    /// Time from its start to the end of all, at least.
    tail: u64,
    /// Holds that it begins.
    begins: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Task(u32),
    Transfer(u32, u32, u32),
}

impl Default for What {
    fn default() -> What {
        What::Task(0)
    }
}

/// Bytes that a device holds from the start of one operation until all its users have ended.
#[derive(Debug)]
struct Hold {
    device: usize,
    bytes: u128,
    users: Set,
}

/// A search of the schedules of one placement.
#[derive(Debug)]
pub(super) struct Timed {
    n_devices: usize,
    device: Vec<u32>,
    /// Longest tails first.
    ops: Vec<Op>,
    holds: Vec<Hold>,
    /// Bytes that each device may hold beside its holdings of the whole step.
    room: Vec<u128>,
    /// Operations of each resource.
    of_resource: Vec<Set>,
    /// Operations that take memory of each device.
    of_memory: Vec<Set>,
    /// Nothing takes no time: then memory is never short for an instant only.
    is_strict: bool,
    unit: u64,
    /// Times of the operations that have started.
    start: Vec<u64>,
    limit: u64,
    best: Option<Vec<u64>>,
    open: Option<u64>,
    /// States that were searched to the end: for each set of started operations the time, and the
    /// ends of those still running.
    seen: HashMap<Set, Vec<State>>,
    n_states: usize,
}

#[derive(Clone, Debug)]
struct State {
    now: u64,
    running: Vec<(usize, u64)>,
}

/// The state that changes on the way down.
#[derive(Clone, Copy, Debug)]
struct At {
    now: u64,
    started: Set,
    ended: Set,
    /// Passed over when they could have started, with nothing since that took their place.
    passed: Set,
    /// Operations before this one do not start at this instant any more.
    first: usize,
    bound: u64,
}

impl Timed {
    /// The operations of a placement. `None` when there are too many, or when all of it fits in
    /// whatever order, so that memory does not matter; `Full` when a device cannot even hold its
    /// resident bytes.
    pub fn new(s: &Dense, device: &[u32]) -> Option<Result<Timed, Full>> {
        let p = s.p;
        let (mut ops, holds) = operations(s, device)?;
        let mut room = Vec::with_capacity(s.n_devices);
        let mut is_short = false;
        for (d, &lasting) in resident(p, device).iter().enumerate() {
            let Some(limit) = p.devices[d].memory else {
                room.push(u128::MAX);
                continue;
            };
            let Some(left) = u128::from(limit.0).checked_sub(lasting) else {
                return Some(Err(Full));
            };
            is_short |= holds
                .iter()
                .filter(|h| h.device == d)
                .map(|h| h.bytes)
                .sum::<u128>()
                > left;
            room.push(left);
        }
        if !is_short {
            return None;
        }
        tails(&mut ops);
        let (ops, holds) = by_tail(ops, holds);
        let set = |belongs: &dyn Fn(&Op) -> bool| {
            ops.iter()
                .enumerate()
                .filter(|(_, o)| belongs(o))
                .fold(0, |all: Set, (i, _)| all | 1 << i)
        };
        let n_resources = s.n_devices * (s.n_devices + 1);
        let takes = |o: &Op, d: usize| o.begins.iter().any(|&h| holds[h as usize].device == d);
        Some(Ok(Timed {
            n_devices: s.n_devices,
            device: device.to_vec(),
            of_resource: (0..n_resources)
                .map(|r| set(&|o| o.resource == r))
                .collect(),
            of_memory: (0..s.n_devices).map(|d| set(&|o| takes(o, d))).collect(),
            is_strict: ops.iter().all(|o| o.length > 0),
            start: vec![0; ops.len()],
            ops,
            holds,
            room,
            unit: s.unit,
            limit: 0,
            best: None,
            open: None,
            seen: HashMap::new(),
            n_states: 0,
        }))
    }

    /// Searches for schedules that end before `limit` and keep the memory limits; each node takes
    /// one from `budget`.
    pub fn search(mut self, limit: u64, budget: &mut u64) -> Outcome {
        self.limit = limit;
        self.descend(
            At {
                now: 0,
                started: 0,
                ended: 0,
                passed: 0,
                first: 0,
                bound: 0,
            },
            budget,
        );
        let best = self.best.take().map(|start| self.timeline(&start));
        Outcome {
            best,
            open: self.open,
        }
    }

    fn descend(&mut self, mut at: At, budget: &mut u64) {
        at.bound = at.bound.max(self.bound(&at));
        if at.bound >= self.limit || self.is_seen(&at) {
            return;
        }
        if *budget == 0 {
            self.open = Some(self.open.map_or(at.bound, |open| open.min(at.bound)));
            return;
        }
        *budget -= 1;
        if at.started.count_ones() as usize == self.ops.len() {
            if self.fits(&self.held(&at), None) {
                let makespan = (0..self.ops.len()).map(|i| self.end(i)).max().unwrap_or(0);
                self.limit = before(makespan, self.unit);
                self.best = Some(self.start.clone());
            }
            return;
        }
        let can = self.startable(&at);
        for i in members(can & !at.passed).filter(|&i| i >= at.first) {
            let next = self.started(&at, i);
            self.descend(next, budget);
        }
        if let Some(later) = self.waited(&at, can) {
            self.descend(later, budget);
        }
        // A state that holds too much until something that takes no time ends cannot wait, as a
        // later one with the same started can.
        let can_wait = self.is_strict || self.fits(&self.held(&at), None);
        if self.n_states < MOST_STATES && *budget > 0 && can_wait {
            self.n_states += 1;
            let running = members(at.started & !at.ended)
                .map(|i| (i, self.end(i)))
                .collect();
            self.seen.entry(at.started).or_default().push(State {
                now: at.now,
                running,
            });
        }
    }

    fn end(&self, i: usize) -> u64 {
        self.start[i] + self.ops[i].length
    }

    /// True if the same had been started before, with everything no later.
    fn is_seen(&self, at: &At) -> bool {
        let as_soon = |s: &State| {
            s.now <= at.now
                && s.running
                    .iter()
                    .all(|&(i, end)| end <= self.end(i).max(at.now))
        };
        self.seen
            .get(&at.started)
            .is_some_and(|states| states.iter().any(as_soon))
    }

    /// Operations that could start now.
    fn startable(&self, at: &At) -> Set {
        let running = at.started & !at.ended;
        let held = self.held(at);
        let can = |&i: &usize| {
            let op = &self.ops[i];
            op.after & !at.ended == 0
                && self.of_resource[op.resource] & running == 0
                && (!self.is_strict || self.fits(&held, Some(op)))
        };
        let all = if self.ops.len() == MOST_OPS {
            Set::MAX
        } else {
            (1 << self.ops.len()) - 1
        };
        members(all & !at.started)
            .filter(can)
            .fold(0, |all, i| all | 1 << i)
    }

    /// Bytes that devices hold from now on, until something starts or ends.
    fn held(&self, at: &At) -> Vec<u128> {
        let mut held = vec![0u128; self.n_devices];
        for &h in members(at.started).flat_map(|i| &self.ops[i].begins) {
            let hold = &self.holds[h as usize];
            if hold.users & !at.ended != 0 {
                held[hold.device] += hold.bytes;
            }
        }
        held
    }

    /// True if there is room for the bytes held and one operation more.
    fn fits(&self, held: &[u128], more: Option<&Op>) -> bool {
        let begun = |d: usize| {
            let holds = more
                .into_iter()
                .flat_map(|op| &op.begins)
                .map(|&h| &self.holds[h as usize]);
            holds
                .filter(|h| h.device == d)
                .map(|h| h.bytes)
                .sum::<u128>()
        };
        (0..held.len()).all(|d| held[d] + begun(d) <= self.room[d])
    }

    fn started(&mut self, at: &At, i: usize) -> At {
        let op = &self.ops[i];
        self.start[i] = at.now;
        let taken = op
            .begins
            .iter()
            .map(|&h| self.of_memory[self.holds[h as usize].device]);
        let touched = taken.fold(self.of_resource[op.resource], |all, more| all | more);
        let is_over = op.length == 0;
        At {
            started: at.started | 1 << i,
            ended: if is_over { at.ended | 1 << i } else { at.ended },
            passed: at.passed & !touched,
            first: if self.is_strict { i + 1 } else { 0 },
            ..*at
        }
    }

    /// The next instant at which something ends; nothing when nothing runs, or when devices hold
    /// too much until then.
    fn waited(&self, at: &At, can: Set) -> Option<At> {
        let running = at.started & !at.ended;
        let now = members(running).map(|i| self.end(i)).min()?;
        if !self.is_strict && !self.fits(&self.held(at), None) {
            return None;
        }
        let over = members(running)
            .filter(|&i| self.end(i) == now)
            .fold(0, |all: Set, i| all | 1 << i);
        // Where something takes no time more may fit later at this instant: nothing was passed over
        // for good.
        let passed = if self.is_strict { at.passed | can } else { 0 };
        Some(At {
            now,
            ended: at.ended | over,
            passed,
            first: 0,
            ..*at
        })
    }

    /// Least makespan from here on.
    fn bound(&self, at: &At) -> u64 {
        let running = at.started & !at.ended;
        let mut bound = 0;
        for i in members(at.started) {
            bound = bound.max(self.start[i] + self.ops[i].tail);
        }
        for set in self
            .of_resource
            .iter()
            .filter(|set| **set & !at.started != 0)
        {
            let free = members(set & running)
                .map(|i| self.end(i))
                .max()
                .unwrap_or(0)
                .max(at.now);
            let (mut work, mut rest, mut longest) = (0, u64::MAX, 0);
            for i in members(set & !at.started) {
                let op = &self.ops[i];
                work += op.length;
                rest = rest.min(op.tail - op.length);
                longest = longest.max(op.tail);
            }
            bound = bound.max(free + (work + rest).max(longest));
        }
        bound
    }

    fn timeline(&self, start: &[u64]) -> Timeline {
        let n = self.device.len();
        let mut t = Timeline {
            device: self.device.clone(),
            ..Timeline::default()
        };
        (t.start, t.end) = (vec![Nanos::ZERO; n], vec![Nanos::ZERO; n]);
        for (op, &start) in self.ops.iter().zip(start) {
            let (start, end) = (Nanos(start), Nanos(start + op.length));
            match op.what {
                What::Task(task) => (t.start[task as usize], t.end[task as usize]) = (start, end),
                What::Transfer(tensor, from, to) => t.transfers.push(Transfer {
                    tensor,
                    from,
                    to,
                    start,
                    end,
                }),
            }
        }
        t.makespan = t.end.iter().copied().max().unwrap_or_default();
        t.sort_transfers();
        t
    }
}

/// A device cannot hold its resident bytes.
#[derive(Debug)]
pub(super) struct Full;

/// Members of a set, least first.
fn members(set: Set) -> impl Iterator<Item = usize> {
    let mut left = set;
    std::iter::from_fn(move || {
        let i = left.trailing_zeros() as usize;
        left &= left.checked_sub(1)?;
        Some(i)
    })
}

/// Bytes that devices hold for the whole step.
fn resident(p: &Problem, device: &[u32]) -> Vec<u128> {
    let t = Timeline {
        device: device.to_vec(),
        ..Timeline::default()
    };
    t.resident_bytes(p)
        .iter()
        .map(|b| u128::from(b.0))
        .collect()
}

/// Tasks on their devices, the transfers between them, and the memory of both. `None` when there
/// are too many.
fn operations(s: &Dense, device: &[u32]) -> Option<(Vec<Op>, Vec<Hold>)> {
    let p = s.p;
    if p.n_tasks() > MOST_OPS {
        return None;
    }
    let mut operations = Operations::of_tasks(s, device);
    for (t, &home) in device.iter().enumerate() {
        operations.hold(t, home as usize, p.scratch[t].0, 0);
    }
    for x in 0..p.tensors.len() {
        operations.add_transfers(s, device, x)?;
    }
    Some((operations.ops, operations.holds))
}

/// Operations of a placement, as far as they are listed.
struct Operations {
    ops: Vec<Op>,
    holds: Vec<Hold>,
}

impl Operations {
    fn of_tasks(s: &Dense, device: &[u32]) -> Operations {
        let task = |t: usize| Op {
            what: What::Task(t as u32),
            length: s.cost(t, device[t] as usize),
            resource: device[t] as usize,
            ..Op::default()
        };
        Operations {
            ops: (0..s.p.n_tasks()).map(task).collect(),
            holds: Vec::new(),
        }
    }

    /// Memory of a device from the start of an operation to the end of it and of all users.
    fn hold(&mut self, by: usize, device: usize, bytes: u64, users: Set) {
        if bytes > 0 {
            self.ops[by].begins.push(self.holds.len() as u32);
            self.holds.push(Hold {
                device,
                bytes: u128::from(bytes),
                users: users | 1 << by,
            });
        }
    }

    /// The transfers of a tensor to the devices of its consumers, and the memory of it and of its
    /// copies. `None` when there are too many.
    fn add_transfers(&mut self, s: &Dense, device: &[u32], x: usize) -> Option<()> {
        let tensor = &s.p.tensors[x];
        let (producer, from) = (
            tensor.producer as usize,
            device[tensor.producer as usize] as usize,
        );
        // Destination, operation and consumers of each copy.
        let mut copies: Vec<(usize, usize, Set)> = Vec::new();
        let mut users: Set = 0;
        for &c in s.p.consumers.row(x) {
            let to = device[c as usize] as usize;
            if to == from {
                users |= 1 << c;
                self.ops[c as usize].after |= 1 << producer;
                continue;
            }
            let known = copies.iter().position(|copy| copy.0 == to);
            let i = known.unwrap_or_else(|| {
                copies.push((to, self.ops.len(), 0));
                self.ops.push(Op {
                    what: What::Transfer(x as u32, from as u32, to as u32),
                    length: s.transfer(x, from, to),
                    resource: s.n_devices * (1 + from) + to,
                    after: 1 << producer,
                    ..Op::default()
                });
                copies.len() - 1
            });
            if self.ops.len() > MOST_OPS {
                return None;
            }
            copies[i].2 |= 1 << c;
            self.ops[c as usize].after |= 1 << copies[i].1;
        }
        for &(to, op, local) in &copies {
            users |= 1 << op;
            self.hold(op, to, tensor.bytes().0, local);
        }
        self.hold(producer, from, tensor.bytes().0, users);
        Some(())
    }
}

/// Fills the tails.
fn tails(ops: &mut [Op]) {
    let n = ops.len();
    let mut left: Vec<u32> = vec![0; n];
    ops.iter()
        .for_each(|op| members(op.after).for_each(|q| left[q] += 1));
    let mut ready: Vec<usize> = (0..n).filter(|&i| left[i] == 0).collect();
    while let Some(i) = ready.pop() {
        ops[i].tail += ops[i].length;
        let tail = ops[i].tail;
        for q in members(ops[i].after) {
            ops[q].tail = ops[q].tail.max(tail);
            left[q] -= 1;
            if left[q] == 0 {
                ready.push(q);
            }
        }
    }
}

/// The same with the longest tails first.
fn by_tail(ops: Vec<Op>, mut holds: Vec<Hold>) -> (Vec<Op>, Vec<Hold>) {
    let mut order: Vec<usize> = (0..ops.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(ops[i].tail), i));
    let mut place = vec![0usize; ops.len()];
    order.iter().enumerate().for_each(|(k, &i)| place[i] = k);
    let moved = |set: Set| members(set).fold(0, |all: Set, i| all | 1 << place[i]);
    holds.iter_mut().for_each(|h| h.users = moved(h.users));
    let mut sorted: Vec<(usize, Op)> = ops
        .into_iter()
        .enumerate()
        .map(|(i, op)| (place[i], op))
        .collect();
    sorted.sort_by_key(|(k, _)| *k);
    let ops = sorted
        .into_iter()
        .map(|(_, op)| Op {
            after: moved(op.after),
            ..op
        })
        .collect();
    (ops, holds)
}

#[cfg(test)]
mod tests;
