//! Type rules: result types of each op from operand types. Messages name the expected and the found.

use super::dim::Dim;
use super::graph::Graph;
use super::ops::{Layout, Op, Window};
use super::types::{Shape, Type};
use gristmill_runtime::DType;

/// Result types, or the reason why the operands do not fit.
pub type Inferred = Result<Vec<Type>, String>;

pub(super) fn one(dtype: DType, shape: Vec<Dim>) -> Inferred {
    Ok(vec![Type {
        dtype,
        shape: Shape(shape),
    }])
}

/// NumPy broadcasting of two shapes. A symbolic extent against another is refused unless equal or one is 1.
pub fn broadcast_shapes(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, String> {
    let rank = a.len().max(b.len());
    let at = |s: &[Dim], i: usize| {
        (i + s.len())
            .checked_sub(rank)
            .map_or(Dim::constant(1), |j| s[j].clone())
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (x, y) if x.is(1) => Ok(y),
            (x, y) if y.is(1) => Ok(x),
            (x, y) => Err(format!(
                "shapes {} and {} do not broadcast: axis {i} has extents {x} and {y}",
                Shape(a.to_vec()),
                Shape(b.to_vec())
            )),
        })
        .collect()
}

pub(super) fn check_axis(axis: usize, ty: &Type) -> Result<(), String> {
    if axis < ty.rank() {
        Ok(())
    } else {
        Err(format!("axis {axis} is out of range for {ty}"))
    }
}

pub(super) fn check_axes(axes: &[usize], ty: &Type) -> Result<(), String> {
    axes.iter().try_for_each(|&a| check_axis(a, ty))?;
    if axes.windows(2).all(|w| w[0] < w[1]) {
        Ok(())
    } else {
        Err(format!("axes {axes:?} must be increasing"))
    }
}

pub(super) fn check_float(t: &Type) -> Result<(), String> {
    if t.dtype.is_float() {
        Ok(())
    } else {
        Err(format!("expected a floating-point tensor, got {t}"))
    }
}

/// Extents of the windows' output along each spatial axis.
pub(crate) fn windows(
    spatial: &[Dim],
    size: &[Dim],
    w: &Window,
    ceil: bool,
) -> Result<Vec<Dim>, String> {
    let n = spatial.len();
    if [
        w.strides.len(),
        w.dilations.len(),
        w.pads_low.len(),
        w.pads_high.len(),
        size.len(),
    ] != [n; 5]
    {
        return Err(format!(
            "strides, dilations, pads and window need one entry for each of {n} spatial axes"
        ));
    }
    if w.strides.contains(&0) || w.dilations.contains(&0) {
        return Err("strides and dilations must be positive".into());
    }
    (0..n)
        .map(|i| {
            let reach = (size[i].clone() - 1.into()).scale(w.dilations[i] as i64) + 1.into();
            let room =
                spatial[i].clone() + w.pads_low[i].saturating_add(w.pads_high[i]).into() - reach;
            if room.as_const().is_some_and(|c| c < 0) {
                return Err(format!(
                    "spatial axis {i}: window of {} does not fit {} padded by {} and {}",
                    size[i], spatial[i], w.pads_low[i], w.pads_high[i]
                ));
            }
            let stride = w.strides[i] as i64;
            if !ceil {
                return Ok(room.floor_div(stride) + 1.into());
            }
            let out = room.ceil_div(stride) + 1.into();
            // A window that would start beyond the input and its low padding is dropped.
            let start =
                (out.clone() - 1.into()).scale(stride) - spatial[i].clone() - w.pads_low[i].into();
            Ok(if start.as_const().is_some_and(|c| c >= 0) {
                out - 1.into()
            } else {
                out
            })
        })
        .collect()
}

pub(super) fn channels(n: &Dim, c: &Dim, spatial: Vec<Dim>, layout: Layout) -> Vec<Dim> {
    let mut out = vec![n.clone()];
    match layout {
        Layout::ChannelsFirst => {
            out.push(c.clone());
            out.extend(spatial);
        }
        Layout::ChannelsLast => {
            out.extend(spatial);
            out.push(c.clone());
        }
    }
    out
}

pub(super) fn same(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    Ok(vec![args[0].clone()])
}
