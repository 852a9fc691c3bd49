//! Windows of deformable convolutions.

use super::product::accumulators;
use super::{Op, Window};
use crate::error::{Error, Result};
use crate::ir::eval::Call;
use crate::ir::graph::Graph;
use crate::ir::infer::{self, Inferred, windows};
use crate::ir::types::Type;
use gristmill_runtime::{DType, Tensor};

pub(super) fn deform_columns_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        DeformColumns {
            size,
            window,
            groups
        }
    );
    let x = &args[0];
    if x.rank() != 4 || !x.dtype.is_float() || x.dtype.is_float8() {
        return Err(format!("expected floats [n, c, h, w], got {x}"));
    }
    if size.len() != 2 || size.contains(&0) {
        return Err(format!("expected two extents of a window, got {size:?}"));
    }
    if *groups == 0 || x.shape[1].exact_div(&(*groups).into()).is_none() {
        let channels = &x.shape[1];
        return Err(format!(
            "{channels} channels do not divide into {groups} groups of offsets"
        ));
    }
    let extents: Vec<_> = size.iter().map(|&n| n.into()).collect();
    let plane = windows(&x.shape[2..], &extents, window, false)?;
    let taps = size[0].saturating_mul(size[1]);
    let of_taps = |per_tap: usize| {
        let rows = groups.saturating_mul(taps).saturating_mul(per_tap);
        let lead = [x.shape[0].clone(), rows.into()];
        Type::new(x.dtype, lead.iter().chain(&plane))
    };
    for (name, expected, found) in [
        ("offsets", of_taps(2), args.get(1)),
        ("a mask", of_taps(1), args.get(2)),
    ] {
        if let Some(found) = found.filter(|t| **t != expected) {
            return Err(format!("expected {name} {expected}, got {found}"));
        }
    }
    let lead = [x.shape[0].clone(), x.shape[1].clone(), taps.into()];
    infer::one(x.dtype, lead.into_iter().chain(plane).collect())
}

/// Positions are computed in the dtype of the offsets, in `f32` at least; samples in `f64`, rounded once.
pub(super) fn deform_columns_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c.op,
        DeformColumns {
            size,
            window,
            groups
        }
    );
    let &[_, channels, taps, rows, columns] = c.shape else {
        return Err(Error::internal("windows of another rank"));
    };
    let (x, plane) = (c.inputs[0].to_f64s(), &c.inputs[0].shape()[2..]);
    let offsets = c.inputs[1].to_f64s();
    let mask = c.inputs.get(2).map(|m| m.to_f64s());
    let is_double = c.inputs[1].dtype() == DType::F64;
    let (n_pixels, n_windows) = (plane[0] * plane[1], rows * columns);
    let mut samples = accumulators::<f64>(c.shape)?;
    for (i, to) in samples.iter_mut().enumerate() {
        let (at, tap) = (i % n_windows, i / n_windows % taps);
        let (image, channel) = (
            i / n_windows / taps / channels,
            i / n_windows / taps % channels,
        );
        let group = channel / (channels / groups);
        let row = (image * groups + group) * taps + tap;
        let along = |d: usize| {
            let (at, tap) = match d {
                0 => (at / columns, tap / size[1]),
                _ => (at % columns, tap % size[1]),
            };
            let offset = offsets[(row * 2 + d) * n_windows + i % n_windows];
            Neighbours::new(start(window, d, at, tap), offset, is_double)
        };
        let pixels = &x[(image * channels + channel) * n_pixels..][..n_pixels];
        let sample = sample([along(0), along(1)], plane, pixels, is_double);
        let weight = mask.as_ref().map_or(1.0, |m| m[row * n_windows + at]);
        *to = weight * sample;
    }
    Ok(vec![Tensor::from_f64s(
        c.inputs[0].dtype(),
        c.shape,
        &samples,
    )?])
}

