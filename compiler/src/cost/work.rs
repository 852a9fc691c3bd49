//! Work of an op: arithmetic operations by class, and bytes that must be read and written.

use super::Bytes;
use crate::ir::{Bindings, Dim, Graph, Layout, Node, Op, OpClass, Shape, Type, ValueId};
use gristmill_runtime::DType;
use std::borrow::Borrow;

/// Classes of arithmetic with different efficiency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WorkClass {
    /// Element-wise arithmetic and index maps.
    Map,
    /// Reductions, softmax, normalisation.
    Reduce,
    /// Matrix products.
    MatMul,
    /// Convolutions.
    Conv,
    /// Pooling.
    Window,
    /// Fused attention.
    Attention,
    /// Reads at computed positions.
    Gather,
    /// Writes at computed positions.
    Scatter,
    /// Sort and top-k.
    Sort,
    /// Running sums.
    Scan,
}

impl WorkClass {
    /// All classes, with their names in profiles.
    pub const NAMES: [(WorkClass, &str); 10] = [
        (WorkClass::Map, "map"),
        (WorkClass::Reduce, "reduce"),
        (WorkClass::MatMul, "matmul"),
        (WorkClass::Conv, "conv"),
        (WorkClass::Window, "window"),
        (WorkClass::Attention, "attention"),
        (WorkClass::Gather, "gather"),
        (WorkClass::Scatter, "scatter"),
        (WorkClass::Sort, "sort"),
        (WorkClass::Scan, "scan"),
    ];
}

/// Arithmetic of one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Class that selects the efficiency.
    pub class: WorkClass,
    /// Dtype of the arithmetic.
    pub dtype: DType,
    /// Operations; a fused multiply-add counts as two.
    pub flops: u64,
    /// Time lost beside the arithmetic, as the operations that would take as long.
    pub overhead_flops: u64,
}

/// A product of depth `k` takes about as long as one of depth `k` plus this at full speed: tiles are filled, drained and written back.
/// (Measured: batches of depth 64 run at two thirds of the speed of those of depth 768.)
const PRODUCT_OVERHEAD_DEPTH: u64 = 32;

/// Values of symbolic extents when work is counted. Unknown ones count as `unknown_extent`, the
/// lower end of a dim's range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Known symbols.
    pub bindings: Bindings,
    /// Value of all others.
    pub unknown_extent: usize,
}

impl Default for Extents {
    fn default() -> Extents {
        Extents {
            bindings: Bindings::new(),
            unknown_extent: 1,
        }
    }
}

impl Extents {
    /// Value of a dim.
    pub fn of(&self, dim: &Dim) -> u64 {
        if let Some(c) = dim.as_const() {
            return c.max(0) as u64;
        }
        let mut bindings = self.bindings.clone();
        dim.visit_symbols(&mut |s| {
            bindings.entry(s.to_owned()).or_insert(self.unknown_extent);
        });
        dim.bind(&bindings).as_const().unwrap_or(0).max(0) as u64
    }

    /// Number of elements of a shape; saturates.
    pub fn elements(&self, shape: &Shape) -> u64 {
        product(shape.iter().map(|d| self.of(d)))
    }

    /// Size of a tensor.
    pub fn bytes(&self, ty: &Type) -> Bytes {
        Bytes(self.elements(&ty.shape)).times(ty.dtype.size_bytes() as u64)
    }
}

fn product(extents: impl Iterator<Item = u64>) -> u64 {
    extents.fold(1, u64::saturating_mul)
}

/// Arithmetic of an op from its operand and result types. Ops that only name or move data count one operation per element written, or
/// none when they are index maps of a loop. Regions are not looked into.
pub fn of_op(
    op: &Op,
    operands: &[impl Borrow<Type>],
    results: &[impl Borrow<Type>],
    extents: &Extents,
) -> Work {
    let operands: Vec<&Type> = operands.iter().map(Borrow::borrow).collect();
    let results: Vec<&Type> = results.iter().map(Borrow::borrow).collect();
    let n_in = operands.first().map_or(0, |t| extents.elements(&t.shape));
    let n_out = results.first().map_or(0, |t| extents.elements(&t.shape));
    let dtype = operands
        .first()
        .or(results.first())
        .copied()
        .map_or(DType::F32, |t| t.dtype);
    let work = |class, flops| Work {
        class,
        dtype,
        flops,
        overhead_flops: 0,
    };
    match op {
        Op::Map(s) => work(
            WorkClass::Map,
            n_out.saturating_mul(u64::from(s.spec().flops.max(1))),
        ),
        Op::Softmax { .. } => work(WorkClass::Reduce, n_in.saturating_mul(18)),
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => {
            work(WorkClass::Reduce, n_in.saturating_mul(6))
        }
        Op::MatMul => {
            let k = operands[0].shape.last().map_or(1, |d| extents.of(d));
            let overhead_flops = product([2, n_out, PRODUCT_OVERHEAD_DEPTH].into_iter());
            Work {
                overhead_flops,
                ..work(WorkClass::MatMul, product([2, n_out, k].into_iter()))
            }
        }
        Op::Conv { layout, .. } => work(
            WorkClass::Conv,
            product(
                [
                    2,
                    n_out,
                    taps_per_output(&operands[1].shape, *layout, extents),
                ]
                .into_iter(),
            ),
        ),
        Op::ConvTranspose { .. } => {
            let taps = product(operands[1].shape.iter().skip(1).map(|d| extents.of(d)));
            work(WorkClass::Conv, product([2, n_in, taps].into_iter()))
        }
        Op::Pool { size, .. } | Op::MaxPoolIndices { size, .. } => work(
            WorkClass::Window,
            n_out.saturating_mul(product(size.iter().map(|&s| s as u64))),
        ),
        Op::Attention { .. } => work(WorkClass::Attention, attention_flops(&operands, extents)),
        Op::TopK { .. } => work(WorkClass::Sort, n_in.saturating_mul(16)),
        _ => match op.class() {
            OpClass::Reduce => work(WorkClass::Reduce, n_in),
            OpClass::Gather => work(WorkClass::Gather, n_out),
            OpClass::Scatter => work(
                WorkClass::Scatter,
                operands.last().map_or(0, |t| extents.elements(&t.shape)),
            ),
            OpClass::Scan => work(WorkClass::Scan, n_in),
            OpClass::Map => work(WorkClass::Map, n_out),
            _ => work(WorkClass::Map, 0),
        },
    }
}

