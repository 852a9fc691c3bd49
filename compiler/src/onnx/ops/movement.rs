//! Operators that move elements without computing: reshapes, slices, joins, padding.

use super::super::import::{Ctx, OpDef, Out, Outs, axes_of, axis_of, one};
use super::MANY;
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, PadMode, ScalarOp, Shape, ValueId, broadcast_shapes};
use gristmill_runtime::DType;

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

/// The shape that `Reshape` asks for: 0 copies an extent (unless `allow_zero`), -1 is what is left.
pub(in crate::onnx) fn reshape_target(
    from: &Shape,
    wanted: &[Dim],
    allow_zero: bool,
) -> Result<Vec<Dim>> {
    let bad = |why: &str| {
        Error::invalid(format!(
            "cannot reshape {from} to {}: {why}",
            Shape(wanted.to_vec())
        ))
    };
    let mut open = None;
    let mut out = Vec::with_capacity(wanted.len());
    for (i, d) in wanted.iter().enumerate() {
        out.push(match d.as_const() {
            Some(0) if !allow_zero => from
                .get(i)
                .cloned()
                .ok_or_else(|| bad("0 copies an axis that is not there"))?,
            Some(-1) if open.is_some() => return Err(bad("-1 is given twice")),
            Some(-1) => {
                open = Some(i);
                Dim::constant(1)
            }
            Some(c) if c < 0 => return Err(bad("an extent is negative")),
            _ => d.clone(),
        });
    }
    if let Some(i) = open {
        // Extents that appear on both sides are divided out first: this finds quotients of symbolic products.
        let mut left: Vec<&Dim> = from.iter().collect();
        let mut right = Vec::new();
        for d in out
            .iter()
            .enumerate()
            .filter(|(j, _)| *j != i)
            .map(|(_, d)| d)
        {
            match left.iter().position(|l| *l == d && !d.is(0)) {
                Some(at) => drop(left.remove(at)),
                None => right.push(d),
            }
        }
        let product = |dims: &[&Dim]| dims.iter().fold(Dim::constant(1), |n, d| n.product(d));
        let (total, rest) = (product(&left), product(&right));
        out[i] = total
            .exact_div(&rest)
            .ok_or_else(|| bad(&format!("{total} elements do not divide by {rest}")))?;
    }
    Ok(out)
}

fn reshape<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let allow_zero = cx.flag("allowzero", false)?;
    let shape = cx.ty(1)?;
    if shape.rank() != 1 {
        return Err(Error::invalid(format!(
            "the shape must be a vector, is {shape}"
        )));
    }
    let wanted = cx.dims(1)?;
    let target = reshape_target(&cx.ty(0)?.shape, &wanted, allow_zero)?;
    let x = cx.val(0)?;
    one(cx.b().reshape(x, target)?)
}

fn product(dims: &[Dim]) -> Dim {
    dims.iter().fold(Dim::constant(1), |n, d| n.product(d))
}

fn flatten<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let shape = cx.ty(0)?.shape;
    let axis = cx.i("axis", 1)?;
    let at = if axis == shape.rank() as i64 {
        shape.rank()
    } else {
        axis_of(axis, shape.rank())?
    };
    let x = cx.val(0)?;
    one(cx
        .b()
        .reshape(x, [product(&shape[..at]), product(&shape[at..])])?)
}

/// Axes as an attribute before version 13, as operand 1 since.
fn axes(cx: &mut Ctx<'_, '_>) -> Result<Option<Vec<i64>>> {
    if cx.opset < 13 {
        cx.ints("axes")
    } else {
        cx.opt_ints_in(1)
    }
}

