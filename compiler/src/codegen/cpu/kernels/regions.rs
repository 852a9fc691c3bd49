//! Regions of interest.

use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Call, Context, Place, Ptr, Task, pointers, read, result};
use crate::ir::ops::MAX_ROI_SAMPLES;
use crate::ir::{Node, NodeId, Op, PoolKind, ValueId};
use gristmill_kernels::roi::{RoiAlignDesc, RoiKind};
use gristmill_kernels::{OUT, calls};

/// Estimated time of a weighted pixel in ns.
const PIXEL_NS: f64 = 0.3;
/// Weighted pixels for each copied one from which a copy is worth its time.
const PIXELS_PER_COPIED: usize = 2;
/// Fewest channels that are.
const LEAST_CHANNELS: usize = 4;

/// The task of a [`Op::RoiAlign`].
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    if cx.body.shape(node.inputs[0]).contains(&0) {
        return Err(Rejected::Empty);
    }
    let x = cx.view(node.inputs[0], |_| true);
    let mut desc = describe(cx, node, &x)?;
    let copy = channels_last(cx, node, &x, &mut desc);
    let pixels = match copy {
        Some(_) => Ptr::Read(Place::Temp(0), 0),
        None => read(&x),
    };
    let corners = cx.view(node.inputs[1], Strided::is_contiguous);
    let images = contiguous_indices(cx, node.inputs[2]);
    let ptrs = pointers(pixels, read(&corners), result(node), true, vec![images]);
    let ns = n_pixels(&desc) as f64 * PIXEL_NS;
    let call = Call {
        workspace_bytes: desc.workspace_bytes(),
        ..Call::new(calls::gm_roi_align(&desc), ptrs, desc.n_items(), ns)
    };
    let mut task = Task::single(cx, id, node, call)?;
    if let Some(copy) = copy {
        task.calls.insert(0, copy);
        task.temps
            .push(x.shape.iter().product::<usize>() * size_of::<f32>());
    }
    Ok(task)
}

/// The copy of the images to intermediate memory that makes channels neighbours, where it is worth its time; the kernel reads the copy
/// then.
fn channels_last(cx: &Context, node: &Node, x: &Strided, desc: &mut RoiAlignDesc) -> Option<Call> {
    let [_, channels, height, width] = x.shape[..] else {
        return None;
    };
    let n_elements: usize = x.shape.iter().product();
    let is_worth_it = n_pixels(desc) >= PIXELS_PER_COPIED * n_elements;
    if x.strides[1] == 1 || channels < LEAST_CHANNELS || !is_worth_it {
        return None;
    }
    let row = (width * channels) as i64;
    let strides = [row * height as i64, 1, row, channels as i64];
    let mut copy = Call::copy(cx.isa, cx.body, x, node.inputs[0], &strides, 0)?;
    copy.ptrs[OUT] = Ptr::Write(Place::Temp(0), 0);
    desc.x_strides = isizes(&strides);
    Some(copy)
}

pub(super) fn isizes(strides: &[i64]) -> [isize; 4] {
    let mut all = [0; 4];
    for (to, &stride) in all.iter_mut().zip(strides) {
        *to = stride as isize;
    }
    all
}

/// Weighted pixels of all bins. A bin whose samples depend on the region counts as one of two along each axis.
fn n_pixels(desc: &RoiAlignDesc) -> usize {
    let n_samples = match desc.sampling {
        0 => 4,
        n => n * n,
    };
    let n_bins = desc.bins[0] * desc.bins[1];
    desc.regions * desc.channels * n_bins * n_samples * 4
}

/// A read of indices of either width.
fn contiguous_indices(cx: &Context, v: ValueId) -> Ptr {
    let view = cx.view(v, Strided::is_contiguous);
    let bytes = cx.body.dtype(v).size_bytes() as i64;
    Ptr::Read(Place::Value(view.base), view.offset * bytes)
}

fn describe(cx: &Context, node: &Node, x: &Strided) -> Result<RoiAlignDesc, Rejected> {
    let Op::RoiAlign {
        kind,
        size,
        sampling,
        scale,
        half_pixel,
    } = &node.op
    else {
        return Err(Rejected::Empty);
    };
    Ok(RoiAlignDesc {
        isa: cx.isa as u32,
        kind: kernel_kind(*kind) as u32,
        scale: scale.0 as f32,
        half_pixel: u32::from(*half_pixel),
        sampling: *sampling,
        max_samples: MAX_ROI_SAMPLES,
        index_bytes: cx.body.dtype(node.inputs[2]).size_bytes(),
        regions: cx.body.shape(node.outputs[0])[0],
        images: x.shape[0],
        channels: x.shape[1],
        plane: [x.shape[2], x.shape[3]],
        bins: [size[0], size[1]],
        x_strides: isizes(&x.strides),
    })
}

fn kernel_kind(kind: PoolKind) -> RoiKind {
    match kind {
        PoolKind::Max => RoiKind::Max,
        PoolKind::Avg | PoolKind::AvgIncludePad => RoiKind::Average,
    }
}

