//! Models that are compiled to executables by the command line.

mod damage;

use crate::process::{Ended, gristmill, kit};
use gristmill::{Tensor, write_npz};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

/// Runs the compiler in a folder; it must end well.
fn compiled(folder: &Path, words: &[&str]) -> Ended {
    let ended = gristmill(folder, words);
    assert_eq!(ended.code, Some(0), "{words:?}: {}", ended.stderr);
    ended
}

/// Runs an executable, with nothing of the environment; gives exit code, output and errors.
fn run(program: &Path, folder: &Path, words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(program);
    command.env_clear().current_dir(folder).args(words);
    let output = loop {
        match command.output() {
            // A process that another thread starts has the file open for writing until it is another program.
            Err(e) if e.kind() == ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            output => break output.unwrap(),
        }
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn the_digits_are_an_executable() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("digits");
    let output = program.to_str().unwrap();
    let digits = data("digits");
    let model = ["compile", "model.onnx", "-o", output, "--kit", kit()];
    let sizes = ["--shape", "batch=1,360", "--name", "digits"];
    let said = compiled(&digits, &[&model[..], &sizes].concat()).stdout;
    assert!(said.contains("2 variants"), "{said}");
    let labels = ["--inputs", "batch.npz", "--labels", "labels.npy"];
    let (code, out, err) = run(&program, &digits, &labels);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("98.89 % (356 of 360)"), "{out}");
    let (code, out, _) = run(&program, &digits, &["--info"]);
    assert!(
        code == Some(0) && out.contains("image of \"digits\""),
        "{out}"
    );
    let (code, out, err) = run(&program, &digits, &["--inputs", "batch.npz", "--bench"]);
    assert!(code == Some(0) && out.contains("p50"), "{out}{err}");
    check_bench_keys(dir.path(), &program);
    let (code, _, err) = run(&program, &digits, &[]);
    assert!(
        code == Some(2) && err.contains("image: f32[360, 1, 8, 8]"),
        "{err}"
    );
    // Compiled again: the same bytes.
    let before = std::fs::read(&program).unwrap();
    compiled(&digits, &[&model[..], &sizes].concat());
    assert!(std::fs::read(&program).unwrap() == before);
    let large = [&model[..], &["--set", "batch=1", "--weights", "file"]].concat();
    compiled(&digits, &large);
    let (code, out, _) = run(&program, &digits, &["--info"]);
    assert!(code == Some(0) && out.contains("batch=1"), "{out}");
    std::fs::remove_file(dir.path().join("digits.weights")).unwrap();
    let (code, _, err) = run(&program, &digits, &["--info"]);
    assert!(
        code == Some(2) && err.contains("the weights of the image"),
        "{err}"
    );
}

/// Times of an executable have the keys that `gristmill bench` has for an image, as far as they have a meaning.
fn check_bench_keys(folder: &Path, program: &Path) {
    let digits = data("digits");
    let image = folder.join("digits.gmx");
    let image = image.to_str().unwrap();
    compiled(
        &digits,
        &["compile", "model.onnx", "--set", "batch=360", "-o", image],
    );
    let flags = ["--inputs", "batch.npz", "--bench", "--json"];
    let (_, own, err) = run(program, &digits, &flags);
    let words = ["bench", image, "--inputs", "batch.npz", "--iters", "2"];
    let other = compiled(&digits, &[&words[..], &["--json"]].concat()).stdout;
    let [own, other] = [own, other].map(|text| {
        let value: serde_json::Value = serde_json::from_str(&text).expect(&err);
        value.as_object().unwrap().clone()
    });
    assert_eq!(own["format"], "gristmill/bench/1");
    let unknown: Vec<_> = own.keys().filter(|key| !other.contains_key(*key)).collect();
    assert!(unknown.is_empty(), "{unknown:?} are not of {other:?}");
    assert!(own["load_ns"].as_f64() > Some(0.0) && own["in_flight"] == 1);
}

/// Errors of a verb for a file that is no model.
#[test]
fn an_executable_keeps_its_state_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("counter");
    let output = program.to_str().unwrap();
    let model = ["compile", "c/counter.ir", "-o", output, "--kit", kit()];
    compiled(&data("."), &model);
    let x = Tensor::from(vec![1f32, 2.0]);
    x.to_npy(dir.path().join("v.npy")).unwrap();
    write_npz(dir.path().join("x.npz"), [("x", &x)]).unwrap();
    let counted = |flags: &[&str]| {
        let words = [&["--inputs", "x.npz"], flags].concat();
        let (code, out, err) = run(&program, dir.path(), &words);
        (code, out + &err)
    };
    let (code, said) = counted(&["--variable", "v=v.npy", "--save-state", "s"]);
    assert!(
        code == Some(0) && said.contains("[2.000000, 4.000000]"),
        "{said}"
    );
    let (code, said) = counted(&["--state", "s", "--save-state", "s"]);
    assert!(
        code == Some(0) && said.contains("[3.000000, 6.000000]"),
        "{said}"
    );
    for (target, what) in [
        ("x.npz", "the file of --inputs"),
        ("counter", "the executable"),
    ] {
        let (code, said) = counted(&["--variable", "v=v.npy", "--save-state", target]);
        let expected = format!("--save-state {target}: refusing to overwrite {what}");
        assert!(code == Some(2) && said.contains(&expected), "{said}");
    }
    let of_model = ["run", "c/counter.ir", "--state"];
    let file = dir.path().join("s");
    let said = gristmill(
        &data("."),
        &[&of_model[..], &[file.to_str().unwrap()]].concat(),
    );
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let (code, said) = counted(&["--state", "x.npz"]);
    assert!(
        code == Some(2) && said.contains("not a safetensors file"),
        "{said}"
    );
}

