//! Steps in micro-batches: each adds its gradients to sums, and the last one moves the variables by them.

use super::data::rows;
use super::trainer::Trainer;
use super::update::Parameter;
use crate::compiled::{Compiled, Outputs};
use crate::error::{Error, Result};
use crate::ir::random::STEP;
use crate::ir::{Dim, GraphBuilder, ScalarOp, Type, ValueId};
use gristmill_runtime::exec::Resources;
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeMap;

/// Folder of the variables within a step; checkpoints, which are between steps, have none of them.
pub(super) const FOLDER: &str = "accumulation/";
/// The number of a micro-batch within its step, from 0.
const INDEX: &str = "accumulation/index";
/// Its part of the step's examples.
const WEIGHT: &str = "accumulation/weight";

/// What a program does with gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All of a step.
    Step,
    /// All but the last of so many micro-batches: adds them to the sums.
    Adds(usize),
    /// The last of so many micro-batches: moves the variables.
    Moves(usize),
}

impl Part {
    /// The last of so many micro-batches.
    pub(super) fn last_of(n: usize) -> Result<Part> {
        match n {
            0 => Err(Error::invalid(
                "steps of 0 micro-batches: expected at least 1",
            )),
            1 => Ok(Part::Step),
            n => Ok(Part::Moves(n)),
        }
    }

    /// Micro-batches of a step.
    fn n(self) -> usize {
        match self {
            Part::Step => 1,
            Part::Adds(n) | Part::Moves(n) => n,
        }
    }

    /// The number of batches that all steps have taken, for random numbers; none where it is the number of steps.
    pub(super) fn batches_done(self, b: &mut GraphBuilder) -> Result<Option<ValueId>> {
        if self == Part::Step {
            return Ok(None);
        }
        let (done, index) = (b.variable(STEP, scalar(0i64))?, index(b)?);
        let n = b.scalar(DType::I64, self.n() as f64);
        let done = b.mul(done, n)?;
        Ok(Some(b.add_(done, index)?))
    }

    /// Adds gradients to the sums of the step, and gives these.
    pub(super) fn sum(self, b: &mut GraphBuilder, parameters: &mut [Parameter]) -> Result<()> {
        if self == Part::Step {
            return Ok(());
        }
        let (index, zero) = (index(b)?, b.scalar(DType::I64, 0.0));
        let is_first = b.map(ScalarOp::Eq, &[index, zero])?;
        let weight = b.variable(WEIGHT, scalar(1f64))?;
        for p in parameters {
            let ty = b.operand(p.gradient)?.clone();
            let name = format!("{FOLDER}sum/{}", p.name);
            let zeros = Tensor::zeros(ty.dtype, &ty.static_shape().unwrap_or_default())?;
            let (old, zero) = (b.variable(&name, zeros)?, b.scalar(ty.dtype, 0.0));
            // What an earlier step has left does not count, NaN neither.
            let old = b.map(ScalarOp::Select, &[is_first, zero, old])?;
            let weight = b.cast(weight, ty.dtype)?;
            let own = b.mul(p.gradient, weight)?;
            p.gradient = b.add_(old, own)?;
            if let Part::Adds(_) = self {
                b.assign_variable(&name, p.gradient)?;
            }
        }
        Ok(())
    }
}

fn index(b: &mut GraphBuilder) -> Result<ValueId> {
    b.variable(INDEX, scalar(0i64))
}

fn scalar<T: gristmill_runtime::Element>(x: T) -> Tensor {
    Tensor::scalar(x)
}

/// The programs of a step in micro-batches.
pub(super) struct Accumulation {
    /// Micro-batches of a step.
    n: usize,
    adds: Compiled,
    container: String,
    /// The loss, and metrics of one element.
    means: Vec<String>,
}

/// A micro-batch, with its part of the examples.
type Micro = (Vec<(String, Tensor)>, f64);

impl Accumulation {
    pub(super) fn new(n: usize, adds: Compiled, container: &str) -> Accumulation {
        Accumulation {
            n,
            means: adds.output_names().to_vec(),
            adds,
            container: container.to_owned(),
        }
    }

    /// Micro-batches of a step.
    pub(super) fn n(&self) -> usize {
        self.n
    }

    /// The program of all micro-batches but the last.
    pub(super) fn adds(&self) -> &Compiled {
        &self.adds
    }

