//! Symbolic contents: arithmetic on shapes, done at import on expressions over symbols.
//!
//! `Shape` gives a small integer vector of dims; exporters then gather, concatenate, multiply and
//! compare such vectors to make operands of `Reshape`, `Expand`, `Slice` and the like. The rules
//! here compute the results as dims, so that none of this becomes a run-time op.

use super::import::{Contents, Ctx, Out, Outs, axis_of};
use super::ops::movement::{reshape_target, slice_range, squeezed, unsqueezed};
use super::tensor::{dtype_of, from_i64s};
use crate::error::{Error, Result};
use crate::ir::{Dim, Ranges, Shape, Type, broadcast_shapes};
use gristmill_runtime::{DType, Tensor};

/// Elements beyond which contents are not tracked.
const MAX_TRACKED: usize = 4096;

/// Contents of a value: row-major elements.
#[derive(Clone, Debug)]
struct Content {
    dtype: DType,
    shape: Vec<usize>,
    dims: Vec<Dim>,
}

/// Reason why a rule gives no contents.
enum Miss {
    /// They are not known, or not tracked: the node is imported as usual.
    Unknown,
    /// The node is wrong.
    Failed(Error),
}

impl From<Error> for Miss {
    fn from(e: Error) -> Miss {
        Miss::Failed(e)
    }
}

type RuleResult<T> = std::result::Result<T, Miss>;

impl Content {
    /// Contents of operand `i`, when they are known and small.
    fn of(cx: &mut Ctx, i: usize) -> RuleResult<Content> {
        if !cx.has(i) {
            return Err(Miss::Unknown);
        }
        let ty = cx.ty(i)?;
        let shape = ty.static_shape().ok_or(Miss::Unknown)?;
        tracked_size(&shape)?;
        if ty.dtype.is_float() && !cx.is_symbolic(i) {
            return Err(Miss::Unknown);
        }
        let dims = cx.try_dims(i)?.ok_or(Miss::Unknown)?;
        Ok(Content::new(ty.dtype, shape, dims))
    }

    /// Contents of operand `i` to be moved: elements that only a run shows are among them.
    fn moved(cx: &mut Ctx, i: usize) -> RuleResult<Content> {
        let ty = cx.ty(i)?;
        let shape = ty.static_shape().ok_or(Miss::Unknown)?;
        let is_joined = cx.node.op_type == "Concat";
        if ty.dtype.is_float() || !(cx.is_symbolic(i) || is_joined) {
            return Content::of(cx, i);
        }
        let dims = cx.tracked(i)?.ok_or(Miss::Unknown)?;
        tracked_size(&shape)?;
        Ok(Content::new(ty.dtype, shape, dims))
    }

    /// Contents of operand `i`, a vector, to be moved.
    fn vector(cx: &mut Ctx, i: usize) -> RuleResult<Content> {
        let c = Content::moved(cx, i)?;
        if c.shape.len() == 1 {
            Ok(c)
        } else {
            Err(Miss::Unknown)
        }
    }

    /// Elements of operand `i` without symbols.
    fn ints(cx: &mut Ctx, i: usize) -> RuleResult<Vec<i64>> {
        Content::of(cx, i)?.as_ints().ok_or(Miss::Unknown)
    }

    /// The elements for each position of a shape, at the position that `source` turns it into.
    fn picked(&self, shape: Vec<usize>, source: impl Fn(&mut [usize])) -> Content {
        let n: usize = shape.iter().product();
        let mut dims = Vec::with_capacity(n);
        for i in 0..n {
            let (mut rest, mut at) = (i, vec![0; shape.len()]);
            for axis in (0..shape.len()).rev() {
                at[axis] = rest % shape[axis];
                rest /= shape[axis];
            }
            source(&mut at);
            let from = at
                .iter()
                .zip(&self.shape)
                .fold(0, |from, (i, n)| from * n + i);
            dims.push(self.dims[from].clone());
        }
        Content::new(self.dtype, shape, dims)
    }

    fn new(dtype: DType, shape: Vec<usize>, dims: Vec<Dim>) -> Content {
        Content { dtype, shape, dims }
    }

