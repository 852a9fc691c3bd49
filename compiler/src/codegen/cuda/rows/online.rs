//! The softmax of rows that are too long for registers: they are read twice (Milakov and Gimelshein, arXiv:1805.02867).

use super::super::emit::{Emitter, Value};
use super::super::runs::{RunStore, Runs};
use super::super::text::element_type;
use super::{Here, Rows, wide};
use crate::codegen::pull::{Emit, Ix, Kind, Puller, extreme_bits};
use crate::error::{Error, Result};
use crate::ir::{Extremum, ScalarOp};
use gristmill_runtime::DType;

impl Rows {
    pub(super) fn online_softmax(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        log: bool,
        out: Value,
    ) -> Result<()> {
        let acc = wide(p.body.dtype(p.body.graph.node(self.node).inputs[0]));
        let lowest = e.constant(acc, extreme_bits(acc, Extremum::Max));
        let (lowest, ty) = (e.text(lowest).to_owned(), element_type(acc));
        e.line(&format!("{ty} greatest = {lowest}, total = 0;"));
        self.each_loaded(p, e, here, |_, e, _| {
            e.line(&format!("gm_see<{}>(x, greatest, total);", self.width));
            Ok(())
        })?;
        let own = e.named(Kind::Element(acc), "greatest");
        let greatest = self.joined(e, own, "gm_greatest");
        let base = format!("gm_base({})", e.text(greatest));
        let base = e.define(Kind::Element(acc), &base);
        let exp = if acc == DType::F64 { "exp" } else { "expf" };
        let own = format!("total * {exp}(greatest - {})", e.text(base));
        let own = e.define(Kind::Element(acc), &own);
        let total = self.joined(e, own, "gm_sum");
        let total = if log {
            e.scalar_op(ScalarOp::Log, &[acc], &[total])?
        } else {
            total
        };
        let body = p.body;
        let y = body.graph.node(self.node).outputs[0];
        self.each_loaded(p, e, here, |p, e, at| {
            let linear = e.linearise(at, body.shape(y));
            let store = RunStore::new(e, body.dtype(self.result), self.width);
            let w = e.open_unrolled(self.width);
            p.scoped(|p| {
                let mut at = at.to_vec();
                if let Some(last) = at.last_mut().filter(|_| self.width > 1) {
                    *last = e.add(*last, Ix::V(w));
                }
                let shifted = format!("x[{}] - {}", e.text(w), e.text(base));
                let shifted = if log {
                    shifted
                } else {
                    format!("{exp}({shifted})")
                };
                let shifted = e.define(Kind::Element(acc), &shifted);
                let last = if log { ScalarOp::Sub } else { ScalarOp::Div };
                let value = e.scalar_op(last, &[acc, acc], &[shifted, total])?;
                let value = e.convert(value, acc, body.dtype(y))?;
                let value = self.followed(p, e, &at, value)?;
                store.set(e, w, value);
                Ok::<(), Error>(())
            })?;
            e.close();
            store.finish(e, out, linear);
            Ok(())
        })
    }

    /// Goes through the thread's runs of the row, each loaded into `x`; `f` gets the index of its first element.
    fn each_loaded(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        f: impl FnOnce(&mut Puller<Value>, &mut Emitter, &[Ix<Value>]) -> Result<()>,
    ) -> Result<()> {
        let x = p.body.graph.node(self.node).inputs[0];
        let (dtype, shape) = (p.body.dtype(x), p.body.shape(x).to_vec());
        let acc = wide(dtype);
        let runs = Runs::of_width(
            p.body,
            x,
            shape.len() - 1,
            &|v| p.stored.contains_key(&v),
            self.width,
        );
        let own = e.mul(Ix::V(here.lane), self.width as i64);
        let first = e.val(own);
        let first = e.text(first).to_owned();
        e.guarded(&[here.has_row], |e| {
            e.counted(
                [&first, &self.length.to_string(), &self.step().to_string()],
                |e, k| {
                    p.scoped(|p| {
                        let at = self.position(e, here, k, &shape);
                        e.line(&format!("{} x[{}];", element_type(acc), self.width));
                        runs.each(p, e, x, &at, |e, w, v| {
                            let v = e.convert(v, dtype, acc)?;
                            let w = e.val(w);
                            let line = format!("x[{}] = {};", e.text(w), e.text(v));
                            e.line(&line);
                            Ok(())
                        })?;
                        f(p, e, &at)
                    })
                },
            )
        })
    }
}
