//! Quantised models: products of dequantised operands become products of integers, and quantisation
//! without effect goes.
//!
//! A dequantised tensor is `(q - z) * s` of integers `q` of 8 bits. With one scale and one zero
//! point of the left operand, and a scale per output channel of a constant right operand,
//! `sum((a - za) sa (b - zb) sb) = sa sb sum((a - za)(b - zb))` (Jacob and others,
//! arXiv:1712.05877, section 2.3). The sum on the right is of integers: its terms are within 2^15
//! and it is exact while it fits 32 bits, which is checked. Three roundings are left: the sum's
//! when it becomes a float, that of the product of the scales, and the result's; so the error is
//! within `3 * 2^-24` of the result itself. The sum on the left rounds each operand, each product
//! and each partial sum, and its error is bounded by a multiple of the sum of all magnitudes only,
//! however much of that cancels.
//!
//! Requires constants as they were imported: folding would make floats of small weights. After, for
//! each product that was taken, the left operand is `sub(cast(q), z)` or `cast(q)` below views, the
//! right one an `i32` constant of signed bytes (whole numbers in depthwise convolutions). Reduced axes that are no whole words
//! are padded: see [`integers`].

mod integers;
mod weights;

use super::Rebuild;
use super::fold::ALWAYS_FOLD_BYTES;
use super::rebuild::each_node;
use crate::error::Result;
use crate::interp;
use crate::ir::{Graph, Node, NodeId, Op, ScalarOp, Type, ValueId};
use gristmill_kernels::depthwise::is_exact_in_f32;
use gristmill_runtime::{DType, Tensor};
use integers::Centred;
pub use integers::has_integer_form;
use weights::Weights;

/// Elements of the reduced axes are whole words of four bytes, which are multiplied at once.
const WORD: usize = 4;

/// A sum of this many products of a centred byte (up to 255) and a signed byte (up to 128) fits
/// `i32`.
const MAX_TERMS: usize = i32::MAX as usize / (255 * 128);

/// Elements of a row of an image of depthwise convolutions of bytes.
const MAX_ROW: usize = 1 << 19;

/// Nodes between a constant and a value computed from it.
const MAX_DEPTH: usize = 8;

/// Products of integers for products of dequantised operands, for CPUs: `f32` products whose left
/// operand is dequantised with one scale and whose right operand is a dequantised constant. Weights
/// of products of integers become constants of the same form.
///
/// Convolutions in groups of several channels stay in `f32`; those of integers become `f32` where it
/// is exact. Regions are gone through too.
pub fn integer_products(g: &Graph) -> Result<Graph> {
    each_node(g, &integer_products, &mut |r, g, id, node| {
        let made = match node.op {
            _ if g.ty(node.outputs[0]).dtype == DType::F32 => {
                Product::of(g, node)?.map(|p| p.emit(g, r, node))
            }
            Op::MatMul | Op::Conv { .. } => integers::product(g, r, node)?.map(Ok),
            _ => None,
        };
        match made {
            Some(y) => r.set(node.outputs[0], y?),
            None => r.copy(id, node)?,
        }
        Ok(())
    })
}

/// Removes quantisation that undoes a dequantisation with the same scale and zero point, views
/// between them included, and looks elements up before they are dequantised.
///
/// The first changes no bit while the scale is a normal number: `(q - z) s / s` is within two
/// roundings, far less than a half, of an integer. Regions are gone through too.
pub fn merge_quantization(g: &Graph) -> Result<Graph> {
    each_node(g, &merge_quantization, &mut |r, g, id, node| {
        let made = match node.op {
            Op::Map(ScalarOp::Cast(DType::U8 | DType::I8)) => requantized(g, r, node)?,
            Op::Gather { .. } => gathered(g, r, node)?,
            _ => None,
        };
        match made {
            Some(y) => r.set(node.outputs[0], y),
            None => r.copy(id, node)?,
        }
        Ok(())
    })
}

