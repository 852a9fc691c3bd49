//! Our packages are MIT OR Apache-2.0, and everything they link may be shipped with them.

use std::process::Command;

use serde_json::Value;

use super::assert_none;

const OURS: &str = "MIT OR Apache-2.0";

/// Licences that ask for no more than a notice (or, MPL-2.0, for changes to the library's own files).
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

#[test]
fn every_package_of_the_workspace_says_its_licence() {
    let wrong = packages()
        .iter()
        .filter(|p| p["source"].is_null() && p["license"] != OURS)
        .map(|p| format!("{}: {}", p["name"], p["license"]))
        .collect();
    assert_none(&format!("set `license.workspace = true` ({OURS})"), wrong);
}

#[test]
fn dependencies_have_permissive_licences() {
    let packages = packages();
    assert!(packages.len() > 50, "the list of packages is whole");
    let wrong = packages
        .iter()
        .filter(|p| !p["license"].as_str().is_some_and(permits))
        .map(|p| format!("{} {}: {}", p["name"], p["version"], p["license"]))
        .collect();
    assert_none("licence missing, or not on the list", wrong);
}

#[test]
fn licence_expressions() {
    for good in [
        "MIT",
        "MIT/Apache-2.0",
        "Unlicense / MIT",
        "MIT OR LGPL-2.1-or-later",
        "(GPL-3.0 OR MIT) AND Unicode-3.0",
    ] {
        assert!(permits(good), "{good}");
    }
    for bad in [
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(MIT OR ISC) AND GPL-2.0",
        "",
        "MIT OR",
    ] {
        assert!(!permits(bad), "{bad}");
    }
}

/// Packages of the lock file that this platform builds.
fn packages() -> Vec<Value> {
    let host = host();
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args([
            "metadata",
            "--locked",
            "--format-version",
            "1",
            "--filter-platform",
            &host,
        ])
        .output()
        .expect("cargo is there: it runs this test");
    assert!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut metadata: Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let Value::Array(packages) = metadata["packages"].take() else {
        panic!("cargo metadata lists packages")
    };
    packages
}

fn host() -> String {
    let output = Command::new(env!("CARGO"))
        .arg("-vV")
        .output()
        .expect("cargo is there: it runs this test");
    let text = String::from_utf8(output.stdout).expect("cargo prints UTF-8");
    text.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .expect("cargo names its host")
        .to_owned()
}

/// Whether an SPDX expression can be met with licences of the list alone. The old `A/B` means `A OR B`.
fn permits(expression: &str) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut tokens = spaced.split_whitespace().peekable();
    any_of(&mut tokens) == Some(true) && tokens.next().is_none()
}

type Tokens<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// `None` where the expression is malformed.
fn any_of(tokens: &mut Tokens) -> Option<bool> {
    let mut met = all_of(tokens)?;
    while tokens.next_if_eq(&"OR").is_some() {
        met |= all_of(tokens)?;
    }
    Some(met)
}

fn all_of(tokens: &mut Tokens) -> Option<bool> {
    let mut met = one(tokens)?;
    while tokens.next_if_eq(&"AND").is_some() {
        met &= one(tokens)?;
    }
    Some(met)
}

fn one(tokens: &mut Tokens) -> Option<bool> {
    let name = tokens.next()?;
    if name == "(" {
        let met = any_of(tokens)?;
        return (tokens.next() == Some(")")).then_some(met);
    }
    Some(match tokens.next_if_eq(&"WITH") {
        Some(_) => ALLOWED.contains(&format!("{name} WITH {}", tokens.next()?).as_str()),
        None => ALLOWED.contains(&name),
    })
}
