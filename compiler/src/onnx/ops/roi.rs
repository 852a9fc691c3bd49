//! Regions of interest.

use super::super::import::{Ctx, OpDef, Outs, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, PoolKind, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("RoiAlign", (3, 3), roi_align),
    OpDef::new("NonMaxSuppression", (2, 5), non_max_suppression),
];

/// Coordinates are not shifted before version 16.
fn roi_align(cx: &mut Ctx) -> Result<Outs> {
    let kinds = &[("avg", PoolKind::Avg), ("max", PoolKind::Max)];
    let coordinates = &[("half_pixel", true), ("output_half_pixel", false)];
    let half_pixel = match cx.opset < 16 {
        true => false,
        false => cx.choice("coordinate_transformation_mode", "half_pixel", coordinates)?,
    };
    let op = Op::RoiAlign {
        kind: cx.choice("mode", "avg", kinds)?,
        size: vec![
            extent(cx, "output_height", 1)?,
            extent(cx, "output_width", 1)?,
        ],
        sampling: extent(cx, "sampling_ratio", 0)?,
        scale: cx.f("spatial_scale", 1.0)?.into(),
        half_pixel,
    };
    let operands = cx.vals()?;
    one(cx.add(op, &operands)?)
}

/// Without a number of boxes there are none; without a score any will do.
fn non_max_suppression(cx: &mut Ctx) -> Result<Outs> {
    if !cx.is_run_time() {
        return Err(cx.unknown(0));
    }
    let center = match cx.i("center_point_box", 0)? {
        0 => false,
        1 => true,
        n => {
            return Err(Error::invalid(format!(
                "center_point_box is {n}, expected 0 or 1"
            )));
        }
    };
    let [boxes, scores] = cx.first()?;
    let limits = [
        limit(cx, 2, DType::I64, 0.0)?,
        limit(cx, 3, DType::F32, 0.0)?,
        limit(cx, 4, DType::F32, f64::NEG_INFINITY)?,
    ];
    let count = cx.new_symbol();
    let op = Op::NonMaxSuppression { count, center };
    one(cx.add(op, &[&[boxes, scores], &limits[..]].concat())?)
}

/// Operand `i`, one number, in a dtype.
fn limit(cx: &mut Ctx, i: usize, dtype: DType, default: f64) -> Result<ValueId> {
    match cx.opt(i)? {
        Some(v) => {
            let v = cx.reshape(v, Vec::<Dim>::new())?;
            cx.cast(v, dtype)
        }
        None => Ok(cx.scalar(dtype, default)),
    }
}

/// An attribute that is a number of pixels or samples.
fn extent(cx: &Ctx, name: &'static str, default: i64) -> Result<usize> {
    let n = cx.i(name, default)?;
    usize::try_from(n).map_err(|_| Error::invalid(format!("{name} {n} is negative")))
}
