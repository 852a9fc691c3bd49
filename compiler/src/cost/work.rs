//! Work of an op: arithmetic operations by class, and bytes that must be read and written.

use super::Bytes;
use crate::ir::work::Sizes;
pub(super) use crate::ir::work::product;
use crate::ir::{Bindings, Dim, Graph, Node, NodeId, Op, Reads, Shape, Type, ValueId, WorkClass};
use gristmill_runtime::DType;
use std::borrow::Borrow;

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
        let bound = dim.bind(&self.bindings);
        let mut unknown = Bindings::new();
        bound.visit_symbols(&mut |s| {
            unknown.insert(s.to_owned(), self.unknown_extent);
        });
        bound.bind(&unknown).as_const().unwrap_or(0).max(0) as u64
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

/// Arithmetic of an op from its operand and result types, by the op table. Regions are not looked into.
pub fn of_op(
    op: &Op,
    operands: &[impl Borrow<Type>],
    results: &[impl Borrow<Type>],
    extents: &Extents,
) -> Work {
    let operands: Vec<&Type> = operands.iter().map(Borrow::borrow).collect();
    let results: Vec<&Type> = results.iter().map(Borrow::borrow).collect();
    let typed = operands.first().or(results.first());
    let count = (op.spec().work)(&Sizes {
        op,
        operands: &operands,
        results: &results,
        extent: &|d| extents.of(d),
    });
    Work {
        class: count.class,
        dtype: typed.map_or(DType::F32, |t| t.dtype),
        flops: count.flops,
        overhead_flops: count.overhead_flops,
    }
}

/// Bytes that a node cannot avoid to read and write: its results, and the accessed parts of its
/// operands. Of a table, only gathered rows or a slice count.
pub fn traffic(g: &Graph, node: &Node, extents: &Extents) -> Bytes {
    let written: Bytes = node.outputs.iter().map(|&v| extents.bytes(g.ty(v))).sum();
    let read: Bytes = match (&node.op, node.regions.first()) {
        (Op::Cluster { .. }, Some(body)) => {
            let users = body.users();
            let operands = node.inputs.iter().zip(&body.inputs);
            let bytes = |(&v, &inner): (&ValueId, &ValueId)| {
                let whole = extents.bytes(g.ty(v));
                let accessed = bytes_read_in(body, &users[inner.0 as usize], inner, extents);
                accessed.map_or(whole, |bytes| bytes.min(whole))
            };
            operands.map(bytes).sum()
        }
        _ => (0..node.inputs.len())
            .map(|i| bytes_read(g, node, i, extents))
            .sum(),
    };
    read + written
}

/// Bytes of an input of a cluster's body that its users, given by node and operand, read; `None` if
/// the input is also a result.
fn bytes_read_in(
    body: &Graph,
    users: &[(NodeId, usize)],
    v: ValueId,
    extents: &Extents,
) -> Option<Bytes> {
    let is_output = body.outputs.iter().any(|o| o.value == v);
    let read = |&(n, operand): &(NodeId, usize)| bytes_read(body, body.node(n), operand, extents);
    (!is_output).then(|| users.iter().map(read).sum())
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
    match op.spec().reads {
        Reads::Picked if i == 0 => whole.min(written),
        Reads::Picked | Reads::Whole => whole,
    }
}
