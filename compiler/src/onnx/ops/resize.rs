//! Resizing: interpolation per axis as a product with a constant matrix, or as a gather for nearest
//! neighbours.
//!
//! Lengths and positions are computed in `f32`, and `align_corners` aligns the last element of the
//! rounded-down length, as PyTorch and onnxruntime do. The ONNX reference implementation computes
//! in `f64`, and divides by the length before it is rounded down. Where the two rules give
//! different results, `check` says so for the node.

mod open;

use super::super::import::{Ctx, OpDef, Out, Outs, axis_of, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Shape, ValueId};
use gristmill_runtime::Tensor;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Resize", (1, 4), resize),
    OpDef::new("Upsample", (1, 2), upsample),
];

/// Elements of an interpolation matrix beyond which a resize is refused.
const MAX_MATRIX: usize = 1 << 24;

/// Interpolation.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Mode {
    Nearest,
    Linear,
    Cubic,
}

const MODES: &[(&str, Mode)] = &[
    ("nearest", Mode::Nearest),
    ("linear", Mode::Linear),
    ("cubic", Mode::Cubic),
    ("bilinear", Mode::Linear),
];

/// `coordinate_transformation_mode`.
#[derive(Clone, Copy, PartialEq)]
enum Coordinates {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    TfHalfPixelForNn,
    TfCropAndResize,
}

const COORDINATES: &[(&str, Coordinates)] = &[
    ("half_pixel", Coordinates::HalfPixel),
    ("half_pixel_symmetric", Coordinates::HalfPixelSymmetric),
    ("pytorch_half_pixel", Coordinates::PytorchHalfPixel),
    ("align_corners", Coordinates::AlignCorners),
    ("asymmetric", Coordinates::Asymmetric),
    ("tf_half_pixel_for_nn", Coordinates::TfHalfPixelForNn),
    ("tf_crop_and_resize", Coordinates::TfCropAndResize),
];

/// `nearest_mode`.
#[derive(Clone, Copy, PartialEq)]
enum Rounding {
    HalfDown,
    HalfUp,
    Floor,
    Ceil,
}

const ROUNDINGS: &[(&str, Rounding)] = &[
    ("round_prefer_floor", Rounding::HalfDown),
    ("round_prefer_ceil", Rounding::HalfUp),
    ("floor", Rounding::Floor),
    ("ceil", Rounding::Ceil),
];

/// `keep_aspect_ratio_policy`.
#[derive(Clone, Copy, PartialEq)]
enum Policy {
    Stretch,
    NotLarger,
    NotSmaller,
}

const POLICIES: &[(&str, Policy)] = &[
    ("stretch", Policy::Stretch),
    ("not_larger", Policy::NotLarger),
    ("not_smaller", Policy::NotSmaller),
];

/// Choice of positions and weights.
struct Sampling {
    mode: Mode,
    coordinates: Coordinates,
    rounding: Rounding,
    antialias: bool,
    exclude_outside: bool,
    cubic_a: f64,
    extrapolation: f64,
}

/// New length of an axis.
#[derive(Clone, Copy)]
struct Target {
    to: usize,
    scale: f32,
    /// True when the length comes from the scale.
    scaled: bool,
}

/// One axis to resize.
struct AxisPlan {
    axis: usize,
    from: usize,
    target: Target,
    /// Region of interest, as fractions of the axis.
    roi: (f32, f32),
}

/// Operands `roi`, `scales` and `sizes`, with the axes that they are for.
struct Request {
    axes: Vec<usize>,
    roi: Option<Vec<f64>>,
    scales: Option<Vec<f64>>,
    sizes: Option<Vec<Dim>>,
    policy: Policy,
}

fn resize(cx: &mut Ctx) -> Result<Outs> {
    let sampling = sampling(cx)?;
    let request = request(cx, &sampling)?;
    let shape = cx.ty(0)?.shape;
    if request.is_open(&shape) {
        return open::resize(cx, &sampling, &request, &shape);
    }
    let targets = request.targets(&shape)?;
    let mut plans = Vec::new();
    for (i, (&axis, target)) in request.axes.iter().zip(targets).enumerate() {
        let Some(mut target) = target else { continue };
        let from = extent(&shape, axis)?;
        let roi = request.roi_of(i);
        if target.scaled && request.roi.is_some() {
            target.to = scaled_length(from, (roi.1 - roi.0) * target.scale);
        }
        plans.push(AxisPlan {
            axis,
            from,
            target,
            roi,
        });
    }
    resample(cx, &sampling, &plans)
}

