//! Optimisers: from a gradient to the change of a variable.

use super::Schedule;
use super::update::Slots;
use crate::error::{Error, Result};
use crate::ir::{ScalarOp, ValueId};

/// Stochastic gradient descent: `w -= rate * d`, where `d` is the gradient, or with momentum `v = momentum * v + (1 - dampening) * g`
/// and `d = v`, or `d = g + momentum * v` by Nesterov. `v` is `g` in the first step.
///
/// As PyTorch's `SGD`. Keras keeps `v = momentum * v - rate * g`, which is another path where the rate changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    /// The learning rate.
    pub learning_rate: Schedule,
    /// Fraction of the velocity kept by the next step; 0 for none.
    pub momentum: f64,
    /// Fraction of the gradient left out of the velocity.
    pub dampening: f64,
    /// A step ahead of the velocity.
    pub nesterov: bool,
}

impl Default for Sgd {
    /// Rate 0.01 without momentum.
    fn default() -> Sgd {
        Sgd {
            learning_rate: 0.01.into(),
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
        }
    }
}

/// Adam (Kingma and Ba, 2015, algorithm 1): `m = beta1 * m + (1 - beta1) * g`, `v = beta2 * v + (1 - beta2) * g^2`, and in step `t`
/// `w -= rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)`.
///
/// As PyTorch's `Adam`; with [`WeightDecay::Decoupled`](super::WeightDecay::Decoupled) its `AdamW` (Loshchilov and Hutter, 2019,
/// algorithm 2). Keras' default `epsilon` is 1e-7.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    /// The learning rate.
    pub learning_rate: Schedule,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

impl Default for Adam {
    /// Rate 1e-3, decays 0.9 and 0.999, `epsilon` 1e-8.
    fn default() -> Adam {
        Adam {
            learning_rate: 1e-3.into(),
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
        }
    }
}

/// An optimiser.
#[derive(Clone, Debug, PartialEq)]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Adam.
    Adam(Adam),
}

impl From<Sgd> for Optimizer {
    fn from(sgd: Sgd) -> Optimizer {
        Optimizer::Sgd(sgd)
    }
}

impl From<Adam> for Optimizer {
    fn from(adam: Adam) -> Optimizer {
        Optimizer::Adam(adam)
    }
}

impl Optimizer {
    /// Its learning rate.
    pub fn learning_rate(&self) -> &Schedule {
        match self {
            Optimizer::Sgd(sgd) => &sgd.learning_rate,
            Optimizer::Adam(adam) => &adam.learning_rate,
        }
    }

    /// Errors with `InvalidInput` on numbers outside of their ranges.
    pub(super) fn check(&self) -> Result<()> {
        self.learning_rate().check()?;
        let check = |name: &str, x: f64, is_good: bool, expected: &str| match is_good {
            true => Ok(()),
            false => Err(Error::invalid(format!("{name}: {x}, expected {expected}"))),
        };
        let is_positive = |x: f64| x >= 0.0 && x.is_finite();
        match self {
            Optimizer::Sgd(sgd) => {
                let (momentum, dampening) = (sgd.momentum, sgd.dampening);
                let positive = "a finite number, 0 or more";
                check("momentum", momentum, is_positive(momentum), positive)?;
                let is_part = (0.0..=1.0).contains(&dampening);
                check("dampening", dampening, is_part, "a number from 0 to 1")?;
                let by_nesterov = momentum > 0.0 && dampening == 0.0;
                match !sgd.nesterov || by_nesterov {
                    true => Ok(()),
                    false => Err(Error::invalid(
                        "Nesterov's method takes momentum above 0 and no dampening",
                    )),
                }
            }
            Optimizer::Adam(adam) => {
                for (name, decay) in [("beta1", adam.beta1), ("beta2", adam.beta2)] {
                    let is_part = (0.0..1.0).contains(&decay);
                    check(name, decay, is_part, "a decay from 0 to below 1")?;
                }
                let positive = "a finite number, 0 or more";
                check("epsilon", adam.epsilon, is_positive(adam.epsilon), positive)
            }
        }
    }

    /// The change of a variable in a step, by its gradient, to be subtracted.
    pub(super) fn difference(&self, s: &mut Slots, g: ValueId) -> Result<ValueId> {
        match self {
            Optimizer::Sgd(sgd) => sgd.difference(s, g),
            Optimizer::Adam(adam) => adam.difference(s, g),
        }
    }
}

impl Sgd {
    fn difference(&self, s: &mut Slots, g: ValueId) -> Result<ValueId> {
        let mut direction = g;
        if self.momentum != 0.0 {
            let v = self.velocity(s, g)?;
            direction = match self.nesterov {
                true => s.add_scaled(g, v, self.momentum)?,
                false => v,
            };
        }
        let rate = s.rate()?;
        s.b.mul(direction, rate)
    }

    fn velocity(&self, s: &mut Slots, g: ValueId) -> Result<ValueId> {
        let v = s.read("velocity")?;
        let mut entering = g;
        if self.dampening != 0.0 {
            let (whole, part) = (s.real(1.0), s.real(1.0 - self.dampening));
            let factor = s.b.map(ScalarOp::Select, &[s.is_first, whole, part])?;
            entering = s.b.mul(g, factor)?;
        }
        let v = s.add_scaled(entering, v, self.momentum)?;
        s.write("velocity", v)
    }
}

impl Adam {
    fn difference(&self, s: &mut Slots, g: ValueId) -> Result<ValueId> {
        let square = s.b.mul(g, g)?;
        let m = s.average("mean", g, self.beta1)?;
        let v = s.average("square", square, self.beta2)?;
        let (first, second) = (s.correction(self.beta1)?, s.correction(self.beta2)?);
        let second = s.b.map(ScalarOp::Sqrt, &[second])?;
        let size = s.b.div(s.rate, first)?;
        let (size, second) = (s.own(size)?, s.own(second)?);
        let root = s.b.map(ScalarOp::Sqrt, &[v])?;
        let root = s.b.div(root, second)?;
        let epsilon = s.real(self.epsilon);
        let root = s.b.add_(root, epsilon)?;
        let direction = s.b.div(m, root)?;
        s.b.mul(direction, size)
    }
}
