//! Convolutions and transposed convolutions.
//!
//! Gradients are computed channels first: by operands transposed from and to the other layout. The gradient of the input
//! is the transposed convolution of the same window, for strides of 1 as a convolution by the flipped weights. That of
//! the weights is a convolution of the input, its batch as channels, with the cotangent as weights, strides and
//! dilations exchanged.

use super::product::{Acc, accumulators};
use super::{Layout, Op, Window};
use crate::error::Result;
use crate::ir::axes::{channels_first, invert};
use crate::ir::dim::Dim;
use crate::ir::eval::Call;
use crate::ir::eval::view::{self, count};
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, channels, windows};
use crate::ir::types::Type;
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{eval, infer, work};
use gristmill_runtime::{DType, Tensor};

pub(super) fn conv_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
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
    infer::one(x.dtype, channels(&x.shape[0], wo, spatial, *layout))
}

pub(super) fn conv_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c.op,
        Conv {
            window,
            groups,
            layout
        }
    );
    if let Some(empty) = c.empty() {
        return empty;
    }
    let rank = c.shape.len();
    let to_first = channels_first(rank, *layout);
    let x = view::transpose(c.inputs[0], &to_first)?;
    let weights = view::transpose(c.inputs[1], &weights_first(rank, *layout))?;
    let shape: Vec<usize> = to_first.iter().map(|&p| c.shape[p]).collect();
    let y = match x.dtype().is_float() {
        true => conv_in::<f64>(&x, &weights, window, *groups, &shape),
        false => conv_in::<i64>(&x, &weights, window, *groups, &shape),
    };
    eval::one(view::transpose(&y?, &invert(&to_first)))
}

fn conv_in<A: Acc>(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    shape: &[usize],
) -> Result<Tensor> {
    let plane = Plane {
        wide: &x.shape()[2..],
        narrow: &shape[2..],
        kernel: &w.shape()[2..],
        window,
    };
    let (n_wide, n_narrow, taps) = (count(plane.wide), count(plane.narrow), count(plane.kernel));
    let (c_in, c_out) = (x.shape()[1], shape[1]);
    let (in_group, out_group) = (c_in / groups, c_out / groups);
    let mut out = accumulators::<A>(shape)?;
    let (x, weights) = (A::load(x), A::load(w));
    for image in 0..shape[0] {
        for o in 0..c_out {
            let to = &mut out[(image * c_out + o) * n_narrow..][..n_narrow];
            for i in 0..in_group {
                let channel = o / out_group * in_group + i;
                let from = &x[(image * c_in + channel) * n_wide..][..n_wide];
                let kernel = &weights[(o * in_group + i) * taps..][..taps];
                plane
                    .for_each(|tap, at, wide| to[at] = to[at].add_product(from[wide], kernel[tap]));
            }
        }
    }
    A::store(&out, w.dtype(), shape)
}

/// Geometry of one convolution over one plane: windows slide over the side `wide`, `narrow` is the side with one
/// element per window.
struct Plane<'a> {
    wide: &'a [usize],
    narrow: &'a [usize],
    kernel: &'a [usize],
    window: &'a Window,
}

impl Plane<'_> {
    /// Calls `f(tap, narrow offset, wide offset)` for every tap and window where the tap lies inside.
    fn for_each(&self, mut f: impl FnMut(usize, usize, usize)) {
        let taps = count(self.kernel);
        for tap in 0..taps {
            let (mut rest, rank) = (tap, self.kernel.len());
            let mut ranges = vec![0..0; rank];
            let mut shifts = vec![0isize; rank];
            for d in (0..rank).rev() {
                let at = (rest % self.kernel[d]) * self.window.dilations[d];
                rest /= self.kernel[d];
                let (stride, pad) = (self.window.strides[d], self.window.pads_low[d]);
                ranges[d] = valid_range(self.narrow[d], self.wide[d], stride, at, pad);
                shifts[d] = at as isize - pad as isize;
            }
            self.rows(&ranges, &shifts, 0, (0, 0), &mut |n, w| f(tap, n, w));
        }
    }

    fn rows(
        &self,
        ranges: &[std::ops::Range<usize>],
        shifts: &[isize],
        axis: usize,
        (narrow, wide): (usize, usize),
        f: &mut impl FnMut(usize, usize),
    ) {
        let (narrow, wide) = (narrow * self.narrow[axis], wide * self.wide[axis]);
        let is_last = axis + 1 == ranges.len();
        for o in ranges[axis].clone() {
            let at = (o * self.window.strides[axis]) as isize + shifts[axis];
            let next = (narrow + o, wide + at as usize);
            if is_last {
                f(next.0, next.1)
            } else {
                self.rows(ranges, shifts, axis + 1, next, f)
            }
        }
    }
}

