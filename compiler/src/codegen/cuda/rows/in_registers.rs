//! Softmax and normalisations of rows that a group keeps in registers.

use super::super::emit::{Emitter, Value};

use super::super::text::element_type;
use super::{Rows, ThreadPosition, wide};
use crate::codegen::pull::{Emit, Ix, Kind, Puller, extreme_bits};
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Extremum, ScalarOp};
use gristmill_runtime::DType;

/// A run of the row that a thread keeps.
struct KeptRun {
    number: Value,
    /// Position in the row.
    k: Value,
    /// Conditions under which it exists.
    inside: [Option<Value>; 2],
}

/// A reduction of kept elements.
#[derive(Clone, Copy)]
enum Total {
    Sum,
    Max,
}

/// C++'s exponential of a dtype.
pub(super) fn exponential(acc: DType) -> &'static str {
    if acc == DType::F64 { "exp" } else { "expf" }
}

/// `1 / x`, by which a row is multiplied: a division per element is a branch and ten instructions.
fn reciprocal(e: &mut Emitter, x: Value, acc: DType) -> Result<Value> {
    let one = e.constant(acc, real_bits(acc, 1.0));
    e.combine(ScalarOp::Div, one, x)
}

/// The last operand of a softmax, from the sum of exponentials, and the op that takes it.
pub(super) fn divisor(e: &mut Emitter, sum: Value, log: bool) -> Result<(Value, ScalarOp)> {
    let Kind::Element(acc) = e.kind(sum) else {
        return Err(Error::internal("a sum is an element"));
    };
    if !log {
        return Ok((reciprocal(e, sum, acc)?, ScalarOp::Mul));
    }
    let logarithm = e.scalar_op(ScalarOp::Log, &[acc], &[sum])?;
    Ok((logarithm, ScalarOp::Sub))
}

impl Rows {
    /// Runs of the row that each thread keeps.
    fn n_runs(&self) -> usize {
        self.layout.length.div_ceil(self.step())
    }

    /// For each run that the thread keeps.
    fn each_run(
        &self,
        e: &mut Emitter,
        here: &ThreadPosition,
        f: impl FnOnce(&mut Emitter, KeptRun) -> Result<()>,
    ) -> Result<()> {
        let number = e.open_unrolled(self.n_runs());
        let own = e.mul(Ix::V(here.lane), self.layout.width as i64);
        let before = e.mul(Ix::V(number), self.step() as i64);
        let k = e.add(own, before);
        let inside = e.below(k, self.layout.length, self.step());
        let run = KeptRun {
            number,
            k: e.val(k),
            inside: [here.has_row, inside],
        };
        f(e, run)?;
        e.close();
        Ok(())
    }

    /// For each element that the thread keeps: `f` gets its name.
    fn each(
        &self,
        e: &mut Emitter,
        here: &ThreadPosition,
        f: impl FnOnce(&mut Emitter, &str) -> Result<()>,
    ) -> Result<()> {
        self.each_run(e, here, |e, run| {
            e.guarded(&run.inside, |e| {
                let w = e.open_unrolled(self.layout.width);
                let name = self.element(e, run.number, Ix::V(w));
                f(e, &name)?;
                e.close();
                Ok(())
            })
        })
    }

    /// Name of element `w` of run `j`.
    fn element(&self, e: &mut Emitter, j: Value, w: Ix<Value>) -> String {
        let first = e.mul(Ix::V(j), self.layout.width as i64);
        let at = e.add(first, w);
        format!("row[{}]", e.position(at))
    }

    /// The thread's part of the row, into `row`; zero where there is none.
    fn keep(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &ThreadPosition) -> Result<DType> {
        let x = self.node.of(p.body).inputs[0];
        let acc = wide(self.dtype);
        let runs = self.runs(p);
        let (ty, n) = (element_type(acc), self.n_runs() * self.layout.width);
        e.line(&format!("{ty} row[{n}] = {{}};"));
        self.each_run(e, here, |e, run| {
            e.guarded(&run.inside, |e| {
                let at = self.position(e, here, run.k, p.body.shape(x));
                runs.each(p, e, x, &at, |e, w, v| {
                    let v = e.cast(v, acc)?;
                    let name = self.element(e, run.number, w);
                    e.set(&name, v);
                    Ok(())
                })
            })
        })?;
        Ok(acc)
    }

