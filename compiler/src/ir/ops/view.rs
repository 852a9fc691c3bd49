//! Ops that move elements: broadcast, reshape, transpose, slice, pad, concat. Gradients lead the way back.

use super::gather::scatter_slices;
use super::{Op, PadMode};
use crate::error::{Error, Result};
use crate::ir::axes::{Passed, Transposed, invert, moved};
use crate::ir::dim::{Bindings, Dim};
use crate::ir::eval::view::{count, strides};
use crate::ir::eval::{Call, concrete, view};
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, broadcast_shapes, check_axis};
use crate::ir::scalar::ScalarOp;
use crate::ir::types::{Shape, Type};
use crate::ir::{eval, infer};
use gristmill_runtime::{DType, Tensor};

pub(super) fn broadcast_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Broadcast { shape });
    if broadcast_shapes(&args[0].shape, shape)? != *shape {
        return Err(format!(
            "{} does not broadcast to {}",
            args[0],
            Shape(shape.clone())
        ));
    }
    infer::one(args[0].dtype, shape.clone())
}

pub(super) fn broadcast_eval(c: &Call) -> Result<Vec<Tensor>> {
    eval::one(view::broadcast(c.inputs[0], c.shape))
}

pub(super) fn broadcast_axes(t: &Transposed) -> Option<Passed> {
    let Op::Broadcast { shape } = t.op else {
        return None;
    };
    let lead = shape.len() - t.perm.len();
    let perm: Vec<usize> = (0..lead).chain(t.perm.iter().map(|p| p + lead)).collect();
    let shape: Vec<Dim> = moved(shape, &perm);
    let op = Op::Broadcast { shape };
    Some(Passed { op, perm })
}

/// The sum over the repeated axes.
pub(super) fn broadcast_gradient(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    v.give(0, g)
}

pub(super) fn reshape_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Reshape { shape });
    let out = Type {
        dtype: args[0].dtype,
        shape: Shape(shape.clone()),
    };
    let (from, to) = (args[0].shape.n_elements(), out.shape.n_elements());
    // An unknown difference is checked once all symbols have values.
    if (from.clone() - to.clone())
        .as_const()
        .is_some_and(|n| n != 0)
    {
        return Err(format!("{} has {from} elements, {out} has {to}", args[0]));
    }
    Ok(vec![out])
}

pub(super) fn reshape_eval(c: &Call) -> Result<Vec<Tensor>> {
    eval::one(Ok(c.inputs[0].reshaped(c.shape)?))
}

pub(super) fn reshape_gradient(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    let shape = v.shape(v.x(0));
    let back = v.reshape(g, &shape)?;
    v.give(0, back)
}

pub(super) fn transpose_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Transpose { perm });
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    if sorted != (0..args[0].rank()).collect::<Vec<_>>() {
        return Err(format!(
            "{perm:?} is not a permutation of the axes of {}",
            args[0]
        ));
    }
    infer::one(
        args[0].dtype,
        perm.iter().map(|&p| args[0].shape[p].clone()).collect(),
    )
}

pub(super) fn transpose_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Transpose { perm });
    eval::one(view::transpose(c.inputs[0], perm))
}

pub(super) fn transpose_gradient(v: &mut Vjp) -> Result<()> {
    let Op::Transpose { perm } = v.op() else {
        return v.refuse("the op is no transpose");
    };
    let g = v.g()?;
    let back = v.transpose(g, invert(&perm))?;
    v.give(0, back)
}