#[cfg(test)]
mod tests {
    use crate::codegen::cpu::Options;
    use crate::codegen::cpu::tests::harness::{check, compile_clusters, image_graph, run, steps};
    use crate::codegen::testing::{Rng, as_cluster, graph_of};
    use crate::ir::*;
    use gristmill_runtime::{DType, Tensor, status};

    /// Corners within, across and outside of the image, turned over, and NaN.
    fn corners(rng: &mut Rng, n: usize) -> Vec<f64> {
        let mut corners = Vec::new();
        for _ in 0..n {
            let reach = [4.0, 20.0, 300.0][rng.below(3)];
            corners.extend((0..4).map(|_| rng.real(-reach / 4.0, reach)));
            let at = corners.len() - 1 - rng.below(4);
            // An infinite extent has too many samples where the region decides.
            corners[at] = [corners[at], f64::NAN, -1.0, 0.0][rng.below(4)];
        }
        corners
    }

    fn indices(rng: &mut Rng, n: usize, images: usize) -> Tensor {
        let some = |rng: &mut Rng| rng.below(2 * images) as i64 - images as i64;
        let wide: Vec<i64> = (0..n).map(|_| some(rng)).collect();
        let narrow: Vec<i32> = wide.iter().map(|&i| i as i32).collect();
        match rng.below(2) {
            0 => Tensor::from_slice(&wide, &[n]).unwrap(),
            _ => Tensor::from_slice(&narrow, &[n]).unwrap(),
        }
    }

    fn random_op(rng: &mut Rng) -> Op {
        Op::RoiAlign {
            kind: [PoolKind::Avg, PoolKind::Max][rng.below(2)],
            size: vec![1 + rng.below(4), 1 + rng.below(4)],
            sampling: rng.below(4),
            scale: Real([1.0, 0.25, 0.3][rng.below(3)]),
            half_pixel: rng.below(2) == 0,
        }
    }

    /// An image, some of whose pixels are NaN or a negative zero.
    fn image(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
        let n = shape.iter().product::<usize>();
        let mut x: Vec<f64> = (0..n).map(|_| rng.real(-1.0, 1.0)).collect();
        for _ in 0..rng.below(3) {
            x[rng.below(n)] = [f64::NAN, -0.0][rng.below(2)];
        }
        Tensor::from_f64s(dtype, shape, &x).unwrap()
    }

    #[test]
    fn random_regions_are_the_interpreters() {
        let rng = &mut Rng(61);
        for _ in 0..150 {
            let dtype = [DType::F32, DType::F32, DType::F64, DType::F16][rng.below(4)];
            let (n, c) = (1 + rng.below(3), [1, 3, 17, 70][rng.below(4)]);
            let (h, w) = (1 + rng.below(9), 1 + rng.below(9));
            let is_last = rng.below(2) == 0;
            let shape = if is_last { [n, h, w, c] } else { [n, c, h, w] };
            let regions = 1 + rng.below(6);
            let corners = corners(rng, regions);
            let operands = [
                image(rng, dtype, &shape),
                Tensor::from_f64s(dtype, &[regions, 4], &corners).unwrap(),
                indices(rng, regions, n),
            ];
            let graph = image_graph(&random_op(rng), is_last, &operands);
            let has_kernel = steps(&graph).iter().any(|s| s.ends_with("gm_roi_align"));
            assert_eq!(has_kernel, dtype == DType::F32, "{graph}");
            let tolerance = if dtype == DType::F16 { 1e-3 } else { 0.0 };
            check(&graph, &operands, tolerance, rng);
        }
    }

    /// The status of an op with samples by the region, on an image of two.
    fn status_of(dtype: DType, image: i64, right: f64) -> u32 {
        let op = Op::RoiAlign {
            kind: PoolKind::Avg,
            size: vec![2, 2],
            sampling: 0,
            scale: Real(1.0),
            half_pixel: false,
        };
        let corners = [0.0, 0.0, 2.0, 2.0, 0.0, 0.0, right, 2.0];
        let operands = [
            Tensor::zeros(dtype, &[2, 3, 4, 4]).unwrap(),
            Tensor::from_f64s(dtype, &[2, 4], &corners).unwrap(),
            Tensor::from_slice(&[0, image], &[2]).unwrap(),
        ];
        let graph = as_cluster(&graph_of(&op, &operands));
        let compiled = compile_clusters(&mut graph.clone(), &Options::default()).unwrap();
        match run(&graph, &compiled, &operands, &mut Rng(62)) {
            Ok(_) => status::OK,
            Err(status) => status,
        }
    }

    #[test]
    fn images_and_samples_out_of_range_are_faults() {
        for dtype in [DType::F32, DType::F64] {
            assert_eq!(status_of(dtype, -2, 3.0), status::OK);
            assert_eq!(status_of(dtype, 2, 3.0), status::INDEX_OUT_OF_RANGE);
            assert_eq!(status_of(dtype, -3, 3.0), status::INDEX_OUT_OF_RANGE);
            assert_eq!(status_of(dtype, 1, 1e6), status::INDEX_OUT_OF_RANGE);
            assert_eq!(
                status_of(dtype, 1, f64::INFINITY),
                status::INDEX_OUT_OF_RANGE
            );
        }
    }
}
