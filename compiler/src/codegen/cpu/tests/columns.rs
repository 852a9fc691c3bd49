//! Reductions by columns: any axes, views of operands, and parts.

use super::harness::{check, steps};
use crate::codegen::testing::Rng;
use crate::ir::*;
use gristmill_runtime::DType;

/// A reduction of a permuted operand.
fn reduction(kind: ReduceKind, shape: &[usize], perm: &[usize], axes: &[usize]) -> Graph {
    let mut b = GraphBuilder::new("reduction");
    let x = b.input("x", DType::F32, shape.iter().copied());
    let x = b.transpose(x, perm).unwrap();
    let y = b.reduce(kind, x, axes, false).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

#[test]
fn random_axes_agree_with_the_interpreter() {
    let rng = &mut Rng(21);
    for i in 0..60 {
        let rank = 1 + rng.below(4);
        let shape: Vec<usize> = (0..rank).map(|_| 1 + rng.below(19)).collect();
        let mut perm: Vec<usize> = (0..rank).collect();
        if i % 2 == 1 {
            perm.rotate_left(rng.below(rank));
        }
        let mut axes: Vec<usize> = (0..rank).filter(|_| rng.below(2) == 0).collect();
        if axes.is_empty() {
            axes.push(rng.below(rank));
        }
        use ReduceKind::{Max, Mean, Min, Sum};
        let kind = [Sum, Mean, Max, Min][rng.below(4)];
        let x = rng.tensor(DType::F32, &shape, -1.0, 1.0);
        check(&reduction(kind, &shape, &perm, &axes), &[x], 1e-5, rng);
    }
}

#[test]
fn long_columns_are_reduced_by_parts() {
    let rng = &mut Rng(22);
    for (shape, axes) in [
        (vec![9000, 7], vec![0]),
        (vec![3, 2500, 40], vec![1]),
        (vec![40, 6, 900], vec![0, 2]),
        (vec![700, 1100], vec![0]),
    ] {
        let perm: Vec<usize> = (0..shape.len()).collect();
        for kind in [ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Max] {
            let g = reduction(kind, &shape, &perm, &axes);
            let x = rng.tensor(DType::F32, &shape, 0.0, 1.0);
            check(&g, &[x], 1e-5, rng);
            assert_eq!(steps(&g).len(), 2, "{shape:?}");
        }
    }
}

#[test]
fn channels_of_a_transposed_view_are_reduced_where_they_lie() {
    let g = reduction(ReduceKind::Sum, &[2, 5, 5, 8], &[0, 3, 1, 2], &[0, 2, 3]);
    assert_eq!(steps(&g), ["test_0_0_gm_reduce_columns_f32"]);
    let g = reduction(ReduceKind::Mean, &[2, 5, 5, 8], &[0, 3, 1, 2], &[2, 3]);
    assert_eq!(steps(&g), ["test_0_0_gm_reduce_columns_f32"]);
}
