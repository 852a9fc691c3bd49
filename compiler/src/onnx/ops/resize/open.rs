//! Resizing where lengths are not known at import: positions are computed as tensors, and taps are
//! gathered.

use super::super::super::import::{Ctx, Outs, one};
use super::{Coordinates, Mode, Request, Rounding, Sampling, cubic_kernel, misfit, polynomial};
use crate::error::{Error, Result};
use crate::ir::{Dim, ScalarOp, Shape, ValueId};
use gristmill_runtime::DType;

/// One axis to resize.
struct Axis {
    axis: usize,
    /// New length.
    to: Dim,
    /// Lengths and their ratio, as `f32` of rank 0.
    lengths: Lengths,
    /// True when nothing is resampled where both lengths are the same.
    by_size: bool,
}

#[derive(Clone, Copy)]
struct Lengths {
    from: ValueId,
    to: ValueId,
    scale: ValueId,
}

impl Request {
    /// True when a length of a resized axis is not known.
    pub(super) fn is_open(&self, shape: &Shape) -> bool {
        let is_open = |(i, &axis): (usize, &usize)| {
            let stays = match (&self.scales, &self.sizes) {
                (Some(scales), _) => scales.get(i) == Some(&1.0),
                (None, Some(sizes)) => sizes.get(i) == Some(&shape[axis]),
                (None, None) => true,
            };
            let size = self.sizes.as_ref().and_then(|sizes| sizes.get(i));
            let is_known = |d: &Dim| d.as_const().is_some();
            !stays && size.into_iter().chain([&shape[axis]]).any(|d| !is_known(d))
        };
        self.axes.iter().enumerate().any(is_open)
    }
}

/// Resizes by positions in tensors.
pub(super) fn resize(
    cx: &mut Ctx,
    sampling: &Sampling,
    request: &Request,
    shape: &Shape,
) -> Result<Outs> {
    if sampling.antialias || sampling.coordinates == Coordinates::TfCropAndResize {
        let mode = "antialias, and tf_crop_and_resize,";
        let message = format!("{mode} to or from lengths that are not known at import");
        return Err(Error::unsupported(message).hint("give the dims: --set NAME=N"));
    }
    let axes = match (&request.scales, &request.sizes) {
        (Some(scales), None) => by_scales(cx, shape, &request.axes, scales)?,
        (None, Some(sizes)) if request.is_stretched() => by_sizes(cx, shape, &request.axes, sizes)?,
        _ => {
            return Err(Error::unsupported(
                "sizes by keep_aspect_ratio_policy must be known",
            ));
        }
    };
    resampled(cx, sampling, &axes)
}

fn resampled(cx: &mut Ctx, sampling: &Sampling, axes: &[Axis]) -> Result<Outs> {
    let x = cx.val(0)?;
    let dtype = cx.dtype_of(x);
    let wide = if dtype.is_float() { dtype } else { DType::F32 };
    let is_moved_only = sampling.mode == Mode::Nearest;
    let mut y = if is_moved_only { x } else { cx.cast(x, wide)? };
    for axis in axes {
        let at = sampling.positions(cx, axis)?;
        y = match is_moved_only {
            true => {
                let at = sampling.rounded(cx, at)?;
                tap(cx, y, axis, at)?
            }
            false => sampling.joined(cx, y, axis, at)?,
        };
    }
    one(cx.cast(y, dtype)?)
}

fn by_sizes(cx: &mut Ctx, shape: &Shape, axes: &[usize], sizes: &[Dim]) -> Result<Vec<Axis>> {
    if sizes.len() != axes.len() {
        return Err(misfit(sizes.len(), axes));
    }
    let mut resized = Vec::new();
    for (&axis, to) in axes
        .iter()
        .zip(sizes)
        .filter(|(axis, to)| shape[**axis] != **to)
    {
        let (from, length) = (real(cx, &shape[axis])?, real(cx, to)?);
        let least = cx.with_real(ScalarOp::Max, from, 1.0)?;
        let lengths = Lengths {
            from,
            to: length,
            scale: rounded_op(cx, ScalarOp::Div, length, least)?,
        };
        resized.push(Axis {
            axis,
            to: to.clone(),
            lengths,
            by_size: true,
        });
    }
    Ok(resized)
}

