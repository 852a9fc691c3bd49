//! The call model on random problems.

use super::Calls;
use super::Unsuited;
use super::latency;
use super::load;
use super::nested;
use crate::problem::{Device, Links, Parts, Payload, Problem, Task, Tensor};
use crate::rng::Rng;
use crate::{Bytes, LinkProfile, Nanos};

/// A random problem of `n` forward tasks on two accelerators and a host; with `train`, each has a backward task in its group.
fn random(rng: &mut Rng, n: usize, train: bool, memory: u64) -> (Problem, Vec<bool>) {
    let total = if train { 2 * n } else { n };
    let mut task = |t: usize| {
        let (accelerator, host) = (Nanos(rng.number(6)), Nanos(rng.number(30)));
        let group = if train {
            Some((t % n) as u32)
        } else {
            rng.one_in(4).then_some(7)
        };
        let resident = Bytes(rng.number(5));
        Task {
            cost: vec![accelerator, accelerator, host],
            resident,
            group,
            ..Task::default()
        }
    };
    let tasks: Vec<Task> = (0..total).map(&mut task).collect();
    let mut consumers: Vec<Vec<u32>> = vec![Vec::new(); total];
    for from in 0..n {
        for to in from + 1..n {
            if rng.number(n as u64) < 2 {
                consumers[from].push(to as u32);
                if train {
                    consumers[n + to].push((n + from) as u32);
                }
            }
        }
        if train {
            consumers[from].push((n + from) as u32);
        }
    }
    let tensor = |(t, to): (usize, Vec<u32>)| {
        let payload = Payload::HostCopy(Nanos(rng.number(5)));
        (
            Tensor {
                producer: t as u32,
                payload,
            },
            to,
        )
    };
    let tensors = consumers.into_iter().enumerate().map(tensor).collect();
    let accelerator = Device {
        memory: Some(Bytes(memory)),
        is_host: false,
    };
    let devices = vec![
        accelerator.clone(),
        accelerator,
        Device {
            memory: None,
            is_host: true,
        },
    ];
    let link = LinkProfile {
        latency: Nanos(1),
        bytes_per_second: 1_000_000_000,
    };
    let parts = Parts {
        devices,
        links: Links::uniform(3, link),
        tasks,
        tensors,
        constants: Vec::new(),
    };
    let p = Problem::new(parts).expect("all devices are open to all tasks");
    (p, (0..total).map(|t| t >= n).collect())
}

/// All ways to put groups on three devices.
fn placements(p: &Problem) -> impl Iterator<Item = Vec<u32>> + '_ {
    let n = 3usize.pow(p.n_groups() as u32);
    (0..n).map(|code| {
        (0..p.n_tasks())
            .map(|t| (code / 3usize.pow(p.group_of[t]) % 3) as u32)
            .collect()
    })
}

/// Loads as the paper states them: work, and on accelerators one copy of each tensor that comes in or goes out.
fn loads(p: &Problem, device: &[u32]) -> Vec<Nanos> {
    let mut load = vec![Nanos::ZERO; 3];
    for t in 0..p.n_tasks() {
        load[device[t] as usize] += p.cost(t, device[t] as usize);
    }
    for (x, tensor) in p.tensors.iter().enumerate() {
        let Payload::HostCopy(copy) = tensor.payload else {
            continue;
        };
        let home = device[tensor.producer as usize];
        let mut there: Vec<u32> = p
            .consumers
            .row(x)
            .iter()
            .map(|&c| device[c as usize])
            .filter(|&d| d != home)
            .collect();
        there.sort_unstable();
        there.dedup();
        if !there.is_empty() {
            there.push(home);
        }
        there
            .iter()
            .filter(|&&d| d < 2)
            .for_each(|&d| load[d as usize] += copy);
    }
    load
}

fn fits(p: &Problem, device: &[u32], memory: u64) -> bool {
    let held = |d: u32| {
        (0..p.n_tasks())
            .filter(|&t| device[t] == d)
            .map(|t| p.resident[t].0)
            .sum::<u64>()
    };
    held(0) <= memory && held(1) <= memory
}

/// Whether the forward parts of devices can run one after another.
fn is_contiguous(p: &Problem, device: &[u32], backward: &[bool]) -> bool {
    let mut leads = [[false; 3]; 3];
    for t in (0..p.n_tasks()).filter(|&t| !backward[t]) {
        for c in p.successors(t).filter(|&c| !backward[c as usize]) {
            leads[device[t] as usize][device[c as usize] as usize] = true;
        }
    }
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    orders
        .iter()
        .any(|o| !leads[o[1]][o[0]] && !leads[o[2]][o[0]] && !leads[o[2]][o[1]])
}

