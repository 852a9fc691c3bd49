//! Small random problems, for tests.

use super::problem::{Device, Links, Parts, Payload, Problem, Task, Tensor};
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
