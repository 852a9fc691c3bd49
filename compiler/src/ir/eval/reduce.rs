//! Reductions along axes, and ops made of them: argmax, softmax, norms, running sums.
//!
//! Floating-point dtypes accumulate in `f64` and round once, at the end. Integers accumulate in 64 bits, wrapping; a
//! mean then truncates.

use super::scalar::{Scalar, Wide};
use super::view::{concat, count, for_each_offset, strides};
use crate::error::{Error, Result};
use crate::ir::{Extremum, ReduceKind};
use gristmill_runtime::{DType, Tensor, with_dtype};
use std::collections::BTreeMap;

/// Accumulator of sums and products: `f64` for floating point, 64 bits for integers.
#[derive(Clone, Copy)]
enum Sum {
    Float(f64),
    Int(i64),
}

/// A wrapping conversion of any integer to 64 bits.
fn low_bits(v: i128) -> i64 {
    v as i64
}

/// The better of two by `<`; NaN is best.
pub fn extreme<T: Scalar>(a: T, b: T, kind: Extremum) -> T {
    if beats(b, a, kind) { b } else { a }
}

/// True when `a` is strictly better than `b`; NaN is better than everything else.
pub fn beats<T: Scalar>(a: T, b: T, kind: Extremum) -> bool {
    if a.is_nan() || b.is_nan() {
        return a.is_nan() && !b.is_nan();
    }
    match kind {
        Extremum::Max => a > b,
        Extremum::Min => a < b,
    }
}

/// For each result element, the offset of its first operand; and shape and strides of the reduced axes.
struct Plan {
    kept_shape: Vec<usize>,
    kept_strides: Vec<isize>,
    reduced_shape: Vec<usize>,
    reduced_strides: Vec<isize>,
}

impl Plan {
    fn new(shape: &[usize], axes: &[usize]) -> Plan {
        let all = strides(shape);
        let pick = |reduced: bool| {
            (0..shape.len())
                .filter(move |i| axes.contains(i) == reduced)
                .map(|i| (shape[i], all[i]))
                .unzip()
        };
        let ((kept_shape, kept_strides), (reduced_shape, reduced_strides)) =
            (pick(false), pick(true));
        Plan {
            kept_shape,
            kept_strides,
            reduced_shape,
            reduced_strides,
        }
    }

    /// For each result element in order, `f` with the fold of its operands.
    fn fold<A: Copy>(&self, init: A, mut step: impl FnMut(A, usize) -> A, mut f: impl FnMut(A)) {
        for_each_offset(&self.kept_shape, &self.kept_strides, 0, |start| {
            let mut acc = init;
            for_each_offset(&self.reduced_shape, &self.reduced_strides, start, |o| {
                acc = step(acc, o as usize)
            });
            f(acc);
        });
    }
}

/// [`Op::Reduce`](crate::ir::Op::Reduce) into `shape`.
pub fn reduce(x: &Tensor, kind: ReduceKind, axes: &[usize], shape: &[usize]) -> Result<Tensor> {
    let mut out = Tensor::zeros(x.dtype(), shape)?;
    let plan = Plan::new(x.shape(), axes);
    let n = count(&plan.reduced_shape);
    with_dtype!(x.dtype(), T => {
        let from = x.as_slice::<T>();
        let mut to = out.as_mut_slice::<T>().iter_mut();
        let mut write = |v: T| *to.next().expect("one fold per result element") = v;
        match kind {
            ReduceKind::Max => plan.fold(T::LEAST, |a, o| extreme(a, from[o], Extremum::Max), write),
            ReduceKind::Min => plan.fold(T::GREATEST, |a, o| extreme(a, from[o], Extremum::Min), write),
            ReduceKind::Sum | ReduceKind::Mean | ReduceKind::Prod => {
                let init = if kind == ReduceKind::Prod { 1 } else { 0 };
                let init = if x.dtype().is_float() { Sum::Float(init as f64) } else { Sum::Int(init) };
                let join = |a: Sum, o: usize| accumulate(a, from[o].to_wide(), kind);
                plan.fold(init, join, |sum| write(T::from_wide(finish(sum, kind, n, x.dtype()))));
            }
        }
    });
    Ok(out)
}

