//! Linear quantisation: `real = (quantised - zero_point) * scale`.
//!
//! Products of quantised operands are exact: zero points are subtracted in `i32`, and the sum is
//! scaled and rounded once.

use super::super::import::{Ctx, OpDef, Out, Outs, axis_of, one};
use super::super::tensor::dtype_of;
use super::contract::{conv_of, matmul_of};
use super::elementwise::narrowed;
use super::norm::per_channel;
use crate::error::{Error, Result};
use crate::ir::{Dim, ReduceKind, ScalarOp, Shape, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("QuantizeLinear", (2, 3), quantize),
    // Weights stay bytes for the pass that makes products of integers of them; others are folded
    // after it.
    OpDef {
        fold: false,
        ..OpDef::new("DequantizeLinear", (2, 3), dequantize)
    },
    OpDef::new("DynamicQuantizeLinear", (1, 1), dynamic_quantize),
    OpDef::new("MatMulInteger", (2, 4), matmul_integer),
    OpDef::new("QLinearMatMul", (8, 8), qlinear_matmul),
    OpDef::new("ConvInteger", (2, 4), conv_integer),
    OpDef::new("QLinearConv", (8, 9), qlinear_conv),
];

/// Groups of elements that share a scale.
struct Granularity {
    axis: i64,
    block: i64,
}

impl Granularity {
    fn read(cx: &Ctx) -> Result<Granularity> {
        Ok(Granularity {
            axis: cx.i("axis", 1)?,
            block: cx.i("block_size", 0)?,
        })
    }

    /// A scale or zero point shaped to broadcast to a tensor of shape `to`.
    fn spread(&self, cx: &mut Ctx, v: ValueId, to: &Shape) -> Result<ValueId> {
        let s = cx.shape_of(v);
        if s.n_elements().is(1) {
            return cx.reshape(v, Vec::<Dim>::new());
        }
        let axis = axis_of(self.axis, to.rank())?;
        if s.rank() == 1 && self.block == 0 {
            let mut along = vec![Dim::constant(1); to.rank()];
            along[axis] = s[0].clone();
            return cx.reshape(v, along);
        }
        if s.rank() != to.rank() || self.block <= 0 {
            let message = format!("a scale of shape {s} does not fit {to}");
            return Err(Error::invalid(message));
        }
        let v = self.repeated(cx, v, axis)?;
        cx.slice_axis(v, axis, 0i64, &to[axis])
    }

    /// Each element along `axis` repeated for the elements of its block; the last block may be
    /// longer than needed.
    fn repeated(&self, cx: &mut Ctx, v: ValueId, axis: usize) -> Result<ValueId> {
        let mut joined = cx.shape_of(v).0;
        let mut ones = joined.clone();
        ones.insert(axis + 1, Dim::constant(1));
        let mut blocks = ones.clone();
        blocks[axis + 1] = Dim::constant(self.block);
        joined[axis] = joined[axis].scale(self.block);
        let v = cx.reshape(v, ones)?;
        let v = cx.broadcast(v, blocks)?;
        cx.reshape(v, joined)
    }
}

/// An optional dtype attribute; 0 is none.
fn dtype_attr(cx: &Ctx, name: &'static str) -> Result<Option<DType>> {
    match cx.i(name, 0)? {
        0 => Ok(None),
        d => dtype_of(d as i32).map(Some),
    }
}

/// `saturate(round(x / scale) + zero_point)`, ties to even.
fn quantize(cx: &mut Ctx) -> Result<Outs> {
    let saturates = cx.i("saturate", 1)? != 0;
    let by = Granularity::read(cx)?;
    let precision = dtype_attr(cx, "precision")?;
    let asked = dtype_attr(cx, "output_dtype")?;
    let ([x, scale], zero) = (cx.first()?, cx.opt(2)?);
    let to = zero.map(|z| cx.dtype_of(z)).or(asked).unwrap_or(DType::U8);
    let shape = cx.shape_of(x);
    let inner = precision.unwrap_or(cx.dtype_of(scale));
    if !inner.is_float() || !to.is_int() && !to.is_float8() {
        let message = format!("quantisation to {to} with scales of {inner}");
        return Err(Error::unsupported(message));
    }
    let (x, scale) = (cx.cast(x, inner)?, cx.cast(scale, inner)?);
    let scale = by.spread(cx, scale, &shape)?;
    let zero = zero.map(|z| by.spread(cx, z, &shape)).transpose()?;
    let q = cx.div(x, scale)?;
    if !to.is_float8() {
        return one(rounded(cx, q, zero, to)?);
    }
    let q = shifted(cx, q, zero)?;
    one(narrowed(cx, q, to, saturates)?)
}

