//! The `gristmill` command line: verbs, flags, exit codes. Text for people goes to stdout, progress and warnings to stderr.

mod args;
mod bench;
mod calibrate;
mod check;
mod devices;
mod dump;
mod inspect;
mod load;
mod objective;
mod place;
mod run;

use crate::error::{Error, ErrorKind};
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Compile ONNX models, or gristmill graphs, to native code for this machine, and run them.
#[derive(Parser)]
#[command(name = "gristmill", version, about, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

const EXIT_CODES: &str = "Exit codes: 0 good; 1 internal error; 2 bad command line or input file; 3 unsupported op, dtype or device; \
4 results differ; 5 out of memory or over a declared limit; 6 a device failed.";

#[derive(Subcommand)]
enum Verb {
    /// Compile for this machine and run once.
    Run(run::RunArgs),
    /// Inputs, outputs, parameters and op counts of a model.
    Inspect(inspect::InspectArgs),
    /// Everything that a model needs and gristmill lacks, before any compilation.
    Check(check::CheckArgs),
    /// The text of a compilation stage.
    Dump(dump::DumpArgs),
    /// Time repeated runs.
    Bench(bench::BenchArgs),
    /// Explain which device runs what.
    Place(place::PlaceArgs),
    /// Measure this machine's CPU once, so that predicted times are its own.
    Calibrate(calibrate::CalibrateArgs),
    /// Physical and logical devices.
    Devices(devices::DevicesArgs),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() { 2 } else { 0 });
        }
    };
    let result = match cli.verb {
        Verb::Run(a) => run::run(&a),
        Verb::Inspect(a) => inspect::inspect(&a),
        Verb::Check(a) => check::check(&a),
        Verb::Dump(a) => dump::dump(&a),
        Verb::Bench(a) => bench::bench(&a),
        Verb::Place(a) => place::place(&a),
        Verb::Calibrate(a) => calibrate::calibrate(&a),
        Verb::Devices(a) => devices::devices(&a),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => report(&e),
    }
}

fn report(e: &Error) -> ExitCode {
    eprintln!("error: {e}");
    if e.kind() == ErrorKind::Internal {
        eprintln!(
            "this is a bug in gristmill: please report it with the command line and, if possible, the model"
        );
    }
    ExitCode::from(e.kind().exit_code())
}

/// Prints to stdout; a closed pipe ends the program quietly instead of panicking.
macro_rules! outln {
    ($($arg:tt)*) => {{
        use std::io::Write;
        if writeln!(std::io::stdout(), $($arg)*).is_err() {
            std::process::exit(0);
        }
    }};
}
pub(crate) use outln;

/// Prints a JSON value that carries its format's name.
fn print_json(name: &str, mut value: serde_json::Value) {
    value["format"] = format!("gristmill/{name}/1").into();
    outln!(
        "{}",
        serde_json::to_string_pretty(&value).expect("a JSON value serialises")
    );
}
