//! Standard output and standard error: failed writes, colours, names that would move the cursor, very long errors.

use super::data;
use crate::process::{Ended, Start, gristmill, gristmill_with, start};
use std::fs::OpenOptions;
use std::path::Path;

fn full() -> Option<std::fs::File> {
    OpenOptions::new().write(true).open("/dev/full").ok()
}

#[cfg(target_os = "linux")]
#[test]
fn a_failed_write_of_results_is_an_error() {
    let model = data("digits/model.onnx");
    let verbs: [&[&str]; 6] = [
        &["run", &model, "--set", "batch=1"],
        &["dump", &model, "--set", "batch=1", "--stage", "asm"],
        &["place", &model, "--set", "batch=1", "--json"],
        &["inspect", &model],
        &["check", &model],
        &["--help"],
    ];
    for args in verbs {
        let ended = start(
            Start {
                stdout: full(),
                ..Start::default()
            },
            args,
        );
        assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.stderr);
        let error = "error: cannot write to standard output: ";
        assert!(ended.stderr.contains(error), "{args:?}: {}", ended.stderr);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_failed_write_of_messages_is_no_error() {
    let ended = start(
        Start {
            stderr: full(),
            ..Start::default()
        },
        &["run", &data("digits/model.onnx"), "--set", "batch=1"],
    );
    assert_eq!(ended.code, Some(0), "{}", ended.stdout);
    assert!(ended.stdout.contains("probabilities: f32[1, 10]"));
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_is_quiet() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let ended = start(
        Start {
            stdout: Some(std::os::fd::OwnedFd::from(writer).into()),
            ..Start::default()
        },
        &["inspect", &data("digits/model.onnx")],
    );
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
}

/// A model whose names hold line feeds and escape sequences of terminals.
const HOSTILE: &str = r#"graph "g" {
  %0 = input "in\n\u{1b}[2Jput": f32[2]
  %1: f32[2] = neg(%0) @ "x\n\u{1b}[2J error: forged"
  %2: f32[2] = exp(%1) @ "y\r\u{9b}31m"
  output "out\n\u{1b}[2Jput" %2
}
"#;

#[test]
fn names_do_not_move_the_cursor() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("m.ir"), HOSTILE).unwrap();
    let verbs: [&[&str]; 8] = [
        &["run", "m.ir", "--opt-level", "0", "-vvv"],
        &["inspect", "m.ir"],
        &["check", "m.ir"],
        &["dump", "m.ir", "--stage", "schedule", "--opt-level", "0"],
        &["bench", "m.ir", "--iters", "1", "--profile"],
        &["place", "m.ir", "--devices", "cpu:2", "--explain"],
        &[
            "place",
            "m.ir",
            "--log-device-placement",
            "--opt-level",
            "0",
        ],
        &["run", "m.ir", "--pin", "nothing=cpu:0"],
    ];
    for args in verbs {
        let ended = gristmill(folder.path(), args);
        let text = ended.stdout + &ended.stderr;
        assert!(
            !text.contains(['\u{1b}', '\r', '\u{9b}']),
            "{args:?}: {text}"
        );
        for line in text.lines() {
            assert!(!line.starts_with("\\u{1b}"), "{args:?}: {text}");
            assert!(
                !line.trim_start().starts_with("error: forged"),
                "{args:?}: {text}"
            );
        }
    }
}

#[test]
fn quiet_leaves_results_warnings_and_errors() {
    let model = data("digits/model.onnx");
    let plain: &[&str] = &["run", &model, "--set", "batch=1"];
    let go = |flags: &[&str]| gristmill(Path::new("."), &[plain, flags].concat());
    let (loud, quiet) = (go(&[]), go(&["--quiet"]));
    assert!(loud.stderr.contains("random inputs"), "{}", loud.stderr);
    assert_eq!((quiet.code, quiet.stderr.as_str()), (Some(0), ""));
    assert_eq!(quiet.stdout.lines().next(), loud.stdout.lines().next());
    let warned = go(&["-q", "--tune"]);
    let warning = "warning: --tune changes nothing: no device is a GPU\n";
    assert_eq!(warned.stderr, warning);
    let wrong = go(&["--quiet", "--set", "bach=2"]);
    assert_eq!(wrong.code, Some(2));
    assert!(wrong.stderr.starts_with("error: "), "{}", wrong.stderr);
}

/// A build that fails at once shows the line of progress, without a minute of compiling.
#[cfg(unix)]
#[test]
fn the_build_of_the_kit_is_announced_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (model, cache) = (data("digits/model.onnx"), folder.path().join("cache"));
    let build = |flags: &[&str]| {
        let variables = [
            ("GRISTMILL_CACHE_DIR", cache.as_path()),
            ("GRISTMILL_KIT", Path::new("")),
            ("CARGO", Path::new("false")),
        ];
        let args = ["compile", &model, "--set", "batch=1", "-o", "digits"];
        let ended = gristmill_with(folder.path(), &variables, &[&args, flags].concat());
        assert_eq!(ended.code, Some(3), "{}", ended.stderr);
        ended.stderr
    };
    let said = build(&[]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert_eq!(lines[0], "building gristmill-runner (once)");
    let error = "error: the kit cannot be built";
    assert!(lines[1].starts_with(error), "{said}");
    assert!(build(&["--quiet"]).starts_with(error));
}

#[test]
fn labels_are_coloured_on_request() {
    let failing =
        |args: &[&str]| gristmill(Path::new("."), &[&["run", "none.onnx"], args].concat());
    let text = |ended: Ended| ended.stderr;
    assert!(text(failing(&[])).starts_with("error: "));
    assert!(text(failing(&["--color", "never"])).starts_with("error: "));
    let colored = text(failing(&["--color", "always"]));
    assert!(
        colored.starts_with("\u{1b}[1;31merror:\u{1b}[0m "),
        "{colored:?}"
    );
    let usage = text(failing(&["--color", "always", "--no-such-flag"]));
    assert!(usage.contains('\u{1b}'), "{usage:?}");
    assert_eq!(failing(&["--color", "blue"]).code, Some(2));
}

#[test]
fn errors_of_a_million_lines_are_shortened() {
    let folder = tempfile::tempdir().unwrap();
    let wrong: String = (0..100_000).map(|i| format!("wrong {i}\n")).collect();
    std::fs::write(folder.path().join("p"), format!("plan/1\n{wrong}")).unwrap();
    let model = data("digits/model.onnx");
    let args = [
        "place",
        &model,
        "--set",
        "batch=1",
        "--devices",
        "cpu:2",
        "--plan",
        "p",
    ];
    let ended = gristmill(folder.path(), &args);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.len() < 20_000, "{} bytes", ended.stderr.len());
    assert!(ended.stderr.contains("more lines"), "{}", ended.stderr);
}
