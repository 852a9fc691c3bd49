//! Merges matrix products of one left-hand side with constant right-hand sides (query, key and value; gate and up) into one.

use super::Rebuild;
use crate::error::Result;
use crate::interp;
use crate::ir::constant::DEFER_BYTES;
use crate::ir::{ConstData, Dim, Graph, Node, NodeId, Op, OpClass, Requested, ScalarOp, ValueId};
use std::collections::BTreeMap;

/// One product and the bias that follows it alone, if any.
struct Member {
    node: NodeId,
    n_columns: usize,
    weights: ConstData,
    bias: Option<(NodeId, ConstData)>,
}

/// Replaces products `x w1, x w2, ..` with constant weights `[k, n_i]` by slices of one `x [w1 w2 ..]`; biases are merged when all have one.
///
/// One wide product reads `x` once and fills the register tiles better; its consumers read the slices by strides. Large weights that
/// something else reads too stay apart, since merging would copy them; so do products of integers, whose scales and quantisation follow on their
/// tiles but not behind a slice.
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

/// Groups of at least two products without control edges; each group shares its left-hand side, dtype and device.
fn find_groups(g: &Graph) -> Vec<Vec<Member>> {
    let users = g.users();
    let ordered = g.ordered();
    let is_output = |v: ValueId| g.outputs.iter().any(|o| o.value == v);
    let mut by_lhs: BTreeMap<(ValueId, Requested), Vec<Member>> = BTreeMap::new();
    for (id, node) in g.nodes() {
        if node.op != Op::MatMul || ordered[id.0 as usize] || g.ty(node.outputs[0]).dtype.is_int() {
            continue;
        }
        let Some(weights) = g
            .constant(node.inputs[1])
            .filter(|w| w.shape().len() == 2 && !w.is_empty())
        else {
            continue;
        };
        if users[node.inputs[1].0 as usize].len() > 1 && weights.size_bytes() >= DEFER_BYTES {
            continue;
        }
        let out = node.outputs[0];
        let bias = match users[out.0 as usize].as_slice() {
            [(user, _)] if !is_output(out) && !ordered[user.0 as usize] => {
                bias_of(g, *user, out, weights.shape()[1], &node.device)
            }
            _ => None,
        };
        let member = Member {
            node: id,
            n_columns: weights.shape()[1],
            weights: weights.clone(),
            bias,
        };
        by_lhs
            .entry((node.inputs[0], node.device.clone()))
            .or_default()
            .push(member);
    }
    by_lhs
        .into_values()
        .filter(|m| m.len() > 1)
        .map(|mut members| {
            // A partial set of biases stays with the slices.
            if members.iter().any(|m| m.bias.is_none()) {
                members.iter_mut().for_each(|m| m.bias = None);
            }
            members
        })
        .collect()
}

/// The addition of a constant row of `n` columns to `product`, if `user` is one.
fn bias_of(
    g: &Graph,
    user: NodeId,
    product: ValueId,
    n: usize,
    device: &Requested,
) -> Option<(NodeId, ConstData)> {
    let node = g.node(user);
    if node.op != Op::Map(ScalarOp::Add)
        || node.device != *device
        || g.ty(node.outputs[0]) != g.ty(product)
    {
        return None;
    }
    let other = *node.inputs.iter().find(|&&v| v != product)?;
    let row = g
        .constant(other)
        .filter(|t| t.len() == n && t.shape().last() == Some(&n))?;
    Some((user, row.clone()))
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
    let tensors = parts
        .iter()
        .map(|c| c.tensor())
        .collect::<Result<Vec<_>>>()?;
    Ok(interp::eval(&op, &tensors.iter().collect::<Vec<_>>(), &[])?
        .remove(0)
        .into())
}

fn emit(g: &Graph, r: &mut Rebuild, first: &Node, members: &[Member]) -> Result<()> {
    debug_assert_eq!(first.op.class(), OpClass::Contract);
    let origin = &first.origin;
    let weights = joined(&members.iter().map(|m| &m.weights).collect::<Vec<_>>())?;
    let w = r.graph.add_constant(weights, origin);
    let lhs = r.get(first.inputs[0]);
    let mut y = r.graph.add1(Op::MatMul, &[lhs, w], origin)?;
    r.graph.node_mut(last(&r.graph)).device = first.device.clone();
    if members.iter().all(|m| m.bias.is_some()) {
        let rows = members
            .iter()
            .filter_map(|m| m.bias.as_ref())
            .map(|(_, c)| Ok(c.tensor()?.reshaped(&[c.len()])?.into()))
            .collect::<Result<Vec<ConstData>>>()?;
        let b = r
            .graph
            .add_constant(joined(&rows.iter().collect::<Vec<_>>())?, origin);
        y = r.graph.add1(Op::Map(ScalarOp::Add), &[y, b], origin)?;
        r.graph.node_mut(last(&r.graph)).device = first.device.clone();
    }
    let mut start = 0;
    for m in members {
        let shape = r.graph.ty(y).shape.clone();
        let rank = shape.rank();
        let (mut starts, mut sizes) = (vec![Dim::constant(0); rank], shape.0);
        starts[rank - 1] = start.into();
        sizes[rank - 1] = m.n_columns.into();
        start += m.n_columns;
        let slice = r.graph.add1(
            Op::Slice {
                starts,
                sizes,
                steps: vec![1; rank],
            },
            &[y],
            &g.node(m.node).origin,
        )?;
        r.graph.node_mut(last(&r.graph)).device = first.device.clone();
        let stands_for = m.bias.as_ref().map_or(m.node, |(id, _)| *id);
        r.set(g.node(stands_for).outputs[0], slice);
    }
    Ok(())
}

fn last(g: &Graph) -> NodeId {
    NodeId(g.n_nodes() as u32 - 1)
}
