//! Which ops may join which kind of cluster.

use super::strided::Strided;
use crate::ir::{ClusterKind, Graph, Layout, Node, Op, OpClass, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Kind of the cluster that an op founds, if it founds one.
pub fn kind_of(op: &Op) -> Option<ClusterKind> {
    Some(match op.class() {
        OpClass::Map | OpClass::View => ClusterKind::Map,
        OpClass::Source if !matches!(op, Op::Constant { .. }) => ClusterKind::Map,
        OpClass::Reduce => ClusterKind::Reduce,
        OpClass::Contract => ClusterKind::Contract,
        OpClass::Window => ClusterKind::Window,
        OpClass::Attention => ClusterKind::Attention,
        OpClass::Gather => ClusterKind::Gather,
        OpClass::Scatter => ClusterKind::Scatter,
        OpClass::Sort => ClusterKind::Sort,
        OpClass::Scan => ClusterKind::Scan,
        _ => return None,
    })
}

/// Number of elements of a value; 0 when a shape is not static, which the pass excludes.
pub fn n_elements(g: &Graph, v: ValueId) -> usize {
    g.ty(v).static_shape().map_or(0, |s| s.iter().product())
}

/// True for ops that cost nothing as an index map of a loop: an affine read whose innermost axis stays innermost.
pub fn is_foldable_view(g: &Graph, node: &Node) -> bool {
    match &node.op {
        Op::Reshape { .. } | Op::Broadcast { .. } | Op::Slice { .. } => true,
        Op::Transpose { perm } => keeps_inner_axis(g, node.inputs[0], perm),
        _ => false,
    }
}

/// True when the last axis of more than one element stays last.
pub fn keeps_inner_axis(g: &Graph, x: ValueId, perm: &[usize]) -> bool {
    let Some(shape) = g.ty(x).static_shape() else { return false };
    let wide = |axes: &mut dyn Iterator<Item = usize>| axes.filter(|&a| shape[a] > 1).last();
    wide(&mut (0..shape.len())) == wide(&mut perm.iter().copied())
}

/// Whether the contraction or attention `node` can read operand `i` through the views that define it, by strides.
pub fn reads_by_strides(g: &Graph, node: &Node, i: usize) -> bool {
    if g.ty(node.inputs[i]).dtype != DType::F32 {
        return false;
    }
    let Some(view) = Strided::of(g, node.inputs[i], &|_| false) else { return false };
    match node.op {
        // The right-hand side is packed, which takes any strides.
        Op::MatMul => i == 1 || view.has_unit_inner_stride(),
        Op::Attention { .. } => view.has_unit_inner_stride(),
        _ => false,
    }
}

/// Element-wise ops that the contraction kernels apply to a tile in registers or L1.
fn is_tile_activation(op: ScalarOp) -> bool {
    use ScalarOp::*;
    matches!(
        op,
        Relu | ClampTo { .. }
            | Gelu
            | GeluTanh
            | Silu
            | Sigmoid
            | Tanh
            | HardSwish
            | HardSigmoid { .. }
            | LeakyRelu { .. }
            | Exp
    )
}

/// Whether element-wise `node`, one operand of which is `chain`, can run on the result tile of a contraction. Errors say why not.
pub fn is_epilogue(g: &Graph, node: &Node, chain: ValueId) -> Result<(), String> {
    let Op::Map(op) = node.op else { return Err(format!("{} is not element-wise", node.op.name())) };
    let (from, to) = (g.ty(chain), g.ty(node.outputs[0]));
    if to.dtype != DType::F32 || from.dtype != DType::F32 || from.shape != to.shape {
        return Err(format!("changes {from} to {to}"));
    }
    if op.spec().arity == 1 {
        return if is_tile_activation(op) { Ok(()) } else { Err(format!("no tile form of {op}")) };
    }
    let others: Vec<ValueId> = node.inputs.iter().copied().filter(|&v| v != chain).collect();
    let [other] = others[..] else { return Err("uses the result twice".into()) };
    if !matches!(op, ScalarOp::Add | ScalarOp::Mul) {
        return Err(format!("no tile form of {op}"));
    }
    let shape = &g.ty(other).shape;
    let n = to.shape.last();
    let is_scalar = shape.iter().all(|d| d.is(1)) && g.constant(other).is_some();
    let is_row = shape.last() == n && shape.iter().rev().skip(1).all(|d| d.is(1));
    if is_scalar || is_row || *shape == to.shape {
        Ok(())
    } else {
        Err(format!("operand {} is neither a scalar, a row nor of the result's shape", g.ty(other)))
    }
}

/// Whether `anchor` is of the kind that takes element-wise epilogues on its tiles.
pub fn takes_epilogue(g: &Graph, anchor: &Node) -> bool {
    g.ty(anchor.outputs[0]).dtype == DType::F32
        && matches!(&anchor.op, Op::MatMul | Op::Conv { layout: Layout::ChannelsLast, .. })
}
