//! The operands of a product: where their elements come from, one by one or 16 bytes at a time.

use super::super::emit::{Emitter, Value};
use super::Contract;
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Puller};
use crate::codegen::strided::Strided;
use crate::error::{Error, Result};
use crate::ir::{Layout, Node, Op, OpClass, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Bytes of an asynchronous copy.
const CHUNK_BYTES: usize = 16;

/// Side of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Lhs,
    Rhs,
}

impl Side {
    pub(super) const BOTH: [Side; 2] = [Side::Lhs, Side::Rhs];

    pub(super) fn name(self) -> &'static str {
        match self {
            Side::Lhs => "lhs",
            Side::Rhs => "rhs",
        }
    }

    /// The operand of a product.
    pub(super) fn operand(self, node: &Node) -> ValueId {
        node.inputs[usize::from(self == Side::Rhs)]
    }
}

/// Position of an operand's element: product of the batch, row (left-hand side) or column
/// (right-hand side), and index along the summed axis.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub(super) batch: Ix<Value>,
    pub(super) along: Ix<Value>,
    pub(super) k: Ix<Value>,
}

/// An operand whose memory layout lets 16 contiguous bytes belong to one row or column, or to one
/// index along the summed axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunks {
    view: Strided,
    /// True if contiguous elements are neighbours along the summed axis.
    pub(super) along_k: bool,
}

/// The narrower dtype that all elements of `v` have, having been cast from it, and the value that was cast, of which `v` is at most a view.
pub(super) fn narrowed(
    body: &Body,
    in_memory: &dyn Fn(ValueId) -> bool,
    v: ValueId,
) -> Option<(DType, ValueId)> {
    let node = body.graph.def_node(v).filter(|_| !in_memory(v))?;
    let x = *node.inputs.first()?;
    match &node.op {
        Op::Map(ScalarOp::Cast(_)) => {
            let (from, to) = (body.dtype(x), body.dtype(v));
            let exact = match to {
                DType::F32 => from.is_narrow_float(),
                DType::F16 | DType::BF16 => from.is_float8(),
                DType::I32 => matches!(from, DType::I8 | DType::U8),
                _ => false,
            };
            exact.then_some((from, x))
        }
        op if is_plain_view(op) => narrowed(body, in_memory, x),
        _ => None,
    }
}

/// Views that only pick elements of their operand.
fn is_plain_view(op: &Op) -> bool {
    op.class() == OpClass::View && !matches!(op, Op::Pad { .. } | Op::Concat { .. })
}

/// The elements of `v`, of dtype `element`, as positions in a buffer: through views, and through a cast from that dtype.
pub(super) fn strided(
    body: &Body,
    in_memory: &dyn Fn(ValueId) -> bool,
    v: ValueId,
    element: DType,
) -> Option<Strided> {
    let is_cast = |v: ValueId| {
        body.graph
            .def_node(v)
            .is_some_and(|n| matches!(n.op, Op::Map(ScalarOp::Cast(_))))
    };
    let view = Strided::resolve(body, v, &|v| in_memory(v) || is_cast(v));
    if in_memory(view.base) {
        return (body.dtype(view.base) == element).then_some(view);
    }
    let cast = body
        .graph
        .def_node(view.base)
        .filter(|n| matches!(n.op, Op::Map(ScalarOp::Cast(_))))?;
    let below = Strided::resolve(body, cast.inputs[0], in_memory);
    let good = in_memory(below.base) && body.dtype(below.base) == element;
    if !good {
        None
    } else if view == Strided::own(body, view.base) {
        Some(below)
    } else {
        // A view of a cast of a view: strides express both views only when one of them is the
        // identity.
        (below == Strided::own(body, below.base)).then_some(Strided {
            base: below.base,
            ..view
        })
    }
}

impl Chunks {
    /// Where the elements are.
    pub(super) fn view(&self) -> &Strided {
        &self.view
    }

    /// Of an operand of the product `node`, if its elements of dtype `element` lie so.
    pub(super) fn find(
        body: &Body,
        in_memory: &dyn Fn(ValueId) -> bool,
        node: &Node,
        side: Side,
        element: DType,
    ) -> Option<Chunks> {
        let view = strided(body, in_memory, side.operand(node), element)?;
        let rank = view.shape.len();
        // Axes that may be contiguous, and their extents as runs see them.
        let (k_axis, along_axis) = match (&node.op, side) {
            (Op::MatMul, Side::Lhs) => (rank - 1, Some((rank - 2, view.shape[rank - 2]))),
            (Op::MatMul, Side::Rhs) => (rank - 2, Some((rank - 1, view.shape[rank - 1]))),
            (
                Op::Conv {
                    layout: Layout::ChannelsLast,
                    groups,
                    ..
                },
                Side::Lhs,
            ) => {
                return Chunks {
                    view,
                    along_k: true,
                }
                .aligned(
                    body,
                    element,
                    rank - 1,
                    body.shape(node.inputs[0])[rank - 1] / groups,
                );
            }
            (
                Op::Conv {
                    layout: Layout::ChannelsLast,
                    groups,
                    ..
                },
                Side::Rhs,
            ) => (rank - 2, Some((rank - 1, view.shape[rank - 1] / groups))),
            _ => return None,
        };
        let k = Chunks {
            view: view.clone(),
            along_k: true,
        }
        .aligned(body, element, k_axis, view.shape[k_axis]);
        k.or_else(|| {
            let (axis, extent) = along_axis?;
            Chunks {
                view,
                along_k: false,
            }
            .aligned(body, element, axis, extent)
        })
    }

