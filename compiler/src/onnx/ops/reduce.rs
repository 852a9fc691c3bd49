//! Reductions, softmax, cumulative sums, sorting.

use super::super::import::{Ctx, OpDef, Out, Outs, axes_of, axis_of, one};
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
fn reduce<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let name = cx.node.op_type.as_str();
    let rank = cx.ty(0)?.rank();
    let keepdims = cx.flag("keepdims", true)?;
    let no_op = cx.flag("noop_with_empty_axes", false)?;
    let as_operand = cx.opset >= if name == "ReduceSum" { 13 } else { 18 };
    let given = if as_operand {
        cx.opt_ints_in(1)?
    } else {
        cx.ints("axes")?
    };
    let axes = match given.filter(|a| !a.is_empty()) {
        Some(a) => axes_of(&a, rank)?,
        None if no_op => Vec::new(),
        None => (0..rank).collect(),
    };
    let x = cx.val(0)?;
    let dtype = cx.dtype_of(x);
    if name.starts_with("ReduceLog") && !dtype.is_float() {
        // ONNX took integers out of the schema with version 28: a logarithm has no integer result.
        return Err(Error::unsupported(format!("a logarithm of {dtype}"))
            .hint("cast the operand to a floating-point type"));
    }
    one(reduce_by(cx, name, x, &axes, keepdims)?)
}

fn reduce_by(
    cx: &mut Ctx<'_, '_>,
    name: &str,
    x: ValueId,
    axes: &[usize],
    keepdims: bool,
) -> Result<ValueId> {
    let square = |cx: &mut Ctx<'_, '_>| cx.map(ScalarOp::Mul, &[x, x]);
    let (kind, x) = match name {
        "ReduceMean" => (ReduceKind::Mean, x),
        "ReduceMax" => (ReduceKind::Max, x),
        "ReduceMin" => (ReduceKind::Min, x),
        "ReduceProd" => (ReduceKind::Prod, x),
        "ReduceL1" => (ReduceKind::Sum, cx.map(ScalarOp::Abs, &[x])?),
        "ReduceL2" => return l2(cx, x, axes, keepdims),
        "ReduceSumSquare" => (ReduceKind::Sum, square(cx)?),
        "ReduceLogSumExp" => return log_sum_exp(cx, x, axes, keepdims),
        _ => (ReduceKind::Sum, x),
    };
    let r = if axes.is_empty() {
        x
    } else {
        cx.reduce(kind, x, axes, keepdims)?
    };
    match name {
        "ReduceLogSum" => cx.map(ScalarOp::Log, &[r]),
        _ => Ok(r),
    }
}

/// `sqrt(sum(x^2))`; integers go through `f64`.
fn l2(cx: &mut Ctx<'_, '_>, x: ValueId, axes: &[usize], keepdims: bool) -> Result<ValueId> {
    let dtype = cx.dtype_of(x);
    let wide = if dtype.is_float() {
        x
    } else {
        cx.b().cast(x, DType::F64)?
    };
    let squares = cx.map(ScalarOp::Mul, &[wide, wide])?;
    let sum = if axes.is_empty() {
        squares
    } else {
        cx.reduce(ReduceKind::Sum, squares, axes, keepdims)?
    };
    let root = cx.map(ScalarOp::Sqrt, &[sum])?;
    cx.b().cast(root, dtype)
}

/// `m + log(sum(exp(x - m)))` with `m = max(x)`, so that nothing overflows; infinite maxima are not subtracted.
fn log_sum_exp(
    cx: &mut Ctx<'_, '_>,
    x: ValueId,
    axes: &[usize],
    keepdims: bool,
) -> Result<ValueId> {
    if axes.is_empty() {
        return Ok(x);
    }
    let m = cx.reduce(ReduceKind::Max, x, axes, true)?;
    let dtype = cx.dtype_of(x);
    let size = cx.map(ScalarOp::Abs, &[m])?;
    let infinity = cx.b().scalar(dtype, f64::INFINITY);
    let finite = cx.map(ScalarOp::Lt, &[size, infinity])?;
    let zero = cx.b().scalar(dtype, 0.0);
    let m = cx.map(ScalarOp::Select, &[finite, m, zero])?;
    let shifted = cx.map(ScalarOp::Sub, &[x, m])?;
    let e = cx.map(ScalarOp::Exp, &[shifted])?;
    let sum = cx.reduce(ReduceKind::Sum, e, axes, true)?;
    let log = cx.map(ScalarOp::Log, &[sum])?;
    let r = cx.map(ScalarOp::Add, &[log, m])?;
    if keepdims {
        return Ok(r);
    }
    let shape = cx.shape_of(r);
    let kept: Vec<Dim> = shape
        .iter()
        .enumerate()
        .filter(|(i, _)| !axes.contains(i))
        .map(|(_, d)| d.clone())
        .collect();
    cx.b().reshape(r, kept)
}

