//! Arithmetic on extents whose operands only a run shows: the rules of [`super::movement`] as nodes.

use super::super::import::{Ctx, Element, product};
use super::movement::check_step;
use crate::error::Result;
use crate::ir::{Dim, PadMode, ScalarOp, Shape, Type, ValueId};
use gristmill_runtime::DType;

/// The elements as dims, where all are known.
pub(super) fn known(elements: &[Element]) -> Option<Vec<Dim>> {
    let dims = elements.iter().map(|e| match e {
        Element::Known(dim) => Some(dim.clone()),
        Element::Value(_) => None,
    });
    dims.collect()
}

/// The target of a reshape: 0 copies an extent unless `allow_zero`, and -1 stands for the extent
/// that is left.
pub(super) fn reshape_target(
    cx: &mut Ctx,
    from: &Shape,
    wanted: &[Element],
    allow_zero: bool,
) -> Result<Vec<Dim>> {
    let mut target = Vec::new();
    for (i, element) in wanted.iter().enumerate() {
        let copied = from.get(i).filter(|_| !allow_zero);
        target.push(with_copy(cx, element, copied)?);
    }
    let rest = remaining(cx, from, &target)?;
    let is_rest = |e: &Element| matches!(e, Element::Known(d) if d.is(-1));
    let has_rest = target.iter().any(is_rest);
    let mut dims = Vec::new();
    for element in target {
        dims.push(match element {
            Element::Value(v) if !has_rest => {
                let minus_one = cx.int(-1);
                let v = cx.replaced(v, minus_one, rest)?;
                cx.extent(v)?
            }
            element if is_rest(&element) => cx.extent(rest)?,
            element => cx.extent_of(element)?,
        });
    }
    Ok(dims)
}

/// An element of the target, but the extent that is copied where it is 0.
fn with_copy(cx: &mut Ctx, element: &Element, copied: Option<&Dim>) -> Result<Element> {
    Ok(match (element, copied) {
        (Element::Known(d), Some(copied)) if d.is(0) => Element::Known(copied.clone()),
        (Element::Value(v), Some(copied)) => {
            let (zero, copied) = (cx.int(0), cx.dim_value(copied)?);
            Element::Value(cx.replaced(*v, zero, copied)?)
        }
        _ => element.clone(),
    })
}

/// The elements of `from` divided by the extents of `target` that are not -1.
fn remaining(cx: &mut Ctx, from: &Shape, target: &[Element]) -> Result<ValueId> {
    let one = cx.int(1);
    let mut others = one;
    for element in target {
        let extent = match element {
            Element::Known(d) if d.is(-1) => continue,
            Element::Known(d) => cx.dim_value(d)?,
            Element::Value(v) => {
                let minus_one = cx.int(-1);
                cx.replaced(*v, minus_one, one)?
            }
        };
        others = cx.mul(others, extent)?;
    }
    let total = cx.dim_value(&product(from))?;
    let others = cx.greater(others, one)?;
    cx.div(total, others)
}

/// Start and size of one axis of a slice, by NumPy's rules.
pub(super) fn slice_range(
    cx: &mut Ctx,
    start: &Element,
    end: &Element,
    step: i64,
    extent: &Dim,
) -> Result<(Dim, Dim)> {
    check_step(step)?;
    let n = cx.dim_value(extent)?;
    let (start, end) = (cx.element_value(start)?, cx.element_value(end)?);
    let low = if step > 0 { 0 } else { -1 };
    let (start, end) = (cx.bound(start, n, 0, step)?, cx.bound(end, n, low, step)?);
    let span = match step > 0 {
        true => cx.sub(end, start)?,
        false => cx.sub(start, end)?,
    };
    let size = cx.steps(span, step.abs())?;
    // Nothing starts at 0, wherever the bounds are.
    let zero = cx.int(0);
    let is_empty = cx.eq(size, zero)?;
    let start = cx.select(is_empty, zero, start)?;
    Ok((cx.extent(start)?, cx.extent(size)?))
}

/// Number of elements from `start` up to `limit`, in steps of `step`, all `i64` of rank 0.
pub(super) fn range_length(
    cx: &mut Ctx,
    start: ValueId,
    limit: ValueId,
    step: ValueId,
) -> Result<ValueId> {
    let (zero, one) = (cx.int(0), cx.int(1));
    let is_rising = cx.map(ScalarOp::Gt, &[step, zero])?;
    let (up, down) = (cx.sub(limit, start)?, cx.sub(start, limit)?);
    let span = cx.select(is_rising, up, down)?;
    let pace = cx.abs(step)?;
    let span = cx.greater(span, zero)?;
    let below = cx.sub(pace, one)?;
    let rounded = cx.add_(span, below)?;
    let n = cx.div(rounded, pace)?;
    let (is_far, most) = (cx.is_far(start, limit)?, cx.int(i64::MAX));
    cx.select(is_far, most, n)
}

