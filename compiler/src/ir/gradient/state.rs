//! Gradients of variables and of reductions over devices.

use super::super::ops::{Op, ReduceKind};
use super::Vjp;
use crate::error::Result;

/// From the result to the operand; nothing flows to later runs through the stored value.
pub fn assign(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    v.give(0, g)
}

/// Every operand counts for every result: the same reduction of the cotangents.
pub fn all_reduce(v: &mut Vjp) -> Result<()> {
    let Op::AllReduce { kind } = v.op() else {
        return v.refuse("the op is no all-reduce");
    };
    if !matches!(kind, ReduceKind::Sum | ReduceKind::Mean) {
        return v.refuse("an all-reduce has a gradient rule for sum and mean only");
    }
    let mut cotangents = Vec::new();
    for i in 0..v.n_operands() {
        cotangents.push(v.cotangent(i)?);
    }
    let sums = v.emit_all(Op::AllReduce { kind }, &cotangents)?;
    for (i, sum) in sums.into_iter().enumerate() {
        v.give(i, sum)?;
    }
    Ok(())
}
