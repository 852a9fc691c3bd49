//! Partial results of blocks that share queries, and the kernel that joins them.
//!
//! All are of the accumulator's dtype: results of every part, batch and query, not divided yet;
//! then, for each row, its largest score and its sum of weights.

use super::super::emit::{Emitter, Value};
use super::{Attention, Here};
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

    pub(super) fn store_part(&self, e: &mut Emitter, here: &Here, out: Value) -> Result<()> {
        self.each_result(e, here, |e, [name, query], [row, column]| {
            let (from, pair) = self.partial_at(e, [here.part, here.batch, row]);
            let at = e.add(from, column);
            let value = e.named(Kind::Element(self.acc), name);
            e.store(self.acc, value, out, at);
            let (column, zero) = (e.val(column), e.index(0));
            let leads = e.index_compare(Order::Equal, column, zero);
            e.guarded(&[Some(leads)], |e| {
                for (k, name) in ["greatest", "total"].into_iter().enumerate() {
                    let value = e.named(Kind::Element(self.acc), format!("{name}[{query}]"));
                    let at = e.add(pair, Ix::C(k as i64));
                    e.store(self.acc, value, out, at);
                }
                Ok(())
            })
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
        let shape = p.body.shape(self.result).to_vec();
        let (at, rank) = (e.delinearise(Ix::V(item), &shape), shape.len());
        let batch = e.linearise(&at[..rank - 2], &self.lead);
        let lowest = e.constant(self.acc, real_bits(self.acc, f64::NEG_INFINITY));
        let (first, end) = (Ix::C(0), Ix::C(self.n_parts as i64));
        let greatest = e.for_loop(first, end, 1, &[lowest], |e, part, carried| {
            let (_, pair) = self.partial_at(e, [Ix::V(part), batch, at[rank - 2]]);
            let own = e.load(self.acc, partial, pair);
            Ok(vec![e.scalar_op(
                ScalarOp::Max,
                &[self.acc; 2],
                &[carried[0], own],
            )?])
        })?[0];
        let base = format!("gm_base({})", e.text(greatest));
        let base = e.define(Kind::Element(self.acc), &base);
        let zero = e.constant(self.acc, 0);
        let sums = e.for_loop(first, end, 1, &[zero, zero], |e, part, carried| {
            let (from, pair) = self.partial_at(e, [Ix::V(part), batch, at[rank - 2]]);
            let own = e.load(self.acc, partial, pair);
            let weight = format!("{}({}, {})", self.power(), e.text(own), e.text(base));
            let weight = e.define(Kind::Element(self.acc), &weight);
            let places = [e.add(from, at[rank - 1]), e.add(pair, Ix::C(1))];
            let mut next = Vec::new();
            for (&sum, place) in carried.iter().zip(places) {
                let own = e.load(self.acc, partial, place);
                let own = e.scalar_op(ScalarOp::Mul, &[self.acc; 2], &[own, weight])?;
                next.push(e.scalar_op(ScalarOp::Add, &[self.acc; 2], &[sum, own])?);
            }
            Ok(next)
        })?;
        let value = e.scalar_op(ScalarOp::Div, &[self.acc; 2], &[sums[0], sums[1]])?;
        self.follow(p, e, &at, value, out)
    }
}
