//! Real models end to end through the command line: small exports of both PyTorch exporters, and the trained digit classifier.

use std::path::{Path, PathBuf};

use crate::process::{Ended, gristmill};
use gristmill::testing::nvrtc_or_left_out;

#[test]
fn exports_agree_with_pytorch_on_one_thread() {
    check(&["--threads", "1"]);
}

#[test]
fn exports_agree_with_pytorch_on_two_threads() {
    check(&["--threads", "2"]);
}

#[test]
fn exports_agree_with_pytorch_on_two_devices() {
    check(&["--devices", "cpu:2"]);
}

#[test]
fn exports_agree_with_pytorch_on_emulated_gpus() {
    if nvrtc_or_left_out("models on emulated GPUs").is_some() {
        check(&["--devices", "emu:1"]);
        check(&["--devices", "emu:2"]);
    }
}

/// Each precision is as far from PyTorch's `f32` as the bits that it rounds operands to let expect, and no nearer: it is really used.
#[test]
fn lower_precision_changes_results_by_as_much_as_it_may() {
    if nvrtc_or_left_out("lower precision on emulated GPUs").is_none() {
        return;
    }
    // A rounding is half of the last bit; errors of some ten layers add up.
    for (precision, bits) in [("bf16", 8), ("f16", 11), ("tf32", 11)] {
        let args = [
            "run",
            "model.onnx",
            "--test-data",
            "test_data_set_0",
            "--devices",
            "emu:1",
            "--atol",
            "0.1",
        ];
        let ended = gristmill(
            &data("models").join("vit_dynamo"),
            &[&args[..], &["--precision", precision]].concat(),
        );
        assert_eq!(
            ended.code,
            Some(0),
            "{precision}: {}{}",
            ended.stdout,
            ended.stderr
        );
        assert!(
            ended
                .stderr
                .contains(&format!("{precision} instead of the model's precision")),
            "{}",
            ended.stderr
        );
        let error = ended
            .stdout
            .rsplit("over scale ")
            .next()
            .and_then(|e| e.trim().parse::<f64>().ok());
        let roundings = error.expect("the error is printed last") / 0.5f64.powi(bits);
        assert!(
            (0.05..4.0).contains(&roundings),
            "{precision}: {roundings} roundings\n{}",
            ended.stdout
        );
    }
}

/// Machine code for the kernels of small exports, an architecture each; how they run is tested on emulated GPUs.
#[test]
fn exports_compile_for_gpus() {
    if nvrtc_or_left_out("machine code of models").is_none() {
        return;
    }
    for (name, arch) in [
        ("resnet", "sm_75"),
        ("bert", "sm_86"),
        ("gpt2", "sm_89"),
        ("unet", "sm_120a"),
    ] {
        let args = [
            "dump",
            "model.onnx",
            "--stage",
            "ptx",
            "--devices",
            "emu:1",
            "--gpu-arch",
            arch,
        ];
        let ended = gristmill(&data("models").join(format!("{name}_dynamo")), &args);
        assert_eq!(ended.code, Some(0), "{name}: {}", ended.stderr);
        let kernels = ended.stdout.matches(&format!(".target {arch}")).count();
        assert!(kernels >= 5, "{name}: {kernels} kernels for {arch}");
    }
}

#[test]
fn digits_are_recognised_by_an_emulated_gpu() {
    if nvrtc_or_left_out("digits on an emulated GPU").is_some() {
        let args = [
            "run",
            "model.onnx",
            "--inputs",
            "batch.npz",
            "--labels",
            "labels.npy",
            "--devices",
            "emu:1",
        ];
        let ended = gristmill(&data("digits"), &args);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stdout.contains("356 of 360"), "{}", ended.stdout);
    }
}

#[test]
fn digits_are_recognised() {
    // As many as onnxruntime gets right; see `tests/data/digits/README.md`.
    let args = [
        "run",
        "model.onnx",
        "--inputs",
        "batch.npz",
        "--labels",
        "labels.npy",
    ];
    let ended = gristmill(&data("digits"), &args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("356 of 360"), "{}", ended.stdout);
}

/// Runs every export with `flags` and compares with PyTorch's outputs; reports all failures together.
fn check(flags: &[&str]) {
    let folder = data("models");
    let mut names: Vec<_> = std::fs::read_dir(&folder)
        .expect("the exports are in the repository")
        .map(|e| e.expect("the folder is readable").path())
        .filter(|p| p.is_dir())
        .collect();
    names.sort();
    assert_eq!(names.len(), 17, "exports in {}", folder.display());
    let wrong: Vec<_> = names
        .iter()
        .filter_map(|model| problem(model, flags))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {} models with {flags:?}:\n{}",
        wrong.len(),
        names.len(),
        wrong.join("\n")
    );
}

fn problem(model: &Path, flags: &[&str]) -> Option<String> {
    // The outputs reach from 0.03 (Swin) to 3 (BERT): no more than 1e-4 of the largest value in each.
    let fixed = [
        "run",
        "model.onnx",
        "--test-data",
        "test_data_set_0",
        "--rtol",
        "1e-4",
        "--atol",
        "3e-6",
    ];
    let Ended {
        code,
        status,
        stdout,
        stderr,
    } = gristmill(model, &[&fixed, flags].concat());
    (code != Some(0)).then(|| format!("{}: {status}\n{stdout}{stderr}", model.display()))
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}
