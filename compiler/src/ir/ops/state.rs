//! Variables.

use super::Op;
use crate::error::Result;
use crate::ir::dim::Dim;
use crate::ir::gradient::Vjp;
use crate::ir::graph::Graph;
use crate::ir::infer;
use crate::ir::infer::Inferred;
use crate::ir::types::{Shape, Type};

pub(super) fn read_variable_infer(op: &Op, _: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        ReadVariable {
            dtype,
            shape,
            initial
        }
    );
    if let Some(initial) = initial {
        let (found, extents) = (initial.dtype(), Shape::of(initial.shape()));
        let differ = |(a, b): (&Dim, &Dim)| a.as_const().is_some_and(|a| !b.is(a));
        let is_other = shape.len() != extents.rank() || shape.iter().zip(&*extents).any(differ);
        if found != *dtype || is_other {
            let read = Shape(shape.clone());
            return Err(format!(
                "the initial value is {found}{extents}, is read as {dtype}{read}"
            ));
        }
    }
    infer::one(*dtype, shape.clone())
}

/// From the result to the operand; nothing flows to later runs through the stored value.
pub(super) fn assign_gradient(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    v.give(0, g)
}
