//! Placed problems run on emulated devices: what the executor does is what the timeline says. Times are only checked from below, so that a busy machine
//! fails nothing; how close they come is measured by the bench `emulated`.

use gristmill::cost::{Bytes, LinkProfile, Nanos};
use gristmill::testing::Rng;
use gristmill::testing::emulate::Emulator;
use gristmill_solver::schedule::ranks::{keys_of, placed_tails};
use gristmill_solver::{
    Device, LinkOrder, Links, Parts, Payload, Problem, Task, Tensor, Timeline, Transfer, simulate,
};
use std::collections::BTreeMap;

/// A random problem: tasks of up to 0.3 ms, of no length too; tensors of up to 9 kB, of no bytes too, at 50 to 100 MB/s.
fn random_problem(rng: &mut Rng, n_tasks: usize, n_devices: usize) -> Problem {
    let mut links = Links::uniform(
        n_devices,
        LinkProfile {
            latency: Nanos(50_000),
            bytes_per_second: 50_000_000,
        },
    );
    for (from, to) in (0..n_devices).flat_map(|a| (0..n_devices).map(move |b| (a, b))) {
        let latency = Nanos(1_000 * rng.below(100) as u64);
        links.set(
            from,
            to,
            LinkProfile {
                latency,
                bytes_per_second: rng.pick(&[50_000_000, 100_000_000]),
            },
        );
    }
    let mut task = |_| {
        let cost = (0..n_devices)
            .map(|_| Nanos(rng.pick(&[0, 40_000, 100_000, 300_000])))
            .collect();
        Task {
            cost,
            ..Task::default()
        }
    };
    let tasks: Vec<Task> = (0..n_tasks).map(&mut task).collect();
    let mut tensor = |producer: usize| {
        let consumers = (producer + 1..n_tasks)
            .filter(|_| rng.below(n_tasks) < 3)
            .map(|c| c as u32)
            .collect();
        let payload = Payload::Bytes(Bytes(rng.pick(&[0, 4, 1_000, 9_000])));
        (
            Tensor {
                producer: producer as u32,
                payload,
            },
            consumers,
        )
    };
    let tensors = (0..n_tasks).map(&mut tensor).collect();
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
    .unwrap()
}

fn predict(p: &Problem, device: &[u32]) -> Timeline {
    simulate(
        p,
        device,
        &keys_of(p, &placed_tails(p, device)),
        LinkOrder::Fifo,
    )
}

/// Everything in which a measured run is not what the problem and the predicted timeline allow.
fn violations(p: &Problem, predicted: &Timeline, measured: &Timeline) -> Vec<String> {
    let mut wrong = Vec::new();
    let crossings = |t: &Timeline| {
        let mut all: Vec<(u32, u32, u32)> = t
            .transfers
            .iter()
            .map(|t| (t.tensor, t.from, t.to))
            .collect();
        all.sort_unstable();
        all
    };
    if crossings(predicted) != crossings(measured) {
        wrong.push(format!(
            "{:?} crossed, predicted {:?}",
            crossings(measured),
            crossings(predicted)
        ));
    }
    let arrivals: BTreeMap<(u32, u32), &Transfer> = measured
        .transfers
        .iter()
        .map(|t| ((t.tensor, t.to), t))
        .collect();
    for t in &measured.transfers {
        let producer = p.tensors[t.tensor as usize].producer as usize;
        // Each end is a whole number of nanoseconds after the start of the run.
        let length = t.end.saturating_sub(t.start).0;
        if length.abs_diff(
            p.transfer(t.tensor as usize, t.from as usize, t.to as usize)
                .0,
        ) > 1
        {
            wrong.push(format!("{t:?} took {length} ns"));
        }
        if t.start < measured.end[producer] {
            wrong.push(format!("{t:?} began before its producer ended"));
        }
    }
    for task in 0..p.n_tasks() {
        let (d, start, end) = (
            measured.device[task],
            measured.start[task],
            measured.end[task],
        );
        if start + p.cost(task, d as usize) > end + Nanos(1) || end > measured.makespan {
            wrong.push(format!(
                "task {task} ran {start}..{end} of {}",
                measured.makespan
            ));
        }
        for &x in p.inputs.row(task) {
            let producer = p.tensors[x as usize].producer as usize;
            let there = if measured.device[producer] == d {
                measured.end[producer]
            } else {
                arrivals[&(x, d)].end
            };
            if there > start {
                wrong.push(format!("task {task} began before tensor {x} was there"));
            }
        }
    }
    let tasks = (0..p.n_tasks()).map(|t| {
        (
            (measured.device[t], u32::MAX),
            measured.start[t],
            measured.end[t],
        )
    });
    let links = measured
        .transfers
        .iter()
        .map(|t| ((t.from, t.to), t.start, t.end));
    let mut busy: Vec<_> = tasks.chain(links).collect();
    busy.sort_unstable();
    wrong.extend(
        busy.windows(2)
            .filter(|w| w[0].0 == w[1].0 && w[0].2 > w[1].1)
            .map(|w| format!("overlap {w:?}")),
    );
    let critical = placed_tails(p, &predicted.device)
        .into_iter()
        .max()
        .unwrap_or_default();
    if measured.makespan < critical {
        wrong.push(format!(
            "done in {}, the critical path takes {critical}",
            measured.makespan
        ));
    }
    wrong
}

