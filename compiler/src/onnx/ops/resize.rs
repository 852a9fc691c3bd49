//! Resizing: interpolation per axis as a product with a constant matrix, or as a gather for nearest neighbours.

use super::super::import::{Ctx, OpDef, Out, Outs, axis_of, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, ValueId};
use gristmill_runtime::Tensor;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Resize", (1, 4), resize),
    OpDef::new("Upsample", (1, 2), upsample),
];

/// Elements of an interpolation matrix beyond which a resize is refused.
const MAX_MATRIX: usize = 1 << 24;

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

/// How positions and weights are chosen.
struct Sampling {
    mode: Mode,
    coordinates: String,
    rounding: String,
    antialias: bool,
    exclude_outside: bool,
    cubic_a: f64,
    extrapolation: f64,
}

/// One axis to resize.
struct AxisPlan {
    axis: usize,
    from: usize,
    to: usize,
    scale: f64,
    /// Region of interest, as fractions of the axis.
    roi: (f64, f64),
}

fn mode_of(text: &str) -> Result<Mode> {
    match text {
        "nearest" => Ok(Mode::Nearest),
        "linear" | "bilinear" => Ok(Mode::Linear),
        "cubic" => Ok(Mode::Cubic),
        other => Err(Error::invalid(format!("mode {other:?}"))),
    }
}

fn resize<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let old = cx.opset < 11;
    let sampling = Sampling {
        mode: mode_of(&cx.s("mode", "nearest")?)?,
        coordinates: cx.s(
            "coordinate_transformation_mode",
            if old { "asymmetric" } else { "half_pixel" },
        )?,
        rounding: cx.s(
            "nearest_mode",
            if old { "floor" } else { "round_prefer_floor" },
        )?,
        antialias: cx.flag("antialias", false)?,
        exclude_outside: cx.flag("exclude_outside", false)?,
        cubic_a: cx.f("cubic_coeff_a", -0.75)?,
        extrapolation: cx.f("extrapolation_value", 0.0)?,
    };
    let policy = cx.s("keep_aspect_ratio_policy", "stretch")?;
    let shape = cx.ty(0)?.shape;
    let axes: Vec<usize> = match cx.ints("axes")? {
        Some(a) => a
            .iter()
            .map(|&a| axis_of(a, shape.rank()))
            .collect::<Result<_>>()?,
        None => (0..shape.rank()).collect(),
    };
    let (roi_at, scales_at, sizes_at) = if old { (9, 1, 9) } else { (1, 2, 3) };
    cx.require(match (old, sampling.coordinates.as_str()) {
        (true, _) => &[1],
        (false, "tf_crop_and_resize") => &[1, 2, 3],
        _ => &[2, 3],
    })?;
    let roi = match sampling.coordinates.as_str() {
        "tf_crop_and_resize" => Some(cx.reals_in(roi_at)?),
        _ => None,
    };
    let roi_of = |i: usize| {
        roi.as_ref()
            .map_or((0.0, 1.0), |r| (r[i], r[i + axes.len()]))
    };
    if roi.as_ref().is_some_and(|r| r.len() != 2 * axes.len()) {
        return Err(Error::invalid("roi does not fit the axes"));
    }
    let scales = if cx.has(scales_at) {
        Some(cx.reals_in(scales_at)?).filter(|s| !s.is_empty())
    } else {
        None
    };
    let sizes = if cx.has(sizes_at) {
        Some(cx.dims(sizes_at)?)
    } else {
        None
    };
    let mut plans = Vec::new();
    let wanted = wanted_sizes(&shape, &axes, scales.as_deref(), sizes.as_deref(), &policy)?;
    for (i, (&axis, want)) in axes.iter().zip(wanted).enumerate() {
        let Some((to, scale)) = want else { continue };
        let from = shape[axis]
            .as_usize()
            .ok_or_else(|| unknown_extent(&shape[axis]))?;
        let to = match scales.is_some() && roi.is_some() {
            true => (from as f64 * (roi_of(i).1 - roi_of(i).0) * scale).floor() as usize,
            false => to,
        };
        plans.push(AxisPlan {
            axis,
            from,
            to,
            scale,
            roi: roi_of(i),
        });
    }
    resample(cx, &sampling, &plans)
}

fn unknown_extent(d: &Dim) -> Error {
    Error::unsupported(format!("an axis of {d} elements must have a known extent"))
        .hint("give its dims: --set NAME=N")
}

