//! Reads and writes at computed positions. A negative index counts from the end; one out of range is an error.

use super::reduce::extreme;
use super::scalar::{Scalar, Wide};
use super::view::{count, for_each_offset, strides};
use crate::error::{Error, Result};
use crate::ir::{Extremum, ScalarOp, ScatterKind};
use gristmill_runtime::{DType, Tensor, with_dtype};

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

/// [`Op::Gather`](crate::ir::Op::Gather) into `shape`.
pub fn gather(data: &Tensor, at: &Tensor, axis: usize, shape: &[usize]) -> Result<Tensor> {
    let extent = data.shape()[axis];
    let rows: Vec<usize> = indices(at)
        .into_iter()
        .map(|i| position(i, extent, axis))
        .collect::<Result<_>>()?;
    let mut out = Tensor::zeros(data.dtype(), shape)?;
    let inner = count(&data.shape()[axis + 1..]).saturating_mul(data.dtype().size_bytes());
    if out.is_empty() {
        return Ok(out);
    }
    let from = data.as_bytes();
    for (i, to) in out.as_bytes_mut().chunks_exact_mut(inner).enumerate() {
        let (outer, row) = (i / rows.len(), rows[i % rows.len()]);
        to.copy_from_slice(&from[(outer * extent + row) * inner..][..inner]);
    }
    Ok(out)
}

/// Offsets into a tensor of shape `data` of the elements that `at` selects along `axis`, in the order of `at`.
fn element_offsets(data: &[usize], at: &Tensor, axis: usize) -> Result<Vec<usize>> {
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

/// [`Op::GatherElements`](crate::ir::Op::GatherElements).
pub fn gather_elements(data: &Tensor, at: &Tensor, axis: usize) -> Result<Tensor> {
    let offsets = element_offsets(data.shape(), at, axis)?;
    let mut out = Tensor::zeros(data.dtype(), at.shape())?;
    with_dtype!(data.dtype(), T => {
        let from = data.as_slice::<T>();
        out.as_mut_slice::<T>().iter_mut().zip(offsets).for_each(|(to, o)| *to = from[o]);
    });
    Ok(out)
}

/// Element offsets of the slices that the index tuples select after `batch_dims` shared axes, and the slices' length.
fn tuple_offsets(data: &[usize], at: &Tensor, batch_dims: usize) -> Result<(Vec<usize>, usize)> {
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

/// [`Op::GatherNd`](crate::ir::Op::GatherNd) into `shape`.
pub fn gather_nd(data: &Tensor, at: &Tensor, batch_dims: usize, shape: &[usize]) -> Result<Tensor> {
    let mut out = Tensor::zeros(data.dtype(), shape)?;
    if out.is_empty() && count(at.shape()) == 0 {
        return Ok(out);
    }
    let (offsets, slice) = tuple_offsets(data.shape(), at, batch_dims)?;
    if out.is_empty() {
        return Ok(out);
    }
    let size = data.dtype().size_bytes();
    let from = data.as_bytes();
    for (to, o) in out
        .as_bytes_mut()
        .chunks_exact_mut(slice * size)
        .zip(offsets)
    {
        to.copy_from_slice(&from[o * size..][..slice * size]);
    }
    Ok(out)
}

/// [`Op::CheckIndices`](crate::ir::Op::CheckIndices).
pub fn check_indices(at: &Tensor, extents: &[usize]) -> Result<Tensor> {
    let all = indices(at).into_iter().enumerate();
    let positions = all.map(|(t, i)| {
        let axis = t % extents.len();
        Ok(position(i, extents[axis], axis)? as i64)
    });
    let positions = positions.collect::<Result<Vec<i64>>>()?;
    Ok(Tensor::from_slice(&positions, at.shape())?)
}

/// Joins an update with the element that is there; half types compute in `f32` and round each time.
fn join<T: Scalar>(kind: ScatterKind, old: T, new: T) -> Result<T> {
    let arithmetic = |op: ScalarOp| match (T::binary(op), old.to_wide(), new.to_wide()) {
        (Some(f), ..) => Ok(f(old, new)),
        (None, Wide::Float(a), Wide::Float(b)) => {
            let f = f32::binary(op).expect("f32 adds and multiplies");
            Ok(T::from_wide(Wide::Float(f(a as f32, b as f32).into())))
        }
        _ => Err(Error::unsupported(format!(
            "scatter with {op} of {}",
            T::DTYPE
        ))),
    };
    match kind {
        ScatterKind::Set => Ok(new),
        ScatterKind::Add => arithmetic(ScalarOp::Add),
        ScatterKind::Mul => arithmetic(ScalarOp::Mul),
        ScatterKind::Max => Ok(extreme(old, new, Extremum::Max)),
        ScatterKind::Min => Ok(extreme(old, new, Extremum::Min)),
    }
}

/// [`Op::ScatterElements`](crate::ir::Op::ScatterElements); updates join in row-major order.
pub fn scatter_elements(
    data: &Tensor,
    at: &Tensor,
    updates: &Tensor,
    axis: usize,
    kind: ScatterKind,
) -> Result<Tensor> {
    let offsets = element_offsets(data.shape(), at, axis)?;
    let mut out = data.clone();
    with_dtype!(data.dtype(), T => {
        let to = out.as_mut_slice::<T>();
        for (o, &v) in offsets.into_iter().zip(updates.as_slice::<T>()) {
            to[o] = join(kind, to[o], v)?;
        }
    });
    Ok(out)
}

/// [`Op::ScatterNd`](crate::ir::Op::ScatterNd); updates join in row-major order.
pub fn scatter_nd(
    data: &Tensor,
    at: &Tensor,
    updates: &Tensor,
    kind: ScatterKind,
) -> Result<Tensor> {
    let mut out = data.clone();
    if count(at.shape()) == 0 && updates.is_empty() {
        return Ok(out);
    }
    let (offsets, slice) = tuple_offsets(data.shape(), at, 0)?;
    if slice == 0 {
        return Ok(out);
    }
    with_dtype!(data.dtype(), T => {
        let to = out.as_mut_slice::<T>();
        for (o, new) in offsets.into_iter().zip(updates.as_slice::<T>().chunks_exact(slice)) {
            for (old, &v) in to[o..o + slice].iter_mut().zip(new) {
                *old = join(kind, *old, v)?;
            }
        }
    });
    Ok(out)
}
