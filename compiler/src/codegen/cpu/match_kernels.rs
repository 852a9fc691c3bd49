//! Finds the precompiled kernel that computes the anchor of a body, and the ops that it takes along.

use super::rejected::Rejected;
use super::task::{Context, Task};
use super::{attention, convolution, product, random, reduce, regions, rows, standardize, windows};
use crate::cluster::bytes;
use crate::cluster::coverage::{self, KernelFamily};
use crate::ir::{Graph, Node, NodeId, Op};

/// True for ops that are written out where no kernel computes them.
pub(super) fn is_composite(op: &Op) -> bool {
    matches!(
        op,
        Op::Softmax { .. }
            | Op::LayerNorm { .. }
            | Op::RmsNorm { .. }
            | Op::Standardize { .. }
            | Op::Attention { .. }
    )
}

/// True when a composite op stays whole, because a kernel computes it as it is.
pub(super) fn has_kernel(graph: &Graph, node: &Node) -> bool {
    is_composite(&node.op) && is_filled(graph, node) && coverage::kernels(graph, node).is_ok()
}

/// True when no operand is empty.
fn is_filled(graph: &Graph, node: &Node) -> bool {
    let shapes = node.inputs.iter().map(|&v| graph.ty(v).static_shape());
    let mut filled = shapes.map(|s| s.is_some_and(|s| !s.contains(&0)));
    filled.all(|is_filled| is_filled)
}

/// The task that computes a node and the ops that follow on its result.
///
/// Errors tell why loops compute the node.
pub(super) fn match_task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    match family(cx, node)? {
        KernelFamily::Product | KernelFamily::ByteProduct => product::task(cx, id, node),
        KernelFamily::Convolution | KernelFamily::ByteConvolution => {
            convolution::task(cx, id, node)
        }
        KernelFamily::Pooling => windows::pooling(cx, id, node),
        KernelFamily::Regions => regions::task(cx, id, node),
        KernelFamily::Softmax => rows::softmax(cx, id, node),
        KernelFamily::Normalisation => rows::norm(cx, id, node),
        KernelFamily::Standardisation => standardize::task(cx, id, node),
        KernelFamily::Reduction => reduce::task(cx, id, node),
        KernelFamily::Attention => attention::task(cx, id, node),
        KernelFamily::RandomBits => random::task(cx, id, node),
    }
}

/// Inside of a body, constants are operands, so that bytes multiplied by one cannot be told by the node alone.
fn family(cx: &Context, node: &Node) -> Result<KernelFamily, Rejected> {
    let g = &cx.body.graph;
    match (&node.op, bytes::left_side(g, node)) {
        (Op::MatMul, Some(_)) => Ok(KernelFamily::ByteProduct),
        (_, Some(_)) => Ok(KernelFamily::ByteConvolution),
        (_, None) => Ok(coverage::kernels(g, node)?),
    }
}
