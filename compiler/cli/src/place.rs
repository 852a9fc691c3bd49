//! `gristmill place`: the device of each node, and the reason; of a model, or of a bare task graph.

use crate::args::{CompileArgs, FallbackArg};
use crate::heading;
use crate::objective::{Asked, Objective};
use crate::output::{self, outln};
use crate::{inputs, load, page_header, planned, print_json, print_value};
use clap::Args;
use gristmill::Compiled;
use gristmill::cost::{Bytes, Nanos};
use gristmill::place::Placement;
use gristmill::place::explain::{self, Explanation, Subject, html, trace};
use gristmill::place::plan::{self, Names, Plan, Planned};
use gristmill::place::task_graph::{
    PlacementFile, TaskGraph, Topology, Verdict, answer, over_memory, subject,
};
use gristmill::{Error, ErrorKind, Result};
use gristmill_runtime::DeviceName;
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::nearest::nearest;
use gristmill_runtime::units::plural;
use gristmill_solver::memory::remat::Freedom;
use gristmill_solver::search::portfolio::{self, Algorithm, Solution};
use gristmill_solver::{Problem, check};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `place`.
#[derive(Args)]
pub struct PlaceArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    #[arg(required_unless_present = "task_graph")]
    model: Option<PathBuf>,
    #[command(flatten)]
    compile: CompileArgs,
    /// Solve a bare problem, a `task-graph/1` file, instead of placing a model.
    #[arg(long, value_name = "FILE", conflicts_with = "model", help_heading = heading::BARE_PROBLEM)]
    task_graph: Option<PathBuf>,
    /// Devices and links of the bare problem, a `topology/1` file. Default: the machine published with the problem.
    #[arg(long, value_name = "FILE", requires = "task_graph", help_heading = heading::BARE_PROBLEM)]
    topology: Option<PathBuf>,
    /// Use one algorithm instead of all algorithms with refinement.
    #[arg(
        long,
        value_name = "NAME",
        requires = "task_graph",
        conflicts_with = "plan", help_heading = heading::BARE_PROBLEM)]
    algorithm: Option<String>,
    /// Work of the search, in percent of the default (100). It counts simulations and nodes, not seconds.
    #[arg(long, value_name = "PERCENT", requires = "task_graph", help_heading = heading::BARE_PROBLEM)]
    effort: Option<u64>,
    /// Explain the placement: alternatives of every node, loads, memory, the critical path, and the effect of other machines.
    #[arg(long, help_heading = heading::OUTPUT)]
    explain: bool,
    /// Write the predicted timeline as a Chrome trace, for Perfetto and chrome://tracing.
    #[arg(long, value_name = "FILE.json", help_heading = heading::OUTPUT)]
    trace: Option<PathBuf>,
    /// Write the predicted timeline and the explanation as a page for a browser.
    #[arg(long, value_name = "FILE.html", help_heading = heading::OUTPUT)]
    html: Option<PathBuf>,
    /// Write the device of every node, with copies and offloads, to a file that you can edit and pass to --plan.
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    plan_out: Option<PathBuf>,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

impl PlaceArgs {
    /// True if a timeline is to be explained or written.
    fn is_explained(&self) -> bool {
        self.explain || self.trace.is_some() || self.html.is_some() || self.plan_out.is_some()
    }

    /// Errors on flags that other objectives of a bare problem than latency have no use for.
    fn expect_flags_of_objective(&self) -> Result<()> {
        let refuse = |flags: &str| {
            let message = format!("{flags} are for --objective latency");
            Err(Error::invalid(message).hint("without them"))
        };
        let replays = self.plan_out.is_some() || self.compile.plan.is_some();
        match (self.compile.objective, &self.algorithm) {
            (Objective::Latency, _) => Ok(()),
            (_, Some(name)) => {
                let message = format!("--algorithm {name} is for --objective latency");
                Err(Error::invalid(message).hint("without --algorithm"))
            }
            _ if self.compile.budget.is_some() => {
                let message = "--budget of a bare problem is for --objective latency";
                Err(Error::invalid(message).hint("--effort, which counts work"))
            }
            (Objective::Throughput, _) if replays => refuse("--plan-out and --plan"),
            (Objective::Memory, _) if replays || self.is_explained() => {
                refuse("--explain, --trace, --html, --plan-out and --plan")
            }
            _ => Ok(()),
        }
    }

    /// Header of a bare problem's page.
    fn facts_of_problem(&self) -> Vec<(&'static str, String)> {
        let files = [("problem", &self.task_graph), ("topology", &self.topology)];
        let given = files
            .into_iter()
            .filter_map(|(name, path)| Some((name, path.as_ref()?)));
        given
            .map(|(name, path)| (name, path.display().to_string()))
            .collect()
    }

