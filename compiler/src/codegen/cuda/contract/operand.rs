//! The operands of a product: where their elements come from, one by one or 16 bytes at a time.

use super::super::emit::{Emitter, Value};
use super::{Contract, Place, element_position};
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

impl At {
    /// Of an element of an operand's tile, which is of a place in the result: row or column and
    /// depth within the tile, and where the tile begins along the summed axis.
    pub(super) fn in_tile(
        e: &mut Emitter,
        (side, place): (Side, Place),
        [along, deep, k0]: [Ix<Value>; 3],
    ) -> At {
        let first = match side {
            Side::Lhs => place.row,
            Side::Rhs => place.column,
        };
        At {
            batch: place.batch,
            along: e.add(first, along),
            k: e.add(k0, deep),
        }
    }
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
    let cast_of = |v: ValueId| {
        let node = body.graph.def_node(v);
        node.filter(|n| matches!(n.op, Op::Map(ScalarOp::Cast(_))))
    };
    let view = Strided::resolve(body, v, &|v| in_memory(v) || cast_of(v).is_some());
    if in_memory(view.base) {
        return (body.dtype(view.base) == element).then_some(view);
    }
    let below = Strided::resolve(body, cast_of(view.base)?.inputs[0], in_memory);
    if !in_memory(below.base) || body.dtype(below.base) != element {
        return None;
    }
    if view == Strided::own(body, view.base) {
        return Some(below);
    }
    // A view of a cast of a view: strides express both views only when one of them is the identity.
    (below == Strided::own(body, below.base)).then_some(Strided {
        base: below.base,
        ..view
    })
}

/// Axes of an operand's view that may be contiguous, each with the extent of its runs.
struct ProductAxes {
    /// Summed axis.
    k: (usize, usize),
    /// Axis of rows or columns.
    along: Option<(usize, usize)>,
}

/// The axes of an operand of a matrix product or channels-last convolution.
fn product_axes(body: &Body, node: &Node, side: Side, view: &Strided) -> Option<ProductAxes> {
    let rank = view.shape.len();
    let last_two = || {
        let [outer, inner] = [rank - 2, rank - 1].map(|axis| (axis, view.shape[axis]));
        (outer, inner)
    };
    let (k, along) = match (&node.op, side) {
        (Op::MatMul, Side::Lhs) => {
            let (row, k) = last_two();
            (k, Some(row))
        }
        (Op::MatMul, Side::Rhs) => {
            let (k, column) = last_two();
            (k, Some(column))
        }
        (Op::Conv { layout, groups, .. }, _) if *layout == Layout::ChannelsLast => {
            let (outer, (axis, extent)) = last_two();
            match side {
                Side::Lhs => {
                    let n_channels = body.shape(node.inputs[0])[rank - 1] / groups;
                    ((axis, n_channels), None)
                }
                Side::Rhs => (outer, Some((axis, extent / groups))),
            }
        }
        _ => return None,
    };
    Some(ProductAxes { k, along })
}

impl Chunks {
    /// Strides of the elements in memory.
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
        let axes = product_axes(body, node, side, &view)?;
        let chunks = |along_k: bool| Chunks {
            view: view.clone(),
            along_k,
        };
        let k = chunks(true).aligned(body, element, axes.k);
        k.or_else(|| chunks(false).aligned(body, element, axes.along?))
    }

    /// Itself, if whole chunks lie along an axis, of which runs of such an extent belong together.
    fn aligned(
        self,
        body: &Body,
        element: DType,
        (axis, extent): (usize, usize),
    ) -> Option<Chunks> {
        let n = CHUNK_BYTES / element.size_bytes();
        let is_whole = |x: i64| x % n as i64 == 0;
        let Strided {
            shape,
            strides,
            offset,
            base,
        } = &self.view;
        let moves = |i: usize| i != axis && shape[i] != 1;
        let mut others = (0..shape.len()).filter(|&i| moves(i));
        // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
        let is_aligned = is_whole(*offset) && body.n_elements(*base).is_multiple_of(n);
        let is_inner = strides[axis] == 1 && extent.is_multiple_of(n);
        (is_inner && is_aligned && others.all(|i| is_whole(strides[i]))).then_some(self)
    }

    /// Writes the address of an element, and the condition that it exists (`None`: always).
    pub(super) fn source(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        operand: (&Node, Side),
        at: At,
    ) -> Result<(String, Option<Value>)> {
        let (index, exists) = index(p, e, operand, at)?;
        let position = element_position(e, self.view.offset, &index, &self.view.strides);
        let buffer = p.stored[&self.view.base];
        let address = format!("{} + {}", e.text(buffer), e.position(position));
        Ok((address, exists))
    }
}

