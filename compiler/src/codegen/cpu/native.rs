//! Ops that generated loops compute element by element, told from op, dtypes and ranks: capability reports ask before shapes are known.

use super::vector;
use crate::cluster::coverage::{Uncovered, kernels_after_transposition};
use crate::ir::{Graph, Node, Op, OpClass};
use crate::passes::{has_integer_form, has_phases};
use gristmill_runtime::DType;

/// Why generated loops compute a node element by element; `None` when vector code, a precompiled kernel or the executor computes it.
pub fn why_loops(g: &Graph, node: &Node) -> Option<String> {
    match &node.op {
        Op::Map(op) => {
            let dtypes: Vec<DType> = node.inputs.iter().map(|&v| g.ty(v).dtype).collect();
            let is_native = vector::takes(*op, &dtypes);
            (!is_native).then(|| "no vector code".to_owned())
        }
        Op::Constant { .. } | Op::TopK { .. } => None,
        Op::MatMul | Op::Conv { .. } if has_integer_form(g, node) => None,
        Op::Pad { .. } => Some("borders are computed element by element".to_owned()),
        Op::ConvTranspose { .. } => (!has_phases(g, node))
            .then(|| "its dtype, rank or window is not one that convolutions take over".to_owned()),
        // Along another axis than the last it is written out: reductions by columns, and vector code.
        Op::Softmax { .. } => match uncovered(g, node)? {
            Uncovered::Axes(_) => None,
            why => Some(why.to_string()),
        },
        _ => uncovered(g, node).map(|why| why.to_string()),
    }
}

fn uncovered(g: &Graph, node: &Node) -> Option<Uncovered> {
    let why = kernels_after_transposition(g, node).err()?;
    let is_of_executor = matches!(
        node.op.class(),
        OpClass::View | OpClass::Control | OpClass::State | OpClass::Transfer
    );
    (!is_of_executor).then_some(why)
}
