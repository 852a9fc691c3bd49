//! `gristmill compile`: compile ahead of time, to a file.

use crate::args::{CompileArgs, DimFlags};
use crate::heading;
use crate::kit::{self, Template};
use crate::output::{self, noteln, outln};
use crate::spinner::Spinner;
use crate::{parse, print_json};
use clap::{Args, ValueEnum};
use gristmill::Options;
use gristmill::Session;
use gristmill::Source;
use gristmill::aot::{self, Extra, Sizes, Written, executable};
use gristmill::ir::Bindings;
use gristmill::pipeline::Config;
use gristmill::{Error, Result};
use gristmill_runtime::command::given::dims_text;
use gristmill_runtime::image::WEIGHTS_MAGIC;
use gristmill_runtime::units::{plural, size, time_ns};
use serde_json::json;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `compile`.
#[derive(Args)]
pub struct CompileVerbArgs {
    /// An ONNX model, or a graph in text form (`.ir`).
    model: PathBuf,
    /// File to write. A name without extension is a self-contained executable. `libmodel.so` is a shared library, with `model.h` for C and C++
    /// and `model.py` for Python next to it. `model.gmx` is an image, which `run`, `bench`, `inspect` and `check` accept in place of a model.
    #[arg(short, long, value_name = "OUT", help_heading = heading::OUTPUT)]
    output: PathBuf,
    /// Folder of the kit, the templates of executables and libraries. Default: GRISTMILL_KIT, `gristmill-kit` next to this program, or a kit
    /// built once from this program's checkout.
    #[arg(long, value_name = "DIR", help_heading = heading::COMPILATION)]
    kit: Option<PathBuf>,
    /// Name of the model in the image.
    #[arg(long, help_heading = heading::OUTPUT)]
    name: Option<String>,
    /// Leave the names of nodes, values and kernels out of the image. Errors and profiles then have no names.
    #[arg(long, help_heading = heading::OUTPUT)]
    no_names: bool,
    /// Place of the weights.
    #[arg(long, value_enum, default_value_t = Weights::Embed, help_heading = heading::OUTPUT)]
    weights: Weights,
    /// Seed of `Dropout` with `training_mode`.
    #[arg(long, default_value_t = 0, help_heading = heading::COMPILATION)]
    seed: u64,
    /// Use rates, times and placements measured on this machine. The image then differs from machine to machine.
    #[arg(long, help_heading = heading::COMPILATION)]
    measured: bool,
    /// Sizes may be lists here: `--shape batch=1,8,32` makes a variant for each.
    #[command(flatten)]
    compile: CompileArgs,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// Places of weights.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Weights {
    /// In the image.
    Embed,
    /// In `OUT.weights`, next to the image.
    File,
}

/// Runs the verb.
pub fn compile(args: &CompileVerbArgs) -> Result<()> {
    let form = Form::of(&args.output)?;
    let weights = weights_file(args)?;
    check_apart(args, weights.as_deref())?;
    if args.json && is_standard_output(&args.output) {
        let message = format!(
            "--json and {} are both standard output",
            args.output.display()
        );
        return Err(Error::invalid(message).hint("-o with a file, or no --json"));
    }
    let flags = &args.compile;
    if looks_inside(flags) {
        let message = "-v, --dump-dir and --log-device-placement are for run, bench and dump";
        return Err(Error::invalid(message));
    }
    let started = Instant::now();
    let (flags, sizes) = lists(&args.compile)?;
    let (session, options) = open(args, &flags)?;
    let source = args.compile.source(&args.model)?;
    let extra = Extra {
        name: args.name.as_deref(),
        is_nameless: args.no_names,
        weights,
        progress: &progress,
    };
    let config = Config {
        settings: session.settings(),
        options: &options,
    };
    let written = form.write(args, source, config, &sizes, &extra)?;
    let time = started.elapsed().as_nanos() as u64;
    output::warnings(&written.warnings);
    if args.json {
        print_json("compile", to_json(&written, time));
    } else {
        print(&args.output, &written, time);
    }
    Ok(())
}

/// True for flags that show how a model is compiled.
fn looks_inside(flags: &CompileArgs) -> bool {
    flags.verbose > 0 || flags.dump_dir.is_some() || flags.log_device_placement
}

/// Kinds of files.
#[derive(Clone, Copy)]
enum Form {
    Image,
    Executable,
    Library,
}

impl Form {
    /// The form that a name says.
    fn of(path: &Path) -> Result<Form> {
        match path.extension().map(|e| e.to_string_lossy()).as_deref() {
            Some("gmx") => Ok(Form::Image),
            Some("so") => Ok(Form::Library),
            None => Ok(Form::Executable),
            Some(other) => {
                let message = format!("{}: no file of kind .{other} is written", path.display());
                Err(Error::unsupported(message)
                    .hint("-o MODEL for an executable, -o MODEL.so for a library, -o MODEL.gmx for an image"))
            }
        }
    }

    fn write(
        self,
        args: &CompileVerbArgs,
        source: Source,
        config: Config,
        sizes: &Sizes,
        extra: &Extra,
    ) -> Result<Written> {
        match self {
            Form::Image => aot::write_with(source, config, sizes, &args.output, extra),
            Form::Executable => {
                let runner = template(Template::Runner, args.kit.as_deref())?;
                executable::write_with(source, config, sizes, &runner, &args.output, extra)
            }
            Form::Library => {
                let library = template(Template::Library, args.kit.as_deref())?;
                executable::write_library(source, config, sizes, &library, &args.output, extra)
            }
        }
    }
}

