//! Element-wise results of transposed operands: tiles go through shared memory, so that both sides
//! are read and written along rows.

use super::emit::{Emitter, Value, truth_test};
use super::text::memory_type;
use crate::codegen::access::{Expression, expression};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind};
use crate::codegen::strided::{Axis, collapse, row_major};
use crate::error::Result;
use crate::ir::ValueId;
use gristmill_runtime::DType;

/// Threads of a block, and rows and columns of a tile.
pub(super) const BLOCK: usize = 256;
const SIDE: usize = 32;
/// Smallest extent of both axes for which a tile is worth its synchronisation.
const LEAST_SIDE: usize = 8;
/// Most operands that go through shared memory.
const MAX_TURNED: usize = 4;

/// An expression some of whose operands lie side by side along another axis than the results.
pub(super) struct Transposed {
    pub(super) expression: Expression,
    /// Loops over tiles and within them, outermost first; strides of the leaves, then of the outputs.
    axes: Vec<Axis>,
    /// The axis along which the transposed operands are contiguous; results are along the last.
    across: usize,
}

/// The tiled variant of `roots`, if there is one.
pub(super) fn plan(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
) -> Option<Transposed> {
    let expression = expression(body, roots, in_memory, &|_, _| false)?;
    let shape = body.shape(roots[0]);
    let strides = expression.all_strides(&row_major(shape));
    let axes = collapse(
        shape,
        &strides.iter().map(Vec::as_slice).collect::<Vec<_>>(),
    );
    let inner = axes.last()?;
    let turned: Vec<usize> = (0..expression.leaves.len())
        .filter(|&t| !matches!(inner.strides[t], 0 | 1))
        .collect();
    let first = *turned.first()?;
    let across = axes[..axes.len() - 1]
        .iter()
        .position(|a| a.strides[first] == 1)?;
    let fits = turned.iter().all(|&t| axes[across].strides[t] == 1)
        && turned.len() <= MAX_TURNED
        && axes[across].extent.min(inner.extent) >= LEAST_SIDE;
    fits.then_some(Transposed {
        expression,
        axes,
        across,
    })
}

impl Transposed {
    fn is_turned(&self, tensor: usize) -> bool {
        self.axes
            .last()
            .is_some_and(|a| !matches!(a.strides[tensor], 0 | 1))
    }

    /// Extents of the loops over tiles.
    fn tiles(&self) -> Vec<usize> {
        let is_tiled = |i: usize| i == self.across || i + 1 == self.axes.len();
        let n = |(i, a): (usize, &Axis)| {
            if is_tiled(i) {
                a.extent.div_ceil(SIDE)
            } else {
                a.extent
            }
        };
        self.axes.iter().enumerate().map(n).collect()
    }

    /// Blocks that have a tile each.
    pub(super) fn n_blocks(&self) -> usize {
        self.tiles().iter().product()
    }

    /// Writes the kernel's body.
    pub(super) fn emit(
        &self,
        e: &mut Emitter,
        leaves: &[(Value, DType)],
        outs: &[(Value, DType)],
    ) -> Result<()> {
        for (t, &(_, dtype)) in leaves.iter().enumerate() {
            if self.is_turned(t) {
                let (ty, pitch) = (memory_type(dtype), SIDE + 1);
                e.line(&format!("__shared__ {ty} tile{t}[{SIDE}][{pitch}];"));
            }
        }
        e.by_block(self.n_blocks(), |e, block| {
            let mut at = e.delinearise(Ix::V(block), &self.tiles());
            let last = self.axes.len() - 1;
            for axis in [self.across, last] {
                at[axis] = e.mul(at[axis], SIDE as i64);
            }
            self.each(e, &at, [last, self.across], |e, place, at| {
                self.load(e, leaves, place, at);
                Ok(())
            })?;
            e.line("__syncthreads();");
            self.each(e, &at, [self.across, last], |e, place, at| {
                self.store(e, [leaves, outs], place, at)
            })?;
            e.line("__syncthreads();");
            Ok(())
        })
    }

    /// Loads elements of the transposed operands into their tiles.
    fn load(
        &self,
        e: &mut Emitter,
        leaves: &[(Value, DType)],
        [row, column]: [&str; 2],
        at: &[Ix<Value>],
    ) {
        for (t, &(buffer, _)) in leaves.iter().enumerate() {
            if self.is_turned(t) {
                let from = self.position(e, t, self.expression.leaves[t].offset, at);
                let (buffer, from) = (e.text(buffer), e.position(from));
                let line = format!("tile{t}[{row}][{column}] = {buffer}[{from}];");
                e.line(&line);
            }
        }
    }

    /// Computes elements of the results and stores them.
    fn store(
        &self,
        e: &mut Emitter,
        [leaves, outs]: [&[(Value, DType)]; 2],
        [row, column]: [&str; 2],
        at: &[Ix<Value>],
    ) -> Result<()> {
        let mut inputs = Vec::new();
        for (t, &(buffer, dtype)) in leaves.iter().enumerate() {
            inputs.push(if self.is_turned(t) {
                let element = format!("tile{t}[{column}][{row}]{}", truth_test(dtype));
                e.define(Kind::Element(dtype), &element)
            } else {
                let from = self.position(e, t, self.expression.leaves[t].offset, at);
                e.load(dtype, buffer, from)
            });
        }
        let values = e.program(&self.expression.program, &inputs)?;
        for (t, (v, &(buffer, dtype))) in values.into_iter().zip(outs).enumerate() {
            let to = self.position(e, leaves.len() + t, 0, at);
            e.store(dtype, v, buffer, to);
        }
        Ok(())
    }

    /// For each element of the tile at `at` that the thread has: `f` gets its row and column as text, of which these are the axes, and its index.
    /// Neighbouring threads have neighbouring columns.
    fn each(
        &self,
        e: &mut Emitter,
        at: &[Ix<Value>],
        [row_axis, column_axis]: [usize; 2],
        f: impl FnOnce(&mut Emitter, [&str; 2], &[Ix<Value>]) -> Result<()>,
    ) -> Result<()> {
        let i = e.open_unrolled(SIDE * SIDE / BLOCK);
        let row = format!(
            "ix(threadIdx.x / {SIDE}) + {} * {}",
            e.text(i),
            BLOCK / SIDE
        );
        let row = e.define(Kind::Index, &row);
        let column = e.define(Kind::Index, &format!("ix(threadIdx.x % {SIDE})"));
        let mut at = at.to_vec();
        at[row_axis] = e.add(at[row_axis], Ix::V(row));
        at[column_axis] = e.add(at[column_axis], Ix::V(column));
        let inside =
            [row_axis, column_axis].map(|axis| e.below(at[axis], self.axes[axis].extent, SIDE));
        let names = [row, column].map(|v| e.text(v).to_owned());
        e.guarded(&inside, |e| f(e, [&names[0], &names[1]], &at))?;
        e.close();
        Ok(())
    }

    fn position(&self, e: &mut Emitter, tensor: usize, offset: i64, at: &[Ix<Value>]) -> Ix<Value> {
        let strides: Vec<i64> = self.axes.iter().map(|a| a.strides[tensor]).collect();
        e.strided(offset, at, &strides)
    }
}
