//! Gradients of convolutions, computed channels first: by operands transposed from and to the other layout.
//!
//! The gradient of the input is the transposed convolution of the same window, for strides of 1 as a convolution by the
//! flipped weights. That of the weights is a convolution of the input, its batch as channels, with the cotangent as
//! weights, strides and dilations exchanged.

use super::super::axes::{channels_first, invert};
use super::super::dim::Dim;
use super::super::graph::ValueId;
use super::super::ops::{Layout, Op, Window};
use super::Vjp;
use crate::error::Result;

/// Window and groups of a convolution.
struct Conv {
    window: Window,
    groups: usize,
}

pub fn conv(v: &mut Vjp) -> Result<()> {
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

/// Window of the convolution that undoes one of stride 1: padded so that each tap meets each element.
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

/// A convolution of the cotangent, and the gradient of its weights with cotangent and input exchanged.
pub fn conv_transpose(v: &mut Vjp) -> Result<()> {
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
