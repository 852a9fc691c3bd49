//! Symbolic contents: arithmetic on shapes, done at import on expressions over symbols.
//!
//! `Shape` gives a small integer vector of dims; exporters then gather, concatenate, multiply and compare such vectors to
//! make operands of `Reshape`, `Expand`, `Slice` and the like. The rules here compute the results as dims, so that none
//! of this becomes a run-time op.

use super::import::{Ctx, Known, Out, Outs, axis_of};
use super::ops::movement::{reshape_target, slice_range, squeezed, unsqueezed};
use super::tensor::{dtype_of, from_i64s};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Dim, Shape, Type};
use gristmill_runtime::DType;

/// Elements beyond which contents are not tracked.
const MAX_TRACKED: usize = 4096;

/// Contents of a value: row-major elements.
#[derive(Clone, Debug)]
struct Content {
    dtype: DType,
    shape: Vec<usize>,
    dims: Vec<Dim>,
}

/// True when `d >= limit` whatever (non-negative) values its symbols have, as far as can be seen.
pub(super) fn at_least(d: &Dim, limit: i64) -> bool {
    lower_bound(d).is_some_and(|b| b >= limit)
}

/// A lower bound that holds for all extents of the symbols, which are at least 0.
fn lower_bound(d: &Dim) -> Option<i64> {
    if let Some(c) = d.as_const() {
        return Some(c);
    }
    // A dim whose terms all have positive factors is least at 0 in all symbols. The sign of the factors is seen by
    // comparing values at 0, 1 and a large number, one symbol at a time.
    let mut symbols = Vec::new();
    d.visit_symbols(&mut |s| symbols.push(s.to_owned()));
    let at = |n: usize, only: Option<&String>| {
        let value = |s: &String| if only.is_none_or(|o| o == s) { n } else { 0 };
        let b: Bindings = symbols.iter().map(|s| (s.clone(), value(s))).collect();
        d.bind(&b).as_const()
    };
    let zero = at(0, None)?;
    let rises = |s: &String| Some(at(1, Some(s))? >= zero && at(1 << 20, Some(s))? >= zero);
    let all = symbols.iter().all(|s| rises(s) == Some(true))
        && at(1 << 20, None)? >= zero
        && at(1, None)? >= zero;
    all.then_some(zero)
}

impl Content {
    /// Contents of operand `i`, when they are known and small.
    fn of(cx: &mut Ctx<'_, '_>, i: usize) -> Result<Option<Content>> {
        if !cx.has(i) {
            return Ok(None);
        }
        let ty = cx.ty(i)?;
        let Some(shape) = ty.static_shape() else {
            return Ok(None);
        };
        let small = shape
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .is_some_and(|n| n <= MAX_TRACKED);
        let symbolic = cx.is_symbolic(i);
        if !small || ty.dtype.is_float() && !symbolic {
            return Ok(None);
        }
        Ok(cx.try_dims(i)?.map(|dims| Content {
            dtype: ty.dtype,
            shape,
            dims,
        }))
    }

    fn new(dtype: DType, shape: Vec<usize>, dims: Vec<Dim>) -> Content {
        Content { dtype, shape, dims }
    }

    /// As a result: a tensor when no symbol is left. `None` when a value does not fit the dtype.
    fn out<'m>(self) -> Result<Option<Out<'m>>> {
        let ty = Type {
            dtype: self.dtype,
            shape: Shape::of(&self.shape),
        };
        let Some(ints) = self
            .dims
            .iter()
            .map(Dim::as_const)
            .collect::<Option<Vec<i64>>>()
        else {
            return Ok(Some(Out::Known(ty, Known::Dims(self.dims))));
        };
        if self.dtype.is_float() {
            let values: Vec<f64> = ints.iter().map(|&i| i as f64).collect();
            let t = gristmill_runtime::Tensor::from_f64s(self.dtype, &self.shape, &values)?;
            return Ok(Some(Out::Known(ty, Known::Tensor(t))));
        }
        let bits = 8 * self.dtype.size_bytes() as u32 - u32::from(self.dtype.is_signed_int());
        let fits = |v: i64| {
            let low = if self.dtype.is_signed_int() {
                -(1i128 << bits)
            } else {
                0
            };
            (low..1i128 << bits).contains(&i128::from(v)) && v != i64::MAX
        };
        if self.dtype != DType::Bool && !ints.iter().all(|&v| fits(v)) {
            return Ok(None);
        }
        Ok(Some(Out::Known(
            ty,
            Known::Tensor(from_i64s(self.dtype, &ints, &self.shape)?),
        )))
    }

