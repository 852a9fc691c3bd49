//! `gristmill inspect`: what is in a model.

use super::load::{self};
use super::{outln, print_json};
use crate::compiled::Source;
use crate::error::Result;
use crate::ir::{Graph, Op};
use crate::onnx::{InputInfo, Summary};
use crate::units as format;
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Arguments of `inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    let summary = match load::model(&args.model)? {
        Source::Onnx(m) => m.summary(),
        Source::Graph(g) => summary_of(&g),
    };
    if args.json {
        print_json("inspect", to_json(&summary));
    } else {
        print(&summary);
    }
    Ok(())
}

/// The same facts of a graph in text form.
fn summary_of(g: &Graph) -> Summary {
    let info = |name: &str, v| InputInfo {
        name: name.to_owned(),
        ty: Some(g.ty(v).clone()),
    };
    let constants = g.nodes().filter_map(|(_, n)| match &n.op {
        Op::Constant { value } => Some(value),
        _ => None,
    });
    let (n, bytes) = constants.fold((0, 0), |(n, b), t| {
        (n + t.len() as u64, b + t.size_bytes() as u64)
    });
    let mut op_counts = BTreeMap::new();
    g.nodes()
        .for_each(|(_, n)| *op_counts.entry(n.op.name().to_owned()).or_default() += 1);
    Summary {
        name: g.name.clone(),
        producer: String::new(),
        ir_version: 0,
        opsets: BTreeMap::new(),
        inputs: g
            .inputs
            .iter()
            .zip(&g.input_names)
            .map(|(&v, n)| info(n, v))
            .collect(),
        outputs: g.outputs.iter().map(|o| info(&o.name, o.value)).collect(),
        n_parameters: n,
        parameter_bytes: bytes,
        op_counts,
        n_functions: 0,
    }
}

fn type_text(i: &InputInfo) -> String {
    i.ty.as_ref()
        .map_or("unknown type".to_owned(), |t| t.to_string())
}

fn print(s: &Summary) {
    outln!("model {:?}  {}", s.name, s.producer);
    let opsets: Vec<String> = s
        .opsets
        .iter()
        .map(|(d, v)| format!("{} {v}", if d.is_empty() { "ai.onnx" } else { d }))
        .collect();
    if !opsets.is_empty() {
        outln!("opset {}  (IR version {})", opsets.join(", "), s.ir_version);
    }
    s.inputs
        .iter()
        .for_each(|i| outln!("input  {}: {}", i.name, type_text(i)));
    s.outputs
        .iter()
        .for_each(|i| outln!("output {}: {}", i.name, type_text(i)));
    outln!(
        "parameters {}  ({})",
        format::count(s.n_parameters),
        format::size(s.parameter_bytes)
    );
    let mut ops: Vec<(&String, &usize)> = s.op_counts.iter().collect();
    ops.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    outln!(
        "nodes {}",
        format::count(ops.iter().map(|(_, n)| **n as u64).sum())
    );
    ops.iter().for_each(|(name, n)| outln!("  {n:>6}  {name}"));
}

fn to_json(s: &Summary) -> Value {
    let io = |list: &[InputInfo]| -> Vec<Value> {
        let shape = |i: &InputInfo| {
            i.ty.as_ref().map(|t| {
                t.shape
                    .iter()
                    .map(|d| d.as_const().map_or(json!(d.to_string()), |c| json!(c)))
                    .collect::<Vec<_>>()
            })
        };
        list.iter()
            .map(|i| json!({ "name": i.name, "dtype": i.ty.as_ref().map(|t| t.dtype.name()), "shape": shape(i) }))
            .collect()
    };
    json!({ "name": s.name, "producer": s.producer, "ir_version": s.ir_version, "opsets": s.opsets, "inputs": io(&s.inputs), "outputs": io(&s.outputs),
        "parameters": s.n_parameters, "parameter_bytes": s.parameter_bytes, "ops": s.op_counts, "functions": s.n_functions })
}
