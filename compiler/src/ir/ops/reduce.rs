//! Reductions along axes, positions of extremes, running sums.
//!
//! Floating-point dtypes accumulate in `f64` and round once, at the end. Integers accumulate in 64 bits, wrapping; a
//! mean then truncates.

use super::{Extremum, Op, ReduceKind};
use crate::error::Result;
use crate::ir::axes::{Passed, Transposed, along};
use crate::ir::dim::Dim;
use crate::ir::eval::Call;
use crate::ir::eval::scalar::{Scalar, Wide, beats, extreme};
use crate::ir::eval::view::{count, for_each_line, for_each_offset, strides};
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, check_axes, check_axis};
use crate::ir::scalar::ScalarOp;
use crate::ir::types::Type;
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{eval, infer, work};
use gristmill_runtime::{DType, Tensor, with_dtype};

/// Accumulator of sums and products: `f64` for floating point, 64 bits for integers.
#[derive(Clone, Copy)]
enum Sum {
    Float(f64),
    Int(i64),
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

/// A wrapping conversion of any integer to 64 bits.
fn low_bits(v: i128) -> i64 {
    v as i64
}

fn reduced(shape: &[Dim], axes: &[usize], keepdims: bool) -> Vec<Dim> {
    let kept = |(i, d): (usize, &Dim)| match axes.contains(&i) {
        true => keepdims.then(|| Dim::constant(1)),
        false => Some(d.clone()),
    };
    shape.iter().enumerate().filter_map(kept).collect()
}

pub(super) fn check_reduced(kind: ReduceKind, ty: &Type) -> Result<(), String> {
    if ty.dtype == DType::Bool && !matches!(kind, ReduceKind::Max | ReduceKind::Min) {
        return Err(format!("{kind:?} of bool", kind = kind).to_lowercase());
    }
    Ok(())
}

pub(super) fn reduce_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        Reduce {
            kind,
            axes,
            keepdims
        }
    );
    check_axes(axes, &args[0])?;
    check_reduced(*kind, &args[0])?;
    infer::one(args[0].dtype, reduced(&args[0].shape, axes, *keepdims))
}

pub(super) fn reduce_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Reduce { kind, axes });
    eval::one(reduction(c.inputs[0], *kind, axes, c.shape))
}

/// The reduction of `x` along `axes`, into `shape`.
pub(super) fn reduction(
    x: &Tensor,
    kind: ReduceKind,
    axes: &[usize],
    shape: &[usize],
) -> Result<Tensor> {
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

/// A product in another order rounds and overflows differently.
pub(super) fn reduce_axes(t: &Transposed) -> Option<Passed> {
    let Op::Reduce {
        kind,
        axes,
        keepdims,
    } = t.op
    else {
        return None;
    };
    if *kind == ReduceKind::Prod {
        return None;
    }
    let mut below: Vec<usize> = axes.iter().map(|&a| t.perm[a]).collect();
    below.sort_unstable();
    let op = Op::Reduce {
        kind: *kind,
        axes: below,
        keepdims: *keepdims,
    };
    t.reduced(op, axes, *keepdims)
}

/// A reduction with its cotangent, the reduced axes kept as extents of 1.
struct Reduction {
    axes: Vec<usize>,
    /// Shape of the result.
    kept: Vec<Dim>,
    /// Cotangent.
    g: ValueId,
}

pub(super) fn reduce_gradient(v: &mut Vjp) -> Result<()> {
    let Op::Reduce { kind, axes, .. } = v.op() else {
        return v.refuse("the op is no reduction");
    };
    let mut kept = v.shape(v.x(0));
    axes.iter().for_each(|&i| kept[i] = 1.into());
    let g = v.g()?;
    let g = v.reshape(g, &kept)?;
    let of = Reduction { axes, kept, g };
    let gradient = match kind {
        ReduceKind::Sum => g,
        ReduceKind::Mean => divided_by_count(v, &of)?,
        ReduceKind::Max | ReduceKind::Min => extremum_gradient(v, &of)?,
        ReduceKind::Prod => product_gradient(v, &of)?,
    };
    let shape = v.shape(v.x(0));
    let spread = v.broadcast(gradient, &shape)?;
    v.give(0, spread)
}

/// The cotangent over the number of reduced elements. Counts of narrow floats are made in `f32`, which holds them.
fn divided_by_count(v: &mut Vjp, of: &Reduction) -> Result<ValueId> {
    let narrow = v.ty(of.g).dtype;
    let dtype = if narrow.is_narrow_float() {
        DType::F32
    } else {
        narrow
    };
    let x = v.x(0);
    let extents = of.axes.iter().map(|&i| v.shape(x)[i].clone());
    let n = number_of(v, dtype, extents.collect())?;
    let g = v.cast(of.g, dtype)?;
    let share = v.div(g, n)?;
    v.cast(share, narrow)
}

/// The product of extents as a number: counted where they are symbolic.
fn number_of(v: &mut Vjp, dtype: DType, extents: Vec<Dim>) -> Result<ValueId> {
    let n = extents.iter().fold(Dim::constant(1), |n, d| n.product(d));
    if let Some(n) = n.as_const() {
        return v.scalar(dtype, n as f64);
    }
    let ones = v.full(dtype, &extents, 1.0)?;
    v.unbroadcast(ones, &[])
}

/// Equal extremes share.
fn extremum_gradient(v: &mut Vjp, of: &Reduction) -> Result<ValueId> {
    let (x, dtype) = (v.x(0), v.ty(of.g).dtype);
    let y = v.reshape(v.y(), &of.kept)?;
    let is_extreme = v.map(ScalarOp::Eq, &[x, y])?;
    let winners = v.cast(is_extreme, dtype)?;
    let n = v.reduce(ReduceKind::Sum, winners, &of.axes)?;
    let share = v.div(of.g, n)?;
    v.mul(winners, share)
}

/// The product of the other elements: by division where none of them is 0. An element that is 0 counts as 1, and gets the
/// product if it is the only one.
///
/// A second derivative holds where no element is 0.
fn product_gradient(v: &mut Vjp, of: &Reduction) -> Result<ValueId> {
    let (x, dtype) = (v.x(0), v.ty(of.g).dtype);
    let is_zero = v.with_number(ScalarOp::Eq, x, 0.0)?;
    let zeros = v.cast(is_zero, dtype)?;
    let n_zeros = v.reduce(ReduceKind::Sum, zeros, &of.axes)?;
    let others_are_not = v.map(ScalarOp::Eq, &[n_zeros, zeros])?;
    let factors = v.replace(is_zero, 1.0, x)?;
    let all = v.reduce(ReduceKind::Prod, factors, &of.axes)?;
    let others = v.div(all, factors)?;
    let gradient = v.mul(of.g, others)?;
    v.keep(others_are_not, gradient)
}

pub(super) fn arg_reduce_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, ArgReduce { axis, keepdims });
    check_axis(*axis, &args[0])?;
    if args[0].shape[*axis].is(0) {
        return Err(format!("axis {axis} of {} is empty", args[0]));
    }
    infer::one(DType::I64, reduced(&args[0].shape, &[*axis], *keepdims))
}

