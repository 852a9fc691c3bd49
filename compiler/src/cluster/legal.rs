//! Conditions under which an op may join a cluster.

use super::bytes::{self, Quantization};
use super::coverage::{self, KernelFamily};
use super::strided::{Strided, is_strided_view};
use crate::ir::{ClusterKind, Def, Graph, Node, NodeId, Op, OpClass, ScalarOp, Shape, ValueId};
use gristmill_kernels::epilogue::{EpilogueKind, MAX_BATCH, MAX_EPILOGUE};
use gristmill_runtime::DType;

/// Kind of the cluster that an op founds, if it founds one.
pub fn kind_of(op: &Op) -> Option<ClusterKind> {
    Some(match op.class() {
        OpClass::Source if matches!(op, Op::Constant { .. }) => return None,
        OpClass::Map | OpClass::View | OpClass::Source => ClusterKind::Map,
        OpClass::Reduce => ClusterKind::Reduce,
        OpClass::Contract => ClusterKind::Contract,
        OpClass::Window => ClusterKind::Window,
        OpClass::Attention => ClusterKind::Attention,
        OpClass::Gather => ClusterKind::Gather,
        OpClass::Scatter => ClusterKind::Scatter,
        OpClass::Sort => ClusterKind::Sort,
        OpClass::Scan => ClusterKind::Scan,
        OpClass::Control | OpClass::State | OpClass::Transfer | OpClass::Cluster => return None,
    })
}

/// Checks that two nodes may share a cluster: their device requests are the same, and neither has
/// control edges (`ordered`).
pub fn may_share(g: &Graph, ordered: &[bool], a: NodeId, b: NodeId) -> Result<(), String> {
    if ordered[a.0 as usize] || ordered[b.0 as usize] {
        return Err("a control edge orders them".into());
    }
    if g.node(a).device != g.node(b).device {
        return Err("another device is requested".into());
    }
    Ok(())
}

/// Number of elements of a value; `None` when its shape is not static.
pub fn n_elements(g: &Graph, v: ValueId) -> Option<usize> {
    let shape = g.ty(v).static_shape()?;
    Some(shape.iter().product())
}

/// Number of elements of a value. Errors when its shape is not static.
pub fn known_elements(g: &Graph, v: ValueId) -> Result<usize, String> {
    n_elements(g, v).ok_or_else(|| format!("the shape of {} is not static", g.ty(v)))
}

/// True for ops that cost nothing as an index map of a loop: an affine read whose innermost axis stays innermost.
pub fn is_foldable_view(g: &Graph, node: &Node) -> bool {
    match &node.op {
        Op::Reshape { .. } | Op::Broadcast { .. } | Op::Slice { .. } => true,
        Op::Transpose { perm } => keeps_inner_axis(g, node.inputs[0], perm),
        _ => false,
    }
}

/// True when the last axis of more than one element stays last.
pub fn keeps_inner_axis(g: &Graph, x: ValueId, perm: &[usize]) -> bool {
    let Some(shape) = g.ty(x).static_shape() else {
        return false;
    };
    let wide = |axes: &mut dyn Iterator<Item = usize>| axes.filter(|&a| shape[a] > 1).last();
    wide(&mut (0..shape.len())) == wide(&mut perm.iter().copied())
}

/// The chain of views that defines `v`, last first.
pub fn views_below(g: &Graph, mut v: ValueId) -> Vec<NodeId> {
    let mut views = Vec::new();
    while let Def::Node(id, _) = g.value(v).def {
        let node = g.node(id);
        if !is_strided_view(&node.op) {
            break;
        }
        views.push(id);
        v = node.inputs[0];
    }
    views
}

/// True when the views of `v` that members of a cluster define have a form of strides.
pub fn is_strided(g: &Graph, v: ValueId, is_member: &dyn Fn(NodeId) -> bool) -> bool {
    let is_read = |v: ValueId| !matches!(g.value(v).def, Def::Node(id, _) if is_member(id));
    Strided::of(g, v, &is_read).is_some()
}

