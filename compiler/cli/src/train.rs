//! `gristmill train`: fine-tunes a model and saves it with the new weights.

mod data;
mod learning;
mod objective;
mod progress;

pub use learning::{Learning, step_of};
pub use objective::{ObjectiveArgs, UpdateArgs};

use crate::args::CompileArgs;
use crate::heading;
use crate::output::{self, errln, noteln, outlive_reader, outln};
use crate::signals::{INTERRUPTED, interrupt};
use crate::{load, parse, print_json};
use clap::{Args, ValueEnum};
use data::{Archive, Examples, Keys};
use gristmill::DType;
use gristmill::Options;
use gristmill::Session;
use gristmill::Source;
use gristmill::onnx::{self, Converted};
use gristmill::place::DeviceSet;
use gristmill::train::{
    Batch, BatchStatistics, Callback, Checkpoints, Comparison, End, EpochReport, Every, Fit,
    FitContext, FitReport, Model, ModelCheckpoint, Prediction, Resumed, StepOutputs, Strategy,
    Summaries, TensorBoard, Trainer, Training, Updates, Weight, WorkerReport,
};
use gristmill::{Deal, DeviceName, Error, Result};
use gristmill_runtime::command::given::check_target;
use gristmill_runtime::files;
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::safetensors::Notes;
use gristmill_runtime::units::{count, plural, printable, time_ns};
use objective::Aim;
use progress::Line;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Arguments of `train`.
#[derive(Args)]
#[command(mut_arg("keep", |keep| keep.hide(true)))]
pub struct TrainArgs {
    /// An ONNX model.
    model: PathBuf,
    /// Examples: a NumPy archive with one row per example in each array.
    #[arg(long, value_name = "FILE.npz", help_heading = heading::INPUTS)]
    data: PathBuf,
    /// Held-out examples. Loss and metrics on them are printed after each epoch.
    #[arg(long, value_name = "FILE.npz", help_heading = heading::INPUTS)]
    eval: Option<PathBuf>,
    /// Key of an input in the archives. Default: the input's name.
    #[arg(long, value_name = "NAME=KEY", help_heading = heading::INPUTS)]
    input: Vec<String>,
    /// Key of the labels in the archives.
    #[arg(long, value_name = "KEY", default_value = "label", help_heading = heading::INPUTS)]
    label: String,
    #[command(flatten)]
    objective: ObjectiveArgs,
    #[command(flatten)]
    update: UpdateArgs,
    /// Passes over all examples.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=u64::from(u32::MAX)), help_heading = heading::TRAINING)]
    epochs: u64,
    /// Examples per step. Default: 32; for a model of a fixed batch size, that size times --accumulate. The last batch of an epoch may be smaller, unless the size is fixed.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), help_heading = heading::TRAINING)]
    batch: Option<u32>,
    /// Examples per step and replica, in place of --batch: with 4 replicas, a step has 4 times as many.
    #[arg(long, value_name = "N", conflicts_with = "batch", value_parser = clap::value_parser!(u32).range(1..), help_heading = heading::TRAINING)]
    batch_per_replica: Option<u32>,
    /// Devices that train together. `one-device`: the placer decides which device of --devices computes what. `mirrored`: each device of --devices,
    /// of the fastest one's kind, has all weights and a share of each batch. `central`: the first CPU has the weights, and makes the updates.
    /// `parameter-server`: the CPUs have the weights, about as many bytes each; with --async, the first CPU has them. `auto`: the one with the shortest predicted step.
    #[arg(long, value_name = "NAME", value_enum, default_value_t, help_heading = heading::TRAINING)]
    strategy: StrategyName,
    /// With `parameter-server`: the devices with the weights, of --devices, e.g. `gpu:2`. Default: the CPUs, with --async the first one.
    #[arg(long, value_name = "LIST", help_heading = heading::TRAINING)]
    servers: Option<String>,
    /// With `parameter-server`: each device takes whole batches, whose gradients update the weights at once, without waiting for other
    /// devices. Results differ from run to run.
    #[arg(long = "async", help_heading = heading::TRAINING)]
    is_async: bool,
    /// As --async, but updates do not wait for each other either: if two change a weight at the same time, one may be lost. The weights are on one CPU.
    #[arg(long, conflicts_with = "is_async", help_heading = heading::TRAINING)]
    hogwild: bool,
    /// Shares of each batch, a power of two: their gradients are joined in one fixed tree, so that 1, 2, 4, .. devices, up to N, give the
    /// same bits. Default: one share for each device.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, conflicts_with_all = ["is_async", "hogwild"], help_heading = heading::TRAINING)]
    shards: u32,
    /// Statistics of BatchNormalization in training form: of the whole batch, or of each replica's share of it, which saves transfers.
    #[arg(long, value_name = "OF", value_enum, default_value_t, conflicts_with_all = ["is_async", "hogwild"], help_heading = heading::TRAINING)]
    statistics: StatisticsOf,
    /// Print the predicted steps of all strategies, and train nothing. With --target, for another machine.
    #[arg(long, conflicts_with_all = ["is_async", "hogwild", "servers", "resume", "batch_per_replica"], help_heading = heading::TRAINING)]
    explain: bool,
    /// Parts into which each step cuts its batch. They are computed one after the other, with less memory, and move the weights once.
    #[arg(long, value_name = "PARTS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = heading::TRAINING)]
    accumulate: u32,
    /// Seed of the order of examples and of the masks of `Dropout`.
    #[arg(long, default_value_t = 0, help_heading = heading::TRAINING)]
    seed: u64,
    /// File to write: the model with its new weights. External tensors go to `OUT.onnx.data`.
    #[arg(short = 'o', value_name = "OUT.onnx", required = false, required_unless_present = "explain", default_value_if("explain", "true", "none.onnx"), help_heading = heading::OUTPUT)]
    out: PathBuf,
    /// Keep BatchNormalization and Dropout in training form, if the model has them so. By default, the file is for inference.
    #[arg(long, help_heading = heading::OUTPUT)]
    keep_training_form: bool,
    /// Folder of checkpoints, written after each epoch and on Ctrl-C. Default: only on Ctrl-C, to `OUT.onnx.checkpoints`.
    #[arg(long, value_name = "DIR", help_heading = heading::OUTPUT)]
    checkpoint_dir: Option<PathBuf>,
    /// Number of checkpoints to keep, the newest.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..), help_heading = heading::OUTPUT)]
    keep_checkpoints: u32,
    /// Folder of a log for TensorBoard, with the runs `train` and `validation`.
    #[arg(long, value_name = "DIR", help_heading = heading::OUTPUT)]
    logdir: Option<PathBuf>,
    /// Also log histograms and sparsity of gradients and weights after each N steps.
    #[arg(long, value_name = "N", requires = "logdir", value_parser = clap::value_parser!(u64).range(1..), help_heading = heading::OUTPUT)]
    histograms: Option<u64>,
    /// Continue from the newest checkpoint.
    #[arg(long, help_heading = heading::TRAINING)]
    resume: bool,
    #[command(flatten)]
    compile: CompileArgs,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// A strategy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum StrategyName {
    #[default]
    OneDevice,
    Mirrored,
    Central,
    ParameterServer,
    Auto,
}

