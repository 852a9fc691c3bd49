//! Executables: an image and the program that runs it in one file.

use super::fill::{Filled, Parts, Symbol, fill};
use super::{Extra, Sizes, Written, written};
use crate::compiled::Source;
use crate::error::{Error, Result};
use crate::options::Options;
use gristmill_runtime::files;
use gristmill_runtime::image::{Kind, Section};
use gristmill_runtime::program::{Kernel, Program, StepKind};
use gristmill_runtime::text::Text;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
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
    let extra = Extra {
        name: None,
        is_nameless: false,
        progress: &|_, _, _| {},
    };
    let image = Temporary::beside(path);
    let (written, programs) = written(source.into(), options, sizes, &image.0, &extra)?;
    put_into(runner, &image.0, &written.sections, &programs, path)?;
    Ok(written)
}

/// A file that is removed when this goes.
struct Temporary(PathBuf);

impl Temporary {
    fn beside(path: &Path) -> Temporary {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.gmx", std::process::id()));
        Temporary(path.with_file_name(name))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // It is not there where writing it failed.
        let _ = fs::remove_file(&self.0);
    }
}

/// Writes a runner with an image, whose constants are read as they are written.
fn put_into(
    runner: &[u8],
    image: &Path,
    sections: &[Section],
    programs: &[Arc<Program>],
    path: &Path,
) -> Result<()> {
    let failed = |e: io::Error| Error::invalid(format!("{}: {e}", path.display()));
    let mut file = File::open(image).map_err(failed)?;
    let constants = last(sections)?;
    let texts: Vec<&Section> = sections.iter().filter(|s| s.kind == Kind::Text).collect();
    let start = texts.first().map_or(constants.offset, |s| s.offset);
    let end = texts.last().map_or(start, |s| s.offset + s.bytes);
    let mut bytes = vec![0; end];
    file.read_exact(&mut bytes).map_err(failed)?;
    let symbols = symbols(programs, &texts)?;
    let parts = Parts {
        head: &bytes[..start],
        text: &bytes[start..],
        table_bytes: table_bytes(programs),
        constants_bytes: constants.bytes,
        symbols: &symbols,
    };
    let filled = fill(runner, &parts)?;
    let skipped = file.seek(SeekFrom::Start(constants.offset as u64));
    skipped.map_err(failed)?;
    write_program(path, &filled, &mut file.take(constants.bytes as u64)).map_err(failed)
}

/// The section of constants, which is the last.
fn last(sections: &[Section]) -> Result<&Section> {
    let last = sections.last().filter(|s| s.kind == Kind::Constants);
    last.ok_or_else(|| Error::internal("an image does not end with its constants"))
}

fn write_program(path: &Path, filled: &Filled, constants: &mut impl Read) -> io::Result<()> {
    files::replace(path, |file| {
        filled.write(file, |out| io::copy(constants, out).map(drop))?;
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
    // Where another file was replaced, this one has its permissions.
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

/// Bytes of the addresses that all texts call.
fn table_bytes(programs: &[Arc<Program>]) -> usize {
    let imports = Functions::of(programs)
        .texts
        .iter()
        .map(|t| t.imports().len())
        .sum::<usize>();
    imports * size_of::<u64>()
}

/// The kernels of programs as symbols of the part of an image from its first text to its last.
fn symbols(programs: &[Arc<Program>], sections: &[&Section]) -> Result<Vec<Symbol>> {
    let functions = Functions::of(programs);
    if functions.texts.len() != sections.len() {
        return Err(Error::internal(
            "texts of an image and of its programs differ in number",
        ));
    }
    let start = sections.first().map_or(0, |s| s.offset);
    let mut symbols = Vec::new();
    for (names, section) in functions.names.iter().zip(sections) {
        let next = names.keys().skip(1).copied().chain([section.bytes]);
        for ((offset, name), end) in names.iter().zip(next) {
            symbols.push(Symbol {
                name: name.clone(),
                offset: section.offset - start + offset,
                bytes: end.saturating_sub(*offset),
            });
        }
    }
    Ok(symbols)
}

/// The texts of programs in the order of an image, and the names of the functions in each by their offsets.
#[derive(Default)]
struct Functions {
    texts: Vec<Arc<Text>>,
    names: Vec<BTreeMap<usize, String>>,
}

impl Functions {
    fn of(programs: &[Arc<Program>]) -> Functions {
        let mut functions = Functions::default();
        programs.iter().for_each(|p| functions.visit(p));
        functions
    }

    fn visit(&mut self, program: &Program) {
        for partition in &program.partitions {
            for kernel in &partition.kernels {
                if let Kernel::Cpu(kernel) = kernel
                    && let Some((text, offset)) = kernel.function.place()
                {
                    let known = self.texts.iter().position(|t| Arc::ptr_eq(t, text));
                    let known = known.unwrap_or_else(|| {
                        self.texts.push(text.clone());
                        self.names.push(BTreeMap::new());
                        self.texts.len() - 1
                    });
                    let name = self.names[known].entry(offset);
                    name.or_insert_with(|| kernel.name.clone());
                }
            }
            for step in &partition.steps {
                match &step.kind {
                    StepKind::If(branches) => {
                        self.visit(&branches.then_branch);
                        self.visit(&branches.else_branch);
                    }
                    StepKind::Loop(repeated) => self.visit(&repeated.body),
                    _ => {}
                }
            }
        }
    }
}