/// True when the contraction or attention `node` can read operand `i` through the views that define
/// it, by strides.
pub fn reads_by_strides(g: &Graph, node: &Node, i: usize) -> bool {
    if g.ty(node.inputs[i]).dtype != DType::F32 {
        return false;
    }
    let Some(view) = Strided::of(g, node.inputs[i], &|_| false) else {
        return false;
    };
    match node.op {
        // The right-hand side is packed, which takes any strides.
        Op::MatMul => i == 1 || view.has_unit_inner_stride(),
        Op::Attention { .. } => view.has_unit_inner_stride(),
        _ => false,
    }
}

/// Checks that element-wise `node`, one operand of which is `chain`, can run on the result tile of the
/// contraction `anchor`.
pub fn is_epilogue(g: &Graph, anchor: &Node, node: &Node, chain: ValueId) -> Result<(), String> {
    let Op::Map(op) = node.op else {
        return Err(format!("{} is not element-wise", node.op.name()));
    };
    if op == ScalarOp::Cast(DType::F32) && is_byte_product(g, anchor, chain) {
        return Ok(());
    }
    let (from, to) = (g.ty(chain), g.ty(node.outputs[0]));
    if to.dtype != DType::F32 || from != to {
        return Err(format!("changes {from} to {to}"));
    }
    let position = position_of(node, chain).ok_or("uses the result twice")?;
    if epilogue_kind(op, position).is_none() {
        return Err(format!("no tile form of {op}"));
    }
    let other = node.inputs.iter().find(|&&v| v != chain);
    match other.map(|&v| g.ty(v)) {
        Some(other) if !steps_with_rows(anchor, &other.shape, &to.shape) => Err(format!(
            "operand {other} does not step evenly with the rows of {to}"
        )),
        _ => Ok(()),
    }
}

/// True when `v` is the result of a product of bytes.
fn is_byte_product(g: &Graph, anchor: &Node, v: ValueId) -> bool {
    v == anchor.outputs[0] && bytes::product(g, anchor).is_some()
}

/// Number of the operand that is `v`, when just one is.
fn position_of(node: &Node, v: ValueId) -> Option<usize> {
    let mut reads = (0..node.inputs.len()).filter(|&i| node.inputs[i] == v);
    let first = reads.next();
    first.filter(|_| reads.next().is_none())
}

/// The kernels' epilogue op, with its parameters, for a scalar op whose operand number `position` is
/// the product; `None` when they have none. It is the one list of ops that can follow on a tile, for
/// fusion and code generation.
pub fn epilogue_kind(op: ScalarOp, position: usize) -> Option<(EpilogueKind, f32, f32)> {
    let plain = unary_kind(op).or_else(|| binary_kind(op, position == 0));
    let plain = plain.map(|kind| (kind, 0.0, 0.0));
    plain.or_else(|| parametric_kind(op))
}

fn unary_kind(op: ScalarOp) -> Option<EpilogueKind> {
    use EpilogueKind as K;
    use ScalarOp as S;
    Some(match op {
        S::Relu => K::Relu,
        S::Neg => K::Neg,
        S::Abs => K::Abs,
        S::Sqrt => K::Sqrt,
        S::Recip => K::Reciprocal,
        S::Rsqrt => K::Rsqrt,
        S::Exp => K::Exp,
        S::Log => K::Log,
        S::Tanh => K::Tanh,
        S::Erf => K::Erf,
        S::Sigmoid => K::Sigmoid,
        S::Silu => K::Silu,
        S::Gelu => K::Gelu,
        S::GeluTanh => K::GeluTanh,
        S::Softplus => K::Softplus,
        S::Mish => K::Mish,
        _ => return None,
    })
}

