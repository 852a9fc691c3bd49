//! Malformed, truncated and hostile models end in an error a person can act on: never a crash, a
//! hang or unbounded memory.
//!
//! The models and what may become of each are in `tests/data/hostile/`; `make.py` there says how
//! they were made.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use serde_json::Value;

use crate::process::{Ended, gristmill};

#[test]
fn check_survives_every_hostile_model() {
    survive("check");
}

#[test]
fn run_survives_every_hostile_model() {
    survive("run");
}

#[test]
fn check_and_run_refuse_the_same_models() {
    let refuses = |verb: &str, file: &str| gristmill(&folder(), &[verb, file]).code == Some(3);
    let listed = expected().into_iter();
    let ending = listed.filter(|(_, about)| !about["run"].is_null());
    let differ = ending.filter(|(file, _)| refuses("check", file) != refuses("run", file));
    let differ: Vec<String> = differ.map(|(file, _)| file).collect();
    assert!(
        differ.is_empty(),
        "exit code 3 of one verb alone: {differ:?}"
    );
}

/// A model without an end is compiled like any other: only a run computes it.
#[test]
fn only_run_computes_a_loop() {
    let endless = expected()
        .into_iter()
        .filter(|(_, about)| about["run"].is_null());
    let files: Vec<String> = endless.map(|(file, _)| file).collect();
    assert!(!files.is_empty());
    for file in &files {
        for args in [
            &["inspect", file][..],
            &["dump", file, "--stage", "placed"],
            &["dump", file, "--stage", "asm"],
            &["place", file],
        ] {
            let ended = gristmill(&folder(), args);
            assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
        }
    }
}

#[test]
fn every_hostile_model_is_listed() {
    let files = std::fs::read_dir(folder())
        .expect("the corpus is in the repository")
        .map(|e| {
            e.expect("the corpus is readable")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| name.ends_with(".onnx"));
    let mut files: Vec<_> = files.collect();
    files.sort();
    assert_eq!(files, expected().into_keys().collect::<Vec<_>>());
}

/// Runs `gristmill VERB FILE` on the corpus, two at a time, and reports every wrong end together.
/// Models that list no exit code for the verb are left out.
fn survive(verb: &str) {
    let listed = expected().into_iter();
    let cases: Vec<_> = listed.filter(|(_, about)| !about[verb].is_null()).collect();
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((file, about)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let ended = gristmill(&folder(), &[verb, file]);
                    if let Some(problem) = problem(&ended, &about[verb]) {
                        let line = format!(
                            "{file} ({}): {problem}",
                            about["why"].as_str().unwrap_or_default()
                        );
                        wrong
                            .lock()
                            .expect("no thread panics while it holds the list")
                            .push(line);
                    }
                }
            });
        }
    });
    let mut wrong = wrong
        .into_inner()
        .expect("no thread panics while it holds the list");
    wrong.sort();
    assert!(
        wrong.is_empty(),
        "{} of {} models end wrongly:\n  {}\n",
        wrong.len(),
        cases.len(),
        wrong.join("\n  ")
    );
}

/// What is wrong with how a run ended, if anything.
fn problem(ended: &Ended, allowed: &Value) -> Option<String> {
    let last = ended
        .stderr
        .lines()
        .rfind(|l| !l.trim().is_empty())
        .unwrap_or_default();
    let codes = allowed
        .as_array()
        .expect("`expected.json` lists exit codes");
    if !ended
        .code
        .is_some_and(|c| codes.iter().any(|a| a.as_i64() == Some(i64::from(c))))
    {
        return Some(format!("{}, allowed {allowed}: {last}", ended.status));
    }
    if ended.code != Some(0) && last.is_empty() {
        return Some(format!("{}, and nothing said on stderr", ended.status));
    }
    None
}

fn expected() -> BTreeMap<String, Value> {
    let text =
        std::fs::read_to_string(folder().join("expected.json")).expect("the corpus has a list");
    serde_json::from_str(&text).expect("the list is JSON")
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/hostile")
}
