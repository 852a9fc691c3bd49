//! `gristmill bench`: time repeated runs.

use super::args::CompileArgs;
use super::load::{self, InputFlags};
use super::{dump, outln, print_json};
use crate::Tensor;
use crate::calibrate::machine;
use crate::compiled::{Compiled, Executable, StepTime, compile};
use crate::cost::measured::MAX_RECENT;
use crate::cost::store;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::place::Objective;
use crate::units as format;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
        None => {
            load::inputs(
                &compiled,
                &InputFlags {
                    npz: args.inputs.as_deref(),
                    npy: &[],
                    seed: args.seed,
                },
            )?
            .0
        }
    };
    let executable = compiled.for_inputs(&inputs)?;
    let compile_ns = started.elapsed().as_nanos() as u64;
    executable.lowered.report.print_warnings();
    if args.compile.tune {
        eprint!("{}", executable.lowered.report.tuned_text());
    }
    args.compile
        .log_placement(&executable.lowered.placement, &executable.lowered.clusters);
    if let Some(dir) = &args.compile.dump_dir {
        dump::write_all(&executable.lowered, dir)?;
    }
    if args.compile.verbose > 0 {
        eprint!("{}", executable.lowered.report.text(args.compile.verbose));
    }
    executable.run(&inputs)?;
    if args.profile {
        executable.start_profile()?;
    }
    let Measured {
        mut times,
        total_ns,
    } = measure(args, &executable, &inputs)?;
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
            json!({ "p50_ns": at(0.5), "p90_ns": at(0.9), "p99_ns": at(0.99), "min_ns": times[0], "iters": times.len(), "in_flight": executable.n_in_flight(), "period_ns": total_ns / times.len() as u64, "load_ns": load_ns, "compile_ns": compile_ns, "peak_rss_bytes": rss }),
        );
    } else {
        outln!(
            "load {}  compile {}",
            format::time_ns(load_ns),
            format::time_ns(compile_ns)
        );
        outln!(
            "p50 {}  p90 {}  p99 {}  min {}  ({} runs)",
            format::time_ns(at(0.5)),
            format::time_ns(at(0.9)),
            format::time_ns(at(0.99)),
            format::time_ns(times[0]),
            times.len()
        );
        if let Some(stream) = executable.lowered.placement.stream {
            let (period, predicted) = (
                format::time_ns(total_ns / times.len() as u64),
                stream.period,
            );
            outln!(
                "one run every {period} with {} in flight, predicted {predicted}",
                executable.n_in_flight()
            );
        }
        outln!("peak memory {}", rss.map_or("unknown".into(), format::size));
    }
    Ok(())
}

/// Runs that are measured cluster by cluster.
const RECORDED_RUNS: usize = MAX_RECENT;
/// Steps over which another placement must repay its cost.
const HORIZON_STEPS: u64 = 100;

/// Adds the times of each cluster to those in the cache folder, and keeps there the placement that follows from them, if there is a choice; says on
/// stderr what it does.
fn record(
    compiled: &Compiled,
    executable: &Executable,
    inputs: &[Tensor],
    options: &Options,
) -> Result<()> {
    let mut new = crate::cost::Measured::default();
    let n_clusters = compiled.measure(inputs, RECORDED_RUNS, &mut new)?;
    let Some(folder) = store::folder() else {
        return Ok(());
    };
    let path = store::times_path(&folder);
    let (measured, _) = store::add_times(&path, &machine(), &new)?;
    eprintln!(
        "times of {n_clusters} clusters, {RECORDED_RUNS} runs each, added to {}",
        path.display()
    );
    // A plan is not the placer's to change, and other objectives are not decided by the time of a run.
    let is_open = options.plan.is_none() && options.objective == Objective::Latency;
    let Some(kept) = options
        .kept
        .as_deref()
        .filter(|_| options.devices.devices.len() > 1 && is_open)
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
        eprintln!(
            "{:>6.2} %  {:<28} {}",
            100.0 * s.ns as f64 / total,
            s.what,
            s.node
        );
    }
}

/// Times of runs in ns: of each, and from the start of the first to the end of the last.
struct Measured {
    times: Vec<u64>,
    total_ns: u64,
}

/// Measures after a warm-up of a tenth of the duration, with as many runs in flight as there can be.
fn measure(args: &BenchArgs, executable: &Executable, inputs: &[Tensor]) -> Result<Measured> {
    let duration = Duration::from_secs_f64(args.duration.clamp(0.0, 3600.0));
    let n_threads = executable.n_in_flight();
    let mut outputs: Vec<Vec<Tensor>> = (0..n_threads)
        .map(|_| Ok(executable.run(inputs)?.into_tensors()))
        .collect::<Result<_>>()?;
    let mut go = |most: Option<u64>, duration: Duration| -> Result<Vec<u64>> {
        let (begun, started) = (AtomicU64::new(0), Instant::now());
        // The first run is made whatever the duration is.
        let is_due = || {
            let earlier = begun.fetch_add(1, Ordering::Relaxed);
            most.map_or(earlier == 0 || started.elapsed() < duration, |n| {
                earlier < n
            })
        };
        let repeat = |outputs: &mut Vec<Tensor>| -> Result<Vec<u64>> {
            let mut times = Vec::new();
            while is_due() {
                let run = Instant::now();
                executable.run_into(inputs, outputs)?;
                times.push(run.elapsed().as_nanos() as u64);
            }
            Ok(times)
        };
        let [outputs] = &mut outputs[..] else {
            return side_by_side(&mut outputs, repeat);
        };
        repeat(outputs)
    };
    if args.iters.is_none() {
        go(None, duration / 10)?;
    }
    let started = Instant::now();
    let times = go(args.iters, duration)?;
    Ok(Measured {
        times,
        total_ns: started.elapsed().as_nanos() as u64,
    })
}

/// What `repeat` gives for each set of outputs, each on a thread of its own.
fn side_by_side(
    outputs: &mut [Vec<Tensor>],
    repeat: impl Fn(&mut Vec<Tensor>) -> Result<Vec<u64>> + Sync,
) -> Result<Vec<u64>> {
    let repeat = &repeat;
    std::thread::scope(|scope| {
        let threads: Vec<_> = outputs
            .iter_mut()
            .map(|own| scope.spawn(move || repeat(own)))
            .collect();
        let mut times = Vec::new();
        for thread in threads {
            let own = thread.join().unwrap_or_else(|_| {
                Err(Error::internal("a thread that runs the model panicked"))
            })?;
            times.extend(own);
        }
        Ok(times)
    })
}

/// Greatest resident size of this process so far, where the system tells.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