fn binary_kind(op: ScalarOp, is_first: bool) -> Option<EpilogueKind> {
    use EpilogueKind as K;
    Some(match op {
        ScalarOp::Add => K::Add,
        ScalarOp::Sub if is_first => K::Sub,
        ScalarOp::Sub => K::RSub,
        ScalarOp::Mul => K::Mul,
        ScalarOp::Div if is_first => K::Div,
        ScalarOp::Div => K::RDiv,
        ScalarOp::Max => K::Max,
        ScalarOp::Min => K::Min,
        _ => return None,
    })
}

fn parametric_kind(op: ScalarOp) -> Option<(EpilogueKind, f32, f32)> {
    use EpilogueKind as K;
    use ScalarOp as S;
    let (kind, p0, p1) = match op {
        S::ClampTo { lo, hi } => (K::Clamp, lo.0, hi.0),
        S::LeakyRelu { alpha } => (K::LeakyRelu, alpha.0, 0.0),
        S::HardSigmoid { alpha, beta } => (K::HardSigmoid, alpha.0, beta.0),
        S::HardSwish => (K::HardSwish, 1.0 / 6.0, 0.5),
        S::Elu { alpha } => (K::Elu, alpha.0, 0.0),
        _ => return None,
    };
    Some((kind, p0 as f32, p1 as f32))
}

/// True when the kernel can address an epilogue operand of shape `other` beside each row of its
/// result: a convolution's rows are pixels with one stride, a product's have one per axis.
fn steps_with_rows(anchor: &Node, other: &Shape, to: &Shape) -> bool {
    let Some(lead) = to.rank().checked_sub(other.rank()) else {
        return false;
    };
    let rows = 0..to.rank().saturating_sub(1);
    let mut wide = rows.filter(|&i| !to[i].is(1));
    let is_full = |i: usize| i >= lead && other[i - lead] == to[i];
    match anchor.op {
        Op::Conv { .. } => {
            let full = wide.clone().filter(|&i| is_full(i)).count();
            full == 0 || full == wide.count()
        }
        _ => wide.by_ref().count() <= MAX_BATCH,
    }
}

/// True when the kernel of `anchor` applies element-wise ops to its tiles.
pub fn takes_epilogue(g: &Graph, anchor: &Node) -> bool {
    coverage::kernels(g, anchor).is_ok_and(|row| row.takes_epilogue)
}

/// True when the tiles of `anchor` can be stored as 8-bit integers.
fn stores_bytes(g: &Graph, anchor: &Node) -> bool {
    let is_of_bytes = || bytes::is_depthwise(g, anchor) && bytes::product(g, anchor).is_some();
    matches!(&anchor.op, Op::MatMul | Op::Conv { groups: 1, .. }) || is_of_bytes()
}

/// Ops behind the anchor of a contraction in its cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Element-wise ops on the tile.
    pub n_epilogue: usize,
    /// True when a view follows them, after which no element-wise op can.
    pub viewed: bool,
    /// Conversion of results to 8-bit integers, after which no other element-wise op can follow.
    pub quantization: Quantization,
}

impl Tail {
    /// The tail with `node`, which reads the cluster's result `chain`, added. Errors say why it cannot be.
    pub fn with(
        self,
        g: &Graph,
        anchor: &Node,
        node: &Node,
        chain: ValueId,
    ) -> Result<Tail, String> {
        let keeps_rows = |perm: &[usize]| {
            anchor.op == Op::MatMul && !self.viewed && keeps_inner_axis(g, chain, perm)
        };
        match &node.op {
            Op::Reshape { .. } => Ok(self.with_view()),
            Op::Transpose { perm } if keeps_rows(perm) => Ok(self.with_view()),
            Op::Map(_) => self.with_map(g, anchor, node, chain),
            op => Err(cannot_follow(op)),
        }
    }

    fn with_view(self) -> Tail {
        Tail {
            viewed: true,
            ..self
        }
    }

