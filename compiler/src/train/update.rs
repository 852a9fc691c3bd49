//! One step of training: variables changed by their gradients.

use super::Optimizer;
use crate::error::{Error, Result};
use crate::ir::random::STEP;
use crate::ir::{GraphBuilder, Op, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::{DType, Tensor};
use regex_lite::Regex;

/// A trainable variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in the session's own container.
    pub name: String,
    /// The value that the step reads, `f32` or `f64`.
    pub value: ValueId,
    /// Gradient of the loss by it, of the same type.
    pub gradient: ValueId,
}

/// Decay of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum WeightDecay {
    /// None.
    #[default]
    None,
    /// The gradient of `decay / 2 * sum(w^2)` is added to that of the loss: `weight_decay` of PyTorch's `SGD` and `Adam`.
    L2(f64),
    /// `w *= 1 - rate * decay` before the step: `AdamW`.
    Decoupled(f64),
}

/// Settings of the parameters whose names match a pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// A regular expression, searched anywhere in a name.
    pub pattern: String,
    /// Factor of the learning rate.
    pub rate_factor: f64,
    /// Their own decay.
    pub weight_decay: WeightDecay,
}

/// The treatment of gradients in a step, in this order: clip, decay, move, average.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The optimiser.
    pub optimizer: Optimizer,
    /// Decay of the parameters without a group.
    pub weight_decay: WeightDecay,
    /// A parameter belongs to the first group whose pattern matches its name.
    pub groups: Vec<Group>,
    /// Largest common norm of all gradients; larger gradients are scaled down to it (Pascanu et al., 2013, algorithm 1; PyTorch adds
    /// 1e-6 to the norm). A norm beyond the gradients' dtype is an error of the run, like NaN or infinite gradients.
    pub clip_norm: Option<f64>,
    /// Decay of the average of each parameter, which is its value before the first step: `a -= (1 - decay) * (a - w)`.
    pub average: Option<f64>,
    /// Averages follow faster at first: the decay in step `t`, from 1, is at most `(1 + t) / (10 + t)` (TensorFlow's
    /// `ExponentialMovingAverage` with `num_updates`).
    pub average_warms_up: bool,
}

impl<O: Into<Optimizer>> From<O> for Update {
    /// The optimiser alone.
    fn from(optimizer: O) -> Update {
        Update {
            optimizer: optimizer.into(),
            weight_decay: WeightDecay::None,
            groups: Vec::new(),
            clip_norm: None,
            average: None,
            average_warms_up: false,
        }
    }
}

/// Values of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number of the step, from 1: `i64`.
    pub number: ValueId,
    /// Its learning rate: `f64`.
    pub learning_rate: ValueId,
    /// The common norm of all gradients before clipping, `f64`; `None` without clipping.
    pub norm: Option<ValueId>,
    /// The largest gradient element by magnitude, before clipping: `f64`. The step fails unless it is finite.
    pub largest_gradient: ValueId,
    /// The new values of the parameters, in order.
    pub values: Vec<ValueId>,
}

impl Update {
    /// Adds a step to a graph: each parameter is assigned its new value. A run with NaN or infinite gradients is an error and changes
    /// nothing.
    ///
    /// Errors with `InvalidInput` on settings out of range and malformed patterns; on a parameter of another dtype than `f32`
    /// or `f64`, with a gradient of another type, with a symbolic shape, or with a duplicate name.
    pub fn apply(&self, b: &mut GraphBuilder, parameters: &[Parameter]) -> Result<Step> {
        self.check()?;
        check_parameters(b, parameters)?;
        let groups = self.patterns()?;
        let done = b.steps_done()?;
        let n = b.cast(done, DType::F64)?;
        let learning_rate = self.optimizer.learning_rate().build(b, n)?;
        let zero = b.scalar(DType::F64, 0.0);
        let is_first = b.map(ScalarOp::Eq, &[n, zero])?;
        let largest_gradient = b.with_origin("/gradients", |b| largest_gradient(b, parameters))?;
        // The step counts by its check, which is so never left out.
        let counts = b.map(ScalarOp::Ge, &[largest_gradient, zero])?;
        let counts = b.cast(counts, DType::I64)?;
        let number = b.add_(done, counts)?;
        let number = b.assign_variable(STEP, number)?;
        let clip = b.with_origin("/gradients", |b| self.clip(b, parameters))?;
        let (norm, clip) = clip.unzip();
        let common = Common {
            number: n,
            is_first,
            rate: learning_rate,
        };
        let mut values = Vec::new();
        for parameter in parameters {
            let group = groups.iter().find(|(r, _)| r.is_match(&parameter.name));
            let mut slots = Slots::new(b, parameter, common)?;
            values.push(self.step(&mut slots, group.map(|(_, group)| *group), clip)?);
        }
        Ok(Step {
            number,
            learning_rate,
            norm,
            largest_gradient,
            values,
        })
    }

