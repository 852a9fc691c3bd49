//! `cargo run` at the top of the checkout means `gristmill`: a second binary would make it an error, and the README's commands with it.

use serde_json::Value;
use std::process::Command;

#[test]
fn cargo_run_has_one_binary() {
    let output = Command::new(env!("CARGO"))
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .args(["metadata", "--locked", "--no-deps", "--format-version", "1"])
        .output()
        .expect("cargo is there: it runs this test");
    assert!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let default = metadata["workspace_default_members"]
        .as_array()
        .expect("cargo lists what it builds by default");
    let list = |of: &Value, key: &str| of[key].as_array().cloned().unwrap_or_default();
    let mut binaries = Vec::new();
    for package in list(&metadata, "packages")
        .iter()
        .filter(|p| default.contains(&p["id"]))
    {
        let is_binary = |target: &&Value| list(target, "kind").iter().any(|kind| kind == "bin");
        let targets = list(package, "targets");
        binaries.extend(
            targets
                .iter()
                .filter(is_binary)
                .map(|t| format!("{} of {}", t["name"], package["name"])),
        );
    }
    assert_eq!(
        binaries,
        [r#""gristmill" of "gristmill-cli""#],
        "`cargo run` does not know which one is meant"
    );
}
