//! If, loop and scan: subgraphs as regions, or inlined where conditions and trip counts are known.

use super::super::import::{Ctx, OpDef, Out, Outs, Region, V, axis_of, moved_axis};
use super::super::proto::GraphProto;
use super::MANY;
use crate::error::{Error, ErrorKind, Result};
use crate::ir::{Dim, Graph, GraphBuilder, Op, Origin, Type, ValueId};
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeSet;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("If", (1, 1), branch),
    OpDef::new("Loop", (2, MANY), repeat),
    OpDef::new("Scan", (1, MANY), scan),
];

/// Iterations up to which a loop whose body cannot be a region is unrolled.
const UNROLL_LIMIT: i64 = 1024;

/// A known condition leaves one branch, inlined.
fn branch(cx: &mut Ctx) -> Result<Outs> {
    let (then, other) = (cx.graph_attr("then_branch")?, cx.graph_attr("else_branch")?);
    let (n_then, n_other) = (then.output.len(), other.output.len());
    if n_then != n_other {
        let message = format!("the branches have {n_then} and {n_other} results");
        return Err(Error::invalid(message));
    }
    if let Some(condition) = cx.constant(0)? {
        let taken = if truth(&condition)? { then } else { other };
        return Ok(cx.inline(taken, &[])?.into_iter().map(Out::Same).collect());
    }
    let made = both_branches(cx, then, other);
    if made.is_err() {
        // Knowing the condition would leave one branch only: the inputs that it depends on are
        // reported as needed.
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
    let mut regions = vec![then.graph, other.graph];
    if cx.is_run_time() {
        share_types(cx, &mut regions)?;
    }
    cx.b().add_with_regions(Op::If, &args, regions)
}

/// Gives results of both branches one type: extents that differ are those that a run shows.
fn share_types(cx: &mut Ctx, branches: &mut [Graph]) -> Result<()> {
    let results = |g: &Graph| -> Vec<Type> {
        let values = g.outputs.iter().map(|o| o.value);
        values.map(|v| g.ty(v).clone()).collect()
    };
    let (then, other) = (results(&branches[0]), results(&branches[1]));
    for (i, (a, b)) in then.iter().zip(&other).enumerate() {
        if a == b || (a.dtype, a.rank()) != (b.dtype, b.rank()) {
            continue;
        }
        let extents = a.shape.iter().zip(b.shape.iter());
        let shape: Vec<Dim> = extents
            .map(|(a, b)| if a == b { a.clone() } else { cx.new_symbol() })
            .collect();
        for branch in branches.iter_mut() {
            let shape = shape.clone();
            let v = branch.outputs[i].value;
            let shaped = branch.add1(Op::Shaped { shape }, &[v], &Origin::new(&cx.path()))?;
            branch.outputs[i].value = shaped;
        }
    }
    Ok(())
}

/// Outer values that a region uses, as IR values.
fn captured(cx: &mut Ctx, region: &Region) -> Result<Vec<ValueId>> {
    region.captures.iter().map(|&v| cx.materialise(v)).collect()
}

fn truth(t: &Tensor) -> Result<bool> {
    let (dtype, shape) = (t.dtype(), t.shape());
    if (dtype, t.len()) == (DType::Bool, 1) {
        return Ok(t.as_bytes()[0] != 0);
    }
    let message = format!("a condition must be one bool, is {dtype}{shape:?}");
    Err(Error::invalid(message))
}

/// A loop as a region; when its body cannot be one and the trip count is known, unrolled.
fn repeat(cx: &mut Ctx) -> Result<Outs> {
    let body = cx.graph_attr("body")?;
    let (n_results, n_carried) = (body.output.len(), cx.n_inputs().max(2) - 2);
    if n_results < 1 + n_carried {
        return Err(Error::invalid(format!(
            "the body has {n_results} outputs for {n_carried} values"
        )));
    }
    let why = match region_loop(cx, body, n_carried) {
        Ok(values) => return Ok(values.into_iter().map(Out::Value).collect()),
        Err(e) => e,
    };
    if !cx.is_run_time() {
        return unrolled_loop(cx, body, n_carried, why);
    }
    let n_symbols = cx.n_symbols();
    let unrolled = cx.attempt(|cx| unrolled_loop(cx, body, n_carried, why));
    if unrolled.is_ok() && cx.n_symbols() == n_symbols {
        return unrolled;
    }
    // Iterations with extents of their own are better compiled once.
    match cx.attempt(|cx| run_time_loop(cx, body, n_carried)) {
        Ok(values) => Ok(values.into_iter().map(Out::Value).collect()),
        Err(why) => unrolled.map_err(|_| why),
    }
}

/// A loop of known length, its body imported once per iteration. Errors with `why` where that
/// would be too often.
fn unrolled_loop<'m>(
    cx: &mut Ctx<'_, 'm>,
    body: &'m GraphProto,
    n_carried: usize,
    why: Error,
) -> Result<Outs> {
    cx.require(&[0, 1])?;
    let trips = match cx.has(0) {
        true => cx.first_int(0)?.unwrap_or(0),
        false => i64::MAX,
    };
    let condition = known_condition(cx)?;
    if trips > UNROLL_LIMIT && !cx.has(1) {
        return Err(why);
    }
    unrolled(cx, body, n_carried, trips, condition)
}

