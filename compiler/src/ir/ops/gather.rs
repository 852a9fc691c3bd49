//! Reads at computed positions, and checks of positions. A negative index counts from the end; one out of range is an error.

use super::{Op, ScatterKind};
use crate::error::{Error, ErrorKind, Result};
use crate::ir::axes::{Passed, Transposed, along, invert};
use crate::ir::dim::Dim;
use crate::ir::eval::Call;
use crate::ir::eval::view::{count, for_each_offset, strides};
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, check_axis};
use crate::ir::types::{Shape, Type};
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{eval, infer, work};
use gristmill_runtime::{DType, Tensor, with_dtype};

pub(super) fn check_index_dtype(t: &Type) -> Result<(), String> {
    if matches!(t.dtype, DType::I32 | DType::I64) {
        Ok(())
    } else {
        Err(format!("indices must be i32 or i64, got {t}"))
    }
}

/// Extents of `small` must be at most those of `large`, where both are known. Axis `free` is not compared.
pub(super) fn check_bounded(
    what: &str,
    small: &Type,
    large: &Type,
    free: Option<usize>,
) -> Result<(), String> {
    for i in (0..small.rank()).filter(|&i| Some(i) != free) {
        if (large.shape[i].clone() - small.shape[i].clone())
            .as_const()
            .is_some_and(|c| c < 0)
        {
            return Err(format!("{what} {small} exceed data {large} on axis {i}"));
        }
    }
    Ok(())
}

/// Length of the index tuples, checked against the data rank.
pub(super) fn tuple_len(data: &Type, indices: &Type, batch_dims: usize) -> Result<usize, String> {
    check_index_dtype(indices)?;
    let last = indices
        .shape
        .last()
        .and_then(Dim::as_usize)
        .ok_or_else(|| format!("the last axis of indices {indices} must be a constant"))?;
    if batch_dims + last > data.rank()
        || batch_dims >= indices.rank()
        || data.shape[..batch_dims] != indices.shape[..batch_dims]
    {
        return Err(format!(
            "index tuples of {indices} after {batch_dims} batch axes do not fit data {data}"
        ));
    }
    Ok(last)
}

/// The indices as `i64`; the type rule allows `i32` and `i64`.
pub(super) fn indices(t: &Tensor) -> Vec<i64> {
    match t.dtype() {
        DType::I32 => t.as_slice::<i32>().iter().map(|&i| i.into()).collect(),
        _ => t.as_slice::<i64>().to_vec(),
    }
}

/// Position of index `i` along an axis.
pub(super) fn position(i: i64, extent: usize, axis: usize) -> Result<usize> {
    let n = extent as i64;
    let p = if i < 0 { i.saturating_add(n) } else { i };
    if (0..n).contains(&p) {
        return Ok(p as usize);
    }
    let message = format!("index {i} is out of range for axis {axis} of extent {extent}");
    Err(Error::invalid(message))
}

/// Offsets of the elements selected by `at` along `axis` in a tensor of shape `data`, in the order of `at`.
pub(super) fn element_offsets(data: &[usize], at: &Tensor, axis: usize) -> Result<Vec<usize>> {
    let mut own = strides(data);
    let step = std::mem::take(&mut own[axis]);
    let rows = indices(at);
    let mut offsets = Vec::with_capacity(rows.len());
    for_each_offset(at.shape(), &own, 0, |o| offsets.push(o as usize));
    for (o, i) in offsets.iter_mut().zip(rows) {
        *o += position(i, data[axis], axis)? * step as usize;
    }
    Ok(offsets)
}

/// Element offsets of the slices selected by index tuples after `batch_dims` shared axes, and the slices' length.
pub(super) fn tuple_offsets(
    data: &[usize],
    at: &Tensor,
    batch_dims: usize,
) -> Result<(Vec<usize>, usize)> {
    let (&k, lead) = at
        .shape()
        .split_last()
        .expect("the type rule asks for a last axis");
    let own = strides(data);
    let slice = count(&data[batch_dims + k..]);
    let batch_size = count(&data[batch_dims..]);
    let per_batch = count(&lead[batch_dims..]).max(1);
    let tuples = indices(at);
    let mut offsets = Vec::new();
    for t in 0..count(lead) {
        let mut offset = t / per_batch * batch_size;
        for j in 0..k {
            let axis = batch_dims + j;
            offset += position(tuples[t * k + j], data[axis], axis)? * own[axis] as usize;
        }
        offsets.push(offset);
    }
    Ok((offsets, slice))
}

