//! Explanations of small graphs, and of random problems against independent counts.

use super::*;
use crate::cost::{Bytes, Nanos};
use crate::place::plan;
use crate::place::task_graph::{TaskGraph, Topology, subject};
use crate::rng::Rng;
use gristmill_solver::samples::{Shape, random};
use gristmill_solver::schedule::ranks;
use gristmill_solver::search::portfolio::{self, Algorithm};
use gristmill_solver::{LinkOrder, simulate};
use std::collections::BTreeMap;

/// Two branches that meet; the host must read; `b1` and `b2` stay together.
const GRAPH: &str = r#"{ "format": "task-graph/1", "name": "two <branches>",
  "nodes": [
    { "name": "read", "op": "Read", "cost_ns": { "cpu": 1000 }, "output_bytes": 1000 },
    { "name": "a", "op": "Gemm", "cost_ns": { "gpu": 10000 }, "output_bytes": 4000, "resident_bytes": 500 },
    { "name": "b1", "op": "Gemm", "cost_ns": { "gpu": 6000 }, "output_bytes": 2000, "colocate": "b" },
    { "name": "b2", "op": "Relu", "cost_ns": { "gpu": 3000 }, "output_bytes": 2000, "colocate": "b" },
    { "name": "join", "op": "Add", "cost_ns": { "gpu": 1000 }, "device": "/gpu:0" } ],
  "edges": [[0, 1], [0, 2], [2, 3], [1, 4], [3, 4]] }"#;
const TOPOLOGY: &str = r#"{ "format": "topology/1",
  "devices": [ { "name": "/gpu:0", "kind": "gpu", "memory_bytes": 100000 }, { "name": "/gpu:1", "kind": "gpu" },
               { "name": "/cpu:0", "kind": "cpu" } ],
  "default_link": { "latency_ns": 500, "bytes_per_second": 10000000000 } }"#;

/// Explains, traces or plans the two branches.
pub(super) fn branches<T>(f: impl Fn(&Subject) -> T) -> T {
    let (graph, topology) = (
        TaskGraph::parse(GRAPH).unwrap(),
        Topology::parse(TOPOLOGY).unwrap(),
    );
    let p = graph.problem(&topology).unwrap();
    let options = portfolio::Options::new(&p);
    let solution = portfolio::solve(&p, &options, &Algorithm::name).unwrap();
    f(&subject(&graph, &topology, &p, &solution, options))
}

