//! Steps of training over batches.

use super::accumulation::{self, Accumulation, InShares, Part};
use super::asynchronous::Asynchronous;
use super::data::{Batch, Batches, Dataset, Epoch, Loader, Loading, n_examples};
use super::inspection::{SUMMARIES, StepValues};
use super::metrics::Metrics;
use super::model::{Model, Variable};
use super::norm::BatchStatistics;
use super::prediction::at_one_batch;
use super::schedule::{self, Schedule};
use super::strategy::Strategy;
use super::update::{Parameter, Update};
use crate::compiled::{Compiled, Executable, Outputs};
use crate::error::{Error, ErrorKind, Result};
use crate::ir::random::STEP;
use crate::ir::{Graph, GraphBuilder, Op, Type, ValueId};
use crate::options::{DataParallel, Options};
use crate::place::DeviceSet;
use crate::session::{Session, Settings};
use gristmill_runtime::exec::Resources;
use gristmill_runtime::safetensors::Saved;
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeMap;
use std::iter;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A model in training: two programs of one session over the same variables. A step changes them, an evaluation does not.
///
/// The first batch of each size generates code.
pub struct Trainer {
    step: Compiled,
    /// Where each replica has statistics of its own: the step for batches without equal shares.
    common: Option<Compiled>,
    /// The program of further micro-batches.
    accumulation: Option<Accumulation>,
    /// The programs of workers; they make the steps.
    asynchronous: Option<Asynchronous>,
    strategy: Strategy,
    evaluation: Compiled,
    names: Vec<String>,
    /// The state between steps, by container and name.
    state: BTreeMap<(String, String), Type>,
    container: String,
    schedule: Schedule,
    has_averages: bool,
    /// Values of the step's graph to show.
    step_values: StepValues,
    /// Names of evaluations' results of one element: the loss, then the metrics.
    metrics: Vec<String>,
    /// True once averages were loaded, which then count before the first step.
    has_loaded: AtomicBool,
}

/// The values of trainable variables that an evaluation takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// The current values.
    #[default]
    Current,
    /// The moving averages of [`Update::average`].
    Averages,
}

/// Results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutputs {
    /// Number of the step, from 1.
    pub number: u64,
    /// The loss before the variables changed.
    pub loss: f64,
    /// The learning rate.
    pub learning_rate: f64,
    /// The common norm of all gradients before clipping; `None` unless [`Update::clip_norm`] is given.
    pub norm: Option<f64>,
    /// The largest gradient element by magnitude, before clipping.
    pub largest_gradient: f64,
    /// The metrics of the batch, with the names of [`Objective::metric`].
    pub metrics: Outputs,
    /// The number of the worker that computed the gradients, from 0; 0 unless training is asynchronous.
    pub worker: usize,
    /// Steps of other workers since this one's read of the variables; 0 unless training is asynchronous.
    pub staleness: u64,
}

/// Names of outputs of the step's graph, reserved from metrics.
pub(super) const LOSS: &str = "loss";
const NUMBER: &str = STEP;
const RATE: &str = schedule::RATE;
pub(super) const NORM: &str = "optimizer/norm";
pub(super) const LARGEST: &str = "optimizer/largest_gradient";
/// Not an output: examples per second in logs.
pub(super) const SPEED: &str = "examples_per_s";
const RESERVED: [&str; 6] = [LOSS, NUMBER, RATE, NORM, LARGEST, SPEED];

/// Steps between checks of replicas for equal bits.
const CHECKED_STEPS: u64 = 1_000;

/// The loss and the metrics of a graph.
#[derive(Clone, Debug)]
pub struct Objective {
    loss: ValueId,
    metrics: Vec<(String, ValueId)>,
}

impl Objective {
    /// The loss to minimise: one floating-point element.
    pub fn new(loss: ValueId) -> Objective {
        Objective {
            loss,
            metrics: Vec::new(),
        }
    }

    /// Adds a value to the results of steps and evaluations.
    pub fn metric(mut self, name: &str, value: ValueId) -> Objective {
        self.metrics.push((name.to_owned(), value));
        self
    }

    /// Makes outputs of the loss and the metrics. Errors when the name of a metric is taken.
    fn add_outputs(&self, b: &mut GraphBuilder) -> Result<()> {
        b.output(LOSS, self.loss);
        for (i, (name, value)) in self.metrics.iter().enumerate() {
            let is_double = self.metrics[..i].iter().any(|(n, _)| n == name);
            if is_double || RESERVED.contains(&name.as_str()) {
                let who = if is_double {
                    "another metric"
                } else {
                    "training"
                };
                let message = format!("metric {name:?}: {who} already uses this name");
                return Err(Error::invalid(message).hint("another name"));
            }
            b.output(name, *value);
        }
        Ok(())
    }
}