/// Transposes bytes instead of the 32-bit integers made of them: these are four times as large, and
/// products read bytes as they lie in memory.
pub fn transposed_bytes(g: &Graph) -> Result<Graph> {
    each_node(g, &transposed_bytes, &mut |r, g, id, node| {
        let moved = match node.op {
            Op::Transpose { .. } => before_widening(g, r, node, node.inputs[0])?,
            _ => None,
        };
        match moved {
            Some(y) => r.set(node.outputs[0], y),
            None => r.copy(id, node)?,
        }
        Ok(())
    })
}

/// The view `view` of `v`, taken of the bytes behind `v` and their single zero point.
fn before_widening(g: &Graph, r: &mut Rebuild, view: &Node, v: ValueId) -> Result<Option<ValueId>> {
    if let Some(bytes) = bytes_of(g, v) {
        let bytes = r.get(bytes);
        let bytes = r.graph.add_copy(view, &[bytes])?[0];
        return add_map(r, view, ScalarOp::Cast(DType::I32), &[bytes]).map(Some);
    }
    for op in [ScalarOp::Sub, ScalarOp::Add] {
        let Some(&[x, zero]) = map_of(g, v, op) else {
            continue;
        };
        if !g.ty(zero).shape.n_elements().is(1) || g.ty(x).shape != g.ty(v).shape {
            return Ok(None);
        }
        let Some(x) = before_widening(g, r, view, x)? else {
            return Ok(None);
        };
        let zero = add_single(r, view, zero)?;
        return add_map(r, view, op, &[x, zero]).map(Some);
    }
    Ok(None)
}

/// `views((bytes - zero) * scale)`.
struct Dequantization {
    x: Centred,
    /// In `f32`.
    scale: ValueId,
}

impl Dequantization {
    fn of(g: &Graph, v: ValueId) -> Option<Dequantization> {
        let (views, v) = below_views(g, v);
        let product = map_of(g, v, ScalarOp::Mul)?;
        let (x, scale) = match integers_of(g, product[0]) {
            Some(x) => (x, product[1]),
            None => (integers_of(g, product[1])?, product[0]),
        };
        let x = Centred::of(g, x, views)?;
        (g.ty(v).shape == g.ty(x.bytes).shape).then_some(Dequantization { x, scale })
    }

    /// True when one scale and one zero point are for all elements: views do not move these.
    fn is_uniform(&self, g: &Graph) -> bool {
        let single = |v: ValueId| g.ty(v).shape.n_elements().is(1);
        single(self.scale) && self.x.zero.is_none_or(single)
    }

    /// The known zero point and scale of all elements.
    fn parameters(&self, g: &Graph) -> Result<Option<(i32, f32)>> {
        let scale = number(g, self.scale)?;
        let zero = match self.x.zero {
            Some(z) => number(g, z)?,
            None => Some(0.0),
        };
        Ok(zero.zip(scale).map(|(z, s)| (z as i32, s as f32)))
    }
}

impl Dequantization {
    /// True when a quantisation with this zero point and divisor gives the bytes back.
    fn has_parameters(&self, g: &Graph, zero: Option<ValueId>, divisor: ValueId) -> Result<bool> {
        let zero = match zero {
            Some(z) => number(g, z)?,
            None => Some(0.0),
        };
        let (Some(zero), Some(divisor)) = (zero, number(g, divisor)?) else {
            return Ok(false);
        };
        let Some((z, s)) = self.parameters(g)? else {
            return Ok(false);
        };
        let same = zero == f64::from(z) && divisor == f64::from(s);
        // The largest product must be finite too.
        Ok(same && s.is_normal() && (s * 512.0).is_finite())
    }
}

/// The operands of `v` if it is that op.
fn map_of(g: &Graph, v: ValueId, op: ScalarOp) -> Option<&[ValueId]> {
    g.def_node(v)
        .filter(|n| n.op == Op::Map(op))
        .map(|n| &n.inputs[..])
}

