//! Element-wise results in vectors of up to 16 bytes: each thread computes several neighbouring elements.

use super::emit::{Emitter, Operand, Value};
use super::text::memory_type;
use crate::codegen::access::{Expression, Leaf, expression};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix};
use crate::codegen::strided::{Axis, collapse, row_major};
use crate::error::Result;
use crate::ir::ValueId;
use gristmill_runtime::DType;

/// Bytes of the widest access.
const WIDEST: usize = 16;

/// An expression whose operands are contiguous or constant along the innermost loop.
pub(super) struct Map {
    pub(super) expression: Expression,
    /// Loops over vectors, outermost first; strides of the leaves, then of the outputs.
    axes: Vec<Axis>,
    width: usize,
}

/// The vector variant of `roots`, if there is one.
pub(super) fn plan(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
) -> Option<Map> {
    let expression = expression(body, roots, in_memory, &|_, _| false)?;
    let shape = body.shape(roots[0]);
    let strides = expression.all_strides(&row_major(shape));
    let strides: Vec<&[i64]> = strides.iter().map(Vec::as_slice).collect();
    let mut axes = collapse(shape, &strides);
    let width = width(body, &expression, roots, &axes)?;
    let last = axes.last_mut()?;
    last.extent /= width;
    last.strides.iter_mut().for_each(|s| *s *= width as i64);
    Some(Map {
        expression,
        axes,
        width,
    })
}

/// Elements of a vector, if all tensors are constant along the last axis or have whole, aligned
/// vectors there.
fn width(body: &Body, expression: &Expression, roots: &[ValueId], axes: &[Axis]) -> Option<usize> {
    let (inner, outer) = axes.split_last()?;
    let leaves = expression.leaves.iter().map(|l| (l.value, l.offset));
    let tensors: Vec<_> = leaves.chain(roots.iter().map(|&v| (v, 0))).collect();
    let moving = tensors.iter().zip(&inner.strides).filter(|(_, s)| **s != 0);
    let sizes = moving.map(|((v, _), _)| body.dtype(*v).size_bytes());
    let width = WIDEST / sizes.max()?;
    let is_whole = |n: i64| n % width as i64 == 0;
    let fits = tensors.iter().enumerate().all(|(t, &(_, offset))| {
        let stride = inner.strides[t];
        let is_aligned = is_whole(offset) && outer.iter().all(|a| is_whole(a.strides[t]));
        stride == 0 || stride == 1 && is_aligned
    });
    // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
    let is_whole = |v: ValueId| body.n_elements(v).is_multiple_of(width);
    let mut leaves = expression.leaves.iter().zip(&inner.strides);
    let is_aligned = leaves.all(|(l, &stride)| stride == 0 || is_whole(l.value));
    let suits = width > 1 && inner.extent.is_multiple_of(width);
    (suits && fits && is_aligned).then_some(width)
}

impl Map {
    /// Vectors of each output.
    pub(super) fn n_items(&self) -> usize {
        self.axes.iter().map(|a| a.extent).product()
    }

    /// Writes the code of vector number `item`.
    pub(super) fn emit(
        &self,
        e: &mut Emitter,
        item: Value,
        leaves: &[(Value, DType)],
        outs: &[(Value, DType)],
    ) -> Result<()> {
        let extents: Vec<usize> = self.axes.iter().map(|a| a.extent).collect();
        let at = e.delinearise(Ix::V(item), &extents);
        let operands = self.load(e, leaves, &at);
        let width = self.width;
        for (t, (_, dtype)) in outs.iter().enumerate() {
            let ty = memory_type(*dtype);
            e.line(&format!("gm_vector<{ty}, {width}> y{t};"));
        }
        e.line("#pragma unroll");
        e.open(&format!("for (int k = 0; k < {width}; ++k)"));
        let inputs: Vec<Value> = operands.into_iter().map(|o| o.value(e)).collect();
        let values = e.program(&self.expression.program, &inputs)?;
        for (t, v) in values.into_iter().enumerate() {
            e.set(&format!("y{t}.v[k]"), v);
        }
        e.close();
        for (t, &(buffer, _)) in outs.iter().enumerate() {
            let to = self.position(e, leaves.len() + t, 0, &at);
            let to = format!("{} + {}", e.text(buffer), e.position(to));
            e.line(&format!("gm_store<{width}>({to}, y{t});"));
        }
        Ok(())
    }

    /// Loads the operands of a vector.
    fn load(&self, e: &mut Emitter, leaves: &[(Value, DType)], at: &[Ix<Value>]) -> Vec<Operand> {
        let leaves = self.expression.leaves.iter().zip(leaves).enumerate();
        let load = |(t, (leaf, &(buffer, dtype))): (usize, (&Leaf, &(Value, DType)))| {
            let from = self.position(e, t, leaf.offset, at);
            match self.moves(t) {
                true => e.load_operand(t, (self.width, dtype), buffer, from),
                false => Operand::Same(e.load(dtype, buffer, from)),
            }
        };
        leaves.map(load).collect()
    }

    fn moves(&self, tensor: usize) -> bool {
        self.axes.last().is_some_and(|a| a.strides[tensor] != 0)
    }

    fn position(&self, e: &mut Emitter, tensor: usize, offset: i64, at: &[Ix<Value>]) -> Ix<Value> {
        let strides: Vec<i64> = self.axes.iter().map(|a| a.strides[tensor]).collect();
        e.strided(offset, at, &strides)
    }
}