#[test]
fn text_form() {
    insta::assert_snapshot!(branches(|s| explain(s).to_string()), @r#"
    /gpu:0: 2 nodes, busy 87.3 %, peak 7.3 KiB of 97.7 KiB at 10.60 us: output of a 3.9 KiB, copy of b2, from /gpu:1 2.0 KiB, copy of read, from /cpu:0 1000 B, weights of a 500 B
    /gpu:1: 2 nodes, busy 71.4 %, peak 3.9 KiB at 7.60 us: output of b1 2.0 KiB, output of b2 2.0 KiB
    /cpu:0: 1 node, busy 7.9 %, peak 1000 B at 0 ns: output of read 1000 B
    /gpu:1 -> /gpu:0: 1 transfer, 2.0 KiB, busy 5.6 %, longest: b2
    /cpu:0 -> /gpu:0: 1 transfer, 1000 B, busy 4.8 %, longest: read
    /cpu:0 -> /gpu:1: 1 transfer, 1000 B, busy 4.8 %, longest: read
    critical chain: 4 steps, 12.00 us of compute, 600 ns of transfers
      0 ns..1.00 us read on /cpu:0, waited for nothing
      1.00 us..1.60 us transfer of read on /cpu:0 -> /gpu:0, waited for operand read
      1.60 us..11.60 us a on /gpu:0, waited for transfer of read
      11.60 us..12.60 us join on /gpu:0, waited for operand a
    without /gpu:0: impossible: join can run nowhere else
    without /gpu:1: 21.60 us, +71.4 %
    without /cpu:0: impossible: read can run nowhere else
    links twice as fast: 12.30 us, -2.4 %
    links half as fast: 13.60 us, +7.9 %
    without memory limits: 12.60 us, no change
    by number of devices: 2: 21.60 us (x1.00), 3: 12.60 us (x1.71); all 3 help
    nodes:
    /cpu:0 0 ns..1.00 us read (Read): only device that can run it
    /gpu:0 1.60 us..11.60 us a (Gemm): chosen by series
        on /gpu:1: ready 1.60 us, transfers 600 ns, runs 1.60 us..11.60 us, makespan 22.30 us (+9.70 us)
    /gpu:1 1.60 us..7.60 us b1 (Gemm): colocated in group "b" of 2 nodes; chosen by series
        on /gpu:0: ready 1.60 us, transfers 600 ns, runs 11.60 us..17.60 us, makespan 21.60 us (+9.00 us)
    /gpu:1 7.60 us..10.60 us b2 (Relu): colocated in group "b" of 2 nodes; chosen by series; alternatives: see b1
    /gpu:0 11.60 us..12.60 us join (Add): pinned by its "device": "/gpu:0"
    "#);
}

/// A subject of a random problem, which has no names of its own.
fn with_random(rng: &mut Rng, shape: Shape, f: impl FnOnce(&Subject)) {
    let p = random(rng, shape);
    let options = portfolio::Options {
        refine_tasks: 2_000,
        search_nodes: 100,
        ..portfolio::Options::new(&p)
    };
    let solution = portfolio::solve(&p, &options, &Algorithm::name).unwrap();
    let label = |t| Label {
        name: format!("t{t}"),
        op: String::new(),
        merged: Vec::new(),
        reason: None,
        is_copy: false,
    };
    let devices = (0..p.n_devices()).map(|d| format!("/d:{d}")).collect();
    let tasks = (0..p.n_tasks()).map(label).collect();
    f(&Subject {
        objective: crate::place::Objective::Latency,
        stream: None,
        name: "random",
        problem: &p,
        base: &p,
        freedom: &Freedom::default(),
        copies: &[],
        solution: &solution,
        devices,
        tasks,
        sources: None,
        downgrades: Vec::new(),
        options,
    });
}

const SHAPE: Shape = Shape {
    constrained: true,
    ..Shape::small(14, 3)
};

#[test]
fn loads_are_those_of_the_timeline() {
    let mut rng = Rng(5);
    for _ in 0..12 {
        with_random(&mut rng, SHAPE, |s| {
            let (e, t) = (explain(s), &s.solution.timeline);
            let peaks: Vec<u64> = t.peak_bytes(s.problem).iter().map(|b| b.0).collect();
            assert_eq!(
                e.devices.iter().map(|d| d.peak_bytes).collect::<Vec<_>>(),
                peaks
            );
            for d in e.devices.iter().filter(|d| d.n_live == d.live.len()) {
                assert_eq!(
                    d.live.iter().map(|l| l.bytes).sum::<u64>(),
                    d.peak_bytes,
                    "{d:?}"
                );
            }
            assert_eq!(
                e.links.iter().map(|l| l.n_transfers).sum::<usize>(),
                t.transfers.len()
            );
            assert_eq!(
                Bytes(e.links.iter().map(|l| l.bytes).sum()),
                t.bytes_moved(s.problem)
            );
            assert!(e.devices.iter().all(|d| d.busy_percent <= 100.0));
        });
    }
}

#[test]
fn the_critical_chain_goes_without_a_gap_from_the_first_start_to_the_end() {
    let mut rng = Rng(6);
    for _ in 0..12 {
        with_random(&mut rng, SHAPE, |s| {
            let (chain, t) = (explain(s).critical_chain, &s.solution.timeline);
            assert_eq!(chain.last().map(|c| c.end_ns), Some(t.makespan.0));
            assert_eq!(
                (chain[0].start_ns, chain[0].waited_for.as_str()),
                (0, "nothing"),
                "{chain:?}"
            );
            for pair in chain.windows(2) {
                let is_held = pair[1].waited_for.starts_with("its turn");
                assert!(
                    pair[0].end_ns == pair[1].start_ns
                        || is_held && pair[0].end_ns < pair[1].start_ns,
                    "{pair:?}"
                );
            }
        });
    }
}

/// A full simulation of one group elsewhere gives what the table says.
#[test]
fn alternatives_are_full_simulations() {
    let mut rng = Rng(7);
    for _ in 0..8 {
        with_random(&mut rng, SHAPE, |s| {
            let (p, t) = (s.problem, &s.solution.timeline);
            let mut order = p.order.clone();
            order.sort_by_key(|&i| t.start[i as usize]);
            for node in explain(s).nodes {
                let task: usize = node.name[1..].parse().unwrap();
                let members = p.members.row(p.group_of[task] as usize);
                let is_first = members[0] as usize == task;
                let n = if is_first {
                    p.feasible(task).count()
                } else {
                    1
                };
                assert_eq!(node.alternatives.len(), if n == 1 { 0 } else { n });
                for a in &node.alternatives {
                    let to = s.devices.iter().position(|d| *d == a.device).unwrap() as u32;
                    let mut device = t.device.clone();
                    members.iter().for_each(|&m| device[m as usize] = to);
                    let other =
                        simulate(p, &device, &ranks::keys_of_order(&order), LinkOrder::Urgent);
                    let expected = if to == t.device[task] { t } else { &other };
                    let (start, end) = (expected.start[task].0, expected.end[task].0);
                    assert_eq!(
                        (a.start_ns, a.end_ns, a.makespan_ns),
                        (start, end, expected.makespan.0)
                    );
                    assert!(a.ready_ns <= a.start_ns);
                }
            }
        });
    }
}

#[test]
fn better_machines_are_never_predicted_slower_and_parts_of_one_fall() {
    let mut rng = Rng(8);
    for _ in 0..8 {
        let shape = Shape {
            constrained: false,
            ..SHAPE
        };
        with_random(&mut rng, shape, |s| {
            let e = explain(s);
            let fast = e
                .what_if
                .iter()
                .find(|w| w.what == "links twice as fast")
                .unwrap();
            assert!(
                fast.makespan_ns.unwrap() <= s.solution.timeline.makespan.0,
                "{fast:?}"
            );
            let scaling = e.scaling.unwrap();
            assert_eq!(
                scaling.makespan_ns.iter().map(|r| r.0).collect::<Vec<_>>(),
                [1, 2, 3]
            );
            assert!(
                scaling.makespan_ns.windows(2).all(|w| w[0].1 >= w[1].1),
                "{scaling:?}"
            );
            assert_eq!(scaling.makespan_ns[2].1, s.solution.timeline.makespan.0);
            let one = (0..s.problem.n_tasks()).map(|t| {
                s.problem.cost(
                    t,
                    s.devices
                        .iter()
                        .position(|d| *d == scaling.devices[0])
                        .unwrap(),
                )
            });
            assert_eq!(Nanos(scaling.makespan_ns[0].1), one.sum::<Nanos>());
        });
    }
}

#[test]
fn moves_are_told() {
    let mut rng = Rng(9);
    let (mut told, mut refined) = (0, 0);
    for _ in 0..40 {
        with_random(
            &mut rng,
            Shape {
                n_tasks: 30,
                ..SHAPE
            },
            |s| {
                let moved = s.solution.moved.iter().flatten().count();
                refined += usize::from(s.solution.algorithm.ends_with("+refine"));
                assert!(s.solution.algorithm.ends_with("+refine") || moved == 0);
                told += candidates::reasons(s)
                    .iter()
                    .filter(|n| n.reason.contains("by refinement step"))
                    .count();
            },
        );
    }
    assert!(refined > 0 && told > 0, "{refined} refined, {told} told");
}

#[test]
fn traces_are_json_with_the_times_of_the_timeline() {
    branches(|s| {
        let trace: serde_json::Value = serde_json::from_str(&trace::trace(s)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let name = |e: &serde_json::Value| e["args"]["name"].as_str().unwrap().to_owned();
        let named = events.iter().filter(|e| e["name"] == "thread_name");
        let threads: BTreeMap<(u64, u64), String> = named
            .map(|e| {
                (
                    (e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap()),
                    name(e),
                )
            })
            .collect();
        let t = &s.solution.timeline;
        let (mut tasks, mut transfers) = (0, 0);
        for e in events.iter().filter(|e| e["ph"] == "X") {
            let ns = |key: &str| (e[key].as_f64().unwrap() * 1000.0).round() as u64;
            let thread = &threads[&(e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap())];
            if e["cat"] == "task" {
                let i = s.tasks.iter().position(|l| e["name"] == l.name).unwrap();
                assert_eq!((ns("ts"), ns("ts") + ns("dur")), (t.start[i].0, t.end[i].0));
                assert_eq!(thread, s.device_of(i));
                tasks += 1;
            } else {
                let is_it = |x: &&gristmill_solver::Transfer| {
                    e["name"] == s.maker(x.tensor) && thread.ends_with(&s.devices[x.to as usize])
                };
                let x = t.transfers.iter().find(is_it).unwrap();
                assert_eq!((ns("ts"), ns("ts") + ns("dur")), (x.start.0, x.end.0));
                transfers += 1;
            }
        }
        assert_eq!((tasks, transfers), (t.start.len(), t.transfers.len()));
    });
}

#[test]
fn names_are_made_unique() {
    let names = ["a", "a#2", "a", "b", "a"].map(str::to_owned);
    assert_eq!(unique_names(names), ["a", "a#2", "a#3", "b", "a#4"]);
}

#[test]
fn plans_are_sorted_text() {
    insta::assert_snapshot!(branches(plan::of), @r#"
    plan/1
    # graph "two <branches>"
    # devices /gpu:0, /gpu:1, /cpu:0
    # predicted makespan 12.60 us (12600 ns)
    a = /gpu:0
    b1 = /gpu:1
    b2 = /gpu:1
    join = /gpu:0
    read = /cpu:0
    "#);
}
