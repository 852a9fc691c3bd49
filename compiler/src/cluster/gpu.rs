//! What may share a kernel where all devices are GPUs, real or emulated.
//!
//! The CUDA back end pulls operands through any view and in any dtype, and computes what follows from the registers that hold a result, whatever
//! element-wise op it is. Where a CPU may have to run a cluster too, [`super::legal`] decides alone: its clusters are fast on both.

use super::legal::{self, Tail};
use crate::ir::{Graph, Node, Op, OpClass, ValueId};

/// Most ops that follow on a result.
const MAX_FOLLOWERS: usize = 16;

/// Whether results of `anchor` stay in registers for what follows.
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
    let (from, to) = (g.ty(chain), g.ty(node.outputs[0]));
    match &node.op {
        // The same memory under another shape.
        Op::Reshape { .. } => Ok(Tail {
            viewed: true,
            ..tail
        }),
        Op::Map(_) if tail.viewed => Err("a view comes before it".into()),
        Op::Map(_) if tail.n_epilogue >= MAX_FOLLOWERS => {
            Err(format!("the result takes {MAX_FOLLOWERS} ops"))
        }
        Op::Map(_) if from.shape == to.shape => Ok(Tail {
            n_epilogue: tail.n_epilogue + 1,
            ..tail
        }),
        Op::Map(_) => Err(format!("changes {from} to {to}")),
        op => Err(format!("{} cannot follow on the result", op.name())),
    }
}

/// How often the threads of a kernel compute what they pull for `anchor`. Errors say why they pull nothing.
pub fn loops_over(g: &Graph, anchor: &Node) -> Result<usize, String> {
    match &anchor.op {
        Op::Softmax { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } => {
            legal::known_elements(g, anchor.inputs[0])
        }
        // Tiles of shared memory turn what was computed on the way.
        Op::Transpose { .. } => legal::known_elements(g, anchor.outputs[0]),
        _ => legal::loops_over(g, anchor),
    }
}
