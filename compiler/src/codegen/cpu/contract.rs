//! Matrix products and convolutions of `f32`, or of 8-bit integers by constants, through the packed micro-kernels.

use super::bytes::BytesProduct;
use super::epilogue::{Chain, anchor, chain};
use super::strided::{Axis, Strided, collapse, row_major};
use super::task::{
    Call, Context, Place, Ptr, Task, descriptor, epilogue_ns, epilogue_ops, pointers, read, tensors,
};
use super::weights::Source;
use crate::ir::{Layout, Node, NodeId, Op, Window};
use gristmill_kernels::conv::ConvDesc;
use gristmill_kernels::depthwise::DepthwiseDesc;
use gristmill_kernels::epilogue::MAX_BATCH;
use gristmill_kernels::gemm::{BatchDim, GemmDesc};
use gristmill_kernels::pack::{PackBDesc, PackBatchDim, packed_len};
use gristmill_kernels::window::Window as KernelWindow;
use gristmill_runtime::{DType, Tensor};

/// The packed right-hand side of a product.
struct Packed {
    /// Where the panels are.
    ptr: Ptr,
    /// Elements between the panels of neighbouring matrices, per batch axis of the right-hand side.
    strides: Vec<i64>,
    /// The call that packs, when it happens at run time, and the size of what it writes.
    at_run_time: Option<(Call, usize)>,
}

/// Picoseconds per multiply-add of the kernels, for splitting only.
const PS_PER_MULTIPLY_ADD: u64 = 12;

fn cost(multiply_adds: usize, elements: usize, chain: &Chain) -> u64 {
    multiply_adds as u64 * PS_PER_MULTIPLY_ADD / 1000
        + (elements as f64 * epilogue_ns(&chain.terms)) as u64
}

/// The task of a matrix product and what follows it, when the kernels can do it.
pub(super) fn gemm(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    anchor(&cx.body.graph, node).ok()?;
    let shape = cx.body.shape(node.outputs[0]).to_vec();
    let rank = shape.len();
    let n = shape[rank - 1];
    let Sides {
        left: lhs,
        read_left,
        k,
        right: rhs,
        integers,
    } = sides(cx, node, n)?;
    if k == 0 || shape.contains(&0) {
        return None;
    }
    let chain = chain(cx.body, node, cx.users, cx.in_memory, &|_| true).quantized(
        cx.body,
        cx.users,
        cx.in_memory,
    );

    let rows = &shape[..rank - 1];
    let a = batch_strides(&lhs, &shape[..rank - 2], lhs.strides[lhs.strides.len() - 2])?;
    let rhs_batch = &cx.body.shape(node.inputs[1])[..cx.body.shape(node.inputs[1]).len() - 2];
    let b = broadcast_strides(rhs_batch, &rhs.strides, &shape[..rank - 2])
        .into_iter()
        .chain([0])
        .collect::<Vec<_>>();
    let c: Vec<i64> = row_major(&shape)[..rank - 1].to_vec();
    let operands = tensors(&chain.terms);
    let mut strides: Vec<&[i64]> = vec![&a, &b, &c];
    strides.extend(operands.iter().map(|t| &t.strides[..rank - 1]));
    let (row, batch) = split_rows(collapse(rows, &strides), strides.len())?;

    let mut desc = GemmDesc::new(cx.isa, row.extent, n, k);
    (desc.lda, desc.ldc) = (row.strides[0] as usize, row.strides[2] as usize);
    for (dim, axis) in desc.batch[MAX_BATCH - batch.len()..].iter_mut().zip(&batch) {
        let [a_stride, b_stride, c_stride] = [0, 1, 2].map(|i| axis.strides[i] as isize);
        *dim = BatchDim {
            extent: axis.extent,
            a_stride,
            b_stride,
            c_stride,
        };
    }
    let (ops, mut operand_ptrs) = epilogue_ops(&chain.terms, &|i| {
        (row.strides[3 + i], batch_array(&batch, 3 + i))
    });
    if !ops.into_iter().all(|op| desc.push_epilogue(op)) {
        return None;
    }
    desc.quantize = chain.quantize;
    let nodes = integers.as_ref().map_or(&[][..], |b| &b.nodes).to_vec();
    if let Some(b) = integers {
        desc.integers = b.describe(&mut operand_ptrs, cx.body.dtype(chain.result) == DType::I32);
    }
    desc.plan(cx.n_threads);
    let n_rows: usize = rows.iter().product();
    let out = Ptr::Write(Place::Value(chain.result), 0);
    let call = Call {
        symbol: "gm_gemm_f32",
        descriptor: descriptor(&desc),
        ptrs: pointers(read_left, rhs.ptr, out, false, operand_ptrs),
        workspace_bytes: 0,
        items: desc.n_items(),
        cost_ns: cost(n_rows * n * k, n_rows * n, &chain),
    };
    let (calls, temps) = match rhs.at_run_time {
        Some((pack, bytes)) => (vec![pack, call], vec![bytes]),
        None => (vec![call], vec![]),
    };
    Some(task(id, chain, calls, temps, nodes))
}

