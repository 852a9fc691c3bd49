//! Reads models, graphs and test data that the user names.

use crate::image::is_image;
use gristmill::Source;
use gristmill::Tensor;
use gristmill::aot::program_file::ProgramFile;
use gristmill::ir::Graph;
use gristmill::onnx::{self, Declared};
use gristmill::{Error, ErrorKind, Result};
use gristmill_runtime::files::{self, Kind, MAX_MESSAGE_BYTES, MAX_TEXT_BYTES, MAX_TOML_BYTES};
use gristmill_runtime::npy;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The text of a file.
pub fn text(path: &Path) -> Result<String> {
    files::read_text(path, MAX_TEXT_BYTES).map_err(|e| file_error(path, e))
}

/// The text of a TOML file.
pub fn toml(path: &Path) -> Result<String> {
    files::read_text(path, MAX_TOML_BYTES).map_err(|e| file_error(path, e))
}

/// Reads `*.onnx`, or the text form of a graph from `*.ir`.
pub fn model(path: &Path) -> Result<Source> {
    if path.extension().is_some_and(|e| e == "ir") {
        let graph = Graph::parse(&text(path)?).map_err(|e| e.context(path.display()))?;
        return Ok(Source::Graph(Arc::new(graph)));
    }
    if is_image(path) {
        let path = path.display();
        let message =
            format!("{path}: an image holds a compiled model, which is not compiled again");
        return Err(Error::invalid(message).hint("run, bench, inspect and check take images"));
    }
    let loaded = onnx::load(path).map_err(|e| match ProgramFile::of(path) {
        Some(program) => program.error().context(path.display()),
        None => e,
    });
    Ok(Source::Onnx(Arc::new(loaded?)))
}

/// One array of a NumPy file that a flag `--input` names.
pub fn array(path: &Path) -> Result<Tensor> {
    Tensor::from_npy(path).map_err(|e| match Kind::of(path) {
        Some(Kind::Zip) => Error::from(e).hint(format!("--inputs {}", path.display())),
        kind => hinted(e.into(), kind),
    })
}

/// Arrays of a NumPy archive, by name.
pub fn archive(path: &Path) -> Result<Vec<(String, Tensor)>> {
    npy::read_npz(path).map_err(|e| match Kind::of(path) {
        Some(Kind::Npy) => {
            let hint = format!(
                "an archive of named arrays, or --input NAME={}",
                path.display()
            );
            Error::from(e).hint(hint)
        }
        kind => hinted(e.into(), kind),
    })
}

/// An error about a file of some kind, with a step towards the file that was meant.
fn hinted(e: Error, kind: Option<Kind>) -> Error {
    match kind.and_then(Kind::hint) {
        Some(hint) => e.hint(hint),
        None => e,
    }
}

/// Writes a file as a whole: after a failure the earlier one is still there.
pub fn write(path: &Path, text: &str) -> Result<()> {
    files::replace(path, |file| file.write_all(text.as_bytes())).map_err(|e| file_error(path, e))
}

/// An error about a file.
pub fn file_error(path: &Path, e: io::Error) -> Error {
    let kind = match e.kind() {
        io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
        _ => ErrorKind::InvalidInput,
    };
    Error::new(kind, format!("{}: {e}", path.display()))
}

/// The tensors of `PREFIX_0.pb`, `PREFIX_1.pb`, ... of a test-data folder, with their names. File `i` holds the input or output `i` that
/// is declared, if any is; a value without a name in the file has the declared one.
pub fn test_data(
    folder: &Path,
    prefix: &str,
    declared: &[Declared],
) -> Result<Vec<(String, Tensor)>> {
    if !folder.is_dir() {
        return Err(
            Error::invalid(format!("{}: not a folder", folder.display()))
                .hint("--test-data with a folder that has input_0.pb and output_0.pb"),
        );
    }
    let mut found = Vec::new();
    for i in 0.. {
        let path: PathBuf = folder.join(format!("{prefix}_{i}.pb"));
        if !path.exists() {
            break;
        }
        let bytes = files::read(&path, MAX_MESSAGE_BYTES).map_err(|e| file_error(&path, e))?;
        let tensors = match declared.get(i) {
            Some(declared) => declared.read(&bytes),
            None => onnx::tensor_from_pb(&bytes).map(|tensor| vec![tensor]),
        };
        found.extend(tensors.map_err(|e| e.context(path.display()))?);
    }
    Ok(found)
}