/// The settings of training.
#[derive(Clone, Debug)]
pub struct Training {
    /// Decides initial values and masks of dropout.
    pub seed: u64,
    /// The use of gradients.
    pub update: Update,
    /// Options of compilation for all programs.
    pub options: Options,
    /// Micro-batches of a step; 1 for none. A step cuts its inputs along their first axis into at most so many parts of equal size (the last may
    /// be smaller), computes one after the other, and moves the variables once, by the mean of the gradients, weighted by examples. Where the
    /// loss is a mean over examples, this is a step on the whole batch, with less memory. Loss and metrics are such means too.
    ///
    /// Each part by itself has: the statistics of batch normalisation, a move of moving averages, a mask of dropout, the mean of a loss with
    /// ignored labels. If a part fails, the weights stay, but statistics and averages of earlier parts have moved.
    pub accumulate: usize,
    /// The devices that train together.
    pub strategy: Strategy,
    /// Shares of each batch, a power of two: gradients are computed by share and joined in one fixed tree, so that 1, 2, 4, .. devices up to
    /// this number train to the same bits. 0: one share for each device.
    pub shards: usize,
    /// The examples of each statistic of batch normalisation.
    pub statistics: BatchStatistics,
}

impl Training {
    /// The same with another strategy.
    pub(super) fn with_strategy(&self, strategy: Strategy) -> Training {
        Training {
            strategy,
            ..self.clone()
        }
    }

    /// The options of all programs on some devices, but for those of workers.
    pub(super) fn options_for(&self, set: &DeviceSet) -> Result<Options> {
        let mut own = self.strategy.data_parallel(set)?;
        if self.shards > 0 {
            if self.strategy.is_asynchronous() {
                let e = Error::unsupported("shards, and asynchronous updates");
                return Err(e.hint("shards: 0: each worker takes whole batches"));
            }
            own = Some(DataParallel {
                shards: self.shards,
                ..own.map_or_else(|| Strategy::alone(set), Ok)?
            });
        }
        if own.is_some() && self.options.data_parallel.is_some() {
            let e = Error::invalid("a strategy, and Options::data_parallel");
            return Err(e.hint("one of them: both say which devices share a batch"));
        }
        let mut on = own.or(self.options.data_parallel.clone());
        if let Some(on) = &mut on {
            on.parts = self.n_parts(on)?;
        }
        Ok(Options {
            data_parallel: on,
            ..self.options.clone()
        })
    }

    /// Parts of each batch with statistics of their own.
    fn n_parts(&self, on: &DataParallel) -> Result<usize> {
        let is_whole = self.statistics == BatchStatistics::Whole || self.strategy.is_asynchronous();
        match (is_whole, self.accumulate) {
            (true, _) => Ok(1),
            (false, ..=1) => Ok(on.shards.max(on.devices.len())),
            (false, _) => {
                let e = Error::unsupported("statistics per replica, and steps in micro-batches");
                Err(e.hint("BatchStatistics::Whole: the statistics of each micro-batch"))
            }
        }
    }
}

/// Parts of each batch with statistics of their own, by the options of a training.
pub(super) fn n_parts(options: &Options) -> usize {
    let on = options.data_parallel.as_ref();
    on.map_or(1, |on| on.parts)
}

impl<U: Into<Update>> From<U> for Training {
    /// Training by an update, with seed 0 and default options.
    fn from(update: U) -> Training {
        Training {
            seed: 0,
            update: update.into(),
            options: Options::default(),
            accumulate: 1,
            strategy: Strategy::default(),
            shards: 0,
            statistics: BatchStatistics::default(),
        }
    }
}

impl Trainer {
    /// Builds a model twice, for steps and for evaluations ([`Model::is_training`]), and compiles both: a step computes the loss and the
    /// metrics, and updates the variables by the gradients of the loss.
    ///
    /// Errors with `InvalidInput` when the model has no trainable variable, when the loss is not a floating-point scalar or does not depend on
    /// a trainable variable, when a name of a metric is taken, and when a setting of the update is out of range; with `Unsupported`, naming the node, when an
    /// op between the variables and the loss has no gradient.
    pub fn new(
        name: &str,
        training: &Training,
        build: impl Fn(&mut Model) -> Result<Objective>,
    ) -> Result<Trainer> {
        Trainer::in_session(&Session::new(&Settings::default())?, name, training, build)
    }

