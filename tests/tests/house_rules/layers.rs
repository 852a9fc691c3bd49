//! `compiler -> runtime -> kernels`, and no arrow turns back: what an AOT binary links stays small.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use serde_json::Value;

use super::assert_none;

/// Packages that belong to the compiler alone, by prefix of their name.
const COMPILER_ONLY: &[&str] = &["egg", "prost", "cranelift", "clap"];

/// Packages that only several machines need, by prefix of their name.
const NETWORK_ONLY: &[&str] = &["tonic", "tokio", "hyper", "h2", "axum", "rustls"];

#[test]
fn the_network_is_in_one_package() {
    forbid("gristmill-remote", &["gristmill"], COMPILER_ONLY_BUT_PROST);
    forbid("gristmill-runtime", &["gristmill-remote"], NETWORK_ONLY);
    forbid("gristmill", &["gristmill-remote"], NETWORK_ONLY);
}

/// Packages of the compiler, without protocol buffers, which tasks speak.
const COMPILER_ONLY_BUT_PROST: &[&str] = &["egg", "cranelift", "clap"];

/// Packages that only the command line needs, by prefix of their name.
const COMMAND_LINE_ONLY: &[&str] = &["clap", "indicatif", "signal-hook"];

#[test]
fn the_library_knows_nothing_of_the_command_line() {
    forbid("gristmill", &["gristmill-cli"], COMMAND_LINE_ONLY);
}

#[test]
fn runtime_knows_nothing_of_the_compiler() {
    forbid("gristmill-runtime", &["gristmill"], COMPILER_ONLY);
}

#[test]
fn kernels_know_nothing_of_runtime_and_compiler() {
    forbid(
        "gristmill-kernels",
        &["gristmill", "gristmill-runtime"],
        COMPILER_ONLY,
    );
    forbid(
        "gristmill-kernels",
        &[],
        &["rayon", "cudarc", "npyz", "serde_json"],
    );
}

#[test]
fn the_emulator_knows_the_runtime_only_and_is_not_linked_below_the_compiler() {
    forbid("gristmill-emulator", &["gristmill"], COMPILER_ONLY);
    forbid("gristmill-emulated-cuda", &["gristmill"], COMPILER_ONLY);
    forbid("gristmill-runtime", &["gristmill-emulator"], &[]);
    forbid("gristmill-kernels", &["gristmill-emulator"], &[]);
}

#[test]
fn the_solver_knows_nothing_but_the_standard_library() {
    assert_eq!(dependencies("gristmill-solver"), BTreeSet::new());
}

/// All that a program for CPUs needs to run images. A further crate is argued for where it is added here;
/// those behind `half` and `zerocopy` are procedural macros, which no binary holds. `libm`, which needs
/// no other crate, replaces tables of the C library.
const BARE_RUNTIME: &[&str] = &[
    "cfg-if",
    "crc32fast",
    "gristmill-kernels",
    "half",
    "libc",
    "libm",
    "memmap2",
    "proc-macro2",
    "quote",
    "syn",
    "unicode-ident",
    "zerocopy",
    "zerocopy-derive",
];

#[test]
fn the_bare_runtime_links_no_more_than_it_needs() {
    let found = dependencies_with("gristmill-runtime", &["--no-default-features"]);
    let needed: BTreeSet<String> = BARE_RUNTIME.iter().map(|&n| n.to_owned()).collect();
    assert_eq!(found, needed);
}

#[test]
fn executables_link_the_bare_runtime_and_files_of_tensors() {
    let runtime = "gristmill-runtime";
    let files = ["--no-default-features", "--features", "npz,safetensors"];
    let mut needed = dependencies_with(runtime, &files);
    needed.insert(runtime.to_owned());
    assert_eq!(dependencies("gristmill-kit"), needed);
}

#[test]
fn the_check_sees_edges() {
    let tree = dependencies("gristmill-runtime");
    assert!(
        tree.contains("gristmill-kernels") && tree.contains("memmap2"),
        "{tree:?}"
    );
}

fn forbid(package: &str, names: &[&str], prefixes: &[&str]) {
    let forbidden =
        |d: &String| names.contains(&d.as_str()) || prefixes.iter().any(|p| d.starts_with(p));
    let found = dependencies(package)
        .into_iter()
        .filter(forbidden)
        .map(|d| format!("{package} -> {d}"))
        .collect();
    assert_none("forbidden dependencies", found);
}

/// Names of all packages that `package` links, itself left out.
fn dependencies(package: &str) -> BTreeSet<String> {
    dependencies_with(package, &[])
}

/// The same with further arguments of cargo.
fn dependencies_with(package: &str, arguments: &[&str]) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args([
            "tree",
            "--locked",
            "--package",
            package,
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ])
        .args(arguments)
        .output()
        .expect("cargo is there: it runs this test");
    assert!(
        output.status.success(),
        "cargo tree: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).expect("cargo prints UTF-8");
    text.lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| *name != package)
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_direct_dependency_is_named_in_its_crate() {
    let mut unused = Vec::new();
    for package in metadata()["packages"]
        .as_array()
        .expect("cargo lists packages")
    {
        let manifest = package["manifest_path"]
            .as_str()
            .expect("a package has a manifest");
        let sources = sources_below(
            Path::new(manifest)
                .parent()
                .expect("a manifest has a folder"),
        );
        for dependency in package["dependencies"]
            .as_array()
            .expect("cargo lists dependencies")
        {
            let name = dependency["rename"]
                .as_str()
                .or(dependency["name"].as_str())
                .expect("a dependency has a name");
            // A driver library that tests find beside their binary; no code names it.
            if name != "gristmill-emulated-cuda" && !names_crate(&sources, &name.replace('-', "_"))
            {
                unused.push(format!("{} -> {name}", package["name"]));
            }
        }
    }
    assert_none("remove dependencies that no source names", unused);
}

#[test]
fn names_of_crates_are_found() {
    assert!(names_crate("use regex_lite::Regex;", "regex_lite"));
    assert!(names_crate("#[derive(clap::Parser)]", "clap"));
    assert!(!names_crate("use my_clap::Args;", "clap"));
    assert!(!names_crate("// see iced_x86", "iced_x86"));
}

/// Whether a path begins with the crate's name.
fn names_crate(sources: &str, name: &str) -> bool {
    sources.match_indices(&format!("{name}::")).any(|(at, _)| {
        !sources[..at].ends_with(|before: char| before.is_alphanumeric() || "_:".contains(before))
    })
}

/// The text of all Rust files of a package, without those of packages in folders of its own.
fn sources_below(folder: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(folder).expect("a folder of the checkout is readable") {
        let path = entry.expect("a folder of the checkout is readable").path();
        if path.is_dir() && !path.join("Cargo.toml").exists() && !path.ends_with("target") {
            text += &sources_below(&path);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text += &fs::read_to_string(&path).expect("a source file is text");
        }
    }
    text
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["metadata", "--locked", "--no-deps", "--format-version", "1"])
        .output()
        .expect("cargo is there: it runs this test");
    assert!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("cargo prints JSON")
}
