//! A log for TensorBoard.

use super::Every;
use super::callback::{Callback, CallbackState, End, EpochReport, FitContext};
use crate::error::{Error, Result};
use crate::train::collection::is_within;
use crate::train::data::Batch;
use crate::train::events::{EventFile, FirstLoss, GoesOn, Log, Numbers, Record};
use crate::train::inspection::{Inspection, is_within_any};
use crate::train::metrics::Metrics;
use crate::train::schedule::RATE;
use crate::train::trainer::{LARGEST, LOSS, NORM, SPEED, StepOutputs, Trainer};
use gristmill_runtime::Tensor;
use gristmill_runtime::units::plural;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Writes event files, which TensorBoard shows: `tensorboard --logdir FOLDER`. [`EventLog`](crate::train::EventLog) reads them too.
///
/// The folder has two runs. `train` has the graph of a step, and for each shown step its `loss`, metrics by name, `optimizer/learning_rate`,
/// `optimizer/largest_gradient` and, with [`Update::clip_norm`](crate::train::Update::clip_norm), `optimizer/norm`; for shown epochs the means.
/// `examples_per_s` counts the time of loading, steps and their callbacks since the record before. `validation` has `loss` and metrics of each
/// evaluation. Steps are numbered over the whole training.
///
/// A resumed training goes on in the same folder: it first removes the records after its checkpoint. Steps without a record cost nothing.
/// If a write fails, the log ends with a warning, and the training continues.
pub struct TensorBoard {
    folder: PathBuf,
    scalars: Every,
    summaries: Option<Summaries>,
    train: Run,
    validation: Run,
    /// Facts that a resumed training shares with the one before.
    training: String,
    /// The first loss in the log.
    first: Option<FirstLoss>,
    /// True when the checkpoint is of a training with a log.
    is_known: bool,
    inspection: Option<Inspection>,
    /// Tags with a warning of elements that are not finite.
    warned: BTreeSet<String>,
    /// Time and examples of the epoch at the last record.
    timed: (Duration, usize),
}

/// Histograms and sparsity of tensors in a step: the tags `TAG` and `TAG/sparsity`, the fraction of zeros.
///
/// They have the values at the beginning of the step, on its batch or first micro-batch. A program of its own computes them. It takes about as long as a step, and
/// changes nothing: a training has the same bits with summaries and without.
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
        let mut tags = trainer.step_tags(self.activations, self.gradients);
        if self.weights {
            tags.extend_from_slice(trainer.variables());
        }
        let is_empty = |scope: &&String| tags.iter().all(|tag| !is_within(tag, scope));
        match self.scopes.iter().find(is_empty) {
            None => Ok(()),
            Some(scope) => {
                let message = format!("summaries: nothing to show is within the scope {scope:?}");
                let hint =
                    "the scope of a trainable variable or of Model::collect(\"summaries\", ..)";
                Err(Error::invalid(message).hint(hint))
            }
        }
    }
}

/// A folder of event files.
struct Run {
    folder: PathBuf,
    /// Its log as it was before.
    log: Option<Log>,
    file: Option<EventFile>,
}

impl Run {
    fn new(folder: PathBuf) -> Run {
        Run {
            folder,
            log: None,
            file: None,
        }
    }

    /// Removes records of a resumed training, and opens a file. True for a new log.
    fn open(&mut self, training: &str, last: u64) -> Result<bool> {
        // Its lock first.
        self.file = Some(EventFile::create(&self.folder, training, last)?);
        self.cut()
    }

