//! Steps in micro-batches: each adds its gradients to sums, and the last one moves the variables by them.

use super::data::{Batch, rows};
use super::trainer::Trainer;
use super::update::Parameter;
use crate::compiled::{Compiled, Outputs};
use crate::error::{Error, Result};
use crate::ir::random::STEP;
use crate::ir::{Dim, GraphBuilder, ScalarOp, Type, ValueId};
use crate::options::{DataParallel, Options};
use gristmill_runtime::exec::Resources;
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Folder of the variables within a step; checkpoints, which are between steps, have none of them.
pub(super) const FOLDER: &str = "accumulation/";
/// Folder of the sums of gradients in it.
const SUMS: &str = "sum/";
/// The number of a micro-batch within its step, from 0.
const INDEX: &str = "accumulation/index";
/// Its part of the step's examples.
const WEIGHT: &str = "accumulation/weight";

/// The use of gradients in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// A step on a whole batch.
    Step,
    /// A micro-batch before the last one of so many: its gradients are added to sums.
    Adds(usize),
    /// The last one of so many: the sums move the variables.
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

    /// The number of batches in all steps so far, for random numbers; `None` for the number of steps.
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
            let name = format!("{FOLDER}{SUMS}{}", p.name);
            let zeros = Tensor::zeros(ty.dtype, &ty.static_shape().unwrap_or_default())?;
            let (old, zero) = (b.variable(&name, zeros)?, b.scalar(ty.dtype, 0.0));
            // Sums of an earlier step do not count, NaN neither.
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
    in_shares: Option<InShares>,
    container: String,
    /// Held during a step: its parts share variables.
    lock: Mutex<()>,
    /// The loss, and metrics of one element.
    means: Vec<String>,
}

/// The programs of devices that keep the sums of their own shares, which are joined once in a step.
pub(super) struct InShares {
    /// Shares of a micro-batch, and so its fewest examples.
    pub(super) n: usize,
    pub(super) adds: Compiled,
    pub(super) moves: Compiled,
}

impl InShares {
    /// Options of its programs, for those of others; `None` for a single share.
    pub(super) fn options(options: &Options) -> Option<(usize, Options)> {
        let on = options.data_parallel.as_ref()?;
        let n = on.shards.max(on.devices.len());
        let on = DataParallel {
            sums: format!("{FOLDER}{SUMS}"),
            ..on.clone()
        };
        let options = Options {
            data_parallel: Some(on),
            ..options.clone()
        };
        (n > 1).then_some((n, options))
    }
}

impl Accumulation {
    /// Errors when an input has no first axis of examples.
    pub(super) fn new(
        n: usize,
        adds: Compiled,
        in_shares: Option<InShares>,
        container: &str,
    ) -> Result<Accumulation> {
        Cut::new(adds.inputs()).check()?;
        Ok(Accumulation {
            lock: Mutex::new(()),
            n,
            in_shares,
            means: adds.output_names().to_vec(),
            adds,
            container: container.to_owned(),
        })
    }

    /// Micro-batches of a step.
    pub(super) fn n(&self) -> usize {
        self.n
    }

    /// All programs but the one that moves the variables of a step with few examples.
    pub(super) fn programs(&self) -> impl Iterator<Item = &Compiled> {
        let in_shares = self.in_shares.iter();
        let in_shares = in_shares.flat_map(|own| [&own.adds, &own.moves]);
        [&self.adds].into_iter().chain(in_shares)
    }

