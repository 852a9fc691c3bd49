//! Type rules: result types of each op from operand types. Messages name the expected and the found.

/// Binds the attributes of an op, or errors: the table pairs each rule with its op.
macro_rules! attrs {
    ($op:expr, $variant:ident { $($field:ident),* }) => {
        let Op::$variant { $($field),* , .. } = $op else {
            let (rule, op) = (stringify!($variant), $op.name());
            return Err(format!("type rule of {rule} used for {op}"));
        };
    };
}

mod control;

pub(super) use control::{
    extent, if_, loop_, non_max_suppression, non_zero, scan, segment, shaped, unique,
};

use super::attr::Attr;
use super::dim::Dim;
use super::graph::Graph;
use super::ops::{Layout, MAX_ROI_SAMPLES, Op, PadMode, PoolKind, ReduceKind, Window};
use super::types::{Shape, Type};
use control::{check_region, region_results};
use gristmill_runtime::DType;

/// Result types, or the reason why the operands do not fit.
pub type Inferred = Result<Vec<Type>, String>;

fn one(dtype: DType, shape: Vec<Dim>) -> Inferred {
    Ok(vec![Type {
        dtype,
        shape: Shape(shape),
    }])
}

/// NumPy broadcasting of two shapes. A symbolic extent against another is refused unless equal or one is 1.
pub fn broadcast_shapes(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, String> {
    let rank = a.len().max(b.len());
    let at = |s: &[Dim], i: usize| {
        (i + s.len())
            .checked_sub(rank)
            .map_or(Dim::constant(1), |j| s[j].clone())
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (x, y) if x.is(1) => Ok(y),
            (x, y) if y.is(1) => Ok(x),
            (x, y) => Err(format!(
                "shapes {} and {} do not broadcast: axis {i} has extents {x} and {y}",
                Shape(a.to_vec()),
                Shape(b.to_vec())
            )),
        })
        .collect()
}

fn check_axis(axis: usize, ty: &Type) -> Result<(), String> {
    if axis < ty.rank() {
        Ok(())
    } else {
        Err(format!("axis {axis} is out of range for {ty}"))
    }
}

fn check_axes(axes: &[usize], ty: &Type) -> Result<(), String> {
    axes.iter().try_for_each(|&a| check_axis(a, ty))?;
    if axes.windows(2).all(|w| w[0] < w[1]) {
        Ok(())
    } else {
        Err(format!("axes {axes:?} must be increasing"))
    }
}

pub(super) fn map(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let Op::Map(s) = op else {
        return Err("not an element-wise op".into());
    };
    let dtypes: Vec<DType> = args.iter().map(|t| t.dtype).collect();
    let dtype = s.result_dtype(&dtypes)?;
    let mut shape = Vec::new();
    for t in args {
        shape = broadcast_shapes(&shape, &t.shape)?;
    }
    one(dtype, shape)
}

pub(super) fn constant(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Constant { value });
    one(value.dtype(), Shape::of(value.shape()).0)
}

pub(super) fn iota(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Iota { dtype, shape, axis });
    let ty = Type {
        dtype: *dtype,
        shape: Shape(shape.clone()),
    };
    check_axis(*axis, &ty)?;
    if *dtype == DType::Bool {
        return Err("iota of bool".into());
    }
    Ok(vec![ty])
}

pub(super) fn random_bits(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, RandomBits { shape });
    let stream = &args[0];
    if stream.dtype != DType::I64 || !stream.shape.iter().all(|d| d.is(1)) {
        return Err(format!("expected a stream of one i64, got {stream}"));
    }
    one(DType::U32, shape.clone())
}

pub(super) fn broadcast(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Broadcast { shape });
    if broadcast_shapes(&args[0].shape, shape)? != *shape {
        return Err(format!(
            "{} does not broadcast to {}",
            args[0],
            Shape(shape.clone())
        ));
    }
    one(args[0].dtype, shape.clone())
}

