//! Operators that make tensors from attributes, shapes or ranges, and those that pass operands on.

use super::super::import::{Contents, Ctx, FOLD_LIMIT_BYTES, OpDef, Out, Outs, one};
use super::{MANY, run_time};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, ScalarOp, Shape, Type, ValueId};
use gristmill_runtime::{DType, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Constant", (0, 0), constant),
    OpDef::new("ConstantOfShape", (1, 1), constant_of_shape),
    OpDef::new("Identity", (1, 1), identity),
    OpDef::new("Shape", (1, 1), shape),
    OpDef::new("Size", (1, 1), size),
    OpDef::new("Range", (3, 3), range),
    OpDef::new("EyeLike", (1, 1), eye_like),
    OpDef::new("HannWindow", (1, 1), window),
    OpDef::new("HammingWindow", (1, 1), window),
    OpDef::new("BlackmanWindow", (1, 1), window),
    OpDef::new("Sum", (1, MANY), sum),
];

fn constant(cx: &mut Ctx) -> Result<Outs> {
    for name in ["value", "sparse_value"] {
        if let Some(t) = cx.tensor_attr(name)? {
            return Ok(vec![Out::tensor(t)]);
        }
    }
    match plain_constant(cx)? {
        Some(t) => Ok(vec![Out::tensor(t)]),
        None if cx.has_attr("value_string") || cx.has_attr("value_strings") => {
            Err(Error::unsupported("strings are not supported"))
        }
        None => Err(Error::invalid("a constant needs a value")),
    }
}

/// The value of an attribute that is no tensor.
fn plain_constant(cx: &Ctx) -> Result<Option<Tensor>> {
    if let Some(v) = cx.opt_f("value_float")? {
        return Ok(Some(Tensor::scalar(v as f32)));
    }
    if let Some(v) = cx.opt_i("value_int")? {
        return Ok(Some(Tensor::scalar(v)));
    }
    if let Some(v) = cx.floats("value_floats")? {
        let v: Vec<f32> = v.into_iter().map(|f| f as f32).collect();
        return Ok(Some(Tensor::from_slice(&v, &[v.len()])?));
    }
    if let Some(v) = cx.ints("value_ints")? {
        return Ok(Some(Tensor::from_slice(&v, &[v.len()])?));
    }
    Ok(None)
}

fn constant_of_shape(cx: &mut Ctx) -> Result<Outs> {
    let value = cx.tensor_attr("value")?.unwrap_or(Tensor::scalar(0f32));
    if value.len() != 1 {
        return Err(Error::invalid(format!(
            "value must have one element, has shape {:?}",
            value.shape()
        )));
    }
    let shape = cx.dims(0)?;
    if let Some(d) = shape.iter().find(|d| d.as_const().is_some_and(|c| c < 0)) {
        return Err(Error::invalid(format!("extent {d} is negative")));
    }
    let scalar = cx.b().constant(value.reshaped(&[])?);
    one(cx.broadcast(scalar, shape)?)
}

fn identity(cx: &mut Ctx) -> Result<Outs> {
    Ok(vec![Out::Same(cx.v(0)?)])
}

/// A vector of dims as a result.
fn dims_out(dims: Vec<Dim>, shape: &[usize]) -> Result<Out> {
    let ty = Type {
        dtype: DType::I64,
        shape: Shape::of(shape),
    };
    let known = match dims.iter().map(Dim::as_const).collect::<Option<Vec<i64>>>() {
        Some(ints) => Contents::Tensor(Tensor::from_slice(&ints, shape)?),
        None => Contents::Dims(dims),
    };
    Ok(Out::Contents(ty, known))
}

fn shape(cx: &mut Ctx) -> Result<Outs> {
    let dims = cx.ty(0)?.shape.0;
    let rank = dims.len() as i64;
    let at = |i: i64| (if i < 0 { i.saturating_add(rank) } else { i }).clamp(0, rank) as usize;
    let (start, end) = (at(cx.i("start", 0)?), at(cx.i("end", rank)?));
    let part = dims.get(start..end).unwrap_or(&[]).to_vec();
    let n = part.len();
    Ok(vec![dims_out(part, &[n])?])
}

fn size(cx: &mut Ctx) -> Result<Outs> {
    let n = cx.ty(0)?.shape.n_elements();
    Ok(vec![dims_out(vec![n], &[])?])
}

fn range(cx: &mut Ctx) -> Result<Outs> {
    cx.ignore(&["stash_type"]);
    let dtype = cx.ty(0)?.dtype;
    if cx.is_run_time() && !is_known_range(cx)? {
        return run_time_range(cx, dtype);
    }
    cx.require(&[0, 1, 2])?;
    if dtype.is_float() {
        return float_range(cx, dtype);
    }
    let (start, limit, step) = (scalar_dim(cx, 0)?, scalar_dim(cx, 1)?, scalar_dim(cx, 2)?);
    let Some(step) = step.as_const().filter(|s| *s != 0) else {
        let message = format!("delta {step} must be a constant other than 0");
        return Err(Error::unsupported(message));
    };
    let op = Op::Iota {
        dtype,
        shape: vec![range_length(cx, &start, limit, step)?],
        axis: 0,
    };
    let mut x = cx.add(op, &[])?;
    if step != 1 {
        x = cx.mul_real(x, step as f64)?;
    }
    match start.as_const() {
        Some(0) => one(x),
        Some(c) => one(cx.add_real(x, c as f64)?),
        None => {
            let start = cx.dim_value(&start)?;
            let start = cx.cast(start, dtype)?;
            one(cx.add_(x, start)?)
        }
    }
}

