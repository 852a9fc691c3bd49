//! Which nodes of a body the precompiled kernels compute.

use super::task::{Context, Task};
use super::{contract, rows};
use crate::ir::{Graph, Node, NodeId, Op};
use gristmill_runtime::DType;

/// Whether a composite op stays whole, because a kernel computes it as it is.
pub(super) fn has_kernel(graph: &Graph, node: &Node) -> bool {
    let x = graph.ty(node.inputs[0]);
    if x.dtype != DType::F32 || x.static_shape().is_none_or(|s| s.contains(&0)) {
        return false;
    }
    match &node.op {
        // A contiguous row and at most one loop around it are certain only after a copy, which the matcher asks for.
        Op::Softmax { axis, .. } => axis + 1 == x.rank(),
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => true,
        Op::Attention { .. } => x.rank() <= 4 && attention_mask_fits(graph, node),
        _ => false,
    }
}

/// The kernel reads masks with contiguous key axes.
fn attention_mask_fits(graph: &Graph, node: &Node) -> bool {
    let keys = |rank: usize| graph.ty(node.inputs[1]).shape[rank - 2].clone();
    let extents = |i: usize| graph.ty(node.inputs[i]).static_shape();
    let filled = (0..3).all(|i| extents(i).is_some_and(|s| !s.contains(&0)));
    filled
        && node.inputs.get(3).is_none_or(|&m| {
            graph.ty(m).shape.last() == Some(&keys(graph.ty(node.inputs[1]).rank()))
        })
}

/// The task that computes a node and what follows it, if there is one.
pub(super) fn match_task(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    match &node.op {
        Op::MatMul => contract::gemm(cx, id, node),
        Op::Conv { .. } => contract::conv(cx, id, node),
        Op::Softmax { .. } => rows::softmax(cx, id, node),
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => rows::norm(cx, id, node),
        Op::Reduce { .. } => rows::reduce(cx, id, node),
        Op::Pool { .. } => rows::pooling(cx, id, node),
        Op::Attention { .. } => rows::attention(cx, id, node),
        _ => None,
    }
}
