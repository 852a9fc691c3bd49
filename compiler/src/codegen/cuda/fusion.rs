//! Fusion around a kernel with barriers: operands that it pulls, and the element-wise ops of its
//! epilogue.

use crate::codegen::body::Body;
use crate::codegen::phases::MatchContext;
use crate::ir::{NodeId, Op, OpClass, ValueId};

/// Most ops that one pulled value may stand for.
const MAX_OPS: u32 = 64;
/// Most operations per element in all of a result's followers.
const EPILOGUE_FLOPS: u32 = 128;

/// Operations per element that pulling `v` takes; `None` when it cannot be pulled between the barriers of a block, or is large.
pub(super) fn flops(body: &Body, around: &MatchContext, v: ValueId) -> Option<u32> {
    let mut left = MAX_OPS;
    flops_within(body, around, v, &mut left)
}

/// The operands that are stored first: each is given with the operations per element up to which it
/// is fused.
pub(super) fn stored_before(
    body: &Body,
    around: &MatchContext,
    operands: impl IntoIterator<Item = (ValueId, u32)>,
) -> Vec<ValueId> {
    let is_dear = |&(v, most): &(ValueId, u32)| flops(body, around, v).is_none_or(|f| f > most);
    operands.into_iter().filter(is_dear).map(|o| o.0).collect()
}

fn flops_within(body: &Body, around: &MatchContext, v: ValueId, left: &mut u32) -> Option<u32> {
    if (around.in_memory)(v) {
        return Some(0);
    }
    *left = left.checked_sub(1)?;
    let node = body.graph.def_node(v)?;
    let own = match &node.op {
        Op::Map(op) => op.spec().flops,
        op if matches!(op.class(), OpClass::View | OpClass::Source) => 0,
        _ => return None,
    };
    node.inputs.iter().try_fold(own, |sum, &x| {
        Some(sum + flops_within(body, around, x, left)?)
    })
}

/// The element-wise ops that alone use the result of node `id`, one after the other, and the last one's result. The first of the nodes is
/// `id` itself.
pub(super) fn followers(body: &Body, around: &MatchContext, id: NodeId) -> (Vec<NodeId>, ValueId) {
    let (mut nodes, mut value, mut budget) =
        (vec![id], body.graph.node(id).outputs[0], EPILOGUE_FLOPS);
    while let Some((user, cost)) = follower(body, around, value).filter(|f| f.1 <= budget) {
        budget -= cost;
        nodes.push(user);
        value = body.graph.node(user).outputs[0];
    }
    (nodes, value)
}

fn follower(body: &Body, around: &MatchContext, value: ValueId) -> Option<(NodeId, u32)> {
    let users = &around.users[value.0 as usize];
    let user = users.first()?.0;
    let is_output = body.graph.outputs.iter().any(|o| o.value == value);
    let node = body.graph.node(user);
    let Op::Map(op) = &node.op else { return None };
    if is_output
        || users.iter().any(|u| u.0 != user)
        || body.shape(node.outputs[0]) != body.shape(value)
    {
        return None;
    }
    let others = node.inputs.iter().filter(|v| **v != value);
    let cost = others
        .map(|&v| flops(body, around, v))
        .try_fold(op.spec().flops, |sum, f| Some(sum + f?))?;
    Some((user, cost))
}
