//! `dump`: nodes chosen by their paths, and sizes of dims.

use super::{data, run};
use crate::process::gristmill;

/// `dump` of a stage of the digits model, restricted to nodes.
fn dump(stage: &str, pattern: &str) -> (i32, String, String) {
    let model = data("digits/model.onnx");
    let flags = ["--set", "batch=2", "--stage", stage, "--node", pattern];
    run(&[&["dump", &model], &flags[..]].concat())
}

#[test]
fn nodes_are_chosen_by_their_paths() {
    for stage in [
        "graph",
        "rewritten",
        "clusters",
        "placed",
        "partitions",
        "schedule",
    ] {
        let (code, out, err) = dump(stage, "^node_(linear|gelu)$");
        assert_eq!(code, 0, "{stage}: {err}");
        let has = |path: &str| out.contains(path);
        assert!(has("node_linear\n") || has("\"node_linear\""), "{out}");
        assert!(!has("node_linear_1") && !has("node_Conv"), "{out}");
        // A fused node is a part of another's kernel.
        let (code, out, err) = dump(stage, "^node_gelu$");
        match stage {
            "placed" | "schedule" => {
                assert!(code == 2 && err.contains("matches none of"), "{out}{err}");
            }
            _ => assert!(code == 0 && out.contains("gelu("), "{out}{err}"),
        }
    }
}

#[test]
fn patterns_that_choose_nothing_are_errors() {
    let (code, _, err) = dump("graph", "^node_liner$");
    assert!(code == 2 && err.contains("(try: node_linear"), "{err}");
    let (code, _, err) = dump("graph", "node_(");
    assert!(code == 2 && err.contains("--node \"node_(\": "), "{err}");
    for stage in ["clif", "asm", "cuda", "ptx", "sass"] {
        let (code, _, err) = dump(stage, "node_linear");
        assert!(
            code == 2 && err.contains("--stage schedule"),
            "{stage}: {err}"
        );
    }
}

#[test]
fn graphs_know_their_dims() {
    let folder = tempfile::tempdir().unwrap();
    let text = "graph \"g\" {\n%0 = input \"x\": f32[batch]\n%1: f32[batch] = neg(%0)\noutput \"y\" %1\n}\n";
    for (dim, message) in [("batch", "known: batch"), ("3", "there is none")] {
        let path = folder.path().join("m.ir");
        std::fs::write(path, text.replace("batch", dim)).unwrap();
        for verb in ["run", "check", "inspect", "dump", "place"] {
            let ended = gristmill(folder.path(), &[verb, "m.ir", "--set", "bach=3"]);
            let error = format!("unknown dim \"bach\"; {message}");
            assert_eq!(ended.code, Some(2), "{verb}: {}", ended.stdout);
            assert!(ended.stderr.contains(&error), "{verb}: {}", ended.stderr);
        }
    }
}
