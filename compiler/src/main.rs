//! The `gristmill` binary; all of it is in [`gristmill::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    gristmill::cli::main()
}
