//! Gathers, scatters and what is built on them.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Out, Outs, axis_of, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, ScalarOp, ScatterKind, Shape, ValueId};
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

fn gather<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let axis = axis_of(cx.i("axis", 0)?, cx.ty(0)?.rank())?;
    let (x, indices) = (cx.val(0)?, cx.val(1)?);
    one(cx.add(Op::Gather { axis }, &[x, indices])?)
}

fn gather_elements<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let axis = axis_of(cx.i("axis", 0)?, cx.ty(0)?.rank())?;
    let (x, indices) = (cx.val(0)?, cx.val(1)?);
    one(cx.add(Op::GatherElements { axis }, &[x, indices])?)
}

fn gather_nd<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let batch_dims = usize::try_from(cx.i("batch_dims", 0)?)
        .map_err(|_| Error::invalid("batch_dims is negative"))?;
    let (x, indices) = (cx.val(0)?, cx.val(1)?);
    one(cx.add(Op::GatherNd { batch_dims }, &[x, indices])?)
}

fn scatter_kind(cx: &Ctx<'_, '_>) -> Result<ScatterKind> {
    let kinds = &[
        ("none", ScatterKind::Set),
        ("add", ScatterKind::Add),
        ("mul", ScatterKind::Mul),
        ("max", ScatterKind::Max),
        ("min", ScatterKind::Min),
    ];
    cx.choice("reduction", "none", kinds)
}

fn scatter_elements<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let axis = axis_of(cx.i("axis", 0)?, cx.ty(0)?.rank())?;
    let kind = scatter_kind(cx)?;
    let args = cx.vals()?;
    one(cx.add(Op::ScatterElements { axis, kind }, &args)?)
}

fn scatter_nd<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let kind = scatter_kind(cx)?;
    let args = cx.vals()?;
    one(cx.add(Op::ScatterNd { kind }, &args)?)
}

/// `values = [off, on]`; an index outside the depth makes no hot element.
fn one_hot<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let ty = cx.ty(0)?;
    let axis = axis_of(cx.i("axis", -1)?, ty.rank() + 1)?;
    let depth = match cx.constant(1)? {
        Some(t) if t.len() == 1 => Dim::constant(t.to_f64s()[0] as i64),
        _ => cx
            .dims(1)?
            .first()
            .cloned()
            .ok_or_else(|| Error::invalid("depth is empty"))?,
    };
    if depth.as_const().is_some_and(|d| d < 0) {
        return Err(Error::invalid(format!("depth {depth} is negative")));
    }
    let (x, values) = (cx.val(0)?, cx.val(2)?);
    let x = cx.b().cast(x, DType::I64)?;
    let mut dims = ty.shape.0;
    dims.insert(axis, Dim::constant(1));
    let x = cx.b().reshape(x, dims.clone())?;
    // Negative indices count from the end.
    let zero = cx.b().scalar(DType::I64, 0.0);
    let negative = cx.map(ScalarOp::Lt, &[x, zero])?;
    let Some(n) = depth.as_const() else {
        return Err(cx.unknown(1));
    };
    let wrapped = cx.with_real(ScalarOp::Add, x, n as f64)?;
    let x = cx.map(ScalarOp::Select, &[negative, wrapped, x])?;
    dims[axis] = depth;
    let position = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: dims,
            axis,
        },
        &[],
    )?;
    let hot = cx.map(ScalarOp::Eq, &[x, position])?;
    let [off, on] = [0usize, 1].map(|i| pick(cx, values, i));
    one(cx.map(ScalarOp::Select, &[hot, on?, off?])?)
}

/// Element `i` of a vector as a scalar.
fn pick(cx: &mut Ctx<'_, '_>, v: ValueId, i: usize) -> Result<ValueId> {
    let e = cx.b().slice_axis(v, 0, i, 1)?;
    cx.b().reshape(e, Vec::<Dim>::new())
}

/// The shape of the result depends on the values: a constant operand only.
fn non_zero<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let t = cx.tensor(0)?;
    if t.size_bytes() > FOLD_LIMIT_BYTES {
        return Err(Error::unsupported(format!(
            "of a tensor of {} bytes",
            t.size_bytes()
        )));
    }
    let rank = t.shape().len();
    let hits: Vec<usize> = t
        .to_f64s()
        .iter()
        .enumerate()
        .filter(|(_, v)| **v != 0.0)
        .map(|(i, _)| i)
        .collect();
    let mut out = vec![0i64; rank * hits.len()];
    for (k, &hit) in hits.iter().enumerate() {
        let mut rest = hit;
        for axis in (0..rank).rev() {
            out[axis * hits.len() + k] = (rest % t.shape()[axis]) as i64;
            rest /= t.shape()[axis];
        }
    }
    Ok(vec![Out::tensor(Tensor::from_slice(
        &out,
        &[rank, hits.len()],
    )?)])
}

/// The slices along `axis` (of the flat tensor without it) for which the constant condition holds.
fn compress<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let condition = cx.ints_in(1)?;
    let shape = cx.ty(0)?.shape;
    let x = cx.val(0)?;
    let (x, axis) = match cx.opt_i("axis")? {
        Some(a) => (x, axis_of(a, shape.rank())?),
        None => (cx.b().reshape(x, [shape.n_elements()])?, 0),
    };
    let keep: Vec<i64> = (0..condition.len() as i64)
        .filter(|&i| condition[i as usize] != 0)
        .collect();
    let indices = cx.i64s(&keep, &[keep.len()])?;
    one(cx.add(Op::Gather { axis }, &[x, indices])?)
}

/// Reverses the first `lens[b]` elements along `time_axis` of each batch element.
fn reverse_sequence<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let shape = cx.ty(0)?.shape;
    let (batch, time) = (cx.i("batch_axis", 1)?, cx.i("time_axis", 0)?);
    let (batch, time) = (axis_of(batch, shape.rank())?, axis_of(time, shape.rank())?);
    let (x, lens) = (cx.val(0)?, cx.val(1)?);
    let lens = cx.b().cast(lens, DType::I64)?;
    let n = shape[batch].clone();
    let mut along = vec![Dim::constant(1); shape.rank()];
    along[batch] = n;
    let lens = cx.b().reshape(lens, along)?;
    let t = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: shape.0.clone(),
            axis: time,
        },
        &[],
    )?;
    let last = cx.with_real(ScalarOp::Sub, lens, 1.0)?;
    let mirrored = cx.map(ScalarOp::Sub, &[last, t])?;
    let inside = cx.map(ScalarOp::Lt, &[t, lens])?;
    let indices = cx.map(ScalarOp::Select, &[inside, mirrored, t])?;
    debug_assert_eq!(cx.shape_of(indices), Shape(shape.0));
    one(cx.add(Op::GatherElements { axis: time }, &[x, indices])?)
}
