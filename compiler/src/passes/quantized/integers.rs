//! Products of integers in forms with kernels.
//!
//! Kernels multiply words of four bytes by signed bytes. A product of other operands with constant
//! weights is made of such products, each step of which is exact:
//! - A reduced axis of another extent is padded to whole words; the weights there are 0, so that it
//!   does not matter what the bytes are.
//! - Weights beyond signed bytes (unsigned ones far from their zero point) are a sum of constants of
//!   signed bytes, and the product is a sum of products.
//! - A convolution in groups is one of `f32` where no partial sum is beyond `2^24`, and otherwise
//!   the convolutions of its groups, joined, if these are few.

use super::weights::Weights;
use super::{
    DType, Graph, MAX_DEPTH, Node, NodeId, Op, ProductAxes, Rebuild, Result, ScalarOp, Tensor,
    ValueId, WORD, add, add_map, add_single, are_signed_bytes, below_views, bytes_of, evaluated,
    is_exact_in_f32, map_of, number, product_axes, through,
};
use crate::interp;
use crate::ir::{Def, Dim, Layout, PadMode};
use std::ops::Range;

/// Groups of a convolution that become convolutions of their own, at most.
const MAX_SPLIT: usize = 32;

/// `views(bytes - zero)` in `i32`.
pub(super) struct Centred {
    /// Of `u8` or `i8`.
    pub(super) bytes: ValueId,
    /// In `i32`; absent is 0.
    pub(super) zero: Option<ValueId>,
    /// The integers `bytes - zero`.
    pub(super) integers: ValueId,
    /// Views of them, last first.
    pub(super) views: Vec<NodeId>,
}

impl Centred {
    /// The integers `integers` under `views`.
    pub(super) fn of(g: &Graph, integers: ValueId, views: Vec<NodeId>) -> Option<Centred> {
        let (bytes, zero) = match map_of(g, integers, ScalarOp::Sub) {
            Some(sub) => (bytes_of(g, sub[0])?, Some(sub[1])),
            None => (bytes_of(g, integers)?, None),
        };
        let is_whole = g.ty(bytes).shape == g.ty(integers).shape;
        is_whole.then_some(Centred {
            bytes,
            zero,
            integers,
            views,
        })
    }

    /// Of a value that has one zero point, which is a byte.
    fn below(g: &Graph, v: ValueId) -> Result<Option<Centred>> {
        let (views, integers) = below_views(g, v);
        let Some(x) = Centred::of(g, integers, views) else {
            return Ok(None);
        };
        let dtype = g.ty(x.bytes).dtype;
        Ok(is_byte(g, x.zero, dtype)?.then_some(x))
    }

    /// The new value, with an axis of so many elements padded to whole words, if one is given.
    pub(super) fn in_words(
        &self,
        g: &Graph,
        r: &mut Rebuild,
        node: &Node,
        depth: Option<(usize, usize)>,
    ) -> Result<ValueId> {
        let padded = depth.filter(|(_, extent)| !extent.is_multiple_of(WORD));
        let Some((axis, extent)) = padded else {
            let integers = r.get(self.integers);
            return through(g, r, &self.views, integers);
        };
        let bytes = self.viewed_bytes(g, r)?;
        let bytes = bytes_in_words(r, node, bytes, (axis, extent))?;
        self.minus_zero(r, node, bytes)
    }

    /// The new bytes under the views.
    pub(super) fn viewed_bytes(&self, g: &Graph, r: &mut Rebuild) -> Result<ValueId> {
        let bytes = r.get(self.bytes);
        through(g, r, &self.views, bytes)
    }

    fn minus_zero(&self, r: &mut Rebuild, node: &Node, bytes: ValueId) -> Result<ValueId> {
        let x = add_map(r, node, ScalarOp::Cast(DType::I32), &[bytes])?;
        let Some(zero) = self.zero else { return Ok(x) };
        let zero = add_single(r, node, zero)?;
        add_map(r, node, ScalarOp::Sub, &[x, zero])
    }
}

