//! One run: inputs from a file, outputs as a summary and to a file.

use crate::args::Args;
use crate::json::{Json, map};
use crate::load::load;
use crate::print_json;
use gristmill_runtime::command::accuracy::{self, accuracy};
use gristmill_runtime::command::given::{
    Given, check_archive_name, check_names, check_ranks, check_target, checked, has_shape,
    n_elements, no_code, only, type_text,
};
use gristmill_runtime::command::output;
use gristmill_runtime::command::state::{self, StateFlags, variables};
use gristmill_runtime::command::summary::{self, Statistics};
use gristmill_runtime::cpu::n_cores;
use gristmill_runtime::exec::{ExecOptions, Executor, Pool, Resources};
use gristmill_runtime::image::Image;
use gristmill_runtime::printable::printable;
use gristmill_runtime::program::{IoSpec, Program};
use gristmill_runtime::units::time_ns;
use gristmill_runtime::{Error, Tensor, npy};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A program that is ready to run, and its inputs.
pub struct Ready {
    pub executor: Executor,
    pub resources: Arc<Resources>,
    pub inputs: Vec<Tensor>,
    /// Time from the start.
    pub open_ns: u64,
}

impl Ready {
    /// The program for the inputs of flags, with threads and variables.
    pub fn of(args: &Args) -> Result<Ready, Error> {
        let started = Instant::now();
        let image = load()?;
        let given = match &args.inputs {
            Some(path) => npy::read_npz(path)?,
            None => Vec::new(),
        };
        let program = chosen(&image, &given)?.clone();
        let inputs = in_order(&program, &given)?;
        let resources = Arc::new(Resources::default());
        let flags = StateFlags {
            state: args.state.as_ref(),
            variables: &args.variables,
        };
        let missing = state::set(&flags, &variables(&program), &resources)?;
        if let (Some(path), false) = (&args.state, missing.is_empty()) {
            output::message(&state::missing_text(path, &missing));
        }
        let options = ExecOptions {
            pool: Arc::new(Pool::new(args.threads.unwrap_or_else(n_cores))),
            resources,
            ..ExecOptions::validated()
        };
        Ok(Ready {
            executor: Executor::new(program, &options)?,
            resources: options.resources,
            inputs,
            open_ns: started.elapsed().as_nanos() as u64,
        })
    }

    /// Runs once.
    pub fn run(&self) -> Result<Vec<Tensor>, Error> {
        self.executor.run(&self.inputs).map_err(explain)
    }
}

/// An error of a run, with the remedy where there is one.
pub fn explain(e: Error) -> Error {
    let text = e.to_string();
    match text.ends_with("is read before it was assigned") {
        true => Error::new(
            e.kind(),
            format!(
                "{text} (try: --variable NAME=FILE.npy or --state FILE.safetensors gives it a value)"
            ),
        ),
        false => e,
    }
}

/// The program for the shapes of some tensors; the one of the largest inputs where several fit.
fn chosen<'i>(image: &'i Image, given: &Given) -> Result<&'i Arc<Program>, Error> {
    check_names(image, given)?;
    check_missing(image, given)?;
    check_ranks(image, given)?;
    let fits = |p: &&Arc<Program>| p.inputs.iter().all(|spec| has_shape(spec, given));
    let fitting = image.programs().iter().filter(fits);
    let largest = fitting.max_by_key(|p| n_elements(p));
    largest.ok_or_else(|| Error::invalid(no_code(image, std::iter::empty(), given)))
}

/// Errors with the inputs that nothing gives, as each variant has them.
fn check_missing(image: &Image, given: &Given) -> Result<(), Error> {
    let is_missing = |name: &str| given.iter().all(|(known, _)| known != name);
    let types = |p: &Arc<Program>| {
        let missing = p.inputs.iter().filter(|i| is_missing(&i.name));
        let types = missing.map(|i| format!("{}: {}", printable(&i.name), type_text(i)));
        types.collect::<Vec<_>>().join(", ")
    };
    let variants: Vec<String> = image.programs().iter().map(types).collect();
    match variants.iter().all(String::is_empty) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "inputs are missing: {} (try: --inputs FILE.npz)",
            variants.join("; or ")
        ))),
    }
}

