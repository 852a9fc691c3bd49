//! Constant folding through the reference interpreter.

use super::Rebuild;
use crate::error::Result;
use crate::interp::{WorkBudget, eval_within};
use crate::ir::{ConstData, Graph, Node, Op, OpClass, ValueId};
use gristmill_runtime::Tensor;

/// A result may be this large even when its operands are small (masks, position tables).
pub(super) const ALWAYS_FOLD_BYTES: usize = 1 << 20;

/// Work of one fold, in units of [`WorkBudget`]: about as much as a product of two matrices of 512
/// rows and columns.
const FOLD_WORK: u64 = 1 << 28;
/// Work of all folds of a graph.
const TOTAL_WORK: u64 = 1 << 30;

/// Replaces nodes whose operands are all constants by their value, unless the value would be much
/// larger than the operands.
///
/// A node that takes more work than the limits allow stays, and so does one that the interpreter
/// refuses (an index out of range, a zero divisor): it fails at run time.
pub fn fold_constants(g: &Graph) -> Result<Graph> {
    fold_within(g, &mut WorkBudget::new(FOLD_WORK, TOTAL_WORK))
}

fn fold_within(g: &Graph, budget: &mut WorkBudget) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        let inputs = r.inputs(node);
        let constants = inputs.iter().map(|&v| r.graph.constant(v).cloned());
        let constants: Option<Vec<ConstData>> = constants.collect();
        let folded = match constants.filter(|c| worth_folding(g, node, c)) {
            Some(c) => fold(g, node, &c, budget)?,
            None => None,
        };
        let Some(values) = folded else {
            r.copy(id, node)?;
            continue;
        };
        for (&old, value) in node.outputs.iter().zip(values) {
            let new = r.graph.add_constant(value, &node.origin);
            r.set(old, new);
        }
    }
    Ok(r.finish(g))
}

/// The results of a node: deferred where [`ConstData::made`] takes them, else computed. `None` when
/// the interpreter refuses, or the budget is exceeded.
fn fold(
    g: &Graph,
    node: &Node,
    operands: &[ConstData],
    budget: &mut WorkBudget,
) -> Result<Option<Vec<ConstData>>> {
    if let Some(made) = deferred(g, node, operands) {
        return Ok(Some(vec![made]));
    }
    let tensors: Vec<Tensor> = operands
        .iter()
        .map(ConstData::tensor)
        .collect::<Result<_>>()?;
    let tensors: Vec<&Tensor> = tensors.iter().collect();
    let values = eval_within(&node.op, &tensors, &node.regions, budget);
    let held = |v: Vec<Tensor>| v.into_iter().map(ConstData::held).collect();
    Ok(values.ok().flatten().map(held))
}

/// The only result of a node as a constant that is made when it is needed.
fn deferred(g: &Graph, node: &Node, operands: &[ConstData]) -> Option<ConstData> {
    let &[result] = node.outputs.as_slice() else {
        return None;
    };
    let ty = g.ty(result);
    let operands: Vec<&ConstData> = operands.iter().collect();
    ConstData::made(&node.op, &operands, ty.dtype, &ty.static_shape()?)
}

fn worth_folding(g: &Graph, node: &Node, operands: &[ConstData]) -> bool {
    let is_constant = matches!(node.op, Op::Constant { .. });
    let has_effect = matches!(
        node.op.class(),
        OpClass::State | OpClass::Transfer | OpClass::Control
    );
    if is_constant || has_effect {
        return false;
    }
    let operand_bytes: usize = operands.iter().map(|t| t.size_bytes()).sum();
    let size = |&v: &ValueId| g.ty(v).size_bytes().unwrap_or(usize::MAX);
    let result_bytes = node.outputs.iter().map(size);
    let limit = operand_bytes.saturating_mul(2).max(ALWAYS_FOLD_BYTES);
    result_bytes.fold(0, usize::saturating_add) <= limit
}