/// Bytes with an axis of `extent` elements padded to whole words. The axis is the last one while it
/// is padded, since kernels read it so: the transposition back goes where they do.
fn bytes_in_words(
    r: &mut Rebuild,
    node: &Node,
    bytes: ValueId,
    (axis, extent): (usize, usize),
) -> Result<ValueId> {
    if extent.is_multiple_of(WORD) {
        return Ok(bytes);
    }
    let (dtype, rank) = (r.graph.ty(bytes).dtype, r.graph.ty(bytes).rank());
    if axis + 1 < rank && is_of_input(&r.graph, bytes) {
        return joined_words(r, node, bytes, (axis, extent));
    }
    let last = rank - 1;
    let there = (0..rank).filter(|&i| i != axis).chain([axis]).collect();
    let back = (0..axis).chain([last]).chain(axis..last).collect();
    let zero = Tensor::zeros(dtype, &[])?;
    let any = r.graph.add_constant(zero, &node.origin);
    let x = add(r, node, Op::Transpose { perm: there }, &[bytes])?;
    let x = add(r, node, padding(rank, last, extent), &[x, any])?;
    add(r, node, Op::Transpose { perm: back }, &[x])
}

/// True for element-wise functions of an input of the graph, which lie in memory as their axes are.
fn is_of_input(g: &Graph, v: ValueId) -> bool {
    let shape = &g.ty(v).shape;
    let mut v = v;
    while let Def::Node(id, _) = g.value(v).def {
        let node = g.node(id);
        let mut whole = node.inputs.iter().filter(|&&x| g.ty(x).shape == *shape);
        match (&node.op, whole.next(), whole.next()) {
            (Op::Map(_), Some(&x), None) => v = x,
            _ => return false,
        }
    }
    true
}

/// Bytes with an axis of `extent` elements made whole words by elements of their own, whatever these are:
/// that costs little where the axis is not the last.
fn joined_words(
    r: &mut Rebuild,
    node: &Node,
    bytes: ValueId,
    (axis, extent): (usize, usize),
) -> Result<ValueId> {
    let shape = r.graph.ty(bytes).shape.clone();
    let mut parts = vec![bytes];
    let mut missing = extent.next_multiple_of(WORD) - extent;
    while missing > 0 {
        let n = missing.min(extent);
        let mut sizes = shape.to_vec();
        sizes[axis] = n.into();
        let first = Op::Slice {
            starts: vec![0.into(); sizes.len()],
            steps: vec![1; sizes.len()],
            sizes,
        };
        parts.push(add(r, node, first, &[bytes])?);
        missing -= n;
    }
    add(r, node, Op::Concat { axis }, &parts)
}

/// True for a single zero point within the bytes' type.
fn is_byte(g: &Graph, zero: Option<ValueId>, dtype: DType) -> Result<bool> {
    let Some(zero) = zero else { return Ok(true) };
    if let Some(cast) = map_of(g, zero, ScalarOp::Cast(DType::I32)) {
        return Ok(g.ty(cast[0]).dtype == dtype && g.ty(zero).shape.n_elements().is(1));
    }
    let range = match dtype {
        DType::U8 => 0.0..=255.0,
        _ => -128.0..=127.0,
    };
    Ok(number(g, zero)?.is_some_and(|z| range.contains(&z)))
}

/// Pads an axis of `extent` elements to whole words.
fn padding(rank: usize, axis: usize, extent: usize) -> Op {
    let mut high = vec![0; rank];
    high[axis] = extent.next_multiple_of(WORD) - extent;
    Op::Pad {
        low: vec![0; rank],
        high,
        mode: PadMode::Constant,
    }
}

/// Weights with `axis` padded to whole words by zeros.
pub(super) fn padded_words(weights: Tensor, axis: usize) -> Result<Tensor> {
    let shape = weights.shape();
    if shape[axis].is_multiple_of(WORD) {
        return Ok(weights);
    }
    let zero = Tensor::zeros(weights.dtype(), &[])?;
    let pad = padding(shape.len(), axis, shape[axis]);
    Ok(interp::eval(&pad, &[&weights, &zero], &[])?.remove(0))
}

