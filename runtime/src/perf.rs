//! Names of machine code that was made in this process, for `perf`.
//!
//! `perf report` reads `perf-PID.map` in the folder for temporary files: a line for each function, with its address and size in
//! hexadecimal and its name (tools/perf/Documentation/jit-interface.txt of Linux).

use crate::error::Error;
use crate::files;
use crate::program::Program;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// The end and the name of each function, by its address.
type Functions = BTreeMap<usize, (usize, String)>;

static MAP: OnceLock<(PathBuf, Mutex<Functions>)> = OnceLock::new();

/// From now on, writes the names of all kernels that executors are made of. Gives the file.
///
/// Errors when it cannot be written.
pub fn start() -> Result<PathBuf, Error> {
    let path = Path::new("/tmp").join(format!("perf-{}.map", std::process::id()));
    let (path, functions) = MAP.get_or_init(|| (path, Mutex::default()));
    write(path, &lock(functions))?;
    Ok(path.clone())
}

/// Adds the kernels of a program, if names are wanted.
pub(crate) fn add(program: &Program) -> Result<(), Error> {
    let Some((path, functions)) = MAP.get() else {
        return Ok(());
    };
    let mut functions = lock(functions);
    program.visit_cpu_kernels(&mut |kernel| {
        if let Some((text, offset)) = kernel.function.place() {
            let text = text.bytes().as_ptr_range();
            let name = (text.end.addr(), kernel.name.clone());
            functions.insert(text.start.addr() + offset, name);
        }
    });
    write(path, &functions)
}

/// Each function ends where the next begins, or its text does.
fn lines(functions: &Functions) -> String {
    let nexts = functions.keys().skip(1).copied().chain([usize::MAX]);
    let mut lines = String::new();
    for ((&start, (end, name)), next) in functions.iter().zip(nexts) {
        let size = next.min(*end) - start;
        // Writing to a string does not fail.
        let _ = writeln!(lines, "{start:x} {size:x} {name}");
    }
    lines
}

fn write(path: &Path, functions: &Functions) -> Result<(), Error> {
    let written = files::replace(path, |file| file.write_all(lines(functions).as_bytes()));
    written.map_err(|e| Error::invalid(format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_end_where_the_next_begins_or_the_text_ends() {
        let at = |start, end, name: &str| (start, (end, name.to_owned()));
        let functions = Functions::from([
            at(0x1000, 0x1100, "a"),
            at(0x1040, 0x1100, "b c"),
            at(0x3000, 0x3010, "d"),
        ]);
        assert_eq!(lines(&functions), "1000 40 a\n1040 c0 b c\n3000 10 d\n");
    }
}
