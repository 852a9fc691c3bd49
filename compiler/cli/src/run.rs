//! `gristmill run`: compile for this machine and run once.

use crate::args::CompileArgs;
use crate::cluster::TrustArgs;
use crate::heading;
use crate::image::{self, Ready};
use crate::inputs::{self, InputArgs, Inputs};
use crate::output::{self, errln, noteln, outln};
use crate::watchdog::within;
use crate::{load, parse, print_json, summary};
use clap::Args;
use gristmill::Session;
use gristmill::Tensor;
use gristmill::distribute::{ClientOptions, Limits};
use gristmill::interp::compare::{Comparison, allclose};
use gristmill::onnx::Declared;
use gristmill::pipeline::{Config, Lowered};
use gristmill::{Compiled, Executable, Outputs, Source};
use gristmill::{Error, ErrorKind, Result};
use gristmill::{Options, Precision};
use gristmill_runtime::command::accuracy::{accuracy as accuracy_of, text as accuracy_text};
use gristmill_runtime::command::given::{as_declared, check_archive_name, check_target};
use gristmill_runtime::command::summary::text;
use gristmill_runtime::exec::Resources;
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::npy;
use gristmill_runtime::units::{printable, time_ns};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arguments of `run`.
#[derive(Args)]
pub struct RunArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    #[command(flatten)]
    inputs: InputArgs,
    #[command(flatten)]
    compile: CompileArgs,
    /// Run in a session on a task of a cluster. --pin names devices of any of its tasks, e.g. `/job:ps/task:0/cpu:0`; nodes without a pin run on
    /// the session's own task.
    #[arg(
        long,
        value_name = "grpc://HOST:PORT",
        conflicts_with_all = ["devices", "target", "plan", "mem", "objective", "dump_dir", "tune", "threads", "visible_gpus", "budget", "target_cpu", "gpu_arch", "all_reduce", "no_libraries", "verify", "samples", "save_state", "state", "variable"],
        help_heading = heading::DEVICES
    )]
    session: Option<String>,
    /// Longest time of the run on the tasks of --session: then it ends with an error that says where each
    /// task is.
    #[arg(long, default_value = "10m", value_name = "TIME", value_parser = parse::time, requires = "session", help_heading = heading::DEVICES)]
    step_timeout: Duration,
    #[command(flatten)]
    trust: TrustArgs,
    /// Set the variables of the model to their initial values before the run, on the tasks of --session.
    #[arg(long, requires = "session", help_heading = heading::INPUTS)]
    initialise: bool,
    /// Compare class labels (integers) with the arg-max of the first output over its last axis, and print the accuracy.
    #[arg(long, value_name = "FILE.npy", help_heading = heading::OUTPUT)]
    labels: Option<PathBuf>,
    /// Write the outputs to a NumPy archive.
    #[arg(long, value_name = "FILE.npz", help_heading = heading::OUTPUT)]
    outputs: Option<PathBuf>,
    /// Write all variables after the run to a safetensors file, for --state.
    #[arg(long, value_name = "FILE.safetensors", help_heading = heading::OUTPUT)]
    save_state: Option<PathBuf>,
    /// Compare the outputs with the arrays of the same names in a NumPy archive. Exit code 4 if one differs.
    #[arg(long, value_name = "FILE.npz", help_heading = heading::OUTPUT)]
    expect: Option<PathBuf>,
    /// Largest allowed relative difference from the expected outputs of --test-data or --expect.
    #[arg(long, default_value = "1e-3", value_parser = parse::tolerance, help_heading = heading::OUTPUT)]
    rtol: f64,
    /// Largest allowed absolute difference. Default: 1e-5 of the largest expected magnitude of each output.
    #[arg(long, value_parser = parse::tolerance, help_heading = heading::OUTPUT)]
    atol: Option<f64>,
    /// Write kernel names for `perf report`, and print the path of their file.
    #[arg(long, help_heading = heading::DIAGNOSTICS)]
    perf: bool,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

impl RunArgs {
    fn open(&self) -> Result<(Session, Options)> {
        match &self.session {
            None => {
                self.trust.needs_session()?;
                self.compile.open()
            }
            Some(target) => self.compile.open_on(target, self.client()?),
        }
    }

    /// Settings of a client of --session.
    fn client(&self) -> Result<ClientOptions> {
        Ok(ClientOptions {
            credentials: self.trust.of_client()?,
            on_stall: Some(Arc::new(|stall| output::warning(stall))),
            limits: Limits {
                run: self.step_timeout,
                ..Limits::default()
            },
        })
    }