#[test]
fn the_largest_load_is_the_least_of_all_contiguous_placements() {
    let mut rng = Rng(11);
    let mut n_proven = 0;
    for i in 0..150 {
        let (n, memory) = (2 + rng.below(5), 4 + rng.number(30));
        let (p, backward) = random(&mut rng, n, i % 2 == 0, memory);
        let calls = Calls::new(&p, &backward).expect("hosts run everything");
        let all = placements(&p).filter(|d| fits(&p, d, memory) && is_contiguous(&p, d, &backward));
        let least = all
            .filter_map(|d| loads(&p, &d).into_iter().max())
            .min()
            .expect("all on the host");
        let found = load::solve(&calls, load::Budget::default()).expect("all on the host");
        assert_eq!(found.value, least);
        assert_eq!(
            loads(&p, &found.device).into_iter().max(),
            Some(found.value)
        );
        assert!(fits(&p, &found.device, memory) && is_contiguous(&p, &found.device, &backward));
        assert!(found.lower_bound == found.value && load::fractional(&calls) <= least);
        n_proven += usize::from(found.bound == "ideals");
    }
    assert!(n_proven > 50, "{n_proven}");
}

#[test]
fn the_latency_lies_between_the_bound_and_that_of_a_chain() {
    let mut rng = Rng(12);
    let mut n_optimal = 0;
    for _ in 0..150 {
        let (n, memory) = (2 + rng.below(6), 3 + rng.number(20));
        let (p, backward) = random(&mut rng, n, false, memory);
        let calls = Calls::new(&p, &backward).expect("hosts run everything");
        let of_unit = |d: &[u32]| {
            let mut of_unit = vec![0; calls.units.len()];
            d.iter()
                .zip(&calls.unit_of)
                .for_each(|(&d, &u)| of_unit[u as usize] = d);
            of_unit
        };
        // Placements that tear a unit are left out: they are not contiguous, or no better than one that keeps it whole.
        let all = placements(&p).filter(|d| calls.devices(&of_unit(d)) == *d);
        let least = all
            .filter_map(|d| latency::evaluate(&calls, &of_unit(&d)))
            .min()
            .expect("all on the host");
        let found = latency::solve(&calls, latency::Budget::default()).expect("all on the host");
        assert!(
            latency::path_bound(&calls) <= least,
            "bound {} optimum {least}",
            latency::path_bound(&calls)
        );
        assert!(found.lower_bound <= found.value && least <= found.value);
        assert_eq!(
            latency::evaluate(&calls, &of_unit(&found.device)),
            Some(found.value)
        );
        n_optimal += usize::from(found.value == least);
    }
    assert!(n_optimal > 120, "only {n_optimal} of 150 are optimal");
}

#[test]
fn blocks_within_blocks_take_no_longer_than_they_say() {
    let mut rng = Rng(13);
    let (mut n_optimal, mut n_found) = (0, 0);
    for i in 0..200 {
        let (n, memory) = (2 + rng.below(7), 3 + rng.number(20));
        let (p, backward) = random(&mut rng, n, false, memory);
        let calls = Calls::new(&p, &backward).expect("hosts run everything");
        let is_short = i % 4 == 0;
        let budget = if is_short { 3 } else { 100_000 };
        let (value, of_unit) = nested::solve(&calls, budget).expect("all on the host");
        let latency =
            latency::evaluate(&calls, &of_unit).expect("calls do not wait for each other and fit");
        assert!(latency <= value, "{latency} where {value} was said");
        let found = latency::solve(&calls, latency::Budget::default()).expect("all on the host");
        assert!(found.value <= latency);
        n_optimal += usize::from(!is_short && found.value == latency);
        n_found += usize::from(!is_short);
    }
    assert!(
        4 * n_optimal > 3 * n_found,
        "only {n_optimal} of {n_found} are as good as the whole search"
    );
}