    /// [`Trainer::new`] in a session. Other models of the session with variables of the same names and types compute with the trained
    /// values. [`Options::container`] keeps two trainers of one session apart.
    pub fn in_session(
        session: &Session,
        name: &str,
        training: &Training,
        build: impl Fn(&mut Model) -> Result<Objective>,
    ) -> Result<Trainer> {
        let training = &training.with_strategy(chosen(session, name, training, &build)?);
        let options = &training.options_for(&session.settings().devices)?;
        let evaluation = evaluation_of(name, training, &build)?;
        let metrics = metrics(&evaluation);
        let evaluation = program(session, options, evaluation)?;
        let part = Part::last_of(training.accumulate)?;
        let accumulation = accumulation(session, name, training, options, &build)?;
        let StepGraph {
            graph,
            names,
            step_values,
        } = step_of(name, training, part, n_parts(options), &build)?;
        let common = in_common(session, name, training, options, &graph, &build)?;
        let asynchronous = workers(session, training, options, &graph, &step_values)?;
        let step = program(session, options, graph)?;
        let mut trainer = Trainer {
            evaluation,
            common,
            accumulation,
            asynchronous,
            strategy: training.strategy.clone(),
            state: BTreeMap::new(),
            step,
            names,
            container: options.container.clone(),
            schedule: training.update.optimizer.learning_rate().clone(),
            has_averages: training.update.average.is_some(),
            step_values,
            metrics,
            has_loaded: AtomicBool::new(false),
        };
        trainer.declare()?;
        trainer.state = trainer.graph()?.variables();
        let is_kept = |name: &str| !name.starts_with(accumulation::FOLDER);
        trainer.state.retain(|(_, name), _| is_kept(name));
        Ok(trainer)
    }

    /// Number of devices that share each batch of at least as many examples: `num_replicas_in_sync` of TensorFlow's strategies. Batches are divided, so that a batch of `n`
    /// examples per replica has `n` times as many.
    pub fn n_replicas(&self) -> usize {
        let on = self.step.options.data_parallel.as_ref();
        let on = on.filter(|_| self.asynchronous.is_none());
        on.map_or(1, |on| on.devices.len())
    }

    /// The strategy; for [`Strategy::Auto`], its choice.
    pub fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    /// Compiles all programs, and declares their variables: those of all or of none, so that a step that cannot be
    /// compiled leaves none in the session.
    fn declare(&self) -> Result<()> {
        let step = self.asynchronous.is_none().then_some(&self.step);
        let adds = self.accumulation.iter().flat_map(Accumulation::programs);
        let parts = self.asynchronous.iter().flat_map(Asynchronous::programs);
        let all = iter::once(&self.evaluation).chain(step).chain(&self.common);
        let all: Vec<&Compiled> = all.chain(adds).chain(parts).collect();
        all.iter().try_for_each(|p| p.compile_static())?;
        all.iter().try_for_each(|p| p.declare_variables())
    }

    pub(super) fn asynchronous(&self) -> Option<&Asynchronous> {
        self.asynchronous.as_ref()
    }

    /// A step on a batch: inputs by name.
    ///
    /// Errors as [`Compiled::run`] does, and with `NotFinite` when the loss or a gradient is NaN or infinite; then no variable has changed, apart
    /// from what [`Training::accumulate`] says. Replicas of a strategy are compared after each 1,000 steps: `DeviceFailed` when their bits differ.
    pub fn step<N: AsRef<str>>(
        &self,
        batch: impl IntoIterator<Item = (N, Tensor)>,
    ) -> Result<StepOutputs> {
        let owned = |batch: &mut dyn Iterator<Item = (N, Tensor)>| -> Batch {
            batch
                .map(|(name, t)| (name.as_ref().to_owned(), t))
                .collect()
        };
        if let Some(asynchronous) = &self.asynchronous {
            let worker = self.workers()[asynchronous.next()];
            return worker.step(owned(&mut batch.into_iter()));
        }
        let outputs = match (&self.accumulation, &self.common) {
            (None, None) => self.step.run(batch)?,
            (None, Some(_)) => {
                let batch = owned(&mut batch.into_iter());
                self.step_for(&batch).run(batch)?
            }
            (Some(accumulation), _) => {
                accumulation.run(&self.step, owned(&mut batch.into_iter()))?
            }
        };
        let step = self.step_outputs(&[outputs])?;
        if self.n_replicas() > 1 && step.number.is_multiple_of(CHECKED_STEPS) {
            let checked = self.resources().check_replicas();
            checked.map_err(|e| {
                Error::from(e).hint(
                    "devices of one model; or go on from a checkpoint without the one that failed",
                )
            })?;
        }
        Ok(step)
    }

