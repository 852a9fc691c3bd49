//! Products and convolutions of 8-bit integers against plain loops: every instruction set of this
//! machine, with and without the instruction for sums of four products.

use super::{Integers, Operands, WORD, pack_bytes, packed_words};
use crate::conv::tests::{deep_window, pixels, taps, window};
use crate::conv::{ConvDesc, gm_conv_f32};
use crate::epilogue::EpilogueKind;
use crate::gemm::tile::{FOR_BYTES, ForBytes};
use crate::gemm::*;
use crate::quantize::Quantize;
use crate::testing::Rng;
use crate::window::Window;

/// Bytes around the output, which no kernel may overwrite.
pub(crate) const UNTOUCHED: u8 = 0xa5;

fn packed_matrix(isa: Isa, [k, n]: [usize; 2], b: &[u8]) -> Vec<i32> {
    let rows = |i: usize| move |j: usize| [0, 1, 2, 3].map(|r| b[(i + r) * n + j] as i8);
    pack_bytes(isa, k, n, rows).expect("whole words")
}

pub(crate) fn bytes(rng: &mut Rng, n: usize) -> Vec<u8> {
    // The extremes are frequent, so that sums get large.
    (0..n)
        .map(|_| {
            if rng.below(4) == 0 {
                rng.pick(&[0, 255, 127, 128])
            } else {
                rng.below(256) as u8
            }
        })
        .collect()
}

pub(crate) fn value(byte: u8, is_signed: bool) -> i32 {
    if is_signed {
        i32::from(byte as i8)
    } else {
        i32::from(byte)
    }
}

/// Ops after the exact sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rest {
    Sums,
    /// So many ops of [`epilogue`].
    Scaled(usize),
    Quantized(Quantize, usize),
}

impl Rest {
    /// Ops of the epilogue.
    pub(crate) fn ops(self) -> impl Iterator<Item = EpilogueOp> {
        let n = match self {
            Rest::Sums => 0,
            Rest::Scaled(n) | Rest::Quantized(_, n) => n,
        };
        epilogue().into_iter().take(n)
    }
}

pub(crate) fn rest(rng: &mut Rng) -> Rest {
    // With ops of fast forms alone and a divisor of 1, whole tiles store bytes from their registers.
    let n_ops = rng.pick(&[0, 2, 2, 3, 4]);
    match rng.below(5) {
        0 => Rest::Sums,
        1 => Rest::Scaled(n_ops),
        4 => Rest::Quantized(
            Quantize::bytes(true, 1.9, rng.below(256) as i32 - 128),
            n_ops,
        ),
        _ => {
            let divisor = rng.pick(&[0.37, 1.0]);
            Rest::Quantized(
                Quantize::bytes(false, divisor, rng.below(256) as i32),
                n_ops,
            )
        }
    }
}

/// Scales by columns, adds a bias, clamps; the last is no fast form.
fn epilogue() -> [EpilogueOp; 4] {
    [
        EpilogueOp::row_vec(EpilogueKind::Mul, 0),
        EpilogueOp::row_vec(EpilogueKind::Add, 1),
        EpilogueOp::unary(EpilogueKind::Clamp, -90.0, 400.0),
        EpilogueOp::unary(EpilogueKind::LeakyRelu, 0.5, 0.0),
    ]
}

/// The bytes that a sum in column `j` becomes, with f32 arithmetic in the kernel's order.
pub(crate) fn stored(sum: i32, j: usize, rest: Rest, operands: &[Vec<f32>; 2]) -> Vec<u8> {
    if rest == Rest::Sums {
        return sum.to_ne_bytes().into();
    }
    let mut x = sum as f32;
    for (i, _) in rest.ops().enumerate() {
        x = match i {
            0 => x * operands[0][j],
            1 => x + operands[1][j],
            2 => x.clamp(-90.0, 400.0),
            _ => {
                if x < 0.0 {
                    x * 0.5
                } else {
                    x
                }
            }
        };
    }
    match rest {
        Rest::Quantized(q, _) => {
            let y = (x / q.divisor).round_ties_even() + q.zero as f32;
            vec![if q.to == 1 { y as u8 } else { y as i8 as u8 }]
        }
        _ => x.to_ne_bytes().into(),
    }
}