/// Version 7 and 9: nearest and linear by scales; positions are `i / scale`.
fn upsample(cx: &mut Ctx) -> Result<Outs> {
    let sampling = Sampling {
        mode: cx.choice("mode", "nearest", MODES)?,
        coordinates: Coordinates::Asymmetric,
        rounding: Rounding::Floor,
        antialias: false,
        exclude_outside: false,
        cubic_a: -0.75,
        extrapolation: 0.0,
    };
    let scales = if cx.opset < 9 {
        cx.floats("scales")?.unwrap_or_default()
    } else {
        cx.reals_in(1)?
    };
    let shape = cx.ty(0)?.shape;
    let axes: Vec<usize> = (0..shape.rank()).collect();
    let targets = by_scales(&shape, &axes, &scales)?;
    let mut plans = Vec::new();
    for (axis, target) in targets.into_iter().enumerate() {
        let Some(target) = target else { continue };
        plans.push(AxisPlan {
            axis,
            from: extent(&shape, axis)?,
            target,
            roi: (0.0, 1.0),
        });
    }
    resample(cx, &sampling, &plans)
}

fn sampling(cx: &Ctx) -> Result<Sampling> {
    let (coordinates, rounding) = if cx.opset < 11 {
        ("asymmetric", "floor")
    } else {
        ("half_pixel", "round_prefer_floor")
    };
    Ok(Sampling {
        mode: cx.choice("mode", "nearest", MODES)?,
        coordinates: cx.choice("coordinate_transformation_mode", coordinates, COORDINATES)?,
        rounding: cx.choice("nearest_mode", rounding, ROUNDINGS)?,
        antialias: cx.flag("antialias", false)?,
        exclude_outside: cx.flag("exclude_outside", false)?,
        cubic_a: cx.f("cubic_coeff_a", -0.75)?,
        extrapolation: cx.f("extrapolation_value", 0.0)?,
    })
}

/// Before version 11 the operands are `x, scales`; since, `x, roi, scales, sizes`.
fn request(cx: &mut Ctx, sampling: &Sampling) -> Result<Request> {
    let policy = cx.choice("keep_aspect_ratio_policy", "stretch", POLICIES)?;
    let axes = resized_axes(cx)?;
    let crops = sampling.coordinates == Coordinates::TfCropAndResize;
    let old = cx.opset < 11;
    cx.require(match (old, crops, cx.is_run_time()) {
        (true, ..) => &[1],
        (false, true, _) => &[1, 2, 3],
        (false, false, false) => &[2, 3],
        (false, false, true) => &[2],
    })?;
    let roi = if crops && !old {
        Some(cx.reals_in(1)?)
    } else {
        None
    };
    if roi.as_ref().is_some_and(|r| r.len() != 2 * axes.len()) {
        return Err(Error::invalid("roi does not fit the axes"));
    }
    let scales_at = if old { 1 } else { 2 };
    let scales = if cx.has(scales_at) {
        Some(cx.reals_in(scales_at)?).filter(|s| !s.is_empty())
    } else {
        None
    };
    let sizes = if !old && cx.has(3) {
        Some(cx.dims(3)?)
    } else {
        None
    };
    Ok(Request {
        axes,
        roi,
        scales,
        sizes,
        policy,
    })
}

fn resized_axes(cx: &mut Ctx) -> Result<Vec<usize>> {
    let rank = cx.ty(0)?.rank();
    match cx.ints("axes")? {
        Some(axes) => axes.iter().map(|&a| axis_of(a, rank)).collect(),
        None => Ok((0..rank).collect()),
    }
}

impl Request {
    fn is_stretched(&self) -> bool {
        self.policy == Policy::Stretch
    }

    fn roi_of(&self, i: usize) -> (f32, f32) {
        match &self.roi {
            Some(roi) => (roi[i] as f32, roi[i + self.axes.len()] as f32),
            None => (0.0, 1.0),
        }
    }

    /// The new length of each axis; `None` for one that stays.
    fn targets(&self, shape: &Shape) -> Result<Vec<Option<Target>>> {
        match (&self.scales, &self.sizes) {
            (Some(scales), None) => by_scales(shape, &self.axes, scales),
            (None, Some(sizes)) if self.policy == Policy::Stretch => {
                by_sizes(shape, &self.axes, sizes)
            }
            (None, Some(sizes)) => by_aspect(shape, &self.axes, sizes, self.policy),
            _ => Err(Error::invalid("expected either scales or sizes")),
        }
    }
}

