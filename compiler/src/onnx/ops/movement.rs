//! Operators that move elements without computing: reshapes, slices, joins, padding.

use super::super::import::{Ctx, Element, OpDef, Out, Outs, axes_of, axis_of, one, product};
use super::MANY;
use super::run_time;
use crate::error::{Error, Result};
use crate::ir::{
    Dim, MAX_DIM_SIZE, Op, PadMode, Ranges, ScalarOp, Shape, ValueId, broadcast_shapes,
};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Reshape", (1, 2), reshape),
    OpDef::new("Flatten", (1, 1), flatten),
    OpDef::new("Squeeze", (1, 2), squeeze),
    OpDef::new("Unsqueeze", (1, 2), unsqueeze),
    OpDef::new("Transpose", (1, 1), transpose),
    OpDef::new("Expand", (2, 2), expand),
    OpDef::new("Tile", (2, 2), tile),
    OpDef::new("Concat", (1, MANY), concat),
    OpDef::new("Split", (1, 2), split),
    OpDef::new("Slice", (1, 5), slice),
    OpDef::new("Pad", (1, 4), pad),
    OpDef::new("CenterCropPad", (2, 2), center_crop_pad),
    OpDef::new("DepthToSpace", (1, 1), depth_to_space),
    OpDef::new("SpaceToDepth", (1, 1), space_to_depth),
    OpDef::new("Trilu", (1, 2), trilu),
];

/// The shape that `Reshape` asks for: 0 copies an extent (unless `allow_zero`), -1 is the remaining
/// factor.
pub(in crate::onnx) fn reshape_target(
    from: &Shape,
    wanted: &[Dim],
    allow_zero: bool,
) -> Result<Vec<Dim>> {
    let target = reshaped_to(from, wanted, allow_zero);
    target.map_err(|why| {
        let to = Shape(wanted.to_vec());
        Error::invalid(format!("cannot reshape {from} to {to}: {why}"))
    })
}

fn reshaped_to(from: &Shape, wanted: &[Dim], allow_zero: bool) -> Result<Vec<Dim>, String> {
    let mut open = None;
    let mut out = Vec::with_capacity(wanted.len());
    for (i, d) in wanted.iter().enumerate() {
        out.push(match d.as_const() {
            Some(0) if !allow_zero => match from.get(i) {
                Some(d) => d.clone(),
                None => return Err("0 copies an axis that is not there".to_owned()),
            },
            Some(-1) if open.is_some() => return Err("-1 is given twice".to_owned()),
            Some(-1) => {
                open = Some(i);
                Dim::constant(1)
            }
            Some(c) if c < 0 => return Err("an extent is negative".to_owned()),
            _ => d.clone(),
        });
    }
    if let Some(i) = open {
        let others = [&out[..i], &out[i + 1..]].concat();
        out[i] = remaining_extent(from, &others)?;
    }
    Ok(out)
}

/// The extent that makes up the elements of `from` together with `others`.
fn remaining_extent(from: &Shape, others: &[Dim]) -> Result<Dim, String> {
    // Extents that appear on both sides are divided out first: this finds quotients of symbolic
    // products.
    let mut left = from.0.clone();
    let mut right = Vec::new();
    for d in others {
        match left.iter().position(|l| l == d && !d.is(0)) {
            Some(at) => drop(left.remove(at)),
            None => right.push(d.clone()),
        }
    }
    let (total, rest) = (product(&left), product(&right));
    // A remainder, if sizes leave one, is found when they are known: the numbers of elements differ then.
    let divisor = rest
        .as_const()
        .filter(|&c| c > 0 && total.as_const().is_none());
    let quotient = total.exact_div(&rest);
    let quotient = quotient.or_else(|| Some(total.floor_div(divisor?)));
    quotient.ok_or_else(|| format!("{total} elements do not divide by {rest}"))
}

