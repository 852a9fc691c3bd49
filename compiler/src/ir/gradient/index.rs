//! Gradients of reads at computed positions.

use super::super::axes::invert;
use super::super::dim::Dim;
use super::super::graph::ValueId;
use super::super::ops::{Op, ScatterKind};
use super::super::types::Shape;
use super::Vjp;
use crate::error::Result;

pub fn gather(v: &mut Vjp) -> Result<()> {
    let Op::Gather { axis } = v.op() else {
        return v.refuse("the op is no gather");
    };
    let g = v.g()?;
    let shape = v.shape(v.x(0));
    let sum = scatter_slices(v, g, &shape, v.x(1), axis)?;
    v.give(0, sum)
}

/// Zeros of `shape` to which the slices of `g` are added at the positions along `axis` that a gather reads them from.
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

pub fn gather_elements(v: &mut Vjp) -> Result<()> {
    let Op::GatherElements { axis } = v.op() else {
        return v.refuse("the op is no gather of elements");
    };
    let g = v.g()?;
    let sum = add_elements(v, axis, v.x(1), g)?;
    v.give(0, sum)
}

/// Zeros of the type of the first operand, with `g` added at positions along an axis.
fn add_elements(v: &mut Vjp, axis: usize, indices: ValueId, g: ValueId) -> Result<ValueId> {
    let zeros = v.zeros_like(v.x(0))?;
    let kind = ScatterKind::Add;
    v.emit(Op::ScatterElements { axis, kind }, &[zeros, indices, g])
}

pub fn gather_nd(v: &mut Vjp) -> Result<()> {
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

/// Selected values pass their cotangents to where they were.
pub fn top_k(v: &mut Vjp) -> Result<()> {
    let Op::TopK { axis, .. } = v.op() else {
        return v.refuse("the op is no selection of the greatest");
    };
    let g = v.g()?;
    let sum = add_elements(v, axis, v.result(1), g)?;
    v.give(0, sum)
}