/// `before` is what the task computes of its operands.
fn task(
    id: NodeId,
    chain: Chain,
    calls: Vec<Call>,
    temps: Vec<usize>,
    before: Vec<NodeId>,
) -> Task {
    let nodes = before
        .into_iter()
        .chain([id])
        .chain(chain.absorbed)
        .collect();
    Task {
        calls,
        temps,
        nodes,
        result: chain.result,
    }
}

/// The operands of a matrix product, in `f32` or in words of bytes.
struct Sides {
    left: Strided,
    read_left: Ptr,
    k: usize,
    right: Packed,
    integers: Option<BytesProduct>,
}

fn sides(cx: &Context, node: &Node, n: usize) -> Option<Sides> {
    if let Some(b) = BytesProduct::find(cx, node) {
        let batch = cx.body.shape(node.inputs[1]).split_last_chunk::<2>()?.0;
        let right = Packed {
            ptr: b.right.clone(),
            strides: vec![0; batch.len()],
            at_run_time: None,
        };
        let is_one = batch.iter().all(|&extent| extent == 1);
        let (left, read_left, k) = (b.left.clone(), b.read_left(), b.n_words);
        return is_one.then_some(Sides {
            left,
            read_left,
            k,
            right,
            integers: Some(b),
        });
    }
    if cx.body.dtype(node.inputs[0]) != DType::F32 {
        return None;
    }
    let left = cx.view(node.inputs[0], |v| {
        v.strides.last() == Some(&1) && v.strides.iter().all(|&s| s >= 0)
    });
    let k = *left.shape.last()?;
    if k == 0 || n == 0 {
        return None;
    }
    Some(Sides {
        read_left: read(&left),
        k,
        right: pack_rhs(cx, node, k, n)?,
        left,
        integers: None,
    })
}

/// The loop that becomes the kernel's rows, and the others. Rows share one right-hand side (tensor 1).
fn split_rows(mut axes: Vec<Axis>, n_tensors: usize) -> Option<(Axis, Vec<Axis>)> {
    let row = match axes.pop() {
        Some(last) if last.strides[1] == 0 => last,
        other => {
            axes.extend(other);
            Axis {
                extent: 1,
                strides: vec![0; n_tensors],
            }
        }
    };
    (axes.len() <= MAX_BATCH).then_some((row, axes))
}

fn batch_array(batch: &[Axis], tensor: usize) -> [isize; MAX_BATCH] {
    let mut out = [0; MAX_BATCH];
    let first = MAX_BATCH - batch.len();
    batch
        .iter()
        .enumerate()
        .for_each(|(i, axis)| out[first + i] = axis.strides[tensor] as isize);
    out
}