    fn check(&self) -> Result<()> {
        self.optimizer.check()?;
        let decays = self.groups.iter().map(|g| g.weight_decay);
        for decay in decays.chain([self.weight_decay]) {
            let (WeightDecay::L2(x) | WeightDecay::Decoupled(x)) = decay else {
                continue;
            };
            check_number("weight decay", x, x >= 0.0)?;
        }
        for group in &self.groups {
            let factor = group.rate_factor;
            check_number("factor of the learning rate", factor, factor >= 0.0)?;
        }
        if let Some(norm) = self.clip_norm {
            check_number("norm of gradients", norm, norm > 0.0)?;
        }
        let average = self.average.unwrap_or(0.0);
        if self.average_warms_up && self.average.is_none() {
            let e = Error::invalid("average_warms_up without averages");
            return Err(e.hint("average: Some(0.9999)"));
        }
        check_number("decay of averages", average, (0.0..1.0).contains(&average))
    }

    fn patterns(&self) -> Result<Vec<(Regex, &Group)>> {
        let one = |group: &'_ Group| {
            let pattern = &group.pattern;
            let regex = Regex::new(pattern);
            regex.map_err(|e| Error::invalid(format!("pattern {pattern:?}: {e}")))
        };
        let pair = |group| Ok((one(group)?, group));
        self.groups.iter().map(pair).collect()
    }

    /// The norm of all gradients, and their factor.
    fn clip(
        &self,
        b: &mut GraphBuilder,
        parameters: &[Parameter],
    ) -> Result<Option<(ValueId, ValueId)>> {
        let Some(most) = self.clip_norm else {
            return Ok(None);
        };
        let mut sum = b.scalar(DType::F64, 0.0);
        for p in parameters {
            let square = b.mul(p.gradient, p.gradient)?;
            let axes: Vec<usize> = (0..b.operand(square)?.rank()).collect();
            let square = b.reduce(ReduceKind::Sum, square, &axes, false)?;
            let square = b.cast(square, DType::F64)?;
            sum = b.add_(sum, square)?;
        }
        let norm = b.map(ScalarOp::Sqrt, &[sum])?;
        let norm = b.add1(Op::CheckFinite, &[norm])?;
        let (most, one) = (b.scalar(DType::F64, most), b.scalar(DType::F64, 1.0));
        let is_over = b.map(ScalarOp::Gt, &[norm, most])?;
        let factor = b.div(most, norm)?;
        let factor = b.map(ScalarOp::Select, &[is_over, factor, one])?;
        Ok(Some((norm, factor)))
    }

    /// The new value of a parameter, assigned.
    fn step(&self, s: &mut Slots, group: Option<&Group>, clip: Option<ValueId>) -> Result<ValueId> {
        if let Some(group) = group {
            let factor = s.b.scalar(DType::F64, group.rate_factor);
            s.rate = s.b.mul(s.rate, factor)?;
        }
        let before = s.parameter.value;
        let mut g = s.parameter.gradient;
        if let Some(factor) = clip {
            let factor = s.own(factor)?;
            g = s.b.mul(g, factor)?;
        }
        let decay = group.map_or(self.weight_decay, |group| group.weight_decay);
        let (w, g) = s.decayed(decay, before, g)?;
        let difference = self.optimizer.difference(s, g)?;
        let w = s.b.sub(w, difference)?;
        let w = s.b.assign_variable(&s.parameter.name, w)?;
        if let Some(decay) = self.average {
            let part = s.average_part(decay, self.average_warms_up)?;
            s.follow(before, w, part)?;
        }
        Ok(w)
    }
}

