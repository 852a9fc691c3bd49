//! Reductions, softmax and norms, cumulative sums and top-k.

use super::*;
use crate::ir::{Extremum, ReduceKind, ScalarOp};
use gristmill_runtime::DType;
use gristmill_runtime::half::bf16;

fn reduce(kind: ReduceKind, x: &Tensor, axes: &[usize], keepdims: bool) -> Tensor {
    ev(
        Op::Reduce {
            kind,
            axes: axes.to_vec(),
            keepdims,
        },
        &[x],
    )
}

#[test]
fn reduces_the_named_axes() {
    let x = count_up(&[2, 3, 2]);
    assert_eq!(
        reduce(ReduceKind::Sum, &x, &[1], false),
        t(&[6f32, 9.0, 24.0, 27.0], &[2, 2])
    );
    assert_eq!(
        reduce(ReduceKind::Sum, &x, &[0, 2], true),
        t(&[14f32, 22.0, 30.0], &[1, 3, 1])
    );
    assert_eq!(
        reduce(ReduceKind::Mean, &x, &[0, 1, 2], false),
        t(&[5.5f32], &[])
    );
    assert_eq!(
        reduce(ReduceKind::Max, &x, &[2], false),
        t(&[1f32, 3.0, 5.0, 7.0, 9.0, 11.0], &[2, 3])
    );
    assert_eq!(
        reduce(ReduceKind::Min, &x, &[0], true),
        t(&[0f32, 1.0, 2.0, 3.0, 4.0, 5.0], &[1, 3, 2])
    );
    assert_eq!(
        reduce(ReduceKind::Prod, &t(&[2f64, 3.0, -4.0], &[3]), &[0], false),
        t(&[-24f64], &[])
    );
    assert_eq!(reduce(ReduceKind::Sum, &x, &[], false), x);
}

#[test]
fn empty_reductions_give_the_identity() {
    let x = Tensor::zeros(DType::F32, &[2, 0]).unwrap();
    assert_eq!(
        reduce(ReduceKind::Sum, &x, &[1], false),
        t(&[0f32; 2], &[2])
    );
    assert_eq!(
        reduce(ReduceKind::Prod, &x, &[1], false),
        t(&[1f32; 2], &[2])
    );
    assert_eq!(
        reduce(ReduceKind::Max, &x, &[1], false),
        t(&[f32::NEG_INFINITY; 2], &[2])
    );
    assert_eq!(
        reduce(ReduceKind::Min, &x, &[1], false),
        t(&[f32::INFINITY; 2], &[2])
    );
    assert!(
        reduce(ReduceKind::Mean, &x, &[1], false)
            .as_slice::<f32>()
            .iter()
            .all(|v| v.is_nan())
    );
    assert_eq!(reduce(ReduceKind::Sum, &x, &[0], false).shape(), [0]);
    let i = Tensor::zeros(DType::I16, &[0]).unwrap();
    assert_eq!(reduce(ReduceKind::Mean, &i, &[0], false), t(&[0i16], &[]));
    assert_eq!(
        reduce(ReduceKind::Max, &i, &[0], false),
        t(&[i16::MIN], &[])
    );
    assert_eq!(
        reduce(ReduceKind::Min, &i, &[0], false),
        t(&[i16::MAX], &[])
    );
    let b = Tensor::zeros(DType::Bool, &[0]).unwrap();
    assert_eq!(reduce(ReduceKind::Max, &b, &[0], false), t(&[false], &[]));
    assert_eq!(reduce(ReduceKind::Min, &b, &[0], false), t(&[true], &[]));
}

#[test]
fn nan_wins_and_integers_wrap() {
    let x = t(&[1f32, f32::NAN, f32::INFINITY], &[3]);
    for kind in [
        ReduceKind::Max,
        ReduceKind::Min,
        ReduceKind::Sum,
        ReduceKind::Prod,
        ReduceKind::Mean,
    ] {
        assert!(
            reduce(kind, &x, &[0], false).as_slice::<f32>()[0].is_nan(),
            "{kind:?}"
        );
    }
    let i = t(&[100i8, 100, 100], &[3]);
    assert_eq!(reduce(ReduceKind::Sum, &i, &[0], false), t(&[44i8], &[]));
    assert_eq!(reduce(ReduceKind::Mean, &i, &[0], false), t(&[100i8], &[]));
    assert_eq!(
        reduce(ReduceKind::Mean, &t(&[-3i32, 0], &[2]), &[0], false),
        t(&[-1i32], &[])
    );
    assert_eq!(
        reduce(ReduceKind::Prod, &t(&[16u8, 17], &[2]), &[0], false),
        t(&[16u8], &[])
    );
    assert_eq!(
        reduce(ReduceKind::Mean, &t(&[u64::MAX], &[1]), &[0], false),
        t(&[u64::MAX], &[])
    );
    assert_eq!(
        reduce(ReduceKind::Max, &t(&[false, true], &[2]), &[0], false),
        t(&[true], &[])
    );
    fails(
        Op::Reduce {
            kind: ReduceKind::Sum,
            axes: vec![0],
            keepdims: false,
        },
        &[&t(&[true], &[1])],
    );
}

