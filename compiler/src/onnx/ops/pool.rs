//! Pooling.

use super::super::import::{Ctx, OpDef, Out, Outs, one};
use super::contract::Geometry;
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, PoolKind, ReduceKind, ScalarOp, ValueId, Window};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("MaxPool", (1, 1), max_pool),
    OpDef::new("AveragePool", (1, 1), average_pool),
    OpDef::new("LpPool", (1, 1), lp_pool),
    OpDef::new("GlobalAveragePool", (1, 1), global_average),
    OpDef::new("GlobalMaxPool", (1, 1), global_max),
    OpDef::new("GlobalLpPool", (1, 1), global_lp),
];

struct Pooling {
    x: ValueId,
    size: Vec<usize>,
    window: Window,
    ceil: bool,
}

fn read(cx: &mut Ctx) -> Result<Pooling> {
    let Some(size) = cx.usizes("kernel_shape")? else {
        return Err(Error::invalid("kernel_shape is missing"));
    };
    let x = cx.val(0)?;
    let shape = cx.shape_of(x);
    if shape.rank() != size.len() + 2 || size.contains(&0) {
        let message = format!("kernel_shape {size:?} does not fit {shape}");
        return Err(Error::invalid(message));
    }
    let ceil = cx.flag("ceil_mode", false)?;
    let window = Geometry::read(cx, size.len())?.window(&shape[2..], &size)?;
    Ok(Pooling {
        x,
        size,
        window,
        ceil,
    })
}

fn pool(cx: &mut Ctx, p: Pooling, kind: PoolKind) -> Result<ValueId> {
    let op = Op::Pool {
        kind,
        size: p.size,
        window: p.window,
        ceil: p.ceil,
        layout: Layout::ChannelsFirst,
    };
    cx.add(op, &[p.x])
}

fn max_pool(cx: &mut Ctx) -> Result<Outs> {
    let column_major = cx.flag("storage_order", false)?;
    let p = read(cx)?;
    if cx.node.output.len() < 2 {
        return one(pool(cx, p, PoolKind::Max)?);
    }
    let x = p.x;
    let op = Op::MaxPoolIndices {
        size: p.size,
        window: p.window,
        ceil: p.ceil,
    };
    let mut outs = cx.b().add(op, &[x])?;
    if column_major {
        outs[1] = column_major_places(cx, outs[1], x)?;
    }
    Ok(outs.into_iter().map(Out::Value).collect())
}

/// Row-major positions in `x: [n, c, spatial..]` as positions with the spatial axes in reverse
/// order.
fn column_major_places(cx: &mut Ctx, places: ValueId, x: ValueId) -> Result<ValueId> {
    let spatial: Option<Vec<usize>> = cx.shape_of(x).iter().skip(2).map(Dim::as_usize).collect();
    let spatial =
        spatial.ok_or_else(|| Error::unsupported("storage_order 1 over symbolic extents"))?;
    let pixels: usize = spatial.iter().product();
    let (mut rest, mut stride, mut out) = (places, pixels, None);
    for &extent in spatial.iter().rev() {
        stride /= extent.max(1);
        let along = cx.with_real(ScalarOp::Mod, rest, extent as f64)?;
        let along = cx.mul_real(along, stride as f64)?;
        rest = cx.with_real(ScalarOp::Div, rest, extent as f64)?;
        out = Some(match out {
            None => along,
            Some(sum) => cx.add_(sum, along)?,
        });
    }
    let plane = cx.mul_real(rest, pixels as f64)?;
    match out {
        Some(sum) => cx.add_(sum, plane),
        None => Ok(places),
    }
}

fn average_pool(cx: &mut Ctx) -> Result<Outs> {
    let kind = if cx.flag("count_include_pad", false)? {
        PoolKind::AvgIncludePad
    } else {
        PoolKind::Avg
    };
    let p = read(cx)?;
    one(pool(cx, p, kind)?)
}

/// `(sum |x|^p)^(1/p)`; the sum is an average times the number of taps.
fn lp_pool(cx: &mut Ctx) -> Result<Outs> {
    let power = cx.i("p", 2)? as f64;
    let mut p = read(cx)?;
    let taps = p.size.iter().product::<usize>() as f64;
    p.x = abs_pow(cx, p.x, power)?;
    let mean = pool(cx, p, PoolKind::AvgIncludePad)?;
    let sum = cx.mul_real(mean, taps)?;
    one(root(cx, sum, power)?)
}

fn abs_pow(cx: &mut Ctx, x: ValueId, p: f64) -> Result<ValueId> {
    if p == 2.0 {
        return cx.mul(x, x);
    }
    let x = cx.abs(x)?;
    if p == 1.0 {
        Ok(x)
    } else {
        cx.with_real(ScalarOp::Pow, x, p)
    }
}

fn root(cx: &mut Ctx, x: ValueId, p: f64) -> Result<ValueId> {
    match p {
        1.0 => Ok(x),
        2.0 => cx.sqrt(x),
        _ => cx.with_real(ScalarOp::Pow, x, 1.0 / p),
    }
}

fn spatial_axes(cx: &mut Ctx, x: ValueId) -> Vec<usize> {
    (2..cx.shape_of(x).rank()).collect()
}

fn global_average(cx: &mut Ctx) -> Result<Outs> {
    let x = cx.val(0)?;
    let axes = spatial_axes(cx, x);
    one(cx.reduce(ReduceKind::Mean, x, &axes, true)?)
}

fn global_max(cx: &mut Ctx) -> Result<Outs> {
    let x = cx.val(0)?;
    let axes = spatial_axes(cx, x);
    one(cx.reduce(ReduceKind::Max, x, &axes, true)?)
}

fn global_lp(cx: &mut Ctx) -> Result<Outs> {
    let power = cx.i("p", 2)? as f64;
    let x = cx.val(0)?;
    let axes = spatial_axes(cx, x);
    let t = abs_pow(cx, x, power)?;
    let sum = cx.reduce(ReduceKind::Sum, t, &axes, true)?;
    one(root(cx, sum, power)?)
}
