//! Rules of the ops: the shardings of operands for a sharding of the results.

use super::Sharding::{self, Partial, Replicated, Shard};
use super::sharding::is_zero;
use super::{Cut, Shares};
use crate::DType;
use crate::ir::{Graph, Layout, Node, Op, OpClass, ReduceKind, ScalarOp, ScatterKind, ValueId};
use std::collections::BTreeSet;

/// Extents of a node's operands and results.
struct Sizes {
    inputs: Vec<Vec<usize>>,
    outputs: Vec<Vec<usize>>,
    dtype: DType,
}

impl Sizes {
    /// `None` where extents are not known, or there is no result.
    fn of(g: &Graph, node: &Node) -> Option<Sizes> {
        let shapes = |values: &[_]| {
            let shape = |&v: &_| g.ty(v).static_shape();
            values.iter().map(shape).collect::<Option<Vec<_>>>()
        };
        Some(Sizes {
            inputs: shapes(&node.inputs)?,
            outputs: shapes(&node.outputs)?,
            dtype: g.ty(*node.outputs.first()?).dtype,
        })
    }

    fn rank(&self, operand: usize) -> usize {
        self.inputs[operand].len()
    }

    /// Shards of all operands.
    fn all(&self, axis: usize) -> Vec<Sharding> {
        vec![once(axis); self.inputs.len()]
    }

    /// Shards of the first operand.
    fn first(&self, axis: usize) -> Vec<Sharding> {
        let mut shardings = vec![Replicated; self.inputs.len()];
        shardings[0] = once(axis);
        shardings
    }

    /// The sharding of a broadcast operand, for a shard of the result.
    fn aligned(&self, operand: usize, axis: usize) -> Sharding {
        let shape = &self.inputs[operand];
        let missing = self.outputs[0].len() - shape.len();
        match axis.checked_sub(missing) {
            Some(own) if shape[own] != 1 => once(own),
            _ => Replicated,
        }
    }
}

/// Shards of an axis along which the batch lies once.
fn once(axis: usize) -> Sharding {
    Sharding::along(axis)
}

/// Shards along the same axes, with the batch so many times along each.
fn with_outer(shardings: Vec<Sharding>, outer: usize) -> Vec<Sharding> {
    let nested = |sharding| match sharding {
        Shard(Cut { axis, .. }) => Shard(Cut { axis, outer }),
        other => other,
    };
    shardings.into_iter().map(nested).collect()
}

/// The rules of a node.
pub(super) struct Rules<'a> {
    g: &'a Graph,
    node: &'a Node,
    shares: &'a Shares,
    sizes: Sizes,
    /// Times that the batch may lie along an axis of operands or results.
    outers: BTreeSet<usize>,
    /// True where partial sums are to stay: times common factors, and chosen by common conditions.
    keeps_sums: bool,
}

