//! Operands of products of 8-bit integers: words of four elements, as `gristmill_kernels::gemm::integer` has them.

use super::strided::Strided;
use super::task::{Context, Place, Ptr};
use crate::cluster::bytes::{self, Zero};
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
    /// Says that the operands are bytes.
    pub(super) integers: Integers,
    /// The left-hand zero point, when only memory has it.
    pub(super) zero: Option<Ptr>,
    /// What the product computes besides itself.
    pub(super) nodes: Vec<NodeId>,
}

impl BytesProduct {
    /// `None` when `node` is another op, its operands lie otherwise, or the constant does not fit.
    pub(super) fn find(cx: &Context, node: &Node) -> Option<BytesProduct> {
        let g = &cx.body.graph;
        let centred = bytes::left_side(g, node)?;
        let left = Strided::resolve(cx.body, node.inputs[0], cx.in_memory);
        // A view that strides cannot express would be stored in 32 bits.
        let is_below = |&&n: &&NodeId| {
            g.node(n).op.class() != OpClass::View && g.node(n).outputs.contains(&left.base)
        };
        centred.nodes.iter().find(is_below)?;
        if left.strides.last() != Some(&1) {
            return None;
        }
        let words = |x: i64| (x >= 0 && x % WORD as i64 == 0).then_some(x / WORD as i64);
        let last = left.strides.len() - 1;
        let mut strides: Vec<i64> = left.strides[..last]
            .iter()
            .map(|&s| words(s))
            .collect::<Option<_>>()?;
        strides.push(1);
        let n_words = left.shape[last] / WORD;
        let left = Strided {
            base: centred.bytes,
            offset: words(left.offset)?,
            strides,
            ..left
        };
        let is_signed = cx.body.dtype(centred.bytes) == DType::I8;
        let mut integers = Integers {
            operands: if is_signed {
                Operands::I8
            } else {
                Operands::U8
            } as u32,
            ..Integers::default()
        };
        let zero = match centred.zero {
            Zero::Known(zero) => {
                integers.zero = zero;
                None
            }
            Zero::Value(v) => Some(Ptr::Read(Place::Value(v), 0)),
        };
        let source = cx.source(
            &Strided::resolve(cx.body, node.inputs[1], cx.in_memory),
            DType::I32,
        )?;
        let right = Ptr::Read(Place::Packed(cx.constant_bytes(&source)?), 0);
        Some(BytesProduct {
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

    /// What the descriptor says of the integers, with the zero point behind the operands of the epilogue. `keeps_sums` when results stay `i32`.
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
