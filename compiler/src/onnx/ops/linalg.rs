//! Determinants, distinct elements, and casts of bits.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Out, Outs, axis_of, one};
use super::super::tensor::dtype_of;
use crate::error::{Error, Result};
use crate::ir::{Dim, Extremum, Op, ScalarOp, ValueId};
use gristmill_runtime::{DType, Tensor};
use std::cmp::Ordering;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Det", (1, 1), determinant),
    OpDef::new("Unique", (1, 1), unique),
    OpDef::new("BitCast", (1, 1), bit_cast),
];

/// Extent of matrices up to which elimination is unrolled.
const MAX_EXTENT: usize = 32;

/// By elimination with partial pivoting, one step per column.
fn determinant<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let x = cx.val(0)?;
    let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
    let r = s.rank();
    let n = s
        .last()
        .and_then(Dim::as_usize)
        .filter(|n| r >= 2 && s[r - 2].is(*n as i64) && *n <= MAX_EXTENT);
    let n = n.ok_or_else(|| {
        Error::unsupported(format!(
            "determinants of {s}: square up to {MAX_EXTENT} are taken"
        ))
    })?;
    let wide = if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let batch = s[..r - 2]
        .iter()
        .fold(Dim::constant(1), |n, d| n.product(d));
    let x = cx.b().cast(x, wide)?;
    let mut rest = cx.b().reshape(x, [batch.clone(), n.into(), n.into()])?;
    let unit = cx.b().scalar(wide, 1.0);
    let mut det = cx
        .b()
        .broadcast(unit, [batch.clone(), 1.into(), 1.into()])?;
    for size in (1..=n).rev() {
        let column = cx.b().slice_axis(rest, 2, 0usize, 1)?;
        let (pivot, row, others) = pivot_first(cx, rest, column, size)?;
        det = cx.b().mul(det, pivot.value)?;
        det = cx.b().mul(det, pivot.sign)?;
        if size == 1 {
            break;
        }
        // A pivot of 0 makes the determinant 0 whatever the rest is, as long as that is finite.
        let zero = cx.b().scalar(wide, 0.0);
        let singular = cx.map(ScalarOp::Eq, &[pivot.value, zero])?;
        let divisor = cx.map(ScalarOp::Select, &[singular, unit, pivot.value])?;
        let factors = cx.b().slice_axis(others, 2, 0usize, 1)?;
        let factors = cx.b().div(factors, divisor)?;
        let row = cx.b().slice_axis(row, 2, 1usize, size - 1)?;
        let others = cx.b().slice_axis(others, 2, 1usize, size - 1)?;
        let change = cx.b().mul(factors, row)?;
        rest = cx.b().sub(others, change)?;
    }
    let y = cx.b().reshape(det, s[..r - 2].to_vec())?;
    one(cx.b().cast(y, dtype)?)
}

/// The greatest element of a column and the sign of moving its row to the top, `[batch, 1, 1]`.
struct Pivot {
    value: ValueId,
    sign: ValueId,
}

/// Pivot, its row `[batch, 1, size]` and the other rows: the first row takes the place of the pivot's.
fn pivot_first(
    cx: &mut Ctx<'_, '_>,
    rest: ValueId,
    column: ValueId,
    size: usize,
) -> Result<(Pivot, ValueId, ValueId)> {
    let (s, dtype) = (cx.shape_of(rest), cx.dtype_of(rest));
    let magnitude = cx.map(ScalarOp::Abs, &[column])?;
    let best = Op::ArgReduce {
        kind: Extremum::Max,
        axis: 1,
        keepdims: true,
        select_last: false,
    };
    let best = cx.add(best, &[magnitude])?;
    let places = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: vec![size.into(), 1.into()],
            axis: 0,
        },
        &[],
    )?;
    let zero = cx.b().scalar(DType::I64, 0.0);
    let (at_best, first) = (
        cx.map(ScalarOp::Eq, &[places, best])?,
        cx.map(ScalarOp::Eq, &[places, zero])?,
    );
    let moved = cx.map(ScalarOp::Select, &[at_best, zero, places])?;
    let order = cx.map(ScalarOp::Select, &[first, best, moved])?;
    let order = cx.b().broadcast(order, s.0.clone())?;
    let swapped = cx.add(Op::GatherElements { axis: 1 }, &[rest, order])?;
    let row = cx.b().slice_axis(swapped, 1, 0usize, 1)?;
    let others = cx.b().slice_axis(swapped, 1, 1usize, size - 1)?;
    let value = cx.b().slice_axis(row, 2, 0usize, 1)?;
    let kept = cx.map(ScalarOp::Eq, &[best, zero])?;
    let (plus, minus) = (cx.b().scalar(dtype, 1.0), cx.b().scalar(dtype, -1.0));
    let sign = cx.map(ScalarOp::Select, &[kept, plus, minus])?;
    Ok((Pivot { value, sign }, row, others))
}