fn reshape(cx: &mut Ctx) -> Result<Outs> {
    let allow_zero = cx.flag("allowzero", false)?;
    let shape = cx.ty(1)?;
    if shape.rank() != 1 {
        let message = format!("the shape must be a vector, is {shape}");
        return Err(Error::invalid(message));
    }
    let (from, wanted) = (cx.ty(0)?.shape, cx.elements(1)?);
    let known = run_time::known(&wanted);
    let has_rest = known
        .as_ref()
        .is_some_and(|dims| dims.iter().any(|d| d.is(-1)));
    let known = known.map(|dims| (reshape_target(&from, &dims, allow_zero), dims));
    let target = match known {
        Some((Ok(target), _)) => target,
        // The run decides extents anyway, and divides the numbers of elements then.
        Some((Err(_), dims)) if has_run_time(cx, &from, &dims) => {
            run_time::reshape_target(cx, &from, &wanted, allow_zero)?
        }
        Some((Err(e), _)) => return Err(e),
        None => run_time::reshape_target(cx, &from, &wanted, allow_zero)?,
    };
    if has_rest {
        // Some sizes may leave a remainder.
        cx.assume_equal(&product(&from), &product(&target));
    }
    let x = cx.val(0)?;
    one(cx.reshape(x, target)?)
}

/// True for a reshape of extents that a run decides.
fn has_run_time(cx: &Ctx, from: &Shape, wanted: &[Dim]) -> bool {
    let mut dims = from.iter().chain(wanted);
    cx.is_run_time() && dims.any(|d| cx.is_decided_by_run(d))
}

fn flatten(cx: &mut Ctx) -> Result<Outs> {
    let shape = cx.ty(0)?.shape;
    let axis = cx.i("axis", 1)?;
    let at = if axis == shape.rank() as i64 {
        shape.rank()
    } else {
        axis_of(axis, shape.rank())?
    };
    let x = cx.val(0)?;
    one(cx.reshape(x, [product(&shape[..at]), product(&shape[at..])])?)
}

/// Axes as an attribute before version 13, as operand 1 since.
fn axes(cx: &mut Ctx) -> Result<Option<Vec<i64>>> {
    if cx.opset < 13 {
        cx.ints("axes")
    } else {
        cx.opt_ints_in(1)
    }
}

/// The shape without the given axes, or without all axes of extent 1.
pub(in crate::onnx) fn squeezed(
    shape: &Shape,
    axes: Option<&[i64]>,
    ranges: &Ranges,
) -> Result<Vec<Dim>> {
    let gone = match axes {
        Some(axes) => axes_of(axes, shape.rank())?,
        None => single_axes(shape, ranges)?,
    };
    let is_wide = |a: &&usize| shape[**a].as_const().is_some_and(|c| c != 1);
    if let Some(a) = gone.iter().find(is_wide) {
        let message = format!("axis {a} of {shape} does not have extent 1");
        return Err(Error::invalid(message));
    }
    let rest = (0..shape.rank()).filter(|i| !gone.contains(i));
    Ok(rest.map(|i| shape[i].clone()).collect())
}

/// Axes of extent 1. Errors when sizes decide which these are, and with them the rank.
fn single_axes(shape: &Shape, ranges: &Ranges) -> Result<Vec<usize>> {
    let may_be_single = |d: &Dim| !d.is(1) && !d.is_at_least(2, ranges) && !d.is_at_most(0, ranges);
    if let Some(d) = shape.iter().find(|d| may_be_single(d)) {
        let message = format!("the rank of the result depends on the extent {d} of {shape}");
        return Err(
            Error::unsupported(message).hint("name the axes, or give the dims: --set NAME=N")
        );
    }
    Ok((0..shape.rank()).filter(|&i| shape[i].is(1)).collect())
}

/// The shape with axes of extent 1 at the given places of the result.
pub(in crate::onnx) fn unsqueezed(shape: &Shape, axes: &[i64]) -> Result<Vec<Dim>> {
    let rank = shape.rank().saturating_add(axes.len());
    let mut dims = shape.0.clone();
    for axis in axes_of(axes, rank)? {
        dims.insert(axis, Dim::constant(1));
    }
    Ok(dims)
}

fn squeeze(cx: &mut Ctx) -> Result<Outs> {
    let axes = axes(cx)?;
    let shape = squeezed(&cx.ty(0)?.shape, axes.as_deref(), cx.ranges())?;
    let x = cx.val(0)?;
    one(cx.reshape(x, shape)?)
}