    fn of_vector(dtype: DType, dims: Vec<Dim>) -> Content {
        Content::new(dtype, vec![dims.len()], dims)
    }

    /// As a result: a tensor when no symbol is left. Expressions that are too deep to be extents are left to the run.
    fn out(self) -> RuleResult<Out> {
        if self.dims.iter().any(Dim::is_too_deep) {
            return Err(Miss::Unknown);
        }
        let ty = Type {
            dtype: self.dtype,
            shape: Shape::of(&self.shape),
        };
        Ok(match self.as_ints() {
            Some(ints) => Out::Contents(ty, Contents::Tensor(self.tensor(&ints)?)),
            None => Out::Contents(ty, Contents::Dims(self.dims)),
        })
    }

    /// The elements as a tensor, unless one does not fit the dtype.
    fn tensor(&self, ints: &[i64]) -> RuleResult<Tensor> {
        if self.dtype.is_float() {
            let values: Vec<f64> = ints.iter().map(|&i| i as f64).collect();
            let t = Tensor::from_f64s(self.dtype, &self.shape, &values);
            return Ok(t.map_err(Error::from)?);
        }
        if self.dtype != DType::Bool && !ints.iter().all(|&v| fits(self.dtype, v)) {
            return Err(Miss::Unknown);
        }
        Ok(from_i64s(self.dtype, ints, &self.shape)?)
    }

    fn as_ints(&self) -> Option<Vec<i64>> {
        self.dims.iter().map(Dim::as_const).collect()
    }

    /// The element that the broadcast to `shape` has at `i`.
    fn spread(&self, shape: &[usize], i: usize) -> &Dim {
        &self.dims[source(i, shape, &self.shape)]
    }
}

/// True for a number of an integer dtype; the largest `i64` stands for no limit.
fn fits(dtype: DType, v: i64) -> bool {
    let signed = dtype.is_signed_int();
    let bits = 8 * dtype.size_bytes() as u32 - u32::from(signed);
    let lowest = if signed { -(1i128 << bits) } else { 0 };
    (lowest..1i128 << bits).contains(&i128::from(v)) && v != i64::MAX
}

/// Number of elements of a shape, unless that is too many.
fn tracked_size(shape: &[usize]) -> RuleResult<usize> {
    let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    n.filter(|n| *n <= MAX_TRACKED).ok_or(Miss::Unknown)
}

/// Results of the node when operands with known contents determine them; `None` when the node is to
/// be imported as usual.
pub(super) fn rule(cx: &mut Ctx) -> Result<Option<Outs>> {
    if !cx.any_symbolic() && !cx.is_mixed() {
        return Ok(None);
    }
    match results(cx) {
        Ok(outs) => Ok(Some(outs)),
        Err(Miss::Unknown) => Ok(None),
        Err(Miss::Failed(e)) => Err(e),
    }
}

fn results(cx: &mut Ctx) -> RuleResult<Outs> {
    let content = match cx.node.op_type.as_str() {
        "Cast" => cast(cx)?,
        "Floor" | "Ceil" | "Round" => Content::of(cx, 0)?,
        "Gather" => gather(cx)?,
        "Slice" if cx.opset >= 10 => slice(cx)?,
        "Concat" => concat(cx)?,
        "Transpose" => transpose(cx)?,
        "Squeeze" | "Unsqueeze" | "Reshape" => reshape(cx)?,
        "Add" | "Sub" | "Mul" | "Div" | "Mod" => arithmetic(cx)?,
        "Max" | "Min" | "And" | "Or" => extreme(cx)?,
        "Clip" if cx.opset >= 11 => clipped(cx)?,
        "Not" => with_each(cx, |_, d| Dim::constant(1) - d.clone())?,
        "Abs" => with_each(cx, |r, d| d.greatest_within(&d.scale(-1), r))?,
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" => compare(cx)?,
        "Neg" => with_each(cx, |_, d| d.scale(-1))?,
        "Where" => select(cx)?,
        "Expand" => expand(cx)?,
        "ReduceProd" | "ReduceSum" | "ReduceMax" | "ReduceMin" => reduce(cx)?,
        "Split" => return split(cx),
        _ => return Err(Miss::Unknown),
    };
    Ok(vec![content.out()?])
}