pub(super) fn reshape(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Reshape { shape });
    let out = Type {
        dtype: args[0].dtype,
        shape: Shape(shape.clone()),
    };
    let (from, to) = (args[0].shape.n_elements(), out.shape.n_elements());
    // An unknown difference is checked once all symbols have values.
    if (from.clone() - to.clone())
        .as_const()
        .is_some_and(|n| n != 0)
    {
        return Err(format!("{} has {from} elements, {out} has {to}", args[0]));
    }
    Ok(vec![out])
}

pub(super) fn transpose(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Transpose { perm });
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    if sorted != (0..args[0].rank()).collect::<Vec<_>>() {
        return Err(format!(
            "{perm:?} is not a permutation of the axes of {}",
            args[0]
        ));
    }
    one(
        args[0].dtype,
        perm.iter().map(|&p| args[0].shape[p].clone()).collect(),
    )
}

pub(super) fn slice(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        Slice {
            starts,
            sizes,
            steps
        }
    );
    let rank = args[0].rank();
    if starts.len() != rank || sizes.len() != rank || steps.len() != rank || steps.contains(&0) {
        return Err(format!(
            "starts, sizes and non-zero steps must have one entry per axis of {}",
            args[0]
        ));
    }
    for i in 0..rank {
        let last = starts[i].clone() + (sizes[i].clone() - 1.into()).scale(steps[i]);
        let inside = |p: &Dim| {
            (p.clone()).as_const().is_none_or(|c| c >= 0)
                && (args[0].shape[i].clone() - p.clone())
                    .as_const()
                    .is_none_or(|c| c > 0)
        };
        // Nothing may begin behind the last element, but nowhere else outside.
        let after = starts[i].clone() - 1.into();
        let is_outside = match sizes[i].is(0) {
            true => !starts[i].is(0) && !inside(&after),
            false => !inside(&starts[i]) || !inside(&last),
        };
        if is_outside || sizes[i].as_const().is_some_and(|c| c < 0) {
            return Err(format!(
                "axis {i}: start {}, size {}, step {} leaves {}",
                starts[i], sizes[i], steps[i], args[0]
            ));
        }
    }
    one(args[0].dtype, sizes.clone())
}

pub(super) fn pad(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Pad { low, high, mode });
    if low.len() != args[0].rank() || high.len() != args[0].rank() {
        return Err(format!(
            "low and high must have one entry per axis of {}",
            args[0]
        ));
    }
    if (args.len() == 2) != (*mode == PadMode::Constant) {
        return Err("mode constant takes a pad value, the other modes take none".into());
    }
    if let Some(v) = args
        .get(1)
        .filter(|v| v.dtype != args[0].dtype || v.rank() != 0)
    {
        return Err(format!("pad value must be {}[], got {v}", args[0].dtype));
    }
    for (i, d) in args[0].shape.iter().enumerate() {
        let limit = d
            .as_const()
            .map(|c| if *mode == PadMode::Reflect { c - 1 } else { c });
        let most = low[i].max(high[i]) as i64;
        if matches!(mode, PadMode::Reflect | PadMode::Wrap)
            && limit.is_some_and(|l| most > l.max(0))
            || *mode == PadMode::Edge && limit == Some(0) && most > 0
        {
            return Err(format!(
                "axis {i}: {mode:?} padding by {most} needs more elements than {} has",
                args[0]
            )
            .to_lowercase());
        }
    }
    one(
        args[0].dtype,
        args[0]
            .shape
            .iter()
            .enumerate()
            .map(|(i, d)| d.clone() + low[i].saturating_add(high[i]).into())
            .collect(),
    )
}

pub(super) fn concat(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Concat { axis });
    check_axis(*axis, &args[0])?;
    let mut out = args[0].shape.0.clone();
    for t in &args[1..] {
        let fits = t.dtype == args[0].dtype
            && t.rank() == out.len()
            && (0..out.len()).all(|i| i == *axis || t.shape[i] == out[i]);
        if !fits {
            return Err(format!("cannot join {} and {t} along axis {axis}", args[0]));
        }
        out[*axis] = out[*axis].clone() + t.shape[*axis].clone();
    }
    one(args[0].dtype, out)
}