fn extent(shape: &Shape, axis: usize) -> Result<usize> {
    let d = &shape[axis];
    d.as_usize().ok_or_else(|| {
        Error::unsupported(format!("an axis of {d} elements must have a known extent"))
            .hint("give its dims: --set NAME=N")
    })
}

fn misfit(n: usize, axes: &[usize]) -> Error {
    Error::invalid(format!("{n} scales or sizes for {} axes", axes.len()))
}

/// `from * scale` rounded down, in `f32` as ONNX's shape inference and onnxruntime have it: 10
/// times 0.7 is 7.
fn scaled_length(from: usize, scale: f32) -> usize {
    (from as f32 * scale).floor() as usize
}

fn by_scales(shape: &Shape, axes: &[usize], scales: &[f64]) -> Result<Vec<Option<Target>>> {
    let possible = |s: &f64| s.is_finite() && *s > 0.0;
    if scales.len() != axes.len() || !scales.iter().all(possible) {
        return Err(misfit(scales.len(), axes));
    }
    let mut targets = Vec::new();
    for (&scale, &axis) in scales.iter().zip(axes) {
        let scale = scale as f32;
        targets.push(if scale == 1.0 {
            None
        } else {
            Some(Target {
                to: scaled_length(extent(shape, axis)?, scale),
                scale,
                scaled: true,
            })
        });
    }
    Ok(targets)
}

fn by_sizes(shape: &Shape, axes: &[usize], sizes: &[Dim]) -> Result<Vec<Option<Target>>> {
    if sizes.len() != axes.len() {
        return Err(misfit(sizes.len(), axes));
    }
    let mut targets = Vec::new();
    for (size, &axis) in sizes.iter().zip(axes) {
        targets.push(if *size == shape[axis] {
            None
        } else {
            Some(by_size(size, extent(shape, axis)?)?)
        });
    }
    Ok(targets)
}

fn by_size(size: &Dim, from: usize) -> Result<Target> {
    let to = size
        .as_usize()
        .ok_or_else(|| Error::unsupported(format!("to the size {size}")))?;
    Ok(Target {
        to,
        scale: to as f32 / from.max(1) as f32,
        scaled: false,
    })
}

/// One scale for all axes: the smallest or largest that the sizes ask for.
fn by_aspect(
    shape: &Shape,
    axes: &[usize],
    sizes: &[Dim],
    policy: Policy,
) -> Result<Vec<Option<Target>>> {
    if sizes.len() != axes.len() {
        return Err(misfit(sizes.len(), axes));
    }
    let mut scales = Vec::new();
    for (size, &axis) in sizes.iter().zip(axes) {
        scales.push(by_size(size, extent(shape, axis)?)?.scale);
    }
    let scale = match policy {
        Policy::NotLarger => scales.into_iter().fold(f32::INFINITY, f32::min),
        _ => scales.into_iter().fold(0.0, f32::max),
    };
    let mut targets = Vec::new();
    for &axis in axes {
        let from = extent(shape, axis)? as f32;
        targets.push(Some(Target {
            to: (from * scale + 0.5).floor() as usize,
            scale,
            scaled: false,
        }));
    }
    Ok(targets)
}

