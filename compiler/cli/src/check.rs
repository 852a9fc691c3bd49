//! `gristmill check`: the treatment of each node, and everything that a model needs and gristmill lacks, before any compilation.

use crate::args::DimFlags;
use crate::heading;
use crate::output::{self, outln};
use crate::train::{self, Learning, ObjectiveArgs};
use crate::{image, load, print_json};
use clap::Args;
use gristmill::Source;
use gristmill::codegen::cpu::why_loops as why;
use gristmill::command_line::{LoopTime, ShapeWork};
use gristmill::command_line::{bound, interface};
use gristmill::command_line::{cut, decides_extents, has_run_time_extents, segments};
use gristmill::ir::{Bindings, Graph};
use gristmill::onnx::{
    Capabilities, Declared, Form, Loops, Model, OperatorReport, Specialisation, Structure,
    Treatment,
};
use gristmill::place::emulated;
use gristmill::{Error, Result};
use gristmill_runtime::units::{plural, printable};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Arguments of `check`.
#[derive(Args)]
pub struct CheckArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    /// Fix a symbolic dim, e.g. `batch=8`. More is decided when dims are known.
    #[arg(long, value_name = "DIM=N", help_heading = heading::INPUTS)]
    set: Vec<String>,
    /// Report also what `train` would do: trainable weights, why others are frozen, and nodes without a gradient.
    #[arg(long, help_heading = heading::TRAINING)]
    train: bool,
    #[command(flatten)]
    objective: ObjectiveArgs,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// Runs the verb. Problems are an error of the most severe category among them.
pub fn check(args: &CheckArgs) -> Result<()> {
    if image::is_image(&args.model) {
        return image::check(&args.model, &args.set, args.json);
    }
    let dims = DimFlags::sizes(&args.set)?;
    match load::model(&args.model)? {
        Source::Onnx(m) => check_model(&m, dims, args),
        Source::Graph(_) if args.train => Err(train::not_onnx(&args.model)),
        Source::Graph(g) => {
            check_graph(bound(&g, &dims)?, args.json);
            Ok(())
        }
    }
}

/// A graph in text form has been checked when it was read.
fn check_graph(g: Graph, json: bool) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, node) in g.nodes() {
        *counts.entry(node.op.name()).or_default() += 1;
    }
    let n_nodes = g.n_nodes();
    let inputs = interface(&g).0;
    let shapes = ShapeWork::of(&inputs, Ok(g));
    if json {
        let problems: [Value; 0] = [];
        let shapes = shapes.as_ref().map(shapes_json);
        let report =
            json!({ "nodes": n_nodes, "problems": problems, "ops": counts, "shapes": shapes });
        print_json("check", report);
    } else {
        outln!("{}, all of known ops", plural(n_nodes, "node"));
        shapes.iter().for_each(print_shapes);
    }
}

/// Nodes whose results have as many elements as the data decides.
struct RunTimeExtents {
    /// Number of the graph's nodes by op.
    nodes: BTreeMap<&'static str, usize>,
    n_segments: usize,
}

impl RunTimeExtents {
    fn of(g: &Graph) -> Result<Option<RunTimeExtents>> {
        if !has_run_time_extents(g) {
            return Ok(None);
        }
        let mut nodes = BTreeMap::new();
        count_deciding(g, &mut nodes);
        let n_segments = segments(&cut(g)?).len();
        Ok(Some(RunTimeExtents { nodes, n_segments }))
    }

    fn print(&self) {
        let nodes = self.nodes.iter().map(|(op, n)| format!("{n} {op}"));
        let nodes = nodes.collect::<Vec<_>>().join(", ");
        let parts = plural(self.n_segments, "segment");
        let work = format!("the host computes these nodes, {parts} between them are compiled");
        outln!("extents: the data decides some ({nodes}): {work}");
    }

    fn json(&self) -> Value {
        json!({ "nodes": self.nodes, "segments": self.n_segments })
    }
}

