//! Parts of a batch with statistics of their own.

use super::{Dim, GraphBuilder, ReduceKind, ValueId};
use crate::error::Result;

impl GraphBuilder {
    /// Sets the number of equal parts of each batch with statistics of their own, in the order of the examples; 1 at first.
    pub(crate) fn set_n_parts(&mut self, n: usize) {
        self.n_parts = n.max(1);
    }

    /// The number of parts of each batch.
    pub(crate) fn n_parts(&self) -> usize {
        self.n_parts
    }

    /// A value of a batch, `[batch, ..]`, as `[parts, batch / parts, ..]`. `None` where the whole batch has common statistics, for a
    /// number of examples without so many equal parts, and where the first extent is not a multiple of that of the first input with axes.
    pub(crate) fn in_parts(&mut self, x: ValueId) -> Result<Option<ValueId>> {
        let n = self.n_parts;
        let shape = self.operand(x)?.shape.clone();
        let Some((batch, rest)) = shape.split_first() else {
            return Ok(None);
        };
        let mut inputs = self.graph.inputs.iter();
        let examples = inputs.find_map(|&v| self.graph.ty(v).shape.first().cloned());
        let is_batch = examples.is_some_and(|examples| {
            let size = examples.as_usize();
            let is_whole = size.is_none_or(|size| size.is_multiple_of(n));
            is_whole && batch.exact_div(&examples).is_some()
        });
        if n == 1 || !is_batch {
            return Ok(None);
        }
        let parts = [Dim::from(n), batch.floor_div(n as i64)];
        let parts = parts.iter().chain(rest).cloned();
        self.reshape(x, parts).map(Some)
    }

    /// The mean of a statistic of parts, `[parts, ..]`, as `[1, ..]`.
    pub(crate) fn mean_of_parts(&mut self, v: ValueId) -> Result<ValueId> {
        self.reduce(ReduceKind::Mean, v, &[0], true)
    }
}
