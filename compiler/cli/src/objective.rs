//! `--objective`, and answers of `gristmill place --task-graph` for other objectives than latency.

use crate::output::outln;
use crate::print_value;
use clap::ValueEnum;
use gristmill::cost::{Bytes, Nanos};
use gristmill::place::explain::{Explanation, Subject};
use gristmill::place::task_graph::{
    PlacementFile, TaskGraph, Topology, Verdict, answer, over_memory, subject,
};
use gristmill::place::{self, Stream};
use gristmill::{Error, Result};
use gristmill_solver::memory::repair;
use gristmill_solver::search::pipeline::{self, Periodic};
use gristmill_solver::search::portfolio::{self, Solution};
use gristmill_solver::{Problem, bounds, check};
use serde_json::{Value, json};
use std::time::Instant;

/// The objective of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Objective {
    /// The time of one sample.
    Latency,
    /// The time of a stream of samples, which go through the devices one behind the other.
    Throughput,
    /// The highest peak of memory of a device, then time.
    Memory,
}

impl Objective {
    /// As the placer has it, for a stream of `samples`.
    pub fn of_model(self, samples: u64) -> place::Objective {
        match self {
            Objective::Latency => place::Objective::Latency,
            Objective::Throughput => place::Objective::Throughput { samples },
            Objective::Memory => place::Objective::Memory,
        }
    }
}

/// A bare problem to answer.
pub struct Asked<'a> {
    /// The graph.
    pub graph: &'a TaskGraph,
    /// Its devices.
    pub topology: &'a Topology,
    /// Both together.
    pub problem: &'a Problem,
    /// When planning began.
    pub started: Instant,
    /// Work of the search, in percent of the usual one.
    pub effort: u64,
    /// Print JSON.
    pub json: bool,
}