/// The largest gradient element by magnitude, checked to be finite.
fn largest_gradient(b: &mut GraphBuilder, parameters: &[Parameter]) -> Result<ValueId> {
    let mut largest = b.scalar(DType::F64, 0.0);
    for p in parameters {
        let ty = b.operand(p.gradient)?;
        let (is_empty, rank) = (ty.shape.n_elements().is(0), ty.rank());
        if is_empty {
            continue;
        }
        let size = b.map(ScalarOp::Abs, &[p.gradient])?;
        let all: Vec<usize> = (0..rank).collect();
        let own = b.reduce(ReduceKind::Max, size, &all, false)?;
        let own = b.cast(own, DType::F64)?;
        largest = b.map(ScalarOp::Max, &[largest, own])?;
    }
    b.add1(Op::CheckFinite, &[largest])
}

fn check_number(name: &str, x: f64, is_good: bool) -> Result<()> {
    match is_good && x.is_finite() {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name}: {x} is out of range"))),
    }
}

fn check_parameters(b: &GraphBuilder, parameters: &[Parameter]) -> Result<()> {
    for (i, p) in parameters.iter().enumerate() {
        let (ty, gradient) = (b.operand(p.value)?, b.operand(p.gradient)?);
        let name = &p.name;
        let expect = |good: bool, why: String| match good {
            true => Ok(()),
            false => Err(Error::invalid(format!("parameter {name:?}: {why}"))),
        };
        let is_real = matches!(ty.dtype, DType::F32 | DType::F64);
        expect(is_real, format!("it is {ty}, expected f32 or f64"))?;
        expect(
            ty == gradient,
            format!("it is {ty}, its gradient {gradient}"),
        )?;
        expect(
            ty.static_shape().is_some(),
            format!("it is {ty}, expected known extents"),
        )?;
        let is_new = parameters[..i].iter().all(|other| other.name != *name);
        expect(is_new, "its name is used twice".into())?;
    }
    Ok(())
}

/// Scalars of a step, `f64` but for the condition.
#[derive(Clone, Copy)]
struct Common {
    /// The number of steps that are done.
    number: ValueId,
    /// True in the first step.
    is_first: ValueId,
    /// The learning rate.
    rate: ValueId,
}

/// A parameter under construction, and what the optimiser keeps of it.
pub(super) struct Slots<'b> {
    pub(super) b: &'b mut GraphBuilder,
    parameter: &'b Parameter,
    dtype: DType,
    /// The number of steps that are done, `f64`.
    number: ValueId,
    /// True in the first step.
    pub(super) is_first: ValueId,
    /// Its learning rate, `f64`.
    pub(super) rate: ValueId,
}

impl<'b> Slots<'b> {
    fn new(b: &'b mut GraphBuilder, parameter: &'b Parameter, common: Common) -> Result<Slots<'b>> {
        Ok(Slots {
            dtype: b.operand(parameter.value)?.dtype,
            b,
            parameter,
            number: common.number,
            is_first: common.is_first,
            rate: common.rate,
        })
    }
}