    /// Prints warnings, and what the flags of diagnosis ask for. On a cluster, the tasks have the stages.
    fn report(&self, session: &Session, lowered: &Lowered) -> Result<()> {
        match &self.session {
            None => self.compile.report(lowered)?,
            Some(_) => {
                output::warnings(&lowered.report.warnings);
                if self.compile.log_device_placement {
                    errln!("{}", session.placement_log().trim_end());
                }
            }
        }
        Ok(())
    }
}

/// Results of the run, and times in ns.
struct Ran {
    resources: Arc<Resources>,
    /// The model's declared outputs; none of a graph or an image.
    declared: Vec<Declared>,
    inputs: Inputs,
    outputs: Outputs,
    /// Time until the program was there: compiled, or opened.
    ready_ns: u64,
    is_image: bool,
    precision: Precision,
    run_ns: u64,
    /// Right answers and their total.
    accuracy: Option<(usize, usize)>,
    /// Number of parts that were compiled one by one.
    n_segments: usize,
    /// Differences that a lower precision makes, by output.
    changes: Vec<(String, Comparison)>,
}

/// Runs the verb.
pub fn run(args: &RunArgs) -> Result<()> {
    check_targets(args)?;
    let archive = args.expect.as_deref().map(load::archive).transpose()?;
    output::name_kernels(args.perf)?;
    let ran = match image::is_image(&args.model) {
        true => run_image(args)?,
        false => compile_and_run(args)?,
    };
    if let Some(path) = &args.outputs {
        npy::write_npz(path, ran.outputs.iter())?;
    }
    if let Some(path) = &args.save_state {
        ran.resources.save(path)?;
    }
    if args.json {
        print_json("run", ran.json(args));
    } else {
        ran.print();
    }
    for (name, change) in &ran.changes {
        let (name, precision) = (printable(name), ran.precision);
        noteln!("{name}: {precision} instead of the model's precision: {change}");
    }
    compare_with_expected(args, archive, &ran)
}

/// Errors when a file to write is one that the run reads. A file of state may be the one before and after.
fn check_targets(args: &RunArgs) -> Result<()> {
    let mut read = files_read(args);
    let check = |flag: &str, target: &Path, read: &[(&str, PathBuf)]| {
        let read: Vec<(&str, &Path)> = read.iter().map(|(what, p)| (*what, p.as_path())).collect();
        check_target(flag, target, &read)
    };
    if let Some(path) = &args.save_state {
        check("--save-state", path, &read)?;
    }
    let state = args.inputs.state.iter();
    read.extend(state.map(|p| ("the file of --state", p.clone())));
    if let Some(path) = &args.outputs {
        check_archive_name("--outputs", path)?;
        check("--outputs", path, &read)?;
    }
    Ok(())
}

/// The files that the run reads, but that of `--state`, each with what it is.
fn files_read(args: &RunArgs) -> Vec<(&'static str, PathBuf)> {
    let given = &args.inputs;
    let mut read = vec![("the input model", args.model.clone())];
    for (what, flags) in [
        ("the file of --input", &given.input),
        ("the file of --variable", &given.variable),
    ] {
        let pairs = flags.iter().filter_map(|flag| flag.split_once('='));
        read.extend(pairs.map(|(_, path)| (what, PathBuf::from(path))));
    }
    for (what, file) in [
        ("the file of --inputs", &given.inputs),
        ("the file of --labels", &args.labels),
        ("the file of --expect", &args.expect),
    ] {
        read.extend(file.iter().map(|path| (what, path.clone())));
    }
    read
}

