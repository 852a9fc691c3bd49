//! Every op of the tables that can stand in a cluster, over dtypes, shapes and empty axes.

use super::{Case, Rng, plant_specials};
use crate::ir::*;
use gristmill_runtime::{DType, Tensor, status};

/// Shapes of rank 1 to 3, some with axes of extent 0 or 1.
fn shapes(rng: &mut Rng) -> Vec<Vec<usize>> {
    let mut random = |rank: usize| (0..rank).map(|_| 1 + rng.below(7)).collect::<Vec<_>>();
    vec![
        vec![],
        vec![300],
        random(1),
        random(2),
        random(3),
        vec![3, 0, 2],
        vec![1, 5],
    ]
}

/// Every element-wise op on every dtype that it takes, special values among them.
pub fn scalar_ops(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for op in ScalarOp::samples() {
        let arity = op.spec().arity;
        for &dtype in DType::ALL {
            let mut dtypes = vec![dtype; arity];
            if op == ScalarOp::Select {
                dtypes[0] = DType::Bool;
            }
            // Floats of 8 bits are widened as the others are that are narrow, so some ops stand for all.
            let stands = matches!(
                op,
                ScalarOp::Add | ScalarOp::Select | ScalarOp::Exp | ScalarOp::Gt | ScalarOp::Gelu
            );
            if op.result_dtype(&dtypes).is_err() || dtype.is_float8() && !stands {
                continue;
            }
            let hi = if op == ScalarOp::Pow { 3.0 } else { 9.0 };
            for shape in [vec![7, 5], vec![]] {
                let mut operands: Vec<Tensor> = dtypes
                    .iter()
                    .map(|&d| rng.tensor(d, &shape, -hi, hi))
                    .collect();
                if dtype.is_float() {
                    operands.iter_mut().for_each(|t| plant_specials(t, rng));
                } else if matches!(op, ScalarOp::Div | ScalarOp::Rem | ScalarOp::Mod) {
                    operands[1] = rng.tensor(dtype, &shape, 1.0, 9.0);
                }
                // Programs with cancellation (gelu far below 0) agree only relative to their terms.
                let tolerance = if dtype == DType::F64 { 1e-14 } else { 1e-6 };
                all.push(Case::of_op(&Op::Map(op), operands, tolerance));
            }
        }
    }
    all
}

/// Every cast and bit cast, of special values and of integers with their upper bits set.
pub fn casts(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for &from in DType::ALL {
        for &to in DType::ALL {
            let mut x = rng.tensor(from, &[64], -400.0, 400.0);
            if from.is_float() {
                plant_specials(&mut x, rng);
            } else if from != DType::Bool {
                x.as_bytes_mut()[..32].fill(0xff);
                x.as_bytes_mut()[32..40].fill(0x80);
            }
            if from.size_bytes() == to.size_bytes() {
                let op = Op::Map(ScalarOp::BitCast(to));
                all.push(Case::of_op(&op, vec![x.clone()], 0.0));
            }
            all.push(Case::of_op(&Op::Map(ScalarOp::Cast(to)), vec![x], 0.0));
        }
    }
    all.extend(float8_casts());
    all
}

/// Casts of every code of the floats of 8 bits, and casts to them of numbers on, below and above
/// each tie.
pub fn float8_casts() -> Vec<Case> {
    let mut all = Vec::new();
    for &d in DType::ALL {
        let Some(format) = d.float8() else { continue };
        let codes: Vec<u8> = (0..=255).collect();
        let numbers: Vec<f64> = (0..=format.largest)
            .map(|code| format.decode(code).into())
            .collect();
        let mut ties: Vec<f64> = numbers.windows(2).map(|w| (w[0] + w[1]) / 2.0).collect();
        ties.extend([format.overflow().0, 1e6, 1e-6]);
        let near = |v: f64| {
            [
                v,
                f64::from((v as f32).next_down()),
                f64::from((v as f32).next_up()),
                v.next_down(),
                v.next_up(),
            ]
        };
        let values: Vec<f64> = ties
            .iter()
            .flat_map(|&v| near(v))
            .flat_map(|v| [v, -v])
            .collect();
        for wide in [DType::F16, DType::F32, DType::F64] {
            let x = Tensor::from_bytes(d, &[256], &codes).expect("a byte per element");
            all.push(Case::of_op(&Op::Map(ScalarOp::Cast(wide)), vec![x], 0.0));
            let x =
                Tensor::from_f64s(wide, &[values.len()], &values).expect("as many as there are");
            all.push(Case::of_op(&Op::Map(ScalarOp::Cast(d)), vec![x], 0.0));
        }
    }
    all
}

