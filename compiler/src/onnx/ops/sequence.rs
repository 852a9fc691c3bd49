//! Sequences and optional values, as lists known at import: nothing of them is left in the graph.

use super::super::import::{Contents, Ctx, OpDef, Out, Outs, V, axis_of, one};
use super::super::open_inputs::MAX_ELEMENTS;
use super::MANY;
use super::movement::{made_up_of, parts};
use crate::error::{Error, Result};
use crate::ir::Dim;
use gristmill_runtime::Tensor;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("SequenceEmpty", (0, 0), empty),
    OpDef::new("SequenceConstruct", (1, MANY), construct),
    OpDef::new("SequenceInsert", (2, 3), insert),
    OpDef::new("SequenceErase", (1, 2), erase),
    OpDef::new("SequenceAt", (2, 2), at),
    OpDef::new("SequenceLength", (1, 1), length),
    OpDef::new("SequenceMap", (1, MANY), map),
    OpDef::new("SplitToSequence", (1, 2), split),
    OpDef::new("ConcatFromSequence", (1, 1), concat),
    OpDef::new("Optional", (0, 1), optional),
    OpDef::new("OptionalGetElement", (1, 1), element),
    OpDef::new("OptionalHasElement", (0, 1), has_element),
];

fn list(elements: Vec<V>) -> Result<Outs> {
    Ok(vec![Out::Contents(
        Contents::list_type(),
        Contents::List(elements),
    )])
}

fn empty(cx: &mut Ctx) -> Result<Outs> {
    cx.i("dtype", 1)?;
    list(Vec::new())
}

fn construct(cx: &mut Ctx) -> Result<Outs> {
    list((0..cx.n_inputs()).map(|i| cx.v(i)).collect::<Result<_>>()?)
}

/// Position from operand `i`, `default` when absent; one up to `most` is valid, negative ones count
/// from the end.
fn position(cx: &mut Ctx, i: usize, n: usize, most: usize, default: usize) -> Result<usize> {
    let Some(p) = cx.opt_ints_in(i)? else {
        return Ok(default);
    };
    let Some(&p) = p.first() else {
        return Err(Error::invalid("the position is empty"));
    };
    let wrapped = if p < 0 { p.saturating_add(n as i64) } else { p };
    let inside = usize::try_from(wrapped).ok().filter(|p| *p <= most);
    inside.ok_or_else(|| {
        Error::invalid(format!(
            "position {p} is out of range for a sequence of {n}"
        ))
    })
}

fn insert(cx: &mut Ctx) -> Result<Outs> {
    let mut elements = cx.list(0)?;
    let n = elements.len();
    let at = position(cx, 2, n, n, n)?;
    elements.insert(at, cx.v(1)?);
    list(elements)
}

fn erase(cx: &mut Ctx) -> Result<Outs> {
    let mut elements = cx.list(0)?;
    let last = last_of(&elements)?;
    let at = position(cx, 1, elements.len(), last, last)?;
    elements.remove(at);
    list(elements)
}

fn last_of(elements: &[V]) -> Result<usize> {
    let last = elements.len().checked_sub(1);
    last.ok_or_else(|| Error::invalid("the sequence is empty"))
}

fn at(cx: &mut Ctx) -> Result<Outs> {
    let elements = cx.list(0)?;
    let last = last_of(&elements)?;
    let at = position(cx, 1, elements.len(), last, last)?;
    Ok(vec![Out::Same(elements[at])])
}

fn length(cx: &mut Ctx) -> Result<Outs> {
    let n = cx.list(0)?.len() as i64;
    Ok(vec![Out::tensor(Tensor::scalar(n))])
}

/// Parts of given sizes, of one given size (the last may be smaller), or of one element.
fn split(cx: &mut Ctx) -> Result<Outs> {
    let keepdims = cx.flag("keepdims", true)?;
    let shape = cx.ty(0)?.shape;
    let axis = cx.axis(0)?;
    let mut x = cx.val(0)?;
    let sizes = match cx.has(1) && cx.ty(1)?.rank() == 1 {
        true => {
            let sizes = cx.dims(1)?;
            x = made_up_of(cx, x, axis, &sizes)?;
            sizes
        }
        false => equal_sizes(cx, &shape[axis])?,
    };
    if sizes.len() > MAX_ELEMENTS {
        let message = format!("a sequence of more than {MAX_ELEMENTS} tensors");
        return Err(Error::unsupported(message));
    }
    let mut elements = Vec::new();
    for mut part in parts(cx, x, axis, &sizes)? {
        if !cx.has(1) && !keepdims {
            let mut dims = shape.0.clone();
            dims.remove(axis);
            part = cx.reshape(part, dims)?;
        }
        elements.push(cx.made(part));
    }
    list(elements)
}