pub(super) fn slice_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        Slice {
            starts,
            sizes,
            steps
        }
    );
    let rank = args[0].rank();
    if starts.len() != rank || sizes.len() != rank || steps.len() != rank || steps.contains(&0) {
        return Err(format!(
            "starts, sizes and non-zero steps must have one entry per axis of {}",
            args[0]
        ));
    }
    for i in 0..rank {
        let last = starts[i].clone() + (sizes[i].clone() - 1.into()).scale(steps[i]);
        let inside = |p: &Dim| {
            (p.clone()).as_const().is_none_or(|c| c >= 0)
                && (args[0].shape[i].clone() - p.clone())
                    .as_const()
                    .is_none_or(|c| c > 0)
        };
        // Nothing may begin behind the last element, but nowhere else outside.
        let after = starts[i].clone() - 1.into();
        let is_outside = match sizes[i].is(0) {
            true => !starts[i].is(0) && !inside(&after),
            false => !inside(&starts[i]) || !inside(&last),
        };
        if is_outside || sizes[i].as_const().is_some_and(|c| c < 0) {
            return Err(format!(
                "axis {i}: start {}, size {}, step {} leaves {}",
                starts[i], sizes[i], steps[i], args[0]
            ));
        }
    }
    infer::one(args[0].dtype, sizes.clone())
}

/// An empty slice may start outside of its operand.
pub(super) fn slice_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Slice { starts, steps });
    if let Some(empty) = c.empty() {
        return empty;
    }
    let starts = concrete(starts, &Bindings::new())?;
    let own = strides(c.inputs[0].shape());
    let start = starts.iter().zip(&own).map(|(&s, &k)| s as isize * k).sum();
    let steps = steps.iter().zip(&own);
    let strides: Vec<isize> = steps.map(|(&s, &k)| (s as isize).wrapping_mul(k)).collect();
    eval::one(view::strided(c.inputs[0], c.shape, &strides, start))
}

pub(super) fn slice_axes(t: &Transposed) -> Option<Passed> {
    let Op::Slice {
        starts,
        sizes,
        steps,
    } = t.op
    else {
        return None;
    };
    t.passed(Op::Slice {
        starts: moved(starts, t.perm),
        sizes: moved(sizes, t.perm),
        steps: moved(steps, t.perm),
    })
}

/// Zeros with the cotangent at the elements read.
pub(super) fn slice_gradient(v: &mut Vjp) -> Result<()> {
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
    // An extent may be 0 at run time, without a last element.
    sizes[axis] = span.greatest(&0.into());
    v.slice(flat, vec![Dim::constant(0); sizes.len()], sizes)
}

/// Zeros of `shape` with `x` at the position `low`.
fn embed(v: &mut Vjp, x: ValueId, low: &[Dim], shape: &[Dim]) -> Result<ValueId> {
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

pub(super) fn pad_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Pad { low, high, mode });
    if low.len() != args[0].rank() || high.len() != args[0].rank() {
        return Err(format!(
            "low and high must have one entry per axis of {}",
            args[0]
        ));
    }
    if (args.len() == 2) != (*mode == PadMode::Constant) {
        return Err("mode constant takes a pad value, the other modes take none".into());
    }
    if let Some(v) = args
        .get(1)
        .filter(|v| v.dtype != args[0].dtype || v.rank() != 0)
    {
        return Err(format!("pad value must be {}[], got {v}", args[0].dtype));
    }
    for (i, d) in args[0].shape.iter().enumerate() {
        let limit = d
            .as_const()
            .map(|c| if *mode == PadMode::Reflect { c - 1 } else { c });
        let most = low[i].max(high[i]) as i64;
        if matches!(mode, PadMode::Reflect | PadMode::Wrap)
            && limit.is_some_and(|l| most > l.max(0))
            || *mode == PadMode::Edge && limit == Some(0) && most > 0
        {
            return Err(format!(
                "axis {i}: {mode:?} padding by {most} needs more elements than {} has",
                args[0]
            )
            .to_lowercase());
        }
    }
    infer::one(
        args[0].dtype,
        args[0]
            .shape
            .iter()
            .enumerate()
            .map(|(i, d)| d.clone() + low[i].saturating_add(high[i]).into())
            .collect(),
    )
}