#[test]
fn sums_round_once() {
    let ones = t(&[bf16::ONE; 1000], &[1000]);
    assert_eq!(
        reduce(ReduceKind::Sum, &ones, &[0], false),
        t(&[bf16::from_f32(1000.0)], &[])
    );
    let x = t(&[1e8f32, 1.0, -1e8], &[3]);
    assert_eq!(reduce(ReduceKind::Sum, &x, &[0], false), t(&[1f32], &[]));
}

#[test]
fn arg_reduce_picks_first_or_last() {
    let x = t(&[1f32, 3.0, 3.0, 0.0, f32::NAN, 7.0], &[2, 3]);
    let arg = |kind, axis, select_last| {
        ev(
            Op::ArgReduce {
                kind,
                axis,
                keepdims: false,
                select_last,
            },
            &[&x],
        )
    };
    assert_eq!(arg(Extremum::Max, 1, false), t(&[1i64, 1], &[2]));
    assert_eq!(arg(Extremum::Max, 1, true), t(&[2i64, 1], &[2]));
    assert_eq!(arg(Extremum::Min, 1, false), t(&[0i64, 1], &[2]));
    assert_eq!(arg(Extremum::Max, 0, false), t(&[0i64, 1, 1], &[3]));
    let kept = ev(
        Op::ArgReduce {
            kind: Extremum::Min,
            axis: 0,
            keepdims: true,
            select_last: true,
        },
        &[&t(&[2u8, 2], &[2, 1])],
    );
    assert_eq!(kept, t(&[1i64], &[1, 1]));
    fails(
        Op::ArgReduce {
            kind: Extremum::Max,
            axis: 0,
            keepdims: true,
            select_last: true,
        },
        &[&t::<f32>(&[], &[0])],
    );
}

#[test]
fn softmax_is_its_composition() {
    let x = t(&[1f64, 2.0, 3.0, -1.0, 0.5, 1000.0], &[2, 3]);
    for axis in [0, 1] {
        let expected = composed(&[&x], |b, v| {
            let max = b.reduce(ReduceKind::Max, v[0], &[axis], true)?;
            let shifted = b.sub(v[0], max)?;
            let e = b.map(ScalarOp::Exp, &[shifted])?;
            let sum = b.reduce(ReduceKind::Sum, e, &[axis], true)?;
            b.div(e, sum)
        });
        let y = ev(Op::Softmax { axis, log: false }, &[&x]);
        assert_close(&expected, &y, 1e-14, 0.0);
        let log = ev(Op::Softmax { axis, log: true }, &[&x]);
        assert_close(&y, &ev(Op::Map(ScalarOp::Exp), &[&log]), 1e-13, 0.0);
    }
    assert_eq!(
        ev(Op::Softmax { axis: 1, log: true }, &[&x]).as_slice::<f64>()[3],
        -1001.0
    );
    let nothing = t(&[f32::NEG_INFINITY; 2], &[2]);
    assert!(
        ev(
            Op::Softmax {
                axis: 0,
                log: false
            },
            &[&nothing]
        )
        .as_slice::<f32>()[0]
            .is_nan()
    );
    assert!(
        ev(
            Op::Softmax {
                axis: 1,
                log: false
            },
            &[&Tensor::zeros(DType::F32, &[2, 0]).unwrap()]
        )
        .is_empty()
    );
}