fn count_deciding(g: &Graph, counts: &mut BTreeMap<&'static str, usize>) {
    for (_, node) in g.nodes().filter(|(_, node)| decides_extents(node)) {
        *counts.entry(node.op.name()).or_default() += 1;
        node.regions.iter().for_each(|r| count_deciding(r, counts));
    }
}

fn print_shapes(work: &ShapeWork) {
    let symbols: Vec<_> = work.symbols.iter().map(|s| printable(s)).collect();
    let symbols = symbols.join(", ");
    match &work.reason {
        None if work.symbols.len() > N_NAMED => {
            let n = work.symbols.len();
            outln!("shapes: kernels are chosen once for all sizes of {n} dims");
        }
        None => outln!("shapes: kernels are chosen once for all sizes of {symbols}"),
        Some(why) => {
            let why = printable(why);
            outln!("shapes: compiled anew for each set of sizes of {symbols}: {why}");
        }
    }
}

fn shapes_json(work: &ShapeWork) -> Value {
    json!({
        "symbols": work.symbols,
        "compiled_once": work.reason.is_none(),
        "reason": work.reason,
    })
}

fn check_model(m: &Model, dims: Bindings, args: &CheckArgs) -> Result<()> {
    let form = match args.train {
        true => Form::Evaluation,
        false => Form::Inference,
    };
    let report = Report::of(m, dims, form)?;
    // A model that cannot be compiled has no gradients either.
    let learning = match args.train && report.n_bad == 0 {
        true => Some(Learning::of(m, &args.objective, &args.set)?),
        false => None,
    };
    if args.json {
        let mut value = report.json();
        value["training"] = json!(learning.as_ref().map(Learning::json));
        print_json("check", value);
    } else {
        report.print();
        learning.iter().for_each(Learning::print);
    }
    report.verdict()?;
    learning.map_or(Ok(()), Learning::verdict)
}

/// An open input, and the number of its tensors here.
fn with_number(input: Declared, structure: &Structure) -> (Declared, usize) {
    let n = structure.get(&input.name).map_or(0, Vec::len);
    (input, n)
}

fn n_nodes(operator: &OperatorReport) -> usize {
    operator.nodes.values().sum()
}

/// Findings about a model.
struct Report {
    capabilities: Capabilities,
    /// Inputs whose values decide shapes.
    shape_inputs: BTreeSet<String>,
    /// Inputs whose tensors a run decides, and how many they have in this report.
    forms: Vec<(Declared, usize)>,
    /// Extents that the data decides.
    run_time: Option<RunTimeExtents>,
    /// What further shapes take, where some are not constant.
    shapes: Option<ShapeWork>,
    /// Sizes of symbolic dims at which times were predicted; `None` where none were.
    sizes: Option<Bindings>,
    n_nodes: usize,
    /// Nodes that cannot be compiled.
    n_bad: usize,
}

impl Report {
    fn of(given: &Model, dims: Bindings, form: Form) -> Result<Report> {
        let mut spec = Specialisation {
            dims,
            form,
            ..Specialisation::default()
        };
        let open = given.open_inputs()?;
        let (m, structure) = given.trial_form(&mut spec)?;
        let inputs = m.interface(&spec)?.0;
        let trial = m.trial(&spec)?;
        let is_open = |e: &Error| trial.is_undecided && e.is_of_values();
        let loops = Loops { why, share: None };
        let mut capabilities = m.capabilities_but(&trial.spec, loops, &is_open)?;
        let can_compile = capabilities.problems.is_empty();
        let shape_inputs = match can_compile {
            true => trial.values,
            false => BTreeSet::new(),
        };
        let graph = (can_compile && shape_inputs.is_empty()).then(|| m.graph(&spec));
        let times = loop_times(graph.as_ref());
        if let Some(times) = &times {
            capabilities = weighed(&m, &trial.spec, times, &is_open)?;
        }
        let run_time = run_time_extents(graph.as_ref())?;
        let shapes = graph.and_then(|g| ShapeWork::of(&inputs, g));
        let forms = open.into_iter().map(|input| with_number(input, &structure));
        Ok(Report {
            n_nodes: capabilities.operators.values().map(n_nodes).sum(),
            forms: forms.collect(),
            n_bad: capabilities.problems.iter().map(|p| p.nodes.len()).sum(),
            capabilities,
            shape_inputs,
            run_time,
            shapes,
            sizes: times.map(|times| times.sizes),
        })
    }