fn unsqueeze(cx: &mut Ctx) -> Result<Outs> {
    let axes = axes(cx)?.ok_or_else(|| Error::invalid("axes are missing"))?;
    let shape = unsqueezed(&cx.ty(0)?.shape, &axes)?;
    let x = cx.val(0)?;
    one(cx.reshape(x, shape)?)
}

fn transpose(cx: &mut Ctx) -> Result<Outs> {
    let rank = cx.ty(0)?.rank();
    let perm = cx
        .usizes("perm")?
        .unwrap_or_else(|| (0..rank).rev().collect());
    let x = cx.val(0)?;
    one(cx.transpose(x, &perm)?)
}

fn expand(cx: &mut Ctx) -> Result<Outs> {
    let wanted = cx.dims(1)?;
    if let Some(d) = wanted.iter().find(|d| d.as_const().is_some_and(|c| c < 0)) {
        return Err(Error::invalid(format!("extent {d} is negative")));
    }
    let x = cx.val(0)?;
    let (x, mut wanted) = agreed(cx, x, wanted)?;
    let x = cx.fitted_to_target(x, &mut wanted)?;
    let from = cx.shape_of(x);
    let shape = broadcast_shapes(&from, &wanted).map_err(Error::invalid)?;
    one(cx.broadcast(x, shape)?)
}

/// An operand and a target of a broadcast. A target that only a run shows stands for the extent of
/// an axis with several elements, or for 1: the run checks that.
fn agreed(cx: &mut Ctx, x: ValueId, mut wanted: Vec<Dim>) -> Result<(ValueId, Vec<Dim>)> {
    let from = cx.shape_of(x);
    let mut checked = from.0.clone();
    let targets = wanted.iter_mut().rev();
    for ((w, d), c) in targets.zip(from.iter().rev()).zip(checked.iter_mut().rev()) {
        if cx.is_decided_by_run(w) && d.as_const().is_some_and(|c| c != 1) {
            let (value, one, extent) = (cx.dim_value(w)?, cx.int(1), cx.dim_value(d)?);
            let extent = cx.replaced(value, one, extent)?;
            *c = cx.extent(extent)?;
            w.clone_from(d);
        }
    }
    let x = cx.shaped(x, checked)?;
    Ok((cx.shaped(x, from.0)?, wanted))
}

fn tile(cx: &mut Ctx) -> Result<Outs> {
    let shape = cx.ty(0)?.shape;
    let repeats = cx.dims(1)?;
    let is_negative = |r: &Dim| r.as_const().is_some_and(|c| c < 0);
    if repeats.len() != shape.rank() || repeats.iter().any(is_negative) {
        let message = format!("repeats {} do not fit {shape}", Shape(repeats));
        return Err(Error::invalid(message));
    }
    let x = cx.val(0)?;
    let (mut ones, mut tiled, mut out) = (Vec::new(), Vec::new(), Vec::new());
    for (d, r) in shape.iter().zip(&repeats) {
        if !r.is(1) {
            ones.push(Dim::constant(1));
            tiled.push(r.clone());
        }
        ones.push(d.clone());
        tiled.push(d.clone());
        out.push(d.product(r));
    }
    let x = cx.reshape(x, ones)?;
    let x = cx.broadcast(x, tiled)?;
    one(cx.reshape(x, out)?)
}