pub(super) fn gather_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Gather { axis });
    check_axis(*axis, &args[0])?;
    check_index_dtype(&args[1])?;
    let s = &args[0].shape;
    infer::one(
        args[0].dtype,
        s[..*axis]
            .iter()
            .chain(args[1].shape.iter())
            .chain(&s[axis + 1..])
            .cloned()
            .collect(),
    )
}

pub(super) fn gather_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Gather { axis });
    let data = c.inputs[0];
    let extent = data.shape()[*axis];
    let rows = indices(c.inputs[1]).into_iter();
    let rows = rows.map(|i| position(i, extent, *axis));
    let rows = rows.collect::<Result<Vec<usize>>>()?;
    let mut out = Tensor::zeros(data.dtype(), c.shape)?;
    if out.is_empty() {
        return Ok(vec![out]);
    }
    let inner = count(&data.shape()[axis + 1..]).saturating_mul(data.dtype().size_bytes());
    let from = data.as_bytes();
    for (i, to) in out.as_bytes_mut().chunks_exact_mut(inner).enumerate() {
        let (outer, row) = (i / rows.len(), rows[i % rows.len()]);
        to.copy_from_slice(&from[(outer * extent + row) * inner..][..inner]);
    }
    Ok(vec![out])
}

pub(super) fn gather_work(s: &Sizes) -> Count {
    work::count(WorkClass::Gather, s.n_out())
}

/// Indices of rank 0 drop the axis, those of rank 1 keep it.
pub(super) fn gather_axes(t: &Transposed) -> Option<Passed> {
    let Op::Gather { axis } = *t.op else {
        return None;
    };
    match t.ranks[1] {
        rank @ (0 | 1) => t.reduced(along(t)?, &[axis], rank == 1),
        _ => None,
    }
}

pub(super) fn gather_gradient(v: &mut Vjp) -> Result<()> {
    let Op::Gather { axis } = v.op() else {
        return v.refuse("the op is no gather");
    };
    let g = v.g()?;
    let shape = v.shape(v.x(0));
    let sum = scatter_slices(v, g, &shape, v.x(1), axis)?;
    v.give(0, sum)
}

/// Zeros of `shape`, with the slices of `g` added along `axis` at the positions read by a gather.
pub(super) fn scatter_slices(
    v: &mut Vjp,
    g: ValueId,
    shape: &[Dim],
    indices: ValueId,
    axis: usize,
) -> Result<ValueId> {
    let (rank, n_index_axes) = (shape.len(), v.ty(indices).rank());
    let after = axis + n_index_axes;
    let index_axes = axis..after;
    let perm = index_axes
        .chain(0..axis)
        .chain(after..rank + n_index_axes - 1);
    let updates = v.transpose(g, perm.collect())?;
    let front: Vec<usize> = [axis]
        .into_iter()
        .chain(0..axis)
        .chain(axis + 1..rank)
        .collect();
    let extents: Vec<Dim> = front.iter().map(|&i| shape[i].clone()).collect();
    let dtype = v.ty(g).dtype;
    let zeros = v.full(dtype, &extents, 0.0)?;
    let tuples = as_tuples(v, indices)?;
    let sum = v.add_at(zeros, tuples, updates)?;
    v.transpose(sum, invert(&front))
}

/// Positions as tuples of one.
fn as_tuples(v: &mut Vjp, indices: ValueId) -> Result<ValueId> {
    let mut shape = v.shape(indices);
    shape.push(1.into());
    v.reshape(indices, &shape)
}

pub(super) fn gather_elements_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, GatherElements { axis });
    check_axis(*axis, &args[0])?;
    check_index_dtype(&args[1])?;
    if args[0].rank() != args[1].rank() {
        return Err(format!(
            "data {} and indices {} must have the same rank",
            args[0], args[1]
        ));
    }
    check_bounded("indices", &args[1], &args[0], Some(*axis))?;
    infer::one(args[0].dtype, args[1].shape.0.clone())
}

pub(super) fn gather_elements_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, GatherElements { axis });
    let (data, at) = (c.inputs[0], c.inputs[1]);
    let offsets = element_offsets(data.shape(), at, *axis)?;
    let mut out = Tensor::zeros(data.dtype(), at.shape())?;
    with_dtype!(data.dtype(), T => {
        let from = data.as_slice::<T>();
        out.as_mut_slice::<T>().iter_mut().zip(offsets).for_each(|(to, o)| *to = from[o]);
    });
    Ok(vec![out])
}

pub(super) fn gather_elements_gradient(v: &mut Vjp) -> Result<()> {
    let Op::GatherElements { axis } = v.op() else {
        return v.refuse("the op is no gather of elements");
    };
    let g = v.g()?;
    let sum = add_elements(v, axis, v.x(1), g)?;
    v.give(0, sum)
}