/// The condition that the loop begins with, true without an operand for it.
fn known_condition(cx: &mut Ctx) -> Result<bool> {
    if cx.has(1) {
        truth(&cx.tensor(1)?)
    } else {
        Ok(true)
    }
}

/// A loop whose extents are known before it runs.
fn region_loop<'m>(
    cx: &mut Ctx<'_, 'm>,
    body: &'m GraphProto,
    n_carried: usize,
) -> Result<Vec<ValueId>> {
    let (formals, n_symbols) = (formals_of(cx, n_carried)?, cx.n_symbols());
    let region = cx.try_region(body, &formals, &[], "body")?;
    if cx.n_symbols() != n_symbols {
        return Err(Error::unsupported("extents in the body depend on the data"));
    }
    let trip = exact_trips(cx, &region.graph, n_carried)?;
    loop_of(cx, region, n_carried, trip)
}

/// Types of counter, condition and carried values in a body.
fn formals_of(cx: &Ctx, n_carried: usize) -> Result<Vec<Type>> {
    let mut formals = vec![scalar_type(DType::I64), scalar_type(DType::Bool)];
    for i in 0..n_carried {
        formals.push(cx.ty(2 + i)?);
    }
    Ok(formals)
}

/// A loop with extents that only its run shows: the number of rows of stacked results, and those of
/// carried values that change.
fn run_time_loop<'m>(
    cx: &mut Ctx<'_, 'm>,
    body: &'m GraphProto,
    n_carried: usize,
) -> Result<Vec<ValueId>> {
    let mut formals = formals_of(cx, n_carried)?;
    let mut opened = BTreeSet::new();
    loop {
        let region = cx.try_region(body, &formals, &[], "body")?;
        let results = region.graph.outputs.iter().skip(1).map(|o| o.value);
        let results: Vec<Type> = results.map(|v| region.graph.ty(v).clone()).collect();
        if !open_changed(cx, &mut formals[2..], &results, &mut opened) {
            let trip = match cx.attempt(|cx| exact_trips(cx, &region.graph, n_carried)) {
                Err(e) if e.kind() == ErrorKind::Unsupported => cx.new_symbol(),
                trip => trip?,
            };
            return loop_of(cx, region, n_carried, trip);
        }
    }
}

