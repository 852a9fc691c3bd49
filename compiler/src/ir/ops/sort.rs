//! Top-k.

use super::gather::add_elements;
use super::{Extremum, Op};
use crate::error::Result;
use crate::ir::eval::Call;
use crate::ir::eval::scalar::{Scalar, beats};
use crate::ir::eval::view::count;
use crate::ir::gradient::Vjp;
use crate::ir::graph::Graph;
use crate::ir::infer::{Inferred, check_axis};
use crate::ir::types::Type;
use crate::ir::work;
use crate::ir::work::{Count, Sizes, WorkClass};
use gristmill_runtime::{DType, Tensor, with_dtype};
use std::cmp::Ordering;

pub(super) fn top_k_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, TopK { k, axis });
    check_axis(*axis, &args[0])?;
    if (args[0].shape[*axis].clone() - k.clone())
        .as_const()
        .is_some_and(|c| c < 0)
        || k.as_const().is_some_and(|c| c < 0)
    {
        return Err(format!(
            "k = {k} is out of range for axis {axis} of {}",
            args[0]
        ));
    }
    let mut shape = args[0].shape.clone();
    shape.0[*axis] = k.clone();
    Ok(vec![
        Type {
            dtype: args[0].dtype,
            shape: shape.clone(),
        },
        Type {
            dtype: DType::I64,
            shape,
        },
    ])
}

/// NaN counts as greater than everything, and as equal to NaN.
pub(super) fn top_k_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, TopK { axis, largest });
    let (x, axis, shape) = (c.inputs[0], *axis, c.shape);
    let mut values = Tensor::zeros(x.dtype(), shape)?;
    let mut positions = Tensor::zeros(DType::I64, shape)?;
    let (extent, k, inner) = (x.shape()[axis], shape[axis], count(&shape[axis + 1..]));
    if values.is_empty() {
        return Ok(vec![values, positions]);
    }
    with_dtype!(x.dtype(), T => {
        let (from, to, at) = (x.as_slice::<T>(), values.as_mut_slice::<T>(), positions.as_mut_slice::<i64>());
        for line in 0..count(&shape[..axis]) * inner {
            let (outer, i) = (line / inner, line % inner);
            let element = |j: usize| from[(outer * extent + j) * inner + i];
            let mut order: Vec<usize> = (0..extent).collect();
            order.sort_by(|&a, &b| {
                let ascending = ascending(element(a), element(b));
                if *largest { ascending.reverse() } else { ascending }
            });
            for (j, &best) in order[..k].iter().enumerate() {
                to[(outer * k + j) * inner + i] = element(best);
                at[(outer * k + j) * inner + i] = best as i64;
            }
        }
    });
    Ok(vec![values, positions])
}

fn ascending<T: Scalar>(a: T, b: T) -> Ordering {
    beats(a, b, Extremum::Max).cmp(&beats(b, a, Extremum::Max))
}

pub(super) fn top_k_work(s: &Sizes) -> Count {
    work::count(WorkClass::Sort, s.n_in().saturating_mul(16))
}

/// Selected values pass their cotangents to where they were.
pub(super) fn top_k_gradient(v: &mut Vjp) -> Result<()> {
    let Op::TopK { axis, .. } = v.op() else {
        return v.refuse("the op is no selection of the greatest");
    };
    let g = v.g()?;
    let sum = add_elements(v, axis, v.result(1), g)?;
    v.give(0, sum)
}