/// The examples that batch normalisation takes its statistics of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum StatisticsOf {
    #[default]
    Whole,
    PerReplica,
}

impl From<StatisticsOf> for BatchStatistics {
    fn from(of: StatisticsOf) -> BatchStatistics {
        match of {
            StatisticsOf::Whole => BatchStatistics::Whole,
            StatisticsOf::PerReplica => BatchStatistics::PerReplica,
        }
    }
}

impl TrainArgs {
    /// Errors on `--async`, `--hogwild` and `--servers` without servers, and on a batch per replica of an unknown number.
    fn check_strategy(&self) -> Result<()> {
        if self.strategy == StrategyName::Auto && self.batch_per_replica.is_some() {
            let e = Error::invalid(
                "--batch-per-replica: --strategy auto decides the number of replicas by the batch",
            );
            return Err(e.hint("--batch"));
        }
        let flag = match (self.is_async, self.hogwild, &self.servers) {
            (true, ..) => "--async",
            (false, true, _) => "--hogwild",
            (false, false, Some(_)) => "--servers",
            (false, false, None) => return Ok(()),
        };
        match self.strategy {
            StrategyName::ParameterServer => Ok(()),
            _ => {
                let e = Error::invalid(format!("{flag}: the weights have no servers"));
                Err(e.hint("--strategy parameter-server"))
            }
        }
    }