/// The shape of the results depends on the values: a constant operand only. Results: distinct elements (or slices),
/// where each comes first, which one each element is, and how often each comes.
fn unique<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let sorted = cx.flag("sorted", true)?;
    let axis = cx.opt_i("axis")?;
    let t = cx.tensor(0)?;
    if t.size_bytes() > FOLD_LIMIT_BYTES {
        return Err(Error::unsupported(format!(
            "of a tensor of {} bytes",
            t.size_bytes()
        )));
    }
    let shape = t.shape().to_vec();
    let (outer, n, inner) = match axis {
        Some(a) => {
            let a = axis_of(a, shape.len())?;
            (
                shape[..a].iter().product::<usize>(),
                shape[a],
                shape[a + 1..].iter().product::<usize>(),
            )
        }
        None => (1, t.len(), 1),
    };
    let values = t.to_f64s();
    let slice = |i: usize| (0..outer * inner).map(move |e| (e / inner * n + i) * inner + e % inner);
    let compare = |&a: &usize, &b: &usize| {
        let pairs = slice(a).zip(slice(b));
        let mut orders =
            pairs.map(|(x, y)| values[x].partial_cmp(&values[y]).unwrap_or(Ordering::Less));
        orders.find(|o| o.is_ne()).unwrap_or(Ordering::Equal)
    };
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| {
        match values_are_nan(&values, slice(*a)).cmp(&values_are_nan(&values, slice(*b))) {
            Ordering::Equal => compare(a, b),
            other => other,
        }
    });
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for i in order {
        match groups.last_mut() {
            Some(g) if compare(&g[0], &i).is_eq() => g.push(i),
            _ => groups.push(vec![i]),
        }
    }
    groups.iter_mut().for_each(|g| g.sort_unstable());
    if !sorted {
        groups.sort_by_key(|g| g[0]);
    }
    let firsts: Vec<i64> = groups.iter().map(|g| g[0] as i64).collect();
    let counts: Vec<i64> = groups.iter().map(|g| g.len() as i64).collect();
    let mut inverse = vec![0i64; n];
    groups
        .iter()
        .enumerate()
        .for_each(|(k, g)| g.iter().for_each(|&i| inverse[i] = k as i64));
    let x = cx.val(0)?;
    let (x, axis) = match axis {
        Some(a) => (x, axis_of(a, shape.len())?),
        None => (cx.b().reshape(x, [n])?, 0),
    };
    let places = cx.i64s(&firsts, &[firsts.len()])?;
    let y = cx.add(Op::Gather { axis }, &[x, places])?;
    let list = |v: &[i64]| Tensor::from_slice(v, &[v.len()]).map(Out::tensor);
    Ok(vec![
        Out::Value(y),
        list(&firsts)?,
        list(&inverse)?,
        list(&counts)?,
    ])
}

/// NaN sorts last.
fn values_are_nan(values: &[f64], mut slice: impl Iterator<Item = usize>) -> bool {
    slice.next().is_some_and(|e| values[e].is_nan())
}

/// Between integers of one width a conversion wraps, which keeps the bits; others only as constants.
fn bit_cast<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let to = dtype_of(cx.i("to", 0)? as i32)?;
    let from = cx.ty(0)?.dtype;
    if from == to {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    if from.size_bytes() != to.size_bytes() {
        return Err(Error::invalid(format!("{from} and {to} differ in width")));
    }
    if let Some(t) = cx.constant(0)?.filter(|_| to != DType::Bool) {
        return Ok(vec![Out::tensor(Tensor::from_bytes(
            to,
            t.shape(),
            t.as_bytes(),
        )?)]);
    }
    let whole = |d: DType| d.is_int() || d == DType::Bool;
    if !whole(from) || !to.is_int() {
        return Err(Error::unsupported(format!("the bits of {from} as {to}")));
    }
    let x = cx.val(0)?;
    one(cx.b().cast(x, to)?)
}