fn by_scales(cx: &mut Ctx, shape: &Shape, axes: &[usize], scales: &[f64]) -> Result<Vec<Axis>> {
    let is_possible = |s: &f64| s.is_finite() && *s > 0.0;
    if scales.len() != axes.len() || !scales.iter().all(is_possible) {
        return Err(misfit(scales.len(), axes));
    }
    let mut resized = Vec::new();
    for (&axis, &scale) in axes.iter().zip(scales).filter(|(_, scale)| **scale != 1.0) {
        let from = real(cx, &shape[axis])?;
        let factor = cx.scalar(DType::F32, scale);
        let length = rounded_op(cx, ScalarOp::Mul, from, factor)?;
        let length = cx.floor(length)?;
        let to = match whole_multiple(&shape[axis], scale) {
            Some(to) => to,
            None => {
                let n = cx.cast(length, DType::I64)?;
                cx.extent(n)?
            }
        };
        let lengths = Lengths {
            from,
            to: length,
            scale: factor,
        };
        resized.push(Axis {
            axis,
            to,
            lengths,
            by_size: false,
        });
    }
    Ok(resized)
}

/// A length times a whole number, or divided by one and rounded down.
fn whole_multiple(from: &Dim, scale: f64) -> Option<Dim> {
    let whole = |v: f64| (v == v.round() && v < 1e6).then_some(v as i64);
    let multiple = whole(scale).map(|n| from.scale(n));
    multiple.or_else(|| Some(from.floor_div(whole(1.0 / scale)?)))
}

/// A dim as an `f32` of rank 0.
fn real(cx: &mut Ctx, d: &Dim) -> Result<ValueId> {
    let n = cx.dim_value(d)?;
    cx.cast(n, DType::F32)
}

impl Sampling {
    /// Positions in the source of the elements of the result: `f32[to]`.
    fn positions(&self, cx: &mut Ctx, axis: &Axis) -> Result<ValueId> {
        let i = cx.iota([axis.to.clone()], 0)?;
        let i = cx.cast(i, DType::F32)?;
        let at = self.resampled(cx, i, axis.lengths)?;
        if !axis.by_size {
            return Ok(at);
        }
        let stays = cx.eq(axis.lengths.from, axis.lengths.to)?;
        cx.select(stays, i, at)
    }

    /// Positions of elements that are resampled: [`Sampling::position`].
    fn resampled(&self, cx: &mut Ctx, i: ValueId, lengths: Lengths) -> Result<ValueId> {
        let Lengths { to, scale, .. } = lengths;
        let half = cx.scalar(DType::F32, 0.5);
        let middle = rounded_op(cx, ScalarOp::Add, i, half)?;
        let scaled = rounded_op(cx, ScalarOp::Div, middle, scale)?;
        let half_pixel = rounded_op(cx, ScalarOp::Sub, scaled, half)?;
        match self.coordinates {
            Coordinates::TfHalfPixelForNn => Ok(scaled),
            Coordinates::Asymmetric => rounded_op(cx, ScalarOp::Div, i, scale),
            Coordinates::PytorchHalfPixel => unless_single(cx, to, half_pixel),
            Coordinates::AlignCorners => aligned(cx, i, lengths),
            Coordinates::HalfPixelSymmetric => {
                let offset = symmetric_offset(cx, lengths)?;
                rounded_op(cx, ScalarOp::Add, half_pixel, offset)
            }
            _ => Ok(half_pixel),
        }
    }

    fn rounded(&self, cx: &mut Ctx, at: ValueId) -> Result<ValueId> {
        let (shift, up) = match self.rounding {
            Rounding::HalfDown => (-0.5, true),
            Rounding::HalfUp => (0.5, false),
            Rounding::Floor => (0.0, false),
            Rounding::Ceil => (0.0, true),
        };
        let at = cx.add_real(at, shift)?;
        let op = if up { ScalarOp::Ceil } else { ScalarOp::Floor };
        cx.map(op, &[at])
    }

    /// The weighted taps around each position.
    fn joined(&self, cx: &mut Ctx, x: ValueId, axis: &Axis, at: ValueId) -> Result<ValueId> {
        let low = cx.floor(at)?;
        let taps = if self.mode == Mode::Cubic {
            -1..=2
        } else {
            0..=1
        };
        let mut joined: Option<(ValueId, ValueId)> = None;
        for offset in taps {
            let place = cx.add_real(low, offset.into())?;
            let distance = distance(cx, at, place)?;
            let weight = self.weight(cx, distance)?;
            let weight = match self.exclude_outside {
                true => inside(cx, axis, place, weight)?,
                false => weight,
            };
            let element = tap(cx, x, axis, place)?;
            let along = along(cx, weight, axis, element)?;
            let part = cx.mul(element, along)?;
            joined = Some(match joined {
                None => (part, along),
                Some((sum, total)) => (cx.add_(sum, part)?, cx.add_(total, along)?),
            });
        }
        let (sum, total) = joined.ok_or_else(|| Error::internal("a filter without taps"))?;
        match self.exclude_outside {
            true => cx.div(sum, total),
            false => Ok(sum),
        }
    }

