//! Reductions, and the order of elements that they and poolings use.

use super::heavy::no_code;
use super::{Emit, Ix, Puller};
use crate::error::Result;
use crate::ir::vecprog::real_bits;
use crate::ir::{Extremum, Node, Op, ReduceKind, ScalarOp};
use gristmill_runtime::DType;
use gristmill_runtime::float8::F8E5M2;
use std::hash::Hash;

/// Accumulator dtype of sums and products of a dtype.
pub(in crate::codegen) fn accumulator(dtype: DType) -> DType {
    match dtype {
        d if d.is_float() => DType::F64,
        d if d.is_unsigned_int() => DType::U64,
        _ => DType::I64,
    }
}

/// Bits of the identity of `max` or `min`: the smallest or largest element of a dtype.
pub(in crate::codegen) fn extreme_bits(dtype: DType, identity_of: Extremum) -> u64 {
    let max = identity_of == Extremum::Max;
    match dtype {
        DType::Bool => u64::from(!max),
        // Conversion to a float of 8 bits saturates, so `real_bits` would give a finite number.
        DType::F8E5M2 => if max { F8E5M2::LEAST } else { F8E5M2::GREATEST }
            .to_bits()
            .into(),
        d if d.is_float() => real_bits(
            d,
            if max {
                f64::NEG_INFINITY
            } else {
                f64::INFINITY
            },
        ),
        d if d.is_unsigned_int() => {
            if max {
                0
            } else {
                u64::MAX >> (64 - 8 * d.size_bytes())
            }
        }
        d => {
            let most = (1u64 << (8 * d.size_bytes() - 1)) - 1;
            if max { most + 1 } else { most }
        }
    }
}

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    pub(super) fn reduce<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let Op::Reduce {
            kind,
            axes,
            keepdims,
        } = &node.op
        else {
            return Err(no_code(&node.op));
        };
        let x = node.inputs[0];
        let (dtype, shape) = (self.body.dtype(x), self.body.shape(x));
        let extents: Vec<usize> = axes.iter().map(|&a| shape[a]).collect();
        let (acc, init) = accumulator_of(*kind, dtype);
        let init = e.constant(acc, init);
        let op = joining(*kind, dtype);
        let sum = self.loops(e, &extents, &[init], &mut |s, e, inner, carried| {
            let from = reduced_index(at, inner, axes, shape.len(), *keepdims);
            let element = s.value(e, x, &from)?;
            // A result of 8-bit floats that is computed in `f32` saturates; a chosen one does not.
            if let Some(extremum) = extremum(*kind).filter(|_| dtype.is_float8()) {
                let better = beats(e, element, carried[0], dtype, extremum)?;
                return Ok(vec![e.choose(better, element, carried[0])]);
            }
            let element = e.convert(element, dtype, acc)?;
            Ok(vec![e.scalar_op(
                op,
                &[acc, acc],
                &[carried[0], element],
            )?])
        })?[0];
        let result = match kind {
            ReduceKind::Mean => mean(e, sum, acc, extents.iter().product())?,
            _ => sum,
        };
        e.convert(result, acc, dtype)
    }

    pub(super) fn arg_reduce<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let Op::ArgReduce {
            kind,
            axis,
            keepdims,
            select_last,
        } = node.op
        else {
            return Err(no_code(&node.op));
        };
        let x = node.inputs[0];
        let (dtype, shape) = (self.body.dtype(x), self.body.shape(x));
        let index = |i: Ix<V>| reduced_index(at, &[i], &[axis], shape.len(), keepdims);
        let first = self.value(e, x, &index(Ix::C(0)))?;
        let (zero, end) = (e.index(0), Ix::C(shape[axis] as i64));
        let best = e.for_loop(Ix::C(1), end, 1, &[first, zero], |e, i, carried| {
            self.scoped(|s| {
                let v = s.value(e, x, &index(Ix::V(i)))?;
                let better = if select_last {
                    let worse = beats(e, carried[0], v, dtype, kind)?;
                    e.negated(worse)?
                } else {
                    beats(e, v, carried[0], dtype, kind)?
                };
                Ok(vec![
                    e.choose(better, v, carried[0]),
                    e.choose(better, i, carried[1]),
                ])
            })
        })?;
        Ok(e.index_to_i64(best[1]))
    }
}

