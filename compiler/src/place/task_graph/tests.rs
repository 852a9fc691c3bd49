//! Files with something wrong in them: an answer that holds, or an error that says what is wrong.

use super::*;
use crate::error::ErrorKind;
use crate::rng::Rng;
use gristmill_solver::check;
use gristmill_solver::memory::repair;
use gristmill_solver::search::pipeline;
use gristmill_solver::search::portfolio::{self, Algorithm};
use serde_json::{Value, json};

fn graph() -> Value {
    let node = |i: u64| {
        let mut node = json!({ "name": format!("n{i}"), "op": "Gemm", "cost_ns": { "gpu": 5_000 + 700 * i, "cpu": 30_000 },
            "output_bytes": 4_096 * (i % 4), "resident_bytes": 1_000 * i });
        match i {
            1 | 6 => node["colocate"] = json!("weights"),
            2 => node["device"] = json!("/gpu:1"),
            3 => node["device"] = json!("/gpu:*"),
            4 => node["cost_ns"] = json!({ "cpu": 9_000 }),
            _ => {}
        }
        node
    };
    json!({ "format": "task-graph/1", "name": "eight", "nodes": (0..8).map(node).collect::<Vec<_>>(),
        "edges": [[0, 1], [0, 2], [1, 3], [2, 3], [3, 4], [4, 5], [0, 6], [5, 7], [6, 7]] })
}

fn topology() -> Value {
    json!({ "format": "topology/1", "devices": [
            { "name": "/gpu:0", "kind": "gpu", "memory_bytes": 80_000 }, { "name": "/gpu:1", "kind": "gpu", "memory_bytes": 60_000 },
            { "name": "/cpu:0", "kind": "cpu" } ],
        "links": [{ "from": "/gpu:0", "to": "/gpu:1", "latency_ns": 100, "bytes_per_second": 50_000_000_000u64 }],
        "default_link": { "latency_ns": 1_000, "bytes_per_second": 12_000_000_000u64 } })
}

/// Ways to all values inside a value.
fn pointers(value: &Value, at: String, all: &mut Vec<String>) {
    let mut inside = |key: String, v: &Value| pointers(v, format!("{at}/{key}"), all);
    match value {
        Value::Object(map) => map
            .iter()
            .for_each(|(k, v)| inside(k.replace('~', "~0").replace('/', "~1"), v)),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .for_each(|(i, v)| inside(i.to_string(), v)),
        _ => {}
    }
    all.push(at);
}

fn odd(rng: &mut Rng) -> Value {
    rng.pick(&[
        json!(null),
        json!(true),
        json!(""),
        json!("/gpu:7"),
        json!("n0"),
        json!(-1),
        json!(0),
        json!(1),
        json!(1.5),
        json!(1e300),
        json!(u64::MAX),
        json!(1u64 << 44),
        json!((1u64 << 44) + 1),
        json!(i64::MIN),
        json!([]),
        json!({}),
        json!([0, 1]),
    ])
}

fn mutate(rng: &mut Rng, value: &mut Value) {
    let mut all = Vec::new();
    pointers(value, String::new(), &mut all);
    let at = rng.pick(&all);
    let other = value.pointer(&rng.pick(&all)).cloned().unwrap_or_default();
    let odd = odd(rng);
    let Some(found) = value.pointer_mut(&at) else {
        return;
    };
    match (found, rng.below(4)) {
        (Value::Object(map), 0 | 1) => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let Some(key) = keys.get(rng.below(keys.len())).cloned() else {
                return;
            };
            let Some(taken) = map.remove(&key) else {
                return;
            };
            if rng.one_in(2) {
                map.insert(
                    rng.pick(&["colour", "name", "device", "colocate", "cpu"])
                        .to_owned(),
                    taken,
                );
            }
        }
        (Value::Array(list), 0 | 1) if !list.is_empty() => {
            let i = rng.below(list.len());
            let item = list[i].clone();
            if rng.one_in(2) {
                list.push(item)
            } else {
                drop(list.remove(i))
            }
        }
        (Value::Number(n), 0 | 1) => {
            let times = rng.number(4);
            *n = n.as_u64().unwrap_or(0).saturating_mul(times).into();
        }
        (found, 2) => *found = other,
        (found, _) => *found = odd,
    }
}

/// The text, now and then cut or with another character.
fn text(rng: &mut Rng, value: &Value) -> String {
    let mut text = value.to_string();
    match rng.below(12) {
        0 => text.truncate(rng.below(text.len())),
        1 => {
            let at = rng.below(text.len());
            text.replace_range(
                at..at + 1,
                rng.pick(&["\"", "{", "NaN", "-", "9", "\\", ",", " ", "\u{0}", "é"]),
            );
        }
        _ => {}
    }
    text
}

