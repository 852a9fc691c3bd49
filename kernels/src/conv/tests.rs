//! Convolutions over random windows, against a direct loop.

use super::*;
use crate::epilogue::EpilogueKind;
use crate::testing::{Rng, assert_close};

/// A random geometry of two axes with at least one output pixel.
pub(crate) fn window(rng: &mut Rng, channels: usize) -> Window {
    flat_window(rng, channels, 12)
}

/// The same over images of at most `most` rows and columns.
fn flat_window(rng: &mut Rng, channels: usize, most: usize) -> Window {
    loop {
        let (h, w) = (1 + rng.below(most), 1 + rng.below(most));
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

/// A random geometry of three axes with at least one output pixel.
pub(crate) fn deep_window(rng: &mut Rng, channels: usize) -> Window {
    loop {
        let flat = flat_window(rng, channels, 7);
        let sizes = [1 + rng.below(6), rng.pick(&[1, 2, 3, 3, 4])];
        let steps = [rng.pick(&[1, 1, 2, 3]), rng.pick(&[1, 1, 1, 2])];
        let pads = std::array::from_fn(|_| rng.below(sizes[1] + 1));
        let mut out = flat.with_depth(sizes, steps, pads);
        out.x_n_stride += rng.pick(&[0, 0, 11]);
        if out.n_pixels() > 0 {
            return out;
        }
    }
}

/// The input element under tap (d, i, j) of output pixel (od, oh, ow) of image `n`, if not on padding.
pub(crate) fn input(
    w: &Window,
    x: &[f32],
    (n, [od, oh, ow]): Pixel,
    [d, i, j]: [usize; 3],
    channel: usize,
) -> Option<f64> {
    let id = (od * w.stride_d + d * w.dilation_d)
        .checked_sub(w.pad_front)
        .filter(|&id| id < w.in_d)?;
    let ih = (oh * w.stride_h + i * w.dilation_h)
        .checked_sub(w.pad_top)
        .filter(|&ih| ih < w.in_h)?;
    let iw = (ow * w.stride_w + j * w.dilation_w)
        .checked_sub(w.pad_left)
        .filter(|&iw| iw < w.in_w)?;
    let image = n * w.x_n_stride + id * w.x_d_stride;
    let element = image + ih * w.x_h_stride + iw * w.x_w_stride + channel;
    Some(f64::from(x[element]))
}

/// An image and an output pixel (od, oh, ow) of it.
pub(crate) type Pixel = (usize, [usize; 3]);

/// Output pixels in order.
pub(crate) fn pixels(w: Window) -> impl Iterator<Item = Pixel> {
    let images = (0..w.batch).flat_map(move |n| (0..w.out_d).map(move |od| (n, od)));
    let rows = images.flat_map(move |(n, od)| (0..w.out_h).map(move |oh| (n, od, oh)));
    rows.flat_map(move |(n, od, oh)| (0..w.out_w).map(move |ow| (n, [od, oh, ow])))
}

/// Taps (d, i, j) in the order of weights.
pub(crate) fn taps(w: Window) -> impl Iterator<Item = [usize; 3]> {
    let rows = (0..w.kernel_d).flat_map(move |d| (0..w.kernel_h).map(move |i| (d, i)));
    rows.flat_map(move |(d, i)| (0..w.kernel_w).map(move |j| [d, i, j]))
}

fn reference(d: &ConvDesc, x: &[f32], weights: &[f32], bias: &[f32], residual: &[f32]) -> Vec<f64> {
    let w = &d.window;
    let mut out = Vec::new();
    for (pixel, place) in pixels(*w).enumerate() {
        for channel in 0..d.groups * d.out_channels {
            let group = channel / d.out_channels;
            let mut sum = 0.0;
            for c in 0..d.in_channels {
                for (number, tap) in taps(*w).enumerate() {
                    let weight = weights[(channel * d.in_channels + c) * w.n_taps() + number];
                    let x = input(w, x, place, tap, group * d.in_channels + c);
                    sum += f64::from(weight) * x.unwrap_or(0.0);
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
    let n_taps = window.n_taps();
    let x = values(rng, window.batch * window.x_n_stride);
    let weights = values(rng, channels * in_channels * n_taps);
    let (bias, residual) = (rng.vec(channels), rng.vec(window.n_pixels() * channels));
    assert_close(
        &convolve(&d, &x, &weights, [&bias, &residual]),
        &reference(&d, &x, &weights, &bias, &residual),
        3e-5,
        &format!("{isa} {:?} {d:?}", d.form()),
    );
}

/// The output, 5 where nothing is written, with `[bias, residual]` in the epilogue.
fn convolve(d: &ConvDesc, x: &[f32], weights: &[f32], operands: [&[f32]; 2]) -> Vec<f32> {
    const BEYOND: usize = 256;
    let isa = Isa::from_u32(d.isa).unwrap();
    let n_taps = d.window.n_taps();
    let packed = pack_weights(
        isa,
        d.groups,
        d.out_channels,
        d.in_channels,
        n_taps,
        weights,
    );
    assert_eq!(packed.len(), d.packed_len());
    let mut y = vec![5f32; d.window.n_pixels() * d.ldy];
    let n = d.workspace_bytes() / 4;
    let mut workspace = vec![f32::NAN; n + BEYOND];
    workspace[n..].fill(7.0);
    let ptrs: [*mut u8; 6] = [
        x.as_ptr() as *mut u8,
        packed.as_ptr() as *mut u8,
        y.as_mut_ptr().cast(),
        workspace.as_mut_ptr().cast(),
        operands[0].as_ptr() as *mut u8,
        operands[1].as_ptr() as *mut u8,
    ];
    let split = d.n_items() / 2;
    for (begin, end) in [(split, d.n_items()), (0, split)] {
        // SAFETY: the buffers have the sizes that the descriptor describes.
        assert_eq!(unsafe { gm_conv_f32(d, ptrs.as_ptr(), begin, end) }, OK);
    }
    assert_eq!(workspace[n..], [7.0; BEYOND], "{d:?}");
    y
}

/// Checks of `rounds` random windows for each instruction set.
fn check_random(seed: u64, rounds: usize, window: fn(&mut Rng, usize) -> Window) {
    let mut rng = Rng(seed);
    for isa in Isa::available() {
        for _ in 0..rounds {
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

#[test]
fn convolutions_agree_with_the_reference() {
    check_random(11, 250, window);
}

#[test]
fn convolutions_over_three_axes_agree_with_the_reference() {
    check_random(13, 200, deep_window);
}

/// Images of one depth, and images whose depths are images of their own.
#[test]
fn windows_of_one_depth_are_those_of_two_axes() {
    let mut rng = Rng(14);
    for isa in Isa::available() {
        for _ in 0..60 {
            let (groups, in_channels) = (rng.pick(&[1, 1, 2]), rng.pick(&[2, 3, 16, 20]));
            let mut flat = window(&mut rng, groups * in_channels);
            flat.batch = rng.pick(&[1, 2, 6]);
            let n = flat.batch;
            let mut deep = flat.with_depth([n, 1], [1, rng.pick(&[1, 2])], [0; 2]);
            deep.batch = 1;
            // One depth between two on padding, whose weights count for nothing.
            let padded = flat.with_depth([1, 3], [1, 1], [1, 1]);
            let x = integers(&mut rng, n * flat.x_n_stride);
            let weights = integers(&mut rng, groups * 9 * in_channels * flat.n_taps());
            let all: Vec<f32> = weights
                .chunks_exact(flat.n_taps())
                .flat_map(|taps| {
                    [vec![1.0; taps.len()], taps.to_vec(), vec![2.0; taps.len()]].concat()
                })
                .collect();
            let run = |window, weights: &[f32]| {
                let mut d = ConvDesc::new(isa, window, groups, in_channels, 9);
                d.plan(2);
                convolve(&d, &x, weights, [&[]; 2])
            };
            let want = run(flat, &weights);
            let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&run(deep, &weights)), bits(&want), "{isa} {deep:?}");
            assert_eq!(run(padded, &all), want, "{isa} {padded:?}");
        }
    }
}

#[test]
fn windows_larger_than_images_have_no_output() {
    for isa in Isa::available() {
        for channels in [3, 20] {
            let flat = Window::new(2, 4, 5, channels, 3, 3);
            let deep = flat.with_depth([2, 3], [1, 1], [0; 2]);
            let tall = flat.with([1, 1], [2, 1], [0; 4]);
            for window in [deep, tall.with_depth([4, 3], [2, 1], [1, 0])] {
                assert_eq!(window.n_pixels(), 0);
                let d = ConvDesc::new(isa, window, 1, channels, 9);
                let x = vec![1.0; window.batch * window.x_n_stride];
                let weights = vec![1.0; 9 * channels * window.n_taps()];
                assert_eq!(convolve(&d, &x, &weights, [&[]; 2]), [0f32; 0]);
            }
            // The last depth of the window reaches beyond the image wherever it is.
            let padded = deep.with_depth([2, 5], [2, 1], [2, 2]);
            let mut rng = Rng(15);
            check((&mut rng, Rng::vec), isa, padded, 1, channels, 9);
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
fn depths_are_a_product_where_all_pixels_are_contiguous() {
    let flat = Window::new(2, 6, 6, 20, 1, 1);
    let form = |change: fn(&mut Window)| {
        let mut window = flat.with_depth([4, 1], [1, 1], [0; 2]);
        change(&mut window);
        ConvDesc::new(Isa::current(), window, 1, 20, 8).form()
    };
    assert_eq!(form(|_| {}), Form::Pointwise);
    assert_eq!(form(|w| w.stride_d = 2), Form::Table);
    assert_eq!(form(|w| w.out_d = 3), Form::Table);
    assert_eq!(form(|w| w.pad_front = 1), Form::Table);
    assert_eq!(form(|w| w.x_d_stride += 20), Form::Table);
    assert_eq!(form(|w| w.x_n_stride += 20), Form::Table);
    assert_eq!(form(|w| w.kernel_d = 2), Form::Table);
}

#[test]
fn nonsense_is_refused() {
    let mut desc = ConvDesc::new(Isa::current(), Window::new(1, 4, 4, 1, 2, 2), 1, 1, 1);
    desc.window.stride_w = 0;
    let ptrs = [std::ptr::null_mut::<u8>(); 4];
    // SAFETY: a refused descriptor reads nothing else.
    assert_eq!(unsafe { gm_conv_f32(&desc, ptrs.as_ptr(), 0, 1) }, INVALID);
}

/// Filters of NaN wherever a tap is beside the image for all pixels of a tile: sums that are numbers
/// prove that it was left out.
#[test]
fn taps_beside_the_image_are_not_summed() {
    let mut rng = Rng(16);
    for isa in Isa::available() {
        for (rate, size) in [(36, 8), (8, 8), (5, 4)] {
            let channels = 17;
            let window = Window::new(2, size, size, channels, 3, 3);
            let window = window.with([1, 1], [rate; 2], [rate; 4]);
            let mut d = ConvDesc::new(isa, window, 1, channels, 40);
            d.plan(1);
            assert_eq!(d.form(), Form::Table);
            let x = rng.vec(window.batch * window.x_n_stride);
            let mut weights = rng.vec(9 * channels * 40);
            for filter in weights.chunks_mut(9) {
                let centre = filter[4];
                filter.fill(f32::NAN);
                filter[4] = centre;
            }
            let found = convolve(&d, &x, &weights, [&[]; 2]);
            assert!(found.iter().all(|y| y.is_finite()), "{isa} {rate}");
            weights
                .iter_mut()
                .filter(|w| w.is_nan())
                .for_each(|w| *w = 0.0);
            let expected = reference(&d, &x, &weights, &[], &[]);
            assert_close(&found, &expected, 3e-5, &format!("{isa} {rate}"));
        }
    }
}
