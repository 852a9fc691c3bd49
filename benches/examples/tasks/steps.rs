//! The time of an empty step: each task adds to a number of its own, and no tensor goes from task to task.

use crate::cluster::{Tasks, device, one_process};
use crate::median;
use gristmill::ir::{Graph, GraphBuilder, ScalarOp};
use gristmill::{Compiled, DType, Options, Result, Tensor};
use std::time::Instant;

/// Runs in one round.
const RUNS: u32 = 100;

fn empty(n: usize, device: impl Fn(usize) -> String) -> Result<Graph> {
    let mut b = GraphBuilder::new("empty");
    for i in 0..n {
        let x = b.input(&format!("x{i}"), DType::F32, [1]);
        let y = b.with_device(device(i).as_str(), |b| {
            let one = b.scalar(DType::F32, 1.0);
            b.map(ScalarOp::Add, &[x, one])
        })?;
        b.output(&format!("y{i}"), y);
    }
    b.finish()
}

/// Seconds of a run.
fn timed(program: &Compiled, inputs: &[Tensor]) -> Result<f64> {
    program.run_ordered(inputs)?;
    let started = Instant::now();
    for _ in 0..RUNS {
        program.run_ordered(inputs)?;
    }
    Ok(started.elapsed().as_secs_f64() / f64::from(RUNS))
}

/// Prints the time of a step by number of tasks, and of devices of one process.
pub fn measure(n_rounds: usize) -> Result<()> {
    let mut cases = Vec::new();
    let mut kept = Vec::new();
    for n in [1, 2, 4, 8, 16] {
        let tasks = Tasks::start(n as u32, None)?;
        let sessions = [one_process(n)?, tasks.session()?];
        let graphs = [empty(n, |i| format!("/cpu:{i}"))?, empty(n, device)?];
        let mut programs = Vec::new();
        for (session, graph) in sessions.iter().zip(&graphs) {
            programs.push(session.compile(graph, &Options::default())?);
        }
        let inputs = vec![Tensor::from_slice(&[1.0f32], &[1])?; n];
        cases.push((n, programs, inputs, [vec![], vec![]]));
        kept.push((tasks, sessions));
    }
    for _ in 0..n_rounds {
        for (_, programs, inputs, seconds) in &mut cases {
            for (program, seconds) in programs.iter().zip(seconds) {
                seconds.push(timed(program, inputs)?);
            }
        }
    }
    let mut last = None;
    for (n, _, _, [own, tasks]) in &cases {
        let [own, tasks] = [own, tasks].map(|seconds| median(seconds) * 1e6);
        let growth = last.map_or(String::new(), |last| {
            format!("  {:.2} of half as many", tasks / last)
        });
        println!("{n:>2}  one process {own:8.1} us  tasks {tasks:8.1} us{growth}");
        last = Some(tasks);
    }
    Ok(())
}
