//! Reductions, softmax, cumulative sums, sorting.

use super::super::import::{Ctx, OpDef, Out, Outs, axes_of, axis_of, moved_axis, one, product};
use super::control::scan_over;
use crate::error::{Error, Result};
use crate::ir::{Dim, Extremum, Op, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("ReduceSum", (1, 2), reduce),
    OpDef::new("ReduceMean", (1, 2), reduce),
    OpDef::new("ReduceMax", (1, 2), reduce),
    OpDef::new("ReduceMin", (1, 2), reduce),
    OpDef::new("ReduceProd", (1, 2), reduce),
    OpDef::new("ReduceL1", (1, 2), reduce),
    OpDef::new("ReduceL2", (1, 2), reduce),
    OpDef::new("ReduceSumSquare", (1, 2), reduce),
    OpDef::new("ReduceLogSum", (1, 2), reduce),
    OpDef::new("ReduceLogSumExp", (1, 2), reduce),
    OpDef::new("ArgMax", (1, 1), arg_max),
    OpDef::new("ArgMin", (1, 1), arg_min),
    OpDef::new("Softmax", (1, 1), softmax),
    OpDef::new("LogSoftmax", (1, 1), log_softmax),
    OpDef::new("Hardmax", (1, 1), hardmax),
    OpDef::new("CumSum", (2, 2), cum_sum),
    OpDef::new("CumProd", (2, 2), cum_prod),
    OpDef::new("TopK", (1, 2), top_k),
];

/// Axes are an attribute before version 18 (13 for `ReduceSum`), operand 1 since.
fn reduce(cx: &mut Ctx) -> Result<Outs> {
    let name = cx.node.op_type.as_str();
    let keepdims = cx.flag("keepdims", true)?;
    let axes = reduced_axes(cx, if name == "ReduceSum" { 13 } else { 18 })?;
    let x = cx.val(0)?;
    let dtype = cx.dtype_of(x);
    if name.starts_with("ReduceLog") && !dtype.is_float() {
        // ONNX took integers out of the schema with version 28: a logarithm has no integer result.
        let e = Error::unsupported(format!("a logarithm of {dtype}"));
        return Err(e.hint("cast the operand to a floating-point type"));
    }
    one(reduce_by(cx, name, x, &axes, keepdims)?)
}

fn reduced_axes(cx: &mut Ctx, as_operand_since: i64) -> Result<Vec<usize>> {
    let rank = cx.ty(0)?.rank();
    let no_op = cx.flag("noop_with_empty_axes", false)?;
    let given = if cx.opset >= as_operand_since {
        cx.opt_ints_in(1)?
    } else {
        cx.ints("axes")?
    };
    match given.filter(|a| !a.is_empty()) {
        Some(a) => axes_of(&a, rank),
        None if no_op => Ok(Vec::new()),
        None => Ok((0..rank).collect()),
    }
}

fn reduce_by(
    cx: &mut Ctx,
    name: &str,
    x: ValueId,
    axes: &[usize],
    keepdims: bool,
) -> Result<ValueId> {
    let (kind, x) = match name {
        "ReduceMean" => (ReduceKind::Mean, x),
        "ReduceMax" => (ReduceKind::Max, x),
        "ReduceMin" => (ReduceKind::Min, x),
        "ReduceProd" => (ReduceKind::Prod, x),
        "ReduceL1" => (ReduceKind::Sum, cx.abs(x)?),
        "ReduceL2" => return l2(cx, x, axes, keepdims),
        "ReduceSumSquare" => (ReduceKind::Sum, cx.mul(x, x)?),
        "ReduceLogSumExp" => return log_sum_exp(cx, x, axes, keepdims),
        _ => (ReduceKind::Sum, x),
    };
    let r = reduced(cx, kind, x, axes, keepdims)?;
    match name {
        "ReduceLogSum" => cx.log(r),
        _ => Ok(r),
    }
}

/// A reduction; the operand itself over no axes.
fn reduced(
    cx: &mut Ctx,
    kind: ReduceKind,
    x: ValueId,
    axes: &[usize],
    keepdims: bool,
) -> Result<ValueId> {
    if axes.is_empty() {
        Ok(x)
    } else {
        cx.reduce(kind, x, axes, keepdims)
    }
}

/// `sqrt(sum(x^2))`; integers go through `f64`.
fn l2(cx: &mut Ctx, x: ValueId, axes: &[usize], keepdims: bool) -> Result<ValueId> {
    let dtype = cx.dtype_of(x);
    let wide = if dtype.is_float() { dtype } else { DType::F64 };
    let x = cx.cast(x, wide)?;
    let squares = cx.mul(x, x)?;
    let sum = reduced(cx, ReduceKind::Sum, squares, axes, keepdims)?;
    let root = cx.sqrt(sum)?;
    cx.cast(root, dtype)
}

/// `m + log(sum(exp(x - m)))` with `m = max(x)`, so that nothing overflows; infinite maxima are not
/// subtracted.
fn log_sum_exp(cx: &mut Ctx, x: ValueId, axes: &[usize], keepdims: bool) -> Result<ValueId> {
    if axes.is_empty() {
        return Ok(x);
    }
    let m = finite_max(cx, x, axes)?;
    let shifted = cx.sub(x, m)?;
    let e = cx.exp(shifted)?;
    let sum = cx.reduce(ReduceKind::Sum, e, axes, true)?;
    let log = cx.log(sum)?;
    let r = cx.add_(log, m)?;
    if keepdims {
        return Ok(r);
    }
    let shape = cx.shape_of(r);
    let rest = (0..shape.rank()).filter(|i| !axes.contains(i));
    let rest: Vec<&Dim> = rest.map(|i| &shape[i]).collect();
    cx.reshape(r, rest)
}

