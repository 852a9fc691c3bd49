//! Minimal filtering against sums in f64, for every instruction set.

use super::*;
use crate::conv::tests::{input, pixels, taps, window};
use crate::epilogue::EpilogueKind;
use crate::testing::Rng;

/// Bounds of the error, as parts of the output's scale: see the table of the module.
const BOUNDS: [(usize, f64); 2] = [(2, 2e-6), (4, 2e-5)];

/// Filters `[out, in, 3, 3]`.
fn onnx(in_channels: usize) -> FilterStrides {
    FilterStrides {
        taps: [3, 1],
        input: 9,
        output: 9 * in_channels as isize,
    }
}

struct Case {
    desc: WinogradDesc,
    x: Vec<f32>,
    weights: Vec<f32>,
    bias: Vec<f32>,
    residual: Vec<f32>,
}

impl Case {
    /// Inputs as after a rectifier: half of them zero, the others positive.
    fn random(rng: &mut Rng, isa: Isa, tile: usize, window: Window, channels: [usize; 2]) -> Case {
        let [c, k] = channels;
        let mut desc = WinogradDesc::new(isa, tile, window, c, k);
        desc.ldy = k + rng.pick(&[0, 3]);
        desc.plan(rng.pick(&[1, 2, 7]));
        if rng.below(3) == 0 {
            desc.tile_block = 1 + rng.below(9);
        }
        if rng.below(2) == 0 {
            assert!(
                EpilogueOp::row_vec(EpilogueKind::Add, 0)
                    .append_to(&mut desc.epilogue, &mut desc.n_epilogue)
            );
            assert!(
                EpilogueOp::tensor(EpilogueKind::Add, 1, k as isize)
                    .append_to(&mut desc.epilogue, &mut desc.n_epilogue)
            );
            assert!(
                EpilogueOp::unary(EpilogueKind::Relu, 0.0, 0.0)
                    .append_to(&mut desc.epilogue, &mut desc.n_epilogue)
            );
            if rng.below(2) == 0 {
                assert!(
                    EpilogueOp::row_vec(EpilogueKind::Mul, 0)
                        .append_to(&mut desc.epilogue, &mut desc.n_epilogue)
                );
            }
        }
        let x = rng.vec(window.batch * window.x_n_stride);
        let scale = 1.0 / (9.0 * c as f32).sqrt();
        Case {
            desc,
            x: x.into_iter().map(|x| x.max(0.0)).collect(),
            weights: rng.vec(9 * c * k).into_iter().map(|w| w * scale).collect(),
            bias: rng.vec(k),
            residual: rng.vec(window.n_pixels() * k),
        }
    }

    fn run(&self) -> Vec<f32> {
        let d = &self.desc;
        let isa = Isa::from_u32(d.isa).unwrap();
        let channels = [d.in_channels, d.out_channels];
        let strides = onnx(d.in_channels);
        let mut packed = vec![0.0; packed_winograd_len(isa, d.tile, channels)];
        pack_winograd(isa, d.tile, channels, &self.weights, strides, &mut packed);
        let mut y = vec![5f32; d.window.n_pixels() * d.ldy];
        let mut workspace = vec![f32::NAN; d.workspace_bytes() / 4];
        let ptrs: [*mut u8; 6] = [
            self.x.as_ptr() as *mut u8,
            packed.as_ptr() as *mut u8,
            y.as_mut_ptr().cast(),
            workspace.as_mut_ptr().cast(),
            self.bias.as_ptr() as *mut u8,
            self.residual.as_ptr() as *mut u8,
        ];
        let split = d.n_items() / 2;
        for (begin, end) in [(split, d.n_items()), (0, split)] {
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe {
                match d.tile {
                    2 => gm_winograd2_f32(d, ptrs.as_ptr(), begin, end),
                    _ => gm_winograd4_f32(d, ptrs.as_ptr(), begin, end),
                }
            };
            assert_eq!(status, OK);
        }
        y
    }

    fn reference(&self) -> Vec<f64> {
        let (d, w) = (&self.desc, &self.desc.window);
        let mut out = Vec::new();
        for (pixel, place) in pixels(*w).enumerate() {
            for k in 0..d.out_channels {
                let mut sum = 0.0;
                for c in 0..d.in_channels {
                    for (number, tap) in taps(*w).enumerate() {
                        let weight = self.weights[(k * d.in_channels + c) * 9 + number];
                        let x = input(w, &self.x, place, tap, c);
                        sum += f64::from(weight) * x.unwrap_or(0.0);
                    }
                }
                out.push(self.after(sum, pixel, k));
            }
            out.extend((d.out_channels..d.ldy).map(|_| 5.0));
        }
        out
    }