fn with_each(cx: &mut Ctx, f: impl Fn(&Ranges, &Dim) -> Dim) -> RuleResult<Content> {
    let mut c = Content::of(cx, 0)?;
    c.dims.iter_mut().for_each(|d| *d = f(cx.ranges(), d));
    Ok(c)
}

fn cast(cx: &mut Ctx) -> RuleResult<Content> {
    let to = dtype_of(cx.i("to", 0)? as i32)?;
    let mut c = match to {
        DType::Bool => Content::of(cx, 0)?,
        _ => Content::moved(cx, 0)?,
    };
    if to == DType::Bool {
        let truths = c
            .dims
            .iter()
            .map(|d| is_positive(cx.ranges(), d) + is_negative(cx.ranges(), d));
        c.dims = truths.collect();
    }
    c.dtype = to;
    Ok(c)
}

/// 1 where a number is positive, else 0.
fn is_positive(ranges: &Ranges, d: &Dim) -> Dim {
    d.clamp_within(&0.into(), &1.into(), ranges)
}

/// 1 where a number is negative, else 0.
fn is_negative(ranges: &Ranges, d: &Dim) -> Dim {
    is_positive(ranges, &d.scale(-1))
}

fn gather(cx: &mut Ctx) -> RuleResult<Content> {
    let axis = cx.i("axis", 0)?;
    let data = Content::vector(cx, 0)?;
    let indices = Content::of(cx, 1)?;
    let at = indices.as_ints().ok_or(Miss::Unknown)?;
    axis_of(axis, 1)?;
    let mut dims = Vec::new();
    for i in at {
        dims.push(element(&data.dims, i)?.clone());
    }
    Ok(Content::new(data.dtype, indices.shape, dims))
}

/// Element `i`, counted from the end where negative.
fn element(dims: &[Dim], i: i64) -> Result<&Dim> {
    let n = dims.len() as i64;
    let at = usize::try_from(if i < 0 { i + n } else { i }).ok();
    let d = at.and_then(|at| dims.get(at));
    d.ok_or_else(|| Error::invalid(format!("index {i} is out of range for {n} elements")))
}

fn slice(cx: &mut Ctx) -> RuleResult<Content> {
    let data = Content::moved(cx, 0)?;
    let start = single(Content::ints(cx, 1)?)?;
    let end = single(Content::ints(cx, 2)?)?;
    let axis = optional(cx, 3, 0)?;
    let step = optional(cx, 4, 1)?;
    let axis = axis_of(axis, data.shape.len())?;
    let n = data.shape[axis] as i64;
    let (from, size) = slice_range(&start.into(), &end.into(), step, &n.into(), cx.ranges())?;
    let (from, size) = (from.as_const().unwrap_or(0), size.as_const().unwrap_or(0));
    let mut shape = data.shape.clone();
    shape[axis] = size as usize;
    Ok(data.picked(shape, |at| {
        at[axis] = (from + at[axis] as i64 * step) as usize
    }))
}

/// The only element of operand `i`.
fn optional(cx: &mut Ctx, i: usize, default: i64) -> RuleResult<i64> {
    match cx.has(i) {
        true => single(Content::ints(cx, i)?),
        false => Ok(default),
    }
}

fn transpose(cx: &mut Ctx) -> RuleResult<Content> {
    let data = Content::moved(cx, 0)?;
    let rank = data.shape.len();
    let perm = cx.usizes("perm")?;
    let perm = perm.unwrap_or_else(|| (0..rank).rev().collect());
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..rank) {
        return Err(Miss::Unknown);
    }
    let shape = perm.iter().map(|&p| data.shape[p]).collect();
    Ok(data.picked(shape, |at| {
        let moved = at.to_vec();
        perm.iter().zip(moved).for_each(|(&p, i)| at[p] = i);
    }))
}

fn single(ints: Vec<i64>) -> RuleResult<i64> {
    match ints[..] {
        [only] => Ok(only),
        _ => Err(Miss::Unknown),
    }
}