    fn with_map(
        self,
        g: &Graph,
        anchor: &Node,
        node: &Node,
        chain: ValueId,
    ) -> Result<Tail, String> {
        let quantized = self.quantized(g, node, chain);
        if let Some(tail) = quantized.filter(|_| !self.viewed && stores_bytes(g, anchor)) {
            return Ok(tail);
        }
        if self.quantization != Quantization::No {
            return Err("its tile is stored in 8 bits".into());
        }
        if self.n_epilogue == MAX_EPILOGUE {
            return Err(format!("the tile takes {MAX_EPILOGUE} ops"));
        }
        if self.viewed {
            return Err(cannot_follow(&node.op));
        }
        is_epilogue(g, anchor, node, chain)?;
        Ok(Tail {
            n_epilogue: self.n_epilogue + 1,
            ..self
        })
    }

    /// The tail with one more step towards 8-bit integers, if `node` is that.
    fn quantized(self, g: &Graph, node: &Node, chain: ValueId) -> Option<Tail> {
        let (quantization, _) = self.quantization.with(g, node, chain)?;
        let is_whole = g.ty(chain).shape == g.ty(node.outputs[0]).shape;
        (is_whole && g.ty(chain).dtype == DType::F32).then_some(Tail {
            quantization,
            ..self
        })
    }
}

fn cannot_follow(op: &Op) -> String {
    format!("{} cannot follow on the tile", op.name())
}

/// Checks that `node` can follow a reduction whose result is `chain`: element-wise, of the same shape.
pub fn follows_reduction(g: &Graph, node: &Node, chain: ValueId) -> Result<(), String> {
    if !matches!(node.op, Op::Map(_)) {
        return Err(format!("{} is not element-wise", node.op.name()));
    }
    let (from, to) = (g.ty(chain), g.ty(node.outputs[0]));
    if from.shape == to.shape {
        Ok(())
    } else {
        Err(format!("changes {from} to {to}"))
    }
}

/// Most nodes of a cluster: code generation visits a body recursively, and a longer chain gains nothing.
pub const MAX_MEMBERS: usize = 128;

/// Number of elements that the loops of a cluster founded by `anchor` pull. Errors say why they pull
/// none.
pub fn loops_over(g: &Graph, anchor: &Node) -> Result<usize, String> {
    match &anchor.op {
        Op::Concat { .. } | Op::Pad { .. } => Err("a copy takes no producers".into()),
        Op::Transpose { perm } if !keeps_inner_axis(g, anchor.inputs[0], perm) => {
            Err("a tiled transpose takes no producers".into())
        }
        Op::Reduce { .. } | Op::ArgReduce { .. } => known_elements(g, anchor.inputs[0]),
        op if kind_of(op) == Some(ClusterKind::Map) => known_elements(g, anchor.outputs[0]),
        op => Err(format!("{} takes no producers", op.name())),
    }
}

/// Checks that the loops of a cluster with the given members can compute `id` where they read it.
pub fn is_pulled(
    g: &Graph,
    users: &[Vec<(NodeId, usize)>],
    id: NodeId,
    is_member: &dyn Fn(NodeId) -> bool,
) -> Result<(), String> {
    let node = g.node(id);
    // A reshape inside a loop is free only on a stored tensor.
    let is_reshaped =
        |u: &(NodeId, usize)| is_member(u.0) && matches!(g.node(u.0).op, Op::Reshape { .. });
    let mut readers = node.outputs.iter().flat_map(|v| &users[v.0 as usize]);
    if node.op.class() != OpClass::View && readers.any(is_reshaped) {
        return Err("its consumer reads it through a reshape".into());
    }
    match &node.op {
        Op::Map(_) | Op::Iota { .. } => Ok(()),
        _ if is_foldable_view(g, node) => Ok(()),
        op => Err(format!("{} is not an index map", op.name())),
    }
}

/// True when a kernel of its own computes a reduction from a stored operand, so that pulled operands are stored before it.
pub fn reduces_stored(g: &Graph, node: &Node) -> bool {
    coverage::kernels(g, node).is_ok_and(|row| row.family == KernelFamily::Reduction)
}