/// Two branches of three tasks between two tasks that only a host runs; each accelerator holds a branch.
#[test]
fn calls_run_side_by_side_in_branches() {
    let task = |a: u64, h: u64, bytes| Task {
        cost: vec![Nanos(a), Nanos(a), Nanos(h)],
        resident: Bytes(bytes),
        ..Task::default()
    };
    let inner = || task(10, 100, 2);
    let tasks = vec![
        task(5, 5, 9),
        inner(),
        inner(),
        inner(),
        inner(),
        inner(),
        inner(),
        task(5, 5, 9),
    ];
    let edges: [&[u32]; 8] = [&[1, 4], &[2], &[3], &[7], &[5], &[6], &[7], &[]];
    let tensor = |(t, to): (usize, &&[u32])| {
        (
            Tensor {
                producer: t as u32,
                payload: Payload::HostCopy(Nanos(1)),
            },
            to.to_vec(),
        )
    };
    let accelerator = Device {
        memory: Some(Bytes(6)),
        is_host: false,
    };
    let devices = vec![
        accelerator.clone(),
        accelerator,
        Device {
            memory: None,
            is_host: true,
        },
    ];
    let links = Links::uniform(
        3,
        LinkProfile {
            latency: Nanos(0),
            bytes_per_second: 1,
        },
    );
    let tensors = edges.iter().enumerate().map(tensor).collect();
    let p = Problem::new(Parts {
        devices,
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    })
    .expect("edges go forward");
    let calls = Calls::new(&p, &[false; 8]).expect("hosts run everything");
    let (value, of_unit) = nested::solve(&calls, 1_000).expect("all on the host");
    // In and out 2, three tasks 30, and the host before and after.
    assert_eq!(
        (value, latency::evaluate(&calls, &of_unit)),
        (Nanos(42), Some(Nanos(42)))
    );
}

#[test]
fn calls_copy_in_and_out_and_overlap_nothing() {
    let cost = |a: u64, h: u64| vec![Nanos(a), Nanos(a), Nanos(h)];
    let task = |a, h| Task {
        cost: cost(a, h),
        resident: Bytes(2),
        ..Task::default()
    };
    let tensor = |t, copy, to: &[u32]| {
        (
            Tensor {
                producer: t,
                payload: Payload::HostCopy(Nanos(copy)),
            },
            to.to_vec(),
        )
    };
    // 0 -> 1 -> 2 and 0 -> 2; each accelerator holds two of the three.
    let tensors = vec![tensor(0, 3, &[1, 2]), tensor(1, 5, &[2]), tensor(2, 7, &[])];
    let device = Device {
        memory: Some(Bytes(4)),
        is_host: false,
    };
    let devices = vec![
        device.clone(),
        device,
        Device {
            memory: None,
            is_host: true,
        },
    ];
    let links = Links::uniform(
        3,
        LinkProfile {
            latency: Nanos(0),
            bytes_per_second: 1,
        },
    );
    let tasks = vec![task(10, 100), task(20, 200), task(30, 300)];
    let parts = Parts {
        devices,
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    };
    let p = Problem::new(parts).expect("a chain");
    let calls = Calls::new(&p, &[false; 3]).expect("two accelerators and a host");
    // 0 alone: 10, and out 3. Then in 3, and 50.
    assert_eq!(latency::evaluate(&calls, &[0, 1, 1]), Some(Nanos(13 + 53)));
    // 0 and 1: 30, out 3 and 5. Then in 8, and 30.
    assert_eq!(latency::evaluate(&calls, &[0, 0, 1]), Some(Nanos(38 + 38)));
    // Not contiguous: the calls wait for each other.
    assert_eq!(latency::evaluate(&calls, &[0, 1, 0]), None);
    assert_eq!(latency::evaluate(&calls, &[0, 0, 0]), None);
    assert_eq!(
        latency::evaluate(&calls, &[0, 2, 1]),
        Some(Nanos(13 + 200 + 38))
    );
    assert_eq!(calls.largest_load(&[0, 1, 1]), Some(Nanos(53)));
    let found = latency::solve(&calls, latency::Budget::default()).expect("it fits");
    assert_eq!((found.value, found.lower_bound), (Nanos(66), Nanos(66)));
}

#[test]
fn devices_of_a_kind_must_be_alike() {
    let task = Task {
        cost: vec![Nanos(1), Nanos(2)],
        ..Task::default()
    };
    let devices = vec![
        Device {
            memory: None,
            is_host: false
        };
        2
    ];
    let links = Links::uniform(
        2,
        LinkProfile {
            latency: Nanos(0),
            bytes_per_second: 1,
        },
    );
    let parts = Parts {
        devices,
        links,
        tasks: vec![task],
        tensors: Vec::new(),
        constants: Vec::new(),
    };
    let p = Problem::new(parts).expect("one task");
    assert_eq!(Calls::new(&p, &[false]).err(), Some(Unsuited::Unlike(0)));
}