/// `q + zero` in `f32`.
fn shifted(cx: &mut Ctx, q: ValueId, zero: Option<ValueId>) -> Result<ValueId> {
    let Some(zero) = zero else { return Ok(q) };
    let q = cx.cast(q, DType::F32)?;
    let zero = cx.cast(zero, DType::F32)?;
    cx.add_(q, zero)
}

/// `saturate(round(q) + zero)` as `to`: the cast saturates.
fn rounded(cx: &mut Ctx, q: ValueId, zero: Option<ValueId>, to: DType) -> Result<ValueId> {
    let q = cx.round(q)?;
    let q = shifted(cx, q, zero)?;
    cx.cast(q, to)
}

fn dequantize(cx: &mut Ctx) -> Result<Outs> {
    let by = Granularity::read(cx)?;
    let asked = dtype_attr(cx, "output_dtype")?;
    let ([x, scale], zero) = (cx.first()?, cx.opt(2)?);
    let shape = cx.shape_of(x);
    let to = asked.unwrap_or(cx.dtype_of(scale));
    let between = match cx.dtype_of(x).is_float8() {
        true => DType::F32,
        false => DType::I32,
    };
    let mut x = cx.cast(x, between)?;
    if let Some(z) = zero {
        let z = cx.cast(z, between)?;
        let z = by.spread(cx, z, &shape)?;
        x = cx.sub(x, z)?;
    }
    let scale = cx.cast(scale, to)?;
    let scale = by.spread(cx, scale, &shape)?;
    let x = cx.cast(x, to)?;
    one(cx.mul(x, scale)?)
}

/// To `u8` with a scale that covers 0 and all elements; results: quantised, scale, zero point.
fn dynamic_quantize(cx: &mut Ctx) -> Result<Outs> {
    let x = cx.val(0)?;
    let all = quantized_by_range(cx, x)?;
    Ok(all.into_iter().map(Out::Value).collect())
}

/// `x` in `u8`, its scale and its zero point, by the range of its elements.
pub(super) fn quantized_by_range(cx: &mut Ctx, x: ValueId) -> Result<[ValueId; 3]> {
    let (smallest, range) = range_with_zero(cx, x)?;
    let scale = cx.with_real(ScalarOp::Div, range, 255.0)?;
    let below = cx.div(smallest, scale)?;
    let point = cx.neg(below)?;
    let point = rounded(cx, point, None, DType::U8)?;
    let q = cx.div(x, scale)?;
    let y = rounded(cx, q, Some(point), DType::U8)?;
    Ok([y, scale, point])
}

/// The smallest of all elements and 0, and the distance to the largest of them; 1 where all are 0,
/// when any scale will do.
fn range_with_zero(cx: &mut Ctx, x: ValueId) -> Result<(ValueId, ValueId)> {
    let axes: Vec<usize> = (0..cx.shape_of(x).rank()).collect();
    let largest = cx.reduce(ReduceKind::Max, x, &axes, false)?;
    let largest = cx.with_real(ScalarOp::Max, largest, 0.0)?;
    let smallest = cx.reduce(ReduceKind::Min, x, &axes, false)?;
    let smallest = cx.with_real(ScalarOp::Min, smallest, 0.0)?;
    let range = cx.sub(largest, smallest)?;
    let (zero, unit) = (cx.scalar_like(x, 0.0), cx.scalar_like(x, 1.0));
    let empty = cx.eq(range, zero)?;
    Ok((smallest, cx.select(empty, unit, range)?))
}

/// `x - zero` in `i32`; `zero` must broadcast.
pub(super) fn centred(cx: &mut Ctx, x: ValueId, zero: Option<ValueId>) -> Result<ValueId> {
    let x = cx.cast(x, DType::I32)?;
    let Some(z) = zero else { return Ok(x) };
    let z = cx.cast(z, DType::I32)?;
    cx.sub(x, z)
}

/// A scale or zero point of the rows of a left operand: a vector becomes a column.
fn by_row(cx: &mut Ctx, v: ValueId) -> Result<ValueId> {
    let s = cx.shape_of(v);
    if s.n_elements().is(1) {
        return cx.reshape(v, Vec::<Dim>::new());
    }
    if s.rank() == 1 {
        cx.reshape(v, [s[0].clone(), 1.into()])
    } else {
        Ok(v)
    }
}