/// The maximum over the axes, which stay; 0 where it is infinite.
fn finite_max(cx: &mut Ctx, x: ValueId, axes: &[usize]) -> Result<ValueId> {
    let m = cx.reduce(ReduceKind::Max, x, axes, true)?;
    let dtype = cx.dtype_of(x);
    let size = cx.abs(m)?;
    let finite = cx.with_real(ScalarOp::Lt, size, f64::INFINITY)?;
    let zero = cx.scalar(dtype, 0.0);
    cx.select(finite, m, zero)
}

fn arg(cx: &mut Ctx, kind: Extremum) -> Result<Outs> {
    let op = Op::ArgReduce {
        kind,
        axis: cx.axis(0)?,
        keepdims: cx.flag("keepdims", true)?,
        select_last: cx.flag("select_last_index", false)?,
    };
    let x = cx.val(0)?;
    one(cx.add(op, &[x])?)
}

fn arg_max(cx: &mut Ctx) -> Result<Outs> {
    arg(cx, Extremum::Max)
}

fn arg_min(cx: &mut Ctx) -> Result<Outs> {
    arg(cx, Extremum::Min)
}

/// Applies `f` along the operator's axis. Before version 13 the operand is seen as a matrix, split
/// at the axis.
fn along_axis(
    cx: &mut Ctx,
    f: impl Fn(&mut Ctx, ValueId, usize) -> Result<ValueId>,
) -> Result<Outs> {
    let shape = cx.ty(0)?.shape;
    let rank = shape.rank();
    let flat = cx.opset < 13;
    let axis = cx.i("axis", if flat { 1 } else { -1 })?;
    let x = cx.val(0)?;
    if rank == 0 {
        return Err(Error::invalid("expected rank 1 or more, got a scalar"));
    }
    let axis = match flat && axis == rank as i64 {
        true => rank,
        false => axis_of(axis, rank)?,
    };
    if !flat || axis + 1 == rank {
        return one(f(cx, x, axis)?);
    }
    let matrix = cx.reshape(x, [product(&shape[..axis]), product(&shape[axis..])])?;
    let r = f(cx, matrix, 1)?;
    one(cx.reshape(r, shape.0)?)
}

fn softmax(cx: &mut Ctx) -> Result<Outs> {
    along_axis(cx, |cx, x, axis| {
        cx.add(Op::Softmax { axis, log: false }, &[x])
    })
}

fn log_softmax(cx: &mut Ctx) -> Result<Outs> {
    along_axis(cx, |cx, x, axis| {
        cx.add(Op::Softmax { axis, log: true }, &[x])
    })
}

fn hardmax(cx: &mut Ctx) -> Result<Outs> {
    along_axis(cx, |cx, x, axis| {
        let best = Op::ArgReduce {
            kind: Extremum::Max,
            axis,
            keepdims: true,
            select_last: false,
        };
        let best = cx.add(best, &[x])?;
        let ty = cx.type_of(x);
        let position = cx.iota(ty.shape.0, axis)?;
        let hot = cx.eq(best, position)?;
        cx.cast(hot, ty.dtype)
    })
}

fn cum_sum(cx: &mut Ctx) -> Result<Outs> {
    let (axis, exclusive, reverse) = running(cx)?;
    let x = cx.val(0)?;
    let op = Op::CumSum {
        axis,
        exclusive,
        reverse,
    };
    one(cx.add(op, &[x])?)
}

/// Axis, `exclusive` and `reverse` of a running sum or product.
fn running(cx: &mut Ctx) -> Result<(usize, bool, bool)> {
    let (exclusive, reverse) = (cx.flag("exclusive", false)?, cx.flag("reverse", false)?);
    let axis = cx.first_int(1)?;
    let axis = axis.ok_or_else(|| Error::invalid("axis is empty"))?;
    Ok((axis_of(axis, cx.ty(0)?.rank())?, exclusive, reverse))
}

/// Running product along a constant axis.
fn cum_prod(cx: &mut Ctx) -> Result<Outs> {
    let (axis, exclusive, reverse) = running(cx)?;
    let x = cx.val(0)?;
    let (rank, dtype) = (cx.shape_of(x).rank(), cx.dtype_of(x));
    let x = cx.transpose(x, &moved_axis(rank, axis, 0))?;
    let unit = cx.scalar(dtype, 1.0);
    let first = cx.shape_of(x)[1..].to_vec();
    let unit = cx.broadcast(unit, first)?;
    let results = scan_over(cx, &[unit], &[x], reverse, |b, f| {
        let product = b.mul(f[0], f[1])?;
        Ok(vec![product, if exclusive { f[0] } else { product }])
    })?;
    one(cx.transpose(results[1], &moved_axis(rank, 0, axis))?)
}

/// `k` is an attribute before version 10, operand 1 since. Results are always sorted.
fn top_k(cx: &mut Ctx) -> Result<Outs> {
    cx.ignore(&["sorted"]); // Without it the order is not specified.
    let axis = cx.axis(-1)?;
    let largest = cx.flag("largest", true)?;
    let k = match cx.opset < 10 {
        true => Some(Dim::constant(cx.i("k", -1)?)),
        false => cx.dims(1)?.first().cloned(),
    };
    let k = k.ok_or_else(|| Error::invalid("k is empty"))?;
    let x = cx.val(0)?;
    let outs = cx.b().add(Op::TopK { k, axis, largest }, &[x])?;
    Ok(outs.into_iter().map(Out::Value).collect())
}
