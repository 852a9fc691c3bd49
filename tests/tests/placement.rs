//! Bare placement problems through the command line: answers are checked against the files alone, wrong files give clear errors.

use crate::process::gristmill;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn graph_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data/placement")
        .join(name)
}

/// `n` accelerators with the same link between all, 10 us and so many GB/s.
pub fn topology(n: usize, gigabytes_per_second: u64, memory: Option<u64>) -> Value {
    let device = |i: usize| match memory {
        Some(bytes) => json!({ "name": format!("/gpu:{i}"), "kind": "gpu", "memory_bytes": bytes }),
        None => json!({ "name": format!("/gpu:{i}"), "kind": "gpu" }),
    };
    json!({ "format": "topology/1", "devices": (0..n).map(device).collect::<Vec<_>>(),
        "default_link": { "latency_ns": 10_000, "bytes_per_second": gigabytes_per_second * 1_000_000_000 } })
}

/// Exit code, standard output and standard error of `place` on files in a folder of their own.
pub fn place(graph: &str, topology: &str, flags: &[&str]) -> (i32, String, String) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("g.json"), graph).unwrap();
    std::fs::write(dir.path().join("t.json"), topology).unwrap();
    let args = [
        [
            "place",
            "--task-graph",
            "g.json",
            "--topology",
            "t.json",
            "--effort",
            "2",
        ]
        .as_slice(),
        flags,
    ]
    .concat();
    let ended = gristmill(dir.path(), &args);
    (ended.code.unwrap_or(-1), ended.stdout, ended.stderr)
}

pub fn solve(graph: &Value, topology: &Value, flags: &[&str]) -> Value {
    let (code, out, err) = place(
        &graph.to_string(),
        &topology.to_string(),
        &[&["--json"], flags].concat(),
    );
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).expect("the answer is JSON")
}

type Interval = (u64, u64);

/// Checks an answer by the rules of `placement/1`, from the files alone; gives the makespan.
pub fn expect_valid(graph: &Value, topology: &Value, answer: &Value) -> u64 {
    assert_eq!(answer["format"], "placement/1");
    check_memory(graph, topology, answer);
    let makespan = expect_schedule(graph, topology, answer);
    assert!(
        answer["lower_bound_ns"]
            .as_u64()
            .is_some_and(|bound| bound <= makespan)
    );
    makespan
}