/// Where the zero point comes from: the descriptor, or the third operand.
pub(crate) fn integers(rng: &mut Rng, is_signed: bool, rest: Rest) -> (Integers, u8) {
    let zero = rng.below(256) as u8;
    let is_operand = rng.below(2) == 0;
    let integers = Integers {
        operands: if is_signed {
            Operands::I8
        } else {
            Operands::U8
        } as u32,
        keeps_sums: u32::from(rest == Rest::Sums),
        zero_operand: if is_operand { 3 } else { 0 },
        zero: if is_operand {
            12345
        } else {
            value(zero, is_signed)
        },
    };
    (integers, zero)
}

pub(crate) fn operands(rng: &mut Rng, n: usize, rest: Rest) -> [Vec<f32>; 2] {
    // Powers of two, so that products with them are exact with or without fused multiply-adds. Bytes show
    // no payload of NaN.
    let special = match rest {
        Rest::Quantized(..) => [f32::NAN, f32::INFINITY],
        _ => [0.5; 2],
    };
    let scales = [
        0.125, 0.25, 0.03125, 0.125, 0.25, 0.03125, special[0], special[1],
    ];
    [
        (0..n).map(|_| rng.pick(&scales)).collect(),
        (0..n).map(|_| rng.below(40) as f32 - 20.0).collect(),
    ]
}

fn product(rng: &mut Rng, isa: Isa) {
    let m = rng.pick(&[0, 1, 2, 3, 4, 5, 7, 13, 14, 15, 29, 33, 61, 100]);
    let n = rng.pick(&[0, 1, 3, 8, 16, 17, 31, 32, 33, 64, 127, 128, 161]);
    let k = WORD * rng.pick(&[0, 1, 2, 5, 16, 33, 36, 700]);
    let (is_signed, rest) = (rng.below(2) == 0, rest(rng));
    let mut desc = GemmDesc::new(isa, m, n, k / WORD);
    (desc.lda, desc.ldc) = (k / WORD + rng.pick(&[0, 3]), n + rng.pick(&[0, 5]));
    let zero;
    (desc.integers, zero) = integers(rng, is_signed, rest);
    if rest != Rest::Sums {
        assert!(
            rest.ops()
                .all(|op| op.append_to(&mut desc.epilogue, &mut desc.n_epilogue))
        );
    }
    if let Rest::Quantized(q, _) = rest {
        desc.quantize = q;
    }
    let n_batch = rng.pick(&[1, 1, 2]);
    let c_bytes = desc.quantize.size_bytes();
    desc.batch[3] = BatchDim {
        extent: n_batch,
        a_stride: (m * desc.lda) as isize,
        b_stride: packed_words(isa, k, n) as isize,
        c_stride: (m * desc.ldc) as isize,
    };
    desc.plan(rng.pick(&[1, 2, 5]));
    let lda = desc.lda * WORD;
    let a = bytes(rng, n_batch * m * lda);
    let b = bytes(rng, n_batch * k * n);
    let ops = operands(rng, n, rest);
    let packed: Vec<i32> = (0..n_batch)
        .flat_map(|batch| packed_matrix(isa, [k, n], &b[batch * k * n..][..k * n]))
        .collect();
    let mut c = vec![UNTOUCHED; n_batch * m * desc.ldc * c_bytes];
    let mut want = c.clone();
    for (batch, i, j) in (0..n_batch * m * n).map(|x| (x / n / m, x / n % m, x % n)) {
        let centred =
            |kk: usize| value(a[(batch * m + i) * lda + kk], is_signed) - value(zero, is_signed);
        let sum = (0..k)
            .map(|kk| centred(kk) * i32::from(b[(batch * k + kk) * n + j] as i8))
            .sum();
        let at = ((batch * m + i) * desc.ldc + j) * c_bytes;
        want[at..at + c_bytes].copy_from_slice(&stored(sum, j, rest, &ops));
    }
    let a_words: Vec<u32> = a
        .chunks_exact(WORD)
        .map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]))
        .collect();
    let ptrs: [*mut u8; 7] = [
        a_words.as_ptr() as *mut u8,
        packed.as_ptr() as *mut u8,
        c.as_mut_ptr(),
        std::ptr::null_mut(),
        ops[0].as_ptr() as *mut u8,
        ops[1].as_ptr() as *mut u8,
        (&raw const zero).cast_mut(),
    ];
    let split = desc.n_items() / 2;
    for (begin, end) in [(split, desc.n_items()), (0, split)] {
        // SAFETY: the buffers have the sizes that the descriptor describes.
        assert_eq!(unsafe { gm_gemm_f32(&desc, ptrs.as_ptr(), begin, end) }, OK);
    }
    assert!(c == want, "{isa} {rest:?} {desc:?}");
}

