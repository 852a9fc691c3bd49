//! Executables: an image and the program that runs it in one file.

use super::fill::{Filled, Parts, Symbol, fill};
use super::{Extra, Made, Sizes, Written, made};
use crate::compiled::Source;
use crate::error::{Error, Result};
use crate::options::Options;
use gristmill_runtime::files;
use gristmill_runtime::image::Contents;
use gristmill_runtime::program::{Kernel, Program};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

/// Compiles a model as [`write`](super::write) does, and puts its image into a copy of a runner, the program of the package `gristmill-kit`
/// for the system that the image is for. No linker is used.
///
/// Errors as [`write`](super::write), and for a file that is no runner.
pub fn write_executable(
    source: impl Into<Source>,
    options: &Options,
    sizes: &Sizes,
    runner: &[u8],
    path: &Path,
) -> Result<Written> {
    let extra = Extra::default();
    write_with(source.into(), options, sizes, runner, path, &extra)
}

/// [`write_executable`] with further wishes.
pub(crate) fn write_with(
    source: Source,
    options: &Options,
    sizes: &Sizes,
    runner: &[u8],
    path: &Path,
    extra: &Extra,
) -> Result<Written> {
    let Made { about, programs } = made(source, options, sizes, path, extra)?;
    let contents = Contents::of(&about, &programs)?;
    let symbols = symbols(&programs, &contents);
    let head = contents.head();
    let parts = Parts {
        head: &head,
        text: contents.text(),
        table_bytes: contents.n_imports() * size_of::<u64>(),
        constants_bytes: contents.constants_bytes(),
        symbols: &symbols,
    };
    let filled = fill(runner, &parts)?;
    contents.write_weights(path)?;
    let failed = |e: io::Error| Error::invalid(format!("{}: {e}", path.display()));
    write_program(path, &filled, &contents).map_err(failed)?;
    Ok(Written {
        about,
        sections: contents.sections().to_vec(),
        bytes: filled.bytes(),
    })
}

fn write_program(path: &Path, filled: &Filled, contents: &Contents) -> io::Result<()> {
    files::replace(path, |file| {
        filled.write(file, |out| contents.write_constants(out))?;
        file.flush()?;
        let metadata = file.get_ref().metadata()?;
        match metadata.is_file() {
            true => {
                file.get_ref().set_permissions(executable(&metadata))?;
                file.get_ref().sync_all()
            }
            // Pipes and devices have nothing to sync.
            false => Ok(()),
        }
    })?;
    // A file that was replaced has left its permissions.
    match fs::metadata(path)? {
        metadata if metadata.is_file() => fs::set_permissions(path, executable(&metadata)),
        _ => Ok(()),
    }
}

/// Permissions with that of execution for all who may read.
#[cfg(unix)]
fn executable(metadata: &fs::Metadata) -> fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    let mode = metadata.permissions().mode();
    fs::Permissions::from_mode(mode | (mode & 0o444) >> 2)
}

#[cfg(not(unix))]
fn executable(metadata: &fs::Metadata) -> fs::Permissions {
    metadata.permissions()
}

/// The kernels of programs as symbols of a text; one for functions of several names.
fn symbols(programs: &[Arc<Program>], contents: &Contents) -> Vec<Symbol> {
    let mut names = BTreeMap::new();
    for program in programs {
        add_names(program, contents, &mut names);
    }
    let ends = names.keys().skip(1).copied();
    let ends: Vec<usize> = ends.chain([contents.text().len()]).collect();
    let symbols = names.into_iter().zip(ends);
    let symbol = |((offset, name), end): ((usize, String), usize)| Symbol {
        name,
        offset,
        bytes: end.saturating_sub(offset),
    };
    symbols.map(symbol).collect()
}

fn add_names(program: &Program, contents: &Contents, names: &mut BTreeMap<usize, String>) {
    for partition in &program.partitions {
        for kernel in &partition.kernels {
            if let Kernel::Cpu(kernel) = kernel
                && let Some(place) = contents.place_of(&kernel.function)
            {
                names.entry(place).or_insert_with(|| kernel.name.clone());
            }
        }
        for step in &partition.steps {
            for body in step.kind.sub_programs() {
                add_names(body, contents, names);
            }
        }
    }
}