    /// Itself, if whole chunks lie along `axis`, of which runs of `extent` belong together.
    fn aligned(self, body: &Body, element: DType, axis: usize, extent: usize) -> Option<Chunks> {
        let n = CHUNK_BYTES / element.size_bytes();
        let is_whole = |x: i64| x % n as i64 == 0;
        let others = self
            .view
            .strides
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != axis && self.view.shape[*i] != 1);
        // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
        let good = self.view.strides[axis] == 1
            && extent.is_multiple_of(n)
            && is_whole(self.view.offset)
            && others.into_iter().all(|(_, s)| is_whole(*s))
            && body.n_elements(self.view.base).is_multiple_of(n);
        good.then_some(self)
    }

    /// Writes the address of an element, and the condition that it exists (`None`: always).
    pub(super) fn source(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        node: &Node,
        side: Side,
        at: At,
    ) -> Result<(String, Option<Value>)> {
        let (index, inside) = index(p, e, node, side, at)?;
        let steps: Vec<Ix<Value>> = index
            .iter()
            .zip(&self.view.strides)
            .map(|(&i, &s)| e.mul(i, s))
            .collect();
        let position = steps
            .into_iter()
            .fold(Ix::C(self.view.offset), |sum, s| e.add(sum, s));
        let (buffer, position) = (p.stored[&self.view.base], e.val(position));
        Ok((format!("{} + {}", e.text(buffer), e.text(position)), inside))
    }
}

/// Index of an element in its operand, and the condition that it lies there and not in a
/// convolution's padding (`None`: always).
fn index(
    p: &mut Puller<Value>,
    e: &mut Emitter,
    node: &Node,
    side: Side,
    At { batch, along, k }: At,
) -> Result<(Vec<Ix<Value>>, Option<Value>)> {
    match (&node.op, side) {
        (Op::MatMul, _) => {
            let out = p.body.shape(node.outputs[0]).to_vec();
            let lead = e.delinearise(batch, &out[..out.len() - 2]);
            let pair = if side == Side::Lhs {
                [along, k]
            } else {
                [k, along]
            };
            let own = p.body.shape(side.operand(node));
            let skip = lead.len() + 2 - own.len();
            let fixed = own
                .iter()
                .zip(&lead[skip..])
                .map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i });
            Ok((fixed.chain(pair).collect(), None))
        }
        (Op::Conv { .. }, Side::Lhs) => p.conv_input_at(e, node, batch, along, k),
        (Op::Conv { .. }, Side::Rhs) => Ok((p.conv_weight_at(e, node, batch, k, along)?, None)),
        _ => Err(Error::internal(format!("{} is no product", node.op.name()))),
    }
}

impl Contract {
    /// An element of an operand, which must be there, in dtype `to`.
    pub(super) fn element(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        side: Side,
        at: At,
        to: DType,
    ) -> Result<Value> {
        let mut node = p.body.graph.node(self.node).clone();
        let v = uncast(p, side.operand(&node), to);
        let dtype = p.body.dtype(v);
        let value = match (&node.op, side) {
            (Op::Conv { .. }, Side::Lhs) => {
                node.inputs[0] = v;
                p.conv_input(e, &node, at.batch, at.along, at.k)?
            }
            _ => {
                let (index, _) = index(p, e, &node, side, at)?;
                p.value(e, v, &index)?
            }
        };
        e.convert(value, dtype, to)
    }
}

/// The value before a cast if it already has dtype `to`, which saves casting it there and back.
fn uncast(p: &Puller<Value>, v: ValueId, to: DType) -> ValueId {
    let node = p
        .body
        .graph
        .def_node(v)
        .filter(|n| !p.stored.contains_key(&v) && matches!(n.op, Op::Map(ScalarOp::Cast(_))));
    node.map(|n| n.inputs[0])
        .filter(|&x| p.body.dtype(x) == to)
        .unwrap_or(v)
}

/// True if an operand's elements are contiguous along the summed axis.
pub(super) fn k_is_inner(
    body: &Body,
    in_memory: &dyn Fn(ValueId) -> bool,
    node: &Node,
    side: Side,
) -> bool {
    let mut v = side.operand(node);
    // Element-wise ops leave elements where they are.
    while let Some(Node {
        op: Op::Map(_),
        inputs,
        ..
    }) = body.graph.def_node(v).filter(|_| !in_memory(v))
    {
        let Some(&same) = inputs.iter().find(|x| body.shape(**x) == body.shape(v)) else {
            break;
        };
        v = same;
    }
    let view = Strided::resolve(body, v, in_memory);
    let rank = view.strides.len();
    match (&node.op, side) {
        (Op::MatMul, Side::Lhs) => view.strides[rank - 2] != 1,
        (Op::MatMul, Side::Rhs) => view.strides[rank - 2] == 1,
        (Op::Conv { layout, .. }, Side::Lhs) => *layout == Layout::ChannelsLast,
        (Op::Conv { layout, .. }, Side::Rhs) => *layout == Layout::ChannelsFirst,
        _ => true,
    }
}
