//! Learning rates as functions of the number of steps.

use crate::error::{Error, Result};
use crate::ir::{GraphBuilder, ScalarOp, ValueId, eval};
use gristmill_runtime::{DType, Tensor};
use std::f64::consts::PI;

/// The variable of [`Schedule::Variable`], an `f64` scalar.
pub const RATE: &str = "optimizer/learning_rate";

/// A learning rate as a function of the number of completed steps: 0 in the first step.
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// The same in every step.
    Constant(f64),
    /// The variable [`RATE`], with this initial value: the program sets it between steps, by
    /// [`Trainer::set_learning_rate`](super::Trainer::set_learning_rate) or in a callback of a `fit`. Checkpoints hold it.
    Variable(f64),
    /// By a factor.
    Exponential(Exponential),
    /// From one rate to another.
    Decay(Decay),
    /// By a table.
    Piecewise(Piecewise),
    /// From nothing to another schedule.
    WarmUp(WarmUp),
}

/// `initial * rate^(n / per)` after `n` steps; with `staircase` the exponent is rounded down.
#[derive(Clone, Debug, PartialEq)]
pub struct Exponential {
    /// Rate of the first step.
    pub initial: f64,
    /// Factor per `per` steps, above 0.
    pub rate: f64,
    /// Steps until the rate has the factor.
    pub per: u64,
    /// Constant between multiples of `per`.
    pub staircase: bool,
}

/// From `initial` to `last` within `steps` steps, and `last` from then on.
#[derive(Clone, Debug, PartialEq)]
pub struct Decay {
    /// Rate of the first step.
    pub initial: f64,
    /// Rate at the end.
    pub last: f64,
    /// Steps until the end.
    pub steps: u64,
    /// The way.
    pub curve: Curve,
}

/// The way of a [`Decay`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Curve {
    /// A line.
    Line,
    /// Half a cosine (Loshchilov and Hutter, "SGDR", 2017, equation 5, without restarts).
    Cosine,
}

/// `initial`, and from each step of the list on the rate beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Piecewise {
    /// Rate of the first step.
    pub initial: f64,
    /// Steps, which increase, and rates.
    pub changes: Vec<(u64, f64)>,
}

/// The rate of another schedule, times `(n + 1) / steps` in the first `steps` steps, where `n` are done.
#[derive(Clone, Debug, PartialEq)]
pub struct WarmUp {
    /// Steps until the whole rate holds.
    pub steps: u64,
    /// The other schedule; it counts steps from the begin of the warm-up.
    pub then: Box<Schedule>,
}

impl From<f64> for Schedule {
    fn from(rate: f64) -> Schedule {
        Schedule::Constant(rate)
    }
}

impl Schedule {
    /// `initial * rate^floor(n / per)` after `n` steps.
    pub fn staircase(initial: f64, rate: f64, per: u64) -> Schedule {
        Schedule::Exponential(Exponential {
            initial,
            rate,
            per,
            staircase: true,
        })
    }

    /// From `initial` to 0 along half a cosine.
    pub fn cosine(initial: f64, steps: u64) -> Schedule {
        Schedule::Decay(Decay {
            initial,
            last: 0.0,
            steps,
            curve: Curve::Cosine,
        })
    }

    /// From `initial` to `last` along a line.
    pub fn linear(initial: f64, last: f64, steps: u64) -> Schedule {
        Schedule::Decay(Decay {
            initial,
            last,
            steps,
            curve: Curve::Line,
        })
    }

    /// The schedule behind a warm-up.
    pub fn warmed_up(self, steps: u64) -> Schedule {
        let then = Box::new(self);
        Schedule::WarmUp(WarmUp { steps, then })
    }

    /// True with a part that is a variable.
    pub fn is_variable(&self) -> bool {
        match self {
            Schedule::Variable(_) => true,
            Schedule::WarmUp(up) => up.then.is_variable(),
            _ => false,
        }
    }

