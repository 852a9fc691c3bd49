//! Learning rates as functions of the number of steps.

use crate::error::{Error, Result};
use crate::ir::{GraphBuilder, ScalarOp, ValueId};
use gristmill_runtime::DType;
use std::f64::consts::PI;

/// A learning rate as a function of the number of steps that are done: 0 in the first one.
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// The same in every step.
    Constant(f64),
    /// `initial * rate^(steps / per)`. With `staircase` the exponent is rounded down.
    Exponential {
        /// Rate of the first step.
        initial: f64,
        /// Factor per `per` steps.
        rate: f64,
        /// Steps until the rate has the factor.
        per: u64,
        /// Constant between multiples of `per`.
        staircase: bool,
    },
    /// From `initial` to `last` along half a cosine, and `last` from step `steps` on (Loshchilov and Hutter, "SGDR", 2017,
    /// equation 5, without restarts).
    Cosine {
        /// Rate of the first step.
        initial: f64,
        /// Rate at the end.
        last: f64,
        /// Steps until the end.
        steps: u64,
    },
    /// From `initial` to `last` along a line, and `last` from step `steps` on.
    Linear {
        /// Rate of the first step.
        initial: f64,
        /// Rate at the end.
        last: f64,
        /// Steps until the end.
        steps: u64,
    },
    /// `initial`, and from each step of the list on the rate beside it. Steps increase.
    Piecewise {
        /// Rate of the first step.
        initial: f64,
        /// Steps and rates.
        changes: Vec<(u64, f64)>,
    },
    /// The rate of another schedule, times `(n + 1) / steps` in the first `steps` steps, where `n` are done.
    WarmUp {
        /// Steps until the whole rate holds.
        steps: u64,
        /// The other schedule; it counts steps from the begin of the warm-up.
        then: Box<Schedule>,
    },
}

impl From<f64> for Schedule {
    fn from(rate: f64) -> Schedule {
        Schedule::Constant(rate)
    }
}

impl Schedule {
    /// The rate after `n` steps.
    pub fn at(&self, n: u64) -> f64 {
        let part = |steps: u64| (n as f64 / steps as f64).min(1.0);
        match self {
            Schedule::Constant(rate) => *rate,
            Schedule::Exponential {
                initial,
                rate,
                per,
                staircase,
            } => {
                let exponent = n as f64 / *per as f64;
                initial
                    * rate.powf(if *staircase {
                        exponent.floor()
                    } else {
                        exponent
                    })
            }
            Schedule::Cosine {
                initial,
                last,
                steps,
            } => last + (initial - last) * (1.0 + (PI * part(*steps)).cos()) / 2.0,
            Schedule::Linear {
                initial,
                last,
                steps,
            } => initial + (last - initial) * part(*steps),
            Schedule::Piecewise { initial, changes } => {
                let reached = changes.iter().rfind(|(step, _)| n >= *step);
                reached.map_or(*initial, |(_, rate)| *rate)
            }
            Schedule::WarmUp { steps, then } => {
                then.at(n) * ((n + 1) as f64 / *steps as f64).min(1.0)
            }
        }
    }

    /// Errors with `InvalidInput` on a length of no steps, steps that do not increase, and numbers that are not finite.
    pub fn check(&self) -> Result<()> {
        let is_good = match self {
            Schedule::Constant(rate) => rate.is_finite(),
            Schedule::Exponential {
                initial, rate, per, ..
            } => initial.is_finite() && rate.is_finite() && *rate > 0.0 && *per > 0,
            Schedule::Cosine {
                initial,
                last,
                steps,
            }
            | Schedule::Linear {
                initial,
                last,
                steps,
            } => initial.is_finite() && last.is_finite() && *steps > 0,
            Schedule::Piecewise { initial, changes } => {
                let increases = changes.windows(2).all(|pair| pair[0].0 < pair[1].0);
                let mut rates = changes.iter().map(|(_, rate)| rate);
                increases && initial.is_finite() && rates.all(|rate| rate.is_finite())
            }
            Schedule::WarmUp { steps, then } => {
                then.check()?;
                *steps > 0
            }
        };
        match is_good {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "learning rate {self:?}: expected finite rates, lengths of at least one step, and steps that increase"
            ))),
        }
    }

    /// The rate as a scalar of `f64`, for the number of steps that are done, which is one too.
    ///
    /// Errors as [`Schedule::check`] does.
    pub fn build(&self, b: &mut GraphBuilder, n: ValueId) -> Result<ValueId> {
        self.check()?;
        Nodes { b, n }.rate(self)
    }
}

