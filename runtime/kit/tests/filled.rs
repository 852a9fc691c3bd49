//! Filled runners: they give the answers of `gristmill run`, also after tools that rewrite executables, and damaged runners are refused.

use gristmill::{Options, aot, onnx};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

const RUNNER: &str = env!("CARGO_BIN_EXE_gristmill-runner");

fn data(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    folder.join("../../tests/data/digits").join(name)
}

/// A runner without debug information, as a kit has it, or with all where no tool takes it away.
fn runner() -> &'static [u8] {
    static RUNNER_BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    RUNNER_BYTES.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        let copy = folder.path().join("runner");
        fs::copy(RUNNER, &copy).unwrap();
        tool("strip", &["--strip-debug"], &copy);
        fs::read(copy).unwrap()
    })
}

/// Runs a tool on a file in place. False, with a line that says so, where there is none of that name.
fn tool(name: &str, arguments: &[&str], file: &Path) -> bool {
    match Command::new(name).args(arguments).arg(file).output() {
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {errors}");
            assert_eq!(errors, "", "{name} has nothing to warn of");
            true
        }
        Err(e) => {
            println!("skipped: {name}: {e}");
            false
        }
    }
}

/// The classifier of digits, for batches of some sizes.
fn digits(folder: &TempDir, sizes: &[usize]) -> PathBuf {
    let path = folder.path().join("digits");
    let model = onnx::load(data("model.onnx")).unwrap();
    let sizes = aot::Sizes::from([("batch".to_owned(), sizes.to_vec())]);
    aot::write_executable(&model, &Options::default(), &sizes, runner(), &path).unwrap();
    path
}

fn run(program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    // Nothing of the environment is needed, and no other file than those of arguments.
    command.env_clear().args(arguments);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs a program on the batch of the test data, and expects the answers of the compiler's command line.
fn check_answers(program: &Path) {
    let (inputs, labels) = (data("batch.npz"), data("labels.npy"));
    let flags = [
        "--inputs",
        inputs.to_str().unwrap(),
        "--labels",
        labels.to_str().unwrap(),
        "--threads=1",
    ];
    let output = run(program, &flags);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("(356 of 360)"), "{out}{err}");
}

/// Error text and exit code.
fn failure(program: &Path, arguments: &[&str]) -> (String, i32) {
    let output = run(program, arguments);
    assert_eq!(text(&output.stdout), "");
    (text(&output.stderr), output.status.code().unwrap())
}

#[test]
fn an_executable_gives_the_answers_and_survives_tools() {
    let folder = TempDir::new().unwrap();
    let program = digits(&folder, &[8, 360]);
    check_answers(&program);
    check_segments(&fs::read(&program).unwrap());
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "no temporary file stays: {left:?}");
    for (name, arguments) in [
        ("objcopy", &["--strip-debug"][..]),
        ("strip", &[]),
        ("eu-strip", &[]),
    ] {
        let copy = folder.path().join(name);
        fs::copy(&program, &copy).unwrap();
        if tool(name, arguments, &copy) {
            check_answers(&copy);
            check_segments(&fs::read(&copy).unwrap());
        }
    }
}

#[test]
fn kernels_are_symbols() {
    let folder = TempDir::new().unwrap();
    let program = digits(&folder, &[8]);
    let Ok(output) = Command::new("nm")
        .args(["-S", "--defined-only"])
        .arg(&program)
        .output()
    else {
        return println!("skipped: there is no nm");
    };
    let symbols = text(&output.stdout);
    let mut kernels = symbols
        .lines()
        .filter(|line| line.contains(" T main_graph_"));
    assert!(kernels.next().is_some(), "{symbols}");
}

#[test]
fn another_model_has_another_build_id() {
    let folder = TempDir::new().unwrap();
    let [one, other, same] = [&[8][..], &[9], &[8]].map(|sizes| {
        let bytes = fs::read(digits(&folder, sizes)).unwrap();
        (build_id(&bytes), bytes)
    });
    assert_ne!(one.0, build_id(runner()));
    assert_ne!(one.0, other.0);
    assert!(one == same, "the same model gives the same bytes");
}

#[test]
fn inputs_choose_the_variant() {
    let folder = TempDir::new().unwrap();
    let program = digits(&folder, &[8, 9]);
    let (message, code) = failure(&program, &[]);
    assert_eq!(code, 2);
    assert_eq!(
        message,
        "error: inputs are missing: image: f32[8, 1, 8, 8]; or image: f32[9, 1, 8, 8] (try: --inputs FILE.npz)\n"
    );
    let inputs = data("batch.npz");
    let (message, code) = failure(&program, &["--inputs", inputs.to_str().unwrap()]);
    assert_eq!(code, 2);
    assert_eq!(
        message,
        "error: the image has no code for image [360, 1, 8, 8]; it has image [8, 1, 8, 8]; image [9, 1, 8, 8]\n"
    );
}