/// The shape without the given axes, or without all axes of extent 1.
pub(in crate::onnx) fn squeezed(shape: &Shape, axes: Option<&[i64]>) -> Result<Vec<Dim>> {
    let gone = match axes {
        Some(axes) => axes_of(axes, shape.rank())?,
        None => (0..shape.rank()).filter(|&i| shape[i].is(1)).collect(),
    };
    if let Some(&a) = gone
        .iter()
        .find(|&&a| shape[a].as_const().is_some_and(|c| c != 1))
    {
        return Err(Error::invalid(format!(
            "axis {a} of {shape} does not have extent 1"
        )));
    }
    Ok(shape
        .iter()
        .enumerate()
        .filter(|(i, _)| !gone.contains(i))
        .map(|(_, d)| d.clone())
        .collect())
}

/// The shape with axes of extent 1 at the given places of the result.
pub(in crate::onnx) fn unsqueezed(shape: &Shape, axes: &[i64]) -> Result<Vec<Dim>> {
    let rank = shape.rank().saturating_add(axes.len());
    let new = axes_of(axes, rank)?;
    let mut old = shape.iter().cloned();
    Ok((0..rank)
        .map(|i| {
            if new.contains(&i) {
                Dim::constant(1)
            } else {
                old.next().expect("counted")
            }
        })
        .collect())
}

fn squeeze<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let axes = axes(cx)?;
    let shape = squeezed(&cx.ty(0)?.shape, axes.as_deref())?;
    let x = cx.val(0)?;
    one(cx.b().reshape(x, shape)?)
}

fn unsqueeze<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let axes = axes(cx)?.ok_or_else(|| Error::invalid("axes are missing"))?;
    let shape = unsqueezed(&cx.ty(0)?.shape, &axes)?;
    let x = cx.val(0)?;
    one(cx.b().reshape(x, shape)?)
}

fn transpose<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let rank = cx.ty(0)?.rank();
    let perm = cx
        .usizes("perm")?
        .unwrap_or_else(|| (0..rank).rev().collect());
    let x = cx.val(0)?;
    one(cx.b().transpose(x, &perm)?)
}

fn expand<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let wanted = cx.dims(1)?;
    if let Some(d) = wanted.iter().find(|d| d.as_const().is_some_and(|c| c < 0)) {
        return Err(Error::invalid(format!("extent {d} is negative")));
    }
    let shape = broadcast_shapes(&cx.ty(0)?.shape, &wanted).map_err(Error::invalid)?;
    let x = cx.val(0)?;
    one(cx.b().broadcast(x, shape)?)
}

fn tile<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let shape = cx.ty(0)?.shape;
    let repeats = cx.dims(1)?;
    if repeats.len() != shape.rank() || repeats.iter().any(|r| r.as_const().is_some_and(|c| c < 0))
    {
        return Err(Error::invalid(format!(
            "repeats {} do not fit {shape}",
            Shape(repeats)
        )));
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
    let x = cx.b().reshape(x, ones)?;
    let x = cx.b().broadcast(x, tiled)?;
    one(cx.b().reshape(x, out)?)
}

fn concat<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
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
    one(cx.b().concat(&parts, axis)?)
}

fn split<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let shape = cx.ty(0)?.shape;
    let axis = axis_of(cx.i("axis", 0)?, shape.rank())?;
    let given = if cx.opset < 13 {
        cx.ints("split")?
            .map(|s| s.into_iter().map(Dim::constant).collect())
    } else if cx.has(1) {
        Some(cx.dims(1)?)
    } else {
        None
    };
    let wanted = cx
        .opt_i("num_outputs")?
        .map_or(Ok(cx.node.output.len()), usize::try_from);
    let n = wanted
        .ok()
        .filter(|n| (1..=65536).contains(n))
        .ok_or_else(|| Error::invalid("num_outputs is out of range"))?;
    let sizes: Vec<Dim> = match given {
        Some(sizes) => sizes,
        None => even_parts(&shape[axis], n)?,
    };
    let total = sizes.iter().fold(Dim::constant(0), |a, b| a + b.clone());
    if (total.clone() - shape[axis].clone())
        .as_const()
        .is_some_and(|c| c != 0)
        || sizes.len() < cx.node.output.len()
    {
        return Err(Error::invalid(format!(
            "parts {} do not make up axis {axis} of {shape}",
            Shape(sizes)
        )));
    }
    let x = cx.val(0)?;
    let mut start = Dim::constant(0);
    let mut outs = Vec::new();
    for size in sizes {
        outs.push(Out::Value(cx.b().slice_axis(
            x,
            axis,
            start.clone(),
            size.clone(),
        )?));
        start = start + size;
    }
    Ok(outs)
}

