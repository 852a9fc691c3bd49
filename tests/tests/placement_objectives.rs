//! `place --objective` through the command line.

use crate::placement::{expect_schedule, expect_valid, load, place, solve, topology};
use crate::process::gristmill;
use serde_json::{Value, json};
use std::path::Path;

/// Two tasks, one after the other; a copy between an accelerator and its host takes 3.
fn pair() -> Value {
    let node = |name: &str| json!({ "name": name, "cost_ns": { "gpu": 10, "cpu": 100 }, "output_host_copy_ns": 3 });
    json!({ "format": "task-graph/1", "name": "pair", "nodes": [node("a"), node("b")], "edges": [[0, 1]] })
}

#[test]
fn streams_repeat_a_valid_schedule() {
    let (graph, machine) = (load("pipedream/alexnet.fwd.json"), topology(4, 150, None));
    let one = expect_valid(&graph, &machine, &solve(&graph, &machine, &[]));
    let answer = solve(
        &graph,
        &machine,
        &["--objective", "throughput", "--samples", "8"],
    );
    assert_eq!(
        (&answer["format"], &answer["samples"]),
        (&json!("stream-placement/1"), &json!(8))
    );
    let number = |key: &str| answer[key].as_u64().unwrap();
    let makespan = expect_schedule(&graph, &machine, &answer);
    assert_eq!(number("time_ns"), makespan + 7 * number("period_ns"));
    assert!(number("lower_bound_ns") <= number("time_ns") && number("time_ns") < 8 * one);
    // No device may do more in a period than one holds.
    for device in machine["devices"].as_array().unwrap() {
        let mine = answer["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|n| n["device"] == device["name"]);
        let busy: u64 = mine
            .map(|n| n["end_ns"].as_u64().unwrap() - n["start_ns"].as_u64().unwrap())
            .sum();
        assert!(busy <= number("period_ns"), "{device}");
    }
    let (code, out, err) = place(
        &graph.to_string(),
        &machine.to_string(),
        &["--objective", "throughput"],
    );
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("16 samples in") && out.contains("busy"),
        "{out}"
    );
}

#[test]
fn the_least_memory_is_no_more_than_that_of_the_fastest() {
    let (graph, machine) = (
        load("pipedream/squeezenet1_0.fwd.json"),
        topology(2, 12, None),
    );
    let peak = |answer: &Value| {
        answer["peak_bytes"]
            .as_object()
            .unwrap()
            .values()
            .filter_map(Value::as_u64)
            .max()
    };
    let fast = solve(&graph, &machine, &[]);
    let small = solve(&graph, &machine, &["--objective", "memory"]);
    expect_valid(&graph, &machine, &fast);
    expect_valid(&graph, &machine, &small);
    assert!(
        peak(&small) <= peak(&fast),
        "{:?} {:?}",
        peak(&small),
        peak(&fast)
    );
    let (code, out, err) = place(
        &graph.to_string(),
        &machine.to_string(),
        &["--objective", "memory"],
    );
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("least highest peak"), "{out}");
}

/// A chain of products: two halves for two devices, once runs follow each other.
fn chain(folder: &Path) {
    let lines: String = (1..=6)
        .map(|i| format!("%{i}: f32[256, 256] = matmul(%{}, %0) @ \"/{i}\"\n", i - 1))
        .collect();
    let text = format!(
        "graph \"chain\" {{\n%0 = input \"x\": f32[256, 256]\n{lines}output \"y\" %6\n}}\n"
    );
    std::fs::write(folder.join("chain.ir"), text).unwrap();
}