    fn print(&self) {
        let n_bad = self.n_bad;
        let nodes = plural(self.n_nodes, "node");
        let operators = plural(self.capabilities.operators.len(), "operator");
        outln!("{nodes} of {operators}; {n_bad} cannot be compiled");
        print_table(&self.capabilities, self.sizes.as_ref());
        for problem in &self.capabilities.problems {
            outln!("  {}", describe(&problem.message, &problem.nodes));
        }
        for note in &self.capabilities.notes {
            outln!("note: {}", describe(note.rule, &note.nodes));
        }
        for name in &self.shape_inputs {
            outln!("  input {name:?} decides shapes: code is specialised for each of its values");
        }
        for (input, n) in &self.forms {
            let (name, kind, tensors) = (&input.name, input.kind(), plural(*n, "tensor"));
            outln!(
                "  input {name:?} is {kind}, here {tensors}: a run decides, and each form is compiled"
            );
        }
        output::warnings(&self.capabilities.warnings);
        self.run_time.iter().for_each(RunTimeExtents::print);
        self.shapes.iter().for_each(print_shapes);
        let devices = match emulated::IS_BUILT_IN {
            true => "/device:GPU (CUDA) and /device:EMU",
            false => "/device:GPU (CUDA)",
        };
        outln!("devices: /device:CPU, and {devices} where NVRTC is installed");
    }

    fn json(&self) -> Value {
        let problems = self.capabilities.problems.iter();
        let problems = problems.map(
            |p| json!({ "kind": format!("{:?}", p.kind), "message": p.message, "nodes": p.nodes }),
        );
        let notes = self.capabilities.notes.iter();
        let notes = notes.map(|n| json!({ "rule": n.rule, "nodes": n.nodes }));
        let open_inputs = self.forms.iter().map(|(input, n)| (&input.name, n));
        let operators = self.capabilities.operators.iter();
        let counts: BTreeMap<_, _> = operators.map(|(name, o)| (name, n_nodes(o))).collect();
        json!({
            "nodes": self.n_nodes,
            "problems": problems.collect::<Vec<_>>(),
            "shape_inputs": self.shape_inputs,
            "open_inputs": open_inputs.collect::<BTreeMap<_, _>>(),
            "run_time_extents": self.run_time.as_ref().map(RunTimeExtents::json),
            "shapes": self.shapes.as_ref().map(shapes_json),
            "predicted_at": self.sizes,
            "ops": counts,
            "capabilities": operators_json(&self.capabilities),
            "notes": notes.collect::<Vec<_>>(),
            "warnings": self.capabilities.warnings,
        })
    }

    /// An error of the most severe kind among the problems.
    fn verdict(&self) -> Result<()> {
        let problems = &self.capabilities.problems;
        let Some(kind) = problems.iter().map(|p| p.kind).min() else {
            return Ok(());
        };
        let n = plural(problems.len(), "problem");
        let message = format!("{n} in {} of {} nodes", self.n_bad, self.n_nodes);
        Err(Error::new(kind, message))
    }
}

/// Times of the loops of a graph, if it can be compiled.
fn loop_times(graph: Option<&Result<Graph>>) -> Option<LoopTime> {
    LoopTime::of(graph?.as_ref().ok()?).ok()
}

/// The capabilities of a model whose loops take these times.
fn weighed(
    m: &Model,
    spec: &Specialisation,
    times: &LoopTime,
    is_open: &dyn Fn(&Error) -> bool,
) -> Result<Capabilities> {
    let share = |path: &str| times.share(path);
    let share: Option<&dyn Fn(&str) -> f64> = Some(&share);
    m.capabilities_but(spec, Loops { why, share }, is_open)
}

