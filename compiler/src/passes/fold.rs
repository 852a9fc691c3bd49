//! Constant folding through the reference interpreter.

use super::Rebuild;
use crate::error::Result;
use crate::interp;
use crate::ir::{Graph, Node, Op, OpClass};
use gristmill_runtime::Tensor;
use std::sync::Arc;

/// A result may be this large even when its operands are small (masks, position tables).
const ALWAYS_FOLD_BYTES: usize = 1 << 20;

/// Replaces nodes whose operands are all constants by their value, unless the value would be much larger than the operands.
///
/// A node that the interpreter refuses (an index out of range, a zero divisor) is left to fail at run time.
pub fn fold_constants(g: &Graph) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        let inputs = r.inputs(node);
        let constants: Option<Vec<Arc<Tensor>>> = inputs.iter().map(|&v| r.graph.constant(v).cloned()).collect();
        let folded = constants.filter(|c| worth_folding(g, node, c)).and_then(|c| {
            let tensors: Vec<&Tensor> = c.iter().map(|t| &**t).collect();
            interp::eval(&node.op, &tensors, &node.regions).ok()
        });
        match folded {
            Some(values) => {
                for (&old, t) in node.outputs.iter().zip(values) {
                    let new = r.graph.add_constant(t, &node.origin);
                    r.set(old, new);
                }
            }
            None => r.copy(id, node)?,
        }
    }
    Ok(r.finish(g))
}

fn worth_folding(g: &Graph, node: &Node, operands: &[Arc<Tensor>]) -> bool {
    if matches!(node.op, Op::Constant { .. })
        || matches!(node.op.class(), OpClass::State | OpClass::Transfer | OpClass::Control)
    {
        return false;
    }
    let operand_bytes: usize = operands.iter().map(|t| t.size_bytes()).sum();
    let result_bytes =
        node.outputs.iter().map(|&v| g.ty(v).size_bytes().unwrap_or(usize::MAX)).fold(0, usize::saturating_add);
    result_bytes <= operand_bytes.saturating_mul(2).max(ALWAYS_FOLD_BYTES)
}