    /// The devices of `--servers`.
    fn servers(&self) -> Result<Vec<DeviceName>> {
        let Some(list) = &self.servers else {
            return Ok(Vec::new());
        };
        if list.trim().is_empty() {
            return Err(Error::invalid("--servers: no device").hint("--servers cpu:1"));
        }
        let set = DeviceSet::parse(list, 1).map_err(|e| e.context("--servers"))?;
        Ok(set.devices.into_iter().map(|d| d.name).collect())
    }

    fn strategy(&self, batch_size: usize) -> Result<Strategy> {
        Ok(match self.strategy {
            StrategyName::Auto => Strategy::Auto { batch_size },
            StrategyName::OneDevice => Strategy::OneDevice,
            StrategyName::Mirrored => Strategy::Mirrored {
                devices: Vec::new(),
            },
            StrategyName::Central => Strategy::CentralStorage {
                central: None,
                devices: Vec::new(),
            },
            StrategyName::ParameterServer => Strategy::ParameterServer {
                servers: self.servers()?,
                workers: Vec::new(),
                deal: Deal::BySize,
                updates: match (self.hogwild, self.is_async) {
                    (true, _) => Updates::Hogwild,
                    (false, true) => Updates::Asynchronous,
                    (false, false) => Updates::InStep,
                },
            },
        })
    }
}

/// Runs the verb.
pub fn train(args: &TrainArgs) -> Result<()> {
    check_flags(args)?;
    if args.explain {
        return explain(args);
    }
    // Hours of training are worth more than their text.
    outlive_reader();
    let interrupt = interrupt()?;
    let began = Instant::now();
    let mut run = Run::new(args)?;
    let is_whole = run.run(&interrupt)?;
    if is_whole {
        run.save()?;
    }
    let ns = began.elapsed().as_nanos() as u64;
    match args.json {
        true => print_json("train", run.json(is_whole, ns)),
        false => run.print_end(is_whole, ns),
    }
    if !is_whole {
        crate::output::flush();
        std::process::exit(INTERRUPTED);
    }
    Ok(())
}

/// Prints the predicted steps of all strategies.
fn explain(args: &TrainArgs) -> Result<()> {
    let compared = Setup::new(args)?.comparison()?;
    match args.json {
        true => print_json("train", compared_json(&compared)),
        false => outln!("{compared}"),
    }
    Ok(())
}

fn compared_json(compared: &Comparison) -> Value {
    let row = |p: &Prediction| {
        let peaks = p.peak_bytes.iter();
        let peaks = peaks.map(|(device, bytes)| (device.to_string(), json!(bytes)));
        json!({
            "strategy": p.strategy.name(),
            "servers": p.servers.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "replicas": p.n_replicas,
            "is_shortest": p == compared.best(),
            "batch": p.batch_size,
            "step_ns": p.step_ns,
            "compute_ns": p.busy_ns,
            "peak_bytes": Value::Object(peaks.collect()),
        })
    };
    let rows = |all: &[Prediction]| all.iter().map(row).collect::<Vec<_>>();
    json!({
        "same_batch": rows(&compared.fixed),
        "same_batch_per_replica": rows(&compared.scaled),
        "serial_part": compared.serial,
        "left_out": compared.left_out,
    })
}

