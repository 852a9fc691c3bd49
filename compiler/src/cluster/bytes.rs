//! Products of 8-bit integers, for which CPUs have instructions: four products at a time, summed in
//! 32 bits. Depthwise convolutions, which sum few, are exact in `f32`.

use super::legal::views_below;
use crate::ir::{Graph, Layout, Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_kernels::table::ENTRIES;
use gristmill_runtime::{DType, Tensor};
use std::ops::RangeInclusive;

/// Elements multiplied at once.
const WORD: usize = gristmill_kernels::gemm::integer::WORD;

/// `i32` elements `bytes - zero`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CentredBytes {
    /// `u8` or `i8`.
    pub bytes: ValueId,
    /// The zero point.
    pub zero: Zero,
    /// Nodes between bytes and zero point and the elements.
    pub nodes: Vec<NodeId>,
}

/// A zero point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// A known number, one of the bytes' type.
    Known(i32),
    /// One element of the bytes' type.
    Value(ValueId),
}

/// The bytes and the zero point of an `i32` value made of bytes; `None` for any other value.
pub fn centred(g: &Graph, v: ValueId) -> Option<CentredBytes> {
    let (id, node) = defined(g, v)?;
    match (&node.op, &node.inputs[..]) {
        (Op::Map(ScalarOp::Cast(DType::I32)), &[bytes]) if is_bytes(g, bytes) => {
            Some(CentredBytes {
                bytes,
                zero: Zero::Known(0),
                nodes: vec![id],
            })
        }
        (Op::Map(ScalarOp::Sub), &[x, zero]) => shifted(g, id, centred(g, x)?, zero),
        (Op::Map(ScalarOp::Add), &[x, y]) => match centred(g, x) {
            Some(c) => shifted(g, id, c, y),
            None => shifted(g, id, centred(g, y)?, x),
        },
        _ => None,
    }
}

/// `inner` with the zero point that node `id` adds or subtracts; `None` when it has one already.
fn shifted(g: &Graph, id: NodeId, inner: CentredBytes, zero: ValueId) -> Option<CentredBytes> {
    let node = g.node(id);
    let bytes = g.ty(inner.bytes);
    let is_first = inner.zero == Zero::Known(0) && g.ty(node.outputs[0]).shape == bytes.shape;
    let is_added = node.op == Op::Map(ScalarOp::Add);
    let (zero, of_zero) = zero_point(g, zero, is_added, bytes.dtype).filter(|_| is_first)?;
    let nodes = inner.nodes.into_iter().chain(of_zero).chain([id]).collect();
    Some(CentredBytes {
        bytes: inner.bytes,
        zero,
        nodes,
    })
}

fn defined(g: &Graph, v: ValueId) -> Option<(NodeId, &Node)> {
    g.def_id(v).map(|id| (id, g.node(id)))
}

fn is_bytes(g: &Graph, v: ValueId) -> bool {
    matches!(g.ty(v).dtype, DType::U8 | DType::I8)
}

/// A zero point in `i32`, and the nodes that make it of a byte; `negated` when it is added.
fn zero_point(g: &Graph, v: ValueId, negated: bool, dtype: DType) -> Option<(Zero, Vec<NodeId>)> {
    if !g.ty(v).shape.n_elements().is(1) {
        return None;
    }
    if let Some(t) = g.single(v) {
        let value = i64::from(t.as_slice::<i32>()[0]) * if negated { -1 } else { 1 };
        let zero = Zero::Known(value as i32);
        return byte_range(dtype).contains(&value).then_some((zero, vec![]));
    }
    let (id, node) = defined(g, v).filter(|_| !negated)?;
    let is_cast = node.op == Op::Map(ScalarOp::Cast(DType::I32));
    let is_byte = is_cast && g.ty(node.inputs[0]).dtype == dtype;
    is_byte.then(|| (Zero::Value(node.inputs[0]), vec![id]))
}

fn byte_range(dtype: DType) -> RangeInclusive<i64> {
    match dtype {
        DType::U8 => 0..=255,
        _ => -128..=127,
    }
}

/// The left-hand side of a product of bytes by a constant, which has a kernel, with the views that
/// it is read through; `None` when `node` is another op. The constant's elements are not examined:
/// see [`fits_bytes`].
pub fn product(g: &Graph, node: &Node) -> Option<CentredBytes> {
    left_side(g, node).filter(|_| is_constant(g, node.inputs[1]))
}

