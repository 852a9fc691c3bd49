//! Pooling: windows, padding, layouts and indices.

use super::*;
use crate::ir::{Layout, PoolKind, Window};
use gristmill_runtime::DType;

fn window(strides: &[usize], dilations: &[usize], low: &[usize], high: &[usize]) -> Window {
    Window {
        strides: strides.to_vec(),
        dilations: dilations.to_vec(),
        pads_low: low.to_vec(),
        pads_high: high.to_vec(),
    }
}

fn pool1(kind: PoolKind, x: &Tensor, size: usize, w: Window, ceil: bool) -> Tensor {
    ev(
        Op::Pool {
            kind,
            size: vec![size],
            window: w,
            ceil,
            layout: Layout::ChannelsFirst,
        },
        &[x],
    )
}

#[test]
fn windows_over_a_line() {
    let x = t(&[1f32, 5.0, 2.0, 4.0, 3.0], &[1, 1, 5]);
    let plain = || window(&[2], &[1], &[0], &[0]);
    assert_eq!(
        pool1(PoolKind::Max, &x, 2, plain(), false),
        t(&[5f32, 4.0], &[1, 1, 2])
    );
    assert_eq!(
        pool1(PoolKind::Max, &x, 2, plain(), true),
        t(&[5f32, 4.0, 3.0], &[1, 1, 3])
    );
    assert_eq!(
        pool1(PoolKind::Avg, &x, 2, plain(), true),
        t(&[3f32, 3.0, 3.0], &[1, 1, 3])
    );
    // The tap beyond the padded input is not counted.
    assert_eq!(
        pool1(PoolKind::AvgIncludePad, &x, 2, plain(), true),
        t(&[3f32, 3.0, 3.0], &[1, 1, 3])
    );
    let dilated = window(&[1], &[2], &[0], &[0]);
    assert_eq!(
        pool1(PoolKind::Max, &x, 2, dilated, false),
        t(&[2f32, 5.0, 3.0], &[1, 1, 3])
    );
    let padded = || window(&[3], &[1], &[1], &[1]);
    assert_eq!(
        pool1(PoolKind::Avg, &x, 2, padded(), false),
        t(&[1f32, 3.0], &[1, 1, 2])
    );
    assert_eq!(
        pool1(PoolKind::AvgIncludePad, &x, 2, padded(), false),
        t(&[0.5f32, 3.0], &[1, 1, 2])
    );
}

#[test]
fn integers_nan_and_windows_of_padding() {
    let x = t(&[7i8, -4], &[1, 1, 2]);
    let padded = || window(&[1], &[1], &[1], &[0]);
    assert_eq!(
        pool1(PoolKind::Avg, &x, 2, padded(), false),
        t(&[7i8, 1], &[1, 1, 2])
    );
    assert_eq!(
        pool1(PoolKind::AvgIncludePad, &x, 2, padded(), false),
        t(&[3i8, 1], &[1, 1, 2])
    );
    assert_eq!(
        pool1(
            PoolKind::Max,
            &t(&[-7i8, -4], &[1, 1, 2]),
            2,
            padded(),
            false
        ),
        t(&[-7i8, -4], &[1, 1, 2])
    );
    let only_padding = || window(&[1], &[1], &[1], &[0]);
    assert_eq!(
        pool1(PoolKind::Max, &x, 1, only_padding(), false),
        t(&[i8::MIN, 7, -4], &[1, 1, 3])
    );
    assert_eq!(
        pool1(PoolKind::Avg, &x, 1, only_padding(), false),
        t(&[0i8, 7, -4], &[1, 1, 3])
    );
    let nan = t(&[1f32, f32::NAN], &[1, 1, 2]);
    assert!(
        pool1(
            PoolKind::Max,
            &nan,
            2,
            window(&[1], &[1], &[0], &[0]),
            false
        )
        .as_slice::<f32>()[0]
            .is_nan()
    );
    assert!(pool1(PoolKind::Avg, &nan, 1, only_padding(), false).as_slice::<f32>()[0].is_nan());
}