    /// Name of the file that is placed.
    fn file_name(&self) -> String {
        let file = self.model.as_ref().or(self.task_graph.as_ref());
        let name = file.and_then(|path| path.file_name());
        name.map_or_else(String::new, |n| n.to_string_lossy().into_owned())
    }
}

/// Runs the verb.
pub fn place(args: &PlaceArgs) -> Result<()> {
    match (&args.model, &args.task_graph) {
        (_, Some(graph)) => place_task_graph(args, graph, args.topology.as_deref()),
        (Some(model), _) => place_model(args, model),
        _ => Err(Error::invalid("no model and no --task-graph")
            .hint("gristmill place MODEL --devices cpu:2")),
    }
}

/// Errors on flags that say something of bare problems only: the parser lets them pass beside a
/// model, which is instead of the file that they require.
fn refuse_flags_of_problems(args: &PlaceArgs) -> Result<()> {
    let given = [
        ("--topology", args.topology.is_some()),
        ("--algorithm", args.algorithm.is_some()),
        ("--effort", args.effort.is_some()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((flag, _)) => Err(Error::invalid(format!("{flag} is for bare problems")).hint(
            "--task-graph FILE instead of a model; --target describes a machine for a model",
        )),
    }
}

fn place_model(args: &PlaceArgs, model: &Path) -> Result<()> {
    refuse_flags_of_problems(args)?;
    let (session, options) = args.compile.open()?;
    let compiled = session.prepare(args.compile.source(model)?, &options)?;
    output::warnings(compiled.model_warnings());
    let is_listed = !args.is_explained() && !args.json;
    if is_listed && !compiled.is_whole() {
        return place_segments(args, &compiled);
    }
    // Shapes decide costs; no input is made but for values that decide shapes.
    let planned = compiled.plan_shapes(&inputs::shapes(&compiled)?)?;
    output::warnings(&planned.report.warnings);
    let (placement, clusters) = (&planned.placement, &planned.clusters);
    args.compile.log_placement(placement, clusters);
    let facts = page_header::of_model(model, &options, clusters);
    let explanation = explain_and_write(args, &placement.subject(clusters)?, facts)?;
    let whole = on_whole_cpu(args, model, placement)?;
    if args.json {
        let mut answer = planned::to_json(&planned, explanation);
        if let Some(time) = whole {
            answer["one_device_ns"] = time.0.into();
        }
        print_json("place", answer);
        return Ok(());
    }
    let mut text = placement.summary_with_sources(clusters);
    if let Some(time) = whole {
        text += &format!("  one CPU device with all threads: {time}\n");
    }
    text += &match explanation {
        None => placement.nodes_text(clusters),
        Some(e) => e.to_string(),
    };
    outln!("{}", text.trim_end());
    Ok(())
}

/// Predicted time of a step where several logical devices of this CPU are one, with the threads of all of them; `None` for a
/// model that is placed on other devices, and for one that asks for a device that is then not there.
fn on_whole_cpu(args: &PlaceArgs, model: &Path, placement: &Placement) -> Result<Option<Nanos>> {
    let is_cpu = |device: &DeviceName| device.kind == DeviceKind::Cpu;
    let all = &placement.devices;
    let is_latency = args.compile.objective == Objective::Latency;
    if all.len() < 2 || !all.iter().all(is_cpu) || args.compile.target.is_some() || !is_latency {
        return Ok(None);
    }
    let one = CompileArgs {
        devices: "cpu:1".to_owned(),
        pin: Vec::new(),
        mem: Vec::new(),
        plan: None,
        ..args.compile.clone()
    };
    let (session, options) = one.open()?;
    let compiled = session.prepare(one.source(model)?, &options)?;
    let planned = inputs::shapes(&compiled).and_then(|shapes| compiled.plan_shapes(&shapes));
    match planned {
        Ok(planned) => Ok(Some(planned.placement.makespan)),
        Err(e) if e.is_refusal() => Ok(None),
        Err(e) => Err(e),
    }
}

/// Prints the placement of each segment whose extents are known before a run.
fn place_segments(args: &PlaceArgs, compiled: &Compiled) -> Result<()> {
    for (number, part) in compiled.parts().enumerate() {
        outln!("segment {number}");
        if !part.has_declared_shapes() {
            outln!("  placed during a run, which decides its extents");
            continue;
        }
        let planned = part.plan_shapes(&inputs::shapes(part)?)?;
        output::warnings(&planned.report.warnings);
        let (placement, clusters) = (&planned.placement, &planned.clusters);
        args.compile.log_placement(placement, clusters);
        outln!("{}", placement.to_text_with_sources(clusters).trim_end());
    }
    Ok(())
}

/// Writes the files that the flags ask for; gives the explanation if it is to be printed.
fn explain_and_write(
    args: &PlaceArgs,
    subject: &Subject,
    mut facts: Vec<(&'static str, String)>,
) -> Result<Option<Explanation>> {
    if let Some(path) = &args.trace {
        load::write(path, &trace::trace(subject))?;
    }
    if let Some(path) = &args.plan_out {
        load::write(path, &plan::of(subject))?;
    }
    let explanation = (args.explain || args.html.is_some()).then(|| explain::explain(subject));
    if let (Some(path), Some(explanation)) = (&args.html, &explanation) {
        facts.push(("devices", subject.devices.join(", ")));
        facts.push(("command", page_header::command()));
        let page = html::page(subject, explanation, &args.file_name(), &facts);
        load::write(path, &page)?;
    }
    Ok(explanation.filter(|_| args.explain))
}

/// Percent of the work of a search.
const USUAL_EFFORT: u64 = 100;

/// Errors on flags that say something of models only.
fn refuse_flags_of_models(args: &CompileArgs) -> Result<()> {
    let given = [
        ("--devices", args.devices != "cpu:1"),
        ("--target", args.target.is_some()),
        ("--mem", !args.mem.is_empty()),
        ("--pin", !args.pin.is_empty()),
        ("--set", !args.dims.set.is_empty()),
        ("--shape", !args.dims.shape.is_empty()),
        ("--fallback", args.fallback != FallbackArg::Error),
        ("--verify", args.verify),
        ("--opt-level", args.opt_level != 2),
        ("--tune", args.tune),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((flag, _)) => Err(Error::invalid(format!("{flag} is for models"))
            .hint("devices, limits and pins of a bare problem are in its files")),
    }
}

fn place_task_graph(args: &PlaceArgs, file: &Path, topology: Option<&Path>) -> Result<()> {
    refuse_flags_of_models(&args.compile)?;
    let graph = TaskGraph::parse(&load::text(file)?).map_err(|e| e.context(file.display()))?;
    let topology = match topology {
        Some(path) => Topology::parse(&load::text(path)?).map_err(|e| e.context(path.display()))?,
        None => graph
            .published_topology()
            .map_err(|e| e.context(file.display()))?,
    };
    let started = Instant::now();
    let p = graph.problem(&topology)?;
    let asked = Asked {
        graph: &graph,
        topology: &topology,
        problem: &p,
        started,
        effort: args.effort.unwrap_or(USUAL_EFFORT),
        json: args.json,
    };
    args.expect_flags_of_objective()?;
    match args.compile.objective {
        Objective::Latency => place_for_latency(args, &asked),
        Objective::Throughput => {
            let explained =
                |subject: &Subject| explain_and_write(args, subject, args.facts_of_problem());
            asked.stream(args.compile.samples, explained)
        }
        Objective::Memory => asked.least_memory(),
    }
}

fn place_for_latency(args: &PlaceArgs, asked: &Asked) -> Result<()> {
    let Asked {
        graph,
        topology,
        problem: p,
        ..
    } = *asked;
    let (solution, options) = solve_for_latency(args, asked)?;
    let plan_time = Nanos(asked.started.elapsed().as_nanos() as u64);
    if solution.score.0 > Bytes::ZERO {
        let peaks = solution.timeline.peak_bytes(p);
        return Err(over_memory(graph, topology, p, &peaks));
    }
    let wrong = check::check(p, &solution.timeline);
    if !wrong.is_empty() {
        return Err(Error::internal(format!(
            "the placement is wrong:\n  {}",
            wrong.join("\n  ")
        )));
    }
    let explanation = explain_and_write(
        args,
        &subject(graph, topology, p, &solution, options),
        args.facts_of_problem(),
    )?;
    if args.json {
        let verdict = Verdict {
            lower_bound: solution.lower_bound,
            bound: solution.bound.clone(),
            algorithm: solution.algorithm.clone(),
            plan_time,
        };
        let answer = PlacementFile {
            explain: explanation,
            ..answer(graph, topology, p, &solution.timeline, verdict)
        };
        let value = serde_json::to_value(&answer)
            .map_err(|e| Error::internal(format!("writing the answer: {e}")))?;
        print_value(&value);
    } else {
        print_solution(graph, topology, p, &solution, plan_time);
        if let Some(e) = explanation {
            outln!("{}", e.to_string().trim_end());
        }
    }
    Ok(())
}

/// The best solution found, and the options of searches without its deadline.
fn solve_for_latency(args: &PlaceArgs, asked: &Asked) -> Result<(Solution, portfolio::Options)> {
    let (p, topology) = (asked.problem, asked.topology);
    let only = args.algorithm.as_deref();
    let budget = args.compile.parsed_budget()?;
    let options = portfolio::Options {
        only: only.map(|name| algorithm(name, topology)).transpose()?,
        deadline: budget.and_then(|budget| asked.started.checked_add(budget)),
        ..portfolio::Options::new(p)
    }
    .with_effort(args.effort.unwrap_or(USUAL_EFFORT));
    let name = |algorithm: Algorithm| match algorithm {
        Algorithm::Single(d) => format!("single {}", topology.devices[d as usize].name),
        other => other.name(),
    };
    let solution = match args.compile.plan()? {
        Some(plan) => {
            let planned = resolved_plan(&plan, asked.graph, topology, p)?;
            plan::solve(p, &planned, &options, &name)
        }
        None => portfolio::solve(p, &options, &name),
    };
    let solution = solution.ok_or_else(|| {
        let name = only.unwrap_or("portfolio");
        let message = format!("{name} finds no placement that keeps the memory limits");
        Error::new(ErrorKind::OutOfMemory, message)
            .hint("without --algorithm, all of them are tried")
    })?;
    let options = portfolio::Options {
        deadline: None,
        ..options
    };
    Ok((solution, options))
}

/// The devices that a plan gives the nodes of a task graph.
fn resolved_plan(
    plan: &Plan,
    graph: &TaskGraph,
    topology: &Topology,
    p: &Problem,
) -> Result<Planned> {
    let tasks: Vec<String> = graph.nodes.iter().map(|n| n.name.clone()).collect();
    let devices: Vec<String> = topology.devices.iter().map(|d| d.name.clone()).collect();
    let find = |text: &str| devices.iter().position(|d| d == text);
    let reason = |task: usize| {
        graph
            .reason(p, task)
            .unwrap_or_else(|| "it has no time there".to_owned())
    };
    plan.resolve(
        p,
        &Names {
            tasks: &tasks,
            devices: &devices,
            find: &find,
            reason: &reason,
            freedom: &Freedom::default(),
        },
    )
}

fn algorithm(name: &str, topology: &Topology) -> Result<Algorithm> {
    if let Some((_, found)) = Algorithm::NAMES.iter().find(|(known, _)| *known == name) {
        return Ok(*found);
    }
    let device = name.strip_prefix("single").map(str::trim);
    if let Some(d) = device.and_then(|d| topology.devices.iter().position(|known| known.name == d))
    {
        return Ok(Algorithm::Single(d as u32));
    }
    let names: Vec<String> = Algorithm::NAMES
        .iter()
        .map(|(n, _)| (*n).to_owned())
        .collect();
    let singles = topology
        .devices
        .iter()
        .map(|d| format!("single {}", d.name));
    let all: Vec<String> = names.into_iter().chain(singles).collect();
    let near = nearest(name, all.iter().map(String::as_str), 1)
        .first()
        .map_or("heft".to_owned(), |n| (*n).to_owned());
    Err(Error::invalid(format!(
        "--algorithm {name:?} is not known; known: {}",
        all.join(", ")
    ))
    .hint(near))
}

fn print_solution(
    graph: &TaskGraph,
    topology: &Topology,
    p: &Problem,
    s: &Solution,
    plan_time: Nanos,
) {
    let t = &s.timeline;
    let verdict = match t.makespan == s.lower_bound {
        true => format!("optimal: the {} bound is {}", s.bound, s.lower_bound),
        false => {
            let gap = 100.0 * (t.makespan.0 as f64 / s.lower_bound.0.max(1) as f64 - 1.0);
            format!(
                "lower bound {} ({}), gap {gap:.1} %",
                s.lower_bound, s.bound
            )
        }
    };
    outln!(
        "{:?}: {} by {}, {verdict}; planned in {plan_time}",
        graph.name,
        t.makespan,
        s.algorithm
    );
    let peaks = t.peak_bytes(p);
    for (d, device) in topology.devices.iter().enumerate() {
        let mine: Vec<usize> = (0..p.n_tasks())
            .filter(|&i| t.device[i] as usize == d)
            .collect();
        let busy: Nanos = mine.iter().map(|&i| p.cost(i, d)).sum();
        let share = 100.0 * busy.0 as f64 / t.makespan.0.max(1) as f64;
        outln!(
            "  {}: {}, busy {share:.0} %, peak {}",
            device.name,
            plural(mine.len(), "node"),
            peaks[d]
        );
    }
    let transfers = plural(t.transfers.len(), "transfer");
    outln!("  {transfers}, {}", t.bytes_moved(p));
    for c in &s.candidates {
        let memory = if c.score.0 == Bytes::ZERO {
            ""
        } else {
            ", over a memory limit"
        };
        let plural = if c.n_devices == 1 { "" } else { "s" };
        outln!(
            "  candidate {}: {} on {} device{plural}{memory}",
            c.algorithm,
            c.score.1,
            c.n_devices
        );
    }
}