    fn after(&self, sum: f64, pixel: usize, k: usize) -> f64 {
        let (d, bias) = (&self.desc, f64::from(self.bias[k]));
        if d.n_epilogue == 0 {
            return sum;
        }
        let residual = self.residual[pixel * d.out_channels + k];
        let y = (sum + bias + f64::from(residual)).max(0.0);
        if d.n_epilogue > 3 { y * bias } else { y }
    }
}

/// The largest error over the largest element.
fn error(got: &[f32], want: &[f64]) -> f64 {
    let scale = want.iter().fold(1e-3, |a: f64, x| a.max(x.abs()));
    let errors = got.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).abs());
    errors.fold(0.0, f64::max) / scale
}

#[test]
fn tiles_agree_with_sums_in_f64() {
    let mut rng = Rng(41);
    for isa in Isa::available() {
        for (tile, bound) in BOUNDS {
            for _ in 0..60 {
                let channels = [
                    rng.pick(&[1, 3, 8, 16, 17, 40, 64]),
                    rng.pick(&[1, 5, 16, 32, 33, 96, 150]),
                ];
                let mut w = window(&mut rng, channels[0]);
                let (h, width) = (1 + rng.below(14), 1 + rng.below(14));
                let dilation = [rng.pick(&[1, 1, 2, 3]), rng.pick(&[1, 1, 2])];
                let pads = std::array::from_fn(|_| rng.below(4));
                w = Window::new(w.batch, h, width, channels[0], 3, 3).with([1, 1], dilation, pads);
                if w.n_pixels() == 0 {
                    continue;
                }
                let case = Case::random(&mut rng, isa, tile, w, channels);
                let error = error(&case.run(), &case.reference());
                assert!(error <= bound, "{isa} {error:e} {:?}", case.desc);
            }
        }
    }
}

/// The shapes of residual networks, where sums are long.
#[test]
fn long_sums_keep_the_bound() {
    let mut rng = Rng(42);
    for (tile, bound) in BOUNDS {
        for (size, channels) in [(14, 256), (7, 512)] {
            let w = Window::new(1, size, size, channels, 3, 3).with([1, 1], [1, 1], [1; 4]);
            let case = Case::random(&mut rng, Isa::current(), tile, w, [channels, 40]);
            let error = error(&case.run(), &case.reference());
            assert!(
                error <= bound,
                "F({tile}, 3) at {channels} channels: {error:e}"
            );
        }
    }
}

/// Beyond the tiles that read it, an infinite element changes nothing.
#[test]
fn values_that_are_not_finite_stay_in_their_tiles() {
    let mut rng = Rng(43);
    for isa in Isa::available() {
        for (tile, _) in BOUNDS {
            let w = Window::new(1, 12, 12, 20, 3, 3).with([1, 1], [1, 1], [1; 4]);
            let mut case = Case::random(&mut rng, isa, tile, w, [20, 24]);
            let before = case.run();
            case.x[0] = f32::INFINITY;
            let after = case.run();
            let ldy = case.desc.ldy;
            for (pixel, (_, [_, oh, ow])) in pixels(w).enumerate() {
                let row = pixel * ldy..pixel * ldy + 24;
                let (before, after) = (&before[row.clone()], &after[row]);
                if oh.max(ow) >= tile {
                    assert_eq!(before, after, "{isa} F({tile}, 3) at {oh}, {ow}");
                } else if oh.max(ow) < 2 {
                    assert!(!after.iter().all(|y| y.is_finite()));
                }
            }
        }
    }
}

#[test]
fn other_windows_are_refused() {
    let good = Window::new(1, 8, 8, 4, 3, 3);
    assert!(WinogradDesc::takes(&good));
    let strided = good.with([2, 1], [1, 1], [1; 4]);
    let desc = WinogradDesc::new(Isa::current(), 4, strided, 4, 4);
    let ptrs = [std::ptr::null_mut::<u8>(); 4];
    // SAFETY: a refused descriptor reads nothing else.
    let status = unsafe { gm_winograd4_f32(&desc, ptrs.as_ptr(), 0, 1) };
    assert_eq!(status, INVALID);
}
