//! Rules of the ops: the shardings of operands for a sharding of the results.

use super::Sharding::{self, Partial, Replicated, Shard};
use super::Shares;
use super::sharding::is_zero;
use crate::DType;
use crate::ir::{Graph, Layout, Node, Op, OpClass, ReduceKind, ScalarOp, ScatterKind};

/// Extents of a node's operands and results.
pub(super) struct Sizes {
    inputs: Vec<Vec<usize>>,
    outputs: Vec<Vec<usize>>,
    dtype: DType,
}

impl Sizes {
    /// `None` where extents are not known, or there is no result.
    pub(super) fn of(g: &Graph, node: &Node) -> Option<Sizes> {
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

    /// Axes along which all results may be cut.
    pub(super) fn cut_axes<'s>(&'s self, shares: &'s Shares) -> impl Iterator<Item = usize> + 's {
        let cuts = |axis: &usize| {
            let extent = |shape: &Vec<usize>| shape.get(*axis).copied();
            let mut outputs = self.outputs.iter();
            outputs.all(|shape| extent(shape).is_some_and(|n| shares.cuts(n)))
        };
        (0..self.outputs[0].len()).filter(cuts)
    }

    fn rank(&self, operand: usize) -> usize {
        self.inputs[operand].len()
    }

    /// Shards of all operands.
    fn all(&self, axis: usize) -> Vec<Sharding> {
        vec![Shard(axis); self.inputs.len()]
    }

    /// Shards of the first operand.
    fn first(&self, axis: usize) -> Vec<Sharding> {
        let mut shardings = vec![Replicated; self.inputs.len()];
        shardings[0] = Shard(axis);
        shardings
    }

    /// The sharding of a broadcast operand, for a shard of the result.
    fn aligned(&self, operand: usize, axis: usize) -> Sharding {
        let shape = &self.inputs[operand];
        let missing = self.outputs[0].len() - shape.len();
        match axis.checked_sub(missing) {
            Some(own) if shape[own] != 1 => Shard(own),
            _ => Replicated,
        }
    }
}

/// The ways to make results of a sharding: shardings of the operands, each by itself. All extents along
/// shards are multiples of the batch.
pub(super) fn operands(
    g: &Graph,
    node: &Node,
    sizes: &Sizes,
    sharding: Sharding,
    shares: &Shares,
) -> Vec<Vec<Sharding>> {
    let mut ways = match sharding {
        Replicated => vec![vec![Replicated; node.inputs.len()]],
        Shard(axis) => shard(&node.op, sizes, axis, shares).into_iter().collect(),
        Partial => partial(g, node, sizes),
    };
    let fits = |(shape, sharding): (&Vec<usize>, &Sharding)| match sharding {
        Shard(axis) => shape.get(*axis).is_some_and(|&n| shares.cuts(n)),
        _ => true,
    };
    ways.retain(|way| sizes.inputs.iter().zip(way).all(fits));
    ways
}

/// Shardings of the operands for the shards of a result along an axis.
fn shard(op: &Op, s: &Sizes, axis: usize, shares: &Shares) -> Option<Vec<Sharding>> {
    match op.class() {
        OpClass::Map => Some((0..s.inputs.len()).map(|i| s.aligned(i, axis)).collect()),
        OpClass::Source | OpClass::View => shard_of_view(op, s, axis, shares),
        OpClass::Gather | OpClass::Scatter => shard_at_indices(op, s, axis),
        OpClass::Reduce | OpClass::Sort | OpClass::Scan => shard_of_lines(op, s, axis),
        OpClass::Contract | OpClass::Window | OpClass::Attention => shard_of_sums(op, s, axis),
        _ => None,
    }
}

fn shard_of_view(op: &Op, s: &Sizes, axis: usize, shares: &Shares) -> Option<Vec<Sharding>> {
    match op {
        // The start of a shard must be a number of the dtype, and sums with it, too.
        Op::Iota { dtype, shape, .. } => {
            let is_wide = sums_in_parts(*dtype) && *dtype != DType::F32;
            let is_exact = shape[axis].as_usize() < Some(1 << 24);
            (is_wide || *dtype == DType::F32 && is_exact).then(Vec::new)
        }
        Op::Broadcast { .. } => Some(vec![s.aligned(0, axis)]),
        Op::Transpose { perm } => Some(vec![Shard(perm[axis])]),
        Op::Reshape { .. } => Some(vec![Shard(reshaped(s, axis, shares)?)]),
        Op::Slice { steps, .. } => {
            let is_whole = s.inputs[0][axis] == s.outputs[0][axis] && steps[axis] == 1;
            is_whole.then(|| vec![Shard(axis)])
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
                None => vec![Shard(axis), Replicated],
                Some(i) if i < n_indices => vec![Replicated, Shard(i)],
                Some(_) => vec![Shard(axis + 1 - n_indices), Replicated],
            })
        }
        Op::GatherElements { axis: along } if *along == axis => Some(vec![Replicated, Shard(axis)]),
        Op::GatherElements { .. } => has_rows().then(|| s.all(axis)),
        Op::GatherNd { batch_dims } if axis < *batch_dims => Some(s.all(axis)),
        Op::GatherNd { .. } if axis + 1 < s.rank(1) => Some(vec![Replicated, Shard(axis)]),
        Op::ScatterElements { axis: along, .. } if *along != axis => {
            has_rows().then(|| s.all(axis))
        }
        _ => None,
    }
}