/// Operands that broadcast.
pub fn broadcasts(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for (a, b) in [
        (vec![4, 1, 3], vec![5, 1]),
        (vec![3], vec![2, 1, 3]),
        (vec![], vec![2, 0]),
        (vec![1, 1], vec![6]),
        (vec![2, 3, 4, 5], vec![3, 1, 5]),
    ] {
        for dtype in [DType::F32, DType::I64, DType::F16] {
            let operands = vec![
                rng.tensor(dtype, &a, -4.0, 4.0),
                rng.tensor(dtype, &b, -4.0, 4.0),
            ];
            all.push(Case::of_op(&Op::Map(ScalarOp::Sub), operands, 0.0));
        }
    }
    all
}

/// Every tensor op that can stand in a cluster.
pub fn tensor_ops(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for (name, class, _) in Op::catalogue() {
        if !in_clusters(class) {
            continue;
        }
        let cases = cases(name, rng);
        assert!(!cases.is_empty(), "{name} has no case: add one");
        for (op, operands) in cases {
            assert_eq!(op.name(), name);
            all.push(Case::of_table(&op, operands));
        }
    }
    all
}

/// Ops that select, order or normalise, over NaN, infinities and zeros of both signs.
pub fn special_selections(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for name in [
        "reduce",
        "arg_reduce",
        "softmax",
        "pool",
        "max_pool_indices",
        "max_pool_grad",
        "top_k",
        "cum_sum",
        "scatter_elements",
    ] {
        for (op, mut operands) in cases(name, rng) {
            for t in operands.iter_mut().filter(|t| t.dtype().is_float()) {
                for _ in 0..1 + t.len() / 24 {
                    plant_specials(t, rng);
                }
            }
            all.push(Case::of_table(&op, operands));
        }
    }
    all.extend(extremes_of_8_bit_floats());
    all
}

/// Extremes that are infinities in a dtype to which conversions saturate, along rows and across.
fn extremes_of_8_bit_floats() -> Vec<Case> {
    let of = |(kind, bits, axis): (ReduceKind, u8, usize)| {
        let mut x = vec![0x3c_u8; 70 * 70];
        x[33 * 70 + 21] = bits;
        let op = Op::Reduce {
            kind,
            axes: vec![axis],
            keepdims: false,
        };
        let x = Tensor::from_bytes(DType::F8E5M2, &[70, 70], &x).unwrap();
        Case::of_op(&op, vec![x], 0.0)
    };
    let kinds = [(ReduceKind::Max, 0x7c), (ReduceKind::Min, 0xfc)];
    let both = kinds
        .into_iter()
        .flat_map(|(kind, bits)| [0, 1].map(|axis| (kind, bits, axis)));
    both.map(of).collect()
}