/// The elements that a pad cuts off, where it is negative, and those that it adds.
pub(super) fn cut_and_added(cx: &mut Ctx, pad: &Element) -> Result<(Dim, Dim)> {
    match pad {
        Element::Known(pad) => {
            let zero = Dim::constant(0);
            let cut = cx.greatest(&pad.scale(-1), &zero);
            Ok((cut, cx.greatest(pad, &zero)))
        }
        Element::Value(pad) => {
            let (zero, negative) = (cx.int(0), cx.neg(*pad)?);
            let (cut, added) = (cx.greater(negative, zero)?, cx.greater(*pad, zero)?);
            Ok((cx.extent(cut)?, cx.extent(added)?))
        }
    }
}

/// Adds elements of one value on both sides of an axis.
pub(super) fn bordered(
    cx: &mut Ctx,
    x: ValueId,
    axis: usize,
    pads: [&Dim; 2],
    fill: Option<ValueId>,
) -> Result<ValueId> {
    let Type { dtype, shape } = cx.type_of(x);
    let fill = match fill {
        Some(fill) => cx.reshape(fill, Vec::<Dim>::new())?,
        None => cx.scalar(dtype, 0.0),
    };
    let mut parts = vec![x];
    for (side, n) in pads.into_iter().enumerate().filter(|(_, n)| !n.is(0)) {
        let mut border = shape.0.clone();
        border[axis].clone_from(n);
        let border = cx.broadcast(fill, border)?;
        parts.insert(side * parts.len(), border);
    }
    match parts[..] {
        [only] => Ok(only),
        _ => cx.concat(&parts, axis),
    }
}

/// Continues the elements of an axis on both sides.
pub(super) fn continued(
    cx: &mut Ctx,
    x: ValueId,
    axis: usize,
    [low, high]: [&Dim; 2],
    mode: PadMode,
) -> Result<ValueId> {
    let extent = cx.shape_of(x)[axis].clone();
    let i = cx.iota([low.clone() + extent.clone() + high.clone()], 0)?;
    let (low, n, one) = (cx.dim_value(low)?, cx.dim_value(&extent)?, cx.int(1));
    let (i, last) = (cx.sub(i, low)?, cx.sub(n, one)?);
    let place = match mode {
        PadMode::Wrap => cx.map(ScalarOp::Mod, &[i, n])?,
        PadMode::Reflect => reflected(cx, i, last)?,
        _ => {
            let zero = cx.int(0);
            cx.greater(i, zero)?
        }
    };
    // The edge goes on; and an axis of one element has only that one.
    let place = cx.lesser(place, last)?;
    cx.gather(x, place, axis)
}

/// Positions mirrored at the first element and at the last.
fn reflected(cx: &mut Ctx, i: ValueId, last: ValueId) -> Result<ValueId> {
    let one = cx.int(1);
    let period = cx.add_(last, last)?;
    let period = cx.greater(period, one)?;
    let forth = cx.map(ScalarOp::Mod, &[i, period])?;
    let back = cx.sub(period, forth)?;
    cx.lesser(forth, back)
}

impl Ctx<'_, '_> {
    /// True for integers whose difference wraps.
    fn is_far(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        let (a, b) = (self.cast(a, DType::F64)?, self.cast(b, DType::F64)?);
        let distance = self.sub(a, b)?;
        let distance = self.abs(distance)?;
        self.with_real(ScalarOp::Gt, distance, 2f64.powi(62))
    }

    /// `v`, but `by` where it is `what`.
    pub(super) fn replaced(&mut self, v: ValueId, what: ValueId, by: ValueId) -> Result<ValueId> {
        let is_what = self.eq(v, what)?;
        self.select(is_what, by, v)
    }

    /// A bound of a slice of `n` elements, `low` or more: negative ones count from the end.
    fn bound(&mut self, v: ValueId, n: ValueId, low: i64, step: i64) -> Result<ValueId> {
        let (zero, one) = (self.int(0), self.int(1));
        let is_negative = self.map(ScalarOp::Lt, &[v, zero])?;
        let wrapped = self.add_(v, n)?;
        let v = self.select(is_negative, wrapped, v)?;
        let high = match step > 0 {
            true => n,
            false => self.sub(n, one)?,
        };
        let low = self.int(low);
        let v = self.greater(v, low)?;
        self.lesser(v, high)
    }

    /// The number of steps in a span, rounded up; 0 for a negative one.
    fn steps(&mut self, span: ValueId, step: i64) -> Result<ValueId> {
        let zero = self.int(0);
        let span = self.greater(span, zero)?;
        if step == 1 {
            return Ok(span);
        }
        let (below, step) = (self.int(step - 1), self.int(step));
        let span = self.add_(span, below)?;
        self.div(span, step)
    }
}