/// Strides over `batch` and the rows of the left-hand side.
fn batch_strides(lhs: &Strided, batch: &[usize], row: i64) -> Option<Vec<i64>> {
    let n = lhs.shape.len() - 2;
    let own = broadcast_strides(&lhs.shape[..n], &lhs.strides[..n], batch);
    Some(own.into_iter().chain([row]).collect())
}

fn broadcast_strides(from: &[usize], strides: &[i64], to: &[usize]) -> Vec<i64> {
    let mut out = vec![0; to.len()];
    let lead = to.len() - from.len();
    for i in 0..from.len() {
        out[lead + i] = if from[i] == 1 { 0 } else { strides[i] };
    }
    out
}

fn pack_rhs(cx: &Context, node: &Node, k: usize, n: usize) -> Option<Packed> {
    let v = node.inputs[1];
    let rhs = Strided::resolve(cx.body, v, cx.in_memory);
    let source = cx.source(&rhs, DType::F32);
    let rhs = source.as_ref().map_or(rhs, |s| s.view.clone());
    let batch = rhs.shape[..rhs.shape.len() - 2].to_vec();
    let isa = cx.isa;
    let per_matrix = packed_len(isa, k, n);
    let strides: Vec<i64> = row_major(&batch)
        .into_iter()
        .map(|s| s * per_matrix as i64)
        .collect();
    let n_axes = rhs.shape.len();
    let axes = collapse(&batch, &[&rhs.strides[..n_axes - 2], &strides]);
    if axes.len() > MAX_BATCH {
        return None;
    }
    let mut desc = PackBDesc::new(
        cx.isa,
        k,
        n,
        rhs.strides[n_axes - 2] as isize,
        rhs.strides[n_axes - 1] as isize,
    );
    for (dim, axis) in desc.batch[MAX_BATCH - axes.len()..].iter_mut().zip(&axes) {
        let [b_stride, packed_stride] = [0, 1].map(|i| axis.strides[i] as isize);
        *dim = PackBatchDim {
            extent: axis.extent,
            b_stride,
            packed_stride,
        };
    }
    let n_matrices: usize = batch.iter().product();
    if let Some(s) = source {
        let packed = cx.constant_panels(&s, &desc, n_matrices * per_matrix)?;
        return Some(Packed {
            ptr: Ptr::Read(Place::Packed(packed), 0),
            strides,
            at_run_time: None,
        });
    }
    let call = Call {
        symbol: "gm_pack_b_f32",
        descriptor: descriptor(&desc),
        ptrs: pointers(
            read(&rhs),
            Ptr::Null,
            Ptr::Write(Place::Temp(0), 0),
            false,
            vec![],
        ),
        workspace_bytes: 0,
        items: desc.n_items(),
        cost_ns: (n_matrices * k * n) as u64 / 4,
    };
    let bytes = n_matrices * per_matrix * 4;
    Some(Packed {
        ptr: Ptr::Read(Place::Temp(0), 0),
        strides,
        at_run_time: Some((call, bytes)),
    })
}

/// Geometry of a channels-last window op of one or two spatial axes, in the kernels' terms.
pub(super) fn kernel_window(
    x: &Strided,
    out: &[usize],
    size: &[usize],
    window: &Window,
) -> KernelWindow {
    let two = x.shape.len() == 4;
    // One spatial axis is a row of pixels.
    let pick = |values: &[usize], one: usize| {
        if two {
            [values[0], values[1]]
        } else {
            [one, values[0]]
        }
    };
    let [in_h, in_w] = pick(&x.shape[1..x.shape.len() - 1], 1);
    let [out_h, out_w] = pick(&out[1..out.len() - 1], 1);
    let [kernel_h, kernel_w] = pick(size, 1);
    let [stride_h, stride_w] = pick(&window.strides, 1);
    let [dilation_h, dilation_w] = pick(&window.dilations, 1);
    let [pad_top, pad_left] = pick(&window.pads_low, 0);
    let x_w_stride = x.strides[x.strides.len() - 2] as usize;
    KernelWindow {
        batch: x.shape[0],
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
        x_h_stride: if two {
            x.strides[1] as usize
        } else {
            in_w * x_w_stride
        },
        x_w_stride,
    }
}