fn check_index_dtype(t: &Type) -> Result<(), String> {
    if matches!(t.dtype, DType::I32 | DType::I64) {
        Ok(())
    } else {
        Err(format!("indices must be i32 or i64, got {t}"))
    }
}

pub(super) fn gather(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Gather { axis });
    check_axis(*axis, &args[0])?;
    check_index_dtype(&args[1])?;
    let s = &args[0].shape;
    one(
        args[0].dtype,
        s[..*axis]
            .iter()
            .chain(args[1].shape.iter())
            .chain(&s[axis + 1..])
            .cloned()
            .collect(),
    )
}

pub(super) fn gather_elements(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, GatherElements { axis });
    check_axis(*axis, &args[0])?;
    check_index_dtype(&args[1])?;
    if args[0].rank() != args[1].rank() {
        return Err(format!(
            "data {} and indices {} must have the same rank",
            args[0], args[1]
        ));
    }
    check_bounded("indices", &args[1], &args[0], Some(*axis))?;
    one(args[0].dtype, args[1].shape.0.clone())
}

/// Every extent of `small` but that of `free` must be at most that of `large`, where both are known.
fn check_bounded(
    what: &str,
    small: &Type,
    large: &Type,
    free: Option<usize>,
) -> Result<(), String> {
    for i in (0..small.rank()).filter(|&i| Some(i) != free) {
        if (large.shape[i].clone() - small.shape[i].clone())
            .as_const()
            .is_some_and(|c| c < 0)
        {
            return Err(format!("{what} {small} exceed data {large} on axis {i}"));
        }
    }
    Ok(())
}

/// Length of the index tuples, checked against the data rank.
fn tuple_len(data: &Type, indices: &Type, batch_dims: usize) -> Result<usize, String> {
    check_index_dtype(indices)?;
    let last = indices
        .shape
        .last()
        .and_then(Dim::as_usize)
        .ok_or_else(|| format!("the last axis of indices {indices} must be a constant"))?;
    if batch_dims + last > data.rank()
        || batch_dims >= indices.rank()
        || data.shape[..batch_dims] != indices.shape[..batch_dims]
    {
        return Err(format!(
            "index tuples of {indices} after {batch_dims} batch axes do not fit data {data}"
        ));
    }
    Ok(last)
}

pub(super) fn gather_nd(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, GatherNd { batch_dims });
    let k = tuple_len(&args[0], &args[1], *batch_dims)?;
    let lead = &args[1].shape[..args[1].rank() - 1];
    one(
        args[0].dtype,
        lead.iter()
            .chain(&args[0].shape[batch_dims + k..])
            .cloned()
            .collect(),
    )
}

pub(super) fn check_indices(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, CheckIndices { extents });
    check_index_dtype(&args[0])?;
    let last = args[0].shape.last().and_then(Dim::as_usize);
    if extents.is_empty() || (extents.len() > 1 && last != Some(extents.len())) {
        let n = extents.len();
        return Err(format!("{n} extents for the last axis of {}", args[0]));
    }
    one(DType::I64, args[0].shape.0.clone())
}

pub(super) fn check_finite(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    match args[0].dtype.is_float() {
        true => Ok(vec![args[0].clone()]),
        false => Err(format!("expected floats, got {}", args[0])),
    }
}

pub(super) fn scatter_elements(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, ScatterElements { axis });
    check_axis(*axis, &args[0])?;
    check_index_dtype(&args[1])?;
    if args[1].shape != args[2].shape
        || args[0].rank() != args[1].rank()
        || args[0].dtype != args[2].dtype
    {
        return Err(format!(
            "data {}, indices {} and updates {} do not fit together",
            args[0], args[1], args[2]
        ));
    }
    check_bounded("indices", &args[1], &args[0], Some(*axis))?;
    Ok(vec![args[0].clone()])
}

pub(super) fn scatter_nd(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let k = tuple_len(&args[0], &args[1], 0)?;
    let lead = &args[1].shape[..args[1].rank() - 1];
    let expected: Vec<Dim> = lead.iter().chain(&args[0].shape[k..]).cloned().collect();
    if args[2].dtype != args[0].dtype || args[2].shape.0 != expected {
        return Err(format!(
            "updates must be {}{}, got {}",
            args[0].dtype,
            Shape(expected),
            args[2]
        ));
    }
    Ok(vec![args[0].clone()])
}

