//! The `gristmill` command line: verbs, flags, exit codes. Text for people goes to stdout, progress and warnings to stderr.

mod args;
mod bench;
mod calibrate;
mod check;
mod cluster;
mod compile;
mod completions;
mod devices;
mod dump;
mod heading;
mod image;
mod inputs;
mod inspect;
mod keys;
mod kit;
mod launch;
mod load;
mod man;
mod nodes;
mod objective;
mod output;
mod page_header;
mod parse;
mod place;
mod planned;
mod run;
mod server;
mod signals;
mod spinner;
mod summary;
mod train;
mod variables;
mod watchdog;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use gristmill::{Error, ErrorKind, Result};
use gristmill_runtime::heap::ExitingHeap;
use output::{Color, errln};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::ExitCode;

/// Exit code 5: out of memory.
#[global_allocator]
static HEAP: ExitingHeap<5> = ExitingHeap;

/// Compile ONNX models, or gristmill graphs, to native code for this machine, and run them.
#[derive(Parser)]
#[command(name = "gristmill", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    /// Coloured output.
    #[arg(
        long,
        value_enum,
        default_value = "auto",
        global = true,
        value_name = "WHEN",
        help_heading = heading::OUTPUT
    )]
    color: Color,
    /// Print no progress and no notes. Warnings and errors stay.
    #[arg(short, long, global = true, help_heading = heading::OUTPUT)]
    quiet: bool,
}

const EXIT_CODES: &str = "Exit codes: 0 good; 1 internal error; 2 bad command line or input file; 3 unsupported op, dtype or device; \
4 results differ; 5 out of memory or over a declared limit; 6 a device failed.";

/// Follows every internal error.
const REPORT_IT: &str = "this is a bug in gristmill: please report it with the command line and, if possible, the model";

#[derive(Subcommand)]
enum Verb {
    /// Compile a model for this machine and run it once.
    Run(run::RunArgs),
    /// Compile a model ahead of time to an executable, a library or an image.
    Compile(compile::CompileVerbArgs),
    /// List inputs, outputs, parameters and operators of a model.
    Inspect(inspect::InspectArgs),
    /// Report how each operator compiles and what is unsupported, without compiling.
    Check(check::CheckArgs),
    /// Print the text of a compilation stage.
    Dump(dump::DumpArgs),
    /// Measure run time, compile time and memory.
    Bench(bench::BenchArgs),
    /// Fine-tune a model and save it with the new weights.
    Train(Box<train::TrainArgs>),
    /// Explain the device of each node.
    Place(place::PlaceArgs),
    /// Measure this machine once, so that predictions match it.
    Calibrate(calibrate::CalibrateArgs),
    /// Serve as one task of several machines.
    Server(server::ServerArgs),
    /// Start all tasks of a cluster which are on this machine, and end them together.
    Launch(launch::LaunchArgs),
    /// Make the keys of several machines: certificates of tasks and clients.
    Keys(keys::KeysArgs),
    /// List the variables on the tasks of a cluster, or set them to their initial values.
    Variables(variables::VariablesArgs),
    /// List devices, drivers and compilers.
    Devices(devices::DevicesArgs),
    /// Print a script that completes verbs and flags in a shell.
    Completions(completions::CompletionsArgs),
    /// Write man pages of the program and its verbs.
    Man(man::ManArgs),
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(print_panic));
    let color = Color::of_arguments(std::env::args_os());
    color.apply();
    let command = Cli::command().color(color.choice());
    let parsed = command
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let code = match parsed {
        Ok(cli) => {
            if cli.quiet {
                output::be_quiet();
            }
            exit_code_of(|| run_verb(cli.verb))
        }
        Err(e) => print_usage(&e),
    };
    output::flush();
    ExitCode::from(code)
}

fn run_verb(verb: Verb) -> Result<()> {
    match verb {
        Verb::Run(a) => run::run(&a),
        Verb::Compile(a) => compile::compile(&a),
        Verb::Inspect(a) => inspect::inspect(&a),
        Verb::Check(a) => check::check(&a),
        Verb::Dump(a) => dump::dump(&a),
        Verb::Bench(a) => bench::bench(&a),
        Verb::Train(a) => train::train(&a),
        Verb::Place(a) => place::place(&a),
        Verb::Calibrate(a) => calibrate::calibrate(&a),
        Verb::Server(a) => server::server(&a),
        Verb::Launch(a) => launch::launch(&a),
        Verb::Keys(a) => keys::keys(&a),
        Verb::Variables(a) => variables::variables(&a),
        Verb::Devices(a) => devices::devices(&a),
        Verb::Completions(a) => completions::completions(&a),
        Verb::Man(a) => man::man(&a),
    }
}

/// Prints help, or an error of the command line, and returns its exit code.
fn print_usage(e: &clap::Error) -> u8 {
    match e.print() {
        Err(failed) if !e.use_stderr() => output::stop(&failed),
        _ if e.use_stderr() => ErrorKind::InvalidInput.exit_code(),
        _ => 0,
    }
}

/// Runs a verb, prints its error, and returns the exit code. A panic is an internal error, which [`print_panic`] has printed.
fn exit_code_of(verb: impl FnOnce() -> Result<()>) -> u8 {
    match catch_unwind(AssertUnwindSafe(verb)) {
        Ok(Ok(())) => 0,
        Ok(Err(e)) => {
            print_error(&e);
            e.kind().exit_code()
        }
        Err(_) => ErrorKind::Internal.exit_code(),
    }
}

fn print_error(e: &Error) {
    output::error(e);
    if e.kind() == ErrorKind::Internal {
        errln!("{REPORT_IT}");
    }
}

/// Reports a panic as any other internal error, with its backtrace where RUST_BACKTRACE asks for one.
fn print_panic(info: &PanicHookInfo) {
    let message = info.payload_as_str().unwrap_or("a panic without a message");
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    output::error(format_args!("internal error at {place}: {message}"));
    let backtrace = std::backtrace::Backtrace::capture();
    if backtrace.status() == std::backtrace::BacktraceStatus::Captured {
        errln!("{backtrace}");
    }
    errln!("{REPORT_IT}");
}

/// Prints a JSON value that carries its format's name.
fn print_json(name: &str, mut value: serde_json::Value) {
    value["format"] = format!("gristmill/{name}/1").into();
    print_value(&value);
}

/// Prints a JSON value, indented.
fn print_value(value: &serde_json::Value) {
    output::unescaped(&format!("{value:#}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_are_internal_errors() {
        assert_eq!(exit_code_of(|| panic!("a panic that a test asks for")), 1);
        assert_eq!(exit_code_of(|| Err(Error::invalid("wrong"))), 2);
        assert_eq!(exit_code_of(|| Ok(())), 0);
    }
}
