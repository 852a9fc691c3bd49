//! Random problems: every algorithm gives a valid timeline, delta simulation equals full simulation, refinement never makes worse.

use super::portfolio::{self, Algorithm};
use super::refine::{Budget, refine};
use super::*;
use crate::cost::{Bytes, LinkProfile, Nanos};
use crate::rng::Rng;

/// A random problem: heterogeneous costs, kinds that some tasks lack, groups, shared constants, tasks and transfers of no length.
pub(super) fn random_problem(rng: &mut Rng, n: usize, n_devices: usize) -> Problem {
    let limit = |rng: &mut Rng| rng.one_in(4).then(|| Bytes(1_000 + rng.below(4_000) as u64));
    let devices: Vec<Device> =
        (0..n_devices).map(|d| Device { memory: limit(rng), is_host: d == 0 && rng.one_in(2) }).collect();
    let link = |rng: &mut Rng| LinkProfile {
        latency: Nanos(rng.below(20) as u64),
        bytes_per_second: 1_000_000_000 * (1 + rng.below(20) as u64),
    };
    let mut links = Links::uniform(n_devices, link(rng));
    if rng.one_in(2) {
        (0..n_devices * n_devices).for_each(|i| links.set(i / n_devices, i % n_devices, link(rng)));
    }
    let n_constants = 3;
    let task = |rng: &mut Rng| {
        let base = rng.below(60) as u64;
        let only = rng.below(n_devices);
        let cost = |d: usize, rng: &mut Rng| match rng.below(12) {
            0 if d != only => Nanos::INFINITY,
            1 => Nanos(0),
            _ => Nanos(base + rng.below(8) as u64),
        };
        Task {
            cost: (0..n_devices).map(|d| cost(d, rng)).collect(),
            resident: Bytes(rng.below(100) as u64),
            constants: (0..n_constants).filter(|_| rng.one_in(6)).collect(),
            scratch: Bytes(rng.below(50) as u64),
            group: None,
            is_view: rng.one_in(5),
        }
    };
    let mut tasks: Vec<Task> = (0..n).map(|_| task(rng)).collect();
    // Members of a group can all run everywhere, so that the group can.
    for task in &mut tasks {
        if rng.one_in(5) {
            task.group = Some(rng.below(1 + n / 6) as u32);
            task.cost.iter_mut().filter(|c| !c.is_finite()).for_each(|c| *c = Nanos(7));
        }
    }
    let mut tensors = Vec::new();
    for i in 0..n {
        let consumers: Vec<u32> = (i + 1..n).filter(|_| rng.below(n) < 2).map(|c| c as u32).collect();
        let payload = match rng.below(8) {
            0 => Payload::HostCopy(Nanos(rng.below(30) as u64)),
            1 => Payload::Bytes(Bytes::ZERO),
            _ => Payload::Bytes(Bytes(rng.below(400) as u64)),
        };
        tensors.push((Tensor { producer: i as u32, payload }, consumers));
    }
    let constants = (0..n_constants).map(|_| Bytes(rng.below(500) as u64)).collect();
    Problem::new(Parts { devices, links, tasks, tensors, constants }).expect("a device runs each task and group")
}

fn random_devices(rng: &mut Rng, p: &Problem) -> Vec<u32> {
    let mut device = vec![0; p.n_tasks()];
    for group in 0..p.n_groups() {
        let open: Vec<usize> = p.feasible(p.members.row(group)[0] as usize).collect();
        let d = rng.pick(&open) as u32;
        p.members.row(group).iter().for_each(|&t| device[t as usize] = d);
    }
    device
}

fn expect_valid(p: &Problem, timeline: &Timeline, what: &str) {
    let wrong = check::check(p, timeline);
    assert!(wrong.is_empty(), "{what}: {wrong:?}\n{p:?}");
}

#[test]
fn every_algorithm_gives_a_valid_timeline() {
    let mut rng = Rng(11);
    for round in 0..60 {
        let (n, n_devices) = (1 + rng.below(30), 1 + rng.below(4));
        let p = random_problem(&mut rng, n, n_devices);
        let options = portfolio::Options {
            refine_tasks: 2_000,
            bound_nodes: 300,
            search_nodes: 300,
            ..portfolio::Options::new(&p)
        };
        let best = portfolio::solve(&p, &options, &Algorithm::name).unwrap();
        expect_valid(&p, &best.timeline, &format!("round {round}: portfolio"));
        assert!(best.lower_bound <= best.timeline.makespan, "round {round}: bound {} {}", best.bound, best.lower_bound);
        for (name, algorithm) in Algorithm::NAMES {
            let Some(timeline) = algorithm.run(&p, &options.preference) else { continue };
            expect_valid(&p, &timeline, &format!("round {round}: {name}"));
            let score = fit::key(&p, &timeline);
            assert!(best.score <= score, "round {round}: {name} beats the portfolio");
        }
        assert_eq!(
            best,
            portfolio::solve(&p, &options, &Algorithm::name).unwrap(),
            "round {round}: another answer the second time"
        );
    }
}

