//! Random graphs at every level of x86-64 that this CPU has, run at once and from an image, beside the interpreter.
//!
//! `GRISTMILL_RANDOM_GRAPHS=20000` tries so many graphs at each level instead of 300 in turn.

use crate::images::run_image;
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::Graph;
use gristmill::testing::{RandomOptions, random_graph};
use gristmill::{DType, Options, TargetCpu, Tensor, aot};
use std::path::Path;

/// The levels that this CPU runs code for, from the least; this machine's own is the last.
pub fn cpu_levels() -> Vec<TargetCpu> {
    let names = ["x86-64-v2", "x86-64-v3", "x86-64-v4", "native"];
    let levels = names.map(|name| TargetCpu::parse(name).unwrap());
    let runs = levels.into_iter().filter(|l| l.check_runs_here().is_ok());
    runs.collect()
}

/// A tensor of floats with all elements larger by a millionth.
fn moved(t: &Tensor) -> Tensor {
    if !t.dtype().is_float() {
        return t.clone();
    }
    let values: Vec<f64> = t.to_f64s().iter().map(|v| v * (1.0 + 1e-6)).collect();
    Tensor::from_f64s(t.dtype(), t.shape(), &values).unwrap()
}

/// Results by JIT are near the interpreter's, and those of an image have the bits of the JIT's.
fn check(graph: &Graph, inputs: &[Tensor], level: TargetCpu, folder: &Path) {
    let what = format!("{level}, {}\n{graph}", graph.name);
    let options = Options {
        target_cpu: level,
        ..Options::default()
    };
    let expected = interp::run(graph, inputs).unwrap();
    let moved: Vec<Tensor> = inputs.iter().map(moved).collect();
    let moved = interp::run(graph, &moved).unwrap();
    let compiled = gristmill::compile(graph, &options).unwrap();
    let found = compiled.run_ordered(inputs);
    let found = found
        .unwrap_or_else(|e| panic!("{what}: {e}"))
        .into_tensors();
    for ((e, f), m) in expected.iter().zip(&found).zip(&moved) {
        let c = allclose(e, f, 1e-5, 1e-5);
        // Sums in another order differ by as much as sums of inputs that differ a little.
        let of_rounding = 4.0 * allclose(e, m, 0.0, 0.0).max_abs_err;
        let is_near = c.ok || c.scaled_err() <= 1e-5 || c.max_abs_err <= of_rounding;
        assert!(is_near && e.dtype() == f.dtype(), "{what}: {c}");
    }
    let path = folder.join("model.gmx");
    let written = aot::write(graph, &options, &Default::default(), &path);
    written.unwrap_or_else(|e| panic!("{what}: {e}"));
    for (image, jit) in run_image(&path, inputs).iter().zip(&found) {
        assert!(image.as_bytes() == jit.as_bytes(), "{what}");
    }
}

/// Graphs of whole and broken rows, first parts and comparisons, whose memory is shared where it can be.
fn options(seed: u64) -> RandomOptions {
    let floats = vec![DType::F32, DType::F64];
    RandomOptions {
        n_nodes: 4 + seed as usize % 16,
        dtypes: match seed % 4 {
            0 => floats,
            1 => vec![DType::F32, DType::I32, DType::Bool],
            2 => vec![DType::F32],
            _ => vec![DType::F32, DType::I64, DType::U8],
        },
        allow_empty_axes: seed.is_multiple_of(7),
        first_parts: true,
        ..RandomOptions::default()
    }
}

#[test]
fn random_graphs_run_at_every_level() {
    let levels = cpu_levels();
    assert!(levels.contains(&TargetCpu::Native));
    let dir = tempfile::tempdir().unwrap();
    let asked = std::env::var("GRISTMILL_RANDOM_GRAPHS").ok();
    let asked = asked.map(|n| n.parse::<u64>().expect("a number of graphs"));
    for seed in 0..asked.unwrap_or(300) {
        let (graph, inputs) = random_graph(seed, &options(seed));
        let turn = levels[seed as usize % levels.len()];
        for level in levels.iter().filter(|&&l| asked.is_some() || l == turn) {
            check(&graph, &inputs, *level, dir.path());
        }
    }
}