/// The `i32` behind a conversion to `f32`.
fn integers_of(g: &Graph, v: ValueId) -> Option<ValueId> {
    let x = map_of(g, v, ScalarOp::Cast(DType::F32))?[0];
    (g.ty(x).dtype == DType::I32).then_some(x)
}

/// The bytes behind a conversion to `i32`.
fn bytes_of(g: &Graph, v: ValueId) -> Option<ValueId> {
    let x = map_of(g, v, ScalarOp::Cast(DType::I32))?[0];
    matches!(g.ty(x).dtype, DType::U8 | DType::I8).then_some(x)
}

/// The views that make `v`, last first, and the value below them.
fn below_views(g: &Graph, mut v: ValueId) -> (Vec<NodeId>, ValueId) {
    let mut views = Vec::new();
    while let crate::ir::Def::Node(id, _) = g.value(v).def {
        let node = g.node(id);
        if !matches!(
            node.op,
            Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } | Op::Broadcast { .. }
        ) {
            break;
        }
        views.push(id);
        v = node.inputs[0];
    }
    (views, v)
}

/// The same views, last first, of another value.
fn through(g: &Graph, r: &mut Rebuild, views: &[NodeId], mut v: ValueId) -> Result<ValueId> {
    for &view in views.iter().rev() {
        v = r.graph.add_copy(g.node(view), &[v])?[0];
    }
    Ok(v)
}

/// A new node where `like` is.
fn add(r: &mut Rebuild, like: &Node, op: Op, inputs: &[ValueId]) -> Result<ValueId> {
    let node = Node {
        op,
        regions: Vec::new(),
        ..like.clone()
    };
    Ok(r.graph.add_copy(&node, inputs)?[0])
}

fn add_map(r: &mut Rebuild, like: &Node, op: ScalarOp, inputs: &[ValueId]) -> Result<ValueId> {
    add(r, like, Op::Map(op), inputs)
}

/// The only element of an old value, of rank 0.
fn add_single(r: &mut Rebuild, like: &Node, v: ValueId) -> Result<ValueId> {
    let v = r.get(v);
    match r.graph.ty(v).rank() {
        0 => Ok(v),
        _ => add(r, like, Op::Reshape { shape: vec![] }, &[v]),
    }
}

/// The elements of a value that constants alone determine, by at most `depth` element-wise ops and
/// views.
fn evaluated(g: &Graph, v: ValueId, depth: usize) -> Result<Option<Tensor>> {
    if let Some(c) = g.constant(v) {
        return c.tensor().map(Some);
    }
    let is_plain = |n: &&Node| n.outputs.len() == 1 && n.regions.is_empty();
    let Some(node) = g.def_node(v).filter(|n| depth > 0 && is_plain(n)) else {
        return Ok(None);
    };
    if node.inputs.is_empty() || !matches!(node.op, Op::Map(_)) && below_views(g, v).0.is_empty() {
        return Ok(None);
    }
    let mut operands = Vec::with_capacity(node.inputs.len());
    for &x in &node.inputs {
        match evaluated(g, x, depth - 1)? {
            Some(t) => operands.push(t),
            None => return Ok(None),
        }
    }
    if !is_proportionate(g.ty(v), &operands) {
        return Ok(None);
    }
    applied(&node.op, &operands, g.ty(v))
}

/// The result of an op on constants; `None` for an element that the interpreter refuses, which
/// fails at run time.
fn applied(op: &Op, operands: &[Tensor], result: &Type) -> Result<Option<Tensor>> {
    match (op, operands) {
        (Op::Map(ScalarOp::Cast(DType::I32)), [x]) if x.dtype() == DType::I8 => {
            widened::<i8>(x).map(Some)
        }
        (Op::Map(ScalarOp::Cast(DType::I32)), [x]) if x.dtype() == DType::U8 => {
            widened::<u8>(x).map(Some)
        }
        // Weights are large, and their zero points mostly 0.
        (Op::Map(ScalarOp::Sub), [x, z]) if is_zero(z) => {
            let is_whole = result.static_shape().is_some_and(|s| s == x.shape());
            Ok(is_whole.then(|| x.clone()))
        }
        _ => Ok(interpreted(op, operands)),
    }
}