/// Size and scale of each axis; `None` for one that stays.
fn wanted_sizes(
    shape: &[Dim],
    axes: &[usize],
    scales: Option<&[f64]>,
    sizes: Option<&[Dim]>,
    policy: &str,
) -> Result<Vec<Option<(usize, f64)>>> {
    let bad = |n: usize| Error::invalid(format!("{n} scales or sizes for {} axes", axes.len()));
    let extent = |axis: usize| {
        shape[axis]
            .as_usize()
            .ok_or_else(|| unknown_extent(&shape[axis]))
    };
    match (scales, sizes) {
        (Some(scales), None) => {
            if scales.len() != axes.len() || scales.iter().any(|s| !s.is_finite() || *s <= 0.0) {
                return Err(bad(scales.len()));
            }
            let one_axis = |(&s, &a): (&f64, &usize)| match s {
                1.0 => Ok(None),
                s => extent(a).map(|n| Some(((n as f64 * s).floor() as usize, s))),
            };
            scales.iter().zip(axes).map(one_axis).collect()
        }
        (None, Some(sizes)) => {
            if sizes.len() != axes.len() {
                return Err(bad(sizes.len()));
            }
            let mut out = Vec::new();
            for (d, &a) in sizes.iter().zip(axes) {
                if *d == shape[a] && policy == "stretch" {
                    out.push(None);
                    continue;
                }
                let to = d
                    .as_usize()
                    .ok_or_else(|| Error::unsupported(format!("to the size {d}")))?;
                out.push(Some((to, to as f64 / extent(a)?.max(1) as f64)));
            }
            keep_aspect(&mut out, shape, axes, policy)?;
            Ok(out)
        }
        _ => Err(Error::invalid("expected either scales or sizes")),
    }
}

/// With a policy other than `stretch`, one scale for all axes.
fn keep_aspect(
    plans: &mut [Option<(usize, f64)>],
    shape: &[Dim],
    axes: &[usize],
    policy: &str,
) -> Result<()> {
    let scales = plans.iter().flatten().map(|p| p.1);
    let scale = match policy {
        "stretch" => return Ok(()),
        "not_larger" => scales.fold(f64::INFINITY, f64::min),
        "not_smaller" => scales.fold(0.0, f64::max),
        other => {
            return Err(Error::invalid(format!(
                "keep_aspect_ratio_policy {other:?}"
            )));
        }
    };
    for (plan, &a) in plans.iter_mut().zip(axes) {
        let from = shape[a].as_usize().unwrap_or(0) as f64;
        *plan = Some(((from * scale + 0.5).floor() as usize, scale));
    }
    Ok(())
}

/// Version 7 and 9: nearest and linear by scales; positions are `i / scale`.
fn upsample<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let mode = mode_of(&cx.s("mode", "nearest")?)?;
    let scales = if cx.opset < 9 {
        cx.floats("scales")?.unwrap_or_default()
    } else {
        cx.reals_in(1)?
    };
    let shape = cx.ty(0)?.shape;
    let axes: Vec<usize> = (0..shape.rank()).collect();
    let sampling = Sampling {
        mode,
        coordinates: "asymmetric".to_owned(),
        rounding: "floor".to_owned(),
        antialias: false,
        exclude_outside: false,
        cubic_a: -0.75,
        extrapolation: 0.0,
    };
    let mut plans = Vec::new();
    for (axis, want) in wanted_sizes(&shape, &axes, Some(&scales), None, "stretch")?
        .into_iter()
        .enumerate()
    {
        let Some((to, scale)) = want else { continue };
        plans.push(AxisPlan {
            axis,
            from: shape[axis].as_usize().unwrap_or(0),
            to,
            scale,
            roi: (0.0, 1.0),
        });
    }
    resample(cx, &sampling, &plans)
}