fn reduced(shape: &[Dim], axes: &[usize], keepdims: bool) -> Vec<Dim> {
    let kept = |(i, d): (usize, &Dim)| match axes.contains(&i) {
        true => keepdims.then(|| Dim::constant(1)),
        false => Some(d.clone()),
    };
    shape.iter().enumerate().filter_map(kept).collect()
}

pub(super) fn reduce(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        Reduce {
            kind,
            axes,
            keepdims
        }
    );
    check_axes(axes, &args[0])?;
    check_reduced(*kind, &args[0])?;
    one(args[0].dtype, reduced(&args[0].shape, axes, *keepdims))
}

fn check_reduced(kind: ReduceKind, ty: &Type) -> Result<(), String> {
    if ty.dtype == DType::Bool && !matches!(kind, ReduceKind::Max | ReduceKind::Min) {
        return Err(format!("{kind:?} of bool", kind = kind).to_lowercase());
    }
    Ok(())
}

pub(super) fn arg_reduce(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, ArgReduce { axis, keepdims });
    check_axis(*axis, &args[0])?;
    if args[0].shape[*axis].is(0) {
        return Err(format!("axis {axis} of {} is empty", args[0]));
    }
    one(DType::I64, reduced(&args[0].shape, &[*axis], *keepdims))
}

pub(super) fn softmax(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Softmax { axis });
    check_axis(*axis, &args[0])?;
    check_float(&args[0])?;
    Ok(vec![args[0].clone()])
}

fn check_float(t: &Type) -> Result<(), String> {
    if t.dtype.is_float() {
        Ok(())
    } else {
        Err(format!("expected a floating-point tensor, got {t}"))
    }
}

pub(super) fn norm(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let (Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. }) = op else {
        return Err("not a norm".into());
    };
    check_axis(*axis, &args[0])?;
    check_float(&args[0])?;
    for t in &args[1..] {
        if t.dtype != args[0].dtype || *t.shape != args[0].shape[*axis..] {
            return Err(format!(
                "scale and offset must be {}{}, got {t}",
                args[0].dtype,
                Shape(args[0].shape[*axis..].to_vec())
            ));
        }
    }
    Ok(vec![args[0].clone()])
}

pub(super) fn standardize(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Standardize { axes });
    check_axes(axes, &args[0])?;
    check_float(&args[0])?;
    Ok(vec![args[0].clone()])
}

pub(super) fn matmul(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let (a, b) = (&args[0], &args[1]);
    if a.rank() < 2 || b.rank() < 2 || a.dtype != b.dtype || a.dtype == DType::Bool {
        return Err(format!(
            "expected two numeric tensors of rank 2 or more and one dtype, got {a} and {b}"
        ));
    }
    let (ra, rb) = (a.rank(), b.rank());
    if a.shape[ra - 1] != b.shape[rb - 2] {
        return Err(format!(
            "inner dimensions differ: lhs {a} has k = {}, rhs {b} has k = {}",
            a.shape[ra - 1],
            b.shape[rb - 2]
        ));
    }
    let mut shape = broadcast_shapes(&a.shape[..ra - 2], &b.shape[..rb - 2])?;
    shape.push(a.shape[ra - 2].clone());
    shape.push(b.shape[rb - 1].clone());
    one(a.dtype, shape)
}

