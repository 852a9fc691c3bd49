//! Matrix products, convolutions and attention against their definitions.

use super::*;
use crate::ir::{Layout, ReduceKind, ScalarOp, Window};
use gristmill_runtime::DType;
use gristmill_runtime::half::f16;

/// Small varied numbers without a pattern that hides a swapped index.
fn noise(shape: &[usize], seed: u64) -> Tensor {
    let n: usize = shape.iter().product();
    let value = |i: u64| ((i + seed * 101).wrapping_mul(2_654_435_761) >> 7) % 17;
    t(
        &(0..n as u64)
            .map(|i| value(i) as f64 - 8.0)
            .collect::<Vec<_>>(),
        shape,
    )
}

fn window(strides: &[usize], dilations: &[usize], low: &[usize], high: &[usize]) -> Window {
    Window {
        strides: strides.to_vec(),
        dilations: dilations.to_vec(),
        pads_low: low.to_vec(),
        pads_high: high.to_vec(),
    }
}

#[test]
fn matmul_of_small_matrices() {
    let (a, b) = (
        count_up(&[2, 3]),
        t(&[1f32, 0.0, 0.0, 1.0, 2.0, -1.0], &[3, 2]),
    );
    assert_eq!(
        ev(Op::MatMul, &[&a, &b]),
        t(&[4f32, -1.0, 13.0, -1.0], &[2, 2])
    );
    fails(Op::MatMul, &[&a, &a]);
    let (a, b) = (t(&[100i8, 100], &[1, 2]), t(&[2i8, 1], &[2, 1]));
    assert_eq!(ev(Op::MatMul, &[&a, &b]), t(&[44i8], &[1, 1]));
    let (a, b) = (t(&[u64::MAX, 3], &[1, 2]), t(&[2u64, 1], &[2, 1]));
    assert_eq!(ev(Op::MatMul, &[&a, &b]), t(&[1u64], &[1, 1]));
}

#[test]
fn matmul_broadcasts_batches() {
    let (a, b) = (noise(&[2, 1, 2, 3], 1), noise(&[4, 3, 2], 2));
    let y = ev(Op::MatMul, &[&a, &b]);
    assert_eq!(y.shape(), [2, 4, 2, 2]);
    let expected = composed(&[&a, &b], |b, x| {
        let lhs = b.reshape(x[0], [2, 1, 2, 3, 1])?;
        let rhs = b.reshape(x[1], [4, 1, 3, 2])?;
        let terms = b.mul(lhs, rhs)?;
        b.reduce(ReduceKind::Sum, terms, &[3], false)
    });
    assert_eq!(y, expected);
}

#[test]
fn matmul_of_nothing() {
    let (a, b) = (
        Tensor::zeros(DType::F32, &[2, 0]).unwrap(),
        Tensor::zeros(DType::F32, &[0, 3]).unwrap(),
    );
    assert_eq!(ev(Op::MatMul, &[&a, &b]), t(&[0f32; 6], &[2, 3]));
    assert_eq!(ev(Op::MatMul, &[&b, &count_up(&[3, 2])]).shape(), [0, 2]);
    assert_eq!(
        ev(
            Op::MatMul,
            &[
                &Tensor::zeros(DType::F32, &[0, 2, 3]).unwrap(),
                &count_up(&[3, 2])
            ]
        )
        .shape(),
        [0, 2, 2]
    );
}

#[test]
fn matmul_accumulates_beyond_its_dtype() {
    let big = f16::from_f32(60000.0);
    let (a, b) = (t(&[big, big, -big], &[1, 3]), t(&[f16::ONE; 3], &[3, 1]));
    assert_eq!(ev(Op::MatMul, &[&a, &b]), t(&[big], &[1, 1]));
    let (a, b) = (t(&[f32::NAN, 1.0], &[1, 2]), t(&[0f32, 1.0], &[2, 1]));
    assert!(ev(Op::MatMul, &[&a, &b]).as_slice::<f32>()[0].is_nan());
}

/// Sum over channels and taps by definition, one output element at a time; two spatial axes,
/// channels first.
fn conv_by_definition(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    out: &[usize],
) -> Tensor {
    let (xs, ws) = (x.shape(), w.shape());
    let (xv, wv) = (x.as_slice::<f64>(), w.as_slice::<f64>());
    let out_group = out[1] / groups;
    let mut y = Vec::new();
    for i in 0..out.iter().product() {
        let (ox, oy, o, n) = (
            i % out[3],
            i / out[3] % out[2],
            i / (out[2] * out[3]) % out[1],
            i / (out[1] * out[2] * out[3]),
        );
        let mut sum = 0.0;
        for c in 0..ws[1] {
            for ky in 0..ws[2] {
                for kx in 0..ws[3] {
                    let py = (oy * window.strides[0] + ky * window.dilations[0]) as i64
                        - window.pads_low[0] as i64;
                    let px = (ox * window.strides[1] + kx * window.dilations[1]) as i64
                        - window.pads_low[1] as i64;
                    if (0..xs[2] as i64).contains(&py) && (0..xs[3] as i64).contains(&px) {
                        let channel = o / out_group * ws[1] + c;
                        let at =
                            ((n * xs[1] + channel) * xs[2] + py as usize) * xs[3] + px as usize;
                        sum += xv[at] * wv[((o * ws[1] + c) * ws[2] + ky) * ws[3] + kx];
                    }
                }
            }
        }
        y.push(sum);
    }
    t(&y, out)
}

