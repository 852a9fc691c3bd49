//! Random tensors and graphs, for tests and benchmarks; nothing in the compiler uses this module.
//!
//! Everything follows from a seed, on every machine.

pub mod emulate;
mod graphs;
mod setup;
mod state;
mod symbols;
mod wiring;

pub use crate::passes::specialise;
pub use graphs::{RandomOptions, random_graph};
pub use setup::Setup;
pub use symbols::with_symbols;
pub use wiring::random_wiring;

use crate::codegen::cuda::nvrtc::{self, Nvrtc};

pub use crate::codegen::cuda::nvrtc::get as nvrtc;
pub use crate::interp::random::{random_indices, random_tensor};
pub use crate::rng::Rng;

/// NVRTC for a test of `what`. Where it is absent, a line names the test as left out; where
/// `GRISTMILL_NVRTC` names it, as in continuous integration, its absence panics.
pub fn nvrtc_or_left_out(what: &str) -> Option<&'static Nvrtc> {
    match nvrtc::get() {
        Ok(found) => Some(found),
        Err(e) if std::env::var_os("GRISTMILL_NVRTC").is_some_and(|v| !v.is_empty()) => {
            panic!("{e}")
        }
        Err(e) => {
            eprintln!("left out: {what}: {e}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp;
    use gristmill_runtime::{DType, Tensor};
    use std::collections::BTreeSet;

    #[test]
    fn numbers_are_spread() {
        let mut rng = Rng(1);
        let mut seen = [0; 7];
        (0..7000).for_each(|_| seen[rng.below(7)] += 1);
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
        let n = 10_000;
        let normal: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
        let mean = normal.iter().sum::<f64>() / f64::from(n);
        let variance = normal.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!(
            mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05,
            "{mean} {variance}"
        );
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn tensors_of_every_dtype() {
        for &d in DType::ALL {
            let t = random_tensor(&mut Rng(2), d, &[500], true);
            assert_eq!(t, random_tensor(&mut Rng(2), d, &[500], true));
            let distinct: BTreeSet<&[u8]> = t.as_bytes().chunks(d.size_bytes()).collect();
            assert!(
                distinct.len() > if d == DType::Bool { 1 } else { 15 },
                "{d}"
            );
        }
        let i = random_indices(&mut Rng(3), DType::I32, &[200], 5);
        assert_eq!(
            i.as_slice::<i32>().iter().collect::<BTreeSet<_>>().len(),
            10
        );
    }

    /// Every graph is valid, runs, and is the same for the same seed; together they cover the op classes they should.
    #[test]
    fn random_graphs_run() {
        let mut names = BTreeSet::new();
        for seed in 0..150 {
            let options = RandomOptions {
                n_nodes: 12,
                dtypes: if seed % 3 == 0 {
                    DType::ALL.to_vec()
                } else {
                    vec![DType::F32, DType::I64, DType::Bool]
                },
                allow_empty_axes: seed % 5 == 0,
                special_values: seed % 7 == 0,
                ..RandomOptions::default()
            };
            let (graph, inputs) = random_graph(seed, &options);
            crate::ir::verify::verify(&graph).unwrap();
            assert!(graph.n_nodes() >= options.n_nodes, "seed {seed}: {graph}");
            let results = interp::run(&graph, &inputs)
                .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{graph}"));
            let finite = |t: &Tensor| {
                !t.dtype().is_float()
                    || interp::compare::allclose(t, t, 0.0, 0.0).max_abs_expected < 1e5
            };
            assert!(
                options.special_values || results.iter().all(finite),
                "seed {seed}"
            );
            let (again, _) = random_graph(seed, &options);
            assert_eq!(graph.to_string(), again.to_string(), "seed {seed}");
            names.extend(graph.nodes().map(|(_, n)| n.op.name()));
        }
        for op in [
            "matmul",
            "conv",
            "pool",
            "softmax",
            "layer_norm",
            "standardize",
            "attention",
            "gather",
            "scatter_nd",
            "top_k",
            "pad",
        ] {
            assert!(names.contains(op), "no graph has {op}: {names:?}");
        }
        assert!(names.len() > 60, "{}: {names:?}", names.len());
    }
}
