//! `--help`: groups of flags, and texts.

use super::run;
use std::fs;

const VERBS: [&str; 12] = [
    "run",
    "compile",
    "inspect",
    "check",
    "dump",
    "bench",
    "train",
    "place",
    "calibrate",
    "devices",
    "completions",
    "man",
];

/// Flags of the help's text with the heading each stands under.
fn flags(help: &str) -> Vec<(&str, &str)> {
    let mut heading = "";
    let mut found = Vec::new();
    for line in help.lines() {
        if let Some(title) = line.strip_suffix(':').filter(|t| !t.starts_with(' ')) {
            heading = title;
        }
        let text = line.trim_start();
        let is_flag = text.starts_with('-') && line.len() - text.len() <= 6;
        if let Some(flag) = text.split([' ', ',', '.']).find(|t| t.starts_with("--")) {
            found.extend(is_flag.then_some((heading, flag)));
        }
    }
    found
}

#[test]
fn flags_stand_in_groups() {
    for verb in VERBS {
        let (code, help, err) = run(&[verb, "--help"]);
        assert_eq!(code, 0, "{verb}: {err}");
        let flags = flags(&help);
        assert!(flags.contains(&("Output", "--color")), "{verb}: {flags:?}");
        let alone: Vec<&str> = flags
            .iter()
            .filter(|(heading, _)| *heading == "Options")
            .map(|(_, flag)| *flag)
            .filter(|flag| !["--help", "--timeout"].contains(flag))
            .collect();
        assert!(alone.is_empty(), "{verb}: without a heading: {alone:?}");
    }
    let (_, help, _) = run(&["run", "--help"]);
    let flags = flags(&help);
    let expected = [
        ("Inputs", "--set"),
        ("Devices and placement", "--pin"),
        ("Compilation", "--opt-level"),
        ("GPUs", "--precision"),
        ("Output", "--outputs"),
        ("Diagnostics", "--verbose"),
    ];
    for flag in expected {
        assert!(flags.contains(&flag), "{flag:?}: {flags:?}");
    }
}

#[test]
fn help_says_the_purpose_first() {
    let (_, help, _) = run(&["--help"]);
    let purpose = "Compile ONNX models, or gristmill graphs, to native code for this machine";
    assert!(help.starts_with(purpose), "{help}");
    assert!(help.contains("Fine-tune a model and save it with the new weights"));
}

#[test]
fn shells_complete_verbs_and_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, script, err) = run(&["completions", shell]);
        assert_eq!(code, 0, "{shell}: {err}");
        for word in ["opt-level", "calibrate"] {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
    }
    let (code, _, err) = run(&["completions", "cmd"]);
    assert!(code == 2 && err.contains("possible values: bash"), "{err}");
}

#[test]
fn every_verb_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    let (code, _, err) = run(&["man", pages.to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    for verb in VERBS {
        let page = fs::read_to_string(pages.join(format!("gristmill-{verb}.1")));
        let page = page.unwrap_or_else(|e| panic!("{verb}: {e}"));
        assert!(page.contains(".SH OPTIONS"), "{verb}: {page}");
    }
    let page = fs::read_to_string(pages.join("gristmill.1")).unwrap();
    assert!(page.contains("Fine\\-tune a model"), "{page}");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let (code, _, err) = run(&["man", file.to_str().unwrap()]);
    assert!(code == 2 && err.contains("file: "), "{err}");
}
