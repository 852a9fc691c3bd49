//! Softmax, normalisation, reductions, pooling, attention and copies of `f32` (copies: of any dtype) through precompiled kernels.

use super::body::Body;
use super::contract::{kernel_window, window_input_fits};
use super::strided::{Axis, Strided, collapse, row_major};
use super::task::{Call, Context, Place, Ptr, Task, descriptor, pointers, read};
use crate::cluster::legal::reduces_stored;
use crate::ir::{Layout, Node, NodeId, Op, PoolKind, ReduceKind, ValueId};
use gristmill_kernels::Isa;
use gristmill_kernels::attention::AttentionDesc;
use gristmill_kernels::copy::CopyDesc;
use gristmill_kernels::epilogue::MAX_BATCH;
use gristmill_kernels::pool::{self, PoolDesc};
use gristmill_kernels::rows::{
    self, NormDesc, NormKind, ReduceDesc, RowDim, SoftmaxDesc, SoftmaxKind,
};
use gristmill_runtime::DType;

/// Rows of the operand and where each one's result goes.
struct Rows {
    dims: [RowDim; MAX_BATCH],
    n_rows: usize,
    n_cols: usize,
}

/// The rows of `x` over the axes from `axis` on; results are `y_cols` elements apart. `None` when a row is not contiguous or there are
/// too many loops.
fn rows_of(x: &Strided, axis: usize, y_cols: usize) -> Option<Rows> {
    let (outer, inner) = x.shape.split_at(axis);
    match &collapse(inner, &[&x.strides[axis..]])[..] {
        [] => {}
        [one] if one.strides[0] == 1 => {}
        _ => return None,
    }
    let y: Vec<i64> = row_major(outer)
        .into_iter()
        .map(|s| s * y_cols as i64)
        .collect();
    let axes = collapse(outer, &[&x.strides[..axis], &y]);
    let mut dims = [RowDim::default(); MAX_BATCH];
    let first = MAX_BATCH.checked_sub(axes.len())?;
    for (dim, Axis { extent, strides }) in dims[first..].iter_mut().zip(&axes) {
        (dim.extent, dim.x_stride, dim.y_stride) =
            (*extent, strides[0] as isize, strides[1] as isize);
    }
    Some(Rows {
        dims,
        n_rows: outer.iter().product(),
        n_cols: inner.iter().product(),
    })
}

/// A task of one node and one call.
fn single(cx: &Context, id: NodeId, node: &Node, call: Call) -> Option<Task> {
    let result = node.outputs[0];
    let empty = cx.body.n_elements(result) == 0 || call.items == 0;
    (!empty).then(|| Task {
        calls: vec![call],
        temps: vec![],
        nodes: vec![id],
        result,
    })
}

fn is_f32(cx: &Context, node: &Node) -> bool {
    cx.body.dtype(node.inputs[0]) == DType::F32
}

fn output(node: &Node) -> Ptr {
    Ptr::Write(Place::Value(node.outputs[0]), 0)
}

fn call(
    symbol: &'static str,
    descriptor: gristmill_runtime::Tensor,
    ptrs: Vec<Ptr>,
    items: usize,
    ns: f64,
) -> Call {
    Call {
        symbol,
        descriptor,
        ptrs,
        workspace_bytes: 0,
        items,
        cost_ns: ns as u64,
    }
}

/// Softmax over the last axis.
pub(super) fn softmax(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    let Op::Softmax { axis, log } = node.op else {
        return None;
    };
    let n_cols = *cx.body.shape(node.inputs[0]).last()?;
    let x = cx.view(node.inputs[0], |v| rows_of(v, axis, n_cols).is_some());
    let rows = rows_of(&x, axis, n_cols)?;
    let kind = if log {
        SoftmaxKind::LogSoftmax
    } else {
        SoftmaxKind::Softmax
    };
    let desc = SoftmaxDesc {
        rows: rows.dims,
        ..SoftmaxDesc::new(cx.isa, kind, rows.n_rows, rows.n_cols)
    };
    let ptrs = pointers(read(&x), Ptr::Null, output(node), false, vec![]);
    let ns = (rows.n_rows * rows.n_cols) as f64 * 0.3;
    single(
        cx,
        id,
        node,
        call("gm_softmax_f32", descriptor(&desc), ptrs, rows.n_rows, ns),
    )
}