impl Slots<'_> {
    /// The value and its gradient with the decay of weights.
    fn decayed(
        &mut self,
        decay: WeightDecay,
        w: ValueId,
        g: ValueId,
    ) -> Result<(ValueId, ValueId)> {
        match decay {
            WeightDecay::None => Ok((w, g)),
            WeightDecay::L2(decay) => Ok((w, self.add_scaled(g, w, decay)?)),
            WeightDecay::Decoupled(decay) => {
                let less = self.b.scalar(DType::F64, -decay);
                let part = self.b.mul(self.rate, less)?;
                let one = self.b.scalar(DType::F64, 1.0);
                let kept = self.b.add_(part, one)?;
                let kept = self.own(kept)?;
                Ok((self.b.mul(w, kept)?, g))
            }
        }
    }

    /// A constant of the parameter's dtype.
    pub(super) fn real(&mut self, value: f64) -> ValueId {
        self.b.scalar(self.dtype, value)
    }

    /// A scalar of `f64` in the parameter's dtype.
    pub(super) fn own(&mut self, scalar: ValueId) -> Result<ValueId> {
        self.b.cast(scalar, self.dtype)
    }

    /// The learning rate in the parameter's dtype.
    pub(super) fn rate(&mut self) -> Result<ValueId> {
        self.own(self.rate)
    }

    /// The learning rate divided by `1 + t * decay` in step `t`, from 0, in the parameter's dtype.
    pub(super) fn decayed_rate(&mut self, decay: f64) -> Result<ValueId> {
        let (decay, one) = (
            self.b.scalar(DType::F64, decay),
            self.b.scalar(DType::F64, 1.0),
        );
        let growth = self.b.mul(self.number, decay)?;
        let divisor = self.b.add_(one, growth)?;
        let rate = self.b.div(self.rate, divisor)?;
        self.own(rate)
    }

    /// `x / (sqrt(square) + epsilon)`.
    pub(super) fn over_root(
        &mut self,
        x: ValueId,
        square: ValueId,
        epsilon: f64,
    ) -> Result<ValueId> {
        let root = self.b.map(ScalarOp::Sqrt, &[square])?;
        let epsilon = self.real(epsilon);
        let root = self.b.add_(root, epsilon)?;
        self.b.div(x, root)
    }

    /// `x + k * y`.
    pub(super) fn add_scaled(&mut self, x: ValueId, y: ValueId, k: f64) -> Result<ValueId> {
        let k = self.real(k);
        let scaled = self.b.mul(y, k)?;
        self.b.add_(x, scaled)
    }

    /// `1 - decay^t` in step `t`, `f64`.
    pub(super) fn correction(&mut self, decay: f64) -> Result<ValueId> {
        let (decay, one) = (
            self.b.scalar(DType::F64, decay),
            self.b.scalar(DType::F64, 1.0),
        );
        let t = self.b.add_(self.number, one)?;
        let power = self.b.map(ScalarOp::Pow, &[decay, t])?;
        self.b.sub(one, power)
    }

    fn slot(&self, slot: &str) -> String {
        format!("optimizer/{}/{slot}", self.parameter.name)
    }

    fn read_named(&mut self, name: &str, initial: f64) -> Result<ValueId> {
        let ty = self.b.operand(self.parameter.value)?;
        let shape = ty.static_shape().unwrap_or_default();
        let mut value = Tensor::zeros(self.dtype, &shape)?;
        // Zeros take no memory until something writes them.
        match (self.dtype, initial) {
            (_, 0.0) => {}
            (DType::F32, _) => value.as_mut_slice::<f32>().fill(initial as f32),
            _ => value.as_mut_slice::<f64>().fill(initial),
        }
        self.b.variable(name, value)
    }

    /// A slot as the last step left it, zero at first.
    pub(super) fn read(&mut self, slot: &str) -> Result<ValueId> {
        self.read_from(slot, 0.0)
    }

    /// A slot as the last step left it, with all elements `initial` at first.
    pub(super) fn read_from(&mut self, slot: &str, initial: f64) -> Result<ValueId> {
        self.read_named(&self.slot(slot), initial)
    }

    /// Keeps a value in a slot, and gives it. What is computed from it does not wait for the assignment:
    /// one kernel updates the slots and the parameter.
    pub(super) fn write(&mut self, slot: &str, value: ValueId) -> Result<ValueId> {
        let name = self.slot(slot);
        self.b.assign_variable(&name, value)?;
        Ok(value)
    }

    /// Moves a slot to `decay` times itself and `1 - decay` times `x`, and gives it.
    pub(super) fn average(&mut self, slot: &str, x: ValueId, decay: f64) -> Result<ValueId> {
        let old = self.read(slot)?;
        let (kept, entering) = (self.real(decay), self.real(1.0 - decay));
        let entering = self.b.mul(x, entering)?;
        let kept = self.b.mul(old, kept)?;
        let new = self.b.add_(kept, entering)?;
        self.write(slot, new)
    }

    /// The part of the new value in an average.
    fn average_part(&mut self, decay: f64, warms_up: bool) -> Result<ValueId> {
        if !warms_up {
            return Ok(self.real(1.0 - decay));
        }
        // `1 - (1 + t) / (10 + t)` is `9 / (10 + t)`.
        let (nine, eleven) = (
            self.b.scalar(DType::F64, 9.0),
            self.b.scalar(DType::F64, 11.0),
        );
        let count = self.b.add_(self.number, eleven)?;
        let warming = self.b.div(nine, count)?;
        let part = self.b.scalar(DType::F64, 1.0 - decay);
        let part = self.b.map(ScalarOp::Max, &[warming, part])?;
        self.own(part)
    }

    /// Moves the parameter's average towards its new value.
    fn follow(&mut self, before: ValueId, new: ValueId, part: ValueId) -> Result<ValueId> {
        let name = format!("average/{}", self.parameter.name);
        let old = self.read_named(&name, 0.0)?;
        let old = self
            .b
            .map(ScalarOp::Select, &[self.is_first, before, old])?;
        let difference = self.b.sub(old, new)?;
        let part = self.b.mul(difference, part)?;
        let moved = self.b.sub(old, part)?;
        self.b.assign_variable(&name, moved)
    }
}