/// Replaces extents of carried values that an iteration changes by symbols of their own, which are
/// noted; false when there are none.
fn open_changed(
    cx: &mut Ctx,
    formals: &mut [Type],
    results: &[Type],
    opened: &mut BTreeSet<Dim>,
) -> bool {
    let mut is_changed = false;
    for (formal, result) in formals.iter_mut().zip(results) {
        for (d, new) in formal.shape.0.iter_mut().zip(result.shape.iter()) {
            if d != new && !opened.contains(d) {
                *d = cx.new_symbol();
                opened.insert(d.clone());
                is_changed = true;
            }
        }
    }
    is_changed
}

fn loop_of(cx: &mut Ctx, region: Region, n_carried: usize, trip: Dim) -> Result<Vec<ValueId>> {
    let mut graph = region.graph.clone();
    if !cx.has(1) {
        // Without a condition operand that of the body does not count.
        let yes = graph.add_constant(Tensor::scalar(true), &Origin::default());
        graph.outputs[0].value = yes;
    }
    let mut args = loop_operands(cx, n_carried)?;
    args.extend(captured(cx, &region)?);
    let op = Op::Loop {
        carried: n_carried,
        trip,
    };
    cx.b().add_with_regions(op, &args, vec![graph])
}

/// Trip count, condition and carried values of a loop.
fn loop_operands(cx: &mut Ctx, n_carried: usize) -> Result<Vec<ValueId>> {
    let mut args = vec![
        scalar_operand(cx, 0, Tensor::scalar(i64::MAX))?,
        scalar_operand(cx, 1, Tensor::scalar(true))?,
    ];
    for i in 0..n_carried {
        args.push(cx.val(2 + i)?);
    }
    Ok(args)
}

fn scalar_type(dtype: DType) -> Type {
    Type::new(dtype, [0usize; 0])
}

/// Operand `i` as a tensor of rank 0.
fn scalar_operand(cx: &mut Ctx, i: usize, default: Tensor) -> Result<ValueId> {
    match cx.opt(i)? {
        Some(v) => cx.reshape(v, Vec::<Dim>::new()),
        None => Ok(cx.b().constant(default)),
    }
}

/// The number of iterations, which stacked results have as their extent: known only if no condition
/// can end the loop. Without stacked results it is 0 where it is not known.
fn exact_trips(cx: &mut Ctx, body: &Graph, n_carried: usize) -> Result<Dim> {
    if body.outputs.is_empty() {
        return Err(Error::invalid("the body has no results"));
    }
    if body.outputs.len() <= 1 + n_carried {
        return told_trips(cx, body);
    }
    if !is_endless(cx, body)? {
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

/// The number of iterations of a loop without stacked results; 0 where the shapes of the inputs do not
/// tell it.
fn told_trips(cx: &mut Ctx, body: &Graph) -> Result<Dim> {
    let begins = match cx.constant(1)? {
        Some(condition) => truth(&condition)?,
        None => !cx.has(1),
    };
    if !begins || cx.has(1) && !body.keeps_condition() {
        return Ok(Dim::constant(0));
    }
    match cx.try_dims(0)?.as_deref() {
        Some([n]) if cx.is_of_inputs(n) => Ok(n.greatest_within(&0.into(), cx.ranges())),
        _ => Ok(Dim::constant(0)),
    }
}

/// True when no condition can end the loop.
fn is_endless(cx: &mut Ctx, body: &Graph) -> Result<bool> {
    Ok(known_condition(cx)? && (!cx.has(1) || body.keeps_condition()))
}

/// Imports the body once per iteration.
fn unrolled<'m>(
    cx: &mut Ctx<'_, 'm>,
    body: &'m GraphProto,
    n_carried: usize,
    trips: i64,
    condition: bool,
) -> Result<Outs> {
    let n_stacked = body.output.len().saturating_sub(1 + n_carried);
    let mut carried: Vec<V> = (0..n_carried).map(|i| cx.v(2 + i)).collect::<Result<_>>()?;
    let mut stacks: Vec<Vec<ValueId>> = vec![Vec::new(); n_stacked];
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
        go = !cx.has(1) || goes_on(cx, results[0])?;
        carried = results[1..=n_carried].to_vec();
        for (rows, &v) in stacks.iter_mut().zip(&results[1 + n_carried..]) {
            rows.push(cx.materialise(v)?);
        }
        i += 1;
    }
    let mut outs: Outs = carried.into_iter().map(Out::Same).collect();
    for rows in stacks {
        outs.push(stacked(cx, &rows)?);
    }
    Ok(outs)
}