/// True when the length of a range is known at import, and so are its elements.
fn is_known_range(cx: &mut Ctx) -> Result<bool> {
    let is_float = cx.ty(0)?.dtype.is_float();
    for i in 0..2 {
        let is_known = match is_float {
            true => cx.constant(i)?.is_some(),
            false => cx.try_dims(i)?.is_some(),
        };
        if !is_known {
            return Ok(false);
        }
    }
    Ok(cx.constant(2)?.is_some())
}

/// `start + i * delta` for operands that a run shows; floats in `f64`, rounded once.
fn run_time_range(cx: &mut Ctx, dtype: DType) -> Result<Outs> {
    let wide = if dtype.is_float() {
        DType::F64
    } else {
        DType::I64
    };
    let mut operands = cx.first::<3>()?;
    for v in &mut operands {
        let scalar = cx.reshape(*v, Vec::<Dim>::new())?;
        *v = cx.cast(scalar, wide)?;
    }
    let [start, limit, step] = operands;
    let n = match dtype.is_float() {
        true => float_length(cx, start, limit, step)?,
        false => run_time::range_length(cx, start, limit, step)?,
    };
    let n = cx.extent(n)?;
    let i = cx.iota([n], 0)?;
    let i = cx.cast(i, wide)?;
    let passed = cx.mul(i, step)?;
    let x = cx.add_(start, passed)?;
    one(cx.cast(x, dtype)?)
}

/// Number of elements of a range of `f64`.
fn float_length(cx: &mut Ctx, start: ValueId, limit: ValueId, step: ValueId) -> Result<ValueId> {
    let span = cx.sub(limit, start)?;
    let steps = cx.div(span, step)?;
    let steps = cx.map(ScalarOp::Ceil, &[steps])?;
    let steps = cx.with_real(ScalarOp::Max, steps, 0.0)?;
    cx.cast(steps, DType::I64)
}

fn range_length(cx: &Ctx, start: &Dim, limit: Dim, step: i64) -> Result<Dim> {
    let span = if step > 0 {
        limit - start.clone()
    } else {
        start.clone() - limit
    };
    let pace = step.checked_abs();
    let n = span.ceil_div(pace.ok_or_else(|| Error::invalid("delta is out of range"))?);
    Ok(cx.greatest(&n, &0.into()))
}

fn scalar_dim(cx: &mut Ctx, i: usize) -> Result<Dim> {
    match cx.dims(i)?.as_slice() {
        [d] => Ok(d.clone()),
        d => Err(Error::invalid(format!(
            "operand {i} must have one element, has {}",
            d.len()
        ))),
    }
}

/// `start + i * delta`, computed in `f64` and rounded once.
fn float_range(cx: &mut Ctx, dtype: DType) -> Result<Outs> {
    let (start, limit, step) = (
        cx.real_in(0, 0.0)?,
        cx.real_in(1, 0.0)?,
        cx.real_in(2, 1.0)?,
    );
    let n = ((limit - start) / step).ceil().max(0.0);
    if n.is_nan() || n * 8.0 > FOLD_LIMIT_BYTES as f64 {
        return Err(Error::unsupported(format!(
            "a range from {start} to {limit} by {step}"
        )));
    }
    let values: Vec<f64> = (0..n as usize).map(|i| start + i as f64 * step).collect();
    one(cx.reals(dtype, &values, &[values.len()])?)
}

fn eye_like(cx: &mut Ctx) -> Result<Outs> {
    let ty = cx.ty(0)?;
    let dtype = match cx.opt_i("dtype")? {
        Some(d) => super::super::tensor::dtype_of(d as i32)?,
        None => ty.dtype,
    };
    let k = cx.i("k", 0)?;
    if ty.rank() != 2 {
        return Err(Error::invalid(format!("expected a matrix, got {ty}")));
    }
    let row = cx.iota(ty.shape.0.clone(), 0)?;
    let column = cx.iota(ty.shape.0, 1)?;
    let row = cx.add_real(row, k as f64)?;
    let eye = cx.eq(row, column)?;
    one(cx.cast(eye, dtype)?)
}

/// Hann, Hamming and Blackman windows of constant length, as sums of cosines.
fn window(cx: &mut Ctx) -> Result<Outs> {
    let dtype = super::super::tensor::dtype_of(cx.i("output_datatype", 1)? as i32)?;
    let periodic = cx.flag("periodic", true)?;
    let n = usize::try_from(cx.first_int(0)?.unwrap_or(-1)).ok();
    let n = n.filter(|n| *n <= FOLD_LIMIT_BYTES / 8);
    let n =
        n.ok_or_else(|| Error::unsupported("the length of the window is negative or too large"))?;
    let coefficients: &[f64] = match cx.node.op_type.as_str() {
        "HannWindow" => &[0.5, -0.5],
        "HammingWindow" => &[25.0 / 46.0, -21.0 / 46.0],
        _ => &[0.42, -0.5, 0.08],
    };
    let period = if periodic { n as f64 } else { n as f64 - 1.0 };
    let values: Vec<f64> = (0..n)
        .map(|i| sum_of_cosines(coefficients, i, period))
        .collect();
    one(cx.reals(dtype, &values, &[n])?)
}

/// `c0 + c1 cos(2 pi i / period) + c2 cos(4 pi i / period)`.
fn sum_of_cosines(coefficients: &[f64], i: usize, period: f64) -> f64 {
    let mut sum = coefficients[0];
    for (k, c) in coefficients.iter().enumerate().skip(1) {
        let angle = 2.0 * std::f64::consts::PI * (i * k) as f64 / period;
        sum += c * angle.cos();
    }
    sum
}

fn sum(cx: &mut Ctx) -> Result<Outs> {
    super::elementwise::variadic(cx, ScalarOp::Add)
}
