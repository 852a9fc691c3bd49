//! Rules for every source file, and for the top level of the checkout.

use super::assert_none;
use super::sources::{File, files, is_test, root, rust_files};
use std::fs;

/// Rust files longer than this are asked to be split; tests and tables are exempt.
const MAX_LINES: usize = 1000;

/// The README is read in five minutes; the rest is in the guide.
const MAX_README_LINES: usize = 200;

/// Files that are mostly a table, by path from the root.
const TABLES: &[&str] = &["compiler/src/ir/ops/mod.rs", "compiler/src/ir/scalar.rs"];

/// Files above kernels and runtime that may contain unsafe code: they enter machine code that was
/// just made, read descriptors as bytes, or call NVRTC. Of the kit, those that read the parts of the file which the linker reserved, and
/// the interface of C.
const UNSAFE_FILES: &[&str] = &[
    "compiler/cli/src/image.rs",
    "compiler/src/codegen/cpu/link.rs",
    "compiler/src/codegen/cpu/tests/harness.rs",
    "compiler/src/codegen/cpu/kernels/weights.rs",
    "compiler/src/codegen/cuda/nvrtc/find.rs",
    "compiler/src/codegen/cuda/nvrtc/program.rs",
    "compiler/src/codegen/cuda/nvrtc/sys.rs",
    "runtime/kit/src/embedded.rs",
    "runtime/kit/src/host.rs",
    "runtime/kit/src/lib.rs",
    "runtime/kit/src/load.rs",
    "tests/tests/cuda.rs",
    "tests/tests/house_rules/files.rs",
    "tests/tests/images.rs",
];

/// DESIGN's top level; names that begin with a dot are allowed as well.
const TOP_LEVEL: &[&str] = &[
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "benches",
    "compiler",
    "kernels",
    "runtime",
    "target",
    "tests",
];

// Joined at compile time, so that this file does not break its own rules.
const LEFTOVERS: &[&str] = &[
    concat!("to", "do!("),
    concat!("unimple", "mented!("),
    concat!("db", "g!("),
    concat!("#[ign", "ore"),
];
const MACHINE_PATHS: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/Us", "ers/"),
    concat!("/tm", "p/"),
];

#[test]
fn rust_files_begin_with_a_module_doc() {
    let undocumented = |f: &File| !f.text.starts_with("//!");
    let missing = rust_files().filter(undocumented).map(|f| f.path).collect();
    assert_none(
        "begin the file with a `//!` line that says what it holds",
        missing,
    );
}

#[test]
fn rust_files_are_of_readable_length() {
    let long = rust_files()
        .filter(|f| !is_test(&f.path) && !TABLES.contains(&f.path.as_str()))
        .map(|f| (f.text.lines().count(), f.path))
        .filter(|(lines, _)| *lines > MAX_LINES)
        .map(|(lines, path)| format!("{path}: {lines} lines"))
        .collect();
    assert_none(&format!("split files of more than {MAX_LINES} lines"), long);
}

#[test]
fn the_readme_is_short() {
    let readme = File::read(root().join("README.md")).expect("there is a README");
    let lines = readme.text.lines().count();
    assert!(
        lines <= MAX_README_LINES,
        "README.md has {lines} lines, at most {MAX_README_LINES}: move a subject into the guide"
    );
}

#[test]
fn no_leftovers() {
    assert_none(
        "finish or remove",
        find(rust_files(), |line| {
            LEFTOVERS.iter().any(|l| line.contains(l))
        }),
    );
}

#[test]
fn no_paths_of_one_machine() {
    let texts = files().into_iter().filter_map(File::read);
    assert_none(
        "write paths relative to the repository",
        find(texts, has_machine_path),
    );
}

#[test]
fn unsafe_code_stays_in_its_files() {
    let above = ["compiler/", "benches/", "runtime/kit/", "tests/"];
    let (allowed, others): (Vec<File>, Vec<File>) = rust_files()
        .filter(|f| above.iter().any(|p| f.path.starts_with(p)))
        .partition(|f| UNSAFE_FILES.contains(&f.path.as_str()));
    assert_none(
        "unsafe code belongs to kernels, runtime and the files of the list",
        find(others.into_iter(), is_unsafe),
    );
    assert_eq!(
        allowed.len(),
        UNSAFE_FILES.len(),
        "all files of the list exist"
    );
    let tame = allowed
        .into_iter()
        .filter(|f| !f.text.lines().any(is_unsafe));
    assert_none(
        "take files without unsafe code off the list",
        tame.map(|f| f.path).collect(),
    );
}

fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or(line);
    ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"]
        .iter()
        .any(|u| code.contains(u))
}

#[test]
fn top_level_holds_what_the_design_names() {
    let strangers = fs::read_dir(root())
        .expect("the workspace root is readable")
        .map(|entry| {
            entry
                .expect("the workspace root is readable")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| !name.starts_with('.') && !TOP_LEVEL.contains(&name.as_str()))
        .collect();
    assert_none("move into a package, or amend the design", strangers);
}

#[test]
fn markdown_links_lead_somewhere() {
    let mut dead = Vec::new();
    for file in files()
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "md"))
        .filter_map(File::read)
    {
        let folder = root().join(&file.path);
        let folder = folder.parent().expect("a file has a folder");
        for target in links(&file.text).filter(|t| is_relative(t)) {
            let path = target.split('#').next().unwrap_or_default();
            if !path.is_empty() && !folder.join(path).exists() {
                dead.push(format!("{}: {target}", file.path));
            }
        }
    }
    assert_none("dead relative links", dead);
}

#[test]
fn rules_see_what_they_look_for() {
    assert!(has_machine_path(concat!("see /ho", "me/me/notes")));
    assert!(has_machine_path(concat!("\"/tm", "p/x\"")));
    assert!(!has_machine_path(concat!("crate/ho", "me/page")));
    assert_eq!(
        links("a [b](c.md#d) and [e](https://f.g)").collect::<Vec<_>>(),
        ["c.md#d", "https://f.g"]
    );
    assert!(
        rust_files().count() > 20,
        "the walk finds the workspace's sources"
    );
}

/// `path:line: text` for every line that matches.
fn find(files: impl Iterator<Item = File>, matches: impl Fn(&str) -> bool) -> Vec<String> {
    files
        .flat_map(|f| {
            let hits = f.text.lines().enumerate().filter(|(_, line)| matches(line));
            hits.map(|(k, line)| format!("{}:{}: {}", f.path, k + 1, line.trim()))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// True when an absolute path of somebody's machine starts in this line; `a/home/b` is not one.
fn has_machine_path(line: &str) -> bool {
    MACHINE_PATHS.iter().any(|path| {
        line.match_indices(path).any(|(at, _)| {
            !line[..at].ends_with(|c: char| c.is_alphanumeric() || ")}_-.*".contains(c))
        })
    })
}

/// Targets of inline links, `](target)`.
fn links(markdown: &str) -> impl Iterator<Item = &str> {
    markdown
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
}

/// Not a URL, and not a path of Rust items as in the crate's docs.
fn is_relative(target: &str) -> bool {
    !target.contains("://") && !target.starts_with("mailto:") && !target.contains("::")
}