/// Attention and softmax of rows whose mask hides everything, some of a row, or is NaN.
pub fn hidden_rows(rng: &mut Rng) -> Vec<Case> {
    const NONE: f32 = f32::NEG_INFINITY;
    let mut all = Vec::new();
    for n_keys in [6, 300] {
        for causal in [false, true] {
            let mut mask = vec![0f32; 4 * n_keys];
            mask[..n_keys].fill(NONE);
            mask[n_keys + 1..2 * n_keys].fill(NONE);
            mask[3 * n_keys - 1] = f32::NAN;
            let mask = Tensor::from_slice(&mask, &[4, n_keys]).unwrap();
            let mut x = |shape: &[usize]| rng.tensor(DType::F32, shape, -2.0, 2.0);
            let operands = vec![
                x(&[2, 3, 4, 8]),
                x(&[2, 3, n_keys, 8]),
                x(&[2, 3, n_keys, 5]),
                mask.clone(),
            ];
            all.push(Case::of_op(
                &Op::Attention {
                    scale: Real(0.3),
                    causal,
                },
                operands,
                1e-5,
            ));
            for log in [false, true] {
                all.push(Case::of_op(
                    &Op::Softmax { axis: 1, log },
                    vec![mask.clone()],
                    1e-6,
                ));
            }
        }
    }
    all
}

/// Unary ops over shapes of every rank.
pub fn unary_shapes(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for shape in shapes(rng) {
        for dtype in [DType::F32, DType::F64, DType::I32, DType::BF16] {
            let x = rng.tensor(dtype, &shape, -3.0, 3.0);
            all.push(Case::of_op(&Op::Map(ScalarOp::Neg), vec![x], 0.0));
        }
    }
    all
}

/// Ops that fail at run time, and their status.
pub fn faults(rng: &mut Rng) -> Vec<(Op, Vec<Tensor>, u32)> {
    let at = Tensor::from_slice(&[0i64, 4], &[2]).unwrap();
    let data = rng.tensor(DType::F32, &[4], -1.0, 1.0);
    let zeros = Tensor::zeros(DType::I32, &[3]).unwrap();
    let updates = rng.tensor(DType::F32, &[2], -1.0, 1.0);
    let scatter = Op::ScatterElements {
        axis: 0,
        kind: ScatterKind::Set,
    };
    let infinite = Tensor::from_slice(&[1.0f32, 2.0, f32::NEG_INFINITY], &[3]).unwrap();
    let nan = Tensor::from_slice(&[1.0f64, f64::NAN], &[2]).unwrap();
    vec![
        (Op::CheckFinite, vec![infinite], status::NOT_FINITE),
        (Op::CheckFinite, vec![nan], status::NOT_FINITE),
        (
            Op::Gather { axis: 0 },
            vec![data.clone(), at.clone()],
            status::INDEX_OUT_OF_RANGE,
        ),
        (
            scatter,
            vec![data.clone(), at, updates],
            status::INDEX_OUT_OF_RANGE,
        ),
        (
            Op::Map(ScalarOp::Div),
            vec![zeros.clone(), zeros.clone()],
            status::DIVISION_BY_ZERO,
        ),
        (
            Op::Map(ScalarOp::Mod),
            vec![zeros.clone(), zeros],
            status::DIVISION_BY_ZERO,
        ),
    ]
}

fn dims(d: &[usize]) -> Vec<Dim> {
    d.iter().map(|&d| d.into()).collect()
}

fn window(strides: &[usize], dilations: &[usize], low: &[usize], high: &[usize]) -> Window {
    Window {
        strides: strides.into(),
        dilations: dilations.into(),
        pads_low: low.into(),
        pads_high: high.into(),
    }
}

/// Gradients of max poolings in both layouts: windows that overlap, that leave elements out, that lie in the padding; and ties.
fn max_pool_grads(x: &mut dyn FnMut(DType, &[usize]) -> Tensor, out: &mut Vec<(Op, Vec<Tensor>)>) {
    let windows = [
        (vec![3, 2], window(&[2, 1], &[1, 2], &[1, 0], &[1, 0])),
        (vec![2, 2], window(&[2, 3], &[1, 1], &[0, 0], &[0, 0])),
        (vec![1, 3], window(&[1, 2], &[1, 1], &[2, 1], &[0, 2])),
        (
            vec![2, 3, 2],
            window(&[2, 1, 2], &[1, 1, 2], &[1, 1, 0], &[0, 1, 1]),
        ),
    ];
    for d in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (size, window) in &windows {
            let extents = &[4, 7, 6][3 - size.len()..];
            for (layout, shape) in [
                (Layout::ChannelsFirst, [&[2, 3], extents].concat()),
                (Layout::ChannelsLast, [&[2], extents, &[3]].concat()),
            ] {
                for ceil in [false, true] {
                    let (size, window) = (size.clone(), window.clone());
                    let pool = Op::Pool {
                        kind: PoolKind::Max,
                        size: size.clone(),
                        window: window.clone(),
                        ceil,
                        layout,
                    };
                    let whole: Vec<f64> =
                        x(d, &shape).to_f64s().iter().map(|x| x.round()).collect();
                    let operand = Tensor::from_f64s(d, &shape, &whole).unwrap();
                    let pooled = eval::eval_tensors(&pool, &[&operand]).unwrap();
                    let g = x(d, pooled[0].shape());
                    let op = Op::MaxPoolGrad {
                        size,
                        window,
                        ceil,
                        layout,
                    };
                    out.push((op, vec![operand, g]));
                }
            }
        }
    }
}