#[test]
fn planes_in_both_layouts() {
    let x = count_up(&[2, 3, 4, 5]);
    for kind in [PoolKind::Max, PoolKind::Avg, PoolKind::AvgIncludePad] {
        let op = |layout| Op::Pool {
            kind,
            size: vec![3, 2],
            window: window(&[2, 1], &[1, 2], &[1, 0], &[0, 1]),
            ceil: true,
            layout,
        };
        let first = ev(op(Layout::ChannelsFirst), &[&x]);
        let last = composed(&[&x], |b, v| {
            let x = b.transpose(v[0], &[0, 2, 3, 1])?;
            let y = b.add1(op(Layout::ChannelsLast), &[x])?;
            b.transpose(y, &[0, 3, 1, 2])
        });
        assert_eq!(first, last);
    }
    let y = ev(
        Op::Pool {
            kind: PoolKind::Max,
            size: vec![2, 2],
            window: window(&[2, 3], &[1, 1], &[0, 0], &[0, 0]),
            ceil: false,
            layout: Layout::ChannelsFirst,
        },
        &[&count_up(&[1, 1, 4, 5])],
    );
    assert_eq!(y, t(&[6f32, 9.0, 16.0, 19.0], &[1, 1, 2, 2]));
}

#[test]
fn max_pool_indices_count_over_the_whole_input() {
    let x = t(&[1f32, 3.0, 3.0, 2.0, 9.0, 8.0, 7.0, 7.0], &[1, 2, 4]);
    let op = Op::MaxPoolIndices {
        size: vec![2],
        window: window(&[2], &[1], &[0], &[0]),
        ceil: false,
    };
    let y = eval(&op, &[&x], &[]).unwrap();
    assert_eq!(y[0], t(&[3f32, 3.0, 9.0, 7.0], &[1, 2, 2]));
    assert_eq!(y[1], t(&[1i64, 2, 4, 6], &[1, 2, 2]));
    let op = Op::MaxPoolIndices {
        size: vec![1],
        window: window(&[1], &[1], &[1], &[0]),
        ceil: false,
    };
    assert_eq!(
        eval(&op, &[&t(&[5u8], &[1, 1, 1])], &[]).unwrap()[1],
        t(&[-1i64, 0], &[1, 1, 2])
    );
    let empty = Tensor::zeros(DType::F32, &[0, 2, 4]).unwrap();
    assert_eq!(eval(&op, &[&empty], &[]).unwrap()[0].shape(), [0, 2, 5]);
}

#[test]
fn a_cotangent_goes_to_the_first_maximum_of_each_window() {
    let op = |size, window| Op::MaxPoolGrad {
        size: vec![size],
        window,
        ceil: false,
        layout: Layout::ChannelsFirst,
    };
    let nan = f32::NAN;
    let x = t(&[3f32, 3.0, 1.0, nan, 2.0, nan], &[1, 1, 6]);
    let g = t(&[1f32, 2.0, 4.0, 8.0, 16.0], &[1, 1, 5]);
    let pairs = op(2, window(&[1], &[1], &[0], &[0]));
    let want = t(&[1f32, 2.0, 0.0, 12.0, 0.0, 16.0], &[1, 1, 6]);
    assert_eq!(ev(pairs.clone(), &[&x, &g]), want);
    // The first of these windows lies in the padding.
    let singles = op(1, window(&[1], &[1], &[1], &[0]));
    let x = t(&[f32::NEG_INFINITY], &[1, 1, 1]);
    let y = ev(singles, &[&x, &t(&[1f32, 2.0], &[1, 1, 2])]);
    assert_eq!(y, t(&[2f32], &[1, 1, 1]));
    let short = Tensor::zeros(DType::F32, &[1, 1, 4]).unwrap();
    let x = Tensor::zeros(DType::F32, &[1, 1, 6]).unwrap();
    let message = eval(&pairs, &[&x, &short], &[]).unwrap_err().to_string();
    assert!(
        message.contains("expected floats, and a cotangent f32[1, 1, 5]"),
        "{message}"
    );
}