/// A product of integers whose weights constants determine, as kernels take it; `None` for others.
pub(super) fn product(g: &Graph, r: &mut Rebuild, node: &Node) -> Result<Option<ValueId>> {
    if g.ty(node.outputs[0]).dtype != DType::I32 {
        return Ok(None);
    }
    let left = Centred::below(g, node.inputs[0])?;
    let (Some(left), Some(weights)) = (left, constant_weights(g, node.inputs[1])?) else {
        return Ok(None);
    };
    if let Some(axes) = product_axes(g, node)
        && (axes.depth.is_some() || axes.takes_weights(&weights)?)
    {
        return in_words(g, r, node, (&axes, &left), weights).map(Some);
    }
    match grouped(node) {
        Some(groups) => in_groups(g, r, node, &left, weights.whole()?, groups),
        None => Ok(None),
    }
}

/// Weights that constants determine, at most as far from 0 as a byte is from its zero point.
fn constant_weights(g: &Graph, v: ValueId) -> Result<Option<Weights>> {
    let (views, integers) = below_views(g, v);
    if let Some(stored) = Weights::stored(g, integers, &views)? {
        return Ok(Some(stored));
    }
    let whole = evaluated(g, v, MAX_DEPTH)?.filter(are_centred_bytes);
    whole.map(Weights::of).transpose()
}

/// True for a product of integers for which [`integer_products`](super::integer_products) finds a form
/// with kernels, by types alone: weights may still be inputs of the graph.
pub fn has_integer_form(g: &Graph, node: &Node) -> bool {
    let &[x, w] = &node.inputs[..] else {
        return false;
    };
    let is_product = matches!(node.op, Op::MatMul | Op::Conv { .. });
    if !is_product || g.ty(node.outputs[0]).dtype != DType::I32 {
        return false;
    }
    let (views, integers) = below_views(g, w);
    let weights = Centred::of(g, integers, views);
    let are_constant =
        weights.is_some_and(|w| g.def_node(w.bytes).is_none_or(|n| n.inputs.is_empty()));
    let in_groups = || {
        let shape = g.ty(w).static_shape()?;
        let per_channel: usize = shape[1..].iter().product();
        let splits = are_worth_splitting(grouped(node)?, shape[1]);
        Some(splits || is_exact_in_f32(&[u8::MAX.into()], per_channel))
    };
    let has_form = match product_axes(g, node) {
        Some(axes) if axes.depth.is_some() => true,
        _ => in_groups().unwrap_or(false),
    };
    are_constant && has_form && matches!(Centred::below(g, x), Ok(Some(_)))
}

/// The sum of the products of padded bytes by constants of signed bytes.
fn in_words(
    g: &Graph,
    r: &mut Rebuild,
    node: &Node,
    (axes, left): (&ProductAxes, &Centred),
    weights: Weights,
) -> Result<ValueId> {
    let depth = axes.depth.map(|[axis, of]| (axis, weights.shape()[of]));
    let x = left.in_words(g, r, node, depth)?;
    let weights = axes.padded(weights)?;
    if depth.is_none() {
        let w = r.graph.add_constant(weights.constant()?, &node.origin);
        return add(r, node, node.op.clone(), &[x, w]);
    }
    product_of(r, node, x, weights)
}

/// The product of whole words by any constant.
fn product_of(r: &mut Rebuild, node: &Node, x: ValueId, weights: Weights) -> Result<ValueId> {
    let mut sum = None;
    for part in weights.parts()? {
        let w = r.graph.add_constant(part.constant()?, &node.origin);
        let y = add(r, node, ungrouped(node), &[x, w])?;
        sum = Some(match sum {
            Some(sum) => add_map(r, node, ScalarOp::Add, &[sum, y])?,
            None => y,
        });
    }
    Ok(sum.expect("weights have one part or several"))
}

/// Tensors of signed bytes whose sum is `weights`: one where these are signed bytes, up to three for
/// bytes minus a zero point.
pub(super) fn signed_bytes(weights: Tensor) -> Result<Vec<Tensor>> {
    let mut parts = Vec::new();
    let mut rest = weights;
    while !are_signed_bytes(&rest) {
        let near = |x: i32| x.clamp(i8::MIN.into(), i8::MAX.into());
        let elements = rest.as_slice::<i32>();
        let made = |f: &dyn Fn(i32) -> i32| {
            let made: Vec<i32> = elements.iter().map(|&x| f(x)).collect();
            Tensor::from_slice(&made, rest.shape())
        };
        parts.push(made(&near)?);
        rest = made(&|x| x - near(x))?;
    }
    parts.push(rest);
    Ok(parts)
}