fn concat(cx: &mut Ctx) -> Result<Outs> {
    let axis = match cx.opt_i("axis")? {
        Some(axis) => axis,
        None if cx.opset < 4 => 1,
        None => return Err(Error::invalid("attribute axis is missing")),
    };
    let axis = axis_of(axis, cx.ty(0)?.rank())?;
    if cx.n_inputs() == 1 {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let parts = cx.vals()?;
    one(cx.concat(&parts, axis)?)
}

fn split(cx: &mut Ctx) -> Result<Outs> {
    let shape = cx.ty(0)?.shape;
    let axis = cx.axis(0)?;
    let (sizes, is_given) = part_sizes(cx, &shape[axis])?;
    if sizes.len() < cx.node.output.len() {
        return Err(Error::invalid(format!(
            "{} parts for {} results",
            sizes.len(),
            cx.node.output.len()
        )));
    }
    let mut x = cx.val(0)?;
    if is_given {
        x = made_up_of(cx, x, axis, &sizes)?;
    }
    let parts = parts(cx, x, axis, &sizes)?;
    Ok(parts.into_iter().map(Out::Value).collect())
}

/// The value, of which one axis has as many elements as its parts together. That is checked once
/// sizes are known.
pub(super) fn made_up_of(cx: &mut Ctx, x: ValueId, axis: usize, sizes: &[Dim]) -> Result<ValueId> {
    let shape = cx.shape_of(x);
    let total = sizes.iter().fold(Dim::constant(0), |a, b| a + b.clone());
    let excess = (total.clone() - shape[axis].clone()).as_const();
    let is_negative = |d: &Dim| d.as_const().is_some_and(|c| c < 0);
    if excess.is_some_and(|c| c != 0) || sizes.iter().any(is_negative) {
        let parts = Shape(sizes.to_vec());
        let message = format!("parts {parts} do not make up axis {axis} of {shape}");
        return Err(Error::invalid(message));
    }
    let mut whole = shape.0;
    whole[axis] = total;
    cx.equal_extents(x, whole)
}

/// Parts of an axis, one after the other.
pub(super) fn parts(cx: &mut Ctx, x: ValueId, axis: usize, sizes: &[Dim]) -> Result<Vec<ValueId>> {
    let (mut start, mut parts) = (Dim::constant(0), Vec::new());
    for size in sizes {
        parts.push(cx.slice_axis(x, axis, &start, size)?);
        start = start + size.clone();
    }
    Ok(parts)
}

/// Sizes of the parts, and whether they are given: an attribute before version 13, operand 1 since; equal ones when not given.
fn part_sizes(cx: &mut Ctx, extent: &Dim) -> Result<(Vec<Dim>, bool)> {
    let given = if cx.opset < 13 {
        cx.ints("split")?.map(constants)
    } else if cx.has(1) {
        Some(cx.dims(1)?)
    } else {
        None
    };
    let n = match cx.opt_i("num_outputs")? {
        Some(n) => usize::try_from(n).ok(),
        None => Some(cx.node.output.len()),
    };
    let n = n.filter(|n| (1..=65536).contains(n));
    let n = n.ok_or_else(|| Error::invalid("num_outputs is out of range"))?;
    let is_given = given.is_some();
    let sizes = given.unwrap_or_else(|| even_parts(cx, extent, n));
    Ok((sizes, is_given))
}

fn constants(v: Vec<i64>) -> Vec<Dim> {
    v.into_iter().map(Dim::constant).collect()
}

/// `n` parts of equal size, the last ones smaller if they must be. By the number of results they
/// are equal.
fn even_parts(cx: &Ctx, extent: &Dim, n: usize) -> Vec<Dim> {
    let n = n as i64;
    let part = extent.ceil_div(n);
    if part.scale(n) == *extent {
        return vec![part; n as usize];
    }
    let size = |i: i64| {
        let rest = extent.clone() - part.scale(i);
        rest.clamp_within(&0.into(), &part, cx.ranges())
    };
    (0..n).map(size).collect()
}

/// Errors when a slice cannot take this step.
pub(super) fn check_step(step: i64) -> Result<()> {
    match step {
        0 | i64::MIN => Err(Error::invalid(format!("step {step}"))),
        _ => Ok(()),
    }
}

/// Start and size of one axis of a slice, by the rules of the standard: a negative start that is
/// beyond the first element stands for that, whatever the step.
pub(in crate::onnx) fn slice_range(
    start: &Dim,
    end: &Dim,
    step: i64,
    extent: &Dim,
    ranges: &Ranges,
) -> Result<(Dim, Dim)> {
    check_step(step)?;
    let numbers = [start, end, extent].map(Dim::as_const);
    Ok(match numbers {
        [Some(start), Some(end), Some(n)] => constant_range(start, end, step, n),
        _ => symbolic_range(start, end, step, extent, ranges),
    })
}

/// Start and size along an axis whose extent, or a bound on it, is not constant.
fn symbolic_range(start: &Dim, end: &Dim, step: i64, extent: &Dim, ranges: &Ranges) -> (Dim, Dim) {
    let zero = Dim::constant(0);
    let (low, high) = match step > 0 {
        true => (zero.clone(), extent.clone()),
        false => (Dim::constant(-1), extent.clone() - 1.into()),
    };
    let position = |p, low| {
        let p = from_start(p, extent, ranges).greatest_within(low, ranges);
        p.least_within(&high, ranges)
    };
    let (s, e) = (position(start, &zero), position(end, &low));
    let span = match step > 0 {
        true => e - s.clone(),
        false => s.clone() - e,
    };
    let size = n_steps(&span, step, ranges);
    match size.is(0) {
        true => (zero.clone(), zero),
        // A start of -1 has no elements behind it.
        false => (s.greatest_within(&zero, ranges), size),
    }
}

/// Number of steps in a span, none in a negative one.
fn n_steps(span: &Dim, step: i64, ranges: &Ranges) -> Dim {
    let zero = Dim::constant(0);
    let n = span.greatest_within(&zero, ranges).ceil_div(step.abs());
    n.greatest_within(&zero, ranges)
}

/// A bound of a slice counted from the start of an axis: a negative one counts from the end.
fn from_start(p: &Dim, extent: &Dim, ranges: &Ranges) -> Dim {
    match p.as_const() {
        // Far beyond all extents, and far enough from overflow.
        Some(c) if c >= FAR => return FAR.into(),
        Some(c) if c <= -FAR => return (-FAR).into(),
        _ if p.is_at_least(0, ranges) => return p.clone(),
        _ if p.is_at_most(-1, ranges) => return p.clone() + extent.clone(),
        _ => {}
    }
    let (zero, one) = (Dim::constant(0), Dim::constant(1));
    let is_negative = p.scale(-1).clamp_within(&zero, &one, ranges);
    p.clone() + extent.product(&is_negative)
}

/// Bounds of slices from here on are beyond the ends of all axes.
const FAR: i64 = 2 * MAX_DIM_SIZE as i64;

/// Start and size along an axis of `n` elements.
fn constant_range(start: i64, end: i64, step: i64, n: i64) -> (Dim, Dim) {
    let wrap = |p: i64| i128::from(if p < 0 { p.saturating_add(n) } else { p });
    let (s, e, n) = (wrap(start), wrap(end), i128::from(n));
    let (s, span) = if step > 0 {
        let s = s.clamp(0, n);
        (s, e.clamp(0, n) - s)
    } else {
        let s = s.max(0).min(n - 1);
        (s, s - e.clamp(-1, n - 1))
    };
    let pace = i128::from(step.abs());
    let size = ((span + pace - 1).div_euclid(pace)).max(0) as i64;
    let start = if size == 0 { 0 } else { s as i64 };
    (start.into(), size.into())
}

fn slice(cx: &mut Ctx) -> Result<Outs> {
    let shape = cx.ty(0)?.shape;
    let SliceOperands {
        starts,
        ends,
        axes,
        steps: given,
    } = slice_operands(cx)?;
    axes_of(&axes, shape.rank())?;
    let (mut from, mut sizes) = (vec![Dim::constant(0); shape.rank()], shape.0.clone());
    let mut steps = vec![1; shape.rank()];
    for (i, &axis) in axes.iter().enumerate() {
        let axis = axis_of(axis, shape.rank())?;
        let bounds = [&starts[i], &ends[i]];
        (from[axis], sizes[axis]) = start_and_size(cx, bounds, given[i], &shape[axis])?;
        if !sizes[axis].is(0) && !sizes[axis].is(1) {
            steps[axis] = given[i];
        }
    }
    if sizes == shape.0 && steps.iter().all(|&s| s == 1) {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let x = cx.val(0)?;
    let op = Op::Slice {
        starts: from,
        sizes,
        steps,
    };
    one(cx.add(op, &[x])?)
}

/// Start and size of a slice of one axis between two bounds.
fn start_and_size(
    cx: &mut Ctx,
    bounds: [&Element; 2],
    step: i64,
    extent: &Dim,
) -> Result<(Dim, Dim)> {
    match bounds {
        [Element::Known(a), Element::Known(b)] => slice_range(a, b, step, extent, cx.ranges()),
        [a, b] => run_time::slice_range(cx, a, b, step, extent),
    }
}

/// Operands of a slice, one element per axis that it cuts.
struct SliceOperands {
    starts: Vec<Element>,
    ends: Vec<Element>,
    axes: Vec<i64>,
    steps: Vec<i64>,
}

/// Attributes before version 10, operands since.
fn slice_operands(cx: &mut Ctx) -> Result<SliceOperands> {
    let (starts, ends, axes, steps) = if cx.opset < 10 {
        let (Some(starts), Some(ends)) = (cx.ints("starts")?, cx.ints("ends")?) else {
            return Err(Error::invalid("starts and ends are missing"));
        };
        let known = |v: Vec<i64>| constants(v).into_iter().map(Element::Known).collect();
        (known(starts), known(ends), cx.ints("axes")?, None)
    } else {
        match cx.is_run_time() {
            true => cx.require(&[3, 4])?,
            false => cx.require(&[1, 2, 3, 4])?,
        }
        let (axes, steps) = (cx.opt_ints_in(3)?, cx.opt_ints_in(4)?);
        (cx.elements(1)?, cx.elements(2)?, axes, steps)
    };
    let n = starts.len();
    let axes = axes.unwrap_or_else(|| (0..n as i64).collect());
    let steps = steps.unwrap_or_else(|| vec![1; n]);
    if [ends.len(), axes.len(), steps.len()] != [n; 3] {
        return Err(Error::invalid(
            "starts, ends, axes and steps differ in length",
        ));
    }
    Ok(SliceOperands {
        starts,
        ends,
        axes,
        steps,
    })
}

/// Adds (or, where negative, removes) elements on both sides of each axis.
fn pad_by(
    cx: &mut Ctx,
    x: ValueId,
    low: &[i64],
    high: &[i64],
    mode: PadMode,
    fill: Option<ValueId>,
) -> Result<ValueId> {
    let x = cut_by(cx, x, low, high)?;
    let grow = |p: &[i64]| p.iter().map(|&p| p.max(0) as usize).collect::<Vec<_>>();
    let (low, high) = (grow(low), grow(high));
    if low.iter().chain(&high).all(|&p| p == 0) {
        return Ok(x);
    }
    let mut args = vec![x];
    if mode == PadMode::Constant {
        let dtype = cx.dtype_of(x);
        args.push(match fill {
            Some(v) => cx.reshape(v, Vec::<Dim>::new())?,
            None => cx.scalar(dtype, 0.0),
        });
    }
    cx.add(Op::Pad { low, high, mode }, &args)
}

/// Removes the elements that negative pads name.
fn cut_by(cx: &mut Ctx, x: ValueId, low: &[i64], high: &[i64]) -> Result<ValueId> {
    if low.iter().chain(high).all(|&p| p >= 0) {
        return Ok(x);
    }
    let cut = |p: i64| Dim::from(p.min(0).unsigned_abs() as usize);
    let mut sizes = cx.shape_of(x).0;
    for (d, (&l, &h)) in sizes.iter_mut().zip(low.iter().zip(high)) {
        *d = d.clone() - cut(l) - cut(h);
    }
    let op = Op::Slice {
        starts: low.iter().map(|&p| cut(p)).collect(),
        steps: vec![1; sizes.len()],
        sizes,
    };
    cx.add(op, &[x])
}

fn pad(cx: &mut Ctx) -> Result<Outs> {
    let modes = &[
        ("constant", PadMode::Constant),
        ("reflect", PadMode::Reflect),
        ("edge", PadMode::Edge),
        ("wrap", PadMode::Wrap),
    ];
    let mode = cx.choice("mode", "constant", modes)?;
    let x = cx.val(0)?;
    let rank = cx.shape_of(x).rank();
    if cx.opset >= 11 && cx.constant(1)?.is_none() {
        return run_time_pad(cx, x, mode);
    }
    let (pads, fill) = pads_and_fill(cx, x)?;
    let axes = padded_axes(cx, rank)?;
    let n = axes.len();
    if pads.len() != 2 * n || pads.iter().any(|p| p.unsigned_abs() > i32::MAX as u64) {
        let message = format!("pads {pads:?} do not fit {n} axes");
        return Err(Error::invalid(message));
    }
    let (mut low, mut high) = (vec![0; rank], vec![0; rank]);
    for (i, &a) in axes.iter().enumerate() {
        let a = axis_of(a, rank)?;
        (low[a], high[a]) = (pads[i], pads[i + n]);
    }
    one(pad_by(cx, x, &low, &high, mode, fill)?)
}

/// Axes that pads are for, negative ones counted from the end.
fn padded_axes(cx: &mut Ctx, rank: usize) -> Result<Vec<i64>> {
    let axes = cx.opt_ints_in(3)?;
    Ok(axes.unwrap_or_else(|| (0..rank as i64).collect()))
}

/// Pads that are not known at import.
fn run_time_pad(cx: &mut Ctx, x: ValueId, mode: PadMode) -> Result<Outs> {
    cx.require(&[3])?;
    let (pads, fill) = (cx.elements(1)?, cx.opt(2)?);
    let rank = cx.shape_of(x).rank();
    let axes = padded_axes(cx, rank)?;
    if pads.len() != 2 * axes.len() {
        let (n_pads, n) = (pads.len(), axes.len());
        return Err(Error::invalid(format!("{n_pads} pads do not fit {n} axes")));
    }
    let (low, high) = pads.split_at(axes.len());
    let mut y = x;
    for (&axis, (low, high)) in axes.iter().zip(low.iter().zip(high)) {
        let axis = axis_of(axis, rank)?;
        y = padded(cx, y, axis, [low, high], mode, fill)?;
    }
    one(y)
}

/// Pads of one axis: negative ones cut, then the others add.
fn padded(
    cx: &mut Ctx,
    x: ValueId,
    axis: usize,
    pads: [&Element; 2],
    mode: PadMode,
    fill: Option<ValueId>,
) -> Result<ValueId> {
    let [low, high] = pads;
    let [(cut_low, low), (cut_high, high)] = [
        run_time::cut_and_added(cx, low)?,
        run_time::cut_and_added(cx, high)?,
    ];
    let extent = cx.shape_of(x)[axis].clone();
    let cut = cut_low.clone() + cut_high;
    if mode != PadMode::Constant {
        let x = without(cx, x, axis, &cut_low, &cut)?;
        return match low.is(0) && high.is(0) {
            true => Ok(x),
            false => run_time::continued(cx, x, axis, [&low, &high], mode),
        };
    }
    // A cut of more than there is takes the rest from the elements that are added.
    let taken = cx.least(&cut, &extent);
    let x = without(cx, x, axis, &cx.least(&cut_low, &extent), &taken)?;
    let added = low.clone() + high - (cut - taken);
    let low = cx.least(&low, &added);
    let high = added - low.clone();
    run_time::bordered(cx, x, axis, [&low, &high], fill)
}

/// An axis without `n` elements, of which `low` are its first.
fn without(cx: &mut Ctx, x: ValueId, axis: usize, low: &Dim, n: &Dim) -> Result<ValueId> {
    let size = cx.shape_of(x)[axis].clone() - n.clone();
    match n.is(0) {
        true => Ok(x),
        false => cx.slice_axis(x, axis, low, &size),
    }
}

/// Attributes before version 11, operands since.
fn pads_and_fill(cx: &mut Ctx, x: ValueId) -> Result<(Vec<i64>, Option<ValueId>)> {
    if cx.opset >= 11 {
        cx.require(&[1, 3])?;
        return Ok((cx.ints_in(1)?, cx.opt(2)?));
    }
    let value = cx.f("value", 0.0)?;
    let Some(pads) = cx.ints("pads")? else {
        return Err(Error::invalid("pads are missing"));
    };
    let dtype = cx.dtype_of(x);
    Ok((pads, Some(cx.scalar(dtype, value))))
}

fn center_crop_pad(cx: &mut Ctx) -> Result<Outs> {
    let rank = cx.ty(0)?.rank();
    let axes = cx.ints("axes")?;
    let axes = axes.unwrap_or_else(|| (0..rank as i64).collect());
    let wanted = cx.dims(1)?;
    let (n_axes, n_wanted) = (axes.len(), wanted.len());
    if n_wanted != n_axes {
        let message = format!("{n_wanted} extents for {n_axes} axes");
        return Err(Error::invalid(message));
    }
    let mut x = cx.val(0)?;
    for (&axis, n) in axes.iter().zip(&wanted) {
        x = centred(cx, x, axis_of(axis, rank)?, n)?;
    }
    one(x)
}

/// `n` elements around the middle of an axis, zeros where there are fewer. A crop drops the floor of
/// half on the low side; so does a pad.
fn centred(cx: &mut Ctx, x: ValueId, axis: usize, n: &Dim) -> Result<ValueId> {
    let (zero, n) = (Dim::constant(0), cx.greatest(n, &0.into()));
    let extent = cx.shape_of(x)[axis].clone();
    let size = cx.least(&extent, &n);
    let start = (extent.clone() - size.clone()).floor_div(2);
    let x = match size == extent {
        true => x,
        false => cx.slice_axis(x, axis, &start, &size)?,
    };
    let added = cx.greatest(&(n - extent), &zero);
    let low = added.floor_div(2);
    run_time::bordered(cx, x, axis, [&low, &(added - low.clone())], None)
}

/// `[n, c, h, w]` as dims, and the block size.
fn image_and_block(cx: &mut Ctx) -> Result<([Dim; 4], Dim)> {
    let block = cx.i("blocksize", 0)?;
    let shape = cx.ty(0)?.shape;
    let dims = <[Dim; 4]>::try_from(shape.0)
        .map_err(|d| Error::invalid(format!("expected rank 4, got {}", Shape(d))))?;
    if !(1..=65536).contains(&block) {
        return Err(Error::invalid(format!("blocksize {block}")));
    }
    Ok((dims, Dim::constant(block)))
}

fn exact(d: &Dim, by: &Dim) -> Result<Dim> {
    d.exact_div(by)
        .ok_or_else(|| Error::invalid(format!("extent {d} does not divide by {by}")))
}

fn depth_to_space(cx: &mut Ctx) -> Result<Outs> {
    let ([n, c, h, w], b) = image_and_block(cx)?;
    let depth = exact(&c, &b.product(&b))?;
    let columns_first = cx.choice("mode", "DCR", &[("DCR", false), ("CRD", true)])?;
    let (split, perm) = if columns_first {
        ([&n, &depth, &b, &b, &h, &w], [0, 1, 4, 2, 5, 3])
    } else {
        ([&n, &b, &b, &depth, &h, &w], [0, 3, 4, 1, 5, 2])
    };
    let x = cx.val(0)?;
    let x = cx.reshape(x, split)?;
    let x = cx.transpose(x, &perm)?;
    one(cx.reshape(x, [&n, &depth, &h.product(&b), &w.product(&b)])?)
}

fn space_to_depth(cx: &mut Ctx) -> Result<Outs> {
    let ([n, c, h, w], b) = image_and_block(cx)?;
    let (h, w) = (exact(&h, &b)?, exact(&w, &b)?);
    let x = cx.val(0)?;
    let x = cx.reshape(x, [&n, &c, &h, &b, &w, &b])?;
    let orders = &[("DCR", [0, 3, 5, 1, 2, 4]), ("CRD", [0, 1, 3, 5, 2, 4])];
    let perm = cx.choice("mode", "DCR", orders)?;
    let x = cx.transpose(x, &perm)?;
    one(cx.reshape(x, [n, c.product(&b).product(&b), h, w])?)
}

/// Keeps the triangle on or above (below) diagonal `k` of the last two axes; the rest is 0.
fn trilu(cx: &mut Ctx) -> Result<Outs> {
    let upper = cx.flag("upper", true)?;
    let k = match cx.opt_ints_in(1)? {
        Some(k) => *k.first().ok_or_else(|| Error::invalid("k is empty"))?,
        None => 0,
    };
    let x = cx.val(0)?;
    let ty = cx.type_of(x);
    let r = ty.rank();
    if r < 2 {
        return Err(Error::invalid(format!("expected rank 2 or more, got {ty}")));
    }
    let plane = &ty.shape[r - 2..];
    let (row, column) = (cx.iota(plane, 0)?, cx.iota(plane, 1)?);
    let offset = cx.sub(column, row)?;
    let k = cx.i64s(&[k], &[])?;
    let order = if upper { ScalarOp::Ge } else { ScalarOp::Le };
    let inside = cx.map(order, &[offset, k])?;
    let zero = cx.scalar(ty.dtype, 0.0);
    one(cx.select(inside, x, zero)?)
}
