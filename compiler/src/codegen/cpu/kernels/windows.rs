//! Channels-last windows over one, two or three spatial axes: their geometry, and pooling.

use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Call, Context, Ptr, Task, pointers, read, result};
use crate::ir::{Node, NodeId, Op, PoolKind, Window};
use gristmill_kernels::calls;
use gristmill_kernels::pool::{self, PoolDesc};
use gristmill_kernels::pool_gradient::MaxPoolGradDesc;
use gristmill_kernels::window::Window as KernelWindow;

/// Geometry of a channels-last window op, in the kernels' terms. One spatial axis is a row of pixels, two are
/// an image of one depth.
pub(super) fn kernel_window(
    x: &Strided,
    out: &[usize],
    size: &[usize],
    window: &Window,
) -> KernelWindow {
    let n_axes = x.shape.len();
    let [in_d, in_h, in_w] = three_axes(&x.shape[1..n_axes - 1], 1);
    let [out_d, out_h, out_w] = three_axes(&out[1..n_axes - 1], 1);
    let [kernel_d, kernel_h, kernel_w] = three_axes(size, 1);
    let [stride_d, stride_h, stride_w] = three_axes(&window.strides, 1);
    let [dilation_d, dilation_h, dilation_w] = three_axes(&window.dilations, 1);
    let [pad_front, pad_top, pad_left] = three_axes(&window.pads_low, 0);
    let x_w_stride = x.strides[n_axes - 2] as usize;
    let x_h_stride = match n_axes {
        4 | 5 => x.strides[n_axes - 3] as usize,
        _ => in_w * x_w_stride,
    };
    let x_d_stride = match n_axes {
        5 => x.strides[1] as usize,
        _ => in_h * x_h_stride,
    };
    KernelWindow {
        batch: x.shape[0],
        in_d,
        out_d,
        kernel_d,
        stride_d,
        dilation_d,
        pad_front,
        x_d_stride,
        in_h,
        in_w,
        out_h,
        out_w,
        kernel_h,
        kernel_w,
        stride_h,
        stride_w,
        dilation_h,
        dilation_w,
        pad_top,
        pad_left,
        x_n_stride: x.strides[0] as usize,
        x_h_stride,
        x_w_stride,
    }
}

/// Values of depth, height and width; `missing` for an axis that is not there.
fn three_axes(values: &[usize], missing: usize) -> [usize; 3] {
    match *values {
        [depth, height, width] => [depth, height, width],
        [height, width] => [missing, height, width],
        _ => [missing, missing, values[0]],
    }
}

/// True for views that a window op can read: channels contiguous, nothing reversed.
pub(super) fn window_input_fits(v: &Strided) -> bool {
    v.strides.last() == Some(&1) && v.strides.iter().all(|&s| s >= 0)
}

/// The task of a pooling, or of the gradient of one.
pub(super) fn pooling(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let Op::Pool {
        kind, size, window, ..
    } = &node.op
    else {
        return max_pool_grad(cx, id, node);
    };
    if cx.body.shape(node.inputs[0]).contains(&0) {
        return Err(Rejected::Empty);
    }
    let x = cx.view(node.inputs[0], window_input_fits);
    let out = cx.body.shape(node.outputs[0]);
    let channels = x.shape[x.shape.len() - 1];
    let geometry = kernel_window(&x, out, size, window);
    let mut desc = PoolDesc::new(cx.isa, kernel_kind(*kind), geometry, channels);
    [desc.pad_back, desc.pad_bottom, desc.pad_right] = three_axes(&window.pads_high, 0);
    let n_taps: usize = size.iter().product();
    let n_elements: usize = out.iter().product();
    let ptrs = pointers(read(&x), Ptr::Null, result(node), false, vec![]);
    let ns = (n_elements * n_taps) as f64 * 0.1;
    let call = Call::new(calls::gm_pool_f32(&desc), ptrs, desc.n_items(), ns);
    Task::single(cx, id, node, call)
}

/// The task of the gradient of a max pooling.
fn max_pool_grad(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let Op::MaxPoolGrad { size, window, .. } = &node.op else {
        return Err(Rejected::Empty);
    };
    let views = [0, 1].map(|i| cx.view(node.inputs[i], window_input_fits));
    let [x, g] = &views;
    if views.iter().any(|v| v.shape.contains(&0)) {
        return Err(Rejected::Empty);
    }
    let channels = x.shape[x.shape.len() - 1];
    let geometry = kernel_window(x, &g.shape, size, window);
    let of_g = kernel_window(g, &g.shape, size, window);
    let desc = MaxPoolGradDesc {
        g_n_stride: of_g.x_n_stride,
        g_d_stride: of_g.x_d_stride,
        g_h_stride: of_g.x_h_stride,
        g_w_stride: of_g.x_w_stride,
        ..MaxPoolGradDesc::new(cx.isa, geometry, channels)
    };
    let n_taps: usize = size.iter().product();
    let n_windows: usize = g.shape.iter().product();
    let ptrs = pointers(read(x), read(g), result(node), false, vec![]);
    let ns = (n_windows * n_taps) as f64 * 0.3;
    let call = Call::new(calls::gm_max_pool_grad_f32(&desc), ptrs, desc.n_items(), ns);
    Task::single(cx, id, node, call)
}

fn kernel_kind(kind: PoolKind) -> pool::PoolKind {
    match kind {
        PoolKind::Max => pool::PoolKind::Max,
        PoolKind::Avg => pool::PoolKind::AverageValid,
        PoolKind::AvgIncludePad => pool::PoolKind::AveragePadded,
    }
}