fn resample(cx: &mut Ctx, sampling: &Sampling, plans: &[AxisPlan]) -> Result<Outs> {
    if plans.is_empty() {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let mut x = cx.val(0)?;
    for plan in plans {
        let (from, to) = (plan.from, plan.target.to);
        if from == 0 || from.checked_mul(to).is_none_or(|n| n > MAX_MATRIX) {
            return Err(Error::unsupported(format!("from {from} to {to} elements")));
        }
        sampling.note_rules(cx, plan);
        x = match sampling.mode {
            Mode::Nearest => nearest(cx, x, sampling, plan)?,
            _ => interpolated(cx, x, sampling, plan)?,
        };
    }
    if sampling.coordinates == Coordinates::TfCropAndResize {
        x = extrapolated(cx, x, sampling, plans)?;
    }
    one(x)
}

impl AxisPlan {
    /// True when the length in `f64` is another than that in `f32`.
    fn length_is_rounded(&self) -> bool {
        let exact = self.from as f64 * f64::from(self.target.scale);
        self.target.scaled && self.roi == (0.0, 1.0) && exact.floor() != self.target.to as f64
    }

    /// True when the length is not a whole number before it is rounded down.
    fn length_is_cut(&self) -> bool {
        let exact = self.from as f64 * f64::from(self.target.scale);
        self.target.scaled && exact != self.target.to as f64
    }

    /// True when the quotient of an element's index and the scale is a whole number in `f32` only.
    fn quotient_is_rounded(&self) -> bool {
        let scale = self.target.scale;
        (0..self.target.to).any(|i| {
            let at = i as f32 / scale;
            at.fract() == 0.0 && f64::from(at) * f64::from(scale) != i as f64
        })
    }
}

impl Sampling {
    /// Notes where the ONNX reference gives other results.
    fn note_rules(&self, cx: &mut Ctx, plan: &AxisPlan) {
        if plan.length_is_rounded() {
            cx.note("lengths are products in f32, as in PyTorch and onnxruntime; the ONNX reference multiplies in f64");
        }
        if self.coordinates == Coordinates::AlignCorners && plan.length_is_cut() {
            cx.note("align_corners aligns the last element of the rounded-down length, as in PyTorch and onnxruntime; the ONNX reference does not round first");
        }
        let steps = matches!(self.rounding, Rounding::Floor | Rounding::Ceil);
        let divides = self.mode == Mode::Nearest && self.coordinates == Coordinates::Asymmetric;
        if divides && steps && plan.quotient_is_rounded() {
            cx.note("positions are quotients in f32, as in PyTorch and onnxruntime; the ONNX reference divides in f64");
        }
    }

    /// Position in the source of element `i` of the result.
    fn position(&self, p: &AxisPlan, i: usize) -> f32 {
        let (i, from) = (i as f32, p.from as f32);
        let Target { to, scale, .. } = p.target;
        let (is_single, to) = (to <= 1, to as f32);
        let half_pixel = (i + 0.5) / scale - 0.5;
        match self.coordinates {
            Coordinates::HalfPixel => half_pixel,
            Coordinates::HalfPixelSymmetric => {
                let adjustment = to / (from * scale);
                from / 2.0 * (1.0 - adjustment) + half_pixel
            }
            Coordinates::PytorchHalfPixel if is_single => 0.0,
            Coordinates::PytorchHalfPixel => half_pixel,
            Coordinates::AlignCorners if is_single => 0.0,
            Coordinates::AlignCorners => i * (from - 1.0) / (to - 1.0),
            Coordinates::Asymmetric => i / scale,
            Coordinates::TfHalfPixelForNn => (i + 0.5) / scale,
            Coordinates::TfCropAndResize if is_single => 0.5 * (p.roi.0 + p.roi.1) * (from - 1.0),
            Coordinates::TfCropAndResize => {
                p.roi.0 * (from - 1.0) + i * (p.roi.1 - p.roi.0) * (from - 1.0) / (to - 1.0)
            }
        }
    }

    fn round(&self, x: f32) -> f32 {
        match self.rounding {
            Rounding::HalfDown => (x - 0.5).ceil(),
            Rounding::HalfUp => (x + 0.5).floor(),
            Rounding::Floor => x.floor(),
            Rounding::Ceil => x.ceil(),
        }
    }

    /// Weight of a tap at distance `d` from the position, in source elements divided by the
    /// filter's stretch.
    fn kernel(&self, d: f64) -> f64 {
        let (d, [near, far]) = (d.abs(), cubic_kernel(self.cubic_a));
        let polynomial = |c: [f64; 4]| c.iter().fold(0.0, |y, c| y * d + c);
        match self.mode {
            Mode::Cubic if d <= 1.0 => polynomial(near),
            Mode::Cubic if d < 2.0 => polynomial(far),
            Mode::Cubic => 0.0,
            _ => (1.0 - d).max(0.0),
        }
    }

    /// Factor by which the filter is stretched: when shrinking with antialiasing it covers the
    /// elements that are merged.
    fn stretch(&self, p: &AxisPlan) -> f64 {
        if self.antialias {
            (1.0 / f64::from(p.target.scale)).max(1.0)
        } else {
            1.0
        }
    }

    /// Weights of the source elements for one position. Taps outside fall on the edge, or are left
    /// out.
    fn weights(&self, p: &AxisPlan, at: f64, row: &mut [f64]) {
        let stretch = self.stretch(p);
        let reach = if self.mode == Mode::Cubic { 2.0 } else { 1.0 } * stretch;
        let last = p.from as i64 - 1;
        let mut total = 0.0;
        for tap in (at - reach).ceil() as i64..=(at + reach).floor() as i64 {
            let w = self.kernel((tap as f64 - at) / stretch);
            if self.exclude_outside && !(0..=last).contains(&tap) {
                continue;
            }
            row[tap.clamp(0, last) as usize] += w;
            total += w;
        }
        if total != 0.0 {
            row.iter_mut().for_each(|w| *w /= total);
        }
    }

    /// The interpolation matrix `[from, to]`: column `i` holds the weights of element `i` of the
    /// result.
    fn matrix(&self, p: &AxisPlan) -> Vec<f64> {
        let to = p.target.to;
        let mut columns = vec![0f64; p.from * to];
        let mut row = vec![0f64; p.from];
        for i in 0..to {
            row.fill(0.0);
            self.weights(p, self.position(p, i).into(), &mut row);
            for (j, w) in row.iter().enumerate() {
                columns[j * to + i] = *w;
            }
        }
        columns
    }
}

/// Polynomials of the distance from a position, highest coefficient first: up to 1, and from there to 2 (Keys, Cubic convolution
/// interpolation, 1981).
pub(super) fn cubic_kernel(a: f64) -> [[f64; 4]; 2] {
    [
        [a + 2.0, -(a + 3.0), 0.0, 1.0],
        [a, -5.0 * a, 8.0 * a, -4.0 * a],
    ]
}

/// A cubic polynomial by Horner's rule, highest coefficient first.
pub(super) fn polynomial(cx: &mut Ctx, x: ValueId, coefficients: [f64; 4]) -> Result<ValueId> {
    let [first, middle @ .., last] = coefficients;
    let mut y = cx.mul_real(x, first)?;
    for c in middle {
        y = cx.add_real(y, c)?;
        y = cx.mul(y, x)?;
    }
    cx.add_real(y, last)
}

fn nearest(cx: &mut Ctx, x: ValueId, sampling: &Sampling, plan: &AxisPlan) -> Result<ValueId> {
    let to = plan.target.to;
    let source = |i| {
        let at = sampling.round(sampling.position(plan, i));
        (at as i64).clamp(0, plan.from as i64 - 1)
    };
    let indices: Vec<i64> = (0..to).map(source).collect();
    let indices = cx.i64s(&indices, &[to])?;
    cx.gather(x, indices, plan.axis)
}

/// `x` with `axis` last, times the transposed interpolation matrix, and back.
fn interpolated(cx: &mut Ctx, x: ValueId, sampling: &Sampling, plan: &AxisPlan) -> Result<ValueId> {
    let ty = cx.type_of(x);
    let (rank, to) = (ty.rank(), plan.target.to);
    let columns = sampling.matrix(plan);
    let compute = if ty.dtype.is_float() {
        ty.dtype
    } else {
        gristmill_runtime::DType::F32
    };
    let matrix = Tensor::from_f64s(compute, &[plan.from, to], &columns)?;
    let matrix = cx.b().constant(matrix);
    let wide = cx.cast(x, compute)?;
    let y = if rank == 1 {
        let row = cx.reshape(wide, [1, plan.from])?;
        let y = cx.matmul(row, matrix)?;
        cx.reshape(y, [to])?
    } else {
        let mut swap: Vec<usize> = (0..rank).collect();
        swap.swap(plan.axis, rank - 1);
        let moved = cx.transpose(wide, &swap)?;
        let y = cx.matmul(moved, matrix)?;
        cx.transpose(y, &swap)?
    };
    cx.cast(y, ty.dtype)
}

/// Elements whose position lies outside the source get the extrapolation value.
fn extrapolated(
    cx: &mut Ctx,
    x: ValueId,
    sampling: &Sampling,
    plans: &[AxisPlan],
) -> Result<ValueId> {
    let ty = cx.type_of(x);
    let mut y = x;
    for plan in plans {
        let last = plan.from as f32 - 1.0;
        let outside = |i| !(0.0..=last).contains(&sampling.position(plan, i));
        let mask: Vec<bool> = (0..plan.target.to).map(outside).collect();
        let mut dims = vec![1; ty.rank()];
        dims[plan.axis] = plan.target.to;
        let mask = cx.b().constant(Tensor::from_slice(&mask, &dims)?);
        let fill = cx.scalar(ty.dtype, sampling.extrapolation);
        y = cx.select(mask, fill, y)?;
    }
    Ok(y)
}
