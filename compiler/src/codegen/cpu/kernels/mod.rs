//! Tasks of precompiled kernels: a file per family finds operands, and makes the calls.

mod attention;
mod bytes;
mod convolution;
mod epilogue;
mod pack;
mod product;
mod quantize;
mod random;
mod range;
mod reduce;
mod regions;
mod rows;
mod sample;
mod standardize;
mod table;
mod weights;
mod windows;
mod winograd;

use super::task::{Context, Task};
use super::{rejected, strided, task};
use crate::cluster::bytes::left_side;
use crate::cluster::coverage::{self, KernelFamily};
use crate::ir::{Graph, Node, NodeId};
use rejected::Rejected;

/// The task that computes a node and ops before it, beside it, or that follow on its result.
///
/// Errors tell why loops compute the node.
pub(super) fn match_task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let g = &cx.body.graph;
    let several = range::task(cx, node).or_else(|| quantize::task(cx, id, node));
    if let Some(task) = several {
        return Ok(task);
    }
    // Constants are operands inside of a body: products of bytes look like those of other integers.
    let row = match left_side(g, node) {
        Some(_) => coverage::row(&node.op)?,
        None => coverage::kernels(g, node)?,
    };
    let task = match row.family {
        KernelFamily::Product => product::task,
        KernelFamily::Convolution => convolution::task,
        KernelFamily::Pooling => windows::pooling,
        KernelFamily::Samples => sample::task,
        KernelFamily::Regions => regions::task,
        KernelFamily::Softmax => rows::softmax,
        KernelFamily::Normalisation => rows::norm,
        KernelFamily::Standardisation => standardize::task,
        KernelFamily::Reduction => reduce::task,
        KernelFamily::Attention => attention::task,
        KernelFamily::RandomBits => random::task,
        KernelFamily::Table => table::task,
    };
    task(cx, id, node)
}

/// True when a composite op stays whole, because a kernel computes it as it is.
pub(super) fn has_kernel(graph: &Graph, node: &Node) -> bool {
    is_filled(graph, node) && coverage::kernels(graph, node).is_ok_and(|row| row.is_composite)
}

/// True when no operand is empty.
fn is_filled(graph: &Graph, node: &Node) -> bool {
    let shapes = node.inputs.iter().map(|&v| graph.ty(v).static_shape());
    let mut filled = shapes.map(|s| s.is_some_and(|s| !s.contains(&0)));
    filled.all(|is_filled| is_filled)
}
