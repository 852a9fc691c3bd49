//! Mirrored training on 1 to all GPUs of a machine described by a file: the predicted step beside a step of the executor.
//!
//! `scaling TARGET.toml [MODEL] [--batch N]`, with the models of the example `machines` (`resnet50` and `bert`) and N
//! examples per GPU (32). Kernels wait for as long as they are predicted to take, and links take their time for each
//! tensor, so that the machine need not be here: measured are the executor, its transfers, and the order of both. All times
//! are 16 times as long as predicted, and tensors are 256 times smaller on links so much slower; else eight devices would wait for
//! two cores to copy bytes that their links would carry; the table has them divided by 16. The row
//! of N GPUs has the step predicted and measured (least of three), their ratio, and the speed-up over one GPU, predicted
//! and measured.

#[path = "machines.rs"]
#[allow(dead_code)]
mod machines;

use gristmill::command_line::InputShapes;
use gristmill::cost::{Bytes, LinkProfile, Nanos};
use gristmill::ir::Graph;
use gristmill::place::Target;
use gristmill::testing::emulate::Emulator;
use gristmill::{DataParallel, Deal, DeviceName, Error, Options, Result, Session, Settings};
use gristmill_runtime::device::DeviceKind;
use gristmill_solver::{Payload, Problem};

/// Factor of all times.
const SLOWER: u64 = 16;
/// Divisor of the bytes of tensors and of the bandwidth of links.
const SMALLER: u64 = 256;
/// Runs of a step.
const N_RUNS: usize = 3;

fn main() {
    if let Err(e) = run() {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn run() -> Result<()> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let each = machines::examples_per_gpu(&mut words)?;
    let Some(path) = words.first() else {
        return Err(Error::invalid("scaling TARGET.toml [MODEL] [--batch N]"));
    };
    let target = machines::target(path)?;
    let names: Vec<&str> = match words.len() {
        1 => vec!["resnet50", "bert"],
        _ => words[1..].iter().map(String::as_str).collect(),
    };
    println!("{}", target.name);
    for name in names {
        println!(
            "\n| {name} on GPUs | predicted ms | measured ms | predicted / measured | speed-up predicted | measured |"
        );
        println!("|---|---|---|---|---|---|");
        let step = machines::step(name)?;
        let mut first = None;
        for n in 1..=gpus(&target).len() {
            let found = times(&target, &step, n, each)?;
            let one = *first.get_or_insert(found);
            let speed_up = |i: usize| n as f64 * one[i] / found[i];
            println!(
                "| {n} | {:.2} | {:.2} | {:.3} | {:.2} | {:.2} |",
                found[0],
                found[1],
                found[0] / found[1],
                speed_up(0),
                speed_up(1)
            );
        }
    }
    Ok(())
}

fn gpus(target: &Target) -> Vec<DeviceName> {
    let devices = target.devices.devices.iter();
    let own = devices.filter(|d| d.name.kind == DeviceKind::Gpu);
    own.map(|d| d.name.clone()).collect()
}

/// Milliseconds of a step on so many GPUs, predicted and measured.
fn times(target: &Target, step: &Graph, n: usize, each: usize) -> Result<[f64; 2]> {
    let session = Session::new(&Settings {
        devices: target.devices.clone(),
        ..Settings::default()
    })?;
    let options = Options {
        data_parallel: Some(DataParallel {
            devices: gpus(target)[..n].to_vec(),
            servers: Vec::new(),
            deal: Deal::default(),
            shards: 0,
            parts: 1,
            sums: String::new(),
        }),
        ..Options::default()
    };
    let program = session.compile(step, &options)?;
    let extents = |ty: &gristmill::ir::Type| {
        let own = ty.shape.iter();
        own.map(|d| d.as_usize().unwrap_or(each * n)).collect()
    };
    let planned = program.plan_shapes(&InputShapes {
        shapes: program.inputs().iter().map(|(_, ty)| extents(ty)).collect(),
        ..InputShapes::default()
    })?;
    let solved = planned.placement.solved;
    let solved = solved.ok_or_else(|| Error::internal("a plan without a problem"))?;
    let timeline = &solved.solution.timeline;
    let emulator = Emulator::new(&slowed(&solved.problem)?, timeline)?;
    let mut measured = f64::INFINITY;
    for _ in 0..N_RUNS {
        measured = measured.min(emulator.run()?.makespan.0 as f64);
    }
    let measured = measured / SLOWER as f64;
    Ok([timeline.makespan.0 as f64 / 1e6, measured / 1e6])
}

/// The problem with longer times and smaller tensors.
fn slowed(problem: &Problem) -> Result<Problem> {
    let mut parts = problem.parts();
    for cost in parts.tasks.iter_mut().flat_map(|task| &mut task.cost) {
        *cost = Nanos(cost.0.saturating_mul(SLOWER));
    }
    for (tensor, _) in &mut parts.tensors {
        if let Payload::Bytes(bytes) = &mut tensor.payload {
            *bytes = Bytes(bytes.0.div_ceil(SMALLER));
        }
    }
    parts.links = parts.links.map(|link| LinkProfile {
        latency: Nanos(link.latency.0 * SLOWER),
        bytes_per_second: link.bytes_per_second / (SMALLER * SLOWER),
    });
    Problem::new(parts).map_err(|e| Error::internal(format!("{e:?}")))
}