impl<'a> Rules<'a> {
    /// The rules of a node with operands of some shardings. `None` where extents are not known, or there is no result.
    pub(super) fn of(
        g: &'a Graph,
        node: &'a Node,
        shares: &'a Shares,
        made: impl Fn(ValueId) -> Sharding,
    ) -> Option<Rules<'a>> {
        let sizes = Sizes::of(g, node)?;
        let mut outers = BTreeSet::from([1]);
        for (i, &v) in node.inputs.iter().enumerate() {
            if let Shard(cut) = made(v) {
                outers.insert(cut.outer);
                if matches!(node.op, Op::Reshape { .. }) {
                    outers.extend(
                        reshaped(&sizes.inputs[i], cut, &sizes.outputs[0]).map(|c| c.outer),
                    );
                }
            }
        }
        Some(Rules {
            g,
            node,
            shares,
            sizes,
            outers,
            keeps_sums: false,
        })
    }

    /// The same where partial sums are to stay, or not.
    pub(super) fn with_sums(self, keeps_sums: bool) -> Rules<'a> {
        Rules { keeps_sums, ..self }
    }

    /// Cuts of all results.
    pub(super) fn cuts(&self) -> impl Iterator<Item = Cut> {
        let of_axis = |axis| self.outers.iter().map(move |&outer| Cut { axis, outer });
        let is_cut = |cut: &Cut| {
            let extent = |shape: &Vec<usize>| shape.get(cut.axis).copied();
            let mut outputs = self.sizes.outputs.iter();
            outputs.all(|shape| extent(shape).is_some_and(|n| self.shares.cuts(n, cut.outer)))
        };
        (0..self.sizes.outputs[0].len())
            .flat_map(of_axis)
            .filter(is_cut)
    }

    /// The ways to make results of a sharding: shardings of the operands, each by itself. Extents along shards are
    /// multiples of the batch.
    pub(super) fn operands(&self, sharding: Sharding) -> Vec<Vec<Sharding>> {
        let mut ways = match sharding {
            Replicated => vec![vec![Replicated; self.node.inputs.len()]],
            Shard(cut) => self.shard(cut).into_iter().collect(),
            Partial => self.partial(),
        };
        let fits = |(shape, sharding): (&Vec<usize>, &Sharding)| match sharding {
            Shard(cut) => {
                let extent = shape.get(cut.axis);
                extent.is_some_and(|&n| self.shares.cuts(n, cut.outer))
            }
            _ => true,
        };
        ways.retain(|way| self.sizes.inputs.iter().zip(way).all(fits));
        ways
    }

    /// Shardings of the operands for the shards of a result.
    fn shard(&self, cut: Cut) -> Option<Vec<Sharding>> {
        let (op, s) = (&self.node.op, &self.sizes);
        match op {
            Op::Reshape { .. } => {
                let from = |own: Cut| self.shares.cuts(s.inputs[0][own.axis], own.outer);
                let mut cuts = reshaped(&s.outputs[0], cut, &s.inputs[0]);
                return Some(vec![Shard(cuts.find(|own| from(*own))?)]);
            }
            // Positions of a shard are consecutive.
            Op::RandomBits { .. } => {
                let before: usize = s.outputs[0][..cut.axis].iter().product();
                return (before * cut.outer == 1).then(|| vec![Replicated]);
            }
            Op::Iota { .. } if cut.outer > 1 => return None,
            _ => {}
        }
        shard(op, s, cut.axis).map(|operands| with_outer(operands, cut.outer))
    }

    /// Shardings of the operands for partial sums of a result, each way by itself.
    fn partial(&self) -> Vec<Vec<Sharding>> {
        let (node, s) = (self.node, &self.sizes);
        if !sums_in_parts(s.dtype) {
            return Vec::new();
        }
        let sums = sums_of_shards(self.g, node, s);
        let with_outers = |way: Vec<Sharding>| {
            let all = self.outers.iter();
            all.map(move |&outer| with_outer(way.clone(), outer))
        };
        let mut ways: Vec<Vec<Sharding>> = sums.into_iter().flat_map(with_outers).collect();
        ways.extend(sum_in_groups(&node.op, s));
        if is_linear(&node.op, s) {
            ways.push(vec![Partial; node.inputs.len()]);
        }
        if self.keeps_sums {
            ways.extend(by_common(&node.op));
        }
        ways
    }
}

/// Shardings of the operands for the shards of a result along an axis.
fn shard(op: &Op, s: &Sizes, axis: usize) -> Option<Vec<Sharding>> {
    match op.class() {
        OpClass::Map => Some((0..s.inputs.len()).map(|i| s.aligned(i, axis)).collect()),
        OpClass::Source | OpClass::View => shard_of_view(op, s, axis),
        OpClass::Gather | OpClass::Scatter => shard_at_indices(op, s, axis),
        OpClass::Reduce | OpClass::Sort | OpClass::Scan => shard_of_lines(op, s, axis),
        OpClass::Contract | OpClass::Window | OpClass::Attention => shard_of_sums(op, s, axis),
        _ => None,
    }
}

fn shard_of_view(op: &Op, s: &Sizes, axis: usize) -> Option<Vec<Sharding>> {
    match op {
        // The start of a shard must be a number of the dtype, and sums with it, too.
        Op::Iota { dtype, shape, .. } => {
            let is_wide = has_wide_sums(*dtype) && *dtype != DType::F32;
            let is_exact = shape[axis].as_usize() < Some(1 << 24);
            (is_wide || *dtype == DType::F32 && is_exact).then(Vec::new)
        }
        Op::Broadcast { .. } => Some(vec![s.aligned(0, axis)]),
        Op::Transpose { perm } => Some(vec![once(perm[axis])]),
        Op::Slice { steps, .. } => {
            let is_whole = s.inputs[0][axis] == s.outputs[0][axis] && steps[axis] == 1;
            is_whole.then(|| vec![once(axis)])
        }
        Op::Pad { low, high, .. } if low[axis] == 0 && high[axis] == 0 => Some(s.first(axis)),
        Op::Concat { axis: along } if *along != axis => Some(s.all(axis)),
        _ => None,
    }
}