/// The same inside of a cluster, where constants are operands.
pub fn left_side(g: &Graph, node: &Node) -> Option<CentredBytes> {
    let &a = node.inputs.first()?;
    let has_kernel = reads_words(g, node, a) || is_depthwise(g, node);
    if !has_kernel || g.ty(a).dtype != DType::I32 {
        return None;
    }
    let views = views_below(g, a);
    let below = views.last().map_or(a, |&view| g.node(view).inputs[0]);
    let mut centred = centred(g, below)?;
    centred.nodes.extend(views);
    centred.nodes.sort_unstable();
    Some(centred)
}

/// True when the kernel of a contraction reads whole words of its left-hand side.
fn reads_words(g: &Graph, node: &Node, a: ValueId) -> bool {
    let has_kernel = match &node.op {
        Op::MatMul => true,
        Op::Conv { groups, layout, .. } => {
            *groups == 1 && *layout == Layout::ChannelsLast && matches!(g.ty(a).rank(), 3..=5)
        }
        _ => false,
    };
    let depth = g.ty(a).shape.last().and_then(|k| k.as_const());
    has_kernel && depth.is_some_and(|k| k > 0 && k % WORD as i64 == 0)
}

/// A lookup of 8-bit integers by 8-bit integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// The indices; negative ones count from the end.
    pub bytes: ValueId,
    /// Makes `i32` of them.
    pub widening: NodeId,
}

/// A lookup in a table of all results of bytes, which has a kernel; `None` for other nodes.
pub fn lookup(g: &Graph, node: &Node) -> Option<Lookup> {
    let (Op::Gather { axis: 0 }, &[table, at]) = (&node.op, &node.inputs[..]) else {
        return None;
    };
    let (widening, cast) = defined(g, at)?;
    let is_cast = cast.op == Op::Map(ScalarOp::Cast(DType::I32)) && is_bytes(g, cast.inputs[0]);
    let is_table = is_bytes(g, table) && g.ty(table).static_shape()? == [ENTRIES];
    (is_cast && is_table).then(|| Lookup {
        bytes: cast.inputs[0],
        widening,
    })
}

/// True for a depthwise convolution with a kernel: each channel has its own window.
pub fn is_depthwise(g: &Graph, node: &Node) -> bool {
    let (Op::Conv { groups, layout, .. }, &[x, w]) = (&node.op, &node.inputs[..]) else {
        return false;
    };
    let last = |v: ValueId, n: usize| g.ty(v).shape.iter().rev().nth(n).and_then(|d| d.as_const());
    let n = Some(*groups as i64);
    let is_last = *layout == Layout::ChannelsLast && matches!(g.ty(x).rank(), 3..=5);
    is_last && *groups > 0 && [last(x, 0), last(w, 0)] == [n; 2] && last(w, 1) == Some(1)
}

/// True when a value is a constant or a view of one.
fn is_constant(g: &Graph, v: ValueId) -> bool {
    let below = views_below(g, v)
        .last()
        .map_or(v, |&view| g.node(view).inputs[0]);
    g.constant(below).is_some()
}

/// True when all elements of an `i32` tensor are signed bytes.
pub fn fits_bytes(t: &Tensor) -> bool {
    t.as_slice::<i32>().iter().all(|&x| i8::try_from(x).is_ok())
}

/// Progress of a result towards 8-bit integers: `cast(round(x) + zero)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quantization {
    /// Not begun.
    #[default]
    No,
    /// Rounded.
    Rounded,
    /// Rounded, and shifted by a zero point.
    Shifted,
    /// Stored in 8 bits.
    Done,
}

impl Quantization {
    /// The next step, if `node`, which reads `chain`, is one. A zero point is given with it.
    pub fn with(
        self,
        g: &Graph,
        node: &Node,
        chain: ValueId,
    ) -> Option<(Quantization, Option<i32>)> {
        let Op::Map(op) = node.op else { return None };
        match (self, op) {
            (Quantization::No, ScalarOp::Round) => Some((Quantization::Rounded, None)),
            (Quantization::Rounded, ScalarOp::Add) => {
                let other = node.inputs.iter().find(|&&v| v != chain)?;
                let t = g.single(*other).filter(|t| t.dtype() == DType::F32)?;
                let zero = t.as_slice::<f32>()[0];
                let is_whole = zero.fract() == 0.0 && (-128.0..=255.0).contains(&zero);
                is_whole.then_some((Quantization::Shifted, Some(zero as i32)))
            }
            (
                Quantization::Rounded | Quantization::Shifted,
                ScalarOp::Cast(DType::U8 | DType::I8),
            ) => Some((Quantization::Done, None)),
            _ => None,
        }
    }
}
