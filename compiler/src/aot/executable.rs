//! Executables: an image and the program that runs it in one file.

use super::embedding::{Filled, Parts, Symbol, fill};
use super::exports::MOST_LETTERS;
use super::interface::{Interface, identifier, is_of_python};
use super::{Extra, Made, Sizes, Written, made};
use crate::compiled::Source;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::pipeline::Config;
use crate::session::{Session, Settings};
use gristmill_runtime::files;
use gristmill_runtime::image::Contents;
use gristmill_runtime::program::Program;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
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
    let session = Session::new(&Settings::default())?;
    session.write_executable(source, options, sizes, runner, path)
}

impl Session {
    /// [`write_executable`] for the devices, and with the measurements, of the session.
    pub fn write_executable(
        &self,
        source: impl Into<Source>,
        options: &Options,
        sizes: &Sizes,
        runner: &[u8],
        path: &Path,
    ) -> Result<Written> {
        let settings = self.settings();
        let config = Config { settings, options };
        write_with(
            source.into(),
            config,
            sizes,
            runner,
            path,
            &Extra::default(),
        )
    }
}

/// [`write_executable`] with rarely used options.
pub fn write_with(
    source: Source,
    config: Config,
    sizes: &Sizes,
    runner: &[u8],
    path: &Path,
    extra: &Extra,
) -> Result<Written> {
    let made = made(source, config, sizes, path, extra)?;
    put_into(runner, made, None, path)
}

/// Compiles a model to a shared library, by the library of the kit, with a header for C and C++ and a module for Python beside it, whose
/// names are those of the model.
///
/// Errors as [`write_executable`], and for a name that is too long.
pub fn write_library(
    source: Source,
    config: Config,
    sizes: &Sizes,
    library: &[u8],
    path: &Path,
    extra: &Extra,
) -> Result<Written> {
    let made = made(source, config, sizes, path, extra)?;
    let prefix = prefix(&made, path, extra)?;
    let interface = Interface {
        prefix: &prefix,
        about: &made.about,
        programs: &made.programs,
    };
    let file_name = path.file_name().unwrap_or_default().to_string_lossy();
    let names = companions(path, &prefix);
    let texts = [interface.header(), interface.python(&file_name)];
    let written = put_into(library, made, Some(&prefix), path)?;
    for (path, text) in names.into_iter().zip(texts) {
        let put = files::replace(&path, |file| file.write_all(text.as_bytes()));
        put.map_err(|e| Error::invalid(format!("{}: {e}", path.display())))?;
    }
    Ok(written)
}

/// The header and the module beside a library. Python would take `NAME.so` for the module `NAME`, and has some names
/// for itself.
fn companions(path: &Path, prefix: &str) -> [PathBuf; 2] {
    let is_taken = path.file_stem().is_some_and(|stem| stem == prefix);
    let module = match is_taken || is_of_python(prefix) {
        true => format!("{prefix}_model.py"),
        false => format!("{prefix}.py"),
    };
    [format!("{prefix}.h"), module].map(|name| path.with_file_name(name))
}

/// The start of a library's names: the name that was asked for, else that of the file.
fn prefix(made: &Made, path: &Path, extra: &Extra) -> Result<String> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let stem = stem.strip_prefix("lib").unwrap_or(&stem);
    let prefix = identifier(extra.name.map_or(stem, |_| &made.about.name));
    match prefix.len() <= MOST_LETTERS {
        true => Ok(prefix),
        false => {
            let message =
                format!("{prefix:?}: names of a library have at most {MOST_LETTERS} letters");
            Err(Error::invalid(message).hint("--name NAME"))
        }
    }
}

/// Writes a copy of a template with a model in it.
fn put_into(template: &[u8], made: Made, exported: Option<&str>, path: &Path) -> Result<Written> {
    let Made {
        about,
        programs,
        warnings,
    } = made;
    let contents = Contents::of(&about, &programs)?;
    let symbols = symbols(&programs, &contents);
    let head = contents.head();
    let parts = Parts {
        head: &head,
        text: contents.text(),
        table_bytes: contents.n_imports() * size_of::<u64>(),
        constants_bytes: contents.constants_bytes(),
        symbols: &symbols,
        exported,
    };
    let filled = fill(template, &parts)?;
    contents.write_weights(path)?;
    let failed = |e: io::Error| Error::invalid(format!("{}: {e}", path.display()));
    write_program(path, &filled, &contents).map_err(failed)?;
    Ok(Written {
        about,
        sections: contents.sections().to_vec(),
        bytes: filled.bytes(),
        warnings,
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
        program.visit_cpu_kernels(&mut |kernel| {
            if let Some(place) = contents.place_of(&kernel.function) {
                names.entry(place).or_insert_with(|| kernel.name.clone());
            }
        });
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
