//! Task graphs of several structures with random costs, machines for them, and random placements.

use gristmill::cost::{Bytes, LinkProfile, Nanos};
use gristmill::testing::Rng;
use gristmill_solver::{Device, Links, Parts, Payload, Problem, Task, Tensor};
use std::collections::BTreeSet;

/// Edges `(from, to)` of a graph of tasks.
pub type Edges = Vec<(usize, usize)>;

/// Names and structures: number of tasks, edges.
pub fn structures(rng: &mut Rng) -> Vec<(&'static str, usize, Edges)> {
    let named = |name, (n, edges): (usize, Edges)| (name, n, edges);
    vec![
        named("layers", layers(rng, 9, 4)),
        named("branches", branches(rng, 5, 4)),
        named("elimination", elimination(8)),
        named("butterfly", butterfly(3)),
        named("wavefront", wavefront(6)),
        named("training", training(16)),
    ]
}

/// Each task of a layer waits for one to three of the layer before.
fn layers(rng: &mut Rng, depth: usize, width: usize) -> (usize, Edges) {
    let mut edges = Edges::new();
    for task in width..depth * width {
        let first = (task / width - 1) * width;
        edges.extend((0..1 + rng.below(3)).map(|_| (first + rng.below(width), task)));
    }
    (depth * width, edges)
}

/// Blocks of parallel branches of different lengths between a fork and a join, as in Inception-v3.
fn branches(rng: &mut Rng, n_blocks: usize, n_branches: usize) -> (usize, Edges) {
    let (mut n, mut edges, mut fork) = (1, Edges::new(), 0);
    for _ in 0..n_blocks {
        let mut ends = Vec::new();
        for _ in 0..n_branches {
            let mut last = fork;
            for _ in 0..1 + rng.below(3) {
                edges.push((last, n));
                (last, n) = (n, n + 1);
            }
            ends.push(last);
        }
        edges.extend(ends.into_iter().map(|end| (end, n)));
        (fork, n) = (n, n + 1);
    }
    (n, edges)
}

/// Gaussian elimination by columns: column `k` is the pivot of all later ones.
fn elimination(n_columns: usize) -> (usize, Edges) {
    let (mut n, mut edges) = (0, Edges::new());
    let mut last: Vec<Option<usize>> = vec![None; n_columns];
    for k in 0..n_columns - 1 {
        let pivot = n;
        edges.extend(last[k].map(|l| (l, pivot)));
        n += 1;
        for column in &mut last[k + 1..] {
            edges.push((pivot, n));
            edges.extend(column.map(|l| (l, n)));
            (*column, n) = (Some(n), n + 1);
        }
    }
    (n, edges)
}

/// The fast Fourier transform of `2^log2_points` points.
fn butterfly(log2_points: usize) -> (usize, Edges) {
    let points = 1 << log2_points;
    let stage = |s: usize| {
        (0..points)
            .flat_map(move |i| [i, i ^ (1 << s)].map(|j| (s * points + j, (s + 1) * points + i)))
    };
    (
        (log2_points + 1) * points,
        (0..log2_points).flat_map(stage).collect(),
    )
}

/// A square grid in which a task waits for those above and to the left.
fn wavefront(side: usize) -> (usize, Edges) {
    let right = (0..side * side)
        .filter(|i| i % side + 1 < side)
        .map(|i| (i, i + 1));
    let down = (0..side * (side - 1)).map(|i| (i, i + side));
    (side * side, right.chain(down).collect())
}

/// A forward chain with skips of four, and the backward pass, which needs the saved activations.
fn training(depth: usize) -> (usize, Edges) {
    let mut edges: Edges = (1..depth).map(|i| (i - 1, i)).collect();
    edges.extend((4..depth).step_by(4).map(|i| (i - 4, i)));
    let forward = edges.clone();
    let back = |i: usize| 2 * depth - 1 - i;
    edges.extend(forward.into_iter().map(|(from, to)| (back(to), back(from))));
    edges.extend((0..depth).map(|i| (i, back(i))));
    (2 * depth, edges)
}

/// The problem of a structure on `n_devices` devices, each with its own speed and links: tasks of 0.2
/// to 5 ms, latencies of 0.1 to 0.3 ms, transfers of up to about 2.5 ms, all divided by `divisor`.
pub fn problem(
    rng: &mut Rng,
    n_tasks: usize,
    edges: &Edges,
    n_devices: usize,
    divisor: u64,
) -> Problem {
    let percent = [100, 100, 125, 160];
    let percent: Vec<u64> = (0..n_devices).map(|_| rng.pick(&percent)).collect();
    let links = random_links(rng, n_devices, divisor);
    let lengths_us = [200, 400, 800, 1_200, 2_000, 3_000];
    let mut task = |_| {
        let ns = 1_000 * rng.pick(&lengths_us) / divisor;
        let cost = percent.iter().map(|percent| Nanos(ns * percent / 100));
        Task {
            cost: cost.collect(),
            ..Task::default()
        }
    };
    let tasks = (0..n_tasks).map(&mut task).collect();
    let tensor = |producer: usize| {
        let bytes = rng.pick(&[4u64, 8_000, 24_000, 60_000, 120_000]);
        let tensor = Tensor {
            producer: producer as u32,
            payload: Payload::Bytes(Bytes(bytes)),
        };
        (tensor, consumers(edges, producer))
    };
    let tensors = (0..n_tasks).map(tensor).collect();
    let device = Device {
        memory: None,
        is_host: false,
    };
    let parts = Parts {
        devices: vec![device; n_devices],
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    };
    Problem::new(parts).expect("structures have no cycles, and every device runs every task")
}

fn random_links(rng: &mut Rng, n_devices: usize, divisor: u64) -> Links {
    let any = LinkProfile {
        latency: Nanos(100_000),
        bytes_per_second: 1,
    };
    let mut links = Links::uniform(n_devices, any);
    for (from, to) in (0..n_devices).flat_map(|a| (0..n_devices).map(move |b| (a, b))) {
        let latency = Nanos(rng.pick(&[100_000, 200_000, 300_000]) / divisor);
        let bytes_per_second = rng.pick(&[50_000_000, 100_000_000]) * divisor;
        let link = LinkProfile {
            latency,
            bytes_per_second,
        };
        links.set(from, to, link);
    }
    links
}

/// Tasks that need the result of a task, in order.
fn consumers(edges: &Edges, producer: usize) -> Vec<u32> {
    let of_producer = edges.iter().filter(|e| e.0 == producer);
    let consumers: BTreeSet<u32> = of_producer.map(|e| e.1 as u32).collect();
    consumers.into_iter().collect()
}

/// A random placement: a task follows one of its operands with a probability of the placement's own, or goes to any of
/// the two or more devices that it uses.
pub fn random_placement(rng: &mut Rng, p: &Problem) -> Vec<u32> {
    let (n_used, follow) = (2 + rng.below(p.n_devices() - 1), rng.below(7));
    let mut device = vec![0u32; p.n_tasks()];
    for &t in &p.order {
        let operands: Vec<u32> = p.predecessors(t as usize).collect();
        let follows = !operands.is_empty() && rng.below(10) < follow;
        device[t as usize] = if follows {
            device[rng.pick(&operands) as usize]
        } else {
            rng.below(n_used) as u32
        };
    }
    device
}