/// Multiply-adds per output element of a convolution: taps of one group.
fn taps_per_output(weights: &Shape, layout: Layout, extents: &Extents) -> u64 {
    let out_axis = match layout {
        Layout::ChannelsFirst => 0,
        Layout::ChannelsLast => weights.rank().saturating_sub(1),
    };
    product(
        weights
            .iter()
            .enumerate()
            .filter(|(axis, _)| *axis != out_axis)
            .map(|(_, d)| extents.of(d)),
    )
}

/// Two products and a softmax.
fn attention_flops(operands: &[&Type], extents: &Extents) -> u64 {
    let [q, k, v, ..] = operands else { return 0 };
    let last = |t: &&Type| t.shape.last().map_or(1, |d| extents.of(d));
    let n_keys = k.shape.iter().rev().nth(1).map_or(1, |d| extents.of(d));
    let scores = (extents.elements(&q.shape) / last(q).max(1)).saturating_mul(n_keys);
    scores.saturating_mul(2 * last(q) + 2 * last(v) + 14)
}

/// Bytes that a node cannot avoid to read and write: its results, and the accessed parts of its
/// operands. Of a table, only gathered rows or a slice count.
pub fn traffic(g: &Graph, node: &Node, extents: &Extents) -> Bytes {
    let body = match (&node.op, node.regions.first()) {
        (Op::Cluster { .. }, Some(body)) => Some((body, body.users())),
        _ => None,
    };
    let read = |(i, &v): (usize, &ValueId)| {
        let whole = extents.bytes(g.ty(v));
        match &body {
            Some((body, users)) => {
                let inner = body.inputs[i];
                let uses = users[inner.0 as usize]
                    .iter()
                    .map(|&(n, operand)| bytes_read(body, body.node(n), operand, extents));
                if body.outputs.iter().any(|o| o.value == inner) {
                    whole
                } else {
                    uses.sum::<Bytes>().min(whole)
                }
            }
            None => bytes_read(g, node, i, extents),
        }
    };
    let written: Bytes = node.outputs.iter().map(|&v| extents.bytes(g.ty(v))).sum();
    node.inputs.iter().enumerate().map(read).sum::<Bytes>() + written
}

/// Bytes that one op outside any cluster must read and write, from its operand and result types.
pub fn op_traffic(
    op: &Op,
    operands: &[impl Borrow<Type>],
    results: &[impl Borrow<Type>],
    extents: &Extents,
) -> Bytes {
    let written = || results.iter().map(|t| extents.bytes(t.borrow()));
    let read = |(i, t)| {
        op_reads(
            op,
            i,
            extents.bytes(t),
            written().next().unwrap_or(Bytes::ZERO),
        )
    };
    operands
        .iter()
        .map(Borrow::borrow)
        .enumerate()
        .map(read)
        .sum::<Bytes>()
        + written().sum()
}

/// Bytes of operand `i` that one op of a graph reads.
pub fn bytes_read(g: &Graph, node: &Node, i: usize, extents: &Extents) -> Bytes {
    op_reads(
        &node.op,
        i,
        extents.bytes(g.ty(node.inputs[i])),
        extents.bytes(g.ty(node.outputs[0])),
    )
}

/// Bytes of operand `i`, `whole` bytes in all, that an op reads whose first result has `written` bytes.
fn op_reads(op: &Op, i: usize, whole: Bytes, written: Bytes) -> Bytes {
    match op {
        Op::Slice { .. } | Op::Gather { .. } | Op::GatherElements { .. } | Op::GatherNd { .. }
            if i == 0 =>
        {
            whole.min(written)
        }
        _ => whole,
    }
}