fn concat(cx: &mut Ctx) -> RuleResult<Content> {
    let (mut dims, mut dtype) = (Vec::new(), DType::I64);
    for i in 0..cx.n_inputs() {
        let c = Content::vector(cx, i)?;
        dtype = c.dtype;
        dims.extend(c.dims);
    }
    tracked_size(&[dims.len()])?;
    Ok(Content::of_vector(dtype, dims))
}

fn reshape(cx: &mut Ctx) -> RuleResult<Content> {
    let mut c = Content::moved(cx, 0)?;
    let to = reshaped_to(cx, &Shape::of(&c.shape))?;
    let shape = Shape(to).as_static().ok_or(Miss::Unknown)?;
    if shape.iter().product::<usize>() != c.dims.len() {
        return Err(Miss::Unknown);
    }
    c.shape = shape;
    Ok(c)
}

fn reshaped_to(cx: &mut Ctx, from: &Shape) -> RuleResult<Vec<Dim>> {
    let mut axes = None;
    if cx.opset < 13 {
        axes = cx.ints("axes")?;
    }
    if cx.has(1) {
        let operand = Content::ints(cx, 1)?;
        axes.get_or_insert(operand);
    }
    Ok(match (cx.node.op_type.as_str(), axes) {
        ("Squeeze", axes) => squeezed(from, axes.as_deref(), cx.ranges())?,
        ("Unsqueeze", Some(axes)) => unsqueezed(from, &axes)?,
        ("Reshape", Some(target)) => {
            let target: Vec<Dim> = target.into_iter().map(Dim::constant).collect();
            reshape_target(from, &target, cx.flag("allowzero", false)?)?
        }
        _ => return Err(Miss::Unknown),
    })
}

/// Applies `f` to the broadcast elements of two contents; no contents when a pair has no result or
/// the shapes do not fit.
fn zip(
    a: &Content,
    b: &Content,
    dtype: DType,
    f: impl Fn(&Dim, &Dim) -> Option<Dim>,
) -> RuleResult<Content> {
    let shape = broadcast(&a.shape, &b.shape)?;
    let n = tracked_size(&shape)?;
    let pairs = (0..n).map(|i| f(a.spread(&shape, i), b.spread(&shape, i)));
    let dims = pairs.collect::<Option<Vec<Dim>>>().ok_or(Miss::Unknown)?;
    Ok(Content::new(dtype, shape, dims))
}

