//! Small random problems and a plain checker of timelines, for tests.

use super::problem::{Device, Links, Parts, Payload, Problem, Task, Tensor};
use super::timeline::Timeline;
use crate::cost::{Bytes, LinkProfile, Nanos};

/// A generator of numbers that are the same on every machine (Knuth's MMIX).
pub struct Dice(u64);

impl Dice {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n.max(1)
    }
}

/// What a random problem is like.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Number of tasks.
    pub n_tasks: usize,
    /// Number of devices.
    pub n_devices: usize,
    /// Memory limit of each device.
    pub memory: Option<u64>,
    /// Tasks share groups, constants, and are not free to go anywhere.
    pub constrained: bool,
}

/// A random problem: results of up to 9 bytes, tasks of up to 8 ns, links of 0 to 2 ns and 1 to 4 bytes a ns.
pub fn random(dice: &mut Dice, shape: Shape) -> Problem {
    let Shape { n_tasks, n_devices, memory, constrained } = shape;
    let mut links = Links::uniform(n_devices, LinkProfile { latency: Nanos(1), bytes_per_second: 1_000_000_000 });
    for (from, to) in (0..n_devices).flat_map(|a| (0..n_devices).map(move |b| (a, b))) {
        let rate = 1_000_000_000 * (1 + dice.below(4));
        links.set(from, to, LinkProfile { latency: Nanos(dice.below(3)), bytes_per_second: rate });
    }
    let mut task = |_| {
        let mut cost: Vec<Nanos> = (0..n_devices).map(|_| Nanos(dice.below(9))).collect();
        if constrained && dice.below(5) == 0 {
            // One device stays open to all, so that no group is impossible.
            cost[1..].iter_mut().filter(|_| dice.below(2) == 0).for_each(|c| *c = Nanos::INFINITY);
        }
        let group = (constrained && dice.below(3) == 0).then(|| dice.below(3) as u32);
        let constants = if constrained && dice.below(3) == 0 { vec![dice.below(2) as u32] } else { Vec::new() };
        let scratch = Bytes(if constrained { dice.below(3) } else { 0 });
        Task { cost, resident: Bytes(dice.below(4)), constants, scratch, group, is_view: false }
    };
    let tasks: Vec<Task> = (0..n_tasks).map(&mut task).collect();
    let mut tensor = |t: usize| {
        let later: Vec<u32> = (t + 1..n_tasks).filter(|_| dice.below(n_tasks as u64) < 2).map(|c| c as u32).collect();
        (Tensor { producer: t as u32, payload: Payload::Bytes(Bytes(dice.below(10))) }, later)
    };
    let tensors = (0..n_tasks).map(&mut tensor).collect();
    let device = Device { memory: memory.map(Bytes), is_host: false };
    let constants = vec![Bytes(3), Bytes(5)];
    let parts = Parts { devices: vec![device; n_devices], links, tasks, tensors, constants };
    Problem::new(parts).expect("the first device is open to all tasks, and tensors go to later tasks")
}

/// Everything that is wrong with a timeline, memory limits aside.
pub fn violations(p: &Problem, t: &Timeline) -> Vec<String> {
    let mut wrong = Vec::new();
    for v in 0..p.n_tasks() {
        let cost = p.cost(v, t.device[v] as usize);
        if !cost.is_finite() || t.end[v] != t.start[v] + cost {
            wrong.push(format!("task {v} takes {} to {}", t.start[v], t.end[v]));
        }
        if p.members.row(p.group_of[v] as usize).iter().any(|&m| t.device[m as usize] != t.device[v]) {
            wrong.push(format!("the group of task {v} is torn"));
        }
        for &x in p.inputs.row(v) {
            let q = p.tensors[x as usize].producer as usize;
            let sent = t.transfers.iter().find(|s| s.tensor == x && s.to == t.device[v]);
            let there = if t.device[q] == t.device[v] { Some(t.end[q]) } else { sent.map(|s| s.end) };
            if there.is_none_or(|at| at > t.start[v]) {
                wrong.push(format!("task {v} starts before tensor {x} is there"));
            }
        }
    }
    for s in &t.transfers {
        let q = p.tensors[s.tensor as usize].producer as usize;
        let length = p.transfer(s.tensor as usize, s.from as usize, s.to as usize);
        if s.from != t.device[q] || s.start < t.end[q] || s.end != s.start + length {
            wrong.push(format!("transfer {s:?}"));
        }
    }
    let tasks = (0..p.n_tasks()).map(|v| ((t.device[v], u32::MAX), t.start[v], t.end[v]));
    let mut busy: Vec<_> = tasks.chain(t.transfers.iter().map(|s| ((s.from, s.to), s.start, s.end))).collect();
    busy.retain(|b| b.1 < b.2);
    busy.sort_unstable();
    wrong.extend(busy.windows(2).filter(|w| w[0].0 == w[1].0 && w[0].2 > w[1].1).map(|w| format!("overlap {w:?}")));
    let last = t.end.iter().copied().max().unwrap_or_default();
    if last != t.makespan {
        wrong.push(format!("makespan {} but the last end is {last}", t.makespan));
    }
    wrong
}