/// Solves for all objectives, with little effort; what is found must hold.
fn solve(graph: &str, topology: &str) -> Result<()> {
    let graph = TaskGraph::parse(graph)?;
    let topology = Topology::parse(topology)?;
    let p = graph.problem(&topology)?;
    let options = Options {
        refine_tasks: 300,
        bound_nodes: 50,
        search_nodes: 50,
        ..Options::new(&p)
    };
    let solution =
        portfolio::solve(&p, &options, &Algorithm::name).expect("the portfolio proposes something");
    let t = &solution.timeline;
    if solution.score.0 > Bytes::ZERO {
        return Err(over_memory(&graph, &topology, &p, &t.peak_bytes(&p)));
    }
    assert_eq!(check::check(&p, t), Vec::<String>::new());
    assert!(
        t.makespan.is_finite() && solution.lower_bound <= t.makespan,
        "{} {}",
        t.makespan,
        solution.lower_bound
    );
    assert!(t.peak_bytes(&p).iter().all(|b| b.is_finite()));
    let stream = pipeline::solve(
        &p,
        pipeline::Options {
            samples: 4,
            tasks: 500,
        },
    );
    assert!(stream.time(4).is_finite());
    assert_eq!(check::check(&p, &stream.sample), Vec::<String>::new());
    assert_eq!(
        check::check(&p, &pipeline::least_memory(&p)),
        Vec::<String>::new()
    );
    assert_eq!(solution.score, repair::key(&p, t));
    Ok(())
}

#[test]
fn broken_files_are_answered_or_refused() {
    let times = std::env::var("GRISTMILL_FUZZ_ROUNDS")
        .map_or(1, |n| n.parse().expect("GRISTMILL_FUZZ_ROUNDS is a number"));
    assert_eq!(solve(&graph().to_string(), &topology().to_string()), Ok(()));
    let (mut n_good, mut n_bad, mut n_full) = (0, 0, 0);
    for seed in 0..1_500 * times {
        let mut rng = Rng(seed);
        let (mut graph, mut topology) = (graph(), topology());
        for _ in 0..1 + rng.below(2) {
            let is_graph = !rng.one_in(3);
            mutate(&mut rng, if is_graph { &mut graph } else { &mut topology });
        }
        let (graph, topology) = (text(&mut rng, &graph), text(&mut rng, &topology));
        let ended = std::panic::catch_unwind(|| solve(&graph, &topology));
        let Ok(ended) = ended else {
            panic!("seed {seed}: a panic on\n{graph}\n{topology}")
        };
        match ended {
            Ok(()) => n_good += 1,
            Err(e) => {
                let said = e.to_string();
                match e.kind() {
                    ErrorKind::InvalidInput => n_bad += 1,
                    ErrorKind::OutOfMemory => n_full += 1,
                    _ => panic!("seed {seed}: {said}\n{graph}\n{topology}"),
                }
                assert!(said.len() > 20, "seed {seed}: {said:?}");
            }
        }
    }
    assert!(
        n_good > 100 * times && n_bad > 500 * times && n_full > 0,
        "{n_good} good, {n_bad} bad, {n_full} too large"
    );
}

#[test]
fn pins_of_a_kind_go_by_kinds_whatever_the_names() {
    let graph = |pin: &str| {
        let node = json!({ "name": "a", "cost_ns": { "gpu": 5, "cpu": 1 }, "device": pin });
        TaskGraph::parse(
            &json!({ "format": "task-graph/1", "nodes": [node], "edges": [] }).to_string(),
        )
        .unwrap()
    };
    let devices = [("left", "gpu"), ("/node:1/cpu:0", "cpu"), ("/gpu:7", "cpu")];
    let devices = devices.map(|(name, kind)| json!({ "name": name, "kind": kind }));
    let link = json!({ "latency_ns": 1, "bytes_per_second": 1 });
    let topology =
        json!({ "format": "topology/1", "devices": devices, "default_link": link }).to_string();
    let topology = Topology::parse(&topology).unwrap();
    let open = |pin: &str| {
        graph(pin)
            .problem(&topology)
            .map(|p| p.feasible(0).collect::<Vec<_>>())
    };
    assert_eq!(open("/gpu:*"), Ok(vec![0]));
    assert_eq!(open("/cpu:*"), Ok(vec![1, 2]));
    assert_eq!(open("/node:1/cpu:*"), Ok(vec![1]));
    assert_eq!(open("/gpu:7"), Ok(vec![2]));
    assert!(open("/tpu:*").is_err_and(|e| e.to_string().contains("/tpu:*")));
    assert!(open("/gpu:7*").is_err());
}

/// Two tasks that must be apart, since one device cannot hold what both keep; then the copy that
/// the second one needs does not fit beside.
#[test]
fn a_search_shows_that_nothing_fits() {
    let node = |name: &str, output: u64| json!({ "name": name, "cost_ns": { "gpu": 5 }, "resident_bytes": 60, "output_bytes": output });
    let graph = json!({ "format": "task-graph/1", "nodes": [node("a", 30), node("b", 0), node("c", 0)], "edges": [[0, 1], [0, 2]] });
    let device = |i: usize| json!({ "name": format!("/gpu:{i}"), "kind": "gpu", "memory_bytes": if i == 0 { 130 } else { 100 } });
    let link = json!({ "latency_ns": 1, "bytes_per_second": 1_000_000_000 });
    let topology =
        json!({ "format": "topology/1", "devices": [device(0), device(1)], "default_link": link });
    let (graph, topology) = (
        TaskGraph::parse(&graph.to_string()).unwrap(),
        Topology::parse(&topology.to_string()).unwrap(),
    );
    let p = graph.problem(&topology).unwrap();
    let s = portfolio::solve(&p, &Options::new(&p), &Algorithm::name).unwrap();
    assert!(s.score.0 > Bytes::ZERO);
    let said = over_memory(&graph, &topology, &p, &s.timeline.peak_bytes(&p)).to_string();
    assert!(
        said.contains("a search of all schedules shows that none does"),
        "{said}"
    );
}