/// Views that a window op can read: channels contiguous, nothing reversed.
pub(super) fn window_input_fits(v: &Strided) -> bool {
    v.strides.last() == Some(&1) && v.strides.iter().all(|&s| s >= 0)
}

/// The task of a channels-last convolution and what follows it, when the kernels can do it.
pub(super) fn conv(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    anchor(&cx.body.graph, node).ok()?;
    let Op::Conv {
        window,
        groups,
        layout: Layout::ChannelsLast,
    } = &node.op
    else {
        return None;
    };
    let shape = cx.body.shape(node.outputs[0]).to_vec();
    let rank = shape.len();
    let w_shape = cx.body.shape(node.inputs[1]).to_vec();
    if shape.contains(&0) || w_shape.contains(&0) {
        return None;
    }
    let integers = BytesProduct::find(cx, node);
    if integers.is_none() && cx.body.dtype(node.inputs[0]) != DType::F32 {
        return None;
    }
    let x = integers.as_ref().map_or_else(
        || cx.view(node.inputs[0], window_input_fits),
        |b| b.left.clone(),
    );
    let geometry = kernel_window(&x, &shape, &w_shape[..rank - 2], window);
    // A row of the kernel is an output pixel: operands must step evenly from pixel to pixel.
    let pixels = &shape[..rank - 1];
    let row_stride = |v: &Strided| match &collapse(pixels, &[&v.strides[..rank - 1]])[..] {
        [] => Some(0),
        [axis] => Some(axis.strides[0]),
        _ => None,
    };
    let (c_in, c_out) = (w_shape[rank - 2], w_shape[rank - 1]);
    let is_depthwise =
        c_in == 1 && *groups == c_out && *groups == *cx.body.shape(node.inputs[0]).last()?;
    let mut chain = chain(cx.body, node, cx.users, cx.in_memory, &|v| {
        row_stride(v).is_some()
    });
    if !is_depthwise {
        chain = chain.quantized(cx.body, cx.users, cx.in_memory);
    }
    let operands = tensors(&chain.terms);
    let (ops, mut operand_ptrs) = epilogue_ops(&chain.terms, &|i| {
        (row_stride(operands[i]).unwrap_or(0), [0; MAX_BATCH])
    });
    let out = Ptr::Write(Place::Value(chain.result), 0);
    let taps: usize = w_shape[..rank - 2].iter().product();
    let n_pixels: usize = pixels.iter().product();
    let cost_ns = cost(n_pixels * taps * c_in * c_out, n_pixels * c_out, &chain);

    if is_depthwise {
        let weights = cx.view(node.inputs[1], Strided::is_contiguous);
        let source = cx.source(
            &Strided::resolve(cx.body, node.inputs[1], cx.in_memory),
            DType::F32,
        );
        let rhs = match source.and_then(|s| cx.constant_copy(&s)) {
            Some(w) => Ptr::Read(Place::Packed(w), 0),
            None => read(&weights),
        };
        let mut desc = DepthwiseDesc::new(cx.isa, geometry, c_out);
        if !ops.into_iter().all(|op| desc.push_epilogue(op)) {
            return None;
        }
        let call = Call {
            symbol: "gm_depthwise_f32",
            descriptor: descriptor(&desc),
            ptrs: pointers(read(&x), rhs, out, false, operand_ptrs),
            workspace_bytes: 0,
            items: desc.n_items(),
            cost_ns: cost_ns * 4,
        };
        return Some(task(id, chain, vec![call], vec![], vec![]));
    }
    let ((rhs, at_run_time), span) = match &integers {
        Some(b) => ((b.right.clone(), None), b.n_words),
        None => (
            pack_conv_weights(cx, node, taps * c_in, c_out, *groups)?,
            c_in,
        ),
    };
    let mut desc = ConvDesc::new(cx.isa, geometry, *groups, span, c_out / groups);
    desc.quantize = chain.quantize;
    let nodes = integers.as_ref().map_or(&[][..], |b| &b.nodes).to_vec();
    let read_x = integers
        .as_ref()
        .map_or_else(|| read(&x), BytesProduct::read_left);
    if let Some(b) = integers {
        desc.integers = b.describe(&mut operand_ptrs, cx.body.dtype(chain.result) == DType::I32);
    }
    if !ops.into_iter().all(|op| desc.push_epilogue(op)) {
        return None;
    }
    desc.plan(cx.n_threads);
    let workspace_bytes = desc.workspace_bytes();
    let call = Call {
        symbol: "gm_conv_f32",
        descriptor: descriptor(&desc),
        ptrs: pointers(read_x, rhs, out, workspace_bytes > 0, operand_ptrs),
        workspace_bytes,
        items: desc.n_items(),
        cost_ns,
    };
    let (calls, temps) = match at_run_time {
        Some((pack, bytes)) => (vec![pack, call], vec![bytes]),
        None => (vec![call], vec![]),
    };
    Some(task(id, chain, calls, temps, nodes))
}

