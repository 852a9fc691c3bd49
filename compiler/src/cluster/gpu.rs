//! Conditions of fusion where all devices are GPUs, real or emulated.
//!
//! The CUDA back end pulls operands through any view and in any dtype, and computes any element-wise
//! epilogue from the registers that hold a result. Where a CPU may have to run a cluster too,
//! [`super::legal`] decides alone: its clusters are fast on both.

use super::legal::{self, Tail};
use crate::ir::{Graph, Node, Op, OpClass, ValueId};

/// Most ops of an epilogue.
const MAX_FOLLOWERS: usize = 16;

/// True when results of `anchor` stay in registers for an epilogue.
pub fn holds_result(anchor: &Node) -> bool {
    let product = matches!(anchor.op, Op::MatMul | Op::Conv { .. });
    product || matches!(anchor.op.class(), OpClass::Attention | OpClass::Reduce)
}

/// The tail with `node`, which reads the result `chain` of the kernel of `anchor`, added. Errors say why it cannot be.
pub fn with(
    tail: Tail,
    g: &Graph,
    anchor: &Node,
    node: &Node,
    chain: ValueId,
) -> Result<Tail, String> {
    if !holds_result(anchor) {
        return Err(format!("{} is not held in registers", anchor.op.name()));
    }
    match &node.op {
        // The same memory under another shape.
        Op::Reshape { .. } => Ok(Tail {
            viewed: true,
            ..tail
        }),
        Op::Map(_) => {
            check_map(tail, g, node, chain)?;
            Ok(Tail {
                n_epilogue: tail.n_epilogue + 1,
                ..tail
            })
        }
        op => Err(format!("{} cannot follow on the result", op.name())),
    }
}

/// Checks that an element-wise op can follow behind a tail.
fn check_map(tail: Tail, g: &Graph, node: &Node, chain: ValueId) -> Result<(), String> {
    let (from, to) = (g.ty(chain), g.ty(node.outputs[0]));
    if tail.viewed {
        return Err("a view comes before it".into());
    }
    if tail.n_epilogue >= MAX_FOLLOWERS {
        return Err(format!("the result takes {MAX_FOLLOWERS} ops"));
    }
    if from.shape != to.shape {
        return Err(format!("changes {from} to {to}"));
    }
    Ok(())
}

/// Number of elements that the threads of a kernel pull for `anchor`. Errors say why they pull none.
pub fn loops_over(g: &Graph, anchor: &Node) -> Result<usize, String> {
    match &anchor.op {
        Op::Softmax { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } => {
            legal::known_elements(g, anchor.inputs[0])
        }
        // Pulled elements are transposed through tiles of shared memory.
        Op::Transpose { .. } => legal::known_elements(g, anchor.outputs[0]),
        _ => legal::loops_over(g, anchor),
    }
}