/// NaN counts as the extreme.
pub(super) fn arg_reduce_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c.op,
        ArgReduce {
            kind,
            axis,
            select_last
        }
    );
    let x = c.inputs[0];
    let extent = x.shape()[*axis];
    let mut out = Tensor::zeros(DType::I64, c.shape)?;
    let inner = count(&x.shape()[axis + 1..]);
    with_dtype!(x.dtype(), T => {
        let from = x.as_slice::<T>();
        for (i, o) in out.as_mut_slice::<i64>().iter_mut().enumerate() {
            let at = |j: usize| from[(i / inner * extent + j) * inner + i % inner];
            let better = |a: T, b: T| if *select_last { !beats(b, a, *kind) } else { beats(a, b, *kind) };
            *o = (1..extent).fold(0, |best, j| if better(at(j), at(best)) { j } else { best }) as i64;
        }
    });
    Ok(vec![out])
}

pub(super) fn arg_reduce_axes(t: &Transposed) -> Option<Passed> {
    let Op::ArgReduce { axis, keepdims, .. } = *t.op else {
        return None;
    };
    t.reduced(along(t)?, &[axis], keepdims)
}

pub(super) fn cum_sum_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, CumSum { axis });
    check_axis(*axis, &args[0])?;
    if args[0].dtype == DType::Bool {
        return Err("cumulative sum of bool".into());
    }
    Ok(vec![args[0].clone()])
}

pub(super) fn cum_sum_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c.op,
        CumSum {
            axis,
            exclusive,
            reverse
        }
    );
    let x = c.inputs[0];
    let mut out = Tensor::zeros(x.dtype(), x.shape())?;
    with_dtype!(x.dtype(), T => {
        let (from, to) = (x.as_slice::<T>(), out.as_mut_slice::<T>());
        let zero = if x.dtype().is_float() { Sum::Float(0.0) } else { Sum::Int(0) };
        let value = |sum| T::from_wide(finish(sum, ReduceKind::Sum, 1, x.dtype()));
        for_each_line(x.shape(), *axis, |line| {
            let mut sum = zero;
            for i in 0..line.len() {
                let at = line[if *reverse { line.len() - 1 - i } else { i }];
                let next = accumulate(sum, from[at].to_wide(), ReduceKind::Sum);
                to[at] = value(if *exclusive { sum } else { next });
                sum = next;
            }
        });
    });
    Ok(vec![out])
}

pub(super) fn cum_sum_work(s: &Sizes) -> Count {
    work::count(WorkClass::Scan, s.n_in())
}

/// The running sum in the other direction.
pub(super) fn cum_sum_gradient(v: &mut Vjp) -> Result<()> {
    let Op::CumSum {
        axis,
        exclusive,
        reverse,
    } = v.op()
    else {
        return v.refuse("the op is no running sum");
    };
    let back = Op::CumSum {
        axis,
        exclusive,
        reverse: !reverse,
    };
    let g = v.g()?;
    let sum = v.emit(back, &[g])?;
    v.give(0, sum)
}
