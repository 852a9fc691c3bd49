//! Convolutions over random windows, against a direct loop.

use super::*;
use crate::epilogue::EpilogueKind;
use crate::testing::{Rng, assert_close};

/// A random geometry with at least one output pixel; `max_reach` bounds window and image.
pub(crate) fn window(rng: &mut Rng, channels: usize) -> Window {
    loop {
        let (h, w) = (1 + rng.below(12), 1 + rng.below(12));
        let kernel = [rng.pick(&[1, 1, 2, 3, 3, 5]), rng.pick(&[1, 1, 2, 3, 3, 5])];
        let stride = [rng.pick(&[1, 1, 2, 3]), rng.pick(&[1, 1, 2, 3])];
        let dilation = [rng.pick(&[1, 1, 1, 2]), rng.pick(&[1, 1, 1, 2])];
        let pads = std::array::from_fn(|i| rng.below(kernel[i % 2] + 1));
        let batch = rng.pick(&[1, 1, 2, 3]);
        let mut out =
            Window::new(batch, h, w, channels, kernel[0], kernel[1]).with(stride, dilation, pads);
        if rng.below(3) == 0 {
            // Images cut out of larger ones.
            out.x_w_stride += 3;
            out.x_h_stride = w * out.x_w_stride + 7;
            out.x_n_stride = h * out.x_h_stride + 5;
        }
        if out.n_pixels() > 0 {
            return out;
        }
    }
}

/// The input element under tap (i, j) of output pixel (oh, ow), or zero.
pub(crate) fn input(
    w: &Window,
    x: &[f32],
    n: usize,
    at: [usize; 4],
    channel: usize,
) -> Option<f64> {
    let [oh, ow, i, j] = at;
    let ih = (oh * w.stride_h + i * w.dilation_h)
        .checked_sub(w.pad_top)
        .filter(|&ih| ih < w.in_h)?;
    let iw = (ow * w.stride_w + j * w.dilation_w)
        .checked_sub(w.pad_left)
        .filter(|&iw| iw < w.in_w)?;
    Some(f64::from(
        x[n * w.x_n_stride + ih * w.x_h_stride + iw * w.x_w_stride + channel],
    ))
}

/// Output pixels as (n, oh, ow).
pub(crate) fn pixels(w: Window) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..w.n_pixels()).map(move |p| (p / (w.out_h * w.out_w), p / w.out_w % w.out_h, p % w.out_w))
}

fn reference(d: &ConvDesc, x: &[f32], weights: &[f32], bias: &[f32], residual: &[f32]) -> Vec<f64> {
    let w = &d.window;
    let mut out = Vec::new();
    for (pixel, (n, oh, ow)) in pixels(*w).enumerate() {
        for channel in 0..d.groups * d.out_channels {
            let group = channel / d.out_channels;
            let mut sum = 0.0;
            for c in 0..d.in_channels {
                for i in 0..w.kernel_h {
                    for j in 0..w.kernel_w {
                        let weight = weights
                            [((channel * d.in_channels + c) * w.kernel_h + i) * w.kernel_w + j];
                        let x = input(w, x, n, [oh, ow, i, j], group * d.in_channels + c);
                        sum += f64::from(weight) * x.unwrap_or(0.0);
                    }
                }
            }
            if d.n_epilogue > 0 {
                sum += f64::from(bias[channel])
                    + f64::from(residual[pixel * d.groups * d.out_channels + channel]);
                sum = sum.max(0.0);
            }
            out.push(sum);
        }
        out.extend((d.groups * d.out_channels..d.ldy).map(|_| 5.0));
    }
    out
}

/// Random values, so many.
type Values = fn(&mut Rng, usize) -> Vec<f32>;