/// One axis after the other.
pub(super) fn pad_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Pad { low, high, mode });
    let (mut out, value) = (c.inputs[0].clone(), c.inputs.get(1).copied());
    for axis in (0..low.len()).filter(|&a| low[a] > 0 || high[a] > 0) {
        out = pad_axis(&out, value, axis, (low[axis], high[axis]), *mode)?;
    }
    Ok(vec![out])
}

fn pad_axis(
    x: &Tensor,
    value: Option<&Tensor>,
    axis: usize,
    (low, high): (usize, usize),
    mode: PadMode,
) -> Result<Tensor> {
    let extent = x.shape()[axis];
    let mut shape = x.shape().to_vec();
    shape[axis] = extent.saturating_add(low).saturating_add(high);
    let mut out = Tensor::zeros(x.dtype(), &shape)?;
    let inner = count(&shape[axis + 1..]).saturating_mul(x.dtype().size_bytes());
    if out.is_empty() {
        return Ok(out);
    }
    let source: Vec<Option<usize>> = (0..shape[axis])
        .map(|i| pad_source(i as isize - low as isize, extent as isize, mode))
        .collect();
    let from = x.as_bytes();
    for (row, to) in out.as_bytes_mut().chunks_exact_mut(inner).enumerate() {
        let (outer, i) = (row / shape[axis], row % shape[axis]);
        match (source[i], value) {
            (Some(s), _) => to.copy_from_slice(&from[(outer * extent + s) * inner..][..inner]),
            (None, Some(v)) => to
                .chunks_exact_mut(v.size_bytes())
                .for_each(|e| e.copy_from_slice(v.as_bytes())),
            (None, None) => return Err(Error::internal("constant padding without a value")),
        }
    }
    Ok(out)
}

/// Source in `0..extent` of position `i` of a padded axis, `i` counted from its first element; `None` where
/// the constant goes.
fn pad_source(i: isize, extent: isize, mode: PadMode) -> Option<usize> {
    let inside = (0..extent).contains(&i);
    let source = match mode {
        _ if inside => i,
        PadMode::Constant => return None,
        PadMode::Reflect if i < 0 => -i,
        PadMode::Reflect => 2 * (extent - 1) - i,
        PadMode::Edge => i.clamp(0, extent - 1),
        PadMode::Wrap => i.rem_euclid(extent),
    };
    Some(source as usize)
}

pub(super) fn pad_axes(t: &Transposed) -> Option<Passed> {
    let Op::Pad { low, high, mode } = t.op else {
        return None;
    };
    t.passed(Op::Pad {
        low: moved(low, t.perm),
        high: moved(high, t.perm),
        mode: *mode,
    })
}

pub(super) fn pad_gradient(v: &mut Vjp) -> Result<()> {
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

/// Axis by axis, cotangents of copies are added to the cotangent of their source.
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

/// The source of each element of the padded axis, in an axis of `n` elements.
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

pub(super) fn concat_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Concat { axis });
    check_axis(*axis, &args[0])?;
    let mut out = args[0].shape.0.clone();
    for t in &args[1..] {
        let fits = t.dtype == args[0].dtype
            && t.rank() == out.len()
            && (0..out.len()).all(|i| i == *axis || t.shape[i] == out[i]);
        if !fits {
            return Err(format!("cannot join {} and {t} along axis {axis}", args[0]));
        }
        out[*axis] = out[*axis].clone() + t.shape[*axis].clone();
    }
    infer::one(args[0].dtype, out)
}

pub(super) fn concat_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Concat { axis });
    eval::one(view::concat(c.inputs, *axis, c.shape))
}

pub(super) fn concat_axes(t: &Transposed) -> Option<Op> {
    let Op::Concat { axis } = *t.op else {
        return None;
    };
    let axis = t.perm[axis];
    Some(Op::Concat { axis })
}

/// Each part gets its slice.
pub(super) fn concat_gradient(v: &mut Vjp) -> Result<()> {
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