/// The condition that an iteration ends with.
fn goes_on(cx: &mut Ctx, condition: V) -> Result<bool> {
    match cx.constant_of(condition)? {
        Some(t) => truth(&t),
        None => Err(Error::unsupported(
            "the condition of the loop depends on the data, as do shapes in its body",
        )),
    }
}

/// Values joined along a new axis 0.
fn stacked(cx: &mut Ctx, values: &[ValueId]) -> Result<Out> {
    let Some(&first) = values.first() else {
        return Err(Error::unsupported(
            "the shape of a result that is stacked zero times is not known",
        ));
    };
    let mut shape = cx.shape_of(first).0;
    shape.insert(0, Dim::constant(1));
    let mut rows = Vec::new();
    for &v in values {
        rows.push(cx.reshape(v, shape.clone())?);
    }
    cx.concat(&rows, 0).map(Out::Value)
}

/// Axis and direction of the scanned operands or of the stacked results.
struct Track {
    axis: i64,
    backwards: bool,
}

fn tracks(cx: &Ctx, axes: &'static str, directions: &'static str, n: usize) -> Result<Vec<Track>> {
    let axes = cx.ints(axes)?.unwrap_or_else(|| vec![0; n]);
    let directions = cx.ints(directions)?.unwrap_or_else(|| vec![0; n]);
    if axes.len() != n || directions.len() != n {
        return Err(Error::invalid(format!(
            "axes {axes:?} and directions {directions:?} for {n} sequences"
        )));
    }
    let track = |(axis, d)| Track {
        axis,
        backwards: d != 0,
    };
    Ok(axes.into_iter().zip(directions).map(track).collect())
}

fn scan(cx: &mut Ctx) -> Result<Outs> {
    if cx.opset < 9 {
        return Err(Error::unsupported(
            "scans before operator set 9 are not supported",
        ));
    }
    let body = cx.graph_attr("body")?;
    let scanned = n_scanned(cx)?;
    let carried = cx.n_inputs() - scanned;
    let n_stacked = body.output.len().saturating_sub(carried);
    let tracks_in = tracks(cx, "scan_input_axes", "scan_input_directions", scanned)?;
    let tracks_out = tracks(cx, "scan_output_axes", "scan_output_directions", n_stacked)?;
    // When all operands are walked backwards the op does that; otherwise single ones are flipped.
    let reverse = tracks_in.iter().all(|t| t.backwards);
    let mut args = scan_operands(cx, carried, &tracks_in, reverse)?;
    let length = cx.shape_of(args[carried])[0].clone();
    let formals = step_types(cx, &args, carried);
    let region = cx.region(body, &formals, &[], "body")?;
    args.extend(captured(cx, &region)?);
    let op = Op::Scan {
        carried,
        scanned,
        length,
        reverse,
    };
    let mut results = cx.b().add_with_regions(op, &args, vec![region.graph])?;
    for (r, t) in results[carried..].iter_mut().zip(&tracks_out) {
        *r = stacked_along(cx, *r, t, reverse)?;
    }
    Ok(results.into_iter().map(Out::Value).collect())
}

/// Number of scanned operands, which are the last ones.
fn n_scanned(cx: &mut Ctx) -> Result<usize> {
    let n = usize::try_from(cx.i("num_scan_inputs", 0)?).ok();
    let n = n.filter(|n| (1..=cx.n_inputs()).contains(n));
    n.ok_or_else(|| Error::invalid("num_scan_inputs does not fit the operands"))
}

