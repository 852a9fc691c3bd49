//! Gradients of weights that every step of a scan multiplies by, as one product after all steps.
//!
//! Step `t` of a recurrence `h_t w` gives the gradient `a_t^T g_t` to its weights. Instead of their sum, step by step, the scan backwards
//! stacks both factors, and one product of the stacks is the sum over all rows of all steps (Appleyard et al., arXiv:1604.01946, section
//! 3.2).

use super::sweep::Sweep;
use crate::error::Result;
use crate::ir::{Dim, Graph, Node, Op, ValueId};

/// A matrix product `a^T g` of each step.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Number of the operand of the scan that it is the gradient of.
    pub operand: usize,
    /// `a` and `g`, values of a step.
    pub factors: [ValueId; 2],
}

impl Product {
    /// The product that a value is.
    pub fn of(step: &Graph, operand: usize, v: ValueId) -> Option<Product> {
        let product = step.def_node(v).filter(|n| n.op == Op::MatMul)?;
        let [lhs, g] = product.inputs[..] else {
            return None;
        };
        let transposed = step.def_node(lhs)?;
        match &transposed.op {
            Op::Transpose { perm } if perm[..] == [1, 0] && step.ty(g).rank() == 2 => {
                let factors = [transposed.inputs[0], g];
                Some(Product { operand, factors })
            }
            _ => None,
        }
    }

    /// True when both factors are in a set.
    pub fn is_within(&self, set: &[bool]) -> bool {
        self.factors.iter().all(|v| set[v.0 as usize])
    }

    /// The sum over all steps of a scan, of stacks of both factors.
    pub fn sum(&self, sweep: &mut Sweep, scan: &Node, stacks: &[ValueId]) -> Result<ValueId> {
        let of = scan.inputs[self.operand];
        let a = rows(sweep, of, stacks[0])?;
        let g = rows(sweep, of, stacks[1])?;
        let a = sweep.emit(of, Op::Transpose { perm: vec![1, 0] }, &[a])?;
        sweep.emit(of, Op::MatMul, &[a, g])
    }
}

/// A stack of matrices as one matrix of all their rows.
fn rows(sweep: &mut Sweep, of: ValueId, stack: ValueId) -> Result<ValueId> {
    let shape = sweep.graph_mut().ty(stack).shape.clone();
    let Some((last, lead)) = shape.split_last() else {
        return Ok(stack);
    };
    let n = lead.iter().fold(Dim::constant(1), |n, d| n.product(d));
    let shape = vec![n, last.clone()];
    sweep.emit(of, Op::Reshape { shape }, &[stack])
}