/// Extents of the windows' output along each spatial axis.
fn windows(spatial: &[Dim], size: &[Dim], w: &Window, ceil: bool) -> Result<Vec<Dim>, String> {
    let n = spatial.len();
    if [
        w.strides.len(),
        w.dilations.len(),
        w.pads_low.len(),
        w.pads_high.len(),
        size.len(),
    ] != [n; 5]
    {
        return Err(format!(
            "strides, dilations, pads and window need one entry for each of {n} spatial axes"
        ));
    }
    if w.strides.contains(&0) || w.dilations.contains(&0) {
        return Err("strides and dilations must be positive".into());
    }
    (0..n)
        .map(|i| {
            let reach = (size[i].clone() - 1.into()).scale(w.dilations[i] as i64) + 1.into();
            let room =
                spatial[i].clone() + w.pads_low[i].saturating_add(w.pads_high[i]).into() - reach;
            if room.as_const().is_some_and(|c| c < 0) {
                return Err(format!(
                    "spatial axis {i}: window of {} does not fit {} padded by {} and {}",
                    size[i], spatial[i], w.pads_low[i], w.pads_high[i]
                ));
            }
            let stride = w.strides[i] as i64;
            if !ceil {
                return Ok(room.floor_div(stride) + 1.into());
            }
            let out = room.ceil_div(stride) + 1.into();
            // A window that would start beyond the input and its low padding is dropped.
            let start =
                (out.clone() - 1.into()).scale(stride) - spatial[i].clone() - w.pads_low[i].into();
            Ok(if start.as_const().is_some_and(|c| c >= 0) {
                out - 1.into()
            } else {
                out
            })
        })
        .collect()
}

pub(super) fn conv(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        Conv {
            window,
            groups,
            layout
        }
    );
    let (x, w) = (&args[0], &args[1]);
    if x.rank() < 3
        || x.rank() != w.rank()
        || x.dtype != w.dtype
        || x.dtype == DType::Bool
        || *groups == 0
    {
        return Err(format!(
            "expected x and weights of one numeric dtype and one rank of at least 3, got {x} and {w}"
        ));
    }
    let n = x.rank() - 2;
    let (xc, xs, wo, wi, ws) = match layout {
        Layout::ChannelsFirst => (
            &x.shape[1],
            &x.shape[2..],
            &w.shape[0],
            &w.shape[1],
            &w.shape[2..],
        ),
        Layout::ChannelsLast => (
            &x.shape[n + 1],
            &x.shape[1..=n],
            &w.shape[n + 1],
            &w.shape[n],
            &w.shape[..n],
        ),
    };
    if *xc != wi.scale(*groups as i64) {
        return Err(format!(
            "x {x} has {xc} channels, weights {w} in {groups} groups take {}",
            wi.scale(*groups as i64)
        ));
    }
    if wo.exact_div(&(*groups).into()).is_none() {
        return Err(format!(
            "{wo} output channels do not divide into {groups} groups"
        ));
    }
    let spatial = windows(xs, ws, window, false)?;
    one(x.dtype, channels(&x.shape[0], wo, spatial, *layout))
}

fn channels(n: &Dim, c: &Dim, spatial: Vec<Dim>, layout: Layout) -> Vec<Dim> {
    let mut out = vec![n.clone()];
    match layout {
        Layout::ChannelsFirst => {
            out.push(c.clone());
            out.extend(spatial);
        }
        Layout::ChannelsLast => {
            out.extend(spatial);
            out.push(c.clone());
        }
    }
    out
}

pub(super) fn conv_transpose(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        ConvTranspose {
            window,
            output_pads,
            groups
        }
    );
    let (x, w) = (&args[0], &args[1]);
    let n = x.rank().saturating_sub(2);
    if n == 0
        || x.rank() != w.rank()
        || x.dtype != w.dtype
        || x.dtype == DType::Bool
        || *groups == 0
        || x.shape[1] != w.shape[0]
    {
        return Err(format!(
            "expected x [n, c, ..] and weights [c, m, ..] of one dtype, got {x} and {w}"
        ));
    }
    if [
        window.strides.len(),
        window.dilations.len(),
        window.pads_low.len(),
        window.pads_high.len(),
        output_pads.len(),
    ] != [n; 5]
    {
        return Err(format!(
            "strides, dilations, pads and output_pads need one entry for each of {n} spatial axes"
        ));
    }
    if x.shape[1].exact_div(&(*groups).into()).is_none() {
        return Err(format!(
            "{} channels do not divide into {groups} groups",
            x.shape[1]
        ));
    }
    let mut out = vec![x.shape[0].clone(), w.shape[1].scale(*groups as i64)];
    for (i, &extra) in output_pads.iter().enumerate() {
        let full = (x.shape[2 + i].clone() - 1.into()).scale(window.strides[i] as i64)
            + (w.shape[2 + i].clone() - 1.into()).scale(window.dilations[i] as i64)
            + extra.saturating_add(1).into();
        let d = full
            - window.pads_low[i]
                .saturating_add(window.pads_high[i])
                .into();
        if d.as_const().is_some_and(|c| c < 0) {
            return Err(format!(
                "spatial axis {i}: padding removes more than the {d} elements there are"
            ));
        }
        out.push(d);
    }
    one(x.dtype, out)
}