/// Errors to give before training rather than after it.
fn check_flags(args: &TrainArgs) -> Result<()> {
    args.update.check()?;
    args.check_strategy()?;
    if !args.compile.keep.is_empty() {
        let e = Error::invalid("--keep: state that inputs and outputs have is not differentiated");
        return Err(e.hint("train the model without it"));
    }
    let mut read: Vec<(&str, &Path)> = vec![
        ("the input model", &args.model),
        ("the file of --data", &args.data),
    ];
    let others = [
        ("the file of --eval", &args.eval),
        ("the file of --plan", &args.compile.plan),
        ("the file of --target", &args.compile.target),
    ];
    let others = others.iter();
    read.extend(others.filter_map(|(what, path)| Some((*what, path.as_deref()?))));
    if args.explain {
        return Ok(());
    }
    check_target("-o", &args.out, &read)?;
    let free = files::nameless(&args.out);
    free.map(drop)
        .map_err(|e| load::file_error(&args.out, e).context("-o"))
}

/// The model of a file. Errors for a graph in text form.
pub fn onnx_model(path: &Path) -> Result<Arc<onnx::Model>> {
    match load::model(path)? {
        Source::Onnx(model) => Ok(model),
        Source::Graph(_) => Err(not_onnx(path)),
    }
}

/// The error for a graph in text form.
pub fn not_onnx(path: &Path) -> Error {
    let message = format!("{}: only ONNX models are trained", path.display());
    Error::invalid(message).hint("gristmill::train trains graphs that are built in Rust")
}

/// A training in progress.
struct Run<'a> {
    args: &'a TrainArgs,
    aim: Aim,
    trainer: Trainer,
    /// Examples of a step.
    size: usize,
    examples: Examples,
    held_out: Option<Examples>,
    report: FitReport,
    /// Nodes with another form in the written model.
    converted: Converted,
}

/// The model, the data and the flags of a training, before a step is compiled.
struct Setup<'a> {
    args: &'a TrainArgs,
    keys: Keys,
    archive: Archive,
    aim: Aim,
    /// The model's number of examples at once, where it is fixed.
    fixed: Option<usize>,
    /// Examples of a step.
    size: usize,
    session: Session,
    options: Options,
}