/// Types inside of the body: of the state, and of one element of each sequence.
fn step_types(cx: &mut Ctx, args: &[ValueId], carried: usize) -> Vec<Type> {
    let mut types: Vec<Type> = args.iter().map(|&a| cx.type_of(a)).collect();
    for scanned in &mut types[carried..] {
        scanned.shape.0.remove(0);
    }
    types
}

/// Elements stacked along axis 0, in the direction and along the axis of their track.
fn stacked_along(cx: &mut Ctx, x: ValueId, track: &Track, reverse: bool) -> Result<ValueId> {
    let axis = axis_of(track.axis, cx.shape_of(x).rank())?;
    let y = walked(cx, x, track.backwards != reverse)?;
    moved(cx, y, 0, axis)
}

/// The state, then the scanned operands with their axes first and in the direction of the op.
fn scan_operands(
    cx: &mut Ctx,
    carried: usize,
    tracks: &[Track],
    reverse: bool,
) -> Result<Vec<ValueId>> {
    let mut args = Vec::new();
    for i in 0..carried {
        args.push(cx.val(i)?);
    }
    for (i, t) in tracks.iter().enumerate() {
        let x = cx.val(carried + i)?;
        let axis = axis_of(t.axis, cx.shape_of(x).rank())?;
        let x = moved(cx, x, axis, 0)?;
        args.push(walked(cx, x, t.backwards != reverse)?);
    }
    Ok(args)
}

/// The value, its first axis flipped if asked for.
fn walked(cx: &mut Ctx, x: ValueId, is_flipped: bool) -> Result<ValueId> {
    if is_flipped { flipped(cx, x, 0) } else { Ok(x) }
}

/// Axis `from` moved to place `to`.
fn moved(cx: &mut Ctx, x: ValueId, from: usize, to: usize) -> Result<ValueId> {
    let rank = cx.shape_of(x).rank();
    cx.transpose(x, &moved_axis(rank, from, to))
}

/// The elements along `axis` in reverse order.
pub(super) fn flipped(cx: &mut Ctx, x: ValueId, axis: usize) -> Result<ValueId> {
    let sizes = cx.shape_of(x).0;
    if sizes[axis].is(0) {
        return Ok(x);
    }
    let (mut starts, mut steps) = (vec![Dim::constant(0); sizes.len()], vec![1; sizes.len()]);
    (starts[axis], steps[axis]) = (sizes[axis].clone() - 1.into(), -1);
    let op = Op::Slice {
        starts,
        sizes,
        steps,
    };
    cx.add(op, &[x])
}

/// A scan along axis 0 of `scanned`, its body built by `body` from the state and one element of
/// each sequence; `body` gives the new state, then the elements that are stacked.
pub(super) fn scan_over(
    cx: &mut Ctx,
    state: &[ValueId],
    scanned: &[ValueId],
    reverse: bool,
    body: impl FnOnce(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>>,
) -> Result<Vec<ValueId>> {
    let mut b = GraphBuilder::new("step");
    b.set_origin(&cx.path());
    let formals = step_inputs(cx, &mut b, state, scanned);
    for (i, v) in body(&mut b, &formals)?.into_iter().enumerate() {
        b.output(&format!("r{i}"), v);
    }
    let op = Op::Scan {
        carried: state.len(),
        scanned: scanned.len(),
        length: cx.shape_of(scanned[0])[0].clone(),
        reverse,
    };
    let args = [state, scanned].concat();
    cx.b().add_with_regions(op, &args, vec![b.into_graph()])
}

/// Inputs of a body: the state, and one element of each sequence.
pub(super) fn step_inputs(
    cx: &mut Ctx,
    b: &mut GraphBuilder,
    state: &[ValueId],
    scanned: &[ValueId],
) -> Vec<ValueId> {
    let mut formals = Vec::new();
    for (i, &v) in state.iter().chain(scanned).enumerate() {
        let ty = cx.type_of(v);
        let element = &ty.shape[usize::from(i >= state.len())..];
        formals.push(b.input(&format!("a{i}"), ty.dtype, element.to_vec()));
    }
    formals
}
