//! Softmax and normalisations of rows that a group keeps in registers.

use super::super::emit::{Emitter, Value};
use super::super::runs::{RunStore, Runs};
use super::super::text::element_type;
use super::{Here, Rows, wide};
use crate::codegen::pull::{Emit, Ix, Kind, Puller, extreme_bits};
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Extremum, ScalarOp};
use gristmill_runtime::DType;

impl Rows {
    /// Runs of the row that each thread keeps.
    fn n_runs(&self) -> usize {
        self.length.div_ceil(self.step())
    }

    /// For each run that the thread keeps: `f` gets its number, its position in the row, and the
    /// conditions under which it exists.
    fn each_run(
        &self,
        e: &mut Emitter,
        here: &Here,
        f: impl FnOnce(&mut Emitter, Value, Value, [Option<Value>; 2]) -> Result<()>,
    ) -> Result<()> {
        let j = e.open_unrolled(self.n_runs());
        let own = e.mul(Ix::V(here.lane), self.width as i64);
        let before = e.mul(Ix::V(j), self.step() as i64);
        let k = e.add(own, before);
        let inside = e.below(k, self.length, self.step());
        let k = e.val(k);
        f(e, j, k, [here.has_row, inside])?;
        e.close();
        Ok(())
    }

    /// For each element that the thread keeps: `f` gets its name.
    fn each(
        &self,
        e: &mut Emitter,
        here: &Here,
        f: impl FnOnce(&mut Emitter, &str) -> Result<()>,
    ) -> Result<()> {
        self.each_run(e, here, |e, j, _, inside| {
            e.guarded(&inside, |e| {
                let w = e.open_unrolled(self.width);
                let name = self.element(e, j, Ix::V(w));
                f(e, &name)?;
                e.close();
                Ok(())
            })
        })
    }

    /// Name of element `w` of run `j`.
    fn element(&self, e: &mut Emitter, j: Value, w: Ix<Value>) -> String {
        let first = e.mul(Ix::V(j), self.width as i64);
        let at = e.add(first, w);
        let at = e.val(at);
        format!("row[{}]", e.text(at))
    }

    /// The thread's part of the row, into `row`; zero where there is none.
    fn keep(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &Here) -> Result<DType> {
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
        e.line(&format!(
            "{} row[{}] = {{}};",
            element_type(acc),
            self.n_runs() * self.width
        ));
        self.each_run(e, here, |e, j, k, inside| {
            e.guarded(&inside, |e| {
                p.scoped(|p| {
                    let at = self.position(e, here, k, &shape);
                    runs.each(p, e, x, &at, |e, w, v| {
                        let v = e.convert(v, dtype, acc)?;
                        let name = self.element(e, j, w);
                        let line = format!("{name} = {};", e.text(v));
                        e.line(&line);
                        Ok(())
                    })
                })
            })
        })?;
        Ok(acc)
    }

    /// Joins an expression of each kept element over the thread, then over the group.
    fn total(
        &self,
        e: &mut Emitter,
        here: &Here,
        acc: DType,
        (op, initial): (ScalarOp, u64),
        term: &dyn Fn(&str) -> String,
    ) -> Result<Value> {
        let initial = e.constant(acc, initial);
        let initial = e.text(initial).to_owned();
        let sum = e.variable(Kind::Element(acc), Some(&initial));
        self.each(e, here, |e, element| {
            let v = e.define(Kind::Element(acc), &term(element));
            let next = e.scalar_op(op, &[acc, acc], &[sum, v])?;
            e.assign(&[sum], &[next]);
            Ok(())
        })?;
        Ok(self.joined(
            e,
            sum,
            if op == ScalarOp::Max {
                "gm_greatest"
            } else {
                "gm_sum"
            },
        ))
    }

