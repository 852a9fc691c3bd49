//! `gristmill place`: which device runs what, and why.

use super::args::CompileArgs;
use super::load::{self, InputFlags};
use super::{outln, print_json};
use crate::compiled::compile;
use crate::error::Result;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `place`.
#[derive(Args)]
pub struct PlaceArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    #[command(flatten)]
    compile: CompileArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn place(args: &PlaceArgs) -> Result<()> {
    let mut options = args.compile.options()?;
    options.keep_stages = true;
    let compiled = compile(load::model(&args.model)?, &options)?;
    // Shapes decide costs; random inputs stand for real ones, values do not matter.
    let (inputs, _) = load::inputs(&compiled, &InputFlags { npz: None, npy: &[], seed: 0 })?;
    let executable = compiled.for_inputs(&inputs)?;
    let lowered = &executable.lowered;
    lowered.report.print_warnings();
    args.compile.log_placement(lowered);
    if !args.json {
        outln!("{}", lowered.placement.to_text(&lowered.clusters).trim_end());
        return Ok(());
    }
    let p = &lowered.placement;
    let nodes = lowered.clusters.nodes().zip(&p.nodes).filter_map(|((_, node), placed)| {
        let placed = placed.as_ref()?;
        let device = p.devices[placed.device].to_string();
        Some(json!({ "name": node.origin.as_str(), "op": node.op.name(), "device": device, "start_ns": placed.start.0, "end_ns": placed.end.0, "reason": placed.reason.to_string() }))
    });
    let candidates = p.candidates.iter().map(|c| json!({ "algorithm": c.algorithm, "makespan_ns": c.makespan.0, "devices": c.n_devices, "fits_memory": c.fits_memory }));
    print_json(
        "place",
        json!({ "makespan_ns": p.makespan.0, "algorithm": p.algorithm, "nodes": nodes.collect::<Vec<_>>(), "candidates": candidates.collect::<Vec<_>>(),
        "peak_bytes": p.devices.iter().zip(&p.peak_bytes).map(|(d, b)| (d.to_string(), json!(b.0))).collect::<serde_json::Map<_, _>>() }),
    );
    Ok(())
}
