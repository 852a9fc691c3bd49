//! Reductions by groups of threads.

use super::run::check_all;
use super::*;
use crate::codegen::testing::plant_specials;

/// Rows of lengths around every change of the group's size, few and many of them.
fn shapes() -> Vec<Vec<usize>> {
    vec![
        vec![3, 8],
        vec![70, 31],
        vec![5, 33],
        vec![9, 128],
        vec![2, 1000],
        vec![2, 1025],
        vec![1, 3000],
        vec![2, 8192],
        vec![2, 8193],
        vec![2500, 9],
    ]
}

fn entries(body: &Graph) -> Vec<String> {
    generate(&as_cluster(body), Arch::COMMON)
        .unwrap()
        .kernels
        .into_iter()
        .map(|k| k.entry)
        .collect()
}

#[test]
fn sums_and_extremes() {
    let rng = &mut Rng(61);
    let mut all = Vec::new();
    for shape in shapes() {
        for kind in [
            ReduceKind::Sum,
            ReduceKind::Mean,
            ReduceKind::Max,
            ReduceKind::Min,
            ReduceKind::Prod,
        ] {
            let dtypes = [DType::F32, DType::BF16, DType::I16, DType::U64, DType::F64];
            for dtype in dtypes.into_iter().skip(shape[0] % 2).step_by(2) {
                let mut x = rng.tensor(dtype, &shape, -2.0, 2.0);
                if dtype.is_float() && matches!(kind, ReduceKind::Max | ReduceKind::Min) {
                    plant_specials(&mut x, rng);
                }
                all.push(Case::of_op(
                    &Op::Reduce {
                        kind,
                        axes: vec![1],
                        keepdims: false,
                    },
                    vec![x],
                    1e-6,
                ));
            }
        }
    }
    // Axes that lie apart, and few columns of many rows.
    for (shape, axes) in [
        (vec![4, 5, 6], vec![0, 2]),
        (vec![600, 3], vec![0]),
        (vec![2, 40, 1], vec![1, 2]),
    ] {
        for keepdims in [false, true] {
            let op = Op::Reduce {
                kind: ReduceKind::Sum,
                axes: axes.clone(),
                keepdims,
            };
            all.push(Case::of_op(
                &op,
                vec![rng.tensor(DType::F32, &shape, -2.0, 2.0)],
                1e-6,
            ));
        }
    }
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_rows"], "{}", c.body));
    check_all("reductions by groups", &all);
}

/// Axes outside of others: a warp reads neighbouring rows.
#[test]
fn reductions_across_rows() {
    let rng = &mut Rng(64);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::F64, DType::U8, DType::Bool] {
        for (shape, axes) in [
            (vec![9, 40], vec![0]),
            (vec![100, 128], vec![0]),
            (vec![5, 7, 96], vec![0, 1]),
            (vec![5, 30, 33], vec![1]),
            (vec![40, 3, 64], vec![0]),
        ] {
            let x = rng.tensor(dtype, &shape, -2.0, 2.0);
            let kinds = if dtype == DType::Bool {
                [ReduceKind::Max; 2]
            } else {
                [ReduceKind::Mean, ReduceKind::Min]
            };
            for kind in kinds {
                all.push(Case::of_op(
                    &Op::Reduce {
                        kind,
                        axes: axes.clone(),
                        keepdims: false,
                    },
                    vec![x.clone()],
                    1e-6,
                ));
            }
        }
    }
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_rows"], "{}", c.body));
    check_all("reductions across rows", &all);
}

/// Few and long rows: several blocks share one.
#[test]
fn long_rows_are_split_among_blocks() {
    let rng = &mut Rng(65);
    let mut all = Vec::new();
    for (shape, axes) in [
        (vec![140_000], vec![0]),
        (vec![2, 70, 2000], vec![1, 2]),
        (vec![2100, 33], vec![0]),
    ] {
        for (kind, dtype) in [
            (ReduceKind::Mean, DType::F32),
            (ReduceKind::Max, DType::BF16),
            (ReduceKind::Prod, DType::I64),
        ] {
            let mut b = GraphBuilder::new("sums");
            let x = b.input("x", dtype, shape.iter().copied());
            let y = b
                .add1(
                    Op::Reduce {
                        kind,
                        axes: axes.clone(),
                        keepdims: true,
                    },
                    &[x],
                )
                .unwrap();
            let y = b.map(ScalarOp::Neg, &[y]).unwrap();
            b.output("y", y);
            let inputs = vec![rng.tensor(dtype, &shape, -2.0, 2.0)];
            all.push(Case {
                body: b.finish().unwrap(),
                inputs,
                tolerance: 1e-6,
            });
        }
    }
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_rows", "gm_rows_join"], "{}", c.body));
    check_all("reductions of long rows", &all);
}