impl<'a> Setup<'a> {
    fn new(args: &'a TrainArgs) -> Result<Setup<'a>> {
        let (session, mut options) = args.compile.open()?;
        // The graph of a step has them already.
        let dims = std::mem::take(&mut options.dims);
        let model = onnx_model(&args.model)?;
        if !args.explain {
            model.check_target(&args.out).map_err(|e| e.context("-o"))?;
        }
        let aim = Aim::new(&model, &args.objective, dims, &args.label)?;
        aim.check_learning()?;
        aim.warn_of_fixed();
        let fixed = fixed_batch(&aim)?;
        let strategy = args.strategy(1)?;
        let devices = &session.settings().devices;
        let n_replicas = strategy.n_replicas(devices)?;
        let is_alone = devices.devices.len() == 1
            || args.strategy == StrategyName::Mirrored && n_replicas == 1;
        let may_be_alone = matches!(args.strategy, StrategyName::OneDevice | StrategyName::Auto);
        if !may_be_alone && is_alone {
            errln!(
                "warning: --strategy with a single device shares nothing; --devices cpu:2 has two"
            );
        }
        Ok(Setup {
            args,
            keys: keys(args)?,
            archive: Archive::read(&args.data)?,
            size: batch_size(args, n_replicas, fixed)?,
            fixed,
            aim,
            session,
            options,
        })
    }

    fn trainer(&self) -> Result<Trainer> {
        let (training, dtype) = self.training()?;
        self.warn_of_slow(&training, dtype);
        let build = |m: &mut Model| self.aim.build(m, dtype);
        let trainer = Trainer::in_session(&self.session, "train", &training, build)?;
        self.warn_of_common(&trainer);
        if self.args.strategy == StrategyName::Auto {
            let name = trainer.strategy().name();
            noteln!(
                "strategy: {name} on {}",
                plural(trainer.n_replicas(), "device")
            );
        }
        Ok(trainer)
    }

    /// The predicted steps of all strategies.
    fn comparison(&self) -> Result<Comparison> {
        let (training, dtype) = self.training()?;
        let build = |m: &mut Model| self.aim.build(m, dtype);
        Comparison::of(&self.session, "train", &training, self.size, build)
    }

    /// Warns where the batch has no equal shares for statistics per replica.
    fn warn_of_common(&self, trainer: &Trainer) {
        let n = trainer.n_replicas().max(self.args.shards as usize);
        if self.args.statistics == StatisticsOf::PerReplica && !self.size.is_multiple_of(n) {
            errln!(
                "warning: --statistics per-replica: {} examples have no {n} equal shares, so each batch has common statistics",
                self.size
            );
        }
    }

    /// Warns of a strategy that is predicted to take longer than one device.
    fn warn_of_slow(&self, training: &Training, dtype: DType) {
        let is_named = !matches!(
            training.strategy,
            Strategy::OneDevice | Strategy::Auto { .. }
        );
        let takes_turns = self.args.is_async || self.args.hogwild;
        if !is_named || takes_turns || self.session.settings().devices.devices.len() == 1 {
            return;
        }
        let step = |training: &Training| {
            let build = |m: &mut Model| self.aim.build(m, dtype);
            Prediction::of(&self.session, "train", training, self.size, build)
        };
        let one = Training {
            strategy: Strategy::OneDevice,
            ..training.clone()
        };
        // Training itself says what is wrong.
        let (Ok(own), Ok(one)) = (step(training), step(&one)) else {
            return;
        };
        if own.step_ns > one.step_ns {
            errln!(
                "warning: a step is predicted to take {} with --strategy {}, and {} with one-device on these devices",
                time_ns(own.step_ns),
                training.strategy.name(),
                time_ns(one.step_ns)
            );
        }
    }

    /// The settings, and the dtype of labels.
    fn training(&self) -> Result<(Training, DType)> {
        let label = self.archive.get(&self.args.label)?;
        let n_examples = label.shape().first().copied().unwrap_or(0);
        let n_batches = match self.fixed {
            Some(_) => n_examples / self.size,
            None => n_examples.div_ceil(self.size),
        };
        let n_steps = (n_batches as u64).saturating_mul(self.args.epochs);
        let training = Training {
            seed: self.args.seed,
            options: self.options.clone(),
            accumulate: self.args.accumulate as usize,
            strategy: self.args.strategy(self.size)?,
            shards: self.args.shards as usize,
            statistics: self.args.statistics.into(),
            ..Training::from(self.args.update.update(n_steps))
        };
        // Classes that an archive has as floats are converted; whether they are whole numbers, the examples tell.
        let dtype = match label.dtype() {
            dtype if dtype.is_float() => DType::I64,
            dtype => dtype,
        };
        Ok((training, dtype))
    }

    /// Errors when `--input` names an unknown input.
    fn check_keys(&self, trainer: &Trainer) -> Result<()> {
        let inputs = trainer.program().inputs();
        let given = inputs.iter().filter(|(name, _)| *name != self.args.label);
        let known = || given.clone().map(|(name, _)| name.as_str());
        let strange = |name: &&String| known().all(|k| k != *name);
        match self.keys.keys().find(strange) {
            Some(name) => {
                let message = unknown("input", name, known());
                Err(Error::invalid(message).context("--input"))
            }
            None => Ok(()),
        }
    }

    /// The examples of an archive, used so many at once by a model of a fixed batch.
    fn examples(&self, trainer: &Trainer, archive: &Archive, n: usize) -> Result<Examples> {
        let label = &self.args.label;
        let n_classes = self.aim.n_classes();
        if let (Some(n), Some((rank, axis))) = (n_classes, self.aim.class_axis()) {
            archive.check_one_hot(label, rank, axis, n)?;
        }
        let examples = archive.examples(trainer.program().inputs(), &self.keys)?;
        if let Some(n) = n_classes {
            archive.check_labels(label, n)?;
        }
        if self.aim.takes_probabilities() {
            archive.check_probabilities(label)?;
        }
        if self.fixed.is_some() {
            archive.check_fixed(&examples, n)?;
        }
        Ok(examples)
    }
}

impl<'a> Run<'a> {
    fn new(args: &'a TrainArgs) -> Result<Run<'a>> {
        let setup = Setup::new(args)?;
        let trainer = setup.trainer()?;
        setup.check_keys(&trainer)?;
        let examples = setup.examples(&trainer, &setup.archive, setup.size)?;
        let held_out = match &args.eval {
            Some(path) => {
                let n = setup.fixed.unwrap_or(1);
                Some(setup.examples(&trainer, &Archive::read(path)?, n)?)
            }
            None => None,
        };
        Ok(Run {
            args,
            trainer,
            size: setup.size,
            examples,
            held_out,
            aim: setup.aim,
            report: FitReport::default(),
            converted: Converted::default(),
        })
    }
}

/// The keys that `--input` gives.
fn keys(args: &TrainArgs) -> Result<Keys> {
    let mut keys = Keys::new();
    for flag in &args.input {
        let (name, key) = parse::pair(flag, "--input", "NAME=KEY")?;
        if keys.insert(name.to_owned(), key.to_owned()).is_some() {
            return Err(Error::invalid(format!("--input: {name:?} is given twice")));
        }
    }
    Ok(keys)
}

/// The model's number of examples at once, where it is fixed.
fn fixed_batch(aim: &Aim) -> Result<Option<usize>> {
    let mut fixed = None;
    for (name, ty) in aim.net.inputs() {
        let Some(first) = ty.shape.first() else {
            return Err(Error::invalid(format!(
                "input {name:?} is {ty}: expected a first axis of examples"
            )));
        };
        if first.is(0) {
            return Err(Error::invalid(format!(
                "input {name:?} is {ty}: it takes no examples"
            )));
        }
        fixed = fixed.or(first.as_usize());
    }
    Ok(fixed)
}

fn batch_size(args: &TrainArgs, n_replicas: usize, fixed: Option<usize>) -> Result<usize> {
    let parts = args.accumulate as usize;
    let of_all = |n: u32| (n as usize).saturating_mul(n_replicas);
    let given = args.batch_per_replica.map(of_all);
    let given = given.or(args.batch.map(|n| n as usize));
    match (given, fixed) {
        (Some(given), Some(own)) if given != own.saturating_mul(parts) => {
            let flag = match args.batch_per_replica {
                Some(n) => format!("--batch-per-replica {n}, of {n_replicas} replicas"),
                None => format!("--batch {given}"),
            };
            let message = format!("{flag}: the model takes {own} examples at once");
            Err(match parts {
                1 => Error::invalid(message).hint("export it with a symbolic first dim"),
                parts => {
                    let all = own.saturating_mul(parts);
                    let message = format!("{message}, so --accumulate {parts} takes {all}");
                    Error::invalid(message).hint(format!("--batch {all}"))
                }
            })
        }
        (_, Some(own)) => Ok(own.saturating_mul(parts)),
        (given, None) => Ok(given.unwrap_or(32)),
    }
}

impl Run<'_> {
    /// Trains to the end; false when it was interrupted.
    fn run(&mut self, interrupt: &AtomicBool) -> Result<bool> {
        let folder = self.folder();
        if !self.args.resume && folder.exists() {
            let unused = self.checkpoints(&folder)?.check_unused();
            unused.map_err(|e| e.hint(BEGINS_ANEW))?;
        }
        let resumed = match self.args.resume {
            true => Some(self.resume(&folder)?),
            false => None,
        };
        let fit = Fit {
            epochs: self.args.epochs,
            seed: self.args.seed,
            held_out: self.held_out.as_ref().map(|data| data as _),
            resumed,
            ..Fit::new(&self.examples, self.size)
        };
        let mut watch = Watch {
            args: self.args,
            interrupt,
            on_interrupt: &|| self.checkpoints(&folder),
            n_examples: self.size,
            line: None,
            has_reported: false,
        };
        // Without a folder of its own, a training has checkpoints only of interruptions.
        let is_saved = self.args.resume || self.args.checkpoint_dir.is_some();
        let mut newest = match is_saved {
            true => Some(ModelCheckpoint::newest(
                self.checkpoints(&folder)?,
                Every::Epochs(1),
            )),
            false => None,
        };
        let mut callbacks: Vec<&mut dyn Callback> = vec![&mut watch];
        let mut log = self.log();
        callbacks.extend(log.as_mut().map(|own| own as &mut dyn Callback));
        callbacks.extend(newest.as_mut().map(|own| own as &mut dyn Callback));
        let report = self.trainer.fit(&fit, &mut callbacks)?;
        let is_whole = report.stopped.is_none();
        self.report = report;
        Ok(is_whole)
    }