/// A scale or zero point of the columns of a right operand: vectors broadcast as they are.
fn by_column(cx: &mut Ctx, v: ValueId) -> Result<ValueId> {
    if cx.shape_of(v).n_elements().is(1) {
        cx.reshape(v, Vec::<Dim>::new())
    } else {
        Ok(v)
    }
}

fn integer_product(cx: &mut Ctx, operands: [usize; 2], zeros: [usize; 2]) -> Result<ValueId> {
    let (a, b) = (cx.val(operands[0])?, cx.val(operands[1])?);
    let (za, zb) = (cx.opt(zeros[0])?, cx.opt(zeros[1])?);
    let za = za.map(|z| by_row(cx, z)).transpose()?;
    let zb = zb.map(|z| by_column(cx, z)).transpose()?;
    let (a, b) = (centred(cx, a, za)?, centred(cx, b, zb)?);
    matmul_of(cx, a, b)
}

fn matmul_integer(cx: &mut Ctx) -> Result<Outs> {
    one(integer_product(cx, [0, 1], [2, 3])?)
}

/// An exact `i32` result scaled by `a * b / y`, and quantised.
fn requantized(
    cx: &mut Ctx,
    sum: ValueId,
    [a, b]: [ValueId; 2],
    [y, zero]: [ValueId; 2],
) -> Result<ValueId> {
    let to = cx.dtype_of(zero);
    let mut f32s = Vec::new();
    for v in [sum, a, b, y] {
        f32s.push(cx.cast(v, DType::F32)?);
    }
    let factor = cx.mul(f32s[1], f32s[2])?;
    let y = by_row(cx, f32s[3])?;
    let factor = cx.div(factor, y)?;
    let scaled = cx.mul(f32s[0], factor)?;
    let zero = by_row(cx, zero)?;
    rounded(cx, scaled, Some(zero), to)
}

fn qlinear_matmul(cx: &mut Ctx) -> Result<Outs> {
    let sum = integer_product(cx, [0, 3], [2, 5])?;
    let (a, b, y, zero) = (cx.val(1)?, cx.val(4)?, cx.val(6)?, cx.val(7)?);
    let (a, b) = (by_row(cx, a)?, by_column(cx, b)?);
    one(requantized(cx, sum, [a, b], [y, zero])?)
}

/// A scale or zero point of the output channels, for tensors of `rank` with channels on axis
/// `axis`.
fn by_channel(cx: &mut Ctx, v: ValueId, axis: usize, rank: usize) -> Result<ValueId> {
    if cx.shape_of(v).n_elements().is(1) {
        return cx.reshape(v, Vec::<Dim>::new());
    }
    per_channel(cx, v, rank + 1 - axis)
}

/// Border elements are the zero point of `x`: it is subtracted before the convolution pads with 0.
fn integer_conv(cx: &mut Ctx, operands: [usize; 2], zeros: [usize; 2]) -> Result<ValueId> {
    let (x, w) = (cx.val(operands[0])?, cx.val(operands[1])?);
    let rank = cx.shape_of(w).rank();
    let (zx, zw) = (cx.opt(zeros[0])?, cx.opt(zeros[1])?);
    let zx = zx.map(|z| cx.reshape(z, Vec::<Dim>::new())).transpose()?;
    let zw = zw.map(|z| by_channel(cx, z, 0, rank)).transpose()?;
    let (x, w) = (centred(cx, x, zx)?, centred(cx, w, zw)?);
    conv_of(cx, x, w)
}

fn conv_integer(cx: &mut Ctx) -> Result<Outs> {
    one(integer_conv(cx, [0, 1], [2, 3])?)
}

fn qlinear_conv(cx: &mut Ctx) -> Result<Outs> {
    let mut sum = integer_conv(cx, [0, 3], [2, 5])?;
    let rank = cx.shape_of(sum).rank();
    if let Some(bias) = cx.opt(8)? {
        let bias = per_channel(cx, bias, rank)?;
        sum = cx.add_(sum, bias)?;
    }
    let (x, w, y, zero) = (cx.val(1)?, cx.val(4)?, cx.val(6)?, cx.val(7)?);
    let (x, w) = (by_row(cx, x)?, by_channel(cx, w, 1, rank)?);
    one(requantized(cx, sum, [x, w], [y, zero])?)
}
