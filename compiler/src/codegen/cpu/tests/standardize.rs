//! Standardisation: by rows, by columns, in groups, and over axes that no kernel takes.

use super::harness::{check, steps};
use crate::codegen::testing::Rng;
use crate::ir::*;
use gristmill_runtime::DType;

fn standardized(shape: &[usize], axes: &[usize]) -> Graph {
    let mut b = GraphBuilder::new("standardize");
    let x = b.input("x", DType::F32, shape.iter().copied());
    let (axes, epsilon) = (axes.to_vec(), 1e-3.into());
    let y = b.add1(Op::Standardize { axes, epsilon }, &[x]).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

#[test]
fn random_axes_agree_with_the_interpreter() {
    let rng = &mut Rng(31);
    for _ in 0..80 {
        let rank = 1 + rng.below(5);
        let shape: Vec<usize> = (0..rank).map(|_| 1 + rng.below(9)).collect();
        let axes: Vec<usize> = (0..rank).filter(|_| rng.below(2) == 0).collect();
        let x = rng.tensor(DType::F32, &shape, -1.0, 3.0);
        check(&standardized(&shape, &axes), &[x], 2e-5, rng);
    }
}

#[test]
fn no_elements_are_none() {
    let rng = &mut Rng(32);
    for shape in [[0, 3, 2], [2, 0, 3], [2, 3, 0]] {
        let x = rng.tensor(DType::F32, &shape, -1.0, 1.0);
        check(&standardized(&shape, &[1]), &[x], 0.0, rng);
    }
}

#[test]
fn kernels_take_rows_columns_and_groups_of_columns() {
    let columns = [
        "test_0_0_gm_column_moments_f32",
        "test_0_1_gm_standardize_f32",
    ];
    for (shape, axes, kernels) in [
        (vec![2, 3, 40], vec![2], &["test_0_0_gm_norm_f32"][..]),
        (vec![2, 3, 4, 5], vec![2, 3], &["test_0_0_gm_norm_f32"]),
        (vec![2, 9, 7, 16], vec![1, 2], &columns),
        (vec![900, 24], vec![0], &columns),
        (vec![2, 9, 7, 8, 2], vec![1, 2, 4], &columns),
    ] {
        assert_eq!(steps(&standardized(&shape, &axes)), kernels, "{shape:?}");
    }
}
