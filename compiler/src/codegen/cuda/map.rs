//! Element-wise results in vectors of up to 16 bytes: each thread computes several neighbouring elements.

use super::emit::{Emitter, Value};
use super::text::memory_type;
use crate::codegen::access::{Expression, expression};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind};
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
    let mut axes = collapse(
        shape,
        &strides.iter().map(Vec::as_slice).collect::<Vec<_>>(),
    );
    let inner = axes.last()?.clone();
    let dtypes = expression
        .leaves
        .iter()
        .map(|l| l.value)
        .chain(roots.iter().copied())
        .map(|v| body.dtype(v));
    let moving: Vec<DType> = dtypes
        .zip(&inner.strides)
        .filter(|(_, s)| **s != 0)
        .map(|(d, _)| d)
        .collect();
    let width = WIDEST / moving.iter().map(|d| d.size_bytes()).max()?;
    // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
    let whole = |v: ValueId| body.n_elements(v).is_multiple_of(width);
    let offsets = expression
        .leaves
        .iter()
        .map(|l| l.offset)
        .chain(roots.iter().map(|_| 0));
    let aligned = |n: i64| n % width as i64 == 0;
    let fits = inner
        .strides
        .iter()
        .zip(offsets)
        .enumerate()
        .all(|(t, (&stride, offset))| {
            let outer = || axes[..axes.len() - 1].iter().all(|a| aligned(a.strides[t]));
            stride == 0 || stride == 1 && aligned(offset) && outer()
        });
    let whole = expression
        .leaves
        .iter()
        .zip(&inner.strides)
        .all(|(l, &s)| s == 0 || whole(l.value));
    if !whole || width < 2 || !inner.extent.is_multiple_of(width) || !fits {
        return None;
    }
    let last = axes.last_mut()?;
    last.extent /= width;
    last.strides.iter_mut().for_each(|s| *s *= width as i64);
    Some(Map {
        expression,
        axes,
        width,
    })
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
        let mut names = Vec::new();
        for (t, (leaf, &(buffer, dtype))) in self.expression.leaves.iter().zip(leaves).enumerate() {
            let from = self.position(e, t, leaf.offset, &at);
            names.push(if self.moves(t) {
                let name = format!("x{t}");
                let (from, buffer) = (e.val(from), e.text(buffer).to_owned());
                let load = format!(
                    "const auto {name} = gm_load<{}>({buffer} + {});",
                    self.width,
                    e.text(from)
                );
                e.line(&load);
                Err(match dtype {
                    DType::Bool => format!("{name}.v[k] != 0"),
                    _ => format!("{name}.v[k]"),
                })
            } else {
                Ok(e.load(dtype, buffer, from))
            });
        }
        for (t, (_, dtype)) in outs.iter().enumerate() {
            e.line(&format!(
                "gm_vector<{}, {}> y{t};",
                memory_type(*dtype),
                self.width
            ));
        }
        e.line("#pragma unroll");
        e.open(&format!("for (int k = 0; k < {}; ++k)", self.width));
        let mut inputs = Vec::new();
        for (name, &(_, dtype)) in names.into_iter().zip(leaves) {
            inputs.push(name.unwrap_or_else(|element| e.define(Kind::Element(dtype), &element)));
        }
        let values = e.program(&self.expression.program, &inputs)?;
        for (t, v) in values.into_iter().enumerate() {
            let line = format!("y{t}.v[k] = {};", e.text(v));
            e.line(&line);
        }
        e.close();
        for (t, &(buffer, _)) in outs.iter().enumerate() {
            let to = self.position(e, leaves.len() + t, 0, &at);
            let to = e.val(to);
            let line = format!(
                "gm_store<{}>({} + {}, y{t});",
                self.width,
                e.text(buffer),
                e.text(to)
            );
            e.line(&line);
        }
        Ok(())
    }

    fn moves(&self, tensor: usize) -> bool {
        self.axes.last().is_some_and(|a| a.strides[tensor] != 0)
    }

    fn position(&self, e: &mut Emitter, tensor: usize, offset: i64, at: &[Ix<Value>]) -> Ix<Value> {
        self.axes
            .iter()
            .zip(at)
            .fold(Ix::C(offset), |sum, (axis, &i)| {
                let step = e.mul(i, axis.strides[tensor]);
                e.add(sum, step)
            })
    }
}