/// Scalars of `f64` under construction.
struct Nodes<'b> {
    b: &'b mut GraphBuilder,
    /// The number of steps that are done.
    n: ValueId,
}

impl Nodes<'_> {
    fn real(&mut self, value: f64) -> ValueId {
        self.b.scalar(DType::F64, value)
    }

    fn rate(&mut self, schedule: &Schedule) -> Result<ValueId> {
        match schedule {
            Schedule::Constant(rate) => Ok(self.real(*rate)),
            Schedule::Exponential {
                initial,
                rate,
                per,
                staircase,
            } => {
                let mut exponent = self.quotient(*per)?;
                if *staircase {
                    exponent = self.b.map(ScalarOp::Floor, &[exponent])?;
                }
                let (initial, rate) = (self.real(*initial), self.real(*rate));
                let factor = self.b.map(ScalarOp::Pow, &[rate, exponent])?;
                self.b.mul(initial, factor)
            }
            Schedule::Cosine {
                initial,
                last,
                steps,
            } => {
                let (part, pi) = (self.part(*steps)?, self.real(PI));
                let angle = self.b.mul(part, pi)?;
                let cosine = self.b.map(ScalarOp::Cos, &[angle])?;
                let (one, half) = (self.real(1.0), self.real((initial - last) / 2.0));
                let height = self.b.add_(one, cosine)?;
                self.line(*last, half, height)
            }
            Schedule::Linear {
                initial,
                last,
                steps,
            } => {
                let (part, span) = (self.part(*steps)?, self.real(last - initial));
                self.line(*initial, span, part)
            }
            Schedule::Piecewise { initial, changes } => self.piecewise(*initial, changes),
            Schedule::WarmUp { steps, then } => {
                let (rate, one) = (self.rate(then)?, self.real(1.0));
                let next = self.b.add_(self.n, one)?;
                let steps = self.real(*steps as f64);
                let part = self.b.div(next, steps)?;
                let part = self.b.min(part, one)?;
                self.b.mul(rate, part)
            }
        }
    }

    /// `n / steps`.
    fn quotient(&mut self, steps: u64) -> Result<ValueId> {
        let steps = self.real(steps as f64);
        self.b.div(self.n, steps)
    }

    /// `min(n / steps, 1)`.
    fn part(&mut self, steps: u64) -> Result<ValueId> {
        let (quotient, one) = (self.quotient(steps)?, self.real(1.0));
        self.b.min(quotient, one)
    }

    /// `start + slope * x`.
    fn line(&mut self, start: f64, slope: ValueId, x: ValueId) -> Result<ValueId> {
        let (start, rise) = (self.real(start), self.b.mul(slope, x)?);
        self.b.add_(start, rise)
    }

    fn piecewise(&mut self, initial: f64, changes: &[(u64, f64)]) -> Result<ValueId> {
        let mut rate = self.real(initial);
        for &(step, next) in changes {
            let (step, next) = (self.real(step as f64), self.real(next));
            let is_reached = self.b.map(ScalarOp::Ge, &[self.n, step])?;
            rate = self.b.map(ScalarOp::Select, &[is_reached, next, rate])?;
        }
        Ok(rate)
    }
}