    /// The log of `--logdir`.
    fn log(&self) -> Option<TensorBoard> {
        let log = TensorBoard::new(self.args.logdir.as_ref()?);
        Some(match self.args.histograms {
            Some(n) => log.summaries(Summaries::new(Every::Steps(n))),
            None => log,
        })
    }

    /// The folder of checkpoints, given or not.
    fn folder(&self) -> PathBuf {
        self.args.checkpoint_dir.clone().unwrap_or_else(|| {
            let mut folder = self.args.out.clone().into_os_string();
            folder.push(".checkpoints");
            folder.into()
        })
    }

    fn checkpoints(&self, folder: &Path) -> Result<Checkpoints> {
        let n = self.args.keep_checkpoints as usize;
        Ok(Checkpoints::new(folder, n)?.with_facts(self.facts()))
    }

    /// Facts that a training which goes on shares with the one before.
    fn facts(&self) -> Notes {
        let (objective, update) = (&self.args.objective, &self.args.update);
        let facts = [
            ("model", format!("{:016x}", self.aim.net.digest())),
            ("data", format!("{:016x}", self.examples.data.digest())),
            ("loss", objective.loss_fact()),
            ("optimizer", objective::name(update.optimizer)),
        ];
        let named = facts
            .into_iter()
            .map(|(name, fact)| (name.to_owned(), fact));
        named.collect()
    }