fn is_zero(integers: &Tensor) -> bool {
    integers.dtype().is_int() && integers.as_bytes().iter().all(|&b| b == 0)
}

fn interpreted(op: &Op, operands: &[Tensor]) -> Option<Tensor> {
    let operands: Vec<&Tensor> = operands.iter().collect();
    let results = interp::eval(op, &operands, &[]).ok();
    results.map(|mut results| results.remove(0))
}

/// True for a result not much larger than the operands. Bytes are widened to four; more is
/// a broadcast, which may be larger than the model by any factor.
fn is_proportionate(result: &Type, operands: &[Tensor]) -> bool {
    let operand_bytes: usize = operands.iter().map(Tensor::size_bytes).sum();
    let limit = operand_bytes.saturating_mul(4).max(ALWAYS_FOLD_BYTES);
    result.size_bytes().is_some_and(|bytes| bytes <= limit)
}

fn widened<T: gristmill_runtime::Element + Into<i32>>(x: &Tensor) -> Result<Tensor> {
    let wide: Vec<i32> = x.as_slice::<T>().iter().map(|&v| v.into()).collect();
    Ok(Tensor::from_slice(&wide, x.shape())?)
}

/// A value of one element as a number, if constants determine it.
fn number(g: &Graph, v: ValueId) -> Result<Option<f64>> {
    if !g.ty(v).shape.n_elements().is(1) {
        return Ok(None);
    }
    Ok(evaluated(g, v, MAX_DEPTH)?.map(|t| t.to_f64s()[0]))
}

/// Axes of a product.
struct ProductAxes {
    /// Axis of the result that counts output channels.
    channel: usize,
    /// Axis of the weights that counts output channels.
    weight_channel: usize,
    /// The reduced axis of elements side by side, in the left operand and in the weights; `None`
    /// for depthwise convolutions, whose channels are reduced apart.
    depth: Option<[usize; 2]>,
    /// Terms of each sum.
    n_terms: usize,
}

impl ProductAxes {
    /// True when the kernel takes these weights: signed bytes, or whole numbers whose sums are exact
    /// in `f32`.
    fn takes_weights(&self, weights: &Weights) -> Result<bool> {
        Ok(match self.depth {
            Some(_) => weights.are_signed_bytes(),
            None => is_exact_in_f32(weights.whole()?.as_slice(), self.n_terms),
        })
    }

    /// Weights whose reduced axis is padded to whole words.
    fn padded(&self, weights: Weights) -> Result<Weights> {
        match self.depth {
            Some([_, axis]) => weights.in_words(axis),
            None => weights.whole().map(Weights::Whole),
        }
    }

    /// Shape of `n` scales that broadcasts along the channels of a result of a rank.
    fn scale_shape(&self, n: usize, rank: usize) -> Vec<usize> {
        match n {
            1 => vec![],
            // The last axis needs no others behind it.
            _ if self.channel + 1 == rank => vec![n],
            _ => {
                let mut shape = vec![1; rank];
                shape[self.channel] = n;
                shape
            }
        }
    }
}

/// The axes of a product with integer kernels, perhaps once its depth is padded to words;
/// `None` for other nodes.
fn product_axes(g: &Graph, node: &Node) -> Option<ProductAxes> {
    let (x, w) = (*node.inputs.first()?, *node.inputs.get(1)?);
    let weights = g.ty(w).static_shape()?;
    let rank = g.ty(x).rank();
    let axes = match node.op {
        Op::MatMul if weights.len() == 2 && rank >= 2 => ProductAxes {
            channel: g.ty(node.outputs[0]).rank() - 1,
            weight_channel: 1,
            depth: Some([rank - 1, 0]),
            n_terms: weights[0],
        },
        Op::Conv {
            groups: 1,
            layout: crate::ir::Layout::ChannelsFirst,
            ..
        } if matches!(rank, 3..=5) => ProductAxes {
            channel: 1,
            weight_channel: 0,
            depth: Some([1, 1]),
            n_terms: weights[1..].iter().product(),
        },
        Op::Conv {
            groups,
            layout: crate::ir::Layout::ChannelsFirst,
            ..
        } if matches!(rank, 3..=5) && is_depthwise(g, x, &weights, groups) => ProductAxes {
            channel: 1,
            weight_channel: 0,
            depth: None,
            n_terms: weights[2..].iter().product(),
        },
        _ => return None,
    };
    let padding = match axes.depth {
        Some([_, axis]) => WORD * axes.n_terms / weights[axis].max(1),
        None => 0,
    };
    let fits = axes.n_terms > 0 && axes.n_terms + padding <= MAX_TERMS;
    fits.then_some(axes)
}

