//! Softmax, normalisation and reduction of rows against `f64`, on every instruction set of this
//! machine.

use super::*;
use crate::OK;
use crate::isa::Isa;
use crate::testing::{Rng, assert_close};

const COLS: [usize; 14] = [1, 2, 3, 7, 15, 16, 17, 31, 64, 65, 100, 128, 1000, 20_000];

/// Rows along two dimensions, the outer one permuted inside; returns the dims and the elements of
/// input and output.
fn dims(rng: &mut Rng, n_cols: usize, per_row: usize) -> ([RowDim; MAX_BATCH], usize, usize) {
    let (outer, inner) = (rng.pick(&[1, 2, 3]), rng.pick(&[1, 2, 5]));
    let ld = n_cols + rng.pick(&[0, 3]);
    let mut rows = [RowDim::default(); MAX_BATCH];
    rows[1] = RowDim {
        extent: outer,
        x_stride: ld as isize,
        y_stride: (inner * per_row) as isize,
        mask_stride: 0,
    };
    rows[3] = RowDim {
        extent: inner,
        x_stride: (outer * ld) as isize,
        y_stride: per_row as isize,
        mask_stride: n_cols as isize,
    };
    (rows, outer * inner * ld, outer * inner * per_row)
}

/// Each row's input elements, and where its output starts.
fn each_row<'a>(
    rows: &'a [RowDim; MAX_BATCH],
    x: &'a [f32],
    n_cols: usize,
) -> impl Iterator<Item = (Vec<f64>, RowOffsets)> + 'a {
    (0..n_rows(rows)).map(move |item| {
        let at = row_offsets(rows, item);
        (
            x[at.x as usize..at.x as usize + n_cols]
                .iter()
                .map(|&x| f64::from(x))
                .collect(),
            at,
        )
    })
}

fn call<D>(
    kernel: crate::TaskFn<D>,
    desc: &D,
    inputs: [*const f32; 3],
    y: &mut [f32],
    n_items: usize,
) {
    let [x, rhs, operand] = inputs.map(|p| p as *mut u8);
    let ptrs = [x, rhs, y.as_mut_ptr().cast(), std::ptr::null_mut(), operand];
    for (begin, end) in [(n_items / 2, n_items), (0, n_items / 2)] {
        // SAFETY: the buffers have the sizes that the descriptor describes.
        assert_eq!(unsafe { kernel(desc, ptrs.as_ptr(), begin, end) }, OK);
    }
}

#[test]
fn reductions_agree_with_the_reference() {
    let mut rng = Rng(41);
    for isa in Isa::available() {
        for kind in ReduceKind::ALL {
            for n_cols in [0].into_iter().chain(COLS) {
                let (rows, x_len, y_len) = dims(&mut rng, n_cols, 1);
                let x = rng.vec(x_len);
                let desc = ReduceDesc {
                    isa: isa as u32,
                    kind: kind as u32,
                    n_cols,
                    rows,
                };
                let mut want = vec![0.0; y_len];
                for (row, at) in each_row(&rows, &x, n_cols) {
                    let mean = row.iter().sum::<f64>() / n_cols as f64;
                    want[at.y as usize] = match kind {
                        ReduceKind::Sum => row.iter().sum(),
                        ReduceKind::Mean => mean,
                        ReduceKind::Max => row.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                        ReduceKind::Min => row.iter().copied().fold(f64::INFINITY, f64::min),
                        ReduceKind::SumSquares => row.iter().map(|x| x * x).sum(),
                        ReduceKind::SumAbs => row.iter().map(|x| x.abs()).sum(),
                        ReduceKind::Norm => row.iter().map(|x| x * x).sum::<f64>().sqrt(),
                        ReduceKind::Variance => {
                            row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n_cols as f64
                        }
                        ReduceKind::Product => row.iter().product(),
                    };
                }
                let mut y = vec![0.0; y_len];
                let inputs = [x.as_ptr(), std::ptr::null(), std::ptr::null()];
                call(gm_reduce_f32, &desc, inputs, &mut y, desc.n_items());
                // Sums cancel: their error goes with the sum of magnitudes, some n / 2.
                let tolerance = 1e-5 + 1e-8 * n_cols as f64 / 2.0;
                assert_close(&y, &want, tolerance, &format!("{isa} {desc:?}"));
            }
        }
    }
}

#[test]
fn extremes_propagate_nan_wherever_it_is() {
    for isa in Isa::available() {
        for n in [1, 5, 16, 40, 70] {
            for nan in 0..n {
                for kind in [ReduceKind::Max, ReduceKind::Min] {
                    let mut x: Vec<f32> = (0..n).map(|i| i as f32).collect();
                    x[nan] = f32::NAN;
                    let desc = ReduceDesc::new(isa, kind, 1, n);
                    let mut y = [0.0];
                    call(
                        gm_reduce_f32,
                        &desc,
                        [x.as_ptr(), std::ptr::null(), std::ptr::null()],
                        &mut y,
                        1,
                    );
                    assert!(y[0].is_nan(), "{isa} {kind:?} {n} {nan}");
                }
            }
        }
    }
}

