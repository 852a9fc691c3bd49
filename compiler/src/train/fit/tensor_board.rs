//! A log for TensorBoard.

use super::Every;
use super::callback::{Callback, EpochReport, FitContext};
use crate::error::{Error, Result};
use crate::train::data::Batch;
use crate::train::events::{EventFile, Kept, LOSS, Numbers, Record};
use crate::train::inspection::{Inspection, is_within_any};
use crate::train::metrics::Metrics;
use crate::train::trainer::{StepOutputs, Trainer};
use gristmill_runtime::Tensor;
use gristmill_runtime::units::plural;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Writes event files, which TensorBoard shows: `tensorboard --logdir FOLDER`. [`EventLog`](crate::train::EventLog) reads them too.
///
/// The folder has two runs. `train` has the graph of a step, and of each shown step the tags `loss`, those of metrics, `learning_rate`,
/// `examples_per_s`, `largest_gradient` and, with [`Update::clip_norm`](crate::train::Update::clip_norm), `norm`, all as the step gave them;
/// or the means of an epoch, if epochs are shown. `validation` has `loss` and metrics of each evaluation. The step is the number of completed
/// steps of the whole training.
///
/// A resumed training goes on in the same folder: records after its checkpoint are removed first. Steps that are not shown cost nothing.
/// If a write fails, the log ends with a warning, and the training continues.
pub struct TensorBoard {
    folder: PathBuf,
    scalars: Every,
    summaries: Option<Summaries>,
    train: Run,
    validation: Run,
    inspection: Option<Inspection>,
    /// Tags with a warning of elements that are not finite.
    warned: BTreeSet<String>,
    /// Time and examples of the epoch at the last record.
    timed: (Duration, usize),
}

/// Histograms and sparsity of tensors in a step: the tags `TAG` and `TAG/sparsity`, the fraction of zeros.
///
/// They are those at the beginning of the step, on its batch, or its first micro-batch. A program of its own computes them, which costs about a step more and changes
/// nothing: a training has the same bits with them and without.
#[derive(Clone, Debug, PartialEq)]
pub struct Summaries {
    /// The steps; of an epoch, the last one.
    pub every: Every,
    /// Scopes of what is shown, such as `encoder/dense`; all if there is none.
    pub scopes: Vec<String>,
    /// Shows the values of the collection `summaries` ([`Model::collect`](crate::train::Model::collect)) as `SCOPE/activations`.
    pub activations: bool,
    /// Shows the gradients of trainable variables before clipping, as `VARIABLE/gradients`.
    pub gradients: bool,
    /// Shows the trainable variables by their names.
    pub weights: bool,
}

impl Summaries {
    /// All kinds within all scopes.
    pub fn new(every: Every) -> Summaries {
        Summaries {
            every,
            scopes: Vec::new(),
            activations: true,
            gradients: true,
            weights: true,
        }
    }

    /// Errors when nothing is within a scope.
    fn check(&self, trainer: &Trainer) -> Result<()> {
        self.every.check("summaries")?;
        for scope in &self.scopes {
            // A variable is within each scope that its gradient is within.
            if !trainer.inspected().has_scope(scope) {
                let message = format!("summaries: nothing is within the scope {scope:?}");
                let e = Error::invalid(message);
                return Err(e.hint(
                    "scopes are those of trainable variables and of Model::collect(\"summaries\", ..)",
                ));
            }
        }
        Ok(())
    }
}

/// One curve of each tag.
struct Run {
    folder: PathBuf,
    file: Option<EventFile>,
}

impl Run {
    fn new(folder: PathBuf) -> Run {
        Run { folder, file: None }
    }

    /// Opens a file. True for a new log.
    fn begin(&mut self, training: &str, kept: Option<Kept>) -> Result<bool> {
        let (file, is_first) = EventFile::create(&self.folder, training, kept)?;
        self.file = Some(file);
        Ok(is_first)
    }

    /// Writes to the file; an error is its end.
    fn write(&mut self, cx: &mut FitContext, write: impl FnOnce(&mut EventFile) -> io::Result<()>) {
        let Some(file) = &mut self.file else {
            return;
        };
        if let Err(e) = write(file) {
            let path = file.path().display();
            cx.warn(format!("{path}: {e}; the log ends here"));
            self.file = None;
        }
    }
}

impl TensorBoard {
    /// A log in a folder, of each 10th step and the last one of each epoch.
    pub fn new(folder: impl Into<PathBuf>) -> TensorBoard {
        let folder = folder.into();
        TensorBoard {
            train: Run::new(folder.join("train")),
            validation: Run::new(folder.join("validation")),
            folder,
            scalars: Every::Steps(10),
            summaries: None,
            inspection: None,
            warned: BTreeSet::new(),
            timed: Default::default(),
        }
    }

    /// Shows other steps, and the last one of each epoch; or epochs instead.
    pub fn scalars(mut self, every: Every) -> TensorBoard {
        self.scalars = every;
        self
    }

    /// Shows histograms too.
    pub fn summaries(mut self, summaries: Summaries) -> TensorBoard {
        self.summaries = Some(summaries);
        self
    }

    /// The numbers of a step besides its rate.
    fn record<'a>(
        &mut self,
        cx: &FitContext,
        means: impl Iterator<Item = (&'a str, f64)>,
        rate: f64,
    ) -> Record {
        let mut record = Record::default();
        means.for_each(|(tag, x)| record.scalar(tag, x));
        record.scalar("learning_rate", rate);
        let (time, n) = std::mem::replace(&mut self.timed, (cx.time, cx.n_timed));
        let (time, n) = (cx.time.saturating_sub(time), cx.n_timed.saturating_sub(n));
        if n > 0 && !time.is_zero() {
            record.scalar("examples_per_s", n as f64 / time.as_secs_f64());
        }
        record
    }

