//! Programs on the CPU and the GPU together: runs by captured pieces against runs step by step, and
//! streams of runs against single ones.

use super::{Arguments, setup};
use gristmill::interp::compare::allclose;
use gristmill::ir::{Graph, GraphBuilder, ScalarOp};
use gristmill::place::{Objective, Pin};
use gristmill::testing::{Rng, Setup, random_tensor};
use gristmill::{DType, Result, Tensor};
use gristmill_runtime::exec::{ExecOptions, Executor, Lanes};
use std::time::{Duration, Instant};

/// Error that is allowed, relative to the scale of a tensor.
const TOLERANCE: f64 = 1e-4;
/// Layers before and after the tensor that crosses.
const LAYERS: usize = 12;

/// Rows in the file, columns of each layer, time that is spent, and runs of a stream: on a GPU, and with `--quick`.
struct Sizes {
    rows: usize,
    columns: usize,
    spent: Duration,
    n_runs: usize,
}

/// Both comparisons; false when one gives wrong results.
pub fn run(arguments: &Arguments) -> Result<bool> {
    let sizes = match arguments.quick {
        true => Sizes {
            rows: 4,
            columns: 16,
            spent: Duration::ZERO,
            n_runs: 8,
        },
        false => Sizes {
            rows: 256,
            columns: 1024,
            spent: Duration::from_secs(2),
            n_runs: 400,
        },
    };
    println!("partitions\tagainst the CPU\tp50\tp50 of the other");
    let graph = layers(&sizes)?;
    let inputs = [random_tensor(
        &mut Rng(9),
        DType::F32,
        &[sizes.rows, sizes.columns],
        false,
    )];
    let on_cpu = setup("cpu:1", arguments.device)?.compile(&graph)?;
    let expected = on_cpu.for_inputs(&inputs)?.run(&inputs)?.into_tensors();
    let mut good = true;
    // All on the GPU is one graph; with a part on the CPU it is captured in pieces.
    for (name, devices, pins) in [
        ("whole against step by step", "gpu:1", ".*=gpu:0"),
        (
            "pieces against step by step",
            "cpu:1,gpu:1",
            "^/(before|after)=gpu:0;^/middle=cpu:0",
        ),
    ] {
        let placed = pinned(setup(devices, arguments.device)?, pins)?;
        let [captured, steps] = [false, true].map(|step_by_step| {
            let executor = executor(&graph, &inputs, &placed, step_by_step)?;
            p50(&executor, &inputs, sizes.spent)
        });
        let ((time, found), (other, by_steps)) = (captured?, steps?);
        let (verdict, right) = verdict(&expected, &[found, by_steps]);
        good &= right;
        println!("{name}\t{verdict}\t{:.3} ms\t{:.3} ms", ms(time), ms(other));
    }
    good &= stream(arguments, &sizes, &graph, &inputs, &expected)?;
    Ok(good)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// `/before`, `/middle` and `/after`: products, a little element-wise work, products.
fn layers(sizes: &Sizes) -> Result<Graph> {
    let mut b = GraphBuilder::new("layers");
    let mut rng = Rng(10);
    let n = sizes.columns;
    let mut x = b.input("x", DType::F32, [sizes.rows, n]);
    // Such that results keep the scale of their operands.
    let scale = (1.0 / n as f64).sqrt();
    for i in 0..2 * LAYERS {
        if i == LAYERS {
            b.set_origin("/middle");
            x = b.map(ScalarOp::Sin, &[x])?;
        }
        b.set_origin(&format!(
            "/{}/{i}",
            if i < LAYERS { "before" } else { "after" }
        ));
        let values: Vec<f32> = (0..n * n).map(|_| (rng.normal() * scale) as f32).collect();
        let w = b.constant(Tensor::from_slice(&values, &[n, n])?);
        x = b.matmul(x, w)?;
        x = b.map(ScalarOp::Tanh, &[x])?;
    }
    b.output("y", x);
    b.finish()
}

fn pinned(setup: Setup, pins: &str) -> Result<Setup> {
    let pins = pins.split(';').map(Pin::parse).collect::<Result<_>>()?;
    Ok(setup.with(|o| o.pins = pins))
}

/// One executor of the model's program, with devices of its own.
fn executor(
    graph: &Graph,
    inputs: &[Tensor],
    setup: &Setup,
    step_by_step: bool,
) -> Result<Executor> {
    let program = setup
        .compile(graph)?
        .for_inputs(inputs)?
        .lowered
        .program
        .clone();
    Ok(Executor::new(
        program.clone(),
        &exec_options(&program, setup, step_by_step)?,
    )?)
}

fn exec_options(
    program: &gristmill_runtime::program::Program,
    setup: &Setup,
    step_by_step: bool,
) -> Result<ExecOptions> {
    Ok(ExecOptions {
        step_by_step,
        drivers: setup.session().drivers(program)?,
        ..ExecOptions::default()
    })
}

/// Median time of a run, after three that do not count, and its results.
fn p50(executor: &Executor, inputs: &[Tensor], spent: Duration) -> Result<(Duration, Vec<Tensor>)> {
    let mut outputs = executor.run(inputs)?;
    for _ in 0..2 {
        executor.run_into(inputs, &mut outputs)?;
    }
    let (mut times, started) = (Vec::new(), Instant::now());
    while times.len() < 5 || started.elapsed() < spent {
        let begun = Instant::now();
        executor.run_into(inputs, &mut outputs)?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok((times[times.len() / 2], outputs))
}

fn verdict(expected: &[Tensor], found: &[Vec<Tensor>]) -> (String, bool) {
    let errors = found
        .iter()
        .flat_map(|found| expected.iter().zip(found))
        .map(|(e, f)| {
            let c = allclose(e, f, 0.0, 0.0);
            if c.ok { 0.0 } else { c.scaled_err() }
        });
    let worst = errors.fold(0.0, f64::max);
    let good = worst <= TOLERANCE;
    (
        format!("{} ({worst:.1e})", if good { "good" } else { "WRONG" }),
        good,
    )
}

/// A stream of runs with the first layer on the CPU and all others on the GPU as stages: time from run to run, against the same one after the other.
fn stream(
    arguments: &Arguments,
    sizes: &Sizes,
    graph: &Graph,
    inputs: &[Tensor],
    expected: &[Tensor],
) -> Result<bool> {
    let objective = Objective::Throughput {
        samples: sizes.n_runs as u64,
    };
    let devices = setup("cpu:1,gpu:1", arguments.device)?;
    let placed = pinned(devices, ".*=gpu:0;^/before/0$=cpu:0")?;
    let placed = placed.with(|o| o.objective = objective);
    let executable = placed.compile(graph)?.for_inputs(inputs)?;
    let program = executable.lowered.program.clone();
    let n_lanes = executable.n_in_flight();
    let mut found = Vec::new();
    let mut periods = Vec::new();
    for n in [n_lanes, 1] {
        let lanes = Lanes::new(program.clone(), &exec_options(&program, &placed, false)?, n)?;
        let (period, outputs) = timed_stream(&lanes, n, inputs, sizes.n_runs)?;
        periods.push(period);
        found.extend(outputs);
    }
    let (verdict, good) = verdict(expected, &found);
    let [streamed, single] = [periods[0], periods[1]].map(ms);
    println!(
        "stream of {n_lanes} in flight against one at a time\t{verdict}\t{streamed:.3} ms\t{single:.3} ms"
    );
    Ok(good)
}

/// Time from run to run of a stream of `n` lanes, and the last results of each.
fn timed_stream(
    lanes: &Lanes,
    n: usize,
    inputs: &[Tensor],
    n_runs: usize,
) -> Result<(Duration, Vec<Vec<Tensor>>)> {
    (0..3 * n).try_for_each(|_| lanes.run(inputs).map(drop))?;
    let started = Instant::now();
    let share = n_runs.div_ceil(n);
    let runs = || (0..share).try_fold(Vec::new(), |_, _| lanes.run(inputs));
    let ended: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n).map(|_| scope.spawn(runs)).collect();
        threads.into_iter().map(|t| t.join()).collect()
    });
    let period = started.elapsed() / (share * n) as u32;
    let mut found = Vec::new();
    for outputs in ended {
        let panicked = |_| gristmill::Error::internal("a thread of the stream panicked");
        found.push(outputs.map_err(panicked)??);
    }
    Ok((period, found))
}