fn convolution(rng: &mut Rng, isa: Isa, window: fn(&mut Rng, usize) -> Window) {
    let (channels, n) = (
        WORD * rng.pick(&[1, 2, 5, 16, 17]),
        rng.pick(&[1, 3, 16, 31, 33, 70]),
    );
    let window = window(rng, channels / WORD);
    let (is_signed, rest) = (rng.below(2) == 0, rest(rng));
    let mut desc = ConvDesc::new(isa, window, 1, channels / WORD, n);
    let zero;
    (desc.integers, zero) = integers(rng, is_signed, rest);
    if rest != Rest::Sums {
        assert!(
            rest.ops()
                .all(|op| op.append_to(&mut desc.epilogue, &mut desc.n_epilogue))
        );
    }
    if let Rest::Quantized(q, _) = rest {
        desc.quantize = q;
    }
    desc.ldy = n + rng.pick(&[0, 3]);
    desc.plan(rng.pick(&[1, 2, 16]));
    let n_taps = window.n_taps();
    let x = bytes(rng, window.batch * window.x_n_stride * WORD);
    let w = bytes(rng, n_taps * channels * n);
    let ops = operands(rng, n, rest);
    let packed = packed_matrix(isa, [n_taps * channels, n], &w);
    assert_eq!(packed.len(), desc.packed_len());
    let y_bytes = desc.quantize.size_bytes();
    let mut y = vec![UNTOUCHED; window.n_pixels() * desc.ldy * y_bytes];
    let mut want = y.clone();
    for (pixel, (image, [od, oh, ow])) in pixels(window).enumerate() {
        for j in 0..n {
            let mut sum = 0;
            for (tap, [d, i, jj]) in taps(window).enumerate() {
                let input = window.input_depth(od, d).zip(window.input_row(oh, i));
                let Some((id, ih)) = input else {
                    continue;
                };
                let iw =
                    (ow * window.stride_w + jj * window.dilation_w).checked_sub(window.pad_left);
                let Some(iw) = iw.filter(|&iw| iw < window.in_w) else {
                    continue;
                };
                let depth = image * window.x_n_stride + id * window.x_d_stride;
                let at = depth + ih * window.x_h_stride + iw * window.x_w_stride;
                for c in 0..channels {
                    let x = value(x[at * WORD + c], is_signed) - value(zero, is_signed);
                    sum += x * i32::from(w[(tap * channels + c) * n + j] as i8);
                }
            }
            let at = (pixel * desc.ldy + j) * y_bytes;
            want[at..at + y_bytes].copy_from_slice(&stored(sum, j, rest, &ops));
        }
    }
    let x_words: Vec<u32> = x
        .chunks_exact(WORD)
        .map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]))
        .collect();
    let mut workspace = vec![0x5555_5555_5555_5555u64; desc.workspace_bytes() / 8];
    let ptrs: [*mut u8; 7] = [
        x_words.as_ptr() as *mut u8,
        packed.as_ptr() as *mut u8,
        y.as_mut_ptr(),
        workspace.as_mut_ptr().cast(),
        ops[0].as_ptr() as *mut u8,
        ops[1].as_ptr() as *mut u8,
        (&raw const zero).cast_mut(),
    ];
    // SAFETY: the buffers have the sizes that the descriptor describes.
    let status = unsafe { gm_conv_f32(&desc, ptrs.as_ptr(), 0, desc.n_items()) };
    assert_eq!(status, OK);
    assert!(y == want, "{isa} {rest:?} {desc:?}");
}

#[test]
fn products_and_convolutions_are_exact() {
    let mut rng = Rng(21);
    for isa in Isa::available() {
        for most in [ForBytes::Plain, ForBytes::Vnni, ForBytes::Amx] {
            FOR_BYTES.set(most);
            (0..120).for_each(|_| product(&mut rng, isa));
            (0..80).for_each(|_| convolution(&mut rng, isa, window));
            (0..60).for_each(|_| convolution(&mut rng, isa, deep_window));
        }
    }
    FOR_BYTES.set(ForBytes::Amx);
}

