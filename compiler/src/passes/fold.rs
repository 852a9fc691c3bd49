//! Constant folding through the reference interpreter.

use super::Rebuild;
use crate::error::Result;
use crate::interp::{WorkBudget, eval_within};
use crate::ir::{ConstData, Graph, Node, Op, OpClass};
use gristmill_runtime::Tensor;

/// A result may be this large even when its operands are small (masks, position tables).
pub(super) const ALWAYS_FOLD_BYTES: usize = 1 << 20;

/// Work of one fold, in units of [`WorkBudget`]: about as much as a product of two matrices of 512 rows and columns.
const FOLD_WORK: u64 = 1 << 28;
/// Work of all folds of a graph.
const TOTAL_WORK: u64 = 1 << 30;

/// Replaces nodes whose operands are all constants by their value, unless the value would be much larger than the operands.
///
/// A node that takes more work than the limits allow stays, and so does one that the interpreter refuses (an index out of range, a zero
/// divisor): it fails at run time.
pub fn fold_constants(g: &Graph) -> Result<Graph> {
    fold_within(g, &mut WorkBudget::new(FOLD_WORK, TOTAL_WORK))
}

fn fold_within(g: &Graph, budget: &mut WorkBudget) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        let inputs = r.inputs(node);
        let constants: Option<Vec<ConstData>> = inputs
            .iter()
            .map(|&v| r.graph.constant(v).cloned())
            .collect();
        let folded = match constants.filter(|c| worth_folding(g, node, c)) {
            Some(c) => fold(g, node, &c, budget)?,
            None => None,
        };
        match folded {
            Some(values) => {
                for (&old, value) in node.outputs.iter().zip(values) {
                    let new = r.graph.add_constant(value, &node.origin);
                    r.set(old, new);
                }
            }
            None => r.copy(id, node)?,
        }
    }
    Ok(r.finish(g))
}

/// The results of a node: noted down where [`ConstData::made`] takes them, else computed. `None` when the interpreter refuses, or the budget is exceeded.
fn fold(
    g: &Graph,
    node: &Node,
    operands: &[ConstData],
    budget: &mut WorkBudget,
) -> Result<Option<Vec<ConstData>>> {
    if let [result] = node.outputs[..]
        && let Some(shape) = g.ty(result).static_shape()
        && let Some(made) = ConstData::made(
            &node.op,
            &operands.iter().collect::<Vec<_>>(),
            g.ty(result).dtype,
            &shape,
        )
    {
        return Ok(Some(vec![made]));
    }
    let tensors = operands
        .iter()
        .map(ConstData::tensor)
        .collect::<Result<Vec<_>>>()?;
    let tensors: Vec<&Tensor> = tensors.iter().collect();
    let values = eval_within(&node.op, &tensors, &node.regions, budget);
    let held = |v: Vec<Tensor>| v.into_iter().map(ConstData::held).collect();
    Ok(values.ok().flatten().map(held))
}

fn worth_folding(g: &Graph, node: &Node, operands: &[ConstData]) -> bool {
    if matches!(node.op, Op::Constant { .. })
        || matches!(
            node.op.class(),
            OpClass::State | OpClass::Transfer | OpClass::Control
        )
    {
        return false;
    }
    let operand_bytes: usize = operands.iter().map(|t| t.size_bytes()).sum();
    let result_bytes = node
        .outputs
        .iter()
        .map(|&v| g.ty(v).size_bytes().unwrap_or(usize::MAX))
        .fold(0, usize::saturating_add);
    result_bytes <= operand_bytes.saturating_mul(2).max(ALWAYS_FOLD_BYTES)
}
