//! Files of the checkout, and of Rust files the part that ships.

use std::fs;
use std::path::{Path, PathBuf};

/// A text file of the checkout.
pub(super) struct File {
    /// From the root, with forward slashes.
    pub(super) path: String,
    pub(super) text: String,
}

impl File {
    /// Reads a file; `None` if it is not text.
    pub(super) fn read(path: PathBuf) -> Option<File> {
        let text = String::from_utf8(fs::read(&path).ok()?).ok()?;
        let path = path
            .strip_prefix(root())
            .expect("walked from the root")
            .to_string_lossy()
            .replace('\\', "/");
        Some(File { path, text })
    }
}

pub(super) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

pub(super) fn rust_files() -> impl Iterator<Item = File> {
    files()
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "rs"))
        .filter_map(File::read)
}

/// All files of the checkout in a stable order, without build output, git's own and the virtual environment.
pub(super) fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the checkout is readable") {
            let entry = entry.expect("a folder of the checkout is readable");
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type().expect("an entry has a type");
            if kind.is_dir() && ![".git", ".venv", "target", "__pycache__"].contains(&name.as_str())
            {
                folders.push(entry.path());
            } else if kind.is_file() && name != ".git" && name != "Cargo.lock" {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

pub(super) fn is_test(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs")
}

/// Beginning of unit tests in the file of their subject; a declaration `mod tests;` ends nothing.
const UNIT_TESTS: &str = "\n#[cfg(test)]\nmod tests {";

/// Production sources: no tests, benches or examples, and no build scripts. Of a file that ends
/// with unit tests, the part before them.
pub(super) fn production() -> impl Iterator<Item = File> {
    rust_files()
        .filter(|f| !is_test(&f.path) && !is_example(&f.path))
        .map(|mut f| {
            if let Some(end) = f.text.find(UNIT_TESTS) {
                f.text.truncate(end);
            }
            f
        })
}

fn is_example(path: &str) -> bool {
    let folders = ["/testing/", "/benches/", "/examples/"];
    folders.iter().any(|f| path.contains(f)) || path.ends_with("build.rs")
}

/// Room of the house that a file belongs to: a folder of the compiler, or a crate.
pub(super) fn room(path: &str) -> String {
    let rest = path.strip_prefix("compiler/src/");
    if let Some(rest) = rest {
        return match rest.split_once('/') {
            Some((folder, _)) => format!("compiler/src/{folder}"),
            None => "compiler/src".into(),
        };
    }
    let crates = ["compiler/cli", "compiler/solver", "runtime/emulator"];
    let nested = crates.iter().find(|c| path.starts_with(**c));
    let top = path.split('/').next().unwrap_or(path);
    nested.map_or(top, |c| c).into()
}
