//! An earlier answer on a problem that may have changed since: replayed as it was, as the start of
//! a search and an upper bound of its result.
//!
//! A replay keeps the devices and, on every device and link, the order of the earlier answer. So
//! where no task or transfer takes longer than before, nothing starts later than before; list
//! scheduling gives no such promise (Graham 1969).

use crate::Nanos;
use crate::memory::repair::{self, Key};
use crate::problem::Problem;
use crate::schedule::timeline::{Timeline, Transfer};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// An earlier answer under the current costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The better of its two replays.
    pub timeline: Timeline,
    /// Its score.
    pub key: Key,
    /// It is an answer to this very problem: all its times hold.
    pub is_exact: bool,
}

/// An earlier answer on this problem; nothing where a task cannot be on its device any more, or
/// must now be with others.
pub fn keep(p: &Problem, previous: &Timeline) -> Option<Kept> {
    let held = replay(p, previous, Starting::NotBefore)?;
    if same_times(&held, previous) {
        return Some(Kept {
            key: repair::key(p, &held),
            timeline: held,
            is_exact: true,
        });
    }
    let early = replay(p, previous, Starting::AtOnce)?;
    let (held_key, early_key) = (repair::key(p, &held), repair::key(p, &early));
    let (key, timeline) = if early_key < held_key {
        (early_key, early)
    } else {
        (held_key, held)
    };
    Some(Kept {
        timeline,
        key,
        is_exact: false,
    })
}

/// When things start in a replay, once all they wait for is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starting {
    /// At once.
    AtOnce,
    /// No earlier than they did: results held for a while then are held no longer now.
    NotBefore,
}

fn same_times(a: &Timeline, b: &Timeline) -> bool {
    a.device == b.device
        && a.start == b.start
        && a.end == b.end
        && a.transfers.len() == b.transfers.len()
        && {
            let times = |t: &Timeline| -> BTreeMap<(u32, u32), (Nanos, Nanos)> {
                t.transfers
                    .iter()
                    .map(|x| ((x.tensor, x.to), (x.start, x.end)))
                    .collect()
            };
            times(a) == times(b)
        }
}

/// The timeline on the devices and in the orders of `previous`. Transfers that it does not know go
/// as they come.
pub fn replay(p: &Problem, previous: &Timeline, starting: Starting) -> Option<Timeline> {
    if !is_possible(p, previous) {
        return None;
    }
    let mut replay = Replay::new(p, previous, starting);
    while let Some(Reverse((.., what))) = replay.ready.pop() {
        match what {
            What::Task(t) => replay.run_task(t as usize),
            What::Transfer(x, to) => replay.run_transfer(x, to),
        }
    }
    let Replay {
        start,
        end,
        mut transfers,
        ..
    } = replay;
    transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
    let makespan = end.iter().copied().max().unwrap_or_default();
    Some(Timeline {
        device: previous.device.clone(),
        start,
        end,
        transfers,
        makespan,
    })
}

fn is_possible(p: &Problem, t: &Timeline) -> bool {
    let n = p.n_tasks();
    t.device.len() == n
        && t.start.len() == n
        && t.end.len() == n
        && (0..n).all(|i| {
            (t.device[i] as usize) < p.n_devices() && p.cost(i, t.device[i] as usize).is_finite()
        })
        && (0..p.n_groups()).all(|g| {
            p.members
                .row(g)
                .windows(2)
                .all(|m| t.device[m[0] as usize] == t.device[m[1] as usize])
        })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// A tensor on its way to a device.
    Transfer(u32, u32),
    Task(u32),
}

struct Replay<'a> {
    p: &'a Problem,
    previous: &'a Timeline,
    starting: Starting,
    /// Earlier starts and ends of transfers, by tensor and destination.
    sent: BTreeMap<(u32, u32), (Nanos, Nanos)>,
    /// Steps that can go next: by earlier start and end, so that a step without duration comes
    /// before steps that began at its time; tasks in topological order.
    ready: BinaryHeap<Reverse<(Nanos, Nanos, u32, What)>>,
    position: Vec<u32>,
    /// Operands that are not there yet.
    missing: Vec<u32>,
    /// When the last operand so far is there.
    arrived: Vec<Nanos>,
    start: Vec<Nanos>,
    end: Vec<Nanos>,
    transfers: Vec<Transfer>,
    /// Until when each device and each link is taken.
    device_free: Vec<Nanos>,
    link_free: Vec<Nanos>,
}

