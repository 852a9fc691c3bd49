//! Predicted times of models, before and after others were measured.

use crate::process::gristmill_with_cache;
use gristmill::calibrate::machine;
use gristmill::cost::{CostModel, DeviceProfile, Measured, Nanos, store};
use gristmill::ir::{Graph, GraphBuilder, Op, ScalarOp};
use gristmill::{DType, Options, Tensor};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A perceptron of a few microseconds: products, element-wise kernels, and a softmax.
fn tiny_model(width: usize) -> (Graph, Tensor) {
    let mut b = GraphBuilder::new("tiny");
    let x = b.input("x", DType::F32, [3, width]);
    let mut y = x;
    for op in [ScalarOp::Relu, ScalarOp::Tanh] {
        let w = b.constant(Tensor::zeros(DType::F32, &[width, width]).unwrap());
        y = b.matmul(y, w).unwrap();
        y = b.map(op, &[y]).unwrap();
    }
    let softmax = Op::Softmax {
        axis: 1,
        log: false,
    };
    let y = b.add1(softmax, &[y]).unwrap();
    b.output("y", y);
    let x = Tensor::zeros(DType::F32, &[3, width]).unwrap();
    (b.finish().unwrap(), x)
}

/// Times of the kernels of twenty tiny models, each so many times as predicted.
fn wild_times(ratio: f64) -> Measured {
    let (costs, profile) = (CostModel::default(), DeviceProfile::this_cpu(1));
    let mut measured = Measured::default();
    for width in 21..41 {
        let (graph, x) = tiny_model(width);
        let compiled = gristmill::compile(&graph, &Options::default()).unwrap();
        let clusters = compiled.plan(&[x]).unwrap().clusters;
        let runs = clusters.nodes().map(|(_, node)| {
            let predicted = costs.analytic_ns(&clusters, node, &profile).0 as f64;
            (&clusters, node, vec![Nanos((predicted * ratio) as u64); 16])
        });
        measured.record(&costs, &profile, runs);
    }
    assert!(measured.samples().count() >= 20);
    measured
}

fn models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
    let entries = std::fs::read_dir(folder).unwrap();
    let folders = entries.map(|e| e.unwrap().path()).filter(|p| p.is_dir());
    let mut folders: Vec<PathBuf> = folders.collect();
    folders.sort();
    folders
}

fn placed(model: &Path, cache: &Path) -> Value {
    let args = ["place", "model.onnx", "--threads", "1", "--json"];
    let ended = gristmill_with_cache(model, cache, &args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

/// Measured times of tiny kernels once changed predictions of large ones to a tenth.
#[test]
fn profiles_of_other_models_leave_predictions_alone() {
    let caches = [0.05, 20.0].map(|ratio| {
        let cache = tempfile::tempdir().unwrap();
        let path = store::times_path(cache.path());
        store::save_times(&path, &machine(), &wild_times(ratio)).unwrap();
        cache
    });
    let models = models();
    assert!(models.len() >= 15);
    for model in models {
        let before = placed(&model, Path::new(""))["makespan_ns"]
            .as_f64()
            .unwrap();
        for cache in &caches {
            let after = placed(&model, cache.path());
            let ratio = after["makespan_ns"].as_f64().unwrap() / before;
            let sources = &after["time_sources"];
            assert!(
                (0.9..1.1).contains(&ratio),
                "{}: {ratio}, {sources}",
                model.display()
            );
        }
    }
}

#[test]
fn place_says_how_many_times_are_measured() {
    let (dir, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(dir.path().join("g.ir"), tiny_model(33).0.to_string()).unwrap();
    let sources = || {
        let args = ["place", "g.ir", "--threads", "1", "--html", "p.html"];
        let ended = gristmill_with_cache(dir.path(), cache.path(), &args);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let mut lines = ended.stdout.lines();
        let line = lines.find_map(|l| l.trim().strip_prefix("predicted times: "));
        let line = line.expect("place counts its times").to_owned();
        let page = std::fs::read_to_string(dir.path().join("p.html")).unwrap();
        let counts = line.split(" (").next().unwrap_or_default();
        assert!(page.contains(&format!("<dd>{counts}</dd>")), "{counts}");
        line
    };
    let hint = "(`gristmill calibrate` measures this machine's rates)";
    assert_eq!(sources(), format!("3 by assumed rates {hint}"));
    let path = store::times_path(cache.path());
    store::save_times(&path, &machine(), &wild_times(2.0)).unwrap();
    assert_eq!(sources(), "3 measured");
}