    /// The program of a step on a batch.
    fn step_for(&self, batch: &Batch) -> &Compiled {
        let n = n_parts(&self.step.options);
        let mut inputs = self.step.inputs().iter();
        let size = inputs.find_map(|(name, _)| {
            let (_, t) = batch.iter().find(|(own, _)| own == name)?;
            t.shape().first().copied()
        });
        let common = self.common.as_ref();
        let common = common.filter(|_| !size.unwrap_or(0).is_multiple_of(n));
        common.unwrap_or(&self.step)
    }

    /// The results of a step, of which a push may have some.
    pub(super) fn step_outputs(&self, all: &[Outputs]) -> Result<StepOutputs> {
        let get = |name: &str| all.iter().find_map(|outputs| outputs.get(name));
        let names = self.step.output_names().iter();
        let results = names.filter_map(|name| Some((name.clone(), get(name)?.clone())));
        let outputs = Outputs::of(results.collect());
        Ok(StepOutputs {
            number: scalar(&outputs, NUMBER)? as u64,
            loss: scalar(&outputs, LOSS)?,
            learning_rate: scalar(&outputs, RATE)?,
            norm: outputs.get(NORM).map(|t| t.to_f64s()[0]),
            largest_gradient: scalar(&outputs, LARGEST)?,
            metrics: outputs.without(&RESERVED),
            worker: 0,
            staleness: 0,
        })
    }

    /// The loss and the metrics of a batch with the current variables.
    pub fn evaluate_batch<N: AsRef<str>>(
        &self,
        batch: impl IntoIterator<Item = (N, Tensor)>,
    ) -> Result<Outputs> {
        self.evaluation.run(batch)
    }

    /// Means of the loss and the metrics over a data set, in batches of `size` with the current variables. A model with a fixed batch
    /// leaves an incomplete last one out.
    ///
    /// Errors with `InvalidInput` when the data set has no example, or no whole batch of a fixed size; and as [`Compiled::run`] does.
    pub fn evaluate(&self, data: &dyn Dataset, size: usize) -> Result<Metrics> {
        self.evaluate_with(Weights::Current, data, size)
    }

    /// [`Trainer::evaluate`] with the current values of the trainable variables or their averages. The averages take the place of the
    /// values until the evaluation ends, however it ends; no other thread may train meanwhile. Before the first step, averages are the values.
    ///
    /// Errors also with `InvalidInput` when [`Update::average`] keeps none.
    pub fn evaluate_with(
        &self,
        weights: Weights,
        data: &dyn Dataset,
        size: usize,
    ) -> Result<Metrics> {
        let loader = Loader::new(Loading::default())?;
        self.evaluate_by(&loader, weights, data, size)
    }

    /// The same with a loader.
    pub(super) fn evaluate_by(
        &self,
        loader: &Loader,
        weights: Weights,
        data: &dyn Dataset,
        size: usize,
    ) -> Result<Metrics> {
        if weights == Weights::Current {
            return self.means(loader, data, size);
        }
        let values = self.exchange()?;
        let means = self.means(loader, data, size);
        self.resources().restore(values)?;
        means
    }

    fn means(&self, loader: &Loader, data: &dyn Dataset, size: usize) -> Result<Metrics> {
        let is_fixed = self.check_batch(size)?;
        let mut means = Metrics::default();
        loader.each(Batches::in_order(data, size), |batch| {
            let n = n_examples(&batch);
            if is_fixed && n != size {
                return Ok(ControlFlow::Break(()));
            }
            let outputs = self.evaluation.run(batch)?;
            means.add(n, self.metrics_of(&outputs));
            Ok(ControlFlow::Continue(()))
        })?;
        match means.n_examples() {
            0 => Err(no_batch(data.len(), size)),
            _ => Ok(means),
        }
    }

    /// Gives the trainable variables the values of their averages. Returns the values before.
    fn exchange(&self) -> Result<Vec<Saved>> {
        self.check_weights(Weights::Averages)?;
        let is_own = |container: &str, name: &str| {
            container == self.container && self.names.iter().any(|own| own == name)
        };
        let values = self.resources().values(is_own)?;
        if !self.averages_count()? {
            return Ok(values);
        }
        let average = |saved: &Saved| {
            let name = format!("average/{}", saved.name);
            let value = self.value(&name)?;
            let value = value.ok_or_else(|| Error::internal(format!("{name:?} has no value")))?;
            Ok(Saved {
                value,
                ..saved.clone()
            })
        };
        let averages: Result<Vec<Saved>> = values.iter().map(average).collect();
        self.resources().restore(averages?)?;
        Ok(values)
    }

