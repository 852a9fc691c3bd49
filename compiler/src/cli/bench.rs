//! `gristmill bench`: time repeated runs.

use super::args::CompileArgs;
use super::load::{self, InputFlags};
use super::{dump, outln, print_json};
use crate::Tensor;
use crate::calibrate::machine;
use crate::compiled::{Compiled, Executable, StepTime, compile};
use crate::cost::measured::KEPT;
use crate::cost::store;
use crate::error::Result;
use crate::options::Options;
use crate::units as format;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arguments of `bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    #[command(flatten)]
    compile: CompileArgs,
    /// Seconds to measure, after the warm-up.
    #[arg(long, default_value_t = 2.0, value_name = "S")]
    duration: f64,
    /// Exactly so many runs instead.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Inputs by name from a NumPy archive; random ones otherwise.
    #[arg(long, value_name = "FILE.npz")]
    inputs: Option<PathBuf>,
    /// Inputs of an ONNX test-data directory.
    #[arg(long, value_name = "DIR", conflicts_with = "inputs")]
    test_data: Option<PathBuf>,
    /// Seed of random inputs.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Measure each kernel too: list the slowest, and keep the times, and the placement that pays by them, for processes to come.
    #[arg(long)]
    profile: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn bench(args: &BenchArgs) -> Result<()> {
    let options = args.compile.options()?;
    let started = Instant::now();
    let source = load::model(&args.model)?;
    let load_ns = started.elapsed().as_nanos() as u64;
    let started = Instant::now();
    let compiled = compile(source, &options)?;
    let inputs = match &args.test_data {
        Some(dir) => compiled.bind(load::test_data(dir, "input")?)?,
        None => load::inputs(&compiled, &InputFlags { npz: args.inputs.as_deref(), npy: &[], seed: args.seed })?.0,
    };
    let executable = compiled.for_inputs(&inputs)?;
    let compile_ns = started.elapsed().as_nanos() as u64;
    executable.lowered.report.print_warnings();
    args.compile.log_placement(&executable.lowered.placement, &executable.lowered.clusters);
    if let Some(dir) = &args.compile.dump_dir {
        dump::write_all(&executable.lowered, dir)?;
    }
    if args.compile.verbose > 0 {
        eprint!("{}", executable.lowered.report.text(args.compile.verbose));
    }
    let mut outputs = executable.run(&inputs)?.into_tensors();
    if args.profile {
        executable.start_profile()?;
    }
    let mut times = measure(args, &mut || executable.run_into(&inputs, &mut outputs))?;
    times.sort_unstable();
    let at = |q: f64| times[((times.len() - 1) as f64 * q).round() as usize];
    let rss = peak_rss_bytes();
    if args.profile {
        print_profile(&executable.profile());
        record(&compiled, &executable, &inputs, &options)?;
    }
    if args.json {
        print_json(
            "bench",
            json!({ "p50_ns": at(0.5), "p90_ns": at(0.9), "p99_ns": at(0.99), "min_ns": times[0], "iters": times.len(), "load_ns": load_ns, "compile_ns": compile_ns, "peak_rss_bytes": rss }),
        );
    } else {
        outln!("load {}  compile {}", format::time_ns(load_ns), format::time_ns(compile_ns));
        outln!(
            "p50 {}  p90 {}  p99 {}  min {}  ({} runs)",
            format::time_ns(at(0.5)),
            format::time_ns(at(0.9)),
            format::time_ns(at(0.99)),
            format::time_ns(times[0]),
            times.len()
        );
        outln!("peak memory {}", rss.map_or("unknown".into(), format::size));
    }
    Ok(())
}

/// Runs that are measured cluster by cluster.
const RECORDED_RUNS: usize = KEPT;
/// Steps over which another placement must repay its cost.
const HORIZON_STEPS: u64 = 100;

/// Adds the times of each cluster to those in the cache folder, and keeps there the placement that follows from them, if there is a choice; says on
/// stderr what it does.
fn record(compiled: &Compiled, executable: &Executable, inputs: &[Tensor], options: &Options) -> Result<()> {
    let mut measured = (*options.measured).clone();
    let n_clusters = compiled.measure(inputs, RECORDED_RUNS, &mut measured)?;
    let Some(folder) = store::folder() else { return Ok(()) };
    let path = store::times_path(&folder);
    store::save_times(&path, &machine(), &measured)?;
    eprintln!("times of {n_clusters} clusters, {RECORDED_RUNS} runs each, added to {}", path.display());
    // A plan is not the placer's to change.
    let Some(kept) = options.kept.as_deref().filter(|_| options.devices.devices.len() > 1 && options.plan.is_none())
    else {
        return Ok(());
    };
    let r = compiled.replan(inputs, &Arc::new(measured), HORIZON_STEPS)?;
    let verdict = match (r.adopted, r.n_moved) {
        (true, _) => "it is adopted from the next process on",
        (false, 0) => "nothing changes",
        (false, _) => "it is not adopted",
    };
    eprintln!(
        "by these times a step takes {} as placed; a placement that moves {} nodes takes {} and costs {} once: {verdict}",
        r.kept, r.n_moved, r.proposed, r.cost
    );
    let path = r.placement.keep(&executable.lowered.clusters, kept)?;
    eprintln!("the placement is kept in {}", path.display());
    Ok(())
}

/// The slowest steps, and time by kernel, to stderr: stdout may be JSON.
fn print_profile(steps: &[StepTime]) {
    let total = steps.iter().map(|s| s.ns).sum::<u64>().max(1) as f64;
    let mut slowest: Vec<&StepTime> = steps.iter().collect();
    slowest.sort_by_key(|s| std::cmp::Reverse(s.ns));
    for s in slowest.iter().take(30) {
        eprintln!("{:>6.2} %  {:<28} {}", 100.0 * s.ns as f64 / total, s.what, s.node);
    }
}

/// Times of single runs in ns, after a warm-up of a tenth of the duration.
fn measure(args: &BenchArgs, run: &mut dyn FnMut() -> Result<()>) -> Result<Vec<u64>> {
    let duration = Duration::from_secs_f64(args.duration.clamp(0.0, 3600.0));
    let warm = Instant::now();
    while args.iters.is_none() && warm.elapsed() < duration / 10 {
        run()?;
    }
    let mut times = Vec::new();
    let started = Instant::now();
    loop {
        let t = Instant::now();
        run()?;
        times.push(t.elapsed().as_nanos() as u64);
        let done = match args.iters {
            Some(n) => times.len() as u64 >= n,
            None => started.elapsed() >= duration,
        };
        if done {
            return Ok(times);
        }
    }
}

/// Greatest resident size of this process so far, where the system tells.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