    fn as_ints(&self) -> Option<Vec<i64>> {
        self.dims.iter().map(Dim::as_const).collect()
    }
}

/// Results of the node when operands with known contents determine them; `None` when the node is to be imported as usual.
pub(super) fn rule<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Option<Outs<'m>>> {
    if !cx.any_symbolic() {
        return Ok(None);
    }
    let found = match cx.node.op_type.as_str() {
        "Cast" => cast(cx)?,
        "Floor" | "Ceil" | "Round" => Content::of(cx, 0)?,
        "Gather" => gather(cx)?,
        "Slice" if cx.opset >= 10 => slice(cx)?,
        "Concat" => concat(cx)?,
        "Squeeze" | "Unsqueeze" | "Reshape" => reshape(cx)?,
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Max" | "Min" => arithmetic(cx)?,
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" => compare(cx)?,
        "Neg" => Content::of(cx, 0)?.map(|mut c| {
            c.dims.iter_mut().for_each(|d| *d = d.scale(-1));
            c
        }),
        "Where" => select(cx)?,
        "Expand" => expand(cx)?,
        "ReduceProd" | "ReduceSum" | "ReduceMax" | "ReduceMin" => reduce(cx)?,
        "Split" => return split(cx),
        _ => None,
    };
    let Some(content) = found else {
        return Ok(None);
    };
    Ok(content.out()?.map(|out| vec![out]))
}

fn cast(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let to = dtype_of(cx.i("to", 0)? as i32)?;
    let Some(mut c) = Content::of(cx, 0)? else {
        return Ok(None);
    };
    if to == DType::Bool {
        let truth = |d: &Dim| match d.as_const() {
            Some(c) => Some(Dim::constant((c != 0).into())),
            None => at_least(d, 1).then(|| Dim::constant(1)),
        };
        let Some(dims) = c.dims.iter().map(truth).collect() else {
            return Ok(None);
        };
        c.dims = dims;
    }
    c.dtype = to;
    Ok(Some(c))
}

fn gather(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let axis = cx.i("axis", 0)?;
    let (Some(data), Some(indices)) = (Content::of(cx, 0)?, Content::of(cx, 1)?) else {
        return Ok(None);
    };
    let Some(at) = indices.as_ints() else {
        return Ok(None);
    };
    if data.shape.len() != 1 || axis_of(axis, 1)? != 0 {
        return Ok(None);
    }
    let pick = |&i: &i64| {
        let n = data.dims.len() as i64;
        let at = usize::try_from(if i < 0 { i + n } else { i }).ok();
        let d = at.and_then(|at| data.dims.get(at)).cloned();
        d.ok_or_else(|| Error::invalid(format!("index {i} is out of range for {n} elements")))
    };
    let dims = at.iter().map(pick).collect::<Result<_>>()?;
    Ok(Some(Content::new(data.dtype, indices.shape, dims)))
}