/// Panels per group of weights `[taps.., in / groups, out]`.
fn pack_conv_weights(
    cx: &Context,
    node: &Node,
    k: usize,
    c_out: usize,
    groups: usize,
) -> Option<(Ptr, Option<(Call, usize)>)> {
    let isa = cx.isa;
    let per_group = c_out / groups;
    let group_len = packed_len(isa, k, per_group);
    let mut desc = PackBDesc::new(cx.isa, k, per_group, c_out as isize, 1);
    desc.batch[MAX_BATCH - 1] = PackBatchDim {
        extent: groups,
        b_stride: per_group as isize,
        packed_stride: group_len as isize,
    };
    let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
    if let Some(source) = cx.source(&resolved, DType::F32) {
        let panels = constant_conv_panels(cx, &source, desc, groups * group_len)?;
        return Some((Ptr::Read(Place::Packed(panels), 0), None));
    }
    let w = cx.view(node.inputs[1], Strided::is_contiguous);
    let call = Call {
        symbol: "gm_pack_b_f32",
        descriptor: descriptor(&desc),
        ptrs: pointers(
            read(&w),
            Ptr::Null,
            Ptr::Write(Place::Temp(0), 0),
            false,
            vec![],
        ),
        workspace_bytes: 0,
        items: desc.n_items(),
        cost_ns: (k * c_out) as u64 / 4,
    };
    Some((
        Ptr::Read(Place::Temp(0), 0),
        Some((call, groups * group_len * 4)),
    ))
}

/// The panels of constant weights, whose taps and channels are rows: packed as they lie when rows have one stride, else from a copy.
fn constant_conv_panels(
    cx: &Context,
    source: &Source,
    desc: PackBDesc,
    n_elements: usize,
) -> Option<Tensor> {
    let w = &source.view;
    let last = w.shape.len() - 1;
    let (row, col) = match &collapse(&w.shape[..last], &[&w.strides[..last]])[..] {
        [] => (0, w.strides[last]),
        [axis] => (axis.strides[0], w.strides[last]),
        _ => return cx.panels_of_copy(source, &desc, n_elements),
    };
    let mut desc = desc;
    let per_group = desc.n as i64;
    (desc.row_stride, desc.col_stride) = (row as isize, col as isize);
    desc.batch[MAX_BATCH - 1].b_stride = (per_group * col) as isize;
    cx.constant_panels(source, &desc, n_elements)
}