impl Asked<'_> {
    /// Finds the schedule of a stream of `samples` and prints it, with the explanation that
    /// `explained` gives.
    pub fn stream(
        &self,
        samples: u64,
        explained: impl Fn(&Subject) -> Result<Option<Explanation>>,
    ) -> Result<()> {
        let options = pipeline::Options {
            samples,
            tasks: self.share(pipeline::Options::default().tasks),
        };
        let found = pipeline::solve(self.problem, options);
        if found.excess(self.problem) > Bytes::ZERO {
            return Err(over_memory(
                self.graph,
                self.topology,
                self.problem,
                &found.peak_bytes,
            ));
        }
        let wrong = check::check(self.problem, &found.sample);
        if !wrong.is_empty() {
            return Err(Error::internal(format!(
                "the schedule is wrong:\n  {}",
                wrong.join("\n  ")
            )));
        }
        let solution = self.first_run(&found);
        let explanation = explained(&self.subject_of(&found, samples, &solution))?;
        if self.json {
            return print(&self.stream_json(&found, samples, explanation)?);
        }
        self.print_stream(&found, samples);
        if let Some(e) = explanation {
            outln!("{}", e.to_string().trim_end());
        }
        Ok(())
    }

    /// The first run of a stream, as a solution.
    fn first_run(&self, found: &Periodic) -> Solution {
        let bound = bounds::best(self.problem, 0);
        Solution {
            score: repair::key(self.problem, &found.sample),
            timeline: found.sample.clone(),
            algorithm: "slices".to_owned(),
            lower_bound: bound.value,
            bound: bound.name.to_owned(),
            candidates: Vec::new(),
            moved: Vec::new(),
        }
    }

    /// A stream to be explained, its first run given.
    fn subject_of<'a>(
        &'a self,
        found: &Periodic,
        samples: u64,
        first_run: &'a Solution,
    ) -> Subject<'a> {
        let latency = found.sample.makespan;
        let under_way = latency.0.div_ceil(found.period.0.max(1));
        let stream = Stream {
            samples,
            period: found.period,
            latency,
            in_flight: under_way.clamp(1, samples.max(1)),
            lower_bound: found.lower_bound,
        };
        let options = portfolio::Options::new(self.problem);
        Subject {
            objective: place::Objective::Throughput { samples },
            stream: Some(stream),
            ..subject(self.graph, self.topology, self.problem, first_run, options)
        }
    }

    fn print_stream(&self, found: &Periodic, samples: u64) {
        let (time, bound) = (found.time(samples), found.lower_bound);
        outln!(
            "{:?}: {samples} samples in {time}: one every {}, {} each; {}",
            self.graph.name,
            found.period,
            found.sample.makespan,
            verdict(time, bound, "area")
        );
        for (d, device) in self.topology.devices.iter().enumerate() {
            let mine =
                (0..self.problem.n_tasks()).filter(|&t| found.sample.device[t] as usize == d);
            let busy: Nanos = mine.map(|t| self.problem.cost(t, d)).sum();
            let share = 100.0 * busy.0 as f64 / found.period.0.max(1) as f64;
            outln!(
                "  {}: busy {share:.0} %, peak {}",
                device.name,
                found.peak_bytes[d]
            );
        }
    }

    /// The answer about a stream: that about its first sample, with the period, and the peaks of the whole stream.
    fn stream_json(
        &self,
        found: &Periodic,
        samples: u64,
        explain: Option<Explanation>,
    ) -> Result<Value> {
        let time = found.time(samples);
        let verdict = self.verdict(found.lower_bound, "area", "slices");
        let (graph, topology, p) = (self.graph, self.topology, self.problem);
        let sample = PlacementFile {
            explain,
            ..answer(graph, topology, p, &found.sample, verdict)
        };
        let mut value = serde_json::to_value(&sample)
            .map_err(|e| Error::internal(format!("the answer: {e}")))?;
        let peaks = self
            .topology
            .devices
            .iter()
            .zip(&found.peak_bytes)
            .map(|(d, b)| (d.name.clone(), json!(b.0)));
        let more = [
            ("format", json!("stream-placement/1")),
            ("samples", json!(samples)),
            ("period_ns", json!(found.period.0)),
            ("time_ns", json!(time.0)),
            ("gap", json!(gap(time, found.lower_bound))),
            ("optimal", json!(time == found.lower_bound)),
            ("peak_bytes", Value::Object(peaks.collect())),
        ];
        for (key, item) in more {
            value[key] = item;
        }
        Ok(value)
    }

    /// Finds the schedule with the least highest peak and prints it as `placement/1`.
    pub fn least_memory(&self) -> Result<()> {
        let timeline = pipeline::least_memory(self.problem);
        if repair::excess(self.problem, &timeline) > Bytes::ZERO {
            let peaks = timeline.peak_bytes(self.problem);
            return Err(over_memory(self.graph, self.topology, self.problem, &peaks));
        }
        let bound = bounds::best(self.problem, 0);
        if self.json {
            let verdict = self.verdict(bound.value, bound.name, "least-memory");
            let file = answer(self.graph, self.topology, self.problem, &timeline, verdict);
            return print(
                &serde_json::to_value(&file)
                    .map_err(|e| Error::internal(format!("the answer: {e}")))?,
            );
        }
        outln!(
            "{:?}: {} with the least highest peak found",
            self.graph.name,
            timeline.makespan
        );
        for (device, peak) in self
            .topology
            .devices
            .iter()
            .zip(timeline.peak_bytes(self.problem))
        {
            outln!("  {}: peak {peak}", device.name);
        }
        Ok(())
    }

    /// So much of the usual work as was asked for.
    fn share(&self, usual: u64) -> u64 {
        u64::try_from(u128::from(usual) * u128::from(self.effort) / 100).unwrap_or(u64::MAX)
    }

    fn verdict(&self, lower_bound: Nanos, bound: &str, algorithm: &str) -> Verdict {
        let (bound, algorithm) = (bound.to_owned(), algorithm.to_owned());
        Verdict {
            lower_bound,
            bound,
            algorithm,
            plan_time: self.plan_time(),
        }
    }

    fn plan_time(&self) -> Nanos {
        Nanos(self.started.elapsed().as_nanos() as u64)
    }
}

fn gap(value: Nanos, bound: Nanos) -> f64 {
    if value == bound {
        0.0
    } else {
        value.0 as f64 / bound.0.max(1) as f64 - 1.0
    }
}

fn verdict(value: Nanos, bound: Nanos, name: &str) -> String {
    match value == bound {
        true => format!("optimal: the {name} bound is {bound}"),
        false => format!(
            "lower bound {bound} ({name}), gap {:.1} %",
            100.0 * gap(value, bound)
        ),
    }
}

fn print(value: &Value) -> Result<()> {
    print_value(value);
    Ok(())
}