fn resample<'m>(cx: &mut Ctx<'_, 'm>, sampling: &Sampling, plans: &[AxisPlan]) -> Result<Outs<'m>> {
    if plans.is_empty() {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let mut x = cx.val(0)?;
    for plan in plans {
        if plan.from == 0
            || plan
                .from
                .checked_mul(plan.to)
                .is_none_or(|n| n > MAX_MATRIX)
        {
            return Err(Error::unsupported(format!(
                "from {} to {} elements",
                plan.from, plan.to
            )));
        }
        x = match sampling.mode {
            Mode::Nearest => nearest(cx, x, sampling, plan)?,
            _ => interpolated(cx, x, sampling, plan)?,
        };
    }
    if sampling.coordinates == "tf_crop_and_resize" {
        x = extrapolated(cx, x, sampling, plans)?;
    }
    one(x)
}

impl Sampling {
    /// Position in the source of element `i` of the result.
    fn position(&self, p: &AxisPlan, i: usize) -> Result<f64> {
        // The size of the result as the scale gives it, before rounding down.
        let (i, from, to) = (i as f64, p.from as f64, p.from as f64 * p.scale);
        Ok(match self.coordinates.as_str() {
            "half_pixel" => (i + 0.5) / p.scale - 0.5,
            "half_pixel_symmetric" => {
                let adjustment = p.to as f64 / to;
                let centre = from / 2.0;
                centre * (1.0 - adjustment) + (i + 0.5) / p.scale - 0.5
            }
            "pytorch_half_pixel" if p.to > 1 => (i + 0.5) / p.scale - 0.5,
            "pytorch_half_pixel" => 0.0,
            "align_corners" if p.to > 1 => i * (from - 1.0) / (to - 1.0),
            "align_corners" => 0.0,
            "asymmetric" => i / p.scale,
            "tf_half_pixel_for_nn" => (i + 0.5) / p.scale,
            "tf_crop_and_resize" if p.to > 1 => {
                p.roi.0 * (from - 1.0)
                    + i * (p.roi.1 - p.roi.0) * (from - 1.0) / (p.to as f64 - 1.0)
            }
            "tf_crop_and_resize" => 0.5 * (p.roi.0 + p.roi.1) * (from - 1.0),
            other => {
                return Err(Error::invalid(format!(
                    "coordinate_transformation_mode {other:?}"
                )));
            }
        })
    }

    fn round(&self, x: f64) -> Result<f64> {
        Ok(match self.rounding.as_str() {
            "round_prefer_floor" => (x - 0.5).ceil(),
            "round_prefer_ceil" => (x + 0.5).floor(),
            "floor" => x.floor(),
            "ceil" => x.ceil(),
            other => return Err(Error::invalid(format!("nearest_mode {other:?}"))),
        })
    }

    /// Weight of a tap at distance `d` from the position, in source elements divided by the filter's stretch.
    fn kernel(&self, d: f64) -> f64 {
        let (d, a) = (d.abs(), self.cubic_a);
        match self.mode {
            Mode::Cubic if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
            Mode::Cubic if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
            Mode::Cubic => 0.0,
            _ => (1.0 - d).max(0.0),
        }
    }

    /// Weights of the source elements for one position. Taps outside fall on the edge, or are left out.
    fn weights(&self, p: &AxisPlan, at: f64, row: &mut [f64]) {
        // When shrinking with antialiasing the filter is stretched to cover the elements that are merged.
        let stretch = if self.antialias {
            (1.0 / p.scale).max(1.0)
        } else {
            1.0
        };
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
}

fn nearest(
    cx: &mut Ctx<'_, '_>,
    x: ValueId,
    sampling: &Sampling,
    plan: &AxisPlan,
) -> Result<ValueId> {
    let at = |i| {
        let p = sampling.round(sampling.position(plan, i)?)?;
        Ok((p as i64).clamp(0, plan.from as i64 - 1))
    };
    let indices = (0..plan.to).map(at).collect::<Result<Vec<i64>>>()?;
    let indices = cx.i64s(&indices, &[plan.to])?;
    cx.add(Op::Gather { axis: plan.axis }, &[x, indices])
}

/// `x` with `axis` last, times the transposed interpolation matrix `[from, to]`, and back.
fn interpolated(
    cx: &mut Ctx<'_, '_>,
    x: ValueId,
    sampling: &Sampling,
    plan: &AxisPlan,
) -> Result<ValueId> {
    let mut columns = vec![0f64; plan.from * plan.to];
    let mut row = vec![0f64; plan.from];
    for i in 0..plan.to {
        row.fill(0.0);
        sampling.weights(plan, sampling.position(plan, i)?, &mut row);
        row.iter()
            .enumerate()
            .for_each(|(j, w)| columns[j * plan.to + i] = *w);
    }
    let ty = cx.type_of(x);
    let t = if ty.dtype.is_float() {
        gristmill_runtime::Tensor::from_f64s(ty.dtype, &[plan.from, plan.to], &columns)?
    } else {
        Tensor::from_slice(
            &columns.iter().map(|&v| v as f32).collect::<Vec<f32>>(),
            &[plan.from, plan.to],
        )?
    };
    let compute = t.dtype();
    let matrix = cx.b().constant(t);
    let rank = ty.rank();
    let swap: Vec<usize> = (0..rank)
        .map(|i| {
            if i == plan.axis {
                rank - 1
            } else if i == rank - 1 {
                plan.axis
            } else {
                i
            }
        })
        .collect();
    let wide = cx.b().cast(x, compute)?;
    let moved = cx.b().transpose(wide, &swap)?;
    let moved = if rank == 1 {
        cx.b()
            .reshape(moved, [Dim::constant(1), plan.from.into()])?
    } else {
        moved
    };
    let y = cx.b().matmul(moved, matrix)?;
    let y = if rank == 1 {
        cx.b().reshape(y, [plan.to])?
    } else {
        cx.b().transpose(y, &swap)?
    };
    cx.b().cast(y, ty.dtype)
}

/// Elements whose position lies outside the source get the extrapolation value.
fn extrapolated(
    cx: &mut Ctx<'_, '_>,
    x: ValueId,
    sampling: &Sampling,
    plans: &[AxisPlan],
) -> Result<ValueId> {
    let ty = cx.type_of(x);
    let mut y = x;
    for plan in plans {
        let outside = |i| {
            let p = sampling.position(plan, i)?;
            Ok(p < 0.0 || p > plan.from as f64 - 1.0)
        };
        let mask = (0..plan.to).map(outside).collect::<Result<Vec<bool>>>()?;
        let mut dims = vec![1; ty.rank()];
        dims[plan.axis] = plan.to;
        let mask = cx.b().constant(Tensor::from_slice(&mask, &dims)?);
        let fill = cx.b().scalar(ty.dtype, sampling.extrapolation);
        y = cx.map(crate::ir::ScalarOp::Select, &[mask, fill, y])?;
    }
    Ok(y)
}