    /// Weight, in `f64`, of a tap at a distance from the position: the kernel of
    /// [`Sampling::kernel`].
    fn weight(&self, cx: &mut Ctx, distance: ValueId) -> Result<ValueId> {
        let d = cx.abs(distance)?;
        if self.mode != Mode::Cubic {
            let falling = cx.neg(d)?;
            let falling = cx.add_real(falling, 1.0)?;
            return cx.with_real(ScalarOp::Max, falling, 0.0);
        }
        let [near, far] = cubic_kernel(self.cubic_a);
        let far = polynomial(cx, d, far)?;
        let zero = cx.scalar_like(d, 0.0);
        let far = within(cx, d, 2.0, [far, zero])?;
        let near = polynomial(cx, d, near)?;
        within(cx, d, 1.0, [near, far])
    }
}

/// Distance, in `f64`, from one place to another.
fn distance(cx: &mut Ctx, from: ValueId, to: ValueId) -> Result<ValueId> {
    let (from, to) = (cx.cast(from, DType::F64)?, cx.cast(to, DType::F64)?);
    cx.sub(to, from)
}

/// The first value up to a distance, the second one beyond it.
fn within(cx: &mut Ctx, d: ValueId, most: f64, [near, far]: [ValueId; 2]) -> Result<ValueId> {
    let is_near = cx.with_real(ScalarOp::Le, d, most)?;
    cx.select(is_near, near, far)
}

/// An op of two `f32`, rounded by itself: it is computed in `f64`, so that no rule of algebra joins
/// it with others. Where the nearest of two elements is asked for, the last bit decides.
fn rounded_op(cx: &mut Ctx, op: ScalarOp, a: ValueId, b: ValueId) -> Result<ValueId> {
    let (a, b) = (cx.cast(a, DType::F64)?, cx.cast(b, DType::F64)?);
    let exact = cx.map(op, &[a, b])?;
    cx.cast(exact, DType::F32)
}

/// Positions that align the first elements, and the last.
fn aligned(cx: &mut Ctx, i: ValueId, lengths: Lengths) -> Result<ValueId> {
    let span = cx.add_real(lengths.from, -1.0)?;
    let steps = cx.add_real(lengths.to, -1.0)?;
    let passed = rounded_op(cx, ScalarOp::Mul, i, span)?;
    let at = rounded_op(cx, ScalarOp::Div, passed, steps)?;
    unless_single(cx, lengths.to, at)
}

/// Distance by which positions move so that the centres are aligned.
fn symmetric_offset(cx: &mut Ctx, lengths: Lengths) -> Result<ValueId> {
    let exact = rounded_op(cx, ScalarOp::Mul, lengths.from, lengths.scale)?;
    let adjustment = rounded_op(cx, ScalarOp::Div, lengths.to, exact)?;
    let half = cx.mul_real(lengths.from, 0.5)?;
    let one = cx.scalar(DType::F32, 1.0);
    let rest = rounded_op(cx, ScalarOp::Sub, one, adjustment)?;
    rounded_op(cx, ScalarOp::Mul, half, rest)
}

/// Positions, but 0 where the result has one element.
fn unless_single(cx: &mut Ctx, to: ValueId, at: ValueId) -> Result<ValueId> {
    let is_single = cx.with_real(ScalarOp::Le, to, 1.0)?;
    let zero = cx.scalar(DType::F32, 0.0);
    cx.select(is_single, zero, at)
}

/// A weight, but 0 for places outside of the source.
fn inside(cx: &mut Ctx, axis: &Axis, place: ValueId, weight: ValueId) -> Result<ValueId> {
    let (zero, from) = (cx.scalar(DType::F32, 0.0), axis.lengths.from);
    let nothing = cx.scalar_like(weight, 0.0);
    let before = cx.map(ScalarOp::Lt, &[place, zero])?;
    let behind = cx.map(ScalarOp::Ge, &[place, from])?;
    let weight = cx.select(before, nothing, weight)?;
    cx.select(behind, nothing, weight)
}

/// The elements at some places along the axis; those outside are those of the edge.
fn tap(cx: &mut Ctx, x: ValueId, axis: &Axis, place: ValueId) -> Result<ValueId> {
    let last = cx.add_real(axis.lengths.from, -1.0)?;
    let place = cx.lesser(place, last)?;
    let place = cx.with_real(ScalarOp::Max, place, 0.0)?;
    let place = cx.cast(place, DType::I64)?;
    cx.gather(x, place, axis.axis)
}

/// Weights along the axis, to be multiplied with a tensor.
fn along(cx: &mut Ctx, weight: ValueId, axis: &Axis, x: ValueId) -> Result<ValueId> {
    let rank = cx.shape_of(x).rank();
    let mut dims = vec![Dim::constant(1); rank];
    dims[axis.axis] = axis.to.clone();
    let weight = cx.reshape(weight, dims)?;
    let dtype = cx.dtype_of(x);
    cx.cast(weight, dtype)
}
