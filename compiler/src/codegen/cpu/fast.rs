//! Which nodes of a body the precompiled kernels compute.

use super::contract;
use super::task::{Context, Task};
use crate::ir::{Graph, Node, NodeId, Op};

/// Whether a composite op stays whole, because a kernel computes it as it is.
pub(super) fn has_kernel(_graph: &Graph, _node: &Node) -> bool {
    false
}

/// The task that computes a node and what follows it, if there is one.
pub(super) fn match_task(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    match &node.op {
        Op::MatMul => contract::gemm(cx, id, node),
        Op::Conv { .. } => contract::conv(cx, id, node),
        _ => None,
    }
}
