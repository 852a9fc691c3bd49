//! A cluster's body ready for emission: static shapes at hand, composite ops without a kernel of their own
//! written out.

use crate::cluster::coverage;
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{
    Dim, Graph, Layout, Node, NodeId, Op, Origin, ReduceKind, ScalarOp, Shape, ValueId,
};
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeSet;

/// A body graph and the static shape of each of its values.
pub(super) struct Body {
    pub(super) graph: Graph,
    /// The nodes in place of the cluster's anchor.
    pub(super) anchor: BTreeSet<NodeId>,
    shapes: Vec<Vec<usize>>,
}

impl Body {
    /// Expands the body of `cluster`; a composite anchor that `keep` accepts has its own kernel and
    /// stays.
    ///
    /// Errors are internal: a node that is no cluster, or has a shape that is not static.
    pub(super) fn new(cluster: &Node, keep: &dyn Fn(&Graph, &Node) -> bool) -> Result<Body> {
        let (Op::Cluster { anchor, .. }, [source]) = (&cluster.op, &cluster.regions[..]) else {
            return Err(Error::internal(format!(
                "{} is not a cluster with a body",
                cluster.op.name()
            )));
        };
        let (graph, anchor) = expand(source, NodeId(*anchor as u32), keep)?;
        let values = (0..graph.n_values() as u32).map(ValueId::new);
        let shapes = values.map(|v| static_shape(&graph, v));
        let shapes = shapes.collect::<Result<_>>()?;
        Ok(Body {
            graph,
            anchor,
            shapes,
        })
    }

    pub(super) fn shape(&self, v: ValueId) -> &[usize] {
        &self.shapes[v.0 as usize]
    }

    pub(super) fn dtype(&self, v: ValueId) -> DType {
        self.graph.ty(v).dtype
    }

    pub(super) fn n_elements(&self, v: ValueId) -> usize {
        self.shape(v).iter().product()
    }
}

fn static_shape(graph: &Graph, v: ValueId) -> Result<Vec<usize>> {
    let ty = graph.ty(v);
    let shape = ty.static_shape().ok_or_else(|| {
        Error::internal(format!(
            "shape of {ty} in {:?} is not static: specialise first",
            graph.name
        ))
    })?;
    checked_size_bytes(ty.dtype, &shape)?;
    Ok(shape)
}

/// The value of a static dim, which may be negative (a slice's start).
pub(super) fn const_dim(d: &Dim) -> Result<i64> {
    d.as_const()
        .ok_or_else(|| Error::internal(format!("extent {d} is not static: specialise first")))
}

/// The body with composites written out, and the nodes that its node `anchor` became.
fn expand(
    source: &Graph,
    anchor: NodeId,
    keep: &dyn Fn(&Graph, &Node) -> bool,
) -> Result<(Graph, BTreeSet<NodeId>)> {
    let mut out = Graph::new(&source.name);
    let mut map = vec![ValueId::new(0); source.n_values()];
    let mut anchored = BTreeSet::new();
    for (&v, name) in source.inputs.iter().zip(&source.input_names) {
        map[v.0 as usize] = out.add_input(name, source.ty(v).clone());
    }
    for (id, node) in source.nodes() {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v.0 as usize]).collect();
        let first = out.n_nodes() as u32;
        let is_kept = id == anchor && keep(source, node);
        let results = expand_node(&mut out, node, &inputs, is_kept)?;
        if id == anchor {
            anchored.extend((first..out.n_nodes() as u32).map(NodeId));
        }
        for (&v, r) in node.outputs.iter().zip(results) {
            map[v.0 as usize] = r;
        }
    }
    for o in &source.outputs {
        out.add_output(&o.name, map[o.value.0 as usize]);
    }
    Ok((out, anchored))
}

/// Adds a node, written out unless it is kept.
fn expand_node(
    out: &mut Graph,
    node: &Node,
    inputs: &[ValueId],
    is_kept: bool,
) -> Result<Vec<ValueId>> {
    let mut w = Writer {
        graph: out,
        origin: &node.origin,
    };
    let result = match &node.op {
        op if w.has_half_kernel(op, inputs) => w.in_f32(op, inputs)?,
        _ if is_kept => return out.add_copy(node, inputs),
        Op::Softmax { axis, log } => w.softmax(inputs[0], *axis, *log)?,
        Op::LayerNorm { axis, epsilon } => w.layer_norm(inputs, *axis, epsilon.0)?,
        Op::RmsNorm { axis, epsilon } => w.rms_norm(inputs, *axis, epsilon.0)?,
        Op::Standardize { axes, epsilon } => w.standardize(inputs[0], axes, epsilon.0)?,
        Op::Attention { scale, causal } => w.attention(inputs, scale.0, *causal)?,
        op if w.is_channels_first_f32(op, inputs) => w.channels_last(op, inputs)?,
        _ => return out.add_copy(node, inputs),
    };
    Ok(vec![result])
}