    /// The programs for micro-batches of some sizes: of all but the last one, and of the last one, which is `step` where shares are not
    /// kept apart.
    fn programs_for<'a>(&'a self, step: &'a Compiled, parts: &[Range<usize>]) -> [&'a Compiled; 2] {
        let is_whole = |own: &&InShares| parts.iter().all(|part| part.len() >= own.n);
        match self.in_shares.as_ref().filter(is_whole) {
            Some(own) if parts.len() > 1 => [&own.adds, &own.moves],
            _ => [&self.adds, step],
        }
    }

    /// The program of the last micro-batch of a step on a batch.
    pub(super) fn moves<'a>(&'a self, step: &'a Compiled, batch: &Batch) -> Result<&'a Compiled> {
        let parts = self.parts(&Cut::new(step.inputs()), batch)?;
        Ok(self.programs_for(step, &parts)[1])
    }

    /// The results of a step: those of the last micro-batch, with means over all in the place of loss and metrics.
    pub(super) fn run(&self, step: &Compiled, batch: Vec<(String, Tensor)>) -> Result<Outputs> {
        let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let cut = Cut::new(step.inputs());
        let parts = self.parts(&cut, &batch)?;
        let [adds, moves] = self.programs_for(step, &parts);
        let (n, n_rows) = (parts.len(), parts.last().map_or(0, |part| part.end));
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        let mut last = None;
        for (i, part) in parts.into_iter().enumerate() {
            let weight = part.len() as f64 / n_rows as f64;
            let micro = cut.rows(&batch, part)?;
            self.begin(step.resources(), i, weight)?;
            let program = if i + 1 == n { moves } else { adds };
            let outputs = program.run(micro);
            let outputs = outputs.map_err(|e| match n {
                1 => e,
                n => e.context(format!("micro-batch {} of {n}", i + 1)),
            })?;
            for (name, x) in self.means.iter().zip(self.numbers(&outputs)) {
                *sums.entry(name).or_default() += weight * x?;
            }
            last = Some(outputs);
        }
        let last = last.ok_or_else(|| Error::invalid("a batch of 0 examples"))?;
        with_means(&last, &sums)
    }

    /// The numbers to take means of, in the order of their names.
    fn numbers<'o>(&'o self, outputs: &'o Outputs) -> impl Iterator<Item = Result<f64>> {
        self.means.iter().map(|name| {
            let x = outputs.get(name).and_then(|t| t.to_f64s().first().copied());
            x.ok_or_else(|| Error::internal(format!("a micro-batch has no output {name:?}")))
        })
    }

    fn begin(&self, resources: &Resources, i: usize, weight: f64) -> Result<()> {
        resources.set(&self.container, INDEX, &scalar(i as i64))?;
        Ok(resources.set(&self.container, WEIGHT, &scalar(weight))?)
    }

    /// The first micro-batch, made ready to be run.
    pub(super) fn first(&self, step: &Compiled, batch: &[(String, Tensor)]) -> Result<Batch> {
        self.begin(step.resources(), 0, 1.0)?;
        let cut = Cut::new(step.inputs());
        let first = self.parts(&cut, batch)?.into_iter().next();
        let first = first.ok_or_else(|| Error::invalid("a batch of 0 examples"))?;
        cut.rows(batch, first)
    }

    /// The rows of each micro-batch.
    fn parts(&self, cut: &Cut, batch: &[(String, Tensor)]) -> Result<Vec<Range<usize>>> {
        let n = cut.n_rows(batch)?;
        let own = cut.axis.and_then(Dim::as_usize);
        let size = own.unwrap_or(n.div_ceil(self.n)).max(1);
        let all = size.saturating_mul(self.n);
        if own.is_some() && all != n {
            let k = self.n;
            return Err(Error::invalid(format!(
                "a batch of {n} examples: expected {all}, {k} micro-batches of {size}"
            )));
        }
        let begins = (0..n).step_by(size);
        Ok(begins.map(|at| at..(at + size).min(n)).collect())
    }
}

/// Results with means in the place of numbers of these names.
fn with_means(outputs: &Outputs, means: &BTreeMap<&str, f64>) -> Result<Outputs> {
    let mean = |(name, t): (&str, &Tensor)| {
        let t = match means.get(name) {
            Some(&mean) => Tensor::from_f64s(t.dtype(), t.shape(), &[mean])?,
            None => t.clone(),
        };
        Ok((name.to_owned(), t))
    };
    let outputs: Result<Vec<_>> = outputs.iter().map(mean).collect();
    Ok(Outputs::of(outputs?))
}

/// The first axis of inputs, along which micro-batches are cut. Inputs without axes are the same for each.
struct Cut<'i> {
    inputs: &'i [(String, Type)],
    axis: Option<&'i Dim>,
}

impl<'i> Cut<'i> {
    fn new(inputs: &'i [(String, Type)]) -> Cut<'i> {
        let axis = inputs.iter().find_map(|(_, ty)| ty.shape.first());
        Cut { inputs, axis }
    }

    /// Errors when inputs have several first axes.
    fn check(&self) -> Result<()> {
        let is_other = |(_, ty): &&(String, Type)| {
            let axis = ty.shape.first();
            axis.is_some() && axis != self.axis
        };
        match (self.inputs.iter().find(is_other), self.axis) {
            (Some((name, ty)), Some(axis)) => {
                let message = format!(
                    "input {name:?} is {ty}: steps in micro-batches cut all inputs along one first axis, here {axis}"
                );
                Err(Error::invalid(message).hint("accumulate: 1"))
            }
            _ => Ok(()),
        }
    }

    /// True for a tensor with rows.
    fn has(&self, name: &str) -> bool {
        let found = self.inputs.iter().find(|(own, _)| own == name);
        found.is_some_and(|(_, ty)| ty.rank() > 0)
    }

    /// Rows of all inputs. Errors when inputs differ in it.
    fn n_rows(&self, batch: &[(String, Tensor)]) -> Result<usize> {
        let own = batch.iter().filter(|(name, _)| self.has(name));
        let mut sizes = own.map(|(name, t)| (name, t.shape().first().copied().unwrap_or(0)));
        let Some((first, n)) = sizes.next() else {
            // The program says what is missing.
            return Ok(1);
        };
        match sizes.find(|(_, other)| *other != n) {
            None => Ok(n),
            Some((name, other)) => Err(Error::invalid(format!(
                "input {name:?} has {other} rows, and input {first:?} {n}"
            ))),
        }
    }

    fn rows(&self, batch: &[(String, Tensor)], part: Range<usize>) -> Result<Batch> {
        let places: Vec<usize> = part.collect();
        let one = |(name, t): &(String, Tensor)| {
            let t = match self.has(name) {
                true => rows(t, &places)?,
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
