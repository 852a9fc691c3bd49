//! Placement on many devices, for each objective, of bare problems and of models.

use crate::placement::{expect_schedule, expect_valid, load, solve, topology};
use crate::process::gristmill;
use serde_json::{Value, json};
use std::path::Path;

const OBJECTIVES: [&str; 3] = ["latency", "throughput", "memory"];

#[test]
fn task_graphs_are_placed_on_many_devices() {
    for (name, n) in [("squeezenet1_0", 41), ("alexnet", 48), ("alexnet", 1_024)] {
        let graph = load(&format!("pipedream/{name}.fwd.json"));
        let machine = topology(n, 12, None);
        for objective in OBJECTIVES {
            let answer = solve(&graph, &machine, &["--objective", objective]);
            expect_schedule(&graph, &machine, &answer);
        }
    }
}

#[test]
fn equal_devices_that_no_schedule_needs_change_nothing() {
    let node = |name: &str| json!({ "name": name, "cost_ns": { "gpu": 1_000 }, "output_bytes": 8 });
    let nodes: Vec<Value> = ["a", "b", "c"].map(node).to_vec();
    let graph = json!({ "format": "task-graph/1", "nodes": nodes, "edges": [[0, 2], [1, 2]] });
    let few = topology(3, 12, None);
    let many = topology(1_000, 12, None);
    let (fewer, more) = (solve(&graph, &few, &[]), solve(&graph, &many, &[]));
    assert_eq!(
        expect_valid(&graph, &few, &fewer),
        expect_valid(&graph, &many, &more)
    );
    assert_eq!(fewer["nodes"], more["nodes"]);
}

#[test]
fn models_are_placed_on_many_devices() {
    let folder = tempfile::tempdir().unwrap();
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/data/models/mlp_script/model.onnx"
    );
    for objective in OBJECTIVES {
        let flags = ["--objective", objective, "--json"];
        answer(folder.path(), model, &["--devices", "cpu:48"], &flags);
        for n in [41, 1_024] {
            let file = format!("{n}.toml");
            std::fs::write(folder.path().join(&file), gpus(n)).unwrap();
            let placed = answer(folder.path(), model, &["--target", &file], &flags);
            assert_eq!(placed["peak_bytes"].as_object().unwrap().len(), n);
        }
    }
}

fn answer(folder: &Path, model: &str, machine: &[&str], flags: &[&str]) -> Value {
    let ended = gristmill(folder, &[&["place", model], machine, flags].concat());
    assert_eq!(
        ended.code,
        Some(0),
        "{machine:?} {flags:?}: {}",
        ended.stderr
    );
    serde_json::from_str(&ended.stdout).expect("the answer is JSON")
}

/// The profile of a machine with `n` GPUs.
fn gpus(n: usize) -> String {
    format!(
        r#"
format = "gristmill/profile/1"
name = "many GPUs"
[[device]]
kind = "gpu"
count = {n}
memory_bytes = 80_000_000_000
memory_bytes_per_second = 3e12
cache_bytes = 50_000_000
cache_bytes_per_second = 5e12
launch_ns = 3_000
flops_per_second = {{ f32 = 6e13 }}
[[link]]
from = "any"
to = "any"
latency_ns = 8_000
bytes_per_second = 5e10
"#
    )
}