    /// Errors when training keeps no averages and they are asked for.
    pub(super) fn check_weights(&self, weights: Weights) -> Result<()> {
        match self.has_averages || weights == Weights::Current {
            true => Ok(()),
            false => {
                let e = Error::invalid("training keeps no averages of the variables");
                Err(e.hint("Update { average: Some(0.999), .. } keeps them"))
            }
        }
    }

    /// True when averages have values of their own: steps or a file gave them. Before, averages are the weights.
    fn averages_count(&self) -> Result<bool> {
        Ok(self.n_steps()? > 0 || self.has_loaded.load(Ordering::Relaxed))
    }

    /// Notes that a file gave averages.
    pub(super) fn note_averages(&self) {
        self.has_loaded.store(true, Ordering::Relaxed);
    }

    /// Errors when an evaluation could not take examples of a data set.
    pub(super) fn check_held_out(&self, data: &dyn Dataset, size: usize) -> Result<()> {
        let is_fixed = self.check_batch(size)?;
        if data.is_empty() || is_fixed && data.len() < size {
            return Err(no_batch(data.len(), size));
        }
        let places: Vec<usize> = (0..size.min(data.len())).collect();
        let batch = data.rows(&places, Epoch::default())?;
        check_inputs(&self.evaluation, &batch)
    }

    /// True for a name of [`metric_names`](Self::metric_names) that steps give too.
    pub(super) fn is_step_metric(&self, name: &str) -> bool {
        self.step.output_names().iter().any(|own| own == name)
    }

    /// Names of evaluations' results that have one element: `loss`, and those of [`Objective::metric`]. Means over batches are taken of them.
    pub fn metric_names(&self) -> &[String] {
        &self.metrics
    }

