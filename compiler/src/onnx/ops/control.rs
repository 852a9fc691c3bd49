//! If, loop and scan: subgraphs as regions, or inlined where what decides is known.

use super::super::import::{Ctx, OpDef, Out, Outs, Region, V, axis_of};
use super::super::proto::GraphProto;
use super::MANY;
use crate::error::{Error, Result};
use crate::ir::{Def, Dim, Graph, GraphBuilder, Op, Origin, Shape, Type, ValueId};
use gristmill_runtime::{DType, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("If", (1, 1), branch),
    OpDef::new("Loop", (2, MANY), repeat),
    OpDef::new("Scan", (1, MANY), scan),
];

/// Iterations up to which a loop whose body cannot be a region is unrolled.
const UNROLL_LIMIT: i64 = 1024;

/// A known condition leaves one branch, inlined.
fn branch<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (then, other) = (cx.graph_attr("then_branch")?, cx.graph_attr("else_branch")?);
    if let Some(condition) = cx.constant(0)? {
        let taken = if truth(&condition)? { then } else { other };
        return Ok(cx.inline(taken, &[])?.into_iter().map(Out::Same).collect());
    }
    let made = both_branches(cx, then, other);
    if made.is_err() {
        // Knowing the condition would leave one branch only: the inputs that it depends on are reported as needed.
        cx.unknown(0);
    }
    Ok(made?.into_iter().map(Out::Value).collect())
}

fn both_branches<'m>(
    cx: &mut Ctx<'_, 'm>,
    then: &'m GraphProto,
    other: &'m GraphProto,
) -> Result<Vec<ValueId>> {
    // Both regions take all values that either uses, in the same order.
    let mut then = cx.try_region(then, &[], &[], "then_branch")?;
    let other = cx.try_region(other, &[], &then.captures, "else_branch")?;
    for (i, &v) in other.captures.iter().enumerate().skip(then.captures.len()) {
        then.graph.add_input(&format!("outer_{i}"), cx.ty_of(v)?);
    }
    let mut args = vec![cx.val(0)?];
    args.extend(captured(cx, &other)?);
    cx.b()
        .add_with_regions(Op::If, &args, vec![then.graph, other.graph])
}

/// Outer values that a region uses, as IR values.
fn captured(cx: &mut Ctx<'_, '_>, region: &Region) -> Result<Vec<ValueId>> {
    region.captures.iter().map(|&v| cx.materialise(v)).collect()
}

fn truth(t: &Tensor) -> Result<bool> {
    match (t.dtype(), t.len()) {
        (DType::Bool, 1) => Ok(t.as_bytes()[0] != 0),
        _ => Err(Error::invalid(format!(
            "a condition must be one bool, is {}{:?}",
            t.dtype(),
            t.shape()
        ))),
    }
}

/// A loop as a region; when its body cannot be one and the trip count is known, unrolled.
fn repeat<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let body = cx.graph_attr("body")?;
    let n_carried = cx.n_inputs().max(2) - 2;
    if body.output.len() < 1 + n_carried {
        return Err(Error::invalid(format!(
            "the body has {} outputs for {n_carried} values",
            body.output.len()
        )));
    }
    let why = match region_loop(cx, body, n_carried) {
        Ok(values) => return Ok(values.into_iter().map(Out::Value).collect()),
        Err(e) => e,
    };
    cx.require(&[0, 1])?;
    let trips = if cx.has(0) {
        cx.ints_in(0)?.first().copied().unwrap_or(0)
    } else {
        i64::MAX
    };
    let condition = if cx.has(1) {
        truth(&cx.tensor(1)?)?
    } else {
        true
    };
    if trips > UNROLL_LIMIT && !cx.has(1) {
        return Err(why);
    }
    unrolled(cx, body, n_carried, trips, condition)
}

fn region_loop<'m>(
    cx: &mut Ctx<'_, 'm>,
    body: &'m GraphProto,
    n_carried: usize,
) -> Result<Vec<ValueId>> {
    let mut formals = vec![
        Type::new(DType::I64, [0usize; 0]),
        Type::new(DType::Bool, [0usize; 0]),
    ];
    for i in 0..n_carried {
        formals.push(cx.ty(2 + i)?);
    }
    let region = cx.try_region(body, &formals, &[], "body")?;
    let mut graph = region.graph.clone();
    let last = graph
        .outputs
        .first()
        .map(|o| o.value)
        .ok_or_else(|| Error::invalid("the body has no results"))?;
    if !cx.has(1) {
        // Without a condition operand that of the body does not count.
        let yes = graph.add_constant(Tensor::scalar(true), &Origin::default());
        graph.outputs[0].value = yes;
    }
    let n_stacked = graph.outputs.len().saturating_sub(1 + n_carried);
    let trip = if n_stacked == 0 {
        Dim::constant(0)
    } else {
        exact_trips(cx, &graph, last)?
    };
    let scalar = |cx: &mut Ctx<'_, '_>, i: usize, default: Tensor| match cx.opt(i)? {
        Some(v) => cx.b().reshape(v, Vec::<Dim>::new()),
        None => Ok(cx.b().constant(default)),
    };
    let mut args = vec![
        scalar(cx, 0, Tensor::scalar(i64::MAX))?,
        scalar(cx, 1, Tensor::scalar(true))?,
    ];
    for i in 0..n_carried {
        args.push(cx.val(2 + i)?);
    }
    args.extend(captured(cx, &region)?);
    cx.b().add_with_regions(
        Op::Loop {
            carried: n_carried,
            trip,
        },
        &args,
        vec![graph],
    )
}