/// `n` parts of equal size, the last one smaller if it must be.
fn even_parts(extent: &Dim, n: usize) -> Result<Vec<Dim>> {
    let Some(total) = extent.as_const() else {
        let part = extent.exact_div(&n.into());
        let part = part.ok_or_else(|| {
            Error::unsupported(format!("{extent} is not known to divide into {n} parts"))
        })?;
        return Ok(vec![part; n]);
    };
    let part = (total + n as i64 - 1) / n as i64;
    Ok((0..n as i64)
        .map(|i| Dim::constant((total - i * part).clamp(0, part)))
        .collect())
}

/// Start and size of one axis of a slice, by NumPy's rules. Where extents contain symbols, bounds are taken to lie
/// inside the tensor: the type rule checks that once the symbols are bound.
pub(in crate::onnx) fn slice_range(
    start: &Dim,
    end: &Dim,
    step: i64,
    extent: &Dim,
) -> Result<(Dim, Dim)> {
    if step == 0 || step == i64::MIN {
        return Err(Error::invalid(format!("step {step}")));
    }
    if let (Some(s), Some(e), Some(n)) = (start.as_const(), end.as_const(), extent.as_const()) {
        let wrap = |p: i64| if p < 0 { p.saturating_add(n) } else { p };
        let (s, e, n) = (i128::from(wrap(s)), i128::from(wrap(e)), i128::from(n));
        let (s, span) = if step > 0 {
            let s = s.clamp(0, n);
            (s, e.clamp(0, n) - s)
        } else {
            let s = s.clamp(-1, n - 1);
            (s, s - e.clamp(-1, n - 1))
        };
        let pace = i128::from(step.abs());
        let size = ((span + pace - 1).div_euclid(pace)).max(0) as i64;
        return Ok((
            Dim::constant(if size == 0 { 0 } else { s as i64 }),
            Dim::constant(size),
        ));
    }
    const FAR: i64 = i32::MAX as i64;
    let position = |p: &Dim, is_end: bool| match p.as_const() {
        Some(c) if c >= FAR => {
            if step < 0 && !is_end {
                extent.clone() - 1.into()
            } else {
                extent.clone()
            }
        }
        Some(c) if c <= -FAR => Dim::constant(if step < 0 { -1 } else { 0 }),
        Some(c) if c < 0 => extent.clone() + c.into(),
        None if never_positive(p) => extent.clone() + p.clone(),
        _ => p.clone(),
    };
    let (s, e) = (position(start, false), position(end, true));
    let span = if step > 0 {
        e - s.clone()
    } else {
        s.clone() - e
    };
    let size = span.ceil_div(step.abs());
    if size.as_const().is_some_and(|c| c <= 0) {
        return Ok((Dim::constant(0), Dim::constant(0)));
    }
    Ok((s, size))
}

/// True when the dim is negative or zero for all values of its symbols.
fn never_positive(d: &Dim) -> bool {
    super::super::shape_value::at_least(&d.scale(-1), 0)
}