    /// The results of one element.
    pub(super) fn metrics_of<'o>(
        &'o self,
        outputs: &'o Outputs,
    ) -> impl Iterator<Item = (&'o str, f64)> {
        let own = |name: &'o String| {
            let value = outputs.get(name)?.to_f64s();
            Some((name.as_str(), value.first().copied()?))
        };
        self.metrics.iter().filter_map(own)
    }

    /// Micro-batches of a step.
    pub(super) fn n_micro_batches(&self) -> usize {
        self.accumulation.as_ref().map_or(1, Accumulation::n)
    }

    /// The part of a batch that is computed at once, made ready for programs of micro-batches.
    pub(super) fn first_micro_batch(&self, batch: &Batch) -> Result<Batch> {
        match &self.accumulation {
            Some(accumulation) => accumulation.first(&self.step, batch),
            None => Ok(batch.clone()),
        }
    }

    /// The code of a step on a batch, or its first micro-batch, generated if need be. Variables have their first values then.
    pub fn executable_for(&self, batch: &Batch) -> Result<Option<Arc<Executable>>> {
        if let Some(worker) = self.workers().first() {
            return worker.executable_for(batch);
        }
        let program = match &self.accumulation {
            Some(accumulation) => accumulation.moves(&self.step, batch)?,
            None => self.step_for(batch),
        };
        executable_for(program, &self.first_micro_batch(batch)?)
    }

    /// Errors when the model takes another number of examples at once; true when it takes exactly this one.
    pub(super) fn check_batch(&self, size: usize) -> Result<bool> {
        self.check_micro_batches(size, 1)
    }

    /// The same for the batch of a step, of which each replica has an example at least.
    pub(super) fn check_step_batch(&self, size: usize) -> Result<bool> {
        let least = self.n_replicas().saturating_mul(self.n_micro_batches());
        if (1..least).contains(&size) {
            let parts = match self.n_micro_batches() {
                1 => String::new(),
                n => format!(" in {n} parts"),
            };
            let message = format!(
                "batches of {size}{parts} for {} replicas",
                self.n_replicas()
            );
            return Err(Error::invalid(message).hint(format!("batches of {least} at least")));
        }
        self.check_micro_batches(size, self.n_micro_batches())
    }

    fn check_micro_batches(&self, size: usize, n: usize) -> Result<bool> {
        if size == 0 {
            return Err(Error::invalid("a batch of 0 examples"));
        }
        let inputs = self.evaluation.inputs().iter();
        let mut fixed = inputs.filter_map(|(name, ty)| Some((name, ty.shape.first()?.as_usize()?)));
        match fixed.next() {
            None => Ok(false),
            Some((_, own)) if own.saturating_mul(n) == size => Ok(true),
            Some((name, own)) => {
                let message =
                    format!("batches of {size}: input {name:?} takes {own} examples at once");
                Err(Error::invalid(match n {
                    1 => message,
                    n => format!("{message}, and a step {n} times as many"),
                }))
            }
        }
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> Result<f64> {
        let variable = match self.schedule.is_variable() {
            true => self.value(RATE)?.map(|t| t.to_f64s()[0]),
            false => None,
        };
        self.schedule.at_with(self.n_steps()?, variable)
    }

    /// Sets the rate of the steps from now on: the variable of [`Schedule::Variable`].
    ///
    /// Errors with `InvalidInput` when the optimiser has another schedule, or the rate is negative or not finite.
    pub fn set_learning_rate(&self, rate: f64) -> Result<()> {
        self.check_settable()?;
        schedule::check_rate(rate)?;
        let rate = Tensor::from_f64s(DType::F64, &[], &[rate])?;
        Ok(self.resources().set(&self.container, RATE, &rate)?)
    }

    /// Errors when the program cannot set the learning rate.
    pub(super) fn check_settable(&self) -> Result<()> {
        match self.schedule.is_variable() {
            true => Ok(()),
            false => {
                let e = Error::invalid("the optimiser's schedule decides the learning rate");
                Err(e.hint("Schedule::Variable(0.1) is a rate to be set between steps"))
            }
        }
    }

    /// Errors with `NotFinite` when an element of a trainable variable is NaN or infinite.
    pub(super) fn check_finite(&self) -> Result<()> {
        for name in &self.names {
            if self.value(name)?.is_some_and(|t| !is_finite(&t)) {
                let message = format!("weight {name:?} is not finite any more");
                return Err(Error::new(ErrorKind::NotFinite, message));
            }
        }
        Ok(())
    }

    /// The values of the model's variables and of their averages, without the optimiser's.
    pub(super) fn weights(&self) -> Result<Vec<Saved>> {
        let own = |container: &str, name: &str| self.is_weight(container, name);
        let mut values = self.resources().values(own)?;
        if !self.averages_count()? {
            values.retain(|saved| !saved.name.starts_with("average/"));
        }
        Ok(values)
    }

    /// True for a variable of the model, or its average.
    pub(super) fn is_weight(&self, container: &str, name: &str) -> bool {
        let key = (container.to_owned(), name.to_owned());
        let is_optimizers = container == self.container && name.starts_with("optimizer/");
        !is_optimizers && self.state.contains_key(&key)
    }

    /// The session's variables. Variables of the model, slots of the optimiser and averages are in the container of [`Training::options`].
    pub fn resources(&self) -> &Arc<Resources> {
        self.step.resources()
    }

    /// Types of the state between steps, by container and name.
    pub(super) fn state(&self) -> &BTreeMap<(String, String), Type> {
        &self.state
    }

    /// The value of a variable of the model, a slot or an average; `None` before it has one.
    pub fn value(&self, name: &str) -> Result<Option<Tensor>> {
        Ok(self.resources().get(&self.container, name)?)
    }

    /// Number of completed steps, steps before a checkpoint included.
    pub fn n_steps(&self) -> Result<u64> {
        let number = self.value(NUMBER)?;
        Ok(number.map_or(0, |n| n.to_f64s()[0] as u64))
    }

    /// Names of the trainable variables, in order of creation.
    pub fn variables(&self) -> &[String] {
        &self.names
    }

    /// Values of the step's graph to show.
    pub(super) fn step_values(&self) -> &StepValues {
        &self.step_values
    }

    /// The graph of a step.
    pub(super) fn graph(&self) -> Result<&Graph> {
        let graph = self.step.built_graph();
        graph.ok_or_else(|| Error::internal("a step is built as a graph"))
    }

    /// The program of a step.
    pub fn program(&self) -> &Compiled {
        &self.step
    }
}

/// Errors on an input that a program does not have, of another type, or missing.
pub(super) fn check_inputs(program: &Compiled, batch: &Batch) -> Result<()> {
    for (name, tensor) in batch {
        program.check_input(name, tensor)?;
    }
    let has = |input: &String| batch.iter().any(|(name, _)| name == input);
    match program.inputs().iter().find(|(name, _)| !has(name)) {
        None => Ok(()),
        Some((name, ty)) => Err(Error::invalid(format!("input {name:?} ({ty}) is missing"))),
    }
}

