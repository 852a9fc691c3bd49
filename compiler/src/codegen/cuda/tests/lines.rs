//! Running sums and selections by a block per line, and transposed operands in tiles.

use super::run::check_all;
use super::*;
use crate::codegen::testing::plant_specials;

fn entries(body: &Graph) -> Vec<String> {
    generate(&as_cluster(body), Arch::COMMON)
        .unwrap()
        .kernels
        .into_iter()
        .map(|k| k.entry)
        .collect()
}

#[test]
fn running_sums() {
    let rng = &mut Rng(91);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::I8, DType::U64] {
        for (shape, axis) in [
            (vec![3, 64], 1),
            (vec![1, 1000], 1),
            (vec![256, 5], 0),
            (vec![2, 600, 3], 1),
        ] {
            for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)]
            {
                let op = Op::CumSum {
                    axis,
                    exclusive,
                    reverse,
                };
                all.push(Case::of_op(
                    &op,
                    vec![rng.tensor(dtype, &shape, -3.0, 3.0)],
                    1e-6,
                ));
            }
        }
    }
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_lines"], "{}", c.body));
    check_all("running sums of lines", &all);
}

#[test]
fn the_best_of_long_lines() {
    let rng = &mut Rng(92);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F64, DType::I16, DType::U64] {
        for (shape, axis, k) in [
            (vec![2, 512], 1, 5),
            (vec![1, 9000], 1, 40),
            (vec![3000, 2], 0, 1024),
            (vec![1, 2049], 1, 1),
        ] {
            for largest in [false, true] {
                let (lo, hi) = if dtype == DType::U64 {
                    (0.0, 9.0)
                } else {
                    (-100.0, 100.0)
                };
                let mut x = rng.tensor(dtype, &shape, lo, hi);
                if dtype.is_float() {
                    (0..20).for_each(|_| plant_specials(&mut x, rng));
                }
                all.push(Case::of_op(
                    &Op::TopK {
                        k: (k as i64).into(),
                        axis,
                        largest,
                    },
                    vec![x],
                    0.0,
                ));
            }
        }
    }
    // Each element better than all before it, so that every one becomes a candidate; and nothing but equals.
    let rising: Vec<i32> = (0..5000).collect();
    let op = Op::TopK {
        k: 700.into(),
        axis: 0,
        largest: true,
    };
    all.push(Case::of_op(
        &op,
        vec![Tensor::from_slice(&rising, &[5000]).unwrap()],
        0.0,
    ));
    all.push(Case::of_op(
        &op,
        vec![Tensor::zeros(DType::F32, &[5000]).unwrap()],
        0.0,
    ));
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_lines"], "{}", c.body));
    check_all("top-k of long lines", &all);
}

#[test]
fn transposed_operands_go_through_tiles() {
    let rng = &mut Rng(93);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bool, DType::I64] {
        for (shape, perm) in [
            (vec![33, 65], vec![1, 0]),
            (vec![3, 32, 64], vec![0, 2, 1]),
            (vec![2, 9, 5, 40], vec![0, 3, 1, 2]),
            (vec![8, 2, 31], vec![2, 1, 0]),
        ] {
            all.push(Case::of_op(
                &Op::Transpose { perm },
                vec![rng.tensor(dtype, &shape, -3.0, 3.0)],
                0.0,
            ));
        }
    }
    // Two transposed operands and one that is not, and a result of another dtype.
    let mut b = GraphBuilder::new("sum");
    let (x, y) = (
        b.input("x", DType::F32, [40, 70]),
        b.input("y", DType::BF16, [40, 70]),
    );
    let (row, z) = (
        b.input("row", DType::F32, [40]),
        b.input("z", DType::F32, [70, 40]),
    );
    let y = b.cast(y, DType::F32).unwrap();
    let s = b.add_(x, y).unwrap();
    let s = b.transpose(s, &[1, 0]).unwrap();
    let s = b.add_(s, row).unwrap();
    let s = b.mul(s, z).unwrap();
    let s = b.cast(s, DType::F16).unwrap();
    b.output("s", s);
    let inputs = [
        (DType::F32, &[40, 70][..]),
        (DType::BF16, &[40, 70]),
        (DType::F32, &[40]),
        (DType::F32, &[70, 40]),
    ];
    let inputs = inputs.map(|(d, s)| rng.tensor(d, s, -2.0, 2.0)).to_vec();
    all.push(Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance: 1e-6,
    });
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_turned"], "{}", c.body));
    insta::assert_snapshot!("turned_half", listing(&all[4].body));
    check_all("transposed operands", &all);
}