fn refused(folder: &Path, words: &[&str]) -> String {
    let ended = gristmill(folder, words);
    assert_eq!(ended.code, Some(2), "{words:?}: {}", ended.stderr);
    ended.stderr
}

#[test]
fn a_small_main_stack_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("state");
    let words = ["compile", "two_assignments.ir", "-o"];
    let flags = [output.to_str().unwrap(), "--kit", kit()];
    compiled(&data("cases"), &[&words[..], &flags].concat());
    let x = Tensor::from_slice(&[1f32, -2.0], &[2]).unwrap();
    write_npz(dir.path().join("in.npz"), [("x", &x)]).unwrap();
    for flags in ["--info", "--inputs in.npz"] {
        let command = format!("ulimit -s 64 && exec ./state {flags}");
        let ended = Command::new("sh")
            .current_dir(dir.path())
            .args(["-c", &command])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{command}: {said}");
    }
}

#[test]
fn verbs_for_models_know_programs() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["state", "libstate.so"] {
        let output = dir.path().join(name);
        let words = ["compile", "two_assignments.ir", "-o"];
        let flags = [output.to_str().unwrap(), "--kit", kit()];
        compiled(&data("cases"), &[&words[..], &flags].concat());
    }
    for verb in ["inspect", "run", "check", "bench", "dump", "place"] {
        let said = refused(dir.path(), &[verb, "state"]);
        assert!(
            said.contains("state: an executable that holds a compiled model"),
            "{said}"
        );
        assert!(said.contains("describes itself with --info"), "{said}");
    }
    let said = refused(dir.path(), &["run", "libstate.so"]);
    assert!(
        said.contains("a shared library that holds a compiled model"),
        "{said}"
    );
    let said = refused(Path::new(kit()), &["inspect", "gristmill-runner"]);
    assert!(said.contains("a file of the kit"), "{said}");
    let test = std::env::current_exe().unwrap();
    let said = refused(dir.path(), &["inspect", test.to_str().unwrap()]);
    assert!(said.contains("an ELF file, not a model"), "{said}");
    std::fs::write(dir.path().join("text"), "a text").unwrap();
    let said = refused(dir.path(), &["inspect", "text"]);
    assert!(said.contains("not an ONNX model"), "{said}");
}

#[test]
fn a_part_of_an_executable_is_refused_and_a_variable_is_named_once() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("state");
    let output = program.to_str().unwrap();
    let words = ["compile", "two_assignments.ir", "-o", output];
    compiled(&data("cases"), &[&words[..], &["--kit", kit()]].concat());
    let (code, out, err) = run(&program, dir.path(), &["--info"]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(out.matches("variable v: f32[2]").count(), 1, "{out}");
    // All but the last part of the image: symbols and what else is behind it do not count.
    let bytes = std::fs::read(&program).unwrap();
    let head = bytes.windows(8).rposition(|w| w == b"GMIMAGE\0").unwrap();
    for end in [head, head + 1, head + 4096, head + 3 * 4096] {
        let part = dir.path().join(format!("part-{end}"));
        std::fs::copy(&program, &part).unwrap();
        let file = std::fs::File::options().write(true).open(&part).unwrap();
        file.set_len(end as u64).unwrap();
        drop(file);
        let (code, _, err) = run(&part, dir.path(), &["--info"]);
        assert!(
            code == Some(2) && err.contains("is damaged"),
            "{end}: {err}"
        );
    }
}

#[test]
#[cfg(unix)]
fn what_goes_through_a_pipe_is_the_executable_alone() {
    let ended = gristmill(
        &data("cases"),
        &[
            "compile",
            "two_assignments.ir",
            "-o",
            "/dev/stdout",
            "--kit",
            kit(),
        ],
    );
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("1 variant"), "{}", ended.stderr);
    assert!(!ended.stdout.contains("1 variant"));
    let words = ["compile", "two_assignments.ir", "--kit", kit(), "--json"];
    for output in ["/dev/stdout", "/dev/fd/1"] {
        let said = refused(&data("cases"), &[&words[..], &["-o", output]].concat());
        assert!(said.contains("are both standard output"), "{said}");
    }
}

#[test]
fn kits_that_do_not_fit_are_refused_by_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let digits = data("digits");
    let output = dir.path().join("digits");
    let refused = |kit: &Path, code: i32| {
        let (output, kit) = (output.to_str().unwrap(), kit.to_str().unwrap());
        let words = [
            "compile",
            "model.onnx",
            "--set",
            "batch=1",
            "-o",
            output,
            "--kit",
            kit,
        ];
        let ended = gristmill(&digits, &words);
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        ended.stderr
    };
    let absent = refused(dir.path(), 2);
    assert!(absent.contains("the kit has no file"), "{absent}");
    let own = dir.path().join("gristmill-runner");
    let bytes = std::fs::read(Path::new(kit()).join("gristmill-runner")).unwrap();
    std::fs::write(&own, &bytes[..bytes.len() / 2]).unwrap();
    let damaged = refused(dir.path(), 2);
    assert!(damaged.contains("the runner cannot be filled"), "{damaged}");
    let mut other = bytes.clone();
    let magic = other.windows(8).position(|w| w == b"GMDESCR1").unwrap();
    other[magic + 8 + 64] ^= 1;
    std::fs::write(&own, &other).unwrap();
    let version = refused(dir.path(), 3);
    assert!(
        version.contains("of another version than this program"),
        "{version}"
    );
    assert!(!output.exists());
}
