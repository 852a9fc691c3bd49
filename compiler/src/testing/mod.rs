//! Random tensors and graphs, for tests and benchmarks; nothing in the compiler uses this module.
//!
//! Everything follows from a seed, on every machine.

pub mod emulate;
mod graphs;
mod wiring;

pub use graphs::{RandomOptions, random_graph};
pub use wiring::random_wiring;

use crate::codegen::cuda::nvrtc::{self, Nvrtc};
use crate::interp::scalar::{Scalar, Wide};
use gristmill_runtime::{DType, Tensor, with_dtype};

pub use crate::rng::Rng;

/// A random tensor: floating-point elements are normal (mean 0, deviation 1), integers in `-8..=8` (unsigned: `0..=16`).
/// With `special`, one floating-point element in eight is NaN, an infinity, a zero, or huge or tiny; one integer in
/// eight is the dtype's greatest or least.
pub fn random_tensor(rng: &mut Rng, dtype: DType, shape: &[usize], special: bool) -> Tensor {
    let mut out = Tensor::zeros(dtype, shape).expect("tests ask for sizes that fit");
    with_dtype!(dtype, T => out.as_mut_slice::<T>().iter_mut().for_each(|v| *v = random_element(rng, dtype, special)));
    out
}

fn random_element<T: Scalar>(rng: &mut Rng, dtype: DType, special: bool) -> T {
    let special = special && rng.one_in(8);
    T::from_wide(match dtype {
        DType::Bool => Wide::Int((rng.below(2)) as i128),
        d if d.is_float() && special => Wide::Float(rng.pick(&[
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            0.0,
            -0.0,
            3e38,
            -6e4,
            1e-40,
            6e-8,
        ])),
        d if d.is_float() => Wide::Float(rng.normal()),
        _ if special => return rng.pick(&[T::LEAST, T::GREATEST]),
        d if d.is_unsigned_int() => Wide::Int(rng.below(17) as i128),
        _ => Wide::Int(rng.below(17) as i128 - 8),
    })
}

/// Random indices for an axis, negative ones among them: `dtype` is `i32` or `i64`, `extent` at least 1.
pub fn random_indices(rng: &mut Rng, dtype: DType, shape: &[usize], extent: usize) -> Tensor {
    let mut out = Tensor::zeros(dtype, shape).expect("tests ask for sizes that fit");
    let n = extent as i128;
    with_dtype!(dtype, T => {
        for v in out.as_mut_slice::<T>() {
            *v = T::from_wide(Wide::Int(rng.below(2 * extent) as i128 - n));
        }
    });
    out
}

/// NVRTC for a test of `what`. Without it the test prints what it leaves out; where `GRISTMILL_NVRTC` names it, as in continuous integration,
/// it must be there, and this panics.
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
