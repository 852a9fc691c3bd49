//! Gradients of ops that only move elements: the way back.

use super::super::axes::invert;
use super::super::dim::Dim;
use super::super::graph::ValueId;
use super::super::ops::{Op, PadMode};
use super::super::scalar::ScalarOp;
use super::Vjp;
use super::index::scatter_slices;
use crate::error::Result;
use gristmill_runtime::DType;

/// The sum over the repeated axes.
pub fn broadcast(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    v.give(0, g)
}

pub fn reshape(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    let shape = v.shape(v.x(0));
    let back = v.reshape(g, &shape)?;
    v.give(0, back)
}

pub fn transpose(v: &mut Vjp) -> Result<()> {
    let Op::Transpose { perm } = v.op() else {
        return v.refuse("the op is no transpose");
    };
    let g = v.g()?;
    let back = v.transpose(g, invert(&perm))?;
    v.give(0, back)
}

/// Each part gets its slice.
pub fn concat(v: &mut Vjp) -> Result<()> {
    let Op::Concat { axis } = v.op() else {
        return v.refuse("the op is no concatenation");
    };
    let g = v.g()?;
    let mut start = Dim::constant(0);
    for i in 0..v.n_operands() {
        let sizes = v.shape(v.x(i));
        let next = start.clone() + sizes[axis].clone();
        if v.needs(i) {
            let mut starts = vec![Dim::constant(0); sizes.len()];
            starts[axis] = start;
            let part = v.slice(g, starts, sizes)?;
            v.give(i, part)?;
        }
        start = next;
    }
    Ok(())
}

/// Zeros with the cotangent at the elements that were read.
pub fn slice(v: &mut Vjp) -> Result<()> {
    let Op::Slice {
        starts,
        sizes,
        steps,
    } = v.op()
    else {
        return v.refuse("the op is no slice");
    };
    if sizes.iter().any(|n| n.is(0)) {
        let zeros = v.zeros_like(v.x(0))?;
        return v.give(0, zeros);
    }
    let mut spread = v.g()?;
    let mut low = starts;
    for (axis, &step) in steps.iter().enumerate() {
        if step < 0 {
            low[axis] = low[axis].clone() + (sizes[axis].clone() - 1.into()).scale(step);
            spread = reversed(v, spread, axis)?;
        }
        spread = spaced(v, spread, axis, step.saturating_abs())?;
    }
    let shape = v.shape(v.x(0));
    let back = embed(v, spread, &low, &shape)?;
    v.give(0, back)
}

fn reversed(v: &mut Vjp, x: ValueId, axis: usize) -> Result<ValueId> {
    let sizes = v.shape(x);
    let mut starts = vec![Dim::constant(0); sizes.len()];
    let mut steps = vec![1; sizes.len()];
    starts[axis] = sizes[axis].clone() - 1.into();
    steps[axis] = -1;
    let op = Op::Slice {
        starts,
        sizes,
        steps,
    };
    v.emit(op, &[x])
}

/// `step - 1` zeros between neighbours along an axis: `[n]` as `[n, 1]`, padded to `[n, step]`, as `[n * step]` without the
/// zeros behind the last element.
fn spaced(v: &mut Vjp, x: ValueId, axis: usize, step: i64) -> Result<ValueId> {
    if step == 1 {
        return Ok(x);
    }
    let shape = v.shape(x);
    let mut column = shape.clone();
    column.insert(axis + 1, 1.into());
    let x = v.reshape(x, &column)?;
    column[axis + 1] = step.into();
    let low = vec![Dim::constant(0); column.len()];
    let rows = embed(v, x, &low, &column)?;
    let mut flat = shape.clone();
    flat[axis] = shape[axis].scale(step);
    let flat = v.reshape(rows, &flat)?;
    let span = (shape[axis].clone() - 1.into()).scale(step) + 1.into();
    let mut sizes = shape;
    // An extent that a run shows to be 0 has no last element.
    sizes[axis] = span.greatest(&0.into());
    v.slice(flat, vec![Dim::constant(0); sizes.len()], sizes)
}