fn compile_and_run(args: &RunArgs) -> Result<Ran> {
    let (session, options) = args.open()?;
    let mut options = args.inputs.seeded(options);
    let started = Instant::now();
    let source = args.compile.source(&args.model)?;
    let given = inputs::read(&args.inputs, &source)?;
    let source = given.closing(source, &mut options.dims)?;
    let compiled = session.compile(source.clone(), &options)?;
    output::warnings(compiled.model_warnings());
    let inputs = inputs::gather(&args.inputs, given, &compiled)?;
    inputs.announce(args.inputs.seed);
    if let Some(executable) = compiled.executable_for(&inputs.tensors)? {
        args.report(&session, &executable.lowered)?;
    }
    let ready_ns = started.elapsed().as_nanos() as u64;
    let (outputs, run_ns) = timed_run(args, &compiled, &inputs)?;
    let labels = args.labels.as_deref();
    let accuracy = labels.map(|path| accuracy(&outputs, path)).transpose()?;
    let changes = changes(source.clone(), compiled.config(), &inputs.tensors, &outputs)?;
    let declared = match &source {
        Source::Graph(_) => Vec::new(),
        Source::Onnx(m) => m.declared_outputs()?,
    };
    Ok(Ran {
        resources: compiled.resources().clone(),
        declared,
        n_segments: compiled.n_segments(),
        inputs,
        outputs,
        ready_ns,
        is_image: false,
        precision: options.precision,
        run_ns,
        accuracy,
        changes,
    })
}

/// Runs an image, which needs no compilation.
fn run_image(args: &RunArgs) -> Result<Ran> {
    if args.session.is_some() {
        let message = "an image holds machine code, which tasks of a cluster do not take";
        return Err(Error::invalid(message).hint("run the model that it was compiled from"));
    }
    args.trust.needs_session()?;
    let started = Instant::now();
    let ready = Ready::of(&args.model, &args.inputs, &args.compile)?;
    ready.inputs.announce(args.inputs.seed);
    let ready_ns = started.elapsed().as_nanos() as u64;
    let started = Instant::now();
    let results = within(args.inputs.timeout, || {
        ready.lanes.run(&ready.inputs.tensors)
    });
    let run_ns = started.elapsed().as_nanos() as u64;
    let results = results.map_err(|e| ready.inputs.explain(e.into()))?;
    let names = ready.program.outputs.iter().map(|o| o.name.clone());
    let outputs = Outputs::of(names.zip(results).collect());
    let labels = args.labels.as_deref();
    let accuracy = labels.map(|path| accuracy(&outputs, path)).transpose()?;
    Ok(Ran {
        resources: ready.resources,
        declared: Vec::new(),
        inputs: ready.inputs,
        outputs,
        ready_ns,
        is_image: true,
        precision: Precision::F32,
        run_ns,
        accuracy,
        n_segments: 1,
        changes: Vec::new(),
    })
}

/// The time of a model in segments is that of their compilation too.
fn timed_run(args: &RunArgs, compiled: &Compiled, inputs: &Inputs) -> Result<(Outputs, u64)> {
    let seen = RefCell::new(BTreeSet::new());
    let report = |number: usize, executable: &Executable| match seen.borrow_mut().insert(number) {
        true => args.compile.report_segment(number, &executable.lowered),
        false => Ok(()),
    };
    if args.initialise {
        compiled.for_inputs(&inputs.tensors)?.initialise()?;
    }
    let started = Instant::now();
    let run = || compiled.run_watched(&inputs.tensors, &report);
    let outputs = within(args.inputs.timeout, run);
    let run_ns = started.elapsed().as_nanos() as u64;
    let outputs = outputs.map_err(|e| inputs.explain_for(compiled, e))?;
    Ok((outputs, run_ns))
}

impl Ran {
    fn print(&self) {
        for (name, tensor) in self.outputs.iter() {
            outln!("{}", text(name, tensor));
        }
        if let Some(right_of_total) = self.accuracy {
            outln!("{}", accuracy_text(right_of_total));
        }
        let (compiled, ran) = (time_ns(self.ready_ns), time_ns(self.run_ns));
        match self.n_segments {
            _ if self.is_image => outln!("opened in {compiled}, ran in {ran}"),
            0 | 1 => outln!("compiled in {compiled}, ran in {ran}"),
            n => outln!(
                "compiled in {compiled}, ran in {ran}: {n} segments, most of them compiled on the way"
            ),
        }
    }

    fn json(&self, args: &RunArgs) -> Value {
        let outputs = self.outputs.iter().map(|(n, t)| summary::json(n, t));
        let changes = self.changes.iter().map(change_json);
        let accuracy = self
            .accuracy
            .map(|(right, n)| right as f64 / n.max(1) as f64);
        let is_random = !self.inputs.random.is_empty();
        json!({
            "compile_ns": (!self.is_image).then_some(self.ready_ns),
            "open_ns": self.is_image.then_some(self.ready_ns),
            "run_ns": self.run_ns,
            "segments": self.n_segments,
            "outputs": outputs.collect::<Vec<_>>(),
            "accuracy": accuracy,
            "precision": self.precision.to_string(),
            "changes": changes.collect::<Vec<_>>(),
            "seed": is_random.then_some(args.inputs.seed),
            "random_inputs": self.inputs.random,
        })
    }
}