/// Results that a quotient by the inverse of the divisor would round to the other side.
#[test]
fn quotients_at_ties_round_as_divisions_do() {
    let mut rng = Rng(23);
    let mut n_other = 0;
    for isa in Isa::available() {
        for _ in 0..200 {
            let divisor = f32::from_bits(0x3800_0000 + rng.below(0x0f00_0000) as u32);
            let divisor = rng.pick(&[divisor, divisor, 1e-39, 1e38]);
            let zero = rng.below(256) as i32;
            let mut values = vec![0f32; 96];
            for x in &mut values {
                let tie = (rng.below(420) as f32 - 210.5) * divisor;
                *x = f32::from_bits((tie.to_bits() as i32 + rng.below(5) as i32 - 2) as u32);
            }
            let mut desc = GemmDesc::new(isa, 1, values.len(), 1);
            desc.quantize = Quantize::bytes(false, divisor, zero);
            let (a, mut c) = ([1f32], vec![0u8; values.len()]);
            let packed = crate::pack::pack_b(isa, 1, values.len(), &values, values.len(), 1);
            let ptrs = [
                a.as_ptr() as *mut u8,
                packed.as_ptr() as *mut u8,
                c.as_mut_ptr(),
                std::ptr::null_mut(),
            ];
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_gemm_f32(&desc, ptrs.as_ptr(), 0, desc.n_items()) };
            assert_eq!(status, OK);
            for (&x, &found) in values.iter().zip(&c) {
                let rounded = |quotient: f32| (quotient.round_ties_even() + zero as f32) as u8;
                assert_eq!(
                    found,
                    rounded(x / divisor),
                    "{isa}: {x:e} / {divisor:e} + {zero}"
                );
                n_other += u32::from(rounded(x * (1.0 / divisor)) != found);
            }
        }
    }
    assert!(n_other > 100, "{n_other}");
}

#[test]
fn bytes_saturate_and_nan_is_zero() {
    let values = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.5,
        1.5,
        -0.5,
        126.5,
        3e9,
        -3e9,
        254.5,
    ];
    for isa in Isa::available() {
        for (quantize, want) in [
            (
                Quantize::bytes(false, 1.0, 0),
                [0, 255, 0, 0, 2, 0, 126, 255, 0, 254],
            ),
            (
                Quantize::bytes(true, 1.0, 1),
                [0, 127, 128, 1, 3, 1, 127, 127, 128, 127],
            ),
        ] {
            let mut desc = GemmDesc::new(isa, 1, values.len(), 1);
            desc.quantize = quantize;
            let (a, mut c) = ([1f32], [7u8; 11]);
            let packed = crate::pack::pack_b(isa, 1, values.len(), &values, values.len(), 1);
            let ptrs = [
                a.as_ptr() as *mut u8,
                packed.as_ptr() as *mut u8,
                c.as_mut_ptr(),
                std::ptr::null_mut(),
            ];
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_gemm_f32(&desc, ptrs.as_ptr(), 0, desc.n_items()) };
            assert_eq!(status, OK);
            assert_eq!(
                (&c[..10], c[10]),
                (&want.map(|x: i32| x as u8)[..], 7),
                "{isa} {quantize:?}"
            );
        }
    }
}

#[test]
fn contradictions_are_refused() {
    let ptrs = [std::ptr::null_mut::<u8>(); 4];
    let refused = |change: fn(&mut GemmDesc)| {
        let mut desc = GemmDesc::new(Isa::current(), 1, 1, 1);
        change(&mut desc);
        // SAFETY: a refused descriptor reads nothing else.
        assert_eq!(unsafe { gm_gemm_f32(&desc, ptrs.as_ptr(), 0, 1) }, INVALID);
    };
    refused(|d| d.integers.operands = 3);
    refused(|d| d.quantize.to = 3);
    refused(|d| d.quantize = Quantize::bytes(false, 1.0, -1));
    refused(|d| (d.integers.keeps_sums, d.quantize) = (1, Quantize::bytes(false, 1.0, 0)));
}
