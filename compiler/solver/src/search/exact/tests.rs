//! Searches and bounds against plain enumeration of all devices and orders, on random problems of a
//! few tasks.

use super::Proof;
use super::assign;
use super::series;
use super::solve;
use crate::bounds::{self, Bound};
use crate::problem::{Device, Links, Parts, Payload, Problem, Task, Tensor};
use crate::rng::Rng;
use crate::schedule::algorithms;
use crate::schedule::list::Insertion;
use crate::schedule::timeline::Timeline;
use crate::{Bytes, LinkProfile, Nanos};

const SEEDS: u64 = 400;
const SERIES: u64 = 60;

/// A problem of at most five tasks with everything that a problem may have.
fn random_problem(seed: u64) -> Problem {
    let mut r = Rng(seed);
    let (n, n_devices) = (2 + r.below(4), 2 + r.below(2));
    let identical = r.below(3) == 0;
    let capped = r.below(4) == 0;
    let free = r.below(5) == 0;
    let mut links = Links::uniform(
        n_devices,
        LinkProfile {
            latency: Nanos(r.number(4)),
            bytes_per_second: 1_000_000_000,
        },
    );
    if free {
        links = Links::uniform(
            n_devices,
            LinkProfile {
                latency: Nanos(0),
                bytes_per_second: 1_000_000_000,
            },
        );
    } else if r.below(2) == 0 {
        let slow = LinkProfile {
            latency: Nanos(3),
            bytes_per_second: 500_000_000,
        };
        links.set(0, 1, slow);
    }
    let task = |r: &mut Rng| {
        let common = r.number(8);
        let mut cost: Vec<Nanos> = (0..n_devices)
            .map(|_| Nanos(if identical { common } else { r.number(8) }))
            .collect();
        if r.below(4) == 0 {
            cost[r.below(n_devices)] = Nanos::INFINITY;
        }
        let group = (r.below(4) == 0).then_some(0);
        Task {
            cost,
            resident: Bytes(r.number(4)),
            group,
            ..Task::default()
        }
    };
    let tasks: Vec<Task> = (0..n).map(|_| task(&mut r)).collect();
    let mut tensors = Vec::new();
    for producer in 0..n as u32 {
        let consumers: Vec<u32> = (producer + 1..n as u32)
            .filter(|_| r.below(5) < 2)
            .collect();
        let bytes = if free { 0 } else { r.number(6) };
        tensors.push((
            Tensor {
                producer,
                payload: Payload::Bytes(Bytes(bytes)),
            },
            consumers,
        ));
    }
    let memory = capped.then(|| Bytes(4 + r.number(6)));
    let devices = vec![
        Device {
            memory,
            is_host: false
        };
        n_devices
    ];
    let parts = Parts {
        devices,
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    };
    Problem::new(parts).unwrap_or_else(|_| random_problem(seed + 1_000_003))
}

/// Least makespan over all devices and all orders of tasks and transfers, each started as soon as
/// it can. Resident bytes count, others do not.
fn enumerate(p: &Problem) -> Nanos {
    let (n, n_devices) = (p.n_tasks(), p.n_devices());
    let mut least = Nanos::INFINITY;
    for code in 0..n_devices.pow(n as u32) {
        let device: Vec<usize> = (0..n)
            .map(|t| code / n_devices.pow(t as u32) % n_devices)
            .collect();
        let feasible = (0..n).all(|t| {
            p.cost(t, device[t]).is_finite()
                && (0..t).all(|u| p.group_of[t] != p.group_of[u] || device[t] == device[u])
        });
        let held = |d: usize| {
            (0..n)
                .filter(|&t| device[t] == d)
                .map(|t| p.resident[t])
                .sum::<Bytes>()
        };
        if feasible && (0..n_devices).all(|d| p.devices[d].memory.is_none_or(|m| held(d) <= m)) {
            Orders::new(p, &device).visit(&mut least);
        }
    }
    least
}

/// Operations done so far, in some order.
struct Orders<'p> {
    /// Time, resource and operations waited for, of tasks and then transfers.
    ops: Vec<(Nanos, usize, Vec<usize>)>,
    end: Vec<Option<Nanos>>,
    free: Vec<Nanos>,
    p: std::marker::PhantomData<&'p Problem>,
}

