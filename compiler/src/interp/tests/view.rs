//! Ops that only move elements.

use super::*;
use crate::ir::{Dim, PadMode, ScalarOp};
use gristmill_runtime::DType;

fn dims(d: &[usize]) -> Vec<Dim> {
    d.iter().map(|&d| d.into()).collect()
}

#[test]
fn iota_counts_along_an_axis() {
    let op = |dtype, axis| Op::Iota {
        dtype,
        shape: dims(&[2, 3]),
        axis,
    };
    assert_eq!(
        ev(op(DType::I32, 1), &[]),
        t(&[0i32, 1, 2, 0, 1, 2], &[2, 3])
    );
    assert_eq!(
        ev(op(DType::F32, 0), &[]),
        t(&[0f32, 0.0, 0.0, 1.0, 1.0, 1.0], &[2, 3])
    );
    assert!(
        ev(
            Op::Iota {
                dtype: DType::U8,
                shape: dims(&[0, 3]),
                axis: 1
            },
            &[]
        )
        .is_empty()
    );
}

#[test]
fn broadcast_repeats_axes() {
    let x = t(&[1i64, 2], &[2, 1]);
    let y = ev(
        Op::Broadcast {
            shape: dims(&[2, 2, 3]),
        },
        &[&x],
    );
    assert_eq!(y, t(&[1i64, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2], &[2, 2, 3]));
    assert_eq!(
        ev(
            Op::Broadcast {
                shape: dims(&[2, 0])
            },
            &[&x]
        )
        .shape(),
        [2, 0]
    );
    fails(
        Op::Broadcast {
            shape: dims(&[3, 3]),
        },
        &[&x],
    );
}

#[test]
fn reshape_keeps_order_and_count() {
    let x = count_up(&[2, 3]);
    assert_eq!(
        ev(
            Op::Reshape {
                shape: dims(&[3, 2])
            },
            &[&x]
        ),
        count_up(&[3, 2])
    );
    fails(
        Op::Reshape {
            shape: dims(&[4, 2]),
        },
        &[&x],
    );
}

#[test]
fn transpose_permutes() {
    let y = ev(
        Op::Transpose {
            perm: vec![2, 0, 1],
        },
        &[&count_up(&[1, 2, 3])],
    );
    assert_eq!(y, t(&[0f32, 3.0, 1.0, 4.0, 2.0, 5.0], &[3, 1, 2]));
    assert_eq!(
        ev(Op::Transpose { perm: vec![] }, &[&t(&[7u8], &[])]),
        t(&[7u8], &[])
    );
    assert_eq!(
        ev(Op::Transpose { perm: vec![1, 0] }, &[&count_up(&[0, 4])]).shape(),
        [4, 0]
    );
}

#[test]
fn slice_walks_in_steps() {
    let x = count_up(&[3, 4]);
    let op = |starts: &[usize], sizes: &[usize], steps: &[i64]| Op::Slice {
        starts: dims(starts),
        sizes: dims(sizes),
        steps: steps.to_vec(),
    };
    assert_eq!(
        ev(op(&[2, 3], &[2, 2], &[-2, -3]), &[&x]),
        t(&[11f32, 8.0, 3.0, 0.0], &[2, 2])
    );
    assert_eq!(
        ev(op(&[1, 1], &[1, 2], &[1, 2]), &[&x]),
        t(&[5f32, 7.0], &[1, 2])
    );
    assert_eq!(ev(op(&[3, 0], &[0, 4], &[1, 1]), &[&x]).shape(), [0, 4]);
    fails(op(&[2, 0], &[2, 4], &[1, 1]), &[&x]);
    fails(op(&[0, 0], &[2, 4], &[-1, 1]), &[&x]);
}

