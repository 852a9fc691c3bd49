//! Gradients of matrix products and of attention.

use super::super::dim::Dim;
use super::super::graph::ValueId;
use super::super::ops::Op;
use super::super::scalar::ScalarOp;
use super::Vjp;
use super::norm::softmax_back;
use crate::error::Result;
use gristmill_runtime::DType;

/// `g b^T` and `a^T g`.
pub fn matmul(v: &mut Vjp) -> Result<()> {
    let (g, a, b) = (v.g()?, v.x(0), v.x(1));
    if v.needs(0) {
        let product = product_bt(v, g, b)?;
        v.give(0, product)?;
    }
    if v.needs(1) {
        let (rows, g) = match v.ty(b).rank() {
            2 => (as_matrix(v, a)?, as_matrix(v, g)?),
            _ => (a, g),
        };
        let product = product_at(v, rows, g)?;
        v.give(1, product)?;
    }
    Ok(())
}

/// All rows of a batch in one matrix: one product instead of a batch of them and a sum.
fn as_matrix(v: &mut Vjp, x: ValueId) -> Result<ValueId> {
    let shape = v.shape(x);
    let Some((last, lead)) = shape.split_last() else {
        return Ok(x);
    };
    let n_rows = lead.iter().fold(Dim::constant(1), |n, d| n.product(d));
    v.reshape(x, &[n_rows, last.clone()])
}

/// The last two axes exchanged.
fn transposed(v: &mut Vjp, x: ValueId) -> Result<ValueId> {
    let rank = v.ty(x).rank();
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank - 2, rank - 1);
    v.transpose(x, perm)
}

/// `a b^T`.
fn product_bt(v: &mut Vjp, a: ValueId, b: ValueId) -> Result<ValueId> {
    let b = transposed(v, b)?;
    v.emit(Op::MatMul, &[a, b])
}

/// `a^T b`.
fn product_at(v: &mut Vjp, a: ValueId, b: ValueId) -> Result<ValueId> {
    let a = transposed(v, a)?;
    v.emit(Op::MatMul, &[a, b])
}

/// With the probabilities `p` computed anew, `ds = p (g v^T - sum(g y))`: `scale ds k`, `scale ds^T q`, `p^T g`, and `ds` for
/// the mask (Dao et al., arXiv:2205.14135, appendix B.2).
pub fn attention(v: &mut Vjp) -> Result<()> {
    let Op::Attention { scale, causal } = v.op() else {
        return v.refuse("the op is no attention");
    };
    let (g, p) = (v.g()?, probabilities(v, scale.0, causal)?);
    if v.needs(2) {
        let to_values = product_at(v, p, g)?;
        v.give(2, to_values)?;
    }
    let to_probabilities = product_bt(v, g, v.x(2))?;
    let last = v.ty(p).rank() - 1;
    let ds = softmax_back(v, to_probabilities, p, last)?;
    if v.n_operands() > 3 {
        v.give(3, ds)?;
    }
    let scaled = v.times(ds, scale.0)?;
    if v.needs(0) {
        let to_queries = v.emit(Op::MatMul, &[scaled, v.x(1)])?;
        v.give(0, to_queries)?;
    }
    if v.needs(1) {
        let to_keys = product_at(v, scaled, v.x(0))?;
        v.give(1, to_keys)?;
    }
    Ok(())
}

fn probabilities(v: &mut Vjp, scale: f64, is_causal: bool) -> Result<ValueId> {
    let scores = product_bt(v, v.x(0), v.x(1))?;
    let mut scores = v.times(scores, scale)?;
    if v.n_operands() > 3 {
        scores = v.add(scores, v.x(3))?;
    }
    if is_causal {
        scores = masked(v, scores)?;
    }
    let axis = v.ty(scores).rank() - 1;
    v.emit(Op::Softmax { axis, log: false }, &[scores])
}

/// Scores of keys behind the query are minus infinity.
fn masked(v: &mut Vjp, scores: ValueId) -> Result<ValueId> {
    let shape = v.shape(scores);
    let square = shape[shape.len() - 2..].to_vec();
    let (query, key) = (positions(v, &square, 0)?, positions(v, &square, 1)?);
    let is_hidden = v.map(ScalarOp::Gt, &[key, query])?;
    v.replace(is_hidden, f64::NEG_INFINITY, scores)
}

fn positions(v: &mut Vjp, shape: &[Dim], axis: usize) -> Result<ValueId> {
    let op = Op::Iota {
        dtype: DType::I64,
        shape: shape.to_vec(),
        axis,
    };
    v.emit(op, &[])
}
