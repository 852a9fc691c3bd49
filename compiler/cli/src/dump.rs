//! `gristmill dump`: the text of a compilation stage.

use crate::args::CompileArgs;
use crate::heading;
use crate::inputs;
use crate::load;
use crate::nodes::NodeFilter;
use crate::output::{self, outln};
use crate::train::{self, ObjectiveArgs, UpdateArgs};
use clap::Args;
use gristmill::Options;
use gristmill::pipeline::{Lowered, Stage};
use gristmill::{Compiled, Source};
use gristmill::{Error, Result};
use gristmill_runtime::nearest::unknown;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `dump`.
#[derive(Args)]
pub struct DumpArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    #[arg(required_unless_present = "stages")]
    model: Option<PathBuf>,
    /// Stage to print; `--stages` lists them.
    #[arg(long, default_value = "graph", help_heading = heading::OUTPUT)]
    stage: String,
    /// List the stages.
    #[arg(long, help_heading = heading::OUTPUT)]
    stages: bool,
    /// Print constants in full, so that the `graph`, `rewritten` and `clusters` texts parse back.
    #[arg(long, help_heading = heading::OUTPUT)]
    full: bool,
    /// Print only nodes whose path matches a regular expression, in stages that list nodes. Files of --dump-dir list all nodes.
    #[arg(long, value_name = "REGEX", help_heading = heading::OUTPUT)]
    node: Option<String>,
    /// Print the stages of a training step, compiled as `train` does with these flags. `--stage gradients` is its graph.
    #[arg(long, help_heading = heading::TRAINING)]
    train: bool,
    #[command(flatten)]
    objective: ObjectiveArgs,
    #[command(flatten)]
    update: UpdateArgs,
    #[command(flatten)]
    compile: CompileArgs,
}

/// The stage that is the graph of a step of training.
const GRADIENTS: &str = "gradients";

/// Runs the verb.
pub fn dump(args: &DumpArgs) -> Result<()> {
    if args.stages {
        list_stages();
        return Ok(());
    }
    let is_step = args.train || args.stage == GRADIENTS;
    let stage = match args.stage.as_str() {
        GRADIENTS => Stage::Graph,
        name => parse_stage(name)?,
    };
    let filter = args.node.as_deref().map(|pattern| filter(pattern, stage));
    let filter = filter.transpose()?;
    let model = args.model.as_ref();
    let model = model.ok_or_else(|| Error::invalid("dump needs a model"))?;
    let (session, mut options) = args.compile.open()?;
    options.keep_stages = true;
    let source = match is_step {
        true => step_of(args, model, &mut options)?,
        false => args.compile.source(model)?,
    };
    let compiled = session.prepare(source, &options)?;
    output::warnings(compiled.model_warnings());
    let mut shown = text(args, stage, &compiled)?;
    if let Some(filter) = filter {
        shown = filter.apply(&shown)?;
    }
    output::text(shown.trim_end());
    Ok(())
}

/// The graph of a step of training.
fn step_of(args: &DumpArgs, model: &Path, options: &mut Options) -> Result<Source> {
    let model = train::onnx_model(model)?;
    let dims = std::mem::take(&mut options.dims);
    let graph = train::step_of(&model, &args.objective, &args.update, dims)?;
    Ok(Source::Graph(Arc::new(graph)))
}

fn list_stages() {
    let doc = "The imported graph, its gradients and the update of its weights: a step of `train`.";
    outln!("{GRADIENTS:<11} {doc}");
    for stage in Stage::ALL {
        outln!("{:<11} {}", stage.name(), stage.doc());
    }
}

fn parse_stage(name: &str) -> Result<Stage> {
    Stage::parse(name).ok_or_else(|| {
        let known = Stage::ALL.iter().map(|s| s.name()).chain([GRADIENTS]);
        Error::invalid(unknown("stage", name, known))
    })
}

/// The filter of `--node`. Errors for stages after the schedule: nodes share their kernels.
fn filter(pattern: &str, stage: Stage) -> Result<NodeFilter> {
    if stage > Stage::Schedule {
        let name = stage.name();
        let message = format!("--node: the text of stage {name:?} has kernels, which nodes share");
        return Err(Error::invalid(message).hint("--stage schedule names the kernel of each node"));
    }
    NodeFilter::parse(pattern)
}

fn text(args: &DumpArgs, stage: Stage, compiled: &Compiled) -> Result<String> {
    if let Some(folder) = &args.compile.dump_dir {
        compiled.check_whole()?;
        // All stages are written, so that code is generated for all.
        let lowered = compiled.lower_for(Stage::Asm, &inputs::shapes(compiled)?)?;
        write_all(&lowered, folder)?;
        return lowered.text(stage, args.full);
    }
    compiled.text(stage, args.full, &inputs::shapes)
}

/// Writes every stage's text to `FOLDER/NN-stage.txt`.
pub fn write_all(lowered: &Lowered, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| load::file_error(folder, e))?;
    for (i, stage) in Stage::ALL.iter().enumerate().filter(|(_, s)| s.is_cheap()) {
        let path = folder.join(format!("{i:02}-{}.txt", stage.name()));
        load::write(&path, &lowered.text(*stage, false)?)?;
    }
    Ok(())
}
