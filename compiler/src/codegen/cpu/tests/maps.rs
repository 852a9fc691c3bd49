//! Fused element-wise bodies: random programs over views, and what must become one vector kernel.

use super::harness::{check, steps};
use crate::codegen::testing::{Rng, as_cluster, random_maps, random_phases};
use crate::ir::*;
use gristmill_runtime::{DType, Tensor};

#[test]
fn random_bodies() {
    let rng = &mut Rng(21);
    random_maps(rng, 150)
        .iter()
        .for_each(|c| check(&c.body, &c.inputs, c.tolerance, rng));
}

#[test]
fn chains_over_broadcasts_are_one_kernel() {
    let rng = &mut Rng(22);
    let mut b = GraphBuilder::new("chain");
    let x = b.input("x", DType::F32, [6, 700]);
    let (scale, shift) = (
        b.input("scale", DType::F32, [700]),
        b.input("shift", DType::F32, [6, 1]),
    );
    let y = b.mul(x, scale).unwrap();
    let y = b.add_(y, shift).unwrap();
    let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
    let y = b.map(ScalarOp::Exp, &[y]).unwrap();
    let y = b.sub(y, x).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    assert_eq!(steps(&g), ["test_0_0_vector"]);
    let inputs = [
        rng.tensor(DType::F32, &[6, 700], -2.0, 2.0),
        rng.tensor(DType::F32, &[700], -1.0, 1.0),
        rng.tensor(DType::F32, &[6, 1], -1.0, 1.0),
    ];
    check(&g, &inputs, 1e-6, rng);
}

#[test]
fn results_do_not_depend_on_the_split() {
    let rng = &mut Rng(23);
    let mut b = GraphBuilder::new("split");
    let x = b.input("x", DType::F32, [40_000]);
    let y = b.map(ScalarOp::Silu, &[x]).unwrap();
    let y = b.map(ScalarOp::Softsign, &[y]).unwrap();
    b.output("y", y);
    let g = as_cluster(&b.finish().unwrap());
    let x = [rng.tensor(DType::F32, &[40_000], -9.0, 9.0)];
    let compiled = super::harness::compile_clusters(&mut g.clone(), &Default::default()).unwrap();
    let first = super::harness::run(&g, &compiled, &x, rng).unwrap();
    for _ in 0..5 {
        assert_eq!(super::harness::run(&g, &compiled, &x, rng).unwrap(), first);
    }
}

#[test]
fn joins_of_views_and_expressions_write_in_place() {
    let rng = &mut Rng(24);
    let mut b = GraphBuilder::new("join");
    let x = b.input("x", DType::F32, [3, 4, 8]);
    let t = b.transpose(x, &[0, 2, 1]).unwrap();
    let e = b.map(ScalarOp::Relu, &[x]).unwrap();
    let e = b.slice_axis(e, 1, 1, 2).unwrap();
    let t = b.reshape(t, [3, 4, 8]).unwrap();
    let y = b.concat(&[x, e, t], 1).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    check(
        &g,
        &[rng.tensor(DType::F32, &[3, 4, 8], -1.0, 1.0)],
        0.0,
        rng,
    );
}

#[test]
fn random_bodies_of_many_phases() {
    let rng = &mut Rng(25);
    random_phases(rng, 200)
        .iter()
        .for_each(|c| check(&c.body, &c.inputs, c.tolerance, rng));
}

/// `x` plus rows of windows put back into their image: the loops split where the reshapes do.
#[test]
fn windows_are_put_back_by_one_vector_kernel() {
    let rng = &mut Rng(25);
    let mut b = GraphBuilder::new("windows");
    let x = b.input("x", DType::F32, [1, 6 * 8, 12]);
    let windows = b.input("windows", DType::F32, [4, 12, 12]);
    let split = b.reshape(windows, [2, 2, 3, 4, 12]).unwrap();
    let image = b.transpose(split, &[0, 2, 1, 3, 4]).unwrap();
    let rows = b.reshape(image, [1, 48, 12]).unwrap();
    let y = b.add_(x, rows).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    assert_eq!(steps(&g), ["test_0_0_vector"]);
    let inputs = [
        rng.tensor(DType::F32, &[1, 48, 12], -1.0, 1.0),
        rng.tensor(DType::F32, &[4, 12, 12], -1.0, 1.0),
    ];
    check(&g, &inputs, 0.0, rng);
}

