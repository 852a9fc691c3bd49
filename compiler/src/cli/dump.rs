//! `gristmill dump`: the text of a compilation stage.

use super::args::CompileArgs;
use super::load::{self, InputFlags, file_error};
use super::outln;
use crate::compiled::compile;
use crate::error::{Error, Result};
use crate::nearest::unknown;
use crate::pipeline::{Lowered, Stage};
use clap::Args;
use std::path::{Path, PathBuf};

/// Arguments of `dump`.
#[derive(Args)]
pub struct DumpArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    #[arg(required_unless_present = "stages")]
    model: Option<PathBuf>,
    /// Which stage; `--stages` lists them.
    #[arg(long, default_value = "graph")]
    stage: String,
    /// List the stages.
    #[arg(long)]
    stages: bool,
    /// Print constants in full, so that the `graph`, `rewritten` and `clusters` texts parse back.
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    compile: CompileArgs,
}

/// Runs the verb.
pub fn dump(args: &DumpArgs) -> Result<()> {
    if args.stages {
        Stage::ALL
            .iter()
            .for_each(|s| outln!("{:<11} {}", s.name(), s.doc()));
        return Ok(());
    }
    let stage = Stage::parse(&args.stage).ok_or_else(|| {
        Error::invalid(unknown(
            "stage",
            &args.stage,
            Stage::ALL.iter().map(|s| s.name()),
        ))
    })?;
    let model = args
        .model
        .as_ref()
        .ok_or_else(|| Error::invalid("which model?"))?;
    let mut options = args.compile.options()?;
    options.keep_stages = true;
    let compiled = compile(load::model(model)?, &options)?;
    // Shapes decide the code; random inputs stand for real ones, values do not matter.
    let (inputs, _) = load::inputs(
        &compiled,
        &InputFlags {
            npz: None,
            npy: &[],
            seed: 0,
        },
    )?;
    let executable = compiled.for_inputs(&inputs)?;
    if let Some(dir) = &args.compile.dump_dir {
        write_all(&executable.lowered, dir)?;
    }
    outln!("{}", executable.lowered.text(stage, args.full)?.trim_end());
    Ok(())
}

/// Writes every stage's text to `DIR/NN-stage.txt`.
pub fn write_all(lowered: &Lowered, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| file_error(dir, e))?;
    for (i, stage) in Stage::ALL.iter().enumerate().filter(|(_, s)| s.is_cheap()) {
        let path = dir.join(format!("{i:02}-{}.txt", stage.name()));
        std::fs::write(&path, lowered.text(*stage, false)?).map_err(|e| file_error(&path, e))?;
    }
    Ok(())
}