#[test]
fn pad_modes() {
    let x = t(&[1i32, 2, 3], &[3]);
    let pad = |mode| Op::Pad {
        low: vec![2],
        high: vec![2],
        mode,
    };
    assert_eq!(
        ev(pad(PadMode::Reflect), &[&x]),
        t(&[3i32, 2, 1, 2, 3, 2, 1], &[7])
    );
    assert_eq!(
        ev(pad(PadMode::Edge), &[&x]),
        t(&[1i32, 1, 1, 2, 3, 3, 3], &[7])
    );
    assert_eq!(
        ev(pad(PadMode::Wrap), &[&x]),
        t(&[2i32, 3, 1, 2, 3, 1, 2], &[7])
    );
    let nine = t(&[9i32], &[]);
    assert_eq!(
        ev(pad(PadMode::Constant), &[&x, &nine]),
        t(&[9i32, 9, 1, 2, 3, 9, 9], &[7])
    );
    let both = Op::Pad {
        low: vec![1, 0],
        high: vec![0, 1],
        mode: PadMode::Constant,
    };
    let y = ev(both, &[&t(&[1i32, 2], &[1, 2]), &nine]);
    assert_eq!(y, t(&[9i32, 9, 9, 1, 2, 9], &[2, 3]));
    let empty = ev(pad(PadMode::Constant), &[&t::<i32>(&[], &[0]), &nine]);
    assert_eq!(empty, t(&[9i32; 4], &[4]));
    fails(pad(PadMode::Edge), &[&t::<i32>(&[], &[0])]);
    fails(
        Op::Pad {
            low: vec![3],
            high: vec![0],
            mode: PadMode::Reflect,
        },
        &[&x],
    );
    fails(pad(PadMode::Constant), &[&x]);
}

#[test]
fn concat_joins() {
    let (a, b) = (t(&[1u8, 2, 3, 4], &[2, 2]), t(&[5u8, 6], &[2, 1]));
    assert_eq!(
        ev(Op::Concat { axis: 1 }, &[&a, &b]),
        t(&[1u8, 2, 5, 3, 4, 6], &[2, 3])
    );
    let none = t::<u8>(&[], &[0, 2]);
    assert_eq!(ev(Op::Concat { axis: 0 }, &[&none, &a, &none]), a);
    fails(Op::Concat { axis: 0 }, &[&a, &b]);
}

#[test]
fn hostile_sizes_are_errors() {
    let huge = 1usize << 40;
    let one = t(&[1f32], &[1, 1]);
    fails(
        Op::Broadcast {
            shape: dims(&[huge, huge]),
        },
        &[&one],
    );
    fails(
        Op::Iota {
            dtype: DType::F32,
            shape: dims(&[huge, huge]),
            axis: 0,
        },
        &[],
    );
    let empty = Tensor::zeros(DType::F32, &[huge, huge, 0]).unwrap();
    assert!(ev(Op::Map(ScalarOp::Neg), &[&empty]).is_empty());
    assert!(
        ev(
            Op::Transpose {
                perm: vec![2, 0, 1]
            },
            &[&empty]
        )
        .is_empty()
    );
    let reduce = |axes: &[usize]| Op::Reduce {
        kind: crate::ir::ReduceKind::Sum,
        axes: axes.to_vec(),
        keepdims: false,
    };
    for op in [
        Op::Softmax { axis: 2, log: true },
        Op::CumSum {
            axis: 1,
            exclusive: false,
            reverse: true,
        },
    ] {
        assert!(ev(op, &[&empty]).is_empty());
    }
    let none = Tensor::zeros(DType::F32, &[huge, huge, 0, 2]).unwrap();
    assert!(ev(Op::MatMul, &[&none, &t(&[1f32, 2.0], &[2, 1])]).is_empty());
    let (low, high) = (vec![usize::MAX / 2; 2], vec![usize::MAX; 2]);
    fails(
        Op::Pad {
            low,
            high,
            mode: PadMode::Edge,
        },
        &[&one],
    );
    assert!(ev(reduce(&[0, 1]), &[&empty]).is_empty());
    fails(reduce(&[2]), &[&empty]);
}