/// The number of iterations, which stacked results have as their extent: known only if no condition can end the loop.
fn exact_trips(cx: &mut Ctx<'_, '_>, body: &Graph, condition: ValueId) -> Result<Dim> {
    let kept = body.value(condition).def == Def::Input(1)
        || body
            .single(condition)
            .is_some_and(|t| t.as_bytes().first() == Some(&1));
    let begun = match cx.has(1) {
        true => truth(&cx.tensor(1)?)?,
        false => true,
    };
    if cx.has(1) && !(kept && begun) {
        return Err(Error::unsupported(
            "how often the loop runs, and so the shape of its results, depends on the data",
        ));
    }
    match cx.try_dims(0)?.as_deref() {
        Some([n]) if n.as_const().is_none_or(|n| n >= 0) => Ok(n.clone()),
        Some(_) => Err(Error::invalid(
            "the trip count must be one number that is not negative",
        )),
        None => Err(cx.unknown(0)),
    }
}

/// Imports the body once per iteration.
fn unrolled<'m>(
    cx: &mut Ctx<'_, 'm>,
    body: &'m GraphProto,
    n_carried: usize,
    trips: i64,
    condition: bool,
) -> Result<Outs<'m>> {
    let n_stacked = body.output.len().saturating_sub(1 + n_carried);
    let mut carried: Vec<V> = (0..n_carried).map(|i| cx.v(2 + i)).collect::<Result<_>>()?;
    let mut rows: Vec<Vec<ValueId>> = vec![Vec::new(); n_stacked];
    let (mut i, mut go) = (0, condition);
    while go && i < trips {
        if i == UNROLL_LIMIT {
            return Err(Error::unsupported(format!(
                "a loop of more than {UNROLL_LIMIT} iterations with such a body"
            )));
        }
        let mut args = vec![cx.known(Tensor::scalar(i)), cx.known(Tensor::scalar(true))];
        args.append(&mut carried);
        let results = cx.inline(body, &args)?;
        if cx.has(1) {
            let last = cx.constant_of(results[0])?;
            go = truth(&last.ok_or_else(|| {
                Error::unsupported(
                    "the condition of the loop depends on the data, as do shapes in its body",
                )
            })?)?;
        }
        carried = results[1..=n_carried].to_vec();
        for (rows, &v) in rows.iter_mut().zip(&results[1 + n_carried..]) {
            rows.push(cx.materialise(v)?);
        }
        i += 1;
    }
    let mut outs: Outs<'m> = carried.into_iter().map(Out::Same).collect();
    for rows in rows {
        outs.push(stacked(cx, &rows)?);
    }
    Ok(outs)
}

/// Values joined along a new axis 0.
fn stacked<'m>(cx: &mut Ctx<'_, 'm>, rows: &[ValueId]) -> Result<Out<'m>> {
    let Some(&first) = rows.first() else {
        return Err(Error::unsupported(
            "the shape of a result that is stacked zero times is not known",
        ));
    };
    let mut shape = cx.shape_of(first).0;
    shape.insert(0, Dim::constant(1));
    let rows: Vec<ValueId> = rows
        .iter()
        .map(|&r| cx.b().reshape(r, shape.clone()))
        .collect::<Result<_>>()?;
    cx.b().concat(&rows, 0).map(Out::Value)
}

/// Axis and direction of the scanned operands or of the stacked results.
struct Track {
    axis: i64,
    backwards: bool,
}

fn tracks(
    cx: &Ctx<'_, '_>,
    axes: &'static str,
    directions: &'static str,
    n: usize,
) -> Result<Vec<Track>> {
    let axes = cx.ints(axes)?.unwrap_or_else(|| vec![0; n]);
    let directions = cx.ints(directions)?.unwrap_or_else(|| vec![0; n]);
    if axes.len() != n || directions.len() != n {
        return Err(Error::invalid(format!(
            "axes {axes:?} and directions {directions:?} for {n} sequences"
        )));
    }
    Ok(axes
        .into_iter()
        .zip(directions)
        .map(|(axis, d)| Track {
            axis,
            backwards: d != 0,
        })
        .collect())
}

