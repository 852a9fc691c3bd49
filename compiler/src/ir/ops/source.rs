//! Ops that make values from nothing: constants, positions, random bits.

use super::Op;
use crate::error::Result;
use crate::ir::eval::Call;
use crate::ir::eval::scalar::{Scalar, Wide};
use crate::ir::eval::view::count;
use crate::ir::graph::Graph;
use crate::ir::infer::{Inferred, check_axis};
use crate::ir::types::{Shape, Type};
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{eval, infer, work};
use gristmill_kernels::random;
use gristmill_runtime::{DType, Tensor, with_dtype};

pub(super) fn constant_infer(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Constant { value });
    infer::one(value.dtype(), Shape::of(value.shape()).0)
}

pub(super) fn constant_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Constant { value });
    eval::one(value.tensor())
}

pub(super) fn iota_infer(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Iota { dtype, shape, axis });
    let ty = Type {
        dtype: *dtype,
        shape: Shape(shape.clone()),
    };
    check_axis(*axis, &ty)?;
    if *dtype == DType::Bool {
        return Err("iota of bool".into());
    }
    Ok(vec![ty])
}

/// Positions convert as a cast from `i64` does.
pub(super) fn iota_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Iota { dtype, axis });
    let mut out = Tensor::zeros(*dtype, c.shape)?;
    let (inner, extent) = (count(&c.shape[axis + 1..]), c.shape[*axis]);
    with_dtype!(*dtype, T => {
        for (i, o) in out.as_mut_slice::<T>().iter_mut().enumerate() {
            *o = T::from_wide(Wide::Int((i / inner % extent) as i128));
        }
    });
    Ok(vec![out])
}

pub(super) fn random_bits_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, RandomBits { shape, first });
    if i64::try_from(*first).is_err() {
        return Err(format!(
            "the first position is {first}, expected at most 2^63 - 1"
        ));
    }
    let stream = &args[0];
    if stream.dtype != DType::I64 || !stream.shape.iter().all(|d| d.is(1)) {
        return Err(format!("expected a stream of one i64, got {stream}"));
    }
    infer::one(DType::U32, shape.clone())
}

pub(super) fn random_bits_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, RandomBits { seed, first });
    let stream = c.inputs[0].as_slice::<i64>()[0] as u64;
    let mut bits = Tensor::zeros(DType::U32, c.shape)?;
    for (bit, position) in bits.as_mut_slice::<u32>().iter_mut().zip(*first..) {
        *bit = random::word(*seed, stream, position);
    }
    Ok(vec![bits])
}

/// Ten rounds of two products and six other operations for each four elements, with their moves.
pub(super) fn random_bits_work(s: &Sizes) -> Count {
    work::count(WorkClass::Map, s.n_out().saturating_mul(30))
}
