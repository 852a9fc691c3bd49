//! The softmax of rows that are too long for registers: they are read twice (Milakov and Gimelshein, arXiv:1805.02867).

use super::super::emit::{Emitter, Value};
use super::super::text::element_type;
use super::super::vector_access::{RunLoads, RunStore};
use super::in_registers::{divisor, exponential};
use super::{Layout, Rows, ThreadPosition, wide};
use crate::codegen::pull::{Emit, Ix, Kind, Puller, extreme_bits};
use crate::error::{Error, Result};
use crate::ir::Extremum;
use gristmill_runtime::DType;

impl Rows {
    pub(super) fn online_softmax(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        log: bool,
        out: Value,
    ) -> Result<()> {
        let acc = wide(self.dtype);
        let (ty, exp) = (element_type(acc), exponential(acc));
        let lowest = e.constant(acc, extreme_bits(acc, Extremum::Max));
        let lowest = e.text(lowest).to_owned();
        e.line(&format!("{ty} greatest = {lowest}, total = 0;"));
        let width = self.layout.width;
        self.each_loaded(p, e, here, |_, e, _| {
            e.line(&format!("gm_see<{width}>(x, greatest, total);"));
            Ok(())
        })?;
        let [base, total] = self.joined_total(e, acc);
        let (divisor, last) = divisor(e, total, log)?;
        self.each_loaded(p, e, here, |p, e, at| {
            self.store_run(p, e, at, out, |_, e, w, _| {
                let shifted = format!("x[{}] - {}", e.text(w), e.text(base));
                let term = match log {
                    true => shifted,
                    false => format!("{exp}({shifted})"),
                };
                let term = e.define(Kind::Element(acc), &term);
                e.combine(last, term, divisor)
            })
        })
    }

    /// Largest element of the row, or zero if it is infinite, and the sum of exponentials relative
    /// to it, from those of the threads.
    fn joined_total(&self, e: &mut Emitter, acc: DType) -> [Value; 2] {
        let own = e.named(Kind::Element(acc), "greatest");
        let largest = self.joined(e, own, "gm_greatest");
        let base = format!("gm_base({})", e.text(largest));
        let base = e.define(Kind::Element(acc), &base);
        let own = format!("total * {}(greatest - {})", exponential(acc), e.text(base));
        let own = e.define(Kind::Element(acc), &own);
        [base, self.joined(e, own, "gm_sum")]
    }

    /// Stores a run of results that begins at `at`: `value` gives each from its number and index.
    pub(super) fn store_run(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        out: Value,
        value: impl FnOnce(&mut Puller<Value>, &mut Emitter, Value, &[Ix<Value>]) -> Result<Value>,
    ) -> Result<()> {
        let width = self.layout.width;
        let linear = e.linearise(at, p.body.shape(self.node.own(p.body)));
        let store = RunStore::new(e, p.body.dtype(self.node.result), width);
        let own = self.node.own(p.body);
        let roots = [&self.node.of(p.body).inputs[1..], &[self.node.result]].concat();
        let loads = RunLoads::new(p, e, &roots, own, at, width);
        let w = e.open_unrolled(width);
        let mut at = at.to_vec();
        if let Some(last) = at.last_mut().filter(|_| width > 1) {
            *last = e.add(*last, Ix::V(w));
        }
        p.scoped(|p| {
            loads.remember(p, e, w, &at);
            let value = value(p, e, w, &at)?;
            let value = self.node.epilogue(p, e, &at, value)?;
            store.set(e, w, value);
            Ok::<(), Error>(())
        })?;
        e.close();
        store.finish(e, out, linear);
        Ok(())
    }

    /// Goes through the thread's runs of the row, each loaded into `x`; `f` gets the index of its first element.
    fn each_loaded(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Ix<Value>]) -> Result<()>,
    ) -> Result<()> {
        let Layout { length, width, .. } = self.layout;
        let first = e.mul(Ix::V(here.lane), width as i64);
        let first = e.position(first);
        let (end, step) = (length.to_string(), self.step().to_string());
        e.guarded(&[here.has_row], |e| {
            e.counted([&first, &end, &step], |e, k| {
                p.scoped(|p| {
                    let at = self.load_run(p, e, here, k)?;
                    f(p, e, &at)
                })
            })
        })
    }

    /// Loads the run at position `k` into `x`; gives the index of its first element.
    fn load_run(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        k: Value,
    ) -> Result<Vec<Ix<Value>>> {
        let x = self.node.of(p.body).inputs[0];
        let (acc, runs) = (wide(self.dtype), self.runs(p));
        let at = self.position(e, here, k, p.body.shape(x));
        e.line(&format!("{} x[{}];", element_type(acc), self.layout.width));
        runs.each(p, e, x, &at, |e, w, v| {
            let v = e.cast(v, acc)?;
            let name = format!("x[{}]", e.position(w));
            e.set(&name, v);
            Ok(())
        })?;
        Ok(at)
    }
}