fn shard_at_indices(op: &Op, s: &Sizes, axis: usize) -> Option<Vec<Sharding>> {
    // Data and indices have rows for the same examples.
    let has_rows = || s.inputs[0].get(axis) == s.inputs[1].get(axis);
    match op {
        Op::CheckFinite => Some(s.all(axis)),
        Op::CheckIndices { extents } => {
            let is_row = extents.len() == 1 || axis + 1 < s.rank(0);
            is_row.then(|| s.all(axis))
        }
        Op::Gather { axis: along } => {
            let n_indices = s.rank(1);
            Some(match axis.checked_sub(*along) {
                None => vec![once(axis), Replicated],
                Some(i) if i < n_indices => vec![Replicated, once(i)],
                Some(_) => vec![once(axis + 1 - n_indices), Replicated],
            })
        }
        Op::GatherElements { axis: along } if *along == axis => Some(vec![Replicated, once(axis)]),
        Op::GatherElements { .. } => has_rows().then(|| s.all(axis)),
        Op::GatherNd { batch_dims } if axis < *batch_dims => Some(s.all(axis)),
        Op::GatherNd { .. } if axis + 1 < s.rank(1) => Some(vec![Replicated, once(axis)]),
        Op::ScatterElements { axis: along, .. } if *along != axis => {
            has_rows().then(|| s.all(axis))
        }
        _ => None,
    }
}

fn shard_of_lines(op: &Op, s: &Sizes, axis: usize) -> Option<Vec<Sharding>> {
    match op {
        Op::Reduce { axes, keepdims, .. } => Some(vec![once(operand_axis(axes, *keepdims, axis)?)]),
        Op::ArgReduce {
            axis: along,
            keepdims,
            ..
        } => Some(vec![once(operand_axis(&[*along], *keepdims, axis)?)]),
        Op::Softmax { axis: along, .. }
        | Op::TopK { axis: along, .. }
        | Op::CumSum { axis: along, .. } => (*along != axis).then(|| s.all(axis)),
        Op::LayerNorm { axis: from, .. } | Op::RmsNorm { axis: from, .. } => {
            (axis < *from).then(|| s.first(axis))
        }
        Op::Standardize { axes, .. } => (!axes.contains(&axis)).then(|| s.all(axis)),
        _ => None,
    }
}

fn shard_of_sums(op: &Op, s: &Sizes, axis: usize) -> Option<Vec<Sharding>> {
    match op {
        Op::MatMul => Some(product(s, axis)),
        Op::Conv { .. } | Op::ConvTranspose { .. } if axis == 0 => Some(s.first(0)),
        Op::Conv {
            layout, groups: 1, ..
        } if axis == channel_axis(*layout, s.rank(0)) => {
            let [_, out] = weight_axes(*layout, s.rank(1));
            Some(vec![Replicated, once(out)])
        }
        Op::Sample { .. } | Op::Pool { .. } | Op::MaxPoolGrad { .. } => {
            (axis == 0).then(|| s.all(0))
        }
        Op::Attention { .. } if axis + 2 < s.outputs[0].len() => {
            let mask = (3..s.inputs.len()).map(|i| s.aligned(i, axis));
            Some([once(axis); 3].into_iter().chain(mask).collect())
        }
        _ => None,
    }
}

/// Cuts of a shape between the same elements as a cut of another one, its reshaped operand or result: as many blocks lie before.
fn reshaped<'s>(from: &[usize], cut: Cut, to: &'s [usize]) -> impl Iterator<Item = Cut> + use<'s> {
    let before = |shape: &[usize], axis: usize| shape[..axis].iter().product::<usize>();
    let wanted = before(from, cut.axis) * cut.outer;
    let own = move |axis| {
        let blocks = before(to, axis);
        let is_there = blocks > 0 && wanted.is_multiple_of(blocks) && to[axis] > 1;
        is_there.then(|| Cut {
            axis,
            outer: wanted / blocks,
        })
    };
    (0..to.len()).rev().filter_map(own)
}