/// Positions `o` in `0..n_out` whose tap `o * stride + tap - pad` lies in `0..n_in`.
fn valid_range(
    n_out: usize,
    n_in: usize,
    stride: usize,
    tap: usize,
    pad: usize,
) -> std::ops::Range<usize> {
    let first = pad.saturating_sub(tap).div_ceil(stride);
    let end = (n_in + pad).saturating_sub(tap).div_ceil(stride).min(n_out);
    first.min(end)..end
}

/// A multiply-add for each tap of one group.
pub(super) fn conv_work(s: &Sizes) -> Count {
    let weights = &s.operands[1].shape;
    let is_last = matches!(s.op, Op::Conv { layout, .. } if *layout == Layout::ChannelsLast);
    let out_axis = if is_last {
        weights.rank().saturating_sub(1)
    } else {
        0
    };
    let taps = weights.iter().enumerate().filter(|(i, _)| *i != out_axis);
    let taps = work::product(taps.map(|(_, d)| (s.extent)(d)));
    work::count(
        WorkClass::Conv,
        work::product([2, s.n_out(), taps].into_iter()),
    )
}

/// Window and groups of a convolution.
struct Conv {
    window: Window,
    groups: usize,
}

pub(super) fn conv_gradient(v: &mut Vjp) -> Result<()> {
    let Op::Conv {
        window,
        groups,
        layout,
    } = v.op()
    else {
        return v.refuse("the op is no convolution");
    };
    let of = Conv { window, groups };
    let (g, rank) = (v.g()?, v.ty(v.x(0)).rank());
    let (activations, weights) = (channels_first(rank, layout), weights_first(rank, layout));
    let g = v.transpose(g, activations.clone())?;
    let x = v.transpose(v.x(0), activations.clone())?;
    let w = v.transpose(v.x(1), weights.clone())?;
    if v.needs(0) {
        let gradient = input_gradient(v, &of, g, x, w)?;
        let gradient = v.transpose(gradient, invert(&activations))?;
        v.give(0, gradient)?;
    }
    if v.needs(1) {
        let gradient = weights_gradient(v, &of, x, g, w)?;
        let gradient = v.transpose(gradient, invert(&weights))?;
        v.give(1, gradient)?;
    }
    Ok(())
}

/// The permutation from weights of a layout to channels first.
fn weights_first(rank: usize, layout: Layout) -> Vec<usize> {
    match layout {
        Layout::ChannelsFirst => (0..rank).collect(),
        Layout::ChannelsLast => [rank - 1, rank - 2]
            .into_iter()
            .chain(0..rank - 2)
            .collect(),
    }
}

fn input_gradient(v: &mut Vjp, of: &Conv, g: ValueId, x: ValueId, w: ValueId) -> Result<ValueId> {
    let sizes = v.shape(w);
    match full_window(of, &sizes) {
        Some(window) => full_convolution(v, of.groups, window, g, w),
        None => transposed_convolution(v, of, g, x, w),
    }
}

/// Window of the inverse of a convolution of stride 1: padded so that each tap meets each element.
fn full_window(of: &Conv, sizes: &[Dim]) -> Option<Window> {
    let mut window = of.window.clone();
    for (i, size) in sizes[2..].iter().enumerate() {
        let reach = size
            .as_usize()?
            .checked_sub(1)?
            .checked_mul(window.dilations[i])?;
        window.pads_low[i] = reach.checked_sub(window.pads_low[i])?;
        window.pads_high[i] = reach.checked_sub(window.pads_high[i])?;
    }
    let is_dense = window.strides.iter().all(|&s| s == 1);
    let is_split = sizes[0].exact_div(&of.groups.into()).is_some();
    (is_dense && is_split).then_some(window)
}

