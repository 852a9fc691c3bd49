//! Models that are compiled to shared libraries, as programs in C, C++ and Python use them.

use crate::process::{gristmill, kit};
use std::path::{Path, PathBuf};
use std::process::Command;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

/// Compiles a model of the test data; gives the errors of a compilation that is to fail with a code.
fn compile(model: &str, output: &Path, flags: &[&str], code: i32) -> String {
    let output = output.to_str().unwrap();
    let words = ["compile", model, "-o", output, "--kit", kit()];
    let ended = gristmill(&data("."), &[&words[..], flags].concat());
    assert_eq!(ended.code, Some(code), "{model}: {}", ended.stderr);
    ended.stderr
}

/// A folder with the libraries of the digits, of a counter, of a wide sum, and of a model with odd names.
fn libraries() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let sizes = ["--shape", "batch=1,8"];
    compile(
        "digits/model.onnx",
        &dir.path().join("libdigits.so"),
        &sizes,
        0,
    );
    compile("c/counter.ir", &dir.path().join("libcounter.so"), &[], 0);
    compile("c/wide.ir", &dir.path().join("libwide.so"), &[], 0);
    compile("c/names.ir", &dir.path().join("libclass.so"), &[], 0);
    dir
}

/// Runs a command in a folder, which must end well; gives its output. `None`, with a line that says so, without such a program.
fn run(folder: &Path, words: &[&str]) -> Option<String> {
    let output = Command::new(words[0])
        .current_dir(folder)
        .args(&words[1..])
        .output();
    let Ok(output) = output else {
        println!("left out: {}: there is no such program", words[0]);
        return None;
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{words:?}: {out}{err}");
    Some(out)
}

#[test]
fn c_and_cpp_use_several_models_in_one_program() {
    let dir = libraries();
    let source = data("c/use.c");
    let source = source.to_str().unwrap();
    let strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-I."];
    let linked = [
        "-L.",
        "-ldigits",
        "-lcounter",
        "-lwide",
        "-lpthread",
        "-Wl,-rpath,$ORIGIN",
        "-o",
        "use",
    ];
    for language in [
        &["cc", "-std=c99"][..],
        &["clang", "-std=c99"],
        &["c++", "-std=c++11", "-x", "c++"],
    ] {
        let words = [language, &strict, &[source, "-x", "none"], &linked].concat();
        if run(dir.path(), &words).is_some() {
            let said = run(dir.path(), &["./use", "100"]);
            assert_eq!(said.as_deref(), Some("ok\n"), "{language:?}");
        }
    }
}

#[test]
fn python_uses_the_module_beside_a_library() {
    let dir = libraries();
    let root = data("../../.venv/bin/python");
    let pythons = [root.to_str().unwrap(), "python3"];
    let has_numpy = |python: &&str| {
        let mut command = Command::new(python);
        let status = command.args(["-c", "import numpy"]).output();
        status.is_ok_and(|output| output.status.success())
    };
    let Some(python) = pythons.into_iter().find(has_numpy) else {
        println!("left out: Python with NumPy");
        return;
    };
    let folder = dir.path().to_str().unwrap();
    let (script, digits) = (data("c/use.py"), data("digits"));
    let words = [
        python,
        script.to_str().unwrap(),
        folder,
        digits.to_str().unwrap(),
    ];
    assert_eq!(run(dir.path(), &words).as_deref(), Some("ok\n"));
}

#[test]
fn names_of_libraries_are_identifiers() {
    let dir = tempfile::tempdir().unwrap();
    let header = |file: &str, name: &str, flags: &[&str]| {
        compile("c/counter.ir", &dir.path().join(file), flags, 0);
        std::fs::read_to_string(dir.path().join(name)).unwrap()
    };
    let text = header("2 models.so", "_2_models.h", &[]);
    assert!(text.contains("_2_models_open("), "{text}");
    let text = header("counter.so", "counter.h", &[]);
    assert!(
        text.contains("counter_run(counter_model *model, const float *x, float *sum)"),
        "{text}"
    );
    assert!(dir.path().join("counter_model.py").exists());
    let text = header("libcounter.so", "mine.h", &["--name", "mine"]);
    assert!(
        text.contains("MINE_SUM_LEN 2") && dir.path().join("mine.py").exists(),
        "{text}"
    );
    let long = ["--name", &"m".repeat(60)];
    let said = compile("c/counter.ir", &dir.path().join("long.so"), &long, 2);
    assert!(said.contains("at most 47 letters"), "{said}");
    let runner = Path::new(kit()).join("gristmill-runner");
    let own = dir.path().join("kit");
    std::fs::create_dir(&own).unwrap();
    std::fs::copy(runner, own.join("libgristmill_kit.so")).unwrap();
    let words = [
        "compile",
        "c/counter.ir",
        "-o",
        "/dev/null.so",
        "--kit",
        own.to_str().unwrap(),
    ];
    let ended = gristmill(&data("."), &words);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("no names that are reserved"),
        "{}",
        ended.stderr
    );
}