fn slice(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let Some(data) = Content::of(cx, 0)? else {
        return Ok(None);
    };
    let ints = |c: Option<Content>| c.and_then(|c| c.as_ints());
    let (starts, ends) = (ints(Content::of(cx, 1)?), ints(Content::of(cx, 2)?));
    let step = if cx.has(4) {
        ints(Content::of(cx, 4)?)
    } else {
        Some(vec![1])
    };
    let (Some([start]), Some([end]), Some([step])) =
        (starts.as_deref(), ends.as_deref(), step.as_deref())
    else {
        return Ok(None);
    };
    if data.shape.len() != 1 {
        return Ok(None);
    }
    let n = data.dims.len();
    let (from, size) = slice_range(
        &Dim::constant(*start),
        &Dim::constant(*end),
        *step,
        &n.into(),
    )?;
    let (from, size) = (from.as_const().unwrap_or(0), size.as_usize().unwrap_or(0));
    let dims: Vec<Dim> = (0..size as i64)
        .map(|i| data.dims[(from + i * step) as usize].clone())
        .collect();
    Ok(Some(Content::new(data.dtype, vec![dims.len()], dims)))
}

fn concat(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let (mut dims, mut dtype) = (Vec::new(), DType::I64);
    for i in 0..cx.n_inputs() {
        let Some(c) = Content::of(cx, i)?.filter(|c| c.shape.len() == 1) else {
            return Ok(None);
        };
        dtype = c.dtype;
        dims.extend(c.dims);
    }
    let small = dims.len() <= MAX_TRACKED;
    Ok(small.then(|| Content::new(dtype, vec![dims.len()], dims)))
}

fn reshape(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let Some(mut c) = Content::of(cx, 0)? else {
        return Ok(None);
    };
    let from = Shape::of(&c.shape);
    let axes = if cx.opset < 13 {
        cx.ints("axes")?
    } else {
        None
    };
    let operand = Content::of(cx, 1)?.and_then(|c| c.as_ints());
    if cx.has(1) && operand.is_none() {
        return Ok(None);
    }
    let axes = axes.or(operand);
    let to = match (cx.node.op_type.as_str(), axes) {
        ("Squeeze", axes) => squeezed(&from, axes.as_deref())?,
        ("Unsqueeze", Some(axes)) => unsqueezed(&from, &axes)?,
        ("Reshape", Some(target)) => {
            let target: Vec<Dim> = target.into_iter().map(Dim::constant).collect();
            reshape_target(&from, &target, cx.flag("allowzero", false)?)?
        }
        _ => return Ok(None),
    };
    let Some(shape) = Shape(to).as_static() else {
        return Ok(None);
    };
    if shape.iter().product::<usize>() != c.dims.len() {
        return Ok(None);
    }
    c.shape = shape;
    Ok(Some(c))
}

/// Applies `f` to the broadcast elements of two contents; `None` when a pair has no result or the shapes do not fit.
fn zip(
    a: &Content,
    b: &Content,
    dtype: DType,
    f: impl Fn(&Dim, &Dim) -> Option<Dim>,
) -> Option<Content> {
    let shape = broadcast(&a.shape, &b.shape)?;
    let n: usize = shape.iter().product();
    if n > MAX_TRACKED {
        return None;
    }
    let dims = (0..n).map(|i| {
        f(
            &a.dims[source(i, &shape, &a.shape)],
            &b.dims[source(i, &shape, &b.shape)],
        )
    });
    let dims = dims.collect::<Option<Vec<Dim>>>()?;
    Some(Content::new(dtype, shape, dims))
}

fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let shapes = (Shape::of(a), Shape::of(b));
    Shape(crate::ir::broadcast_shapes(&shapes.0, &shapes.1).ok()?).as_static()
}

/// Position in a tensor of `from` of element `i` of its broadcast to `shape`.
fn source(i: usize, shape: &[usize], from: &[usize]) -> usize {
    let lead = shape.len() - from.len();
    let (mut rest, mut at, mut stride) = (i, 0, 1);
    for axis in (0..shape.len()).rev() {
        let p = rest % shape[axis];
        rest /= shape[axis];
        if axis >= lead {
            if from[axis - lead] != 1 {
                at += p * stride;
            }
            stride *= from[axis - lead];
        }
    }
    at
}