fn check(
    (rng, values): (&mut Rng, Values),
    isa: Isa,
    window: Window,
    groups: usize,
    in_channels: usize,
    out_channels: usize,
) {
    let mut d = ConvDesc::new(Isa::current(), window, groups, in_channels, out_channels);
    (d.isa, d.ldy) = (isa as u32, groups * out_channels + rng.pick(&[0, 0, 3]));
    d.plan(rng.pick(&[1, 2, 16]));
    if rng.below(3) == 0 {
        (d.row_block, d.panel_block) = (1 + rng.below(30), 1 + rng.below(3));
    }
    let channels = groups * out_channels;
    if rng.below(2) == 0 {
        assert!(
            EpilogueOp::row_vec(EpilogueKind::Add, 0).append_to(&mut d.epilogue, &mut d.n_epilogue)
        );
        assert!(
            EpilogueOp::tensor(EpilogueKind::Add, 1, channels as isize)
                .append_to(&mut d.epilogue, &mut d.n_epilogue)
        );
        assert!(
            EpilogueOp::unary(EpilogueKind::Relu, 0.0, 0.0)
                .append_to(&mut d.epilogue, &mut d.n_epilogue)
        );
    }
    let n_taps = window.kernel_h * window.kernel_w;
    let x = values(rng, window.batch * window.x_n_stride);
    let weights = values(rng, channels * in_channels * n_taps);
    let (bias, residual) = (rng.vec(channels), rng.vec(window.n_pixels() * channels));
    let packed = pack_weights(isa, groups, out_channels, in_channels, n_taps, &weights);
    assert_eq!(packed.len(), d.packed_len());
    let mut y = vec![5f32; window.n_pixels() * d.ldy];
    let mut workspace = vec![f32::NAN; d.workspace_bytes() / 4];
    let ptrs: [*mut u8; 6] = [
        x.as_ptr() as *mut u8,
        packed.as_ptr() as *mut u8,
        y.as_mut_ptr().cast(),
        workspace.as_mut_ptr().cast(),
        bias.as_ptr() as *mut u8,
        residual.as_ptr() as *mut u8,
    ];
    let split = d.n_items() / 2;
    for (begin, end) in [(split, d.n_items()), (0, split)] {
        // SAFETY: the buffers have the sizes that the descriptor describes.
        assert_eq!(unsafe { gm_conv_f32(&d, ptrs.as_ptr(), begin, end) }, OK);
    }
    assert_close(
        &y,
        &reference(&d, &x, &weights, &bias, &residual),
        3e-5,
        &format!("{isa} {:?} {d:?}", d.form()),
    );
}

#[test]
fn convolutions_agree_with_the_reference() {
    let mut rng = Rng(11);
    for isa in Isa::available() {
        for _ in 0..250 {
            let groups = rng.pick(&[1, 1, 1, 2, 3]);
            let in_channels = rng.pick(&[1, 2, 3, 4, 16, 17, 20]);
            let window = window(&mut rng, groups * in_channels);
            let out_channels = rng.pick(&[1, 3, 8, 16, 31, 32, 33, 70]);
            check(
                (&mut rng, Rng::vec),
                isa,
                window,
                groups,
                in_channels,
                out_channels,
            );
        }
    }
}

/// Values whose sums of products are exact.
fn integers(rng: &mut Rng, n: usize) -> Vec<f32> {
    rng.vec(n).iter().map(|x| (x * 4.0).round()).collect()
}

/// Windows as large as images, whose panels are summed by blocks of taps.
#[test]
fn deep_windows_agree_with_the_reference() {
    let mut rng = Rng(12);
    for isa in Isa::available() {
        for (size, channels) in [(42, 20), (48, 15)] {
            for out_channels in [3, 40] {
                let [height, width] = [size + rng.below(2), size + 1];
                let window = Window::new(1, height, width, channels, size, size);
                check((&mut rng, integers), isa, window, 1, channels, out_channels);
            }
        }
    }
}

#[test]
fn every_form_is_chosen_where_it_applies() {
    let form = |window, groups, channels| {
        ConvDesc::new(Isa::current(), window, groups, channels, 8).form()
    };
    let stem = Window::new(1, 224, 224, 3, 7, 7).with([2, 2], [1, 1], [3; 4]);
    assert_eq!(form(stem, 1, 3), Form::PaddedRows);
    assert_eq!(
        form(Window::new(2, 14, 14, 64, 1, 1), 1, 64),
        Form::Pointwise
    );
    assert_eq!(
        form(
            Window::new(2, 14, 14, 64, 1, 1).with([2, 2], [1, 1], [0; 4]),
            1,
            64
        ),
        Form::Table
    );
    assert_eq!(
        form(
            Window::new(1, 14, 14, 64, 3, 3).with([1, 1], [1, 1], [1; 4]),
            2,
            32
        ),
        Form::Table
    );
}

#[test]
fn nonsense_is_refused() {
    let mut desc = ConvDesc::new(Isa::current(), Window::new(1, 4, 4, 1, 2, 2), 1, 1, 1);
    desc.window.stride_w = 0;
    let ptrs = [std::ptr::null_mut::<u8>(); 4];
    // SAFETY: a refused descriptor reads nothing else.
    assert_eq!(unsafe { gm_conv_f32(&desc, ptrs.as_ptr(), 0, 1) }, INVALID);
}
