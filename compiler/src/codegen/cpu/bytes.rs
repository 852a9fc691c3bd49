//! Operands of products of 8-bit integers: words of four elements, as `gristmill_kernels::gemm::integer` has them.

use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Context, Place, Ptr};
use crate::cluster::bytes::{self, CentredBytes, Zero};
use crate::ir::{Node, NodeId, OpClass};
use gristmill_kernels::gemm::integer::{Integers, Operands, WORD};
use gristmill_runtime::DType;

/// The operands of a product of bytes.
pub(super) struct BytesProduct {
    /// The left-hand side; strides and offset count words, but for the last axis, which has stride 1.
    pub(super) left: Strided,
    /// Words along its last axis.
    pub(super) n_words: usize,
    /// The packed right-hand side.
    pub(super) right: Ptr,
    /// Type and zero point of the left-hand side.
    pub(super) integers: Integers,
    /// The left-hand zero point, when only memory has it.
    pub(super) zero: Option<Ptr>,
    /// Nodes that the product computes besides itself.
    pub(super) nodes: Vec<NodeId>,
}

impl BytesProduct {
    /// The operands of `node` if it multiplies bytes; `None` when it multiplies others.
    ///
    /// Errors when the left-hand side is no row of words in memory, or the constant does not fit.
    pub(super) fn find(cx: &Context, node: &Node) -> Result<Option<BytesProduct>, Rejected> {
        match bytes::left_side(&cx.body.graph, node) {
            Some(centred) => BytesProduct::of(cx, node, centred).map(Some),
            None => Ok(None),
        }
    }

    fn of(cx: &Context, node: &Node, centred: CentredBytes) -> Result<BytesProduct, Rejected> {
        let left = left_words(cx, node, &centred).ok_or(Rejected::Strides(0))?;
        let n_words = left.shape[left.shape.len() - 1] / WORD;
        let (integers, zero) = operands(cx, &centred);
        let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
        let source = cx
            .source(&resolved, DType::I32)
            .ok_or(Rejected::Strides(1))?;
        let right = Ptr::Read(Place::Packed(cx.constant_bytes(&source)?), 0);
        Ok(BytesProduct {
            left,
            n_words,
            right,
            integers,
            zero,
            nodes: centred.nodes,
        })
    }

    /// The address of the left-hand side.
    pub(super) fn read_left(&self) -> Ptr {
        Ptr::Read(Place::Value(self.left.base), self.left.offset * WORD as i64)
    }

    /// The descriptor's entry for integers, with the zero point behind the operands of the epilogue. `keeps_sums` when results stay
    /// `i32`.
    pub(super) fn describe(&self, operands: &mut Vec<Ptr>, keeps_sums: bool) -> Integers {
        let mut integers = Integers {
            keeps_sums: u32::from(keeps_sums),
            ..self.integers
        };
        if let Some(zero) = &self.zero {
            operands.push(zero.clone());
            integers.zero_operand = operands.len() as u32;
        }
        integers
    }
}

/// The left-hand side in words. `None` when rows are not contiguous, or do not start at words.
fn left_words(cx: &Context, node: &Node, centred: &CentredBytes) -> Option<Strided> {
    let g = &cx.body.graph;
    let left = Strided::resolve(cx.body, node.inputs[0], cx.in_memory);
    // A view that strides cannot express would be stored in 32 bits.
    let defines_base = |&&n: &&NodeId| {
        g.node(n).op.class() != OpClass::View && g.node(n).outputs.contains(&left.base)
    };
    centred.nodes.iter().find(defines_base)?;
    let (&last, outer) = left.strides.split_last()?;
    if last != 1 {
        return None;
    }
    let mut strides: Vec<i64> = outer.iter().map(|&s| words(s)).collect::<Option<_>>()?;
    strides.push(1);
    Some(Strided {
        base: centred.bytes,
        offset: words(left.offset)?,
        strides,
        ..left
    })
}

/// A number of bytes in words; `None` when it is negative or no whole number.
fn words(bytes: i64) -> Option<i64> {
    let word = WORD as i64;
    (bytes >= 0 && bytes % word == 0).then_some(bytes / word)
}

/// The left-hand operands' type and zero point; the address of the zero point where only memory has it.
fn operands(cx: &Context, centred: &CentredBytes) -> (Integers, Option<Ptr>) {
    let operands = match cx.body.dtype(centred.bytes) {
        DType::I8 => Operands::I8,
        _ => Operands::U8,
    };
    let mut integers = Integers {
        operands: operands as u32,
        ..Integers::default()
    };
    match centred.zero {
        Zero::Known(zero) => {
            integers.zero = zero;
            (integers, None)
        }
        Zero::Value(v) => (integers, Some(Ptr::Read(Place::Value(v), 0))),
    }
}