impl<'a> Replay<'a> {
    fn new(p: &'a Problem, previous: &'a Timeline, starting: Starting) -> Replay<'a> {
        let n = p.n_devices();
        let mut position = vec![0u32; p.n_tasks()];
        p.order
            .iter()
            .enumerate()
            .for_each(|(i, &t)| position[t as usize] = i as u32);
        let mut replay = Replay {
            p,
            previous,
            starting,
            sent: previous
                .transfers
                .iter()
                .map(|t| ((t.tensor, t.to), (t.start, t.end)))
                .collect(),
            ready: BinaryHeap::new(),
            position,
            missing: (0..p.n_tasks())
                .map(|t| p.inputs.row(t).len() as u32)
                .collect(),
            arrived: vec![Nanos::ZERO; p.n_tasks()],
            start: vec![Nanos::ZERO; p.n_tasks()],
            end: vec![Nanos::ZERO; p.n_tasks()],
            transfers: Vec::new(),
            device_free: vec![Nanos::ZERO; n],
            link_free: vec![Nanos::ZERO; n * n],
        };
        (0..p.n_tasks())
            .filter(|&t| p.inputs.row(t).is_empty())
            .for_each(|t| replay.enter(t));
        replay
    }

    fn enter(&mut self, t: usize) {
        let (start, end) = (self.previous.start[t], self.previous.end[t]);
        self.ready.push(Reverse((
            start,
            end,
            self.position[t],
            What::Task(t as u32),
        )));
    }

    /// When something of a length starts that could at `from` and did at `before`; its place is
    /// taken until `free`.
    fn take(
        starting: Starting,
        from: Nanos,
        before: Nanos,
        length: Nanos,
        free: &mut Nanos,
    ) -> Nanos {
        let from = if starting == Starting::NotBefore {
            from.max(before)
        } else {
            from
        };
        let start = from.max(*free);
        *free = start + length;
        start
    }

    fn run_task(&mut self, t: usize) {
        let d = self.previous.device[t];
        let length = self.p.cost(t, d as usize);
        let free = &mut self.device_free[d as usize];
        let start = Replay::take(
            self.starting,
            self.arrived[t],
            self.previous.start[t],
            length,
            free,
        );
        (self.start[t], self.end[t]) = (start, start + length);
        for &x in self.p.outputs.row(t) {
            self.deliver(x, d, start + length);
            let mut to: Vec<u32> = self
                .p
                .consumers
                .row(x as usize)
                .iter()
                .map(|&c| self.previous.device[c as usize])
                .collect();
            to.sort_unstable();
            to.dedup();
            for to in to.into_iter().filter(|&to| to != d) {
                let made = self.previous.end[t];
                let (start, end) = self.sent.get(&(x, to)).copied().unwrap_or((made, made));
                self.ready.push(Reverse((
                    start,
                    end,
                    self.position[t],
                    What::Transfer(x, to),
                )));
            }
        }
    }

    fn run_transfer(&mut self, x: u32, to: u32) {
        let producer = self.p.tensors[x as usize].producer as usize;
        let from = self.previous.device[producer];
        let length = self.p.transfer(x as usize, from as usize, to as usize);
        let made = self.end[producer];
        let before = self.sent.get(&(x, to)).copied().unwrap_or_default().0;
        let free = &mut self.link_free[from as usize * self.p.n_devices() + to as usize];
        let start = Replay::take(self.starting, made, before, length, free);
        self.transfers.push(Transfer {
            tensor: x,
            from,
            to,
            start,
            end: start + length,
        });
        self.deliver(x, to, start + length);
    }

    /// Counts a tensor that is on a device.
    fn deliver(&mut self, x: u32, device: u32, at: Nanos) {
        for &c in self.p.consumers.row(x as usize) {
            let c = c as usize;
            if self.previous.device[c] == device {
                self.arrived[c] = self.arrived[c].max(at);
                self.missing[c] -= 1;
                if self.missing[c] == 0 {
                    self.enter(c);
                }
            }
        }
    }
}
