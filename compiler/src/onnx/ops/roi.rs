//! Regions of interest.

use super::super::import::{Ctx, OpDef, Outs, one};
use crate::error::{Error, Result};
use crate::ir::{Op, PoolKind};

pub(super) const OPS: &[OpDef] = &[OpDef::new("RoiAlign", (3, 3), roi_align)];

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

/// An attribute that is a number of pixels or samples.
fn extent(cx: &Ctx, name: &'static str, default: i64) -> Result<usize> {
    let n = cx.i(name, default)?;
    usize::try_from(n).map_err(|_| Error::invalid(format!("{name} {n} is negative")))
}
