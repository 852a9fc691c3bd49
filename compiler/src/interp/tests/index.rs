//! Gathers, scatters and what an index out of range gives.

use super::*;
use crate::ir::ScatterKind;
use gristmill_runtime::DType;
use gristmill_runtime::half::f16;

#[test]
fn gather_takes_rows() {
    let x = count_up(&[3, 2]);
    let y = ev(
        Op::Gather { axis: 0 },
        &[&x, &t(&[2i64, -3, 2, 0], &[2, 2])],
    );
    assert_eq!(y, t(&[4f32, 5.0, 0.0, 1.0, 4.0, 5.0, 0.0, 1.0], &[2, 2, 2]));
    assert_eq!(
        ev(Op::Gather { axis: 1 }, &[&x, &t(&[1i32], &[])]),
        t(&[1f32, 3.0, 5.0], &[3])
    );
    for bad in [3i64, -4, i64::MIN, i64::MAX] {
        let e = fails(Op::Gather { axis: 0 }, &[&x, &t(&[bad], &[1])]);
        assert_eq!(e.kind(), crate::ErrorKind::InvalidInput);
    }
    assert_eq!(
        ev(Op::Gather { axis: 0 }, &[&x, &t::<i64>(&[], &[0])]).shape(),
        [0, 2]
    );
    fails(
        Op::Gather { axis: 0 },
        &[&t::<f32>(&[], &[0, 2]), &t(&[0i64], &[1])],
    );
    insta::assert_snapshot!(
        fails(Op::Gather { axis: 0 }, &[&x, &t(&[3i64], &[1])]),
        @"gather: index 3 is out of range for axis 0 of extent 3"
    );
}

#[test]
fn gather_elements_takes_along_an_axis() {
    let x = count_up(&[2, 3]);
    let at = t(&[2i64, 0, -1, 1], &[2, 2]);
    assert_eq!(
        ev(Op::GatherElements { axis: 1 }, &[&x, &at]),
        t(&[2f32, 0.0, 5.0, 4.0], &[2, 2])
    );
    let at = t(&[1i64, 0, 1], &[1, 3]);
    assert_eq!(
        ev(Op::GatherElements { axis: 0 }, &[&x, &at]),
        t(&[3f32, 1.0, 5.0], &[1, 3])
    );
    fails(Op::GatherElements { axis: 0 }, &[&x, &t(&[2i64], &[1, 1])]);
}

#[test]
fn gather_nd_takes_slices() {
    let x = count_up(&[2, 2, 2]);
    let gather = |at: &Tensor, batch_dims| ev(Op::GatherNd { batch_dims }, &[&x, at]);
    assert_eq!(
        gather(&t(&[0i64, 1, 1, 0], &[2, 2]), 0),
        t(&[2f32, 3.0, 4.0, 5.0], &[2, 2])
    );
    assert_eq!(
        gather(&t(&[0i64, 0, 1, -1, -1, -1], &[2, 3]), 0),
        t(&[1f32, 7.0], &[2])
    );
    assert_eq!(
        gather(&t(&[1i64, 0], &[2, 1]), 1),
        t(&[2f32, 3.0, 4.0, 5.0], &[2, 2])
    );
    assert_eq!(
        gather(&t(&[1i64, 0, 0, 1], &[2, 2, 1]), 1).shape(),
        [2, 2, 2]
    );
    assert_eq!(
        gather(&t(&[1i64, 0, 0, 1], &[2, 2, 1]), 1).as_slice::<f32>(),
        [2.0, 3.0, 0.0, 1.0, 4.0, 5.0, 6.0, 7.0]
    );
    // Tuples of length 0 select everything.
    assert_eq!(gather(&t::<i64>(&[], &[3, 0]), 0).shape(), [3, 2, 2, 2]);
    assert_eq!(gather(&t::<i64>(&[], &[1, 0]), 0), count_up(&[1, 2, 2, 2]));
    fails(
        Op::GatherNd { batch_dims: 0 },
        &[&x, &t(&[0i64, 2], &[1, 2])],
    );
}

#[test]
fn scatter_elements_joins_in_order() {
    let x = t(&[1f32, 2.0, 3.0], &[3]);
    let (at, updates) = (t(&[1i64, -2, 0], &[3]), t(&[10f32, 20.0, f32::NAN], &[3]));
    let scatter = |kind| ev(Op::ScatterElements { axis: 0, kind }, &[&x, &at, &updates]);
    for (kind, middle) in [
        (ScatterKind::Set, 20.0),
        (ScatterKind::Add, 32.0),
        (ScatterKind::Mul, 400.0),
        (ScatterKind::Max, 20.0),
        (ScatterKind::Min, 2.0),
    ] {
        assert_close(&t(&[f32::NAN, middle, 3.0], &[3]), &scatter(kind), 0.0, 0.0);
    }
    let grid = ev(
        Op::ScatterElements {
            axis: 1,
            kind: ScatterKind::Set,
        },
        &[
            &t(&[0u8; 4], &[2, 2]),
            &t(&[1i32, 0], &[2, 1]),
            &t(&[5u8, 6], &[2, 1]),
        ],
    );
    assert_eq!(grid, t(&[0u8, 5, 6, 0], &[2, 2]));
    fails(
        Op::ScatterElements {
            axis: 0,
            kind: ScatterKind::Set,
        },
        &[&x, &t(&[3i64], &[1]), &t(&[1f32], &[1])],
    );
    let half = |v: &[f32]| {
        t(
            &v.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>(),
            &[v.len()],
        )
    };
    let sums = ev(
        Op::ScatterElements {
            axis: 0,
            kind: ScatterKind::Add,
        },
        &[&half(&[2048.0]), &t(&[0i64, 0], &[2]), &half(&[1.0, 1.0])],
    );
    assert_eq!(sums, half(&[2048.0]));
    let flags = |kind| {
        eval(
            &Op::ScatterElements { axis: 0, kind },
            &[&t(&[false], &[1]), &t(&[0i64], &[1]), &t(&[true], &[1])],
            &[],
        )
    };
    assert_eq!(flags(ScatterKind::Max).unwrap()[0], t(&[true], &[1]));
    assert_eq!(
        flags(ScatterKind::Add).unwrap_err().kind(),
        crate::ErrorKind::Unsupported
    );
}

#[test]
fn scatter_nd_writes_slices() {
    let x = count_up(&[3, 2]);
    let scatter =
        |kind, at: &Tensor, updates: &Tensor| ev(Op::ScatterNd { kind }, &[&x, at, updates]);
    let rows = scatter(
        ScatterKind::Add,
        &t(&[2i64, 2], &[2, 1]),
        &t(&[10f32, 20.0, 1.0, 2.0], &[2, 2]),
    );
    assert_eq!(rows, t(&[0f32, 1.0, 2.0, 3.0, 15.0, 27.0], &[3, 2]));
    let one = scatter(
        ScatterKind::Set,
        &t(&[-1i64, 0], &[1, 2]),
        &t(&[9f32], &[1]),
    );
    assert_eq!(one, t(&[0f32, 1.0, 2.0, 3.0, 9.0, 5.0], &[3, 2]));
    let none = scatter(
        ScatterKind::Set,
        &t::<i64>(&[], &[0, 1]),
        &t::<f32>(&[], &[0, 2]),
    );
    assert_eq!(none, x);
    fails(
        Op::ScatterNd {
            kind: ScatterKind::Set,
        },
        &[&x, &t(&[3i64], &[1, 1]), &t(&[1f32, 2.0], &[1, 2])],
    );
    assert_eq!(x.dtype(), DType::F32);
}