fn arg<'m>(cx: &mut Ctx<'_, 'm>, kind: Extremum) -> Result<Outs<'m>> {
    let axis = axis_of(cx.i("axis", 0)?, cx.ty(0)?.rank())?;
    let keepdims = cx.flag("keepdims", true)?;
    let select_last = cx.flag("select_last_index", false)?;
    let x = cx.val(0)?;
    one(cx.add(
        Op::ArgReduce {
            kind,
            axis,
            keepdims,
            select_last,
        },
        &[x],
    )?)
}

fn arg_max<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    arg(cx, Extremum::Max)
}

fn arg_min<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    arg(cx, Extremum::Min)
}

/// Applies `f` along the operator's axis. Before version 13 the operand is seen as a matrix, split at the axis.
fn along_axis<'m>(
    cx: &mut Ctx<'_, 'm>,
    f: impl Fn(&mut Ctx<'_, 'm>, ValueId, usize) -> Result<ValueId>,
) -> Result<Outs<'m>> {
    let shape = cx.ty(0)?.shape;
    let flat = cx.opset < 13;
    let axis = cx.i("axis", if flat { 1 } else { -1 })?;
    let x = cx.val(0)?;
    if shape.rank() == 0 {
        return Err(Error::invalid("expected rank 1 or more, got a scalar"));
    }
    let axis = if flat && axis == shape.rank() as i64 {
        shape.rank()
    } else {
        axis_of(axis, shape.rank())?
    };
    if !flat || axis + 1 == shape.rank() {
        return one(f(cx, x, axis)?);
    }
    let product = |dims: &[Dim]| dims.iter().fold(Dim::constant(1), |n, d| n.product(d));
    let matrix = cx
        .b()
        .reshape(x, [product(&shape[..axis]), product(&shape[axis..])])?;
    let r = f(cx, matrix, 1)?;
    one(cx.b().reshape(r, shape.0)?)
}

fn softmax<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    along_axis(cx, |cx, x, axis| {
        cx.add(Op::Softmax { axis, log: false }, &[x])
    })
}

fn log_softmax<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    along_axis(cx, |cx, x, axis| {
        cx.add(Op::Softmax { axis, log: true }, &[x])
    })
}

fn hardmax<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    along_axis(cx, |cx, x, axis| {
        let best = cx.add(
            Op::ArgReduce {
                kind: Extremum::Max,
                axis,
                keepdims: true,
                select_last: false,
            },
            &[x],
        )?;
        let ty = cx.type_of(x);
        let position = cx.add(
            Op::Iota {
                dtype: DType::I64,
                shape: ty.shape.0,
                axis,
            },
            &[],
        )?;
        let hot = cx.map(ScalarOp::Eq, &[best, position])?;
        cx.b().cast(hot, ty.dtype)
    })
}

fn cum_sum<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (exclusive, reverse) = (cx.flag("exclusive", false)?, cx.flag("reverse", false)?);
    let axis = cx
        .ints_in(1)?
        .first()
        .copied()
        .ok_or_else(|| Error::invalid("axis is empty"))?;
    let axis = axis_of(axis, cx.ty(0)?.rank())?;
    let x = cx.val(0)?;
    one(cx.add(
        Op::CumSum {
            axis,
            exclusive,
            reverse,
        },
        &[x],
    )?)
}

/// Running product along a constant axis.
fn cum_prod<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (exclusive, reverse) = (cx.flag("exclusive", false)?, cx.flag("reverse", false)?);
    let axis = cx
        .ints_in(1)?
        .first()
        .copied()
        .ok_or_else(|| Error::invalid("axis is empty"))?;
    let x = cx.val(0)?;
    let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
    let axis = axis_of(axis, s.rank())?;
    let mut perm: Vec<usize> = (0..s.rank()).filter(|&a| a != axis).collect();
    perm.insert(0, axis);
    let x = cx.b().transpose(x, &perm)?;
    let unit = cx.b().scalar(dtype, 1.0);
    let first = cx.shape_of(x)[1..].to_vec();
    let unit = cx.b().broadcast(unit, first)?;
    let results = scan_over(cx, &[unit], &[x], reverse, |b, f| {
        let product = b.mul(f[0], f[1])?;
        Ok(vec![product, if exclusive { f[0] } else { product }])
    })?;
    let mut back: Vec<usize> = (1..s.rank()).collect();
    back.insert(axis, 0);
    one(cx.b().transpose(results[1], &back)?)
}

/// `k` is an attribute before version 10, operand 1 since. Results are always sorted.
fn top_k<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    cx.ignore(&["sorted"]); // Without it the order is not specified.
    let axis = axis_of(cx.i("axis", -1)?, cx.ty(0)?.rank())?;
    let largest = cx.flag("largest", true)?;
    let k = if cx.opset < 10 {
        Dim::constant(cx.i("k", -1)?)
    } else {
        cx.dims(1)?
            .first()
            .cloned()
            .ok_or_else(|| Error::invalid("k is empty"))?
    };
    let x = cx.val(0)?;
    let outs = cx.b().add(Op::TopK { k, axis, largest }, &[x])?;
    Ok(outs.into_iter().map(Out::Value).collect())
}