/// Position of a tap without an offset, along one axis.
fn start(window: &Window, d: usize, at: usize, tap: usize) -> f64 {
    let padded = at * window.strides[d] + tap * window.dilations[d];
    padded as f64 - window.pads_low[d] as f64
}

/// Two neighbouring pixels along one axis, with their weights.
struct Neighbours([(f64, f64); 2]);

impl Neighbours {
    fn new(start: f64, offset: f64, is_double: bool) -> Neighbours {
        let round = rounding(is_double);
        let at = round(start + offset);
        let rest = round(at - at.floor());
        Neighbours([(at.floor(), round(1.0 - rest)), (at.floor() + 1.0, rest)])
    }
}

/// A bilinear sample. Pixels outside of the plane are 0, and so is a sample that is a pixel or more outside.
fn sample(along: [Neighbours; 2], plane: &[usize], pixels: &[f64], is_double: bool) -> f64 {
    let is_inside = |i: f64, d: usize| (0.0..plane[d] as f64).contains(&i);
    if along.iter().any(|n| n.0[0].0 == -1.0 && n.0[1].1 == 0.0) {
        return 0.0;
    }
    let mut sum = 0.0;
    for (y, wy) in along[0].0 {
        for (x, wx) in along[1].0 {
            if is_inside(y, 0) && is_inside(x, 1) {
                let weight = rounding(is_double)(wy * wx);
                sum += weight * pixels[y as usize * plane[1] + x as usize];
            }
        }
    }
    sum
}

fn rounding(is_double: bool) -> fn(f64) -> f64 {
    match is_double {
        true => |v| v,
        false => |v| f64::from(v as f32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use insta::assert_snapshot;

    /// The error of the type rule for windows of 3x3 in two groups of offsets over `x`.
    fn error(x: &[usize], offsets: &[usize], mask: Option<&[usize]>) -> String {
        let op = Op::DeformColumns {
            size: vec![3, 3],
            window: Window {
                strides: vec![1, 1],
                dilations: vec![1, 1],
                pads_low: vec![1, 1],
                pads_high: vec![1, 1],
            },
            groups: 2,
        };
        let of = |shape: &[usize]| Type::new(DType::F32, shape.iter().copied());
        let types: Vec<Type> = [x, offsets].into_iter().chain(mask).map(of).collect();
        let found = (op.spec().infer)(&op, &types, &[]);
        found.map_or_else(|e| e, |types| types[0].to_string())
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let (x, offsets) = (&[2, 4, 5, 6], &[2, 36, 5, 6]);
        assert_snapshot!(error(x, offsets, Some(&[2, 18, 5, 6])), @"f32[2, 4, 9, 5, 6]");
        assert_snapshot!(error(&[4, 5, 6], offsets, None), @"expected floats [n, c, h, w], got f32[4, 5, 6]");
        assert_snapshot!(error(&[2, 3, 5, 6], offsets, None), @"3 channels do not divide into 2 groups of offsets");
        assert_snapshot!(error(x, &[2, 18, 5, 6], None), @"expected offsets f32[2, 36, 5, 6], got f32[2, 18, 5, 6]");
        assert_snapshot!(error(x, offsets, Some(&[2, 9, 5, 6])), @"expected a mask f32[2, 18, 5, 6], got f32[2, 9, 5, 6]");
    }

    #[test]
    fn planes_may_be_symbolic() {
        let (h, w) = (crate::ir::Dim::symbol("h"), crate::ir::Dim::symbol("w"));
        let op = Op::DeformColumns {
            size: vec![1, 1],
            window: Window {
                strides: vec![1, 1],
                dilations: vec![1, 1],
                pads_low: vec![0, 0],
                pads_high: vec![0, 0],
            },
            groups: 1,
        };
        let of = |channels: usize| {
            Type::new(
                DType::F32,
                [1.into(), channels.into(), h.clone(), w.clone()],
            )
        };
        let types = (op.spec().infer)(&op, &[of(3), of(2)], &[]).unwrap();
        assert_snapshot!(types[0], @"f32[1, 3, 1, h, w]");
    }
}