/// The code of a program for tensors by name.
pub(super) fn executable_for(
    program: &Compiled,
    given: &[(String, Tensor)],
) -> Result<Option<Arc<Executable>>> {
    let names = program.inputs().iter().map(|(name, _)| name);
    let tensor = |name: &String| given.iter().find(|(own, _)| own == name);
    let tensors = names.filter_map(|name| Some(tensor(name)?.1.clone()));
    program.executable_for(&tensors.collect::<Vec<_>>())
}

/// The graph of an evaluation.
fn evaluation_of(
    name: &str,
    training: &Training,
    build: &impl Fn(&mut Model) -> Result<Objective>,
) -> Result<Graph> {
    let mut used = Model::new(name, training.seed, false);
    let objective = build(&mut used)?;
    let (mut b, _) = used.into_parts();
    objective.add_outputs(&mut b)?;
    b.finish()
}

/// The programs of workers; `None` for a single device, and where devices share each batch.
fn workers(
    session: &Session,
    training: &Training,
    options: &Options,
    step: &Graph,
    values: &StepValues,
) -> Result<Option<Asynchronous>> {
    if !training.strategy.is_asynchronous() {
        return Ok(None);
    }
    if training.accumulate > 1 {
        let e = Error::unsupported("asynchronous updates, and steps in micro-batches");
        return Err(
            e.hint("smaller batches without accumulation: a push moves the weights by each")
        );
    }
    let Some(on) = &options.data_parallel else {
        return Ok(None);
    };
    let gradients: Vec<ValueId> = values.gradients.iter().map(|(_, v)| *v).collect();
    let options = Options {
        data_parallel: None,
        updates_overlap: training.strategy.is_hogwild(),
        ..options.clone()
    };
    Asynchronous::new(session, &options, on, step.clone(), &gradients).map(Some)
}

/// A graph as a program, whose variables the session does not know yet.
fn program(session: &Session, options: &Options, mut graph: Graph) -> Result<Compiled> {
    graph.set_container(&options.container);
    session.undeclared((&graph).into(), options)
}

/// Where each replica has statistics of its own: the step with those of the whole batch, for batches without equal shares.
fn in_common(
    session: &Session,
    name: &str,
    training: &Training,
    options: &Options,
    own: &Graph,
    build: &impl Fn(&mut Model) -> Result<Objective>,
) -> Result<Option<Compiled>> {
    let mut axes = own.inputs.iter().filter_map(|&v| own.ty(v).shape.first());
    let is_fixed = axes.next().is_some_and(|n| n.as_usize().is_some());
    if n_parts(options) == 1 || is_fixed {
        return Ok(None);
    }
    let step = step_of(name, training, Part::Step, 1, build)?.graph;
    match step == *own {
        true => Ok(None),
        false => program(session, options, step).map(Some),
    }
}

/// The strategy of a training; the best one for [`Strategy::Auto`]. Errors in a session on a cluster.
fn chosen(
    session: &Session,
    name: &str,
    training: &Training,
    build: &impl Fn(&mut Model) -> Result<Objective>,
) -> Result<Strategy> {
    session.check_here("training is not supported")?;
    let Strategy::Auto { batch_size } = training.strategy else {
        return Ok(training.strategy.clone());
    };
    let compared = at_one_batch(session, name, training, batch_size, build)?;
    Ok(compared.best().strategy.clone())
}

/// The program of micro-batches before the last one of a step, if there are any.
fn accumulation(
    session: &Session,
    name: &str,
    training: &Training,
    options: &Options,
    build: &impl Fn(&mut Model) -> Result<Objective>,
) -> Result<Option<Accumulation>> {
    if training.accumulate == 1 {
        return Ok(None);
    }
    let n = training.accumulate;
    let adds = step_of(name, training, Part::Adds(n), 1, build)?.graph;
    let in_shares = match InShares::options(options) {
        None => None,
        Some((n_shares, options)) => {
            let moves = step_of(name, training, Part::Moves(n), 1, build)?.graph;
            Some(InShares {
                n: n_shares,
                adds: program(session, &options, adds.clone())?,
                moves: program(session, &options, moves)?,
            })
        }
    };
    let adds = program(session, options, adds)?;
    Accumulation::new(n, adds, in_shares, &options.container).map(Some)
}

/// The outputs of one element, by name.
fn metrics(evaluation: &Graph) -> Vec<String> {
    let outputs = evaluation.outputs.iter();
    let single = outputs.filter(|o| evaluation.ty(o.value).shape.n_elements().is(1));
    single.map(|o| o.name.clone()).collect()
}

/// True when no element is NaN or infinite.
fn is_finite(t: &Tensor) -> bool {
    match t.dtype() {
        DType::F32 => t.as_slice::<f32>().iter().all(|x| x.is_finite()),
        _ => t.to_f64s().iter().all(|x| x.is_finite()),
    }
}

