//! Fusion around a kernel with barriers: operands that it pulls, and the element-wise ops of its
//! epilogue.

use super::emit::{Emitter, Value};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Puller, broadcast_index};
use crate::error::Result;
use crate::ir::{Node, NodeId, Op, OpClass, ValueId};

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

/// A node and the last result of its epilogue, the element-wise ops fused after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FusedNode {
    pub(super) id: NodeId,
    pub(super) result: ValueId,
}

impl FusedNode {
    /// Node `id` with the element-wise ops that alone use its result, one after the other; and the
    /// values and nodes of this kernel, which needs `needs` in memory.
    pub(super) fn find(
        body: &Body,
        around: &MatchContext,
        id: NodeId,
        needs: Vec<ValueId>,
    ) -> (FusedNode, Cover) {
        let (mut nodes, mut result) = (vec![id], body.graph.node(id).outputs[0]);
        let mut budget = EPILOGUE_FLOPS;
        while let Some((user, cost)) = follower(body, around, result).filter(|f| f.1 <= budget) {
            budget -= cost;
            nodes.push(user);
            result = body.graph.node(user).outputs[0];
        }
        let results = vec![result];
        let cover = Cover {
            needs,
            nodes,
            results,
        };
        (FusedNode { id, result }, cover)
    }

    /// The node before its epilogue.
    pub(super) fn of<'a>(&self, body: &'a Body) -> &'a Node {
        body.graph.node(self.id)
    }

    /// Result of the node before its epilogue.
    pub(super) fn own(&self, body: &Body) -> ValueId {
        self.of(body).outputs[0]
    }

    /// Epilogue of `value`, element `at` of the node's own result before rounding to its dtype.
    pub(super) fn epilogue(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        value: Value,
    ) -> Result<Value> {
        let own = self.own(p.body);
        let value = e.cast(value, p.body.dtype(own))?;
        // Element-wise ops ask for index 0 of an axis of one element, whatever the index in their
        // result is called.
        let at = &broadcast_index(p.body.shape(own), at);
        p.scoped(|p| {
            p.remember(own, at, value);
            p.value(e, self.result, at)
        })
    }

    /// Stores the [`FusedNode::epilogue`] of an element.
    pub(super) fn store(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        value: Value,
        out: Value,
    ) -> Result<()> {
        let value = self.epilogue(p, e, at, value)?;
        let linear = e.linearise(at, p.body.shape(self.result));
        e.store(p.body.dtype(self.result), value, out, linear);
        Ok(())
    }
}

/// The op that alone uses `value`, if it can be fused, and its operations per element.
fn follower(body: &Body, around: &MatchContext, value: ValueId) -> Option<(NodeId, u32)> {
    let users = &around.users[value.0 as usize];
    let user = users.first()?.0;
    let node = body.graph.node(user);
    let Op::Map(op) = &node.op else { return None };
    let is_output = body.graph.outputs.iter().any(|o| o.value == value);
    let is_shared = is_output || users.iter().any(|u| u.0 != user);
    if is_shared || body.shape(node.outputs[0]) != body.shape(value) {
        return None;
    }
    let mut cost = op.spec().flops;
    for &other in node.inputs.iter().filter(|v| **v != value) {
        cost += flops(body, around, other)?;
    }
    Some((user, cost))
}