/// Zeros of the type of the first operand, with `g` added at positions along an axis.
pub(super) fn add_elements(
    v: &mut Vjp,
    axis: usize,
    indices: ValueId,
    g: ValueId,
) -> Result<ValueId> {
    let zeros = v.zeros_like(v.x(0))?;
    let kind = ScatterKind::Add;
    v.emit(Op::ScatterElements { axis, kind }, &[zeros, indices, g])
}

pub(super) fn gather_nd_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, GatherNd { batch_dims });
    let k = tuple_len(&args[0], &args[1], *batch_dims)?;
    let lead = &args[1].shape[..args[1].rank() - 1];
    infer::one(
        args[0].dtype,
        lead.iter()
            .chain(&args[0].shape[batch_dims + k..])
            .cloned()
            .collect(),
    )
}

pub(super) fn gather_nd_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, GatherNd { batch_dims });
    let (data, at) = (c.inputs[0], c.inputs[1]);
    let mut out = Tensor::zeros(data.dtype(), c.shape)?;
    if out.is_empty() && count(at.shape()) == 0 {
        return Ok(vec![out]);
    }
    let (offsets, slice) = tuple_offsets(data.shape(), at, *batch_dims)?;
    if out.is_empty() {
        return Ok(vec![out]);
    }
    let size = data.dtype().size_bytes();
    let (from, slices) = (
        data.as_bytes(),
        out.as_bytes_mut().chunks_exact_mut(slice * size),
    );
    for (to, o) in slices.zip(offsets) {
        to.copy_from_slice(&from[o * size..][..slice * size]);
    }
    Ok(vec![out])
}

pub(super) fn gather_nd_gradient(v: &mut Vjp) -> Result<()> {
    let Op::GatherNd { batch_dims } = v.op() else {
        return v.refuse("the op is no gather of tuples");
    };
    let g = v.g()?;
    let tuples = full_tuples(v, v.x(1), batch_dims)?;
    let zeros = v.zeros_like(v.x(0))?;
    let sum = v.add_at(zeros, tuples, g)?;
    v.give(0, sum)
}

/// Index tuples with the positions along the batch axes in front.
fn full_tuples(v: &mut Vjp, indices: ValueId, batch_dims: usize) -> Result<ValueId> {
    if batch_dims == 0 {
        return Ok(indices);
    }
    let ty = v.ty(indices).clone();
    let last = ty.rank() - 1;
    let Shape(mut shape) = ty.shape;
    shape[last] = 1.into();
    let mut parts = Vec::new();
    for axis in 0..batch_dims {
        let (dtype, shape) = (ty.dtype, shape.clone());
        parts.push(v.emit(Op::Iota { dtype, shape, axis }, &[])?);
    }
    parts.push(indices);
    v.emit(Op::Concat { axis: last }, &parts)
}

pub(super) fn check_indices_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, CheckIndices { extents });
    check_index_dtype(&args[0])?;
    let last = args[0].shape.last().and_then(Dim::as_usize);
    if extents.is_empty() || (extents.len() > 1 && last != Some(extents.len())) {
        let n = extents.len();
        return Err(format!("{n} extents for the last axis of {}", args[0]));
    }
    infer::one(DType::I64, args[0].shape.0.clone())
}

pub(super) fn check_indices_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, CheckIndices { extents });
    let extents: Option<Vec<usize>> = extents.iter().map(Dim::as_usize).collect();
    let extents = extents.ok_or_else(|| Error::internal("an extent is not known"))?;
    let all = indices(c.inputs[0]).into_iter().enumerate();
    let positions = all.map(|(t, i)| {
        let axis = t % extents.len();
        Ok(position(i, extents[axis], axis)? as i64)
    });
    let positions = positions.collect::<Result<Vec<i64>>>()?;
    eval::one(Ok(Tensor::from_slice(&positions, c.shape)?))
}

pub(super) fn check_finite_infer(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    match args[0].dtype.is_float() {
        true => Ok(vec![args[0].clone()]),
        false => Err(format!("expected floats, got {}", args[0])),
    }
}

pub(super) fn check_finite_eval(c: &Call) -> Result<Vec<Tensor>> {
    let x = c.inputs[0];
    match x.to_f64s().iter().find(|e| !e.is_finite()) {
        Some(e) => {
            let message = format!("an element is {e}, expected finite ones");
            Err(Error::new(ErrorKind::NotFinite, message))
        }
        None => eval::one(Ok(x.clone())),
    }
}