/// The error of data without a batch.
pub(super) fn no_batch(n: usize, size: usize) -> Error {
    match n {
        0 => Error::invalid("the data set has no example"),
        n => Error::invalid(format!(
            "the data set has {n} examples, and whole batches take {size}"
        )),
    }
}

/// The graph of a step as [`Trainer::new`] compiles it, before [`Options::container`] applies; for inspection.
pub fn step_graph(
    name: &str,
    training: &Training,
    build: impl Fn(&mut Model) -> Result<Objective>,
) -> Result<Graph> {
    Ok(step_of(name, training, Part::Step, 1, &build)?.graph)
}

/// The graph of a step on batches of a size with the statistics that such options ask for.
pub(super) fn step_graph_for(
    name: &str,
    training: &Training,
    options: &Options,
    size: usize,
    build: impl Fn(&mut Model) -> Result<Objective>,
) -> Result<Graph> {
    let n = n_parts(options);
    let n = if size.is_multiple_of(n) { n } else { 1 };
    Ok(step_of(name, training, Part::Step, n, &build)?.graph)
}

/// The graph of a step.
struct StepGraph {
    graph: Graph,
    /// Names of its trainable variables.
    names: Vec<String>,
    step_values: StepValues,
}

fn step_of(
    name: &str,
    training: &Training,
    part: Part,
    n_parts: usize,
    build: &impl Fn(&mut Model) -> Result<Objective>,
) -> Result<StepGraph> {
    let mut model = Model::new(name, training.seed, true);
    model.builder().set_n_parts(n_parts);
    let (mut b, mut parameters, step_values) = differentiated(model, part, build)?;
    b.with_origin("/gradients", |b| part.sum(b, &mut parameters))?;
    if !matches!(part, Part::Adds(_)) {
        let apply = |b: &mut GraphBuilder| training.update.apply(b, &parameters);
        let step = b.with_origin("/optimizer", apply)?;
        b.output(NUMBER, step.number);
        b.output(RATE, step.learning_rate);
        b.output(LARGEST, step.largest_gradient);
        if let Some(norm) = step.norm {
            b.output(NORM, norm);
        }
    }
    Ok(StepGraph {
        graph: b.finish()?,
        names: parameters.into_iter().map(|p| p.name).collect(),
        step_values,
    })
}

/// A model with its outputs, and the gradients of its loss.
fn differentiated(
    mut model: Model,
    part: Part,
    build: &impl Fn(&mut Model) -> Result<Objective>,
) -> Result<(GraphBuilder, Vec<Parameter>, StepValues)> {
    let b = model.builder();
    let done = part.batches_done(b)?;
    b.set_batches_done(done);
    let objective = build(&mut model)?;
    let activations = model.tagged(SUMMARIES);
    let (mut b, mut variables) = model.into_parts();
    let loss = objective.loss;
    let objective = Objective {
        loss: b.with_origin("/loss", |b| b.add1(Op::CheckFinite, &[loss]))?,
        ..objective
    };
    objective.add_outputs(&mut b)?;
    if part != Part::Step {
        let mut metrics = objective.metrics.iter();
        metrics.try_for_each(|(name, v)| accumulation::check_metric(&b, name, *v))?;
    }
    variables.retain(|v| v.is_trained);
    let parameters = parameters(&mut b, objective.loss, &variables)?;
    let gradient = |p: &Parameter| (format!("{}/gradients", p.name), p.gradient);
    let values = StepValues {
        activations,
        gradients: parameters.iter().map(gradient).collect(),
    };
    Ok((b, parameters, values))
}

/// The variables with the gradients of the loss.
fn parameters(
    b: &mut GraphBuilder,
    loss: ValueId,
    variables: &[Variable],
) -> Result<Vec<Parameter>> {
    if variables.is_empty() {
        return Err(Error::invalid("the model has no trainable variable"));
    }
    let values: Vec<ValueId> = variables.iter().map(|v| v.value).collect();
    let gradients = b.grad(loss, &values)?;
    let parameter = |(v, gradient): (&Variable, ValueId)| Parameter {
        name: v.name.clone(),
        value: v.value,
        gradient,
    };
    Ok(variables.iter().zip(gradients).map(parameter).collect())
}

fn scalar(outputs: &Outputs, name: &str) -> Result<f64> {
    let value = outputs.get(name).map(Tensor::to_f64s);
    let value = value.and_then(|values| values.first().copied());
    value.ok_or_else(|| Error::internal(format!("a step has no output {name:?}")))
}
