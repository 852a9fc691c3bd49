//! Task graphs and topologies with something wrong in them, through the command line: what is wrong, where, and what to try.

use crate::placement::{place, topology};
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
    ["device", "output_host_copy_ns"].iter().for_each(|key| first["nodes"][0][*key] = Value::Null);
    let mut cases: Vec<(String, String)> =
        graphs.into_iter().map(|(path, new)| (changed(&first, path, new), machine.to_string())).collect();
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
        ("/links", json!([{ "from": "/gpu:0", "to": "/gpu:4", "latency_ns": 1, "bytes_per_second": 1 }])),
        ("/format", json!("topology/2")),
    ];
    let mut with_all = machine.clone();
    (with_all["links"], with_all["devices"][0]["memory"]) = (json!([]), Value::Null);
    with_all["devices"][0].as_object_mut().unwrap().remove("memory");
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
    let texts: Vec<(String, String)> = cases.iter().map(|(g, t)| (g.to_string(), t.to_string())).collect();
    let told = told(&texts, 5);
    for ((graph, topology), line) in cases.iter().zip(told.lines()) {
        let mut enough = topology.clone();
        for part in line.split("memory_bytes of /gpu:").skip(1) {
            let (device, rest) = part.split_once(" at ").unwrap();
            let bytes: u64 = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
            enough["devices"][device.parse::<usize>().unwrap()]["memory_bytes"] = json!(bytes);
        }
        let (code, _, err) = place(&graph.to_string(), &enough.to_string(), &[]);
        assert_eq!(code, 0, "{line}\n{err}");
    }
    insta::assert_snapshot!(told);
}
