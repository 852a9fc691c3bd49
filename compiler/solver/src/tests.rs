//! Small problems, by hand. Random ones are in [`invariants`].

mod invariants;

use crate::rng::Rng;
use crate::samples::{Shape, random};
use crate::schedule::ranks;
use crate::search::portfolio::{self, Algorithm, Options};
use crate::{
    Bytes, Device, LinkOrder, LinkProfile, Links, Nanos, Parts, Payload, Problem, Refused, Task,
    Tensor, simulate,
};

#[test]
fn times_and_bytes_follow_hand_computation() {
    // Two tasks of 10 on either device; the join costs 5, the link 3 + 1 byte per ns.
    let task = |cost: u64| Task {
        cost: vec![Nanos(cost); 2],
        scratch: Bytes(0),
        ..Task::default()
    };
    let tensor = |producer| {
        (
            Tensor {
                producer,
                payload: Payload::Bytes(Bytes(4)),
            },
            vec![2],
        )
    };
    let link = LinkProfile {
        latency: Nanos(3),
        bytes_per_second: 1_000_000_000,
    };
    let p = Problem::new(Parts {
        devices: vec![
            Device {
                memory: None,
                is_host: false
            };
            2
        ],
        links: Links::uniform(2, link),
        tasks: vec![task(10), task(10), task(5)],
        tensors: vec![tensor(0), tensor(1)],
        constants: vec![],
    })
    .unwrap();
    // In quarters of a ns: 10, half of the link's 7, and 5.
    assert_eq!(ranks::upward(&p), [74, 74, 20]);
    assert_eq!(
        simulate(&p, &[0, 0, 0], &[0, 1, 2], LinkOrder::Urgent).makespan,
        Nanos(25)
    );
    let split = simulate(&p, &[0, 1, 0], &[0, 1, 2], LinkOrder::Urgent);
    assert_eq!((split.makespan, split.transfers.len()), (Nanos(22), 1));
    assert_eq!(split.peak_bytes(&p), [Bytes(8), Bytes(4)]);
    assert_eq!(
        Algorithm::Heft.run(&p, &[0, 1]).unwrap().makespan,
        Nanos(22)
    );
}

#[test]
fn a_ring_and_impossible_groups_are_refused() {
    let task = |cost: [Nanos; 2], group| Task {
        cost: cost.to_vec(),
        group,
        ..Task::default()
    };
    let (here, there) = ([Nanos(1), Nanos::INFINITY], [Nanos::INFINITY, Nanos(1)]);
    let link = LinkProfile {
        latency: Nanos(1),
        bytes_per_second: 1,
    };
    let make = |tasks: Vec<Task>, edges: &[(u32, u32)]| {
        let tensor = |&(a, b): &(u32, u32)| {
            (
                Tensor {
                    producer: a,
                    payload: Payload::Bytes(Bytes(1)),
                },
                vec![b],
            )
        };
        Problem::new(Parts {
            devices: vec![
                Device {
                    memory: None,
                    is_host: false
                };
                2
            ],
            links: Links::uniform(2, link),
            tensors: edges.iter().map(tensor).collect(),
            tasks,
            constants: vec![],
        })
    };
    let three = || vec![task(here, None), task(here, None), task(here, None)];
    assert_eq!(
        make(three(), &[(0, 1), (1, 2), (2, 1)]),
        Err(Refused::Cycle(vec![2, 1]))
    );
    assert_eq!(
        make(vec![task(here, Some(7)), task(there, Some(7))], &[]),
        Err(Refused::Group(vec![0, 1]))
    );
    assert_eq!(
        make(vec![task([Nanos::INFINITY; 2], None)], &[]),
        Err(Refused::NoDevice(0))
    );
}

#[test]
fn after_the_deadline_the_first_proposal_is_the_answer() {
    let p = random(&mut Rng(5), Shape::small(40, 3));
    let name = |a: Algorithm| a.name();
    let long = portfolio::solve(&p, &Options::new(&p), &name).unwrap();
    let options = Options {
        deadline: Some(std::time::Instant::now()),
        ..Options::new(&p)
    };
    let brief = portfolio::solve(&p, &options, &name).unwrap();
    assert_eq!(
        (brief.candidates.len(), brief.algorithm.as_str()),
        (1, "single 0")
    );
    assert!(long.candidates.len() > 5 && long.score <= brief.score);
    assert!(crate::check::check(&p, &brief.timeline).is_empty());
}
