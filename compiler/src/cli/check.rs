//! `gristmill check`: all that a model needs and gristmill lacks, before any compilation.

use super::load;
use super::{outln, print_json};
use crate::compiled::Source;
use crate::error::{Error, Result};
use crate::ir::Bindings;
use crate::onnx::{Model, Problem, Specialisation};
use clap::Args;
use serde_json::json;
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
    let dims = super::args::parse_dims(&args.set)?;
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
    let spec = Specialisation { dims, ..Specialisation::default() };
    let problems = m.check(&spec)?;
    let values = if problems.is_empty() { m.required_values(&spec)? } else { Default::default() };
    let counts = m.summary().op_counts;
    let total: usize = counts.values().sum();
    let bad: usize = problems.iter().map(|p| p.nodes.len()).sum();
    if json {
        let list: Vec<_> = problems
            .iter()
            .map(|p| json!({ "kind": format!("{:?}", p.kind), "message": p.message, "nodes": p.nodes }))
            .collect();
        print_json("check", json!({ "nodes": total, "problems": list, "shape_inputs": values, "ops": counts }));
    } else {
        outln!("{total} nodes of {} operators; {} cannot be compiled", counts.len(), bad);
        for p in &problems {
            outln!("  {}", describe(p));
        }
        for name in &values {
            outln!("  input {name:?} decides shapes: code is specialised for each value it is given");
        }
        if problems.is_empty() {
            outln!("every node has a lowering for /device:CPU; there is no code generator for GPU and EMU yet");
        }
    }
    match problems.iter().map(|p| p.kind).min() {
        None => Ok(()),
        Some(kind) => Err(Error::new(kind, format!("{} problems in {bad} of {total} nodes", problems.len()))),
    }
}

/// `message (3 nodes: /a, /b, ..)`.
fn describe(p: &Problem) -> String {
    let shown: Vec<&str> = p.nodes.iter().take(3).map(String::as_str).collect();
    let dots = if p.nodes.len() > 3 { ", .." } else { "" };
    match p.nodes.len() {
        0 => p.message.clone(),
        1 => format!("{} (node {})", p.message, shown[0]),
        n => format!("{} ({n} nodes: {}{dots})", p.message, shown.join(", ")),
    }
}