fn shard_of_lines(op: &Op, s: &Sizes, axis: usize) -> Option<Vec<Sharding>> {
    match op {
        Op::Reduce { axes, keepdims, .. } => {
            Some(vec![Shard(operand_axis(axes, *keepdims, axis)?)])
        }
        Op::ArgReduce {
            axis: along,
            keepdims,
            ..
        } => Some(vec![Shard(operand_axis(&[*along], *keepdims, axis)?)]),
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
            Some(vec![Replicated, Shard(out)])
        }
        Op::DeformColumns { .. } | Op::Pool { .. } | Op::MaxPoolGrad { .. } => {
            (axis == 0).then(|| s.all(0))
        }
        Op::Attention { .. } if axis + 2 < s.outputs[0].len() => {
            let mask = (3..s.inputs.len()).map(|i| s.aligned(i, axis));
            Some([Shard(axis); 3].into_iter().chain(mask).collect())
        }
        _ => None,
    }
}

/// The operand axis whose shards are the shards of a reshaped result: as many elements lie before both.
fn reshaped(s: &Sizes, axis: usize, shares: &Shares) -> Option<usize> {
    let before = |shape: &[usize], axis: usize| shape[..axis].iter().product::<usize>();
    let (from, to) = (&s.inputs[0], &s.outputs[0]);
    let wanted = before(to, axis);
    (0..from.len())
        .find(|&own| before(from, own) == wanted && from[own] > 1 && shares.cuts(from[own]))
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
        1 => vec![Replicated, Shard(s.rank(1) - 1)],
        2 => vec![Shard(s.rank(0) - 2), Replicated],
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

/// True for dtypes whose sums may be rounded in parts.
fn sums_in_parts(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::U32 | DType::U64
    )
}

/// Shardings of the operands for partial sums of a result, each way by itself.
fn partial(g: &Graph, node: &Node, s: &Sizes) -> Vec<Vec<Sharding>> {
    if !sums_in_parts(s.dtype) {
        return Vec::new();
    }
    let mut ways = sums_of_shards(g, node, s);
    if is_linear(&node.op, s) {
        ways.push(vec![Partial; node.inputs.len()]);
    }
    ways
}

/// True for ops that map partial sums to partial sums.
fn is_linear(op: &Op, s: &Sizes) -> bool {
    match op {
        Op::Map(ScalarOp::Add | ScalarOp::Sub) => s.inputs[0] == s.inputs[1],
        Op::Map(ScalarOp::Neg) | Op::Reshape { .. } | Op::Transpose { .. } => true,
        Op::Reduce { kind, .. } => *kind == ReduceKind::Sum,
        _ => false,
    }
}

/// The ways to sum over shards.
fn sums_of_shards(g: &Graph, node: &Node, s: &Sizes) -> Vec<Vec<Sharding>> {
    let scattered = |axis| vec![Replicated, Shard(axis), Shard(axis)];
    // Each device adds its updates to zeros.
    let adds_to_zeros = |kind| kind == ScatterKind::Add && is_zero(g, node.inputs[0]);
    match &node.op {
        Op::Reduce { kind, axes, .. } => {
            let is_real = matches!(s.dtype, DType::F32 | DType::F64);
            let is_sum = *kind == ReduceKind::Sum || *kind == ReduceKind::Mean && is_real;
            let axes = axes.iter().filter(|_| is_sum);
            axes.map(|&axis| vec![Shard(axis)]).collect()
        }
        Op::MatMul => vec![vec![Shard(s.rank(0) - 1), Shard(s.rank(1) - 2)]],
        Op::Conv {
            layout, groups: 1, ..
        } => {
            let channels = channel_axis(*layout, s.rank(0));
            let [inner, _] = weight_axes(*layout, s.rank(1));
            vec![vec![Shard(channels), Shard(inner)]]
        }
        Op::ScatterNd { kind } if adds_to_zeros(*kind) => {
            (0..s.rank(1) - 1).map(scattered).collect()
        }
        Op::ScatterElements { axis, kind } if adds_to_zeros(*kind) => vec![scattered(*axis)],
        _ => Vec::new(),
    }
}
