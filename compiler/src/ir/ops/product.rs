//! Matrix products, and attention, which is made of them.
//!
//! Floating-point dtypes accumulate in `f64` and round once, at the end; integers accumulate in 64 bits, wrapping, which
//! gives the same as wrapping in their own width.

use super::Op;
use super::norm::{softmax_back, softmax_line};
use crate::error::Result;
use crate::ir::axes::{Passed, Transposed};
use crate::ir::dim::Dim;
use crate::ir::eval::scalar::{Scalar, Wide};
use crate::ir::eval::view::{broadcast_strides, count, for_each_offset};
use crate::ir::eval::{Call, view};
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, broadcast_shapes};
use crate::ir::scalar::ScalarOp;
use crate::ir::types::{Shape, Type};
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{eval, infer, work};
use gristmill_runtime::{DType, Tensor, with_dtype};

/// Accumulator of products.
pub(super) trait Acc: Copy + Default {
    /// `self + a * b`.
    fn add_product(self, a: Self, b: Self) -> Self;
    fn load(t: &Tensor) -> Vec<Self>;
    fn store(values: &[Self], dtype: DType, shape: &[usize]) -> Result<Tensor>;
}

impl Acc for f64 {
    fn add_product(self, a: f64, b: f64) -> f64 {
        self + a * b
    }
    fn load(t: &Tensor) -> Vec<f64> {
        t.to_f64s()
    }
    fn store(values: &[f64], dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::from_f64s(dtype, shape, values)?)
    }
}

impl Acc for i64 {
    fn add_product(self, a: i64, b: i64) -> i64 {
        self.wrapping_add(a.wrapping_mul(b))
    }
    fn load(t: &Tensor) -> Vec<i64> {
        let low_bits = |w: Wide| match w {
            Wide::Int(v) => v as i64,
            Wide::Float(v) => v as i64,
        };
        with_dtype!(t.dtype(), T => t.as_slice::<T>().iter().map(|v| low_bits(v.to_wide())).collect())
    }
    fn store(values: &[i64], dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let mut out = Tensor::zeros(dtype, shape)?;
        with_dtype!(dtype, T => {
            out.as_mut_slice::<T>().iter_mut().zip(values).for_each(|(o, &v)| *o = T::from_wide(Wide::Int(v.into())));
        });
        Ok(out)
    }
}

/// Zeros for the accumulators of `shape`; the size is checked as that of a tensor.
pub(super) fn accumulators<A: Acc>(shape: &[usize]) -> Result<Vec<A>> {
    let bytes = gristmill_runtime::tensor::checked_size_bytes(DType::F64, shape)?;
    Ok(vec![A::default(); bytes / DType::F64.size_bytes()])
}

pub(super) fn matmul_infer(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let (a, b) = (&args[0], &args[1]);
    if a.rank() < 2 || b.rank() < 2 || a.dtype != b.dtype || a.dtype == DType::Bool {
        return Err(format!(
            "expected two numeric tensors of rank 2 or more and one dtype, got {a} and {b}"
        ));
    }
    let (ra, rb) = (a.rank(), b.rank());
    if a.shape[ra - 1] != b.shape[rb - 2] {
        return Err(format!(
            "inner dimensions differ: lhs {a} has k = {}, rhs {b} has k = {}",
            a.shape[ra - 1],
            b.shape[rb - 2]
        ));
    }
    let mut shape = broadcast_shapes(&a.shape[..ra - 2], &b.shape[..rb - 2])?;
    shape.push(a.shape[ra - 2].clone());
    shape.push(b.shape[rb - 1].clone());
    infer::one(a.dtype, shape)
}

pub(super) fn matmul_eval(c: &Call) -> Result<Vec<Tensor>> {
    if let Some(empty) = c.empty() {
        return empty;
    }
    eval::one(match c.inputs[0].dtype().is_float() {
        true => matmul_in::<f64>(c.inputs[0], c.inputs[1], c.shape),
        false => matmul_in::<i64>(c.inputs[0], c.inputs[1], c.shape),
    })
}

fn matmul_in<A: Acc>(a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let (lead_a, lead_b) = (
        &a.shape()[..a.shape().len() - 2],
        &b.shape()[..b.shape().len() - 2],
    );
    let (lead, matrix) = shape.split_at(shape.len() - 2);
    let (m, n, k) = (matrix[0], matrix[1], a.shape()[a.shape().len() - 1]);
    let mut out = accumulators::<A>(shape)?;
    let (x, y) = (A::load(a), A::load(b));
    let mut starts = Vec::new();
    for_each_offset(lead, &broadcast_strides(lead_a, lead), 0, |i| {
        starts.push((i as usize, 0))
    });
    let mut batch = starts.iter_mut();
    for_each_offset(lead, &broadcast_strides(lead_b, lead), 0, |i| {
        batch.next().expect("both walk the same batches").1 = i as usize;
    });
    for (i, &(ia, ib)) in starts.iter().enumerate() {
        let (x, y) = (&x[ia * m * k..][..m * k], &y[ib * k * n..][..k * n]);
        product(x, y, &mut out[i * m * n..(i + 1) * m * n], (m, k, n));
    }
    A::store(&out, a.dtype(), shape)
}

