//! Merges matrix products of one left-hand side with constant right-hand sides (query, key and
//! value; gate and up) into one.

use super::Rebuild;
use crate::error::Result;
use crate::interp;
use crate::ir::constant::DEFER_BYTES;
use crate::ir::{
    ConstData, Dim, Graph, Node, NodeId, Op, OpClass, Requested, ScalarOp, Shape, ValueId,
};
use gristmill_runtime::Tensor;
use std::collections::BTreeMap;

/// One product and the bias that follows it alone, if any.
struct Member {
    node: NodeId,
    n_columns: usize,
    weights: ConstData,
    bias: Option<(NodeId, ConstData)>,
}

/// Replaces products `x w1, x w2, ..` with constant weights `[k, n_i]` by slices of one
/// `x [w1 w2 ..]`; biases are merged when all have one.
///
/// One wide product reads `x` once and fills the register tiles better; its consumers read the
/// slices by strides. Large weights that something else reads too stay apart, since merging would
/// copy them; so do products of integers, whose scales and quantisation follow on their tiles but
/// not behind a slice.
pub fn merge_matmuls(g: &Graph) -> Result<Graph> {
    let groups = find_groups(g);
    if groups.is_empty() {
        return Ok(g.clone());
    }
    let mut first_of: BTreeMap<NodeId, &Vec<Member>> = BTreeMap::new();
    let mut replaced: Vec<bool> = vec![false; g.n_nodes()];
    for members in &groups {
        first_of.insert(members[0].node, members);
        for m in members {
            replaced[m.node.0 as usize] = true;
            if let Some((bias, _)) = m.bias {
                replaced[bias.0 as usize] = true;
            }
        }
    }
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        if let Some(members) = first_of.get(&id) {
            emit(g, &mut r, node, members)?;
        } else if !replaced[id.0 as usize] {
            r.copy(id, node)?;
        }
    }
    Ok(r.finish(g))
}

/// Groups of at least two products without control edges; each group shares its left-hand side,
/// dtype and device.
fn find_groups(g: &Graph) -> Vec<Vec<Member>> {
    let uses = Uses {
        users: g.users(),
        ordered: g.ordered(),
    };
    let mut by_lhs: BTreeMap<(ValueId, Requested), Vec<Member>> = BTreeMap::new();
    for (id, node) in g.nodes() {
        if let Some(member) = uses.member(g, id, node) {
            let key = (node.inputs[0], node.device.clone());
            by_lhs.entry(key).or_default().push(member);
        }
    }
    let mut groups: Vec<Vec<Member>> = by_lhs.into_values().filter(|m| m.len() > 1).collect();
    for members in &mut groups {
        // A partial set of biases stays with the slices.
        if members.iter().any(|m| m.bias.is_none()) {
            members.iter_mut().for_each(|m| m.bias = None);
        }
    }
    groups
}

/// Users of each value, and the nodes with control edges.
struct Uses {
    users: Vec<Vec<(NodeId, usize)>>,
    ordered: Vec<bool>,
}

impl Uses {
    /// The product that a node is, if it may be merged.
    fn member(&self, g: &Graph, id: NodeId, node: &Node) -> Option<Member> {
        let is_int = |v: ValueId| g.ty(v).dtype.is_int();
        if node.op != Op::MatMul || self.ordered[id.0 as usize] || is_int(node.outputs[0]) {
            return None;
        }
        let weights = g.constant(node.inputs[1])?;
        let &[_, n_columns] = weights.shape() else {
            return None;
        };
        let is_shared = self.users[node.inputs[1].0 as usize].len() > 1;
        if weights.is_empty() || is_shared && weights.size_bytes() >= DEFER_BYTES {
            return None;
        }
        Some(Member {
            node: id,
            n_columns,
            weights: weights.clone(),
            bias: self.bias_of(g, node, n_columns),
        })
    }

    /// The addition of a constant row of `n` columns that alone uses a product.
    fn bias_of(&self, g: &Graph, product: &Node, n: usize) -> Option<(NodeId, ConstData)> {
        let y = product.outputs[0];
        let &[(user, _)] = self.users[y.0 as usize].as_slice() else {
            return None;
        };
        if g.outputs.iter().any(|o| o.value == y) || self.ordered[user.0 as usize] {
            return None;
        }
        let node = g.node(user);
        let is_sum = node.op == Op::Map(ScalarOp::Add) && node.device == product.device;
        if !is_sum || g.ty(node.outputs[0]) != g.ty(y) {
            return None;
        }
        let other = *node.inputs.iter().find(|&&v| v != y)?;
        let row = g.constant(other)?;
        let is_row = row.len() == n && row.shape().last() == Some(&n);
        is_row.then(|| (user, row.clone()))
    }
}

/// The constants joined along their last axis.
fn joined(parts: &[&ConstData]) -> Result<ConstData> {
    let mut shape = parts[0].shape().to_vec();
    let axis = shape.len() - 1;
    shape[axis] = parts.iter().map(|c| c.shape()[axis]).sum();
    let op = Op::Concat { axis };
    if let Some(made) = ConstData::made(&op, parts, parts[0].dtype(), &shape) {
        return Ok(made);
    }
    let tensors: Vec<Tensor> = parts.iter().map(|c| c.tensor()).collect::<Result<_>>()?;
    let tensors: Vec<&Tensor> = tensors.iter().collect();
    Ok(interp::eval(&op, &tensors, &[])?.remove(0).into())
}

fn emit(g: &Graph, r: &mut Rebuild, first: &Node, members: &[Member]) -> Result<()> {
    debug_assert_eq!(first.op.class(), OpClass::Contract);
    let weights: Vec<&ConstData> = members.iter().map(|m| &m.weights).collect();
    let w = r.graph.add_constant(joined(&weights)?, &first.origin);
    let lhs = r.get(first.inputs[0]);
    let mut y = r.add_like(first, Op::MatMul, &[lhs, w], &first.origin)?;
    if let Some(rows) = bias_rows(members)? {
        let rows: Vec<&ConstData> = rows.iter().collect();
        let b = r.graph.add_constant(joined(&rows)?, &first.origin);
        y = r.add_like(first, Op::Map(ScalarOp::Add), &[y, b], &first.origin)?;
    }
    let mut start = 0;
    for m in members {
        let op = columns(&r.graph.ty(y).shape, start, m.n_columns);
        start += m.n_columns;
        let slice = r.add_like(first, op, &[y], &g.node(m.node).origin)?;
        let stands_for = m.bias.as_ref().map_or(m.node, |(id, _)| *id);
        r.set(g.node(stands_for).outputs[0], slice);
    }
    Ok(())
}

/// The biases as vectors, when all members have one.
fn bias_rows(members: &[Member]) -> Result<Option<Vec<ConstData>>> {
    let mut rows = Vec::new();
    for m in members {
        let Some((_, bias)) = &m.bias else {
            return Ok(None);
        };
        rows.push(bias.tensor()?.reshaped(&[bias.len()])?.into());
    }
    Ok(Some(rows))
}

/// `n` columns of the last axis, from `start` on.
fn columns(shape: &Shape, start: usize, n: usize) -> Op {
    let rank = shape.rank();
    let (mut starts, mut sizes) = (vec![Dim::constant(0); rank], shape.0.clone());
    starts[rank - 1] = start.into();
    sizes[rank - 1] = n.into();
    Op::Slice {
        starts,
        sizes,
        steps: vec![1; rank],
    }
}