fn in_order(program: &Program, given: &Given) -> Result<Vec<Tensor>, Error> {
    let inputs = program.inputs.iter();
    let tensor = |spec: &IoSpec| match only(&spec.name, given)? {
        Some(tensor) => checked(spec, tensor),
        None => Err(Error::invalid(format!("input {:?} is missing", spec.name))),
    };
    inputs.map(tensor).collect()
}

/// Errors when a file to write is this executable or one that the run reads. A file of state may be the one before and after.
fn check_targets(args: &Args) -> Result<(), Error> {
    let own = std::env::current_exe().unwrap_or_default();
    let variables = args.variables.iter().filter_map(|v| v.split_once('='));
    let mut read: Vec<(&str, &Path)> = vec![("the executable", &own)];
    read.extend(variables.map(|(_, path)| ("the file of --variable", Path::new(path))));
    let inputs = args.inputs.iter().map(|p| ("the file of --inputs", p));
    let labels = args.labels.iter().map(|p| ("the file of --labels", p));
    read.extend(
        inputs
            .chain(labels)
            .map(|(what, path)| (what, path.as_path())),
    );
    if let Some(path) = &args.save_state {
        check_target("--save-state", path, &read)?;
    }
    read.extend(
        args.state
            .iter()
            .map(|p| ("the file of --state", p.as_path())),
    );
    match &args.outputs {
        Some(path) => {
            check_archive_name("--outputs", path)?;
            check_target("--outputs", path, &read)
        }
        None => Ok(()),
    }
}

/// Runs the model once.
pub fn run(args: &Args) -> Result<(), Error> {
    check_targets(args)?;
    let ready = Ready::of(args)?;
    let started = Instant::now();
    let results = ready.run()?;
    let run_ns = started.elapsed().as_nanos() as u64;
    let specs = ready.executor.program().outputs.iter();
    let names = specs.map(|o| o.name.as_str());
    let outputs: Vec<(&str, &Tensor)> = names.zip(&results).collect();
    let labels = args.labels.as_ref();
    let right = labels.map(|path| accuracy(outputs.first().copied(), path));
    let right = right.transpose()?;
    if let Some(path) = &args.outputs {
        npy::write_npz(path, outputs.iter().copied())?;
    }
    if let Some(path) = &args.save_state {
        ready.resources.save(path)?;
    }
    if args.json {
        print_json("run", to_json(&ready, run_ns, &outputs, right));
        return Ok(());
    }
    for (name, tensor) in &outputs {
        output::text(&summary::text(name, tensor));
    }
    if let Some(right) = right {
        output::text(&accuracy::text(right));
    }
    let (opened, ran) = (time_ns(ready.open_ns), time_ns(run_ns));
    output::text(&format!("opened in {opened}, ran in {ran}"));
    Ok(())
}

fn to_json(
    ready: &Ready,
    run_ns: u64,
    outputs: &[(&str, &Tensor)],
    right: Option<(usize, usize)>,
) -> Vec<(String, Json)> {
    let accuracy = right.map(|(right, n)| right as f64 / n.max(1) as f64);
    let outputs = outputs.iter().map(|(name, t)| statistics(name, t));
    let members = [
        ("open_ns", Json::from(ready.open_ns)),
        ("run_ns", run_ns.into()),
        ("outputs", Json::List(outputs.collect())),
        ("accuracy", accuracy.into()),
    ];
    members.map(|(name, value)| (name.to_owned(), value)).into()
}

fn statistics(name: &str, t: &Tensor) -> Json {
    let s = Statistics::of(t);
    map([
        ("name", name.into()),
        ("dtype", t.dtype().name().into()),
        ("shape", t.shape().to_vec().into()),
        ("min", s.min.into()),
        ("mean", s.mean.into()),
        ("max", s.max.into()),
        ("first", s.first.into()),
        ("nan", s.n_nan.into()),
        ("infinite", s.n_infinite.into()),
    ])
}
