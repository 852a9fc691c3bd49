//! Top-k.

use super::reduce::beats;
use super::scalar::Scalar;
use super::view::count;
use crate::error::Result;
use crate::ir::Extremum;
use gristmill_runtime::{DType, Tensor, with_dtype};
use std::cmp::Ordering;

/// [`Op::TopK`](crate::ir::Op::TopK) into `shape`. NaN counts as greater than everything, and as equal to NaN.
pub fn top_k(x: &Tensor, axis: usize, largest: bool, shape: &[usize]) -> Result<Vec<Tensor>> {
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
                if largest { ascending.reverse() } else { ascending }
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
