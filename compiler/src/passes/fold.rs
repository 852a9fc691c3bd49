//! Constant folding through the reference interpreter.

use super::Rebuild;
use crate::error::Result;
use crate::interp;
use crate::ir::{ConstData, Graph, Node, Op, OpClass};

/// A result may be this large even when its operands are small (masks, position tables).
const ALWAYS_FOLD_BYTES: usize = 1 << 20;

/// Replaces nodes whose operands are all constants by their value, unless the value would be much larger than the operands.
///
/// A node that the interpreter refuses (an index out of range, a zero divisor) is left to fail at run time.
pub fn fold_constants(g: &Graph) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        let inputs = r.inputs(node);
        let constants: Option<Vec<ConstData>> = inputs
            .iter()
            .map(|&v| r.graph.constant(v).cloned())
            .collect();
        let folded = match constants.filter(|c| worth_folding(g, node, c)) {
            Some(c) => fold(g, node, &c)?,
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

/// The results of a node: noted down where [`ConstData::made`] takes them, else computed. `None` when the interpreter refuses.
fn fold(g: &Graph, node: &Node, operands: &[ConstData]) -> Result<Option<Vec<ConstData>>> {
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
    let values = interp::eval(&node.op, &tensors.iter().collect::<Vec<_>>(), &node.regions);
    Ok(values
        .ok()
        .map(|v| v.into_iter().map(ConstData::held).collect()))
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
