//! Operators that make tensors from attributes, shapes or ranges, and those that pass operands on.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, Known, OpDef, Out, Outs, one};
use super::MANY;
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, ScalarOp, Shape, Type};
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{DType, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Constant", (0, 0), constant),
    OpDef::new("ConstantOfShape", (1, 1), constant_of_shape),
    OpDef::new("Identity", (1, 1), identity),
    OpDef::new("Dropout", (1, 3), dropout),
    OpDef::new("Shape", (1, 1), shape),
    OpDef::new("Size", (1, 1), size),
    OpDef::new("Range", (3, 3), range),
    OpDef::new("EyeLike", (1, 1), eye_like),
    OpDef::new("HannWindow", (1, 1), window),
    OpDef::new("HammingWindow", (1, 1), window),
    OpDef::new("BlackmanWindow", (1, 1), window),
    OpDef::new("Sum", (1, MANY), sum),
];

fn constant<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    if let Some(t) = cx.tensor_attr("value")? {
        return Ok(vec![Out::tensor(t)]);
    }
    if let Some(t) = cx.tensor_attr("sparse_value")? {
        return Ok(vec![Out::tensor(t)]);
    }
    if cx.has_attr("value_float") {
        return Ok(vec![Out::tensor(Tensor::scalar(
            cx.f("value_float", 0.0)? as f32
        ))]);
    }
    if cx.has_attr("value_int") {
        return Ok(vec![Out::tensor(Tensor::scalar(cx.i("value_int", 0)?))]);
    }
    if let Some(v) = cx.floats("value_floats")? {
        let v: Vec<f32> = v.into_iter().map(|f| f as f32).collect();
        return Ok(vec![Out::tensor(Tensor::from_slice(&v, &[v.len()])?)]);
    }
    if let Some(v) = cx.ints("value_ints")? {
        return Ok(vec![Out::tensor(Tensor::from_slice(&v, &[v.len()])?)]);
    }
    if cx.has_attr("value_string") || cx.has_attr("value_strings") {
        return Err(Error::unsupported("strings are not supported"));
    }
    Err(Error::invalid("a constant needs a value"))
}

fn constant_of_shape<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
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
    one(cx.b().broadcast(scalar, shape)?)
}

fn identity<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    Ok(vec![Out::Same(cx.v(0)?)])
}

/// At inference, or when nothing is dropped, the operand itself and an all-true mask.
fn dropout<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    cx.ignore(&["ratio", "seed"]);
    cx.require(&[2])?;
    let before_7 = cx.opset < 7 && !cx.flag("is_test", false)?;
    if cx.has(2) && cx.constant(2)?.is_none() {
        cx.require(&[1, 2])?;
    }
    let training = before_7 || cx.has(2) && cx.tensor(2)?.as_bytes() != [0];
    if training && (cx.opset < 12 || cx.real_in(1, 0.5)? != 0.0) {
        return Err(
            Error::unsupported("training_mode is not supported").hint("export for inference")
        );
    }
    let shape = cx.ty(0)?.shape;
    let yes = cx.b().scalar(DType::Bool, 1.0);
    let mask = cx.b().broadcast(yes, shape.0)?;
    Ok(vec![Out::Same(cx.v(0)?), Out::Value(mask)])
}

/// A vector of dims as a result.
fn dims_out<'m>(dims: Vec<Dim>, shape: &[usize]) -> Result<Out<'m>> {
    let ty = Type {
        dtype: DType::I64,
        shape: Shape::of(shape),
    };
    let known = match dims.iter().map(Dim::as_const).collect::<Option<Vec<i64>>>() {
        Some(ints) => Known::Tensor(Tensor::from_slice(&ints, shape)?),
        None => Known::Dims(dims),
    };
    Ok(Out::Known(ty, known))
}

fn shape<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let dims = cx.ty(0)?.shape.0;
    let rank = dims.len() as i64;
    let at = |i: i64| (if i < 0 { i.saturating_add(rank) } else { i }).clamp(0, rank) as usize;
    let (start, end) = (at(cx.i("start", 0)?), at(cx.i("end", rank)?));
    let part = dims.get(start..end).unwrap_or(&[]).to_vec();
    let n = part.len();
    Ok(vec![dims_out(part, &[n])?])
}

