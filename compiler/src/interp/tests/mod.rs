//! Each op against values worked out by hand, or against its definition in simpler ops.

mod contract;
mod control;
mod index;
mod map;
mod pool;
mod reduce;
mod view;

use super::eval;
use crate::ir::{GraphBuilder, Op, ValueId};
use crate::{Error, Result};
use gristmill_runtime::{Element, Tensor};

/// A tensor from elements.
fn t<T: Element>(values: &[T], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape).unwrap()
}

/// `0, 1, 2, ..` as `f32`.
fn count_up(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    t(&(0..n).map(|i| i as f32).collect::<Vec<_>>(), shape)
}

/// The only result of an op that must succeed.
#[track_caller]
fn ev(op: Op, inputs: &[&Tensor]) -> Tensor {
    let results = eval(&op, inputs, &[]).unwrap();
    assert_eq!(results.len(), 1);
    results.into_iter().next().unwrap()
}

#[track_caller]
fn fails(op: Op, inputs: &[&Tensor]) -> Error {
    eval(&op, inputs, &[]).unwrap_err()
}

/// The result of a graph built over the tensors as inputs.
#[track_caller]
fn composed(
    inputs: &[&Tensor],
    f: impl Fn(&mut GraphBuilder, &[ValueId]) -> Result<ValueId>,
) -> Tensor {
    let mut b = GraphBuilder::new("composed");
    let args: Vec<ValueId> = inputs
        .iter()
        .enumerate()
        .map(|(i, t)| b.input(&format!("x{i}"), t.dtype(), t.shape().iter().copied()))
        .collect();
    let y = f(&mut b, &args).unwrap();
    b.output("y", y);
    let inputs: Vec<Tensor> = inputs.iter().map(|&t| t.clone()).collect();
    super::run(&b.finish().unwrap(), &inputs).unwrap().remove(0)
}

#[track_caller]
fn assert_close(expected: &Tensor, actual: &Tensor, rtol: f64, atol: f64) {
    let c = super::compare::allclose(expected, actual, rtol, atol);
    assert!(c.ok, "{c}");
}