/// Differences of the results of a lower precision from those of the model's own, by output; none in the model's own.
fn changes(
    source: Source,
    config: Config,
    inputs: &[Tensor],
    outputs: &Outputs,
) -> Result<Vec<(String, Comparison)>> {
    if config.options.precision == Precision::F32 {
        return Ok(Vec::new());
    }
    let exact = Options {
        precision: Precision::F32,
        ..config.options.clone()
    };
    // A session of its own: the model's variables have changed.
    let session = Session::new(config.settings)?;
    let exact = session.compile(source, &exact)?.run_ordered(inputs)?;
    let change = |((name, want), (_, got)): ((&str, &Tensor), (&str, &Tensor))| {
        (name.to_owned(), allclose(want, got, 0.0, 0.0))
    };
    Ok(exact.iter().zip(outputs.iter()).map(change).collect())
}

fn change_json((name, c): &(String, Comparison)) -> Value {
    json!({
        "name": name,
        "max_abs": c.max_abs_err,
        "max_rel": c.max_rel_err,
        "max_abs_of_scale": c.scaled_err(),
    })
}

/// Compares with the expected outputs of `--test-data` and `--expect`. Errors with `Mismatch` when they differ.
fn compare_with_expected(
    args: &RunArgs,
    archive: Option<Vec<(String, Tensor)>>,
    ran: &Ran,
) -> Result<()> {
    let mut pairs = Vec::new();
    if let Some(folder) = &args.inputs.test_data {
        for (i, (name, want)) in expected(folder, ran)?.into_iter().enumerate() {
            let got = expected_output(&ran.outputs, i, &name)?;
            pairs.push((name, want, got));
        }
    }
    if archive.as_ref().is_some_and(Vec::is_empty) {
        return Err(Error::invalid("--expect: the archive has no arrays"));
    }
    for (name, want) in archive.into_iter().flatten() {
        let got = ran.outputs.get(&name).ok_or_else(|| {
            let known = ran.outputs.iter().map(|(known, _)| known);
            Error::invalid(unknown("output", &name, known)).context("--expect")
        })?;
        pairs.push((name, as_declared(want, got.dtype())?, got));
    }
    let mut failed = Vec::new();
    for (name, want, got) in &pairs {
        let comparison = compare(args, want, got);
        if !args.json {
            outln!("{}: {comparison}", printable(name));
        }
        if !comparison.ok {
            failed.push(printable(name).into_owned());
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    let failed = failed.join(", ");
    let message = format!("outputs differ from the expected ones: {failed}");
    Err(Error::new(ErrorKind::Mismatch, message))
}

fn expected(folder: &Path, ran: &Ran) -> Result<Vec<(String, Tensor)>> {
    let expected = load::test_data(folder, "output", &ran.declared)?;
    let (want, got) = (expected.len(), ran.outputs.iter().count());
    if ran.declared.iter().any(Declared::is_list) && want != got {
        let message = format!("the model gives {got} tensors, expected {want}");
        return Err(Error::new(ErrorKind::Mismatch, message));
    }
    if expected.is_empty() && got > 0 {
        let folder = folder.display();
        let message = format!("{folder}: there is no output_0.pb to compare with");
        return Err(Error::invalid(message));
    }
    Ok(expected)
}

/// The output of a name; files without one stand for the outputs in order.
fn expected_output<'o>(outputs: &'o Outputs, i: usize, name: &str) -> Result<&'o Tensor> {
    let in_order = || outputs.iter().nth(i).map(|(_, t)| t);
    outputs.get(name).or_else(in_order).ok_or_else(|| {
        Error::invalid(format!(
            "expected output {name:?} is not an output of the model"
        ))
    })
}

fn compare(args: &RunArgs, want: &Tensor, got: &Tensor) -> Comparison {
    let atol = args.atol.unwrap_or_else(|| {
        let scale = allclose(want, got, args.rtol, 0.0).max_abs_expected;
        (1e-5 * scale).max(1e-7)
    });
    allclose(want, got, args.rtol, atol)
}

/// Right answers and total of the first output.
fn accuracy(outputs: &Outputs, path: &Path) -> Result<(usize, usize)> {
    Ok(accuracy_of(outputs.iter().next(), path)?)
}