    /// The rate after `n` steps; a variable has its initial value. Errors as [`Schedule::check`] does.
    pub fn at(&self, n: u64) -> Result<f64> {
        self.at_with(n, None)
    }

    /// The rate after `n` steps, with the value of the variable.
    pub(super) fn at_with(&self, n: u64, variable: Option<f64>) -> Result<f64> {
        self.check()?;
        self.rate(&mut Numbers { variable }, n as f64)
    }

    /// The rate as an `f64` scalar, from the number of completed steps, an `f64` scalar too. Errors as
    /// [`Schedule::check`] does.
    pub fn build(&self, b: &mut GraphBuilder, n: ValueId) -> Result<ValueId> {
        self.check()?;
        self.rate(b, n)
    }

    /// Errors with `InvalidInput` on negative, NaN or infinite rates, on a length of no steps, and on steps that do not increase.
    pub fn check(&self) -> Result<()> {
        match self {
            Schedule::Constant(rate) | Schedule::Variable(rate) => check_rate(*rate),
            Schedule::Exponential(e) => {
                check_rate(e.initial)?;
                check(e.rate.is_finite() && e.rate > 0.0, || {
                    format!("factor {}: expected a finite number above 0", e.rate)
                })?;
                check_steps(e.per)
            }
            Schedule::Decay(decay) => {
                check_rate(decay.initial)?;
                check_rate(decay.last)?;
                check_steps(decay.steps)
            }
            Schedule::Piecewise(table) => table.check(),
            Schedule::WarmUp(up) => {
                up.then.check()?;
                check_steps(up.steps)
            }
        }
    }

    fn rate<A: Arithmetic>(&self, a: &mut A, n: A::Value) -> Result<A::Value> {
        match self {
            Schedule::Constant(rate) => Ok(a.real(*rate)),
            Schedule::Variable(initial) => a.variable(*initial),
            Schedule::Exponential(e) => e.rate(a, n),
            Schedule::Decay(decay) => decay.rate(a, n),
            Schedule::Piecewise(table) => table.rate(a, n),
            Schedule::WarmUp(up) => up.rate(a, n),
        }
    }
}

fn check(is_good: bool, message: impl FnOnce() -> String) -> Result<()> {
    match is_good {
        true => Ok(()),
        false => Err(Error::invalid(format!("learning rate: {}", message()))),
    }
}

pub(super) fn check_rate(rate: f64) -> Result<()> {
    check(rate.is_finite() && rate >= 0.0, || {
        format!("{rate}: expected a finite number, 0 or more")
    })
}

fn check_steps(n: u64) -> Result<()> {
    check(n > 0, || {
        "a length of 0 steps: expected at least 1".to_owned()
    })
}

/// Arithmetic in `f64`: of numbers, or of nodes.
trait Arithmetic {
    type Value: Copy;

    fn real(&mut self, x: f64) -> Self::Value;
    /// The variable of the rate.
    fn variable(&mut self, initial: f64) -> Result<Self::Value>;
    fn op(&mut self, op: ScalarOp, args: &[Self::Value]) -> Result<Self::Value>;

    /// `x op k`.
    fn with(&mut self, op: ScalarOp, x: Self::Value, k: f64) -> Result<Self::Value> {
        let k = self.real(k);
        self.op(op, &[x, k])
    }

    /// `start + slope * x`.
    fn line(&mut self, start: f64, slope: f64, x: Self::Value) -> Result<Self::Value> {
        let rise = self.with(ScalarOp::Mul, x, slope)?;
        self.with(ScalarOp::Add, rise, start)
    }

    /// `min(n / steps, 1)`.
    fn part(&mut self, n: Self::Value, steps: u64) -> Result<Self::Value> {
        let part = self.with(ScalarOp::Div, n, steps as f64)?;
        self.with(ScalarOp::Min, part, 1.0)
    }
}