#[test]
fn random_placements_run_as_they_are_placed() {
    for seed in 0..25 {
        let mut rng = Rng(seed);
        let (n_tasks, n_devices) = (1 + rng.below(16), 1 + rng.below(4));
        let p = random_problem(&mut rng, n_tasks, n_devices);
        let device: Vec<u32> = (0..n_tasks).map(|_| rng.below(n_devices) as u32).collect();
        let predicted = predict(&p, &device);
        let emulator = Emulator::new(&p, &predicted).unwrap();
        for _ in 0..2 {
            let wrong = violations(&p, &predicted, &emulator.run().unwrap());
            assert!(
                wrong.is_empty(),
                "seed {seed}: {wrong:#?}\n{}",
                emulator.program()
            );
        }
    }
}

/// Devices run tasks, and links carry tensors, in the predicted order: here whatever comes late, all that follows waits for it.
#[test]
fn order_is_as_predicted() {
    let cost = || vec![Nanos(200_000); 2];
    let tasks = (0..7)
        .map(|_| Task {
            cost: cost(),
            ..Task::default()
        })
        .collect();
    let payload = Payload::Bytes(Bytes(2_000));
    // 0 and 1 feed the other device, which joins them in 2; then back, in a chain.
    let edges: [(u32, Vec<u32>); 7] = [
        (0, vec![2]),
        (1, vec![2]),
        (2, vec![3]),
        (3, vec![4, 5]),
        (4, vec![6]),
        (5, vec![6]),
        (6, vec![]),
    ];
    let tensors = edges
        .into_iter()
        .map(|(producer, to)| (Tensor { producer, payload }, to))
        .collect();
    let links = Links::uniform(
        2,
        LinkProfile {
            latency: Nanos(100_000),
            bytes_per_second: 20_000_000,
        },
    );
    let devices = vec![
        Device {
            memory: None,
            is_host: false
        };
        2
    ];
    let p = Problem::new(Parts {
        devices,
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    })
    .unwrap();
    let predicted = predict(&p, &[0, 0, 1, 0, 1, 1, 0]);
    let emulator = Emulator::new(&p, &predicted).unwrap();
    for _ in 0..5 {
        let measured = emulator.run().unwrap();
        assert_eq!(violations(&p, &predicted, &measured), Vec::<String>::new());
        let order = |t: &Timeline, d: u32| {
            let mut tasks: Vec<usize> = (0..7).filter(|&i| t.device[i] == d).collect();
            tasks.sort_by_key(|&i| t.start[i]);
            tasks
        };
        assert_eq!(order(&measured, 0), order(&predicted, 0));
        assert_eq!(order(&measured, 1), order(&predicted, 1));
        let crossed = |t: &Timeline| {
            t.transfers
                .iter()
                .map(|t| (t.tensor, t.to))
                .collect::<Vec<_>>()
        };
        assert_eq!(crossed(&measured), crossed(&predicted));
    }
}

#[test]
fn what_cannot_be_emulated_is_refused() {
    let tasks = vec![
        Task {
            cost: vec![Nanos(1); 2],
            ..Task::default()
        };
        2
    ];
    let tensors = vec![(
        Tensor {
            producer: 0,
            payload: Payload::HostCopy(Nanos(5)),
        },
        vec![1],
    )];
    let links = Links::uniform(
        2,
        LinkProfile {
            latency: Nanos(1),
            bytes_per_second: 1,
        },
    );
    let devices = vec![
        Device {
            memory: None,
            is_host: false
        };
        2
    ];
    let p = Problem::new(Parts {
        devices,
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    })
    .unwrap();
    assert!(
        Emulator::new(&p, &predict(&p, &[0, 0])).is_ok(),
        "nothing crosses"
    );
    let error = Emulator::new(&p, &predict(&p, &[0, 1]))
        .err()
        .unwrap()
        .to_string();
    assert_eq!(
        error,
        "tensor 0 crosses with a host copy time; an emulated link needs its size in bytes"
    );
    let mut torn = predict(&p, &[0, 0]);
    torn.device[1] = 1;
    let error = Emulator::new(&p, &torn).err().unwrap().to_string();
    assert!(error.contains("sent 0 times, received 1 times"), "{error}");
}