/// Index of an element in its operand, and the condition that it lies there and not in a
/// convolution's padding (`None`: always).
fn index(
    p: &mut Puller<Value>,
    e: &mut Emitter,
    (node, side): (&Node, Side),
    At { batch, along, k }: At,
) -> Result<(Vec<Ix<Value>>, Option<Value>)> {
    match (&node.op, side) {
        (Op::MatMul, Side::Lhs) => Ok((matrix_index(p, e, node, 0, (batch, [along, k])), None)),
        (Op::MatMul, Side::Rhs) => Ok((matrix_index(p, e, node, 1, (batch, [k, along])), None)),
        (Op::Conv { .. }, Side::Lhs) => p.conv_input_at(e, node, batch, along, k),
        (Op::Conv { .. }, Side::Rhs) => Ok((p.conv_weight_at(e, node, batch, k, along)?, None)),
        _ => Err(Error::internal(format!("{} is no product", node.op.name()))),
    }
}

/// Index of an element of operand `i` of a matrix product, given by its matrix and its position
/// there; leading axes of extent 1 are broadcast.
pub(in crate::codegen::cuda) fn matrix_index(
    p: &Puller<Value>,
    e: &mut Emitter,
    node: &Node,
    i: usize,
    (batch, position): (Ix<Value>, [Ix<Value>; 2]),
) -> Vec<Ix<Value>> {
    let (out, own) = (p.body.shape(node.outputs[0]), p.body.shape(node.inputs[i]));
    let lead = e.delinearise(batch, &out[..out.len() - 2]);
    let own_lead = own.iter().zip(&lead[lead.len() + 2 - own.len()..]);
    let fixed = own_lead.map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i });
    fixed.chain(position).collect()
}

impl Contract {
    /// An element of an operand, which must be there, in dtype `to`.
    fn element(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        side: Side,
        at: At,
        to: DType,
    ) -> Result<Value> {
        let node = self.node.of(p.body);
        let v = uncast(p, side.operand(node), to);
        let value = match (&node.op, side) {
            (Op::Conv { .. }, Side::Lhs) => {
                let mut node = node.clone();
                node.inputs[0] = v;
                p.conv_input(e, &node, at.batch, at.along, at.k)?
            }
            _ => {
                let (index, _) = index(p, e, (node, side), at)?;
                p.value(e, v, &index)?
            }
        };
        e.convert(value, p.body.dtype(v), to)
    }

    /// Returns an element of an operand's tile in a dtype, zero where it is not `inside`.
    pub(super) fn give_element(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        (side, to): (Side, DType),
        at: At,
        inside: Option<Value>,
    ) -> Result<()> {
        if let Some(inside) = inside {
            let zero = e.constant(to, 0);
            let line = format!("if (!{}) return {};", e.text(inside), e.text(zero));
            e.line(&line);
        }
        let value = p.scoped(|p| self.element(p, e, side, at, to))?;
        e.line(&format!("return {};", e.text(value)));
        Ok(())
    }
}

/// The value before a cast if it already has dtype `to`, which saves casting it there and back.
fn uncast(p: &Puller<Value>, v: ValueId, to: DType) -> ValueId {
    let is_cast = |n: &&Node| matches!(n.op, Op::Map(ScalarOp::Cast(_)));
    let node = p.body.graph.def_node(v).filter(is_cast);
    match node.map(|n| n.inputs[0]) {
        Some(x) if !p.stored.contains_key(&v) && p.body.dtype(x) == to => x,
        _ => v,
    }
}

/// True if an operand's elements are contiguous along the summed axis.
pub(super) fn k_is_inner(
    body: &Body,
    in_memory: &dyn Fn(ValueId) -> bool,
    node: &Node,
    side: Side,
) -> bool {
    let v = same_layout(body, in_memory, side.operand(node));
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

/// A value that `v` is computed from element by element, whose elements are pulled in its place.
fn same_layout(body: &Body, in_memory: &dyn Fn(ValueId) -> bool, mut v: ValueId) -> ValueId {
    while let Some(node) = body.graph.def_node(v).filter(|_| !in_memory(v)) {
        let is_same = |x: &&ValueId| body.shape(**x) == body.shape(v);
        match node.inputs.iter().find(is_same) {
            Some(&same) if matches!(node.op, Op::Map(_)) => v = same,
            _ => break,
        }
    }
    v
}