/// True when each channel of channels-first images `x` has a filter of its own.
/// The kernel holds some rows of the image, which must not be too long.
fn is_depthwise(g: &Graph, x: ValueId, weights: &[usize], groups: usize) -> bool {
    let shape = &g.ty(x).shape;
    let width = shape.last().and_then(|d| d.as_usize()).unwrap_or(0);
    let fits = width.saturating_mul(groups) <= MAX_ROW;
    fits && weights[..2] == [groups, 1] && shape[1].is(groups as i64)
}

/// A product of dequantised operands as one of integers.
struct Product {
    left: Centred,
    /// The padded axis of the left operand, and its elements.
    depth: Option<(usize, usize)>,
    /// As the kernel takes them.
    weights: Weights,
    /// Of the integer product: of rank 0 or shaped to broadcast along its channels.
    scale: Tensor,
    /// A scale that is known at run time only, which is a factor too.
    left_scale: Option<ValueId>,
}

impl Product {
    fn of(g: &Graph, node: &Node) -> Result<Option<Product>> {
        let Some(axes) = product_axes(g, node) else {
            return Ok(None);
        };
        let left = Dequantization::of(g, node.inputs[0]).filter(|d| d.is_uniform(g));
        let (Some(left), Some(right)) = (left, Dequantization::of(g, node.inputs[1])) else {
            return Ok(None);
        };
        let weights = constant_below_views(g, right.x.integers, &right.x.views)?;
        let Some(weights) = weights else {
            return Ok(None);
        };
        if !axes.takes_weights(&weights)? {
            return Ok(None);
        }
        let Some(mut scales) = channel_scales(g, &right, axes.weight_channel)? else {
            return Ok(None);
        };
        let known = number(g, left.scale)?;
        for s in &mut scales {
            *s *= known.unwrap_or(1.0) as f32;
        }
        if scales.iter().any(|s| !s.is_normal()) {
            return Ok(None);
        }
        let shape = axes.scale_shape(scales.len(), g.ty(node.outputs[0]).rank());
        Ok(Some(Product {
            depth: axes.depth.map(|[axis, of]| (axis, weights.shape()[of])),
            weights: axes.padded(weights)?,
            scale: Tensor::from_slice(&scales, &shape)?,
            left_scale: known.is_none().then_some(left.scale),
            left: left.x,
        }))
    }

    fn emit(self, g: &Graph, r: &mut Rebuild, node: &Node) -> Result<ValueId> {
        let x = self.left.in_words(g, r, node, self.depth)?;
        let w = r.graph.add_constant(self.weights.constant()?, &node.origin);
        let sum = add(r, node, node.op.clone(), &[x, w])?;
        let sum = add_map(r, node, ScalarOp::Cast(DType::F32), &[sum])?;
        let scale = r.graph.add_constant(self.scale, &node.origin);
        let y = add_map(r, node, ScalarOp::Mul, &[sum, scale])?;
        let Some(s) = self.left_scale else {
            return Ok(y);
        };
        let s = add_single(r, node, s)?;
        add_map(r, node, ScalarOp::Mul, &[y, s])
    }
}

fn are_signed_bytes(t: &Tensor) -> bool {
    t.as_slice::<i32>().iter().all(|&v| i8::try_from(v).is_ok())
}