#[test]
fn conv_by_hand() {
    let (x, w) = (
        t(&[1f32, 2.0, 3.0, 4.0], &[1, 1, 4]),
        t(&[1f32, 10.0], &[1, 1, 2]),
    );
    let conv = |window| Op::Conv {
        window,
        groups: 1,
        layout: Layout::ChannelsFirst,
    };
    let plain = ev(conv(window(&[1], &[1], &[0], &[0])), &[&x, &w]);
    assert_eq!(plain, t(&[21f32, 32.0, 43.0], &[1, 1, 3]));
    let padded = ev(conv(window(&[2], &[1], &[1], &[0])), &[&x, &w]);
    assert_eq!(padded, t(&[10f32, 32.0], &[1, 1, 2]));
    let dilated = ev(conv(window(&[1], &[3], &[0], &[3])), &[&x, &w]);
    assert_eq!(dilated, t(&[41f32, 2.0, 3.0, 4.0], &[1, 1, 4]));
    let bytes = ev(
        conv(window(&[1], &[1], &[0], &[0])),
        &[&t(&[100u8, 200], &[1, 1, 2]), &t(&[1u8, 1], &[1, 1, 2])],
    );
    assert_eq!(bytes, t(&[44u8], &[1, 1, 1]));
    fails(conv(window(&[1], &[5], &[0], &[0])), &[&x, &w]);
}

#[test]
fn conv_in_groups_dilated_and_padded_in_both_layouts() {
    for (groups, w) in [
        (1, window(&[1, 1], &[1, 1], &[0, 0], &[0, 0])),
        (2, window(&[2, 1], &[1, 2], &[1, 3], &[2, 0])),
        (4, window(&[1, 3], &[2, 1], &[0, 2], &[1, 2])),
        (2, window(&[5, 4], &[3, 1], &[5, 6], &[4, 7])),
    ] {
        let (x, weights) = (noise(&[2, 4, 6, 5], 3), noise(&[8, 4 / groups, 3, 2], 4));
        let y = ev(
            Op::Conv {
                window: w.clone(),
                groups,
                layout: Layout::ChannelsFirst,
            },
            &[&x, &weights],
        );
        assert_eq!(y, conv_by_definition(&x, &weights, &w, groups, y.shape()));
        let last = composed(&[&x, &weights], |b, v| {
            let x = b.transpose(v[0], &[0, 2, 3, 1])?;
            let weights = b.transpose(v[1], &[2, 3, 1, 0])?;
            let y = b.add1(
                Op::Conv {
                    window: w.clone(),
                    groups,
                    layout: Layout::ChannelsLast,
                },
                &[x, weights],
            )?;
            b.transpose(y, &[0, 3, 1, 2])
        });
        assert_eq!(last, y);
    }
}

#[test]
fn conv_of_three_spatial_axes_and_of_nothing() {
    let op = |n| Op::Conv {
        window: window(&[1; 3], &[1; 3], &[n; 3], &[n; 3]),
        groups: 1,
        layout: Layout::ChannelsFirst,
    };
    let (x, w) = (count_up(&[1, 1, 2, 2, 2]), t(&[1f32; 8], &[1, 1, 2, 2, 2]));
    assert_eq!(ev(op(0), &[&x, &w]), t(&[28f32], &[1, 1, 1, 1, 1]));
    assert_eq!(ev(op(1), &[&x, &w]).as_slice::<f32>()[26], 7.0);
    assert_eq!(
        ev(
            op(0),
            &[&Tensor::zeros(DType::F32, &[0, 1, 2, 2, 2]).unwrap(), &w]
        )
        .shape(),
        [0, 1, 1, 1, 1]
    );
    let no_channels = [
        Tensor::zeros(DType::F32, &[1, 0, 2, 2, 2]).unwrap(),
        Tensor::zeros(DType::F32, &[2, 0, 2, 2, 2]).unwrap(),
    ];
    assert_eq!(
        ev(op(0), &[&no_channels[0], &no_channels[1]]),
        t(&[0f32; 2], &[1, 2, 1, 1, 1])
    );
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.shape(), b.shape());
    a.as_slice::<f64>()
        .iter()
        .zip(b.as_slice::<f64>())
        .map(|(a, b)| a * b)
        .sum()
}