#[test]
fn norms_are_their_compositions() {
    let x = t(
        &(0..24)
            .map(|i| f64::from(i * i % 11) - 3.0)
            .collect::<Vec<_>>(),
        &[2, 3, 4],
    );
    let gamma = t(
        &(0..12).map(|i| 0.5 + f64::from(i)).collect::<Vec<_>>(),
        &[3, 4],
    );
    let beta = t(
        &(0..12).map(|i| 2.0 - f64::from(i)).collect::<Vec<_>>(),
        &[3, 4],
    );
    let normalised = |b: &mut GraphBuilder, x: ValueId, gamma: ValueId| {
        let square = b.mul(x, x)?;
        let mean = b.reduce(ReduceKind::Mean, square, &[1, 2], true)?;
        let epsilon = b.scalar(DType::F64, 0.01);
        let shifted = b.add_(mean, epsilon)?;
        let deviation = b.map(ScalarOp::Sqrt, &[shifted])?;
        let y = b.div(x, deviation)?;
        b.mul(y, gamma)
    };
    let rms = composed(&[&x, &gamma], |b, v| normalised(b, v[0], v[1]));
    assert_close(
        &rms,
        &ev(
            Op::RmsNorm {
                axis: 1,
                epsilon: 0.01.into(),
            },
            &[&x, &gamma],
        ),
        1e-13,
        1e-14,
    );
    let layer = composed(&[&x, &gamma, &beta], |b, v| {
        let mean = b.reduce(ReduceKind::Mean, v[0], &[1, 2], true)?;
        let centred = b.sub(v[0], mean)?;
        let y = normalised(b, centred, v[1])?;
        b.add_(y, v[2])
    });
    assert_close(
        &layer,
        &ev(
            Op::LayerNorm {
                axis: 1,
                epsilon: 0.01.into(),
            },
            &[&x, &gamma, &beta],
        ),
        1e-13,
        1e-13,
    );
    let empty = Tensor::zeros(DType::F32, &[2, 0]).unwrap();
    let none = Tensor::zeros(DType::F32, &[0]).unwrap();
    assert_eq!(
        ev(
            Op::RmsNorm {
                axis: 1,
                epsilon: 0.01.into()
            },
            &[&empty, &none]
        ),
        empty
    );
}

#[test]
fn cum_sum_in_each_direction() {
    let x = t(&[1i32, 2, 3, 4], &[2, 2]);
    let run = |axis, exclusive, reverse| {
        ev(
            Op::CumSum {
                axis,
                exclusive,
                reverse,
            },
            &[&x],
        )
    };
    assert_eq!(run(1, false, false), t(&[1i32, 3, 3, 7], &[2, 2]));
    assert_eq!(run(0, false, false), t(&[1i32, 2, 4, 6], &[2, 2]));
    assert_eq!(run(1, true, false), t(&[0i32, 1, 0, 3], &[2, 2]));
    assert_eq!(run(1, false, true), t(&[3i32, 2, 7, 4], &[2, 2]));
    assert_eq!(run(1, true, true), t(&[2i32, 0, 4, 0], &[2, 2]));
    let f = ev(
        Op::CumSum {
            axis: 0,
            exclusive: false,
            reverse: false,
        },
        &[&t(&[1e8f32, 1.0, -1e8], &[3])],
    );
    assert_eq!(f, t(&[1e8f32, 1e8, 1.0], &[3]));
}

#[test]
fn top_k_keeps_ties_in_order() {
    let x = t(&[2f32, 5.0, 2.0, 5.0, f32::NAN, -1.0], &[6]);
    let top = |k: usize, largest| {
        eval(
            &Op::TopK {
                k: k.into(),
                axis: 0,
                largest,
            },
            &[&x],
            &[],
        )
        .unwrap()
    };
    let y = top(4, true);
    assert_close(&t(&[f32::NAN, 5.0, 5.0, 2.0], &[4]), &y[0], 0.0, 0.0);
    assert_eq!(y[1], t(&[4i64, 1, 3, 0], &[4]));
    let y = top(3, false);
    assert_eq!(y[0], t(&[-1f32, 2.0, 2.0], &[3]));
    assert_eq!(y[1], t(&[5i64, 0, 2], &[3]));
    assert!(top(0, true)[1].is_empty());
    let columns = t(&[1u8, 6, 3, 4, 5, 2], &[3, 2]);
    let y = eval(
        &Op::TopK {
            k: 2.into(),
            axis: 0,
            largest: true,
        },
        &[&columns],
        &[],
    )
    .unwrap();
    assert_eq!(y[0], t(&[5u8, 6, 3, 4], &[2, 2]));
    assert_eq!(y[1], t(&[2i64, 0, 1, 1], &[2, 2]));
    fails(
        Op::TopK {
            k: 7.into(),
            axis: 0,
            largest: true,
        },
        &[&x],
    );
}