fn slice<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let shape = cx.ty(0)?.shape;
    let constants = |v: Vec<i64>| v.into_iter().map(Dim::constant).collect::<Vec<_>>();
    let (starts, ends, axes, steps) = if cx.opset < 10 {
        let need =
            |v: Option<Vec<i64>>| v.ok_or_else(|| Error::invalid("starts and ends are missing"));
        (
            constants(need(cx.ints("starts")?)?),
            constants(need(cx.ints("ends")?)?),
            cx.ints("axes")?,
            None,
        )
    } else {
        cx.require(&[1, 2, 3, 4])?;
        (
            cx.dims(1)?,
            cx.dims(2)?,
            cx.opt_ints_in(3)?,
            cx.opt_ints_in(4)?,
        )
    };
    let axes = axes.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let given = steps.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axes.len(), given.len()] != [starts.len(); 3] {
        return Err(Error::invalid(
            "starts, ends, axes and steps differ in length",
        ));
    }
    axes_of(&axes, shape.rank())?;
    let (mut from, mut sizes) = (vec![Dim::constant(0); shape.rank()], shape.0.clone());
    let mut steps = vec![1; shape.rank()];
    for (i, &axis) in axes.iter().enumerate() {
        let axis = axis_of(axis, shape.rank())?;
        (from[axis], sizes[axis]) = slice_range(&starts[i], &ends[i], given[i], &shape[axis])?;
        steps[axis] = if sizes[axis].is(0) || sizes[axis].is(1) {
            1
        } else {
            given[i]
        };
    }
    if sizes == shape.0 && steps.iter().all(|&s| s == 1) {
        return Ok(vec![Out::Same(cx.v(0)?)]);
    }
    let x = cx.val(0)?;
    one(cx.add(
        Op::Slice {
            starts: from,
            sizes,
            steps,
        },
        &[x],
    )?)
}

/// Adds (or, where negative, removes) elements on both sides of each axis.
fn pad_by(
    cx: &mut Ctx<'_, '_>,
    x: ValueId,
    low: &[i64],
    high: &[i64],
    mode: PadMode,
    fill: Option<ValueId>,
) -> Result<ValueId> {
    let shape = cx.shape_of(x);
    let mut x = x;
    if low.iter().chain(high).any(|&p| p < 0) {
        let cut = |p: i64| p.min(0).unsigned_abs() as usize;
        let starts: Vec<Dim> = low.iter().map(|&p| cut(p).into()).collect();
        let sizes = shape
            .iter()
            .zip(low.iter().zip(high))
            .map(|(d, (&l, &h))| d.clone() - cut(l).into() - cut(h).into());
        x = cx.add(
            Op::Slice {
                starts,
                sizes: sizes.collect(),
                steps: vec![1; shape.rank()],
            },
            &[x],
        )?;
    }
    let grow = |p: &[i64]| p.iter().map(|&p| p.max(0) as usize).collect::<Vec<_>>();
    let (low, high) = (grow(low), grow(high));
    if low.iter().chain(&high).all(|&p| p == 0) {
        return Ok(x);
    }
    let mut args = vec![x];
    if mode == PadMode::Constant {
        let dtype = cx.dtype_of(x);
        args.push(match fill {
            Some(v) => cx.b().reshape(v, Vec::<Dim>::new())?,
            None => cx.b().scalar(dtype, 0.0),
        });
    }
    cx.add(Op::Pad { low, high, mode }, &args)
}

fn pad<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let modes = &[
        ("constant", PadMode::Constant),
        ("reflect", PadMode::Reflect),
        ("edge", PadMode::Edge),
        ("wrap", PadMode::Wrap),
    ];
    let mode = cx.choice("mode", "constant", modes)?;
    let x = cx.val(0)?;
    let (dtype, rank) = (cx.dtype_of(x), cx.shape_of(x).rank());
    let (pads, fill) = if cx.opset < 11 {
        let value = cx.f("value", 0.0)?;
        (
            cx.ints("pads")?
                .ok_or_else(|| Error::invalid("pads are missing"))?,
            Some(cx.b().scalar(dtype, value)),
        )
    } else {
        cx.require(&[1, 3])?;
        (cx.ints_in(1)?, cx.opt(2)?)
    };
    let axes = match cx.opt_ints_in(3)? {
        Some(axes) => axes
            .iter()
            .map(|&a| axis_of(a, rank))
            .collect::<Result<Vec<_>>>()?,
        None => (0..rank).collect(),
    };
    if pads.len() != 2 * axes.len() || pads.iter().any(|p| p.unsigned_abs() > i32::MAX as u64) {
        return Err(Error::invalid(format!(
            "pads {pads:?} do not fit {} axes",
            axes.len()
        )));
    }
    let (mut low, mut high) = (vec![0; rank], vec![0; rank]);
    for (i, &a) in axes.iter().enumerate() {
        (low[a], high[a]) = (pads[i], pads[i + axes.len()]);
    }
    one(pad_by(cx, x, &low, &high, mode, fill)?)
}