/// The bytes of a template.
fn template(template: Template, kit: Option<&Path>) -> Result<Vec<u8>> {
    let spinner = Spinner::default();
    let path = kit::find(template, kit, &|text| spinner.begin(text))?;
    let read = std::fs::read(&path);
    read.map_err(|e| Error::invalid(format!("{}: {e}", path.display())))
}

/// Name of the file beside the image that gets the weights, if one does.
///
/// Errors for one that is there and holds something else.
fn weights_file(args: &CompileVerbArgs) -> Result<Option<String>> {
    if args.weights == Weights::Embed {
        return Ok(None);
    }
    let path = args.output.with_extension("weights");
    if holds_no_weights(&path) {
        let message = format!(
            "{}: is there, and holds no weights of an image",
            path.display()
        );
        return Err(Error::invalid(message).hint("another name for -o"));
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Error::invalid("-o: the name of the image is not UTF-8"))?;
    Ok(Some(name.to_owned()))
}

/// True for a file that is there and is not one of weights.
fn holds_no_weights(path: &Path) -> bool {
    let mut magic = [0; WEIGHTS_MAGIC.len()];
    let read = std::fs::File::open(path).map(|mut file| file.read_exact(&mut magic));
    read.is_ok_and(|read| read.is_err() || magic != WEIGHTS_MAGIC)
}

/// Errors when a file to be written is the model.
fn check_apart(args: &CompileVerbArgs, weights: Option<&str>) -> Result<()> {
    let weights = weights.map(|name| args.output.with_file_name(name));
    let mut outputs = std::iter::once(&args.output).chain(&weights);
    match outputs.find(|output| are_one_file(output, &args.model)) {
        None => Ok(()),
        Some(output) => {
            let message = format!("{}: is the model itself", output.display());
            Err(Error::invalid(message).hint("another name for -o"))
        }
    }
}

fn are_one_file(a: &Path, b: &Path) -> bool {
    a.canonicalize()
        .ok()
        .zip(b.canonicalize().ok())
        .is_some_and(|(a, b)| a == b)
}

/// True for a path that leads to where this process's results go.
#[cfg(unix)]
fn is_standard_output(path: &Path) -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    let output = std::io::stdout().as_fd().try_clone_to_owned();
    let output = output.and_then(|fd| std::fs::File::from(fd).metadata());
    let files = output.and_then(|output| Ok((output, std::fs::metadata(path)?)));
    files.is_ok_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

#[cfg(not(unix))]
fn is_standard_output(_: &Path) -> bool {
    false
}

fn open(args: &CompileVerbArgs, flags: &CompileArgs) -> Result<(Session, Options)> {
    let (session, options) = match args.measured {
        true => flags.open()?,
        false => flags.open_reproducibly()?,
    };
    let options = Options {
        seed: args.seed,
        ..options
    };
    match options.ranges.first_key_value() {
        None => Ok((session, options)),
        Some((dim, range)) => {
            let message =
                format!("--shape {dim}={range}: an image has code for sizes, not for ranges");
            Err(Error::unsupported(message).hint(format!("--shape {dim}=1,8,32")))
        }
    }
}

/// The flags without lists of sizes, and the lists.
fn lists(args: &CompileArgs) -> Result<(CompileArgs, Sizes)> {
    let (lists, single): (Vec<String>, Vec<String>) = args
        .dims
        .shape
        .iter()
        .cloned()
        .partition(|s| s.contains(','));
    let mut sizes = Sizes::new();
    for text in &lists {
        let (dim, list) = parse::pair(text, "--shape", "DIM=N,N,..")?;
        let of = |n: &str| parse::dim_size(n).map_err(|e| e.context(format!("--shape {text:?}")));
        let mut list: Vec<usize> = list.split(',').map(of).collect::<Result<_>>()?;
        list.sort_unstable();
        list.dedup();
        if sizes.insert(dim.to_owned(), list).is_some() {
            return Err(Error::invalid(format!("--shape: {dim:?} is given twice")));
        }
    }
    let dims = DimFlags {
        set: args.dims.set.clone(),
        shape: single,
    };
    let flags = CompileArgs {
        dims,
        ..args.clone()
    };
    Ok((flags, sizes))
}

/// Says on a terminal which of several variants is compiled.
fn progress(i: usize, n: usize, dims: &Bindings) {
    if n > 1 && std::io::stderr().is_terminal() {
        noteln!(
            "variant {} of {n}: {}",
            i + 1,
            dims_text(dims.clone().into_iter().collect::<Vec<_>>().iter())
        );
    }
}

fn print(path: &Path, written: &Written, time: u64) {
    let n = plural(written.about.variants.len(), "variant");
    let (bytes, time) = (size(written.bytes as u64), time_ns(time));
    let weights = match written.about.weights.as_str() {
        "" => String::new(),
        name => format!(
            " and {} of weights in {name}",
            size(written.weights_bytes() as u64)
        ),
    };
    let line = format!("{}: {bytes}{weights}, {n}, in {time}", path.display());
    // A pipe, which has no name of its own, may be standard output itself.
    match path.canonicalize().is_ok_and(|path| path.is_file()) {
        true => outln!("{line}"),
        false => noteln!("{line}"),
    }
}

fn to_json(written: &Written, time: u64) -> serde_json::Value {
    let variants = written.about.variants.iter();
    let variants = variants.map(|v| v.dims.iter().cloned().collect::<Bindings>());
    json!({
        "bytes": written.bytes,
        "weights_bytes": written.weights_bytes(),
        "variants": variants.collect::<Vec<_>>(),
        "compile_ns": time,
    })
}