fn run_time_extents(graph: Option<&Result<Graph>>) -> Result<Option<RunTimeExtents>> {
    match graph {
        Some(Ok(g)) => RunTimeExtents::of(g),
        _ => Ok(None),
    }
}

/// Treatments and fallbacks of each operator.
fn operators_json(capabilities: &Capabilities) -> Value {
    let mut operators = serde_json::Map::new();
    for (name, o) in &capabilities.operators {
        let nodes: BTreeMap<&str, usize> = o.nodes.iter().map(|(t, &n)| (t.name(), n)).collect();
        operators.insert(
            name.clone(),
            json!({ "nodes": nodes, "loops": o.loops, "loops_share": o.share }),
        );
    }
    operators.into()
}

/// A row per operator, a column per treatment that occurs; then the operators that fall back.
fn print_table(capabilities: &Capabilities, sizes: Option<&Bindings>) {
    let rows = &capabilities.operators;
    let occurs = |t: &Treatment| rows.values().any(|o| o.nodes.contains_key(t));
    let columns: Vec<Treatment> = Treatment::ALL.into_iter().filter(occurs).collect();
    let width = rows.keys().map(String::len).max().unwrap_or(0).max(8);
    let heads: String = columns.iter().map(|t| cell(t.name())).collect();
    outln!("  {:<width$}{heads}", "operator");
    for (name, operator) in rows {
        let (name, counts) = (printable(name), counts(operator, &columns));
        outln!("  {name:<width$}{counts}");
    }
    if columns.contains(&Treatment::Fallback) {
        print_fallbacks(capabilities, sizes);
    }
}

/// Cells of the row of an operator: its nodes by treatment.
fn counts(operator: &OperatorReport, columns: &[Treatment]) -> String {
    let counts = columns.iter().map(|t| operator.nodes.get(t));
    let cells = counts.map(|n| cell(&n.map_or(String::new(), usize::to_string)));
    cells.collect()
}

fn cell(text: &str) -> String {
    format!("  {text:>10}")
}

fn print_fallbacks(capabilities: &Capabilities, sizes: Option<&Bindings>) {
    let sizes = sizes.map(sizes_text).unwrap_or_default();
    outln!("fallback: loops over single elements, right but slow{sizes}");
    for (name, o) in &capabilities.operators {
        let loops: Vec<String> = o.loops.iter().map(|(op, n)| format!("{n} {op}")).collect();
        if loops.is_empty() {
            continue;
        }
        let (name, loops) = (printable(name), loops.join(", "));
        match o.share {
            Some(share) => outln!(
                "  {name}: {:.0} % of the predicted time: {loops}",
                share * 100.0
            ),
            None => outln!("  {name}: {loops}"),
        }
    }
}

/// ` at batch=31, length=37 (--set gives others)`; nothing where all dims are constant.
fn sizes_text(sizes: &Bindings) -> String {
    let sizes = sizes.iter().map(|(s, n)| format!("{}={n}", printable(s)));
    let sizes = sizes.collect::<Vec<_>>().join(", ");
    match sizes.is_empty() {
        true => String::new(),
        false => format!(", at {sizes} (--set gives others)"),
    }
}

/// Number of nodes that a line about a problem names.
const N_NAMED: usize = 3;

/// `message (3 nodes: /a, /b, ..)`.
fn describe(message: &str, nodes: &[String]) -> String {
    let named = nodes.iter().take(N_NAMED).map(|name| printable(name));
    let named = named.collect::<Vec<_>>().join(", ");
    match nodes.len() {
        0 => message.to_owned(),
        1 => format!("{message} (node {named})"),
        n if n > N_NAMED => format!("{message} ({n} nodes: {named}, ..)"),
        n => format!("{message} ({n} nodes: {named})"),
    }
}