/// True when all weights are distances of bytes from a zero point.
fn are_centred_bytes(weights: &Tensor) -> bool {
    let most = u32::from(u8::MAX);
    weights
        .as_slice::<i32>()
        .iter()
        .all(|w| w.unsigned_abs() <= most)
}

/// True for a convolution with few enough groups of enough channels to compute one by one.
fn are_worth_splitting(groups: usize, n_in: usize) -> bool {
    groups <= MAX_SPLIT && n_in >= WORD
}

/// The groups of a channels-first convolution in several groups.
fn grouped(node: &Node) -> Option<usize> {
    match node.op {
        Op::Conv {
            groups,
            layout: Layout::ChannelsFirst,
            ..
        } if groups > 1 => Some(groups),
        _ => None,
    }
}

/// The same op without groups.
fn ungrouped(node: &Node) -> Op {
    match node.op.clone() {
        Op::Conv { window, layout, .. } => Op::Conv {
            window,
            groups: 1,
            layout,
        },
        op => op,
    }
}

/// A convolution in groups: in `f32` where that is exact, else one by one.
fn in_groups(
    g: &Graph,
    r: &mut Rebuild,
    node: &Node,
    left: &Centred,
    weights: Tensor,
    groups: usize,
) -> Result<Option<ValueId>> {
    let per_channel: usize = weights.shape()[1..].iter().product();
    if per_channel == 0 {
        return Ok(None);
    }
    if is_exact_in_f32(weights.as_slice(), per_channel) {
        return in_floats(r, node, &weights).map(Some);
    }
    let n_in = weights.shape()[1];
    if per_channel > super::MAX_TERMS / 2 || !are_worth_splitting(groups, n_in) {
        return Ok(None);
    }
    let bytes = left.viewed_bytes(g, r)?;
    let mut parts = Vec::with_capacity(groups);
    for group in 0..groups {
        let part = channels(r, node, bytes, group * n_in..(group + 1) * n_in)?;
        let part = bytes_in_words(r, node, part, (1, n_in))?;
        let part = left.minus_zero(r, node, part)?;
        let weights = padded_words(outputs_of(&weights, group, groups)?, 1)?;
        parts.push(product_of(r, node, part, Weights::of(weights)?)?);
    }
    add(r, node, Op::Concat { axis: 1 }, &parts).map(Some)
}

/// The convolution in `f32`, which must be exact.
fn in_floats(r: &mut Rebuild, node: &Node, weights: &Tensor) -> Result<ValueId> {
    let floats: Vec<f32> = weights
        .as_slice::<i32>()
        .iter()
        .map(|&w| w as f32)
        .collect();
    let floats = Tensor::from_slice(&floats, weights.shape())?;
    let w = r.graph.add_constant(floats, &node.origin);
    let x = r.get(node.inputs[0]);
    let x = add_map(r, node, ScalarOp::Cast(DType::F32), &[x])?;
    let y = add(r, node, node.op.clone(), &[x, w])?;
    add_map(r, node, ScalarOp::Cast(DType::I32), &[y])
}

/// Some channels of channels-first images.
fn channels(r: &mut Rebuild, node: &Node, images: ValueId, range: Range<usize>) -> Result<ValueId> {
    let mut sizes = r.graph.ty(images).shape.to_vec();
    let mut starts = vec![Dim::constant(0); sizes.len()];
    let steps = vec![1; sizes.len()];
    starts[1] = Dim::constant(range.start as i64);
    sizes[1] = Dim::constant(range.len() as i64);
    let slice = Op::Slice {
        starts,
        sizes,
        steps,
    };
    add(r, node, slice, &[images])
}

/// The weights of a group's output channels.
fn outputs_of(weights: &Tensor, group: usize, groups: usize) -> Result<Tensor> {
    let mut shape = weights.shape().to_vec();
    shape[0] /= groups;
    let n: usize = shape.iter().product();
    let elements = &weights.as_slice::<i32>()[group * n..(group + 1) * n];
    Ok(Tensor::from_slice(elements, &shape)?)
}
