//! Task graphs and topologies through the command line: with all that the formats allow, and with something wrong in them: what is wrong, where, and
//! what to try.

use crate::placement::{expect_valid, place, solve, topology};
use gristmill::testing::Rng;
use serde_json::{Value, json};

/// Three tasks of 5 ns; `b` and `c` stay together.
fn graph() -> Value {
    json!({ "format": "task-graph/1", "nodes": [
        { "name": "a", "cost_ns": { "gpu": 5 }, "output_bytes": 80 },
        { "name": "b", "cost_ns": { "gpu": 5 }, "colocate": "g", "output_bytes": 300, "resident_bytes": 200 },
        { "name": "c", "cost_ns": { "gpu": 5 }, "colocate": "g", "resident_bytes": 400 } ],
        "edges": [[0, 1], [1, 2]] })
}

/// What is said about files that end with `code`, one line each.
fn told(cases: &[(String, String)], code: i32) -> String {
    let mut told = String::new();
    for (graph, topology) in cases {
        let (ended, _, err) = place(graph, topology, &[]);
        assert_eq!(ended, code, "{err}\n{graph}\n{topology}");
        told += &err;
    }
    told
}

#[test]
fn contradictions_are_named() {
    let machine = topology(2, 12, None);
    let changed = |value: &Value, path: &str, new: Value| {
        let mut value = value.clone();
        *value.pointer_mut(path).unwrap() = new;
        value.to_string()
    };
    let graphs = [
        ("/edges", json!([[0, 1], [1, 2], [2, 0]])),
        ("/edges", json!([[1, 1]])),
        ("/edges", json!([[0, -1]])),
        ("/edges", json!([[0, 1.5]])),
        ("/nodes/0/device", json!("/gpu:9")),
        ("/nodes/0/cost_ns", json!({})),
        ("/nodes/0/cost_ns", json!({ "gpu": 1e300 })),
        ("/nodes/0/output_bytes", json!(u64::MAX)),
        ("/nodes/0/output_bytes", json!(-3)),
        ("/nodes/1/resident_bytes", json!(u64::MAX)),
        ("/nodes/0/output_host_copy_ns", json!(7)),
        ("/nodes/2/name", json!("b")),
        ("/nodes", json!({})),
    ];
    let mut first = graph();
    ["device", "output_host_copy_ns"]
        .iter()
        .for_each(|key| first["nodes"][0][*key] = Value::Null);
    let mut cases: Vec<(String, String)> = graphs
        .into_iter()
        .map(|(path, new)| (changed(&first, path, new), machine.to_string()))
        .collect();
    // The two nodes of a group pinned apart.
    let mut apart = graph();
    (apart["nodes"][1]["device"], apart["nodes"][2]["device"]) = (json!("/gpu:0"), json!("/gpu:1"));
    cases.push((apart.to_string(), machine.to_string()));
    let topologies = [
        ("/devices/1/name", json!("/gpu:0")),
        ("/devices/0/memory", json!(5)),
        ("/default_link/bytes_per_second", json!(0)),
        ("/default_link/latency_ns", json!(u64::MAX)),
        ("/default_link/latency_ns", json!(-1)),
        (
            "/links",
            json!([{ "from": "/gpu:0", "to": "/gpu:4", "latency_ns": 1, "bytes_per_second": 1 }]),
        ),
        (
            "/links",
            json!([{ "from": "/gpu:0", "to": "/gpu:1", "latency_ns": 1, "bytes_per_second": 1 },
            { "from": "/gpu:0", "to": "/gpu:1", "latency_ns": 2, "bytes_per_second": 1 }]),
        ),
        ("/format", json!("topology/2")),
    ];
    let mut with_all = machine.clone();
    (with_all["links"], with_all["devices"][0]["memory"]) = (json!([]), Value::Null);
    with_all["devices"][0]
        .as_object_mut()
        .unwrap()
        .remove("memory");
    for (path, new) in topologies {
        let mut topology = with_all.clone();
        if path == "/devices/0/memory" {
            topology["devices"][0]["memory"] = new
        } else {
            *topology.pointer_mut(path).unwrap() = new
        }
        cases.push((graph().to_string(), topology.to_string()));
    }
    let whole = graph().to_string();
    cases.push((whole[..whole.len() / 2].to_owned(), machine.to_string()));
    cases.push((whole.replace(":5", ":NaN"), machine.to_string()));
    insta::assert_snapshot!(told(&cases, 2));
}

