//! Which ops alone have vector code or a precompiled kernel, told from op, dtypes and ranks: capability reports ask before shapes are
//! known. The rest is computed by generated loops over single elements.

use super::body::tiles_output;
use super::vector;
use crate::cluster::bytes;
use crate::ir::{Graph, Node, Op, OpClass, ReduceKind};
use gristmill_runtime::DType;

/// True when vector code or a precompiled kernel computes the node, views and what the executor does itself included.
pub fn is_native(g: &Graph, node: &Node) -> bool {
    let dtypes: Vec<DType> = node.inputs.iter().map(|&v| g.ty(v).dtype).collect();
    let f32_only = dtypes.iter().all(|&d| d == DType::F32);
    let rank = |i: usize| g.ty(node.inputs[i]).rank();
    match &node.op {
        Op::Map(op) => vector::takes(*op, &dtypes),
        Op::Constant { .. } | Op::TopK { .. } => true,
        Op::Pad { .. } => false,
        Op::Conv { .. } | Op::MatMul if bytes::product(g, node).is_some() => true,
        Op::MatMul | Op::LayerNorm { .. } | Op::RmsNorm { .. } => f32_only,
        Op::Conv { .. } | Op::Pool { .. } => f32_only && matches!(rank(0), 3 | 4),
        Op::ConvTranspose { .. } => tiles_output(g, &node.op, &node.inputs),
        Op::Softmax { axis, .. } => f32_only && axis + 1 == rank(0),
        Op::Reduce { kind, axes, .. } => f32_only && reduces_rows(*kind, axes, rank(0)),
        Op::Attention { .. } => f32_only && rank(0) <= 4,
        op => matches!(
            op.class(),
            OpClass::View | OpClass::Control | OpClass::State | OpClass::Transfer
        ),
    }
}

/// Neighbouring axes: the last ones, or any of a mean.
fn reduces_rows(kind: ReduceKind, axes: &[usize], rank: usize) -> bool {
    let (Some(first), Some(last)) = (axes.first(), axes.last()) else {
        return false;
    };
    last - first + 1 == axes.len() && (last + 1 == rank || kind == ReduceKind::Mean)
}