    /// The results of a step: those of the last micro-batch, with means over all in the place of loss and metrics.
    pub(super) fn run(&self, step: &Compiled, batch: Vec<(String, Tensor)>) -> Result<Outputs> {
        let micros = self.split(step.inputs(), &batch)?;
        let n = micros.len();
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        let mut last = None;
        for (i, (micro, weight)) in micros.into_iter().enumerate() {
            self.begin(step.resources(), i, weight)?;
            let program = if i + 1 == n { step } else { &self.adds };
            let outputs = program.run(micro);
            let outputs = outputs.map_err(|e| match n {
                1 => e,
                n => e.context(format!("micro-batch {} of {n}", i + 1)),
            })?;
            for name in &self.means {
                let x = outputs.get(name).map_or(f64::NAN, |t| t.to_f64s()[0]);
                *sums.entry(name).or_default() += weight * x;
            }
            last = Some(outputs);
        }
        let last = last.ok_or_else(|| Error::invalid("a batch of 0 examples"))?;
        let mean = |(name, t): (&str, &Tensor)| {
            let t = match sums.get(name) {
                Some(&mean) => Tensor::from_f64s(t.dtype(), t.shape(), &[mean])?,
                None => t.clone(),
            };
            Ok((name.to_owned(), t))
        };
        let outputs: Result<Vec<_>> = last.iter().map(mean).collect();
        Ok(Outputs::of(outputs?))
    }

    fn begin(&self, resources: &Resources, i: usize, weight: f64) -> Result<()> {
        resources.set(&self.container, INDEX, &scalar(i as i64))?;
        Ok(resources.set(&self.container, WEIGHT, &scalar(weight))?)
    }

    /// The first micro-batch, made ready to be run.
    pub(super) fn first(
        &self,
        step: &Compiled,
        batch: &[(String, Tensor)],
    ) -> Result<Vec<(String, Tensor)>> {
        self.begin(step.resources(), 0, 1.0)?;
        let first = self.split(step.inputs(), batch)?.into_iter().next();
        let first = first.map(|(micro, _)| micro);
        first.ok_or_else(|| Error::invalid("a batch of 0 examples"))
    }

    fn split(&self, inputs: &[(String, Type)], batch: &[(String, Tensor)]) -> Result<Vec<Micro>> {
        let cut = Cut::new(inputs);
        let Some(n) = cut.n_rows(batch)? else {
            return Ok(vec![(batch.to_vec(), 1.0)]);
        };
        let own = cut.axis.and_then(Dim::as_usize);
        let size = own.unwrap_or(n.div_ceil(self.n).max(1));
        if own.is_some() && size * self.n != n {
            let (all, k) = (size * self.n, self.n);
            return Err(Error::invalid(format!(
                "a batch of {n} examples: expected {all}, {k} micro-batches of {size}"
            )));
        }
        let places: Vec<usize> = (0..n).collect();
        let micro = |places: &[usize]| {
            let part = places.len() as f64 / n as f64;
            Ok((cut.rows(batch, places)?, part))
        };
        places.chunks(size).map(micro).collect()
    }
}

/// The inputs of which a micro-batch takes a part: those with the first axis of the first one. All others are the same for each.
struct Cut<'i> {
    inputs: &'i [(String, Type)],
    axis: Option<&'i Dim>,
}

impl<'i> Cut<'i> {
    fn new(inputs: &'i [(String, Type)]) -> Cut<'i> {
        let axis = inputs.iter().find_map(|(_, ty)| ty.shape.first());
        Cut { inputs, axis }
    }

    fn has(&self, name: &str) -> bool {
        let found = self.inputs.iter().find(|(own, _)| own == name);
        let axis = found.and_then(|(_, ty)| ty.shape.first());
        axis.is_some() && axis == self.axis
    }

    /// Rows of all inputs; `None` where nothing is cut. Errors when inputs differ in it.
    fn n_rows(&self, batch: &[(String, Tensor)]) -> Result<Option<usize>> {
        let own = batch.iter().filter(|(name, _)| self.has(name));
        let mut sizes = own.map(|(name, t)| (name, t.shape().first().copied().unwrap_or(0)));
        let Some((first, n)) = sizes.next() else {
            return Ok(None);
        };
        match sizes.find(|(_, other)| *other != n) {
            None => Ok(Some(n)),
            Some((name, other)) => Err(Error::invalid(format!(
                "input {name:?} has {other} rows, and input {first:?} {n}"
            ))),
        }
    }

    fn rows(&self, batch: &[(String, Tensor)], places: &[usize]) -> Result<Vec<(String, Tensor)>> {
        let one = |(name, t): &(String, Tensor)| {
            let t = match self.has(name) {
                true => rows(t, places)?,
                false => t.clone(),
            };
            Ok((name.clone(), t))
        };
        batch.iter().map(one).collect()
    }
}

/// Errors when a step in micro-batches could not give the mean of a metric.
pub(super) fn check_metric(b: &GraphBuilder, name: &str, value: ValueId) -> Result<()> {
    let ty = b.operand(value)?;
    match ty.shape.n_elements().is(1) && ty.dtype.is_float() {
        true => Ok(()),
        false => {
            let message = format!(
                "metric {name:?} is {ty}: steps in micro-batches give means, of one float each"
            );
            Err(Error::invalid(message).hint("its mean as a metric, or accumulate: 1"))
        }
    }
}

impl Trainer {
    /// Examples of an evaluation for steps on so many: as many as are computed at once.
    pub(super) fn evaluation_size(&self, step_size: usize) -> usize {
        step_size.div_ceil(self.n_micro_batches())
    }
}
