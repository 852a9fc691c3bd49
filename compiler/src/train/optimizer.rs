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
    /// Added to the root of the second moment. With 0, an element without a gradient so far becomes NaN.
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

/// RMSProp (Tieleman and Hinton, 2012, lecture 6.5): `s = decay * s + (1 - decay) * g^2` and `w -= rate * g / (sqrt(s) + epsilon)`.
/// With momentum, `v = momentum * v + g / (sqrt(s) + epsilon)` and `w -= rate * v`.
///
/// As PyTorch's `RMSprop`, whose `alpha` is `decay`. Keras' default `rho` is 0.9, and it adds `epsilon`, by default 1e-7, to `s` under
/// the root.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsProp {
    /// The learning rate.
    pub learning_rate: Schedule,
    /// Decay of the averages.
    pub decay: f64,
    /// Added to the root. With 0, an element without a gradient so far becomes NaN.
    pub epsilon: f64,
    /// Fraction of the velocity kept by the next step; 0 for none.
    pub momentum: f64,
    /// Divides by an estimate of the standard deviation (Graves, arXiv:1308.0850, section 4.2): `m = decay * m + (1 - decay) * g`, and
    /// `max(s - m^2, 0)` replaces `s` under the root. PyTorch has no `max`: its root may be NaN by rounding.
    pub centered: bool,
}

impl Default for RmsProp {
    /// Rate 0.01, decay 0.99, `epsilon` 1e-8, without momentum, not centred.
    fn default() -> RmsProp {
        RmsProp {
            learning_rate: 0.01.into(),
            decay: 0.99,
            epsilon: 1e-8,
            momentum: 0.0,
            centered: false,
        }
    }
}

/// Adagrad (Duchi, Hazan and Singer, 2011): `s += g^2`, and in step `t`, from 0, `w -= rate / (1 + t * rate_decay) * g / (sqrt(s) + epsilon)`.
///
/// As PyTorch's `Adagrad`. Keras' default `initial` is 0.1, and it adds `epsilon`, by default 1e-7, to `s` under the root.
#[derive(Clone, Debug, PartialEq)]
pub struct Adagrad {
    /// The learning rate, before the division by `1 + t * rate_decay`. [`StepOutputs`](super::StepOutputs) has this rate.
    pub learning_rate: Schedule,
    /// Growth of the rate's divisor per step; 0 for none.
    pub rate_decay: f64,
    /// `s` before the first step.
    pub initial: f64,
    /// Added to the root. With 0, an element without a gradient so far becomes NaN.
    pub epsilon: f64,
}