/// The first or the last of equal elements, NaN before all others, wherever its thread is.
#[test]
fn positions_of_extremes() {
    let rng = &mut Rng(66);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::I8, DType::U64] {
        for (shape, axis) in [
            (vec![3, 8], 1),
            (vec![1, 5000], 1),
            (vec![50, 100], 0),
            (vec![4, 40, 33], 1),
        ] {
            for (kind, select_last) in [
                (Extremum::Max, false),
                (Extremum::Max, true),
                (Extremum::Min, false),
                (Extremum::Min, true),
            ] {
                // Few values, so that most have equals.
                let mut x = rng.tensor(dtype, &shape, -4.0, 4.0);
                if dtype.is_float() && select_last {
                    plant_specials(&mut x, rng);
                }
                let op = Op::ArgReduce {
                    kind,
                    axis,
                    keepdims: select_last,
                    select_last,
                };
                all.push(Case::of_op(&op, vec![x], 0.0));
            }
        }
    }
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_rows"], "{}", c.body));
    check_all("positions of extremes", &all);
}

#[test]
fn rows_that_are_kept() {
    let rng = &mut Rng(62);
    let mut all = Vec::new();
    for shape in shapes() {
        for dtype in [DType::F32, DType::F16, DType::F64] {
            let x = |rng: &mut Rng, shape: &[usize]| rng.tensor(dtype, shape, -3.0, 3.0);
            // The softmax of rows that do not fit registers reads them twice, in one kernel, too.
            let fits = shape[1] * if dtype == DType::F64 { 8 } else { 4 } <= 32768;
            let row = &shape[1..];
            let epsilon = Real(1e-5);
            let mut cases = vec![
                Case::of_op(
                    &Op::Softmax {
                        axis: 1,
                        log: false,
                    },
                    vec![x(rng, &shape)],
                    1e-6,
                ),
                Case::of_op(
                    &Op::Softmax { axis: 1, log: true },
                    vec![x(rng, &shape)],
                    1e-6,
                ),
                Case::of_op(
                    &Op::RmsNorm { axis: 1, epsilon },
                    vec![x(rng, &shape), x(rng, row)],
                    1e-6,
                ),
            ];
            let operands = vec![x(rng, &shape), x(rng, row), x(rng, row)];
            cases.push(Case::of_op(
                &Op::LayerNorm { axis: 1, epsilon },
                operands,
                2e-6,
            ));
            for case in &cases {
                let is_softmax = case
                    .body
                    .nodes()
                    .any(|(_, n)| matches!(n.op, Op::Softmax { .. }));
                assert_eq!(
                    entries(&case.body) == ["gm_rows"],
                    fits || is_softmax,
                    "{}",
                    case.body
                );
            }
            all.extend(cases);
        }
    }
    let norm = Op::LayerNorm {
        axis: 1,
        epsilon: Real(1e-5),
    };
    let x = |rng: &mut Rng, shape: &[usize]| rng.tensor(DType::F32, shape, -3.0, 3.0);
    all.push(Case::of_op(
        &norm,
        vec![
            x(rng, &[3, 1, 4, 9]),
            x(rng, &[1, 4, 9]),
            x(rng, &[1, 4, 9]),
        ],
        2e-6,
    ));
    all.push(Case::of_op(
        &norm,
        vec![x(rng, &[6, 1]), x(rng, &[1]), x(rng, &[1])],
        2e-6,
    ));
    check_all("rows in registers", &all);
}