fn arithmetic(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    if cx.n_inputs() != 2 || cx.flag("fmod", false)? {
        return Ok(None);
    }
    let op = cx.node.op_type.as_str();
    let (a, b) = match (Content::of(cx, 0)?, Content::of(cx, 1)?) {
        (Some(a), Some(b)) => (a, b),
        (Some(a), None) => match scaled_by_real(cx, op, a, 1)? {
            Some(c) => return Ok(Some(c)),
            None => return Ok(None),
        },
        (None, Some(b)) if op == "Mul" => return scaled_by_real(cx, op, b, 0),
        _ => return Ok(None),
    };
    let float = a.dtype.is_float();
    Ok(zip(&a, &b, a.dtype, |x, y| match op {
        "Add" => Some(x.clone() + y.clone()),
        "Sub" => Some(x.clone() - y.clone()),
        "Mul" => Some(x.product(y)),
        "Div" if float => x.exact_div(y),
        "Div" => quotient(x, y),
        "Mod" => {
            let c = y.as_const().filter(|c| *c > 0)?;
            Some(x.clone() - x.floor_div(c).scale(c))
        }
        "Max" => larger(x, y),
        _ => larger(x, y).map(|m| x.clone() + y.clone() - m),
    }))
}

/// Symbolic dims times (or divided by) a constant that is a whole number (or its reciprocal), as `f32` scales are.
fn scaled_by_real(
    cx: &mut Ctx<'_, '_>,
    op: &str,
    mut c: Content,
    other: usize,
) -> Result<Option<Content>> {
    let Some(t) = cx
        .constant(other)?
        .filter(|t| t.dtype().is_float() && c.dtype == t.dtype())
    else {
        return Ok(None);
    };
    let factors = t.to_f64s();
    if t.shape() != c.shape && factors.len() != 1 {
        return Ok(None);
    }
    for (i, d) in c.dims.iter_mut().enumerate() {
        let f = factors[if factors.len() == 1 { 0 } else { i }];
        let f = if op == "Div" { 1.0 / f } else { f };
        let whole = |v: f64| v == v.round() && (1.0..1e9).contains(&v);
        let scaled = match op {
            "Mul" | "Div" if whole(f) => Some(d.scale(f as i64)),
            "Mul" | "Div" if whole(1.0 / f) => d.exact_div(&Dim::constant((1.0 / f) as i64)),
            _ => None,
        };
        match scaled {
            Some(s) => *d = s,
            None => return Ok(None),
        }
    }
    Ok(Some(c))
}

/// Integer division, which truncates: equal to floor where neither side is negative.
fn quotient(x: &Dim, y: &Dim) -> Option<Dim> {
    match (x.as_const(), y.as_const()) {
        (Some(a), Some(b)) => a.checked_div(b).map(Dim::constant),
        (None, Some(b)) if b > 0 && at_least(x, 0) => Some(x.floor_div(b)),
        _ => x.exact_div(y),
    }
}

fn larger(x: &Dim, y: &Dim) -> Option<Dim> {
    let difference = x.clone() - y.clone();
    if at_least(&difference, 0) {
        return Some(x.clone());
    }
    at_least(&difference.scale(-1), 0).then(|| y.clone())
}

fn compare(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let (Some(a), Some(b)) = (Content::of(cx, 0)?, Content::of(cx, 1)?) else {
        return Ok(None);
    };
    let op = cx.node.op_type.as_str();
    let truth = |t: bool| Some(Dim::constant(t.into()));
    Ok(zip(&a, &b, DType::Bool, |x, y| {
        let d = x.clone() - y.clone();
        let (over, under) = (at_least(&d, 1), at_least(&d.scale(-1), 1));
        let (not_under, not_over) = (at_least(&d, 0), at_least(&d.scale(-1), 0));
        match op {
            "Equal" if d.is(0) => truth(true),
            "Equal" if over || under => truth(false),
            "Less" | "GreaterOrEqual" if under => truth(op == "Less"),
            "Less" | "GreaterOrEqual" if not_under => truth(op != "Less"),
            "Greater" | "LessOrEqual" if over => truth(op == "Greater"),
            "Greater" | "LessOrEqual" if not_over => truth(op != "Greater"),
            _ => None,
        }
    }))
}

