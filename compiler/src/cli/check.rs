//! `gristmill check`: how each node would be computed, and all that a model needs and gristmill lacks, before any compilation.

use super::args::DimFlags;
use super::load;
use super::{outln, print_json};
use crate::compiled::Source;
use crate::error::{Error, Result};
use crate::ir::Bindings;
use crate::onnx::{Capabilities, Model, OperatorReport, Specialisation, Treatment};
use clap::Args;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Arguments of `check`.
#[derive(Args)]
pub struct CheckArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    /// Value of a symbolic dim, e.g. `batch=8`; more can be decided when dims are known.
    #[arg(long, value_name = "DIM=N")]
    set: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb. Problems are an error of the most severe category among them.
pub fn check(args: &CheckArgs) -> Result<()> {
    let (dims, _) = DimFlags {
        set: args.set.clone(),
        shape: Vec::new(),
    }
    .parse()?;
    match load::model(&args.model)? {
        Source::Onnx(m) => check_model(&m, dims, args.json),
        Source::Graph(g) => {
            crate::passes::specialise(&g, &dims)?;
            outln!("{} nodes, all of known ops", g.n_nodes());
            Ok(())
        }
    }
}

fn check_model(m: &Model, dims: Bindings, json: bool) -> Result<()> {
    let spec = Specialisation {
        dims,
        ..Specialisation::default()
    };
    let report = m.capabilities(&spec)?;
    let problems = &report.problems;
    let values = if problems.is_empty() {
        m.required_values(&spec)?
    } else {
        Default::default()
    };
    let total: usize = report
        .operators
        .values()
        .flat_map(|o| o.nodes.values())
        .sum();
    let bad: usize = problems.iter().map(|p| p.nodes.len()).sum();
    if json {
        let list: Vec<_> = problems
            .iter()
            .map(|p| json!({ "kind": format!("{:?}", p.kind), "message": p.message, "nodes": p.nodes }))
            .collect();
        let notes: Vec<_> = report
            .notes
            .iter()
            .map(|n| json!({ "rule": n.rule, "nodes": n.nodes }))
            .collect();
        let ops: BTreeMap<&String, usize> = report
            .operators
            .iter()
            .map(|(name, o)| (name, o.nodes.values().sum()))
            .collect();
        print_json(
            "check",
            json!({ "nodes": total, "problems": list, "shape_inputs": values, "ops": ops, "capabilities": as_json(&report), "notes": notes }),
        );
    } else {
        outln!(
            "{total} nodes of {} operators; {} cannot be compiled",
            report.operators.len(),
            bad
        );
        print_table(&report);
        for p in problems {
            outln!("  {}", describe(&p.message, &p.nodes));
        }
        for n in &report.notes {
            outln!("note: {}", describe(n.rule, &n.nodes));
        }
        for name in &values {
            outln!(
                "  input {name:?} decides shapes: code is specialised for each value it is given"
            );
        }
        outln!(
            "devices: /device:CPU, and /device:GPU (CUDA) and /device:EMU where NVRTC is installed"
        );
    }
    match problems.iter().map(|p| p.kind).min() {
        None => Ok(()),
        Some(kind) => Err(Error::new(
            kind,
            format!("{} problems in {bad} of {total} nodes", problems.len()),
        )),
    }
}

/// Treatments and fallbacks of each operator.
fn as_json(report: &Capabilities) -> serde_json::Value {
    let one = |o: &OperatorReport| {
        let nodes: BTreeMap<&str, usize> = o.nodes.iter().map(|(t, &n)| (t.name(), n)).collect();
        json!({ "nodes": nodes, "loops": o.loops })
    };
    report
        .operators
        .iter()
        .map(|(name, o)| (name.clone(), one(o)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// A row per operator, a column per treatment that occurs; then what falls back.
fn print_table(report: &Capabilities) {
    let rows = &report.operators;
    let occurs = |t: &Treatment| rows.values().any(|o| o.nodes.contains_key(t));
    let columns: Vec<Treatment> = Treatment::ALL.into_iter().filter(occurs).collect();
    let width = rows.keys().map(String::len).max().unwrap_or(0).max(8);
    let head: String = columns
        .iter()
        .map(|t| format!("  {:>10}", t.name()))
        .collect();
    outln!("  {:<width$}{head}", "operator");
    for (name, o) in rows {
        let count = |t: &Treatment| o.nodes.get(t).map_or(String::new(), usize::to_string);
        let cells: String = columns
            .iter()
            .map(|t| format!("  {:>10}", count(t)))
            .collect();
        outln!("  {name:<width$}{cells}");
    }
    if columns.contains(&Treatment::Fallback) {
        outln!("fallback: loops over single elements, right but slow on large tensors");
        for (name, o) in rows.iter().filter(|(_, o)| !o.loops.is_empty()) {
            let what: Vec<String> = o.loops.iter().map(|(op, n)| format!("{n} {op}")).collect();
            outln!("  {name}: {}", what.join(", "));
        }
    }
}

/// `message (3 nodes: /a, /b, ..)`.
fn describe(message: &str, nodes: &[String]) -> String {
    let shown: Vec<&str> = nodes.iter().take(3).map(String::as_str).collect();
    let dots = if nodes.len() > 3 { ", .." } else { "" };
    match nodes.len() {
        0 => message.to_owned(),
        1 => format!("{message} (node {})", shown[0]),
        n => format!("{message} ({n} nodes: {}{dots})", shown.join(", ")),
    }
}