/// `relu(layer_norm(x + residual)) * scale`, and the softmax of masked scores: one kernel each.
#[test]
fn neighbours_join_the_row() {
    let rng = &mut Rng(63);
    let mut b = GraphBuilder::new("block");
    let (x, r) = (
        b.input("x", DType::F32, [7, 100]),
        b.input("r", DType::F32, [7, 100]),
    );
    let (gamma, beta) = (
        b.input("gamma", DType::F32, [100]),
        b.input("beta", DType::F32, [100]),
    );
    let scale = b.input("scale", DType::F32, [7, 1]);
    let y = b.add_(x, r).unwrap();
    let y = b
        .add1(
            Op::LayerNorm {
                axis: 1,
                epsilon: Real(1e-5),
            },
            &[y, gamma, beta],
        )
        .unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    let y = b.mul(y, scale).unwrap();
    b.output("y", y);
    let body = b.finish().unwrap();
    insta::assert_snapshot!("rows_layer_norm", listing(&body));
    let inputs = [&[7, 100][..], &[7, 100], &[100], &[100], &[7, 1]]
        .map(|s| rng.tensor(DType::F32, s, -1.0, 1.0));
    let mut cases = vec![Case {
        body,
        inputs: inputs.to_vec(),
        tolerance: 1e-5,
    }];
    let mut b = GraphBuilder::new("scores");
    let (x, mask) = (
        b.input("x", DType::F16, [2, 3, 5, 60]),
        b.input("mask", DType::F16, [5, 60]),
    );
    let y = b.add_(x, mask).unwrap();
    let y = b
        .add1(
            Op::Softmax {
                axis: 3,
                log: false,
            },
            &[y],
        )
        .unwrap();
    b.output("y", y);
    let inputs = [&[2, 3, 5, 60][..], &[5, 60]].map(|s| rng.tensor(DType::F16, s, -1.0, 1.0));
    cases.push(Case {
        body: b.finish().unwrap(),
        inputs: inputs.to_vec(),
        tolerance: 1e-5,
    });
    cases
        .iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_rows"], "{}", c.body));
    check_all("rows with neighbours", &cases);
}

/// `cast(layer_norm(x)) + r * scale` in rows of 96: `x` of `f16`, in loads of 8 elements, `r` of `f32`.
fn norm_and_residual(rng: &mut Rng, gain: [usize; 1]) -> Case {
    let mut b = GraphBuilder::new("block");
    let x = b.input("x", DType::F16, [9, 96]);
    let [gamma, beta] = ["gamma", "beta"].map(|name| b.input(name, DType::F16, [96usize]));
    let r = b.input("r", DType::F32, [9, 96]);
    let scale = b.input("scale", DType::F32, gain);
    let epsilon = Real(1e-5);
    let y = b.add1(Op::LayerNorm { axis: 1, epsilon }, &[x, gamma, beta]);
    let y = b.map(ScalarOp::Cast(DType::F32), &[y.unwrap()]).unwrap();
    let scaled = b.mul(r, scale).unwrap();
    let y = b.add_(y, scaled).unwrap();
    b.output("y", y);
    let [row, half] = [[9, 96].as_slice(), &[96]];
    let mut inputs: Vec<Tensor> = [row, half, half]
        .map(|s| rng.tensor(DType::F16, s, -1.0, 1.0))
        .into();
    inputs.push(rng.tensor(DType::F32, row, -1.0, 1.0));
    inputs.push(rng.tensor(DType::F32, &gain, -1.0, 1.0));
    Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance: 1e-5,
    }
}

/// Operands beside a row are loaded as the row is, and nothing is divided for each element.
#[test]
fn operands_beside_a_row_move_in_vectors() {
    let rng = &mut Rng(64);
    let cases = [96, 1].map(|n| norm_and_residual(rng, [n]));
    check_all("operands beside rows", &cases);
    let Some(nvrtc) = nvrtc_or_left_out("machine code of rows") else {
        return;
    };
    let made = generate(&as_cluster(&cases[0].body), Arch::parse("sm_90a").unwrap()).unwrap();
    let cubin = nvrtc.compile(&made.units[0]).unwrap().cubin;
    let Some(code) = machine_code(nvrtc, &cubin, "rows with operands beside them") else {
        return;
    };
    let loads: Vec<&str> = code.lines().filter(|l| l.contains(" LDG.")).collect();
    // x, gamma and beta by one each, r and scale by two.
    let wide = loads.iter().filter(|l| l.contains("LDG.E.128")).count();
    assert_eq!([wide, loads.len()], [7, 7], "{}", loads.join("\n"));
    // Of the two means and the root; dividing each of 8 elements took 7 more.
    let n_divisions = code.matches(" MUFU.RCP ").count();
    assert!(n_divisions <= 6, "{n_divisions} divisions:\n{code}");
}

#[test]
fn kept_rows_stay_in_registers() {
    let Some(nvrtc) = nvrtc_or_left_out("resources of kept rows") else {
        return;
    };
    let x = Tensor::zeros(DType::F32, &[64, 8192]).unwrap();
    let g = as_cluster(&graph_of(
        &Op::Softmax {
            axis: 1,
            log: false,
        },
        &[x],
    ));
    for arch in ARCHS {
        let made = generate(&g, Arch::parse(arch).unwrap()).unwrap();
        let r = nvrtc.compile(&made.units[0]).unwrap().resources["gm_rows"];
        assert!(
            r.stack_bytes == 0 && r.spill_store_bytes == 0,
            "{arch}: {r:?}"
        );
    }
}