/// Layer and root-mean-square normalisation.
pub(super) fn norm(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    let (axis, epsilon, kind) = match node.op {
        Op::LayerNorm { axis, epsilon } => (axis, epsilon, NormKind::Layer),
        Op::RmsNorm { axis, epsilon } => (axis, epsilon, NormKind::Rms),
        _ => return None,
    };
    let n_cols = cx.body.shape(node.inputs[0])[axis..].iter().product();
    let x = cx.view(node.inputs[0], |v| rows_of(v, axis, n_cols).is_some());
    let rows = rows_of(&x, axis, n_cols)?;
    let desc = NormDesc {
        rows: rows.dims,
        ..NormDesc::new(cx.isa, kind, rows.n_rows, rows.n_cols, epsilon.0 as f32)
    };
    let vector = |i: usize| {
        node.inputs
            .get(i)
            .map(|&v| read(&cx.view(v, Strided::is_contiguous)))
    };
    let beta = vector(2).unwrap_or(Ptr::Null);
    let ptrs = pointers(read(&x), vector(1)?, output(node), false, vec![beta]);
    let ns = (rows.n_rows * rows.n_cols) as f64 * 0.1;
    single(
        cx,
        id,
        node,
        call("gm_norm_f32", descriptor(&desc), ptrs, rows.n_rows, ns),
    )
}

/// Reductions of trailing axes, and means of axes before trailing ones.
pub(super) fn reduce(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    let Op::Reduce { kind, axes, .. } = &node.op else {
        return None;
    };
    let shape = cx.body.shape(node.inputs[0]).to_vec();
    let (&first, &last) = (axes.first()?, axes.last()?);
    if !reduces_stored(&cx.body.graph, node) || shape.contains(&0) {
        return None;
    }
    if last + 1 != shape.len() {
        return mean_of_middle_axes(cx, id, node, *kind, first, last + 1);
    }
    let x = cx.view(node.inputs[0], |v| rows_of(v, first, 1).is_some());
    let rows = rows_of(&x, first, 1)?;
    let kind = match kind {
        ReduceKind::Sum => rows::ReduceKind::Sum,
        ReduceKind::Mean => rows::ReduceKind::Mean,
        ReduceKind::Max => rows::ReduceKind::Max,
        ReduceKind::Min => rows::ReduceKind::Min,
        ReduceKind::Prod => rows::ReduceKind::Product,
    };
    let desc = ReduceDesc {
        rows: rows.dims,
        ..ReduceDesc::new(cx.isa, kind, rows.n_rows, rows.n_cols)
    };
    let ptrs = pointers(read(&x), Ptr::Null, output(node), false, vec![]);
    let ns = (rows.n_rows * rows.n_cols) as f64 * 0.06 + rows.n_rows as f64 * 10.0;
    single(
        cx,
        id,
        node,
        call("gm_reduce_f32", descriptor(&desc), ptrs, rows.n_rows, ns),
    )
}

/// The mean over axes `first..end` with the axes after them kept: pooling with a window of the whole image.
fn mean_of_middle_axes(
    cx: &Context,
    id: NodeId,
    node: &Node,
    kind: ReduceKind,
    first: usize,
    end: usize,
) -> Option<Task> {
    if kind != ReduceKind::Mean {
        return None;
    }
    let x = cx.view(node.inputs[0], Strided::is_contiguous);
    let product = |s: &[usize]| s.iter().product::<usize>();
    let (batch, pixels, channels) = (
        product(&x.shape[..first]),
        product(&x.shape[first..end]),
        product(&x.shape[end..]),
    );
    let window = gristmill_kernels::window::Window::new(batch, pixels, 1, channels, pixels, 1);
    let desc = PoolDesc::new(cx.isa, pool::PoolKind::AverageValid, window, channels);
    let ptrs = pointers(read(&x), Ptr::Null, output(node), false, vec![]);
    let ns = (batch * pixels * channels) as f64 * 0.1;
    single(
        cx,
        id,
        node,
        call("gm_pool_f32", descriptor(&desc), ptrs, desc.n_items(), ns),
    )
}

/// Channels-last pooling.
pub(super) fn pooling(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    let Op::Pool {
        kind,
        size,
        window,
        layout: Layout::ChannelsLast,
        ..
    } = &node.op
    else {
        return None;
    };
    let (shape, out) = (
        cx.body.shape(node.inputs[0]).to_vec(),
        cx.body.shape(node.outputs[0]).to_vec(),
    );
    if !is_f32(cx, node) || !matches!(shape.len(), 3 | 4) || shape.contains(&0) {
        return None;
    }
    let x = cx.view(node.inputs[0], window_input_fits);
    let kind = match kind {
        PoolKind::Max => pool::PoolKind::Max,
        PoolKind::Avg => pool::PoolKind::AverageValid,
        PoolKind::AvgIncludePad => pool::PoolKind::AveragePadded,
    };
    let mut desc = PoolDesc::new(
        cx.isa,
        kind,
        kernel_window(&x, &out, size, window),
        *shape.last()?,
    );
    (desc.pad_bottom, desc.pad_right) = match window.pads_high[..] {
        [one] => (0, one),
        [high, right] => (high, right),
        _ => return None,
    };
    let ptrs = pointers(read(&x), Ptr::Null, output(node), false, vec![]);
    let taps: usize = size.iter().product();
    let ns = (out.iter().product::<usize>() * taps) as f64 * 0.1;
    single(
        cx,
        id,
        node,
        call("gm_pool_f32", descriptor(&desc), ptrs, desc.n_items(), ns),
    )
}

