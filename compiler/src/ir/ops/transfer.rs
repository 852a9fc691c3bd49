//! Transfers between devices, and reductions over devices.

use super::reduce::{check_reduced, reduction};
use super::{Op, ReduceKind};
use crate::error::Result;
use crate::ir::eval::{Call, view};
use crate::ir::gradient::Vjp;
use crate::ir::graph::Graph;
use crate::ir::infer::Inferred;
use crate::ir::types::Type;
use crate::ir::{eval, infer};
use gristmill_runtime::Tensor;

pub(super) fn recv_infer(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Recv { dtype, shape });
    infer::one(*dtype, shape.clone())
}

pub(super) fn all_reduce_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, AllReduce { kind });
    if let Some(other) = args.iter().find(|t| **t != args[0]) {
        return Err(format!("operands {} and {other} differ", args[0]));
    }
    check_reduced(*kind, &args[0])?;
    Ok(args.to_vec())
}

pub(super) fn all_reduce_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, AllReduce { kind });
    let result = joined(c.inputs, *kind)?;
    Ok(vec![result; c.inputs.len()])
}

/// The reduction of tensors side by side along a new axis.
fn joined(all: &[&Tensor], kind: ReduceKind) -> Result<Tensor> {
    let beside = |n: usize| [&[n], all[0].shape()].concat();
    let parts = all.iter().map(|x| Ok(x.reshaped(&beside(1))?));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let parts: Vec<&Tensor> = parts.iter().collect();
    let stacked = view::concat(&parts, 0, &beside(all.len()))?;
    reduction(&stacked, kind, &[0], all[0].shape())
}

/// Every operand counts for every result: the same reduction of the cotangents.
pub(super) fn all_reduce_gradient(v: &mut Vjp) -> Result<()> {
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

pub(super) fn all_reduce_rank_infer(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(op, AllReduceRank { kind, rank });
    if *rank >= args.len() {
        return Err(format!("rank {rank} of {}", args.len()));
    }
    all_reduce_infer(&Op::AllReduce { kind: *kind }, args, regions).map(|types| types[..1].to_vec())
}

pub(super) fn all_reduce_rank_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, AllReduceRank { kind });
    eval::one(joined(c.inputs, *kind))
}

pub(super) fn collective_infer(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(
        op,
        Collective {
            kind,
            rank,
            devices
        }
    );
    if *rank >= devices.len() {
        return Err(format!("rank {rank} of {}", devices.len()));
    }
    all_reduce_infer(&Op::AllReduce { kind: *kind }, args, regions)
}