fn size<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let n = cx.ty(0)?.shape.n_elements();
    Ok(vec![dims_out(vec![n], &[])?])
}

fn range<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    cx.ignore(&["stash_type"]);
    cx.require(&[0, 1, 2])?;
    let dtype = cx.ty(0)?.dtype;
    if dtype.is_float() {
        return float_range(cx, dtype);
    }
    let (start, limit, step) = (scalar_dim(cx, 0)?, scalar_dim(cx, 1)?, scalar_dim(cx, 2)?);
    let Some(step) = step.as_const().filter(|s| *s != 0) else {
        return Err(Error::unsupported(format!(
            "delta {step} must be a constant other than 0"
        )));
    };
    let span = if step > 0 {
        limit - start.clone()
    } else {
        start.clone() - limit
    };
    let n = span.ceil_div(
        step.checked_abs()
            .ok_or_else(|| Error::invalid("delta is out of range"))?,
    );
    let n = if n.as_const().is_some_and(|c| c < 0) {
        Dim::constant(0)
    } else {
        n
    };
    let x = cx.add(
        Op::Iota {
            dtype,
            shape: vec![n],
            axis: 0,
        },
        &[],
    )?;
    let x = if step == 1 {
        x
    } else {
        cx.with_real(ScalarOp::Mul, x, step as f64)?
    };
    match start.as_const() {
        Some(0) => one(x),
        Some(c) => one(cx.with_real(ScalarOp::Add, x, c as f64)?),
        None => Err(cx.unknown(0)),
    }
}

fn scalar_dim(cx: &mut Ctx<'_, '_>, i: usize) -> Result<Dim> {
    match cx.dims(i)?.as_slice() {
        [d] => Ok(d.clone()),
        d => Err(Error::invalid(format!(
            "operand {i} must have one element, has {}",
            d.len()
        ))),
    }
}

/// `start + i * delta`, computed in `f64` and rounded once.
fn float_range<'m>(cx: &mut Ctx<'_, 'm>, dtype: DType) -> Result<Outs<'m>> {
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

fn eye_like<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let ty = cx.ty(0)?;
    let dtype = match cx.opt_i("dtype")? {
        Some(d) => super::super::tensor::dtype_of(d as i32)?,
        None => ty.dtype,
    };
    let k = cx.i("k", 0)?;
    if ty.rank() != 2 {
        return Err(Error::invalid(format!("expected a matrix, got {ty}")));
    }
    let row = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: ty.shape.0.clone(),
            axis: 0,
        },
        &[],
    )?;
    let column = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: ty.shape.0,
            axis: 1,
        },
        &[],
    )?;
    let row = cx.with_real(ScalarOp::Add, row, k as f64)?;
    let eye = cx.map(ScalarOp::Eq, &[row, column])?;
    one(cx.b().cast(eye, dtype)?)
}

/// Hann, Hamming and Blackman windows of constant length, as sums of cosines.
fn window<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let dtype = super::super::tensor::dtype_of(cx.i("output_datatype", 1)? as i32)?;
    let periodic = cx.flag("periodic", true)?;
    let n = cx.ints_in(0)?.first().copied().unwrap_or(-1);
    let n = usize::try_from(n)
        .ok()
        .filter(|n| checked_size_bytes(DType::F64, &[*n]).is_ok_and(|b| b <= FOLD_LIMIT_BYTES));
    let n =
        n.ok_or_else(|| Error::unsupported("the length of the window is negative or too large"))?;
    let coefficients: &[f64] = match cx.node.op_type.as_str() {
        "HannWindow" => &[0.5, -0.5],
        "HammingWindow" => &[25.0 / 46.0, -21.0 / 46.0],
        _ => &[0.42, -0.5, 0.08],
    };
    let period = if periodic { n as f64 } else { n as f64 - 1.0 };
    let at = |i: usize, k: usize| 2.0 * std::f64::consts::PI * (i * k) as f64 / period;
    let value = |i| {
        coefficients
            .iter()
            .enumerate()
            .map(|(k, c)| if k == 0 { *c } else { c * at(i, k).cos() })
            .sum()
    };
    let values: Vec<f64> = (0..n).map(value).collect();
    one(cx.reals(dtype, &values, &[n])?)
}

fn sum<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    super::elementwise::variadic(cx, ScalarOp::Add)
}