#[test]
fn models_are_placed_as_stages_and_run_so() {
    let folder = tempfile::tempdir().unwrap();
    chain(folder.path());
    let go = |verb: &str, flags: &[&str]| {
        let args = [
            &[verb, "chain.ir", "--devices", "cpu:2", "--threads", "2"],
            flags,
        ]
        .concat();
        let ended = gristmill(folder.path(), &args);
        assert_eq!(ended.code, Some(0), "{flags:?}: {}", ended.stderr);
        ended.stdout
    };
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let flags = ["--objective", "throughput", "--samples", "20"];
    let one = json(&go("place", &["--json"]));
    let answer = json(&go("place", &[&flags[..], &["--json"]].concat()));
    let number = |key: &str| answer["stream"][key].as_u64().unwrap();
    // One on each device, and one between them.
    assert_eq!((number("samples"), number("in_flight")), (20, 3));
    assert_eq!(
        number("time_ns"),
        number("latency_ns") + 19 * number("period_ns")
    );
    assert!(number("lower_bound_ns") <= number("time_ns"));
    // Two devices do not make one run shorter, but nearly double their number.
    let latency = one["makespan_ns"].as_u64().unwrap();
    assert!(
        number("latency_ns") >= latency && number("period_ns") * 10 < latency * 6,
        "{one} {answer}"
    );
    let explained = go("place", &[&flags[..], &["--explain"]].concat());
    for part in [
        "stream: 20 runs in ",
        "; 3 under way at a time",
        "bottleneck: /device:CPU:",
        "  stage 1: ",
        "  stage 2: ",
        "  link ",
    ] {
        assert!(explained.contains(part), "{part}: {explained}");
    }
    assert!(!explained.contains("without /device"), "{explained}");
    // A plan keeps the stages; so it does for one run alone.
    go(
        "place",
        &[&flags[..], &["--plan-out", "stages.plan"]].concat(),
    );
    let planned = json(&go(
        "place",
        &[&flags[..], &["--plan", "stages.plan", "--json"]].concat(),
    ));
    assert_eq!(
        (&planned["stream"], &planned["algorithm"]),
        (&answer["stream"], &json!("plan"))
    );
    let bench = json(&go(
        "bench",
        &[&flags[..], &["--iters", "9", "--json"]].concat(),
    ));
    assert_eq!(
        (bench["in_flight"].as_u64(), bench["iters"].as_u64()),
        (Some(3), Some(9))
    );
    assert!(bench["period_ns"].as_u64().unwrap() > 0);
    let said = go("bench", &[&flags[..], &["--duration", "0.1"]].concat());
    assert!(
        said.contains("one run every ") && said.contains(" with 3 in flight, predicted "),
        "{said}"
    );
    let numbers = |text: String| text.lines().next().unwrap().to_owned();
    assert_eq!(numbers(go("run", &flags)), numbers(go("run", &[])));
}

#[test]
fn models_are_placed_for_the_least_memory_and_run_so() {
    let folder = tempfile::tempdir().unwrap();
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/data/models/bert_dynamo/");
    let (model, data) = (format!("{dir}model.onnx"), format!("{dir}test_data_set_0"));
    let peak = |flags: &[&str]| {
        let args = [
            &[
                "place",
                &model,
                "--devices",
                "cpu:2",
                "--threads",
                "2",
                "--json",
            ],
            flags,
        ]
        .concat();
        let ended = gristmill(folder.path(), &args);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let answer: Value = serde_json::from_str(&ended.stdout).unwrap();
        answer["peak_bytes"]
            .as_object()
            .unwrap()
            .values()
            .filter_map(Value::as_u64)
            .max()
            .unwrap()
    };
    let (fast, small) = (peak(&[]), peak(&["--objective", "memory"]));
    assert!(small * 10 <= fast * 7, "{small} of {fast}");
    let flags = [
        "--devices",
        "cpu:2",
        "--threads",
        "2",
        "--objective",
        "memory",
        "--verify",
    ];
    let ended = gristmill(
        folder.path(),
        &[&["run", &model, "--test-data", &data], &flags[..]].concat(),
    );
    assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
}

#[test]
fn what_an_objective_cannot_do_is_said() {
    let (graph, machine) = (pair().to_string(), topology(2, 12, None).to_string());
    let cases: [(&str, &[&str]); 4] = [
        (
            &machine,
            &["--objective", "throughput", "--algorithm", "heft"],
        ),
        (&machine, &["--objective", "memory", "--explain"]),
        (&machine, &["--objective", "speed"]),
        (&machine, &["--objective", "throughput", "--samples", "0"]),
    ];
    let mut told = String::new();
    for (topology, flags) in cases {
        let (code, _, err) = place(&graph, topology, flags);
        assert_eq!(code, 2, "{flags:?}: {err}");
        told += err.lines().next().unwrap_or_default();
        told += "\n";
    }
    insta::assert_snapshot!(told);
}
