//! The `gristmill` binary; all of it is in [`gristmill::cli`].

use gristmill_runtime::heap::ExitingHeap;
use std::process::ExitCode;

/// Exit code 5: out of memory.
#[global_allocator]
static HEAP: ExitingHeap<5> = ExitingHeap;

fn main() -> ExitCode {
    gristmill::cli::main()
}