/// `<conv(x, w), y> = <x, conv_transpose(y, w)>` for all `x` and `y`: each is the other's
/// transpose.
#[test]
fn conv_transpose_is_the_transpose_of_conv() {
    for (groups, w) in [
        (1, window(&[1, 1], &[1, 1], &[0, 0], &[0, 0])),
        (2, window(&[2, 1], &[1, 2], &[1, 2], &[2, 0])),
        (4, window(&[3, 2], &[2, 1], &[0, 1], &[1, 2])),
    ] {
        let (x, weights) = (noise(&[2, 4, 7, 6], 5), noise(&[8, 4 / groups, 3, 2], 6));
        let conv = ev(
            Op::Conv {
                window: w.clone(),
                groups,
                layout: Layout::ChannelsFirst,
            },
            &[&x, &weights],
        );
        let y = noise(conv.shape(), 7);
        // What the strides leave over on the high side comes back as output padding.
        let full = |d: usize| {
            (conv.shape()[2 + d] - 1) * w.strides[d]
                + (weights.shape()[2 + d] - 1) * w.dilations[d]
                + 1
        };
        let output_pads = (0..2)
            .map(|d| x.shape()[2 + d] + w.pads_low[d] + w.pads_high[d] - full(d))
            .collect();
        let back = ev(
            Op::ConvTranspose {
                window: w.clone(),
                output_pads,
                groups,
            },
            &[&y, &weights],
        );
        assert_eq!(dot(&conv, &y), dot(&x, &back), "{groups} groups");
    }
}

#[test]
fn conv_transpose_by_hand() {
    let (x, w) = (
        t(&[1f32, 2.0], &[1, 1, 2]),
        t(&[1f32, 10.0, 100.0], &[1, 1, 3]),
    );
    let op = |low, high, pad| Op::ConvTranspose {
        window: window(&[2], &[1], &[low], &[high]),
        output_pads: vec![pad],
        groups: 1,
    };
    assert_eq!(
        ev(op(0, 0, 0), &[&x, &w]),
        t(&[1f32, 10.0, 102.0, 20.0, 200.0], &[1, 1, 5])
    );
    assert_eq!(
        ev(op(1, 1, 1), &[&x, &w]),
        t(&[10f32, 102.0, 20.0, 200.0], &[1, 1, 4])
    );
    assert_eq!(
        ev(op(0, 0, 1), &[&x, &w]),
        t(&[1f32, 10.0, 102.0, 20.0, 200.0, 0.0], &[1, 1, 6])
    );
}

/// The composed form of [`Op::Attention`].
fn attention(b: &mut GraphBuilder, x: &[ValueId], scale: f64, causal: bool) -> Result<ValueId> {
    let keys = b.transpose(x[1], &[0, 1, 3, 2])?;
    let scores = b.matmul(x[0], keys)?;
    let scale = b.scalar(DType::F64, scale);
    let mut scores = b.mul(scores, scale)?;
    if let Some(&mask) = x.get(3) {
        scores = b.add_(scores, mask)?;
    }
    if causal {
        let shape = b.ty(scores).shape.0[2..].to_vec();
        let row = b.add1(
            Op::Iota {
                dtype: DType::I64,
                shape: shape.clone(),
                axis: 0,
            },
            &[],
        )?;
        let column = b.add1(
            Op::Iota {
                dtype: DType::I64,
                shape,
                axis: 1,
            },
            &[],
        )?;
        let hidden = b.map(ScalarOp::Gt, &[column, row])?;
        let never = b.scalar(DType::F64, f64::NEG_INFINITY);
        scores = b.map(ScalarOp::Select, &[hidden, never, scores])?;
    }
    let p = b.add1(
        Op::Softmax {
            axis: 3,
            log: false,
        },
        &[scores],
    )?;
    b.matmul(p, x[2])
}

#[test]
fn attention_is_its_composition() {
    let (q, k, v) = (
        noise(&[2, 3, 4, 5], 8),
        noise(&[2, 3, 6, 5], 9),
        noise(&[2, 3, 6, 2], 10),
    );
    let mask = noise(&[2, 1, 1, 6], 11);
    for causal in [false, true] {
        let op = Op::Attention {
            scale: 0.05.into(),
            causal,
        };
        for args in [vec![&q, &k, &v], vec![&q, &k, &v, &mask]] {
            let expected = composed(&args, |b, x| attention(b, x, 0.05, causal));
            assert_close(&expected, &ev(op.clone(), &args), 1e-12, 1e-12);
        }
    }
}

#[test]
fn attention_at_its_edges() {
    let op = Op::Attention {
        scale: 1.0.into(),
        causal: false,
    };
    let z = |shape: &[usize]| Tensor::zeros(DType::F32, shape).unwrap();
    assert_eq!(
        ev(op.clone(), &[&z(&[0, 4]), &z(&[3, 4]), &z(&[3, 2])]).shape(),
        [0, 2]
    );
    assert_eq!(
        ev(op.clone(), &[&z(&[2, 4]), &z(&[0, 4]), &z(&[0, 2])]),
        t(&[0f32; 4], &[2, 2])
    );
    let hidden = t(&[f32::NEG_INFINITY; 3], &[1, 3]);
    let y = ev(op, &[&z(&[1, 4]), &z(&[3, 4]), &z(&[3, 2]), &hidden]);
    assert!(y.as_slice::<f32>().iter().all(|v| v.is_nan()));
}