#[test]
fn delta_simulation_is_full_simulation() {
    let mut rng = Rng(12);
    for round in 0..200 {
        let (n, n_devices) = (2 + rng.below(30), 2 + rng.below(3));
        let p = random_problem(&mut rng, n, n_devices);
        let links = rng.pick(&[LinkOrder::Urgent, LinkOrder::Fifo]);
        let mut device = random_devices(&mut rng, &p);
        let mut keys: Vec<u64> = (0..p.n_tasks()).map(|_| rng.below(50) as u64).collect();
        let mut simulator = Simulator::new(&p, links);
        let mut afresh = Simulator::new(&p, links);
        let is_patient = rng.one_in(2);
        simulator.set_patient(is_patient);
        afresh.set_patient(is_patient);
        simulator.run(&device, &keys, Nanos::INFINITY);
        for step in 0..10 {
            let other = random_devices(&mut rng, &p);
            let mut changed: Vec<u32> = Vec::new();
            for group in 0..p.n_groups() {
                if rng.one_in(8) {
                    let members = p.members.row(group);
                    members.iter().for_each(|&t| device[t as usize] = other[t as usize]);
                    changed.extend(members);
                }
            }
            if rng.one_in(3) {
                let t = rng.below(p.n_tasks());
                keys[t] = rng.below(50) as u64;
                changed.push(t as u32);
            }
            let makespan = simulator.rerun(&device, &keys, &changed, Nanos::INFINITY);
            afresh.run(&device, &keys, Nanos::INFINITY);
            let full = afresh.timeline();
            assert_eq!(
                (makespan, simulator.timeline()),
                (Some(full.makespan), full.clone()),
                "round {round}, step {step}"
            );
            expect_valid(&p, &full, &format!("round {round}, step {step}"));
        }
    }
}

#[test]
fn refinement_never_makes_worse_and_stops_at_a_limit() {
    let mut rng = Rng(13);
    for _ in 0..60 {
        let p = random_problem(&mut rng, 25, 3);
        let device = random_devices(&mut rng, &p);
        let keys = ranks::keys_of(&p, &ranks::placed_tails(&p, &device));
        let start = simulate(&p, &device, &keys, LinkOrder::Urgent);
        let refined = refine(&p, &start, Nanos::ZERO, Budget { tasks: 4_000, seed: 3 });
        expect_valid(&p, &refined, "refined");
        let score = |t: &Timeline| fit::key(&p, t);
        assert!(score(&refined) <= score(&start));
        let mut simulator = Simulator::new(&p, LinkOrder::Urgent);
        assert_eq!(simulator.run(&device, &keys, start.makespan), None);
        assert_eq!(simulator.run(&device, &keys, start.makespan + Nanos(1)), Some(start.makespan));
    }
}

#[test]
fn times_and_bytes_follow_hand_computation() {
    // Two tasks of 10 on either device; the join costs 5, the link 3 + 1 byte per ns.
    let task = |cost: u64| Task { cost: vec![Nanos(cost); 2], scratch: Bytes(0), ..Task::default() };
    let tensor = |producer| (Tensor { producer, payload: Payload::Bytes(Bytes(4)) }, vec![2]);
    let link = LinkProfile { latency: Nanos(3), bytes_per_second: 1_000_000_000 };
    let p = Problem::new(Parts {
        devices: vec![Device { memory: None, is_host: false }; 2],
        links: Links::uniform(2, link),
        tasks: vec![task(10), task(10), task(5)],
        tensors: vec![tensor(0), tensor(1)],
        constants: vec![],
    })
    .unwrap();
    assert_eq!(ranks::upward(&p), [Nanos(18), Nanos(18), Nanos(5)]);
    assert_eq!(simulate(&p, &[0, 0, 0], &[0, 1, 2], LinkOrder::Urgent).makespan, Nanos(25));
    let split = simulate(&p, &[0, 1, 0], &[0, 1, 2], LinkOrder::Urgent);
    assert_eq!((split.makespan, split.transfers.len()), (Nanos(22), 1));
    assert_eq!(split.peak_bytes(&p), [Bytes(8), Bytes(4)]);
    assert_eq!(Algorithm::Heft.run(&p, &[0, 1]).unwrap().makespan, Nanos(22));
}

#[test]
fn a_ring_and_impossible_groups_are_refused() {
    let task = |cost: [Nanos; 2], group| Task { cost: cost.to_vec(), group, ..Task::default() };
    let (here, there) = ([Nanos(1), Nanos::INFINITY], [Nanos::INFINITY, Nanos(1)]);
    let link = LinkProfile { latency: Nanos(1), bytes_per_second: 1 };
    let make = |tasks: Vec<Task>, edges: &[(u32, u32)]| {
        let tensor = |&(a, b): &(u32, u32)| (Tensor { producer: a, payload: Payload::Bytes(Bytes(1)) }, vec![b]);
        Problem::new(Parts {
            devices: vec![Device { memory: None, is_host: false }; 2],
            links: Links::uniform(2, link),
            tensors: edges.iter().map(tensor).collect(),
            tasks,
            constants: vec![],
        })
    };
    let three = || vec![task(here, None), task(here, None), task(here, None)];
    assert_eq!(make(three(), &[(0, 1), (1, 2), (2, 1)]), Err(Refused::Cycle(vec![2, 1])));
    assert_eq!(make(vec![task(here, Some(7)), task(there, Some(7))], &[]), Err(Refused::Group(vec![0, 1])));
    assert_eq!(make(vec![task([Nanos::INFINITY; 2], None)], &[]), Err(Refused::NoDevice(0)));
}