/// [`Op::AllReduce`](crate::ir::Op::AllReduce): the reduction of the operands side by side along a new axis, once for each.
pub fn all_reduce(all: &[&Tensor], kind: ReduceKind) -> Result<Vec<Tensor>> {
    let rows: Vec<usize> = std::iter::once(1)
        .chain(all[0].shape().iter().copied())
        .collect();
    let parts = all
        .iter()
        .map(|x| Ok(x.reshaped(&rows)?))
        .collect::<Result<Vec<_>>>()?;
    let stacked: Vec<usize> = std::iter::once(all.len())
        .chain(all[0].shape().iter().copied())
        .collect();
    let stacked = concat(&parts.iter().collect::<Vec<_>>(), 0, &stacked)?;
    let result = reduce(&stacked, kind, &[0], all[0].shape())?;
    Ok(vec![result; all.len()])
}

fn accumulate(acc: Sum, v: Wide, kind: ReduceKind) -> Sum {
    match (acc, v, kind) {
        (Sum::Float(a), Wide::Float(v), ReduceKind::Prod) => Sum::Float(a * v),
        (Sum::Float(a), Wide::Float(v), _) => Sum::Float(a + v),
        (Sum::Int(a), Wide::Int(v), ReduceKind::Prod) => Sum::Int(a.wrapping_mul(low_bits(v))),
        (Sum::Int(a), Wide::Int(v), _) => Sum::Int(a.wrapping_add(low_bits(v))),
        (acc, ..) => acc,
    }
}

fn finish(sum: Sum, kind: ReduceKind, count: usize, dtype: DType) -> Wide {
    let mean = kind == ReduceKind::Mean;
    match sum {
        Sum::Float(s) => Wide::Float(if mean { s / count as f64 } else { s }),
        Sum::Int(_) if mean && count == 0 => Wide::Int(0),
        Sum::Int(s) => {
            let s = if dtype.is_unsigned_int() {
                i128::from(s as u64)
            } else {
                i128::from(s)
            };
            Wide::Int(if mean { s / count as i128 } else { s })
        }
    }
}

/// [`Op::ArgReduce`](crate::ir::Op::ArgReduce) into `shape`. NaN counts as the extreme.
pub fn arg_reduce(
    x: &Tensor,
    kind: Extremum,
    axis: usize,
    select_last: bool,
    shape: &[usize],
) -> Result<Tensor> {
    let extent = x.shape()[axis];
    let mut out = Tensor::zeros(DType::I64, shape)?;
    if extent == 0 && !out.is_empty() {
        return Err(Error::invalid(format!(
            "axis {axis} of {:?} is empty",
            x.shape()
        )));
    }
    let inner = count(&x.shape()[axis + 1..]);
    with_dtype!(x.dtype(), T => {
        let from = x.as_slice::<T>();
        for (i, o) in out.as_mut_slice::<i64>().iter_mut().enumerate() {
            let at = |j: usize| from[(i / inner * extent + j) * inner + i % inner];
            let better = |a: T, b: T| if select_last { !beats(b, a, kind) } else { beats(a, b, kind) };
            *o = (1..extent).fold(0, |best, j| if better(at(j), at(best)) { j } else { best }) as i64;
        }
    });
    Ok(out)
}

/// A floating-point tensor from `f64` elements, each rounded once.
pub fn from_f64(values: &[f64], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let mut out = Tensor::zeros(dtype, shape)?;
    with_dtype!(dtype, T => {
        out.as_mut_slice::<T>().iter_mut().zip(values).for_each(|(o, &v)| *o = T::from_wide(Wide::Float(v)));
    });
    Ok(out)
}

/// Calls `f` with the offsets of each line along `axis`.
fn for_each_line(shape: &[usize], axis: usize, mut f: impl FnMut(&[usize])) {
    if count(shape) == 0 {
        return;
    }
    let inner = count(&shape[axis + 1..]);
    let outer = count(&shape[..axis]);
    let mut line = vec![0; shape[axis]];
    for o in 0..outer {
        for i in 0..inner {
            line.iter_mut()
                .enumerate()
                .for_each(|(j, at)| *at = (o * shape[axis] + j) * inner + i);
            f(&line);
        }
    }
}

/// Softmax, or its logarithm, of values in place.
pub fn softmax_line(line: &mut [f64], log: bool) {
    let max = line
        .iter()
        .fold(f64::NEG_INFINITY, |m, &v| extreme(m, v, Extremum::Max));
    let sum: f64 = line.iter().map(|v| (v - max).exp()).sum();
    line.iter_mut().for_each(|v| {
        *v = if log {
            *v - max - sum.ln()
        } else {
            (*v - max).exp() / sum
        }
    });
}