impl Default for Adagrad {
    /// Rate 0.01 without decay, `initial` 0, `epsilon` 1e-10.
    fn default() -> Adagrad {
        Adagrad {
            learning_rate: 0.01.into(),
            rate_decay: 0.0,
            initial: 0.0,
            epsilon: 1e-10,
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
    /// RMSProp.
    RmsProp(RmsProp),
    /// Adagrad.
    Adagrad(Adagrad),
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

impl From<RmsProp> for Optimizer {
    fn from(rms_prop: RmsProp) -> Optimizer {
        Optimizer::RmsProp(rms_prop)
    }
}

impl From<Adagrad> for Optimizer {
    fn from(adagrad: Adagrad) -> Optimizer {
        Optimizer::Adagrad(adagrad)
    }
}

impl Optimizer {
    /// Its learning rate.
    pub fn learning_rate(&self) -> &Schedule {
        match self {
            Optimizer::Sgd(sgd) => &sgd.learning_rate,
            Optimizer::Adam(adam) => &adam.learning_rate,
            Optimizer::RmsProp(rms_prop) => &rms_prop.learning_rate,
            Optimizer::Adagrad(adagrad) => &adagrad.learning_rate,
        }
    }

    /// Errors with `InvalidInput` on numbers outside of their ranges.
    pub(super) fn check(&self) -> Result<()> {
        self.learning_rate().check()?;
        match self {
            Optimizer::Sgd(sgd) => sgd.check(),
            Optimizer::Adam(adam) => {
                check_decay("beta1", adam.beta1)?;
                check_decay("beta2", adam.beta2)?;
                check_not_negative("epsilon", adam.epsilon)
            }
            Optimizer::RmsProp(rms_prop) => {
                check_decay("decay", rms_prop.decay)?;
                check_not_negative("epsilon", rms_prop.epsilon)?;
                check_not_negative("momentum", rms_prop.momentum)
            }
            Optimizer::Adagrad(adagrad) => {
                check_not_negative("decay of the learning rate", adagrad.rate_decay)?;
                check_not_negative("initial sum of squares", adagrad.initial)?;
                check_not_negative("epsilon", adagrad.epsilon)
            }
        }
    }

    /// The change of a variable in a step, by its gradient, to be subtracted.
    pub(super) fn difference(&self, s: &mut Slots, g: ValueId) -> Result<ValueId> {
        match self {
            Optimizer::Sgd(sgd) => sgd.difference(s, g),
            Optimizer::Adam(adam) => adam.difference(s, g),
            Optimizer::RmsProp(rms_prop) => rms_prop.difference(s, g),
            Optimizer::Adagrad(adagrad) => adagrad.difference(s, g),
        }
    }
}

fn check_in_range(name: &str, x: f64, is_good: bool, expected: &str) -> Result<()> {
    match is_good {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name}: {x}, expected {expected}"))),
    }
}

fn check_not_negative(name: &str, x: f64) -> Result<()> {
    let is_good = x >= 0.0 && x.is_finite();
    check_in_range(name, x, is_good, "a finite number, 0 or more")
}

fn check_decay(name: &str, x: f64) -> Result<()> {
    let is_good = (0.0..1.0).contains(&x);
    check_in_range(name, x, is_good, "a decay from 0 to below 1")
}

impl Sgd {
    fn check(&self) -> Result<()> {
        check_not_negative("momentum", self.momentum)?;
        let is_part = (0.0..=1.0).contains(&self.dampening);
        let part = "a number from 0 to 1";
        check_in_range("dampening", self.dampening, is_part, part)?;
        let by_nesterov = self.momentum > 0.0 && self.dampening == 0.0;
        match !self.nesterov || by_nesterov {
            true => Ok(()),
            false => Err(Error::invalid(
                "Nesterov's method takes momentum above 0 and no dampening",
            )),
        }
    }

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

impl RmsProp {
    fn difference(&self, s: &mut Slots, g: ValueId) -> Result<ValueId> {
        let square = s.b.mul(g, g)?;
        let mut spread = s.average("square", square, self.decay)?;
        if self.centered {
            let mean = s.average("mean", g, self.decay)?;
            let square = s.b.mul(mean, mean)?;
            let variance = s.b.sub(spread, square)?;
            // Of equal gradients it is 0, and below 0 by rounding.
            spread = s.b.map(ScalarOp::Relu, &[variance])?;
        }
        let mut direction = s.over_root(g, spread, self.epsilon)?;
        if self.momentum != 0.0 {
            let v = s.read("velocity")?;
            let v = s.add_scaled(direction, v, self.momentum)?;
            direction = s.write("velocity", v)?;
        }
        let rate = s.rate()?;
        s.b.mul(direction, rate)
    }
}

impl Adagrad {
    fn difference(&self, s: &mut Slots, g: ValueId) -> Result<ValueId> {
        let square = s.b.mul(g, g)?;
        let sum = s.read_from("sum", self.initial)?;
        let sum = s.b.add_(sum, square)?;
        let sum = s.write("sum", sum)?;
        let direction = s.over_root(g, sum, self.epsilon)?;
        let size = s.decayed_rate(self.rate_decay)?;
        s.b.mul(direction, size)
    }
}