#[test]
fn normalisations_agree_with_the_reference() {
    let mut rng = Rng(42);
    for isa in Isa::available() {
        for kind in [NormKind::Layer, NormKind::Rms] {
            for n_cols in COLS {
                let (rows, x_len, y_len) = dims(&mut rng, n_cols, n_cols);
                let x: Vec<f32> = rng.vec(x_len).iter().map(|x| x * 3.0 + 1.0).collect();
                let (gamma, beta) = (rng.vec(n_cols), rng.vec(n_cols));
                let (with_gamma, with_beta) = (rng.below(2) == 0, rng.below(2) == 0);
                let desc = NormDesc {
                    isa: isa as u32,
                    kind: kind as u32,
                    eps: 1e-5,
                    reserved: 0,
                    n_cols,
                    rows,
                };
                let mut want = vec![0.0; y_len];
                for (row, at) in each_row(&rows, &x, n_cols) {
                    let mean = if kind == NormKind::Layer {
                        row.iter().sum::<f64>() / n_cols as f64
                    } else {
                        0.0
                    };
                    let variance =
                        row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n_cols as f64;
                    for (j, x) in row.iter().enumerate() {
                        let scaled = (x - mean) / (variance + 1e-5).sqrt()
                            * if with_gamma { f64::from(gamma[j]) } else { 1.0 };
                        want[at.y as usize + j] =
                            scaled + if with_beta { f64::from(beta[j]) } else { 0.0 };
                    }
                }
                let mut y = vec![0.0; y_len];
                let optional =
                    |with: bool, p: &Vec<f32>| if with { p.as_ptr() } else { std::ptr::null() };
                let inputs = [
                    x.as_ptr(),
                    optional(with_gamma, &gamma),
                    optional(with_beta, &beta),
                ];
                call(gm_norm_f32, &desc, inputs, &mut y, desc.n_items());
                assert_close(&y, &want, 1e-5, &format!("{isa} {desc:?}"));
            }
        }
    }
}

#[test]
fn softmaxes_agree_with_the_reference() {
    let mut rng = Rng(43);
    for isa in Isa::available() {
        for n_cols in COLS.into_iter().flat_map(|n| [n; 6]) {
            let (rows, x_len, y_len) = dims(&mut rng, n_cols, n_cols);
            let kind = rng.pick(&[SoftmaxKind::Softmax, SoftmaxKind::LogSoftmax]);
            let x: Vec<f32> = rng.vec(x_len).iter().map(|x| x * 20.0).collect();
            let mut desc = SoftmaxDesc::new(Isa::current(), kind, 1, n_cols);
            (desc.isa, desc.rows) = (isa as u32, rows);
            desc.scale = rng.pick(&[1.0, 0.125]);
            desc.causal = rng.pick(&[0, 0, 1]);
            desc.causal_offset = rng.pick(&[0, 2, 40]);
            let mask: Vec<f32> = (0..n_cols * 5)
                .map(|_| {
                    if rng.below(5) == 0 {
                        f32::NEG_INFINITY
                    } else {
                        rng.unit()
                    }
                })
                .collect();
            let with_mask = rng.below(2) == 0;
            let mut want = vec![0.0; y_len];
            for (row, at) in each_row(&rows, &x, n_cols) {
                let visible = |j: usize| {
                    desc.causal == 0 || j as isize <= at.last as isize + desc.causal_offset
                };
                let t: Vec<f64> = (0..n_cols)
                    .map(|j| {
                        let mask = if with_mask {
                            f64::from(mask[at.mask as usize + j])
                        } else {
                            0.0
                        };
                        if visible(j) {
                            row[j] * f64::from(desc.scale) + mask
                        } else {
                            f64::NEG_INFINITY
                        }
                    })
                    .collect();
                let largest = t.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = t.iter().map(|t| (t - largest).exp()).sum();
                for (j, t) in t.iter().enumerate() {
                    want[at.y as usize + j] = match (kind, visible(j)) {
                        (SoftmaxKind::Softmax, true) => (t - largest).exp() / sum,
                        (SoftmaxKind::Softmax, false) => 0.0,
                        (SoftmaxKind::LogSoftmax, true) => t - largest - sum.ln(),
                        (SoftmaxKind::LogSoftmax, false) => f64::NEG_INFINITY,
                    };
                }
            }
            let mut y = vec![0.0; y_len];
            let mask = if with_mask {
                mask.as_ptr()
            } else {
                std::ptr::null()
            };
            call(
                gm_softmax_f32,
                &desc,
                [x.as_ptr(), mask, std::ptr::null()],
                &mut y,
                desc.n_items(),
            );
            assert_close(&y, &want, 3e-6, &format!("{isa} {desc:?}"));
        }
    }
}

/// A weight is normal or 0, and right to the last normal one.
#[test]
fn softmaxes_have_no_subnormal_weights() {
    let x: Vec<f32> = (0..2000)
        .map(|i| -86.0 - i as f32 * 1e-3)
        .chain([0.0])
        .collect();
    for isa in Isa::available() {
        let desc = SoftmaxDesc::new(isa, SoftmaxKind::Softmax, 1, x.len());
        let mut y = vec![f32::NAN; x.len()];
        let inputs = [x.as_ptr(), std::ptr::null(), std::ptr::null()];
        call(gm_softmax_f32, &desc, inputs, &mut y, desc.n_items());
        for (&x, y) in x.iter().zip(y) {
            let want = f64::from(x).exp();
            let is_right = (f64::from(y) - want).abs() < 2e-7 * want;
            let is_flushed = y == 0.0 && want < 1.001 * f64::from(f32::MIN_POSITIVE);
            assert!(is_right || is_flushed, "{isa} {x}: {y} {want}");
            assert!(y == 0.0 || y.is_normal(), "{isa} {x}: {y}");
        }
    }
}
