//! Gathers, scatters and operators built on them.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Out, Outs, axis_of, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, ScalarOp, ScatterKind, ValueId};
use gristmill_runtime::{DType, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Gather", (2, 2), gather),
    OpDef::new("GatherElements", (2, 2), gather_elements),
    OpDef::new("GatherND", (2, 2), gather_nd),
    OpDef::new("Scatter", (3, 3), scatter_elements),
    OpDef::new("ScatterElements", (3, 3), scatter_elements),
    OpDef::new("ScatterND", (3, 3), scatter_nd),
    OpDef::new("OneHot", (3, 3), one_hot),
    OpDef::new("NonZero", (1, 1), non_zero),
    OpDef::new("Compress", (2, 2), compress),
    OpDef::new("ReverseSequence", (2, 2), reverse_sequence),
];

fn gather(cx: &mut Ctx) -> Result<Outs> {
    let axis = cx.axis(0)?;
    let [x, indices] = cx.first()?;
    one(cx.gather(x, indices, axis)?)
}

fn gather_elements(cx: &mut Ctx) -> Result<Outs> {
    let axis = cx.axis(0)?;
    let [x, indices] = cx.first()?;
    one(cx.add(Op::GatherElements { axis }, &[x, indices])?)
}

fn gather_nd(cx: &mut Ctx) -> Result<Outs> {
    let batch_dims = usize::try_from(cx.i("batch_dims", 0)?)
        .map_err(|_| Error::invalid("batch_dims is negative"))?;
    let [x, indices] = cx.first()?;
    one(cx.add(Op::GatherNd { batch_dims }, &[x, indices])?)
}

fn scatter_kind(cx: &Ctx) -> Result<ScatterKind> {
    let kinds = &[
        ("none", ScatterKind::Set),
        ("add", ScatterKind::Add),
        ("mul", ScatterKind::Mul),
        ("max", ScatterKind::Max),
        ("min", ScatterKind::Min),
    ];
    cx.choice("reduction", "none", kinds)
}

fn scatter_elements(cx: &mut Ctx) -> Result<Outs> {
    let axis = cx.axis(0)?;
    let kind = scatter_kind(cx)?;
    let args = cx.vals()?;
    one(cx.add(Op::ScatterElements { axis, kind }, &args)?)
}

fn scatter_nd(cx: &mut Ctx) -> Result<Outs> {
    let kind = scatter_kind(cx)?;
    let args = cx.vals()?;
    one(cx.add(Op::ScatterNd { kind }, &args)?)
}

/// `values = [off, on]`; an index outside the depth makes no hot element.
fn one_hot(cx: &mut Ctx) -> Result<Outs> {
    let ty = cx.ty(0)?;
    let axis = axis_of(cx.i("axis", -1)?, ty.rank() + 1)?;
    let depth = one_hot_depth(cx)?;
    let (x, values) = (cx.val(0)?, cx.val(2)?);
    let x = cx.cast(x, DType::I64)?;
    let mut dims = ty.shape.0;
    dims.insert(axis, Dim::constant(1));
    let x = cx.reshape(x, dims.clone())?;
    // Negative indices count from the end.
    let zero = cx.scalar(DType::I64, 0.0);
    let negative = cx.map(ScalarOp::Lt, &[x, zero])?;
    let n = cx.dim_value(&depth)?;
    let wrapped = cx.add_(x, n)?;
    let x = cx.select(negative, wrapped, x)?;
    dims[axis] = depth;
    let position = cx.iota(dims, axis)?;
    let hot = cx.eq(x, position)?;
    let (off, on) = (pick(cx, values, 0)?, pick(cx, values, 1)?);
    one(cx.select(hot, on, off)?)
}

fn one_hot_depth(cx: &mut Ctx) -> Result<Dim> {
    let depth = match cx.constant(1)? {
        Some(t) if t.len() == 1 => Dim::constant(t.to_f64s()[0] as i64),
        _ => {
            let first = cx.dims(1)?.first().cloned();
            first.ok_or_else(|| Error::invalid("depth is empty"))?
        }
    };
    match depth.as_const() {
        Some(n) if n < 0 => Err(Error::invalid(format!("depth {n} is negative"))),
        Some(_) => Ok(depth),
        None if cx.is_decided_by_run(&depth) => Ok(depth),
        None => Err(cx.unknown(1)),
    }
}