/// Cases of one op by its name: attributes and operands. Empty when the op cannot stand in a cluster.
pub fn cases(name: &str, rng: &mut Rng) -> Vec<(Op, Vec<Tensor>)> {
    let mut out = Vec::new();
    let dtypes = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::I32,
        DType::U64,
    ];
    let floats = [DType::F32, DType::F64, DType::F16, DType::BF16];
    let mut x = |d: DType, s: &[usize]| rng.tensor(d, s, -5.0, 5.0);
    match name {
        "constant" => {
            for d in [DType::F32, DType::Bool, DType::F16] {
                out.push((Op::constant(x(d, &[2, 3])), vec![]));
                out.push((Op::constant(x(d, &[])), vec![]));
            }
        }
        "iota" => {
            for d in dtypes {
                out.push((
                    Op::Iota {
                        dtype: d,
                        shape: dims(&[3, 4]),
                        axis: 1,
                    },
                    vec![],
                ));
                out.push((
                    Op::Iota {
                        dtype: d,
                        shape: dims(&[3, 4]),
                        axis: 0,
                    },
                    vec![],
                ));
            }
        }
        "random_bits" => {
            for (seed, first, stream, shape) in [
                (0, 0, 0, &[1][..]),
                (u64::MAX, 3, -1, &[]),
                (0x0123_4567_89ab_cdef, 0, 1i64 << 40, &[7, 3, 5]),
                (5, 0, 2, &[1027]),
                (5, 6, 2, &[1027]),
                (5, 1 << 33, 2, &[258]),
                (5, 0, 2, &[2, 0]),
            ] {
                let op = Op::RandomBits {
                    seed,
                    first,
                    shape: dims(shape),
                };
                let rank = shape.len() % 2;
                let stream = Tensor::from_slice(&[stream], &[1][..rank]).unwrap();
                out.push((op, vec![stream]));
            }
        }
        "broadcast" => {
            out.push((
                Op::Broadcast {
                    shape: dims(&[2, 3, 4]),
                },
                vec![x(DType::F32, &[3, 1])],
            ));
            out.push((
                Op::Broadcast {
                    shape: dims(&[2, 0]),
                },
                vec![x(DType::I64, &[])],
            ));
        }
        "reshape" => {
            for (from, to) in [
                (vec![4, 6], vec![2, 2, 3, 2]),
                (vec![2, 3, 4], vec![6, 4]),
                (vec![1, 6, 1], vec![6]),
                (vec![6], vec![1, 2, 1, 3, 1]),
                (vec![4, 6], vec![3, 8]),
                (vec![0, 3], vec![3, 0, 2]),
                (vec![1], vec![]),
            ] {
                out.push((Op::Reshape { shape: dims(&to) }, vec![x(DType::I32, &from)]));
            }
        }
        "transpose" => {
            out.push((
                Op::Transpose {
                    perm: vec![2, 0, 1],
                },
                vec![x(DType::F32, &[3, 4, 5])],
            ));
            out.push((
                Op::Transpose { perm: vec![1, 0] },
                vec![x(DType::BF16, &[37, 21])],
            ));
            out.push((
                Op::Transpose {
                    perm: vec![0, 2, 1],
                },
                vec![x(DType::F32, &[3, 33, 50])],
            ));
            out.push((
                Op::Transpose {
                    perm: vec![0, 2, 1, 3],
                },
                vec![x(DType::F32, &[2, 3, 4, 5])],
            ));
        }
        "slice" => {
            let op = Op::Slice {
                starts: vec![1.into(), 6.into(), 0.into()],
                sizes: dims(&[2, 3, 4]),
                steps: vec![1, -2, 1],
            };
            out.push((op, vec![x(DType::F32, &[4, 7, 4])]));
            let op = Op::Slice {
                starts: vec![1.into()],
                sizes: dims(&[0]),
                steps: vec![1],
            };
            out.push((op, vec![x(DType::U8, &[4])]));
        }
        "pad" => {
            for mode in [
                PadMode::Constant,
                PadMode::Reflect,
                PadMode::Edge,
                PadMode::Wrap,
            ] {
                for d in [DType::F32, DType::I16] {
                    let mut operands = vec![x(d, &[3, 4])];
                    if mode == PadMode::Constant {
                        operands.push(x(d, &[]));
                    }
                    out.push((
                        Op::Pad {
                            low: vec![2, 0],
                            high: vec![1, 3],
                            mode,
                        },
                        operands,
                    ));
                }
            }
            let op = Op::Pad {
                low: vec![1],
                high: vec![1],
                mode: PadMode::Constant,
            };
            out.push((op, vec![x(DType::F32, &[0]), x(DType::F32, &[])]));
        }
        "concat" => {
            let parts = vec![
                x(DType::F32, &[2, 3]),
                x(DType::F32, &[2, 0]),
                x(DType::F32, &[2, 1]),
                x(DType::F32, &[2, 4]),
            ];
            out.push((Op::Concat { axis: 1 }, parts));
            out.push((
                Op::Concat { axis: 0 },
                vec![x(DType::Bool, &[1, 3]), x(DType::Bool, &[2, 3])],
            ));
        }
        "gather" => {
            for d in [DType::F32, DType::I64, DType::F16] {
                let at = Tensor::from_slice(&[0i64, -1, 2, 1, 1, -4], &[2, 3]).unwrap();
                out.push((Op::Gather { axis: 1 }, vec![x(d, &[3, 4, 2]), at.clone()]));
                out.push((Op::Gather { axis: 0 }, vec![x(d, &[4, 40]), at]));
            }
        }
        "gather_elements" => {
            let at = Tensor::from_slice(&[0i32, -1, 2, 1, 1, 0], &[3, 2]).unwrap();
            out.push((
                Op::GatherElements { axis: 0 },
                vec![x(DType::F32, &[3, 4]), at],
            ));
        }
        "gather_nd" => {
            let at = Tensor::from_slice(&[0i64, 1, -1, 0], &[2, 2]).unwrap();
            out.push((
                Op::GatherNd { batch_dims: 0 },
                vec![x(DType::F32, &[2, 3, 4]), at.clone()],
            ));
            out.push((
                Op::GatherNd { batch_dims: 1 },
                vec![x(DType::I32, &[2, 3, 4, 2]), at],
            ));
        }
        "check_indices" => {
            let at = Tensor::from_slice(&[0i32, -1, 2, -4], &[4, 1]).unwrap();
            let extents = vec![4.into()];
            out.push((Op::CheckIndices { extents }, vec![at]));
            let at = Tensor::from_slice(&[0i64, -1, 4, 1, 1, -5], &[2, 3]).unwrap();
            let extents = vec![2.into(), 3.into(), 5.into()];
            out.push((Op::CheckIndices { extents }, vec![at]));
        }
        "check_finite" => {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                out.push((Op::CheckFinite, vec![x(dtype, &[3, 5])]));
            }
        }
        "scatter_elements" | "scatter_nd" => {
            let kinds = [
                ScatterKind::Set,
                ScatterKind::Add,
                ScatterKind::Mul,
                ScatterKind::Max,
                ScatterKind::Min,
            ];
            for kind in kinds {
                for d in [DType::F32, DType::F16, DType::I64, DType::U8] {
                    if name == "scatter_nd" {
                        let at = Tensor::from_slice(&[1i64, -1, 1], &[3, 1]).unwrap();
                        out.push((
                            Op::ScatterNd { kind },
                            vec![x(d, &[4, 3]), at, x(d, &[3, 3])],
                        ));
                    } else {
                        let at = Tensor::from_slice(&[1i64, 0, 1, -1], &[2, 2]).unwrap();
                        out.push((
                            Op::ScatterElements { axis: 1, kind },
                            vec![x(d, &[2, 3]), at, x(d, &[2, 2])],
                        ));
                    }
                }
            }
        }
        "reduce" => {
            use ReduceKind::*;
            for kind in [Sum, Mean, Max, Min, Prod] {
                for &d in DType::ALL {
                    if d == DType::Bool && !matches!(kind, Max | Min) {
                        continue;
                    }
                    for (shape, axes) in [
                        (vec![3, 4, 5], vec![0, 2]),
                        (vec![4, 5, 3, 2], vec![0, 2]),
                        (vec![21, 19], vec![0]),
                        (vec![6, 70], vec![1]),
                        (vec![3, 0], vec![1]),
                        (vec![9], vec![]),
                    ] {
                        out.push((
                            Op::Reduce {
                                kind,
                                axes: axes.clone(),
                                keepdims: false,
                            },
                            vec![x(d, &shape)],
                        ));
                        out.push((
                            Op::Reduce {
                                kind,
                                axes,
                                keepdims: true,
                            },
                            vec![x(d, &shape)],
                        ));
                    }
                }
            }
        }
        "arg_reduce" => {
            for kind in [Extremum::Max, Extremum::Min] {
                for &d in DType::ALL {
                    for select_last in [false, true] {
                        let op = Op::ArgReduce {
                            kind,
                            axis: 1,
                            keepdims: select_last,
                            select_last,
                        };
                        out.push((op, vec![x(d, &[3, 9, 2])]));
                    }
                }
            }
        }
        "softmax" => {
            for d in floats {
                for (shape, axis) in [(vec![3, 40], 1), (vec![2, 5, 3], 1), (vec![2, 0], 1)] {
                    out.push((Op::Softmax { axis, log: false }, vec![x(d, &shape)]));
                    out.push((Op::Softmax { axis, log: true }, vec![x(d, &shape)]));
                }
            }
        }
        "standardize" => {
            for d in floats {
                for (shape, axes) in [
                    (vec![3, 40], vec![1]),
                    (vec![2, 9, 5], vec![1]),
                    (vec![2, 3, 4, 5, 2], vec![1, 2, 4]),
                    (vec![0, 4], vec![0]),
                ] {
                    let epsilon = Real(1e-5);
                    out.push((Op::Standardize { axes, epsilon }, vec![x(d, &shape)]));
                }
            }
        }
        "layer_norm" | "rms_norm" => {
            for d in floats {
                for (shape, axis) in [(vec![3, 40], 1), (vec![2, 4, 6], 1), (vec![0, 4], 1)] {
                    let epsilon = Real(1e-5);
                    let mut operands = vec![x(d, &shape), x(d, &shape[axis..])];
                    let op = if name == "layer_norm" {
                        operands.push(x(d, &shape[axis..]));
                        Op::LayerNorm { axis, epsilon }
                    } else {
                        Op::RmsNorm { axis, epsilon }
                    };
                    out.push((op, operands));
                }
            }
        }
        "matmul" => {
            for d in dtypes {
                out.push((Op::MatMul, vec![x(d, &[5, 7]), x(d, &[7, 3])]));
                out.push((Op::MatMul, vec![x(d, &[2, 1, 3, 4]), x(d, &[3, 4, 5])]));
                out.push((Op::MatMul, vec![x(d, &[3, 0]), x(d, &[0, 2])]));
            }
            out.push((
                Op::MatMul,
                vec![x(DType::F32, &[33, 70]), x(DType::F32, &[70, 65])],
            ));
            out.push((
                Op::MatMul,
                vec![
                    x(DType::F32, &[2, 9, 17, 20]),
                    x(DType::F32, &[1, 9, 20, 40]),
                ],
            ));
        }
        "conv" => {
            for d in dtypes {
                for layout in [Layout::ChannelsFirst, Layout::ChannelsLast] {
                    for (groups, cin, cout) in [(1, 4, 6), (2, 4, 6), (4, 4, 8)] {
                        let (xs, ws) = match layout {
                            Layout::ChannelsFirst => {
                                (vec![2, cin, 7, 6], vec![cout, cin / groups, 3, 2])
                            }
                            Layout::ChannelsLast => {
                                (vec![2, 7, 6, cin], vec![3, 2, cin / groups, cout])
                            }
                        };
                        let window = window(&[2, 1], &[1, 2], &[1, 0], &[2, 1]);
                        out.push((
                            Op::Conv {
                                window,
                                groups,
                                layout,
                            },
                            vec![x(d, &xs), x(d, &ws)],
                        ));
                    }
                }
            }
            let op = |groups| Op::Conv {
                window: window(&[2], &[1], &[3], &[1]),
                groups,
                layout: Layout::ChannelsFirst,
            };
            out.push((
                op(1),
                vec![x(DType::F32, &[2, 3, 11]), x(DType::F32, &[5, 3, 4])],
            ));
            for (groups, cin, cout) in [(1, 2, 3), (2, 4, 6), (4, 4, 4)] {
                for layout in [Layout::ChannelsFirst, Layout::ChannelsLast] {
                    let (xs, ws) = match layout {
                        Layout::ChannelsFirst => {
                            (vec![2, cin, 3, 4, 5], vec![cout, cin / groups, 2, 3, 2])
                        }
                        Layout::ChannelsLast => {
                            (vec![2, 3, 4, 5, cin], vec![2, 3, 2, cin / groups, cout])
                        }
                    };
                    let op = Op::Conv {
                        window: window(&[1, 2, 1], &[2, 1, 1], &[1, 0, 1], &[0, 2, 1]),
                        groups,
                        layout,
                    };
                    out.push((op, vec![x(DType::F32, &xs), x(DType::F32, &ws)]));
                }
            }
        }
        "conv_transpose" => {
            for d in dtypes {
                for groups in [1, 2] {
                    let window = window(&[2, 3], &[1, 2], &[1, 0], &[0, 1]);
                    let op = Op::ConvTranspose {
                        window,
                        output_pads: vec![1, 0],
                        groups,
                    };
                    out.push((op, vec![x(d, &[2, 4, 3, 4]), x(d, &[4, 3, 3, 2])]));
                }
            }
        }
        "pool" => {
            for d in dtypes {
                for kind in [PoolKind::Max, PoolKind::Avg, PoolKind::AvgIncludePad] {
                    for layout in [Layout::ChannelsFirst, Layout::ChannelsLast] {
                        for ceil in [false, true] {
                            let flat = window(&[2, 3], &[1, 2], &[1, 0], &[1, 0]);
                            let deep = window(&[2, 1, 3], &[1, 1, 2], &[1, 1, 0], &[0, 1, 0]);
                            for window in [flat, deep] {
                                let n = window.strides.len();
                                let (extents, size) = (&[4, 7, 6][3 - n..], &[2, 3, 2][3 - n..]);
                                let shape = match layout {
                                    Layout::ChannelsFirst => [&[2, 3], extents].concat(),
                                    Layout::ChannelsLast => [&[2], extents, &[3]].concat(),
                                };
                                let op = Op::Pool {
                                    kind,
                                    size: size.to_vec(),
                                    window,
                                    ceil,
                                    layout,
                                };
                                out.push((op, vec![x(d, &shape)]));
                            }
                        }
                    }
                }
            }
        }
        "max_pool_indices" => {
            for d in dtypes {
                let window = window(&[2, 2], &[1, 1], &[1, 1], &[0, 1]);
                out.push((
                    Op::MaxPoolIndices {
                        size: vec![3, 2],
                        window,
                        ceil: false,
                    },
                    vec![x(d, &[2, 3, 6, 5])],
                ));
            }
        }
        "max_pool_grad" => max_pool_grads(&mut x, &mut out),
        "sample" => {
            for d in floats {
                for (groups, masked) in [(1, false), (2, true)] {
                    let wide = if d == DType::F64 { d } else { DType::F32 };
                    let mut operands = vec![x(d, &[2, 4, 5, 6]), x(wide, &[2, groups, 3, 2, 7])];
                    operands.extend(masked.then(|| x(d, &[2, groups, 3, 7])));
                    out.push((Op::Sample { groups }, operands));
                }
                // Points beside an empty plane.
                let of = [&[1, 2, 3, 0][..], &[1, 1, 2, 2, 5], &[1, 1, 2, 5]];
                let dtypes = [d, DType::F32, d];
                let operands = of.iter().zip(dtypes).map(|(shape, d)| x(d, shape));
                out.push((Op::Sample { groups: 1 }, operands.collect()));
            }
        }
        "roi_align" => {
            for d in floats {
                for (kind, sampling, half_pixel) in [
                    (PoolKind::Avg, 0, true),
                    (PoolKind::Avg, 2, false),
                    (PoolKind::Max, 0, false),
                    (PoolKind::Max, 3, true),
                ] {
                    let op = Op::RoiAlign {
                        kind,
                        size: vec![3, 2],
                        sampling,
                        scale: Real(0.5),
                        half_pixel,
                    };
                    // Within the image, across its border, outside, and turned over.
                    let corners = [
                        [1.0, 2.5, 11.0, 12.0],
                        [-6.0, -3.0, 9.5, 21.0],
                        [40.0, 40.0, 48.0, 44.0],
                        [8.0, 9.0, 3.0, 2.0],
                    ];
                    let regions = Tensor::from_f64s(d, &[4, 4], corners.as_flattened()).unwrap();
                    let images = Tensor::from_slice(&[0i64, 1, -1, 0], &[4]).unwrap();
                    out.push((op, vec![x(d, &[2, 3, 7, 6]), regions, images]));
                }
            }
        }
        "attention" => {
            for d in floats {
                for causal in [false, true] {
                    let op = Op::Attention {
                        scale: Real(0.3),
                        causal,
                    };
                    let mut operands = vec![
                        x(d, &[2, 3, 5, 4]),
                        x(d, &[2, 3, 6, 4]),
                        x(d, &[2, 3, 6, 7]),
                    ];
                    out.push((op.clone(), operands.clone()));
                    operands.push(x(d, &[2, 1, 1, 6]));
                    out.push((op, operands));
                }
            }
        }
        "top_k" => {
            for &d in DType::ALL {
                for largest in [false, true] {
                    out.push((
                        Op::TopK {
                            k: 3.into(),
                            axis: 1,
                            largest,
                        },
                        vec![x(d, &[2, 9, 3])],
                    ));
                    out.push((
                        Op::TopK {
                            k: 6.into(),
                            axis: 0,
                            largest,
                        },
                        vec![x(d, &[6])],
                    ));
                }
            }
        }
        "cum_sum" => {
            for d in dtypes {
                for (exclusive, reverse) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    out.push((
                        Op::CumSum {
                            axis: 1,
                            exclusive,
                            reverse,
                        },
                        vec![x(d, &[2, 9, 3])],
                    ));
                }
            }
        }
        _ => {}
    }
    out
}

/// True when a cluster may hold ops of this class. Element-wise ops have their own test.
pub fn in_clusters(class: OpClass) -> bool {
    !matches!(
        class,
        OpClass::Map | OpClass::Control | OpClass::State | OpClass::Transfer | OpClass::Cluster
    )
}