/// Reshapes without a common refinement, and slices that begin inside a split axis.
#[test]
fn random_reshapes_around_transposes() {
    let rng = &mut Rng(26);
    for _ in 0..200 {
        let factors: Vec<usize> = (0..5).map(|_| 1 + rng.below(3)).chain([4]).collect();
        let regrouped = |rng: &mut Rng| {
            let mut shape = vec![1];
            for &f in &factors {
                match rng.below(2) {
                    0 => shape.push(f),
                    _ => *shape.last_mut().unwrap() *= f,
                }
            }
            if rng.below(4) == 0 {
                shape.reverse();
            }
            shape
        };
        let (source, result) = (regrouped(rng), regrouped(rng));
        let mut b = GraphBuilder::new("reshapes");
        let x = b.input("x", DType::F32, source.clone());
        let mut perm: Vec<usize> = (0..source.len()).collect();
        let (i, j) = (rng.below(perm.len()), rng.below(perm.len()));
        perm.swap(i, j);
        let turned = b.transpose(x, &perm).unwrap();
        let middle = b.reshape(turned, regrouped(rng)).unwrap();
        let y = b.reshape(middle, result.clone()).unwrap();
        let z = b.input("z", DType::F32, result.clone());
        let y = b.add_(y, z).unwrap();
        b.output("y", y);
        let g = b.finish().unwrap();
        let inputs = [
            rng.tensor(DType::F32, &source, -1.0, 1.0),
            rng.tensor(DType::F32, &result, -1.0, 1.0),
        ];
        check(&g, &inputs, 0.0, rng);
    }
}

/// Element-wise ops of a concatenation run operand by operand, each into its part of the result.
#[test]
fn element_wise_ops_of_a_concatenation_run_on_its_operands() {
    let rng = &mut Rng(41);
    for axis in 0..3 {
        let shape = |extent: usize| {
            let mut shape = [3, 5, 7];
            shape[axis] = extent;
            shape
        };
        let mut b = GraphBuilder::new("g");
        let parts: Vec<ValueId> = [4, 0, 8, 2]
            .iter()
            .enumerate()
            .map(|(i, &extent)| b.input(&format!("x{i}"), DType::F32, shape(extent)))
            .collect();
        let mut along = [1, 1, 1];
        along[axis] = 14;
        let scale = b.input("scale", DType::F32, along);
        let other = b.input("other", DType::F32, shape(14));
        let joined = b.concat(&parts, axis).unwrap();
        let scaled = b.mul(joined, scale).unwrap();
        let sum = b.add_(scaled, other).unwrap();
        let y = b.map(ScalarOp::Sigmoid, &[sum]).unwrap();
        b.output("y", y);
        let g = b.finish().unwrap();
        let steps = steps(&g);
        assert!(steps.iter().all(|s| s.ends_with("_vector")), "{steps:?}");
        assert_eq!(steps.len(), 3);
        let inputs: Vec<Tensor> = g
            .inputs
            .iter()
            .map(|&v| rng.tensor(DType::F32, &g.ty(v).static_shape().unwrap(), -2.0, 2.0))
            .collect();
        check(&g, &inputs, 1e-6, rng);
    }
}

/// Loops over the operands of one concatenation cross those of the other.
#[test]
fn a_sum_of_two_concatenations_is_right() {
    let rng = &mut Rng(42);
    let mut b = GraphBuilder::new("g");
    let x: Vec<ValueId> = [4, 3, 2, 5]
        .iter()
        .enumerate()
        .map(|(i, &extent)| b.input(&format!("x{i}"), DType::F32, [6, extent]))
        .collect();
    let (left, right) = (b.concat(&x[..2], 1).unwrap(), b.concat(&x[2..], 1).unwrap());
    let sum = b.add_(left, right).unwrap();
    let y = b.map(ScalarOp::Relu, &[sum]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let inputs: Vec<Tensor> = [4, 3, 2, 5]
        .iter()
        .map(|&extent| rng.tensor(DType::F32, &[6, extent], -2.0, 2.0))
        .collect();
    check(&g, &inputs, 0.0, rng);
}

#[test]
fn element_wise_ops_of_a_reshaped_concatenation_are_vector_code() {
    let rng = &mut Rng(43);
    for (extents, shape) in [([1, 1], [3, 8]), ([2, 2], [12, 4])] {
        let mut b = GraphBuilder::new("g");
        let x = [0, 1].map(|i| b.input(["x", "z"][i], DType::F32, [3, 4, extents[i]]));
        let joined = b.concat(&x, 2).unwrap();
        let reshaped = b.reshape(joined, shape).unwrap();
        let y = b.map(ScalarOp::Relu, &[reshaped]).unwrap();
        b.output("y", y);
        let g = b.finish().unwrap();
        let steps = steps(&g);
        let is_fast = |s: &String| s.ends_with("_vector") || s.ends_with("_gm_copy");
        assert!(steps.iter().all(is_fast), "{steps:?}");
        let inputs = extents.map(|n| rng.tensor(DType::F32, &[3, 4, n], -2.0, 2.0));
        check(&g, &inputs, 0.0, rng);
    }
}
