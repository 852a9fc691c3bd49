//! Determinants and distinct elements.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Out, Outs, axis_of, one, product};
use crate::error::{Error, Result};
use crate::interp;
use crate::ir::{Dim, Extremum, Op, Shape, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Det", (1, 1), determinant),
    OpDef::new("Unique", (1, 1), unique),
];

/// Extent of matrices up to which elimination is unrolled.
const MAX_EXTENT: usize = 32;

/// By elimination with partial pivoting, one step per column.
fn determinant(cx: &mut Ctx) -> Result<Outs> {
    let x = cx.val(0)?;
    let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
    let n = matrix_extent(&s)?;
    let wide = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let outer = &s[..s.rank() - 2];
    let batch = product(outer);
    let x = cx.cast(x, wide)?;
    let mut rest = cx.reshape(x, [batch.clone(), n.into(), n.into()])?;
    let unit = cx.scalar(wide, 1.0);
    let mut det = cx.broadcast(unit, [batch, 1.into(), 1.into()])?;
    for size in (1..=n).rev() {
        let pivoted = pivot_first(cx, rest, size)?;
        det = cx.mul(det, pivoted.value)?;
        det = cx.mul(det, pivoted.sign)?;
        if size > 1 {
            rest = eliminated(cx, &pivoted, size)?;
        }
    }
    let y = cx.reshape(det, outer.to_vec())?;
    one(cx.cast(y, dtype)?)
}

/// Rows and columns of square matrices.
fn matrix_extent(s: &Shape) -> Result<usize> {
    let r = s.rank();
    let n = s.last().and_then(Dim::as_usize);
    let square = n.filter(|n| r >= 2 && s[r - 2].is(*n as i64) && *n <= MAX_EXTENT);
    square.ok_or_else(|| {
        Error::unsupported(format!(
            "determinants of {s}: square up to {MAX_EXTENT} are taken"
        ))
    })
}

/// The matrix without the pivot's row and column, multiples of the row subtracted from the others.
fn eliminated(cx: &mut Ctx, pivoted: &Pivoted, size: usize) -> Result<ValueId> {
    let dtype = cx.dtype_of(pivoted.value);
    // A pivot of 0 makes the determinant 0 whatever the rest is, as long as that is finite.
    let (zero, unit) = (cx.scalar(dtype, 0.0), cx.scalar(dtype, 1.0));
    let singular = cx.eq(pivoted.value, zero)?;
    let divisor = cx.select(singular, unit, pivoted.value)?;
    let factors = cx.slice_axis(pivoted.others, 2, 0usize, 1)?;
    let factors = cx.div(factors, divisor)?;
    let row = cx.slice_axis(pivoted.row, 2, 1usize, size - 1)?;
    let others = cx.slice_axis(pivoted.others, 2, 1usize, size - 1)?;
    let change = cx.mul(factors, row)?;
    cx.sub(others, change)
}

/// A matrix whose first element is the pivot.
struct Pivoted {
    /// The pivot: `[batch, 1, 1]`.
    value: ValueId,
    /// Factor of the determinant for the exchange of rows: `[batch, 1, 1]`.
    sign: ValueId,
    /// The pivot's row: `[batch, 1, size]`.
    row: ValueId,
    /// The other rows: `[batch, size - 1, size]`.
    others: ValueId,
}

/// Moves the row with the largest element of the first column to the top; the first row takes its
/// place.
fn pivot_first(cx: &mut Ctx, rest: ValueId, size: usize) -> Result<Pivoted> {
    let dtype = cx.dtype_of(rest);
    let best = pivot_row(cx, rest)?;
    let places = cx.iota([size.into(), 1.into()], 0)?;
    let zero = cx.scalar(DType::I64, 0.0);
    let (at_best, first) = (cx.eq(places, best)?, cx.eq(places, zero)?);
    let moved = cx.select(at_best, zero, places)?;
    let order = cx.select(first, best, moved)?;
    let shape = cx.shape_of(rest);
    let order = cx.broadcast(order, shape.0)?;
    let swapped = cx.add(Op::GatherElements { axis: 1 }, &[rest, order])?;
    let row = cx.slice_axis(swapped, 1, 0usize, 1)?;
    let stays = cx.eq(best, zero)?;
    let (plus, minus) = (cx.scalar(dtype, 1.0), cx.scalar(dtype, -1.0));
    Ok(Pivoted {
        value: cx.slice_axis(row, 2, 0usize, 1)?,
        sign: cx.select(stays, plus, minus)?,
        others: cx.slice_axis(swapped, 1, 1usize, size - 1)?,
        row,
    })
}

/// Index of the row with the largest magnitude in the first column: `[batch, 1, 1]`.
fn pivot_row(cx: &mut Ctx, rest: ValueId) -> Result<ValueId> {
    let column = cx.slice_axis(rest, 2, 0usize, 1)?;
    let magnitude = cx.abs(column)?;
    let best = Op::ArgReduce {
        kind: Extremum::Max,
        axis: 1,
        keepdims: true,
        select_last: false,
    };
    cx.add(best, &[magnitude])
}

/// Distinct elements (or slices), where each comes first, which one each element is, and how often
/// each comes. The shape of the results depends on the values.
fn unique(cx: &mut Ctx) -> Result<Outs> {
    let sorted = cx.flag("sorted", true)?;
    let axis = match cx.opt_i("axis")? {
        Some(axis) => Some(axis_of(axis, cx.ty(0)?.rank())?),
        None => None,
    };
    let known = cx.constant(0)?;
    if known.is_none() && !cx.is_run_time() {
        return Err(cx.unknown(0));
    }
    let count = cx.new_symbol();
    let op = Op::Unique {
        count,
        axis,
        sorted,
    };
    let Some(t) = known.filter(|t| t.size_bytes() <= FOLD_LIMIT_BYTES) else {
        let x = cx.val(0)?;
        let results = cx.b().add(op, &[x])?;
        return Ok(results.into_iter().map(Out::Value).collect());
    };
    let results = interp::eval(&op, &[&t], &[])?;
    Ok(results.into_iter().map(Out::tensor).collect())
}