    /// Removes records of a resumed training. True for a new log.
    fn cut(&mut self) -> Result<bool> {
        match self.log.take() {
            None => Ok(true),
            Some(log) => log.cut().map(|()| log.is_new()),
        }
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
            training: String::new(),
            first: None,
            is_known: false,
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

    /// Checks the folders, which change at the first epoch.
    fn check_logs(&mut self, cx: &FitContext) -> Result<()> {
        // The loss of an epoch comes after the last step of the epoch.
        let goes_on = |every: Every, first: Option<Option<FirstLoss>>| GoesOn {
            training: &self.training,
            first,
            step: cx.step(),
            repeats_loss: matches!(every, Every::Epochs(_)) && cx.is_at_end(),
        };
        let check = |folder: &Path, goes_on: GoesOn| {
            Log::check(folder, Some(&goes_on).filter(|_| cx.is_resumed()))
        };
        let train = check(&self.train.folder, goes_on(self.scalars, Some(self.first)))?;
        if cx.is_resumed() && !self.is_known && !train.is_new() {
            let folder = self.train.folder.display();
            let message =
                format!("{folder} has a log, and the checkpoint is of a training without one");
            return Err(Error::invalid(message).hint("another folder for the log"));
        }
        self.first = train.first();
        self.train.log = Some(train);
        let validation = check(&self.validation.folder, goes_on(cx.evaluate(), None))?;
        self.validation.log = Some(validation);
        Ok(())
    }

    /// The numbers of a step besides its rate.
    fn record<'a>(
        &mut self,
        cx: &FitContext,
        means: impl Iterator<Item = (&'a str, f64)>,
        rate: f64,
    ) -> Record {
        let mut record = Record::default();
        for (tag, x) in means {
            if tag == LOSS {
                self.first.get_or_insert((cx.step(), x as f32));
            }
            record.scalar(tag, x);
        }
        record.scalar(RATE, rate);
        let (time, n) = std::mem::replace(&mut self.timed, (cx.time, cx.n_timed));
        let (time, n) = (cx.time.saturating_sub(time), cx.n_timed.saturating_sub(n));
        if n > 0 && !time.is_zero() {
            record.scalar(SPEED, n as f64 / time.as_secs_f64());
        }
        record
    }

    /// Writes histograms and sparsity of the step to come.
    fn add_summaries(&mut self, cx: &mut FitContext, batch: &Batch) -> Result<()> {
        let step = cx.next_step();
        let mut values = self.inspected(cx, batch);
        values.extend(self.weights(cx, batch)?);
        let mut record = Record::default();
        for (tag, value) in &values {
            let numbers = Numbers::of(value);
            if numbers.n_not_finite > 0 && self.warned.insert(tag.clone()) {
                let n = plural(numbers.n_not_finite as usize, "element");
                cx.warn(format!(
                    "{tag}: {n} NaN or infinite in step {step}; its histograms leave them out"
                ));
            }
            record.histogram(tag, &numbers.histogram);
            record.scalar(&format!("{tag}/sparsity"), numbers.sparsity);
        }
        self.train.write(cx, |file| file.add_record(step, record));
        Ok(())
    }

    /// Activations and gradients. A failure ends them with a warning.
    fn inspected(&mut self, cx: &mut FitContext, batch: &Batch) -> Vec<(String, Tensor)> {
        let Some(inspection) = &self.inspection else {
            return Vec::new();
        };
        match inspection.run(cx.trainer(), batch) {
            Ok(outputs) => {
                let pairs = outputs.iter();
                pairs.map(|(tag, t)| (tag.to_owned(), t.clone())).collect()
            }
            Err(e) => {
                let step = cx.next_step();
                cx.warn(format!(
                    "no activations and gradients from step {step} on: {e}"
                ));
                self.inspection = None;
                Vec::new()
            }
        }
    }

    /// Trainable variables.
    fn weights(&self, cx: &FitContext, batch: &Batch) -> Result<Vec<(String, Tensor)>> {
        let Some(summaries) = self.summaries.as_ref().filter(|s| s.weights) else {
            return Ok(Vec::new());
        };
        let trainer = cx.trainer();
        if trainer.program().specialisations() == 0 {
            // Variables have values once the code of the step is there.
            trainer.executable_for(batch)?;
        }
        let mut values = Vec::new();
        for name in trainer.variables() {
            if is_within_any(name, &summaries.scopes)
                && let Some(value) = trainer.value(name)?
            {
                values.push((name.clone(), value));
            }
        }
        Ok(values)
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
        self.training = training(cx);
        self.check_logs(cx)
    }

    fn train_end(&mut self, _cx: &mut FitContext, _end: &End) -> Result<()> {
        (self.train.file, self.validation.file) = (None, None);
        Ok(())
    }

    fn epoch_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        self.timed = Default::default();
        // Not before all callbacks have begun: one that refuses leaves the log as it was.
        if self.train.log.is_none() {
            return Ok(());
        }
        if self.train.open(&self.training, cx.step())? {
            let graph = cx.trainer().graph()?;
            self.train.write(cx, |file| file.add_graph(graph));
        }
        match cx.has_held_out() {
            true => self.validation.open(&self.training, cx.step()).map(drop),
            // Evaluations of steps that are trained anew.
            false => self.validation.cut().map(drop),
        }
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
        record.scalar(LARGEST, step.largest_gradient);
        if let Some(norm) = step.norm {
            record.scalar(NORM, norm);
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

    fn state(&self) -> CallbackState {
        let note = match self.first {
            Some((step, loss)) => format!("{step} {:08x}", loss.to_bits()),
            None => NONE.to_owned(),
        };
        let mut state = CallbackState::default();
        state.notes.insert(FIRST.to_owned(), note);
        state
    }

    fn restore(&mut self, state: CallbackState) -> Result<()> {
        let note = state.notes.get(FIRST);
        (self.first, self.is_known) = (None, note.is_some());
        let Some(note) = note.filter(|note| *note != NONE) else {
            return Ok(());
        };
        let first = |note: &str| {
            let (step, loss) = note.split_once(' ')?;
            let bits = u32::from_str_radix(loss, 16).ok()?;
            Some((step.parse().ok()?, f32::from_bits(bits)))
        };
        match first(note) {
            None => Err(Error::invalid(format!(
                "{FIRST}: {note:?} is no step with a loss"
            ))),
            first => {
                self.first = first;
                Ok(())
            }
        }
    }
}

/// The note of the first loss in the log.
const FIRST: &str = "first loss";
/// Its text before there is one.
const NONE: &str = "none";

/// Facts that a resumed training shares with the one before.
fn training(cx: &FitContext) -> String {
    let (position, mut text) = (cx.position(), String::new());
    for ((container, name), ty) in cx.trainer().state() {
        text += &format!("{container} {name} {ty}\n");
    }
    let (n, size, seed) = (position.n_examples, position.batch_size, position.seed);
    let crc = crc32c::crc32c(text.as_bytes());
    format!("state {crc:08x}, {n} examples, batch size {size}, seed {seed}")
}
