//! Values of flags beyond what is possible, and memory that does not suffice.

use super::{data, run};
use crate::process::{Start, gristmill, start};

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let model = data("digits/model.onnx");
    let cases: [(&[&str], &str); 10] = [
        (&["run", &model, "--rtol", "nan"], "finite number"),
        (&["run", &model, "--rtol=-1e-3"], "finite number"),
        (&["run", &model, "--atol", "nan"], "finite number"),
        (&["run", &model, "--atol=-1"], "finite number"),
        (&["bench", &model, "--duration", "nan"], "seconds from 0"),
        (&["bench", &model, "--duration", "inf"], "seconds from 0"),
        (&["bench", &model, "--duration", "1e400"], "seconds from 0"),
        (&["bench", &model, "--duration=-1"], "seconds from 0"),
        (&["run", &model, "--devices", ""], "names no device"),
        (&["devices", "--devices", ""], "names no device"),
    ];
    for (args, text) in cases {
        let (code, _, err) = run(args);
        assert_eq!(code, 2, "{args:?}: {err}");
        assert!(err.contains(text), "{args:?}: {err}");
    }
}

#[test]
fn sizes_of_dims_are_bounded() {
    let model = data("digits/model.onnx");
    for verb in ["run", "check", "dump", "place", "inspect"] {
        for size in [
            "18446744073709551615",
            "9223372036854775808",
            "1099511627777",
        ] {
            let set = format!("batch={size}");
            let (code, _, err) = run(&[verb, &model, "--set", &set]);
            assert_eq!(code, 2, "{verb} {size}: {err}");
            let text = format!("{size} is too large, sizes go up to 1099511627776");
            assert!(err.contains(&text), "{verb}: {err}");
        }
    }
}

/// Inputs of 15 GB: a plan needs their shapes only.
#[test]
fn a_plan_makes_no_inputs() {
    let model = data("digits/model.onnx");
    for verb in [&["place"][..], &["dump", "--stage", "placed"]] {
        let args = [verb, &[&model, "--set", "batch=60000000"]].concat();
        let (code, out, err) = run(&args);
        assert_eq!(code, 0, "{args:?}: {err}");
        assert!(out.contains("predicted"), "{out}");
    }
}

/// The result takes 240 MB; its summary, its comparison and random values take no more than that again.
#[cfg(target_os = "linux")]
#[test]
fn summaries_and_random_inputs_take_no_copies() {
    let folder = tempfile::tempdir().unwrap();
    let large = "graph \"g\" {\n%0 = input \"x\": u8[]\n%1: u8[60000000] = broadcast(%0) {shape = [60000000]}\noutput \"y\" %1\n}\n";
    let random = "graph \"g\" {\n%0 = input \"x\": u8[60000000]\n%1: u8[1] = slice(%0) {starts = [0], sizes = [1], steps = [1]}\noutput \"y\" %1\n}\n";
    for text in [large, random] {
        std::fs::write(folder.path().join("m.ir"), text).unwrap();
        let ended = start(
            Start {
                folder: folder.path(),
                shell: "ulimit -v 480000",
                ..Start::default()
            },
            &["run", "m.ir", "--threads", "1"],
        );
        assert_eq!(ended.code, Some(0), "{}{}", ended.status, ended.stderr);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn out_of_memory_is_an_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    // Sparse: it takes no room on the disk.
    let file = std::fs::File::create(folder.path().join("m.ir")).unwrap();
    file.set_len(1 << 30).unwrap();
    let ended = start(
        Start {
            folder: folder.path(),
            shell: "ulimit -v 600000",
            ..Start::default()
        },
        &["run", "m.ir"],
    );
    assert_eq!(ended.code, Some(5), "{}{}", ended.status, ended.stderr);
    assert!(ended.stderr.contains("out of memory"), "{}", ended.stderr);
}

#[test]
fn flags_for_gpus_say_that_there_is_none() {
    let model = data("digits/model.onnx");
    let flags = ["--tune", "--visible-gpus", "0"];
    let (code, _, err) = run(&[&["run", &model, "--set", "batch=1"], &flags[..]].concat());
    assert_eq!(code, 0, "{err}");
    for flag in ["--tune", "--visible-gpus"] {
        let warning = format!("warning: {flag} changes nothing: no device is a GPU");
        assert!(err.contains(&warning), "{err}");
    }
}

#[test]
fn stages_of_absent_machines_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("gpus.toml"), super::TARGET).unwrap();
    let model = data("digits/model.onnx");
    for (stage, text) in [
        ("rewritten", "graph \"main_graph\""),
        ("placed", "/device:GPU:0"),
        ("partitions", "// /device:GPU:0"),
        ("cuda", "__global__"),
    ] {
        let args = [
            "dump",
            &model,
            "--set",
            "batch=2",
            "--target",
            "gpus.toml",
            "--stage",
            stage,
        ];
        let ended = gristmill(folder.path(), &args);
        assert_eq!(ended.code, Some(0), "{stage}: {}", ended.stderr);
        assert!(ended.stdout.contains(text), "{stage}: {}", ended.stdout);
    }
}