/// Zeros of `shape` with `x` at the position `low`.
pub(super) fn embed(v: &mut Vjp, x: ValueId, low: &[Dim], shape: &[Dim]) -> Result<ValueId> {
    let size = v.shape(x);
    let rest = |i: usize| shape[i].clone() - low[i].clone() - size[i].clone();
    let high: Vec<Dim> = (0..shape.len()).map(rest).collect();
    let fixed = |i: usize| Some((low[i].as_usize()?, high[i].as_usize()?));
    let borders: Vec<Option<(usize, usize)>> = (0..shape.len()).map(fixed).collect();
    let known: Vec<(usize, usize)> = borders.iter().map(|b| b.unwrap_or((0, 0))).collect();
    let mut x = pad_with_zeros(v, x, &known)?;
    for axis in (0..shape.len()).filter(|&i| borders[i].is_none()) {
        x = joined_with_zeros(v, x, axis, &low[axis], &high[axis])?;
    }
    Ok(x)
}

pub(super) fn pad_with_zeros(
    v: &mut Vjp,
    x: ValueId,
    borders: &[(usize, usize)],
) -> Result<ValueId> {
    if borders.iter().all(|b| *b == (0, 0)) {
        return Ok(x);
    }
    let zero = v.real(x, 0.0)?;
    let (low, high) = borders.iter().copied().unzip();
    let mode = PadMode::Constant;
    v.emit(Op::Pad { low, high, mode }, &[x, zero])
}

/// Borders with symbolic extents, which the attributes of a pad cannot hold.
fn joined_with_zeros(
    v: &mut Vjp,
    x: ValueId,
    axis: usize,
    low: &Dim,
    high: &Dim,
) -> Result<ValueId> {
    let mut parts = vec![x];
    for (border, at) in [(low, 0), (high, 1)] {
        if border.is(0) {
            continue;
        }
        let mut shape = v.shape(x);
        shape[axis] = border.clone();
        let dtype = v.ty(x).dtype;
        let zeros = v.full(dtype, &shape, 0.0)?;
        parts.insert(at * parts.len(), zeros);
    }
    v.emit(Op::Concat { axis }, &parts)
}

pub fn pad(v: &mut Vjp) -> Result<()> {
    let Op::Pad { low, high, mode } = v.op() else {
        return v.refuse("the op is no pad");
    };
    match mode {
        PadMode::Constant => pad_constant(v, &low),
        _ => pad_copies(v, &low, &high, mode),
    }
}

/// The interior to the operand, the sum of the border to the scalar.
fn pad_constant(v: &mut Vjp, low: &[usize]) -> Result<()> {
    let g = v.g()?;
    let sizes = v.shape(v.x(0));
    let starts = low.iter().map(|&n| n.into()).collect();
    let inner = v.slice(g, starts, sizes)?;
    v.give(0, inner)?;
    if v.needs(1) {
        let (all, inside) = (v.unbroadcast(g, &[])?, v.unbroadcast(inner, &[])?);
        let border = v.sub(all, inside)?;
        v.give(1, border)?;
    }
    Ok(())
}

/// Axis by axis, cotangents of copies are added to that of their source.
fn pad_copies(v: &mut Vjp, low: &[usize], high: &[usize], mode: PadMode) -> Result<()> {
    let mut g = v.g()?;
    let shape = v.shape(v.x(0));
    for axis in (0..shape.len()).filter(|&i| (low[i], high[i]) != (0, 0)) {
        let mut summed = v.shape(g);
        let padded = std::mem::replace(&mut summed[axis], shape[axis].clone());
        let at = sources(v, &shape[axis], low[axis], padded, mode)?;
        g = scatter_slices(v, g, &summed, at, axis)?;
    }
    v.give(0, g)
}

/// The position in an axis of `n` elements that each element of the padded axis copies.
fn sources(v: &mut Vjp, n: &Dim, low: usize, padded: Dim, mode: PadMode) -> Result<ValueId> {
    let Some(n) = n.as_usize() else {
        return v.refuse("the padded axis has a symbolic extent and is not padded by a constant");
    };
    let op = Op::Iota {
        dtype: DType::I64,
        shape: vec![padded],
        axis: 0,
    };
    let i = v.emit(op, &[])?;
    let i = v.plus(i, -(low as f64))?;
    let last = n as f64 - 1.0;
    match mode {
        PadMode::Wrap => v.with_number(ScalarOp::Mod, i, n as f64),
        PadMode::Reflect => {
            let mirrored = v.map(ScalarOp::Abs, &[i])?;
            let beyond = v.minus_from(last, mirrored)?;
            let beyond = v.map(ScalarOp::Abs, &[beyond])?;
            v.minus_from(last, beyond)
        }
        _ => {
            let i = v.with_number(ScalarOp::Max, i, 0.0)?;
            v.with_number(ScalarOp::Min, i, last)
        }
    }
}