    /// Joins an expression of each kept element over the thread, then over the group.
    fn total(
        &self,
        e: &mut Emitter,
        here: &ThreadPosition,
        acc: DType,
        sum: Total,
        term: &dyn Fn(&str) -> String,
    ) -> Result<Value> {
        let (op, initial, functor) = match sum {
            Total::Sum => (ScalarOp::Add, 0, "gm_sum"),
            Total::Max => (
                ScalarOp::Max,
                extreme_bits(acc, Extremum::Max),
                "gm_greatest",
            ),
        };
        let initial = e.constant(acc, initial);
        let initial = e.text(initial).to_owned();
        let total = e.variable(Kind::Element(acc), Some(&initial));
        self.each(e, here, |e, element| {
            let v = e.define(Kind::Element(acc), &term(element));
            let next = e.combine(op, total, v)?;
            e.assign(&[total], &[next]);
            Ok(())
        })?;
        Ok(self.joined(e, total, functor))
    }

    /// Stores `value` of each kept element, given the element.
    fn store_each(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        acc: DType,
        out: Value,
        value: impl FnOnce(&mut Puller<Value>, &mut Emitter, Value, &[Ix<Value>]) -> Result<Value>,
    ) -> Result<()> {
        self.each_run(e, here, |e, run| {
            e.guarded(&run.inside, |e| {
                let shape = p.body.shape(self.node.own(p.body));
                let at = self.position(e, here, run.k, shape);
                self.store_run(p, e, &at, out, |p, e, w, at| {
                    let element = self.element(e, run.number, Ix::V(w));
                    let element = e.named(Kind::Element(acc), element);
                    value(p, e, element, at)
                })
            })
        })
    }

    pub(super) fn softmax(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        log: bool,
        out: Value,
    ) -> Result<()> {
        let acc = self.keep(p, e, here)?;
        let max = self.total(e, here, acc, Total::Max, &|x| x.to_owned())?;
        let max = e.text(max).to_owned();
        // Each element becomes its exponential, or with `log` its difference from the largest.
        let exp = exponential(acc);
        self.each(e, here, |e, x| {
            e.line(&match log {
                true => format!("{x} = {x} - {max};"),
                false => format!("{x} = {exp}({x} - {max});"),
            });
            Ok(())
        })?;
        let term = |x: &str| match log {
            true => format!("{exp}({x})"),
            false => x.to_owned(),
        };
        let sum = self.total(e, here, acc, Total::Sum, &term)?;
        let (divisor, last) = divisor(e, sum, log)?;
        self.store_each(p, e, here, acc, out, |_, e, x, _| {
            e.combine(last, x, divisor)
        })
    }

    /// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`; without `centred`, mean and beta are zero.
    pub(super) fn norm(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        epsilon: f64,
        centred: bool,
        out: Value,
    ) -> Result<()> {
        let acc = self.keep(p, e, here)?;
        if centred {
            self.centre(e, here, acc)?;
        }
        let root = self.deviation(e, here, acc, epsilon)?;
        let root = reciprocal(e, root, acc)?;
        let inputs = &self.node.of(p.body).inputs;
        self.store_each(p, e, here, acc, out, |p, e, x, at| {
            let factor = |p: &mut Puller<Value>, e: &mut Emitter, i: usize| {
                let v = p.broadcast_value(e, inputs[i], at)?;
                e.convert(v, self.dtype, acc)
            };
            let unit = e.combine(ScalarOp::Mul, x, root)?;
            let gamma = factor(p, e, 1)?;
            let scaled = e.combine(ScalarOp::Mul, unit, gamma)?;
            if !centred {
                return Ok(scaled);
            }
            let beta = factor(p, e, 2)?;
            e.combine(ScalarOp::Add, scaled, beta)
        })
    }

    /// Subtracts the mean of the row.
    fn centre(&self, e: &mut Emitter, here: &ThreadPosition, acc: DType) -> Result<()> {
        let sum = self.total(e, here, acc, Total::Sum, &|x| x.to_owned())?;
        let n = e.constant(acc, real_bits(acc, self.layout.length as f64));
        let mean = e.combine(ScalarOp::Div, sum, n)?;
        let mean = e.text(mean).to_owned();
        self.each(e, here, |e, x| {
            e.line(&format!("{x} = {x} - {mean};"));
            Ok(())
        })
    }

    /// `sqrt(mean(x * x) + epsilon)` of the row.
    fn deviation(
        &self,
        e: &mut Emitter,
        here: &ThreadPosition,
        acc: DType,
        epsilon: f64,
    ) -> Result<Value> {
        let squares = self.total(e, here, acc, Total::Sum, &|x| format!("{x} * {x}"))?;
        let n = e.constant(acc, real_bits(acc, self.layout.length as f64));
        let variance = e.combine(ScalarOp::Div, squares, n)?;
        let epsilon = e.constant(acc, real_bits(acc, epsilon));
        let shifted = e.combine(ScalarOp::Add, variance, epsilon)?;
        e.scalar_op(ScalarOp::Sqrt, &[acc], &[shifted])
    }
}