/// `out += a b` for row-major `a: [m, k]`, `b: [k, n]`, `out: [m, n]`.
fn product<A: Acc>(a: &[A], b: &[A], out: &mut [A], (m, k, n): (usize, usize, usize)) {
    for i in 0..m {
        let row = &mut out[i * n..(i + 1) * n];
        for p in 0..k {
            let scale = a[i * k + p];
            row.iter_mut()
                .zip(&b[p * n..(p + 1) * n])
                .for_each(|(o, &v)| *o = o.add_product(scale, v));
        }
    }
}

/// A product of depth `k` takes about as long as one of depth `k` plus this at full speed: tiles are filled, drained and written back.
/// (Measured: batches of depth 64 run at two thirds of the speed of those of depth 768.)
const PRODUCT_OVERHEAD_DEPTH: u64 = 32;

pub(super) fn matmul_work(s: &Sizes) -> Count {
    let of_depth = |k| work::product([2, s.n_out(), k].into_iter());
    Count {
        overhead_flops: of_depth(PRODUCT_OVERHEAD_DEPTH),
        ..work::count(WorkClass::MatMul, of_depth(s.extent_from_end(0, 0)))
    }
}

/// By a weight matrix, and a transpose that leaves the last axis.
pub(super) fn matmul_axes(t: &Transposed) -> Option<Passed> {
    let last = t.perm.len() - 1;
    let fits = t.perm[last] == last && t.ranks[1] == 2;
    fits.then(|| t.passed(Op::MatMul)).flatten()
}

/// `g b^T` and `a^T g`.
pub(super) fn matmul_gradient(v: &mut Vjp) -> Result<()> {
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

pub(super) fn attention_infer(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let (q, k, v) = (&args[0], &args[1], &args[2]);
    let r = q.rank();
    let fits = r >= 2
        && k.rank() == r
        && v.rank() == r
        && q.dtype.is_float()
        && k.dtype == q.dtype
        && v.dtype == q.dtype;
    if !fits
        || q.shape[r - 1] != k.shape[r - 1]
        || k.shape[r - 2] != v.shape[r - 2]
        || k.shape[..r - 2] != q.shape[..r - 2]
        || v.shape[..r - 2] != q.shape[..r - 2]
    {
        return Err(format!("q {q}, k {k} and v {v} do not fit together"));
    }
    let mut scores = q.shape[..r - 1].to_vec();
    scores.push(k.shape[r - 2].clone());
    if let Some(m) = args.get(3)
        && (m.dtype != q.dtype || broadcast_shapes(&m.shape, &scores)? != scores)
    {
        return Err(format!(
            "mask {m} does not broadcast to {}{}",
            q.dtype,
            Shape(scores)
        ));
    }
    let mut out = q.shape[..r - 1].to_vec();
    out.push(v.shape[r - 1].clone());
    infer::one(q.dtype, out)
}

/// All in `f64`. A query that sees no key, every score being minus infinity, gives NaN, as the composed ops do.
pub(super) fn attention_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Attention { scale, causal });
    if let Some(empty) = c.empty() {
        return empty;
    }
    let (q, k, v) = (c.inputs[0], c.inputs[1], c.inputs[2]);
    let (shape, rank) = (c.shape, c.shape.len());
    let (n_q, n_k) = (shape[rank - 2], k.shape()[rank - 2]);
    let (d, d_v) = (q.shape()[rank - 1], shape[rank - 1]);
    let mut scores_shape = shape.to_vec();
    scores_shape[rank - 1] = n_k;
    let mask = c.inputs.get(3).map(|m| view::broadcast(m, &scores_shape));
    let mask = mask.transpose()?.map(|m| m.to_f64s());
    let mut out = accumulators::<f64>(shape)?;
    let (q, k, values) = (q.to_f64s(), k.to_f64s(), v.to_f64s());
    for row in 0..count(&shape[..rank - 2]) * n_q {
        let (batch, i) = (row / n_q, row % n_q);
        let query = &q[row * d..][..d];
        let score = |j: usize| {
            let key = &k[(batch * n_k + j) * d..][..d];
            let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
            dot * scale.0 + mask.as_ref().map_or(0.0, |m| m[row * n_k + j])
        };
        let is_seen = |j: usize| !*causal || j <= i;
        let scores = (0..n_k).map(|j| {
            if is_seen(j) {
                score(j)
            } else {
                f64::NEG_INFINITY
            }
        });
        let mut scores: Vec<f64> = scores.collect();
        softmax_line(&mut scores, false);
        let values = &values[batch * n_k * d_v..][..n_k * d_v];
        product(&scores, values, &mut out[row * d_v..][..d_v], (1, n_k, d_v));
    }
    eval::one(f64::store(&out, v.dtype(), shape))
}

/// Two products and a softmax.
pub(super) fn attention_work(s: &Sizes) -> Count {
    let n_keys = s.extent_from_end(1, 1);
    let (head, value) = (s.extent_from_end(0, 0), s.extent_from_end(2, 0));
    let scores = (s.n_in() / head.max(1)).saturating_mul(n_keys);
    let per_score = 2 * head + 2 * value + 14;
    work::count(WorkClass::Attention, scores.saturating_mul(per_score))
}

/// With the probabilities `p` computed anew, `ds = p (g v^T - sum(g y))`: `scale ds k`, `scale ds^T q`, `p^T g`, and `ds` for
/// the mask (Dao et al., arXiv:2205.14135, appendix B.2).
pub(super) fn attention_gradient(v: &mut Vjp) -> Result<()> {
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