/// Constant integers, under views (last first).
fn constant_below_views(g: &Graph, v: ValueId, views: &[NodeId]) -> Result<Option<Weights>> {
    if let Some(stored) = Weights::stored(g, v, views)? {
        return Ok(Some(stored));
    }
    let mut t = evaluated(g, v, MAX_DEPTH)?;
    for &view in views.iter().rev() {
        t = t.and_then(|below| interpreted(&g.node(view).op, &[below]));
    }
    t.map(Weights::of).transpose()
}

/// The scales of the output channels of constant weights, or the one of all; `None` when scales are
/// along another axis.
fn channel_scales(g: &Graph, weights: &Dequantization, channel: usize) -> Result<Option<Vec<f32>>> {
    let Some(mut scale) = evaluated(g, weights.scale, MAX_DEPTH)? else {
        return Ok(None);
    };
    if scale.len() == 1 {
        return Ok(Some(scale.as_slice::<f32>().to_vec()));
    }
    let leading = g
        .ty(weights.x.bytes)
        .rank()
        .saturating_sub(scale.shape().len());
    let shape = [&vec![1; leading], scale.shape()].concat();
    scale = scale.reshaped(&shape)?;
    for &view in weights.x.views.iter().rev() {
        // Other views would move the scales of an axis in ways that shapes do not tell.
        let op @ Op::Transpose { .. } = &g.node(view).op else {
            return Ok(None);
        };
        scale = interp::eval(op, &[&scale], &[])?.remove(0);
    }
    let mut extents = scale.shape().iter().enumerate();
    let along = extents.all(|(axis, &extent)| axis == channel || extent == 1);
    Ok(along.then(|| scale.as_slice::<f32>().to_vec()))
}

/// The bytes, if `node` quantises a value that was dequantised with the same parameters.
fn requantized(g: &Graph, r: &mut Rebuild, node: &Node) -> Result<Option<ValueId>> {
    let (rounded, offset) = match map_of(g, node.inputs[0], ScalarOp::Add) {
        Some(add) => (add[0], Some(add[1])),
        None => (node.inputs[0], None),
    };
    let quotient = map_of(g, rounded, ScalarOp::Round).and_then(|x| map_of(g, x[0], ScalarOp::Div));
    let Some(&[x, divisor]) = quotient else {
        return Ok(None);
    };
    let dtype = g.ty(node.outputs[0]).dtype;
    let Some(q) = Dequantization::of(g, x).filter(|q| g.ty(q.x.bytes).dtype == dtype) else {
        return Ok(None);
    };
    let whole = g.ty(x).shape == g.ty(node.outputs[0]).shape;
    if !whole || !q.has_parameters(g, offset, divisor)? {
        return Ok(None);
    }
    q.x.viewed_bytes(g, r).map(Some)
}

/// Elements of a constant that are dequantised after they are looked up.
fn gathered(g: &Graph, r: &mut Rebuild, node: &Node) -> Result<Option<ValueId>> {
    let is_table = |t: &Dequantization| {
        t.x.views.is_empty() && t.is_uniform(g) && g.constant(t.x.bytes).is_some()
    };
    let Some(table) = Dequantization::of(g, node.inputs[0]).filter(is_table) else {
        return Ok(None);
    };
    let inputs = [r.get(table.x.bytes), r.get(node.inputs[1])];
    let mut x = add(r, node, node.op.clone(), &inputs)?;
    x = add_map(r, node, ScalarOp::Cast(DType::I32), &[x])?;
    if let Some(zero) = table.x.zero {
        let zero = add_single(r, node, zero)?;
        x = add_map(r, node, ScalarOp::Sub, &[x, zero])?;
    }
    x = add_map(r, node, ScalarOp::Cast(DType::F32), &[x])?;
    let scale = add_single(r, node, table.scale)?;
    add_map(r, node, ScalarOp::Mul, &[x, scale]).map(Some)
}

#[cfg(test)]
mod tests;