impl<'p> Orders<'p> {
    fn new(p: &'p Problem, device: &[usize]) -> Orders<'p> {
        let (n, n_devices) = (p.n_tasks(), p.n_devices());
        let mut ops: Vec<(Nanos, usize, Vec<usize>)> = (0..n)
            .map(|t| (p.cost(t, device[t]), device[t], Vec::new()))
            .collect();
        for x in 0..p.tensors.len() {
            let q = p.tensors[x].producer as usize;
            let mut sent = vec![None; n_devices];
            for &c in p.consumers.row(x) {
                let (from, to) = (device[q], device[c as usize]);
                let source = if from == to {
                    q
                } else {
                    *sent[to].get_or_insert_with(|| {
                        ops.push((
                            p.transfer(x, from, to),
                            n_devices * (1 + from) + to,
                            vec![q],
                        ));
                        ops.len() - 1
                    })
                };
                ops[c as usize].2.push(source);
            }
        }
        let end = vec![None; ops.len()];
        Orders {
            ops,
            end,
            free: vec![Nanos::ZERO; n_devices * (n_devices + 1)],
            p: std::marker::PhantomData,
        }
    }

    fn visit(&mut self, least: &mut Nanos) {
        let makespan = self.end.iter().flatten().copied().max().unwrap_or_default();
        if makespan >= *least {
            return;
        }
        if self.end.iter().all(Option::is_some) {
            *least = makespan;
        }
        for i in 0..self.ops.len() {
            let (length, resource, before) = self.ops[i].clone();
            let ends: Option<Vec<Nanos>> = before.iter().map(|&b| self.end[b]).collect();
            let Some(ends) = ends.filter(|_| self.end[i].is_none()) else {
                continue;
            };
            let free = self.free[resource];
            let start = ends.into_iter().fold(free, Nanos::max);
            (self.end[i], self.free[resource]) = (Some(start + length), start + length);
            self.visit(least);
            (self.end[i], self.free[resource]) = (None, free);
        }
    }
}

/// Fails unless the timeline is a valid schedule.
pub(super) fn check_valid(p: &Problem, t: &Timeline) {
    let n = p.n_devices();
    let mut spans: Vec<Vec<(Nanos, Nanos)>> = vec![Vec::new(); n * (n + 1)];
    for task in 0..p.n_tasks() {
        let d = t.device[task] as usize;
        assert_eq!(
            t.end[task],
            t.start[task] + p.cost(task, d),
            "task {task} takes its time"
        );
        spans[d].push((t.start[task], t.end[task]));
        assert!(
            (0..task).all(|u| p.group_of[u] != p.group_of[task] || t.device[u] as usize == d),
            "groups"
        );
        for &x in p.inputs.row(task) {
            let q = p.tensors[x as usize].producer as usize;
            let copies = t
                .transfers
                .iter()
                .filter(|c| c.tensor == x && c.to as usize == d);
            let there = if t.device[q] as usize == d {
                Some(t.end[q])
            } else {
                copies.map(|c| c.end).min()
            };
            assert!(
                there.is_some_and(|there| there <= t.start[task]),
                "task {task} waits for tensor {x}"
            );
        }
    }
    for c in &t.transfers {
        let (x, from, to) = (c.tensor as usize, c.from as usize, c.to as usize);
        let q = p.tensors[x].producer as usize;
        assert!(
            t.device[q] == c.from
                && c.start >= t.end[q]
                && c.end == c.start + p.transfer(x, from, to)
        );
        spans[n * (1 + from) + to].push((c.start, c.end));
    }
    for spans in &mut spans {
        spans.sort_unstable();
        assert!(
            spans.windows(2).all(|w| w[0].1 <= w[1].0),
            "one thing at a time: {spans:?}"
        );
    }
    assert_eq!(t.end.iter().copied().max().unwrap_or_default(), t.makespan);
    let mut sent: Vec<(u32, u32)> = t.transfers.iter().map(|c| (c.tensor, c.to)).collect();
    sent.sort_unstable();
    sent.dedup();
    assert_eq!(
        sent.len(),
        t.transfers.len(),
        "each tensor goes to a device once"
    );
}

#[test]
fn bounds_are_below_and_searches_at_the_best_of_all_schedules() {
    let (mut tight, mut infeasible) = (std::collections::BTreeMap::new(), 0);
    for seed in 0..SEEDS {
        let p = random_problem(seed);
        let least = enumerate(&p);
        let mut all: Vec<Bound> = bounds::all(&p);
        all.extend(bounds::blocks(&p, 10_000));
        for b in all {
            assert!(
                b.value <= least,
                "seed {seed}: {} {} is above the optimum {least}",
                b.name,
                b.value
            );
            *tight.entry(b.name).or_insert(0) += i32::from(b.value == least);
        }
        let incumbent = algorithms::heft(&p, Insertion::Gaps);
        let Proof {
            timeline,
            lower_bound,
            complete,
        } = solve(&p, &incumbent, Nanos::ZERO, 100_000);
        let capped = p.devices.iter().any(|d| d.memory.is_some());
        // With limits on memory the optimum may be above that of the enumeration: see `timed`.
        assert!(
            capped || lower_bound <= least,
            "seed {seed}: proved {lower_bound}, optimum {least}"
        );
        if let Some(found) = &timeline {
            check_valid(&p, found);
            assert!(bounds::fits(&p, found) && found.makespan >= least);
        }
        infeasible += i32::from(!least.is_finite());
        if !capped {
            assert!(complete, "seed {seed}: not proven");
            let best = timeline.map_or(incumbent.makespan, |t| t.makespan);
            assert_eq!((best, lower_bound), (least, least), "seed {seed}");
        }
    }
    // Each bound is of use somewhere: none has become trivial unnoticed.
    for (name, times) in &tight {
        assert!(
            *times > 5,
            "{name} meets the optimum {times} times: {tight:?}"
        );
    }
    assert!(
        infeasible < SEEDS as i32 / 10,
        "most problems have schedules: {infeasible}"
    );
}

/// Tasks between cuts, two or three in each block, with everything else as it comes.
fn random_series(r: &mut Rng) -> Problem {
    let n_devices = 2 + r.below(2);
    let identical = r.below(2) == 0;
    let mut edges: Vec<(u32, u32)> = Vec::new();
    let (mut cut, mut n) = (0u32, 1u32);
    for _ in 0..2 {
        let inner = 2 + r.below(2) as u32;
        let join = n + inner;
        for t in n..join {
            edges.extend([(cut, t), (t, join)]);
            edges.extend((t + 1..join).filter(|_| r.below(3) == 0).map(|u| (t, u)));
        }
        if r.below(3) == 0 {
            edges.push((cut, join));
        }
        (cut, n) = (join, join + 1);
    }
    let passes = r.below(6) == 0;
    edges.extend(passes.then_some((1, n - 1)));
    let tasks = (0..n).map(|_| {
        let common = r.number(9);
        let cost = (0..n_devices)
            .map(|_| Nanos(if identical { common } else { r.number(9) }))
            .collect();
        let group = (r.below(5) == 0).then_some(0);
        Task {
            cost,
            group,
            ..Task::default()
        }
    });
    let tasks = tasks.collect();
    let tensors = (0..n).map(|q| {
        let consumers = edges.iter().filter(|e| e.0 == q).map(|e| e.1).collect();
        (
            Tensor {
                producer: q,
                payload: Payload::Bytes(Bytes(r.number(7))),
            },
            consumers,
        )
    });
    let tensors = tensors.collect();
    let mut links = Links::uniform(
        n_devices,
        LinkProfile {
            latency: Nanos(1),
            bytes_per_second: 1_000_000_000,
        },
    );
    if !identical {
        links.set(
            1,
            0,
            LinkProfile {
                latency: Nanos(2),
                bytes_per_second: 300_000_000,
            },
        );
    }
    let devices = vec![
        Device {
            memory: None,
            is_host: false
        };
        n_devices
    ];
    Problem::new(Parts {
        devices,
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    })
    .expect("edges go forward")
}

#[test]
fn blocks_one_after_the_other_are_best() {
    let mut r = Rng(11);
    let mut cut = 0;
    for round in 0..SERIES {
        let p = random_series(&mut r);
        let least = assign::search(&p, u64::MAX, u64::MAX)
            .best
            .map(|t| t.makespan)
            .expect("there is a schedule");
        let Some(proof) = series(&p, 200_000) else {
            continue;
        };
        let found = proof.timeline.expect("blocks have schedules");
        check_valid(&p, &found);
        assert!(
            proof.complete,
            "round {round}: blocks of a few tasks are solved"
        );
        assert_eq!(
            (found.makespan, proof.lower_bound),
            (least, least),
            "round {round}"
        );
        cut += 1;
    }
    assert!(cut > SERIES / 2, "most graphs are cut: {cut}");
}