/// Checks all but the memory.
pub fn expect_schedule(graph: &Value, topology: &Value, answer: &Value) -> u64 {
    let nodes = graph["nodes"].as_array().unwrap();
    let placed: BTreeMap<&str, &Value> = answer["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| (n["name"].as_str().unwrap(), n))
        .collect();
    assert_eq!(
        (placed.len(), answer["nodes"].as_array().unwrap().len()),
        (nodes.len(), nodes.len())
    );
    let kinds: BTreeMap<&str, &str> = topology["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(device_kind)
        .collect();
    let at = |i: usize| placed[nodes[i]["name"].as_str().unwrap()];
    let device = |i: usize| at(i)["device"].as_str().unwrap();
    let time = |v: &Value, key: &str| v[key].as_u64().unwrap();
    let mut busy: BTreeMap<String, Vec<Interval>> = BTreeMap::new();
    let mut groups: BTreeMap<&str, &str> = BTreeMap::new();
    for (i, node) in nodes.iter().enumerate() {
        let cost = node["cost_ns"][kinds[device(i)]]
            .as_u64()
            .expect("a kernel for this kind");
        let (start, end) = (time(at(i), "start_ns"), time(at(i), "end_ns"));
        assert_eq!(end, start + cost, "{node}");
        busy.entry(device(i).into()).or_default().push((start, end));
        if let Some(group) = node["colocate"].as_str() {
            assert_eq!(
                *groups.entry(group).or_insert(device(i)),
                device(i),
                "{node}"
            );
        }
        if let Some(pin) = node["device"].as_str() {
            assert!(
                pin == device(i) || pin == format!("/{}:*", kinds[device(i)]),
                "{node}"
            );
        }
    }
    let by_name: BTreeMap<&str, &Value> = nodes
        .iter()
        .map(|n| (n["name"].as_str().unwrap(), n))
        .collect();
    let mut arrivals: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for t in answer["transfers"].as_array().unwrap() {
        let (name, from, to) = (
            t["name"].as_str().unwrap(),
            t["from"].as_str().unwrap(),
            t["to"].as_str().unwrap(),
        );
        let (start, end) = (time(t, "start_ns"), time(t, "end_ns"));
        assert_eq!(placed[name]["device"], from);
        assert!(start >= time(placed[name], "end_ns"), "{t}");
        assert_eq!(
            end - start,
            transfer_time(by_name[name], topology, (from, to)),
            "{t}"
        );
        assert!(
            arrivals.insert((name, to), end).is_none(),
            "{t} is made twice"
        );
        busy.entry(format!("{from} -> {to}"))
            .or_default()
            .push((start, end));
    }
    for (what, intervals) in &mut busy {
        intervals.sort_unstable();
        assert!(
            intervals.windows(2).all(|w| w[0].1 <= w[1].0),
            "{what} does two things at a time"
        );
    }
    for edge in graph["edges"].as_array().unwrap() {
        let (from, to) = (
            edge[0].as_u64().unwrap() as usize,
            edge[1].as_u64().unwrap() as usize,
        );
        let there = match device(from) == device(to) {
            true => time(at(from), "end_ns"),
            false => arrivals[&(nodes[from]["name"].as_str().unwrap(), device(to))],
        };
        assert!(time(at(to), "start_ns") >= there, "edge {edge}");
    }
    let makespan = placed
        .values()
        .map(|n| time(n, "end_ns"))
        .max()
        .unwrap_or(0);
    assert_eq!(time(answer, "makespan_ns"), makespan);
    makespan
}

fn device_kind(d: &Value) -> (&str, &str) {
    (d["name"].as_str().unwrap(), d["kind"].as_str().unwrap())
}

fn transfer_time(node: &Value, topology: &Value, (from, to): (&str, &str)) -> u64 {
    let links = topology["links"].as_array();
    let named = links.and_then(|links| links.iter().find(|l| l["from"] == from && l["to"] == to));
    let link = named.unwrap_or(&topology["default_link"]);
    let bytes = u128::from(node["output_bytes"].as_u64().unwrap_or(0));
    let rate = u128::from(link["bytes_per_second"].as_u64().unwrap());
    link["latency_ns"].as_u64().unwrap()
        + u64::try_from((bytes * 1_000_000_000).div_ceil(rate)).unwrap()
}

/// Peaks are recomputed from the answer's times, and kept.
fn check_memory(graph: &Value, topology: &Value, answer: &Value) {
    let nodes = graph["nodes"].as_array().unwrap();
    let time = |v: &Value, key: &str| v[key].as_u64().unwrap();
    let placed: BTreeMap<&str, &Value> = answer["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| (n["name"].as_str().unwrap(), n))
        .collect();
    let at: Vec<&Value> = nodes
        .iter()
        .map(|n| placed[n["name"].as_str().unwrap()])
        .collect();
    let mut consumers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for edge in graph["edges"].as_array().unwrap() {
        consumers[edge[0].as_u64().unwrap() as usize].push(edge[1].as_u64().unwrap() as usize);
    }
    let mut sent: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
    for t in answer["transfers"].as_array().unwrap() {
        sent.entry(t["name"].as_str().unwrap()).or_default().push(t);
    }
    for device in topology["devices"].as_array().unwrap() {
        let name = device["name"].as_str().unwrap();
        let mut changes: Vec<(u64, i128)> = Vec::new();
        let mut resident = 0i128;
        for (i, node) in nodes.iter().enumerate() {
            let bytes = i128::from(node["output_bytes"].as_u64().unwrap_or(0));
            let local = consumers[i]
                .iter()
                .map(|&c| at[c])
                .filter(|c| c["device"] == name);
            let last = local.map(|c| time(c, "end_ns")).max().unwrap_or(0);
            let sent = sent
                .get(node["name"].as_str().unwrap())
                .map(Vec::as_slice)
                .unwrap_or_default();
            let (from, until) = if at[i]["device"] == name {
                resident += i128::from(node["resident_bytes"].as_u64().unwrap_or(0));
                let left = sent.iter().map(|t| time(t, "end_ns")).max().unwrap_or(0);
                (
                    time(at[i], "start_ns"),
                    time(at[i], "end_ns").max(last).max(left),
                )
            } else {
                let Some(copy) = sent.iter().find(|t| t["to"] == name) else {
                    continue;
                };
                (time(copy, "start_ns"), last)
            };
            if from < until {
                changes.extend([(from, bytes), (until, -bytes)]);
            }
        }
        changes.sort_unstable();
        let (mut held, mut peak) = (resident, resident);
        for (_, change) in changes {
            held += change;
            peak = peak.max(held);
        }
        assert_eq!(
            answer["peak_bytes"][name].as_i64().map(i128::from),
            Some(peak),
            "{name}"
        );
        assert!(
            device["memory_bytes"]
                .as_i64()
                .is_none_or(|limit| peak <= i128::from(limit)),
            "{name}"
        );
    }
}

pub fn load(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(graph_file(name)).unwrap()).unwrap()
}

#[test]
fn answers_are_valid_and_as_good_as_every_algorithm() {
    for (name, n, rate) in [
        ("pipedream/squeezenet1_0.train.json", 2, 12),
        ("pipedream/inception_v3.fwd.json", 4, 12),
    ] {
        let (graph, topology) = (load(name), topology(n, rate, None));
        let best = expect_valid(&graph, &topology, &solve(&graph, &topology, &[]));
        for algorithm in ["single /gpu:0", "simple", "greedy", "heft", "etf", "peft"] {
            let one = solve(&graph, &topology, &["--algorithm", algorithm]);
            assert_eq!(one["algorithm"], algorithm);
            assert!(
                best <= expect_valid(&graph, &topology, &one),
                "{name}: {algorithm}"
            );
        }
    }
}

#[test]
fn memory_limits_are_kept_or_the_error_names_what_is_too_large() {
    let graph = load("pipedream/alexnet.fwd.json");
    let whole = solve(&graph, &topology(1, 12, None), &[]);
    let need = whole["peak_bytes"]["/gpu:0"].as_u64().unwrap();
    let halves = topology(2, 12, Some(need * 7 / 10));
    expect_valid(&graph, &halves, &solve(&graph, &halves, &[]));
    let (code, _, err) = place(
        &graph.to_string(),
        &topology(2, 12, Some(need / 100)).to_string(),
        &[],
    );
    assert_eq!(code, 5, "{err}");
    assert!(err.contains("memory") && err.contains("node"), "{err}");
}

#[test]
fn wrong_files_are_refused_with_what_to_try() {
    let graph = json!({ "format": "task-graph/1", "nodes": [
        { "name": "a", "cost_ns": { "gpu": 5 }, "output_bytes": 8 },
        { "name": "b", "cost_ns": { "gpu": 5 }, "colocate": "g" },
        { "name": "c", "cost_ns": { "cpu": 5 }, "colocate": "g" } ], "edges": [[0, 1]] });
    let both = json!({ "format": "topology/1", "devices": [
        { "name": "/gpu:0", "kind": "gpu" }, { "name": "/cpu:0", "kind": "cpu" } ],
        "default_link": { "latency_ns": 1, "bytes_per_second": 1_000 } });
    let with = |path: &str, value: Value| {
        let mut changed = graph.clone();
        *changed.pointer_mut(path).unwrap() = value;
        changed.to_string()
    };
    let cases = [
        (graph.to_string(), both.to_string()),
        (with("/edges", json!([[0, 1], [1, 0]])), both.to_string()),
        (with("/edges", json!([[0, 7]])), both.to_string()),
        (with("/nodes/1/name", json!("a")), both.to_string()),
        (
            with("/nodes/1", json!({ "name": "b", "cost_ns": { "tpu": 1 } })),
            both.to_string(),
        ),
        (
            with(
                "/nodes/1",
                json!({ "name": "b", "cost_ns": { "gpu": 1 }, "device": "/gpu:3" }),
            ),
            both.to_string(),
        ),
        (
            with(
                "/nodes/1",
                json!({ "name": "b", "cost_ns": { "gpu": 1 }, "colour": "red" }),
            ),
            both.to_string(),
        ),
        (
            with("/nodes/1", json!({ "name": "b", "cost_ns": { "gpu": -1 } })),
            both.to_string(),
        ),
        (
            with(
                "/nodes/1",
                json!({ "name": "b", "cost_ns": { "gpu": u64::MAX } }),
            ),
            both.to_string(),
        ),
        (with("/format", json!("task-graph/2")), both.to_string()),
        (
            graph.to_string(),
            json!({ "format": "topology/1", "devices": [] }).to_string(),
        ),
        (
            graph.to_string(),
            json!({ "format": "topology/1", "devices": both["devices"] }).to_string(),
        ),
        ("{".into(), both.to_string()),
    ];
    let mut told = String::new();
    for (graph, topology) in cases {
        let (code, _, err) = place(&graph, &topology, &[]);
        assert_eq!(code, 2, "{err}");
        told += &err;
    }
    insta::assert_snapshot!(told);
    let good = with("/nodes/2/cost_ns", json!({ "gpu": 1 }));
    let (code, _, err) = place(&good, &both.to_string(), &["--algorithm", "heftt"]);
    assert_eq!(code, 2);
    assert!(err.contains("heft"), "{err}");
}

#[test]
fn a_budget_of_time_ends_the_search_and_flags_of_models_are_refused() {
    let graph = load("pipedream/squeezenet1_0.fwd.json");
    let machine = topology(4, 12, None);
    let brief = solve(&graph, &machine, &["--budget", "0s"]);
    expect_valid(&graph, &machine, &brief);
    assert_eq!(brief["algorithm"], "single /gpu:0");
    let files = (graph.to_string(), machine.to_string());
    for (flag, value) in [
        ("--devices", "cpu:2"),
        ("--target", "t.toml"),
        ("--mem", "/gpu:0=1KiB"),
        ("--pin", "x=cpu:0"),
        ("--set", "batch=1"),
        ("--shape", "batch=1..2"),
    ] {
        let (code, _, err) = place(&files.0, &files.1, &[flag, value]);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(&format!("{flag} is for models")), "{err}");
    }
    for flags in [
        &["--verify"][..],
        &["--tune"],
        &["--opt-level", "0"],
        &["--fallback", "warn"],
    ] {
        let (code, _, err) = place(&files.0, &files.1, flags);
        let refused = format!("{} is for models", flags[0]);
        assert!(code == 2 && err.contains(&refused), "{err}");
    }
    let (code, _, err) = place(
        &files.0,
        &files.1,
        &["--objective", "memory", "--budget", "1s"],
    );
    assert_eq!(code, 2);
    assert!(err.contains("--budget of a bare problem"), "{err}");
}

#[test]
fn a_plan_is_written_changed_by_hand_and_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models/mlp_script");
    let (model, data) = (folder.join("model.onnx"), folder.join("test_data_set_0"));
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let (plan, trace, page) = (path("p.plan"), path("t.json"), path("t.html"));
    let call = |args: &[&str]| {
        let ended = gristmill(dir.path(), args);
        (ended.code.unwrap_or(-1), ended.stdout, ended.stderr)
    };
    let files = [
        "--explain",
        "--plan-out",
        &plan,
        "--trace",
        &trace,
        "--html",
        &page,
    ];
    let (code, out, err) =
        call(&[&["place", model, "--devices", "cpu:2"], files.as_slice()].concat());
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("critical chain") && out.contains("without /device:CPU:1"),
        "{out}"
    );
    let events: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    assert!(!events["traceEvents"].as_array().unwrap().is_empty());
    assert!(
        !std::fs::read_to_string(&page).unwrap().contains("http"),
        "the page refers to something outside"
    );
    let written = std::fs::read_to_string(&plan).unwrap();
    let other = if written.contains("/4/Gemm = /device:CPU:0") {
        ["CPU:0", "CPU:1"]
    } else {
        ["CPU:1", "CPU:0"]
    };
    let changed = written.replace(
        &format!("/4/Gemm = /device:{}", other[0]),
        &format!("/4/Gemm = /device:{}", other[1]),
    );
    assert_ne!(written, changed);
    std::fs::write(&plan, &changed).unwrap();
    let (code, out, err) = call(&["place", model, "--devices", "cpu:2", "--plan", &plan]);
    assert_eq!(code, 0, "{err}");
    let moved = out.lines().find(|l| l.contains("\"/4/Gemm\"")).unwrap();
    assert!(
        moved.starts_with(&format!("/device:{}", other[1])) && moved.contains("p.plan"),
        "{moved}"
    );
    let (code, _, err) = call(&[
        "run",
        model,
        "--devices",
        "cpu:2",
        "--plan",
        &plan,
        "--test-data",
        data,
    ]);
    assert_eq!(code, 0, "{err}");
    std::fs::write(&plan, changed + "/nothing = /device:CPU:0\n").unwrap();
    let (code, _, err) = call(&["run", model, "--devices", "cpu:2", "--plan", &plan]);
    assert!(
        code == 2 && err.contains("/nothing") && err.contains("line"),
        "{code}: {err}"
    );
}
