//! Random problems, for tests: the one generator of them.

use crate::problem::{Device, Links, Parts, Payload, Problem, Task, Tensor};
use crate::rng::Rng;
use crate::{Bytes, LinkProfile, Nanos};

/// Size and features of a random problem.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of tasks.
    pub n_tasks: usize,
    /// Number of devices.
    pub n_devices: usize,
    /// Memory limit of the devices; when constrained, some have none or half as much more.
    pub memory: Option<u64>,
    /// Kinds of devices that some tasks lack, pins, groups, shared constants, ordering edges of no
    /// bytes, host copies, views. Without, all tasks can run everywhere, as times differ by task
    /// and device.
    pub constrained: bool,
    /// Times of tasks, in ns, and sizes of results, in bytes, are below this.
    pub most: u64,
}

impl Shape {
    /// Without limits and constraints, with small numbers: many ties.
    pub const fn small(n_tasks: usize, n_devices: usize) -> Shape {
        Shape {
            n_tasks,
            n_devices,
            memory: None,
            constrained: false,
            most: 10,
        }
    }

    /// Everything that a problem may have, with numbers of all sizes.
    pub fn any(rng: &mut Rng, most_tasks: usize, most_devices: usize) -> Shape {
        let most = rng.pick(&[6, 60, 400]);
        Shape {
            n_tasks: 1 + rng.below(most_tasks),
            n_devices: 1 + rng.below(most_devices),
            memory: rng.one_in(3).then(|| most * (2 + rng.number(12))),
            constrained: !rng.one_in(4),
            most,
        }
    }
}

/// A random problem.
pub fn random(rng: &mut Rng, shape: Shape) -> Problem {
    Problem::new(parts(rng, shape))
        .expect("a group can be on its home, and tensors go to later tasks")
}

/// The parts of a random problem. Tensors go from tasks to later ones.
///
/// Times of transfers have no fractions: a byte takes a whole number of ns, of which latencies are
/// free.
pub fn parts(rng: &mut Rng, shape: Shape) -> Parts {
    let Shape {
        n_tasks,
        n_devices,
        constrained,
        most,
        ..
    } = shape;
    // Devices of one kind have the same times.
    let kind: Vec<usize> = (0..n_devices)
        .map(|_| rng.below(if constrained { 3 } else { n_devices }))
        .collect();
    let n_groups = 1 + n_tasks / 6;
    let homes: Vec<usize> = (0..n_groups).map(|_| rng.below(n_devices)).collect();
    let mut task = |_| {
        let group = (constrained && rng.one_in(5)).then(|| rng.below(n_groups));
        let home = group.map_or_else(|| rng.below(n_devices), |g| homes[g]);
        let is_pinned = constrained && rng.one_in(10);
        let mut cost = times(rng, shape, &kind, home);
        if is_pinned {
            (0..n_devices)
                .filter(|&d| d != home)
                .for_each(|d| cost[d] = Nanos::INFINITY);
        }
        Task {
            cost,
            resident: Bytes(rng.number(most / 3)),
            constants: (0..3).filter(|_| constrained && rng.one_in(6)).collect(),
            scratch: Bytes(if constrained { rng.number(most / 4) } else { 0 }),
            group: group.map(|g| g as u32),
            is_view: constrained && rng.one_in(5),
        }
    };
    let tasks = (0..n_tasks).map(&mut task).collect();
    let tensors = (0..n_tasks).map(|t| tensor(rng, shape, t)).collect();
    let device = |d: usize, rng: &mut Rng| Device {
        memory: shape
            .memory
            .filter(|_| !constrained || !rng.one_in(4))
            .map(|m| {
                let more = if constrained && rng.one_in(3) {
                    m / 2
                } else {
                    0
                };
                Bytes(m + more)
            }),
        is_host: constrained && kind[d] == 0,
    };
    let devices = (0..n_devices).map(|d| device(d, rng)).collect();
    let constants = (0..3).map(|_| Bytes(rng.number(most))).collect();
    Parts {
        devices,
        links: links(rng, shape),
        tasks,
        tensors,
        constants,
    }
}

/// Times of a task: near each other, nothing now and then; some kinds lack it, but not that of its
/// home.
fn times(rng: &mut Rng, shape: Shape, kind: &[usize], home: usize) -> Vec<Nanos> {
    let base = rng.number(shape.most);
    let mut of_kind = |k: usize| match rng.below(10) {
        0 if shape.constrained && k != kind[home] => Nanos::INFINITY,
        1 => Nanos::ZERO,
        2 => Nanos(base),
        _ => Nanos(base / 2 + rng.number(shape.most / 2)),
    };
    let times: Vec<Nanos> = (0..shape.n_devices.max(3)).map(&mut of_kind).collect();
    kind.iter().map(|&k| times[k]).collect()
}

fn tensor(rng: &mut Rng, shape: Shape, t: usize) -> (Tensor, Vec<u32>) {
    let n = shape.n_tasks;
    let consumers = (t + 1..n)
        .filter(|_| rng.below(n) < 2)
        .map(|c| c as u32)
        .collect();
    let payload = match rng.below(8) {
        0 if shape.constrained => Payload::HostCopy(Nanos(rng.number(shape.most))),
        1 => Payload::Bytes(Bytes::ZERO),
        _ => Payload::Bytes(Bytes(rng.number(shape.most))),
    };
    (
        Tensor {
            producer: t as u32,
            payload,
        },
        consumers,
    )
}

fn links(rng: &mut Rng, shape: Shape) -> Links {
    let n = shape.n_devices;
    let link = |rng: &mut Rng| LinkProfile {
        latency: Nanos(rng.number(shape.most / 3)),
        bytes_per_second: 1_000_000_000 / rng.pick(&[1, 1, 2, 4]),
    };
    let mut links = Links::uniform(n, link(rng));
    if rng.one_in(2) {
        (0..n * n).for_each(|i| links.set(i / n, i % n, link(rng)));
    }
    links
}