/// Sizes of the parts of an axis, whose number is that of its elements, or of their groups.
fn equal_sizes(cx: &mut Ctx, axis: &Dim) -> Result<Vec<Dim>> {
    let extent = axis.as_const().ok_or_else(|| {
        Error::unsupported(format!(
            "an axis of {axis} elements must have a known extent"
        ))
        .hint("give its dims: --set NAME=N")
    })?;
    let size = match cx.has(1) {
        false => 1,
        true => cx.ints_in(1)?.first().copied().unwrap_or(0),
    };
    match size > 0 {
        true => Ok(even_parts(extent, size)),
        false => Err(Error::invalid(format!("split {size}"))),
    }
}

/// Parts of `size` elements, the last of the rest.
fn even_parts(extent: i64, size: i64) -> Vec<Dim> {
    let starts = (0..extent).step_by(size as usize).take(MAX_ELEMENTS + 1);
    starts.map(|at| size.min(extent - at).into()).collect()
}

fn concat(cx: &mut Ctx) -> Result<Outs> {
    let (axis, new_axis) = (cx.i("axis", 0)?, cx.flag("new_axis", false)?);
    let mut parts = Vec::new();
    for v in cx.list(0)? {
        parts.push(cx.materialise(v)?);
    }
    let Some(&first) = parts.first() else {
        return Err(Error::invalid("the sequence is empty"));
    };
    let axis = axis_of(axis, cx.shape_of(first).rank() + usize::from(new_axis))?;
    if new_axis {
        for p in &mut parts {
            let mut dims = cx.shape_of(*p).0;
            dims.insert(axis.min(dims.len()), Dim::constant(1));
            *p = cx.reshape(*p, dims)?;
        }
    }
    one(cx.concat(&parts, axis)?)
}

fn optional(cx: &mut Ctx) -> Result<Outs> {
    cx.ignore(&["type"]);
    if !cx.has(0) {
        return Ok(vec![Out::Contents(Contents::list_type(), Contents::Absent)]);
    }
    Ok(vec![Out::Same(cx.v(0)?)])
}

fn element(cx: &mut Ctx) -> Result<Outs> {
    if cx.is_absent(0) {
        return Err(Error::invalid("the optional value has no element"));
    }
    Ok(vec![Out::Same(cx.v(0)?)])
}

fn has_element(cx: &mut Ctx) -> Result<Outs> {
    Ok(vec![Out::tensor(Tensor::scalar(!cx.is_absent(0)))])
}

/// The body for each element of the first operand, with those of other sequences at its position,
/// and with other tensors.
fn map(cx: &mut Ctx) -> Result<Outs> {
    let body = cx.graph_attr("body")?;
    let n = cx.list(0)?.len();
    let mut results = vec![Vec::new(); body.output.len()];
    for i in 0..n {
        let args: Result<Vec<V>> = (0..cx.n_inputs()).map(|k| mapped(cx, k, i, n)).collect();
        for (list, v) in results.iter_mut().zip(cx.inline(body, &args?)?) {
            list.push(v);
        }
    }
    let lists = results.into_iter();
    Ok(lists
        .map(|list| Out::Contents(Contents::list_type(), Contents::List(list)))
        .collect())
}

/// Operand `k` for element `i` of `n`.
fn mapped(cx: &Ctx, k: usize, i: usize, n: usize) -> Result<V> {
    if !cx.is_list(k) {
        return cx.v(k);
    }
    let elements = cx.list(k)?;
    elements.get(i).copied().ok_or_else(|| {
        let found = elements.len();
        Error::invalid(format!(
            "operand {k} has {found} elements, operand 0 has {n}"
        ))
    })
}