    /// Writes histograms and sparsity of the step after `cx.step()`.
    fn add_summaries(&mut self, cx: &mut FitContext, batch: &Batch) -> Result<()> {
        let Some(summaries) = &self.summaries else {
            return Ok(());
        };
        let step = cx.step() + 1;
        let mut values: Vec<(String, Tensor)> = Vec::new();
        if summaries.weights {
            let names = cx.trainer().variables().iter();
            for name in names.filter(|name| is_within_any(name, &summaries.scopes)) {
                let value = cx.trainer().value(name)?;
                values.extend(value.map(|value| (name.clone(), value)));
            }
        }
        if let Some(inspection) = &self.inspection {
            match inspection.run(cx.trainer(), batch) {
                Ok(outputs) => {
                    let pairs = outputs.iter().map(|(tag, t)| (tag.to_owned(), t.clone()));
                    values.extend(pairs);
                }
                Err(e) => cx.warn(format!("the summaries of step {step} are missing: {e}")),
            }
        }
        let mut record = Record::default();
        for (tag, value) in &values {
            let numbers = Numbers::of(value);
            if numbers.n_not_finite > 0 && self.warned.insert(tag.clone()) {
                let n = plural(numbers.n_not_finite as usize, "element");
                cx.warn(format!(
                    "{tag}: in step {step}, {n} NaN or infinite; histograms leave such out"
                ));
            }
            record.histogram(tag, &numbers.histogram);
            record.scalar(&format!("{tag}/sparsity"), numbers.sparsity);
        }
        self.train.write(cx, |file| file.add_record(step, record));
        Ok(())
    }
}

impl Callback for TensorBoard {
    fn name(&self) -> String {
        "TensorBoard".to_owned()
    }

    fn train_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        self.scalars.check("scalars")?;
        if let Some(summaries) = &self.summaries {
            summaries.check(cx.trainer())?;
            let (activations, gradients) = (summaries.activations, summaries.gradients);
            let trainer = cx.trainer();
            self.inspection = trainer.inspection(activations, gradients, &summaries.scopes)?;
        }
        if self.folder.is_file() {
            let message = format!("{} is a file", self.folder.display());
            return Err(Error::invalid(message).hint("a folder for the log"));
        }
        // The end of an epoch comes after the step of the same number.
        let kept = |every: Every| {
            let kept = Kept {
                step: cx.step(),
                ends_before_loss: matches!(every, Every::Epochs(_)) && cx.is_at_end(),
            };
            Some(kept).filter(|_| cx.is_resumed())
        };
        let training = training(cx);
        let is_new = self.train.begin(&training, kept(self.scalars))?;
        if cx.has_held_out() {
            self.validation.begin(&training, kept(cx.evaluate()))?;
        }
        if is_new {
            let graph = cx.trainer().graph()?;
            self.train.write(cx, |file| file.add_graph(graph));
        }
        Ok(())
    }

    fn epoch_begin(&mut self, _cx: &mut FitContext) -> Result<()> {
        self.timed = Default::default();
        Ok(())
    }

    fn step_begin(&mut self, cx: &mut FitContext, batch: &Batch) -> Result<()> {
        let every = self.summaries.as_ref().map(|summaries| summaries.every);
        match every.is_some_and(|every| cx.is_next(every)) && self.train.file.is_some() {
            true => self.add_summaries(cx, batch),
            false => Ok(()),
        }
    }

    fn step_end(&mut self, cx: &mut FitContext, step: &StepOutputs) -> Result<()> {
        let is_shown = match self.scalars {
            Every::Steps(n) => cx.step().is_multiple_of(n) || cx.is_at_end(),
            Every::Epochs(_) => false,
        };
        if !is_shown || self.train.file.is_none() {
            return Ok(());
        }
        let trainer = cx.trainer();
        let means = std::iter::once((LOSS, step.loss)).chain(trainer.metrics_of(&step.metrics));
        let mut record = self.record(cx, means, step.learning_rate);
        record.scalar("largest_gradient", step.largest_gradient);
        if let Some(norm) = step.norm {
            record.scalar("norm", norm);
        }
        let number = cx.step();
        self.train.write(cx, |file| file.add_record(number, record));
        Ok(())
    }

    fn evaluation_end(&mut self, cx: &mut FitContext, held_out: &Metrics) -> Result<()> {
        let mut record = Record::default();
        held_out.iter().for_each(|(tag, x)| record.scalar(tag, x));
        let step = cx.step();
        self.validation
            .write(cx, |file| file.add_record(step, record));
        Ok(())
    }

    fn epoch_end(&mut self, cx: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        let Every::Epochs(n) = self.scalars else {
            return Ok(());
        };
        if (epoch.epoch + 1).is_multiple_of(n) {
            let record = self.record(cx, epoch.trained.iter(), epoch.learning_rate);
            let step = cx.step();
            self.train.write(cx, |file| file.add_record(step, record));
        }
        Ok(())
    }
}

/// What a training shares with one that goes on.
fn training(cx: &FitContext) -> String {
    let (position, mut text) = (cx.position(), String::new());
    for ((container, name), ty) in cx.trainer().state() {
        text += &format!("{container} {name} {ty}\n");
    }
    let (n, size, seed) = (position.n_examples, position.batch_size, position.seed);
    let crc = crc32c::crc32c(text.as_bytes());
    format!("state {crc:08x}, {n} examples, batch size {size}, seed {seed}")
}