/// The extremum of a reduction to one.
fn extremum(kind: ReduceKind) -> Option<Extremum> {
    match kind {
        ReduceKind::Max => Some(Extremum::Max),
        ReduceKind::Min => Some(Extremum::Min),
        _ => None,
    }
}

/// Accumulator dtype and bits of the identity of a reduction.
fn accumulator_of(kind: ReduceKind, dtype: DType) -> (DType, u64) {
    let wide = accumulator(dtype);
    match kind {
        ReduceKind::Max => (dtype, extreme_bits(dtype, Extremum::Max)),
        ReduceKind::Min => (dtype, extreme_bits(dtype, Extremum::Min)),
        ReduceKind::Prod => (wide, real_bits(wide, 1.0)),
        ReduceKind::Sum | ReduceKind::Mean => (wide, 0),
    }
}

/// The element-wise op of a reduction.
fn joining(kind: ReduceKind, dtype: DType) -> ScalarOp {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => ScalarOp::Add,
        ReduceKind::Prod => ScalarOp::Mul,
        ReduceKind::Max if dtype == DType::Bool => ScalarOp::Or,
        ReduceKind::Min if dtype == DType::Bool => ScalarOp::And,
        ReduceKind::Max => ScalarOp::Max,
        ReduceKind::Min => ScalarOp::Min,
    }
}

/// Index into the operand of a reduction: `at` with the reduced axes taken from `inner`.
pub(in crate::codegen) fn reduced_index<V: Copy>(
    at: &[Ix<V>],
    inner: &[Ix<V>],
    axes: &[usize],
    rank: usize,
    keepdims: bool,
) -> Vec<Ix<V>> {
    let mut kept = at.iter();
    (0..rank)
        .map(|axis| match axes.iter().position(|&a| a == axis) {
            Some(i) => {
                if keepdims {
                    kept.next();
                }
                inner[i]
            }
            None => *kept.next().expect("one index per kept axis"),
        })
        .collect()
}

/// The mean of `count` values, given their sum; 0 of no integers.
pub(in crate::codegen) fn mean<E: Emit>(
    e: &mut E,
    sum: E::Value,
    acc: DType,
    count: usize,
) -> Result<E::Value> {
    if acc == DType::F64 {
        let n = e.constant(acc, (count as f64).to_bits());
        return e.primitive(ScalarOp::Div, acc, acc, &[sum, n]);
    }
    let n = e.constant(acc, count as u64);
    Ok(if count == 0 {
        n
    } else {
        e.quotient(acc, sum, n)
    })
}

/// True when `a` is strictly better than `b`; NaN is better than anything but NaN.
pub(in crate::codegen) fn beats<E: Emit>(
    e: &mut E,
    a: E::Value,
    b: E::Value,
    dtype: DType,
    kind: Extremum,
) -> Result<E::Value> {
    let (a, b, dtype) = match dtype {
        d if d.is_narrow_float() => (
            e.convert(a, dtype, DType::F32)?,
            e.convert(b, dtype, DType::F32)?,
            DType::F32,
        ),
        DType::Bool => (a, b, DType::U8),
        _ => (a, b, dtype),
    };
    let op = if kind == Extremum::Max {
        ScalarOp::Gt
    } else {
        ScalarOp::Lt
    };
    let strict = e.scalar_op(op, &[dtype, dtype], &[a, b])?;
    if !dtype.is_float() {
        return Ok(strict);
    }
    let (a_nan, b_number) = (e.is_nan(a), e.is_number(b));
    let by_nan = e.both(a_nan, b_number)?;
    e.either(strict, by_nan)
}
