//! Gradients of reductions and running sums.

use super::super::dim::Dim;
use super::super::graph::ValueId;
use super::super::ops::{Op, ReduceKind};
use super::super::scalar::ScalarOp;
use super::Vjp;
use crate::error::Result;
use gristmill_runtime::DType;

/// A reduction with its cotangent, the reduced axes kept as extents of 1.
struct Reduction {
    axes: Vec<usize>,
    /// Shape of the result.
    kept: Vec<Dim>,
    /// Cotangent.
    g: ValueId,
}

pub fn reduce(v: &mut Vjp) -> Result<()> {
    let Op::Reduce { kind, axes, .. } = v.op() else {
        return v.refuse("the op is no reduction");
    };
    let mut kept = v.shape(v.x(0));
    axes.iter().for_each(|&i| kept[i] = 1.into());
    let g = v.g()?;
    let g = v.reshape(g, &kept)?;
    let of = Reduction { axes, kept, g };
    let gradient = match kind {
        ReduceKind::Sum => g,
        ReduceKind::Mean => divided_by_count(v, &of)?,
        ReduceKind::Max | ReduceKind::Min => extremum(v, &of)?,
        ReduceKind::Prod => product(v, &of)?,
    };
    let shape = v.shape(v.x(0));
    let spread = v.broadcast(gradient, &shape)?;
    v.give(0, spread)
}

/// The cotangent over the number of reduced elements. Counts of narrow floats are made in `f32`, which holds them.
fn divided_by_count(v: &mut Vjp, of: &Reduction) -> Result<ValueId> {
    let narrow = v.ty(of.g).dtype;
    let dtype = if narrow.is_narrow_float() {
        DType::F32
    } else {
        narrow
    };
    let x = v.x(0);
    let extents = of.axes.iter().map(|&i| v.shape(x)[i].clone());
    let n = count(v, dtype, extents.collect())?;
    let g = v.cast(of.g, dtype)?;
    let share = v.div(g, n)?;
    v.cast(share, narrow)
}

/// The product of extents as a number: counted where they are symbolic.
fn count(v: &mut Vjp, dtype: DType, extents: Vec<Dim>) -> Result<ValueId> {
    let n = extents.iter().fold(Dim::constant(1), |n, d| n.product(d));
    if let Some(n) = n.as_const() {
        return v.scalar(dtype, n as f64);
    }
    let ones = v.full(dtype, &extents, 1.0)?;
    v.unbroadcast(ones, &[])
}

/// Equal extremes share.
fn extremum(v: &mut Vjp, of: &Reduction) -> Result<ValueId> {
    let (x, dtype) = (v.x(0), v.ty(of.g).dtype);
    let y = v.reshape(v.y(), &of.kept)?;
    let is_extreme = v.map(ScalarOp::Eq, &[x, y])?;
    let winners = v.cast(is_extreme, dtype)?;
    let n = v.reduce(ReduceKind::Sum, winners, &of.axes)?;
    let share = v.div(of.g, n)?;
    v.mul(winners, share)
}

/// The product of the other elements: by division where none of them is 0. An element that is 0 counts as 1, and gets the
/// product if it is the only one.
///
/// A second derivative holds where no element is 0.
fn product(v: &mut Vjp, of: &Reduction) -> Result<ValueId> {
    let (x, dtype) = (v.x(0), v.ty(of.g).dtype);
    let is_zero = v.with_number(ScalarOp::Eq, x, 0.0)?;
    let zeros = v.cast(is_zero, dtype)?;
    let n_zeros = v.reduce(ReduceKind::Sum, zeros, &of.axes)?;
    let others_are_not = v.map(ScalarOp::Eq, &[n_zeros, zeros])?;
    let factors = v.replace(is_zero, 1.0, x)?;
    let all = v.reduce(ReduceKind::Prod, factors, &of.axes)?;
    let others = v.div(all, factors)?;
    let gradient = v.mul(of.g, others)?;
    v.keep(others_are_not, gradient)
}

/// The running sum in the other direction.
pub fn cum_sum(v: &mut Vjp) -> Result<()> {
    let Op::CumSum {
        axis,
        exclusive,
        reverse,
    } = v.op()
    else {
        return v.refuse("the op is no running sum");
    };
    let back = Op::CumSum {
        axis,
        exclusive,
        reverse: !reverse,
    };
    let g = v.g()?;
    let sum = v.emit(back, &[g])?;
    v.give(0, sum)
}
