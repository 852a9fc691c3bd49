//! `gristmill bench`: time repeated runs.

use crate::args::CompileArgs;
use crate::heading;
use crate::image::{self, Ready};
use crate::inputs::{self, InputArgs, Inputs};
use crate::output::{self, errln, noteln, outln};
use crate::watchdog::within;
use crate::{parse, print_json};
use clap::Args;
use gristmill::Measured;
use gristmill::Options;
use gristmill::Tensor;
use gristmill::calibrate::machine;
use gristmill::command_line::Fallback;
use gristmill::cost::measured::MAX_RECENT;
use gristmill::cost::store;
use gristmill::pipeline::Config;
use gristmill::place::{Objective, Replacement};
use gristmill::{ClusterTime, Nanos, StepTime};
use gristmill::{Compiled, Executable};
use gristmill::{Error, Result};
use gristmill_runtime::command::times::{Times, Until, peak_rss_bytes};
use gristmill_runtime::exec::Lanes;
use gristmill_runtime::units::{plural, printable, size, time_ns};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arguments of `bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    #[command(flatten)]
    inputs: InputArgs,
    #[command(flatten)]
    compile: CompileArgs,
    /// Seconds to measure after the warm-up.
    #[arg(long, default_value = "2", value_name = "S", value_parser = parse::seconds, help_heading = heading::MEASUREMENT)]
    duration: Duration,
    /// Concurrent callers of the model, each on its own thread.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000), help_heading = heading::MEASUREMENT)]
    streams: Option<u16>,
    /// Measure exactly this number of runs instead of a duration.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), help_heading = heading::MEASUREMENT)]
    iters: Option<u64>,
    /// Measure each kernel too: list the slowest, and cache the times and a better placement for later processes.
    #[arg(long, help_heading = heading::MEASUREMENT)]
    profile: bool,
    /// Write kernel names for `perf report`, and print the path of their file.
    #[arg(long, help_heading = heading::DIAGNOSTICS)]
    perf: bool,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// A model that is ready to run.
struct Prepared {
    model: Model,
    inputs: Inputs,
    /// Number of callers that the user asked for.
    streams: Option<usize>,
    load_ns: u64,
    compile_ns: u64,
}

/// The program that runs, and its origin.
enum Model {
    /// A model that was compiled now.
    Compiled {
        compiled: Box<Compiled>,
        /// The one program; none where a run decides extents.
        executable: Option<Arc<Executable>>,
    },
    /// A program of an image.
    Image(Box<Lanes>),
}

/// Runs the verb.
pub fn bench(args: &BenchArgs) -> Result<()> {
    output::name_kernels(args.perf)?;
    let p = prepare(args)?;
    if let Some(executable) = p.executable() {
        args.compile.report(&executable.lowered)?;
        if args.compile.tune {
            errln!("{}", executable.lowered.report.tuned_text().trim_end());
        }
    }
    let times = measure(args, &p).map_err(|e| p.explain(e))?;
    let rss = peak_rss_bytes();
    if args.profile {
        print_profile(&p.whole()?.profile());
    }
    if args.json {
        print_json("bench", json(&times, args, &p, rss));
    } else {
        print(&times, &p, rss);
    }
    if args.profile { keep(&p) } else { Ok(()) }
}

fn prepare(args: &BenchArgs) -> Result<Prepared> {
    if image::is_image(&args.model) {
        return open_image(args);
    }
    let (session, options) = args.compile.open()?;
    let mut options = Options {
        max_in_flight: args.streams.map(usize::from),
        ..args.inputs.seeded(options)
    };
    let started = Instant::now();
    let source = args.compile.source(&args.model)?;
    let load_ns = started.elapsed().as_nanos() as u64;
    let started = Instant::now();
    let given = inputs::read(&args.inputs, &source)?;
    let source = given.closing(source, &mut options.dims)?;
    let compiled = session.compile(source, &options)?;
    output::warnings(compiled.model_warnings());
    let inputs = inputs::gather(&args.inputs, given, &compiled)?;
    let executable = match args.profile {
        true => Some(compiled.for_inputs(&inputs.tensors)?),
        false => compiled.executable_for(&inputs.tensors)?,
    };
    Ok(Prepared {
        model: Model::Compiled {
            compiled: Box::new(compiled),
            executable,
        },
        inputs,
        streams: args.streams.map(usize::from),
        load_ns,
        compile_ns: started.elapsed().as_nanos() as u64,
    })
}

fn open_image(args: &BenchArgs) -> Result<Prepared> {
    if args.profile {
        let message = "--profile is for models: the clusters of an image are not known any more";
        return Err(Error::unsupported(message).hint("the model that it was made from"));
    }
    let started = Instant::now();
    let ready = Ready::of(&args.model, &args.inputs, &args.compile)?;
    Ok(Prepared {
        model: Model::Image(Box::new(ready.lanes)),
        inputs: ready.inputs,
        streams: args.streams.map(usize::from),
        load_ns: started.elapsed().as_nanos() as u64,
        compile_ns: 0,
    })
}

impl Prepared {
    /// An error of a run, with its cause in the inputs where that is found.
    fn explain(&self, e: Error) -> Error {
        match &self.model {
            Model::Compiled { compiled, .. } => self.inputs.explain_for(compiled, e),
            Model::Image(_) => self.inputs.explain(e),
        }
    }

    fn compiled(&self) -> Option<&Compiled> {
        match &self.model {
            Model::Compiled { compiled, .. } => Some(compiled),
            Model::Image(_) => None,
        }
    }

    fn executable(&self) -> Option<&Arc<Executable>> {
        match &self.model {
            Model::Compiled { executable, .. } => executable.as_ref(),
            Model::Image(_) => None,
        }
    }

    /// Threads that run the model at the same time.
    fn n_callers(&self) -> usize {
        let in_flight = self.executable().map_or(1, |e| e.n_in_flight());
        self.streams.unwrap_or(in_flight)
    }

    fn whole(&self) -> Result<&Arc<Executable>> {
        let executable = self.executable();
        executable.ok_or_else(|| Error::internal("a model in segments has no one program"))
    }

    fn run(&self) -> Result<Vec<Tensor>> {
        match &self.model {
            Model::Compiled { compiled, .. } => {
                Ok(compiled.run_ordered(&self.inputs.tensors)?.into_tensors())
            }
            Model::Image(lanes) => Ok(lanes.run(&self.inputs.tensors)?),
        }
    }

    /// Runs into the results of an earlier run where the model is one program.
    fn run_into(&self, outputs: &mut [Tensor]) -> Result<()> {
        let inputs = &self.inputs.tensors;
        match (&self.model, self.executable()) {
            (Model::Image(lanes), _) => Ok(lanes.run_into(inputs, outputs)?),
            (_, Some(executable)) => executable.run_into(inputs, outputs),
            (_, None) => self.run().map(drop),
        }
    }
}

/// Ops that run in generated loops although they have a kernel.
fn fallbacks(executable: &Executable) -> Vec<Value> {
    let report = &executable.lowered.report;
    let row = |f: &Fallback| {
        json!({
            "node": f.node,
            "op": f.op,
            "device": f.device,
            "why": f.why,
            "loss_ns": f.loss.0,
        })
    };
    report.fallbacks.iter().map(row).collect()
}

fn print(times: &Times, p: &Prepared, rss: Option<u64>) {
    let (load, compile) = (time_ns(p.load_ns), time_ns(p.compile_ns));
    match p.model {
        Model::Compiled { .. } => outln!("load {load}  compile {compile}"),
        Model::Image(_) => outln!("opened in {load}"),
    }
    outln!("{}", times.text());
    if let Some(n) = p.streams {
        let (rate, callers) = (times.per_second(), plural(n, "caller"));
        outln!("{rate:.1} inferences/s with {callers}");
    }
    if let Some(compiled) = p.compiled() {
        print_parts(compiled, p.executable().is_some());
    }
    let stream = p.executable().map(|e| e.lowered.placement.stream);
    if let Some(stream) = stream.flatten() {
        let (period, n) = (time_ns(times.period()), p.n_callers());
        let predicted = stream.period;
        outln!("one run every {period} with {n} in flight, predicted {predicted}");
    }
    outln!("peak memory {}", rss.map_or("unknown".into(), size));
}

fn json(times: &Times, args: &BenchArgs, p: &Prepared, rss: Option<u64>) -> Value {
    let is_random = !p.inputs.random.is_empty();
    json!({
        "p50_ns": times.quantile(0.5),
        "p90_ns": times.quantile(0.9),
        "p99_ns": times.quantile(0.99),
        "min_ns": times.sorted[0],
        "iters": times.sorted.len(),
        "in_flight": p.n_callers(),
        "inferences_per_s": times.per_second(),
        "period_ns": times.period(),
        "load_ns": p.load_ns,
        "compile_ns": p.compiled().map(|_| p.compile_ns),
        "peak_rss_bytes": rss,
        "seed": is_random.then_some(args.inputs.seed),
        "random_inputs": p.inputs.random,
        "segments": p.compiled().map_or(1, Compiled::n_segments),
        "shape_inputs": p.compiled().map(Compiled::value_inputs).unwrap_or(&BTreeSet::new()),
        "specialisations": p.compiled().map_or(1, Compiled::specialisations),
        "fallbacks": p.executable().map(|e| fallbacks(e)).or(p.compiled().is_none().then(Vec::new)),
    })
}

/// Says where the contents of inputs decide shapes, and where the data decides extents.
fn print_parts(compiled: &Compiled, is_whole: bool) {
    for name in compiled.value_inputs() {
        let n = plural(compiled.specialisations(), "specialisation");
        outln!("the contents of {name:?} decide shapes, and are a part of the code: {n}");
    }
    if !is_whole {
        let n = plural(compiled.n_segments(), "segment");
        outln!("{n}: the data decides extents between them");
    }
}

/// Runs that are measured cluster by cluster.
const RECORDED_RUNS: usize = MAX_RECENT;
/// Steps over which another placement must repay its cost.
const HORIZON_STEPS: u64 = 100;

/// Adds the times of each cluster to those in the cache folder, and keeps there the placement that follows from them, if there is a choice.
fn keep(p: &Prepared) -> Result<()> {
    let mut new = Measured::default();
    let clusters = p
        .compiled()
        .ok_or_else(|| Error::internal("the clusters of an image are not known"))?
        .measure(&p.inputs.tensors, RECORDED_RUNS, &mut new)?;
    print_predicted(&clusters);
    let Some(folder) = store::folder() else {
        output::warning("there is no cache folder: the times of clusters are not kept");
        errln!("(try: GRISTMILL_CACHE_DIR with a folder that can be written)");
        return Ok(());
    };
    let path = store::times_path(&folder);
    let (measured, warning) = store::add_times(&path, &machine(), &new)?;
    warning.iter().for_each(output::warning);
    let path = path.display();
    let n_clusters = clusters.len();
    noteln!("times of {n_clusters} clusters, {RECORDED_RUNS} runs each, added to {path}");
    match placements_folder(p.compiled()) {
        Some(placements) => keep_placement(p, measured, placements),
        None => Ok(()),
    }
}

/// The folder of kept placements where the placer decides, by the time of a run.
fn placements_folder(compiled: Option<&Compiled>) -> Option<&Path> {
    let Config { settings, options } = compiled?.config();
    let has_choice = settings.devices.devices.len() > 1 && options.plan.is_none();
    let is_decided_by_time = options.objective == Objective::Latency;
    let folder = settings.kept.as_deref()?;
    (has_choice && is_decided_by_time).then_some(folder)
}

fn keep_placement(p: &Prepared, measured: Measured, folder: &Path) -> Result<()> {
    let (inputs, measured) = (&p.inputs.tensors, Arc::new(measured));
    let Some(compiled) = p.compiled() else {
        return Ok(());
    };
    let replacement = compiled.replan(inputs, &measured, HORIZON_STEPS)?;
    print_replacement(&replacement);
    let clusters = &p.whole()?.lowered.clusters;
    let path = replacement.placement.keep(clusters, folder)?;
    noteln!("the placement is kept in {}", path.display());
    Ok(())
}

fn print_replacement(r: &Replacement) {
    let verdict = match (r.adopted, r.n_moved) {
        (true, _) => "it is adopted from the next process on",
        (false, 0) => "nothing changes",
        (false, _) => "it is not adopted",
    };
    errln!(
        "by these times a step takes {} as placed; a placement that moves {} takes {} and costs {} once: {verdict}",
        r.kept,
        plural(r.n_moved, "node"),
        r.proposed,
        r.cost
    );
}

/// Number of steps that a profile lists.
const N_SLOWEST: usize = 30;

/// Prints the slowest steps on standard error, since standard output may be JSON.
fn print_profile(steps: &[StepTime]) {
    let total = steps.iter().map(|s| s.ns).sum::<u64>().max(1) as f64;
    let mut slowest: Vec<&StepTime> = steps.iter().collect();
    slowest.sort_by_key(|s| std::cmp::Reverse(s.ns));
    for s in slowest.iter().take(N_SLOWEST) {
        let percent = 100.0 * s.ns as f64 / total;
        errln!("{percent:>6.2} %  {:<28} {}", s.what, printable(&s.node));
    }
    let kinds = by_kind(steps);
    let parts = kinds.iter().take(N_KINDS).map(|(kind, n, ns)| {
        let percent = 100.0 * *ns as f64 / total;
        format!("{percent:.1} % {n} {kind}")
    });
    errln!("by kind: {}", parts.collect::<Vec<_>>().join(", "));
}

/// Number of clusters listed beside their predictions.
const N_COMPARED: usize = 12;

/// Prints the clusters whose predictions are furthest from the measured times, and the sums of all.
fn print_predicted(clusters: &[ClusterTime]) {
    if clusters.is_empty() {
        return;
    }
    let mut furthest: Vec<&ClusterTime> = clusters.iter().collect();
    furthest.sort_by_key(|c| std::cmp::Reverse(c.predicted.0.abs_diff(c.measured.0)));
    let sum = |of: fn(&ClusterTime) -> Nanos| clusters.iter().map(of).sum::<Nanos>();
    let (predicted, measured) = (sum(|c| c.predicted), sum(|c| c.measured));
    errln!(
        "{:>9}  {:>9}  by rates alone, the largest differences first",
        "predicted",
        "measured"
    );
    for c in furthest.iter().take(N_COMPARED) {
        let (predicted, measured) = (c.predicted.to_string(), c.measured.to_string());
        errln!(
            "{predicted:>9}  {measured:>9}  {:<28} {}",
            c.class,
            printable(&c.node)
        );
    }
    errln!(
        "{:>9}  {:>9}  all",
        predicted.to_string(),
        measured.to_string()
    );
}

/// Kinds of steps that a profile sums up.
const N_KINDS: usize = 10;

/// Kind, number of steps and time, the slowest first. A kind is a kernel of the library, or the last word of a step's name.
fn by_kind(steps: &[StepTime]) -> Vec<(&str, usize, u64)> {
    let mut sums: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for s in steps {
        let kernel = s.what.find("gm_").map(|at| &s.what[at..]);
        let kind = kernel.or(s.what.rsplit('_').next()).unwrap_or(&s.what);
        let (n, ns) = sums.entry(kind).or_default();
        *n += 1;
        *ns += s.ns;
    }
    let mut kinds: Vec<_> = sums
        .into_iter()
        .map(|(kind, (n, ns))| (kind, n, ns))
        .collect();
    kinds.sort_by_key(|&(_, _, ns)| std::cmp::Reverse(ns));
    kinds
}

/// Measures after a warm-up of a tenth of the duration, with as many runs in flight as there can be.
fn measure(args: &BenchArgs, p: &Prepared) -> Result<Times> {
    let mut lanes = warmed_up(args, p)?;
    let started = Instant::now();
    let until = match args.iters {
        Some(n) => Until::count(n),
        None => Until::elapsed(args.duration),
    };
    let mut sorted = run_lanes(p, &mut lanes, &until)?;
    let total = started.elapsed().as_nanos() as u64;
    sorted.sort_unstable();
    Ok(Times { sorted, total })
}

/// Results of first runs, which later ones overwrite, for each run that can be in flight.
fn warmed_up(args: &BenchArgs, p: &Prepared) -> Result<Vec<Vec<Tensor>>> {
    within(args.inputs.timeout, || p.run())?;
    if args.profile {
        p.whole()?.start_profile()?;
    }
    let mut lanes = Vec::new();
    for _ in 0..p.n_callers() {
        lanes.push(p.run()?);
    }
    if args.iters.is_none() {
        let until = Until::elapsed(args.duration / 10);
        run_lanes(p, &mut lanes, &until)?;
    }
    Ok(lanes)
}

/// Times of repeated runs, in each lane on a thread of its own.
fn run_lanes(p: &Prepared, lanes: &mut [Vec<Tensor>], until: &Until) -> Result<Vec<u64>> {
    if let [lane] = lanes {
        return run_lane(p, lane, until);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = lanes
            .iter_mut()
            .map(|lane| scope.spawn(move || run_lane(p, lane, until)))
            .collect();
        let mut times = Vec::new();
        for thread in threads {
            let panicked = |_| Err(Error::internal("a thread that runs the model panicked"));
            times.extend(thread.join().unwrap_or_else(panicked)?);
        }
        Ok(times)
    })
}

/// Times of repeated runs, one after the other, into the same tensors.
fn run_lane(p: &Prepared, outputs: &mut [Tensor], until: &Until) -> Result<Vec<u64>> {
    let mut times = Vec::new();
    while until.begins_another() {
        let started = Instant::now();
        p.run_into(outputs)?;
        times.push(started.elapsed().as_nanos() as u64);
    }
    Ok(times)
}