/// The operand axis of an axis that a reduction over `gone` keeps.
fn operand_axis(gone: &[usize], keepdims: bool, axis: usize) -> Option<usize> {
    if keepdims {
        return (!gone.contains(&axis)).then_some(axis);
    }
    let mut kept = (0..).filter(|i| !gone.contains(i));
    kept.nth(axis)
}

fn product(s: &Sizes, axis: usize) -> Vec<Sharding> {
    let rank = s.outputs[0].len();
    match rank - axis {
        1 => vec![Replicated, once(s.rank(1) - 1)],
        2 => vec![once(s.rank(0) - 2), Replicated],
        _ => vec![s.aligned(0, axis), s.aligned(1, axis)],
    }
}

/// The axis of channels of activations.
fn channel_axis(layout: Layout, rank: usize) -> usize {
    match layout {
        Layout::ChannelsFirst => 1,
        Layout::ChannelsLast => rank - 1,
    }
}

/// The axes of operand channels and of result channels of weights.
fn weight_axes(layout: Layout, rank: usize) -> [usize; 2] {
    match layout {
        Layout::ChannelsFirst => [1, 0],
        Layout::ChannelsLast => [rank - 2, rank - 1],
    }
}

/// True for dtypes whose sums may be rounded in parts. A part of an `f16` sum may overflow where the sum does not.
fn sums_in_parts(dtype: DType) -> bool {
    dtype == DType::BF16 || has_wide_sums(dtype)
}

/// True for dtypes with sums of their own width.
fn has_wide_sums(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::U32 | DType::U64
    )
}

/// True for linear ops: of partial sums they make partial sums.
fn is_linear(op: &Op, s: &Sizes) -> bool {
    match op {
        Op::Map(ScalarOp::Add | ScalarOp::Sub) => s.inputs[0] == s.inputs[1],
        Op::Map(ScalarOp::Neg) | Op::Reshape { .. } | Op::Transpose { .. } => true,
        Op::Reduce { kind, .. } => *kind == ReduceKind::Sum,
        _ => false,
    }
}

/// The ways to make partial sums of such ones and of common operands.
fn by_common(op: &Op) -> Vec<Vec<Sharding>> {
    match op {
        Op::Map(ScalarOp::Mul) => vec![vec![Partial, Replicated], vec![Replicated, Partial]],
        Op::Map(ScalarOp::Div) => vec![vec![Partial, Replicated]],
        Op::Map(ScalarOp::Select) => vec![vec![Replicated, Partial, Partial]],
        _ => Vec::new(),
    }
}

/// The way to sum over images of a convolution in groups, whose channels are all images of each group.
fn sum_in_groups(op: &Op, s: &Sizes) -> Option<Vec<Sharding>> {
    match *op {
        Op::Conv { layout, groups, .. } if groups > 1 => {
            let axis = channel_axis(layout, s.rank(0));
            let [inner, _] = weight_axes(layout, s.rank(1));
            let outer = groups;
            Some(vec![Shard(Cut { axis, outer }), once(inner)])
        }
        _ => None,
    }
}

/// The ways to sum over shards.
fn sums_of_shards(g: &Graph, node: &Node, s: &Sizes) -> Vec<Vec<Sharding>> {
    let scattered = |axis| vec![Replicated, once(axis), once(axis)];
    // Each device adds its updates to zeros.
    let adds_to_zeros = |kind| kind == ScatterKind::Add && is_zero(g, node.inputs[0]);
    match &node.op {
        Op::Reduce { kind, axes, .. } => {
            let is_real = matches!(s.dtype, DType::F32 | DType::F64);
            let is_sum = *kind == ReduceKind::Sum
                || *kind == ReduceKind::Mean && (s.dtype == DType::BF16 || is_real);
            let axes = axes.iter().filter(|_| is_sum);
            axes.map(|&axis| vec![once(axis)]).collect()
        }
        Op::MatMul => vec![vec![once(s.rank(0) - 1), once(s.rank(1) - 2)]],
        Op::Conv {
            layout, groups: 1, ..
        } => {
            let channels = channel_axis(*layout, s.rank(0));
            let [inner, _] = weight_axes(*layout, s.rank(1));
            vec![vec![once(channels), once(inner)]]
        }
        Op::ScatterNd { kind } if adds_to_zeros(*kind) => {
            (0..s.rank(1) - 1).map(scattered).collect()
        }
        Op::ScatterElements { axis, kind } if adds_to_zeros(*kind) => vec![scattered(*axis)],
        _ => Vec::new(),
    }
}