#[test]
fn an_executable_says_what_it_needs() {
    let folder = TempDir::new().unwrap();
    let program = digits(&folder, &[8]);
    let info = text(&run(&program, &["--info"]).stdout);
    for line in [
        "input  image: f32[8, 1, 8, 8]",
        "variant batch=8: image [8, 1, 8, 8]",
    ] {
        assert!(info.contains(line), "{info}");
    }
    let json = text(&run(&program, &["--info", "--json"]).stdout);
    assert!(json.contains("\"format\": \"gristmill/info/1\""), "{json}");
    let (message, code) = failure(&program, &["--input"]);
    assert!(message.contains("did you mean --inputs?"), "{message}");
    assert_eq!(code, 2);
}

#[test]
fn a_runner_without_a_model_says_so() {
    let (message, code) = failure(Path::new(RUNNER), &["--info"]);
    assert!(
        message.contains("there is no model in this file"),
        "{message}"
    );
    assert_eq!(code, 3);
}

/// Fills a runner with a small model.
fn fill(runner: &[u8]) -> Result<(), String> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("digits");
    let model = onnx::load(data("model.onnx")).unwrap();
    let sizes = aot::Sizes::from([("batch".to_owned(), vec![1])]);
    let written = aot::write_executable(&model, &Options::default(), &sizes, runner, &path);
    let left = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, usize::from(written.is_ok()), "no other file stays");
    written.map(drop).map_err(|e| e.to_string())
}

#[test]
fn files_that_are_no_runner_are_refused() {
    let error = |bytes: &[u8]| fill(bytes).unwrap_err();
    assert_eq!(
        error(b"#!/bin/sh"),
        "the runner cannot be filled: it is no ELF file"
    );
    let gristmill = fs::read(std::env::current_exe().unwrap()).unwrap();
    assert_eq!(
        error(&gristmill),
        "the runner cannot be filled: it has no section .gm_head"
    );
    let mut other = runner().to_vec();
    other[18] = 8;
    let message = error(&other);
    assert!(message.contains("for machine 8 of ELF"), "{message}");
    let short = &runner()[..runner().len() / 2];
    assert_eq!(
        error(short),
        "the runner cannot be filled: it is damaged: it ends early"
    );
}

fn long(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

fn half(bytes: &[u8], at: usize) -> usize {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).into()
}

/// Program headers: kind, flags, and place in the file.
fn segments(bytes: &[u8]) -> Vec<(u32, u32, usize, usize)> {
    let (start, n) = (long(bytes, 32), half(bytes, 56));
    let entries = bytes[start..start + n * 56].chunks(56);
    let word = |e: &[u8], at: usize| u32::from_le_bytes(e[at..at + 4].try_into().unwrap());
    entries
        .map(|e| (word(e, 0), word(e, 4), long(e, 8), long(e, 32)))
        .collect()
}

/// No part of memory is writable and executable, and there are as many parts as in the runner.
fn check_segments(bytes: &[u8]) {
    let all = segments(bytes);
    assert_eq!(all.len(), segments(runner()).len());
    assert!(all.iter().all(|s| s.1 & 3 != 3), "{all:?}");
    let loaded = all.iter().filter(|s| s.0 == 1);
    let flags: Vec<u32> = loaded.map(|s| s.1).collect();
    assert!(flags.ends_with(&[4, 5, 6, 4]), "{flags:?}");
}

/// The contents of the note of a build.
fn build_id(bytes: &[u8]) -> Vec<u8> {
    let notes = segments(bytes).into_iter().filter(|s| s.0 == 4);
    let mut notes = notes.map(|s| &bytes[s.2..s.2 + s.3]);
    let name = *b"\x03\0\0\0GNU\0";
    notes
        .find_map(|note| {
            let at = note.windows(8).position(|w| w == name)?;
            Some(note[at + 8..at + 28].to_vec())
        })
        .unwrap()
}

/// A further kit, which the environment names: `GRISTMILL_RUNNER`, a static one for instance.
#[test]
fn a_further_runner_is_filled_as_well() {
    let Some(path) = std::env::var_os("GRISTMILL_RUNNER") else {
        return println!("skipped: GRISTMILL_RUNNER names no runner");
    };
    let folder = TempDir::new().unwrap();
    let program = folder.path().join("digits");
    let model = onnx::load(data("model.onnx")).unwrap();
    let sizes = aot::Sizes::from([("batch".to_owned(), vec![360])]);
    let runner = fs::read(path).unwrap();
    aot::write_executable(&model, &Options::default(), &sizes, &runner, &program).unwrap();
    check_answers(&program);
    for name in ["strip", "objcopy"] {
        if tool(name, &["--strip-debug"], &program) {
            check_answers(&program);
        }
    }
    let size = fs::metadata(&program).unwrap().len();
    println!("{} {size} bytes", text(&run(&program, &["--info"]).stdout));
}
