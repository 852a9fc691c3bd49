//! Partial results of blocks that share queries, and the kernel that joins them.
//!
//! All are of the accumulator's dtype: results of every part, batch and query, not divided yet;
//! then, for each row, its largest score and its sum of weights.

use super::super::emit::{Emitter, Value};
use super::{Attention, BlockPosition};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller};
use crate::error::Result;
use crate::ir::ScalarOp;
use crate::ir::vecprog::real_bits;

impl Attention {
    /// Elements of all partial results, if there are any.
    pub(super) fn partial_elements(&self) -> usize {
        if self.n_parts > 1 {
            self.n_partial_rows() * (self.x.value_depth + 2)
        } else {
            0
        }
    }

    fn n_partial_rows(&self) -> usize {
        self.n_parts * self.n_batch * self.x.n_queries
    }

    /// Positions of a row's first partial result and of its largest score.
    fn partial_at(&self, e: &mut Emitter, at: [Ix<Value>; 3]) -> (Ix<Value>, Ix<Value>) {
        let row = e.linearise(&at, &[self.n_parts, self.n_batch, self.x.n_queries]);
        let pair = e.mul(row, 2);
        let pairs = (self.n_partial_rows() * self.x.value_depth) as i64;
        (
            e.mul(row, self.x.value_depth as i64),
            e.add(pair, Ix::C(pairs)),
        )
    }

    /// Stores the thread's elements of partial results; the thread of a row's first column adds its
    /// largest score and sum of weights.
    pub(super) fn store_part(
        &self,
        e: &mut Emitter,
        here: &BlockPosition,
        out: Value,
    ) -> Result<()> {
        self.each_result(e, here, |e, [name, query], [row, column]| {
            let value = e.named(Kind::Element(self.acc), name);
            let names = ["greatest", "total"].map(|name| format!("{name}[{query}]"));
            self.store_column(e, here, [row, column], value, &names, out)
        })
    }

    /// Stores element `place`, a row and a column, of a part's results; the thread of the first column
    /// adds the row's largest score and sum of weights, of these names.
    pub(super) fn store_column(
        &self,
        e: &mut Emitter,
        here: &BlockPosition,
        [row, column]: [Ix<Value>; 2],
        value: Value,
        names: &[String; 2],
        out: Value,
    ) -> Result<()> {
        let (from, pair) = self.partial_at(e, [here.part, here.batch, row]);
        let at = e.add(from, column);
        e.store(self.acc, value, out, at);
        let (column, zero) = (e.val(column), e.index(0));
        let leads = e.index_compare(Order::Equal, column, zero);
        e.guarded(&[Some(leads)], |e| {
            for (k, name) in names.iter().enumerate() {
                let value = e.named(Kind::Element(self.acc), name.clone());
                let at = e.add(pair, Ix::C(k as i64));
                e.store(self.acc, value, out, at);
            }
            Ok(())
        })
    }

    /// Joins the partial results of element `item`, and stores the epilogue of the result.
    pub(super) fn join_parts(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        [partial, out]: [Value; 2],
    ) -> Result<()> {
        let shape = p.body.shape(self.node.result);
        let (at, rank) = (e.delinearise(Ix::V(item), shape), shape.len());
        let batch = e.linearise(&at[..rank - 2], &self.lead);
        let (row, column) = ([batch, at[rank - 2]], at[rank - 1]);
        let largest = self.largest_score(e, partial, row)?;
        let base = format!("gm_base({})", e.text(largest));
        let base = e.define(Kind::Element(self.acc), &base);
        let [sum, total] = self.weighted_sums(e, [partial, base], row, column)?;
        let value = e.combine(ScalarOp::Div, sum, total)?;
        self.node.store(p, e, &at, value, out)
    }

    /// The largest score of a row, given as batch and query, in all parts.
    fn largest_score(
        &self,
        e: &mut Emitter,
        partial: Value,
        [batch, row]: [Ix<Value>; 2],
    ) -> Result<Value> {
        let lowest = e.constant(self.acc, real_bits(self.acc, f64::NEG_INFINITY));
        let (first, end) = (Ix::C(0), Ix::C(self.n_parts as i64));
        let largest = e.for_loop(first, end, 1, &[lowest], |e, part, carried| {
            let (_, pair) = self.partial_at(e, [Ix::V(part), batch, row]);
            let own = e.load(self.acc, partial, pair);
            Ok(vec![e.combine(ScalarOp::Max, carried[0], own)?])
        })?;
        Ok(largest[0])
    }

    /// Sums over the parts of a result and of the weights, rescaled from each part's largest score
    /// to `base`.
    fn weighted_sums(
        &self,
        e: &mut Emitter,
        [partial, base]: [Value; 2],
        [batch, row]: [Ix<Value>; 2],
        column: Ix<Value>,
    ) -> Result<[Value; 2]> {
        let zero = e.constant(self.acc, 0);
        let (first, end) = (Ix::C(0), Ix::C(self.n_parts as i64));
        let sums = e.for_loop(first, end, 1, &[zero, zero], |e, part, carried| {
            let (from, pair) = self.partial_at(e, [Ix::V(part), batch, row]);
            let own = e.load(self.acc, partial, pair);
            let weight = format!("{}({}, {})", self.power(), e.text(own), e.text(base));
            let weight = e.define(Kind::Element(self.acc), &weight);
            let places = [e.add(from, column), e.add(pair, Ix::C(1))];
            let mut next = Vec::new();
            for (&sum, place) in carried.iter().zip(places) {
                let own = e.load(self.acc, partial, place);
                let own = e.combine(ScalarOp::Mul, own, weight)?;
                next.push(e.combine(ScalarOp::Add, sum, own)?);
            }
            Ok(next)
        })?;
        Ok([sums[0], sums[1]])
    }
}