    fn resume(&self, folder: &Path) -> Result<Resumed> {
        let found = match folder.is_dir() {
            true => self.checkpoints(folder)?.resume(&self.trainer)?,
            false => None,
        };
        let Some(resumed) = found else {
            let e = Error::invalid(format!("--resume: {} has no checkpoint", folder.display()));
            return Err(e.hint("--checkpoint-dir DIR names the folder of checkpoints"));
        };
        resumed.damaged.iter().for_each(output::warning);
        let path = resumed.path.display();
        noteln!(
            "resuming from {path}, after {}",
            plural(self.trainer.n_steps()? as usize, "step")
        );
        Ok(resumed)
    }

    /// Writes the model, and says whether its nodes have another form now.
    fn save(&mut self) -> Result<()> {
        let (net, trainer) = (&self.aim.net, &self.trainer);
        let saved = match self.args.keep_training_form {
            true => net
                .save_in_training_form(trainer, &self.args.out)
                .map(|()| Converted::default()),
            false => net.save(trainer, &self.args.out),
        };
        self.converted = saved.map_err(|e| match &self.report.checkpoint {
            Some(path) => e.hint(format!("{} has the weights", path.display())),
            None => e,
        })?;
        if !self.converted.is_empty() && !self.args.json {
            let (out, nodes) = (self.args.out.display().to_string(), self.converted);
            noteln!(
                "{}: {nodes} written in inference form (--keep-training-form keeps the training form)",
                printable(&out)
            );
        }
        Ok(())
    }

    fn trained(&self) -> impl Iterator<Item = &Weight> {
        let weights = self.aim.net.weights().iter();
        weights.filter(|w| w.frozen.is_none())
    }

    fn n_parameters(&self) -> usize {
        let sizes = self.trained().map(|w| w.ty.shape.n_elements().as_usize());
        sizes.flatten().sum()
    }