/// A convolution with the flipped weights, inputs and outputs of each group exchanged. It has faster kernels than the
/// transposed convolution of the same result.
fn full_convolution(
    v: &mut Vjp,
    groups: usize,
    window: Window,
    g: ValueId,
    w: ValueId,
) -> Result<ValueId> {
    let w = flipped(v, w)?;
    let w = exchanged_in_groups(v, w, groups)?;
    let op = Op::Conv {
        window,
        groups,
        layout: Layout::ChannelsFirst,
    };
    v.emit(op, &[g, w])
}

/// The spatial axes reversed.
fn flipped(v: &mut Vjp, w: ValueId) -> Result<ValueId> {
    let sizes = v.shape(w);
    let last = |(i, n): (usize, &Dim)| match i {
        0 | 1 => Dim::constant(0),
        _ => n.clone() - 1.into(),
    };
    let op = Op::Slice {
        starts: sizes.iter().enumerate().map(last).collect(),
        steps: (0..sizes.len())
            .map(|i| if i < 2 { 1 } else { -1 })
            .collect(),
        sizes,
    };
    v.emit(op, &[w])
}

/// `[groups * m, c, ..]` as `[groups * c, m, ..]`.
fn exchanged_in_groups(v: &mut Vjp, w: ValueId, groups: usize) -> Result<ValueId> {
    let shape = v.shape(w);
    let n = Dim::from(groups);
    let Some(m) = shape[0].exact_div(&n).filter(|_| groups > 1) else {
        return exchanged(v, w);
    };
    let (c, spatial) = (shape[1].clone(), &shape[2..]);
    let split = [&[n, m.clone(), c.clone()], spatial].concat();
    let joined = [&[c.scale(groups as i64), m], spatial].concat();
    let w = v.reshape(w, &split)?;
    let perm = [0, 2, 1].into_iter().chain(3..split.len()).collect();
    let w = v.transpose(w, perm)?;
    v.reshape(w, &joined)
}

fn transposed_convolution(
    v: &mut Vjp,
    of: &Conv,
    g: ValueId,
    x: ValueId,
    w: ValueId,
) -> Result<ValueId> {
    let (extents, sizes) = (v.shape(x), v.shape(w));
    let mut output_pads = Vec::new();
    for i in 0..of.window.strides.len() {
        match left_over(&of.window, i, &extents[2 + i], &sizes[2 + i]) {
            Some(n) => output_pads.push(n),
            None => return v.refuse("the stride is not 1 along an axis of symbolic extent"),
        }
    }
    let op = Op::ConvTranspose {
        window: of.window.clone(),
        output_pads,
        groups: of.groups,
    };
    v.emit(op, &[g, w])
}

/// Elements of an axis behind the last window.
fn left_over(window: &Window, i: usize, extent: &Dim, size: &Dim) -> Option<usize> {
    let stride = window.strides[i];
    if stride == 1 {
        return Some(0);
    }
    let reach = (size.clone() - 1.into()).scale(window.dilations[i] as i64) + 1.into();
    let pads = window.pads_low[i].saturating_add(window.pads_high[i]);
    let room = extent.clone() + pads.into() - reach;
    Some(room.as_usize()? % stride)
}

/// The gradient of weights `w` by which `x` gives results of the cotangent `g`.
fn weights_gradient(v: &mut Vjp, of: &Conv, x: ValueId, g: ValueId, w: ValueId) -> Result<ValueId> {
    let sizes = v.shape(w);
    let images = batch_as_channels(v, x, of.groups, &sizes[1])?;
    let filters = exchanged(v, g)?;
    let op = Op::Conv {
        window: Window {
            strides: of.window.dilations.clone(),
            dilations: of.window.strides.clone(),
            ..of.window.clone()
        },
        groups: of.groups,
        layout: Layout::ChannelsFirst,
    };
    let all = v.emit(op, &[images, filters])?;
    let all = exchanged(v, all)?;
    let starts = vec![Dim::constant(0); sizes.len()];
    v.slice(all, starts, sizes)
}