fn scan<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    if cx.opset < 9 {
        return Err(Error::unsupported(
            "scans before operator set 9 are not supported",
        ));
    }
    let body = cx.graph_attr("body")?;
    let n = usize::try_from(cx.i("num_scan_inputs", 0)?)
        .ok()
        .filter(|n| (1..=cx.n_inputs()).contains(n));
    let n = n.ok_or_else(|| Error::invalid("num_scan_inputs does not fit the operands"))?;
    let carried = cx.n_inputs() - n;
    let n_stacked = body.output.len().saturating_sub(carried);
    let tracks_in = tracks(cx, "scan_input_axes", "scan_input_directions", n)?;
    let tracks_out = tracks(cx, "scan_output_axes", "scan_output_directions", n_stacked)?;
    // When all operands are walked backwards the op does that; otherwise single ones are flipped.
    let reverse = tracks_in.iter().all(|t| t.backwards);
    let mut args = Vec::new();
    for i in 0..carried {
        args.push(cx.val(i)?);
    }
    let mut length = None;
    for (i, t) in tracks_in.iter().enumerate() {
        let x = cx.val(carried + i)?;
        let axis = axis_of(t.axis, cx.shape_of(x).rank())?;
        let x = moved(cx, x, axis, 0)?;
        length.get_or_insert(cx.shape_of(x)[0].clone());
        args.push(if t.backwards == reverse {
            x
        } else {
            flipped(cx, x, 0)?
        });
    }
    let length = length.expect("there is a scanned operand");
    let mut formals: Vec<Type> = args.iter().map(|&a| cx.type_of(a)).collect();
    formals[carried..]
        .iter_mut()
        .for_each(|t| drop(t.shape.0.remove(0)));
    let region = cx.region(body, &formals, &[], "body")?;
    args.extend(captured(cx, &region)?);
    let op = Op::Scan {
        carried,
        scanned: n,
        length,
        reverse,
    };
    let mut results = cx.b().add_with_regions(op, &args, vec![region.graph])?;
    for (r, t) in results[carried..].iter_mut().zip(&tracks_out) {
        let axis = axis_of(t.axis, cx.shape_of(*r).rank())?;
        let y = if t.backwards == reverse {
            *r
        } else {
            flipped(cx, *r, 0)?
        };
        *r = moved(cx, y, 0, axis)?;
    }
    Ok(results.into_iter().map(Out::Value).collect())
}

/// Axis `from` moved to place `to`.
fn moved(cx: &mut Ctx<'_, '_>, x: ValueId, from: usize, to: usize) -> Result<ValueId> {
    let mut perm: Vec<usize> = (0..cx.shape_of(x).rank()).filter(|&a| a != from).collect();
    perm.insert(to, from);
    cx.b().transpose(x, &perm)
}

/// The elements along `axis` in reverse order.
pub(super) fn flipped(cx: &mut Ctx<'_, '_>, x: ValueId, axis: usize) -> Result<ValueId> {
    let Shape(sizes) = cx.shape_of(x);
    let (mut starts, mut steps) = (vec![Dim::constant(0); sizes.len()], vec![1; sizes.len()]);
    if sizes[axis].is(0) {
        return Ok(x);
    }
    (starts[axis], steps[axis]) = (sizes[axis].clone() - 1.into(), -1);
    cx.add(
        Op::Slice {
            starts,
            sizes,
            steps,
        },
        &[x],
    )
}

/// A scan along axis 0 of `scanned`, its body built by `body` from the state and one element of each sequence; `body`
/// gives the new state, then what is stacked.
pub(super) fn scan_over(
    cx: &mut Ctx<'_, '_>,
    state: &[ValueId],
    scanned: &[ValueId],
    reverse: bool,
    body: impl FnOnce(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>>,
) -> Result<Vec<ValueId>> {
    let mut b = GraphBuilder::new("step");
    b.set_origin(&cx.path());
    let mut formals = Vec::new();
    for (i, &v) in state.iter().chain(scanned).enumerate() {
        let ty = cx.type_of(v);
        let shape = if i < state.len() {
            ty.shape.0
        } else {
            ty.shape[1..].to_vec()
        };
        formals.push(b.input(&format!("a{i}"), ty.dtype, shape));
    }
    for (i, v) in body(&mut b, &formals)?.into_iter().enumerate() {
        b.output(&format!("r{i}"), v);
    }
    let length = cx.shape_of(scanned[0])[0].clone();
    let op = Op::Scan {
        carried: state.len(),
        scanned: scanned.len(),
        length,
        reverse,
    };
    cx.b()
        .add_with_regions(op, &[state, scanned].concat(), vec![b.into_graph()])
}