pub(super) fn pool(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        Pool {
            size,
            window,
            ceil,
            layout
        }
    );
    Ok(vec![pool_type(&args[0], size, window, *ceil, *layout)?])
}

fn pool_type(
    x: &Type,
    size: &[usize],
    window: &Window,
    ceil: bool,
    layout: Layout,
) -> Result<Type, String> {
    if x.rank() < 3 || x.dtype == DType::Bool || size.contains(&0) {
        return Err(format!(
            "expected a numeric tensor of rank 3 or more and a non-empty window, got {x}"
        ));
    }
    let n = x.rank() - 2;
    let (c, xs) = match layout {
        Layout::ChannelsFirst => (&x.shape[1], &x.shape[2..]),
        Layout::ChannelsLast => (&x.shape[n + 1], &x.shape[1..=n]),
    };
    let size: Vec<Dim> = size.iter().map(|&s| s.into()).collect();
    let spatial = windows(xs, &size, window, ceil)?;
    Ok(Type {
        dtype: x.dtype,
        shape: Shape(channels(&x.shape[0], c, spatial, layout)),
    })
}

pub(super) fn max_pool_indices(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, MaxPoolIndices { size, window, ceil });
    let values = pool_type(&args[0], size, window, *ceil, Layout::ChannelsFirst)?;
    let indices = Type {
        dtype: DType::I64,
        shape: values.shape.clone(),
    };
    Ok(vec![values, indices])
}

pub(super) fn max_pool_grad(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        MaxPoolGrad {
            size,
            window,
            ceil,
            layout
        }
    );
    let (x, g) = (&args[0], &args[1]);
    let pooled = pool_type(x, size, window, *ceil, *layout)?;
    if !x.dtype.is_float() || *g != pooled {
        return Err(format!(
            "expected floats, and a cotangent {pooled} of the pooled {x}, got {g}"
        ));
    }
    one(x.dtype, x.shape.to_vec())
}

pub(super) fn roi_align(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        RoiAlign {
            kind,
            size,
            sampling
        }
    );
    let (x, regions, images) = (&args[0], &args[1], &args[2]);
    check_index_dtype(images)?;
    let is_region = regions.rank() == 2 && regions.shape[1].is(4) && regions.dtype == x.dtype;
    if x.rank() != 4 || !x.dtype.is_float() || x.dtype.is_float8() || !is_region {
        return Err(format!(
            "expected floats [n, c, h, w] and regions [regions, 4] of their dtype, got {x} and {regions}"
        ));
    }
    if images.rank() != 1 || images.shape[0] != regions.shape[0] {
        return Err(format!(
            "expected an image per region of {regions}, got {images}"
        ));
    }
    let fits = size.len() == 2 && !size.contains(&0) && *sampling <= MAX_ROI_SAMPLES;
    if !fits || *kind == PoolKind::AvgIncludePad {
        return Err(format!(
            "expected two extents of bins, at most {MAX_ROI_SAMPLES} samples, and kind max or avg, got {size:?}, {sampling}, {}",
            kind.print()
        ));
    }
    let of_bins = size.iter().map(|&n| Dim::from(n));
    let lead = [regions.shape[0].clone(), x.shape[1].clone()];
    one(x.dtype, lead.into_iter().chain(of_bins).collect())
}

