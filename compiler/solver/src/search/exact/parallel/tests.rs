//! The search for identical devices against the general one, which knows nothing of it, on random
//! graphs.

use super::super::assign;
use super::super::tests::Numbers;
use super::super::tests::check_valid;
use super::solve;
use crate::problem::{Device, Links, Parts, Payload, Problem, Task, Tensor};
use crate::schedule::algorithms;
use crate::schedule::list::Insertion;
use crate::{Bytes, LinkProfile, Nanos};

/// Tasks on identical devices with free links; some take no time. Times are multiples of `unit`.
fn problem(r: &mut Numbers, n: usize, n_devices: usize, unit: u64) -> Problem {
    let often = 2 + r.below(6);
    let task = |cost: u64| Task {
        cost: vec![Nanos(cost * unit); n_devices],
        ..Task::default()
    };
    let tasks = (0..n).map(|_| task(r.below(9))).collect();
    let mut waits = |producer: u32| {
        (producer + 1..n as u32)
            .filter(|_| r.below(often) == 0)
            .collect()
    };
    let free = |producer| Tensor {
        producer,
        payload: Payload::Bytes(Bytes::ZERO),
    };
    let tensors = (0..n as u32).map(|q| (free(q), waits(q))).collect();
    let link = LinkProfile {
        latency: Nanos::ZERO,
        bytes_per_second: 1,
    };
    let devices = vec![
        Device {
            memory: None,
            is_host: false
        };
        n_devices
    ];
    let parts = Parts {
        devices,
        links: Links::uniform(n_devices, link),
        tasks,
        tensors,
        constants: Vec::new(),
    };
    Problem::new(parts).expect("later tasks wait for earlier ones")
}

#[test]
fn agrees_with_the_general_search() {
    let mut r = Numbers(3);
    for round in 0..150 {
        let (n, n_devices) = (4 + r.below(6) as usize, 2 + r.below(2) as usize);
        let p = problem(&mut r, n, n_devices, 1 + round % 3);
        let general = assign::search(&p, u64::MAX, u64::MAX);
        let least = general
            .best
            .map(|t| t.makespan)
            .expect("a search with no limit finds a schedule");
        let proof = solve(&p, Nanos::ZERO, Nanos::INFINITY, 100_000);
        let found = proof
            .timeline
            .expect("the first schedule is below infinity");
        check_valid(&p, &found);
        assert!(proof.complete, "round {round}: not proven");
        assert_eq!(
            (found.makespan, proof.lower_bound),
            (least, least),
            "round {round}: {n} tasks, {n_devices} devices"
        );
    }
}

#[test]
fn graphs_of_fifty_tasks_are_proven() {
    let mut r = Numbers(5);
    let mut proven = 0;
    for round in 0..12 {
        let p = problem(&mut r, 50, [2, 4, 8, 16][round % 4], 1000);
        let incumbent = algorithms::heft(&p, Insertion::Gaps);
        let proof = super::super::solve(&p, &incumbent, Nanos::ZERO, 20_000);
        if let Some(t) = &proof.timeline {
            check_valid(&p, t);
            assert!(t.makespan < incumbent.makespan && t.makespan >= proof.lower_bound);
        }
        proven += usize::from(proof.complete);
        let again = super::super::solve(&p, &incumbent, Nanos::ZERO, 20_000);
        assert_eq!(again, proof, "the same problem gives the same proof");
    }
    assert!(proven >= 11, "{proven} of 12");
}
