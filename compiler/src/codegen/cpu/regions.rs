//! Regions of interest.

use super::rejected::Rejected;
use super::rows::{copy, single};
use super::strided::Strided;
use super::task::{Call, Context, Place, Ptr, Task, descriptor, pointers, read, result};
use crate::ir::ops::MAX_ROI_SAMPLES;
use crate::ir::{Node, NodeId, Op, PoolKind, ValueId};
use gristmill_kernels::OUT;
use gristmill_kernels::roi::{RoiAlignDesc, RoiKind};

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
    let call = Call {
        symbol: "gm_roi_align",
        descriptor: descriptor(&desc),
        ptrs,
        workspace_bytes: desc.workspace_bytes(),
        items: desc.n_items(),
        cost_ns: (n_pixels(&desc) as f64 * PIXEL_NS) as u64,
    };
    let mut task = single(cx, id, node, call)?;
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
    let mut copy = copy(cx.isa, cx.body, x, node.inputs[0], &strides, 0)?;
    copy.ptrs[OUT] = Ptr::Write(Place::Temp(0), 0);
    desc.x_strides = isizes(&strides);
    Some(copy)
}

fn isizes(strides: &[i64]) -> [isize; 4] {
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
