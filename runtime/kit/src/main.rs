//! An executable that holds a compiled model. `gristmill compile` fills this program's room for one; nothing is linked for that.
//!
//! The default build is dynamic. One that runs where there is no C library is made by
//! `RUSTFLAGS="-C target-feature=+crt-static" cargo build -p gristmill-kit --profile kit --target x86_64-unknown-linux-gnu`, or for a musl
//! target; with `--target`, build scripts are not linked so.

mod args;
mod bench;
mod embedded;
mod info;
mod json;
mod load;
mod run;

use args::Args;
use gristmill_runtime::command::output;
use gristmill_runtime::heap::ExitingHeap;
use gristmill_runtime::{Error, ErrorKind};
use json::Json;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::path::Path;
use std::process::ExitCode;

/// Exit code 5: out of memory.
#[global_allocator]
static HEAP: ExitingHeap<5> = ExitingHeap;

/// Follows every internal error.
const REPORT_IT: &str = "this is a bug in gristmill: please report it with the command line and, if possible, the model";

/// Stack of the thread that does the work; the main one may be as small as 64 KiB (`ulimit -s`).
const STACK_BYTES: usize = 2 << 20;

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(print_panic));
    let builder = std::thread::Builder::new().stack_size(STACK_BYTES);
    let code = match builder.spawn(run_command).map(|thread| thread.join()) {
        Ok(Ok(code)) => code,
        // Panics are caught in the thread.
        Ok(Err(_)) => ErrorKind::Internal.exit_code(),
        Err(e) => {
            output::error(format_args!("cannot start a thread: {e}"));
            ErrorKind::OutOfMemory.exit_code()
        }
    };
    ExitCode::from(code)
}

fn run_command() -> u8 {
    let code = match catch_unwind(AssertUnwindSafe(command)) {
        Ok(Ok(())) => 0,
        Ok(Err(e)) => {
            output::error(&e);
            if e.kind() == ErrorKind::Internal {
                output::message(REPORT_IT);
            }
            e.kind().exit_code()
        }
        Err(_) => ErrorKind::Internal.exit_code(),
    };
    output::flush();
    code
}

fn command() -> Result<(), Error> {
    let mut arguments = std::env::args_os();
    let program = arguments.next().unwrap_or_default();
    let program = Path::new(&program).file_name().unwrap_or_default();
    let text = |argument: std::ffi::OsString| {
        let wrong = |a| Error::invalid(format!("unexpected argument {a:?}: it is no Unicode"));
        argument.into_string().map_err(wrong)
    };
    let arguments: Vec<String> = arguments.map(text).collect::<Result<_, _>>()?;
    let args = Args::parse(arguments.into_iter())?;
    if args.help {
        output::text(&args::usage(&program.to_string_lossy()));
        return Ok(());
    }
    if args.version {
        output::text(concat!("gristmill ", env!("CARGO_PKG_VERSION")));
        return Ok(());
    }
    match args {
        Args { info: true, .. } => info::info(&args),
        Args { bench: true, .. } => bench::bench(&args),
        _ => run::run(&args),
    }
}

/// Prints a map that carries its format's name.
fn print_json(name: &str, mut members: Vec<(String, Json)>) {
    let format = format!("gristmill/{name}/1");
    members.push(("format".into(), Json::Text(format)));
    output::unescaped(&Json::Map(members).text());
}

/// Reports a panic as any other internal error.
fn print_panic(info: &PanicHookInfo) {
    let message = info.payload_as_str().unwrap_or("a panic without a message");
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    output::error(format_args!("internal error at {place}: {message}"));
    output::message(REPORT_IT);
}