pub(super) fn attention(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let (q, k, v) = (&args[0], &args[1], &args[2]);
    let r = q.rank();
    let fits = r >= 2
        && k.rank() == r
        && v.rank() == r
        && q.dtype.is_float()
        && k.dtype == q.dtype
        && v.dtype == q.dtype;
    if !fits
        || q.shape[r - 1] != k.shape[r - 1]
        || k.shape[r - 2] != v.shape[r - 2]
        || k.shape[..r - 2] != q.shape[..r - 2]
        || v.shape[..r - 2] != q.shape[..r - 2]
    {
        return Err(format!("q {q}, k {k} and v {v} do not fit together"));
    }
    let mut scores = q.shape[..r - 1].to_vec();
    scores.push(k.shape[r - 2].clone());
    if let Some(m) = args.get(3)
        && (m.dtype != q.dtype || broadcast_shapes(&m.shape, &scores)? != scores)
    {
        return Err(format!(
            "mask {m} does not broadcast to {}{}",
            q.dtype,
            Shape(scores)
        ));
    }
    let mut out = q.shape[..r - 1].to_vec();
    out.push(v.shape[r - 1].clone());
    one(q.dtype, out)
}

pub(super) fn top_k(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, TopK { k, axis });
    check_axis(*axis, &args[0])?;
    if (args[0].shape[*axis].clone() - k.clone())
        .as_const()
        .is_some_and(|c| c < 0)
        || k.as_const().is_some_and(|c| c < 0)
    {
        return Err(format!(
            "k = {k} is out of range for axis {axis} of {}",
            args[0]
        ));
    }
    let mut shape = args[0].shape.clone();
    shape.0[*axis] = k.clone();
    Ok(vec![
        Type {
            dtype: args[0].dtype,
            shape: shape.clone(),
        },
        Type {
            dtype: DType::I64,
            shape,
        },
    ])
}

pub(super) fn cum_sum(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, CumSum { axis });
    check_axis(*axis, &args[0])?;
    if args[0].dtype == DType::Bool {
        return Err("cumulative sum of bool".into());
    }
    Ok(vec![args[0].clone()])
}

pub(super) fn read_variable(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        ReadVariable {
            dtype,
            shape,
            initial
        }
    );
    if let Some(initial) = initial {
        let (found, extents) = (initial.dtype(), Shape::of(initial.shape()));
        let differ = |(a, b): (&Dim, &Dim)| a.as_const().is_some_and(|a| !b.is(a));
        let is_other = shape.len() != extents.rank() || shape.iter().zip(&*extents).any(differ);
        if found != *dtype || is_other {
            let read = Shape(shape.clone());
            return Err(format!(
                "the initial value is {found}{extents}, is read as {dtype}{read}"
            ));
        }
    }
    one(*dtype, shape.clone())
}

pub(super) fn recv(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Recv { dtype, shape });
    one(*dtype, shape.clone())
}

pub(super) fn same(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    Ok(vec![args[0].clone()])
}

pub(super) fn all_reduce(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, AllReduce { kind });
    if let Some(other) = args.iter().find(|t| **t != args[0]) {
        return Err(format!("operands {} and {other} differ", args[0]));
    }
    check_reduced(*kind, &args[0])?;
    Ok(args.to_vec())
}

pub(super) fn all_reduce_rank(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(op, AllReduceRank { kind, rank });
    if *rank >= args.len() {
        return Err(format!("rank {rank} of {}", args.len()));
    }
    all_reduce(&Op::AllReduce { kind: *kind }, args, regions).map(|types| types[..1].to_vec())
}

pub(super) fn collective(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(
        op,
        Collective {
            kind,
            rank,
            devices
        }
    );
    if *rank >= devices.len() {
        return Err(format!("rank {rank} of {}", devices.len()));
    }
    all_reduce(&Op::AllReduce { kind: *kind }, args, regions)
}

pub(super) fn cluster(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(op, Cluster { anchor, root });
    let [body] = regions else {
        return Err(format!("expected 1 region, got {}", regions.len()));
    };
    check_region("body", body, args)?;
    for (name, node) in [("anchor", *anchor), ("root", *root)] {
        if node >= body.n_nodes().max(1) {
            let n = body.n_nodes();
            return Err(format!("the {name} is node {node} of a body of {n} nodes"));
        }
    }
    Ok(region_results(body))
}