/// Batch, head and row strides of an attention operand `[.., rows, depth]`, whose leading axes must collapse to two.
fn head_strides(x: &Strided, lead: &[Axis], operand: usize) -> [isize; 3] {
    let row = x.strides[x.strides.len() - 2] as isize;
    let at = |i: usize| lead.get(i).map_or(0, |axis| axis.strides[operand] as isize);
    match lead.len() {
        2 => [at(0), at(1), row],
        _ => [0, at(0), row],
    }
}

/// Fused attention.
pub(super) fn attention(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    let Op::Attention { scale, causal } = node.op else {
        return None;
    };
    let out = cx.body.shape(node.outputs[0]).to_vec();
    let rank = out.len();
    let unit = |v: &Strided| v.strides.last() == Some(&1) && v.strides.iter().all(|&s| s >= 0);
    let [q, k, v] = [0, 1, 2].map(|i| cx.view(node.inputs[i], unit));
    let (n_queries, n_keys) = (out[rank - 2], k.shape[rank - 2]);
    let scores: Vec<usize> = out[..rank - 1].iter().copied().chain([n_keys]).collect();
    let mask = match node.inputs.get(3) {
        None => None,
        Some(&m) => {
            let fits = |v: &Strided| v.strides.last() == Some(&1) || n_keys == 1;
            let through = Strided::resolve(cx.body, m, cx.in_memory)
                .broadcast(&scores)
                .filter(fits);
            Some(through.or_else(|| Strided::own(cx.body, m).broadcast(&scores).filter(fits))?)
        }
    };
    let (lead, o) = (&out[..rank - 2], row_major(&out));
    let mut strides: Vec<&[i64]> = [&q, &k, &v].map(|t| &t.strides[..rank - 2]).to_vec();
    strides.push(&o[..rank - 2]);
    strides.extend(mask.iter().map(|m| &m.strides[..rank - 2]));
    let lead = collapse(lead, &strides);
    if lead.len() > 2 || n_keys == 0 {
        return None;
    }
    let extent = |i: usize| lead.get(i).map_or(1, |axis| axis.extent);
    let (batch, heads) = if lead.len() == 2 {
        (extent(0), extent(1))
    } else {
        (1, extent(0))
    };
    let mut desc = AttentionDesc::new(cx.isa, batch, heads, n_queries, n_keys, q.shape[rank - 1]);
    desc.causal = u32::from(causal);
    desc.scale = scale.0 as f32;
    desc.value_depth = out[rank - 1];
    desc.q_stride = head_strides(&q, &lead, 0);
    desc.k_stride = head_strides(&k, &lead, 1);
    desc.v_stride = head_strides(&v, &lead, 2);
    let dense = Strided {
        base: node.outputs[0],
        offset: 0,
        shape: out.clone(),
        strides: o.clone(),
    };
    desc.o_stride = head_strides(&dense, &lead, 3);
    let mut operands = vec![read(&v), Ptr::Null];
    if let Some(m) = &mask {
        desc.mask_stride = head_strides(m, &lead, 4);
        operands[1] = read(m);
    }
    let workspace_bytes = desc.workspace_bytes();
    let ptrs = pointers(read(&q), read(&k), output(node), true, operands);
    let ns = (batch * heads * n_queries * n_keys * (desc.depth + desc.value_depth)) as f64 * 0.015;
    let call = Call {
        workspace_bytes,
        ..call(
            "gm_attention_f32",
            descriptor(&desc),
            ptrs,
            desc.n_items(),
            ns,
        )
    };
    single(cx, id, node, call)
}

/// A copy of a view into `out`, whose strides are given, from element `at` on.
pub(super) fn copy(
    isa: Isa,
    body: &Body,
    x: &Strided,
    out: ValueId,
    strides: &[i64],
    at: i64,
) -> Option<Call> {
    let bytes = body.dtype(x.base).size_bytes();
    let axes = collapse(&x.shape, &[&x.strides, strides]);
    let dims: Vec<_> = axes
        .iter()
        .map(|a| (a.extent, a.strides[0] as isize, a.strides[1] as isize))
        .collect();
    let desc = CopyDesc::new(isa, bytes as u32, &dims)?;
    let from = Ptr::Read(Place::Value(x.base), x.offset * bytes as i64);
    let to = Ptr::Write(Place::Value(out), at * bytes as i64);
    let n: usize = x.shape.iter().product();
    let ptrs = pointers(from, Ptr::Null, to, false, vec![]);
    Some(call(
        "gm_copy",
        descriptor(&desc),
        ptrs,
        desc.n_items(),
        (n * bytes) as f64 * 0.1,
    ))
}