/// Element `i` of a vector as a scalar.
fn pick(cx: &mut Ctx, v: ValueId, i: usize) -> Result<ValueId> {
    let e = cx.slice_axis(v, 0, i, 1)?;
    cx.reshape(e, Vec::<Dim>::new())
}

/// The shape of the result depends on the values.
fn non_zero(cx: &mut Ctx) -> Result<Outs> {
    if let Some(t) = cx.constant(0)? {
        return known_non_zero(t);
    }
    if !cx.is_run_time() {
        return Err(cx.unknown(0));
    }
    let (x, count) = (cx.val(0)?, cx.new_symbol());
    one(cx.add(Op::NonZero { count }, &[x])?)
}

fn known_non_zero(t: Tensor) -> Result<Outs> {
    if t.size_bytes() > FOLD_LIMIT_BYTES {
        let message = format!("of a tensor of {} bytes", t.size_bytes());
        return Err(Error::unsupported(message));
    }
    let values = t.to_f64s();
    let hits: Vec<usize> = (0..t.len()).filter(|&i| values[i] != 0.0).collect();
    let (rank, n) = (t.shape().len(), hits.len());
    let mut out = vec![0i64; rank * n];
    for (k, &hit) in hits.iter().enumerate() {
        let mut rest = hit;
        for (axis, &extent) in t.shape().iter().enumerate().rev() {
            out[axis * n + k] = (rest % extent) as i64;
            rest /= extent;
        }
    }
    let places = Tensor::from_slice(&out, &[rank, n])?;
    Ok(vec![Out::tensor(places)])
}

/// The slices along `axis` (of the flat tensor without it) for which the condition holds.
fn compress(cx: &mut Ctx) -> Result<Outs> {
    let indices = chosen(cx)?;
    let shape = cx.ty(0)?.shape;
    let x = cx.val(0)?;
    let (x, axis) = match cx.opt_i("axis")? {
        Some(a) => (x, axis_of(a, shape.rank())?),
        None => (cx.reshape(x, [shape.n_elements()])?, 0),
    };
    one(cx.gather(x, indices, axis)?)
}

/// Positions where the condition, operand 1, holds.
fn chosen(cx: &mut Ctx) -> Result<ValueId> {
    if cx.is_run_time() && cx.constant(1)?.is_none() {
        let (condition, count) = (cx.val(1)?, cx.new_symbol());
        let n = cx.shape_of(condition).n_elements();
        let condition = cx.reshape(condition, [n])?;
        let places = Op::NonZero {
            count: count.clone(),
        };
        let places = cx.add(places, &[condition])?;
        return cx.reshape(places, [count]);
    }
    let condition = cx.ints_in(1)?;
    let chosen = (0i64..).zip(&condition).filter(|(_, c)| **c != 0);
    let places: Vec<i64> = chosen.map(|(i, _)| i).collect();
    cx.i64s(&places, &[places.len()])
}

/// Reverses the first `lens[b]` elements along `time_axis` of each batch element.
fn reverse_sequence(cx: &mut Ctx) -> Result<Outs> {
    let shape = cx.ty(0)?.shape;
    let batch = axis_of(cx.i("batch_axis", 1)?, shape.rank())?;
    let time = axis_of(cx.i("time_axis", 0)?, shape.rank())?;
    let [x, lens] = cx.first()?;
    let lens = cx.cast(lens, DType::I64)?;
    let mut along = vec![Dim::constant(1); shape.rank()];
    along[batch] = shape[batch].clone();
    let lens = cx.reshape(lens, along)?;
    let t = cx.iota(shape.0, time)?;
    let last = cx.with_real(ScalarOp::Sub, lens, 1.0)?;
    let mirrored = cx.sub(last, t)?;
    let inside = cx.map(ScalarOp::Lt, &[t, lens])?;
    let indices = cx.select(inside, mirrored, t)?;
    one(cx.add(Op::GatherElements { axis: time }, &[x, indices])?)
}
