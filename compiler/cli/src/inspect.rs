//! `gristmill inspect`: inputs, outputs, parameters and op counts of a model.

use crate::args::DimFlags;
use crate::heading;
use crate::output::outln;
use crate::{image, load, print_json};
use clap::Args;
use gristmill::Source;
use gristmill::ir::{Bindings, Graph, Op, Type, ValueId};
use gristmill::onnx::{InputInfo, Summary};
use gristmill::{Error, Result};
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::units::{count, printable, size};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Arguments of `inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    /// Fix a symbolic dim, e.g. `batch=8`.
    #[arg(long, value_name = "DIM=N", help_heading = heading::INPUTS)]
    set: Vec<String>,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// Runs the verb.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    if image::is_image(&args.model) {
        return image::inspect(&args.model, &args.set, args.json);
    }
    let dims = DimFlags::sizes(&args.set)?;
    let mut summary = match load::model(&args.model)? {
        Source::Onnx(m) => m.summary(),
        Source::Graph(g) => summary_of(&g),
    };
    bind(&mut summary, &dims)?;
    if args.json {
        print_json("inspect", to_json(&summary));
    } else {
        print(&summary);
    }
    Ok(())
}

/// Puts sizes in the place of symbols. Errors with a dim that no input or output has.
fn bind(summary: &mut Summary, dims: &Bindings) -> Result<()> {
    let mut types: Vec<&mut Type> = summary
        .inputs
        .iter_mut()
        .chain(&mut summary.outputs)
        .filter_map(|i| i.ty.as_mut())
        .collect();
    let mut known = BTreeSet::new();
    for dim in types.iter().flat_map(|t| t.shape.iter()) {
        dim.visit_symbols(&mut |symbol| known.extend([symbol.to_owned()]));
    }
    if let Some(dim) = dims.keys().find(|dim| !known.contains(*dim)) {
        let known = known.iter().map(String::as_str);
        return Err(Error::invalid(unknown("dim", dim, known)));
    }
    for ty in &mut types {
        ty.shape = ty.shape.bind(dims);
    }
    Ok(())
}

/// The same facts of a graph in text form.
fn summary_of(g: &Graph) -> Summary {
    let mut op_counts = BTreeMap::new();
    for (_, node) in g.nodes() {
        *op_counts.entry(node.op.name().to_owned()).or_default() += 1;
    }
    let (n_parameters, parameter_bytes) = parameters(g);
    let inputs = g.input_names.iter().zip(&g.inputs);
    let outputs = g.outputs.iter().map(|o| (&o.name, &o.value));
    Summary {
        name: g.name.clone(),
        producer: String::new(),
        ir_version: 0,
        opsets: BTreeMap::new(),
        inputs: inputs.map(|(name, v)| value_of(g, name, *v)).collect(),
        outputs: outputs.map(|(name, v)| value_of(g, name, *v)).collect(),
        n_parameters,
        parameter_bytes,
        op_counts,
        n_functions: 0,
    }
}

fn value_of(g: &Graph, name: &str, v: ValueId) -> InputInfo {
    InputInfo {
        name: name.to_owned(),
        ty: Some(g.ty(v).clone()),
    }
}

/// Number and bytes of the elements of constants.
fn parameters(g: &Graph) -> (u64, u64) {
    let (mut n, mut bytes) = (0, 0);
    for (_, node) in g.nodes() {
        if let Op::Constant { value } = &node.op {
            n += value.len() as u64;
            bytes += value.size_bytes() as u64;
        }
    }
    (n, bytes)
}

fn print(s: &Summary) {
    outln!("model {:?}  {}", s.name, printable(&s.producer));
    if !s.opsets.is_empty() {
        let opsets = s.opsets.iter().map(|(d, v)| format!("{} {v}", domain(d)));
        let opsets: Vec<String> = opsets.collect();
        outln!("opset {}  (IR version {})", opsets.join(", "), s.ir_version);
    }
    s.inputs.iter().for_each(|i| print_value("input ", i));
    s.outputs.iter().for_each(|o| print_value("output", o));
    let (parameters, bytes) = (count(s.n_parameters), size(s.parameter_bytes));
    outln!("parameters {parameters}  ({bytes})");
    print_ops(&s.op_counts);
}

/// The number of all nodes, then of each op, most frequent first.
fn print_ops(counts: &BTreeMap<String, usize>) {
    let n_nodes = counts.values().map(|&n| n as u64).sum();
    outln!("nodes {}", count(n_nodes));
    let mut ops: Vec<(&String, &usize)> = counts.iter().collect();
    ops.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    for (name, n) in ops {
        outln!("  {n:>6}  {}", printable(name));
    }
}

fn domain(name: &str) -> std::borrow::Cow<'_, str> {
    match name {
        "" => "ai.onnx".into(),
        other => printable(other),
    }
}

fn print_value(role: &str, i: &InputInfo) {
    let ty = match &i.ty {
        Some(ty) => ty.to_string(),
        None => "unknown type".to_owned(),
    };
    outln!("{role} {}: {}", printable(&i.name), printable(&ty));
}

fn to_json(s: &Summary) -> Value {
    json!({
        "name": s.name,
        "producer": s.producer,
        "ir_version": s.ir_version,
        "opsets": s.opsets,
        "inputs": s.inputs.iter().map(value_json).collect::<Vec<_>>(),
        "outputs": s.outputs.iter().map(value_json).collect::<Vec<_>>(),
        "parameters": s.n_parameters,
        "parameter_bytes": s.parameter_bytes,
        "ops": s.op_counts,
        "functions": s.n_functions,
    })
}

/// Sizes are numbers, symbols texts.
fn value_json(i: &InputInfo) -> Value {
    let shape = i.ty.as_ref().map(|ty| -> Vec<Value> {
        let dims = ty.shape.iter();
        dims.map(|d| d.as_const().map_or(json!(d.to_string()), |c| json!(c)))
            .collect()
    });
    json!({ "name": i.name, "dtype": i.ty.as_ref().map(|t| t.dtype.name()), "shape": shape })
}