/// `[n, groups * c, ..]` as `[c, groups * n, ..]`.
fn batch_as_channels(v: &mut Vjp, x: ValueId, groups: usize, c: &Dim) -> Result<ValueId> {
    if groups == 1 {
        return exchanged(v, x);
    }
    let shape = v.shape(x);
    let n = shape[0].clone();
    let spatial = &shape[2..];
    let grouped = [&[n.clone(), groups.into(), c.clone()], spatial].concat();
    let joined = [&[c.clone(), n.scale(groups as i64)], spatial].concat();
    let x = v.reshape(x, &grouped)?;
    let perm = [2, 1, 0].into_iter().chain(3..grouped.len()).collect();
    let x = v.transpose(x, perm)?;
    v.reshape(x, &joined)
}

/// The first two axes exchanged.
fn exchanged(v: &mut Vjp, x: ValueId) -> Result<ValueId> {
    let rank = v.ty(x).rank();
    let perm = [1, 0].into_iter().chain(2..rank).collect();
    v.transpose(x, perm)
}

pub(super) fn conv_transpose_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
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
    infer::one(x.dtype, out)
}

/// Every element of `x` adds its window of weights.
pub(super) fn conv_transpose_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, ConvTranspose { window, groups });
    if let Some(empty) = c.empty() {
        return empty;
    }
    let (x, weights) = (c.inputs[0], c.inputs[1]);
    eval::one(match x.dtype().is_float() {
        true => conv_transpose_in::<f64>(x, weights, window, *groups, c.shape),
        false => conv_transpose_in::<i64>(x, weights, window, *groups, c.shape),
    })
}

fn conv_transpose_in<A: Acc>(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    shape: &[usize],
) -> Result<Tensor> {
    let plane = Plane {
        wide: &shape[2..],
        narrow: &x.shape()[2..],
        kernel: &w.shape()[2..],
        window,
    };
    let (n_wide, n_narrow, taps) = (count(plane.wide), count(plane.narrow), count(plane.kernel));
    let (c_in, c_out) = (x.shape()[1], shape[1]);
    let (in_group, out_group) = (c_in / groups, c_out / groups);
    let mut out = accumulators::<A>(shape)?;
    let (from, weights) = (A::load(x), A::load(w));
    for image in 0..shape[0] {
        for i in 0..c_in {
            let x = &from[(image * c_in + i) * n_narrow..][..n_narrow];
            for o in 0..out_group {
                let channel = i / in_group * out_group + o;
                let to = &mut out[(image * c_out + channel) * n_wide..][..n_wide];
                let kernel = &weights[(i * out_group + o) * taps..][..taps];
                plane.for_each(|tap, at, wide| to[wide] = to[wide].add_product(x[at], kernel[tap]));
            }
        }
    }
    A::store(&out, w.dtype(), shape)
}

pub(super) fn conv_transpose_work(s: &Sizes) -> Count {
    let taps = s.product(s.operands[1].shape.get(1..).unwrap_or(&[]));
    work::count(
        WorkClass::Conv,
        work::product([2, s.n_in(), taps].into_iter()),
    )
}

/// A convolution of the cotangent, and the gradient of its weights with cotangent and input exchanged.
pub(super) fn conv_transpose_gradient(v: &mut Vjp) -> Result<()> {
    let Op::ConvTranspose { window, groups, .. } = v.op() else {
        return v.refuse("the op is no transposed convolution");
    };
    let of = Conv { window, groups };
    let (g, x, w) = (v.g()?, v.x(0), v.x(1));
    if v.needs(0) {
        let op = Op::Conv {
            window: of.window.clone(),
            groups,
            layout: Layout::ChannelsFirst,
        };
        let all = v.emit(op, &[g, w])?;
        let sizes = v.shape(x);
        let gradient = v.slice(all, vec![Dim::constant(0); sizes.len()], sizes)?;
        v.give(0, gradient)?;
    }
    if v.needs(1) {
        let gradient = weights_gradient(v, &of, g, x, w)?;
        v.give(1, gradient)?;
    }
    Ok(())
}
