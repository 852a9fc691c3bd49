//! `compiler -> runtime -> kernels`, and no arrow turns back: what an AOT binary links stays small.

use std::{collections::BTreeSet, process::Command};

use super::assert_none;

/// Packages that belong to the compiler alone, by prefix of their name.
const COMPILER_ONLY: &[&str] = &["egg", "prost", "cranelift", "iced-x86", "clap", "serde_json", "indicatif"];

#[test]
fn runtime_knows_nothing_of_the_compiler() {
    forbid("gristmill-runtime", &["gristmill"], COMPILER_ONLY);
}

#[test]
fn kernels_know_nothing_of_runtime_and_compiler() {
    forbid("gristmill-kernels", &["gristmill", "gristmill-runtime"], COMPILER_ONLY);
    forbid("gristmill-kernels", &[], &["rayon", "cudarc", "npyz"]);
}

#[test]
fn the_emulator_knows_the_runtime_only_and_is_not_linked_below_the_compiler() {
    forbid("gristmill-emulator", &["gristmill"], COMPILER_ONLY);
    forbid("gristmill-emulated-cuda", &["gristmill"], COMPILER_ONLY);
    forbid("gristmill-runtime", &["gristmill-emulator"], &[]);
    forbid("gristmill-kernels", &["gristmill-emulator"], &[]);
}

#[test]
fn the_check_sees_edges() {
    let tree = dependencies("gristmill-runtime");
    assert!(tree.contains("gristmill-kernels") && tree.contains("rayon"), "{tree:?}");
}

fn forbid(package: &str, names: &[&str], prefixes: &[&str]) {
    let forbidden = |d: &String| names.contains(&d.as_str()) || prefixes.iter().any(|p| d.starts_with(p));
    let found = dependencies(package).into_iter().filter(forbidden).map(|d| format!("{package} -> {d}")).collect();
    assert_none("forbidden dependencies", found);
}

/// Names of all packages that `package` links, itself left out.
fn dependencies(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--locked", "--package", package, "--edges", "normal", "--prefix", "none", "--format", "{p}"])
        .output()
        .expect("cargo is there: it runs this test");
    assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("cargo prints UTF-8");
    text.lines().filter_map(|line| line.split(' ').next()).filter(|name| *name != package).map(str::to_owned).collect()
}