fn is_half(graph: &Graph, v: ValueId) -> bool {
    graph.ty(v).dtype.is_narrow_float()
}

/// Writes primitive nodes. Composites of half types compute in `f32` and round once.
struct Writer<'a> {
    graph: &'a mut Graph,
    origin: &'a Origin,
}

impl Writer<'_> {
    fn has_half_kernel(&self, op: &Op, inputs: &[ValueId]) -> bool {
        matches!(op, Op::MatMul | Op::Conv { .. }) && is_half(self.graph, inputs[0])
    }

    /// True for windows with kernels for channels last.
    fn is_channels_first_f32(&self, op: &Op, inputs: &[ValueId]) -> bool {
        let (Op::Conv { layout, .. } | Op::Pool { layout, .. } | Op::MaxPoolGrad { layout, .. }) =
            op
        else {
            return false;
        };
        let x = self.graph.ty(inputs[0]);
        *layout == Layout::ChannelsFirst
            && x.dtype == DType::F32
            && coverage::takes_rank(op, x.rank())
    }

    fn op(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId> {
        self.graph.add1(op, inputs, self.origin)
    }

    fn map(&mut self, op: ScalarOp, inputs: &[ValueId]) -> Result<ValueId> {
        self.op(Op::Map(op), inputs)
    }

    fn scalar(&mut self, dtype: DType, v: f64) -> Result<ValueId> {
        let bits = real_bits(dtype, v).to_le_bytes();
        let t = Tensor::from_bytes(dtype, &[], &bits[..dtype.size_bytes()])?;
        Ok(self.graph.add_constant(t, self.origin))
    }

    fn cast(&mut self, x: ValueId, to: DType) -> Result<ValueId> {
        if self.graph.ty(x).dtype == to {
            Ok(x)
        } else {
            self.map(ScalarOp::Cast(to), &[x])
        }
    }

    /// `x` in the dtype that composites compute in, and `x`'s own dtype.
    fn widen(&mut self, x: ValueId) -> Result<(ValueId, DType)> {
        let own = self.graph.ty(x).dtype;
        let wide = if own.is_narrow_float() {
            DType::F32
        } else {
            own
        };
        Ok((self.cast(x, wide)?, own))
    }

    fn reduce(&mut self, kind: ReduceKind, x: ValueId, axes: Vec<usize>) -> Result<ValueId> {
        self.op(
            Op::Reduce {
                kind,
                axes,
                keepdims: true,
            },
            &[x],
        )
    }

    /// A contraction of half types in `f32`, rounded once.
    fn in_f32(&mut self, op: &Op, inputs: &[ValueId]) -> Result<ValueId> {
        let own = self.graph.ty(inputs[0]).dtype;
        let wide = inputs
            .iter()
            .map(|&x| self.cast(x, DType::F32))
            .collect::<Result<Vec<_>>>()?;
        let y = match op {
            Op::Conv {
                layout: Layout::ChannelsFirst,
                ..
            } if coverage::takes_rank(op, self.graph.ty(wide[0]).rank()) => {
                self.channels_last(op, &wide)?
            }
            _ => self.op(op.clone(), &wide)?,
        };
        self.cast(y, own)
    }

    /// A channels-first convolution, pooling or gradient of one as a channels-last one between transposes: kernels
    /// exist for channels last only.
    fn channels_last(&mut self, op: &Op, inputs: &[ValueId]) -> Result<ValueId> {
        let rank = self.graph.ty(inputs[0]).rank();
        let to_last: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
        let to_first: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
        let to_last = Op::Transpose { perm: to_last };
        let x = self.op(to_last.clone(), &inputs[..1])?;
        let (mut op, mut operands) = (op.clone(), vec![x]);
        match &mut op {
            Op::Conv { layout, .. } => {
                *layout = Layout::ChannelsLast;
                let perm = (2..rank).chain([1, 0]).collect();
                operands.push(self.op(Op::Transpose { perm }, &inputs[1..])?);
            }
            Op::Pool { layout, .. } => *layout = Layout::ChannelsLast,
            Op::MaxPoolGrad { layout, .. } => {
                *layout = Layout::ChannelsLast;
                operands.push(self.op(to_last, &inputs[1..])?);
            }
            op => {
                let message = format!("{} has no channel layout", op.name());
                return Err(Error::internal(message));
            }
        }
        let y = self.op(op, &operands)?;
        self.op(Op::Transpose { perm: to_first }, &[y])
    }

    fn softmax(&mut self, x: ValueId, axis: usize, log: bool) -> Result<ValueId> {
        let (x, own) = self.widen(x)?;
        let max = self.reduce(ReduceKind::Max, x, vec![axis])?;
        let shifted = self.map(ScalarOp::Sub, &[x, max])?;
        let exp = self.map(ScalarOp::Exp, &[shifted])?;
        let sum = self.reduce(ReduceKind::Sum, exp, vec![axis])?;
        let y = if log {
            let log_sum = self.map(ScalarOp::Log, &[sum])?;
            self.map(ScalarOp::Sub, &[shifted, log_sum])?
        } else {
            self.map(ScalarOp::Div, &[exp, sum])?
        };
        self.cast(y, own)
    }

    /// `x / sqrt(mean(x^2) + epsilon)` over `axes`.
    fn normalised(&mut self, x: ValueId, axes: &[usize], epsilon: f64) -> Result<ValueId> {
        let dtype = self.graph.ty(x).dtype;
        let square = self.map(ScalarOp::Mul, &[x, x])?;
        let mean = self.reduce(ReduceKind::Mean, square, axes.to_vec())?;
        let epsilon = self.scalar(dtype, epsilon)?;
        let shifted = self.map(ScalarOp::Add, &[mean, epsilon])?;
        let root = self.map(ScalarOp::Sqrt, &[shifted])?;
        self.map(ScalarOp::Div, &[x, root])
    }

    /// `(x - mean) / sqrt(var + epsilon)` over `axes`.
    fn standardized(&mut self, x: ValueId, axes: &[usize], epsilon: f64) -> Result<ValueId> {
        let mean = self.reduce(ReduceKind::Mean, x, axes.to_vec())?;
        let centred = self.map(ScalarOp::Sub, &[x, mean])?;
        self.normalised(centred, axes, epsilon)
    }

    fn standardize(&mut self, x: ValueId, axes: &[usize], epsilon: f64) -> Result<ValueId> {
        let (x, own) = self.widen(x)?;
        let y = self.standardized(x, axes, epsilon)?;
        self.cast(y, own)
    }

    fn layer_norm(&mut self, inputs: &[ValueId], axis: usize, epsilon: f64) -> Result<ValueId> {
        let (x, own) = self.widen(inputs[0])?;
        let (gamma, _) = self.widen(inputs[1])?;
        let (beta, _) = self.widen(inputs[2])?;
        let unit = self.standardized(x, &self.axes_from(x, axis), epsilon)?;
        let scaled = self.map(ScalarOp::Mul, &[unit, gamma])?;
        let y = self.map(ScalarOp::Add, &[scaled, beta])?;
        self.cast(y, own)
    }

    fn axes_from(&self, x: ValueId, axis: usize) -> Vec<usize> {
        (axis..self.graph.ty(x).rank()).collect()
    }

    fn rms_norm(&mut self, inputs: &[ValueId], axis: usize, epsilon: f64) -> Result<ValueId> {
        let (x, own) = self.widen(inputs[0])?;
        let (gamma, _) = self.widen(inputs[1])?;
        let unit = self.normalised(x, &self.axes_from(x, axis), epsilon)?;
        let y = self.map(ScalarOp::Mul, &[unit, gamma])?;
        self.cast(y, own)
    }

    fn attention(&mut self, inputs: &[ValueId], scale: f64, causal: bool) -> Result<ValueId> {
        let (q, own) = self.widen(inputs[0])?;
        let (k, _) = self.widen(inputs[1])?;
        let (v, _) = self.widen(inputs[2])?;
        let mut scores = self.scores(q, k, scale)?;
        if let Some(&mask) = inputs.get(3) {
            let (mask, _) = self.widen(mask)?;
            scores = self.map(ScalarOp::Add, &[scores, mask])?;
        }
        if causal {
            scores = self.mask_future(scores)?;
        }
        let last = self.graph.ty(scores).rank() - 1;
        let p = self.softmax(scores, last, false)?;
        let y = self.op(Op::MatMul, &[p, v])?;
        self.cast(y, own)
    }

    /// `q k^T scale`.
    fn scores(&mut self, q: ValueId, k: ValueId, scale: f64) -> Result<ValueId> {
        let (wide, rank) = (self.graph.ty(q).dtype, self.graph.ty(q).rank());
        let mut perm: Vec<usize> = (0..rank).collect();
        perm.swap(rank - 2, rank - 1);
        let kt = self.op(Op::Transpose { perm }, &[k])?;
        let scores = self.op(Op::MatMul, &[q, kt])?;
        let scale = self.scalar(wide, scale)?;
        self.map(ScalarOp::Mul, &[scores, scale])
    }

    /// Minus infinity where the key position is after the query position.
    fn mask_future(&mut self, scores: ValueId) -> Result<ValueId> {
        let Shape(shape) = self.graph.ty(scores).shape.clone();
        let plane = shape[shape.len() - 2..].to_vec();
        let position = |axis| Op::Iota {
            dtype: DType::I64,
            shape: plane.clone(),
            axis,
        };
        let (query, key) = (self.op(position(0), &[])?, self.op(position(1), &[])?);
        let past = self.map(ScalarOp::Le, &[key, query])?;
        let minus = self.scalar(self.graph.ty(scores).dtype, f64::NEG_INFINITY)?;
        self.map(ScalarOp::Select, &[past, scores, minus])
    }
}