fn broadcast(a: &[usize], b: &[usize]) -> RuleResult<Vec<usize>> {
    let shape = broadcast_shapes(&Shape::of(a), &Shape::of(b)).ok();
    shape
        .and_then(|dims| Shape(dims).as_static())
        .ok_or(Miss::Unknown)
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

fn arithmetic(cx: &mut Ctx) -> RuleResult<Content> {
    if cx.n_inputs() != 2 || cx.flag("fmod", false)? {
        return Err(Miss::Unknown);
    }
    let op = cx.node.op_type.as_str();
    let (a, b) = (Content::of(cx, 0), Content::of(cx, 1));
    match (a, b) {
        (Ok(a), Ok(b)) => {
            let ranges = cx.ranges();
            zip(&a, &b, a.dtype, |x, y| operation(op, a.dtype, x, y, ranges))
        }
        (Ok(a), Err(Miss::Unknown)) => scaled_by_real(cx, op, a, 1),
        (Err(Miss::Unknown), Ok(b)) if op == "Mul" => scaled_by_real(cx, op, b, 0),
        (Err(e), _) | (_, Err(e)) => Err(e),
    }
}

/// One element of an arithmetic operator.
fn operation(op: &str, dtype: DType, x: &Dim, y: &Dim, ranges: &Ranges) -> Option<Dim> {
    match op {
        "Add" => Some(x.clone() + y.clone()),
        "Sub" => Some(x.clone() - y.clone()),
        "Mul" => Some(x.product(y)),
        "Div" if dtype.is_float() => x.exact_div(y),
        "Div" => quotient(x, y, ranges),
        _ => remainder(x, y),
    }
}

/// Symbolic dims times (or divided by) a constant that is a whole number (or its reciprocal), as
/// `f32` scales are.
fn scaled_by_real(cx: &mut Ctx, op: &str, mut c: Content, other: usize) -> RuleResult<Content> {
    let t = cx.constant(other)?.ok_or(Miss::Unknown)?;
    if !t.dtype().is_float() || c.dtype != t.dtype() {
        return Err(Miss::Unknown);
    }
    let mut factors = t.to_f64s();
    if factors.len() == 1 {
        factors = vec![factors[0]; c.dims.len()];
    } else if t.shape() != c.shape {
        return Err(Miss::Unknown);
    }
    for (d, f) in c.dims.iter_mut().zip(factors) {
        *d = match op {
            "Mul" => scaled(d, f),
            "Div" => scaled(d, 1.0 / f),
            _ => None,
        }
        .ok_or(Miss::Unknown)?;
    }
    Ok(c)
}

/// `d * f` for a whole `f`, or the reciprocal of one.
fn scaled(d: &Dim, f: f64) -> Option<Dim> {
    let whole = |v: f64| (v == v.round() && (1.0..1e9).contains(&v)).then_some(v as i64);
    match whole(f) {
        Some(factor) => Some(d.scale(factor)),
        None => d.exact_div(&whole(1.0 / f)?.into()),
    }
}

/// Integer division, which truncates: the quotient of the magnitudes, with the sign of the whole.
fn quotient(x: &Dim, y: &Dim, ranges: &Ranges) -> Option<Dim> {
    let divisor = match (x.as_const(), y.as_const()) {
        (Some(a), Some(b)) => return a.checked_div(b).map(Dim::constant),
        (None, Some(b)) => b.checked_abs().filter(|b| *b > 0)?,
        _ => return x.exact_div(y),
    };
    let zero = Dim::constant(0);
    let over = x.greatest_within(&zero, ranges).floor_div(divisor);
    let under = x
        .scale(-1)
        .greatest_within(&zero, ranges)
        .floor_div(divisor);
    Some((over - under).scale(y.as_const()?.signum()))
}

/// The remainder with the sign of the divisor.
fn remainder(x: &Dim, y: &Dim) -> Option<Dim> {
    let c = y.as_const()?;
    let divisor = c.checked_abs().filter(|c| *c > 0)?;
    let x = x.scale(c.signum());
    Some((x.clone() - x.floor_div(divisor).scale(divisor)).scale(c.signum()))
}

/// The least or the greatest of all operands; so are the and, and the or.
fn extreme(cx: &mut Ctx) -> RuleResult<Content> {
    let is_greatest = matches!(cx.node.op_type.as_str(), "Max" | "Or");
    let first = Content::of(cx, 0)?;
    (1..cx.n_inputs()).try_fold(first, |c, i| with_extreme(cx, &c, i, is_greatest))
}

fn clipped(cx: &mut Ctx) -> RuleResult<Content> {
    let mut c = Content::of(cx, 0)?;
    for (i, is_low) in [(1, true), (2, false)] {
        if cx.has(i) {
            c = with_extreme(cx, &c, i, is_low)?;
        }
    }
    Ok(c)
}

/// The least or the greatest of contents and operand `i`.
fn with_extreme(cx: &mut Ctx, c: &Content, i: usize, is_greatest: bool) -> RuleResult<Content> {
    let (other, ranges) = (Content::of(cx, i)?, cx.ranges());
    zip(c, &other, c.dtype, |x, y| {
        Some(extreme_of(x, y, is_greatest, ranges))
    })
}

fn extreme_of(x: &Dim, y: &Dim, is_greatest: bool, ranges: &Ranges) -> Dim {
    match is_greatest {
        true => x.greatest_within(y, ranges),
        false => x.least_within(y, ranges),
    }
}

fn compare(cx: &mut Ctx) -> RuleResult<Content> {
    let (a, b) = (Content::of(cx, 0)?, Content::of(cx, 1)?);
    let (op, ranges) = (cx.node.op_type.as_str(), cx.ranges());
    zip(&a, &b, DType::Bool, |x, y| {
        let d = x.clone() - y.clone();
        let (over, under) = (is_positive(ranges, &d), is_negative(ranges, &d));
        Some(match op {
            "Greater" => over,
            "Less" => under,
            "LessOrEqual" => Dim::constant(1) - over,
            "GreaterOrEqual" => Dim::constant(1) - under,
            _ => Dim::constant(1) - over - under,
        })
    })
}

fn select(cx: &mut Ctx) -> RuleResult<Content> {
    let (c, a, b) = (
        Content::of(cx, 0)?,
        Content::of(cx, 1)?,
        Content::of(cx, 2)?,
    );
    let shape = broadcast(&broadcast(&a.shape, &b.shape)?, &c.shape)?;
    let pick = |i: usize| {
        let (a, b) = (a.spread(&shape, i), b.spread(&shape, i));
        match c.spread(&shape, i) {
            c if c.is(0) => b.clone(),
            c if c.is(1) => a.clone(),
            c => b.clone() + c.product(&(a.clone() - b.clone())),
        }
    };
    let dims = (0..tracked_size(&shape)?).map(pick).collect();
    Ok(Content::new(a.dtype, shape, dims))
}

fn expand(cx: &mut Ctx) -> RuleResult<Content> {
    let (a, target) = (Content::of(cx, 0)?, Content::of(cx, 1)?);
    let target = Shape(target.dims).as_static().ok_or(Miss::Unknown)?;
    let shape = broadcast(&a.shape, &target)?;
    let n = tracked_size(&shape)?;
    let dims = (0..n).map(|i| a.spread(&shape, i).clone()).collect();
    Ok(Content::new(a.dtype, shape, dims))
}

/// Reductions of a whole vector.
fn reduce(cx: &mut Ctx) -> RuleResult<Content> {
    let keepdims = cx.flag("keepdims", true)?;
    if cx.flag("noop_with_empty_axes", false)? {
        return Err(Miss::Unknown);
    }
    cx.ints("axes")?;
    let c = Content::of(cx, 0)?;
    if c.shape.len() != 1 {
        return Err(Miss::Unknown);
    }
    let (first, rest) = c.dims.split_first().ok_or(Miss::Unknown)?;
    let (op, ranges) = (cx.node.op_type.as_str(), cx.ranges());
    let step = |n: Dim, d: &Dim| match op {
        "ReduceProd" => n.product(d),
        "ReduceSum" => n + d.clone(),
        _ => extreme_of(&n, d, op == "ReduceMax", ranges),
    };
    let total = rest.iter().fold(first.clone(), step);
    let shape = if keepdims { vec![1] } else { vec![] };
    Ok(Content::new(c.dtype, shape, vec![total]))
}

fn split(cx: &mut Ctx) -> RuleResult<Outs> {
    cx.i("axis", 0)?;
    cx.i("num_outputs", 0)?;
    let c = Content::vector(cx, 0)?;
    let sizes = part_sizes(cx, c.dims.len())?;
    let total: i64 = sizes.iter().sum();
    if sizes.iter().any(|&p| p < 0) || total != c.dims.len() as i64 {
        return Err(Miss::Unknown);
    }
    let mut rest = c.dims;
    let mut outs = Vec::new();
    for size in sizes {
        let after = rest.split_off(size as usize);
        outs.push(Content::of_vector(c.dtype, rest).out()?);
        rest = after;
    }
    Ok(outs)
}

/// Sizes of the parts of `n` elements: as given, or equal.
fn part_sizes(cx: &mut Ctx, n: usize) -> RuleResult<Vec<i64>> {
    if cx.opset < 13 {
        if let Some(sizes) = cx.ints("split")? {
            return Ok(sizes);
        }
    } else if cx.has(1) {
        return Content::ints(cx, 1);
    }
    let n_parts = cx.node.output.len();
    if n_parts == 0 || !n.is_multiple_of(n_parts) {
        return Err(Miss::Unknown);
    }
    Ok(vec![(n / n_parts) as i64; n_parts])
}