/// [`Op::Softmax`](crate::ir::Op::Softmax).
pub fn softmax(x: &Tensor, axis: usize, log: bool) -> Result<Tensor> {
    let mut values = x.to_f64s();
    for_each_line(x.shape(), axis, |offsets| {
        let mut line: Vec<f64> = offsets.iter().map(|&o| values[o]).collect();
        softmax_line(&mut line, log);
        offsets.iter().zip(line).for_each(|(&o, v)| values[o] = v);
    });
    from_f64(&values, x.dtype(), x.shape())
}

/// [`Op::LayerNorm`](crate::ir::Op::LayerNorm); the variance is that of the population.
pub fn layer_norm(x: &Tensor, gamma: &Tensor, beta: &Tensor, epsilon: f64) -> Result<Tensor> {
    norm(x, gamma, Some(beta), epsilon)
}

/// [`Op::RmsNorm`](crate::ir::Op::RmsNorm).
pub fn rms_norm(x: &Tensor, gamma: &Tensor, epsilon: f64) -> Result<Tensor> {
    norm(x, gamma, None, epsilon)
}

/// [`Op::Standardize`](crate::ir::Op::Standardize).
pub fn standardize(x: &Tensor, axes: &[usize], epsilon: f64) -> Result<Tensor> {
    let (mut values, shape) = (x.to_f64s(), x.shape());
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for i in 0..values.len() {
        groups.entry(group_of(i, shape, axes)).or_default().push(i);
    }
    for group in groups.values() {
        let mean_of = |f: &dyn Fn(f64) -> f64| {
            let terms = group.iter().map(|&i| f(values[i]));
            terms.sum::<f64>() / group.len() as f64
        };
        let mean = mean_of(&|v| v);
        let variance = mean_of(&|v| (v - mean) * (v - mean));
        let deviation = (variance + epsilon).sqrt();
        for &i in group {
            values[i] = (values[i] - mean) / deviation;
        }
    }
    from_f64(&values, x.dtype(), shape)
}

/// Position of an element whose indices along `axes` are 0 instead.
fn group_of(mut i: usize, shape: &[usize], axes: &[usize]) -> usize {
    let (mut position, mut stride) = (0, 1);
    for (axis, &extent) in shape.iter().enumerate().rev() {
        if !axes.contains(&axis) {
            position += i % extent * stride;
        }
        i /= extent;
        stride *= extent;
    }
    position
}

/// With `beta`, the mean is subtracted first.
fn norm(x: &Tensor, gamma: &Tensor, beta: Option<&Tensor>, epsilon: f64) -> Result<Tensor> {
    let (mut values, gamma, offset) = (x.to_f64s(), gamma.to_f64s(), beta.map(Tensor::to_f64s));
    if gamma.is_empty() {
        return Ok(x.clone());
    }
    for row in values.chunks_exact_mut(gamma.len()) {
        let n = row.len() as f64;
        let mean = if offset.is_some() {
            row.iter().sum::<f64>() / n
        } else {
            0.0
        };
        let mean_square = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        let deviation = (mean_square + epsilon).sqrt();
        for (i, v) in row.iter_mut().enumerate() {
            *v = (*v - mean) / deviation * gamma[i] + offset.as_ref().map_or(0.0, |b| b[i]);
        }
    }
    from_f64(&values, x.dtype(), x.shape())
}

/// [`Op::CumSum`](crate::ir::Op::CumSum).
pub fn cum_sum(x: &Tensor, axis: usize, exclusive: bool, reverse: bool) -> Result<Tensor> {
    let mut out = Tensor::zeros(x.dtype(), x.shape())?;
    with_dtype!(x.dtype(), T => {
        let (from, to) = (x.as_slice::<T>(), out.as_mut_slice::<T>());
        let zero = if x.dtype().is_float() { Sum::Float(0.0) } else { Sum::Int(0) };
        let value = |sum| T::from_wide(finish(sum, ReduceKind::Sum, 1, x.dtype()));
        for_each_line(x.shape(), axis, |line| {
            let mut sum = zero;
            for i in 0..line.len() {
                let at = line[if reverse { line.len() - 1 - i } else { i }];
                let next = accumulate(sum, from[at].to_wide(), ReduceKind::Sum);
                to[at] = value(if exclusive { sum } else { next });
                sum = next;
            }
        });
    });
    Ok(out)
}