/// What is too large is named with how much it is over, and with the cheapest limits that would do; with those it is placed.
#[test]
fn memory_that_is_too_small_is_told_with_what_would_do() {
    let mut large = graph();
    large["nodes"][0]["output_bytes"] = json!(5_000);
    let mut many = graph();
    (many["nodes"][1]["colocate"], many["nodes"][2]["colocate"]) = (Value::Null, Value::Null);
    let cases = [
        (graph(), topology(2, 12, Some(700))),
        (large, topology(2, 12, Some(900))),
        (many, topology(2, 12, Some(450))),
    ];
    let texts: Vec<(String, String)> = cases
        .iter()
        .map(|(g, t)| (g.to_string(), t.to_string()))
        .collect();
    let told = told(&texts, 5);
    for ((graph, topology), line) in cases.iter().zip(told.lines()) {
        let mut enough = topology.clone();
        for part in line.split("memory_bytes of /gpu:").skip(1) {
            let (device, rest) = part.split_once(" at ").unwrap();
            let bytes: u64 = rest
                .split(|c: char| !c.is_ascii_digit())
                .next()
                .unwrap()
                .parse()
                .unwrap();
            enough["devices"][device.parse::<usize>().unwrap()]["memory_bytes"] = json!(bytes);
        }
        let (code, _, err) = place(&graph.to_string(), &enough.to_string(), &[]);
        assert_eq!(code, 0, "{line}\n{err}");
    }
    insta::assert_snapshot!(told);
}

/// A graph and a machine with all that the formats allow: kinds without times, times and sizes of nothing, edges that come twice, parts without edges
/// between them, groups, pins to devices and kinds, links of their own, and names that say nothing of kinds.
fn random_files(rng: &mut Rng) -> (Value, Value) {
    let n_devices = 1 + rng.below(4);
    let kinds = ["gpu", "cpu", "npu"];
    let device = |i: usize| match i {
        0 => json!({ "name": "/gpu:0", "kind": "gpu" }),
        _ => json!({ "name": format!("box{i}"), "kind": kinds[i % 3] }),
    };
    let devices: Vec<Value> = (0..n_devices).map(device).collect();
    let n = rng.below(9);
    let node = |i: usize, rng: &mut Rng| {
        let mut node = json!({ "name": format!("n{i}"), "cost_ns": { "gpu": rng.pick(&[0, 7, 400, 90_000]) } });
        for kind in &kinds[1..] {
            if rng.one_in(2) {
                node["cost_ns"][*kind] = json!(rng.pick(&[0, 50, 800, 2_000_000]));
            }
        }
        for (key, values) in [
            ("output_bytes", [0, 1, 4_097, 1_000_000]),
            ("resident_bytes", [0, 3, 900, 70_000]),
        ] {
            if rng.one_in(2) {
                node[key] = json!(rng.pick(&values));
            }
        }
        match rng.below(8) {
            0 => node["colocate"] = json!(rng.pick(&["g", "h"])),
            1 => node["device"] = json!("/gpu:*"),
            2 => node["device"] = json!("/gpu:0"),
            _ => {}
        }
        node
    };
    let nodes: Vec<Value> = (0..n).map(|i| node(i, rng)).collect();
    let pairs = (0..n).flat_map(|a| (a + 1..n).map(move |b| [a, b]));
    let mut edges: Vec<[usize; 2]> = pairs.filter(|_| rng.one_in(4)).collect();
    edges.extend(edges.first().copied());
    let mut links = Vec::new();
    for (a, b) in (0..n_devices).flat_map(|a| (0..n_devices).map(move |b| (a, b))) {
        if rng.one_in(3) {
            links.push(json!({ "from": devices[a]["name"], "to": devices[b]["name"], "latency_ns": rng.pick(&[0, 9]),
                "bytes_per_second": rng.pick(&[777, 1_000_000_007u64, 12_000_000_000]) }));
        }
    }
    let graph = json!({ "format": "task-graph/1", "nodes": nodes, "edges": edges });
    let default = json!({ "latency_ns": 11, "bytes_per_second": 5_000_000_000u64 });
    (
        graph,
        json!({ "format": "topology/1", "devices": devices, "links": links, "default_link": default }),
    )
}

/// Answers hold by the rules of the format; with limits that are just what an answer needs there is one too; where one device cannot even hold what is
/// resident there is none.
#[test]
fn answers_hold_whatever_the_files_have() {
    for seed in 0..30 {
        let mut rng = Rng(seed);
        let (graph, mut topology) = random_files(&mut rng);
        let answer = solve(&graph, &topology, &[]);
        let makespan = expect_valid(&graph, &topology, &answer);
        for device in topology["devices"].as_array_mut().unwrap() {
            device["memory_bytes"] = answer["peak_bytes"][device["name"].as_str().unwrap()].clone();
        }
        let tight = solve(&graph, &topology, &[]);
        assert!(
            expect_valid(&graph, &topology, &tight) >= makespan || answer["optimal"] == false,
            "seed {seed}"
        );
        let alone = topology["devices"].as_array().unwrap().len() == 1;
        let resident = graph["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|n| n["resident_bytes"].as_u64())
            .sum::<u64>();
        if alone && resident > 0 {
            topology["devices"][0]["memory_bytes"] = json!(resident - 1);
            let (code, _, err) = place(&graph.to_string(), &topology.to_string(), &[]);
            assert_eq!(code, 5, "seed {seed}: {err}");
        }
    }
}