    fn print_end(&self, is_whole: bool, ns: u64) {
        let time = time_ns(ns);
        if !is_whole {
            let checkpoint = self.report.checkpoint.as_ref();
            let path = checkpoint
                .map(|path| path.display().to_string())
                .unwrap_or_default();
            errln!("stopped after {time}; --resume continues from {path}");
            return;
        }
        let out = self.args.out.display().to_string();
        if let (true, Some(path)) = (self.report.epochs.is_empty(), &self.report.checkpoint) {
            let (out, path) = (printable(&out), path.display().to_string());
            outln!(
                "{out}: saved from {}: all epochs were done already",
                printable(&path)
            );
            return;
        }
        for worker in &self.report.workers {
            let steps = plural(worker.n_steps as usize, "step");
            let (mean, most) = (worker.mean_staleness, worker.largest_staleness);
            outln!(
                "worker on {}: {steps}, mean staleness {mean:.1}, at most {most}",
                worker.device
            );
        }
        let tensors = plural(self.trained().count(), "tensor");
        let parameters = match self.n_parameters() {
            1 => "1 parameter".to_owned(),
            n => format!("{} parameters", count(n as u64)),
        };
        outln!(
            "{}: trained {tensors} ({parameters}) in {time}",
            printable(&out)
        );
    }

    fn json(&self, is_whole: bool, ns: u64) -> Value {
        let weights = self.trained().map(|w| w.name.as_str());
        let epochs = self.report.epochs.iter().map(progress::json);
        json!({
            "weights": weights.collect::<Vec<_>>(),
            "parameters": self.n_parameters(),
            "epochs": epochs.collect::<Vec<_>>(),
            "steps": self.report.n_steps,
            "batch": self.size,
            "strategy": self.trainer.strategy().name(),
            "replicas": self.trainer.n_replicas(),
            "workers": self.report.workers.iter().map(worker_json).collect::<Vec<_>>(),
            "seed": self.args.seed,
            "train_ns": ns,
            "output": is_whole.then_some(&self.args.out),
            "converted_to_inference": {
                "BatchNormalization": self.converted.batch_norms,
                "Dropout": self.converted.dropouts,
            },
            "checkpoint": self.report.checkpoint,
            "interrupted": !is_whole,
        })
    }
}

fn worker_json(worker: &WorkerReport) -> Value {
    json!({
        "device": worker.device.to_string(),
        "steps": worker.n_steps,
        "mean_staleness": worker.mean_staleness,
        "largest_staleness": worker.largest_staleness,
    })
}

const BEGINS_ANEW: &str = "--resume goes on from them; another --checkpoint-dir begins anew";

/// Shows a training, and ends it on Ctrl-C.
struct Watch<'a> {
    args: &'a TrainArgs,
    interrupt: &'a AtomicBool,
    /// Opens the folder for the checkpoint of an interruption.
    on_interrupt: &'a dyn Fn() -> Result<Checkpoints>,
    /// Examples of a step.
    n_examples: usize,
    line: Option<Line>,
    has_reported: bool,
}

impl Watch<'_> {
    /// The report of compilation that other verbs give too.
    fn report(&self, trainer: &Trainer, batch: &Batch) -> Result<()> {
        let executable = trainer.executable_for(batch)?;
        executable.map_or(Ok(()), |e| self.args.compile.report(&e.lowered))
    }
}

impl Callback for Watch<'_> {
    fn name(&self) -> String {
        "train".to_owned()
    }

    fn train_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        let is_shown = !self.args.json && !output::is_quiet();
        self.line = Some(Line::new(cx.n_steps(), cx.step(), is_shown));
        Ok(())
    }

    fn step_begin(&mut self, cx: &mut FitContext, batch: &Batch) -> Result<()> {
        match std::mem::replace(&mut self.has_reported, true) {
            false => self.report(cx.trainer(), batch),
            true => Ok(()),
        }
    }

    fn step_end(&mut self, cx: &mut FitContext, step: &StepOutputs) -> Result<()> {
        if let Some(line) = &self.line {
            line.step(cx.epoch(), self.n_examples, step.loss);
        }
        if self.interrupt.load(Ordering::Relaxed) {
            cx.save_checkpoint(&(self.on_interrupt)()?);
            cx.stop("interrupted");
        }
        Ok(())
    }

    fn epoch_end(&mut self, _cx: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        if let (Some(line), false) = (&self.line, self.args.json) {
            line.aside(|| progress::print(epoch, self.args.epochs));
        }
        Ok(())
    }

    fn train_end(&mut self, _cx: &mut FitContext, _end: &End) -> Result<()> {
        self.line.iter().for_each(Line::end);
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        output::warning(text);
    }
}