fn center_crop_pad<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let shape = cx
        .ty(0)?
        .static_shape()
        .ok_or_else(|| Error::unsupported("the shape must be known"))?;
    let axes = cx
        .ints("axes")?
        .unwrap_or_else(|| (0..shape.len() as i64).collect());
    let wanted = cx.ints_in(1)?;
    if wanted.len() != axes.len() {
        return Err(Error::invalid(format!(
            "{} extents for {} axes",
            wanted.len(),
            axes.len()
        )));
    }
    let (mut low, mut high) = (vec![0; shape.len()], vec![0; shape.len()]);
    for (&a, &n) in axes.iter().zip(&wanted) {
        let a = axis_of(a, shape.len())?;
        let grow = n.clamp(0, i32::MAX.into()) - shape[a] as i64;
        // A crop drops the floor of half on the low side; so does a pad.
        low[a] = if grow < 0 { -(-grow / 2) } else { grow / 2 };
        high[a] = grow - low[a];
    }
    let x = cx.val(0)?;
    one(pad_by(cx, x, &low, &high, PadMode::Constant, None)?)
}

/// `[n, c, h, w]` as dims, and the block size.
fn image_and_block(cx: &mut Ctx<'_, '_>) -> Result<([Dim; 4], Dim)> {
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

fn depth_to_space<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let ([n, c, h, w], b) = image_and_block(cx)?;
    let depth = exact(&c, &b.product(&b))?;
    let x = cx.val(0)?;
    let columns_first = cx.choice("mode", "DCR", &[("DCR", false), ("CRD", true)])?;
    let (split, perm) = if columns_first {
        ([&n, &depth, &b, &b, &h, &w], [0, 1, 4, 2, 5, 3])
    } else {
        ([&n, &b, &b, &depth, &h, &w], [0, 3, 4, 1, 5, 2])
    };
    let x = cx.b().reshape(x, split.map(Dim::clone))?;
    let x = cx.b().transpose(x, &perm)?;
    one(cx
        .b()
        .reshape(x, [n, depth, h.product(&b), w.product(&b)])?)
}

fn space_to_depth<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let ([n, c, h, w], b) = image_and_block(cx)?;
    let (h, w) = (exact(&h, &b)?, exact(&w, &b)?);
    let x = cx.val(0)?;
    let x = cx.b().reshape(
        x,
        [
            n.clone(),
            c.clone(),
            h.clone(),
            b.clone(),
            w.clone(),
            b.clone(),
        ],
    )?;
    let orders = &[("DCR", [0, 3, 5, 1, 2, 4]), ("CRD", [0, 1, 3, 5, 2, 4])];
    let perm = cx.choice("mode", "DCR", orders)?;
    let x = cx.b().transpose(x, &perm)?;
    one(cx.b().reshape(x, [n, c.product(&b).product(&b), h, w])?)
}

/// Keeps the triangle on or above (below) diagonal `k` of the last two axes; the rest is 0.
fn trilu<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
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
    let plane = ty.shape[r - 2..].to_vec();
    let row = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: plane.clone(),
            axis: 0,
        },
        &[],
    )?;
    let column = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: plane,
            axis: 1,
        },
        &[],
    )?;
    let offset = cx.map(ScalarOp::Sub, &[column, row])?;
    let k = cx.i64s(&[k], &[])?;
    let keep = cx.map(
        if upper { ScalarOp::Ge } else { ScalarOp::Le },
        &[offset, k],
    )?;
    let zero = cx.b().scalar(ty.dtype, 0.0);
    one(cx.map(ScalarOp::Select, &[keep, x, zero])?)
}
