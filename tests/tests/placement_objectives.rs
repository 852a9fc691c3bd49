//! `place --objective` and `--semantics` through the command line.

use crate::placement::{expect_schedule, expect_valid, load, place, solve, topology};
use crate::process::gristmill;
use serde_json::{Value, json};

/// Two tasks, one after the other; a copy between an accelerator and its host takes 3.
fn pair() -> Value {
    let node = |name: &str| json!({ "name": name, "cost_ns": { "gpu": 10, "cpu": 100 }, "output_host_copy_ns": 3 });
    json!({ "format": "task-graph/1", "name": "pair", "nodes": [node("a"), node("b")], "edges": [[0, 1]] })
}

#[test]
fn calls_copy_through_the_host() {
    let (graph, machine) = (pair(), topology(2, 12, None));
    let call = |objective: &str| solve(&graph, &machine, &["--semantics", "call", "--objective", objective]);
    let latency = call("latency");
    assert_eq!((&latency["format"], &latency["value_ns"]), (&json!("call-placement/1"), &json!(20)));
    assert_eq!(latency["nodes"][0]["device"], latency["nodes"][1]["device"]);
    // One call each: 10 and the copy out, the copy in and 10.
    let throughput = call("throughput");
    assert_eq!((&throughput["value_ns"], &throughput["optimal"]), (&json!(13), &json!(true)));
    assert_ne!(throughput["nodes"][0]["device"], throughput["nodes"][1]["device"]);
    let flags = ["--semantics", "call", "--objective", "throughput"];
    let (code, out, err) = place(&graph.to_string(), &machine.to_string(), &flags);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("largest load 13 ns, optimal") && out.contains("/gpu:1: 1 nodes"), "{out}");
}

#[test]
fn streams_repeat_a_valid_schedule() {
    let (graph, machine) = (load("pipedream/alexnet.fwd.json"), topology(4, 150, None));
    let one = expect_valid(&graph, &machine, &solve(&graph, &machine, &[]));
    let answer = solve(&graph, &machine, &["--objective", "throughput", "--samples", "8"]);
    assert_eq!((&answer["format"], &answer["samples"]), (&json!("stream-placement/1"), &json!(8)));
    let number = |key: &str| answer[key].as_u64().unwrap();
    let makespan = expect_schedule(&graph, &machine, &answer);
    assert_eq!(number("time_ns"), makespan + 7 * number("period_ns"));
    assert!(number("lower_bound_ns") <= number("time_ns") && number("time_ns") < 8 * one);
    // No device may do more in a period than one holds.
    for device in machine["devices"].as_array().unwrap() {
        let mine = answer["nodes"].as_array().unwrap().iter().filter(|n| n["device"] == device["name"]);
        let busy: u64 = mine.map(|n| n["end_ns"].as_u64().unwrap() - n["start_ns"].as_u64().unwrap()).sum();
        assert!(busy <= number("period_ns"), "{device}");
    }
    let (code, out, err) = place(&graph.to_string(), &machine.to_string(), &["--objective", "throughput"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("16 samples in") && out.contains("busy"), "{out}");
}

#[test]
fn the_least_memory_is_no_more_than_that_of_the_fastest() {
    let (graph, machine) = (load("pipedream/squeezenet1_0.fwd.json"), topology(2, 12, None));
    let peak = |answer: &Value| answer["peak_bytes"].as_object().unwrap().values().filter_map(Value::as_u64).max();
    let fast = solve(&graph, &machine, &[]);
    let small = solve(&graph, &machine, &["--objective", "memory"]);
    expect_valid(&graph, &machine, &fast);
    expect_valid(&graph, &machine, &small);
    assert!(peak(&small) <= peak(&fast), "{:?} {:?}", peak(&small), peak(&fast));
    let (code, out, err) = place(&graph.to_string(), &machine.to_string(), &["--objective", "memory"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("least highest peak"), "{out}");
}

#[test]
fn what_an_objective_cannot_do_is_said() {
    let (graph, machine) = (pair().to_string(), topology(2, 12, None).to_string());
    let hosts = json!({ "format": "topology/1", "devices": [{ "name": "/cpu:0", "kind": "cpu" }] }).to_string();
    let cases: [(&str, &[&str]); 6] = [
        (&machine, &["--semantics", "call", "--objective", "memory"]),
        (&machine, &["--objective", "throughput", "--algorithm", "heft"]),
        (&machine, &["--objective", "memory", "--explain"]),
        (&machine, &["--objective", "speed"]),
        (&machine, &["--objective", "throughput", "--samples", "0"]),
        (&hosts, &["--semantics", "call"]),
    ];
    let mut told = String::new();
    for (topology, flags) in cases {
        let (code, _, err) = place(&graph, topology, flags);
        assert_eq!(code, 2, "{flags:?}: {err}");
        told += err.lines().next().unwrap_or_default();
        told += "\n";
    }
    let folder = tempfile::tempdir().unwrap();
    let model = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models/mlp_script/model.onnx");
    let ended = gristmill(folder.path(), &["place", model.to_str().unwrap(), "--objective", "throughput"]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    told += &ended.stderr;
    insta::assert_snapshot!(told);
}