    /// Stores `value` of each kept element, given the element.
    fn store_each(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        acc: DType,
        out: Value,
        value: impl FnOnce(&mut Puller<Value>, &mut Emitter, Value, &[Ix<Value>]) -> Result<Value>,
    ) -> Result<()> {
        let own = p.body.graph.node(self.node).outputs[0];
        let shape = p.body.shape(own).to_vec();
        self.each_run(e, here, |e, j, k, inside| {
            e.guarded(&inside, |e| {
                let at = self.position(e, here, k, &shape);
                let linear = e.linearise(&at, &shape);
                let store = RunStore::new(e, p.body.dtype(self.result), self.width);
                let w = e.open_unrolled(self.width);
                p.scoped(|p| {
                    let mut at = at.clone();
                    if let Some(last) = at.last_mut().filter(|_| self.width > 1) {
                        *last = e.add(*last, Ix::V(w));
                    }
                    let element = self.element(e, j, Ix::V(w));
                    let element = e.named(Kind::Element(acc), element);
                    let value = value(p, e, element, &at)?;
                    let value = e.convert(value, acc, p.body.dtype(own))?;
                    let value = self.followed(p, e, &at, value)?;
                    store.set(e, w, value);
                    Ok::<(), Error>(())
                })?;
                e.close();
                store.finish(e, out, linear);
                Ok(())
            })
        })
    }

    pub(super) fn softmax(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        log: bool,
        out: Value,
    ) -> Result<()> {
        let acc = self.keep(p, e, here)?;
        let exp = if acc == DType::F64 { "exp" } else { "expf" };
        let lowest = (ScalarOp::Max, extreme_bits(acc, Extremum::Max));
        let max = self.total(e, here, acc, lowest, &|x| x.to_owned())?;
        let max = e.text(max).to_owned();
        // Each element becomes its exponential, or with `log` its difference from the largest.
        self.each(e, here, |e, x| {
            let shifted = format!("{x} - {max}");
            e.line(&if log {
                format!("{x} = {shifted};")
            } else {
                format!("{x} = {exp}({shifted});")
            });
            Ok(())
        })?;
        let term = |x: &str| {
            if log {
                format!("{exp}({x})")
            } else {
                x.to_owned()
            }
        };
        let sum = self.total(e, here, acc, (ScalarOp::Add, 0), &term)?;
        let divisor = if log {
            e.scalar_op(ScalarOp::Log, &[acc], &[sum])?
        } else {
            sum
        };
        let last = if log { ScalarOp::Sub } else { ScalarOp::Div };
        self.store_each(p, e, here, acc, out, |_, e, x, _| {
            e.scalar_op(last, &[acc, acc], &[x, divisor])
        })
    }

    /// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`; without `centred`, mean and beta are zero.
    pub(super) fn norm(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        epsilon: f64,
        centred: bool,
        out: Value,
    ) -> Result<()> {
        let acc = self.keep(p, e, here)?;
        let pair = [acc, acc];
        let n = e.constant(acc, real_bits(acc, self.length as f64));
        let sums = (ScalarOp::Add, 0);
        if centred {
            let sum = self.total(e, here, acc, sums, &|x| x.to_owned())?;
            let mean = e.scalar_op(ScalarOp::Div, &pair, &[sum, n])?;
            let mean = e.text(mean).to_owned();
            self.each(e, here, |e, x| {
                e.line(&format!("{x} = {x} - {mean};"));
                Ok(())
            })?;
        }
        let squares = self.total(e, here, acc, sums, &|x| format!("{x} * {x}"))?;
        let variance = e.scalar_op(ScalarOp::Div, &pair, &[squares, n])?;
        let epsilon = e.constant(acc, real_bits(acc, epsilon));
        let shifted = e.scalar_op(ScalarOp::Add, &pair, &[variance, epsilon])?;
        let root = e.scalar_op(ScalarOp::Sqrt, &[acc], &[shifted])?;
        let node = p.body.graph.node(self.node).clone();
        let dtype = p.body.dtype(node.inputs[0]);
        self.store_each(p, e, here, acc, out, |p, e, x, at| {
            let factor = |p: &mut Puller<Value>, e: &mut Emitter, i: usize| {
                let v = p.broadcast_value(e, node.inputs[i], at)?;
                e.convert(v, dtype, acc)
            };
            let unit = e.scalar_op(ScalarOp::Div, &pair, &[x, root])?;
            let gamma = factor(p, e, 1)?;
            let scaled = e.scalar_op(ScalarOp::Mul, &pair, &[unit, gamma])?;
            if !centred {
                return Ok(scaled);
            }
            let beta = factor(p, e, 2)?;
            e.scalar_op(ScalarOp::Add, &pair, &[scaled, beta])
        })
    }
}