impl Arithmetic for GraphBuilder {
    type Value = ValueId;

    fn real(&mut self, x: f64) -> ValueId {
        self.scalar(DType::F64, x)
    }

    fn variable(&mut self, initial: f64) -> Result<ValueId> {
        GraphBuilder::variable(self, RATE, Tensor::from_f64s(DType::F64, &[], &[initial])?)
    }

    fn op(&mut self, op: ScalarOp, args: &[ValueId]) -> Result<ValueId> {
        self.map(op, args)
    }
}

/// Numbers, with the value of the variable; its initial one if absent.
struct Numbers {
    variable: Option<f64>,
}

impl Arithmetic for Numbers {
    type Value = f64;

    fn real(&mut self, x: f64) -> f64 {
        x
    }

    fn variable(&mut self, initial: f64) -> Result<f64> {
        Ok(self.variable.unwrap_or(initial))
    }

    /// The op as the interpreter computes it; a comparison gives 0 or 1.
    fn op(&mut self, op: ScalarOp, args: &[f64]) -> Result<f64> {
        if let (ScalarOp::Select, [condition, then, other]) = (op, args) {
            return Ok(if *condition == 0.0 { *other } else { *then });
        }
        let args: Vec<_> = args.iter().map(|x| (DType::F64, x.to_bits())).collect();
        Ok(match eval::scalar::eval(op, &args)? {
            (DType::Bool, bits) => bits as f64,
            (_, bits) => f64::from_bits(bits),
        })
    }
}

impl Exponential {
    fn rate<A: Arithmetic>(&self, a: &mut A, n: A::Value) -> Result<A::Value> {
        let mut exponent = a.with(ScalarOp::Div, n, self.per as f64)?;
        if self.staircase {
            exponent = a.op(ScalarOp::Floor, &[exponent])?;
        }
        let base = a.real(self.rate);
        let factor = a.op(ScalarOp::Pow, &[base, exponent])?;
        a.with(ScalarOp::Mul, factor, self.initial)
    }
}

impl Decay {
    fn rate<A: Arithmetic>(&self, a: &mut A, n: A::Value) -> Result<A::Value> {
        let part = a.part(n, self.steps)?;
        if self.curve == Curve::Line {
            return a.line(self.initial, self.last - self.initial, part);
        }
        let angle = a.with(ScalarOp::Mul, part, PI)?;
        let cosine = a.op(ScalarOp::Cos, &[angle])?;
        let height = a.with(ScalarOp::Add, cosine, 1.0)?;
        a.line(self.last, (self.initial - self.last) / 2.0, height)
    }
}

impl Piecewise {
    fn check(&self) -> Result<()> {
        check_rate(self.initial)?;
        for (_, rate) in &self.changes {
            check_rate(*rate)?;
        }
        let pairs = self.changes.windows(2);
        let mut wrong = pairs.filter(|pair| pair[0].0 >= pair[1].0);
        wrong.next().map_or(Ok(()), |pair| {
            let (step, next) = (pair[0].0, pair[1].0);
            check(false, || {
                format!("step {next} behind step {step}: expected steps that increase")
            })
        })
    }

    fn rate<A: Arithmetic>(&self, a: &mut A, n: A::Value) -> Result<A::Value> {
        let mut rate = a.real(self.initial);
        for &(step, next) in &self.changes {
            let is_reached = a.with(ScalarOp::Ge, n, step as f64)?;
            let next = a.real(next);
            rate = a.op(ScalarOp::Select, &[is_reached, next, rate])?;
        }
        Ok(rate)
    }
}

impl WarmUp {
    fn rate<A: Arithmetic>(&self, a: &mut A, n: A::Value) -> Result<A::Value> {
        let rate = self.then.rate(a, n)?;
        let next = a.with(ScalarOp::Add, n, 1.0)?;
        let part = a.part(next, self.steps)?;
        a.op(ScalarOp::Mul, &[rate, part])
    }
}