fn select(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let (Some(c), Some(a), Some(b)) = (
        Content::of(cx, 0)?,
        Content::of(cx, 1)?,
        Content::of(cx, 2)?,
    ) else {
        return Ok(None);
    };
    let Some(conditions) = c.as_ints() else {
        return Ok(None);
    };
    let Some(shape) = broadcast(&a.shape, &b.shape).and_then(|s| broadcast(&s, &c.shape)) else {
        return Ok(None);
    };
    let n: usize = shape.iter().product();
    if n > MAX_TRACKED {
        return Ok(None);
    }
    let pick = |i: usize| {
        let from = if conditions[source(i, &shape, &c.shape)] != 0 {
            &a
        } else {
            &b
        };
        from.dims[source(i, &shape, &from.shape)].clone()
    };
    Ok(Some(Content::new(
        a.dtype,
        shape.clone(),
        (0..n).map(pick).collect(),
    )))
}

fn expand(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let (Some(a), Some(target)) = (Content::of(cx, 0)?, Content::of(cx, 1)?) else {
        return Ok(None);
    };
    let Some(target) = Shape(target.dims).as_static() else {
        return Ok(None);
    };
    let Some(shape) = broadcast(&a.shape, &target) else {
        return Ok(None);
    };
    let Some(n) = shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .filter(|n| *n <= MAX_TRACKED)
    else {
        return Ok(None);
    };
    let dims = (0..n)
        .map(|i| a.dims[source(i, &shape, &a.shape)].clone())
        .collect();
    Ok(Some(Content::new(a.dtype, shape, dims)))
}

/// Reductions of a whole vector.
fn reduce(cx: &mut Ctx<'_, '_>) -> Result<Option<Content>> {
    let keepdims = cx.flag("keepdims", true)?;
    if cx.flag("noop_with_empty_axes", false)? {
        return Ok(None);
    }
    cx.ints("axes")?;
    let Some(c) = Content::of(cx, 0)?.filter(|c| c.shape.len() == 1 && !c.dims.is_empty()) else {
        return Ok(None);
    };
    let first = c.dims[0].clone();
    let rest = c.dims[1..].iter();
    let total = match cx.node.op_type.as_str() {
        "ReduceProd" => Some(rest.fold(first, |n, d| n.product(d))),
        "ReduceSum" => Some(rest.fold(first, |n, d| n + d.clone())),
        "ReduceMax" => rest.clone().try_fold(first, |n, d| larger(&n, d)),
        _ => rest
            .clone()
            .try_fold(first, |n, d| larger(&n, d).map(|m| n + d.clone() - m)),
    };
    Ok(total.map(|t| Content::new(c.dtype, if keepdims { vec![1] } else { vec![] }, vec![t])))
}

fn split<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Option<Outs<'m>>> {
    cx.i("axis", 0)?;
    cx.i("num_outputs", 0)?;
    let Some(c) = Content::of(cx, 0)?.filter(|c| c.shape.len() == 1) else {
        return Ok(None);
    };
    let sizes = match cx.opset < 13 {
        true => cx.ints("split")?,
        false => Content::of(cx, 1)?.and_then(|c| c.as_ints()),
    };
    let n = cx.node.output.len();
    let even = || (n > 0 && c.dims.len() % n == 0).then(|| vec![(c.dims.len() / n) as i64; n]);
    let sizes = if cx.has(1) || sizes.is_some() {
        sizes
    } else {
        even()
    };
    let Some(sizes) =
        sizes.filter(|s| s.iter().all(|&p| p >= 0) && s.iter().sum::<i64>() == c.dims.len() as i64)
    else {
        return Ok(None);
    };
    let mut at = 0;
    let mut outs = Vec::new();
    for size in sizes {
        let part = c.dims[at..at + size as usize].to_vec();
        at += size as usize;
        match Content::new(c.dtype, vec![part.len()], part).out()? {
            Some(out) => outs.push(out),
            None => return Ok(None),
        }
    }
    Ok(Some(outs))
}
